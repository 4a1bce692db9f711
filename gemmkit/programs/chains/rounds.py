"""Rounds and tiles as text, for either role: what the scheduler has ordered, around the loops that it is ordered for."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmkit.programs.chains.allocate import Choice
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.order import Event, Full, Ordered
from gemmkit.programs.chains.places import Block, ChainPlaces, RingPlace
from gemmkit.programs.chains.ranges import Ranges
from gemmkit.programs.printed import of_blocks
from gemmkit.programs.values import Axis, Index

PRODUCER, CONSUMER = "producer", "consumer"


@dataclass
class Role:
    """What both roles print: tiles, ranges of rounds, loops. A subclass prints events and the ends of tiles."""

    chain: Chain
    places: ChainPlaces
    choice: Choice
    order: Ordered
    ranges: Ranges
    has_tests: bool
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    before: bool = False               # the end of a tile that another one has begun beside

    kind = PRODUCER

    def put(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line if line else "" for line in lines]

    # -- names --------------------------------------------------------------------------------------------------------

    @property
    def n(self) -> str:
        return self.chain.index.name

    @property
    def step(self) -> int:
        return self.choice.blocks[self.n]

    @property
    def tile(self) -> str:
        return ", ".join(index.name for index in self.chain.indices)

    def of_tile(self, index: Index) -> str:
        """Where the tile is that is spoken of."""
        return f"before_{index.name}" if self.before and index in self.chain.indices else index.name

    @property
    def outer(self) -> str:
        """Which share of which of the stack a tile is of, where shares are."""
        return f"{self.n}_outer"

    @property
    def forward(self) -> str:
        return "-" if self.choice.descending else "+"

    @property
    def next_tile(self) -> str:
        if self.choice.longest_first:
            return "tile = rolled(following(tile))"
        return f"tile = rolled(tile + {of_blocks('grid_x()', self.choice.cluster)})"

    # -- a subclass's -------------------------------------------------------------------------------------------------

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        raise NotImplementedError

    def begin_tile(self, joined: bool) -> None:
        """Cells and what all rounds take."""

    def before_loops(self) -> None:
        """Behind the first round of a tile that is not joined to the one before."""

    def end_rounds(self) -> None:
        """Behind a tile's last round."""

    def finish_tile(self) -> None:
        """Its results."""

    def kept(self) -> list[str]:
        """What the end of a tile needs when the next one has begun."""
        return []

    def begin_again(self) -> None:
        """Cells that the end of the last tile has read."""

    # -- ranges -------------------------------------------------------------------------------------------------------

    @property
    def is_bounded(self) -> bool:
        return self.ranges.visits_less and bool(self.ranges.begins or self.ranges.ends)

    @property
    def first(self) -> str:
        return f"{self.n}_first" if self.chain.splits > 1 or (self.is_bounded and self.ranges.begins) else "0"

    @property
    def end(self) -> str:
        return f"{self.n}_end" if self.has_end else f"sizes.{self.n}"

    @property
    def has_end(self) -> bool:
        """Whether tiles end where the array does not."""
        return self.chain.has_length or (self.is_bounded and bool(self.ranges.ends))

    def range(self) -> None:
        """Where a tile's rounds begin."""
        n, step, uniform, length = self.n, self.step, self.kind == CONSUMER, self.chain.length
        row, more = self.chain.rows.name, ", ".join([*([self.chain.stop] if self.chain.has_length else []), "sizes"])
        visited = row if self.choice.cluster.is_single else f"{row} - rank * {self.choice.rows}"     # a cluster's first row

        def put(name: str, made: str) -> None:
            self.put(f"{name} = uniform({made})" if uniform else f"{name} = {made}")

        if length is not None:
            parameter, key = length.data
            put(self.chain.stop, f"min(int({parameter.name}[{', '.join(index.name for index in key)}]), sizes.{n})")
        elif self.chain.has_length:
            self.put(f"{self.chain.stop} = sizes.{n}")
        if self.is_bounded:
            for name, function, bounds in ((self.first, "first_seen", self.ranges.begins),
                                           (self.end, "end_seen", self.ranges.ends)):
                if bounds:                             # the assembler does not see that loops over them are uniform
                    put(name, f"{function}({visited}, {more})")
        begins = self.is_bounded and bool(self.ranges.begins)
        if self.chain.has_length and not (self.is_bounded and self.ranges.ends):
            self.put(f"{self.end} = max({self.chain.stop}, {f'{self.first} + 1' if begins else '1'})")
        if self.chain.splits > 1:
            of_tile, each, stop = f" - {self.first}" if begins else "", f"{n}_each", self.chain.stop
            self.put(f"{each} = blocks(blocks({self.end}{of_tile}, {step}), {self.chain.splits}) * {step}")
            put(self.first, f"{f'{self.first} + ' if begins else ''}{n}_share * {each}")
            put(self.end, f"max(min({self.end}, {self.first} + {each}), {self.first} + 1)")
            put(stop, f"{stop} if {self.first} < {stop} else 0")
        if uniform and self.ranges.has_tests and self.ranges.has_free:
            for name, function, bounds in ((f"{n}_free", "free_from", self.ranges.begins),
                                           (f"{n}_tested", "free_to", self.ranges.ends)):
                if bounds:
                    put(name, f"{function}({row}, {more})")
        begins = self.first != "0"
        if self.choice.descending:
            count = f"(blocks({self.end}{f' - {self.first}' if begins else ''}, {step}) - 1) * {step}"
            self.put(f"{n} = {self.first} + {count}" if begins else f"{n} = {count}")
        else:
            self.put(f"{n} = {self.first if begins else '0 * tile'}")

    def loops(self) -> None:
        """A tile's rounds but the first ones: those with tests, and the others."""
        n, step, ranges = self.n, self.step, self.ranges
        tests = self.kind == CONSUMER and self.has_tests
        free_end = f"{n}_tested" if ranges.ends else self.chain.stop
        if self.choice.descending:
            if tests and ranges.has_free:
                if ranges.ends or not self.order.before:
                    self.loop(f"{n} >= {self.first} and {n} + {step} > {free_end}", True)
                if ranges.begins:
                    self.loop(f"{n} >= {self.first} and {n} >= {n}_free", False)
                    self.loop(f"{n} >= {self.first}", True)
                    return
            self.loop(f"{n} >= {self.first}", tests and not ranges.has_free)
            return
        if tests and ranges.has_free:
            if ranges.begins:
                self.loop(f"{n} < {self.end} and {n} < {n}_free", True)
            bound = f"{n} < {self.end} and " if self.chain.splits > 1 else ""
            self.loop(f"{bound}{n} + {step} <= {free_end}", False)
        self.loop(f"{n} < {self.end}", tests)

    def loop(self, condition: str, guarded: bool) -> None:
        self.put(f"while {condition}:")
        self.depth += 1
        self.events(self.order.round, guarded)
        self.advance_round()
        self.depth -= 1

    def advance_round(self) -> None:
        moved = f"{self.n} {self.forward} {self.step}"
        self.put(f"{self.n} = rolled({moved})" if self.kind == PRODUCER else f"{self.n} {self.forward}= {self.step}")

    # -- tiles --------------------------------------------------------------------------------------------------------

    def tiles(self) -> None:
        if not self.choice.cluster.is_single:
            self.put("rank = cluster_rank()")
        self.put(f"tile = {of_blocks('block_x()', self.choice.cluster)}")
        if self.order.join:
            self._joined_tiles()
            return
        self.put("while tile < tiles(sizes):")
        self.depth += 1
        self.begin(False)
        if self.order.before:
            self.events(self.order.before, True)
            self.advance_round()
            self.before_loops()
        self.loops()
        self.end_rounds()
        self.events(self.order.after, False)
        self.finish_tile()
        self.put(self.next_tile)
        self.depth -= 1

    def _joined_tiles(self) -> None:
        """Rounds run on: the end of a tile is beside the beginning of the next."""
        self.begin(False)                              # every block has a tile
        self.events(self.order.before, True)
        self.advance_round()
        self.put("while tile < tiles(sizes):")
        self.depth += 1
        self.loops()
        self.end_rounds()
        self.put(self.next_tile, "if tile < tiles(sizes):")
        self.depth += 1
        outer = [self.outer] if self.chain.splits > 1 else []
        kept = [*outer, *(index.name for index in self.chain.indices), *self.kept()]
        self.put(f"{', '.join(f'before_{name}' for name in kept)} = {', '.join(kept)}")
        self.begin(True)
        self.events(self.order.join, True, joined=True)
        self.before = True
        self.finish_tile()
        self.before = False
        self.begin_again()
        self.advance_round()
        self.depth -= 1
        self.put("else:")
        self.depth += 1
        self.events(self.order.after, False)
        self.finish_tile()
        self.depth -= 2

    def begin(self, joined: bool) -> None:
        chain, given = self.chain, "tile, sizes" if self.choice.cluster.is_single else "tile, rank, sizes"
        if chain.splits == 1:
            self.put(f"{self.tile} = place({given})")
        else:
            which = f"udiv({self.outer}, {chain.splits})"
            self.put(f"{self.outer}, {chain.rows.name} = place({given})")
            self.put(f"{self.n}_share = {self.outer} - {which} * {chain.splits}")
            if chain.stack is not None:
                self.put(f"{chain.stack.name} = {which}")
        self.begin_tile(joined)
        self.range()


