"""The steps of a schedule: Fireiron's decompositions and their refinements (section 3), each with its line in the source."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemmkit.specs.forms import FR, GL, RF, SH

#: Levels of the compute hierarchy, the outermost first.
LEVELS = KERNEL, BLOCK, WARP, THREAD = "Kernel", "Block", "Warp", "Thread"
#: Whose each memory is.
HOME = {GL: KERNEL, SH: BLOCK, FR: WARP, RF: THREAD}
ROW_MAJOR, COLUMN_MAJOR = "row", "col"
#: Files whose lines say nothing to whom writes a schedule.
_OURS = frozenset(str(Path(__file__).with_name(name)) for name in ("steps.py", "schedule.py"))


class ScheduleError(ValueError):
    """A schedule that cannot be carried out: at which of its lines, by which rule, and what would do."""


def line_here() -> str:
    """The line of a schedule that is being executed: ``file:number``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True)
class Step:
    """One decomposition; ``line`` is where it was written."""

    def refuse(self, why: str) -> ScheduleError:
        """The error of this step: ``raise step.refuse(...)``."""
        return ScheduleError(f"{self}: {why}\n  at {self.line}")

    line: str = field(default="", compare=False, kw_only=True)


@dataclass(frozen=True)
class Tile(Step):
    """``.tile(rows, columns)``: tiles one after the other, or ``.to(level)`` side by side. A size is a number, or (width,
    step): pieces of ``width``, ``step`` apart."""

    rows: Any
    columns: Any
    level: str | None = None
    order: str = ROW_MAJOR
    swizzle: Any = None
    unroll: bool = False
    blocks_per_sm: int = 1

    def __str__(self) -> str:
        return f".tile({self.rows}, {self.columns})" + (f".to({self.level})" if self.level else "")


@dataclass(frozen=True)
class Split(Step):
    """``.split(k)``: steps along K; ``.sync`` ends each with a barrier."""

    k: int
    sync: bool = False
    unroll: bool = False

    def __str__(self) -> str:
        return f".split({self.k})"


@dataclass(frozen=True)
class Move(Step):
    """``.move(operand, memory, implementation)``: what follows finds the operand there."""

    operand: int
    memory: str
    implementation: Any
    order: str | None = None
    pad: int = 0
    layout: Any = None
    swizzle: Any = None
    no_sync: bool = False
    prefetch: bool = False
    through: bool = False                                     # of a prefetch: by registers

    def __str__(self) -> str:
        name = "AB"[self.operand] if self.operand in (0, 1) else str(self.operand)
        return f".move({name}, {self.memory}, ...)"


@dataclass(frozen=True)
class Accumulate(Step):
    """``.accumulate_in(memory, begin, end)``: sums have a place of their own, with a beginning (Init) and an end (Move)."""

    memory: str
    begin: Any
    end: Any

    def __str__(self) -> str:
        return f".accumulate_in({self.memory}, ...)"
