"""The kernel as text in gemmkit's dialect: a module whose collectives are constants at its top, as one would write it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gemmkit.kernels.common.cluster import Cluster
from gemmkit.programs.allocate import Allocation, Ring
from gemmkit.programs.collectives import COLUMN, ROW
from gemmkit.programs.expressions import KEPT, Function
from gemmkit.programs.order import Await, Event, Fill, Ordered, Read, Release, Start, Wait
from gemmkit.programs.own_names import IMPORTS
from gemmkit.programs.places import Multiply, Places, RowSum, TilePlace
from gemmkit.programs.printed import EARLY, Out, Printed, of_blocks

REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}      # of a thread that produces, and of one that consumes


@dataclass
class Printer:
    """Of a warp-specialised kernel. A subclass prints another: what it is made of, roles, waits and releases."""

    places: Places
    loops: list[Ordered]
    memory: Allocation
    outs: list[Out]
    warpgroups: int
    lines: list[str] = field(default_factory=list)

    imports = IMPORTS

    def put(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line if line else "" for line in lines]

    # -- names --------------------------------------------------------------------------------------------------------

    def ring(self, ring: Ring) -> str:
        return "ring" if self.memory.one_ring else f"ring_{ring.rounds.index.name}"

    @property
    def distinct(self) -> tuple[Ring, ...]:
        """Of loops that go around one ring the first one's."""
        return self.memory.rings[:1] if self.memory.one_ring else self.memory.rings

    def slot(self, ring: Ring) -> str:
        return "slot" if self.memory.one_ring else f"slot_{ring.rounds.index.name}"

    def product(self, product: Multiply) -> str:
        return f"{product.a.name}_by_{product.b.name}"

    def rows_of(self, name: str, row_sums: list[RowSum]) -> str:
        """The collective of a cell of rows' sums."""
        return f"rows_of_{next(x.a.name for x in row_sums if self.places.rows[x.carried.after] == name)}"

    def columns_of(self, name: str) -> str:
        """The same of a cell of columns' sums."""
        return f"columns_of_{self.places.column_sums(name)[0].b.name}"

    # -- clusters -----------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        return self.memory.cluster

    def peers(self, tile: TilePlace) -> str:
        """Which blocks of a cluster have the same block of an operand: A's is that of a row of tiles. Empty: none have."""
        if self.places.indices[0] in tile.dims:
            return ROW if self.cluster.shares_a else ""
        return COLUMN if self.cluster.shares_b else ""

    def readers(self, ring: Ring) -> tuple[str, int]:
        """Who releases a stage, and how many arrivals empty it: all that read what a block brings."""
        by_warps = ring.rounds.is_read_by_threads
        names = ("CLUSTER", "CLUSTER_WARPS") if self.cluster.shares else ("", "WARPS")
        return names[by_warps], (4 if by_warps else 1) * self.warpgroups * self.cluster.readers

    def begin(self) -> list[str]:
        """A block's first tile."""
        rank = [] if self.cluster.is_single else ["rank = cluster_rank()"]
        return [*rank, f"tile = {of_blocks('block_x()', self.cluster)}", "while tile < tiles(sizes):",
                f"    {self.place} = place(tile, {'' if self.cluster.is_single else 'rank, '}sizes)"]

    def corners(self, size: dict[str, int]) -> tuple[str, str]:
        """A tile's first row and column: blocks of a cluster are neighbours."""
        (m, n), cluster = (index.name for index in self.places.indices), self.cluster
        row = f" + cluster.row(rank) * {size[m]}" if cluster.shares_b else ""
        column = f" + cluster.column(rank) * {size[n]}" if cluster.shares_a else ""
        return f"row * {size[m] * cluster.m}{row}", f"column * {size[n] * cluster.n}{column}"

    # -- constants ----------------------------------------------------------------------------------------------------

    product_class = "Product"

    @property
    def product_fields(self) -> str:
        """Of the constants of products, behind their operands."""
        return ""

    def roles(self) -> list[str]:
        """The constants of the module that say who does what."""
        few, many = REGISTERS[self.warpgroups]
        return [f"WARPGROUPS = Warpgroups(1, {self.warpgroups}, {few}, {many})", f"SHARED_BYTES = {self.memory.nbytes}",
                *([] if self.cluster.is_single else [f"cluster = Cluster(m={self.cluster.m}, n={self.cluster.n})"])]

    def tile_of(self, kind: str, tile: TilePlace, ring: Ring, more: str = "") -> str:
        """The constant of a block."""
        size = self.memory.blocks
        return (f"{tile.name}_tile = {kind}({np.dtype(tile.parameter.dtype).name!r}, "
                f"lines={size[tile.dims[0].name]}, columns={size[tile.dims[1].name]}, "
                f"offset={ring.offsets[tile.name]}, stage_bytes={ring.stage_bytes}{more}"
                + ("" if tile.stack is None else ", stacked=True"))

    def staged(self, tile: TilePlace, ring: Ring) -> str:
        return self.tile_of("Staged", tile, ring) + (
            f", cluster=cluster, peers={self.peers(tile)!r})" if self.peers(tile) else ")")

    def pipeline(self, ring: Ring) -> str:
        readers, arrivals = self.readers(ring)
        return (f"{self.ring(ring)} = Pipeline(stages={ring.stages}, offset={ring.barriers}, full_arrivals=1, "
                f"empty_arrivals={arrivals}{f', readers={readers}' if readers else ''}"
                f"{', cluster=cluster)' if self.cluster.shares else ')'}")

    def constants(self) -> None:
        size, (m, n) = self.memory.blocks, self.places.indices
        self.put(0, *self.roles(), f"order = Grouped({self.memory.band})")
        for ring in self.memory.rings:
            self.put(0, *(self.staged(tile, ring) for tile in ring.rounds.tiles),
                     *([self.pipeline(ring)] if ring in self.distinct else []))
            for name in dict.fromkeys(row_sum.a.name for row_sum in ring.rounds.row_sums):
                self.put(0, f"rows_of_{name} = RowSums({name}_tile)")
            for name, transposed in {x.b.name: x.transposed for x in ring.rounds.column_sums}.items():
                self.put(0, f"columns_of_{name} = ColumnSums({name}_tile, consumers={self.warpgroups}"
                            f"{', transposed=True)' if transposed else ')'}")
            said = set()
            for product in ring.rounds.products:
                if self.product(product) not in said:
                    said.add(self.product(product))
                    how = "".join(f", {name}_transposed=True" for name in "ab" if getattr(product, f"{name}_transposed"))
                    self.put(0, f"{self.product(product)} = {self.product_class}({product.a.name}_tile, "
                                f"{product.b.name}_tile{how}{self.product_fields})")
        for name, offset in self.memory.columns.items():
            self.put(0, f"{KEPT}{name} = Columns({self.columns_of(name)}, offset={offset})")
        stacked = "" if self.places.stack is None else ", stacked=True"
        for out in self.outs:
            made = f"DirectOut({out.dtype.name!r}, pairs={out.pairs}{stacked})"
            if out.kind in ("RowsOut", "OctetOut"):
                made = f"{out.kind}({out.dtype.name!r}{', clipped=True' if out.kind == 'OctetOut' else ''}{stacked})"
            elif out.kind == "ColumnsOut":
                made = (f"ColumnsOut({out.dtype.name!r}, columns={size[n.name]}, threads={128 * self.warpgroups}"
                        f"{stacked})")
            elif out.kind == "TmaOut":
                made = (f"TmaOut({out.dtype.name!r}, block_m={size[m.name]}, columns={size[n.name]}, "
                        f"o_offset={self.memory.outs[out.name]}{stacked})")
            self.put(0, f"out_{out.name} = {made}")

    @property
    def place(self) -> str:
        """What a tile is: the matrix of a stack, first row, first column."""
        stack = [] if self.places.stack is None else [self.places.stack.name]
        return ", ".join([*stack, *(index.name for index in self.places.indices)])

    def corner(self, tile: TilePlace) -> str:
        """Where a block begins, as TMA counts: the contiguous axis first."""
        return ", ".join([tile.dims[1].name, tile.dims[0].name, *([tile.stack.name] if tile.stack is not None else [])])

    # -- the kernel ---------------------------------------------------------------------------------------------------

    @property
    def met(self) -> str:
        """What it takes for all threads to meet, as imports say."""
        return "barrier" if self.cluster.is_single else "cluster"

    @property
    def tiles(self) -> list[TilePlace]:
        return [tile for ring in self.memory.rings for tile in ring.rounds.tiles]

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    def arguments(self) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        """Blocks that TMA brings and their arrays, operands that threads copy, results, arrays that threads read."""
        functions = [out.function for out in self.outs if out.function is not None]
        return ([(tile.name, tile.parameter.name) for tile in self.tiles], [], [out.name for out in self.outs],
                list(dict.fromkeys(name for made in functions for name in made.arrays)))

    def kernel(self) -> None:
        maps, _, names, arrays = self.arguments()
        operands = [f"map_{block}" for block, _ in maps]
        met = "barrier()" if self.cluster.is_single else "cluster_barrier()"
        self.put(0, "", "", f"def kernel({', '.join(['sizes', *operands, *names, *arrays])}):")
        self.put(1, "group = uniform(udiv(thread_index(), 128))", "if thread_index() == 0:",
                 *(f"    {self.ring(ring)}.initialise()" for ring in self.distinct), "    mbarrier_fence_init()",
                 met, *EARLY, "if group == 0:", "    WARPGROUPS.give_registers()", "    if thread_index() == 0:",
                 f"        produce({', '.join(['sizes', *operands])})", "else:", "    WARPGROUPS.take_registers()",
                 f"    consume({', '.join(['sizes', *names, *arrays, 'group - 1'])})",
                 *([] if self.cluster.is_single else [f"{met}        # a peer may still arrive at this block's barriers"]))

    def parts(self) -> None:
        """What the kernel calls."""
        _, _, names, arrays = self.arguments()
        self.produce(self.tiles)
        self.put(0, "", "")
        self.consume([*names, *arrays])

    # -- the producer -------------------------------------------------------------------------------------------------

    def produce(self, tiles: list[TilePlace]) -> None:
        maps = ", ".join(f"map_{tile.name}" for tile in tiles)
        self.put(0, f"def produce(sizes, {maps}):", '    """1. Blocks of the operands: global -> shared."""')
        self.put(1, "zero = thread_index() * 0",
                 *(f"{self.slot(ring)} = Slot(zero, zero + 1)          # fresh rings are empty" for ring in self.distinct),
                 *self.begin())
        for ring in self.memory.rings:
            k, name, slot = ring.rounds.index.name, self.ring(ring), self.slot(ring)
            self.put(2, f"{k} = 0 * tile", f"while {k} < sizes.{k}:")
            self.put(3, f"{name}.acquire({slot})", f"{name}.expect({slot}, {ring.filled})",
                     *(f"{tile.name}_tile.load{'_part' if self.peers(tile) else ''}(map_{tile.name}, "
                       f"({self.corner(tile)}), {name}, {slot}{', rank)' if self.peers(tile) else ')'}"
                       for tile in ring.rounds.tiles),
                     f"{slot} = {name}.advance({slot})", f"{k} = rolled({k} + {self.memory.blocks[k]})")
        self.put(2, f"tile = rolled(tile + {of_blocks('grid_x()', self.cluster)})")

    # -- the consumers ------------------------------------------------------------------------------------------------

    def consume(self, arguments: list[str]) -> None:
        self.put(0, f"def consume({', '.join(['sizes', *arguments, 'group'])}):",
                 '    """2. Products of stages, added up. 3. What becomes of the sums: registers -> global."""')
        self.put(1, "zero = thread_index() * 0", *(f"{self.slot(ring)} = Slot(zero, zero)" for ring in self.distinct),
                 *self.begin())
        self.begin_cells(2)
        for ring, loop in zip(self.memory.rings, self.loops):
            k = ring.rounds.index.name
            step = f"{k} = rolled({k} + {self.memory.blocks[k]})"
            self.put(2, f"{k} = {self.memory.blocks[k]} + 0 * tile")
            self.events(2, ring, loop.before)
            self.put(2, f"before, {self.slot(ring)} = {self.slot(ring)}, {self.ring(ring)}.advance({self.slot(ring)})",
                     f"while {k} < sizes.{k}:")
            self.events(3, ring, loop.round)
            self.put(3, f"before, {self.slot(ring)} = {self.slot(ring)}, {self.ring(ring)}.advance({self.slot(ring)})", step)
            self.events(2, ring, loop.after)
        self.finish(2)
        self.put(2, f"tile = rolled(tile + {of_blocks('grid_x()', self.cluster)})")
        self.put(1, *(f"out_{out.name}.finish()" for out in self.outs))

    @property
    def row_sums(self) -> list[RowSum]:
        return [x for ring in self.memory.rings for x in ring.rounds.row_sums]

    def begin_cells(self, depth: int) -> None:
        """What a tile's cells begin with."""
        first = {name: next(p for r in self.memory.rings for p in r.rounds.products
                            if self.places.cells[p.carried.after] == name) for name in self.places.starts}
        for name, value in self.places.starts.items():
            self.put(depth, f"{name} = {self.product(first[name])}.begin({value!r})")
        for name, value in self.places.row_starts.items():
            self.put(depth, f"{name} = {self.rows_of(name, self.row_sums)}.begin({value!r})")
        for name, value in self.places.column_starts.items():
            self.put(depth, f"{name} = {self.columns_of(name)}.begin({value!r})")

    def finish(self, depth: int) -> None:
        """What becomes of a tile's sums."""
        for name in self.places.row_starts:
            self.put(depth, f"{name} = {self.rows_of(name, self.row_sums)}.whole({name})")
        for name in self.places.column_starts:
            self.put(depth, f"{KEPT}{name}.put({self.columns_of(name)}.whole({name}), group)")
        for out in self.outs:
            self.put(depth, *self.stored(out))

    def events(self, depth: int, ring: Ring, events: Iterable[Event]) -> None:
        name, slot = self.ring(ring), self.slot(ring)
        sums = list(dict.fromkeys(self.places.cells[p.carried.after] for p in ring.rounds.products))
        for event in events:
            if isinstance(event, Await):
                self.put(depth, f"{name}.wait({slot})")
            elif isinstance(event, Start):
                self.put(depth, "wgmma_fence()")
                for product in event.products:
                    cell = self.places.cells[product.carried.after]
                    self.put(depth, f"{cell} = {self.product(product)}.multiply({cell}, {slot}, group, "
                                    f"{int(product not in event.fresh)})")
                self.put(depth, "wgmma_commit()")
            elif isinstance(event, Read):
                self.read(depth, ring, event)
            elif isinstance(event, Wait):
                held = f"({', '.join(sums)}{',' if len(sums) == 1 else ''})"
                self.put(depth, f"{held if len(sums) == 1 else held[1:-1]} = wgmma_wait({event.pending}, {held})")
            elif isinstance(event, Release):
                self.put(depth, f"{name}.release(before.stage)")
            else:
                assert isinstance(event, Fill)                 # the producer's

    def read(self, depth: int, ring: Ring, event: Read) -> None:
        for row_sum in event.row_sums:
            cell = self.places.rows[row_sum.carried.after]
            self.put(depth, f"{cell} = rows_of_{row_sum.a.name}.add({cell}, {self.slot(ring)}, group)")
        for column_sum in event.column_sums:
            cell = self.places.columns[column_sum.carried.after]
            self.put(depth, f"{cell} = columns_of_{column_sum.b.name}.add({cell}, {self.slot(ring)}, group)")

    def stored(self, out: Out) -> list[str]:
        (m, n), made = (index.name for index in self.places.indices), out.function
        held = (f"{KEPT}{{}}.own(group)" if out.kind == "ColumnsOut" else "{}").format
        values = held(out.sums)
        lines = []
        if made is not None:
            given = ", ".join(["", *self.given(made, out.kind)])
            if len(made.sums) > 1:
                values = f"split(interleave(({', '.join(map(held, made.sums))})), {len(made.sums)})"
            lines = [f"values = apply({made.name}, {values}{given})"]
            values = "values"
        stack = "0" if self.places.stack is None else self.places.stack.name
        part = f"Part({m} + group * 64, {n}, sizes.{m}, sizes.{n}, {stack})"
        lines.append(f"out_{out.name}.store({values}, {out.name}, {part}, group)")
        once = {"RowsOut": n, "ColumnsOut": m}.get(out.kind)
        return lines if once is None else [f"if {once} == 0:", *(f"    {line}" for line in lines)]

    def given(self, made: Function, kind: str) -> list[str]:
        """What a function is given behind the sums."""
        m, n = (index.name for index in self.places.indices)
        column = f"{n} + group * 128 + thread_index() % 128" if kind == "ColumnsOut" else f"{n} + own_column()"
        here = {"row": f"{m} + group * 64 + own_row()", "column": column, f"last_{m}": f"sizes.{m} - 1",
                f"last_{n}": f"sizes.{n} - 1", **{name: f"sizes.{name}" for name in made.scalars}}
        return [here.get(name, name) for name in made.parameters]


