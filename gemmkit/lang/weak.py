"""Constants that take the type of what they meet, as NumPy has it (NEP 50): ``x + 1.0`` is of the type of ``x``."""

from __future__ import annotations

from types import CodeType
from typing import Any


class WeakInt(int):
    """An integer constant that takes the type of what it meets."""


class WeakFloat(float):
    """A float constant that takes the type of what it meets."""


class WeakComplex(complex):
    """A complex constant that takes the type of what it meets."""


def weaken(value: Any) -> Any:
    """A constant as the code of a device function should hold it."""
    if type(value) is int:
        return WeakInt(value)
    if type(value) is float:
        return WeakFloat(value)
    if type(value) is complex:
        return WeakComplex(value)
    if type(value) is tuple:
        return tuple(weaken(v) for v in value)
    return value


def weaken_code(code: CodeType) -> CodeType:
    return code.replace(co_consts=tuple(
        weaken_code(c) if isinstance(c, CodeType) else weaken(c) for c in code.co_consts))
