"""A drawn product three times: by the compiled kernel's PTX, by the emulator, and by NumPy in float64."""

from __future__ import annotations

import time
import warnings
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.ptx_machine.launch import Ptx
from tests.support.drawn import Case, Family, Problem
from tests.support.drawn_reference import assert_within
from tests.support.drawn_strategies import Reach, families, problems
from tests.support.machines import MACHINES

PTX = Ptx()
SMALL = Reach(emulated=True)


@dataclass
class Outcome:
    """``differing`` elements (of ``elements``, of D and of the epilogue's outputs) have other bits than the emulator's; ``most`` is the
    largest difference, in units of what NumPy's result may be off. ``fault`` is what went wrong, or nothing."""

    family: Family
    problem: Problem
    elements: int = 0
    differing: int = 0
    most: float = 0.0
    seconds: float = 0.0
    fault: str = ""

    @property
    def repeat(self) -> str:
        return ("from tests.support.drawn import *\nfrom tests.ptx_machine.compare import compare\n"
                f"print(compare({self.family!r},\n    {self.problem!r}).fault)")


def compare(family: Family, problem: Problem, machines: tuple = (MACHINES["emulator"], PTX)) -> Outcome:
    """Compute a product in the emulator and by its PTX. A result that is not what NumPy says is a fault, of either; of one machine
    alone nothing else is looked at."""
    outcome = Outcome(family, problem)
    try:
        results = []
        for machine in machines:
            begin = time.process_time()
            results.append(_computed(machine, family, problem))
            outcome.seconds = time.process_time() - begin
        for (_name, emulated, bound), (_, ours, _) in zip(results[0], results[-1]):
            outcome.elements += ours.size
            same = np.asarray(ours == emulated) | (np.isnan(ours.astype(float)) & np.isnan(emulated.astype(float)))
            outcome.differing += int((~same).sum())
            if not same.all():
                with np.errstate(all="ignore"):
                    off = np.abs(ours.astype(float) - emulated.astype(float)) / np.maximum(bound.error, 1e-300)
                outcome.most = max(outcome.most, float(np.nanmax(np.where(same, 0, off))))
    except Exception as error:
        outcome.fault = f"{machine!r}: {type(error).__name__}: {error}"
    return outcome


def _computed(machine: Any, family: Family, problem: Problem) -> list[tuple[str, np.ndarray, Any]]:
    """(name, values, what they should be) of D and of the epilogue's outputs, all of them right."""
    case = Case(machine, family, problem)
    d, outputs = case.prepare()
    case.compute(case.config())
    found = [("D", case.as_parts(case.out.read("D"), family.d), d)]
    found += [(f"output {n}", read(f"output {n}"), bound) for n, (read, bound) in enumerate(outputs)]
    for name, values, bound in found:
        assert_within(values, bound, name)
    return found


def drawn(key: str, count: int = 1) -> list[tuple[Family, Problem]]:
    """``count`` problems of a drawn family of the single-stage kernel: the same for the same key."""
    found: list[tuple[Family, Problem]] = []

    @seeded(zlib.crc32(key.encode()))
    @settings(max_examples=1, database=None, derandomize=False, deadline=None, phases=[Phase.generate],
              suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def search(data: Any) -> None:
        family = data.draw(families(SMALL, "singlestage"))
        found.extend((family, data.draw(problems(family, SMALL, n, n == count - 1))) for n in range(count))

    search()
    return found[-count:]


def outcomes(key: str) -> list[Outcome]:
    """Two problems of a drawn family."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [compare(*case) for case in drawn(key, 2)]


__all__ = ["PTX", "Outcome", "compare", "drawn", "outcomes"]
