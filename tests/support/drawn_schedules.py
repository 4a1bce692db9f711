"""Schedules, drawn: levels, tiles (plain, in pieces apart), pads, storage, swizzles of workers and of shared tiles, steps ahead by
cp.async and by registers, dtypes, and sizes that tiles do not divide."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis
import numpy as np
from hypothesis import strategies as st

from gemmkit.specs.products import multiply_adds, swizz, tensor_cores
from gemmkit.specs.schedule import (
    GL,
    RF,
    SH,
    XOR,
    A,
    B,
    Block,
    ColMajor,
    Init,
    K,
    Kernel,
    M,
    MatMul,
    Move,
    N,
    RowMajor,
    Thread,
    Warp,
)
from tests.support.schedules import operands


def crossed(i: int) -> int:
    return i ^ 3


def turned(i: int) -> int:
    return (i & ~31) | (31 - (i & 31))


def dealt(i: int) -> int:
    return (i & ~31) | ((i >> 2) & 7) | ((i & 3) << 3)


ORDERS = RowMajor, ColMajor
SWIZZLES = None, crossed, turned, dealt
PADS = (0, 1, 2, 3, 4)
#: Of sums in registers: of A, B and C alike.
DTYPES = ("f4", "f2")


class Drawn(NamedTuple):
    """A schedule, with a product that it computes."""

    schedule: Any
    sizes: tuple[int, int, int]
    dtype: str
    orders: str
    result: str
    seed: int

    def matrices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A, B, and NaN where C goes."""
        a, b, out = operands(*self.sizes, self.dtype, self.orders, self.seed)
        return a, b, out.astype(self.result, order="K")

    def check(self, out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        atol = 0.06 if self.result == "f2" else 1e-4
        np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=atol)


def _refined(steps: Any, order: Any, swizzle: Any) -> Any:
    steps = steps.layout(order)
    return steps if swizzle is None else steps.swizzle(swizzle)


def _shared(draw: Any, steps: Any, operand: int, move: Any, pads: tuple, lines: tuple[int, int] = (0, 0), ahead: bool = False) -> Any:
    """A move to shared memory, padded, or swizzled where lines of the tile, of ``lines`` rows and columns, are long enough; a step
    ahead by registers."""
    storage = draw(st.sampled_from(ORDERS))
    moved = steps.move(operand, SH, move).storage(storage)
    is_swizzled = lines[storage == RowMajor] >= 16 and draw(st.booleans())
    moved = moved.swizzle(XOR) if is_swizzled else moved.pad(draw(st.sampled_from(pads)))
    return moved.prefetch.through(RF) if ahead else moved


def _product(steps: Any, is_unrolled: bool) -> Any:
    """A thread's product."""
    steps = steps.split(1)
    return ((steps.unroll if is_unrolled else steps).move(A, RF, Move.tile(1, 1).unroll.done)
            .move(B, RF, Move.tile(1, 1).unroll.done).tile(1, 1).unroll.done)


@st.composite
def by_threads(draw: Any, pads: tuple) -> tuple[Any, tuple[int, int, int]]:
    """A block of threads, each with a tile; A and B by shared memory, or straight from global memory. (schedule, its tile)"""
    side, part, wider = draw(st.sampled_from([(8, 2, 1), (16, 4, 1), (16, 2, 1), (16, 2, 2), (32, 4, 1), (32, 4, 2)]))
    columns = part * wider
    threads, k = side // part * (2 * side // columns), draw(st.sampled_from([2, 4, 8]))
    order, swizzle = draw(st.sampled_from(ORDERS)), draw(st.sampled_from(SWIZZLES))
    stored = draw(st.sampled_from([(1, columns), (part, 1), (1, 1)]))
    end = _refined(Move.tile(part, columns).to(Thread), order, swizzle).tile(*stored).unroll.done
    steps: Any = (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(side, 2 * side).to(Block).layout(draw(st.sampled_from(ORDERS)))
                  .accumulate_in(RF, Init.tile(part, columns).to(Thread).tile(1, 1).unroll.done, end).split(k).sync)
    rows, across = side * k // threads, 2 * side * k // threads
    moves_a = draw(st.booleans()) and rows > 0 and side % rows == 0
    moves_b = draw(st.booleans()) and across > 0 and 2 * side % across == 0
    even = side * k % threads == 0 and 2 * side * k % threads == 0
    ahead = moves_a and moves_b and even and draw(st.booleans())
    if moves_a:
        steps = _shared(draw, steps, A, Move.tile(rows, 1).to(Thread).tile(1, 1).done, pads, (side, k) if even else (0, 0), ahead)
    if moves_b:
        steps = _shared(draw, steps, B, Move.tile(1, across).to(Thread).done, pads, (k, 2 * side) if even else (0, 0), ahead)
    steps = _refined(steps.tile(part, columns).to(Thread), order, swizzle)
    return _product(steps, draw(st.booleans())), (side, 2 * side, k)


