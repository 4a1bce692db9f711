"""A cubin as a kernel that is launched in about two microseconds of host time.

A launch has to say three things to the driver: which kernel and how many threads (known when a plan is made),
on which stream, and with which values (known at the call). ``LoadedKernel.bind`` prepares the first once, as
the driver's own launch structure; the ``launch`` of what it returns packs the values with one precompiled
``struct`` into a buffer whose pointers are ready, sets the stream and calls the driver through ctypes.
``BoundLaunch.prepare`` is for launches that differ in addresses alone: all else is packed once, and a launch
with addresses that are known packs nothing. Nothing is allocated, checked twice or synchronised, so a
launch can be captured into a CUDA graph.
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
from gemmkit.runtime.launch_config import (
    CTYPES,
    PARAMETER_FORMATS,
    Attribute,
    Config,
    Dim3,
    attributes,
    dim3,
    parameter_struct,
    validate,
)

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

#: The launch structure, a pointer to it and the pointers to the parameters, both as the driver takes them; the buffer of the
#: parameters that change, and the addresses it was packed for.
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
        runs: it must call `gemmkit.ptx.warpgroup.grid_wait` before it touches what that one writes. Blocks of a
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
        self.launch = _launcher(self)

    def __call__(self, stream_handle: int, values: Sequence[int | float | bytes]) -> None:
        self.launch(stream_handle, values)

    def prepare(
        self, values: Sequence[int | float | bytes], slots: Sequence[int], expand: Expand = tuple
    ) -> Callable[[int, tuple[Any, ...]], None]:
        """``f(stream_handle, addresses)``: launches with ``values``, but at the parameters ``slots`` (of 64 bits, or the
        128 bytes of a tensor map) with what ``expand`` makes of the addresses. All else is packed beforehand, and what was
        packed for addresses is remembered: it is the fastest launch there is."""
        return _prepared(self, values, slots, expand)

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
    packer, offsets = parameter_struct(bound.parameters)
    pack, entry = packer.pack_into, bound.entry
    frames: list[_Frame] = []
    function = ctypes.c_void_p(bound.function)

    def fresh() -> _Frame:
        buffer = ctypes.create_string_buffer(max(packer.size, 1))
        return _frame(bound, buffer, [ctypes.addressof(buffer) + offset for offset in offsets])

    def launch(stream_handle: int, values: Sequence[int | float | bytes]) -> None:
        try:
            mine = frames.pop()
        except IndexError:
            mine = fresh()
        config, at_config, pointers, buffer, _ = mine
        try:
            pack(buffer, 0, *values)
        except (struct.error, TypeError, OverflowError) as error:
            bound._misfit(values, error)
        config.stream = stream_handle
        status = entry(at_config, function, pointers, None)
        if status:
            _again(bound, status, at_config, function, pointers)
        frames.append(mine)

    return launch


def _prepared(
    bound: BoundLaunch, values: Sequence[int | float | bytes], slots: Sequence[int], expand: Expand
) -> Callable[[int, tuple[Any, ...]], None]:
    """What `BoundLaunch.prepare` returns. All launches share one buffer for the values that stay. Each frame has one for
    those at ``slots``, and the addresses that these are for."""
    packer, offsets = parameter_struct(bound.parameters)
    constants = ctypes.create_string_buffer(max(packer.size, 1))
    try:
        packer.pack_into(constants, 0, *values)
    except (struct.error, TypeError, OverflowError) as error:
        bound._misfit(values, error)
    changing, places = parameter_struct([bound.parameters[slot] for slot in slots])
    entry, pack = bound.entry, changing.pack
    frames: list[_Frame] = []
    images: dict[tuple[Any, ...], bytes] = {}
    function = ctypes.c_void_p(bound.function)

    def image_of(addresses: tuple[Any, ...]) -> bytes:
        if len(images) >= _REMEMBERED:
            images.clear()
        images[addresses] = made = pack(*expand(addresses))
        return made

    def fresh() -> _Frame:
        buffer = (ctypes.c_char * changing.size)()
        pointers = [ctypes.addressof(constants) + offset for offset in offsets]
        for slot, place in zip(slots, places):
            pointers[slot] = ctypes.addressof(buffer) + place
        return _frame(bound, buffer, pointers)

    def launch(stream_handle: int, addresses: tuple[Any, ...]) -> None:
        try:
            mine = frames.pop()
        except IndexError:
            mine = fresh()
        config, at_config, pointers, buffer, packed = mine
        if addresses != packed:
            buffer.raw = images.get(addresses) or image_of(addresses)
            mine[4] = addresses
        config.stream = stream_handle
        status = entry(at_config, function, pointers, None)
        if status:
            _again(bound, status, at_config, function, pointers)
        frames.append(mine)

    return launch


def _frame(bound: BoundLaunch, buffer: Any, addresses: Sequence[int]) -> _Frame:
    """What one launch at a time needs, with parameters at these addresses."""
    config = Config(bound.grid, bound.block, bound.shared_memory)
    wanted = attributes(bound.cluster, bound.dependent, bound.cooperative)
    if wanted:
        config.attributes = (Attribute * len(wanted))(*wanted)  # kept alive by config
        config.attribute_count = len(wanted)
    pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
    return [config, ctypes.byref(config), pointers, buffer, None]


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
