"""What the passes hand on, looked at as it stands: names, typed events, memory, tensor maps, barriers."""

from __future__ import annotations

import ast
import builtins
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from gemmkit.kernels.collectives.pipeline import CLUSTER, CLUSTER_WARPS, THREAD, WARPS, OrderBarrier, Pipeline, Warpgroups
from gemmkit.programs import collectives, multistage, pieces, sums
from gemmkit.programs import plan as plans
from gemmkit.programs.chains import chain as chains
from gemmkit.programs.chains import schedule
from gemmkit.programs.chains import schedule as orders
from gemmkit.programs.launches import BEGIN
from gemmkit.programs.places import Await, Fill, Promote, Read, Release, Start, Wait
from gemmkit.programs.places import ordered as ordered_rounds
from gemmkit.programs.text import BEFORE
from gemmkit.programs.values import Axis
from gemmkit.tuning.problems import choose
from tests.verifier.texts import LOADS, Staged, Text, bytes_of, expect, held, in_turn, is_recurrence, resizing_of

# -- names ------------------------------------------------------------------------------------------------------------------

def check_names(text: Text) -> None:
    known = {*dir(builtins)}
    for stmt in text.nodes:
        if isinstance(stmt, (ast.Import, ast.ImportFrom)):
            known |= {(x.asname or x.name).partition(".")[0] for x in stmt.names}
    for node in text.tree.body:
        if isinstance(node, ast.Assign):
            uses(node.value, known, "the module")
        if isinstance(node, ast.Assign):
            new = bound(node)
            expect(not new & (known - {*dir(builtins)}), f"{', '.join(sorted(new & known))} is defined twice in the module")
            known |= new
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            expect(node.name not in known - {*dir(builtins)}, f"{node.name} is defined twice in the module")
            known.add(node.name)
    check_sizes(text)
    for function in text.functions.values():
        taken = [arg.arg for arg in function.args.args]
        expect(len(set(taken)) == len(taken), f"{function.name} takes {taken}")
        defined(function.body, known | set(taken), function.name)
        for call in ast.walk(function):
            if isinstance(call, ast.Call):
                check_call(text, call, function.name)


def check_sizes(text: Text) -> None:
    """What a kernel reads of its sizes is what a launch brings."""
    (sizes,) = (node for node in text.tree.body if isinstance(node, ast.ClassDef))
    fields = [ast.unparse(node.target) for node in sizes.body if isinstance(node, ast.AnnAssign)]
    printed = text.plan.printed
    expect(fields == [*printed.sizes, *printed.scalars], f"Sizes has {fields}, and a launch brings {[*printed.sizes, *printed.scalars]}")
    expect(set(printed.tile) <= set(printed.sizes) <= set(text.plan.extents), f"tiles are of {printed.tile}, and extents {text.plan.extents}")
    read = {node.attr for node in text.nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sizes"}
    expect(read <= set(fields), f"{', '.join(sorted(read - set(fields)))} is read of Sizes, which has {fields}")


def defined(body: Iterable[ast.stmt], known: set[str], where: str) -> set[str]:
    """The names behind a body, on every path. Raises Unsound for one that is used before. A loop begins with what was defined where
    its condition held, just before it."""
    held: tuple[str, set[str]] = "", set()
    for node in body:
        if isinstance(node, ast.If):
            uses(node.test, known, where)
            inner = defined(node.body, known, where)
            known = inner & defined(node.orelse, known, where)
            held = ast.unparse(node.test), inner
            continue
        if isinstance(node, ast.While):
            uses(node.test, known, where)
            defined(node.body, known | (held[1] if held[0] == ast.unparse(node.test) else set()), where)
        elif isinstance(node, ast.For):
            uses(node.iter, known, where)
            defined(node.body, known | bound(node), where)
        elif isinstance(node, ast.AugAssign):
            uses(ast.Name(ast.unparse(node.target), ast.Load()), known, where)
            uses(node.value, known, where)
        else:
            uses(node, known, where)
            known = known | bound(node)
        held = "", set()
    return known


def bound(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.For) else []
    return {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}


def uses(node: ast.AST, known: set[str], where: str) -> None:
    nodes = [*ast.walk(node)]
    inner = {x.arg for f in nodes if isinstance(f, ast.Lambda) for x in f.args.args}
    for x in nodes:
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load):
            expect(x.id in known or x.id in inner, f"{where}: {x.id} is used before it is defined, on some path")


def check_call(text: Text, call: ast.Call, where: str) -> None:
    """A function of the text is given as much as it takes, and by its parameters' own names nothing else."""
    name, given, skipped = ast.unparse(call.func), list(call.args), 0
    if name in ("apply", "generate"):
        f = given[1] if name == "generate" else given[0]
        values, given = (None, given[2:]) if name == "generate" else (given[1], given[2:])
        name, skipped = ast.unparse(f), 1 if values is None else 2
        if values is not None and name in text.functions:
            check_zipped(text.functions[name], values, where)
    function = text.functions.get(name)
    if name in ("fma", "difference") and not text.plan.is_of_rows:
        weak = [ast.unparse(x) for x in given if not isinstance(x, (ast.Name, ast.Call))]
        expect(not weak, f"{where}: {name} takes float32, and is given {', '.join(weak)}")
    if function is None:
        return
    taken = [arg.arg for arg in function.args.args][skipped:]
    expect(len(taken) == len(given), f"{where}: {name} takes {taken} and is given {[ast.unparse(x) for x in given]}")
    for parameter, argument in zip(taken, given):
        if isinstance(argument, ast.Name):
            said = argument.id if parameter == argument.id else argument.id.removeprefix("before_")
            expect(parameter == said or said not in taken, f"{where}: {name} takes {parameter}, and is given {argument.id}")


