"""``norm_gradients``: the gradients of a layer norm or an RMS norm, in one pass over x and the gradient of its result.

With n the normed row, h = g gamma of the result's gradient g, and r the reciprocal of the row's deviation,

    dx = r (h - mean(h) - n mean(h n)),   dgamma = sum of (g n) over rows,   dbeta = sum of g over rows

and an RMS norm lacks mean(h) (Ba et al., 2016; Zhang and Sennrich, 2019).

0. The kernel before may still run, where a GPU lets the next one begin: what it writes is waited for.
1. A block takes every row whose number is its own, modulo the number of blocks.
2. Copies of the next rows are on their way to shared memory while it computes these. A thread reads what it has copied.
3. Warps leave what they have folded, and meet once a row: two areas take turns, so that nobody writes what is still read.
4. A thread stores its columns of dx, and adds to their sums, which are its own.
5. Sums of each block are stored, and `add_blocks` adds them in the order of the blocks: the same bits every time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.rows import LANES, Row, Rows, added, along, butterfly, column_of, load_piece, of_warp, put_into
from gemmkit.lang import registers
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.registers import Fragment, generate
from gemmkit.ptx.copy_async import commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.memory import load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, block_x, grid_x, lane_index, thread_index, udiv
from gemmkit.ptx.wgmma import grid_launch_dependents, grid_wait

FOLDED = 4                             # values that a warp leaves of a row
ADDING = 8                             # warps that add what blocks have left, and loads of each that are on their way


@dataclass(frozen=True)
class NormGradientsSpec(Rows):
    """What the kernel is specialised by, beside the threads of a row: whether the norm is ``centred`` (a layer norm) and
    ``scaled`` (by gamma), how many sums over rows are wanted (``totals``: none, dgamma, or dgamma and dbeta), whether they
    are in registers, and whether the next rows are copied ``ahead``. ``loaded``: dtypes of x and of g; ``result``: of dx.
    """

    centred: bool
    scaled: bool
    totals: int
    in_registers: bool
    ahead: bool
    loaded: tuple[np.dtype, np.dtype]
    result: np.dtype
    starts_early: bool = False

    @property
    def pieces(self) -> int:
        """Of a row that a thread holds; 0 of a row that is streamed."""
        return int(getattr(self.source, "pieces", 0))

    @property
    def warps(self) -> int:
        return self.team.warps

    @property
    def meetings(self) -> int:
        """How often lanes exchange until all have what the warps have left."""
        return (self.team.warps - 1).bit_length()

    @property
    def fragment(self) -> Fragment:
        return Fragment(self.dtype, self.vector)

    @property
    def places(self) -> int:
        """Fragments of sums that a thread has in registers."""
        return max(1, self.pieces * self.totals) if self.in_registers else 1

    @property
    def room(self) -> int:
        """Columns that threads have pieces of."""
        return self.pieces * self.team.threads * self.vector

    @property
    def staged_at(self) -> int:
        """Where copies of rows lie in shared memory, in bytes."""
        return 2 * FOLDED * self.team.warps * self.dtype.itemsize

    @property
    def gradients_at(self) -> int:
        return self.staged_at + (2 * self.room * self.loaded[0].itemsize if self.ahead else 0)

    @property
    def sums_at(self) -> int:
        return self.gradients_at + (2 * self.room * self.loaded[1].itemsize if self.ahead else 0)

    def shared_bytes(self, columns: int) -> int:
        """Of rows of so many columns, whose sums may lie in shared memory."""
        width = -(-columns // self.vector) * self.vector
        return self.sums_at + (0 if self.in_registers else self.totals * width * self.dtype.itemsize)


def norm_gradients(spec: Any, grad: View, x: View, gamma: View, dx: View, sums: View, count: int, columns: int,
                   eps: Numeric) -> None:
    if spec.starts_early:
        grid_launch_dependents()
        grid_wait()                                                     # 0.
    own = registers.registers(spec.fragment, spec.places)
    begin_sums(spec, own, columns)
    shares = shares_of(spec, columns)
    index, turn = block_x(), 0                                          # 1.
    if spec.ahead:
        fetch(spec, x, grad, index, turn, count, columns)               # 2.
    while index < count:
        following = index + grid_x()
        if spec.ahead:
            fetch(spec, x, grad, following, 1 - turn, count, columns)
            wait_copies(1)
        row, g = loaded(spec, x, 0, index, turn, columns), loaded(spec, grad, 1, index, turn, columns)
        beside = beside_of(spec, row, g, gamma)
        statistics = statistics_of(spec, row, beside, shares, turn, eps)             # 3.
        put_gradient(spec, row, beside, dx, statistics)                 # 4.
        add_row(spec, own, row, g, statistics)
        index, turn = following, 1 - turn
    store_sums(spec, own, sums, columns)                                # 5.


# -- rows on their way ----------------------------------------------------------------------------------------------------

def fetch(spec: Any, x: View, grad: View, index: int, turn: int, count: int, columns: int) -> None:
    """Begin to copy a thread's pieces of both rows, where there is such a row. A group of copies each time."""
    if index < count:
        registers.fold(spec.pieces, fetch_piece, 0, spec, x, 0, spec.staged_at, index, turn, columns)
        registers.fold(spec.pieces, fetch_piece, 0, spec, grad, 1, spec.gradients_at, index, turn, columns)
    commit_copies()


