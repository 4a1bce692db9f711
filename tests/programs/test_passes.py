"""Faults that are seeded in the passes of programs are found: those that one thinks of, and a sample of all.

`python -m tests.mutation --passes` tries more, and computes what the verifier lets through.
"""

from __future__ import annotations

import os
import random
import re

import pytest

from tests.mutation import passes

DRAWN, SEED = int(os.environ.get("GEMMKIT_MUTANTS_OF_PASSES", 6)), 5
CASES = ("text/GEMM", "text/clusters", "text/columns", "text/attention", "text/attention in turns", "text/multistage attention", "text/MLP")

#: Module, function, operator, the statement, and what it becomes.
FAULTS = {
    "no wait for a stage": ("text", "Printer.events", "statement dropped", r"\.wait\(", "pass"),
    "no wait for products": ("places", "ordered", "line dropped", r"return Ordered", r"\*read, Release\(\)\)"),
    "no release": ("places", "ordered", "line dropped", r"return Ordered", r"\*read, Wait\(1\)\)"),
    "another phase": ("text", "Printer.produce", "word changed", "self.put", r"Slot\(zero, zero\) "),
    "a stage that is released in place of another": ("chains/text", "Consumer.release", "lines swapped", r"else|self\.put", r"advance.*release"),
    "a role with the other's work": ("text", "Printer.kernel", "line dropped", "self.put", "claim_registers"),
    "an offset of another block": ("places", "allocated", "term dropped", r"offsets\[tile.name\], at", "= \\(at, at\\)|= \\(at, size\\)"),
    "a box of another shape": ("chains/text", "ChainPrinter.tile_of", "names swapped|holes swapped", "return", r"lines=\{columns\}"),
    "a bound that is one more": ("chains/elements", "Role.loops", "word changed", r"if ranges.begins|self\.loop", r"\{n\} > "),
    "rounds along another axis": ("chains/elements", "ProducerRole.corner", "constant changed", "return", r"paged else \[place\(block\.dims\[1"),
    "bytes of another ring": ("chains/schedule", "ScheduleChoice.block_bytes", "constant changed", "return", "return 3"),
    "no identity behind the last place": ("chains/algebra", "_wanted", "never", r"if x\.op in IDENTITY", ""),
}


@pytest.fixture(scope="module")
def cases() -> dict[str, passes.Case]:
    return passes.known(CASES, 2)


def judged(chosen: list[passes.Seed], cases: dict[str, passes.Case]) -> list[passes.Finding]:
    return list(passes.run_all(chosen, cases, 2, by_tests=False))


@pytest.mark.kin(1)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_one_thinks_of(name: str, cases: dict[str, passes.Case]) -> None:
    module, function, operator, before, after = FAULTS[name]
    seed = next(seed for seed in passes.seeds(module) if seed.function == function and re.fullmatch(operator, seed.operator)
                and re.search(before, seed.before) and re.search(after, passes.after_of(seed)))
    (finding,) = judged([seed], cases)
    assert passes.verdict(finding) not in (*passes.NO_FAULT, "survived"), finding


@pytest.mark.kin(1)
def test_each_pass_has_candidates() -> None:
    """Of most operators, and in most functions."""
    for module in passes.PASSES:
        found = passes.seeds(module)
        assert len(found) > 150 and len({seed.operator for seed in found}) > 12, module
    assert {seed.operator for module in passes.PASSES for seed in passes.seeds(module)} == set(passes.OPERATORS)


@pytest.mark.kin(1)
def test_a_drawn_sample_is_found(cases: dict[str, passes.Case]) -> None:
    """Of what these cases run: lines of texts and events that are left out or change places, which no plan can do without."""
    kinds = ("line dropped", "lines swapped", "statement dropped", "holes swapped")
    run = {line for case in cases.values() for line in case.lines}
    known = [seed for module in ("text", "places", "chains/text", "chains/elements", "chains/schedule", "multistage") for seed in passes.seeds(module)
             if seed.operator in kinds and any((module, line) in run for line in range(seed.line, seed.end + 1))]
    findings = judged(random.Random(SEED).sample(known, DRAWN), cases)
    missed = [f"{x.seed} -> {x.after}" for x in findings if passes.verdict(x) == "survived"]
    assert len(missed) <= (1 - passes.BAR) * len(findings), missed


def test_texts_that_differ_in_names_are_told() -> None:
    text = "from a import b, c\n\ndef kernel(x):\n    '''Says.'''\n    y = b(x)\n    return c(y, (x))\n"
    other = "from a import c, b\ndef kernel(p):\n    q = b(p)          # what it is\n    return c(q, p)\n"
    assert passes.plain(text) == passes.plain(other) != passes.plain(other.replace("c(q, p)", "c(p, q)"))
