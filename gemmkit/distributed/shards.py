"""How an extent is shared out over ranks, and the checks of shards that each rank makes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmkit.matrices import Matrix


def even_lengths(extent: int, ranks: int) -> tuple[int, ...]:
    """Shards as ``torch.chunk`` and `DTensor` make them: all of one length but the last ones.

    >>> even_lengths(10, 4), even_lengths(2, 3)
    ((3, 3, 3, 1), (1, 1, 0))
    """
    length = -(-extent // ranks)
    return tuple(min(length, max(0, extent - rank * length)) for rank in range(ranks))


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each shard begins, and where the last one ends.

    >>> offsets((3, 4, 0))
    [0, 3, 7, 7]
    """
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def lengths_of(ranks: Any, own: int, lengths: Any, name: str, what: str) -> tuple[int, ...]:
    """The lengths of all ranks' shards: those given, or this rank's for all. Raises ValueError for what is no length for
    each rank, and where this rank's shard has another."""
    if lengths is None:
        return (own,) * int(ranks.size)
    try:
        found = tuple(lengths)
    except TypeError:
        found = ()
    if len(found) != ranks.size or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in found):
        raise ValueError(f"lengths={lengths!r}: a length for each of the group's {ranks.size} ranks is needed, for example "
                         f"{even_lengths(10, ranks.size)}")
    if found[ranks.rank] != own:
        raise ValueError(f"lengths={found}: rank {ranks.rank} has {found[ranks.rank]} {what} by it, and {name} has {own}")
    return found


def dtypes(**tensors: Any) -> dict[str, Any]:
    """What a statement says of tensors that a call may lack."""
    return {f"the dtype of {name}": "none" if x is None else x.dtype for name, x in tensors.items()}


def check_tensors(**tensors: Any) -> None:
    """Raise TypeError for what is no tensor (None is left out), ValueError for one that is no matrix, requires a gradient,
    or is on another device than the first."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if isinstance(x, Matrix):
            raise TypeError(f"{name} is a {type(x).__name__}; shards are plain matrices (torch.Tensor)")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; a torch.Tensor is needed, since torch.distributed moves it")
        if x.dim() != 2:
            raise ValueError(f"{name} has {x.dim()} dimensions; a shard of a matrix has 2")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and products over several ranks record none; call it under "
                             f"torch.no_grad(), or give {name}.detach()")
        if first is None:
            first = name, x.device
        elif x.device != first[1]:
            raise ValueError(f"{name} is on {x.device} and {first[0]} on {first[1]}; a rank's operands are on one device")
