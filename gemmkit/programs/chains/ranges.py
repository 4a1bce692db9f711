"""Which blocks a tile's rounds visit, and which of these need no test: read off the conditions of ``where``.

A condition that is made of comparisons linear in an element's row and in its place along the rounds (``n <= m``,
``(m - n < 128) & (n <= m)``) bounds that place by the row. Blocks outside the bounds of all rows are not visited, where the
program ignores what is hidden (`trials`); in blocks inside the bounds of every row nothing is tested. Of another condition
every block is visited and tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.trials import ignores_hidden, mentions
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Index


@dataclass(frozen=True)
class Bound:
    """slope * row + shift: the first place that a row sees, or the one behind the last."""

    slope: int
    shift: int

    def text(self, row: str) -> str:
        scaled = "" if self.slope == 0 else row if self.slope == 1 else f"{self.slope} * ({row})"
        sign = "-" if self.shift < 0 else "+"
        if not scaled:
            return str(self.shift)
        return f"{scaled} {sign} {abs(self.shift)}" if self.shift else scaled


@dataclass
class Ranges:
    """``ends`` and ``begins``: bounds of places that rows see; ``visits_less``: blocks outside are left out. ``has_tests``:
    there are conditions; ``has_free``: all of them are bounds."""

    has_tests: bool = False
    has_free: bool = True
    visits_less: bool = False
    ends: list[Bound] = field(default_factory=list)
    begins: list[Bound] = field(default_factory=list)

    @property
    def show_the_first(self) -> bool:
        """Whether every row sees the first place. Rounds from the first block to the last then show a row something before
        they hide a whole block of it."""
        return not self.begins and all(bound.slope >= 0 and bound.shift > 0 for bound in self.ends)

    @property
    def grow(self) -> bool:
        """Whether later rows visit more blocks than earlier ones."""
        return self.visits_less and any(bound.slope > 0 for bound in self.ends) and not any(b.slope > 0 for b in self.begins)


def ranges_of(chain: Chain, signs: dict[str, float], commutes: bool) -> Ranges:
    """Of a program as it is traced. ``commutes``: its rounds may go from the last block to the first (`trials`)."""
    out, tests = Ranges(), list[Value]()
    for x in chain.body:
        if x.op == "where" and (chain.index in x.args[0].dims or mentions(x.args[0], chain.index)):
            out.has_tests = True
            bounds = bounds_of(x.args[0], chain.rows, chain.index)
            if bounds is None:
                out.has_free = False
                continue
            tests.append(x)
            out.begins += bounds[0]
            out.ends += bounds[1]
    at_first = commutes or not out.show_the_first
    out.visits_less = out.has_tests and out.has_free and all(ignores_hidden(chain, x, signs, at_first) for x in tests)
    return out


def bounds_of(x: Value, rows: Index, index: Index) -> tuple[list[Bound], list[Bound]] | None:
    """(first places, places behind the last) that hold together; None for what is no such bound."""
    if x.op == "and":
        parts = [bounds_of(y, rows, index) for y in x.args]
        if any(part is None for part in parts):
            return None
        return [b for part in parts if part for b in part[0]], [b for part in parts if part for b in part[1]]
    if x.op not in ("lt", "le"):
        return None
    forms = [_linear(y, rows, index) for y in x.args]
    if forms[0] is None or forms[1] is None:
        return None
    row, place, shift = (a - b for a, b in zip(*forms))
    shift += x.op == "lt"                              # row * m + place * n + shift <= 0
    if place == 1:
        return [], [Bound(-row, 1 - shift)]
    if place == -1:
        return [Bound(row, shift)], []
    return None


def _linear(x: Value, rows: Index, index: Index) -> tuple[int, int, int] | None:
    """(factor of the row, of the place, constant), all whole."""
    if x.op == "const" and not x.dims and float(x.data).is_integer():
        return 0, 0, int(x.data)
    if x.op == "coordinate":
        return (1, 0, 0) if x.data is rows else (0, 1, 0) if x.data is index else None
    forms = [_linear(y, rows, index) for y in x.args]
    if not forms or any(form is None for form in forms):
        return None
    known = [form for form in forms if form is not None]
    if x.op == "neg":
        return _scaled(known[0], -1)
    if x.op in ("add", "sub"):
        other = _scaled(known[1], 1 if x.op == "add" else -1)
        return known[0][0] + other[0], known[0][1] + other[1], known[0][2] + other[2]
    if x.op == "mul":
        for one, factor in (known, known[::-1]):
            if factor[:2] == (0, 0):
                return _scaled(one, factor[2])
    return None


def _scaled(form: tuple[int, int, int], factor: int) -> tuple[int, int, int]:
    return form[0] * factor, form[1] * factor, form[2] * factor
