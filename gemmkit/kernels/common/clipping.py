"""Operands whose rows begin at no multiple of 16 bytes: loads in words up to their ends, without a branch.

Where a k-tile reaches over an edge, threads load what is there of their lines of 16 bytes by predicated instructions
(`gemmkit.ptx.clipped`), all before the first one waits. Element by element, in branches, a line would wait for the one
before; and of a small product, or of one with an odd K, most k-tiles reach over an edge.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.operand import CHUNK, Operand, unit_of
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis

if TYPE_CHECKING:
    from gemmkit.config import Config

REGISTERS, MOST = 65536, 255           # of a multiprocessor, and of a thread
OTHERS = 32                            # of a thread, beside accumulators and what it loads
A_WORD = 3                             # registers, at most, that a word on its way takes: its line's fifth, its address


def clipped(operand: Operand, info: ArrayInfo | None, nothing: Any) -> Operand:
    """``operand``, marked if lines of its array ``info`` can be loaded so, with ``nothing`` behind their ends."""
    size = operand.layout.dtype.itemsize
    if info is None or not operand.is_direct or alignment(info) >= CHUNK or nothing != 0 or size > 8:
        return operand
    unit = unit_of(operand.layout, info)
    # Of a group ``info`` says what its arrays have in common: an extent of 1 makes none of them contiguous along it.
    if unit is None or unit_axis(info) != unit or info.strides[unit] != 1 or operand.thread.count * size % CHUNK:
        return operand
    return dataclasses.replace(operand, clipped=True)


def clipped_inputs(config: Config, a: Operand, b: Operand, arrays: Arrays) -> tuple[Operand, Operand]:
    """A and B of a kernel whose multiplying threads load them, where that leaves them enough registers."""
    found = clipped(a, arrays.a, config.operator.identity), clipped(b, arrays.b, config.operator.identity)
    marked = [operand for operand in found if operand.clipped]
    words = sum(operand.moves * operand.held.count for operand in marked)
    sums = config.compute_warp.MN.count // 32 * -(-config.operator.fragment_c.dtype.itemsize // 4)
    limit = min(MOST, REGISTERS // (max(1, config.blocks_per_sm) * config.threads))
    if all(operand.moves for operand in marked) and A_WORD * words <= limit - sums - OTHERS:
        return found
    return a, b
