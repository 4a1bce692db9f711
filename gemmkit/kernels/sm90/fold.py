"""Stores of folded products in `warp_specialised`: a consumer's sums of several parts become one fragment, which leaves as
any other.

A fragment of wgmma is octets of columns, and a thread has two columns of each. Those of a braid
(`gemmkit.layouts.Braided`) are the parts' in turn, or all of one part before those of the next where TMA brings them
(`gemmkit.kernels.sm90.routes.joined`): either way a thread folds values of its own. What comes of it lies in registers
as the sums of a product with a narrower tile do: the stores of `gemmkit.kernels.sm90.store` take it, at D's coordinates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gemmkit.component_products import with_number
from gemmkit.kernels.common.work import Outputs
from gemmkit.kernels.sm90.comb_store import CombStore
from gemmkit.kernels.sm90.store import (
    DirectStore,
    Part,
    Store,
    SubtileStore,
    TmaStore,
    VectorStore,
    own_column,
    own_row,
    store_fragment,
)
from gemmkit.kernels.sm90.store_choice import store_of
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.layouts import Folded
from gemmkit.layouts.braided import OCTET
from gemmkit.ptx.special import udiv
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.tiling import Tile

HELD = 4                               # values of a thread in an octet of columns: two rows of two


@dataclass(frozen=True)
class Folding(Store):
    """A store whose fragments are folded first."""

    def run(self, spec: Any, sums: tuple, outputs: Outputs, part: Part) -> None:
        shape = with_number(outputs.shape, "N", spec.d.layout.columns)
        own = Outputs(outputs.c, outputs.d, outputs.map_c, outputs.map_d, outputs.batch, shape)
        place = Part(part.group, part.m, udiv(part.n, spec.b.layout.slots), part.turn)
        each(store_fragment, apply(fold_fragment, sums, spec, own, place), spec, own, place)


def fold_fragment(sums: tuple, i: int, spec: Any, outputs: Outputs, part: Part) -> tuple:
    """The ``i``-th fragment of D; ``part`` is where the first begins."""
    return join(generate(spec.folded_octets, fold_octets, split(sums, HELD), spec, outputs, part.m + i * 64 + own_row(),
                         part.n + own_column()))


def fold_octets(octet: int, sums: tuple, spec: Any, outputs: Outputs, row: int, column: int) -> tuple:
    """A thread's values of an octet of D's columns, from those of the same octet of each part."""
    if spec.b.route.parts_apart:
        parts = generate(spec.b.layout.parts, lambda part: sums[part * spec.folded_octets + octet])
    else:
        parts = generate(spec.b.layout.parts, lambda part: sums[octet * spec.b.layout.slots + part])
    return generate(HELD, fold_sum, parts, spec, outputs, row, column + octet * OCTET)


def fold_sum(n: int, parts: tuple, spec: Any, outputs: Outputs, row: int, column: int) -> Any:
    """Beyond D's edge f gets the coordinates of the nearest element in range."""
    values = generate(spec.b.layout.parts, lambda part: parts[part][n])
    return spec.epilogue.fold(values, min(row + n // 2 * 8, outputs.shape.M - 1), min(column + n % 2, outputs.shape.N - 1))


@dataclass(frozen=True)
class FoldingTmaStore(Folding, TmaStore):
    """TMA stores the folded subtiles."""


@dataclass(frozen=True)
class FoldingVectorStore(Folding, VectorStore):
    """Threads store lines of the folded subtiles."""


@dataclass(frozen=True)
class FoldingDirectStore(Folding, DirectStore):
    """Threads store folded pairs from their registers."""


FOLDING: dict[type[Store], Any] = {TmaStore: FoldingTmaStore, VectorStore: FoldingVectorStore,
                                   DirectStore: FoldingDirectStore}


def store_for(spec: Any, info: ArrayInfo | None, extents: tuple[int, int], barrier: int) -> Store:
    """How D leaves: a folded one as that of a product with D's own columns and what follows the fold would."""
    if not isinstance(spec.d.layout, Folded):
        return CombStore.of(spec, info, extents, barrier) or store_of(spec, info, extents, barrier)
    folded: Folded = spec.d.layout
    m, n, k = spec.block.extents
    alike = dataclasses.replace(spec, block=Tile(M=m, N=n // folded.folds, K=k), epilogue=spec.epilogue.then,
                                d=dataclasses.replace(spec.d, layout=folded.layout))
    store = store_of(alike, info, (extents[0], folded.finished_columns(extents[1])), barrier)
    if isinstance(store, SubtileStore) and alike.block.size.N // spec.exchange.slices % store.columns:
        store = DirectStore(barrier)                       # the columns that are left are fewer than a panel's
    return FOLDING[type(store)](**{field.name: getattr(store, field.name) for field in dataclasses.fields(store)})
