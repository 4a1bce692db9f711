"""Shared-memory layouts drawn: a tile's elements coloured by the bank they lie in, in the kernel's layout and in a
plain one."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.drawing import figure, hue, rect, table, text
from gemmkit.emulator.memory import BANKS, WORD
from gemmkit.report.banks import Row, count
from gemmkit.report.subject import Run

LINES, WORDS = 16, 32  # of a tile's contiguous axis: how many lines, and words of each


def drawn(run: Run) -> str:
    """The tiles of A and B with and without their layout, and conflicts counted from the run."""
    rows = count(run.events, run.spec)
    parts = "".join(
        f"<h3>{name.upper()}'s tile</h3><div class=row>{_pair(getattr(run.spec, name), run.spec)}</div>" for name in "ab"
    )
    said = (
        "A square is a word of 4 bytes, and its colour is the bank that it lies in. Lanes that read a column of squares of "
        "one colour wait for each other. Hover lights all words of a bank."
    )
    return counted(rows) + f"<p class=soft>{said}</p>" + parts


def counted(rows: list[Row]) -> str:
    kinds = {
        "read": "reads of a warp",
        "write": "writes of a warp",
        "copy": "cp.async of a warp",
        "wgmma": "core matrices (wgmma)",
    }
    return table(
        ("operand", "access", "how many", "conflicts (extra passes)", "without swizzle or padding"),
        [(row.operand, kinds[row.kind], row.accesses, row.extra, row.without) for row in rows],
    )


def _pair(operand: Any, spec: Any) -> str:
    layout = operand.shared
    plain = getattr(layout, "layout", layout)
    found = _window(operand, layout)
    if plain == layout or plain is layout:
        return found
    return found + _window(operand, plain)


def _window(operand: Any, layout: Any) -> str:
    """Lines along the axis that is contiguous, in words of 4 bytes: the hue of a word is its bank."""
    size, item = operand.tile.size, int(operand.shared.dtype.itemsize)
    axis = 1 if (getattr(layout, "axis", None) or getattr(layout, "vector_axis", 1) or 0) == 1 else 0
    extents = operand.tile.extents
    lines, along = extents[1 - axis], extents[axis]
    each = max(1, WORD // item)  # elements of a word
    words = min(WORDS, -(-along // each))
    place = banks_of(layout, size, item)
    wide, high = 13, 13
    names = ("row", "column") if axis == 1 else ("column", "row")
    parts = [text(0, 11, f"{layout!r}", kind="soft")]
    for line in range(min(lines, LINES)):
        for word in range(words):
            element = word * each
            address, bank = place((line, element) if axis == 1 else (element, line))
            tip = (
                f"{names[0]} {line}, {names[1]}{'s' if each > 1 else ''} "
                f"{element}{f' to {element + each - 1}' if each > 1 else ''}\n"
                f"byte {address} of the tile, bank {bank}"
            )
            parts.append(rect(word * wide, 17 + line * high, wide, high, tip, f"b{bank}", hue(bank, BANKS)))
    shown = min(lines, LINES), words * each
    said = f"{names[0]}s downwards, {names[1]}s to the right: {shown[0]} of {lines}, {shown[1]} of {along}"
    return figure(words * wide, 20 + shown[0] * high, parts, said)


def banks_of(layout: Any, size: Any, item: int) -> Any:
    """(row, column) of a tile -> (its byte, its bank)."""
    leading = layout.leading(size)

    def place(element: tuple[int, int]) -> tuple[int, int]:
        at = int(np.asarray(layout.position((np.int64(element[0]), np.int64(element[1])), leading))) * item
        return at, at // WORD % BANKS

    return place
