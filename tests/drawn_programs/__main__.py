"""``python -m tests.drawn_programs --count 1000 --seed 1``: what was drawn, how it went, and each kind of fault as a script."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from functools import partial

from tests.drawn_programs.features import features
from tests.drawn_programs.grammar import drawn
from tests.drawn_programs.judge import Judged, fails_so, judge_number, judged, script
from tests.drawn_programs.shrink import shrunk
from tests.drawn_programs.syntax import statements
from tests.support.jobs import in_jobs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drawn_programs", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--shrink", type=float, default=45.0, help="seconds to make a failing program smaller, for each kind of fault")
    parser.add_argument("--only", default="", help="only programs that have this feature, such as 'packed rows'; the others are not judged")
    parser.add_argument("--show", action="store_true", help="print each program, and what came of it")
    given = parser.parse_args()
    began, went = time.monotonic(), Counter[str]()
    said, ran, drew, slips = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    faults = defaultdict[str, list[Judged]](list)
    seconds = weak = 0.0
    numbers = [n for n in range(given.first, given.first + given.count) if not given.only or given.only in features(drawn(given.seed, n))]
    for made in in_jobs(partial(judge_number, given.seed), numbers, given.jobs):
        outcome, case = made.outcome, made.case
        went["slips refused" if case.slip and not outcome.is_fault else outcome.kind] += 1
        seconds, weak = seconds + made.seconds, weak + outcome.weak
        drew.update(features(case))
        if outcome.kind == "right":
            ran.update(features(case))
        elif outcome.kind == "refused" and not case.slip:
            said[outcome.said] += 1
        elif outcome.kind == "refused":
            slips[case.slip] += 1
        else:
            if outcome.cause not in faults:
                print(f"program {made.number}: {outcome.cause}", flush=True)
            faults[outcome.cause].append(made)
        if given.show:
            print(f"# {made.number}: {outcome.kind} {outcome.said}{outcome.text} ({made.seconds:.1f} s)\n{script(case)}", flush=True)
    wanted = len(numbers) - sum(slips.values())
    print("\nrefused, by their first words:")
    for words, count in said.most_common():
        print(f"  {count:4} {words}")
    print("slips refused: " + ", ".join(f"{kind} {count}" for kind, count in slips.most_common()))
    print("features of programs that ran (of those drawn): " + ", ".join(f"{name} {ran[name]} ({count})" for name, count in sorted(drew.items())))
    for cause, of in sorted(faults.items(), key=lambda item: -len(item[1])):
        first = min(of, key=lambda x: sum(1 for _ in statements(x.case.source.loop)) + len(x.case.source.arrays))
        numbers_shown = " ".join(str(x.number) for x in of[:12])
        small = shrunk(first.case, partial(fails_so, cause), given.shrink) if given.shrink else first.case
        outcome = judged(small) if given.shrink else first.outcome
        print(f"\n{'=' * 100}\n{len(of)} x {cause}\n  (programs {numbers_shown}; this is {first.number}, made smaller)\n\n{script(small, outcome)}", flush=True)
    total = sum(map(len, faults.values()))
    print(f"\n{len(numbers)} programs of seed {given.seed} from number {given.first} on, in {seconds:.0f} s of processors and "
          f"{time.monotonic() - began:.0f} s: {went['right']} right ({went['right'] / max(1, wanted):.0%} of those without a slip), "
          f"{went['refused']} refused, {went['slips refused']} slips refused; bounds say little of {weak / max(1, went['right']):.1%} of what "
          f"is stored; {total} faults of {len(faults)} kinds")
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
