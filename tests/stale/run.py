"""Edits programs while they run, and compares what is compiled after each edit with what a fresh process compiles.

    python -m tests.stale.run --edits 1000 --seed 1
"""

from __future__ import annotations

import argparse
import difflib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.stale import edits
from tests.stale.fresh import Fresh
from tests.stale.kernel import ptx_of

_PER_PROGRAM = 10
_NEW_INSTANCE = (edits.redefine_component, edits.run_the_cell_again, edits.reload_in_place)


class Outcome(NamedTuple):
    """An edit, the PTX after it, that of a fresh process, and the program as it then reads."""

    edit: str
    ptx: str
    expected: str
    source: str

    @property
    def is_stale(self) -> bool:
        return self.ptx != self.expected


def edited(count: int, seed: int, fresh: Fresh) -> Iterator[Outcome]:
    """``count`` edits of drawn programs, each kind in turn."""
    rng = random.Random(seed)
    order: list[edits.Edit] = []
    for n in range(count):
        if n % _PER_PROGRAM == 0:
            program = edits.drawn(rng)
            module = edits.load_source(program.source, "users_program")
            step = module.Step()
            ptx_of(step)
        if not order:
            order = rng.sample(edits.EDITS, len(edits.EDITS))
        edit = order.pop()
        program = edit(rng, program, module)
        if edit in _NEW_INSTANCE:
            step = module.Step()
        yield Outcome(edit.__name__, ptx_of(step), fresh.ptx(program.source), program.source)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    done: Counter[str] = Counter()
    stale: Counter[str] = Counter()
    with Fresh() as fresh:
        for outcome in edited(given.edits, given.seed, fresh):
            done[outcome.edit] += 1
            stale[outcome.edit] += outcome.is_stale
            if outcome.is_stale:
                print(f"stale after {outcome.edit} of edit {sum(done.values())}:\n{outcome.source}")
                print(*difflib.unified_diff(outcome.expected.splitlines(), outcome.ptx.splitlines(), "fresh", "edited",
                                            lineterm="", n=1), sep="\n")
    for name in sorted(done):
        print(f"{name:28} {done[name]:5} edits {stale[name]:5} stale")
    print(f"{sum(done.values())} edits, {sum(stale.values())} stale (seed {given.seed})")
    return int(sum(stale.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
