"""A that is transformed on its way into registers, in step 2 of `warp_specialised`.

Transforms of what lies in shared memory are paid for twice there: it is read and written once more. wgmma takes A from
registers, too, and so those who multiply fetch it with `ldmatrix`, transform what they hold, and multiply: A goes through
shared memory as often as it did for the plain product, and no warp of the producer's has to touch it.

A fragment is 64 x 32 bytes of a warpgroup's tile, of which a warp has 16 rows. Lane t of it has four 32-bit words:

| word | row | elements along K (n in a word) |
|---|---|---|
| 0 | t // 4 | from (t % 4) n |
| 1 | t // 4 + 8 | the same |
| 2 | t // 4 | from (t % 4) n + 4 n |
| 3 | t // 4 + 8 | the same |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.kernels.parts import transform_within
from gemmkit.lang.control import choose
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import apply, generate
from gemmkit.lang.values import convert_all
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.words import first_elements, pack_words, unpack_words
from gemmkit.tiling import translate

HALVES = np.dtype(np.uint16)           # what `ldmatrix` moves


def load_transformed(spec: Any, group: int, stage: int, step: int, place: tuple, shape: Any) -> tuple:
    """The fragments of a step along K; ``place`` is where the stage's tile of A begins."""
    return generate(spec.fragments_m, load_fragment, spec, group, stage, step, place, shape)


def load_fragment(m: int, spec: Any, group: int, stage: int, step: int, place: tuple, shape: Any) -> tuple:
    row = group * spec.first_rows + 64 * m + udiv(thread_index() % 128, 32) * 16
    k = spec.operator.K * step
    words = fetch_words(spec, stage, row, k)
    i, j = place[0] + row + udiv(lane_index(), 4), place[1] + k + lane_index() % 4 * spec.a_word.size.K
    words = choose(is_pairwise(spec.a.to_shared, spec.a.plane.dtype), in_pairs, one_by_one, words, spec, i, j, shape)
    return apply(within_k, words, spec, j, shape)


def fetch_words(spec: Any, stage: int, row: int, k: int) -> tuple:
    """Four matrices of 8 lines of 16 bytes: of each this lane points to a line, and gets the word that is its own."""
    matrix, line = udiv(lane_index(), 8), lane_index() % 8
    width = 16 // spec.a.plane.itemsize
    if spec.a.plane.axis == 1:                         # lines along K
        i, j = matrix % 2 * 8 + line, udiv(matrix, 2) * width
    else:
        i, j = matrix % 2 * 8, udiv(matrix, 2) * width + line
    at = spec.a.plane.position((row + i, k + j), spec.a.plane.leading(spec.block.MK.size))
    halves = udiv(stage * spec.stage_bytes + at * spec.a.plane.itemsize, 2)
    return pack_words(ldmatrix(shared(HALVES, 0), halves, 0, 4, spec.a.plane.axis == 0))


# -- transforms -------------------------------------------------------------------------------------------------------

def in_pairs(words: tuple, spec: Any, i: int, j: int, shape: Any) -> tuple:
    return transform_pairs(spec.a.to_shared, spec.a.plane.dtype, words)


def one_by_one(words: tuple, spec: Any, i: int, j: int, shape: Any) -> tuple:
    return apply(transform_word, words, spec, i, j, shape)


def transform_word(word: Any, n: int, spec: Any, i: int, j: int, shape: Any) -> Any:
    tile = translate(spec.a_word, i + n % 2 * 8, j + n // 2 * 4 * spec.a_word.size.K)
    values = transform_within(spec.a.to_shared, unpack_words(spec.a.plane.dtype, (word,)), tile, shape.M, shape.K)
    return pack_words(convert_all(spec.a.plane.dtype, values))[0]


def within_k(word: Any, n: int, spec: Any, j: int, shape: Any) -> Any:
    """Nothing beyond K, where a transform has made something of the engine's zeros. (Rows beyond M go nowhere.)"""
    return first_elements(spec.a.plane.dtype, word, shape.K - j - n // 2 * 4 * spec.a_word.size.K)


__all__ = ["load_transformed"]
