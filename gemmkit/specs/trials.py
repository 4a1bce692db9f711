"""Variants of a schedule tried: compiled in processes of their own, checked against float64, timed on a GPU.

What runs on the GPU does so in the tuner's process (`gemmkit.tuner.device_process`), which has copies of the matrices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import ComponentError
from gemmkit.emulator.mode import Mode, current_mode
from gemmkit.lang import later
from gemmkit.lang.fingerprint import look_again
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.forked import Failure, forked
from gemmkit.runtime.launchable import Launchable
from gemmkit.specs.launching import Kernel
from gemmkit.specs.lower import Lowered
from gemmkit.specs.run import READ_ONLY, described, prepared
from gemmkit.specs.variants import Explored, Variant
from gemmkit.tuner.jobs import Job, Memory, contents_of, job_of, memory_of
from gemmkit.tuner.measuring import Failed, Measuring
from gemmkit.tuner.progress import Progress
from gemmkit.tuner.verifying import difference, elements, tolerance

PAIRS, MICROSECONDS = 5, 1000.0        # each variant is timed, in turns with gemmkit.matmul
FINALISTS, FINAL_PAIRS = 3, 15         # the fastest again: the first of many is the luckiest, too
DEFAULT_S = 300.0                      # that gemmkit.matmul may take to load and to run once
VARIANT_S, TIMES = 20.0, 50            # that a variant may take, and so many times what gemmkit.matmul took once
COMPILE_S = 300.0


class Tried(NamedTuple):
    """A variant that fits the matrices."""

    kernel: Kernel
    lowered: Lowered
    launchable: Launchable


class Compiled(NamedTuple):
    """What a process answers: the assembler's figures, and what is wrong in the emulator."""

    usage: dict[str, Any]
    wrong: str | None


def explored(rows: Sequence[Variant], a: Any, b: Any, out: Any, budget: float, jobs: int | None,
             progress: bool | None) -> Explored:
    """Try the variants: see `gemmkit.specs.exploring.Variants`."""
    mode = current_mode()
    on_host = describe(a, "a").device < 0
    if on_host and mode is None:
        raise TypeError("a is a host array (NumPy); explore in the emulator, without times: with gemmkit.emulate(): ...")
    infos, out = described(a, b, out)
    if 0 in (*infos[0].shape, *infos[1].shape):
        raise ValueError(f"a is {infos[0].shape} and b is {infos[1].shape}: there is nothing to compute")
    if len({info.device for info in infos}) != 1:
        raise ValueError("a, b, out are in different places; put them on one GPU")
    target = device.H100 if on_host else device.target(infos[0].device)
    search = _Search(list(rows), infos, target, budget, jobs, mode if on_host else None)
    with Progress(progress) as shown:
        search.fit()
        search.compile(shown)
        if on_host:
            search.notes.append("nothing was timed: this is the emulator. Variants were compiled for an "
                                f"{target.name}, and emulated on small operands")
        else:
            search.time(a, b, out, shown)
    return search.result()


