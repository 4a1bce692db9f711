"""Argument checks of functions and fields, and the global names that a function's bytecode reads."""

import collections
import dis
import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest

import gemmkit
from gemmkit.emulator.user_code import arguments
from gemmkit.lang.checks import check_methods, required
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.references import Owner, globals_of, is_fixed, owner_of
from gemmkit.lang.source import check
from gemmkit.layouts import RowMajor
from gemmkit.plans import adapters

# ==========================================================================================================================
# `gemmkit.lang.checks`: what is asked of functions and fields.


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


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("function", "words"), [
    (lambda *x: x, "takes *x"), (lambda **x: x, "takes **x"), (lambda x, *, y: x, "requires the keyword y"),
    (lambda x, *, y=1, z: x, "requires the keyword z"),
])
def test_what_cannot_be_called_by_position_is_said(function: Callable[..., Any], words: str) -> None:
    assert words in str(required(function))


# ==========================================================================================================================
# Global names read from bytecode: the ones that `dis` finds. And whose code something is.


def by_dis(code):
    nested = [c for c in code.co_consts if isinstance(c, type(code))]
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*map(by_dis, nested))


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", ["gemmkit.plans.problem", "gemmkit.plans.plan", "gemmkit.kernels.sm90.mainloop", "inspect", "ast"])
def test_every_function_of_a_module(module):
    __import__(module)
    codes = [f.__code__ for f in vars(sys.modules[module]).values() if isinstance(f, FunctionType)]
    assert len(codes) > 5
    for code in codes:
        assert globals_of(code) == by_dis(code)


def test_more_names_than_a_byte_numbers():
    names = [f"name_{n}" for n in range(700)]
    code = compile("def f():\n    return " + " + ".join(names) + "\n", "many", "exec").co_consts[0]
    assert globals_of(code) == set(names)


def test_a_class_body_and_a_nested_function():
    scope = {}
    exec("def f():\n    class C:\n        x = outer\n    return lambda: inner(C)", scope)
    assert globals_of(scope["f"].__code__) >= {"outer", "inner"}


# -- whose code it is -------------------------------------------------------------------------------------------------

@pytest.mark.sample(1)
@pytest.mark.parametrize("thing, owner", [
    (gemmkit, Owner.GEMMKIT), (RowMajor, Owner.GEMMKIT), (RowMajor.element, Owner.GEMMKIT),
    (np, Owner.PACKAGE), (np.float32, Owner.PACKAGE), (numba.njit, Owner.PACKAGE), (ml_dtypes.bfloat16, Owner.PACKAGE),
    (math, Owner.PYTHON), (math.exp, Owner.PYTHON), (collections, Owner.PYTHON), (collections.namedtuple, Owner.PYTHON),
    (int, Owner.PYTHON), (pytest, Owner.USER), (staticmethod(lambda x: x), Owner.USER), (ModuleType("made"), Owner.USER)])
def test_owners(thing, owner):
    assert owner_of(thing) is owner


def test_a_script_is_the_users(monkeypatch):
    """Even where `python -m cProfile script.py` has the standard library's own file under that name."""
    main = ModuleType("__main__")
    main.__file__ = collections.__file__
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert owner_of(main) is Owner.USER
    assert not is_fixed(type("Mine", (), {"__module__": "__main__"}))


LAYERS = """
import math
from dataclasses import dataclass
from gemmkit.epilogues import Epilogue
from gemmkit.layouts import RowMajor

@dataclass(frozen=True)
class Rooted(Epilogue):
    def __call__(self, x, m, n):
        return math.sqrt(x)

@dataclass(frozen=True)
class Raising(RowMajor):
    def element(self, data, i, j, shape):
        if i < 0:
            raise ValueError(i)
        return data[i, j]

@dataclass(frozen=True)
class Short(RowMajor):
    def element(self, data, i):
        return i
"""


def test_a_module_named_like_gemmkit_is_the_users(tmp_path, monkeypatch):
    """By every rule that asks: what device code contains, the emulator's twins, wide coordinates, how methods are called."""
    (tmp_path / "gemmkit_layers.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gemmkit_layers", raising=False)
    layers = importlib.import_module("gemmkit_layers")
    assert owner_of(layers) is Owner.USER and not is_fixed(layers.Rooted)
    with pytest.raises(ComponentError, match="raise"):
        check(layers.Raising("float32"))
    with pytest.raises(ComponentError, match="takes 2 arguments"):
        check_methods(layers.Short("float32"), "global_a_layout")
    assert adapters._computes(layers.Raising("float32")) and not adapters._computes(RowMajor("float32"))
    assert type(arguments([layers.Rooted()])[0]) is not layers.Rooted
