"""Step 3 of `warp_specialised` for epilogues that see more than an element: what a consumer's lanes hold of a fragment.

Of a 64-row fragment a warp has 16 rows. Lane l has, in each octet of columns, columns 2 (l mod 4) and the next, of rows
l / 4 and l / 4 + 8. So a row is four lanes', a column eight lanes'. A lane combines its own values of a row first, over all
columns of the fragment: two states, whatever its width. (Of columns it has as many states as columns of its own.)
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from gemmkit.components import Component
from gemmkit.kernels.collectives.lanes import combined, exchanged, finish_in_range, store_masked
from gemmkit.kernels.collectives.operand import delivered, inside, read_inside, read_tile, transform_tile, transform_within
from gemmkit.kernels.collectives.operand import finished as finished_tile
from gemmkit.kernels.collectives.scheduler import Outputs, TileCoord
from gemmkit.lang.aggregates import convert_all
from gemmkit.lang.checks import convertible, numbers
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric
from gemmkit.lang.registers import apply, each, fold, generate, join, split
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.tiling import Tile, translate

if TYPE_CHECKING:
    from gemmkit.epilogues.base import Epilogue
    from gemmkit.epilogues.reductions import States
    from gemmkit.kernels.sm90.family import Sm90Spec
    from gemmkit.transforms.base import Transform

# --------------------------------------------------------------------------------------------------
# Functions of elements in step 3 of `warp_specialised`: C, transforms of C and D, and the epilogue, on pairs of sums.

def finish_pair_by_element(pair: tuple, n: int, spec: Sm90Spec, outputs: Outputs, row: int, column: int) -> tuple:
    """Pairs out of range are computed as if they were the nearest in range: the result is not stored, and a function
    that indexes an array stays within it. The nearest is of the same fragment, which has not been stored yet."""
    row, column = row + n % 2 * 8, column + n // 2 * 8
    if spec.d.whole:
        row, column = min(row, outputs.shape.M - 1), min(column, outputs.shape.N - 2)
        return finished(pair, spec, outputs, translate(spec.store.pair, row, column))
    # N is odd, and a pair may straddle its end.
    return join(apply(finish_element, split(pair, 1), spec, outputs, row, column))


def finish_element(one: tuple, n: int, spec: Sm90Spec, outputs: Outputs, row: int, column: int) -> tuple:
    row, column = min(row, outputs.shape.M - 1), min(column + n, outputs.shape.N - 1)
    return finished(one, spec, outputs, translate(spec.store.single, row, column))


def finished(values: tuple, spec: Sm90Spec, outputs: Outputs, place: Tile) -> tuple:
    """Some sums as values of D; ``place`` is where they lie globally, in range."""
    if spec.has_c:
        values = add_c(values, spec, outputs, place)
    values = changed_sums(spec.d.to_registers, values, spec, place)
    values = changed_sums(spec.d.to_shared, values, spec, place)
    return finished_tile(spec.epilogue, values, spec.d.layout, place, outputs.shape)


def changed_sums(transform: Transform, values: tuple, spec: Sm90Spec, place: Tile) -> tuple:
    """A transform of D: its values stay numbers of as many parts as the sums have, or fewer."""
    if transform.is_identity:
        return values
    return convertible(transform, "__call__", transform_tile(transform, values, place), spec.operator.fragment_c.dtype)


def add_c(values: tuple, spec: Sm90Spec, outputs: Outputs, place: Tile) -> tuple:
    added = transform_tile(spec.c.to_registers, read_inside(spec.c, outputs.c, place, outputs.shape), place)
    return apply(add_value, values, convert_all(spec.operator.fragment_c.dtype, added))


def add_value(x: Numeric, n: int, others: tuple) -> Any:
    return x + others[n]


def add_c_masked(values: tuple, spec: Any, outputs: Outputs, place: Tile) -> tuple:
    shape = outputs.shape
    added = read_tile(spec.c, outputs.c, place, TileCoord(place.index[0], place.index[1], shape.M, shape.N), 0, shape)
    added = transform_within(spec.c.to_registers, added, place, shape.M, shape.N)
    return apply(add_value, values, convert_all(spec.operator.fragment_c.dtype, added))


ROWS, QUAD, OCTET = 2, 4, 8            # rows of a lane, lanes of a row, columns from a pair to the next
PAIR, SINGLE = Tile(M=1, N=2), Tile(M=1, N=1)


class FragmentCoord(NamedTuple):
    """Where a lane's values lie: its first row and column, and D's sizes; which ``fragment`` of which consumer (``group``)
    they are of, the bit that flips with its tiles, and the ``exchange`` with the other blocks of a cluster."""

    row: Any
    column: Any
    shape: Any
    group: Any
    fragment: Any
    turn: Any
    exchange: Any


class PairCoord(NamedTuple):
    """Where a pair lies, as `finish_in_range` asks."""

    place: Any
    shape: Any


@dataclass(frozen=True)
class Fragments(Component):
    """A warp on a fragment. With ``masked`` values out of range are not finished, for an epilogue that writes; else they
    are finished as if they were the nearest in range, which takes no branch. ``whole``: pairs are in range or out of it."""

    masked: bool
    whole: bool
    width: int                         # columns of the fragment

    @cached_property
    def own(self) -> int:
        """Columns of a lane."""
        return self.width // QUAD

    def finish(self, epilogue: Epilogue, values: tuple, at: FragmentCoord) -> tuple:
        return join(apply(finish_pair, split(values, 2), self, epilogue, at))

    def reduce_rows(self, reduction: States, values: tuple, at: FragmentCoord) -> None:
        each(reduce_row, generate(ROWS, number_of), self, reduction, values, at)

    def row_states(self, reduction: States, values: tuple, at: FragmentCoord) -> tuple:
        """The states of a lane's rows: of all columns of the fragment, in each lane of the quad."""
        return generate(ROWS, quad_state, self, reduction, values, at)

    def whole_rows(self, epilogue: Epilogue, states: tuple, at: FragmentCoord) -> tuple:
        """The states of a lane's rows over all blocks of the cluster."""
        return at.exchange.whole_rows(epilogue, states, at)

    def keep_rows(self, reduction: States, states: tuple, at: FragmentCoord) -> None:
        each(keep_row, states, self, reduction, at)

    def row(self, n: int) -> int:
        """Which of a lane's rows has its n-th value."""
        return n // 2 % ROWS

    def row_at(self, n: int, at: FragmentCoord) -> int:
        """The n-th value's row in D; beyond D's edge the last one."""
        return min(at.row + n // 2 % ROWS * 8, at.shape.M - 1)

    def column(self, n: int, at: FragmentCoord) -> int:
        """The n-th value's column in D; beyond D's edge the last one."""
        return min(at.column + n // 4 * OCTET + n % 2, at.shape.N - 1)

    def held_columns(self, at: FragmentCoord) -> int:
        """How many columns of D the fragment has."""
        return min(self.width, at.shape.N - udiv(at.column, self.width) * self.width)

    def reduce_columns(self, reduction: States, values: tuple, at: FragmentCoord) -> None:
        each(reduce_column, split(values, 2 * ROWS), reduction, at)


def number_of(n: int) -> int:
    return n


def place_of(n: int, at: FragmentCoord) -> Any:
    """Where the n-th pair lies."""
    return translate(PAIR, at.row + n % ROWS * 8, at.column + udiv(n, ROWS) * OCTET)


# -- finishing ----------------------------------------------------------------------------------------------------------

def finish_pair(pair: tuple, n: int, fragments: Fragments, epilogue: Epilogue, at: FragmentCoord) -> tuple:
    place = place_of(n, at)
    if fragments.masked:
        if inside(place, at.shape.M, at.shape.N):
            return numbers(epilogue, "finish", epilogue.finish(pair, place, at.shape), pair)
        return apply(finish_in_range, pair, epilogue, PairCoord(place, at.shape))
    if fragments.whole:
        nearest = translate(PAIR, min(place.index[0], at.shape.M - 1), min(place.index[1], at.shape.N - 2))
        return numbers(epilogue, "finish", epilogue.finish(pair, nearest, at.shape), pair)
    return join(apply(finish_single, split(pair, 1), epilogue, place, at))


def finish_single(one: tuple, n: int, epilogue: Epilogue, place: Tile, at: FragmentCoord) -> tuple:
    nearest = translate(SINGLE, min(place.index[0], at.shape.M - 1), min(place.index[1] + n, at.shape.N - 1))
    return numbers(epilogue, "finish", epilogue.finish(one, nearest, at.shape), one)


# -- combining ----------------------------------------------------------------------------------------------------------

def reduce_row(_: int, r: int, fragments: Fragments, reduction: States, values: tuple, at: FragmentCoord) -> None:
    keep_row(quad_state(r, fragments, reduction, values, at), r, fragments, reduction, at)


def quad_state(r: int, fragments: Fragments, reduction: States, values: tuple, at: FragmentCoord) -> Any:
    """A lane's row: its own columns, then those of its quad. All four have the state."""
    return fold(2, exchanged, row_state(r, fragments, reduction, values, at), 1, reduction)


def keep_row(state: Any, r: int, fragments: Fragments, reduction: States, at: FragmentCoord) -> None:
    row = at.row + r * 8
    if lane_index() % QUAD == 0 and row < at.shape.M:
        reduction.keep(state, row, udiv(at.column, fragments.width), at.shape)


def row_state(r: int, fragments: Fragments, reduction: States, values: tuple, at: FragmentCoord) -> Any:
    """Where all columns are in range none is asked about. A row beyond D's counts as its last one: what comes of it is not
    kept."""
    m = min(at.row + r * 8, at.shape.M - 1)
    if at.column + fragments.width - OCTET + 1 < at.shape.N:
        return fold(fragments.own, with_column_in_range, reduction.nothing(), r, m, reduction, values, at)
    return fold(fragments.own, with_column, reduction.nothing(), r, m, reduction, values, at)


def with_column_in_range(state: Any, c: int, r: int, m: int, reduction: States, values: tuple, at: FragmentCoord) -> Any:
    x = values[c // 2 * 4 + r * 2 + c % 2]
    return reduction.combine(state, reduction.state_of(x, m, at.column + c // 2 * OCTET + c % 2))


def with_column(state: Any, c: int, r: int, m: int, reduction: States, values: tuple, at: FragmentCoord) -> Any:
    x, column = values[c // 2 * 4 + r * 2 + c % 2], at.column + c // 2 * OCTET + c % 2
    return reduction.combine(state, reduction.state_of(x, m, column)) if column < at.shape.N else state


def reduce_column(octet: tuple, n: int, reduction: States, at: FragmentCoord) -> None:
    """A lane's two columns of an octet: its two rows, then those of the lanes below each other."""
    each(reduce_one_column, generate(2, number_of), octet, n, reduction, at)


def reduce_one_column(_: int, c: int, octet: tuple, n: int, reduction: States, at: FragmentCoord) -> None:
    column = at.column + n * OCTET + c
    state = combined(reduction.nothing(), octet[c], reduction, at, at.row, column)
    state = combined(state, octet[2 + c], reduction, at, at.row + 8, column)
    state = fold(3, exchanged, state, QUAD, reduction)
    if lane_index() < QUAD and at.row < at.shape.M and column < at.shape.N:
        reduction.keep(state, column, udiv(at.row, 16), at.shape)


# -- a fragment's way ---------------------------------------------------------------------------------------------------

def finish_together(sums: tuple, i: int, spec: Any, outputs: Outputs, row: int, column: int, part: Any) -> tuple:
    """A fragment's finished values, for stores that clip: values out of range are computed as the nearest in range."""
    at = FragmentCoord(row, column, outputs.shape, part.group, i, part.turn, spec.row_exchange)
    values = join(apply(start_pair, split(sums, 2), spec, outputs, at))
    values = spec.epilogue.finish_block(values, spec.together, at)
    return convertible(spec.epilogue, "finish", values, spec.d.layout.dtype) if spec.d.layout.is_plain else values


def start_pair(pair: tuple, n: int, spec: Sm90Spec, outputs: Outputs, at: FragmentCoord) -> tuple:
    """Sums with C and the transforms of D."""
    place, shape = place_of(n, at), at.shape
    if spec.has_c:
        pair = add_c_masked(pair, spec, outputs, place)
    pair = transform_within(spec.d.to_registers, pair, place, shape.M, shape.N)
    return transform_within(spec.d.to_shared, pair, place, shape.M, shape.N)


def store_together(sums: tuple, i: int, spec: Any, outputs: Outputs, row: int, column: int, part: Any) -> None:
    """A fragment finished and stored from the registers, pair by pair."""
    at = FragmentCoord(row, column, outputs.shape, part.group, i, part.turn, spec.row_exchange)
    values = join(apply(start_pair, split(sums, 2), spec, outputs, at))
    values = spec.epilogue.finish_block(values, spec.together, at)
    if spec.d.layout.packed > 1:
        each(store_packed, values, spec, outputs, at)
    else:
        each(store_pair, split(values, 2), spec, outputs, at)


def store_packed(x: Numeric, n: int, spec: Sm90Spec, outputs: Outputs, at: FragmentCoord) -> None:
    """What a pair became."""
    i, j = place_of(n, at).index[0], place_of(n, at).index[1]
    if i < at.shape.M and j < at.shape.N:
        spec.d.layout.store(outputs.d, translate(SINGLE, i, udiv(j, 2)), delivered(spec, (x,)), at.shape)


def store_pair(pair: tuple, n: int, spec: Any, outputs: Outputs, at: FragmentCoord) -> None:
    store_masked(pair, n, spec, outputs.d, place_of(n, at), at.shape)
