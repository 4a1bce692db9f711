"""A cubin as a kernel that is launched in about two microseconds of host time.

A launch has to say three things to the driver: which kernel and how many threads (known when a plan is made), on which
stream, and with which values (known at the call). ``LoadedKernel.bind`` prepares the first once, as the driver's own
launch structure; the ``launch`` of what it returns packs the values with one precompiled ``struct`` into a buffer whose
pointers are ready, sets the stream and calls the driver through ctypes. ``BoundLaunch.prepare`` is for launches that
differ in addresses alone: a launch with addresses that are known packs nothing. Nothing is
allocated, checked twice or synchronised, so a launch can be captured into a CUDA graph. ``BoundLaunch.reference`` does
the same by ``cuda.core.launch``, slower: it is what the fast route is tested against.

A buffer belongs to one launch at a time: a call takes one from a pool, or makes one, and puts it back.
``list.pop`` and ``list.append`` are atomic, so threads, and a finaliser that launches in the middle of a
launch, never share one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import Component, field_values, with_fields
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import (
    CTYPES,
    PARAMETER_FORMATS,
    Attribute,
    Dim3,
    DriverLaunchConfig,
    attributes,
    dim3,
    is_capturing,
    parameter_struct,
    validate,
    validate_grid,
)

if TYPE_CHECKING:
    from gemmkit.lang.functions import Frozen

__all__ = [
    "PARAMETER_FORMATS",
    "BoundLaunch",
    "LaunchError",
    "LoadedKernel",
    "launch_arguments",
    "load",
    "parameter_struct",
    "validate",
]


_REMEMBERED = 64  # packed addresses that a kernel keeps
_NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT
_STICKY = (
    "ILLEGAL_ADDRESS",
    "LAUNCH_FAILED",
    "MISALIGNED_ADDRESS",
    "ILLEGAL_INSTRUCTION",
    "HARDWARE_STACK_ERROR",
)

Entry = Callable[[Any, Any, Any, None], int]  # cuLaunchKernelEx
Expand = Callable[[tuple[Any, ...]], Sequence[Any]]

#: The launch structure, a pointer to it and the pointers to the parameters, both as the driver takes them; the parameters'
#: buffer, the addresses that it was packed for, and whose those are.
_Frame = list[Any]


class LaunchError(RuntimeError):
    """The driver refused a launch, or the loading or setting up of a kernel."""


@functools.lru_cache(maxsize=1)
def _entry() -> Any:
    """``cuLaunchKernelEx`` through ctypes: no argtypes, since every argument is a ready ctypes object."""
    library = ctypes.CDLL(
        "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    )  # releases the GIL in a call
    entry = library.cuLaunchKernelEx
    entry.restype = ctypes.c_int
    return entry


def load(cubin: bytes, name: str) -> LoadedKernel:
    """Load the kernel ``name`` of a cubin (or of the PTX that ``assemble`` kept for the driver).

    Makes the current device's primary context current when none is. Raises LaunchError when the image is not
    for this device or has no such kernel, RuntimeError when there is no GPU.
    """
    device.ensure_context()
    from cuda.core import ObjectCode

    make = ObjectCode.from_cubin if cubin.startswith(b"\x7fELF") else ObjectCode.from_ptx
    try:
        return LoadedKernel(make(cubin).get_kernel(name), name)
    except Exception as error:  # cuda.core's own error class is not public
        raise LaunchError(
            f"kernel {name!r} could not be loaded on {device.current().name}: {error}"
        ) from error


class LoadedKernel:
    """A kernel on the device. ``kernel`` is cuda.core's object, which keeps the code loaded."""

    def __init__(self, kernel: Any, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self._lock = threading.Lock()
        self._dynamic_limit: dict[
            int, int
        ] = {}  # device ordinal -> bytes its dynamic shared memory was raised to

    def bind(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared_memory: int,
        parameters: Sequence[str],
        cluster: Sequence[int] | None = None,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> BoundLaunch:
        """Prepare launches on the current device.

        ``grid`` counts blocks (also with a ``cluster``), ``block`` threads, ``cluster`` blocks; one to three
        extents each. ``shared_memory`` is the dynamic part, in bytes; the kernel's limit is raised to it.
        ``parameters`` has one code of ``PARAMETER_FORMATS`` for each flattened kernel parameter, as Numba
        passes them. With ``dependent`` the kernel may start while the one before it in the stream still
        runs: it must call `gemmkit.ptx.wgmma.grid_wait` before it touches what that one writes. Blocks of a
        ``cooperative`` one wait for each other: it starts when all can be on multiprocessors.

        Raises ValueError, naming the value and the limit, when the device or the kernel cannot do it.

        Example::

            bound = kernel.bind((64, 64), (128,), 98304, ["u64", "u64", "i32", "f32"])
            bound.launch(stream, (a.data.ptr, d.data.ptr, n, alpha))
        """
        ordinal = device.ensure_context()
        limits, properties = device.current(), self.kernel.attributes[ordinal]
        grid3, block3 = dim3(grid, "grid"), dim3(block, "block")
        cluster3 = None if cluster is None else dim3(cluster, "cluster")
        validate(
            limits, grid3, block3, shared_memory, cluster3, static_shared_memory=properties.shared_size_bytes
        )
        threads, able = block3[0] * block3[1] * block3[2], properties.max_threads_per_block
        if threads > able:
            raise ValueError(
                f"block={block3} has {threads} threads, but kernel {self.name!r} can run at most {able} "
                f"a block (it takes {properties.num_regs} registers a thread); use fewer threads"
            )
        self._check_parameters(parameters)
        with self._lock:
            if shared_memory > self._dynamic_limit.get(ordinal, 0):
                self._raise_dynamic_limit(ordinal, shared_memory)
                self._dynamic_limit[ordinal] = shared_memory
        function = self._function()
        return BoundLaunch(self, ordinal, grid3, block3, shared_memory, tuple(parameters), cluster3, function,
                           dependent, cooperative)

    def _check_parameters(self, parameters: Sequence[str]) -> None:
        for code in parameters:
            if code not in PARAMETER_FORMATS:
                raise ValueError(f"parameters has {code!r}; known codes are {', '.join(PARAMETER_FORMATS)}")
        sizes = [struct.calcsize("=" + PARAMETER_FORMATS[code][0]) for code in parameters]
        taken = [int(info.size) for info in self.kernel.arguments_info]
        if sizes != taken:
            raise ValueError(
                f"parameters={list(parameters)} has sizes {sizes}, but kernel {self.name!r} takes "
                f"sizes {taken} (bytes)"
            )

    def _function(self) -> int:
        """The CUfunction of the current context: launched a little faster than the CUkernel, and loaded by
        now, so that a first launch under graph capture has nothing left to load."""
        from cuda.bindings import driver

        status, function = driver.cuKernelGetFunction(self.kernel.handle)
        if int(status) != 0:
            raise LaunchError(f"{status.name} while loading kernel {self.name!r} on {device.current().name}")
        return int(function)

    def _raise_dynamic_limit(self, ordinal: int, size: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _, handle = driver.cuDeviceGet(ordinal)
        (status,) = driver.cuKernelSetAttribute(attribute, size, self.kernel.handle, handle)
        if int(status) != 0:
            raise LaunchError(
                f"{status.name} while raising the shared memory of kernel {self.name!r} to {size} bytes"
            )


class BoundLaunch:
    """A kernel with its grid, block and shared memory: what is left to say is the stream and the values.

    ``launch(stream_handle, values)`` is a plain function, the fastest to call; calling the object does the
    same. It raises LaunchError when the driver refuses, ValueError when ``values`` do not fit the parameters.
    Arrays behind the pointers in ``values`` must live until the kernel has run, as for any asynchronous
    launch.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        ordinal: int,
        grid: Dim3,
        block: Dim3,
        shared_memory: int,
        parameters: tuple[str, ...],
        cluster: Dim3 | None,
        function: int,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        self.kernel = kernel
        self.ordinal = ordinal
        self.grid = grid
        self.block = block
        self.shared_memory = shared_memory
        self.parameters = parameters
        self.cluster = cluster
        self.dependent = dependent
        self.cooperative = cooperative
        self.function = function
        self.entry: Entry = _on_its_device(_entry(), ordinal)
        self.packer, self._offsets = parameter_struct(tuple(parameters))
        self.frames: list[_Frame] = []                 # of launches in any grid

    @functools.cached_property
    def launch(self) -> Callable[[int, Sequence[int | float | bytes]], None]:
        return _launcher(self)

    def __call__(self, stream_handle: int, values: Sequence[int | float | bytes]) -> None:
        self.launch(stream_handle, values)

    def prepare(
        self, values: Sequence[int | float | bytes], slots: Sequence[int], expand: Expand = tuple
    ) -> Callable[[int, tuple[Any, ...]], None]:
        """``f(stream_handle, addresses)``: launches with ``values``, but at the parameters ``slots`` with what ``expand``
        makes of the addresses. What was packed for addresses is remembered: it is the fastest launch there is."""
        return _prepared(self, values, slots, expand)

    def in_grid(self, blocks: int) -> BoundLaunch:
        """The same kernel in another grid: nothing is asked of it again (some 15 calls of the driver), and launches have
        their buffers in common. Raises ValueError for a grid that cannot be."""
        made, grid = object.__new__(BoundLaunch), (blocks, 1, 1)
        validate_grid(grid, self.cluster)
        vars(made).update(vars(self), grid=grid)
        vars(made).pop("launch", None)
        return made

    def frame(self) -> _Frame:
        """What one launch at a time needs."""
        buffer = ctypes.create_string_buffer(max(self.packer.size, 1))
        first = ctypes.addressof(buffer)
        config = DriverLaunchConfig(self.grid, self.block, self.shared_memory)
        wanted = attributes(self.cluster, self.dependent, self.cooperative)
        if wanted:
            config.attributes = (Attribute * len(wanted))(*wanted)  # kept alive by config
            config.attribute_count = len(wanted)
        pointers = (ctypes.c_void_p * max(len(self._offsets), 1))(*[first + offset for offset in self._offsets])
        return [config, ctypes.byref(config), pointers, buffer, None, None]

    def reference(self, stream_handle: int, values: Sequence[int | float | bytes]) -> None:
        """The same launch by ``cuda.core.launch``; tensor maps cannot be passed this way."""
        from cuda.core import Stream, launch

        config, typed = launch_arguments(self, values)
        launch(Stream.from_handle(stream_handle), config, self.kernel.kernel, *typed)

    def _fail(self, status: int) -> None:
        from cuda.bindings import driver

        try:
            name = driver.CUresult(status).name
        except ValueError:
            name = f"CUDA error {status}"
        earlier = " (a kernel launched earlier went wrong)" if name.endswith(_STICKY) else ""
        cluster = "" if self.cluster is None else f", cluster={self.cluster}"
        raise LaunchError(
            f"{name}{earlier} at the launch of kernel {self.kernel.name!r} on device {self.ordinal} with "
            f"grid={self.grid}, block={self.block}{cluster}, shared_memory={self.shared_memory} bytes"
        )

    def _misfit(self, values: Sequence[Any], error: Exception) -> None:
        raise ValueError(
            f"values={tuple(values)!r} do not fit the parameters {list(self.parameters)} of kernel "
            f"{self.kernel.name!r}: {error}"
        ) from None


def launch_arguments(bound: BoundLaunch, values: Sequence[int | float | bytes]) -> tuple[Any, list[Any]]:
    """What ``cuda.core.launch`` takes for ``bound``: its configuration, and the values as ctypes objects."""
    from cuda.core import LaunchConfig

    grid, cluster = bound.grid, bound.cluster
    if cluster is not None:  # cuda.core counts the grid in clusters
        grid = (grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2])
    config = LaunchConfig(grid=grid, block=bound.block, cluster=cluster, shmem_size=bound.shared_memory,
                          **({"is_cooperative": True} if bound.cooperative else {}))
    letters = [PARAMETER_FORMATS[code][0] for code in bound.parameters]
    return config, [CTYPES[letter](value) for letter, value in zip(letters, values, strict=True)]


def _launcher(bound: BoundLaunch) -> Callable[[int, Sequence[int | float | bytes]], None]:
    """The launch function of ``bound``. A closure: its variables cost less than attributes of an object."""
    pack, entry, frames, grid = bound.packer.pack_into, bound.entry, bound.frames, bound.grid
    function = ctypes.c_void_p(bound.function)

    def launch(stream_handle: int, values: Sequence[int | float | bytes]) -> None:
        try:
            mine = frames.pop()
        except IndexError:
            mine = bound.frame()
        config, at_config, pointers, buffer, _, _ = mine
        mine[5] = None
        try:
            pack(buffer, 0, *values)
        except (struct.error, TypeError, OverflowError) as error:
            bound._misfit(values, error)
        config.grid, config.stream = grid, stream_handle
        status = entry(at_config, function, pointers, None)
        if status:
            _again(bound, status, at_config, function, pointers)
        frames.append(mine)

    return launch


def _prepared(
    bound: BoundLaunch, values: Sequence[int | float | bytes], slots: Sequence[int], expand: Expand
) -> Callable[[int, tuple[Any, ...]], None]:
    """What `BoundLaunch.prepare` returns. A frame has the values of the launch that used it last: what they are is what
    addresses they are for, and in whose ``images``."""
    pack, entry, frames, grid = bound.packer.pack, bound.entry, bound.frames, bound.grid
    try:
        pack(*values)
    except (struct.error, TypeError, OverflowError) as error:
        bound._misfit(values, error)
    images: dict[tuple[Any, ...], bytes] = {}
    function = ctypes.c_void_p(bound.function)

    def image_of(addresses: tuple[Any, ...]) -> bytes:
        if len(images) >= _REMEMBERED:
            images.clear()
        filled = list(values)
        for slot, value in zip(slots, expand(addresses)):
            filled[slot] = value
        images[addresses] = made = pack(*filled)
        return made

    def launch(stream_handle: int, addresses: tuple[Any, ...]) -> None:
        try:
            mine = frames.pop()
        except IndexError:
            mine = bound.frame()
        config, at_config, pointers, buffer, packed, whose = mine
        if whose is not images:
            config.grid, mine[5], packed = grid, images, None
        if addresses != packed:
            buffer.raw = images.get(addresses) or image_of(addresses)
            mine[4] = addresses
        config.stream = stream_handle
        status = entry(at_config, function, pointers, None)
        if status:
            _again(bound, status, at_config, function, pointers)
        frames.append(mine)

    return launch


def _again(bound: BoundLaunch, status: int, at_config: Any, function: Any, pointers: Any) -> None:
    """A launch that the driver refused: tried once more where the thread has not used the GPU yet."""
    if status in _NO_CONTEXT:
        device.ensure_context(bound.ordinal)
        status = bound.entry(at_config, function, pointers, None)
    if status:
        bound._fail(status)


def _on_its_device(entry: Entry, ordinal: int) -> Entry:
    """``entry`` with the kernel's device current, where the machine has several: the driver launches in the current context,
    which may be another device's than the arrays'."""
    if device.count() < 2:
        return entry
    from cuda.bindings import driver

    def enter_there(config: Any, function: Any, pointers: Any, extra: None) -> int:
        status, here = driver.cuCtxGetDevice()
        if int(status) == 0 and int(here) == ordinal:
            return entry(config, function, pointers, extra)
        with device.made_current(ordinal):
            return entry(config, function, pointers, extra)

    return enter_there


# --------------------------------------------------------------------------------------------------
# Device memory that belongs to a stream, for kernels whose blocks hand numbers to each other.
#
# A kernel that needs a workspace holds descriptions of arrays without an address (`described`); a launch puts in the
# addresses of the stream's own arrays (`addresses`). Launches of one stream run one after the other, so all plans share
# these.
#
# * **Memory.** One allocation for each device, stream, role and size class (a power of two), made at the first launch that
#   needs it and kept until the process ends. In a stream they add up to less than twice the largest of each role.
# * **Streams.** Each has its own, told apart by the driver's id where it gives one (handles are used again).
# * **CUDA graphs.** What is captured keeps its addresses, and a graph may run while the stream goes on, so each capture has
#   its own workspace for each stream in it. Launches of one graph do not overlap. A graph that is instantiated twice
#   must not
#   run in both instances at a time. While a stream is captured only its handle tells it from others: ``cuStreamGetId`` would
#   end the capture (seen on driver 580).
# * **Counters** are set to 0 once, when they are allocated, by a private stream that is awaited; kernels leave them at 0.
#   Nothing is cleared by a launch, and no stream of the caller's is synchronised.
#
# >>> described("counts", 8, np.dtype(np.uint32)).shape
# (8,)

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


def described(role: str, count: int, dtype: np.dtype[Any], columns: int | None = None) -> Any:
    """A workspace of ``count`` elements, or of as many rows of ``columns``, as a component holds it: its ArrayInfo."""
    shape, strides = ((count,), (1,)) if columns is None else ((count, columns), (columns, 1))
    return ArrayInfo(PLACES[role], shape, strides, dtype, -1, False, "workspace")


def spaces_of(leaves: list[Any], arrays: list[ArrayInfo]) -> list[Space]:
    """The workspaces among a kernel's values and arrays."""
    nbytes = {info.pointer: math.prod(info.shape) * info.dtype.itemsize for info in arrays if info.library == "workspace"}
    return [Space(slot, _ROLES[value], nbytes[value]) for slot, value in enumerate(leaves) if value in nbytes]


def on_host(component: Any) -> Any:
    """The component with NumPy arrays for its workspaces, counters at 0: what the emulator takes."""
    changed: dict[str, Any] = {}
    for name, value in field_values(component).items():
        if isinstance(value, ArrayInfo) and value.library == "workspace":
            made: Any = np.zeros(value.shape, value.dtype)
            if _ROLES[value.pointer] != "counts":
                made.view(np.uint8)[...] = 0xFF
            changed[name] = made
        elif isinstance(value, Component) and (inner := on_host(value)) is not value:
            changed[name] = inner
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
            raise MemoryError(f"the CUDA driver answered {status.name} to a workspace of {size} bytes; use fewer splits")
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
                          f"({how}); use fewer splits, or StreamK(blocks=...)")


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


# --------------------------------------------------------------------------------------------------
# A kernel with any arguments, compiled and loaded when it is first launched.
#
# Arguments are `Frozen` values: components, arrays, scalars, tensor maps. Numba flattens them into numbers; these stay as
# they are, but for those that a launch puts in (addresses of arrays, tensor maps), which are found by `Launchable.slot`.
#
#     kernel = Launchable(saxpy, [freeze_scalar(np.float32(2)), freeze_array(x), freeze_array(y)], threads=128, blocks=8,
#                         target=gemmkit.runtime.device.current(), ordinal=0)
#     launch = kernel.bind()                       # compiles, or finds the kernel in the cache
#     launch.launch(stream, kernel.values)

@dataclass
class Launchable:
    """``kernel`` on ``blocks`` thread blocks of ``threads`` threads, in clusters of ``cluster``.

    ``target`` is what it is compiled for, and ``ordinal`` the device that it is loaded on. With ``dependent`` a launch may
    begin before the kernel before it in the stream has ended; the kernel waits for that itself (``griddepcontrol.wait``).
    With ``waits`` blocks wait for each other: all must be on the device's multiprocessors at once, or `bind` refuses.
    ``registers`` says how many a thread of each warp ends with, where warps give and take some. ``like``: the one that this
    is in another grid (`resized`).
    """

    kernel: Callable[..., None]
    arguments: Sequence[Frozen]
    threads: int
    blocks: int
    target: device.DeviceInfo
    ordinal: int
    shared_bytes: int = 0
    cluster: int = 1
    blocks_per_sm: int = 1
    dependent: bool = False
    waits: bool = False
    registers: Sequence[int] | None = None
    like: Launchable | None = None
    formats: list[str] = field(init=False)
    values: list[Any] = field(init=False)
    _bound: Any = field(init=False, default=None, repr=False, compare=False)
    _entry: Any = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        leaves = [leaf for argument in self.arguments for leaf in argument.leaves]
        self.formats, self.values = [code for code, _ in leaves], [value for _, value in leaves]

    @property
    def slots(self) -> list[int | None]:
        """Where the first number of each argument stands among ``values``; None if it has none."""
        counts = [len(argument.leaves) for argument in self.arguments]
        return [at if count else None for at, count in zip(itertools.accumulate(counts, initial=0), counts)]

    def slot(self, argument: int) -> int | None:
        """That of the ``argument``-th."""
        return self.slots[argument]

    def resized(self, arguments: Sequence[Frozen], blocks: int) -> Launchable | None:
        """The same kernel in another grid, with other numbers: it is compiled, loaded and bound with this one. None if
        arguments are of other kinds, because their code is another's."""
        if self.waits or self.blocks < 1:
            return None
        for x, y in zip(arguments, self.arguments, strict=True):
            if x is not y and (x.fingerprint != y.fingerprint or (x.kind is not y.kind and str(x.kind) != str(y.kind))):
                return None
        made = object.__new__(Launchable)
        vars(made).update(vars(self), arguments=arguments, blocks=blocks, like=self, _bound=None)
        made.values = [value for argument in arguments for _, value in argument.leaves]
        return made

    @property
    def is_bound(self) -> bool:
        return self._bound is not None

    def forget_code(self) -> None:
        """Keep no function alive, nor the arrays that it captured: what was compiled is not looked at again."""
        for argument in self.arguments:
            argument.guards, argument.captures = (), ()

    def entry(self) -> Any:
        """The compiled kernel, found in the cache or compiled now (`gemmkit.runtime.compile.cubin_of`)."""
        from gemmkit.runtime.compile import cubin_of

        if self._entry is None:
            self._entry = self.like.entry() if self.like is not None else cubin_of(
                self.kernel, self.arguments, self.threads, self.target, self.blocks_per_sm)
        return self._entry

    @property
    def code_key(self) -> tuple[Any, ...]:
        """What its machine code depends on, which tells it from others."""
        arguments = tuple((str(argument.kind), argument.fingerprint) for argument in self.arguments)
        return self.kernel, self.threads, self.blocks_per_sm, self.target.arch_name, arguments

    def bind(self) -> Any:
        """The kernel as a `gemmkit.runtime.launch.BoundLaunch`: compiled, or found in the cache, and loaded, once.

        Raises CodeChanged where code has changed since the arguments were frozen, and what compiling and loading raise.
        """
        if self._bound is not None:
            return self._bound
        if self.like is not None:
            self._bound = self.like.bind().in_grid(self.blocks)
            return self._bound
        cluster = (self.cluster, 1, 1) if self.cluster > 1 else None
        with device.made_current(self.ordinal):
            kernel = _loaded(self.entry().cubin)
            bound = kernel.bind((self.blocks, 1, 1), (self.threads, 1, 1), self.shared_bytes, self.formats, cluster=cluster,
                                dependent=self.dependent, cooperative=self.waits)
            if self.waits:
                check_residency(kernel, self.ordinal, self.blocks, self.threads, self.shared_bytes,
                                          self.cluster)
            self._bound = bound
            return bound


_kernels: dict[tuple[int, bytes], Any] = {}


def _loaded(cubin: bytes) -> Any:
    """The kernel on the current device, loaded once."""
    from gemmkit.runtime.compile import ENTRY

    key = (device.current_ordinal(), cubin)
    found = _kernels.get(key)
    return found if found is not None else _kernels.setdefault(key, load(cubin, ENTRY))
