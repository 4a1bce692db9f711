"""Attention's inner decomposition by specs (Graphene, section 6): two products by tensor cores, a softmax of rows between, all in
registers of one warp: the sums of the first product lie as the second takes its left operand."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.specs import WARP, T

QUADS = WARP.tile(4)
TILE, LEFT = T[16, 16].fp16.SH.stored("[(16,16):(24,1)]"), T[2, 4].fp16.RF
RIGHT, SUMS = T[4, 1].fp16.RF, T[2, 2].fp32.RF
SCORES, ROW = T[2, 4].fp32.RF, T[2, 1].fp32.RF


def to_half(x: Any) -> Any:
    return np.float16(x)


def exponential(x: Any) -> Any:
    return math.exp(x)


def inverse(x: Any) -> Any:
    return 1 / x


def left_operand(tile: Any, target: Any) -> None:
    """Fig. 1d: ldmatrix."""
    i, j = WARP.tile(8).reshape(2, 2).indices()
    specs.Move(WARP, tile.tile(8, 8)[i, j].tile(1, 8)[WARP.tile(8).local(), 0], target.tile(1, 2))


def right_operand(matrix: Any, target: Any) -> None:
    """16 x 8, whose columns are neighbours: pairs of rows, and those eight below."""
    part = matrix.tile(specs.shape((2, 2), (1, 8)), 1)[QUADS.local(), QUADS.indices()[0]]
    for n in range(2):
        specs.Move(specs.THREAD, part.tile(2, 1)[n, 0], target.tile(2, 1)[n, 0])


def over_rows(name: str, part: Any) -> None:
    """Of a thread's two rows what its quad has: a row's elements are a quad's."""
    other = specs.Allocate(ROW)
    for lane in (1, 2):
        specs.Shfl("bfly", lane, WARP, part, other)
        specs.BinaryPointwise(name, specs.THREAD, part, other, part)


@specs.kernel(grid=(1,), block=(32,), shared_bytes=768)
def attention(blocks: Any, threads: Any, Q: T[16, 16].fp16.GL, K: T[16, 16].fp16.GL, V: T[16, 8].fp16.GL, O: T[16, 8].fp32.GL) -> None:  # type: ignore[name-defined]  # noqa: E741
    """softmax(Q K) V of 16 queries and 16 keys; K is given with a key a column."""
    one = threads.scalar()
    tile, left, right = specs.Allocate(TILE), specs.Allocate(LEFT), specs.Allocate(RIGHT)
    scores, row, out = specs.Allocate(SCORES), specs.Allocate(ROW), specs.Allocate(SUMS)
    half, line = thread_index() % 2, thread_index() // 2
    specs.Move(one, Q.tile(1, 8)[line, half], tile.tile(1, 8)[line, half])
    barrier()
    left_operand(tile, left)
    specs.Init(one, scores)
    specs.Init(one, out)
    for n in range(2):                                        # 8 keys at a time
        right_operand(K.tile(16, 8)[0, n], right)
        specs.MatMul(WARP, left.tile(1, 2), right.tile(2, 1), scores.tile(2, 2)[0, n].tile(1, 2))
    for i in range(2):
        specs.Reduction("max", one, scores.tile(1, 4)[i, 0], row[i, 0])
    over_rows("max", row)
    for i in range(2):
        specs.BinaryPointwise("-", one, scores.tile(1, 4)[i, 0], row[i, 0], scores.tile(1, 4)[i, 0])
        specs.UnaryPointwise(exponential, one, scores.tile(1, 4)[i, 0], scores.tile(1, 4)[i, 0])
        specs.Reduction("+", one, scores.tile(1, 4)[i, 0], row[i, 0])
        specs.UnaryPointwise(to_half, one, scores.tile(1, 4)[i, 0], left.tile(1, 4)[i, 0])
    over_rows("+", row)
    right_operand(V, right)
    specs.MatMul(WARP, left.tile(1, 2), right.tile(2, 1), out.tile(1, 2))
    own = O.tile(specs.shape(2, 8), 2)[QUADS.indices()[0], QUADS.local()]
    for i in range(2):
        specs.UnaryPointwise(inverse, one, row[i, 0], row[i, 0])
        specs.BinaryPointwise("*", one, out.tile(1, 2)[i, 0], row[i, 0], out.tile(1, 2)[i, 0])
        specs.Move(one, out.tile(1, 2)[i, 0], own.tile(1, 2)[i, 0])


def test_attention(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((16, 16)).astype("f2"), np.asfortranarray(rng.standard_normal((16, 16)).astype("f2"))
    v, out = np.asfortranarray(rng.standard_normal((16, 8)).astype("f2")), np.zeros((16, 8), "f4")
    with gk.emulate():
        attention(q, k, v, out)
    scores = q.astype(float) @ k.astype(float)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(out, weights @ v.astype(float) / weights.sum(1, keepdims=True), atol=5e-3)


@pytest.mark.compile
def test_its_code() -> None:
    code = attention.compile("row", "col", "col", "row")
    assert len(re.findall("mma.sync.aligned.m16n8k16", code.ptx)) == 3
    assert code.usage.stack_bytes == code.usage.spill_stores == 0 and not re.search(r"\bcall\b", code.ptx)
