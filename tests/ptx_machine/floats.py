"""Arithmetic of floats: 16, 32 and 64 bits, and packed pairs, with their directions of rounding.

Instructions that the hardware approximates (``ex2.approx``, ``rcp.approx``, ``sin.approx``, ...) are computed in float64 and rounded:
within one or two units in the last place of what the hardware gives (PTX ISA, tables of maximum errors; ``sin`` and ``cos`` within
2^-20.5 absolute), so results that use them are compared within bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx_machine.faults import UnknownInstruction
from tests.ptx_machine.kinds import BF16, KINDS, Kind
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import Operation, operation
from tests.ptx_machine.rounding import F64, add64, flushed, fma64, fused64, multiply64, narrowed, odd, two_sum

MODES = ("rn", "rz", "rm", "rp")
TABLE: dict[str, Callable[[Instruction], Operation]] = {}             # of the names that integers share


def float_operation(*names: str) -> Any:
    def enter(make: Any) -> Any:
        TABLE.update(dict.fromkeys(names, make))
        return make

    return enter


def finished(i: Instruction, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` with ``.ftz`` of operands and result, ``.sat`` and ``.relu`` of the result."""
    flush = flushed if i.has("ftz") else lambda x: x

    def compute(*args: np.ndarray) -> np.ndarray:
        out = flush(f(*[flush(x) for x in args]))
        dtype = out.dtype
        if i.has("sat"):
            out = np.where(np.isnan(out), dtype.type(0), np.clip(out, dtype.type(0), dtype.type(1)))
        if i.has("relu"):
            out = np.where(np.isnan(out) | (out > 0), out, dtype.type(0))
        return out.astype(dtype)

    return compute if any(map(i.has, ("ftz", "sat", "relu"))) else f


def rounded(kind: Kind, mode: str, narrow: Any, wide: Any, native: Any = None) -> Callable[..., Any]:
    """The function of a type: ``wide(..., mode)`` of float64; else ``native`` rounded to nearest, or ``narrow`` in float64 rounded to odd."""
    if kind.bits == 64:
        return lambda *x: wide(*x, mode)
    if mode == "rn" and native is not None:
        return native
    return lambda *x: narrowed(narrow(*x), kind.dtype, mode)


@float_operation("add", "sub")
def add_sub(i: Instruction) -> Operation:
    i.only(*MODES, "ftz", "sat")
    kind, mode = i.kind, i.one_of(*MODES, default="rn")
    sign = kind.dtype.type(-1 if i.name == "sub" else 1)
    f = rounded(kind, mode, lambda a, b: odd(*two_sum(a.astype(F64), sign.astype(F64) * b.astype(F64))),
                lambda a, b, m: add64(a, sign * b, m), np.add if i.name == "add" else np.subtract)
    return Operation([kind, kind], kind, finished(i, f))


@float_operation("mul")
def mul(i: Instruction) -> Operation:
    i.only(*MODES, "ftz", "sat")
    kind, mode = i.kind, i.one_of(*MODES, default="rn")
    f = rounded(kind, mode, lambda a, b: a.astype(F64) * b.astype(F64), multiply64, np.multiply)
    return Operation([kind, kind], kind, finished(i, f))


@float_operation("mad")
def mad(i: Instruction) -> Operation:
    return fma(i)


@operation("fma")
def fma(i: Instruction) -> Operation:
    i.only(*MODES, "ftz", "sat", "relu")
    kind, mode = i.kind, i.one_of(*MODES)
    return Operation([kind, kind, kind], kind, finished(i, rounded(kind, mode, fused64, fma64)))


@float_operation("min", "max")
def least(i: Instruction) -> Operation:
    """A number wins over a NaN, unless ``.NaN`` is said; -0 is less than 0."""
    i.only("ftz", "NaN")
    kind, is_min = i.kind, i.name == "min"

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.broadcast_arrays(a, b)
        first = (a < b) | ((a == b) & np.signbit(a)) if is_min else (a > b) | ((a == b) & ~np.signbit(a))
        out = np.where(first | np.isnan(b), a, b)
        if i.has("NaN"):
            out = np.where(np.isnan(a) | np.isnan(b), kind.dtype.type(np.nan), out)
        return out.astype(kind.dtype)

    return Operation([kind, kind], kind, finished(i, compute))


@float_operation("abs", "neg")
def sign(i: Instruction) -> Operation:
    i.only("ftz")
    f = np.abs if i.name == "abs" else np.negative
    return Operation([i.kind], i.kind, finished(i, f))


@operation("copysign")
def copysign(i: Instruction) -> Operation:
    """b with the sign of a."""
    i.only()
    return Operation([i.kind, i.kind], i.kind, lambda a, b: np.copysign(b, a))


@float_operation("div")
def div(i: Instruction) -> Operation:
    i.only("rn", "full", "approx", "ftz")
    i.one_of("rn", "full", "approx")
    return Operation([i.kind, i.kind], i.kind, finished(i, np.divide))


@operation("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def function(i: Instruction) -> Operation:
    """Square root and reciprocal are exact to the rounding, where ``.rn`` says so."""
    i.only("rn", "approx", "ftz")
    if i.one_of("rn", "approx") == "rn" and i.name not in ("sqrt", "rcp"):
        raise UnknownInstruction("is only approximated", i)
    f = {"sqrt": np.sqrt, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "ex2": np.exp2, "lg2": np.log2, "sin": np.sin,
         "cos": np.cos, "tanh": np.tanh}[i.name]
    kind = i.kind
    return Operation([kind], kind, finished(i, lambda x: _to(f(x.astype(F64)), kind)))


def _to(value: np.ndarray, kind: Kind) -> np.ndarray:
    if kind.bits == 64:
        return value
    return np.reshape(narrowed(value, kind.dtype), np.shape(value)) if kind.dtype == BF16 else value.astype(kind.dtype)


@operation("testp")
def test(i: Instruction) -> Operation:
    tests: dict[str, Any] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x), "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)}
    i.only(*tests)
    return Operation([i.kind], KINDS["pred"], tests[i.one_of(*tests)])


__all__ = ["MODES", "TABLE", "finished", "float_operation"]
