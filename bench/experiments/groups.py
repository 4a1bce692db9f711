"""Products whose work depends on data: rows of `bench.experiments`.

| group | what | peers |
|---|---|---|
| grouped | products of random sizes in one launch (`gemmkit.functions.plan_grouped`) | a loop of cuBLAS |
| experts | tokens sorted by expert, each expert's rows times its weights, bfloat16 | `torch._grouped_mm`; a loop of cuBLAS |
| sparse | a matrix that is empty in most of its blocks (`gemmkit.functions.BlockSparse`) | cuBLAS on the whole matrix |
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import gemmkit
from bench.experiments.experiment import ITEMSIZES, Experiment, Lib
from bench.harness import Call
from gemmkit.functions.grouped import by_groups

STEP = 8  # elements: sizes are multiples, so that rows are aligned to 16 bytes
BAR, AIM = 1.5, 3.0


@dataclass(frozen=True)
class Group(Experiment):
    """``count`` products of random sizes up to m x n x k, of a sixteenth of each at least."""

    count: int = 32

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Of each product: the same in every run."""
        draw = random.Random(13)
        limits = [range(max(STEP, size // 16 // STEP * STEP), size + 1, STEP) for size in (self.m, self.n, self.k)]
        return [(draw.choice(limits[0]), draw.choice(limits[1]), draw.choice(limits[2])) for _ in range(self.count)]

    @property
    def products(self) -> int:
        """As many of the largest size as have the multiply-adds of all, rounded."""
        return max(1, round(sum(m * n * k for m, n, k in self.shapes) / (self.m * self.n * self.k)))

    @property
    def input_bytes(self) -> int:
        return sum((m + n) * k for m, n, k in self.shapes) * ITEMSIZES[self.kind]

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        """Results lie one behind the other in ``out``."""
        shapes, starts = self.shapes, [0]
        for m, n, _ in shapes:
            starts.append(starts[-1] + m * n)
        a = [lib.normal(m, k, self.kind, 2 * (i * self.count + at)) for at, (m, _, k) in enumerate(shapes)]
        b = [lib.normal(k, n, self.kind, 2 * (i * self.count + at) + 1) for at, (_, n, k) in enumerate(shapes)]
        outs = [lib.empty(starts[-1], 1, self.kind) for _ in range(2)]
        views = [[out[start : start + m * n].reshape((m, n)) for start, (m, n, _) in zip(starts, shapes)] for out in outs]
        return SimpleNamespace(a=a, b=b, out=outs[0], peer_out=outs[1], outs=views[0], peer_outs=views[1])

    def ours(self, lib: Lib, x: Any) -> Call:
        made: list[Any] = []

        def call() -> Any:
            if not made:
                made.append(gemmkit.functions.plan_grouped(x.a, x.b, out=x.outs))
            return made[0](x.a, x.b, out=x.outs)

        return call

    def peers(self, lib: Lib, x: Any) -> Call:
        def call() -> None:
            for a, b, out in zip(x.a, x.b, x.peer_outs):
                lib.matmul(a, b, out)

        return call

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: a call for each"

    def error(self, lib: Lib, x: Any) -> float:
        return self.error_of(lib, x, x.outs)

    def peer_error(self, lib: Lib, x: Any) -> float:
        return self.error_of(lib, x, x.peer_outs)

    def error_of(self, lib: Lib, x: Any, outs: list[Any]) -> float:
        return max(float(lib.relative_error(out, lib.wide(a) @ lib.wide(b))) for a, b, out in zip(x.a, x.b, outs))


def groups() -> Iterator[Group]:
    """All rows of the group."""
    for size in (256, 1024, 2048):
        yield Group("grouped", f"32 products up to {size}", "f16", size, size, size, BAR, AIM)


# -- experts -----------------------------------------------------------------------------------------------------------

# Experts, tokens of all of them, columns of a result, K; "ragged" experts have random shares of the tokens, some none.
EXPERTS = (
    ("64 ragged experts", 64, 4096, 1024, 1024), ("64 ragged experts", 64, 4096, 4096, 1024),
    ("128 ragged experts", 128, 65536, 768, 2048), ("128 ragged experts", 128, 65536, 2048, 768),
    ("8 equal experts", 8, 8192, 14336, 4096),
)  # fmt: skip


@dataclass(frozen=True)
class Experts(Experiment):
    """``m`` tokens sorted by expert; the peer is the named one of PyTorch's ways."""

    count: int = 8
    versus: str = "_grouped_mm"

    def __str__(self) -> str:
        return f"{super().__str__()} against {self.versus}"

    @property
    def tolerance(self) -> float:
        return 8e-3

    @property
    def input_bytes(self) -> int:
        return (self.m * self.k + self.count * self.k * self.n) * 2

    @property
    def ends(self) -> list[int]:
        """Behind each expert's tokens: the same in every run."""
        if self.work.endswith("equal experts"):
            return [self.m * (e + 1) // self.count for e in range(self.count)]
        draw = random.Random(29)
        cuts = sorted(draw.randint(0, self.m) for _ in range(self.count - 1))
        return [*cuts, self.m]

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        x = lib.normal(self.m, self.k, "bf16", 2 * i)
        w = lib.normal(self.count * self.k, self.n, "bf16", 2 * i + 1).reshape((self.count, self.k, self.n))
        outs = [lib.empty(self.m, self.n, "bf16") for _ in range(2)]
        rows = [slice(start, end) for start, end in zip([0, *self.ends], self.ends)]
        ends, offsets = (lib.of_numbers(np.array(given)) for given in (self.ends, [0, *self.ends]))
        return SimpleNamespace(x=x, w=w, rows=rows, ends=ends, offsets=offsets, out=outs[0], peer_out=outs[1])

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: by_groups(x.out, x.x, x.w, x.offsets, False)

    def peers(self, lib: Lib, x: Any) -> Call:
        def loop() -> None:
            for rows, w in zip(x.rows, x.w):
                lib.matmul(x.x[rows], w, x.peer_out[rows])

        def grouped() -> None:
            x.peer_out = lib.experts(x.x, x.w, x.ends)

        return grouped if self.versus == "_grouped_mm" else loop

    def title(self, lib: Lib) -> str:
        name = lib.peer_name()
        return f"torch._grouped_mm ({name})" if self.versus == "_grouped_mm" else f"{name}: a call for each"

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        """Of the expert that has most tokens, and of the last that has any."""
        some = [e for e, rows in enumerate(x.rows) if rows.stop > rows.start]
        looked_at = max(some, key=lambda e: x.rows[e].stop - x.rows[e].start), some[-1]
        return max(float(lib.relative_error(out[x.rows[e]], lib.wide(x.x[x.rows[e]]) @ lib.wide(x.w[e]))) for e in looked_at)


def experts() -> Iterator[Experts]:
    for work, count, tokens, n, k in EXPERTS:
        for versus in ("_grouped_mm", "a loop"):
            yield Experts("experts", work, "bf16", tokens, n, k, count=count, versus=versus)


# -- a matrix of blocks, most of them empty ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Sparse(Experiment):
    """A m x k matrix of whose blocks a share is empty, times a dense one."""

    block: tuple[int, int] = (128, 128)
    empty: float = 0.9

    @property
    def mask(self) -> np.ndarray:
        shape = -(-self.m // self.block[0]), -(-self.k // self.block[1])
        return np.random.default_rng(31).random(shape) >= self.empty

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        """What `gemmkit.functions.BlockSparse` must not read is NaN in its matrix; the peer's has zeros there."""
        mask, outs = self.mask, [lib.empty(self.m, self.n, self.kind) for _ in range(2)]
        shown = np.kron(mask, np.ones(self.block, bool))[: self.m, : self.k]
        a, whole = lib.shown(lib.normal(self.m, self.k, self.kind, 2 * i), shown)
        b = lib.normal(self.k, self.n, self.kind, 2 * i + 1)
        return SimpleNamespace(a=a, whole=whole, mask=lib.of_numbers(mask), b=b, out=outs[0], peer_out=outs[1])

    def ours(self, lib: Lib, x: Any) -> Call:
        sparse = gemmkit.functions.BlockSparse(x.a, x.mask, self.block)
        return lambda: gemmkit.matmul(sparse, x.b, out=x.out)

    def peers(self, lib: Lib, x: Any) -> Call:
        return lambda: lib.matmul(x.whole, x.b, x.peer_out)

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: torch.matmul of the whole matrix"

    def error(self, lib: Lib, x: Any) -> float:
        return float(lib.relative_error(x.out, lib.wide(x.whole) @ lib.wide(x.b)))

    def peer_error(self, lib: Lib, x: Any) -> float:
        return float(lib.relative_error(x.peer_out, lib.wide(x.whole) @ lib.wide(x.b)))


def sparse() -> Iterator[Sparse]:
    for block, share in (((128, 128), 0.9), ((128, 64), 0.9), ((256, 256), 0.9), ((128, 128), 0.5), ((128, 128), 0.0)):
        work = f"{share:.0%} of blocks of {block[0]}x{block[1]} empty"
        yield Sparse("sparse", work, "f16", 4096, 4096, 4096, block=block, empty=share)
