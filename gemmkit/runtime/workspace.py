"""Device memory that belongs to a stream, for kernels whose blocks hand numbers to each other.

A kernel that needs a workspace holds descriptions of arrays without an address (`described`); a launch puts in the addresses
of the stream's own arrays (`addresses`). Launches of one stream run one after the other, so all plans share these.

* **Memory.** One allocation for each device, stream, role and size class (a power of two), made at the first launch that
  needs it and kept until the process ends. In a stream they add up to less than twice the largest of each role.
* **Streams.** Each has its own, told apart by the driver's id where it gives one (handles are used again).
* **CUDA graphs.** What is captured keeps its addresses, and a graph may run while the stream goes on, so each capture has
  its own workspace for each stream in it. Launches of one graph do not overlap. A graph that is instantiated twice must not
  run in both instances at a time. While a stream is captured only its handle tells it from others: ``cuStreamGetId`` would
  end the capture (seen on driver 580).
* **Counters** are set to 0 once, when they are allocated, by a private stream that is awaited; kernels leave them at 0.
  Nothing is cleared by a launch, and no stream of the caller's is synchronised.

>>> described("counts", 8, np.dtype(np.uint32)).shape
(8,)
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component, field_values, with_fields
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.streams import is_capturing

#: What reductions of a chain of epilogues keep their partial states in, each its own.
PARTIALS = "partials", "second partials", "third partials", "fourth partials"
#: Addresses that no array has, for arrays that get theirs with a launch.
PLACES = {role: 2**62 + 2**32 * n for n, role in enumerate(("sums", "counts", "sizes", "places", "products", *PARTIALS))}
_ROLES = {place: role for role, place in PLACES.items()}
_LEAST = 2**16                         # bytes of the smallest size class

_kept: dict[tuple, int] = {}
_lock = threading.Lock()
tables = threading.RLock()             # held from a copy to a table's place until the launch that reads it
_contents: dict[int, Any] = {}
_of_captures: dict[tuple, int] = {}
_unknown = itertools.count()


class Space(NamedTuple):
    """A kernel's need: where among its values the address goes, what for, and how many bytes."""

    slot: int
    role: str
    nbytes: int


def described(role: str, count: int, dtype: np.dtype[Any], columns: int | None = None) -> ArrayInfo:
    """A workspace of ``count`` elements, or of as many rows of ``columns``, as a component holds it."""
    shape, strides = ((count,), (1,)) if columns is None else ((count, columns), (columns, 1))
    return ArrayInfo(PLACES[role], shape, strides, dtype, -1, False, "workspace")


def spaces_of(leaves: list[Any], arrays: list[ArrayInfo]) -> list[Space]:
    """The workspaces among a kernel's values and arrays."""
    nbytes = {info.pointer: math.prod(info.shape) * info.dtype.itemsize for info in arrays if info.library == "workspace"}
    return [Space(slot, _ROLES[value], nbytes[value]) for slot, value in enumerate(leaves) if value in nbytes]


def on_host(component: Any) -> Any:
    """The component with NumPy arrays for its workspaces, counters at 0: what the emulator takes."""
    changed: dict[str, Any] = {}
    for field, value in field_values(component).items():
        if isinstance(value, ArrayInfo) and value.library == "workspace":
            made: Any = np.zeros(value.shape, value.dtype)
            if _ROLES[value.pointer] != "counts":
                made.view(np.uint8)[...] = 0xFF
            changed[field] = made
        elif isinstance(value, Component) and (inner := on_host(value)) is not value:
            changed[field] = inner
    return with_fields(component, changed)


# -- on the device ----------------------------------------------------------------------------------------------------

def addresses(ordinal: int, stream: int, spaces: Sequence[Space]) -> list[int]:
    """Where a stream's workspaces are. The device is ``ordinal``; of a stream that is being captured, the capture's own."""
    if not spaces:
        return []
    identity = _identity(stream)
    return [_address(ordinal, identity, space) for space in spaces]


def _address(ordinal: int, identity: tuple[int, int], space: Space) -> int:
    size = max(_LEAST, 1 << (space.nbytes - 1).bit_length()) if space.nbytes else _LEAST
    key = ordinal, *identity, space.role, size
    found = _kept.get(key)
    if found is None:
        with _lock, device.made_current(ordinal):
            found = _kept.get(key)
            if found is None:
                found = _kept[key] = _allocated(size, np.zeros(size, np.uint8) if space.role == "counts" else None)
    return found


