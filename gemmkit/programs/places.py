"""Equal expressions that cost less: exponentials to base 2, reciprocals for divisions, one of what is written twice.

| written | computed | instead of |
|---|---|---|
| exp(x) | exp2(x log2 e) | libdevice's, three instructions longer |
| log(x) | log2(x) ln 2 | some twenty |
| x / constant | x (1 / constant) | a division, some eight |
| x / y | x reciprocal(y), to 1 ulp | a division |
| (c x) d, -(x) c | (c d) x, x (-c) | a multiplication more |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.programs.called import EXTENT, F32
from gemmkit.programs.lengths import PIECE
from gemmkit.programs.mapping import KernelLimits
from gemmkit.programs.trace import TF32, Carried, Loop, StoreStatement, Value, refuse_update
from gemmkit.programs.values import Axis, Index, Parameter, ProgramAxis, refused, shown, unique

if TYPE_CHECKING:
    from gemmkit.programs.text import ElementFunction

LEAVES = ("const", "scalar", "carried", "after", "load", "coordinate", EXTENT)


def walked(roots: list[Value]) -> list[Value]:
    """The values and what they are made of, operands first."""
    out: dict[Value, None] = {}

    def visit(x: Value) -> None:
        if x not in out:
            for y in x.args:
                visit(y)
            out[x] = None

    for root in roots:
        visit(root)
    return list(out)


def simplified(roots: list[Value]) -> list[Value]:
    """The values, with what they are made of."""
    rewriter = Rewriter()
    return [rewriter.of(root) for root in roots]


def _constant(number: float) -> Value:
    return Value("const", data=number, line="")


class Rewriter:
    """Makes values anew, from their leaves on; equal ones become one."""

    def __init__(self) -> None:
        self._new: dict[Value, Value] = {}
        self._made: dict[Any, Value] = {}

    def of(self, x: Value) -> Value:
        if x not in self._new:
            self._new[x] = self._leaf(x) if x.op in LEAVES else self.build(x.op, tuple(map(self.of, x.args)), x)
        return self._new[x]

    def _leaf(self, x: Value) -> Value:
        """A load of one place is one load, a constant one constant."""
        key = (x.op, x.dims, (x.data[0].name, x.data[1]) if x.op == "load" else x.data)
        return x if x.op in ("carried", "after") else self._made.setdefault(key, x)

    def build(self, op: str, args: tuple, like: Value) -> Value:
        rule: Callable[..., Value | None] | None = getattr(self, f"_of_{op}", None)
        better = rule(like, *args) if rule is not None else None
        if better is not None:
            return better
        key = (op, args, like.dims, like.data)
        return self._made.setdefault(key, Value(op, args, like.dims, like.data, like.name, like.line))

    def _of_exp(self, like: Value, x: Value) -> Value | None:
        return self.build("exp2", (self.build("mul", (x, _constant(math.log2(math.e))), like),), like)

    def _of_log(self, like: Value, x: Value) -> Value | None:
        return self.build("mul", (self.build("log2", (x,), like), _constant(math.log(2))), like)

    def _of_div(self, like: Value, x: Value, y: Value) -> Value | None:
        if _is_number(y) and y.data:
            return self.build("mul", (x, _constant(1 / y.data)), like)
        return self.build("mul", (x, self.build("reciprocal", (y,), y)), like)

    def _of_mul(self, like: Value, x: Value, y: Value) -> Value | None:
        if _is_number(x) and _is_number(y):
            return _constant(x.data * y.data)
        if _is_number(x):
            return self.build("mul", (y, x), like)
        if _is_number(y) and x.op == "neg":
            return self.build("mul", (x.args[0], _constant(-y.data)), like)
        if _is_number(y) and x.op == "mul" and _is_number(x.args[1]):
            return self.build("mul", (x.args[0], _constant(x.args[1].data * y.data)), like)
        return x if _is_number(y) and y.data == 1 else None


def _is_number(x: Value) -> bool:
    return x.op == "const" and not x.dims


# --------------------------------------------------------------------------------------------------
# Equal expressions that cost less, of functions of rows, beyond those above.
#
# | written | computed | instead of |
# |---|---|---|
# | the mean of (t - mean of t)^2 | a row's moments: its warps meet once for both | a fold more |
# | a sum over the number of columns | the mean | a constant of the length |
# | -max(-x), -max(-x, -y) | min | two signs an element |
# | astype(float32) | what is in float32 anyway | |

class RowRewriter(Rewriter):
    """Of what is computed in a dtype: in float64 a division stays one, and functions are `math`'s."""

    def __init__(self, dtype: np.dtype):
        super().__init__()
        self.dtype = dtype

    def of(self, x: Value) -> Value:
        new = super().of(x)
        if x.name and not new.name and new.op not in LEAVES:
            new.name = x.name
        return new

    def _of_mul(self, like: Value, x: Value, y: Value) -> Value | None:
        is_mean = x.op == "rowsum" and _is_number(y) and y.data == 1 / x.args[0].dims[1].size
        return self.build("rowmean", x.args, like) if is_mean else super()._of_mul(like, x, y)

    def _of_exp(self, like: Value, x: Value) -> Value | None:
        return super()._of_exp(like, x) if self.dtype == F32 else None

    def _of_log(self, like: Value, x: Value) -> Value | None:
        return super()._of_log(like, x) if self.dtype == F32 else None

    def _of_div(self, like: Value, x: Value, y: Value) -> Value | None:
        if self.dtype == F32:
            return super()._of_div(like, x, y)
        is_mean = x.op == "rowsum" and _is_number(y) and y.data == x.args[0].dims[1].size
        return self.build("rowmean", x.args, like) if is_mean else None

    def _of_rowmean(self, like: Value, x: Value) -> Value | None:
        if x.op != "mul" or x.args[0] is not x.args[1] or x.args[0].op != "sub":
            return None
        t, mean = x.args[0].args
        return self.build("variance", (t,), like) if mean.op == "rowmean" and mean.args[0] is t else None

    def _of_neg(self, like: Value, x: Value) -> Value | None:
        if x.op == "neg":
            return x.args[0]
        if x.op == "rowmax" and x.args[0].op == "neg":
            return self.build("rowmin", x.args[0].args, like)
        if x.op == "max" and "neg" in (x.args[0].op, x.args[1].op):
            return self.build("min", tuple(self.build("neg", (y,), y) for y in x.args), like)
        if x.op == "const" and not x.dims:
            return Value("const", data=-x.data, line="")
        return None

    def _of_cast(self, like: Value, x: Value) -> Value | None:
        return x if np.dtype(like.data) == self.dtype else None


