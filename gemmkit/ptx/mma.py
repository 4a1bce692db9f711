"""``mma.sync``: a warp multiplies 16 x 16 by 16 x 8 matrices held in registers (PTX ISA, mma.m16n8k16; sm_80+)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.emulator.machine import current
from gemmkit.lang.atoms import Atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numba_type
from gemmkit.ptx.build import assembly, braces
from gemmkit.ptx.fragments import FragmentMap
from gemmkit.ptx.registers import elements, from_registers, to_registers

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
PTX_NAME = {F16: "f16", BF16: "bf16", F32: "f32"}

A_16X16 = FragmentMap(16, 16, (4, 8), ((0, 2), (1, 0)), (2, 2, 2), ((0, 1), (8, 0), (0, 8)))
B_16X8 = FragmentMap(16, 8, (4, 8), ((2, 0), (0, 1)), (2, 2), ((1, 0), (8, 0)))
C_16X8 = FragmentMap(16, 8, (4, 8), ((0, 2), (1, 0)), (2, 2), ((0, 1), (8, 0)))


@dataclass(frozen=True)
class MmaSpec:
    """One mma.sync instruction: D = A B + C with all four in registers of a warp."""

    input: np.dtype
    accumulator: np.dtype

    a, b, c = A_16X16, B_16X8, C_16X8
    M, N, K = 16, 8, 16

    @cached_property
    def text(self) -> str:
        """The instruction, with ``$`` operands: D, A, B, C."""
        kind, acc = PTX_NAME[self.input], PTX_NAME[self.accumulator]
        n = 4 if self.accumulator == F32 else 2
        return (f"mma.sync.aligned.m16n8k16.row.col.{acc}.{kind}.{kind}.{acc} "
                f"{braces(0, n)}, {braces(n, 4)}, {braces(n + 4, 2)}, {braces(n + 6, n)};")

    def compute(self, operands: list) -> list:
        """What the warp computes: from 32 (a, b, c) to 32 fragments of D; products and sums in float32."""
        a, b, c = (m.gather([o[n] for o in operands]).astype(np.float32)
                   for n, m in enumerate((self.a, self.b, self.c)))
        with np.errstate(all="ignore"):
            return self.c.scatter((a @ b + c).astype(self.accumulator))


SPECS = MappingProxyType({(s.input, s.accumulator): s
                          for s in (MmaSpec(F16, F32), MmaSpec(BF16, F32), MmaSpec(F16, F16))})


def _typer(spec: MmaSpec) -> Any:
    def typer(context: Any, a: Any, b: Any, c: Any) -> Any:
        kind, acc = numba_type(spec.input), numba_type(spec.accumulator)
        if (a, b, c) != (types.UniTuple(kind, 8), types.UniTuple(kind, 4), types.UniTuple(acc, 4)):
            return None
        register = ir.FloatType() if spec.accumulator == F32 else ir.IntType(32)
        count = 4 if spec.accumulator == F32 else 2

        def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
            operands = (to_registers(builder, elements(builder, v[0], 8)) + to_registers(builder, elements(builder, v[1], 4))
                        + to_registers(builder, elements(builder, v[2], 4)))
            out = assembly(builder, spec.text, [register] * count, operands)
            return ctx.make_tuple(builder, c, from_registers(builder, out, ctx.get_value_type(acc)))

        return signature(c, a, b, c), codegen

    return typer


def _emulation(spec: MmaSpec) -> Any:
    def mma(a: tuple, b: tuple, c: tuple) -> tuple:
        return current().collective("mma", (a, b, c), spec.compute, sync=False)

    return mma


def _make(spec: MmaSpec) -> Atom:
    name = f"mma_m16n8k16_{PTX_NAME[spec.input]}_{PTX_NAME[spec.accumulator]}"
    return Atom(name, _typer(spec), _emulation(spec), f"{name}(a, b, c) -> d: {MmaSpec.__doc__}")


MMA = MappingProxyType({key: _make(spec) for key, spec in SPECS.items()})