def check_zipped(function: ast.FunctionDef, values: ast.expr, where: str) -> None:
    """Values that are interleaved are unpacked again, in the same order."""
    first = function.body[0]
    unpacked = [x.id for x in ast.walk(first.targets[0]) if isinstance(x, ast.Name)] if isinstance(first, ast.Assign) and isinstance(
        first.value, ast.Name) and first.value.id == function.args.args[0].arg else []
    if isinstance(values, ast.Call) and ast.unparse(values.func) == "split":
        inner, count = values.args
        assert isinstance(inner, ast.Call) and isinstance(count, ast.Constant) and isinstance(inner.args[0], ast.Tuple)
        given = [ast.unparse(x).removesuffix(".own(group)") for x in inner.args[0].elts]
        expect(count.value == len(given) == len(unpacked), f"{where}: {function.name} is given {given}, and unpacks {unpacked}")
        expect([x.removeprefix("kept_").removeprefix("before_") for x in given] == [x.removeprefix("before_") for x in unpacked],
               f"{where}: {function.name} is given {given}, and unpacks {unpacked}")
    else:
        expect(not unpacked, f"{where}: {function.name} unpacks one value")


# -- typed events -------------------------------------------------------------------------------------------------------------

def check_order(plan: plans.ProgramPlan) -> None:
    resizing: Any = plan.resizing
    if isinstance(resizing, plans.GridResizing):
        for rounds in resizing.problem.places.loops:
            check_grid_order(ordered_rounds(rounds))
        return
    made = resizing.made
    order = plans.ordered_chain(made.chain, made.places, made.choice)
    if plan.is_multistage:             # whose printer leaves waits out; the order is plain
        expect(not (order.late or order.join or order.lags), "a multistage kernel's rounds run ahead")
    tries = [["before", *["round"] * rounds, "after"] for rounds in range(4 if order.round else 1)]
    if order.join:
        tries += [["before", *["round"] * rounds, "join", *["round"] * more, "after"] for rounds in range(2) for more in range(2)]
    for parts in tries:
        ChainWalk(made.chain, made.places, order).run([part for part in parts if getattr(order, part) or part == "round"])


