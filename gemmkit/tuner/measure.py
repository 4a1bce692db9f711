"""The caller's side of the process that runs candidates (`gemmkit.tuner.device_process`).

Each request has a time limit. A process that dies or does not answer is ended, and the next request starts another one,
with the caller's arrays copied anew.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from gemmkit.lang.memory import PLACES
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.plans.problem import held_by
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, byte_range, whole

# --------------------------------------------------------------------------------------------------
# A launch without the objects that made it: a cubin, numbers, and which of them are addresses in which memory.
#
# The process that measures gets nothing else. It has none of the caller's code or arrays: what a candidate does wrong, it
# does there.

ALIGNMENT = 256                        # bytes: an address in the measuring process is the caller's modulo this


@dataclass(frozen=True)
class Buffer:
    """Memory of an array, or of several that overlap: ``nbytes`` from ``start`` on, which kernels read, write, or both."""

    start: int
    nbytes: int
    is_read: bool
    is_written: bool

    @property
    def shift(self) -> int:
        """Bytes that lie before it in a piece of memory whose address is a multiple of `ALIGNMENT`."""
        return self.start % ALIGNMENT


@dataclass(frozen=True)
class Pointer:
    """The address of a byte of a buffer."""

    buffer: int
    offset: int


class Buffers:
    """The buffers of a product's arrays: operands, the result, and the arrays of components."""

    def __init__(self, read: Sequence[ArrayInfo], written: Sequence[ArrayInfo]):
        spans = [(*byte_range(whole(info)), info in read, info in written) for info in {*read, *written}]
        merged: list[list[Any]] = []
        for first, last, is_read, is_written in sorted(spans):
            if merged and first < merged[-1][1]:
                merged[-1][1:] = max(last, merged[-1][1]), merged[-1][2] or is_read, merged[-1][3] or is_written
            else:
                merged.append([first, last, is_read, is_written])
        self.buffers = [Buffer(first, last - first, is_read, is_written) for first, last, is_read, is_written in merged]

    def pointer(self, address: int) -> Pointer:
        """Where an address lies. Raises KeyError for one in none of the buffers."""
        for number, buffer in enumerate(self.buffers):
            if buffer.start <= address < buffer.start + max(1, buffer.nbytes):
                return Pointer(number, address - buffer.start)
        raise KeyError(address)


@dataclass(frozen=True)
class AddressTable:
    """Bytes in device memory, whose address goes to ``slots``; at the offsets ``addresses`` stand those of arrays."""

    slots: tuple[int, ...]
    content: bytes
    addresses: tuple[tuple[int, Pointer], ...] = ()


@dataclass(frozen=True)
class Job:
    """A kernel's launch.

    ``values`` are its parameters, in the formats of `gemmkit.runtime.device.PARAMETER_FORMATS`; at the slots of
    ``pointers`` go addresses, at those of ``maps`` the tensor maps that an encoder's arguments make of an address, at those
    of ``spaces`` workspaces, of ``tables`` these. ``varied`` are the buffers of which a timed launch takes the next copy.

    ``then`` are kernels that are launched behind it, in this order. One leaves numbers for the next in ``spare_bytes`` of
    memory: at the slots of ``spares`` go addresses, so many bytes behind where it begins.
    """

    cubin: bytes
    blocks: int
    threads: int
    shared_bytes: int
    formats: tuple[str, ...]
    values: tuple[Any, ...]
    cluster: int
    dependent: bool
    waits: bool
    pointers: tuple[tuple[int, Pointer], ...]
    maps: tuple[tuple[int, Pointer, tuple[Any, ...]], ...]
    spaces: tuple[tuple[int, str, int], ...]
    varied: tuple[int, ...]
    tables: tuple[AddressTable, ...] = ()
    spares: tuple[tuple[int, int], ...] = ()
    spare_bytes: int = 0
    then: tuple[Job, ...] = ()


def memory_of(compiled: Any) -> Buffers:
    """The buffers of a product (`gemmkit.plans.compiled.Compiled`) or a group (`gemmkit.functions.grouped.CompiledGroup`).
    An array that a component writes may be read, too."""
    problem = compiled.problem
    infos = getattr(compiled, "infos", None) or [(problem.a, problem.b, problem.c, compiled.out)]
    held = [x for _, x in held_by(problem.config)]
    read = [info for of in infos for info in of[:3] if info is not None]
    return Buffers([*read, *(x.info for x in held)], [*(x.info for x in held if x.is_output), *(of[3] for of in infos)])


