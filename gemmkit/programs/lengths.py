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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.programs.values import COUNTED, Axis, Index, Parameter, Place, ProgramAxis, current, line_here, refused, shown

if TYPE_CHECKING:
    from gemmkit.programs.trace import Value

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


def whole_text(x: Value, is_part: bool = False) -> str:
    """A whole number of a tile as a kernel computes it: in 64 bits what others are made of, which lengths have anyway."""
    if x.op == "load":
        return f"int({x.data[0].name}[{', '.join(index.text() for index in x.data[1])}])"
    if x.op in ("const", "coordinate"):
        return str(int(x.data)) if x.op == "const" else f"convert(I64, {x.data.text()})" if is_part else x.data.text()
    return OF_WHOLE[x.op].format(*(whole_text(y, True) for y in x.args))


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


# --------------------------------------------------------------------------------------------------
# Which axes of arrays are the same: a program says it, and lengths that happen to be equal do not.
#
# An axis is a symbol, (array, axis). An index goes along the axis that it is made of, ``a.columns``; lengths of axes that
# a program makes the same must agree.
#
# | a program | says |
# |---|---|
# | an index stands on an axis of another array: ``b[k, n]`` with ``k`` of ``a.columns`` | b's rows are a's columns |
# | an index stands on both axes of the array that it is of: ``a[m, k] @ a[k, n]`` | a is square |
# | whole axes meet in a sum, a product, a cell or a store: ``x[m] + y[m]`` | their axes are the same |
#
# So these are slips, whatever lengths are: an index that stands on another axis of its own array and never on its own,
# ``a[m, k]`` with ``k`` of ``a.rows``; one that stands on two axes of another array; and two whole axes of one array that
# meet element by element, and are not the same through other arrays.
# From sizes a trace takes no more than is noted here: which axes must be of one length, how long those are that are
# values' own, and whatever a program's code makes of a shape. With other sizes that agree in it, it is the same trace.

AxisSymbol = tuple[str, int]


def _stands(index: Index, at: AxisSymbol, key: tuple) -> str:
    return f"{at[0]}[{shown(key)}]: {index} is a block of {index.extent}, used here for axis {at[1]} of {at[0]}"