def fetch_piece(_: int, p: int, spec: Any, x: View, which: int, at: int, index: int, turn: int, columns: int) -> int:
    j = column_of(p, spec)
    if p < spec.source.whole:
        copy_async(shared(spec.loaded[which], at), turn * spec.room + j, 0, x, offset_of(x, (index, j)), spec.vector, True)
    elif j < columns:
        copy_async(shared(spec.loaded[which], at), turn * spec.room + j, 0, x, offset_of(x, (index, j)), spec.vector, True)
    return 0


def loaded(spec: Any, x: View, which: int, index: int, turn: int, columns: int) -> Row:
    if spec.ahead:
        return Row(index, columns, generate(spec.pieces, staged_piece, spec, which, turn, columns), x, x, spec)
    return spec.load(x, index, columns)


def staged_piece(p: int, spec: Any, which: int, turn: int, columns: int) -> tuple:
    """A piece that the thread has copied; zeros beyond the row."""
    j = column_of(p, spec)
    if p < spec.source.whole:
        return of_stage(spec, which, turn * spec.room + j)
    if j < columns:
        return of_stage(spec, which, turn * spec.room + j)
    return fill(spec.dtype, spec.vector, 0)


def of_stage(spec: Any, which: int, place: int) -> tuple:
    at = spec.staged_at if which == 0 else spec.gradients_at
    return convert_all(spec.dtype, load_shared(shared(spec.loaded[which], at), place, 0, spec.vector))


# -- what is folded -------------------------------------------------------------------------------------------------------

def beside_of(spec: Any, row: Row, g: Row, gamma: View) -> tuple:
    """What stands beside a row of x: the gradient's, and the factors."""
    if spec.scaled:
        return g, along(row, gamma)
    return g, g


def scaled(spec: Any, g: Numeric, factor: Numeric) -> Any:
    return g * factor if spec.scaled else g


def shares_of(spec: Any, columns: int) -> tuple:
    """One over the columns, and over those of the thread's warp; how many the warp has whose sums the lane will have."""
    one, mine = convert(spec.dtype, 1), max(spec.columns_of(udiv(thread_index(), LANES), columns), 1)
    have = spec.columns_of(lane_index() % spec.warps, columns)
    return one / convert(spec.dtype, columns), one / convert(spec.dtype, mine), convert(spec.dtype, have)


