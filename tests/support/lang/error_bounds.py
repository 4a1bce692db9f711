"""How far a drawn expression's value on the device may be from the emulator's: a bound, carried from operation to operation.

Every operation is within `number_rules.ULPS` of NumPy's where its operands are equal. Where they differ, by up to their own
bounds, it moves by as much as it does over that interval, and both results are rounded. A product that is added to is perhaps
not rounded at all: the compiler fuses ``a * b + c``. Where an operation jumps within the interval (``floor``, ``%``, a
comparison, the edge of a domain) there is no bound.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gemmkit.emulator.functions import BUILTINS, MATH, kind_of
from gemmkit.lang import number_rules as rules
from gemmkit.lang.number_rules import FLOAT64, Weak


class NoBound(Exception):
    """The operands' intervals reach over a jump, or to where there is no number."""


class Bounded(NamedTuple):
    """A value as the emulator has it, and how far the device's may be from it."""

    value: Any
    error: float


_OPERATORS: dict[type, tuple[str, Callable[..., Any]]] = {
    ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul), ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv), ast.Mod: ("%", operator.mod), ast.Pow: ("**", operator.pow),
    ast.BitAnd: ("&", operator.and_), ast.BitOr: ("|", operator.or_), ast.BitXor: ("^", operator.xor),
    ast.LShift: ("<<", operator.lshift), ast.RShift: (">>", operator.rshift), ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le), ast.Gt: (">", operator.gt), ast.GtE: (">=", operator.ge), ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne), ast.USub: ("neg", operator.neg), ast.UAdd: ("pos", operator.pos),
    ast.Invert: ("invert", operator.invert),
}
_EXACT = {"neg", "pos", "abs", "fabs", "max", "min", "float"}       # they round nothing; what they are given may be rounded before
_JUMPS = {"floor", "ceil", "trunc", "round", "int", "bool", "//", "isfinite", "isinf", "isnan", *rules.COMPARISONS, *rules.BITWISE,
          "invert"}


def bounded(text: str, names: Mapping[str, Any]) -> Bounded:
    """An expression's value for operands, and its bound.

    Raises NoBound where there is none, and what the emulator raises.

    >>> bounded("math.exp(x) * y + 1", {"x": np.float32(1), "y": np.float32(2)}).error < 1e-5
    True
    """
    return _bounded(ast.parse(text, mode="eval").body, names, False)


def _bounded(node: Any, names: Mapping[str, Any], is_added: bool) -> Bounded:
    if isinstance(node, ast.Constant):
        return Bounded(node.value, 0.0)
    if isinstance(node, ast.Name):
        return Bounded(names[node.id], 0.0)
    name, function, given = _operation(node)
    adds = name in ("+", "-") or (is_added and name in ("neg", "pos"))
    out = _applied(name, function, [_bounded(x, names, adds) for x in given])
    if is_added and name == "*" and _place(out.value) > 0:
        return Bounded(out.value, out.error + _place(out.value) / 2)
    return out


def _operation(node: Any) -> tuple[str, Callable[..., Any], list]:
    if isinstance(node, ast.BinOp):
        return (*_OPERATORS[type(node.op)], [node.left, node.right])
    if isinstance(node, ast.Compare):
        return (*_OPERATORS[type(node.ops[0])], [node.left, *node.comparators])
    if isinstance(node, ast.UnaryOp):
        return (*_OPERATORS[type(node.op)], [node.operand])
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, getattr(MATH, node.func.attr), node.args
    return node.func.id, BUILTINS[node.func.id], node.args


def _applied(name: str, function: Callable[..., Any], given: list[Bounded]) -> Bounded:
    values = [x.value for x in given]
    value = function(*values)
    if isinstance(value, complex):
        raise NoBound
    steps = rules.ULPS.get(name, (0, 0))[_computed_in(value) == FLOAT64]
    own = _own_error(name, value, steps)
    errors = [_converted_error(x, value) for x in given]
    if not any(errors):
        return Bounded(value, own)
    moved = _moved(name, values, errors, value)
    if name in _JUMPS:
        return Bounded(value, 0.0)
    rounding = 0.0 if name in _EXACT else _place(value, moved)        # half of one in either world
    return Bounded(value, moved + own + rounding)


