"""Scores of attention: what becomes of ``scale q k`` before the softmax (`gemmkit.attention`), and the contract of your own.

A plain function ``f(s, m, n)``, ``f(s, m, n, head)`` or ``f(s, m, n, head, batch)`` of a scaled score, its query and its key
will do. Arrays and NumPy scalars that it captured are arguments of the kernel. A `Score` is the same as a component.

>>> from gemmkit.lang.component_class import dataclass
>>> import gemmkit as gk
>>> @dataclass(frozen=True)
... class Distance(gk.scores.Score):
...     by: gk.Scalar
...     def __call__(self, s, m, n):
...         return s - self.by * abs(m - n)
>>> Distance(0.5)(1.0, 2, 4)
0.0
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from gemmkit import fast
from gemmkit.components import Array, Component, Scalar
from gemmkit.lang.given import function_given, required

__all__ = ["ALiBi", "Bias", "Function", "Plain", "Score", "SoftCap"]


@dataclass(frozen=True)
class Score(Component):
    """Base class of scores: ``__call__(s, m, n)``, ``(s, m, n, head)`` or ``(s, m, n, head, batch)``, device code.

    With ``real_places = True`` m and n come as float32, exact up to 2^24: converting a whole number takes a slot of the unit
    that computes exponentials, which a softmax has none of to spare.
    """

    real_places = False
    is_light = False                   # three consumers of Hopper's kernel have the registers for it (heads of 32 and 64)

    def __call__(self, s: Any, m: Any, n: Any) -> Any:
        raise NotImplementedError(f"{type(self).__qualname__} has no __call__(s, m, n)")

    @cached_property
    def is_plain(self) -> bool:
        """Whether scores stay as they are."""
        return False

    @cached_property
    def arity(self) -> int:
        """How many arguments it takes; raises TypeError for other numbers than the kernel has."""
        count = required(type(self).__call__)
        if count not in (4, 5, 6):
            said = f"takes {count - 1} arguments" if isinstance(count, int) else count
            raise TypeError(f"{type(self).__qualname__}.__call__ {said}; s, m, n, or with head, or with head and batch "
                            "behind, is needed")
        return int(count) - 1

    def at(self, s: Any, m: Any, n: Any, head: int, batch: int) -> Any:
        """The score, with the arguments that it takes: what kernels call."""
        if self.arity == 3:
            return self(s, m, n)
        if self.arity == 4:
            return self(s, m, n, head)                                                         # type: ignore[call-arg]
        return self(s, m, n, head, batch)                                                      # type: ignore[call-arg]

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        """Raise ValueError where the score's arrays do not fit so many queries, keys, heads and batch."""


@dataclass(frozen=True)
class Plain(Score):
    """Scores as they are. With ``exact`` the kernel scales them one by one, as it must for a scale that is not positive."""

    exact: bool = False

    @cached_property
    def is_plain(self) -> bool:
        return not self.exact

    def __call__(self, s: Any, m: Any, n: Any) -> Any:
        return s


@dataclass(frozen=True)
class Function(Score):
    """A plain function of a score and its place; with ``real_places`` m and n come as float32.

    >>> Function(lambda s, m, n: s - (m - n))(1.0, 5, 3)
    -1.0
    """

    f: Any
    real_places: bool = False

    def __post_init__(self) -> None:
        wanted = "a function of s, m, n, of s, m, n, head, or of s, m, n, head, batch"
        given = function_given(self.f, "score", "f", (3, 4, 5), wanted)
        object.__setattr__(self, "f", given)

    @cached_property
    def arity(self) -> int:
        return int(required(self.f))

    def __call__(self, *x: Any) -> Any:
        return self.f(*x)

    def at(self, s: Any, m: Any, n: Any, head: int, batch: int) -> Any:
        if self.arity == 3:
            return self.f(s, m, n)
        if self.arity == 4:
            return self.f(s, m, n, head)
        return self.f(s, m, n, head, batch)


@dataclass(frozen=True)
class ALiBi(Score):
    """s - slopes[head] (m - n): linear biases (Press et al., 2021). ``slopes`` is an array with an element for each head."""

    slopes: Array

    real_places = True
    is_light = True
    array_ndims = MappingProxyType({"slopes": 1})

    def __call__(self, s: Any, m: Any, n: Any, head: int) -> Any:                              # type: ignore[override]
        return s - self.slopes[head] * (m - n)

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        _check_shape(self.slopes, "slopes of ALiBi", (heads,), f"{heads} heads")


@dataclass(frozen=True)
class SoftCap(Score):
    """cap tanh(s / cap), to 2^-11 of it (`gemmkit.fast.tanh`; Gemma 2). ``cap`` is a run-time number."""

    cap: Scalar

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.cap < 2.0**126:                # the reciprocal of a larger one is no normal number
            raise ValueError(f"SoftCap(cap={self.cap!r}): a positive number below 2**126 is needed")

    def __call__(self, s: Any, m: Any, n: Any) -> Any:
        return self.cap * fast.tanh(s * fast.reciprocal(self.cap))


@dataclass(frozen=True)
class Bias(Score):
    """s + bias[head, m, n]: an array for each head."""

    bias: Array

    array_ndims = MappingProxyType({"bias": 3})

    def __call__(self, s: Any, m: Any, n: Any, head: int) -> Any:                              # type: ignore[override]
        return s + self.bias[head, m, n]

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        _check_shape(self.bias, "bias of Bias", (heads, queries, keys), f"{heads} heads, {queries} queries and {keys} keys")


def _check_shape(array: Any, name: str, wanted: tuple[int, ...], what: str) -> None:
    from gemmkit.runtime.arrays import describe

    shape = describe(array, name).shape
    if shape != wanted:
        raise ValueError(f"{name} has shape {shape}; {what} need {wanted}")
