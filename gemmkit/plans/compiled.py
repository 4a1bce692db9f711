"""A kernel for a class of problems: its specialisation, and where its arguments lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

from gemmkit.components import (
    Component,
    arrays_of,
    at_path,
    freeze,
    frozen,
    number,
    with_at_path,
    with_fields,
    without_arrays,
)
from gemmkit.epilogues import Default, Epilogue
from gemmkit.epilogues.norms import Normalise
from gemmkit.epilogues.reductions import Reduce
from gemmkit.kernels.collectives.lanes import (
    LANES,
    PIECES,
    STEP,
    WARP,
    WARPS,
    Rescaler,
    Team,
    complete_reductions,
    rescale_rows,
    warps_for,
)
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.config import Config
from gemmkit.kernels.spec import ProblemShape, Spec, StackShape
from gemmkit.lang.functions import Frozen, ViewKind, freeze_array
from gemmkit.layouts import ArrayLayout, Plain
from gemmkit.plans.adapters import Adapted, TensorCopy, for_products, for_swap_ab, widened
from gemmkit.plans.launch import Launch, Put
from gemmkit.plans.problem import Call
from gemmkit.runtime.array_info import as_strided
from gemmkit.runtime.arrays import ArrayInfo, describe, flipped, shares_memory, unit_axis, whole
from gemmkit.runtime.arrays import on_host as as_numpy
from gemmkit.runtime.launch import Launchable, Space, on_host, spaces_of

# --------------------------------------------------------------------------------------------------
# What reductions and norms of rows among a product's epilogues need beside its kernel: workspaces, and small kernels
# behind it.

BYTES = 16                             # of neighbours in D that a lane moves at a time


def reductions_of(epilogue: Epilogue) -> list[Reduce]:
    """The reductions of a chain, in their order."""
    return [stage for stage in epilogue.stages() if isinstance(stage, Reduce)]


def normaliser_of(epilogue: Epilogue) -> Normalise | None:
    """What a chain finishes rows by, if it does."""
    last = epilogue.stages()[-1]
    return last if isinstance(last, Normalise) else None


def reserved(conf: Config, spec: Spec, sizes: tuple[int, int, int], products: int) -> Config:
    """A configuration with workspaces for its reductions, of a product of ``sizes`` (rows and columns of D, and
    columns that are computed) by the kernel of ``spec``; itself without any."""
    changed = {name: of for name in ("epilogue", "observe_a")
               if (of := reserve(name, getattr(conf, name), conf, spec, sizes, products)) is not getattr(conf, name)}
    return with_fields(conf, changed)


def reserve(name: str, component: Any, conf: Config, spec: Spec, sizes: tuple[int, int, int], products: int) -> Any:
    """An epilogue or an observer with workspaces for its reductions; itself without any."""
    accumulator = conf.operator.fragment_c.dtype
    if name == "observe_a":
        if component is None:
            return None
        slots = spec.scheduler.tiles(sizes[0], sizes[2])[1] * spec.operand_reduction.parts
        number = len(reductions_of(conf.epilogue)) + (normaliser_of(conf.epilogue) is not None)
        return component.reserved(number, slots, sizes[0], products, accumulator)
    if not component.reduces:
        return component
    counted = iter(range(len(reductions_of(component))))

    def of(part: Any) -> Any:
        if isinstance(part, Reduce):
            across, along = (sizes[1], sizes[0]) if part.along_m else sizes[:2]
            slots = -(-along // spec.parts[0 if part.along_m else 1])
            return part.reserved(next(counted), slots, across, products, accumulator)
        if isinstance(part, Normalise):
            return part.reserved(len(reductions_of(component)), spec, sizes[:2], products, accumulator, conf.global_d_layout)
        if isinstance(part, Adapted) and part.reduces:
            return with_fields(part, {"epilogue": part.epilogue.mapped(of)})
        return part

    return component.mapped(of)


@dataclass
class Finalisation:
    """A kernel behind a product, of D of ``sizes``, for ``products`` products: what it takes beside the ``epilogue``."""

    epilogue: Epilogue
    sizes: tuple[int, int, int]
    products: int
    is_stack: bool
    target: Any
    ordinal: int

    kernel: ClassVar[Any] = None

    @cached_property
    def shape(self) -> Component:
        return StackShape(*self.sizes, 0) if self.is_stack else ProblemShape(*self.sizes)

    @property
    def blocks(self) -> int:
        raise NotImplementedError

    @property
    def threads(self) -> int:
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def has_work(self) -> bool:
        raise NotImplementedError

    def arguments(self) -> list[Frozen]:
        raise NotImplementedError

    def sources(self) -> tuple[str | None, ...]:
        """What each argument is of the product's: the field of its configuration, or "out"; None: its own."""
        raise NotImplementedError

    def emulated(self, spec: Any, d: Any) -> tuple[Any, ...]:
        """The arguments as the emulator takes them, of a product's specialisation and D there."""
        raise NotImplementedError

    @cached_property
    def launchable(self) -> Launchable:
        return Launchable(type(self).kernel, self.arguments(), self.threads, self.blocks, self.target, self.ordinal,
                          self.shared_bytes)

    def launch(self, ranges: Mapping[str, slice], own: Mapping[int, int], places: Mapping[str, int]) -> Launch:
        """With what the product's launch brings: ``own`` says which of these goes to a slot of the product's values, among
        which those of its components are in ``ranges``; ``places`` says which are the workspaces, by their roles."""
        kernel, at = self.launchable, 0
        puts = []
        for argument, source in zip(kernel.arguments, self.sources()):
            count = len(argument.leaves)
            if source == "out":
                puts.append(Put(at, 0))
            elif source is not None and count:
                first = ranges[source].start
                puts += [Put(at + n, own[first + n], encoder=number) for n in range(count) if first + n in own]
            at += count
        arrays = [info for argument in kernel.arguments for info in argument.arrays]
        return Launch(kernel, [*puts, *(Put(one.slot, places[one.role]) for one in spaces_of(kernel.values, arrays))])

    def forget_arrays(self) -> None:
        """Keep none alive."""
        self.epilogue = without_arrays(self.epilogue)


