"""What specs are compiled to: the instructions of Table 2, and no stack or call."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from gemmkit.runtime.compile import assemble, disassemble, instruction_counts
from tests.kernels.specs import test_instructions as kernels
from tests.kernels.specs.test_kernels import figure_8_whole
from tests.support.harness import Out, compiled

pytestmark = pytest.mark.compile

F16 = np.zeros((32, 8), "f2")
F32 = np.zeros((32, 8), "f4")
ROWS = {
    kernels.moved: ((Out((32, 8), "f4"), F32), {r"ld\.global\.v4": 2, r"st\.shared\.v4": 1}),
    kernels.copied: ((Out((32, 4), "f4"), F32), {r"cp\.async\.cg": 1, r"cp\.async\.wait_group 0": 1}),
    kernels.of_halves: ((Out((32, 8), "f2"), F16, F16), {r"mul\.rn\.f16 ": 1, r"add\.rn\.f16x2": 1, r"fma\.rn\.f16 ": 1, r"fma\.rn\.f16x2": 1}),
    kernels.by_tensor_cores: ((Out((16, 8), "f4"), np.zeros((16, 64), "f2"), np.zeros((64, 8), "f2", order="F")),
                              {r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16": 1, r"mma\.sync\.aligned\.m16n8k16\.row\.col": 1}),
    kernels.by_quad_pairs: ((Out((32, 8), "f4"), np.zeros((32, 4), "f2"), np.zeros((4, 8), "f2")), {r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f32\.f16\.f16\.f32": 1}),
    kernels.norms: ((Out((2, 2), "f4"), np.zeros((2, 256), "f4")), {r"shfl\.sync\.bfly": 10, r"ld\.global\.v4": 2}),
}


@pytest.mark.kin(2)
@pytest.mark.sample(3)
@pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.__name__)
def test_opcodes(kernel: Any) -> None:
    arguments, wanted = ROWS[kernel]
    ptx = compiled(kernel, kernels.Spec(), *arguments)
    found = {text: len(re.findall(text, ptx)) for text in wanted}
    assert found == wanted
    assert not re.search(r"\.local|\bcall\b", ptx)
    made = assemble(ptx)
    assert made.usage.spill_stores == made.usage.spill_loads == made.usage.stack_bytes == 0


@pytest.mark.kin(2)
def test_quad_pairs_on_hopper() -> None:
    """It has no such tensor cores any more: ptxas makes a subroutine of multiply-adds."""
    arguments, _ = ROWS[kernels.by_quad_pairs]
    counts: Counter[str] = instruction_counts(disassemble(assemble(compiled(kernels.by_quad_pairs, kernels.Spec(), *arguments)).cubin), full=True)
    assert counts["FFMA"] == 32 and not any(name.startswith("HMMA") for name in counts)


def test_figure_8_at_its_size() -> None:
    code = figure_8_whole.compile()
    assert code.usage.stack_bytes == code.usage.spill_stores == 0
    assert re.search(r"fma\.rn\.f16 ", code.ptx) and not re.search(r"\bcall\b", code.ptx)
