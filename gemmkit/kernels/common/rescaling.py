"""``rescale_rows``: the second pass over rows of D that an epilogue normalises (`gemmkit.epilogues.norms`).

The product has stored values that are standard in their part of a row, and each part's state.

1. A warp takes a piece of a row (of a column-major D: of 32 rows, a lane each).
2. It combines the states of all parts of the row, in an order that depends on their number alone.
3. It loads its values of D, multiplies each by its part's factor, and stores them in place.

All loads of a warp's piece go out together. Warps of one row combine its states each for itself: they are few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gemmkit.component_products import of_product
from gemmkit.components import Component, Scalar
from gemmkit.kernels.common.lanes import exchanged
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, fold
from gemmkit.lang.registers import generate
from gemmkit.lang.values import convert_all
from gemmkit.ptx.memory import load_global, store_global
from gemmkit.ptx.special import block_x, lane_index, thread_index, udiv

WARP, EXCHANGES, WARPS = 32, 5, 4      # lanes, exchanges among them, and warps of a block
PIECES = 4                             # that a lane loads at a time
STEP = 128                             # columns of a column-major D that a warp takes


@dataclass(frozen=True)
class Rescaler(Component):
    """Who rescales what: D's matrices of a stack (``steps``), ``vector`` neighbours at a time along ``axis``. A row is
    ``chunks`` warps', a product ``blocks`` blocks'."""

    steps: Any
    axis: int
    vector: int
    chunks: Scalar
    blocks: Scalar


class Row(NamedTuple):
    """A row of a product's D: the matrix, the row's number, the epilogue that finishes it, the state of all its parts
    together, and the product's sizes."""

    d: Any
    number: Any
    own: Any
    whole: Any
    sizes: Any


def rescale_rows(how: Any, epilogue: Any, d: Any, shape: Any) -> None:
    """See the module. Launched with ``WARPS`` warps a block."""
    # 1. Which product, which rows and which columns are this warp's?
    batch = udiv(block_x(), how.blocks)
    own, sizes = of_product(epilogue, batch).ending(), of_product(shape, batch)
    item = (block_x() - batch * how.blocks) * WARPS + udiv(thread_index(), WARP)
    part = udiv(item, how.chunks)
    chunk = item - part * how.chunks
    if how.axis == 1:
        if part < sizes.M:
            rescale_row(how, own, how.steps.matrix(d, batch), part, chunk * PIECES * WARP * how.vector, sizes)
    else:
        row = part * WARP + lane_index()
        if row < sizes.M:
            rescale_columns(own, how.steps.matrix(d, batch), row, chunk * STEP, sizes)


def rescale_row(how: Any, own: Any, d: Any, row: int, begin: int, sizes: Any) -> None:
    # 2. The states of lanes 0 to 31, and so on; then the lanes' in a tree.
    whole = fold(EXCHANGES, exchanged, combined_states(own, row, lane_index(), WARP, sizes), 1, own)
    # 3. Beyond the row a lane's first piece stands for the next ones, which are not stored.
    first = begin + lane_index() * how.vector
    if first < sizes.N:
        this = Row(d, row, own, whole, sizes)
        each(store_piece, generate(PIECES, load_piece, how, this, first), how, this, first)


def rescale_columns(own: Any, d: Any, row: int, begin: int, sizes: Any) -> None:
    this = Row(d, row, own, combined_states(own, row, 0, 1, sizes), sizes)
    end = min(begin + STEP, sizes.N)
    j = begin
    while j < end:
        each(store_element, generate(PIECES, load_element, this, j, end), this, j, end)
        j += PIECES


def combined_states(own: Any, row: int, first: int, step: int, sizes: Any) -> Any:
    state = own.nothing()
    slot = first
    while slot < own.kept.slots:
        state = own.combine(state, own.kept.kept(row, slot, sizes))
        slot += step
    return state


def load_piece(p: int, how: Any, row: Row, first: int) -> tuple:
    j = first + p * WARP * how.vector
    return load_global(row.d, 1, (row.number, j if j < row.sizes.N else first), (0, 0), how.vector)


def store_piece(values: tuple, p: int, how: Any, row: Row, first: int) -> None:
    j = first + p * WARP * how.vector
    if j < row.sizes.N:
        store_global(row.d, 1, (row.number, j), (0, 0), rescaled(values, row, j))


def load_element(p: int, row: Row, j: int, end: int) -> tuple:
    return load_global(row.d, 0, (row.number, j + p if j + p < end else j), (0, 0), 1)


def store_element(values: tuple, p: int, row: Row, j: int, end: int) -> None:
    if j + p < end:
        store_global(row.d, 0, (row.number, j + p), (0, 0), rescaled(values, row, j + p))


def rescaled(values: tuple, row: Row, j: int) -> tuple:
    """Neighbours of one part of a row, from column ``j`` on."""
    own, whole, sizes = row.own, row.whole, row.sizes
    part = own.kept.kept(row.number, udiv(j, own.kept.width), sizes)
    made = own.finished(convert_all(own.dtype, values), own.factor(part, whole, sizes), own.shift(part, whole, sizes), j)
    return convert_all(own.stored, made)
