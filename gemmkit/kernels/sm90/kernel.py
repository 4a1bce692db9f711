"""Steps 2 and 3 of `warp_specialised`: the consumers' schedules over the tiles of D."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmkit.components import Component
from gemmkit.kernels.collectives.scheduler import (
    Input,
    Inputs,
    KTile,
    Outputs,
    Slot,
    TileCoord,
    Work,
    first_k_tile,
    following_k_tile,
    k_steps,
)
from gemmkit.kernels.sm90.mainloop import numbers_of_parts
from gemmkit.kernels.sm90.store import ConsumerPart
from gemmkit.lang.component_products import StackShape, of_part, of_product
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import SharedPointer, View
from gemmkit.ptx.barriers import cluster_barrier, cluster_rank, fence_async_global, mbarrier_fence_init
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_prefetch
from gemmkit.ptx.wgmma import grid_launch_dependents, grid_wait

if TYPE_CHECKING:
    from gemmkit.emulator.copies import EmulatedTensorMap
    from gemmkit.kernels.collectives.operand import Operand
    from gemmkit.kernels.sm90.family import Sm90Spec


def consume_cooperatively(spec: Sm90Spec, outputs: Outputs, group: int, rank: int) -> None:
    """Cooperative: every consumer computes its rows of every tile, or of every part of one that is the block's."""
    turn = thread_index() * 0
    slot = Slot(turn, turn)
    at, end, step = spec.scheduler.begin(), spec.scheduler.end(outputs.shape), spec.scheduler.step()
    opened = turn - 1
    while at < end:
        here = of_part(spec, at)
        work = here.scheduler.work(here, here.scheduler.tile_of(at), rank, outputs.shape)
        opened = await_arrivals(spec, here.scheduler.tile_of(at), opened)
        own, matrices = of_product(here, work.batch), outputs_of(spec, outputs, work.batch)
        if spec.exchange.finishes(here):
            first = work.n + spec.exchange.slice(spec, rank) * spec.exchange.columns
            if spec.scheduler.order.is_open(here.scheduler.tile_of(at), opened):
                spec.store.begin(spec, outputs.map_c, work.batch,
                                 ConsumerPart(group, work.m + group * spec.first_rows, first, turn))
        sums, slot = multiply_tile(own, group, slot, k_steps(here, work), work, matrices.shape)
        if spec.scheduler.order.of_sums:
            opened = begin_late(spec, here.scheduler.tile_of(at), opened, outputs, work,
                                ConsumerPart(group, work.m + group * spec.first_rows, work.n, turn))
        if spec.exchange.store_partials(sums, here, group, rank, turn):
            mine = spec.exchange.collect(sums, here, group, rank, turn)
            column = work.n + spec.exchange.slice(spec, rank) * spec.exchange.columns
            spec.store.run(own, mine, matrices, ConsumerPart(group, work.m + group * spec.first_rows, column, turn))
            turn = turn ^ 1                            # of the tiles that this block finishes
        at = spec.scheduler.following(at, step)
    spec.store.finish()


def consume_ping_pong(spec: Sm90Spec, outputs: Outputs, group: int, rank: int) -> None:
    """Ping-pong: every other tile (or part of one) is this consumer's. While it finishes one, the other multiplies the next.

    The order barrier is needed, and not only for speed: a consumer two rounds ahead would take the parity of an old phase
    for that of the one it waits for.
    """
    turn = thread_index() * 0
    own_turn = turn                                    # flips with every tile that this consumer finishes
    slot = Slot(turn, turn)
    at, end, step = spec.scheduler.begin(), spec.scheduler.end(outputs.shape), spec.scheduler.step()
    opened = turn - 1
    spec.turns.give_first(group)
    while at < end:
        here = of_part(spec, at)
        work = here.scheduler.work(here, here.scheduler.tile_of(at), rank, outputs.shape)
        steps = k_steps(here, work)
        if turn == group:
            opened = await_arrivals(spec, here.scheduler.tile_of(at), opened)
            if spec.exchange.finishes(here):
                if spec.scheduler.order.is_open(here.scheduler.tile_of(at), opened):
                    spec.store.begin(spec, outputs.map_c, work.batch, ConsumerPart(group, work.m, work.n, own_turn))
            spec.turns.wait(group)
            own, matrices = of_product(here, work.batch), outputs_of(spec, outputs, work.batch)
            sums, slot = multiply_tile(own, group, slot, steps, work, matrices.shape)
            spec.turns.give(1 - group)
            if spec.scheduler.order.of_sums:
                opened = begin_late(spec, here.scheduler.tile_of(at), opened, outputs, work,
                                    ConsumerPart(group, work.m, work.n, own_turn))
            if spec.exchange.store_partials(sums, here, group, rank, own_turn):
                mine = spec.exchange.collect(sums, here, group, rank, own_turn)
                spec.store.run(own, mine, matrices, ConsumerPart(group, work.m, work.n, own_turn))
                own_turn = own_turn ^ 1
        else:
            slot = spec.pipeline.skip(slot, steps)
        turn = turn ^ 1
        at = spec.scheduler.following(at, step)
    spec.store.finish()


