"""The family of `warp_specialised`: Hopper's tensor cores, warps with roles around a pipeline in shared memory.

`specialise` puts together the parts that the kernel is made of for a problem: routes of A and B, mainloop, store of D,
shared memory. All that depends on the problem's arrays is decided here, by asking each part whether it refuses.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.clipping import clipped
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.pipeline import BARRIER, CLUSTER, CLUSTER_WARPS, THREAD, WARPS, Pipeline
from gemmkit.kernels.common.scheduler import Persistent, TileScheduler
from gemmkit.kernels.common.shared_memory import NamedBarriers, SharedMemory
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.sm90.across import Across
from gemmkit.kernels.sm90.ahead import with_ahead
from gemmkit.kernels.sm90.exchange import ClusterExchange, Exchange
from gemmkit.kernels.sm90.fragments import Deinterleaved, RegisterMainloop, Transformed
from gemmkit.kernels.sm90.kernel import warp_specialised
from gemmkit.kernels.sm90.mainloop import Mainloop, PairMainloop, PortionMainloop, SharedMainloop
from gemmkit.kernels.sm90.maps import maps
from gemmkit.kernels.sm90.observe import ObservedMainloop
from gemmkit.kernels.sm90.permuted import in_panels, permutable, permuted_along_k
from gemmkit.kernels.sm90.routes.cp_async import CpAsync, CpAsyncProducer
from gemmkit.kernels.sm90.routes.deinterleave import Deinterleave, DeinterleaveProducer
from gemmkit.kernels.sm90.routes.joined import BraidedTma, JoinedTma
from gemmkit.kernels.sm90.routes.part_rewrite import PartRewrite
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.rewrite import Rewrite, RewriteProducer, Transpose
from gemmkit.kernels.sm90.routes.staged import Staged, StagedProducer
from gemmkit.kernels.sm90.routes.tma import Tma, TmaProducer
from gemmkit.kernels.sm90.row_exchange import ClusterRowExchange, RowExchange
from gemmkit.kernels.sm90.rules import validate
from gemmkit.kernels.sm90.shared_k import SharedK, least_columns
from gemmkit.kernels.sm90.spec import Sm90Spec
from gemmkit.kernels.sm90.store import SubtileStore, TmaStore, refuses_tma, store_for
from gemmkit.kernels.sm90.stream_exchange import stream_exchange_of, streamed_clusters
from gemmkit.kernels.sm90.warpgroups import Turns
from gemmkit.kernels.sm90.workspace_exchange import exchange_of
from gemmkit.layouts import ColMajor, Plain, Swizzled
from gemmkit.layouts.swizzled import PATTERN, pattern_of
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.config import Config

#: In the order in which they are preferred, and what fills the stages where a route is the last of the two by this order.
ROUTES: dict[Any, Any] = {Tma: TmaProducer, JoinedTma: TmaProducer, BraidedTma: TmaProducer,
                          PartRewrite: RewriteProducer, Rewrite: RewriteProducer, Transpose: RewriteProducer,
                          Deinterleave: DeinterleaveProducer, CpAsync: CpAsyncProducer, Staged: StagedProducer}
WIDEST = 128                           # bytes of a swizzle's lines
REGISTER_THREADS = 384                 # of a block with A in registers: with more, wgmmas wait for each other


class Sm90(KernelFamily):
    """Persistent blocks with a producer and consumers."""

    is_dependent = True
    streams_k = True
    joins_transforms = True            # tensor cores read shared memory themselves

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: Arrays | None) -> Sm90Spec:
        m, n = config.cluster.extents
        sharing = SharedK(config.splits, config.cluster)
        cluster = Cluster(m, n, sharing.in_cluster)
        scheduler: TileScheduler = Persistent(config.order, config.block_shape, cluster, sharing.reduction)
        if isinstance(config.splits, StreamK):
            scheduler = streamed_clusters(scheduler, config.splits, arrays)
        spec = Sm90Spec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, *operands,
                        config.epilogue, config.condition, scheduler, config.has_c, config.stages, config.schedule,
                        config.producer_warps)
        return specialise(spec, sharing, arrays)

    def is_specialised(self, spec: Any, config: Config, arrays: Arrays) -> bool:
        """Of plain operands and a D that TMA moves, unless C or the epilogue reads ahead, or blocks share K by a workspace:
        nothing but that TMA takes them depends on the arrays."""
        a, b, out = arrays.a, arrays.b, arrays.out
        return (type(spec.store) is TmaStore and type(spec.a.route) is type(spec.b.route) is Tma
                and type(config.splits) is int and type(spec.exchange) in (Exchange, ClusterExchange)
                and arrays.products is None and not config.has_c and config.epilogue.is_default
                and a is not None and b is not None and out is not None
                and isinstance(config.global_a_layout, Plain) and isinstance(config.global_b_layout, Plain)
                and why_not(a, config.global_a_layout.axis) is None and why_not(b, config.global_b_layout.axis) is None
                and refuses_tma(spec, out) is None)

    def in_cluster(self, splits: int | StreamK, cluster: Tile) -> int:
        return SharedK(splits, cluster).in_cluster

    def maps(self, spec: Any, arrays: Arrays) -> tuple[Any, ...]:
        return maps(spec, arrays)

    def registers(self, spec: Any) -> tuple[int, ...] | None:
        assert isinstance(spec, Sm90Spec)
        return spec.warpgroups.warp_registers


# -- the parts for a problem ------------------------------------------------------------------------------------------

def specialise(spec: Sm90Spec, sharing: SharedK, arrays: Arrays | None = None) -> Sm90Spec:
    """``spec`` with all its parts. Without ``arrays`` these are what suits TMA, and shared memory is the most."""
    b = dataclasses.replace(spec.b, offset=pattern_of(spec.a.nbytes))
    spec = dataclasses.replace(spec, b=b, mainloop=_mainloop(spec))
    requests = (Request(spec, spec.a, arrays.a if arrays else None, arrays.extents("a") if arrays else (0, 0)),
                Request(spec, spec.b, arrays.b if arrays else None, arrays.extents("b") if arrays else (0, 0)))
    spec = (_with_a_deinterleaved(spec, *requests) or _with_a_across(spec, *requests)
            or _with_a_transformed(_with_routes(spec, *requests)))
    if arrays is not None:
        a, b = (operand if operand.route.uses_tma else clipped(operand, info, spec.operator.identity)
                for operand, info in ((spec.a, arrays.a), (spec.b, arrays.b)))
        spec = dataclasses.replace(spec, a=a, b=b)
    spec = _with_producer(spec)
    return _laid_out(dataclasses.replace(spec, exchange=_exchange(spec, sharing, arrays)), arrays)


def _mainloop(spec: Sm90Spec) -> Mainloop:
    if spec.a.observer is not None:
        return ObservedMainloop()
    stages = spec.operator.promote // spec.block.size.K    # whose sums are added to those in float32
    return PortionMainloop(stages) if stages > 1 else PairMainloop() if stages == 1 else SharedMainloop()


# -- routes -----------------------------------------------------------------------------------------------------------

def _with_routes(spec: Sm90Spec, a: Request, b: Request) -> Sm90Spec:
    """The first pair of routes of which none is refused, and which go together."""
    for of_a in (route for route in ROUTES if route.refuses(a) is None):
        for of_b in ROUTES:                                       # (of most operands the first are the ones)
            if of_a.goes_with(of_b) and of_b.goes_with(of_a) and of_b.refuses(b) is None:
                chosen = dataclasses.replace(spec, a=_sent(a, of_a), b=_sent(b, of_b))
                if _fits(chosen):
                    return chosen
    raise AssertionError("threads can stage any operand")


def _sent(request: Request, route: Any) -> Operand:
    return dataclasses.replace(request.operand, route=route.of(request))


def _fits(spec: Sm90Spec) -> bool:
    """Whether the warps that split numbers can hold what they read."""
    split = [operand for operand in (spec.a, spec.b) if isinstance(operand.route, Deinterleave)]
    warps = spec.producer_warps // max(1, len(split))
    return all(0 < dataclasses.replace(operand, warps=warps).staged_words <= spec.most_staged for operand in split)


def _with_a_deinterleaved(spec: Sm90Spec, a: Request, b: Request) -> Sm90Spec | None:
    """Numbers of two parts of which consumers tell A's apart; None where they cannot."""
    promoted = not isinstance(spec.mainloop, SharedMainloop)
    if any(Deinterleave.refuses(request) for request in (a, b)) or promoted or spec.threads > REGISTER_THREADS:
        return None
    if not permutable(spec.a, spec.b):
        return None
    of_a = dataclasses.replace(a, operand=in_panels(spec.a))
    of_b = dataclasses.replace(b, operand=permuted_along_k(spec.b))
    steps = spec.block.size.K // spec.operator.shape[2]
    chosen = dataclasses.replace(spec, a=_sent(of_a, Tma), b=_sent(of_b, Deinterleave),
                                 mainloop=RegisterMainloop(Deinterleaved(), steps))
    return chosen if _fits(chosen) else None


