"""What the emulator reports: a class for each kind of fault, with kernel line, threads and address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape, unescape
from typing import Any, NamedTuple

import numpy as np

from gemmkit.emulator.memory import BANKS, WORD
from gemmkit.lang.host import Site, SourceLine, kernel_line, template_line


class ThreadId(NamedTuple):
    """A thread of a launch: its block's index (x, y, z) and its linear index in the block."""

    block: tuple[int, int, int]
    tid: int

    def __str__(self) -> str:
        return f"thread {self.tid} of block {self.block}"


class Access(NamedTuple):
    """One side of a race: ``kind`` is "read" or "write"."""

    kind: str
    thread: ThreadId
    kernel_line: SourceLine
    template_line: SourceLine | None


class Waiter(NamedTuple):
    """Where a thread stands that cannot go on."""

    thread: ThreadId
    what: str
    kernel_line: SourceLine


class EmulatorError(RuntimeError):
    """A fault in an emulated kernel.

    Attributes:
        kernel_line: the innermost line of the kernel or of a component (`SourceLine`: file, number, text).
        template_line: the line of the template kernel that called it, when that is another one.
        thread: the thread at fault, (block, tid).
        address: absolute byte address for an array, byte offset for shared memory.
        size: bytes of the access.
        memory: name of the array, or of the block's shared memory.
        index, extents: of an access by index that lies outside its array, which has no address; else None.

    In a notebook `html` is shown: the access in its tile, in the banks of shared memory, or in its array.
    """

    index: tuple[int, ...] | None = None
    extents: tuple[int, ...] | None = None
    launched: Any = None
    """What the launch worked on (`gemmkit.emulator.errors.Launched`); None outside of gemmkit's products."""

    def __init__(self, message: str, *, site: Site | None = None, thread: ThreadId | None = None,
                 address: int | None = None, size: int | None = None, memory: str | None = None) -> None:
        self.kernel_line = None if site is None else kernel_line(site)
        self.template_line = None if site is None else template_line(site)
        self.thread, self.address, self.size, self.memory = thread, address, size, memory
        lines = [message]
        if thread is not None:
            lines.append(f"by {thread}")
        if self.kernel_line is not None:
            lines.append(f"at {self.kernel_line}")
        if self.template_line is not None:
            lines.append(f"called from {self.template_line}")
        super().__init__("\n  ".join(lines))

    def html(self) -> str:
        """A page that fetches nothing: what the message says, and the access drawn where it lies."""

        return fault_page(self, self.launched)

    def _repr_html_(self) -> str:
        """What a notebook shows of a fault that a cell returns."""

        return framed(self.html(), 560)


class BoundsError(EmulatorError):
    """An access to bytes that belong to no element of the array, or lie outside shared memory."""


class AlignmentError(EmulatorError):
    """An access whose address is no multiple of its alignment."""


class UninitialisedRead(EmulatorError):
    """A read of bytes that nothing has written, or of a register: a variable, or an element of `registers`."""


class CoordinateError(EmulatorError):
    """Arithmetic of whole numbers that the device has no result for: a coordinate that leaves its 32 bits, a division by
    zero, a negative exponent, an integer made of NaN or of a float that its type does not hold."""


class ReadOnlyError(EmulatorError):
    """A write to an array that the kernel may only read."""


class DivergenceError(EmulatorError):
    """Threads that must execute one instruction together meet at different ones.

    ``lines``: the two kernel lines, the one that was there first leading.
    """

    def __init__(self, message: str, first: Site, second: Site, first_thread: ThreadId,
                 thread: ThreadId) -> None:
        self.lines = (kernel_line(first), kernel_line(second))
        super().__init__(f"{message}\n  {first_thread} waits at {self.lines[0]}", site=second, thread=thread)


class RaceError(EmulatorError):
    """Two accesses to one byte, at least one of them a write, with nothing that orders them.

    ``accesses``: the earlier and the later one in this run (another run may see them the other way round).
    """

    def __init__(self, message: str, earlier: Access, later: Access, *, site: Site, address: int, size: int,
                 memory: str) -> None:
        self.accesses = (earlier, later)
        called = f"\n  called from {earlier.template_line}" if earlier.template_line else ""
        first = f"first a {earlier.kind} by {earlier.thread}\n  at {earlier.kernel_line}{called}"
        super().__init__(f"{message}\n  {first}\n  then a {later.kind}", site=site, thread=later.thread,
                         address=address, size=size, memory=memory)


class ProtocolError(EmulatorError):
    """An instruction used against its rules: at an mbarrier that does not exist, with registers that no warp has, ..."""


class ProxyError(EmulatorError):
    """TMA or a tensor core reads what a thread wrote, with no ``fence_async`` of that thread in between.

    ``write``: the thread's access.
    """

    def __init__(self, message: str, write: Access, *, site: Site, thread: ThreadId, address: int, size: int,
                 memory: str) -> None:
        self.write = write
        super().__init__(f"{message}\n  written by {write.thread}\n  at {write.kernel_line}", site=site,
                         thread=thread, address=address, size=size, memory=memory)


