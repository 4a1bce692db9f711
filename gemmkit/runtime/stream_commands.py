"""Commands of a stream that need no kernel: flags of 4 bytes, copies, events.

A kernel that publishes a flag finds no multiprocessor behind a persistent one that waits for it; these commands need none.
A flag is written behind all that the stream has done, at system scope (``cuStreamWriteValue32``). Streams and events are the
driver's handles, and the device of a stream is the current one: PyTorch's own calls for the same take two to four times as
long on the host.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
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
