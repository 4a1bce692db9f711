"""What rows and rounds of a tile go along, where arrays on the GPU say so: lengths, pieces of packed rows, pages.

Rounds of a tile go from ``start`` to ``stop``, ``sequential(k.rows, start=starts[h], stop=lengths[h])``: whole numbers of
elements of arrays, which +, -, *, maximum and minimum make others of.

Each of a stack of matrices then has a length of its own, as sequences of a batch have. A length beyond the axis is the
axis, and a start in front of it its first row. Without rows between the start and the length there are no rounds. Blocks
in front of the start and behind the length are not loaded. Places count from the axis' first row.

>>> import numpy as np
>>> import gemmkit as gk
>>> from gemmkit import programs as gp
>>> @gk.program
... def summed(x, y, lengths, d):
...     for h, m in gp.parallel(x.count, x.rows):
...         sums = gp.zeros(m, y.columns)
...         for n in gp.sequential(y.rows, stop=lengths[h]):
...             sums += x[h, m, n] @ y[h, n]
...         d[h, m] = sums
>>> x, y, d = np.ones((2, 1, 5)), np.ones((2, 5, 1)), np.empty((2, 1, 1))
>>> summed.reference(x, y, np.array([3, 9]), d).ravel()
array([3., 5.])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.programs.values import Index, Parameter, Place, ProgramAxis, current, refused, shown

if TYPE_CHECKING:
    from gemmkit.programs.trace import Value

COUNTED = np.dtype(np.int32), np.dtype(np.int64)
#: An operation: how long a piece is. Its data is the array of offsets, and the index that says which piece it is.
PIECE = "piece"
#: How whole numbers are made of others, as a kernel writes it.
OF_WHOLE = {"add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "neg": "(-{})", "max": "max({}, {})"}


def check_bound(word: str, given: Any, extent: ProgramAxis) -> Value:
    """The whole number that a loop's ``start`` or ``stop`` is. Raises TypeError and ValueError, with the user's line, for
    what is no number of all rows of a tile."""
    such = (f"a whole number of elements of arrays of int32 or int64 is needed, such as {word}=lengths[h] or "
            f"{word}=lengths[h] - 128")
    if isinstance(given, Parameter):
        raise refused(TypeError, f"sequential({word}={given.name}): {given.name} has shape {given.shape}, and a tile has "
                                 f"one length; {such}")
    if extent.stack:
        raise refused(ValueError, f"sequential({word}=...): the loop is over {extent}, one by one; only loops over rows and "
                                  f"columns take {word}=")
    if not isinstance(given, (int, np.integer)) and not hasattr(given, "value"):
        raise refused(TypeError, f"sequential({word}={given!r}): {such}")
    found = cast("Value", current().lift(given))
    if found.dims:
        raise refused(ValueError, f"sequential({word}={_said(found)}) has the dimensions ({shown(found.dims)}): all rows of "
                                  "a tile share its rounds, so a length must be one number; write a limit of each row as a "
                                  "condition of where(...)")
    _check_whole(word, found, such)
    return found


def _check_whole(word: str, x: Value, such: str) -> None:
    if x.op == "load" and np.dtype(x.data[0].dtype) not in COUNTED:
        raise refused(TypeError, f"sequential({word}=...): {_said(x)} has dtype {x.data[0].dtype}: lengths must be int32 or "
                                 "int64")
    if x.op == "const" and not float(x.data).is_integer():
        raise refused(TypeError, f"sequential({word}=...): {x.data!r} is not whole; {such}")
    if x.op not in (*OF_WHOLE, "load", "const", "coordinate"):
        raise refused(TypeError, f"sequential({word}=...): {_said(x)} is not whole; {such}; +, -, *, maximum and minimum "
                                 "make others of them")
    for y in x.args:
        _check_whole(word, y, such)


def _said(x: Value) -> str:
    return f"{x.data[0].name}[{shown(x.data[1])}]" if x.op == "load" else repr(x)


def whole_text(x: Value) -> str:
    """A whole number of a tile as a kernel computes it."""
    if x.op == "load":
        return f"int({x.data[0].name}[{', '.join(index.text() for index in x.data[1])}])"
    if x.op in ("const", "coordinate"):
        return str(int(x.data)) if x.op == "const" else x.data.text()
    return OF_WHOLE[x.op].format(*map(whole_text, x.args))


def packed_rows(axis: Any, offsets: Any) -> PackedRows:
    """Raises TypeError and ValueError, with the user's line, for what is no axis of rows, and no array of offsets."""
    if not isinstance(axis, ProgramAxis) or axis.stack or axis.offsets is not None:
        raise refused(TypeError, f"packed({axis!r}, ...): the rows of an array are needed, such as q.rows")
    if not isinstance(offsets, Parameter):
        raise refused(TypeError, f"packed(..., {offsets!r}): an array argument of whole numbers is needed, in which each "
                                 "piece begins where the one before ends")
    rank, dtype = len(offsets._shape), np.dtype(offsets.dtype)
    if rank != 1 or not offsets._shape[0] or dtype not in COUNTED:
        raise refused(ValueError if dtype in COUNTED else TypeError,
                      f"packed(..., {offsets.name}): {offsets.name} has shape {offsets._shape} and dtype {dtype}; one "
                      "dimension of int32 or int64 is needed, one element more than there are pieces")
    return PackedRows(axis, offsets)


