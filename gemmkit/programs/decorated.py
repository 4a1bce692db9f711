"""``@gk.program``: a function of arrays and components, and its two readings: numbers by NumPy, a kernel by its plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.programs.interpreter import called, entered
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.reference import BLOCK, Reference
from gemmkit.programs.trace import Loop, stores_of, trace
from gemmkit.programs.values import Parameter, Term
from gemmkit.runtime.arrays import describe, is_array, on_host

if TYPE_CHECKING:
    from gemmkit.programs.plan import ProgramPlan
    from gemmkit.tuner.found import TunedProgram
    from gemmkit.tuner.subject import Subject

#: Arguments of a program's calls.
OWN = "mapping", "stream", "text", "block", "mappings", "effort", "budget", "keep", "jobs", "progress"


def _check_mapping(mapping: Any) -> None:
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(f"mapping={mapping!r}: a gemmkit.Mapping is needed, such as Mapping({{'m': 128}}), or None")


class Program:
    """A decorated function. Its arguments are arrays, floating point numbers, and whatever else the function calls: a gate,
    a score. Arrays that it stores into are its results, given by the caller."""

    def __init__(self, function: Callable[..., None]):
        self.function = function
        self.signature = inspect.signature(function)
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<program {self.function.__name__}{self.signature}>"

    def bound(self, arrays: tuple, components: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises TypeError for those that the function does not take, or misses."""
        try:
            given = self.signature.bind(*arrays, **components)
        except TypeError as error:
            raise TypeError(f"{self.function.__name__}: {error}") from None
        given.apply_defaults()
        return dict(given.arguments)

    def traced(self, arguments: dict[str, Any]) -> Loop:
        """The program on symbols, for arrays of these shapes. Raises ValueError and TypeError with the user's line."""
        infos = {name: describe(x, name) for name, x in arguments.items() if is_array(x)}
        parameters = {name: Parameter(name, tuple(info.shape), info.dtype) for name, info in infos.items()}
        return trace(self.function, {**arguments, **parameters})

    def reference(self, *arrays: Any, block: int = BLOCK, **components: Any) -> Any:
        """The results in float64, computed with NumPy in blocks of ``block``: one array, or a tuple in the order of the
        arguments. Of the arrays that are stored into only the shapes are read; nothing is written to them. What the program
        does not store is NaN.

        Raises ValueError and TypeError with the line of the program that breaks a rule, TypeError for an array of a GPU.
        """
        arguments = self.bound(arrays, components)
        for name, x in arguments.items():
            if is_array(x) and describe(x, name).device >= 0:
                raise TypeError(f"{name} is an array of a GPU, and a reference computes with NumPy; copy it to the host")
        results = {store.parameter.name for store in stores_of(self.traced(arguments))}
        held = {name: np.full(np.shape(x), np.nan) if name in results else on_host(x)
                for name, x in arguments.items() if is_array(x)}
        parameters = {name: Parameter(name, x.shape, x.dtype, x) for name, x in held.items()}
        with entered(Reference(block)) as reference:
            numbers = {name: Term(reference.constant(x)) for name, x in arguments.items()
                       if isinstance(x, (float, np.floating))}
            called(self.function, {**arguments, **parameters, **numbers}, arguments)
        found = tuple(held[name] for name in arguments if name in results)
        return found if len(found) > 1 else found[0]

    def plan(self, *arrays: Any, mapping: Mapping | None = None, text: str | None = None, **components: Any) -> ProgramPlan:
        """The derived kernel for arrays of these kinds. ``text``: a kernel's text that is run in its place. Where no mapping
        is given, it is the one that `tune` has kept, or the default.

        Raises ConfigError for a mapping that cannot be, ValueError and TypeError for a program that has no kernel yet.
        """
        from gemmkit.programs.tuned import ProgramProblem

        _check_mapping(mapping)
        return ProgramProblem(self, self.bound(arrays, components), text).plan(mapping)

    def tune(self, *arrays: Any, mappings: Iterable[Mapping] | None = None, effort: str = "quick",
             budget: float | None = None, keep: bool = True, jobs: int | None = None, progress: bool | None = None,
             **components: Any) -> TunedProgram:
        """Try mappings on arrays of a GPU, and keep the fastest for calls and plans without a mapping to take from now on.

        What is tried, checked, timed and kept is `gemmkit.tune`'s, whose arguments ``effort``, ``budget`` (in seconds),
        ``keep``, ``jobs`` and ``progress`` are. Results are not written.

        Args:
            arrays, components: as in a call.
            mappings: what is tried; None: those that differ from the default in one thing, then in two, then in three.

        Returns a `gemmkit.tuner.TunedProgram`: printed it is a table, its ``mapping`` the fastest mapping.

        Raises TypeError for arrays of the host and within ``with gemmkit.emulate():``, ValueError for another effort or
        budget, RuntimeError where the default does not run, and what `plan` raises. Example, on a GPU::

            found = gemm.tune(a, b, d, budget=60)
            print(found)                                       # a table
            gemm(a, b, d)                                      # by the fastest
            gemm(a, b, d, mapping=found.mapping)               # the same, said
        """
        from gemmkit.tuner import tune

        found = tune(self, *arrays, mappings=mappings, effort=effort, budget=budget, keep=keep, jobs=jobs, progress=progress,
                     **components)
        return cast("TunedProgram", found)

    def tuning_subject(self, *arrays: Any, **keywords: Any) -> Subject:
        """What `gemmkit.tune` asks of a program with arguments."""
        from gemmkit.programs.subject import Programmed

        return Programmed(self, *arrays, **keywords)

    def __call__(self, *arrays: Any, mapping: Mapping | None = None, stream: int | None = None, **components: Any) -> None:
        """Run the derived kernel on arrays of a GPU, or on NumPy's within ``with gemmkit.emulate():``. A call that is like
        an earlier one finds its plan (`gemmkit.programs.remembered`)."""
        from gemmkit.programs.remembered import plan_of_call

        _check_mapping(mapping)
        arguments = self.bound(arrays, components)
        plan_of_call(self, arguments, mapping).run(arguments, stream)


def program(function: Callable[..., None]) -> Program:
    """Decorate a function that is written in the words of `gemmkit.programs`. Raises TypeError for what is no function, and
    for arguments that a program's calls have themselves."""
    if not inspect.isfunction(function):
        raise TypeError(f"gk.program({function!r}): a function is needed")
    taken = next((name for name in inspect.signature(function).parameters if name in OWN), None)
    if taken is not None:
        raise TypeError(f"{function.__name__}({taken}): the call has an argument of this name ({', '.join(OWN)}); call the "
                        "program's own otherwise")
    return Program(function)
