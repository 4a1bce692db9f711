"""Mutants that survive because nothing is wrong with them: which, and why.

An entry is an operator's name, a pattern that the statement matches (before; behind an arrow also after), and the reason. An entry
that matches no mutant of a whole run is reported, so that none outlives what it was about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.mutation.running import Finding


@dataclass(frozen=True)
class Equivalent:
    operator: str
    pattern: str
    reason: str
    function: str = ""

    def covers(self, finding: Finding) -> bool:
        fault = finding.fault
        return (re.fullmatch(self.operator, fault.operator) is not None
                and re.search(self.pattern, f"{fault.before} -> {finding.after}") is not None
                and re.search(self.function, f"{fault.module}.{fault.function}") is not None)


EQUIVALENT: list[Equivalent] = []