def _with_a_across(spec: Sm90Spec, a: Request, b: Request) -> Sm90Spec | None:
    """A of 32-bit elements across K, which consumers fetch as it lies; None where they cannot. B may be rewritten."""
    operand = a.operand
    if not (_fetches_a(spec) and operand.layout.is_plain and operand.shared.dtype.itemsize == 4
            and a.stored_axis != a.read_axis and Tma.refuses_array(a) is None):
        return None
    route = next((route for route in (Tma, Rewrite, Transpose) if route.refuses(b) is None), None)
    if route is None:
        return None
    as_stored = Swizzled(ColMajor(operand.shared.dtype), WIDEST)
    of_a = dataclasses.replace(a, operand=dataclasses.replace(operand, shared=as_stored))
    steps = spec.block.size.K // spec.operator.shape[2]
    return dataclasses.replace(spec, a=_sent(of_a, Tma), b=_sent(b, route), mainloop=RegisterMainloop(Across(4), steps))


def _fetches_a(spec: Sm90Spec) -> bool:
    """Whether consumers have the registers for A, and no other block has the same A."""
    return (isinstance(spec.operator, WGMMAOp) and spec.condition.is_always and _is_column(spec.cluster)
            and not spec.is_squeezed and isinstance(spec.mainloop, SharedMainloop) and spec.threads <= REGISTER_THREADS)