def job_of(compiled: Any, memory: Buffers, cubin: bytes) -> Job:
    """The launch of a product whose arrays lie in ``memory``."""
    kernel, problem = compiled.launchable, compiled.problem
    infos = compiled.out, problem.a, problem.b, problem.c              # as `OPERANDS` are
    at = [None if info is None else memory.pointer(info.pointer) for info in infos]
    pointers, maps = _of_components(compiled, memory), list[tuple[int, Pointer, tuple[Any, ...]]]()
    for slot, which, _, encoder in compiled.puts:
        pointer = at[which]
        assert pointer is not None
        if encoder is None:
            pointers[slot] = pointer
        else:
            maps.append((slot, pointer, encoder.arguments))
    maps += [(one.slot, pointers[one.which], one.encoder.arguments) for one in compiled.held_maps]
    values = list(kernel.values)
    for slot, _, _ in maps:
        values[slot] = bytes(128)
    varied = tuple(dict.fromkeys(pointer.buffer for pointer in at if pointer is not None))
    spaces = tuple((space.slot, space.role, space.nbytes) for space in compiled.spaces)
    return Job(cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats), tuple(values),
               kernel.cluster, kernel.dependent, kernel.waits, tuple(pointers.items()), tuple(maps), spaces, varied)


def contents_of(memory: Buffers, ordinal: int) -> list[bytes]:
    """The bytes of each buffer that kernels read, from the device."""
    from cuda.bindings import driver

    found = []
    with device.made_current(ordinal):
        device.ensure_context(ordinal)
        (status,) = driver.cuCtxSynchronize()
        for buffer in memory.buffers:
            held = np.empty(buffer.nbytes if buffer.is_read else 0, np.uint8)
            if held.nbytes and int(status) == 0:
                (status,) = driver.cuMemcpyDtoH(held.ctypes.data, buffer.start, held.nbytes)
            if int(status) != 0:
                raise RuntimeError(f"the CUDA driver answered {status.name} to a copy of the arrays")
            found.append(held.tobytes())
    return found


def group_job_of(group: Any, memory: Buffers, cubin: bytes) -> Job:
    """The launch of a group whose arrays lie in ``memory``. The table of addresses is made where it is launched."""
    kernel, made = group.launchable, group.tables
    places = made.places(group.infos)
    width = PLACES * places.itemsize
    addresses = tuple((row * places.shape[1] * places.itemsize + at * width, memory.pointer(info.pointer))
                      for row, of in enumerate(group.infos) for at, info in enumerate(of)
                      if info is not None and 0 not in info.shape)
    data = {"places": (places, addresses), "sizes": (made.sizes, ()), "products": (made.products, ())}
    tables = tuple(AddressTable(tuple(space.slot for space in group.spaces if space.role == role), content.tobytes(), at)
                   for role, (content, at) in data.items())
    varied = tuple(dict.fromkeys(pointer.buffer for _, pointer in addresses))
    return Job(cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats), tuple(kernel.values),
               kernel.cluster, kernel.dependent, kernel.waits, tuple(_of_components(group, memory).items()), (), (), varied,
               tables)


def _of_components(compiled: Any, memory: Buffers) -> dict[int, Pointer]:
    """Where the addresses of components' arrays stand among a kernel's values."""
    arrays = [info for info in compiled.arguments[0].arrays if info.library != "workspace"]
    first = compiled.launchable.slot(0) or 0
    return {slot: memory.pointer(value) for slot, (code, value) in enumerate(compiled.arguments[0].leaves, first)
            if code == "u64" and any(value == info.pointer for info in arrays)}


START_S = 120.0                        # to start, and to copy arrays
MODULE = "gemmkit.tuner.device_process"


class Failed(Exception):
    """A candidate that faulted, hung, or was refused by the driver: its reason is the text."""


