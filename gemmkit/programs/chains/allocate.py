"""How a chained program lies on the machine: lengths of blocks, stages of rings, which orders, and where in shared memory.

What the mapping leaves open is chosen here: the largest blocks whose sums fit in registers and whose stages fit in shared
memory, two stages of what rounds take, products a round ahead and tiles joined where the program has two products in a
chain, rounds from the last to the first where they commute (then only a tile's first round has a ragged block).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.shared_memory import SharedMemory
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.chains.chain import Chain, only_adds, why_not_across, why_not_ahead
from gemmkit.programs.chains.places import Block, ChainPlaces, RingPlace
from gemmkit.programs.collectives import PATTERN, ROWS
from gemmkit.programs.kernels import Kernel
from gemmkit.programs.lines import refused
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.values import Axis, Index
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning import problems

MOST = {1: 4, 2: 4, 3: 4}
SHORTEST = 16                          # of a round's blocks
MOST_LINES = 256                       # of a block that TMA brings at once
SPECIAL = "exp2", "log2", "tanh", "reciprocal", "sqrt"
ON_THE_WAY = 256
READING = 80                           # for addresses of a matrix that threads read in rounds


@dataclass(frozen=True)
class May:
    """What a program allows: rounds in another order; tiles ``grow`` with their rows, so that their order matters."""

    commute: bool
    grow: bool


@dataclass
class Choice:
    """``stages`` and ``barriers`` by ring; ``offsets`` by block, within the first stage; ``outs``: of results that leave by
    TMA; ``stacks``: the index of a stack that tiles go along."""

    blocks: dict[str, int]
    warpgroups: int
    ahead: bool
    across: bool
    turns: bool
    descending: bool
    longest_first: bool
    stages: dict[RingPlace, int] = field(default_factory=dict)
    offsets: dict[Block, int] = field(default_factory=dict)
    barriers: dict[RingPlace, int] = field(default_factory=dict)
    outs: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    stacks: tuple[str, ...] = ()
    splits: int = 1
    lazy: bool = False
    anchored: bool = False
    cluster: Cluster = Cluster()       # of blocks with neighbouring tiles, which share what has none of a tile's rows
    kernel: str = ""

    def size(self, dim: Any) -> int:
        return int(dim.size) if isinstance(dim, Axis) else self.blocks[dim.name]

    def said(self, given: Mapping) -> Mapping:
        """The mapping with all that was left open said: it derives the same text."""
        blocks = {name: length for name, length in self.blocks.items() if name not in self.stacks}
        return replace(given, blocks=blocks, warpgroups=self.warpgroups, ahead=self.ahead, across=self.across,
                       stages={ring.blocks[0].name: n for ring, n in self.stages.items()}, turns=self.turns,
                       splits=self.splits, lazy=self.lazy, anchored=self.anchored,
                       descending=self.descending, longest_first=self.longest_first, kernel=self.kernel)

    def block_bytes(self, block: Block) -> int:
        return 2 * self.size(block.dims[0]) * self.size(block.dims[1])

    def stage_bytes(self, ring: RingPlace) -> int:
        return sum(map(self.block_bytes, ring.blocks))

    @property
    def rows(self) -> int:
        """Of a tile."""
        return ROWS * self.warpgroups

    def is_shared(self, block: Block, rows: Index) -> bool:
        """Whether the blocks of a cluster have the same block of an operand."""
        return self.cluster.shares_b and rows not in block.dims


class Candidate(NamedTuple):
    """A mapping with its warpgroups said, how long a round's blocks are, and whether tiles are joined."""

    mapping: Mapping
    length: int
    across: bool


@dataclass(frozen=True)
class ChainProblem(problems.MappingProblem):
    """``outs``: the dtypes of results that leave by TMA. What is chosen is a `Choice`. Of what is left open all is tried,
    and the reason why nothing fits is the smallest one's."""

    chain: Chain
    places: ChainPlaces
    mapping: Mapping
    may: May
    outs: dict[str, np.dtype]
    kernel: Kernel

    def candidates(self, device: DeviceInfo) -> Iterator[Candidate]:
        _check_names(self.chain, self.places, self.mapping, self.kernel)
        return _candidates(self.chain, self.mapping, self.kernel, device.sm_count)

    def specialise(self, mapping: Candidate, device: DeviceInfo) -> problems.Choice:
        given, length, across = mapping
        chain, places, kernel = self.chain, self.places, self.kernel
        limit, said = device.shared_memory_per_block, self.mapping.shared_bytes
        room = Room(min(limit, said or limit), said or kernel.share(device), kernel)
        choice = _orders(chain, places, given, self.may, length, across)
        choice.kernel = kernel.said
        reason = _registers(chain, choice, kernel) or _shapes(places, choice, chain, kernel, given)
        if reason is None:                             # results leave from the registers where memory is short
            reason = _memory(places, given, choice, self.outs, room, chain)
            if reason is not None and self.outs:
                reason = _memory(places, given, choice, {}, room, chain)
        if reason is not None:
            raise ConfigError(reason)
        return problems.Choice(choice)

    def refusal(self, refused: list[ConfigError], last: Candidate) -> ConfigError:
        if len(set(map(str, refused))) == 1:           # that no length of blocks changes
            return refused[-1]
        smallest = f"blocks of {last.length} along {self.chain.index}, warpgroups={last.mapping.warpgroups}"
        smallest += ", stages=1" if last.mapping.stages == 1 else ""
        return ConfigError(f"no lengths of blocks fit, down to {smallest}: {refused[-1]}")


