"""`gemmkit.attention` of packed sequences, beside PyTorch's `varlen_attn`, and of a cache in pages, beside contiguous keys:
`python -m bench.sequences --out bench/results/sequences.json`.

| kind | ours | beside |
|---|---|---|
| packed | ``lengths=`` with offsets on the GPU | ``torch.nn.attention.varlen.varlen_attn`` |
| pages | ``pages=`` and ``key_lengths=``, pages in a drawn order | ``key_lengths=`` alone, of contiguous keys |

All are CUDA graphs, timed in turns in one run (`bench.turns`). Results are compared with what they are beside before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

import gemmkit as gk
from bench.turns import Calls, command, error_of, times
from bench.turns import rows as rows_of

TOLERANCE = 6e-3                       # of two float16 results


class PackedCase(NamedTuple):
    """Sequences of an eighth to fifteen eighths of a length, drawn; or all of it."""

    sequences: int
    length: int
    heads: int
    head_dim: int
    causal: bool
    drawn: bool = True


class PagedCase(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int


DRAWN = (8, 2048), (16, 1024), (32, 512), (64, 256)
PACKED = (*(PackedCase(*size, 16, head_dim, causal) for size in DRAWN for head_dim in (64, 128) for causal in (True, False)),
          PackedCase(4, 4096, 16, 128, True, False), PackedCase(256, 384, 16, 64, False))
PAGED = (PagedCase(16, 32, 8, 1, 4096, 128), PagedCase(64, 32, 8, 1, 1024, 128), PagedCase(4, 32, 8, 1, 16384, 128),
         PagedCase(1, 32, 8, 1, 32768, 128), PagedCase(4, 16, 16, 512, 2048, 128), PagedCase(8, 16, 4, 128, 1024, 64))
PAGES = 16, 64, 256                    # rows of a page


def row(kind: str, work: str, case: PackedCase | PagedCase, calls: Calls) -> dict[str, Any]:
    """Raises `bench.harness.WrongResult` where the results differ."""
    error = error_of(f"{work} {case}", calls["ours"](), list(calls.values())[1](), TOLERANCE)
    rows = case.sequences * case.length if isinstance(case, PackedCase) else case.batch * case.queries
    keys = case.length if isinstance(case, PackedCase) else case.keys
    (made,) = rows_of(kind, work, (rows, keys, case.head_dim), times(calls), error)
    return made


def drawn(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def packed(case: PackedCase, rng: np.random.Generator) -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    low, high = case.length // 8, 2 * case.length - case.length // 8
    lengths = [int(n) for n in rng.integers(low, high, case.sequences)] if case.drawn else [case.length] * case.sequences
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, k, v = (drawn(sum(lengths), case.heads, case.head_dim) for _ in "qkv")
    ours = partial(gk.attention, q, k, v, lengths=(offsets, offsets), layout="bnhd", out=torch.empty_like(q),
                   mask=gk.masks.Causal() if case.causal else None)
    theirs = partial(varlen_attn, q, k, v, offsets, offsets, max(lengths), max(lengths),
                     window_size=(-1, 0) if case.causal else (-1, -1))
    name = f"{'causal' if case.causal else 'plain'}, {case.sequences} sequences of {'about ' * case.drawn}{case.length}"
    return row("packed", f"{name} x {case.heads} heads", case, {"ours": ours, "varlen_attn": theirs})


def paged(case: PagedCase, page: int) -> dict[str, Any]:
    batch, heads, kv_heads, queries, keys, head_dim = case
    q, k, v = (drawn(batch, count, rows, head_dim) for count, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    lengths[::3] -= 5
    each = keys // page
    table = torch.randperm(batch * each, device="cuda").to(torch.int32).reshape(batch, each)
    pages = [torch.empty(batch * each, kv_heads, page, head_dim, device="cuda", dtype=torch.float16) for _ in "kv"]
    for x, of in zip((k, v), pages):
        of[table.long()] = x.reshape(batch, kv_heads, each, page, head_dim).transpose(1, 2)
    given = dict(mask=gk.masks.Causal(), key_lengths=lengths)
    calls: Calls = {
        "ours": partial(gk.attention, q, *pages, pages=table, out=torch.empty_like(q), **given),
        "contiguous": partial(gk.attention, q, k, v, out=torch.empty_like(q), **given)}
    work = f"pages of {page}: {batch} x {heads} heads ({kv_heads} of k), {queries} over {keys}"
    return row("pages", work, case, calls)


def measured(options: object) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(5)
    yield from (packed(case, rng) for case in PACKED)
    yield from (paged(case, page) for case in PAGED for page in PAGES)


def main(arguments: Sequence[str] | None = None) -> int:
    return command("sequences", __doc__, measured, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