class ChainWalk:
    """Goes through a chain's events. ``made``: which round's instance of a value is there; ``groups``: products on their way."""

    def __init__(self, chain: Any, places: Any, order: Any):
        self.chain, self.places, self.order = chain, places, order
        self.made: dict[Any, tuple[int, int]] = {}
        self.groups: list[list[tuple[Any, tuple[int, int]]]] = []
        self.awaited, self.released = Counter[Any](), Counter[Any]()
        self.cells = {c.inside: c for c in chain.carried}
        self.peeled = {first: dot for dot, first in places.peeled.items()}
        self.turn = 0

    def run(self, parts: list[str]) -> None:
        tile, count = 0, 0
        for part in parts:
            if part == "join":
                self.part(part, (tile, count - 1), (tile + 1, 0))
                tile, count = tile + 1, 1
            elif part == "after":
                self.part(part, (tile, count - 1), None)
            else:
                self.part(part, (tile, count - 1) if count else None, (tile, count))
                count += 1
        expect(not self.groups, "products are on their way at the end")
        expect(self.awaited == self.released, f"stages are filled {_counts(self.awaited)}, and released {_counts(self.released)}")

    def part(self, name: str, last: tuple[int, int] | None, now: tuple[int, int] | None) -> None:
        late = self.order.late
        self.last, self.now, self.name, seen = last, now, name, Counter[Any]()
        if self.chain.is_straight:     # whose rounds are tiles
            self.awaited.update(self.places.lone())
        for event in getattr(self.order, name):
            if isinstance(event, orders.Full):
                self.awaited[event.ring] += 1
                expect(self.awaited[event.ring] <= self.released[event.ring] + 1 + self.order.lags + (event.first > 0),
                       f"{event.ring.name} is awaited again before it is released")
            elif isinstance(event, orders.Compute):
                for x in event.values:
                    seen[x] += 1
                    self.needs(x)
                    self.made[x] = self.instance(x)
            elif isinstance(event, orders.ChainStart):
                for d in event.products:
                    seen[d] += 1
                    self.needs(d)
                    for ring in self.places.rings_of([d]):
                        expect(ring.index is None or self.awaited[ring] > self.released[ring], f"{d!r} reads {ring.name} before it is full")
                self.groups.append([(d, self.instance(d)) for d in event.products])
            elif isinstance(event, orders.ChainWait):
                self.wait(event)
            elif isinstance(event, orders.ChainRelease):
                self.release(event)
            elif isinstance(event, (orders.Turn, orders.Pass)):
                expect(self.turn == isinstance(event, orders.Pass), "a turn is waited for, and given on, once each")
                self.turn ^= 1
        expect(not self.turn, "a turn is not given on")
        wanted = [x for x in self.chain.body if (x in late and last is not None and name != "before") or (
            x not in late and now is not None and not (x in self.order.zero and now[1] == 0))]
        if self.peeled and name == "before":
            handed = {d.args[0] for d in self.places.peeled}
            filled = {x.args[0] for x in handed if x.args[0].op == "where"}                 # of a cell, whose columns are filled up
            wanted = [self.places.peeled.get(x, x) for x in wanted if x not in handed | filled]
        if name == "after" and self.order.lags:
            wanted = []
        wanted = [x for x in wanted if not (self.order.lags and x.op == "transpose")]
        missing = [x for x in wanted if seen[x] != 1]
        expect(not missing, f"{name}: {missing[:1]!r} is made {[seen[x] for x in missing[:1]]} times a round")
        expect(set(seen) <= set(wanted), f"{name}: {next(iter(set(seen) - set(wanted)), None)!r} is made there")

    def instance(self, x: Any) -> tuple[int, int]:
        found = self.last if x in self.order.late else self.now
        expect(found is not None, f"{x!r} is made where no round is")
        assert found is not None
        return found

    def needs(self, x: Any) -> None:
        tile, number = self.instance(x)
        for n, y in enumerate(x.args):
            if y.op in ("load", "transpose") or (x.op == "dot" and n < 2 and chains.loaded(y) is not None):
                continue
            if y in self.cells:
                self.needs_cell(x, y, n, (tile, number))
            elif y in self.order.zero and number == 0:
                continue
            elif y in self.chain.body:
                y = self.places.peeled.get(y, y) if self.name == "before" else y
                is_part = n == 2 and any(y is d for group in self.groups[-1:] for d, _ in group)     # of one product
                expect(is_part or self.made.get(y) == (tile, number), f"{x!r} of round {number} needs {y!r}, of which {self.made.get(y)} is there")

    def needs_cell(self, x: Any, y: Any, n: int, at: tuple[int, int]) -> None:
        """A cell as the round before has left it: a product that adds to it may be on its way still."""
        out, (tile, number) = self.cells[y].out, at
        flying = {d: instance for group in self.groups for d, instance in group}
        if number == 0:
            return
        added = x.op == "dot" and n == 2
        there = flying.get(out) if added and out in flying else self.made.get(self.places.peeled.get(out, out) if number == 1 and (
            self.places.peeled.get(out) in self.made) and out not in self.made else out)
        if out in self.cells:          # it becomes what another cell was
            return
        expect(there in ((tile, number - 1), (tile, number)), f"{x!r} of round {number} needs {y!r}, whose {out!r} is of {there}")
        expect(added or out not in flying or flying[out] == at, f"{x!r} reads {y!r} while a product adds to it")
        if there == (tile, number):    # it has been made anew: the old one is another register
            expect(out is not x, f"{x!r} is made twice")

    def wait(self, event: Any) -> None:
        expect(self.groups, "a wait for no products")
        over = list[tuple[Any, tuple[int, int]]]()
        while len(self.groups) > event.pending:
            over += self.groups.pop(0)
        flying = [d for group in self.groups for d, _ in group]
        expect(set(d for d, _ in over) == set(event.over), f"a wait says that {event.over!r} are over, and {[d for d, _ in over]!r} are")
        expect(set(flying) == set(event.flying) or (self.order.lags and set(flying) <= set(event.over)), f"a wait says that {event.flying!r} are on their way, and {flying!r} are")
        self.made.update(over)

    def release(self, event: Any) -> None:
        ring = event.ring
        readers = [d for group in self.groups for d, _ in group if ring in self.places.rings_of([d])]
        held = self.awaited[ring] - self.released[ring]
        expect(held > (1 if event.before and self.name == "round" else 0), f"{ring.name} is released before it is awaited")
        newest = (self.order.lags and self.name != "after") or (ring.in_turn and held > 1)         # which another stage has
        expect(not readers or (newest and len(self.groups) == 1), f"{ring.name} is released while {readers!r} read it")
        self.released[ring] += 1


def _counts(x: Counter[Any]) -> str:
    return ", ".join(f"{ring.name} {n} times" for ring, n in x.items())


def check_grid_order(order: Any) -> None:
    """Of rounds that only add."""
    rounds = order.rounds
    for count in range(4):
        filled = awaited = started = over = released = promoted = 0
        begun, read = set[int](), 0
        for event in [*order.before, *list(order.round) * count, *order.after]:
            if isinstance(event, Fill):
                filled += 1
            elif isinstance(event, Await):
                awaited += 1
                expect(awaited == started + 1 <= filled, "a stage is awaited out of turn")
            elif isinstance(event, Start):
                started += 1
                expect(started == awaited, "products start before their stage is full")
                expect(list(map(id, event.products)) == list(map(id, rounds.products)), "a round's products are not all there")
                expect(not rounds.promotes or promoted == started - 1 <= over, "sums of a stage are not added before the next ones begin")
                begun = set() if rounds.promotes else begun
                for product in rounds.products:
                    init = product.carried.init
                    if rounds.promotes:                # each stage's begin anew
                        expect((product in event.fresh) == (id(product.carried) not in begun), f"the sums of {product.a.name} go on")
                        begun.add(id(product.carried))
                        continue
                    expect((product in event.fresh) <= (id(product.carried) not in begun and init.op == "const" and init.data == 0),
                           f"the sums of {product.a.name} by {product.b.name} begin anew")
                    begun.add(id(product.carried))
            elif isinstance(event, Read):
                read += 1
                expect(read == awaited == released + 1 + (released < started - 1), "threads read a stage out of turn")
                expect(list(event.row_sums) == rounds.row_sums and list(event.column_sums) == rounds.column_sums, "sums are left out")
            elif isinstance(event, Wait):
                over = max(over, started - event.pending)
            elif isinstance(event, Promote):
                promoted += 1
                expect(promoted <= over, "sums are added while products add to them")
            elif isinstance(event, Release):
                released += 1
                expect(released <= over and (not rounds.is_read_by_threads or released <= read), "a stage is released while it is read")
        expect(filled == awaited == started == over == released == count + 1, f"of {count + 1} rounds {filled} are filled, {awaited} "
               f"awaited, {over} waited for and {released} released")
        expect(promoted == (count + 1 if rounds.promotes else 0), f"sums of {promoted} stages are added")
        expect(read == (count + 1 if rounds.is_read_by_threads else 0), "threads do not read each stage once")


