"""What two ranks do in test_one_gpu.py, which share a GPU: each maps the other's memory by CUDA IPC.

PyTorch makes no symmetric memory for them; all else of the symmetric way is as on two GPUs: slots, epochs, pushes, gated
kernels. The GPU gives the processes its time in turns, so that nothing here is about speed.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.multiprocessing import reductions

import gemmkit as gk
from gemmkit import distributed as gd
from gemmkit.distributed import matmul, transport
from gemmkit.distributed.ranks import Ranks, ranks_of
from gemmkit.distributed.transport import Peers, Sending
from gemmkit.epilogues import Bias, ReLU
from gemmkit.operators import MIN_PLUS
from tests.distributed.gpu_scenarios import check_a_thousand_gathers, check_gathers, drawn

__all__ = ["check_a_thousand_gathers", "check_gathers"]


def by_ipc(ranks: Ranks, nbytes: int, device: torch.device) -> Peers:
    own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    name = f"ipc/{len(ranks.inboxes)}"
    ranks.store.set(f"{name}/{ranks.rank}", pickle.dumps(reductions.reduce_tensor(own)))
    make, given = pickle.loads(ranks.store.get(f"{name}/{1 - ranks.rank}"))
    other = make(*given)
    return Peers((own, other) if ranks.rank == 0 else (other, own), None)


def prepare() -> None:
    """Have this process make its peers by IPC (`tests.support.ranks` calls it)."""
    put(transport, "symmetric_peers", by_ipc)
    put(transport, "why_not_symmetric", lambda ranks, device: None)
    put(matmul, "check_sends", lambda *given: None)


def put(module: Any, name: str, value: Any) -> None:
    assert hasattr(module, name)
    setattr(module, name, value)


def check_reductions(rank: int) -> None:
    """Whole numbers, whose sums over ranks bfloat16 has. Each case has columns of its own: what ranks have agreed on for one
    stays for a call like it, and so would its chunks."""
    for case, (rows, shares, lengths, chunks, components) in enumerate((
            (256, (64, 64), None, 0, {}), (77, (40, 24), (70, 7), 2, {}), (77, (40, 24), (70, 7), 0, {}), (64, (64, 0), None, 1, {}),
            (64, (64, 0), None, 0, {}), (640, (64, 64), None, 3, {}), (128, (32, 32), None, 4, dict(epilogue=ReLU())),
            (128, (32, 32), None, 0, dict(epilogue=ReLU())), (40, (16, 8), None, 2, dict(operator=MIN_PLUS)),
            (40, (16, 8), None, 0, dict(operator=MIN_PLUS)))):                # chunks; 0: kernels store to the peer
        columns = 128 + 8 * case
        dtype = torch.float32 if components else torch.bfloat16
        a, b = drawn(0, rows, sum(shares), dtype=dtype), drawn(1, sum(shares), columns, dtype=dtype)
        if "epilogue" in components:
            components = dict(epilogue=Bias(torch.arange(float(columns), device="cuda")) | ReLU())
        own = a.split(shares, 1)[rank], b.split(shares)[rank]
        expected = gk.matmul(a, b, **components)
        put(matmul, "sending_of", lambda *given, n=chunks: Sending(n == 0, n or 1))
        for _ in range(5):
            d = gd.matmul_reduce_scatter(*own, lengths=lengths, way="symmetric", **components)
            assert torch.equal(d, expected.split(lengths or -(-rows // 2))[rank]), (rows, chunks, components)
            whole = gd.matmul_all_reduce(*own, way="symmetric", **components)
            assert torch.equal(whole, expected), (rows, components)
        if not components:                                             # behind the exchange, since there is a C
            c = drawn(2, rows, columns, dtype=dtype).split(lengths or -(-rows // 2))[rank]
            d = gd.matmul_reduce_scatter(*own, c, lengths=lengths, way="symmetric")
            assert torch.equal(d, (expected.split(lengths or -(-rows // 2))[rank].float() + c.float()).to(dtype))
    assert ranks_of().why_plain is None


def check_a_rank_that_does_not_come(rank: int) -> None:
    """The other rank makes no such call: this one's kernel traps within the group's timeout. (It ends the CUDA context.)"""
    from tests.distributed.scenarios import group_of

    a, b = drawn(0, 256, 64), drawn(1, 64, 128)
    with group_of(6) as group:
        gd.all_gather_matmul(a.chunk(2)[rank], b, group=group, way="symmetric")
        torch.cuda.synchronize()
        if rank == 0:
            gd.all_gather_matmul(a.chunk(2)[rank], b, group=group, way="symmetric")
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return
            raise AssertionError("no error")


