"""Functions of numbers inside programs: ``gp.call(f, x, ...)`` applies device code to each element.

A program's own arithmetic is read by the passes, which derive from it. A called function is not read: it may branch, loop,
use `math` and the arrays that it has captured, and a change of its numbers derives nothing. Whatever an epilogue, a score of
attention or an activation is elsewhere in gemmkit, it is here.

A mask of attention is a condition, ``gp.where(mask, s, -math.inf)``; blocks are visited as its ``keys`` and ``free`` say.

| in | a called function is |
|---|---|
| a trace | an operation, ``call`` or ``test``, whose ``data`` is a `Callee` |
| the passes | an unknown function of its arguments: the same for the same |
| a kernel | an argument, `CalledFunction`, with what the function has captured |
| a reference | the function itself, for each element |

>>> import numpy as np
>>> import gemmkit as gk
>>> from gemmkit import programs as gp
>>> @gk.program
... def activated(x, y, f):
...     for m in gp.parallel(x.rows):
...         y[m] = gp.call(f, x[m])
>>> x = np.array([[-1.0, 2.0]], np.float32)
>>> activated.reference(x, np.empty_like(x), lambda v: v if v > 0 else 0.1 * v).tolist()
[[-0.1, 2.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Mapping as Names
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gemmkit import components
from gemmkit.components import Component, arrays_of
from gemmkit.epilogues import Epilogue
from gemmkit.kernels.masks import Mask, Score, check_ranges
from gemmkit.lang.aggregates import convert
from gemmkit.lang.checks import converted, function_given, number, truth
from gemmkit.lang.functions import Frozen
from gemmkit.lang.host import View
from gemmkit.lang.references import is_gemmkit
from gemmkit.programs.values import ProgramAxis, refused
from gemmkit.runtime.array_info import ArrayInfo, shares_memory

#: Operations that a called function is: one makes a number, one a condition.
NUMBER, TEST = "call", "test"
#: An operation without operands: how long an index's axis is, or how far rounds along it go; ``data`` is the index.
EXTENT = "extent"
RETURNS = {NUMBER: "number_of", TEST: "truth_of"}              # that a text has for what they return
WIDE = {NUMBER: "double_of", TEST: "truth_of"}                 # of what is computed in float64
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
CALLED = frozenset({NUMBER, TEST})
#: Operations of which places and whole constants make whole numbers.
WHOLE = frozenset({"add", "sub", "mul", "neg", "max", "abs"})
MOST_OF_SCORE = 5                      # arguments: s, m, n, head, batch
START = "called_"                      # of what a text calls them


@dataclass(frozen=True)
class CalledFunction(Component):
    """A function as a kernel's argument: plain, or a component that can be called."""

    f: Any


def number_of(called: CalledFunction, value: Any) -> Any:
    """What a called function has returned, in float32."""
    return converted(called, "f", number(called, "f", value, 0.0), F32)


def double_of(called: CalledFunction, value: object) -> Any:
    """What a called function has returned, in float64."""
    return converted(called, "f", number(called, "f", value, 0.0), F64)


def truth_of(called: CalledFunction, value: Any) -> Any:
    """What a called condition has returned."""
    return truth(called, "f", value)


class Callee:
    """A function that a program calls, and the name that a text has for it. Equal to itself alone.

    ``argument``: the program's argument that it is, if that is a component. Then this one has descriptions in place of
    arrays, and a call brings its own. ``extents``: of what arguments that are places go along, in each call.
    """

    def __init__(self, name: str, f: Any, argument: str = "", extents: Iterable[tuple[Any, ...]] = ()):
        self.name, self.component, self.argument, self.extents = START + name, CalledFunction(f), argument, [*extents]

    def __repr__(self) -> str:
        return self.name.removeprefix(START)

    @property
    def f(self) -> Any:
        return self.component.f

    @property
    def is_mask(self) -> bool:
        return isinstance(self.f, Mask)

    @property
    def is_score(self) -> bool:
        return isinstance(self.f, Score)

    @property
    def method(self) -> str:
        """What is called of a component, if not itself: with all arguments that it may take."""
        return "sees" if self.is_mask else "at" if self.is_score else ""

    @property
    def host(self) -> Any:
        """What a reference calls."""
        return getattr(self.f, self.method) if self.method else self.f

    def takes_place(self, n: int) -> bool:
        """Whether a place belongs as its n-th argument, so that a whole number there stands for one."""
        return self.is_mask or (self.is_score and n > 0)

    def is_counted(self, n: int, x: Any) -> bool:
        """Whether its n-th argument is whole: a place, or what stands for one."""
        return is_place_made(x) or (self.takes_place(n) and is_whole_constant(x))

    def is_real(self, n: int) -> bool:
        """Whether a place is given to it in float32 as its n-th argument (`gemmkit.masks.Score.real_places`)."""
        return self.is_score and n in (1, 2) and bool(self.f.real_places)

    @property
    def stays_inside(self) -> bool:
        """Whether it must be told places of elements that are there: it may have an array, or divide by a place."""
        return not is_gemmkit(type(self.f)) or bool(arrays_of(self.component))

    def text(self, op: str, args: Iterable[str], method: str = "", word: str = "") -> str:
        """The expression that calls it, or a mask's ``method``, of arguments in float32 or whole; ``word``: what becomes of
        the result."""
        method = method or self.method
        return f"{word or RETURNS[op]}({self.name}, {self.name}.f{f'.{method}' if method else ''}({', '.join(args)}))"

    def again(self, f: Any) -> Callee:
        """The same of another call."""
        return Callee(repr(self), f, self.argument, self.extents)

    def lengths(self, shapes: Names[str, tuple[int, ...]]) -> list[list[Any]]:
        """How far the places go that it is told, in each call; None along pieces, whose lengths the host does not know."""
        return [[_length(x, shapes) if isinstance(x, ProgramAxis) else x for x in extents] for extents in self.extents]

    def check(self, shapes: Names[str, tuple[int, ...]]) -> None:
        """Raise ValueError where the arrays of a mask, a score or an epilogue do not fit what it is told the places of."""
        for known in self.lengths(shapes):
            if isinstance(self.f, Mask) and None not in known[:2]:
                self.f.check(known[0], known[1], known[2] or 1, known[3] or 1)
            elif isinstance(self.f, Score) and None not in known[1:] and len(known) > 2:
                self.f.check(known[1], known[2], known[3] if len(known) > 3 else 1, known[4] if len(known) > 4 else 1)
            elif isinstance(self.f, Epilogue) and hasattr(self.f, "check") and None not in known[1:3]:
                self.f.check(known[1], known[2])


