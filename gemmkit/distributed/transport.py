"""Shards between ranks by torch.distributed's own operations, as bytes: any dtype, any backend, any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gemmkit.distributed.ranks import Ranks


def as_bytes(x: Any) -> Any:
    """A dense tensor's bytes, without a copy: gloo knows no bfloat16, and NCCL no complex numbers."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(torch.uint8)


def all_gather(ranks: Ranks, slots: Sequence[Any]) -> None:
    """Fill dense tensors, one for each rank, of which each rank has filled its own. They may be of different lengths."""
    if ranks.size == 1:
        return
    alike = all(slot.shape == slots[0].shape for slot in slots)
    if alike and slots[0].numel() == 0:
        return
    if alike and slots[0].is_cuda and ranks.backend(slots[0].device) == "nccl" and _are_one(slots):
        whole = slots[0].as_strided((len(slots), *slots[0].shape), (slots[0].numel(), *slots[0].stride()))
        dist.all_gather_into_tensor(as_bytes(whole).view(-1), as_bytes(slots[ranks.rank]).view(-1), group=ranks.group)
        return
    started = [dist.broadcast(as_bytes(slot), member, group=ranks.group, async_op=True)
               for slot, member in zip(slots, ranks.members) if slot.numel()]
    for work in started:
        work.wait()


def check_sends(ranks: Ranks, x: Any) -> None:
    """Raise ValueError where the group's backend sends no tensors of a tensor's device from one rank to another."""
    backend = ranks.backend(x.device)
    if not backend or (x.is_cuda and backend == "gloo" and ranks.size > 1):
        raise ValueError(f"a is on {x.device}, and the group's backend ({backend or 'none for it'}) sends no such tensors; "
                         "make a group with backend='nccl'")


def _are_one(slots: Sequence[Any]) -> bool:
    """Whether they lie one behind the other."""
    nbytes = slots[0].numel() * slots[0].element_size()
    return all(slot.data_ptr() == slots[0].data_ptr() + n * nbytes for n, slot in enumerate(slots))


class Sent:
    """Tensors on their way; `wait` has the current stream (on the CPU: the process) wait for all of them."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._tensors: list[Any] = []                    # they live until they have been sent

    def add(self, works: list[Any], *tensors: Any) -> None:
        self._works += works
        self._tensors += tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._tensors.clear()


def send_and_receive(ranks: Ranks, sent: Sent, to: int, outgoing: Any, source: int, incoming: Any) -> None:
    """Start sending a dense tensor to rank ``to`` of the group, and receiving one from rank ``source``. All ranks make such
    calls in one order. Empty tensors are not sent."""
    operations = []
    if outgoing.numel():
        operations.append(dist.P2POp(dist.isend, as_bytes(outgoing), ranks.members[to], ranks.group))
    if incoming.numel():
        operations.append(dist.P2POp(dist.irecv, as_bytes(incoming), ranks.members[source], ranks.group))
    if operations:
        sent.add(dist.batch_isend_irecv(operations), outgoing, incoming)


def pass_on(ranks: Ranks, sent: Sent, outgoing: Any, incoming: Any) -> None:
    """One step of a ring: to the rank before, from the rank behind."""
    send_and_receive(ranks, sent, (ranks.rank - 1) % ranks.size, outgoing, (ranks.rank + 1) % ranks.size, incoming)
