"""Equal expressions that cost less: exponentials to base 2, reciprocals for divisions, one of what is written twice.

| written | computed | instead of |
|---|---|---|
| exp(x) | exp2(x log2 e) | libdevice's, three instructions longer |
| log(x) | log2(x) ln 2 | some twenty |
| x / constant | x (1 / constant) | a division, some eight |
| x / y | x reciprocal(y), to 1 ulp | a division |
| (c x) d, -(x) c | (c d) x, x (-c) | a multiplication more |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gemmkit.programs.trace import Value

LEAVES = ("const", "scalar", "carried", "after", "load", "coordinate")


def simplified(roots: list[Value]) -> list[Value]:
    """The values, with what they are made of."""
    rewriter = Rewriter()
    return [rewriter.of(root) for root in roots]


def _constant(number: float) -> Value:
    return Value("const", data=number, line="")


class Rewriter:
    """Makes values anew, from their leaves on; equal ones become one."""

    def __init__(self) -> None:
        self._new: dict[Value, Value] = {}
        self._made: dict[Any, Value] = {}

    def of(self, x: Value) -> Value:
        if x not in self._new:
            self._new[x] = self._leaf(x) if x.op in LEAVES else self.build(x.op, tuple(map(self.of, x.args)), x)
        return self._new[x]

    def _leaf(self, x: Value) -> Value:
        """A load of one place is one load, a constant one constant."""
        key = (x.op, x.dims, (x.data[0].name, x.data[1]) if x.op == "load" else x.data)
        return x if x.op in ("carried", "after") else self._made.setdefault(key, x)

    def build(self, op: str, args: tuple, like: Value) -> Value:
        rule: Callable[..., Value | None] | None = getattr(self, f"_of_{op}", None)
        better = rule(like, *args) if rule is not None else None
        if better is not None:
            return better
        key = (op, args, like.dims, like.data)
        return self._made.setdefault(key, Value(op, args, like.dims, like.data, like.name, like.line))

    def _of_exp(self, like: Value, x: Value) -> Value:
        return self.build("exp2", (self.build("mul", (x, _constant(math.log2(math.e))), like),), like)

    def _of_log(self, like: Value, x: Value) -> Value:
        return self.build("mul", (self.build("log2", (x,), like), _constant(math.log(2))), like)

    def _of_div(self, like: Value, x: Value, y: Value) -> Value:
        if _is_number(y) and y.data:
            return self.build("mul", (x, _constant(1 / y.data)), like)
        return self.build("mul", (x, self.build("reciprocal", (y,), y)), like)

    def _of_mul(self, like: Value, x: Value, y: Value) -> Value | None:
        if _is_number(x) and _is_number(y):
            return _constant(x.data * y.data)
        if _is_number(x):
            return self.build("mul", (y, x), like)
        if _is_number(y) and x.op == "neg":
            return self.build("mul", (x.args[0], _constant(-y.data)), like)
        if _is_number(y) and x.op == "mul" and _is_number(x.args[1]):
            return self.build("mul", (x.args[0], _constant(x.args[1].data * y.data)), like)
        return x if _is_number(y) and y.data == 1 else None


def _is_number(x: Value) -> bool:
    return x.op == "const" and not x.dims
