"""The family of `multistage`: rings of stages, for GPUs from sm_75 on and any operator that acts in warps."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import Operand, OperandArrays, clipped_inputs, stored_by_neighbours, transform_input
from gemmkit.kernels.collectives.pipeline import ALIGNMENT
from gemmkit.kernels.collectives.scheduler import (
    Cluster,
    Input,
    Inputs,
    KTile,
    OneTilePerBlock,
    TileCoord,
    TileScheduler,
    Work,
    holds,
    k_steps,
)
from gemmkit.kernels.collectives.split_k import StreamK, most_blocks, reduction_of, streamed
from gemmkit.kernels.simt import (
    SimtSpec,
    load_c,
    start_from_nothing,
    store_d,
    validate_lines,
    validate_tiles,
    validate_transforms,
)
from gemmkit.kernels.sm80 import routes
from gemmkit.kernels.sm80.routes import ANYWHERE, AT_EDGES, COPIES, INSIDE, AsyncCopies, Copies, Reach, copies_of
from gemmkit.kernels.spec import KernelFamily, order_of, rule
from gemmkit.lang.component_products import StackShape, of_part, of_product
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import View
from gemmkit.lang.registers import Fragment, fold, registers
from gemmkit.operators import FPUOp
from gemmkit.operators.base import units
from gemmkit.ptx.memory import pack_narrow, shared, unpack_narrow
from gemmkit.ptx.registers import opaque, pinned, shared_place
from gemmkit.ptx.special import barrier, carried, rolled, thread_index, udiv, uniform
from gemmkit.tiling import Tile, parallelise, translate, translate_offset

if TYPE_CHECKING:
    from gemmkit.kernels.config import Config


# --------------------------------------------------------------------------------------------------
# The multistage kernel: a ring of stages in shared memory that is filled while the block multiplies, from sm_80 on by
# cp.async.
#
# Every thread block computes one tile of D, or, where its scheduler stays (`stream_k`), parts of tiles, one after the
# other. Its threads start the copies of the k-tile that is ``stages - 1`` ahead, then multiply the present one, so that
# loads from global memory have ``stages - 1`` k-tiles of arithmetic to hide behind. There are no producer warps and no
# mbarriers: a thread waits for its own groups of copies, and the block meets once a k-tile.
#
# | step | what | transform |
# |---|---|---|
# | 1 | C: global -> shared | transform_global_to_shared_c |
# | 2 | C: shared -> registers | transform_shared_to_regs_c |
# | 3a | A, B: global -> a stage, by each operand's route | transform_global_to_shared_a, _b |
# | 3b | A, B: stage -> registers, one k-block ahead | transform_shared_to_regs_a, _b |
# | 3c | multiply and accumulate | |
# | 4 | blocks that share K: the others' sums -> registers of the one that finishes | |
# | 5 | D: registers -> shared | transform_regs_to_shared_d |
# | 6 | D: shared -> global, by the epilogue | transform_shared_to_global_d |
#
# Steps 1, 2 and 4 to 6 are those of `singlestage`. CUTLASS calls this main loop ``MainloopSm80CpAsync``.

def multistage(spec: Sm80Spec, a: View, b: View, c: View, d: View, shape: StackShape) -> None:
    """D = A B + C for one tile of D, or for the parts of tiles that are a block's; see the module's table. Launched with as
    many blocks of ``spec.threads`` as the scheduler says."""
    if spec.scheduler.stays:
        at, step = spec.scheduler.begin(), spec.scheduler.step()
        while at < spec.scheduler.end(shape):
            compute_part(of_part(spec, at), opaque(a), opaque(b), opaque(c), opaque(d), shape)
            barrier()                                  # D has been read from shared memory: the next part may take its place
            at = rolled(spec.scheduler.following(at, step))
    else:
        compute_part(spec, a, b, c, d, shape)


multistage.inlines_calls = True          # type: ignore[attr-defined]  # (`gemmkit.lang.lowering`)


def compute_part(spec: Sm80Spec, a: View, b: View, c: View, d: View, shape: StackShape) -> None:
    # 0. Which product of a stack is this block's, and which tile of it?
    batch, tile = spec.scheduler.product(spec.scheduler.first())
    stack = spec.scheduler.stack
    compute_tile(of_product(spec, batch), stack.a.matrix(a, batch), stack.b.matrix(b, batch), stack.c.matrix(c, batch),
                 stack.d.matrix(d, batch), of_product(shape, batch), tile)


def compute_tile(spec: Sm80Spec, a: View, b: View, c: View, d: View, shape: StackShape, tile: int) -> None:
    """All steps, for one tile of a product of two matrices."""
    # 0. Where is the tile, which share of K is this block's, and which warp is this thread's?
    rank = spec.scheduler.rank() if spec.is_split else 0      # without a split a block has K to itself
    block_m, block_n = spec.scheduler.place(tile, rank, shape)
    if spec.scheduler.order.gates:                     # operands arrive while the kernel runs
        spec.scheduler.order.await_tile(tile, -1)
    k_begin, k_tiles = spec.scheduler.k_tiles(spec, block_m, block_n, rank, shape)
    work = Work(block_m, block_n, 0, k_begin, k_tiles, rank)
    place = TileCoord(work.m, work.n, shape.M, shape.N)
    warp = uniform(udiv(thread_index(), 32))
    accumulators = registers(spec.operator.fragment_c, spec.fragments_m, spec.fragments_n)

    # 1. and 2. C: global -> shared -> registers (or the start of the sum where there is no C, or another block takes it).
    if rank == 0:
        if spec.has_c:
            load_c(spec, accumulators, c, place, warp, shape)
        else:
            start_from_nothing(spec, accumulators)
    else:
        start_from_nothing(spec, accumulators)

    # 3. For every k-tile that can matter to these rows and columns (or this block's share of them): copy, multiply.
    spec.mainloop.run(spec, accumulators, Inputs(Input(a, None), Input(b, None)), work, warp, shape)

    # 4. The sums of blocks that share K become those of one, which finishes the tile.
    barrier()                                          # the last stage has been read: sums and D may take its place
    finishes = spec.scheduler.gather(spec, accumulators, rank) if spec.is_split else True
    if finishes:
        # 5. D: registers -> shared.
        d_shared = shared(spec.d.shared.dtype, 0)
        store_d(spec, accumulators, d_shared, place, warp, spec.warps)
        barrier()

        # 6. D: shared -> global.
        spec.epilogue.store(spec, d, d_shared, work.m, work.n, warp, shape)


# --------------------------------------------------------------------------------------------------
# Step 3 of `multistage`: the main loop around the ring of stages.
#
# A round multiplies one k-tile, step by step along K (a step is the K of an operation). In a round, threads
#
# * load what their routes bring through registers (`Staged`) of the k-tile ``stages - 1`` ahead,
# * of every step fetch the next step's fragments, start a part of the copies (`CpAsync`), and multiply,
# * before the last step's products store what was loaded, wait for the next stage and meet.
#
# The stage that is written is the one that the round before has read: the barrier at that round's end allows it.
#
# Rounds whose copies are all in range come first, in a loop of their own: there, copies have no predicates and nothing
# asks whether there is a next k-tile. A tile at an edge of M or N has none of these, the other tiles all but the last
# few.

PLACE = Fragment(np.dtype(np.int32), 1)


class MainloopState(NamedTuple):
    """What a thread keeps through the main loop: accumulators, fragments of two steps, where in a stage its loads of
    fragments begin, what routes keep, and its warp."""

    accumulators: Any
    a: Any
    b: Any
    places: Any
    of_a: Any
    of_b: Any
    warp: Any


class Moved(NamedTuple):
    """What a route has of an operand: its array, the thread's warp, elements on their way, and where in memory the thread's
    next copies begin."""

    data: Any
    warp: Any
    held: Any
    cursor: Any


class Round(NamedTuple):
    """A round: where the stages that are read and written begin (in bytes), the k-tiles in them, whether there is one to be
    written, and what is known of its copies."""

    read: Any
    write: Any
    at: KTile
    ahead: KTile
    fills: Any
    reach: Reach


class CopyShare(NamedTuple):
    """The ``part``-th of ``parts`` shares of a thread's copies."""

    part: Any
    parts: Any


