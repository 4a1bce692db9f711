"""Fragment maps: against the PTX ISA's own formulas, and the same in Python, as a picture and in device code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.registers import generate
from gemmkit.operators import FPUOp
from gemmkit.ptx.mma import A_16X16, B_16X8, C_16X8, ROWS_8X8, FragmentMap, fragment_coordinate
from gemmkit.ptx.special import thread_index
from tests.support.harness import Out, compiled, constants_stored, emulated, on_device

WARP_MAPS = {"A 16x16": A_16X16, "B 16x8": B_16X8, "C 16x8": C_16X8, "8x8 rows": ROWS_8X8}
FPU_MAPS = {
    f"{op.M}x{op.N}x{op.K} {operand}": getattr(op, f"map_{operand}")
    for op in (FPUOp(), FPUOp(M=64, N=32), FPUOp(M=8, N=16, K=4, MB=8, NB=4), FPUOp(M=4, N=8, dtype=np.float16))
    for operand in "abc"
}
ALL_MAPS = WARP_MAPS | FPU_MAPS


def isa_a(lane: int, i: int) -> tuple[int, int]:
    """PTX ISA, matrix fragments for mma.m16n8k16: where a_i of a lane is."""
    group, member = lane >> 2, lane % 4
    row = group if i < 2 or 4 <= i < 6 else group + 8
    return row, member * 2 + (i & 1) + (0 if i < 4 else 8)


def isa_b(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    return member * 2 + (i & 1) + (0 if i < 2 else 8), group


def isa_c(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    return group if i < 2 else group + 8, member * 2 + (i & 1)


@pytest.mark.parametrize("fragment_map, formula", [(A_16X16, isa_a), (B_16X8, isa_b), (C_16X8, isa_c)])
def test_mma_maps_are_the_isas(fragment_map: FragmentMap, formula: Any) -> None:
    for lane in range(32):
        for i in range(fragment_map.values):
            assert (fragment_map.row(lane, i), fragment_map.column(lane, i)) == formula(lane, i)


def counts(fragment_map: FragmentMap) -> np.ndarray:
    """How many (thread, value) pairs hold each element."""
    out = np.zeros((fragment_map.rows, fragment_map.columns), int)
    np.add.at(out, fragment_map.indices, 1)
    return out


@pytest.mark.parametrize("name", [n for n in ALL_MAPS if n in WARP_MAPS or n.endswith("c")])
def test_every_element_is_held_once(name: str) -> None:
    assert (counts(ALL_MAPS[name]) == 1).all()


@pytest.mark.parametrize("name", [n for n in FPU_MAPS if not n.endswith("c")])
def test_an_fpu_operators_inputs_are_shared_evenly(name: str) -> None:
    """A thread of a row of threads holds the same rows of A as its neighbours: each element as often as any other."""
    held = counts(FPU_MAPS[name])
    assert held.min() == held.max() > 1


@pytest.mark.parametrize("name", ALL_MAPS)
def test_scatter_and_gather_are_inverse(name: str) -> None:
    fragment_map = ALL_MAPS[name]
    matrix = np.arange(fragment_map.rows * fragment_map.columns).reshape(fragment_map.rows, fragment_map.columns)
    fragments = fragment_map.scatter(matrix)
    assert len(fragments) == fragment_map.threads and {len(f) for f in fragments} == {fragment_map.values}
    assert np.array_equal(fragment_map.gather(fragments), matrix)


def test_the_table_says_who_holds_what() -> None:
    lines = C_16X8.table().splitlines()
    assert len(lines) == 17 and lines[0].split() == [str(n) for n in range(8)]
    assert lines[1].split() == ["0", "T0.0", "T0.1", "T1.0", "T1.1", "T2.0", "T2.1", "T3.0", "T3.1"]
    assert lines[16].split() == ["15", "T28.2", "T28.3", "T29.2", "T29.3", "T30.2", "T30.3", "T31.2", "T31.3"]
    assert len({len(line) for line in lines}) == 1
    assert [line.split() for line in C_16X8.table(rows=2).splitlines()] == [line.split() for line in lines[:3]]
    cells = {cell for line in A_16X16.table().splitlines()[1:] for cell in line.split()[1:]}
    assert cells == {f"T{t}.{v}" for t in range(32) for v in range(8)}


@dataclass(frozen=True)
class Where(gk.Component):
    map: FragmentMap


def coordinates(thread: int, out: Any, where: Any) -> int:
    """Store row and column of all values of a thread."""
    generate(where.map.values, coordinate, out, where, thread)
    return 0


def coordinate(value: int, out: Any, where: Any, thread: int) -> int:
    at = 2 * (thread * where.map.values + value)
    out[at] = fragment_coordinate(where.map, thread, value, 0)
    out[at + 1] = fragment_coordinate(where.map, thread, value, 1)
    return 0


def all_threads(out: Any, where: Any) -> None:
    generate(where.map.threads, coordinates, out, where)


def mine(out: Any, where: Any) -> None:
    coordinates(thread_index(), out, where)


def expected(fragment_map: FragmentMap) -> list[int]:
    rows, columns = fragment_map.indices
    return [int(x) for x in np.stack([rows, columns], axis=-1).reshape(-1)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["A 16x16", "B 16x8", "C 16x8", "64x32x1 a", "8x16x4 b", "4x8x1 c"])
def test_device_code_folds_to_the_same_coordinates(name: str) -> None:
    fragment_map = ALL_MAPS[name]
    out = Out((2 * fragment_map.threads * fragment_map.values,), np.int32)
    stored = constants_stored(compiled(all_threads, out, Where(fragment_map)))
    assert stored == {4 * n: number for n, number in enumerate(expected(fragment_map))}


@pytest.mark.parametrize("name", ["A 16x16", "64x32x1 c"])
def test_the_emulator_finds_the_same_coordinates(name: str) -> None:
    fragment_map = ALL_MAPS[name]
    out = Out((2 * fragment_map.threads * fragment_map.values,), np.int32)
    assert list(emulated(mine, out, Where(fragment_map))[0]) == expected(fragment_map)


@pytest.mark.gpu
def test_the_gpu_finds_the_same_coordinates() -> None:
    for fragment_map in ALL_MAPS.values():
        out = Out((2 * fragment_map.threads * fragment_map.values,), np.int32)
        assert list(on_device(mine, out, Where(fragment_map))[0]) == expected(fragment_map)
