"""Layouts: where the elements of operands come from and go to, in global and in shared memory."""

from typing import TYPE_CHECKING

from gemmkit.lang.later import public_names

__all__ = ["ArrayLayout", "Boxed", "Braided", "ColMajor", "Diagonal", "Embedded", "Folded", "Gathered", "Generated",
           "GlobalLayout", "GroupQuantised", "Interleaved", "Joined", "Layout", "Packed", "Padded", "Plain", "Planar",
           "Planes", "ResultLayout", "RowMajor", "Scattered", "SharedLayout", "Swizzled", "Symmetric", "Tensor",
           "Triangular", "Zero"]

if TYPE_CHECKING:
    from gemmkit.layouts.base import ArrayLayout, GlobalLayout, Layout, ResultLayout, SharedLayout
    from gemmkit.layouts.braided import Braided, Folded
    from gemmkit.layouts.gathered import Gathered, Scattered
    from gemmkit.layouts.joined import Joined
    from gemmkit.layouts.number import Embedded, Interleaved, Planar, Planes
    from gemmkit.layouts.plain import ColMajor, Packed, Padded, Plain, RowMajor, Zero
    from gemmkit.layouts.quantised import GroupQuantised
    from gemmkit.layouts.structured import Diagonal, Generated, Symmetric, Triangular
    from gemmkit.layouts.swizzled import Boxed, Swizzled
    from gemmkit.layouts.tensor import Tensor
else:
    __getattr__, __dir__ = public_names(globals())
