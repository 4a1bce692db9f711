"""A product whose transpose is computed: its components, which speak of rows and columns of A, B and D, for the kernel of
D^T = B^T A^T.

`gemmkit.tuning.swapped` says which products are computed so. Nothing of it is seen by the caller: an epilogue is asked
with the coordinates of D, one element at a time, for a tile of D^T is none of D in the order of its elements; a transform
with those of its operand.
"""

from __future__ import annotations

from typing import Any, cast

from gemmkit.components import with_fields
from gemmkit.config import TRANSFORMS, Config
from gemmkit.epilogues.base import ELEMENT
from gemmkit.kernels.common.elements import column_of, row_of
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.products import with_number
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import number, numbers
from gemmkit.per_product import Adapted
from gemmkit.tiling import translate
from gemmkit.transforms import Transform
from gemmkit.transforms.base import transformed

__all__ = ["EpilogueOfTranspose", "TransformOfTranspose", "for_transpose"]


@dataclass(frozen=True)
class EpilogueOfTranspose(Adapted):
    """An epilogue of D, asked by the kernel that computes D^T."""

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return number(self.epilogue, "__call__", self.epilogue(x, n, m), x)

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        turned = with_number(with_number(shape, "M", shape.N), "N", shape.M)
        return apply(finish_turned, values, self.epilogue, tile, turned)


def finish_turned(x: Any, n: int, epilogue: Any, tile: Any, shape: Any) -> Any:
    """The epilogue of a tile's n-th element, which is the element of D at the column and row that it has in D^T."""
    place = translate(ELEMENT, column_of(tile, n), row_of(tile, n))
    return numbers(epilogue, "finish", epilogue.finish((x,), place, shape), (x,))[0]


@dataclass(frozen=True)
class TransformOfTranspose(Transform):
    """A transform of elements at their coordinates, asked by the kernel that has the operand's transpose."""

    transform: Transform

    def __call__(self, x: Any, i: int, j: int) -> Any:
        return self.at(x, i, j)

    def at(self, x: Any, i: int, j: int) -> Any:
        return transformed(self.transform, x, j, i)


def for_transpose(conf: Config) -> Config:
    """The configuration of a transposed product, with adapters around components that ask for coordinates; else itself."""
    changed: dict[str, Any] = {name: TransformOfTranspose(value) for name in TRANSFORMS
                               if not (value := getattr(conf, name)).is_identity and value.with_coordinates}
    if not conf.epilogue.passes_on:
        changed["epilogue"] = EpilogueOfTranspose(conf.epilogue)
    return cast(Config, with_fields(conf, changed))
