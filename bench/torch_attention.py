"""Attention by PyTorch: cuDNN through scaled_dot_product_attention, and FlexAttention by torch.compile.

Both take a `bench.experiments.attention.Attention`, and give a function of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from bench.experiments.attention import CAP, WINDOW

Array = Any
Function = Callable[[Array, Array, Array], Array]


def by_cudnn(case: Any) -> Function:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(q: Array, k: Array, v: Array) -> Array:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=case.work == "causal")

    return call


@lru_cache(maxsize=1)                  # all input sets of a case have one compiled function
def by_flex(case: Any, recorded: bool = False) -> Function:
    """Compiled for the case's sizes; the mask of blocks is made once, and not timed. ``recorded``: by autograd."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = torch.tensor(case.slopes, device="cuda")
    ends = torch.tensor(case.offsets[1:], device="cuda")
    documents = torch.bucketize(torch.arange(case.n, device="cuda"), ends, right=True)

    def alibi(s: Array, b: Array, h: Array, m: Array, n: Array) -> Array:
        return s - slopes[h] * (m - n)

    def soft_cap(s: Array, b: Array, h: Array, m: Array, n: Array) -> Array:
        return CAP * torch.tanh(s / CAP)

    def window(b: Array, h: Array, m: Array, n: Array) -> Array:
        return (m - n <= WINDOW) & (n <= m)

    def of_one_document(b: Array, h: Array, m: Array, n: Array) -> Array:
        return documents[m] == documents[n]

    score: Any = {"alibi": alibi, "soft cap": soft_cap}.get(case.work)
    rule: Any = {"window": window, "documents": of_one_document}.get(case.work)
    blocks = rule and create_block_mask(rule, None, None, case.queries, case.n, device="cuda")
    torch._dynamo.reset()              # it compiles a function eight times, and from then on runs it as it is
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def call(q: Array, k: Array, v: Array) -> Array:
        with torch.set_grad_enabled(recorded):
            return compiled(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=case.kv_heads != case.heads)

    return call
