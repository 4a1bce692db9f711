"""Attention, against cuDNN and FlexAttention: rows of `bench.experiments`.

| group | what | peer |
|---|---|---|
| attention | long sequences, causal and not | cuDNN, through PyTorch's scaled_dot_product_attention |
| attention_short | 512 to 2048 rows, of 16k in all, head sizes 64, 128, 256 | the same |
| attention_rules | masks, scores, shared heads | FlexAttention, by torch.compile |

A row's sizes are those of Q K^T: m counts the queries of all heads, n a head's keys, k is the head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import gemmkit
from bench.experiments.experiment import ITEMSIZES, SAMPLED_ROWS, Experiment, Lib
from bench.harness import Call

WINDOW, CAP, SHARE, DOCUMENTS = 1024, 30.0, 8, 8
LONG = ((4, 16, 4096, 128), (2, 16, 16384, 128), (4, 16, 4096, 64), (32, 16, 384, 64),
        *((4, 32, n, 128) for n in (2048, 4096, 8192, 16384)))  # fmt: skip
BAR, AIM = 1.0, 1.1                    # of each row of the first group; those of the means are in `bench.verdicts.MEANS`


@dataclass(frozen=True)
class Attention(Experiment):
    """``batch`` times ``heads`` heads; ``work`` is "plain", "causal", "alibi", "soft cap", "window", "shared heads" or
    "documents"."""

    batch: int = 1
    heads: int = 1

    def __str__(self) -> str:
        return f"{self.group}: {self.work} {self.kind} {self.batch}x{self.heads}x{self.queries}x{self.k}"

    @property
    def queries(self) -> int:
        return self.m // (self.batch * self.heads)

    @property
    def by_cudnn(self) -> bool:
        return self.work in ("plain", "causal")

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // SHARE) if self.work == "shared heads" else self.heads

    @property
    def products(self) -> int:
        """Two products; of a causal one half is counted."""
        return 1 if self.work == "causal" else 2

    @property
    def tolerance(self) -> float:
        return 1.6e-2 if self.kind == "bf16" else 5e-3 if self.work == "soft cap" else 2e-3

    @property
    def input_bytes(self) -> int:
        size = ITEMSIZES.get(self.kind, 2)
        return (self.m + 2 * self.batch * self.kv_heads * self.n) * self.k * size

    @property
    def slopes(self) -> np.ndarray:
        """ALiBi's, of each head."""
        return np.exp2(-8 * np.arange(1, self.heads + 1) / self.heads).astype(np.float32)

    @property
    def offsets(self) -> np.ndarray:
        """Where documents of one length begin."""
        return np.arange(DOCUMENTS + 1) * self.n // DOCUMENTS

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        shapes = [(self.batch, heads, rows, self.k)
                  for heads, rows in ((self.heads, self.queries), (self.kv_heads, self.n), (self.kv_heads, self.n))]
        q, k, v = (lib.normal(math.prod(shape[:3]), self.k, self.kind, 3 * i + n).reshape(shape)
                   for n, shape in enumerate(shapes))
        out, peer_out = (lib.empty(self.m, self.k, self.kind).reshape(q.shape) for _ in range(2))
        return SimpleNamespace(q=q, k=k, v=v, out=out, peer_out=peer_out)

    def ours(self, lib: Lib, x: Any) -> Call:
        rules: dict[str, Any] = {
            "causal": lambda: {"mask": gemmkit.masks.Causal()},
            "alibi": lambda: {"score": gemmkit.masks.ALiBi(lib.of_numbers(self.slopes))},
            "soft cap": lambda: {"score": gemmkit.masks.SoftCap(CAP)},
            "window": lambda: {"mask": gemmkit.masks.Window(WINDOW)},
            "documents": lambda: {"mask": gemmkit.masks.Documents.of(self.offsets.tolist(), lib.of_numbers)},
        }
        given = rules[self.work]() if self.work in rules else {}
        return lambda: gemmkit.attention(x.q, x.k, x.v, out=x.out, **given)

    def peers(self, lib: Lib, x: Any) -> Call:
        call = lib.attention(self)

        def run() -> None:
            x.peer_out = call(x.q, x.k, x.v)

        return run

    def title(self, lib: Lib) -> str:
        return str(lib.attention_title(self))

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        """Of the last queries of the last head of all, and of the first of the first."""
        count = min(SAMPLED_ROWS, self.queries)
        errors = []
        for batch, head, rows in ((0, 0, np.arange(count)), (-1, -1, np.arange(self.queries - count, self.queries))):
            share = head % self.heads // (self.heads // self.kv_heads)
            q, k, v, found = (lib.as_numpy(array) for array in (
                x.q[batch, head, rows[0]:rows[-1] + 1], x.k[batch, share], x.v[batch, share],
                out[batch, head, rows[0]:rows[-1] + 1]))
            wanted = self.expected(q, k, v, rows[:, None], head % self.heads)
            errors.append(float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)))
        return max(errors)

    def expected(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, m: np.ndarray, head: int) -> np.ndarray:
        """In float64, of some queries ``m`` of a head."""
        s, n = q @ k.T / math.sqrt(self.k), np.arange(self.n)[None]
        if self.work == "alibi":
            s = s - self.slopes[head] * (m - n)
        elif self.work == "soft cap":
            s = CAP * np.tanh(s / CAP)
        shown = {"causal": n <= m, "window": (m - WINDOW <= n) & (n <= m),
                 "documents": np.searchsorted(self.offsets, m, "right") == np.searchsorted(self.offsets, n, "right")}
        s = np.where(shown.get(self.work, True), s, -np.inf)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        return np.asarray((p / p.sum(axis=1, keepdims=True)) @ v)


def _made(group: str, work: str, sizes: tuple[int, int, int, int], bar: float | None = None,
          aim: float | None = None) -> Attention:
    batch, heads, rows, head_dim = sizes
    return Attention(group, work, "f16", batch * heads * rows, rows, head_dim, bar, aim, batch, heads)


def attention() -> Iterator[Attention]:
    for sizes in LONG:
        for work in ("plain", "causal"):
            yield _made("attention", work, sizes, BAR, AIM)


def attention_short() -> Iterator[Attention]:
    for rows in (512, 1024, 2048):
        for head_dim in (64, 128, 256):
            for work in ("plain", "causal"):
                yield _made("attention_short", work, (16384 // rows, 2048 // head_dim, rows, head_dim))


def attention_rules() -> Iterator[Attention]:
    for head_dim in (64, 128):
        for work in ("alibi", "soft cap", "window", "shared heads", "documents"):
            yield _made("attention_rules", work, (4, 16, 4096, head_dim))