class Room(NamedTuple):
    """The shared memory that a block may have, and what stages grow into where nothing is said of them."""

    bound: int
    share: int
    kernel: Kernel


def _candidates(chain: Chain, mapping: Mapping, kernel: Kernel, processors: int) -> Iterator[Candidate]:
    """The best first. What does not fit takes
    shorter blocks, then one warpgroup, then one stage.

    Three warpgroups where the longest blocks fit and waves of tiles take less time so, else two: heads of 64 took 0.75 of
    the time with three, in turns. One where there are 64 rows or fewer: 8 heads of one row over 8192 keys took 0.70 of the
    rounds' time (H200). Of a multistage kernel one, so that a multiprocessor has several blocks, which wait at
    barriers of their own."""
    given = mapping.blocks.get(chain.index.name)
    if chain.index.stack and given not in (None, 1):
        raise ConfigError(f"Mapping(blocks={{{chain.index.name!r}: {given}}}): {chain.index} goes along a stack, one by one")
    lengths = (1,) if chain.index.stack else (given,) if given is not None else kernel.lengths
    if not kernel.uses_tma:
        mapping = replace(mapping, warpgroups=mapping.warpgroups or mapping.blocks.get(chain.rows.name, 0) // ROWS or 1,
                          ahead=False, across=False, turns=False)
    joins = (mapping.across,) if mapping.across is not None else (True, False)
    if chain.splits > 1 and mapping.across is None:    # a share has few tiles, and rounds of 475 instructions: 496 across
        joins = (False,)
    rows = mapping.blocks.get(chain.rows.name, 0)
    if not mapping.warpgroups and rows in (ROWS, 2 * ROWS, 3 * ROWS):
        mapping = replace(mapping, warpgroups=rows // ROWS)
    if not (mapping.warpgroups or mapping.turns) and chain.rows.extent.size <= ROWS:      # a second one would have no rows
        mapping = replace(mapping, warpgroups=1)
    three = not (mapping.warpgroups or only_adds(chain) or _is_heavy(chain)) and _time(chain, 3, processors) < _time(
        chain, 2, processors)
    if three:
        for across in joins:
            yield Candidate(replace(mapping, warpgroups=3), lengths[0], bool(across))
    may_shrink = not (mapping.warpgroups or mapping.turns)
    mapping = replace(mapping, warpgroups=mapping.warpgroups or 2)
    if len(lengths) > 1 and lengths[-1] > SHORTEST:
        lengths = *lengths, SHORTEST
    fewer = [replace(mapping, warpgroups=1)] if may_shrink and mapping.warpgroups > 1 else []
    may_wait = kernel.uses_tma and not mapping.stages and not only_adds(chain)
    fewest = [replace((mapping, *fewer)[-1], stages=1)] if may_wait else []
    for smaller in (mapping, *fewer, *fewest):
        for length in lengths:
            for across in joins:
                yield Candidate(smaller, length, bool(across))


def _time(chain: Chain, warpgroups: int, processors: int) -> int:
    """Of all tiles, in rows of a tile: waves of them, of which each takes time by its rows, and as much as 256 rows take for
    the way from one product to the next. 16384 rows of an MLP are a wave with 128 rows a tile as with 192 (0.84 of it),
    65536 are four and three (1.15)."""
    count = chain.splits * (1 if chain.stack is None else chain.stack.extent.size)
    tiles = count * -(-chain.rows.extent.size // (ROWS * warpgroups))
    return -(-tiles // processors) * (ROWS * warpgroups + ON_THE_WAY)


def _is_heavy(chain: Chain) -> bool:
    """Whether rounds compute more than a softmax does, by special functions an element, or with matrices and places."""
    special = [x for x in chain.body if x.op in SPECIAL and len(x.dims) == 2]
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
            pending += x.args[1:] if x.op == "where" else x.args
    return False


def _check_names(chain: Chain, places: ChainPlaces, mapping: Mapping, kernel: Kernel) -> None:
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
    rows = ROWS * mapping.warpgroups or "64, 128 or 192"
    given = mapping.blocks.get(chain.rows.name, rows)
    if given != rows and (mapping.warpgroups or given not in (ROWS, 2 * ROWS, 3 * ROWS)):
        raise ConfigError(f"Mapping(blocks={{{chain.rows.name!r}: {mapping.blocks[chain.rows.name]}}}, "
                          f"warpgroups={mapping.warpgroups}): a warpgroup has {ROWS} rows, so {rows} are needed")
    length = mapping.blocks.get(chain.index.name, 64)
    if not chain.index.stack and (length % 16 or length > 256):
        raise ConfigError(f"Mapping(blocks={{{chain.index.name!r}: {length}}}): a multiple of 16 up to 256 is needed")
    mapping.check_arrays([block.name for ring in places.rings for block in ring.blocks])
    values = {x.name for x in chain.values} | {c.inside.name for c in chain.carried}
    for name, place in mapping.places.items():
        if name not in values:
            staged = any(block.name == name for ring in places.rings for block in ring.blocks)
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): " + (
                f"it is an operand, which {kernel.brings} to shared memory" if staged else
                f"the program's values are {', '.join(sorted(filter(None, values)))}"))


