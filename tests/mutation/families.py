"""The battery's calls of the other families: attention and MLPs by both kernels, functions of rows, quantised weights.

Rings go around several times a tile, or are longer than a tile's rounds; head sizes are those that take another route.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions.rows import RowFunction
from gemmkit.kernels.masks import Causal, Documents, Mask, SoftCap, Window
from gemmkit.kernels.rows import mapped, put
from gemmkit.programs.chains import schedule
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning import problems
from tests.functions import test_rows
from tests.functions.test_rows import FUNCTIONS, layernorm
from tests.functions.test_rows import close as close_rows
from tests.kernels import test_quantised_kernel as quantised
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


def attend(queries: int, keys: int, head: int = 64, mask: Any = None, visible: Any = None, by_warps: bool = False, batch: int = 1,
           count: int = 1, score: Any = None, scored: Any = None, wide: bool = False, width: int | None = None) -> None:
    """Attention and its logarithms, by one multiprocessor. ``scored`` is the score for arrays of places. ``wide``: into rows that TMA
    cannot store; ``width``: v's head size."""
    rng = np.random.default_rng(queries + keys)
    q, k = (heads.draw(rng, (batch, count, rows, head), F16) for rows in (queries, keys))
    v = heads.draw(rng, (batch, count, keys, width or head), F16)
    out = poison((batch, count, queries, (width or head) + 3 * wide), F16)[..., :width or head]
    with patched() as patch:
        if by_warps:
            heads.by_warps(patch)
        with heads.small(patch, blocks=1), gk.emulate():
            _, lse = gk.attention(q, k, v, mask=mask, score=score, out=out, return_lse=True)
    right(heads.close, out, heads.reference(q, k, v, visible=visible, score=scored), lse, 1e-4)


@dataclass(frozen=True)
class Thirds(Mask):
    """Asked of every query and key."""

    def visible(self, m: int, n: int) -> bool:
        return (m + n) % 3 > 0


CAUSAL: dict[str, Any] = dict(mask=Causal(), visible=lambda m, n, h, b: n <= m)
CAPPED: dict[str, Any] = dict(score=SoftCap(2.0), scored=lambda s, *_: 2 * np.tanh(s / 2))


@case
def attention() -> None:
    attend(130, 130, **CAUSAL)


@case
def attention_of_few_keys() -> None:
    """One block of keys a tile: the rings are longer than a tile's rounds."""
    attend(300, 30)


@case
def attention_into_rows_that_tma_cannot_store() -> None:
    attend(200, 30, wide=True)


@case
def attention_of_documents() -> None:
    """The second warpgroup has no rows of the last tile."""
    attend(60, 60, mask=Documents.of([0, 20, 60]), visible=lambda m, n, h, b: (m < 20) == (n < 20))


@case
def attention_of_192() -> None:
    attend(130, 70, head=192, width=128)


@case
def attention_by_window() -> None:
    """Blocks of keys of which nothing is tested, some, or nothing seen; two heads."""
    attend(100, 100, mask=Window(40, 9), visible=lambda m, n, h, b: (m - 40 <= n) & (n <= m + 9), count=2)


@case
def attention_of_places() -> None:
    """A mask that is asked of every place, in two batches."""
    attend(40, 40, batch=2, mask=Thirds(), visible=lambda m, n, h, b: (m + n) % 3 > 0)


@case
def attention_of_scores() -> None:
    attend(70, 70, **CAPPED)


@case
def attention_of_large_scores() -> None:
    """Exponents that float32 does not round to less than 1."""
    attend(40, 40, score=lambda s, m, n: s * 0 - 3e9, scored=lambda s, *_: s * 0 - 3e9)


@case
def attention_by_warps() -> None:
    attend(100, 100, by_warps=True, **CAUSAL)
    attend(40, 60, head=192, by_warps=True, **CAPPED)


@case
def attention_by_warps_of_many_keys() -> None:
    """Stages are filled again while other warps may read them."""
    attend(20, 200, by_warps=True)


@case
def attention_of_packed_sequences() -> None:
    """One of them empty, and one without keys, whose score asks for an array's element all the same."""
    rng, of_q, of_k = np.random.default_rng(0), [0, 70, 70, 83, 90], [0, 40, 40, 40, 110]
    q, k, v = (heads.draw(rng, (2, begins[-1], 64), F16) for begins in (of_q, of_k, of_k))
    by_key = rng.standard_normal(70).astype(np.float32)
    with patched() as patch, heads.small(patch, blocks=1), gk.emulate():
        found = gk.attention(q, k, v, lengths=(of_q, of_k), score=lambda s, m, n: s + by_key[n])
    for (begin, end), (first, last) in zip(pairwise(of_q), pairwise(of_k)):
        one = q[None, :, begin:end], k[None, :, first:last], v[None, :, first:last]
        right(heads.close, found[None, :, begin:end], heads.reference(*one, score=lambda s, m, n, h, b: s + by_key[n]))


def perceive(rows: int, widths: list[int], by_warps: bool = False, with_biases: bool = True, last: Any = None) -> None:
    """An MLP of whole numbers."""
    x, weights, biases = layers.whole(np.random.default_rng(0), rows, widths, F16)
    found = perceived(x, weights, biases if with_biases else None, by_warps, last=last)
    equal(found, layers.reference(x, weights, biases if with_biases else None, last=last or layers.identity)[0])


def perceived(x: np.ndarray, weights: Any, biases: Any, by_warps: bool, **functions: Any) -> np.ndarray:
    with patched() as patch:
        patch.setattr(schedule, "MOST", dict.fromkeys(schedule.MOST, 3))
        with layers.small(patch, 1, by_warps), gk.emulate():
            return np.asarray(gk.mlp(x, weights, biases, **functions))