class DeadlockError(EmulatorError):
    """No thread can go on. ``waiting``: every thread that waits, for what and where."""

    def __init__(self, message: str, waiting: Sequence[Waiter], site: Site) -> None:
        self.waiting = tuple(waiting)
        super().__init__(message, site=site, thread=waiting[0].thread)


# --------------------------------------------------------------------------------------------------
# Pieces of pages of HTML: tables, figures in SVG, and a page that fetches nothing. Reports and faults are drawn with
# them.
#
# A figure's parts carry what a reader sees on hover in ``data-t``; parts of one ``data-g`` are lit together. Colours are
# the page's variables, which have a value for light and one for dark: ``--ink``, ``--soft``, ``--line``, ``--paper``,
# ``--panel``, and hues by `hue`.

STYLE = """
:root { color-scheme: light dark; --ink: #1b2330; --soft: #5b6675; --paper: #ffffff; --panel: #f5f7fa; --line: #d3dae3;
        --light: 78%; --deep: 46%; --hot: #c62839; --accent: #2563c9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9ef; --soft: #9aa6b5; --paper: #12161c; --panel: #1a2029;
        --line: #38424f; --light: 32%; --deep: 62%; --hot: #ff7080; --accent: #7db0ff; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink); background: var(--paper); max-width: 1120px;
       margin: 1.2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.35rem; margin: .6rem 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; border-bottom: 1px solid
var(--line); }
h3 { font-size: .95rem; margin: .8rem 0 .2rem; } p { margin: .4rem 0; max-width: 90ch; } .soft { color: var(--soft); }
nav a { margin-right: 1rem; color: var(--accent); text-decoration: none; white-space: nowrap; }
table { border-collapse: collapse; margin: .6rem 0; } th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem;
        text-align: left; vertical-align: top; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
@media (max-width: 40em) { table { display: block; overflow-x: auto; } }
tr.own td { font-weight: 600; } pre { overflow-x: auto; background: var(--panel); padding: .6rem; font-size: 13px; }
.row { display: flex; flex-wrap: wrap; gap: 1.6rem; align-items: flex-start; } figure { margin: .4rem 0; max-width: 100%; }
figcaption { font-size: 13px; color: var(--soft); max-width: 62ch; } .wide { overflow-x: auto; }
svg { display: block; max-width: 100%; height: auto; font: 11px system-ui, "DejaVu Sans", sans-serif; } .wide svg {
max-width: none; }
svg text { fill: var(--ink); pointer-events: none; } svg text.soft { fill: var(--soft); } .h { fill: hsl(var(--h) 62%
var(--light)); }
.k { fill: hsl(var(--h) 55% var(--deep)); } [data-t] { cursor: default; } rect.edge, path.edge { stroke: var(--paper);
stroke-width: .5; }
.lit { stroke: var(--ink) !important; stroke-width: 1.6 !important; } .key { display: inline-block; width: .9em;
height: .9em;
        background: hsl(var(--h) 62% var(--light)); margin: 0 .3em 0 .9em; vertical-align: -.1em; }
#tip { position: fixed; display: none; pointer-events: none; background: var(--ink); color: var(--paper); padding:
.2rem .5rem;
       border-radius: 4px; font-size: 12.5px; max-width: 46ch; z-index: 9; white-space: pre-line; }
"""

#: The reader's pointer: what is under it is told, and parts of one group are lit.
SCRIPT = """
(() => { const tip = document.getElementById("tip"); let lit = [];
const dark = () => { lit.forEach(e => e.classList.remove("lit")); lit = []; tip.style.display = "none"; };
document.addEventListener("mousemove", e => { const at = e.target.closest && e.target.closest("[data-t]"); dark();
  if (!at) return; const of = at.closest("svg"), g = at.dataset.g;
  lit = of && g ? [...of.querySelectorAll("[data-g]")].filter(x => x.dataset.g === g) : [at];
  lit.forEach(x => x.classList.add("lit")); tip.textContent = at.dataset.t; tip.style.display = "block";
  const w = tip.offsetWidth, h = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - w - 6)) + "px";
  tip.style.top = (e.clientY + 18 + h > innerHeight ? Math.max(4, e.clientY - h - 10) : e.clientY + 18) + "px"; });
document.addEventListener("mouseleave", dark); })();
"""


