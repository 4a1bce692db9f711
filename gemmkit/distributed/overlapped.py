"""Calls over symmetric memory: copy engines push while the kernel computes what is there."""

from __future__ import annotations

import time
from typing import Any

import torch

from gemmkit.distributed.calls import multiply, new
from gemmkit.distributed.gates import Gates, gated
from gemmkit.distributed.inbox import CHUNKS, Inbox, size_class
from gemmkit.distributed.peers import symmetric_peers, why_not_symmetric
from gemmkit.distributed.rank_order import InRankOrder
from gemmkit.distributed.ranks import Ranks
from gemmkit.distributed.shards import even_lengths, offsets
from gemmkit.torch.forms import array_of

__all__ = ["WAYS", "all_gather_overlapped", "check_way", "chunks_of", "exchange_overlapped", "in_rank_order",
           "inbox_for"]

WAYS = "plain", "symmetric"
_TRIAL = 20                            # seconds that a new inbox's first call may take


def check_way(way: Any) -> None:
    """Raise ValueError for another ``way`` than `WAYS` and None."""
    if way not in (None, *WAYS):
        raise ValueError(f"way={way!r}: {' or '.join(map(repr, WAYS))} is needed, or None, which is the plain way")


#: Whether copies between GPUs run beside a grid that holds all multiprocessors is not known yet: if they do not, a call ends
#: by the group's timeout. So that way is taken where it is asked for.
UNTRIED = "the symmetric way was run by two ranks on one GPU, not yet between two: way='symmetric' takes it"


def inbox_for(ranks: Ranks, device: Any, nbytes: int, way: str | None) -> Inbox | None:
    """The group's inbox with slots of ``nbytes`` bytes; None where a call takes the plain way, of which
    ``ranks.why_plain`` says why. All ranks call this alike.

    Raises RuntimeError where the symmetric way is asked for and cannot be had.
    """
    if way == "plain":
        why: str | None = "way='plain' was given"
    elif nbytes == 0:
        why = "nothing is to be sent"
    elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        why = "the stream is being captured, and a graph's epochs would be stale"
    elif way is None:
        why = UNTRIED
    else:
        why = ranks.once("symmetric memory", lambda: why_not_symmetric(ranks, device))
    key = device, size_class(nbytes)
    if why is None:
        why = ranks.once(f"an inbox of {key}", lambda: _make(ranks, key))
    if why is None:
        why = ranks.once(f"the first call over {key}", lambda: _tried(ranks.inboxes[key]))
    ranks.why_plain = why
    if why is None:
        return ranks.inboxes[key]
    if way == "symmetric":
        raise RuntimeError(f"way='symmetric': {why}; way=None takes the plain way here")
    return None


def _make(ranks: Ranks, key: Any) -> str | None:
    """The inbox; or why PyTorch cannot map the peers' memory: several hosts, GPUs without peer access."""
    device, slot_bytes = key
    try:
        peers = symmetric_peers(ranks, Inbox.total(ranks.size, slot_bytes), device)
    except RuntimeError as error:
        return f"PyTorch makes no symmetric memory: {error}"
    ranks.inboxes[key] = Inbox(ranks, peers, slot_bytes)
    return None


def _tried(inbox: Inbox) -> str | None:
    """What is wrong with the inbox's first call, in which each rank pushes its number to all; None where all have come."""
    rank, size = inbox.ranks.rank, inbox.ranks.size
    try:
        inbox.begin()
        own = torch.full((1,), rank + 1, dtype=torch.int32, device=inbox.device)
        for step in range(1, size):
            inbox.push((rank - step) % size, own, rank * own.element_size())
        own.record_stream(inbox.stream)
        inbox.pushed()
        inbox.own()
        inbox.end()
    except RuntimeError as error:
        return f"pushing to a peer fails: {error}"
    last = time.monotonic() + min(_TRIAL, inbox.ranks.timeout.total_seconds())
    flags = inbox.arrived[:size].view(torch.int32)
    while (found := flags.tolist()) != [inbox.epoch] * size:
        if time.monotonic() > last:
            return f"a trial found the flags {found}, where each is to be {inbox.epoch}"
    numbers = inbox.slot(rank)[:4 * size].view(torch.int32).tolist()
    numbers[rank] = rank + 1
    return None if numbers == [*range(1, size + 1)] else f"a trial found {numbers} behind the flags"