class Axes:
    """What a program has said so far. ``related``: axes of which the first is so many times as long as the second, and so
    much longer; ``whole``: those that are values' own dimensions; ``seen``: the arrays whose shapes the program's own code
    has read."""

    def __init__(self) -> None:
        self.related: set[tuple[AxisSymbol, AxisSymbol, int, int]] = set()
        self.whole: set[AxisSymbol] = set()
        self.seen: set[str] = set()
        self._parents: dict[AxisSymbol, AxisSymbol] = {}
        self._uses: dict[Index, dict[AxisSymbol, tuple[tuple, str]]] = {}  # where indices stand: among which, and the line

    def _first(self, x: AxisSymbol) -> AxisSymbol:
        while x in self._parents:
            x = self._parents[x]
        return x

    def are_same(self, x: AxisSymbol, y: AxisSymbol) -> bool:
        return self._first(x) == self._first(y)

    def join(self, x: AxisSymbol, y: AxisSymbol) -> None:
        if not self.are_same(x, y):
            self._parents[self._first(y)] = self._first(x)

    # -- indices ------------------------------------------------------------------------------------------------------

    def use(self, index: Index, parameter: Parameter, axis: int, key: tuple) -> None:
        """An index stands on an axis of an array. Raises ValueError for a length that differs, an index twice, and for one
        that stands on two axes of an array that it is not of."""
        extent, name, at = index.extent, parameter.name, (parameter.name, axis)
        if index.of_loop.is_over:
            raise refused(ValueError, f"{name}[{shown(key)}]: the loop of {index} is over")
        if index.lookup is not None:
            if axis != len(parameter._shape) - 2:
                raise refused(ValueError, f"{name}[{shown(key)}]: {index!r} stands for rows, and is used for axis {axis} of "
                                          f"{name}, which has shape {parameter._shape}; write {name}[{index!r}, k]")
            return
        held = [other for other in key if isinstance(other, Index)]
        in_page = index.is_paged and index.page in held
        if index.is_page and index.base not in held:
            raise refused(ValueError, f"{name}[{shown(key)}]: {index!r} is the page of rows {index.base!r}, which are not "
                                      f"read; write {name}[{index!r}, ..., {index.base!r}]")
        if (index.is_page and axis) or (in_page and any(not x.stack and x is not index for x in held)):
            raise refused(ValueError, f"{name}[{shown(key)}]: pages are an array's first axis, and their rows are read with "
                                      f"all columns; write {name}[{index.of_loop.page!r}, ..., {index.of_loop!r}]")
        if sum(other.of_loop is index.of_loop and not other.is_page for other in held) > 1:
            raise refused(ValueError, f"{name}[{shown(key)}]: {index} is used twice, but rows and columns must be different "
                                      "blocks; use two loops")
        if (extent.of_page if in_page else extent.length) != parameter._shape[axis]:
            raise refused(ValueError, f"{_stands(index, at, key)} ({parameter._shape[axis]} elements)")
        if index.is_paged and not in_page and extent.table is not None:
            self.related.add((at, (extent.table.name, 1), extent.of_page, 0))
            return
        self.related.add(((extent.parameter, extent.axis), at, extent.group, int(extent.counts_pieces)))
        if extent.group > 1 or extent.counts_pieces:
            return
        uses = self._uses.setdefault(index, {})
        if at not in uses:
            uses[at] = key, line_here()
        if name != extent.parameter:
            if any(other == name and where != axis for other, where in uses):
                raise refused(ValueError, f"{name}[{shown(key)}]: {index} is used for two axes of {name}, but is a block of "
                                          f"{extent}; if {name} is square, loop over {name}.rows or {name}.columns")
            self.join((extent.parameter, extent.axis), at)

    def cut(self, piece: Index, offsets: Parameter, less: int = 1) -> None:
        """An index says which piece of an array it is, ``less`` of which there are than ``offsets``, or which line of a
        table. Raises ValueError where there is another number of them."""
        extent, count = piece.extent, offsets._shape[0] - less
        if extent.length != count:
            what = f"has the offsets of {count} pieces" if less else f"has {count} lines"
            raise refused(ValueError, f"[{piece!r}]: {offsets.name} {what}, and {piece!r} goes along {extent.length}")
        more = int(extent.counts_pieces) - less * extent.group
        self.related.add(((extent.parameter, extent.axis), (offsets.name, 0), extent.group, more))

    def check(self) -> None:
        """Raises ValueError, with the line, for an index that stands on other axes of its array alone."""
        for index, uses in self._uses.items():
            own = index.extent.parameter, index.extent.axis
            for at, (key, line) in uses.items():
                if at[0] == own[0] and at != own and own not in uses:
                    raise refused(ValueError, f"{_stands(index, at, key)}, which is another axis: equal lengths do not make "
                                              "axes the same", line)

    # -- whole axes ---------------------------------------------------------------------------------------------------

    def meet(self, what: Callable[[], str], x: Axis, y: Axis, is_contracted: bool = False) -> None:
        """Two whole axes of a length are the same. Raises ValueError where they are two of one array, which only a product
        that sums over both makes the same."""
        if x.of is None or y.of is None or x == y:
            return
        if x.of[0] == y.of[0] and not is_contracted and not self.are_same(x.of, y.of):
            raise refused(ValueError, f"{what()}: {x} is combined with {y}: equal lengths do not make axes the same")
        self.join(x.of, y.of)

    def renamed(self, what: Callable[[], str], dims: tuple, other: tuple) -> tuple:
        """``other`` with the whole axes of ``dims`` in place of those that meet them: one that is the same already, or else
        the last of that length, which is along columns. A block that is columns of its own rows meets the rows of a matrix;
        with a value of these rows it makes one."""
        found: list[Any] = []
        for d in other:
            if isinstance(d, Axis) and d not in dims:
                fits = [e for e in reversed(dims) if isinstance(e, Axis) and e.size == d.size and e not in other
                        and e not in found]
                known = [e for e in fits if d.of and e.of and self.are_same(d.of, e.of)]
                if fits:
                    e = (known or fits)[0]
                    self.meet(what, e, d)
                    d = e
            elif isinstance(d, Index) and d.twin is not None and d not in dims and d.twin in dims and d.twin not in other:
                d = d if dims == (d.twin,) and len(other) == 1 else d.twin
            found.append(d)
        return tuple(found)
