"""Properties that a kernel takes for constants: whether what they read can change in place."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

from gemmkit.lang.fingerprint import function_of, is_slot, read, read_value
from gemmkit.lang.references import is_fixed, names_of


def mutable_in_property(component: Any, name: str) -> tuple[str, str] | None:
    """Of a property that a kernel takes for a constant: what it reads that can change in place, as (name, type)."""
    cls = type(component)
    entry = inspect.getattr_static(cls, name, None)
    getter = function_of(entry)
    if getter is None or is_fixed(getter) or not isinstance(entry, (property, cached_property)):
        return None
    seen: set[str] = set()
    names = {name}
    while names - seen:                                       # the attributes of self that it reads, by way of others
        each = (names - seen).pop()
        seen.add(each)
        entry = inspect.getattr_static(cls, each, None)
        function = function_of(entry)
        if function is not None:
            if not is_fixed(function):
                names |= names_of(function.__code__)
                mutable = read(function).mutable
                if mutable:
                    return mutable[0]
        elif each in vars(component) or entry is not None:
            value = vars(component).get(each, entry)
            mutable = () if is_slot(value) else read_value(value, f"{cls.__qualname__}.{each}").mutable
            if mutable and each in names:
                return mutable[0]
    return None


__all__ = ["mutable_in_property"]
