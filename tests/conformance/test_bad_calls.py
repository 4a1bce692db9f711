"""Bad calls, drawn: an error of the caller's kind that names what was broken, or a right result; never gemmkit's own fault.

``python -m tests.bad_calls --count 10000 --seed 11`` draws more; GEMMKIT_BAD_CALLS sets how many here.
"""

from __future__ import annotations

import os

import pytest

from tests.bad_calls.calls import CALLS, Call
from tests.bad_calls.draw import draw
from tests.bad_calls.judge import Case, good_call, run
from tests.bad_calls.public import public

COUNT, PART = int(os.environ.get("GEMMKIT_BAD_CALLS", 300)), 50


@pytest.mark.sample(6)
@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_a_bad_call_says_what_is_wrong(first: int) -> None:
    faults = []
    for number in range(first, min(first + PART, COUNT)):
        case = draw(5, number)
        fault = run(case).fault or (good_call() if number % 10 == 0 else None)
        if fault is not None:
            faults.append(f"case {number} of seed 5, {case.broken}: {fault}\n{case}")
    assert not faults, "\n\n".join(faults)


def test_each_parameter_of_the_public_surface_has_a_good_value() -> None:
    """So that whatever is public is drawn."""
    missing = [f"{each.code}({x.name})" for each in public() for x in each.parameters if x.is_required and each.good(x.name) is None]
    assert not missing, f"tests.bad_calls.public.GOOD lacks {', '.join(missing)}"
    assert len(public()) > 80


CHEAP = [call for call in CALLS if "matmul(" not in call.after and not call.function.startswith(("gk.matmul", "gk.plan", "blas", "gk.einsum",
                                                                                                   "gk.functions.select", "emulated", "ahead"))]


@pytest.mark.parametrize("call", CHEAP, ids=[f"{n}-{call.function}" for n, call in enumerate(CHEAP)])
def test_what_is_broken_was_right_before(call: Call) -> None:
    given = [f"{a.name}={a.good}" if a.by_keyword else a.good for a in call.arguments]
    outcome = run(Case(f"{call.function}({', '.join(given)})", call.after, (), None))
    assert outcome == ("accepted", None), outcome