def paged_rows(array: Any, table: Any) -> PagedRows:
    """Raises TypeError and ValueError, with the user's line, for what are no pages, and for what is no table."""
    if not isinstance(array, Parameter) or len(array._shape) < 3:
        raise refused(TypeError, f"paged({array!r}, ...): an array argument is needed whose first axis are pages: (pages, "
                                 "rows of a page, columns), or with other stacks in between")
    if not isinstance(table, Parameter):
        raise refused(TypeError, f"paged(..., {table!r}): an array argument of whole numbers is needed, a line of pages for "
                                 "each sequence")
    dtype = np.dtype(table.dtype)
    if len(table._shape) != 2 or dtype not in COUNTED:
        raise refused(ValueError if dtype in COUNTED else TypeError,
                      f"paged(..., {table.name}): {table.name} has shape {table._shape} and dtype {dtype}; two dimensions "
                      "of int32 or int64 are needed, sequences and the pages of each")
    return PagedRows(array, table)


def piece_of(extent: ProgramAxis, indices: Iterable[Index]) -> Index | None:
    """The index of a tile that says which piece its rows are of; None of rows that are in no piece."""
    if extent.offsets is None or extent.stack:
        return None
    return next((x for x in indices if x.extent.counts_pieces and x.extent.offsets is extent.offsets), None)


# -- pieces and pages -----------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows that are cut into pieces, one behind the other: piece i goes from ``offsets[i]`` to ``offsets[i + 1]``.
    ``count``: to go along the pieces, one by one; ``rows``: along the rows of one; ``[i]``: those of the i-th, in rounds."""

    axis: ProgramAxis
    offsets: Parameter

    @property
    def count(self) -> ProgramAxis:
        (length,) = self.offsets._shape
        return ProgramAxis(self.offsets.name, 0, length - 1, True, offsets=self.offsets)

    @property
    def rows(self) -> ProgramAxis:
        return replace(self.axis, offsets=self.offsets)

    def __getitem__(self, piece: Any) -> RowsOfPiece:
        piece = piece.dim if isinstance(piece, Place) else piece
        if not isinstance(piece, Index) or not piece.stack:
            raise refused(TypeError, f"packed(...)[{piece!r}]: which piece it is must be a variable of parallel(...) along "
                                     "pieces or a stack")
        current().axes.cut(piece, self.offsets)
        return RowsOfPiece(self.rows, piece)


@dataclass(frozen=True, eq=False)
class PagedRows:
    """Rows of an array in pages, the matrices of its first axis: row n of sequence i is row ``n % of_page`` of page
    ``table[i, n // of_page]``. ``[i]``: those of the i-th, in rounds."""

    array: Parameter
    table: Parameter

    def __getitem__(self, line: Any) -> RowsOfPiece:
        line = line.dim if isinstance(line, Place) else line
        if not isinstance(line, Index) or not line.stack:
            raise refused(TypeError, f"paged(...)[{line!r}]: which line of the table it is must be a variable of "
                                     "parallel(...) along a stack")
        rows, table = ProgramAxis(self.array.name, len(self.array._shape) - 2, self.array._shape[-2]), self.table
        current().axes.cut(line, table, 0)
        current().axes.whole.add((rows.parameter, rows.axis))          # blocks are of whole pages, or within one
        return RowsOfPiece(replace(rows, length=rows.length * table._shape[1], table=table, pages=self.array._shape[0],
                                   of_page=rows.length), line)


@dataclass(frozen=True, eq=False)
class RowsOfPiece:
    """Rows of one of an array's pieces, or of those in the pages of one line of a table: which one is it."""

    axis: ProgramAxis
    which: Index
