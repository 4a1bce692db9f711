"""Tiles of whole rows as the text of a multistage kernel: a block has a tile, and all threads do all of it.

Products are done where they stand, so that a round is what the program says, in the scheduler's order, without waits. Its
blocks are copied together: they are a group, and all rings go around at once. What all rounds of a tile take is copied with
the first round's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmkit.programs.chains.consumer import Consumer
from gemmkit.programs.chains.order import Compute, Event, Start
from gemmkit.programs.chains.places import Block
from gemmkit.programs.chains.text import IMPORTS, ChainPrinter, scalar_lines
from gemmkit.programs.multistage.text import HOPPERS, OWN_NAMES, Copies
from gemmkit.programs.values import Axis, Index


@dataclass
class MultistageConsumer(Consumer):
    """All of a kernel's threads."""

    # -- copies -------------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        """That rounds take."""
        return [block for ring in self.places.rings if ring.index is not None for block in ring.blocks]

    @property
    def ahead(self) -> int:
        """Rounds that copies are ahead."""
        return max(n for ring, n in self.choice.stages.items() if ring.index is not None) - 1

    @property
    def given(self) -> list[str]:
        """What copies of a round's blocks need, before the round and the stage: operands, and where the tile is."""
        used = {dim for block in self.blocks for dim in (*block.key, *block.dims)}
        return ["sizes", *dict.fromkeys(block.parameter.name for block in self.blocks),
                *(index.name for index in self.chain.indices if index in used)]

    def copied(self, block: Block, slot: str) -> str:
        """A line that copies a block: where it begins, and where the array ends."""
        def begin(dim: Index | Axis) -> str:
            return "0" if isinstance(dim, Axis) else dim.name

        def end(dim: Index | Axis) -> str:
            return f"{dim.size}" if isinstance(dim, Axis) else f"sizes.{dim.name}"

        stack = [] if block.stack is None else [begin(block.stack)]
        return (f"{block.name}_tile.copy({block.parameter.name}, ({', '.join([*stack, *map(begin, block.dims)])}), "
                f"({', '.join(map(end, block.dims))}), {slot})")

    def copy_round(self, distance: str, slot: str) -> None:
        """The copies of the round that is so far ahead, if there is one, are a group."""
        at = f"{self.n} {self.forward} {distance}"
        bound = f">= {self.first}" if self.choice.descending else f"< {self.end}"
        self.put(f"if {at} {bound}:", f"    copy_blocks({', '.join([*self.given, at, slot])})", "ring.commit()")

    # -- events -------------------------------------------------------------------------------------------------------

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        if not part:
            return
        self.rare = {}
        self.put("ring.wait()")
        self.copy_round(f"{self.ahead * self.step}", "before")
        for event in part:
            if isinstance(event, Compute):
                self.compute_all(event.values, guarded)
            elif isinstance(event, Start):
                self.start(event, False)
        self.move(part)
        self.put("before, slot = slot, ring.advance(slot)")

    def start(self, event: Start, is_first: bool) -> None:
        for d in event.products:
            name, product, a = self.name(d), self.product(d), self.places.blocks.get((d, 0))
            sums = f"{product}.begin(0.0)" if len(d.args) < 3 else self.name(d.args[2])
            b = self.slot(self.places.blocks[d, 1])
            if a is None:
                self.put(f"{name} = {product}.multiply({sums}, {self.name(d.args[0])}, {b})")
            elif self.slot(a) == b:
                self.put(f"{name} = {product}.multiply({sums}, {b}, group)")
            else:
                self.put(f"{name} = {product}.multiply_apart({sums}, {self.slot(a)}, {b}, group)")

    def slot(self, block: Block) -> str:
        return "of_tile" if block.ring.index is None else "slot"

    # -- the tile -----------------------------------------------------------------------------------------------------

    def tiles(self) -> None:
        self.put("tile = block_x()")
        self.begin(False)
        for ring in self.places.lone():
            self.put(*(self.copied(block, "of_tile") for block in ring.blocks))
        self.put(f"for stage in range({self.ahead}):")
        self.depth += 1
        self.copy_round(f"stage * {self.step}", "Slot(zero + stage, zero)")
        self.depth -= 1
        self.put(f"before, slot = Slot(zero + {self.ahead}, zero), Slot(zero, zero)")
        if self.order.before:
            self.events(self.order.before, True)
            self.advance_round()
        self.loops()
        self.finish_tile()

    def begin_tile(self, joined: bool) -> None:
        self.begin_least()
        for c in self.chain.carried:
            if c.init.op == "const":
                self.fill(c)


@dataclass
class MultistageChainPrinter(ChainPrinter):
    """``copies``: by the names of the operands."""

    copies: dict[str, Copies] = field(default_factory=dict)

    imports = sorted([*(each for each in IMPORTS if each[0] not in HOPPERS
                        and each[1] not in ("HandedProduct", "Product", "Staged", "TmaOut", "Turns", "grid_x")),
                      *(("gemmkit.programs.multistage.collectives", name)
                        for name in ("Copied", "CopyRing", "HandedMmaProduct", "MmaProduct"))])
    own_names = OWN_NAMES | {"HandedMmaProduct", "of_tile"}
    consumer_class = MultistageConsumer
    product_classes = "MmaProduct", "HandedMmaProduct"
    has_next = False

    @property
    def threads(self) -> int:
        return 128 * self.choice.warpgroups

    def roles(self) -> list[str]:
        return [f"WARPGROUPS = Warpgroups(0, {self.choice.warpgroups})", f"SHARED_BYTES = {self.choice.nbytes}"]

    def staged(self, block: Block) -> str:
        return self.tile_of("Copied", block, f", threads={self.threads}{self.copies[block.parameter.name].said}") + ")"

    def pipelines(self) -> list[str]:
        return [f"ring = CopyRing(stages={max(self.choice.stages.values())})"]

    def arguments(self, read: list[str]) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        blocks, _, outs, others = super().arguments(read)
        operands = list(dict.fromkeys(array for _, array in blocks))
        return [], operands, outs, [name for name in others if name not in operands]

    def kernel(self, arguments: list[str], consumer: Consumer) -> list[str]:
        assert isinstance(consumer, MultistageConsumer)
        return [f"def kernel({', '.join(['sizes', *arguments])}):",
                '    """1. Blocks of the operands: global -> shared, ahead of the round. 2. Products, and what becomes of',
                '    them in the registers. 3. The end of the tile: registers -> global."""',
                "    group, zero, column = uniform(udiv(thread_index(), 128)), thread_index() * 0, own_column()",
                *(["    of_tile = Slot(zero, zero)"] if self.places.lone() else []), *scalar_lines(consumer),
                *consumer.lines, "", "", *self.tile_functions(),
                f"def copy_blocks({', '.join([*consumer.given, consumer.n, 'slot'])}):",
                '    """Blocks of a round on their way: global -> shared."""',
                *(f"    {consumer.copied(block, 'slot')}" for block in consumer.blocks)]
