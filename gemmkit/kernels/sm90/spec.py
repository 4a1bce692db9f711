"""What `warp_specialised` is specialised by: a `Spec` with a pipeline, a producer, a mainloop and a store of D."""

from __future__ import annotations

from functools import cached_property

from gemmkit.kernels.common.pipeline import Pipeline
from gemmkit.kernels.common.watch import Watch, watch_of
from gemmkit.kernels.sm90.exchange import Exchange
from gemmkit.kernels.sm90.mainloop import Mainloop, SharedMainloop
from gemmkit.kernels.sm90.producer import Producer
from gemmkit.kernels.sm90.row_exchange import ClusterRowExchange, RowExchange
from gemmkit.kernels.sm90.store import DirectStore, Store
from gemmkit.kernels.sm90.together import Fragments
from gemmkit.kernels.sm90.warpgroups import Turns, Warpgroups
from gemmkit.kernels.spec import Spec
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts.braided import OCTET
from gemmkit.layouts.swizzled import pattern_of
from gemmkit.runtime.device import H100

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
    mainloop: Mainloop = SharedMainloop()
    producer: Producer = Producer(4, 1, 0)
    pipeline: Pipeline = Pipeline(2, 0, 1, 1)
    store: Store = DirectStore()
    exchange: Exchange = Exchange()
    row_exchange: RowExchange = RowExchange()
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
        return bool(self.has_c or not self.epilogue.is_default or not self.d.to_registers.is_identity
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
        """Shared memory that one more stage takes: its tiles and its barriers."""
        return self.stage_bytes + self.pipeline.nbytes // self.stages

    @cached_property
    def tma_bytes(self) -> int:
        """What TMA brings a stage."""
        return sum(operand.route.brought_bytes(operand) for operand in (self.a, self.b))
