"""What came of a search: a row for each mapping that was tried, and the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemmkit.config import Config

if TYPE_CHECKING:
    from gemmkit.programs.mapping import Mapping


@dataclass(frozen=True)
class Tried:
    """A mapping that was tried: ``ratio`` is the default's time by its own (above 1 it is faster), timed in turns;
    ``error`` says why there is none. ``candidate`` is None for the default."""

    name: str
    config: Any = field(default=None, repr=False)           # a `Config`, or a program's `Mapping`
    candidate: Any = field(default=None, repr=False)        # a `Candidate`, or a program's `Laid`
    microseconds: float | None = None
    ratio: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Tuned:
    """What `tune` found. ``rows`` are all mappings tried, the fastest first and those without a time last; ``notes`` say
    what was left out. ``kept`` is whether `gemmkit.matmul` finds the best one next time."""

    what: str
    rows: tuple[Tried, ...]
    default: Tried
    best: Tried
    kept: bool
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        """The fastest configuration; its ``repr`` can be pasted into a program. (Where the default computes the transpose
        and is the fastest, it is that of the transpose, as `gemmkit.plan(a, b).config` is: no ``conf`` of this product.)"""
        found: Config = self.best.config
        return found

    def __str__(self) -> str:
        lines = [self.what]
        for row in self.rows:
            mark = "*" if row is self.best else " "
            if row.microseconds is None or row.ratio is None:
                lines.append(f"{mark} {'-':>10} {'-':>6}  {row.name}: {row.error}")
            else:
                lines.append(f"{mark} {row.microseconds:8.1f}us {row.ratio:6.3f}  {row.name}")
        return "\n".join([*lines, *self.notes])


class TunedProgram(Tuned):
    """The same of a program, which has a mapping in a configuration's place."""

    @property
    def mapping(self) -> Mapping:
        """The fastest mapping, with all that it left open said; its ``repr`` can be pasted into a program."""
        found: Mapping = self.best.config
        return found
