"""The tensor maps of a problem: what TMA is told of A, B, C and D."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from gemmkit.components import at_path
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.sm90.ahead import AheadStore
from gemmkit.kernels.sm90.routes.tma import Tma
from gemmkit.kernels.sm90.spec import Sm90Spec
from gemmkit.kernels.sm90.store import TmaStore
from gemmkit.lang.freezing import Frozen
from gemmkit.lang.kinds import Kind, kind
from gemmkit.lang.numba_hooks import types
from gemmkit.ptx.tma import TensorMapType
from gemmkit.runtime.arrays import ArrayInfo, info_of, whole
from gemmkit.runtime.tensor_maps import BYTES, Encoder, TensorMapSpec

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
    def maps(self) -> tuple[Map, ...]:
        return (self,)

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


@dataclass(frozen=True)
class Maps:
    """The tensor maps of an operand of several arrays: one argument of the kernel, a tuple."""

    maps: tuple[Map, ...]

    @property
    def frozen(self) -> Frozen:
        parts = [one.frozen for one in self.maps]
        text = f"({', '.join(part.fingerprint for part in parts)})"
        made = kind(text, lambda: Kind(text, lambda: types.Tuple([part.type for part in parts])))
        return Frozen(made, text, [leaf for part in parts for leaf in part.leaves], [])


def maps(spec: Sm90Spec, arrays: Arrays) -> tuple[Map | Maps | None, ...]:
    """The maps of A, B, C (or of what comes ahead of time in its place) and D, None for those that TMA does not move."""
    store = spec.store
    found: list[list[Any]] = [
        _of_operand(0, "a", spec.a, arrays.a), _of_operand(1, "b", spec.b, arrays.b),
        [(*_ahead(spec, store, arrays), store.map_of_source)] if isinstance(store, AheadStore) else [],
        [(3, arrays.out, lambda info: store.map_spec(spec.d, info))] if isinstance(store, TmaStore) else [],
    ]
    made: list[Map | Maps | None] = []
    ordinals = count()
    for of_one in found:
        stacks = ((which, whole(info), box_of) for which, info, box_of in of_one if info is not None)
        own = tuple(Map(which, next(ordinals), stack, *box_of(stack)) for which, stack, box_of in stacks)
        made.append(None if not own else own[0] if len(own) == 1 else Maps(own))
    return tuple(made)


def _of_operand(which: int, name: str, operand: Any, info: ArrayInfo | None) -> list[Any]:
    """(which, array, what makes the box of it) of A or B, and of the arrays behind the operand's own."""
    if not isinstance(operand.route, Tma):
        return []
    others = (((name, *path), array) for path, array in operand.route.other_arrays(operand))
    return [(at, array, lambda array: operand.route.map_spec(operand, array)) for at, array in ((which, info), *others)]


def _ahead(spec: Sm90Spec, store: AheadStore, arrays: Arrays) -> tuple[Any, ArrayInfo | None]:
    """What comes ahead of time, as a map's ``which``, and its array."""
    path = store.source.array
    if path is None:
        return 2, arrays.c
    return path, info_of(at_path(spec, path))
