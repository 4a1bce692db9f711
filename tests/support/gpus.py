"""GPUs that are not here: what the driver says of them, and products that are planned for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from gemmkit.grouped import _plans as plans_of_groups
from gemmkit.products import _plans as plans
from gemmkit.runtime import device
from gemmkit.runtime.device import H100, DeviceInfo

KIB, MIB = 2**10, 2**20
T4 = DeviceInfo("a T4", (7, 5), 40, 64 * KIB, 64 * KIB, 1024, 65536, 4 * MIB, 1024, 16, 0)
A100 = DeviceInfo("an A100", (8, 0), 108, 163 * KIB, 164 * KIB, 1024, 65536, 40 * MIB)
A10 = DeviceInfo("an A10", (8, 6), 72, 99 * KIB, 100 * KIB, 1024, 65536, 6 * MIB, 1536, 16)
L4 = DeviceInfo("an L4", (8, 9), 58, 99 * KIB, 100 * KIB, 1024, 65536, 48 * MIB, 1536, 24)
B200 = DeviceInfo("a B200", (10, 0), 148, 227 * KIB, 228 * KIB, 1024, 65536, 126 * MIB)
RTX_5090 = DeviceInfo("an RTX 5090", (12, 0), 170, 99 * KIB, 100 * KIB, 1024, 65536, 96 * MIB, 1536, 24)
GPUS = {gpu.arch_name: gpu for gpu in (T4, A100, A10, L4, H100, B200, RTX_5090)}


@contextlib.contextmanager
def pretended(gpu: DeviceInfo) -> Iterator[None]:
    """Within it products are planned for this GPU, as for an H100 where there is none; it is for what runs on the host."""
    with (mock.patch.object(device, "available", lambda: False), mock.patch.object(device, "H100", gpu),
          mock.patch.dict(plans, clear=True), mock.patch.dict(plans_of_groups, clear=True)):
        yield


__all__ = ["A10", "A100", "B200", "GPUS", "L4", "RTX_5090", "T4", "pretended"]
