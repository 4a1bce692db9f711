"""The tables of lines in docs/design/lines.md and docs/design/programs.md say what is counted in the code as it is."""

from __future__ import annotations

import pytest

from tests.support import code_lines

TEXT = code_lines.DOCUMENT.read_text(encoding="utf-8")
ROWS = code_lines.rows(TEXT)
OF_PROGRAMS = code_lines.rows(code_lines.PROGRAMS.read_text(encoding="utf-8"))

SAMPLE = '''"""A docstring
of two lines."""

# a comment
import math  # code


@decorated
class Shape:
    """Docstring."""

    sides: int = 4

    def area(self) -> float:
        """Docstring."""
        # comment
        return (
            self.sides *
            math.pi
        )


NAME = """not a
docstring"""


def nothing():
    "docstring"
'''


def test_code_is_what_is_neither_blank_nor_comment_nor_docstring() -> None:
    lines = SAMPLE.splitlines()
    counted = [lines[n - 1].strip() for n in sorted(code_lines.code_lines(SAMPLE))]
    assert counted == ["import math  # code", "@decorated", "class Shape:", "sides: int = 4", "def area(self) -> float:",
                       "return (", "self.sides *", "math.pi", ")", 'NAME = """not a', 'docstring"""', "def nothing():"]


def test_names_are_found_with_their_decorators() -> None:
    known = code_lines.defined(SAMPLE)
    assert set(known) == {"Shape", "Shape.area", "NAME", "nothing"}
    assert known["Shape"].start == 8 and len(code_lines.code_lines(SAMPLE) & set(known["Shape"])) == 8
    with pytest.raises(KeyError):
        code_lines.lines_at("gemmkit/functions/number_systems.py: Duel")


def test_a_line_counts_once_and_a_name_is_a_part_of_its_file() -> None:
    whole, part = code_lines.lines_at("gemmkit/functions/number_systems.py"), code_lines.lines_at("gemmkit/functions/number_systems.py: Dual")
    assert part < whole and code_lines.count(["gemmkit/functions/number_systems.py", "gemmkit/functions/number_systems.py: Dual"]) == len(whole)


@pytest.mark.parametrize("row", [*ROWS, *OF_PROGRAMS], ids=lambda row: row.what)
def test_the_tables_say_what_is_counted(row: code_lines.Row) -> None:
    assert row.places, f"{row.what!r} names no code"
    assert row.ours == code_lines.count(row.places), f"{row.what}: docs/design/lines.md or programs.md is to be brought up to date"


def test_the_passes_are_all_there() -> None:
    """Each file of `gemmkit.programs` is one pass's."""
    files = [place for row in OF_PROGRAMS for place in row.places if place.startswith("gemmkit/programs/")]
    there = {str(path.relative_to(code_lines.ROOT)) for path in (code_lines.ROOT / "gemmkit" / "programs").rglob("*.py")
             if path.name != "__init__.py"}
    assert set(files) == there and len(files) == len(there)


def test_the_table_has_the_papers_figures() -> None:
    """14 for padding, 23 for diagonal, 169 for complex and dual, 58 for the contraction (papers/002, section 5)."""
    said = [row.paper for row in ROWS]
    assert all(figure in said for figure in ("14", "23", "169", "58")), said
    section = TEXT[TEXT.index(code_lines.HEADING):]
    assert len(ROWS) == sum(line.startswith("| ") for line in section.splitlines()) - 1     # all but the header
