"""Tiles: every operation in Python, and the same positions and reasons in device code."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmkit as gk
from gemmkit.lang.registers import generate
from gemmkit.ptx.special import thread_index
from gemmkit.tiling import (
    Coord,
    Division,
    Tile,
    linearise,
    parallelise,
    project,
    subdivide,
    translate,
    translate_base,
    translate_offset,
)
from tests.support.harness import Out, Runtime, compiled, constants_stored, emulated, leaves_nothing, on_device

# ==========================================================================================================================
# Tiles: every operation in Python, and the same expectations in device code.
#
# Without a GPU the device's answers are read from PTX: where everything is a compile-time number, the whole kernel folds
# to stores of constants. On a GPU the worker's number is the thread's, so the same positions are computed at run time.

# -- what parallelise must do, written another way ---------------------------------------------------------------------


def expected_index(grid: tuple[int, ...], steps: tuple[int, ...], order: str, number: int) -> tuple[int, ...]:
    """Where sub-tile ``number`` lies, by NumPy's own index arithmetic."""
    digits = np.unravel_index(number, grid, order="F" if order == "column" else "C")
    return tuple(int(d) * s for d, s in zip(digits, steps))


def expected_tiles(case: Case, worker: int) -> list[tuple[int, ...]]:
    """The positions of a worker's sub-tiles, in turn."""
    grid = tuple(e // s for e, s in zip(case.tile.extents, case.tiling.extents))
    return [expected_index(grid, case.tiling.extents, case.order, n)
            for n in range(worker, math.prod(grid), case.count)]


@dataclass(frozen=True)
class Case(gk.Component):
    """One division of a tile among workers. Positions are stored as one number each, in base `RADIX`."""

    tile: Tile
    tiling: Tile
    count: int
    order: str = "column"

    @property
    def shape(self) -> tuple[int, ...]:
        return (RADIX,) * len(self.tile.extents)

    @property
    def width(self) -> int:
        """Numbers stored for a worker: how many sub-tiles, and base, offset and index of each."""
        return 1 + 3 * -(-self.tile.count // self.tiling.count // self.count)

    @property
    def out(self) -> Out:
        return Out((self.count * self.width,), np.int32)


RADIX = 64

#: (what is special, case): every way in which workers and sub-tiles can fit each other.
CASES = {
    "one worker": Case(Tile(M=8, N=6), Tile(M=4, N=2), 1),
    "workers fill the first dimension": Case(Tile(M=8, N=6), Tile(M=4, N=2), 2),
    "workers fill it all": Case(Tile(M=8, N=6), Tile(M=4, N=2), 6),
    "workers fill part of the first dimension": Case(Tile(M=16, N=4), Tile(M=2, N=2), 4),
    "workers fill one dimension and part of the next": Case(Tile(M=8, N=16), Tile(M=4, N=2), 8),
    "row order": Case(Tile(M=8, N=16), Tile(M=4, N=2), 8, "row"),
    "row order, not covering": Case(Tile(M=8, N=6), Tile(M=4, N=2), 4, "row"),
    "not covering: some workers have one more": Case(Tile(M=8, N=6), Tile(M=4, N=2), 4),
    "overshooting: some workers have none": Case(Tile(M=8, N=6), Tile(M=4, N=2), 10),
    "overshooting, row order": Case(Tile(M=8, N=6), Tile(M=4, N=2), 7, "row"),
    "carries from dimension to dimension": Case(Tile(M=12, N=10), Tile(M=4, N=2), 5),
    "carries, evenly": Case(Tile(M=6, N=4), Tile(M=1, N=1), 4),
    "one dimension": Case(Tile(K=48), Tile(K=4), 3),
    "one dimension, not covering": Case(Tile(K=20), Tile(K=4), 3),
    "three dimensions": Case(Tile(M=8, N=6, K=4), Tile(M=4, N=3, K=1), 4),
    "three dimensions, row order": Case(Tile(M=8, N=6, K=4), Tile(M=4, N=3, K=1), 8, "row"),
    "four dimensions": Case(Tile(A=4, B=6, C=2, D=3), Tile(A=2, B=3, C=1, D=1), 8),
    "five dimensions": Case(Tile(A=4, B=2, C=6, D=2, E=3), Tile(A=2, B=1, C=3, D=2, E=1), 4),
    "five dimensions, carrying": Case(Tile(A=4, B=2, C=6, D=2, E=3), Tile(A=2, B=1, C=3, D=2, E=1), 5, "row"),
    "names of several letters": Case(Tile(rows=8, columns=6), Tile(rows=4, columns=2), 3),
    "sub-tile is the tile": Case(Tile(M=8, N=6), Tile(M=8, N=6), 1),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


# -- Tile and Coord ----------------------------------------------------------------------------------------------------

def test_a_new_tile_is_at_the_origin() -> None:
    tile = Tile(M=64, N=32, K=16)
    assert tuple(tile.size) == (64, 32, 16) and tuple(tile.index) == tuple(tile.base) == tuple(tile.offset) == (0,) * 3
    assert (tile.size.M, tile.size.N, tile.size[2], tile.size[-1]) == (64, 32, 16, 16)
    assert tile.count == 64 * 32 * 16 and len(tile.size) == 3
    assert repr(tile) == "Tile(M=64, N=32, K=16)"


def test_index_is_base_plus_offset() -> None:
    tile = translate_offset(translate_base(Tile(M=8, N=4), M=16, N=3), M=2, N=1)
    assert (tuple(tile.base), tuple(tile.offset), tuple(tile.index)) == ((16, 3), (2, 1), (18, 4))
    assert repr(tile) == "Tile(M=8, N=4) at (M=18, N=4)"


def test_tiles_are_values() -> None:
    assert Tile(M=8, N=4) == Tile(M=8, N=4) and hash(Tile(M=8, N=4)) == hash(Tile(M=8, N=4))
    assert len({Tile(M=8, N=4), Tile(N=4, M=8), Tile(M=8, N=8), translate(Tile(M=8, N=4), 1, 0), Tile(M=8, N=4)}) == 4
    assert Tile(M=8).size == Tile(M=8).size != Tile(N=8).size
    assert hash(Tile(M=8).size) == hash(Coord(("M",), (8,)))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
                         ids=["copy", "deepcopy", "pickle"])
def test_tiles_can_be_copied(again: Any) -> None:
    tile = translate(Tile(row=8, column=4), 3, 5)
    assert again(tile) == tile and again(tile.index) == tile.index


@pytest.mark.parametrize("extent", [0, -4, 2.5, True, "8", None])
def test_bad_extents_are_refused(extent: Any) -> None:
    with pytest.raises(ValueError, match=r"Tile\(M=.*a positive integer"):
        Tile(N=4, M=extent)


def test_numpy_integers_are_extents() -> None:
    assert Tile(M=np.int64(8)) == Tile(M=8) and type(Tile(M=np.int64(8)).extents[0]) is int


def test_a_tile_needs_dimensions() -> None:
    with pytest.raises(ValueError, match=r"got no dimensions by name; write for example Tile\("):
        Tile()


@pytest.mark.parametrize("name", ["base", "offset", "index", "size", "count", "names", "extents", "at"])
def test_names_that_every_tile_has_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is an attribute of every tile"):
        Tile(**{name: 4})


# -- projection --------------------------------------------------------------------------------------------------------

def test_projections_keep_and_order_dimensions() -> None:
    tile = translate_offset(translate(Tile(M=64, N=32, K=16), M=1, N=2, K=3), M=4, N=5, K=6)
    assert tile.MN == translate_offset(translate(Tile(M=64, N=32), 1, 2), 4, 5)
    assert tile.KM == translate_offset(translate(Tile(K=16, M=64), 3, 1), 6, 4)
    assert tile.NKM.names == ("N", "K", "M") and tuple(tile.NKM.index) == (7, 9, 5)
    assert tile.N == translate_offset(translate(Tile(N=32), 2), 5)


def test_names_of_several_letters() -> None:
    tile = translate(Tile(row=8, column=4), row=1, column=2)
    assert tile.row == translate(Tile(row=8), 1)
    assert project(tile, "column", "row") == translate(Tile(column=4, row=8), 2, 1)
    assert (tile.index.column, tile.size.row) == (2, 8)


@pytest.mark.parametrize("name", ["MX", "MM", "X", "row"])
def test_projections_of_other_dimensions_are_refused(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}' does not project a tile of dimensions M, N, K"):
        getattr(Tile(M=8, N=4, K=2), name)


def test_project_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"\['X'\] is not among the dimensions M, N"):
        project(Tile(M=8, N=4), "M", "X")
    with pytest.raises(ValueError, match="nothing is not among"):
        project(Tile(M=8, N=4))
    with pytest.raises(ValueError, match="M is named twice"):
        project(Tile(M=8, N=4), "M", "N", "M")


def test_coordinates_of_other_dimensions_are_refused() -> None:
    with pytest.raises(AttributeError, match="no dimension 'K' among M, N"):
        _ = Tile(M=8, N=4).index.K


def test_coordinates_are_no_lists() -> None:
    """They are tuples underneath, and what tuples make of + and * is never meant (device code refuses it, too)."""
    coord = Tile(M=8, N=4).index
    for nonsense in (lambda: coord + coord, lambda: coord * 2, lambda: 2 * coord):
        with pytest.raises(TypeError):
            nonsense()
    assert (coord.M, coord[1], list(coord)) == (0, 0, [0, 0]) and coord != (0, 0)


# -- parallelise and subdivide -----------------------------------------------------------------------------------------

@every_case
def test_parallelise_deals_the_subtiles_in_turn(case: Case) -> None:
    for worker in range(case.count):
        tiles = parallelise(case.tile, case.tiling, worker, case.count, case.order)
        assert [tuple(t.index) for t in tiles] == expected_tiles(case, worker)
        assert len(tiles) == len(expected_tiles(case, worker))
        assert all(t.extents == case.tiling.extents and t.names == case.tile.names for t in tiles)
        if len(tiles):
            assert subdivide(case.tile, case.tiling, worker, case.count, case.order) == tiles[0]


def test_subtiles_start_from_where_the_tile_is() -> None:
    tile = translate_offset(translate(Tile(M=8, N=4), 100, 200), 10, 20)
    (one, other) = parallelise(tile, Tile(M=4, N=1), 3, 4)
    assert (tuple(one.base), tuple(one.offset)) == ((104, 201), (10, 20))
    assert (tuple(other.base), tuple(other.offset)) == ((104, 201), (10, 22))


def test_tiles_beyond_the_last_are_refused() -> None:
    tiles = parallelise(Tile(M=8, N=4), Tile(M=4, N=2), 1, 2)
    for step in (2, -1):
        with pytest.raises(IndexError, match=f"sub-tile {step} of 2"):
            tiles[step]
    with pytest.raises(IndexError, match="sub-tile 0 of 0"):
        subdivide(Tile(M=8), Tile(M=4), 2, 3)


BAD_DIVISIONS: dict[str, tuple[tuple, str]] = {
    "not a multiple": ((Tile(M=10, N=4), Tile(M=4, N=2), 0, 4), "M=10 is not a multiple of the tiling's M=4"),
    "larger than the tile": ((Tile(M=2, N=4), Tile(M=4, N=2), 0, 4), "M=2 is not a multiple of the tiling's M=4"),
    "other names": ((Tile(M=8, N=4), Tile(M=4, K=2), 0, 4), "dimensions M, N and the tiling M, K"),
    "other order of names": ((Tile(M=8, N=4), Tile(N=2, M=4), 0, 4), "dimensions M, N and the tiling N, M"),
    "no worker": ((Tile(M=8, N=4), Tile(M=4, N=2), 0, 0), "count is 0; at least one worker"),
    "unknown order": ((Tile(M=8, N=4), Tile(M=4, N=2), 0, 4, "diagonal"), "order is 'diagonal'; it is"),
}


@pytest.mark.parametrize("arguments, message", BAD_DIVISIONS.values(), ids=BAD_DIVISIONS.keys())
def test_bad_divisions_are_refused(arguments: tuple, message: str) -> None:
    for operation in (parallelise, subdivide):
        with pytest.raises(ValueError, match=f"parallelise: .*{message}"):
            operation(*arguments)


@pytest.mark.parametrize("index", [-1, 4, 7])
def test_a_worker_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"parallelise: index is {index}; the workers are 0 to 3"):
        parallelise(Tile(M=8, N=4), Tile(M=4, N=2), index, 4)


