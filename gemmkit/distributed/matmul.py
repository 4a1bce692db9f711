"""Products of shards: `all_gather_matmul` of rows of A, `matmul_reduce_scatter` and `matmul_all_reduce` of parts of K;
`experts` of tokens that go to other ranks' experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import FunctionCtx

from gemmkit.distributed.ranks import (
    BEFORE_SUM,
    PlannedProduct,
    Ranks,
    ReductionRule,
    Repeated,
    accumulator_of,
    before_sum,
    check_keywords,
    check_tensors,
    dtypes,
    even_lengths,
    finishing,
    is_fused,
    key_of_call,
    known_call,
    lengths_of,
    meet,
    multiply,
    new,
    nothing,
    offsets,
    planned,
    ranks_of,
    remember,
    rule_of,
    sees_rows,
    with_own,
)
from gemmkit.distributed.transport import (
    AllGather,
    AllReduce,
    Gates,
    ReduceScatter,
    Sent,
    all_gather,
    all_to_all,
    beside,
    by_chunks,
    by_shards,
    check_sends,
    check_way,
    inbox_for,
    joins,
    parts_of,
    send_and_receive,
    sending_of,
    single,
)
from gemmkit.epilogues import Default
from gemmkit.kernels.config import TRANSFORMS, Config
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts.joined import Concat
from gemmkit.runtime.arrays import describe, dtype_from_torch
from gemmkit.torch.grouped import checked_experts, compute_experts

if TYPE_CHECKING:
    import torch.distributed as dist


def all_gather_matmul(a_shard: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, *,
                      group: dist.ProcessGroup | None = None, lengths: Any = None, out: torch.Tensor | None = None,
                      conf: Config | None = None, return_a: bool = False, way: str | None = None,
                      **components: object) -> Any:
    """D = gather(A) B + C, where each rank has some rows of A, and its own B, C and D.

    A tensor-parallel layer begins so: the rows of the activations are shared out, and B is the rank's columns of the weight.

    Args:
        a_shard: (M_r, K), this rank's rows of A; any strides. (M, K) is gathered in the order of ranks, in row-major order.
        b: (K, N), this rank's; N may differ between ranks.
        c, out: (M, N), this rank's, as of `gemmkit.matmul`.
        group: a process group; None is the default one.
        lengths: M_r of every rank; None: all are as long as this one. (No rank asks the others.)
        conf, components: as of `gemmkit.matmul`. They see the rank's own product: all rows, its own columns.
        return_a: return the gathered A, too.
        way: "symmetric" lets copy engines push the shards while the kernel computes the rows that have arrived; "plain"
            gathers and then multiplies. None takes the first if the ranks' GPUs can access each other's memory.

    Returns:
        D, (M, N); with ``return_a`` the pair (D, A). The bits are those of `gemmkit.matmul` of the gathered A.

    Raises:
        What `gemmkit.matmul` raises, on the rank whose arguments it is about, and ValueError on the others; ValueError
        where the ranks' calls differ (sizes, dtypes, devices, components, versions); nothing has been launched then.
        RuntimeError where a rank does not come within the group's timeout.

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with gemmkit.emulate():
    ...     distributed.all_gather_matmul(torch.tensor([[1.0, 2.0]]), torch.eye(2)).tolist()
    [[1.0, 2.0]]
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    key = key_of_call((a_shard, b, c, out), conf, components, "all_gather_matmul", lengths, return_a, way)
    known = known_call(ranks, key)
    if known is not None:
        return known(a_shard, b, c, out)
    sizes: tuple[int, ...] = ()

    def facts() -> dict[str, Any]:
        nonlocal sizes
        check_keywords("all_gather_matmul", components)
        check_way(way)
        check_tensors(a_shard=a_shard)
        check_tensors(b=b, c=c, out=out)
        sizes = lengths_of(ranks, a_shard.shape[0], lengths, "a_shard", "rows")
        return {"lengths": sizes, "K": a_shard.shape[1], "the dtype of a_shard": a_shard.dtype, "the dtype of b": b.dtype,
                **dtypes(c=c, out=out), "return_a": bool(return_a), "way": way}

    def make() -> Gates:
        whole: Any = empty_whole(a_shard, sizes)
        gates = Gates(ranks, by_shards(sizes, ranks.rank))
        planned(whole, b, c, out, conf, components)
        if a_shard.is_cuda and ranks.size > 1 and way != "plain":
            gate, parts = gates.of(whole, b, c, out, conf, components), parts_of(whole, sizes, ranks.rank)
            if gate is not None and joins(gate.conf, a_shard, sizes):
                whole = Concat(*(a_shard if part is None else part for part in parts), axis=0)
            gates.check(gate, whole, b, c, out, components)
        return gates

    gates = meet(ranks, "all_gather_matmul", a_shard, facts, {"conf": conf, **components}, make)
    inbox = inbox_for(ranks, a_shard.device, sum(sizes) * a_shard.shape[1] * a_shard.element_size(), way)
    if inbox is not None:
        call = AllGather(ranks, inbox, gates, sizes, return_a, conf, components)
        with torch.cuda.device(inbox.device):
            return remember(ranks, key, call)(a_shard, b, c, out)
    return _by_group(ranks, key, PlainGather(ranks, a_shard.device, sizes, return_a, conf, components))(a_shard, b, c, out)


