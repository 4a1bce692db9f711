"""Tiles of rows and columns as the text of a multistage kernel: a block has a tile, and all threads do all of it.

A round waits for its stage, starts the copies of the round that is ``stages - 1`` ahead, into the stage that the round
before has read, and multiplies.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import FragmentReuse
from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.kernels.sm90.store import in_lines
from gemmkit.lang.aggregates import fill
from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import apply, fold, generate, join, split
from gemmkit.operators import MMAOp
from gemmkit.programs.chains.chain import OperandBlock
from gemmkit.programs.chains.elements import given_to_pages
from gemmkit.programs.chains.schedule import ChainStart, Compute, Event, Full
from gemmkit.programs.chains.text import IMPORTS as CHAIN_IMPORTS
from gemmkit.programs.chains.text import ChainPrinter, Consumer, scalar_lines
from gemmkit.programs.collectives import ROWS, STEP, HandedOperand, PanelTile, StagedOperand, in_steps
from gemmkit.programs.mapping import KernelLimits
from gemmkit.programs.places import Read, Ring, TilePlace, walked
from gemmkit.programs.text import IMPORTS, Printer, listed
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Axis, Index
from gemmkit.ptx.copy_async import commit_copies, copy_async, copy_async_clipped, offset_of, wait_copies
from gemmkit.ptx.memory import load_shared, shared, unpack_words
from gemmkit.ptx.mma import FragmentMap, fragment_coordinate, ldmatrix
from gemmkit.ptx.registers import pinned, shared_place
from gemmkit.ptx.special import barrier, lane_index, rolled, thread_index, udiv
from gemmkit.runtime.array_info import ArrayInfo

HOPPERS = frozenset((                  # names of the texts of warp-specialised kernels
    "CLUSTER", "CLUSTER_WARPS", "Cluster", "Pipeline", "WARPS", "cluster_barrier", "cluster_rank", "grid_launch_dependents",
    "grid_wait", "mbarrier_fence_init", "wgmma_commit", "wgmma_fence", "wgmma_wait"))
#: Of a multiprocessor; of a thread beside its sums: of rounds, of each product more, of an end that reads matrices, of 8-bit
#: floats, which Hopper makes float16 of for mma.sync.
REGISTERS, OTHERS, EACH, READING, CONVERTED = 65536, 64, 8, 96, 64
#: What a text calls its own things, beside `gemmkit.programs.text.OWN_NAMES`.
OWN_NAMES = frozenset({"CopiedTile", "CopyRing", "MmaProduct", "OctetOut", "RESIDENT", "copy_blocks", "finish", "stage"})


class CopyWidth(NamedTuple):
    """How threads copy an operand: elements at a time, and whether rows may end within them."""

    vector: int
    clipped: bool

    @classmethod
    def of(cls, kernel: KernelLimits, info: ArrayInfo) -> CopyWidth:
        vector = kernel.vector(info)
        return cls(vector, info.shape[-1] % vector != 0)

    @property
    def said(self) -> str:
        """As fields of the collective, where they are not its defaults."""
        return (f", vector={self.vector}" if self.vector != 8 else "") + (", clipped=True" if self.clipped else "")


@dataclasses.dataclass
class MultistagePrinter(Printer):
    """``copies``: by the names of the operands."""

    copies: dict[str, CopyWidth] = field(default_factory=dict)

    product_class, met = "MmaProduct", ""
    imports = sorted([*(each for each in IMPORTS if each[1] not in HOPPERS
                        and each[1] not in ("Product", "StagedTile", "TmaOut", "grid_x")),
                      *(("gemmkit.programs.multistage", name, ())
                        for name in ("CopiedTile", "CopyRing", "MmaProduct"))],
                     key=lambda each: each[0])

    @property
    def row_parts(self) -> int:
        """Of 64 rows each, that a warpgroup has."""
        return self.memory.blocks[self.places.indices[0].name] // (ROWS * self.warpgroups)

    @property
    def product_fields(self) -> str:
        return "" if self.row_parts == 1 else f", parts={self.row_parts}"

    # -- constants ----------------------------------------------------------------------------------------------------

    def roles(self) -> list[str]:
        columns = self.memory.blocks[self.places.indices[1].name]
        need = OTHERS + len(self.places.starts) * self.row_parts * columns // 2
        need += EACH * (max(len(ring.rounds.products) for ring in self.memory.rings) - 1)
        if any(x.op == "load" and len(x.dims) == 2 for x in walked([out.store.value for out in self.outs])):
            need += READING
        if any(ring.rounds.promotes for ring in self.memory.rings):
            need += CONVERTED
        resident = max(1, REGISTERS // (self.threads * need))
        return [f"WARPGROUPS = Warpgroups(0, {self.warpgroups})", f"SHARED_BYTES = {self.memory.nbytes}",
                f"RESIDENT = {resident}          # blocks of a multiprocessor that there are to be registers for"]

    def staged(self, tile: TilePlace, ring: Ring) -> str:
        return self.tile_of("CopiedTile", tile, ring,
                            f", threads={self.threads}{self.copies[tile.parameter.name].said}") + ")"

    def pipeline(self, ring: Ring) -> str:
        return f"{self.ring(ring)} = CopyRing(stages={ring.stages})"

    # -- the kernel ---------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    def arguments(self) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        blocks, _, names, arrays = super().arguments()
        operands = list(dict.fromkeys(array for _, array in blocks))
        return [], operands, names, [name for name in arrays if name not in operands]

    def copy_blocks(self, ring: Ring) -> str:
        return "copy_blocks" if len(self.memory.rings) == 1 else f"copy_blocks_{ring.rounds.index.name}"

    def operands(self, ring: Ring) -> list[str]:
        return list(dict.fromkeys(tile.parameter.name for tile in ring.rounds.tiles))

    def kernel(self) -> None:
        _, operands, names, arrays = self.arguments()
        self.put(0, "", "", f"def kernel({', '.join(['sizes', *operands, *names, *arrays])}):")
        self.put(1, '"""1. Blocks of the operands: global -> shared, ahead of the round. 2. Products of stages, added up.',
                 '3. What becomes of the sums: registers -> global."""',
                 "group, zero = uniform(udiv(thread_index(), 128)), thread_index() * 0",
                 f"{self.place} = place(block_x(), sizes)")
        self.begin_cells(1)
        for ring in self.memory.rings:
            self.rounds(ring)
        if self.row_parts == 1:
            self.finish(1)
            return
        for n in range(self.row_parts):
            sums = [f"{self.product_of(cell)}.part({cell}, {n})" for cell in self.places.starts]
            *stack, m, column = self.place.split(", ")
            tile = *stack, f"{m} + {n * ROWS * self.warpgroups}" if n else m, column
            self.put(1, f"finish({', '.join(['sizes', *names, *self.read_by_threads, *tile, 'group', *sums])})")

    @property
    def read_by_threads(self) -> list[str]:
        """At a tile's end: operands among them."""
        return super().arguments()[3]

    def product_of(self, cell: str) -> str:
        """One that adds to a cell."""
        return next(self.product(p) for ring in self.memory.rings for p in ring.rounds.products
                    if self.places.cells[p.carried.after] == cell)

    def rounds(self, ring: Ring) -> None:
        """A loop, behind the copies of its first rounds."""
        k, name, slot, ahead = ring.rounds.index.name, self.ring(ring), self.slot(ring), ring.stages - 1
        step = self.memory.blocks[k]
        self.put(1, f"for stage in range({ahead}):")
        self.copy(2, ring, f"stage * {step}", "Slot(zero + stage, zero)")
        self.put(1, f"{k}, before, {slot} = zero, Slot(zero + {ahead}, zero), Slot(zero, zero)", f"while {k} < sizes.{k}:",
                 f"    {name}.wait()")
        self.copy(2, ring, f"{k} + {ahead * step}", "before")
        for product in ring.rounds.products:
            cell = self.places.cells[product.carried.after]
            self.put(2, f"{cell} = {self.product(product)}.multiply({cell}, {slot}, group)")
        self.read(2, ring, Read(tuple(ring.rounds.row_sums), tuple(ring.rounds.column_sums)))
        self.put(2, f"before, {slot} = {slot}, {name}.advance({slot})", f"{k} = rolled({k} + {step})")

    def copy(self, depth: int, ring: Ring, at: str, slot: str) -> None:
        """The copies of a round, if there is one, are a group."""
        tile = self.place.replace(" ", "").split(",")
        given = ", ".join(["sizes", *self.operands(ring), *tile, at, slot])
        self.put(depth, f"if {at} < sizes.{ring.rounds.index.name}:", f"    {self.copy_blocks(ring)}({given})",
                 f"{self.ring(ring)}.commit()")

    def parts(self) -> None:
        if self.row_parts > 1:
            names = [out.name for out in self.outs]
            given = ", ".join(["sizes", *names, *self.read_by_threads, self.place, "group", *self.places.starts])
            self.put(0, f"def finish({given}):",
                     '    """What becomes of the sums of 64 rows of each warpgroup: registers -> global."""')
            self.finish(1)
            self.put(0, "", "")
        for n, ring in enumerate(self.memory.rings):
            k = ring.rounds.index.name
            given = ", ".join(["sizes", *self.operands(ring), self.place, k, "slot"])
            self.put(0, *(["", ""] if n else []), f"def {self.copy_blocks(ring)}({given}):",
                     f'    """Blocks of a round {"along " + k + " " if len(self.memory.rings) > 1 else ""}on their way: '
                     'global -> shared."""')
            for tile in ring.rounds.tiles:
                where = [index.name for index in tile.dims]
                stacks = [stack.text() for stack in tile.stacks]
                self.put(1, f"{tile.name}_tile.copy({tile.parameter.name}, ({', '.join([*stacks, *where])}), "
                            f"({', '.join(f'sizes.{x}' for x in where)}), slot)")


