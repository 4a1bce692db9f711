"""Element-wise functions as text: what becomes of a thread's sums before they are stored.

A thread has the sums of two rows, 8 apart, and of pairs of columns, 8 apart; a function is told which one it has by ``i``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 by its name
import numpy as np

from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.programs.called import CALLED, EXTENT, RETURNS, START, Callee, Callees, is_whole_load
from gemmkit.programs.collectives import BY_TMA, COLUMN, ROW, ROWS_OF
from gemmkit.programs.mapping import Printed
from gemmkit.programs.places import (
    Allocation,
    Await,
    ColumnSum,
    Event,
    Fill,
    Multiply,
    Ordered,
    Out,
    Places,
    Promote,
    Read,
    Release,
    Ring,
    RowSum,
    Start,
    TilePlace,
    Wait,
)
from gemmkit.programs.trace import COMPARISONS, Value
from gemmkit.programs.values import Index, number_text, refused

SIGNS = dict(add="+", sub="-", mul="*", div="/", lt="<", le="<=", eq="==", ne="!=")
JOINTS = {"and": "{} and {}", "or": "{} or {}", "not": "not {}"}
#: What all texts write alike, without brackets.
WRITTEN = {op: f"{{}} {sign} {{}}" for op, sign in SIGNS.items()} | JOINTS | {"neg": "-{}", "where": "{1} if {0} else {2}"}
CALLS = dict(exp2="exp2", log2="log2", reciprocal="reciprocal", tanh="math.tanh", sqrt="math.sqrt", erf="math.erf",
             pow="math.pow", max="max", abs="abs")
NEEDS = dict(tanh="math", sqrt="math", erf="math", pow="math", max="", abs="")
MEETING = COMPARISONS | {"add", "sub", "mul"}                  # 16 bits and float32 are float32 in these
KEPT = "kept_"                         # a text's name of a cell of columns in shared memory begins so
BEFORE = "before_"                     # and of a result that is read before it is stored


@dataclass
class ElementFunction:
    """A function of one element: ``sums`` are zipped, ``arrays`` and ``scalars`` passed whole.

    Of a result that has a value for each row or column ``indices`` is this one's alone, and a thread's values are ``step``
    apart, from ``place`` on. An element of a tile may read what has been added up of its row and its column: ``rows``, of
    which a thread has its own, and ``columns``, which are in shared memory.
    """

    name: str
    indices: tuple
    cells: dict[Value, str]
    stacks: tuple[Index, ...] = ()
    place: str = "row"
    step: int = 8
    rows: dict[Value, str] = field(default_factory=dict)
    columns: dict[Value, str] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)
    places: set[str] = field(default_factory=set)
    updated: frozenset[str] = frozenset()                          # results that are read
    origins: list[str] = field(default_factory=list)               # where pieces begin that arrays are read in
    lines: list[str] = field(default_factory=list)
    names: dict[Value, str] = field(default_factory=dict)
    uses: dict[Value, int] = field(default_factory=dict)
    of_rows: list[str] = field(default_factory=list)
    callees: list[Callee] = field(default_factory=list)
    _stays_inside: bool = False        # whether places are those of elements that are there

    @property
    def parameters(self) -> list[str]:
        names = [index.name for index in self.indices if index.name in self.places]
        rows = [self.place, f"last_{names[0]}"] if self.indices[0].name in names else []
        columns = ["column", f"last_{names[-1]}"] if self.indices[1:] and self.indices[1].name in names else []
        stacks = [name_of_stack(stack) for stack in self.stacks if stack.name in self.places]
        called = [callee.name for callee in self.callees]
        return [*self.arrays, *called, *self.scalars, *self.of_rows, *self.origins, *rows, *columns, *stacks]

    @property
    def text(self) -> str:
        takes = self.sums[0] if len(self.sums) == 1 else "sums"
        unpack = [] if len(self.sums) == 1 else [f"    {', '.join(self.sums)} = sums"]
        return "\n".join([f"def {self.name}({', '.join([takes, 'i', *self.parameters])}):", *unpack,
                          *(f"    {line}" for line in self.lines)])

    # -- expressions --------------------------------------------------------------------------------------------------

    def of(self, x: Value, top: bool = False) -> str:
        """The text of a value, in brackets if it is no ``top``; what is used more than once has a line of its own."""
        if x in self.names and not self._stays_inside:
            return self.names[x]
        is_shared = not self._stays_inside and self.uses.get(x, 0) > 1 and (x.args or x.op == "load" or x in self.columns)
        text = self._operation(x) if x.args else self._leaf(x)
        if x.op not in CALLS and x.op not in CALLED and (x.args or x.op == "coordinate") and (is_shared or not top):
            text = f"({text})"
        if is_shared:
            name = f"value_{len(self.names)}"
            self.lines.append(f"{name} = {text}")
            self.names[x] = name
            return name
        return text

    def _operation(self, x: Value) -> str:
        if x.op in CALLED:
            return self._called(x)
        args = [self.of(arg, top=x.op in CALLS or (x.op in COMPARISONS and arg.op == "coordinate")) for arg in x.args]
        for n, arg in enumerate(x.args):
            if is_converted(x, arg):
                args[n] = f"convert(F32, {args[n]})"
                self.needs.add("convert")
        if x.op in WRITTEN:
            return WRITTEN[x.op].format(*args)
        if x.op in CALLS:
            self.needs.add(NEEDS.get(x.op, x.op))
            return f"{CALLS[x.op]}({', '.join(args)})"
        if x.op == "finite":
            self.needs.add("math")
            return f"0.0 if {args[0]} == -math.inf else {args[0]}"
        what = "astype" if x.op == "cast" else {"dot": "a product"}.get(x.op, x.op)
        raise refused(ValueError, f"{what} where a tile is stored: a kernel computes element by element there, and rounds "
                                  "to the result's dtype (only .reference(...) runs others)", x.line)

    def _called(self, x: Value) -> str:
        """Of elements that are not there a function is told the places of the last ones that are: it may have an array."""
        if x.data not in self.callees:
            self.callees.append(x.data)
        self.needs |= {"convert", RETURNS[x.op]}
        args = []
        for n, y in enumerate(x.args):
            self._stays_inside = x.data.is_counted(n, y)
            text = self.of(y, top=True)
            is_whole = (self._stays_inside or is_whole_load(y)) and not x.data.is_real(n)
            args.append(text if is_whole else f"convert(F32, {text})")
            self._stays_inside = False
        return x.data.text(x.op, args)

    def _leaf(self, x: Value) -> str:
        if x.op == "const":
            number = repr(float(x.data)) if math.isfinite(x.data) else self._not_finite(x.data)
            return str(int(x.data)) if self._stays_inside else number
        if x.op == "scalar":
            if x.data not in self.scalars:
                self.scalars.append(x.data)
            return str(x.data)
        if x.op == "after" and x in self.cells:
            if self.cells[x] not in self.sums:
                self.sums.append(self.cells[x])
            return self.cells[x]
        if x.op == "after" and x in self.rows:
            if self.rows[x] not in self.of_rows:
                self.of_rows.append(self.rows[x])
            self.needs.add("row_value")
            return f"row_value({self.rows[x]}, i)"
        if x.op == "after" and x in self.columns:
            self.needs |= {"own_column", "column_at"}
            return f"{KEPT}{self.columns[x]}.at(own_column() + column_at(i))"
        if x.op == EXTENT:
            self.places.add(x.data.name)
            return f"(last_{x.data.name} + 1)"
        if x.op == "coordinate" and isinstance(x.data, Index) and x.data.of_loop in (*self.indices, *self.stacks):
            self.places.add(x.data.of_loop.name)
            return self._in_range(x.data) if self._stays_inside or x.data.stack else self._place(x.data)
        if x.op == "load":
            parameter, key = x.data
            loops = {index.of_loop if index.lookup is None else index for index in key}
            if loops <= {*self.indices, *self.stacks} and len(key) == len(parameter.shape):
                name = f"{BEFORE if parameter.name in self.updated else ''}{parameter.name}"
                if name not in self.arrays:
                    self.arrays.append(name)
                self.places.update(index.of_loop.name for index in key)
                at = ", ".join(self._in_array(index, name != parameter.name) for index in key)
                if name == parameter.name:
                    return f"{name}[{at}]"
                self.needs |= {"element_before", "warp_barrier"}
                there = " and ".join(f"{self._place(index)} <= last_{index.name}" for index in self.indices)
                return f"element_before({name}, ({at}), {there})"
        raise refused(ValueError, f"{x!r} is read where a tile is stored; only accumulators, scalars and array elements of "
                                  "the tile are available", x.line)

    def _in_range(self, index: Index) -> str:
        return index.text(name_of_stack) if index.of_loop in self.stacks else f"min({self._place(index)}, last_{index.name})"

    def _in_array(self, index: Index, is_there: bool = False) -> str:
        """Places of a piece count from where it begins."""
        place = self._place(index) if is_there and index.of_loop in self.indices else self._in_range(index)
        if index.piece is None:
            return place
        if f"{index.name}_origin" not in self.origins:
            self.origins.append(f"{index.name}_origin")
        return f"{index.name}_origin + {place}"

    def _not_finite(self, number: float) -> str:
        self.needs.add("math")
        return "math.nan" if math.isnan(number) else "math.inf" if number > 0 else "-math.inf"

    def _place(self, index: object) -> str:
        if len(self.indices) == 1:
            return f"{self.place} + i * {self.step}"
        is_row = index is self.indices[0]
        self.needs.add("row_of" if is_row else "column_at")
        return "row + row_of(i)" if is_row else "column + column_at(i)"


def is_converted(x: Value, y: Value) -> bool:
    """Whether an element of an array becomes float32 before an operation: of another dtype, unless it has 16 bits and what
    it meets is in float32, or whole numbers are compared."""
    if (load := _load(y)) is None or (dtype := np.dtype(load.data[0].dtype)) == np.float32:
        return False
    others = [z for z in x.args if z is not y]
    if x.op in COMPARISONS and dtype.kind in "iu":
        return not all(_is_counted(z) for z in others)
    return x.op not in MEETING or dtype.name not in ("float16", "bfloat16") or not any(map(_is_float32, others))


def bare(text: str) -> str:
    """Without the brackets around all of it."""
    depth = 0
    for n, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and n < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


def _load(x: Value) -> Value | None:
    """The load of an array that a value's text is, in the array's dtype."""
    return x if x.op == "load" else x.args[0] if x.op == "read" else None


def _is_float32(x: Value) -> bool:
    load = _load(x)
    if load is not None:
        return np.dtype(load.data[0].dtype) == np.float32
    return x.op not in ("const", "coordinate") and (not x.args or any(_load(y) is not None or _is_float32(y)
                                                                      for y in x.args))


def _is_counted(x: Value) -> bool:
    load = _load(x)
    if load is not None:
        return np.dtype(load.data[0].dtype).kind in "iu"
    return x.op == "coordinate" or (x.op == "const" and float(x.data).is_integer()) or (
        x.op in ("add", "sub", "mul", "neg") and all(map(_is_counted, x.args)))


def function_of(name: str, root: Value, indices: tuple, cells: dict[Value, str],
                stacks: tuple[Index, ...], **more: Any) -> ElementFunction:
    """The function that makes an element of a result; ``more``: other fields of it. Raises ValueError, with the user's line,
    for what it cannot read."""
    made = ElementFunction(name, indices, cells, stacks, **more)
    pending, seen = [root], set()
    while pending:
        x = pending.pop()
        made.uses[x] = made.uses.get(x, 0) + 1
        if x not in seen:
            seen.add(x)
            pending += x.args
    made.lines.append(f"return {made.of(root, top=True)}")
    if not made.sums:
        raise refused(ValueError, "a result without an accumulator; it must contain a product's", root.line)
    return made


def name_of_stack(index: Index) -> str:
    """What a function of elements calls it, whose i is the element's number.

    >>> from gemmkit.programs.values import ProgramAxis
    >>> [name_of_stack(Index(ProgramAxis("x", 0, 3, True), name)) for name in "hi"]
    ['h', 'at_i']
    """
    name = index.of_loop.name
    return "at_i" if name == "i" else name


def listed(names: Iterable[str]) -> str:
    """As a tuple, without its brackets.

    >>> listed([]), listed("a"), listed("ab")
    ('', 'a,', 'a, b')
    """
    found = list(names)
    return ", ".join(found) + "," * (len(found) == 1)


def count_of(stacks: Sequence[Index]) -> str:
    """How many matrices stacks have, as the first factor of a product."""
    return "".join(f"sizes.{stack.name} * " for stack in stacks)


def parts_of_stacks(stacks: Sequence[Index], which: str) -> list[str]:
    """Which of each of the stacks a matrix is of, from its number among all, ``which``."""
    found = []
    for n, stack in enumerate(stacks):
        inner = " * ".join(f"sizes.{other.name}" for other in stacks[n + 1:])
        part = f"udiv({which}, {inner})" if inner else which
        own = f"sizes.{stack.name}"
        found.append(f"{part} - udiv({which}, {f'{own} * {inner}' if inner else own}) * {own}" if n else part)
    return found


# --------------------------------------------------------------------------------------------------
# What a text of tiles of rows and columns imports, each with what it is for, and the names that texts call their own.

IMPORTS = [
    ("dataclasses", "dataclass", ()), ("gemmkit.components", "Component", ()), ("gemmkit.components", "Scalar", ()),
    ("gemmkit.programs.collectives", "column_at", ("column_at",)),
    ("gemmkit.kernels.collectives.scheduler", "Cluster", ("cluster",)),
    *(("gemmkit.kernels.collectives.pipeline", name, (name,)) for name in ("CLUSTER", "CLUSTER_WARPS")),
    ("gemmkit.kernels.collectives.pipeline", "Pipeline", ()), ("gemmkit.kernels.collectives.pipeline", "WARPS", ("WARPS",)),
    ("gemmkit.kernels.collectives.scheduler", "Slot", ()), ("gemmkit.kernels.collectives.scheduler", "Grouped", ()),
    ("gemmkit.kernels.sm90.store", "own_column", ("column", "own_column")),
    ("gemmkit.kernels.sm90.store", "own_row", ("row",)), ("gemmkit.kernels.collectives.pipeline", "Warpgroups", ()),
    ("gemmkit.lang.registers", "interleave", ("interleave",)), ("gemmkit.lang.registers", "split", ("interleave",)),
    ("gemmkit.lang.registers", "apply", ("apply",)),
    *(("gemmkit.programs.called", word, (word,)) for word in (*RETURNS.values(), "element_before")),
    ("gemmkit.programs.collectives", "row_value", ("row_value",)),
    ("gemmkit.lang.aggregates", "convert", ("convert",)),
    ("gemmkit.programs.collectives", "F32", ("convert", "convert_all")),
    ("gemmkit.lang.aggregates", "convert_all", ("convert_all",)),
    *(("gemmkit.programs.collectives", name, (name,)) for name in ("DirectOut", "OctetOut", "added")),
    ("gemmkit.programs.collectives", "WarpgroupPart", ()), ("gemmkit.programs.collectives", "Product", ()),
    ("gemmkit.programs.collectives", "RowsOut", ("RowsOut",)),
    ("gemmkit.programs.collectives", "StagedTile", ()), ("gemmkit.programs.collectives", "TmaOut", ("TmaOut",)),
    ("gemmkit.programs.collectives", "blocks", ()), ("gemmkit.programs.collectives", "row_of", ("row_of",)),
    *(("gemmkit.programs.sums", name, (name,)) for name in (
        "ColumnExtremes", "ColumnSums", "ColumnValues", "ColumnsOut", "RowExtremes", "RowSums")),
    *(("gemmkit.ptx.arithmetic", name, (name,)) for name in ("exp2", "log2", "reciprocal")),
    *(("gemmkit.ptx.barriers", name, ("cluster",)) for name in ("cluster_barrier", "cluster_rank")),
    ("gemmkit.ptx.barriers", "mbarrier_fence_init", ()), ("gemmkit.ptx.special", "barrier", ("barrier",)),
    ("gemmkit.ptx.special", "warp_barrier", ("warp_barrier",)),
    *(("gemmkit.ptx.special", name, ()) for name in ("block_x", "grid_x", "rolled", "thread_index", "udiv",
                                                 "uniform")),
    *(("gemmkit.ptx.wgmma", name, ()) for name in ("grid_launch_dependents", "grid_wait")),
    *(("gemmkit.ptx.wgmma", name, ()) for name in ("named_barrier", "wgmma_commit", "wgmma_fence", "wgmma_wait")),
]
#: What a text calls its own things: arrays, cells and indices of programs are called otherwise.
OWN_NAMES = frozenset({name for _, name, _ in IMPORTS} | {
    "SHARED_BYTES", "Sizes", "WARPGROUPS", "abs", "before", "cluster", "column", "column_float", "consume", "group",
    "kernel", "math", "max", "min", "order", "place", "place_float", "produce", "rank", "ring", "row", "row_float",
    "rows", "sizes", "slot", "tile", "tiles", "values", "zero"})
OWN_STARTS = ("at_", "before_", "make_", "ring_", "slot_", "out_", "map_", "rows_of_", "columns_of_", "element_of_", "last_",
              "part_", "value_", KEPT, START)


# --------------------------------------------------------------------------------------------------
# What a kernel's text is, and what it was printed for: results and arguments.

#: Statements before a kernel first touches what others write, on GPUs where a launch may begin before the kernel before it
#: has ended (compute capability 9.0 and above): the next one may begin, and this one waits for the one before. What begins a
#: kernel is done under the end of another: 2048^3 takes 23.9 us in place of 25.8 (H200).
EARLY = "grid_launch_dependents()", "grid_wait()"


def of_blocks(count: str, cluster: Cluster) -> str:
    """A text's number of blocks as one of clusters."""
    return count if cluster.is_single else f"udiv({count}, {cluster.size})"


