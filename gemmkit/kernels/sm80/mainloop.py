"""Step 3 of `multistage`: the main loop around the ring of stages.

A round multiplies one k-tile, step by step along K (a step is the K of an operation). In a round, threads

* load what their routes bring through registers (`Staged`) of the k-tile ``stages - 1`` ahead,
* of every step fetch the next step's fragments, start a part of the copies (`CpAsync`), and multiply,
* before the last step's products store what was loaded, wait for the next stage and meet.

The stage that is written is the one that the round before has read: the barrier at that round's end allows it.

Rounds whose copies are all in range come first, in a loop of their own: there, copies have no predicates and nothing asks
whether there is a next k-tile. A tile at an edge of M or N has none of these, the other tiles all but the last few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.common.elements import transform_input
from gemmkit.kernels.common.k_tiles import holds, k_steps
from gemmkit.kernels.common.work import Inputs, KTile, Work
from gemmkit.kernels.sm80.reach import ANYWHERE, INSIDE, Reach
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import fold
from gemmkit.lang.registers import Fragment, registers
from gemmkit.ptx.memory import shared
from gemmkit.ptx.pinned import pinned, shared_place
from gemmkit.ptx.special import barrier, carried, thread_index
from gemmkit.ptx.words import pack_narrow, unpack_narrow
from gemmkit.tiling import parallelise, translate, translate_offset

PLACE = Fragment(np.dtype(np.int32), 1)


class Kept(NamedTuple):
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


class Share(NamedTuple):
    """The ``part``-th of ``parts`` shares of a thread's copies."""

    part: Any
    parts: Any


