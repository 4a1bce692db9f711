"""A program's function called once on symbols: operations in static single assignment, loops with what rounds carry."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from gemmkit.programs.interpreter import CONDITIONS, Interpreter, called, entered
from gemmkit.programs.lengths import check_length
from gemmkit.programs.lines import line_here, name_here, refused
from gemmkit.programs.values import Arithmetic, Axis, Cell, Extent, Index, Parameter, Term, shown


@dataclass(eq=False)
class Value:
    """An operation's result, equal to itself alone. ``data``: a constant's number, a scalar's name, where a load reads;
    ``line`` is the user's."""

    op: str
    args: tuple = ()
    dims: tuple = ()
    data: Any = None
    name: str = ""
    line: str = field(default_factory=line_here)

    def __repr__(self) -> str:
        return self.name or self.op


@dataclass(eq=False)
class Store:
    """``only``: stored by the first block along that index alone."""

    parameter: Parameter
    key: tuple
    value: Value
    only: Index | None
    line: str = field(default_factory=line_here)


@dataclass(eq=False)
class Carried:
    """A cell that rounds change: its value before the loop, as a round begins and ends, and after the loop."""

    cell: Cell
    init: Value
    inside: Value
    out: Value
    after: Value


@dataclass(eq=False)
class Loop:
    """``body`` has values, stores and loops, in the order in which they were written. ``stop``: the load of the length that
    bounds its rounds."""

    kind: str
    indices: tuple[Index, ...]
    body: list = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    stop: Value | None = None
    line: str = field(default_factory=line_here)
    twice: str = ""                    # the line of a product of a block with itself, which no kernel has


class Tracer(Interpreter):
    kind = Value

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[list] = [[]]
        self.only: Index | None = None
        self.over: dict[Value, Loop] = {}              # what rounds that are over have computed
        self.twice = ""                                # where rows and columns of a product are one block
        self.reads: set[str] = set()                   # the names of arrays that are read

    def emit(self, made: Any) -> Any:
        self.bodies[-1].append(made)
        return made

    def constant(self, x: Any) -> Value:
        return Value("const", data=float(x))

    def number(self, value: Value) -> float | None:
        return value.data if value.op == "const" and not value.dims else None

    def is_condition(self, value: Value) -> bool:
        return value.op in CONDITIONS

    def check(self, value: Value, said: Any) -> None:
        index = next((index for index in (*value.dims, *(value.data[1] if value.op == "load" else ()))
                      if isinstance(index, Index) and index.is_over), None)
        loop = self.over.get(value)
        if loop is not None or index is not None:
            name, along = name_here(said) or "acc", index if loop is None else shown(loop.indices)
            raise refused(ValueError, f"{name_here(said) or 'a value'} is of one round of {along}, which is over: what "
                                      f"rounds carry is a cell, {name} = gp.zeros(m, n) before the loop, and "
                                      f"{name} += ... or {name}[:] = ... in it")

    def compute(self, op: str, args: tuple, dims: tuple, data: Any = None) -> Value:
        return self.emit(Value(op, args, dims, data))

    def filled(self, dims: tuple, value: float) -> Value:
        return Value("const", (), dims, value)

    def twin(self, index: Index) -> Index:
        self.twice = self.twice or line_here()
        return super().twin(index)

    def load(self, parameter: Parameter, key: tuple, dims: tuple) -> Value:
        self.reads.add(parameter.name)
        return Value("load", (), dims, (parameter, key), parameter.name)

    def store(self, parameter: Parameter, key: tuple, dims: tuple, value: Value) -> None:
        if self.only is not None and any(index is self.only for index in key):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}] within once({self.only}): the first block along "
                                      f"{self.only} would be stored alone")
        self.emit(Store(parameter, key, value, self.only))

    def coordinate(self, dim: Any) -> Value:
        return Value("coordinate", (), (dim,), dim)

    def loop(self, extents: tuple[Extent, ...], kind: str, stop: Any = None) -> Iterator[Any]:
        if kind == "parallel" and len(self.bodies) > 1:
            raise refused(ValueError, "parallel(...) within a loop: tiles are the outermost loop")
        if kind == "sequential" and len(self.bodies) == 1:
            raise refused(ValueError, "sequential(...) outside of parallel(...): rounds are a tile's")
        length = None if stop is None else check_length(stop, extents[0])
        indices = tuple(Index(extent, of_tile=kind == "parallel") for extent in extents)
        loop = self.emit(Loop(kind, indices, stop=length))
        user = sys._getframe(1)
        known = dict(user.f_locals)
        names = _carried_names(user.f_code, user.f_lasti)
        self.bodies.append(loop.body)
        before = [(cell, cell.value) for cell in self.cells]
        for cell, init in before:
            cell.value = Value("carried", (), init.dims, line=init.line)
        inside = [cell.value for cell, _ in before]
        yield loop.indices if len(loop.indices) > 1 else loop.indices[0]
        self.bodies.pop()
        _give_names(user.f_locals, loop, before, inside)
        _check_names(user.f_locals, loop, known, names)
        for index in indices:
            index.is_over = True
        self.over.update((held, loop) for held in loop.body if isinstance(held, Value))
        for (cell, init), began in zip(before, inside):
            out = cell.value
            if out is began:
                cell.value = init
                for held in loop.body:                         # what does not change is not carried
                    if isinstance(held, Value):
                        held.args = tuple(init if arg is began else arg for arg in held.args)
            else:
                cell.value = Value("after", (), init.dims, name=began.name, line=began.line)
                loop.carried.append(Carried(cell, init, began, out, cell.value))


