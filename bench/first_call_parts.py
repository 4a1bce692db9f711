"""Where a process's cold first product spends its time: `python -m bench.first_call_parts --backend torch --runs 5`.

Each run is a process with a fresh GEMMKIT_CACHE_DIR. The libraries, the device's context and gemmkit are imported before;
what is timed is one `gemmkit.matmul(a, b)` until its result is there, and the parts of it. A part's time is without that of
the parts in it. On a machine with no GPU the kernel is compiled for an H100 and not launched.

The table has the least and the median of the runs: wall time, and processor time of this process (ptxas is another).
``--work`` is what is multiplied: numbers of a type, ``rbf`` (float32, with an exponential behind it) or ``min-plus``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PARTS = ("resolving the call", "specialising", "loading Numba", "types and LLVM code", "its text, and NVVM's check", "NVVM",
         "ptxas", "loading the cubin", "all else: the key, the cache, the launch")
*_, ELSE = PARTS
TOTAL = "first call"
WORKS = {"f16": "f2", "f32": "f4", "f64": "f8", "rbf": "f4", "min-plus": "f4"}


def keywords_of(work: str) -> dict[str, Any]:
    """What a product of this work is given beside its operands."""
    import gemmkit as gk

    if work == "rbf":
        return {"epilogue": gk.epilogues.Elementwise(lambda x: math.exp(-0.1 * x))}
    return {"operator": gk.operators.MIN_PLUS} if work == "min-plus" else {}


class Clock:
    """Times of parts that call each other, each without what is in it."""

    def __init__(self) -> None:
        self.spent = {part: [0.0, 0.0] for part in PARTS}
        self._open: list[str] = []
        self._since = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            for at in (0, 1):
                self.spent[self._open[-1]][at] += now[at] - self._since[at]
        self._since = now

    def call(self, part: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        self._charge()
        self._open.append(part)
        try:
            return function(*args, **keywords)
        finally:
            self._charge()
            self._open.pop()

    def watch(self, owner: Any, name: str, part: str, first: Callable[[], None] = lambda: None) -> None:
        """Charge calls of ``owner.name`` to a part; ``first`` runs before each."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            first()
            return self.call(part, function, *args, **keywords)

        setattr(owner, name, timed)


def watched() -> Clock:
    """A clock at the places where the parts of a first call begin. What it puts there is read as gemmkit's own from then
    on: nothing has been compiled yet that would hold the others."""
    from gemmkit.lang import deferred as later
    from gemmkit.lang.fingerprint import forget_readings
    from gemmkit.plans import plan as planning
    from gemmkit.runtime import compile, launch

    clock = Clock()

    @functools.cache
    def watch_nvvm() -> None:                                 # a module of Numba's, which is loaded by then
        from numba.cuda.cudadrv import nvvm

        clock.watch(nvvm.CompilationUnit, "compile", "NVVM")

    clock.watch(planning, "resolve", "resolving the call")
    clock.watch(planning, "Compiled", "specialising")
    clock.watch(later, "_make_all", "loading Numba")
    clock.watch(compile, "to_ptx", "types and LLVM code")
    clock.watch(compile, "to_asm", "its text, and NVVM's check", watch_nvvm)
    clock.watch(compile, "assemble", "ptxas")
    clock.watch(launch, "load", "loading the cubin")
    clock.watch(launch.LoadedKernel, "bind", "loading the cubin")
    forget_readings()
    return clock


def on_device(backend_name: str, work: str, n: int) -> dict[str, Any]:
    """The parts of this process's first product; of a plain one also its error."""
    from bench import backends

    backend = backends.choose(backend_name)
    a, b = (backend.normal(n, n, f"f{8 * int(WORKS[work][1:])}", seed) for seed in (0, 1))
    import gemmkit

    keywords = keywords_of(work)
    reference = None if keywords else backend.reference(a, b)
    backend.synchronise()
    clock = watched()

    def product() -> Any:
        d = gemmkit.matmul(a, b, **keywords)
        backend.synchronise()
        return d

    d = clock.call(ELSE, product)
    return {"parts": clock.spent, **({} if reference is None else {"error": backend.relative_error(d, reference)})}


def compiled_alone(work: str, n: int) -> dict[str, Any]:
    """The same for an H100 that is not here, without a launch."""
    import numpy as np

    from gemmkit.plans import plan as planning
    from gemmkit.runtime.array_info import ArrayInfo
    from gemmkit.runtime.compile import cubin_of

    keywords = keywords_of(work)
    clock = watched()

    def product() -> None:
        held = np.dtype(WORKS[work])
        a, b, d = (ArrayInfo(2**20, (n, n), (n, 1), held, 0, False, "numpy") for _ in "abd")
        problem = vars(planning)["resolve"](a, b, None, None, None, keywords)    # as they are watched
        kernel = vars(planning)["Compiled"](problem, d).launchable
        cubin_of(kernel.kernel, kernel.arguments, kernel.threads, kernel.target, kernel.blocks_per_sm)

    clock.call(ELSE, product)
    return {"parts": clock.spent}


def child(options: argparse.Namespace) -> dict[str, Any]:
    """What one run reports, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="gemmkit-bench-") as cache:
        command = [sys.executable, "-m", "bench.first_call_parts", "--one", "--work", options.work, "--size",
                   str(options.size), *(["--backend", options.backend] if options.backend else [])]
        done = subprocess.run(command, env={**os.environ, "GEMMKIT_CACHE_DIR": cache}, capture_output=True, text=True,
                              cwd=Path(__file__).resolve().parent.parent, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """The parts of all runs, in milliseconds."""
    lines = [f"{'':42}{'wall: least':>12}{'median':>8}{'processor: least':>18}{'median':>8}"]
    for part in (*PARTS, TOTAL):
        summed = PARTS if part == TOTAL else (part,)
        wall, processor = ([1e3 * sum(run["parts"][each][at] for each in summed) for run in found] for at in (0, 1))
        lines.append(f"{part:42}{min(wall):12.0f}{statistics.median(wall):8.0f}{min(processor):18.0f}"
                     f"{statistics.median(processor):8.0f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.first_call_parts", description="Parts of a cold first product.")
    parser.add_argument("--backend", help="array library (default: the first that is installed)")
    parser.add_argument("--work", choices=WORKS, default="f16")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one", action="store_true", help="run once in this process, and print JSON")
    options = parser.parse_args(arguments)
    if not options.one:
        print(table([child(options) for _ in range(options.runs)]))
        return 0
    from gemmkit.runtime import device

    if device.available():
        from bench import backends

        print(json.dumps(on_device(options.backend or backends.installed()[0], options.work, options.size)))
    else:
        print(json.dumps(compiled_alone(options.work, options.size)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
