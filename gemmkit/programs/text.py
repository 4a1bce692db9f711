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
from gemmkit.programs.places import Multiply, Places, RowSum, TilePlace
from gemmkit.programs.trace import Store

__all__ = ["OWN_NAMES", "OWN_STARTS", "Out", "OutKind", "Printed", "text_of"]

REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}      # of a thread that produces, and of one that consumes
IMPORTS = [
    ("dataclasses", "dataclass", ()), ("gemmkit.components", "Component", ()), ("gemmkit.components", "Scalar", ()),
    ("gemmkit.kernels.attention.elements", "column_at", ("column_at",)),
    ("gemmkit.kernels.common.cluster", "Cluster", ("cluster",)),
    *(("gemmkit.kernels.common.pipeline", name, (name,)) for name in ("CLUSTER", "CLUSTER_WARPS")),
    ("gemmkit.kernels.common.pipeline", "Pipeline", ()), ("gemmkit.kernels.common.pipeline", "WARPS", ("WARPS",)),
    ("gemmkit.kernels.common.work", "Slot", ()), ("gemmkit.kernels.sm90.store", "own_column", ("column", "own_column")),
    ("gemmkit.kernels.sm90.store", "own_row", ("row",)), ("gemmkit.kernels.sm90.warpgroups", "Warpgroups", ()),
    ("gemmkit.lang.control", "interleave", ("interleave",)), ("gemmkit.lang.control", "split", ("interleave",)),
    ("gemmkit.lang.registers", "apply", ("apply",)),
    ("gemmkit.programs.chains.collectives", "row_value", ("row_value",)),
    *(("gemmkit.programs.collectives", name, (name,)) for name in ("DirectOut",)),
    ("gemmkit.programs.collectives", "Part", ()), ("gemmkit.programs.collectives", "Product", ()),
    *(("gemmkit.programs.collectives", name, (name,)) for name in ("RowSums", "RowsOut")),
    ("gemmkit.programs.collectives", "Staged", ()), ("gemmkit.programs.collectives", "TmaOut", ("TmaOut",)),
    ("gemmkit.programs.collectives", "blocks", ()), ("gemmkit.programs.collectives", "row_of", ("row_of",)),
    *(("gemmkit.programs.columns", name, (name,)) for name in ("ColumnSums", "Columns", "ColumnsOut")),
    *(("gemmkit.ptx.approximate", name, (name,)) for name in ("exp2", "log2", "reciprocal")),
    *(("gemmkit.ptx.cluster", name, ("cluster",)) for name in ("cluster_barrier", "cluster_rank")),
    ("gemmkit.ptx.mbarrier", "mbarrier_fence_init", ()), ("gemmkit.ptx.special", "barrier", ("barrier",)),
    *(("gemmkit.ptx.special", name, ()) for name in ("block_x", "grid_x", "rolled", "thread_index", "udiv",
                                                 "uniform")),
    *(("gemmkit.ptx.wgmma", name, ()) for name in ("wgmma_commit", "wgmma_fence", "wgmma_wait")),
]
#: What a text calls its own things: arrays, cells and indices of programs are called otherwise.
OWN_NAMES = frozenset({name for _, name, _ in IMPORTS} | {
    "SHARED_BYTES", "Sizes", "WARPGROUPS", "abs", "before", "cluster", "column", "consume", "group", "kernel", "math", "max",
    "min", "place", "produce", "rank", "ring", "row", "rows", "sizes", "slot", "tile", "tiles", "values", "zero"})
OWN_STARTS = ("at_", "before_", "make_", "ring_", "slot_", "out_", "map_", "rows_of_", "columns_of_", "element_of_", "last_",
              "value_", KEPT)


@dataclass(eq=False)
class Out:
    """A result: how it leaves, and the function of its elements (None: the sums as they are)."""

    store: Store
    dtype: np.dtype
    kind: str                          # the collective's name
    pairs: bool
    function: Function | None
    sums: str                          # what is stored where there is no function

    @property
    def name(self) -> str:
        return self.store.parameter.name


@dataclass(frozen=True)
class OutKind:
    """How a result leaves: the collective's name, and what it is made for."""

    kind: str
    dtype: np.dtype
    pairs: bool
    columns: int


