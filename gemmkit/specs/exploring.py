"""Schedules tried out: a function of parameters makes them, all combinations are compiled, checked and timed, the fastest is
returned (Fireiron, section 5, hypothesis C: tile sizes explored).

>>> from gemmkit.specs.schedule import *
>>> def make(rows, columns, k):
...     return (MatMul(M, N, K)(GL, GL, GL)(Kernel)
...         .tile(rows, columns).to(Block).tile(1, 1).to(Thread)
...         .accumulate_in(RF, Init.done, Move.done)
...         .split(k).move(A, RF, Move.tile(1, 1).unroll.done).move(B, RF, Move.tile(1, 1).unroll.done)
...         .tile(1, 1).unroll.done)
>>> variants = explore(make, rows=[16, 64], columns=[16], k=[1, 3])
>>> print(len(variants), variants[3])
4 rows=64 columns=16 k=3

``variants(a, b)`` tries them: on a GPU that gives an `Explored` with times, in the emulator one without.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gemmkit.specs.trials import explored
from gemmkit.specs.variants import Explored, Variant

MOST = 4096                            # variants of an exploration


class Variants(Sequence[Variant]):
    """The schedules that ``make`` returns for all combinations of ``choices``; called with matrices, they are tried.

    A combination for which ``make`` raises ValueError (of which ScheduleError is one) is listed with its reason. Any other
    exception is a fault of ``make``'s, and is not caught.

    Raises TypeError where ``make`` does not take the parameters, or returns no finished schedule; ValueError for a parameter
    without values, or more than `MOST` combinations.
    """

    def __init__(self, make: Callable[..., Any], choices: dict[str, Iterable[Any]]):
        if not callable(make):
            raise TypeError(f"explore({make!r}): give a function of parameters that returns a schedule")
        name = getattr(make, "__name__", "the function")
        values = {parameter: _values(parameter, given) for parameter, given in choices.items()}
        if not values:
            raise ValueError(f"explore({name}): give the values of its parameters, for example tiles=[(64, 64), (128, 64)]")
        try:
            inspect.signature(make).bind(**dict.fromkeys(values))
        except TypeError as error:
            raise TypeError(f"explore: {name}{inspect.signature(make)} cannot be called with {', '.join(values)}: "
                            f"{error}") from None
        if (count := math.prod(map(len, values.values()))) > MOST:
            raise ValueError(f"explore: {count} combinations of {', '.join(values)}; {MOST} at most, give fewer values")
        self._rows = [self._made(make, name, dict(zip(values, one))) for one in itertools.product(*values.values())]

    @staticmethod
    def _made(make: Callable[..., Any], name: str, parameters: dict[str, Any]) -> Variant:
        row = Variant(parameters)
        try:
            schedule = make(**parameters)
        except ValueError as error:
            return row.refused(error)
        if getattr(schedule, "kind", None) != "MatMul" or not callable(schedule):              # a finished one can be called
            raise TypeError(f"explore: {name}({row}) returns {schedule!r}; a schedule of a MatMul that ends with .done is "
                            "needed")
        return replace(row, schedule=schedule)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number]

    def __call__(self, a: Any, b: Any, out: Any = None, *, budget: float = 300.0, jobs: int | None = None,
                 progress: bool | None = None) -> Explored:
        """Try them on ``a @ b``.

        Each is compiled in a process of its own, ``jobs`` at a time. Arrays of a GPU: one process more, which has a context
        of its own and copies of the matrices, runs each into memory of NaN; the result is compared with float64, and timed
        in turns with `gemmkit.matmul`. A variant that faults or hangs takes nothing with it. NumPy arrays, within ``with
        gemmkit.emulate():``: each is compiled for an H100 and emulated on small operands of the same kind; there are no
        times.

        Args:
            a, b, out: as a schedule takes them; ``out`` says what C is, and is not written.
            budget: seconds, of which compiling may take half; variants that are not reached are listed so.
            jobs: variants that are compiled at a time; None for one a processor.
            progress: whether it is shown on standard error; None where that is a terminal.

        Raises ValueError and TypeError for matrices that do not fit each other, or another budget; RuntimeError where
        `gemmkit.matmul` itself does not run.
        """
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
            raise ValueError(f"budget={budget!r}: a number of seconds above 0 is needed")
        if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
            raise ValueError(f"jobs={jobs!r}: a number of processes, 1 or more, or None is needed")
        return explored(self._rows, a, b, out, float(budget), jobs, progress)


def _values(name: str, given: Any) -> list[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"explore: {name}={given!r}: give a list of values, for example {name}=[{given!r}]")
    values = list(given)
    if not values:
        raise ValueError(f"explore: {name}=[]: give at least one value")
    return values
