"""Transforms: element-wise functions on the way between global memory, shared memory and registers."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = ["ComposedTransform", "Identity", "Map", "Staged", "Transform"]

if TYPE_CHECKING:
    from gemmkit.transforms.base import ComposedTransform, Identity, Map, Staged, Transform
else:
    __getattr__, __dir__ = public_names(globals())
