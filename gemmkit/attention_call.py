"""Attention in one launch: softmax(score(scale Q K^T)) V, with your own masks and scores.

>>> import numpy as np, gemmkit as gk
>>> q = k = v = np.eye(2, 64, dtype=np.float16)[None, None]
>>> with gk.emulate():
...     gk.attention(q, k, v, mask=gk.masks.Causal(), scale=0.0)[0, 0, :, :2].tolist()
[[1.0, 0.0], [0.5, 0.5]]
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.attention_operands import LAYOUTS, as_heads, check_loadable, check_out, operands_of, sequences_of
from gemmkit.attention_plans import LARGEST, UNKNOWN, AttentionCall, again, quickly, run_attention
from gemmkit.component_arrays import arrays_of, check_held
from gemmkit.masks import Everything, Mask
from gemmkit.problem import check_places, finite_number
from gemmkit.runtime.arrays import as_stream_handle, describe, empty_like
from gemmkit.scores import Function, Plain, Score

EVERYTHING, PLAIN = Everything(), Plain()     # what their properties cost is paid once


def attention(q: Any, k: Any, v: Any, *, mask: Mask | None = None, score: Any = None, scale: float | None = None,
              layout: str = "bhnd", lengths: Any = None, out: Any = None, return_lse: bool = False,
              stream: Any = None) -> Any:
    """softmax(score(scale q k^T)) v of each head, with float32 sums; the same bits every time. Forward only.

    Args:
        q: (batch, heads, queries, head size), float16 or bfloat16; head sizes 32, 64, 96, 128, 192 and 256.
        k, v: (batch, heads, keys, head size), of q's dtype. Their heads divide q's: head h of q goes with head
            h // (q's heads / k's). A batch of 1 is for all. Strides are any that TMA can follow: the head size contiguous,
            other strides positive multiples of 16 bytes, or 0 (broadcast) along heads and batch.
        mask: a `gemmkit.masks.Mask`, such as ``Causal()``, ``Window(1024)``, ``Documents(...)`` or your own; None hides
            nothing.
        score: a function ``f(s, m, n)``, ``f(s, m, n, head)`` or ``f(s, m, n, head, batch)`` of a scaled score, its query
            and its key, or a `gemmkit.scores.Score`; None leaves scores as they are.
        scale: the factor of q k^T; None for one over the root of the head size. A run-time number.
        layout: "bhnd", or "bnhd" for (batch, rows, heads, head size), of q, k, v and the result.
        lengths: ``(q_offsets, k_offsets)``, lists or NumPy arrays, for sequences packed one behind the other: sequence i has
            rows ``offsets[i]`` to ``offsets[i + 1]``. Arrays have no batch axis then, places are counted in each sequence,
            and a score's and mask's batch is the sequence.
        out: an array of q's shape and dtype, of any strides, to write; None makes one.
        return_lse: whether to return the logarithms of the sums of exponentials, too: float32, (batch, heads, queries), or
            (heads, queries) with lengths.
        stream: the stream to launch on; None for the library's current one.

    Returns: ``out``, or ``(out, lse)``. A query that sees no key gets zeros, and -inf. A key that is hidden has weight 0,
    so that its v must be finite, as with any softmax that multiplies by 0.

    Raises:
        TypeError: q, k, v or out is no array, of another dtype, or on the host outside of `gemmkit.emulate`; mask or score
            is none.
        ValueError: shapes do not go together, heads do not divide, strides cannot be loaded, out overlaps what is read, a
            tensor requires a gradient, offsets fall, scale is not finite or above 2.36e38.
        ConfigError: another head size; a GPU of a compute capability below 8.0.
        ComponentError: code of the mask or the score cannot be compiled.

    >>> import numpy as np, gemmkit as gk
    >>> q = k = v = np.eye(2, 64, dtype=np.float16)[None, None]
    >>> with gk.emulate():
    ...     out, lse = gk.attention(q, k, v, score=lambda s, m, n: 0.0 * s, return_lse=True)
    >>> out[0, 0, :, :2].tolist(), lse.round(4).tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [[[0.6930999755859375, 0.6930999755859375]]])
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f'layout={layout!r}: "bhnd" or "bnhd" is needed')
    quick = UNKNOWN if lengths is not None or return_lse else quickly(q, k, v, out, mask, score, scale, layout)
    known = again(quick, q, out, stream)
    if known is not None:
        return known
    rule, change = _mask(mask), _score(score)
    packed, handle = lengths is not None, None if stream is None else as_stream_handle(stream)
    operands = operands_of(describe(q, "q"), describe(k, "k"), describe(v, "v"), layout, packed)
    sequences = sequences_of(lengths, operands.queries, operands.keys) if packed else None
    factor = 1 / math.sqrt(operands.head_dim) if scale is None else _scale(scale)
    if not sequences:
        for part in (rule, change):
            part.check(operands.queries, operands.keys, operands.heads, operands.batch)
    held = [(name, one) for name, part in (("mask", rule), ("score", change)) for one in arrays_of(part)]
    check_places({"q": operands.q, **{one.name: one.info for _, one in held}})
    if operands.keys and math.prod(operands.q.shape):
        check_loadable(operands)
    result = empty_like(q, describe(q, "q").shape, operands.q.dtype) if out is None else out
    given = describe(result, "out")
    check_places({"q": operands.q, "out": given})
    seen = as_heads(given, "out", layout, packed)
    check_out(seen, operands, given)
    check_held(held, {"q": operands.q, "k": operands.k, "v": operands.v, "out": given})
    lse = None
    if return_lse:
        lse = empty_like(q, operands.q.shape[packed:3], np.dtype(np.float32))
    call = AttentionCall(operands, seen, None if lse is None else _lse(lse, packed), rule, change, factor, sequences)
    if math.prod(operands.q.shape):
        quick = quick._replace(like=describe(q, "q"))
        run_attention(call, {"q": q, "k": k, "v": v, "out": result, "lse": lse}, handle, quick)
    return (result, lse) if return_lse else result


def _mask(mask: Any) -> Mask:
    if mask is None:
        return EVERYTHING
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is a {type(mask).__name__}; a gemmkit.masks.Mask is needed, such as Causal(); for an array "
                        "of truth values write one with visible(m, n)")
    _ = mask.arities                                                    # refuses other numbers of arguments
    return mask


def _score(score: Any) -> Score:
    if score is None:
        return PLAIN
    made = score if isinstance(score, Score) else Function(score)
    _ = made.arity
    return made


def _scale(scale: Any) -> float:
    number = finite_number(scale, "scale")
    if abs(number) > LARGEST:
        raise ValueError(f"scale={scale!r}: scores are computed in float32, by way of scale log2(e); at most {LARGEST:.3g} "
                         "is possible")
    return number


def _lse(lse: Any, packed: bool) -> Any:
    info = describe(lse, "lse")
    return info._replace(shape=(1, *info.shape), strides=(0, *info.strides)) if packed else info
