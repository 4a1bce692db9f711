"""``python -m tests.bad_calls --count 10000 --seed 1``: what was drawn, how it went, and each class of fault."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter, defaultdict

from tests.bad_calls.draw import draw
from tests.bad_calls.judge import Case, good_call, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_calls", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="this case alone, with its traceback")
    parser.add_argument("--accepted", action="store_true", help="show what was accepted and cannot be compared")
    options = parser.parse_args()
    if options.only is not None:
        print(draw(options.seed, options.only))
        print(run(draw(options.seed, options.only)))
        return 0
    went: Counter[str] = Counter()
    faults: dict[str, list[tuple[int, Case, str]]] = defaultdict(list)
    began = time.process_time()
    for number in range(options.first, options.first + options.count):
        case = draw(options.seed, number)
        start = time.monotonic()
        outcome = run(case)
        if time.monotonic() - start > 2:
            print(f"case {number} took {time.monotonic() - start:.0f} s: {case.code}"[:200], flush=True)
        went[outcome.kind] += 1
        fault = outcome.fault or (good_call() if number % 20 == 0 else None)
        if fault is not None:
            faults[re.sub(r": .*", "", fault, count=1, flags=re.DOTALL)].append((number, case, fault))
        elif options.accepted and outcome.kind == "accepted":
            print(f"accepted {number}: {case.broken}    {case.code}"[:300])
    for what, cases in sorted(faults.items(), key=lambda item: -len(item[1])):
        number, case, fault = cases[0]
        print(f"\n{len(cases)} x {what}\n  {fault[:500]}\n  case {number}: {case.broken}\n  " + str(case).replace("\n", "\n  "))
    total = sum(map(len, faults.values()))
    print(f"\n{options.count} calls of seed {options.seed} from number {options.first} on, in {time.process_time() - began:.0f} s: "
          + ", ".join(f"{count} {kind}" for kind, count in went.most_common()) + f"; {total} faults of {len(faults)} classes")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
