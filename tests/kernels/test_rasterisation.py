"""CTA orders: every tile exactly once on any grid, neighbours where promised, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, Hilbert, Order
from gemmkit.ptx.special import block_x, thread_index
from gemmkit.tiling import Tile
from tests.support.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, on_device
from tests.support.machines import on_machines, poison, reference, whole

ORDERS = [Columns(), Grouped(1), Grouped(3), Grouped(8), Hilbert()]
THREADS = 32


def path(order: Order, rows: int, columns: int) -> list[tuple[int, int]]:
    return [order.block(n, rows, columns) for n in range(rows * columns)]


def is_permutation(tiles: list[tuple[int, int]], rows: int, columns: int) -> bool:
    return len(tiles) == rows * columns == len(set(tiles)) and all(0 <= i < rows and 0 <= j < columns for i, j in tiles)


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_every_tile_once_on_all_small_grids(order: Order) -> None:
    for rows in range(1, 25):
        for columns in range(1, 25):
            assert is_permutation(path(order, rows, columns), rows, columns), f"{rows} x {columns}"


@pytest.mark.kin(1)
@pytest.mark.sample(5)
@pytest.mark.parametrize("order", ORDERS, ids=repr)
@given(rows=st.integers(1, 160), columns=st.integers(1, 160))
def test_every_tile_once_on_larger_grids(order: Order, rows: int, columns: int) -> None:
    assert is_permutation(path(order, rows, columns), rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5000), (5000, 1), (2, 3001), (3001, 2), (7, 1023), (64, 64), (63, 65)])
def test_every_tile_once_on_long_grids(rows: int, columns: int) -> None:
    assert is_permutation(path(Hilbert(), rows, columns), rows, columns)


@pytest.mark.kin(1)
@given(rows=st.integers(1, 100), columns=st.integers(1, 100))
def test_hilbert_goes_to_neighbours(rows: int, columns: int) -> None:
    """Steps to an adjacent tile, but for one that may be diagonal; none at all where both extents are even."""
    tiles = np.array(path(Hilbert(), rows, columns))
    steps = np.abs(np.diff(tiles, axis=0))
    assert steps.max(initial=0) <= 1
    assert (steps.sum(axis=1) == 2).sum() <= (0 if rows % 2 == columns % 2 == 0 else 1)


@pytest.mark.parametrize("extent", [8, 16, 32])
def test_hilbert_keeps_together(extent: int) -> None:
    """The tiles in flight, whichever and however many, need fewer rows of A and columns of B than in any other order."""
    def operands(order: Order, flying: int) -> float:
        tiles = path(order, extent, extent)
        windows = [tiles[n:n + flying] for n in range(len(tiles) - flying + 1)]
        return float(np.mean([len({i for i, _ in w}) + len({j for _, j in w}) for w in windows]))

    for flying in (extent // 2, 2 * extent):
        assert operands(Hilbert(), flying) < operands(Columns(), flying)
    assert operands(Hilbert(), 16) < operands(Grouped(8), 16)


def test_hilbert_on_a_square_of_a_power_of_two_is_hilberts() -> None:
    """Every aligned quarter (of a quarter, ...) is walked without leaving it."""
    tiles = path(Hilbert(), 16, 16)
    for size in (2, 4, 8):
        for start in range(0, 256, size * size):
            corner = {(i // size, j // size) for i, j in tiles[start:start + size * size]}
            assert len(corner) == 1


# -- in device code ---------------------------------------------------------------------------------------------------

def walk(out: Any, order: Any, rows: int, columns: int) -> None:
    """Every thread writes the tile of its number."""
    linear = block_x() * THREADS + thread_index()
    if linear < rows * columns:
        m, n = order.block(linear, rows, columns)
        out[linear, 0] = m
        out[linear, 1] = n


GRIDS = [(1, 1), (3, 2), (7, 5), (8, 8), (5, 13), (1, 9)]


@pytest.mark.parametrize("order", [Grouped(3), Hilbert()], ids=repr)
def test_in_the_emulator(order: Order) -> None:
    for rows, columns in GRIDS:
        (out,) = emulated(walk, Out((rows * columns, 2), "i4"), order, Runtime(rows), Runtime(columns),
                          blocks=-(-rows * columns // THREADS))
        assert [tuple(x) for x in out] == path(order, rows, columns)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_on_a_gpu(order: Order) -> None:
    for rows, columns in [*GRIDS, (129, 67), (16, 300)]:
        (out,) = on_device(walk, Out((rows * columns, 2), "i4"), order, Runtime(rows), Runtime(columns),
                           blocks=-(-rows * columns // THREADS))
        assert [tuple(x) for x in out] == path(order, rows, columns)


@pytest.mark.compile
def test_hilbert_is_cheap() -> None:
    """A loop in 32 bits: no call, no local memory, no division, no floating point."""
    ptx = compiled(walk, Out((32, 2), "i4"), Hilbert(), Runtime(4), Runtime(8))
    assert leaves_nothing(ptx)
    assert not [name for name in instructions(ptx) if name.startswith(("div", "rem")) or ".f32" in name or ".f64" in name]


@pytest.mark.kin(1)
@on_machines
def test_a_product_in_hilbert_order(machine: Any, rng: np.random.Generator) -> None:
    operator = operators.FPUOp(M=16, N=16)
    tile = Tile(M=16, N=16, K=8)
    conf = gk.get_config(operator=operator, global_a_layout=layouts.RowMajor("f4"), block_shape=tile, compute_warp=tile,
                         warps_per_block=1, order=Hilbert())
    for m, n in [(5, 7), (33, 50), (81, 47)]:
        a, b = whole(rng, (m, 9), "f4"), whole(rng, (9, n), "f4")
        out = machine.array(poison((m, n), "f4"))
        with machine.session():
            gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
        assert np.array_equal(machine.numpy(out), reference(a, b))