# -- memory -------------------------------------------------------------------------------------------------------------------

class Region(NamedTuple):
    what: str
    first: int
    end: int
    alignment: int
    shares: str                        # regions of one name may overlap: loops that go around one ring, one after the other


def check_memory(text: Text) -> None:
    plan, constants, regions = text.plan, text.constants, list[Region]()
    for ring, tiles in text.tiles_of_rings.items():
        stages = text.rings[ring].stages if ring else 1
        per_loop = loops_of(text, tiles)
        for name in tiles:
            tile = text.tiles[name]
            nbytes = bytes_of(tile)
            expect(nbytes <= tile.stage_bytes, f"{name} has {nbytes} bytes in a stage of {tile.stage_bytes}")
            expect(len({text.tiles[other].stage_bytes for other in tiles}) == 1 or text.plan.is_multistage,
                   f"tiles of {ring} have stages of several lengths")
            regions += [Region(f"stage {n} of {name}", tile.offset + n * tile.stage_bytes, tile.offset + n * tile.stage_bytes + nbytes, 1024,
                               f"{ring}:{n}" if len(per_loop) > 1 or (ring and in_turn(text.plan)) else "") for n in range(stages)]
    for name, ring in text.of_kind(Pipeline).items():
        regions.append(Region(name, ring.offset, ring.end, 8, ""))
    for name, out in text.of_kind(collectives.TmaOut).items():
        nbytes = out.block_m * -(-out.columns // out.head.line) * out.head.line * out.dtype.itemsize
        regions.append(Region(name, out.o_offset, out.o_offset + nbytes, 1024, "results" if text.of_kind(sums.AddedOut) else ""))
    for name, added in text.of_kind(sums.AddedOut).items():
        expect(bytes_of(added) == added.stage_bytes, f"{name} has {bytes_of(added)} bytes in stages of {added.stage_bytes}")
        regions += [Region(f"stage {n} of {name}", added.offset + n * added.stage_bytes, added.offset + (n + 1) * added.stage_bytes, 1024, "results")
                    for n in range(constants["ring_added"].stages)]
    for name, place in text.of_kind(collectives.ComputedTile).items():
        expect(bytes_of(place) == place.stage_bytes, f"{name} has {bytes_of(place)} bytes in places of {place.stage_bytes}")
        consumers, copies = constants["WARPGROUPS"].consumers, 1 if is_recurrence(plan) else 2
        expect(place.barrier == collectives.MEETING if copies == 1 else (place.barrier, place.lines) == (1 + consumers, 64 * consumers),
               f"warpgroups meet about {name} at barrier {place.barrier}")
        regions += [Region(f"place {n} of {name}", place.offset + n * place.stage_bytes, place.offset + (n + 1) * place.stage_bytes, 1024, "")
                    for n in range(copies)]
    for scan in {x.offset: x for x in text.of_kind(sums.RowScan).values()}.values():
        regions.append(Region(f"sums at {scan.offset}", scan.offset, scan.offset + 4 * scan.columns * scan.warps, 16, ""))
    for name, kept in text.of_kind(sums.ColumnValues).items():
        regions.append(Region(name, kept.offset, kept.offset + 4 * kept.sums.columns, 16, ""))
    total, bound = constants["SHARED_BYTES"], plan.device.shared_memory_per_block
    said = resizing_of(plan).mapping.shared_bytes
    expect(total <= min(bound, said or bound), f"{total} bytes of shared memory, of {min(bound, said or bound)}")
    for region in regions:
        expect(region.first % region.alignment == 0, f"{region.what} begins at byte {region.first}, no multiple of {region.alignment}")
        expect(0 <= region.first < region.end <= total, f"{region.what} lies from {region.first} to {region.end}, of {total} bytes")
    for one, other in itertools.combinations(sorted(regions, key=lambda x: x.first), 2):
        if other.first < one.end:
            expect(one.shares and one.shares == other.shares and (one.shares == "results" or _in_two_loops(text, one.what, other.what)),
                   f"{one.what} and {other.what} overlap from byte {other.first} on")
    check_registers(text)


def loops_of(text: Text, tiles: list[str]) -> list[set[str]]:
    """The tiles of each loop that go around one ring."""
    resizing: Any = text.plan.resizing
    if not isinstance(resizing, plans.GridResizing):
        return [set(tiles)]
    loops = [{f"{tile.name}_tile" for tile in rounds.tiles} for rounds in resizing.problem.places.loops]
    return [loop & set(tiles) for loop in loops if loop & set(tiles)]


def _in_two_loops(text: Text, one: str, other: str) -> bool:
    if in_turn(text.plan):             # stages have one block after the other
        return True
    names = [what.rpartition(" ")[2] for what in (one, other)]
    loops = loops_of(text, names)
    return len(loops) == 2 and not loops[0] & loops[1]


def check_registers(text: Text) -> None:
    """Of a thread: sums and fragments of A beside what a mapping's limits leave for the rest; and of a block, 65536."""
    plan, groups = text.plan, text.constants["WARPGROUPS"]
    assert isinstance(groups, Warpgroups)
    resizing: Any = plan.resizing
    if isinstance(resizing, plans.GridResizing):
        memory = choose(resizing.problem, plan.device).spec[1]
        products = text.of_kind(collectives.Product, multistage.MmaProduct)
        cells = max(len(resizing.problem.places.starts), 1)
        most = max(product.values for product in products.values()) * cells
        expect(2 * most <= memory.kernel.most_sums[groups.consumers], f"{most} sums of a thread")
    elif not is_recurrence(plan):
        choice, kernel = resizing.made.choice, resizing.made.problem.kernel
        if in_turn(plan):              # products go one after the other
            body, size = resizing.made.chain.body, choice.size
            handed = {x: size(x.dims[1]) // 4 for x in body if x.op == "handover"}
            dots = [x for x in body if x.op == "dot"]
            begun = {x.args[2] for x in dots if x.args[2:]}                    # parts of products
            alone = {x: [y for y in dots[:n] if y not in begun and not chains.depends(x, {y}, {*body})] for n, x in enumerate(dots)}
            need = max(sum(size(y.dims[1]) // 2 for y in (x, *alone[x])) + handed.get(x.args[0], 0) for x in dots)
            room = max(kernel.room[choice.warpgroups] + (schedule.AT_ONCE[choice.warpgroups] if kernel.uses_tma and not choice.ahead else 0),
                       192 if choice.warpgroups < 3 else 0)
        else:
            rounds = [loop for loop in ast.walk(text.functions["consume" if "consume" in text.functions else "kernel"])
                      if isinstance(loop, ast.While) and not any(isinstance(x, ast.While) for x in ast.walk(loop) if x is not loop)]
            need = max(most_live(text, loop) for loop in rounds)
            room = kernel.room[choice.warpgroups] + (schedule.AT_ONCE[choice.warpgroups] if kernel.uses_tma and not choice.ahead else 0)
            room += 2 * schedule.AT_ONCE[choice.warpgroups] * bool(resizing.made.chain.added)
        expect(need <= room, f"sums and fragments of {need} registers, of {room}")
        expect(groups.consumers == choice.warpgroups, f"{groups.consumers} warpgroups of {choice.warpgroups}")
    if groups.few:
        expect(groups.few % 8 == 0 == groups.many % 8 and 128 * (groups.few + groups.many * groups.consumers) <= 65536 and groups.many <= 255,
               f"registers {groups.few} and {groups.many}")
    expect(plan.printed.threads == groups.threads <= 1024, f"{plan.printed.threads} threads, of {groups.threads}")


def most_live(text: Text, loop: ast.While) -> int:
    """The most registers of a thread that sums, what is made of them and fragments have at once in a round, as its text names
    them; without what rare rounds compute."""
    rare = {x for node in text.nodes if isinstance(node, ast.If) for x in ast.walk(node)}
    sizes, same = dict[str, int](), dict[str, str]()
    assigned = [node for node in text.nodes if isinstance(node, ast.Assign) and node not in rare]
    for node in sorted(assigned, key=lambda node: node.lineno):        # what a value is made of stands before it
        for target, value in _pairs(node):
            same.update({target.id: value.id} if isinstance(value, ast.Name) else {})
            found = _registers_of(text, value, sizes) if isinstance(value, ast.Call) else sizes.get(same.get(target.id, ""), 0)
            sizes.update({target.id: found} if found else {})
    kept = _kept(text, [node for node in loop.body if node not in rare])
    sizes = {name: size for name, size in sizes.items() if name in kept and size > 2}    # others are folded, or of rows
    lines = [({same.get(name, name) for name in bound(node)},
              {same.get(x.id, x.id) for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)})
             for node in loop.body if node not in rare]
    live = {name for made, _ in lines for name in made if _is_carried(name, lines)}
    most = 0
    for made, used in reversed(lines):
        most = max(most, sum(sizes.get(name, 0) for name in live | made))
        live = (live - made) | used
    return max(most, sum(sizes.get(name, 0) for name in live))


def _kept(text: Text, lines: list[ast.stmt]) -> set[str]:
    """The names of which something is needed but for folds of rows: these take an element at a time, and so does what is
    applied to make another one that they alone take."""
    folded = {x for node in text.nodes if isinstance(node, ast.Call) and text.said(node.func) in ("row_max", "own_sum") for x in node.args}
    made = [(node.targets[0].id, node.value) for node in lines if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call) and text.said(node.value.func) == "apply"]
    applied, elements = {name for name, _ in made}, {x for _, call in made for x in ast.walk(call)}
    kept = {x.id for node in lines for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)
            and x not in folded and not (x in elements and x.id in applied)}
    while True:
        more = {x.id for name, call in made if name in kept for x in ast.walk(call) if isinstance(x, ast.Name)} - kept
        if not more:
            return kept
        kept |= more


def _pairs(node: ast.Assign) -> list[tuple[ast.Name, ast.expr]]:
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [(x, y) for x, y in zip(target.elts, value.elts) if isinstance(x, ast.Name) and x is not y]
    return [(target, value)] if isinstance(target, ast.Name) else []


def _is_carried(name: str, lines: list[tuple[set[str], set[str]]]) -> bool:
    """Whether a round uses what the round before has left: as its first line that has the name does."""
    return next(name in used for made, used in lines if name in made | used)


def _registers_of(text: Text, call: ast.Call, sizes: dict[str, int]) -> int:
    """Of what a call makes, if it is a matrix."""
    of = call.func
    if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name):
        product = text.constants.get(of.value.id)
        if of.attr in ("begin", "multiply", "multiply_apart", "multiply_half"):
            return int(product.values)
        return _largest(call.args, sizes) // 2 if of.attr in ("fragments", "rectified") else 0
    if isinstance(of, ast.Name) and of.id in ("fill", "generate"):
        count = call.args[of.id == "fill"]
        return int(count.value) if isinstance(count, ast.Constant) else 0
    if isinstance(of, ast.Name) and of.id == "apply":
        return _largest(call.args[1:2], sizes)
    return 0


