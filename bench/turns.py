"""What benches of PyTorch's calls share: times of several calls in turns, of which none has the device to itself longer than
the others; rows of results; and the command that measures and writes them."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gemmkit
from bench import report
from bench.backends import Torch
from bench.harness import WrongResult

CALLS, TURNS = 10, 9
Calls = dict[str, Callable[[], Any]]
Rows = list[dict[str, Any]]


def times(calls: Calls) -> dict[str, float]:
    """Microseconds a call, by the name: the medians of `TURNS` CUDA graphs of `CALLS` calls each, one after the other."""
    lib = Torch()
    graphs = {name: lib.capture([call] * CALLS) for name, call in calls.items()}
    return _medians(lambda graph: lib.elapsed_us(graph) / CALLS, graphs, TURNS)


def times_of_events(calls: Calls, device: str, count: int, turns: int, before: int) -> dict[str, float]:
    """The same of ``count`` calls one by one, after ``before`` of each. On a "cpu" the host's clock takes times that are no
    measurement.

    A call goes before the first event, as of a graph (`bench.backends.Backend.elapsed_us`): the device is busy while the
    host makes the first call that is timed, and no gap of the host's lies between the events."""
    for call in calls.values():
        elapsed(call, device, before)
    return _medians(lambda call: elapsed(call, device, count, 1), calls, turns)


def _medians(time_of: Callable[[Any], float], calls: Calls, turns: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            found[name].append(time_of(call))
    return {name: statistics.median(taken) for name, taken in found.items()}


def elapsed(call: Callable[[], Any], device: str, count: int, before: int = 0) -> float:
    """Microseconds a call, of ``count`` between two events; ``before`` more go in front of the first one."""
    for _ in range(before):
        call()
    if device == "cpu":
        begun = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begun) * 1e6 / count
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count


def error_of(what: object, found: Any, wanted: Any, tolerance: float) -> float:
    """The largest difference of two results, over the largest element. Raises `bench.harness.WrongResult` above
    ``tolerance``."""
    error = float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    if not error <= tolerance:                                # this way round, so that NaN is wrong
        raise WrongResult(f"{what}: results differ by {error:.4f} of the largest element")
    return error


def rows(group: str, work: str, sizes: Sequence[int], taken: dict[str, float], errors: float | dict[str, float], *,
         flops: float = 0.0, **more: Any) -> Rows:
    """Rows of results, printed: the first call's time beside each other one's. ``errors`` are of all, or of each name;
    ``sizes`` M, N and K."""
    ours, *peers = taken
    (m, n, k), time = sizes, taken[ours]
    speed = f", {flops / time / 1e6:.0f} TFLOP/s" if flops else ""
    print(f"{work} {' x '.join(map(str, sizes))}{speed}:", {name: round(of, 1) for name, of in taken.items()},
          {name: round(taken[name] / time, 3) for name in peers}, flush=True)
    common = dict(group=group, work=work, dtype="float16", m=m, n=n, k=k, layout="nn", ours_us=round(time, 2), graph=True)
    if flops:
        common["tflops"] = round(flops / time / 1e6, 1)
    return [{**common, "peer": name, "peer_us": round(taken[name], 2), "ratio": round(taken[name] / time, 4),
             "error": errors[name] if isinstance(errors, dict) else errors, **more} for name in peers]


def command(name: str, doc: str, measure: Callable[[argparse.Namespace], Iterable[dict[str, Any]]],
            arguments: Sequence[str] | None = None, works: Sequence[str] = (), on_cpu: bool = False,
            add: Callable[[argparse.ArgumentParser], object] = lambda parser: None) -> int:
    """`python -m bench.<name>` writes the rows that ``measure`` yields, after each one: an interrupted run keeps what it
    measured. ``works`` may be named; with ``on_cpu``, ``--device cpu`` runs in the emulator; ``add`` adds options."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc.splitlines()[0])
    if works:
        parser.add_argument("works", nargs="*", metavar="work", help=f"of {', '.join(works)}; all if none is named")
    if on_cpu:
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small cases, in the emulator")
    parser.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    add(parser)
    options = parser.parse_args(arguments)
    for work in options.works if works else ():
        if work not in works:
            parser.error(f"{work!r} is none of {', '.join(works)}")
    is_emulated = on_cpu and options.device == "cpu"
    device, path, found = "the emulator" if is_emulated else Torch().device(), report.results_path(name, options.out), []
    with gemmkit.emulate() if is_emulated else contextlib.nullcontext():
        for row in measure(options):
            found.append(row)
            report.write(report.document(name, found, device), path)
    return 0
