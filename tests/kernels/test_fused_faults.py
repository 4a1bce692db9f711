"""Faults put into the kernels of an MLP are found by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.kernels.mlp import kernel as consumer
from gemmkit.kernels.mlp import kernel as kernel_mlp
from gemmkit.kernels.mlp import kernel as producer
from gemmkit.kernels.mlp import mma_kernel
from gemmkit.kernels.mlp import spec as mapping
from gemmkit.kernels.mlp import spec as store_mlp
from tests.support.mlp import reference as reference_mlp
from tests.support.mlp import small as small_mlp
from tests.support.mlp import whole

pytestmark = pytest.mark.sample(4)


F16 = np.dtype("f2")
Patch = Callable[[pytest.MonkeyPatch], None]


def nothing(*given: Any) -> None:
    pass


# ==========================================================================================================================
# Faults put into the kernels of an MLP are found by the emulator.

wait, release = Pipeline.wait, Pipeline.release


def run_mlp(monkeypatch: pytest.MonkeyPatch, seed: int | None = None, by_warps: bool = False) -> None:
    """Two blocks, three turns, stages that are filled again and again."""
    rng = np.random.default_rng(0)
    x, weights, biases = whole(rng, 20, [64, 32, 64, 32], F16) if by_warps else whole(rng, 520, [96, 128, 96, 128], F16)
    monkeypatch.setattr(mapping, "MOST_STAGES", 3)
    with small_mlp(monkeypatch, 2, by_warps), gk.emulate(seed):
        out = gk.mlp(x, weights, biases)
    assert np.array_equal(out, reference_mlp(x, weights, biases)[0])


def without_acquire(patch: pytest.MonkeyPatch) -> None:
    """The producer fills stages that are still read."""
    patch.setattr(Pipeline, "acquire", nothing)


def without_fence(patch: pytest.MonkeyPatch) -> None:
    """TMA stores what threads have written, without a fence in between."""
    patch.setattr(store_mlp, "fence_async", nothing)


def without_barrier(patch: pytest.MonkeyPatch) -> None:
    """TMA stores before all threads have written."""
    patch.setattr(store_mlp, "named_barrier", nothing)


def without_wait_mlp(stages: int) -> Patch:
    """x, or weights, are multiplied before they are known to be there."""
    def put(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Pipeline, "wait", lambda ring, slot: None if ring.stages == stages else wait(ring, slot))

    return put


def released_early_mlp(patch: pytest.MonkeyPatch) -> None:
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


def without_wgmma_wait_mlp(patch: pytest.MonkeyPatch) -> None:
    """Sums are activated while they are multiplied."""
    patch.setattr(consumer, "wgmma_wait", lambda pending, accumulators: accumulators)


def without_wgmma_fence(patch: pytest.MonkeyPatch) -> None:
    """Products begin before the biases are in their registers."""
    patch.setattr(consumer, "wgmma_fence", nothing)


def without_acquiring_maps(patch: pytest.MonkeyPatch) -> None:
    """TMA is given maps of a table that the block has not acquired."""
    patch.setattr(kernel_mlp, "acquire_map", nothing)


def fewer_biases(patch: pytest.MonkeyPatch) -> None:
    """The barrier expects bytes that nobody brings."""
    patch.setattr(producer, "map_at", lambda table, row: table.maps[row % 3])


def without_read_wait_mlp(patch: pytest.MonkeyPatch) -> None:
    """The stage of x is given back while TMA reads the result from it."""
    patch.setattr(store_mlp, "tma_wait_read", nothing)


def without_last_barrier(patch: pytest.MonkeyPatch) -> None:
    """A block ends while its peer multicasts to it, or tells it that a stage is empty."""
    count: dict[int, int] = {}
    meet = kernel_mlp.cluster_barrier

    def once() -> None:
        from gemmkit.emulator.machine import current

        key = id(current())
        count[key] = count.get(key, 0) + 1
        if count[key] == 1:
            meet()

    patch.setattr(kernel_mlp, "cluster_barrier", once)


FAULTS_MLP = {f.__name__: f for f in (without_acquire, released_early_mlp, never_released, released_to_one_block, without_wgmma_wait_mlp,
                                  without_wgmma_fence, without_acquiring_maps, fewer_biases, without_fence, without_barrier,
                                  without_read_wait_mlp, without_last_barrier)}
FAULTS_MLP |= {"without_wait_x": without_wait_mlp(1), "without_wait_weights": without_wait_mlp(3)}


@pytest.mark.parametrize("fault", FAULTS_MLP)
def test_a_fault_is_found_of_an_mlp(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS_MLP[fault](monkeypatch)
    with pytest.raises(EmulatorError):
        run_mlp(monkeypatch)


@pytest.mark.parametrize("by_warps", [False, True], ids=["wgmma", "mma"])
@pytest.mark.parametrize("seed", [None, 1])
def test_sound_it_is_right_of_an_mlp(seed: int | None, by_warps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_mlp(monkeypatch, seed, by_warps)


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
    FAULTS_BY_WARPS[fault](monkeypatch)
    with pytest.raises(EmulatorError):
        run_mlp(monkeypatch, by_warps=True)
