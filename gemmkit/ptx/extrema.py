"""The larger and the smaller of two floats, NaN where either is one, and an integer's absolute value."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import ir
from gemmkit.ptx.build import assembly

#: The types that have the instruction, from compute capability 8.0 on, and the LLVM types of their registers.
NATIVE = {"f32": ir.FloatType(), "f16": ir.IntType(16), "bf16": ir.IntType(16)}


def extremum(builder: Any, name: str, kind: str, a: Any, b: Any) -> Any:
    """``max`` or ``min`` of two numbers of a type of `NATIVE`, in one instruction (compute capability 8.0)."""
    return assembly(builder, f"{name}.NaN.{kind} $0, $1, $2;", [NATIVE[kind]], [a, b], pure=True)[0]


def selected(builder: Any, name: str, a: Any, b: Any) -> Any:
    """The same of LLVM floats, by two comparisons and a select (of a float64: one for each half)."""
    better = builder.fcmp_ordered(">" if name == "max" else "<", a, b)
    return builder.select(builder.or_(better, builder.fcmp_unordered("uno", a, a)), a, b)


def absolute(builder: Any, value: Any) -> Any:
    """An integer's absolute value; of the most negative one itself, as in NumPy.

    PTX's ``abs`` does not say what it gives there, and ptxas takes its result for positive: ``abs(x) < 0`` becomes False
    (13.0). LLVM's select of ``x`` and ``-x`` becomes that ``abs`` too. So it is the larger of both.
    """
    bits, width = value.type, max(value.type.width, 32)
    wide = value if width == bits.width else builder.sext(value, ir.IntType(width))
    larger = assembly(builder, f"max.s{width} $0, $1, $2;", [wide.type], [wide, builder.neg(wide)], pure=True)[0]
    return larger if width == bits.width else builder.trunc(larger, bits)
