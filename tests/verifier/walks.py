"""Roles of a derived text, walked through statement by statement: on every path, or with numbers.

The state of a role is what its barriers and its tensor cores are: which stages it has filled or awaited, which groups of
products are on their way and what they read, whose turn it is. Numbers are computed where they are known, and are `ANY` where not;
a condition of `ANY` goes both ways, and holds until one of its names changes. Of two states that are alike one is gone on with,
so that loops end.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gemmkit.kernels.collectives.pipeline import OrderBarrier, Pipeline, Warpgroups
from gemmkit.programs import collectives, multistage, pieces, rounds, sums
from gemmkit.programs.values import Axis
from tests.verifier.texts import INDEXING, Staged, Text, Unsound, bytes_of, expect, in_turn

PRODUCTS = collectives.Product, collectives.HandedProduct, multistage.MmaProduct, multistage.HandedMmaProduct
OUTS = *(getattr(collectives, name) for name in ("TmaOut", "DirectOut", "RowsOut", "OctetOut")), sums.ColumnsOut
ADDED = "ring_added"                   # the ring by which consumers hand on what rounds add
PASSING = 96                           # the first of the threads that pass turns on, or that compute a round's columns
COLUMNS = "ring_columns"               # the ring of these
TURNS = sums.TURNS
VOTES = "steep", "rescales", "changes"


class _Any:
    def __repr__(self) -> str:
        return "ANY"


ANY: Any = _Any()
DONE, PARTS = "registers", "parts of sums"


class At(NamedTuple):
    """A slot: how far it is from where it began, and with which phase that was; around which ring it goes."""

    position: int
    phase: int
    ring: str = ""

    def stands(self, position: int, phase: int, ring: str) -> bool:
        return self[:2] == (position, phase) and self.ring in ("", ring)


class Part(NamedTuple):
    """A stage, or a phase, of a slot."""

    of: At
    what: str


class Flying(NamedTuple):
    """Registers of a group of products that are on their way, or of one that is over and that no wait has named."""

    group: int


class Found(NamedTuple):
    """The rows that a thread has looked up for a tile, from a place on."""

    tile: str
    first: Any


class Name(NamedTuple):
    """An argument of the kernel."""

    name: str


@dataclass(frozen=True)
class RingState:
    """``filled``: stages that the producer has acquired, or that a consumer has awaited; ``loaded``: tiles of the last one."""

    filled: int = 0
    released: int = 0
    expected: int | None = None
    loaded: tuple[str, ...] = ()


class Group(NamedTuple):
    """``reads``: (ring, position) of stages; ``fragments``: names of A's registers; ``onto``: groups whose sums it adds to."""

    reads: tuple[tuple[str, int], ...] = ()
    fragments: tuple[str, ...] = ()
    onto: tuple[int, ...] = ()


class Copy(NamedTuple):
    """What a stage has of a tile, by threads' copies of a group."""

    group: int
    place: tuple[Any, ...]


@dataclass
class State:
    env: dict[str, Any] = field(default_factory=dict)
    rings: dict[str, RingState] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    begun: int = 0                     # groups that have been committed
    open: Group | None = None
    is_fenced: bool = False
    turn: int = 0
    facts: dict[str, bool] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    copies: dict[tuple[str, int], Copy] = field(default_factory=dict)          # by tile and stage
    copied: int = 0                    # groups of copies that are committed
    there: int = 0                     # of these, those that are waited for by all
    read: frozenset[tuple[str, int]] = frozenset()             # tiles and stages since the last barrier
    loaded: tuple[str, ...] = ()       # of a round's columns
    put: tuple[str, ...] = ()          # what of a round is in shared memory
    met: tuple[str, ...] = ()          # and known to all
    is_clear: bool = False             # whether results have left the memory of what rounds add, or may take it

    def copy(self) -> State:
        return replace(self, env=dict(self.env), rings=dict(self.rings), facts=dict(self.facts), log=list(self.log),
                       copies=dict(self.copies))

    def key(self) -> Any:
        """The same for states that go on alike: positions are counted from the last release on, groups from the oldest."""
        least = {name: ring.released for name, ring in self.rings.items()}
        base = self.begun - len(self.groups)

        def moved(x: Any) -> Any:
            kind = type(x)
            if kind is int or kind is float:
                return "number"
            if kind is At:
                return max(-2, x.position - least.get(x.ring, 0)), x.phase            # one that is released is none that is read
            if kind is Flying:
                return Flying(max(-1, x.group - base))
            return "number" if isinstance(x, (int, float)) and kind is not bool else repr(x)

        env = frozenset((name, moved(x)) for name, x in self.env.items() if type(x) is not Name)
        rings = frozenset((name, ring.filled - least[name], ring.expected, ring.loaded) for name, ring in self.rings.items())
        groups = tuple((tuple((r, at - least.get(r, 0)) for r, at in g.reads), g.fragments, tuple(n - base for n in g.onto if n >= base)) for g in self.groups)
        return env, rings, groups, self.open is None, self.is_fenced, self.turn, frozenset(self.facts.items()), self.loaded, self.put, self.met, self.is_clear


