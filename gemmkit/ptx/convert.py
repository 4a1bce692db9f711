"""16-bit floats: conversions and arithmetic.

LLVM's ``half`` is not used. Its loops of vectors end in NVVM's "unsupported operation", and a rounded product that is
added to something becomes a fused multiply-add, which rounds once where Python's two operators round twice.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir


def bf16_from_f32(builder: Any, value: Any) -> Any:
    """float32 to the bits of a bfloat16, round to nearest even (sm_80+)."""
    function = ir.FunctionType(ir.IntType(16), [ir.FloatType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.bf16.f32 $0, $1;", "=h,f"), [value])


def f16_from_f32(builder: Any, value: Any) -> Any:
    """float32 to the bits of a float16, round to nearest even."""
    function = ir.FunctionType(ir.IntType(16), [ir.FloatType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.f16.f32 $0, $1;", "=h,f"), [value])


def f16_from_f64(builder: Any, value: Any) -> Any:
    """float64 to the bits of a float16, rounded once to nearest even."""
    function = ir.FunctionType(ir.IntType(16), [ir.DoubleType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.f16.f64 $0, $1;", "=h,d"), [value])


def f32_from_f16(builder: Any, bits: Any) -> Any:
    """The bits of a float16 to float32."""
    function = ir.FunctionType(ir.FloatType(), [ir.IntType(16)])
    return builder.call(ir.InlineAsm(function, "cvt.f32.f16 $0, $1;", "=f,h"), [bits])


def f16_arithmetic(builder: Any, name: str, a: Any, b: Any) -> Any:
    """``add``, ``sub`` or ``mul`` on the bits of two float16, rounded; never fused with another."""
    function = ir.FunctionType(ir.IntType(16), [ir.IntType(16)] * 2)
    return builder.call(ir.InlineAsm(function, f"{name}.rn.f16 $0, $1, $2;", "=h,h,h"), [a, b])
