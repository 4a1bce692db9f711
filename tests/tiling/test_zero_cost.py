"""Tiles cost nothing: kernels written with them compile to what the same kernels by hand do.

The listings are those of Faingnaert, Besard and De Sutter, *Flexible Performant GEMM Kernels on GPUs* (section 3.4): 3
(copy a tile of C from global to shared memory) against 4 (the same with addresses worked out by hand), and 6 (the
inner product on tensor cores) against its own version by hand. Both sides use the same load and store atoms, so every
difference would be the tiles' doing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.registers import Fragment, registers
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.mma import F16, F32
from gemmkit.ptx.special import barrier, block_x, block_y, lane_index, thread_index, udiv, uniform
from gemmkit.ptx.wmma import LOAD, MMA, STORE
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts
from gemmkit.tiling import Tile, linearise, parallelise, translate, translate_offset
from tests.support.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, lines_with, on_device

# -- Listing 3 and 4: copy a tile of C -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy(gk.Component):
    """A mapping of the copy. ``size`` is that of the whole matrix, which is a run-time value in the kernel."""

    block: Tile
    warp: Tile
    thread: Tile
    warps: int = 8
    dtype: Any = F32

    @property
    def vector(self) -> int:
        return self.thread.count

    @property
    def shared_bytes(self) -> int:
        return self.block.count * self.dtype.itemsize


def copy_with_tiles(out: Any, c: Any, global_m: int, global_n: int, how: Any) -> None:
    """Listing 3; then, so that the copy matters, the tile goes on to ``out`` in the same manner."""
    size = how.block.size
    block_i, block_j = block_x() * size.M, block_y() * size.N
    warp, lane = uniform(udiv(thread_index(), 32)), lane_index()
    pointer = shared(how.dtype, 0)
    warp_tiles = parallelise(how.block, how.warp, warp, how.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], how.thread, lane, 32)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            global_tile = translate(tile, M=block_i, N=block_j)
            global_base = linearise(global_tile.base, (global_m, global_n))
            global_offset = linearise(global_tile.offset, (global_m, global_n))
            shared_base = linearise(tile.base, size)
            shared_offset = linearise(tile.offset, size)
            value = load_global(c, 0, (global_base,), (global_offset,), how.vector)
            store_shared(pointer, shared_base, shared_offset, value)
    barrier()
    mirror = how.warps * 32 - 1 - thread_index()
    at = how.vector * mirror
    store_global(out, 0, (how.vector * thread_index(),), (0,), load_shared(pointer, at, 0, how.vector))


def low(number: int, extent: int, count: int) -> int:
    """``number % extent`` as one writes it who knows that the number is below ``count`` (lanes: 32)."""
    return number if count <= extent else number % extent


def high(number: int, extent: int, count: int) -> int:
    """``number // extent``, likewise."""
    return 0 if count <= extent else udiv(number, extent)


