"""Matrices of which most blocks are empty: `BlockSparse`, an array and a mask of its blocks.

The mask is a condition of the kernel (`gemmkit.kernels.spec.Condition`): a k-tile in an empty block is neither loaded nor
multiplied. Tiles are as the mapping has them, so a tile must lie in one block, which `BlockMask.check_tiles` looks after.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.components import Array
from gemmkit.kernels.collectives.scheduler import Order
from gemmkit.kernels.spec import Condition, rule
from gemmkit.lang.components import dataclass
from gemmkit.layouts.matrices import Matrix, plain_layout, transposed
from gemmkit.ptx.special import udiv
from gemmkit.runtime.arrays import describe
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.kernels.config import Config


@dataclass(frozen=True)
class BlockMask(Condition):
    """Whether the block in which a tile of A (of B with ``of_b``) lies has elements: ``mask[row, column]``, of blocks of
    ``rows`` x ``columns``."""

    mask: Array
    rows: int
    columns: int
    of_b: bool = False

    array_names = MappingProxyType({"mask": "mask of BlockSparse"})

    @property
    def depends_on(self) -> tuple[str, ...]:                # type: ignore[override]
        return ("n",) if self.of_b else ("m",)

    def __call__(self, m: int, n: int, k: int) -> bool:
        if self.of_b:
            return self.mask[k // self.rows, n // self.columns]  # type: ignore[no-any-return]
        return self.mask[m // self.rows, k // self.columns]  # type: ignore[no-any-return]

    def check_tiles(self, block: Tile) -> None:
        tile, name = ((block.size.K, block.size.N), "b") if self.of_b else ((block.size.M, block.size.K), "a")
        across = "N" if self.of_b else "M"
        along_k, other = (self.rows, self.columns) if self.of_b else (self.columns, self.rows)
        rule(self.rows % tile[0] == 0 and self.columns % tile[1] == 0, "block_shape", block, f"its tiles of {name}, "
             f"{tile[0]} x {tile[1]}, must divide the blocks of its mask, {self.rows} x {self.columns}; give a conf whose "
             f"block_shape has {across}={other} and K={along_k} or divisors of these, or a mask of blocks that are "
             f"multiples of {tile[0]} x {tile[1]}")


@dataclass(frozen=True)
class LongestFirst(Order):
    """All tiles of a row of blocks (with ``of_columns`` of a column), then those of the next: in the order of ``blocks``,
    which `BlockSparse.longest_first` makes. A block has ``tiles`` tiles of the mapping along it."""

    blocks: Array
    tiles: int
    of_columns: bool = False

    array_names = MappingProxyType({"blocks": "blocks of LongestFirst"})

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        if self.of_columns:
            at = udiv(linear, rows)
            return linear - at * rows, self.moved(at)
        at = udiv(linear, columns)
        return self.moved(at), linear - at * columns

    def moved(self, at: int) -> int:
        block = udiv(at, self.tiles)
        return self.blocks[block] * self.tiles + (at - block * self.tiles)  # type: ignore[no-any-return]


class BlockSparse(Matrix):
    """A matrix of blocks of ``block`` = (rows, columns), where ``mask[i, j]`` says whether block (i, j) has elements.

    For A or B of `gemmkit.matmul`, `gemmkit.plan` and `gemmkit.blas.gemmEx`. The kernel neither loads nor multiplies empty
    blocks: they add nothing to any sum, whatever memory holds there (NaN, too) and whatever a transform would make of it. An
    operator that is no sum of products leaves them out of its reduction.

    ``array`` is (R, C) of any strides. ``mask`` is a bool array, ceil(R / rows) x ceil(C / columns), on the array's device.
    The kernel reads it in each call, so it may change between two calls. Tiles divide the blocks, so that a tile lies in one
    block. Of real numbers, blocks of a multiple of 16 rows and columns have such tiles; of a multiple of 64, fast ones.

    Raises TypeError for what is no array and for blocks that are no whole numbers; ValueError for an array or a mask that is
    no matrix, for blocks of no elements, and for a mask of another dtype or shape. `matmul` raises TypeError for a
    ``condition`` beside it, and ConfigError where the tiles of a ``conf``, or all tiles, do not divide the blocks.

    >>> import numpy as np, gemmkit as gk
    >>> a = np.float32(np.full((32, 64), np.nan))
    >>> a[:, :32] = 1
    >>> with gk.emulate():
    ...     left = gk.functions.BlockSparse(a, np.array([[True, False]]), (32, 32))
    ...     gk.matmul(left, np.ones((64, 2), np.float32))[0].tolist()
    [32.0, 32.0]
    """

    def __init__(self, array: Any, mask: Any, block: tuple[int, int]):
        if not isinstance(block, tuple) or len(block) != 2 or not all(map(_is_whole, block)):
            raise TypeError(f"block={block!r}: a tuple of two whole numbers is needed, the rows and columns of a block")
        if min(block) < 1:
            raise ValueError(f"block={block!r}: a block has 1 row and column or more")
        layout, info = plain_layout(array), describe(mask, "mask")
        super().__init__(array, layout)
        if len(self.shape) != 2:
            raise ValueError(f"array has shape {self.shape}; a matrix of 2 dimensions is needed, and no stack")
        needed = tuple(-(-extent // size) for extent, size in zip(self.shape, block))
        if info.dtype != np.bool_:
            raise ValueError(f"mask has dtype {info.dtype}; bool is needed (mask != 0)")
        if info.shape != needed:
            raise ValueError(f"mask has shape {info.shape}; the array of shape {self.shape} has {needed[0]} x {needed[1]} "
                             f"blocks of {block[0]} x {block[1]}, and {needed} is needed")
        self.mask, self.block = mask, (int(block[0]), int(block[1]))
        self._conditions: dict[str, BlockMask] = {}

    @property
    def T(self) -> BlockSparse:
        return BlockSparse(transposed(self.array), transposed(self.mask), self.block[::-1])

    def condition(self, name: str) -> Condition:
        """Which k-tiles are computed where this is operand ``name``, "a" or "b"."""
        known = self._conditions.get(name)
        if known is None or known.mask is not self.mask:  # one that comes again is recognised (`gemmkit.components`)
            self._conditions[name] = known = BlockMask(self.mask, *self.block, name == "b")
        return known

    def longest_first(self, name: str, conf: Config) -> Config:
        """``conf`` with an order of tiles in which those with the most blocks come first, where this is operand ``name``.

        Thread blocks take one tile after the other, so a long tile at the end would run alone; with the longest tiles first,
        all blocks end at about the same time. The array's library counts and sorts the mask once, in this call, on its
        current stream; the host does not wait. The order changes only the time: if the mask changes later, the result is
        right and may be slow.

        Raises ConfigError where the tiles of ``conf`` do not divide the blocks, ValueError for another ``name``.

        >>> import numpy as np, gemmkit as gk
        >>> mask = np.array([[True, False], [False, False], [True, True]])
        >>> a = gk.functions.BlockSparse(np.ones((48, 32), np.float32), mask, (16, 16))
        >>> conf = gk.get_config(operator=gk.operators.FPUOp(M=16, N=16), kernel="singlestage",
        ...                      global_a_layout=gk.layouts.RowMajor("float32"),
        ...                      block_shape=gk.Tile(M=16, N=16, K=16))
        >>> a.longest_first("a", conf).order.blocks.tolist()
        [2, 0, 1]
        """
        if name not in ("a", "b"):
            raise ValueError(f"name={name!r}: 'a' or 'b' is needed, the operand that this is")
        self.condition(name).check_tiles(conf.block_shape)
        of_b = name == "b"
        count = self.mask.sum(0 if of_b else 1)
        extent, block = self.shape[of_b], self.block[of_b]
        if extent % block:
            count[-1:] = -1                                        # has fewer tiles, so it stays the last
        blocks = (-count).argsort()
        blocks = blocks.astype("int32") if hasattr(blocks, "astype") else blocks.int()
        tile = conf.block_shape.size.N if of_b else conf.block_shape.size.M
        return replace(conf, order=LongestFirst(blocks, block // tile, of_b))


def _is_whole(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool)
