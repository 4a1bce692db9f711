"""What a kernel's arguments are, told without Numba: a `Kind` stands for a type that is made when it is compiled.

Plans and the emulator ask for kinds: whether two arguments are of one type, how an array is accessed. Equal kinds are one
object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.lang.later import load
from gemmkit.lang.memory import ViewType
from gemmkit.lang.numba_hooks import types
from gemmkit.lang.number_types import numba_type
from gemmkit.lang.records import device_dtype, record_text
from gemmkit.lang.scalars import index, weak_float64


class Kind:
    """A type of device code that may not be made yet: `type` makes it; ``text`` tells it from others of its sort."""

    def __init__(self, text: str, make: Callable[[], Any]):
        self.text, self._make = text, make

    @cached_property
    def type(self) -> Any:
        load()                                         # a name of a type alone would be kept as its stand-in
        return self._make()

    def __str__(self) -> str:
        return self.text


class ViewKind(Kind):
    """An array's: ``unit`` is the axis of stride 1 (or None), ``alignment`` in bytes holds for every row."""

    def __init__(self, text: str, make: Callable[[], Any], ndim: int, unit: int | None, alignment: int):
        super().__init__(text, make)
        self.unit, self.alignment = unit, alignment
        self.strided_axes = [axis for axis in range(ndim) if axis != unit]


_known: dict[Hashable, Any] = {}


def kind(key: Hashable, make: Callable[[], Kind]) -> Any:
    """The kind of this key; ``make`` makes the first one."""
    found = _known.get(key)
    return found if found is not None else _known.setdefault(key, make())


def view_kind(dtype: np.dtype, ndim: int, unit: int | None, alignment: int, wide: bool, readonly: bool) -> Any:
    """An array's kind (`gemmkit.lang.memory.ViewType`); raises TypeError for a dtype that device code does not have."""
    how = ndim, unit, alignment, wide, readonly
    return kind(("view", _key(dtype), *how), lambda: ViewKind(
        f"view of {_text(dtype)} {how}", lambda: ViewType(dtype, *how), ndim, unit, alignment))


def scalar_kind(dtype: np.dtype) -> Any:
    """A NumPy scalar's kind; raises TypeError for a dtype that device code does not have."""
    return kind(("scalar", _key(dtype)), lambda: Kind(_text(dtype), lambda: numba_type(dtype)))


def _key(dtype: np.dtype) -> Any:
    return dtype if dtype.names is None else record_text(dtype)      # NumPy's equality leaves out an algebra's table


def _text(dtype: np.dtype) -> str:
    return device_dtype(dtype).name if dtype.names is None else record_text(device_dtype(dtype))


#: The kinds of Python's numbers: a truth, an integer of 32 bits or of 64, a float.
_NUMBERS = {"bool": Kind("bool", lambda: types.boolean), "i32": Kind("index", lambda: index),
            "i64": Kind("int64", lambda: types.int64), "f64": Kind("weak float64", lambda: weak_float64)}


def number_kind(name: str) -> Kind:
    """The kind of a Python number: ``bool``, ``i32``, ``i64`` or ``f64``."""
    return _NUMBERS[name]
