"""What a schedule says of itself, and `schedule.explore`: what fits is compiled, checked and timed; what does not is listed
with its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.ptx.memory import store_global
from gemmkit.ptx.special import barrier
from gemmkit.runtime import cache
from gemmkit.runtime.cache import Entry
from gemmkit.runtime.launch import Launchable
from gemmkit.specs import trials
from gemmkit.specs.products import cuda_wmma_sample, maxwell_optimized
from gemmkit.specs.schedule import (
    GL,
    RF,
    SH,
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
    Schedule,
    Thread,
    explore,
)
from gemmkit.tuner import measure
from gemmkit.tuner.measure import Failed
from tests.support.on_device import OnDevice
from tests.support.patches import Seeded
from tests.support.schedules import maxwell

# ==========================================================================================================================
# `schedule.explore`: what fits is compiled, checked and timed; what does not is listed with its rule.

USAGE = {"registers": 32, "spill_stores": 0, "spill_loads": 0, "stack_bytes": 0}


@pytest.fixture
def folder(own_cache: Path, tmp_path: Path) -> Iterator[Path]:
    """A cache of this test's own."""
    yield tmp_path
    cache.default_cache.cache_clear()


def make(side: int = 32, k: int = 8, sync: bool = True, end: Any = None) -> Any:
    """The third decomposition of docs/specs.md, for blocks of side x side."""
    steps: Any = (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(side, side).to(Block)
                  .accumulate_in(RF, Init.tile(4, 4).to(Thread).tile(1, 1).unroll.done,
                                 end or Move.tile(4, 4).to(Thread).tile(1, 4).unroll.done)
                  .split(k))
    steps = (steps.sync if sync else steps).move(A, SH, Move.tile(1, 4).to(Thread).done).storage(ColMajor).pad(4).no_sync
    return (steps.move(B, SH, Move.tile(1, 4).to(Thread).done).tile(4, 4).to(Thread).split(1).unroll
            .move(A, RF, Move.tile(4, 1).unroll.done).move(B, RF, Move.tile(1, 4).unroll.done).tile(1, 1).unroll.done)


def beside(source: Any, target: Any) -> None:
    """An epilogue that writes far beside C."""
    store_global(target.storage, 1, (0, 0), (0, 2**30), (np.float32(1),))


def nothing(source: Any, target: Any) -> None:
    """An epilogue that writes nothing."""


def forever(source: Any, target: Any) -> None:
    """An epilogue that waits for what nobody writes."""
    while target.storage[0, 0] != np.float32(0.12345):
        barrier()


def matrices(m: int, n: int, k: int, dtype: str = "f4") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)


# -- in the emulator ----------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.usefixtures("folder")
@pytest.mark.compile
def test_emulated_variants_are_compiled_and_checked_and_have_no_times() -> None:
    a, b = matrices(1000, 96, 44)                            # too large to emulate, and over the edge
    with gk.emulate():
        found = explore(make, side=[32, 24], k=[8], sync=[True, False])(a, b, jobs=2)
    right, *others = found.rows
    assert right.parameters == dict(side=32, k=8, sync=True) and right.is_right and right.error is None
    assert right.registers and 20 < right.registers < 255 and right.spilled_bytes == 0 and right.blocks_per_sm
    assert (right.threads, right.shared_bytes, right.microseconds, right.ratio) == (64, 2176, None, None)
    race = next(row for row in others if row.parameters["side"] == 32)
    assert "race" in str(race.error) and ".split(8) without .sync" in str(race.error) and not race.is_right
    refused = [row for row in others if row.parameters["side"] == 24]
    assert len(refused) == 2 and all("tiles for" in str(row.error) and f"{__file__}:" in str(row.error) for row in refused)
    with pytest.raises(RuntimeError, match="no variant was timed .*this is the emulator"):
        _ = found.schedule
    table = str(found).splitlines()
    assert table[0] == f"1000 x 96 x 44, float32 to float32, on {gk.runtime.device.H100.name}: 4 variants, 3 of them refused or wrong"
    assert table[2].split()[:6] == ["side=32", "k=8", "sync=True", "-", "-", "-"] and "nothing was timed" in table[-1]


