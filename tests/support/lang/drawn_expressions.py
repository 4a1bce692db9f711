"""Drawn expressions of scalars: operators and functions over kinds of numbers, up to a depth.

An `Expression` is a text in the names of its operands; the same text is device code and, in the emulator, Python. Drawing asks
`gemmkit.lang.number_rules` for the kind of every part, so that what the rules refuse is not drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

from gemmkit.lang import number_rules as rules
from gemmkit.lang.number_rules import Weak

BF16 = rules.OF_ML_DTYPES[0]
DTYPES = [np.dtype(x) for x in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")] + [BF16]
#: Names of operands, and what they are: arrays' elements of every dtype, two coordinates and a run-time Python float.
OPERANDS: dict[str, Any] = {f"{'bf' if d == BF16 else d.kind}{d.itemsize * 8 if d != rules.BOOL else ''}": d for d in DTYPES}
OPERANDS = {name.replace("b", "flag") if name == "b" else name: kind for name, kind in OPERANDS.items()}
OPERANDS |= {"m": Weak.COORDINATE, "n": Weak.COORDINATE, "alpha": Weak.FLOAT}
LITERALS = (0, 1, 2, 3, 7, 100, 0.5, 2.0, -1.5, 1e-3)

_BINARY = (*rules.ARITHMETIC, *rules.BITWISE, *rules.COMPARISONS)
_UNARY = {"neg": "-", "pos": "+", "invert": "~"}


#: Marks a comparison of plain floats: in the emulator it is Python's boolean, which is a number where it is computed with.
PLAIN = "plain "


@dataclass(frozen=True)
class Expression:
    """``text``, its kind, and the names of the operands in it; ``operations`` are the operators and functions used."""

    text: str
    kind: Any
    names: frozenset[str]
    operations: tuple[str, ...] = ()
    depth: int = 0

    @property
    def computes_with_pythons_booleans(self) -> bool:
        """What docs/reference/device_code.md leaves out: the sum of two such is a number in the emulator."""
        return self.depth > 1 and any(op.startswith(PLAIN) for op in self.operations)

    @property
    def is_literal(self) -> bool:
        return not self.names


def leaf(rng: Any, kinds: list[str] | None = None) -> Expression:
    if rng.random() < 0.15:
        value = LITERALS[rng.integers(len(LITERALS))]
        return Expression(repr(value) if value >= 0 else f"({value!r})", value, frozenset())
    names = kinds or list(OPERANDS)
    name = names[rng.integers(len(names))]
    return Expression(name, OPERANDS[name], frozenset({name}))


def drawn(rng: Any, depth: int, kinds: list[str] | None = None) -> Expression:
    """An expression of at most ``depth`` operations on a path; never a literal alone."""
    while True:
        out = _try(rng, depth, kinds)
        if out is not None and not out.is_literal:
            return out


def _try(rng: Any, depth: int, kinds: list[str] | None) -> Expression | None:
    if depth == 0:
        return leaf(rng, kinds)
    how = rng.random()
    a = _try(rng, depth - 1 if rng.random() < 0.7 else 0, kinds)
    if a is None:
        return None
    try:
        if how < 0.62:
            b = _try(rng, int(rng.integers(depth)), kinds)
            return None if b is None else of_two(_BINARY[rng.integers(len(_BINARY))], a, b)
        if how < 0.72:
            b = _try(rng, int(rng.integers(depth)), kinds)
            return None if b is None else of_two(rules.EXTREMA[rng.integers(2)], a, b)
        if how < 0.82:
            op = rules.UNARY[rng.integers(len(rules.UNARY))]
            return of_one(op, a)
        if how < 0.92:
            return of_one(rules.CONVERSIONS[rng.integers(len(rules.CONVERSIONS))], a)
        return of_math(rng, a)
    except TypeError:
        return None


def of_two(op: str, a: Expression, b: Expression) -> Expression | None:
    if a.is_literal and b.is_literal:
        return None
    kind = rules.result(op, a.kind, b.kind)
    text = f"{op}({a.text}, {b.text})" if op in rules.EXTREMA else f"({a.text} {op} {b.text})"
    if op in rules.COMPARISONS and rules.is_weak(a.kind) and rules.is_weak(b.kind) and \
            (rules.is_float(a.kind) or rules.is_float(b.kind)):
        op = PLAIN + op
    return Expression(text, kind, a.names | b.names, (*a.operations, *b.operations, op), 1 + max(a.depth, b.depth))


def of_one(op: str, a: Expression) -> Expression | None:
    if a.is_literal:
        return None
    if op in rules.CONVERSIONS:
        kind, text = rules.converted(op, a.kind), f"{op}({a.text})"
    else:
        kind = rules.unary(op, a.kind)
        text = f"abs({a.text})" if op == "abs" else f"({_UNARY[op]}{a.text})"
    return Expression(text, kind, a.names, (*a.operations, op), 1 + a.depth)


_MATH = (*rules.MATH_OF_ONE, *rules.MATH_TO_WHOLE, *rules.MATH_TESTS)


def of_math(rng: Any, a: Expression) -> Expression | None:
    if a.is_literal:
        return None
    name = _MATH[rng.integers(len(_MATH))]
    return Expression(f"math.{name}({a.text})", rules.of_math(name, a.kind), a.names, (*a.operations, name), 1 + a.depth)


def function(texts: list[str]) -> FunctionType:
    """``f(flag, i8, ..., m, n, alpha)``: a tuple of the expressions."""
    scope: dict[str, Any] = {"math": math, "__name__": __name__}
    source = f"def f({', '.join(OPERANDS)}):\n    return ({', '.join(texts)},)\n"
    exec(compile(source, f"<{len(texts)} drawn expressions>", "exec"), scope)
    return scope["f"]                                          # type: ignore[no-any-return]


__all__ = ["DTYPES", "LITERALS", "OPERANDS", "Expression", "drawn", "function", "leaf", "of_one", "of_two"]
