"""Faults put into the warp-specialised kernel are found by the emulator; sound, it is so in any order of its threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from gemmkit.kernels.collectives import pipeline
from gemmkit.kernels.collectives import pipeline as warpgroups
from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.kernels.sm90 import kernel, mainloop, routes, store
from gemmkit.ptx.barriers import cluster_rank, mbarrier_arrive_at, mbarrier_expect
from tests.support.machines import MACHINES, reference, whole
from tests.support.patches import Seeded
from tests.support.sm90 import F16, mapping, product

EMULATOR = MACHINES["emulator"]
SOUND = {
    "cooperative": ("two", (136, 40, 56)), "ping-pong": ("pingpong", (64 * 3, 16, 56)), "cluster": ("one-2x1", (136, 40, 40)),
    "cluster, ping-pong": ("pingpong-1x2", (72, 72, 40)), "warps": ("one", (72, 37, 43)),
}


@pytest.fixture(autouse=True)
def few_blocks(clusters: Any) -> None:
    """One cluster that does everything."""
    clusters(1)


def run(schedule: str, size: tuple[int, int, int], seed: int | None = None, **fields: Any) -> None:
    m, n, k = size
    rng = np.random.default_rng(0)
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    conf = mapping(schedule, depth=16, **{**dict(stages=2), **fields})
    d = product(EMULATOR, conf, a, b, seed=seed)
    assert np.array_equal(d, reference(a, b))


@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SOUND)
def test_any_order_of_threads_is_right(name: str, seed: int) -> None:
    schedule, size = SOUND[name]
    run(schedule, size, seed)


check_sound = cache(run)


def nothing(*given: Any) -> None:
    pass


def unchanged(pending: int, sums: Any) -> Any:
    return sums


def to_oneself(barriers: Any, n: int, rank: int) -> None:
    mbarrier_arrive_at(barriers, n, cluster_rank())


def in_the_row(cluster: Cluster, rank: int, other: int) -> bool:
    return cluster.row(rank) == cluster.row(other)


def without(function: Callable[[], None], which: int) -> Callable[[], None]:
    """The function, that does nothing when a thread calls it for the ``which``-th time."""
    calls: Counter[Any] = Counter()

    def partly() -> None:
        thread = machine.current()
        calls[thread] += 1
        if calls[thread] != which + 1:
            function()

    return partly


def more_bytes(barriers: Any, n: int, nbytes: int) -> None:
    mbarrier_expect(barriers, n, nbytes + 16)


@dataclass(frozen=True)
class Fault:
    """``name`` of ``module`` is replaced; the kernel then computes ``size`` by ``schedule``."""

    module: Any
    name: str
    error: Any
    schedule: str = "one"
    size: tuple[int, int, int] = (64, 32, 56)
    instead: Callable[..., Any] = nothing
    skipped: int | None = None                             # when a thread comes to it for the n-th time; None: always


PAIR = "one-2x1", (128, 32, 56)
WARPS = (64, 32, 43)                                       # K is odd: both operands by the producer's warps
FAULTS = {
    "a consumer does not wait for a stage": Fault(Pipeline, "wait", errors.RaceError),
    "a consumer does not wait for what warps write": Fault(Pipeline, "wait", errors.UninitialisedRead, size=WARPS),
    "TMA does not wait for an empty stage": Fault(Pipeline, "acquire", errors.RaceError),
    "warps do not wait for an empty stage": Fault(Pipeline, "acquire", errors.RaceError, size=WARPS),
    "warps write without a fence": Fault(routes, "fence_async", errors.ProxyError, size=WARPS),
    "warps do not say that a stage is full": Fault(Pipeline, "commit", errors.DeadlockError, size=WARPS),
    "more bytes are expected than come": Fault(pipeline, "mbarrier_expect", errors.DeadlockError, instead=more_bytes),
    "stages are not given back": Fault(Pipeline, "release", errors.DeadlockError),
    "stages are given back while they are read": Fault(mainloop, "wgmma_wait", errors.RaceError, instead=unchanged),
    "wgmmas that nobody commits": Fault(mainloop, "wgmma_commit", errors.RaceError),
    "consumers do not take turns": Fault(warpgroups, "named_barrier", errors.ProtocolError, "pingpong", (64 * 6, 32, 32)),
    "a consumer keeps its turn": Fault(warpgroups, "named_arrive", errors.DeadlockError, "pingpong", (64 * 4, 32, 32)),
    "a panel leaves before it is written": Fault(store, "named_barrier", errors.UninitialisedRead),
    "a panel leaves without a fence": Fault(store, "fence_async", errors.ProxyError),
    "a panel is written while it leaves": Fault(store, "tma_wait_read", errors.RaceError, size=(64 * 4, 32, 16)),
    "the last panels are not waited for": Fault(store, "tma_wait", errors.ProtocolError),
    "barriers are used before all see them": Fault(kernel, "mbarrier_fence_init", errors.ProtocolError),
    "the block does not wait for its barriers": Fault(kernel, "barrier", errors.ProtocolError),
    "blocks do not wait for each other's barriers": Fault(kernel, "cluster_barrier", errors.ProtocolError, *PAIR,
                                                          skipped=0),
    "a stage is given back to those beside, not to those below": Fault(Cluster, "reads_of", errors.DeadlockError, "two-2x2",
                                                                      (256, 64, 72), in_the_row),
    "a stage is given back to one of two": Fault(pipeline, "mbarrier_arrive_at", errors.RaceError, *PAIR, to_oneself),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, seeded: Seeded) -> None:
    fault = FAULTS[name]
    check_sound(fault.schedule, fault.size)
    real = getattr(fault.module, fault.name)
    seeded(fault.module, fault.name, fault.instead if fault.skipped is None else without(real, fault.skipped))
    with pytest.raises(fault.error) as caught:
        run(fault.schedule, fault.size)
    assert "gemmkit/" in str(caught.value).replace("\\", "/")      # it says where


def test_a_tile_that_fills_its_buffers_unevenly_is_a_fault_if_nobody_minds(seeded: Seeded) -> None:
    """One panel a tile: the next tile's first panel has the same buffer (a fault that this kernel once had)."""
    run("one", (64 * 4, 32, 16))
    seeded(store.SubtileStore, "pending", 1)
    with pytest.raises(errors.RaceError, match="read by TMA"):
        run("one", (64 * 4, 32, 16))
