"""Where the arrays of a plan may lie: at what alignment, and apart from each other.

All follows from their addresses, for the arrays of a plan's calls are of one kind. So a plan asks again only for addresses
that it has not just asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemmkit.component_arrays import ALONGSIDE, Held
from gemmkit.runtime.array_info import are_the_same
from gemmkit.runtime.arrays import ArrayInfo, byte_range, shares_memory

Question = Callable[[int, int, int, int], bool]


def fitting(infos: Sequence[ArrayInfo | None], alignments: Sequence[int]) -> Question:
    """``f(out, a, b, c)``: whether arrays at these addresses are as aligned as a plan's, and out shares memory with none.
    It may be c itself. An array that is not there is at address 0."""
    (a0, a1), (b0, b1), (c0, c1), (d0, d1) = map(_extent, infos)
    c, out = infos[2:]
    has_c, may_be_c = c is not None, c is not None and out is not None and _are_alike(c, out)
    mask = max(alignments) - 1

    def fits(at_out: int, at_a: int, at_b: int, at_c: int) -> bool:
        if (at_a | at_b | at_c | at_out) & mask and any(
                at % align for at, align in zip((at_a, at_b, at_c, at_out), alignments)):
            return False
        low, high = at_out + d0, at_out + d1
        return not ((at_a + a0 < high and low < at_a + a1 and share(0, at_a, at_out))
                    or (at_b + b0 < high and low < at_b + b1 and share(1, at_b, at_out))
                    or (has_c and at_c + c0 < high and low < at_c + c1 and not (at_c == at_out and may_be_c)
                        and share(2, at_c, at_out)))

    def share(n: int, at: int, at_out: int) -> bool:
        """Whether arrays whose bytes lie among each other have one in common."""
        x = infos[n]
        assert x is not None and out is not None
        return shares_memory(x._replace(pointer=at), out._replace(pointer=at_out))

    return fits


def sharing(infos: Sequence[ArrayInfo | None], held: Sequence[tuple[str, Held]]) -> Question | None:
    """``f(out, a, b, c)``: whether arrays at these addresses may share memory with the components', where one of them is
    written; None where the components have no arrays."""
    if not held:
        return None
    (a0, a1), (b0, b1), (c0, c1), (d0, d1) = map(_extent, infos)
    out = infos[3]
    assert out is not None
    read = [(*byte_range(x.info), x.info.pointer if field in ALONGSIDE and _are_alike(x.info, out) else -1)
            for field, x in held]
    written = [byte_range(x.info) for _, x in held if x.is_output]

    def shares(at_out: int, at_a: int, at_b: int, at_c: int) -> bool:
        low, high = at_out + d0, at_out + d1
        for first, last, itself in read:
            if first < high and low < last and itself != at_out:
                return True
        for first, last in written:
            if ((first < at_a + a1 and at_a + a0 < last) or (first < at_b + b1 and at_b + b0 < last)
                    or (first < at_c + c1 and at_c + c0 < last) or (first < high and low < last)):
                return True
        return False

    return shares


def _are_alike(x: ArrayInfo, out: ArrayInfo) -> bool:
    """Whether an array at out's address is out."""
    return are_the_same(x._replace(pointer=out.pointer), out)


def _extent(info: ArrayInfo | None) -> tuple[int, int]:
    """First and last byte of an array, relative to its pointer."""
    if info is None:
        return 0, 0
    first, last = byte_range(info)
    return first - info.pointer, last - info.pointer
