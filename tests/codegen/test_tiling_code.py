"""Tiles in device code: the same positions and the same reasons as in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.registers import generate
from gemmkit.ptx.special import thread_index
from gemmkit.tiling import Tile, linearise, parallelise, project, subdivide, translate, translate_offset
from tests.codegen.test_tiling import BAD_DIVISIONS, CASES, Case
from tests.support.harness import Out, Runtime, compiled, constants_stored, emulated, leaves_nothing, on_device

RADIX = 64


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def record(worker: int, out: Any, case: Any) -> int:
    """Store all that a worker gets."""
    tiles = parallelise(case.tile, case.tiling, worker, case.count, case.order)
    out[worker * case.width] = len(tiles)
    for step in range(len(tiles)):
        tile = tiles[step]
        at = worker * case.width + 1 + 3 * step
        out[at] = linearise(tile.base, case.shape)
        out[at + 1] = linearise(tile.offset, case.shape)
        out[at + 2] = linearise(tile.index, case.shape)
    return 0


def all_workers(out: Any, case: Any) -> None:
    generate(case.count, record, out, case)


def one_worker_a_thread(out: Any, case: Any) -> None:
    record(thread_index(), out, case)


def recorded(case: Case) -> dict[int, int]:
    """What `record` stores, from Python's tiles: byte offset -> number."""
    out = {}
    for worker in range(case.count):
        tiles = parallelise(case.tile, case.tiling, worker, case.count, case.order)
        numbers = [len(tiles)]
        for tile in tiles:
            numbers += [linearise(coord, case.shape) for coord in (tile.base, tile.offset, tile.index)]
        out |= {4 * (worker * case.width + n): number for n, number in enumerate(numbers)}
    return out


@pytest.mark.sample(6)
@every_case
def test_device_code_folds_to_the_same_positions(case: Case) -> None:
    assert constants_stored(compiled(all_workers, case.out, case)) == recorded(case)


