"""Kernels in Triton, written for these benches: a product, a gated pair of products, a product with sums of A's rows, and
attention. TMA descriptors bring all tiles; the block's sizes are chosen by Triton's own timing (`triton.autotune`).

They say what someone gets who writes the kernel that Triton's documentation teaches. Each takes contiguous float16.

    python -m bench.triton_kernels product         compiles a kernel's configurations into Triton's cache: several at a time
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

Array = Any
GROUP = 8                                      # rows of tiles that run side by side, for the L2
LOG2_E = 1.4426950408889634


def _hook(boxes: Callable[[dict[str, Any]], dict[str, list[int]]]) -> Callable[[dict[str, Any]], None]:
    """Give descriptors the boxes of the block's sizes that are tried."""
    def set_boxes(given: dict[str, Any]) -> None:
        for name, box in boxes(given).items():
            given[name].block_shape = box

    return set_boxes


def _product_boxes(given: dict[str, Any]) -> dict[str, list[int]]:
    m, n, k = given["M_TILE"], given["N_TILE"], given["K_TILE"]
    boxes = {"a": [m, k], "b": [k, n], "d": [m, n]}
    return boxes | ({"b2": [k, n]} if "b2" in given else {})


def _configs(tiles: tuple[tuple[int, int, int, int, int], ...]) -> list[Any]:
    return [triton.Config(dict(M_TILE=m, N_TILE=n, K_TILE=k), num_warps=warps, num_stages=stages,
                          pre_hook=_hook(_product_boxes)) for m, n, k, warps, stages in tiles]


PRODUCT = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4))
DUAL = ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (256, 64, 64, 8, 3))


