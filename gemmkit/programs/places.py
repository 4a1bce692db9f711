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
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.kernels.collectives.pipeline import SharedMemory
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.called import EXTENT
from gemmkit.programs.collectives import PATTERN, ROWS
from gemmkit.programs.lengths import PIECE
from gemmkit.programs.mapping import KernelLimits, Mapping
from gemmkit.programs.trace import Carried, Loop, StoreStatement, Value, refuse_update
from gemmkit.programs.values import Axis, Index, Parameter, ProgramAxis, refused, shown, unique
from gemmkit.runtime.device import DeviceInfo

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

    def _of_exp(self, like: Value, x: Value) -> Value:
        return self.build("exp2", (self.build("mul", (x, _constant(math.log2(math.e))), like),), like)

    def _of_log(self, like: Value, x: Value) -> Value:
        return self.build("mul", (self.build("log2", (x,), like), _constant(math.log(2))), like)

    def _of_div(self, like: Value, x: Value, y: Value) -> Value:
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
    """Of rows of so many columns."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns = columns

    def of(self, x: Value) -> Value:
        new = super().of(x)
        if x.name and not new.name and new.op not in LEAVES:
            new.name = x.name
        return new

    def _of_mul(self, like: Value, x: Value, y: Value) -> Value | None:
        is_mean = x.op == "rowsum" and y.op == "const" and not y.dims and self.columns and y.data == 1 / self.columns
        return self.build("rowmean", x.args, like) if is_mean else super()._of_mul(like, x, y)

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
        return x if np.dtype(like.data) == np.dtype(np.float32) else None


# --------------------------------------------------------------------------------------------------
# Where values are: blocks of operands in the stages of a loop's ring, sums in registers, the rest where threads need it.
#
# A sequential loop has one ring. In each round its products take their blocks from one stage, and a block that two
# products take is there once.

TAKEN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@dataclass(eq=False)
class TilePlace:
    """A block of an array in the stages of a ring: ``dims`` as they are in the array; ``lookup``: the array that says which
    of its rows the lines are, where they do not lie one behind the other."""

    name: str
    parameter: Parameter
    dims: tuple[Index, Index]
    stacks: tuple[Index, ...]
    lookup: Parameter | None = None

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
    def piece(self) -> Index | None:
        """The index that says along the rows of which piece it goes, where rows are packed."""
        return self.index.piece

    @property
    def looked_up(self) -> list[TilePlace]:
        """Blocks whose lines an array names."""
        return [tile for tile in self.tiles if tile.lookup is not None]

    @property
    def is_read_by_threads(self) -> bool:
        """Whether not only tensor cores read its stages."""
        return bool(self.row_sums or self.column_sums)


@dataclass(eq=False)
class Places:
    indices: tuple[Index, Index]
    loops: list[Rounds]
    stores: list[StoreStatement]
    stacks: tuple[Index, ...] = ()     # which matrix of stacked arrays
    cells: dict[Value, str] = field(default_factory=dict)          # of what is there after a loop: the sums' name
    starts: dict[str, float] = field(default_factory=dict)         # of the sums' names: what they begin with
    rows: dict[Value, str] = field(default_factory=dict)           # the same of cells that have a value for each row
    row_starts: dict[str, float] = field(default_factory=dict)
    columns: dict[Value, str] = field(default_factory=dict)        # of cells that have one for each column
    column_starts: dict[str, float] = field(default_factory=dict)
    arguments: frozenset[str] = frozenset()
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

    @property
    def names(self) -> list[str]:
        """Of all cells."""
        return [*self.starts, *self.row_starts, *self.column_starts]

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
    for store in loop.updated.values() if loop.loops[1:] or not is_tiled(loop, 1) else ():
        if store.read is None or not is_tiled(loop, 1) or any(store is x for x in loop.body):
            raise refuse_update(store)
    sliced = [y for x, n, y in _operands(loop) if y.op == "load" and y.dims and isinstance(y.dims[-1], Axis)
              and y.dims[-1].size < y.data[0]._shape[-1] and not (x and x.op == "dot" and n == 1 and is_tiled(loop, 1))]
    if sliced:
        raise refused(ValueError, f"the first columns of {sliced[0].data[0].name}; a kernel takes them as the right operand "
                                  "of a product in tiles of whole rows (only .reference(...) runs others)", sliced[0].line)
    if loop.looked_up and not is_tiled(loop, 2):
        raise refused(ValueError, "rows that an array names; a kernel has them in tiles of rows and columns, "
                                  "parallel(a.rows, b.columns) (only .reference(...) runs others)", loop.looked_up)


def refuse_pieces(loop: Loop) -> None:
    """Raises ValueError, with the user's line, for rows that are packed where a kernel does not read offsets."""
    for each in loop.loops:
        if any(index.extent.offsets is not None for index in each.indices):
            raise refused(ValueError, "packed(...): a kernel has pieces of rows where it multiplies, in a sequential loop; "
                                      "only .reference(...) runs others", each.line)


