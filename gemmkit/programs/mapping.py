"""``Mapping``: how a program is laid onto the machine. It changes the speed of a kernel, not its result beyond rounding."""

from __future__ import annotations

from collections.abc import Mapping as Names
from dataclasses import dataclass, field
from types import MappingProxyType

from gemmkit.lang.errors import ConfigError

__all__ = ["Mapping"]

MOST_STAGES, MOST_WARPGROUPS = 16, 3


@dataclass(frozen=True)
class Mapping:
    """``blocks``: by the name of an index, how long its blocks are; those that are not named have defaults. ``warpgroups``
    consume, 64 rows each, beside one that produces. ``stages`` of the ring of each sequential loop; 0: as many as shared
    memory has room for, up to 4. ``shared_bytes``: the bound for that memory; 0: what a block of the device can have.

    >>> Mapping({"m": 128, "n": 256, "k": 64}, stages=3).stages
    3

    Raises ConfigError for numbers out of range.
    """

    blocks: Names[str, int] = field(default_factory=dict)
    warpgroups: int = 2
    stages: int = 0
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", MappingProxyType(dict(self.blocks)))
        bounds = ("warpgroups", 1, MOST_WARPGROUPS), ("stages", 0, MOST_STAGES), ("shared_bytes", 0, 2**20)
        for name, least, most in bounds:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"Mapping({name}={value!r}): a whole number from {least} to {most} is needed")
        for name, size in self.blocks.items():
            if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"Mapping(blocks={dict(self.blocks)!r}): lengths of blocks by the names of indices are "
                                  "needed, such as {'m': 128}")

    def __hash__(self) -> int:
        return hash((frozenset(self.blocks.items()), self.warpgroups, self.stages, self.shared_bytes))
