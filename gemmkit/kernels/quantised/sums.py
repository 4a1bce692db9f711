"""Step 3 of `quantised`: the sums of warps that have the same columns become those of the first of them.

The other warps put theirs into shared memory, the block meets, and the first ones add them in the order of warps, so that
the same call gives the same bits.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.simt.gather_sums import merge
from gemmkit.lang.control import each, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.memory import load_shared, shared, store_shared
from gemmkit.ptx.special import barrier, lane_index, rolled

__all__ = ["add_warps"]


def add_warps(spec: Any, accumulators: Any, warp: int) -> None:
    """Warps below ``warps_n`` have the sums of all; shared memory may be used anew."""
    if warp >= spec.warps_n:
        for i in range(spec.fragments_m):
            each(put_piece, split(accumulators[i, 0], spec.sums_width), i, spec, warp)
    barrier()
    if warp < spec.warps_n:
        peer = warp + spec.warps_n
        while peer < spec.warps:
            for i in range(spec.fragments_m):
                accumulators[i, 0] = apply(merge, accumulators[i, 0], fetch_fragment(i, spec, peer), spec)
            peer = rolled(peer + spec.warps_n)
    barrier()


def put_piece(values: tuple, n: int, i: int, spec: Any, warp: int) -> None:
    store_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, warp), ahead_of(n, i, spec), values)


def fetch_fragment(i: int, spec: Any, warp: int) -> tuple:
    return join(generate(spec.operator.fragment_c.count // spec.sums_width, fetch_piece, i, spec, warp))


def fetch_piece(n: int, i: int, spec: Any, warp: int) -> tuple:
    return load_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, warp), ahead_of(n, i, spec),
                       spec.sums_width)


def place_of(spec: Any, warp: int) -> int:
    """Where a lane's first piece of a warp's sums lies."""
    return (warp - spec.warps_n) * (spec.fragments_m * spec.operator.fragment_c.count * 32) + lane_index() * spec.sums_width


def ahead_of(n: int, i: int, spec: Any) -> int:
    """How far behind it the n-th of a fragment: neighbours in a warp are neighbours in memory."""
    return (i * (spec.operator.fragment_c.count // spec.sums_width) + n) * 32 * spec.sums_width
