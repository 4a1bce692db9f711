"""GPUs that need not be here: what the driver says of one of each architecture.

A mapping is chosen by a GPU's limits and its number of multiprocessors, so a kernel that is compiled on another machine is
found by a GPU of the same architecture and number. ``sm_90a:114`` is the GPU of sm_90a below with 114 multiprocessors.
"""

from __future__ import annotations

import dataclasses
import re

from gemmkit.runtime.device import H100, DeviceInfo

__all__ = ["A10", "A100", "B200", "GPUS", "H100", "L4", "RTX_5090", "T4", "gpu"]

KIB, MIB = 2**10, 2**20
T4 = DeviceInfo("a T4", (7, 5), 40, 64 * KIB, 64 * KIB, 1024, 65536, 4 * MIB, 1024, 16, 0)
A100 = DeviceInfo("an A100", (8, 0), 108, 163 * KIB, 164 * KIB, 1024, 65536, 40 * MIB)
A10 = DeviceInfo("an A10", (8, 6), 72, 99 * KIB, 100 * KIB, 1024, 65536, 6 * MIB, 1536, 16)
L4 = DeviceInfo("an L4", (8, 9), 58, 99 * KIB, 100 * KIB, 1024, 65536, 48 * MIB, 1536, 24)
B200 = DeviceInfo("a B200", (10, 0), 148, 227 * KIB, 228 * KIB, 1024, 65536, 126 * MIB)
RTX_5090 = DeviceInfo("an RTX 5090", (12, 0), 170, 99 * KIB, 100 * KIB, 1024, 65536, 96 * MIB, 1536, 24)

#: By the name of the architecture. An H200 has the numbers of an H100 SXM.
GPUS = {each.arch_name: each for each in (T4, A100, A10, L4, H100, B200, RTX_5090)}


def gpu(text: str) -> DeviceInfo:
    """The GPU of an architecture, ``sm_80``, or one of it with so many multiprocessors, ``sm_80:98``.

    Raises ValueError for another text, naming the architectures there are.

    >>> gpu("sm_90a:114").sm_count, gpu("sm_80").name
    (114, 'an A100')
    """
    found = re.fullmatch(r"(sm_\d+a?)(?::(\d+))?", text)
    named = found and (GPUS.get(found[1]) or GPUS.get(f"{found[1]}a"))
    if not found or not named or found[2] == "0":
        raise ValueError(f"{text!r} is no GPU that kernels can be compiled for: one of {', '.join(GPUS)} is needed, "
                         "with :COUNT for another number of multiprocessors (sm_90a:114)")
    if found[2] is None or int(found[2]) == named.sm_count:
        return named
    return dataclasses.replace(named, name=f"a GPU of {named.arch_name}", sm_count=int(found[2]))
