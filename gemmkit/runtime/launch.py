"""A cubin as a kernel that is launched in about two microseconds of host time.

A launch has to say three things to the driver: which kernel and how many threads (known when a plan is made),
on which stream, and with which values (known at the call). ``LoadedKernel.bind`` prepares the first once, as
the driver's own launch structure; the ``launch`` of what it returns packs the values with one precompiled
``struct`` into a buffer whose pointers are ready, sets the stream and calls the driver through ctypes.
Nothing is allocated, checked twice or synchronised, so a launch can be captured into a CUDA graph.
``BoundLaunch.reference`` does the same by ``cuda.core.launch``, slower: it is what the fast route is tested
against.

A buffer belongs to one launch at a time: a call takes one from a pool, or makes one, and puts it back.
``list.pop`` and ``list.append`` are atomic, so threads, and a finaliser that launches in the middle of a
launch, never share one.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gemmkit.runtime import device
from gemmkit.runtime.device import DeviceInfo

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

#: Format codes of kernel parameters -> (struct format, alignment in bytes). Half-precision values are raw
#: 16-bit patterns; ``tensor_map`` is the 128 bytes of a CUtensorMap, passed by value.
PARAMETER_FORMATS: dict[str, tuple[str, int]] = {
    "bool": ("B", 1), "i8": ("b", 1), "u8": ("B", 1),
    "i16": ("h", 2), "u16": ("H", 2), "f16": ("H", 2), "bf16": ("H", 2),
    "i32": ("i", 4), "u32": ("I", 4), "f32": ("f", 4),
    "i64": ("q", 8), "u64": ("Q", 8), "f64": ("d", 8),
    "tensor_map": ("128s", 64),
}  # fmt: skip

_CTYPES: dict[str, Any] = {
    "B": ctypes.c_uint8, "b": ctypes.c_int8, "h": ctypes.c_int16, "H": ctypes.c_uint16, "i": ctypes.c_int32,
    "I": ctypes.c_uint32, "q": ctypes.c_int64, "Q": ctypes.c_uint64, "f": ctypes.c_float,
    "d": ctypes.c_double,
}  # fmt: skip

_Dim3 = tuple[int, int, int]
_MAX_GRID: _Dim3 = (2**31 - 1, 65535, 65535)
_MAX_BLOCK: _Dim3 = (1024, 1024, 64)
_MAX_CLUSTER = 8  # blocks a cluster that every device with clusters takes
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT
_STICKY = (
    "ILLEGAL_ADDRESS",
    "LAUNCH_FAILED",
    "MISALIGNED_ADDRESS",
    "ILLEGAL_INSTRUCTION",
    "HARDWARE_STACK_ERROR",
)


class LaunchError(RuntimeError):
    """The driver refused a launch, or the loading or setting up of a kernel."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute holding a cluster's dimensions."""

    _fields_ = (("id", ctypes.c_uint64), ("dimensions", ctypes.c_uint32 * 3), ("rest", ctypes.c_uint8 * 52))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_memory", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


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
    ) -> BoundLaunch:
        """Prepare launches on the current device.

        ``grid`` counts blocks (also with a ``cluster``), ``block`` threads, ``cluster`` blocks; one to three
        extents each. ``shared_memory`` is the dynamic part, in bytes; the kernel's limit is raised to it.
        ``parameters`` has one code of ``PARAMETER_FORMATS`` for each flattened kernel parameter, as Numba
        passes them.

        Raises ValueError, naming the value and the limit, when the device or the kernel cannot do it.

        Example::

            bound = kernel.bind((64, 64), (128,), 98304, ["u64", "u64", "i32", "f32"])
            bound.launch(stream, (a.data.ptr, d.data.ptr, n, alpha))
        """
        ordinal = device.ensure_context()
        limits, attributes = device.current(), self.kernel.attributes[ordinal]
        grid3, block3 = _dim3(grid, "grid"), _dim3(block, "block")
        cluster3 = None if cluster is None else _dim3(cluster, "cluster")
        validate(
            limits, grid3, block3, shared_memory, cluster3, static_shared_memory=attributes.shared_size_bytes
        )
        threads, able = block3[0] * block3[1] * block3[2], attributes.max_threads_per_block
        if threads > able:
            raise ValueError(
                f"block={block3} has {threads} threads, but kernel {self.name!r} can run at most {able} "
                f"a block (it takes {attributes.num_regs} registers a thread); use fewer threads"
            )
        self._check_parameters(parameters)
        with self._lock:
            if shared_memory > self._dynamic_limit.get(ordinal, 0):
                self._raise_dynamic_limit(ordinal, shared_memory)
                self._dynamic_limit[ordinal] = shared_memory
        function = self._function()
        return BoundLaunch(self, ordinal, grid3, block3, shared_memory, tuple(parameters), cluster3, function)

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
        grid: _Dim3,
        block: _Dim3,
        shared_memory: int,
        parameters: tuple[str, ...],
        cluster: _Dim3 | None,
        function: int,
    ) -> None:
        self.kernel = kernel
        self.ordinal = ordinal
        self.grid = grid
        self.block = block
        self.shared_memory = shared_memory
        self.parameters = parameters
        self.cluster = cluster
        self._function = function
        self.launch = _launcher(self, _entry(), function)

    def __call__(self, stream_handle: int, values: Sequence[int | float | bytes]) -> None:
        self.launch(stream_handle, values)

    def prepare(
        self, values: Sequence[int | float | bytes], slots: Sequence[int]
    ) -> Callable[[int, Sequence[int]], None]:
        """``f(stream_handle, addresses)``: launches with ``values``, but the addresses at the parameters ``slots``
        (of 64 bits). All else is packed beforehand, which makes it the fastest launch there is."""
        pack = parameter_struct(self.parameters)[0].pack_into
        frames: list[_Frame] = []
        start = _starter(self, _entry(), self._function)
        values = tuple(values)

        def launch(stream_handle: int, addresses: Sequence[int]) -> None:
            try:
                mine = frames.pop()
            except IndexError:
                mine = _frame(self, slots)
                try:
                    pack(mine[0], 0, *values)
                except (struct.error, TypeError, OverflowError) as error:
                    self._misfit(values, error)
            for cell, address in zip(mine[4], addresses):
                cell.value = address
            start(stream_handle, mine)
            frames.append(mine)

        return launch

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
    config = LaunchConfig(grid=grid, block=bound.block, cluster=cluster, shmem_size=bound.shared_memory)
    letters = [PARAMETER_FORMATS[code][0] for code in bound.parameters]
    return config, [_CTYPES[letter](value) for letter, value in zip(letters, values, strict=True)]


