"""The tensor maps of a problem: what TMA is told of A, B and D."""

from __future__ import annotations

from dataclasses import dataclass

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.sm90.routes.tma import Tma
from gemmkit.kernels.sm90.spec import Sm90Spec
from gemmkit.kernels.sm90.store import TmaStore
from gemmkit.lang.freezing import Frozen
from gemmkit.lang.kinds import Kind, kind
from gemmkit.lang.numba_hooks import types
from gemmkit.ptx.tensor_map import TensorMapSpec
from gemmkit.ptx.tma import TensorMapType
from gemmkit.runtime.arrays import ArrayInfo, whole
from gemmkit.runtime.tensor_maps import BYTES, Encoder

NO_MAP = bytes(BYTES)


@dataclass(frozen=True)
class Map:
    """The tensor map of an operand: ``which`` is its place among a, b, c and out, ``ordinal`` that among the kernel's maps;
    ``axis`` is the one along which its elements are contiguous. Of an operand of several arrays ``part`` is the array's
    number: the others behind the operand's own are in its layout."""

    which: int
    ordinal: int
    info: ArrayInfo
    axis: int
    spec: TensorMapSpec
    part: int = 0

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
    """The maps of A, B and D, None for those that TMA does not move."""
    made: list[Map | Maps | None] = []
    moved = ((0, arrays.a, spec.a, spec.a.route), (1, arrays.b, spec.b, spec.b.route), (3, arrays.out, spec.d, spec.store))
    for which, info, operand, part in moved:
        if isinstance(part, (Tma, TmaStore)) and info is not None:
            count = sum(len(m.maps) for m in made if m is not None)
            others = part.other_arrays(operand) if isinstance(part, Tma) else []
            own = [Map(which, count + n, array, *part.map_spec(operand, array), n)
                   for n, array in enumerate((whole(info), *others))]
            made.append(own[0] if len(own) == 1 else Maps(tuple(own)))
        else:
            made.append(None)
    return tuple(made)


__all__ = ["Map", "Maps", "maps"]
