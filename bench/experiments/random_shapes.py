"""Products of random sizes, orders and types, as `gemmkit.matmul` chooses by itself, against cuBLAS: rows of
`bench.experiments`.

Sizes are drawn evenly on a logarithmic scale from 16 to 16384; a third each are multiples of 64, of 8, and any. One product
of eight is a stack. cuBLAS takes 8-bit operands with B by columns, more than 16 rows, and other sizes in multiples of 16,
so those are drawn so. Whole rows of types are drawn by themselves: a type's rows do not depend on the others'.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.cases import DTYPES, KINDS
from bench.experiments.experiment import SAMPLED_ROWS, Lib
from bench.experiments.types import ORDERS, Product
from bench.harness import Call

SEED, COUNT = 1201, 100                                    # of each kind
LEAST, LARGEST = 16, 16384
#: By kind: multiply-adds at most, so that a row takes milliseconds.
MOST = {"f16": 3e11, "bf16": 3e11, "f32": 3e10, "f64": 3e10, "tf32": 1e11, "i8": 3e11, "e4m3": 3e11}
MOST_NUMBERS = 2**29                                     # of A, B and D of one product or stack
STACKED, MOST_STACKED = 8, 256                           # one of so many is a stack, of at most so many products


@dataclass(frozen=True)
class Drawn(Product):
    """One product, or a stack of ``count``."""

    count: int = 1

    @property
    def products(self) -> int:
        return self.count

    @property
    def dtype(self) -> str:
        """Of the operands."""
        return KINDS[self.kind].dtype if self.kind in KINDS else self.kind

    @property
    def out_dtype(self) -> str:
        return KINDS[self.kind].out if self.kind in KINDS else self.kind

    @property
    def input_bytes(self) -> int:
        """D's bytes among them: where K is short, D is nearly all of a set."""
        operands = (self.m + self.n) * self.k * DTYPES[self.dtype].itemsize
        return self.count * (operands + 2 * self.m * self.n * DTYPES[self.out_dtype].itemsize)

    @property
    def tolerance(self) -> float:
        return KINDS[self.kind].tolerance if self.kind in KINDS else super().tolerance

    def matrix(self, lib: Lib, rows: int, columns: int, order: str, seed: int) -> Any:
        lengths = (rows, columns) if order == "n" else (columns, rows)
        numbers = lib.normal(self.count * lengths[0], lengths[1], self.dtype, seed)
        if self.count > 1:
            numbers = numbers.reshape((self.count, *lengths))
        return numbers if order == "n" else numbers.swapaxes(-1, -2)

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        a = self.matrix(lib, self.m, self.k, self.order[0], 2 * i)
        b = self.matrix(lib, self.k, self.n, self.order[1], 2 * i + 1)
        outs = [lib.empty(self.count * self.m, self.n, self.out_dtype) for _ in range(2)]
        if self.count > 1:
            outs = [out.reshape((self.count, self.m, self.n)) for out in outs]
        return SimpleNamespace(a=a, b=b, out=outs[0], peer_out=outs[1])

    def ours(self, lib: Lib, x: Any) -> Call:
        if self.kind == "tf32":
            return lambda: gemmkit.matmul(x.a, x.b, out=x.out, precision="tf32")
        return super().ours(lib, x)

    def peers(self, lib: Lib, x: Any) -> Call:
        return lambda: lib.product(self.kind, x.a, x.b, x.peer_out)

    def title(self, lib: Lib) -> str:
        return str(lib.peer_title(self))

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        """Of some rows; of a stack, those of its last product."""
        a, b, d = (x.a[-1], x.b[-1], out[-1]) if self.count > 1 else (x.a, x.b, out)
        rows = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        return float(lib.relative_error(lib.wide(d, rows), lib.wide(a, rows) @ lib.wide(b)))


def drawn_size(draw: random.Random, least: int = LEAST, largest: int = LARGEST, steps: tuple[int, ...] = (64, 8, 1)) -> int:
    size = int(least * (largest / least) ** draw.random())
    step = draw.choice(steps)
    return max(step, size // step * step)


def of_kind(kind: str, count: int = COUNT, seed: int = SEED) -> Iterator[Drawn]:
    """``count`` rows of a kind, the same for a seed."""
    draw = random.Random(f"{kind} {seed}")
    is_short = KINDS[kind].itemsize == 1 if kind in KINDS else False
    made = 0
    while made < count:
        m, n, k = (drawn_size(draw, steps=(64, 16) if is_short else (64, 8, 1)) for _ in range(3))
        order = "nt" if is_short else draw.choice(ORDERS)
        stacked = 1 if is_short or draw.randrange(STACKED) else drawn_size(draw, 2, MOST_STACKED, (1,))
        numbers = stacked * (m * n + (m + n) * k)
        if m * n * k * stacked > MOST[kind] or numbers > MOST_NUMBERS or (is_short and m <= 16):
            continue
        made += 1
        work = f"{made:03}" if stacked == 1 else f"{made:03}, {stacked} products"
        yield Drawn("random", work, kind, m, n, k, order=order, count=stacked)


def random_shapes(count: int = COUNT, seed: int = SEED) -> Iterator[Drawn]:
    """``count`` rows of each kind."""
    for kind in MOST:
        yield from of_kind(kind, count, seed)