def all_gather_overlapped(ranks: Ranks, inbox: Inbox, gates: Gates, a_shard: Any, lengths: tuple[int, ...], b: Any, c: Any,
                          out: Any, conf: Any, return_a: bool, components: dict[str, Any]) -> Any:
    """`all_gather_matmul` in one launch that begins with this rank's own rows."""
    rank, width = ranks.rank, a_shard.shape[1]
    # 1. This rank's rows to their place in its slot, and from there to the peers, the next one's first.
    inbox.begin()
    nbytes = sum(lengths) * width * a_shard.element_size()
    whole = inbox.slot(rank)[:nbytes].view(a_shard.dtype).view(sum(lengths), width)
    own = whole.split(list(lengths))[rank]
    own.copy_(a_shard)
    inbox.own()
    first = offsets(lengths)[rank] * width * a_shard.element_size()
    for step in range(1, ranks.size):
        inbox.push((rank - step) % ranks.size, own, first)
    inbox.pushed()
    # 2. The product, whose tiles wait for the rows that they read.
    gate = gates.of(whole, b, c, out, conf, components)
    if gate is None:
        inbox.await_all()
        d = multiply(whole, b, c, out, conf, components)
    else:
        d = multiply(whole, b, c, out, gate.conf, gated(gates, gate, inbox, components))
    # 3. The slot may be filled again.
    if gate is not None and 0 in lengths:              # shards that no tile has waited for
        inbox.await_all()
    if return_a:
        whole = whole.clone()
    inbox.end()
    return (d, whole) if return_a else d


def chunks_of(lengths: tuple[int, ...], columns: int, sm_count: int) -> int:
    """In how many chunks a rank's rows are computed and pushed: each has tiles of 128 x 256 for two waves at least.

    >>> chunks_of((4096, 4096), 8192, 132), chunks_of((2048, 2048), 4096, 132), chunks_of((65536,), 65536, 132)
    (3, 1, 4)
    """
    return max(1, min(CHUNKS, max(lengths) * columns // (128 * 256) // (2 * sm_count)))


def exchange_overlapped(ranks: Ranks, inbox: Inbox, a: Any, b: Any, how: Any, lengths: tuple[int, ...], chunks: int,
                        multiply_rows: Any) -> Any:
    """The partial sums of the peers' rows, of which each chunk is pushed while the next is computed. Returns this rank's
    slot, (ranks, M_r, N), in which theirs arrive; its own place in it is free.

    ``multiply_rows(begin, end, out)`` computes partial sums of rows of ``a``.
    """
    own, columns = ranks.rank, b.shape[1]
    inbox.begin()
    parts = inbox.parts(lengths[own], columns, new(a, (0,), how.travels).dtype)
    first = offsets(lengths)
    for chunk in range(chunks):                        # chunk by chunk, so that a peer's first ones arrive first
        for step in range(1, ranks.size):
            to = (own + step) % ranks.size
            pieces = offsets(even_lengths(lengths[to], chunks))
            begin, end = pieces[chunk], pieces[chunk + 1]
            block = new(a, (end - begin, columns), how.travels)
            multiply_rows(first[to] + begin, first[to] + end, block)
            inbox.push(to, block, (own * lengths[to] + begin) * columns * how.travels.itemsize, chunk)
            block.record_stream(inbox.stream)
    inbox.pushed()
    return parts


def in_rank_order(parts: Any, how: Any, own: int | None, follows: bool = False) -> InRankOrder:
    """The epilogue that merges the ranks' partial sums; ``own`` is the rank whose sums the product itself has."""
    travels = None if own is None else how.travels
    ranks, rows, columns = parts.shape
    return InRankOrder(array_of(parts.view(ranks * rows, columns), "parts"), rows, how.rule, how.adds, ranks, follows,
                       travels, -1 if own is None else own)
