"""Layouts: where the elements of operands come from and go to, in global and in shared memory."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = [
    "ArrayLayout", "Boxed", "ColMajor", "ColumnInterleaved", "Concat", "Diagonal", "DiagonalMatrix", "Discard",
    "Discarded", "Embedded", "Folded", "Gather", "Gathered", "Generated", "GeneratedMatrix", "GlobalLayout",
    "GroupQuantised", "Im2col", "Interleaved", "InterleavedColumns", "Joined", "Layout", "Matricised", "Matrix", "Packed",
    "Padded", "Plain", "Planar", "Planes", "Positions", "PositionsAcross", "ResultLayout", "RowMajor", "Scatter",
    "Scattered", "SharedLayout", "Sliding", "Swizzled", "Symmetric", "SymmetricMatrix", "Triangular", "TriangularMatrix",
    "Zero",
]

if TYPE_CHECKING:
    from gemmkit.layouts.base import ArrayLayout, GlobalLayout, Layout, ResultLayout, SharedLayout
    from gemmkit.layouts.joined import ColumnInterleaved, Concat, Folded, InterleavedColumns, Joined
    from gemmkit.layouts.matrices import (
        DiagonalMatrix,
        Discard,
        Gather,
        Gathered,
        GeneratedMatrix,
        Matrix,
        Scatter,
        Scattered,
        SymmetricMatrix,
        TriangularMatrix,
    )
    from gemmkit.layouts.plain import Boxed, ColMajor, Discarded, Packed, Padded, Plain, RowMajor, Sliding, Swizzled, Zero
    from gemmkit.layouts.planes import Embedded, Interleaved, Planar, Planes
    from gemmkit.layouts.quantised import GroupQuantised
    from gemmkit.layouts.structured import Diagonal, Generated, Symmetric, Triangular
    from gemmkit.layouts.tensor import Im2col, Matricised, Positions, PositionsAcross
else:
    __getattr__, __dir__ = public_names(globals())
