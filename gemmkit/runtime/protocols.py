"""The protocols by which objects of any library offer an array: whether one is there, and ``__cuda_array_interface__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def offers(x: Any, attribute: str) -> bool:
    """Whether an object has an attribute of an array protocol; one that raises is there."""
    try:
        getattr(x, attribute)
    except AttributeError:
        return False
    except Exception:
        return True
    return True


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library (and not a NumPy scalar)."""
    if isinstance(value, (np.generic, int, float, complex, str, bytes, type(None), np.dtype, type)):
        return False
    return isinstance(value, np.ndarray) or offers(value, "__cuda_array_interface__") or offers(value, "__dlpack__")


def interface_of(x: Any, name: str) -> dict[str, Any]:
    """The entries of ``__cuda_array_interface__``, each of its type. Raises ValueError for an entry that is not."""
    where = f"{name}.__cuda_array_interface__"
    try:
        entries = x.__cuda_array_interface__
    except Exception as error:
        raise ValueError(f"{where} cannot be read: it raised {type(error).__name__}: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{where} is of type {type(entries).__name__}; a dictionary is needed")
    missing = [entry for entry in ("shape", "typestr", "data", "version") if entry not in entries]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for entry, (fits, wanted) in _ENTRIES.items():
        if not fits(entries.get(entry)):
            raise ValueError(f"{where} has {entry}={entries.get(entry)!r}; {wanted} is needed")
    strides = entries.get("strides")
    if strides is not None and len(strides) != len(entries["shape"]):
        raise ValueError(f"{where} has shape={entries['shape']!r} and strides={strides!r}; they must be of one length")
    return entries


def _is_whole(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and abs(int(x)) < 2**64


def _are_whole(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(map(_is_whole, x))


def _is_typestr(x: Any) -> bool:
    try:
        return isinstance(x, str) and np.dtype(x) is not None
    except Exception:  # NumPy raises what it likes
        return False


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "version": (_is_whole, "a whole number"),
    "shape": (lambda x: _are_whole(x) and all(extent >= 0 for extent in x), "a tuple of extents, 0 or more,"),
    "strides": (lambda x: x is None or _are_whole(x), "None or a tuple of numbers of bytes"),
    "typestr": (_is_typestr, "a NumPy typestr such as '<f4'"),
    "data": (
        lambda x: isinstance(x, (tuple, list)) and len(x) == 2 and (x[0] is None or _is_whole(x[0])),
        "a tuple of the address and whether it is read-only",
    ),
    "stream": (
        lambda x: x is None or (_is_whole(x) and x >= 0),
        "None or a stream's handle",
    ),
}