class Measuring:
    """Runs and times jobs on copies of ``contents``, which are the bytes of the buffers of ``memory``.

    ``command`` starts the process; two numbers of open files and the device's ordinal are appended.
    """

    def __init__(self, memory: Buffers, contents: Sequence[bytes], varied: Sequence[int], ordinal: int,
                 command: Sequence[str] = (sys.executable, "-m", MODULE)):
        self._memory, self._contents, self._varied = memory, contents, varied
        self._ordinal, self._command = ordinal, tuple(command)
        self._process: Any = None
        self._errors: Any = None                              # what the process writes there
        self._jobs: dict[int, Job] = {}                       # kept for a process that has to start anew
        self._loaded: set[int] = set()

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests

    def keep(self, number: int, job: Job) -> None:
        """A job under a number; it is loaded when it is first asked for."""
        self._jobs[number] = job

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)
        if number in self._loaded:
            self._loaded.discard(number)
            self._ask("forget", (number,), START_S)

    def result(self, number: int, seconds: float) -> list[bytes]:
        """What a job writes: the bytes of each buffer that is written. Raises Failed."""
        self._load(number, seconds)
        found: list[bytes] = self._ask("result", (number,), seconds)
        return found

    def pairs(self, one: int, other: int, count: int, target: float, seconds: float) -> list[tuple[float, float]]:
        """The times of two jobs in turns, in microseconds of a launch. Raises Failed."""
        self._load(one, seconds)
        self._load(other, seconds)
        found: list[tuple[float, float]] = self._ask("pairs", (one, other, count, target), seconds)
        return found

    def _load(self, number: int, seconds: float) -> None:
        if self._process is None:
            self._start()
        if number not in self._loaded:
            self._ask("job", (number, self._jobs[number]), seconds)
            self._loaded.add(number)

    # -- the process

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), *sys.path]))
        try:
            self._process = subprocess.Popen(
                [*self._command, str(theirs_in), str(theirs_out), str(self._ordinal)], pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
                env={**os.environ, "PYTHONPATH": paths})
        except BaseException:
            os.close(ours_out)
            os.close(ours_in)
            self._errors.close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._requests, self._answers = Connection(ours_out, readable=False), Connection(ours_in, writable=False)
        self._loaded.clear()
        self._ask("memory", (self._memory.buffers, list(self._contents), list(self._varied)), START_S)

    def _ask(self, name: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        try:
            self._requests.send((name, arguments))
            if not self._answers.poll(seconds):
                self.close()
                raise Failed(f"it did not end within {seconds:g} s")
            is_right, answer = self._answers.recv()
        except (EOFError, OSError):
            reason = f"its process died with status {self._process.wait()}{self._last_words()}"
            self.close()
            raise Failed(reason) from None
        if not is_right:
            self.close()                                      # after a fault every call of the driver fails
            raise Failed(str(answer))
        return answer

    def _last_words(self) -> str:
        """The last line that the process wrote of an error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return "".join([f" ({line.strip()})" for line in lines if line.strip()][-1:])

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._loaded.clear()
        process.kill()
        process.wait()
        self._requests.close()
        self._answers.close()
        self._errors.close()


DEFAULT_S = 300.0                      # that the default may take to load and to run once
CANDIDATE_S, TIMES = 20.0, 50          # that a candidate may take, and so many times what the default took once


def default_result(process: Any, number: int, what: str) -> tuple[list[bytes], float]:
    """What the job writes that others are timed with, and the seconds that one of these may take. Raises RuntimeError, which
    says ``what`` it is, where it does not run."""
    try:
        process.result(number, DEFAULT_S)                     # loads it, too
        start = time.monotonic()
        found = process.result(number, DEFAULT_S)
    except Failed as error:
        raise RuntimeError(f"{what} does not run: {error}") from None
    return found, CANDIDATE_S + TIMES * (time.monotonic() - start)


# --------------------------------------------------------------------------------------------------
# Whether a candidate's result is the default mapping's, but for rounding.

def written(memory: Buffers, results: Sequence[bytes], info: ArrayInfo) -> np.ndarray:
    """An array's elements in what a job has written."""
    buffers = [buffer for buffer in memory.buffers if buffer.is_written]
    at = buffers.index(memory.buffers[memory.pointer(info.pointer).buffer])
    return elements(results[at], buffers[at].start, info)


def elements(content: bytes, start: int, info: ArrayInfo) -> np.ndarray:
    """An array's elements in the bytes of a buffer that begins at the address ``start``."""
    info = whole(info)
    return np.ndarray(info.shape, info.dtype, content, info.pointer - start,
                      tuple(stride * info.dtype.itemsize for stride in info.strides))


def tolerance(dtype: np.dtype, accumulator: np.dtype, k: int) -> float:
    """How far results of two orders of summation may lie apart, as a part of the largest: some units of the last place of
    the result, and of the sums as many as a random walk of ``k`` steps makes. 0 for integers.

    >>> tolerance(np.dtype("i4"), np.dtype("i4"), 4096)
    0.0
    >>> 0.003 < tolerance(np.dtype("f2"), np.dtype("f4"), 4096) < 0.005
    True
    """
    return 0.0 if _epsilon(dtype) == 0.0 else 4 * _epsilon(dtype) + 4 * math.sqrt(max(1, k)) * _epsilon(accumulator)


def _epsilon(dtype: np.dtype) -> float:
    part = part_dtypes(dtype)[0]
    if part.kind in "iub":
        return 0.0
    try:
        return float(np.finfo(part).eps)
    except ValueError:                                        # of ml_dtypes
        import ml_dtypes

        return float(ml_dtypes.finfo(part).eps)


def difference(expected: np.ndarray, found: np.ndarray, allowed: float) -> str | None:
    """What differs more than it may, in words; None if nothing does."""
    if expected.dtype.names is not None:
        return next((f"{name}: {text}" for name in expected.dtype.names
                     if (text := difference(expected[name], found[name], allowed)) is not None), None)
    if expected.dtype.kind in "iub":
        wrong = int(np.count_nonzero(expected != found))
        return f"{wrong} of {expected.size} elements differ" if wrong else None
    if expected.dtype.kind == "c":
        return difference(expected.real, found.real, allowed) or difference(expected.imag, found.imag, allowed)
    wide: Any = np.float64 if expected.dtype.itemsize == 8 else np.float32
    one, other = expected.astype(wide), found.astype(wide)
    finite = np.isfinite(one)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    wrong = int(np.count_nonzero(~finite & ~same))
    if wrong:
        return f"{wrong} of {expected.size} elements differ in what is NaN or infinite"
    if not finite.any():
        return None
    largest = float(np.abs(one[finite]).max())
    apart = np.abs(one[finite] - other[finite])
    most = float(apart.max()) if np.isfinite(apart).all() else math.inf
    if most <= allowed * largest:
        return None
    return f"elements differ by up to {most:.3g}, the largest is {largest:.3g}, and {allowed * largest:.3g} is allowed"
