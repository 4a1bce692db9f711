"""A perceptron whose weights several GPUs share out: `torchrun --nproc-per-node=2 -m examples.distributed_mlp`.

Tensor parallelism with sequence parallelism (Megatron-LM's): each rank has some rows of the activations x, the same columns
of W1 and rows of W2.

| step | call | moves |
|---|---|---|
| h = gelu(gather(x) W1 + b1) | `all_gather_matmul`, epilogue `Bias \\| GELU` | rows of x |
| y = sum over ranks of h W2, + x | `matmul_reduce_scatter`, epilogue `Residual`, behind the sum | partial sums, in float32 |

Each rank then has its rows of y. PyTorch's result is that of the whole layer on every rank, in float64.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

import gemmkit as gk
from examples.group import joined
from gemmkit import distributed
from gemmkit.epilogues import GELU, Bias, Residual


def layer(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """This rank's rows of gelu(x W1 + b1) W2 + x, of its rows of x, its columns of W1 and b1, and its rows of W2."""
    on_host = x.device.type == "cpu"                                      # the emulator takes NumPy's arrays
    bias, residual = (b1.numpy(), x.numpy()) if on_host else (b1, x)
    h = distributed.all_gather_matmul(x, w1, epilogue=Bias(bias) | GELU())
    return distributed.matmul_reduce_scatter(h, w2, reduce_dtype=torch.float32, epilogue=Residual(residual))


def reference(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    x, w1, b1, w2 = (t.double() for t in (x, w1, b1, w2))
    return torch.nn.functional.gelu(x @ w1 + b1) @ w2 + x


def main(rows: int | None = None, width: int | None = None) -> bool:
    """Compute the layer over the default group, print the error, and return whether it is what rounding explains."""
    with joined() as device, contextlib.ExitStack() as session:
        if device.type == "cpu":
            session.enter_context(gk.emulate())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        rows, width = rows or (6 if device.type == "cpu" else 4096), width or (8 if device.type == "cpu" else 4096)
        rows, width = rows * ranks, width * ranks
        made = torch.Generator().manual_seed(0)
        shapes = (rows, width), (width, 4 * width), (4 * width,), (4 * width, width)
        x, w1, b1, w2 = ((torch.randn(shape, generator=made) * width ** -0.5).to(device, dtype) for shape in shapes)
        y = layer(x.chunk(ranks)[rank], w1.chunk(ranks, 1)[rank].contiguous(), b1.chunk(ranks)[rank], w2.chunk(ranks)[rank])
        expected = reference(x, w1, b1, w2).chunk(ranks)[rank]
        error = float((y.double() - expected).abs().max() / expected.abs().max())
        right = error < (1e-5 if dtype == torch.float32 else 2e-2)
        print(f"rank {rank} of {ranks} on the {device.type}: y has {len(y)} rows of {width}, {dtype}; largest error "
              f"{error:.1e}, {'as rounding explains' if right else 'TOO LARGE'}")
        return right


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="examples.distributed_mlp", description="A perceptron over several GPUs.")
    parser.add_argument("--rows", type=int, help="of x that each rank has")
    parser.add_argument("--width", type=int, help="columns of x, for each rank")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: 1 at least is needed")
    return 0 if main(options.rows, options.width) else 1


if __name__ == "__main__":
    raise SystemExit(command())
