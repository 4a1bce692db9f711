"""Modes: the dimensions that make up the rows, columns or terms of a contraction's matrices, and how they are ordered.

Two tensors have each of them. Neighbours in a tensor's memory should be neighbours in the product, or a thread can move
nothing at once; and a tile should cover whole lines of memory. Where the tensors disagree, a mode is cut in two: a mode of
extent v w and stride s is one of extent v and stride s, and one of extent w and stride s v.

* One tensor leads: ``v`` elements of its fastest mode, 16 bytes, come first. Its accesses are vectors.
* Where another mode is the other tensor's fastest (the unit-stride modes conflict: the tensors are *at odds*), as many
  elements of that come next. Elements contiguous in the second tensor are then v apart in the matrix, as the teeth of a comb
  are: a thread that owns all v interleaved vectors accesses both tensors in vectors (`gemmkit.layouts.Tensor`, ``comb``).
  Of equally large tensors it is two or three such vectors, for memory moves sectors of 32 bytes.
* Where Hopper's kernel reads more of the leading tensor than it writes of the other, a whole sector of 32 bytes of it comes
  first, and one vector of the other: copies of 16 bytes are asked for together where they are neighbours in shared memory,
  too.
* Where the other tensor is written, it never leads, and if it is the larger no more than four elements of what leads come
  first: parts of sectors cost more to write than to read.
* The rest is in the order of the larger tensor if that is much the larger, else in that of the leading one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gemmkit import strides
from gemmkit.shapes import Shape, Step

LARGER = 4                             # times as many elements: what a tensor must have to decide over another
WIDE = 16                              # bytes of the widest access of a thread
TEETH = 8                              # elements of the widest vector: a thread holds as many teeth
FEW, MORE = 4, 1.15                    # or so many, where D is to have whole sectors, because it is so many times as large


class Mode(NamedTuple):
    """One dimension that two tensors have, or several merged: its extent and its strides in the two."""

    extent: int
    first: int
    second: int

    @staticmethod
    def all_of(modes: Iterable[strides.Mode]) -> list[Mode]:
        """The modes of (extent, stride) pairs, whose strides are `Step`s in the two tensors."""
        return [Mode(extent, *step) for extent, step in modes if extent != 1]

    @property
    def shape(self) -> Shape:
        """From its elements to their places in both tensors."""
        return Shape.of_modes([[(self.extent, Step(self[1:]))]])

    def cut(self, count: int) -> list[Mode]:
        """The ``count`` elements that come first, and the others: a tile, and where the tiles begin."""
        outer, inner = self.shape.tile(count)
        return Mode.all_of((*inner.modes[0], *outer.modes[0]))


def ordered(modes: Sequence[Mode], itemsizes: tuple[int, int], counts: tuple[int, int], stores: bool = False,
            is_little: bool = False, is_reread: bool = False) -> list[Mode]:
    """The modes of two tensors, whose elements have ``itemsizes`` bytes and of which there are ``counts``: the fastest
    first, those merged that lie in each other's stride in both. ``stores`` says that the second is written, ``is_little``
    that it gives way where the first has neighbours: to move it is a small part of the whole. ``is_reread`` says that the
    first is read many times, by copies of 16 bytes, for each time that the second is written.

    >>> [mode.extent for mode in ordered([Mode(16, 1, 48), Mode(48, 16, 1)], (4, 4), (768, 768))]          # at odds
    [4, 8, 4, 6]
    >>> ordered([Mode(16, 1, 16), Mode(48, 16, 256)], (4, 4), (768, 768))
    [Mode(extent=768, first=1, second=16)]
    """
    larger = next((n for n in (0, 1) if counts[n] >= LARGER * max(1, counts[1 - n])), None)
    first, second = (any(x[1 + n] == 1 for x in modes) for n in (0, 1))
    if is_little and first:
        return merged(sorted_by(0, modes))
    lead = 1 if second and (not first or (larger == 1 and not stores)) else 0
    modes = merged(sorted_by(lead, modes))
    decides = lead if larger is None else larger
    pieces = dict(found for n in (lead, 1 - lead) for found in fastest(modes, n, itemsizes[n]))
    if not pieces and (first or second):                     # no vectors: let the lead's neighbours be neighbours at least
        return modes
    by_sectors = is_reread and stores and len(pieces) == 2 and lead == 0
    if stores and len(pieces) == 2 and counts[1] >= MORE * counts[0] and not by_sectors:
        at = next(iter(pieces))
        pieces[at] = math.gcd(pieces[at], FEW)
    order = sorted_by(decides, modes)
    if not pieces or [modes[at] for at in pieces] == order[:1]:
        return merged(order) or [Mode(1, 1, 1)]
    front: list[Mode] = []
    rest = [mode for at, mode in enumerate(modes) if at not in pieces]
    for at, count in pieces.items():
        if by_sectors and not front:
            count *= 2 if modes[at].extent // count % 2 == 0 else 1
        elif front and not by_sectors and (stores or larger is None):   # a tile should have whole sectors of the other, too
            count *= next((n for n in (2, 3) if modes[at].extent // count % n == 0), 1)
        piece, *others = modes[at].cut(count)
        front.append(piece)
        rest += others
    return merged([*front, *sorted_by(decides, rest)])


def fastest(modes: Sequence[Mode], which: int, itemsize: int) -> list[tuple[int, int]]:
    """Which mode's elements are neighbours in one tensor, and how many of them a thread moves at once; none if not two."""
    at = next((at for at, mode in enumerate(modes) if mode[1 + which] == 1), None)
    count = 1 if at is None else math.gcd(modes[at].extent, TEETH, max(1, WIDE // itemsize))
    return [(at, count)] if at is not None and count > 1 else []


def sorted_by(which: int, modes: Sequence[Mode]) -> list[Mode]:
    """The fastest of one tensor first; what does not move in it (or has no stride) last."""
    return sorted(modes, key=lambda x: (abs(x[1 + which]) or np.inf, abs(x[2 - which])))


def merged(modes: Sequence[Mode]) -> list[Mode]:
    """The modes, those made one that follow each other and lie in each other's stride in both tensors."""
    return Mode.all_of(strides.merged((mode.extent, Step(mode[1:])) for mode in modes))