def narrower(by_warps: bool) -> None:
    """Layers that are padded, and an activation of which the padding makes infinity: no other sum is 0."""
    x, weights, biases = layers.whole(np.random.default_rng(0), 40, [64, 32, 64, 32, 64, 32], F16)
    for n, bias in enumerate(biases):
        bias += F16.type(0.5 ** (n + 1))
    found = perceived(x, weights, biases, by_warps, activation=lambda x: math.inf if x == 0 else x)
    equal(found, layers.reference(x, weights, biases, layers.identity)[0])


@case
def layers_of_several_tiles() -> None:
    perceive(280, [96, 128, 96, 128])


@case
def one_layer() -> None:
    """Rings are longer than a tile's rounds."""
    perceive(400, [64, 64])


@case
def layers_that_stay() -> None:
    """All weights have a stage."""
    perceive(300, [64, 64, 64])


@case
def one_tile_of_layers() -> None:
    """No cluster, no biases, and a function of the last layer."""
    perceive(100, [64, 64], with_biases=False, last=lambda x: x + x)


@case
def layers_that_are_padded() -> None:
    narrower(False)


@case
def many_layers() -> None:
    """More tensor maps than a warp has lanes, and than warps and lanes together."""
    perceive(10, [32] * 23)


@case
def layers_by_warps() -> None:
    perceive(70, [64, 32, 64, 32], by_warps=True)


@case
def one_layer_by_warps() -> None:
    perceive(20, [32, 32], by_warps=True, with_biases=False, last=lambda x: x + x)


@case
def layers_into_odd_places() -> None:
    """The result's pairs begin at no multiple of 4 bytes."""
    x, weights, _ = layers.whole(np.random.default_rng(0), 20, [32, 32], F16)
    out = poison((20, 33), F16)[:, 1:]
    perceived(x, weights, None, True, out=out)
    equal(out, layers.reference(x, weights)[0])


@case
def layers_by_warps_that_are_padded() -> None:
    narrower(True)


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
def rows_of_wide_numbers() -> None:
    """Exponentials to the last bits."""
    x = np.random.default_rng(0).standard_normal((3, 33)) * 9
    with gk.emulate():
        right(close_rows, gk.softmax(x), FUNCTIONS["softmax"][1](x), x.dtype, x.dtype)


@case
def rows_beside_arrays() -> None:
    """Elements beside a row's, of pieces that lanes have in part; rows of several warps, some without an element, whose moments are
    asked for twice; and rows that are loaded anew each time."""
    rng = np.random.default_rng(0)
    x, gamma, beta = rng.integers(-9, 9, (5, 41)).astype(F16), *rng.standard_normal((2, 41)).astype(np.float32)
    with gk.emulate():
        right(close_rows, gk.layernorm(x, gamma, beta), layernorm(x.astype("f8"), gamma, beta), F16)
    with patched() as patch:
        patch.setattr(problems, "MOST_PIECES", 1)
        right(test_rows.test_moments, EMULATOR, np.dtype("f4"), 131, rng)
    with patched() as patch, gk.emulate():
        patch.setattr(problems, "MOST_PIECES", 1)
        patch.setattr(problems, "MOST_WARPS", 1)
        equal(gk.rowwise(x, Placed()), x + np.arange(41))
    with patched() as patch:
        right(test_rows.test_rows_that_no_block_can_hold_are_streamed, EMULATOR, "log_softmax", "streamed", rng, patch)
    right(test_rows.test_functions_of_the_users, EMULATOR, rng)
    with gk.emulate():
        equal(gk.rowwise(x, Placed()), x + np.arange(41))


class Placed(RowFunction):
    """Elements and their places."""

    def __call__(self, row: Any) -> None:
        put(mapped(row, lambda x, n: x + n), lambda x, n: x)


def dequantise(m: int, bits: int, part: int, group: int, symmetric: bool, warps: tuple[int, int], k: int = 5 * 128,
               warp_n: int = 32, **fields: Any) -> None:
    rng = np.random.default_rng(m)
    b, a = quantised.weights(rng, k, 36, bits, group, symmetric), quantised.whole(rng, (m, k), F16, 2)
    conf = quantised.mapping(b, 8 if m <= 8 else 16, warp_n * warps[0], part * warps[1], part, **{
        "compute_warp": Tile(M=8 if m <= 8 else 16, N=warp_n, K=part), "warps_per_block": warps[0] * warps[1], **fields})
    change = conf.transform_regs_to_shared_d
    i, j = np.indices((m, 36))
    equal(quantised.product(EMULATOR, a, b, conf), quantised.expected(a, b) + (0 if change.is_identity else i % 3 - j % 2))


@case
def quantised_weights() -> None:
    """Warps along N and K, rounds of the ring that end within it, blocks that share K; columns and rows beyond the last."""
    dequantise(3, 4, 32, 8, False, (1, 2), stages=1)
    dequantise(19, 2, 64, 16, True, (2, 1), stages=3)
    dequantise(8, 4, 64, 64, False, (1, 2), stages=2, splits=2)


@case
def quantised_fragments() -> None:
    """Two fragments a warp, a ring that is longer than K, and a transform of D by place."""
    dequantise(19, 4, 64, 64, False, (1, 2), k=128, warp_n=64, stages=3,
               transform_regs_to_shared_d=Map(lambda x, i, j: x + i % 3 - j % 2))


__all__ = ["attend", "perceive"]
