"""Arithmetic of integers: it wraps, quotients go towards zero."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx_machine import floats
from tests.ptx_machine.faults import UnknownInstruction
from tests.ptx_machine.kinds import KINDS, Kind
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import Operation, operation


def number(name: str) -> Any:
    """``name`` of integers, or of floats if its type is one."""
    def enter(make: Any) -> Any:
        of_floats = floats.TABLE.get(name)

        @operation(name)
        def chosen(i: Instruction) -> Operation:
            if i.kind.is_float:
                if of_floats is None:
                    raise UnknownInstruction("of floats", i)
                return of_floats(i)
            return make(i)

        return make

    return enter


def twice(kind: Kind) -> Kind:
    return KINDS[f"{kind.name[0]}{2 * kind.bits}"]


@number("add")
@number("sub")
def add_sub(i: Instruction) -> Operation:
    i.only("sat")
    kind, f = i.kind, {"add": np.add, "sub": np.subtract}[i.name]
    if not i.has("sat"):
        return Operation([kind, kind], kind, f)
    if kind.name != "s32":
        raise UnknownInstruction("saturates in s32 alone", i)
    return Operation([kind, kind], kind, lambda a, b: saturated(f(a.astype(np.int64), b.astype(np.int64)), kind))


def saturated(x: np.ndarray, kind: Kind) -> np.ndarray:
    limits = np.iinfo(kind.dtype)
    return np.clip(x, limits.min, limits.max).astype(kind.dtype)


def high(a: np.ndarray, b: np.ndarray, kind: Kind) -> np.ndarray:
    """The upper half of a product."""
    if kind.bits < 64:
        wide = twice(kind).dtype
        return (a.astype(wide) * b.astype(wide) >> kind.bits).astype(kind.dtype)
    a, b = np.broadcast_arrays(a, b)
    exact = [int(x) * int(y) >> 64 for x, y in zip(a.reshape(-1), b.reshape(-1))]
    return np.array(exact, kind.dtype).reshape(a.shape)


def product(i: Instruction) -> tuple[Any, Kind]:
    """(the product of two, its type) by the half that is wanted."""
    kind, half = i.kind, i.one_of("lo", "hi", "wide")
    if half == "lo":
        return np.multiply, kind
    if half == "hi":
        return (lambda a, b: high(a, b, kind)), kind
    wide = twice(kind)
    return (lambda a, b: a.astype(wide.dtype) * b.astype(wide.dtype)), wide


@number("mul")
def mul(i: Instruction) -> Operation:
    i.only("lo", "hi", "wide")
    f, out = product(i)
    return Operation([i.kind, i.kind], out, f)


@number("mad")
def mad(i: Instruction) -> Operation:
    i.only("lo", "hi", "wide")
    f, out = product(i)
    return Operation([i.kind, i.kind, out], out, lambda a, b, c: f(a, b) + c)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero; of a division by 0, which PTX leaves open, all bits."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    out = a // safe
    out = out + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(out.dtype)
    return np.where(b == 0, ~np.zeros_like(a), out)


@number("div")
def div(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind, i.kind], i.kind, quotient)


@operation("rem")
def rem(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind, i.kind], i.kind, lambda a, b: np.where(b == 0, a, a - quotient(a, b) * b))


@number("min")
@number("max")
def least(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind, i.kind], i.kind, {"min": np.minimum, "max": np.maximum}[i.name])


@number("abs")
@number("neg")
def one(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind], i.kind, {"abs": np.abs, "neg": np.negative}[i.name])


@operation("dp4a", "dp2a")
def dots(i: Instruction) -> Operation:
    """Four products of bytes, or two of 16-bit numbers with half of the other's bytes, added to c."""
    i.only("lo", "hi")
    a_kind, b_kind = i.kinds
    out = KINDS["s32" if a_kind.is_signed or b_kind.is_signed else "u32"]
    narrow = {kind.name: np.dtype(f"{'i' if kind.is_signed else 'u'}1") for kind in i.kinds}
    a_dtype = narrow[a_kind.name] if i.name == "dp4a" else np.dtype(f"{narrow[a_kind.name].kind}2")
    b_dtype, first = narrow[b_kind.name], 2 if i.has("hi") else 0

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        a, b = (np.ascontiguousarray(x).reshape(-1, 1) for x in np.broadcast_arrays(a, b))
        left, right = a.view(a_dtype).astype(np.int64), b.view(b_dtype).astype(np.int64)
        return ((left * right[:, first:first + left.shape[1]]).sum(1) + c).astype(out.dtype)

    return Operation([KINDS["b32"], KINDS["b32"], out], out, compute)


__all__ = ["number", "saturated"]
