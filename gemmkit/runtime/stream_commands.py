"""Commands of a stream that need no kernel: flags of 4 bytes, copies, events.

A kernel that publishes a flag finds no multiprocessor behind a persistent one that waits for it; these commands need none.
A flag is written behind all that the stream has done, at system scope (``cuStreamWriteValue32``). Streams and events are the
driver's handles, and the device of a stream is the current one: PyTorch's own calls for the same take two to four times as
long on the host.
"""

from __future__ import annotations

from typing import Any

from gemmkit.runtime.device import value_of

__all__ = ["copy", "new_event", "record", "wait_event", "wait_value", "write_value"]

_AT_LEAST = 0                          # CU_STREAM_WAIT_VALUE_GEQ: the difference as a signed number, so that epochs may wrap
_driver: Any = None


def _calls() -> Any:
    """The driver's module, which is there where CUDA is. (An import in each call takes a microsecond.)"""
    global _driver
    if _driver is None:
        from cuda.bindings import driver

        _driver = driver
    return _driver


def write_value(stream: int, address: int, value: int) -> None:
    """Write 32 bits to an address that the stream's device reaches. Raises RuntimeError where the driver refuses, as all
    of these do."""
    value_of(_calls().cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))


def wait_value(stream: int, address: int, value: int) -> None:
    """Have the stream wait until the 32 bits there are ``value`` at least."""
    value_of(_calls().cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, _AT_LEAST))


def copy(stream: int, to: int, source: int, nbytes: int) -> None:
    """Copy bytes of device memory, of this GPU or another; between two GPUs by a copy engine."""
    value_of(_calls().cuMemcpyAsync(to, source, nbytes, stream))


def new_event() -> Any:
    """An event, which lives as long as the process."""
    driver = _calls()
    return value_of(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))


def record(event: Any, stream: int) -> None:
    """Let an event be what the stream has been asked for until now."""
    value_of(_calls().cuEventRecord(event, stream))


def wait_event(stream: int, event: Any) -> None:
    """Have the stream wait for what the event is now."""
    value_of(_calls().cuStreamWaitEvent(stream, event, 0))
