"""Conversions that LLVM has no instruction for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir


def bf16_from_f32(builder: Any, value: Any) -> Any:
    """float32 to the bits of a bfloat16, round to nearest even (sm_80+)."""
    function = ir.FunctionType(ir.IntType(16), [ir.FloatType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.bf16.f32 $0, $1;", "=h,f"), [value])
