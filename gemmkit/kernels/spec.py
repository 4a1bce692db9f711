"""What a kernel is specialised by: the components in its slots, and the mapping onto blocks, warps and threads."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

from gemmkit.components import Component
from gemmkit.kernels.collectives.batched import Batched
from gemmkit.kernels.collectives.lanes import BESIDE, Lanes, OperandReduction, lanes_of, operand_reduction_of
from gemmkit.kernels.collectives.operand import Operand, OperandArrays
from gemmkit.kernels.collectives.scheduler import Cluster, HalfOfTiles, Order, Reduction, TileScheduler
from gemmkit.lang.checks import shown
from gemmkit.lang.component_products import ProblemShape, StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.number_rules import narrows
from gemmkit.operators import Operator
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.epilogues import Epilogue
    from gemmkit.kernels.config import Config

__all__ = [
    "Both", "Condition", "ProblemShape", "Spec", "StackShape",
]


@dataclass(frozen=True)
class Condition(Component):
    """Which k-tiles a thread block computes: ``__call__(self, m, n, k)`` with the tile's first row, column and k."""

    device_methods = ("__call__",)

    #: Which of "m" and "n" its answer may depend on. Blocks of a cluster along the other load for each other.
    depends_on: ClassVar[tuple[str, ...]] = ("m", "n")

    @cached_property
    def is_always(self) -> bool:
        return type(self) is Condition

    def __call__(self, m: int, n: int, k: int) -> bool:
        return True

    def check_tiles(self, block: Tile) -> None:
        """Raise ConfigError where it cannot be asked of tiles of ``block``."""

    def beside(self, other: Condition) -> Condition:
        """The condition that holds where both do."""
        return Both(self, other)


def can_be_asked(condition: Condition, block: Tile) -> bool:
    """Whether a condition can be asked of tiles of ``block``: they divide the blocks of a mask."""
    try:
        condition.check_tiles(block)
    except ConfigError:
        return False
    return True


@dataclass(frozen=True)
class Both(Condition):
    """Two conditions, of which both must hold."""

    first: Condition
    second: Condition

    @property
    def depends_on(self) -> tuple[str, ...]:                # type: ignore[override]
        return (*self.first.depends_on, *self.second.depends_on)

    def __call__(self, m: int, n: int, k: int) -> bool:
        return self.first(m, n, k) and self.second(m, n, k)

    def check_tiles(self, block: Tile) -> None:
        self.first.check_tiles(block)
        self.second.check_tiles(block)


