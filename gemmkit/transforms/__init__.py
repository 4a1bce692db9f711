"""Transforms: element-wise functions on the way between global memory, shared memory and registers."""

from gemmkit.transforms.base import Composed, Elementwise, Identity, Staged, Transform

__all__ = ["Composed", "Elementwise", "Identity", "Staged", "Transform"]
