"""What of a kernel's machine code is written down: its histogram, and its loops with registers renamed."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from gemmkit.runtime.compile import instruction_counts

_CODE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(\{?\s*[^;]*;)")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_BRANCH = re.compile(r"\bBRA(?!\S*\.ANY)\b.*`\((\.L_\w+)\)")      # (.ANY: lanes that try again what one of them does)
_NAME = re.compile(r"\b(?P<register>UR|UP|R|P|B|SB)\d+\b|`\((?P<label>\.L_\w+)\)")
_OPCODE = re.compile(r"\{?\s*(?:@!?U?P\w+\s+)?([A-Z]\w*)")

_MATRIX = re.compile(r"\w*MMA$")
_ARITHMETIC = re.compile(r"[DFH](?:FMA2?|MUL2?|ADD2?|MNMX2?)$|FMNMX\w*$|DSETP$|VI?MNMX\w*$|IMAD$")
_COPY = re.compile(r"UTMALDG$|LDGSTS$|LDG$")


class Loop(NamedTuple):
    """A range of a listing's lines that ends in a branch to its beginning."""

    begin: int
    end: int


@dataclass(frozen=True)
class Listing:
    """The instructions of a kernel in order, without addresses, and the places of its labels."""

    lines: tuple[str, ...]
    labels: dict[str, int]

    @staticmethod
    def of(sass: str) -> Listing:
        """Reads what `gemmkit.runtime.compile.disassemble` prints; raises ValueError where no instruction is in it."""
        lines: list[str] = []
        labels: dict[str, int] = {}
        for line in sass.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(lines)
            elif code := _CODE.match(line):
                lines.append(" ".join(code[1].replace(".reuse", "").split()))
        if not lines:
            raise ValueError("no instruction of SASS is in the text")
        return Listing(tuple(lines), labels)

    def opcode(self, n: int) -> str:
        found = _OPCODE.match(self.lines[n])
        return found[1] if found else ""

    def loops(self) -> list[Loop]:
        """All backward branches; nested loops are each a loop."""
        found = []
        for n, line in enumerate(self.lines):
            branch = _BRANCH.search(line)
            if branch and self.labels.get(branch[1], n + 1) < n:
                found.append(Loop(self.labels[branch[1]], n + 1))
        return found

    def densest(self, opcodes: re.Pattern[str]) -> Loop | None:
        """The loop in which such instructions are the largest share; None where no loop has one.

        Loops around it have other things in them, too; so have jumps back from code that ptxas put at the end of a kernel.
        """
        def share(loop: Loop) -> float:
            return sum(bool(opcodes.match(self.opcode(n))) for n in range(loop.begin, loop.end)) / (loop.end - loop.begin)

        shares = {loop: share(loop) for loop in self.loops()}
        best = max(shares, key=lambda loop: (shares[loop], -loop.begin), default=None)
        return best if best is not None and shares[best] else None

    def renamed(self, loop: Loop) -> list[str]:
        """Its lines, with registers and labels numbered in the order in which they appear."""
        names: dict[str, str] = {}
        numbers: Counter[str] = Counter()

        def name(match: re.Match[str]) -> str:
            kind, whole = match["register"] or "label", match[0]
            if whole not in names:
                names[whole] = f"{kind}{numbers[kind]}"
                numbers[kind] += 1
            return names[whole]

        return [_NAME.sub(name, line) for line in self.lines[loop.begin:loop.end]]


def main_loops(listing: Listing) -> dict[str, list[str]]:
    """The loop that multiplies and the one that fetches, which may be the same: matrix instructions or, where there are
    none, ordinary arithmetic; and copies from global memory."""
    has_matrices = any(_MATRIX.match(listing.opcode(n)) for n in range(len(listing.lines)))
    kinds = {"multiply": _MATRIX if has_matrices else _ARITHMETIC, "fetch": _COPY}
    found = {name: listing.densest(opcodes) for name, opcodes in kinds.items()}
    return {name: listing.renamed(loop) for name, loop in found.items() if loop is not None}


def histogram(sass: str) -> dict[str, int]:
    """How many instructions of each opcode with its modifiers, in the order of their names."""
    return dict(sorted(instruction_counts(sass, full=True).items()))


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


__all__ = ["Listing", "Loop", "digest", "histogram", "main_loops"]
