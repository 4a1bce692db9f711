"""What a run came to: a table, the survivors, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.mutation.running import Cost, Finding
from tests.mutation.verdicts import EQUIVALENT, Equivalent, reason

BAR = 0.98                                             # of the mutants that differ and run


def reason_of(finding: Finding) -> Equivalent | None:
    """Why a survivor is no fault."""
    return None if finding.found else reason(finding.fault, finding.after)


def verdict(finding: Finding) -> str:
    if finding.found:
        return finding.found
    return "equivalent" if reason_of(finding) else "missed"


def rate(findings: list[Finding]) -> tuple[int, int]:
    """How many were found, of how many that run and are not equivalent."""
    verdicts = Counter(map(verdict, findings))
    judged = len(findings) - verdicts["equivalent"] - verdicts["not run"]
    return judged - verdicts["missed"], judged


def show(findings: list[Finding], is_whole: bool) -> int:
    """Prints it; 0 where the bar is reached."""
    ways: dict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        ways[finding.fault.operator][verdict(finding)] += 1
    columns = [name for name, _ in Counter(map(verdict, findings)).most_common()]
    print(f"{'operator':22}{'mutants':>8}  by what they were found")
    for operator, counts in sorted(ways.items()):
        print(f"{operator:22}{sum(counts.values()):8}  " + ", ".join(f"{counts[c]} {c}" for c in columns if counts[c]))
    totals = Counter(map(verdict, findings))
    print(f"{'all':22}{len(findings):8}  " + ", ".join(f"{totals[c]} {c}" for c in columns))
    for kind in ("missed", "equivalent"):
        for finding in (f for f in findings if verdict(f) == kind):
            entry = reason_of(finding)
            print(f"{kind}: {finding.fault} -> {finding.after}" + (f"\n    {entry.reason}" if entry else ""))
    not_run: dict[str, list[str]] = defaultdict(list)
    for finding in (f for f in findings if verdict(f) == "not run"):
        not_run[finding.fault.module].append(f"{finding.fault.function}:{finding.fault.line}")
    for module, lines in sorted(not_run.items()):
        print(f"no case runs: {module.removeprefix('gemmkit.')}: {', '.join(dict.fromkeys(lines))}")
    if is_whole:
        for entry in EQUIVALENT:
            if not any(reason_of(finding) is entry for finding in findings):
                print(f"nothing is covered by {entry}")
    found, judged = rate(findings)
    print(f"found {found} of {judged} mutants that are not equivalent ({found / max(judged, 1):.1%}; the bar is {BAR:.0%}); no case "
          f"runs {totals['not run']}")
    return 0 if found >= BAR * judged else 1


def write(findings: list[Finding], costs: dict[str, Cost], path: Path) -> None:
    rows = [{**dataclasses.asdict(finding), "verdict": verdict(finding),
             "reason": getattr(reason_of(finding), "reason", None)} for finding in findings]
    cases = {name: round(cost.seconds, 3) for name, cost in costs.items()}
    path.write_text(json.dumps({"mutants": rows, "cases": cases}, indent=1))
