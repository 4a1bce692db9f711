"""The kernels that programs with products become, by what GPUs have: what differs between them for the passes.

| kernel | GPUs | blocks come | products | who |
|---|---|---|---|---|
| ``warp_specialised`` | of compute capability 9.0 | by TMA | wgmma | one warpgroup has blocks brought, others multiply |
| ``multistage`` | from 8.0 on | by cp.async | mma.sync | all threads do both |

The names are those of `gemmkit.get_config`. What a kernel's text says is its printer's (`gemmkit.programs.text`,
`gemmkit.programs.multistage`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Mapping as Names
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.kernels.collectives.pipeline import BARRIER
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.called import Callees
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not

if TYPE_CHECKING:
    from gemmkit.programs.rounds import Recurrence
    from gemmkit.programs.trace import Loop
    from gemmkit.programs.values import Index

# --------------------------------------------------------------------------------------------------
# ``Mapping``: how a program is laid onto the machine. It changes the speed of a kernel, not its result beyond rounding.

MOST_STAGES, MOST_WARPGROUPS, MOST_BLOCKS, MOST_SPLITS, MOST_BAND = 16, 3, 4, 1024, 64
REGISTERS, SHARED = "registers", "shared"
WARP_SPECIALISED, MULTISTAGE = "warp_specialised", "multistage"          # as `gemmkit.get_config` calls them
SWITCHES = "ahead", "across", "turns", "descending", "longest_first", "lazy", "anchored", "ordered"
NEEDS = dict(ahead="a product that needs another product of its round", across="products that run a round ahead",
             turns="something to compute between the products of a round", descending="tiles of whole rows",
             longest_first="tiles that get longer with their rows", lazy="a running maximum that scales cells",
             anchored="something to compute while a product runs", ordered="rounds that add to an array, x[m] += ...")


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
    | ``ordered`` | tiles add to an array, ``x[m] += ...``, one after the other: the same bits every time | where they add |
    | ``splits`` | so many blocks share a tile's rounds, up to 1024, and a second kernel merges | the most that run at once |
    | ``places`` | by name, ``"registers"`` or ``"shared"``: how a result leaves; of others an error if it is elsewhere | |
    | ``kernel`` | ``"warp_specialised"`` (TMA, wgmma) or ``"multistage"`` (cp.async, mma.sync) | the first on Hopper |
    | ``variants`` | by the name of a program, which of its variants runs (`Program.variant`) | the program itself |

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
    ordered: bool | None = None
    splits: int = 0
    places: Names[str, str] = field(default_factory=dict)
    kernel: str = ""
    variants: Names[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, such in (("blocks", {"m": 128}), ("cluster", {"m": 2}), ("places", {"p": REGISTERS}),
                           ("variants", {"gemm": "gemm_by_rows"})):
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
            if not isinstance(name, str) or place not in (REGISTERS, SHARED):
                raise ConfigError(f"Mapping(places={dict(self.places)!r}): {REGISTERS!r} or {SHARED!r} by the names of "
                                  "values and arrays is needed, such as {'p': 'registers'}; arrays that products take are "
                                  "in shared memory")

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
        return self._hash

    @cached_property
    def _hash(self) -> int:
        stages = self.stages if isinstance(self.stages, int) else frozenset(self.stages.items())
        names = (frozenset(held.items()) for held in (self.blocks, self.cluster, self.places,
                                                             self.variants))
        switches = (getattr(self, switch) for switch in SWITCHES)
        return hash((*names, self.warpgroups, stages, self.shared_bytes, self.splits, self.band, self.kernel, *switches))

    def __reduce__(self) -> Any:
        """Views of dicts are neither pickled nor copied."""
        values = (getattr(self, part.name) for part in fields(self))
        return Mapping, tuple(dict(value) if isinstance(value, Names) else value for value in values)

    def within(self, outer: Mapping) -> Mapping:
        """It, for what the mapping of the caller leaves open.

        >>> Mapping({"m": 64, "n": 128}, stages=3).within(Mapping({"n": 64}, warpgroups=1))
        Mapping({'m': 64, 'n': 64}, warpgroups=1, stages=3)
        """
        merged: dict[str, Any] = {}
        for part in fields(self):
            own, given = getattr(self, part.name), getattr(outer, part.name)
            both = isinstance(own, Names) and isinstance(given, Names)
            merged[part.name] = {**own, **given} if both else given if given or given is False else own
        return Mapping(**merged)

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

    def refuse_products(self) -> None:
        """Of a function of rows. Raises ConfigError for what is said of products' tiles and rounds."""
        for name in ("blocks", "cluster", "warpgroups", "stages", "shared_bytes", "splits", "band", "kernel", *SWITCHES):
            value = getattr(self, name)
            if value:
                shown = dict(value) if isinstance(value, Names) else value
                raise ConfigError(f"Mapping({name}={shown!r}): only products have it; a function of rows takes its mapping "
                                  "from the length of its rows. Leave it out")

    def refuse_orders(self, values: Any, arrays: Any) -> None:
        """Of rounds that only add. Raises ConfigError for orders that these have not, and for names of no ``values`` and
        no ``arrays``."""
        for name, need in NEEDS.items():
            if getattr(self, name):
                raise ConfigError(f"Mapping({name}=True): it needs {need}, but these rounds only add to cells")
        if self.splits > 1:
            raise ConfigError(f"Mapping(splits={self.splits}): rounds of tiles of whole rows, parallel(a.rows), are split "
                              "over blocks, and these have rows and columns; use smaller blocks, or gemmkit.matmul")
        other = next((name for name in self.places if name not in (*values, *arrays)), None)
        if other is not None:
            raise ConfigError(f"Mapping(places={{{other!r}: ...}}): the cells of the program are {', '.join(values)}, and "
                              f"its arguments {', '.join(arrays)}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


HOPPER, AMPERE = (9, 0), (8, 0)
#: Of a mapping, what a multistage kernel has not, and why.
ORDERS = dict(ahead="products are done where they stand, and none runs ahead",
              across="a block has one tile, and its last products are beside no other's",
              turns="products are done where they stand, and warps need no turns",
              anchored="products are done where they stand, and nothing waits for them")


@dataclass(frozen=True)
class KernelLimits:
    """``most_sums``: columns of sums that fit in the registers of so many warpgroups, ``usual_sums``: of those that are
    taken where nothing is said; ``room``: a thread's registers of sums and of what is handed over, beyond which ordinary
    rounds spill, ``usual_room``: beyond which those of large scores do, for lengths of which nothing is said (heads of 80
    by 128 keys and three warpgroups need 136); ``depth``: the length of a round's blocks that sums go over, a multiple of
    ``depths``; ``barriers``: bytes that a stage's take; ``parts``: of 64 rows each, that a warpgroup may have of tiles of
    rows and columns.

    Of chains ``lengths`` of a round's blocks, the best first, and the usual number of warpgroups; where rounds go along a
    block's columns, these are a multiple of ``line``. ``stage``: bytes of a stage that products take one after the other,
    at most; what is longer comes in parts."""

    name: str
    most_sums: dict[int, int] = field(hash=False)
    usual_sums: dict[int, int] = field(hash=False)
    room: dict[int, int] = field(hash=False)
    usual_room: dict[int, int] = field(hash=False)
    depth: int
    depths: int
    barriers: int
    parts: int
    lengths: tuple[int, ...]
    chain_warpgroups: int
    line: int
    stage: int
    uses_tma: bool

    @property
    def whole_rows(self) -> str:
        """How 16-bit rows that begin at multiples of 16 bytes leave: the collective's name."""
        return "TmaOut" if self.uses_tma else "OctetOut"

    @property
    def brings(self) -> str:
        return "TMA brings" if self.uses_tma else "threads copy"

    @property
    def said(self) -> str:
        """In a mapping that says all: Hopper's is what it has anyway."""
        return "" if self.uses_tma else self.name

    def refuse(self, mapping: Mapping) -> None:
        """Raises ConfigError for what the kernel has not."""
        if self.uses_tma:
            return
        of = f"kernel={self.name!r}): "
        if math.prod(mapping.cluster.values()) > 1:
            raise ConfigError(f"Mapping(cluster={dict(mapping.cluster)!r}, {of}blocks share operands through TMA multicast, "
                              "which this kernel does not use; leave cluster out")
        for name, why in ORDERS.items():
            if getattr(mapping, name):
                raise ConfigError(f"Mapping({name}=True, {of}{why}; leave it out")

    def share(self, device: DeviceInfo) -> int:
        """The bytes of shared memory that stages are to fit in where the mapping does not say: all that a block can have; of
        a kernel whose threads wait for copies and multiply in turns, as much as leaves room for another block."""
        if self.uses_tma:
            return device.shared_memory_per_block
        return device.shared_memory_per_sm // 2 - device.reserved_shared_memory

    def why_not(self, info: ArrayInfo) -> str | None:
        """Why blocks of an operand cannot be brought, in words."""
        axis = len(info.shape) - 1
        way = ("" if info.strides[axis] == 1 or info.shape[axis] == 1 else "; pass its transpose, and write the transpose "
               "of its block, w[n, k].T" if 1 in info.strides[-2:-1] else "; pass a contiguous copy")
        if self.uses_tma:
            reason = why_not(info, axis)
            if reason is None:
                return None
            other = KERNELS[MULTISTAGE].why_not(info)
            more = f" (Mapping(kernel={MULTISTAGE!r}) takes it)" if other is None else way
            return f"TMA cannot load it: {reason}{more}"
        if info.strides[axis] != 1 and info.shape[axis] > 1:
            return (f"cp.async cannot copy it: its elements are not contiguous along axis {axis} (stride "
                    f"{info.strides[axis]}){way}")
        if self.vector(info) < 2:
            return "cp.async cannot copy it: its rows begin at odd elements, but a copy moves 2, 4 or 8 elements"
        return None

    def vector(self, info: ArrayInfo) -> int:
        """Elements that a thread copies at a time."""
        return alignment(info, len(info.shape) - 1) // int(info.dtype.itemsize)


#: Lengths as measured on Hopper (112 keys of heads of 192: 1.2).
KERNELS = {kernel.name: kernel for kernel in (
    KernelLimits(WARP_SPECIALISED, {1: 256, 2: 256, 3: 128}, {1: 256, 2: 256, 3: 128}, {1: 192, 2: 192, 3: 136},
                 {1: 192, 2: 192, 3: 128}, depth=64, depths=64, barriers=2 * BARRIER, parts=1,
                 lengths=(128, 96, 80, 64, 48, 32), chain_warpgroups=2, line=64, stage=2**15, uses_tma=True),
    KernelLimits(MULTISTAGE, {1: 256, 2: 256, 3: 128}, {1: 128, 2: 128, 3: 128}, {1: 176, 2: 176, 3: 96},
                 {1: 176, 2: 176, 3: 96}, depth=32, depths=32, barriers=0, parts=2, lengths=(64, 48, 32, 16),
                 chain_warpgroups=1, line=32, stage=2**14, uses_tma=False))}


@dataclass(frozen=True)
class OutKind:
    """How a result leaves: the collective's name, and what it is made for."""

    kind: str
    dtype: np.dtype
    pairs: bool
    columns: int


@dataclass(frozen=True)
class Printed:
    """The text; its kernel's arguments behind the sizes: tensor maps, each of a staged block and of the array that the
    block is of, or operands that threads copy, results, arrays that threads read, functions that they call."""

    text: str
    maps: tuple[tuple[str, str], ...]
    outs: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: tuple[str, ...]
    tile: tuple[str, ...]              # those of the sizes that tiles go along
    scalars: tuple[str, ...]
    threads: int
    operands: tuple[str, ...] = ()
    callees: Callees = Callees()
    updated: tuple[str, ...] = ()      # results that threads read first
    number: np.dtype = np.dtype(np.float32)            # of the scalars


def kernel_of(mapping: Mapping, device: DeviceInfo) -> KernelLimits:
    """What the mapping says, or the device has. Raises ConfigError, naming the GPU, where it has not what is needed."""
    has: Any = f"{device.name} has {device.arch[0]}.{device.arch[1]}"
    if device.arch < AMPERE:
        raise ConfigError(f"programs with products need compute capability 8.0 or above, but {has}")
    if mapping.kernel == WARP_SPECIALISED and device.arch != HOPPER:
        raise ConfigError(f"Mapping(kernel={WARP_SPECIALISED!r}): TMA and wgmma need compute capability 9.0, but {has}; use "
                          f"kernel={MULTISTAGE!r}, or leave it out")
    return KERNELS[mapping.kernel or (WARP_SPECIALISED if device.arch == HOPPER else MULTISTAGE)]


def within_calls(loop: Loop, mapping: Mapping) -> Mapping:
    """A program's mapping with those of the programs that it calls for its tiles, for what it leaves open. Raises
    ConfigError, naming the program, for what a program that is called in a tile cannot say."""
    for call in [call for call in loop.inlined if call.mapping is not None]:
        if any(each is loop for each in call.loops):
            mapping = call.mapping.within(mapping)
            continue
        said = f"{call.name}(..., mapping={call.mapping!r})"
        if replace(call.mapping, blocks={}, stages=0, variants={}) != Mapping():
            raise ConfigError(f"{said} in a tile: blocks and stages of its own loops are what it can say; give the rest to "
                              "the program of the tiles")
        other = next((name for name in call.mapping.blocks if name not in call.written), None)
        if other is not None:
            raise ConfigError(f"{said}: its loops go along {', '.join(call.written) or 'nothing'}, not along {other}")
    return mapping


def within_rounds(loop: Loop, mapping: Mapping, arrays: Callable[[Index], list[str]]) -> Mapping:
    """The same of programs that are called in a tile: lengths and stages of their rounds. ``arrays``: what rounds along an
    index take from a ring."""
    for call in loop.inlined:
        if call.mapping is None or any(each is loop for each in call.loops):
            continue
        blocks = {call.written[name].name: size for name, size in call.mapping.blocks.items()}
        stages, own = call.mapping.stages, [name for index in call.written.values() for name in arrays(index)]
        named = dict.fromkeys(own, stages) if isinstance(stages, int) and stages else stages
        is_open = isinstance(mapping.stages, Names) or not mapping.stages
        mapping = Mapping(blocks, stages=named if is_open else 0).within(mapping)
    return mapping


# --------------------------------------------------------------------------------------------------
# Of recurrences: lengths of blocks, warpgroups, stages, and shares of a tile's rounds.

ROWS = 64                              # of a block, that a warpgroup has
LENGTHS = (64, 32)                     # of a tile's columns: the longest, unless tiles without shares are few
PANEL = 32                             # columns that a swizzled line of 64 bytes has
LEAST = 4                              # rounds of a share


def of_recurrence(of: Recurrence, mapping: Mapping, sizes: Any, processors: int) -> Mapping:
    """The mapping with all that is left open. Raises ConfigError for what such tiles have not."""
    for name in ("cluster", "band", "ahead", "across", "turns", "descending", "longest_first", "lazy", "anchored",
                 "ordered", "places"):
        if getattr(mapping, name):
            raise ConfigError(f"Mapping({name}={getattr(mapping, name)!r}): rounds that store rows have blocks, warpgroups "
                              "and stages; leave it out")
    names = [index.name for index in of.indices if not index.stack]
    other = next((name for name in mapping.blocks if name not in names), None)
    if other is not None:
        raise ConfigError(f"Mapping(blocks={{{other!r}: ...}}): the blocks are those of {' and '.join(names)}")
    warpgroups = mapping.warpgroups or max(1, mapping.blocks.get(of.t.name, ROWS) // ROWS)
    length = mapping.blocks.get(of.t.name, ROWS * warpgroups)
    if warpgroups > 2 or length != ROWS * warpgroups:
        raise ConfigError(f"Mapping(blocks={{{of.t.name!r}: {length}}}, warpgroups={warpgroups}): a warpgroup has {ROWS} "
                          "rows of a block, and there are 1 or 2")
    if not isinstance(mapping.stages, int):
        raise ConfigError(f"Mapping(stages={dict(mapping.stages)!r}): all blocks of a round share stages; give a number")
    blocks, tiles = {of.t.name: length}, math.prod(sizes[x.extent] for x in of.stacks)
    rounds = -(-sizes[of.t.extent] // length)
    may_share = of.factors is not None and mapping.splits != 1 and rounds >= 2 * LEAST
    if of.n is not None:
        columns = sizes[of.n.extent]
        fit = [size for size in LENGTHS if may_share or tiles * -(-columns // size) >= processors * 3 // 4]
        blocks[of.n.name] = mapping.blocks.get(of.n.name) or next(iter(fit), LENGTHS[-1])
        if blocks[of.n.name] % PANEL or blocks[of.n.name] > 256:
            raise ConfigError(f"Mapping(blocks={{{of.n.name!r}: {blocks[of.n.name]}}}): a multiple of {PANEL} up to 256 is "
                              "needed")
        tiles *= -(-columns // blocks[of.n.name])
    if mapping.splits > 1 and of.factors is None:
        raise ConfigError(f"Mapping(splits={mapping.splits}): rounds have shares if each multiplies its cells by a number "
                          "and adds what depends on no cell, and these do not")
    most = 1 if not may_share or not tiles else max(1, min(2 * processors // tiles, rounds // LEAST, MOST_SPLITS))
    return replace(mapping, blocks=blocks, warpgroups=warpgroups, splits=mapping.splits or most)
