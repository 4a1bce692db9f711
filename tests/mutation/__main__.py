"""``python -m tests.mutation [--derived] [--passes] [--sample N --seed S] [--every] [--jobs J] [--json FILE] [--only TEXT ...]``"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")     # before NumPy: processes are forked

import random
import sys
from pathlib import Path

from tests.mutation import derived, passes, report, running, seeding


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutation", description="Seeds faults in the kernels' syntax trees, and in "
                                     "derived texts, and says which of them the emulator finds, and how.")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the faults, drawn")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draw (0)")
    parser.add_argument("--derived", action="store_true", help="faults in derived texts alone (tests/mutation/derived.py)")
    parser.add_argument("--passes", action="store_true", help="faults in the passes of programs alone (tests/mutation/passes.py); with --sample, "
                        "--seed, --only and --coverage")
    parser.add_argument("--every", action="store_true", help="at every place where an operator finds something (hours)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="faults whose description has this text (or another: it may "
                        "be given more than once)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="processes side by side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="keep there what each product runs, for the next time")
    options = parser.parse_args(arguments)
    if options.derived:
        return derived.report(options.only or [], options.jobs)
    if options.passes:
        return passes.report(options.only or [], options.jobs, options.sample, options.seed, options.coverage, options.every)
    faults = [fault for fault in seeding.faults(options.every) if any(text in str(fault) for text in options.only or [""])]
    is_whole = options.sample is None and not options.only
    if options.sample is not None:
        faults = random.Random(options.seed).sample(faults, min(options.sample, len(faults)))
    costs = running.coverage(options.jobs, options.coverage)
    findings = []
    for finding in running.run_all(faults, costs, options.jobs):
        findings.append(finding)
        if options.json and len(findings) % 20 == 0:
            report.write(findings, costs, options.json)
        if sys.stderr.isatty():
            print(f"\r{len(findings)} of {len(faults)}", end="", file=sys.stderr, flush=True)
    if options.json:
        report.write(findings, costs, options.json)
    missed = report.show(findings, is_whole)
    if not is_whole:
        return missed
    return max(missed, derived.report([], options.jobs), passes.report([], options.jobs, every=options.every))


if __name__ == "__main__":
    sys.exit(main())
