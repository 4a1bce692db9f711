"""Schedules: run in the emulator; faults found there; and those that are refused, with their line."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.specs.products import store_cuda
from gemmkit.specs.schedule import (
    FR,
    GL,
    RF,
    SH,
    SRC,
    XOR,
    A,
    B,
    Block,
    ColMajor,
    Init,
    K,
    Kernel,
    M,
    MatMul,
    Move,
    N,
    RowMajor,
    ScheduleError,
    Thread,
    Warp,
)
from tests.support.patches import Seeded
from tests.support.schedules import maxwell, operands

FLOAT32 = operands(64, 64, 16)


def product(schedule: Any, given: tuple = FLOAT32, seed: int | None = None) -> None:
    """Run it, and compare."""
    a, b, out = given
    out[...] = np.nan
    with gk.emulate(seed=seed):
        schedule(a, b, out=out)
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), atol=1e-4)


# -- right ------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
def test_several_blocks() -> None:
    product(maxwell(), operands(64, 128, 24), seed=3)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("pad", [0, 3, 8])
def test_pads(pad: int) -> None:
    """An odd one gives narrower accesses, no fault."""
    product(maxwell(pad=pad))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.parametrize("how", [dict(block=(128, 64)), dict(block=(64, 128)), dict(storage=(RowMajor, ColMajor)), dict(storage=(ColMajor, ColMajor), pad=0)],
                         ids=["128x64", "64x128", "other storage", "column-major"])
def test_variants(how: dict) -> None:
    """Parts of a schedule are changed, and the rest follows."""
    product(maxwell(**how), operands(*how.get("block", (64, 64)), 8), seed=2)


def test_sums_of_halves() -> None:
    a, b, _ = operands(64, 64, 8, np.float16)
    out = np.zeros((64, 64), np.float16, order="F")
    with gk.emulate():
        maxwell()(a, b, out=out)
    np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=0.05)


def scalar(k: int = 1) -> Any:
    """A thread an element, nothing in shared memory."""
    return (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(16, 16).to(Block).tile(1, 1).to(Thread)
            .accumulate_in(RF, Init.done, Move.done).split(k).move(A, RF, Move.done).move(B, RF, Move.done).done)


def test_without_out() -> None:
    a, b, _ = operands(32, 16, 12, orders="CCC")
    with gk.emulate():
        made = scalar()(a, b)
    assert made.dtype == np.float32 and made.flags.c_contiguous
    np.testing.assert_allclose(made, a @ b, atol=1e-5)


def test_known_sizes() -> None:
    """Then everything can be unrolled."""
    a, b, out = operands(16, 16, 8, orders="CCC")
    schedule = (MatMul(16, 16, 8)(GL, GL, GL)(Kernel).tile(16, 16).to(Block).tile(1, 1).to(Thread)
                .accumulate_in(RF, Init.done, Move.done).split(4).unroll.move(A, RF, Move.done)
                .move(B, RF, Move.tile(1, 1).unroll.done).tile(1, 1).unroll.done)
    product(schedule, (a, b, out))
    with gk.emulate(), pytest.raises(ValueError, match=r"K is 16, and the schedule is of MatMul\(16, 16, 8\)"):
        schedule(*operands(16, 16, 16, orders="CCC")[:2])


def test_a_micro_kernel_as_the_product() -> None:
    """Any device function of the tensors executes a spec."""
    product(with_micro_kernel(), operands(16, 16, 8, orders="CCC"))


def with_micro_kernel() -> Any:
    return (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(16, 16).to(Block).tile(1, 1).to(Thread)
            .accumulate_in(RF, Init.done, Move.done).split(1).done(multiply_add))


def multiply_add(a: Any, b: Any, c: Any) -> None:
    i, j = c.at
    c.storage[i, j] = (c.storage[i, j][0] + a.storage[a.at] * b.storage[b.at],)


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@pytest.mark.parametrize("sizes", [(60, 64, 16), (64, 35, 16), (64, 64, 13), (70, 33, 5), (1, 1, 1)])
def test_tiles_over_the_edge(sizes: tuple) -> None:
    product(maxwell(), operands(*sizes), seed=1)
    product(scalar(), operands(*(size % 24 + 1 for size in sizes), orders="CFC"))


@pytest.mark.kin(5)
def test_fragments_over_the_edge() -> None:
    from gemmkit.specs.products import cuda_wmma_sample

    product(cuda_wmma_sample, operands(100, 72, 40, np.float16, "CFC"))


def test_what_knows_nothing_of_edges_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the micro-kernel store_cuda, which knows nothing of tiles"):
        product(maxwell(end=Move.done(store_cuda)), operands(60, 64, 16))


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("sizes", [(60, 64, 16), (70, 33, 13), (69, 35, 5)])
def test_prefetch_over_the_edge(sizes: tuple) -> None:
    """By cp.async where lines are aligned, by registers whatever they are."""
    if sizes[0] % 2 == 0:
        product(maxwell(prefetch=True), operands(*sizes), seed=2)
    else:
        with pytest.raises(ScheduleError, match=r"(?s)aligned to 4 bytes, not 8.*By registers anything goes.*\.prefetch\.through\(RF\)"):
            product(maxwell(prefetch=True), operands(*sizes))
    product(maxwell(prefetch=True, through="ab"), operands(*sizes), seed=3)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("through", ["a", "b", "ab"])
def test_prefetch_by_registers(through: str) -> None:
    product(maxwell(prefetch=True, through=through), operands(64, 64, 40), seed=7)
    product(maxwell(prefetch=True, through=through), operands(64, 64, 8))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["barrier", "wait_copies"])
def test_a_prefetch_by_registers_needs_what_it_has(name: str, seeded: Seeded) -> None:
    """Of one operand by registers, and one by copies."""
    from gemmkit.specs import nodes as ahead

    seeded(ahead, name, (lambda: None) if name == "barrier" else lambda most: None)
    with pytest.raises(EmulatorError):
        product(maxwell(prefetch=True, through="a"), operands(64, 64, 24))


@pytest.mark.kin(5)
def test_prefetch() -> None:
    product(maxwell(prefetch=True), operands(64, 64, 40), seed=7)
    product(maxwell(prefetch=True), operands(64, 64, 8))


def test_a_prefetch_without_its_barrier(seeded: Seeded) -> None:
    """The emulator finds what the node would do wrong."""
    from gemmkit.specs import nodes as ahead

    seeded(ahead, "barrier", lambda: None)
    with pytest.raises(EmulatorError, match=r"(?s)race in .*shared memory.*\.move\(A, SH, \.\.\.\)\.prefetch at .*schedules\.py:\d+"):
        product(maxwell(prefetch=True), operands(64, 64, 24))


def test_a_prefetch_that_is_not_waited_for(seeded: Seeded) -> None:
    from gemmkit.specs import nodes as ahead

    seeded(ahead, "wait_copies", lambda most: None)
    with pytest.raises(EmulatorError, match=r"(?s)\.move\(B, SH, \.\.\.\)\.prefetch at .*schedules\.py:\d+"):
        product(maxwell(prefetch=True), operands(64, 64, 24))


# -- faults -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("schedule", "step"), [(maxwell(split_sync=False), r"\.split\(8\) without \.sync at "),
                                                (maxwell(b_sync=False), r"\.move\(B, SH, \.\.\.\) without a barrier at ")], ids=["split", "move"])
def test_a_barrier_that_is_missing(schedule: Any, step: str) -> None:
    with pytest.raises(EmulatorError, match=rf"(?s)race in .*shared memory.*{step}.*schedules\.py:\d+"):
        product(schedule)


def test_an_epilogue_that_shares_out_otherwise() -> None:
    with pytest.raises(ScheduleError, match=r"is C\(\d+, \d+\) in the product and C\(\d+, \d+\) in the epilogue"):
        product(maxwell(end_swizzle=lambda i: i))
    with pytest.raises(ScheduleError, match="in the epilogue; decompose both alike"):
        product(maxwell(end_tile=(8, 8)))


def test_a_swizzle_that_is_no_permutation() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)swizzle is not a permutation of 32 workers: number \d+ is of several.*schedules\.py:\d+"):
        product(maxwell(swizzle=lambda i: i & 15))
    with pytest.raises(ScheduleError, match="number 32 is of none of them"):
        product(maxwell(swizzle=lambda i: i + 1))


# -- refused ----------------------------------------------------------------------------------------------------------

def base() -> Any:
    return MatMul(M, N, K)(GL, GL, GL)(Kernel)


def block(rows: int = 64, columns: int = 64) -> Any:
    return base().tile(rows, columns).to(Block)


def sums(begin: Any = None, memory: str = RF) -> Any:
    return block().accumulate_in(memory, begin or Init.tile(32, 64).to(Warp).tile(8, 8).to(Thread).tile(1, 1).unroll.done, Move.done(store_cuda))


def shared(how: Any) -> Any:
    """B to shared memory, 8 x 64 of it, as ``how`` says."""
    return how(block().split(8).move(B, SH, Move.tile(1, 8).to(Thread).done)).tile(8, 8).to(Thread).done


#: When it is written: (schedule, words).
WRITTEN = [
    (lambda: base().tile(0, 64), r"\.tile\(0, 64\): rows=0; give a number"),
    (lambda: base().tile(64, (4, 6)), r"columns=\(4, 6\): the step must be a multiple of the width 4"),
    (lambda: base().tile(64, True), "columns=True"),
    (lambda: base().split("8"), "k='8'"),
    (lambda: Move.split(8), "a Move has no K"),
    (lambda: base().tile(64, 64).to(Kernel), "give Block, Warpgroup, Warp, QuadPair, Thread"),
    (lambda: base().tile(64, 64).pad(4), r"\.pad refines \.move, and stands behind \.tile\(64, 64\)"),
    (lambda: base().sync, r"\.sync refines \.split, and stands behind MatMul"),
    (lambda: base().split(8).swizzle(4), r"refines \.tile"),
    (lambda: block().occupancy(0), r"\.occupancy\(0\): give a number of blocks, 1 to 32"),
    (lambda: block().tile(32, 32).to(Warp).occupancy(2), r"\.occupancy is of \.to\(Block\)"),
    (lambda: base().split(8).occupancy(2), r"refines \.tile"),
    (lambda: base().tile(64, 64).swizzle(4), "give a function"),
    (lambda: base().tile(64, 64).layout("columns"), "give RowMajor or ColMajor"),
    (lambda: block().move(SRC, GL, Move.done), "memory='GL'"),
    (lambda: block().move(2, SH, Move.done), "operand=2"),
    (lambda: Move.move(B, SH, Move.done), "operand=1"),
    (lambda: block().move(A, SH, Move), "implementation is a Move that is not done"),
    (lambda: block().move(A, SH, Init.done), "implementation is a Init; give a schedule of Move"),
    (lambda: block().move(A, SH, Move.done).pad(-1), r"\.pad\(-1\)"),
    (lambda: block().move(A, SH, Move.done).swizzle(4), "give XOR, a Swizzle, or a function of a number"),
    (lambda: block().move(A, SH, Move.done).layout(ColMajor), "an order is .storage"),
    (lambda: block().move(A, SH, Move.done).through(RF), r"a move that is \.prefetch goes \.through\(RF\)"),
    (lambda: block().move(A, SH, Move.done).prefetch.through(SH), r"\.through\('SH'\)"),
    (lambda: block().move(A, RF, Move.done).swizzle(XOR), "moves to SH; registers have no layout"),
    (lambda: block().move(A, RF, Move.done).pad(4), "moves to SH; registers have no layout"),
    (lambda: block().accumulate_in(SH, Init.done, Move.done), "sums are kept in RF, FR, WR or QP"),
    (lambda: block().accumulate_in(RF, Move.done, Move.done), "begin is a Move; give a schedule of Init"),
    (lambda: Move.accumulate_in(RF, Init.done, Move.done), "a Move has no sums"),
    (lambda: block().done.tile(8, 8), "the schedule is done"),
    (lambda: block().done.unroll, r"refines \.tile or \.split, and stands behind .*\.done"),
    (lambda: MatMul(0, N, K), "m=0"),
    (lambda: MatMul(M, N, K)(GL, SH, GL), "matrices are in GL"),
    (lambda: MatMul(M, N, K)(GL, GL, GL)(Block), "begins at Kernel"),
]
#: When it meets matrices: (schedule, words).
CALLED = [
    (lambda: base().split(8).done, "begins with .tile"),
    (lambda: block().done, "no instruction is a Block's"),
    (lambda: block().tile(8, 8).to(Block).done, "from Block there is no way to Block"),
    (lambda: block().tile(3, 8).to(Thread).done, "tiles of 3 rows do not divide the 64 of MatMul's"),
    (lambda: block().tile((4, 24), 8).to(Thread).done, "pieces 24 apart do not divide 64"),
    (lambda: block().tile(1, 1).to(Thread).done, "4096 threads are needed, and a block has 1024"),
    (lambda: block().tile(32, 32).to(Warp).tile(8, 8).to(Thread).done, "16 tiles for 32 of Thread"),
    (lambda: block().tile(32, 32).to(Warp).tile(8, 8).to(Warp).done, "from Warp there is no way to Warp"),
    (lambda: block().split(8).tile(32, 32).to(Warp).move(A, SH, Move.done).tile(8, 4).to(Thread).done, "SH is a Block's, and this is a step of each Warp"),
    (lambda: block().split(8).move(A, SH, Move.tile(1, 8).to(Thread).done).prefetch.done, "right behind a .split, both of them"),
    (lambda: block().move(A, SH, Move.tile(1, 8).to(Thread).done).prefetch.done, "right behind a .split, both of them"),
    (lambda: block().split(8).move(A, SH, Move.done).prefetch.no_sync.move(B, SH, Move.done).no_sync.prefetch.done, r"move\(B, .*\.no_sync of both leaves out the barrier"),
    (lambda: shared(lambda s: s.swizzle(lambda i: i & 63)), r"\.move\(B, SH, \.\.\.\): \.swizzle: it is not a permutation of 512 offsets: 0 and 64 both go to 0"),
    (lambda: shared(lambda s: s.swizzle(lambda i: i + 1)), "not a permutation of 512 offsets: 511 goes to 512"),
    (lambda: shared(lambda s: s.swizzle(lambda i: (i + 4) % 512)), "it is not an XOR of an offset's bits: 0 goes to 4"),
    (lambda: shared(lambda s: s.swizzle(lambda i: i ^ (i >> 6 & 2))), "takes 16 bytes apart, 4 elements that one access moves: from 2 on"),
    (lambda: shared(lambda s: s.pad(3).swizzle(XOR)), r"\.swizzle\(XOR\) is of lines of 32 bytes and more, a power of two apart"),
    (lambda: shared(lambda s: s.layout("[(8,32):(32,1)]")), r"is of 8 x 32, and the tile is 8 x 64"),
    (lambda: shared(lambda s: s.layout("[(8,64):(32,1)]")), "has two elements in one place"),
    (lambda: shared(lambda s: s.layout("(8,64)")), "is not a shape; write"),
    (lambda: shared(lambda s: s.layout("[(8,64):(64,1)]").pad(4)), r"leave out \.storage and \.pad"),
    (lambda: block(64, 64).tile(32, 32).done, "no instruction is a Block's"),
    (lambda: base().tile(1024, 1024).to(Block).split(64).move(A, SH, Move.tile(32, 64).to(Warp).tile(1, 2).to(Thread).done).tile(32, 32).done, "bytes of shared memory"),
    (lambda: sums(Init.tile(32, 64).to(Warp).tile(8, 4).to(Thread).tile(1, 1).unroll.done).split(8).tile(32, 64).to(Warp).tile(8, 8).to(Thread).done, "Init allocates 8 x 4 elements a Thread, and the product has 64"),
    (lambda: sums(Init.tile(32, 64).to(Warp).done).split(8).done, "how many elements each Thread has is not said"),
    (lambda: sums().split(8).tile(8, 8).done, r"c is divided in RF, with a part for each Thread; its tiles come after \.to\(Thread\)"),
    (lambda: sums(Init.tile(32, 64).to(Warp).tile(16, 16).unroll.done, FR).split(16).tile(32, 64).to(Warp).done, "no wmma instruction multiplies float32"),
    (lambda: sums().split(8).tile(32, 64).to(Warp).tile(8, 8).to(Thread).done, "is no instruction. Decompose it further"),
]


@pytest.mark.parametrize(("make", "words"), WRITTEN)
def test_refused_when_written(make: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as caught:
        make()
    assert f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize(("make", "words"), CALLED)
def test_refused_before_anything_is_compiled(make: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as caught:
        product(make())
    assert f"{__file__}:" in str(caught.value)


def test_the_line_is_the_steps() -> None:
    first = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    schedule = (
        MatMul(M, N, K)(GL, GL, GL)(Kernel)
        .tile(64, 64).to(Block)
        .tile(3, 8).to(Thread)
        .done)
    with pytest.raises(ScheduleError) as caught:
        product(schedule)
    assert int(str(caught.value).rpartition(":")[2]) in range(first, first + 4)


@pytest.mark.parametrize(("given", "words"), [
    (lambda: (FLOAT32[0], FLOAT32[1][:8], FLOAT32[2]), "a's columns are b's rows"),
    (lambda: (FLOAT32[0], FLOAT32[1].astype("f2"), FLOAT32[2]), "convert one of them"),
    (lambda: (FLOAT32[0], FLOAT32[1], FLOAT32[2][:32]), r"out is of shape \(32, 64\)"),
    (lambda: (FLOAT32[0][0], FLOAT32[1], FLOAT32[2]), "a has 1 dimensions"),
    (lambda: (FLOAT32[0], FLOAT32[1], np.zeros((128, 128), "f4")[::2, ::2]), "elements must be neighbours"),
    (lambda: (FLOAT32[2], FLOAT32[2], FLOAT32[2]), "out overlaps a"),
])
def test_matrices_that_do_not_fit(given: Any, words: str) -> None:
    a, b, out = given()
    with gk.emulate(), pytest.raises((ValueError, TypeError), match=words):
        maxwell()(a, b, out=out)


def test_host_arrays_are_emulated_alone() -> None:
    with pytest.raises(TypeError, match=r"with gemmkit.emulate\(\)"):
        maxwell()(*FLOAT32[:2], out=FLOAT32[2])
