"""What differs between two records of machine code."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.sass_gate.record import shortened


@dataclass(frozen=True)
class Comparison:
    """``faults`` make the gate fail; ``notes`` are loops in another order, which do not. Where the compilers differ there is
    nothing to compare, and ``incomparable`` says how they do."""

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    incomparable: str = ""

    @property
    def status(self) -> int:
        return 2 if self.incomparable else 1 if self.faults else 0


def compare(before: dict[str, Any], after: dict[str, Any], lines: bool = False, partial: bool = False) -> Comparison:
    """Two records, kernel by kernel; with ``lines`` the differing lines of loops are among the notes, with ``partial`` the
    second need not have all kernels of the first."""
    if before["compilers"] != after["compilers"]:
        differing = [f"{name} {before['compilers'].get(name)} and {after['compilers'].get(name)}"
                     for name in sorted({*before["compilers"], *after["compilers"]})
                     if before["compilers"].get(name) != after["compilers"].get(name)]
        return Comparison(incomparable=f"the compilers differ, so nothing was compared: {'; '.join(differing)}")
    faults: list[str] = []
    notes: list[str] = []
    for name in sorted({*before["kernels"], *after["kernels"]}):
        first, second = before["kernels"].get(name), after["kernels"].get(name)
        if second is None and partial:
            continue
        if first is None or second is None:
            faults.append(f"{name}: only {'the second' if first is None else 'the first'} has this kernel")
            continue
        faults += [f"{name}: {fault}" for fault in differences(first, second)]
        notes += [f"{name}: {note}" for note in moved(first["loops"], second["loops"], lines)]
    return Comparison(tuple(faults), tuple(notes))


def differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    for what in ("registers", "spills"):
        if first[what] != second[what]:
            yield f"{what} {first[what]} -> {second[what]}"
    counts = [kernel["histogram"] for kernel in (first, second)]
    for opcode in sorted({*counts[0], *counts[1]}):
        was, now = (count.get(opcode, 0) for count in counts)
        if was != now:
            yield f"{opcode} {was} -> {now}"


def moved(first: dict[str, Any], second: dict[str, Any], lines: bool) -> Iterator[str]:
    for kind in sorted({*first, *second}):
        was, now = first.get(kind, []), second.get(kind, [])
        if isinstance(was, str) or isinstance(now, str):
            if shortened(was) != shortened(now):
                yield f"loop {kind!r}: {shortened(was)} -> {shortened(now)} (compare --commit shows which)"
        elif was != now:
            kept = sum(block.size for block in difflib.SequenceMatcher(None, was, now, autojunk=False).get_matching_blocks())
            yield f"loop {kind!r}: {max(len(was), len(now)) - kept} of {len(now)} lines differ"
            if lines:
                yield from difflib.unified_diff(was, now, "before", "after", lineterm="", n=2)


__all__ = ["Comparison", "compare"]