@dataclass(frozen=True)
class Printed:
    """The text; the names of its kernel's arguments behind the sizes: operands' maps, results, arrays that threads read."""

    text: str
    maps: tuple[str, ...]
    outs: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: tuple[str, ...]
    tile: tuple[str, ...]              # those of the sizes that tiles go along
    scalars: tuple[str, ...]
    threads: int


@dataclass
class Printer:
    places: Places
    loops: list[Ordered]
    memory: Allocation
    outs: list[Out]
    warpgroups: int
    lines: list[str] = field(default_factory=list)

    def put(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line if line else "" for line in lines]

    # -- names --------------------------------------------------------------------------------------------------------

    def ring(self, ring: Ring) -> str:
        return "ring" if len(self.memory.rings) == 1 else f"ring_{ring.rounds.index.name}"

    def slot(self, ring: Ring) -> str:
        return "slot" if len(self.memory.rings) == 1 else f"slot_{ring.rounds.index.name}"

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

    def each(self, count: str) -> str:
        """Of blocks: of clusters."""
        return count if self.cluster.is_single else f"udiv({count}, {self.cluster.size})"

    def begin(self) -> list[str]:
        """A block's first tile."""
        rank = [] if self.cluster.is_single else ["rank = cluster_rank()"]
        return [*rank, f"tile = {self.each('block_x()')}", "while tile < tiles(sizes):",
                f"    {self.place} = place(tile, {'' if self.cluster.is_single else 'rank, '}sizes)"]

    def corners(self, size: dict[str, int]) -> tuple[str, str]:
        """A tile's first row and column: blocks of a cluster are neighbours."""
        (m, n), cluster = (index.name for index in self.places.indices), self.cluster
        row = f" + cluster.row(rank) * {size[m]}" if cluster.shares_b else ""
        column = f" + cluster.column(rank) * {size[n]}" if cluster.shares_a else ""
        outer = "outer" if self.places.stack is None else f"(outer - {self.places.stack.name} * rows)"
        return (f"{outer} * {size[m] * cluster.m}{row}", f"(tile - outer * inner) * {size[n] * cluster.n}{column}")

    # -- constants ----------------------------------------------------------------------------------------------------

    def constants(self) -> None:
        size, (m, n) = self.memory.blocks, self.places.indices
        few, many = REGISTERS[self.warpgroups]
        self.put(0, f"WARPGROUPS = Warpgroups(1, {self.warpgroups}, {few}, {many})", f"SHARED_BYTES = {self.memory.nbytes}",
                 *([] if self.cluster.is_single else [f"cluster = Cluster(m={self.cluster.m}, n={self.cluster.n})"]))
        for ring in self.memory.rings:
            for tile in ring.rounds.tiles:
                self.put(0, f"{tile.name}_tile = Staged({np.dtype(tile.parameter.dtype).name!r}, "
                            f"lines={size[tile.dims[0].name]}, columns={size[tile.dims[1].name]}, "
                            f"offset={ring.offsets[tile.name]}, stage_bytes={ring.stage_bytes}"
                            + ("" if tile.stack is None else ", stacked=True")
                            + (f", cluster=cluster, peers={self.peers(tile)!r})" if self.peers(tile) else ")"))
            readers, arrivals = self.readers(ring)
            self.put(0, f"{self.ring(ring)} = Pipeline(stages={ring.stages}, offset={ring.barriers}, full_arrivals=1, "
                        f"empty_arrivals={arrivals}{f', readers={readers}' if readers else ''}"
                        f"{', cluster=cluster)' if self.cluster.shares else ')'}")
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
                    self.put(0, f"{self.product(product)} = Product({product.a.name}_tile, {product.b.name}_tile{how})")
        for name, offset in self.memory.columns.items():
            self.put(0, f"{KEPT}{name} = Columns({self.columns_of(name)}, offset={offset})")
        stacked = "" if self.places.stack is None else ", stacked=True"
        for out in self.outs:
            made = f"DirectOut({out.dtype.name!r}, pairs={out.pairs}{stacked})"
            if out.kind == "RowsOut":
                made = f"RowsOut({out.dtype.name!r}{stacked})"
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

    # -- the producer -------------------------------------------------------------------------------------------------

    def produce(self, tiles: list[TilePlace]) -> None:
        maps = ", ".join(f"map_{name}" for name in _names(tiles))
        self.put(0, f"def produce(sizes, {maps}):", '    """1. Blocks of the operands: global -> shared."""')
        self.put(1, "zero = thread_index() * 0",
                 *(f"{self.slot(ring)} = Slot(zero, zero + 1)          # fresh rings are empty"
                   for ring in self.memory.rings),
                 *self.begin())
        for ring in self.memory.rings:
            k, name, slot = ring.rounds.index.name, self.ring(ring), self.slot(ring)
            self.put(2, f"{k} = 0 * tile", f"while {k} < sizes.{k}:")
            self.put(3, f"{name}.acquire({slot})", f"{name}.expect({slot}, {ring.stage_bytes})",
                     *(f"{tile.name}_tile.load{'_part' if self.peers(tile) else ''}(map_{tile.parameter.name}, "
                       f"({self.corner(tile)}), {name}, {slot}{', rank)' if self.peers(tile) else ')'}"
                       for tile in ring.rounds.tiles),
                     f"{slot} = {name}.advance({slot})", f"{k} = rolled({k} + {self.memory.blocks[k]})")
        self.put(2, f"tile = rolled(tile + {self.each('grid_x()')})")

    # -- the consumers ------------------------------------------------------------------------------------------------

    def consume(self, arguments: list[str]) -> None:
        self.put(0, f"def consume({', '.join(['sizes', *arguments, 'group'])}):",
                 '    """2. Products of stages, added up. 3. What becomes of the sums: registers -> global."""')
        self.put(1, "zero = thread_index() * 0", *(f"{self.slot(ring)} = Slot(zero, zero)" for ring in self.memory.rings),
                 *self.begin())
        first = {name: next(p for r in self.memory.rings for p in r.rounds.products
                            if self.places.cells[p.carried.after] == name) for name in self.places.starts}
        for name, value in self.places.starts.items():
            self.put(2, f"{name} = {self.product(first[name])}.begin({value!r})")
        row_sums = [x for ring in self.memory.rings for x in ring.rounds.row_sums]
        for name, value in self.places.row_starts.items():
            self.put(2, f"{name} = {self.rows_of(name, row_sums)}.begin({value!r})")
        for name, value in self.places.column_starts.items():
            self.put(2, f"{name} = {self.columns_of(name)}.begin({value!r})")
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
        for name in self.places.row_starts:
            self.put(2, f"{name} = {self.rows_of(name, row_sums)}.whole({name})")
        for name in self.places.column_starts:
            self.put(2, f"{KEPT}{name}.put({self.columns_of(name)}.whole({name}), group)")
        for out in self.outs:
            self.put(2, *self.stored(out))
        self.put(2, f"tile = rolled(tile + {self.each('grid_x()')})")
        self.put(1, *(f"out_{out.name}.finish()" for out in self.outs))

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
                for row_sum in event.row_sums:
                    cell = self.places.rows[row_sum.carried.after]
                    self.put(depth, f"{cell} = rows_of_{row_sum.a.name}.add({cell}, {slot}, group)")
                for column_sum in event.column_sums:
                    cell = self.places.columns[column_sum.carried.after]
                    self.put(depth, f"{cell} = columns_of_{column_sum.b.name}.add({cell}, {slot}, group)")
            elif isinstance(event, Wait):
                held = f"({', '.join(sums)}{',' if len(sums) == 1 else ''})"
                self.put(depth, f"{held if len(sums) == 1 else held[1:-1]} = wgmma_wait({event.pending}, {held})")
            elif isinstance(event, Release):
                self.put(depth, f"{name}.release(before.stage)")
            else:
                assert isinstance(event, Fill)                 # the producer's

    def stored(self, out: Out) -> list[str]:
        (m, n), made = (index.name for index in self.places.indices), out.function
        held = (f"{KEPT}{{}}.own()" if out.kind == "ColumnsOut" else "{}").format
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
        column = f"{n} + thread_index() - 128" if kind == "ColumnsOut" else f"{n} + own_column()"
        here = {"row": f"{m} + group * 64 + own_row()", "column": column, f"last_{m}": f"sizes.{m} - 1",
                f"last_{n}": f"sizes.{n} - 1", **{name: f"sizes.{name}" for name in made.scalars}}
        return [here.get(name, name) for name in made.parameters]


