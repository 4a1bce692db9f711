"""Products that are planned for GPUs that are not here (`gemmkit.runtime.gpus`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gemmkit.runtime.device import DeviceInfo, assumed
from gemmkit.runtime.gpus import A10, A100, B200, GPUS, L4, RTX_5090, T4


@contextlib.contextmanager
def pretended(gpu: DeviceInfo) -> Iterator[None]:
    """Within it products are planned for this GPU, as for an H100 where there is none; it is for what runs on the host."""
    with assumed(gpu):
        yield


__all__ = ["A10", "A100", "B200", "GPUS", "L4", "RTX_5090", "T4", "pretended"]