# --------------------------------------------------------------------------------------------------
# Where values are: blocks of operands in the stages of a loop's ring, sums in registers, the rest where threads need it.
#
# A sequential loop has one ring. In each round its products take their blocks from one stage, and a block that two
# products take is there once.

HALVES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOATS_8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
INTEGERS = np.dtype(np.int8), np.dtype(np.uint8)
#: Operands of products; those of 8 bits also with others of their kind.
TAKEN = frozenset((*HALVES, *FLOATS_8, *INTEGERS, F32))


@dataclass(eq=False)
class TilePlace:
    """A block of an array in the stages of a ring: ``dims`` as they are in the array; ``lookup``: the array that says which
    of its rows the lines are, where they do not lie one behind the other."""

    name: str
    parameter: Parameter
    dims: tuple[Index, Index]
    stacks: tuple[Index, ...]
    lookup: Parameter | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.parameter.dtype)

    def is_of(self, x: Value) -> bool:
        """Whether it is what a load reads."""
        if x.op != "load" or self.parameter.name != x.data[0].name or self.dims != x.dims:
            return False
        return next((index.lookup for index in x.data[1] if index.lookup is not None), None) is self.lookup


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
    """Sums along the rows of a block that threads read where it is staged for a product; ``transposed``: they lie along its
    columns. ``what``: "" of sums, "max" or "min" of the largest or smallest elements."""

    carried: Carried
    tile: TilePlace
    transposed: bool
    line: str
    what: str

    begin: ClassVar = "rows_of_", "Row"

    @property
    def name(self) -> str:
        """Of the collective."""
        return f"{self.begin[0]}{self.tile.name}{self.what and '_'}{self.what}"

    @property
    def collective(self) -> str:
        """Its class."""
        return self.begin[1] + ("Extremes" if self.what else "Sums")


