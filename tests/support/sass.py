"""Questions about the machine code of kernels whose products read registers."""

from __future__ import annotations

import re

from gemmkit.programs.collectives import LARGE


def instructions(sass: str) -> list[str]:
    """The instructions of a listing, without their predicates."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", sass)


def loops(sass: str, product: str = "HGMMA", ordinary: bool = False) -> list[list[str]]:
    """The innermost loops with products: instructions of this name. ``ordinary``: without what lies behind the branch for
    large scores (`gemmkit.programs.collectives.LARGE`), which a warp takes by a vote."""
    places: dict[str, int] = {}
    lines: list[str] = []
    found: list[tuple[int, int]] = []
    jumps: list[tuple[int, str, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(lines)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([^;\n]*;)", line):
            lines.append(code[2])
            to = re.match(r"BRA(?:\.U)? (?:!?U?P\w+, )?`\((\.L_x_\d+)\)", code[2])
            if to and to[1] in places:
                if any(x.startswith(product) for x in lines[places[to[1]]:]):
                    found.append((places[to[1]], len(lines)))
            elif to:
                jumps.append((len(lines), to[1], code[1]))
    rare, rare_ends = set[int](), set[str]()
    for begin, to, predicate in reversed(jumps) if ordinary else ():
        near = range(begin - 2, max(begin - 60, -1), -1)
        vote = next((n for n in near if re.match(rf"\S+ {predicate}, ", lines[n])), 0)
        asked = re.match(r"VOTE\.ANY P\d, (P\d) ;", lines[vote])
        compared = asked and next((lines[n] for n in near if n < vote and re.match(rf"\w+SETP\S* {asked[1]}, ", lines[n])), "")
        is_outer = asked and to in rare_ends                     # a lazy round's, in which rows are scaled
        if is_outer or (compared and re.search(rf"\.GT\S* P\d, PT, \S+, {LARGE:.0f}, PT", compared)):
            rare_ends.add(to)
            left_out = lines[begin:places[to]]
            assert not any(re.match(r"HGMMA|HMMA|BAR|SYNCS|WARPGROUP|SHFL|LD|ST", x) for x in left_out), left_out
            rare |= set(range(begin, places[to]))
    return [[x for n, x in enumerate(lines[a:b], a) if n not in rare] for a, b in found
            if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]


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