def _launcher(
    bound: BoundLaunch, entry: Any, handle: int
) -> Callable[[int, Sequence[int | float | bytes]], None]:
    """The launch function of ``bound``. A closure: its variables cost less than attributes of an object."""
    pack = parameter_struct(bound.parameters)[0].pack_into
    frames: list[_Frame] = []
    start = _starter(bound, entry, handle)

    def launch(stream_handle: int, values: Sequence[int | float | bytes]) -> None:
        try:
            mine = frames.pop()
        except IndexError:
            mine = _frame(bound)
        try:
            pack(mine[0], 0, *values)
        except (struct.error, TypeError, OverflowError) as error:
            bound._misfit(values, error)
        start(stream_handle, mine)
        frames.append(mine)

    return launch


_Frame = tuple[Any, Any, Any, Any, tuple[Any, ...]]


def _frame(bound: BoundLaunch, slots: Sequence[int] = ()) -> _Frame:
    """A parameter buffer, the launch structure, the pointers to both as the driver takes them, and the 64-bit
    parameters at ``slots`` as ctypes numbers that live in the buffer."""
    packer, offsets = parameter_struct(bound.parameters)
    buffer = ctypes.create_string_buffer(max(packer.size, 1))
    base = ctypes.addressof(buffer)
    pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
    config = _Config(bound.grid, bound.block, bound.shared_memory)
    if bound.cluster is not None:
        config.attributes = ctypes.pointer(_Attribute(_CLUSTER_DIMENSION, bound.cluster))  # kept alive by config
        config.attribute_count = 1
    cells = tuple(ctypes.c_uint64.from_buffer(buffer, offsets[slot]) for slot in slots)
    return buffer, config, ctypes.byref(config), pointers, cells


def _starter(bound: BoundLaunch, entry: Any, handle: int) -> Callable[[int, _Frame], None]:
    function = ctypes.c_void_p(handle)

    def start(stream_handle: int, mine: _Frame) -> None:
        mine[1].stream = stream_handle
        status = entry(mine[2], function, mine[3], None)
        if status:
            if status in _NO_CONTEXT:  # a thread that has not used the GPU yet
                device.ensure_context(bound.ordinal)
                status = entry(mine[2], function, mine[3], None)
            if status:
                bound._fail(status)

    return start


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


def _dim3(extents: Sequence[int], name: str) -> _Dim3:
    if not 1 <= len(extents) <= 3:
        raise ValueError(f"{name}={tuple(extents)} must have one to three extents")
    x, y, z = (*(int(extent) for extent in extents), 1, 1)[:3]
    return x, y, z


def validate(
    limits: DeviceInfo,
    grid: _Dim3,
    block: _Dim3,
    shared_memory: int,
    cluster: _Dim3 | None = None,
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
