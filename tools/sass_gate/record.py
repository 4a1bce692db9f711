"""Compiling the cases, in several processes, into what is written down."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from gemmkit.plans.ahead import compile_config, recorded
from gemmkit.runtime.compile import candidates, disassemble, release, versions
from gemmkit.runtime.device import H100
from gemmkit.tuning.choose import get_config
from tools.sass_gate.cases import CASES, Case, Launched
from tools.sass_gate.listing import Listing, digest, histogram, main_loops

STORED = Path(__file__).with_name("stored.json")
COMPILERS = "Python", "numba-cuda", "llvmlite", "NVVM"         # of what `versions` names, those that decide the code


def compilers() -> dict[str, str]:
    """What turns kernels into machine code here, and who prints it."""
    known = dict(item.split("=", 1) for item in versions().split(","))
    tools = {tool: release(found[0]) if (found := candidates(tool)) else "none" for tool in ("ptxas", "nvdisasm")}
    return {**{name: known[name] for name in COMPILERS}, **tools}


def measured(case: Case | Launched) -> dict[str, Any]:
    """What is written down of a case's kernel."""
    if isinstance(case, Launched):
        (launched,) = recorded(case.call, H100, zeros=False)
        entry = launched.launchable.entry()
        known = entry.meta["usage"]
        return _written(known["registers"], [known[name] for name in ("spill_stores", "spill_loads", "stack_bytes")],
                        disassemble(entry.cubin))
    sizes = {**dict(zip("MNK", case.sizes)), **({"batch": case.batch} if case.batch else {})}
    conf = get_config(gemm_shape=sizes, device=H100, **case.fields())
    operands = {name: make() for name, make in case.operands.items()}
    kernel = compile_config(conf, device=H100, gemm_shape=sizes, operands=operands)
    usage = kernel.usage
    return _written(usage.registers, [usage.spill_stores, usage.spill_loads, usage.stack_bytes], kernel.sass)


def _written(registers: int, spills: list[int], sass: str) -> dict[str, Any]:
    return {"registers": registers, "spills": spills, "histogram": histogram(sass), "loops": main_loops(Listing.of(sass))}


def _named(name: str) -> tuple[str, dict[str, Any], float]:
    start = time.perf_counter()
    return name, measured(CASES[name]), time.perf_counter() - start


def record(names: Sequence[str] = (), jobs: int = 2) -> dict[str, Any]:
    """The cases of those names (all, if there are none), compiled by so many processes."""
    wanted = list(names or CASES)
    kernels: dict[str, Any] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for name, made, seconds in pool.map(_named, wanted):
            kernels[name] = made
            print(f"{name:32} {made['registers']:3} registers, {sum(made['histogram'].values()):5} instructions, "
                  f"{seconds:4.1f} s", file=sys.stderr, flush=True)
    return {"compilers": compilers(), "kernels": kernels}


def compact(recorded: dict[str, Any]) -> dict[str, Any]:
    """The same with a digest and a length in place of a loop's lines: what the repository keeps."""
    kernels = {name: {**kernel, "loops": {kind: shortened(loop) for kind, loop in kernel["loops"].items()}}
               for name, kernel in recorded["kernels"].items()}
    return {**recorded, "kernels": kernels}


def shortened(loop: Any) -> Any:
    return loop if isinstance(loop, str) else f"{len(loop)} lines, {digest(loop)}"


def save(recorded: dict[str, Any], file: Path) -> None:
    """One kernel a line, so that a change of one is a change of one line."""
    kernels = ",\n".join(f"{json.dumps(name)}: {json.dumps(kernel, sort_keys=True)}"
                         for name, kernel in sorted(recorded["kernels"].items()))
    text = f'{{"compilers": {json.dumps(recorded["compilers"])},\n"kernels": {{\n{kernels}\n}}}}\n'
    file.write_text(text, encoding="utf-8")


def load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


__all__ = ["STORED", "compact", "compilers", "load", "measured", "record", "save", "shortened"]
