"""What follows from a mapping of Hopper's kernel: the other fields of a Config, and the specialisation that says how
operands travel on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from gemmkit.config import Config
from gemmkit.epilogues import result_layout
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.sm90.shared_k import COLUMNS, SharedK
from gemmkit.kernels.spec import Condition
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.records import part_dtypes
from gemmkit.layouts import Braided, ColMajor, Interleaved, Joined, Plain, Planar, RowMajor, Swizzled, Tensor, Zero
from gemmkit.operators.algebra import units
from gemmkit.tiling import Tile
from gemmkit.tuning.model import Mapping

WIDTHS = 128, 64, 32                   # bytes of a swizzle's lines
NARROWEST = WIDTHS[-1]
LEAST_STAGES = 2


@dataclass(frozen=True)
class AnyTiles(Condition):
    """A condition that can be asked of any tiles."""


def complete(values: dict[str, Any], mapping: Mapping) -> None:
    """A mapping's fields, and those that follow from them, but for the stages."""
    whole = values["operator"]
    operator = units(whole)
    values.setdefault("kernel", "warp_specialised")
    values.setdefault("splits", mapping.splits)
    values.setdefault("order", mapping.order)
    _fill_tiles(values, operator, mapping)
    _fill_shared(values, operator)
    if whole is not operator:
        split(values)
    _fill_moves(values)
    condition = values.get("condition")
    always = condition is None or condition.is_always
    cluster = next(c for c in (mapping.cluster, mapping.cluster[::-1], (1, 1))
                   if c == (1, 1) or (always and _divides(values, c)))
    values.setdefault("cluster", Tile(M=cluster[0], N=cluster[1]))
    _fill_d(values)
    majors = dict(a_major="K" if values["shared_a_layout"].axis == 1 else "MN",
                  b_major="K" if values["shared_b_layout"].axis == 0 else "MN")
    ordered = dataclasses.replace(operator, **majors)
    values["operator"] = ordered if whole is operator else whole.with_base(ordered)


def assumed_spec(values: dict[str, Any], mapping: Mapping, arrays: Arrays | None = None) -> Any:
    """The kernel's specialisation for these fields on a mapping, which says by which routes operands travel. What is not
    given of the problem is plain; without ``arrays`` all suit TMA."""
    assumed = dict(values)
    if not getattr(values.get("condition"), "is_always", True):
        assumed["condition"] = AnyTiles()                      # other tiles may be chosen, which the condition takes
    accumulator = assumed["operator"].fragment_c.dtype
    assumed.setdefault("global_c_layout", Zero(accumulator))
    if "global_d_layout" not in assumed:
        assumed["global_d_layout"] = (Interleaved if accumulator.names is not None or accumulator.kind == "c"
                                      else RowMajor)(accumulator)
    assumed["global_d_layout"] = result_layout(assumed["global_b_layout"], assumed.get("epilogue"),
                                               assumed["global_d_layout"])
    complete(assumed, mapping)
    assumed.setdefault("stages", LEAST_STAGES)
    return Config(**assumed).spec(arrays)


