"""Threads that hold a part of D together: how they finish it, and combine what they hold of its rows and columns.

An epilogue that finishes blocks (`gemmkit.epilogues.reductions`, `.normalise`, `.pairs`) sees more than an element: its
`finish_block` gets the group of threads that hold neighbouring values. `Lanes` is that group where D's tile is in shared
memory (`singlestage`, `multistage`): a warp, whose lanes hold ``m`` by ``n`` tiles of ``piece``.
`gemmkit.kernels.sm90.together` has Hopper's.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

from gemmkit.components import Component
from gemmkit.kernels.common.elements import column_of, delivered, row_of
from gemmkit.kernels.common.tile_copy import inside
from gemmkit.kernels.common.work import Place
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, fold
from gemmkit.lang.registers import apply, generate
from gemmkit.lang.returned import numbers
from gemmkit.lang.values import convert
from gemmkit.ptx.shuffle import SHUFFLE
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.tiling import Tile, translate

WARP = 32
DOWN = 8                               # lanes below each other where columns are reduced, too
BESIDE = 16                            # and beside each other, where rows of a column-major D are normalised
ELEMENT = Tile(M=1, N=1)
butterfly = SHUFFLE["bfly"]


class At(NamedTuple):
    """Where a thread's values lie: its tile's place in D, D's sizes, and whether the thread holds any."""

    place: Any
    shape: Any
    holds: Any


