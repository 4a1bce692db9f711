"""``Mapping``: how a program is laid onto the machine. It changes the speed of a kernel, not its result beyond rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping as Names
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from gemmkit.lang.errors import ConfigError

MOST_STAGES, MOST_WARPGROUPS, MOST_BLOCKS, MOST_SPLITS, MOST_BAND = 16, 3, 4, 16, 64
REGISTERS = "registers"
WARP_SPECIALISED, MULTISTAGE = "warp_specialised", "multistage"          # as `gemmkit.get_config` calls them
SWITCHES = "ahead", "across", "turns", "descending", "longest_first", "lazy", "anchored"
NEEDS = dict(ahead="a product that needs another product of its round", across="products that run a round ahead",
             turns="something to compute between the products of a round", descending="tiles of whole rows",
             longest_first="tiles that get longer with their rows", lazy="a running maximum that scales cells",
             anchored="something to compute while a product runs")


@dataclass(frozen=True)
class Mapping:
    """How a program is laid onto the machine.

    | field | what | left out |
    |---|---|---|
    | ``blocks`` | by the name of an index, how long its blocks are | the largest that fit |
    | ``warpgroups`` | that consume, 64 rows each, beside one that produces | 2; 3 where a chain's sums fit, 1 for 64 rows |
    | ``stages`` | of the rings of sequential loops; or by the names of arrays | as many as fit, up to 4 |
    | ``cluster`` | by the name of a tile's index, how many neighbouring tiles share what they both take | blocks alone |
    | ``band`` | tiles of rows and columns are taken in bands of so many tile rows, each column by column | by the model |
    | ``shared_bytes`` | the bound for shared memory | what a block of the device can have |
    | ``ahead`` | products that need another product of their round go a round later | where there are such |
    | ``across`` | a tile's last products go beside the next tile's first | with ``ahead``, where two stages fit |
    | ``turns`` | warpgroups start their products one after the other | with 3, or much to compute |
    | ``descending`` | rounds go from the last block to the first; refused where they do not commute | where they commute |
    | ``longest_first`` | tiles that visit most blocks go first; refused where all visit the same | where they differ |
    | ``lazy`` | a running maximum stays until what it scales would shrink below 2^-8 | for sums of 192 columns or more |
    | ``anchored`` | what rounds compute while a product runs stays before the wait for it | not |
    | ``splits`` | so many blocks share a tile's rounds, and a second kernel merges | as idle multiprocessors take them |
    | ``places`` | by the name of a value, ``"registers"``: an error where it has another place | |
    | ``kernel`` | ``"warp_specialised"`` (TMA, wgmma) or ``"multistage"`` (cp.async, mma.sync) | the first on Hopper |

    >>> Mapping({"m": 128, "n": 256, "k": 64}, stages=3).stages
    3
    >>> Mapping(stages={"q": 1, "k": 3}).stages_of(["k"])
    3
    >>> Mapping({"n": 128}, ahead=False)
    Mapping({'n': 128}, ahead=False)

    Raises ConfigError for numbers out of range.
    """

    blocks: Names[str, int] = field(default_factory=dict)
    warpgroups: int = 0
    stages: int | Names[str, int] = 0
    cluster: Names[str, int] = field(default_factory=dict)
    band: int = 0
    shared_bytes: int = 0
    ahead: bool | None = None
    across: bool | None = None
    turns: bool | None = None
    descending: bool | None = None
    longest_first: bool | None = None
    lazy: bool | None = None
    anchored: bool | None = None
    splits: int = 0
    places: Names[str, str] = field(default_factory=dict)
    kernel: str = ""

    def __post_init__(self) -> None:
        for name, such in (("blocks", {"m": 128}), ("cluster", {"m": 2}), ("places", {"p": REGISTERS})):
            value = getattr(self, name)
            if not isinstance(value, Names):
                raise ConfigError(f"Mapping({name}={value!r}): a dict is needed, such as {such}")
            object.__setattr__(self, name, MappingProxyType(dict(value)))
        bounds = [("warpgroups", 0, MOST_WARPGROUPS), ("shared_bytes", 0, 2**20), ("splits", 0, MOST_SPLITS),
                  ("band", 0, MOST_BAND)]
        if isinstance(self.stages, Names):
            object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))
            for name, value in self.stages.items():
                if not isinstance(name, str) or not _is_whole(value, 1, MOST_STAGES):
                    raise ConfigError(f"Mapping(stages={dict(self.stages)!r}): whole numbers from 1 to {MOST_STAGES} "
                                      f"by the names "
                                      "of arrays are needed, such as {'k': 3}")
        else:
            bounds.append(("stages", 0, MOST_STAGES))
        for name, least, most in bounds:
            value = getattr(self, name)
            if not _is_whole(value, least, most):
                raise ConfigError(f"Mapping({name}={value!r}): a whole number from {least} to {most} is needed")
        for name, size in self.blocks.items():
            if not isinstance(name, str) or not _is_whole(size, 1, 2**31):
                raise ConfigError(f"Mapping(blocks={dict(self.blocks)!r}): lengths of blocks by the names of indices are "
                                  "needed, such as {'m': 128}")
        sizes = self.cluster.values()
        if not all(isinstance(name, str) for name in self.cluster) or not all(
                _is_whole(size, 1, MOST_BLOCKS) and size != 3 for size in sizes) or math.prod(sizes) > MOST_BLOCKS:
            raise ConfigError(f"Mapping(cluster={dict(self.cluster)!r}): 1, 2 or 4 by the names of a tile's indices, and "
                              f"{MOST_BLOCKS} blocks at most, are needed, such as {{'m': 2}}")
        for name in SWITCHES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"Mapping({name}={value!r}): True, False or None is needed")
        for name, place in self.places.items():
            if not isinstance(name, str) or place != REGISTERS:
                raise ConfigError(f"Mapping(places={dict(self.places)!r}): {REGISTERS!r} by the names of values is "
                                  f"needed, such as "
                                  "{'p': 'registers'}; arrays that products take are in shared memory")

        if self.kernel not in ("", WARP_SPECIALISED, MULTISTAGE):
            raise ConfigError(f"Mapping(kernel={self.kernel!r}): {WARP_SPECIALISED!r} or {MULTISTAGE!r} is needed, or "
                              "nothing, which takes what the GPU has")

    def __repr__(self) -> str:
        """What is said alone, so that it can be pasted into a program."""
        found = []
        for part in fields(self):
            value = getattr(self, part.name)
            value = dict(value) if isinstance(value, Names) else value
            if value or value is False:
                found.append(f"{value!r}" if part.name == "blocks" else f"{part.name}={value!r}")
        return f"Mapping({', '.join(found)})"

    def __hash__(self) -> int:
        stages = self.stages if isinstance(self.stages, int) else frozenset(self.stages.items())
        names = (frozenset(held.items()) for held in (self.blocks, self.cluster, self.places))
        switches = (getattr(self, switch) for switch in SWITCHES)
        return hash((*names, self.warpgroups, stages, self.shared_bytes, self.splits, self.band, self.kernel, *switches))

    def __reduce__(self) -> Any:
        """Views of dicts are neither pickled nor copied."""
        values = (getattr(self, part.name) for part in fields(self))
        return Mapping, tuple(dict(value) if isinstance(value, Names) else value for value in values)

    # -- asked by the passes -------------------------------------------------------------------------------------------

    def check_arrays(self, names: list[str]) -> None:
        """Raises ConfigError where ``stages`` names an array that no ring has."""
        other = [] if isinstance(self.stages, int) else [name for name in self.stages if name not in names]
        if other:
            raise ConfigError(f"Mapping(stages={{{other[0]!r}: ...}}): the arrays in stages are {', '.join(names)}")

    def stages_of(self, names: list[str]) -> int:
        """Of the ring that these arrays share, 0 where nothing is said. Raises ConfigError where they differ."""
        if isinstance(self.stages, int):
            return self.stages
        given = {name: self.stages[name] for name in names if name in self.stages}
        if len(set(given.values())) > 1:
            raise ConfigError(f"Mapping(stages={given}): {' and '.join(names)} share stages, since one product takes "
                              f"both at once; "
                              "give one number")
        return next(iter(given.values()), 0)

    def refuse_orders(self, values: Any) -> None:
        """Of rounds that only add. Raises ConfigError for orders that these have not, and for names of no ``values``."""
        for name, need in NEEDS.items():
            if getattr(self, name):
                raise ConfigError(f"Mapping({name}=True): it takes {need}, and these rounds only add to cells")
        if self.splits > 1:
            raise ConfigError(f"Mapping(splits={self.splits}): rounds of tiles of whole rows, parallel(a.rows), are split "
                              "over blocks, and these have rows and columns; take smaller blocks, or gemmkit.matmul")
        other = next((name for name in self.places if name not in values), None)
        if other is not None:
            raise ConfigError(f"Mapping(places={{{other!r}: ...}}): the cells of the program are {', '.join(values)}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
