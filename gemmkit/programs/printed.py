"""What a kernel's text is, and what it was printed for: results and arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmkit.kernels.common.cluster import Cluster
from gemmkit.programs.expressions import Function
from gemmkit.programs.trace import Store

#: Statements before a kernel first touches what others write, on GPUs where a launch may begin before the kernel before it
#: has ended (compute capability 9.0 and above): the next one may begin, and this one waits for the one before. What begins a
#: kernel is done under the end of another: 2048^3 takes 23.9 us in place of 25.8 (H200).
EARLY = "grid_launch_dependents()", "grid_wait()"


@dataclass(eq=False)
class Out:
    """A result: how it leaves, and the function of its elements (None: the sums as they are)."""

    store: Store
    dtype: np.dtype
    kind: str                          # the collective's name
    pairs: bool
    function: Function | None
    sums: str                          # what is stored where there is no function

    @property
    def name(self) -> str:
        return self.store.parameter.name


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
    block is of, or operands that threads copy, results, arrays that threads read."""

    text: str
    maps: tuple[tuple[str, str], ...]
    outs: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: tuple[str, ...]
    tile: tuple[str, ...]              # those of the sizes that tiles go along
    scalars: tuple[str, ...]
    threads: int
    operands: tuple[str, ...] = ()


def of_blocks(count: str, cluster: Cluster) -> str:
    """A text's number of blocks as one of clusters."""
    return count if cluster.is_single else f"udiv({count}, {cluster.size})"
