"""Graphene's fused kernels (Hagedorn et al., ASPLOS 2023, section 6.2) and Hopper's product as specs, at any number of rows.

    python -m examples.fused_specs            runs each on a small problem in the emulator

| kernel | figure | what it computes | its own sizes |
|---|---|---|---|
| `mlp` | 11 | relu(... relu(X W0 + b0) ...), layers of width 128 in one launch | 2 to 20 layers |
| `lstm` | 12 | relu(A B + X Y + bias): a simplified cell, by TMA, mbarriers and wgmma (sm_90) | rows and columns of a tile |
| `layernorm` | 13 | rows of X less their mean, by their deviation, times gamma, plus beta | columns |
| `product` | | A B for float16, in the same way | rows and columns of a tile |
| `attention` | 14 | softmax(Q K^T / 8) V for heads of 64 columns | 384 keys in MLPerf's BERT |
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.wgmma import fence_async
from gemmkit.specs import ALL, WARP, WARPGROUP, cdiv
from gemmkit.specs import T as Types
from gemmkit.specs.tensors import Threads

T: Any = Types


def relu(x: Any) -> Any:
    return max(x, np.float32(0))


def typed(function: Any, **forms: Any) -> Any:
    """The function with its tensors' types, which are made of numbers here."""
    function.__annotations__ = forms
    return function


# -- products by warpgroups ------------------------------------------------------------------------------------------------

WIDTH = 128
GROUPS: Threads = specs.threads(256).tile(128)
ROWS_TILE, WEIGHTS = T[128, 128].fp16.SH.in_lines(), T[256, 128].fp16.SH.in_lines()
SUMS = T[64, 128].fp32.WR


