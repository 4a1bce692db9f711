"""What two ranks do in test_two_ranks.py, in two processes over gloo, in the emulator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import gemmkit as gk
from examples import distributed_mlp, distributed_paths
from gemmkit import distributed as gd
from gemmkit.distributed import __main__
from gemmkit.distributed.ranks import GPU, ranks_of
from gemmkit.epilogues import Bias, Elementwise, ReLU, Residual, Saturate, Scale
from gemmkit.operators import MIN_PLUS


def drawn(seed: int, *shape: int, dtype: Any = torch.float32) -> Any:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made).to(dtype)


def whole(seed: int, *shape: int, dtype: Any = torch.float32) -> Any:
    """Whole numbers, whose sums are exact."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=made).to(dtype)


def poisoned(*shape: int) -> Any:
    """A view in the midst of NaNs, whose rows do not lie one behind the other."""
    return torch.full((shape[0], shape[1] + 3), float("nan"))[:, 1:-2]


def refused(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {words}")


@contextmanager
def group_of(seconds: float, backend: str = "gloo") -> Iterator[Any]:
    yield dist.new_group([0, 1], backend=backend, timeout=timedelta(seconds=seconds))


# -- all-gather, then product -----------------------------------------------------------------------------------------

def check_gather_of_different_lengths(rank: int) -> None:
    a, b, c, lengths = drawn(0, 7, 5), drawn(1 + rank, 5, 3 + rank), drawn(3 + rank, 7, 3 + rank), (5, 2)
    out = poisoned(7, 3 + rank)
    shard = a.split(lengths)[rank].mT.contiguous().mT                       # columns lie together
    d, gathered = gd.all_gather_matmul(shard, b, c, lengths=lengths, out=out, return_a=True)
    assert d is out and torch.equal(gathered, a)
    single = gk.matmul(a.numpy(), b.numpy(), c.numpy())
    assert np.array_equal(d.numpy(), single)                                # the same bits
    assert np.allclose(single, a.double().numpy() @ b.double().numpy() + c.numpy(), rtol=1e-5, atol=1e-5)


def check_gather_of_nothing(rank: int) -> None:
    assert gd.all_gather_matmul(torch.empty(2, 0), torch.empty(0, 3)).tolist() == [[0.0] * 3] * 4          # K = 0
    lengths = (0, 3)
    a, b = whole(0, 3, 4), whole(1, 4, 2)
    assert torch.equal(gd.all_gather_matmul(a.split(lengths)[rank], b, lengths=lengths), a @ b)
    assert gd.all_gather_matmul(torch.empty(0, 4), b).shape == (0, 2)


def check_gather_with_components(rank: int) -> None:
    a, b = whole(0, 4, 5), whole(1, 5, 3)
    shortest = gd.all_gather_matmul(a.split(2)[rank], b, operator=MIN_PLUS)
    assert torch.equal(shortest, (a[:, :, None] + b[None]).amin(1))
    bias = np.array([1, 2, 3], np.float32)
    d = gd.all_gather_matmul(a.split(2)[rank], b, transform_global_to_shared_a=gk.transforms.Map(lambda x, m, k: x * m),
                             epilogue=Bias(bias) | ReLU())
    assert torch.equal(d, ((torch.arange(4)[:, None] * a) @ b + torch.from_numpy(bias)).relu())


def check_gather_of_other_dtypes(rank: int) -> None:
    for dtype in (torch.complex64, torch.float64, torch.bfloat16):
        a, b = whole(0, 4, 5, dtype=dtype), whole(1, 5, 3, dtype=dtype)
        if dtype.is_complex:
            a = a + 1j * whole(2, 4, 5)
        d = gd.all_gather_matmul(a.split(2)[rank], b)
        assert torch.equal(d.to(torch.complex64), a.to(torch.complex64) @ b.to(torch.complex64)), dtype


def check_calls_in_a_row(rank: int) -> None:
    """Changing inputs, one plan: what an earlier call left must not show, and nothing is exchanged to agree."""
    b = whole(1, 3, 2)
    gd.all_gather_matmul(whole(0, 2, 3), b)
    ranks = ranks_of()
    met = ranks._met
    for n in range(12):
        a = whole(n, 4, 3)
        assert torch.equal(gd.all_gather_matmul(a.split(2)[rank], b), a @ b)
    assert ranks._met == met


def check_two_groups_at_once(rank: int) -> None:
    with group_of(60) as one, group_of(60) as other:
        for n in range(3):
            a, b = whole(n, 4, 3), whole(9, 3, 2)
            first = gd.all_gather_matmul(a.split(2)[rank], b, group=one)
            second = gd.matmul_all_reduce(a.mT.split(2, 1)[rank], whole(7, 4, 2).split(2)[rank], group=other)
            assert torch.equal(first, a @ b) and torch.equal(second, a.mT @ whole(7, 4, 2))


# -- product, then reduce-scatter -------------------------------------------------------------------------------------

def check_reduce_of_different_shares(rank: int) -> None:
    for shares, lengths in (((4, 3), None), ((7, 0), (1, 4)), ((0, 0), None)):
        a, b = whole(0, 5, sum(shares)), whole(1, sum(shares), 3)
        d = gd.matmul_reduce_scatter(a.split(shares, 1)[rank], b.split(shares)[rank], lengths=lengths)
        assert torch.equal(d, (a @ b).split(lengths or 3)[rank]), shares


def check_reduce_in_rank_order(rank: int) -> None:
    """float32 sums as the ranks' order has them, on every rank the same."""
    a, b = drawn(0, 4, 6), drawn(1, 6, 3)
    parts = [gk.matmul(x.numpy(), y.numpy()) for x, y in zip(a.split(3, 1), b.split(3))]
    expected = torch.from_numpy(parts[0] + parts[1])
    own = a.split(3, 1)[rank], b.split(3)[rank]
    assert torch.equal(gd.matmul_reduce_scatter(*own), expected.split(2)[rank])
    assert torch.equal(gd.matmul_all_reduce(*own), expected)


def check_reduce_with_components(rank: int) -> None:
    a, b, c = whole(0, 4, 6), whole(1, 6, 3), whole(2, 4, 3)
    own = a.split(3, 1)[rank], b.split(3)[rank]
    bias, rows = np.array([1, 2, 3], np.float32), c.split(2)[rank]
    d = gd.matmul_reduce_scatter(*own, rows, epilogue=Bias(bias) | ReLU(), out=poisoned(2, 3))
    assert torch.equal(d, (a @ b + c + torch.from_numpy(bias)).relu().split(2)[rank])
    d = gd.matmul_reduce_scatter(*own, epilogue=Residual(rows.numpy()),
                                 transform_global_to_shared_a=gk.transforms.Map(lambda x, m, k: x * m),
                                 transform_regs_to_shared_d=gk.transforms.Map(lambda x: 2 * x))
    assert torch.equal(d, (2 * ((torch.arange(4)[:, None] * a) @ b) + c).split(2)[rank])
    shortest = gd.matmul_reduce_scatter(*own, operator=MIN_PLUS)
    assert torch.equal(shortest, (a[:, :, None] + b[None]).amin(1).split(2)[rank])
    most = gd.matmul_all_reduce(*own, combine=max)
    assert torch.equal(most, torch.maximum(own_product(a, b, 0), own_product(a, b, 1)))


def own_product(a: Any, b: Any, rank: int) -> Any:
    return a.split(3, 1)[rank] @ b.split(3)[rank]


def check_reduce_of_other_dtypes(rank: int) -> None:
    a, b = whole(0, 2, 4, dtype=torch.float16), whole(1, 4, 2, dtype=torch.float16)
    own = a.split(2, 1)[rank], b.split(2)[rank]
    for travels in (None, torch.float32):
        d = gd.matmul_reduce_scatter(*own, reduce_dtype=travels)
        assert d.dtype == torch.float16 and torch.equal(d, (a @ b).split(1)[rank])
    a = torch.complex(whole(0, 2, 4), whole(2, 2, 4))
    b = torch.complex(whole(1, 4, 2), whole(3, 4, 2))
    assert torch.equal(gd.matmul_all_reduce(a.split(2, 1)[rank], b.split(2)[rank]), a @ b)


def check_reduce_of_integers(rank: int) -> None:
    """What the result holds, sums of ranks hold: as in the product of one GPU, also before they are added up."""
    a, b = torch.full((4, 6), 300, dtype=torch.int16), torch.full((6, 3), 150, dtype=torch.int16)
    a[1], a[2, :3] = -317, 7
    own, exact = (a.split(3, 1)[rank], b.split(3)[rank]), a.int() @ b.int()
    c = whole(0, 4, 3, dtype=torch.int32)
    assert torch.equal(gd.matmul_reduce_scatter(*own, c.split(2)[rank]), (exact + c).split(2)[rank])
    assert torch.equal(gd.matmul_all_reduce(*own, out=torch.full((4, 3), 7.0)), exact.float())
    wrapped = exact.to(torch.int16)                                                            # alone they wrap, as NumPy's do
    assert torch.equal(gd.matmul_all_reduce(*own), wrapped) and not torch.equal(wrapped, exact)
    d = gd.matmul_reduce_scatter(*own, epilogue=Scale(0.001) | Saturate("int16"))              # of sums that int16 does not hold
    assert d.dtype == torch.int16 and torch.equal(d, (exact * 0.001).round().to(torch.int16).split(2)[rank])
    refused(TypeError, "reduce_dtype=torch.uint8: it does not hold", lambda: gd.matmul_all_reduce(*own, c, reduce_dtype=torch.uint8))
    shortest = gd.matmul_all_reduce(*(x * 100 for x in own), operator=MIN_PLUS, out=torch.full((4, 3), 7, dtype=torch.int32))
    assert torch.equal(shortest, ((a * 100).int()[:, :, None] + (b * 100).int()[None]).amin(1))
    small = [x.clamp(-100, 100).to(torch.int8) for x in own]
    d = gd.matmul_all_reduce(*small, out=torch.full((4, 3), 7, dtype=torch.int32))
    assert torch.equal(d, a.clamp(-100, 100).int() @ b.clamp(-100, 100).int())
    large, wide = torch.full((2, 2), 1e30), torch.full((2, 2), 1e10)
    d = gd.matmul_all_reduce(large.split(1, 1)[rank], wide.split(1)[rank], out=torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(d, large.double() @ wide.double())


# -- operands that stay shared out ------------------------------------------------------------------------------------

def check_ring(rank: int) -> None:
    for rows, shares in (((3, 4), (4, 3)), ((1, 1), (0, 5)), ((2, 0), (2, 2))):
        a, b, c = whole(0, sum(rows), sum(shares)), whole(1, sum(shares), 3), whole(2, sum(rows), 3)
        own = a.split(rows)[rank], b.split(shares)[rank]
        d = gd.ring_matmul(*own, c.split(rows)[rank], lengths=shares, epilogue=ReLU())
        assert torch.equal(d, (a @ b + c).relu().split(rows)[rank]), (rows, shares)
    a, b = whole(0, 4, 6), whole(1, 6, 3)
    d = gd.ring_matmul(a.split(2)[rank], b.split(3)[rank], operator=MIN_PLUS, out=poisoned(2, 3))
    assert torch.equal(d, (a[:, :, None] + b[None]).amin(1).split(2)[rank])
    half, other = whole(0, 2, 4, dtype=torch.float16), whole(1, 4, 2, dtype=torch.float16)
    assert torch.equal(gd.ring_matmul(half.split(1)[rank], other.split(2)[rank]), (half @ other).split(1)[rank])
    refused(ValueError, "both must be K", lambda: gd.ring_matmul(a, b))
    refused(gk.ConfigError, "sees coordinates", lambda: gd.ring_matmul(
        a.split(2)[rank], b.split(3)[rank], transform_global_to_shared_a=gk.transforms.Map(lambda x, m, k: x * k)))


def check_matrices(rank: int) -> None:
    a, b = whole(0, 5, 6), whole(1, 6, 3)
    product, cut = a @ b, gd.DistributedMatrix.whole
    for by_a, by_b, call, result in (("rows", "all", "matmul", "rows"), ("all", "columns", "matmul", "columns"),
                                     ("rows", "columns", "all_gather_matmul", "columns"), ("rows", "rows", "ring_matmul", "rows"),
                                     ("columns", "columns", "ring_matmul", "columns"), ("all", "all", "matmul", "all"),
                                     ("columns", "rows", "matmul_all_reduce", "all"), ("all", "rows", "matmul_all_reduce", "all"),
                                     ("columns", "all", "matmul_all_reduce", "all")):
        of_a, of_b = cut(a, by_a), cut(b, by_b)
        said = gd.explain(of_a, of_b)
        assert said[0] == call and said[2] == result, said
        d = gk.matmul(of_a, of_b)
        assert isinstance(d, gd.DistributedMatrix) and d.shape == (5, 3) and d.by == result
        assert torch.equal(d.local, cut(product, result).local), (by_a, by_b)
    tall = whole(3, 130, 6)
    d = gk.matmul(cut(tall, "columns"), cut(b, "rows"), cut(whole(4, 130, 3), "rows"), epilogue=ReLU())
    assert torch.equal(d.local, (tall @ b + whole(4, 130, 3)).relu().split(65)[rank]) and d.lengths == (65, 65)
    assert torch.equal(cut(a, "rows").T.local, a.split(3)[rank].mT) and cut(a, "rows").T.shape == (6, 5)
    refused(TypeError, "gemmkit.matmul multiplies", lambda: gk.plan(cut(a, "rows"), b.numpy()))
    refused(ValueError, "share a by rows", lambda: gk.matmul(cut(a, "columns"), cut(b, "columns"), epilogue=ReLU()))
    refused(ValueError, "both must be K", lambda: gd.explain(cut(a, "rows"), b[1:]))
    refused(ValueError, "'rows', 'columns' or 'all'", lambda: cut(a, "K"))
    refused(ValueError, "lengths=", lambda: gd.DistributedMatrix(a, "rows", lengths=(1, 2)))


def check_dtensors(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    a, b = whole(0, 5, 6), whole(1, 6, 3)
    of_a, of_b = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(1)])
    d = gk.matmul(gd.DistributedMatrix.from_dtensor(of_a), gd.DistributedMatrix.from_dtensor(of_b)).to_dtensor()
    assert isinstance(d, DTensor) and d.placements == (Shard(1),) and d.shape == (5, 3)
    assert torch.equal(d.full_tensor(), a @ b)
    every = gd.DistributedMatrix.from_dtensor(distribute_tensor(a, mesh, [Replicate()]))
    assert every.by == "all" and every.to_dtensor().placements == (Replicate(),)
    refused(TypeError, "DTensor is needed", lambda: gd.DistributedMatrix.from_dtensor(a))
    refused(ValueError, "placements", lambda: gd.DistributedMatrix.from_dtensor(DTensor.from_local(a, mesh, [Partial()])))
    refused(ValueError, "needs a DeviceMesh", lambda: gd.DistributedMatrix.whole(a, "rows").to_dtensor())
    refused(ValueError, "a DTensor's are", lambda: gd.DistributedMatrix(a[:2 + rank], "rows", mesh, (2, 3)).to_dtensor())


def check_the_check(rank: int) -> None:
    is_right, lines = __main__.of_group()
    assert is_right and lines[0].startswith("2 ranks over gloo"), lines
    assert [line.split(":")[1].strip() for line in lines[1:]] == ["all_gather_matmul", "matmul_reduce_scatter",
                                                                 "matmul_all_reduce", "ring_matmul"]
    assert __main__.of_host(1 << 20)[-1].startswith("no GPU: calls take the plain way") or torch.cuda.is_available()


def check_examples(rank: int) -> None:
    assert distributed_paths.main(nodes=13) and distributed_mlp.main(rows=3, width=4)


# -- refused on all ranks, before anything is launched ----------------------------------------------------------------

def check_refusals(rank: int) -> None:
    """What the ranks have different; also beside a call that one of them knows, at torch.distributed's debug level."""
    a, b = whole(0, 2, 4), whole(1, 4, 2)
    call = gd.all_gather_matmul
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        _refusals(rank, a, b, call)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    a = whole(0, 2, 4)
    assert torch.equal(call(a, b), torch.cat([a @ b, a @ b]))               # and nothing is out of step


def _refusals(rank: int, a: Any, b: Any, call: Callable[..., Any]) -> None:
    refused(ValueError, "lengths differs between the ranks: (1, 1) on rank 0, (2, 2) on rank 1",
            lambda: call(a[:1 + rank], b))
    refused(ValueError, "the dtype of b differs", lambda: call(a, b if rank else b.double()))
    refused(ValueError, "K differs between the ranks: 4 on rank 0, 3 on rank 1", lambda: call(a[:, :4 - rank], b[:4 - rank]))
    refused(ValueError, "epilogue differs", lambda: call(a, b, epilogue=ReLU() if rank else Scale(2.0)))
    refused(ValueError, "epilogue differs", lambda: call(
        a, b, epilogue=Elementwise(lambda x: x + 1) if rank else Elementwise(lambda x: x + 2)))
    refused(ValueError, "the call differs", lambda: call(a, b) if rank else gd.matmul_all_reduce(a, b))
    refused(ValueError, "a has 4 columns" if rank else "rank 1 refuses the call, so no rank computes it; it says ValueError: a",
            lambda: gd.matmul_reduce_scatter(a, b[:4 - rank]))
    refused(TypeError if rank else ValueError, "torch.Tensor", lambda: call(a, b.numpy() if rank else b))
    refused(ValueError, "lengths=(2, 3)", lambda: call(a[:1], b, lengths=(2, 3)))
    refused(ValueError, "requires a gradient", lambda: call(a.clone().requires_grad_(), b))
    refused(TypeError, "tile", lambda: call(whole(0, 2, 4), b, tile=3))
    version = gk.__version__
    gk.__version__ = f"{version}.{rank}"
    try:
        refused(ValueError, "gemmkit's version differs between the ranks", lambda: call(whole(0, 2, 4), b, epilogue=Scale(3.0)))
    finally:
        gk.__version__ = version


def check_one_gpu_for_both(rank: int) -> None:
    ranks = ranks_of()
    ranks.agree({"the call": "one", GPU: f"a host, GPU {rank}"})
    refused(ValueError, "ranks 0 and 1 have their tensors on one GPU (a host, GPU 0), and NCCL needs one for each",
            lambda: ranks.agree({"the call": "one", GPU: "a host, GPU 0"}))


def check_run_time_values_may_differ(rank: int) -> None:
    a, b = whole(0, 2, 4), whole(1, 4, 2)
    d = gd.all_gather_matmul(a, b, epilogue=Scale(2.0 + rank) | Bias(np.array([rank, 1], np.float32)))
    assert torch.equal(d, torch.cat([a @ b] * 2) * (2 + rank) + torch.tensor([rank, 1.0]))


# -- faults; the last one ends rank 1 ---------------------------------------------------------------------------------

def check_a_rank_that_makes_another_call(rank: int) -> None:
    """Rank 1 repeats a call that is known, rank 0 makes a new one: both get an error within the timeout."""
    a, b = whole(0, 2, 4), whole(1, 4, 2)
    with group_of(3) as group:
        gd.matmul_all_reduce(a, b, group=group)
        if rank:
            refused(RuntimeError, "", lambda: gd.matmul_all_reduce(a, b, group=group))
        else:
            refused(RuntimeError, "rank 1 did not come to this call within 3 s",
                    lambda: gd.matmul_all_reduce(a, b, group=group, epilogue=ReLU()))


def check_a_rank_that_is_killed(rank: int) -> None:
    a, b = whole(0, 2, 4), whole(1, 4, 2)
    with group_of(3) as known, group_of(3) as new:
        gd.all_gather_matmul(a, b, group=known)
        if rank:
            os._exit(0)
        refused(RuntimeError, "", lambda: gd.all_gather_matmul(a, b, group=known))
        refused(RuntimeError, "rank 1 did not come", lambda: gd.all_gather_matmul(a, b, group=new))
