"""``ldmatrix``: a warp loads 8 x 8 matrices of 16-bit elements from shared memory into mma fragments (sm_75+).

Each lane gives the address of one row of 8 elements: lanes 0-7 those of the first matrix, 8-15 of the second, and so on.
Lane t receives of each matrix the elements (t // 4, 2 (t % 4)) and the one beside it, or with ``trans`` of the transpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.emulator.machine import current
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.ptx.build import assembly, braces
from gemmkit.ptx.fragments import FragmentMap
from gemmkit.ptx.memory import pointer_at
from gemmkit.ptx.registers import from_registers

i32 = ir.IntType(32)
ROWS_8X8 = FragmentMap(8, 8, (4, 8), ((0, 2), (1, 0)), (2,), ((0, 1),))


def shared_address(builder: Any, pointer: SharedType, value: Any, terms: list) -> Any:
    """A 32-bit address in the shared window, as instructions that LLVM does not know take it."""
    return builder.ptrtoint(pointer_at(builder, pointer, value, terms, ir.IntType(8)), i32)


def _typer(context: Any, pointer: Any, base: Any, offset: Any, matrices: Any, trans: Any) -> Any:
    if not isinstance(pointer, SharedType) or pointer.dtype.itemsize != 2:
        return None
    n, transposed = int(matrices.literal_value), bool(trans.literal_value)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        text = f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if transposed else ''}.shared.b16 {braces(0, n)}, [${n}];"
        registers = assembly(b, text, [i32] * n, [shared_address(b, pointer, v[0], terms)], memory=True)
        return c.make_tuple(b, s.return_type, from_registers(b, registers, c.get_value_type(pointer.element)))

    return signature(types.UniTuple(pointer.element, 2 * n), pointer, base, offset, matrices, trans), codegen


def distribute(rows: list[np.ndarray], matrices: int, trans: bool) -> list[tuple]:
    """From the rows that the 32 lanes addressed to the 32 fragments."""
    out: list[tuple] = [()] * 32
    for m in range(matrices):
        matrix = np.stack(rows[8 * m:8 * m + 8])
        for lane, part in enumerate(ROWS_8X8.scatter(matrix.T if trans else matrix)):
            out[lane] += part
    return out


@atom(_typer)
def ldmatrix(pointer: Any, base: int, offset: int, matrices: int, trans: bool) -> tuple:
    """Load 1, 2 or 4 matrices of 8 x 8; ``base + offset`` is where this lane's row begins, in elements."""
    thread = current()
    mine = None
    if thread.lane < 8 * matrices:
        at = pointer.offset + (int(base) + int(offset)) * 2
        mine = thread.shared_read(at, 16).view(pointer.dtype)
    return thread.collective(f"ldmatrix.x{matrices}{trans}", mine, lambda rows: distribute(rows, matrices, trans),
                             sync=False)