class PlainGather(Repeated):
    """`all_gather_matmul` by the group: the rows of all ranks are gathered, then multiplied."""

    def __init__(self, ranks: Ranks, device: torch.device, lengths: tuple[int, ...], returns_a: bool, conf: Config | None,
                 components: dict[str, Any]):
        super().__init__(device, conf, components)
        self._ranks, self._lengths, self._returns_a = ranks, lengths, returns_a
        self._product = PlannedProduct(conf, self.components)

    def __call__(self, a_shard: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        whole = gather_rows(self._ranks, a_shard, self._lengths)
        d = self._product(whole, b, c, out)
        return (d, whole) if self._returns_a else d


def _by_group(ranks: Ranks, key: tuple[Any, ...] | None, call: Any) -> Any:
    """A call that goes by the group, found again by its key: on a GPU, but for one that goes so because the stream is being
    captured, and on a CPU none, where products are the emulator's."""
    call.why_plain = ranks.why_plain
    is_known = call.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return remember(ranks, key, call) if is_known else call


def gather_rows(ranks: Ranks, shard: torch.Tensor, lengths: tuple[int, ...]) -> Any:
    """The rows of all ranks, one rank's below the other's. The shard may have any strides: it is copied to its place."""
    whole = empty_whole(shard, lengths)
    slots = whole.split(list(lengths))
    slots[ranks.rank].copy_(shard)
    all_gather(ranks, slots)
    return whole


def empty_whole(shard: torch.Tensor, lengths: tuple[int, ...]) -> Any:
    return new(shard, (sum(lengths), shard.shape[1]), shard.dtype)


# --------------------------------------------------------------------------------------------------
# ``matmul_reduce_scatter`` and ``matmul_all_reduce``: D = A_0 B_0 + A_1 B_1 + ..., of a K that the ranks share out.
#
# Every rank multiplies its share of K; the partial sums of a row go to the rank that has the row of D (or to all), which
# merges them in the order of ranks and finishes them: C, transforms of D, epilogue. That last step is a product of K = 0,
# so that any component that acts on sums acts there as in a product of one GPU.

_AFTER = tuple(name for name in TRANSFORMS if name not in BEFORE_SUM)


def matmul_reduce_scatter(a: torch.Tensor, b_shard: torch.Tensor, c: torch.Tensor | None = None, *,
                          group: dist.ProcessGroup | None = None, lengths: Sequence[int] | None = None,
                          out: torch.Tensor | None = None, conf: Config | None = None, combine: Any = None,
                          reduce_dtype: torch.dtype | None = None, way: str | None = None, **components: object) -> Any:
    """This rank's rows of D = C + the sum over all ranks of A B, where each rank has some of K.

    A tensor-parallel layer ends so: every rank has some columns of the activations and the same rows of the weight.

    Args:
        a: (M, K_r), this rank's columns of A; K_r may differ between ranks, and be 0.
        b_shard: (K_r, N), the same rows of B.
        c, out: (M_r, N), of this rank's rows of D, as of `gemmkit.matmul`.
        group: a process group; None is the default one.
        lengths: M_r of every rank; None: as ``torch.chunk`` has it (`shards.even_lengths`).
        conf: a configuration of the partial products, without C, transforms of D and an epilogue: give these beside it.
        combine: an associative function of two partial sums, ``min`` or ``max``; None: the operator's own
            (`Operator.merge`: min for min-plus).
        reduce_dtype: the dtype in which partial sums travel, for example ``torch.float32``. None takes D's dtype, and the
            accumulator's for integers. The ranks add them in the accumulator's dtype, from rank 0 to the last: the same bits
            in every call.
        way: as of `all_gather_matmul`; "symmetric" computes the peers' rows first, which copy engines push while the rest is
            computed.
        components: as for `gemmkit.matmul`. Components of A and B see the rank's own operands, whose k begins at 0.
            Components of the sums (C, D, epilogue) see the rank's own rows of D.

    Returns:
        D's rows, (M_r, N).

    Raises:
        As `all_gather_matmul`; TypeError for a reduce_dtype that does not hold sums of integers; ConfigError where the
        operator does not say how sums over parts of K are combined.

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit.distributed import matmul_reduce_scatter
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with gemmkit.emulate():
    ...     matmul_reduce_scatter(torch.tensor([[1.0, 2.0]]), torch.ones(2, 2)).tolist()
    [[3.0, 3.0]]
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    key = key_of_call((a, b_shard, c, out), conf, components, "matmul_reduce_scatter", lengths, id(combine), reduce_dtype,
                      way)
    known = known_call(ranks, key)
    if known is not None:
        return known(a, b_shard, c, out)
    sizes: tuple[int, ...] = ()

    def facts() -> dict[str, Any]:
        nonlocal sizes
        check_tensors(a=a, b_shard=b_shard, c=c, out=out)
        check_sends(ranks, a)
        sizes = even_lengths(a.shape[0], ranks.size)
        if lengths is not None:
            sizes = lengths_of(ranks, tuple(lengths)[ranks.rank] if _has(lengths, ranks) else -1, lengths, "D", "rows")
            if sum(sizes) != a.shape[0]:
                raise ValueError(f"lengths={sizes}: they are {sum(sizes)} rows together, and a has {a.shape[0]}")
        return _facts("matmul_reduce_scatter", a, b_shard, c, out, combine, reduce_dtype, components,
                      {"lengths": sizes, "way": way})

    def make() -> ReductionRule:
        how = _reduction(a, b_shard, c, out, conf, combine, reduce_dtype, components, sizes[ranks.rank], ranks.size)
        if not a.is_cuda or ranks.size == 1 or way == "plain":
            return how
        sending = sending_of(sizes, a, b_shard, how, conf, components)
        gates = Gates(ranks, by_chunks(sizes[ranks.rank], sending.chunks, ranks.size), of_sums=True)
        how = how._replace(gates=gates)
        if is_fused(a, c, conf, components):
            mine = new(a, (sizes[ranks.rank], a.shape[1]), a.dtype)
            parts = new(a, (ranks.size, sizes[ranks.rank], b_shard.shape[1]), how.travels)
            whole = new(a, parts.shape[1:], how.result)
            own = with_own(parts, how, ranks.rank, components)
            gate = gates.of(mine, b_shard, None, whole, sending.own, beside(sending.own, own))
            gates.check(gate, mine, b_shard, None, whole, own)
        return how

    how = meet(ranks, "matmul_reduce_scatter", a, facts, {"conf": conf, "combine": combine, **components}, make)
    inbox = inbox_for(ranks, a.device, ranks.size * max(sizes) * b_shard.shape[1] * how.travels.itemsize, way)
    if inbox is not None:
        call = ReduceScatter(ranks, inbox, how, sizes, sending_of(sizes, a, b_shard, how, conf, components), conf,
                             components)
        with torch.cuda.device(inbox.device):
            return remember(ranks, key, call)(a, b_shard, c, out)
    return _by_group(ranks, key, PlainReduceScatter(ranks, a.device, how, sizes, conf, components))(a, b_shard, c, out)


def matmul_all_reduce(a: torch.Tensor, b_shard: torch.Tensor, c: torch.Tensor | None = None, *,
                      group: dist.ProcessGroup | None = None, out: torch.Tensor | None = None, conf: Config | None = None,
                      combine: Any = None, reduce_dtype: torch.dtype | None = None, way: str | None = None,
                      **components: object) -> Any:
    """Compute D = C + the sum over all ranks of A B, on every rank; each rank has a part of K. It is
    `matmul_reduce_scatter`, except that every rank has all rows of D.

    Use it for few rows (decoding): all partial sums go to all ranks in one step, and each rank merges them in the order of
    ranks, so all have the same bits. It needs memory for every rank's partial sums, M x N each.

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit.distributed import matmul_all_reduce
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with gemmkit.emulate():
    ...     matmul_all_reduce(torch.ones(1, 3), torch.full((3, 2), 2.0)).tolist()
    [[6.0, 6.0]]
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    key = key_of_call((a, b_shard, c, out), conf, components, "matmul_all_reduce", id(combine), reduce_dtype, way)
    known = known_call(ranks, key)
    if known is not None:
        return known(a, b_shard, c, out)

    def facts() -> dict[str, Any]:
        check_tensors(a=a, b_shard=b_shard, c=c, out=out)
        return _facts("matmul_all_reduce", a, b_shard, c, out, combine, reduce_dtype, components,
                      {"M": a.shape[0], "way": way})

    def make() -> ReductionRule:
        return _reduction(a, b_shard, c, out, conf, combine, reduce_dtype, components, a.shape[0], ranks.size)

    how = meet(ranks, "matmul_all_reduce", a, facts, {"conf": conf, "combine": combine, **components}, make)
    rows, columns = a.shape[0], b_shard.shape[1]
    inbox = inbox_for(ranks, a.device, ranks.size * rows * columns * how.travels.itemsize, way)
    if inbox is not None:
        with torch.cuda.device(inbox.device):
            return remember(ranks, key, AllReduce(ranks, inbox, how, conf, components))(a, b_shard, c, out)
    return _by_group(ranks, key, PlainAllReduce(ranks, a.device, how, conf, components))(a, b_shard, c, out)


# -- checks -----------------------------------------------------------------------------------------------------------

def _has(lengths: Any, ranks: Ranks) -> bool:
    return hasattr(lengths, "__len__") and len(lengths) == ranks.size


def _facts(call: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None,
           combine: Callable[..., Any] | None, reduce_dtype: torch.dtype | None, components: dict[str, Any],
           more: dict[str, Any]) -> dict[str, Any]:
    check_keywords(call, components)
    check_way(more["way"])
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a has shape {tuple(a.shape)} and b_shard {tuple(b.shape)}: a has {a.shape[1]} columns and "
                         f"b_shard {b.shape[0]} rows; both must be this rank's K")
    return {**more, "N": b.shape[1], **dtypes(a=a, b_shard=b, c=c, out=out), "reduce_dtype": reduce_dtype}


