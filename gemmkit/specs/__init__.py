"""Specs and schedules: how a product is decomposed, down to the instruction, as device code.

* Shapes, tensors, thread tensors and specs are Graphene's (Hagedorn et al., ASPLOS 2023);
* schedules are Fireiron's (Hagedorn et al., PACT 2020).

Nothing is compiled by a compiler of their own: a decomposition is a component whose methods are device code.
"""

from __future__ import annotations

from gemmkit import shapes
from gemmkit.lang.static import traced
from gemmkit.shapes import ALL, Shape, ShapeError, Step, local
from gemmkit.specs import moves, pointwise, products
from gemmkit.specs.accesses import NoAtom, instruction, spec
from gemmkit.specs.lower import kernel
from gemmkit.specs.moves import wait
from gemmkit.specs.tensors import (
    FR,
    GL,
    RF,
    SH,
    THREAD,
    WARP,
    WARPGROUP,
    Blocks,
    Form,
    T,
    Tensor,
    TensorError,
    Threads,
    blocks,
    cdiv,
    on,
    threads,
)
from gemmkit.specs.tensors import allocate as Allocate

shape = traced(shapes.shape)

Move = spec("Move", moves.__doc__)
CopyAsync = spec("CopyAsync", moves.__doc__)
Arrive = spec("Arrive", moves.__doc__)
Await = spec("Await", moves.__doc__)
MatMul = spec("MatMul", products.__doc__)
MatMulAsync = spec("MatMulAsync", products.__doc__)
Init = spec("Init", pointwise.__doc__)
UnaryPointwise = spec("UnaryPointwise", pointwise.__doc__)
BinaryPointwise = spec("BinaryPointwise", pointwise.__doc__)
Reduction = spec("Reduction", pointwise.__doc__)
Shfl = spec("Shfl", pointwise.__doc__)

__all__ = [
    "ALL",
    "FR",
    "GL",
    "RF",
    "SH",
    "THREAD",
    "WARP",
    "WARPGROUP",
    "Allocate",
    "Arrive",
    "Await",
    "BinaryPointwise",
    "Blocks",
    "CopyAsync",
    "Form",
    "Init",
    "MatMul",
    "MatMulAsync",
    "Move",
    "NoAtom",
    "Reduction",
    "Shape",
    "ShapeError",
    "Shfl",
    "Step",
    "T",
    "Tensor",
    "TensorError",
    "Threads",
    "UnaryPointwise",
    "blocks",
    "cdiv",
    "instruction",
    "kernel",
    "local",
    "on",
    "shape",
    "threads",
    "wait",
]
