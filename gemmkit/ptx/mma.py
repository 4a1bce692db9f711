"""``mma.sync``: a warp multiplies small matrices held in registers (PTX ISA, mma; sm_75+).

| inputs | M x N x K | sums | from |
|---|---|---|---|
| float16 | 16 x 8 x 8 | float32, float16 | sm_75 |
| float16; bfloat16 | 16 x 8 x 16 | float32 (of float16 also float16) | sm_80 |
| float32, as tf32 | 16 x 8 x 4, 16 x 8 x 8 | float32 | sm_80 |
| int8, uint8, mixed at will | 8 x 8 x 16; 16 x 8 x 32 | int32, which wrap | sm_75; sm_80 |
| float8_e4m3fn, float8_e5m2, mixed at will | 16 x 8 x 32 | float32 | sm_89 |
| float64 | 8 x 8 x 4 | float64 | sm_80 |
| float64 | 16 x 8 x 4, 16 x 8 x 8, 16 x 8 x 16 | float64 | sm_90 |

With ``w`` elements in a 32-bit register (1 of float32 and float64) and g = lane / 4, t = lane % 4, a lane holds of A rows g
and g + 8 at columns t w ..., of B the same places of its transpose, of C columns 2 t and 2 t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.assembly import assembly, braces
from gemmkit.lang.atoms import Atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numba_type
from gemmkit.lang.sites import current
from gemmkit.ptx.fragments import FragmentMap, places
from gemmkit.ptx.registers import elements, from_registers, to_registers
from gemmkit.ptx.tf32 import rounded_to_tf32, tf32_from_f32, truncated_to_tf32

F16, BF16, F32, F64 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
S8, U8, S32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
PTX_NAME = {F16: "f16", BF16: "bf16", F32: "f32"}
_INPUT_NAME = {F16: "f16", BF16: "bf16", F32: "tf32", F64: "f64", E4M3: "e4m3", E5M2: "e5m2", S8: "s8", U8: "u8"}
_SUM_NAME = {F16: "f16", F32: "f32", F64: "f64", S32: "s32"}


def map_a(M: int, K: int, size: int) -> FragmentMap:
    """Of A, M x K elements of ``size`` bytes."""
    w = max(1, 4 // size)
    return FragmentMap(M, K, places((4, (0, w)), (8, (1, 0))),
                       places((w, (0, 1)), (M // 8, (8, 0)), (K // (4 * w), (0, 4 * w))))


def map_b(K: int, N: int, size: int) -> FragmentMap:
    """Of B, K x N elements of ``size`` bytes; 8 columns behind each other."""
    w = max(1, 4 // size)
    return FragmentMap(K, N, places((4, (w, 0)), (8, (0, 1))),
                       places((w, (1, 0)), (K // (4 * w), (4 * w, 0)), (N // 8, (0, 8))))


def map_c(M: int, N: int) -> FragmentMap:
    """Of C, M x N; 8 columns behind each other."""
    return FragmentMap(M, N, places((4, (0, 2)), (8, (1, 0))), places((2, (0, 1)), (M // 8, (8, 0)), (N // 8, (0, 8))))


A_16X16, B_16X8, C_16X8 = map_a(16, 16, 2), map_b(16, 8, 2), map_c(16, 8)


@dataclass(frozen=True)
class MmaSpec:
    """One mma.sync instruction: D = A B + C with all four in registers of a warp.

    An atom of it takes the B of several instructions behind each other, and their C, and issues one after the other.
    """

    M: int
    K: int
    a_dtype: np.dtype
    b_dtype: np.dtype
    accumulator: np.dtype

    N = 8

    @cached_property
    def a(self) -> FragmentMap:
        return map_a(self.M, self.K, self.a_dtype.itemsize)

    @cached_property
    def b(self) -> FragmentMap:
        return map_b(self.K, self.N, self.b_dtype.itemsize)

    @cached_property
    def c(self) -> FragmentMap:
        return map_c(self.M, self.N)

    @cached_property
    def name(self) -> str:
        kinds = "_".join((_INPUT_NAME[self.a_dtype], _INPUT_NAME[self.b_dtype], _SUM_NAME[self.accumulator]))
        return f"mma_m{self.M}n8k{self.K}_{kinds}"

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        """The least compute capability that has it."""
        if self.a_dtype in (E4M3, E5M2):
            return 8, 9
        if (self.a_dtype, self.K) == (F16, 8) or (self.a_dtype in (S8, U8) and self.M == 8):
            return 7, 5
        return (9, 0) if self.a_dtype == F64 and self.M == 16 else (8, 0)

    @cached_property
    def is_tf32(self) -> bool:
        return self.a_dtype == F32

    def registers(self, operand: str) -> int:
        """How many registers a thread gives of an operand: of 32 bits, of float64 of 64."""
        dtype = {"a": self.a_dtype, "b": self.b_dtype, "c": self.accumulator}[operand]
        return max(1, int(getattr(self, operand).values) * min(4, dtype.itemsize) // 4)

    @cached_property
    def text(self) -> str:
        """The instruction, with ``$`` operands: D, A, B, C."""
        a, b, acc = _INPUT_NAME[self.a_dtype], _INPUT_NAME[self.b_dtype], _SUM_NAME[self.accumulator]
        x, y, z = (self.registers(operand) for operand in "abc")
        return (f"mma.sync.aligned.m{self.M}n8k{self.K}.row.col.{acc}.{a}.{b}.{acc} "
                f"{braces(0, z)}, {braces(z, x)}, {braces(z + x, y)}, {braces(z + x + y, z)};")

    def compute(self, operands: list) -> list:
        """What the warp computes: from 32 (a, b, c) to 32 fragments of D.

        Products and sums in float32, or float64; of integers exact, then wrapped; of float32 what tf32 leaves of it.
        """
        a, b, c = (m.gather([o[n] for o in operands]) for n, m in enumerate((self.a, self.b, self.c)))
        if self.accumulator == S32:
            return self.c.scatter((a.astype(np.int64) @ b.astype(np.int64) + c).astype(S32))
        if self.is_tf32:
            a, b = truncated_to_tf32(a), truncated_to_tf32(b)
        wide = F64 if self.accumulator == F64 else F32
        with np.errstate(all="ignore"):
            return self.c.scatter((a.astype(wide) @ b.astype(wide) + c.astype(wide)).astype(self.accumulator))

    def multiply(self, operands: list) -> list:
        """What the atom computes: inputs of tf32 are rounded, and B and C may be several."""
        rounded = rounded_to_tf32 if self.is_tf32 else np.asarray
        left = [rounded(a) for a, _, _ in operands]
        n, m = self.b.values, self.c.values
        parts = [self.compute([(a, rounded(b[i * n:(i + 1) * n]), c[i * m:(i + 1) * m])
                               for a, (_, b, c) in zip(left, operands)]) for i in range(len(operands[0][1]) // n)]
        return [sum(lanes, ()) for lanes in zip(*parts)]


def _all_specs() -> list[MmaSpec]:
    shapes: dict[np.dtype, Any] = {F16: ((16, 16), (16, 8)), F32: ((16, 4), (16, 8)), S8: ((16, 32), (8, 16)),
                                   U8: ((16, 32), (8, 16)), F64: ((8, 4), (16, 4), (16, 8), (16, 16))}
    listed: list[tuple[np.dtype, np.dtype, np.dtype]] = [(F16, F16, F32), (F16, F16, F16), (BF16, BF16, F32)]
    listed += [(F32, F32, F32), (F64, F64, F64)]
    listed += [(a, b, S32) for a in (S8, U8) for b in (S8, U8)]
    listed += [(a, b, F32) for a in (E4M3, E5M2) for b in (E4M3, E5M2)]
    return [MmaSpec(M, K, a, b, acc) for a, b, acc in listed for M, K in shapes.get(a, ((16, 32 // a.itemsize),))]


SPECS = MappingProxyType({(s.M, s.K, s.a_dtype, s.b_dtype, s.accumulator): s for s in _all_specs()})


def _input_registers(builder: Any, spec: MmaSpec, value: Any, count: int) -> list:
    values = elements(builder, value, count)
    return [tf32_from_f32(builder, x) for x in values] if spec.is_tf32 else to_registers(builder, values)


def _register(accumulator: np.dtype) -> Any:
    return {F32: ir.FloatType(), F64: ir.DoubleType()}.get(accumulator, ir.IntType(32))


def _typer(spec: MmaSpec) -> Any:
    def typer(context: Any, a: Any, b: Any, c: Any) -> Any:
        of_a, of_b, acc = (numba_type(dtype) for dtype in (spec.a_dtype, spec.b_dtype, spec.accumulator))
        if not isinstance(b, types.UniTuple) or b.count % spec.b.values:
            return None
        times = b.count // spec.b.values
        if (a, b, c) != (types.UniTuple(of_a, spec.a.values), types.UniTuple(of_b, b.count),
                         types.UniTuple(acc, times * spec.c.values)):
            return None

        def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
            register, y, z = _register(spec.accumulator), spec.registers("b"), spec.registers("c")
            x = _input_registers(builder, spec, v[0], a.count)
            ys = _input_registers(builder, spec, v[1], b.count)
            zs = to_registers(builder, elements(builder, v[2], c.count))
            out: list = []
            for n in range(times):
                out += assembly(builder, spec.text, [register] * z, [*x, *ys[n * y:(n + 1) * y], *zs[n * z:(n + 1) * z]])
            return ctx.make_tuple(builder, c, from_registers(builder, out, ctx.get_value_type(acc)))

        return signature(c, a, b, c), codegen

    return typer


def _emulation(spec: MmaSpec) -> Any:
    def mma(a: tuple, b: tuple, c: tuple) -> tuple:
        return current().collective("mma", (a, b, c), spec.multiply, sync=False)

    return mma


MMA = MappingProxyType({key: Atom(spec.name, _typer(spec), _emulation(spec), f"{spec.name}(a, b, c) -> d: {MmaSpec.__doc__}")
                        for key, spec in SPECS.items()})
