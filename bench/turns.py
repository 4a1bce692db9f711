"""Times of several calls in turns, of which none has the device to itself longer than the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bench.backends import Torch

CALLS, TURNS = 10, 9


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds a call, by the name: the medians of `TURNS` CUDA graphs of `CALLS` calls each, one after the other."""
    lib = Torch()
    graphs = {name: lib.capture([call] * CALLS) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            found[name].append(lib.elapsed_us(graph) / CALLS)
    return {name: statistics.median(taken) for name, taken in found.items()}
