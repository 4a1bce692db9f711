"""Transforms: functions of elements, applied after every load and before every store of a kernel.

A transform is a component with ``__call__(self, x)`` or ``__call__(self, x, i, j)``, where (i, j) are the element's
**global** row and column in its operand; with ``__call__(self, x, i, j, batch)`` it is told the number of the product in a
stack, too (0 without one). Its result is converted to the type of where it goes next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from gemmkit.components import Component
from gemmkit.lang.aggregates import convert
from gemmkit.lang.checks import dtype_given, function_given, number, required
from gemmkit.lang.components import ComponentType, dataclass
from gemmkit.lang.host import Numeric
from gemmkit.lang.numba_hooks import atom, signature
from gemmkit.lang.registers import call_function


def takes_coordinates(function: Callable[..., Any], what: str) -> bool:
    """Whether a function is ``f(x, i, j)`` or ``f(x, i, j, batch)`` rather than ``f(x)``; raises TypeError for any other
    signature."""
    count = required(function)
    if count not in (1, 3, 4):
        raise TypeError(f"{what}: {function!r} {count if isinstance(count, str) else f'takes {count} arguments'}; f(x) or "
                        "f(x, i, j) is needed")
    return count != 1


def check_of_elements(function: Callable[..., Any], what: str) -> None:
    """Raise TypeError for an epilogue that sees more than an element, or stores D: as a function of one it does nothing."""
    if getattr(function, "finishes_blocks", False) or getattr(function, "stores_itself", False):
        raise TypeError(f"{what}({function!r}): it is not a function of one element (it sees rows, neighbours or parts of "
                        "D, or stores D); give it as the epilogue of a product, alone or in a chain by |")


@dataclass(frozen=True)
class Transform(Component):
    """Base class of transforms.

    >>> @dataclass(frozen=True)
    ... class Scale(Transform):
    ...     by: float
    ...     def __call__(self, x):
    ...         return x * self.by
    >>> Scale(2.0)(3.0)
    6.0
    """

    device_methods = ("__call__", "of", "at")

    def __or__(self, other: Any) -> Transform:
        """``self | other``: this transform, then the other."""
        return ComposedTransform(self, other)

    @cached_property
    def is_identity(self) -> bool:
        return False

    @cached_property
    def with_coordinates(self) -> bool:
        """Whether ``__call__`` wants the element's row and column."""
        if not callable(self):
            raise TypeError(f"{type(self).__qualname__} has no __call__(self, x) or __call__(self, x, i, j)")
        return takes_coordinates(self.__call__, type(self).__qualname__)


    @cached_property
    def with_batch(self) -> bool:
        """Whether ``__call__`` wants the number of the product, too."""
        return self.with_coordinates and required(self.__call__) == 4          # type: ignore[operator]

    def of(self, x: Numeric) -> Any:
        """The transform of a value, without coordinates (what device code calls)."""
        return self(x)                                                         # type: ignore[operator]

    def at(self, x: Numeric, i: int, j: int) -> Any:
        """The transform of the value in row i, column j."""
        return self(x, i, j)                                                   # type: ignore[operator]

    def in_product(self, x: Numeric, i: int, j: int, batch: int) -> Any:
        """The same in a product of a stack, for a transform that asks for its number."""
        return self(x, i, j, batch)                                            # type: ignore[operator]


def _type_transformed(context: Any, transform: Transform, x: Numeric, i: int, j: int) -> Any:
    if not isinstance(transform, ComponentType):
        return None
    with_coordinates = transform.skeleton.with_coordinates
    method = context.resolve_getattr(transform, "at" if with_coordinates else "of")
    args = (x, i, j) if with_coordinates else (x,)
    inner = context.resolve_function_type(method, args, {})
    if inner is None:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given = [c.cast(b, value, t, to) for value, t, to in zip(v[1:], args, inner.args)]
        return call_function(c, b, method, v[0], inner, given)

    return signature(inner.return_type, transform, x, i, j), codegen


