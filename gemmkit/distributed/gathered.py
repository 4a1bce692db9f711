"""``all_gather_matmul``: D = gather(A) B, of an A whose rows are shared out over the ranks."""

from __future__ import annotations

from typing import Any

import torch

from gemmkit.config import Config
from gemmkit.distributed.again import key_of_call, known_call, remember
from gemmkit.distributed.calls import check_keywords, meet, multiply, new, planned
from gemmkit.distributed.gates import Gates, by_shards
from gemmkit.distributed.pushed import AllGather, joins, parts_of
from gemmkit.distributed.ranks import Ranks, ranks_of
from gemmkit.distributed.shards import check_tensors, dtypes, lengths_of
from gemmkit.distributed.transport import all_gather
from gemmkit.distributed.ways import check_way, inbox_for
from gemmkit.joined import Concat


def all_gather_matmul(a_shard: Any, b: Any, c: Any = None, *, group: Any = None, lengths: Any = None, out: Any = None,
                      conf: Config | None = None, return_a: bool = False, way: str | None = None, **components: Any) -> Any:
    """D = gather(A) B + C, where each rank has some rows of A, and its own B, C and D.

    A tensor-parallel layer begins so: the rows of the activations are shared out, and B is the rank's columns of the weight.

    Args:
        a_shard: (M_r, K), this rank's rows of A; any strides. (M, K) is gathered in the order of ranks, in row-major order.
        b: (K, N), this rank's; N may differ between ranks.
        c, out: (M, N), this rank's, as of `gemmkit.matmul`.
        group: a process group; None is the default one.
        lengths: M_r of every rank; None: all are as long as this one. (No rank asks the others.)
        conf, components: as of `gemmkit.matmul`. They see the rank's own product: all rows, its own columns.
        return_a: return the gathered A, too.
        way: "symmetric" pushes the shards by copy engines while the kernel computes the rows that are there; "plain" gathers
            and then multiplies. None takes the first where the ranks' GPUs reach each other's memory.

    Returns:
        D, (M, N); with ``return_a`` the pair (D, A). The bits are those of `gemmkit.matmul` of the gathered A.

    Raises:
        What `gemmkit.matmul` raises, on the rank whose arguments it is about, and ValueError on the others; ValueError
        where the ranks' calls differ (sizes, dtypes, devices, components, versions); nothing has been launched then.
        RuntimeError where a rank does not come within the group's timeout.

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with gemmkit.emulate():
    ...     distributed.all_gather_matmul(torch.tensor([[1.0, 2.0]]), torch.eye(2)).tolist()
    [[1.0, 2.0]]
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    key = key_of_call((a_shard, b, c, out), conf, components, "all_gather_matmul", lengths, return_a, way)
    known = known_call(ranks, key)
    if known is not None:
        return known(a_shard, b, c, out)
    sizes: tuple[int, ...] = ()

    def facts() -> dict[str, Any]:
        nonlocal sizes
        check_keywords("all_gather_matmul", components)
        check_way(way)
        check_tensors(a_shard=a_shard)
        check_tensors(b=b, c=c, out=out)
        sizes = lengths_of(ranks, a_shard.shape[0], lengths, "a_shard", "rows")
        return {"lengths": sizes, "K": a_shard.shape[1], "the dtype of a_shard": a_shard.dtype, "the dtype of b": b.dtype,
                **dtypes(c=c, out=out), "return_a": bool(return_a), "way": way}

    def make() -> Gates:
        whole: Any = empty_whole(a_shard, sizes)
        gates = Gates(ranks, by_shards(sizes, ranks.rank))
        planned(whole, b, c, out, conf, components)
        if a_shard.is_cuda and ranks.size > 1 and way != "plain":
            gate, parts = gates.of(whole, b, c, out, conf, components), parts_of(whole, sizes, ranks.rank)
            if gate is not None and joins(gate.conf, a_shard, sizes):
                whole = Concat(*(a_shard if part is None else part for part in parts), axis=0)
            gates.check(gate, whole, b, c, out, components)
        return gates

    gates = meet(ranks, "all_gather_matmul", a_shard, facts, {"conf": conf, **components}, make)
    inbox = inbox_for(ranks, a_shard.device, sum(sizes) * a_shard.shape[1] * a_shard.element_size(), way)
    if inbox is not None:
        call = AllGather(ranks, inbox, gates, sizes, return_a, conf, components)
        with torch.cuda.device(inbox.device):
            return remember(ranks, key, call)(a_shard, b, c, out)
    whole = gather_rows(ranks, a_shard, sizes)
    d = multiply(whole, b, c, out, conf, components)
    return (d, whole) if return_a else d


def gather_rows(ranks: Ranks, shard: Any, lengths: tuple[int, ...]) -> Any:
    """The rows of all ranks, one rank's below the other's. The shard may have any strides: it is copied to its place."""
    whole = empty_whole(shard, lengths)
    slots = whole.split(list(lengths))
    slots[ranks.rank].copy_(shard)
    all_gather(ranks, slots)
    return whole


def empty_whole(shard: Any, lengths: tuple[int, ...]) -> Any:
    return new(shard, (sum(lengths), shard.shape[1]), shard.dtype)