def _reduction(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None, conf: Config | None,
               combine: Callable[..., Any] | None, reduce_dtype: torch.dtype | None, components: dict[str, Any], rows: int,
               ranks: int) -> ReductionRule:
    """How partial sums are merged; all kernels of the call are compiled, so that what is wrong is raised here."""
    if conf is not None:
        acting = [name for name in _AFTER if not getattr(conf, name).is_identity]
        acting += ["epilogue"] * (not isinstance(conf.epilogue, Default))
        if acting:
            raise ConfigError(f"conf has {', '.join(acting)}, which act on sums; conf is of the partial products here: give "
                              "them as arguments")
    before = {name: value for name, value in components.items() if name in BEFORE_SUM}
    of_c, of_out = (None if x is None else describe(x, name) for x, name in ((c, "c"), (out, "out")))
    if conf is None:
        one = single(rows, a, b, of_c, of_out, ranks, components).config
    else:
        one = planned(a, b, None, None, conf, before).config
    given = of_c if of_out is None else of_out
    result = np.dtype(one.global_d_layout.storage) if given is None else given.dtype
    adds = accumulator_of(one, result)
    if reduce_dtype is None:                                      # what an integer does not hold is lost, not rounded
        travels = adds if result.kind in "iu" else result
    else:
        travels = _numpy_dtype(reduce_dtype)
        if adds.kind in "iu" and not np.can_cast(adds, travels):
            raise TypeError(f"reduce_dtype={reduce_dtype}: it does not hold partial sums, which are {adds}; leave it out")
    how = ReductionRule(travels, adds, rule_of(one.operator, combine), result)
    planned(a, b, None, new(a, (a.shape[0], b.shape[1]), travels), conf, before_sum(components))
    parts = new(a, (ranks, rows, b.shape[1]), travels)
    _finish(planned, parts, c, new(a, (rows, b.shape[1]), result) if out is None else out, how, components)
    return how


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    found = dtype_from_torch(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    if found is None:
        raise TypeError(f"{dtype}: NumPy and ml_dtypes do not know it; torch.float32, for example, will do")
    return found


# -- partial products, and what becomes of them -----------------------------------------------------------------------

class PlainReduceScatter(Repeated):
    """`matmul_reduce_scatter` by the group. The rows of others come first, and travel while the next are computed; this
    rank's own rows are last. What is computed of each rank's rows is planned once, the merge is found by its components."""

    def __init__(self, ranks: Ranks, device: torch.device, how: ReductionRule, lengths: tuple[int, ...],
                 conf: Config | None, components: dict[str, Any]):
        super().__init__(device, conf, components, how.rule)
        self._ranks, self._how, self._lengths, before = ranks, how, lengths, before_sum(self.components)
        #: Where a component sees rows, all are multiplied at once.
        self._whole = PlannedProduct(conf, before) if sees_rows(conf, self.components) else None
        self._partial = [PlannedProduct(None, before) for _ in range(ranks.size)]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        ranks, how, lengths, own = self._ranks, self._how, self._lengths, self._ranks.rank
        first, columns = offsets(lengths), b.shape[1]
        parts = new(a, (ranks.size, lengths[own], columns), how.travels)
        sums = None
        if self._whole is not None:
            sums = new(a, (a.shape[0], columns), how.travels)
            self._whole(a, b, None, sums)
        sent = Sent()
        for step in range(1, ranks.size + 1):
            to, source = (own + step) % ranks.size, (own - step) % ranks.size
            rows = slice(first[to], first[to + 1])
            block = parts[own] if to == own else new(a, (lengths[to], columns), how.travels)
            if sums is None:
                self._partial[to](a[rows], b, None, block)
            else:
                block.copy_(sums[rows])
            if to != own:
                send_and_receive(ranks, sent, to, block, source, parts[source])
        sent.wait()
        return _finished(parts, c, out, how, self.components)


class PlainAllReduce(Repeated):
    """`matmul_all_reduce` by the group: all partial sums to all ranks."""

    def __init__(self, ranks: Ranks, device: torch.device, how: ReductionRule, conf: Config | None,
                 components: dict[str, Any]):
        super().__init__(device, conf, components, how.rule)
        self._ranks, self._how = ranks, how
        self._partial = PlannedProduct(conf, before_sum(self.components))

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        parts = new(a, (self._ranks.size, a.shape[0], b.shape[1]), self._how.travels)
        self._partial(a, b, None, parts[self._ranks.rank])
        all_gather(self._ranks, list(parts))
        return _finished(parts, c, out, self._how, self.components)


def _finish(compute: Any, parts: Any, c: Any, out: Any, how: ReductionRule, components: dict[str, Any]) -> Any:
    """Merge partial sums in the order of ranks, and finish them, by a product of K = 0 with components that act on sums."""
    return compute(*nothing(parts, how), c, out, None, finishing(parts, how, c is not None, components))


def _finished(parts: Any, c: torch.Tensor | None, out: Any, how: ReductionRule, components: dict[str, Any]) -> Any:
    if out is None:
        out = new(parts, (parts.shape[1], parts.shape[2]), how.result)
    return _finish(multiply, parts, c, out, how, components)


# --------------------------------------------------------------------------------------------------
# ``experts``: a mixture of experts that the ranks share out (expert parallelism).
#
# Dispatch: a rank sends a token once to each rank that has an expert of its choices, however many of them that rank has, and
# beside the tokens a list of (row, expert, weight), one for each choice. Combine: a rank adds up its experts' results of a
# token before it sends them back, one row for each that came. The sending rank adds these in the order of ranks.

_EXACT = 2**24                         # up to which float32 has every whole number: experts travel beside weights


def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
            down: torch.Tensor, activation: str = "silu", *, group: dist.ProcessGroup | None = None) -> Any:
    """Give each token to the gated experts that are chosen for it, on whichever rank they are, and add up their results:
    `gemmkit.torch.experts`, with the experts shared out among ranks (expert parallelism).

    Args:
        x: (tokens, width), this rank's tokens, float16 or bfloat16; ranks may have different numbers of them, also 0.
        chosen: (tokens, choices) int32 or int64: numbers of experts in all ranks. Rank r of N ranks has the experts from
            r E to (r + 1) E - 1, where E is gate's first size. A number that is none of the N E experts adds nothing.
        weights: (tokens, choices), of any floating-point dtype; float32 travels.
        gate, up: (E, width, hidden), this rank's experts, of x's dtype, as of `gemmkit.torch.experts`.
        down: (E, hidden, width).
        activation: as `gemmkit.torch.glu` takes it.
        group: a process group; None is the default one.

    Returns: a new tensor (tokens, width), by this rank's tokens. Sums over a rank's experts are rounded to x's dtype before
        they travel; they are added in float32, always in one order, so every call gives the same bits. It has first
        gradients by x, weights, gate, up and down; all ranks run the backward pass, because gradients travel, too.

    One exchange tells all ranks how many rows each sends to each, and the host reads these numbers: a call waits for the
    stream, and no CUDA graph can capture it. Rows travel through the group (NCCL, gloo).

    Raises, on every rank, before rows are sent
        What `gemmkit.torch.experts` raises, on the rank whose arguments it is about, and ValueError on the others.
        ValueError: the ranks' calls differ: width, hidden, numbers of experts or choices, dtypes, strides of experts,
            activation, which tensors require gradients. 2**24 experts of all ranks, or more.
        RuntimeError: a rank does not come within the group's timeout; or a stream is being captured.

    >>> import torch, torch.distributed as dist, gemmkit
    >>> from gemmkit import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, chosen, weights = torch.ones(2, 8).half(), torch.tensor([[0, 1], [1, -1]]), torch.tensor([[0.5, 0.5], [1.0, 1.0]])
    >>> gate, up, down = (torch.stack((torch.eye(8), 2 * torch.eye(8))).half() for _ in range(3))
    >>> with gemmkit.emulate():
    ...     distributed.experts(x, chosen, weights, gate, up, down, "relu")[:, 0].tolist()
    [4.5, 8.0]
    >>> dist.destroy_process_group()

    Source: the dispatch and combine of GShard (Lepikhin et al., 2020). DeepEP (DeepSeek, 2025) sends a token once to a rank.
    """
    ranks = ranks_of(group)
    cast: Any = None
    sent: Any = None
    is_valid = False

    def facts() -> dict[str, Any]:
        nonlocal cast, is_valid
        cast = *checked_experts("gemmkit.distributed.experts", x, chosen, weights, gate, up, down, activation), activation
        check_sends(ranks, x, "x")
        _check_dispatch(ranks, *cast[1:-1])
        given = dict(zip(("x", "weights", "gate", "up", "down"), (x, weights, gate, up, down)))
        wanted = [name for name, y in given.items() if y.requires_grad and torch.is_grad_enabled()]
        is_valid = True
        return {"width": x.shape[1], "hidden": gate.shape[2], "the number of a rank's experts": gate.shape[0],
                "the number of choices": chosen.shape[1], "the dtype of x": cast[0].dtype, "activation": activation,
                "strides of experts": tuple(y.stride() for y in cast[1:-1]), "tensors that require gradients": wanted}

    def make() -> None:
        """One choice of a token of zeros: what the kernels refuse is raised here, and they are compiled."""
        with torch.no_grad():
            zeros = x.new_zeros(1, 1)
            compute_experts(cast[0].new_zeros(1, x.shape[1]), zeros.long(), zeros.float(), *cast[1:])

    def all_know(key: object) -> bool:
        nonlocal sent
        if ranks.size == 1 or _is_capturing():
            return bool(ranks.size == 1)
        numbers, own = (chosen, gate.shape[0]) if is_valid else (_no_choices(ranks, x), 1)
        sent, is_alike = _Dispatch.of(ranks, numbers, own, key)
        return is_alike

    meet(ranks, "experts", x, facts, {}, make, all_know)
    if ranks.size == 1:
        return compute_experts(cast[0], chosen, weights, *cast[1:])
    return _over_ranks(ranks, sent, cast[0], chosen, weights, cast[1:])


