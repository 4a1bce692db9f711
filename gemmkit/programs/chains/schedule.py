"""How a chained program lies on the machine: lengths of blocks, stages of rings, which orders, and where in shared memory.

What the mapping leaves open is chosen here: the largest blocks whose sums fit in registers and whose stages fit in shared
memory, two stages of what rounds take, products a round ahead and tiles joined where the program has two products in a
chain, rounds from the last to the first where they commute (then only a tile's first round has a ragged block).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from gemmkit.emulator import takes_small_mappings
from gemmkit.kernels.collectives.pipeline import SharedMemory
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.kernels.sm90.store import in_lines, line_of
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.called import NUMBER
from gemmkit.programs.chains.chain import (
    READ,
    Chain,
    ChainPlaces,
    OperandBlock,
    ProductPart,
    RingPlace,
    columns_begun,
    depends,
    dots,
    late_values,
    loaded,
    only_adds,
    ring_of_columns,
    why_not_across,
    why_not_ahead,
    zero_values,
)
from gemmkit.programs.chains.merging import check_added, part_of, registers_needed, shared_of
from gemmkit.programs.collectives import PATTERN, ROWS, in_steps
from gemmkit.programs.mapping import KERNELS, SHARED, WARP_SPECIALISED, KernelLimits, Mapping
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Axis, Index, refused
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning import problems

MOST = {1: 4, 2: 4, 3: 4}
SHORTEST, LONGEST = 16, 128            # of a round's blocks
MOST_LINES, ON_THE_WAY = 256, 256      # of a block that TMA brings at once; lines that a tile's beginning and end cost
SPECIAL = "exp2", "log2", "tanh", "erf", "pow", "reciprocal", "sqrt", NUMBER
ROOM_OF_SHORTER = 112                  # with which a third warpgroup pays where blocks are shorter, and products run ahead
AT_ONCE = {1: 16, 2: 16, 3: 0}          # registers of matrices more, of those that a round has at once
SHORTEST_STAGED = 64                   # blocks whose columns a warp computes
THIRD = 0.85                           # the time that rows take with a third warpgroup


@dataclass
class ScheduleChoice:
    """``stages`` and ``barriers`` by ring; ``offsets`` by block, within the first stage; ``outs``: of results that leave by
    TMA; ``stacks``: the indices of stacks that tiles go along."""

    blocks: dict[str, int]
    warpgroups: int
    rows: int                          # of a tile
    ahead: bool
    across: bool
    turns: bool
    descending: bool
    longest_first: bool
    stages: dict[RingPlace, int] = field(default_factory=dict)
    offsets: dict[OperandBlock, int] = field(default_factory=dict)
    barriers: dict[RingPlace, int] = field(default_factory=dict)
    outs: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    stacks: tuple[str, ...] = ()
    splits: int = 1
    lazy: bool = False
    anchored: bool = False
    cluster: Cluster = Cluster()       # of blocks with neighbouring tiles, which share what has none of a tile's rows
    ordered: bool = False
    staggered: bool = False            # tiles that add in an order begin at blocks of their own
    shared: dict[Value, int] = field(default_factory=dict)     # offsets of computed values, which have two places each
    adding: int = 0                    # stages of what rounds add to an array, their offsets, and that of their barriers
    added_at: int = 0
    added_bytes: int = 0
    added_barriers: int = 0
    columns: tuple[Value, ...] = ()    # of a round's columns, which a warp computes for all (`ColumnRole`)
    column_ring: RingPlace | None = None           # that goes round as their stages do
    columns_at: int = 0
    column_barriers: int = 0
    kernel: str = ""
    unit: int = 1                      # of the columns that whole axes are computed with, which zeros fill up
    half_of: Callable[[Any], int] = field(default=lambda dim: 0, repr=False)       # `Chain.half_of`

    @property
    def column_stages(self) -> int:
        return self.stages[self.column_ring] if self.columns and self.column_ring else 0

    def column_bytes(self, length: int) -> int:
        """Of a stage: a number of each column, and whether one of them is large."""
        return 4 * (len(self.columns) * length + 4)

    def size(self, dim: Any) -> int:
        return -(-int(dim.size) // self.unit) * self.unit if isinstance(dim, Axis) else self.blocks[dim.name]

    def own(self, dim: Index | Axis) -> int:
        """What a warpgroup has of it."""
        return self.half_of(dim) or self.size(dim)

    def part(self, chain: Chain, d: Value) -> tuple[int, int]:
        return part_of(chain, d, self.size(chain.index), self.size(d.dims[1]), self.warpgroups)

    def held(self, block: OperandBlock) -> tuple[int, int]:
        """Lines and columns of a block in its stage."""
        return self.size(block.dims[0]), max(self.size(block.dims[1]), block.columns)

    def said(self, given: Mapping) -> Mapping:
        """The mapping with all that was left open said: it derives the same text."""
        blocks = {name: length for name, length in self.blocks.items() if name not in self.stacks}
        return replace(given, blocks=blocks, warpgroups=self.warpgroups, ahead=self.ahead, across=self.across,
                       stages={ring.blocks[0].name: n for ring, n in self.stages.items()}, turns=self.turns,
                       splits=self.splits, lazy=self.lazy, anchored=self.anchored, ordered=self.ordered,
                       descending=self.descending, longest_first=self.longest_first, kernel=self.kernel)

    def block_bytes(self, block: OperandBlock) -> int:
        """As it lies in its stage, and as TMA counts what it brings: zeros are bytes too."""
        lines, columns = self.held(block)
        return 2 * in_steps(lines) * in_lines(columns)

    def stage_bytes(self, ring: RingPlace) -> int:
        return (max if ring.in_turn else sum)(map(self.block_bytes, ring.blocks))

    def is_shared(self, block: OperandBlock, rows: Index) -> bool:
        """Whether the blocks of a cluster have the same block of an operand."""
        return self.cluster.shares_b and rows not in block.dims


class ScheduleCandidate(NamedTuple):
    """A mapping with its warpgroups said, how long a round's blocks are, and whether tiles are joined."""

    mapping: Mapping
    length: int
    across: bool


