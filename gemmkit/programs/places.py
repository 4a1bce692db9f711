"""Where values are: blocks of operands in the stages of a loop's ring, sums in registers, the rest where threads need it.

A sequential loop has one ring. In each round its products take their blocks from one stage, and a block that two products
take is there once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.programs.lines import refused
from gemmkit.programs.trace import Carried, Loop, Store, Value
from gemmkit.programs.values import Index, Parameter, shown

TAKEN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@dataclass(eq=False)
class TilePlace:
    """A block of an array in the stages of a ring: ``dims`` as they are in the array."""

    name: str
    parameter: Parameter
    dims: tuple[Index, Index]
    stack: Index | None


@dataclass(eq=False)
class Multiply:
    """A product that is added to a cell's sums."""

    carried: Carried
    a: TilePlace
    b: TilePlace
    a_transposed: bool
    b_transposed: bool
    line: str


@dataclass(eq=False)
class RowSum:
    """Sums along the rows of a block that threads read where it is staged for a product."""

    carried: Carried
    a: TilePlace
    line: str


@dataclass(eq=False)
class ColumnSum:
    """Sums along the columns of a product's right operand, where it is staged; ``transposed``: as its lines."""

    carried: Carried
    b: TilePlace
    transposed: bool
    line: str


@dataclass(eq=False)
class Rounds:
    """A sequential loop: its products and sums of rows and columns, in the order in which they are written."""

    index: Index
    products: list[Multiply]
    tiles: list[TilePlace]
    line: str
    row_sums: list[RowSum] = field(default_factory=list)
    column_sums: list[ColumnSum] = field(default_factory=list)

    @property
    def is_read_by_threads(self) -> bool:
        """Whether not only tensor cores read its stages."""
        return bool(self.row_sums or self.column_sums)


