"""Drawn schedules: tiles, pads, swizzles, prefetches, storage, dtypes, orders. Emulated they are NumPy's product; so is what they are compiled to,
run by the interpreter of PTX, which has no races and no Python."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import gemmkit as gk
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100
from gemmkit.specs.launching import Kernel as Launch
from gemmkit.specs.lower import Matrix
from gemmkit.specs.nodes import scheduled
from gemmkit.specs.run import _blocks, kernel_of, matrix_of
from gemmkit.specs.schedule import (
    GL,
    RF,
    SH,
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
    Thread,
)
from tests.ptx_machine.launch import run_ptx
from tests.support.schedules import operands

ORDER = {"C": "row", "F": "col"}


@st.composite
def schedules(draw: Any, pads: tuple = (0, 1, 2, 3, 4)) -> tuple[Any, tuple[int, int, int]]:
    """(schedule, sizes): a block of threads, each with a tile; A and B by shared memory, or straight from global memory."""
    side, part = draw(st.sampled_from([(8, 2), (16, 4), (16, 2), (32, 4)]))
    columns = draw(st.sampled_from([part, 2 * part]))
    threads = side // part * (2 * side // columns)
    hypothesis.assume(threads % 32 == 0)
    k = draw(st.sampled_from([2, 4, 8]))
    order = draw(st.sampled_from([RowMajor, ColMajor]))
    steps = (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(side, 2 * side).to(Block).layout(draw(st.sampled_from([RowMajor, ColMajor])))
             .accumulate_in(RF, Init.tile(part, columns).to(Thread).tile(1, 1).unroll.done,
                            Move.tile(part, columns).to(Thread).layout(order).tile(*draw(st.sampled_from([(1, columns), (part, 1), (1, 1)]))).unroll.done)
             .split(k).sync)
    rows, across = max(1, side * k // threads), 2 * side * k // threads
    moves_a = draw(st.booleans()) and side * k % threads == 0 and side % rows == 0
    moves_b = draw(st.booleans()) and bool(across) and 2 * side * k % threads == 0 and 2 * side % across == 0
    is_ahead = moves_a and moves_b and draw(st.booleans())

    def placed(move: Any, lines: tuple[int, int]) -> Any:
        """Padded, or swizzled where its lines are long enough; by registers a step ahead."""
        storage = draw(st.sampled_from([RowMajor, ColMajor]))
        move = move.storage(storage)
        if lines[storage == RowMajor] >= 16 and draw(st.booleans()):
            move = move.swizzle(XOR)
        else:
            move = move.pad(draw(st.sampled_from(pads)))
        return move.prefetch.through(RF) if is_ahead else move

    if moves_a:
        steps = placed(steps.move(A, SH, Move.tile(rows, 1).to(Thread).tile(1, 1).done), (side, k))
    if moves_b:
        steps = placed(steps.move(B, SH, Move.tile(1, across).to(Thread).done), (k, 2 * side))
    steps = steps.tile(part, columns).to(Thread).layout(order).split(1)
    steps = (steps.unroll if draw(st.booleans()) else steps).move(A, RF, Move.tile(1, 1).unroll.done).move(B, RF, Move.tile(1, 1).unroll.done)
    sizes = side * draw(st.integers(1, 2)), 2 * side, k * draw(st.integers(1, 3))
    over = draw(st.sampled_from([(0, 0, 0), (0, 0, 1), (3, 0, 0), (1, 5, 0), (2, 7, 1)]))         # tiles reach over the edge
    return steps.tile(1, 1).unroll.done, tuple(size - less for size, less in zip(sizes, over))


orders = st.tuples(*[st.sampled_from("CF")] * 3).map("".join)


def check(out: Any, a: Any, b: Any) -> None:
    np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=1e-4 if out.dtype == np.float32 else 0.06)


@hypothesis.settings(max_examples=12)
@hypothesis.given(schedules(), orders, st.sampled_from(["f4", "f2"]), st.integers(0, 99))
def test_emulated(drawn: Any, order: str, dtype: str, seed: int) -> None:
    schedule, sizes = drawn
    a, b, out = operands(*sizes, dtype, order, seed)
    out = out.astype(dtype, order="K")
    with gk.emulate(seed=seed):
        schedule(a, b, out=out)
    check(out, a, b)


@pytest.mark.thorough
@hypothesis.settings(max_examples=300, phases=[hypothesis.Phase.generate])
@hypothesis.given(schedules(), orders, st.integers(0, 99))
def test_many_emulated(drawn: Any, order: str, seed: int) -> None:
    schedule, sizes = drawn
    a, b, out = operands(*sizes, "f4", order, seed)
    with gk.emulate(seed=seed):
        schedule(a, b, out=out)
    check(out, a, b)


@pytest.mark.compile
@hypothesis.settings(max_examples=4, phases=[hypothesis.Phase.generate])      # each is compiled: no hunt for a smaller one
@hypothesis.given(schedules(pads=(0, 4)), orders, st.integers(0, 99))
def test_as_ptx(drawn: Any, order: str, seed: int) -> None:
    """(Of three neighbours that odd pads leave in an aligned 16 bytes NVVM loads all four: the interpreter says that the fourth was
    never written.)"""
    schedule, sizes = drawn
    a, b, out = operands(*sizes, "f4", order, seed)
    by_ptx(schedule, a, b, out)
    check(out, a, b)


def by_ptx(schedule: Any, a: Any, b: Any, out: Any) -> None:
    """The product by the schedule's PTX."""
    infos = tuple(describe(x) for x in (a, b, out))
    matrices = [matrix_of("a", x) for x in (a, b, out)]
    lowered = kernel_of(schedule, *matrices)
    blocks, is_partial = _blocks(schedule, lowered, infos)
    lowered = kernel_of(schedule, *(x._replace(is_partial=is_partial) for x in matrices))
    made = Launch(scheduled, lowered.root, lowered.threads, blocks, lowered.shared_bytes).launchable((True, True, False), infos, H100)
    ptx = to_ptx(scheduled, tuple(argument.type for argument in made.arguments), lowered.threads, H100)
    values = list(made.values)
    for n, array in enumerate((a, b, out)):
        values[made.slot(n + 1)] = array  # type: ignore[index]
    run_ptx(ptx, lowered.threads, blocks, values, [a, b, out], lowered.shared_bytes)


