"""A fault of the emulator as a page: where its access lies in a tile, in the banks of shared memory, or in an array."""

from __future__ import annotations

from html import escape
from typing import Any, NamedTuple

import numpy as np

from gemmkit.drawing import document, figure, hue, rect, table, text
from gemmkit.emulator.memory import BANKS, WORD

LINES = 3  # lines of 128 bytes that are drawn on each side of an access
SIDE = 260.0  # pixels of a tile's longer side
LEAST = 5.0  # pixels of a side of an access


class Launched(NamedTuple):
    """What a fault's launch worked on: the specialisation of its kernel, and its arrays (`View`) by their names."""

    spec: Any
    arrays: dict[str, Any]


class Element(NamedTuple):
    """Elements of a tile or of an array: ``name``, its extents, the first element's place, and how many along which axis."""

    name: str
    extents: tuple[int, ...]
    place: tuple[int, ...]
    many: int
    axis: int


def fault_page(error: Any, launched: Launched | None) -> str:
    """The page of an `EmulatorError`: its message, its lines, and what is known of the access."""
    head, *rest = str(error).splitlines()
    lines: list[tuple[str, object]] = []
    accesses = getattr(error, "accesses", ())
    if error.thread is not None and not accesses:
        lines.append(("thread", _who(error.thread, launched)))
    for order, access in zip(("first", "then"), accesses):
        lines.append((f"{order} a {access.kind}", f"by {_who(access.thread, launched)}, at {access.kernel_line}"))
    if hasattr(error, "write"):
        lines.append(("written by", f"{_who(error.write.thread, launched)}, at {error.write.kernel_line}"))
    for name, line in (("line", error.kernel_line), ("called from", error.template_line)):
        if line is not None and not (accesses and name == "line"):
            lines.append((name, line))
    shown = ""
    if error.index is not None and len(error.index) == 2:
        outside = Element(f"array {error.memory!r}", error.extents, error.index, 1, 1)
        lines.append(("element", _said(outside)))
        shown = _tile(outside)
    if error.address is not None:
        is_shared = str(error.memory).startswith("shared memory")
        found = None if launched is None else _in_stage(launched.spec, error) if is_shared else _in_array(launched, error)
        if found is not None:
            lines.append(("elements", _said(found)))
            shown += _tile(found)
        shown += _banks(error) if is_shared else ""
    return document(
        f"{type(error).__name__}: {head}",
        f"{table((), lines)}<div class=row>{shown}</div><details open><summary>The whole message</summary>"
        f"<pre>{escape(chr(10).join([head, *rest]))}</pre></details>",
    )


def _who(thread: Any, launched: Launched | None) -> str:
    """A thread with its warp and lane, and its role where it has one."""
    spec: Any = None if launched is None else launched.spec
    role = ""
    if getattr(spec, "producer_warps", 0):
        group = thread.tid // 128 - spec.producer_warps // 4
        role = ", of the producer" if group < 0 else f", of consumer {group}"
    return f"{thread} (warp {thread.tid // 32}, lane {thread.tid % 32}{role})"


# -- where it lies --------------------------------------------------------------------------------------------------------


def _in_stage(spec: Any, error: Any) -> Element | None:
    """The elements of A's or B's tile at a shared address; None where no stage's tiles lie."""
    stage, at = divmod(error.address, getattr(spec, "stage_bytes", None) or 2**40)
    if stage >= getattr(spec, "stages", 1):
        return None
    for name in "ab":
        operand = getattr(spec, name)
        if 0 <= at - operand.offset < operand.nbytes and hasattr(operand.shared, "position"):
            extents, item = operand.tile.extents, int(operand.shared.dtype.itemsize)
            rows, columns = (part.ravel() for part in np.indices(extents))
            places = np.asarray(operand.shared.position((rows, columns), operand.shared.leading(operand.tile.size))) * item
            inside = np.flatnonzero((places + item > at - operand.offset) & (places < at - operand.offset + error.size))
            if not len(inside):
                return None
            first = inside[0]
            axis = 0 if len(inside) > 1 and columns[inside[1]] == columns[first] else 1
            of = f"stage {stage} of {name.upper()}" if hasattr(spec, "stages") else f"the tile of {name.upper()}"
            of += "" if hasattr(spec, "producer_warps") else " (C and D are staged in the same bytes)"
            return Element(of, tuple(map(int, extents)), (int(rows[first]), int(columns[first])), len(inside), axis)
    return None


