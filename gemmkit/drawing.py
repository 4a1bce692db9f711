"""Pieces of pages of HTML: tables, figures in SVG, and a page that fetches nothing. Reports and faults are drawn with them.

A figure's parts carry what a reader sees on hover in ``data-t``; parts of one ``data-g`` are lit together. Colours are the
page's variables, which have a value for light and one for dark: ``--ink``, ``--soft``, ``--line``, ``--paper``, ``--panel``,
and hues by `hue`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape, unescape

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
