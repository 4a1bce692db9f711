"""Products over several GPUs of one host against what PyTorch has:
`torchrun --nproc-per-node=2 -m bench.distributed --out bench/results/distributed.json`.

M x N x K is the product over all ranks: of an all-gather each rank computes N / ranks columns of D, of a reduce-scatter it
multiplies K / ranks of the sum.

| what | is |
|---|---|
| alone | our own product of the same local shape, with nothing to send |
| ours | `all_gather_matmul`, `matmul_reduce_scatter` by symmetric memory; plain: by the group |
| NCCL | NCCL's collective, and cuBLAS (`torch.mm`) before or behind it |
| fused | PyTorch's own operator on symmetric memory |

A mixture of experts, tokens x width x hidden, is over all ranks, with 8 choices of 64 experts for each token. "all-to-all"
is PyTorch's `all_to_all_single` of a row for each choice with `torch._grouped_mm`, "compiled" the same with what is between
the exchanges by `torch.compile`; "alone" is `gemmkit.torch.experts` of a
rank's share of the choices.

Every variant is called in turns, the ranks together, and a rank's time is by events over several calls; of all turns the
median, of all ranks the slowest. Results are compared with the product alone before they are timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # which makes the fused operators

import gemmkit as gk
import gemmkit.torch
from bench import report
from gemmkit import distributed
from gemmkit.operators import MIN_PLUS

MIXTURES = [(32768, 2048, 768), (4096, 2048, 768), (8192, 4096, 1536)]
EXPERTS, CHOICES = 64, 8
SHAPES = [(8192, 8192, 8192), (16384, 4096, 8192), (8192, 14336, 4096), (4096, 4096, 4096)]
CALLS, TURNS, WARM = 10, 11, 2

Variants = dict[str, Callable[[], Any]]


def gathered(shape: tuple[int, int, int], device: torch.device) -> Variants:
    """M rows of A and N columns of B are shared out."""
    M, N, K = shape
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = drawn((M, K), device, 0)
    own, b = whole.chunk(ranks)[rank].contiguous(), drawn((K, N // ranks), device, 1 + rank)
    room, group = torch.empty_like(whole), dist.group.WORLD
    assert group is not None

    def by_nccl() -> Any:
        dist.all_gather_into_tensor(room, own)
        return torch.mm(room, b)

    def fused() -> Any:
        return torch.ops.symm_mem.fused_all_gather_matmul(own, [b], 0, group.group_name)[1][0]

    return {"alone": lambda: gk.matmul(whole, b), "ours": lambda: distributed.all_gather_matmul(own, b, way="symmetric"),
            "plain": lambda: distributed.all_gather_matmul(own, b, way="plain"), "NCCL": by_nccl, "fused": fused}


def scattered(shape: tuple[int, int, int], device: torch.device) -> Variants:
    """K is shared out, and so are M rows of the sum."""
    M, N, K = shape
    rank, ranks = dist.get_rank(), dist.get_world_size()
    a, b = drawn((M, K // ranks), device, 1 + rank), drawn((K // ranks, N), device, 11 + rank)
    mine, group = torch.empty(M // ranks, N, dtype=a.dtype, device=device), dist.group.WORLD
    assert group is not None

    def by_nccl() -> Any:
        dist.reduce_scatter_tensor(mine, torch.mm(a, b))
        return mine

    def fused() -> Any:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group.group_name)

    return {"alone": lambda: gk.matmul(a, b), "ours": lambda: distributed.matmul_reduce_scatter(a, b, way="symmetric"),
            "plain": lambda: distributed.matmul_reduce_scatter(a, b, way="plain"), "NCCL": by_nccl, "fused": fused}


def shortest(shape: tuple[int, int, int], device: torch.device) -> Variants:
    """Min-plus of float32: rows of A are gathered, columns of B shared out. "halved" is a rank's part."""
    M, N, K = shape
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, b = drawn((M, K), device, 0, torch.float32), drawn((K, N), device, 1, torch.float32)
    own, columns = whole.chunk(ranks)[rank].contiguous(), b.chunk(ranks, 1)[rank].contiguous()
    return {"halved": lambda: gk.matmul(whole, columns, operator=MIN_PLUS),
            "ours": lambda: distributed.all_gather_matmul(own, columns, operator=MIN_PLUS, way="symmetric")}


