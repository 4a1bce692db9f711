"""A kernel family: a template kernel, and all that is decided of it on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.spec import Spec
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.config import Config


@dataclass(frozen=True)
class KernelFamily(ABC):
    """``kernel`` is the device code, ``name`` what `Config.kernel` calls it. `gemmkit.kernels.select` lists the families."""

    name: str
    kernel: Callable[..., None]
    minimum_arch: tuple[int, int]

    #: Whether a launch may begin before the kernel before it has ended: the kernel waits for that itself.
    is_dependent = False
    #: Whether transforms between shared memory and registers stand before shared memory, behind those on the way to it.
    joins_transforms = False
    #: Whether its blocks may stay and stream K (`gemmkit.kernels.common.stream_k`).
    streams_k = False

    @abstractmethod
    def validate(self, config: Config) -> None:
        """Raise ConfigError for the first rule of this family that a configuration breaks."""

    @abstractmethod
    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: Arrays | None) -> Spec:
        """What the kernel is specialised by for a class of problems; see `Config.spec`."""

    def is_specialised(self, spec: Any, config: Config, arrays: Arrays) -> bool:
        """Whether ``spec``, made for these arrays or for others whose operands were whole where these are, is what
        `specialise` makes for all such arrays of which this is true. False where that is not known."""
        return False

    def maps(self, spec: Any, arrays: Arrays) -> tuple[Any, ...]:
        """The tensor maps of a problem, None for operands that TMA does not move."""
        return ()

    def in_cluster(self, splits: Any, cluster: Tile) -> int:
        """How many of ``splits`` blocks that share the K of a tile are those of one cluster, of ``cluster`` tiles."""
        return splits

    def registers(self, spec: Any) -> tuple[int, ...] | None:
        """Registers of a thread of each warp, where warps deal them out anew."""
        return None
