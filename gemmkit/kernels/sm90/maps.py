"""The tensor maps of a problem: what TMA is told of A, B, C and D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmkit.components import at_path
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.sm90.ahead import AheadStore
from gemmkit.kernels.sm90.routes.tma import Tma
from gemmkit.kernels.sm90.spec import Sm90Spec
from gemmkit.kernels.sm90.store import TmaStore
from gemmkit.lang.freezing import Frozen
from gemmkit.lang.kinds import Kind, kind
from gemmkit.ptx.tensor_map import TensorMapSpec
from gemmkit.ptx.tma import TensorMapType
from gemmkit.runtime.arrays import ArrayInfo, describe, whole
from gemmkit.runtime.tensor_maps import BYTES, Encoder

NO_MAP = bytes(BYTES)


@dataclass(frozen=True)
class Map:
    """The tensor map of an operand: ``which`` is its place among a, b, c and out, ``ordinal`` that among the kernel's maps;
    ``axis`` is the one along which its elements are contiguous. Of an array that a component holds, ``which`` are the fields
    from the specialisation to it."""

    which: int | tuple[str, ...]
    ordinal: int
    info: ArrayInfo
    axis: int
    spec: TensorMapSpec

    @property
    def frozen(self) -> Frozen:
        """The kernel's argument; its bytes are put in at each launch."""
        text = f"TensorMap({self.ordinal})"
        made = kind(text, lambda: Kind(text, lambda: TensorMapType(self.ordinal)))
        return Frozen(made, text, [("tensor_map", NO_MAP)], [])

    @property
    def encoder(self) -> Encoder:
        """From an address to the map's bytes."""
        return Encoder.of(self.spec, self.info, self.axis)


def maps(spec: Sm90Spec, arrays: Arrays) -> tuple[Map | None, ...]:
    """The maps of A, B, C (or of what comes ahead of time in its place) and D, None for those that TMA does not move."""
    a, b, store = spec.a.route, spec.b.route, spec.store
    found: list[Any] = [
        (0, arrays.a, lambda info: a.map_spec(spec.a, info)) if isinstance(a, Tma) else None,
        (1, arrays.b, lambda info: b.map_spec(spec.b, info)) if isinstance(b, Tma) else None,
        (*_ahead(spec, store, arrays), store.map_of_source) if isinstance(store, AheadStore) else None,
        (3, arrays.out, lambda info: store.map_spec(spec.d, info)) if isinstance(store, TmaStore) else None,
    ]
    made: list[Map | None] = []
    for one in found:
        if one is None or one[1] is None:
            made.append(None)
            continue
        which, info, box_of = one
        stack = whole(info)
        made.append(Map(which, sum(m is not None for m in made), stack, *box_of(stack)))
    return tuple(made)


def _ahead(spec: Sm90Spec, store: AheadStore, arrays: Arrays) -> tuple[Any, ArrayInfo | None]:
    """What comes ahead of time, as a map's ``which``, and its array."""
    path = store.source.array
    if path is None:
        return 2, arrays.c
    array = at_path(spec, path)
    return path, array if isinstance(array, ArrayInfo) else describe(array)


__all__ = ["Map", "maps"]
