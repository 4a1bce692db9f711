"""What two ranks do in test_two_gpus.py, each on a GPU of its own, over NCCL and symmetric memory."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import gemmkit as gk
from examples import distributed_mlp, distributed_paths
from gemmkit import distributed as gd
from gemmkit.distributed import __main__
from gemmkit.distributed.ranks import ranks_of
from gemmkit.epilogues import ReLU
from gemmkit.operators import MIN_PLUS
from tests.distributed import many_scenarios
from tests.distributed.scenarios import group_of, refused

ENDED = "check_a_rank_that_is_killed"                # which ends rank 1


def drawn(seed: int, *shape: int, dtype: Any = torch.bfloat16) -> Any:
    """Whole numbers, the same on both ranks."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=made).to(dtype).cuda()


def check_a_thousand_gathers(rank: int) -> None:
    """Changing inputs: a stale epoch, or a slot that is filled too early, would show."""
    wrong, b = torch.zeros((), dtype=torch.int64, device="cuda"), drawn(1, 256, 384)
    inputs = [drawn(n, 512, 256) for n in range(16)]
    expected = [gk.matmul(a, b) for a in inputs]
    for n in range(1000):
        a = inputs[n * 7 % 16]
        d = gd.all_gather_matmul(a.chunk(2)[rank], b, way="symmetric")
        wrong += (d != expected[n * 7 % 16]).sum()
    assert int(wrong) == 0 and ranks_of().why_plain is None


def check_gathers(rank: int) -> None:
    for lengths, dtype, components in (((300, 77), torch.bfloat16, {}), ((5, 2), torch.float32, {}), ((0, 64), torch.float16, {}),
                                       ((64, 0), torch.float32, dict(operator=MIN_PLUS)), ((65, 64), torch.float64, {}),
                                       ((128, 128), torch.bfloat16, dict(epilogue=ReLU()))):
        a, b = drawn(0, sum(lengths), 72, dtype=dtype), drawn(1 + rank, 72, 40 + 8 * rank, dtype=dtype)
        for _ in range(3):
            d, whole = gd.all_gather_matmul(a.split(lengths)[rank], b, lengths=lengths, return_a=True, way="symmetric", **components)
            assert torch.equal(d, gk.matmul(a, b, **components)) and torch.equal(whole, a), (lengths, dtype)


def check_mixtures(rank: int) -> None:
    """Experts of both ranks: results and gradients beside float64, of few tokens and of several tiles."""
    many_scenarios.check_mixtures(rank, "cuda")
    many_scenarios.check_mixtures(rank, "cuda", of=3, largest=900, width=136)
    x, (gate, up, down) = drawn(0, 64, 64), many_scenarios.layer(torch.bfloat16, False, 2, 64)
    given = x, torch.arange(128, device="cuda").view(64, 2) % 4, torch.ones(64, 2, device="cuda"), gate.cuda(), up.cuda(), down.cuda()
    gd.experts(*given)
    met = ranks_of()._met
    gd.experts(*given)
    assert ranks_of()._met == met              # each rank has a GPU of its own, and they know the call all the same


def check_reductions(rank: int) -> None:
    for rows, shares, lengths, components in (
            (256, (64, 64), None, {}), (77, (40, 24), (70, 7), {}), (64, (64, 0), None, {}), (2048, (64, 64), None, dict(epilogue=ReLU())),
            (128, (32, 32), None, dict(reduce_dtype=torch.float32)), (40, (16, 8), None, dict(operator=MIN_PLUS))):
        dtype = torch.float32 if "operator" in components else torch.bfloat16
        a, b = drawn(0, rows, sum(shares), dtype=dtype), drawn(1, sum(shares), 128, dtype=dtype)
        own = a.split(shares, 1)[rank], b.split(shares)[rank]
        for _ in range(3):
            found = [gd.matmul_reduce_scatter(*own, lengths=lengths, way=way, **components) for way in ("symmetric", "plain")]
            assert torch.equal(*found), (rows, components)
            both = [gd.matmul_all_reduce(*own, way=way, **components) for way in ("symmetric", "plain")]
            assert torch.equal(*both), (rows, components)