@dataclass
class Producer(Role):
    """One thread has TMA fill stages, in the order in which consumers take them."""

    def begin_tile(self, joined: bool) -> None:
        for ring in self.places.lone():
            self.fill(ring, "", False)

    def kept(self) -> list[str]:
        return [self.n]

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        for event in part:
            if isinstance(event, Full):
                ring = event.ring
                late = bool(self.order.late) and all(
                    d in self.order.late for (d, _), block in self.places.blocks.items() if block.ring is ring)
                back = "+" if self.choice.descending else "-"
                at = f"{'before_' if joined else ''}{self.n} {back} {self.step}" if late else self.n
                self.fill(ring, at, late and joined)

    def fill(self, ring: RingPlace, at: str, of_last: bool) -> None:
        name = ring.name
        self.put(f"ring_{name}.acquire(at_{name})", f"ring_{name}.expect(at_{name}, {self.choice.stage_bytes(ring)})")
        for block in ring.blocks:
            part, rank = ("_part", ", rank") if self.choice.is_shared(block, self.chain.rows) else ("", "")
            self.put(f"{block.name}_tile.load{part}(map_{block.name}, ({self.corner(block, at, of_last)}), "
                     f"ring_{name}, at_{name}{rank})")
        self.put(f"at_{name} = ring_{name}.advance(at_{name})")

    def corner(self, block: Block, at: str, of_last: bool) -> str:
        """Where a block begins, as TMA counts: the contiguous axis first."""
        def place(dim: Index | Axis) -> str:
            if isinstance(dim, Axis):
                return "0"
            if dim is self.chain.index:
                return at
            return f"before_{dim.name}" if of_last else dim.name

        stack = [] if block.stack is None else [place(block.stack)]
        return ", ".join([place(block.dims[1]), place(block.dims[0]), *stack])
