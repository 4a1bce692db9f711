"""Step 1 of `warp_specialised`: producer warps fill the pipeline's stages with tiles of A and B.

The routes of A and B decide together which producer it is; each stands in the file of the route that asks for it.

| producer | threads | work on a stage |
|---|---|---|
| `TmaProducer` | one | starts TMA copies |
| `StagedProducer` | teams of warps, in turn | load, wait for the stage, store |
| `CpAsyncProducer` | all | start cp.async copies |
| `RewriteProducer` | teams of warps, in turn | TMA copies start; a turn later the team rewrites the stage before |
| `DeinterleaveProducer` | all | TMA copies start some stages ahead; half of the warps or all split numbers into planes |
"""

from __future__ import annotations

from typing import Any

from gemmkit.component_products import of_part, of_product
from gemmkit.components import Component
from gemmkit.kernels.common.k_tiles import first_k_tile, following_k_tile
from gemmkit.kernels.common.work import Input, Inputs, KTile, Place, Slot, Work
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.cluster import cluster_rank
from gemmkit.ptx.flags import fence_async_global
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import thread_index, udiv, uniform

Registers = dict[tuple[int, int], tuple[int, int]]

# Registers of a producer's and a consumer's thread, by the numbers of their warpgroups (setmaxnreg). A producer that runs
# layouts and transforms needs more than one that starts copies; beside two consumers it keeps the 168 of the launch.
STARTING: Registers = {(1, 2): (24, 240), (1, 3): (32, 160), (2, 2): (40, 208)}
STREAMING: Registers = {**STARTING, (1, 2): (40, 232)}          # where it also finds its parts of a stream of k-tiles
WORKING: Registers = {(1, 3): (56, 152), (2, 2): (88, 168)}
SQUEEZED: Registers = {(1, 2): (56, 224)}        # beside consumers with more than 128 registers of accumulators


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

    def team(self) -> int:
        """This thread's team."""
        return udiv(uniform(udiv(thread_index(), 32)), self.warps)

    def begin(self, spec: Any, inputs: Inputs, work: Work, kept: Any) -> None:
        """Before the first k-tile of a tile of D."""

    def fill(self, spec: Any, inputs: Inputs, slot: Slot, at: KTile, kept: Any, state: Any) -> Any:
        """Fill one stage; returns the state that the next one gets. ``kept`` are arrays of registers, which stay."""
        return state

    def finish(self, spec: Any, state: Any, shape: Any) -> None:
        """After the last stage."""


def fill_stages(spec: Any, inputs: Inputs, rank: int, shape: Any, kept: Any, state: Any) -> None:
    """For every tile of D (or part of one), for every k-tile: the team whose turn it is fills the next stage."""
    zero = thread_index() * 0
    slot = Slot(zero, zero + 1)                        # a fresh pipeline is empty: the first round waits for no consumer
    turn, team, opened = zero, spec.producer.team(), zero - 1
    at, end, step = spec.scheduler.begin(), spec.scheduler.end(shape), spec.scheduler.step()
    while at < end:
        here = of_part(spec, at)
        work = here.scheduler.work(here, here.scheduler.tile_of(at), rank, shape)
        if spec.scheduler.order.gates:                 # operands arrive while the kernel runs
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
            turn = (turn + 1) % spec.producer.teams
            slot = spec.pipeline.advance(slot)
            tile = following_k_tile(spec, work, tile)
        at = spec.scheduler.following(at, step)
    spec.producer.finish(spec, state, shape)


def rank_of(spec: Any) -> int:
    """The block's place in its cluster."""
    return thread_index() * 0 if spec.cluster.is_single else cluster_rank()


def inputs_of(spec: Any, inputs: Inputs, batch: int) -> Inputs:
    """The operands of one product of a stack. (A tensor map is of the whole stack.)"""
    stack = spec.scheduler.stack
    return Inputs(Input(stack.a.matrix(inputs.a.data, batch), inputs.a.map),
                  Input(stack.b.matrix(inputs.b.data, batch), inputs.b.map))


def start_copies(spec: Any, inputs: Inputs, barrier: Any, slot: Slot, at: KTile) -> None:
    """TMA's copies of a stage; ``barrier`` completes when their bytes are there."""
    spec.a.route.start(spec, spec.a, inputs.a.map, barrier, slot, at)
    spec.b.route.start(spec, spec.b, inputs.b.map, barrier, slot, at)


def acquire(spec: Any, inputs: Inputs, slot: Slot, at: KTile) -> None:
    """Wait until the stage is empty; a team's first thread starts the copies of an operand that TMA moves."""
    spec.pipeline.acquire(slot)
    if spec.producer.tma_bytes > 0 and thread_index() % (32 * spec.producer.warps) == 0:
        spec.pipeline.expect(slot, spec.producer.tma_bytes)
        start_copies(spec, inputs, spec.pipeline.full(), slot, at)


def stage_of(spec: Any, operand: Any, slot: Slot) -> Any:
    """Where an operand's tile of a stage begins in shared memory."""
    return shared(operand.shared.dtype, slot.stage * spec.stage_bytes + operand.offset)


def place_of(operand: Any, at: KTile) -> Place:
    """Where an operand's tile of a stage begins in A or B, and where the matrix ends."""
    return operand.place(at.m, at.n, at.k, at.shape)