@pytest.mark.usefixtures("folder")
def test_what_does_not_fit_costs_nothing(replaced: Seeded) -> None:
    """Neither what is refused when it is written, nor when it meets the matrices, is compiled."""
    replaced(trials, "forked", lambda tasks, *_: iter([]) if not tasks else pytest.fail("compiled"))

    def some(side: int, k: int) -> Any:
        if k == 5:
            raise ValueError("no fives")
        return make(side, k)

    with gk.emulate():
        found = explore(some, side=[0, 20], k=[8, 5])(*matrices(64, 64, 16))
    errors = {tuple(row.parameters.values()): str(row.error) for row in found.rows}
    assert "rows=0" in errors[0, 8] and errors[0, 5] == errors[20, 5] == "no fives" and "tiles for" in errors[20, 8]


@pytest.mark.usefixtures("folder")
@pytest.mark.compile
def test_the_least_operands_are_of_the_same_kernel() -> None:
    """One whole tile and what the last one has; as aligned, in the same order."""
    from gemmkit.runtime.arrays import describe
    from gemmkit.specs.run import prepared

    big = np.zeros((2000, 1002), "f4")[:, :1001], np.zeros((1001, 640), "f4", order="F"), np.zeros((2000, 640), "f4")
    infos = tuple(describe(x) for x in big)
    _, lowered = prepared(make(), infos)
    m, n, k = trials.small_sizes(make(), lowered, (2000, 640, 1001))
    assert (m, n, k) == (32 + 2000 % 32, 32, 16 + 1001 % 8)
    small = [trials.like(shape, info) for shape, info in zip(((m, k), (k, n), (m, n)), infos)]
    assert prepared(make(), tuple(map(describe, small)))[1] is lowered


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("choices", "error", "words"), [
    (dict(), ValueError, "give the values of its parameters"),
    (dict(side=[]), ValueError, r"side=\[\]: give at least one value"),
    (dict(side=32), TypeError, r"side=32: give a list of values, for example side=\[32\]"),
    (dict(side="32"), TypeError, "side='32'"),
    (dict(sides=[32]), TypeError, r"cannot be called with sides: got an unexpected keyword argument 'sides'"),
    (dict(side=range(100), k=range(100)), ValueError, "10000 combinations of side, k; 4096 at most"),
])
def test_choices_that_are_none(choices: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        explore(make, **choices)


@pytest.mark.usefixtures("folder")
def test_what_makes_no_schedule() -> None:
    with pytest.raises(TypeError, match="explore.4.: give a function"):
        explore(4, side=[1])
    for wrong in (None, Schedule("MatMul"), Move.done):
        with pytest.raises(TypeError, match=r"\(k=1\) returns .*; a schedule of a MatMul that ends with .done is needed"):
            explore(lambda k, wrong=wrong: wrong, k=[1])
    with pytest.raises(ZeroDivisionError):                   # a fault of the function's
        explore(lambda k: make(8 // k), k=[0])


@pytest.mark.usefixtures("folder")
def test_matrices_that_are_none() -> None:
    variants = explore(make, side=[32])
    a, b = matrices(64, 64, 16)
    with pytest.raises(TypeError, match=r"explore in the emulator, without times: with gemmkit.emulate\(\)"):
        variants(a, b)
    with gk.emulate():
        for given, how, words in (((a, b[:8]), {}, "a's columns are b's rows"), ((a[:0], b), {}, "nothing to compute"),
                                  ((a, b), dict(budget=0), "budget=0"), ((a, b), dict(jobs=0), "jobs=0")):
            with pytest.raises(ValueError, match=words):
                variants(*given, **how)


# -- measured by what stands for the process on the GPU --------------------------------------------------------------------

class Measured:
    """Answers as the tuner's process does: the n-th variant has these times, beside gemmkit.matmul's 100 us; "wrong" computes
    something else, an exception is raised."""

    def __init__(self, expected: np.ndarray, times: list[Any]):
        self.expected, self.times, self.pairs_of = expected, times, list[int]()

    def __call__(self, memory: Any, contents: Any, varied: Any, ordinal: int) -> Measured:
        self.jobs = dict[int, Any]()
        return self

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def keep(self, number: int, job: Any) -> None:
        self.jobs[number] = job

    def forget(self, number: int) -> None:
        del self.jobs[number]

    def result(self, number: int, seconds: float) -> list[bytes]:
        time = 100.0 if number < 0 else self.times[number]
        if isinstance(time, Exception):
            raise time
        return [(self.expected * (1.01 if time == "wrong" else 1)).astype("f4").tobytes()]

    def pairs(self, one: int, other: int, count: int, target: float, seconds: float) -> list[tuple[float, float]]:
        assert one == -1
        self.pairs_of.append(count)
        return [(100.0, self.times[other])] * count


@pytest.fixture
def measured(no_gpu: None, replaced: Seeded) -> Callable[[list[Any]], tuple[Measured, Callable[..., Any]]]:
    """``measured(times)``: what stands for the process, and a call that tries variants on arrays of a GPU that is not there."""
    def install(times: list[Any]) -> tuple[Measured, Callable[..., Any]]:
        a, b = matrices(64, 64, 16)
        process = Measured(a.astype("f8") @ b, times)
        replaced(trials, "Measuring", process)
        replaced(Launchable, "entry", lambda self: Entry(b"\x7fELF", {"usage": USAGE}, False))     # nothing is compiled
        held = {x.ctypes.data: x.tobytes() for x in (a, b)}
        replaced(trials, "contents_of", lambda memory, ordinal: [held.get(x.start, b"") for x in memory.buffers])
        out = OnDevice(np.zeros((64, 64), "f4"))
        return process, lambda variants, **how: variants(OnDevice(a), OnDevice(b), out, **how)

    return install


@pytest.mark.usefixtures("folder")
def test_timed_variants(measured: Any) -> None:
    """The fastest first and timed again; what is wrong, failed or does not fit behind it, with its reason."""
    process, tried = measured([80.0, 50.0, "wrong", Failed("it did not end within 20 s"), 125.0, None])
    found = tried(explore(lambda name: make(24 if name == "f" else 32), name="a b c d e f".split()))
    assert [row.parameters["name"] for row in found.rows] == ["b", "a", "e", "c", "d", "f"] and process.is_closed
    assert [row.ratio for row in found.rows[:3]] == [2.0, 1.25, 0.8] and found.default == 100.0
    assert process.pairs_of == [trials.PAIRS] * 3 + [trials.FINAL_PAIRS] * 3
    assert found.best.tflops == pytest.approx(2e-6 * 64 * 64 * 16 / 50) and found.schedule == make(32)
    wrong, failed, refused = found.rows[3:]
    assert "elements differ by up to" in str(wrong.error) and not wrong.is_right and str(failed.error).endswith("within 20 s")
    lines = str(found).splitlines()
    assert lines[2].split()[:4] == ["name=b", "50.00", "0.00", "2.000"] and lines[5].split() == ["gemmkit.matmul", "100.00", "1.000"]
    assert lines[-1] == f"name=f: {' '.join(str(refused.error).split())}"


@pytest.mark.usefixtures("folder")
def test_a_product_that_matmul_cannot_compute(measured: Any, replaced: Seeded) -> None:
    process, tried = measured([50.0])
    replaced(process, "result", lambda number, seconds: (_ for _ in ()).throw(Failed("no memory")))
    with pytest.raises(RuntimeError, match="gemmkit.matmul, which variants are timed in turns with, does not run: no memory"):
        tried(explore(make, side=[32]))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("budget, errors", [(150, ["not compiled within the budget", "not timed within the budget"]),
                                            (250, ["not timed within the budget"] * 2), (10**5, ["None"] * 2)])
def test_the_budget(measured: Any, replaced: Seeded, budget: int, errors: list[str]) -> None:
    """What is not reached is told. The search looks at a clock on which 100 s go by between two looks; the processes that compile
    have the machine's."""
    clock = iter(range(0, 10**6, 100))
    process, tried = measured([50.0, 60.0])
    replaced(trials, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = tried(explore(lambda name: make(), name=["a", "b"]), budget=budget)
    assert sorted(str(row.error) for row in found.rows) == errors


@pytest.mark.usefixtures("folder")
@pytest.mark.gpu
def test_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right ones are timed; one that is wrong, one that faults and one that hangs take nothing with them."""
    import cupy

    monkeypatch.setattr(measure, "CANDIDATE_S", 3.0)
    a, b = (cupy.asarray(x) for x in matrices(256, 192, 64))
    ends = {"right": None, "nothing": Move.done(nothing), "beside": Move.done(beside), "forever": Move.done(forever)}
    found = explore(lambda side, end: make(side, end=ends[end]), side=[32, 24], end=ends)(a, b, budget=120)
    rows = {(row.parameters["side"], row.parameters["end"]): row for row in found.rows}
    assert found.best is rows[32, "right"] and found.best.microseconds > 0.5 and 0.001 < found.best.ratio < 1000, str(found)   # type: ignore[operator]
    assert found.default and found.best.tflops == pytest.approx(2e-6 * 256 * 192 * 64 / found.best.microseconds)  # type: ignore[operator]
    assert "wrong" in str(rows[32, "nothing"].error) and "failed" in str(rows[32, "beside"].error), str(found)
    assert "did not end" in str(rows[32, "forever"].error) and "tiles for" in str(rows[24, "right"].error), str(found)
    d = found.schedule(a, b)                                  # this process's context is as it was
    cupy.testing.assert_allclose(d, a.astype("f8") @ b.astype("f8"), atol=1e-4)


# ==========================================================================================================================
# What a schedule says of itself: its tree, and the Config that does the same.

WMMA = (("f2", "row"), ("f2", "col"), ("f4", "row"))
MAXWELL = (("f4", "col"),) * 3


def test_explain() -> None:
    text = cuda_wmma_sample.explain(*WMMA).splitlines()
    assert text[0] == "MatMul ([?,?].fp16.GL, [?,?].fp16.GL) -> ([?,?].fp32.GL) of a Kernel"
    assert "      .split(16): 8 steps, unrolled" in text
    assert "          MatMul ([16,16].fp16.FR, [16,16].fp16.FR) -> ([16,16].fp32.FR) of a Warp: wmma.mma.sync.aligned.m16n16k16" in text
    assert "            Move ([1,8].fp16.GL) -> ([1,8].fp16.SH) of a Thread: ld 16 bytes in GL, st 16 bytes in SH" in text
    assert text[-1] == "256 threads a block, 69632 bytes of shared memory"


def test_explain_a_micro_kernel_and_a_swizzle() -> None:
    text = maxwell_optimized.explain(*MAXWELL)
    assert "one for each Thread, column by column, renumbered by swizz" in text
    assert "([128,128].fp32.RF) -> ([128,128].fp32.GL) of a Block: store_cuda, a micro-kernel" in text
    assert "of a Thread: 64 fmaf" in text


def test_memory_is_used_again_behind_a_barrier() -> None:
    """A's and B's tiles are dead behind the loop's last barrier: the epilogue's 128 x 128 sums lie there."""
    assert "69632 bytes" in cuda_wmma_sample.explain(*WMMA) and 69632 == 2 * 128 * 136 * 2
    assert 128 * 128 * 4 < 69632


@pytest.mark.sample(1)
@pytest.mark.parametrize(("given", "words"), [((("f2", "rows"), *WMMA[1:]), "a=.*the order is 'row' or 'col'"),
                                              ((np.zeros((4, 4), "f2")[::2, ::2], *WMMA[1:]), "neighbours")])
def test_no_matrix(given: tuple, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        cuda_wmma_sample.explain(*given)


# -- as a Config ------------------------------------------------------------------------------------------------------

def test_the_config_of_the_wmma_listing() -> None:
    conf = cuda_wmma_sample.config(*WMMA)
    assert conf.kernel == "singlestage" and conf.warps_per_block == 8
    assert isinstance(conf.operator, operators.WMMAOp)
    assert (conf.block_shape, conf.compute_warp) == (gk.Tile(M=128, N=128, K=128), gk.Tile(M=64, N=32, K=16))
    assert conf.shared_a_layout == layouts.Padded(layouts.RowMajor("float16"), 8)
    assert (conf.mem_b_warp, conf.mem_b_thread) == (gk.Tile(K=128, N=2), gk.Tile(K=8, N=1))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "kinds", "words"), [
    (maxwell_optimized, MAXWELL, ["lie in pieces apart", "not renumbered", "the micro-kernel store_cuda", "products.py:"]),
    (maxwell(), MAXWELL, ["goes by shared memory"]),
    (maxwell(split_sync=False), MAXWELL, ["loop ends with a barrier"]),
    (maxwell(prefetch=True), MAXWELL, ["has one stage"]),
])
def test_what_does_not_fit(schedule: Any, kinds: tuple, words: list) -> None:
    with pytest.raises(gk.ConfigError) as caught:
        schedule.config(*kinds)
    assert all(word in str(caught.value) for word in words), caught.value
