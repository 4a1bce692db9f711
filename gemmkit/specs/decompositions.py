"""One product, decomposed ever further: the schedules 1 to 3 of docs/specs.md, which has their text. (4 and 5 are
`gemmkit.specs.listings`.)"""

from __future__ import annotations

from gemmkit.specs.schedule import GL, RF, SH, A, B, Block, ColMajor, Init, K, Kernel, M, MatMul, Move, N, Thread

scalar = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    .tile(16, 16).to(Block)
    .tile(1, 1).to(Thread)
    .accumulate_in(RF, Init.done, Move.done)
    .split(1)
    .move(A, RF, Move.done)
    .move(B, RF, Move.done)
    .done)

registers = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    .tile(32, 32).to(Block)
    .accumulate_in(RF, Init.tile(4, 4).to(Thread).tile(1, 1).unroll.done,
                   Move.tile(4, 4).to(Thread).tile(1, 4).unroll.done)
    .tile(4, 4).to(Thread)
    .split(1)
    .move(A, RF, Move.tile(1, 1).unroll.done)
    .move(B, RF, Move.tile(1, 4).unroll.done)
    .tile(1, 1).unroll.done)

shared = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    .tile(32, 32).to(Block)
    .accumulate_in(RF, Init.tile(4, 4).to(Thread).tile(1, 1).unroll.done,
                   Move.tile(4, 4).to(Thread).tile(1, 4).unroll.done)
    .split(8).sync                                            # a barrier: nobody overwrites what others still read
    .move(A, SH, Move.tile(1, 4).to(Thread).done).storage(ColMajor).pad(4).no_sync
    .move(B, SH, Move.tile(1, 4).to(Thread).done)             # and one behind both moves
    .tile(4, 4).to(Thread)
    .split(1).unroll
    .move(A, RF, Move.tile(4, 1).unroll.done)
    .move(B, RF, Move.tile(1, 4).unroll.done)
    .tile(1, 1).unroll.done)
