"""The base class of host objects that device code may hold: shapes, swizzles, thread tensors, forms of tensors.

How they are compiled is said in `gemmkit.lang.static`, which gives the class its ``__device_type__``; that is apart, so that
what the emulator and the host use of them does not wait for the compiler's modules.
"""

from __future__ import annotations

from typing import ClassVar


class Static:
    """Base class of host objects that device code may hold. The ``repr`` of one must say all that it is: kernels are
    remembered by it."""

    #: Methods that are device code, not run by the compiler.
    device_methods: ClassVar[tuple[str, ...]] = ()
