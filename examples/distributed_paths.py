"""Shortest paths of a graph that several GPUs share out: `torchrun --nproc-per-node=2 -m examples.distributed_paths`.

Each rank has some rows of the matrix of distances, and the squares need no rank that has all of it. A square in the min-plus
semiring joins paths of up to h edges to paths of up to 2h, (D ⊗ D)_ij = min_k (D_ik + D_kj), and leaves D shared out as it
was: `gk.matmul` of two matrices by rows is a ring, in which the shards go round while each rank multiplies by the one that
it has. Squaring goes on until no rank's rows change.

Without a GPU the products run in the emulator, over gloo. Lengths are whole numbers, which float32 adds exactly, so the
result must equal that of Floyd's and Warshall's algorithm, which has nothing in common with squaring, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import gemmkit as gk
from examples.group import joined
from gemmkit.distributed import DistributedMatrix, explain
from gemmkit.operators import MIN_PLUS


def roads(nodes: int, seed: int = 0) -> torch.Tensor:
    """Lengths of a random graph's edges, three from each node; infinite where there is none, 0 on the diagonal."""
    made = torch.Generator().manual_seed(seed)
    lengths = torch.full((nodes, nodes), torch.inf)
    for node in range(nodes):
        to = torch.randint(nodes, (3,), generator=made)
        lengths[node, to] = torch.randint(1, 100, (3,), generator=made).float()
    return lengths.fill_diagonal_(0.0)


def shortest(lengths: DistributedMatrix) -> tuple[DistributedMatrix, int]:
    """The distances between all pairs of nodes, shared out as ``lengths`` are, and how many squares they took."""
    distances, squares = lengths, 0
    while True:
        squared, squares = gk.matmul(distances, distances, operator=MIN_PLUS), squares + 1
        changed = (squared.local != distances.local).any().to(torch.int32)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=lengths.group)
        if not int(changed):
            return squared, squares
        distances = squared


def reference(lengths: torch.Tensor) -> torch.Tensor:
    """Floyd's and Warshall's algorithm."""
    distances = lengths.clone()
    for node in range(len(distances)):
        distances = torch.minimum(distances, distances[:, node:node + 1] + distances[node:node + 1])
    return distances


def main(nodes: int | None = None) -> bool:
    """Compute the distances over the default group, print what came out, and return whether they are right."""
    with joined() as device, contextlib.ExitStack() as session:
        if device.type == "cpu":
            session.enter_context(gk.emulate())
        nodes = nodes or (40 if device.type == "cpu" else 4096)
        whole = roads(nodes).to(device)
        lengths = DistributedMatrix.whole(whole, "rows")
        if dist.get_rank() == 0:
            print(f"Shortest paths between {nodes} nodes, {dist.get_world_size()} ranks on the {device.type}")
            print(f"  {explain(lengths, lengths, operator=MIN_PLUS)}")
        found, squares = shortest(lengths)
        expected: Any = DistributedMatrix.whole(reference(whole), "rows").local
        same = bool(torch.equal(found.local, expected))
        print(f"  rank {dist.get_rank()}: {len(found.local)} rows, {squares} squares; "
              f"{'equal to' if same else 'DIFFERS FROM'} Floyd's and Warshall's")
        return same


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="examples.distributed_paths", description="Shortest paths over several GPUs.")
    parser.add_argument("--nodes", type=int, help="of the graph (default: 4096; 40 in the emulator)")
    options = parser.parse_args(arguments)
    if options.nodes is not None and options.nodes < 1:
        parser.error(f"--nodes {options.nodes}: 1 at least is needed")
    return 0 if main(options.nodes) else 1


if __name__ == "__main__":
    raise SystemExit(command())
