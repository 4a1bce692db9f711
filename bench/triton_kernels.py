"""Kernels in Triton, as its tutorials write them, beside programs of the same mathematics (`bench.cypress`). Triton comes
with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

#: (rows, columns, K, stages, warps) of a block; whether TMA brings operands.
ONE = ((128, 256, 64, 3, 8, True), (128, 256, 64, 3, 8, False), (128, 128, 64, 4, 8, True), (128, 128, 64, 4, 4, False))
TWO = ((128, 128, 64, 3, 8, True), (128, 128, 64, 3, 8, False), (128, 64, 64, 4, 4, True))
BANDS = 8                              # tile rows that are taken together, so that operands stay in the L2


@triton.jit
def _product(a, b, c, d, y, M, N, K, KIND: tl.constexpr, TMA: tl.constexpr,        # type: ignore[no-untyped-def]
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr):
    """``KIND``: 0 a product, 1 the SiLU of one product times another, 2 a product and the sums of A's rows."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile, stack = tl.program_id(0), tl.program_id(1).to(tl.int64)
    band = tile // (BAND * columns)
    height = min(rows - band * BAND, BAND)
    pm = band * BAND + (tile % (BAND * columns)) % height
    pn = (tile % (BAND * columns)) // height
    a, b, c, d = a + stack * M * K, b + stack * K * N, c + stack * K * N, d + stack * M * N
    m, n, ks = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    x = tl.zeros((BM, BN), tl.float32)
    z = tl.zeros((BM, BN), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    if TMA:
        at_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
        at_b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
        at_c = tl.make_tensor_descriptor(c, [K, N], [N, 1], [BK, BN])
        for k in range(0, K, BK):
            left = at_a.load([pm * BM, k])
            x = tl.dot(left, at_b.load([k, pn * BN]), x)
            if KIND == 1:
                z = tl.dot(left, at_c.load([k, pn * BN]), z)
            if KIND == 2:
                sums += tl.sum(left.to(tl.float32), axis=1)
    else:
        of_a = a + (m % M)[:, None] * K + ks[None, :]
        of_b = b + ks[:, None] * N + (n % N)[None, :]
        of_c = c + ks[:, None] * N + (n % N)[None, :]
        for k in range(0, K, BK):
            left = tl.load(of_a, mask=ks[None, :] < K - k, other=0.0)
            x = tl.dot(left, tl.load(of_b, mask=ks[:, None] < K - k, other=0.0), x)
            if KIND == 1:
                z = tl.dot(left, tl.load(of_c, mask=ks[:, None] < K - k, other=0.0), z)
            if KIND == 2:
                sums += tl.sum(left.to(tl.float32), axis=1)
            of_a += BK
            of_b += BK * N
            of_c += BK * N
    if KIND == 1:
        x = x * tl.sigmoid(x) * z
    tl.store(d + m[:, None] * N + n[None, :], x.to(d.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
    if KIND == 2:
        if pn == 0:
            tl.store(y + m, sums, mask=m < M)


@triton.jit
def _attention(q, k, v, o, scale, ROWS, D: tl.constexpr, BM: tl.constexpr,         # type: ignore[no-untyped-def]
               BN: tl.constexpr):
    """FlashAttention 2, of whole blocks."""
    head = tl.program_id(1).to(tl.int64) * ROWS * D
    m, n, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    queries = tl.load(q + head + m[:, None] * D + d[None, :])
    best = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    factor = scale * 1.4426950408889634
    for begin in range(0, ROWS, BN):
        keys = tl.load(k + head + (begin + n)[None, :] * D + d[:, None])
        s = tl.dot(queries, keys)
        top = tl.maximum(best, tl.max(s, axis=1) * factor)
        p = tl.exp2(s * factor - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, axis=1)
        values = tl.load(v + head + (begin + n)[:, None] * D + d[None, :])
        out = tl.dot(p.to(values.dtype), values, out * shrink[:, None])
        best = top
    tl.store(o + head + m[:, None] * D + d[None, :], (out / total[:, None]).to(o.dtype.element_ty))


def product(kind: int, block: tuple[Any, ...], a: Any, b: Any, c: Any, d: Any, y: Any) -> Callable[[], Any]:
    """A launch on matrices, or stacks of them, that lie row by row."""
    bm, bn, bk, stages, warps, by_tma = block
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    grid = triton.cdiv(m, bm) * triton.cdiv(n, bn), a.shape[0] if a.dim() == 3 else 1
    return lambda: _product[grid](a, b, c, d, y, m, n, k, KIND=kind, TMA=by_tma, BM=bm, BN=bn, BK=bk, BAND=BANDS,
                                  num_stages=stages, num_warps=warps)


def attention(block: tuple[int, int, int, int], q: Any, k: Any, v: Any, o: Any) -> Callable[[], Any]:
    """A launch on (heads, rows, head size), with rows in whole blocks."""
    bm, bn, stages, warps = block
    heads, rows, d = q.shape
    return lambda: _attention[rows // bm, heads](q, k, v, o, d ** -0.5, rows, D=d, BM=bm, BN=bn, num_stages=stages,
                                                 num_warps=warps)


def workspace(size: int, alignment: int, stream: Any) -> Any:
    """For the tensor maps that kernels make."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


if hasattr(triton, "set_allocator"):
    triton.set_allocator(workspace)
ATTENTION = (128, 128, 3, 8), (128, 64, 3, 8), (128, 64, 3, 4)