@dataclass(frozen=True)
class Mainloop(Component):
    """Fragments of the next step are fetched while this one's are multiplied, across the ends of stages too."""

    def run(self, spec: Any, accumulators: Any, inputs: Inputs, work: Work, warp: int, shape: StackShape) -> None:
        """The products of a block's share of K, added to the accumulators."""
        kept = MainloopState(accumulators, registers(spec.kept_a, 2 * spec.fragments_m),
                             registers(spec.kept_b, 2 * spec.fragments_n),
                    registers(PLACE, 2),
                    Moved(inputs.a.data, warp, registers(spec.a.held, spec.a.slots),
                          registers(spec.a.route.cursor(spec.a), spec.a.route.cursors(spec.a))),
                    Moved(inputs.b.data, warp, registers(spec.b.held, spec.b.slots),
                          registers(spec.b.route.cursor(spec.b), spec.b.route.cursors(spec.b))), warp)
        end = work.k_begin + work.k_tiles * spec.block.size.K
        at = ahead = first_k(spec, work, end)
        seek(spec, kept, tile_at(work, ahead, shape))
        rounds = k_steps(spec, work)
        read = write = thread_index() * 0
        find_places(spec, kept)
        # 3a. The first k-tiles fill all stages but one.
        for _ in range(spec.stages - 1):
            if ahead < end:
                fill(spec, kept, write, tile_at(work, ahead, shape))
            spec.copies.commit()
            write = following_stage(spec, write)
            ahead = following_k(spec, work, ahead, end)
            advance(spec, kept, tile_at(work, ahead, shape))
        if rounds > 0:
            meet_stage(spec)
            self.begin(spec, kept, read, tile_at(work, at, shape))
        inside = rounds * 0
        if spec.has_inside:
            inside = rounds_inside(spec, work, tile_at(work, at, shape), rounds)
            for _ in range(inside):
                this = Round(read, write, tile_at(work, at, shape), tile_at(work, ahead, shape), True, INSIDE)
                at = following_k(spec, work, at, end)
                read, write = following_stage(spec, read), following_stage(spec, write)
                ahead = following_k(spec, work, ahead, end)
                self.multiply_tile(spec, kept, this, read, tile_at(work, at, shape), True)
                advance(spec, kept, tile_at(work, ahead, shape))
                keep_places(kept)
        for n in range(inside, rounds):
            this = Round(read, write, tile_at(work, at, shape), tile_at(work, ahead, shape), ahead < end, spec.reach)
            at = following_k(spec, work, at, end)
            read, write = following_stage(spec, read), following_stage(spec, write)
            ahead = following_k(spec, work, ahead, end)
            self.multiply_tile(spec, kept, this, read, tile_at(work, at, shape), n + 1 < rounds)
            advance(spec, kept, tile_at(work, ahead, shape))
            keep_places(kept)

    def begin(self, spec: Sm80Spec, kept: MainloopState, read: int, at: KTile) -> None:
        """The fragments of the first step."""
        fetch(spec, kept, read, at, 0, 0)

    def multiply_tile(self, spec: Sm80Spec, kept: MainloopState, this: Round, read: int, following: KTile,
                      goes_on: bool) -> None:
        """A round; the next one reads the stage at ``read``, which is to hold the k-tile ``following``."""
        if this.fills:
            load_staged(spec, kept, this.ahead)
            if spec.copy_parts == 1:
                copy_all(spec, kept, this)
        fold(spec.steps_k - 1, step_within, 0, spec, kept, this)
        if this.fills:
            store_staged(spec, kept, this.write, this.ahead)
        if goes_on:
            spec.copies.commit()
            meet_stage(spec)
            fetch(spec, kept, read, following, 0, spec.steps_k % 2)
        multiply(spec, kept, (spec.steps_k - 1) % 2)
        if spec.steps_k % 2 == 1:
            if goes_on:                                    # the next round begins with the first set
                for i in range(spec.fragments_m):
                    kept.a[i] = kept.a[spec.fragments_m + i]
                for j in range(spec.fragments_n):
                    kept.b[j] = kept.b[spec.fragments_n + j]


