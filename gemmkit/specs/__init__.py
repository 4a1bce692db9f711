"""Specs and schedules: how a product is decomposed, down to the instruction, as device code.

* Shapes, tensors, thread tensors and specs are Graphene's (Hagedorn et al., ASPLOS 2023);
* schedules are Fireiron's (Hagedorn et al., PACT 2020).

Nothing is compiled by a compiler of their own: a decomposition is a component whose methods are device code.
"""

from __future__ import annotations

from gemmkit.specs import shapes
from gemmkit.specs.shapes import ALL, Shape, ShapeError, Step, local
from gemmkit.specs.static import traced

shape = traced(shapes.shape)

__all__ = ["ALL", "Shape", "ShapeError", "Step", "local", "shape"]
