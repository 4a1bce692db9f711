"""Calls of programs: what they find of earlier ones.

A call looks for the plan of one that is like it, and else for the derivation of one whose arrays differ in size alone:

| kept | found by | what there is to do |
|---|---|---|
| `KnownProgram` | the arguments as they stand: kinds and shapes of arrays, signs of numbers, functions | one launch |
| a kernel of a `Derivation` | what sizes decide: the mapping | extents, tensor maps, the grid |
| a `Derivation` | classes of arrays, lengths of values' own axes | the passes, for a mapping that is new |

Deriving takes milliseconds, a new size a tenth of one, a launch microseconds. All three hold for code that is what it was
(`gemmkit.lang.references`). A call is derived anew where that cannot be told: a function names something that can change in
place, such as a list, or an argument is neither an array nor a number nor a function nor a component. In the emulator all
are. A component is known by its kind: its numbers and the addresses of its arrays are a launch's own
(`gemmkit.components.seen`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from collections.abc import Mapping as Names
from dataclasses import dataclass, fields
from functools import cached_property
from operator import itemgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from gemmkit import components
from gemmkit.components import Component
from gemmkit.emulator import current_mode, world
from gemmkit.lang.fingerprint import read, when_forgetting
from gemmkit.lang.references import Fact, Guards
from gemmkit.plans.launch import KnownCall, cache
from gemmkit.programs.called import Callees
from gemmkit.programs.launches import FLOATS, LARGEST, device_of, given_by, in_pairs
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.plan import ProgramPlan, Resizing, planned
from gemmkit.runtime.array_info import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.arrays import KEYS, describe, is_array
from gemmkit.runtime.device import DeviceInfo, as_stream_handle, assumed_device
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tuning import store
from gemmkit.tuning.problems import Choice, MappingProblem, choose

if TYPE_CHECKING:
    from gemmkit.programs.decorated import Program

CONSTANTS = (type(None), bool, int, str, np.number)


# --------------------------------------------------------------------------------------------------
# What a program's passes have found out, for arrays of some classes and of any sizes.

class ProgramCode(NamedTuple):
    """What is to stay as it was: ``stands()`` tells. The functions are kept, so that their ids stay theirs."""

    stands: Callable[[], bool]
    functions: tuple[FunctionType, ...]


def _code_of(program: Program, arguments: dict[str, Any], plan: ProgramPlan) -> ProgramCode | None:
    """None where something can change in place. What a called function has captured may: a launch is told."""
    inlined = () if plan.resizing is None else plan.resizing.functions
    functions = (cast("FunctionType", program.chosen(plan.mapping.variants)), *inlined,
                 *(x for x in arguments.values() if isinstance(x, FunctionType)))
    called = {id(callee.f): callee.component for callee in plan.callees.all}
    facts: list[Fact] = []
    for f in functions:
        if id(f) in called:
            facts += components.frozen(called[id(f)]).facts
            continue
        reading = read(f)
        if reading.mutable or reading.of_process:
            return None
        facts += reading.guards.facts
    stands = Guards(facts).ready()
    holding = Callees(tuple(x for x in plan.callees.all if not x.argument and components.frozen(x.component).leaves))
    made = holding.made_with
    return ProgramCode((lambda: stands() and holding.made_with == made) if holding.all else stands, functions)


class Derivation:
    """A program as its passes have read it, for a ``first`` plan. ``resizings``: by their form; ``kernels``: plans, by that
    and by what sizes have decided. Both are those of the sizes that came first."""

    def __init__(self, program: Program, code: ProgramCode, first: Resizing, device: DeviceInfo):
        self.program, self.code, self.first, self.device = program, code, first, device
        self._related, self._whole = list(first.axes.related), sorted(first.axes.whole)
        self.resizings: dict[Any, Resizing] = {}
        self.kernels: dict[Any, ProgramPlan] = {}

    def lengths(self, infos: dict[str, ArrayInfo]) -> tuple[int, ...] | None:
        """Of the axes that are values' own: another length is another derivation. None where axes differ that the program
        makes the same, so that the passes have to say so."""
        for (a, i), (b, j), by, more in self._related:
            if infos[a].shape[i] != infos[b].shape[j] * by + more:
                return None
        return tuple([infos[array].shape[axis] for array, axis in self._whole])

    def plan(self, arguments: dict[str, Any], infos: dict[str, ArrayInfo], mapping: Mapping) -> ProgramPlan:
        """Raises what `gemmkit.programs.plan.planned` raises."""
        sizes = self.first.sizes(infos)
        form = self.first.form(sizes)
        resizing = self.resizings.get(form)
        found = None if resizing is None else self.kernels.get((form, resizing.decided(sizes, self.device)))
        if resizing is not None and found is not None:
            return resizing.sized(found, infos, sizes, given_by(arguments, infos))
        made = _planned(self.program, arguments, mapping)
        self.add(made, infos)
        return made

    def add(self, plan: ProgramPlan, infos: dict[str, ArrayInfo]) -> None:
        """Keep a plan of the passes as the kernel of all sizes that decide what its own have."""
        if plan.resizing is not None:
            sizes = plan.resizing.sizes(infos)
            form = plan.resizing.form(sizes)
            resizing = self.resizings.setdefault(form, plan.resizing)
            self.kernels[form, resizing.decided(sizes, plan.device)] = plan.without_arrays()


derivations = cache(256)              # by what decides how sizes are read
_first = cache(256)                    # those that came first, which say what lengths are looked at
plans = cache()                        # `KnownProgram`, by what is quickly seen of a call


def forget_all() -> None:
    """Derive everything anew."""
    for one in (derivations, _first, plans):
        one.clear()


when_forgetting(forget_all)            # gemmkit's own code has changed


#: What looks at each plan that the passes make: tests verify it (tests/verifier).
looks: list[Callable[[ProgramPlan], None]] = []


def _planned(program: Program, arguments: dict[str, Any], mapping: Mapping) -> ProgramPlan:
    """By the passes. Raises what `gemmkit.programs.plan.planned` raises."""
    made = planned(program, arguments, mapping, None)
    for look in looks:
        look(made)
    return made


def described(arguments: dict[str, Any]) -> dict[str, ArrayInfo]:
    """The arrays among them."""
    return {name: describe(x, name) for name, x in arguments.items() if is_array(x)}


def derive(program: Program, arguments: dict[str, Any], mapping: Mapping,
           infos: dict[str, ArrayInfo] | None = None) -> tuple[ProgramPlan, ProgramCode | None]:
    """A plan by the passes, and the code that it rests on; None where it cannot be kept. ``infos`` are the `described`
    arrays. Raises what `gemmkit.programs.plan.planned` raises."""
    infos = described(arguments) if infos is None else infos
    key = None if current_mode() is not None else _likeness(program, arguments, infos, mapping)
    if key is None:
        return _planned(program, arguments, mapping), None
    key = key, *map(_class_of, infos.values())
    first: Derivation | None = _first.get(key)
    if first is not None and first.code.stands():
        lengths = first.lengths(infos)
        known: Derivation | None = None if lengths is None else derivations.get((key, lengths))
        if known is not None and known.code.stands():
            return known.plan(arguments, infos, mapping), known.code
    made = _planned(program, arguments, mapping)
    code = _code_of(program, arguments, made)
    if code is not None and made.resizing is not None and not made.resizing.axes.seen:
        known = Derivation(program, code, made.resizing, made.device)
        known.add(made, infos)
        _first.keep(key, known)
        derivations.keep((key, known.lengths(infos)), known)
    return made, code


def _likeness(program: Program, arguments: dict[str, Any], arrays: Collection[str], mapping: Mapping) -> Any:
    """What calls have in common beside ``arrays`` that are of one class; None for arguments of which it cannot be told
    whether they are what they were."""
    parts: list[Any] = [program, mapping, world()]
    for name, x in arguments.items():
        if isinstance(x, Component):                   # of arrays of any lengths
            frozen = components.frozen(x)
            parts += frozen.kind, frozen.fingerprint
            continue
        part = name if name in arrays else _part(x)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts)


def _part(x: Any) -> Any:
    """Of a key, for an argument that is no array: numbers by their signs, since a launch is told which ones they are."""
    if isinstance(x, FLOATS):
        return bool(x > 0)
    if isinstance(x, CONSTANTS):
        return type(x), x
    return id(x) if isinstance(x, FunctionType) else None


def _class_of(info: ArrayInfo) -> tuple[Any, ...]:
    """All that the passes look at of an array beside its lengths."""
    return _class_like(ArrayInfo(info.pointer % 32, *info[1:7]))       # all that follows from an address


@functools.lru_cache(maxsize=4096)
def _class_like(info: ArrayInfo) -> tuple[Any, ...]:
    if not info.shape:
        return info.dtype, info.device, info.readonly
    axis = len(info.shape) - 1
    if info.dtype.kind in "iu":                        # which threads read one by one
        return axis, info.dtype, info.device, info.library, info.readonly, unit_axis(info)
    aligned = alignment(info, axis)                    # with this `leaves_by_tma` is decided, too
    return (axis, info.dtype, info.device, info.library, info.readonly, unit_axis(info), info.strides[axis] == 1,
            why_not(info, axis) is None, in_pairs(info), aligned, info.shape[axis] * info.dtype.itemsize % aligned == 0,
            0 in info.shape)


# --------------------------------------------------------------------------------------------------
# Which mapping a program has where none is said: the one that the tuner has kept for these arrays, else the default.
#
# An entry of the store (`gemmkit.tuning.store`) is found by the text of the default kernel, which has all of a program's
# mathematics, and by the kinds of its arrays. So a first call without a mapping derives twice where there is an entry.

@dataclass(frozen=True)
class Laid:
    """A mapping as the tuner tries it, and as plain data that a file can keep.

    >>> Laid.of_plain(Laid(Mapping({"n": 128}, stages=3)).plain()).name
    "Mapping({'n': 128}, stages=3)"
    """

    mapping: Mapping

    @property
    def name(self) -> str:
        return repr(self.mapping)

    def plain(self) -> dict[str, Any]:
        """The fields that say something."""
        held = {part.name: getattr(self.mapping, part.name) for part in fields(self.mapping)}
        held = {name: dict(value) if isinstance(value, Names) else value for name, value in held.items()}
        return {name: value for name, value in held.items() if value or value is False}

    @classmethod
    def of_plain(cls, plain: Any) -> Laid:
        """Raises ValueError for what is no mapping."""
        try:
            return cls(Mapping(**plain))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{plain!r} is not a mapping of a program: {error}") from None


class ProgramProblem(MappingProblem):
    """A call of a program, or a plan; mappings are `Laid`. ``text``: what runs in place of the derived kernel."""

    read = staticmethod(Laid.of_plain)

    def __init__(self, program: Program, arguments: dict[str, Any], text: str | None = None):
        self.program, self.arguments, self.text = program, arguments, text
        self.code: ProgramCode | None = None           # what its plans rest on, where they can be kept
        self.infos = described(arguments)
        self.device = device_of(self.infos)

    @cached_property
    def default(self) -> ProgramPlan:
        """By the passes alone. Raises what `gemmkit.programs.plan.planned` raises."""
        return self._derived(DEFAULT.mapping)

    def _derived(self, mapping: Mapping) -> ProgramPlan:
        if self.text is not None:
            return planned(self.program, self.arguments, mapping, self.text)
        plan, self.code = derive(self.program, self.arguments, mapping, self.infos)
        return plan

    def key(self) -> str:
        return store.digest_of_program(self.default.printed.text, self.default.infos)

    def candidates(self, device: DeviceInfo) -> list[Laid]:
        return [DEFAULT]

    def specialise(self, mapping: Laid, device: DeviceInfo) -> Choice:
        """A `ProgramPlan`. Raises what `gemmkit.programs.plan.planned` raises."""
        return Choice(self.default if mapping is DEFAULT else self._derived(mapping.mapping))

    def plan(self, mapping: Mapping | None) -> ProgramPlan:
        """That of a mapping; None: of the one that the tuner has kept, or the default."""
        found: ProgramPlan = choose(self, self.device, mapping and Laid(mapping)).spec
        return found


DEFAULT = Laid(Mapping())


# --------------------------------------------------------------------------------------------------
# Calls that come again.

#: What is quickly seen of a call: what it is known by, its arrays, what it brings behind their addresses (0, numbers, and of
#: each component what that brings), and what of that may be addresses.
Seen = tuple[Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


class KnownProgram:
    """A plan as calls of one form find it, which give ``arguments`` by these ``names``, in this order."""

    def __init__(self, plan: ProgramPlan, code: ProgramCode, names: list[str], arguments: dict[str, Any]):
        self.plan, self.code = plan.without_arrays(), code
        given = [name for name in names if name in plan.call.components and isinstance(arguments[name], Component)]
        called = plan.callees.called_with({**plan.call.components, **arguments}).all
        self._held = [given.index(of.argument) if of.argument in given else of for of in called]
        self._arrays = [name for name in names if name in plan.given]
        numbers = [name for name in names if name in plan.call.numbers]
        self._numbers = [(numbers.index(name) if name in numbers else -1, components.exact(x))   # -1: an argument's default
                         for name, x in plan.call.numbers.items()]

    def keep(self, program: Program, seen: Seen) -> None:
        """Know such calls from now on; one with arrays at these addresses has been checked."""
        rest, arrays, behind, held = seen
        like = next(iter(self.plan.given.values()))
        if like.device >= 0:                           # the emulator alone runs those of the host
            program.calls.keep(rest, arrays[:-1], held, arrays[-1], lambda: KnownCall(
                self.plan.start, like, self.code.stands, pick=self._pick(behind),
                first=self._arrays.index(next(iter(self.plan.given)))), self.code.stands)

    def _pick(self, behind: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """What makes of what a call brings, the last array's address first, what `ProgramPlan.start` takes."""
        count = len(self._arrays)
        at = {name: (n + 1) % count for n, name in enumerate(self._arrays)}
        begin = [*map(at.__getitem__, self.plan.given), count]
        if not self._held and all(place >= 0 for place, _ in self._numbers):
            return itemgetter(*begin, *(count + 1 + place for place, _ in self._numbers))
        of_components = count + sum(type(x) is not tuple for x in behind)

        def pick(now: tuple[Any, ...]) -> tuple[Any, ...]:
            values = [now[n] for n in begin]
            values += [default if place < 0 else now[count + 1 + place] for place, default in self._numbers]
            for one in self._held:                     # of the functions that it calls: a call's components, and others
                values += now[of_components + one] if isinstance(one, int) else Callees((one,)).brought
            return tuple(values)

        return pick