def statistics_of(spec: Any, row: Row, beside: tuple, shares: tuple, turn: int, eps: Numeric) -> tuple:
    """``(r, shift, low, slope)``: n is ``x r - shift``, and dx is ``h r - low - n slope``."""
    source = spec.source
    of_row, of_own, have = shares
    nothing = convert(spec.dtype, 0)
    if not spec.centred:
        squares = of_warp(source.fold(row, lambda x, n: x * x, added, nothing, ()), added)
        slopes = of_warp(source.fold(row, lambda x, n, g, c: x * scaled(spec, g, c), added, nothing, beside), added)
        left = exchanged(spec, (squares, slopes, nothing, nothing), turn)
        r = 1 / math.sqrt(of_warps(spec, left[0]) * of_row + eps)
        return r, nothing, nothing, of_warps(spec, left[1]) * of_row * r * r
    # A warp folds about its own mean, so that nothing cancels: the way to the row's is made up for behind the meeting
    # (Chan et al., 1979), and the lanes of each have what one warp has left.
    mean = of_warp(source.total(row), added) * of_own
    squares = of_warp(source.squares(row, mean), added)
    sums = of_warp(source.fold(row, lambda x, n, g, c: scaled(spec, g, c), added, nothing, beside), added)
    slopes = of_warp(source.fold(row, lambda x, n, g, c: (x - mean) * scaled(spec, g, c), added, nothing, beside), added)
    left = exchanged(spec, (mean, squares, sums, slopes), turn)
    whole = of_warps(spec, left[0] * have) * of_row
    far = left[0] - whole
    r = 1 / math.sqrt(of_warps(spec, left[1] + far * far * have) * of_row + eps)
    slope = of_warps(spec, left[3] + far * left[2]) * of_row * r * r
    return r, whole * r, of_warps(spec, left[2]) * of_row * r, slope


def exchanged(spec: Any, values: tuple, turn: int) -> tuple:
    """What one of the warps has left of the row: lane n has that of warp n modulo their number."""
    if spec.warps == 1:
        return values
    left, warp = shared(spec.dtype, 0), udiv(thread_index(), LANES)
    if lane_index() == 0:
        store_shared(left, (turn * spec.warps + warp) * FOLDED, 0, values)
    barrier()
    return load_shared(left, (turn * spec.warps + lane_index() % spec.warps) * FOLDED, 0, FOLDED)


def of_warps(spec: Any, value: Numeric) -> Any:
    """The sum of what lanes have of all warps, each of which as many lanes have."""
    return registers.fold(spec.meetings, butterfly, value, added, LANES)


def put_gradient(spec: Any, row: Row, beside: tuple, dx: View, statistics: tuple) -> None:
    r, shift, low, slope = statistics
    put_into(row, dx, spec.result, lambda x, n, g, c: (scaled(spec, g, c) * r - low) - (x * r - shift) * slope, beside)


# -- sums over rows -------------------------------------------------------------------------------------------------------

def begin_sums(spec: Any, own: Any, columns: int) -> None:
    if spec.in_registers:
        registers.fold(spec.places, begin_place, 0, spec, own)
    elif spec.totals > 0:
        j = thread_index() * spec.vector
        while j < columns:
            registers.fold(spec.totals, begin_shared, 0, spec, j, columns)
            j += spec.team.threads * spec.vector


def begin_place(_: int, n: int, spec: Any, own: Any) -> int:
    own[n] = fill(spec.dtype, spec.vector, 0)
    return 0


def begin_shared(_: int, which: int, spec: Any, j: int, columns: int) -> int:
    store_shared(shared(spec.dtype, spec.sums_at), which * columns + j, 0, fill(spec.dtype, spec.vector, 0))
    return 0


def add_row(spec: Any, own: Any, row: Row, g: Row, statistics: tuple) -> None:
    """Add g n and g to the sums. Registers have sums of what is beyond the row, too, which nobody stores."""
    if spec.totals == 0:
        return
    if spec.in_registers:
        registers.fold(spec.pieces, add_held, 0, spec, own, row, g, statistics)
    elif spec.pieces > 0:
        registers.fold(spec.pieces, add_held_shared, 0, spec, row, g, statistics)
    else:
        j = thread_index() * spec.vector
        while j < row.columns:
            add_shared(spec, load_piece(spec, row.x, row.m, j), load_piece(spec, g.x, g.m, j), j, row.columns, statistics)
            j += spec.team.threads * spec.vector


def add_held(_: int, p: int, spec: Any, own: Any, row: Row, g: Row, statistics: tuple) -> int:
    own[p] = generate(spec.vector, with_product, own[p], row.held[p], g.held[p], statistics)
    if spec.totals == 2:
        own[spec.pieces + p] = generate(spec.vector, with_gradient, own[spec.pieces + p], g.held[p])
    return 0


