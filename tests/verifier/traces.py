"""Both roles of a text against each other: on every path what each does with its rings, and with numbers what they do together."""

from __future__ import annotations

import ast
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gemmkit.kernels.rows import TurnedTeam
from gemmkit.programs import collectives, sums
from gemmkit.programs import plan as plans
from gemmkit.programs.chains.chain import ProductPart, dots, late_values
from gemmkit.programs.places import walked
from gemmkit.programs.values import Axis
from tests.verifier.texts import Text, expect
from tests.verifier.walks import ADDED, COLUMNS, PASSING, TURNS, Given, State, Walk

Log = list[tuple[Any, ...]]
Taken = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], Log]               # a block's tiles, products and events


def check_paths(text: Text) -> None:
    """Of the producer's thread, of those that add and pass turns on, and one of the consumers'."""
    for thread in (0, *adders(text), *[PASSING] * ("pass_on" in text.functions or "bring" in text.functions), 128):
        for state in Walk(text, thread).run():
            check_end(text, thread, state)


def adders(text: Text) -> list[int]:
    """The thread of each stage of what rounds add."""
    return [32 * (1 + n) for n in range(text.constants[ADDED].stages)] if ADDED in text.constants else []


def check_end(text: Text, thread: int, state: State) -> None:
    """When a role is over: all is released, nothing is on its way, and all threads have met in the right order."""
    events = [event for event in state.log if event[0] in SETTING_UP]
    cluster = text.plan.cluster
    met = [("barrier",) if cluster.is_single else ("cluster_barrier",)]
    begins = [*[("initialise", name) for name in text.rings], ("mbarrier_fence_init",)] if thread == 0 else []
    early = [] if TURNS in text.parameters("kernel") else [("grid_launch_dependents",), ("grid_wait",)]      # blocks that wait for each other run alone
    wanted = [*begins, *met, *early, ("release_registers",) if thread < 128 else ("claim_registers",), *([] if cluster.is_single else met)]
    expect(sorted(events) == sorted(wanted) and [x for x in events if x[0] != "initialise"] == [x for x in wanted if x[0] != "initialise"],
           f"thread {thread} sets up {events}, and not {wanted}")
    expect(thread >= 128 or state.turn == 0, "a turn is not over at the end")
    if thread >= 128:
        expect(not state.put, f"{state.put} is put, and not taken")
        expect(not state.groups and state.open is None, "products are on their way at the end")
        for name, ring in state.rings.items():
            expect(ring.filled == ring.released, f"{name}: of {ring.filled} stages that are awaited {ring.released} are released")
        expect(state.turn in (0, 1), "a turn is not given on")
        finished = [event[1] for event in state.log if event[0] == "finish"]
        outs = [f"out_{name}" for name in text.plan.printed.outs if (name not in text.plan.spare or text.plan.merge is not None)
                and not isinstance(text.constants[f"out_{name}"], sums.AddedOut)]
        expect(sorted(finished) == sorted(outs), f"{finished} are finished, and {outs} are stored")
    first = next((n for n, event in enumerate(state.log) if event[0] in ("fill", "wait", "store")), len(state.log))
    expect(("grid_wait",) in state.log[:first] or not early, "memory is touched before the kernel before is over")


SETTING_UP = ("initialise", "barrier", "cluster_barrier", "mbarrier_fence_init", "grid_launch_dependents", "grid_wait",
              "release_registers", "claim_registers")


# -- with numbers -------------------------------------------------------------------------------------------------------------

class Case(NamedTuple):
    numbers: dict[str, float]
    grid: int                          # clusters of blocks
    votes: bool
    held: dict[str, int] = {}          # what each element of arrays of lengths is
    offsets: dict[str, list[int]] = {}


def check_traces(text: Text) -> None:
    program: Any = _ChainProgram(text) if isinstance(text.plan.resizing, plans.ChainResizing) else _GridProgram(text)
    for case in program.cases():
        _check_case(text, program, case)


