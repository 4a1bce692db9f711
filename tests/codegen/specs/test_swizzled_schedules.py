"""Swizzled tiles, prefetches and direct stores, compiled: the expected instructions, no spill, stack or call; and run as PTX."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.specs.lower import Matrix
from gemmkit.specs.schedule import RF, XOR
from tests.codegen.specs.test_drawn_schedules import by_ptx, check
from tests.codegen.specs.test_listings import main_loop
from tests.support.schedules import maxwell, operands, tensor_cores

pytestmark = [pytest.mark.sample(5), pytest.mark.compile]

HALVES = (("f2", "row"), ("f2", "col"), ("f4", "row"))
FLOATS = (("f4", "col"),) * 3
EDGES = tuple(Matrix(np.dtype(dtype), order, 16, is_partial=True) for dtype, order in HALVES)


def both(how: Any, **more: Any) -> Any:
    return tensor_cores(how, how, **more)


def copies(step: Any) -> Any:
    return step.swizzle(XOR).prefetch


def registers(step: Any) -> Any:
    return step.swizzle(XOR).prefetch.through(RF)


#: (schedule, matrices, opcodes of the main loop, opcodes of all with how many).
COMPILED = {
    "swizzled": (both(lambda s: s.swizzle(XOR)), HALVES, {"HMMA": 64, "LDSM": 24, "LDG": 8, "STS": 8}, {"STG.E.64": 32, "LDG.E.128": 8}),
    "wmma to global": (both(lambda s: s.pad(8)), HALVES, {"HMMA": 64, "LDSM": 24}, {"STG.E.64": 32, "STS.128": 8}),
    "copies": (both(copies), HALVES, {"HMMA": 64, "LDSM": 24, "LDGSTS": 8, "STS": 0, "LDG": 0}, {"LDGSTS.E.BYPASS": 16}),
    "registers": (both(registers), HALVES, {"HMMA": 64, "LDSM": 24, "LDG": 8, "STS": 8}, {"LDG.E.128": 16, "STS.128": 16}),
    "copies over the edge": (both(copies), EDGES, {"HMMA": 64, "LDSM": 24}, {}),
    "threads, swizzled": (maxwell(pad=0, b_swizzle=XOR), FLOATS, {"FFMA": 512, "LDS": 32}, {}),
    "threads, registers": (maxwell(prefetch=True, through="ab"), FLOATS, {"FFMA": 512, "LDS": 32}, {}),
}


@pytest.mark.kin(4)
@pytest.mark.parametrize("name", COMPILED)
def test_machine_code(name: str) -> None:
    schedule, kinds, loop, whole = COMPILED[name]
    code = schedule.compile(*kinds)
    assert (code.usage.spill_stores, code.usage.spill_loads, code.usage.stack_bytes) == (0, 0, 0)
    assert not re.search(r"\bcall\b", code.ptx)
    text = disassemble(code.cubin)
    assert {opcode: main_loop(text).count(opcode) for opcode in loop} == loop
    full = instruction_counts(text, full=True)
    assert {opcode: sum(n for found, n in full.items() if found.startswith(opcode)) for opcode in whole} == whole


@pytest.mark.kin(4)
def test_rows_at_immediates() -> None:
    """A swizzle costs its XOR once for the tiles of a step that lie whole patterns apart: 4 of A's and 2 of B's in each of 4 steps."""
    schedule, kinds, _, _ = COMPILED["swizzled"]
    text = disassemble(schedule.compile(*kinds).cubin)
    assert len(re.findall(r"LDSM[^\n]*\[R\d+\+UR\d+\+0x|LDSM[^\n]*\[R\d+\+0x", text)) >= 16
    assert main_loop(text).count("LOP3") <= 24                # of each of 24 rows for itself they would be 48


SMALL = dict(block=(64, 64, 32), warp=(32, 32))
AS_PTX = {
    "swizzled": (both(lambda s: s.swizzle(XOR), **SMALL), (64, 64, 64), "CFC"),
    "columns": (both(lambda s: s.swizzle(XOR), **SMALL), (64, 128, 32), "CFF"),
    "wmma to global": (both(lambda s: s.pad(8), **SMALL), (64, 64, 64), "CFC"),
    "copies": (both(copies, **SMALL), (64, 64, 96), "CFC"),
    "copies over the edge": (both(copies, **SMALL), (60, 56, 40), "CFC"),
    "registers": (both(registers, **SMALL), (64, 64, 96), "CFC"),
    "registers over the edge": (both(registers, **SMALL), (60, 55, 37), "CFC"),
}


@pytest.mark.kin(4)
@pytest.mark.parametrize("name", AS_PTX)
def test_as_ptx(name: str) -> None:
    schedule, sizes, order = AS_PTX[name]
    a, b, out = operands(*sizes, np.float16, order)
    by_ptx(schedule, a, b, out)
    check(out, a, b)


@pytest.mark.kin(4)
@pytest.mark.parametrize("how", [dict(pad=0, b_swizzle=XOR), dict(prefetch=True, through="a"), dict(b_layout="[(8,(4,16)):(4,(1,32))]")],
                         ids=["swizzle", "registers", "layout"])
@pytest.mark.parametrize("sizes", [(64, 64, 24), (60, 34, 12)])
def test_threads_as_ptx(how: dict, sizes: tuple) -> None:
    a, b, out = operands(*sizes)
    by_ptx(maxwell(**how), a, b, out)
    check(out, a, b)
