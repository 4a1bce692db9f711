"""Products of random sizes, orders and types, as `gemmkit.matmul` chooses by itself, against cuBLAS: rows of
`bench.experiments`. Sizes are drawn evenly on a logarithmic scale; a third each are multiples of 64, of 8, and any."""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench.experiments.algebras import ComplexProduct
from bench.experiments.experiment import Experiment
from bench.experiments.types import ORDERS, Product

SEED, COUNT = 13, 300
LARGEST = 8192
KINDS = {"f16": 4, "f32": 3, "f64": 2, "complex64": 1}  # how often of ten
MOST = {"f16": 3e11, "f32": 3e10, "f64": 3e10, "complex64": 1e10}  # multiply-adds, so that a row takes milliseconds


def drawn_size(draw: random.Random, least: int = 1, largest: int = LARGEST) -> int:
    size = int(least * (largest / least) ** draw.random())
    step = draw.choice((64, 8, 1))
    return max(step, size // step * step)


def random_shapes(count: int = COUNT, seed: int = SEED) -> Iterator[Experiment]:
    """``count`` rows, the same for a seed."""
    draw = random.Random(seed)
    made = 0
    while made < count:
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        m, n, k = (drawn_size(draw) for _ in range(3))
        if m * n * k > MOST[kind]:
            continue
        made += 1
        if kind == "complex64":
            yield ComplexProduct("random", f"{made:03}", "f32", m, n, k)
        else:
            yield Product("random", f"{made:03}", kind, m, n, k, order=draw.choice(ORDERS))
