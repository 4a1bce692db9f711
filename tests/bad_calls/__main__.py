"""``python -m tests.bad_calls --count 10000 --seed 1``: what was drawn, how it went, and each class of fault."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter, defaultdict
from functools import partial

from tests.bad_calls.draw import draw, outcomes
from tests.bad_calls.judge import Case, run
from tests.support.jobs import in_parts


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