@dataclass
class _Search:
    """The variants of one product; ``mode`` is the emulator's, None on a GPU."""

    rows: list[Variant]
    infos: tuple[ArrayInfo, ...]
    target: Any
    budget: float
    jobs: int | None
    mode: Mode | None

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.default: float | None = None
        self._start = time.monotonic()
        self._tried: dict[int, Tried] = {}
        a, b, _ = self.infos
        self.sizes = a.shape[0], b.shape[1], a.shape[1]

    def left(self) -> float:
        """Seconds of the budget."""
        return self._start + self.budget - time.monotonic()

    # -- 1. which fit -----------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Lower each schedule for the matrices: what does not fit is refused here, before anything is compiled."""
        look_again()
        for number, row in enumerate(self.rows):
            if row.schedule is None:
                continue
            try:
                kernel, lowered = prepared(row.schedule, self.infos)
                launchable = kernel.launchable(READ_ONLY, self.infos, self.target, max(0, self.infos[0].device))
            except (ValueError, ComponentError) as error:     # the latter: of a micro-kernel that is no device code
                self.rows[number] = row.refused(error)
                continue
            self._tried[number] = Tried(kernel, lowered, launchable)
            self.rows[number] = replace(row, threads=kernel.threads, shared_bytes=kernel.shared_bytes)

    # -- 2. compiled, and emulated where there is no GPU ----------------------------------------------------------------

    def compile(self, shown: Any) -> None:
        """In a process each. Of the budget half is for measuring."""
        later.load()                                          # once, and not in every process
        numbers = list(self._tried)
        tasks = [self._task(number) for number in numbers]
        reserved = 0.0 if self.mode is not None else self.budget / 2
        shown.begin("compiling", len(tasks))
        waiting = set(numbers)
        processes = forked(tasks, self.jobs, COMPILE_S)
        for index, found in processes:
            waiting.discard(numbers[index])
            self._compiled(numbers[index], found)
            shown.advance()
            if self.left() < reserved:
                processes.close()                             # type: ignore[attr-defined]
                break
        for number in waiting:
            self._drop(number, "not compiled within the budget")

    def _task(self, number: int) -> Callable[[], Compiled]:
        tried, schedule = self._tried[number], self.rows[number].schedule

        def task() -> Compiled:
            usage = tried.launchable.entry().meta["usage"]
            return Compiled(usage, None if self.mode is None else self._emulated(schedule, tried.lowered, self.mode.seed))

        return task

    def _compiled(self, number: int, found: Any) -> None:
        from gemmkit.inspection import occupancy

        if isinstance(found, Failure):
            self._drop(number, f"not compiled: {found}")
            return
        row, usage = self.rows[number], found.usage
        blocks = occupancy(usage["registers"], row.threads, row.shared_bytes, self.target).blocks     # type: ignore[arg-type]
        self.rows[number] = replace(row, registers=usage["registers"], blocks_per_sm=blocks, is_right=found.wrong is None,
                                    spilled_bytes=usage["spill_stores"] + usage["spill_loads"])
        if found.wrong is not None:
            self._drop(number, found.wrong)

    def _drop(self, number: int, why: str) -> None:
        self.rows[number] = replace(self.rows[number].refused(why), is_right=False)
        self._tried.pop(number, None)

    def _emulated(self, schedule: Any, lowered: Lowered, seed: int | None) -> str | None:
        """What is wrong on operands that are as small as the same kernel takes; None if nothing is."""
        import gemmkit

        m, n, k = small_sizes(schedule, lowered, self.sizes)
        rng = np.random.default_rng(0)
        a, b, out = (like(shape, info) for shape, info in zip(((m, k), (k, n), (m, n)), self.infos))
        a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
        out[...] = np.nan if out.dtype.kind not in "iu" else 113
        try:
            with gemmkit.emulate(seed):
                schedule(a, b, out=out)
        except Exception as error:                            # the emulator's, or a micro-kernel's own
            return f"wrong: {type(error).__name__}: {error}"
        found = difference(a.astype(np.float64) @ b.astype(np.float64), out, tolerance(out.dtype, out.dtype, k))
        return None if found is None else f"wrong: {found}"

    # -- 3. checked and timed on a GPU ------------------------------------------------------------------------------------

    def time(self, a: Any, b: Any, out: Any, shown: Any) -> None:
        from gemmkit.planning import Plan

        if not self._tried:
            return
        plan = Plan(a, b, None, out, None, {})
        compiled = plan._compiled
        memory = memory_of(compiled)
        jobs = {number: self._job(tried, memory) for number, tried in self._tried.items()}
        default = job_of(compiled, memory, compiled.launchable.entry().cubin)
        contents = contents_of(memory, self.infos[0].device)
        expected = self._expected(memory, contents)
        shown.begin("measuring", len(jobs))
        with Measuring(memory, contents, default.varied, self.infos[0].device) as process:
            process.keep(-1, default)
            limit = self._limit(process)
            for number, job in jobs.items():
                if self.left() <= 0:
                    self._drop(number, "not timed within the budget")
                    continue
                process.keep(number, job)
                self._timed(process, number, memory, expected, PAIRS, limit)
                process.forget(number)
                shown.advance()
            for number in sorted(self._tried, key=lambda n: -(self.rows[n].ratio or 0.0))[:FINALISTS]:
                if self.left() > 0:
                    process.keep(number, jobs[number])
                    self._timed(process, number, memory, expected, FINAL_PAIRS, limit)

    def _job(self, tried: Tried, memory: Memory) -> Job:
        kernel = tried.launchable
        pointers = [(kernel.slot(n + 1), memory.pointer(info.pointer)) for n, info in enumerate(self.infos)]
        slots = tuple((slot, at) for slot, at in pointers if slot is not None)
        return Job(kernel.entry().cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats),
                   tuple(kernel.values), 1, False, False, slots, (), (),
                   tuple(dict.fromkeys(at.buffer for _, at in pointers)))

    def _expected(self, memory: Memory, contents: Sequence[bytes]) -> np.ndarray:
        """The product in float64, of the matrices as they are on the GPU."""
        def wide(info: ArrayInfo) -> np.ndarray:
            number = memory.pointer(info.pointer).buffer
            return elements(contents[number], memory.buffers[number].start, info).astype(np.float64)

        return np.asarray(wide(self.infos[0]) @ wide(self.infos[1]))

    @staticmethod
    def _limit(process: Any) -> float:
        """Seconds that a variant may take."""
        try:
            process.result(-1, DEFAULT_S)                     # loads it, too
            start = time.monotonic()
            process.result(-1, DEFAULT_S)
        except Failed as error:
            raise RuntimeError("gemmkit.matmul, which variants are timed in turns with, does not run: "
                               f"{error}") from None
        return VARIANT_S + TIMES * (time.monotonic() - start)

    def _timed(self, process: Any, number: int, memory: Memory, expected: np.ndarray, pairs: int, limit: float) -> None:
        out = self.infos[2]
        written = [buffer for buffer in memory.buffers if buffer.is_written]
        at = written.index(memory.buffers[memory.pointer(out.pointer).buffer])
        try:
            found = elements(process.result(number, limit)[at], written[at].start, out)
            wrong = difference(expected, found, tolerance(out.dtype, out.dtype, self.sizes[2]))
            if wrong is not None:
                self._drop(number, f"wrong: {wrong}")
                return
            times = process.pairs(-1, number, pairs, MICROSECONDS, limit)
        except Failed as error:
            self._drop(number, f"failed: {error}")
            return
        mine = statistics.median(mine for _, mine in times)
        self.default = statistics.median(default for default, _ in times)
        m, n, k = self.sizes
        self.rows[number] = replace(self.rows[number], microseconds=mine, tflops=2e-6 * m * n * k / mine, is_right=True,
                                    ratio=statistics.median(default / mine for default, mine in times))

    def result(self) -> Explored:
        (m, n, k), (a, _, c) = self.sizes, self.infos
        what = f"{m} x {n} x {k}, {a.dtype} to {c.dtype}, on {self.target.name}"
        right = [row for row in self.rows if row.error is None]
        timed = sorted((row for row in right if row.microseconds is not None), key=lambda row: -(row.ratio or 0.0))
        rest = [row for row in right if row.microseconds is None] + [row for row in self.rows if row.error is not None]
        return Explored(what, (*timed, *rest), self.default, tuple(self.notes))


