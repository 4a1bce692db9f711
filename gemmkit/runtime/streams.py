"""Commands of a stream that need no kernel: flags of 4 bytes, copies, events.

A kernel that publishes a flag finds no multiprocessor behind a persistent one that waits for it; these commands need none.
A flag is written behind all that the stream has done, at system scope (``cuStreamWriteValue32``). Streams and events are the
driver's handles, and the device of a stream is the current one: PyTorch's own calls for the same take two to four times as
long on the host.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

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
