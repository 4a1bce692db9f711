"""Step 3 of `attention`: the online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).

Of each row the largest score so far is known, and O and the sum of weights are of weights relative to it. When a block
brings a larger one, both are scaled by ``growth``. Four threads share a row and exchange their largest scores; each keeps
the sum of its own weights, and they are added up when the tile ends.

Weights are 2^(c s - c largest), one fma and one ex2 each; c has the scale and log2(e) in it. Maxima and sums go in eight
chains side by side: with four the kernel was 7 % slower at D 128.

The fma's c s is exact, and the c largest that it subtracts is rounded: the largest score's weight is 2 to the power of that
rounding error. Beyond ``LARGE`` the error would show (of scores of -1e9 it is 2^16 and more, which float16 has not), so a
warp that has such a row subtracts first: an instruction an element, behind a branch that ordinary scores never take.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.attention.work import F32, LOG2E, Stats
from gemmkit.lang.control import split
from gemmkit.lang.reductions import reduce, together
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert
from gemmkit.ptx.approximate import exp2, maximum
from gemmkit.ptx.arithmetic import fma
from gemmkit.ptx.pack_fragment import pack_fragment
from gemmkit.ptx.shuffle import SHUFFLE
from gemmkit.ptx.vote import any_lane

exchanged = SHUFFLE["bfly"]
LARGE = 1024.0                         # exponents of 2 up to it are rounded by no more than 2^-15


def begin() -> Stats:
    """Of a tile of which nothing was seen yet."""
    low, none = convert(F32, -math.inf), convert(F32, 0.0)
    return Stats(low, low, none, none)


def exponent(spec: Any, sizes: Any) -> Any:
    """What takes scores to exponents of 2."""
    return convert(F32, LOG2E) if spec.has_score else sizes.to_log2


def soften(s: tuple, spec: Any, sizes: Any, stats: Stats) -> tuple:
    """Weights, the new stats, and what O's two rows are to be multiplied by."""
    c = exponent(spec, sizes)
    groups = split(s, 8)                               # of both rows: two columns, and two that are 8 columns on
    m = reduce(larger, groups[0], groups[1:])
    upper = quad_max(maximum(maximum(maximum(m[0], m[1]), maximum(m[4], m[5])), stats.upper))
    lower = quad_max(maximum(maximum(maximum(m[2], m[3]), maximum(m[6], m[7])), stats.lower))
    first, second = finite(upper), finite(lower)
    growth = exp2((stats.upper - first) * c), exp2((stats.lower - second) * c)
    over, under = c * first, c * second
    if any_lane(maximum(abs(over), abs(under)) > LARGE):
        s, over, under = apply(lowered, s, first, second), convert(F32, 0.0), convert(F32, 0.0)
    weights = apply(weight, s, c, over, under)
    groups = split(weights, 8)
    t = reduce(added, groups[0], groups[1:])
    return weights, Stats(upper, lower, fma(stats.upper_sum, growth[0], (t[0] + t[1]) + (t[4] + t[5])),
                          fma(stats.lower_sum, growth[1], (t[2] + t[3]) + (t[6] + t[7]))), growth


def larger(a: tuple, b: tuple) -> tuple:
    return together(maximum, a, b)


def added(a: tuple, b: tuple) -> tuple:
    return together(add, a, b)


def add(x: Any, y: Any) -> Any:
    return x + y


def finite(x: Any) -> Any:
    """A row of which nothing was seen so far has weights 0, not NaN."""
    return x if x > -math.inf else convert(F32, 0.0)


def weight(x: Any, i: int, c: Any, over: Any, under: Any) -> Any:
    return exp2(fma(x, c, -(over if i // 2 % 2 == 0 else under)))


def lowered(x: Any, i: int, first: Any, second: Any) -> Any:
    return x - (first if i // 2 % 2 == 0 else second)


def quad_max(x: Any) -> Any:
    x = maximum(x, exchanged(x, 1))
    return maximum(x, exchanged(x, 2))


def quad_sum(x: Any) -> Any:
    x = x + exchanged(x, 1)
    return x + exchanged(x, 2)


def packed(spec: Any, weights: tuple) -> tuple:
    """P as A's fragments, one for each 16 keys."""
    return apply(packed_step, split(weights, spec.hand_over.values), spec)


def packed_step(weights: tuple, n: int, spec: Any) -> tuple:
    return pack_fragment(spec.dtype, weights)


def rescale(o: tuple, upper: Any, lower: Any) -> tuple:
    """O's rows by a factor each."""
    return apply(scaled, o, upper, lower)


def scaled(x: Any, i: int, upper: Any, lower: Any) -> Any:
    return x * (upper if i // 2 % 2 == 0 else lower)
