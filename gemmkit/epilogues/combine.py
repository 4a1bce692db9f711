"""What a reduction computes: states of values, and an associative function of two of them.

`gemmkit.epilogues.reductions` has those with names.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.components import Component, with_fields
from gemmkit.kernels.common.rules import rule
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.given import function_given, required
from gemmkit.lang.records import device_dtype, part_dtypes
from gemmkit.lang.returned import number
from gemmkit.lang.values import convert

__all__ = ["Combine", "working"]

MOST_PARTS = 4                         # of a state


@dataclass(frozen=True)
class Combine(Component):
    """A reduction of one's own: ``combine(a, b)`` of two states is a state.

    Args:
        combine: device code; associative and commutative, for values meet in the order of the kernel's threads (which is
            the same every time).
        identity: what changes nothing, a number or a tuple of a state's parts: what an empty row gives. Where states are
            whole numbers, infinity is their type's largest and -infinity its smallest.
        of: the state of one value, ``of(x)`` or ``of(x, m, n)``; by default x itself.
        result: what is stored of the last state, ``result(state)``; by default the state itself.
        dtype: of a state. Of several parts, a structured dtype of up to 4 numbers of one size,
            ``[("largest", "f4"), ("place", "i4")]``: states are then read by number or name, ``a[0]`` or ``a.largest``, and
            made as tuples. By default the accumulator's type or that of ``out``, the wider of them.

    Raises TypeError for what is no function of as many arguments, ValueError for a dtype or an identity of other parts.

    The product of a row's values:

    >>> import numpy as np, gemmkit as gk
    >>> a, product = np.float32([[1, 2], [3, 4]]), np.empty(2, np.float32)
    >>> times = gk.epilogues.Combine(lambda a, b: a * b, 1)
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), epilogue=gk.epilogues.RowReduce(product, times)).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    >>> product.tolist()
    [2.0, 12.0]
    """

    combine: Any
    identity: Any
    of: Any = None
    result: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        fields = dict(combine=function_given(self.combine, "Combine", "combine", (2,), "f(a, b), a function of two states,"))
        if self.of is not None:
            fields["of"] = function_given(self.of, "Combine", "of", (1, 3), "f(x) or f(x, m, n), a function of a value,")
        if self.result is not None:
            fields["result"] = function_given(self.result, "Combine", "result", (1,), "f(state)")
        if self.dtype is not None:
            fields["dtype"] = _state_dtype(self.dtype)
        count = len(self.identity) if isinstance(self.identity, tuple) else 1
        parts = 1 if self.dtype is None else len(part_dtypes(fields["dtype"]))
        if count != parts:
            raise ValueError(f"Combine(identity={self.identity!r}): it has {count} parts, and a state of "
                             f"dtype={self.dtype!r} has {parts}; give both of one kind, for example identity=(0.0, 0) with "
                             'dtype=[("value", "f4"), ("place", "i4")]')
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # -- device methods -----------------------------------------------------------------------------------------------

    def state_of(self, dtype: Any, x: Any, m: int, n: int) -> Any:
        """The state of a value."""
        if self.of is None:
            return convert(dtype, x)
        if self.has_coordinates:
            return convert(dtype, self.of(x, m, n))
        return convert(dtype, self.of(x))

    def both(self, dtype: Any, a: Any, b: Any) -> Any:
        """The state of two."""
        return convert(dtype, self.combine(a, b))

    def value_of(self, state: Any) -> Any:
        """What is stored of a state."""
        if self.result is None:
            return state
        return number(self, "result", self.result(state), state)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def has_coordinates(self) -> bool:
        return required(self.of) == 3

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        """The dtype of states for sums of ``accumulator`` and an array of ``out``."""
        return self.dtype if self.dtype is not None else working(accumulator, out)

    def made(self, state: np.dtype) -> np.dtype | None:
        """The dtype of what is stored; None where only the function knows."""
        return state if self.result is None else None

    def of_states(self, state: np.dtype) -> Combine:
        """The reduction, with its identity as states of a dtype have it: of whole numbers infinity is the largest.

        Raises ConfigError where a state cannot hold it.
        """
        given = self.identity if isinstance(self.identity, tuple) else (self.identity,)
        held = tuple(self._held(part, dtype, state) for part, dtype in zip(given, part_dtypes(state), strict=True))
        return with_fields(self, dict(identity=held if isinstance(self.identity, tuple) else held[0]))

    def _held(self, part: Any, dtype: np.dtype, state: np.dtype) -> Any:
        if dtype.kind not in "iu":
            return part
        limits = np.iinfo(dtype)
        if part in (math.inf, -math.inf):
            return int(limits.max if part > 0 else limits.min)
        rule(part == part and part == int(part) and limits.min <= part <= limits.max, "epilogue", self,
             f"its identity {self.identity!r} is no value of states of {state}; a whole number from {limits.min} to "
             f"{limits.max}, infinity for the largest, or dtype= of floats is needed")
        return int(part)


def _state_dtype(given: Any) -> np.dtype:
    try:
        dtype = device_dtype(given)
    except TypeError as error:
        raise TypeError(f"Combine(dtype={given!r}): {error}") from None
    if len(part_dtypes(dtype)) > MOST_PARTS or part_dtypes(dtype)[0].itemsize not in (2, 4, 8):
        raise ValueError(f"Combine(dtype={given!r}): 1 to {MOST_PARTS} numbers of 2, 4 or 8 bytes are needed")
    return dtype


def working(accumulator: np.dtype, out: np.dtype) -> np.dtype:
    """The type in which values are combined: NumPy's common one, of narrower floats float32, of narrower integers int32."""
    wide = np.dtype(np.float32) if accumulator.itemsize < 4 and accumulator.kind not in "iub" else accumulator
    if out.names is not None or wide.names is not None:
        return wide
    holds = out.kind in "fc" or (out.kind in "iu" and wide.kind in "iu")
    common = np.result_type(wide, out) if holds and out.itemsize >= wide.itemsize else wide
    return np.dtype(np.int32) if common.kind in "iub" and common.itemsize < 4 else common
