"""Element-wise epilogues without operands: functions, activations, masks by coordinate, narrow results."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit import activations
from gemmkit.components import Scalar
from gemmkit.epilogues.base import Epilogue
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.given import function_given, required
from gemmkit.lang.records import device_dtype
from gemmkit.lang.returned import truth
from gemmkit.ptx.saturate import saturate
from gemmkit.transforms.base import check_of_elements, takes_coordinates


@dataclass(frozen=True)
class Elementwise(Epilogue):
    """Applies a plain Python function ``f(x)``, ``f(x, m, n)`` or ``f(x, m, n, batch)`` to every element of D.

    Arrays and NumPy scalars that the function captured are kernel arguments.

    >>> Elementwise(lambda x, m, n: x + 10 * m + n)(0.5, 1, 2)
    12.5
    """

    f: Any

    def __post_init__(self) -> None:
        check_of_elements(self.f, "epilogues.Elementwise")
        given = function_given(self.f, "Elementwise", "f", (1, 3, 4), "f(x) or f(x, m, n), a function of x or of x, m, n")
        object.__setattr__(self, "f", given)

    @property
    def with_batch(self) -> bool:
        return required(self.f) == 4

    def in_product(self, x: Any, m: int, n: int, batch: int) -> Any:
        return self.f(x, m, n, batch)

    @property
    def with_coordinates(self) -> bool:
        return takes_coordinates(self.f, "Elementwise")

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return self.f(x, m, n) if self.with_coordinates else self.f(x)


@dataclass(frozen=True)
class ReLU(Epilogue):
    """max(x, 0)."""

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return activations.relu(x)


@dataclass(frozen=True)
class GELU(Epilogue):
    """The Gaussian error linear unit; ``form`` is "erf" (itself) or "tanh" (the usual approximation)."""

    form: str = "erf"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in ("erf", "tanh"):
            raise ValueError(f'GELU(form={self.form!r}): "erf" or "tanh" is needed')

    @property
    def is_exact(self) -> bool:
        return self.form == "erf"

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return activations.gelu(x) if self.is_exact else activations.gelu_tanh(x)


@dataclass(frozen=True)
class SiLU(Epilogue):
    """x / (1 + exp(-x))."""

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return activations.silu(x)


@dataclass(frozen=True)
class Tanh(Epilogue):
    """The hyperbolic tangent."""

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return activations.tanh(x)


@dataclass(frozen=True)
class Clamp(Epilogue):
    """min(max(x, low), high), with run-time bounds.

    >>> Clamp(0.0, 6.0)(7.5, 0, 0)
    6.0
    """

    low: Scalar
    high: Scalar

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return min(max(x, self.low), self.high)


@dataclass(frozen=True)
class Where(Epilogue):
    """x where ``mask(m, n)`` is true, else ``value``: a mask by global row and column.

    >>> band = Where(lambda m, n: abs(m - n) <= 1, 0.0)
    >>> band(2.5, 3, 4), band(2.5, 3, 5)
    (2.5, 0.0)
    """

    mask: Any
    value: Scalar

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mask", function_given(self.mask, "Where", "mask", (2,), "a function of m, n"))

    def __call__(self, x: Any, m: int, n: int) -> Any:
        if truth(self, "mask", self.mask(m, n)):
            return x
        return self.value


@dataclass(frozen=True)
class Causal(Epilogue):
    """x where n <= m + ``offset``, else ``value``: what a query may see of the keys.

    ``offset`` is a run-time number: with a cache of keys, how many came before the first query.

    >>> [Causal()(1.0, 1, n) for n in range(3)]
    [1.0, 1.0, -inf]
    """

    value: Scalar = float("-inf")
    offset: Scalar = 0

    def __call__(self, x: Any, m: int, n: int) -> Any:
        if n <= m + self.offset:
            return x
        return self.value


@dataclass(frozen=True)
class Saturate(Epilogue):
    """Converts to ``dtype``, clamped to what it holds: the end of a quantised product.

    Floats become the nearest integers, ties to even; what is too large or too small, infinities included, becomes the
    largest or smallest number of the dtype (of a float: the largest finite one), and NaN becomes 0 (of a float: stays NaN).
    Raises TypeError for a dtype that is no integer and no float, or that device code does not have.

    >>> from gemmkit.epilogues import Scale
    >>> int8 = Scale(0.5) | Saturate("int8")
    >>> [int(int8(np.int32(x), 0, 0)) for x in (5, 7, 1000, -1000)]
    [2, 4, 127, -128]
    """

    dtype: Any

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
            known = dtype.kind not in "bcO" and dtype.names is None and device_dtype(dtype) is not None
        except TypeError:
            known = False
        if not known:
            raise TypeError(f"Saturate(dtype={self.dtype!r}): an integer or a float that device code has is needed, for "
                            "example 'int8'")
        object.__setattr__(self, "dtype", dtype)

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return saturate(self.dtype, x)

    @property
    def result_dtype(self) -> Any:
        return self.dtype
