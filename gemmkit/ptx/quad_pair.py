"""mma.m8n8k4: a product of 8 x 8 x 4 by each quad-pair of a warp, Volta's tensor-core instruction.

A quad-pair is threads 4 q to 4 q + 3 and 16 more of each. It is slow on GPUs after Volta, and computes the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly, braces
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numba_type
from gemmkit.lang.sites import current
from gemmkit.ptx.fragments import FragmentMap, places
from gemmkit.ptx.registers import elements, to_registers
from gemmkit.shapes import shape

TEXT = (f"mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {braces(0, 8)}, {braces(8, 2)}, {braces(10, 2)}, "
        f"{braces(12, 8)};")


#: Quad-pairs, and the lanes of one, in the order of their rows of A and columns of B (Graphene, Fig. 6).
PAIRS, LANES = shape(32).tile(shape((4, 2), (1, 16)))
#: Where a lane's values of C are (PTX ISA, "Matrix fragments for mma.m8n8k4"); all quad-pairs have the same places.
C_8X8 = FragmentMap(8, 8, places((2, (1, 0)), (2, (0, 2)), (4, (0, 0)), (2, (4, 0))),
                    places((2, (0, 1)), (2, (2, 0)), (2, (0, 4))))


def _products(operands: list) -> list:
    out: list[tuple] = [()] * 32
    for pair in PAIRS.offsets():
        lanes = [pair + lane for lane in LANES.offsets()]
        a, b = (np.array([operands[lane][n] for lane in lanes], np.float32) for n in (0, 1))
        with np.errstate(all="ignore"):
            product = a @ b.T
        for lane in lanes:
            out[lane] = tuple(np.float32(c + product[C_8X8.row(lane, n), C_8X8.column(lane, n)])
                              for n, c in enumerate(operands[lane][2]))
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
    """``a b + c``: a lane has a row of A and a column of B (4 float16 each), and 8 elements of C (float32, `C_8X8`)."""
    return current().collective("mma.m8n8k4", (a, b, c), _products, sync=False)
