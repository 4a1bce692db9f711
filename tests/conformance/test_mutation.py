"""Faults seeded in the kernels' syntax trees are found: those that the emulator once missed, and a sample of all.

`python -m tests.mutation` tries several hundred; GEMMKIT_MUTANTS=100 has that many drawn here.
"""

from __future__ import annotations

import ast
import os
import random
import re
from typing import Any

import pytest

from tests.mutation import battery, operators, report, running, seeding
from tests.mutation.running import Cost, Finding

DRAWN, SEED = int(os.environ.get("GEMMKIT_MUTANTS", 8)), 11
QUICK = ("half_sums", "columns_of_d", "tma_deep", "splits", "mma_across")     # of the battery: what takes least


def judged(faults: list[seeding.Fault], cases: tuple[str, ...]) -> list[Finding]:
    """What comes of faults whose statement each of these cases runs."""
    costs = {case: Cost(case, frozenset((fault.module, fault.line) for fault in faults), float(n))
             for n, case in enumerate(cases)}
    return list(running.run_all(faults, costs, 2))


# operator, function, statement, what it becomes, cases of the battery, what is said
ONCE_MISSED = {
    "an early turn": ("order changed", "consume_ping_pong", r"multiply_tile", r"spec.turns.give\(1 - group\) sums", ("pingpong",),
                      "may take the fresh barrier for it"),
    "registers not given": ("statement dropped", "warp_specialised", "release_registers", "pass", ("pingpong",), "warp . ends with 168 .* chosen for 24:"),
    "registers not taken": ("statement dropped", "warp_specialised", "claim_registers", "pass", ("pingpong",), "ends with 168 .* chosen for 240:"),
    "no wgmma_fence": ("statement dropped", "start_stage", r"wgmma_fence\(\)", "pass", ("half_sums",), "wgmma takes accumulators"),
    "no wgmma_fence by registers": ("statement dropped", "start_step", r"wgmma_fence\(\)", "pass", ("by_registers_one_step",),
                                    "wgmma takes accumulators"),
    "no grid_wait": ("statement dropped", "warp_specialised", r"grid_wait\(\)", "pass", ("half_sums",), "call grid_wait first"),
    "no cluster barrier at the end": ("never", "warp_specialised", r"if not spec.cluster.is_single:", r"cluster_barrier\(\)$", ("splits",),
                                      "block .* ends"),
    "A written in flight": ("constant changed", "pending", "return 1 if", "else 1$", ("by_registers_one_step",),
                            "registers of A are written while"),
    "sums before their wait": ("wait dropped", "SharedMainloop.run", r"sums = wgmma_wait\(0", "sums = sums", ("half_sums",),
                               "accumulators are used while"),
    "fragments that are not loaded": ("statement dropped", "kernels.sm80.kernel.Mainloop.begin", "fetch", "pass", ("ring_of_two",),
                                      r"registers of shape .*0\)? was read"),
    "no fence of what is sent": ("statement dropped", "RegisterMainloop.run", r"fence_async\(\)", "pass", ("parts_beside_registers",),
                                 "a thread's write is not to be seen"),
    "stores that collide": ("term dropped", "exchange.place_of", "row =", r"group \* spec.cluster.splits \* ", ("splits",), "race in 16 bytes"),
}


def candidates(operator: str, function: str, before: str) -> list[seeding.Fault]:
    """Faults of that kind in the function, of which one is the fault that was missed."""
    return [fault for fault in seeding.faults(every=True) if fault.operator == operator and re.search(before, fault.before)
            and f"{fault.module}.{fault.function}".endswith(function)]


def test_faults_that_were_missed_once_have_a_place() -> None:
    """Of all, although `make test` judges few: a function may have another name, or lie elsewhere."""
    assert not [name for name, (operator, function, before, *_) in ONCE_MISSED.items() if not candidates(operator, function, before)]