@dataclass(frozen=True)
class ChainProblem(problems.MappingProblem):
    """``commutes``: whether rounds may go in another order; ``outs``: the dtypes of results that leave by TMA. The choice is
    a `ScheduleChoice`. All values of open fields are tried, and the reason why nothing fits is the smallest one's."""

    chain: Chain
    places: ChainPlaces
    mapping: Mapping
    commutes: bool
    outs: dict[str, np.dtype]
    kernel: KernelLimits

    def candidates(self, device: DeviceInfo) -> Iterator[ScheduleCandidate]:
        _check_names(self.chain, self.places, self.mapping, self.kernel)
        return _candidates(self.chain, self.mapping, self.kernel, decided_by(self.chain, device.sm_count))

    def specialise(self, mapping: ScheduleCandidate, device: DeviceInfo) -> problems.Choice:
        given, length, across = mapping
        chain, places, kernel = self.chain, self.places, self.kernel
        limit, said = device.shared_memory_per_block, self.mapping.shared_bytes
        room = SharedMemoryBudget(min(limit, said or limit), said or kernel.share(device), kernel)
        choice = _orders(chain, places, given, self.commutes, length, across)
        choice.kernel = kernel.said
        is_open = chain.index.name not in self.mapping.blocks
        registers = kernel.usual_room if is_open else kernel.room
        if is_open and not self.mapping.warpgroups and length < kernel.lengths[0] and choice.ahead:
            registers = {**registers, 3: ROOM_OF_SHORTER}
        reason = _registers(chain, choice, kernel, registers) or _shapes(places, choice, chain, kernel, given)
        if reason is None:                             # results leave from the registers where memory is short
            reason = _memory(places, given, choice, self.outs, room, chain)
            if reason is not None and self.outs:
                reason = _memory(places, given, choice, {}, room, chain)
        if reason is not None:
            raise ConfigError(reason)
        return problems.Choice(choice)

    def refusal(self, refused: list[ConfigError], last: ScheduleCandidate) -> ConfigError:
        if len(set(map(str, refused))) == 1:           # that no length of blocks changes
            return refused[-1]
        smallest = f"blocks of {last.length} along {self.chain.index}, warpgroups={last.mapping.warpgroups}"
        smallest += ", stages=1" if last.mapping.stages == 1 else ""
        return ConfigError(f"no lengths of blocks fit, down to {smallest}: {refused[-1]}")


class SharedMemoryBudget(NamedTuple):
    """The shared memory that a block may have, and what stages grow into where nothing is said of them."""

    bound: int
    share: int
    kernel: KernelLimits


class SizeFacts(NamedTuple):
    """All that candidates take from sizes: whether a warpgroup has all rows, and whether waves of tiles take less time with
    three warpgroups than with two. In the emulator also how many places there are, and whether a tile more of rows is
    another warpgroup's (`takes_small_mappings`)."""

    few_rows: bool
    three: bool
    places: int = 0
    is_odd: bool = False


