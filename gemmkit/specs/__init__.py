"""Specs and schedules: how a product is decomposed, down to the instruction, as device code.

* Shapes, tensors, thread tensors and specs are Graphene's (Hagedorn et al., ASPLOS 2023);
* schedules are Fireiron's (Hagedorn et al., PACT 2020).

Nothing is compiled by a compiler of their own: a decomposition is a component whose methods are device code.
"""

from __future__ import annotations

from gemmkit.specs import shapes
from gemmkit.specs.forms import FR, GL, RF, SH, Form, T
from gemmkit.specs.shapes import ALL, Shape, ShapeError, Step, local
from gemmkit.specs.static import traced
from gemmkit.specs.tensors import Tensor, TensorError, on
from gemmkit.specs.tensors import allocate as Allocate
from gemmkit.specs.threads import THREAD, WARP, Blocks, Threads, blocks, threads

shape = traced(shapes.shape)

__all__ = ["ALL", "FR", "GL", "RF", "SH", "THREAD", "WARP", "Allocate", "Blocks", "Form", "Shape", "ShapeError", "Step", "T",
           "Tensor", "TensorError", "Threads", "blocks", "local", "on", "shape", "threads"]