def _is_column(cluster: Cluster) -> bool:
    """Whether the blocks, if more than one, share B alone."""
    return cluster.n == 1 and cluster.splits == 1


def _with_a_transformed(spec: Sm90Spec) -> Sm90Spec:
    """The specialisation itself, or, where TMA brings A and its elements are transformed, one in which consumers do so."""
    a, b = spec.a, spec.b
    along = a.plane.axis == 1 or a.plane.itemsize == 2             # what `ldmatrix` can fetch
    if not (type(a.route) is Rewrite and type(b.route) in (Tma, Rewrite, PartRewrite) and along and not a.is_masked
            and _fetches_a(spec)):
        return spec
    steps = spec.block.size.K // spec.operator.shape[2]
    return dataclasses.replace(spec, a=dataclasses.replace(a, route=Tma(a.route.copy)),
                               mainloop=RegisterMainloop(Transformed(a.plane.itemsize), steps))


# -- what follows from them -------------------------------------------------------------------------------------------

def _with_producer(spec: Sm90Spec) -> Sm90Spec:
    """The producer that the routes ask for, and how many of its warps copy each operand."""
    order = list(ROUTES)
    last = max((type(spec.a.route), type(spec.b.route)), key=order.index)
    producer = ROUTES[last].of(spec)
    split = sum(isinstance(operand.route, Deinterleave) for operand in (spec.a, spec.b))
    warps = producer.warps // max(1, split)
    a, b = (dataclasses.replace(operand, warps=warps) for operand in (spec.a, spec.b))
    a, b = (dataclasses.replace(x, route=x.route.dealt(x)) if isinstance(x.route, Rewrite) else x for x in (a, b))
    return dataclasses.replace(spec, producer=producer, a=a, b=b)