def check_pieces(places: Places, loop: Loop) -> None:
    """Raises ValueError, with the user's line, for rows that are packed in other ways than as a tile's rows, or as the lines
    of both operands that rounds go along."""
    (m, n), such = places.indices, "only .reference(...) runs others"
    if n.extent.offsets is not None:
        raise refused(ValueError, f"packed(...): {n} are a tile's columns; a kernel has pieces of a tile's rows, or of "
                                  f"rounds ({such})", loop.line)
    if m.piece is not None and places.stacks != (m.piece,):
        raise refused(ValueError, f"parallel({shown(index.extent for index in loop.indices)}): rows of {m} are packed; "
                                  f"tiles of rows and columns then have no stacks but the pieces ({such})", loop.line)
    across = next((x for rounds in places.loops for x in rounds.products if m.piece is not None and x.a_transposed), None)
    if across is not None:                             # TMA's boxes begin at multiples of 16 bytes, and pieces anywhere
        raise refused(ValueError, f"{across.a.parameter.name}[{shown(across.a.dims)}].T: rows of {m} are packed, and lie "
                                  f"along this array's columns; a kernel takes a[m, k] ({such})", across.line)
    for rounds in [rounds for rounds in places.loops if rounds.piece is not None]:
        if m.piece is not None or len(places.loops) > 1:
            raise refused(ValueError, f"rounds along pieces of {rounds.index}: a kernel has one loop then, and tiles of "
                                      f"rows that are not packed ({such})", rounds.line)
        across = next((x for x in rounds.products if not x.a_transposed or x.b_transposed), None)
        if across is not None or rounds.is_read_by_threads:
            raise refused(ValueError, f"rounds along pieces of {rounds.index}: a kernel multiplies rows of both arrays, "
                                      f"a[k, m].T @ b[k, n], and adds up nothing else ({such})",
                          rounds.line if across is None else across.line)
    for rounds in places.loops:
        if rounds.looked_up == rounds.tiles:
            raise refused(ValueError, f"rounds along {rounds.index} take rows that arrays name of all their operands; a "
                                      f"kernel brings one at least with TMA ({such})", rounds.line)
    for store in places.stores if places.in_pieces else []:
        if store.only is not None and (store.only is m or m.piece is None):
            raise refused(ValueError, f"once({store.only}): rows are packed, and a kernel stores tiles, or values of a "
                                      f"tile's packed rows ({such})", store.line)


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
    out.arguments, out.sizes = frozenset(arguments), loop.sizes
    for held in loop.body:
        if isinstance(held, StoreStatement):
            out.stores.append(_checked(held, out))
        elif isinstance(held, Loop):
            out.loops.append(_rounds(held, out, taken))
    if not out.loops:
        raise refused(ValueError, "no sequential loop with a product; a function of rows loops over rows only, for m in "
                                  "parallel(x.rows)", loop.line)
    check_pieces(out, loop)
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
            if value.op != "add" or value.args[1].op != ("rowsum" if one else "dot"):
                raise refused(ValueError, "rounds change a cell other than by adding products and sums of rows or columns "
                                          f"({value.op}); only .reference(...) runs this",
                              value.line or loop.line)
            used.add(value.args[1])
            if one:
                summed.insert(0, value.args[1])
            else:
                found.insert(0, _multiply(value.args[1], carried, out, made, tiles, taken))
            value = value.args[0]
        made.products += found
        waiting += [(x, carried) for x in summed]
    for x, carried in waiting if made.products else ():
        (load,), of_rows = x.args, carried.inside.dims == out.indices[:1]
        block = load.args[0] if load.op == "transpose" else load
        if block.op != "load":
            raise refused(ValueError, f"a sum of {'rows' if of_rows else 'columns'} in rounds, of {block.op}; a kernel sums "
                                      "blocks of arrays as they are (only .reference(...) runs others)", x.line)
        tile = _tile(block, x.line, out, made, tiles, taken)
        if of_rows:
            made.row_sums.append(_row_sum(load, tile, carried, made, x.line))
        else:
            made.column_sums.append(_column_sum(load, tile, carried, made, out, x.line))
    for held in loop.body:
        if not isinstance(held, Value) or (held not in used and held.op != "transpose"):
            what = held.op if isinstance(held, Value) else "a store or a loop"
            raise refused(ValueError, f"{what} inside rounds; a kernel's rounds only add products and sums of rows and "
                                      "columns to cells (only .reference(...) runs others)",
                          held.line)
    if not made.products:
        raise refused(ValueError, "rounds that change no cell; add to a cell, acc += ...", loop.line)
    return made


