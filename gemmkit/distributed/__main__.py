"""``python -m gemmkit.distributed check``: what the GPUs of this host offer each other, and which way calls will take.

Alone it looks at the host's GPUs. Started by ``torchrun --nproc-per-node=2 -m gemmkit.distributed check`` its ranks make a
group and compute small products over it, each way that there is; the exit status is 1 where one of them is wrong.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import gemmkit
from gemmkit.distributed.matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from gemmkit.distributed.matrix import ring_matmul
from gemmkit.distributed.ranks import Ranks, even_lengths, ranks_of

# --------------------------------------------------------------------------------------------------
# What ``python -m gemmkit.distributed check`` finds out: the GPUs of a host and of a group, and that products are
# right.

_TIMES = 5


def of_host(nbytes: int) -> list[str]:
    """Lines on the GPUs of this host: which reach each other's memory, and how fast copies of ``nbytes`` go."""
    count = torch.cuda.device_count()
    lines = [f"gemmkit {gemmkit.__version__}, PyTorch {torch.__version__}, {count} GPUs; backends: {', '.join(_backends())}"]
    if count == 0:
        return [*lines, "no GPU: calls take the plain way over gloo, and products run in the emulator"]
    for n in range(count):
        found = torch.cuda.get_device_properties(n)
        lines.append(f"GPU {n}: {found.name}, {found.total_memory / 2**30:.0f} GiB, "
                     f"{found.multi_processor_count} multiprocessors")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    for i, j in pairs:
        if torch.cuda.can_device_access_peer(i, j):
            lines.append(f"GPU {i} -> GPU {j}: peer access, {_bandwidth(i, j, nbytes) / 1e9:.0f} GB/s by copies")
        else:
            lines.append(f"GPU {i} -> GPU {j}: no peer access; between these calls take the plain way")
    if not pairs:
        lines.append("one GPU: a group over NCCL has one rank here, and computes alone")
    return lines


def _backends() -> list[str]:
    there = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    return [name for name, is_there in there.items() if is_there()]


def _bandwidth(source: int, to: int, nbytes: int) -> float:
    """Bytes a second of copies from one GPU's memory to another's: the median of some."""
    x = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{source}")
    y = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{to}")
    seconds: list[float] = []
    with torch.cuda.device(source):
        y.copy_(x)
        for _ in range(_TIMES):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            y.copy_(x)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return nbytes / statistics.median(seconds)


def of_group() -> tuple[bool, list[str]]:
    """Make the default group of a process that ``torchrun`` started, unless there is one, and compute small products over
    it. Whether all are right, and lines that say so."""
    own = not dist.is_initialized()
    if own:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        ranks = ranks_of()
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        lines = [f"{ranks.size} ranks over {ranks.backend(device)}; timeout {ranks.timeout.total_seconds():g} s"]
        right = True
        with _computing(device):
            for name, check in _checks(ranks, device).items():
                is_right = check()
                right = right and is_right
                how = f"plain, since {ranks.why_plain}" if ranks.why_plain else "symmetric"
                lines.append(f"rank {ranks.rank}: {name}: {'right' if is_right else 'WRONG'} ({how})")
        return right, lines
    finally:
        if own:
            dist.destroy_process_group()


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """Products run on the device; those of the CPU in the emulator."""
    if device.type == "cuda":
        yield
    else:
        with gemmkit.emulate():
            yield


def _checks(ranks: Ranks, device: torch.device) -> dict[str, Callable[[], bool]]:
    """A product of each call, of whole numbers, whose sums are exact."""
    made = torch.Generator().manual_seed(7)
    M, N, K = 16 * ranks.size, 16, 16 * ranks.size
    a, b = (torch.randint(-3, 4, shape, generator=made).float().to(device) for shape in ((M, K), (K, N)))
    whole = a.double() @ b.double()
    rows, depth = (even_lengths(extent, ranks.size) for extent in (M, K))
    own_rows, own_columns, own_k = a.split(list(rows))[ranks.rank], a.split(list(depth), 1)[ranks.rank], b.split(
        list(depth))[ranks.rank]
    mine = whole.split(list(rows))[ranks.rank]

    def is_right(found: Any, expected: Any) -> bool:
        return bool(torch.equal(found.double(), expected))

    return {
        "all_gather_matmul": lambda: is_right(all_gather_matmul(own_rows, b), whole),
        "matmul_reduce_scatter": lambda: is_right(matmul_reduce_scatter(own_columns, own_k), mine),
        "matmul_all_reduce": lambda: is_right(matmul_all_reduce(own_columns, own_k), whole),
        "ring_matmul": lambda: is_right(ring_matmul(own_rows, own_k), mine),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m gemmkit.distributed", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="topology, peer access, bandwidths, and what will be used")
    check.add_argument("--mib", type=int, default=256, help="size of the copies that bandwidths are taken from")
    given = parser.parse_args(arguments)
    if given.mib < 1:
        parser.error(f"--mib {given.mib}: 1 at least is needed")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        print("\n".join(of_host(given.mib << 20)), flush=True)
    if "WORLD_SIZE" not in os.environ:
        return 0
    is_right, lines = of_group()
    if rank == 0 or not is_right:
        print("\n".join(lines), flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
