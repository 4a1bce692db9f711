"""The kernels that programs with products become, by what GPUs have: what differs between them for the passes.

| kernel | GPUs | blocks come | products | who |
|---|---|---|---|---|
| ``warp_specialised`` | of compute capability 9.0 | by TMA | wgmma | one warpgroup has blocks brought, others multiply |
| ``multistage`` | from 8.0 on | by cp.async | mma.sync | all threads do both |

The names are those of `gemmkit.get_config`. What a kernel's text says is its printer's (`gemmkit.programs.text`,
`gemmkit.programs.multistage`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gemmkit.kernels.common.pipeline import BARRIER
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.mapping import MULTISTAGE, WARP_SPECIALISED, Mapping
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not

HOPPER, AMPERE = (9, 0), (8, 0)
#: Of a mapping, what a multistage kernel has not, and why.
ORDERS = dict(ahead="products are done where they stand, and none runs ahead",
              across="a block has one tile, and its last products are beside no other's",
              turns="products are done where they stand, and warps need no turns",
             anchored="products are done where they stand, and nothing waits for them")


@dataclass(frozen=True)
class Kernel:
    """``most_sums``: columns of sums that fit in the registers of so many warpgroups, ``usual_sums``: of those that are
    taken where nothing is said; ``room``: a thread's registers of sums and of what is handed over, beyond which the
    assembler spills; ``depth``: the length of a round's blocks that sums go over, a multiple of ``depths``; ``barriers``:
    bytes that a stage's take; ``parts``: of 64 rows each, that a warpgroup may have of tiles of rows and columns.

    Of chains ``lengths`` of a round's blocks, the best first, and the usual number of warpgroups; a product's columns are a
    multiple of ``columns``, and a block's of ``line``."""

    name: str
    most_sums: dict[int, int] = field(hash=False)
    usual_sums: dict[int, int] = field(hash=False)
    room: dict[int, int] = field(hash=False)
    depth: int
    depths: int
    barriers: int
    parts: int
    lengths: tuple[int, ...]
    chain_warpgroups: int
    columns: int
    line: int
    uses_tma: bool

    @property
    def whole_rows(self) -> str:
        """How 16-bit rows that begin at multiples of 16 bytes leave: the collective's name."""
        return "TmaOut" if self.uses_tma else "OctetOut"

    @property
    def brings(self) -> str:
        return "TMA brings" if self.uses_tma else "threads copy"

    @property
    def said(self) -> str:
        """In a mapping that says all: Hopper's is what it has anyway."""
        return "" if self.uses_tma else self.name

    def refuse(self, mapping: Mapping) -> None:
        """Raises ConfigError for what the kernel has not."""
        if self.uses_tma:
            return
        of = f"kernel={self.name!r}): "
        if math.prod(mapping.cluster.values()) > 1:
            raise ConfigError(f"Mapping(cluster={dict(mapping.cluster)!r}, {of}blocks share operands by TMA's multicast, "
                              "which this kernel has not; it goes by blocks alone")
        for name, why in ORDERS.items():
            if getattr(mapping, name):
                raise ConfigError(f"Mapping({name}=True, {of}{why}; leave it out")

    def share(self, device: DeviceInfo) -> int:
        """The bytes of shared memory that stages are to fit in where the mapping does not say: all that a block can have; of
        a kernel whose threads wait for copies and multiply in turns, as much as leaves room for another block."""
        if self.uses_tma:
            return device.shared_memory_per_block
        return device.shared_memory_per_sm // 2 - device.reserved_shared_memory

    def why_not(self, info: ArrayInfo) -> str | None:
        """Why blocks of an operand cannot be brought, in words."""
        axis = len(info.shape) - 1
        if self.uses_tma:
            reason = why_not(info, axis)
            if reason is None:
                return None
            other = KERNELS[MULTISTAGE].why_not(info)
            more = f" (Mapping(kernel={MULTISTAGE!r}) takes it)" if other is None else ""
            return f"TMA cannot bring it: {reason}{more}"
        if info.strides[axis] != 1 and info.shape[axis] > 1:
            return (f"cp.async cannot copy it: its elements are not contiguous along axis {axis} (stride "
                    f"{info.strides[axis]})")
        if self.vector(info) < 2:
            return "cp.async cannot copy it: its rows begin at odd elements, and a copy has 2, 4 or 8 of them"
        return None

    def vector(self, info: ArrayInfo) -> int:
        """Elements that a thread copies at a time."""
        return alignment(info, len(info.shape) - 1) // int(info.dtype.itemsize)


#: Lengths as measured on Hopper (112 keys of heads of 192: 1.2).
KERNELS = {kernel.name: kernel for kernel in (
    Kernel(WARP_SPECIALISED, {1: 256, 2: 256, 3: 128}, {1: 256, 2: 256, 3: 128}, {1: 192, 2: 192, 3: 136}, depth=64,
           depths=64, barriers=2 * BARRIER, parts=1, lengths=(128, 96, 80, 64, 48, 32), chain_warpgroups=2, columns=8,
           line=64, uses_tma=True),
    Kernel(MULTISTAGE, {1: 256, 2: 256, 3: 128}, {1: 128, 2: 128, 3: 128}, {1: 176, 2: 176, 3: 96}, depth=32,
           depths=32, barriers=0, parts=2, lengths=(64, 48, 32, 16), chain_warpgroups=1, columns=16, line=32,
           uses_tma=False))}


def kernel_of(mapping: Mapping, device: DeviceInfo) -> Kernel:
    """What the mapping says, or the device has. Raises ConfigError, naming the GPU, where it has not what is needed."""
    has: Any = f"{device.name} has {device.arch[0]}.{device.arch[1]}"
    if device.arch < AMPERE:
        raise ConfigError(f"programs with products have kernels for GPUs of compute capability 8.0 and above, and {has}")
    if mapping.kernel == WARP_SPECIALISED and device.arch != HOPPER:
        raise ConfigError(f"Mapping(kernel={WARP_SPECIALISED!r}): TMA and wgmma are of compute capability 9.0, and {has}; "
                          f"take kernel={MULTISTAGE!r}, or leave it out")
    return KERNELS[mapping.kernel or (WARP_SPECIALISED if device.arch == HOPPER else MULTISTAGE)]
