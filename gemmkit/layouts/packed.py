"""D whose elements are made of neighbours in a row, as int4 are packed into bytes."""

from __future__ import annotations

from gemmkit.lang.component_class import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts.base import Layout
from gemmkit.layouts.fewer import FewerColumns
from gemmkit.layouts.plain import Plain
from gemmkit.runtime.arrays import ArrayInfo

__all__ = ["PAIR", "Packed"]

PAIR = 2                               # neighbours that a thread of every kernel holds


@dataclass(frozen=True)
class Packed(FewerColumns):
    """D of half as many columns as the kernel computes, stored in the order of ``layout``: coordinates are those of the
    array. A configuration whose epilogue is a `gemmkit.epilogues.Pack` makes one of its ``global_d_layout``.

    Raises ConfigError for a layout that is not plain.
    """

    packed = PAIR

    def __init__(self, layout: Layout):
        if not isinstance(layout, Plain):
            raise ConfigError(f"global_d_layout={layout!r}: packed results go into a plain matrix (RowMajor, ColMajor); "
                              "those of a fold are packed by the fold's function")
        for name, value in dict(dtype=layout.dtype, layout=layout).items():
            object.__setattr__(self, name, value)

    def stored_columns(self, columns: int) -> int:
        return columns // PAIR

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0], array.shape[1] * PAIR
