"""Compile the kernels of many cases ahead, in parallel processes; what times them finds their cubins on disk.

Nothing here touches the GPU: a case's call is resolved with host arrays that nobody ever writes, under the emulator's mode,
and compiled for the device that is there (an H100 where there is none). `tests/bench/test_prepare.py` checks that a
call on device arrays finds what was compiled.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cases import DTYPES, Case, operands, plan_arguments


@dataclass(frozen=True)
class Prepared:
    """What became of a case's kernel: its resources, or why there is none."""

    case: Case
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
    """The kernel's specialisation and arguments for a case (`gemmkit.planning.Compiled`)."""
    import gemmkit
    from gemmkit.planning import Compiled
    from gemmkit.problem import describe_all
    from gemmkit.problem import resolve as resolved

    (a, b, c, conf), keywords = plan_arguments(case, operands(case, host_array))
    out = keywords.pop("out")
    with gemmkit.emulate():
        infos = describe_all(a, b, c, out)
        assert infos[3] is not None
        return Compiled(resolved(*infos, conf, keywords), infos[3])


def key(case: Case) -> tuple:
    """What decides which kernel a case runs."""
    compiled = resolve(case)
    conf = compiled.problem.config
    arguments = tuple((str(argument.type), argument.fingerprint) for argument in compiled.arguments)
    return conf.kernel, conf.threads, conf.blocks_per_sm, arguments


def build(case: Case) -> Prepared:
    """Compile a case's kernel, or find it on disk."""
    from gemmkit.kernels.select import KERNELS
    from gemmkit.runtime.compile import cubin_of

    start = time.perf_counter()
    try:
        compiled = resolve(case)
        conf = compiled.problem.config
        entry = cubin_of(
            KERNELS[conf.kernel],
            tuple(argument.type for argument in compiled.arguments),
            "\n".join(argument.fingerprint for argument in compiled.arguments),
            conf.threads,
            compiled.problem.device,
            conf.blocks_per_sm,
        )
    except Exception as problem:
        return Prepared(case, time.perf_counter() - start, error=f"{type(problem).__name__}: {problem}")
    return Prepared(case, time.perf_counter() - start, dict(entry.meta["usage"]))


def distinct(cases: Sequence[Case]) -> tuple[list[Case], list[Prepared]]:
    """One case for each kernel, and the cases that have none."""
    kernels: dict[tuple, Case] = {}
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


def prepare(cases: Sequence[Case], jobs: int | None = None) -> list[Prepared]:
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