def _row_sum(x: Value, tile: TilePlace, carried: Carried, rounds: Rounds, line: str) -> RowSum:
    if x.op == "transpose" or any(tile is product.a and product.a_transposed for product in rounds.products):
        raise refused(ValueError, "a sum of rows that lie along an array's columns; a kernel sums rows as they lie, a[m, "
                                  "k].sum(axis=1)", line)
    return RowSum(carried, tile, line)


def _column_sum(x: Value, tile: TilePlace, carried: Carried, rounds: Rounds, out: Places, line: str) -> ColumnSum:
    """``x``: b[n, k], whose lines are summed, or b[k, n] transposed."""
    transposed = x.op != "transpose"
    before = [*out.column_sums(out.columns[carried.after]), *(y for y in rounds.column_sums if y.carried is carried)]
    if any(y.transposed != transposed for y in before):
        raise refused(ValueError, "sums of columns and of lines in one cell; use a cell for each, and add them after the "
                                  "loops", line)
    return ColumnSum(carried, tile, transposed, line)


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
                                  "without computing on them", line)
    parameter, key = load.data
    if np.dtype(parameter.dtype) not in TAKEN:
        raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; products in programs need float16 or "
                                 "bfloat16 (gemmkit.matmul takes other dtypes)", line)
    if (parameter.name, key) not in tiles:
        name = unique(parameter.name, taken)
        taken.add(name)
        stacks = tuple(index for index in key if index.stack)
        if not {stack.of_loop for stack in stacks} <= set(places.stacks):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: the stacks of a block are the tile's", line)
        tiles[parameter.name, key] = TilePlace(name, parameter, load.dims, stacks, key[-2].lookup)
        if stacks and key[-2].lookup is not None:
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: a kernel looks rows of a matrix up, and none of "
                                      "a stack's (only .reference(...) runs this)", line)
        rounds.tiles.append(tiles[parameter.name, key])
    return tiles[parameter.name, key]


def _multiply(dot: Value, carried: Carried, places: Places, rounds: Rounds, tiles: dict, taken: set[str]) -> Multiply:
    indices, k = places.indices, rounds.index
    m, n = indices
    if dot.dims != (m, n) or dot.args[0].dims[1] is not k:
        raise refused(ValueError, f"a product of ({shown(dot.dims)}) over {dot.args[0].dims[1]}: a product must be "
                                  f"({shown(indices)}) and sum over {k}", dot.line)
    found = [(_tile(x.args[0] if x.op == "transpose" else x, dot.line, places, rounds, tiles, taken), x.op == "transpose")
             for x in dot.args]
    (a, a_transposed), (b, b_transposed) = found
    if np.dtype(a.parameter.dtype) != np.dtype(b.parameter.dtype):
        raise refused(TypeError, f"{a.parameter.name} has dtype {a.parameter.dtype} and {b.parameter.name} of "
                                 f"{b.parameter.dtype}; both must have one dtype", dot.line)
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


class Release(NamedTuple):
    """The stage of the round before is empty."""


Event = Fill | Await | Start | Read | Wait | Release


@dataclass(frozen=True)
class Ordered:
    """What happens before the other rounds, in each of them, and after them."""

    rounds: Rounds
    before: tuple[Event, ...]
    round: tuple[Event, ...]
    after: tuple[Event, ...]


