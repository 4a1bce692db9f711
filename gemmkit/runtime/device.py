"""What GPU there is, what it allows, and its streams.

Importing this module loads no driver and makes no context; asking ``available()`` initialises the driver, and
only ``ensure_context()`` makes a context current (the device's primary one, which CuPy and PyTorch share).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import multiprocessing
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from typing import Any

from gemmkit.lang.deferred import missing, require

__all__ = [
    "A10", "A100", "B200", "GPUS", "H100", "L4", "RTX_5090", "T4", "gpu",
]


@dataclass(frozen=True)
class DeviceInfo:
    """The limits of one GPU. Memory sizes are in bytes.

    ``shared_memory_per_block`` is the opt-in maximum a kernel may ask for, static and dynamic together;
    ``registers_per_sm`` counts 32-bit registers; ``reserved_shared_memory`` is what the driver keeps of each block's.
    """

    name: str
    arch: tuple[int, int]
    sm_count: int
    shared_memory_per_block: int
    shared_memory_per_sm: int
    max_threads_per_block: int
    registers_per_sm: int
    l2_bytes: int
    max_threads_per_sm: int = 2048
    max_blocks_per_sm: int = 32
    reserved_shared_memory: int = 1024

    @property
    def arch_name(self) -> str:
        """The name ``ptxas -arch`` knows the GPU by, e.g. ``"sm_90a"`` for (9, 0).

        From Hopper on it is the architecture-specific target (suffix ``a``): wgmma exists only there.
        """
        major, minor = self.arch
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def starts_early(self) -> bool:
        """Whether a launch may begin before the kernel before it has ended (programmatic dependent launch): from Hopper on.
        Its kernel calls `gemmkit.ptx.wgmma.grid_wait` before it touches what that one may write."""
        return self.arch >= (9, 0)


#: An H100 SXM: what a machine with no GPU compiles for.
H100 = DeviceInfo(
    name="NVIDIA H100 80GB HBM3",
    arch=(9, 0),
    sm_count=132,
    shared_memory_per_block=232448,
    shared_memory_per_sm=233472,
    max_threads_per_block=1024,
    registers_per_sm=65536,
    l2_bytes=50 * 2**20,
)


@functools.lru_cache(maxsize=1)
def _absence() -> str | None:
    """Why no GPU can be used, or None when one can."""
    if missing():
        return f"{', '.join(missing())}: not installed"
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return f"cuInit answered {status.name}"
        status, count = driver.cuDeviceGetCount()
        if status != driver.CUresult.CUDA_SUCCESS:
            return f"cuDeviceGetCount answered {status.name}"
        return None if count else "the driver lists no device"
    except Exception as error:  # a missing driver, a missing or broken package: all mean 'no GPU here'
        return f"{type(error).__name__}: {error}"


def absence() -> str | None:
    """Why no GPU can be used, or None when one can. Asked once a process; never raises."""
    return _absence()


def available() -> bool:
    """Whether a GPU and its driver can be used. Asked once a process; never raises.

    >>> isinstance(available(), bool)
    True
    """
    return _absence() is None


@functools.lru_cache(maxsize=1)
def count() -> int:
    """How many GPUs can be used; 0 without a GPU or driver."""
    if not available():
        return 0
    from cuda.bindings import driver

    return int(value_of(driver.cuDeviceGetCount()))


def _require() -> None:
    require("A GPU is driven")
    reason = _absence()
    if reason is not None:
        raise RuntimeError(
            f"no GPU can be used here ({reason}); install an NVIDIA driver, make a device visible "
            "(CUDA_VISIBLE_DEVICES), or run in the emulator with `with gemmkit.emulate():`"
        )


def value_of(outcome: tuple[Any, ...]) -> Any:
    """What a call of the driver returned beside its status (None: nothing); RuntimeError for a status other than success."""
    status, *values = outcome
    if int(status) != 0:
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return values[0] if values else None


def current_ordinal() -> int:
    """Ordinal of the device whose context is current in this thread; 0, the default device, when none is.

    Raises RuntimeError when there is no GPU.
    """
    _require()
    from cuda.bindings import driver

    status, ordinal = driver.cuCtxGetDevice()
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        return 0
    return int(value_of((status, ordinal)))


def ensure_context(ordinal: int | None = None) -> int:
    """Make a context current in this thread and return its device's ordinal.

    A context that is already current stays, unless ``ordinal`` names another device. What is made current is
    the primary context, so memory and streams of CuPy, PyTorch and Numba are valid in it. Raises RuntimeError
    when there is no GPU.
    """
    _require()
    from cuda.bindings import driver

    status, here = driver.cuCtxGetDevice()
    if int(status) == 0 and (ordinal is None or int(here) == ordinal):
        return int(here)
    from cuda.core import Device

    wanted = 0 if ordinal is None else ordinal
    Device(wanted).set_current()
    return wanted


def current() -> DeviceInfo:
    """The limits of the device of this thread's CUDA context (device 0 when no context is current).

    Read once for each device. Raises RuntimeError, saying why and what to do, when there is no GPU.
    """
    return _describe(current_ordinal())


@functools.cache
def _describe(ordinal: int) -> DeviceInfo:
    from cuda.bindings import driver

    device = value_of(driver.cuDeviceGet(ordinal))

    def read(name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(value_of(driver.cuDeviceGetAttribute(attribute, device)))

    return DeviceInfo(
        name=value_of(driver.cuDeviceGetName(256, device)).split(b"\0")[0].decode(),
        arch=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        sm_count=read("MULTIPROCESSOR_COUNT"),
        shared_memory_per_block=read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_memory_per_sm=read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        max_threads_per_block=read("MAX_THREADS_PER_BLOCK"),
        registers_per_sm=read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        l2_bytes=read("L2_CACHE_SIZE"),
        max_threads_per_sm=read("MAX_THREADS_PER_MULTIPROCESSOR"),
        max_blocks_per_sm=read("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        reserved_shared_memory=read("RESERVED_SHARED_MEMORY_PER_BLOCK"),
    )


_assumed: ContextVar[DeviceInfo | None] = ContextVar("gemmkit_assumed_device", default=None)


@contextmanager
def assumed(info: DeviceInfo) -> Iterator[None]:
    """Within it products of host arrays are planned, and kernels compiled, for a device that need not be here."""
    token = _assumed.set(info)
    try:
        yield
    finally:
        _assumed.reset(token)


#: The device of `assumed`, in which plans of host arrays differ; None outside.
assumed_device: Callable[[], DeviceInfo | None] = _assumed.get


def target(ordinal: int | None = None) -> DeviceInfo:
    """The device to compile for: that of an ordinal (None or negative: the current one, or the `assumed` one), or ``H100``
    on a machine with no GPU."""
    info = _assumed.get() if ordinal is None or ordinal < 0 else None
    if info is not None:
        return info
    if not available():
        return H100
    return current() if ordinal is None or ordinal < 0 else _describe(ordinal)


@contextmanager
def made_current(ordinal: int) -> Iterator[None]:
    """Within it the device's primary context is current in this thread; afterwards what was current before.

    Nothing is done where the machine has one device, or the device is current already.
    """
    if count() < 2:
        yield
        return
    from cuda.bindings import driver

    before = value_of(driver.cuCtxGetCurrent())
    there = current_ordinal() == ordinal
    ensure_context(ordinal)
    try:
        yield
    finally:
        if not there:                          # (no context, and device 0 wanted: that is what comes to be current anyway)
            value_of(driver.cuCtxSetCurrent(before))


# --------------------------------------------------------------------------------------------------
# GPUs that need not be here: what the driver says of one of each architecture.
#
# A mapping is chosen by a GPU's limits and its number of multiprocessors, so a kernel that is compiled on another machine
# is found by a GPU of the same architecture and number. ``sm_90a:114`` is the GPU of sm_90a below with 114
# multiprocessors.

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
        raise ValueError(f"{text!r} is not a GPU that kernels can be compiled for: one of {', '.join(GPUS)} is needed, with "
                         ":COUNT for another number of multiprocessors (sm_90a:114)")
    if found[2] is None or int(found[2]) == named.sm_count:
        return named
    return dataclasses.replace(named, name=f"a GPU of {named.arch_name}", sm_count=int(found[2]))


# --------------------------------------------------------------------------------------------------
# Tasks in processes of their own: forked from this one, so that they need not be pickled.
#
# A kernel's components hold functions and arrays of the caller's, which no other process can be sent. A forked process
# has them. Each task gets its own process: one that crashes or hangs takes nothing with it. A task must not use the GPU
# (a CUDA context does not outlive a fork); compiling does not.
#
# Where a platform does not fork (Windows), tasks run one after the other in this process.

@dataclass(frozen=True)
class Failure:
    """Why a task has no result: ``kind`` is the exception's name, "crash" or "timeout"."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return self.reason if self.kind in ("crash", "timeout") else f"{self.kind}: {self.reason}"


