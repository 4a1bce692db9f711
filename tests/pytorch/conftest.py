"""Where tests of operators of PyTorch compute: the emulator, of tensors on the CPU, and a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


@pytest.fixture
def mesh(device: str) -> Iterator[Any]:
    """Of one process."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)
    yield init_device_mesh(device, (1,))
    torch.distributed.destroy_process_group()