@st.composite
def by_warps(draw: Any, pads: tuple) -> tuple[Any, tuple[int, int, int]]:
    """Warps, then lanes, whose elements may lie in pieces apart; moves by warps as well."""
    (wm, wn), (down, over) = draw(st.sampled_from([((8, 16), (4, 8)), ((16, 16), (8, 4)), ((16, 16), (4, 8)), ((32, 16), (8, 4)),
                                                   ((16, 32), (4, 8)), ((8, 32), (2, 16))]))
    rows, columns = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    (m, n), k, warps = (rows * wm, columns * wn), draw(st.sampled_from([4, 8])), rows * columns
    p, q = wm // down, wn // over
    tile: list[Any] = [p, q]
    if p % 2 == 0 and draw(st.booleans()):
        tile[0] = (p // 2, wm // 2)
    if q % 2 == 0 and draw(st.booleans()):
        tile[1] = (q // 2, wn // 2)
    order, swizzle = draw(st.sampled_from(ORDERS)), draw(st.sampled_from((*SWIZZLES, swizz)))
    end = _refined(Move.tile(wm, wn).to(Warp).tile(*tile).to(Thread), order, swizzle).tile(1, 1).unroll.done
    steps: Any = (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(m, n).to(Block)
                  .accumulate_in(RF, Init.tile(wm, wn).to(Warp).tile(p, q).to(Thread).tile(1, 1).unroll.done, end).split(k).sync)
    if draw(st.booleans()) and m // warps * k >= 32:
        each = m // warps * k // 32
        steps = _shared(draw, steps, A, Move.tile(m // warps, k).to(Warp).tile(1, each).to(Thread).done, pads)
    if draw(st.booleans()) and n // warps * k >= 32:
        each = n // warps * k // 32
        steps = _shared(draw, steps, B, Move.tile(k, n // warps).to(Warp).tile(each, 1).to(Thread).layout(ColMajor).done, pads)
    steps = _refined(steps.tile(wm, wn).to(Warp).tile(*tile).to(Thread), order, swizzle)
    return _product(steps, draw(st.booleans())), (m, n, k)


@st.composite
def schedules(draw: Any, pads: tuple = PADS, dtypes: tuple = DTYPES) -> Drawn:
    """A schedule of one of four kinds, and a product of one to two blocks each way and one to three steps."""
    kind = draw(st.sampled_from(["threads", "warps", "threads", "warps", "pieces", "fragments"]))
    ahead = draw(st.booleans())
    seed = draw(st.integers(0, 99))
    if kind == "fragments":
        block, k, warp = draw(st.sampled_from([((16, 16), 16, (16, 16)), ((32, 16), 32, (16, 16)), ((32, 32), 32, (16, 32)),
                                               ((16, 32), 64, (16, 32)), ((32, 32), 32, (16, 16))]))
        made, tile = tensor_cores(block, k, warp, ahead), (*block, k)
    elif kind == "pieces":
        made, tile = multiply_adds((64, 64), 8, ahead, pad=draw(st.sampled_from(pads))), (64, 64, 8)
    else:
        ahead = False
        made, tile = draw(by_threads(pads) if kind == "threads" else by_warps(pads))
    sizes = [size * draw(st.integers(1, most)) for size, most in zip(tile, (1 if tile[0] == 64 else 2, 1, 3))]
    if not ahead:                                             # cp.async knows no edges
        less = draw(st.sampled_from([(0, 0, 0), (0, 0, 1), (3, 0, 0), (1, 5, 0), (2, 7, 1)]))
        sizes = [size - one for size, one in zip(sizes, less)]
    orders = {"fragments": "CFC", "pieces": "FFF"}.get(kind) or "".join(draw(st.tuples(*[st.sampled_from("CF")] * 3)))
    dtype = "f2" if kind == "fragments" else "f4" if kind == "pieces" and ahead else draw(st.sampled_from(dtypes))
    return Drawn(made, (sizes[0], sizes[1], sizes[2]), dtype, orders, "f4" if kind == "fragments" else dtype, seed)


PARTS = range(12)                      # of 25: together 300


def part_of_many(part: int, check: Any, count: int = 25, **how: Any) -> None:
    """``check`` of ``count`` drawn schedules, others in each part."""
    @hypothesis.seed(part)
    @hypothesis.settings(max_examples=count, phases=[hypothesis.Phase.generate], derandomize=False, database=None)
    @hypothesis.given(schedules(**how))
    def each(drawn: Drawn) -> None:
        check(drawn)

    each()
