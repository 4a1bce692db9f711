"""Layouts: where the elements of operands come from and go to, in global and in shared memory."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = ["ArrayLayout", "Boxed", "Braided", "ColMajor", "Diagonal", "Embedded", "Folded", "Gathered", "Generated",
           "GlobalLayout", "GroupQuantised", "Interleaved", "Joined", "Layout", "Packed", "Padded", "Plain", "Planar",
           "Planes", "ResultLayout", "RowMajor", "Scattered", "SharedLayout", "Swizzled", "Symmetric", "Tensor",
           "Triangular", "Zero"]

if TYPE_CHECKING:
    from gemmkit.layouts.base import ArrayLayout, GlobalLayout, Layout, ResultLayout, SharedLayout
    from gemmkit.layouts.gather import Gathered, Scattered
    from gemmkit.layouts.joined import Braided, Folded, Joined
    from gemmkit.layouts.plain import Boxed, ColMajor, Packed, Padded, Plain, RowMajor, Swizzled, Zero
    from gemmkit.layouts.planes import Embedded, Interleaved, Planar, Planes
    from gemmkit.layouts.quantised import GroupQuantised
    from gemmkit.layouts.structured import Diagonal, Generated, Symmetric, Triangular
    from gemmkit.layouts.tensor import Tensor
else:
    __getattr__, __dir__ = public_names(globals())
