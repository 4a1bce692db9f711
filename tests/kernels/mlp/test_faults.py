"""Faults put into the kernels of an MLP are found by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.kernels.mlp import kernel, mma_kernel
from gemmkit.kernels.mlp import kernel as consumer
from gemmkit.kernels.mlp import kernel as producer
from gemmkit.kernels.mlp import spec as mapping
from gemmkit.kernels.mlp import spec as store
from tests.support.mlp import reference, small, whole

F16 = np.dtype(np.float16)
pytestmark = pytest.mark.sample(4)
Patch = Callable[[pytest.MonkeyPatch], None]
wait, release = Pipeline.wait, Pipeline.release


def run(monkeypatch: pytest.MonkeyPatch, seed: int | None = None, by_warps: bool = False) -> None:
    """Two blocks, three turns, stages that are filled again and again."""
    rng = np.random.default_rng(0)
    x, weights, biases = whole(rng, 20, [64, 32, 64, 32], F16) if by_warps else whole(rng, 520, [96, 128, 96, 128], F16)
    monkeypatch.setattr(mapping, "MOST_STAGES", 3)
    with small(monkeypatch, 2, by_warps), gk.emulate(seed):
        out = gk.mlp(x, weights, biases)
    assert np.array_equal(out, reference(x, weights, biases)[0])


def nothing(*given: Any) -> None:
    pass


def without_acquire(patch: pytest.MonkeyPatch) -> None:
    """The producer fills stages that are still read."""
    patch.setattr(Pipeline, "acquire", nothing)


def without_wait(stages: int) -> Patch:
    """x, or weights, are multiplied before they are known to be there."""
    def put(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Pipeline, "wait", lambda ring, slot: None if ring.stages == stages else wait(ring, slot))

    return put


def released_early(patch: pytest.MonkeyPatch) -> None:
    """Weights are given back before they are multiplied."""
    multiply = consumer.step

    def step(sums: Any, n: int, weights: Any, spec: Any, a: Any, w: int, slot: Any) -> Any:
        found = multiply(sums, n, weights, spec, a, w, slot)
        if n == 0:
            spec.ring.release(slot.stage)
        return found

    patch.setattr(consumer, "step", step)


def never_released(patch: pytest.MonkeyPatch) -> None:
    """Stages of weights are not given back: the producer waits for ever."""
    patch.setattr(Pipeline, "release", lambda ring, stage: None if ring.stages == 3 else release(ring, stage))


def released_to_one_block(patch: pytest.MonkeyPatch) -> None:
    """The other block of the cluster is not told that a stage may be filled."""
    from gemmkit.kernels.collectives.pipeline import WARPS
    from gemmkit.kernels.collectives.scheduler import Cluster

    def alone(ring: Any, stage: int) -> None:
        release(Pipeline(ring.stages, ring.offset, 1, 1, readers=WARPS, cluster=Cluster()) if ring.stages == 3 else ring, stage)

    patch.setattr(Pipeline, "release", alone)


def without_wgmma_wait(patch: pytest.MonkeyPatch) -> None:
    """Sums are activated while they are multiplied."""
    patch.setattr(consumer, "wgmma_wait", lambda pending, accumulators: accumulators)


def without_wgmma_fence(patch: pytest.MonkeyPatch) -> None:
    """Products begin before the biases are in their registers."""
    patch.setattr(consumer, "wgmma_fence", nothing)


def without_acquiring_maps(patch: pytest.MonkeyPatch) -> None:
    """TMA is given maps of a table that the block has not acquired."""
    patch.setattr(kernel, "acquire_map", nothing)


def fewer_biases(patch: pytest.MonkeyPatch) -> None:
    """The barrier expects bytes that nobody brings."""
    patch.setattr(producer, "map_at", lambda table, row: table.maps[row % 3])


def without_fence(patch: pytest.MonkeyPatch) -> None:
    """TMA stores what threads have written, without a fence in between."""
    patch.setattr(store, "fence_async", nothing)


def without_barrier(patch: pytest.MonkeyPatch) -> None:
    """TMA stores before all threads have written."""
    patch.setattr(store, "named_barrier", nothing)


def without_read_wait(patch: pytest.MonkeyPatch) -> None:
    """The stage of x is given back while TMA reads the result from it."""
    patch.setattr(store, "tma_wait_read", nothing)


def without_last_barrier(patch: pytest.MonkeyPatch) -> None:
    """A block ends while its peer multicasts to it, or tells it that a stage is empty."""
    count: dict[int, int] = {}
    meet = kernel.cluster_barrier

    def once() -> None:
        from gemmkit.emulator.machine import current

        key = id(current())
        count[key] = count.get(key, 0) + 1
        if count[key] == 1:
            meet()

    patch.setattr(kernel, "cluster_barrier", once)


FAULTS = {f.__name__: f for f in (without_acquire, released_early, never_released, released_to_one_block, without_wgmma_wait,
                                  without_wgmma_fence, without_acquiring_maps, fewer_biases, without_fence, without_barrier,
                                  without_read_wait, without_last_barrier)}
FAULTS |= {"without_wait_x": without_wait(1), "without_wait_weights": without_wait(3)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.raises(EmulatorError):
            run(monkeypatch)


@pytest.mark.parametrize("by_warps", [False, True], ids=["wgmma", "mma"])
@pytest.mark.parametrize("seed", [None, 1])
def test_sound_it_is_right(seed: int | None, by_warps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, seed, by_warps)


FAULTS_BY_WARPS: dict[str, Patch] = {
    "no barrier": lambda patch: patch.setattr(mma_kernel, "barrier", nothing),
    "no wait": lambda patch: patch.setattr(mma_kernel, "wait_copies", nothing),
    "a wait less": lambda patch: patch.setattr(mma_kernel, "wait_copies", lambda pending, wait=mma_kernel.wait_copies: wait(2)),
    "copied over": lambda patch: patch.setattr(mma_kernel, "copy_next", copied_over),
}


def copied_over(weights: Any, spec: Any, inputs: Any, layer: int, chunk: int, stage: int) -> None:
    """Into the stage that is multiplied."""
    mma_kernel.copy_chunk(weights, spec, inputs, layer, chunk, stage ^ 1)


@pytest.mark.parametrize("fault", FAULTS_BY_WARPS)
def test_a_fault_by_warps_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FAULTS_BY_WARPS[fault](patch)
        with pytest.raises(EmulatorError):
            run(monkeypatch, by_warps=True)