def with_product(n: int, so_far: tuple, x: tuple, g: tuple, statistics: tuple) -> Any:
    return so_far[n] + g[n] * (x[n] * statistics[0] - statistics[1])


def with_gradient(n: int, so_far: tuple, g: tuple) -> Any:
    return so_far[n] + g[n]


def add_held_shared(_: int, p: int, spec: Any, row: Row, g: Row, statistics: tuple) -> int:
    j = column_of(p, spec)
    if j < row.columns:
        add_shared(spec, row.held[p], g.held[p], j, row.columns, statistics)
    return 0


def add_shared(spec: Any, x: tuple, g: tuple, j: int, columns: int, statistics: tuple) -> None:
    sums = shared(spec.dtype, spec.sums_at)
    store_shared(sums, j, 0, generate(spec.vector, with_product, load_shared(sums, j, 0, spec.vector), x, g, statistics))
    if spec.totals == 2:
        at = columns + j
        store_shared(sums, at, 0, generate(spec.vector, with_gradient, load_shared(sums, at, 0, spec.vector), g))


def store_sums(spec: Any, own: Any, sums: View, columns: int) -> None:
    """Into rows of ``sums``: those of all blocks for dgamma, and then those for dbeta."""
    if spec.totals == 0:
        return
    if spec.in_registers:
        registers.fold(spec.pieces * spec.totals, store_place, 0, spec, own, sums, columns)
    else:
        j = thread_index() * spec.vector
        while j < columns:
            registers.fold(spec.totals, store_shared_sums, 0, spec, sums, j, columns)
            j += spec.team.threads * spec.vector


def store_place(_: int, n: int, spec: Any, own: Any, sums: View, columns: int) -> int:
    j = column_of(n % spec.pieces, spec)
    if j < columns:
        store_global(sums, 1, (udiv(n, spec.pieces) * grid_x() + block_x(), j), (0, 0), own[n])
    return 0


def store_shared_sums(_: int, which: int, spec: Any, sums: View, j: int, columns: int) -> int:
    values = load_shared(shared(spec.dtype, spec.sums_at), which * columns + j, 0, spec.vector)
    store_global(sums, 1, (which * grid_x() + block_x(), j), (0, 0), values)
    return 0


# --------------------------------------------------------------------------------------------------
# Sums of all blocks.

@dataclass(frozen=True)
class AddingSpec(Component):
    """Whether its launch ``starts_early``."""

    starts_early: bool


def add_blocks(spec: Any, sums: View, of_gamma: View, of_beta: View, blocks: int, columns: int) -> None:
    """A block adds up `LANES` columns: warp w has rows w, w + `ADDING`, ... and the first one adds what they have."""
    if spec.starts_early:
        grid_launch_dependents()
        grid_wait()
    tiles = udiv(columns + LANES - 1, LANES)
    which, warp = udiv(block_x(), tiles), udiv(thread_index(), LANES)
    j = (block_x() - which * tiles) * LANES + lane_index()
    own = np.float32(0)
    if j < columns:
        b = warp
        while b + (ADDING - 1) * ADDING < blocks:
            own = registers.fold(ADDING, add_one, own, generate(ADDING, one_of, sums, which * blocks + b, j))
            b += ADDING * ADDING
        while b < blocks:
            own += sums[which * blocks + b, j]
            b += ADDING
    left = shared(np.float32, 0)
    store_shared(left, thread_index(), 0, (own,))
    barrier()
    if warp == 0 and j < columns:
        whole = registers.fold(ADDING, add_left, np.float32(0), left)
        if which == 0:
            of_gamma[j] = whole
        else:
            of_beta[j] = whole


def one_of(n: int, sums: View, b: int, j: int) -> Any:
    return sums[b + n * ADDING, j]


def add_one(own: Numeric, n: int, values: tuple) -> Any:
    return own + values[n]


def add_left(own: Numeric, n: int, left: Any) -> Any:
    return own + load_shared(left, n * LANES + lane_index(), 0, 1)[0]
