"""Compile the kernels of many cases ahead, in parallel processes; what times them finds their cubins on disk.

Nothing here touches the GPU: a case's call is resolved with host arrays that are never written, under the emulator's mode,
and compiled for the device that is there (an H100 where there is none). `tests/bench/test_prepare.py` checks that a
call on device arrays finds what was compiled.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cases import DTYPES, Case, operands, plan_arguments
from bench.experiments.experiment import Experiment
from gemmkit.plans import ahead


@dataclass(frozen=True)
class Prepared:
    """What became of a case's kernel: its resources, or why there is none."""

    case: Any
    seconds: float
    usage: dict[str, Any] | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.usage is None:
            return f"{self.case}: {self.error}"
        spilled = self.usage["spill_stores"] + self.usage["spill_loads"]
        trouble = f", SPILLS {spilled} bytes" if spilled else ""
        trouble += f", STACK {self.usage['stack_bytes']} bytes" if self.usage["stack_bytes"] else ""
        return f"{self.case}: {self.usage['registers']} registers{trouble}, {self.seconds:.1f} s"


def host_array(name: str, rows: int, columns: int, dtype: str) -> np.ndarray:
    """Address space that nothing is ever written to, so that no memory is taken."""
    return np.empty((rows, columns), DTYPES[dtype])


def resolve(case: Case) -> Any:
    """The kernel's specialisation and arguments for a case (`gemmkit.plans.plan.Compiled`)."""
    import gemmkit
    from gemmkit.plans.compiled import Compiled
    from gemmkit.plans.problem import resolve as resolved
    from gemmkit.runtime.arrays import describe_all

    (a, b, c, conf), keywords = plan_arguments(case, operands(case, host_array))
    out = keywords.pop("out")
    with gemmkit.emulate(mapping="device"):
        infos = describe_all(a, b, c, out)
        assert infos[3] is not None
        problem = resolved(*infos, conf, keywords)
        return Compiled(problem, problem.seen_out(infos[3]))


class HostArrays:
    """What experiments need of an array library to make their operands."""

    def normal(self, rows: int, columns: int, dtype: str, seed: int) -> np.ndarray:
        return host_array("", rows, columns, dtype)

    def empty(self, rows: int, columns: int, dtype: str) -> np.ndarray:
        return host_array("", rows, columns, dtype)

    def joined(self, a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return a

    def scaled(self, array: np.ndarray, factor: float) -> np.ndarray:
        return array

    def shown(self, array: np.ndarray, shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return array, array

    def complex_view(self, parts: np.ndarray) -> np.ndarray:
        return parts.view(np.result_type(parts.dtype, np.complex64))[..., 0]

    def of_numbers(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.astype({"i": np.int32, "u": np.int32, "b": np.bool_}.get(numbers.dtype.kind, np.float32))


def recorded(call: Callable[[], object]) -> list[Any]:
    """The products that a call of gemmkit would compute on host arrays; none is computed, nothing written."""
    return ahead.recorded(call, zeros=False)


def products(case: Any) -> list[Any]:
    """What a case launches, as `recorded` has it."""
    if not isinstance(case, Experiment):
        return [resolve(case)]
    host = HostArrays()
    return recorded(case.ours(host, case.operands(host, 0)))


def key(case: Any) -> tuple:
    """What decides which kernels a case runs."""
    kernels = dict.fromkeys(each.launchable.code_key for each in products(case))
    return tuple(kernels), isinstance(case, Experiment) and case.peers_kernel


def built(compiled: Any) -> dict[str, Any]:
    """Compile a kernel, or find it on disk; the resources that it takes."""
    return dict(compiled.launchable.entry().meta["usage"])


def build(case: Any) -> Prepared:
    """Compile a case's kernels, or find them on disk; of several, the most that one of them takes."""
    start = time.perf_counter()
    try:
        distinct_ones = {each.launchable.code_key: each for each in products(case)}
        usages = [built(compiled) for compiled in distinct_ones.values()]
        if isinstance(case, Experiment):
            case.build_peer()
    except Exception as problem:
        return Prepared(case, time.perf_counter() - start, error=f"{type(problem).__name__}: {problem}")
    return Prepared(case, time.perf_counter() - start, {name: max(u[name] for u in usages) for name in usages[0]})


def distinct(cases: Sequence[Any]) -> tuple[list[Any], list[Prepared]]:
    """One case for each kernel, and the cases that have none."""
    kernels: dict[tuple, Any] = {}
    failed = []
    for case in cases:
        try:
            kernels.setdefault(key(case), case)
        except Exception as problem:
            failed.append(Prepared(case, 0.0, error=f"{type(problem).__name__}: {problem}"))
    return list(kernels.values()), failed


def plain_twin(case: Case) -> Case:
    """The plain product that a case is compared with, where its peer is our own."""
    return Case(case.group, "matmul", case.kind, case.m, case.n, case.k, case.layout, mapping=case.mapping)


def prepare(cases: Sequence[Any], jobs: int | None = None) -> list[Prepared]:
    """Compile what the cases run in ``jobs`` processes; each kernel once. Prints a line a kernel as it comes."""
    jobs = jobs or max(1, (os.cpu_count() or 2) - 2)
    start = time.perf_counter()
    twins = [plain_twin(case) for case in cases if case.peer == "plain"]
    wanted, failed = distinct([*cases, *twins])
    for each in failed:
        print(f"CANNOT: {each}", flush=True)
    found = list(failed)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(wanted))), mp_context=context) as pool:
        futures = [(case, pool.submit(build, case)) for case in wanted]
        for case, future in futures:
            try:
                made = future.result()
            except Exception as problem:  # the process died
                made = Prepared(case, 0.0, error=f"{type(problem).__name__}: {problem}")
            print(f"{'CANNOT: ' if made.error else ''}{made}", flush=True)
            found.append(made)
    seconds = time.perf_counter() - start
    print(f"{len(wanted)} kernels of {len(cases)} rows in {seconds:.0f} s by {min(jobs, len(wanted))} processes", flush=True)
    return found