def _check_case(text: Text, program: Any, case: Case) -> None:
    cluster, multistage = text.plan.cluster.size, text.plan.is_multistage
    tiles = int(text.index_functions["tiles"](_Numbers(case.numbers)))
    grid = tiles if multistage else min(tiles, case.grid) * cluster
    stored = defaultdict[str, list[tuple[Any, ...]]](list)
    taken, kept = list[Taken](), list[Log]()
    for block in range(grid):
        def walked(thread: int, block: int = block) -> Log:
            (state,) = Walk(text, thread, Given(case.numbers, block, grid, case.votes, case.held, case.offsets, program.watched)).run()
            if not multistage:
                check_end(text, thread, state)
            return state.log

        groups = text.constants["WARPGROUPS"].consumers
        first = 0 if multistage else 128
        consumer = walked(first)
        if block == 0:
            for group in range(1, groups):
                program.check_alike(consumer, walked(first + 128 * group), group)
        products = [event[2] for event in consumer if event[0] == "multiply"]
        _check_sums(text, consumer, len(program.tiles_of(consumer, case)) // len(text.sizes_of_parts))
        if not multistage:
            places = _replayed(text, walked(0), consumer)
            own = [walked(thread) for thread in adders(text)]
            if COLUMNS in text.constants:
                brought, begun = ([event[1] for event in log if event[0] == what] for log, what in ((walked(PASSING), "brought"), (consumer, "begun")))
                expect(brought == begun, f"columns of {brought} are brought, and rounds begin at {begun} ({case})")
            consumer += sorted((event for log in own for event in log if event[0] == "added"), key=lambda event: event[2])
            if TURNS in text.parameters("kernel"):
                kept += own
                kept += [walked(thread) for thread in range(PASSING, 128)] if "pass_on" in text.functions else []
            products = [tuple((name, places[ring][at][name]) for name, ring, at in tiles_of) for tiles_of in products]
        for event in consumer:
            if event[0] == "store":
                stored[event[1]].append((event[2].name, event[3], block))
        taken.append((program.tiles_of(consumer, case), products, consumer))
    program.check(case, stored, taken)
    check_turns(kept, case)


def check_turns(kept: list[Log], case: Case) -> None:
    """Each counter is awaited by one tile after the other, and is 0 at the end. Some block can always go on."""
    counts, at = Counter[int](), [0] * len(kept)
    steps = [[event for event in log if event[0] in ("await_counter", "atomic_add")] for log in kept]
    seen = set[tuple[int, int]]()
    while any(n < len(own) for n, own in zip(at, steps)):
        moved = False
        for block, own in enumerate(steps):
            while at[block] < len(own):
                what, place, number = own[at[block]]
                if what == "await_counter" and counts[place] < number:
                    break
                expect(what == "atomic_add" or (place, number) not in seen, f"counter {place}: turn {number} comes twice ({case})")
                seen |= {(place, number)} if what == "await_counter" else set()
                counts[place] += number * (what == "atomic_add")
                at[block], moved = at[block] + 1, True
        expect(moved, f"counters are {dict(counts)}, and all blocks wait for ever ({case})")
    expect(not any(counts.values()), f"counters are left at {dict(counts)} ({case})")


def _check_sums(text: Text, log: Log, tiles: int) -> None:
    """What threads add up of a stage they read once, when a product does; sums of columns go to shared memory once a tile."""
    for name, of in text.of_kind(sums.RowSums, sums.ColumnSums).items():
        tile = next(key for key, value in text.tiles.items() if value is of.tile)
        added = Counter(event[2] for event in log if event[:2] == ("add", name))
        taken = {x for event in log if event[0] == "multiply" for x in event[2] if x[0] == tile}
        if not taken:                                  # what no product takes is added up in each of their rounds
            others = {x for event in log if event[0] == "multiply" for x in event[2]}
            rounds = max(Counter(x[0] for x in others).values(), default=0)
            expect(len(added) == rounds and {x[0] for x in added} <= {tile}, f"{name} adds up {sorted(added)}, in {rounds} rounds")
            taken = set(added)
        expect(set(added) == taken, f"{name} adds up {sorted(added)}, and products take {sorted(taken)}")
    for name in text.of_kind(sums.ColumnValues):
        puts = sum(event == ("put", name) for event in log)
        expect(puts == tiles or (not tiles and puts), f"{name} is put {puts} times, for {tiles} tiles")


def _moved(log: Log, down: int) -> Log:
    """Events, with stores of rows that are further up; without what is added, which warpgroups have parts of."""
    return [(*event[:3], (event[3][0] - down, *event[3][1:])) if event[0] == "store" else event for event in log if event[0] != "part"]


def _replayed(text: Text, producer: Log, consumer: Log) -> dict[str, list[dict[str, Any]]]:
    """All roles side by side, and each warpgroup's turn: none waits for ever. Returns what each filling of a ring has brought."""
    groups = text.constants["WARPGROUPS"].consumers
    fills = [event for event in producer if event[0] == "fill"]
    steps = [event[:2] for event in consumer if event[0] in ("wait", "release") or event in (("turn", "wait"), ("turn", "give"))]
    steps = [event for event in steps if event[1] != ADDED]
    filled, released = Counter[str](), [Counter[str]() for _ in range(groups)]
    awaited, at, turn = [Counter[str]() for _ in range(groups)], [0] * groups, 0
    places = defaultdict[str, list[dict[str, Any]]](list)
    n = 0
    while n < len(fills) or min(at) < len(steps):
        moved = False
        while n < len(fills) and filled[fills[n][1]] - min(x[fills[n][1]] for x in released) < text.rings[fills[n][1]].stages:
            filled[fills[n][1]] += 1
            places[fills[n][1]].append(fills[n][2])
            n, moved = n + 1, True
        for group in range(groups):
            while at[group] < len(steps):
                what, which = steps[at[group]]
                if (what == "wait" and awaited[group][which] == filled[which]) or (what, which, turn == group) == ("turn", "wait", False):
                    break
                if what != "turn":
                    (awaited if what == "wait" else released)[group][which] += 1
                elif which == "give":
                    turn = (group + 1) % groups
                at[group], moved = at[group] + 1, True
        expect(moved, f"the producer has filled {dict(filled)}, consumers have awaited {list(map(dict, awaited))}, and warpgroup {turn} has its "
               "turn: all wait for ever")
    expect(all(filled == x == y for x, y in zip(awaited, released)), f"{dict(filled)} stages are filled, {list(map(dict, awaited))} awaited and "
           f"{list(map(dict, released))} released")
    return places


class _Numbers:
    def __init__(self, numbers: dict[str, float]):
        self.__dict__.update(numbers)


class _GridProgram:
    """What a grid of tiles of rows and columns is to do."""

    def __init__(self, text: Text):
        self.text, resizing = text, text.plan.resizing
        assert isinstance(resizing, plans.GridResizing)
        self.places = resizing.problem.places
        self.blocks = {block.name: block for block in text.blocks}
        self.sizes = {str(k): v for k, v in text.plan.mapping.blocks.items()}
        self.m, self.n = (index.name for index in self.places.indices)
        self.stacks = [stack.name for stack in self.places.stacks]

    def cases(self) -> Iterator[Case]:
        m, n, cluster = self.sizes[self.m], self.sizes[self.n], self.text.plan.cluster
        most = max(getattr(ring, "stages", 1) for ring in self.text.rings.values())
        for rows, columns, rounds, count, grid in ((1, 1, 1, 1, 1), (m * cluster.m + 1, 3 * n - 1, 2, 2, 2), (3 * m + 1, n, most + 2, 1, 1)):
            numbers = {self.m: rows, self.n: columns, **dict.fromkeys(self.stacks, count)}
            for r in self.places.loops:
                step = self.sizes[r.index.name]
                numbers[r.index.name] = rounds * step - (rounds > 1 and step // 2)
            yield self.of_pieces(Case({**dict.fromkeys(self.text.plan.printed.scalars, 1.0), **numbers}, grid, False))

    @property
    def pieces_of(self) -> Any:
        """The index along whose pieces tiles or rounds go."""
        return next((index for index in (self.places.indices[0], *(r.index for r in self.places.loops)) if index.piece is not None), None)

    def of_pieces(self, case: Case) -> Case:
        """With pieces of all rows, none, and one. Some rows are of no piece."""
        index = self.pieces_of
        if index is None:
            return case
        cuts = list(itertools.accumulate([2, int(case.numbers[index.name]), 0, 1, int(case.numbers[index.name]) + 1]))
        return case._replace(numbers={**case.numbers, index.piece.name: 4, index.name: cuts[-1] + 3}, offsets={index.extent.offsets.name: cuts})

    def piece_at(self, h: tuple[Any, ...], case: Case) -> tuple[int, int]:
        """Where the piece begins of tiles of these stacks, and its rows."""
        which = h[self.stacks.index(self.pieces_of.piece.name)]
        begin, end = case.offsets[self.pieces_of.extent.offsets.name][which:which + 2]
        return begin, end - begin

    def check_alike(self, one: Log, other: Log, group: int) -> None:
        """Warpgroups do the same, of rows further down. One without rows of a piece awaits and releases stages alone."""
        if not self.has_packed_rows or self.places.column_starts:
            expect(_moved(one, 0) == _moved(other, 64 * group), f"warpgroup {group} does not do what the first one does")
            return
        wanted, tile = list[Any](), list[Any]()
        for event in [event for event in one if event[0] in ("multiply", "add", "store")]:
            tile.append(event)
            if event[0] == "store" and event[3][0] + 64 * group < event[3][2]:
                wanted += tile
            tile = [] if event[0] == "store" else tile
        found = [event for event in _moved(other, 64 * group) if event[0] in ("multiply", "add", "store")]
        expect(found == wanted, f"warpgroup {group} does not do what the first one does, where it has rows")
        for what in ("wait", "release"):
            counts = [Counter(event for event in log if event[0] == what) for log in (one, other)]
            expect(counts[0] == counts[1], f"warpgroups {what} {counts}")

    @property
    def has_packed_rows(self) -> bool:
        return self.pieces_of is not None and self.pieces_of is self.places.indices[0]

    watched: tuple[str, ...] = ()      # names whose numbers are noted with a product

    def tiles_of(self, log: Log, case: Case) -> list[tuple[Any, ...]]:
        """In order: (which of the stacks, row, column)."""
        outs = {name: out for name, out in self.text.constants.items() if name.startswith("out_")}
        whole = [name for name, out in outs.items() if not isinstance(out, (collectives.RowsOut, sums.ColumnsOut))]
        found = [event[3] for event in log if event[0] == "store" and event[1] == whole[0]] if whole else []
        if not self.has_packed_rows:
            return [(stacks[::-1], row, column) for row, column, _, _, stacks in found]
        cuts = case.offsets[self.pieces_of.extent.offsets.name]
        which = [cuts.index(end, 1) - 1 for _, _, end, _, _ in found]          # those without rows are behind it
        return [((i,), row - cuts[i], column) for i, (row, column, *_) in zip(which, found)]

    def check(self, case: Case, stored: dict[str, list[tuple[Any, ...]]], taken: list[Taken]) -> None:
        text, numbers = self.text, case.numbers
        cluster, parts = text.plan.cluster, text.sizes_of_parts
        counts = [-(-int(numbers[name]) // (self.sizes[name] * k)) * k for name, k in ((self.m, cluster.m), (self.n, cluster.n))]
        rows = [m * self.sizes[self.m] + part for m in range(counts[0]) for part in parts]
        columns = [n * self.sizes[self.n] for n in range(counts[1])]
        matrices = self.matrices(numbers)
        for store in self.places.stores:
            name = f"out_{store.parameter.name}"
            out = text.constants[name]
            tiles = itertools.product(matrices, rows if not isinstance(out, sums.ColumnsOut) else rows[:1],
                                      columns if not isinstance(out, collectives.RowsOut) else columns[:1])
            wanted = Counter((m, n, numbers[self.m], numbers[self.n], h[::-1]) for h, m, n in tiles)
            if self.has_packed_rows:   # tiles without rows are not stored, unless all of a cluster's add up columns
                last = columns if not isinstance(out, collectives.RowsOut) else columns[:1]
                tall = self.sizes[self.m] * (cluster.m if self.places.column_starts else 1)
                wanted = Counter((begin + m, n, begin + count, numbers[self.n], ()) for h in matrices for begin, count in [self.piece_at(h, case)]
                                 for m in range(0, -(-count // tall) * tall, self.sizes[self.m]) for n in last)
            found = Counter(part for array, part, _ in stored[name])
            expect(found == wanted, f"{name}: tiles {found - wanted or wanted - found} are not stored once each ({case})")
            expect(all(array == store.parameter.name for array, *_ in stored[name]), f"{name} is stored into another array")
        for tiles, products, log in taken:
            if not tiles:
                continue
            tiles = tiles[::len(parts)]
            ends = list[Any]()
            streams, want = defaultdict[tuple[str, ...], list[Any]](list), defaultdict[tuple[str, ...], list[Any]](list)
            for product in products:
                streams[tuple(name for name, _ in product)].append(tuple(place for _, place in product))
            for h, m, n in tiles:
                for loop in self.places.loops:
                    k = loop.index
                    begin, count = (0, int(numbers[k.name])) if k.piece is None else self.piece_at(h, case)
                    first = self.piece_at(h, case)[0] if self.has_packed_rows else 0
                    for at in range(0, max(1, count), self.sizes[k.name]):
                        known = {self.m: first + m, self.n: n, k.name: begin + at, **dict(zip(self.stacks, h))}
                        ends.append(count - at if k.piece is not None and count - at < self.sizes[k.name] else None)
                        for p in loop.products:
                            want[f"{p.a.name}_tile", f"{p.b.name}_tile"].append(tuple(self.place(x.name, known) for x in (p.a, p.b)))
            _check_streams(streams, want, case)
            self.check_ends(ends, log, case)

    def check_ends(self, wanted: list[int | None], log: Log, case: Case) -> None:
        """Rounds in which a piece ends, and no others, put zeros behind it in all blocks, before they multiply."""
        found, end = list[int | None](), None
        loop, tiles = self.places.loops[0], {f"{tile.name}_tile" for tile in self.places.loops[0].tiles}
        for event in log:
            if event[0] == "end":
                expect(set(event[1]) == tiles and end is None, f"pieces end in {event[1]}, and rounds take {tiles}")
                end = event[2]
            elif event[0] == "multiply":
                found.append(end)
                end = None
        if loop.piece is not None:
            each = len(loop.products)
            expect(found[::each] == wanted and all(x is None for n, x in enumerate(found) if n % each), f"pieces end at {found}, and not {wanted} ({case})")

    def matrices(self, numbers: dict[str, Any]) -> list[tuple[int, ...]]:
        """Of stacks, one after the other."""
        return [*itertools.product(*(range(int(numbers[name])) for name in self.stacks))]

    def place(self, name: str, known: dict[str, Any]) -> tuple[Any, ...]:
        block = self.blocks[name]
        rows: Any = next((stack.base for stack in block.stacks if stack.is_page), None)
        if rows is not None:           # by the line of the table, and the place along it
            own = [known[x.of_loop.name] // x.extent.group for x in block.stacks if x.base is not rows]
            line = known[rows.line.of_loop.name] // rows.line.extent.group
            return (line, *own, known[rows.name], 0) if self.text.plan.is_multistage else (0, known[rows.name], *own[::-1], line)
        at = [0 if isinstance(dim, Axis) else known[dim.name] for dim in block.dims]
        stacks = [known[stack.of_loop.name] // stack.extent.group for stack in block.stacks]           # some share a matrix
        return (*stacks, *at) if self.text.plan.is_multistage else (*at[::-1], *stacks[::-1])


def _check_streams(found: dict[tuple[str, ...], list[Any]], wanted: dict[tuple[str, ...], list[Any]], case: Case) -> None:
    expect(set(found) == set(wanted), f"products are of {sorted(found)}, and {sorted(wanted)} are wanted")
    for names, stream in wanted.items():
        at = next((n for n, (x, y) in enumerate(zip(found[names], stream)) if x != y), min(len(found[names]), len(stream)))
        expect(found[names] == stream, f"the {at}-th product of {' by '.join(names)} takes {found[names][at:at + 1]} in place of "
               f"{stream[at:at + 1]} ({case})")


class _ChainProgram(_GridProgram):
    """What tiles of whole rows are to do."""

    pieces_of = None                   # see `piece`

    def __init__(self, text: Text):
        made: Any = text.plan.resizing
        self.text, self.made, self.chain, self.choice = text, made.made, made.made.chain, made.made.choice
        self.places, self.stacks = self.made.places, [stack.name for stack in self.chain.stacks]
        self.blocks = {block.name: block for block in text.blocks}
        self.rows, self.step = self.choice.rows, self.choice.blocks[self.chain.index.name]
        self.late = late_values(self.chain) if self.choice.ahead else set()
        self.is_bounded = "first_seen" in text.functions or "end_seen" in text.functions

    def cases(self) -> Iterator[Case]:
        chain, cluster = self.chain, self.choice.cluster
        most = max(self.choice.stages.values())
        tall = self.rows * cluster.m
        for rows, rounds, count, grid, votes in ((1, 1, 1, 1, False), (tall + 1, 2, 2, 1, True), (tall, most, 1, 1, False),
                                                 (2 * tall, most + 2, 2, 2, False)):
            numbers = {chain.rows.name: rows, chain.index.name: rounds * self.step - (rounds != 2 and self.step // 2)}
            numbers = {**dict.fromkeys(self.stacks, count), **numbers}
            for stack in chain.stacks:
                if stack.extent == chain.index.extent:
                    numbers[chain.index.name] = numbers[stack.name]
            numbers = {**dict.fromkeys(self.text.plan.printed.scalars, 1.0), "section": min(2, count), chain.share: chain.splits, **numbers}
            if chain.is_straight:
                numbers[chain.index.name] = 1
            for held in self.lengths(int(numbers[chain.index.name])):
                case = Case(numbers, grid, votes, held)
                yield case if self.piece is None and chain.index.piece is None else self.of_pieces(case)

    def lengths(self, extent: int) -> Iterator[dict[str, int]]:
        """What arrays of lengths hold: none, one beyond the axis, and others; starts within a block, and behind the length."""
        starts, stops = (list(dict.fromkeys(x.data[0].name for x in walked([given]) if x.op == "load")) if given is not None else []
                         for given in (self.chain.start, self.chain.length))
        cases = [(0, -3), (extent + 5, self.step // 2 + 1), (max(1, extent - self.step), 2)]
        if self.chain.start is not None:
            cases += [(extent, extent + 3), (extent + 5, extent // 2)]
        yield from {str(x): x for start, stop in [(b, a) for a, b in cases] for x in [{**dict.fromkeys(starts, start), **dict.fromkeys(stops, stop)}]}.values()

    def of_pieces(self, case: Case) -> Case:
        """With pieces of all rows, none, and one; and of keys: of the first rows none or some. Some rows are of no piece."""
        numbers, offsets = dict(case.numbers), {}
        for index in (self.chain.rows, self.chain.index):
            if index.piece is not None:
                numbers[index.piece.of_loop.name] = 4
                each = int(case.numbers[index.name])
                cuts = list(itertools.accumulate([2, each, 0, 1, each + 1]))
                name = index.extent.offsets.name
                if name in offsets:                    # of rows and of keys
                    numbers[index.name] = numbers[self.chain.rows.name]
                    continue
                numbers[index.name] = cuts[-1] + 3
                offsets[name] = cuts if index is self.chain.rows else [3, *(cuts[1:3] if case.votes else (3, 4)), cuts[2] + 3, numbers[index.name]]
        return case._replace(numbers=numbers, offsets=offsets)

    @property
    def piece(self) -> Any:
        return self.chain.rows.piece

    def range_of(self, index: Any, at: tuple[Any, ...], case: Case) -> tuple[int, int]:
        """Where a tile's rows or keys begin, and how many there are. ``at``: of the stacks, and more."""
        if index.piece is None:
            end, length = int(case.numbers[index.name]), self.chain.length
            return 0, end if length is None or index is self.chain.rows else min(end, max(self.whole(length, at, case), 0))
        which = at[self.stacks.index(index.piece.of_loop.name)] // index.piece.extent.group
        begin, end = case.offsets[index.extent.offsets.name][which:which + 2]
        return begin, end - begin

    def whole(self, x: Any, at: tuple[Any, ...], case: Case) -> int:
        """A whole number that rounds of a tile begin or end at."""
        if x.op in ("load", "const", "coordinate"):
            return (case.held[x.data[0].name] if x.op == "load" else int(x.data) if x.op == "const" else
                    at[self.stacks.index(x.data.of_loop.name)] // x.data.extent.group)
        return int(OF_PLACES[x.op](*(self.whole(y, at, case) for y in x.args)))

    def places_of(self, at: tuple[Any, ...], case: Case) -> tuple[int, int, int]:
        """Where a tile's first block begins, its first place that is there, and the one behind the last."""
        end, index = self.range_of(self.chain.index, at, case)[1], self.chain.index
        if self.chain.start is None:
            return 0, 0, end
        shown = max(self.whole(self.chain.start, at, case), 0)
        shown, end = (shown, end) if shown < end else (int(case.numbers[index.name]), 0)
        return shown - shown % min(self.step, index.extent.of_page) if index.is_paged else shown, shown, end

    @property
    def watched(self) -> tuple[str, ...]:              # type: ignore[override]
        chain = self.chain
        return *([f"{chain.index.name}_outer"] if chain.splits > 1 else self.stacks), chain.rows.name, chain.index.name

    def tiles_of(self, log: Log, case: Case) -> list[tuple[Any, ...]]:
        """In order: which of the stacks, the last one first, and the row, of its piece if there are pieces."""
        name = f"out_{self.chain.stores[0].parameter.name}"
        found = [(event[3][4], event[3][0]) for event in log if event[0] == "store" and event[1] == name]
        if self.piece is None:
            return found
        cuts = np.array(case.offsets[self.chain.rows.extent.offsets.name])
        out = []
        for outer, row in found:
            which = int(np.searchsorted(cuts, row, "right")) - 1
            stacks = list(outer[::-1])
            stacks.insert(self.stacks.index(self.piece.name), which)
            out.append((tuple(stacks[::-1]), row - int(cuts[which])))
        return out

    def check(self, case: Case, stored: dict[str, list[tuple[Any, ...]]], taken: list[Taken]) -> None:
        chain, numbers, cluster = self.chain, case.numbers, self.choice.cluster.m
        extent = int(numbers[chain.rows.name])
        rows = [n * self.rows for n in range(-(-extent // (self.rows * cluster)) * cluster)]
        matrices = self.matrices(numbers)
        outers = [(n,) for n in range(len(matrices) * chain.splits)] if chain.splits > 1 else [h[::-1] for h in matrices]
        for store in chain.stores:
            name = f"out_{store.parameter.name}"
            columns = 1 if chain.stores_rows(store) else store.parameter.shape[-1]
            wanted = Counter((m, 0, extent, columns, h) for h in outers for m in rows)
            if self.piece is not None:
                at = self.stacks.index(self.piece.name)
                wanted = Counter((begin + m, 0, begin + count, columns, (*h[:at], *h[at + 1:])[::-1]) for h in matrices
                                 for begin, count in [self.range_of(chain.rows, h, case)] for m in range(0, count, self.rows))
            found = Counter(part for _, part, _ in stored[name])
            expect(found == wanted, f"{name}: tiles {found - wanted or wanted - found} are not stored once each ({case})")
            expect(all(array == store.parameter.name for array, *_ in stored[name]), f"{name} is stored into another array")
        visited = defaultdict[tuple[Any, ...], list[list[int]]](list)
        for tiles, products, log in taken:
            streams = defaultdict[tuple[str, ...], list[Any]](list)
            for product in products:
                streams[tuple(name for name, _ in product)].append(tuple(place for _, place in product))
            want = defaultdict[tuple[str, ...], list[Any]](list)
            for (outer, m), rounds in zip(tiles, self.rounds_of(tiles, log)):
                h = matrices[outer[0] // chain.splits] if chain.splits > 1 else outer[::-1]
                visited[h, m].append(rounds)
                for n, place in enumerate(rounds):
                    known = {chain.rows.name: self.range_of(chain.rows, h, case)[0] * (self.piece is not None) + m,
                             chain.index.name: self.range_of(chain.index, h, case)[0] + place, **dict(zip(self.stacks, h))}
                    for d in dots(chain.body):
                        d = self.places.peeled.get(d, d) if n == 0 else d
                        want[self.taken_by(d)].append(tuple(self.place_for(d, block.removesuffix("_tile"), known) for block in self.taken_by(d)))
            self.check_added(case, tiles, log)
            _check_streams(streams, want, case)
            self.check_masks(case, log)
        self.check_rounds(case, visited)

    def check_added(self, case: Case, tiles: list[tuple[Any, ...]], log: Log) -> None:
        """Each round adds its rows once, of its stacks; lines of the tile behind the last row are zeros in shared memory."""
        chain = self.chain
        for x in chain.added:
            name = x.data.parameter.name
            found = [event[3] for event in log if event[:2] == ("added", f"out_{name}")]
            put = [event[3] for event in log if event[:2] == ("part", f"out_{name}")]
            step, wanted, there = self.choice.blocks[chain.index.name], [], []
            for (outer, _), rounds in zip(tiles, self.rounds_of(tiles, log)):
                h = outer[::-1]
                begin, count = self.range_of(chain.index, h, case)
                own = tuple(n for stack, n in zip(chain.stacks, h) if stack in chain.own_stacks)[::-1]
                count = count if chain.index.piece is not None or chain.length is not None else int(case.numbers[chain.index.name])
                wanted += [(0, begin + n, *own) for n in rounds]
                there += [count - n if chain.index.piece is not None else step for n in rounds]
            expect(found == wanted and put == there, f"{name}: {found} are added, of {put} rows, and not {wanted} of {there} ({case})")
        for event in log:
            if event[0] == "lines":
                left = self.range_of(chain.rows, event[3], case)[1] - event[3][-2]
                expect(event[2] == left, f"{event[1]} has {event[2]} lines, of {left} ({case})")

    def check_alike(self, one: Log, other: Log, group: int) -> None:
        """Warpgroups that share columns have the same rows: the second one stores the second half of wide results alone."""
        for x in self.chain.added:
            rows, columns = self.choice.part(self.chain, *x.args)
            mine, its = ([event[2] for event in log if event[:2] == ("part", f"out_{x.data.parameter.name}")] for log in (one, other))
            moved = [[m + group * rows, n + group * columns * (not rows)] for m, n in mine]
            expect(its == moved, f"warpgroup {group} adds {its}, and not {moved}")
        if not self.chain.wide:
            super().check_alike(one, other, group)
            return
        widths = {f"out_{store.parameter.name}": 0 if self.chain.stores_rows(store) else store.parameter.shape[-1] for store in self.chain.stores}
        wanted = list[Any]()
        for event in one:
            if event[0] == "store":
                (row, column, end, *more), half = event[3], -(-widths[event[1]] // 128) * 64 if widths[event[1]] > 256 else 0
                event = (*event[:3], (row, column + group * half, end if half else 0, *more))
            wanted.append(event)
        expect(other == wanted, f"warpgroup {group} does not do what the first one does, of its columns")

    def place_for(self, d: Any, name: str, known: dict[str, Any]) -> tuple[Any, ...]:
        """Of a product in parts where the part begins of what comes in parts."""
        at, block = self.place(name, known), self.blocks[name]
        if not isinstance(d.data, ProductPart):
            return at
        own = list(at if self.text.plan.is_multistage else at[::-1])
        for axis, (dim, n) in enumerate(zip(block.dims, self.text.plan.infos[block.array].shape[-2:])):
            if isinstance(dim, Axis) and dim.size < n:
                own[axis] += d.data.first
        return tuple(own if self.text.plan.is_multistage else own[::-1])

    def taken_by(self, d: Any) -> tuple[str, ...]:
        """The tiles that a product takes."""
        return tuple(f"{self.places.blocks[d, k].name}_tile" for k in (0, 1) if (d, k) in self.places.blocks)

    @property
    def first(self) -> Any:
        """A product that goes before the others of its round."""
        return next(d for d in dots(self.chain.body) if d not in self.late)

    def is_first(self, event: tuple[Any, ...]) -> bool:
        return tuple(x[0] for x in event[2]) in (self.taken_by(self.first), self.taken_by(self.places.peeled.get(self.first, self.first)))

    def rounds_of(self, tiles: list[tuple[Any, ...]], log: Log) -> Iterator[list[int]]:
        """Where a block's tiles have their rounds, as consumers count: they test these places, and the products that no other
        of the round goes before take blocks from there."""
        each = sum(self.taken_by(d) == self.taken_by(self.first) for d in dots(self.chain.body) if d not in self.late)
        seen = [event[3] for event in log if event[0] == "multiply" and self.is_first(event)]
        groups = [list(group) for _, group in itertools.groupby(seen[::each], key=lambda x: x[:-1])]
        expect(len(groups) == len(tiles), f"products of {len(groups)} tiles, of which {len(tiles)} are stored")
        for (outer, m), group in zip(tiles, groups):
            expect(group[0][:-1] == (*outer[::-1], m), f"products of tile {group[0][:-1]}, and {(*outer[::-1], m)} is stored")
            yield [x[-1] for x in group]

    def check_masks(self, case: Case, log: Log) -> None:
        """If a round masks what lies behind the last place, all rounds do that go beyond it: by as much as is there."""
        if not any("room" in self.text.parameters(name) for name in self.text.functions) or self.chain.splits > 1:
            return
        masked = {event[2] for event in log if event[0] == "masked"}
        tested = {event[2] for event in log if event[0] == "tested"}
        for event in log:
            if event[0] == "multiply" and tested and self.is_first(event) and event[3] not in tested:
                expect(self.seen(event[3], case).all(), f"a round at {event[3]} is not tested, and not all of it is seen ({case})")
            if event[0] == "masked":
                end = self.places_of(event[2], case)[2]
                expect(event[1] == end - event[2][-1], f"a mask of {event[1]} places in a round at {event[2][-1]} of {end}")
            elif event[0] == "front":
                first = self.places_of(event[2], case)[1]
                expect(event[1] == first - event[2][-1], f"a mask of {event[1]} places in front in a round at {event[2][-1]} from {first} on")
            elif event[0] == "multiply" and self.is_first(event):
                at = event[3]
                _, first, end = self.places_of(at, case)
                expect(at in masked or (first <= at[-1] and at[-1] + self.step <= end), f"a round at {at[-1]} from {first} to {end} is not masked ({case})")

    def every(self, at: tuple[Any, ...], case: Case) -> list[int]:
        begin, _, end = self.places_of(at, case)
        found = list(range(begin, max(end, begin + 1), self.step))
        return found[::-1] if self.choice.descending else found

    def seen(self, at: tuple[Any, ...], case: Case) -> np.ndarray:
        """Which places from the last of ``at`` on the rows from the one before it on see, by the program's conditions of places."""
        m, n = at[-2:]
        rows = np.arange(m, min(m + self.rows, self.range_of(self.chain.rows, at, case)[1]))[:, None]
        _, first, end = self.places_of(at, case)
        places = np.arange(n, max(n + 1, min(n + self.step, end)))[None, :]
        out = np.broadcast_to(places >= min(first, n + places.shape[1] - 1), (len(rows), places.shape[1])).copy()
        for x in self.chain.body:
            if x.op == "where" and self.chain.index in x.args[0].dims and (x.args[1].op == "const") != (x.args[2].op == "const"):
                holds = _of_places(x.args[0], {self.chain.rows: rows, self.chain.index: places})
                out &= True if holds is None else holds if x.args[2].op == "const" else ~holds
        return out

    def check_rounds(self, case: Case, visited: dict[tuple[Any, ...], list[list[int]]]) -> None:
        """Of a tile's shares together each round is one share's; a share may have one that shows nothing."""
        for tile, shares in visited.items():
            expect(len(shares) == self.chain.splits, f"tile {tile} has {len(shares)} shares")
            expect(all(shares), f"a share of {tile} has no rounds")
            found, every = Counter(n for share in shares for n in share), self.every(tile[0], case)
            if self.is_bounded:
                needed = [n for n in every if self.seen((*tile[0], tile[1], n), case).any()]
                expect(set(needed) <= set(found) and all(n == 1 for n in found.values()), f"tile {tile} sees blocks at {needed}, and visits {found} ({case})")
                continue
            expect(all(found[n] == 1 for n in every), f"tile {tile}: rounds {sorted(found.items())} are not {every} once each ({case})")
            extra = [n for n in found if n not in every]
            expect(not extra or (self.chain.splits > 1 and all([n] in shares for n in extra)), f"tile {tile}: rounds {extra} are not its own")



def _of_places(x: Any, known: dict[Any, np.ndarray]) -> Any:
    """A condition of places, with numbers; None for one that is made of more than places."""
    if x.op == "const":
        return np.float64(x.data)
    if x.op == "coordinate":
        return known.get(x.data)
    args = [_of_places(y, known) for y in x.args]
    if x.op not in OF_PLACES or any(y is None for y in args):
        return None
    return OF_PLACES[x.op](*args)


OF_PLACES: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "max": np.maximum}


# -- rows ---------------------------------------------------------------------------------------------------------------------

def check_rows(text: Text) -> None:
    """Of a kernel of rows: each row, and no other, is one team's, for numbers of rows around those of a block."""
    kernel, rows = text.functions["kernel"], text.constants["ROWS"].team.rows
    names = list(text.plan.printed.tile)
    body = [node for node in kernel.body if not (isinstance(node, ast.Expr) and ast.unparse(node) in ("grid_wait()", "grid_launch_dependents()"))]
    if isinstance(text.constants["ROWS"].team, TurnedTeam):
        stores = [node for node in body if isinstance(node, ast.If)]
        begin, last = [node for node in body if node not in stores], stores[0]
        expect({ast.unparse(node.test) for node in stores} in ({"place == index"}, {f"place == {names[-1]}"}), "a row that is another's is stored")
        expect(not any(isinstance(x, ast.Call) and ast.unparse(x.func).startswith("put") for node in begin for x in ast.walk(node)),
               "a row is stored that may be another's")
        begin = [node for node in begin if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (*names, "place", "index")]
    else:
        *begin, last = body
        expect(isinstance(last, ast.If) and not last.orelse, "a kernel of rows asks first whether its row is there")
    assert isinstance(last, ast.If)
    waits = [ast.unparse(node) for node in kernel.body if node not in body]
    expect(waits in ([], ["grid_launch_dependents()", "grid_wait()"]) and kernel.body[:len(waits)] == [
        node for node in kernel.body if node not in body], "memory is touched before the kernel before is over")
    places = [node for node in last.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names]
    step = ast.Module([*begin, ast.If(last.test, [*places, *ast.parse(f"seen.append(({', '.join(names)},))").body], [])], [])
    code = compile(ast.fix_missing_locations(step), text.plan.name, "exec")
    for extent in (1, rows, rows + 1, 3 * rows + 1):
        numbers = {name: extent if name == names[-1] else 3 for name in names}
        sizes, seen = _Numbers({**numbers, "columns": 1}), list[tuple[int, ...]]()
        count = int(text.index_functions["tiles"](sizes)) * rows
        for row in range(count):
            exec(code, {"sizes": sizes, "seen": seen, "udiv": lambda x, y: x // y, "ROWS": _Rows(row)})
        expect(sorted(seen) == sorted(itertools.product(*(range(numbers[name]) for name in names))), f"{extent} rows: teams take {seen[:8]} and so on")


class _Rows:
    def __init__(self, row: int):
        self.number = row

    @property
    def team(self) -> _Rows:
        return self

    def row(self) -> int:
        return self.number
