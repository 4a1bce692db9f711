"""Recognising arrays: whether one is like another, or like any that was seen before, without describing it.

A call that is known asks this of each of its arrays. The attributes that `describe` makes a description of are compared as
the library gives them: a tuple of them is made and compared faster than an `ArrayInfo` is made. What is asked of CuPy and of
PyTorch is what their readers in `gemmkit.runtime.arrays` ask; arrays of all else are described.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gemmkit.runtime.arrays import describe

Key = tuple[Any, ...]


# -- among all that were seen --------------------------------------------------------------------------------

def key_of(x: Any, name: str = "a") -> tuple[int, Key]:
    """The pointer of an array, and a key: arrays with one key have one description, pointer and stream apart.

    A function that does the same for arrays of this type, faster, may then be found in `KEYS`. Raises what ``describe(x,
    name)`` raises.
    """
    kind = type(x)
    info = describe(x, name)
    make = _MAKERS.get(info.library)
    if make is None:
        return info.pointer, (kind, *info[1:7])
    keyed = KEYS[kind] = make()
    return keyed(x)


def key_if_given(x: Any, name: str) -> tuple[int, Key | None]:
    """`key_of` of an array that may be left out: 0 and None for None."""
    return (0, None) if x is None else KEYS.get(type(x), key_of)(x, name)


def _cupy_keys() -> Callable[..., tuple[int, Key]]:
    def keyed(x: Any, name: str = "") -> tuple[int, Key]:
        data = x.data
        return data.ptr, (type(x), x.shape, x.strides, x.dtype, data.device_id)

    return keyed


def _torch_keys() -> Callable[..., tuple[int, Key]]:
    """A tensor that `describe` refuses has a key too, which is no other's."""
    recording = sys.modules["torch"].is_grad_enabled

    def keyed(x: Any, name: str = "") -> tuple[int, Key]:
        try:
            return x.data_ptr(), (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.is_conj(),
                                  x.requires_grad and recording())
        except RuntimeError:  # a sparse tensor: it has neither strides nor one pointer
            return 0, (type(x), x.layout)

    return keyed


#: Type of an array -> what `key_of` is for arrays of that type.
KEYS: dict[type, Callable[..., tuple[int, Key]]] = {}
_MAKERS = {"cupy": _cupy_keys, "torch": _torch_keys}


# -- like one array ------------------------------------------------------------------------------------------

def matcher(x: Any, name: str = "a") -> Callable[[Any], int | None]:
    """A function that returns the pointer of any array which ``describe`` would describe as it does ``x``,
    pointer and stream apart; and None for every other object. It costs less than half of ``describe``.

    Raises what ``describe(x, name)`` raises.

    >>> import numpy as np
    >>> pointer_of = matcher(np.zeros((2, 3)))
    >>> pointer_of(np.ones((2, 3))) is None, pointer_of(np.ones((3, 2))) is None
    (False, True)
    """
    info, kind = describe(x, name), type(x)
    if info.library == "cupy":
        in_cupy = x.shape, x.strides, x.dtype, info.device

        def cupy_pointer(y: Any) -> int | None:
            if type(y) is kind:
                data = y.data
                if (y.shape, y.strides, y.dtype, data.device_id) == in_cupy:
                    return data.ptr
            return None

        return cupy_pointer
    if info.library == "torch":
        in_torch = x.shape, x.stride(), x.dtype, x.device
        recording, may_be_conjugated = sys.modules["torch"].is_grad_enabled, info.dtype.kind == "c"

        def torch_pointer(y: Any) -> int | None:
            if (
                type(y) is kind
                and not y.is_neg()
                and not (y.requires_grad and recording())
                and not (may_be_conjugated and y.is_conj())
            ):
                try:
                    if (y.shape, y.stride(), y.dtype, y.device) == in_torch:
                        return y.data_ptr()
                except RuntimeError:  # a sparse tensor: it has neither strides nor one pointer
                    return None
            return None

        return torch_pointer
    wanted = info[1:7]

    def pointer(y: Any) -> int | None:
        if type(y) is not kind:
            return None
        other = describe(y, name)
        return other.pointer if other[1:7] == wanted else None

    return pointer
