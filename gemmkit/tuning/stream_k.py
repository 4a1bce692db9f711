"""Whether a kernel streams K (`gemmkit.kernels.common.stream_k`), and what that is modelled to cost.

The time of whole tiles goes up by a step with each wave, however few tiles the last one has; streamed, it is that of the
k-tiles of all. A launch pays for it with hand-overs: a block writes the sums of one tile and reads those of another.
On an H200 (2026-11-23, f32 and f64, sizes from 768 to 3072, three
tiles each) the model was within 6 % of what was measured, and streams took 0.55 to 1.0 of the time of the same tile's waves.
With two waves in the stream most were as fast as with one or faster (f64 2560^3, 128x128 tiles: 558 us, 658 with one).
complex128 was no faster (0.95 to 1.02 of the time), and float16 is wgmma's.

Hopper's kernel streams by clusters. Its model counts cycles (`cycles`), with hand-overs as bytes by what the L2 gives, and
is there for the order in which the tuner tries streams. It does not choose them: blocks of a stream stand at different
k-tiles and share nothing in the L2, so that some take 0.9 of the default's time and some 1.4 (docs/schedulers.md).
"""

from __future__ import annotations

import math

import numpy as np

from gemmkit.kernels.common.stream_k import LEAST, division
from gemmkit.tuning.split_k import BYTES, KEPT, TRAFFIC

#: Dtypes of A whose products stream K where the model says so: the switch.
CHOSEN = frozenset({np.dtype(np.float32), np.dtype(np.float64)})

WORTH = 0.95                           # of the best time without: what it has to come down to
STREAM = 1.02                          # times the step of whole tiles: parts begin and end anywhere
HANDED = 1000                          # ns: writing the sums of a part; the block that needs them is rarely done before
#: ns: waiting for one block more and adding its sums, where more than two meet (one tile of f32, whose 237 k-tiles are 59
#: parts, takes 32.7 us on an H200; 26 of them are this).
FURTHER = 450
PART = 2.0                             # k-tiles: filling the ring anew for a tile that is begun within


def nanoseconds(tiles: int, k_tiles: int, nbytes: int, step: float, sm_count: int, blocks: int) -> float:
    """The modelled time of a launch by ``blocks`` blocks a multiprocessor, which take ``step`` ns for a k-tile each (all at
    a time), with sums of ``nbytes`` a tile; without the launch itself. Infinite where nothing would be streamed.

    133 tiles of 100 k-tiles on 132 multiprocessors, 1000 ns each, are two waves, or 1.01 and the hand-over:

    >>> round(nanoseconds(133, 100, 2**16, 1000.0, 132, 1)), nanoseconds(132, 100, 2**16, 1000.0, 132, 1)
    (106837, inf)
    """
    launched, streamed = division(tiles, k_tiles, sm_count * blocks, least=LEAST)
    if not streamed:
        return math.inf
    share = streamed * k_tiles / launched
    meet = math.ceil(k_tiles / share)                  # blocks whose sums the one that finishes reads
    moved = max(0.0, 2 * launched * nbytes - KEPT) / TRAFFIC
    whole = (tiles - streamed) // launched * k_tiles
    handed = HANDED + FURTHER * max(0, meet - 2) + meet * nbytes / BYTES
    return STREAM * (share + whole + PART) * step + handed + moved


#: Of Hopper's kernel: bytes a cycle that a block hands over, since first parts end at different times; bytes a cycle that
#: the L2 gives all blocks, which take over at about the same time; cycles until a block sees that it may; and cycles that a
#: cooperative launch begins later, which waits for the end of the kernel before it.
HANDED_BYTES, TAKEN_BYTES, SEEN, COOPERATIVE = 64, 4000, 1500, 3000


def cycles(tiles: int, k_tiles: int, nbytes: int, step: float, finish: float, at_once: int, blocks: int,
           takes_turns: bool = False) -> float:
    """The modelled cycles of a launch of Hopper's kernel with ``at_once`` clusters of ``blocks`` blocks, which take ``step``
    for a k-tile and ``finish`` for a tile's end, with sums of ``nbytes`` a block. Infinite where nothing would be streamed.
    With ``takes_turns`` (ping-pong) one consumer multiplies while the other hands over, or takes over before whole tiles.

    400 tiles of 79 k-tiles on 66 clusters are seven waves of 620,000 cycles, or 6.06 and the hand-over:

    >>> round(cycles(400, 79, 2**17, 1046, 6000, 66, 2)), cycles(396, 79, 2**17, 1046, 6000, 66, 2)
    (565836, inf)
    """
    launched, streamed = division(tiles, k_tiles, at_once, least=LEAST)
    if not streamed:
        return math.inf
    share = streamed * k_tiles / launched
    finished = math.ceil(streamed / launched) + (tiles - streamed) // launched
    others = math.ceil(k_tiles / share)                # clusters whose sums the one that finishes reads
    handed = 0 if takes_turns else nbytes / HANDED_BYTES
    if not takes_turns or tiles == streamed:
        handed += others * (launched * blocks * nbytes / TAKEN_BYTES + SEEN)
    multiplying = STREAM * (share + (tiles - streamed) // launched * k_tiles + PART) * step
    return multiplying + finished * finish + handed + COOPERATIVE


__all__ = ["CHOSEN", "WORTH", "cycles", "nanoseconds"]