def mixture(shape: tuple[int, int, int], device: torch.device) -> Variants:
    """Tokens and experts are shared out. The peer sends a row for each choice, and adds up what returns."""
    M, K, hidden = shape
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, tokens = EXPERTS // ranks, M // ranks
    x = drawn((tokens, K), device, rank)
    scores = drawn((tokens, EXPERTS), device, 21 + rank, torch.float32).topk(CHOICES)
    chosen, weights = scores.indices, scores.values.softmax(1)
    gate, up, down = (drawn((own, *of), device, 31 + 3 * rank + n) / of[0] ** 0.5
                      for n, of in enumerate(((K, hidden), (K, hidden), (hidden, K))))

    def compute(rows: Any, theirs: Any) -> Any:
        """The rows that have come, in the order of the ranks and their experts, through this rank's experts."""
        by_expert = torch.arange(own, device=device).repeat(ranks).repeat_interleave(theirs, output_size=rows.shape[0])
        sorting = by_expert.argsort(stable=True)
        ends, sorted_rows = theirs.view(ranks, own).sum(0).cumsum(0).int(), rows[sorting]
        h = torch.nn.functional.silu(torch._grouped_mm(sorted_rows, gate, ends)) * torch._grouped_mm(sorted_rows, up, ends)
        y = torch.empty_like(rows)
        y[sorting] = torch._grouped_mm(h, down, ends)
        return y

    def combine(back: Any, order: Any) -> Any:
        found = torch.empty_like(back)
        found[order] = back
        return (found.view(tokens, CHOICES, K) * weights[:, :, None]).sum(1).to(x.dtype)

    def by_all_to_all(compute: Any, combine: Any) -> Any:
        expert, order = chosen.flatten().int().sort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        going, coming = torch.stack((counts, theirs)).view(2, ranks, own).sum(2).tolist()
        rows, back = x.new_empty(sum(coming), K), x.new_empty(len(order), K)
        dist.all_to_all_single(rows, x[order // CHOICES], coming, going)
        dist.all_to_all_single(back, compute(rows, theirs), going, coming)
        return combine(back, order)

    compiled = torch.compile(compute), torch.compile(combine)
    return {"alone": lambda: gk.torch.experts(x, chosen % own, weights, gate, up, down),
            "ours": lambda: distributed.experts(x, chosen, weights, gate, up, down),
            "all-to-all": lambda: by_all_to_all(compute, combine), "compiled": lambda: by_all_to_all(*compiled)}


def drawn(shape: tuple[int, ...], device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    made = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=made).to(dtype)


def times(variants: Variants, calls: int) -> dict[str, float]:
    """Microseconds a call of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(TURNS + WARM):
        for name, call in variants.items():
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            if turn >= WARM:
                found[name].append(begin.elapsed_time(end) / calls * 1e3)
    medians = torch.tensor([statistics.median(own) for own in found.values()], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(found, [round(us, 1) for us in medians.tolist()]))


def errors(variants: Variants, reference: str, besides: str = "") -> dict[str, float]:
    """The difference of each from another's result, relative to that one's norm."""
    expected = variants[reference]().double()
    return {name: float((call().double() - expected).norm() / expected.norm())
            for name, call in variants.items() if name != besides}


def rows_of(work: str, shape: tuple[int, int, int], dtype: str, us: dict[str, float],
            error: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each peer: "alone" (or "halved") first, of which ours is to be as much as possible."""
    M, N, K = shape
    peers = [name for name in us if name not in ("ours", "alone", "halved")]
    return [dict(work=work, dtype=dtype, m=M, n=N, k=K, layout="nn", ours_us=us["ours"], peer=peer, peer_us=us[peer],
                 ratio=round(us[peer] / us["ours"], 3), error=error["ours"], graph=False, group=work)
            for peer in (*(name for name in us if name in ("alone", "halved")), *peers)]


def main() -> None:
    parser = argparse.ArgumentParser("bench.distributed")
    parser.add_argument("--out", help="a file or folder for the results")
    parser.add_argument("--only", help="one work: all-gather, reduce-scatter, min-plus or experts")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    is_first = dist.get_rank() == 0
    rows: list[dict[str, Any]] = []
    for work, make, shapes in (("all-gather", gathered, SHAPES), ("reduce-scatter", scattered, SHAPES),
                               ("min-plus", shortest, [(16384, 16384, 8192)]), ("experts", mixture, MIXTURES)):
        if options.only not in (None, work):
            continue
        for shape in shapes:
            variants = make(shape, device)
            is_sum = make in (scattered, mixture)            # of which a rank's own product is no result
            found = errors(variants, next(name for name in ("NCCL", "halved", "all-to-all") if name in variants),
                           "alone" if is_sum else "")
            us = times(variants, 2 if make is shortest else CALLS)
            rows += rows_of(work, shape, "float32" if make is shortest else "bfloat16", us, found)
            if is_first:
                print(work, "x".join(map(str, shape)), us, {name: f"{of:.1e}" for name, of in found.items()}, flush=True)
                device_name = f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"
                report.write(report.document("distributed", rows, device_name, calls=CALLS, turns=TURNS),
                             report.results_path("distributed", options.out))
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
