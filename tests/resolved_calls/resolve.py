"""Resolving drawn calls for GPUs that need not be here, and whose reason a refusal is."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import A100, H100, T4
from tests.resolved_calls.draw import draw, scope

DEVICES = {"H100": H100, "A100": A100, "T4": T4}

#: Refusals that are the caller's: what the code names, and what the message says.
CALLERS: tuple[tuple[str, str], ...] = ()


class Refusal(NamedTuple):
    number: int
    device: str
    text: str
    code: str


def is_callers(code: str, text: str) -> bool:
    return any(re.search(asked, code) and re.search(said, text) for asked, said in CALLERS)


def refusals(seed: int, numbers: range) -> tuple[Counter[str], list[Refusal]]:
    """How many calls of each kind were resolved, and those that were refused."""
    went: Counter[str] = Counter()
    found = []
    for number in numbers:
        case = draw(seed, number)
        for name, device in DEVICES.items():
            try:
                recorded(lambda: eval(case.code, scope()), device, zeros=False)
                went[case.kind] += 1
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if is_callers(case.code, text):
                    went["refused for the caller's reason"] += 1
                else:
                    found.append(Refusal(number, name, text, case.code))
    return went, found