@dataclass(eq=False)
class Places:
    indices: tuple[Index, Index]
    loops: list[Rounds]
    stores: list[Store]
    stack: Index | None = None         # which matrix of stacked arrays
    cells: dict[Value, str] = field(default_factory=dict)          # of what is there after a loop: the sums' name
    starts: dict[str, float] = field(default_factory=dict)         # of the sums' names: what they begin with
    rows: dict[Value, str] = field(default_factory=dict)           # the same of cells that have a value for each row
    row_starts: dict[str, float] = field(default_factory=dict)
    columns: dict[Value, str] = field(default_factory=dict)        # of cells that have one for each column
    column_starts: dict[str, float] = field(default_factory=dict)
    arguments: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Of all cells."""
        return [*self.starts, *self.row_starts, *self.column_starts]

    def column_sums(self, name: str) -> list[ColumnSum]:
        """What is added to a cell of columns."""
        return [x for rounds in self.loops for x in rounds.column_sums if self.columns[x.carried.after] == name]


def places_of(loop: Loop, arguments: Iterable[str]) -> Places:
    """Of a program with ``arguments``, whose names cells do not have. Raises ValueError and TypeError, with the user's line,
    for what has no place yet."""
    if [index.stack for index in loop.indices] not in ([False, False], [True, False, False]):
        raise refused(ValueError, f"parallel({shown(index.extent for index in loop.indices)}): kernels are derived of rows "
                                  "and columns, parallel(a.rows, b.columns), with one stack before them or none; of others "
                                  "there is the reference",
                      loop.line)
    out = Places((loop.indices[-2], loop.indices[-1]), [], [], loop.indices[0] if len(loop.indices) == 3 else None)
    taken: set[str] = set()
    out.arguments = frozenset(arguments)
    for held in loop.body:
        if isinstance(held, Store):
            out.stores.append(_checked(held, out))
        elif isinstance(held, Loop):
            out.loops.append(_rounds(held, out, taken))
    if not out.loops:
        raise refused(ValueError, "no sequential loop with a product is in this program; functions of rows go along rows "
                                  "alone, for m in parallel(x.rows)", loop.line)
    return out


def _checked(store: Store, places: Places) -> Store:
    stack = () if places.stack is None else (places.stack,)
    indices, rank = (*stack, *places.indices), len(store.parameter.shape)
    tile = store.only is None and tuple(store.key) == indices and rank == len(indices)
    rows = store.only is indices[-1] and tuple(store.key) == indices[:-1] and rank == len(indices) - 1
    columns = store.only is indices[-2] and tuple(store.key) == (*stack, indices[-1]) and rank == len(indices) - 1
    if not tile and not rows and not columns:
        raise refused(ValueError, f"{store.parameter.name}[{shown(store.key)}] is stored: kernels are derived that store "
                                  f"whole tiles, [{shown(indices)}], rows' values within once({indices[-1]}), "
                                  f"[{shown(indices[:-1])}], and columns' within once({indices[-2]}), "
                                  f"[{shown((*stack, indices[-1]))}]; of others there is the reference", store.line)
    return store


def _rounds(loop: Loop, out: Places, taken: set[str]) -> Rounds:
    """What a loop adds to its cells: each must be sum + product + product ..., which nothing else reads."""
    if loop.indices[0].stack:
        raise refused(ValueError, "rounds along a stack have no kernel yet, but a reference", loop.line)
    if loop.stop is not None:
        raise refused(ValueError, f"{loop.indices[0]} goes to a length (stop=): kernels are derived of lengths of the "
                                  "rounds of whole rows, parallel(a.rows); of others there is the reference", loop.line)
    index = loop.indices[0]
    others = [*out.indices, *([] if out.stack is None else [out.stack]), *(rounds.index for rounds in out.loops)]
    while index.name in [x.name for x in others]:
        index.name += "_2"                             # of two loops that a program calls by one name
    made = Rounds(index, [], [], loop.line)
    tiles: dict[Any, TilePlace] = {}
    used: set[Value] = set()
    waiting: list[tuple[Value, Carried]] = []              # sums of rows, until all products have their blocks
    for carried in loop.carried:
        one = carried.inside.dims in (out.indices[:1], out.indices[1:])        # value of a row or a column
        _cell(carried, out)
        found: list[Multiply] = []
        summed: list[Value] = []
        value = carried.out
        while value is not carried.inside:
            used.add(value)
            if value.op != "add" or value.args[1].op != ("rowsum" if one else "dot"):
                raise refused(ValueError, f"what rounds carry is not sums of products, of rows or of columns alone "
                                          f"({value.op}); such programs have a reference, and no kernel yet",
                              value.line or loop.line)
            used.add(value.args[1])
            if one:
                summed.insert(0, value.args[1])
            else:
                found.insert(0, _multiply(value.args[1], carried, out, made, tiles, taken))
            value = value.args[0]
        made.products += found
        waiting += [(x, carried) for x in summed]
    for x, carried in waiting:
        if carried.inside.dims == out.indices[:1]:
            made.row_sums.append(_row_sum(x, carried, made))
        else:
            made.column_sums.append(_column_sum(x, carried, made, out))
    for held in loop.body:
        if not isinstance(held, Value) or (held not in used and held.op != "transpose"):
            what = held.op if isinstance(held, Value) else "a store or a loop"
            raise refused(ValueError, f"{what} within rounds: kernels are derived of loops that add products and sums of "
                                      "rows and columns to cells and do nothing else; of others there is the reference",
                          held.line)
    if not made.products:
        raise refused(ValueError, "rounds that carry nothing", loop.line)
    return made


def _row_sum(x: Value, carried: Carried, rounds: Rounds) -> RowSum:
    load = x.args[0]
    for product in rounds.products:
        tile = product.a
        is_there = load.op == "load" and tile.parameter.name == load.data[0].name and tile.dims == load.dims
        if is_there and not product.a_transposed:
            return RowSum(carried, tile, x.line)
    raise refused(ValueError, "a sum of rows in rounds: kernels are derived of sums over a left operand that is there for a "
                              "product anyway, a[m, k].sum(axis=1)", x.line)


def _column_sum(x: Value, carried: Carried, rounds: Rounds, out: Places) -> ColumnSum:
    load = x.args[0].args[0] if x.args[0].op == "transpose" else x.args[0]
    for product in rounds.products:
        tile = product.b
        is_there = load.op == "load" and tile.parameter.name == load.data[0].name and tile.dims == load.dims
        if is_there and product.b_transposed == (load is x.args[0]):
            before = [*out.column_sums(out.columns[carried.after]), *(y for y in rounds.column_sums if y.carried is carried)]
            if any(y.transposed != product.b_transposed for y in before):
                raise refused(ValueError, "sums of columns and of lines in one cell: threads have parts of a column in one "
                                          "way; take a cell for each, and add them up behind the loops", x.line)
            return ColumnSum(carried, tile, product.b_transposed, x.line)
    raise refused(ValueError, "a sum of columns in rounds: kernels are derived of sums over a right operand that is there "
                              "for a product anyway, b[k, n].sum(axis=0), or b[n, k].sum(axis=1) where the product takes "
                              "b[n, k].T", x.line)


def _cell(carried: Carried, out: Places) -> None:
    """The sums of a cell keep their name from loop to loop."""
    cells, starts = {out.indices[:1]: (out.rows, out.row_starts), out.indices[1:]: (out.columns, out.column_starts)}.get(
        carried.inside.dims, (out.cells, out.starts))
    if carried.init.op == "after":
        name = cells[carried.init]
    elif carried.init.op == "const":
        name = carried.inside.name or "acc"
        while name in out.names or name in out.arguments:
            name += "_2"
        starts[name] = carried.init.data
    else:
        raise refused(ValueError, f"a cell that begins with {carried.init.op}: kernels are derived of cells that begin "
                                  "with a number, such as zeros(m, n)", carried.init.line)
    cells[carried.after] = name


def _multiply(dot: Value, carried: Carried, places: Places, rounds: Rounds, tiles: dict, taken: set[str]) -> Multiply:
    indices, k = places.indices, rounds.index
    m, n = indices
    if dot.dims != (m, n) or dot.args[0].dims[1] is not k:
        raise refused(ValueError, f"a product of ({shown(dot.dims)}) over {dot.args[0].dims[1]}: a product is "
                                  f"({shown(indices)}), and its sum goes over {k}", dot.line)
    found = []
    for x in dot.args:
        load = x.args[0] if x.op == "transpose" else x
        if load.op != "load":
            raise refused(ValueError, f"an operand of a product is {load.op}; kernels are derived of products of arrays' "
                                      "blocks as they are", dot.line)
        parameter, key = load.data
        if np.dtype(parameter.dtype) not in TAKEN:
            raise refused(TypeError, f"{parameter.name} is of {parameter.dtype}; products of float16 and bfloat16 have a "
                                     "kernel",
                          dot.line)
        if (parameter.name, key) not in tiles:
            name = parameter.name
            while name in taken:
                name += "_2"
            taken.add(name)
            stack = key[0] if key[0].stack else None
            if stack is not None and stack is not places.stack:
                raise refused(ValueError, f"{parameter.name}[{shown(key)}]: the stack of a block is the tile's", dot.line)
            tiles[parameter.name, key] = TilePlace(name, parameter, load.dims, stack)
            rounds.tiles.append(tiles[parameter.name, key])
        found.append((tiles[parameter.name, key], x.op == "transpose"))
    (a, a_transposed), (b, b_transposed) = found
    if np.dtype(a.parameter.dtype) != np.dtype(b.parameter.dtype):
        raise refused(TypeError, f"{a.parameter.name} is of {a.parameter.dtype} and {b.parameter.name} of "
                                 f"{b.parameter.dtype}; both must be of one dtype", dot.line)
    return Multiply(carried, a, b, a_transposed, b_transposed, dot.line)
