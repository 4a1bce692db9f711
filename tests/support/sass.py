"""Questions about the machine code of kernels whose products read registers."""

from __future__ import annotations

import re


def instructions(sass: str) -> list[str]:
    """The instructions of a listing, without their predicates."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", sass)


def loops(sass: str, product: str = "HGMMA") -> list[list[str]]:
    """The innermost loops with products: instructions of this name."""
    places: dict[str, int] = {}
    lines: list[str] = []
    found: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(lines)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", line):
            lines.append(code[1])
            back = re.match(r"BRA(?:\.U)? (?:!?U?P\w+, )?`\((\.L_x_\d+)\)", code[1])
            if back and back[1] in places and any(x.startswith(product) for x in lines[places[back[1]]:]):
                found.append((places[back[1]], len(lines)))
    return [lines[a:b] for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]


def written_in_flight(loop: list[str]) -> list[str]:
    """Instructions that write a register of A while a product that reads it is on its way, in a round or the next one."""
    bad, pending = [], [set[int]()]
    for line in 2 * loop:
        if waits := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line):
            pending = pending[len(pending) - 1 - int(waits[1]):] if int(waits[1]) < len(pending) - 1 else pending
        elif line.startswith("HGMMA"):
            if reads := re.match(r"HGMMA\S* R\d+, -?R(\d+), gdesc", line):
                pending[-1] |= set(range(int(reads[1]), int(reads[1]) + 4))
            if "gsb0" in line:
                pending.append(set())
        elif writes := re.match(r"(?!ST|RED|BAR|SYNCS)\S+ R(\d+)[.,]", line):
            wide = 4 if re.match(r"\S*(\.128|M88\.4)", line) else 2 if re.match(r"\S*(\.64|\.WIDE)", line) else 1
            if any(set(range(int(writes[1]), int(writes[1]) + wide)) & each for each in pending):
                bad.append(line)
    return bad
