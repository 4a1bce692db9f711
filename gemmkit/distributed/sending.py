"""How a rank's partial sums reach a peer: the kernel that computes them stores them there, or copy engines fetch them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from gemmkit.config import Config
from gemmkit.distributed.inbox import CHUNKS
from gemmkit.distributed.partial_sums import Reduction, before_sum, sees_rows
from gemmkit.distributed.shards import even_lengths
from gemmkit.problem import Call, resolve
from gemmkit.runtime.arrays import ArrayInfo, describe

_SMALL = 32 << 20                      # bytes for a peer
_TILE = 128, 256                       # of D: what `chunks_of` counts in
_ELSEWHERE = 1 << 56                   # an address that no operand has


class Sending(NamedTuple):
    """``stores``: a peer's rows are one product, whose kernel writes to the peer's slot over NVLink. Else they are computed
    in ``chunks``, by the mapping ``conf``, and each is copied while the next is computed. ``own`` is the mapping of this
    rank's own rows, which become D.

    Of two H100, a reduce-scatter of 4096^3 takes 142 us with stores and 187 with copies: two launches in place of three, and
    no wait of one stream for another. A kernel that stores 67 MB to a peer takes 417 us, and 355 at home, however many
    subtiles of D are on their way; so copies are ahead at 8192^3 (807 us, 855 with stores).
    """

    stores: bool
    chunks: int
    conf: Config | None = None
    own: Config | None = None


def sending_of(lengths: tuple[int, ...], a: Any, b: Any, how: Reduction, conf: Config | None,
               components: dict[str, Any]) -> Sending:
    """The way of a reduction on this rank's GPU; ``lengths`` are the rows of all ranks, ``a`` and ``b`` its operands."""
    if sees_rows(conf, components):                      # all rows are multiplied at once
        return Sending(False, 1)
    if max(lengths) * b.shape[1] * how.travels.itemsize < _SMALL:
        return Sending(True, 1)
    sm_count = torch.cuda.get_device_properties(b.device).multi_processor_count
    mapping = alone(max(lengths), a, b, len(lengths), how, components)
    return Sending(False, chunks_of(lengths, b.shape[1], sm_count), mapping, mapping if how.travels == how.result else None)


def alone(rows: int, a: Any, b: Any, ranks: int, how: Reduction, components: dict[str, Any]) -> Config | None:
    """The mapping of the product that gives the sum without other ranks: of one rank's rows and all of K. None where its
    transpose would be computed.

    It is that of the partial products, too. A reduce-scatter of 8192 x 14336 x 4096 over two H100 takes 753 us so, and 786
    with the model's mapping for half of K (128 x 128 in turns); one of 8192^3 807, and 859 with that of all ranks' rows,
    whose tiles of 192 columns leave the sixth wave of a chunk a fifth full.
    """
    out = describe(a, "a")._replace(pointer=_ELSEWHERE, shape=(rows, b.shape[1]), strides=(b.shape[1], 1), dtype=how.travels)
    found = single(rows, a, b, None, out, ranks, before_sum(components))
    return None if found.swap_ab else found.config


def single(rows: int, a: Any, b: Any, c: ArrayInfo | None, out: ArrayInfo | None, ranks: int,
           components: dict[str, Any]) -> Call:
    """The product that gives ``rows`` of D without other ranks, of all of K. Raises what `gemmkit.matmul` raises."""
    of_a, of_b = describe(a, "a"), describe(b, "b")
    return resolve(_longer(of_a, (rows, a.shape[1] * ranks), ranks), _longer(of_b, (b.shape[0] * ranks, b.shape[1]), ranks),
                   c, out, None, components)


def _longer(info: ArrayInfo, shape: tuple[int, int], ranks: int) -> ArrayInfo:
    """An array that continues along K as this one does: lines along K become longer."""
    inner = info.strides.index(1) if 1 in info.strides else 1
    return info._replace(shape=shape, strides=tuple(s if n == inner else s * ranks for n, s in enumerate(info.strides)))


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