@dataclass
class Completion(Finalisation):
    """Of a product that reduces D or observes A: `complete_reductions`."""

    observer: Any = None               # of A; None without one

    kernel = staticmethod(complete_reductions)

    @cached_property
    def reductions(self) -> list[Any]:
        return [*reductions_of(self.epilogue), *(() if self.observer is None else (self.observer,))]

    @cached_property
    def team(self) -> Team:
        found = self.reductions
        most = max(self.sizes[1 if one.along_m else 0] for one in found)
        return Team(warps_for(max(int(one.slots) for one in found)), max(1, -(-most // LANES)))

    @cached_property
    def blocks(self) -> int:
        return self.products * self.team.blocks

    @cached_property
    def threads(self) -> int:
        return LANES * self.team.warps

    @cached_property
    def shared_bytes(self) -> int:
        return self.threads * max(int(one.state.itemsize) for one in self.reductions)

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """What is completed, as the kernel takes it: an epilogue stands for an observer that is not there."""
        return self.epilogue, Default() if self.observer is None else self.observer

    def arguments(self) -> list[Frozen]:
        return [freeze(part) for part in (self.team, *self.parts, self.shape)]

    def sources(self) -> tuple[str | None, ...]:
        return None, "epilogue", "observe_a", None

    def emulated(self, spec: Any, d: Any) -> tuple[Any, ...]:
        return self.team, spec.epilogue, self.parts[1] if self.observer is None else spec.a.observer, self.shape

    def forget_arrays(self) -> None:
        super().forget_arrays()
        self.observer = None if self.observer is None else without_arrays(self.observer)

    @property
    def has_work(self) -> bool:
        return self.products > 0 and max(self.sizes[1 if one.along_m else 0] for one in self.reductions) > 0


@dataclass
class Rescaling(Finalisation):
    """Of a product whose rows are normalised in two passes: `rescale_rows` of ``d``."""

    d: Frozen = field(kw_only=True)
    steps: Any = field(kw_only=True)
    axis: int = field(kw_only=True)

    kernel = staticmethod(rescale_rows)

    @cached_property
    def how(self) -> Rescaler:
        M, N, _ = self.sizes
        vector = math.gcd(N, max(1, BYTES // self.d.arrays[0].dtype.itemsize)) if self.axis == 1 else 1
        items, step = (M, PIECES * WARP * vector) if self.axis == 1 else (-(-M // WARP), STEP)
        chunks = max(1, -(-N // step))
        return Rescaler(self.steps, self.axis, vector, chunks, max(1, -(-items * chunks // WARPS)))

    @cached_property
    def blocks(self) -> int:
        return int(self.products * self.how.blocks)

    @property
    def threads(self) -> int:
        return WARP * WARPS

    def arguments(self) -> list[Frozen]:
        return [freeze(self.how), freeze(self.epilogue), self.d, freeze(self.shape)]

    def sources(self) -> tuple[str | None, ...]:
        return None, "epilogue", "out", None

    def emulated(self, spec: Any, d: Any) -> tuple[Any, ...]:
        return self.how, spec.epilogue, d, self.shape

    @property
    def has_work(self) -> bool:
        return self.products > 0 and min(self.sizes[:2]) > 0


OPERANDS = "out", "a", "b", "c"        # what a call of a product brings, in this order; then values of components

PARTS = ("operator",
         "global_a_layout", "shared_a_layout", "transform_global_to_shared_a", "transform_shared_to_regs_a",
         "observe_a",
         "global_b_layout", "shared_b_layout", "transform_global_to_shared_b", "transform_shared_to_regs_b",
         "global_c_layout", "shared_c_layout", "transform_global_to_shared_c", "transform_shared_to_regs_c",
         "global_d_layout", "shared_d_layout", "transform_shared_to_global_d", "transform_regs_to_shared_d",
         "epilogue", "condition", "order")           # the components of a Spec, in the order of its fields


ELSEWHERE = 2**60                      # from an address to one as aligned that no array has


class Nothing(Component):
    """Stands for an operand that is not there."""


class Compiled:
    """A kernel for a class of problems, and where its arguments lie: shared by all plans of the class.

    The kernel's operands are those of `Call.computed`. ``puts`` say where those of the call go, and ``ranges`` where among
    the kernel's values are those of each component of the configuration, if any has some.
    """

    def __init__(self, call: Call, given: ArrayInfo):
        self.problem, self.out = call, given
        problem = self.computed = call.computed
        out = flipped(given) if call.swap_ab else given
        conf = problem.config
        M, N, K = problem.M, problem.N, problem.K
        c = problem.c if conf.has_c else None
        conf = for_products(conf, problem.stack)
        conf = for_swap_ab(conf) if call.swap_ab else conf
        conf = self.config = widened(conf, {"a": problem.a, "b": problem.b, "c": c, "out": out}, (M, N, K),
                                     [held for _, held in call.held])
        is_stack = problem.products != 1
        assert out is not None
        arrays = OperandArrays(problem.a, problem.b, out, M, N, K, c, problem.products if is_stack else None, problem.device)
        self.spec = conf.spec(arrays)
        if conf.epilogue.reduces or conf.observe_a is not None:
            conf = self.config = reserved(conf, self.spec, self._of_d(), problem.products)
            self.spec = conf.spec(arrays)
        self.operands = [_operand(info, layout, readonly) for info, layout, readonly in (
            (problem.a, conf.global_a_layout, True), (problem.b, conf.global_b_layout, True),
            (c, conf.global_c_layout, True), (out, conf.global_d_layout, False))]
        self.behind = self._behind(is_stack)
        self.shape = StackShape(M, N, K, 0) if is_stack else ProblemShape(M, N, K)
        spec, shape = frozen(self.spec), freeze(self.shape)
        for name, held in call.held:
            if held.info.device != problem.a.device:
                kind = type(getattr(call.config, call.given_as(name)))
                raise ValueError(f"{name}={kind.__qualname__}(...): {held.name} is on device {held.info.device} and a on "
                                 f"device {problem.a.device}")
        self.maps = conf.family.maps(self.spec, arrays)
        self.arguments = [spec, *self.operands, shape, *(freeze(Nothing()) if m is None else m.frozen for m in self.maps)]
        self.blocks = self.spec.blocks(M, N, problem.device.sm_count)
        self.launchable = Launchable(
            conf.family.kernel, self.arguments, conf.threads, self.blocks or conf.peers, problem.device, problem.a.device,
            self.spec.shared_bytes, conf.peers, conf.blocks_per_sm,
            conf.family.is_dependent and not self.spec.reduction.waits, self.spec.reduction.waits,
            conf.family.registers(self.spec))
        self.values = self.launchable.values
        self.spaces = spaces_of(self.values, spec.arrays)
        #: Of operands, by their places among `OPERANDS`, and their workspaces.
        self.copies = {OPERANDS.index(name): TensorCopy(whole(getattr(call, name)), whole(of))
                       for name, of in call.copies.items()}
        self.staged = [Space(-1, f"{OPERANDS[n]} in another order", copy.nbytes) for n, copy in self.copies.items()]
        self.order = call.order
        self.puts, self.held_maps = self._places(spec)
        names = PARTS if spec.leaves or spec.facts else ()
        self.parts = {name: freeze(getattr(conf, name)) for name in names}
        at = 0
        self.ranges = {name: slice(at, at := at + len(part.leaves)) for name, part in self.parts.items()}

    def _places(self, spec: Frozen) -> tuple[list[Put], list[Put]]:
        """Where the call's operands go, and their tensor maps. And the tensor maps of arrays that components hold, each with
        the slot of the array's address for ``which``."""
        names = [("a", "b", "c", "out")[n] for n in self.order]            # of the kernel's operands, in their order
        slots = [self.launchable.slot(n) for n in range(len(self.arguments))]
        operands, maps = slots[1:1 + len(names)], slots[2 + len(names):]
        puts = [Put(slot, OPERANDS.index(name)) for slot, name in zip(operands, names) if slot is not None]
        held = []
        for slot, several in zip(maps, self.maps):
            for at, one in () if slot is None or several is None else enumerate(several.maps, slot):
                if isinstance(one.which, int):
                    puts.append(Put(at, OPERANDS.index(names[one.which]), encoder=one.encoder))
                else:
                    held.append(Put(at, self._slot_of(one.which, spec), encoder=one.encoder))
        return puts, held

    def _slot_of(self, path: tuple[str, ...], spec: Frozen) -> int:
        """Where the address of an array that the specialisation holds stands among the values: the one that another address
        changes."""
        info = describe(at_path(self.spec, path))
        other = freeze(with_at_path(self.spec, path, info._replace(pointer=info.pointer ^ ELSEWHERE)))
        (slot,) = (n for n, (old, new) in enumerate(zip(spec.leaves, other.leaves)) if old != new)
        return slot

    def launch(self, slots: tuple[int, ...] = ()) -> Launch:
        """The kernel and those behind it, as a call brings `OPERANDS` and values of components at these ``slots``."""
        own = {slot: n for n, slot in enumerate(slots, len(OPERANDS))}
        every = [*self.spaces, *self.staged]
        places = {space.role: n for n, space in enumerate(every, len(OPERANDS) + len(slots))}
        copied = {n: places[space.role] for n, space in zip(self.copies, self.staged)}
        brought = [Put(slot, n, encoder=number) for slot, n in own.items()]
        brought += [one._replace(which=own[one.which]) for one in self.held_maps if one.which in own]
        spaces = [Put(space.slot, places[space.role]) for space in self.spaces]
        puts = [put._replace(which=copied.get(put.which, put.which)) for put in self.puts]
        launches = [Launch(self.launchable, [*puts, *brought, *spaces])] if self.blocks else []
        for one in (one for one in self.held_maps if one.which not in own):
            self.values[one.slot] = cast(Any, one.encoder)(self.values[one.which])
        launches += [behind.launch(self.ranges, own, places) for behind in self.behind]
        launches[0].spaces, launches[0].behind = every, launches[1:]
        launches[0].before = [copy.launch((copied[n], n)) for n, copy in self.copies.items()]
        return launches[0]

    def _behind(self, is_stack: bool) -> list[Finalisation]:
        """The kernels behind the product, in their order."""
        conf, problem = self.config, self.computed
        found: list[Finalisation] = []
        how = conf.epilogue, (*self._of_d()[:2], problem.K), problem.products, is_stack, problem.device, problem.a.device
        if reductions_of(conf.epilogue) or conf.observe_a is not None:
            found.append(Completion(*how, observer=conf.observe_a))
        norm = normaliser_of(conf.epilogue)
        if norm is not None and norm.is_in_two_passes:
            axis = cast(int, conf.global_d_layout.vector_axis)
            found.append(Rescaling(*how, d=self.operands[3], steps=self.spec.scheduler.stack.d, axis=axis))
        return [one for one in found if one.has_work]

    def _of_d(self) -> tuple[int, int, int]:
        """Rows and columns of D, and the columns that the kernel computes."""
        return self.computed.M, self.config.global_d_layout.finished_columns(self.computed.N), self.computed.N

    def reserved(self, name: str, component: Any) -> Any:
        """Another epilogue or observer of the planned kind, with workspaces for its reductions."""
        return reserve(name, component, self.config, self.spec, self._of_d(), self.computed.products)

    # -- without a GPU (`gemmkit.emulator`) ----------------------------------------------------------------------------

    def filled(self, arrays: tuple[Any, ...]) -> list[Any]:
        return [arrays[3]]

    def views(self, arrays: tuple[Any, Any, Any, Any], arena: Any) -> dict[str, Any]:
        """The kernel's operands a, b, c and out, of those of a call; None for one that is not there."""
        conf = self.problem.config
        a, b, c, out = self.problem.vectors.host(*arrays)
        given = describe(out, "out")
        others = [held.info for held in arrays_of(self.spec)] + ([] if c is None else [describe(c, "c")])
        reads_out = any(shares_memory(info, given) for info in others)
        call, names = self.computed, dict(a="a", b="b", c="c", out="out")
        infos = call.a, call.b, call.c, self.out
        if self.problem.swap_ab:                   # a fault is told of the caller's arrays
            a, b, c, out = (x if x is None else as_numpy(x).T for x in (b, a, c, out))
            infos, names = (*infos[:3], describe(out, "out")), dict(names, a="b", b="a")
        seen = {name: array if array is None else _seen(array, getattr(conf, f"global_{letter}_layout"), info)
                for name, letter, array, info in zip(names, "abcd", (a, b, c, out), infos)}
        views: dict[str, Any] = {}
        for name, operand in zip(("out", "a", "b", "c"), (self.operands[3], *self.operands[:3])):     # what is written first
            how = dict(written=reads_out) if name == "out" else dict(readonly=True)
            kind = operand.kind
            views[name] = arena.view(seen[name], names[name], kind.unit, kind.alignment, **how) if isinstance(
                kind, ViewKind) else None
        arena.tell(self.spec, {names[name]: view for name, view in views.items()})
        return views

    def emulated(self, arrays: tuple[Any, Any, Any, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        """Of a, b, c and out."""
        views = self.views(arrays, arena)
        # Its workspaces are kept for the next run: one that is stopped has not set its counters back.
        kept = vars(self).pop("spec_on_host", None) or on_host(self.spec)
        spec = arena.component(kept)
        operands = [views[name] for name in ("a", "b", "c", "out")]
        if self.blocks:
            def view(of: Any) -> Any:
                return operands[of.which] if isinstance(of.which, int) else at_path(spec, of.which)

            maps = [None if several is None else tuple(arena.map(one, view(one)) for one in several.maps)
                    for several in self.maps]
            yield self.launchable, (spec, *operands, self.shape, *(one[0] if one and len(one) == 1 else one for one in maps))
        for behind in self.behind:                 # kernels of their own: what the first has written they see
            yield behind.launchable, behind.emulated(spec, views["out"])
        self.spec_on_host = kept


def _seen(array: Any, layout: Any, info: Any) -> Any:
    """An operand as the kernel takes it: of a stack all matrices, each as its layout sees it."""
    array = as_numpy(array)
    own = layout.dimensions_of(describe(array))
    first = layout.host_view(array if own is None else array[(0,) * max(0, array.ndim - own)])
    if info is None or not info.steps:
        return first
    stack = whole(info)
    steps = tuple(stride * info.dtype.itemsize for stride in stack.strides)
    return as_strided(first, stack.shape, steps, writeable=array.flags.writeable)


def _operand(info: ArrayInfo | None, layout: ArrayLayout, readonly: bool) -> Frozen:
    if info is None:
        return freeze(Nothing())
    axis = layout.axis if isinstance(layout, Plain) else unit_axis(info)
    if axis is not None and info.strides[axis] != 1 and info.shape[axis] > 1:
        axis = None
    stack = whole(info)
    return freeze_array(stack, None if axis is None else len(stack.shape) - len(info.shape) + axis, readonly=readonly)
