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

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gemmkit as gk
from bench import report
from bench.derived import attention
from bench.turns import times

D = 128
#: (matrices of a stack, rows of Q, rows of K)
SHAPES = ((8, 16, 32768), (8, 1, 8192), (32, 16, 8192), (1, 64, 65536), (2, 128, 131072), (64, 16, 4096), (1, 1, 131072),
          (2, 1, 65536))
LONG = 64, 2048, 2048


def row(work: str, shape: tuple[int, int, int], calls: dict[str, Callable[[], Any]],
        compared: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """One for each thing that "ours" is beside. Raises ValueError where two results that are ``compared`` differ."""
    for call in calls.values():
        call()
    error = max(float((one.float() - exact.float()).abs().max() / exact.float().abs().max()) for one, exact in compared)
    if not error <= 1e-2:
        raise ValueError(f"{work} {shape}: results differ by {error:.3f} of the largest element")
    found = times(calls)
    print(work, shape, {name: round(taken, 1) for name, taken in found.items()}, flush=True)
    count, rows, places = shape
    return [dict(work=f"{work}: {count} x {rows} rows, {places} keys", dtype="float16", m=rows, n=places, k=D, layout="nn",
                 ours_us=round(found["ours"], 2), peer=name, peer_us=round(taken, 2), ratio=round(taken / found["ours"], 4),
                 error=error, graph=True, group="lengths" if work.startswith("lengths") else "shares")
            for name, taken in found.items() if name != "ours"]


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


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.shares", description=__doc__.splitlines()[0])
    made.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    options = made.parse_args(arguments)
    rows = [one for shape in SHAPES for one in shares(shape)] + lengths(LONG)
    report.write(report.document("shares", rows, torch.cuda.get_device_name()), report.results_path("shares", options.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
