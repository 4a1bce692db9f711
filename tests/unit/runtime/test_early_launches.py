"""Launches that begin before the kernel before them has ended: on GPUs that have them, and behind a wait for what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import ProtocolError
from gemmkit.kernels import rows as of_rows
from gemmkit.kernels.attention import kernel as of_attention
from gemmkit.kernels.mlp import kernel as of_mlp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import A100, B200, H100, DeviceInfo
from tests.support import programs as listing
from tests.support import row_programs


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def attention() -> None:
    gk.attention(*(half(1, 2, 64, 64) for _ in range(3)))


def mlp() -> None:
    gk.mlp(half(64, 64), [half(64, 64), half(64, 64)])


def rows() -> None:
    gk.softmax(half(3, 64))


CALLS: dict[str, Callable[[], Any]] = {
    "attention": attention, "MLP": mlp, "rows": rows, "matmul": lambda: gk.matmul(half(64, 64), half(64, 64)),
    "program": lambda: listing.gemm(half(64, 64), half(64, 64), half(64, 64)),
    "program of rows": lambda: row_programs.softmax(half(3, 64), half(3, 64), scale=1.0),
    "shares": lambda: listing.attention(*(half(1, extent, 64) for extent in (16, 4096, 4096, 16)), 0.125)}


def launches(name: str, device: DeviceInfo) -> list[Any]:
    return [found.launchable for found in recorded(CALLS[name], device, zeros=False)]


@pytest.mark.parametrize("name", CALLS)
def test_they_begin_early_where_they_may(name: str) -> None:
    """On Hopper all; elsewhere the kernels of other GPUs: of those, functions of rows begin early where launches may."""
    found = launches(name, H100)
    assert len(found) == (2 if name == "shares" else 1) and all(launch.dependent for launch in found)
    assert not any(launch.dependent for launch in launches(name, A100))
    of_rows_alone = [launch.dependent for launch in launches(name, B200)]
    assert of_rows_alone == {"rows": [True], "program of rows": [True], "shares": [False, True]}.get(name, [False])


@pytest.mark.parametrize("module, call", [(of_attention, attention), (of_mlp, mlp), (of_rows, rows)], ids=["attention", "MLP", "rows"])
def test_what_does_not_wait_is_found(module: Any, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with gk.emulate():
        call()
        monkeypatch.setattr(module, "grid_wait", lambda: None)
        with pytest.raises(ProtocolError, match="call grid_wait first"):
            call()