class CallableArgument:
    """A component among a program's arguments. Programs call it, and read nothing of it: its numbers are the kernel's
    arguments, so that a call with others derives nothing."""

    def __init__(self, name: str, component: Component):
        self.__dict__.update(_name=name, _component=component)

    def __repr__(self) -> str:
        return f"<{type(self._component).__name__} {self._name}>"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise refused(TypeError, f"{self._name} is a component, whose code runs in kernels alone: write "
                                 f"gp.call({self._name}, ...)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refused(TypeError, f"{self._name}.{name}: a program calls a component, gp.call({self._name}, ...), and reads "
                                 "nothing of it; pass the number as an argument of its own")


def given_for(arguments: dict[str, Any]) -> dict[str, Any]:
    """A program's arguments as its code gets them: components can be called, and not read."""
    return {name: CallableArgument(name, x) if isinstance(x, Component) else x for name, x in arguments.items()}


def function_of(f: Any, count: int) -> Any:
    """What ``gp.call(f, ...)`` calls with ``count`` arguments. Raises TypeError, with the user's line, for what cannot be
    called so, and for a component that does more than make a number of numbers."""
    f = f._component if isinstance(f, CallableArgument) else f
    if isinstance(f, Score):
        if not f.arity <= count <= MOST_OF_SCORE:
            raise refused(TypeError, f"gp.call({type(f).__name__}) with {count} arguments: a score takes s, m, n, and "
                                     f"optionally head and batch, {f.arity} at least")
        return f
    wanted = f"a function of {count} number{'s' * (count != 1)}, or a component that can be called with them,"
    try:
        f = function_given(f, "gp.call", "f", (count,), wanted)
    except TypeError as error:
        raise refused(TypeError, str(error)) from None
    outputs: tuple[str, ...] = getattr(f, "outputs", ()) if isinstance(f, Component) else ()
    if outputs:
        raise refused(TypeError, f"gp.call({type(f).__name__}): it stores into {outputs[0]}, but a called function may be "
                                 "computed twice or for elements that are not there; store a result of the program's own")
    if isinstance(f, Component) and not getattr(f, "is_elementwise", True):
        raise refused(TypeError, f"gp.call({type(f).__name__}): it finishes whole tiles, and a call is of one element; "
                                 "write its formula in the program")
    return f


def mask_of(x: Any) -> Mask | None:
    """A mask of attention, as a condition: itself, or as an argument."""
    x = x._component if isinstance(x, CallableArgument) else x
    return x if isinstance(x, Mask) else None


def of_elements(f: Any, is_test: bool, args: list[tuple[np.ndarray, bool]]) -> np.ndarray:
    """A function of each element, as a reference computes it; of arguments that are whole or are not."""
    if not args:
        return np.asarray(f(), np.bool_ if is_test else np.float64)
    arrays = np.broadcast_arrays(*(array for array, _ in args))
    kinds: list[Callable[[Any], Any]] = [int if is_whole else float for _, is_whole in args]
    made = [f(*(kind(x) for kind, x in zip(kinds, given))) for given in zip(*(array.ravel() for array in arrays))]
    return np.array(made, np.bool_ if is_test else np.float64).reshape(arrays[0].shape)


# --------------------------------------------------------------------------------------------------
# Callees of a plan: what they bring to a launch, and what their arrays have to be.