def run(program: Program, arrays: tuple[Any, ...], others: dict[str, Any], mapping: Mapping | None, stream: Any) -> None:
    """`gemmkit.programs.decorated.Program.__call__`; ``others``: arguments by their names."""
    seen = _quickly(program, arrays, others, mapping)
    if seen is not None:
        rest, given, behind, held = seen
        if program.calls.again(rest, given[:-1], behind, held, given[-1], stream) is not None:
            return
    arguments = program.bound(arrays, others)
    key = _key_of(program, seen)
    before = None if key is None else plans.get(key)
    plan, known = _plan_of(program, arguments, mapping, key, [*program.names[:len(arrays)], *others])
    if known is not None and known is not before and seen is not None and not plan.callees.all:
        known.keep(program, seen)                      # the passes, or what stands for them, have looked at these arrays
        if program.calls.again(rest, given[:-1], behind, held, given[-1], stream) is not None:
            return
    plan.run(arguments, None if stream is None else as_stream_handle(stream))
    if known is not None and seen is not None:
        known.keep(program, seen)


def plan_of_call(program: Program, arguments: dict[str, Any], mapping: Mapping | None) -> ProgramPlan:
    """The plan of a call with these arguments, by their names. Raises what `gemmkit.programs.plan.planned` raises."""
    key = _key_of(program, _quickly(program, (), arguments, mapping))
    return _plan_of(program, arguments, mapping, key, list(arguments))[0]


