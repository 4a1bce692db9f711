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

Every variant is called in turns, the ranks together, and a rank's time is by events over several calls; of all turns the
median, of all ranks the slowest. Results are compared with the product alone before they are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # which makes the fused operators

import gemmkit as gk
from gemmkit import distributed
from gemmkit.operators import MIN_PLUS

SHAPES = [(8192, 8192, 8192), (16384, 4096, 8192), (8192, 14336, 4096), (4096, 4096, 4096)]
CALLS, TURNS = 4, 15

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


def shortest(device: torch.device) -> Variants:
    """Min-plus of float32, 16384^2 x 8192: rows of A are gathered, columns of B shared out. "halved" is a rank's part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, b = drawn((16384, 8192), device, 0, torch.float32), drawn((8192, 16384), device, 1, torch.float32)
    own, columns = whole.chunk(ranks)[rank].contiguous(), b.chunk(ranks, 1)[rank].contiguous()
    return {"halved": lambda: gk.matmul(whole, columns, operator=MIN_PLUS),
            "ours": lambda: distributed.all_gather_matmul(own, columns, operator=MIN_PLUS, way="symmetric")}


def drawn(shape: tuple[int, ...], device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    made = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=made).to(dtype)


def times(variants: Variants) -> dict[str, float]:
    """Microseconds a call of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(TURNS + 2):
        for name, call in variants.items():
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            if turn >= 2:
                found[name].append(begin.elapsed_time(end) / CALLS * 1e3)
    medians = torch.tensor([statistics.median(own) for own in found.values()], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(found, [round(us, 1) for us in medians.tolist()]))


def differences(variants: Variants, reference: str, besides: str = "") -> dict[str, float]:
    """The largest difference of each from another's result, relative to that one's largest element."""
    expected = variants[reference]().double()
    return {name: float((call().double() - expected).abs().max() / expected.abs().max())
            for name, call in variants.items() if name != besides}


def main() -> None:
    parser = argparse.ArgumentParser("bench.distributed")
    parser.add_argument("--out", help="a file for the results")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ranks": dist.get_world_size(),
                               "torch": str(torch.__version__)}
    for name, make, shapes in (("all-gather", gathered, SHAPES), ("reduce-scatter", scattered, SHAPES)):
        for shape in shapes:
            variants = make(shape, device)
            # (Of a reduction a rank's own product is no sum over ranks.)
            errors = differences(variants, "NCCL", "alone" if make is scattered else "")
            say(results, f"{name} {'x'.join(map(str, shape))}", times(variants), errors)
    variants = shortest(device)
    say(results, "min-plus 16384x16384x8192", times(variants), differences(variants, "halved"))
    if dist.get_rank() == 0 and options.out:
        with open(options.out, "w", encoding="utf-8") as out:
            json.dump(results, out, indent=1)
    dist.destroy_process_group()


def say(results: dict[str, Any], name: str, us: dict[str, float], errors: dict[str, float]) -> None:
    results[name] = {"us": us, "errors": errors}
    if dist.get_rank() == 0:
        print(name, us, {key: f"{error:.1e}" for key, error in errors.items()}, flush=True)


if __name__ == "__main__":
    main()