@pytest.mark.sample(7, at=3)
@pytest.mark.parametrize("name", ONCE_MISSED)
def test_a_fault_that_was_missed_once(name: str) -> None:
    operator, function, before, after, cases, message = ONCE_MISSED[name]
    faults = candidates(operator, function, before)
    findings = [finding for finding in judged(faults, cases) if re.search(after, finding.after)]
    assert len(findings) == 1, f"{operator} of {before}: {[finding.after for finding in findings]}"
    assert findings[0].found.endswith(("Error", "UninitialisedRead")) and re.search(message, findings[0].message), findings


@pytest.mark.thorough                         # a process that notes every line; a run of all mutants rests on it
def test_what_a_case_runs_is_known() -> None:
    """Of every module, those without a function too."""
    [cost] = running.coverage(1, cases=("half_sums",)).values()
    assert {"gemmkit.kernels.sm90.kernel", "gemmkit.operators.wgmma"} <= {module for module, _ in cost.statements}
    assert "gemmkit.kernels.sm90.rewrite" not in {module for module, _ in cost.statements}


@pytest.mark.thorough
def test_a_drawn_sample_is_found() -> None:
    """Calls dropped from what the quick cases run, so that these can judge them."""
    costs = running.coverage(2, cases=QUICK)
    run = {statement for cost in costs.values() for statement in cost.statements}
    dropped = [f for f in seeding.faults() if (f.module, f.line) in run and f.operator == "statement dropped"
               and not f.before.startswith("choose(")]           # of which these cases take one way
    findings = list(running.run_all(random.Random(SEED).sample(dropped, min(DRAWN, len(dropped))), costs, 2))
    found, of = report.rate(findings)
    assert found >= report.BAR * of, [str(f.fault) for f in findings if report.verdict(f) == "missed"]


def mutants(source: str, operator: str) -> list[str]:
    """All that an operator makes of a function."""
    out = []
    tree: Any = ast.parse(source)
    for n in range(sum(1 for place in operators.places(tree.body[0]) for _ in operators.OPERATORS[operator](place))):
        tree = ast.parse(source)
        place, node = [(p, node) for p in operators.places(tree.body[0]) for node in operators.OPERATORS[operator](p)][n]
        place.put(node)
        compile(tree, "a mutant", "exec")
        out.append(ast.unparse(tree).split("\n", 1)[1].strip().replace("\n    ", "; "))
    return out


@pytest.mark.parametrize(("operator", "body", "expected"), [
    ("statement dropped", "fence()\n    arrive(empty, stage)", ["pass; arrive(empty, stage)", "fence(); pass"]),
    ("wait dropped", "x = wait(1, x)", ["x = x"]),
    ("order changed", "fence()\n    arrive(empty, stage)", ["arrive(empty, stage); fence()"]),
    ("phase flipped", "wait(empty, stage, phase)", ["wait(empty, stage, phase ^ 1)"]),
    ("phase flipped", "wait(empty, slot)", ["wait(empty, slot._replace(phase=slot.phase ^ 1))"]),
    ("stage shifted", "wait(empty, stage, phase)", ["wait(empty, (stage + 1) % spec.stages, phase)"]),
    ("stage shifted", "wait(empty, slot)", ["wait(empty, slot._replace(stage=(slot.stage + 1) % spec.stages))"]),
    ("count changed", "mbarrier_init(full, n, 1)", ["mbarrier_init(full, n, 1 + 1)", "mbarrier_init(full, n, 1 - 1)"]),
    ("bound shifted", "return i < n", ["return i <= n"]),
    ("bound shifted", "return 0 < i <= n", ["return 0 <= i <= n"]),
    ("half a condition", "return i < n and j < m", ["return j < m", "return i < n"]),
    ("limit dropped", "return min(i, n)", ["return i"]),
    ("operands swapped", "return f(row, column)", ["return f(column, row)"]),
    ("constant changed", "return i + 8", ["return i + 9"])])
def test_operators_of_mutation(operator: str, body: str, expected: list[str]) -> None:
    assert mutants(f"def f(spec, empty, stage):\n    {body}", operator) == expected


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", sorted(battery.CASES))
def test_a_case_of_the_battery_is_right_without_a_fault(name: str) -> None:
    """A case that names what has another name since would end the whole run before its first fault."""
    battery.CASES[name]()
