"""mma.m8n8k4: a product of 8 x 8 x 4 by each quad-pair of a warp, Volta's tensor-core instruction.

A quad-pair is threads 4 q to 4 q + 3 and 16 more of each. It is slow on GPUs after Volta, and computes the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.emulator.machine import current
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numba_type
from gemmkit.ptx.build import assembly, braces
from gemmkit.ptx.registers import elements, to_registers

TEXT = (f"mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {braces(0, 8)}, {braces(8, 2)}, {braces(10, 2)}, "
        f"{braces(12, 8)};")


def lanes_of(pair: int) -> list[int]:
    """The lanes of a quad-pair, in the order of their rows of A and columns of B."""
    return [base + 4 * pair + n for base in (0, 16) for n in range(4)]


def place_of(lane: int, value: int) -> tuple[int, int]:
    """Row and column of a lane's value of C (PTX ISA, "Matrix fragments for mma.m8n8k4")."""
    return (lane & 1) + (value & 2) + (4 if lane >= 16 else 0), (value & 4) + (lane & 2) + (value & 1)


def _products(operands: list) -> list:
    out: list[tuple] = [()] * 32
    for lanes in map(lanes_of, range(4)):
        a, b = (np.array([operands[lane][n] for lane in lanes], np.float32) for n in (0, 1))
        with np.errstate(all="ignore"):
            product = a @ b.T
        for lane in lanes:
            out[lane] = tuple(np.float32(c + product[place_of(lane, n)]) for n, c in enumerate(operands[lane][2]))
    return out


def _typer(context: Any, a: Any, b: Any, c: Any) -> Any:
    half, single = numba_type(np.dtype(np.float16)), numba_type(np.dtype(np.float32))
    if (a, b, c) != (types.UniTuple(half, 4), types.UniTuple(half, 4), types.UniTuple(single, 8)):
        return None

    def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
        given = [r for value, t in zip(v, (a, b, c)) for r in to_registers(builder, elements(builder, value, t.count))]
        return ctx.make_tuple(builder, c, assembly(builder, TEXT, [ir.FloatType()] * 8, given))

    return signature(c, a, b, c), codegen


@atom(_typer)
def mma_quad_pair(a: tuple, b: tuple, c: tuple) -> tuple:
    """``a b + c``: a lane has a row of A and a column of B (4 float16 each), and 8 elements of C (float32, `place_of`)."""
    return current().collective("mma.m8n8k4", (a, b, c), _products, sync=False)