def _laid_out(spec: Sm90Spec, arrays: Arrays | None) -> Sm90Spec:
    """Shared memory and named barriers: stages, subtiles of D, exchanged sums, barriers."""
    memory, barriers = SharedMemory(), NamedBarriers()
    memory.take(spec.stages * spec.stage_bytes, PATTERN)
    store = store_for(spec, arrays.out if arrays else None, arrays.extents("out") if arrays else (0, 0),
                     barriers.take(spec.consumers))
    if isinstance(store, SubtileStore):
        store = dataclasses.replace(store, offset=memory.take(store.nbytes))
    spec = with_ahead(dataclasses.replace(spec, store=store), arrays)
    producer = dataclasses.replace(spec.producer, barrier=barriers.take(spec.producer.barriers))
    turns = Turns(2, barriers.take(2), True) if spec.is_pingpong else Turns()
    exchange = spec.exchange
    if isinstance(exchange, ClusterExchange):
        exchange = dataclasses.replace(exchange, offset=memory.take(spec.consumers * exchange.nbytes))
    rows = _row_exchange(spec)
    if isinstance(rows, ClusterRowExchange):
        rows = dataclasses.replace(rows, offset=memory.take(rows.nbytes, 16))
    pipeline = _pipeline(spec, memory)
    if isinstance(rows, ClusterRowExchange):
        rows = dataclasses.replace(rows, barriers=memory.take(rows.barrier_bytes))
    if isinstance(exchange, ClusterExchange):
        exchange = dataclasses.replace(exchange, barriers=memory.take(2 * BARRIER * exchange.consumers))
    store = spec.store.placed(memory)
    return dataclasses.replace(spec, store=store, producer=producer, turns=turns, exchange=exchange,
                               row_exchange=rows, pipeline=pipeline, nbytes=memory.nbytes)


def _row_exchange(spec: Sm90Spec) -> RowExchange:
    """Of states of rows that an epilogue normalises, where a cluster's blocks have them together."""
    last: Any = spec.epilogue.stages()[-1]
    if last.row_words and last.across > 1:
        return spec.exchange_of_rows(last.across, last.row_words)
    return RowExchange()


def _exchange(spec: Sm90Spec, sharing: SharedK, arrays: Arrays | None) -> Exchange:
    if sharing.splits == 1:
        return Exchange()
    if sharing.streams:
        return stream_exchange_of(spec)
    N, count = spec.block.size.N, int(spec.operator.fragment_c.count)
    slices = sharing.slices(N, least_columns(spec.d.shared, spec.d.layout.folds))
    if sharing.by_workspace:
        return exchange_of(spec, slices, sharing, arrays)
    return ClusterExchange(slices, N // slices, count // slices, consumers=spec.consumers,
                           nbytes=spec.fragments_m * count * 4 * 128)


def _pipeline(spec: Sm90Spec, memory: SharedMemory) -> Pipeline:
    """Of a consumer one thread releases a stage: its tensor cores have read for all. What its threads have read, each of its
    warps must say."""
    shares, by_warps = spec.cluster.shares, spec.mainloop.readers_are_warps
    readers = (CLUSTER_WARPS if shares else WARPS) if by_warps else CLUSTER if shares else THREAD
    consumers = 1 if spec.is_pingpong else spec.consumers
    empty_arrivals = consumers * spec.cluster.readers * (4 if by_warps else 1)
    pipeline = Pipeline(spec.stages, 0, spec.producer.full_arrivals, empty_arrivals, spec.producer.rewrites, readers,
                        spec.cluster)
    return dataclasses.replace(pipeline, offset=memory.take(pipeline.nbytes))


FAMILY = Sm90("warp_specialised", warp_specialised, (9, 0))