@st.composite
def divisions(draw: Any) -> Case:
    names = "ABCDE"[:draw(st.integers(1, 5))]
    steps = {name: draw(st.integers(1, 4)) for name in names}
    grid = {name: draw(st.integers(1, 5)) for name in names}
    tile = Tile(**{name: steps[name] * grid[name] for name in names})
    return Case(tile, Tile(**steps), draw(st.integers(1, 40)), draw(st.sampled_from(["column", "row"])))


@given(divisions())
def test_the_workers_cover_the_tile_exactly_once(case: Case) -> None:
    covered = np.zeros(case.tile.extents, int)
    for worker in range(case.count):
        for tile in parallelise(case.tile, case.tiling, worker, case.count, case.order):
            covered[tuple(slice(i, i + s) for i, s in zip(tile.index, tile.size))] += 1
    assert (covered == 1).all()


@given(divisions())
def test_base_is_the_workers_part_and_offset_everybodys(case: Case) -> None:
    division = Division(case.tile.names, case.tile.extents, case.tiling.extents, case.count, case.order)
    offsets: dict[int, tuple] = {}
    for worker in range(case.count):
        tiles = list(parallelise(case.tile, case.tiling, worker, case.count, case.order))
        assert all(tuple(t.index) == tuple(b + o for b, o in zip(t.base, t.offset)) for t in tiles)
        assert [tuple(t.index) for t in tiles] == expected_tiles(case, worker)
        if division.split:
            assert len({t.base for t in tiles}) <= 1
            for step, tile in enumerate(tiles):
                assert offsets.setdefault(step, tuple(tile.offset)) == tuple(tile.offset)
        else:
            assert not any(any(t.offset) for t in tiles)
    assert not division.even or all(
        division.steps(w) == division.total // case.count for w in range(case.count))


@given(st.integers(0, 5), st.integers(0, 5))
def test_workers_that_fill_whole_dimensions_split(m: int, n: int) -> None:
    """The mappings that kernels use (powers of two everywhere) all get register + immediate addresses."""
    for count in (1, 2, 4, 8, 16, 32):
        assert Division(("M", "N"), (2**m, 2**n), (1, 1), count).split or count > 2**(m + n)


# -- translate ---------------------------------------------------------------------------------------------------------

def test_translate_by_name_and_by_position() -> None:
    tile = Tile(M=8, N=4, K=2)
    assert tuple(translate(tile, 1, 2, 3).base) == tuple(translate(tile, K=3, M=1, N=2).base) == (1, 2, 3)
    assert tuple(translate(tile, N=5).base) == (0, 5, 0)
    assert translate(tile, 1, 2, 3) == translate_base(tile, 1, 2, 3) != translate_offset(tile, 1, 2, 3)
    assert tuple(translate(translate(tile, M=1), M=-3).base) == (-2, 0, 0)
    assert tuple(translate_offset(translate_offset(tile, N=2), 1, 2, 3).offset) == (1, 4, 3)


@pytest.mark.parametrize("operation", [translate, translate_base, translate_offset])
def test_bad_distances_are_refused(operation: Any) -> None:
    tile = Tile(M=8, N=4)
    with pytest.raises(ValueError, match="translate: K, X is not among the dimensions M, N"):
        operation(tile, X=1, M=2, K=3)
    with pytest.raises(ValueError, match="give one distance for each of M, N, or name them"):
        operation(tile, 1)
    with pytest.raises(ValueError, match="give one distance for each of M, N, or name them"):
        operation(tile, 1, 2, N=3)


# -- linearise ---------------------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=5))
def test_linearise_is_numpys(dims: list[tuple[int, int]]) -> None:
    shape = tuple(extent for extent, _ in dims)
    coord = tuple(min(i, extent - 1) for extent, i in dims)
    assert linearise(coord, shape) == np.ravel_multi_index(coord, shape, order="F")
    assert linearise(coord, shape, "row") == linearise(coord, shape, order="row") == np.ravel_multi_index(coord, shape)


def test_linearise_takes_coordinates_and_sizes() -> None:
    tile = translate(Tile(M=8, N=4), 3, 2)
    assert linearise(tile.index, Tile(M=64, N=32).size) == 3 + 2 * 64
    assert linearise(tile.index, (64, 32), "row") == 3 * 32 + 2


def test_bad_linearisations_are_refused() -> None:
    with pytest.raises(ValueError, match="linearise: coord has 2 coordinates and shape 3 extents"):
        linearise((1, 2), (4, 4, 4))
    with pytest.raises(ValueError, match="linearise: order is 'F'; it is"):
        linearise((1, 2), (4, 4), "F")


def test_an_extent_is_a_number_on_the_host() -> None:
    block = gk.get_config(operator=gk.operators.FPUOp(M=16, N=16), global_a_layout=gk.layouts.RowMajor("float32"),
                          block_shape=Tile(M=32, N=16, K=8), compute_warp=Tile(M=16, N=16, K=8)).block_shape
    assert int(block.M) == 32 and block.M == 32 and block.M != 16 and block.M == Tile(M=32) and block.M != Tile(N=32)
    assert (block.M + 1, 1 + block.M, block.M - block.N, 100 - block.M, 2 * block.M, block.M / 64) == (33, 33, 16, 68, 64, 0.5)
    assert (-(-100 // block.M), block.M // 5, block.M % 5, 100 % block.M) == (4, 6, 2, 4)
    assert block.N < block.M <= 32 and 31 < block.M and block.M >= 32 and [*range(0, 64, block.M)] == [0, 32]
    assert type(block.M * 1) is int and hash(block.M) == hash(32) and Tile(M=block.M).M == block.M and {32: "x"}[block.M] == "x"
    for fails in (lambda: int(block), lambda: block * 2, lambda: block.MN < 3, lambda: block < block):
        with pytest.raises(TypeError, match=r"dimensions; one alone is a number: Tile\(.*\)\.M"):
            fails()
    with pytest.raises(TypeError, match="unsupported operand"):
        block.M + "x"                                                                            # type: ignore[operator]
    assert block != 32 and block.MN != 512


# ==========================================================================================================================
# Tiles in device code: the same positions and the same reasons as in Python.


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
