"""Faults put into the kernels of attention and of an MLP are found by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import ComponentError
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.attention import kernel
from gemmkit.kernels.collectives import softmax
from gemmkit.kernels.collectives import softmax as store
from gemmkit.kernels.collectives import softmax as walk
from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.kernels.collectives.softmax import KeyBlocks
from gemmkit.kernels.masks import Causal, Mask
from gemmkit.kernels.mlp import kernel as consumer
from gemmkit.kernels.mlp import kernel as kernel_mlp
from gemmkit.kernels.mlp import kernel as producer
from gemmkit.kernels.mlp import mma_kernel
from gemmkit.kernels.mlp import spec as mapping
from gemmkit.kernels.mlp import spec as store_mlp
from tests.support.attention import close, draw, reference, small
from tests.support.mlp import reference as reference_mlp
from tests.support.mlp import small as small_mlp
from tests.support.mlp import whole

pytestmark = pytest.mark.sample(4)


# ==========================================================================================================================
# Faults put into the attention kernel are found by the emulator.

F16 = np.dtype("f2")
Patch = Callable[[pytest.MonkeyPatch], None]
original_start, original_wait, original_release = kernel.start_both, Pipeline.wait, Pipeline.release


APART: dict[str, Any] = {"joins_tiles": False, "q_stages": 1, "store": store.QuadOut()}


def run(monkeypatch: pytest.MonkeyPatch, seed: int | None = None, **fields: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, (1, 1, 130, 64), F16) for _ in range(3))
    with small(monkeypatch, blocks=1, consumers=2, **fields), gk.emulate(seed):
        out = gk.attention(q, k, v, mask=Causal())
    close(out, reference(q, k, v, visible=lambda m, n, h, b: n <= m))
    return out


def nothing(*given: Any) -> None:
    pass


def released_early(patch: pytest.MonkeyPatch) -> None:
    """V is given back while it is multiplied."""
    def start(spec: Any, operands: Any, state: Any, slot: Any) -> tuple:
        found = original_start(spec, operands, state, slot)
        spec.v_ring.release(state.slot.stage)
        return found

    patch.setattr(kernel, "start_both", start)


def without_wait(of: str) -> Patch:
    """Q, K or V are multiplied before they are known to be there."""
    def put(patch: pytest.MonkeyPatch) -> None:
        def wait(ring: Any, slot: Any) -> None:
            stages = {"q": 0, "k": 1, "v": 2}
            if len(rings) < 3 and ring.offset not in rings:
                rings.append(ring.offset)
                rings.sort()
            if len(rings) < 3 or rings.index(ring.offset) != stages[of]:
                original_wait(ring, slot)

        rings: list[int] = []
        patch.setattr(Pipeline, "wait", wait)

    return put


def without_acquire(patch: pytest.MonkeyPatch) -> None:
    """The producer fills stages that are still read."""
    patch.setattr(Pipeline, "acquire", nothing)


def without_wgmma_wait(patch: pytest.MonkeyPatch) -> None:
    """O is rescaled while it is multiplied."""
    patch.setattr(kernel, "wgmma_wait", lambda pending, accumulators: accumulators)


def packed_early(patch: pytest.MonkeyPatch) -> None:
    """P is written while the last one is multiplied: the wait for O comes behind."""
    whole = kernel.soften

    def soften(s: Any, spec: Any, sizes: Any, stats: Any) -> tuple:
        weights, *rest = whole(s, spec, sizes, stats)
        return softmax.packed(spec, weights), *rest

    patch.setattr(kernel, "soften", soften)
    patch.setattr(kernel, "packed", lambda spec, weights: weights)


def without_fence(patch: pytest.MonkeyPatch) -> None:
    """TMA stores what threads have written, without a fence in between."""
    patch.setattr(store, "fence_async", nothing)


def without_barrier(patch: pytest.MonkeyPatch) -> None:
    """TMA stores before all threads have written."""
    patch.setattr(store, "named_barrier", nothing)


def without_read_wait(patch: pytest.MonkeyPatch) -> None:
    """O's shared memory is written anew while TMA reads it."""
    patch.setattr(store, "tma_wait_read", nothing)


def short_load(patch: pytest.MonkeyPatch) -> None:
    """The producer visits a block of keys less than the consumers: they wait for ever."""
    blocks = walk.key_blocks

    def fewer(spec: Any, tile: Any) -> KeyBlocks:
        found = blocks(spec, tile)
        return found._replace(first=min(found.first + 1, found.last - 1))

    patch.setattr(kernel, "key_blocks", fewer)


FAULTS = [released_early, without_wait("q"), without_wait("k"), without_wait("v"), without_acquire, without_wgmma_wait, packed_early,
          without_fence, without_barrier, without_read_wait, short_load]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: getattr(f, "__name__", "") if f.__name__ != "put" else f"without_wait_{FAULTS.index(f)}")
def test_a_fault_is_found(fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(EmulatorError):
        run(monkeypatch)


def q_released_early(patch: pytest.MonkeyPatch) -> None:
    """Q is given back a block of keys before the tile's last one."""
    release = kernel.release_q
    patch.setattr(kernel, "release_q", lambda spec, operands, block: release(spec, operands, block - 1))


def q_kept(patch: pytest.MonkeyPatch) -> None:
    """Q is never given back: the producer waits for ever."""
    patch.setattr(kernel, "release_q", nothing)


@pytest.mark.parametrize("fault", [q_released_early, q_kept, released_early, without_wait("q"), without_wait("v"), without_acquire,
                                   without_wgmma_wait, packed_early, short_load])
def test_a_fault_is_found_where_tiles_come_apart(fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(EmulatorError):
        run(monkeypatch, **APART)


@pytest.mark.kin(2)
@pytest.mark.parametrize("fields", [{}, APART], ids=["joined", "apart"])
@pytest.mark.parametrize("seed", [None, 1])
def test_sound_it_is_right(seed: int | None, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, seed, **fields)


@dataclass(frozen=True)
class Leaves(Mask):
    """Its keys leave out what it shows, or its free ones have what it hides."""

    few: bool

    def visible(self, m: int, n: int) -> bool:
        return n <= m + 1

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, end if self.few else end + 1

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, begin + 1 if self.few else begin + 3


@pytest.mark.parametrize("few,words", [(True, r"keys of queries 0 to 9 gives \(0, 9\), and query 8 sees key 9"),
                                       (False, r"free of queries 0 to 9 gives \(0, 3\), and query 0 does not see key 2")])
def test_a_mask_that_contradicts_itself_is_found(few: bool, words: str) -> None:
    x = np.zeros((1, 1, 12, 64), F16)
    with gk.emulate(), pytest.raises(ComponentError, match=words):
        gk.attention(x[:, :, :9], x, x, mask=Leaves(few))


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
