"""Global names read from bytecode: the ones that `dis` finds. And whose code something is."""

import collections
import dis
import importlib
import math
import sys
from types import FunctionType, ModuleType

import ml_dtypes
import numba
import numpy as np
import pytest

import gemmkit
from gemmkit.emulator.user_code import arguments
from gemmkit.lang.checks import check_methods
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.references import Owner, globals_of, is_fixed, owner_of
from gemmkit.lang.source import check
from gemmkit.layouts import RowMajor
from gemmkit.plans import adapters


def by_dis(code):
    nested = [c for c in code.co_consts if isinstance(c, type(code))]
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*map(by_dis, nested))


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