def ordered(rounds: Rounds) -> Ordered:
    started: set[int] = set()
    fresh = []
    for product in rounds.products:
        init = product.carried.init
        if id(product.carried) not in started and init.op == "const" and init.data == 0:
            fresh.append(product)
        started.add(id(product.carried))
    products = tuple(rounds.products)
    read = (Read(tuple(rounds.row_sums), tuple(rounds.column_sums)),) if rounds.is_read_by_threads else ()
    before = Fill(), Await(), Start(products, tuple(fresh)), *read
    return Ordered(rounds, before, (Fill(), Await(), Start(products), *read, Wait(1), Release()), (Wait(0), Release()))


# --------------------------------------------------------------------------------------------------
# Where everything lies in shared memory: stages of the rings, results on their way out, barriers; and how many stages.

MOST = 4                               # stages where the mapping does not say how many
STEP = 64                              # of a tile's columns
COLUMN_BYTES = 4                       # of a column's value in shared memory


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


def sized(places: Places, mapping: Mapping, kernel: KernelLimits) -> dict[str, int]:
    """The length of every index's blocks: the mapping's, or defaults.

    Raises ConfigError for names that the program has not, and for lengths that no product has.
    """
    m, n = places.indices
    mapping.refuse_orders(places.names)
    names = [index.name for index in (m, n, *(rounds.index for rounds in places.loops))]
    other = next((name for name in mapping.blocks if name not in names), None)
    if other is not None:
        raise ConfigError(f"Mapping(blocks={{{other!r}: {mapping.blocks[other]}}}): the program's indices are "
                          f"{', '.join(dict.fromkeys(names))}")
    rows = ROWS * mapping.warpgroups
    parts = 2 if kernel.parts == 2 and mapping.blocks.get(m.name) == 2 * rows else 1
    if parts == 2 and (places.row_starts or places.column_starts):
        raise ConfigError(f"Mapping(blocks={{{m.name!r}: {2 * rows}}}, warpgroups={mapping.warpgroups}): where rounds add "
                          f"up rows or columns, a warpgroup has {ROWS} rows; use {rows} rows along {m.name}")
    most = kernel.most_sums[mapping.warpgroups] // parts // len(places.starts) // 64 * 64
    if most == 0:
        raise ConfigError(f"{len(places.starts)} accumulators do not fit in the registers of {mapping.warpgroups} "
                          f"warpgroups; at most {kernel.most_sums[1] // 64} do")
    blocks = {m.name: rows, n.name: 64, **{r.index.name: kernel.depth for r in places.loops}}
    blocks.update(mapping.blocks)
    if blocks[m.name] != parts * rows:
        more = "" if kernel.parts == 1 else f", or {2 * rows}"
        raise ConfigError(f"Mapping(blocks={{{m.name!r}: {blocks[m.name]}}}, warpgroups={mapping.warpgroups}): a warpgroup "
                          f"has {ROWS} rows, so {rows} are needed{more}")
    for name in (n.name, *(rounds.index.name for rounds in places.loops)):
        whole = 64 if name == n.name else kernel.depths
        if blocks[name] % whole or blocks[name] > 256:
            raise ConfigError(f"Mapping(blocks={{{name!r}: {blocks[name]}}}): " + (
                "64, 128, 192 or 256 is needed" if whole == 64 else f"a multiple of {whole} up to 256 is needed"))
    if blocks[n.name] > max(64, most):
        raise ConfigError(f"Mapping(blocks={{{n.name!r}: {blocks[n.name]}}}, warpgroups={mapping.warpgroups}): with "
                          f"{len(places.starts)} accumulators, {most} columns fit in registers")
    return blocks


