"""What three and more ranks do in test_many_ranks.py, over gloo, in the emulator: nothing may assume two."""

from __future__ import annotations

import os
import time
import unittest.mock
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import gemmkit as gk
from gemmkit import distributed as gd
from gemmkit.distributed import __main__
from gemmkit.distributed import ranks as rules
from gemmkit.distributed.ranks import ranks_of
from gemmkit.epilogues import Bias, ReLU, Scale
from gemmkit.operators import MIN_PLUS
from tests.distributed.scenarios import drawn, poisoned, refused, whole


def size() -> int:
    return dist.get_world_size()


def uneven(seed: int, largest: int = 4) -> tuple[int, ...]:
    """A length for each rank, 0 for one of them."""
    made = np.random.default_rng(seed)
    lengths = made.integers(1, largest + 1, size())
    lengths[made.integers(size())] = 0
    return tuple(map(int, lengths))


def summed(a: Any, b: Any, shares: tuple[int, ...]) -> Any:
    """float32 sums of the ranks' products, from rank 0 to the last."""
    parts = [torch.from_numpy(gk.matmul(x.numpy(), y.numpy())) for x, y in zip(a.split(shares, 1), b.split(shares), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def check_gather(rank: int) -> None:
    for seed in range(2):
        lengths = uneven(seed)
        a, b, c = (drawn(n, *shape) for n, shape in enumerate(((sum(lengths), 5), (5, 2 + rank), (sum(lengths), 2 + rank))))
        out = poisoned(sum(lengths), 2 + rank)
        d, gathered = gd.all_gather_matmul(a.split(lengths)[rank], b, c, lengths=lengths, out=out, return_a=True)
        assert d is out and torch.equal(gathered, a)
        assert np.array_equal(d.numpy(), gk.matmul(a.numpy(), b.numpy(), c.numpy())), lengths


def check_gather_with_components(rank: int) -> None:
    a, b, bias = whole(0, 2 * size(), 5), whole(1, 5, 3), np.array([1, 2, 3], np.float32)
    own = a.split(2)[rank]
    d = gd.all_gather_matmul(own, b, transform_global_to_shared_a=gk.transforms.Map(lambda x, m, k: x * m),
                             epilogue=Bias(bias) | ReLU())
    assert torch.equal(d, ((torch.arange(2 * size())[:, None] * a) @ b + torch.from_numpy(bias)).relu())
    assert torch.equal(gd.all_gather_matmul(own, b, operator=MIN_PLUS), (a[:, :, None] + b[None]).amin(1))


def check_reductions(rank: int) -> None:
    """The bits of sums in the order of ranks, of shares and rows of any lengths, with C and an epilogue."""
    shares, lengths = uneven(0), uneven(10)
    a, b = drawn(0, sum(lengths), sum(shares)), drawn(1, sum(shares), 3)
    own, exact = (a.split(shares, 1)[rank], b.split(shares)[rank]), summed(a, b, shares)
    out = poisoned(lengths[rank], 3)
    assert torch.equal(gd.matmul_reduce_scatter(*own, lengths=lengths, out=out), exact.split(lengths)[rank])
    assert torch.equal(gd.matmul_all_reduce(*own), exact)
    a, b, c = whole(0, sum(lengths), sum(shares)), whole(1, sum(shares), 3), whole(2, sum(lengths), 3)
    own = a.split(shares, 1)[rank], b.split(shares)[rank]
    d = gd.matmul_reduce_scatter(*own, c.split(lengths)[rank], lengths=lengths, epilogue=Scale(2.0) | ReLU())
    assert torch.equal(d, ((a @ b + c) * 2).relu().split(lengths)[rank]), (shares, lengths)


def check_reductions_by_other_rules(rank: int) -> None:
    n = size()
    a, b = whole(0, 2 * n, 2 * n), whole(1, 2 * n, 3)
    own = a.split(2, 1)[rank], b.split(2)[rank]
    shortest = (a[:, :, None] + b[None]).amin(1)
    assert torch.equal(gd.matmul_reduce_scatter(*own, operator=MIN_PLUS), shortest.split(2)[rank])
    parts = torch.stack([x @ y for x, y in zip(a.split(2, 1), b.split(2), strict=True)])
    assert torch.equal(gd.matmul_all_reduce(*own, combine=max), parts.amax(0))
    d = gd.matmul_reduce_scatter(*own, transform_global_to_shared_a=gk.transforms.Map(lambda x, m, k: x * m))
    assert torch.equal(d, ((torch.arange(2 * n)[:, None] * a) @ b).split(2)[rank])
    half = own[0].half(), own[1].half()
    assert torch.equal(gd.matmul_all_reduce(*half, reduce_dtype=torch.float32), (a @ b).half())


def check_ring(rank: int) -> None:
    rows, shares = uneven(0), uneven(20)
    a, b, c = whole(0, sum(rows), sum(shares)), whole(1, sum(shares), 3), whole(2, sum(rows), 3)
    own = a.split(rows)[rank], b.split(shares)[rank]
    d = gd.ring_matmul(*own, c.split(rows)[rank], lengths=shares, epilogue=ReLU())
    assert torch.equal(d, (a @ b + c).relu().split(rows)[rank]), (rows, shares)


def check_matrices(rank: int) -> None:
    a, b = whole(0, 5, 6), whole(1, 6, 3)                          # of eight ranks some have nothing
    cut = gd.DistributedMatrix.whole
    for by_a in ("rows", "columns", "all"):
        for by_b in ("rows", "columns", "all"):
            of_a, of_b = cut(a, by_a), cut(b, by_b)
            d: Any = gk.matmul(of_a, of_b)
            assert d.by == gd.explain(of_a, of_b)[2] and torch.equal(d.local, cut(a @ b, d.by).local), (by_a, by_b)
    tall, c = whole(3, 130, 6), whole(4, 130, 3)
    d = gk.matmul(cut(tall, "columns"), cut(b, "rows"), cut(c, "rows"), epilogue=ReLU())
    assert torch.equal(d.local, cut((tall @ b + c).relu(), "rows").local)


def check_a_group_of_some(rank: int) -> None:
    """The first rank and the last: a rank of the group is not the process's."""
    last = size() - 1
    group = dist.new_group([0, last], timeout=timedelta(seconds=20))
    if rank not in (0, last):
        return
    own, shares = int(rank == last), (2, 3)
    a, b = drawn(0, 3, 5), drawn(1, 5, 2)
    parts = a.split(shares, 1)[own], b.split(shares)[own]
    exact = summed(a, b, shares)
    assert torch.equal(gd.matmul_reduce_scatter(*parts, group=group, lengths=(1, 2)), exact.split((1, 2))[own])
    assert torch.equal(gd.matmul_all_reduce(*parts, group=group), exact)
    rows = whole(0, 3, 5).split((1, 2))[own]
    assert torch.equal(gd.all_gather_matmul(rows, whole(1, 5, 2), group=group, lengths=(1, 2)), whole(0, 3, 5) @ whole(1, 5, 2))
    d = gd.ring_matmul(rows, whole(1, 5, 2).split(shares)[own], group=group, lengths=shares)
    assert torch.equal(d, (whole(0, 3, 5) @ whole(1, 5, 2)).split((1, 2))[own])


def check_the_check(rank: int) -> None:
    is_right, lines = __main__.of_group()
    assert is_right and lines[0].startswith(f"{size()} ranks over gloo"), lines


def check_refusals(rank: int) -> None:
    """What one of many ranks has otherwise is said of it, on all of them."""
    last = size() - 1
    a, b = whole(0, 2, 4), whole(1, 4, 2)
    other = rank == last
    refused(ValueError, f"3 on rank {last}", lambda: gd.all_gather_matmul(a[:, :4 - other], b[:4 - other]))
    refused(ValueError, "a has 4 columns" if other else f"rank {last} refuses the call",
            lambda: gd.matmul_reduce_scatter(a, b[:4 - other]))
    refused(ValueError, "lengths=", lambda: gd.all_gather_matmul(a, b, lengths=(2, 2)))
    refused(ValueError, "epilogue differs", lambda: gd.matmul_all_reduce(a, b, epilogue=ReLU() if other else Scale(2.0)))
    assert torch.equal(gd.all_gather_matmul(a, b), torch.cat([a @ b] * size()))               # and nothing is out of step


def layer(dtype: Any, turned: bool, experts: int, width: int = 16, hidden: int = 24) -> list[Any]:
    """All ranks' gate, up and down, of either order."""
    shapes = (experts, hidden, width), (experts, hidden, width), (experts, width, hidden)
    matrices = [drawn(n, *shape, dtype=torch.float32).div(shape[2] ** 0.5).to(dtype) for n, shape in enumerate(shapes)]
    return [w.mT if turned else w.mT.contiguous() for w in matrices]


def exact_experts(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
    """Each expert with all tokens, in float64."""
    y = 0 * x
    for e in range(gate.shape[0]):
        weight = torch.where(chosen == e, weights, 0.0).sum(1)
        y = y + weight[:, None] * ((torch.relu(x @ gate[e]) * (x @ up[e])) @ down[e])
    return y


def close(found: Any, wanted: Any, most: float) -> None:
    assert found.shape == wanted.shape
    assert not wanted.numel() or (found.double() - wanted).abs().max() <= most * max(1.0, float(wanted.abs().max()))


def check_mixtures(rank: int, device: str = "cpu", of: int = 2, largest: int = 7, width: int = 16) -> None:
    """Results and gradients of all ranks' tokens beside float64: uneven counts, a rank without tokens, experts without any,
    numbers of none, all choices on one rank."""
    for seed, (dtype, turned) in enumerate(((torch.float16, True), (torch.bfloat16, False))):
        lengths, total = uneven(seed, largest), of * size()
        made = np.random.default_rng(seed)
        chosen = torch.from_numpy(np.argsort(made.random((sum(lengths), total + 2)), 1)[:, :3] - 1)
        if seed:
            chosen = chosen % of + total - of
            chosen[::2] = torch.iinfo(chosen.dtype).min
        x, weights, w = drawn(seed, len(chosen), width, dtype=dtype), drawn(9, len(chosen), 3), layer(dtype, turned, total, width)
        grad = drawn(7, *x.shape, dtype=dtype)
        wide = [y.double().requires_grad_() for y in (x, weights, *w)]
        wanted = exact_experts(wide[0], chosen, *wide[1:])
        gradients = torch.autograd.grad(wanted, wide, grad.double())
        own, part, most = (lambda y: y.split(lengths)[rank]), slice(of * rank, of * rank + of), 6e-3 if dtype is torch.float16 else 4e-2
        given = [y.detach().to(device).requires_grad_() for y in (own(x).mT.contiguous().mT, own(weights), *(y[part] for y in w))]
        numbers = own(chosen).to(device)
        found = gd.experts(given[0], numbers, *given[1:], "relu")
        assert found.dtype == dtype
        close(found.detach().cpu(), own(wanted.detach()), most)
        of_own = torch.autograd.grad(found, given, own(grad).to(device), retain_graph=device == "cuda")
        for one, other, y in zip(of_own, (own(gradients[0]), own(gradients[1]), *(g[part] for g in gradients[2:])), given, strict=True):
            close(one.cpu(), other, most)
            assert one.dtype == y.dtype
        with torch.no_grad():                                      # which takes rows where they arrived
            assert torch.equal(found, gd.experts(given[0], numbers if seed else numbers.int(), *given[1:], "relu"))
        if device == "cuda":                                       # the same bits every time
            assert all(map(torch.equal, of_own, torch.autograd.grad(found, given, own(grad).to(device))))


def draws(case: int) -> Any:
    """The same on all ranks, others in each run of all tests."""
    return np.random.default_rng([int(os.environ.get("GEMMKIT_SEED", "0")), size(), case])


def check_drawn_calls(rank: int) -> None:
    """Rows and shares of any lengths, none of some ranks, with C, an epilogue and lengths or without."""
    for case in range(3):
        made, n = draws(case), size()
        rows, shares = (tuple(int(one) for one in made.integers(0, 4, n) * made.integers(0, 2, n)) for _ in range(2))
        M, K, N = sum(rows), sum(shares), int(made.integers(1, 6))
        a, b = whole(case, M, K), whole(case + 50, K, N)
        c = whole(case + 90, M, N) if made.integers(2) else None
        more: dict[str, Any] = dict(epilogue=ReLU()) if made.integers(2) else {}
        wanted = a @ b + (0 if c is None else c)
        wanted = wanted.relu() if more else wanted
        parts, of_c = (a.split(shares, 1)[rank], b.split(shares)[rank]), None if c is None else c.split(rows)[rank]
        mine, of_rank = a.split(rows)[rank], wanted.split(rows)[rank]
        what = case, rows, shares, N, c is None, more
        assert torch.equal(gd.all_gather_matmul(mine, b, c, lengths=rows, **more), wanted), what
        assert torch.equal(gd.matmul_all_reduce(*parts, c, **more), wanted), what
        out = poisoned(rows[rank], N)
        assert torch.equal(gd.matmul_reduce_scatter(*parts, of_c, lengths=rows, out=out, **more), of_rank), what
        assert torch.equal(gd.ring_matmul(mine, parts[1], of_c, lengths=shares, **more), of_rank), what


def check_drawn_mixtures(rank: int, device: str = "cpu", largest: int = 6) -> None:
    """Any numbers of tokens, of choices and of experts, of a token twice the same, of none at all; views of any strides."""
    for case in range(3):
        made, n = draws(100 + case), size()
        lengths = tuple(int(one) for one in made.integers(0, largest + 1, n) * made.integers(0, 3, n).clip(0, 1))
        of, choices, tokens = int(made.integers(1, 4)), int(made.integers(0, 4)), sum(lengths)
        total = of * n
        chosen = torch.from_numpy(made.integers(-1, total + 1, (tokens, choices)))
        if made.integers(2):                                       # all to one rank
            chosen = torch.where((chosen >= 0) & (chosen < total), chosen % of + int(made.integers(n)) * of, chosen)
        dtype = torch.float16 if made.integers(2) else torch.bfloat16
        x, weights = drawn(case, tokens, 16, dtype=dtype), drawn(case + 9, tokens, choices)
        w = layer(dtype, bool(made.integers(2)), total)
        wanted = exact_experts(x.double(), chosen, weights.double(), *(y.double() for y in w))
        part, own = slice(of * rank, of * rank + of), (lambda y: y.split(lengths)[rank].to(device))
        rows = own(x) if made.integers(2) else own(x).mT.contiguous().mT
        numbers = own(chosen).int() if made.integers(2) else own(chosen)
        for _ in range(2):                                         # the second call is known
            found = gd.experts(rows, numbers, own(weights), *(y[part].to(device) for y in w), "relu")
            close(found.cpu(), wanted.split(lengths)[rank], 6e-3 if dtype is torch.float16 else 4e-2)


def check_mixtures_know_each_other(rank: int) -> None:
    """Over NCCL each rank's statement names its GPU: a call that all have agreed on is known all the same."""
    x, w, ranks = drawn(0, 3, 16, dtype=torch.float16), layer(torch.float16, False, 1), ranks_of(dist.new_group())
    with unittest.mock.patch.object(rules, "gpu_text", lambda ranks, device: f"GPU {rank}"):
        tokens = x, torch.arange(3)[:, None], torch.ones(3, 1), *w
        gd.experts(*tokens, group=ranks.group)
        met = ranks._met
        gd.experts(*tokens, group=ranks.group)
    assert ranks._met == met


def check_mixtures_of_nothing(rank: int) -> None:
    x, w = drawn(0, 3, 16, dtype=torch.float16), [y[:1] for y in layer(torch.float16, False, 1)]
    chosen, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2, dtype=torch.float64)
    assert gd.experts(x[:0], chosen[:0], weights[:0], *w).shape == (0, 16)                      # no rank has a token
    assert not gd.experts(x, chosen - 1, weights, *w).any()                                     # no expert has one
    assert not gd.experts(x, chosen[:, :0], weights[:, :0], *w).any()
    assert gd.experts(x[:rank], chosen[:rank] + rank, weights[:rank], *w).shape == (min(rank, 3), 16)
    ranks = ranks_of()
    met = ranks._met
    gd.experts(x, chosen, weights, *w)
    assert ranks._met == met                                                                     # known: nothing is compared


def check_mixtures_that_are_refused(rank: int) -> None:
    last = size() - 1
    other = rank == last
    x, chosen, weights, w = drawn(0, 3, 16, dtype=torch.float16), torch.zeros(3, 2).long(), torch.ones(3, 2), layer(torch.float16, False, 2)

    def of(words: str, kind: type[Exception] = ValueError, **change: Any) -> None:
        given = dict(x=x, chosen=chosen, weights=weights, gate=w[0], up=w[1], down=w[2])
        refused(kind, words, lambda: gd.experts(**(given | change)))

    def mine(words: str) -> str:
        return words if other else f"rank {last} refuses the call"

    gd.experts(x, chosen, weights, *w)                             # most refuse a call that the others know
    of("the number of a rank's experts differs", **({name: y[:1] for name, y in zip(("gate", "up", "down"), w)} if other else {}))
    of("the number of choices differs", **(dict(chosen=chosen[:, :1], weights=weights[:, :1]) if other else {}))
    of("tensors that require gradients differs", x=x.clone().requires_grad_(other))
    of(mine("chosen has shape (2, 2)"), chosen=chosen[other:])
    of(mine("x is a ndarray; gemmkit.distributed.experts takes tensors"), TypeError if other else ValueError, x=x.numpy() if other else x)
    shifted = torch.empty(w[0].numel() + 1, dtype=torch.float16)[1:].view_as(w[0])
    of(mine("gate begins at an address that is not a multiple of 16 bytes"), gate=shifted if other else w[0])
    of(mine("gate has shape (0, 16, 24)"), **(dict(gate=w[0][:0], up=w[1][:0], down=w[2][:0]) if other else {}))
    of("TMA cannot load it", **(dict(zip(("gate", "up", "down"), layer(torch.float16, False, 2, hidden=12)))))
    assert gd.experts(x, chosen, weights, *w).shape == (3, 16)                       # and nothing is out of step


def check_a_rank_that_is_killed(rank: int) -> None:
    """The last one: each of the others has an error within the timeout, in a call that they know and in a new one. They come
    to the new one when they know that the first has failed, some at once and some after its timeout, which is the shorter."""
    a, b = whole(0, 2, 4), whole(1, 4, 2)
    known, new = (dist.new_group(timeout=timedelta(seconds=seconds)) for seconds in (12, 30))
    x, w = drawn(0, 3, 16, dtype=torch.float16), layer(torch.float16, False, 1)
    tokens = x, torch.arange(3)[:, None], torch.ones(3, 1), *w
    gd.all_gather_matmul(a, b, group=known)
    gd.experts(*tokens, group=known)
    if rank == size() - 1:
        os._exit(0)
    refused(RuntimeError, "", lambda: gd.all_gather_matmul(a, b, group=known))
    refused(RuntimeError, "", lambda: gd.experts(*tokens, group=known))
    refused(RuntimeError, f"rank {size() - 1} did not come", lambda: gd.all_gather_matmul(a, b, group=new))
    if rank == 0:                                              # whose process has the store that the others still ask
        time.sleep(3)
