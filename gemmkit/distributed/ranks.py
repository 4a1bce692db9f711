"""A process group as gemmkit uses it: ranks, its store, its timeout, and what its ranks have agreed on."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gemmkit.launch import Cache

Statement = dict[str, str]

#: The entry of a statement that no two ranks may have alike: which GPU it is, where the group's backend needs one for each.
GPU = "the GPU"


class Ranks:
    """The ranks of a process group, by which a call's ranks check each other before anything is launched.

    They meet in the group's *store*, not by a collective: a collective that one rank starts and another does not would be
    paired with the other's next one, and would take its bytes. The store pairs statements by number, works for every
    backend, touches no stream, and gives up after the group's timeout.
    """

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)             # their numbers in the world
        self.store: Any = dist.PrefixStore("gemmkit/", c10d._get_process_group_store(group))
        self.agreed: dict[tuple[tuple[str, str], ...], Any] = {}        # statements, and what was made for them
        self.inboxes: dict[Any, Any] = {}                               # in symmetric memory, by device and size
        self.repeated = Cache(64)                                       # calls over them (`again.Repeated`), by their keys
        self.why_plain: str | None = None                               # why the last call did not use one
        self._facts: dict[str, str | None] = {}
        self._met = 0

    def backend(self, device: torch.device) -> str:
        """What moves tensors of a device: "nccl", "gloo", ...; "" where the group has nothing for it."""
        of = dict(one.split(":") for one in str(dist.get_backend_config(self.group)).split(","))
        return of.get(device.type, "")

    @property
    def timeout(self) -> timedelta:
        """How long the group's collectives wait, and agreements as well."""
        known = (self.group._get_backend(device) for device in self.group._device_types)
        return max((backend.options._timeout for backend in known), default=c10d.default_pg_timeout)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which meet for this call, why this one does not compute it. (It need not wait for them.)"""
        self._say({"refuses": f"{type(error).__name__}: {error}"})

    def agree(self, statement: Statement) -> None:
        """Compare what each rank says of a call; return if all say the same.

        Raises on every rank alike: ValueError, naming the first rank that refused the call, or the first entry that two
        ranks have different and what each has; and RuntimeError where a rank did not come within the group's timeout.
        """
        said = self._heard(self._say(statement))
        for rank, other in enumerate(said):
            if "refuses" in other:
                raise ValueError(f"rank {rank} refuses the call, so no rank computes it; it says {other['refuses']}")
        places = [other.pop(GPU, str(rank)) for rank, other in enumerate(said)]
        for rank, place in enumerate(places):
            if (earlier := places.index(place)) != rank:
                raise ValueError(f"ranks {earlier} and {rank} have their tensors on one GPU ({place}), and NCCL needs one "
                                 "for each; call torch.cuda.set_device(local_rank) first, and put tensors on that device")
        for rank, other in enumerate(said):
            for name in {**said[0], **other}:
                first, second = said[0].get(name, "none"), other.get(name, "none")
                if first != second:
                    raise ValueError(f"{name} differs between the ranks: {first} on rank 0, {second} on rank {rank}; all "
                                     "ranks make the same call, and none computes this one")

    def once(self, name: str, ask: Callable[[], str | None]) -> str | None:
        """A fact of the group, asked of every rank once: what the first rank says that does not say None."""
        if name not in self._facts:
            said = self._heard(self._say({"says": ask() or ""}))
            self._facts[name] = next((f"{one['says']} (rank {rank})" for rank, one in enumerate(said) if one["says"]), None)
        return self._facts[name]

    def _say(self, own: Statement) -> int:
        """Put this rank's next statement into the store; its number."""
        number, self._met = self._met, self._met + 1
        self.store.set(f"{number}/{self.rank}", json.dumps(own))
        return number

    def _heard(self, number: int) -> list[Statement]:
        """The statements of all ranks, in their order."""
        said = []
        for rank in range(self.size):
            try:
                self.store.wait([f"{number}/{rank}"], self.timeout)
                said.append(json.loads(self.store.get(f"{number}/{rank}")))
            except RuntimeError as error:
                raise RuntimeError(f"rank {rank} did not come to this call within {self.timeout.total_seconds():g} s: it "
                                   "raised or ended before it, or made another call, one that the ranks had agreed on "
                                   "earlier") from error
        if self.store.add(f"{number}/read", 1) == self.size:           # the last to read: the store does not grow
            for rank in range(self.size):
                self.store.delete_key(f"{number}/{rank}")
            self.store.delete_key(f"{number}/read")
        return said


_known: dict[str, Ranks] = {}


def ranks_of(group: Any = None) -> Ranks:
    """The `Ranks` of a process group; None is the default group.

    Raises RuntimeError where torch.distributed has not been initialised, TypeError for what is no process group, ValueError
    in a process that is none of the group's.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; start the processes by torchrun, and call "
                           "torch.distributed.init_process_group() first")
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group: rank {dist.get_rank()} of the world is not in it, and makes no call")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group={group!r}: a process group of torch.distributed is needed, or None for the default one")
    known = _known.get(group.group_name)
    if known is None or known.group is not group:
        known = _known[group.group_name] = Ranks(group)
    return known