class ColumnSum(RowSum):
    """The same along the columns of a product's right operand; ``transposed``: along its lines."""

    begin: ClassVar = "columns_of_", "Column"


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
    def piece(self) -> Index | None:
        """The index that says along the rows of which piece it goes, where rows are packed."""
        return self.index.piece

    @property
    def looked_up(self) -> list[TilePlace]:
        """Blocks whose lines an array names."""
        return [tile for tile in self.tiles if tile.lookup is not None]

    @property
    def size(self) -> int:
        """Bytes of an element of what it multiplies: the largest."""
        return max(int(tile.dtype.itemsize) for tile in self.tiles)

    @property
    def promotes(self) -> bool:
        """Whether wgmma's sums of a stage are added to others in float32: of 8-bit floats it keeps 14 bits."""
        return any(product.a.dtype in FLOATS_8 for product in self.products)

    @property
    def folded(self) -> list[RowSum]:
        """Of rows, and of columns."""
        return [*self.row_sums, *self.column_sums]

    @property
    def is_read_by_threads(self) -> bool:
        """Whether not only tensor cores read its stages."""
        return bool(self.folded)


@dataclass(eq=False)
class Places:
    indices: tuple[Index, Index]
    loops: list[Rounds]
    stores: list[StoreStatement]
    stacks: tuple[Index, ...] = ()     # which matrix of stacked arrays
    cells: dict[Value, str] = field(default_factory=dict)          # of what is there after a loop: the sums' name
    starts: dict[str, float] = field(default_factory=dict)         # of the sums' names: what they begin with
    integers: set[str] = field(default_factory=set)    # those of products of integers, which are added in int32
    rows: dict[Value, str] = field(default_factory=dict)           # the same of cells that have a value for each row
    row_starts: dict[str, float] = field(default_factory=dict)
    columns: dict[Value, str] = field(default_factory=dict)        # of cells that have one for each column
    column_starts: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)            # of cells of rows and columns: what of (`RowSum`)
    arguments: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()              # results that are read before they are stored
    sizes: dict[ProgramAxis, int] = field(default_factory=dict)          # how long the axes of all indices are in a call

    @property
    def piece(self) -> Index | None:
        """The stack that says which piece a tile's rows are of, where rows are packed."""
        return self.indices[0].piece

    @property
    def own_stacks(self) -> tuple[Index, ...]:
        """Those of a result: rows of all pieces are one axis."""
        return tuple(stack for stack in self.stacks if stack is not self.piece)

    @property
    def in_pieces(self) -> bool:
        """Whether a kernel reads offsets."""
        return self.piece is not None or any(rounds.piece is not None for rounds in self.loops)

    @property
    def looks_up(self) -> bool:
        """Whether it reads which rows operands and results have."""
        return any(rounds.looked_up for rounds in self.loops) or any(store.lookup is not None for store in self.stores)

    def down(self, height: int) -> int:
        """Tile rows of all stacks; where rows are packed, as many as pieces have in the mean, their last ones half full."""
        rows = -(-self.sizes[self.indices[0].extent] // height)
        if self.piece is not None:
            return max(1, rows + self.sizes[self.piece.extent] // 2)
        return max(1, rows) * max(1, math.prod(self.sizes[stack.extent] for stack in self.stacks))

    def accumulators(self, kernel: KernelLimits) -> int:
        """How many a thread has at once."""
        of_stages = {self.cells[x.carried.after] for rounds in self.loops if rounds.promotes for x in rounds.products}
        return len(self.starts) + (len(of_stages) if kernel.uses_tma else 0)

    def arrays_along(self, index: Index) -> list[str]:
        """The blocks that rounds along an index take."""
        return [tile.name for rounds in self.loops if rounds.index is index for tile in rounds.tiles]

    @property
    def as_integers(self) -> frozenset[str]:
        """Results that are sums of products of integers as they are."""
        return frozenset(store.parameter.name for store in self.stores if self.cells.get(store.value) in self.integers)

    @property
    def names(self) -> list[str]:
        """Of all cells."""
        return [*self.starts, *self.row_starts, *self.column_starts]

    def cell_of(self, x: RowSum) -> str:
        return (self.columns if isinstance(x, ColumnSum) else self.rows)[x.carried.after]

    def column_sums(self, name: str) -> list[ColumnSum]:
        """What is added to a cell of columns."""
        return [x for rounds in self.loops for x in rounds.column_sums if self.columns[x.carried.after] == name]


def is_tiled(loop: Loop, axes: int) -> bool:
    """Whether tiles go along so many axes that have blocks, after stacks."""
    return [index.stack for index in loop.indices] == [True] * (len(loop.indices) - axes) + [False] * axes


def _operands(loop: Loop) -> Iterator[tuple[Value | None, int, Value]]:
    """Operations, the numbers of their operands, and these; and what is stored, of none."""
    for held in loop.body:
        if isinstance(held, Loop):
            yield from _operands(held)
            yield from ((None, 0, c.init) for c in held.carried)
        elif isinstance(held, StoreStatement):
            yield None, 0, held.value
        else:
            yield from ((held, n, y) for n, y in enumerate(held.args))


def refuse_forms(loop: Loop) -> None:
    """Raises ValueError, with the user's line, for what no kernel has, or none of the program's form."""
    if loop.twice:
        raise refused(ValueError, "rows and columns of a product are the same block of a round; only .reference(...) runs "
                                  "this", loop.twice)
    rounded = next((y for x, n, y in _operands(loop) if y.op == "cast" and y.data == TF32 and not (
        is_tiled(loop, 2) and x is not None and x.op in ("dot", "transpose"))), None)
    if rounded is not None:
        raise refused(ValueError, f'astype("{TF32}"): a kernel rounds operands of products to it, in tiles of rows and '
                                  "columns (only .reference(...) runs others)", rounded.line)
    for store in loop.updated.values() if loop.loops[1:] or not is_tiled(loop, 1) else ():
        of_rows, is_last = is_tiled(loop, 1), any(store is x for x in loop.body)
        is_tile = len(store.parameter._shape) == len(store.key) + of_rows and store.only is None
        if not is_tile or store.lookup is not None if is_last or not of_rows else store.read is None:
            raise refuse_update(store)
    sliced = [y for x, n, y in _operands(loop) if y.op == "load" and y.dims and isinstance(y.dims[-1], Axis)
              and y.dims[-1].size < y.data[0]._shape[-1] and not (x and x.op == "dot" and n == 1 and is_tiled(loop, 1))]
    if sliced:
        raise refused(ValueError, f"the first columns of {sliced[0].data[0].name}; a kernel takes them as the right operand "
                                  "of a product in tiles of whole rows (only .reference(...) runs others)", sliced[0].line)
    if loop.looked_up and not is_tiled(loop, 2) and (loop.loops[1:] or not is_tiled(loop, 1)):
        raise refused(ValueError, "rows that an array names; a kernel has them in functions of rows, and in tiles of rows "
                                  "and columns (only .reference(...) runs others)", loop.looked_up)


def refuse_pieces(loop: Loop) -> None:
    """Raises ValueError, with the user's line, for rows that are packed where a kernel does not read offsets."""
    for each in loop.loops:
        if any(index.extent.offsets is not None for index in each.indices):
            raise refused(ValueError, "packed(...): a kernel has pieces of rows where it multiplies, in a sequential loop; "
                                      "only .reference(...) runs others", each.line)


def _begun_at_numbers(loop: Loop) -> Loop:
    """A program whose cells begin with numbers: what else one begins with, such as a block of C, is added to its sums where
    the tile ends. There it is read once, and no registers hold it meanwhile."""
    added: dict[Value, Value] = {}                     # to what stands behind a loop

    def changed(x: Value) -> Value:
        if x in added:
            return Value("add", (x, added[x]), x.dims, line=added[x].line)
        args = tuple(map(changed, x.args))
        return x if args == x.args else replace(x, args=args)

    def begun(c: Carried) -> Carried:
        if c.init.op == "after" and c.init in added:
            added[c.after] = added[c.init]
        if c.init.op in ("after", "const"):
            return c
        added[c.after] = changed(c.init)
        return replace(c, init=Value("const", (), c.init.dims, 0.0, line=c.init.line))

    body: list[Any] = []
    for held in loop.body:
        if isinstance(held, Loop):
            held = replace(held, carried=[begun(c) for c in held.carried])
        elif isinstance(held, StoreStatement):
            held = replace(held, value=changed(held.value))
        body.append(held)
    return replace(loop, body=body)


def places_of(loop: Loop, arguments: Iterable[str]) -> Places:
    """Of a program with ``arguments``, whose names cells do not have. Raises ValueError and TypeError, with the user's line,
    for what has no place yet."""
    if not is_tiled(loop, 2):
        raise refused(ValueError, f"parallel({shown(index.extent for index in loop.indices)}): a kernel's tiles are rows "
                                  "and columns, parallel(a.rows, b.columns), optionally after stacks (only "
                                  ".reference(...) runs others)",
                      loop.line)
    loop = _begun_at_numbers(loop)
    out = Places((loop.indices[-2], loop.indices[-1]), [], [], loop.indices[:-2])
    taken: set[str] = set()
    out.arguments, out.updated, out.sizes = frozenset(arguments), frozenset(loop.updated), loop.sizes
    for held in loop.body:
        if isinstance(held, StoreStatement):
            out.stores.append(_checked(held, out))
        elif isinstance(held, Loop):
            out.loops.append(_rounds(held, out, taken))
    if not out.loops:
        raise refused(ValueError, "no sequential loop with a product; a function of rows loops over rows only, for m in "
                                  "parallel(x.rows)", loop.line)
    return out


def _checked(store: StoreStatement, places: Places) -> StoreStatement:
    stacks = places.own_stacks
    indices, rank = (*stacks, *places.indices), len(store.parameter.shape)
    key = tuple(x.base if x.lookup is not None and x.base is indices[-2] else x for x in store.key)
    tile = store.only is None and key == indices and rank == len(indices)
    rows = store.only is indices[-1] and tuple(store.key) == indices[:-1] and rank == len(indices) - 1
    columns = store.only is indices[-2] and tuple(store.key) == (*stacks, indices[-1]) and rank == len(indices) - 1
    if not tile and not rows and not columns:
        raise refused(ValueError, f"{store.parameter.name}[{shown(store.key)}] is stored; a kernel stores whole tiles, "
                                  f"[{shown(indices)}], rows' values within once({indices[-1]}), [{shown(indices[:-1])}], "
                                  f"and columns' within once({indices[-2]}), [{shown((*stacks, indices[-1]))}] (only "
                                  ".reference(...) runs others)", store.line)
    return store


def _rounds(loop: Loop, out: Places, taken: set[str]) -> Rounds:
    """What a loop adds to its cells: each must be sum + product + product ..., which nothing else reads."""
    if loop.indices[0].stack:
        raise refused(ValueError, "rounds along a stack have no kernel yet; .reference(...) runs them", loop.line)
    if loop.start is not None or (loop.stop is not None and loop.stop.op != PIECE):
        raise refused(ValueError, f"{loop.indices[0]} has a length (start=, stop=); a kernel takes lengths in tiles of "
                                  "whole rows, parallel(a.rows) (only .reference(...) runs others)", loop.line)
    index = loop.indices[0]
    others = [*out.indices, *out.stacks, *(rounds.index for rounds in out.loops)]
    index.name = unique(index.name, [x.name for x in others])          # of two loops that a program calls by one name
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
            while value.op == "add" and value.args[1].op == "add":         # x + (y + z) is (x + y) + z
                x, (y, z) = value.args[0], value.args[1].args
                used.add(value.args[1])
                value = replace(value, args=(replace(value, args=(x, y)), z))
            what, folded, rest = _folded(value) if one else ("", value.args[-1], value.args[0])
            if folded is None or (not one and (value.op != "add" or folded.op != "dot")):
                raise refused(ValueError, "rounds change a cell other than by adding products and sums of rows or columns, "
                                          f"or by largest or smallest elements ({value.op}); only .reference(...) runs this",
                              value.line or loop.line)
            used.add(folded)
            if one:
                kind = out.kinds.setdefault(out.rows.get(carried.after) or out.columns[carried.after], what)
                if kind != what:
                    raise refused(ValueError, "sums, largest or smallest elements in one cell; use two cells", value.line)
                used.update(x for x in walked([value, folded]) if x.op in ("neg", "max", "transpose"))
                summed.insert(0, folded)
            else:
                found.insert(0, _multiply(value.args[1], carried, out, made, tiles, taken))
            value = rest
        made.products += found
        _check_integers(found, carried, out)
        waiting += [(x, carried) for x in summed]
    for x, carried in waiting if made.products else ():
        (block,), of_rows, is_turned = x.args, carried.inside.dims == out.indices[:1], False
        what = out.kinds[(out.rows if of_rows else out.columns)[carried.after]]
        while block.op == "transpose" or (block.op == "neg" and what == "min"):            # the smallest of x: of -x
            is_turned, block = is_turned != (block.op == "transpose"), block.args[0]
        if block.op != "load":
            raise refused(ValueError, f"a sum of {'rows' if of_rows else 'columns'} in rounds, of {block.op}; a kernel sums "
                                      "blocks of arrays as they are (only .reference(...) runs others)", x.line)
        tile = _tile(block, x.line, out, made, tiles, taken)
        if of_rows:
            if is_turned and tile.dtype.itemsize != 2:
                raise refused(TypeError, f"{tile.parameter.name} has dtype {tile.dtype}; a kernel reads rows along an "
                                         "array's columns of elements of 16 bits", x.line)
            made.row_sums.append(RowSum(carried, tile, is_turned, x.line, what))
        else:
            made.column_sums.append(_column_sum(not is_turned, tile, carried, made, out, x.line))
    for held in loop.body:
        if not isinstance(held, Value) or (held not in used and held.op not in ("transpose", "cast")):
            what = held.op if isinstance(held, Value) else "a store or a loop"
            raise refused(ValueError, f"{what} inside rounds; a kernel's rounds only add products and sums of rows and "
                                      "columns to cells (only .reference(...) runs others)",
                          held.line)
    if not made.products:
        raise refused(ValueError, "rounds that change no cell; add to a cell, acc += ...", loop.line)
    return made


def _check_integers(found: list[Multiply], carried: Carried, out: Places) -> None:
    """Note that a cell is one of integers. Raises ValueError and TypeError where it cannot be."""
    name, counted = out.cells.get(carried.after, ""), [x for x in found if x.a.dtype in INTEGERS]
    of_before = carried.init.op == "after"
    if found and (bool(counted) != (name in out.integers) if of_before else len(counted) not in (0, len(found))):
        raise refused(TypeError, f"products of integers and of others are added to {name}; use a cell for each, and add "
                                 "them after the loops", found[-1].line)
    if counted and not float(out.starts[name]).is_integer():
        raise refused(ValueError, f"a cell of products of integers begins with {out.starts[name]}; begin with 0, and add "
                                  "the number after the loop", carried.init.line)
    out.integers.update([name] if counted else [])


def _folded(value: Value) -> tuple[str, Value | None, Value]:
    """What a round makes of a cell of rows or columns: (``what`` of `RowSum`, the fold of a block, the value before)."""
    def plain(x: Value) -> Value:
        return plain(x.args[0].args[0]) if x.op == "neg" and x.args[0].op == "neg" else x

    if value.op == "add" and value.args[1].op == "rowsum":
        return "", value.args[1], value.args[0]
    inner = value.args[0] if value.op == "neg" else value
    for rest, found in (inner.args, inner.args[::-1]) if inner.op == "max" else ():
        fold = plain(found)
        if value.op == "max" and fold.op == "rowmax":
            return "max", fold, rest
        block = fold.args[0].args[0] if fold.op == "rowmax" and fold.args[0].op == "transpose" else (fold.args or (fold,))[0]
        if value.op == "neg" and fold.op == "rowmax" and block.op == "neg" and rest.op == "neg":
            return "min", fold, rest.args[0]
    return "", None, value


def _column_sum(transposed: bool, tile: TilePlace, carried: Carried, rounds: Rounds, out: Places, line: str) -> ColumnSum:
    """``transposed``: of b[n, k], whose lines are summed, and not of b[k, n]."""
    before = [*out.column_sums(out.columns[carried.after]), *(y for y in rounds.column_sums if y.carried is carried)]
    if any(y.transposed != transposed for y in before):
        raise refused(ValueError, "sums of columns and of lines in one cell; use a cell for each, and add them after the "
                                  "loops", line)
    if not transposed and tile.dtype.itemsize != 2:
        raise refused(TypeError, f"{tile.parameter.name} has dtype {tile.dtype}; a kernel adds up the columns of blocks of "
                                 "16 bits, and of others the lines, b[n, k].sum(axis=1)", line)
    return ColumnSum(carried, tile, transposed, line, out.kinds[out.columns[carried.after]])


def _cell(carried: Carried, out: Places) -> None:
    """The sums of a cell keep their name from loop to loop."""
    cells, starts = {out.indices[:1]: (out.rows, out.row_starts), out.indices[1:]: (out.columns, out.column_starts)}.get(
        carried.inside.dims, (out.cells, out.starts))
    if carried.init.op == "after":
        name = cells[carried.init]
    else:                                              # a number's (`_begun_at_numbers`)
        name = unique(carried.inside.name or "acc", {*out.names, *out.arguments})
        starts[name] = carried.init.data
    cells[carried.after] = name


def _tile(load: Value, line: str, places: Places, rounds: Rounds, tiles: dict, taken: set[str]) -> TilePlace:
    """The block that a load reads, in the stages of the loop's ring."""
    if load.op != "load":
        raise refused(ValueError, f"an operand of a product is {load.op}; here a kernel multiplies blocks of arrays "
                                  "without computing on them; put a factor of k into one of the arrays first", line)
    parameter, key = load.data
    if np.dtype(parameter.dtype) not in TAKEN:
        raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; products in programs need float16, "
                                 "bfloat16, float32 as tf32, float8_e4m3fn, float8_e5m2, int8 or uint8 (gemmkit.matmul "
                                 "takes other dtypes)", line)
    if (parameter.name, key) not in tiles:
        name = unique(parameter.name, taken)
        taken.add(name)
        stacks = tuple(index for index in key if index.stack)
        if not {stack.of_loop for stack in stacks} <= set(places.stacks):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: the stacks of a block are the tile's", line)
        tiles[parameter.name, key] = TilePlace(name, parameter, load.dims, stacks, key[-2].lookup)
        if key[-2].lookup is not None and tiles[parameter.name, key].dtype.itemsize != 2:
            raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; a kernel looks up rows of elements of "
                                     "16 bits (only .reference(...) runs others)", line)
        if stacks and key[-2].lookup is not None:
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: a kernel looks rows of a matrix up, and none of "
                                      "a stack's (only .reference(...) runs this)", line)
        rounds.tiles.append(tiles[parameter.name, key])
    return tiles[parameter.name, key]


