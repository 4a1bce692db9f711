"""``attention_by_warps``: softmax(score(scale Q K^T)) V by mma.sync, in the manner of FlashAttention-2 (Dao, 2023).

For GPUs from compute capability 8.0 on that have no wgmma. A block computes 64 rows of Q, four warps with 16 rows each,
against one block of keys after the other.

| step | what |
|---|---|
| 1 | Q, and the tile's last block of K and V: global -> shared, by cp.async |
| 2 | the next block of K and V is under way while this one is multiplied |
| 3 | S = Q K^T; its softmax; P as A fragments, which an accumulator's pairs are; O += P V |
| 4 | O by one over the sums, and the logarithms of these, to global memory |

Schedules, masks, scores, softmax and stores are those of `gemmkit.kernels.attention.kernel`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from gemmkit.kernels.attention.spec import ROWS, HeadSpec
from gemmkit.kernels.collectives.operand import FragmentReuse
from gemmkit.kernels.collectives.pipeline import Warpgroups
from gemmkit.kernels.collectives.softmax import (
    F32,
    FREE,
    TESTED,
    AttentionOutputs,
    AttentionSizes,
    HeadTile,
    ScoreCoord,
    Stats,
    WeightedSums,
    begin,
    key_blocks,
    rescale,
    slice_of,
    soften,
    tile_at,
)
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.aggregates import convert_all, fill
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import View
from gemmkit.lang.registers import apply, fold, join, split
from gemmkit.operators import MMAOp
from gemmkit.ptx.copy_async import commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.memory import shared
from gemmkit.ptx.mma import ldmatrix
from gemmkit.ptx.special import barrier, lane_index, rolled, thread_index, udiv

CHUNK = 8                              # elements that a thread copies at a time


class AttentionInputs(NamedTuple):
    """K and V in global memory, where a tile's rows of them are, and the first block of its keys."""

    k: Any
    v: Any
    sizes: Any
    tile: HeadTile
    first: Any


class HeadRows(NamedTuple):
    """Rows of a head in global memory, which begins at row ``base`` of the array: from row ``first`` of it on; those from
    ``end`` on are not there."""

    view: Any
    batch: Any
    head: Any
    base: Any
    first: Any
    end: Any


def attention_by_warps(spec: Any, sizes: AttentionSizes, order: View, out: View, lse: View, q: View, k: View,
                       v: View) -> None:
    """Launched with a block for each tile; see the module's table."""
    # 1. The first copies.
    zero = thread_index() * 0
    tile = tile_at(spec, sizes, order, zero)
    blocks = key_blocks(spec, tile)
    inputs = AttentionInputs(k, v, sizes, tile, blocks.first)
    copy_rows(spec, HeadRows(q, slice_of(spec, tile), tile.head, tile.first_query, tile.m, tile.queries), spec.block_m, 0)
    copy_keys(spec, inputs, blocks.last - 1, zero)

    # 2. and 3. From the last block of keys to the first: tested, free, tested.
    o, stats, stage, block = fill(F32, spec.values_o, 0.0), begin(), zero, blocks.last - 1
    o, stats = one_block(spec, inputs, o, stats, block, stage, TESTED)
    block, stage = block - 1, stage ^ 1
    if spec.tests_above:
        while block >= blocks.free_last:
            o, stats = one_block(spec, inputs, o, stats, block, stage, TESTED)
            block, stage = block - 1, stage ^ 1
    if spec.mask.has_free:
        while block >= blocks.free_first:
            o, stats = one_block(spec, inputs, o, stats, block, stage, FREE)
            block, stage = block - 1, stage ^ 1
    if spec.tests_below:
        while block >= blocks.first:
            o, stats = one_block(spec, inputs, o, stats, block, stage, TESTED)
            block, stage = block - 1, stage ^ 1

    # 4. The tile's end.
    spec.store.run(spec, sizes, WeightedSums(o, stats), AttentionOutputs(out, lse, zero), tile, zero)


def one_block(spec: MmaAttentionSpec, inputs: AttentionInputs, o: tuple, stats: Stats, block: int, stage: int,
              kind: Any) -> tuple:
    """A block of keys, of which ``kind`` says whether some may be hidden; the one below it is copied meanwhile.
    (O and stats as one tuple cost 4 % more instructions: D 128 with a window.)"""
    if block > inputs.first:
        copy_keys(spec, inputs, block - 1, stage ^ 1)
    else:
        commit_copies()
    wait_copies(1)
    barrier()
    place = ScoreCoord(inputs.tile, inputs.tile.m + own_row(), own_column() + block * spec.block_n, block)
    s = join(fold(spec.qk_steps, qk_step, split(fill(F32, spec.values_s, 0.0), 8), spec, stage))
    weights, stats, growth = soften(kind.scores(s, spec, inputs.sizes, place), spec, inputs.sizes, stats)
    p = split(convert_all(spec.dtype, weights), spec.reuse.values)
    o = join(fold(spec.pv_steps, pv_step, split(rescale(o, growth[0], growth[1]), 8), spec, p, stage))
    barrier()                                          # the stage may be filled anew
    return o, stats


# -- copies ---------------------------------------------------------------------------------------------------------------

