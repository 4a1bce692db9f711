"""All passes: from a program with arrays and a mapping to its plan, or to an error before anything is compiled."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component, exact, freeze, without_arrays
from gemmkit.emulator import current_mode
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.kernels.sm90.family import TensorMapSlot
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.functions import Frozen, freeze_array
from gemmkit.plans.launch import Launch, Start, bound, launch_of
from gemmkit.programs.called import Callees
from gemmkit.programs.chains.algebra import begin_below, commutes, guard, keep_parts, ranges_of, rewrite, settle
from gemmkit.programs.chains.chain import Chain, ChainPlaces, chain_of, in_one_round, is_chained, placed
from gemmkit.programs.chains.elements import EXACT, largest, may_be_inexact
from gemmkit.programs.chains.merging import (
    Shares,
    begin_lazily,
    begun,
    check_bounded,
    memory_of,
    read_early,
    references,
    share_added,
    shares_of,
    splits_of,
)
from gemmkit.programs.chains.schedule import ChainProblem, decided_by
from gemmkit.programs.chains.schedule import ScheduleChoice as ChainChoice
from gemmkit.programs.chains.schedule import ordered as ordered_chain
from gemmkit.programs.chains.text import ChainPrinter, names_of_ranges
from gemmkit.programs.collectives import ROWS, TmaOut, in_steps
from gemmkit.programs.launches import (
    NEEDED,
    ROWS_NEEDED,
    CallArguments,
    GridProblem,
    Launches,
    NotByTma,
    Sizes,
    check_indices,
    check_launch,
    check_own_names,
    check_read,
    device_of,
    given_by,
    host_arrays,
    in_pairs,
    launches_of,
    leaves_by_tma,
    module_of,
    said,
    shared,
    spare,
    started,
    taken,
)
from gemmkit.programs.mapping import (
    MULTISTAGE,
    SWITCHES,
    KernelLimits,
    Mapping,
    OutKind,
    Printed,
    kernel_of,
    of_recurrence,
    within_calls,
    within_rounds,
)
from gemmkit.programs.multistage import OWN_NAMES as NAMES_OF_MULTISTAGE
from gemmkit.programs.multistage import CopyWidth, MultistageChainPrinter, MultistagePrinter
from gemmkit.programs.pieces import PiecePrinter, counts_of, has_sections, section_of, supported
from gemmkit.programs.places import Places, ordered, places_of, refuse_forms
from gemmkit.programs.recurrences import OWN as NAMES_OF_RECURRENCES
from gemmkit.programs.recurrences import RecurrencePrinter
from gemmkit.programs.rounds import (
    Recurrence,
    RowProgram,
    by_rows,
    has_rows_alone,
    is_recurrence,
    recurrence_of,
    row_program_of,
    with_updates_last,
)
from gemmkit.programs.rows import OWN_NAMES as NAMES_OF_ROWS
from gemmkit.programs.rows import PART, check_rows
from gemmkit.programs.rows import derived as derived_rows
from gemmkit.programs.sums import AddedOut
from gemmkit.programs.text import OWN_NAMES, Printer
from gemmkit.programs.text import printed as text_of
from gemmkit.programs.trace import Loop, StoreStatement, Value
from gemmkit.programs.values import Index, refused
from gemmkit.runtime.array_info import ArrayInfo, alignment, shares_memory, unit_axis
from gemmkit.runtime.arrays import describe, is_array
from gemmkit.runtime.device import DeviceInfo, launch_stream
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tuning.problems import RESIDENT, choose

# --------------------------------------------------------------------------------------------------
# The kernel that a program's passes have made for arrays of some kinds, and its launch.

ALONE = Cluster()


@dataclass(frozen=True)
class ProgramPlan:
    """The kernel of a program for arrays of some kinds. ``text`` is what runs: with ``plan(..., text=edited)`` another.
    ``mapping`` has all that was left open said: it derives the same text.

    ``call``: what it was made for beside arrays. Numbers are a launch's own; all else is in the text. ``resizing``: what the
    passes know when sizes decide; None of a text that is given. ``like``: the plan of other sizes whose text this is
    (`resized`).

    Where blocks share a tile's rounds, ``merge`` is the kernel behind it, and both have ``spare`` arrays, in memory of the
    stream's (`gemmkit.programs.chains.merging`)."""

    name: str
    mapping: Mapping
    printed: Printed
    text: str
    infos: dict[str, ArrayInfo]
    extents: dict[str, int]
    call: CallArguments
    device: DeviceInfo
    spare: tuple[str, ...] = ()
    merge: ProgramPlan | None = None
    resizing: Resizing | None = field(default=None, repr=False, compare=False)
    like: ProgramPlan | None = field(default=None, repr=False, compare=False)

    def resized(self, infos: dict[str, ArrayInfo], extents: dict[str, int], call: CallArguments,
                **more: ProgramPlan | Mapping) -> ProgramPlan:
        """The plan for arrays of the same kinds and other sizes, with the same text: what sizes do not decide it has in
        common with this one, the bound kernel too. ``more``: other fields."""
        made, own = object.__new__(ProgramPlan), vars(self)
        vars(made).update({name: own[name] for name in _OF_TEXT if name in own})
        vars(made).update(infos=infos, extents=extents, call=call, like=self, **more)
        if any(isinstance(x, Component) for x in call.components.values()):        # which have arrays of other sizes, too
            callees = self.printed.callees.described_with(call.components)
            vars(made).update(printed=replace(self.printed, callees=callees))
        elif "callees" in own:
            vars(made).update(callees=own["callees"], _made_with=self._made_with)
        return made

    def run(self, arguments: dict[str, Any], stream: int | None = None) -> None:
        """Launch it on a GPU's arrays, by name; emulate it on those in host memory within
        ``with gemmkit.emulate():``. Numbers are those of ``arguments``; one that is left out is what the plan was made with.

        Raises ValueError for arrays of another kind than those that the plan was made for, for another component, for a
        number that is not positive where it was, and for a result that shares memory with another array; TypeError for
        NumPy's arrays elsewhere.
        """
        numbers = self.call.again(arguments)
        found = {name: describe(arguments[name], name) for name in self.given}
        first = next(iter(found.values()))
        for (name, info), kind in zip(found.items(), self._kinds):
            if _kind(info) != kind:
                raise ValueError(f"{name} is another kind of array ({_kind(info)}) than the plan was made for ({kind}); "
                                 "shape, strides, dtype, device and alignment must be the same")
        for name in self._stored:
            if found[name].readonly:
                raise ValueError(f"{name} is a result, but it is read-only; give a writable array")
        for one, other in self._apart:
            if shares_memory(found[one], found[other]):
                raise shared(one, other)
        callees = self.called_with(arguments)
        callees.check(found, self.results)
        if self.is_empty:
            return
        if first.device < 0:
            mode = current_mode()
            if mode is None:
                raise TypeError(f"{next(iter(self.infos))} is a host array; emulate its kernel: with gemmkit.emulate(): ...")
            callees.check_masks(self.given, self.mapping.blocks.get(self.printed.tile[-1], ROWS))
            held = {**arguments, **host_arrays({name: plan.infos[name] for plan in self.kernels for name in plan.spare})}
            for plan in self.kernels:
                printed = replace(plan.printed, callees=plan.printed.callees.within(callees))
                plan = replace(plan, call=self.call._replace(numbers=numbers), printed=printed)
                mode.run(plan, [_Given(held[name], name, name in plan.printed.outs) for name in plan.infos])
            return
        values = *(info.pointer for info in found.values()), 0, *map(exact, numbers.values()), *callees.brought
        self.start(launch_stream(first, stream), values)

    def called_with(self, arguments: dict[str, Any]) -> Callees:
        """The functions of a call. Raises ValueError for those of another code, and that have other kinds of arrays."""
        if not self.callees.all:
            return self.callees
        callees = self.callees.called_with({**self.call.components, **arguments})
        for callee, given, made in zip(callees.all, callees.made_with, self._made_with):
            if given != made:
                raise ValueError(f"{callee!r} is not the function that the plan was made for: code, or the kinds, shapes or "
                                 "strides of its arrays, are others; make another plan")
        return callees

    @cached_property
    def callees(self) -> Callees:
        """The functions that its kernels call: of components that are arguments, what a call's have in common."""
        return Callees.of(callee for plan in self.kernels for callee in plan.printed.callees.all)

    def without_arrays(self) -> ProgramPlan:
        """The plan as it is kept, which a call brings its components: it keeps no array of theirs alive."""
        if not any(isinstance(x, Component) for x in self.call.components.values()):
            return self
        components = {name: without_arrays(x) if isinstance(x, Component) else x for name, x in self.call.components.items()}
        call = self.call._replace(components=components)
        return replace(self, call=call, merge=None if self.merge is None else replace(self.merge, call=call))

    @cached_property
    def _made_with(self) -> list[Any]:
        return self.callees.made_with

    @property
    def is_empty(self) -> bool:
        """Whether there are no tiles."""
        return 0 in (self.extents[name] for name in self.printed.tile)

    @property
    def results(self) -> tuple[str, ...]:
        """The arrays that the program stores into."""
        return tuple(name for name in self.kernels[-1].printed.outs if name not in self.spare)

    @cached_property
    def _stored(self) -> list[str]:
        """The results, and what kernels leave for others, among the arrays that a call gives."""
        stored = {name for plan in self.kernels for name in plan.printed.outs}
        return [name for name in self.given if name in stored]

    @property
    def kernels(self) -> tuple[ProgramPlan, ...]:
        """In the order in which they run."""
        return (self,) if self.merge is None else (self, self.merge)

    # -- arguments ----------------------------------------------------------------------------------------------------

    @cached_property
    def module(self) -> Any:
        return module_of(self.name, self.text, ROWS_NEEDED if self.is_of_rows else NEEDED)

    @property
    def spec(self) -> Any:
        return self.sizes

    @cached_property
    def sizes(self) -> Any:
        numbers = {name: self.printed.number.type(self.call.numbers[name]) for name in self.printed.scalars}
        return self.module.Sizes(**{name: self.extents[name] for name in self.printed.sizes}, **numbers)

    @cached_property
    def taken(self) -> list[Taken]:
        """What the kernel takes behind the sizes: an array is taken once for each staged block of it, as a tensor map, and
        once more where threads read or write it."""
        module, printed, made = self.module, self.printed, list[Taken]()

        def take(array: str, of: Any) -> None:
            spec = of.map_spec
            number = sum(one.map is not None for one in made)
            made.append(Taken(array, TensorMapSlot(0, number, self.infos[array], spec.rank - 1, spec)))

        for block, array in printed.maps:
            take(array, getattr(module, f"{block}_tile"))
        made += [Taken(array, None) for array in printed.operands]
        for array in printed.outs:
            out = None if self.is_of_rows else getattr(module, f"out_{array}", None)
            take(array, out) if isinstance(out, (TmaOut, AddedOut)) else made.append(Taken(array, None))
        return [*made, *(Taken(array, None) for array in printed.arrays)]

    @property
    def arguments(self) -> list[Frozen]:
        def frozen(array: str) -> Frozen:
            return freeze_array(self.infos[array], readonly=array not in self.printed.outs)

        callees = self.printed.callees.frozen if self.printed.callees.all else []
        if self.like is None:
            held = [frozen(array) if tensor_map is None else tensor_map.frozen for array, tensor_map in self.taken]
            return [freeze(self.sizes), *held, *callees]
        sizes, *known = self.like.launchable.arguments
        return [self._sizes_like(sizes), *(frozen(array) if tensor_map is None else one             # a map is put in
                                           for one, (array, tensor_map) in zip(known, self.like.taken)), *callees]

    def _sizes_like(self, known: Frozen) -> Frozen:
        """The sizes, as those of another plan are frozen if they are integers of the same types."""
        counts = [self.extents[name] for name in self.printed.sizes]
        for count, (code, _) in zip(counts, known.leaves):
            if code != "i32" or count >= 2**31:
                return freeze(self.sizes)
        leaves: list[tuple[str, Any]] = [("i32", count) for count in counts]
        numbers = [self.printed.number.type(self.call.numbers[name]) for name in self.printed.scalars]
        leaves += [(f"f{8 * x.itemsize}", float(x)) for x in numbers]
        return Frozen(known.kind, known.fingerprint, leaves, [], known.guards, known.captures, known.places)

    @property
    def blocks(self) -> int:
        """Thread blocks: a tile each, as many as run at once; they go on to further tiles. A cluster's go together. Of rows,
        and of multistage kernels, all that there are."""
        tiles = int(self.module.tiles(SimpleNamespace(**self.extents)))
        return min(tiles, self._at_once) * self.cluster.size

    @cached_property
    def _at_once(self) -> int:
        """As many clusters as run at once; as many as there are where blocks do not go on."""
        resident = 1 if self.is_of_rows else getattr(self.module, "RESIDENT", 1)
        return (sys.maxsize if self.is_of_rows or self.is_multistage else
                self.cluster.at_once(self.device.sm_count) * int(resident))

    @property
    def is_of_rows(self) -> bool:
        """Whether it has no products: teams take rows."""
        return not self.printed.maps and not self.printed.operands

    @property
    def is_multistage(self) -> bool:
        """Whether its threads copy their operands, in blocks that have a tile each."""
        return bool(self.printed.operands)

    @cached_property
    def cluster(self) -> Cluster:
        """Of blocks that share operands, or a row."""
        found: Cluster = Cluster(self.module.ROWS.team.blocks) if self.is_of_rows else getattr(self.module, "cluster", ALONE)
        return found

    @cached_property
    def launchable(self) -> Launchable:
        made = None if self.like is None else self.like.launchable.resized(self.arguments, self.blocks)
        if made is not None:
            return made
        module, ordinal = self.module, max(info.device for info in self.infos.values())
        threads = module.ROWS.team.block if self.is_of_rows else module.WARPGROUPS.threads
        resident = RESIDENT // 2 if self.spare else RESIDENT       # what merges shares holds 16 of them at a time
        per_sm = max(1, resident // threads) if self.is_of_rows else int(getattr(module, "RESIDENT", 1))
        early, waits = (hasattr(module, word) for word in ("grid_wait", "await_counter"))
        own = getattr(module, "WARPGROUPS", None)
        return Launchable(module.kernel, self.arguments, threads, self.blocks, self.device, ordinal, module.SHARED_BYTES,
                          self.cluster.size, per_sm, early, waits, own and own.warp_registers)

    @cached_property
    def given(self) -> dict[str, ArrayInfo]:
        """The arrays of a call: all but those of the stream's memory."""
        return {name: info for name, info in self.infos.items() if name not in self.spare}

    @cached_property
    def launches(self) -> Launches:
        """Of all kernels, for `run` and for the tuner; without tiles none, whose empty arrays no tensor map describes."""
        return Launches(0, ()) if self.is_empty else launches_of(self.kernels)

    @cached_property
    def _kinds(self) -> list[tuple]:
        return [_kind(info) for info in self.given.values()]

    @cached_property
    def _apart(self) -> list[tuple[str, str]]:
        """The pairs of arrays with a result among them, which must not share memory."""
        return [pair for pair in combinations(self.given, 2) if not {*pair}.isdisjoint(self.results)]

    @cached_property
    def start(self) -> Start:
        """Start all its kernels, compiled and loaded, with what a call brings; 0 stands where the memory between them
        begins."""
        first = next(iter(self.given.values()))
        starts = [plan._loaded(launch).start for plan, launch in zip(self.kernels, self.launches.kernels)]
        return started(starts, self.launches.spare, len(self.given), first.device, self.launches.role)

    def _loaded(self, launch: Launch) -> Launch:
        """The kernel on the device: a program that is called derives a plan anew, and loads nothing twice."""
        if launch.kernel.like is not None and launch.kernel.like.is_bound:
            return bound(lambda _: launch, self.name)
        key = (self.name, self.text, self.blocks, *(_kind(info) for info in self.infos.values()),
               *(put[:3] for put in launch.puts), *self._made_with)
        return launch_of(key, lambda _: launch, self.name)

    # -- without a GPU ------------------------------------------------------------------------------------------------

    def filled(self, arrays: Sequence[_Given]) -> list[Any]:
        """Of the arrays of its kernel, those that the kernel fills."""
        return [array.value for array in arrays if array.is_filled]

    def emulated(self, arrays: Sequence[_Given], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = {}
        for given in arrays:
            info = self.infos[given.name]
            how = dict(written=given.name in self.printed.updated) if given.is_filled else dict(readonly=True)
            views[given.name] = arena.view(given.value, given.name, unit_axis(info), alignment(info), **how)
        yield self.launchable, (self.sizes, *(views[name] if one is None else arena.map(one, views[name])
                                              for name, one in self.taken),
                                *map(arena.component, self.printed.callees.components))


#: What is of no size: fields, and what follows from them.
_OF_TEXT = *(part.name for part in fields(ProgramPlan)), "module", "cluster", "_at_once", "_stored", "_apart"


def _kind(info: ArrayInfo) -> tuple:
    """What a plan depends on of an array."""
    return info.shape, info.strides, info.dtype, info.device, info.pointer % 16


class Taken(NamedTuple):
    """An argument of a kernel: an array, or a map of it."""

    array: str
    map: TensorMapSlot | None


class _Given(NamedTuple):
    value: Any
    name: str
    is_filled: bool


# --------------------------------------------------------------------------------------------------
# All passes of a chained program: from its trace to its text.

class Derived:
    """What the passes make of a program: the parts that a launch and its checks need."""

    def __init__(self, chain: Chain, places: ChainPlaces, problem: ChainProblem, choice: ChainChoice, text: Printed,
                 read: dict[str, Value], shares: Shares | None):
        self.chain, self.places, self.choice, self.text, self.read = chain, places, choice, text, read
        self.problem, self.shares, self.has_sections = problem, shares, has_sections(chain, choice)
        self.arrays = {block.parameter.name for ring in places.rings if ring.index is not None for block in ring.blocks}

    def extents(self, chain: Chain, infos: dict[str, ArrayInfo], processors: int) -> dict[str, int]:
        """Of a call: how long its indices' axes are, and how many of the stacks are taken side by side
        (`gemmkit.programs.chains.schedule`)."""
        sizes = {index.name: chain.sizes[index.extent] for index in (*chain.indices, chain.index)}
        if not self.has_sections:
            return {**sizes, "section": 1, **({chain.share: chain.splits} if chain.splits > 1 else {})}
        nbytes, cluster = sum([2 * math.prod(infos[name].shape[-2:]) for name in self.arrays]), self.choice.cluster
        rows = self.choice.rows * cluster.m
        tiles = -(-chain.sizes[chain.rows.extent] // rows)
        blocks = min(cluster.at_once(processors), chain.count * tiles)
        if self.choice.ordered:                        # few tiles that wait for each other's additions run at once
            return {**sizes, "section": max(1, chain.count)}
        return {**sizes, "section": section_of(chain.count, tiles, nbytes, blocks, rows) if blocks else 1}


def derived(name: str, loop: Loop, mapping: Mapping, numbers: dict[str, float], outs: Any, arrays: list[str],
            device: DeviceInfo, kernel: KernelLimits, copies: dict[str, CopyWidth]) -> Derived:
    """``numbers``: the run-time scalars, whose signs the text depends on. ``outs``: how a store leaves (`OutKind`), by the
    store and the descriptions of what is stored to beside the program's arrays. ``copies``: how threads copy operands, where
    they do."""
    chain = chain_of(loop)
    check_bounded(chain)
    lazy = references(chain, numbers, mapping.lazy)
    shares = shares_of(chain, mapping, numbers, device.sm_count, kernel)
    cells = {} if shares is None else shares.cells
    kinds: dict[str, OutKind] = {x.parameter.name: outs(chain, x, cells) for x in (*chain.stores, *chain.updates)}
    may_commute = commutes(chain, numbers)
    ranges = ranges_of(chain, numbers, may_commute)
    chain.grows, chain.shrinks, chain.visits_all = ranges.grow, ranges.shrink, ranges.visit_all(chain)
    rewrite(chain, numbers)
    begin_lazily(chain, lazy, mapping.lazy)
    settle(chain)
    guard(chain, numbers)
    begun(chain, numbers)
    keep_parts(chain)
    begin_below(chain)
    share_added(chain, kernel)
    places = placed(chain, kernel)
    by_tma = {key: np.dtype(kind.dtype) for key, kind in kinds.items() if kind.kind == "TmaOut"}
    problem = ChainProblem(chain, places, mapping, may_commute, by_tma, kernel)
    choice: ChainChoice = choose(problem, device).spec
    kinds = {key: replace(kind, kind="OctetOut") if key in by_tma and key not in choice.outs else kind
             for key, kind in kinds.items()}
    read_early(chain, choice.own, choice.ahead, kernel.room[choice.warpgroups])
    order = ordered_chain(chain, places, choice)
    shown = ", ".join(f"{key} {size}" for key, size in choice.blocks.items())
    how = ", ".join(word.replace("_", " ") for word in SWITCHES if getattr(choice, word))
    together = "; rounds in shares" if chain.splits > 1 else ""
    together += "" if choice.cluster.is_single else f"; clusters of {choice.cluster.m}"
    title = f"{name}: blocks of {shown}; {choice.warpgroups} warpgroups{'; ' if how else ''}{how}{together}."
    made = chain, places, choice, order, ranges, kinds, list(numbers), [*arrays, *cells]
    printer = ChainPrinter(*made) if kernel.uses_tma else MultistageChainPrinter(*made, copies=copies)
    text, read = printer.printed(title)
    return Derived(chain, places, problem, choice, text, read, shares)


def planned(program: Any, arguments: dict[str, Any], mapping: Mapping, text: str | None) -> ProgramPlan:
    """All passes. Where the mapping leaves the kernel open, and TMA cannot bring an operand, threads do. Raises ValueError,
    TypeError and ConfigError before anything is compiled."""
    try:
        return _planned(program, arguments, mapping, text)
    except NotByTma as error:
        if not mapping.kernel and text is None:
            with suppress(ConfigError, ValueError):
                return _planned(program, arguments, replace(mapping, kernel=MULTISTAGE), None)
        raise error.refusal from None


def _planned(program: Any, arguments: dict[str, Any], mapping: Mapping, text: str | None) -> ProgramPlan:
    traced, name = program.traced(arguments, mapping.variants), program.function.__name__
    loop, mapping = in_one_round(by_rows(traced), arguments), within_calls(traced, mapping)
    infos = {key: describe(x, key) for key, x in arguments.items() if is_array(x)}
    if is_recurrence(traced):
        return _recurrent(name, traced, infos, arguments, mapping, text)
    refuse_forms(loop)
    device = device_of(infos)
    if has_rows_alone(loop):
        return _of_rows(name, loop, infos, arguments, mapping, text, device)
    kernel, loop = kernel_of(mapping, device), with_updates_last(loop)
    kernel.refuse(mapping)
    if is_chained(loop):
        mapping = within_rounds(loop, mapping, lambda index: [])
        try:
            return _chained(name, loop, infos, arguments, mapping, text, device, kernel)
        except _NoMerge as error:
            if mapping.splits:
                raise error.reason from None
            return _planned(program, arguments, replace(mapping, splits=1), text)
    places = supported(places_of(loop, arguments), kernel, device, loop)
    mapping = within_rounds(loop, mapping, places.arrays_along)
    _check_names(infos, places, arguments, kernel)
    operands = {tile.parameter.name: rounds.line for rounds in places.loops for tile in rounds.tiles}
    check = partial(check_launch, operands=operands, tile=_tile_indices(places), stores=places.stores, kernel=kernel,
                    rounds=[x.index for x in places.loops], lines={x.index.name: x.line for x in places.loops},
                    integers=places.as_integers)
    check(infos, loop.sizes)
    problem = GridProblem(loop, places, infos, mapping, kernel)
    mapping, memory, outs = choose(problem, device).spec
    shown = ", ".join(f"{key} {size}" for key, size in memory.blocks.items())
    together = "" if memory.cluster.is_single else f"; clusters of {memory.cluster.m} x {memory.cluster.n}"
    title = f"{name}: blocks of {shown}; {mapping.warpgroups} warpgroups; {memory.rings[0].stages} stages{together}."
    given = places, [ordered(rounds) for rounds in places.loops], memory, outs, mapping.warpgroups
    printed = text_of((PiecePrinter if places.in_pieces or places.looks_up else Printer)(*given) if kernel.uses_tma else
                      MultistagePrinter(*given, copies={key: CopyWidth.of(kernel, infos[key]) for key in operands}), title)
    if text is not None:
        module_of(name, text)                          # raises for what is no kernel's text
    resizing = GridResizing(check, problem)
    return ProgramPlan(name, said(memory, mapping), printed, printed.text if text is None else text, infos,
                       resizing.extents(infos, loop.sizes), given_by(arguments), device, resizing=resizing)


Check = Callable[[dict[str, ArrayInfo], Sizes], None]


class Resizing(ABC):
    """What the passes know of a program when sizes decide. ``check`` raises ValueError and TypeError for arrays that no
    launch may have; ``axes``: what the trace has taken from sizes; ``functions``: of programs that it calls."""

    def __init__(self, check: Check, loop: Loop):
        self.check, self.axes, self._extents = check, loop.axes, list(loop.sizes)
        self.functions = tuple(call.function for call in loop.inlined)

    def sizes(self, infos: dict[str, ArrayInfo]) -> Sizes:
        shapes = {name: info.shape for name, info in infos.items()}
        return {extent: extent.measured(shapes) for extent in self._extents}

    def form(self, sizes: Sizes) -> Any:
        """Readings of one form differ in nothing."""
        return None

    @abstractmethod
    def decided(self, sizes: Sizes, device: DeviceInfo) -> Any:
        """What tells the kernels of a resizing apart. Raises ConfigError where none is possible."""

    @abstractmethod
    def extents(self, infos: dict[str, ArrayInfo], sizes: Sizes) -> dict[str, int]:
        """What a kernel is told of sizes."""

    def sized(self, plan: ProgramPlan, infos: dict[str, ArrayInfo], sizes: Sizes, call: CallArguments) -> ProgramPlan:
        """A plan for arrays of other sizes that decide the same, and other numbers. Raises what ``check`` raises."""
        self.check(infos, sizes)
        return plan.resized(infos, self.extents(infos, sizes), call)


class GridResizing(Resizing):
    def __init__(self, check: Check, problem: GridProblem):
        super().__init__(check, problem.loop)
        self.problem = problem

    def decided(self, sizes: Sizes, device: DeviceInfo) -> Any:
        return id(choose(replace(self.problem, places=replace(self.problem.places, sizes=sizes)), device).spec)

    def extents(self, infos: dict[str, ArrayInfo], sizes: Sizes) -> dict[str, int]:
        places = self.problem.places
        return {index.name: sizes[index.extent] for index in (*_tile_indices(places), *(x.index for x in places.loops))}


def _chained(name: str, loop: Loop, infos: dict[str, ArrayInfo], arguments: dict[str, Any], mapping: Mapping,
             text: str | None, device: DeviceInfo, kernel: KernelLimits) -> ProgramPlan:
    """Of a program whose tiles are whole rows (`gemmkit.programs.chains`)."""
    call = given_by(arguments)
    numbers = call.numbers

    def leaves(chain: Chain, store: StoreStatement, cells: dict[str, ArrayInfo]) -> OutKind:
        info, is_rows, adds = {**infos, **cells}[store.parameter.name], chain.stores_rows(store), store in chain.updates
        columns = 1 if is_rows else info.shape[-1]
        whole = not is_rows and leaves_by_tma(info)
        by_rows = "OctetOut" if chain.piece is not None else kernel.whole_rows         # TMA does not end where a piece does
        reason = why_not(info, len(info.shape) - 1) if adds and 0 not in info.shape else None
        if adds and (reason or columns * info.dtype.itemsize % 16):
            raise refused(ValueError, f"{store.parameter.name} += ...: TMA adds rows of whole 16 bytes to an array, and "
                          f"{reason or f'these have {columns * info.dtype.itemsize}'}", store.line)
        kind = "AddedOut" if adds else "RowsOut" if is_rows else by_rows if whole else "DirectOut"
        return OutKind(kind, info.dtype, not is_rows and in_pairs(info), columns)

    copies = {} if kernel.uses_tma else {key: CopyWidth.of(kernel, info) for key, info in infos.items() if info.shape}
    made = derived(name, loop, mapping, numbers, leaves, list(infos), device, kernel, copies)
    chain, printed, shares = made.chain, made.text, made.shares
    indices = *chain.indices, chain.index
    check_own_names([*infos, *numbers, *(c.inside.name for c in chain.carried), *(index.name for index in indices)],
                     [index.name for index in indices], _own_names(kernel))
    names = *infos, *numbers, *(index.name for index in indices)
    clash = next((key for key in names if key in names_of_ranges(chain)), None)
    if clash is not None:
        raise taken(clash) if made.shares is None else _NoMerge(taken(clash))
    operands = {block.parameter.name: chain.line for ring in made.places.rings for block in ring.blocks}
    check = partial(check_launch, operands=operands, tile=chain.indices, rounds=[chain.index], kernel=kernel,
                    stores=[*chain.updates, *(shares or chain).stores], lines={chain.index.name: chain.line})
    check(infos, loop.sizes)
    for array, x in made.read.items():
        check_read(array, infos[array], x.line)
    if text is not None:
        module_of(name, text)
    merge = None if shares is None else _merging(name, shares, infos, arguments, device)
    cells = counts_of(chain, made.choice) if shares is None else shares.cells
    resizing = ChainResizing(check, loop, made, mapping, device)
    return ProgramPlan(name, made.choice.said(mapping), printed, printed.text if text is None else text, {**infos, **cells},
                       resizing.extents(infos, loop.sizes), call, device, tuple(cells), merge, resizing)


def _recurrent(name: str, loop: Loop, infos: dict[str, ArrayInfo], arguments: dict[str, Any], mapping: Mapping,
               text: str | None) -> ProgramPlan:
    """Of a program whose rounds store rows (`gemmkit.programs.recurrences`)."""
    device, call, of = device_of(infos), given_by(arguments), recurrence_of(loop)
    kernel, indices = kernel_of(mapping, device), [index.name for index in of.indices]
    if not kernel.uses_tma:
        raise refused(ConfigError, "rounds that store rows: only kernels of TMA and wgmma have them", of.rounds.line)
    check_own_names([*infos, *call.numbers, *indices], indices, OWN_NAMES | NAMES_OF_RECURRENCES)

    def leaves(store: StoreStatement) -> OutKind:
        info = infos[store.parameter.name]
        kind = "TmaOut" if leaves_by_tma(info) and of.t in store.key else "DirectOut"
        columns = chosen.blocks[of.n.name] if of.n in store.key and of.n is not None else info.shape[-1]
        return OutKind(kind, info.dtype, in_pairs(info), in_steps(columns))

    chosen = of_recurrence(of, mapping, loop.sizes, device.sm_count)
    given = of, chosen, {x.parameter.name: leaves(x) for x in of.stores}, list(call.numbers), list(infos), device
    made = [RecurrencePrinter(*given, is_first) for is_first in ([True, False] if chosen.splits > 1 else [False])]
    texts = [printer.printed(name) for printer in made]
    operands = {parameter.name: of.rounds.line for parameter, _ in made[-1].loads.values()}
    check = partial(check_launch, operands=operands, tile=tuple(of.indices[:-1]), rounds=[of.t], kernel=kernel,
                    stores=of.stores, lines={of.t.name: of.rounds.line})
    check(infos, loop.sizes)
    module_of(name, text or texts[0].text)             # raises for what is no kernel's text
    resizing = RecurrenceResizing(check, loop, of, mapping, made[0])
    shares, extents = resizing.shares(loop.sizes), resizing.extents(infos, loop.sizes)
    first, *second = (ProgramPlan(name if n == 0 else f"{name}_outputs", chosen, made, made.text, {**infos, **shares},
                                  extents, call, device, tuple(shares)) for n, made in enumerate(texts))
    return replace(first, text=text or first.text, merge=next(iter(second), None), resizing=resizing)


class RecurrenceResizing(Resizing):
    """Where a tile's rounds have shares, the second kernel is in ``merge``."""

    def __init__(self, check: Check, loop: Loop, of: Recurrence, mapping: Mapping, printer: RecurrencePrinter):
        super().__init__(check, loop)
        self.of, self.mapping, self.printer = of, mapping, printer

    def decided(self, sizes: Sizes, device: DeviceInfo) -> Any:
        return of_recurrence(self.of, self.mapping, sizes, device.sm_count)

    def extents(self, infos: dict[str, ArrayInfo], sizes: Sizes) -> dict[str, int]:
        return {index.name: sizes[index.extent] for index in self.of.indices}

    def shares(self, sizes: Sizes) -> dict[str, ArrayInfo]:
        """Arrays between the kernels, in memory of the stream's."""
        found, first, blocks = dict[str, ArrayInfo](), 0, self.printer.blocks
        tiles = math.prod(-(-sizes[x.extent] // blocks.get(x.name, 1)) for x in self.of.indices[:-1])
        for key, shape in self.printer.shares.items() if self.printer.is_first else ():
            found[key] = spare(first, (max(1, tiles), *shape))
            first += -(-4 * math.prod(found[key].shape) // 256) * 256
        return found

    def sized(self, plan: ProgramPlan, infos: dict[str, ArrayInfo], sizes: Sizes, call: CallArguments) -> ProgramPlan:
        self.check(infos, sizes)
        given = {**infos, **self.shares(sizes)}, self.extents(infos, sizes), call
        return plan.resized(*given) if plan.merge is None else plan.resized(*given, merge=plan.merge.resized(*given))


class ChainResizing(Resizing):
    """Readings differ in whether rounds have shares."""

    def __init__(self, check: Check, loop: Loop, made: Derived, mapping: Mapping, device: DeviceInfo):
        super().__init__(check, loop)
        self.made, self.processors = made, device.sm_count
        self.splits = partial(splits_of, mapping=mapping, processors=device.sm_count, kernel=made.problem.kernel)
        self.inexact = list(may_be_inexact(made.chain))

    def form(self, sizes: Sizes) -> bool:
        return self.splits(self.made.chain.resized(sizes)) > 1

    def _chain(self, sizes: Sizes) -> Chain:
        chain = self.made.chain.resized(sizes)
        if self.made.shares is not None:
            chain.splits = self.splits(chain)
        return chain

    def decided(self, sizes: Sizes, device: DeviceInfo) -> Any:
        return decided_by(self._chain(sizes), device.sm_count), *(largest(x, sizes) >= EXACT for x in self.inexact)

    def extents(self, infos: dict[str, ArrayInfo], sizes: Sizes) -> dict[str, int]:
        return self.made.extents(self._chain(sizes), infos, self.processors)

    def sized(self, plan: ProgramPlan, infos: dict[str, ArrayInfo], sizes: Sizes, call: CallArguments) -> ProgramPlan:
        shares, infos = self.made.shares, {**infos, **counts_of(self._chain(sizes), self.made.choice)}
        if shares is None or plan.merge is None or plan.merge.resizing is None:
            return super().sized(plan, infos, sizes, call)
        self.check(infos, sizes)
        chain = self._chain(sizes)
        cells, parts = memory_of(shares.widths, chain)
        known, sizes = {**infos, **parts}, {**sizes, shares.share.extent: chain.splits}
        merge = plan.merge.resizing.sized(plan.merge, {key: known[key] for key in plan.merge.infos}, sizes, call)
        return plan.resized({**infos, **cells}, self.extents(infos, sizes), call, merge=merge,
                            mapping=replace(plan.mapping, splits=chain.splits))


class _NoMerge(Exception):
    """Rounds cannot be split, by this ``reason``: where nothing is said of splits, they are not."""

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.reason = reason


def _merging(name: str, shares: Shares, infos: dict[str, ArrayInfo], arguments: dict[str, Any],
             device: DeviceInfo) -> ProgramPlan:
    """Of the kernel that merges what shares of rounds have made, a function of rows."""
    clash = next((key for key in (*shares.cells, *shares.parts) if key in infos), None)
    if clash is not None:
        raise _NoMerge(taken(clash))
    held = shares.held(infos)
    try:
        plan = _of_rows(f"{name}_merged", shares.merging, held, arguments, Mapping(), None, device)
    except (ValueError, TypeError) as error:
        raise _NoMerge(ConfigError(f"Mapping(splits=...): the kernel that merges shares is a function of rows, and: "
                                   f"{error}")) from None
    return replace(plan, spare=tuple(key for key in shares.parts if key in held))


def _of_rows(name: str, loop: Loop, infos: dict[str, ArrayInfo], arguments: dict[str, Any], mapping: Mapping,
             text: str | None, device: DeviceInfo) -> ProgramPlan:
    """Of a program without products (`gemmkit.programs.rows`)."""
    call, program = given_by(arguments), row_program_of(loop)
    own = [index.name for index in program.indices]
    check_indices([*infos, *call.numbers, *own], own)
    for key in (*infos, *call.numbers, *own):
        if key in NAMES_OF_ROWS or key.startswith(PART) or key.replace("ROWS", "columns") in program.lengths.values():
            raise taken(key)
    check = partial(check_rows, program=program)
    check(infos, loop.sizes)
    printed = derived_rows(name, program, mapping, infos, list(call.numbers), device)
    if text is not None:
        module_of(name, text, ROWS_NEEDED)
    resizing = RowResizing(check, loop, program)
    return ProgramPlan(name, mapping, printed, printed.text if text is None else text, infos,
                       resizing.extents(infos, loop.sizes), call, device, resizing=resizing)


class RowResizing(Resizing):
    """The length of rows is a program's own: what is decided by it is decided."""

    def __init__(self, check: Check, loop: Loop, program: RowProgram):
        super().__init__(check, loop)
        self.program = program

    def decided(self, sizes: Sizes, device: DeviceInfo) -> Any:
        return None

    def extents(self, infos: dict[str, ArrayInfo], sizes: Sizes) -> dict[str, int]:
        found = {index.name: sizes[index.extent] for index in self.program.sizes}
        return found | {name: length for length, name in self.program.lengths.items()}


def _tile_indices(places: Places) -> tuple[Index, ...]:
    """Rows, columns, and stacks."""
    return *places.indices, *places.stacks


def _check_names(infos: dict[str, ArrayInfo], places: Places, arguments: dict[str, Any], kernel: KernelLimits) -> None:
    """Raises ValueError for names that the text has for its own."""
    indices = [index.name for index in (*_tile_indices(places), *(rounds.index for rounds in places.loops))]
    check_own_names([*infos, *given_by(arguments).numbers, *places.names, *indices], indices, _own_names(kernel))


def _own_names(kernel: KernelLimits) -> frozenset[str]:
    return OWN_NAMES if kernel.uses_tma else OWN_NAMES | NAMES_OF_MULTISTAGE
