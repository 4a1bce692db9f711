"""Every bench, in one command: `python -m bench.all` (`make bench`).

    python -m bench.all                        all of them: an hour and more on one GPU
    python -m bench.all decode random --quick  some, with few pairs
    python -m bench.all --list                 their rows
    python -m bench.all --limit 600            rows for ten minutes; the others are reported as not measured

A bench is a result file with its groups of rows, and pictures beside it, one a group. Kernels are compiled ahead in parallel
processes, each row is measured in a worker process, and a file is written after every row: what is interrupted keeps what
was measured. The exit status is 1 if a row is missing. `python -m bench.readme` makes README's tables of the files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from bench import cases, choice, hopper, host, plot, report
from bench.experiments import run

FILES: dict[str, tuple[str, ...]] = {
    "hopper_square": ("square",),
    "hopper_fused": ("fused",),
    "hopper": tuple(group for group in cases.PUBLISHED if group not in ("square", "fused")),
    "multistage": ("float32", "float64", "complex", "long", "stacks", "grouped", "experts", "sparse", "minplus",
                   "forced"),
    "decode": ("skinny", "some", "decode"),
    "experiments": tuple(group for group in run.DEFAULT if group not in (*cases.PUBLISHED, "minplus", "symmetric")),
    "symmetric": ("symmetric",),
    "mixed": run.TOGETHER["paper"],
    "rivals": ("rivals",),
    "ozaki": ("ozaki",),
    "stream_k": ("streamk",),
    "random": ("random",),
    "rows": ("rows",),
    "composed": ("composed",),
    "attention": ("attention", "attention_short"),
    "attention_rules": ("attention_rules",),
    "mlp": ("mlp",),
    "programs": ("programs",),
    "specs": run.TOGETHER["specs"],
}


def later(name: str) -> Callable[[Sequence[str]], int]:
    """The command of a bench that needs PyTorch on a GPU, which is imported when it runs."""
    def main(arguments: Sequence[str]) -> int:
        return int(import_module(f"bench.{name}").main(arguments))

    return main


OTHERS: dict[str, Callable[[Sequence[str]], int]] = {
    "choice": choice.main, "host": host.main,
    **{name: later(name) for name in ("attention_backward", "derived", "novel", "shares", "sequences", "row_programs",
                                      "models", "scaled", "training", "conv", "compiled", "quantised", "cypress",
                                      "recurrences")}}
NAMES = (*FILES, *OTHERS)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.all", description="Every bench.")
    made.add_argument("benches", nargs="*", metavar="bench", help=f"of {', '.join(NAMES)} (default: all)")
    hopper.add_options(made)
    return made


def rows_of(groups: Sequence[str], match: str, quick: bool) -> list[Any]:
    """The rows of some groups, of `bench.hopper` and `bench.experiments`."""
    found: list[Any] = []
    for group in groups:
        found += run.make([group], match, quick) if group in run.GROUPS else cases.make([group], match=match, quick=quick)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    for name in options.benches:
        if name not in NAMES:
            made.error(f"{name!r} is none of {', '.join(NAMES)}")
    if options.out is not None and options.out.endswith(".json"):
        made.error(f"--out: got the file {options.out!r}; each bench writes one, so a folder is needed")
    wanted, status, begun, limit = options.benches or NAMES, 0, time.monotonic(), options.limit
    for n, name in enumerate(wanted, 1):
        print(f"\n[{n} of {len(wanted)}] {name}, after {time.monotonic() - begun:.0f} s", flush=True)
        if name in OTHERS:
            if not options.list and options.prepare != "only":
                status |= OTHERS[name](["--out", str(report.results_path(name, options.out))])
            continue
        rows = rows_of(FILES[name], options.match, options.quick)
        if not rows:  # none of this bench matches
            continue
        options.limit = max(1.0, limit - (time.monotonic() - begun))
        status |= hopper.execute(name, rows, options, run.on_torch)
        path = report.results_path(name, options.out)
        if not options.list and options.prepare != "only" and report.read(path)["rows"]:
            print(*plot.draw(report.read(path), path.with_suffix(".png")), sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