@dataclass(frozen=True)
class InStepMainloop(Mainloop):
    """Fragments are fetched in the step that multiplies them: none are on their way across the end of a round.

    For DMMA (float64): with few products a step and fragments fetched ahead across the loop's end, ptxas 13.0 leaves out the
    wait between a round's last product and the next one's first on the same accumulators, and the sums are wrong.
    """

    def begin(self, spec: Sm80Spec, kept: MainloopState, read: int, at: KTile) -> None:
        """Nothing is fetched ahead."""

    def multiply_tile(self, spec: Sm80Spec, kept: MainloopState, this: Round, read: int, following: KTile,
                      goes_on: bool) -> None:
        if this.fills:
            load_staged(spec, kept, this.ahead)
            copy_all(spec, kept, this)
        fold(spec.steps_k, step_of_its_own, 0, spec, kept, this)
        if this.fills:
            store_staged(spec, kept, this.write, this.ahead)
        if goes_on:
            spec.copies.commit()
            meet_stage(spec)


def step_within(done: int, step: int, spec: Sm80Spec, kept: MainloopState, this: Round) -> int:
    """A step that is not a round's last."""
    fetch(spec, kept, this.read, this.at, step + 1, (step + 1) % 2)
    if spec.copy_parts > 1:
        if this.fills:
            copy_part(spec, kept, this, step)
    multiply(spec, kept, step % 2)
    return done