@dataclass(frozen=True)
class Spec(Component):
    """What every template kernel is specialised by."""

    block: Tile
    compute_warp: Tile
    warps: int
    operator: Operator
    a: Operand
    b: Operand
    c: Operand
    d: Operand
    epilogue: Epilogue
    condition: Condition
    scheduler: TileScheduler | Batched
    has_c: bool

    @cached_property
    def threads(self) -> int:
        return 32 * self.warps

    @cached_property
    def operation(self) -> Tile:
        """The operator's shape as a tile."""
        m, n, k = self.operator.shape
        return Tile(M=m, N=n, K=k)

    @cached_property
    def fragments_m(self) -> int:
        return self.compute_warp.size.M // self.operator.shape[0]

    @cached_property
    def fragments_n(self) -> int:
        return self.compute_warp.size.N // self.operator.shape[1]

    @cached_property
    def steps_k(self) -> int:
        """Operations along K in a warp's tile."""
        return self.compute_warp.size.K // self.operator.shape[2]

    @cached_property
    def cluster(self) -> Cluster:
        """The blocks of a cluster, which share operands or the K of a tile."""
        return self.scheduler.cluster

    @property
    def reduction(self) -> Reduction:
        """How blocks that share the K of a tile add up their sums."""
        return self.scheduler.reduction

    def blocks_of_a_row(self, sizes: tuple[int, ...], words: int) -> int:
        """How many blocks of a cluster hold the rows of D of ``sizes`` together, and can exchange states of ``words`` words
        of each; 1 where none can."""
        return 1

    @cached_property
    def lanes(self) -> Lanes:
        """How a warp's lanes hold D together where the epilogue sees more than an element."""
        block, folds = self.block.size, self.d.layout.folds
        columns_too = any(getattr(stage, "along_m", False) for stage in self.epilogue.stages())
        alike = folds == 1 and self.d.thread.extents[1] % self.epilogue.neighbours == 0
        piece = self.d.thread if alike else Tile(M=1, N=8)               # of folded columns, and of neighbours, an octet
        least_n = BESIDE if self.epilogue.is_last else 1
        return lanes_of(piece, block.M, block.N // folds, self.d.order == "row", columns_too, least_n)

    @cached_property
    def observes(self) -> bool:
        """Whether threads look at A's tiles beside the product."""
        return self.a.observer is not None

    @cached_property
    def operand_reduction(self) -> OperandReduction:
        """How a block's threads look at A's tiles where it is observed."""
        return operand_reduction_of(self.a, self.a.tile.extents[0], self.threads)

    @property
    def parts(self) -> tuple[int, int]:
        """Rows and columns of D whose values are combined before a partial state is kept."""
        return self.lanes.height, self.lanes.width

    @cached_property
    def passes_d(self) -> bool:
        """Whether nothing acts on D behind shared memory."""
        return self.d.to_shared.is_identity and self.epilogue.passes_on

    @cached_property
    def returns_d(self) -> bool:
        """Whether what passes through shared memory stands there in a wider dtype than it came in and goes out."""
        return self.passes_d and narrows(self.d.shared.dtype, self.d.layout.dtype)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block needs."""
        raise NotImplementedError

    def blocks(self, M: int, N: int, sm_count: int) -> int:
        """Thread blocks of a launch on a device of ``sm_count`` multiprocessors."""
        return self.scheduler.blocks(M, N, sm_count)


# --------------------------------------------------------------------------------------------------
# How configurations are refused, and the rules that kernel families share.

SPLITS = (1, 2, 4, 8)                  # blocks of a cluster; more than 8 not every GPU has side by side


def rule(condition: bool, field: str, value: object, said: str | Callable[[], str]) -> None:
    """Raise ConfigError, naming the field and its value, unless the condition holds.

    ``said`` is what would do, or makes that: to write components takes longer than to check them.
    """
    if not condition:
        raise ConfigError(f"{field}={shown(value, 300)}: {said if isinstance(said, str) else said()}")


def divides(small: Tile, large: Tile, field: str, said: str, value: object = None) -> None:
    """The rule that one tile divides another."""
    for name in small.names:
        part, whole = getattr(small.size, name), getattr(large.size, name)
        rule(whole % part == 0, field, small if value is None else value,
             f"{said} ({name}={whole} is not a multiple of {part})")


def order_of(config: Config, cluster: Cluster) -> Order:
    """The order of a launch's tiles (those of a cluster): where D's layout keeps a half, of the tiles of that half."""
    d: Any = config.global_d_layout
    if not d.is_half:
        return config.order
    tile = config.block_shape.size.M * cluster.m, config.block_shape.size.N * cluster.n
    return HalfOfTiles.of(config.order, tile, not d.is_lower)


def check_splits(splits: int) -> None:
    rule(splits in SPLITS, "splits", splits, f"blocks of a cluster that share K are one of {', '.join(map(str, SPLITS))}")


# --------------------------------------------------------------------------------------------------
# A kernel family: a template kernel, and all that is decided of it on the host.

@dataclasses.dataclass(frozen=True)
class KernelFamily(ABC):
    """``kernel`` is the device code, ``name`` what `Config.kernel` calls it. `gemmkit.kernels.spec` lists the families."""

    name: str
    kernel: Callable[..., None]
    minimum_arch: tuple[int, int]

    #: Whether a launch may begin before the kernel before it has ended: the kernel waits for that itself.
    is_dependent = False
    #: Whether transforms between shared memory and registers stand before shared memory, behind those on the way to it.
    joins_transforms = False
    #: Whether its blocks may stay and stream K (`gemmkit.kernels.collectives.split_k`).
    streams_k = False

    @abstractmethod
    def validate(self, config: Config) -> None:
        """Raise ConfigError for the first rule of this family that a configuration breaks."""

    @abstractmethod
    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: OperandArrays | None) -> Spec:
        """What the kernel is specialised by for a class of problems; see `Config.spec`."""

    def is_specialised(self, spec: Spec, config: Config, arrays: OperandArrays) -> bool:
        """Whether ``spec``, made for these arrays or for others whose operands were whole where these are, is what
        `specialise` makes for all such arrays of which this is true. False where that is not known."""
        return False

    def maps(self, spec: Spec, arrays: OperandArrays) -> tuple[Any, ...]:
        """The tensor maps of a problem, None for operands that TMA does not move."""
        return ()

    def in_cluster(self, splits: Any, cluster: Tile) -> int:
        """How many of ``splits`` blocks that share the K of a tile are those of one cluster, of ``cluster`` tiles."""
        return splits

    def registers(self, spec: Spec) -> tuple[int, ...] | None:
        """Registers of a thread of each warp, where warps deal them out anew."""
        return None


# --------------------------------------------------------------------------------------------------
# The kernel families by name: the list to which a new one is added.

class Families(UserDict[str, Any]):
    """Families, or where they are: a family's kernel, rules and specialisation are loaded when it is asked for.

    >>> Families(singlestage="gemmkit.kernels.simt")["singlestage"].minimum_arch
    (5, 0)
    """

    def __getitem__(self, name: str) -> KernelFamily:
        found = self.data[name]
        if isinstance(found, str):
            found = self.data[name] = import_module(found).FAMILY
        return cast(KernelFamily, found)


FAMILIES = Families(
    singlestage="gemmkit.kernels.simt",
    multistage="gemmkit.kernels.sm80.kernel",
    warp_specialised="gemmkit.kernels.sm90.family",
    quantised="gemmkit.kernels.quantised",
)
