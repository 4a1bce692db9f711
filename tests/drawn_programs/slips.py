"""Slips: what users write by mistake, each of which must be refused with the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.drawn_programs.syntax import (
    Add,
    Cell,
    Expr,
    Let,
    Loop,
    Once,
    Put,
    Raw,
    Statement,
    Store,
    expressions,
    statements,
    text_of,
)

__all__ = ["SLIPS", "slipped"]

CAPTURED = "captured = np.ones(3, np.float32)"
#: By name: what becomes of a value's text.
VALUES: dict[str, Callable[[str], str]] = {
    "np.exp": lambda x: f"np.exp({x})", "np.maximum": lambda x: f"np.maximum({x}, 0.0)", "np.where": lambda x: f"np.where({x} > 0.0, {x}, 0.0)",
    "np.sqrt": lambda x: f"np.sqrt({x})", "math.exp": lambda x: f"math.exp({x})", "**": lambda x: f"({x}) ** '2'",
    "//": lambda x: f"({x}) // 2.0", "%": lambda x: f"({x}) % 2.0", "float": lambda x: f"float({x})", "int": lambda x: f"int({x})",
    "if else": lambda x: f"({x}) if ({x}) > 0.0 else 0.0", "and": lambda x: f"({x}) and 1.0", "or": lambda x: f"({x}) or 1.0",
    "not": lambda x: f"not ({x})", "max": lambda x: f"max({x}, 0.0)", "in": lambda x: f"1.0 if ({x}) in (1.0, 2.0) else 0.0",
    "chained": lambda x: f"gp.where(0.0 < ({x}) < 1.0, 1.0, 0.0)",
    "a captured array": lambda x: f"({x}) + captured", "a captured array in a condition": lambda x: f"gp.where(({x}) > captured, 1.0, 0.0)",
    "a captured array as a condition": lambda x: f"gp.where(captured > 0, {x}, 0.0)",
    "a list": lambda x: f"[{x}]", "None": lambda x: "None", "a string": lambda x: "'1'", "a number's condition": lambda x: f"gp.where(True, {x}, 0.0)",
    "axis=2": lambda x: f"({x}).sum(axis=2)", "an index of a value": lambda x: f"({x})[0]", "math.sqrt": lambda x: f"math.sqrt({x})",
    "gp.exp of a list": lambda x: f"gp.exp([{x}])", "round": lambda x: f"round({x})", "sum": lambda x: f"sum({x})", "min": lambda x: f"min({x}, 0.0)",
    "divmod": lambda x: f"divmod({x}, 2.0)[0]", "an or of conditions": lambda x: f"gp.where((({x}) < 0.0) or (({x}) > 1.0), 1.0, 0.0)"}


def _changed(loop: Any, old: Statement, new: tuple[Statement, ...]) -> Any:
    """The loop with other statements in the place of one."""
    body: list[Statement] = []
    for held in loop.body:
        if held is old:
            body += new
        elif isinstance(held, (Loop, Once)):
            body.append(_changed(held, old, new))
        else:
            body.append(held)
    return replace(loop, body=tuple(body))


def _prefix(x: Any) -> str:
    if isinstance(x, Store):
        return f"{x.array}[{', '.join(x.indices)}] = "
    if isinstance(x, Put):
        return f"{x.name}[:] = "
    return f"{x.name} {'+=' if isinstance(x, Add) else '='} "


def _line(kind: str, x: Any, loop: Loop, case: Any, pick: Callable[..., Any]) -> tuple[Statement, ...] | None:
    """The statements that take the place of ``x``; None where it cannot have this slip."""
    if kind in VALUES:
        if isinstance(x, Let) and not any(x.name in re.findall(r"\w+", text_of(other.value)) for other in statements(loop)
                                          if other is not x and hasattr(other, "value")):
            return None                                        # nothing reads it, so that it may be anything
        if hasattr(x, "value") and not any(y.op in ("load", "name", "place", "scalar") for y in expressions(x.value)):
            return None                                        # a number, with which Python may do anything
        return (Raw(_prefix(x) + VALUES[kind](text_of(x.value))),) if hasattr(x, "value") else None
    if kind == "a cell is bound anew":                         # in rounds: elsewhere the name is what Python says
        if not any(x in y.body for y in statements(loop) if isinstance(y, Loop) and y.kind == "sequential"):
            return None
        if isinstance(x, Add):
            return (Raw(f"{x.name} = {x.name} + {text_of(x.value)}"),)
        return (Raw(f"{x.name} = {text_of(x.value)}"),) if isinstance(x, Put) else None
    if kind == "a result is bound":
        return (Raw(f"{x.array} = {text_of(x.value)}"),) if isinstance(x, Store) else None
    if kind == "added to a result":                            # elements of tiles may be
        is_of_rows = "rows" not in case.tags and any(isinstance(y, Once) and x in y.body for y in statements(loop))
        return (Raw(f"{x.array}[{', '.join(x.indices)}] += {text_of(x.value)}"),) if isinstance(x, Store) and is_of_rows else None
    if kind == "in place":
        read = [a.name for a in case.source.arrays if a.role != "result" and isinstance(x, Store)
                and len(a.dims) == len(next(b for b in case.source.arrays if b.name == x.array).dims)
                and any(y.data[0] == a.name and y.data[1] != x.indices for y in _loads(loop))]
        return (Raw(f"{pick(*read)}[{', '.join(x.indices)}] = {text_of(x.value)}"),) if read else None
    if kind == "a cell is a number":
        return (Raw(f"{x.name} = {pick('0', '0.0')}"),) if isinstance(x, Cell) else None
    if kind == "a cell is an array":
        return (Raw(f"{x.name} = np.zeros(({', '.join('3' for _ in x.dims)},))"),) if isinstance(x, Cell) else None
    if kind == "a cell of numbers":
        return (Raw(f"{x.name} = gp.zeros({', '.join('64' for _ in x.dims)})"),) if isinstance(x, Cell) else None
    if kind == "an element of a cell":
        return (Raw(f"{x.name}[0] = {text_of(x.value)}"),) if isinstance(x, Put) else None
    if kind == "break":
        return (x, Raw("break")) if not isinstance(x, (Loop, Cell)) else None
    if kind == "return":
        return (x, Raw(pick("return", "return 1.0"))) if not isinstance(x, (Loop, Cell)) else None
    if kind == "if":
        return (Raw(f"if {text_of(x.value)} > 0.0:\n    {_prefix(x)}{text_of(x.value)}"),) if isinstance(x, (Put, Store, Let)) else None
    if kind == "nested parallel":
        if not isinstance(x, Loop):
            return None
        return (replace(x, kind="parallel", start=None, stop=None),)
    if kind == "range":
        over = x.over[0] if isinstance(x, Loop) else None
        return (Raw(f"for {over.index} in range({over.axis}):\n    pass"),) if over is not None else None
    if kind == "an axis itself":
        over = x.over[0] if isinstance(x, Loop) else None
        return (Raw(f"for {over.index} in {over.axis}:\n    pass"),) if over is not None else None
    if kind == "two indices":
        return (Raw(f"{x.array}[{', '.join((*x.indices, *x.indices[:1]))}] = {text_of(x.value)}"),) if isinstance(x, Store) else None
    if kind == "a number as an index":
        return (Raw(f"{x.array}[{', '.join((*x.indices[:-1], '0'))}] = {text_of(x.value)}"),) if isinstance(x, Store) else None
    if kind == "a slice":
        return (Raw(f"{x.array}[{', '.join((*x.indices[:-1], ':'))}] = {text_of(x.value)}"),) if isinstance(x, Store) else None
    if kind == "no transpose":
        dot = x.value if isinstance(x, (Add, Let)) and x.value.op == "dot" else None
        if dot is None or "transpose" not in (dot.args[0].op, dot.args[1].op):
            return None
        plain = [y.args[0] if y.op == "transpose" else y for y in dot.args]
        return (Raw(f"{_prefix(x)}{text_of(Expr('dot', tuple(plain)))}"),)
    if kind == "a transpose too many":
        dot = x.value if isinstance(x, (Add, Let)) and x.value.op == "dot" else None
        if dot is None or dot.args[0].dims[1:] == dot.args[1].dims[1:]:          # of a square weight it is another program
            return None
        return (Raw(f"{_prefix(x)}{text_of(dot.args[0], top=False)} @ ({text_of(dot.args[1], top=False)}).T"),)
    assert kind == "the other axis", kind
    if not isinstance(x, Loop) or x.over[0].stack:
        return None
    (over,) = x.over
    name, _, axis = over.axis.partition(".")
    array = next((a for a in case.source.arrays if a.name == name), None)
    loads = {y.data[1] for y in _loads(x) if y.data[0] == name}
    if array is None or len(array.dims) < 2 or len(loads) != 1:
        return None
    return (replace(x, over=(replace(over, axis=f"{name}.{'rows' if axis == 'columns' else 'columns'}"),)),)


def _loads(x: Statement) -> list[Expr]:
    from tests.drawn_programs.syntax import expressions

    return [y for y in expressions(x) if y.op == "load"]


SLIPS = [*VALUES, "a cell is bound anew", "a cell is bound anew", "a result is bound", "added to a result", "in place", "a cell is a number",
         "a cell is an array", "a cell of numbers", "an element of a cell", "break", "return", "if", "nested parallel", "range", "an axis itself",
         "two indices", "a number as an index", "a slice", "no transpose", "a transpose too many", "the other axis", "the other axis",
         "the other axis"]


def slipped(case: Any, rng: np.random.Generator) -> Any:
    """The case with a slip somewhere."""
    def pick(*given: Any) -> Any:
        return given[rng.integers(len(given))]

    used = {x.name for x in statements(case.source.loop) if isinstance(x, (Add, Put))}
    used |= {x.data for x in expressions(case.source.loop) if x.op == "name"}              # a cell that is not may be anything
    places = [x for x in statements(case.source.loop) if x is not case.source.loop and type(x).__name__ != "Once"
              and (not isinstance(x, Cell) or x.name in used)]
    for _ in range(50):
        kind, x = pick(*SLIPS), pick(*places)
        made = _line(kind, x, case.source.loop, case, pick)
        if made is not None:
            source = replace(case.source, loop=_changed(case.source.loop, x, made), helpers=(CAPTURED,))
            sizes = case.sizes
            if kind in ("the other axis", "a transpose too many", "no transpose") and pick(True, True, False):
                sizes = dict.fromkeys(sizes, 64) | {x: sizes[x] for x in ("HGLBAP", "HGLBAPRTQN")["R" in sizes] if x in sizes}   # lengths do not show it
            return replace(case, source=source, sizes=sizes, slip=kind, machine="emulator")
    return case