def table(ordinal: int, stream: int, key: Any, data: np.ndarray) -> int:
    """The address of a copy of ``data``, an array of bytes that ``key`` stands for, for launches on a stream.

    A stream has one place for each size class. What is there already is not copied again; else the copy is asynchronous,
    behind the launches that read what was there. So who calls it holds `tables` until its launch is under way. A capture
    keeps every table: the graph reads it whenever it runs.
    """
    identity = _identity(stream)
    if identity[1]:
        found = _of_captures.get((ordinal, identity[1], key))
        if found is None:
            with device.made_current(ordinal):
                found = _of_captures[ordinal, identity[1], key] = _allocated(max(1, data.nbytes), data)
        return found
    at = _address(ordinal, identity, Space(0, "tables", data.nbytes))
    if _contents.get(at) != key:
        from cuda.bindings import driver

        with device.made_current(ordinal):
            # From pageable memory: the host's bytes have been read when this returns.
            _check(*driver.cuMemcpyHtoDAsync(at, data.ctypes.data, data.nbytes, stream))
        _contents[at] = key
    return at


def _identity(stream: int) -> tuple[int, int]:
    """What tells a stream from others, and a capture of it from the stream: each launch asks, and two calls of the driver
    answer, but for the default stream, which no capture can begin on."""
    if stream in (0, 1):
        return stream, 0
    from cuda.bindings import driver

    if is_capturing(stream):
        status, _, *about = driver.cuStreamGetCaptureInfo(stream)
        # An older binding cannot say which capture it is: then each launch has its own workspace.
        return stream, int(about[0]) if int(status) == 0 else -1 - next(_unknown)
    if stream == 2 or not hasattr(driver, "cuStreamGetId"):
        return stream, 0
    status, identity = driver.cuStreamGetId(stream)
    return (int(identity) if int(status) == 0 else stream), 0


def _allocated(size: int, data: np.ndarray | None) -> int:
    """New memory in the current context, with ``data`` at its beginning."""
    from cuda.bindings import driver

    device.ensure_context()
    with _beside_captures():
        status, pointer = driver.cuMemAlloc(size)
        if int(status) != 0:
            raise MemoryError(f"the CUDA driver answered {status.name} to a workspace of {size} bytes; take fewer splits")
        if data is not None and data.nbytes:
            data = np.ascontiguousarray(data)
            status, stream = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            _check(status)
            _check(*driver.cuMemcpyHtoDAsync(pointer, data.ctypes.data, data.nbytes, stream))
            _check(*driver.cuStreamSynchronize(stream))
            _check(*driver.cuStreamDestroy(stream))
    return int(pointer)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Within it, what may not happen while a stream is captured may: it is not for that stream."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    status, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    _check(status)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def _check(status: Any) -> None:
    if int(status) != 0:
        raise RuntimeError(f"the CUDA driver answered {status.name}")


def check_residency(kernel: Any, ordinal: int, blocks: int, threads: int, shared_bytes: int, cluster: int = 1) -> None:
    """Raise LaunchError unless all blocks of a launch can be on the device's multiprocessors at once, by the driver's word.

    ``kernel`` is a `gemmkit.runtime.launch.LoadedKernel`, whose blocks, in clusters of ``cluster``, wait for each other.
    """
    from cuda.bindings import driver

    from gemmkit.runtime.launch import LaunchError

    with device.made_current(ordinal):
        if cluster > 1:                                # the blocks of a cluster stand in one GPC: not all places can be had
            config = cluster_config(blocks, threads, shared_bytes, cluster)
            status, held = driver.cuOccupancyMaxActiveClusters(kernel._function(), config)
            _check(status)
            most, how = int(held) * cluster, f"{held} clusters of {cluster}"
        else:
            status, held = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel._function(), threads, shared_bytes)
            _check(status)
            most, how = int(held) * device.current().sm_count, f"{held} a multiprocessor"
    if blocks > most:
        raise LaunchError(f"{blocks} blocks of {threads} threads wait for each other, and the device holds {most} at once "
                          f"({how}); take fewer splits, or StreamK(blocks=...)")


def cluster_config(blocks: int, threads: int, shared_bytes: int, cluster: int) -> Any:
    """A launch in clusters as `cuOccupancyMaxActiveClusters` takes it."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    extents = attribute.value.clusterDim
    extents.x, extents.y, extents.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config