@triton.jit
def _tile(M, N, M_TILE: tl.constexpr, N_TILE: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tile: tiles go down GROUP rows of tiles before they go to the next column."""
    at, tall, wide = tl.program_id(0), tl.cdiv(M, M_TILE), tl.cdiv(N, N_TILE)
    first = at // (GROUP * wide) * GROUP
    rows = min(tall - first, GROUP)
    within = at % (GROUP * wide)
    return (first + within % rows) * M_TILE, within // rows * N_TILE


@triton.autotune(_configs(PRODUCT), key=["M", "N", "K"])
@triton.jit
def _product(a, b, d, M, N, K, M_TILE: tl.constexpr, N_TILE: tl.constexpr,  # type: ignore[no-untyped-def]
             K_TILE: tl.constexpr, GROUP: tl.constexpr):
    m, n = _tile(M, N, M_TILE, N_TILE, GROUP)
    total = tl.zeros((M_TILE, N_TILE), tl.float32)
    for k in range(0, K, K_TILE):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    d.store([m, n], total.to(tl.float16))


@triton.autotune(_configs(DUAL), key=["M", "N", "K"])
@triton.jit
def _gated(a, b, b2, d, M, N, K, M_TILE: tl.constexpr, N_TILE: tl.constexpr,  # type: ignore[no-untyped-def]
           K_TILE: tl.constexpr, GROUP: tl.constexpr):
    m, n = _tile(M, N, M_TILE, N_TILE, GROUP)
    gate, up = tl.zeros((M_TILE, N_TILE), tl.float32), tl.zeros((M_TILE, N_TILE), tl.float32)
    for k in range(0, K, K_TILE):
        rows = a.load([m, k])
        gate = tl.dot(rows, b.load([k, n]), gate)
        up = tl.dot(rows, b2.load([k, n]), up)
    d.store([m, n], (gate * tl.sigmoid(gate) * up).to(tl.float16))


@triton.autotune(_configs(PRODUCT), key=["M", "N", "K"])
@triton.jit
def _with_sums(a, b, d, sums, M, N, K, M_TILE: tl.constexpr, N_TILE: tl.constexpr,  # type: ignore[no-untyped-def]
               K_TILE: tl.constexpr, GROUP: tl.constexpr):
    m, n = _tile(M, N, M_TILE, N_TILE, GROUP)
    total, found = tl.zeros((M_TILE, N_TILE), tl.float32), tl.zeros((M_TILE,), tl.float32)
    for k in range(0, K, K_TILE):
        rows = a.load([m, k])
        total = tl.dot(rows, b.load([k, n]), total)
        found += tl.sum(rows.to(tl.float32), 1)
    d.store([m, n], total.to(tl.float16))
    at = m + tl.arange(0, M_TILE)
    tl.store(sums + at, found, mask=(at < M) & (n == 0))


def _attention_boxes(given: dict[str, Any]) -> dict[str, list[int]]:
    rows, keys, size = [given["ROWS"], given["SIZE"]], [given["KEYS"], given["SIZE"]], ("q", "o")
    return {**dict.fromkeys(size, rows), "k": keys, "v": keys}


BLOCKS = (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)


@triton.autotune([triton.Config(dict(ROWS=rows, KEYS=keys), num_warps=warps, num_stages=stages,
                                pre_hook=_hook(_attention_boxes)) for rows, keys, warps, stages in BLOCKS],
                 key=["LENGTH", "SIZE", "CAUSAL"])
@triton.jit
def _attention(q, k, v, o, scale, LENGTH, SIZE: tl.constexpr, CAUSAL: tl.constexpr,  # type: ignore[no-untyped-def]
               ROWS: tl.constexpr, KEYS: tl.constexpr):
    """One head's block of rows; the softmax's maximum and sum go along with the keys."""
    first, base = tl.program_id(0) * ROWS, tl.program_id(1) * LENGTH
    rows = q.load([base + first, 0])
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight, total = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, SIZE), tl.float32)
    at = first + tl.arange(0, ROWS)
    whole = first if CAUSAL else LENGTH // KEYS * KEYS                  # keys that need no mask
    whole = whole // KEYS * KEYS
    for n in range(0, whole, KEYS):
        scores = tl.dot(rows, k.load([base + n, 0]).T) * scale
        now = tl.maximum(largest, tl.max(scores, 1))
        raised, less = tl.exp2(scores - now[:, None]), tl.exp2(largest - now)
        weight = weight * less + tl.sum(raised, 1)
        total = tl.dot(raised.to(tl.float16), v.load([base + n, 0]), total * less[:, None])
        largest = now
    end = min(first + ROWS, LENGTH) if CAUSAL else LENGTH
    for n in range(whole, end, KEYS):
        keys = n + tl.arange(0, KEYS)
        scores = tl.dot(rows, k.load([base + n, 0]).T) * scale
        shown = keys[None, :] < LENGTH
        if CAUSAL:
            shown = shown & (keys[None, :] <= at[:, None])
        scores = tl.where(shown, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        raised, less = tl.exp2(scores - now[:, None]), tl.exp2(largest - now)
        weight = weight * less + tl.sum(raised, 1)
        total = tl.dot(raised.to(tl.float16), v.load([base + n, 0]), total * less[:, None])
        largest = now
    o.store([base + first, 0], (total / weight[:, None]).to(tl.float16))


def _described(x: Array) -> Any:
    """A descriptor, whose box a configuration sets."""
    return TensorDescriptor.from_tensor(x, [1, 8])


def _grid(M: int, N: int) -> Callable[[dict[str, Any]], tuple[int]]:
    return lambda given: (triton.cdiv(M, given["M_TILE"]) * triton.cdiv(N, given["N_TILE"]),)


def product(a: Array, b: Array, out: Array) -> Callable[[], None]:
    """A call of D = A B."""
    (M, K), N = a.shape, b.shape[1]
    given = [_described(x) for x in (a, b, out)]
    return lambda: _product[_grid(M, N)](*given, M, N, K, GROUP=GROUP)


def gated(a: Array, w: Array, v: Array, out: Array) -> Callable[[], None]:
    """A call of D = silu(A W) * (A V)."""
    (M, K), N = a.shape, w.shape[1]
    given = [_described(x) for x in (a, w, v, out)]
    return lambda: _gated[_grid(M, N)](*given, M, N, K, GROUP=GROUP)


def with_sums(a: Array, b: Array, out: Array, sums: Array) -> Callable[[], None]:
    """A call of D = A B and the sums of A's rows, in float32."""
    (M, K), N = a.shape, b.shape[1]
    given = [_described(x) for x in (a, b, out)]
    return lambda: _with_sums[_grid(M, N)](*given, sums, M, N, K, GROUP=GROUP)


def attention(q: Array, k: Array, v: Array, out: Array, causal: bool) -> Callable[[], None]:
    """A call of attention on (batch, heads, length, size); the length is a multiple of 128."""
    batch, heads, length, size = q.shape
    if length % 128:
        raise ValueError(f"attention: length={length}; a multiple of 128 is needed: a block's rows are one head's")
    given = [_described(x.reshape(-1, size)) for x in (q, k, v, out)]
    scale = LOG2_E / size**0.5
    return lambda: _attention[lambda how: (triton.cdiv(length, how["ROWS"]), batch * heads)](
        *given, scale, length, SIZE=size, CAUSAL=causal)


def main(name: str) -> None:
    """Compile all configurations of a kernel, on small operands."""
    import torch

    def some(*shape: int) -> Array:
        return torch.ones(*shape, device="cuda", dtype=torch.float16)

    a, b, d = some(512, 512), some(512, 512), some(512, 512)
    if name == "attention":
        for size, causal in ((64, False), (128, False), (128, True)):
            q = some(1, 2, 384, size)
            attention(q, q, q, torch.empty_like(q), causal)()
    elif name == "gated":
        gated(a, b, b, d)()
    elif name == "with_sums":
        with_sums(a, b, d, torch.empty(512, device="cuda"))()
    else:
        product(a, b, d)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