@atom(_type_transformed)
def _called(transform: Transform, x: Numeric, i: int, j: int) -> Any:
    return transform.at(x, i, j) if transform.with_coordinates else transform.of(x)


def transformed(transform: Transform, x: Numeric, i: int, j: int) -> Any:
    """A transform of one element; the coordinates are given only to a transform that wants them. What it returns is a
    number: a tuple of parts, for an element that has as many, is made one."""
    return number(transform, "__call__", _called(transform, x, i, j), x)


@dataclass(frozen=True)
class ComposedTransform(Transform):
    """``first``, then ``second``: what ``first | second`` makes. Either may be composed itself.

    >>> (Map(lambda x: x + 1) | Map(lambda x, i, j: x * j))(2, 0, 5)
    15
    """

    first: Transform
    second: Transform

    def __post_init__(self) -> None:
        for name, part in (("first", self.first), ("second", self.second)):
            if not isinstance(part, Transform) or not callable(part):
                raise TypeError(f"{name}={part!r} in a composition of transforms: a Transform is needed; wrap a function in "
                                "transforms.Map")

    def __call__(self, x: Numeric, *at: Any) -> Any:
        return self.at(x, *at) if at else self.of(x)

    def of(self, x: Numeric) -> Any:
        return transformed(self.second, transformed(self.first, x, 0, 0), 0, 0)

    def at(self, x: Numeric, i: int, j: int) -> Any:
        return transformed(self.second, transformed(self.first, x, i, j), i, j)

    @cached_property
    def is_identity(self) -> bool:
        return self.first.is_identity and self.second.is_identity

    @cached_property
    def with_coordinates(self) -> bool:
        return self.first.with_coordinates or self.second.with_coordinates

    @cached_property
    def with_batch(self) -> bool:
        return self.first.with_batch or self.second.with_batch

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@dataclass(frozen=True)
class Staged(ComposedTransform):
    """``first``, whose result is converted to ``dtype``, then ``second``: as with memory of that dtype between them.

    >>> import numpy as np
    >>> between = Staged(Map(lambda x: x + 1), Map(lambda x: x - 1), np.dtype(np.float16))
    >>> float(between(np.float32(4000.25)))
    4000.0
    """

    dtype: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype_given(self.dtype, "Staged"))

    def of(self, x: Numeric) -> Any:
        return transformed(self.second, convert(self.dtype, transformed(self.first, x, 0, 0)), 0, 0)

    def at(self, x: Numeric, i: int, j: int) -> Any:
        return transformed(self.second, convert(self.dtype, transformed(self.first, x, i, j)), i, j)


@dataclass(frozen=True)
class Identity(Transform):
    """Passes every element on."""

    is_identity = True

    def __call__(self, x: Numeric) -> Any:
        return x


@dataclass(frozen=True)
class Map(Transform):
    """Applies a plain Python function ``f(x)``, ``f(x, i, j)`` or ``f(x, i, j, batch)`` to every element.

    Arrays and NumPy scalars that the function captured are kernel arguments: a new array of the same kind compiles
    nothing.

    >>> Map(lambda x: max(x, 0))(-3)
    0
    """

    f: Any

    def __post_init__(self) -> None:
        check_of_elements(self.f, "transforms.Map")
        given = function_given(self.f, "Map", "f", (1, 3, 4), "f(x) or f(x, i, j), a function of x or of x, i, j")
        object.__setattr__(self, "f", given)

    def __call__(self, *x: Numeric) -> Any:
        return self.f(*x)

    def of(self, x: Numeric) -> Any:
        return self.f(x)

    def at(self, x: Numeric, i: int, j: int) -> Any:
        return self.f(x, i, j)

    def in_product(self, x: Numeric, i: int, j: int, batch: int) -> Any:
        return self.f(x, i, j, batch)

    @cached_property
    def with_coordinates(self) -> bool:
        return takes_coordinates(self.f, "Map")

    @cached_property
    def with_batch(self) -> bool:
        return required(self.f) == 4
