"""Global names read from bytecode: the ones that `dis` finds."""

import dis
import sys
from types import FunctionType

import pytest

from gemmkit.lang.references import globals_of


def by_dis(code):
    nested = [c for c in code.co_consts if isinstance(c, type(code))]
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*map(by_dis, nested))


@pytest.mark.parametrize("module", ["gemmkit.config", "gemmkit.planning", "gemmkit.kernels.consumer", "inspect", "ast"])
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
