"""Properties that a kernel takes for constants: whether what they read can change in place."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

from gemmkit.lang.fingerprint import Reading, is_slot, read, read_value
from gemmkit.lang.guards import function_of
from gemmkit.lang.references import is_fixed, names_of


def mutable_in_property(component: Any, name: str) -> str | None:
    """What a property, a constant of a kernel, reads that can change while its text stays: a clause, or None."""
    entry = inspect.getattr_static(type(component), name, None)
    getter = function_of(entry)
    if getter is None or is_fixed(getter) or not isinstance(entry, (property, cached_property)):
        return None
    return _found(component, {name}, [])


def _found(holder: Any, names: set[str], looked_at: list[Any]) -> str | None:
    """`mutable_in_property`, of the attributes ``names`` of an object, and of what these read."""
    if any(holder is other for other in looked_at):
        return None
    looked_at.append(holder)
    cls, seen = type(holder), set[str]()
    names = set(names)
    held: list[Any] = []
    while names - seen:                                       # the attributes of self that it reads, by way of others
        each = (names - seen).pop()
        seen.add(each)
        entry = inspect.getattr_static(cls, each, None)
        function = function_of(entry)
        clause = None
        if function is not None:
            if not is_fixed(function):
                names |= names_of(function.__code__)
                clause = _clause(read(function))
        elif each in getattr(holder, "__dict__", ()) or entry is not None:
            value = getattr(holder, "__dict__", {}).get(each, entry)
            clause = None if is_slot(value) else _clause(read_value(value, f"{cls.__qualname__}.{each}"))
            if not isinstance(value, type) and not is_fixed(type(value)):
                held.append(value)                            # with properties of its own
        if clause is not None:
            return clause
    return next((clause for value in held if (clause := _found(value, names, looked_at)) is not None), None)


def _clause(reading: Reading) -> str | None:
    if reading.mutable:
        name, kind = reading.mutable[0]
        return f"{name}, a {kind}, which can change in place"
    if reading.of_process:
        name, module = reading.of_process[0]
        return f"{name}, which is not of the program (of {module}) and may be another at each call"
    return None
