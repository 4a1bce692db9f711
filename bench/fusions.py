"""What is computed beside the plain product: by which components, what must come out, and of which arrays.

Each work of `WORKS` says which operands it takes beyond A and B, which keywords make gemmkit compute it, and what the result
is in float64. The transforms and the Toeplitz layout are as a user would write them; the epilogues are gemmkit's.

| work | D |
|---|---|
| matmul | A B |
| relu | the ReLU of A B |
| bias, bias relu | A B + bias; its ReLU |
| bias relu c | relu(A B + bias + relu(C)) |
| c | A B + C |
| gelu residual | GELU(A B) + R (the tanh form, which is cuBLASLt's) |
| relu a, add b | relu(A + 1) B; A (B + 1) |
| table2 | relu(relu(A + 1) (B + 1) + bias + relu(C)): the last row of the paper's Table 2 |
| toeplitz | A B, where A is Toeplitz and only its M + K - 1 numbers are in memory |
| diagonal, dense diagonal | A B, where A is diagonal (B is), and only the diagonal is in memory |
| lower, upper | A B, where A is triangular; its other half is not read |
| gram | A A^T, of which one half is computed and both are stored |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemmkit import transforms
from gemmkit.epilogues import GELU, Bias, ReLU, Residual
from gemmkit.layouts import Diagonal, Layout, Symmetric, Triangular
from gemmkit.plans.problem import layout_of
from gemmkit.runtime.arrays import describe

Wide = Callable[..., Any]  # wide(array, rows=None): the array, or some of its rows, in float64


@dataclass(frozen=True)
class Toeplitz(Layout):
    """a[m, k] = data[m - k + K - 1], never materialised."""

    def element(self, data: Any, m: int, k: int, shape: Any) -> Any:
        return data[m - k + shape.K - 1]


def plus_one(x: Any) -> Any:
    return x + 1


def relu(x: Any) -> Any:
    return max(x, 0)


def relu_plus_one(x: Any) -> Any:
    return max(x + 1, 0)


@dataclass
class Operands:
    """The arrays of one input set. `out` is ours, `peer_out` the peer's; what a work does not take is None.

    a (M, K), b (K, N), c and residual (M, N), bias (N,), diagonals (M + K - 1,), diagonal (K,).
    """

    a: Any
    b: Any
    out: Any
    peer_out: Any
    c: Any = None
    bias: Any = None
    residual: Any = None
    diagonals: Any = None
    diagonal: Any = None


class Fusion(ABC):
    """What is computed; the plain product unless a method says otherwise."""

    name: str
    takes: tuple[str, ...] = ()  # operands beyond A and B

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        """The keywords of `gemmkit.plan`; ``dtype`` is that of the operands, as NumPy has it."""
        return {}

    @abstractmethod
    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        """The given rows of D in float64."""

    def elements(self, m: int, n: int, k: int) -> int:
        """Of A and B, as many as ours reads."""
        return (m + n) * k

    def left(self, x: Operands) -> Any:
        """The array that is `gemmkit.plan`'s a."""
        return x.a

    def right(self, x: Operands) -> Any:
        """The array that is `gemmkit.plan`'s b."""
        return x.b

    def added(self, x: Operands) -> Any:
        """The array that is `gemmkit.plan`'s c."""
        return None

    def materialise(self, x: Operands, backend: Any) -> None:  # noqa: B027
        """Put into memory the operands that the peer multiplies and that ours knows by their structure."""


class Matmul(Fusion):
    name = "matmul"

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return wide(x.a, rows) @ wide(x.b)


class AddReLU(Matmul):
    name = "relu"

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"epilogue": ReLU()}

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return super().reference(x, wide, rows).clip(0)


class AddBias(Matmul):
    name, takes = "bias", ("bias",)

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"epilogue": Bias(x.bias)}

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return super().reference(x, wide, rows) + wide(x.bias)


class AddBiasReLU(AddBias):
    name = "bias relu"

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"epilogue": Bias(x.bias) | ReLU()}

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return super().reference(x, wide, rows).clip(0)


class AddC(Matmul):
    name, takes = "c", ("c",)

    def added(self, x: Operands) -> Any:
        return x.c

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return super().reference(x, wide, rows) + wide(x.c, rows)


