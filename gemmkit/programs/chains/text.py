"""A chained kernel as text: a module whose collectives are constants at its top, as one would write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gemmkit.kernels.sm90.producer import STARTING
from gemmkit.programs.chains.allocate import Choice
from gemmkit.programs.chains.chain import Chain, dots
from gemmkit.programs.chains.consumer import Consumer
from gemmkit.programs.chains.elements import scalar_text
from gemmkit.programs.chains.names import Naming
from gemmkit.programs.chains.order import Ordered
from gemmkit.programs.chains.places import Block, ChainPlaces
from gemmkit.programs.chains.ranges import Ranges
from gemmkit.programs.chains.rounds import Producer
from gemmkit.programs.chains.trials import mentions
from gemmkit.programs.collectives import COLUMN
from gemmkit.programs.own_names import OWN_NAMES
from gemmkit.programs.printed import EARLY, OutKind, Printed, of_blocks
from gemmkit.programs.trace import Value

IMPORTS = [
    ("dataclasses", "dataclass"), ("gemmkit.components", "Component"), ("gemmkit.components", "Scalar"),
    ("gemmkit.kernels.attention.elements", "column_at"), ("gemmkit.kernels.attention.softmax", "finite"),
    ("gemmkit.kernels.common.cluster", "Cluster"), ("gemmkit.kernels.common.pipeline", "CLUSTER"),
    ("gemmkit.kernels.common.pipeline", "Pipeline"), ("gemmkit.kernels.common.work", "Slot"),
    ("gemmkit.kernels.sm90.store", "own_column"), ("gemmkit.kernels.sm90.store", "own_row"),
    ("gemmkit.kernels.sm90.warpgroups", "Turns"), ("gemmkit.kernels.sm90.warpgroups", "Warpgroups"),
    ("gemmkit.lang.control", "interleave"), ("gemmkit.lang.control", "split"), ("gemmkit.lang.registers", "apply"),
    ("gemmkit.lang.registers", "generate"), ("gemmkit.lang.values", "convert"), ("gemmkit.lang.values", "fill"),
    *(("gemmkit.programs.chains.collectives", name) for name in (
        "HandedProduct", "OctetOut", "changes", "column_of", "column_value", "lane_value", "limits", "own_sum",
        "rescales", "row_max", "row_value", "steep", "whole_sum")),
    *(("gemmkit.programs.collectives", name) for name in (
        "F32", "DirectOut", "Part", "Product", "RowsOut", "Staged", "TmaOut", "blocks", "row_of")),
    *(("gemmkit.ptx.approximate", name) for name in ("exp2", "log2", "maximum", "reciprocal", "tanh")),
    ("gemmkit.ptx.anchor", "anchor"), ("gemmkit.ptx.arithmetic", "difference"), ("gemmkit.ptx.arithmetic", "fma"),
    *(("gemmkit.ptx.cluster", name) for name in ("cluster_barrier", "cluster_rank")),
    ("gemmkit.ptx.mbarrier", "mbarrier_fence_init"),
    *(("gemmkit.ptx.special", name) for name in (
        "barrier", "block_x", "carried", "grid_x", "rolled", "thread_index", "udiv", "uniform")),
    *(("gemmkit.ptx.warpgroup", name) for name in ("grid_launch_dependents", "grid_wait")),
    *(("gemmkit.ptx.wgmma", name) for name in ("wgmma_commit", "wgmma_fence", "wgmma_wait")),
]

#: What a text calls its own things, beside `OWN_NAMES`.
TAKEN = ("begins", "end_seen", "ends", "first_seen", "following", "free_from", "free_to", "i", "place", "room", "section",
         "turns", "values")


def names_of_ranges(chain: Chain) -> list[str]:
    """What a text calls the places where rounds begin and end, and the shares of a tile's."""
    of_shares = ("each", "outer", "share") if chain.splits > 1 else ()
    return [f"{chain.index.name}_{what}" for what in ("end", "first", "free", "length", "tested", *of_shares)]


def tests_of(chain: Chain, ranges: Ranges) -> set[Value]:
    """Values that rounds without tests leave out: they are what they test there."""
    users: dict[Value, int] = {}
    for x in chain.values:
        for y in x.args:
            users[y] = users.get(y, 0) + 1

    def is_test(x: Value) -> bool:
        if x.op == "inside":
            return True
        tested = x.args[1] if x.op == "where" else x
        return (x.op == "where" and ranges.has_free and chain.index in x.dims and tested.dims == x.dims
                and users[tested] == 1 and bool(tested.args) and mentions(x.args[0], chain.index))

    return {x for x in chain.body if is_test(x)}


