"""Lines of code, counted: those that hold something other than a comment or a docstring.

    python -m tests.support.code_lines          the rows of the tables in docs/design/lines.md and
                                                docs/design/programs.md, and what is counted now
    python -m tests.support.code_lines --write  writes what is counted into the tables
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from tests.support.markdown import ROOT, blocks

DOCUMENT, PROGRAMS = ROOT / "docs" / "design" / "lines.md", ROOT / "docs" / "design" / "programs.md"
HEADING = "## Lines it took"

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
            tokenize.ENDMARKER)
_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that hold code. A statement over three lines is three."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            found.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def defined(source: str) -> dict[str, range]:
    """The lines of everything that a file defines, decorators included: classes, functions, methods (``Class.method``) and
    names at its top that are assigned."""
    out: dict[str, range] = {}

    def add(name: str, node: ast.stmt) -> None:
        decorators = [d.lineno for d in getattr(node, "decorator_list", ())]
        out[name] = range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)

    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            add(node.name, node)
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef):
                    add(f"{node.name}.{inner.name}", inner)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    add(target.id, node)
    return out


def source_of(path: str) -> str:
    """A Python file, or the Python blocks of a text in Markdown, each at its line."""
    if not path.endswith(".md"):
        return (ROOT / path).read_text(encoding="utf-8")
    out: list[str] = []
    for block in blocks(ROOT / path):
        if block.language == "python":
            out += [""] * (block.line - 1 - len(out)) + block.text.splitlines()
    return "\n".join(out) + "\n"


@cache
def _file(path: str) -> tuple[set[int], dict[str, range]]:
    source = source_of(path)
    return code_lines(source), defined(source)


def lines_at(place: str) -> set[tuple[str, int]]:
    """The lines of code of a file (``gemmkit/functions/number_systems.py``, ``README.md``), or of names in it (``gemmkit/functions/number_systems.py: Dual, _spread``).

    Raises KeyError for a name that the file does not define.
    """
    path, colon, names = place.partition(":")
    path = path.strip()
    code, known = _file(path)
    chosen = code if not colon else {n for name in names.split(",") for n in known[name.strip()] if n in code}
    return {(path, n) for n in chosen}


def count(places: Iterable[str]) -> int:
    """Lines of code at several places; a line that two of them have is one."""
    return len(set().union(*map(lines_at, places)))


# -- the table ----------------------------------------------------------------------------------------------------------

class Row(NamedTuple):
    """A row of the table: what was added, the paper's lines, ours, and where ours are."""

    what: str
    paper: str
    ours: int
    places: tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The rows of the table under `HEADING`."""
    section = text[text.index(HEADING):].split("\n## ")[0]
    out = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[2].isdecimal():
            out.append(Row(cells[0], cells[1], int(cells[2]), tuple(re.findall(r"`([^`]+\.(?:py|md)[^`]*)`", cells[3]))))
    return out


def counted(text: str) -> str:
    """The text with the counts of today in the table under `HEADING`; other tables may have rows of the same names."""
    head, section = text[:text.index(HEADING)], text[text.index(HEADING):]
    for row in rows(text):
        before = next(line for line in section.splitlines() if line.startswith(f"| {row.what} |"))
        cells = before.split("|")
        section = section.replace(before, "|".join([*cells[:3], f" {count(row.places)} ", *cells[4:]]), 1)
    return head + section


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        for page in (DOCUMENT, PROGRAMS):
            page.write_text(counted(page.read_text(encoding="utf-8")), encoding="utf-8")
    for row in [row for page in (DOCUMENT, PROGRAMS) for row in rows(page.read_text(encoding="utf-8"))]:
        print(f"{row.what:60} paper {row.paper:>4}   said {row.ours:4}   counted {count(row.places):4}")
