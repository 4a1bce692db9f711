"""What GPU there is, and what it allows.

Importing this module loads no driver and makes no context; asking ``available()`` initialises the driver, and
only ``ensure_context()`` makes a context current (the device's primary one, which CuPy and PyTorch share).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from gemmkit.lang.installed import missing, require


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
        Its kernel calls `gemmkit.ptx.warpgroup.grid_wait` before it touches what that one may write."""
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


def assumed_device() -> DeviceInfo | None:
    """The device of `assumed`, in which plans of host arrays differ; None outside."""
    return _assumed.get()


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
