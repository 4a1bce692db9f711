"""Attention of few rows, as in decoding, whose rounds are split over blocks (``Mapping(splits=...)``); and sequences of
different lengths: `python -m bench.shares --out bench/results/shares.json`.

| kind | ours | beside |
|---|---|---|
| shares | the program's default mapping | ``splits=1``; 16, if it has more; PyTorch's ``scaled_dot_product_attention`` |
| lengths | ``stop=lengths[h]``, lengths evenly from 1 to all | the same with all of them; without ``stop=`` |

All are CUDA graphs, timed in turns in one run (`bench.turns`). Results are compared before, of shares and of lengths with
PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import gemmkit as gk
from bench.derived import attention
from bench.turns import Calls, command, error_of, times
from bench.turns import rows as rows_of

D = 128
#: (matrices of a stack, rows of Q, rows of K)
SHAPES = ((8, 16, 32768), (8, 1, 8192), (32, 16, 8192), (1, 64, 65536), (2, 128, 131072), (64, 16, 4096), (1, 1, 131072),
          (2, 1, 65536))
LONG = 64, 2048, 2048


def row(work: str, shape: tuple[int, int, int], calls: Calls, compared: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """One for each thing that "ours" is beside. Raises `bench.harness.WrongResult` where two results that are ``compared``
    differ."""
    for call in calls.values():
        call()
    error = max(error_of(f"{work} {shape}", one, exact, 1e-2) for one, exact in compared)
    count, rows, places = shape
    return rows_of("lengths" if work.startswith("lengths") else "shares", f"{work}: {count} x {rows} rows, {places} keys",
                   (rows, places, D), times(calls), error)


def heads(count: int, rows: int, places: int) -> tuple[Any, Any, Any]:
    q, k, v = (torch.randn(count, extent, D, device="cuda", dtype=torch.float16) for extent in (rows, places, places))
    return q, k, v


def run(q: Any, k: Any, v: Any, mapping: gk.Mapping | None = None,
        lengths: Any = None) -> tuple[Any, Callable[[], Any], Any]:
    """A plan, a call of it, and what it stores into."""
    given = dict(q=q, k=k, v=v, o=torch.full_like(q, torch.nan), scale=D ** -0.5, lengths=lengths)
    plan = attention.plan(**given, mapping=mapping)
    return plan, lambda: plan.run(given), given["o"]


def by_pytorch(q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=D ** -0.5)[0]


def shares(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    x = heads(*shape)
    plan, ours, o = run(*x)
    _, whole, of_whole = run(*x, mapping=gk.Mapping(splits=1))
    calls, exact = {"ours": ours, "splits=1": whole, "PyTorch": lambda: by_pytorch(*x)}, by_pytorch(*x)
    compared = [(o, exact), (of_whole, exact)]
    if plan.mapping.splits > 16:
        _, calls["splits=16"], of_16 = run(*x, mapping=gk.Mapping(splits=16))
        compared.append((of_16, exact))
    return row(f"{plan.mapping.splits} shares", shape, calls, compared)


def lengths(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    q, k, v = heads(*shape)
    some = torch.linspace(1, shape[2], shape[0], device=q.device).int()
    _, ours, o = run(q, k, v, lengths=some)
    _, every, of_all = run(q, k, v, lengths=torch.full_like(some, shape[2]))
    _, without, of_none = run(q, k, v)
    exact = torch.cat([by_pytorch(q[h:h + 1], k[h:h + 1, :n], v[h:h + 1, :n]) for h, n in enumerate(some.tolist())])
    return row(f"lengths, {float(some.float().mean()) / shape[2]:.2f} of all", shape,
               {"ours": ours, "all of them": every, "no stop=": without}, [(o, exact), (of_all, of_none)])


def measured(options: object) -> Iterator[dict[str, Any]]:
    yield from (one for shape in SHAPES for one in shares(shape))
    yield from lengths(LONG)


def main(arguments: Sequence[str] | None = None) -> int:
    return command("shares", __doc__, measured, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