@every_case
def test_the_emulator_finds_the_same_positions(case: Case) -> None:
    (out,) = emulated(one_worker_a_thread, case.out, case, threads=case.count)
    stored = recorded(case)
    assert [int(out[at // 4]) for at in stored] == list(stored.values())


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(3))
def test_the_gpu_finds_the_same_positions(part: int) -> None:
    for name, case in list(CASES.items())[part::3]:
        (out,) = on_device(one_worker_a_thread, case.out, case, threads=case.count)
        stored = recorded(case)
        assert [int(out[at // 4]) for at in stored] == list(stored.values()), name


@dataclass(frozen=True)
class Example(gk.Component):
    tile: Tile = Tile(M=8, N=4, K=2)
    named: Tile = Tile(row=16, column=8)


def operations(out: Any, example: Any, one: int, two: int) -> None:
    """Everything but parallelise; ``one`` and ``two`` are 1 and 2."""
    tile = translate_offset(translate(example.tile, M=one, K=two + 1), 10, 20, 30)
    out[0], out[1], out[2] = tile.index.M, tile.index.N, tile.index.K
    out[3], out[4] = tile.base.K, tile.offset.K
    out[5], out[6], out[7] = tile.size.M, tile.size[1], tile.count
    out[8], out[9] = tile.KM.index[0], tile.KM.index[1]
    out[10], out[11] = tile.N.index.N, tile.MN.count
    out[12], out[13] = tile.size[-1], tile.index[-2]
    out[14] = linearise(tile.index, (100, 50, 7))
    out[15] = linearise(tile.index, (100, 50, 7), "row")
    out[16] = linearise(tile.MN.index, tile.MN.size)
    out[17] = linearise((two, one), (9, 9), order="row")
    moved = translate(example.named, one, two)
    other = translate(example.named, column=one, row=two)
    out[18], out[19], out[20], out[21] = moved.index.row, moved.index.column, other.index.row, other.index.column
    swapped = project(moved, "column", "row")
    out[22], out[23], out[24] = swapped.index[0], swapped.index[1], swapped.size[0]
    out[25] = moved.row.index.row
    part = subdivide(moved, example.named, one - 1, 1)
    out[26], out[27] = part.index.row, part.size.column
    tiles = parallelise(tile.MN, tiling=translate(tile.MN, 0, 0), count=1, index=one - 1)
    out[28], out[29] = len(tiles), tiles[0].index.N
    by_rows = parallelise(example.named, example.half, one, 4, order="row")
    out[30], out[31] = by_rows[0].index.row, by_rows[0].index.column
    out[32], out[33] = len(tile.index), len(tile.size)


@dataclass(frozen=True)
class Halved(Example):
    half: Tile = Tile(row=8, column=4)


OPERATIONS = [11, 20, 33, 3, 30, 8, 4, 64, 33, 11, 20, 32, 2, 20, 11 + 100 * (20 + 50 * 33), (11 * 50 + 20) * 7 + 33,
              11 + 8 * 20, 2 * 9 + 1, 1, 2, 2, 1, 2, 1, 8, 1, 1, 8, 1, 20, 0, 4, 3, 3]


OPERATIONS_OUT = Out((len(OPERATIONS),), np.int32)


def test_operations_in_python() -> None:
    out = np.zeros(len(OPERATIONS), int)
    operations(out, Halved(), 1, 2)
    assert list(out) == OPERATIONS


def test_operations_in_device_code() -> None:
    ptx = compiled(operations, OPERATIONS_OUT, Halved(), 1, 2)
    assert constants_stored(ptx) == {4 * n: number for n, number in enumerate(OPERATIONS)}


@pytest.mark.gpu
def test_operations_on_the_gpu() -> None:
    (out,) = on_device(operations, OPERATIONS_OUT, Halved(), Runtime(1), Runtime(2), threads=1)
    assert list(out) == OPERATIONS


def test_positions_are_32_bits_wide() -> None:
    """No 64-bit arithmetic but the address of the store, and no division subroutine."""
    ptx = compiled(one_worker_a_thread, CASES["three dimensions"].out, CASES["three dimensions"])
    assert leaves_nothing(ptx)
    assert "div.s64" not in ptx and "rem.s64" not in ptx and "mul.lo.s64" not in ptx


def _divide(out: Any, arguments: Any) -> None:
    out[0] = len(parallelise(arguments.tile, arguments.tiling, 0, arguments.count, arguments.order))


@pytest.mark.sample(2)
@pytest.mark.parametrize("arguments, message", BAD_DIVISIONS.values(), ids=BAD_DIVISIONS.keys())
def test_bad_divisions_are_refused_in_device_code(arguments: tuple, message: str) -> None:
    tile, tiling, _, count, *order = arguments
    with pytest.raises(Exception, match=f"parallelise: .*{message}"):
        compiled(_divide, Out((1,), np.int32), Case(tile, tiling, count, *order))


def _translate_unknown(out: Any, example: Any) -> None:
    out[0] = translate(example.tile, X=1).index.M


def _translate_too_few(out: Any, example: Any) -> None:
    out[0] = translate(example.tile, 1).index.M


def _project_unknown(out: Any, example: Any) -> None:
    out[0] = example.tile.MX.index.M


def _project_missing(out: Any, example: Any) -> None:
    out[0] = project(example.tile, "M", "X").index.M


def _linearise_other(out: Any, example: Any) -> None:
    out[0] = linearise(example.tile.index, (4, 4))


def _linearise_order(out: Any, example: Any) -> None:
    out[0] = linearise(example.tile.index, (4, 4, 4), "F")


def _count_at_run_time(out: Any, example: Any) -> None:
    out[0] = len(parallelise(example.tile, example.tile, 0, thread_index()))


@pytest.mark.parametrize("kernel, message", [
    (_translate_unknown, "translate: X is not among the dimensions M, N, K"),
    (_translate_too_few, "give one distance for each of M, N, K, or name them"),
    (_project_unknown, "'MX' does not project a tile of dimensions M, N, K"),
    (_project_missing, r"\['X'\] is not among the dimensions M, N, K"),
    (_linearise_other, "linearise: coord has 3 coordinates and shape 2 extents"),
    (_linearise_order, "linearise: order is 'F'; it is"),
    (_count_at_run_time, "parallelise: count must be a compile-time number"),
])
def test_device_code_gives_the_same_reasons(kernel: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        compiled(kernel, Out((1,), np.int32), Example())
