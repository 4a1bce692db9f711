"""A chained program as the passes see it: a sequential loop in single assignment, what follows it, and where values are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.kernels.sm90.store import in_lines
from gemmkit.programs.called import EXTENT
from gemmkit.programs.collectives import STEP
from gemmkit.programs.lengths import PIECE
from gemmkit.programs.places import is_tiled, walked
from gemmkit.programs.trace import Carried, Loop, StoreStatement, Value, refuse_update
from gemmkit.programs.values import Axis, Index, Parameter, ProgramAxis, refused, shown, unique

if TYPE_CHECKING:
    from gemmkit.programs.chains.algebra import Ranges
    from gemmkit.programs.mapping import KernelLimits

# Operations that passes put into a chain.

#: An operation: a part of an exponent from which a number of each row is subtracted, of s, a factor and a shift, whose fma
#: it is; and of scale s - top, which it was written as, and what that is multiplied by. A shift by columns is in s.
LOWERED = "lowered"
#: An operation: what a product begins at, of numbers by rows or columns, or of an exponent's shift and what divides it.
BELOW = "below"
#: An operation: what an array has by columns, loaded before it is needed.
READ = "read"
#: Operations: a value that goes to shared memory, whose rows all warpgroups' products take; what an array's rows are updated
#: by, a `StoreStatement` (`gemmkit.programs.sums`).
SHARED, ADDED = "shared", "added"


@dataclass(eq=False)
class Added(Carried):
    """Rows of an array that rounds add to, ``x[m] += value``, as a cell: what is proved of sums holds of them."""

    store: StoreStatement


@dataclass(eq=False)
class Chain:
    """``body``: what a round computes, in order; ``carried``: its cells; ``end``: what is computed behind the loop, and
    ``stores``: what becomes of it. ``length``: the load of what bounds a tile's rounds, where not the array does, or the
    piece that it is of; ``piece``: the one that a tile's rows are of, where rows are packed.
    ``splits``: how many blocks share a tile's rounds (`gemmkit.programs.chains.merging`). ``factors``: of rows, which are 1
    in most rounds, and what they go to (`gemmkit.programs.chains.merging`). ``sizes``: how long the axes of its indices
    are in a call. ``start``: the first place of a tile's rounds, where that is not the axis' first."""

    stacks: tuple[Index, ...]
    rows: Index
    index: Index
    body: list[Value]
    carried: list[Carried]
    end: list[Value]
    stores: list[StoreStatement]
    line: str
    length: Value | None = None
    piece: Value | None = None
    splits: int = 1
    factors: dict[Value, Value] = field(default_factory=dict)
    sizes: dict[ProgramAxis, int] = field(default_factory=dict)
    grows: bool = False                # whether later tiles visit more blocks than earlier ones
    shrinks: bool = False              # or fewer
    visits_all: bool = False           # whether each tile visits all blocks of an axis
    start: Value | None = None
    unit: int = 1                      # of whole axes' columns, which zeros fill up: of those that a product sums over
    added: list[Value] = field(default_factory=list)           # `ADDED`, when they are no cells any more
    wide: bool = False                 # whether two warpgroups have a tile's rows, and half of wide axes' columns each

    def given_to(self, ranges: Ranges) -> list[str]:
        """What the functions of a text take, beside a row, that say which blocks a tile's rounds visit."""
        given = [*([] if self.start is None else [self.begin]), *([self.stop] if self.has_length else []), "sizes"]
        given += [self.extent_of(self.rows)] if self.piece is not None else []
        if ranges.masks:
            given += [stack.name for stack in self.stacks]
            given += [self.extent_of(self.index)] if self.length is not None else []
        return [*given, *(callee.name for callee in ranges.masks)]

    def half_of(self, dim: object) -> int:
        """Columns of a wide axis that each of two warpgroups has, in whole panels: of 320 each has 192. 0 of others."""
        return -(-dim.size // (2 * PANEL)) * PANEL if self.wide and isinstance(dim, Axis) and dim.size > MOST_COLUMNS else 0

    def group_of(self, d: Value) -> str:
        """What a text calls the warpgroup whose rows or columns a product takes; both take what is narrow of wide chains."""
        return "0" if self.wide and not self.half_of(d.dims[1]) else "group"

    @property
    def of_group(self) -> str:
        """What a text adds to a tile's first row for a warpgroup's."""
        return "" if self.wide else " + group * 64"

    def resized(self, sizes: dict[ProgramAxis, int]) -> Chain:
        """The chain of a call whose axes are so long."""
        made = object.__new__(Chain)
        vars(made).update(vars(self), sizes=sizes)
        return made

    @property
    def is_straight(self) -> bool:
        """Whether its products go one after the other, once."""
        return isinstance(self.index.extent, OneRound)

    @property
    def count(self) -> int:
        """Of its stacks."""
        return math.prod([self.sizes[stack.extent] for stack in self.stacks])

    @property
    def values(self) -> list[Value]:
        return [*self.body, *self.end]

    @property
    def indices(self) -> tuple[Index, ...]:
        """Of a tile."""
        return *self.stacks, self.rows

    @property
    def stop(self) -> str:
        """What a text calls the place behind the last that rounds go to."""
        return f"{self.index.name}_length" if self.has_length else f"sizes.{self.index.name}"

    @property
    def begin(self) -> str:
        """What a text calls the place where a tile's first block begins."""
        return "0" if self.start is None else f"{self.index.name}_start"

    @property
    def shown(self) -> str:
        """What it calls the first place that is there: blocks do not lie across pages, and may begin in front of it."""
        return f"{self.index.name}_shown" if self.starts_within else self.begin

    @property
    def starts_within(self) -> bool:
        """Whether a tile's first block may have places that are not there."""
        return self.start is not None and self.index.is_paged

    @property
    def where(self) -> list[Value]:
        """What a kernel reads that says where rows and rounds are: loads, and pieces."""
        bounds = [x for x in walked([x for x in (self.start, self.length) if x is not None]) if x.op in ("load", PIECE)]
        return [*bounds, *([] if self.piece is None else [self.piece])]

    def extent_of(self, index: Index) -> str:
        """What a text calls how many places there are along an index."""
        is_bounded = index is self.index and self.length is not None
        return f"{index.name}_count" if is_bounded or (index is self.rows and self.piece) else f"sizes.{index.name}"

    def each(self, index: Index) -> int:
        """How many places there are along an index; of pieces in the mean, as the host does not know their lengths."""
        length = self.sizes[index.extent]
        return length if index.piece is None else -(-length // max(1, self.sizes[index.piece.of_loop.extent]))

    @property
    def own_stacks(self) -> tuple[Index, ...]:
        """Those of a result: rows of all pieces are one axis."""
        return tuple(stack for stack in self.stacks if stack is not self.rows.piece)

    @property
    def asks_extent(self) -> bool:
        """Whether a mask asks how many places there are."""
        return any(x.op == EXTENT for x in walked([c.out for c in self.carried]))

    @property
    def share(self) -> str:
        """What a text calls which of a tile's shares is a block's; ``sizes`` have of that name how many there are."""
        return f"{self.index.name}_share"

    @property
    def has_length(self) -> bool:
        """Whether a text has a length of each tile's own."""
        return self.length is not None or self.start is not None or self.splits > 1

    @property
    def stacks_of_results(self) -> int:
        """How many axes its results have in front: shares of a tile's rounds are a stack, whatever the tile is one of."""
        return 1 if self.splits > 1 else len(self.own_stacks)

    @property
    def updates(self) -> list[StoreStatement]:
        """What rounds add to arrays."""
        return [*(c.store for c in self.carried if isinstance(c, Added)), *(x.data for x in self.added)]

    def stores_rows(self, store: StoreStatement) -> bool:
        """Whether a store is of a value of each row, and not of rows."""
        return len(store.parameter.shape) == 1 + self.stacks_of_results


@dataclass(frozen=True, eq=False)
class OneRound(ProgramAxis):
    """What a tile without a sequential loop goes along: its products, one after the other, are a round."""

    def measured(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 1


def is_chained(loop: Loop) -> bool:
    """Whether tiles go along rows alone: then a tile has whole rows, which rounds may reduce and multiply again."""
    return is_tiled(loop, 1)


def has_products(loop: Loop) -> bool:
    """Whether a tile multiplies outside of rounds."""
    return any(isinstance(held, Value) and held.op == "dot" for held in loop.body)


def in_one_round(loop: Loop, taken: Collection[str]) -> Loop:
    """A program of whole rows that multiplies without a sequential loop, as one with a loop of one round: the round makes
    what is stored."""
    if not is_chained(loop) or any(isinstance(held, Loop) for held in loop.body) or not has_products(loop):
        return loop
    index = Index(OneRound("", 0, 1, stack=True), unique("once", taken))
    rounds, stores = Loop("sequential", (index,), line=loop.line), list[Any]()
    for held in loop.body:
        if isinstance(held, Value):
            rounds.body.append(held)
            continue
        x = held.value
        inside, after = (Value(op, (), x.dims, name=x.name, line=x.line) for op in ("carried", "after"))
        rounds.carried.append(Carried(None, Value("const", (), x.dims, 0.0, line=x.line), inside, x, after))
        stores.append(replace(held, value=after))
    return replace(loop, body=[rounds, *stores])


def chain_of(loop: Loop) -> Chain:
    """Raises ValueError, with the user's line, for another form than rounds followed by stores."""
    loops = [held for held in loop.body if isinstance(held, Loop)]
    if len(loops) != 1:                                # there is one: `in_one_round`
        raise refused(ValueError, f"{len(loops)} sequential loops in tiles of whole rows; a kernel has one, and only "
                                  ".reference(...) runs others", loops[1].line)
    (rounds,) = loops
    updates = [held for held in rounds.body if isinstance(held, StoreStatement) and held.read]
    wrong = next((held for held in rounds.body if not isinstance(held, Value) and held not in updates), None)
    if wrong is not None:
        raise refused(ValueError, "a store or a loop inside a round; add to the rows of the round, x[m] += ..., or store "
                                  "after the loop (only .reference(...) runs other programs)", wrong.line)
    carried = [*map(_cell_of, updates), *rounds.carried]
    if updates:                                        # what is written first begins first
        carried.sort(key=lambda c: rounds.body.index(c.store if isinstance(c, Added) else c.out))
    if not carried:
        raise refused(ValueError, "rounds that change no cell; add to a cell, acc += ...", rounds.line)
    for x in (*rounds.body, *loop.body):
        if isinstance(x, Value) and x.op in ("rowmax", "rowsum") and x.args[0].op == "transpose":
            raise refused(ValueError, "a reduction with axis=0, or of a transpose; in tiles of whole rows a kernel reduces "
                                      "with axis=1 (only .reference(...) runs others)", x.line)
    stores = [held for held in loop.body if isinstance(held, StoreStatement)]
    *stacks, rows = loop.indices
    chain = Chain(tuple(stacks), rows, rounds.indices[0], [x for x in rounds.body if isinstance(x, Value)], carried, [],
                  stores, rounds.line, rounds.stop, sizes=loop.sizes, start=rounds.start)
    if rows.piece is not None:
        chain.piece = Value(PIECE, (), (), (rows.extent.offsets, (rows.piece,)), line=loop.line)
    key = *chain.own_stacks, rows
    for store in stores:
        rank = len(store.parameter.shape)
        if tuple(store.key) != key or store.only is not None or rank - len(key) not in (0, 1):
            raise refused(ValueError, f"{store.parameter.name}[{shown(store.key)}] is stored; in tiles of whole rows a "
                                      f"kernel stores rows, [{shown(key)}] (only .reference(...) runs others)",
                          store.line)
    for dot in dots(chain.body):
        _check_rounded(dot, {c.inside: c for c in chain.carried})
        is_wide = isinstance(dot.dims[1], Axis) and MOST_COLUMNS < dot.dims[1].size <= 2 * MOST_COLUMNS
        chain.wide = chain.wide or (is_wide and not chain.is_straight)
        axis = dot.args[0].dims[1]
        is_odd = any(isinstance(dim, Axis) and dim.size % 8 for dim in (axis, dot.dims[1]))
        if chain.is_straight or is_odd or (loaded(dot.args[0]) is None and isinstance(axis, Axis) and axis.size % STEP):
            chain.unit = STEP
    _check_pages(chain)
    staged = {y.data[0] for dot in dots(chain.body) for x in dot.args[:2] if (y := loaded(x)) is not None}
    staged |= {c.init.data[0] for c in chain.carried if c.init.op == "load"}
    for store in (store for store in stores if store.parameter.name in loop.updated):
        if chain.wide or (chain.piece is not None and store.parameter in staged):
            raise refuse_update(store)                 # both warpgroups have the rows; a block has those of the next piece
    return chain


def _cell_of(store: StoreStatement) -> Added:
    """What a round adds to, as a cell that begins with nothing."""
    x, name = store.value, store.parameter.name
    cells = [Value(op, (), x.dims, name=f"{name}_sums", line=store.line) for op in ("carried", "after")]
    out = Value("add", tuple(cells[0] if y is store.read else y for y in x.args), x.dims, None, f"{name}_sums", store.line)
    return Added(None, Value("const", (), x.dims, 0.0, line=store.line), cells[0], out, cells[1], store)


def _check_pages(chain: Chain) -> None:
    """Raises ValueError, with the user's line, for rows in pages that threads read, and for pages of odd lengths."""
    found = [(x, y) for x in [*chain.body, *(store.value for store in chain.stores)] for y in walked([x]) if y.op == "load"
             and any(index.is_page for index in y.data[1])]
    taken = {y for dot in dots(chain.body) for x in dot.args[:2] if (y := loaded(x)) is not None}
    wrong = next((y for _, y in found if y not in taken), None)
    if wrong is not None:
        name = f"{wrong.data[0].name}[{shown(wrong.data[1])}]"
        raise refused(ValueError, f"{name} lies in pages and is no operand of a product; a kernel has pages for products "
                                  "alone (only .reference(...) runs others)", wrong.line)
    if found and chain.index.extent.of_page % 8:
        raise refused(ValueError, f"pages of {chain.index.extent.of_page} rows; a kernel takes multiples of 8", chain.line)


def _check_rounded(dot: Value, cells: dict[Value, Carried]) -> None:
    """Raises TypeError for a computed left operand that the program does not round to the right operand's dtype, which
    tensor cores take."""
    right = loaded(dot.args[1])
    if right is None or loaded(dot.args[0]) is not None:
        return
    wanted = np.dtype(right.data[0].dtype)
    other = next((dtype for dtype in _dtypes(dot.args[0], cells) if dtype != wanted), None)
    if other is not None:
        name, array = dot.args[0].name or "x", right.data[0].name
        raise refused(TypeError, f"the left operand of a product, {name}, is {other}, but {array} is {wanted}, and tensor "
                                 f"cores multiply one dtype; write {name}.astype({array}.dtype)", dot.line)


def _dtypes(x: Value, cells: dict[Value, Carried]) -> list[np.dtype]:
    """Of a value, or of what a cell holds from round to round."""
    if x.op == "transpose":
        return _dtypes(x.args[0], cells)
    if x.op in ("load", "cast"):
        return [np.dtype(x.data[0].dtype if x.op == "load" else x.data)]
    c = cells.get(x)
    if c is None:
        return [np.dtype(np.float32)]
    parts = [y for y in (c.init, c.out) if y.op != "const" and y is not x]
    return [dtype for y in parts for dtype in ([np.dtype(np.float32)] if y in cells else _dtypes(y, {}))]


def dots(values: list[Value]) -> list[Value]:
    return [x for x in values if x.op == "dot"]


def loaded(x: Value) -> Value | None:
    """The load that a value is, transposed or not."""
    x = x.args[0] if x.op == "transpose" else x
    return x if x.op == "load" else None


def depends(x: Value, on: set[Value], within: set[Value]) -> bool:
    """Whether a value needs one of ``on``, by way of values ``within``."""
    pending, seen = list(x.args), set()
    while pending:
        y = pending.pop()
        if y in on:
            return True
        if y in within and y not in seen:
            seen.add(y)
            pending += y.args
    return False


def columns_begun(chain: Chain) -> tuple[Value, ...]:
    """The values of a round's columns that products begin at, and that nothing else takes: a product each."""
    users: dict[Value, list[Value]] = {}
    for x in chain.body:
        for y in x.args:
            users.setdefault(y, []).append(x)
    read = [x for x in chain.body if x.op == READ and x.dims == (chain.index,)]
    return tuple(x for x in read if [y.op for y in users[x] if y.op != LOWERED] == [BELOW]) if not only_adds(chain) else ()


def ring_of_columns(chain: Chain, places: ChainPlaces, columns: tuple[Value, ...]) -> RingPlace | None:
    """A ring that rounds go around, of the product that begins at the last of them."""
    begun = [d for d in dots(chain.body) if len(d.args) > 2 and d.args[2].op == BELOW and d.args[2].args[0] in columns[-1:]]
    return next((ring for ring in places.rings_of(begun) if ring.index is not None), None)


def only_adds(chain: Chain) -> bool:
    """Whether no thread needs a product before the loop is over."""
    sums = {c.inside: c.out for c in chain.carried}
    users: dict[Value, int] = {}
    for x in chain.body:
        for y in x.args:
            users[y] = users.get(y, 0) + 1
    return all(len(d.args) == 3 and sums.get(d.args[2]) is d and users[d.args[2]] == 1 and d not in users
               for d in dots(chain.body)) and all(x.op in ("dot", "transpose") for x in chain.body)


def late_values(chain: Chain) -> set[Value]:
    """Products that depend on another product of their round, and all that needs them."""
    products, body = dots(chain.body), set(chain.body)
    late = {d for d in products if depends(d, set(products) - {d}, body)}
    return late | {x for x in body if depends(x, late, body)}


def zero_values(chain: Chain, late: set[Value]) -> set[Value]:
    """Of a tile's first round: what products a round later are added to, where it is a factor times zero. The cell becomes
    the product, and nothing else reads it: then both are one register, which has the zeros."""
    empty = {c.inside: c.out for c in chain.carried if c.init.op == "const" and c.init.data == 0}
    readers: dict[Value, int] = {}
    for x in chain.body:
        for y in x.args:
            readers[y] = readers.get(y, 0) + 1
    return {x for x in chain.body if x not in late and x.op == "mul" and x.args[0] in empty and readers[x.args[0]] == 1
            and any(x in d.args[2:] and d is empty[x.args[0]] for d in dots(chain.body))}


def why_not_ahead(chain: Chain) -> str | None:
    """Why products that need another one of their round cannot go a round later: what goes with them then must need nothing
    else of their own round, which the next one makes anew."""
    if chain.is_straight:
        return "products without a loop have no next round"
    if chain.updates:
        return "what rounds add to an array goes through shared memory in its own round"
    late = late_values(chain)
    if not late:
        return "no product of a round needs another product of it"
    own = late | {c.inside for c in chain.carried if c.out in late}
    ragged = next((x for x in late if x.op == "inside"), None)
    if ragged is not None:
        return (f"{ragged!r} is tested for what is out of range in its own round, behind a product that would run in the "
                f"next one ({ragged.line})")
    for x in late:
        wrong = next((y for y in x.args if x.op != "dot" and y not in own and not _is_constant(y)), None)
        if wrong is not None:
            return f"{x!r} needs {wrong!r} of its own round, behind a product that would run in the next one ({x.line})"
    early = {_block_of(y, chain.index) for d in dots(chain.body) if d not in late for y in d.args[:2]} - {None}
    both = next((y for d in dots(chain.body) if d in late for y in d.args[:2] if _block_of(y, chain.index) in early), None)
    if both is not None:
        return (f"a block of {loaded(both)!r} is an operand of two products, of which one would run in the next round, when "
                f"its stage has another block ({chain.line})")
    return None


def _block_of(x: Value, index: Index) -> tuple | None:
    """Which block of which array a product takes, if rounds take one after the other."""
    load = loaded(x)
    return None if load is None or index not in load.data[1] else (load.data[0].name, load.data[1])


def why_not_across(chain: Chain) -> str | None:
    """Why a tile's last products cannot go beside the next tile's first ones."""
    late = late_values(chain)
    after = next((x for x in late if x.op != "dot"), None)
    if after is not None:
        return (f"{after!r} is computed behind a tile's last product, and the next tile's first one has its registers "
                f"({after.line})")
    cells, zero = {c.inside for c in chain.carried if c.out in late}, zero_values(chain, late)
    early = next((x for x in chain.body if x not in late and x not in zero and any(y in cells for y in x.args)), None)
    if early is not None:
        return f"{early!r} reads in a tile's first round what the last product of the tile before adds to ({early.line})"
    ends = {y for x in chain.end for y in x.args} | {store.value for store in chain.stores}
    held = next((c for c in chain.carried if c.after in ends and c.out not in late and len(c.init.dims) == 2), None)
    if held is not None:
        return f"{held.inside!r} is needed at a tile's end, and the next tile's first round has its registers"
    return None


def _is_constant(x: Value) -> bool:
    return not x.dims and (x.op in ("const", "scalar") or (bool(x.args) and all(map(_is_constant, x.args))))

# --------------------------------------------------------------------------------------------------
# Where values are: blocks of operands in rings, sums and what is made of them in registers.
#
# | value | place |
# |---|---|
# | blocks that rounds take | a ring of stages, of which one product takes its blocks at once |
# | blocks that all rounds of a tile take | a ring that is filled once a tile |
# | a product | a warpgroup's accumulators |
# | the left operand of a product that was computed | the registers that it was computed in (the hand-over) |
# | a row's value | a register in each of the four threads that share the row |
# | a cell that begins as a block of an array | its ring in a first round of its own, then the hand-over |

RECTIFIED = "rectified"                # a hand-over's data where it takes max(x, 0) as it packs
TAKEN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
MOST_COLUMNS = 256                     # of a product, that a warpgroup has
PANEL = 64                             # columns of a block that lie side by side


@dataclass(eq=False)
class OperandBlock:
    """What a product takes from memory: ``dims`` as they are in the array, ``key`` its indices."""

    name: str
    parameter: Parameter
    key: tuple[Index, ...]
    dims: tuple[Any, Any]
    ring: RingPlace
    columns: int = 0                   # that it has in a stage at least

    @property
    def stacks(self) -> tuple[Index, ...]:
        return tuple(index for index in self.key if index.stack)

    def length(self, dim: Any) -> int:
        """Of the array's axis, which may come in parts."""
        return next(size for x, size in zip(self.dims, self.parameter._shape[-2:]) if x is dim)

    def begin(self, dim: Any, first: int) -> int:
        """Where the part of a product is that begins at ``first``."""
        return first if self.length(dim) > dim.size else 0

    @property
    def paged(self) -> Index | None:
        """The index of its rows, where they lie in pages."""
        return next((index.base for index in self.key if index.is_page), None)


@dataclass(eq=False)
class RingPlace:
    """``index``: the loop's, whose round fills a stage; None: a tile does. ``in_turn``: its blocks fill a stage each, one
    after the other, and not one together."""

    index: Index | None
    blocks: list[OperandBlock] = field(default_factory=list)
    in_turn: bool = False

    @property
    def name(self) -> str:
        return self.blocks[0].name if self.in_turn else "_".join(block.name for block in self.blocks)


@dataclass
class ChainPlaces:
    """``blocks``: of a product and of one of its operands; ``peeled``: of a product the one of the first round."""

    blocks: dict[tuple[Value, int], OperandBlock] = field(default_factory=dict)
    rings: list[RingPlace] = field(default_factory=list)
    peeled: dict[Value, Value] = field(default_factory=dict)

    def lone(self) -> list[RingPlace]:
        return [ring for ring in self.rings if ring.index is None]

    def is_first_alone(self, ring: RingPlace) -> bool:
        """Whether only a tile's first round takes its blocks."""
        readers = {d for (d, _), block in self.blocks.items() if block.ring is ring}
        return readers <= set(self.peeled.values())

    def brought(self, ring: RingPlace, products: list[Value]) -> tuple[OperandBlock, ...]:
        """The blocks that fill a stage for these products."""
        taken = [block for d in products for k in (0, 1) if (block := self.blocks.get((d, k))) is not None]
        return tuple(block for block in ring.blocks if not ring.in_turn or block in taken)

    def rings_of(self, products: Any) -> list[RingPlace]:
        return list(dict.fromkeys(self.blocks[d, k].ring for d in products for k in (0, 1) if (d, k) in self.blocks))


def placed(chain: Chain, kernel: KernelLimits) -> ChainPlaces:
    """Raises ValueError and TypeError, with the user's line, for what has no place."""
    places = ChainPlaces()
    known: dict[Any, OperandBlock] = {}
    handed_over(chain)
    if chain.is_straight:
        rectify(chain)
    else:
        sink_rectified(chain)
    if chain.unit > 1:
        fill_up(chain)
    for dot in dots(chain.body):
        near = [block.ring for which in (0, 1) if (block := _operand(dot, which, chain, places, known)) is not None]
        if not chain.is_straight and len(near) == 2 and near[0] is not near[1] and near[0].index is near[1].index:
            for block in near[1].blocks:               # one product takes both at once: they share stages
                block.ring = near[0]
            near[0].blocks += near[1].blocks
            places.rings.remove(near[1])
    if not dots(chain.body):
        raise refused(ValueError, "rounds without a product; a function of rows takes whole rows instead, x[m]", chain.line)
    _peel(chain, places, known)
    if chain.wide:
        _halve(chain, places)
    if chain.is_straight:
        _put_in_turn(chain, places, kernel)
    for x in chain.values:
        wrong = next((y for y in x.args if y.op == "load" and len(y.dims) == 2), None)
        if wrong is not None and x.op in ("rowmax", "rowsum", "handover"):
            raise refused(ValueError, f"{x.op} of a block of {wrong.data[0].name} as it is: in tiles of whole rows "
                                      f"products and "
                                      "what they are computed with are reduced and handed over", x.line)
    late = next((x for x in chain.end if x.op == "dot"), None)
    if late is not None:
        raise refused(ValueError, "a product after the loop; a kernel multiplies inside its rounds (only .reference(...) "
                                  "runs others)", late.line)
    return places


def _halve(chain: Chain, places: ChainPlaces) -> None:
    """Wide axes lie in stages as two warpgroups take their columns. Raises ValueError, with the user's line, for what one of
    them would need of the other's."""
    wrong = next((x for x in chain.values if x.op in ("rowmax", "rowsum", "whole", "handover")
                  and chain.half_of(x.args[0].dims[1] if x.args[0].dims[1:] else None)), None)
    turned = next((d for d in dots(chain.body) if chain.half_of(d.dims[1]) and d.args[1].op == "transpose"), None)
    if wrong is not None or turned is not None:
        x: Any = wrong or turned
        what = "a transposed operand" if wrong is None else "a left operand" if x.op == "handover" else x.op
        raise refused(ValueError, f"{what} of {(x if wrong is None else x.args[0]).dims[1].size} columns: two warpgroups "
                                  f"have half of more than {MOST_COLUMNS} each (only .reference(...) runs this)", x.line)
    for d in dots(chain.body):
        block = places.blocks[d, 1]
        block.columns = max(block.columns, 2 * chain.half_of(d.dims[1]))
    padded = next((d for (d, n), block in places.blocks.items() if not n and block.columns > block.dims[1].size), None)
    if padded is not None:
        raise refused(ValueError, f"{places.blocks[padded, 0].parameter.name} is the left operand of a product as well as a "
                                  "right one whose columns two warpgroups share; pass it as two arguments", padded.line)


def _operand(dot: Value, which: int, chain: Chain, places: ChainPlaces,
             known: dict[Any, OperandBlock]) -> OperandBlock | None:
    x = dot.args[which]
    load = loaded(x)
    if load is None:
        if which == 0 and x.op == SHARED:
            return None
        if which == 1 or x.op == "transpose":
            raise refused(ValueError, f"the {'right' if which else 'left'} operand of a product is computed; only the left "
                                      "operand may be, and without a transpose (only .reference(...) runs others)", dot.line)
        return None
    parameter, key = load.data
    if np.dtype(parameter.dtype) not in TAKEN:
        raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; products in programs need float16 or "
                                 "bfloat16 (gemmkit.matmul takes other dtypes)",
                      dot.line)
    if len(load.dims) != 2 or any(index.stack for index in key[len(parameter.shape) - 2:]):
        raise refused(ValueError, f"{parameter.name}[{shown(key)}] is an operand of a product: a matrix, or one of "
                                  "stacks, is needed", dot.line)
    if any(isinstance(dim, Axis) and not dim.size for dim in load.dims):
        raise refused(ValueError, f"{parameter.name} has shape {parameter._shape}: an operand of a product without columns "
                                  "has no kernel in tiles of whole rows (only .reference(...) runs it)", dot.line)
    found = known.get((parameter.name, key))
    if found is None:
        index = chain.index if chain.index in key else None
        ring = RingPlace(index)
        name = unique(parameter.name, {block.name for block in known.values()})
        found = known[parameter.name, key] = OperandBlock(name, parameter, key, load.dims, ring)
        ring.blocks.append(found)
        places.rings.append(ring)
    elif isinstance(load.dims[1], Axis) and load.dims[1].size > found.dims[1].size:        # that had a part of the columns
        found.dims = load.dims
    places.blocks[dot, which] = found
    return found


class ProductPart(NamedTuple):
    """Of a product, what it sums over: so many elements, from ``first`` on. It is the ``number``-th ``of`` so many parts."""

    first: int = 0
    length: int = 0
    number: int = 0
    of: int = 1


def _put_in_turn(chain: Chain, places: ChainPlaces, kernel: KernelLimits) -> None:
    """Right operands of products that go one after the other share a ring; long ones come in parts, and a product adds one
    after the other. Each product has an operand of its own there, whatever others take of the same array."""
    order, taken, names = dots(chain.body), list[OperandBlock](), {block.name for block in places.blocks.values()}
    for d in order:
        block = places.blocks[d, 1]
        if block in taken or block.ring.blocks != [block]:             # another product has it in parts of its own
            block = OperandBlock(unique(block.name, names), block.parameter, block.key, d.args[1].dims, block.ring)
            if d.args[1].op == "transpose":
                block.dims = block.dims[::-1]
            names.add(block.name)
            places.blocks[d, 1] = block
        taken.append(block)
    ring = RingPlace(chain.index, taken, in_turn=True)
    places.rings = [*(held for held in places.rings if not any(block in taken for block in held.blocks)), ring]
    for d, block in zip(order, taken):
        block.ring = ring
        across, length = (-(-dim.size // STEP) * STEP for dim in (d.dims[1], d.args[0].dims[1]))
        each = max(kernel.stage // (2 * in_lines(across)) // kernel.line, 1) * kernel.line
        if each < length:
            along = Axis(each)
            block.dims = (block.dims[0], along) if d.args[1].op == "transpose" else (along, block.dims[1])
            parts = [ProductPart(first, min(each, length - first), n, -(-length // each))
                     for n, first in enumerate(range(0, length, each))]
            for part in parts[:-1]:
                made = Value("dot", d.args, d.dims, part, d.name, d.line)
                places.blocks.update({(made, k): places.blocks[d, k] for k in (0, 1) if (d, k) in places.blocks})
                chain.body.insert(chain.body.index(d), made)
                d.args = (*d.args[:2], made)
            d.data = parts[-1]


def handed_over(chain: Chain) -> None:
    """What a product takes as A from registers is packed just before it; what is rounded for no other reason is not."""
    for dot in dots(chain.body):
        a, b = dot.args[0], loaded(dot.args[1])
        if loaded(a) is None and b is not None and a.op != SHARED:
            source = a.args[0] if a.op == "cast" else a
            if source.op == "load":                    # threads read it, and do nothing else
                source = Value("mul", (source, Value("const", data=1.0, line="")), a.dims, None, a.name, dot.line)
                chain.body.insert(chain.body.index(dot), source)
            new = Value("handover", (source,), a.dims, None, f"{a.name or source.name or 'value'}_as_a", dot.line)
            at = chain.body.index(source) + 1 if source in chain.body else chain.body.index(dot)
            chain.body.insert(at, new)
            dot.args = (new, *dot.args[1:])
    for x in [x for x in chain.body if x.op == "cast"]:
        chain.body.remove(x)
        source = x.args[0]
        source.name = source.name or x.name
        for y in chain.body:
            y.args = tuple(source if z is x else z for z in y.args)
        for c in chain.carried:
            c.out = source if c.out is x else c.out


def rectify(chain: Chain) -> None:
    """Of products that go one after the other what is max(x, 0) and only handed over is taken as it is packed."""
    outs = {c.out for c in chain.carried}
    for x in [x for x in chain.body if x.op == "handover"]:
        (largest,) = x.args
        zeros = [y for y in largest.args if y.op == "const" and y.data == 0.0]
        is_sole = largest not in outs and not any(largest in y.args for y in chain.body if y is not x)
        if largest.op == "max" and len(zeros) == 1 and is_sole:
            (source,) = (y for y in largest.args if y not in zeros)
            chain.body.remove(largest)
            x.args, x.data, source.name = (source,), RECTIFIED, source.name or largest.name


NOTHING = dict(handover=0.0, rowsum=0.0, rowmax=-math.inf)


FILLED = "filled"                      # the data of a choice whose other columns are not there


def fill_up(chain: Chain) -> None:
    """Whole axes are computed in whole steps of a product. Columns that are not there are nothing to what folds over all of
    them: 0 times what a function makes of 0 need not be 0."""
    zeros = {c.inside for c in chain.carried if _stays_zero(c.out) and (_stays_zero(c.init) or c.init.data == 0)}
    made: dict[tuple[Value, float], Value] = {}
    for held, x in [(part, x) for part in (chain.body, chain.end) for x in part if x.op in NOTHING]:
        (source,), identity = x.args, NOTHING[x.op]
        axis = source.dims[1]
        if isinstance(axis, Axis) and axis.size % STEP and (identity or not (source in zeros or _stays_zero(source))):
            if (source, identity) not in made:
                number = Value("const", data=float(axis.size)), Value("const", data=identity)
                within = Value("lt", (Value("coordinate", (), (axis,), axis), number[0]), (axis,), line=x.line)
                filled = Value("where", (within, source, number[1]), source.dims, FILLED, source.name, x.line)
                held[held.index(x):held.index(x)] = [within, filled]
                made[source, identity] = filled
            x.args = (made[source, identity],)


def _stays_zero(x: Value) -> bool:
    """Whether a value is 0 where its columns are not there: operands and arrays are."""
    return x.op == "dot" or (x.op == "load" and len(x.dims) > 0) or (x.op == "add" and all(map(_stays_zero, x.args)))


def sink_rectified(chain: Chain) -> None:
    """A cell that becomes max(x, 0) in each round, and is only handed over: rounds carry x, the instruction that packs takes
    the maximum with it, and it is taken once more behind the loop. Half of the arithmetic of an MLP's round was that."""
    for c in chain.carried:
        largest = c.out
        zeros = [y for y in largest.args if y.op == "const" and y.data == 0.0]
        readers = [x for x in chain.body if c.inside in x.args]
        if (largest.op != "max" or len(zeros) != 1 or len(largest.dims) != 2 or c.init.op != "load"
                or any(x.op != "handover" for x in readers) or any(largest in x.args for x in chain.body)):
            continue
        (x,) = (y for y in largest.args if y not in zeros)
        chain.body.remove(largest)
        c.out, x.name = x, x.name or largest.name
        for reader in readers:
            reader.data = RECTIFIED
        after = Value("max", (c.after, zeros[0]), largest.dims, None, largest.name, largest.line)
        for y in chain.end:
            y.args = tuple(after if z is c.after else z for z in y.args)
        chain.stores = [replace(store, value=after) if store.value is c.after else store for store in chain.stores]
        chain.end.insert(0, after)


def _peel(chain: Chain, places: ChainPlaces, known: dict[Any, OperandBlock]) -> None:
    """A cell that is a block of memory at first: the product that takes it has another first round."""
    first = {c.inside: c.init for c in chain.carried if c.init.op == "load"}
    taken: set[Value] = set()
    for dot in dots(chain.body):
        a = dot.args[0]
        cell = a.args[0].args[1] if a.op == "handover" and a.args[0].op == "where" else a.args[0] if a.args else None
        init = first.get(cell) if a.op == "handover" and cell is not None else None
        if init is not None and cell is not None:
            taken.add(cell)
            clone = places.peeled[dot] = Value("dot", (init, *dot.args[1:]), dot.dims, None, dot.name, dot.line)
            places.blocks[clone, 1] = places.blocks[dot, 1]
            _operand(clone, 0, chain, places, known)
            ring = places.blocks[clone, 0].ring
            places.rings.remove(ring)
            places.rings.insert(0, ring)
    for c in chain.carried:
        other = [x for x in chain.body if c.inside in x.args and x.op != "handover" and not (
            chain.unit > 1 and x.op == "where" and all(y.op == "handover" for y in chain.body if x in y.args))]
        if c.init.op == "load" and (c.inside not in taken or other):
            raise refused(ValueError, f"{c.inside.name} begins as a block of {c.init.data[0].name}; a kernel can use such a "
                                      "cell only as the left operand of a product", (other or [c.init])[0].line)
        if c.init.op not in ("load", "const"):
            raise refused(ValueError, f"a cell that begins with {c.init.op}; a kernel's cells begin with a number, or as a "
                                      "block of an array", c.init.line)
