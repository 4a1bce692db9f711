"""Faults put into the attention kernel are found by the emulator."""

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
from gemmkit.kernels.collectives.softmax import Blocks
from gemmkit.kernels.masks import Causal, Mask
from tests.support.attention import close, draw, reference, small

F16 = np.dtype(np.float16)
pytestmark = pytest.mark.sample(4)
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

    def fewer(spec: Any, tile: Any) -> Blocks:
        found = blocks(spec, tile)
        return found._replace(first=min(found.first + 1, found.last - 1))

    patch.setattr(kernel, "key_blocks", fewer)


FAULTS = [released_early, without_wait("q"), without_wait("k"), without_wait("v"), without_acquire, without_wgmma_wait, packed_early,
          without_fence, without_barrier, without_read_wait, short_load]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: getattr(f, "__name__", "") if f.__name__ != "put" else f"without_wait_{FAULTS.index(f)}")
def test_a_fault_is_found(fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fault(patch)
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
    with monkeypatch.context() as patch:
        fault(patch)
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