def step_of_its_own(done: int, step: int, spec: Sm80Spec, kept: MainloopState, this: Round) -> int:
    fetch(spec, kept, this.read, this.at, step, step % 2)
    multiply(spec, kept, step % 2)
    return done


def tile_at(work: Work, k: int, shape: StackShape) -> KTile:
    """The k-tile that begins at ``k``."""
    return KTile(work.m, work.n, k, work.batch, work.rank, shape)


# -- the ring ---------------------------------------------------------------------------------------------------------

def following_stage(spec: Sm80Spec, at: int) -> int:
    """Where the next stage begins."""
    if at == (spec.stages - 1) * spec.stage_bytes:
        return at * 0
    return at + spec.stage_bytes


def rounds_inside(spec: Any, work: Work, at: KTile, rounds: int) -> int:
    """How many rounds start copies of k-tiles that are wholly in range: the first is ``at``, and copies are ahead."""
    whole = min(spec.a.route.whole_tiles(spec.a, at, rounds), spec.b.route.whole_tiles(spec.b, at, rounds), rounds)
    return max(whole - (spec.stages - 1), 0)


def meet_stage(spec: Sm80Spec) -> None:
    """The next stage is full for all threads, and the one just read is empty."""
    spec.copies.wait(spec)
    barrier()


def first_k(spec: Sm80Spec, work: Work, end: int) -> int:
    """Where the first k-tile begins that the condition leaves in."""
    if spec.condition.is_always:
        return work.k_begin
    return following_k(spec, work, work.k_begin - spec.block.size.K, end)


def following_k(spec: Sm80Spec, work: Work, k: int, end: int) -> int:
    """Where the next k-tile begins that the condition leaves in."""
    k += spec.block.size.K
    if not spec.condition.is_always:
        while k < end and not holds(spec, work.m, work.n, k):
            k += spec.block.size.K
    return k


# -- 3a. global -> stage ----------------------------------------------------------------------------------------------

def fill(spec: Sm80Spec, kept: MainloopState, write: int, at: KTile) -> None:
    """All of a stage at once."""
    this = Round(write, write, at, at, True, ANYWHERE)
    load_staged(spec, kept, at)
    copy_all(spec, kept, this)
    store_staged(spec, kept, write, at)


def seek(spec: Any, kept: MainloopState, at: KTile) -> None:
    """Where in memory the thread's copies of a k-tile begin."""
    spec.a.route.seek(spec.a, kept.of_a, at)
    spec.b.route.seek(spec.b, kept.of_b, at)


def advance(spec: Any, kept: MainloopState, at: KTile) -> None:
    """The same of the next k-tile, ``at``: the one behind, unless the condition leaves some out."""
    if spec.condition.is_always:
        spec.a.route.advance(spec, spec.a, kept.of_a)
        spec.b.route.advance(spec, spec.b, kept.of_b)
    else:
        seek(spec, kept, at)