def _orders(chain: Chain, places: ChainPlaces, mapping: Mapping, may: May, length: int, across: bool) -> Choice:
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
        raise ConfigError("Mapping(turns=True, warpgroups=1): warpgroups take turns at the tensor cores; 2 or 3 are needed")
    if mapping.turns and only_adds(chain):
        raise ConfigError("Mapping(turns=True): rounds that only add have nothing to compute under another "
                          "warpgroup's products")
    if mapping.descending and not may.commute:
        raise ConfigError(f"Mapping(descending=True): the rounds of {chain.index} do not commute, so that their "
                          f"order is the "
                          "program's")
    descending = (may.commute and not chain.index.stack) if mapping.descending is None else mapping.descending
    if mapping.longest_first and not may.grow:
        raise ConfigError("Mapping(longest_first=True): tiles do not get longer with their rows; where conditions "
                          "bound places from "
                          "above by the row, and hide what changes nothing, they do")
    turns = mapping.turns
    if turns is None:
        is_long = mapping.warpgroups == 3 or not ahead or _is_heavy(chain) or bool(chain.factors) or may.grow
        turns = mapping.warpgroups > 1 and not only_adds(chain) and is_long
    longest = may.grow and chain.splits == 1 if mapping.longest_first is None else mapping.longest_first
    blocks = {chain.rows.name: ROWS * mapping.warpgroups, chain.index.name: length}
    stacks = () if chain.stack is None else (chain.stack.name,)
    blocks.update(dict.fromkeys(stacks, 1))
    return Choice(blocks, mapping.warpgroups, ahead, across and divided is None, turns, descending, longest, stacks=stacks,
                  splits=chain.splits, lazy=bool(chain.factors), anchored=bool(mapping.anchored),
                  cluster=Cluster(mapping.cluster.get(chain.rows.name, 1)))


def room_left(chain: Chain, choice: Choice, kernel: Kernel) -> int:
    """Registers of a thread beside its sums and what is handed over."""
    return kernel.room[choice.warpgroups] - _needed(chain, choice, kernel)


def _needed(chain: Chain, choice: Choice, kernel: Kernel) -> int:
    need = 0
    for x in chain.body:
        if x.op == "dot":
            n = choice.size(x.dims[1])
            if n % kernel.columns or n > 256:
                raise refused(ConfigError, f"a product has {n} columns; a multiple of {kernel.columns} up to 256 is needed",
                              x.line)
            need += n // 2
        if x.op == "handover":
            need += choice.size(x.dims[1]) // 4
    read = {(y.data[0].name, y.data[1]) for x in chain.body if x.op not in ("dot", "transpose") for y in x.args
            if y.op == "load" and len(y.dims) == 2}
    return need + READING * len(read)


def _registers(chain: Chain, choice: Choice, kernel: Kernel) -> str | None:
    """Why a thread's sums have no room."""
    need, room = _needed(chain, choice, kernel), kernel.room[choice.warpgroups]
    if need > room:
        return (f"sums and what is handed over take {need} registers of a thread, and {room} are there of "
                f"{choice.warpgroups} "
                f"warpgroups with blocks of {choice.blocks[chain.index.name]} along {chain.index}; take shorter "
                f"blocks or fewer "
                "warpgroups")
    return None