# --------------------------------------------------------------------------------------------------
# The kernel as text in gemmkit's dialect: a module whose collectives are constants at its top, as one would write it.

REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}      # of a thread that produces, and of one that consumes


@dataclass
class Printer:
    """Of a warp-specialised kernel. A subclass prints another: what it is made of, roles, waits and releases."""
    registers: ClassVar = REGISTERS

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
        return next(x.name for x in row_sums if self.places.rows[x.carried.after] == name)

    def columns_of(self, name: str) -> str:
        """The same of a cell of columns' sums."""
        return self.places.column_sums(name)[0].name

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
        return [*self.rank, f"tile = {of_blocks('block_x()', self.cluster)}", "while tile < tiles(sizes):",
                f"    {self.place} = place(tile, {'' if self.cluster.is_single else 'rank, '}sizes)"]

    @property
    def rank(self) -> list[str]:
        return [] if self.cluster.is_single else ["rank = cluster_rank()"]

    @property
    def next_tile(self) -> str:
        return f"rolled(tile + {of_blocks('grid_x()', self.cluster)})"

    def go_on(self, depth: int, is_consumer: bool) -> None:
        """To a block's next tile."""
        self.put(depth, f"tile = {self.next_tile}")

    def end_of(self, index: Index) -> str:
        """Where rounds end."""
        return f"sizes.{index.name}"

    def corners(self, size: dict[str, int]) -> tuple[str, str]:
        """A tile's first row and column: blocks of a cluster are neighbours."""
        (m, n), cluster = (index.name for index in self.places.indices), self.cluster
        row = f" + cluster.row(rank) * {size[m]}" if cluster.shares_b else ""
        column = f" + cluster.column(rank) * {size[n]}" if cluster.shares_a else ""
        return f"row * {size[m] * cluster.m}{row}", f"column * {size[n] * cluster.n}{column}"

    # -- constants ----------------------------------------------------------------------------------------------------

    product_class = "Product"
    uses: ClassVar[frozenset[str]] = frozenset()                   # what imports of its own are for
    brought: ClassVar[tuple[str, ...]] = ()                        # what a producer reads

    @property
    def product_fields(self) -> str:
        """Of the constants of products, behind their operands."""
        return ""

    def roles(self) -> list[str]:
        """The constants of the module that say who does what."""
        few, many = self.registers[self.warpgroups]
        return [f"WARPGROUPS = Warpgroups(1, {self.warpgroups}, {few}, {many})", f"SHARED_BYTES = {self.memory.nbytes}",
                *([] if self.cluster.is_single else [f"cluster = Cluster(m={self.cluster.m}, n={self.cluster.n})"])]

    def tile_of(self, kind: str, tile: TilePlace, ring: Ring, more: str = "") -> str:
        """The constant of a block."""
        size = self.memory.blocks
        return (f"{tile.name}_tile = {kind}({np.dtype(tile.parameter.dtype).name!r}, "
                f"lines={size[tile.dims[0].name]}, columns={size[tile.dims[1].name]}, "
                f"offset={ring.offsets[tile.name]}, stage_bytes={ring.stage_bytes}{more}")

    def staged(self, tile: TilePlace, ring: Ring) -> str:
        return self.tile_of("StagedTile", tile, ring, f", stacks={len(tile.stacks)}" if tile.stacks else "") + (
            f", cluster=cluster, peers={self.peers(tile)!r})" if self.peers(tile) else ")")

    def pipeline(self, ring: Ring) -> str:
        readers, arrivals = self.readers(ring)
        return (f"{self.ring(ring)} = Pipeline(stages={ring.stages}, offset={ring.barriers}, "
                f"full_arrivals={1 + 128 * len(ring.rounds.looked_up)}, "
                f"empty_arrivals={arrivals}{f', readers={readers}' if readers else ''}"
                f"{', cluster=cluster)' if self.cluster.shares else ')'}")

    def constants(self) -> None:
        size, (m, n) = self.memory.blocks, self.places.indices
        self.put(0, *self.roles(), f"order = Grouped({self.memory.band})")
        for ring in self.memory.rings:
            self.put(0, *(self.staged(tile, ring) for tile in ring.rounds.tiles),
                     *([self.pipeline(ring)] if ring in self.distinct else []))
            for name, x in {x.name: x for x in ring.rounds.folded}.items():
                how = f", consumers={self.warpgroups}" if isinstance(x, ColumnSum) else ""
                how += ", transposed=True" if x.transposed else ""
                self.put(0, f"{name} = {x.collective}({x.tile.name}_tile{how}{', largest=False' * (x.what == 'min')})")
            said = set()
            for product in ring.rounds.products:
                if self.product(product) not in said:
                    said.add(self.product(product))
                    how = "".join(f", {name}_transposed=True" for name in "ab" if getattr(product, f"{name}_transposed"))
                    self.put(0, f"{self.product(product)} = {self.product_class}({product.a.name}_tile, "
                                f"{product.b.name}_tile{how}{self.product_fields})")
        for name, offset in self.memory.columns.items():
            self.put(0, f"{KEPT}{name} = ColumnValues({self.columns_of(name)}, offset={offset})")
        stacks = f", stacks={len(self.places.own_stacks)}" if self.places.own_stacks else ""
        for out in self.outs:
            made = f"{out.kind}({out.dtype.name!r}, pairs={out.pairs})"
            if out.kind in ("RowsOut", "OctetOut", "ScatteredOctets"):
                made = f"{out.kind}({out.dtype.name!r}{', clipped=True' if out.kind != 'RowsOut' else ''})"
            elif out.kind == "ColumnsOut":
                made = f"ColumnsOut({out.dtype.name!r}, columns={size[n.name]}, threads={128 * self.warpgroups})"
            elif out.kind in BY_TMA:
                made = (f"{out.kind}({out.dtype.name!r}, block_m={size[m.name]}, columns={size[n.name]}, "
                        f"o_offset={self.memory.outs[out.name]}{stacks})")
            self.put(0, f"out_{out.name} = {made}")

    @property
    def place(self) -> str:
        """What a tile is: the matrix of stacks, first row, first column."""
        return ", ".join(index.name for index in (*self.places.stacks, *self.places.indices))

    def corner(self, tile: TilePlace) -> str:
        """Where a block begins, as TMA counts: the contiguous axis first."""
        dims = [index.name if index.piece is None else f"{index.name}_origin + {index.name}" for index in tile.dims]
        return ", ".join([*dims[::-1], *(stack.text() for stack in tile.stacks[::-1])])

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
        """Blocks that TMA brings and their arrays, operands that threads copy, results, arrays and functions of threads."""
        functions = [out.function for out in self.outs if out.function is not None]
        arrays = dict.fromkeys(name for made in functions for name in made.arrays)
        return ([(tile.name, tile.parameter.name) for tile in self.tiles], [], [out.name for out in self.outs],
                [*arrays, *self.callees.names])

    @property
    def callees(self) -> Callees:
        return Callees.of(callee for out in self.outs if out.function is not None for callee in out.function.callees)

    def kernel(self) -> None:
        maps, _, names, arrays = self.arguments()
        operands = [f"map_{block}" for block, _ in maps]
        met = "barrier()" if self.cluster.is_single else "cluster_barrier()"
        self.put(0, "", "", f"def kernel({', '.join(['sizes', *operands, *names, *arrays])}):")
        self.put(1, "group = uniform(udiv(thread_index(), 128))", "if thread_index() == 0:",
                 *(f"    {self.ring(ring)}.initialise()" for ring in self.distinct), "    mbarrier_fence_init()",
                 met, *EARLY, "if group == 0:", "    WARPGROUPS.release_registers()",
                 *self.by_producer(f"    produce({', '.join(['sizes', *operands, *self.brought])})"), "else:",
                 "    WARPGROUPS.claim_registers()",
                 f"    consume({', '.join(['sizes', *names, *arrays, 'group - 1'])})",
                 *([] if self.cluster.is_single else [f"{met}        # a peer may still arrive at this block's barriers"]))

    def by_producer(self, *lines: str) -> list[str]:
        """What is left to the thread that asks TMA."""
        return ["    if thread_index() == 0:", *(f"    {line}" for line in lines)]

    def parts(self) -> None:
        """What the kernel calls."""
        _, _, names, arrays = self.arguments()
        self.produce(self.tiles)
        self.put(0, "", "")
        self.consume([*names, *arrays])

    # -- the producer -------------------------------------------------------------------------------------------------

    def produce(self, tiles: list[TilePlace]) -> None:
        given = ", ".join(["sizes", *(f"map_{tile.name}" for tile in tiles), *self.brought])
        self.put(0, f"def produce({given}):", '    """1. Blocks of the operands: global -> shared."""')
        self.put(1, "zero = thread_index() * 0",
                 *(f"{self.slot(ring)} = Slot(zero, zero + 1)          # fresh rings are empty" for ring in self.distinct),
                 *self.begin())
        for ring in self.memory.rings:
            k, name, slot = ring.rounds.index.name, self.ring(ring), self.slot(ring)
            self.put(2, f"{k} = 0 * tile", *self.found(ring, None), f"while {k} < {self.end_of(ring.rounds.index)}:")
            self.put(3, *self.found(ring, k), f"{name}.acquire({slot})", *self.filled(ring),
                     f"{slot} = {name}.advance({slot})", f"{k} = rolled({k} + {self.memory.blocks[k]})")
        self.go_on(2, False)

    def found(self, ring: Ring, k: str | None) -> list[str]:
        """What a producer looks up before a loop's rounds, or in the one that begins at ``k``."""
        return []

    def filled(self, ring: Ring) -> list[str]:
        """Have a stage filled."""
        name, slot, tiles = self.ring(ring), self.slot(ring), [x for x in ring.rounds.tiles if x.lookup is None]
        nbytes = sum(tile.dtype.itemsize * math.prod(self.memory.blocks[x.name] for x in tile.dims) for tile in tiles)
        return [f"{name}.expect({slot}, {nbytes})",
                *(f"{tile.name}_tile.load{'_part' if self.peers(tile) else ''}(map_{tile.name}, "
                  f"({self.corner(tile)}), {name}, {slot}{', rank)' if self.peers(tile) else ')'}" for tile in tiles)]

    # -- the consumers ------------------------------------------------------------------------------------------------

    def consume(self, arguments: list[str]) -> None:
        self.put(0, f"def consume({', '.join(['sizes', *arguments, 'group'])}):",
                 '    """2. Products of stages, added up. 3. What becomes of the sums: registers -> global."""')
        self.put(1, "zero = thread_index() * 0", *(f"{self.slot(ring)} = Slot(zero, zero)" for ring in self.distinct),
                 *self.begin())
        self.multiply_tile(2)
        self.go_on(2, True)
        self.put(1, *(f"out_{out.name}.finish()" for out in self.outs))

    def multiply_tile(self, depth: int) -> None:
        """A tile's rounds, and what becomes of its sums."""
        self.begin_cells(depth)
        for ring, loop in zip(self.memory.rings, self.loops):
            k = ring.rounds.index.name
            step = f"{k} = rolled({k} + {self.memory.blocks[k]})"
            self.put(depth, f"{k} = {self.memory.blocks[k]} + 0 * tile")
            self.events(depth, ring, loop.before)
            self.put(depth, f"before, {self.slot(ring)} = {self.slot(ring)}, {self.ring(ring)}.advance({self.slot(ring)})",
                     f"while {k} < {self.end_of(ring.rounds.index)}:")
            self.events(depth + 1, ring, loop.round)
            self.put(depth + 1, f"before, {self.slot(ring)} = {self.slot(ring)}, "
                                f"{self.ring(ring)}.advance({self.slot(ring)})", step)
            self.events(depth, ring, loop.after)
        self.finish(depth)

    @property
    def row_sums(self) -> list[RowSum]:
        return [x for ring in self.memory.rings for x in ring.rounds.row_sums]

    def begin_cells(self, depth: int) -> None:
        """What a tile's cells begin with."""
        first = {name: next(p for r in self.memory.rings for p in r.rounds.products
                            if self.places.cells[p.carried.after] == name) for name in self.places.starts}
        for name, value in self.places.starts.items():
            held = str(int(value)) if name in self.places.integers else number_text(value)
            self.put(depth, f"{name} = {self.product(first[name])}.begin({held})")
            if any(rounds.promotes and self.places.cells[p.carried.after] == name for rounds in self.places.loops for p in
                   rounds.products) and self.met:
                self.put(depth, f"part_{name} = {self.product(first[name])}.begin(0.0)")
        for name, value in self.places.row_starts.items():
            self.put(depth, f"{name} = {self.rows_of(name, self.row_sums)}.begin({number_text(value)})")
        for name, value in self.places.column_starts.items():
            self.put(depth, f"{name} = {self.columns_of(name)}.begin({number_text(value)})")

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
        part = "part_" if ring.rounds.promotes else ""
        sums = list(dict.fromkeys(part + self.places.cells[p.carried.after] for p in ring.rounds.products))
        for event in events:
            if isinstance(event, Await):
                self.put(depth, f"{name}.wait({slot})")
            elif isinstance(event, Start):
                self.put(depth, "wgmma_fence()")
                for product in event.products:
                    cell = part + self.places.cells[product.carried.after]
                    self.put(depth, f"{cell} = {self.product(product)}.multiply({cell}, {slot}, group, "
                                    f"{int(product not in event.fresh)})")
                self.put(depth, "wgmma_commit()")
            elif isinstance(event, Read):
                self.read(depth, ring, event, any(events is loop.before for loop in self.loops))
            elif isinstance(event, Wait):
                held = f"({', '.join(sums)}{',' if len(sums) == 1 else ''})"
                self.put(depth, f"{held if len(sums) == 1 else held[1:-1]} = wgmma_wait({event.pending}, {held})")
            elif isinstance(event, Promote):
                self.put(depth, *(f"{x.removeprefix(part)} = added({x.removeprefix(part)}, {x})" for x in sums))
            elif isinstance(event, Release):
                self.put(depth, f"{name}.release(before.stage)")
            else:
                assert isinstance(event, Fill)                 # the producer's

    def read(self, depth: int, ring: Ring, event: Read, is_first: bool = False) -> None:
        """The largest of a block's elements are those of elements that are there."""
        end = f", sizes.{ring.rounds.index.name}{'' if is_first else f' - {ring.rounds.index.name}'}"
        for x in (*event.row_sums, *event.column_sums):
            cell = self.places.cell_of(x)
            self.put(depth, f"{cell} = {x.name}.add({cell}, {self.slot(ring)}, group{end if x.what else ''})")

    def stored(self, out: Out) -> list[str]:
        (m, n), made = (index.name for index in self.places.indices), out.function
        as_they_are = out.dtype == np.int32 and made is None

        def held(name: str) -> str:
            """Sums of integers become float32 before anything is made of them."""
            if out.kind == "ColumnsOut":
                return f"{KEPT}{name}.own(group)"
            return f"convert_all(F32, {name})" if name in self.places.integers and not as_they_are else name

        values, lines = held(out.sums), list[str]()
        if made is not None:
            given = ", ".join(["", *self.given(made, out.kind)])
            if len(made.sums) > 1:
                values = f"split(interleave(({', '.join(map(held, made.sums))})), {len(made.sums)})"
            lines = [f"values = apply({made.name}, {values}{given})"]
            values = "values"
            if f"{BEFORE}{out.name}" in made.arrays and out.kind in ("OctetOut", "PieceOut"):       # lanes exchange elements
                lines.append("warp_barrier()")
        to = f"{ROWS_OF}{out.name}" if out.kind == "PieceOut" else "" if out.store.lookup is None else out.store.lookup.name
        lines.append(f"out_{out.name}.store({values}, {out.name}, {self.part}, group{', ' if to else ''}{to})")
        once = {"RowsOut": n, "ColumnsOut": m}.get(out.kind)
        return lines if once is None else [f"if {once} == 0:", *(f"    {line}" for line in lines)]

    @property
    def part(self) -> str:
        """Where a warpgroup's sums are stored."""
        m, n = (index.name for index in self.places.indices)
        stacks = listed(stack.name for stack in self.places.stacks[::-1])
        return f"WarpgroupPart({m} + group * 64, {n}, sizes.{m}, sizes.{n}, ({stacks}))"

    def given(self, made: ElementFunction, kind: str) -> list[str]:
        """What a function is given behind the sums."""
        m, n = (index.name for index in self.places.indices)
        column = f"{n} + group * 128 + thread_index() % 128" if kind == "ColumnsOut" else f"{n} + own_column()"
        here = {**{name_of_stack(stack): stack.name for stack in self.places.stacks},
                "row": f"{m} + group * 64 + own_row()", "column": column, f"last_{m}": f"sizes.{m} - 1",
                f"last_{n}": f"sizes.{n} - 1", **{name: f"sizes.{name}" for name in made.scalars}}
        return [here.get(name, name) for name in made.parameters]

    # -- tiles --------------------------------------------------------------------------------------------------------

    def grid(self) -> list[str]:
        """How many tiles there are, and where each is."""
        (m, n), memory, stacks = (index.name for index in self.places.indices), self.memory, self.places.stacks
        outer, inner = (f"blocks(sizes.{index}, {memory.blocks[index] * count})"
                        for index, count in ((m, memory.cluster.m), (n, memory.cluster.n)))
        row, column = self.corners(memory.blocks)
        tile = f"tile - outer * rows * {inner}" if stacks else "tile"
        return ["def tiles(sizes):", f"    return {count_of(stacks)}{outer} * {inner}", "", "",
                f"def place(tile, {'' if memory.cluster.is_single else 'rank, '}sizes):",
                f'    """The tile\'s first row and column: bands of tile rows go along {n}, column by column."""',
                f"    rows = {outer}", *([f"    outer = udiv(tile, rows * {inner})"] if stacks else []),
                f"    row, column = order.block({tile}, rows, {inner})",
                f"    return {', '.join([*parts_of_stacks(stacks, 'outer'), row, column])}"]