def copy_by_hand(out: Any, c: Any, global_m: int, global_n: int, how: Any) -> None:
    """Listing 4: every address worked out by hand."""
    block_m, block_n = how.block.size.M, how.block.size.N
    warp_m, warp_n = how.warp.size.M, how.warp.size.N
    thread_m, thread_n = how.thread.size.M, how.thread.size.N
    block_i, block_j = block_x() * block_m, block_y() * block_n
    warp, lane = uniform(udiv(thread_index(), 32)), lane_index()
    pointer = shared(how.dtype, 0)
    for warp_step in range(block_m * block_n // (warp_m * warp_n) // how.warps):
        warp_rows, warp_offset = block_m // warp_m, warp_step * how.warps
        base_warp_i = low(warp, warp_rows, how.warps) * warp_m
        base_warp_j = high(warp, warp_rows, how.warps) * warp_n
        warp_i, warp_j = warp_offset % warp_rows * warp_m, udiv(warp_offset, warp_rows) * warp_n
        for thread_step in range(warp_m * warp_n // (thread_m * thread_n) // 32):
            thread_rows, thread_offset = warp_m // thread_m, thread_step * 32
            base_thread_i = low(lane, thread_rows, 32) * thread_m
            base_thread_j = high(lane, thread_rows, 32) * thread_n
            thread_i, thread_j = thread_offset % thread_rows * thread_m, udiv(thread_offset, thread_rows) * thread_n
            global_base = (base_warp_j + base_thread_j + block_j) * global_m + (base_warp_i + base_thread_i + block_i)
            global_offset = (warp_j + thread_j) * global_m + (warp_i + thread_i)
            shared_base = (base_warp_j + base_thread_j) * block_m + (base_warp_i + base_thread_i)
            shared_offset = (warp_j + thread_j) * block_m + (warp_i + thread_i)
            value = load_global(c, 0, (global_base,), (global_offset,), how.vector)
            store_shared(pointer, shared_base, shared_offset, value)
    barrier()
    mirror = how.warps * 32 - 1 - thread_index()
    at = how.vector * mirror
    store_global(out, 0, (how.vector * thread_index(),), (0,), load_shared(pointer, at, 0, how.vector))


COPIES = {
    "the paper's": Copy(Tile(M=128, N=64), Tile(M=128, N=1), Tile(M=4, N=1)),
    "the paper's Figure 3": Copy(Tile(M=128, N=128), Tile(M=128, N=1), Tile(M=4, N=1)),
    "warps across columns": Copy(Tile(M=64, N=32), Tile(M=64, N=2), Tile(M=4, N=1), warps=4),
    "warps along a column": Copy(Tile(M=256, N=16), Tile(M=64, N=2), Tile(M=4, N=1), warps=4),
    "several rounds in a warp": Copy(Tile(M=64, N=64), Tile(M=64, N=16), Tile(M=4, N=1), warps=4),
    "float16": Copy(Tile(M=128, N=64), Tile(M=128, N=2), Tile(M=8, N=1), dtype=F16),
}
every_copy = pytest.mark.parametrize("how", COPIES.values(), ids=COPIES.keys())


def copy_arguments(how: Copy) -> tuple:
    m, n = 2 * how.block.size.M, 2 * how.block.size.N
    c = np.arange(m * n).astype(how.dtype)
    return Out((32 * how.warps * how.vector,), how.dtype), c, Runtime(m), Runtime(n), how


@pytest.mark.sample(5)
@every_copy
def test_copying_a_tile_costs_what_it_does_by_hand(how: Copy) -> None:
    tiles, hand = (compiled(kernel, *copy_arguments(how), threads=32 * how.warps)
                   for kernel in (copy_with_tiles, copy_by_hand))
    assert instructions(tiles) == instructions(hand)
    rounds = how.block.count // how.vector // (32 * how.warps)
    assert len(lines_with(tiles, "ld.global.v4")) == len(lines_with(tiles, "st.shared.v4")) == rounds
    assert len(lines_with(tiles, "ld.global")) == rounds
    assert leaves_nothing(tiles)
    assert not re.search(r"(div|rem)\.", tiles)


@pytest.mark.sample(6)
@every_copy
def test_shared_stores_are_register_plus_immediate(how: Copy) -> None:
    """One address register for all of a thread's stores, as in the paper's Listing 5."""
    ptx = compiled(copy_with_tiles, *copy_arguments(how), threads=32 * how.warps)
    addresses = [re.search(r"\[(%r\w+)(?:\+(\d+))?\]", line) for line in lines_with(ptx, "st.shared")]
    assert all(addresses) and len({a[1] for a in addresses if a}) == 1
    offsets = sorted(int(a[2] or 0) for a in addresses if a)
    expected = sorted(linearise(t.offset, how.block.size) * how.dtype.itemsize
                      for w in parallelise(how.block, how.warp, 0, how.warps) for t in parallelise(w, how.thread, 0, 32))
    assert offsets == expected


@pytest.mark.kin(1)
@pytest.mark.sample(18)
@every_copy
def test_machine_code_is_the_same(how: Copy) -> None:
    first, second = (instruction_counts(disassemble(assemble(compiled(
        kernel, *copy_arguments(how), threads=32 * how.warps)).cubin), full=True)
        for kernel in (copy_with_tiles, copy_by_hand))
    assert first == second


def expected_copy(how: Copy) -> np.ndarray:
    """What block (0, 0) leaves in ``out``."""
    rows, columns = how.block.extents
    c = np.arange(4 * rows * columns).astype(how.dtype).reshape(2 * columns, 2 * rows)[:columns, :rows].reshape(-1)
    return c[:32 * how.warps * how.vector].reshape(-1, how.vector)[::-1].reshape(-1)


@pytest.mark.parametrize("kernel", [copy_with_tiles, copy_by_hand])
def test_both_copy_the_tile(kernel: Any) -> None:
    how = COPIES["warps across columns"]
    (out,) = emulated(kernel, *copy_arguments(how), threads=32 * how.warps, shared=how.shared_bytes)
    assert np.array_equal(out, expected_copy(how))


@pytest.mark.gpu
@every_copy
def test_both_copy_the_tile_on_the_gpu(how: Copy) -> None:
    for kernel in (copy_with_tiles, copy_by_hand):
        (out,) = on_device(kernel, *copy_arguments(how), threads=32 * how.warps, shared=how.shared_bytes)
        assert np.array_equal(out, expected_copy(how))


# -- Listing 6: the inner product on tensor cores --------------------------------------------------------------------------

KEY = ((16, 16, 16), F16, F32)


@dataclass(frozen=True)
class Inner(gk.Component):
    """Listing 6's mapping: both operands column-major in shared memory, A at byte 0."""

    block: Tile = Tile(M=128, N=128, K=32)
    warp: Tile = Tile(M=64, N=32, K=16)
    warps: int = 8
    half: Any = F16
    single: Any = F32

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(F16, 16)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(F32, 8)

    @cached_property
    def b_bytes(self) -> int:
        """Where B starts."""
        return self.block.MK.count * 2

    @cached_property
    def rows(self) -> int:
        return self.warp.size.M // 16

    @cached_property
    def columns(self) -> int:
        return self.warp.size.N // 16

    load_a, load_b, load_c = LOAD[KEY, "a", "col"], LOAD[KEY, "b", "col"], LOAD[KEY, "c", "col"]
    mma, store = MMA[KEY, "col", "col"], STORE[KEY, "col"]


def fill_shared(a: Any, b: Any, how: Any) -> None:
    """A and B as they are into shared memory, eight elements a thread at a time."""
    for step in range(how.block.MK.count // (8 * 32 * how.warps)):
        at = 8 * (thread_index() + step * 32 * how.warps)
        store_shared(shared(how.half, 0), at, 0, load_global(a, 0, (at,), (0,), 8))
    for step in range(how.block.KN.count // (8 * 32 * how.warps)):
        at = 8 * (thread_index() + step * 32 * how.warps)
        store_shared(shared(how.half, how.b_bytes), at, 0, load_global(b, 0, (at,), (0,), 8))
    barrier()


def start(accumulators: Any, how: Any) -> None:
    for i in range(how.rows):
        for j in range(how.columns):
            accumulators[i, j] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def inner_with_tiles(out: Any, a: Any, b: Any, how: Any) -> None:
    """Listing 6."""
    fill_shared(a, b, how)
    warp = uniform(udiv(thread_index(), 32))
    a_shared, b_shared = shared(how.half, 0), shared(how.half, how.b_bytes)
    accumulators = registers(how.fragment_c, how.rows, how.columns)
    start(accumulators, how)
    a_fragments, b_fragments = registers(how.fragment_a, how.rows), registers(how.fragment_a, how.columns)
    warp_tiles = parallelise(how.block, how.warp, warp, how.warps)
    for step in range(len(warp_tiles)):
        warp_tile = warp_tiles[step]
        for i in range(how.rows):
            tile = translate_offset(warp_tile.MK, M=i * 16, K=0)
            a_fragments[i] = how.load_a(a_shared, linearise(tile.base, how.block.MK.size),
                                        linearise(tile.offset, how.block.MK.size), how.block.size.M)
        for j in range(how.columns):
            tile = translate_offset(warp_tile.KN, K=0, N=j * 16)
            b_fragments[j] = how.load_b(b_shared, linearise(tile.base, how.block.KN.size),
                                        linearise(tile.offset, how.block.KN.size), how.block.size.K)
        for i in range(how.rows):
            for j in range(how.columns):
                accumulators[i, j] = how.mma(a_fragments[i], b_fragments[j], accumulators[i, j])
    barrier()
    put_with_tiles(accumulators, warp, how)
    barrier()
    write_out(out, how)


def put_with_tiles(accumulators: Any, warp: int, how: Any) -> None:
    d_shared = shared(how.single, 0)
    warp_tile = parallelise(how.block.MN, how.warp.MN, warp, how.warps)[0]
    for i in range(how.rows):
        for j in range(how.columns):
            tile = translate_offset(warp_tile, M=i * 16, N=j * 16)
            how.store(d_shared, linearise(tile.base, how.block.MN.size), linearise(tile.offset, how.block.MN.size),
                      how.block.size.M, accumulators[i, j])


def inner_by_hand(out: Any, a: Any, b: Any, how: Any) -> None:
    """Listing 6 with every address worked out by hand."""
    fill_shared(a, b, how)
    warp = uniform(udiv(thread_index(), 32))
    block_m, block_k = how.block.size.M, how.block.size.K
    a_shared, b_shared, d_shared = shared(how.half, 0), shared(how.half, how.b_bytes), shared(how.single, 0)
    accumulators = registers(how.fragment_c, how.rows, how.columns)
    start(accumulators, how)
    a_fragments, b_fragments = registers(how.fragment_a, how.rows), registers(how.fragment_a, how.columns)
    warp_rows = block_m // how.warp.size.M
    warp_i, warp_j = warp % warp_rows * how.warp.size.M, udiv(warp, warp_rows) * how.warp.size.N
    for step in range(block_k // how.warp.size.K):
        k = step * how.warp.size.K
        for i in range(how.rows):
            a_fragments[i] = how.load_a(a_shared, warp_i, i * 16 + k * block_m, block_m)
        for j in range(how.columns):
            b_fragments[j] = how.load_b(b_shared, warp_j * block_k, k + j * 16 * block_k, block_k)
        for i in range(how.rows):
            for j in range(how.columns):
                accumulators[i, j] = how.mma(a_fragments[i], b_fragments[j], accumulators[i, j])
    barrier()
    for i in range(how.rows):
        for j in range(how.columns):
            how.store(d_shared, warp_i + warp_j * block_m, i * 16 + j * 16 * block_m, block_m, accumulators[i, j])
    barrier()
    write_out(out, how)


def write_out(out: Any, how: Any) -> None:
    for step in range(how.block.MN.count // (4 * 32 * how.warps)):
        at = 4 * (thread_index() + step * 32 * how.warps)
        store_global(out, 0, (at,), (0,), load_shared(shared(how.single, 0), at, 0, 4))


def inner_arguments(how: Inner) -> tuple:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(t.count).astype(F16) for t in (how.block.MK, how.block.KN))
    return Out((how.block.MN.count,), F32), a, b, how


INNERS = {
    "the paper's": Inner(),
    "four steps along K": Inner(Tile(M=64, N=64, K=64), Tile(M=32, N=32, K=16), 4),
}
every_inner = pytest.mark.parametrize("how", INNERS.values(), ids=INNERS.keys())


@pytest.mark.sample(2)
@every_inner
def test_the_inner_product_costs_what_it_does_by_hand(how: Inner) -> None:
    tiles, hand = (compiled(kernel, *inner_arguments(how), threads=32 * how.warps)
                   for kernel in (inner_with_tiles, inner_by_hand))
    assert instructions(tiles) == instructions(hand)
    loads_a, loads_b, products = (len(lines_with(tiles, f"wmma.{name}")) for name in ("load.a", "load.b", "mma"))
    assert (loads_a % how.rows, loads_b % how.columns) == (0, 0)
    assert (loads_a // how.rows, products) == (loads_b // how.columns, loads_a * how.columns)
    assert leaves_nothing(tiles)


@pytest.mark.kin(1)
def test_the_inner_product_is_the_same_machine_code() -> None:
    how = INNERS["the paper's"]
    first, second = (instruction_counts(disassemble(assemble(compiled(
        kernel, *inner_arguments(how), threads=32 * how.warps)).cubin), full=True)
        for kernel in (inner_with_tiles, inner_by_hand))
    assert first == second


def expected_product(how: Inner) -> np.ndarray:
    _, a, b, _ = inner_arguments(how)
    m, n, k = how.block.extents
    product = a.astype(float).reshape(k, m).T @ b.astype(float).reshape(n, k).T
    return product.T.reshape(-1)


@pytest.mark.parametrize("kernel", [inner_with_tiles, inner_by_hand])
def test_both_compute_the_product(kernel: Any) -> None:
    how = Inner(Tile(M=32, N=64, K=32), Tile(M=16, N=32, K=16), 4)
    (out,) = emulated(kernel, *inner_arguments(how), threads=128, shared=32 * 64 * 4)
    np.testing.assert_allclose(out, expected_product(how), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@every_inner
def test_both_compute_the_product_on_the_gpu(how: Inner) -> None:
    for kernel in (inner_with_tiles, inner_by_hand):
        (out,) = on_device(kernel, *inner_arguments(how), threads=32 * how.warps, shared=how.block.MN.count * 4)
        np.testing.assert_allclose(out, expected_product(how), rtol=1e-5, atol=1e-5)
