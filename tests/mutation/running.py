"""Mutants in processes of their own: one is forked for each, given a fault, and computes products until one is found out."""

from __future__ import annotations

import os
import pickle
import resource
import select
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmkit.emulator.errors import EmulatorError
from tests.mutation import battery, seeding, verdicts
from tests.mutation.seeding import Fault

BUDGET = 600.0                                         # seconds of CPU that a survivor's cases may take: all of them
BRIEF = 2.0                                            # and those of one that is said to be none
SLACK, ENDLESS = 4, 6                                  # seconds, and times of a sound case's, after which a mutant does not end


@dataclass(frozen=True)
class Cost:
    """What a case of the battery runs, (module, line), and the seconds of CPU that it takes."""

    case: str
    statements: frozenset[tuple[str, int]]
    seconds: float


@dataclass(frozen=True)
class Finding:
    """What came of a mutant. ``found`` is the error's class, "wrong result", "does not end"; "" where it has survived all of
    ``cases``, and "not run" where no case runs the statement. ``after`` is the statement with its fault."""

    fault: Fault
    found: str
    message: str
    after: str
    cases: tuple[str, ...]
    seconds: float


def run_all(faults: Iterable[Fault], costs: dict[str, Cost], jobs: int) -> Iterator[Finding]:
    """The findings, as they come."""
    for fault, answer in in_processes(faults, lambda fault: _run(fault, costs), jobs):
        if isinstance(answer, Finding):
            yield answer
        else:
            yield Finding(fault, "does not end", "", "", (), float(answer or 0))


def coverage(jobs: int, known: Path | None = None, cases: Iterable[str] = tuple(battery.CASES)) -> dict[str, Cost]:
    """What each case of the battery runs; ``known`` is a file that keeps it, as long as sources stay what they are.

    Raises RuntimeError when a case is wrong without any fault.
    """
    sources = seeding.digest()
    if known is not None and known.exists():
        kept, costs = pickle.loads(known.read_bytes())
        if kept == sources:
            return costs                               # type: ignore[no-any-return]
    costs = {}
    for name, answer in in_processes(cases, _cover, jobs):
        if not isinstance(answer, Cost):
            raise RuntimeError(f"the case {name} fails without a fault: {answer}")
        costs[name] = answer
    if known is not None:
        known.write_bytes(pickle.dumps((sources, costs)))
    return costs


def _cover(name: str) -> Any:
    seen: set[tuple[str, int]] = set()
    seeding.instrument(seen)
    start = time.process_time()
    try:
        battery.run(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return Cost(name, frozenset(seen), time.process_time() - start)


def _run(fault: Fault, costs: dict[str, Cost]) -> Finding:
    covering = in_turn([cost for cost in costs.values() if (fault.module, fault.line) in cost.statements])
    if not covering:
        return Finding(fault, "not run", "", "", (), 0.0)
    after = seeding.put_in(fault)
    left = BRIEF if verdicts.reason(fault, after) else BUDGET
    tried, start = [], time.process_time()
    for cost in covering:
        left -= cost.seconds
        if left < 0 and tried:
            break
        limit = time.process_time() + SLACK + ENDLESS * cost.seconds
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, resource.RLIM_INFINITY))     # then SIGXCPU ends it
        tried.append(cost.case)
        try:
            battery.run(cost.case)
        except battery.WrongResult as error:
            found, message = "wrong result", str(error)
        except EmulatorError as error:
            found, message = type(error).__name__, str(error).split("\n")[0]
        except Exception as error:                     # Python itself, or a rule of configurations
            found, message = f"refused ({type(error).__name__})", str(error).split("\n")[0]
        else:
            continue
        return Finding(fault, found, message, after, tuple(tried), time.process_time() - start)
    return Finding(fault, "", "", after, tuple(tried), time.process_time() - start)


def in_turn(costs: list[Cost]) -> list[Cost]:
    """The cheapest case first; then always the one that runs most new statements in its time, as a fault of one line may tell in
    another: in what `choose` has chosen there."""
    left, out, seen = list(costs), [], frozenset[tuple[str, int]]()
    while left:
        best = max(left, key=lambda cost: ((len(cost.statements - seen) if out else 1) / (cost.seconds + 0.1), cost.case))
        left.remove(best)
        out.append(best)
        seen |= best.statements
    return out


def in_processes(items: Iterable[Any], work: Callable[[Any], Any], jobs: int) -> Iterator[tuple[Any, Any]]:
    """(item, what ``work`` returned for it in a process of its own, or the seconds after which that died), in any order."""
    todo, running = iter(items), {}
    while True:
        while len(running) < jobs:
            item = next(todo, running)
            if item is running:
                break
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                _child(read, write, item, work)
            os.close(write)
            running[read] = item, child, []
        if not running:
            return
        for read in select.select(list(running), [], [])[0]:
            item, child, parts = running[read]
            part = os.read(read, 1 << 16)
            if part:
                parts.append(part)
                continue
            os.close(read)
            del running[read]
            _, status, usage = os.wait4(child, 0)
            if status and not os.WIFSIGNALED(status):
                raise RuntimeError(f"the process of {item} failed")
            yield item, pickle.loads(b"".join(parts)) if parts else usage.ru_utime


def _child(read: int, write: int, item: Any, work: Callable[[Any], Any]) -> None:
    status, told = 1, os.dup(2)
    try:
        os.close(read)
        with open(os.open(os.devnull, os.O_WRONLY), "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        answer = pickle.dumps(work(item))
        while answer:
            answer = answer[os.write(write, answer):]
        status = 0
    except Exception:                                  # the tool's own: a mutant's are caught where it runs
        os.write(told, traceback.format_exc().encode())
    finally:
        os._exit(status)
