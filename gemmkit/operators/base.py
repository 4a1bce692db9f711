"""The contract of operators: from tiles in shared memory to fragments, their product, and back.

``load_a``, ``load_b``, ``load_c`` take a tile of the operator's shape from shared memory to registers, ``mma`` multiplies
and accumulates fragments, and ``store_d`` puts a fragment back. An operator acts in groups of ``threads`` threads.

Where a lane's loads begin may be told apart from the loads: ``place_a(layout, tile, leading)`` and ``place_b`` are the base
of every position that ``load_a`` (``load_b``) loads from, and the rest of these positions is known when a kernel is
compiled. A kernel with a ring of stages then finds places once (``has_places``).

``identity`` is what an operand holds where there is nothing (a masked edge): its product must leave the accumulator
unchanged. ``start`` is where accumulators begin without a C. ``merges`` says that accumulators over parts of K, each begun
at ``start``, make up that of all of K by ``merge``: then blocks may share the K of a tile.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gemmkit.components import Component
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric
from gemmkit.lang.registers import Fragment
from gemmkit.ptx.mma import FragmentMap
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.layouts.base import SharedLayout
    from gemmkit.layouts.plain import Plain


@dataclass(frozen=True)
class Operator(Component):
    """Base class of operators; see the module's text for the methods that a subclass gives."""

    device_methods: ClassVar[tuple[str, ...]] = ("load_a", "load_b", "load_c", "place_a", "place_b", "mma", "merge",
                                                 "store_d")
    without_value = ("store_d",)

    threads = 32
    identity: ClassVar[Any] = 0
    start: ClassVar[Any] = 0
    merges = False
    has_places = False                                     # whether `place_a` and `place_b` say where loads begin
    sums = 1                                               # accumulators of a fragment: of an algebra one for each part
    is_scaled = False                                      # whether these sums are scaled first
    promote = 0                                            # after how many elements along K sums go to others; 0: never

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        """The least compute capability whose instructions it needs."""
        return 5, 0

    def instead(self, arch: tuple[int, int]) -> str:
        """What to take on a GPU of a compute capability that lacks the instructions."""
        return "FPUOp"

    @cached_property
    def is_mapped(self) -> bool:
        """Whether it is known which element each value of a fragment is."""
        return self.map_c is not None

    @cached_property
    def map_a(self) -> FragmentMap | None:
        """Which element of a tile of A a thread's n-th value is; None when that is not specified."""
        return None

    @cached_property
    def map_b(self) -> FragmentMap | None:
        return None

    @cached_property
    def map_c(self) -> FragmentMap | None:
        return None

    @cached_property
    def refuses_to_merge(self) -> str | None:
        """Why blocks that share K cannot bring their accumulators together, or None when they can."""
        count, size = self.fragment_c.count, self.fragment_c.dtype.itemsize
        if not self.merges:
            return ("it does not declare that accumulators over parts of K may be merged (combine must be associative, and "
                    "start its neutral element); set merges = True in its class, or use splits=1")
        if size not in (1, 2, 4, 8, 16) or count * size % 4:
            return (f"a thread holds {count} numbers of {size} bytes at a time, and blocks hand sums over in words of 4 "
                    "bytes, of numbers of 1, 2, 4, 8 or 16; use splits=1")
        return None

    def merge(self, x: Numeric, y: Numeric) -> Any:
        """Two accumulators' values of one element as one."""
        return x + y

    def place_a(self, layout: Plain, tile: Tile, leading: int) -> int:
        """Where, in elements of a shared tile of A, this lane's loads of the operation at ``tile`` begin."""
        raise TypeError(f"{type(self).__qualname__} has no place_a(layout, tile, leading)")

    def place_b(self, layout: Plain, tile: Tile, leading: int) -> int:
        raise TypeError(f"{type(self).__qualname__} has no place_b(layout, tile, leading)")

    # device: load_a/load_b/load_c(layout, pointer, tile, leading) -> fragment; mma(a, b, c) -> fragment;
    #         store_d(layout, pointer, tile, leading, fragment)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K) of one operation."""
        return self.M, self.N, self.K                      # type: ignore[attr-defined]

    @cached_property
    def fragment_a(self) -> Fragment:
        raise TypeError(f"operator={self!r} has no fragment_a; an operator says what a thread holds of each operand")

    @cached_property
    def fragment_b(self) -> Fragment:
        raise TypeError(f"operator={self!r} has no fragment_b; an operator says what a thread holds of each operand")

    @cached_property
    def fragment_c(self) -> Fragment:
        raise TypeError(f"operator={self!r} has no fragment_c; an operator says what a thread holds of each operand")

    def line_alignment(self, operand: str, layout: SharedLayout) -> int:
        """Bytes at whose multiples the lines of a shared tile of ``operand`` ("a", "b", "c" or "d") must start."""
        return int(layout.dtype.itemsize)

    def shared_axis(self, operand: str, axis: int) -> int:
        """Along which axis tiles of ``operand`` should be contiguous in shared memory, where global memory has them so along
        ``axis``."""
        return axis

    def padding(self, operand: str, axis: int) -> int:
        """The bytes by which a line of a shared tile of ``operand``, contiguous along ``axis``, should be longer than the
        tile (a multiple of 64 bytes), so that the accesses of a warp use different banks."""
        return 16

    def refuses(self, operand: str, layout: SharedLayout) -> str | None:
        """Why tiles of ``operand`` in this shared layout cannot be loaded (or stored), or None when they can."""
        return None

    def check(self, M: int, N: int, K: int, stack: tuple[int, ...] | None) -> None:
        """Raise ValueError where arrays of its own do not fit a product of these sizes, or a ``stack`` of them."""

    def takes(self, a: np.dtype, b: np.dtype, c: np.dtype) -> str | None:
        """Why operands of these dtypes in shared memory will not do, or None when they will."""
        for name, given, wanted in (("a", a, self.fragment_a.dtype), ("b", b, self.fragment_b.dtype),
                                    ("c", c, self.fragment_c.dtype)):
            if given != wanted:
                return f"{type(self).__name__} takes {name} of dtype {wanted}, not {given}"
        return None


def units(operator: Operator) -> Any:
    """What multiplies: of an algebra its base, of other operators themselves."""
    return getattr(operator, "base", operator)