@lru_cache(maxsize=256)
def _accesses_of(code: CodeType) -> list[tuple[int, int, str, bool]]:
    """Where a function's code names its variables: (offset, line, name, whether it is bound)."""
    found, line = [], code.co_firstlineno
    for x in dis.get_instructions(code):
        position = getattr(x, "positions", None)       # from Python 3.11 on
        line = (position.lineno if position is not None else x.starts_line) or line
        if any(word in x.opname for word in ("_FAST", "_DEREF")) and isinstance(x.argval, (str, tuple)):
            names = x.argval if isinstance(x.argval, tuple) else (x.argval,)       # later Pythons name two at once
            kinds = [word == "STORE" for word in x.opname.split("_") if word in ("LOAD", "STORE")]
            found += [(x.offset, line, name, is_bound) for name, is_bound in zip(names, kinds)]
    return found


@lru_cache(maxsize=256)
def _carried_names(code: CodeType, at: int) -> dict[str, int]:
    """Names that the rounds of the loop ``at`` read before they bind them, with the lines where they bind them."""
    end = next((x.argval for x in dis.get_instructions(code) if x.offset == at and x.opname == "FOR_ITER"), 0)
    read, bound, found = set[str](), set[str](), dict[str, int]()
    for offset, line, name, is_bound in _accesses_of(code):
        if at < offset < end:
            if not is_bound and name not in bound:
                read.add(name)
            elif is_bound:
                bound.add(name)
                if name in read:
                    found[name] = line
    return found


def _check_names(now: dict[str, Any], loop: Loop, known: dict[str, Any], names: dict[str, int]) -> None:
    """Raises ValueError for a name that rounds bind anew: a program is traced once, so that a round would find what the name
    was before the loop."""
    for name, line in names.items():
        old, new = known.get(name), now.get(name)
        is_number = isinstance(old, (int, float)) and not isinstance(new, Term)
        if new is old or not isinstance(old, (Arithmetic, int, float)) or (is_number and old == new):
            continue
        at = f"{loop.line.rpartition(':')[0]}:{line}"
        if isinstance(old, Parameter):
            raise refused(ValueError, f"{name} is an array argument, and {name} = ... gives the name to something else, "
                                      f"which the next round or tile would find: call that otherwise, or store "
                                      f"it, {name}[...] = ...", at)
        raise refused(ValueError, f"{name} is {'bound anew' if isinstance(old, Cell) else 'no cell'}, and the next round "
                                  f"would not find what this one makes: write {name} = gp.zeros(m, n) before the loop, and "
                                  f"{name} += ... or {name}[:] = ... in it", at)


