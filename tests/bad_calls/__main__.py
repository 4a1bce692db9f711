"""``python -m tests.bad_calls --count 10000 --seed 1``: what was drawn, how it went, and each class of fault."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.bad_calls.draw import draw
from tests.bad_calls.judge import Case, good_call, run

PART = 50                              # cases that a process takes at a time


def in_parts(work: Callable[[int, range], Any], options: argparse.Namespace) -> Iterator[Any]:
    """``work(seed, numbers)`` of all cases that a command's options ask for, in as many processes as ``jobs``."""
    numbers = range(options.first, options.first + options.count)
    parts = [numbers[n:n + PART] for n in range(0, len(numbers), PART)]
    if options.jobs == 1:
        yield from (work(options.seed, part) for part in parts)
        return
    with multiprocessing.Pool(options.jobs) as pool:
        yield from pool.imap(partial(work, options.seed), parts)


def outcomes(seed: int, numbers: range, accepted: bool = False) -> tuple[Counter[str], list[tuple[int, str]]]:
    """How the calls went, and the faults of those numbers."""
    went: Counter[str] = Counter()
    faults = []
    for number in numbers:
        case = draw(seed, number)
        start = time.process_time()
        outcome = run(case)
        if time.process_time() - start > 2:
            print(f"case {number} took {time.process_time() - start:.0f} s: {case.code}"[:200], flush=True)
        went[outcome.kind] += 1
        fault = outcome.fault or (good_call() if number % 20 == 0 else None)
        if fault is not None:
            faults.append((number, fault))
        elif accepted and outcome.kind == "accepted":
            print(f"accepted {number}: {case.broken}    {case.code}"[:300])
    return went, faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_calls", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="this case alone, with its traceback")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--accepted", action="store_true", help="show what was accepted and cannot be compared")
    options = parser.parse_args()
    if options.only is not None:
        print(draw(options.seed, options.only))
        print(run(draw(options.seed, options.only)))
        return 0
    went: Counter[str] = Counter()
    faults: dict[str, list[tuple[int, Case, str]]] = defaultdict(list)
    began = time.monotonic()
    for counted, found in in_parts(partial(outcomes, accepted=options.accepted), options):
        went += counted
        for number, fault in found:
            print(f"case {number}: {fault}"[:300], flush=True)
            faults[re.sub(r": .*", "", fault, count=1, flags=re.DOTALL)].append((number, draw(options.seed, number), fault))
    for what, cases in sorted(faults.items(), key=lambda item: -len(item[1])):
        number, case, fault = cases[0]
        print(f"\n{len(cases)} x {what}\n  {fault[:500]}\n  case {number}: {case.broken}\n  " + str(case).replace("\n", "\n  "))
    total = sum(map(len, faults.values()))
    print(f"\n{options.count} calls of seed {options.seed} from number {options.first} on, in {time.monotonic() - began:.0f} s: "
          + ", ".join(f"{count} {kind}" for kind, count in went.most_common()) + f"; {total} faults of {len(faults)} classes")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