def copy_keys(spec: MmaAttentionSpec, inputs: AttentionInputs, block: int, stage: int) -> None:
    """A block of K and of V into a stage: a group of copies."""
    sizes, tile, row = inputs.sizes, inputs.tile, block * spec.block_n
    k = HeadRows(inputs.k, slice_of(spec, tile) * sizes.k_batch, udiv(tile.head, sizes.k_share), tile.first_key, row,
                 tile.keys)
    copy_rows(spec, k, spec.block_n, spec.k_offset + stage * spec.k_bytes)
    v = HeadRows(inputs.v, slice_of(spec, tile) * sizes.v_batch, udiv(tile.head, sizes.v_share), tile.first_key, row,
                 tile.keys)
    copy_rows(spec, v, spec.block_n, spec.v_offset + stage * spec.k_bytes)
    commit_copies()


def copy_rows(spec: Any, rows: HeadRows, count: int, offset: int) -> None:
    """So many rows to byte ``offset`` of shared memory; zeros for those that are not there."""
    thread = rolled(thread_index())                    # or the places of all chunks stay in registers (D 256 spilled)
    for n in range(count * spec.head_dim // (CHUNK * spec.threads)):
        chunk = n * spec.threads + thread
        row = udiv(chunk, spec.head_dim // CHUNK)
        column = (chunk - row * (spec.head_dim // CHUNK)) * CHUNK
        copy_async(shared(spec.dtype, offset), spec.head.layout.position((row, column), count), 0, rows.view,
                   offset_of(rows.view, (rows.batch, rows.head, rows.base + rows.first + row, column)), CHUNK,
                   rows.first + row < rows.end)


# -- products -------------------------------------------------------------------------------------------------------------
# ldmatrix loads four 8 x 8 matrices, of which lane t addresses row t % 8 of the (t / 8)-th.

def qk_step(s: tuple, n: int, spec: Any, stage: int) -> tuple:
    """16 elements of the head: a warp's rows of Q against 16 keys at a time."""
    matrix, line = udiv(lane_index(), 8), lane_index() % 8
    row = udiv(thread_index(), 32) * 16 + matrix % 2 * 8 + line
    at = spec.head.layout.position((row, n * 16 + udiv(matrix, 2) * 8), spec.block_m)
    a = ldmatrix(shared(spec.dtype, 0), at, 0, 4, False)
    return apply(qk_columns, s, spec, a, n, stage)


def qk_columns(s: tuple, i: int, spec: Any, a: tuple, n: int, stage: int) -> tuple:
    matrix, line = udiv(lane_index(), 8), lane_index() % 8
    at = spec.head.layout.position((i * 16 + udiv(matrix, 2) * 8 + line, n * 16 + matrix % 2 * 8), spec.block_n)
    return spec.mma(a, ldmatrix(shared(spec.dtype, spec.k_offset + stage * spec.k_bytes), at, 0, 4, False), s)


def pv_step(o: tuple, n: int, spec: MmaAttentionSpec, p: tuple, stage: int) -> tuple:
    """16 keys: their weights against 16 elements of the head at a time."""
    return apply(pv_columns, o, spec, p[n], n, stage)


def pv_columns(o: tuple, i: int, spec: Any, a: tuple, n: int, stage: int) -> tuple:
    matrix, line = udiv(lane_index(), 8), lane_index() % 8
    at = spec.head.layout.position((n * 16 + matrix % 2 * 8 + line, i * 16 + udiv(matrix, 2) * 8), spec.block_n)
    return spec.mma(a, ldmatrix(shared(spec.dtype, spec.v_offset + stage * spec.k_bytes), at, 0, 4, True), o)


# --------------------------------------------------------------------------------------------------
# What `attention_by_warps` is specialised by, and how it is mapped onto warps and memory.

STAGES = 2                             # of K and V
BLOCK_N = {32: 64, 64: 64, 96: 64, 128: 64, 192: 32, 256: 32}         # by head size: 96 KiB of shared memory at most


@dataclass(frozen=True)
class MmaAttentionSpec(HeadSpec):
    """Four warps of 16 rows of Q each."""

    warpgroups = Warpgroups(0, 1)
    map_specs = ()                     # nothing is moved by TMA

    @cached_property
    def block_m(self) -> int:
        return ROWS

    @cached_property
    def operator(self) -> MMAOp:
        """16 x 16 by 16 x 16, of both products."""
        return MMAOp(N=16, dtype=self.dtype, accumulator=F32)

    @cached_property
    def reuse(self) -> FragmentReuse:
        return FragmentReuse(self.operator, self.operator, self.block_n)

    @cached_property
    def mma(self) -> Any:
        return self.operator.instruction

    @cached_property
    def q_bytes(self) -> int:
        return 2 * ROWS * self.head_dim

    @cached_property
    def k_bytes(self) -> int:
        """Of a stage of K, and of one of V."""
        return 2 * self.block_n * self.head_dim

    @cached_property
    def k_offset(self) -> int:
        return self.q_bytes

    @cached_property
    def v_offset(self) -> int:
        return self.k_offset + STAGES * self.k_bytes

    @cached_property
    def shared_bytes(self) -> int:
        return self.v_offset + STAGES * self.k_bytes
