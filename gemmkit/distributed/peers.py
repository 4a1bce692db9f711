"""Memory of every rank that this rank reaches by its own addresses: PyTorch's symmetric memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemmkit.distributed.ranks import Ranks


class Peers(NamedTuple):
    """``buffers[r]`` is rank r's memory, of as many bytes on each (uint8), zero when it is new. ``keeps`` holds it."""

    buffers: tuple[Any, ...]
    keeps: Any


def why_not_symmetric(ranks: Ranks, device: torch.device) -> str | None:
    """Why this rank cannot have symmetric memory with the group's others; None where it can, as far as it knows alone."""
    if device.type != "cuda":
        return f"tensors are on the {device.type}"
    if ranks.size == 1:
        return "there is one rank"
    if ranks.backend(device) != "nccl":
        return f"the group's backend is {ranks.backend(device)}, and PyTorch makes symmetric memory for nccl"
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    return None


def symmetric_peers(ranks: Ranks, nbytes: int, device: torch.device) -> Peers:
    """New memory of ``nbytes`` bytes on each rank. All ranks of the group call this together, and meet before they write.

    Raises RuntimeError where PyTorch cannot map the peers' memory: ranks of several hosts, or GPUs without peer access.
    """
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    own.zero_()
    handle = symmetric.rendezvous(own, ranks.group)
    buffers = tuple(own if rank == ranks.rank else handle.get_buffer(rank, (nbytes,), torch.uint8)
                    for rank in range(ranks.size))
    torch.cuda.current_stream(device).synchronize()              # zeros are there before a peer writes; once for each size
    return Peers(buffers, handle)