def _largest(args: Iterable[ast.expr], sizes: dict[str, int]) -> int:
    return max((sizes.get(x.id, 0) for arg in args for x in ast.walk(arg) if isinstance(x, ast.Name)), default=0)


def check_spare(plan: plans.ProgramPlan) -> None:
    """Arrays in the stream's memory: what the first kernel stores lies apart, and is what the second one reads."""
    counted = bool(plan.resizing and getattr(getattr(plan.resizing, "made", None), "choice", None) and plan.resizing.made.choice.ordered)
    if counted:
        made, info = plan.resizing.made, plan.infos["turn_counts"]     # type: ignore[union-attr]
        blocks = -(-made.chain.sizes[made.chain.index.extent] // made.choice.blocks[made.chain.index.name])
        expect(plan.spare == ("turn_counts",) and info.dtype == np.uint32 and info.shape[0] >= blocks, f"counters are {info}")
        return
    if plan.merge is None:
        expect(not plan.spare, "arrays of the stream's memory that nothing merges")
        return
    stored = np.zeros(0, np.int32)
    owner: dict[int, str] = {}
    for name in plan.spare:
        info, at = plan.infos[name], plan.infos[name].pointer - BEGIN
        expect(at >= 0 and at % 16 == 0, f"{name} begins at byte {at}")
        count = math.prod(info.shape)
        expect(info.strides == tuple(math.prod(info.shape[n + 1:]) for n in range(len(info.shape))), f"{name} has strides {info.strides}")
        for other, begin in list(owner.items()):
            end = other + 4 * math.prod(plan.infos[begin].shape)
            expect(at + 4 * count <= other or end <= at, f"{name} and {begin} overlap")
        owner[at] = name
    read = [np.zeros(0, np.int64)]     # where, in four bytes each
    for name in plan.merge.spare:
        info = plan.merge.infos[name]
        first = (info.pointer - BEGIN) // 4
        places = first + sum((np.arange(n) * stride).reshape(-1, *[1] * (len(info.shape) - axis - 1))
                             for axis, (n, stride) in enumerate(zip(info.shape, info.strides))) if min(info.shape) else stored
        read.append(np.ravel(places))
    places = np.concatenate(read)
    prefixes = {name.rpartition("_")[0] for name in plan.merge.spare}
    whole, of_read = (_places_of(plan, names) for names in (plan.spare, [name for name in plan.spare if name.rpartition("_")[0] in prefixes]))
    expect(places.min(initial=0) >= 0 and places.max(initial=-1) < len(whole), "what is merged has not been stored")
    times = np.bincount(places, minlength=len(whole))
    expect((times <= 1).all(), "two parts are one")
    expect(whole[times == 1].all(), "what is merged has not been stored")
    expect(np.array_equal(times == 1, np.append(of_read, np.zeros(len(whole) - len(of_read), bool))), "some of what is stored is not merged")


def _places_of(plan: plans.ProgramPlan, names: Iterable[str]) -> np.ndarray:
    """Whether each four bytes of the stream's memory are one of these arrays'."""
    spans = [((plan.infos[name].pointer - BEGIN) // 4, math.prod(plan.infos[name].shape)) for name in names]
    out = np.zeros(max((first + count for first, count in spans), default=0), bool)
    for first, count in spans:
        out[first:first + count] = True
    return out


# -- maps ---------------------------------------------------------------------------------------------------------------------

def check_maps(text: Text) -> None:
    plan, blocks = text.plan, text.blocks
    names = [block.name for block in blocks]
    expect(len(set(names)) == len(names), f"blocks are called {names}")
    expect({f"{name}_tile" for name in names} == set(text.tiles), f"blocks are {names}, and tiles {list(text.tiles)}")
    for block in blocks:
        tile, info = text.tiles[f"{block.name}_tile"], plan.infos[block.array]
        expect((tile.lines, tile.columns) == block.size, f"{block.name} is {block.size}, and its tile {tile.lines} x {tile.columns}")
        expect(tile.dtype == block.dtype == info.dtype, f"{block.name} has dtype {block.dtype}, its tile {tile.dtype}")
        expect(len(block.stacks) == len(info.shape) - 2, f"{block.name} is of the stacks {block.stacks}, and has {info.shape}")
        expect(getattr(tile, "stacks", len(block.stacks)) == len(block.stacks), f"{block.name} is of the stacks {block.stacks}: {tile}")
        for axis, dim in enumerate(block.dims):
            expect(isinstance(dim, Axis) or held(tile)[axis] == block.size[axis], f"{block.name} takes {held(tile)[axis]} of {dim}")
            if isinstance(dim, Axis):
                unit = plan.resizing.made.chain.unit if isinstance(plan.resizing, plans.ChainResizing) else 1
                whole, least = info.shape[len(info.shape) - 2 + axis], -(-dim.size // unit) * unit
                is_part = in_turn(plan) and dim.size % 32 == 0 and dim.size < whole
                expect((whole == dim.size or is_part) and least <= block.size[axis], f"{block.name} takes {dim} of {info.shape}")
                padded = {max(least, 2 * of.width) for of in text.of_kind(collectives.Product, collectives.HandedProduct, multistage.MmaProduct,
                                                                            multistage.HandedMmaProduct).values() if of.b is tile}
                expect(least == block.size[axis] or (axis and block.size[axis] in padded), f"{block.name} has {block.size[axis]} of {dim}")
    kernel = [arg.arg for arg in text.functions["kernel"].args.args]
    if plan.is_multistage:
        copied = {block.array for block in blocks} - {*plan.printed.outs}
        expect(not plan.printed.maps and set(plan.printed.operands) == copied, "operands that threads copy")
    else:
        brought = [b for b in blocks if not isinstance(text.tiles[f"{b.name}_tile"], pieces.NamedTile)]
        expect(sorted(plan.printed.maps) == sorted((b.name, b.array) for b in brought), f"maps are {plan.printed.maps}, and blocks {names}")
        loads = Counter[tuple[str, str]]()
        for call in ast.walk(text.functions["produce"]):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LOADS:
                loads[ast.unparse(call.func.value).removesuffix("_tile"), ast.unparse(call.args[0])] += 1
        expect(set(loads) == {(b.name, f"map_{b.name}") for b in brought}, f"blocks are loaded by maps {sorted(loads)}")
    wanted = ["sizes"]
    for array, slot in plan.taken:
        block = next((b.name for b, (name, of) in itertools.product(blocks, plan.printed.maps) if slot is not None and b.name == name
                      and of == array and f"map_{name}" not in wanted), None) if len(wanted) <= len(plan.printed.maps) else None
        is_second = block is None and array in wanted and array in plan.printed.outs           # of a result that threads store, or read
        is_stored = f"{collectives.ROWS_OF}{array}" in {*kernel} - {*wanted}
        second = f"{collectives.ROWS_OF if is_stored else BEFORE}{array}"
        wanted.append(second if is_second else array if block is None else f"map_{block}")
        if slot is None:
            continue
        spec = slot.spec
        if block is not None:
            tile = text.tiles[f"{block}_tile"]
            line, lines = spec.box[:2]
            whole = tile.part[0] * line * lines * tile.parts * tile.dtype.itemsize
            expect(line == tile.line and line * tile.size in (64, 128) and lines == tile.part[1] <= 256 and whole == bytes_of(tile),
                   f"the map of {block} brings {spec.box}, and a block is {tile.lines} x {tile.columns} in {tile.parts} parts")
            expect(spec.swizzle == tile.size * line and spec.rank == 2 + tile.stacks and spec.dtype == plan.infos[array].dtype, f"the map of {block}: {spec}")
        expect(slot.info is plan.infos[array] or slot.info == plan.infos[array], f"a map of {array} describes another array")
    wanted += plan.printed.callees.names
    expect(kernel == wanted, f"the kernel takes {kernel}, and is given {wanted}")
    check_outs(text)
    check_before(text)
    for name, tile in text.of_kind(collectives.StagedTile).items():
        shares = {collectives.ROW: tile.cluster.n, collectives.COLUMN: tile.cluster.m}.get(tile.peers, 1)
        expect((tile.parts == shares or bool(tile.page)) and (not tile.peers or shares > 1), f"{name} is shared by {shares} blocks: {tile.peers!r}")
        block = next(b for b in blocks if f"{b.name}_tile" == name)
        check_peers(text, block, tile)


def check_before(text: Text) -> None:
    """Results that are read before they are stored: by `called.element_before` alone, of an element that is there; nothing takes one behind
    its store, and lanes that exchange what they store have met."""
    results = {f"{BEFORE}{name}": name for name in text.plan.printed.outs if any(
        isinstance(node, ast.Name) and node.id == f"{BEFORE}{name}" for node in text.nodes)}
    expect(results.keys() <= {f"{BEFORE}{name}" for name in text.plan.printed.updated}, f"{[*results]} are read, and {text.plan.printed.updated} updated")
    for name, of in text.functions.items():
        takes = results.keys() & {arg.arg for arg in of.args.args}
        for node in ast.walk(of):
            is_read = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in takes
            expect(not is_read, f"{name} reads an element that another thread may have stored: {text.said(node)}")
            if isinstance(node, ast.Call) and text.said(node.func) == "element_before":
                at, there = node.args[1:]
                expect(isinstance(at, ast.Tuple) and isinstance(there, (ast.Compare, ast.BoolOp)), f"{name} asks for {text.said(node)}")
        for block in (getattr(node, "body", ()) for node in ast.walk(of)):         # a tile's end may be printed in two
            lines = [text.said(node) for node in block if isinstance(node, (ast.Expr, ast.Assign))] if isinstance(block, list) else []
            for n, line in enumerate(lines):
                result = line.partition(".store(")[0].removeprefix("out_")
                if f"{BEFORE}{result}" not in results or not line.startswith(f"out_{result}.store("):
                    continue
                late = [x for x in lines[n + 1:] if f"{BEFORE}{result}," in x]
                expect(not late, f"{result} is stored before {', '.join(late)}")
                exchanges = isinstance(text.constants[f"out_{result}"], (collectives.OctetOut, pieces.PieceOut))
                expect("warp_barrier()" in lines[:n] or not exchanges, f"lanes exchange {result}, and have not met since they read it")


def check_outs(text: Text) -> None:
    """Ways out have their results' dtype and shape, and the tile's rows and columns."""
    plan, resizing = text.plan, text.plan.resizing
    groups = text.constants["WARPGROUPS"].consumers
    if isinstance(resizing, plans.GridResizing):
        m, n = (plan.mapping.blocks[index.name] for index in resizing.problem.places.indices)
    else:
        m, n = 64 * groups, 0
    expect(m in (64 * groups, 64 * groups * len(text.sizes_of_parts)), f"tiles of {m} rows for {groups} warpgroups")
    for name in plan.printed.outs:
        if name in plan.spare and plan.merge is None:  # counters
            continue
        out, info = text.constants[f"out_{name}"], plan.infos[name]
        one = isinstance(out, (collectives.RowsOut, sums.ColumnsOut))
        stacks = len(info.shape) - (1 if one else 2)
        expect(out.dtype == info.dtype and getattr(out, "stacks", stacks) == stacks, f"{name} is {info.dtype} of {info.shape}, and leaves by {out}")
        unit = resizing.made.chain.unit if isinstance(resizing, plans.ChainResizing) else 1
        columns = n or -(-info.shape[-1] // unit) * unit
        if isinstance(resizing, plans.ChainResizing) and resizing.made.chain.wide and 256 < columns <= 512 and not one:
            columns = -(-columns // 128) * 64
            expect(getattr(out, "clipped", True) or 2 * columns == info.shape[-1], f"{name} leaves by {out}, and has {info.shape[-1]} columns")
        if isinstance(out, collectives.TmaOut):
            expect((out.block_m, out.columns) == (m, columns), f"{name} leaves by {out}, and tiles are {m} x {columns}")
        if isinstance(out, sums.AddedOut):
            step = resizing.made.choice.blocks[resizing.made.chain.index.name]
            expect((out.lines, out.columns, out.packed) == (step, columns, resizing.made.chain.index.piece is not None), f"{name} is added by {out}")
        if isinstance(out, collectives.OctetOut):
            expect((columns + out.more) % 32 == 0 and info.shape[-1] % 8 == 0 and (out.clipped or not (n or out.more or columns > info.shape[-1])),
                   f"{name} leaves by {out}, and has {columns} columns")
        if isinstance(out, sums.ColumnsOut):
            expect((out.columns, out.threads) == (columns, 128 * groups), f"{name} leaves by {out}, and tiles have {columns} columns")
        if isinstance(out, collectives.DirectOut) and out.pairs:
            expect(plans.in_pairs(info), f"{name} leaves in pairs, and has strides {info.strides}")


def check_peers(text: Text, block: Staged, tile: Any) -> None:
    """Blocks of a cluster share what has none of the dimension in which they differ."""
    resizing: Any = text.plan.resizing
    if isinstance(resizing, plans.GridResizing):
        m, n = resizing.problem.places.indices
        along = {collectives.ROW: n, collectives.COLUMN: m}
    else:
        along = {collectives.COLUMN: resizing.made.chain.rows}
    if tile.peers:
        expect(tile.peers in along and along[tile.peers] not in block.dims, f"{block.name} is not the same for a {tile.peers} of tiles")
    cluster = text.plan.cluster
    wanted = {collectives.ROW: cluster.n, collectives.COLUMN: cluster.m}
    could = [peers for peers, index in along.items() if wanted[peers] > 1 and index not in block.dims]
    expect(len(could) <= 1 and tile.peers == (could[0] if could else ""), f"{block.name} could be shared by {could}, and is by {tile.peers!r}")


def check_barriers(text: Text) -> None:
    """How many arrive at a ring's barriers: one producer, and each reader of each block that reads what is brought."""
    groups, cluster = text.constants["WARPGROUPS"], text.plan.cluster
    for name, ring in text.of_kind(Pipeline).items():
        tiles = [text.tiles[tile] for tile in text.tiles_of_rings[name]]
        if name == "ring_added":
            expect((ring.full_arrivals, ring.empty_arrivals, ring.readers) == (1, 4 * groups.consumers, WARPS) and ring.stages < 3, f"{name}: {ring}")
            continue
        if name == "ring_columns":
            expect((ring.full_arrivals, ring.empty_arrivals, ring.readers) == (32, 4 * groups.consumers, WARPS), f"{name}: {ring}")
            continue
        by_threads = _is_read_by_threads(text, name)
        shared = any(tile.peers for tile in tiles)
        each = (4 if by_threads else 1) * groups.consumers
        readers = {True: {True: CLUSTER_WARPS, False: CLUSTER}, False: {True: WARPS, False: THREAD}}[shared][by_threads]
        expect(ring.readers == readers, f"{name} is released by {ring.readers}, and {readers} are needed")
        for rank in range(cluster.size if shared else 1):
            count = sum(bool(cluster.reads_of(peer, rank)) for peer in range(cluster.size)) if shared else 1
            expect(ring.empty_arrivals == each * count, f"{name} waits for {ring.empty_arrivals} readers, of {each * count}")
        fillers = 1 + pieces.PRODUCERS * sum(isinstance(tile, pieces.NamedTile) for tile in tiles)
        expect(ring.full_arrivals == fillers and not ring.has_raw, f"{name} waits for {ring.full_arrivals} arrivals, of {fillers}")
        expect(not shared or ring.cluster == cluster, f"{name} is of another cluster")
    for name, turns in text.of_kind(OrderBarrier).items():
        expect(turns.consumers == groups.consumers and turns.barrier == 1 + groups.consumers and turns.taken, f"{name}: {turns}")
        expect(turns.barrier + turns.consumers <= 16, f"{name} takes barriers up to {turns.barrier + turns.consumers}")


def _is_read_by_threads(text: Text, ring: str) -> bool:
    read = [of.tile for of in text.of_kind(sums.RowSums, sums.ColumnSums).values()]
    return any(text.tiles[tile] in read for tile in text.tiles_of_rings[ring])