def await_arrivals(spec: Sm90Spec, tile: int, opened: int) -> int:
    """Where operands arrive while the kernel runs, and the store fetches an array ahead of time: TMA's thread waits for
    that array as the producer's does for A."""
    if spec.scheduler.order.gates and spec.store.reads_ahead and not spec.scheduler.order.of_sums:
        opened = await_tile(spec, tile, opened)
    return opened


def await_tile(spec: Sm90Spec, tile: int, opened: int) -> int:
    if thread_index() % 128 == 0:
        waited = spec.scheduler.order.await_tile(tile, opened)
        if waited != opened:
            fence_async_global()
        opened = waited
    return opened


def begin_late(spec: Sm90Spec, tile: int, opened: int, outputs: Outputs, work: Work, part: ConsumerPart) -> int:
    """The first tile of a chunk of sums is multiplied before the store waits for them. (Only TMA's thread knows what is
    open, and only it begins.)"""
    if spec.store.reads_ahead:
        if not spec.scheduler.order.is_open(tile, opened):
            opened = await_tile(spec, tile, opened)
            spec.store.begin(spec, outputs.map_c, work.batch, part)
    return opened


def outputs_of(spec: Sm90Spec, outputs: Outputs, batch: int) -> Outputs:
    """C, D and the sizes of one product of a stack. (A tensor map is of the whole stack.)"""
    stack = spec.scheduler.stack
    return Outputs(stack.c.matrix(outputs.c, batch), stack.d.matrix(outputs.d, batch), outputs.map_c, outputs.map_d, batch,
                   of_product(outputs.shape, batch))


