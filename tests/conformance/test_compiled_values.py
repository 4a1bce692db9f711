"""What was compiled, run without a GPU: drawn products by the PTX of their kernels (`tests.ptx_machine`), against the emulator and
NumPy in float64. ``python -m tests.ptx_machine --cases 60 --seed 1`` draws many."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ptx_machine import launch
from tests.ptx_machine.compare import PTX, compare
from tests.support.drawn import Family, Place, Problem
from tests.support.patches import Seeded

pytestmark = pytest.mark.compile

F16, F32 = "float16", "float32"
MAPPING = (("block_shape", (16, 16, 8)), ("compute_warp", (8, 16, 4)), ("warps_per_block", 2), ("order", "grouped3"), ("shared_a_layout", (0, 1)),
           ("shared_b_layout", (1, 0)), ("shared_c_layout", (1, 0)), ("shared_d_layout", (0, 2)), ("mem_a", ((8, 8), (1, 1))),
           ("mem_b", ((4, 8), (1, 4))), ("mem_cd", ((8, 8), (1, 4))))
TENSOR = (("block_shape", (16, 32, 16)), ("compute_warp", (16, 16, 16)), ("warps_per_block", 2), ("order", "columns"), ("shared_a_layout", (1, 1)),
          ("shared_b_layout", (1, 1)), ("shared_c_layout", (1, 0)), ("shared_d_layout", (1, 0)), ("mem_a", ((16, 16), (1, 8))),
          ("mem_b", ((8, 32), (1, 8))), ("mem_cd", ((4, 32), (1, 4))))
WORDS = (*(pair for pair in TENSOR if pair[0] not in ("block_shape", "compute_warp", "shared_b_layout")), ("block_shape", (16, 32, 32)),
         ("compute_warp", (16, 16, 32)), ("shared_b_layout", (0, 1)))

# Odd sizes, edges, transforms, epilogues with outputs, layouts that are functions, C in place, blocks that share K.
CASES = {
    "mma": (Family(("mma", F16, F32), Place(F16, "toeplitz"), Place(F16, "plain", 0, 2, 1), None, Place(F16, unit=2),
                   (("regs_to_shared_d", ("affine",)),), (f"residual:{F32}", "causal"), TENSOR), Problem(19, 39, 37, "normal", 2)),
    "wmma": (Family(("wmma", 16, 16, "bfloat16", F32), Place("bfloat16"), Place("bfloat16"), Place(F32, axis=0), Place(F32),
                    (("shared_to_global_d", ("relu",)),), (), TENSOR), Problem(32, 24, 33, "normal", 3)),
    "mma in float64": (Family(("mma", "float64", "float64"), Place("float64"), Place("float64", axis=0), Place("float64", axis=0), Place("float64"),
                              (("shared_to_regs_b", ("affine",)),), (), TENSOR), Problem(19, 39, 37, "normal", 7)),
    "mma in tf32": (Family(("mma", F32, F32), Place(F32, axis=0), Place(F32, axis=0), None, Place(F32, axis=0), (), (), TENSOR), Problem(19, 40, 37, "whole", 8)),
    "mma of int8": (Family(("mma", "int8", "int32"), Place("int8"), Place("int8"), None, Place("int32"), (), (), WORDS), Problem(19, 39, 37, "normal", 9)),
    "in place": (Family(("fpu", "float64", "float64", "float64", 4, 8, 1, 4, 8), Place("float64"), Place("float64", axis=0), None, Place("float64"),
                        (), (), (*MAPPING, ("splits", 2)), "gemmEx"), Problem(21, 25, 39, "normal", 6, alpha=0.3, beta=-0.5, trans="TN"))}
AS_EMULATED = "mma", "wmma"                                            # to the bit: no sums that are rounded twice there


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_compiled_values(name: str) -> None:
    """D and the outputs are what NumPy says; where the emulator and the hardware round alike they have the emulator's bits."""
    outcome = compare(*CASES[name])
    assert not outcome.fault, f"{outcome.fault}\n\nTo repeat it:\n\n{outcome.repeat}"
    assert outcome.elements
    if name in AS_EMULATED:
        assert outcome.differing == 0, outcome


# -- the check itself -----------------------------------------------------------------------------------------------------

FPU = (Family(("fpu", F32, F32, F32, 4, 8, 1, 4, 8), Place(F32, skip=1), Place(F32, "lower", 0), Place(F32, unit=4), Place("bfloat16"),
              (("global_to_shared_a", ("placed",)), ("shared_to_regs_b", ("captured",))), (f"bias_n:{F16}", "silu", f"store:{F32}"), MAPPING),
       Problem(31, 41, 13, "normal", 1))

# Changes of the text, each everywhere, and what is said of them.
ALTERED: list[tuple[Any, str]] = [
    (lambda text: re.sub(r"(st\.shared[\w.]*\s+\[%r\w+)(\+\d+)?\]", r"\1+65536]", text), "out of bounds"),
    (lambda text: re.sub(r"(ld\.global[\w.]*\s+[^\n]*\[%rd\d+)(\+\d+)?\]", r"\1+1]", text), "misaligned"),
    (lambda text: text.replace("fma.rn.f32", "fma.rn.unknown.f32"), "unknown modifier .unknown"),
    (lambda text: text.replace("bar.sync 0;", "bar.sync 1;"), "only barriers of all threads"),
    (lambda text: re.sub(r"fma\.rn(\.f32\s+[^,]*,[^,]*,[^,]*),[^;]*;", r"mul\1;", text), "elements are wrong"),
    (lambda text: text.replace("setp.lt.s32", "setp.le.s32"), "nothing has written there|out of bounds")]


@pytest.mark.thorough
def test_wrong_code_is_noticed(seeded: Seeded) -> None:
    """A right kernel, then altered in its text."""
    right = compare(*FPU)
    assert not right.fault and right.most < 0.2, f"{right.fault}\n\n{right.repeat}"
    original, applied = launch.ptx_of, 0
    for change, words in ALTERED:
        def altered(compiled: Any, change: Any = change) -> str:
            text = original(compiled)
            made = change(text)
            assert made != text, "nothing was changed"
            return made

        seeded(launch, "ptx_of", altered)
        found = compare(*FPU, machines=(PTX,)).fault
        assert re.search(words, found), (words, found)
        applied += 1
    assert applied == len(ALTERED)
