"""Step 3 of `quantised`: the sums of warps that have the same columns become those of the first of them.

All warps put theirs into shared memory, 16 bytes of each lane in a piece. Then each warp adds up some of the pieces, over
all warps in their order, so that the same call gives the same bits; and the first warp fetches what was added up. Alone it
would load all other warps' sums one after the other.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.simt.gather_sums import merge
from gemmkit.lang.control import each, fold, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.memory import load_shared, shared, store_shared
from gemmkit.ptx.special import barrier, lane_index, rolled, udiv


def add_warps(spec: Any, accumulators: Any, warp: int) -> None:
    """Warps below ``warps_n`` have the sums of all; shared memory may be used anew."""
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            each(put_piece, split(accumulators[i, j], spec.sums_width), i * spec.fragments_n + j, spec, warp)
    barrier()
    first, piece = warp % spec.warps_n, udiv(warp, spec.warps_n)
    while piece < spec.pieces:
        sums = fold(spec.warps_k - 1, add_peer, load_piece(spec, first, piece), spec, first, piece)
        store_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, first, piece), 0, sums)
        piece = rolled(piece + spec.warps_k)
    barrier()
    if warp < spec.warps_n:
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                accumulators[i, j] = join(generate(spec.pieces_of_fragment, fetch_piece, i * spec.fragments_n + j, spec,
                                                  warp))
    barrier()


def put_piece(values: tuple, n: int, fragment: int, spec: Any, warp: int) -> None:
    piece = fragment * spec.pieces_of_fragment + n
    store_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, warp, 0), piece * 32 * spec.sums_width, values)


def add_peer(sums: tuple, n: int, spec: Any, first: int, piece: int) -> tuple:
    """The piece of the next warp with these columns added."""
    return apply(merge, sums, load_piece(spec, first + (n + 1) * spec.warps_n, piece), spec)


def fetch_piece(n: int, fragment: int, spec: Any, warp: int) -> tuple:
    return load_piece(spec, warp, fragment * spec.pieces_of_fragment + n)


def load_piece(spec: Any, warp: int, piece: int) -> tuple:
    return load_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, warp, piece), 0, spec.sums_width)


def place_of(spec: Any, warp: int, piece: int) -> int:
    """Where a lane's part of a piece lies: neighbours in a warp are neighbours in memory."""
    return ((warp * spec.pieces + piece) * 32 + lane_index()) * spec.sums_width
