"""A CUDA driver whose memory is the host's, for the process that runs candidates: ``python -m tests.support.pretend_device``.

Its kernels are named by their cubins: ``double`` writes 2 x to out; ``wrong`` writes x; ``fault`` fails; ``hang`` does not
end; ``die`` takes the process with it. Launches take the microseconds that the cubin names behind a colon.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from enum import IntEnum
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gemmkit.runtime.device import H100
from gemmkit.tuner import device_process


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Driver:
    """What `device_process` calls of the driver.

    What goes to the device's memory by the default stream is there when the context is synchronised: kernels are launched
    on a stream that does not wait for that one.
    """

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.captured: list[Any] | None = None
        self.clock = 0.0                                      # microseconds
        self.freed: list[int] = []
        self.pending: list[Any] = []                          # of the default stream

    def cuCtxSynchronize(self) -> tuple:
        for act in self.pending:
            act()
        self.pending.clear()
        return (Status.CUDA_SUCCESS,)

    def cuMemAlloc(self, nbytes: int) -> tuple:
        self.memory.append(ctypes.create_string_buffer(nbytes))
        return Status.CUDA_SUCCESS, ctypes.addressof(self.memory[-1])

    def cuMemcpyHtoD(self, to: int, data: int, nbytes: int) -> tuple:
        staged = ctypes.string_at(data, nbytes)
        self.pending.append(lambda: ctypes.memmove(to, staged, nbytes))
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, to: int, data: int, nbytes: int) -> tuple:
        self.cuCtxSynchronize()
        ctypes.memmove(to, data, nbytes)
        return (Status.CUDA_SUCCESS,)

    def cuMemsetD8(self, to: int, value: int, nbytes: int) -> tuple:
        self.pending.append(lambda: ctypes.memset(to, value, nbytes))
        return (Status.CUDA_SUCCESS,)

    def cuStreamCreate(self, flags: int) -> tuple:
        return Status.CUDA_SUCCESS, 77

    def cuStreamSynchronize(self, stream: int) -> tuple:
        return (Status.CUDA_SUCCESS,)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple:
        self.captured = []
        return (Status.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> tuple:
        captured, self.captured = self.captured, None
        return Status.CUDA_SUCCESS, captured

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple:
        return Status.CUDA_SUCCESS, graph

    def cuGraphLaunch(self, graph: Any, stream: int) -> tuple:
        for launch in graph:
            launch()
        return (Status.CUDA_SUCCESS,)

    def cuGraphDestroy(self, graph: Any) -> tuple:
        return (Status.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph: Any) -> tuple:
        return (Status.CUDA_SUCCESS,)

    def cuMemFree(self, address: int) -> tuple:
        self.freed.append(address)
        return (Status.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> tuple:
        return Status.CUDA_SUCCESS, [0.0]

    def cuEventRecord(self, event: list, stream: int) -> tuple:
        event[0] = self.clock
        return (Status.CUDA_SUCCESS,)

    def cuEventSynchronize(self, event: list) -> tuple:
        return (Status.CUDA_SUCCESS,)

    def cuEventElapsedTime(self, begin: list, end: list) -> tuple:
        return Status.CUDA_SUCCESS, (end[0] - begin[0]) / 1e3

    def cuEventDestroy(self, event: list) -> tuple:
        return (Status.CUDA_SUCCESS,)


class Loaded:
    """A kernel of one of the names: its values are the addresses of x and out, and how many bytes there are."""

    def __init__(self, driver: Driver, cubin: bytes):
        self.driver = driver
        self.name, _, microseconds = cubin.decode().partition(":")
        self.microseconds = float(microseconds or 10)
        self.launched: list[tuple] = []

    def bind(self, *arguments: Any, **options: Any) -> Loaded:
        return self

    def launch(self, stream: int, values: Sequence[Any]) -> None:
        self.launched.append(tuple(values))
        if self.driver.captured is not None:
            self.driver.captured.append(lambda: self.run(*values))
        else:
            self.run(*values)

    def run(self, x: int, out: int, count: int, *more: Any) -> None:
        self.driver.clock += self.microseconds
        if self.name == "fault":
            raise RuntimeError(Status.CUDA_ERROR_ILLEGAL_ADDRESS.name)
        if self.name == "hang":
            time.sleep(3600)
        if self.name == "die":
            os._exit(9)
        read = ctypes.string_at(x, count)
        ctypes.memmove(out, read if self.name == "wrong" else bytes(2 * n % 256 for n in read), count)


def pretended(driver: Driver) -> Any:
    """Within it `device_process` runs on this driver."""
    stack = mock.patch.multiple(device_process, load=lambda cubin, name: Loaded(driver, cubin),
                                device=SimpleNamespace(ensure_context=lambda ordinal: ordinal, current=lambda: H100))
    return stack


def main(arguments: Sequence[str]) -> None:
    requests, answers, ordinal = map(int, arguments)
    driver = Driver()
    with pretended(driver):
        device_process.serve(Connection(requests, writable=False), Connection(answers, readable=False),
                             device_process.Process(driver, ordinal))


if __name__ == "__main__":
    main(sys.argv[1:])
