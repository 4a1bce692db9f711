"""What came of trying variants of a schedule: a row each, and the table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One choice of parameters, and what came of it: a time, or in ``error`` why there is none.

    ``blocks_per_sm`` is how many blocks a multiprocessor has at a time; ``ratio`` is the time of `gemmkit.matmul`, measured
    in turns, by this one's (above 1 it is faster).
    """

    parameters: dict[str, Any]
    schedule: Any = field(default=None, repr=False)
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    blocks_per_sm: int | None = None
    microseconds: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    is_right: bool = False
    error: str | None = None

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.parameters.items())

    def refused(self, why: object) -> Variant:
        """The row of one that has no time."""
        return replace(self, error=str(why))


HEADER = ("variant", "us", "TFLOP/s", "ratio", "registers", "shared", "threads", "blocks/SM")


@dataclass(frozen=True)
class Explored:
    """What was found. ``rows`` has all variants: the timed ones, the fastest first; then those that were compiled and
    checked alone; then those that were refused. ``default`` is the time of `gemmkit.matmul` in microseconds, None where
    nothing was timed."""

    what: str
    rows: tuple[Variant, ...]
    default: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Variant:
        """The fastest variant. Raises RuntimeError where none was timed."""
        if not self.rows or self.rows[0].microseconds is None:
            why = "; ".join(self.notes) or "no variant could be compiled and is right"
            raise RuntimeError(f"{self.what}: no variant was timed ({why})")
        return self.rows[0]

    @property
    def schedule(self) -> Any:
        """The fastest schedule. Raises RuntimeError where none was timed."""
        return self.best.schedule

    def __str__(self) -> str:
        """A table; what was refused stands below it, each with the rule that it breaks."""
        shown = [row for row in self.rows if row.error is None]
        lines = [HEADER, *map(_cells, shown)]
        if self.default is not None:
            lines.append(("gemmkit.matmul", f"{self.default:.2f}", "", "1.000", "", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join((first.ljust(widths[0]), *map(str.rjust, rest, widths[1:]))) for first, *rest in lines]
        others = [row for row in self.rows if row.error is not None]
        counts = f"{self.what}: {len(self.rows)} variants, {len(others)} of them refused or wrong"
        refused = [f"{row}: {' '.join(str(row.error).split())}" for row in others]
        return "\n".join([counts, *(line.rstrip() for line in table), *refused, *self.notes])


def _cells(row: Variant) -> tuple[str, ...]:
    def number(value: float | None, text: str) -> str:
        return "-" if value is None else format(value, text)

    registers = number(row.registers, "d") + (f" ({row.spilled_bytes} B spilled)" if row.spilled_bytes else "")
    return (str(row), number(row.microseconds, ".2f"), number(row.tflops, ".2f"), number(row.ratio, ".3f"), registers,
            number(row.shared_bytes, "d"), number(row.threads, "d"), number(row.blocks_per_sm, "d"))