def _shapes(places: ChainPlaces, choice: Choice, chain: Chain, kernel: Kernel, mapping: Mapping) -> str | None:
    """Why blocks cannot be brought."""
    for ring in places.rings:
        for block in ring.blocks:
            lines, columns = map(choice.size, block.dims)
            if columns % kernel.line or lines % 8:
                why = (f"multiples of 8 rows and of {kernel.line} columns are needed ({2 * kernel.line} bytes, the "
                       "swizzle's line)")
                return str(refused(ConfigError, f"blocks of {block.name} are {lines} x {columns}: {why}", chain.line))
            parts = choice.cluster.m if choice.is_shared(block, chain.rows) else 1
            if columns // kernel.line % parts and lines % (8 * parts):
                return (f"Mapping(cluster={dict(mapping.cluster)!r}): {parts} blocks bring a part each of {block.name}'s "
                        f"blocks of {lines} x {columns}: columns of {kernel.line * parts} or lines of {8 * parts} are "
                        f"needed; take other blocks along {chain.index}")
            brought = lines if columns // kernel.line % parts == 0 else lines // parts
            if kernel.uses_tma and brought > MOST_LINES:
                return str(refused(ConfigError, f"blocks of {block.name} are {lines} x {columns}: TMA brings {MOST_LINES} "
                                                "lines at most", chain.line))
    return None


def _memory(places: ChainPlaces, mapping: Mapping, choice: Choice, outs: dict[str, np.dtype], room: Room,
            chain: Chain) -> str | None:
    """Lay out shared memory; why it does not fit."""
    bound, share, kernel = room
    choice.stages.clear()
    lags = only_adds(chain) or not kernel.uses_tma
    least = {ring: 2 if (ring.index is None and choice.across) or (ring.index is not None and lags) else 1
             for ring in places.rings}
    given = {ring: mapping.stages_of([block.name for block in ring.blocks]) for ring in places.rings}
    for ring in places.rings:
        if isinstance(mapping.stages, int) and ring.index is None:
            given[ring] = 0                            # a number is of the rings that rounds go around
        choice.stages[ring] = given[ring] or max(least[ring], 2 if ring.index is not None else 1)
        if choice.stages[ring] < least[ring]:
            return (f"Mapping(stages=...): {ring.name} has {choice.stages[ring]} stage, and {least[ring]} are needed: "
                    + ("the next tile's comes while this one's is read (across)" if ring.index is None else
                       "products are waited for one round later" if kernel.uses_tma else
                       "a stage is filled while another is read"))
    if not kernel.uses_tma:
        _check_stages(places, choice, given)
    out_bytes = {name: choice.blocks[chain.rows.name] * dtype.itemsize * _columns(chain, name, choice)
                 for name, dtype in outs.items()}

    def needed() -> int:
        return (sum(out_bytes.values()) + PATTERN
                + sum(n * (choice.stage_bytes(ring) + kernel.barriers) for ring, n in choice.stages.items()))

    if not mapping.stages:                             # what is left goes to the rings that rounds go around
        rounds = [ring for ring in places.rings if ring.index is not None]
        while rounds and all(choice.stages[r] < MOST[choice.warpgroups] for r in rounds):
            if needed() + sum(choice.stage_bytes(r) + kernel.barriers for r in rounds) > min(bound, share):
                break
            for ring in rounds:
                choice.stages[ring] += 1
    memory = SharedMemory()
    for ring in places.rings:
        first = memory.take(choice.stages[ring] * choice.stage_bytes(ring), PATTERN)
        for block in ring.blocks:
            choice.offsets[block], first = first, first + choice.block_bytes(block)
    choice.outs = {name: memory.take(nbytes, PATTERN) for name, nbytes in out_bytes.items()}
    choice.barriers = {ring: memory.take(kernel.barriers * choice.stages[ring]) for ring in places.rings}
    choice.nbytes = memory.nbytes
    if memory.nbytes > bound:
        stages = ", ".join(f"{ring.name} {n} x {choice.stage_bytes(ring)}" for ring, n in choice.stages.items())
        return (f"stages ({stages}) and results of {sum(out_bytes.values())} bytes need {memory.nbytes} bytes of "
                f"shared memory, and "
                f"{bound} are there; take fewer stages or smaller blocks")
    return None


def _check_stages(places: ChainPlaces, choice: Choice, given: dict[RingPlace, int]) -> None:
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


def _columns(chain: Chain, name: str, choice: Choice) -> int:
    store = next(store for store in chain.stores if store.parameter.name == name)
    return int(store.parameter.shape[-1])
