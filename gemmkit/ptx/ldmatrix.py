"""``ldmatrix``: a warp loads matrices of 8 rows of 16 bytes from shared memory into mma fragments (sm_75+).

Each lane gives the address of one row: lanes 0-7 those of the first matrix, 8-15 of the second, and so on. Lane t receives
of each matrix 32 bits of row t // 4, the (t % 4)-th: a float32, two elements of 16 bits, four of 8 bits. With ``trans``, for
16-bit elements alone, it receives those of the transpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly, braces
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.sites import current
from gemmkit.lang.static import traced
from gemmkit.ptx.fragments import FragmentMap, places
from gemmkit.ptx.pinned import pointer_at
from gemmkit.ptx.registers import from_registers
from gemmkit.shapes import Shape

i32 = ir.IntType(32)
ROWS_8X8 = FragmentMap(8, 8, places((4, (0, 2)), (8, (1, 0))), places((2, (0, 1))))


def _by_rows(count: int, apart: int) -> Shape:
    """Where the row of a lane's address begins: of ``count`` rows, then of as many ``apart`` columns on."""
    return places((count, (1, 0)), (32 // count, (0, apart)))


def _by_columns(matrices: int, down: int, apart: int) -> Shape:
    """The same of 8 columns: of ``matrices`` that are ``down`` rows apart, then of 8 more columns, ``apart`` on."""
    return places((8, (0, 1)), (matrices, (down, 0)), (4 // matrices, (0, apart)))


by_rows, by_columns = traced(_by_rows), traced(_by_columns)


def shared_address(builder: Any, pointer: SharedType, value: Any, terms: list) -> Any:
    """A 32-bit address in the shared window, as instructions that LLVM does not know take it."""
    return builder.ptrtoint(pointer_at(builder, pointer, value, terms, ir.IntType(8)), i32)


def _typer(context: Any, pointer: Any, base: Any, offset: Any, matrices: Any, trans: Any) -> Any:
    if not isinstance(pointer, SharedType) or pointer.dtype.itemsize not in (1, 2, 4) or pointer.dtype.names is not None:
        return None
    n, transposed = int(matrices.literal_value), bool(trans.literal_value)
    if transposed and pointer.dtype.itemsize != 2:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        text = f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if transposed else ''}.shared.b16 {braces(0, n)}, [${n}];"
        registers = assembly(b, text, [i32] * n, [shared_address(b, pointer, v[0], terms)], memory=True)
        return c.make_tuple(b, s.return_type, from_registers(b, registers, c.get_value_type(pointer.element)))

    count = n * (4 // pointer.dtype.itemsize)
    return signature(types.UniTuple(pointer.element, count), pointer, base, offset, matrices, trans), codegen


def distribute(rows: list[np.ndarray], matrices: int, trans: bool) -> list[tuple]:
    """From the rows that the 32 lanes addressed to the 32 fragments."""
    out: list[tuple] = [()] * 32
    for m in range(matrices):
        matrix = np.stack(rows[8 * m:8 * m + 8])
        parts = ROWS_8X8.scatter(matrix.T) if trans else [tuple(part) for part in matrix.reshape(32, -1)]
        for lane, part in enumerate(parts):
            out[lane] += part
    return out


@atom(_typer)
def ldmatrix(pointer: Any, base: int, offset: int, matrices: int, trans: bool) -> tuple:
    """Load 1, 2 or 4 matrices; ``base + offset`` is where this lane's row of 16 bytes begins, in elements."""
    if trans and pointer.dtype.itemsize != 2:
        raise TypeError(f"ldmatrix: trans is for elements of 16 bits, and the pointer's are {pointer.dtype}")
    thread = current()
    mine = None
    if thread.lane < 8 * matrices:
        at = pointer.from_base(int(base)).offset + (int(base) + int(offset)) * pointer.dtype.itemsize
        mine = thread.shared_read(at, 16).view(pointer.dtype)
    return thread.collective(f"ldmatrix.x{matrices}{trans}", mine, lambda rows: distribute(rows, matrices, trans),
                             sync=False)