@dataclass
class ChainPrinter:
    """Of a warp-specialised kernel; a subclass prints another. ``scalars`` and ``arrays``: the names of all, which are
    taken."""

    chain: Chain
    places: ChainPlaces
    choice: Choice
    order: Ordered
    ranges: Ranges
    outs: dict[str, OutKind]
    scalars: list[str]
    arrays: list[str]

    imports = IMPORTS
    own_names: ClassVar[frozenset[str]] = frozenset()            # beside those of all
    consumer_class: ClassVar[type[Consumer]] = Consumer
    product_classes = "Product", "HandedProduct"
    has_next = True                                    # blocks go on from tile to tile

    # -- what kernels differ in ---------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return 128 * (1 + self.choice.warpgroups)

    def roles(self) -> list[str]:
        """The constants of the module that say who does what."""
        few, many = STARTING.get((1, self.choice.warpgroups), (0, 0))
        return [f"WARPGROUPS = Warpgroups(1, {self.choice.warpgroups}, {few}, {many})",
                f"SHARED_BYTES = {self.choice.nbytes}",
                *([] if self.choice.cluster.is_single else [f"cluster = Cluster(m={self.choice.cluster.m})"])]

    def tile_of(self, kind: str, block: Block, more: str = "") -> str:
        """The constant of a block."""
        rows, columns = map(self.choice.size, block.dims)
        stacked = "" if block.stack is None else ", stacked=True"
        dtype = np.dtype(block.parameter.dtype).name
        return (f"{block.name}_tile = {kind}({dtype!r}, lines={rows}, columns={columns}, "
                f"offset={self.choice.offsets[block]}, stage_bytes={self.choice.stage_bytes(block.ring)}{more}{stacked}")

    def staged(self, block: Block) -> str:
        return self.tile_of("Staged", block, f", cluster=cluster, peers={COLUMN!r}" if self.is_shared(block) else "") + ")"

    def is_shared(self, block: Block) -> bool:
        return self.choice.is_shared(block, self.chain.rows)

    def pipelines(self) -> list[str]:
        lines = []
        for ring in self.places.rings:
            readers, more = 1, ""
            if any(map(self.is_shared, ring.blocks)):
                readers, more = self.choice.cluster.readers, ", readers=CLUSTER, cluster=cluster"
            lines.append(f"ring_{ring.name} = Pipeline(stages={self.choice.stages[ring]}, "
                         f"offset={self.choice.barriers[ring]}, full_arrivals=1, "
                         f"empty_arrivals={self.choice.warpgroups * readers}{more})")
        return lines

    def arguments(self, read: list[str]) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        """Blocks that TMA brings and their arrays, operands that threads copy, results, arrays that threads ``read``."""
        blocks = [(block.name, block.parameter.name) for ring in self.places.rings for block in ring.blocks]
        return blocks, [], list(self.outs), [name for name in read if name not in self.outs]

    def kernel(self, arguments: list[str], consumer: Consumer) -> list[str]:
        rings, length = self.places.rings, self.chain.length
        takes_maps = [f"map_{block.name}" for ring in rings for block in ring.blocks]
        takes_blocks = ["sizes", *takes_maps, *([] if length is None else [length.data[0].name])]
        takes_all = [name for name in arguments if name not in takes_maps]
        cluster = self.choice.cluster
        met = "barrier()" if cluster.is_single else "cluster_barrier()"
        producer = Producer(self.chain, self.places, self.choice, self.order, self.ranges, consumer.has_tests)
        producer.tiles()
        return [f"def kernel({', '.join(['sizes', *arguments])}):",
                "    group = uniform(udiv(thread_index(), 128))", "    if thread_index() == 0:",
                *(f"        ring_{ring.name}.initialise()" for ring in rings), "        mbarrier_fence_init()",
                f"    {met}", *(f"    {line}" for line in EARLY), "    if group == 0:",
                "        WARPGROUPS.give_registers()",
                "        if thread_index() == 0:", f"            produce({', '.join(takes_blocks)})", "    else:",
                "        WARPGROUPS.take_registers()",
                f"        consume({', '.join(['sizes', *takes_all, 'group - 1'])})",
                *([] if cluster.is_single else [f"    {met}        # a peer may still arrive at this one's barriers"]),
                "", "", *self.tile_functions(),
                f"def produce({', '.join(takes_blocks)}):",
                '    """1. Blocks of the operands: global -> shared."""', "    zero = thread_index() * 0",
                *(f"    at_{ring.name} = Slot(zero, zero + 1)          # fresh rings are empty" for ring in rings),
                *producer.lines, "", "", f"def consume({', '.join(['sizes', *takes_all, 'group'])}):",
                '    """2. Products, and what becomes of them in the registers. 3. The end of a tile: registers -> '
                'global."""',
                "    zero, column = thread_index() * 0, own_column()",
                *(f"    at_{ring.name} = Slot(zero, zero)" for ring in rings),
                *(["    turns.give_first(group)"] if self.choice.turns else []), *scalar_lines(consumer), *consumer.lines,
                *(f"    out_{name}.finish()" for name in self.outs)]

    # -- the text -----------------------------------------------------------------------------------------------------

    def printed(self, title: str) -> tuple[Printed, dict[str, Value]]:
        """The text, and the arrays that threads read with what reads them."""
        chain, choice, order = self.chain, self.choice, self.order
        tests = tests_of(chain, self.ranges)
        indices = [index.name for index in (*chain.indices, chain.index)]
        taken = {*OWN_NAMES, *TAKEN, *self.own_names, *(name for _, name in self.imports), *self.arrays, *self.scalars,
                 *indices, *(f"last_{name}" for name in indices), *names_of_ranges(chain)}
        parts = [part for part in (order.round, order.before, order.join, order.after) if part]
        naming = Naming(chain, self.places, tests, parts, taken)
        consumer = self.consumer_class(chain, self.places, choice, order, self.ranges, bool(tests), naming=naming)
        consumer.tiles()
        if chain.length is not None:
            consumer.arrays.setdefault(chain.length.data[0].name, chain.length)
        maps, operands, outs, others = self.arguments(list(consumer.arrays))
        sizes = [*dict.fromkeys(indices), *(["section"] if choice.longest_first and chain.stack is not None else [])]
        lines = self.constants(consumer)
        lines += ["", "", "@dataclass(frozen=True)", "class Sizes(Component):",
                  *(f"    {name}: Scalar" for name in (*sizes, *self.scalars)), "", "",
                  *self.kernel([*(f"map_{block}" for block, _ in maps), *operands, *outs, *others], consumer)]
        for text, name in consumer.functions.items():
            lines += ["", "", *f"def {name}{text}".rstrip().split("\n")]
        body = "\n".join(lines) + "\n"
        used = set(re.findall(r"[A-Za-z_]\w*", body))
        imports: dict[str, list[str]] = {}
        for module, name in self.imports:
            if name in used:
                imports.setdefault(module, []).append(name)
        head = [f'"""{title}"""', "", *(["import math"] if "math" in used else []),
                *(f"from {module} import {', '.join(names)}" for module, names in imports.items()), "", ""]
        tile = tuple(index.name for index in chain.indices)
        made = Printed("\n".join(head) + body, tuple(maps), tuple(outs), tuple(others), tuple(sizes), tile,
                       tuple(self.scalars), self.threads, tuple(operands))
        return made, consumer.arrays

    def constants(self, consumer: Consumer) -> list[str]:
        chain, places, choice = self.chain, self.places, self.choice
        lines = [*self.roles(), *(self.staged(block) for ring in places.rings for block in ring.blocks), *self.pipelines()]
        plain, handed = self.product_classes
        said = set()
        for d in [*places.peeled.values(), *dots(chain.body)]:
            name = consumer.product(d)
            if name in said:
                continue
            said.add(name)
            a, b = places.blocks.get((d, 0)), places.blocks[d, 1]
            how = ", b_transposed=True" if d.args[1].op == "transpose" else ""
            if a is None:
                lines.append(f"{name} = {handed}({b.name}_tile{how})")
            else:
                how = (", a_transposed=True" if d.args[0].op == "transpose" else "") + how
                lines.append(f"{name} = {plain}({a.name}_tile, {b.name}_tile{how})")
        if choice.turns:
            lines.append(f"turns = Turns({choice.warpgroups}, {1 + choice.warpgroups}, True)")
        rows = choice.blocks[chain.rows.name]
        stacked = ", stacked=True" if chain.results_are_stacked else ""
        for name, out in self.outs.items():
            if out.kind == "TmaOut":
                lines.append(f"out_{name} = TmaOut({out.dtype.name!r}, block_m={rows}, columns={out.columns}, "
                             f"o_offset={choice.outs[name]}{stacked})")
            elif out.kind == "DirectOut":
                lines.append(f"out_{name} = DirectOut({out.dtype.name!r}, pairs={out.pairs}{stacked})")
            else:
                lines.append(f"out_{name} = {out.kind}({out.dtype.name!r}{stacked})")
        return lines

    def tile_functions(self) -> list[str]:
        """How many tiles there are, and which are a block's; and which blocks a tile's rounds visit."""
        lines = _places(self.chain, self.choice)
        if self.choice.longest_first and self.has_next:
            lines += ["", "", "def following(tile):", '    """The block\'s next tile: blocks take tiles there and back."""',
                      *_there_and_back(self.choice)]
        return [*lines, "", "", *_ranges(self.chain, self.choice, self.ranges)]