def load_staged(spec: Any, kept: MainloopState, at: KTile) -> None:
    spec.a.route.load(spec, spec.a, kept.of_a, at)
    spec.b.route.load(spec, spec.b, kept.of_b, at)


def store_staged(spec: Any, kept: MainloopState, write: int, at: KTile) -> None:
    spec.a.route.store(spec.a, kept.of_a, write)
    spec.b.route.store(spec.b, kept.of_b, write)


def copy_all(spec: Any, kept: MainloopState, this: Round) -> None:
    whole = CopyShare(0, 1)
    spec.a.route.copy(spec, spec.a, kept.of_a, this, whole)
    spec.b.route.copy(spec, spec.b, kept.of_b, this, whole)


def copy_part(spec: Any, kept: MainloopState, this: Round, part: int) -> None:
    share = CopyShare(part, spec.copy_parts)
    spec.a.route.copy(spec, spec.a, kept.of_a, this, share)
    spec.b.route.copy(spec, spec.b, kept.of_b, this, share)


# -- 3b. stage -> registers, and 3c. ------------------------------------------------------------------------------------

def find_places(spec: Sm80Spec, kept: MainloopState) -> None:
    """Where in the first stage this lane's loads of fragments begin."""
    if spec.operator.has_places:
        warp_tile = parallelise(spec.block, spec.compute_warp, kept.warp, spec.warps)[0]
        a = spec.operator.place_a(spec.a.shared, warp_tile.MK, spec.a.leading())
        b = spec.operator.place_b(spec.b.shared, warp_tile.KN, spec.b.leading())
        kept.places[0], kept.places[1] = (shared_place(spec.a.plane.dtype, a),), (shared_place(spec.b.plane.dtype, b),)
    else:
        kept.places[0] = kept.places[1] = (thread_index() * 0,)


def keep_places(kept: MainloopState) -> None:
    """Across a round: LLVM would rather compute them anew."""
    kept.places[0] = (carried(kept.places[0][0]),)
    kept.places[1] = (carried(kept.places[1][0]),)


def pointer_of(spec: Sm80Spec, operand: Operand, read: int, place: int) -> Any:
    """For loads of fragments from the stage at ``read``."""
    pointer = shared(operand.shared.dtype, operand.offset + read)
    return pinned(pointer, place) if spec.operator.has_places else pointer


def fetch(spec: Any, kept: MainloopState, read: int, at: KTile, step: int, which: int) -> None:
    """The fragments of a step into one of the two sets."""
    operator, operation = spec.operator, spec.operation
    warp_tile = parallelise(spec.block, spec.compute_warp, kept.warp, spec.warps)[0]
    a_shared = pointer_of(spec, spec.a, read, kept.places[0][0])
    a_place = spec.a.place(at.m, at.n, at.k, at.shape)
    for i in range(spec.fragments_m):
        tile = translate_offset(warp_tile.MK, i * operation.size.M, step * operation.size.K)
        fragment = transform_input(
            spec.a, operator, operator.map_a, operator.fragment_a.dtype,
            operator.load_a(spec.a.shared, a_shared, tile, spec.a.leading()), translate(tile, a_place.i, a_place.j), a_place)
        kept.a[which * spec.fragments_m + i] = pack_narrow(fragment) if spec.packs_a else fragment
    b_shared = pointer_of(spec, spec.b, read, kept.places[1][0])
    b_place = spec.b.place(at.m, at.n, at.k, at.shape)
    for j in range(spec.fragments_n):
        tile = translate_offset(warp_tile.KN, step * operation.size.K, j * operation.size.N)
        fragment = transform_input(
            spec.b, operator, operator.map_b, operator.fragment_b.dtype,
            operator.load_b(spec.b.shared, b_shared, tile, spec.b.leading()), translate(tile, b_place.i, b_place.j), b_place)
        kept.b[which * spec.fragments_n + j] = pack_narrow(fragment) if spec.packs_b else fragment