def _operand(x: Value, line: str, places: Places, rounds: Rounds, tiles: dict,
             taken: set[str]) -> tuple[TilePlace, bool]:
    """The block of an operand, and whether the product takes it transposed."""
    is_transposed, as_tf32 = False, False
    while x.op == "transpose" or (x.op == "cast" and x.data == TF32):
        is_transposed, as_tf32 = is_transposed != (x.op == "transpose"), as_tf32 or x.op == "cast"
        (x,) = x.args
    tile = _tile(x, line, places, rounds, tiles, taken)
    if (tile.dtype == F32) != as_tf32:
        name = tile.parameter.name
        raise refused(TypeError, f"{name} has dtype {tile.dtype}; " + (
            f'only float32 is rounded to "{TF32}"' if as_tf32 else 'tensor cores multiply float32 as tf32, with 10 bits of '
            f'mantissa, and a program says so: {name}[...].astype("{TF32}") (gemmkit.matmul multiplies float32 in full)'),
            line)
    return tile, is_transposed


def _multiply(dot: Value, carried: Carried, places: Places, rounds: Rounds, tiles: dict, taken: set[str]) -> Multiply:
    indices, k = places.indices, rounds.index
    m, n = indices
    if dot.dims != (m, n) or dot.args[0].dims[1] is not k:
        raise refused(ValueError, f"a product of ({shown(dot.dims)}) over {dot.args[0].dims[1]}: a product must be "
                                  f"({shown(indices)}) and sum over {k}", dot.line)
    found = [_operand(x, dot.line, places, rounds, tiles, taken) for x in dot.args]
    (a, a_transposed), (b, b_transposed) = found
    if not any({a.dtype, b.dtype} <= {*kinds} for kinds in ((a.dtype,), FLOATS_8, INTEGERS)):
        raise refused(TypeError, f"{a.parameter.name} has dtype {a.dtype} and {b.parameter.name} of {b.dtype}; both must "
                                 "have one dtype", dot.line)
    return Multiply(carried, a, b, a_transposed, b_transposed, dot.line)