# --------------------------------------------------------------------------------------------------
# Tiles of whole rows as the text of a multistage kernel: a block has a tile, and all threads do all of it.
#
# Products are done where they stand, so that a round is what the program says, in the scheduler's order, without waits.
# Its blocks are copied together: they are a group, and all rings go around at once. What all rounds of a tile take is
# copied with the first round's.

@dataclasses.dataclass
class MultistageConsumer(Consumer):
    """All of a kernel's threads."""

    # -- copies -------------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[OperandBlock]:
        """That rounds take."""
        return [block for ring in self.places.rings if ring.index is not None for block in ring.blocks]

    @property
    def ahead(self) -> int:
        """Rounds that copies are ahead."""
        return max(n for ring, n in self.choice.stages.items() if ring.index is not None) - 1

    @property
    def given(self) -> list[str]:
        """What copies of a round's blocks need, before the round and the stage: operands, and where the tile is."""
        used = {dim.of_loop if isinstance(dim, Index) else dim for block in self.blocks for dim in (*block.key, *block.dims)}
        cut = [index for index in (self.chain.rows, self.chain.index) if index in used and index.piece is not None]
        table, line = self.chain.index.extent.table, self.chain.index.line
        if table is not None and line is not None:
            used.add(line.of_loop)
        return ["sizes", *dict.fromkeys(block.parameter.name for block in self.blocks),
                *(index.name for index in self.chain.indices if index in used), *(f"{index.name}_origin" for index in cut),
                *([] if table is None else [table.name, *([self.chain.stop] if self.chain.has_length else [])])]

    def copied(self, block: OperandBlock, slot: str, first: int = 0) -> str:
        """A line that copies a block: where it begins, and where the array ends. ``first``: of a product in parts."""
        def begin(dim: Index | Axis) -> str:
            if isinstance(dim, Axis):
                return f"{block.begin(dim, first)}"
            return dim.name if dim.piece is None else f"{dim.name}_origin + {dim.name}"

        def end(dim: Index | Axis) -> str:
            return f"{block.length(dim)}" if isinstance(dim, Axis) else f"sizes.{dim.name}"

        if block.paged is not None:
            own = [stack.text(begin) for stack in block.stacks if stack.base is not block.paged]
            return (f"{block.name}_tile.copy_pages({block.parameter.name}, ({listed([*own, begin(block.dims[1])])}), "
                    f"{end(block.dims[1])}, {given_to_pages(self.chain, block, begin, self.n, self.chain.stop)}, {slot})")
        stacks = [stack.text(begin) for stack in block.stacks]
        return (f"{block.name}_tile.copy({block.parameter.name}, ({', '.join([*stacks, *map(begin, block.dims)])}), "
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
            elif isinstance(event, ChainStart):
                self.start(event, False)
        self.move(part)
        self.put("before, slot = slot, ring.advance(slot)")

    def start(self, event: ChainStart, is_first: bool) -> None:
        for d in event.products:
            name, product, a = self.name(d), self.product(d), self.places.blocks.get((d, 0))
            sums = f"{product}.begin(0.0)" if len(d.args) < 3 else self.name(d.args[2])
            b, group = self.slot(self.places.blocks[d, 1]), self.chain.group_of(d)
            if a is None:
                half, given = ("_half", ", group") if self.chain.half_of(d.dims[1]) else ("", "")
                self.put(f"{name} = {product}.multiply{half}({sums}, {self.name(d.args[0])}{given}, {b})")
            elif self.chain.half_of(d.dims[1]) or self.slot(a) != b:
                how = "half" if self.chain.half_of(d.dims[1]) else "apart"
                self.put(f"{name} = {product}.multiply_{how}({sums}, {self.slot(a)}, {b}, {group})")
            else:
                self.put(f"{name} = {product}.multiply({sums}, {b}, {group})")

    def slot(self, block: OperandBlock) -> str:
        return "of_tile" if block.ring.index is None else "slot"

    # -- the tile -----------------------------------------------------------------------------------------------------

    def compute(self, x: Value, guarded: bool) -> None:
        """What adds an array by columns to a product is in a branch: without it the assembler loads the array beside the
        product, whose registers it then takes (16 bytes spilled at a width of 160, sm_80)."""
        begin = len(self.lines)
        super().compute(x, guarded)
        made = re.fullmatch(r"\s*(\w+) = apply\(\w+, (\w+), .*", self.lines[-1]) if len(self.lines) == begin + 1 else None
        if made is not None and self.chain.is_straight and x.op == "add" and len(x.dims) == 2:
            self.lines.pop()
            rows = self.chain.rows.name
            self.put(f"{made[1]} = {made[2]}", f"if {rows} < sizes.{rows}:", f"    {made[0].strip()}")

    def straight(self) -> None:
        """Products that go one after the other: a stage is filled for a later one when the one before has read it."""
        filled = [event for event in self.order.round if isinstance(event, Full)]
        stages, at, rows = self.ahead + 1, 0, self.chain.rows.name

        def copy(n: int) -> None:
            """The copies of the n-th stage are a group, an empty one where there is none. Without a branch around them the
            assembler mixes them with products, whose registers they then take."""
            for event in filled[n:n + 1]:
                slot = f"Slot(zero + {n % stages}, zero)"
                self.put(f"if {rows} < sizes.{rows}:",
                         *(f"    {self.copied(block, slot, event.first)}" for block in event.blocks))
            self.put("ring.commit()")

        self.put(*(self.copied(block, "of_tile") for ring in self.places.lone() for block in ring.blocks))
        for n in range(self.ahead):
            copy(n)
        for event in self.order.round:
            if isinstance(event, Full):
                self.put("ring.wait()")
                if event is not filled[-1]:
                    copy(at + self.ahead)
                self.put(f"slot = Slot(zero + {at % stages}, zero)")
                at += 1
            elif isinstance(event, Compute):
                self.compute_all(event.values, True)
            elif isinstance(event, ChainStart):
                self.start(event, False)
        self.move(self.order.round)
        self.finish_tile()

    def tiles(self) -> None:
        self.put("tile = block_x()")
        if self.chain.piece is not None:
            rows = self.chain.rows.name
            self.put(f"{', '.join(self.placed)} = place(tile, 0, sizes, {self.chain.piece.data[0].name})",
                     f"if {rows} >= 0 and {rows} < {rows}_count:       # where a piece begins in a tile, one has none")
            self.depth += 1
        self.begin(False)
        if self.chain.is_straight:
            self.straight()
            return
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
            if c.init.op == "const" and not self.chain.is_straight:
                self.fill(c)


@dataclasses.dataclass
class MultistageChainPrinter(ChainPrinter):
    """``copies``: by the names of the operands."""

    copies: dict[str, CopyWidth] = field(default_factory=dict)

    imports = sorted([*(each for each in CHAIN_IMPORTS if each[1] not in HOPPERS
                        and each[1] not in ("HandedProduct", "Product", "StagedTile", "TmaOut", "OrderBarrier", "grid_x")),
                      *(("gemmkit.programs.multistage", name)
                        for name in ("CopiedTile", "CopyRing", "HandedMmaProduct", "MmaProduct"))])
    own_names = OWN_NAMES | {"HandedMmaProduct", "of_tile"}
    consumer_class = MultistageConsumer
    product_classes = "MmaProduct", "HandedMmaProduct"
    has_next = False

    @property
    def threads(self) -> int:
        return 128 * self.choice.warpgroups

    def roles(self) -> list[str]:
        return [f"WARPGROUPS = Warpgroups(0, {self.choice.warpgroups})", f"SHARED_BYTES = {self.choice.nbytes}"]

    def staged(self, block: OperandBlock) -> str:
        return self.tile_of("CopiedTile", block, f", threads={self.threads}{self.page(block)}"
                            f"{self.copies[block.parameter.name].said}") + ")"

    def pipelines(self) -> list[str]:
        return [f"ring = CopyRing(stages={max(self.choice.stages.values())})"]

    def arguments(self, read: list[str]) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        blocks, _, outs, others = super().arguments(read)
        operands = list(dict.fromkeys(array for _, array in blocks if array not in outs))
        return [], operands, outs, [name for name in others if name not in operands]

    def kernel(self, arguments: list[str], consumer: Consumer) -> list[str]:
        assert isinstance(consumer, MultistageConsumer)
        return [f"def kernel({', '.join(['sizes', *arguments])}):",
                '    """1. Blocks of the operands: global -> shared, ahead of the round. 2. Products, and what becomes of',
                '    them in the registers. 3. The end of the tile: registers -> global."""',
                "    group, zero, column = uniform(udiv(thread_index(), 128)), thread_index() * 0, own_column()",
                *(["    of_tile = Slot(zero, zero)"] if self.places.lone() else []), *scalar_lines(consumer),
                *consumer.lines, "", "", *self.tile_functions(consumer)[:-2 if self.chain.is_straight else None],
                *([] if self.chain.is_straight else self.copying(consumer))]

    def copying(self, consumer: MultistageConsumer) -> list[str]:
        return [f"def copy_blocks({', '.join([*consumer.given, consumer.n, 'slot'])}):",
                '    """Blocks of a round on their way: global -> shared."""',
                *(f"    {consumer.copied(block, 'slot')}" for block in consumer.blocks)]


# --------------------------------------------------------------------------------------------------
# What derived kernels without wgmma call, as constants of their text: blocks that threads copy, products by mma.sync.
#
# Four warps of 16 rows are a warpgroup of 64: a thread's sums of m16n8k16 are those that it has of wgmma's m64nNk16. So
# what becomes of them is the same (`gemmkit.programs.collectives`, `gemmkit.programs.collectives`), and so are the
# blocks that lie in the stages: swizzled lines, of which ldmatrix reads eight side by side without meeting in a bank.
#
# All threads copy a part of every block, and a round's copies are a group. A thread knows that its own are done, and of
# the others' after the barrier of the block; behind the same barrier all have read the stage of the round before, which
# is filled next.

WARP_ROWS = 16                         # of a product's rows
PATTERN_LINES = 8                      # after which the swizzle begins anew


@dataclass(frozen=True)
class CopyRing(Component):
    """``stages`` that all threads fill and read: while one is read, the copies to the others are on their way."""

    stages: int

    def commit(self) -> None:
        """The copies of a round are a group, an empty one where there is no such round."""
        commit_copies()

    def wait(self) -> None:
        """The next stage is full, for all threads; and all have read the stage before."""
        wait_copies(self.stages - 2)
        barrier()

    def advance(self, slot: Slot) -> Slot:
        """The next stage."""
        if slot.stage == self.stages - 1:
            return Slot(slot.stage * 0, slot.phase)
        return Slot(slot.stage + 1, slot.phase)


@dataclass(frozen=True)
class CopiedTile(PanelTile):
    """``lines`` x ``columns`` elements of a row-major array in every stage of a ring, by panels of 64 columns (or 32); of
    one matrix where there are stacks. Panels and steps of a product's K are whole, with zeros where the array ends
    (`gemmkit.programs.collectives.StagedTile`). ``threads`` copy ``vector`` elements at a time; ``clipped`` where a row may
    end within them."""

    threads: int
    page: int = 0
    vector: int = 8
    clipped: bool = False

    @cached_property
    def vectors(self) -> int:
        """Of a line."""
        return self.line // self.vector

    @cached_property
    def all_lines(self) -> int:
        """Of all panels, which lie one behind the other."""
        return in_lines(self.columns * self.size // 2) * 2 // self.size // self.line * self.held

    @cached_property
    def at_once(self) -> int:
        """Lines that the threads copy at a time."""
        return self.threads // self.vectors

    # -- in device code: global -> shared -----------------------------------------------------------------------------

    def copy(self, array: Any, place: tuple, ends: tuple, slot: Slot) -> None:
        """Start this thread's copies of the block that begins at a place (which matrix of stacks, row, column); zeros from
        the ``ends`` of rows and columns on."""
        thread = rolled(thread_index())                # or the places of all copies stay in registers
        first = udiv(thread, self.vectors)
        column = (thread - first * self.vectors) * self.vector
        for n in range(-(-self.all_lines // self.at_once)):
            if self.all_lines % self.at_once == 0 or first + n * self.at_once < self.all_lines:
                self.copy_vector(array, place, ends, slot, first, n * self.at_once, column)

    def copy_pages(self, array: Any, place: tuple, columns: int, table: Any, line: int, first: int, end: int,
                   slot: Slot) -> None:
        """The same of rows from ``first`` on that lie in pages, which a ``line`` of the table names. Zeros from the ``end``
        on, where it is not looked up. ``place``: stacks without pages, and the column."""
        thread = rolled(thread_index())
        own = udiv(thread, self.vectors)
        column = (thread - own * self.vectors) * self.vector
        for n in range(-(-self.all_lines // self.at_once)):
            more = n * self.at_once
            if self.all_lines % self.at_once == 0 or own + more < self.all_lines:
                panel = udiv(own + more, self.held)
                row, along = first + own + more - panel * self.held, place[-1] + panel * self.line + column
                page = udiv(row, self.page)
                which = int(table[line, page]) if row < end else -1
                is_there = which >= 0 and which < array.shape[0]       # a table may name pages that are not
                source = offset_of(array, (which if is_there else 0, *place[:-1], row - page * self.page, along))
                to = self.layout.swizzle((own + more) * self.line + column) + self.begin_of(slot.stage)
                there = max(min(columns - along, self.vector), 0) if is_there else 0
                if self.clipped:
                    copy_async_clipped(shared(self.dtype, self.offset), to, 0, array, source, self.vector, there)
                else:
                    copy_async(shared(self.dtype, self.offset), to, 0, array, source, self.vector, there > 0)

    def copy_vector(self, array: Any, place: tuple, ends: tuple, slot: Slot, first: int, more: int, column: int) -> None:
        """Of line ``first + more``, ``column`` elements into it."""
        if self.held % self.at_once == 0:              # then the panel does not depend on the thread
            panel = more // self.held
            line = first + (more - panel * self.held)
        else:
            panel = udiv(first + more, self.held)
            line = first + more - panel * self.held
        row, along = place[-2] + line, place[-1] + panel * self.line + column
        source = offset_of(array, (*place[:-2], row, along))
        if self.at_once % PATTERN_LINES == 0:
            to, ahead = self.layout.swizzle(first * self.line + column), more * self.line
        else:
            to, ahead = self.layout.swizzle((first + more) * self.line + column), 0
        to += self.begin_of(slot.stage)
        if self.clipped:
            there = max(min(ends[1] - along, self.vector), 0) if row < ends[0] else 0
            copy_async_clipped(shared(self.dtype, self.offset), to, ahead, array, source, self.vector, there)
        else:
            copy_async(shared(self.dtype, self.offset), to, ahead, array, source, self.vector,
                       row < ends[0] and along < ends[1])

    # -- shared -> registers ------------------------------------------------------------------------------------------
    # ldmatrix loads four 8 x 8 matrices, of which lane t addresses line t % 8 of the (t / 8)-th.

    def upright(self, stage: int, line: int, column: int, n: int, k: int, trans: bool) -> tuple:
        """16 lines of 32 bytes, 16 x 16 elements of 16 bits, from line ``line + n`` and column ``column + k`` on, all of
        them multiples of that: the upper left 8 x 8 first, then the lower left one. ``n`` and ``k`` are known when the
        kernel is compiled."""
        lane = lane_index()
        return self.matrices(stage, line, column, n, k, lane % 16, udiv(lane, 16) * self.chunk, trans)

    def lying(self, stage: int, line: int, column: int, n: int, k: int, trans: bool) -> tuple:
        """The same, but the upper right 8 x 8 second."""
        lane = lane_index()
        return self.matrices(stage, line, column, n, k, lane % 8 + udiv(lane, 16) * 8, udiv(lane, 8) % 2 * self.chunk, trans)

    def matrices(self, stage: int, line: int, column: int, n: int, k: int, down: int, right: int, trans: bool) -> tuple:
        """Of this lane's line, ``down`` below the first and ``right`` into it."""
        panel, known = udiv(column, self.line), k // self.line
        within = column - panel * self.line + (k - known * self.line)
        at = self.layout.swizzle(down * self.line + right + within) + line * self.line
        at += panel * (self.held * self.line) + self.begin_of(stage)
        pointer = pinned(shared(self.dtype, self.offset), shared_place(self.dtype, at))
        return ldmatrix(pointer, at, known * (self.held * self.line) + n * self.line, 4, trans)

    def apart(self, fragments: FragmentMap, axis: int, stage: int, line: int, column: int) -> tuple:
        """A lane's elements of a fragment, one by one: ldmatrix turns elements of 16 bits alone. Lines are the ``axis`` of
        the fragment."""
        return generate(fragments.values, element_of, self, fragments, axis, stage, line, column)


def element_of(n: int, tile: CopiedTile, fragments: Any, axis: int, stage: int, line: int, column: int) -> Any:
    down = fragment_coordinate(fragments, lane_index(), n, axis)
    right = fragment_coordinate(fragments, lane_index(), n, 1 - axis)
    at = tile.layout.position((line + down, column + right), tile.held)
    return load_shared(shared(tile.dtype, tile.offset), tile.begin_of(stage) + at, 0, 1)[0]


class Multiplied(StagedOperand):
    """16 rows of each warp times ``b``."""

    b: CopiedTile
    first: int                         # of a's columns that a stage of b has rows for, where it is a part
    length: int

    @cached_property
    def k(self) -> int:
        return self.length or (self.b.columns if self.b_transposed else self.b.lines)

    @cached_property
    def step(self) -> int:
        """Elements of K that an instruction takes: 32 bytes."""
        return 2 * self.b.chunk

    @cached_property
    def steps(self) -> int:
        return in_steps(self.k) // self.step

    @cached_property
    def odd(self) -> int:
        """A thread's sums of half an instruction's columns, which are not there."""
        return self.columns % 16 // 2

    def whole(self, sums: tuple) -> tuple:
        """Sums of the 16 columns that an instruction has, at a time."""
        if self.odd > 0:
            return join((sums, fill(self.accumulator, self.odd, 0.0)))
        return sums

    def own(self, sums: tuple) -> tuple:
        """Those of `whole` that are columns of the product."""
        if self.odd > 0:
            return generate(self.values, lambda n: sums[n])
        return sums

    @cached_property
    def operator(self) -> MMAOp:
        """16 x 16 by 16 x 16, of elements of 16 bits."""
        return MMAOp(N=16, dtype=self.a_dtype, accumulator=self.accumulator, b_dtype=self.b.dtype)

    @cached_property
    def a_dtype(self) -> np.dtype:
        dtype: np.dtype = self.b.dtype
        return dtype

    @cached_property
    def mma(self) -> Any:
        return self.operator.instruction


@dataclass(frozen=True)
class MmaProduct(Multiplied):
    """64 rows of ``a`` times ``b``, for each warpgroup; a transposed operand lies in its stage as in its array.

    With ``parts`` a warpgroup has as many times 64 rows, and what a warp loads of B serves all: a thread's sums are those of
    16 columns of each part, then of the next 16 columns."""

    a: CopiedTile
    b: CopiedTile
    a_transposed: bool = False
    b_transposed: bool = False
    parts: int = 1
    first: int = 0
    length: int = 0
    width: int = 0

    @cached_property
    def a_dtype(self) -> np.dtype:
        return self.a.dtype

    @cached_property
    def values(self) -> int:
        return self.parts * self.columns // 2

    def part(self, sums: tuple, n: int) -> tuple:
        """The sums of the n-th part."""
        return join(apply(of_part, split(sums, 8 * self.parts), n))

    def multiply(self, sums: tuple, slot: Slot, group: int) -> tuple:
        """The sums, and on top of them the product of a stage."""
        return self.multiply_apart(sums, slot, slot, group)

    def multiply_apart(self, sums: tuple, a_slot: Slot, b_slot: Slot, group: int) -> tuple:
        """The same of operands in rings of their own."""
        return self.multiply_at(sums, a_slot, b_slot, group * ROWS, 0)

    def multiply_half(self, sums: tuple, a_slot: Slot, b_slot: Slot, group: int) -> tuple:
        """The same, where warpgroups have the same rows, and ``width`` columns each."""
        return self.multiply_at(sums, a_slot, b_slot, 0, group * self.width)

    def multiply_at(self, sums: tuple, a_slot: Slot, b_slot: Slot, row: int, column: int) -> tuple:
        row, whole = row + udiv(thread_index() % 128, 32) * WARP_ROWS, split(self.whole(sums), 8 * self.parts)
        return self.own(join(fold(self.steps, one_step, whole, self, a_slot.stage, b_slot.stage, row, column)))

    def left(self, stage: int, row: int, n: int) -> tuple:
        """A warp's rows of A, 32 bytes of each."""
        if self.a_transposed and self.a.size != 2:
            return self.a.apart(self.operator.map_a, 1, stage, n * self.step, row)
        if self.a_transposed:
            return self.a.lying(stage, 0, row, n * self.step, 0, True)
        return self.a.upright(stage, row, 0, 0, self.first + n * self.step, False)


def one_step(sums: tuple, n: int, product: Any, a_stage: int, b_stage: int, row: int, column: int) -> tuple:
    """32 bytes of K: a warp's rows of A against 16 columns at a time, from the ``column`` on."""
    a = generate(product.parts, left_of_part, product, a_stage, row, n)
    return apply(next_columns, sums, product, a, b_stage, n, column)


def left_of_part(part: int, product: Any, stage: int, row: int, n: int) -> tuple:
    """Parts of A lie one behind the other: each has 64 rows of every warpgroup."""
    return product.left(stage, row + part * (product.a.threads // 2), n)


def next_columns(sums: tuple, i: int, product: Any, a: tuple, stage: int, n: int, column: int) -> tuple:
    return join(apply(multiplied, split(sums, 8), product, a, right_of(product, stage, n, column, i)))


def right_of(product: Any, stage: int, n: int, column: int, i: int) -> tuple:
    """16 columns of B, 32 bytes of K."""
    if product.b_transposed:
        return product.b.lying(stage, 0, 0, i * 16, n * product.step, False)
    if product.b.size != 2:
        return product.b.apart(product.operator.map_b, 0, stage, n * product.step, column + i * 16)
    return product.b.upright(stage, 0, column, n * product.step, i * 16, True)


def multiplied(sums: tuple, part: int, product: Any, a: tuple, b: tuple) -> tuple:
    return product.mma(a[part], b, sums)


def of_part(sums: tuple, i: int, n: int) -> tuple:
    return split(sums, 8)[n]


@dataclass(frozen=True)
class HandedMmaProduct(HandedOperand, Multiplied):
    """The same of a stage that threads have copied."""

    @cached_property
    def reuse(self) -> FragmentReuse:
        return FragmentReuse(self.operator, self.operator, self.k)

    def multiply(self, sums: tuple, fragments: tuple, slot: Slot) -> tuple:
        """The sums, and on top of them the product with a stage."""
        return self.multiply_half(sums, fragments, 0, slot)

    def multiply_half(self, sums: tuple, fragments: tuple, group: int, slot: Slot) -> tuple:
        """The same of the ``width`` columns that a warpgroup has."""
        whole = split(self.whole(sums), 8)
        return self.own(join(fold(self.reuse.fragments, handed_step, whole, self, fragments, slot.stage,
                                  group * self.width)))


def handed_step(sums: tuple, n: int, product: Any, fragments: tuple, stage: int, column: int) -> tuple:
    a = unpack_words(product.b.dtype, fragments[n + product.first // STEP])
    return apply(next_columns, sums, product, (a,), stage, n, column)