def decided_by(chain: Chain, processors: int) -> SizeFacts:
    rows, stacks = chain.each(chain.rows), chain.splits * chain.count
    small = (chain.sizes[chain.index.extent], -(-rows // ROWS) % 2 == 1) if takes_small_mappings() else (0, False)
    three = _time(stacks, rows, 3, processors) < _time(stacks, rows, 2, processors)
    if three and chain.grows:
        three = THIRD * _visited(chain, 3) < _visited(chain, 2)
    return SizeFacts(rows <= ROWS, three, *small)


def _candidates(chain: Chain, mapping: Mapping, kernel: KernelLimits, facts: SizeFacts) -> Iterator[ScheduleCandidate]:
    """The best first. What does not fit takes
    shorter blocks, then one warpgroup, then one stage.

    Three warpgroups where long blocks fit and waves of tiles take less time so, else two: heads of 64 took 0.75 of the time
    with three, in turns, and heads of 80 0.92 with 96 keys in place of 128 (heads of 96 1.03, H100). Tall causal tiles visit
    more that is hidden: heads of 64 take 240 us with three and 203 with two of 1024 rows, 307 and 329 of 4096. One where
    there are 64 rows or fewer: 8 heads of one row over 8192 keys took 0.70 of the time (H200). Of a multistage kernel one,
    so that a multiprocessor has several blocks, which wait at barriers of their own. Of products without a loop two: 8
    layers of 65536 x 128 took 28.6 us, and 30.1 with three."""
    given = mapping.blocks.get(chain.index.name)
    if chain.index.stack and given not in (None, 1):
        raise ConfigError(f"Mapping(blocks={{{chain.index.name!r}: {given}}}): {chain.index} goes along a stack, one by one")
    lengths = (1,) if chain.index.stack else (given,) if given is not None else kernel.lengths
    if chain.index.is_paged:
        lengths = _of_whole_pages(chain.index, lengths)
    if chain.added and given is None:                  # of which a warpgroup has 64 rows, or some columns
        lengths = tuple(length for length in lengths if length % ROWS == 0) or (ROWS,)
    if chain.wide:
        mapping = replace(mapping, warpgroups=2)
    if takes_small_mappings():                         # what lies beyond the last row, and the last place, is emulated too
        line = kernel.line if _goes_along_columns(chain) else 1
        enough = [length for length in lengths if length >= facts.places and length % line == 0]
        lengths = tuple(length for length in lengths if length <= min(enough, default=max(lengths)))
        is_open = not (mapping.warpgroups or mapping.turns or chain.rows.name in mapping.blocks)
        if is_open and facts.is_odd:
            mapping = replace(mapping, warpgroups=1)
    if not kernel.uses_tma:
        mapping = replace(mapping, warpgroups=mapping.warpgroups or mapping.blocks.get(chain.rows.name, 0) // ROWS or 1,
                          ahead=False, across=False, turns=False)
    joins = (mapping.across,) if mapping.across is not None else (True, False)
    if chain.splits > 1 and mapping.across is None:    # a share has few tiles, and rounds of 475 instructions: 496 across
        joins = (False,)
    rows = 0 if chain.wide else mapping.blocks.get(chain.rows.name, 0)
    if not mapping.warpgroups and rows in (ROWS, 2 * ROWS, 3 * ROWS):
        mapping = replace(mapping, warpgroups=rows // ROWS)
    if not (mapping.warpgroups or mapping.turns) and facts.few_rows:                      # a second one would have no rows
        mapping = replace(mapping, warpgroups=1)
    if facts.three and not (mapping.warpgroups or only_adds(chain) or chain.is_straight or _is_heavy(chain)):
        for length in lengths[:2]:
            for across in joins:
                yield ScheduleCandidate(replace(mapping, warpgroups=3), length, bool(across))
    may_shrink = not (mapping.warpgroups or mapping.turns)
    mapping = replace(mapping, warpgroups=mapping.warpgroups or 2)
    if len(lengths) > 1 and lengths[-1] > SHORTEST and not (chain.index.is_paged or chain.added):
        lengths = *lengths, SHORTEST
    fewer = [replace(mapping, warpgroups=1)] if may_shrink and mapping.warpgroups > 1 else []
    may_wait = kernel.uses_tma and not mapping.stages and not only_adds(chain)
    fewest = [replace((mapping, *fewer)[-1], stages=1)] if may_wait else []
    for smaller in (mapping, *fewer, *fewest):
        for length in lengths:
            for across in joins:
                yield ScheduleCandidate(smaller, length, bool(across))


def _of_whole_pages(index: Index, lengths: Sequence[int]) -> tuple[int, ...]:
    """Blocks are of whole pages, or whole parts of one."""
    rows = index.extent.of_page
    found = tuple(length for length in lengths if length % rows == 0 or rows % length == 0)
    if not found:
        raise ConfigError(f"pages of {rows} rows, and blocks along {index} of {' or '.join(map(str, lengths))}: one must "
                          "divide the other; set Mapping(blocks={...}) to a multiple of the page")
    return found


def _goes_along_columns(chain: Chain) -> bool:
    """Whether rounds take columns of an operand, of which blocks have whole lines."""
    taken = [loaded(x) for d in dots(chain.body) for x in d.args[:2]]
    return any(load is not None and load.dims[-1] is chain.index for load in taken)


def _time(stacks: int, rows: int, warpgroups: int, processors: int) -> int:
    """Of all tiles, in rows of a tile: waves of them, of which each takes time by its rows, and as much as 256 rows take for
    the way from one product to the next. 16384 rows of an MLP are a wave with 128 rows a tile as with 192 (0.84 of it),
    65536 are four and three (1.15)."""
    tiles = stacks * -(-rows // (ROWS * warpgroups))
    return -(-tiles // processors) * (ROWS * warpgroups + ON_THE_WAY)


def _visited(chain: Chain, warpgroups: int) -> int:
    """Of tiles that get longer with their rows: what they visit of the last rows' places, in rows times blocks."""
    height, rows, places = ROWS * warpgroups, chain.each(chain.rows), chain.each(chain.index)
    ends = np.arange(height, rows + height, height) + places - rows
    return int(height * np.maximum(1, -(-np.clip(ends, 0, places) // LONGEST)).sum())


def _is_heavy(chain: Chain) -> bool:
    """Whether rounds compute more than a softmax does, by special functions an element, or with matrices and places."""
    special = [x for x in chain.body if x.op in SPECIAL and len(x.dims) == 2 and not _is_light(x)]
    reads = any(y.op == "load" and len(y.dims) == 2 for x in chain.body if x.op != "dot" for y in x.args)
    return len(special) > 1 or reads or _uses_places(chain)


def _uses_places(chain: Chain) -> bool:
    """Whether places are numbers that rounds compute with, and not only conditions."""
    pending, seen = [c.out for c in chain.carried], set()
    while pending:
        x = pending.pop()
        if x.op == "coordinate":
            return True
        if x not in seen:
            seen.add(x)
            pending += x.args[1:] if x.op == "where" else x.args[:1] if _is_light(x) else x.args
    return False


def _is_light(x: Value) -> bool:
    """Whether it calls a score for which three warpgroups have registers."""
    return x.op == NUMBER and x.data.is_score and bool(x.data.f.is_light)


def _check_names(chain: Chain, places: ChainPlaces, mapping: Mapping, kernel: KernelLimits) -> None:
    names = [index.name for index in (chain.rows, chain.index)]
    other = next((name for name in mapping.blocks if name not in names), None)
    if other is not None:
        raise ConfigError(f"Mapping(blocks={{{other!r}: {mapping.blocks[other]}}}): the program's indices are "
                          f"{', '.join(names)}")
    if mapping.band:
        raise ConfigError(f"Mapping(band={mapping.band}): bands are of tiles of rows and columns, and these tiles have "
                          "whole rows; longest_first has an order of theirs")
    other = next((name for name in mapping.cluster if name != chain.rows.name), None)
    if other is not None:
        raise ConfigError(f"Mapping(cluster={{{other!r}: {mapping.cluster[other]}}}): blocks with neighbouring tiles share "
                          f"operands, and tiles of whole rows are neighbours along {chain.rows.name}")
    rows = ROWS if chain.wide else ROWS * mapping.warpgroups or "64, 128 or 192"
    given = mapping.blocks.get(chain.rows.name, rows)
    if chain.wide and (given != ROWS or mapping.warpgroups not in (0, 2)):
        raise ConfigError(f"Mapping(blocks={{{chain.rows.name!r}: {given}}}, warpgroups={mapping.warpgroups}): two "
                          f"warpgroups share the columns of a product of more than 256, of {ROWS} rows; leave both out")
    if given != rows and (mapping.warpgroups or given not in (ROWS, 2 * ROWS, 3 * ROWS)):
        raise ConfigError(f"Mapping(blocks={{{chain.rows.name!r}: {mapping.blocks[chain.rows.name]}}}, "
                          f"warpgroups={mapping.warpgroups}): a warpgroup has {ROWS} rows, so {rows} are needed")
    length = mapping.blocks.get(chain.index.name, 64)
    if not chain.index.stack and (length % 16 or length > 256):
        raise ConfigError(f"Mapping(blocks={{{chain.index.name!r}: {length}}}): a multiple of 16 up to 256 is needed")
    mapping.check_arrays([block.name for ring in places.rings for block in ring.blocks])
    values = {x.name for x in chain.values} | {c.inside.name for c in chain.carried}
    for name, place in mapping.places.items():
        staged = any(block.name == name for ring in places.rings for block in ring.blocks)
        if name in values and place == SHARED:
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): values of whole rows are in registers; omit it")
        if name not in values and not (staged and place == SHARED):
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): " + (
                f"it is an operand, which {kernel.brings} to shared memory" if staged else
                f"the program's values are {', '.join(sorted(filter(None, values)))}"))


def _orders(chain: Chain, places: ChainPlaces, mapping: Mapping, commutes: bool, length: int,
            across: bool) -> ScheduleChoice:
    """Raises ConfigError for orders that the program does not have."""
    apart = ("rounds that only add wait for nothing" if only_adds(chain) else why_not_ahead(chain) if not places.peeled else
             "a cell begins as a block of an array, whose first round is another one")
    if mapping.ahead and apart:
        raise ConfigError(f"Mapping(ahead=True): {apart}")
    ahead = apart is None if mapping.ahead is None else mapping.ahead
    divided = why_not_across(chain) if ahead else apart or "it is of products that run a round ahead, and ahead is False"
    if mapping.across and divided:
        raise ConfigError(f"Mapping(across=True): {divided}")
    if mapping.turns and mapping.warpgroups == 1:
        raise ConfigError("Mapping(turns=True, warpgroups=1): turns need 2 or 3 warpgroups")
    check_added(chain, mapping)
    if mapping.turns and only_adds(chain):
        raise ConfigError("Mapping(turns=True): rounds that only add compute nothing under another warpgroup's products")
    if mapping.descending and not commutes:
        raise ConfigError(f"Mapping(descending=True): the rounds of {chain.index} do not commute, so they keep the "
                          "program's order")
    descending = (commutes and not chain.index.stack) if mapping.descending is None else mapping.descending
    if chain.index.is_paged and math.prod(mapping.cluster.values()) > 1:
        raise ConfigError(f"Mapping(cluster={dict(mapping.cluster)!r}): rows of {chain.index} lie in pages, which blocks do "
                          "not share; leave cluster out")
    if chain.piece is not None and math.prod(mapping.cluster.values()) > 1:
        raise ConfigError(f"Mapping(cluster={dict(mapping.cluster)!r}): rows of {chain.rows} are packed, so that tiles that "
                          "follow each other may be of two pieces; leave cluster out")
    may_differ = chain.shrinks or (chain.grows and not chain.added)    # tiles add in the order of their rows
    if mapping.longest_first and not may_differ:
        raise ConfigError("Mapping(longest_first=True): the length of a tile does not grow with its rows; it does if a "
                          "condition bounds places from above by the row")
    turns = mapping.turns
    if turns is None:
        is_long = mapping.warpgroups == 3 or not ahead or _is_heavy(chain) or bool(chain.factors) or chain.grows
        turns = mapping.warpgroups > 1 and not (only_adds(chain) or chain.added) and is_long
    longest = may_differ and chain.splits == 1 if mapping.longest_first is None else mapping.longest_first
    rows = ROWS * (1 if chain.wide else mapping.warpgroups)
    blocks = {chain.rows.name: rows, chain.index.name: length}
    stacks = tuple(stack.name for stack in chain.stacks)
    stacks = (*stacks, chain.index.name) if chain.is_straight else stacks
    blocks.update(dict.fromkeys(stacks, 1))
    return ScheduleChoice(blocks, mapping.warpgroups, rows, ahead, across and divided is None, turns, descending, longest,
                          stacks=stacks, splits=chain.splits, lazy=bool(chain.factors), anchored=bool(mapping.anchored),
                          cluster=Cluster(mapping.cluster.get(chain.rows.name, 1)), unit=chain.unit,
                          ordered=bool(chain.added) and mapping.ordered is not False,
                          staggered=bool(chain.added) and mapping.ordered is not False and descending and chain.visits_all,
                          half_of=chain.half_of)


def _registers(chain: Chain, choice: ScheduleChoice, kernel: KernelLimits, rooms: dict[int, int]) -> str | None:
    """Why a thread's sums have no room."""
    at_once = kernel.uses_tma and not choice.ahead
    need = registers_needed(chain, choice.own, at_once, {d: choice.part(chain, d)[1] for x in chain.added for d in x.args})
    room = rooms[choice.warpgroups] + (AT_ONCE[choice.warpgroups] if at_once else 0)
    room += 2 * AT_ONCE[choice.warpgroups] * bool(chain.added)         # others of a round are over when what is added begins
    if chain.is_straight and choice.warpgroups < 3:    # little else is live
        room = max(room, KERNELS[WARP_SPECIALISED].room[choice.warpgroups])
    if need > room:
        return (f"accumulators and reused operands need {need} registers of a thread, but only {room} are available with "
                f"{choice.warpgroups} warpgroups with blocks of {choice.blocks[chain.index.name]} along {chain.index}; use "
                "shorter blocks or fewer warpgroups")
    return None


def _shapes(places: ChainPlaces, choice: ScheduleChoice, chain: Chain, kernel: KernelLimits, mapping: Mapping) -> str | None:
    """Why blocks cannot be brought."""
    for ring in places.rings:
        for block in ring.blocks:
            lines, columns = choice.held(block)
            is_whole = isinstance(block.dims[1], Axis)         # then TMA has zeros for what is behind a row's end
            if columns % (8 if is_whole else kernel.line) or lines % 8:
                why = ("multiples of 8 rows and of 8 columns are needed (16 bytes)" if is_whole else
                       f"multiples of 8 rows and of {kernel.line} columns are needed ({2 * kernel.line} bytes, the "
                       "swizzle's line)")
                return str(refused(ConfigError, f"blocks of {block.name} are {lines} x {columns}: {why}", chain.line))
            parts = choice.cluster.m if choice.is_shared(block, chain.rows) else 1
            line, held = line_of(columns), in_steps(lines)
            panels = in_lines(columns) // line
            if panels % parts and held % (8 * parts):
                return (f"Mapping(cluster={dict(mapping.cluster)!r}): {parts} blocks bring a part each of {block.name}'s "
                        f"blocks of {lines} x {columns}: columns of {line * parts} or lines of {8 * parts} are "
                        f"needed; use other blocks along {chain.index}")
            brought = held if panels % parts == 0 else held // parts
            if kernel.uses_tma and brought > MOST_LINES:
                return str(refused(ConfigError, f"blocks of {block.name} are {lines} x {columns}: TMA brings {MOST_LINES} "
                                                "lines at most", chain.line))
    return None


def _memory(places: ChainPlaces, mapping: Mapping, choice: ScheduleChoice, outs: dict[str, np.dtype],
            room: SharedMemoryBudget, chain: Chain) -> str | None:
    """Lay out shared memory; why it does not fit."""
    bound, share, kernel = room
    choice.stages.clear()
    lags = only_adds(chain) or not kernel.uses_tma
    in_parts = any(isinstance(d.data, ProductPart) for d in dots(chain.body))
    least = {ring: 2 if (ring.index is None and choice.across) or (ring.index is not None and (lags or in_parts)) else 1
             for ring in places.rings}
    given = {ring: mapping.stages_of([block.name for block in ring.blocks]) for ring in places.rings}
    for ring in places.rings:
        if isinstance(mapping.stages, int) and ring.index is None:
            given[ring] = 0                            # a number is of the rings that rounds go around
        choice.stages[ring] = given[ring] or max(least[ring], 2 if ring.index is not None else 1)
        if choice.stages[ring] < least[ring]:
            return (f"Mapping(stages=...): {ring.name} has {choice.stages[ring]} stage, and {least[ring]} are needed: "
                    + ("the next tile's comes while this one's is read (across)" if ring.index is None else
                       "a part of a product is awaited while the part before is read" if in_parts else
                       "products are waited for one round later" if kernel.uses_tma else
                       "a stage is filled while another is read"))
    if not kernel.uses_tma:
        _check_stages(places, choice, given)
    out_bytes = {name: ROWS * choice.warpgroups * dtype.itemsize * in_lines(_columns(chain, name))
                 for name, dtype in outs.items()}

    shared = {x: 4 * in_steps(choice.size(x.dims[0])) * in_lines(choice.size(x.dims[1])) for x in shared_of(chain)}

    choice.added_bytes = sum(4 * choice.size(chain.index) * in_lines(2 * choice.size(d.dims[1])) // 2
                             for x in chain.added for d in x.args)

    length = choice.blocks[chain.index.name]
    choice.columns = () if (choice.ordered and not chain.visits_all) or chain.wide or not choice.cluster.is_single or not (
        kernel.uses_tma) or length < SHORTEST_STAGED else columns_begun(chain)                # or the warp passes turns on
    choice.column_ring = ring_of_columns(chain, places, choice.columns)
    choice.columns = choice.columns if choice.column_ring is not None else ()

    def needed() -> int:                               # results leave from where rounds have had what they add
        outgoing = max(sum(out_bytes.values()), choice.adding * choice.added_bytes)
        return (outgoing + sum(shared.values()) + 4 * kernel.barriers + PATTERN * (not choice.columns)
                + sum(n * (choice.stage_bytes(ring) + kernel.barriers) for ring, n in choice.stages.items())
                + choice.column_stages * (choice.column_bytes(length) + kernel.barriers))

    choice.adding = 2 * bool(chain.added)
    choice.adding -= bool(chain.added) and needed() > bound
    choice.columns = choice.columns if needed() <= bound else ()
    if not mapping.stages:                             # what is left goes to the rings that rounds go around
        rounds = [ring for ring in places.rings if ring.index is not None]
        while rounds and all(choice.stages[r] < MOST[choice.warpgroups] for r in rounds):
            more = choice.column_bytes(length) + kernel.barriers if choice.columns else 0
            if needed() + more + sum(choice.stage_bytes(r) + kernel.barriers for r in rounds) > min(bound, share):
                break
            for ring in rounds:
                choice.stages[ring] += 1
    memory = SharedMemory()
    for ring in places.rings:
        first = memory.take(choice.stages[ring] * choice.stage_bytes(ring), PATTERN)
        for block in ring.blocks:
            choice.offsets[block], first = first, first + choice.block_bytes(block) * (not ring.in_turn)
    first = choice.added_at = memory.take(max(sum(out_bytes.values()), choice.adding * choice.added_bytes), PATTERN)
    choice.outs = dict(zip(out_bytes, itertools.accumulate((first, *out_bytes.values()))))
    choice.shared = {x: memory.take(nbytes, PATTERN) for x, nbytes in shared.items()}
    choice.columns_at = memory.take(choice.column_stages * choice.column_bytes(length), 16)
    choice.column_barriers = memory.take(kernel.barriers * choice.column_stages)
    choice.added_barriers = memory.take(kernel.barriers * choice.adding)
    choice.barriers = {ring: memory.take(kernel.barriers * choice.stages[ring]) for ring in places.rings}
    choice.nbytes = memory.nbytes
    if memory.nbytes > bound:
        stages = ", ".join(f"{ring.name} {n} x {choice.stage_bytes(ring)}" for ring, n in choice.stages.items())
        return (f"stages ({stages}) and results of {sum(out_bytes.values())} bytes need {memory.nbytes} bytes of shared "
                f"memory, but only {bound} are available; use fewer stages or smaller blocks")
    return None


def _check_stages(places: ChainPlaces, choice: ScheduleChoice, given: dict[RingPlace, int]) -> None:
    """Raises ConfigError where rings of a multistage kernel would not go around together."""
    for ring in places.lone():
        if choice.stages[ring] > 1:
            raise ConfigError(f"Mapping(stages={{{ring.name!r}: {choice.stages[ring]}}}, kernel='multistage'): a block has "
                              "one tile, and copies it once")
    rounds = [ring for ring in places.rings if ring.index is not None]
    most = max(given[ring] for ring in rounds) or max(choice.stages[ring] for ring in rounds)
    other = next((ring for ring in rounds if given[ring] not in (0, most)), None)
    if other is not None:
        raise ConfigError(f"Mapping(stages=..., kernel='multistage'): {other.name} has {given[other]} stages, and others "
                          f"{most}: the blocks of a round are copied together; give one number")
    choice.stages.update(dict.fromkeys(rounds, most))


def _columns(chain: Chain, name: str) -> int:
    store = next(store for store in chain.stores if store.parameter.name == name)
    columns = int(store.parameter.shape[-1])
    return chain.half_of(Axis(columns)) or columns


# --------------------------------------------------------------------------------------------------
# The order of a chained kernel's round, and with it all synchronisation: one list scheduler.

# A product starts as soon as what it takes is there; all else is computed as soon as it needs no wait; else the oldest
# group of products is waited for, and the stages that no product needs any more are released. That is all of `arrange`.
#
# | rounds | before the others | in each of them | after them |
# |---|---|---|---|
# | only add to cells | start | start, wait for all groups but this one, release the stage before | wait, release |
# | plain | the first one, where a cell begins as a block of memory | `arrange` (round) | |
# | ``ahead`` | `arrange` (first) | `arrange` (first + late) | `arrange` (late) |
# | ``across`` | the same, and over the end of a tile `arrange` (first of the next one + late) | | |
#
# Products of a multistage kernel are done where they stand: its rounds are plain, and its printer leaves out waits.
#
# With ``ahead`` products that need another product of their round, and what needs them, are late: they go in the next
# round.

class Full(NamedTuple):
    """The producer fills a stage; a consumer goes on when it is full. ``blocks``: those that the stage then has, from
    ``first`` on of a product in parts."""

    ring: RingPlace
    blocks: tuple[OperandBlock, ...]
    first: int = 0


class ChainStart(NamedTuple):
    """A group of products begins."""

    products: tuple[Value, ...]


class ChainWait(NamedTuple):
    """A consumer goes on when no more than ``pending`` groups run: ``over`` are done, ``flying`` are not."""

    pending: int
    over: tuple[Value, ...]
    flying: tuple[Value, ...]


class ChainRelease(NamedTuple):
    """A stage is empty; with ``before`` that of the round before."""

    ring: RingPlace
    before: bool = False


class Compute(NamedTuple):
    values: tuple[Value, ...]


class Anchor(NamedTuple):
    """What a value of rows is made of stays before the next wait."""

    value: Value


class Turn(NamedTuple):
    """A consumer waits for its turn at the tensor cores."""


class Pass(NamedTuple):
    """The next consumer's turn comes."""


Event = Full | ChainStart | ChainWait | ChainRelease | Compute | Anchor | Turn | Pass


@dataclass
class ChainOrder:
    """``join``: the last products of a tile with what goes before the next one's rounds. ``late``: values of the round
    before, in ``round``; ``zero``: what is zero before the first round."""

    before: list[Event] = field(default_factory=list)
    round: list[Event] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)
    join: list[Event] = field(default_factory=list)
    late: set[Value] = field(default_factory=set)
    zero: set[Value] = field(default_factory=set)
    lags: bool = False

    @property
    def lagging(self) -> list[RingPlace]:
        """Whose stages are released a round later."""
        return [event.ring for event in self.after if isinstance(event, ChainRelease) and event.before]


def ordered(chain: Chain, places: ChainPlaces, choice: ScheduleChoice) -> ChainOrder:
    """Raises ConfigError for anchors of rounds that have nowhere to put them."""
    out = _ordered(chain, places, choice)
    if choice.anchored:
        found = [_anchored(chain, part) for part in (out.before, out.round, out.after, out.join)]
        if found == [out.before, out.round, out.after, out.join]:
            raise ConfigError("Mapping(anchored=True): no values of rows are computed while a product runs")
        out.before, out.round, out.after, out.join = found
    return out


def _anchored(chain: Chain, part: list[Event]) -> list[Event]:
    """Before each wait behind what is computed while products run: the value of rows that most of it flows into."""
    outs, events = {c.out for c in chain.carried}, list[Event]()
    for event in part:
        before = events[-1] if events else None
        if isinstance(event, ChainWait) and isinstance(before, Compute):
            values = set(before.values)
            rows = [x for x in before.values if x.dims == (chain.rows,) and (x.op == "rowsum" or x in outs)]
            made_of = {x: sum(x is y or depends(x, {y}, values) for y in values) for x in rows}
            events += [Anchor(max(rows, key=lambda x: made_of[x]))] if rows else []
        events.append(event)
    return events


def _ordered(chain: Chain, places: ChainPlaces, choice: ScheduleChoice) -> ChainOrder:
    out = ChainOrder()
    if only_adds(chain) and not choice.kernel:
        return _adding(chain, places)
    late = late_values(chain) if choice.ahead else set()
    if not late:
        if places.peeled:
            handed = {d.args[0] for d in places.peeled}
            handed |= {x.args[0] for x in handed if x.args[0].op == "where"}           # of a cell, filled up
            begun = [places.peeled.get(x, x) for x in chain.body if x not in handed]
            out.before = arrange(begun, places, dict(places.peeled), turns=choice.turns)
        stages = {ring.in_turn: n for ring, n in choice.stages.items()}.get(True, 0)
        out.round = arrange(chain.body, places, {}, turns=choice.turns, stages=stages)
        return out
    out.late = late
    first, last = ([x for x in chain.body if (x in late) is is_late] for is_late in (False, True))
    through = {c.inside: c.out for c in chain.carried if c.out in late}
    crossing = {x for x in first if any(x in y.args for y in last)}
    out.zero = zero_values(chain, late)
    begun = [x for x in first if x not in out.zero]
    out.before = arrange(begun, places, {})
    if choice.across:
        out.join = arrange([*begun, *last], places, {}, crossing - out.zero, choice.turns)
    out.round = arrange([*first, *last], places, through, crossing, choice.turns, late=late)
    out.after = arrange(last, places, {})
    return out


def _adding(chain: Chain, places: ChainPlaces) -> ChainOrder:
    products = tuple(dots(chain.body))
    events = arrange(chain.body, places, {}, leave=True)
    groups = sum(isinstance(event, ChainStart) for event in events)
    released = [ChainRelease(ring, True) for ring in places.rings_of(products) if ring.index is not None]
    return ChainOrder(events, [*events, ChainWait(groups, products, ()), *released],
                      [ChainWait(0, products, ()), *released], lags=True)


def arrange(values: list[Value], places: ChainPlaces, through: dict[Value, Value], crossing: Iterable[Value] = (),
            turns: bool = False, leave: bool = False, late: Iterable[Value] = (), stages: int = 0) -> list[Event]:
    """``through``: cells whose values some of ``values`` make, which all but those of the round before (``late``) wait for.
    ``crossing``: what products of the round before still read: it is not made anew while they do. ``leave``: groups still
    run at the end. ``stages``: of blocks that come in turn. A turn has all parts of a product if there is a stage for each.
    Else it has one part less than there are stages: the next part comes when every warpgroup has released its stage, which
    one that waits for its turn does not."""
    events: list[Event] = []
    left, flying = list(values), list[list[Value]]()
    awaited: set[RingPlace] = set()
    readers = {x: [d for d in values if d.op == "dot" and x in d.args] for x in crossing}
    products, starts = dots(values), 0
    in_turn = any(ring.in_turn for ring in places.rings_of(products))

    def done(x: Value) -> bool:
        return x not in left and not any(x in group for group in flying)

    def is_ready(user: Value) -> bool:
        """A reader of what crosses takes it as the round before left it. A part of a product follows the part before."""
        before = user.args[2:] if isinstance(user.data, ProductPart) else ()
        if in_turn and flying and user.op == "dot" and not before:     # another product begins when the one before is over
            return False
        return all((x in before and x not in left) or (x in readers and user in readers[x])
                   or done(x if user in late else through.get(x, x)) for x in user.args)

    def is_read(x: Value, reads: bool) -> bool:
        """Of products that go one after the other what a later one needs is read later."""
        users = [y for y in left if x in y.args]
        return reads and (not flying or not in_turn or any(y in group for group in flying for u in users for y in u.args))

    def computed(reads: bool) -> list[Value]:
        """What needs no wait, with what is made of it: no more left."""
        ready: list[Value] = []
        for x in list(left):
            if x.op != "dot" and (x.op != READ or is_read(x, reads)) and is_ready(x) and all(map(done, readers.get(x, ()))):
                ready.append(x)
                left.remove(x)
        return ready

    def passes() -> bool:
        return any(isinstance(event, Pass) for event in events)

    def wait() -> None:
        over = flying.pop(0)
        if turns and not in_turn and dots(left) and not passes():
            begun = max(n for n, event in enumerate(events) if isinstance(event, ChainStart))
            events.insert(begun + 1, Pass())           # while it computes, another one's products run
        events.append(ChainWait(len(flying), tuple(over), tuple(d for group in flying for d in group)))
        busy = places.rings_of([*left, *(d for group in flying for d in group)])
        events.extend(ChainRelease(ring) for ring in places.rings_of(over)
                      if ring.in_turn or ((ring.index is not None or in_turn) and ring not in busy))

    while left:
        group: list[Value] = []
        for d in dots(left):
            if is_ready(d) and (not group or (not in_turn and places.rings_of(group) == places.rings_of([*group, d]))):
                group.append(d)
        if group:
            part = group[0].data if isinstance(group[0].data, ProductPart) else ProductPart()
            together = part.of if part.of <= stages else stages - 1
            full = [ring for ring in places.rings_of(group)
                    if ring.index is not None and (ring.in_turn or ring not in awaited)]
            awaited.update(full)
            events.extend(Full(ring, places.brought(ring, group), part.first) for ring in full)
            if turns and (part.number % together == 0 if in_turn else not starts):
                events.append(Turn())
            starts += len(group)
            events.append(ChainStart(tuple(group)))
            left = [x for x in left if x not in group]
            is_last = part.number % together == together - 1 or part.number == part.of - 1
            if turns and (is_last if in_turn else starts == len(products) and not passes()):
                events.append(Pass())
            flying.append(group)
            if in_turn and flying[1:]:                 # the part before is over: its stage is filled again
                wait()
            continue
        ready = computed(bool(flying)) or computed(True)           # loads go while a product runs
        if ready:
            events.append(Compute(tuple(ready)))
        else:
            wait()
    while flying and not leave:
        wait()
    return events