# --------------------------------------------------------------------------------------------------
# The order of a loop's events, and with it all synchronisation: fills, waits, groups of products, releases.
#
# The products of a round take their blocks from one stage and start together: they are one group of wgmma. Rounds do
# nothing but add, so that no thread needs the sums before the loop is over, and a group is waited for one round later,
# while the next one runs. Then its stage has been read, and is released.
#
# | part | a consumer's events | the producer's |
# |---|---|---|
# | before | await the stage, start (and read what threads add up); sums that begin with zero begin here | fill |
# | round | await the next stage, start, wait for all groups but this one, release the stage before | fill |
# | after | wait for the last group, release its stage | |
#
# Sums of 8-bit floats are those of a stage: a round waits for the group of the stage before, adds its sums to the cell's,
# and starts its own. Another warpgroup multiplies meanwhile.

LEAST_STAGES = 2                       # a stage is released when the next one is in use


class Fill(NamedTuple):
    """The producer has the blocks of a round brought."""


class Await(NamedTuple):
    """A consumer goes on when the stage is full."""


class Start(NamedTuple):
    """A group of products begins. ``fresh``: those whose sums are not read, but begin with zero."""

    products: tuple[Multiply, ...]
    fresh: tuple[Multiply, ...] = ()


class Read(NamedTuple):
    """Threads add up rows and columns of what is staged, while the products of the round run."""

    row_sums: tuple[RowSum, ...]
    column_sums: tuple[ColumnSum, ...]


