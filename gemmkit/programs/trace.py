"""A program's function called once on symbols: operations in static single assignment, loops with what rounds carry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmkit.programs.interpreter import Interpreter, entered
from gemmkit.programs.lengths import check_length
from gemmkit.programs.lines import line_here, refused
from gemmkit.programs.values import Arithmetic, Cell, Extent, Index, Parameter

__all__ = ["Carried", "Loop", "Store", "Value", "trace"]


@dataclass(eq=False)
class Value(Arithmetic):
    """An operation's result. ``data``: a constant's number, a scalar's name, where a load reads; ``line`` is the user's."""

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


class Tracer(Interpreter):
    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[list] = [[]]
        self.only: Index | None = None

    def emit(self, made: Any) -> Any:
        self.bodies[-1].append(made)
        return made

    def constant(self, x: Any) -> Value:
        return Value("const", data=float(x))

    def compute(self, op: str, args: tuple, dims: tuple, data: Any = None) -> Value:
        return self.emit(Value(op, args, dims, data))

    def filled(self, dims: tuple, value: float) -> Value:
        return Value("const", (), dims, value)

    def load(self, parameter: Parameter, key: tuple, dims: tuple) -> Value:
        return Value("load", (), dims, (parameter, key), parameter.name)

    def store(self, parameter: Parameter, key: tuple, dims: tuple, value: Value) -> None:
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
        self.bodies.append(loop.body)
        before = [(cell, cell.value) for cell in self.cells]
        for cell, init in before:
            cell.value = Value("carried", (), init.dims, line=init.line)
        inside = [cell.value for cell, _ in before]
        yield loop.indices if len(loop.indices) > 1 else loop.indices[0]
        self.bodies.pop()
        _give_names(user.f_locals, loop, before, inside)
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


def _give_names(known: dict[str, Any], loop: Loop, before: list, inside: list[Value]) -> None:
    """Values, cells and indices are called as the user calls them."""
    for name, x in known.items():
        if isinstance(x, (Value, Index)) and not x.name:
            x.name = name
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
    tracer = Tracer()
    with entered(tracer):
        given = {name: Value("scalar", data=name, name=name) if isinstance(x, (float, np.floating)) else x
                 for name, x in arguments.items()}
        function(**given)
        body = tracer.bodies[0]
    if len(tracer.bodies) > 1:
        raise refused(ValueError, "a loop of a program is left before its end: break and return depend on a round",
                      tracer.bodies[-2][-1].line)
    loops = [x for x in body if isinstance(x, Loop)]
    if len(loops) != 1 or any(isinstance(x, Store) for x in body):
        code = function.__code__
        raise refused(ValueError, f"{function.__name__} has {len(loops)} parallel loops: a program is one, and stores in it",
                      f"{code.co_filename}:{code.co_firstlineno}")
    return loops[0]
