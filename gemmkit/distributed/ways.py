"""Which way a call takes: by symmetric memory, over which copy engines push while the kernel computes, or by the group."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from gemmkit.distributed.inbox import Inbox, size_class
from gemmkit.distributed.peers import symmetric_peers, why_not_symmetric
from gemmkit.distributed.ranks import Ranks

WAYS = "plain", "symmetric"
_TRIAL = 20                            # seconds that a new inbox's first call may take


def check_way(way: Any) -> None:
    """Raise ValueError for another ``way`` than `WAYS` and None."""
    if way not in (None, *WAYS):
        raise ValueError(f"way={way!r}: {' or '.join(map(repr, WAYS))} is needed, or None, which takes what there is")


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
    with torch.cuda.device(device):
        # A capture takes the plain way, and no communicator can be made in it: the first inbox sees to that.
        if not ranks.inboxes and ranks.backend(device) == "nccl":
            dist.all_reduce(torch.zeros(1, device=device), group=ranks.group)
        try:
            peers = symmetric_peers(ranks, Inbox.total(ranks.size, slot_bytes), device)
        except RuntimeError as error:
            return f"PyTorch makes no symmetric memory: {error}"
        ranks.inboxes[key] = Inbox(ranks, peers, slot_bytes)
    return None


def _push_number(inbox: Inbox) -> None:
    rank, size = inbox.ranks.rank, inbox.ranks.size
    inbox.begin()
    own = torch.full((1,), rank + 1, dtype=torch.int32, device=inbox.device)
    inbox.made()
    for step in range(1, size):
        inbox.push((rank - step) % size, own.data_ptr(), own.element_size(), rank * own.element_size())
    inbox.own()
    inbox.end()


def _tried(inbox: Inbox) -> str | None:
    """What is wrong with the inbox's first call, in which each rank pushes its number to all; None where all have come."""
    rank, size = inbox.ranks.rank, inbox.ranks.size
    try:
        with torch.cuda.device(inbox.device) if inbox.device.type == "cuda" else nullcontext():
            _push_number(inbox)
    except RuntimeError as error:
        return f"pushing to a peer fails: {error}"
    last = time.monotonic() + min(_TRIAL, inbox.ranks.timeout.total_seconds())
    flags = inbox.arrived[:size].view(torch.int32)
    while (found := flags.tolist()) != [inbox.epoch] * size:
        if time.monotonic() > last:
            return f"a trial found the flags {found}, where each is to be {inbox.epoch}"
    numbers = inbox.slot()[:4 * size].view(torch.int32).tolist()
    numbers[rank] = rank + 1
    return None if numbers == [*range(1, size + 1)] else f"a trial found {numbers} behind the flags"
