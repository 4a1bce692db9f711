"""What the driver takes for a launch: its structures, the packing of parameters, and the limits of a device."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from gemmkit.runtime.device import DeviceInfo

#: Format codes of kernel parameters -> (struct format, alignment in bytes). Half-precision values are raw
#: 16-bit patterns; ``tensor_map`` is the 128 bytes of a CUtensorMap, passed by value.
PARAMETER_FORMATS: dict[str, tuple[str, int]] = {
    "bool": ("B", 1), "i8": ("b", 1), "u8": ("B", 1),
    "i16": ("h", 2), "u16": ("H", 2), "f16": ("H", 2), "bf16": ("H", 2),
    "i32": ("i", 4), "u32": ("I", 4), "f32": ("f", 4),
    "i64": ("q", 8), "u64": ("Q", 8), "f64": ("d", 8),
    "tensor_map": ("128s", 64),
}  # fmt: skip

CTYPES: dict[str, Any] = {
    "B": ctypes.c_uint8, "b": ctypes.c_int8, "h": ctypes.c_int16, "H": ctypes.c_uint16, "i": ctypes.c_int32,
    "I": ctypes.c_uint32, "q": ctypes.c_int64, "Q": ctypes.c_uint64, "f": ctypes.c_float,
    "d": ctypes.c_double,
}  # fmt: skip

Dim3 = tuple[int, int, int]
_MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
_MAX_BLOCK: Dim3 = (1024, 1024, 64)
_MAX_CLUSTER = 8  # blocks a cluster that every device with clusters takes
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
class Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a cluster's dimensions, or a flag in the first of the three."""

    _fields_ = (("id", ctypes.c_uint64), ("dimensions", ctypes.c_uint32 * 3), ("rest", ctypes.c_uint8 * 52))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_memory", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


def attributes(cluster: Dim3 | None, dependent: bool, cooperative: bool = False) -> list[Attribute]:
    """The attributes of a launch in clusters, of one that may start before the kernel in front of it has ended, or of one
    whose blocks are all on multiprocessors at once."""
    out = []
    if cluster is not None:
        out.append(Attribute(_CLUSTER_DIMENSION, cluster))
    if dependent:
        out.append(Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0)))
    if cooperative:
        out.append(Attribute(_COOPERATIVE, (1, 0, 0)))
    return out


def parameter_struct(parameters: Sequence[str]) -> tuple[struct.Struct, list[int]]:
    """The struct that packs all parameters, each at a multiple of its alignment, and their offsets in it."""
    text, offset, offsets = "=", 0, []
    for code in parameters:
        letter, alignment = PARAMETER_FORMATS[code]
        padding = -offset % alignment
        offset += padding
        offsets.append(offset)
        text += f"{padding}x{letter}" if padding else letter
        offset += struct.calcsize("=" + letter)
    return struct.Struct(text), offsets


def dim3(extents: Sequence[int], name: str) -> Dim3:
    if not 1 <= len(extents) <= 3:
        raise ValueError(f"{name}={tuple(extents)} must have one to three extents")
    x, y, z = (*(int(extent) for extent in extents), 1, 1)[:3]
    return x, y, z


def validate(
    limits: DeviceInfo,
    grid: Dim3,
    block: Dim3,
    shared_memory: int,
    cluster: Dim3 | None = None,
    static_shared_memory: int = 0,
) -> None:
    """Raise ValueError, naming the value and the limit, when a device of ``limits`` cannot launch that."""
    for name, extents, most in (("grid", grid, _MAX_GRID), ("block", block, _MAX_BLOCK)):
        if any(not 1 <= extent <= limit for extent, limit in zip(extents, most, strict=True)):
            raise ValueError(f"{name}={extents} must be at least 1 and at most {most} in each direction")
    threads = block[0] * block[1] * block[2]
    if threads > limits.max_threads_per_block:
        raise ValueError(
            f"block={block} has {threads} threads, but {limits.name} runs at most "
            f"{limits.max_threads_per_block} a block; use fewer threads"
        )
    total = shared_memory + static_shared_memory
    if shared_memory < 0 or total > limits.shared_memory_per_block:
        raise ValueError(
            f"shared_memory={shared_memory} bytes, with {static_shared_memory} static bytes, must be between "
            f"0 and the {limits.shared_memory_per_block} bytes a block that {limits.name} has; use smaller "
            "tiles or fewer stages"
        )
    if cluster is None:
        return
    size = cluster[0] * cluster[1] * cluster[2]
    if limits.arch < (9, 0) or not 1 <= size <= _MAX_CLUSTER or min(cluster) < 1:
        raise ValueError(
            f"cluster={cluster} must hold 1 to {_MAX_CLUSTER} blocks, on a device of compute capability "
            f"9.0 or later; {limits.name} has {limits.arch[0]}.{limits.arch[1]}"
        )
    if any(blocks % part for blocks, part in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid={grid} must be a multiple of cluster={cluster} in each direction")
