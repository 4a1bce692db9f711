"""Which fields of a component are runtime by their annotation: `Array` and `Scalar`."""

from __future__ import annotations

import typing
from functools import lru_cache
from typing import Any

from gemmkit.lang.guards import class_version

__all__ = ["Array", "Scalar", "annotated"]

if typing.TYPE_CHECKING:                # to a type checker they are what they hold: anything array- or number-like
    Array = Any
    Scalar = Any
else:
    class Array:
        """Annotation of a runtime array field: a CuPy array, PyTorch tensor, NumPy array (emulated), ..."""

    class Scalar:
        """Annotation of a runtime scalar field: a number. Python numbers are weak (NEP 50), NumPy scalars keep their
        type."""


def annotated(cls: type) -> dict[str, Any]:
    """Fields whose annotation says that they are runtime."""
    return _annotated(cls, class_version[0])


@lru_cache(maxsize=4096)
def _annotated(cls: type, _version: int) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except Exception:                     # names that only a type checker can see: read the text of the annotation
        hints = {}
        for base in reversed(cls.__mro__):
            for name, text in getattr(base, "__annotations__", {}).items():
                last = str(text).rpartition(".")[2]
                hints[name] = {"Array": Array, "Scalar": Scalar}.get(last)
    out = {}
    for name, hint in hints.items():
        kinds = set(typing.get_args(hint)) | {hint}
        if Array in kinds:
            out[name] = Array
        elif Scalar in kinds:
            out[name] = Scalar
    return out
