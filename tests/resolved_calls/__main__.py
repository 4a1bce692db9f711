"""``python -m tests.resolved_calls --count 20000 --seed 1 --jobs 16``: what was drawn, and each class of refusal."""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter, defaultdict

from gemmkit.plans.ahead import recorded
from tests.resolved_calls.draw import draw, scope
from tests.resolved_calls.resolve import DEVICES, Refusal, refusals
from tests.support.jobs import in_parts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.resolved_calls", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="this case alone, with its traceback")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.only is not None:
        case = draw(options.seed, options.only)
        print(case.code)
        for name, device in DEVICES.items():
            try:
                print(name, *(each.problem.config.kernel for each in recorded(lambda: eval(case.code, scope()), device, zeros=False)
                              if hasattr(each, "problem")))
            except Exception:
                print(name, traceback.format_exc())
        return 0
    began = time.monotonic()
    went: Counter[str] = Counter()
    classes: dict[str, list[Refusal]] = defaultdict(list)
    for counted, found in in_parts(refusals, options):
        went += counted
        for refusal in found:
            what = re.sub(r"\d+", "#", refusal.text)[:80]
            if what not in classes:
                print(f"case {refusal.number} for the {refusal.device}: {refusal.text[:400]}\n    {refusal.code}", flush=True)
            classes[what].append(refusal)
    for what, each in sorted(classes.items(), key=lambda item: -len(item[1])):
        first = each[0]
        print(f"\n{len(each)} x {what}\n  {first.text[:400]}\n  case {first.number} for the {first.device}: {first.code}")
    total = sum(map(len, classes.values()))
    print(f"\n{options.count} calls of seed {options.seed} for {', '.join(DEVICES)}, in {time.monotonic() - began:.0f} s: "
          + ", ".join(f"{count} {kind}" for kind, count in went.most_common()) + f"; {total} faults of {len(classes)} classes")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
