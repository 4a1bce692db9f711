"""How a rank's partial sums reach a peer: the kernel that computes them stores them there, or copy engines fetch them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from gemmkit.distributed.inbox import CHUNKS
from gemmkit.distributed.partial_sums import Reduction, sees_rows
from gemmkit.distributed.shards import even_lengths

__all__ = ["Sending", "chunks_of", "sending_of"]

_SMALL = 32 << 20                      # bytes for a peer
_TILE = 128, 256                       # of D: what `chunks_of` counts in


class Sending(NamedTuple):
    """``stores``: a peer's rows are one product, whose kernel writes to the peer's slot over NVLink. Else they are computed
    in ``chunks``, by the mapping ``conf`` of the product of all rows, and each is copied while the next is computed.

    Of two H100, a reduce-scatter of 4096^3 takes 142 us with stores and 187 with copies: two launches in place of three, and
    no wait of one stream for another. A kernel that stores 67 MB to a peer takes 417 us, and 355 at home, however many
    subtiles of D are on their way; so copies are ahead at 8192^3 (807 us, 855 with stores). Halves of 8192 x 14336 x 2048
    have a mapping of their own in the model, which takes 345 to 388 us; that of the whole takes 322.
    """

    stores: bool
    chunks: int
    conf: Any = None


def sending_of(lengths: tuple[int, ...], b: Any, how: Reduction, conf: Any, components: dict[str, Any]) -> Sending:
    """The way of a reduction on this rank's GPU; ``lengths`` are the rows of all ranks, ``b`` this rank's operand."""
    if sees_rows(conf, components):                      # all rows are multiplied at once
        return Sending(False, 1)
    if max(lengths) * b.shape[1] * how.travels.itemsize < _SMALL:
        return Sending(True, 1)
    sm_count = torch.cuda.get_device_properties(b.device).multi_processor_count
    return Sending(False, chunks_of(lengths, b.shape[1], sm_count), how.mapping)


def chunks_of(lengths: tuple[int, ...], columns: int, sm_count: int) -> int:
    """In how many chunks a rank's rows are computed and pushed. A chunk is pushed while the next is computed, so two ranks
    have two at least, unless that takes more waves of tiles; with more ranks the next chunk is another rank's.

    3 chunks of 4096 x 8192 are 9 waves of 132 tiles, where 2 and 4 are 8, as is one:

    >>> chunks_of((4096, 4096), 8192, 132), chunks_of((256, 256), 512, 132), chunks_of((4096,) * 4, 8192, 132)
    (2, 1, 1)
    """
    def waves(chunks: int) -> int:
        tiles = (math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
                 for rows in even_lengths(max(lengths), chunks))
        return sum(math.ceil(one / sm_count) for one in tiles)

    if len(lengths) > 2:
        return 1
    best = min(range(2, CHUNKS + 1), key=waves)
    return best if waves(best) <= waves(1) else 1
