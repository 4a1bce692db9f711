"""``BoxMMAOp``: mma.sync for operands that are contiguous along different indices of K.

In a contraction K may stand for two indices, p and q, of which A has neighbours along p and B along q. An operation of
m16n8k16 sums over 16 places, and any term of K may stand in any place, as long as A and B agree. K is taken in boxes of 8
p's by 8 q's, four operations each. Lane (g, t) = (lane / 4, lane % 4) supplies, in operation s of a box, with u = s XOR t:

| places of the operation | p | q |
|---|---|---|
| 2 t, 2 t + 1 | 2 u | 2 t, 2 t + 1 |
| 2 t + 8, 2 t + 9 | 2 u + 1 | 2 t, 2 t + 1 |

The places of t = 0 to 3 have all eight q's and, over s, all eight p's: the four operations sum the box. Both operands stand
in shared memory as in global memory, in pieces of 16 bytes:

* the *combed* operand, contiguous along q, has a piece for each p. The lane loads word t of pieces 2 u and 2 u + 1, the
  operation's registers as they are;
* the other, contiguous along p, has a piece for each q. The lane loads word u of pieces 2 t and 2 t + 1, the pairs
  (2 u, 2 u + 1) of two q's, which two PRMTs make pairs of q's.

u differs among the four t's. With lines padded by 16 bytes the 32 words of a load then lie in 32 banks; with the same p's
for all lanes, four of the other operand's words would lie in each bank. No value goes from lane to lane.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import join
from gemmkit.lang.registers import Fragment, generate
from gemmkit.layouts.swizzled import BOX, RUN, Boxed
from gemmkit.operators.mma import MMAOp
from gemmkit.ptx.memory import load_shared, repoint
from gemmkit.ptx.special import lane_index
from gemmkit.ptx.words import pack_narrow, unpack_narrow, weave_words
from gemmkit.tiling import translate

PIECE, WORD = 16, 4                    # bytes


@dataclass(frozen=True)
class BoxMMAOp(MMAOp):
    """Products on tensor cores of 16-bit operands that are contiguous along different indices of K; sm_80+.

    ``combed`` is "a" or "b": the operand whose neighbours in memory are eight apart along K (a `layouts.Tensor` with
    ``comb`` = 8), which stands `layouts.Boxed` in shared memory. The other is contiguous along K, from wherever it comes.
    Other fields are those of `MMAOp`. For kernel="multistage", with k-tiles of multiples of 64; elements are not transformed
    between shared memory and registers.

    Raises ValueError for dtypes that are not of 16 bits, another K, or no such operand.

    >>> BoxMMAOp(N=16, combed="a")
    BoxMMAOp(N=16, combed='a')
    """

    combed: str = "b"

    __repr__ = MMAOp.__repr__

    def _check(self) -> None:
        super()._check()
        if self.dtype.itemsize != 2 or self.K != 16:
            raise ValueError(f"BoxMMAOp(dtype={self.dtype}, K={self.K}): float16 or bfloat16 and K=16 are needed")
        if self.combed not in ("a", "b"):
            raise ValueError(f"BoxMMAOp(combed={self.combed!r}): 'a' or 'b' is needed")

    def instead(self, arch: tuple[int, int]) -> str:
        return MMAOp(N=self.N, dtype=self.dtype, accumulator=self.accumulator).instead(arch)

    # -- which lane holds what: of A and B that depends on the operation

    @cached_property
    def map_a(self) -> Any:
        return None

    @cached_property
    def map_b(self) -> Any:
        return None

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, 8)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.dtype, 4 * self.columns)

    # -- shared memory

    def refuses(self, operand: str, layout: Any) -> str | None:
        if operand not in ("a", "b"):
            return None
        along_k = 1 if operand == "a" else 0
        if layout.axis != along_k:
            order = ("ColMajor", "RowMajor")[along_k]
            return f"{self!r} loads lines along K; take Padded({order}(...), {RUN})"
        if isinstance(layout, Boxed) != (operand == self.combed):
            return f"{self!r} reads boxes of {self.combed!r} alone: that operand's shared layout, and no other, is Boxed"
        return None

    def line_alignment(self, operand: str, layout: Any) -> int:
        return WORD if operand in ("a", "b") else super().line_alignment(operand, layout)

    def shared_axis(self, operand: str, axis: int) -> int:
        return {"a": 1, "b": 0}.get(operand, axis)

    def padding(self, operand: str, axis: int) -> int:
        return PIECE

    def place_a(self, layout: Any, tile: Any, leading: int) -> int:
        return layout.position(lane_place(tile, 1, self.combed == "a").base, leading)

    def place_b(self, layout: Any, tile: Any, leading: int) -> int:
        return layout.position(lane_place(tile, 0, self.combed == "b").base, leading)

    def load_a(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        near, far = load_lines(self, 1, self.combed == "a", 2, layout, pointer, tile, leading)
        return unpack_narrow(self.dtype, (near[0], far[0], near[1], far[1]))

    def load_b(self, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
        return unpack_narrow(self.dtype, join(load_lines(self, 0, self.combed == "b", self.columns, layout, pointer, tile,
                                                         leading)))


# -- device code ------------------------------------------------------------------------------------------------------

def lane_place(tile: Any, k_axis: int, is_combed: bool) -> Any:
    """The tile moved to this lane's line (g), and to word t of the line's pieces or to piece 2 t."""
    g, t = lane_index() // 4, lane_index() % 4
    along = 2 * t if is_combed else 2 * RUN * t
    return translate(tile, g, along) if k_axis == 1 else translate(tile, along, g)


def load_lines(operator: Any, k_axis: int, is_combed: bool, lines: int, layout: Any, pointer: Any, tile: Any,
               leading: int) -> tuple:
    """The two words of an operation of each of a lane's lines, which are eight apart."""
    u = tile.offset[k_axis] // 16 % 4 ^ lane_index() % 4
    moved = repoint(pointer, operator.dtype, u * 2 * PIECE if is_combed else u * WORD)
    return generate(lines, load_line, k_axis, is_combed, layout, moved, lane_place(tile, k_axis, is_combed), leading)


def load_line(n: int, k_axis: int, is_combed: bool, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    first = load_piece(0, n, k_axis, layout, pointer, tile, leading)
    second = load_piece(1, n, k_axis, layout, pointer, tile, leading)
    if is_combed:
        return first[0], second[0]
    return weave_words((first, second))


def load_piece(piece: int, n: int, k_axis: int, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """A word of the box's piece ``piece`` behind the lane's first, of the n-th line."""
    along, across = tile.offset[k_axis] // BOX * BOX + piece * RUN, tile.offset[1 - k_axis] + 8 * n
    ahead = (across, along) if k_axis == 1 else (along, across)
    return pack_narrow(load_shared(pointer, layout.position(tile.base, leading), layout.position(ahead, leading), 2))
