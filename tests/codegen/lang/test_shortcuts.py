"""What a first call leaves out changes no answer of Numba's, and no code."""

from __future__ import annotations

import subprocess
import sys
from abc import ABCMeta
from typing import Any

import pytest
from numba.cuda import lowering as numba_lowering
from numba.cuda import types
from numba.cuda.core import base, ir

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.lang import compile, deferred, lowering
from gemmkit.plans import ahead
from gemmkit.runtime import compile as nvvm
from gemmkit.runtime.device import H100

CONF = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"), device=H100)


def recursive(value: Any) -> list:
    """Numba's ``Inst._rec_list_vars``, as it is written there."""
    if isinstance(value, ir.var_types):
        return [value]
    if isinstance(value, ir.inst_types):
        return recursive(value._kws if isinstance(value, ir.Expr) else vars(value))
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for each in values for found in recursive(each)]


@pytest.mark.compile
def test_variables_are_those_that_numba_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every function of a kernel: which ones a statement names, and which need no slot. These are Numba's, read in one
    block alone, and those whose readers no way reaches past the assignment."""
    ours, seen, more = lowering.Lower._find_singly_assigned_variable, [], set()

    def find(self: Any) -> None:
        numba_lowering.Lower._find_singly_assigned_variable(self)
        numbas = self._singly_assigned_vars
        ours(self)
        found = self._singly_assigned_vars
        more.update(found - numbas)
        seen.append(numbas <= found and all(_comes_first(self.blocks, name) for name in found - numbas)
                    and all(s.list_vars() == recursive(vars(s)) for block in self.blocks.values() for s in block.body))

    monkeypatch.setattr(lowering.Lower, "_find_singly_assigned_variable", find)
    ahead.compile_config(CONF, device=H100)
    assert len(seen) > 20 and all(seen) and len(more) > 20


def _comes_first(blocks: dict, name: str) -> bool:
    """Whether a variable is assigned once, in a block without which no way leads from the first to any of its readers."""
    where = [label for label, block in blocks.items() for s in block.find_insts(ir.Assign) if s.target.name == name]
    reached, ways = set(), [next(iter(blocks))]
    while ways:
        label = ways.pop()
        if label not in reached and label not in where:
            reached.add(label)
            ways += blocks[label].terminator.get_targets()
    return len(where) == 1 and not any(name in {v.name for v in s.list_vars()} for label in reached for s in blocks[label].body)


@pytest.mark.compile
def test_ptx_is_numbas(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVVM makes the same of each module once, without NVRTC and without the mathematical functions that nothing calls."""
    made: list[str] = []
    to_asm = nvvm.to_asm

    def both(library: Any, cc: tuple) -> str:
        made.append(to_asm(library, cc))
        library._llvm_strs = [nvvm._without_variables(str(module)) for module in library.modules]
        made.extend(library.get_asm_strs(cc=cc))
        return made[0]

    monkeypatch.setattr(nvvm, "to_asm", both)
    ahead.compile_config(CONF, device=H100)
    assert len(made) == 2 and made[0] == made[1]


def test_numba_types_have_no_virtual_subclasses() -> None:
    """So Python's own ``isinstance`` answers as theirs did."""
    classes = [cls for cls in vars(types).values() if isinstance(cls, type) and issubclass(cls, types.Type)]
    values = [types.int32, types.float64, types.boolean, types.UniTuple(types.int8, 2), types.literal(3), types.none]
    assert len(classes) > 40
    for cls in classes:
        assert [isinstance(v, cls) for v in values] == [ABCMeta.__instancecheck__(cls, v) for v in values]
        assert [issubclass(c, cls) for c in classes] == [ABCMeta.__subclasscheck__(cls, c) for c in classes]


def test_parameters_called_loc() -> None:
    assert base._has_loc is compile._has_loc
    for function in (lambda a, loc: 0, lambda a: [a for loc in a], lambda a, *, loc=None: 0, base.BaseContext.cast, compile.install):
        assert compile._has_loc(function) == compile._by_signature(function)


PROGRAM = """
import gc
from gemmkit.lang import deferred as later
walks = []
gc.callbacks.append(lambda phase, info: walks.append(phase))
gc.collect(); walks.clear()
later.load()
assert gc.isenabled() and len(walks) <= 2, walks
from tests.codegen.lang.test_shortcuts import CONF, ahead, H100
ahead.compile_config(CONF, device=H100)
assert "libnvrtc.so" not in open("/proc/self/maps").read()
"""


@pytest.mark.compile
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_first_call_neither_collects_while_it_loads_nor_loads_nvrtc() -> None:
    assert deferred._State.loaded
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