def scalar_lines(consumer: Consumer) -> list[str]:
    return [f"    {name} = {scalar_text(x, top=True)}" for x, name in consumer.scalars.items()]


def _there_and_back(choice: Choice) -> list[str]:
    if choice.cluster.is_single:
        return ["    return (udiv(tile, grid_x()) + 1) * 2 * grid_x() - 1 - tile"]
    count = of_blocks("grid_x()", choice.cluster)
    return [f"    count = {count}", "    return (udiv(tile, count) + 1) * 2 * count - 1 - tile"]


def _places(chain: Chain, choice: Choice) -> list[str]:
    """A cluster's tiles are neighbours: they count as one."""
    m, size = chain.rows.name, choice.rows * choice.cluster.m
    given, own = ("tile, sizes", "") if choice.cluster.is_single else ("tile, rank, sizes", f" + rank * {choice.rows}")
    place = f"def place({given}):"
    if chain.splits > 1:
        count = f"{chain.splits}" if chain.stack is None else f"sizes.{chain.stack.name} * {chain.splits}"
        return ["def tiles(sizes):", f"    return {count} * blocks(sizes.{m}, {size})", "", "", place,
                '    """Which of the stack, which of its shares, and the tile\'s first row."""',
                f"    inner = blocks(sizes.{m}, {size})", "    outer = udiv(tile, inner)",
                f"    return outer, (tile - outer * inner) * {size}{own}"]
    if chain.stack is None:
        n = f"(blocks(sizes.{m}, {size}) - 1 - tile)" if choice.longest_first else "tile"
        return ["def tiles(sizes):", f"    return blocks(sizes.{m}, {size})", "", "", place,
                '    """The tile\'s first row."""', f"    return {n} * {size}{own}"]
    h = chain.stack.name
    head = ["def tiles(sizes):", f"    return sizes.{h} * blocks(sizes.{m}, {size})", "", "", place]
    if not choice.longest_first:
        return [*head, '    """Which of the stack, and the tile\'s first row."""', f"    inner = blocks(sizes.{m}, {size})",
                "    outer = udiv(tile, inner)", f"    return outer, (tile - outer * inner) * {size}{own}"]
    return [*head, '    """Which of the stack, and the tile\'s first row: the longest tiles of a section first."""',
            f"    rows = blocks(sizes.{m}, {size})", "    outer = udiv(tile, sizes.section * rows)",
            "    first = outer * sizes.section", f"    count = min(sizes.section, sizes.{h} - first)",
            "    rest = tile - first * rows", "    inner = udiv(rest, count)",
            f"    return first + rest - inner * count, (rows - 1 - inner) * {size}{own}"]


