"""``stmatrix``: a warp stores 8 x 8 matrices of 16-bit elements, held as mma fragments, to shared memory (sm_90+).

The inverse of `ldmatrix`: each lane gives the address of one row of 8 elements, lanes 0-7 those of the first matrix, 8-15 of
the second, and so on. Lane t holds of each matrix the elements (t // 4, 2 (t % 4)) and the one beside it, or with ``trans``
of the transpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly, braces
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.sites import current
from gemmkit.ptx.ldmatrix import ROWS_8X8, shared_address
from gemmkit.ptx.registers import elements, to_registers


def _typer(context: Any, pointer: Any, base: Any, offset: Any, values: Any, trans: Any) -> Any:
    if not isinstance(pointer, SharedType) or pointer.dtype.itemsize != 2 or not isinstance(values, types.UniTuple):
        return None
    if values.dtype != pointer.element or values.count not in (2, 4, 8) or not isinstance(trans, types.Literal):
        return None
    n, transposed = values.count // 2, bool(trans.literal_value)
    text = f"stmatrix.sync.aligned.m8n8.x{n}{'.trans' if transposed else ''}.shared.b16 [$0], {braces(1, n)};"

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        given = [b.bitcast(x, ir.IntType(16)) for x in elements(b, v[3], values.count)]
        assembly(b, text, [], [shared_address(b, pointer, v[0], terms), *to_registers(b, given)], memory=True,
                 convergent=True)
        return c.get_dummy_value()

    return signature(types.none, pointer, base, offset, values, trans), codegen


def collect(fragments: list[tuple], trans: bool) -> list[np.ndarray | None]:
    """From the 32 lanes' fragments to the row that each lane stores; None for lanes that give no address."""
    rows: list[np.ndarray | None] = []
    for m in range(len(fragments[0]) // 2):
        matrix = ROWS_8X8.gather([f[2 * m:2 * m + 2] for f in fragments])
        rows += list(matrix.T if trans else matrix)
    return rows + [None] * (32 - len(rows))


@atom(_typer)
def stmatrix(pointer: Any, base: int, offset: int, values: tuple, trans: bool) -> None:
    """Store 1, 2 or 4 matrices of 8 x 8: 2, 4 or 8 ``values`` of the pointer's 16-bit type.

    ``base + offset`` is where this lane's row begins, in elements, at a multiple of 16 bytes; ``trans`` is a constant.
    """
    thread = current()
    row = thread.collective(f"stmatrix.x{len(values) // 2}{trans}", values, lambda parts: collect(parts, trans), sync=False)
    if row is not None:
        data = np.ascontiguousarray(row, pointer.dtype).view(np.uint8)
        thread.shared_write(pointer.offset + (int(base) + int(offset)) * 2, data)
