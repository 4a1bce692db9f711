"""The battery's products of blocks that share K by way of global memory, and of stacks with several axes.

What is shared is computed twice: the second launch finds the counters as the first has left them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.epilogues import Bias, Store
from gemmkit.layouts import ColMajor, RowMajor, Triangular
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.mutation.products import case, equal, multiprocessors, operands
from tests.mutation.ring import ring
from tests.support import sm80 as multistage
from tests.support import sm90 as hopper
from tests.support.machines import poison
from tests.support.sm90 import F32

WARP = dict(block_shape=Tile(M=32, N=16, K=16), compute_warp=Tile(M=32, N=16, K=16), warps_per_block=1, stages=2)
WIDE = dict(block_shape=Tile(M=32, N=32, K=16), compute_warp=Tile(M=32, N=32, K=16), warps_per_block=1, stages=2)


def twice(conf: Any, size: tuple[int, int, int]) -> None:
    """A B and a bias, by two launches that follow each other."""
    a, b, _ = operands(*size)
    bias = np.arange(size[1], dtype=F32)
    out = poison(size[:2], F32)
    with gk.emulate():
        run = gk.plan(a, b, None, dataclasses.replace(conf, epilogue=Bias(bias)), out=out)
        for _ in range(2):
            run(a, b, out=out)
    equal(out, a.astype("f8") @ b.astype("f8") + bias)


@case
def last_share_finishes() -> None:
    """Two fragments a warp; the last k-tile of the last share is not whole."""
    for k in (100, 40):
        twice(multistage.mapping(MMAOp(), splits=2, **WARP), (40, 14, k))


@case
def staged_shares() -> None:
    """One operand by registers: the other alone knows how many k-tiles of the last share are whole."""
    a, b, _ = operands(20, 16, 100)
    conf = multistage.mapping(MMAOp(), splits=2, transform_global_to_shared_a=Map(lambda x: x + 1), **WARP)
    out = poison((20, 16), F32)
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    equal(out, (a.astype("f8") + 1) @ b.astype("f8"))


@case
def all_shares_finish() -> None:
    """Slices of the sums: of a tile with as many shares as k-tiles, of which a thread adds up eight, and of one with more."""
    with multiprocessors(16):                                 # all blocks are there at once
        twice(multistage.mapping(MMAOp(), splits=16, **WIDE), (20, 30, 16 * 16))
        twice(multistage.mapping(MMAOp(), splits=9, steps=1, warps=(2, 1), stages=2), (20, 6, 40))


@case
def streamed() -> None:
    for rows, blocks in ((3 * 32, 2), (32, 3)):
        twice(multistage.mapping(MMAOp(), splits=gk.kernels.StreamK(blocks=blocks), **WARP), (rows - 3, 7, 104))


@case
def clusters_share() -> None:
    with multiprocessors(16):                                 # all that wait for each other
        twice(hopper.mapping("one", WGMMAOp(16), depth=16, stages=2, splits=3), (70, 14, 84))
        twice(hopper.mapping("one", WGMMAOp(16), depth=16, stages=2, splits=3, block_shape=Tile(M=128, N=16, K=16)), (120, 14, 52))
        twice(hopper.mapping("two", WGMMAOp(32), depth=16, stages=2, splits=5), (100, 30, 84))


@case
def clusters_of_two_share() -> None:
    with multiprocessors(16):
        twice(hopper.mapping("one-2x1", WGMMAOp(32), depth=16, stages=2, splits=3), (130, 30, 84))


@case
def clusters_stream() -> None:
    """By two consumers that hand over one by one, in clusters, and by consumers that play ping-pong; tiles of three parts."""
    with multiprocessors(16):
        twice(hopper.mapping("two", WGMMAOp(16), depth=16, stages=2, splits=gk.kernels.StreamK(3)), (250, 14, 84))
        twice(hopper.mapping("one-2x1", WGMMAOp(32), depth=16, stages=2, splits=gk.kernels.StreamK(6)), (120, 30, 84))
        twice(hopper.mapping("pingpong", WGMMAOp(16), depth=16, stages=2, splits=gk.kernels.StreamK(2)), (190, 14, 52))


@case
def c_comes_ahead_of_what_clusters_finish() -> None:
    """By TMA, into D's subtiles: none comes for a part that is handed over."""
    with multiprocessors(16):
        a, b, _ = operands(190, 16, 52)
        c = np.arange(190 * 16, dtype=F32).reshape(190, 16)
        for schedule in ("one", "pingpong"):
            out = poison((190, 16), F32)
            conf = hopper.mapping(schedule, WGMMAOp(16), depth=16, stages=2, splits=gk.kernels.StreamK(2), global_c_layout=RowMajor(F32))
            with gk.emulate():
                gk.matmul(a, b, c, conf, out=out)
            equal(out, a.astype("f8") @ b + c)


@case
def clusters_share_in_place() -> None:
    """C is D, and the last rows stand in the middle of a warpgroup's: what is out of range is not read there."""
    a, b, c = operands(40, 24, 48)
    c = c.astype(F32)
    expected = a.astype("f8") @ b + c
    conf = hopper.mapping("one", WGMMAOp(16), depth=16, stages=2, splits=2, global_c_layout=RowMajor(F32))
    with gk.emulate():
        gk.matmul(a, b, c, conf, out=c)
    equal(c, expected)


@case
def stores_at_the_end_of_rows() -> None:
    """A second output, whose last rows stand in the middle of a warpgroup's."""
    a, b, _ = operands(60, 14, 40)
    kept, out = poison((60, 14), F32), poison((60, 14), F32)
    conf = hopper.mapping("one", WGMMAOp(16), depth=16, stages=2, epilogue=Store(kept) | Bias(np.ones(14, F32)))
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    expected = a.astype("f8") @ b.astype("f8")
    equal(kept, expected)
    equal(out, expected + 1)


@case
def stack_of_triangles() -> None:
    """Two axes, B broadcast along one; the range of K depends on the rows, of which there are more tiles than of columns."""
    a = np.stack([operands(40, 4, 40, F32)[0] + n for n in range(6)]).reshape(2, 3, 40, 40)
    b = np.stack([operands(40, 10, 40, F32)[1] + n for n in range(3)])
    out = poison((2, 3, 40, 10), F32)
    conf = multistage.mapping(FPUOp(16, 16), Triangular(RowMajor(F32), "lower"), RowMajor(F32), steps=8, warps=(1, 1))
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    equal(out, np.tril(a.astype("f8")) @ b.astype("f8"))


@case
def orders_of_wide_elements() -> None:
    """Elements of eight bytes are no matter of ldmatrix, in either order."""
    ring("f64 by dmma", (20, 12, 36), "NT")
    ring("f64 by dmma", (20, 12, 36), "TT")


@case
def lanes_in_one_row() -> None:
    """An odd number of lanes along M."""
    a, b, _ = operands(9, 35, 20, F32)
    conf = multistage.mapping(FPUOp(4, 32, 4, MB=1, NB=32), RowMajor, ColMajor, steps=2, warps=(2, 1), stages=2)
    out = poison((9, 35), F32)
    with gk.emulate():
        gk.matmul(a, np.asfortranarray(b), None, conf, out=out)
    equal(out, a.astype("f8") @ b.astype("f8"))
