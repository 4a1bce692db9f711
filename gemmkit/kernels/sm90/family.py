"""The family of `warp_specialised`: Hopper's tensor cores, warps with roles around a pipeline in shared memory.

`specialise` puts together the parts that the kernel is made of for a problem: routes of A and B, mainloop, store of D,
shared memory. All that depends on the problem's arrays is decided here, by asking each part whether it refuses.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from gemmkit.components import at_path
from gemmkit.kernels.collectives.lanes import OperandReduction, operand_reduction_of
from gemmkit.kernels.collectives.operand import Operand, OperandArrays, clipped
from gemmkit.kernels.collectives.pipeline import (
    BARRIER,
    CLUSTER,
    CLUSTER_WARPS,
    THREAD,
    WARPS,
    NamedBarriers,
    OrderBarrier,
    Pipeline,
    SharedMemory,
    Warpgroups,
)
from gemmkit.kernels.collectives.scheduler import Cluster, Persistent, TileScheduler
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.sm90.cross_lane import Fragments
from gemmkit.kernels.sm90.dequantised import DequantisingMainloop, QuantisedTma, quantised_tile
from gemmkit.kernels.sm90.epilogue_load import PrefetchedStore, with_ahead
from gemmkit.kernels.sm90.exchange import (
    COLUMNS,
    ClusterExchange,
    ClusterRowExchange,
    Exchange,
    RowExchange,
    SharedK,
    exchange_of,
    least_columns,
    stream_exchange_of,
    streamed_clusters,
)
from gemmkit.kernels.sm90.kernel import Producer, TmaProducer, warp_specialised
from gemmkit.kernels.sm90.mainloop import (
    AlternatingMainloop,
    Deinterleaved,
    MnMajorTf32,
    ObservedMainloop,
    PairMainloop,
    PromotedMainloop,
    RegisterMainloop,
    ScaledMainloop,
    SharedMainloop,
    Transformed,
    WgmmaMainloop,
    in_panels,
    permuted_along_k,
)
from gemmkit.kernels.sm90.rewrite import Deinterleave, DeinterleaveProducer, PartRewrite, Rewrite, RewriteProducer, Transpose
from gemmkit.kernels.sm90.routes import (
    CpAsyncLines,
    CpAsyncProducer,
    InterleavedTma,
    JoinedTma,
    PlacedTma,
    Request,
    StagedProducer,
    StagedRoute,
    Tma,
)
from gemmkit.kernels.sm90.store import DirectStore, SubtileStore, TileStore, TmaStore, refuses_tma, store_for
from gemmkit.kernels.spec import KernelFamily, Spec, order_of, rule
from gemmkit.lang.components import dataclass
from gemmkit.lang.functions import Frozen, Kind, kind
from gemmkit.lang.numba_hooks import types
from gemmkit.layouts import ColMajor, Plain, Planes, Sliding, Swizzled
from gemmkit.layouts.joined import OCTET
from gemmkit.layouts.plain import PATTERN, pattern_of
from gemmkit.layouts.quantised import FLOAT8_WEIGHTS, QuantisedTranspose
from gemmkit.operators.algebra import Algebra
from gemmkit.operators.base import units
from gemmkit.operators.wgmma import BLOCK, WGMMAOp
from gemmkit.ptx.tma import TensorMapType
from gemmkit.runtime.arrays import ArrayInfo, describe, whole
from gemmkit.runtime.device import H100
from gemmkit.runtime.tensor_maps import BYTES, Encoder, TensorMapSpec, why_not
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.kernels.config import Config


# --------------------------------------------------------------------------------------------------
# The rules of configurations for `warp_specialised`.

SCHEDULES = ("cooperative", "pingpong")
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (1, 8))
BOX = 256                              # elements that a TMA box can have along a dimension
POSITIONS = 1016                       # the same of panels that overlap, with lines for the taps
STAGES = 32
ACCUMULATORS = 192                     # 32-bit registers of a consumer's sums: beyond it they spill


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    operator: Any = config.operator
    rule(isinstance(units(operator), WGMMAOp), "operator", operator,
         "the warp-specialised kernel multiplies with WGMMAOp; use it, or kernel='singlestage'")
    if isinstance(operator, Algebra):
        _validate_algebra(operator)
    _validate_roles(config)
    _validate_tiles(config)
    for name, across in (("a", "M"), ("b", "N")):
        _validate_operand(config, name, across)
    _validate_d(config)
    if units(operator).is_scaled:
        _validate_scaled(config)
    if config.splits != 1:
        _validate_splits(config)
    rule(not config.epilogue.stores_blocks, "epilogue", config.epilogue,
         "it stores whole blocks from shared memory, but this kernel's accumulators stay in registers; override finish or "
         "tile, or use MMAOp")
    differs = config.condition.depends_on
    together = config.cluster.size.M == 1 or "m" not in differs, config.cluster.size.N == 1 or "n" not in differs
    rule(config.condition.is_always or all(together), "cluster", config.cluster,
         "blocks of a cluster compute the same k-tiles, and the condition may differ between them; use Tile(M=1, N=1)")


def _validate_algebra(operator: Algebra) -> None:
    rule(operator.is_signed, "operator", operator, "wgmma adds or subtracts a product and cannot scale it: the table's "
                                                   "coefficients must be 1 or -1 (or 0); use MMAOp or FPUOp as the base")
    negative = any(factor < 0 for row in operator.table for sums in row for factor in sums)
    rule(not negative or operator.base.accumulator.kind == "f", "operator", operator,
         "wgmma does not subtract products of integers, and the table has a -1; use FPUOp as the base")


def _validate_roles(config: Config) -> None:
    rule(config.schedule in SCHEDULES, "schedule", config.schedule, f"the schedules are {', '.join(SCHEDULES)}")
    warps = config.warps_per_block
    rule(warps % 4 == 0 and warps <= 12, "warps_per_block", warps, "one to three warpgroups of 4 warps multiply")
    rule(config.schedule != "pingpong" or warps == 8, "warps_per_block", warps, "ping-pong needs two warpgroups: 8 warps")
    rule(config.producer_warps in (4, 8), "producer_warps", config.producer_warps, "4 or 8 warps produce")
    rule(config.producer_warps == 4 or warps <= 8, "producer_warps", config.producer_warps, "three warpgroups that multiply "
         "leave registers for 4 warps")
    rule(2 <= config.stages <= STAGES, "stages", config.stages, f"2 to {STAGES} stages are needed")
    rule(tuple(config.cluster.extents) in CLUSTERS, "cluster", config.cluster, "one block, two along M, two, four or "
         "eight along N, or two by two: Tile(M=1, N=1), Tile(M=2, N=1), Tile(M=1, N=2), Tile(M=1, N=4), Tile(M=1, N=8) or "
         "Tile(M=2, N=2)")


def _validate_tiles(config: Config) -> None:
    operator, parts = units(config.operator), getattr(config.operator, "parts", 1)
    block, group = config.block_shape.size, config.compute_warp.size
    consumers = 1 if config.schedule == "pingpong" else config.warps_per_block // 4
    rule(group.M % 64 == 0, "compute_warp", config.compute_warp, "a warpgroup multiplies 64 rows at a time: M must be a "
         "multiple of 64")
    rule(group.M * consumers == block.M, "compute_warp", config.compute_warp, lambda: f"{consumers} warpgroups of "
         f"M={group.M} rows share a tile of block_shape={config.block_shape!r}")
    rule(group.N == block.N == operator.N, "operator", operator, lambda: "its N must be that of block_shape="
         f"{config.block_shape!r} and of compute_warp={config.compute_warp!r}")
    rule(block.K % operator.K == 0, "block_shape", config.block_shape, "K must be a multiple of the operator's "
         f"{operator.K}")
    promote = operator.promote
    rule(promote % block.K == 0, "operator", operator, f"promote must be a multiple of the block's K={block.K}")
    fragments = mainloop_of(config.operator, config.block_shape, config.compute_warp).held(group.M // 64)
    registers = parts * fragments * operator.N // 2 * operator.accumulator.itemsize // 4
    own = operator.N // 2 * operator.accumulator.itemsize // 4
    rule(config.threads <= 384 or own <= 96, "operator", operator,
         f"a block of {config.threads} threads begins with 128 registers each, and one instruction would need {own} for its "
         "accumulators, but only 96 are available; use a smaller N, or fewer warps")
    most = ACCUMULATORS if config.threads <= 384 else 128
    rule(registers <= most, "compute_warp", config.compute_warp,
         f"a thread would hold {registers} registers of accumulators, but {most} is the limit with {config.threads} "
         "threads; use smaller tiles")


def _validate_scaled(config: Config) -> None:
    operator: Any = config.operator
    rule(not isinstance(operator, Algebra), "operator", operator, "numbers of several parts have no block scales")
    held = (config.compute_warp.size.M // 64 + 1) * operator.N // 2
    rule(operator.columns == BLOCK or held <= 128, "operator", operator, lambda: "a thread would hold a scale for each of "
         f"its columns beside {held} accumulators, and 128 leave registers for them; use a smaller N")
    rule(config.block_shape.size.K == BLOCK, "block_shape", config.block_shape, f"a stage is a block of {BLOCK} elements "
         "along K")
    rule(config.condition.is_always, "condition", config.condition, "a condition leaves k-tiles out, and scales are read of "
         "each in turn; multiply zeros instead")


def _validate_splits(config: Config) -> None:
    operator, sharing = units(config.operator), SharedK(config.splits, config.cluster)
    splits, N = config.splits, config.block_shape.size.N
    rule(operator is config.operator, "splits", splits, "blocks cannot exchange accumulators of numbers with several "
                                                        "parts; use splits=1")
    rule(config.schedule == "cooperative" or sharing.streams, "splits", splits,
         "ping-pong consumers cannot exchange the accumulators of every tile; use schedule='cooperative', or StreamK()")
    rule(operator.accumulator.itemsize == 4, "splits", splits,
         f"blocks cannot exchange accumulators in {operator.accumulator}")
    if isinstance(splits, StreamK):
        blocks, peers = splits.blocks, config.cluster.count
        rule(blocks is None or blocks % peers == 0, "splits", splits,
             f"a cluster has {peers} blocks; use a multiple of that, or StreamK()")
    elif not sharing.by_workspace:
        least = least_columns(config.shared_d_layout, config.global_d_layout.folds)
        rule(N % splits == 0 and N // splits % least == 0, "splits", splits,
             f"each block finishes N={N} / {splits} columns, which must be a multiple of {least} ({COLUMNS} and the width "
             "of D's swizzle atom); numbers other than 2, 4 and 8 use a workspace and have no such rule")


def _validate_operand(config: Config, name: str, across: str) -> None:
    layout, field = getattr(config, f"shared_{name}_layout"), f"shared_{name}_layout"
    operator = units(config.operator)
    if isinstance(config.operator, Algebra):
        rule(isinstance(layout, Planes) and isinstance(layout.plane, Swizzled), field, layout,
             "wgmma reads an algebra's numbers in swizzled planes; use layouts.Planes(Swizzled(...), ...)")
        layout = layout.plane
    rule(isinstance(layout, Swizzled), field, layout, "wgmma reads swizzled tiles; use layouts.Swizzled")
    k_axis = 1 if name == "a" else 0
    is_k = layout.axis == k_axis
    major = getattr(operator, f"{name}_major")
    rule((major == "K") == is_k, field, layout, f"the operator reads {name} {major}-major; use "
                                                f"{name}_major={'K' if is_k else 'MN'!r}")
    extents = dict(zip(config.block_shape.names, config.block_shape.extents))
    along = extents["K"] if is_k else extents[across]
    peers = config.cluster.size.N if name == "a" else config.cluster.size.M
    rule(along % layout.line == 0, field, layout, lambda: f"its panels are {layout.line} elements wide, and block_shape="
         f"{config.block_shape!r} must be a multiple of that along {'K' if is_k else across}")
    parts = extents[across] // 8 if is_k else along // layout.line
    rule(parts % peers == 0, "cluster", config.cluster, f"the blocks share {name}: its {along // layout.line} panels of "
         f"{extents[across]} lines cannot be divided in {peers}" if is_k else
         f"the blocks share {name}: its {parts} panels cannot be divided in {peers}")
    most = POSITIONS if isinstance(layout, Sliding) else BOX
    rule(extents[across] // (peers if is_k else 1) <= most, "block_shape", config.block_shape, f"{across} may be {most}")
    thread = getattr(config, f"mem_{name}_thread")
    moved = thread.count * layout.itemsize
    is_line = thread.extents[layout.axis] == thread.count and (16 % moved == 0 or moved % 16 == 0)
    rule(thread.count == 1 or is_line, f"mem_{name}_thread", thread, "a thread moves one element, or a line of 2, 4, 8 "
         "or a multiple of 16 bytes along the shared layout's contiguous axis")


def _validate_d(config: Config) -> None:
    layout = config.shared_d_layout
    is_along = isinstance(layout, Swizzled) and layout.axis in (1, config.global_d_layout.vector_axis)
    rule(is_along, "shared_d_layout", layout, "D is stored from swizzled tiles; use Swizzled(RowMajor(...)), or "
                                              "Swizzled(ColMajor(...)) if D is contiguous along its columns")
    rule(layout.dtype == config.global_d_layout.dtype, "shared_d_layout", layout, f"D is {config.global_d_layout.dtype}")
    if layout.itemsize not in (1, 2, 4, 8):                       # TMA leaves it to the threads: no subtiles
        return
    rule(layout.line >= 8, "shared_d_layout", layout, f"its panels are {layout.line} elements wide, and 4 threads hold 8 "
                                                      "neighbouring columns of a row; use a wider one")
    N = config.block_shape.size.N
    rule(layout.axis == 0 or N % layout.line == 0, "shared_d_layout", layout, f"its panels are {layout.line} elements "
         f"wide, and N={N} of the block must be a multiple of that")


# --------------------------------------------------------------------------------------------------
# What `warp_specialised` is specialised by: a `Spec` with a pipeline, a producer, a mainloop and a store of D.

PINGPONG = "pingpong"
WARP_ROWS, FRAGMENT_ROWS = 16, 64      # of a fragment that a warp holds, and of a fragment
ALIGNMENT = 64                         # bytes that may be left out between parts of shared memory


@dataclass(frozen=True)
class Sm90Spec(Spec):
    """``warps`` are those that multiply, in warpgroups of four (the consumers), beside ``producer_warps``.

    ``schedule`` is "cooperative" (consumers share a tile of D, each its rows) or "pingpong" (each has tiles of its own, in
    turn; ``turns`` orders them at the tensor cores).
    The other fields are the kernel's parts (`gemmkit.kernels.sm90.family` chooses them), and the ``nbytes`` of shared
    memory that they need.
    """

    stages: int
    schedule: str
    producer_warps: int
    mainloop: WgmmaMainloop = SharedMainloop()
    producer: Producer = Producer(4, 1, 0)
    pipeline: Pipeline = Pipeline(2, 0, 1, 1)
    store: TileStore = DirectStore()
    exchange: Exchange = Exchange()
    row_exchange: RowExchange = RowExchange()
    turns: OrderBarrier = OrderBarrier()
    nbytes: int = 0

    # -- warps --------------------------------------------------------------------------------------------------------

    @cached_property
    def threads(self) -> int:
        return 32 * (self.warps + self.producer_warps)

    @cached_property
    def consumers(self) -> int:
        return self.warps // 4

    @cached_property
    def producers(self) -> int:
        """Warpgroups that produce."""
        return self.producer_warps // 4

    @cached_property
    def is_pingpong(self) -> bool:
        return self.schedule == PINGPONG

    @cached_property
    def first_rows(self) -> int:
        """Rows from one consumer's part of the block's tile to the next one's: none where each has tiles of its own."""
        return 0 if self.is_pingpong else self.compute_warp.size.M

    # -- registers ----------------------------------------------------------------------------------------------------

    @cached_property
    def is_squeezed(self) -> bool:
        """Whether accumulators leave a consumer few registers: more than 128 of them."""
        fragment = self.operator.fragment_c
        return self.mainloop.held(self.fragments_m) * fragment.count * fragment.dtype.itemsize // 4 > 128

    @cached_property
    def most_staged(self) -> int:
        """Registers that a producer's thread has for operands on their way."""
        return 16 if self.is_squeezed else 48 if self.threads > 384 else 96

    @cached_property
    def warpgroups(self) -> Warpgroups:
        table = self.producer.squeezed_registers if self.is_squeezed else self.producer.registers
        return Warpgroups(self.producers, self.consumers, *table.get((self.producers, self.consumers), (0, 0)))

    @cached_property
    def sums(self) -> int:
        """Accumulators that a consumer's thread has: of numbers of several parts, each fragment has one a part."""
        return self.fragments_m * self.operator.sums

    @cached_property
    def has_parts(self) -> bool:
        return self.operator.sums > 1

    @cached_property
    def has_epilogue(self) -> bool:
        """Whether anything happens to a value between the sum and D."""
        return bool(self.has_c or not self.epilogue.is_default or not self.d.to_registers.is_identity
                    or not self.d.to_shared.is_identity)

    @cached_property
    def operand_reduction(self) -> OperandReduction:
        return operand_reduction_of(self.a, self.compute_warp.size.M, 128)

    @cached_property
    def together(self) -> Fragments:
        """How a consumer's warps hold D together where the epilogue sees more than an element."""
        return Fragments(self.epilogue.writes, self.d.whole, self.parts[1])

    @property
    def parts(self) -> tuple[int, int]:
        return WARP_ROWS, self.block.size.N // self.d.layout.folds // self.exchange.slices

    def blocks_of_a_row(self, sizes: tuple[int, ...], words: int) -> int:
        """Those of a cluster of 1 x n whose tiles are just a row. Each fragment of a tile has rows of D: a fragment without
        is left out, and its barriers' phases would not be those of the tiles.

        A specialisation that has its exchange keeps to it: `nbytes` has the states in it then, and would count them twice
        for another epilogue of the same kind (`Compiled.reserved`)."""
        if isinstance(self.row_exchange, ClusterRowExchange):
            return self.row_exchange.blocks
        (M, N), n = sizes[:2], self.cluster.n
        is_row = self.cluster.size == n > 1 and (n - 1) * self.parts[1] < N <= n * self.parts[1]
        is_full = -(-M // FRAGMENT_ROWS) % (self.block.size.M // FRAGMENT_ROWS) == 0
        if not (is_row and is_full and type(self.exchange) is Exchange and self.d.layout.folds == 1):
            return 1
        made = self.exchange_of_rows(n, words)
        room = self.nbytes + made.nbytes + made.barrier_bytes + ALIGNMENT
        return n if room <= H100.shared_memory_per_block else 1

    def row_bytes(self, sizes: tuple[int, ...] | None) -> int:
        """Shared memory that the states of rows of D of ``sizes`` take, where an epilogue normalises rows across a
        cluster."""
        last = self.epilogue.stages()[-1]
        if sizes is None or not last.row_words:
            return 0
        blocks = self.blocks_of_a_row(sizes, last.row_words)
        if blocks == 1:
            return 0
        made = self.exchange_of_rows(blocks, last.row_words)
        return made.nbytes + made.barrier_bytes + ALIGNMENT

    def exchange_of_rows(self, blocks: int, words: int) -> ClusterRowExchange:
        return ClusterRowExchange(blocks=blocks, consumers=self.consumers, fragments=self.fragments_m, words=words)

    @cached_property
    def folded_octets(self) -> int:
        """Octets of D's columns in a fragment."""
        return self.parts[1] // OCTET

    # -- shared memory ------------------------------------------------------------------------------------------------

    @property
    def shared_bytes(self) -> int:
        return self.nbytes

    @cached_property
    def stage_bytes(self) -> int:
        """From a stage to the next: A, then B, each where a swizzle's pattern may begin."""
        return self.b.offset + pattern_of(self.b.nbytes)

    @cached_property
    def bytes_per_stage(self) -> int:
        """Shared memory that one more stage takes: its tiles, what the mainloop has beside them, and its barriers."""
        return self.stage_bytes + self.mainloop.bytes_per_stage + self.pipeline.nbytes // self.stages

    @cached_property
    def tma_bytes(self) -> int:
        """What TMA brings a stage."""
        return sum(operand.route.brought_bytes(operand) for operand in (self.a, self.b))


# --------------------------------------------------------------------------------------------------
# The tensor maps of a problem: what TMA is told of A, B, C and D.

NO_MAP = bytes(BYTES)


@dataclasses.dataclass(frozen=True)
class TensorMapSlot:
    """The tensor map of an operand: ``which`` is its place among a, b, c and out, ``ordinal`` that among the kernel's maps;
    ``axis`` is the one along which its elements are contiguous. Of an array that a component holds, ``which`` are the fields
    from the specialisation to it."""

    which: int | tuple[str, ...]
    ordinal: int
    info: ArrayInfo
    axis: int
    spec: TensorMapSpec

    @property
    def maps(self) -> tuple[TensorMapSlot, ...]:
        return (self,)

    @property
    def frozen(self) -> Frozen:
        """The kernel's argument; its bytes are put in at each launch."""
        text = f"TensorMap({self.ordinal})"
        made = kind(text, lambda: Kind(text, lambda: TensorMapType(self.ordinal)))
        return Frozen(made, text, [("tensor_map", NO_MAP)], [])

    @property
    def encoder(self) -> Encoder:
        """From an address to the map's bytes."""
        return Encoder.of(self.spec, self.info, self.axis)


@dataclasses.dataclass(frozen=True)
class Maps:
    """The tensor maps of an operand of several arrays: one argument of the kernel, a tuple."""

    maps: tuple[TensorMapSlot, ...]

    @property
    def frozen(self) -> Frozen:
        parts = [one.frozen for one in self.maps]
        text = f"({', '.join(part.fingerprint for part in parts)})"
        made = kind(text, lambda: Kind(text, lambda: types.Tuple([part.type for part in parts])))
        return Frozen(made, text, [leaf for part in parts for leaf in part.leaves], [])


def maps(spec: Sm90Spec, arrays: OperandArrays) -> tuple[TensorMapSlot | Maps | None, ...]:
    """The maps of A, B, C (or of what comes ahead of time in its place) and D, None for those that TMA does not move."""
    store = spec.store
    found: list[list[Any]] = [
        _of_operand(0, "a", spec.a, arrays.a), _of_operand(1, "b", spec.b, arrays.b),
        [(*_ahead(spec, store, arrays), store.map_of_source)] if isinstance(store, PrefetchedStore) else [],
        [(3, arrays.out, lambda info: store.map_spec(spec.d, info))] if isinstance(store, TmaStore) else [],
    ]
    made: list[TensorMapSlot | Maps | None] = []
    ordinals = count()
    for of_one in found:
        stacks = ((which, whole(info), box_of) for which, info, box_of in of_one if info is not None)
        own = tuple(TensorMapSlot(which, next(ordinals), stack, *box_of(stack)) for which, stack, box_of in stacks)
        made.append(None if not own else own[0] if len(own) == 1 else Maps(own))
    return tuple(made)


def _of_operand(which: int, name: str, operand: Operand, info: ArrayInfo | None) -> list[Any]:
    """(which, array, what makes the box of it) of A or B, and of the arrays behind the operand's own."""
    if not isinstance(operand.route, Tma):
        return []
    others = (((name, *path), array) for path, array in operand.route.other_arrays(operand))
    return [(at, array, lambda array: operand.route.map_spec(operand, array)) for at, array in ((which, info), *others)]


def _ahead(spec: Sm90Spec, store: PrefetchedStore, arrays: OperandArrays) -> tuple[Any, ArrayInfo | None]:
    """What comes ahead of time, as a map's ``which``, and its array."""
    path = store.source.array
    if path is None:
        return 2, arrays.c
    return path, describe(at_path(spec, path))


#: In the order in which they are preferred, and what fills the stages where a route is the last of the two by this order.
ROUTES: dict[Any, Any] = {Tma: TmaProducer, JoinedTma: TmaProducer,
    PlacedTma: TmaProducer, InterleavedTma: TmaProducer, QuantisedTma: TmaProducer, PartRewrite: RewriteProducer,
    Rewrite: RewriteProducer, Transpose: RewriteProducer, Deinterleave: DeinterleaveProducer, CpAsyncLines: CpAsyncProducer,
    StagedRoute: StagedProducer}
WIDEST = 128                           # bytes of a swizzle's lines
REGISTER_THREADS = 384                 # of a block with A in registers: with more, wgmmas wait for each other


class Sm90(KernelFamily):
    """Persistent blocks with a producer and consumers."""

    is_dependent = streams_k = True
    joins_transforms = True            # tensor cores read shared memory themselves

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: OperandArrays | None) -> Sm90Spec:
        m, n = config.cluster.extents
        sharing = SharedK(config.splits, config.cluster)
        cluster = Cluster(m, n, sharing.in_cluster)
        scheduler: TileScheduler = Persistent(
            order_of(config, cluster), config.block_shape, cluster, sharing.reduction)
        if isinstance(config.splits, StreamK):
            scheduler = streamed_clusters(scheduler, config.splits, arrays)
        spec = Sm90Spec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, *operands,
                        config.epilogue, config.condition, scheduler, config.has_c, config.stages, config.schedule,
                        config.producer_warps)
        return specialise(spec, sharing, arrays)

    def is_specialised(self, spec: Any, config: Config, arrays: OperandArrays) -> bool:
        """Of plain operands and a D that TMA moves, unless C or the epilogue reads ahead, or blocks share K by a workspace:
        nothing but that TMA takes them depends on the arrays."""
        a, b, out = arrays.a, arrays.b, arrays.out
        return (type(spec.store) is TmaStore and type(spec.a.route) is type(spec.b.route) is Tma
                and type(config.splits) is int and type(spec.exchange) in (Exchange, ClusterExchange)
                and arrays.products is None and not config.has_c and config.epilogue.is_default
                and a is not None and b is not None and out is not None
                and isinstance(config.global_a_layout, Plain) and isinstance(config.global_b_layout, Plain)
                and why_not(a, config.global_a_layout.axis) is None and why_not(b, config.global_b_layout.axis) is None
                and refuses_tma(spec, out) is None
                and all(x.route.suits(x, arrays.extents(name)) for name, x in (("a", spec.a), ("b", spec.b))))

    def in_cluster(self, splits: int | StreamK, cluster: Tile) -> int:
        return SharedK(splits, cluster).in_cluster

    def maps(self, spec: Any, arrays: OperandArrays) -> tuple[Any, ...]:
        return maps(spec, arrays)

    def registers(self, spec: Any) -> tuple[int, ...] | None:
        assert isinstance(spec, Sm90Spec)
        return spec.warpgroups.warp_registers