def multiply_tile(spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
    """The sums of a consumer's fragments, and the slot after ``steps`` stages."""
    sums, slot = spec.mainloop.run(spec, group, slot, steps, work, shape)
    if spec.has_parts:
        return numbers_of_parts(sums, spec), slot
    return sums, slot


# --------------------------------------------------------------------------------------------------
# Step 1 of `warp_specialised`: producer warps fill the pipeline's stages with tiles of A and B.
#
# The routes of A and B decide together which producer it is; each stands in the file of the route that asks for it.
#
# | producer | threads | work on a stage |
# |---|---|---|
# | `TmaProducer` | one | starts TMA copies |
# | `StagedProducer` | teams of warps, in turn | load, wait for the stage, store |
# | `CpAsyncProducer` | all | start cp.async copies |
# | `RewriteProducer` | teams of warps, in turn | TMA copies start; a turn later the team rewrites the stage before |
# | `DeinterleaveProducer` | all | TMA copies start some stages ahead; half of the warps or all split numbers into planes |

Registers = dict[tuple[int, int], tuple[int, int]]

# Registers of a producer's and a consumer's thread, by the numbers of their warpgroups (setmaxnreg). A producer that runs
# layouts and transforms needs more than one that starts copies; beside two consumers it keeps the 168 of the launch.
STARTING: Registers = {(1, 2): (24, 240), (1, 3): (32, 160), (2, 2): (40, 208)}
STREAMING: Registers = {**STARTING, (1, 2): (40, 232)}          # where it also finds its parts of a stream of k-tiles
WORKING: Registers = {(1, 3): (56, 152), (2, 2): (88, 168)}
SQUEEZED: Registers = {(1, 2): (56, 224)}        # beside consumers with more than 128 registers of accumulators
COPYING: Registers = {**STARTING, **SQUEEZED}    # where warps copy scales


@dataclass(frozen=True)
class Producer(Component):
    """What producer warps do with a stage. ``teams`` teams of ``warps`` warps take turns at the stages.

    ``tma_bytes`` is what TMA brings a stage. ``barrier`` is the first of the named barriers at which a team meets.
    """

    warps: int
    teams: int
    tma_bytes: int
    barrier: int = 0

    rewrites = False                   # threads rewrite what TMA has brought: ``raw`` stands before ``full``
    reader_fences = False              # the consumers fence, since copies are still on their way when threads arrive
    barriers = 0                       # named barriers that it needs

    @property
    def registers(self) -> Registers:
        return WORKING

    @property
    def squeezed_registers(self) -> Registers:
        """The same beside consumers that are short of registers."""
        return SQUEEZED

    @property
    def full_arrivals(self) -> int:
        """TMA's thread, which expects the bytes (on ``raw`` if threads rewrite them), and the threads that write."""
        return (self.tma_bytes > 0 and not self.rewrites) + 32 * self.warps

    def run(self, spec: Any, inputs: Inputs, rank: int, shape: Any) -> None:
        """Fill the stages of all tiles of D that are this block's."""
        fill_stages(spec, inputs, rank, shape, (), ())

    @property
    def copiers(self) -> int:
        """Warps of a team that copy scales (`ScaledMainloop`)."""
        return self.warps

    def team(self) -> int:
        """This thread's team."""
        return udiv(uniform(udiv(thread_index(), 32)), self.warps)

    def begin(self, spec: Sm90Spec, inputs: Inputs, work: Work, kept: Registers) -> None:
        """Before the first k-tile of a tile of D."""

    def fill(self, spec: Sm90Spec, inputs: Inputs, slot: Slot, at: KTile, kept: Registers, state: Any) -> Any:
        """Fill one stage; returns the state that the next one gets. ``kept`` are arrays of registers, which stay."""
        return state

    def finish(self, spec: Sm90Spec, state: Any, shape: StackShape) -> None:
        """After the last stage."""


@dataclass(frozen=True)
class TmaProducer(Producer):
    """TMA moves both operands: one thread does it all. ``streams``: it also finds its parts of a stream of k-tiles, or makes
    lists of them, and needs registers for it. ``is_team``: other warps copy scales."""

    streams: bool = False
    is_team: bool = False

    @property
    def registers(self) -> Registers:
        return COPYING if self.is_team else STREAMING if self.streams else STARTING

    @property
    def squeezed_registers(self) -> Registers:
        return self.registers

    full_arrivals = 1

    @property
    def copiers(self) -> int:
        return self.warps - 1

    @classmethod
    def of(cls, spec: Sm90Spec) -> TmaProducer:
        return cls(spec.producer_warps, 1, spec.tma_bytes, streams=spec.scheduler.stays or not spec.condition.is_always,
                   is_team=spec.mainloop.copies_scales)

    def run(self, spec: Sm90Spec, inputs: Inputs, rank: int, shape: StackShape) -> None:
        if thread_index() == 0 or (self.is_team and thread_index() >= 32):
            fill_stages(spec, inputs, rank, shape, (), ())

    def team(self) -> int:
        return thread_index() * 0

    def fill(self, spec: Sm90Spec, inputs: Inputs, slot: Slot, at: KTile, kept: Registers, state: Any) -> Any:
        """TMA tells ``full`` itself when the bytes are there."""
        if not self.is_team or thread_index() == 0:
            spec.pipeline.acquire(slot)
            spec.pipeline.expect(slot, self.tma_bytes)
            start_copies(spec, inputs, spec.pipeline.full(), slot, at)
        return state


def fill_stages(spec: Sm90Spec, inputs: Inputs, rank: int, shape: StackShape, kept: Any, state: Any) -> None:
    """For every tile of D (or part of one), for every k-tile: the team whose turn it is fills the next stage."""
    zero = thread_index() * 0
    slot = Slot(zero, zero + 1)                        # a fresh pipeline is empty: the first round waits for no consumer
    turn, team, opened = zero, spec.producer.team(), zero - 1
    at, end, step = spec.scheduler.begin(), spec.scheduler.end(shape), spec.scheduler.step()
    while at < end:
        here = of_part(spec, at)
        work = here.scheduler.work(here, here.scheduler.tile_of(at), rank, shape)
        if spec.scheduler.order.gates and not (spec.scheduler.order.of_sums and spec.store.reads_ahead):
            waited = spec.scheduler.order.await_tile(here.scheduler.tile_of(at), opened)
            if waited != opened:
                fence_async_global()
            opened = waited
        own, sizes = of_product(here, work.batch), of_product(shape, work.batch)
        matrices = inputs_of(spec, inputs, work.batch)
        spec.producer.begin(own, matrices, work, kept)
        tile = first_k_tile(spec, work)
        while tile.block < work.k_tiles:
            k = work.k_begin + tile.block * spec.block.size.K
            if turn == team:
                place = KTile(work.m, work.n, k, work.batch, rank, sizes)
                state = spec.producer.fill(own, matrices, slot, place, kept, state)
                if spec.mainloop.copies_scales and copies(spec, slot):
                    spec.mainloop.start_copies(spec, slot, place)
            turn = (turn + 1) % spec.producer.teams
            slot = spec.pipeline.advance(slot)
            tile = following_k_tile(spec, work, tile)
        at = spec.scheduler.following(at, step)
    spec.producer.finish(spec, state, shape)


def copies(spec: Sm90Spec, slot: Slot) -> bool:
    """Whether this thread's warp copies the scales of a stage: warps take turns, and TMA's has enough to do."""
    is_free = spec.producer.copiers == spec.producer.warps or thread_index() >= 32
    return is_free and udiv(thread_index(), 32) % spec.producer.copiers == slot.stage % spec.producer.copiers


def rank_of(spec: Sm90Spec) -> int:
    """The block's place in its cluster."""
    return thread_index() * 0 if spec.cluster.is_single else cluster_rank()


def inputs_of(spec: Sm90Spec, inputs: Inputs, batch: int) -> Inputs:
    """The operands of one product of a stack. (A tensor map is of the whole stack.)"""
    stack = spec.scheduler.stack
    return Inputs(Input(stack.a.matrix(inputs.a.data, batch), inputs.a.map),
                  Input(stack.b.matrix(inputs.b.data, batch), inputs.b.map))


def start_copies(spec: Sm90Spec, inputs: Inputs, barrier: SharedPointer, slot: Slot, at: KTile) -> None:
    """TMA's copies of a stage; ``barrier`` completes when their bytes are there."""
    spec.a.route.start(spec, spec.a, inputs.a.map, barrier, slot, at)
    spec.b.route.start(spec, spec.b, inputs.b.map, barrier, slot, at)


def acquire(spec: Sm90Spec, inputs: Inputs, slot: Slot, at: KTile) -> None:
    """Wait until the stage is empty; a team's first thread starts the copies of an operand that TMA moves."""
    spec.pipeline.acquire(slot)
    if spec.producer.tma_bytes > 0 and thread_index() % (32 * spec.producer.warps) == 0:
        spec.pipeline.expect(slot, spec.producer.tma_bytes)
        start_copies(spec, inputs, spec.pipeline.full(), slot, at)


def stage_of(spec: Sm90Spec, operand: Operand, slot: Slot) -> Any:
    """Where an operand's tile of a stage begins in shared memory."""
    return shared(operand.shared.dtype, slot.stage * spec.stage_bytes + operand.offset)


def matrix_at(spec: Sm90Spec, operand: Operand, batch: int) -> tuple:
    """Where a product's matrix of A or B lies in a stack: its coordinates behind those of rows, columns and planes."""
    if operand.k_axis == 1:
        return spec.scheduler.stack.a.coordinates(batch)
    return spec.scheduler.stack.b.coordinates(batch)


def place_of(operand: Operand, at: KTile) -> TileCoord:
    """Where an operand's tile of a stage begins in A or B, and where the matrix ends."""
    return operand.place(at.m, at.n, at.k, at.shape)


# --------------------------------------------------------------------------------------------------
# The template kernel for Hopper: warps with roles around a ring of stages in shared memory.
#
# Blocks stay on their multiprocessors and take one tile of D after the other. In each, warpgroups have roles:
#
# | role | warps | waits for | signals |
# |---|---|---|---|
# | producer | the first warpgroup (or two) | ``empty[stage]`` | ``full[stage]`` |
# | consumer, multiplying | the other warpgroups | ``full[stage]`` | ``empty[stage]`` |
# | consumer, finishing | the same | its subtile of shared memory | TMA |
#
# The producer fills a stage with tiles of A and B, each by its route: by TMA, which one thread starts; or, for an operand
# in a layout of the user's, or lying where TMA cannot reach, with the code of the component. What is transformed comes by
# TMA, too, where it can, and the producer's warps rewrite it in place (``raw[stage]`` stands between). Consumers multiply
# a stage (wgmma) and keep the sums in registers; at the end of a tile they finish it (C, transforms, epilogue) and store
# D by way of swizzled shared memory and TMA.
#
# A *cooperative* schedule has all consumers work on one tile, each on its rows. With *ping-pong* each has a tile of its
# own, and while one multiplies the other finishes: they take turns at the tensor cores, which an order barrier sees to.
# In a cluster, blocks with the same rows (or columns) share A (or B): each loads a part for all. Or they share the K of a
# tile, and `exchange` their sums. Clusters that share operands can share K with other clusters: their sums meet in global
# memory (`WorkspaceExchange`).
#
# | step | what | where |
# |---|---|---|
# | 0 | barriers, registers | here |
# | 1 | A, B: global -> shared, with their transforms | `producer`, `routes` |
# | 2 | multiply and accumulate | `consumer`, `mainloop`, `fragments` |
# | 3 | C, transforms of C and D, epilogue; D: registers -> shared -> global | `store` |
#
# Transforms of A and B between shared memory and registers stand before shared memory here, behind those on the way to it
# (`Config.transforms_of`): tensor cores read shared memory themselves. A that comes from registers is transformed there.

def warp_specialised(spec: Sm90Spec, a: View, b: View, c: View, d: View, shape: StackShape, map_a: EmulatedTensorMap,
                     map_b: EmulatedTensorMap, map_c: EmulatedTensorMap, map_d: EmulatedTensorMap) -> None:
    """D = A B + C; see the module's table. Launched with ``spec.threads`` threads, in clusters of ``spec.cluster.size``."""
    # 0. Barriers, before any thread waits on one; then what the previous kernel wrote may be read.
    group = uniform(udiv(thread_index(), 128))
    rank = rank_of(spec)
    if thread_index() == 0:
        spec.pipeline.initialise()
        spec.exchange.initialise(spec.cluster.splits)
        spec.store.initialise()
        spec.row_exchange.initialise()
        mbarrier_fence_init()
        spec.a.route.prefetch(map_a)
        spec.b.route.prefetch(map_b)
        if spec.store.reads_ahead:
            tma_prefetch(map_c)
        if spec.store.uses_tma:
            tma_prefetch(map_d)
    spec.a.route.clear(spec, spec.a)
    spec.b.route.clear(spec, spec.b)
    if spec.cluster.is_single:
        barrier()
    else:
        cluster_barrier()
    grid_launch_dependents()
    grid_wait()

    if group < spec.producers:
        # 1. A and B: global -> shared.
        spec.warpgroups.release_registers()
        spec.producer.run(spec, Inputs(Input(a, map_a), Input(b, map_b)), rank, shape)
    else:
        # 2. and 3. Multiply, finish.
        spec.warpgroups.claim_registers()
        if spec.is_pingpong:
            consume_ping_pong(spec, Outputs(c, d, map_c, map_d, 0, shape), group - spec.producers, rank)
        else:
            consume_cooperatively(spec, Outputs(c, d, map_c, map_d, 0, shape), group - spec.producers, rank)

    # A block's shared memory must last until its peers have read and signalled all they will.
    if not spec.cluster.is_single:
        cluster_barrier()