def printed(printer: Printer, title: str) -> Printed:
    """Print a kernel."""
    places, memory, outs = printer.places, printer.memory, printer.outs
    (m, n), size = (index.name for index in places.indices), memory.blocks
    functions = [out.function for out in outs if out.function is not None]
    scalars = list(dict.fromkeys(name for made in functions for name in made.scalars))
    stack = None if places.stack is None else places.stack.name
    tile = (m, n) if stack is None else (m, n, stack)
    sizes = list(dict.fromkeys([*tile, *(ring.rounds.index.name for ring in memory.rings)]))
    uses = {out.kind for out in outs} | ({"RowSums"} if places.row_starts else set())
    uses |= {"ColumnSums", "Columns"} if places.column_starts else set()
    uses |= {printer.met, *(printer.readers(ring)[0] for ring in memory.rings)}
    for made in functions:
        uses |= {"apply", *(["interleave"] if len(made.sums) > 1 else []), *made.needs, *made.parameters}
    printer.put(0, f'"""{title}"""', "", *(["import math"] if "math" in uses else []))
    imports: dict[str, list[str]] = {}
    for module, name, wanted in printer.imports:
        if not wanted or set(wanted) & uses:
            imports.setdefault(module, []).append(name)
    printer.put(0, *(f"from {module} import {', '.join(given)}" for module, given in imports.items()), "")
    printer.constants()
    printer.put(0, "", "", "@dataclass(frozen=True)", "class Sizes(Component):",
                *(f"    {x}: Scalar" for x in (*sizes, *scalars)))
    printer.kernel()
    outer, inner = (f"blocks(sizes.{index}, {size[index] * count})"
                    for index, count in ((m, memory.cluster.m), (n, memory.cluster.n)))
    row, column = printer.corners(size)
    tile_of_one = "tile" if stack is None else f"tile - {stack} * rows * {inner}"
    printer.put(0, "", "", "def tiles(sizes):",
                f"    return {'' if stack is None else f'sizes.{stack} * '}{outer} * {inner}",
                "", "", f"def place(tile, {'' if memory.cluster.is_single else 'rank, '}sizes):",
                f'    """The tile\'s first row and column: bands of tile rows go along {n}, column by column."""',
                f"    rows = {outer}", *([] if stack is None else [f"    {stack} = udiv(tile, rows * {inner})"]),
                f"    row, column = order.block({tile_of_one}, rows, {inner})",
                f"    return {'' if stack is None else f'{stack}, '}{row}, {column}", "", "")
    printer.parts()
    for made in functions:
        printer.put(0, "", "", *made.text.split("\n"))
    maps, operands, names, arrays = printer.arguments()
    return Printed("\n".join(printer.lines) + "\n", tuple(maps), tuple(names), tuple(arrays), tuple(sizes),
                   tile, tuple(scalars), printer.threads, tuple(operands))