def _names(tiles: list[TilePlace]) -> list[str]:
    return list(dict.fromkeys(tile.parameter.name for tile in tiles))


def text_of(title: str, places: Places, loops: list[Ordered], memory: Allocation, outs: list[Out],
            warpgroups: int) -> Printed:
    """Print a kernel."""
    printer = Printer(places, loops, memory, outs, warpgroups)
    (m, n), size = (index.name for index in places.indices), memory.blocks
    tiles = [tile for ring in memory.rings for tile in ring.rounds.tiles]
    functions = [out.function for out in outs if out.function is not None]
    maps, names = _names(tiles), [out.name for out in outs]
    arrays = list(dict.fromkeys(name for made in functions for name in made.arrays))
    scalars = list(dict.fromkeys(name for made in functions for name in made.scalars))
    stack = None if places.stack is None else places.stack.name
    tile = (m, n) if stack is None else (m, n, stack)
    sizes = list(dict.fromkeys([*tile, *(ring.rounds.index.name for ring in memory.rings)]))
    operands = [f"map_{name}" for name in maps]
    uses = {out.kind for out in outs} | ({"RowSums"} if places.row_starts else set())
    uses |= {"ColumnSums", "Columns"} if places.column_starts else set()
    uses |= {"barrier" if memory.cluster.is_single else "cluster", *(printer.readers(ring)[0] for ring in memory.rings)}
    for made in functions:
        uses |= {"apply", *(["interleave"] if len(made.sums) > 1 else []), *made.needs, *made.parameters}
    printer.put(0, f'"""{title}"""', "", *(["import math"] if "math" in uses else []))
    imports: dict[str, list[str]] = {}
    for module, name, wanted in IMPORTS:
        if not wanted or set(wanted) & uses:
            imports.setdefault(module, []).append(name)
    printer.put(0, *(f"from {module} import {', '.join(given)}" for module, given in imports.items()), "")
    printer.constants()
    printer.put(0, "", "", "@dataclass(frozen=True)", "class Sizes(Component):",
                *(f"    {x}: Scalar" for x in (*sizes, *scalars)))
    met = "barrier()" if memory.cluster.is_single else "cluster_barrier()"
    printer.put(0, "", "", f"def kernel({', '.join(['sizes', *operands, *names, *arrays])}):")
    printer.put(1, "group = uniform(udiv(thread_index(), 128))", "if thread_index() == 0:",
                *(f"    {printer.ring(ring)}.initialise()" for ring in memory.rings), "    mbarrier_fence_init()",
                met, "if group == 0:", "    WARPGROUPS.give_registers()", "    if thread_index() == 0:",
                f"        produce({', '.join(['sizes', *operands])})", "else:", "    WARPGROUPS.take_registers()",
                f"    consume({', '.join(['sizes', *names, *arrays, 'group - 1'])})",
                *([] if memory.cluster.is_single else [f"{met}        # a peer may still arrive at this block's barriers"]))
    outer, inner = (f"blocks(sizes.{index}, {size[index] * count})"
                    for index, count in ((m, memory.cluster.m), (n, memory.cluster.n)))
    row, column = printer.corners(size)
    printer.put(0, "", "", "def tiles(sizes):",
                f"    return {'' if stack is None else f'sizes.{stack} * '}{outer} * {inner}",
                "", "", f"def place(tile, {'' if memory.cluster.is_single else 'rank, '}sizes):",
                f'    """The tile\'s first row and column: tiles go along {n} first."""',
                f"    inner = {inner}", "    outer = udiv(tile, inner)",
                *([f"    return {row}, {column}"] if stack is None else
                  [f"    rows = {outer}", f"    {stack} = udiv(outer, rows)",
                   f"    return {stack}, {row}, {column}"]), "", "")
    printer.produce(tiles)
    printer.put(0, "", "")
    printer.consume([*names, *arrays])
    for made in functions:
        printer.put(0, "", "", *made.text.split("\n"))
    return Printed("\n".join(printer.lines) + "\n", tuple(maps), tuple(names), tuple(arrays), tuple(sizes),
                   tile, tuple(scalars),
                   128 * (1 + warpgroups))