def ring(rows: int, columns: int, stages: int, order: str, blocks: int, is_cell: bool) -> Any:
    """A B, or for a cell relu(A B + X Y + bias), in tiles of ``rows`` x ``columns``; B and Y lie in this ``order``.

    One warp asks TMA for steps of 64 along K, as soon as a stage is empty; warpgroups of 64 rows multiply them. Blocks stay,
    and take a tile after the other. Steps are numbered through: number n is stage n % stages in its phase n // stages.
    """
    groups, tile = rows // 64, 128 * (rows + columns)
    left, right = T[rows, 64].fp16.SH.in_lines(), T[64, columns].fp16.SH.in_lines(128, order)
    lefts, rights = T[rows * stages, 64].fp16.SH.in_lines(), T[64, columns * stages].fp16.SH.in_lines(128, order)
    at_right, at_full, of_stages, held = 128 * rows * stages, tile * stages, T[stages].mbar.SH, T[64, columns].fp32.WR

    def multiply(own, threads, A, B, X, Y, bias, C):  # type: ignore[no-untyped-def]
        one, t, steps, high = threads.scalar(), thread_index(), A.tile(ALL, 64).size(1), C.tile(rows, columns).size(0)
        further = X.tile(ALL, 64).size(1) if is_cell else 0
        a, b = specs.Allocate(lefts).tile(rows, ALL), specs.Allocate(rights, at_right).tile(ALL, columns)
        full, empty = specs.Allocate(of_stages, at_full), specs.Allocate(of_stages, at_full + 8 * stages)
        number, n, count = own.indices()[0], 0, high * C.tile(rows, columns).size(1)
        if t == 0:
            specs.Init(2, one, full)                          # the copies of A and B
            specs.Init(groups, one, empty)
        barrier()
        if t == 128 * groups:
            while number < count:
                for k in range(steps):
                    specs.Await(-1, one, empty[n])            # those of the round before have been read
                    specs.CopyAsync(one, A.tile(rows, 64)[number % high, k], a[n % stages, 0], full[n])
                    specs.CopyAsync(one, B.tile(64, columns)[k, number // high], b[0, n % stages], full[n])
                    n += 1
                if is_cell:
                    for k in range(further):
                        specs.Await(-1, one, empty[n])
                        specs.CopyAsync(one, X.tile(rows, 64)[number % high, k], a[n % stages, 0], full[n])
                        specs.CopyAsync(one, Y.tile(64, columns)[k, number // high], b[0, n % stages], full[n])
                        n += 1
                number += blocks
        elif t < 128 * groups:
            sums, group = specs.Allocate(held), t // 128
            while number < count:
                if is_cell:
                    specs.Move(WARPGROUP, bias.tile(1, columns)[0, number // high], sums)
                else:
                    specs.Init(0, WARPGROUP, sums)
                for k in range(steps + further):
                    specs.Await(one, full[n])
                    specs.MatMulAsync(WARPGROUP, a[n % stages, 0].tile(64, ALL)[group, 0], b[0, n % stages], sums)
                    if k > 0 and t % 128 == 0:                # the step before is done
                        specs.Arrive(one, empty[n - 1])
                    n += 1
                specs.Await(WARPGROUP, sums)
                if t % 128 == 0:
                    specs.Arrive(one, empty[n - 1])
                if is_cell:
                    specs.UnaryPointwise(relu, WARPGROUP, sums, sums)
                specs.Move(WARPGROUP, sums, C.tile(rows, columns)[number % high, number // high].tile(64, ALL)[group, 0])
                number += blocks

    def product(own, threads, A, B, C):  # type: ignore[no-untyped-def]
        multiply(own, threads, A, B, A, B, C, C)

    def cell(own, threads, A, B, X, Y, bias, out):  # type: ignore[no-untyped-def]
        multiply(own, threads, A, B, X, Y, bias, out)

    forms = dict(A=T["M", "K"].fp16.GL.in_boxes(left), B=T["K", "N"].fp16.GL.in_boxes(right))
    if is_cell:
        typed(cell, **forms, X=T["M", "J"].fp16.GL.in_boxes(left), Y=T["J", "N"].fp16.GL.in_boxes(right),
              bias=T[1, "N"].fp16.GL, out=T["M", "N"].fp16.GL)
    else:
        typed(product, **forms, C=T["M", "N"].fp32.GL)
    return specs.kernel((blocks,), (128 * groups + 32,), (tile + 16) * stages)(cell if is_cell else product)


@cache
def product(rows: int = 128, columns: int = 256, stages: int = 4, order: str = "col", blocks: int = 132) -> Any:
    """``kernel(a, b, c)``: a M x K row-major and b K x N in this ``order``, both of float16, c M x N of float32."""
    return ring(rows, columns, stages, order, blocks, False)


@cache
def lstm(rows: int = 128, columns: int = 256, stages: int = 4, order: str = "row", blocks: int = 132) -> Any:
    """``kernel(a, b, x, y, bias, out)``: relu(a b + x y + bias), all of float16; a and x are row-major, b and y in this
    ``order``, and bias is 1 x N."""
    return ring(rows, columns, stages, order, blocks, True)


@cache
def mlp(layers: int = 2) -> Any:
    """``kernel(x, weights, biases, y)``: x and y M x 128, weights (128 layers) x 128, biases layers x 128, all of float16.

    A block has 128 rows, and keeps them in shared memory from layer to layer; the next layer's weights come meanwhile.
    """
    def kernel(blocks, threads, X, W, bias, Y):  # type: ignore[no-untyped-def]
        one, t, group = threads.scalar(), thread_index(), GROUPS.indices()[0]
        rows, weights, sums = specs.Allocate(ROWS_TILE), specs.Allocate(WEIGHTS, 32768), specs.Allocate(SUMS)
        source = X.tile(128, ALL)[blocks.indices()[0], 0]
        for n in range(8):
            specs.CopyAsync(one, source.tile(1, 8)[16 * n + t // 16, t % 16], rows.tile(1, 8)[16 * n + t // 16, t % 16])
            specs.CopyAsync(one, W.tile(1, 8)[16 * n + t // 16, t % 16], weights.tile(1, 8)[16 * n + t // 16, t % 16])
        mine = rows.tile(64, ALL)[group, 0]
        for layer in range(layers):
            specs.wait()
            fence_async()
            barrier()                                         # the weights are there, and all rows
            if layer + 1 < layers:
                for n in range(8):
                    line = 16 * n + t // 16
                    specs.CopyAsync(one, W.tile(1, 8)[128 * (layer + 1) + line, t % 16],
                                    weights.tile(1, 8)[128 * ((layer + 1) % 2) + line, t % 16])
            specs.Move(GROUPS, bias.tile(1, 128)[layer, 0], sums)
            specs.MatMul(GROUPS, mine, weights.tile(128, ALL)[layer % 2, 0], sums)
            specs.UnaryPointwise(relu, GROUPS, sums, sums)
            if layer + 1 < layers:
                specs.Move(GROUPS, sums, mine)                # a warp's own rows, which no other reads
            barrier()                                         # all have read the weights
        specs.Move(GROUPS, sums, Y.tile(128, ALL)[blocks.indices()[0], 0].tile(64, ALL)[group, 0])

    typed(kernel, X=T["M", 128].fp16.GL, W=T[128 * layers, 128].fp16.GL, bias=T[layers, 128].fp16.GL, Y=T["M", 128].fp16.GL)
    return specs.kernel(grid=(cdiv("M", 128),), block=(256,), shared_bytes=32768 + 65536)(kernel)


# -- rows ------------------------------------------------------------------------------------------------------------------

ONE = T[()].fp32.RF


def to_single(x: Any) -> Any:
    return np.float32(x)


def to_half(x: Any) -> Any:
    return np.float16(x)


def squared(x: Any) -> Any:
    return x * x


def over_the_warp(part: Any) -> None:
    """The sum of all lanes' parts, in every lane."""
    other = specs.Allocate(ONE)
    for lane in (16, 8, 4, 2, 1):
        specs.Shfl("bfly", lane, WARP, part, other)
        specs.BinaryPointwise("+", specs.THREAD, part, other, part)


@cache
def layernorm(columns: int = 1024) -> Any:
    """``kernel(x, gamma, beta, y)``: rows of float16, a warp each, in registers; ``columns`` is a multiple of 256."""
    pieces, factor = columns // 256, 1 / columns
    held, part = T[pieces, 8].fp32.RF, T[1, 8].fp16.RF

    def mean(x):  # type: ignore[no-untyped-def]
        return x * factor

    def deviation(x):  # type: ignore[no-untyped-def]
        return 1 / math.sqrt(x * factor + 1e-5)

    def kernel(blocks, threads, X, gamma, beta, Y):  # type: ignore[no-untyped-def]
        one, (warp, lane), m = threads.scalar(), threads.indices(), blocks.indices()[0]
        x, y, half = specs.Allocate(held), specs.Allocate(held), specs.Allocate(part)
        total, total_of_piece = specs.Allocate(ONE), specs.Allocate(ONE)
        source, target = X.tile(4, ALL)[m, 0].tile(1, 8), Y.tile(4, ALL)[m, 0].tile(1, 8)
        specs.Init(0, one, total)
        for n in range(pieces):
            specs.Move(one, source[warp, 32 * n + lane], half)
            specs.UnaryPointwise(to_single, one, half, x.tile(1, 8)[n, 0])
            specs.Reduction("+", one, x.tile(1, 8)[n, 0], total_of_piece)
            specs.BinaryPointwise("+", one, total, total_of_piece, total)
        over_the_warp(total)
        specs.UnaryPointwise(mean, one, total, total)
        for n in range(pieces):
            specs.BinaryPointwise("-", one, x.tile(1, 8)[n, 0], total, x.tile(1, 8)[n, 0])
        specs.Init(0, one, total)
        for n in range(pieces):
            specs.UnaryPointwise(squared, one, x.tile(1, 8)[n, 0], y.tile(1, 8)[n, 0])
            specs.Reduction("+", one, y.tile(1, 8)[n, 0], total_of_piece)
            specs.BinaryPointwise("+", one, total, total_of_piece, total)
        over_the_warp(total)
        specs.UnaryPointwise(deviation, one, total, total)
        for n in range(pieces):
            specs.BinaryPointwise("*", one, x.tile(1, 8)[n, 0], total, x.tile(1, 8)[n, 0])
            specs.UnaryPointwise(to_single, one, gamma.tile(8)[32 * n + lane], y.tile(1, 8)[n, 0])
            specs.BinaryPointwise("*", one, x.tile(1, 8)[n, 0], y.tile(1, 8)[n, 0], x.tile(1, 8)[n, 0])
            specs.UnaryPointwise(to_single, one, beta.tile(8)[32 * n + lane], y.tile(1, 8)[n, 0])
            specs.BinaryPointwise("+", one, x.tile(1, 8)[n, 0], y.tile(1, 8)[n, 0], x.tile(1, 8)[n, 0])
            specs.UnaryPointwise(to_half, one, x.tile(1, 8)[n, 0], half)
            specs.Move(one, half, target[warp, 32 * n + lane])

    row = T[columns].fp16.GL
    typed(kernel, X=T["M", columns].fp16.GL, gamma=row, beta=row, Y=T["M", columns].fp16.GL)
    return specs.kernel(grid=(cdiv("M", 4),), block=(4, 32))(kernel)


# -- attention -------------------------------------------------------------------------------------------------------------

QUERIES, VALUES, KEYS = T[64, 64].fp16.SH.in_lines(), T[64, 64].fp16.SH.in_lines(), T[64, 64].fp16.SH.in_lines(128, "col")
OF_QUERIES, SCORES, ROW, OUT = T[2, 16].fp16.RF, T[2, 16].fp32.RF, T[2, 1].fp32.RF, T[1, 2].fp16.RF
OPERAND = T[8, 1].fp16.RF                                     # of 32 along the sum, 8 columns
SCALE = 1 / 8


def exponential(x: Any) -> Any:
    return math.exp(x * SCALE)


def inverse(x: Any) -> Any:
    return 1 / x


def over_rows(name: str, part: Any) -> None:
    """Of a thread's two rows what its four neighbours have: a row of scores is theirs."""
    other = specs.Allocate(ROW)
    for lane in (1, 2):
        specs.Shfl("bfly", lane, WARP, part, other)
        specs.BinaryPointwise(name, specs.THREAD, part, other, part)


@cache
def attention(keys: int = 384) -> Any:
    """``kernel(q, k, v, out)``: heads x ``keys`` x 64 of float16, ``keys`` a multiple of 64. A warp has 16 queries, whose
    scores of 64 keys at a time stay in registers; the sums of one product lie as the next takes its left operand."""
    def kernel(blocks, threads, Q, K, V, O):  # type: ignore[no-untyped-def]  # noqa: E741
        (h, m), (warp, lane), one, t = blocks.indices(), threads.indices(), threads.scalar(), thread_index()
        tile, k_tile, v_tile = specs.Allocate(QUERIES), specs.Allocate(KEYS, 8192), specs.Allocate(VALUES, 16384)
        q, s, p, o = specs.Allocate(OF_QUERIES), specs.Allocate(SCORES), specs.Allocate(OF_QUERIES), specs.Allocate(SCORES)
        top, peak, total, part = specs.Allocate(ROW), specs.Allocate(ROW), specs.Allocate(ROW), specs.Allocate(ROW)
        right = specs.Allocate(OPERAND)
        of_q, of_k, of_v = Q.tile(1, 1, 8), K.tile(1, 1, 8), V.tile(1, 1, 8)
        for n in range(4):
            specs.CopyAsync(one, of_q[h, 64 * m + 16 * n + t // 8, t % 8], tile.tile(1, 8)[16 * n + t // 8, t % 8])
        specs.wait()
        barrier()
        mine = tile.tile(16, 64)[warp, 0].tile(1, 8)
        for n in range(4):
            specs.Move(WARP, mine[8 * (lane // 16) + lane % 8, 2 * n + lane // 8 % 2], q.tile(2, 4)[0, n].tile(1, 2))
        specs.Init(0, one, total)
        specs.Init(-1e30, one, peak)
        specs.Init(0, one, o)
        for block in range(keys // 64):
            barrier()                                         # all have read the keys before
            for n in range(4):
                key = 16 * n + t // 8
                specs.CopyAsync(one, of_k[h, 64 * block + key, t % 8], k_tile.tile(8, 1)[t % 8, key])
                specs.CopyAsync(one, of_v[h, 64 * block + key, t % 8], v_tile.tile(1, 8)[key, t % 8])
            specs.wait()
            barrier()
            specs.Init(0, one, s)
            for n in range(8):
                for half in range(2):
                    specs.Move(WARP, k_tile.tile(8, 1)[4 * half + lane // 8, 8 * n + lane % 8], right.tile(2, 1))
                    for j in range(2):
                        specs.MatMul(WARP, q.tile(2, 4)[0, 2 * half + j].tile(1, 2), right.tile(4, 1)[j, 0].tile(2, 1),
                                     s.tile(2, 2)[0, n].tile(1, 2))
            for i in range(2):
                specs.Reduction("max", one, s.tile(1, 16)[i, 0], top[i, 0])
            over_rows("max", top)
            specs.BinaryPointwise("max", one, top, peak, top)
            specs.BinaryPointwise("-", one, peak, top, peak)
            specs.UnaryPointwise(exponential, one, peak, peak)            # what the sums so far are worth
            for i in range(2):
                specs.BinaryPointwise("-", one, s.tile(1, 16)[i, 0], top[i, 0], s.tile(1, 16)[i, 0])
                specs.UnaryPointwise(exponential, one, s.tile(1, 16)[i, 0], s.tile(1, 16)[i, 0])
                specs.Reduction("+", one, s.tile(1, 16)[i, 0], part[i, 0])
                specs.UnaryPointwise(to_half, one, s.tile(1, 16)[i, 0], p.tile(1, 16)[i, 0])
                specs.BinaryPointwise("*", one, o.tile(1, 16)[i, 0], peak[i, 0], o.tile(1, 16)[i, 0])
            specs.BinaryPointwise("*", one, total, peak, total)
            specs.BinaryPointwise("+", one, total, part, total)
            specs.Move(one, top, peak)
            for n in range(8):
                for half in range(2):
                    specs.Move(WARP, v_tile.tile(1, 8)[32 * half + lane, n], right.tile(2, 1))
                    for j in range(2):
                        specs.MatMul(WARP, p.tile(2, 4)[0, 2 * half + j].tile(1, 2), right.tile(4, 1)[j, 0].tile(2, 1),
                                     o.tile(2, 2)[0, n].tile(1, 2))
        over_rows("+", total)
        specs.UnaryPointwise(inverse, one, total, total)
        pair = specs.Allocate(OUT)
        for i in range(2):
            specs.BinaryPointwise("*", one, o.tile(1, 16)[i, 0], total[i, 0], o.tile(1, 16)[i, 0])
            for n in range(8):
                specs.UnaryPointwise(to_half, one, o.tile(1, 2)[i, n], pair)
                row = 64 * m + 16 * warp + 8 * i + lane // 4
                specs.Move(one, pair, O.tile(1, 1, 2)[h, row, 4 * n + lane % 4])

    head = T["H", keys, 64].fp16.GL
    typed(kernel, Q=head, K=head, V=head, O=head)
    return specs.kernel(grid=("H", keys // 64), block=(4, 32), shared_bytes=24576)(kernel)


# -- what they compute, in float64 -----------------------------------------------------------------------------------------

def mlp_reference(x: np.ndarray, weights: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """Activations are rounded to float16 between layers, as the kernel keeps them."""
    y = x.astype(float)
    for w, b in zip(weights.astype(float).reshape(len(biases), WIDTH, WIDTH), biases.astype(float)):
        y = np.maximum(y @ w + b, 0).astype(np.float16).astype(float)
    return y


def layernorm_reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    centred = x.astype(float) - x.astype(float).mean(1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    return np.asarray(scaled * gamma.astype(float) + beta.astype(float))


def lstm_reference(a: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, bias: np.ndarray) -> np.ndarray:
    sums = a.astype(float) @ b.astype(float) + x.astype(float) @ y.astype(float) + bias.astype(float)
    return np.asarray(np.maximum(sums, 0))


def attention_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q.astype(float) @ k.astype(float).swapaxes(1, 2) / 8
    weights = np.exp(scores - scores.max(2, keepdims=True))
    return np.asarray(weights @ v.astype(float) / weights.sum(2, keepdims=True))


def main() -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float16)

    x, weights, biases = normal(40, 128), normal(256, 128, scale=0.125), normal(2, 128)
    y, rows, out = np.zeros_like(x), normal(5, 256), np.zeros((5, 256), np.float16)
    gamma, beta, q = normal(256), normal(256), normal(1, 64, 64)
    heads, c = np.zeros_like(q), np.zeros((40, 128), np.float32)
    with gk.emulate():
        mlp()(x, weights, biases, y)
        layernorm(256)(rows, gamma, beta, out)
        product(64, 64, 2, "row", 1)(x, weights[:128], c)
        attention(64)(q, q, q, heads)
    for name, found, wanted in (("mlp", y, mlp_reference(x, weights, biases)),
                                ("layernorm", out, layernorm_reference(rows, gamma, beta)),
                                ("product", c, x.astype(float) @ weights[:128].astype(float)),
                                ("attention", heads, attention_reference(q, q, q))):
        print(f"{name}: largest difference {np.abs(found - wanted).max():.1e}")


if __name__ == "__main__":
    main()
