"""How configurations are refused, and the rules that kernel families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmkit.lang.errors import ConfigError
from gemmkit.tiling import Tile

SPLITS = (1, 2, 4, 8)                  # blocks of a cluster; more than 8 not every GPU has side by side


def rule(condition: bool, field: str, value: Any, said: str | Callable[[], str]) -> None:
    """Raise ConfigError, naming the field and its value, unless the condition holds.

    ``said`` is what would do, or makes that: to write components takes longer than to check them.
    """
    if not condition:
        raise ConfigError(f"{field}={value!r}: {said if isinstance(said, str) else said()}")


def divides(small: Tile, large: Tile, field: str, said: str, value: Any = None) -> None:
    """The rule that one tile divides another."""
    for name in small.names:
        part, whole = getattr(small.size, name), getattr(large.size, name)
        rule(whole % part == 0, field, small if value is None else value,
             f"{said} ({name}={whole} is not a multiple of {part})")


def check_splits(splits: int) -> None:
    rule(splits in SPLITS, "splits", splits, f"blocks of a cluster that share K are one of {', '.join(map(str, SPLITS))}")
