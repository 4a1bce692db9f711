"""The battery's calls of the other families: attention and MLPs by both kernels, functions of rows, quantised weights.

Rings go around several times a tile, or are longer than a tile's rounds; head sizes are those that take another route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import attention_plans
from gemmkit.kernels.attention.store import QuadOut
from gemmkit.kernels.mlp import mapping as mlp_mapping
from gemmkit.masks import Causal, Window
from gemmkit.scores import SoftCap
from tests.kernels import test_quantised_kernel as quantised
from tests.kernels.rows.test_rows import FUNCTIONS
from tests.kernels.rows.test_rows import close as close_rows
from tests.mutation.products import EMULATOR, WrongResult, case, equal
from tests.support import attention as heads
from tests.support import mlp as layers
from tests.support.machines import poison
from tests.support.sm90 import F16


def right(check: Callable[..., None], *given: Any) -> None:
    """Raises WrongResult for what a test would not let pass."""
    try:
        check(*given)
    except AssertionError as error:
        raise WrongResult(str(error).split("\n")[0]) from None


@contextmanager
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def attend(queries: int, keys: int, head: int = 64, mask: Any = None, visible: Any = None, by_warps: bool = False, count: int = 1,
           soft_cap: float = 0.0, wide: bool = False, **fields: Any) -> None:
    """Attention and its logarithms, by one multiprocessor; ``fields`` of the mapping. ``wide``: into rows that TMA cannot store."""
    rng = np.random.default_rng(queries + keys)
    q, k, v = (heads.draw(rng, (1, count, rows, head), F16) for rows in (queries, keys, keys))
    out = poison((1, count, queries, head + 3 * wide), F16)[..., :head]
    capped = (lambda s, *_: soft_cap * np.tanh(s / soft_cap)) if soft_cap else None
    with patched() as patch:
        if by_warps:
            patch.setattr(attention_plans, "HOPPER", (0, 0))
            patch.setattr(attention_plans, "_bound", {})
        with heads.small(patch, blocks=1, **fields), gk.emulate():
            _, lse = gk.attention(q, k, v, mask=mask, score=SoftCap(soft_cap) if soft_cap else None, out=out, return_lse=True)
    right(heads.close, out, heads.reference(q, k, v, visible=visible, score=capped), lse, 1e-4)


APART: dict[str, Any] = dict(joins_tiles=False, q_stages=1, store=QuadOut())
CAUSAL: dict[str, Any] = dict(mask=Causal(), visible=lambda m, n, h, b: n <= m)


@case
def attention() -> None:
    attend(130, 130, **CAUSAL)


@case
def attention_of_two_consumers() -> None:
    attend(270, 90, consumers=2)


@case
def attention_of_few_keys() -> None:
    """One block of keys a tile: the rings are longer than a tile's rounds."""
    attend(300, 30)


@case
def attention_apart() -> None:
    attend(150, 100, **APART)
    attend(100, 40, wide=True, **APART)


@case
def attention_in_turns() -> None:
    attend(260, 100, consumers=2, turns=True, **APART)


@case
def attention_that_skips() -> None:
    attend(130, 130, **{**APART, "skips": True, "block_n": 16}, **CAUSAL)


@case
def attention_of_192() -> None:
    attend(130, 70, head=192)


@case
def attention_by_window() -> None:
    """Blocks of keys of which nothing is tested, some, or nothing seen; two heads."""
    attend(100, 100, mask=Window(40, 9), visible=lambda m, n, h, b: (m - 40 <= n) & (n <= m + 9), count=2)


@case
def attention_of_scores() -> None:
    attend(70, 70, soft_cap=2.0)


@case
def attention_by_warps() -> None:
    attend(100, 100, by_warps=True, **CAUSAL)
    attend(40, 60, head=192, by_warps=True, soft_cap=2.0)


@case
def attention_of_packed_sequences() -> None:
    """One of them empty."""
    rng, begins = np.random.default_rng(0), [0, 70, 70, 83, 150]
    q, k, v = (heads.draw(rng, (2, 150, 64), F16) for _ in range(3))
    with patched() as patch, heads.small(patch, blocks=1), gk.emulate():
        found = gk.attention(q, k, v, lengths=(begins, begins))
    for begin, end in pairwise(begins):
        one = [x[None, :, begin:end] for x in (q, k, v)]
        right(heads.close, found[None, :, begin:end], heads.reference(*one))


def perceive(rows: int, widths: list[int], by_warps: bool = False) -> None:
    """An MLP of whole numbers."""
    x, weights, biases = layers.whole(np.random.default_rng(0), rows, widths, F16)
    with patched() as patch:
        patch.setattr(mlp_mapping, "MOST_STAGES", 3)
        with layers.small(patch, 1, by_warps), gk.emulate():
            out = gk.mlp(x, weights, biases)
    equal(out, layers.reference(x, weights, biases)[0])


@case
def layers_of_several_tiles() -> None:
    perceive(280, [96, 128, 96, 128])


@case
def one_layer() -> None:
    """Rings are longer than a tile's rounds."""
    perceive(400, [64, 64])


@case
def layers_by_warps() -> None:
    perceive(70, [64, 32, 64, 32], by_warps=True)


@case
def functions_of_rows() -> None:
    """Rows of a lane, of a warp and of several; more of them than a block has."""
    rng = np.random.default_rng(0)
    for function, exact in FUNCTIONS.values():
        for shape in ((9, 33), (3, 1031)):
            x, out = rng.standard_normal(shape).astype(F16), poison(shape, F16)
            with gk.emulate():
                function(x, out=out)
            right(close_rows, out, exact(x.astype(np.float64)), F16)


@case
def quantised_weights() -> None:
    """Warps along N and K, rounds of the ring that end within it, blocks that share K; columns and rows beyond the last."""
    for m, bits, part, group, symmetric, warps, stages, splits in (
            (3, 4, 32, 8, False, (1, 2), 1, 1), (19, 2, 64, 16, True, (2, 1), 3, 1), (8, 4, 64, 64, False, (1, 2), 2, 2)):
        rng = np.random.default_rng(m)
        b, a = quantised.weights(rng, 5 * 128, 36, bits, group, symmetric), quantised.whole(rng, (m, 5 * 128), F16, 2)
        conf = quantised.mapping(b, 8 if m <= 8 else 16, 32 * warps[0], part * warps[1], part, stages=stages, splits=splits)
        equal(quantised.product(EMULATOR, a, b, conf), quantised.expected(a, b))


__all__ = ["attend", "perceive"]