class GELUAndResidual(Matmul):
    name, takes = "gelu residual", ("residual",)

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"epilogue": GELU("tanh") | Residual(x.residual)}

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        y = super().reference(x, wide, rows)
        twice_u = math.sqrt(8 / math.pi) * (y + 0.044715 * y**3)
        return y / (1 + math.e ** (-twice_u).clip(None, 700)) + wide(x.residual, rows)


class AddBiasReLUC(Matmul):
    """ReLU on C and D."""

    name, takes = "bias relu c", ("c", "bias")

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"transform_global_to_shared_c": transforms.Map(relu), "epilogue": Bias(x.bias) | ReLU()}

    def added(self, x: Operands) -> Any:
        return x.c

    def product(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return super().reference(x, wide, rows)

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return (self.product(x, wide, rows) + wide(x.bias) + wide(x.c, rows).clip(0)).clip(0)


class TransformA(Matmul):
    name = "relu a"

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"transform_global_to_shared_a": transforms.Map(relu_plus_one)}

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return (wide(x.a, rows) + 1).clip(0) @ wide(x.b)


class TransformB(Matmul):
    name = "add b"

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"transform_global_to_shared_b": transforms.Map(plus_one)}

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return wide(x.a, rows) @ (wide(x.b) + 1)


class Table2(AddBiasReLUC):
    name = "table2"

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {
            "transform_global_to_shared_a": transforms.Map(relu_plus_one),
            "transform_global_to_shared_b": transforms.Map(plus_one),
            **super().keywords(x, dtype),
        }

    def product(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return (wide(x.a, rows) + 1).clip(0) @ (wide(x.b) + 1)


class ToeplitzA(Matmul):
    name, takes = "toeplitz", ("diagonals",)

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        (k, n), m = x.b.shape, x.out.shape[0]
        return {"global_a_layout": Toeplitz(dtype), "gemm_shape": {"M": int(m), "N": int(n), "K": int(k)}}

    def left(self, x: Operands) -> Any:
        return x.diagonals

    def materialise(self, x: Operands, backend: Any) -> None:
        x.a = backend.toeplitz(x.diagonals, *x.a.shape)


class DiagonalA(Matmul):
    name, takes = "diagonal", ("diagonal",)

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"global_a_layout": Diagonal(dtype)}

    def elements(self, m: int, n: int, k: int) -> int:
        return k + k * n

    def left(self, x: Operands) -> Any:
        return x.diagonal

    def materialise(self, x: Operands, backend: Any) -> None:
        x.a = backend.diagonal_matrix(x.diagonal)


class DiagonalB(Matmul):
    name, takes = "dense diagonal", ("diagonal",)

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        return {"global_b_layout": Diagonal(dtype)}

    def elements(self, m: int, n: int, k: int) -> int:
        return m * k + k

    def right(self, x: Operands) -> Any:
        return x.diagonal

    def materialise(self, x: Operands, backend: Any) -> None:
        x.b = backend.diagonal_matrix(x.diagonal)


class TriangularA(Matmul):
    """The peer's matrix has zeros in its other half, with which it draws less power and runs faster."""

    def __init__(self, half: str):
        self.name = half

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        layout: Any = layout_of(describe(x.a, "a"), "a")
        return {"global_a_layout": Triangular(layout, self.name)}

    def materialise(self, x: Operands, backend: Any) -> None:
        x.a = backend.half(x.a, self.name)


class Gram(Matmul):
    """The peer multiplies the same array and its transposed view."""

    name = "gram"

    def keywords(self, x: Operands, dtype: Any) -> dict[str, Any]:
        layout: Any = layout_of(describe(x.out, "out"), "out")
        return {"global_d_layout": Symmetric(layout, "both")}

    def elements(self, m: int, n: int, k: int) -> int:
        return m * k

    def right(self, x: Operands) -> Any:
        return x.a.T

    def reference(self, x: Operands, wide: Wide, rows: Any) -> Any:
        return wide(x.a, rows) @ wide(x.a).T

    def materialise(self, x: Operands, backend: Any) -> None:
        x.b = x.a.T


_ALL: tuple[Fusion, ...] = (
    Matmul(), AddReLU(), AddBias(), AddBiasReLU(), AddBiasReLUC(), AddC(), GELUAndResidual(), TransformA(), TransformB(),
    Table2(), ToeplitzA(), DiagonalA(), DiagonalB(), TriangularA("lower"), TriangularA("upper"), Gram(),
)  # fmt: skip
WORKS = {work.name: work for work in _ALL}
