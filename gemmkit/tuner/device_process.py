"""The process that runs candidates: started by `gemmkit.tuner.measure`, told what to do by a pipe.

It has a CUDA context of its own, the caller's arrays as copies, and cubins. A candidate that faults takes this process
with it, and one that hangs is ended with it.

    python -m gemmkit.tuner.device_process REQUESTS ANSWERS ORDINAL       (two numbers of open files, and the device's)
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gemmkit.runtime import device, launch
from gemmkit.runtime.device import value_of
from gemmkit.runtime.launch import load
from gemmkit.runtime.tensor_maps import Encoder
from gemmkit.tuner.measure import ALIGNMENT, AddressTable, Buffer, Job, Pointer

ENTRY = "gemmkit_kernel"
MOST_SETS = 32                         # copies of the operands that launches take in turns, so that the L2 has none of them
MOST_LAUNCHES = 1024                   # of a graph
POISON = 0xFF


class DeviceArrays:
    """The caller's memory on this process's device: of what launches vary several copies."""

    def __init__(self, driver: Any, buffers: Sequence[Buffer], contents: Sequence[bytes], varied: Sequence[int]):
        self._driver, self.buffers, self._contents = driver, buffers, contents
        nbytes = sum(buffers[n].nbytes for n in varied)
        self.sets = min(MOST_SETS, max(1, 2 * device.current().l2_bytes // max(1, nbytes) + 1))
        self._at: list[list[int]] = []
        for number, buffer in enumerate(buffers):
            copies = self.sets if number in varied else 1
            self._at.append([self._allocated(buffer) for _ in range(copies)])
            for copy in self._at[-1]:
                self._fill(copy, contents[number])
        self.settle()

    def settle(self) -> None:
        """Wait for what was filled: they are of the default stream, which kernels do not wait for."""
        value_of(self._driver.cuCtxSynchronize())

    def _allocated(self, buffer: Buffer) -> int:
        address = int(value_of(self._driver.cuMemAlloc(buffer.nbytes + 2 * ALIGNMENT)))
        return address + -address % ALIGNMENT + buffer.shift

    def zeros(self, nbytes: int) -> int:
        """New memory of zeros, as kernels leave the counters of a workspace."""
        return self._filled(nbytes, 0)

    def poisoned(self, nbytes: int) -> int:
        """New memory of NaNs, which a kernel has to write before the next one reads it."""
        return self._filled(nbytes, POISON)

    def _filled(self, nbytes: int, value: int) -> int:
        address = int(value_of(self._driver.cuMemAlloc(max(1, nbytes))))
        value_of(self._driver.cuMemsetD8(address, value, max(1, nbytes)))
        return address

    def tables(self, table: AddressTable) -> list[int]:
        """New memory with a table's bytes, one for each copy of the arrays: with these copies' addresses."""
        found = []
        for copy in range(self.sets):
            content = bytearray(table.content)
            for offset, pointer in table.addresses:
                content[offset:offset + 8] = self.address(pointer, copy).to_bytes(8, "little")
            found.append(self.zeros(len(content)))
            self._fill(found[-1], bytes(content))
        return found

    def _fill(self, address: int, content: bytes) -> None:
        if content:
            held = np.frombuffer(content, np.uint8)
            value_of(self._driver.cuMemcpyHtoD(address, held.ctypes.data, held.nbytes))

    def address(self, pointer: Pointer, copy: int) -> int:
        copies = self._at[pointer.buffer]
        return copies[copy % len(copies)] + pointer.offset

    def restore(self) -> None:
        """What kernels write is as it was, and NaN where nothing reads it."""
        for buffer, copies, content in zip(self.buffers, self._at, self._contents):
            if buffer.is_written and buffer.is_read:
                self._fill(copies[0], content)
            elif buffer.is_written and buffer.nbytes:
                value_of(self._driver.cuMemsetD8(copies[0], POISON, buffer.nbytes))
        self.settle()

    def written(self) -> list[bytes]:
        """What kernels have written, of the first copies."""
        found = []
        for buffer, copies in zip(self.buffers, self._at):
            if buffer.is_written:
                held = np.empty(buffer.nbytes, np.uint8)
                if buffer.nbytes:
                    value_of(self._driver.cuMemcpyDtoH(held.ctypes.data, copies[0], held.nbytes))
                found.append(held.tobytes())
        return found


class JobKernel:
    """One kernel of a job, loaded; ``spare`` is where the memory between kernels begins."""

    def __init__(self, driver: Any, job: Job, arrays: DeviceArrays, ordinal: int, stream: int, spare: int):
        self._driver, self._job, self._arrays, self._stream, self._spare = driver, job, arrays, stream, spare
        loaded = load(job.cubin, ENTRY)
        cluster = (job.cluster, 1, 1) if job.cluster > 1 else None
        self._bound = loaded.bind((job.blocks, 1, 1), (job.threads, 1, 1), job.shared_bytes, job.formats, cluster=cluster,
                                  dependent=job.dependent, cooperative=job.waits)
        if job.waits:
            launch.check_residency(loaded, ordinal, job.blocks, job.threads, job.shared_bytes, job.cluster)
        # Of its own: a captured launch would get new ones with every capture, and keep them.
        self._spaces = [(slot, arrays.zeros(nbytes)) for slot, _, nbytes in job.spaces]
        self._tables = [(table.slots, arrays.tables(table)) for table in job.tables]
        self._encoders = [(slot, pointer, Encoder(*arguments)) for slot, pointer, arguments in job.maps]

    def launch(self, copy: int) -> None:
        values = list(self._job.values)
        for slot, pointer in self._job.pointers:
            values[slot] = self._arrays.address(pointer, copy)
        for slot, pointer, encode in self._encoders:
            values[slot] = encode(self._arrays.address(pointer, copy))
        for slot, address in self._spaces:
            values[slot] = address
        for slot, offset in self._job.spares:
            values[slot] = self._spare + offset
        for slots, copies in self._tables:
            for slot in slots:
                values[slot] = copies[copy % len(copies)]
        self._bound.launch(self._stream, values)

    def end(self) -> None:
        """Give back what it holds of the device."""
        for address in (*(one for _, one in self._spaces), *(one for _, copies in self._tables for one in copies)):
            value_of(self._driver.cuMemFree(address))


class Loaded:
    """A job: its kernels are launched on one set of arrays, or in a graph of launches on all of them in turns."""

    def __init__(self, driver: Any, job: Job, arrays: DeviceArrays, ordinal: int, stream: int):
        self._driver, self._arrays, self._stream = driver, arrays, stream
        self._spare = arrays.poisoned(job.spare_bytes) if job.spare_bytes else 0
        self.kernels = [JobKernel(driver, one, arrays, ordinal, stream, self._spare) for one in (job, *job.then)]
        arrays.settle()
        self._graph: Any = None
        self._launches = 0

    def launch(self, copy: int = 0) -> None:
        for kernel in self.kernels:
            kernel.launch(copy)

    def end(self) -> None:
        """Give back what it holds of the device."""
        for kernel in self.kernels:
            kernel.end()
        if self._spare:
            value_of(self._driver.cuMemFree(self._spare))
        self._drop_graph()

    def _drop_graph(self) -> None:
        if self._graph is not None:
            value_of(self._driver.cuGraphExecDestroy(self._graph))
            self._graph = None

    def microseconds(self, target: float) -> float:
        """The time of a launch, by a graph of as many as take about ``target`` microseconds."""
        if self._graph is None:
            sets = self._arrays.sets
            self._capture(sets)
            self._elapsed()                                   # warm
            once = self._elapsed() / sets
            self._capture(min(MOST_LAUNCHES, sets * max(1, math.ceil(target / max(once * sets, 1e-3)))))
            self._elapsed()
        return self._elapsed() / self._launches

    def _capture(self, launches: int) -> None:
        driver, stream = self._driver, self._stream
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        value_of(driver.cuStreamBeginCapture(stream, relaxed))
        try:
            for number in range(launches):
                self.launch(number)
        finally:
            captured = driver.cuStreamEndCapture(stream)
        graph = value_of(captured)
        self._drop_graph()
        self._graph, self._launches = value_of(driver.cuGraphInstantiate(graph, 0)), launches
        value_of(driver.cuGraphDestroy(graph))

    def _elapsed(self) -> float:
        driver, stream = self._driver, self._stream
        begin, end = (value_of(driver.cuEventCreate(0)) for _ in range(2))
        value_of(driver.cuEventRecord(begin, stream))
        value_of(driver.cuGraphLaunch(self._graph, stream))
        value_of(driver.cuEventRecord(end, stream))
        value_of(driver.cuEventSynchronize(end))
        milliseconds = value_of(driver.cuEventElapsedTime(begin, end))
        for event in (begin, end):
            value_of(driver.cuEventDestroy(event))
        return 1e3 * float(milliseconds)


class Process:
    """Answers requests: a name and arguments."""

    def __init__(self, driver: Any, ordinal: int):
        self._driver, self._ordinal = driver, device.ensure_context(ordinal)
        self._stream = int(value_of(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))))
        self._arrays: DeviceArrays | None = None
        self._jobs: dict[int, Loaded] = {}

    def memory(self, buffers: Sequence[Buffer], contents: Sequence[bytes], varied: Sequence[int]) -> int:
        self._arrays, self._jobs = DeviceArrays(self._driver, buffers, contents, varied), {}
        return self._arrays.sets

    def job(self, number: int, job: Job) -> None:
        assert self._arrays is not None
        self._jobs[number] = Loaded(self._driver, job, self._arrays, self._ordinal, self._stream)

    def forget(self, number: int) -> None:
        if number in self._jobs:
            self._jobs.pop(number).end()

    def result(self, number: int) -> list[bytes]:
        """What a job writes."""
        assert self._arrays is not None
        self._arrays.restore()
        self._jobs[number].launch()
        value_of(self._driver.cuStreamSynchronize(self._stream))
        return self._arrays.written()

    def pairs(self, one: int, other: int, count: int, target: float) -> list[tuple[float, float]]:
        """The times of two jobs in turns, in microseconds; which goes first alternates."""
        first, second = self._jobs[one], self._jobs[other]
        found = []
        for turn in range(count):
            if turn % 2:
                late = second.microseconds(target)
                found.append((first.microseconds(target), late))
            else:
                early = first.microseconds(target)
                found.append((early, second.microseconds(target)))
        return found


def serve(requests: Any, answers: Any, process: Any) -> None:
    """Answer until the pipe ends: (True, result), or (False, why not)."""
    while True:
        try:
            name, arguments = requests.recv()
        except EOFError:
            return
        try:
            answer: Any = True, getattr(process, name)(*arguments)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
        answers.send(answer)


def main(arguments: Sequence[str]) -> None:
    from cuda.bindings import driver

    signal.signal(signal.SIGINT, signal.SIG_IGN)              # Ctrl-C is the caller's, which closes the pipe
    requests, answers, ordinal = map(int, arguments)
    serve(Connection(requests, writable=False), Connection(answers, readable=False), Process(driver, ordinal))


if __name__ == "__main__":
    main(sys.argv[1:])