def _give_names(known: dict[str, Any], loop: Loop, before: list, inside: list[Value]) -> None:
    """Values, cells and indices are called as the user calls them."""
    for name, x in known.items():
        held = x.value if isinstance(x, Term) and not isinstance(x, Cell) else x
        if isinstance(held, (Value, Index)) and not held.name:
            held.name = name
        for (cell, _), began in zip(before, inside):
            if cell is x:
                began.name = name
    names = [index.name for index in loop.indices]
    if len(set(names)) < len(names) or not all(names):
        raise refused(ValueError, "each index of a loop needs a variable of its own", loop.line)


def trace(function: Any, arguments: dict[str, Any]) -> Loop:
    """The one parallel loop that a program is. ``arguments``: parameters, floating point numbers, which become run-time
    scalars, and whatever else the function takes.

    Raises what the words raise (ValueError, TypeError, with the user's line), and ValueError for another form.
    """
    tracer, code = Tracer(), function.__code__
    with entered(tracer):
        given = {name: Term(Value("scalar", data=name, name=name)) if isinstance(x, (float, np.floating)) else x
                 for name, x in arguments.items()}
        called(function, given, arguments)
        body = tracer.bodies[0]
    if len(tracer.bodies) > 1:
        raise refused(ValueError, "a loop of a program is left before its end: break and return depend on a round",
                      tracer.bodies[-2][-1].line)
    tracer.axes.check()
    loops = [x for x in body if isinstance(x, Loop)]
    if len(loops) != 1 or any(isinstance(x, Store) for x in body):
        raise refused(ValueError, f"{function.__name__} has {len(loops)} parallel loops: a program is one, and stores in it",
                      f"{code.co_filename}:{code.co_firstlineno}")
    (loop,) = loops
    if loop.carried:
        raise refused(ValueError, f"{loop.carried[0].cell!r} is from outside of the tiles, which do not know of each other: "
                                  "make it within the loop", loop.line)
    _check_stores(loop, code, [name for name, x in given.items() if isinstance(x, Parameter)], tracer.reads)
    _forget_axes(loop)
    loop.twice = tracer.twice
    return loop


def stores_of(loop: Loop) -> list[Store]:
    """All stores, in the order in which they are written."""
    return [x for held in loop.body for x in (stores_of(held) if isinstance(held, Loop) else [held]) if isinstance(x, Store)]


def _check_stores(loop: Loop, code: CodeType, arrays: list[str], reads: set[str]) -> None:
    """Raises ValueError where nothing is stored, a name of an array is bound in place of a store, a result is read, or one
    of a stack's matrices would be stored for all."""
    stores = stores_of(loop)
    results = {store.parameter.name for store in stores}
    for _, line, name, is_bound in _accesses_of(code):
        if is_bound and name in arrays and name not in results and name not in reads:
            key = ", ".join(index.name for index in loop.indices)
            raise refused(ValueError, f"{name} is an array argument: {name} = ... gives the name to a value, and stores "
                                      f"nothing; write {name}[{key}] = ...", f"{code.co_filename}:{line}")
    if not stores:
        raise refused(ValueError, "nothing is stored; a program's results are arguments, y[m] = ...", loop.line)
    for store in stores:
        name = store.parameter.name
        if name in reads:
            raise refused(ValueError, f"{name} is read and stored; a result needs an array of its own: read what it is made "
                                      f"of from another argument, {name}[{shown(store.key)}] = acc + c[{shown(store.key)}]",
                          store.line)
        missing = next((x for x in loop.indices if x.stack and not any(y is x for y in store.key)), None)
        if missing is not None and store.only is not missing:
            raise refused(ValueError, f"{name}[{shown(store.key)}] is stored for each {missing} of {missing.extent}, one "
                                      f"over the other; a result has a place for each, "
                                      f"{name}[{shown((missing, *store.key))}]", store.line)


def _forget_axes(loop: Loop) -> None:
    """From here on two whole axes of a length stand for each other: the program has said so, or they never meet."""
    pending: list[Any] = [loop]
    seen: set[int] = set()
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Loop):
            pending += [*x.body, *(y for c in x.carried for y in (c.init, c.inside, c.out, c.after))]
        elif isinstance(x, Store):
            pending.append(x.value)
        else:
            x.dims = tuple(Axis(d.size) if isinstance(d, Axis) else d for d in x.dims)
            if x.op == "coordinate" and isinstance(x.data, Axis):
                x.data = Axis(x.data.size)
            pending += x.args
