"""A kernel for a class of problems: its specialisation, and where its arguments lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, cast

from gemmkit.completing import Behind, Completion, Rescaling, normaliser_of, reductions_of, reserve, reserved
from gemmkit.components import Component, at_path, freeze, with_at_path
from gemmkit.kept import number
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.spec import Shape, Spec, StackShape
from gemmkit.lang.freezing import Frozen, freeze_array
from gemmkit.layouts import Layout, Plain
from gemmkit.per_product import for_products
from gemmkit.problem import Call
from gemmkit.runtime.arrays import ArrayInfo, flipped, info_of, unit_axis, whole
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.workspace import addresses, on_host, spaces_of
from gemmkit.transposed import for_transpose
from gemmkit.wide import widened

__all__ = ["PARTS", "Compiled", "Launches", "Nothing"]


PARTS = ("operator",
         "global_a_layout", "shared_a_layout", "transform_global_to_shared_a", "transform_shared_to_regs_a",
         "observe_a",
         "global_b_layout", "shared_b_layout", "transform_global_to_shared_b", "transform_shared_to_regs_b",
         "global_c_layout", "shared_c_layout", "transform_global_to_shared_c", "transform_shared_to_regs_c",
         "global_d_layout", "shared_d_layout", "transform_shared_to_global_d", "transform_regs_to_shared_d",
         "epilogue", "condition", "order")           # the components of a Spec, in the order of its fields


ELSEWHERE = 2**60                      # from an address to one as aligned that no array has


class HeldMap(NamedTuple):
    """The tensor map of an array that a component holds: where it and the array's address stand among a kernel's values."""

    slot: int
    pointer: int
    map: Any


class Nothing(Component):
    """Stands for an operand that is not there."""


class Launches(NamedTuple):
    """The launches of a kernel on a stream, for arrays at these addresses of a, b, c (0: none) and out.

    Workspaces are the stream's, and tensor maps those of the addresses.
    """

    planned: Callable[[int, tuple[int, ...]], None]                     # with the values that were there at its making
    with_values: Callable[[int, tuple[int, ...], tuple], None]          # with others of the same kinds
    #: ``bringing(slots)(stream, addresses, values)``: with others at these slots alone. None where kernels come behind.
    bringing: Callable[[tuple[int, ...]], Callable[[int, tuple[int, ...], tuple], None]] | None = None


class Compiled:
    """A kernel for a class of problems, and where its arguments lie: shared by all plans of the class.

    The kernel's operands are those of `Call.computed`; ``pointers`` are the slots of the call's a, b, c and out.
    """

    def __init__(self, call: Call, given: ArrayInfo):
        self.problem, self.out = call, given
        problem = self.computed = call.computed
        out = flipped(given) if call.is_transposed else given
        conf = problem.config
        M, N, K = problem.M, problem.N, problem.K
        c = problem.c if conf.has_c else None
        conf = for_products(conf, problem.stack)
        conf = for_transpose(conf) if call.is_transposed else conf
        conf = self.config = widened(conf, {"a": problem.a, "b": problem.b, "c": c, "out": out}, (M, N, K),
                                     [held for _, held in call.held])
        is_stack = problem.products != 1
        assert out is not None
        arrays = Arrays(problem.a, problem.b, out, M, N, K, c, problem.products if is_stack else None,
                        problem.device)
        self.spec = conf.spec(arrays)
        if conf.epilogue.reduces or conf.observe_a is not None:
            conf = self.config = reserved(conf, self.spec, self._of_d(), problem.products)
            self.spec = conf.spec(arrays)
        self.operands = [_operand(info, layout, readonly) for info, layout, readonly in (
            (problem.a, conf.global_a_layout, True), (problem.b, conf.global_b_layout, True),
            (c, conf.global_c_layout, True), (out, conf.global_d_layout, False))]
        self.behind = self._behind(is_stack)
        self.shape = StackShape(M, N, K, 0) if is_stack else Shape(M, N, K)
        spec, shape = freeze(self.spec), freeze(self.shape)
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
            conf.family.is_dependent and not self.spec.reduction.waits, self.spec.reduction.waits)
        self.values = self.launchable.values
        self.spaces = spaces_of(self.values, spec.arrays)
        first = 1 + len(self.operands) + 1             # of the maps
        self.order = (1, 0, 2, 3) if call.is_transposed else (0, 1, 2, 3)
        self.pointers = [self.launchable.slot(1 + n) for n in self.order]
        slots = [self.launchable.slot(first + n) for n in range(len(self.maps))]
        placed = [(slot + n, one) for slot, m in zip(slots, self.maps) if slot is not None for n, one in enumerate(m.maps)]
        self.map_slots = {slot: m for slot, m in placed if isinstance(m.which, int)}
        self.held_maps = [HeldMap(slot, self._slot_of(m.which, spec), m) for slot, m in placed
                          if not isinstance(m.which, int)]

    def _slot_of(self, path: tuple[str, ...], spec: Frozen) -> int:
        """Where the address of an array that the specialisation holds stands among the values: the one that another address
        changes."""
        info = info_of(at_path(self.spec, path))
        other = freeze(with_at_path(self.spec, path, info._replace(pointer=info.pointer ^ ELSEWHERE)))
        (slot,) = (n for n, (old, new) in enumerate(zip(spec.leaves, other.leaves)) if old != new)
        return slot

    def with_held_maps(self, values: Sequence[Any]) -> Sequence[Any]:
        """The kernel's values with the tensor maps of arrays that components hold, which lie where the values say."""
        if not self.held_maps:
            return values
        out = list(values)
        for one in self.held_maps:
            out[one.slot] = one.map.encoder(out[one.pointer])
        return out

    def _behind(self, is_stack: bool) -> list[Behind]:
        """The kernels behind the product, in their order."""
        conf, problem = self.config, self.computed
        found: list[Behind] = []
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

    def launches(self, bound: Any, values: tuple) -> Launches:
        """Those of the kernel, ``bound`` on the device, and of those behind it."""
        product = self._product(bound, values)
        if not self.behind:
            return product
        at, own = 0, {}
        for name in PARTS:
            own[name] = slice(at, at := at + len(freeze(getattr(self.config, name)).leaves))
        behind = [one.launches(own) for one in self.behind]
        device, spaces = self.problem.a.device, self.spaces

        def with_values(stream: int, given: tuple[int, ...], others: tuple) -> None:
            found = addresses(device, stream, spaces)
            if self.blocks:
                put = list(self.with_held_maps(others))
                for slot, value in zip(self._slots, self._expand((*given, *found))):
                    put[slot] = value                                         # type: ignore[index]
                bound.launch(stream, put)
            places = {space.role: place for space, place in zip(spaces, found)}
            for launch in behind:
                launch(stream, others, places, given[3])

        return Launches(lambda stream, given: with_values(stream, given, values), with_values)

    def _product(self, bound: Any, values: tuple) -> Launches:
        operands = [n for n, slot in enumerate(self.pointers) if slot is not None]
        maps = [(self.order[m.which], m.encoder) for m in self.map_slots.values()]
        spaces, device = self.spaces, self.problem.a.device
        slots = [*(self.pointers[n] for n in operands), *self.map_slots, *(space.slot for space in spaces)]
        pointers_in: Any = itemgetter(*operands)

        def expand(at: tuple[int, ...]) -> tuple[Any, ...]:
            return *pointers_in(at), *[encode(at[which]) for which, encode in maps], *at[4:]

        self._slots, self._expand = slots, expand
        planned = bound.prepare(self.with_held_maps(values), slots, expand if maps or spaces else pointers_in)

        def in_workspaces(stream: int, at: tuple[int, ...]) -> None:
            planned(stream, (*at, *addresses(device, stream, spaces)))

        def with_values(stream: int, at: tuple[int, ...], others: tuple) -> None:
            put = list(self.with_held_maps(others))
            for slot, value in zip(slots, expand((*at, *addresses(device, stream, spaces)))):
                put[slot] = value                                             # type: ignore[index]
            bound.launch(stream, put)

        def bringing(more: tuple[int, ...]) -> Callable[[int, tuple[int, ...], tuple], None]:
            count = 4 + len(spaces)
            held = [(one.slot, count + more.index(one.pointer), one.map.encoder) for one in self.held_maps
                    if one.pointer in more]

            def expand_all(at: tuple[Any, ...]) -> tuple[Any, ...]:
                return *expand(at[:count]), *map(number, at[count:]), *[encode(at[which]) for _, which, encode in held]

            start = bound.prepare(self.with_held_maps(values), [*slots, *more, *(slot for slot, *_ in held)], expand_all)
            if spaces:
                return lambda stream, at, brought: start(stream, (*at, *addresses(device, stream, spaces), *brought))
            return lambda stream, at, brought: start(stream, at + brought)

        return Launches(in_workspaces if spaces else planned, with_values, bringing)

    # -- without a GPU (`gemmkit.emulator.mode`) -----------------------------------------------------------------------

    def filled(self, arrays: tuple[Any, ...]) -> list[Any]:
        return [arrays[3]]

    def emulate(self, arrays: tuple[Any, Any, Any, Any], seed: int | None) -> None:
        from gemmkit.emulator.kernels import run

        try:
            run(self, *arrays, seed)
        except BaseException:
            vars(self).pop("spec_on_host", None)              # blocks that were stopped have not set counters back
            raise

    @cached_property
    def spec_on_host(self) -> Spec:
        """The specialisation as the emulator takes it, with workspaces of its own."""
        return cast(Spec, on_host(self.spec))


def leaf_ranges(parts: dict[str, Frozen]) -> dict[str, slice]:
    """Where the runtime values of a configuration's components, in the order of PARTS, lie among the kernel's arguments;
    without ``parts`` there are none."""
    ranges, at = dict.fromkeys(PARTS, slice(0, 0)), 0
    for name, frozen in parts.items():
        ranges[name] = slice(at, at + len(frozen.leaves))
        at += len(frozen.leaves)
    return ranges


def _operand(info: ArrayInfo | None, layout: Layout, readonly: bool) -> Frozen:
    if info is None:
        return freeze(Nothing())
    axis = layout.axis if isinstance(layout, Plain) else unit_axis(info)
    if axis is not None and info.strides[axis] != 1 and info.shape[axis] > 1:
        axis = None
    stack = whole(info)
    return freeze_array(stack, None if axis is None else len(stack.shape) - len(info.shape) + axis, readonly=readonly)
