"""Instructions that operators of numbers need: 16- and 8-bit floats (conversions, arithmetic), extrema, absolute values.

LLVM's ``half`` is not used. Its loops of vectors end in NVVM's "unsupported operation", and a rounded product that is
added to something becomes a fused multiply-add, which rounds once where Python's two operators round twice.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.assembly import assembly
from gemmkit.lang.numba_hooks import ir
from gemmkit.lang.target import target_arch


def bf16_from_f32(builder: Any, value: Any) -> Any:
    """float32 to the bits of a bfloat16, round to nearest even: an instruction from sm_80 on, and a few before."""
    if tuple(target_arch())[:2] < (8, 0):
        return _bf16_by_integers(builder, value)
    function = ir.FunctionType(ir.IntType(16), [ir.FloatType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.bf16.f32 $0, $1;", "=h,f"), [value])


def _bf16_by_integers(builder: Any, value: Any) -> Any:
    """The upper half of the bits, one more where the lower half is over a half of it, or is a half and the upper one odd."""
    i16, i32 = ir.IntType(16), ir.IntType(32)
    word = builder.bitcast(value, i32)
    odd = builder.and_(builder.lshr(word, i32(16)), i32(1))
    upper = builder.lshr(builder.add(builder.add(word, i32(0x7FFF)), odd), i32(16))
    return builder.select(builder.fcmp_unordered("uno", value, value), i16(0x7FFF), builder.trunc(upper, i16))


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


# -- 8-bit floats (sm_89+) ------------------------------------------------------------------------------------------------
# The instructions saturate. What is too large becomes what ml_dtypes makes of it: a NaN of float8_e4m3fn, which has no
# infinities, an infinity of float8_e5m2.

_FLOAT8 = {"e4m3": (464.0, False, 0x7F), "e5m2": (61440.0, True, 0x7C)}       # limit, whether it is too large itself, bits


def f8_from_f32(builder: Any, kind: str, value: Any) -> Any:
    """float32 to the bits of an 8-bit float (``kind``: "e4m3" or "e5m2"), round to nearest even."""
    i8, i16, i32, f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
    text = f"cvt.rn.satfinite.{kind}x2.f32 $0, $2, $1;"                         # the second operand is the lower half
    pair = builder.call(ir.InlineAsm(ir.FunctionType(i16, [f32, f32]), text, "=h,f,f"), [value, ir.Constant(f32, 0.0)])
    limit, inclusive, bits = _FLOAT8[kind]
    word = builder.bitcast(value, i32)
    magnitude = builder.bitcast(builder.and_(word, i32(0x7FFFFFFF)), f32)
    is_large = builder.fcmp_ordered(">=" if inclusive else ">", magnitude, ir.Constant(f32, limit))
    sign = builder.trunc(builder.lshr(builder.and_(word, i32(0x80000000)), i32(24)), i8)
    return builder.select(is_large, builder.or_(sign, i8(bits)), builder.trunc(pair, i8))


def f32_from_f8(builder: Any, kind: str, bits: Any) -> Any:
    """The bits of an 8-bit float to float32."""
    i16 = ir.IntType(16)
    text = (f"{{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.{kind}x2 pair, $1; mov.b32 {{low, high}}, pair; "
            "cvt.f32.f16 $0, low; }")
    return builder.call(ir.InlineAsm(ir.FunctionType(ir.FloatType(), [i16]), text, "=f,h"), [builder.zext(bits, i16)])


# -- two at once (float16: sm_80+; bfloat16: sm_90) ---------------------------------------------------------------------

def pair_arithmetic(builder: Any, instruction: str, operands: list) -> Any:
    """An instruction on 16-bit floats in pairs; one that rounds is never fused with another."""
    i32 = ir.IntType(32)
    places = ", ".join(f"${n}" for n in range(len(operands) + 1))
    function = ir.FunctionType(i32, [i32] * len(operands))
    constraints = ",".join(["=r"] + ["r"] * len(operands))
    return builder.call(ir.InlineAsm(function, f"{instruction} {places};", constraints), operands)


# -- extrema and absolute values ------------------------------------------------------------------------------------------

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