class Wait(NamedTuple):
    """A consumer goes on when no more than ``pending`` groups run; the sums named are then theirs again."""

    pending: int


class Promote(NamedTuple):
    """The sums of a stage are added to those of the stages before, in float32."""


class Release(NamedTuple):
    """The stage of the round before is empty."""


Event = Fill | Await | Start | Read | Wait | Promote | Release


@dataclass(frozen=True)
class Ordered:
    """What happens before the other rounds, in each of them, and after them."""

    rounds: Rounds
    before: tuple[Event, ...]
    round: tuple[Event, ...]
    after: tuple[Event, ...]


def ordered(rounds: Rounds) -> Ordered:
    first: dict[Carried, Multiply] = {}
    for product in rounds.products:
        first.setdefault(product.carried, product)
    products = tuple(rounds.products)
    read = (Read(tuple(rounds.row_sums), tuple(rounds.column_sums)),) if rounds.is_read_by_threads else ()
    if rounds.promotes:
        begun = Start(products, tuple(first.values()))
        end = Wait(0), Promote()
        return Ordered(rounds, (Fill(), Await(), begun, *read), (Fill(), Await(), *end, begun, *read, Release()),
                       (*end, Release()))
    fresh = tuple(x for c, x in first.items() if c.init.op == "const" and c.init.data == 0)
    before = Fill(), Await(), Start(products, fresh), *read
    return Ordered(rounds, before, (Fill(), Await(), Start(products), *read, Wait(1), Release()), (Wait(0), Release()))