# -- the parts for a problem ------------------------------------------------------------------------------------------

def specialise(spec: Sm90Spec, sharing: SharedK, arrays: OperandArrays | None = None) -> Sm90Spec:
    """``spec`` with all its parts. Without ``arrays`` these are what suits TMA, and shared memory is the most."""
    b = dataclasses.replace(spec.b, offset=pattern_of(spec.a.nbytes))
    spec = dataclasses.replace(spec, b=b, mainloop=_mainloop(spec))
    requests = (Request(spec, spec.a, arrays.a if arrays else None, arrays.extents("a") if arrays else (0, 0)),
                Request(spec, spec.b, arrays.b if arrays else None, arrays.extents("b") if arrays else (0, 0)))
    dequantised = _with_a_dequantised(spec, *requests)
    is_float8 = isinstance(spec.a.layout, QuantisedTranspose) and spec.a.layout.dtype.itemsize == 1
    rule(dequantised is not None or not is_float8, "dtype", str(spec.a.layout.dtype), FLOAT8_WEIGHTS)
    spec = (dequantised or _with_a_deinterleaved(spec, *requests)
            or _with_mn_major_a(spec, *requests) or _with_a_transformed(_with_routes(spec, *requests)))
    if arrays is not None:
        a, b = (operand if operand.route.uses_tma else clipped(operand, info, spec.operator.identity)
                for operand, info in ((spec.a, arrays.a), (spec.b, arrays.b)))
        spec = dataclasses.replace(spec, a=a, b=b)
    for name, operand in (("a", spec.a), ("b", spec.b)):
        rule(not isinstance(operand.shared, Sliding) or isinstance(operand.route, PlacedTma), f"shared_{name}_layout",
             operand.shared, "TMA must bring its panels: the taps of a convolution along its fastest dimension")
    spec = _with_producer(spec)
    return _laid_out(dataclasses.replace(spec, exchange=_exchange(spec, sharing, arrays)), arrays)


