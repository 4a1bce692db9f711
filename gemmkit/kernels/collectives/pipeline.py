"""A ring of stages in shared memory with its barriers: what producers fill and consumers read.

A stage goes round through three states. The n-th filling of a stage is the n-th phase of its barriers.

| state | barrier that says so | completed by |
|---|---|---|
| empty | ``empty[stage]`` | the consumers that have read it |
| raw | ``raw[stage]`` | the bytes of TMA, where threads rewrite the stage before it is read |
| full | ``full[stage]`` | the bytes of TMA, or the threads that wrote the stage |

Names are CUTLASS's: a producer acquires a stage and commits it, a consumer waits for a stage and releases it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.scheduler import Cluster, Slot
from gemmkit.lang.components import dataclass
from gemmkit.ptx.barriers import (
    cluster_rank,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, thread_index, udiv, warp_barrier
from gemmkit.ptx.wgmma import claim_registers, named_arrive, named_barrier, release_registers

BARRIERS = np.dtype(np.uint64)         # the dtype of pointers to mbarriers
BARRIER = BARRIERS.itemsize            # bytes
THREAD, WARPS, CLUSTER, CLUSTER_WARPS = "thread", "warps", "cluster", "cluster warps"


@dataclass(frozen=True)
class Pipeline(Component):
    """The barriers of ``stages`` stages, ``offset`` bytes into shared memory.

    ``readers`` says how a consumer releases a stage: by one THREAD of a warpgroup (its tensor cores have read for all), by
    one lane of each of its WARPS (threads have read as well), by one thread for each block of a CLUSTER that multicasts
    into the stage, or by a lane of each warp for each of these (CLUSTER_WARPS).
    """

    stages: int
    offset: int
    full_arrivals: int
    empty_arrivals: int
    has_raw: bool = False
    readers: str = THREAD
    cluster: Cluster = Cluster()

    @property
    def nbytes(self) -> int:
        return BARRIER * self.stages * (3 if self.has_raw else 2)

    @property
    def end(self) -> int:
        """The byte behind the barriers."""
        return self.offset + self.nbytes

    def full(self) -> Any:
        return shared(BARRIERS, self.offset)

    def empty(self) -> Any:
        return shared(BARRIERS, self.offset + BARRIER * self.stages)

    def raw(self) -> Any:
        return shared(BARRIERS, self.offset + 2 * BARRIER * self.stages)

    def initialise(self) -> None:
        """Called by one thread, before any other meets a barrier."""
        for stage in range(self.stages):
            mbarrier_init(self.full(), stage, self.full_arrivals)
            mbarrier_init(self.empty(), stage, self.empty_arrivals)
            if self.has_raw:
                mbarrier_init(self.raw(), stage, 1)

    # -- around the ring ----------------------------------------------------------------------------------------------

    def advance(self, slot: Slot) -> Slot:
        """The next stage; the phase flips with every round."""
        if slot.stage == self.stages - 1:
            return Slot(slot.stage * 0, slot.phase ^ 1)
        return Slot(slot.stage + 1, slot.phase)

    def skip(self, slot: Slot, count: int) -> Slot:
        """``count`` stages on: another consumer reads those between."""
        stage = slot.stage + count
        rounds = udiv(stage, self.stages)
        return Slot(stage - rounds * self.stages, slot.phase ^ (rounds & 1))

    # -- the producer -------------------------------------------------------------------------------------------------

    def acquire(self, slot: Slot) -> None:
        """Wait until the stage is empty. A producer begins with phase 1: a fresh barrier lets it pass at once."""
        mbarrier_wait(self.empty(), slot.stage, slot.phase)

    def expect(self, slot: Slot, nbytes: int) -> None:
        """Arrive on ``full``, which completes when TMA has brought so many bytes as well."""
        mbarrier_expect(self.full(), slot.stage, nbytes)

    def expect_raw(self, slot: Slot, nbytes: int) -> None:
        mbarrier_expect(self.raw(), slot.stage, nbytes)

    def wait_raw(self, slot: Slot) -> None:
        mbarrier_wait(self.raw(), slot.stage, slot.phase)

    def commit(self, slot: Slot) -> None:
        """This thread has written its part of the stage."""
        mbarrier_arrive(self.full(), slot.stage)

    # -- the consumers ------------------------------------------------------------------------------------------------

    def wait(self, slot: Slot) -> None:
        mbarrier_wait(self.full(), slot.stage, slot.phase)

    def release(self, stage: int) -> None:
        """This consumer has read the stage."""
        if self.readers == CLUSTER:
            thread = thread_index() % 128
            if thread < self.cluster.size and self.cluster.reads_of(cluster_rank(), thread):
                mbarrier_arrive_at(self.empty(), stage, thread)
        elif self.readers == CLUSTER_WARPS:
            warp_barrier()
            lane = lane_index()
            if lane < self.cluster.size and self.cluster.reads_of(cluster_rank(), lane):
                mbarrier_arrive_at(self.empty(), stage, lane)
        elif self.readers == WARPS:
            warp_barrier()
            if lane_index() == 0:
                mbarrier_arrive(self.empty(), stage)
        elif thread_index() % 128 == 0:
            mbarrier_arrive(self.empty(), stage)


# --------------------------------------------------------------------------------------------------
# Allocators of what a block has once: bytes of shared memory, and named barriers.

ALIGNMENT = 128                        # bytes: where the next operand may start in the singlestage kernel's shared memory
NAMED = 16                             # barriers of a block; 0 is that of `barrier()`


class SharedMemory:
    """Regions of a block's shared memory, one behind the other.

    >>> memory = SharedMemory()
    >>> memory.take(20), memory.take(8, alignment=16), memory.nbytes
    (0, 32, 40)
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int, alignment: int = 8) -> int:
        """The first byte of a new region."""
        first = -(-self.nbytes // alignment) * alignment
        self.nbytes = first + nbytes
        return first


class NamedBarriers:
    """Numbers of named barriers.

    >>> barriers = NamedBarriers()
    >>> barriers.take(3), barriers.take(2)
    (1, 4)
    """

    def __init__(self) -> None:
        self.next = 1

    def take(self, count: int) -> int:
        """The first of ``count`` barriers; raises ValueError where a block has not as many."""
        first, self.next = self.next, self.next + count
        if self.next > NAMED:
            raise ValueError(f"{self.next - 1} named barriers are asked for, and a block has {NAMED - 1}")
        return first


# --------------------------------------------------------------------------------------------------
# Warpgroups with roles: the registers that their threads have, and the turns that consumers take at the tensor cores.

@dataclass(frozen=True)
class Warpgroups(Component):
    """``producers`` warpgroups, and ``consumers`` behind them. After setmaxnreg a producer's thread has ``few`` registers
    and a consumer's ``many``; with 0 both have what they have from the launch.

    >>> Warpgroups(1, 2, 24, 240).warp_registers
    (24, 24, 24, 24, 240, 240, 240, 240, 240, 240, 240, 240)
    """

    producers: int
    consumers: int
    few: int = 0
    many: int = 0

    @cached_property
    def threads(self) -> int:
        return 128 * (self.producers + self.consumers)

    @cached_property
    def warp_registers(self) -> tuple[int, ...] | None:
        """What a thread of each warp has in the end."""
        return (self.few,) * (4 * self.producers) + (self.many,) * (4 * self.consumers) if self.few else None

    # -- in device code -----------------------------------------------------------------------------------------------

    def release_registers(self) -> None:
        """Called by producers."""
        if self.few > 0:
            release_registers(self.few)

    def claim_registers(self) -> None:
        """Called by consumers."""
        if self.many > 0:
            claim_registers(self.many)


@dataclass(frozen=True)
class OrderBarrier(Component):
    """``consumers`` start their products one after the other: a named barrier for each, from ``barrier`` on, says that its
    turn has come. Where turns are not ``taken`` nothing is waited for."""

    consumers: int = 1
    barrier: int = 0
    taken: bool = False

    def give_first(self, group: int) -> None:
        """The first turn is consumer 0's: the last one gives it."""
        if group == self.consumers - 1:
            self.give(0)

    def wait(self, group: int) -> None:
        if self.taken:
            named_barrier(self.barrier + group, 256)

    def give(self, group: int) -> None:
        if self.taken:
            named_arrive(self.barrier + group, 256)
