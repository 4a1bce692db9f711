"""Which store D leaves by (`gemmkit.kernels.sm90.store` has them): TMA where it can, else the longest vectors."""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.common.operand import unit_of
from gemmkit.kernels.sm90.store import DirectStore, Store, TmaStore, VectorStore
from gemmkit.layouts import Plain, Tensor
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.tensor_maps import why_not

CHUNK = 16                             # bytes that TMA moves together
SECTOR, LINE = 32, 128                 # bytes that memory moves together, and that a warp's access asks for together
APART = 2, 4, 8, 16, 32


def store_of(spec: Any, info: ArrayInfo | None, extents: tuple[int, int], barrier: int) -> Store:
    """How D, a matrix of ``extents`` in the array ``info`` (None: one that suits TMA), leaves."""
    layout: Any = spec.d.shared
    if info is not None and refuses_tma(spec, info) is not None and vector_length(spec, info, extents) == 0:
        return DirectStore(barrier)
    width = spec.block.size.N // spec.exchange.slices    # of what this block finishes
    columns = int(layout.line) if layout.axis == 1 else math.gcd(width, min(64, LINE // layout.dtype.itemsize))
    fields = dict(consumers=spec.consumers, columns=columns, lines=columns if layout.vector_axis == 0 else 64,
                  count=width // columns, fragments=spec.fragments_m, itemsize=layout.dtype.itemsize)
    if info is None or refuses_tma(spec, info) is None:
        return TmaStore(barrier, **fields)
    apart, down = rows_apart(spec, info)
    return VectorStore(barrier, **fields, run_length=vector_length(spec, info, extents), apart=apart, down=down,
                       axis=layout.vector_axis)


def refuses_tma(spec: Any, info: ArrayInfo) -> str | None:
    """Why TMA cannot store D. It clips to bounds, so the epilogue also runs on elements that are out of them: one with side
    outputs must not use TMA. It clips 16 bytes at a time: a line of another length would be overrun."""
    layout, shared = spec.d.layout, spec.d.shared
    if not isinstance(layout, Plain) or type(layout).store is not Plain.store or layout.axis != shared.axis:
        return "it is not a plain matrix"
    if spec.epilogue.stores_itself or spec.epilogue.writes:
        return "the epilogue stores or writes itself"
    if info.shape[layout.axis] * info.dtype.itemsize % CHUNK:
        return f"a line is no multiple of {CHUNK} bytes"
    return why_not(info, layout.axis)


def vector_length(spec: Any, info: ArrayInfo, extents: tuple[int, int]) -> int:
    """Vector length of D's global stores in elements (a vector is wholly in or out of bounds); 0 where the epilogue stores D
    itself, or no lines are to be had. Single elements pay, too: lanes then store neighbours (`stored_by_neighbours`)."""
    layout, shared = spec.d.layout, spec.d.shared
    if (not layout.is_separable or layout.vector_axis != shared.vector_axis or spec.epilogue.stores_itself
            or spec.epilogue.writes or unit_axis(info) != unit_of(layout, info)):
        return 0
    extent = 64 if shared.axis == 0 else shared.line
    line = math.gcd(layout.run, extent, extents[shared.axis]) // layout.comb
    nbytes = math.gcd(CHUNK, line * shared.itemsize, alignment(info))
    return int(layout.comb * nbytes // shared.itemsize) if nbytes >= shared.itemsize else 0


def rows_apart(spec: Any, info: ArrayInfo) -> tuple[int, bool]:
    """How far apart rows of a subtile of a tensor are that lie next to each other in memory, and whether they are nearer to
    each other than a row's own pieces."""
    layout = spec.d.layout
    if not isinstance(layout, Tensor) or layout.vector_axis != 1:
        return 1, False
    size, depth, rows = info.dtype.itemsize, layout.rows.depth, layout.rows.extents()
    is_cut = depth > 1 and rows[0] in APART and 0 < info.strides[1] < info.strides[0]
    is_piece = layout.columns.depth > 1 and layout.columns.extents()[0] * size < SECTOR
    return rows[0] if is_cut else 1, bool(is_piece and 0 < info.strides[0] * size <= LINE)