def check_reductions_again(rank: int) -> None:
    """Changing inputs, and poisoned results of the calls before: own rows that are multiplied beside the kernel that stores the
    peer's wait for what is made before the call, and for the peer's sums of this call."""
    wrong, b = torch.zeros((), dtype=torch.int64, device="cuda"), drawn(99, 256, 1024)
    inputs = [drawn(n, 4096, 256) for n in range(8)]
    expected = [(a.float() @ b.float()).relu().bfloat16().chunk(2)[rank] for a in inputs]
    mine = b.chunk(2)[rank].contiguous()
    for n in range(400):
        a = inputs[n * 5 % 8].chunk(2, 1)[rank].clone()            # a kernel of the stream's makes it just before
        d = gd.matmul_reduce_scatter(a, mine, way="symmetric", epilogue=ReLU())
        wrong += (d != expected[n * 5 % 8]).sum()
        d.fill_(float("nan"))
        a.fill_(float("nan"))
    assert int(wrong) == 0


def check_two_groups_at_once(rank: int) -> None:
    one, other = (dist.new_group([0, 1], backend="nccl") for _ in range(2))
    for n in range(20):
        a, b = drawn(n, 256, 64), drawn(99, 64, 128)
        first = gd.all_gather_matmul(a.chunk(2)[rank], b, group=one, way="symmetric")
        second = gd.matmul_reduce_scatter(a.chunk(2, 1)[rank], b.chunk(2)[rank], group=other, way="symmetric")
        assert torch.equal(first, gk.matmul(a, b)) and torch.equal(second, (a.float() @ b.float()).bfloat16().chunk(2)[rank])


def check_a_graph(rank: int) -> None:
    """A capture takes the plain way, and says so."""
    a, b = drawn(0, 256, 64), drawn(1, 64, 128)
    own = a.chunk(2)[rank].contiguous()
    gd.all_gather_matmul(own, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = gd.all_gather_matmul(own, b)
    assert "captured" in (ranks_of().why_plain or "")
    for n in range(3):
        own.copy_(drawn(n, 256, 64).chunk(2)[rank])
        graph.replay()
        assert torch.equal(d, gk.matmul(drawn(n, 256, 64), b))


def check_plain_calls_again(rank: int) -> None:
    """A known call by the group asks nobody: its products are planned, and changing inputs show."""
    ranks, b = ranks_of(), drawn(1, 128, 256)
    for call in ("gather", "scatter", "reduce"):
        met = None
        for n in range(6):
            a = drawn(n, 256, 128)
            if call == "gather":
                found, wanted = gd.all_gather_matmul(a.chunk(2)[rank], b, way="plain"), gk.matmul(a, b)
            else:
                own, wanted = (a.chunk(2, 1)[rank], b.chunk(2)[rank]), (a.float() @ b.float()).bfloat16()
                if call == "scatter":
                    found, wanted = gd.matmul_reduce_scatter(*own, way="plain", epilogue=ReLU()), wanted.relu().chunk(2)[rank]
                else:
                    found = gd.matmul_all_reduce(*own, way="plain")
            assert torch.equal(found, wanted), (call, n)
            assert met in (None, ranks._met), (call, n)
            met = ranks._met
            assert ranks.why_plain == "way='plain' was given"


def check_the_check_and_examples(rank: int) -> None:
    is_right, lines = __main__.of_group()
    assert is_right and all("symmetric" in line for line in lines[1:4]), lines
    assert distributed_paths.main(nodes=512) and distributed_mlp.main(rows=256, width=256)


def check_one_gpu_for_both(rank: int) -> None:
    """NCCL would wait for a rank of its own until the timeout."""
    first = torch.ones(16, 16, device="cuda:0")
    with group_of(20, "nccl") as group:
        refused(ValueError, "ranks 0 and 1 have their tensors on one GPU", lambda: gd.all_gather_matmul(first, first, group=group))
        refused(ValueError, "set_device", lambda: gd.ring_matmul(torch.ones(8, 16, device="cuda:0"), first[:8], group=group))


def check_a_rank_that_is_killed(rank: int) -> None:
    """The other one's kernel traps when the flag has not come within the group's timeout."""
    a, b = drawn(0, 256, 64), drawn(1, 64, 128)
    with group_of(5, "nccl") as group:
        gd.all_gather_matmul(a.chunk(2)[rank], b, group=group, way="symmetric")
        torch.cuda.synchronize()
        if rank:
            os._exit(0)

        def call() -> None:
            gd.all_gather_matmul(a.chunk(2)[rank], b, group=group, way="symmetric")
            torch.cuda.synchronize()

        refused(RuntimeError, "", call)