@dataclass(frozen=True)
class Mainloop(Component):
    """Fragments of the next step are fetched while this one's are multiplied, across the ends of stages too."""

    def run(self, spec: Any, accumulators: Any, inputs: Inputs, work: Work, warp: int, shape: Any) -> None:
        """The products of a block's share of K, added to the accumulators."""
        kept = Kept(accumulators, registers(spec.kept_a, 2 * spec.fragments_m), registers(spec.kept_b, 2 * spec.fragments_n),
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

    def begin(self, spec: Any, kept: Kept, read: int, at: KTile) -> None:
        """The fragments of the first step."""
        fetch(spec, kept, read, at, 0, 0)

    def multiply_tile(self, spec: Any, kept: Kept, this: Round, read: int, following: KTile, goes_on: bool) -> None:
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

    def begin(self, spec: Any, kept: Kept, read: int, at: KTile) -> None:
        """Nothing is fetched ahead."""

    def multiply_tile(self, spec: Any, kept: Kept, this: Round, read: int, following: KTile, goes_on: bool) -> None:
        if this.fills:
            load_staged(spec, kept, this.ahead)
            copy_all(spec, kept, this)
        fold(spec.steps_k, step_of_its_own, 0, spec, kept, this)
        if this.fills:
            store_staged(spec, kept, this.write, this.ahead)
        if goes_on:
            spec.copies.commit()
            meet_stage(spec)


def step_within(done: int, step: int, spec: Any, kept: Kept, this: Round) -> int:
    """A step that is not a round's last."""
    fetch(spec, kept, this.read, this.at, step + 1, (step + 1) % 2)
    if spec.copy_parts > 1:
        if this.fills:
            copy_part(spec, kept, this, step)
    multiply(spec, kept, step % 2)
    return done


def step_of_its_own(done: int, step: int, spec: Any, kept: Kept, this: Round) -> int:
    fetch(spec, kept, this.read, this.at, step, step % 2)
    multiply(spec, kept, step % 2)
    return done


def tile_at(work: Work, k: int, shape: Any) -> KTile:
    """The k-tile that begins at ``k``."""
    return KTile(work.m, work.n, k, work.batch, work.rank, shape)


# -- the ring ---------------------------------------------------------------------------------------------------------

def following_stage(spec: Any, at: int) -> int:
    """Where the next stage begins."""
    if at == (spec.stages - 1) * spec.stage_bytes:
        return at * 0
    return at + spec.stage_bytes


def rounds_inside(spec: Any, work: Work, at: KTile, rounds: int) -> int:
    """How many rounds start copies of k-tiles that are wholly in range: the first is ``at``, and copies are ahead."""
    whole = min(spec.a.route.whole_tiles(spec.a, at, rounds), spec.b.route.whole_tiles(spec.b, at, rounds), rounds)
    return max(whole - (spec.stages - 1), 0)


def meet_stage(spec: Any) -> None:
    """The next stage is full for all threads, and the one just read is empty."""
    spec.copies.wait(spec)
    barrier()


def first_k(spec: Any, work: Work, end: int) -> int:
    """Where the first k-tile begins that the condition leaves in."""
    if spec.condition.is_always:
        return work.k_begin
    return following_k(spec, work, work.k_begin - spec.block.size.K, end)


def following_k(spec: Any, work: Work, k: int, end: int) -> int:
    """Where the next k-tile begins that the condition leaves in."""
    k += spec.block.size.K
    if not spec.condition.is_always:
        while k < end and not holds(spec, work.m, work.n, k):
            k += spec.block.size.K
    return k


# -- 3a. global -> stage ----------------------------------------------------------------------------------------------

def fill(spec: Any, kept: Kept, write: int, at: KTile) -> None:
    """All of a stage at once."""
    this = Round(write, write, at, at, True, ANYWHERE)
    load_staged(spec, kept, at)
    copy_all(spec, kept, this)
    store_staged(spec, kept, write, at)


def seek(spec: Any, kept: Kept, at: KTile) -> None:
    """Where in memory the thread's copies of a k-tile begin."""
    spec.a.route.seek(spec.a, kept.of_a, at)
    spec.b.route.seek(spec.b, kept.of_b, at)


def advance(spec: Any, kept: Kept, at: KTile) -> None:
    """The same of the next k-tile, ``at``: the one behind, unless the condition leaves some out."""
    if spec.condition.is_always:
        spec.a.route.advance(spec, spec.a, kept.of_a)
        spec.b.route.advance(spec, spec.b, kept.of_b)
    else:
        seek(spec, kept, at)


def load_staged(spec: Any, kept: Kept, at: KTile) -> None:
    spec.a.route.load(spec, spec.a, kept.of_a, at)
    spec.b.route.load(spec, spec.b, kept.of_b, at)


def store_staged(spec: Any, kept: Kept, write: int, at: KTile) -> None:
    spec.a.route.store(spec.a, kept.of_a, write)
    spec.b.route.store(spec.b, kept.of_b, write)


def copy_all(spec: Any, kept: Kept, this: Round) -> None:
    whole = Share(0, 1)
    spec.a.route.copy(spec, spec.a, kept.of_a, this, whole)
    spec.b.route.copy(spec, spec.b, kept.of_b, this, whole)


def copy_part(spec: Any, kept: Kept, this: Round, part: int) -> None:
    share = Share(part, spec.copy_parts)
    spec.a.route.copy(spec, spec.a, kept.of_a, this, share)
    spec.b.route.copy(spec, spec.b, kept.of_b, this, share)


# -- 3b. stage -> registers, and 3c. ------------------------------------------------------------------------------------

def find_places(spec: Any, kept: Kept) -> None:
    """Where in the first stage this lane's loads of fragments begin."""
    if spec.operator.has_places:
        warp_tile = parallelise(spec.block, spec.compute_warp, kept.warp, spec.warps)[0]
        a = spec.operator.place_a(spec.a.shared, warp_tile.MK, spec.a.leading())
        b = spec.operator.place_b(spec.b.shared, warp_tile.KN, spec.b.leading())
        kept.places[0], kept.places[1] = (shared_place(spec.a.plane.dtype, a),), (shared_place(spec.b.plane.dtype, b),)
    else:
        kept.places[0] = kept.places[1] = (thread_index() * 0,)


def keep_places(kept: Kept) -> None:
    """Across a round: LLVM would rather compute them anew."""
    kept.places[0] = (carried(kept.places[0][0]),)
    kept.places[1] = (carried(kept.places[1][0]),)


def pointer_of(spec: Any, operand: Any, read: int, place: int) -> Any:
    """For loads of fragments from the stage at ``read``."""
    pointer = shared(operand.shared.dtype, operand.offset + read)
    return pinned(pointer, place) if spec.operator.has_places else pointer


def fetch(spec: Any, kept: Kept, read: int, at: KTile, step: int, which: int) -> None:
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


def multiply(spec: Any, kept: Kept, which: int) -> None:
    """The products of a step's fragments."""
    for j in range(spec.fragments_n):
        for i in range(spec.fragments_m):
            row = i if j % 2 == 0 else spec.fragments_m - 1 - i       # to and fro: neighbours share an operand
            kept.accumulators[row, j] = spec.operator.mma(fragment_a(spec, kept, which * spec.fragments_m + row),
                                                          fragment_b(spec, kept, which * spec.fragments_n + j),
                                                          kept.accumulators[row, j])


def fragment_a(spec: Any, kept: Kept, n: int) -> tuple:
    if spec.packs_a:
        return unpack_narrow(spec.operator.fragment_a.dtype, kept.a[n])
    return kept.a[n]


def fragment_b(spec: Any, kept: Kept, n: int) -> tuple:
    if spec.packs_b:
        return unpack_narrow(spec.operator.fragment_b.dtype, kept.b[n])
    return kept.b[n]
