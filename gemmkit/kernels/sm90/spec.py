"""What `warp_specialised` is specialised by: a `Spec` with a pipeline, a producer, a mainloop and a store of D."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemmkit.epilogues import Default
from gemmkit.kernels.common.pipeline import Pipeline
from gemmkit.kernels.common.watch import Watch, watch_of
from gemmkit.kernels.sm90.exchange import Exchange
from gemmkit.kernels.sm90.mainloop import Mainloop, SharedMainloop
from gemmkit.kernels.sm90.producer import Producer
from gemmkit.kernels.sm90.store import DirectStore, Store
from gemmkit.kernels.sm90.together import Fragments
from gemmkit.kernels.sm90.warpgroups import Turns, Warpgroups
from gemmkit.kernels.spec import Spec
from gemmkit.layouts.braided import OCTET
from gemmkit.layouts.swizzled import pattern_of

PINGPONG = "pingpong"
WARP_ROWS = 16                         # of a fragment that a warp holds


@dataclass(frozen=True)
class Sm90Spec(Spec):
    """``warps`` are those that multiply, in warpgroups of four (the consumers), beside ``producer_warps``.

    ``schedule`` is "cooperative" (consumers share a tile of D, each its rows) or "pingpong" (each has tiles of its own, in
    turn; ``turns`` orders them at the tensor cores).
    The other fields are the kernel's parts (`gemmkit.kernels.sm90.specialise` chooses them), and the ``nbytes`` of shared
    memory that they need.
    """

    stages: int
    schedule: str
    producer_warps: int
    mainloop: Mainloop = SharedMainloop()
    producer: Producer = Producer(4, 1, 0)
    pipeline: Pipeline = Pipeline(2, 0, 1, 1)
    store: Store = DirectStore()
    exchange: Exchange = Exchange()
    turns: Turns = Turns()
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
        return self.mainloop.sets * self.fragments_m * fragment.count * fragment.dtype.itemsize // 4 > 128

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
        return bool(self.has_c or type(self.epilogue) is not Default or not self.d.to_registers.is_identity
                    or not self.d.to_shared.is_identity)

    @cached_property
    def watch(self) -> Watch:
        return watch_of(self.a, self.compute_warp.size.M, 128)

    @cached_property
    def together(self) -> Fragments:
        """How a consumer's warps hold D together where the epilogue sees more than an element."""
        return Fragments(self.epilogue.writes, self.d.whole, self.parts[1])

    @property
    def parts(self) -> tuple[int, int]:
        return WARP_ROWS, self.block.size.N // self.d.layout.folds // self.exchange.slices

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
        """Shared memory that one more stage takes: its tiles and its barriers."""
        return self.stage_bytes + self.pipeline.nbytes // self.stages

    @cached_property
    def tma_bytes(self) -> int:
        """What TMA brings a stage."""
        return sum(operand.nbytes for operand in (self.a, self.b) if operand.route.uses_tma)


__all__ = ["PINGPONG", "Sm90Spec"]
