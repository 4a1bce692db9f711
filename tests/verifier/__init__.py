"""A verifier of what the passes of `gemmkit.programs` hand on, between the mapping and the launch. It runs in the tests alone.

`verify` takes a plan, which holds the passes' real objects: the chain or the grid's places, the schedule, the allocation, the
text, the arguments of the kernel. It raises `Unsound` with what is wrong.

| check | proves | for |
|---|---|---|
| `check_names` | each name is defined before it is used, on every path; functions are given what they take, in its order | all texts |
| `check_order` | typed events: each value is computed once a round, behind what it is made of; each group of products is waited for before its sums are read; each stage is awaited, and released once, behind its last reader | all sequences of up to four rounds and two tiles |
| `check_memory` | stages, results, columns and barriers are aligned, lie within the budget, and no two overlap; a thread's registers suffice; arrays in the stream's memory do not overlap | the plan |
| `check_maps` | tensor maps and staged blocks are one to one; box, swizzle, rank, dtype and the kernel's parameter agree | the plan |
| `check_paths` | a role fills, awaits, reads and releases the stages of its rings once each, in order, by the right phase; nothing is read in flight; groups are fenced and committed; turns alternate | every path of a warp-specialised text, any number of rounds and tiles: a fixed point |
| `check_rows` | each row is one team's, and none beyond the last is touched | kernels of rows, for numbers around a block's |
| `check_traces` | fills and waits are paired; each product takes the blocks that the program says, each round once; tiles are stored once; copies by threads are waited for and overwrite nothing that is read | sizes around the blocks' and stages' numbers, walked through with numbers |

Texts of recurrences have one sequence of their own, which the emulator walks (races, registers in flight, unwaited groups):
their names and memory are checked here.

A text is read with `ast`, and nothing but the collectives' constants is taken from its module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemmkit.programs import calls
from gemmkit.programs import plan as plans
from tests.verifier.facts import check_barriers, check_maps, check_memory, check_names, check_order, check_spare
from tests.verifier.texts import Text, Unsound, is_recurrence
from tests.verifier.traces import check_paths, check_rows, check_traces

__all__ = ["Unsound", "unwatched", "verify", "watched"]


def verify(plan: plans.ProgramPlan) -> None:
    """All checks of all kernels of a plan. Raises Unsound."""
    for each in plan.kernels:
        text = Text(each)
        check_names(text)
        if each.is_of_rows:
            check_rows(text)
            continue
        if not is_recurrence(each):
            check_order(each)
        check_memory(text)
        if is_recurrence(each):
            continue
        check_maps(text)
        if not each.is_multistage:
            check_barriers(text)
            check_paths(text)
        check_traces(text)
    check_spare(plan)


@contextmanager
def watched() -> Iterator[None]:
    """Within it each plan that the passes make is verified; of those with one text and one mapping the first. A text that a test
    gives is its own."""
    seen = set[Any]()

    def look(plan: plans.ProgramPlan) -> None:
        key = plan.text, plan.mapping, plan.device, plan.printed.maps
        if key not in seen:
            verify(plan)
            seen.add(key)

    calls.looks.append(look)
    try:
        yield
    finally:
        calls.looks.remove(look)


@contextmanager
def unwatched() -> Iterator[None]:
    """Within it none is: what deriving costs is counted."""
    held, calls.looks[:] = [*calls.looks], []
    try:
        yield
    finally:
        calls.looks[:] = held
