"""Both listings of Fireiron's paper, compiled: as many lines, the expected instructions, no spill, stack or call."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.specs import products
from tests.support.code_lines import source_of

WMMA = (("f2", "row"), ("f2", "col"), ("f4", "row"))
MAXWELL = (("f4", "col"),) * 3


def lines_of(first: str, last: str) -> int:
    """Lines of the listings' file from one that begins with ``first`` on: no empty ones, no comments or docstrings."""
    text = source_of("gemmkit/specs/products.py")
    start = text.index(f"\n{first}") + 1
    part = re.sub(r'\n *"""(?s:.*?)"""', "", text[start:text.index(last, start) + len(last)])
    return sum(1 for line in part.splitlines() if line.strip() and not line.strip().startswith("#"))


def test_as_many_lines_as_the_paper() -> None:
    assert lines_of("cuda_wmma_sample =", ".tile(16, 16).done)") == 26
    schedule = lines_of("maxwell_optimized =", ".tile(1, 1).unroll.done)")
    assert schedule + lines_of("@micro_kernel", "\n        barrier()\n\n") + lines_of("def swizz", "<< 3)\n") <= 44


@pytest.mark.kin(2)
@pytest.mark.compile
@pytest.mark.parametrize(("schedule", "kinds", "blocks", "loop", "whole"), [
    (products.cuda_wmma_sample, WMMA, 1, {"HMMA": 128, "LDSM": 48}, {"LDG.E.128": 16, "STS.128": 16, "STG.E.128": 16}),
    (products.maxwell_optimized, MAXWELL, 2, {"FFMA": 512, "LDS": 32}, {"STG.E.128": 16, "LDG.E.64": 2, "STS.64": 2}),
], ids=["cuda_wmma_sample", "maxwell_optimized"])
@pytest.mark.sample(2)
def test_machine_code(schedule: Any, kinds: tuple, blocks: int, loop: dict, whole: dict) -> None:
    code = schedule.compile(*kinds, blocks_per_sm=blocks)
    assert (code.usage.spill_stores, code.usage.spill_loads, code.usage.stack_bytes) == (0, 0, 0)
    assert not re.search(r"\bcall\b", code.ptx)
    text = disassemble(code.cubin)
    assert {name: main_loop(text).count(name) for name in loop} == loop
    full = instruction_counts(text, full=True)
    assert {name: sum(n for opcode, n in full.items() if opcode.startswith(name)) for name in whole} == whole


@pytest.mark.kin(2)
@pytest.mark.compile
@pytest.mark.parametrize(("schedule", "kinds", "loop", "whole"), [
    (products.tensor_cores((128, 128), 64, (64, 32), ahead=True, occupancy=2), WMMA, {"HMMA": 64, "LDSM": 24, "LDGSTS": 8}, {"STG.E.128": 16}),
    (products.multiply_adds(ahead=True, occupancy=2), MAXWELL, {"FFMA": 512, "LDGSTS": 5}, {"LDS.128": 32, "STG.E.128": 16}),
], ids=["wmma", "maxwell"])
@pytest.mark.sample(2)
def test_a_step_ahead(schedule: Any, kinds: tuple, loop: dict, whole: dict) -> None:
    """Two blocks of 256 threads have 128 registers a thread on a multiprocessor."""
    code = schedule.compile(*kinds)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0 and code.usage.registers <= 128
    text = disassemble(code.cubin)
    assert {name: main_loop(text).count(name) for name in loop} == loop
    assert {name: instruction_counts(text, full=True)[name] for name in whole} == whole


def main_loop(text: str) -> list[str]:
    """The opcodes of the longest loop: from a label to the last branch back to it."""
    code, labels = [], {}
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(code)
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w[\w.]*)(.*?);", line)
        if found:
            code.append((found[1], found[2]))
    loops = [code[labels[to]:n] for n, (name, rest) in enumerate(code) if name.startswith("BRA")
             for to in re.findall(r"\.L_x_\d+", rest) if labels.get(to, n) < n]
    return [name.split(".")[0] for name, _ in max(loops, key=len)]
