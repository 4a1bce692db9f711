"""What reductions and norms of rows among a product's epilogues need beside its kernel: workspaces, and small kernels
behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

from gemmkit.adapters import Adapted
from gemmkit.components import Component, freeze, with_fields, without_arrays
from gemmkit.config import Config
from gemmkit.epilogues import Default, Epilogue
from gemmkit.epilogues.norms import Normalise
from gemmkit.epilogues.reductions import Reduce
from gemmkit.kept import number
from gemmkit.kernels.common.completion import LANES, Team, complete_reductions, warps_for
from gemmkit.kernels.common.rescaling import PIECES, STEP, WARP, WARPS, Rescaler, rescale_rows
from gemmkit.kernels.spec import Shape, Spec, StackShape
from gemmkit.lang.freezing import Frozen
from gemmkit.launch import Launch, Put
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.workspace import spaces_of

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
    return cast(Config, with_fields(conf, changed))


def reserve(name: str, component: Any, conf: Config, spec: Spec, sizes: tuple[int, int, int], products: int) -> Any:
    """An epilogue or an observer with workspaces for its reductions; itself without any."""
    accumulator = conf.operator.fragment_c.dtype
    if name == "observe_a":
        if component is None:
            return None
        slots = spec.scheduler.tiles(sizes[0], sizes[2])[1] * spec.watch.parts
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
class Behind:
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
        return StackShape(*self.sizes, 0) if self.is_stack else Shape(*self.sizes)

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

    def emulated(self, spec: Any, d: Any) -> tuple:
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
class Completion(Behind):
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
        return self.threads * max(one.state.itemsize for one in self.reductions)

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """What is completed, as the kernel takes it: an epilogue stands for an observer that is not there."""
        return self.epilogue, Default() if self.observer is None else self.observer

    def arguments(self) -> list[Frozen]:
        return [freeze(part) for part in (self.team, *self.parts, self.shape)]

    def sources(self) -> tuple[str | None, ...]:
        return None, "epilogue", "observe_a", None

    def emulated(self, spec: Any, d: Any) -> tuple:
        return self.team, spec.epilogue, self.parts[1] if self.observer is None else spec.a.observer, self.shape

    def forget_arrays(self) -> None:
        super().forget_arrays()
        self.observer = None if self.observer is None else without_arrays(self.observer)

    @property
    def has_work(self) -> bool:
        return self.products > 0 and max(self.sizes[1 if one.along_m else 0] for one in self.reductions) > 0


@dataclass
class Rescaling(Behind):
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

    def emulated(self, spec: Any, d: Any) -> tuple:
        return self.how, spec.epilogue, d, self.shape

    @property
    def has_work(self) -> bool:
        return self.products > 0 and min(self.sizes[:2]) > 0