def _in_array(launched: Launched, error: Any) -> Element | None:
    """The element of an array at an address, which may lie beyond the array."""
    array = next(
        (view.array for view in launched.arrays.values() if view is not None and view.memory.name == error.memory), None
    )
    if array is None or array.ndim != 2 or not array.size:
        return None
    rest = error.address - array.__array_interface__["data"][0]
    major = int(abs(array.strides[0]) < abs(array.strides[1]))
    place = [0, 0]
    for axis in (major, 1 - major):
        if array.strides[axis]:
            place[axis], rest = divmod(rest, array.strides[axis]) if array.strides[axis] > 0 else (0, rest)
    count = max(1, (error.size or 1) // array.itemsize)
    return Element(f"array {error.memory!r}", array.shape, tuple(map(int, place)), count, 1 - major)


def _said(found: Element) -> str:
    (row, column), many = found.place, found.many
    ends = [
        f"{at}" if many == 1 or axis != found.axis else f"{at} to {at + many - 1}" for axis, at in enumerate((row, column))
    ]
    beyond = any(not 0 <= at < extent for at, extent in zip(found.place, found.extents))
    return (
        f"row{'s' if found.axis == 0 and many > 1 else ''} {ends[0]}, "
        f"column{'s' if found.axis == 1 and many > 1 else ''} {ends[1]} "
        f"of {found.name} ({' x '.join(map(str, found.extents))})" + (": outside of it" if beyond else "")
    )


# -- figures --------------------------------------------------------------------------------------------------------------


def _tile(found: Element) -> str:
    """The tile or array, to scale, with the access."""
    rows, columns = found.extents
    scale = SIDE / max(rows, columns)
    high, wide = max(rows * scale, 4), max(columns * scale, 4)
    row, column = (min(max(at, -1), extent) for at, extent in zip(found.place, found.extents))  # beside it, where outside
    size = [scale, scale]
    size[found.axis] *= found.many
    tall, broad = (max(LEAST, one) for one in size)
    parts = [
        text(20, 14, f"{columns} columns", kind="soft"),
        rect(20, 24, wide, high, kind="frame", fill="var(--panel)"),
        f'<rect x="20" y="24" width="{wide:g}" height="{high:g}" fill="none" stroke="var(--soft)"/>',
        rect(20 + column * scale, 24 + row * scale, broad, tall, _said(found), kind="edge", fill="var(--hot)"),
        f'<path d="M20 {24 + row * scale + tall / 2:g} H{20 + column * scale:g}" stroke="var(--hot)" stroke-dasharray="3 '
        f'3"/>',
    ]
    return figure(max(wide + 44, 150), high + 44, parts, f"{found.name}, {rows} x {columns}, to scale; red: the access.")


def _banks(error: Any) -> str:
    """Lines of shared memory around an access, a word a square, coloured by banks."""
    line = BANKS * WORD
    first = max(0, error.address // line - LINES)
    last = (error.address + error.size - 1) // line + LINES
    wide, high, left = 15, 15, 62
    parts = [text(left + n * wide + wide / 2, 12, str(n), "middle", "soft") for n in range(0, BANKS, 4)]
    outlines = []
    for number in range(first, last + 1):
        y = 18 + (number - first) * (high + 3)
        parts.append(text(left - 6, y + 12, str(number * line), "end", "soft"))
        for bank in range(BANKS):
            at = number * line + bank * WORD
            touched = at < error.address + error.size and at + WORD > error.address
            tip = f"bytes {at} to {at + WORD - 1}: bank {bank}" + ("\nthe access" if touched else "")
            parts.append(rect(left + bank * wide, y, wide, high, tip, f"b{bank}", hue(bank, BANKS)))
            if touched:
                outlines.append(
                    f'<rect x="{left + bank * wide}" y="{y}" width="{wide}" height="{high}" fill="none" '
                    'stroke="var(--hot)" stroke-width="2.5" pointer-events="none"/>'
                )
    return figure(
        left + BANKS * wide + 6,
        24 + (last - first + 1) * (high + 3),
        parts + outlines,
        f"Shared memory around the {error.size} byte{'s' if error.size > 1 else ''} at offset {error.address}: a line is "
        f"128 bytes, "
        "the number at its left its first byte, those above the banks; red: the access.",
    )
