"""``WMMAOp``: tensor cores by the ``wmma`` instructions (the operator of the paper's experiments)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.lang.checks import dtype_given
from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import Fragment
from gemmkit.operators.base import Operator
from gemmkit.ptx.wmma import LOAD, MMA, SHAPES, SPECS, STORE, WmmaSpec


@dataclass(frozen=True)
class WMMAOp(Operator):
    """16x16x16, 8x32x16 or 32x8x16 products: float16 or bfloat16 in, float32 (or float16) accumulation; sm_70+.

    ``a_order`` and ``b_order`` ("row" or "col") say how the shared tiles are laid out: the fragments depend on it, and
    `get_config` sets them from the shared layouts. Fragments are opaque, so a shared-to-registers transform may not ask
    for coordinates.

    Raises ValueError for a shape or a pair of dtypes that the instructions do not have.
    """

    M: int = 16
    N: int = 16
    K: int = 16
    dtype: Any = np.float16
    accumulator: Any = np.float32
    a_order: str = "col"
    b_order: str = "col"

    merges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dtype", "accumulator"):
            object.__setattr__(self, name, dtype_given(getattr(self, name), "WMMAOp", name))
        if self.shape not in SHAPES:
            raise ValueError(f"WMMAOp(M={self.M}, N={self.N}, K={self.K}): the shapes are "
                             + ", ".join("x".join(map(str, s)) for s in SHAPES))
        if self._key not in SPECS:
            known = ", ".join(sorted({f"{i} -> {a}" for _, i, a in SPECS}))
            raise ValueError(f"WMMAOp(dtype={self.dtype}, accumulator={self.accumulator}): the instructions have {known}")
        for name in ("a_order", "b_order"):
            if getattr(self, name) not in ("row", "col"):
                raise ValueError(f'WMMAOp({name}={getattr(self, name)!r}): "row" or "col" is needed')

    @cached_property
    def _key(self) -> Any:
        return self.shape, self.dtype, self.accumulator

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return (7, 0) if self.dtype == np.float16 else (8, 0)

    @cached_property
    def spec(self) -> WmmaSpec:
        return SPECS[self._key]

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.spec.count("a"))

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.dtype, self.spec.count("b"))

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.spec.count("c"))

    @cached_property
    def load_a_atom(self) -> Any:
        return LOAD[self._key, "a", self.a_order]

    @cached_property
    def load_b_atom(self) -> Any:
        return LOAD[self._key, "b", self.b_order]

    @cached_property
    def load_c_atoms(self) -> Any:
        return LOAD[self._key, "c", "col"], LOAD[self._key, "c", "row"]

    @cached_property
    def store_d_atoms(self) -> Any:
        return STORE[self._key, "col"], STORE[self._key, "row"]

    @cached_property
    def mma_atom(self) -> Any:
        return MMA[self._key, self.a_order, self.b_order]

    def line_alignment(self, operand: str, layout: Any) -> int:
        """What the instructions ask of a stride."""
        return 16

    def refuses(self, operand: str, layout: Any) -> str | None:
        order, actual = getattr(self, f"{operand}_order", None), ("col", "row")[layout.axis]
        if order is None or order == actual:
            return None
        return f"{self!r} loads tiles of {operand} in {order} order; give it {operand}_order={actual!r}"

    def load_a(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        return self.load_a_atom(pointer, layout.position(tile.base, leading), layout.position(tile.offset, leading), leading)

    def load_b(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        return self.load_b_atom(pointer, layout.position(tile.base, leading), layout.position(tile.offset, leading), leading)

    def load_c(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        return self.load_c_atoms[layout.axis](pointer, layout.position(tile.base, leading),
                                              layout.position(tile.offset, leading), leading)

    def mma(self, a: tuple, b: tuple, c: tuple) -> tuple:
        return self.mma_atom(a, b, c)

    def store_d(self, layout: Any, pointer: Any, tile: Any, leading: int, d: tuple) -> None:
        self.store_d_atoms[layout.axis](pointer, layout.position(tile.base, leading),
                                        layout.position(tile.offset, leading), leading, d)
