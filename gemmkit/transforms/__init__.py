"""Transforms: element-wise functions on the way between global memory, shared memory and registers."""

from gemmkit.transforms.base import Elementwise, Identity, Transform

__all__ = ["Elementwise", "Identity", "Transform"]