@dataclass
class _Child:
    index: int
    process: Any
    answer: Connection
    deadline: float


def processors() -> int:
    """How many tasks can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forked(tasks: Sequence[Callable[[], Any]], jobs: int | None = None, seconds: float = 300.0) -> Iterator[tuple[int, Any]]:
    """Run tasks, at most ``jobs`` at a time (None: one a processor), and give (index, result) as they end.

    A result must be picklable. That of a task that raised, died, or took longer than ``seconds`` is a `Failure`. Closing the
    iterator, or an exception where it is used, ends what still runs.

    >>> sorted(forked([lambda: 2 + 2, lambda: 1 // 0]))[0]
    (0, 4)
    """
    if not hasattr(os, "fork"):
        for index, task in enumerate(tasks):
            yield index, _result(task)
        return
    context = multiprocessing.get_context("fork")
    waiting, running = list(enumerate(tasks))[::-1], list[_Child]()
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs or processors()):
                index, task = waiting.pop()
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(task, theirs), daemon=True)
                process.start()
                theirs.close()
                running.append(_Child(index, process, mine, time.monotonic() + seconds))
            left = min(child.deadline for child in running) - time.monotonic()
            ready = wait([child.answer for child in running], timeout=max(0.0, left))
            for child in [c for c in running if c.answer in ready or c.deadline <= time.monotonic()]:
                running.remove(child)
                yield child.index, _ended(child, seconds)
    finally:
        for child in running:
            _end(child)


def _run(task: Callable[[], Any], answer: Connection) -> None:
    """What a child does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)              # Ctrl-C is the parent's, which ends its children
    gc.freeze()                                               # else a walk of the collector copies all pages of the parent's
    try:
        found = _result(task)
        try:
            answer.send(found)
        except Exception as error:                            # it cannot be pickled
            answer.send(Failure(type(error).__name__, str(error)))
    finally:
        os._exit(0)                                           # nothing of the parent's is flushed or destroyed twice


def _result(task: Callable[[], Any]) -> Any:
    try:
        return task()
    except Exception as error:
        return Failure(type(error).__name__, str(error))


def _ended(child: _Child, seconds: float) -> Any:
    try:
        if child.answer.poll():
            return child.answer.recv()
        return Failure("timeout", f"it took longer than {seconds:g} s")
    except EOFError:
        child.process.join()
        status = child.process.exitcode
        return Failure("crash", f"its process died ({signal.Signals(-status).name if status < 0 else f'status {status}'})")
    finally:
        _end(child)


def _end(child: _Child) -> None:
    child.process.kill()                                      # what has answered has nothing left to do
    child.process.join()
    child.answer.close()


# --------------------------------------------------------------------------------------------------
# What the driver takes for a launch: its structures, the packing of parameters, and the limits of a device.

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


class DriverLaunchConfig(ctypes.Structure):
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


@functools.lru_cache(maxsize=4096)
def parameter_struct(parameters: tuple[str, ...]) -> tuple[struct.Struct, tuple[int, ...]]:
    """The struct that packs all parameters, each at a multiple of its alignment, and their offsets in it."""
    text, offset, offsets = "=", 0, []
    for code in parameters:
        letter, alignment = PARAMETER_FORMATS[code]
        padding = -offset % alignment
        offset += padding
        offsets.append(offset)
        text += f"{padding}x{letter}" if padding else letter
        offset += struct.calcsize("=" + letter)
    return struct.Struct(text), tuple(offsets)


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
        _check_extents(name, extents, most)
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
    validate_grid(grid, cluster)


def validate_grid(grid: Dim3, cluster: Dim3 | None) -> None:
    """`validate` of a launch of which all but the grid has been looked at."""
    _check_extents("grid", grid, _MAX_GRID)
    if cluster is not None and any(blocks % part for blocks, part in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid={grid} must be a multiple of cluster={cluster} in each direction")


def _check_extents(name: str, extents: Dim3, most: Dim3) -> None:
    if any(not 1 <= extent <= limit for extent, limit in zip(extents, most, strict=True)):
        raise ValueError(f"{name}={extents} must be at least 1 and at most {most} in each direction")


# --------------------------------------------------------------------------------------------------
# Commands of a stream that need no kernel: flags of 4 bytes, copies, events.
#
# A kernel that publishes a flag finds no multiprocessor behind a persistent one that waits for it; these commands need
# none. A flag is written behind all that the stream has done, at system scope (``cuStreamWriteValue32``). Streams and
# events are the driver's handles, and the device of a stream is the current one: PyTorch's own calls for the same take two
# to four times as long on the host.

_AT_LEAST = 0                          # CU_STREAM_WAIT_VALUE_GEQ: the difference as a signed number, so that epochs may wrap
_WITHOUT_TIME = 2                      # CU_EVENT_DISABLE_TIMING
_HANDLE, _ADDRESS, _WORD = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint


@cache
def _entry(name: str, *types: Any) -> Any:
    """A function of the driver, by ctypes: a microsecond a call, where cuda.bindings takes four."""
    found = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")[name]
    found.argtypes, found.restype = types, ctypes.c_int
    return found


def _check(status: int) -> None:
    if status:
        from cuda.bindings import driver

        raise RuntimeError(f"the CUDA driver answered {driver.CUresult(status).name}")


def write_value(stream: int, address: int, value: int) -> None:
    """Write 32 bits to an address that the stream's device reaches. Raises RuntimeError where the driver refuses, as all
    of these do."""
    _check(_entry("cuStreamWriteValue32_v2", _HANDLE, _ADDRESS, _WORD, _WORD)(stream, address, value & 0xFFFFFFFF, 0))


def wait_value(stream: int, address: int, value: int) -> None:
    """Have the stream wait until the 32 bits there are ``value`` at least."""
    _check(_entry("cuStreamWaitValue32_v2", _HANDLE, _ADDRESS, _WORD, _WORD)(stream, address, value & 0xFFFFFFFF, _AT_LEAST))


def copy(stream: int, to: int, source: int, nbytes: int) -> None:
    """Copy bytes of device memory, of this GPU or another; between two GPUs by a copy engine."""
    _check(_entry("cuMemcpyAsync", _ADDRESS, _ADDRESS, ctypes.c_size_t, _HANDLE)(to, source, nbytes, stream))


def new_event() -> int:
    """An event, which lives as long as the process."""
    made = _HANDLE()
    _check(_entry("cuEventCreate", _HANDLE, _WORD)(ctypes.addressof(made), _WITHOUT_TIME))
    return made.value or 0


def record(event: int, stream: int) -> None:
    """Let an event be what the stream has been asked for until now."""
    _check(_entry("cuEventRecord", _HANDLE, _HANDLE)(event, stream))


def wait_event(stream: int, event: int) -> None:
    """Have the stream wait for what the event is now."""
    _check(_entry("cuStreamWaitEvent", _HANDLE, _HANDLE, _WORD)(stream, event, 0))


# --------------------------------------------------------------------------------------------------
# The stream a library uses now, and a stream of any library as the driver's raw handle.

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD


def current_stream(library: str, device: int, producer: int | None = None) -> int:
    """The raw handle of the stream that ``library`` uses now on ``device``; ``producer`` is
    ``ArrayInfo.stream``.

    A library without a current stream (Numba, and whatever came by an interface) gives ``producer``, else the
    default stream: the per-thread one if Numba is set so, or the legacy one (0), which is ordered with all
    blocking streams.
    """
    find = stream_finder(library, device)
    if find is not None:
        return find()
    if producer is not None:
        return producer
    if library == "numba":
        from numba import config

        return _PER_THREAD_STREAM if config.CUDA_PER_THREAD_DEFAULT_STREAM else 0
    return 0


def launch_stream(info: Any, stream: int | None) -> int:
    """The raw handle of the stream that a call with an array like ``info`` is launched on: a given one, which is checked, or
    the one that the array's library uses now."""
    if stream is None:
        return current_stream(info.library, info.device, info.stream)
    check_stream(stream, info.device)
    return stream


def stream_finder(library: str, device: int) -> Callable[[], int] | None:
    """A function that gives the raw handle of the stream that ``library`` uses at that time, faster than `current_stream`;
    None for a library without a current stream."""
    if library == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:  # what PyTorch's own compiler calls; a third of the time
            return partial(raw, device)
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        get_current_stream = sys.modules["cupy"].cuda.get_current_stream
        return lambda: get_current_stream(device).ptr
    return None


def as_stream_handle(stream: Any, name: str = "stream") -> int:
    """The raw handle of a stream: an int, anything with ``__cuda_stream__``, or a CuPy, PyTorch or Numba
    stream.

    Raises TypeError, naming the argument, for anything else, and ValueError for a negative int.

    >>> as_stream_handle(0)
    0
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise ValueError(f"{name} must be a stream's handle, 0 or more; got {stream}")
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    for attribute in ("ptr", "cuda_stream"):  # CuPy, PyTorch
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    module = getattr(type(stream), "__module__", "")          # classes may have none
    if module.startswith("numba.cuda"):
        return int(stream)
    raise TypeError(
        f"{name} must be a CUDA stream: an int handle, a CuPy, PyTorch, Numba or cuda.core stream, or an "
        f"object with __cuda_stream__; got {module}.{type(stream).__qualname__}"
    )


def is_capturing(handle: int) -> bool:
    """Whether a stream is being captured into a CUDA graph. Questions for its id or its device would end the capture (seen
    on driver 580); this one does not."""
    from cuda.bindings import driver

    status, capturing = driver.cuStreamIsCapturing(handle)
    return int(status) == 0 and int(capturing) != 0


def check_stream(handle: int, ordinal: int) -> None:
    """Raise ValueError when a stream is another device's than the arrays'. Where there is one device nobody asks."""
    from gemmkit.runtime import device

    if handle in (0, 1, 2) or device.count() < 2:
        return
    from cuda.bindings import driver

    if not hasattr(driver, "cuStreamGetDevice") or is_capturing(handle):
        return
    try:
        status, found = driver.cuStreamGetDevice(handle)
    except RuntimeError:                  # a driver of before 12.8 cannot say
        return
    if int(status) == 0 and int(found) != ordinal:
        raise ValueError(f"stream is of device {int(found)} and the arrays are on device {ordinal}")
