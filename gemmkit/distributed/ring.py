"""``ring_matmul``: D = A B, of a B that is too large for one GPU and stays shared out: its shards go round, K in turns.

Each rank has some rows of A and of D, and some rows of B. In every turn it multiplies by the shard of B that it has, while
that shard goes on to the rank before it and the next arrives from the rank behind: two shards at a time are all it holds.
"""

from __future__ import annotations

from typing import Any

from gemmkit.config import ConfigError
from gemmkit.distributed.calls import BEFORE_SUM, check_keywords, meet, multiply, new, planned
from gemmkit.distributed.rank_order import accumulator_of
from gemmkit.distributed.ranks import ranks_of
from gemmkit.distributed.shards import check_tensors, dtypes, lengths_of, offsets
from gemmkit.distributed.transport import Sent, check_sends, pass_on

#: Components that see a k or a whole operand: a turn has a part of K.
_OF_K = "condition", "observe_a", "global_a_layout", "global_b_layout"


def ring_matmul(a: Any, b_shard: Any, c: Any = None, *, group: Any = None, lengths: Any = None, out: Any = None,
                **components: Any) -> Any:
    """This rank's rows of D = A B + C, where each rank has some rows of A and some of K's rows of B.

    Args:
        a: (M_r, K), this rank's rows of A; M_r may differ between ranks.
        b_shard: (K_r, N), this rank's rows of B.
        c, out: (M_r, N), this rank's, as of `gemmkit.matmul`.
        group: a process group; None is the default one.
        lengths: K_r of every rank; None: all are as long as this one.
        components: as of `gemmkit.matmul`. Transforms of D and the epilogue act on the whole sums, in the last turn.
            Transforms of A and B see no coordinates (a turn's k begins at 0).

    Returns:
        D's rows, (M_r, N). They are added up in the accumulator's dtype from this rank's shard of K on, round to the one
        before it: the same bits in every call, and others than on one GPU where sums round.

    Raises:
        As `all_gather_matmul`; ConfigError for a component that has to see all of K at once.

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with gemmkit.emulate():
    ...     distributed.ring_matmul(torch.tensor([[1.0, 2.0]]), torch.ones(2, 2)).tolist()
    [[3.0, 3.0]]
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    sizes: tuple[int, ...] = ()

    def facts() -> dict[str, Any]:
        nonlocal sizes
        check_keywords("ring_matmul", components, refused=_OF_K)
        check_tensors(a=a, b_shard=b_shard, c=c, out=out)
        check_sends(ranks, a)
        for name in BEFORE_SUM:
            if getattr(components.get(name), "with_coordinates", False):
                raise ConfigError(f"{name}={components[name]!r} sees coordinates, and a turn of the ring has a part of K, "
                                  "from 0 on; all_gather_matmul has all of K at once")
        sizes = lengths_of(ranks, b_shard.shape[0], lengths, "b_shard", "rows")
        if sum(sizes) != a.shape[1]:
            raise ValueError(f"a has {a.shape[1]} columns, and the shards of b {sum(sizes)} rows ({sizes}); both are K")
        return {"lengths": sizes, "N": b_shard.shape[1], **dtypes(a=a, b_shard=b_shard, c=c, out=out)}

    def make() -> Any:
        made = planned(a[:, :sizes[ranks.rank]], b_shard, c, out, None, components)
        given = made.config.global_d_layout.storage
        adds = accumulator_of(made.config, given)
        for last in (False, True):
            _turn(planned, a[:, :sizes[ranks.rank]], b_shard, new(a, (a.shape[0], b_shard.shape[1]), adds),
                  new(a, (a.shape[0], b_shard.shape[1]), given if last else adds), last, components)
        return given, adds

    given, adds = meet(ranks, "ring_matmul", a, facts, components, make)
    first, rows, columns = offsets(sizes), a.shape[0], b_shard.shape[1]
    out = new(a, (rows, columns), given) if out is None else out
    held, total = b_shard.contiguous(), c
    for turn in range(ranks.size):
        of, following = (ranks.rank + turn) % ranks.size, (ranks.rank + turn + 1) % ranks.size
        last, sent = turn == ranks.size - 1, Sent()
        arriving = held
        if not last:
            arriving = new(b_shard, (sizes[following], columns), b_shard.dtype)
            pass_on(ranks, sent, held, arriving)
        target = out if last else new(a, (rows, columns), adds)
        _turn(multiply, a[:, first[of]:first[of + 1]], held, total, target, last, components)
        sent.wait()
        held, total = arriving, target
    return out


def _turn(compute: Any, a: Any, b: Any, total: Any, out: Any, last: bool, components: dict[str, Any]) -> Any:
    """One shard's product, upon what there is; what acts on sums waits for the last."""
    acting = components if last else {name: value for name, value in components.items() if name in BEFORE_SUM}
    return compute(a, b, total, out, None, acting)
