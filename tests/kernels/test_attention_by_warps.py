"""The kernel of attention for GPUs without wgmma, in the emulator and on any GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.masks import Causal, SoftCap, Window
from tests.support.attention import close, draw, reference
from tests.support.machines import BF16, on_machines, poison

F16 = np.dtype(np.float16)
pytestmark = pytest.mark.sample(18)


@pytest.fixture(autouse=True)
def by_warps(own_launches: None, without_wgmma: Any) -> None:
    """Hopper counts as any GPU; few keys at a time in the emulator are few enough."""
    without_wgmma()


MASKS: dict[str, Any] = {
    "none": (None, None),
    "causal": (Causal(), lambda shift: lambda m, n, h, b: n <= m + shift),
    "window": (Window(50, 3), lambda shift: lambda m, n, h, b: (m + shift - 50 <= n) & (n <= m + shift + 3)),
}


@pytest.mark.kin(1)
@pytest.mark.sample(54)
@on_machines
@pytest.mark.parametrize("sizes", [(1, 1), (70, 33), (65, 90)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim,dtype", [(32, F16), (64, BF16), (96, F16), (128, F16), (192, BF16), (256, F16)], ids=str)
def test_head_sizes_and_masks(machine: Any, head_dim: int, dtype: Any, mask: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    queries, keys = sizes
    rule, shown = MASKS[mask]
    q = draw(rng, (1, 2 if queries == 1 else 1, queries, head_dim), dtype)
    k, v = (draw(rng, (1, 1, keys, head_dim), dtype) for _ in range(2))
    out = machine.array(poison(q.shape, dtype))
    with machine.session():
        found, lse = gk.attention(*map(machine.array, (q, k, v)), mask=rule, out=out, return_lse=True)
    assert found is out
    close(machine.numpy(out), reference(q, k, v, visible=shown and shown(keys - queries)), machine.numpy(lse))


@pytest.mark.kin(1)
@on_machines
def test_scores_layouts_and_packed_sequences(machine: Any, rng: np.random.Generator) -> None:
    qkv = draw(rng, (1, 50, 3, 2, 64), F16)
    held = machine.array(qkv)
    with machine.session():
        found = gk.attention(*(held[:, :, n] for n in range(3)), layout="bnhd", score=SoftCap(5.0), mask=Causal())
        packed = gk.attention(*(held[0, :, n] for n in range(3)), layout="bnhd", lengths=([0, 20, 20, 50], [0, 0, 30, 50]))
        empty = gk.attention(held[:, :, 0], held[:, :0, 1], held[:, :0, 2], layout="bnhd")
    q, k, v = (qkv[:, :, n].swapaxes(1, 2) for n in range(3))
    expected = reference(q, k, v, score=lambda s, m, n, h, b: 5 * np.tanh(s / 5), visible=lambda m, n, h, b: n <= m)
    close(machine.numpy(found).swapaxes(1, 2), expected, slack=3e-3)
    packed = machine.numpy(packed).swapaxes(0, 1)[None]
    close(packed[:, :, 20:], reference(q[:, :, 20:], k[:, :, 30:], v[:, :, 30:]))
    assert not packed[:, :, :20].any() and not machine.numpy(empty).any()