def allocated(places: Places, mapping: Mapping, outs: dict[str, int], device: DeviceInfo,
              kernel: KernelLimits) -> Allocation:
    """``outs``: the bytes that results need on their way out. Raises ConfigError for what does not fit."""
    blocks = sized(places, mapping, kernel)
    sizes = [[2 * _length(tile.dims[0], blocks) * _length(tile.dims[1], blocks) for tile in rounds.tiles]
             for rounds in places.loops]
    limit = device.shared_memory_per_block
    bound = min(limit, mapping.shared_bytes or limit)
    of_columns = COLUMN_BYTES * blocks[places.indices[1].name] * len(places.column_starts)
    room = (mapping.shared_bytes or kernel.share(device)) - sum(outs.values()) - of_columns
    mapping.check_arrays([tile.name for rounds in places.loops for tile in rounds.tiles])
    given = [mapping.stages_of([tile.name for tile in rounds.tiles]) for rounds in places.loops]
    one_ring = _is_one_ring(places, given, kernel)
    filled = [sum(of_one) for of_one in sizes]
    stage_bytes = [max(filled)] if one_ring else filled            # of each ring
    fits = max(LEAST_STAGES, min(MOST, room // sum(nbytes + kernel.barriers for nbytes in stage_bytes)))
    stages = [said or fits for said in given[:len(stage_bytes)]]
    if min(stages) < LEAST_STAGES:
        raise ConfigError(f"Mapping(stages={min(stages)}): " + (
            "products are waited for one round later" if kernel.uses_tma else "a stage is filled while another is read")
            + f", so {LEAST_STAGES} are needed")
    memory = SharedMemory()
    firsts = [memory.take(n * nbytes, PATTERN) for n, nbytes in zip(stages, stage_bytes)]
    places_out = {name: memory.take(nbytes, PATTERN) for name, nbytes in outs.items()}
    columns = {name: memory.take(COLUMN_BYTES * blocks[places.indices[1].name], PATTERN) for name in places.column_starts}
    barriers = [memory.take(kernel.barriers * n) for n in stages]
    rings = []
    for loop, (rounds, of_one) in enumerate(zip(places.loops, sizes)):
        ring = 0 if one_ring else loop                 # loops come one after the other
        offsets, at = {}, firsts[ring]
        for tile, size in zip(rounds.tiles, of_one):
            offsets[tile.name], at = at, at + size
        rings.append(Ring(rounds, stages[ring], stage_bytes[ring], filled[loop], offsets, barriers[ring]))
    if memory.nbytes > bound:
        raise ConfigError(f"{', '.join(map(str, stages))} stages of {sum(stage_bytes)} bytes and results of "
                          f"{sum(outs.values()) + of_columns} need {memory.nbytes} bytes of shared memory, but only {bound} "
                          "are available; use fewer stages or smaller blocks")
    return Allocation(blocks, tuple(rings), places_out, memory.nbytes, clustered(places, mapping), columns,
                      max(1, -(-mapping.band // mapping.cluster.get(places.indices[0].name, 1))), kernel, one_ring)


def _is_one_ring(places: Places, given: list[int], kernel: KernelLimits) -> bool:
    """Whether all loops go around one ring: then each has all of the stages. Those of a multistage kernel begin to fill
    theirs while the loop before is still read."""
    kinds = {(bool(rounds.row_sums), bool(rounds.column_sums)) for rounds in places.loops}
    return len(places.loops) == 1 or (kernel.uses_tma and len(set(given)) == 1 and len(kinds) == 1)


def clustered(places: Places, mapping: Mapping) -> Cluster:
    """Raises ConfigError for a cluster along other indices than a tile's rows and columns."""
    m, n = (index.name for index in places.indices)
    if places.looks_up and math.prod(mapping.cluster.values()) > 1:
        raise ConfigError(f"Mapping(cluster={dict(mapping.cluster)!r}): threads copy rows that an array names to their own "
                          "block alone; leave cluster out")
    other = next((name for name in mapping.cluster if name not in (m, n)), None)
    if other is not None:
        raise ConfigError(f"Mapping(cluster={{{other!r}: {mapping.cluster[other]}}}): blocks share operands along a tile's "
                          f"rows and columns, {m} and {n}")
    return Cluster(mapping.cluster.get(m, 1), mapping.cluster.get(n, 1))


def said(memory: Allocation, mapping: Mapping) -> Mapping:
    """The mapping with all that was left open said: it derives the same text."""
    stages = {ring.rounds.tiles[0].name: ring.stages for ring in memory.rings}
    same = len(set(stages.values())) == 1
    return replace(mapping, blocks=memory.blocks, stages=memory.rings[0].stages if same else stages,
                   kernel=memory.kernel.said)


def _length(index: Index, blocks: dict[str, int]) -> int:
    return blocks[index.name]


def out_bytes(places: Places, mapping: Mapping, dtype: np.dtype, kernel: KernelLimits) -> int:
    """Of a tile of a result in shared memory."""
    blocks = sized(places, mapping, kernel)
    m, n = places.indices
    return blocks[m.name] * blocks[n.name] * int(dtype.itemsize)
