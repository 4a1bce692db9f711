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
    Over,
    Put,
    Raw,
    Source,
    Store,
    expressions,
    number,
    rewritten,
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
    for source in _fewer_indices(case.source):
        yield replace(case, source=_trimmed(source))
    for loop in _without(case.source.loop):
        yield replace(case, source=_trimmed(replace(case.source, loop=loop)))
    for loop in _simpler(case.source.loop):
        yield replace(case, source=_trimmed(replace(case.source, loop=loop)))
    for name, size in case.sizes.items():
        for less in (1, 8, 64, size // 2):
            if 0 < less < size:
                yield replace(case, sizes={**case.sizes, name: less})
    for n, array in enumerate(case.source.arrays):
        for change in ({"pitch": 1},) if array.role == "offsets" else ({"dtype": "float16"}, {"pitch": 8}, {"style": "normal"}):
            new = replace(array, **change)
            if new != array and not (array.role == "length" or (array.style in ("whole", "places") and "style" in change)):
                yield replace(case, source=replace(case.source, arrays=(*case.source.arrays[:n], new, *case.source.arrays[n + 1:])))


def _trimmed(source: Source) -> Source:
    """Without arguments that nothing uses."""
    loads = {x.data[0] for x in expressions(source.loop) if x.op == "load"}
    stores = {x.array for x in statements(source.loop) if isinstance(x, Store)}
    said = {o.axis.partition(".")[0].partition("[")[0] for x in statements(source.loop) if isinstance(x, Loop) for o in x.over}
    cuts = tuple(x for x in source.cuts if x.name in said)
    axes = said | {y for x in cuts for y in (x.axis.partition(".")[0], x.offsets)}
    shapes = {dim.partition(".")[0] for x in statements(source.loop) if isinstance(x, Cell) for dim in x.shape}
    raw = " ".join(x.text for x in statements(source.loop) if isinstance(x, Raw))
    arrays = tuple(x for x in source.arrays if x.name in loads | stores | axes | shapes or x.name in raw)
    used = {x.data for x in expressions(source.loop) if x.op == "scalar"}
    numbers = {name: value for name, value in source.numbers.items() if name in used or name in raw}
    return replace(source, arrays=arrays, numbers=numbers, cuts=cuts,
                   told=None if source.told is None else {name: x for name, x in source.told.items() if name in numbers} or None)


def _fewer_indices(source: Source) -> Iterator[Source]:
    """With rows and rounds along all of an array in place of pieces, and without an index of a stack. Offsets stay those of an array that
    is there, as they are made for its size."""
    cuts = {x.name: x.axis for x in source.cuts}
    cut = [o for x in statements(source.loop) if isinstance(x, Loop) for o in x.over if o.piece]
    for over in cut:
        whole = _changed_overs(source.loop, lambda o, over=over: replace(o, axis=cuts[o.axis.partition(".")[0].partition("[")[0]], piece=())
                               if o is over else o)                                         # type: ignore[misc]
        if over in source.loop.over and not any(o.piece[1] == over.piece[1] for o in cut if o is not over):
            yield from _without_index(replace(source, loop=whole), over.piece[1])
        elif over not in source.loop.over:
            yield replace(source, loop=whole)
    for over in source.loop.over:
        if over.stack and not any(o.piece[1].partition(" // ")[0] == over.index for o in cut):
            yield from _without_index(source, over.index)


def _without_index(source: Source, index: str) -> Iterator[Source]:
    if any(x.op == "place" and x.data == index for x in expressions(source.loop)):
        return
    read = {x.data[0]: x.data[1] for x in expressions(source.loop) if x.op == "load"}
    read |= {x.array: x.indices for x in statements(source.loop) if isinstance(x, Store)}

    def is_other(x: str) -> bool:
        return x.partition(" // ")[0] != index

    arrays = tuple(replace(a, dims=tuple(dim for n, dim in enumerate(a.dims) if n >= len(read[a.name]) or is_other(read[a.name][n])))
                   if a.name in read else a for a in source.arrays)
    if not all(a.dims for a in arrays):
        return
    left = {name: tuple(filter(is_other, indices)) for name, indices in read.items()}

    def named(o: Over) -> Over:
        name, _, axis = o.axis.partition(".")
        if axis.startswith("count") and o.index in left.get(name, ()):
            at = left[name].index(o.index)
            return replace(o, axis=f"{name}.counts[{at}]" if at else f"{name}.count")
        return o

    def without(x: Any) -> Any:
        if isinstance(x, Store):
            return replace(x, indices=left[x.array])
        return replace(x, body=tuple(map(without, x.body))) if hasattr(x, "body") else x

    loop = without(rewritten(source.loop, lambda x: replace(x, data=(x.data[0], left[x.data[0]])) if x.op == "load" else x))
    loop = _changed_overs(replace(loop, over=tuple(o for o in loop.over if o.index != index)), named)
    yield replace(source, arrays=arrays, loop=loop)


def _changed_overs(loop: Any, change: Callable[[Over], Over]) -> Any:
    body = tuple(_changed_overs(x, change) if hasattr(x, "body") else x for x in loop.body)
    return replace(loop, body=body, **({"over": tuple(map(change, loop.over))} if isinstance(loop, Loop) else {}))


def _without(loop: Loop) -> Iterator[Loop]:
    """The loop without one of its statements, within others or not."""
    for n, held in enumerate(loop.body):
        rest = (*loop.body[:n], *loop.body[n + 1:])
        if not isinstance(held, Raw):
            yield replace(loop, body=rest)
        for inner in _without(held) if isinstance(held, (Loop, Once)) else ():          # type: ignore[arg-type]
            if inner.body:
                yield replace(loop, body=(*loop.body[:n], inner, *loop.body[n + 1:]))
    for part in ("start", "stop"):
        if getattr(loop, part) is not None:
            yield replace(loop, **{part: None})
        yield from (replace(loop, **{part: less}) for less in getattr(getattr(loop, part), "args", ()))


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