def _is_capturing() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _no_choices(ranks: Ranks, x: object) -> torch.Tensor:
    """What a rank that refuses a call sends: nothing, on the device that the others' tensors are on, as far as it knows."""
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    if not ranks.backend(device):
        device = torch.device("cuda")
    return torch.empty((0, 0), dtype=torch.int32, device=device)


def _check_dispatch(ranks: Ranks, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    """What a known call must not meet first when rows have been sent."""
    if ranks.size * gate.shape[0] >= _EXACT:
        raise ValueError(f"gate has {gate.shape[0]} experts, and {ranks.size} ranks take less than 2**24 together")
    for name, y in (("gate", gate), ("up", up), ("down", down)):
        if y.data_ptr() % 16:
            raise ValueError(f"{name} begins at an address that is not a multiple of 16 bytes; TMA cannot load it, but "
                             "a copy")
    if _is_capturing():
        raise RuntimeError("the stream is being captured: gemmkit.distributed.experts reads on the host how many rows "
                           "travel; call it outside the graph")


class _Dispatch(NamedTuple):
    """What this rank sends, in the order of the ranks that it goes to, and for each rank in the order of tokens: tokens
    (``index``), and of each choice its ``place`` and whether it is the first of its token's there (``begins``). In column t
    of ``found`` are the places, from 1 on, of what comes back of token t, and 0 elsewhere. How many tokens and choices go to
    each rank and come from each: ``going`` and ``coming``.

    The host makes a call of PyTorch's in 20 to 30 us, and few rows are computed faster than that: so there are few calls,
    and all that need no counts of the host's stand before it waits."""

    index: torch.Tensor
    begins: torch.Tensor
    place: torch.Tensor
    found: torch.Tensor
    going: list[list[int]]
    coming: list[list[int]]

    @classmethod
    def of(cls, ranks: Ranks, chosen: torch.Tensor, own: int, key: object) -> tuple[_Dispatch, bool]:
        """``own``: how many experts a rank has. In one exchange all ranks give their numbers, and say whether they know the
        call of this key; the second result is whether all do."""
        (tokens, choices), device, size = chosen.shape, chosen.device, ranks.size
        count, numbers = tokens * choices, torch.arange(max(tokens * size, tokens * choices, size) + 1, device=device)
        # 1. What goes where: (ranks, tokens, choices), and (ranks, tokens).
        goes = chosen // own == numbers[:size, None, None]
        sends = goes.any(2)
        said = new(chosen, (size, 3, size), torch.int64)
        mine = said[ranks.rank]
        torch.sum(sends, 1, out=mine[0])
        torch.sum(goes, (1, 2), out=mine[1])
        mine[2].fill_(_number_of(key))
        all_gather(ranks, list(said))
        # 2. The n-th that goes is where so many have gone.
        row = sends.flatten().cumsum(0)
        index = torch.searchsorted(row, numbers[1:tokens * size + 1])
        at = torch.searchsorted(goes.flatten().cumsum(0), numbers[1:count + 1])
        begins = row.take((at // max(choices, 1)).clamp_(max=max(tokens * size - 1, 0))).diff(prepend=numbers[:1])
        index, place, found = index % max(tokens, 1), at % max(count, 1), row.view(size, tokens) * sends
        if choices < size:
            found = found.sort(0, descending=True).values[:choices]
        *counts, known = zip(*said.tolist())                           # here the host waits
        going, coming = [of[ranks.rank] for of in counts], [[one[ranks.rank] for one in of] for of in counts]
        of_tokens, of_choices = map(sum, going)
        sent = cls(index[:of_tokens], begins[:of_choices], place[:of_choices], found, going, coming)
        return sent, known[0][0] != 0 and all(one == known[0] for one in known)


@functools.lru_cache(maxsize=256)
def _number_of(key: object) -> int:
    """A number of 56 bits by which ranks compare a call's key; 0 is no key's."""
    return 0 if key is None else 1 + int.from_bytes(sha256(repr(key).encode()).digest()[:7], "big")


def _over_ranks(ranks: Ranks, sent: _Dispatch, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor,
                own: tuple[Any, ...]) -> Any:
    records = torch.is_grad_enabled() and any(y.requires_grad for y in (x, weights, *own[:-1]))
    nothing: Any = _NoContext()
    exchange, send, rows, gather = (of.apply if records else functools.partial(of.forward, nothing)
                                    for of in (_Exchanged, _Sent, _Rows, _Gathered))
    choice = torch.cat((sent.begins[:, None], chosen.flatten()[sent.place, None],
                        weights.flatten()[sent.place, None].float()), 1)
    received, choice = exchange(ranks, sent.going, sent.coming, 0, send(x, sent.index, sent.found), choice)
    # 1. A choice's row, among those of all ranks, in ascending order; and which of this rank's experts it is for.
    numbers, weight = choice.detach()[:, :2], choice[:, 2:]
    row = numbers[:, 0].cumsum(0, dtype=torch.int64) - 1
    expert = numbers[:, 1:] - ranks.rank * own[0].shape[0]
    # 2. This rank's experts, a row of results for each choice; they read tokens where these arrived.
    if records:
        results = compute_experts(rows(received, row, None), expert, weight, *own)
    else:
        gate, up, down, activation = own
        results = compute_experts(received, expert, weight, gate, up, down, activation, row)
    # 3. Back, one row for each token that came, behind a row of zeros.
    (back,) = exchange(ranks, sent.coming[:1], sent.going[:1], 1, rows(results, row, received.shape[0]))
    return gather(back, sent.index, sent.found)


class _Exchanged(torch.autograd.Function):
    """`all_to_all` of each of several tensors, behind so many rows of zeros; the gradients go back."""

    @staticmethod
    def forward(ctx: FunctionCtx, ranks: Ranks, going: list[list[int]], coming: list[list[int]], zeros: int,
                *tensors: torch.Tensor) -> Any:
        ctx.way, ctx.zeros = (ranks, coming, going), zeros
        return tuple(all_to_all(ranks, x, sends, comes, zeros) for x, sends, comes in zip(tensors, going, coming))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> Any:
        return None, None, None, None, *_Exchanged.apply(*ctx.way, 0, *(x[ctx.zeros:].contiguous() for x in grads))


class _Sent(torch.autograd.Function):
    """The rows that go, for each rank those of its tokens: ``index`` names them."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, index: torch.Tensor, found: torch.Tensor) -> Any:
        ctx.save_for_backward(index, found)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> Any:
        return _Gathered.apply(torch.cat((grad.new_zeros(1, grad.shape[1]), grad)), *ctx.saved_tensors), None, None


class _Gathered(torch.autograd.Function):
    """The adjoint: for each token the sum of its rows among those that ``found`` names, added up in float32 in one order."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, index: torch.Tensor, found: torch.Tensor) -> Any:
        ctx.save_for_backward(index, found)
        return x.index_select(0, found.flatten()).view(*found.shape, x.shape[1]).sum(0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> Any:
        sent = _Sent.apply(grad.contiguous(), *ctx.saved_tensors)
        return torch.cat((grad.new_zeros(1, grad.shape[1]), sent)), None, None


class _Rows(torch.autograd.Function):
    """The rows of x that ``index`` names, in ascending order. With ``count``, the adjoint: so many rows, to which x's rows
    are added in float32 where ``index`` names them, in the order of x."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, index: torch.Tensor, count: int | None) -> Any:
        ctx.save_for_backward(index)
        ctx.count = x.shape[0] if count is None else None
        if count is None:
            return x.index_select(0, index)
        if not count or not x.shape[0]:
            return x.new_zeros(count, x.shape[1])
        numbers = torch.arange(max(count, x.shape[0]), device=x.device)
        begins = torch.searchsorted(index, numbers[:count])
        return torch.nn.functional.embedding_bag(numbers[:x.shape[0]], x, begins, mode="sum")

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> Any:
        return _Rows.apply(grad.contiguous(), *ctx.saved_tensors, ctx.count), None, None


class _NoContext:
    """In place of a function's context, where no gradient is recorded: PyTorch's takes 50 us of the host."""

    way: Any = None
    zeros = 0
    count: int | None = None

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        pass