def _mainloop(spec: Sm90Spec) -> WgmmaMainloop:
    if spec.a.observer is not None:
        return ObservedMainloop()
    return mainloop_of(spec.operator, spec.block, spec.compute_warp)


def mainloop_of(operator: Any, block: Tile, warp: Tile) -> WgmmaMainloop:
    """That of plain operands in shared memory: sums are added to a total in portions, of two stages in turn where there are
    registers for them. (Numbers of several parts have no mainloop for one.)"""
    base = units(operator)
    if not base.promote:
        return SharedMainloop()
    if base.is_scaled:
        return ScaledMainloop(block.size.M, base.N // base.width)
    if base.promote > block.size.K:
        return PromotedMainloop(base.promote // block.size.K)
    pairs = PairMainloop.sets * (warp.size.M // 64) * base.N // 2 <= ACCUMULATORS or base is not operator
    return PairMainloop() if pairs else AlternatingMainloop()


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


def _with_a_dequantised(spec: Sm90Spec, a: Request, b: Request) -> Sm90Spec | None:
    """Packed weights as A, which consumers dequantise; None where they cannot."""
    tile = quantised_tile(spec) if isinstance(spec.a.layout, QuantisedTranspose) else None
    if tile is None:
        return None
    of_a = dataclasses.replace(a, operand=dataclasses.replace(spec.a, shared=tile))
    if QuantisedTma.refuses(of_a) or Tma.refuses(b):
        return None
    of_b = dataclasses.replace(b, operand=dataclasses.replace(spec.b, offset=pattern_of(of_a.operand.nbytes)))
    return dataclasses.replace(spec, a=_sent(of_a, QuantisedTma), b=_sent(of_b, Tma), mainloop=DequantisingMainloop.of(spec))


def _with_a_deinterleaved(spec: Sm90Spec, a: Request, b: Request) -> Sm90Spec | None:
    """Numbers of two parts of which consumers tell A's apart; None where they cannot."""
    promoted = not isinstance(spec.mainloop, SharedMainloop)
    if (not _permutable(spec.a, spec.b) or promoted or spec.threads > REGISTER_THREADS
            or any(Deinterleave.refuses(request) for request in (a, b))):
        return None
    of_a = dataclasses.replace(a, operand=in_panels(spec.a))
    of_b = dataclasses.replace(b, operand=permuted_along_k(spec.b))
    steps = spec.block.size.K // spec.operator.shape[2]
    chosen = dataclasses.replace(spec, a=_sent(of_a, Tma), b=_sent(of_b, Deinterleave),
                                 mainloop=RegisterMainloop(Deinterleaved(), steps))
    return chosen if _fits(chosen) else None


def _permutable(a: Operand, b: Operand) -> bool:
    """Whether consumers can tell A's numbers apart, with B permuted: two parts of 16 bits, A along K and untouched."""
    return bool(a.plane.axis == 1 and a.to_shared.is_identity
                and all(x.planes == 2 and x.plane.itemsize == 2 and x.same_dtype for x in (a, b)))


def _with_mn_major_a(spec: Sm90Spec, a: Request, b: Request) -> Sm90Spec | None:
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
    return dataclasses.replace(spec, a=_sent(of_a, Tma), b=_sent(b, route), mainloop=RegisterMainloop(MnMajorTf32(4), steps))


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


def _laid_out(spec: Sm90Spec, arrays: OperandArrays | None) -> Sm90Spec:
    """Shared memory and named barriers: stages, subtiles of D, exchanged sums, barriers."""
    memory, barriers = SharedMemory(), NamedBarriers()
    memory.take(spec.stages * spec.stage_bytes, PATTERN)
    store = store_for(spec, arrays.out if arrays else None, arrays.extents("out") if arrays else (0, 0),
                     barriers.take(spec.consumers))
    if isinstance(store, SubtileStore):
        store = dataclasses.replace(store, offset=memory.take(store.nbytes))
    spec = dataclasses.replace(spec, store=store)
    if arrays is not None and (spec.has_c or spec.epilogue.alongside()):
        spec = with_ahead(spec, arrays)
    if isinstance(spec.mainloop, ScaledMainloop):
        scales = memory.take(spec.stages * spec.mainloop.bytes_per_stage, 16)
        spec = dataclasses.replace(spec, mainloop=dataclasses.replace(spec.mainloop, offset=scales))
    producer = dataclasses.replace(spec.producer, barrier=barriers.take(spec.producer.barriers))
    turns = OrderBarrier(2, barriers.take(2), True) if spec.is_pingpong else OrderBarrier()
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


def _exchange(spec: Sm90Spec, sharing: SharedK, arrays: OperandArrays | None) -> Exchange:
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
    full_arrivals = spec.producer.full_arrivals + 32 * spec.mainloop.copies_scales
    pipeline = Pipeline(spec.stages, 0, full_arrivals, empty_arrivals, spec.producer.rewrites, readers,
                        spec.cluster)
    return dataclasses.replace(pipeline, offset=memory.take(pipeline.nbytes))


FAMILY = Sm90("warp_specialised", warp_specialised, (9, 0))