class Callees(NamedTuple):
    """The functions that kernels call, in the order of their arguments."""

    all: tuple[Callee, ...] = ()

    @classmethod
    def of(cls, found: Iterable[Callee]) -> Callees:
        return cls(tuple(sorted(dict.fromkeys(found), key=lambda callee: callee.name)))

    @property
    def names(self) -> list[str]:
        return [callee.name for callee in self.all]

    @property
    def components(self) -> list[CalledFunction]:
        return [callee.component for callee in self.all]

    @property
    def frozen(self) -> list[Frozen]:
        """As arguments of one kernel."""
        return list(map(components.freeze, self.components))

    @property
    def made_with(self) -> list[Any]:
        """What a kernel and its launch depend on of them, beside what a launch brings."""
        return [components.given_by(one).key for one in self.components]

    @property
    def brought(self) -> list[Any]:
        """What a launch with them brings: addresses of what they have captured, and numbers."""
        return components.given_by(*self.components).brought if self.all else []

    def puts(self, at: int) -> dict[str, list[tuple[int, int, bool]]]:
        """By their names: where among a function's own values each stands that a launch brings, where that is, from ``at``
        on, and whether it is an array's address."""
        found: dict[str, list[tuple[int, int, bool]]] = {}
        for callee in self.all:
            leaves, slots = components.frozen(callee.component).leaves, components.slots_of(callee.component)
            arrays = {held.info.pointer for held in arrays_of(callee.component)}
            found[callee.name] = [(slot, n, leaves[slot][0] == "u64" and leaves[slot][1] in arrays)
                                  for n, slot in enumerate(slots, at)]
            at += len(slots)
        return found

    def called_with(self, arguments: Names[str, Any]) -> Callees:
        """With a call's components, by the names of arguments."""
        return Callees(tuple(callee.again(arguments[callee.argument]) if callee.argument else callee for callee in self.all))

    def described_with(self, arguments: Names[str, Any]) -> Callees:
        """With descriptions in place of the arrays of a call's components."""
        return self.called_with({name: components.without_arrays(x) for name, x in arguments.items()
                                 if isinstance(x, Component)}) if self.all else self

    def within(self, others: Callees) -> Callees:
        """Those of another call that have their names."""
        return Callees(tuple(callee for callee in others.all if callee.name in self.names))

    def check_masks(self, infos: dict[str, ArrayInfo], rows: int) -> None:
        """Ask masks of the user's about every query and key (`gemmkit.masks.check_ranges`), in tiles of so many rows."""
        shapes = {name: info.shape for name, info in infos.items()}
        for callee in self.all:
            if callee.is_mask and not is_gemmkit(type(callee.f)):
                for queries, keys, heads, batch in callee.lengths(shapes):
                    if queries is not None and keys is not None:
                        check_ranges(callee.f, queries, keys, heads or 1, batch or 1, rows)

    def check(self, infos: dict[str, ArrayInfo], results: Iterable[str]) -> None:
        """Raise ValueError for a captured array that is elsewhere than the program's arrays, shares memory with a result, or
        does not fit them (`Callee.check`)."""
        place, shapes = next(iter(infos.values())).device, {name: info.shape for name, info in infos.items()}
        for callee in self.all:
            callee.check(shapes)
            for held in arrays_of(callee.component):
                if held.info.device != place:
                    raise ValueError(f"{held.name} is on {_where(held.info.device)}, and the program's arrays are on "
                                     f"{_where(place)}; put them together")
                for name in results:
                    if shares_memory(held.info, infos[name]):
                        raise ValueError(f"{held.name} shares memory with {name}, a result; a result needs its own memory")


def _length(x: ProgramAxis, shapes: Names[str, tuple[int, ...]]) -> int | None:
    return None if x.offsets is not None and not x.stack else x.measured(shapes)


def _where(device: int) -> str:
    return "the host" if device < 0 else f"GPU {device}"


def element_before(x: View, at: tuple, is_there: bool) -> Any:
    """An element that a result has before a thread stores it, in float32; 0 in place of one beyond the tile, which another
    thread may have stored already."""
    return convert(F32, x[at]) if is_there else F32.type(0)


def is_place_made(x: Any) -> bool:
    """Whether a value is places, or made of places and whole constants: a whole number in kernels."""
    if x.op in ("coordinate", EXTENT):
        return True
    return (x.op in WHOLE and any(map(is_place_made, x.args))
            and all(is_place_made(y) or is_whole_constant(y) for y in x.args))


def is_whole_constant(x: Any) -> bool:
    """Whether it is a number that places may meet and stay whole."""
    return x.op == "const" and not x.dims and float(x.data).is_integer()


def is_whole_load(x: Any) -> bool:
    """Whether it is an element of an array of whole numbers, where it is used or read ahead."""
    x = x.args[0] if x.op == "read" else x
    return x.op == "load" and np.dtype(x.data[0].dtype).kind in "iu"
