"""`gemmkit.lang.checks`: what is asked of functions and fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from gemmkit.lang.checks import required


def scaled(x: Any, by: Any = 2, /, *, twice: bool = False) -> Any:
    return x * by * (1 + twice)


@functools.wraps(scaled)
def wrapping(*arguments: Any) -> Any:
    return scaled(*arguments)


class Scaled:
    def __call__(self, x: Any, m: int, n: int = 0) -> Any:
        return x


def with_signature(x: Any) -> Any:
    return x


with_signature.__signature__ = inspect.signature(lambda x, y: x)                                 # type: ignore[attr-defined]

def noted(x: Any, y: Any) -> Any:
    return x


noted.seen = True                                                                                # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [
    lambda: 0, lambda x: x, lambda x, y=1: x, lambda x, /, y: x, scaled, wrapping, Scaled.__call__, Scaled().__call__,
    Scaled(), with_signature, noted, lambda x, *, y=1: x,
])
def test_what_a_function_requires_is_what_its_signature_says(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert required(function) == sum(p.default is p.empty and p.kind is not p.KEYWORD_ONLY for p in parameters)


def test_its_code_may_change() -> None:
    def f(x: Any) -> Any:
        return x

    def g(x: Any, y: Any) -> Any:
        return x

    assert required(f) == 1
    f.__code__ = g.__code__
    assert required(f) == 2
    f.__defaults__ = (0,)
    assert required(f) == 1


@pytest.mark.parametrize(("function", "words"), [
    (lambda *x: x, "takes *x"), (lambda **x: x, "takes **x"), (lambda x, *, y: x, "requires the keyword y"),
    (lambda x, *, y=1, z: x, "requires the keyword z"),
])
def test_what_cannot_be_called_by_position_is_said(function: Callable[..., Any], words: str) -> None:
    assert words in str(required(function))