def multiply(spec: Any, kept: MainloopState, which: int) -> None:
    """The products of a step's fragments."""
    for j in range(spec.fragments_n):
        for i in range(spec.fragments_m):
            row = i if j % 2 == 0 else spec.fragments_m - 1 - i       # to and fro: neighbours share an operand
            kept.accumulators[row, j] = spec.operator.mma(fragment_a(spec, kept, which * spec.fragments_m + row),
                                                          fragment_b(spec, kept, which * spec.fragments_n + j),
                                                          kept.accumulators[row, j])


def fragment_a(spec: Sm80Spec, kept: MainloopState, n: int) -> tuple:
    if spec.packs_a:
        return unpack_narrow(spec.operator.fragment_a.dtype, kept.a[n])
    return kept.a[n]


def fragment_b(spec: Sm80Spec, kept: MainloopState, n: int) -> tuple:
    if spec.packs_b:
        return unpack_narrow(spec.operator.fragment_b.dtype, kept.b[n])
    return kept.b[n]


# --------------------------------------------------------------------------------------------------
# The rules of configurations for `multistage`.

STAGES = 2, 8


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    operator = config.operator
    rule(operator.threads == 32, "operator", operator, "it acts in warpgroups; use kernel='warp_specialised'")
    for field, only in (("producer_warps", 0), ("schedule", "cooperative"), ("cluster", Tile(M=1, N=1))):
        rule(getattr(config, field) == only, field, getattr(config, field),
             f"only the warp-specialised kernel takes it; with kernel={config.kernel!r} it must be {only!r}")
    least, most = STAGES
    rule(least <= config.stages <= most, "stages", config.stages, f"{least} to {most} stages are needed")
    if config.splits != 1:
        refusal = operator.refuses_to_merge
        rule(refusal is None, "splits", config.splits, f"with {operator!r}: {refusal}")
    routes.validate(config)
    validate_tiles(config)
    rule(config.compute_warp.size.K == config.block_shape.size.K, "compute_warp", config.compute_warp, "a warp multiplies "
          f"all of a k-tile: K must be that of block_shape={config.block_shape!r}")
    validate_lines(config)
    validate_transforms(config)


# --------------------------------------------------------------------------------------------------
# What `multistage` is specialised by.

FULL = 64                              # 32-bit registers of a thread's sums, from which on there is little room for others