def _key_of(program: Program, seen: Seen | None) -> Any:
    """What a call's plan is kept by; None for one that is not kept."""
    if seen is None or current_mode() is not None:
        return None
    try:
        return seen[0], program.calls.recogniser(seen[1])[0]
    except (TypeError, ValueError):
        return None


def _plan_of(program: Program, arguments: dict[str, Any], mapping: Mapping | None, key: Any,
             names: list[str]) -> tuple[ProgramPlan, KnownProgram | None]:
    """The plan that is kept under a key, or a new one, which is kept."""
    known: KnownProgram | None = None if key is None else plans.get(key)
    if known is not None and known.code.stands():
        return known.plan, known
    problem = ProgramProblem(program, arguments)
    plan = problem.plan(mapping)
    if key is None or problem.code is None or not set(plan.given) <= {*names}:
        return plan, None
    known = plans.keep(key, KnownProgram(plan, problem.code, names, arguments))
    return plan, known


def _quickly(program: Program, arrays: tuple[Any, ...], others: dict[str, Any], mapping: Mapping | None) -> Seen | None:
    """None for arguments of which it cannot be told whether they are what they were."""
    parts: list[Any] = [program, mapping, assumed_device(), *others]
    given: list[Any] = []
    behind: list[Any] = [0]
    brought: list[tuple[Any, ...]] = []
    for x in (*arrays, *others.values()) if others else arrays:
        kind = type(x)
        if kind in KEYS or (kind is not float and (part := _part(x)) is None and is_array(x)):
            given.append(x)
            parts.append(None)
        elif kind is float:
            if LARGEST < abs(x) < math.inf:            # who looks at the call refuses it
                return None
            behind.append(x or components.exact(x))
            parts.append(x > 0)
        elif part is not None:
            if isinstance(x, FLOATS):
                number = float(x)
                if LARGEST < abs(number) < math.inf:   # who looks at the call refuses it
                    return None
                behind.append(number or components.exact(number))
            parts.append(part)
        elif isinstance(x, Component):
            own: list[Any] = []
            components.seen(x, parts, own)
            brought.append(tuple(own))
        else:
            return None
    if not brought:
        return (tuple(parts), tuple(given), tuple(behind), ()) if given else None
    held = tuple([own for own in brought if any([isinstance(value, (int, np.integer)) for value in own])])
    return (tuple(parts), tuple(given), (*behind, *brought), held) if given else None
