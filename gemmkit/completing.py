"""What reductions among a product's epilogues need beside its kernel: workspaces, and a second small kernel behind it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from gemmkit.components import Component, freeze, with_fields
from gemmkit.config import Config
from gemmkit.epilogues import Composed, Epilogue, Fold
from gemmkit.epilogues.reduce import Reduce
from gemmkit.kernels.common.completion import LANES, Team, complete_reductions, warps_for
from gemmkit.kernels.spec import Shape, Spec, StackShape
from gemmkit.per_product import Adapted
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.workspace import spaces_of

__all__ = ["Completion", "reductions_of", "reserved"]


def reductions_of(epilogue: Epilogue) -> list[Reduce]:
    """The reductions of a chain, in their order."""
    return [stage for stage in epilogue.stages() if isinstance(stage, Reduce)]


def reserved(conf: Config, epilogue: Epilogue, spec: Spec, sizes: tuple[int, int], products: int) -> Epilogue:
    """An epilogue with workspaces for its reductions, of D of ``sizes`` by the kernel of ``spec``; itself without any."""
    if not epilogue.reduces:
        return epilogue
    counted = iter(range(len(reductions_of(epilogue))))
    accumulator = conf.operator.fragment_c.dtype

    def of(part: Any) -> Any:
        if isinstance(part, Reduce):
            return part.reserved(next(counted), spec.parts, sizes, products, accumulator)
        if isinstance(part, Composed):
            return with_fields(part, {name: of(getattr(part, name)) for name in ("first", "second")})
        if isinstance(part, Fold):
            return with_fields(part, {"then": of(part.then)})
        return with_fields(part, {"epilogue": of(part.epilogue)}) if isinstance(part, Adapted) and part.reduces else part

    return cast(Epilogue, of(epilogue))


@dataclass
class Completion:
    """The kernel behind a product whose epilogue reduces: `complete_reductions` of D of ``sizes``, for ``products``
    products."""

    epilogue: Epilogue
    sizes: tuple[int, int, int]
    products: int
    is_stack: bool
    target: Any
    ordinal: int

    @cached_property
    def team(self) -> Team:
        found = reductions_of(self.epilogue)
        most = max(self.sizes[1 if one.along_m else 0] for one in found)
        return Team(warps_for(max(int(one.slots) for one in found)), max(1, -(-most // LANES)))

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
        return self.threads * max(one.state.itemsize for one in reductions_of(self.epilogue))

    @cached_property
    def launchable(self) -> Launchable:
        arguments = [freeze(part) for part in (self.team, self.epilogue, self.shape)]
        return Launchable(complete_reductions, arguments, self.threads, self.blocks, self.target, self.ordinal,
                          self.shared_bytes)

    def launches(self, own: slice) -> Any:
        """``launch(stream, values, places)``: with the epilogue's numbers from ``values`` of the product's kernel, in which
        they are ``own``, and workspaces at ``places``, by their roles."""
        bound, first = self.launchable.bind(), self.launchable.slot(1)
        self.launchable.forget_code()
        count = len(self.launchable.arguments[1].leaves)
        spaces = spaces_of(self.launchable.values, self.launchable.arguments[1].arrays)
        planned = list(self.launchable.values)

        def launch(stream: int, values: Any, places: dict[str, int]) -> None:
            put = list(planned)
            if first is not None:
                put[first:first + count] = values[own]
            for space in spaces:
                put[space.slot] = places[space.role]
            bound.launch(stream, put)

        return launch

    @property
    def has_work(self) -> bool:
        return self.products > 0 and max(self.sizes[1 if one.along_m else 0] for one in reductions_of(self.epilogue)) > 0
