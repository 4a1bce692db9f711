"""Layouts: where the elements of operands come from and go to, in global and in shared memory."""

from typing import TYPE_CHECKING

from gemmkit.lang.later import public_names

__all__ = ["Boxed", "Braided", "ColMajor", "Diagonal", "Embedded", "Folded", "Gathered", "Generated", "GroupQuantised",
           "Interleaved", "Joined", "Layout", "Packed", "Padded", "Plain", "Planar", "Planes", "RowMajor", "Scattered",
           "Swizzled", "Symmetric", "Tensor", "Triangular", "Zero"]

if TYPE_CHECKING:
    from gemmkit.layouts.base import Layout
    from gemmkit.layouts.boxed import Boxed
    from gemmkit.layouts.braided import Braided, Folded
    from gemmkit.layouts.embedded import Embedded
    from gemmkit.layouts.gathered import Gathered, Scattered
    from gemmkit.layouts.generated import Generated
    from gemmkit.layouts.joined import Joined
    from gemmkit.layouts.number import Interleaved, Planar, Planes
    from gemmkit.layouts.packed import Packed
    from gemmkit.layouts.plain import ColMajor, Padded, Plain, RowMajor, Zero
    from gemmkit.layouts.quantised import GroupQuantised
    from gemmkit.layouts.structured import Diagonal, Symmetric, Triangular
    from gemmkit.layouts.swizzled import Swizzled
    from gemmkit.layouts.tensor import Tensor
else:
    __getattr__, __dir__ = public_names(globals(), {
        "base": "Layout", "boxed": "Boxed", "braided": "Braided Folded", "embedded": "Embedded",
        "gathered": "Gathered Scattered", "generated": "Generated", "joined": "Joined",
        "number": "Interleaved Planar Planes", "packed": "Packed", "plain": "ColMajor Padded Plain RowMajor Zero",
        "quantised": "GroupQuantised", "structured": "Diagonal Symmetric Triangular", "swizzled": "Swizzled",
        "tensor": "Tensor"})