@dataclass(frozen=True)
class Sm80Spec(SimtSpec):
    """``stages`` of A and B lie one behind the other; C, D and sums take the ring's place before and after the main loop.

    ``copy_parts`` is in how many parts the copies of a k-tile are started: between the products of as many steps. ``copies``
    is what the GPU has for them.
    """

    stages: int = 2
    mainloop: Mainloop = Mainloop()
    copy_parts: int = 1
    copies: Copies = AsyncCopies()

    @cached_property
    def has_inside(self) -> bool:
        """Whether rounds whose copies are in range have a loop of their own."""
        return self.condition.is_always and (self.a.route.sees_edges or self.b.route.sees_edges)    # type: ignore[attr-defined]

    @cached_property
    def reach(self) -> Reach:
        """What is known of the copies of the other rounds."""
        return AT_EDGES if self.has_inside else ANYWHERE

    @cached_property
    def packs_a(self) -> bool:
        """Whether fragments of A are kept as 32-bit words."""
        return _packs(self.operator.fragment_a)

    @cached_property
    def packs_b(self) -> bool:
        return _packs(self.operator.fragment_b)

    @cached_property
    def kept_a(self) -> Fragment:
        """A fragment of A as it is kept from the step that fetches it to the step that multiplies it."""
        return _kept(self.operator.fragment_a)

    @cached_property
    def kept_b(self) -> Fragment:
        return _kept(self.operator.fragment_b)

    @cached_property
    def stage_bytes(self) -> int:
        """From a stage to the next."""
        return -(-(self.b.offset + self.b.nbytes) // ALIGNMENT) * ALIGNMENT

    @cached_property
    def sums_at_once(self) -> int:
        """Loads of another block's sums that a thread has on their way (stream-K): few where its own take most registers."""
        nbytes = self.sums_count // self.threads * self.operator.fragment_c.dtype.itemsize
        return 8 if nbytes // 4 < FULL else 2

    @cached_property
    def shared_bytes(self) -> int:
        addend = self.c.nbytes if self.has_c else 0
        return max(self.stages * self.stage_bytes, self.d.nbytes, addend, self.reduction.shared_bytes(self))


def _packs(fragment: Fragment) -> bool:
    """16- and 8-bit elements: carried around a loop one by one, each would take a register."""
    size = fragment.dtype.itemsize
    return size <= 2 and fragment.dtype.names is None and fragment.count * size % 4 == 0


def _kept(fragment: Fragment) -> Fragment:
    return Fragment(np.dtype(np.uint32), fragment.count * fragment.dtype.itemsize // 4) if _packs(fragment) else fragment


#: DMMAs between two on the same accumulators with which ptxas may leave out the wait at a loop's end: the tensor core has
#: finished the first when it begins the second. (Twice what `tests.support.dmma_waits` takes for near.)
SAFE = 7


class Sm80(KernelFamily):
    """One tile a block, or parts of tiles one after the other; a ring of stages."""

    streams_k = True

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: OperandArrays | None) -> Sm80Spec:
        a, b, c, d = operands
        copies = copies_of(arrays.device if arrays else None)
        a, b = (dataclasses.replace(operand, route=copies.route(operand, getattr(arrays, name, None),
                                                                arrays.extents(name) if arrays else (0, 0)))
                for operand, name in ((a, "a"), (b, "b")))
        if arrays is not None:
            a, b = clipped_inputs(config, a, b, arrays)
            d = stored_by_neighbours(d, arrays.out, arrays.extents("out"), config.epilogue)
        scheduler = OneTilePerBlock(order_of(config, Cluster()), config.block_shape, Cluster())
        spec = Sm80Spec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, a, b, c, d,
                        config.epilogue, config.condition, scheduler, config.has_c, config.stages, copies=copies)
        if config.splits != 1:
            spec = dataclasses.replace(spec, scheduler=_shared(scheduler, spec, config, arrays))
        return dataclasses.replace(spec.laid_out(), mainloop=_mainloop(spec), copy_parts=_copy_parts(spec))

    def in_cluster(self, splits: int | StreamK, cluster: Tile) -> int:
        return 1


def _shared(scheduler: OneTilePerBlock, spec: Sm80Spec, config: Config, arrays: OperandArrays | None) -> TileScheduler:
    """A scheduler of blocks that share tiles by a workspace."""
    tiles = scheduler.computed(arrays.M, arrays.N) * arrays.count if arrays else 1
    if isinstance(config.splits, StreamK):
        most = most_blocks(config.splits, arrays.device if arrays else None, config.threads, spec.laid_out().shared_bytes,
                           config.blocks_per_sm)
        return streamed(scheduler, spec, config.splits, tiles, arrays.K if arrays else 0, most)
    reduction = reduction_of(spec, config.splits, tiles, arrays.sm_count if arrays else 0)
    return dataclasses.replace(scheduler, reduction=reduction)


def _mainloop(spec: Sm80Spec) -> Mainloop:
    """Fragments across rounds, unless ptxas would then leave out a wait that is needed (`InStepMainloop`)."""
    table = getattr(spec.operator, "table", None)
    own = units(spec.operator)
    if isinstance(own, FPUOp) or own.fragment_c.dtype != np.dtype(np.float64):
        return Mainloop()
    instructions = 1 if table is None else sum(factor != 0 for row in table for sums in row for factor in sums)
    between = (spec.fragments_m * spec.fragments_n - 1) * instructions
    return Mainloop() if between >= SAFE else InStepMainloop()


def _copy_parts(spec: Sm80Spec) -> int:
    """Tensor cores are fed best with copies dealt over the steps. On the ordinary units they go out together, for in front
    of every group of copies ptxas puts three dummy loads."""
    together = isinstance(units(spec.operator), FPUOp) or isinstance(_mainloop(spec), InStepMainloop)
    return 1 if together else max(1, spec.steps_k - 1)


FAMILY = Sm80("multistage", multistage, min(copies.minimum_arch for copies in COPIES))