def printed(printer: Printer, title: str) -> Printed:
    """Print a kernel."""
    places, memory, outs = printer.places, printer.memory, printer.outs
    m, n = (index.name for index in places.indices)
    functions = [out.function for out in outs if out.function is not None]
    scalars = list(dict.fromkeys(name for made in functions for name in made.scalars))
    tile = m, n, *(stack.name for stack in places.stacks)
    sizes = list(dict.fromkeys([*tile, *(ring.rounds.index.name for ring in memory.rings)]))
    uses = {out.kind for out in outs} | ({"ColumnValues"} if places.column_starts else set())
    uses |= {x.collective for rounds in places.loops for x in rounds.folded}
    starts = *places.starts.values(), *places.row_starts.values(), *places.column_starts.values()
    uses |= set() if all(map(math.isfinite, starts)) else {"math"}
    uses |= {"convert_all"} if places.integers else set()
    uses |= {"added"} if printer.met and any(rounds.promotes for rounds in places.loops) else set()
    uses |= {printer.met, *(printer.readers(ring)[0] for ring in memory.rings), *printer.uses}
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
    printer.put(0, "", "", *printer.grid(), "", "")
    printer.parts()
    for made in functions:
        printer.put(0, "", "", *made.text.split("\n"))
    maps, operands, names, arrays = printer.arguments()
    callees = printer.callees
    read = tuple(name.removeprefix(ROWS_OF).removeprefix(BEFORE) for name in arrays if name not in callees.names)
    return Printed("\n".join(printer.lines) + "\n", tuple(maps), tuple(names), read, tuple(sizes), tile, tuple(scalars),
                   printer.threads, tuple(operands), callees, tuple(name for name in names if name in places.updated))
