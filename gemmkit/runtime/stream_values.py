"""Flags of 4 bytes that a stream writes or waits for, without a kernel (``cuStreamWriteValue32``, ``cuStreamWaitValue32``).

A kernel that publishes a flag finds no multiprocessor behind a persistent one that waits for it; these commands need none.
A write is ordered behind all that the stream has done, at system scope.
"""

from __future__ import annotations

from gemmkit.runtime.device import value_of

__all__ = ["wait_value", "write_value"]

_AT_LEAST = 0                          # CU_STREAM_WAIT_VALUE_GEQ: the difference as a signed number, so that epochs may wrap


def write_value(stream: int, address: int, value: int) -> None:
    """Write 32 bits to an address that the stream's device reaches. Raises RuntimeError where the driver refuses."""
    from cuda.bindings import driver

    value_of(driver.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))


def wait_value(stream: int, address: int, value: int) -> None:
    """Have the stream wait until the 32 bits there are ``value`` at least. Raises RuntimeError where the driver refuses."""
    from cuda.bindings import driver

    value_of(driver.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, _AT_LEAST))