# -- small operands of the same kind ------------------------------------------------------------------------------------

def small_sizes(schedule: Any, lowered: Lowered, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """Sizes of which the same kernel computes one whole tile and what the last one has, along K two steps and the rest.
    Sizes that the schedule says stay."""
    least = (lowered.tile[0], lowered.tile[1], 2 * lowered.depth)
    steps = (*lowered.tile, lowered.depth)
    return tuple(size if said is not None else min(size, whole + size % step)
                 for said, size, whole, step in zip(schedule.sizes, sizes, least, steps))


def like(shape: tuple[int, int], info: ArrayInfo) -> np.ndarray:
    """A host array in the order of a matrix, and aligned as it is: of the same class of kernels."""
    wanted = alignment(info)
    is_by_rows = info.strides[1] == 1 if info.shape[1] > 1 else info.strides[0] != 1
    lines, length = shape if is_by_rows else shape[::-1]
    itemsize = info.dtype.itemsize
    for pitch in range(length, length + 17):
        memory = np.zeros(lines * pitch * itemsize + 64, np.uint8)
        shift = -memory.ctypes.data % 32 + wanted % 16
        held = memory[shift:shift + lines * pitch * itemsize].view(info.dtype).reshape(lines, pitch)[:, :length]
        array = held if is_by_rows else held.T
        if alignment(describe(array, "a")) == wanted:
            return array
    raise AssertionError(f"no host array is aligned to {wanted} bytes")
