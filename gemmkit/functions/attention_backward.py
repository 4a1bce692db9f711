"""The gradients of attention: those of q in one program, those of k and v in another, as FlashAttention 2 has them.

    S = scale Q K^T,  T = score(S),  P = exp(T - lse),  O = P V
    dV = P^T dO,   dP = dO V^T,   delta = rowsum(dO * O) - dlse,   dT = P * (dP - delta)
    dS = dT * score'(S),   dQ = scale dS K,   dK = scale dS^T Q

Nothing of the size of S is stored: both programs compute S anew. The one has tiles of queries and rounds over keys, the
other tiles of keys and rounds over queries. Each element of a result has one writer, so that results are the same bits every
time.

A head of k and v that several heads of q share has a tile for each of these: a tile's head is then q's, as masks and scores
are told, and a tile's rounds are those of one head. Their results are float32, and are added up in the order of the heads.
Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gemmkit import programs as gp
from gemmkit.functions.attention import scores, stacks_of
from gemmkit.kernels.masks import Mask, OfLengths, PlainScores, Score, seen_from_keys
from gemmkit.programs.decorated import program
from gemmkit.programs.values import Parameter
from gemmkit.runtime.arrays import describe, empty_like

# --------------------------------------------------------------------------------------------------
# The programs. Their arguments are those of `gemmkit.functions.attention.softmax_attention`, and lse, what it has returned.

@program
def row_sums(delta: Parameter, do: Parameter, out: Parameter, dlse: Parameter | None) -> None:
    """What the softmax takes from all scores of a row; a change of lse changes them by the weights themselves."""
    for b, h, m in gp.parallel(*do.counts, do.rows):
        sums = (do[b, h, m] * out[b, h, m]).sum(axis=1)
        delta[b, h, m] = sums if dlse is None else sums - dlse[b, h, m]


@program
def gradient_of_queries(dq: Parameter, q: Parameter, k: Parameter, v: Parameter, do: Parameter, lse: Parameter,
                        delta: Parameter, q_offsets: Parameter | None, k_offsets: Parameter | None,
                        key_lengths: Parameter | None, scale: float, mask: Mask | None, score: Score | None,
                        slope: Score | None, k_stacks: str, v_stacks: str, k_share: int, v_share: int) -> None:
    queries = None if q_offsets is None else gp.packed(q.rows, q_offsets)
    tiles = (*q.counts, q.rows) if queries is None else (queries.count, *q.counts, queries.rows)
    for b, h, m in gp.parallel(*tiles):
        at = (b, h, m) if queries is None else (h, m)
        k_of, v_of = stacks_of(b, h, k_stacks, k_share), stacks_of(b, h, v_stacks, v_share)
        keys = k.rows if k_offsets is None else gp.packed(k.rows, k_offsets)[b]
        sums = gp.zeros(m, k.columns)
        for n in gp.sequential(keys, stop=None if key_lengths is None else key_lengths[b]):
            s = scale * (q[at] @ k[(*k_of, n)].T)
            p = gp.exp(scores(s, m, n, h, b, mask, score) - gp.finite(lse[at]))
            dp = do[at] @ v[(*v_of, n)].T
            ds = _by_slope(p * (dp - delta[at]), s, m, n, h, b, mask, slope)
            sums += ds.astype(k.dtype) @ k[(*k_of, n)]
        dq[at] = scale * sums


@program
def gradients_of_keys(dk: Parameter | None, dv: Parameter | None, q: Parameter, k: Parameter, v: Parameter, do: Parameter,
                      lse: Parameter, delta: Parameter, q_offsets: Parameter | None, k_offsets: Parameter | None,
                      key_lengths: Parameter | None, scale: float, mask: Mask | None, score: Score | None,
                      slope: Score | None, k_stacks: str, v_stacks: str, k_share: int, v_share: int) -> None:
    """``mask`` is `seen_from_keys`. Of dk and dv one may be None."""
    pieces = None if k_offsets is None else gp.packed(k.rows, k_offsets)
    tiles = (*q.counts, k.rows) if pieces is None else (pieces.count, *q.counts, pieces.rows)
    for b, h, n in gp.parallel(*tiles):
        at, stacks = ((b, h, n), (b, h)) if pieces is None else ((h, n), (h,))
        k_of, v_of = stacks_of(b, h, k_stacks, k_share), stacks_of(b, h, v_stacks, v_share)
        queries = q.rows if q_offsets is None else gp.packed(q.rows, q_offsets)[b]
        sums_k, sums_v = dk is not None and gp.zeros(n, q.columns), dv is not None and gp.zeros(n, do.columns)
        for m in gp.sequential(queries):
            s = scale * (k[(*k_of, n)] @ q[(*stacks, m)].T)
            p = gp.exp(scores(s, m, n, h, b, mask, score) - gp.finite(lse[(*stacks, m)]))
            if dv is not None:
                sums_v += p.astype(v.dtype) @ do[(*stacks, m)]
            if dk is not None:
                dp = v[(*v_of, n)] @ do[(*stacks, m)].T
                ds = _by_slope(p * (dp - delta[(*stacks, m)]), s, m, n, h, b, mask, slope)
                sums_k += ds.astype(k.dtype) @ q[(*stacks, m)]
        for result, sums in ((dk, dk is not None and scale * sums_k), (dv, sums_v)):
            if result is not None:                     # what lies behind a length is no key, whatever is there
                result[at] = sums if key_lengths is None else gp.where(gp.place(n) < key_lengths[b], sums, 0.0)


def _by_slope(dt: Any, s: Any, m: Any, n: Any, h: Any, b: Any, mask: Any, slope: Any) -> Any:
    """The gradient of scaled products from that of scores; a hidden one has none, whatever the score does there."""
    if slope is None:
        return dt
    ds = dt * gp.call(slope, s, m, n, h, b)
    return ds if mask is None else gp.where(mask, ds, 0.0)


# --------------------------------------------------------------------------------------------------
# What is launched: sums of rows, the gradient of q, those of k and v.

F32 = np.dtype(np.float32)
WIDEST_OF_BOTH = 256                   # head sizes of k and v together whose gradients one launch has the registers for


class Rules(NamedTuple):
    """What a call of attention was given beside its arrays. ``offsets``: of queries and of keys in packed sequences; they
    and ``key_lengths`` are where the arrays are."""

    mask: Mask
    score: Score
    slope: Score | None                # `gemmkit.functions.slope.slope_of` the score
    scale: float
    layout: str = "bhnd"
    offsets: tuple[Any, Any] | None = None
    key_lengths: Any = None


def gradients(rules: Rules, do: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any = None,
              needed: tuple[bool, ...] = (True, True, True), stream: Any = None) -> list[Any]:
    """The gradients of q, k and v, each of its array's shape and dtype, from those of ``out`` and (None: zero) of ``lse``;
    None of what is not ``needed``. Arrays and rules are those of a call of `gemmkit.attention`, with what it returned."""
    packed = rules.offsets is not None
    dtype = describe(q, "q").dtype
    made = [empty_like(q, x.shape, dtype) if is_needed else None for x, is_needed in zip((q, k, v), needed)]
    do, q, k, v, out, dq, *dkv = (None if x is None else _by_heads(x, rules.layout) for x in (do, q, k, v, out, *made))
    columns = k.shape[-2]
    is_nothing = not columns or not math.prod(q.shape)
    if packed or is_nothing:                           # rows that are in no sequence
        for x in made:
            _put(x, 0)
    if is_nothing:
        return made
    delta = empty_like(q, lse.shape, F32)
    row_sums(*(x[None] if packed and x is not None else x for x in (delta, do, out, dlse)), stream=stream)
    (of_k, k_stacks, k_share), (of_v, v_stacks, v_share) = (_own_stacks(x, q, packed) for x in (k, v))
    offsets = rules.offsets or (None, None)
    mask = None if rules.mask.is_everything else rules.mask
    score = None if isinstance(rules.score, PlainScores) else rules.score
    scored = score, rules.slope, k_stacks, v_stacks, k_share, v_share
    if dq is not None:
        gradient_of_queries(dq, q, of_k, of_v, do, lse, delta, *offsets, rules.key_lengths, rules.scale, mask, *scored,
                            stream=stream)
    seen = None if mask is None else seen_from_keys(mask)
    if rules.key_lengths is not None:
        seen = OfLengths(seen_from_keys(rules.mask), rules.key_lengths, columns)
    partial: list[Any] = [x if x is None or x.shape[:-2] == q.shape[:-2] else
                          empty_like(q, (*q.shape[:-2], *x.shape[-2:]), F32) for x in dkv]     # of each head of q
    if packed:
        for x in partial:
            _put(x, 0)
    together = partial if sum(x.shape[-1] for x in partial if x is not None) <= WIDEST_OF_BOTH else None
    for dk, dv in [together] if together else [(partial[0], None), (None, partial[1])]:
        if dk is not None or dv is not None:
            gradients_of_keys(dk, dv, q, of_k, of_v, do, lse, delta, *offsets, rules.key_lengths, rules.scale, seen, *scored,
                              stream=stream)
    for result, of_heads in zip(dkv, partial):
        if result is not None and result is not of_heads:
            _put(result, _summed(of_heads, result.shape))
    return made


def _by_heads(x: Any, layout: str) -> Any:
    """A view (batch, heads, rows, head size), or without a batch."""
    return x if layout == "bhnd" else x.swapaxes(-2, -3)


def _own_stacks(x: Any, q: Any, packed: bool) -> tuple[Any, str, int]:
    """Keys or values without the axes of which they have one for all, the letters of the others, and how many heads of q
    share one of theirs."""
    info, letters = describe(x, "k"), "h" if packed else "bh"
    kept = [axis for axis, count in enumerate(q.shape[:-2]) if count == 1 or (info.shape[axis] > 1 and info.strides[axis])]
    for axis in reversed(range(len(letters))):
        if axis not in kept:
            x = x[(slice(None),) * axis + (0,)]
    heads = len(letters) - 1
    return x, "".join(letters[axis] for axis in kept), q.shape[heads] // info.shape[heads] if heads in kept else 1


def _put(x: Any, value: Any) -> None:
    if x is not None:
        x[...] = value


def _summed(of_heads: Any, shape: tuple[int, ...]) -> Any:
    """The sum over the heads of q that share one, and over the batch where all share it."""
    *stacks, heads, rows, columns = of_heads.shape
    of_heads = of_heads.reshape((*stacks, shape[-3], heads // shape[-3], rows, columns)).sum(-3)
    return of_heads if tuple(of_heads.shape) == tuple(shape) else of_heads.sum(0)[None]
