"""Partial states of rows (or columns) of D in a workspace: what a tile keeps of each, for a kernel behind the product; and
the epilogues that have them."""

from __future__ import annotations

from typing import Any, ClassVar

from gemmkit.components import Array, Component, Scalar
from gemmkit.epilogues.base import Epilogue
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.records import part_dtypes
from gemmkit.ptx.memory import load_global, store_global

__all__ = ["Kept", "Partial", "Reducing"]


@dataclass(frozen=True)
class Partial(Component):
    """What a component may do with its workspace ``partials``: states of the dtype ``state``, ``slots`` of each row."""

    def keep(self, state: Any, i: int, slot: int, shape: Any) -> None:
        """A part's state of row (or column) ``i``: neighbours of one slot are neighbours in memory."""
        store_global(self.partials, 0, (self.place(i, slot, shape),), (0,), (state,))          # type: ignore[attr-defined]

    def kept(self, i: int, slot: int, shape: Any) -> Any:
        return load_global(self.partials, 0, (self.place(i, slot, shape),), (0,), 1)[0]        # type: ignore[attr-defined]

    def place(self, i: int, slot: int, shape: Any) -> int:
        return (shape.batch * self.slots + slot) * self.extent(shape) + i                      # type: ignore[attr-defined]

    @property
    def state_parts(self) -> int:
        return len(part_dtypes(self.state))                                                    # type: ignore[attr-defined]

    def extent(self, shape: Any) -> Any:
        """How many rows (or columns) have states."""
        return shape.M


@dataclass(frozen=True)
class Kept(Partial):
    """States of rows, each of ``width`` columns."""

    partials: Array
    state: Any
    slots: Scalar
    width: int

    outputs: ClassVar[tuple[str, ...]] = ("partials",)


@dataclass(frozen=True)
class Reducing(Epilogue):
    """Base class of epilogues that combine values of several threads, by `finish_block`."""

    reduces = True
    passes_on = False
    writes = False                     # what it stores is not stored when an element is finished
