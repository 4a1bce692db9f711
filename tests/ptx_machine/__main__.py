"""``python -m tests.ptx_machine --cases 60 --seed 1``: drawn products by the compiled kernels' PTX, compared with the emulator and
with NumPy in float64. Ends with 1 if one is wrong; each can be repeated by the lines that are printed."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

from tests.ptx_machine.compare import Outcome, outcomes
from tests.support.jobs import in_jobs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_machine", description=__doc__)
    parser.add_argument("--cases", type=int, default=60, help="how many products; two of each kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the kernel to begin with")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    keys = [f"ptx {given.seed} {n}" for n in range(given.first, given.first + -(-given.cases // 2))]
    begin, rows = time.time(), defaultdict[str, list[Outcome]](list)
    for n, made in enumerate(in_jobs(outcomes, keys, given.jobs)):
        for outcome in made:
            rows[outcome.family.operator[0]].append(outcome)
            p = outcome.problem
            print(f"{given.first + n:4} {outcome.family.operator} {p.M} x {p.N} x {p.K}: {outcome.differing} of {outcome.elements} differ, "
                  f"by {outcome.most:.2g} of the bound; {outcome.seconds:.1f} s", flush=True)
            if outcome.fault:
                print(f"WRONG: {outcome.fault}\n{outcome.repeat}\n", flush=True)
    print(f"\n{'operator':<10} {'cases':>6} {'wrong':>6} {'bits differ':>12} {'elements':>9} {'of them differ':>15} {'most':>6}")
    for kind, of in sorted(rows.items()):
        print(f"{kind:<10} {len(of):>6} {sum(bool(o.fault) for o in of):>6} {sum(o.differing > 0 for o in of):>12} "
              f"{sum(o.elements for o in of):>9} {sum(o.differing for o in of):>15} {max(o.most for o in of):>6.2g}")
    wrong = sum(bool(o.fault) for of in rows.values() for o in of)
    print(f"{sum(map(len, rows.values()))} cases of {len(keys)} kernels, {wrong} wrong, seed {given.seed}: {time.time() - begin:.0f} s. "
          "(most: the largest difference from the emulator, in units of the bound on NumPy's)")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
