"""What reductions among a product's epilogues need beside its kernel: workspaces, and a second small kernel behind it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from gemmkit.components import Component, freeze, with_fields, without_arrays
from gemmkit.config import Config
from gemmkit.epilogues import Composed, Default, Epilogue, Fold
from gemmkit.epilogues.reduce import Reduce
from gemmkit.kernels.common.completion import LANES, Team, complete_reductions, warps_for
from gemmkit.kernels.spec import Shape, Spec, StackShape
from gemmkit.per_product import Adapted
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.workspace import spaces_of

__all__ = ["Completion", "reductions_of", "reserve", "reserved"]


def reductions_of(epilogue: Epilogue) -> list[Reduce]:
    """The reductions of a chain, in their order."""
    return [stage for stage in epilogue.stages() if isinstance(stage, Reduce)]


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
        return component.reserved(len(reductions_of(conf.epilogue)), slots, sizes[0], products, accumulator)
    if not component.reduces:
        return component
    counted = iter(range(len(reductions_of(component))))

    def of(part: Any) -> Any:
        if isinstance(part, Reduce):
            across, along = (sizes[1], sizes[0]) if part.along_m else sizes[:2]
            slots = -(-along // spec.parts[0 if part.along_m else 1])
            return part.reserved(next(counted), slots, across, products, accumulator)
        if isinstance(part, Composed):
            return with_fields(part, {name: of(getattr(part, name)) for name in ("first", "second")})
        if isinstance(part, Fold):
            return with_fields(part, {"then": of(part.then)})
        return with_fields(part, {"epilogue": of(part.epilogue)}) if isinstance(part, Adapted) and part.reduces else part

    return of(component)


@dataclass
class Completion:
    """The kernel behind a product that reduces D or observes A: `complete_reductions` of D of ``sizes``, for ``products``
    products."""

    epilogue: Epilogue
    observer: Any                      # of A; None without one
    sizes: tuple[int, int, int]
    products: int
    is_stack: bool
    target: Any
    ordinal: int

    @cached_property
    def reductions(self) -> list[Any]:
        return [*reductions_of(self.epilogue), *(() if self.observer is None else (self.observer,))]

    @cached_property
    def team(self) -> Team:
        found = self.reductions
        most = max(self.sizes[1 if one.along_m else 0] for one in found)
        return Team(warps_for(max(int(one.slots) for one in found)), max(1, -(-most // LANES)))

    @property
    def kernel(self) -> Any:
        return complete_reductions

    @cached_property
    def shape(self) -> Component:
        return StackShape(*self.sizes, 0) if self.is_stack else Shape(*self.sizes)

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
    def launchable(self) -> Launchable:
        arguments = [freeze(part) for part in (self.team, *self.parts, self.shape)]
        return Launchable(self.kernel, arguments, self.threads, self.blocks, self.target, self.ordinal,
                          self.shared_bytes)

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """What is completed, as the kernel takes it: an epilogue stands for an observer that is not there."""
        return self.epilogue, Default() if self.observer is None else self.observer

    def launches(self, own: list[slice]) -> Any:
        """``launch(stream, values, places)``: with the numbers of the epilogue and the observer from ``values`` of the
        product's kernel, in which they are ``own``, and workspaces at ``places``, by their roles."""
        launchable = self.launchable
        bound = launchable.bind()
        launchable.forget_code()
        planned, arrays = list(launchable.values), [info for argument in launchable.arguments for info in argument.arrays]
        spaces, at = spaces_of(planned, arrays), sum(len(x.leaves) for x in launchable.arguments[:1])
        puts = []
        for argument, source in zip(launchable.arguments[1:3], own):
            if argument.leaves:
                puts.append((slice(at, at + len(argument.leaves)), source))
            at += len(argument.leaves)

        def launch(stream: int, values: Any, places: dict[str, int]) -> None:
            put = list(planned)
            for to, source in puts:
                put[to] = values[source]
            for space in spaces:
                put[space.slot] = places[space.role]
            bound.launch(stream, put)

        return launch

    def forget_arrays(self) -> None:
        """Keep none alive."""
        self.epilogue = without_arrays(self.epilogue)
        self.observer = None if self.observer is None else without_arrays(self.observer)

    @property
    def has_work(self) -> bool:
        return self.products > 0 and max(self.sizes[1 if one.along_m else 0] for one in self.reductions) > 0