@dataclass(frozen=True)
class Lanes(Component):
    """A warp with ``m`` x ``n`` lanes on tiles of ``piece``; ``rows`` x ``columns`` are the block's. Lanes lie along rows
    of D first where ``along_rows``. Where a block is smaller than a warp, the lanes that are left hold nothing."""

    piece: Tile
    m: int
    n: int
    rows: int
    columns: int
    along_rows: bool

    @cached_property
    def packed(self) -> Tile:
        """What is stored of a tile whose pairs are packed."""
        return Tile(M=1, N=self.piece.extents[1] // 2)

    @cached_property
    def height(self) -> int:
        """Rows that a warp holds."""
        return self.m * self.piece.extents[0]

    @cached_property
    def width(self) -> int:
        return self.n * self.piece.extents[1]

    @cached_property
    def down(self) -> int:
        """Warps' parts below each other."""
        return self.rows // self.height

    @cached_property
    def parts(self) -> int:
        """Warps' parts of a block's tile."""
        return self.down * (self.columns // self.width)

    @cached_property
    def steps_n(self) -> int:
        """Exchanges among the lanes of a row."""
        return self.n.bit_length() - 1

    @cached_property
    def steps_m(self) -> int:
        return self.m.bit_length() - 1

    @cached_property
    def first_n(self) -> int:
        """From a lane to its neighbour in a row."""
        return 1 if self.along_rows else self.m

    @cached_property
    def first_m(self) -> int:
        return self.n if self.along_rows else 1

    # -- in device code -----------------------------------------------------------------------------------------------

    def lane_m(self) -> int:
        lane = lane_index() % (self.m * self.n)
        return udiv(lane, self.n) if self.along_rows else lane % self.m

    def lane_n(self) -> int:
        lane = lane_index() % (self.m * self.n)
        return lane % self.n if self.along_rows else udiv(lane, self.m)

    def tile(self, part: int) -> Any:
        """This lane's tile in the block."""
        return translate(self.piece, part % self.down * self.height + self.lane_m() * self.piece.size.M,
                         udiv(part, self.down) * self.width + self.lane_n() * self.piece.size.N)

    def finish(self, epilogue: Any, values: tuple, at: At) -> tuple:
        """Values out of range are not finished: 0 stands in their place."""
        if inside(at.place, at.shape.M, at.shape.N):
            return numbers(epilogue, "finish", epilogue.finish(values, at.place, at.shape), values)
        return apply(finish_in_range, values, epilogue, at)

    def reduce_rows(self, reduction: Any, values: tuple, at: At) -> None:
        each(reduce_row, generate(self.piece.size.M, number_of), self, reduction, values, at)

    def row_states(self, reduction: Any, values: tuple, at: At) -> tuple:
        """The state of each row of which a lane has values: of all that the warp's part has of the row, in each lane."""
        return generate(self.piece.size.M, row_state, self, reduction, values, at)

    def keep_rows(self, reduction: Any, states: tuple, at: At) -> None:
        each(keep_row, states, self, reduction, at)

    def row(self, n: int) -> int:
        """Which of a lane's rows has its n-th value."""
        return n % self.piece.size.M

    def row_at(self, n: int, at: At) -> int:
        """The n-th value's row in D; beyond D's edge the last one."""
        return min(row_of(at.place, n), at.shape.M - 1)

    def column(self, n: int, at: At) -> int:
        """The n-th value's column in D; beyond D's edge the last one."""
        return min(column_of(at.place, n), at.shape.N - 1)

    def held_columns(self, at: At) -> int:
        """How many columns of D the warp's part has."""
        return min(self.width, at.shape.N - udiv(at.place.index[1], self.width) * self.width)

    def reduce_columns(self, reduction: Any, values: tuple, at: At) -> None:
        each(reduce_column, generate(self.piece.size.N, number_of), self, reduction, values, at)


def number_of(n: int) -> int:
    return n


def finish_in_range(x: Any, n: int, epilogue: Any, at: At) -> Any:
    i, j = row_of(at.place, n), column_of(at.place, n)
    if i < at.shape.M and j < at.shape.N:
        return numbers(epilogue, "finish", epilogue.finish((x,), translate(ELEMENT, i, j), at.shape), (x,))[0]
    return 0


def reduce_row(_: int, r: int, lanes: Any, reduction: Any, values: tuple, at: At) -> None:
    keep_row(row_state(r, lanes, reduction, values, at), r, lanes, reduction, at)


def row_state(r: int, lanes: Any, reduction: Any, values: tuple, at: At) -> Any:
    """A row of the warp's part: a lane's own values, then those of its lanes. All of these have the state."""
    state = fold(lanes.piece.size.N, with_column, reduction.nothing(), r, lanes, reduction, values, at)
    return fold(lanes.steps_n, exchanged, state, lanes.first_n, reduction)


def keep_row(state: Any, r: int, lanes: Any, reduction: Any, at: At) -> None:
    i, j = at.place.index[0] + r, at.place.index[1]
    if at.holds and lanes.lane_n() == 0 and i < at.shape.M and j < at.shape.N:
        reduction.keep(state, i, udiv(j, lanes.width), at.shape)


def with_column(state: Any, c: int, r: int, lanes: Any, reduction: Any, values: tuple, at: At) -> Any:
    return combined(state, values[c * lanes.piece.size.M + r], reduction, at, at.place.index[0] + r, at.place.index[1] + c)


def reduce_column(_: int, c: int, lanes: Any, reduction: Any, values: tuple, at: At) -> None:
    state = fold(lanes.piece.size.M, with_row, reduction.nothing(), c, lanes, reduction, values, at)
    state = fold(lanes.steps_m, exchanged, state, lanes.first_m, reduction)
    i, j = at.place.index[0], at.place.index[1] + c
    if at.holds and lanes.lane_m() == 0 and i < at.shape.M and j < at.shape.N:
        reduction.keep(state, j, udiv(i, lanes.height), at.shape)


def with_row(state: Any, r: int, c: int, lanes: Any, reduction: Any, values: tuple, at: At) -> Any:
    return combined(state, values[c * lanes.piece.size.M + r], reduction, at, at.place.index[0] + r, at.place.index[1] + c)


def combined(state: Any, x: Any, reduction: Any, at: Any, i: int, j: int) -> Any:
    """A state with one value more, if that is in range."""
    if i < at.shape.M and j < at.shape.N:
        return reduction.combine(state, reduction.state_of(x, i, j))
    return state


# -- exchanges ----------------------------------------------------------------------------------------------------------

def exchanged(state: Any, n: int, first: int, reduction: Any) -> Any:
    """Lanes whose numbers differ in one bit exchange. The lane whose bit is 0 gives the first argument in both, so both make
    the same of it."""
    other = of_other_lane(reduction, state, first << n)
    return reduction.combine(state, other) if lane_index() & first << n == 0 else reduction.combine(other, state)


def of_other_lane(reduction: Any, x: Any, distance: int) -> Any:
    """Part by part."""
    if reduction.state_parts == 1:
        return butterfly(x, distance)
    if reduction.state_parts == 2:
        return convert(reduction.state, (butterfly(x[0], distance), butterfly(x[1], distance)))
    if reduction.state_parts == 3:
        return convert(reduction.state, (butterfly(x[0], distance), butterfly(x[1], distance), butterfly(x[2], distance)))
    return convert(reduction.state, (butterfly(x[0], distance), butterfly(x[1], distance), butterfly(x[2], distance),
                                     butterfly(x[3], distance)))


# -- where D's tile is in shared memory ---------------------------------------------------------------------------------

def store_together(epilogue: Any, spec: Any, d: Any, pointer: Any, block: Place, warp: int, shape: Any) -> None:
    """Step 6 of `singlestage` for an epilogue that finishes blocks: a warp takes its parts of D's tile in turn."""
    lanes = spec.lanes
    for part in range(warp, lanes.parts, spec.warps):
        tile = lanes.tile(part)
        holds = lane_index() < lanes.m * lanes.n
        place = translate(tile, block.i if holds else block.rows, block.j)
        values = epilogue.values_at(spec, pointer, tile, place, shape)
        store_masked(epilogue.finish_block(values, lanes, At(place, shape, holds)), 0, spec, d, place, shape)


def store_masked(values: tuple, _: int, spec: Any, d: Any, place: Any, shape: Any) -> None:
    """Finished values of a tile, those in range."""
    if spec.d.layout.packed > 1:
        store_packed(values, spec, d, place, shape)
    elif inside(place, shape.M, shape.N):
        spec.d.layout.store(d, place, delivered(spec, values), shape)
    else:
        each(store_in_range, values, spec, d, place, shape)


def store_packed(values: tuple, spec: Any, d: Any, place: Any, shape: Any) -> None:
    """Of a row's pairs one value each: pairs are in range or out of it. ``place`` counts the product's columns."""
    if inside(place, shape.M, shape.N):
        packed = translate(spec.lanes.packed, place.index[0], udiv(place.index[1], 2))
        spec.d.layout.store(d, packed, delivered(spec, values), shape)
    else:
        each(store_packed_in_range, values, spec, d, place, shape)


def store_packed_in_range(x: Any, n: int, spec: Any, d: Any, place: Any, shape: Any) -> None:
    i, j = place.index[0], place.index[1] + 2 * n
    if i < shape.M and j < shape.N:
        spec.d.layout.store(d, translate(ELEMENT, i, udiv(j, 2)), delivered(spec, (x,)), shape)


def store_in_range(x: Any, n: int, spec: Any, d: Any, place: Any, shape: Any) -> None:
    i, j = row_of(place, n), column_of(place, n)
    if i < shape.M and j < shape.N:
        spec.d.layout.store(d, translate(ELEMENT, i, j), delivered(spec, (x,)), shape)


# -- on the host --------------------------------------------------------------------------------------------------------

def lanes_of(piece: Tile, rows: int, columns: int, along_rows: bool, columns_too: bool, least_n: int = 1) -> Lanes:
    """The lanes of a warp on a block's tile: along lines of D, but some of them below each other where columns are reduced
    (``columns_too``), and ``least_n`` beside each other: a part of few rows, or columns, would leave as many partial states
    as D has elements."""
    grid_m, grid_n = rows // piece.extents[0], columns // piece.extents[1]
    most_n = WARP // DOWN if columns_too else WARP
    n = math.gcd(most_n, grid_n) if along_rows else WARP // math.gcd(WARP, grid_m)
    n = math.gcd(max(n, least_n), grid_n)
    m = math.gcd(WARP // n, grid_m)
    return Lanes(piece, m, n, rows, columns, along_rows)
