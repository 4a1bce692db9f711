"""Factors of a result, alpha and beta: numbers, numbers of several parts, and those in the GPU's memory.

A number goes to the kernel as an argument. One in the GPU's memory stays there, and the epilogue loads it when the kernel
runs: nothing is copied to the host, and no stream is waited for (cuBLAS's pointer mode "device" does the same). What an
earlier kernel of the stream writes there is what counts, in a CUDA graph too.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.records import REAL_IMAG, SIGNS, TABLE, Record, metadata_of, number_dtype, part_dtypes, to_dtype
from gemmkit.lang.registers import generate
from gemmkit.lang.values import convert
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.arrays import describe, is_array
from gemmkit.runtime.views import strided


@dataclass(frozen=True)
class Parts(Component):
    """A number of several parts as an argument; ``is_not_zero`` is 0 if all of them are."""

    number: Scalar
    is_not_zero: Scalar

    stands_for_number: ClassVar[bool] = True

    is_left = True

    def value(self) -> Any:
        return self.number

    def is_zero(self) -> Any:
        return self.is_not_zero == 0


@dataclass(frozen=True)
class InMemory(Component):
    """A number in memory: ``array`` has its parts, one of a real or complex number. ``dtype`` is computed with.

    >>> held = InMemory(np.float32([2.5]), 1, np.dtype(np.float32))
    >>> float(held.value()), bool(held.is_zero())
    (2.5, False)
    """

    array: Array
    count: int
    dtype: Any

    stands_for_number: ClassVar[bool] = True

    @property
    def is_left(self) -> bool:
        """Whether it has parts, so that it stands at the left of what it multiplies."""
        return self.count > 1 and self.dtype.names is not None

    def value(self) -> Any:
        if self.count == 1:
            return convert(self.dtype, self.array[0])
        return convert(self.dtype, generate(self.count, part_of, self.array))

    def is_zero(self) -> Any:
        for n in range(self.count):
            if self.array[n] != 0:
                return False
        return True


def part_of(n: int, array: Any) -> Any:
    return array[n]


def factor(value: Any, name: str, dtype: np.dtype, device: int) -> Any:
    """Alpha or beta, the argument ``name``, as an epilogue of a C of ``dtype`` takes it: a number, `Parts` or `InMemory`.

    C is on ``device``, -1 for the host. A host array beside a C on a GPU is read here; one beside a host C, in the emulator,
    stands for one in the GPU's memory.

    Raises TypeError for what is no number of C's kind, ValueError for an array of another shape, and for a number that an
    integer C does not hold.
    """
    if isinstance(value, (int, float, complex, np.generic)):
        return _number(value, name, dtype)
    if isinstance(value, (Parts, InMemory)):
        return value
    value = getattr(value, "parts", value)                                # of a dual number
    if is_array(value):
        if isinstance(value, np.ndarray) and device >= 0:
            value = _checked(value, describe(value, name), name, dtype)[()]
            value = tuple(value) if isinstance(value, np.ndarray) else value
        elif getattr(getattr(value, "device", None), "type", None) == "cpu":                  # a tensor's
            value = value.tolist()
        else:
            return in_memory(value, name, dtype)
    if isinstance(value, (tuple, list, Record)):
        return _parts(value, name, dtype)
    return _number(value, name, dtype)


def computed_in(dtype: np.dtype) -> np.dtype:
    """The dtype that a factor of a C of ``dtype`` has: C's own, with parts of float32 at least where they are floats."""
    part = part_dtypes(dtype)[0]
    wide = part if part.kind in "iu" or part == np.float64 else np.dtype(np.float32)
    if dtype.kind == "c" or dtype.names is None:
        return dtype if dtype.kind == "c" else wide
    metadata = metadata_of(dtype)
    return number_dtype(dtype.names, wide, metadata.get(TABLE), metadata.get(SIGNS))


def _is_complex(dtype: np.dtype) -> bool:
    return dtype.kind == "c" or dtype.names == REAL_IMAG


def _wanted(dtype: np.dtype) -> str:
    if _is_complex(dtype):
        return "a number"
    if dtype.names is not None:
        return f"a real number, or one of {len(dtype.names)} parts ({', '.join(dtype.names)}),"
    return "a real number"


def _checked(value: Any, info: ArrayInfo, name: str, dtype: np.dtype) -> Any:
    """An array that may be a factor: of one number, or of a number's parts. Raises ValueError or TypeError for another."""
    count = len(part_dtypes(dtype))
    if info.shape != () and (info.shape != (count,) or count == 1):
        of_parts = "" if count == 1 else f" or, of its parts, ({count},)"
        raise ValueError(f"{name} is an array of shape {info.shape}; {_wanted(dtype)} is needed for a C of {dtype}: one "
                         f"of shape (){of_parts}")
    kinds = "iu" if part_dtypes(dtype)[0].kind in "iu" else "iuf"
    is_number = info.dtype.kind in kinds or (info.dtype.name == "bfloat16" and kinds != "iu")
    if not is_number and not (info.dtype.kind == "c" and _is_complex(dtype) and info.shape == ()):
        raise TypeError(f"{name} is an array of dtype {info.dtype}; {_wanted(dtype)} is needed for a C of {dtype}")
    return value


def in_memory(value: Any, name: str, dtype: np.dtype) -> InMemory:
    """A factor of results of ``dtype`` in an array that stays where it is; raises as `factor` does."""
    info = describe(value, name)
    _checked(value, info, name, dtype)
    count = info.shape[0] if info.shape else 1
    real = part_dtypes(computed_in(dtype))[0]
    of_one = computed_in(dtype) if info.dtype.kind == "c" else real
    return InMemory(strided(value, info, (count,), info.strides or (1,)), count, computed_in(dtype) if count > 1 else of_one)


def _parts(value: Any, name: str, dtype: np.dtype) -> Any:
    """A tuple of parts as one number."""
    given, count = tuple(value), len(part_dtypes(dtype))
    if (dtype.names is None and not _is_complex(dtype)) or len(given) != count:
        raise TypeError(f"{name} is {value!r}; {_wanted(dtype)} is needed for a C of {dtype}")
    real = part_dtypes(dtype)[0]
    checked = tuple(_number(part, name, real) for part in given)
    if _is_complex(dtype):
        return _number(complex(*checked), name, dtype)
    made = to_dtype(computed_in(dtype), checked)
    return Parts(made, int(any(part != 0 for part in made)))


def _number(value: Any, name: str, dtype: np.dtype) -> Any:
    """A number: complex ones in the precision of C."""
    kinds: tuple = (int, float, np.integer, np.floating)
    is_complex = _is_complex(dtype)
    if is_complex:
        kinds = (*kinds, complex, np.complexfloating)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, kinds):
        raise TypeError(f"{name} is {value!r}; {_wanted(dtype)} is needed for a C of {dtype}")
    if dtype.kind in "iu":
        return _integer(value, name, dtype)
    if is_complex:
        return dtype.type(value) if dtype.kind == "c" else np.complex64(value)
    return float(value) if isinstance(value, int) else value           # 2 and 2.0 are one kernel


def _integer(value: Any, name: str, dtype: np.dtype) -> Any:
    """A number in the dtype of an integer C: 2.0 is 2, and 0.5 is an error."""
    limits = np.iinfo(dtype)
    if value != value or value in (np.inf, -np.inf) or int(value) != value or not limits.min <= int(value) <= limits.max:
        raise ValueError(f"{name} is {value!r} and c holds {dtype}: a whole number from {limits.min} to {limits.max} is "
                         "needed")
    return dtype.type(int(value))