def _ranges(chain: Chain, choice: Choice, ranges: Ranges) -> list[str]:
    """Functions that say which blocks a tile's rounds visit, and where nothing is tested."""
    m, rows, step = chain.rows.name, choice.rows * choice.cluster.m, choice.blocks[chain.index.name]
    last, stop = f"min({m} + {rows}, sizes.{m}) - 1", chain.stop
    given = f"{m}, {stop}, sizes" if chain.has_length else f"{m}, sizes"

    def extreme(bounds: list, of_last: bool) -> list[str]:
        """The bounds of the last of the rows where they grow with them, or of the first."""
        return [bound.text("last" if (bound.slope >= 0) is of_last else m) for bound in bounds]

    out: list[str] = []
    if ranges.visits_less and ranges.begins:
        out += [f"def first_seen({given}):", f'    """The first block that rows {m} on visit."""', f"    last = {last}",
                f"    first = udiv(max({', '.join(['0', *extreme(ranges.begins, False)])}), {step}) * {step}",
                f"    return min(first, udiv(max({stop} - 1, 0), {step}) * {step})", "", ""]
    if ranges.visits_less and ranges.ends:
        least = f"first_seen({given}) + 1" if ranges.begins else "1"
        ends = ", ".join([stop, *extreme(ranges.ends, True)])
        out += [f"def end_seen({given}):",
                f'    """The place behind the last that rows {m} on see, in one block at least."""', f"    last = {last}",
                f"    return max(min({ends}), {least})", "", ""]
    if ranges.has_tests and ranges.has_free:
        for name, bounds, kind, least in (("free_from", ranges.begins, "max", "0"),
                                          ("free_to", ranges.ends, "min", stop)):
            if bounds:
                what = "first place" if kind == "max" else "place behind the last"
                out += [f"def {name}({given}):", f'    """The {what} that all of rows {m} on see."""',
                        f"    last = min({m} + {choice.rows}, sizes.{m}) - 1",
                        f"    return {kind}({', '.join([least, *extreme(bounds, kind == 'max')])})", "", ""]
    return out
