"""Attention of few rows, as in decoding, whose rounds are split over blocks (``Mapping(splits=...)``); and sequences of
different lengths: `python -m bench.shares --out bench/results/shares.json`.

| kind | ours | beside |
|---|---|---|
| shares | the program's default mapping | the same by ``splits=1``; PyTorch's ``scaled_dot_product_attention`` |
| lengths | ``stop=lengths[h]``, lengths evenly from 0 to all | the same program with all of them |

All are CUDA graphs of `CALLS` calls, timed in turns in one run; a time is the median of `TURNS`. Results are compared
before.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

import gemmkit as gk
from bench import report
from gemmkit import programs as gp

CALLS, TURNS, D = 10, 9, 128
#: (matrices of a stack, rows of Q, rows of K)
SHAPES = (8, 16, 32768), (8, 1, 8192), (32, 16, 8192), (1, 64, 65536), (2, 128, 131072), (64, 16, 4096)
LONG = 64, 2048, 2048


@gk.program
def attention(q: Any, k: Any, v: Any, o: Any, scale: float) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[h, m] @ k[h, n].T)
            top = gp.maximum(best, s.max(axis=1))
            zero = gp.finite(top)
            p, shrink = gp.exp(s - zero), gp.exp(best - zero)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total


@gk.program
def padded_attention(q: Any, k: Any, v: Any, lengths: Any, o: Any, scale: float) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):
            s = scale * (q[h, m] @ k[h, n].T)
            top = gp.maximum(best, s.max(axis=1))
            zero = gp.finite(top)
            p, shrink = gp.exp(s - zero), gp.exp(best - zero)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total


def captured(call: Callable[[], Any]) -> Any:
    """A graph of `CALLS` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds a call, by the name."""
    graphs = {name: captured(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / CALLS * 1e3)
    return {name: statistics.median(taken) for name, taken in found.items()}


def row(work: str, shape: tuple[int, int, int], calls: dict[str, Callable[[], Any]],
        results: list[Any]) -> list[dict[str, Any]]:
    """One for each thing that "ours" is beside. Raises ValueError where results differ."""
    for call in calls.values():
        call()
    exact = results[-1].float()
    error = max(float((x.float() - exact).abs().max() / exact.abs().max()) for x in results)
    if not error <= 1e-2:
        raise ValueError(f"{work} {shape}: results differ by {error:.3f} of the largest element")
    found = times(calls)
    print(work, shape, {name: round(taken, 1) for name, taken in found.items()}, flush=True)
    count, rows, places = shape
    return [dict(work=f"{work}: {count} x {rows} rows, {places} keys", dtype="float16", m=rows, n=places, k=D, layout="nn",
                 ours_us=round(found["ours"], 2), peer=name, peer_us=round(taken, 2), ratio=round(taken / found["ours"], 4),
                 error=error) for name, taken in found.items() if name != "ours"]


def heads(count: int, rows: int, places: int) -> list[Any]:
    return [torch.randn(count, extent, D, device="cuda", dtype=torch.float16) for extent in (rows, places, places)]


def shares(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    q, k, v = heads(*shape)
    scale, results = D ** -0.5, [torch.full_like(q, torch.nan) for _ in range(3)]
    plans = [attention.plan(q, k, v, o, scale, mapping=mapping) for o, mapping in zip(results, (None, gk.Mapping(splits=1)))]
    given = [dict(q=q, k=k, v=v, o=o, scale=scale) for o in results]

    def theirs() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]

    results[2].copy_(theirs())
    calls = {"ours": lambda: plans[0].run(given[0]), "splits=1": lambda: plans[1].run(given[1]), "PyTorch": theirs}
    return row(f"{plans[0].mapping.splits} shares", shape, calls, results)


def lengths(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    q, k, v = heads(*shape)
    scale, results = D ** -0.5, [torch.full_like(q, torch.nan) for _ in range(3)]
    some = torch.linspace(1, shape[2], shape[0], device="cuda").int()
    every = torch.full_like(some, shape[2])
    plans = {name: padded_attention.plan(q, k, v, some, o, scale) for name, o in zip(("ours", "all", "without"), results)}
    whole = attention.plan(q, k, v, results[2], scale)
    calls = {"all of them": lambda: plans["all"].run(dict(q=q, k=k, v=v, lengths=every, o=results[1], scale=scale)),
             "ours": lambda: plans["ours"].run(dict(q=q, k=k, v=v, lengths=some, o=results[0], scale=scale)),
             "no stop=": lambda: whole.run(dict(q=q, k=k, v=v, o=results[2], scale=scale))}
    return row(f"lengths, {float(some.float().mean()) / shape[2]:.2f} of all", shape, calls, results[1:])


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m bench.shares", description=__doc__.splitlines()[0])
    made.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    options = made.parse_args()
    rows = [one for shape in SHAPES for one in shares(shape)] + lengths(LONG)
    report.write(report.document("shares", rows, torch.cuda.get_device_name()), report.results_path("shares", options.out))


if __name__ == "__main__":
    main()