# -- fields -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Lying:
    """How an operand lies in shared memory in tiles of any extents: along ``k_axis`` where it ``is_along``, else across K
    where its tile is wide enough; of a braid's ``slots`` TMA brings parts."""

    k_axis: int
    dtype: np.dtype
    is_along: bool
    slots: int

    @classmethod
    def of(cls, layout: Any, k_axis: int, dtype: np.dtype) -> Lying:
        axis = layout.vector_axis
        lines = isinstance(layout, (Braided, Joined, Plain, Planar, Tensor)) or layout.stored is not None
        # Only 16-bit operands can be contiguous across K.
        return cls(k_axis, dtype, axis in (None, k_axis) or dtype.itemsize != 2 or not lines, getattr(layout, "slots", 1))

    def lies_along(self, across: int) -> bool:
        """Whether its lines lie along K in a tile with ``across`` rows of A, or columns of B."""
        return self.is_along or bool(across * self.dtype.itemsize % 32)

    def width(self, across: int, depth: int) -> int:
        """Bytes of the swizzle's lines."""
        return _width((depth if self.lies_along(across) else across // self.slots) * self.dtype.itemsize)

    def layout(self, across: int, depth: int) -> Swizzled:
        axis = self.k_axis if self.lies_along(across) else 1 - self.k_axis
        return _swizzled(axis, self.dtype, self.width(across, depth))

    def divides(self, across: int, depth: int, peers: int) -> bool:
        """Whether so many blocks of a cluster can each load a part of the tile."""
        if peers == 1 or self.lies_along(across):
            return are_parts(across, None, peers)
        return are_parts(across, self.width(across, depth) // self.dtype.itemsize, peers)


def are_parts(across: int, line: int | None, peers: int) -> bool:
    """Whether a tile of so many rows of A, or columns of B, is in ``peers`` parts: some of the panels of lines of ``line``
    elements, or where lines lie along K (None) some lines of each panel."""
    return across // (line or 8) % peers == 0


def can_share(mappings: Iterable[Mapping], a: Any, b: Any) -> tuple[Mapping, ...]:
    """Those of the mappings of which the blocks of a cluster can each load a part of what they share of operands in these
    layouts.

    >>> from gemmkit.layouts import ColMajor, RowMajor
    >>> pair = Mapping(128, 64, "cooperative", 8, (2, 1), 300, 3000, 0)       # two blocks share 64 columns of B
    >>> can_share([pair], RowMajor("float16"), ColMajor("float16")) == (pair,)
    True
    >>> can_share([pair], RowMajor("float16"), RowMajor("float16"))
    ()
    """
    size = a.dtype.itemsize
    of_a, of_b = Lying.of(a, 1, a.dtype), Lying.of(b, 0, a.dtype)
    return tuple(one for one in mappings if one.cluster == (1, 1) or (
        of_a.divides(one.M, one.depth // size, one.cluster[1]) and of_b.divides(one.N, one.depth // size, one.cluster[0])))


def _fill_tiles(values: dict[str, Any], operator: Any, mapping: Mapping) -> None:
    values.setdefault("block_shape", Tile(M=mapping.M, N=operator.N, K=mapping.depth // operator.dtype.itemsize))
    block = values["block_shape"].size
    if "schedule" not in values and "warps_per_block" not in values and block.M != mapping.M:
        values["schedule"] = "cooperative"
        values["warps_per_block"] = 8 if block.M % 128 == 0 else 4
    values.setdefault("schedule", mapping.schedule)
    values.setdefault("warps_per_block", mapping.warps if values["schedule"] == mapping.schedule else 8)
    consumers = 1 if values["schedule"] == "pingpong" else max(1, values["warps_per_block"] // 4)
    values.setdefault("compute_warp", Tile(M=max(1, block.M // consumers), N=block.N, K=block.K))
    values.setdefault("producer_warps", mapping.producer_warps)


def _fill_shared(values: dict[str, Any], operator: Any) -> None:
    block = values["block_shape"].size
    for name, k_axis, across, dtype in (("a", 1, block.M, operator.dtype), ("b", 0, block.N, operator.b_dtype)):
        if f"shared_{name}_layout" not in values:
            lying = Lying.of(values[f"global_{name}_layout"], k_axis, dtype)
            values[f"shared_{name}_layout"] = lying.layout(across, block.K)


def _fill_d(values: dict[str, Any]) -> None:
    """C's and D's shared layouts: D's panels divide the columns that a block finishes."""
    values.setdefault("shared_c_layout", RowMajor(values["operator"].fragment_c.dtype))
    d, N = values["global_d_layout"], values["block_shape"].size.N
    axis = 0 if d.vector_axis == 0 and d.is_separable else 1
    N //= d.folds
    columns = N // SharedK(values["splits"], values["cluster"]).slices(N, max(COLUMNS, NARROWEST // d.dtype.itemsize))
    if "shared_d_layout" not in values:
        values["shared_d_layout"] = _swizzled(axis, d.dtype, _width((columns if axis == 1 else 64) * d.dtype.itemsize))


def _divides(values: dict[str, Any], cluster: tuple[int, int]) -> bool:
    """Whether the blocks of a cluster can each load a part of the operand that they share."""
    block = values["block_shape"].size
    layouts = values["shared_a_layout"], values["shared_b_layout"]
    return all(are_parts(across, None if layout.axis == k_axis else layout.line, peers)
               for layout, k_axis, across, peers in zip(layouts, (1, 0), (block.M, block.N), reversed(cluster)))


def _width(nbytes: int) -> int:
    """Of the widest swizzle whose panels divide lines of so many bytes."""
    for width in WIDTHS:
        if nbytes % width == 0:
            return width
    return NARROWEST


def _swizzled(axis: int, dtype: np.dtype, width: int) -> Swizzled:
    plain = Interleaved(dtype, ("col", "row")[axis]) if dtype.names else (ColMajor, RowMajor)[axis](dtype)
    return Swizzled(plain, width)


def _fill_moves(values: dict[str, Any]) -> None:
    """What producers move when TMA does not: 16 bytes a thread along the shared axis."""
    block, warps = values["block_shape"], values["producer_warps"]
    for name, tile in (("a", block.MK), ("b", block.KN)):
        layout, shared = values[f"global_{name}_layout"], values[f"shared_{name}_layout"]
        thread, warp = _move(tile, layout, shared, warps)
        values.setdefault(f"mem_{name}_thread", thread)
        values.setdefault(f"mem_{name}_warp", warp)
    values.setdefault("mem_cd_thread", Tile(M=1, N=2))
    values.setdefault("mem_cd_warp", Tile(M=8, N=8))


def _move(tile: Tile, layout: Any, shared: Any, warps: int) -> tuple[Tile, Tile]:
    """(thread, warp): lanes go along the axis of global memory, so that their loads are of neighbours."""
    axis = shared.axis
    size = shared.dtype.itemsize                          # of a number, where it has several parts
    vector = math.gcd(16 // size if 16 % size == 0 and size <= 8 else 4, tile.extents[axis])
    if isinstance(layout, Tensor) and layout.vector_axis == axis:
        run = math.gcd(layout.run, tile.extents[axis])
        vectors = (run >> n for n in range(run.bit_length()) if run >> n >= layout.comb)
        vector = next((v for v in vectors if tile.count % (16 * warps * v) == 0), run)   # as much for each of half of them
    thread, warp = [1, 1], [1, 1]
    if layout.vector_axis in (axis, None):
        thread[axis] = vector
        lanes = math.gcd(32, tile.extents[axis] // vector)
        warp[axis], warp[1 - axis] = lanes * vector, math.gcd(32 // lanes, tile.extents[1 - axis])
    else:                                                 # transposed on the way: lanes along global lines
        thread[axis] = vector
        warp[axis], warp[1 - axis] = vector, math.gcd(32, tile.extents[1 - axis])
    return tuple(Tile(**dict(zip(tile.names, extents))) for extents in (thread, warp))     # type: ignore[return-value]


def split(values: dict[str, Any]) -> None:
    """Shared layouts of real parts as those of numbers, in place."""
    algebra = values["operator"]
    for name in "ab":
        shared = values[f"shared_{name}_layout"]
        if isinstance(shared, Swizzled) and shared.dtype in part_dtypes(values[f"global_{name}_layout"].dtype):
            values[f"shared_{name}_layout"] = algebra.split(shared, algebra.number_dtype(shared.dtype))


__all__ = ["LEAST_STAGES", "assumed_spec", "complete"]
