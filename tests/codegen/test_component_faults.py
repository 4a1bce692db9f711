"""Mistakes in components: each is told with the line of the user, and what would do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import transforms
from tests.codegen.test_components import compact, kernel_of, transforming
from tests.support.harness import Out, compiled

F4 = np.dtype("f4")


HERE = Path(__file__)


def line_of(marker: str) -> int:
    """The number of the line in this file that ends with the comment ``# marker``."""
    (number,) = (n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {marker}"))
    return number


def no_such_method(x: Any) -> Any:
    return x.clipped(0, 1)  # DEEP


@dataclass(frozen=True)
class WrongAttribute(transforms.Transform):
    def __call__(self, x):
        return x + self.no_such_field  # FIELD


@dataclass(frozen=True)
class WrongCall(transforms.Transform):
    def __call__(self, x):
        y = x * 2
        return math.exp(y, 3)  # CALL


@dataclass(frozen=True)
class WrongHelper(transforms.Transform):
    def __call__(self, x):
        return 1 + no_such_method(x)


@dataclass(frozen=True)
class WrongArguments(transforms.Transform):
    def __call__(self, x):
        return two_numbers(x)  # ARGUMENTS


@dataclass(frozen=True)
class WrongMethod(transforms.Transform):
    def __call__(self, x):
        return self.other(x)

    def other(self, x):
        return x + "one"  # METHOD


@dataclass(frozen=True)
class Recursive(transforms.Transform):
    def __call__(self, x):
        return factorial(x)


def two_numbers(x: Any, y: Any) -> Any:
    return x + y


def factorial(n: Any) -> Any:
    return 1 if n <= 1 else n * factorial(n - 1)  # RECURSION


WRONG: dict[str, tuple[Any, str, str, str]] = {
    "an unknown field": (WrongAttribute(), "WrongAttribute.__call__", "FIELD", "no_such_field"),
    "a call with too many arguments": (WrongCall(), "WrongCall.__call__", "CALL", "exp"),
    "a helper's mistake": (WrongHelper(), "no_such_method", "DEEP", "clipped"),
    "a call with too few arguments": (WrongArguments(), "WrongArguments.__call__", "ARGUMENTS", "'y'"),
    "a method's mistake": (WrongMethod(), "WrongMethod.other", "METHOD", "one"),
    "recursion": (Recursive(), "factorial", "RECURSION", "calls itself"),
    "a lambda's mistake": (transforms.Elementwise(lambda x: x.clipped(2)), "<lambda>", "LAMBDA", "clipped"),  # LAMBDA
}


@pytest.mark.parametrize("transform, name, marker, reason", WRONG.values(), ids=WRONG.keys())
def test_mistakes_are_told_with_the_users_line(transform: Any, name: str, marker: str, reason: str) -> None:
    with pytest.raises(gk.ComponentError) as caught:
        compiled(transforming, Out((32,), F4), np.ones(32, F4), transform)
    message = str(caught.value)
    assert f"{name} cannot be compiled as device code" in message
    assert f'File "{HERE}", line {line_of(marker)}' in message
    assert reason in message


def test_a_mistake_comes_out_of_a_configuration_too() -> None:
    """Through the whole template kernel, the user's line is still what is said first."""
    conf = compact(transform_regs_to_shared_d=WrongHelper())
    with pytest.raises(gk.ComponentError, match="^no_such_method cannot be compiled") as caught:
        kernel_of(conf)
    assert f'File "{HERE}", line {line_of("DEEP")}' in str(caught.value)