def _own_error(name: str, value: Any, steps: int) -> float:
    """Of the operation itself. Between its poles and near its zeros ``lgamma`` is exact in absolute terms alone."""
    if name == "lgamma" and math.isfinite(value) and abs(float(value)) < 8:
        return steps * 8 * float(np.finfo(_computed_in(value)).eps)
    return steps * _place(value)


def _moved(name: str, values: list, errors: list[float], value: Any) -> float:
    """How far the result moves while operands move by their errors; the double of what is seen at a few places."""
    if not all(math.isfinite(float(x)) for x in (*values, value)) or not all(map(math.isfinite, errors)):
        raise NoBound
    if name in rules.COMPARISONS and abs(float(values[0]) - float(values[1])) <= 2 * sum(errors):
        raise NoBound
    if name == "bool" and abs(float(values[0])) <= 2 * errors[0]:
        raise NoBound
    centre = _exact(name, [float(x) for x in values])
    most = 0.0
    for steps in itertools.product(*[(-1.0, -0.5, 0.0, 0.5, 1.0) if error else (0.0,) for error in errors]):
        there = _exact(name, [float(x) + 2 * step * error if name in _JUMPS or name == "%" else float(x) + step * error
                              for x, step, error in zip(values, steps, errors)])
        if not math.isfinite(there) or (name in _JUMPS and there != centre):
            raise NoBound
        most = max(most, abs(there - centre))
    if name == "%" and _jumps_over(values, errors):
        raise NoBound
    return 2 * most


def _jumps_over(values: list, errors: list[float]) -> bool:
    """Whether the quotient of ``%`` reaches over a whole number."""
    moved = [[float(x) + 2 * step * error for step in (-1, 0, 1)] for x, error in zip(values, errors)]
    return any(b == 0 for b in moved[1]) or len({a // b for a in moved[0] for b in moved[1]}) > 1


def _exact(name: str, values: list[float]) -> float:
    """The operation in float64; NaN where there is no number."""
    try:
        if name in ("max", "min", "int", "bool", "float", "round", "abs"):
            return float({"max": max, "min": min, "int": int, "bool": bool, "float": float, "round": round, "abs": abs}[name](*values))
        if name in rules.BITWISE or name == "invert":
            raise NoBound
        by_name = {op: f for op, f in _OPERATORS.values()}
        return float(by_name[name](*values) if name in by_name else getattr(math, name)(*values))
    except (ArithmeticError, ValueError, TypeError):
        return math.nan


def _computed_in(value: Any) -> np.dtype:
    """The dtype of a number, by the emulator's kinds; float64 of what is plain."""
    kind = kind_of(value)
    return kind if isinstance(kind, np.dtype) else FLOAT64


def _place(value: Any, error: float = 0.0) -> float:
    """The unit in the last place of a float, or of what lies within its error; 0 of what is no float or not finite."""
    kind = kind_of(value)
    if not rules.is_float(kind) or not math.isfinite(value):
        return 0.0
    dtype: Any = kind if isinstance(kind, np.dtype) else FLOAT64
    with np.errstate(all="ignore"):
        there = dtype.type(abs(float(value)) + error)
        if not np.isfinite(there):
            raise NoBound
        return float(np.spacing(there))


def _converted_error(given: Bounded, result: Any) -> float:
    """An operand's error once it has the type that is computed in: a float64 is perhaps rounded to a float32 before."""
    if not given.error:
        return 0.0
    into = kind_of(result)
    own, wanted = kind_of(given.value), into if isinstance(into, np.dtype) and rules.is_float(into) else None
    if wanted is None or (isinstance(own, np.dtype) and own.itemsize <= wanted.itemsize) or own is Weak.COORDINATE:
        return given.error
    return given.error + _place(wanted.type(given.value), given.error)


__all__ = ["Bounded", "NoBound", "bounded"]