# --------------------------------------------------------------------------------------------------
# Where everything lies in shared memory: stages of the rings, results on their way out, barriers; and how many stages.

@dataclass(frozen=True)
class Ring:
    """``offsets``: of the blocks, within the memory of the first stage; ``filled``: bytes of a stage that they take."""

    rounds: Rounds
    stages: int
    stage_bytes: int
    filled: int
    offsets: dict[str, int]
    barriers: int


@dataclass(frozen=True)
class Allocation:
    """``outs``: of results that leave by shared memory, where they lie in it; ``columns``: the same of cells that have a
    value for each column; ``cluster``: blocks that share operands; ``kernel``: what they lie in. With ``one_ring`` all
    loops go around the same stages."""

    blocks: dict[str, int]
    rings: tuple[Ring, ...]
    outs: dict[str, int]
    nbytes: int
    cluster: Cluster
    columns: dict[str, int]
    band: int                          # tile rows
    kernel: KernelLimits
    one_ring: bool


# --------------------------------------------------------------------------------------------------
# How results leave.

@dataclass(eq=False)
class Out:
    """A result: how it leaves, and the function of its elements (None: the sums as they are)."""

    store: StoreStatement
    dtype: np.dtype
    kind: str                          # the collective's name
    pairs: bool
    function: ElementFunction | None
    sums: str                          # what is stored where there is no function

    @property
    def name(self) -> str:
        return self.store.parameter.name