def document(title: str, body: str) -> str:
    """A whole page: style and script lie in it, and it asks for nothing else."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>'
        f'{body}<div id="tip" role="status"></div><script>{SCRIPT}</script></body></html>'
    )


def framed(page: str, height: int = 640) -> str:
    """A page as a part of another (a notebook's cell): in a frame, so that neither's style touches the other's.

    >>> framed("<p>1 &lt; 2</p>", 80)[:48]
    '<iframe style="width:100%;border:0;height:80px" '
    """
    return f'<iframe style="width:100%;border:0;height:{height}px" srcdoc="{escape(page)}"></iframe>'


def attribute(**values: object) -> str:
    """Attributes of an element; ``_`` in a name stands for ``-``, and those that are None are left out.

    >>> attribute(data_t="a < b", x=1.50, y=None)
    ' data-t="a &lt; b" x="1.5"'
    """
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_of(value)}"' for name, value in values.items() if value is not None
    )


def _of(value: object) -> str:
    return escape(f"{value:.6g}" if isinstance(value, float) else str(value))


def hue(n: int, count: int) -> int:
    """One of ``count`` hues, neighbours near each other.

    >>> [hue(n, 4) for n in range(4)]
    [210, 300, 30, 120]
    """
    return (210 + 360 * n // max(count, 1)) % 360


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    tip: str | None = None,
    group: str | None = None,
    colour: int | None = None,
    kind: str = "h edge",
    fill: str | None = None,
) -> str:
    """A rectangle: of a hue, or filled with a variable of the page's."""
    style = f"--h:{colour}" if colour is not None else f"fill:{fill}" if fill else None
    return f"<rect{attribute(x=x, y=y, width=width, height=height, class_=kind, style=style, data_t=tip, data_g=group)}/>"


def text(x: float, y: float, said: str, anchor: str = "start", kind: str | None = None, size: int | None = None) -> str:
    return f"<text{attribute(x=x, y=y, text_anchor=anchor, class_=kind, font_size=size)}>{escape(said)}</text>"


def figure(width: float, height: float, parts: Iterable[str], caption: str = "", wide: bool = False) -> str:
    """A drawing with its caption, as wide as its labels need; a ``wide`` one is scrolled rather than shrunk."""
    drawing = "".join(parts)
    labels = [_reach(*found) for found in _LABEL.findall(drawing)]
    low, high = min([0.0, *(low for low, _ in labels)]), max([width, *(high for _, high in labels)])
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return (
        f"<figure{' class=wide' if wide else ''}><svg{attribute(width=high - low, height=height, role='img')}"
        f'{attribute(aria_label=caption or None)} viewBox="{low:g} 0 {high - low:g} {height:g}">{drawing}</svg>'
        f"{said}</figure>"
    )


#: A label as `text` writes it, that is not turned: x, its attributes, what it says.
_LABEL = re.compile(r'<text x="([^"]+)"((?: (?!transform)[\w-]+="[^"]*")*)>([^<]*)</text>')
_EACH = 0.63                           # of the font's size: a character of DejaVu Sans, which is wide, on average


def _reach(x: str, attributes: str, said: str) -> tuple[float, float]:
    """From where to where a label reaches."""
    size = re.search(r'font-size="(\d+)"', attributes)
    wide = len(unescape(said)) * _EACH * (int(size[1]) if size else 11)
    before = 1.0 if '"end"' in attributes else 0.5 if '"middle"' in attributes else 0.0
    return float(x) - before * wide, float(x) + (1 - before) * wide


def legend(names: Iterable[tuple[str, int]]) -> str:
    """What hues mean."""
    return (
        "<p class=soft>"
        + "".join(f'<span class=key style="--h:{colour}"></span>{escape(name)}' for name, colour in names)
        + "</p>"
    )


def table(head: Iterable[object], rows: Iterable[Iterable[object]], own: int | None = None) -> str:
    """A table; numbers stand at the right, and the row number ``own`` is set off.

    >>> table((), [("A & B", 4096)])
    '<table><tbody><tr><td>A &amp; B</td><td class="n">4,096</td></tr></tbody></table>'
    """

    def cell(value: object) -> str:
        kind = ' class="n"' if isinstance(value, (int, float)) else ""
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)
        return f"<td{kind}>{escape(shown)}</td>"

    names = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    lines = "".join(f"<tr{' class=own' if n == own else ''}>{''.join(map(cell, row))}</tr>" for n, row in enumerate(rows))
    return f"<table>{f'<thead><tr>{names}</tr></thead>' if names else ''}<tbody>{lines}</tbody></table>"


# --------------------------------------------------------------------------------------------------
# A fault of the emulator as a page: where its access lies in a tile, in the banks of shared memory, or in an array.

LINES = 3  # lines of 128 bytes that are drawn on each side of an access
SIDE = 260.0  # pixels of a tile's longer side
LEAST = 5.0  # pixels of a side of an access


class Launched(NamedTuple):
    """What a fault's launch worked on: the specialisation of its kernel, and its arrays (`View`) by their names."""

    spec: Any
    arrays: dict[str, Any]


class ElementRange(NamedTuple):
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
        outside = ElementRange(f"array {error.memory!r}", error.extents, error.index, 1, 1)
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


def _in_stage(spec: Any, error: Any) -> ElementRange | None:
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
            return ElementRange(of, tuple(map(int, extents)), (int(rows[first]), int(columns[first])), len(inside), axis)
    return None


def _in_array(launched: Launched, error: Any) -> ElementRange | None:
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
    return ElementRange(f"array {error.memory!r}", array.shape, tuple(map(int, place)), count, 1 - major)


def _said(found: ElementRange) -> str:
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


def _tile(found: ElementRange) -> str:
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