@pytest.mark.compile
def test_maxwell_as_ptx() -> None:
    """Warps, a swizzle, strided tiles, shared memory."""
    from tests.support.schedules import maxwell

    a, b, out = operands(64, 64, 16)
    by_ptx(maxwell(), a, b, out)
    check(out, a, b)


@pytest.mark.compile
def test_tiles_over_the_edge_as_ptx() -> None:
    from tests.support.schedules import maxwell

    a, b, out = operands(70, 35, 13)
    by_ptx(maxwell(), a, b, out)
    check(out, a, b)
    code = maxwell().compile(*[Matrix(np.dtype("f4"), "col", 16, is_partial=True)] * 3)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0


@pytest.mark.compile
def test_prefetch_as_ptx() -> None:
    from tests.support.schedules import maxwell

    a, b, out = operands(64, 64, 24)
    by_ptx(maxwell(prefetch=True), a, b, out)
    check(out, a, b)
    code = maxwell(prefetch=True).compile(*[("f4", "col")] * 3)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0 and "cp.async" in code.ptx


@pytest.mark.compile
def test_a_users_micro_kernel_as_ptx() -> None:
    from tests.kernels.specs.test_schedules import with_micro_kernel

    a, b, out = operands(16, 16, 8, orders="CCC")
    by_ptx(with_micro_kernel(), a, b, out)
    check(out, a, b)


@pytest.mark.compile
def test_wmma_as_ptx() -> None:
    """Fragments, by a smaller sample."""
    from gemmkit.specs.listings import cuda_wmma_sample

    a, b, out = operands(128, 128, 128, "f2", "CFC")
    by_ptx(cuda_wmma_sample, a, b, out)
    check(out, a, b)


@pytest.mark.compile
def test_the_cache_knows_a_schedule(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch compiles is kept by a text of all that is in it: another swizzle is another kernel, the same one is found."""
    from gemmkit.runtime import compile as compiling
    from gemmkit.runtime.cache import CubinCache
    from tests.support.schedules import maxwell

    built: list[str] = []
    real = compiling.assemble

    def counted(ptx: str, arch: str) -> Any:
        built.append(ptx)
        return real(ptx, arch)

    def entry(schedule: Any) -> Any:
        infos = tuple(describe(x) for x in operands(64, 64, 16))
        lowered = kernel_of(schedule, *[matrix_of("a", ("f4", "col"))] * 3)
        kernel = Launch(scheduled, lowered.root, lowered.threads, 1, lowered.shared_bytes)
        return kernel.launchable((True, True, False), infos, H100).entry()

    monkeypatch.setattr(compiling, "assemble", counted)
    cache = CubinCache(tmp_path)                               # the process's own may know them from other runs
    monkeypatch.setattr(compiling, "default_cache", lambda: cache)
    first = entry(maxwell(swizzle=lambda i: i ^ 3))
    assert entry(maxwell(swizzle=lambda i: i ^ 3)).cubin == first.cubin and len(built) == 1
    entry(maxwell(swizzle=lambda i: i ^ 5))
    assert len(built) == 2
