"""Where tests of operators of PyTorch compute: the emulator, of tensors on the CPU, and a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gemmkit as gk


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of `tests.support.machines.on_devices`."""
    if request.param == "cuda":
        yield "cuda"
    else:
        with gk.emulate():
            yield "cpu"