class Given(NamedTuple):
    """What a walk has numbers for: ``numbers`` of `sizes`; the ``block`` of a ``grid``; how warps vote; what each element of arrays
    of lengths is, and arrays of offsets. ``watched``: names whose numbers are noted with each product."""

    numbers: dict[str, float]
    block: int
    grid: int
    votes: bool
    held: dict[str, int]
    offsets: dict[str, list[int]]
    watched: tuple[str, ...]


class Walk:
    """Of one thread of a block. Without ``given`` on every path."""

    def __init__(self, text: Text, thread: int, given: Given | None = None):
        self.text, self.thread, self.given = text, thread, given
        self.numbers = None if given is None else given.numbers
        self.said = text.said

    def run(self) -> list[State]:
        kernel = self.text.functions["kernel"]
        state = State(rings={name: RingState() for name in self.text.rings})
        state.env = {arg.arg: Name(arg.arg) for arg in kernel.args.args}
        return self.body(kernel.body, [state])

    # -- statements -----------------------------------------------------------------------------------------------------------

    def body(self, body: Iterable[ast.stmt], states: list[State]) -> list[State]:
        for node in body:
            states = self.merged([new for state in states for new in self.statement(node, state)])
        return states

    def merged(self, states: list[State]) -> list[State]:
        if self.numbers is not None or len(states) < 2:
            return states
        return list({state.key(): state for state in reversed(states)}.values())

    def statement(self, node: ast.stmt, state: State) -> list[State]:
        if isinstance(node, ast.If):
            out = []
            for holds, new in self.asked(node.test, state):
                out += self.body(node.body if holds else node.orelse, [new])
            return out
        if isinstance(node, ast.While):
            return self.loop(node, state)
        if isinstance(node, ast.For):
            assert isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Call)
            states = [state]
            for n in range(self.value(node.iter.args[0], state)):
                for one in states:
                    one.env[node.target.id] = n
                states = self.body(node.body, states)
            return states
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            self.assign(target, self.value(node.value, state), state)
            if isinstance(target, ast.Name) and target.id == "tile" and "block_x()" in self.said(node.value):
                state.facts["tile < tiles(sizes)"] = True              # there are as many blocks as tiles, or fewer
            return [state]
        if isinstance(node, ast.AugAssign):
            assert isinstance(node.target, ast.Name)
            self.assign(node.target, self.combined(node, [self.value(node.target, state), self.value(node.value, state)]), state)
            return [state]
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return [state]
        assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call), self.said(node)
        name = self.said(node.value.func)
        if name in self.text.functions and name not in INDEXING:
            return self.call(self.text.functions[name], node.value.args, state)
        self.value(node.value, state)
        return [state]

    def call(self, function: ast.FunctionDef, given: list[ast.expr], state: State) -> list[State]:
        outer = state.env
        state.env = {arg.arg: self.value(x, state) for arg, x in zip(function.args.args, given)}
        states = self.body(function.body, [state])
        for one in states:
            one.env = dict(outer)
        return states

    def loop(self, node: ast.While, state: State) -> list[State]:
        out, seen, todo = [], set(), [state]
        while todo:
            state = todo.pop()
            if self.numbers is None:
                key = state.key()
                if key in seen:
                    continue
                seen.add(key)
                expect(len(seen) < 400, f"{self.said(node.test)}: stages are not released as they are filled")
            for holds, new in self.asked(node.test, state):
                if holds:
                    todo += self.body(node.body, [new])
                else:
                    out.append(new)
        return self.merged(out)

    def asked(self, test: ast.expr, state: State) -> list[tuple[bool, State]]:
        said = self.said(test)
        found = self.value(test, state)
        if found is not ANY:
            return [(bool(found), state)]
        if said in state.facts:
            return [(state.facts[said], state)]
        other = state.copy()
        state.facts[said], other.facts[said] = True, False
        return [(True, state), (False, other)]

    def assign(self, target: ast.expr, value: Any, state: State) -> None:
        if isinstance(target, ast.Tuple):
            values = [ANY] * len(target.elts) if value is ANY else value
            expect(isinstance(values, (tuple, list)) and len(values) == len(target.elts), f"{self.said(target)} = {value}")
            for one, x in zip(target.elts, values):
                self.assign(one, x, state)
            return
        assert isinstance(target, ast.Name)
        name = target.id
        for group in (*state.groups, *([state.open] if state.open else [])):
            expect(name not in group.fragments, f"{name} is made anew while products read it")
        state.env[name] = value
        if state.facts:
            for said in [said for said in state.facts if name in _names(said)]:
                del state.facts[said]

    # -- values ---------------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, state: State) -> Any:
        if isinstance(node, ast.Name):
            return state.env[node.id] if node.id in state.env else Name(node.id)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple):
            return tuple(self.value(x, state) for x in node.elts)
        if isinstance(node, ast.Call):
            return self.called(node, state)
        if isinstance(node, ast.Attribute):
            of = self.value(node.value, state)
            if isinstance(of, At):
                return Part(of, node.attr)
            if of == Name("sizes"):
                return ANY if self.numbers is None else self.numbers[node.attr]
            return {"inf": math.inf, "nan": math.nan}[node.attr]
        if isinstance(node, ast.Subscript):
            of = self.value(node.value, state)
            self.used(self.value(node.slice, state), node)
            if isinstance(of, Name):   # an element of an array: a length
                return ANY if self.given is None else self.given.held.get(of.name, ANY)
            self.used(of, node)
            return DONE
        return self.combined(node, [self.value(x, state) for x in self.text.parts(node)])

    def combined(self, node: ast.expr | ast.AugAssign, parts: list[Any]) -> Any:
        """What an operation makes of its parts."""
        are_numbers = NUMBERS.issuperset(map(type, parts))
        if not are_numbers and any(isinstance(x, (Flying, str)) for x in parts):
            for x in parts:
                self.used(x, node)
            return DONE
        if isinstance(node, ast.BoolOp):
            stops = isinstance(node.op, ast.Or)
            if any(x is not ANY and bool(x) == stops for x in parts):
                return stops
            return ANY if any(x is ANY for x in parts) else not stops
        if isinstance(node, ast.IfExp):
            test, one, other = parts
            return (one if one == other else ANY) if test is ANY else one if test else other
        if not are_numbers and not (isinstance(node, ast.Compare) and isinstance(parts[0], Part)):
            if any(x is ANY for x in parts):
                return ANY
            expect(all(isinstance(x, (int, float)) for x in parts), f"{self.said(node)} of {parts}")
        if isinstance(node, ast.Compare) and isinstance(parts[0], Part):
            if isinstance(parts[1], Part):             # two slots of one ring, one behind the other at most
                return parts[0].of.position != parts[1].of.position
            return parts[0].of.position % self.text.rings[ADDED].stages == parts[1]
        if isinstance(node, ast.Compare):
            return all(OPERATIONS[type(op)](one, other) for op, one, other in zip(node.ops, parts, parts[1:]))
        assert isinstance(node, (ast.BinOp, ast.UnaryOp, ast.AugAssign)), self.said(node)
        return OPERATIONS[type(node.op)](*parts)

    def used(self, x: Any, node: ast.AST) -> None:
        """Threads read it."""
        if isinstance(x, Flying):
            raise Unsound(f"{self.said(node)}: sums are used while products add to them, or before a wait that names them")
        if x == PARTS:
            raise Unsound(f"{self.said(node)}: threads have parts of these sums, which have not met")
        if isinstance(x, (tuple, list)) and not isinstance(x, (At, Part, Name)):
            for one in x:
                self.used(one, node)

    def called(self, node: ast.Call, state: State) -> Any:
        if isinstance(node.func, ast.Attribute):
            of = self.text.constants.get(self.said(node.func.value))
            return self.method(node, of, self.said(node.func.value), node.func.attr, state)
        name = self.said(node.func)
        if name == "wgmma_wait":
            return self.waited(node, state)
        args = [self.value(x, state) for x in node.args]
        if name in ("uniform", "rolled", "carried", "int"):
            return args[0]
        if name == "convert" and args[0] == Name("I64"):
            return args[1]
        if name == "Slot":
            return self.slot(node, args)
        if name == "thread_index":
            return self.thread
        if name in ("block_x", "grid_x", "cluster_rank"):
            if self.given is None:
                return ANY
            return self.given.grid if name == "grid_x" else self.given.block % (self.text.plan.cluster.size if name == "cluster_rank" else 2**31)
        if name in ("udiv", "min", "max", "blocks"):
            if any(x is ANY for x in args):
                return ANY
            return {"udiv": lambda x, y: x // y, "min": min, "max": max, "blocks": lambda x, y: -(-x // y)}[name](*args)
        if name in INDEXING:
            if any(x is ANY for x in args) or self.given is None:
                return ANY
            self.text.grid = self.given.grid
            return self.text.index_functions[name](*(
                _Sizes(self.numbers or {}) if x == Name("sizes") else self.given.offsets.get(x.name, _Mask()) if isinstance(x, Name) else x
                for x in args))
        if name == "begin_of":
            if any(x is ANY for x in args) or self.given is None:
                return ANY
            return collectives.begin_of(self.given.offsets[args[0].name], *args[1:])
        if name == "end_piece":
            tiles, at, first, group, _ = args
            for tile in tiles:
                _, ring, position = self.reads(self.text.tiles[tile.name], at, state)
                expect(not any((ring, position) in held.reads for held in state.groups), f"{tile.name} is written while products read it")
            expect(group == self.group, f"threads of warpgroup {group} end a piece, and are of {self.group}")
            state.log.append(("end", tuple(tile.name for tile in tiles), first))
            return None
        if name in VOTES:
            self.used(args, node)
            return ANY if self.given is None else self.given.votes
        if name == "wgmma_fence":
            state.is_fenced = True
            return None
        if name == "wgmma_commit":
            expect(state.open is not None, "a group without products is committed")
            assert state.open is not None
            state.groups, state.open, state.begun = (*state.groups, state.open), None, state.begun + 1
            state.is_fenced = False
            return None
        if name in EVENTS:
            state.log.append((name,))
            return None
        if name in ("await_counter", "atomic_add"):
            return self.of_counter(node, name, args, state)
        self.used(args, node)
        if name == "apply":            # a mask counts the places that are there from the thread's first column on
            taken = self.text.parameters(self.said(node.args[0]))
            state.log += [({"room": "masked", "front": "front"}[what], places, self.watched(state)) for what, places in zip(taken[2:], args[2:])
                          if what in ("room", "front") and self.given is not None]
            if any(what.startswith(("begins", "ends")) for what in taken[2:]):
                state.log += [("tested", "", self.watched(state))] if self.given is not None else []
        return DONE if name not in ("own_column", "own_row") else 0

    def slot(self, node: ast.Call, args: list[Any]) -> At:
        stage, phase = args
        if isinstance(stage, Part):
            expect((stage.what, phase) == ("stage", Part(stage.of, "phase")), f"{self.said(node)}: stage and phase of two slots")
            return stage.of
        return At(int(stage), int(phase))

    # -- collectives ----------------------------------------------------------------------------------------------------------

    def method(self, node: ast.Call, of: Any, name: str, what: str, state: State) -> Any:
        args = [self.value(x, state) for x in node.args]
        if of is None:
            raise Unsound(f"{self.said(node)}: {name} is no constant of the text")
        if isinstance(of, collectives.ComputedTile):
            return self.of_place(node, name, what, args, state)
        if isinstance(of, Pipeline) and name == ADDED and self.thread < 128 and what != "initialise":
            return self.of_adder(of, what, args, state)
        if (isinstance(of, Pipeline) and name == COLUMNS and what != "initialise") or isinstance(of, rounds.StagedColumns):
            return self.of_columns(of, what, args, state)
        if isinstance(of, sums.AddedOut):
            return self.of_added(node, of, name, what, args, state)
        if isinstance(of, Pipeline):
            return self.of_ring(node, of, name, what, args, state)
        if isinstance(of, multistage.CopyRing):
            return self.of_copies(of, what, args, state)
        if isinstance(of, collectives.StagedTile):
            return self.loaded(of, name, what, args, state)
        if isinstance(of, multistage.CopiedTile):
            return self.copied(of, name, args, state)
        if isinstance(of, PRODUCTS):
            return self.of_product(node, of, name, what, args, state)
        if isinstance(of, (sums.RowSums, sums.ColumnSums)):
            expect(what == "begin" or args[0] == PARTS, f"{self.said(node)}: sums that have not begun, or have met")
            if what == "add":
                state.log.append(("add", name, *self.places([self.reads(of.tile, args[1], state)], state)))
                expect(args[2] == self.group, f"{name} takes rows of warpgroup {args[2]}")
            return DONE if what == "whole" else PARTS
        if isinstance(of, sums.ColumnValues):
            self.used(args[0] if what == "put" else (), node)
            state.log.append((what, name))
            return DONE
        if isinstance(of, Warpgroups):
            state.log.append((what,))
            return None
        if isinstance(of, OrderBarrier):
            return self.of_turns(of, what, args, state)
        if isinstance(of, OUTS):
            if what == "store":
                self.used(args[0], node)
                expect(state.is_clear or not isinstance(of, collectives.TmaOut) or not self.text.of_kind(sums.AddedOut),
                       f"{name} leaves from where TMA may still read what rounds add")
                part = node.args[2]
                assert isinstance(part, ast.Call) and self.said(part.func) == "WarpgroupPart"
                state.log.append((what, name, args[1], tuple(self.value(x, state) for x in part.args)))
            else:
                state.log.append((what, name))
            return None
        self.used(args, node)
        return DONE

    def of_place(self, node: ast.Call, name: str, what: str, args: list[Any], state: State) -> Any:
        """A computed value in shared memory: put once a round, met about, taken, and put in the other place in the next round."""
        flying = [group for group in (*state.groups, *([state.open] if state.open else [])) if any(ring == name for ring, _ in group.reads)]
        if what == "put":
            self.used(args[0], node)
            expect(name not in state.put and args[2] == self.group, f"{name} is put twice, or by warpgroup {args[2]}")
            expect(not any((name, args[1].position) in group.reads for group in flying), f"{name} is put while products read it")
            state.put = (*state.put, name)
            state.log.append(("lines", name, args[3], self.watched(state)))
        elif what == "meet":
            expect(name in state.put and name not in state.met, f"{name} is met about before it is put, or twice")
            expect(not flying, f"warpgroups meet while products read what {name} was in the round before")
            expect(state.is_clear or not self.shares_results, f"warpgroups meet while results may be where {name}'s products go")
            state.is_clear = False
            state.met = (*state.met, name)
        else:
            expect(what == "other" and name in state.met, f"{name}.{what} before it is met about")
            state.put, state.met = (tuple(x for x in held if x != name) for held in (state.put, state.met))
            return At(1 - args[0].position, args[0].phase)
        return None

    @property
    def shares_results(self) -> bool:
        """Whether results leave from the memory of what rounds add."""
        return bool(self.text.of_kind(sums.AddedOut) and self.text.of_kind(collectives.TmaOut))

    def of_added(self, node: ast.Call, of: Any, name: str, what: str, args: list[Any], state: State) -> None:
        """Consumers put a part of a round's into a stage that is empty; one thread of each stage adds it."""
        held = state.rings[ADDED]
        if what == "put":
            self.used(args[0], node)
            expect(self.thread >= 128 and args[1].stands(held.released, 0, ADDED) and held.filled == held.released + 1, f"{name} is put into {args[1]}")
            state.log.append(("part", name, args[2:4], args[4], self.watched(state)))
        elif what == "leave":
            expect(args[1].stands(held.filled, 0, ADDED) and held.filled == held.released, f"{name}: stages from {args[1]} on are awaited, and {held} is")
            state.is_clear = True
        elif what == "clear":
            expect(self.thread >= 128, f"{name} is cleared by thread {self.thread}")
            state.is_clear = True
        elif what == "add":
            expect(state.turn == 2, f"{name} is added out of turn")
            expect(args[0] == Name(name.removeprefix("out_")) and args[2].stands(held.released - 1, 0, ADDED), f"{name} adds {args[2]} to {args[0]}")
            state.turn = 3
            state.log.append(("added", name, args[2].position, args[1]))
        else:
            expect(what == "finish" and state.turn in (0, 4), f"{name}.{what} is no end of a turn")
            state.turn = 5 if state.turn == 4 else 0

    def of_columns(self, of: Any, what: str, args: list[Any], state: State) -> Any:
        """A warp puts all numbers of a round's columns into a stage; consumers take each of them once, and release it."""
        held, brings = state.rings[COLUMNS], self.thread < 128
        if what == "advance":
            return At(args[0].position + 1, args[0].phase, COLUMNS)
        expect(brings == (what in ("acquire", "commit", "put", "say")), f"{COLUMNS}: {what} by another role")
        arrays = [f"columns {n}" for n in range(self.text.constants["column_stages"].arrays)]
        arrays += ["said"] * ("column_stages.say" in self.text.plan.text)
        if what == "acquire":
            expect(args[0].stands(held.filled, 1, COLUMNS) and held.filled == held.released, f"{COLUMNS}: {args[0]} is acquired")
            state.rings[COLUMNS] = RingState(held.filled + 1, held.filled)
        elif what in ("wait", "release"):
            at = args[0].of if what == "release" else args[0]
            expect((at.position, at.phase) == (held.released, 0) and held.filled == held.released + (what == "release"), f"{COLUMNS}: {what} {at}")
            expect(what == "wait" or list(state.loaded) == arrays, f"{state.loaded} is taken of {arrays}")
            state.rings[COLUMNS], state.loaded = RingState(held.filled + (what == "wait"), held.released + (what == "release")), ()
            state.log += [("begun", self.watched(state))] * (what == "release")
        elif what == "commit":
            expect(list(state.loaded) == arrays, f"{state.loaded} is put, of {arrays}")
            state.rings[COLUMNS], state.loaded = replace(held, released=held.filled), ()
            state.log.append(("brought", self.watched(state)))
        else:
            said = what in ("say", "is_large")
            at = args[{"say": 1, "is_large": 0}.get(what, 2)]
            expect(at.position == held.filled - 1 and held.filled > held.released, f"{COLUMNS}: {what} in {at}")
            state.loaded = tuple(sorted({*state.loaded, "said" if said else f"columns {args[1]}"}))
            return (ANY if self.given is None else self.given.votes) if what == "is_large" else DONE
        return None

    def of_adder(self, ring: Pipeline, what: str, args: list[Any], state: State) -> Any:
        """A thread of its own for each stage: it gives the stage, sees it written, adds it, and gives it again."""
        held, own = state.rings[ADDED], self.thread // 32 - 1
        expect(own < ring.stages, f"{ADDED} is looked after by thread {self.thread}")
        if what == "advance":
            return At(args[0].position + 1, args[0].phase, ADDED)
        at = args[0]
        expect(at.phase == 0 and at.ring in ("", ADDED) and at.position % ring.stages == own, f"{ADDED}: {at} is not thread {self.thread}'s")
        if what == "expect":
            expect(held.filled == held.released and args[1] == 0 and state.turn in (0, 3), f"{ADDED}: {at} is given twice, or before it is added")
            state.rings[ADDED] = replace(held, filled=held.released + 1)
            state.turn = 4 if state.turn and TURNS in self.text.parameters("kernel") else 0
        else:
            next_one = own if held.released == 0 else held.released - 1 + ring.stages
            expect(what == "acquire" and (held.filled, state.turn, at.position) == (held.released + 1, int(TURNS in self.text.parameters("kernel")), next_one), f"{ADDED}: {at} is awaited, and {held} is given")
            state.rings[ADDED], state.turn = RingState(at.position + 1, at.position + 1), 2
        return None

    def of_counter(self, node: ast.Call, name: str, args: list[Any], state: State) -> None:
        """Awaited before a stage is added, and counted when that is over; or both, of blocks that rounds do not visit."""
        array, at, number, order = args
        passes = self.thread >= PASSING
        expect(self.thread < 128 and array == Name(TURNS), f"{self.said(node)} by thread {self.thread}")
        if name == "await_counter":
            expect((state.turn, order) == (0, "acquire"), f"{self.said(node)}: the turn before is not over")
            state.turn = 2 if passes else 1
        else:
            expect(state.turn == (2 if passes else 5) and order == "release", f"{self.said(node)}: the turn is not over")
            state.turn = 0
        state.log.append((name, at, number))

    def of_turns(self, of: OrderBarrier, what: str, args: list[Any], state: State) -> None:
        group = self.thread // 128 - 1
        state.log.append(("turn", what))
        if what == "give_first":
            expect(state.turn == 0, "the first turn is given twice")
            state.turn = 1
        elif what == "wait":
            expect((state.turn, args[0]) == (1, group), f"warpgroup {args[0]} waits for the turn of {group}, or waits twice")
            state.turn = 2
        else:
            expect((state.turn, args[0]) == (2, (group + 1) % of.consumers), f"the turn is given to {args[0]} by {group}, or given twice")
            state.turn = 1

    def of_ring(self, node: ast.Call, ring: Pipeline, name: str, what: str, args: list[Any], state: State) -> Any:
        held, is_producer = state.rings[name], self.thread == 0
        if what == "initialise":
            expect(is_producer and not any(event[0] in ("met", "barrier", "cluster_barrier") for event in state.log), f"{name} begins too late")
            state.log.append(("initialise", name))
            return None
        if what in ("full", "empty"):  # the address of a barrier
            return 0
        expect(is_producer == (what in ("acquire", "expect")) or what == "advance", f"{name}.{what} by another role")
        if what == "advance":
            at: At = args[0]
            if is_producer:
                self.is_complete(name, state)
            expect(at.ring in ("", name), f"{name}: a slot of {at.ring}")
            return At(at.position + 1, at.phase, name)
        if what == "acquire":
            expect(args[0].stands(held.filled, 1, name), f"{name}: stage {held.filled} is filled next, and {args[0]} is acquired")
            self.is_complete(name, state)
            state.rings[name] = RingState(held.filled + 1, held.filled)
        elif what == "expect":
            expect(args[0].stands(held.filled - 1, 1, name) and held.expected is None, f"{name}: {args[0]} expects bytes before it is acquired, or twice")
            state.rings[name] = replace(held, expected=args[1])
            state.log.append(("fill", name, {}))
        elif what == "wait":
            expect(args[0].stands(held.filled, 0, name), f"{name}: stage {held.filled} is awaited next, and {args[0]} is")
            expect(held.filled - held.released < ring.stages, f"{name}: a stage is awaited that cannot be filled before one is released")
            state.rings[name] = replace(held, filled=held.filled + 1)
            state.log.append(("wait", name))
        else:
            expect(what == "release", what)
            at = args[0].of
            expect(args[0].what == "stage" and at.stands(held.released, 0, name), f"{name}: stage {held.released} is released next, and {at} is")
            expect(held.released < held.filled, f"{name}: a stage is released before it is awaited")
            expect(not any((name, at.position) in group.reads for group in (*state.groups, *([state.open] if state.open else []))),
                   f"{name}: a stage is released while products read it")
            state.rings[name] = replace(held, released=held.released + 1)
            state.log.append(("release", name))
        return None

    def is_complete(self, name: str, state: State) -> None:
        """The last stage that was acquired has what it expects."""
        held = state.rings[name]
        if held.filled == 0:
            return
        by_tma = [tile for tile in map(self.text.tiles.get, held.loaded) if not isinstance(tile, pieces.NamedTile)]
        nbytes = sum(map(bytes_of, by_tma))
        expect(held.expected == nbytes, f"{name} expects {held.expected} bytes, and {' and '.join(held.loaded)} bring {nbytes}")

    def loaded(self, tile: Any, name: str, what: str, args: list[Any], state: State) -> Any:
        if what == "find":             # which rows a thread copies
            expect(args[0] == Name(self.block_of(name).array), f"{name} looks up rows of {args[0]}")
            return Found(name, args[2])
        if what == "load_pages":       # the stacks' last coordinate is the line of the table, in place of a page
            source, (column, *own), table, line, first, _, ring, at = args
            place, rank = (column, first, *own, line), []
            expect(isinstance(table, Name), f"{name} takes pages of {table}")
        else:
            (source, place, ring, at), rank = args[:4], args[4:]
        if what == "copy":
            source, found, column, ring, at = args
            expect(isinstance(found, Found) and found.tile == name, f"{name} takes rows that were looked up as {found}")
            expect(self.text.rings[ring.name].full_arrivals > 128, f"{name} is copied into {ring.name}, which waits for TMA alone")
            place, rank = (column, found.first), []
        held = state.rings[ring.name]
        expect(self.thread == 0, f"{name} is loaded by thread {self.thread}")
        wanted = self.block_of(name).array if what == "copy" else f"map_{name.removesuffix('_tile')}"
        expect(source == Name(wanted), f"{name} is loaded by {source}")
        expect(at.stands(held.filled - 1, 1, ring.name) and held.expected is not None, f"{name} is loaded into {at} before its bytes are expected")
        expect(name not in held.loaded, f"{name} is loaded twice")
        expect((what == "load_part") == bool(tile.peers) == bool(rank) and (what == "load_pages") == bool(tile.page), f"{name} is loaded by {what}")
        expect(len(place) == 2 + tile.stacks, f"{name} is loaded from {place}")
        state.rings[ring.name] = replace(held, loaded=(*held.loaded, name))
        if self.numbers is not None:
            filled = next(event for event in reversed(state.log) if event[:2] == ("fill", ring.name))
            filled[2][name] = place

    def reads(self, tile: Any, at: At, state: State) -> tuple[str, str, int]:
        """What reads a slot: the tile, its ring and the position."""
        name = next(name for name, other in self.text.tiles.items() if other is tile)
        ring = self.text.rings_of_tiles[name]
        if isinstance(tile, multistage.CopiedTile):
            stage = at.position % (self.text.rings[ring].stages if ring else 1)
            held = state.copies.get((name, stage))
            expect(held is not None and held.group < state.there, f"{name}: stage {stage} is read before its copies are waited for")
            state.read |= {(name, stage)}
            return name, ring, stage
        held_ring = state.rings[ring]
        expect(at.phase == 0 and at.ring in ("", ring) and held_ring.released <= at.position < held_ring.filled, f"{name}: {at} is read, and stages from "
               f"{held_ring.released} to {held_ring.filled} are held")
        return name, ring, at.position

    def of_product(self, node: ast.Call, of: Any, name: str, what: str, args: list[Any], state: State) -> Any:
        if not what.startswith("multiply"):
            self.used(args, node)
            return DONE
        is_handed = isinstance(of, (collectives.HandedProduct, multistage.HandedMmaProduct))
        if is_handed:
            self.used(args[1], node)
            tiles = [self.reads(of.b, args[2 + (what == "multiply_half")], state)]
            group = args[2] if what == "multiply_half" else self.group
        else:
            slots, group = ([args[1]] * 2, args[2]) if what == "multiply" else (args[1:3], args[3])
            computed = isinstance(of.a, collectives.ComputedTile)
            tiles = [self.reads(tile, at, state) for tile, at in list(zip((of.a, of.b), slots))[computed:]]
        chain = getattr(getattr(self.text.plan.resizing, "made", None), "chain", None)
        is_half = what == "multiply_half"
        own = self.group if chain is None or not chain.wide or is_half else 0
        expect(group == own or (is_handed and not is_half), f"{name} takes what warpgroup {group} has, and is {self.group}")
        columns = of.b.lines if of.b_transposed else of.width or of.b.columns
        expect(not is_half or 256 >= columns == of.width <= of.b.columns // 2, f"{name} takes {of.width} columns of {of.b.columns}")
        expect(is_half or of.width <= of.b.columns, f"{name} takes {of.width} columns of {of.b.columns}")
        state.log.append(("multiply", name, self.places(tiles, state), self.watched(state)))
        if isinstance(of, (multistage.MmaProduct, multistage.HandedMmaProduct)):
            self.used(args[0], node)
            return DONE
        expect(state.is_fenced, f"{name} begins without a fence")
        expect(not isinstance(args[0], Flying) or args[0].group >= state.begun - len(state.groups), f"{name} adds to sums that no wait has named")
        fragments = (self.said(node.args[1]),) if is_handed else ()
        if not is_handed and computed:
            place = next(key for key, x in self.text.constants.items() if x is of.a)
            expect(place in state.met and of.a_transposed == (args[4] == 0), f"{name} takes {place} before warpgroups have met")
            tiles = [*tiles, (place, place, slots[0].position)]
        held, onto = state.open or Group(), (args[0].group,) if isinstance(args[0], Flying) else ()
        state.open = Group((*held.reads, *((ring, at) for _, ring, at in tiles)), (*held.fragments, *fragments), (*held.onto, *onto))
        return Flying(state.begun)

    def watched(self, state: State) -> tuple[Any, ...]:
        return () if self.given is None else tuple(state.env.get(x, 0) for x in self.given.watched)

    @property
    def group(self) -> int:
        return self.thread // 128 - (0 if self.text.plan.is_multistage else 1)

    def places(self, tiles: list[tuple[str, str, int]], state: State) -> Any:
        """Where the blocks are that a product takes, of copies; of rings, which fill."""
        if self.numbers is None:
            return ()
        return tuple((name, state.copies[name, at].place) if self.text.plan.is_multistage else (name, ring, at) for name, ring, at in tiles)

    def waited(self, node: ast.Call, state: State) -> Any:
        expect(state.open is None, "a wait for a group that is not committed")
        pending = self.value(node.args[0], state)
        values = [self.value(x, state) for x in node.args[1].elts]             # type: ignore[attr-defined]
        base = state.begun - len(state.groups)
        expect(len(state.groups) >= pending, f"a wait leaves {pending} groups, and {len(state.groups)} are on their way")
        expect(all(not isinstance(x, Flying) or x.group >= base for x in values), "a wait names sums that another one has ended")
        named = {x.group for x in values if isinstance(x, Flying)}
        for n in range(state.begun - 1, base - 1, -1):
            named |= set(state.groups[n - base].onto) if n in named else set()
        state.groups = state.groups[len(state.groups) - pending:] if pending else ()
        over = state.begun - len(state.groups)
        expect(named >= set(range(base, state.begun)), "a wait leaves out sums of a group that runs")
        return tuple(DONE if isinstance(x, Flying) and x.group < over else x for x in values)

    def block_of(self, tile: str) -> Staged:
        return next(b for b in self.text.blocks if f"{b.name}_tile" == tile)

    # -- copies by threads ------------------------------------------------------------------------------------------------------

    def of_copies(self, ring: Any, what: str, args: list[Any], state: State) -> Any:
        if what == "advance":
            return At((args[0].position + 1) % ring.stages, args[0].phase)          # a stage, which has no phase
        if what == "commit":
            state.copied += 1
        else:
            expect(what == "wait", what)
            state.there = max(state.there, state.copied - (ring.stages - 2))
            state.read = frozenset()
        return None

    def copied(self, tile: Any, name: str, args: list[Any], state: State) -> None:
        if len(args) == 8:
            array, (*own, column), columns, table, line, first, end, at = args
            place, ends = (line, *own, first, column), (end, columns)
        else:
            array, place, ends, at = args
        block = self.block_of(name)
        expect(array == Name(block.array), f"{name} is copied from {array}")
        ring = self.text.rings_of_tiles[name]
        stages = self.text.rings[ring].stages if ring else 1
        others = self.text.tiles_of_rings[ring] if in_turn(self.text.plan) and ring else [name]
        expect(0 <= at.position < stages and not any((other, at.position) in state.read for other in others), f"{name}: stage {at} is overwritten while it is read")
        expect(len(place) == 2 + len(block.stacks), f"{name} is copied from {place}")
        shape = self.text.plan.infos[block.array].shape[-2:]
        wanted = tuple(n if isinstance(dim, Axis) else (self.numbers or {})[dim.name] for n, dim in zip(shape, block.dims))
        expect(len(args) == 8 or ends == wanted, f"{name} is copied up to {ends}, and {block.array} ends at {wanted}")
        for other in others:
            state.copies.pop((other, at.position), None)
        state.copies[name, at.position] = Copy(state.copied, place)
        state.log.append(("copy", name, place, ends))


EVENTS = ("barrier", "cluster_barrier", "mbarrier_fence_init", "grid_launch_dependents", "grid_wait")


class _Mask:
    """In place of a component's mask, whose ranges a launch checks: all is visited, and tested."""

    @property
    def f(self) -> _Mask:
        return self

    def visited(self, first: int, last: int, keys: int, *_: Any) -> tuple[int, int]:
        return 0, keys

    def untested(self, *_: Any) -> tuple[int, int]:
        return 0, 0


class _Sizes:
    def __init__(self, numbers: dict[str, float]):
        self.__dict__.update(numbers)


def _names(said: str) -> set[str]:
    found = _NAMES.get(said)
    if found is None:
        found = _NAMES[said] = {x.id for x in ast.walk(ast.parse(said)) if isinstance(x, ast.Name)}
    return found


_NAMES: dict[str, set[str]] = {}



NUMBERS = frozenset({int, float, bool})
OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
