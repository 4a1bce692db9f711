"""A smaller program that fails as a drawn one did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import gemmkit as gk
from tests.drawn_programs.grammar import Case
from tests.drawn_programs.syntax import (
    Add,
    Cell,
    Expr,
    Let,
    Loop,
    Once,
    Put,
    Raw,
    Source,
    Store,
    expressions,
    number,
    statements,
)

__all__ = ["shrunk"]


def shrunk(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found within some seconds of which ``fails`` is true, by leaving out one thing after the other."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                break
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    if case.mapping is not None:
        yield replace(case, mapping=None)
        for part in fields(case.mapping):
            value = getattr(case.mapping, part.name)
            if value != part.default and value not in (None, 0, ""):
                try:
                    less: Any = {} if part.name in ("blocks", "cluster", "places") else part.default
                    yield replace(case, mapping=replace(case.mapping, **{part.name: less}))
                except gk.ConfigError:
                    pass
    if case.how == "call":
        yield replace(case, how="plan")
    if case.machine == "ptx":
        yield replace(case, machine="emulator")
    if case.source.told is not None:
        yield replace(case, source=replace(case.source, told=None))
    for loop in _without(case.source.loop):
        yield replace(case, source=_trimmed(replace(case.source, loop=loop)))
    for loop in _simpler(case.source.loop):
        yield replace(case, source=_trimmed(replace(case.source, loop=loop)))
    for name, size in case.sizes.items():
        for less in (1, 8, 64, size // 2):
            if 0 < less < size:
                yield replace(case, sizes={**case.sizes, name: less})
    for n, array in enumerate(case.source.arrays):
        for change in ({"dtype": "float16"}, {"pitch": 8}, {"style": "normal"}):
            new = replace(array, **change)
            if new != array and not (array.role == "length" or (array.style in ("whole", "places") and "style" in change)):
                yield replace(case, source=replace(case.source, arrays=(*case.source.arrays[:n], new, *case.source.arrays[n + 1:])))


def _trimmed(source: Source) -> Source:
    """Without arguments that nothing uses."""
    loads = {x.data[0] for x in expressions(source.loop) if x.op == "load"}
    stores = {x.array for x in statements(source.loop) if isinstance(x, Store)}
    axes = {o.axis.partition(".")[0] for x in statements(source.loop) if isinstance(x, Loop) for o in x.over}
    shapes = {dim.partition(".")[0] for x in statements(source.loop) if isinstance(x, Cell) for dim in x.shape}
    raw = " ".join(x.text for x in statements(source.loop) if isinstance(x, Raw))
    arrays = tuple(x for x in source.arrays if x.name in loads | stores | axes | shapes or x.name in raw)
    used = {x.data for x in expressions(source.loop) if x.op == "scalar"}
    numbers = {name: value for name, value in source.numbers.items() if name in used or name in raw}
    return replace(source, arrays=arrays, numbers=numbers,
                   told=None if source.told is None else {name: x for name, x in source.told.items() if name in numbers} or None)


def _without(loop: Loop) -> Iterator[Loop]:
    """The loop without one of its statements, within others or not."""
    for n, held in enumerate(loop.body):
        rest = (*loop.body[:n], *loop.body[n + 1:])
        if not isinstance(held, Raw):
            yield replace(loop, body=rest)
        for inner in _without(held) if isinstance(held, (Loop, Once)) else ():          # type: ignore[arg-type]
            if inner.body:
                yield replace(loop, body=(*loop.body[:n], inner, *loop.body[n + 1:]))
    if loop.stop is not None:
        yield replace(loop, stop=None)


def _simpler(loop: Loop) -> Iterator[Loop]:
    """The loop with one expression in the place of a larger one."""
    for n, held in enumerate(loop.body):
        if isinstance(held, (Loop, Once)):
            for inner in _simpler(held):                                                # type: ignore[arg-type]
                yield replace(loop, body=(*loop.body[:n], inner, *loop.body[n + 1:]))
        elif isinstance(held, (Let, Add, Put, Store)):
            if isinstance(held, Let):
                yield replace(loop, body=(*loop.body[:n], *(_put_in(x, held) for x in loop.body[n + 1:])))
            for value in _less(held.value):
                yield replace(loop, body=(*loop.body[:n], replace(held, value=value), *loop.body[n + 1:]))
        if isinstance(held, Cell) and isinstance(held.begin, float) and held.begin:
            yield replace(loop, body=(*loop.body[:n], replace(held, begin=0.0), *loop.body[n + 1:]))


def _put_in(x: Any, let: Let) -> Any:
    """A statement or an expression with a local name's value in its place."""
    if isinstance(x, Expr):
        return let.value if x.op == "name" and x.data == let.name else replace(x, args=tuple(_put_in(y, let) for y in x.args))
    if isinstance(x, (Loop, Once)):
        return replace(x, body=tuple(_put_in(y, let) for y in x.body))
    return replace(x, value=_put_in(x.value, let)) if isinstance(x, (Let, Add, Put, Store)) else x


def _less(x: Expr) -> Iterator[Expr]:
    for y in x.args:
        if y.dims == x.dims and y.op not in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"):
            yield y
    if x.op not in ("number", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "dot", "load", "transpose", "cast") and not x.dims:
        yield number(1.0)
    for n, y in enumerate(x.args):
        for less in _less(y):
            yield replace(x, args=(*x.args[:n], less, *x.args[n + 1:]))

