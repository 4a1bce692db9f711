"""Schedules with ``.stages``: TMA brings the tiles, wgmma multiplies them; emulated, compiled, on a GPU, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.specs import run
from gemmkit.specs.products import wgmma_ring
from gemmkit.specs.schedule import (
    GL,
    RF,
    SH,
    WR,
    A,
    B,
    Bands,
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
    Warpgroup,
)
from tests.specs.test_listings import main_loop
from tests.support.code_lines import source_of
from tests.support.harness import aligned

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@pytest.fixture
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, so that a block has several tiles."""
    small = dataclasses.replace(run.device.H100, sm_count=2)
    monkeypatch.setattr(run.device, "target", lambda ordinal=None: small)


def operands(sizes: tuple[int, int, int], orders: str, dtype: Any, result: Any, rng: np.random.Generator) -> list[np.ndarray]:
    m, n, k = sizes
    if np.dtype(dtype).kind in "iu":
        values = [rng.integers(-100, 100, shape) for shape in ((m, k), (k, n))]
    else:
        values = [rng.standard_normal(shape) for shape in ((m, k), (k, n))]
    poison = np.full((m, n), 113 if np.dtype(result).kind in "iu" else np.nan)
    kinds = dtype, dtype, result
    return [aligned(np.asarray(x.astype(kind), order=order))                                  # type: ignore[call-overload]
            for x, kind, order in zip((*values, poison), kinds, orders)]


def error_of(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest, by the size of the sums."""
    return float(np.abs(out.astype(float) - a.astype(float) @ b.astype(float)).max() / np.sqrt(a.shape[1]))


@pytest.mark.parametrize("orders", ["CFC", "CCC", "FFC", "FCF"])
def test_orders(orders: str, rng: np.random.Generator) -> None:
    """wgmma reads tiles of either order; tiles reach over every edge."""
    a, b, out = operands((200, 72, 136), orders, "f2", "f4", rng)
    with gk.emulate(seed=1):
        assert wgmma_ring((128, 64), 64, 2, cluster=1)(a, b, out=out) is out
    assert error_of(out, a, b) < 1e-5


@pytest.mark.parametrize(("dtype", "result", "k", "bound"), [
    ("f2", "f2", 32, 2e-3), (BF16, "f4", 64, 1e-5), (BF16, BF16, 16, 2e-2), ("f4", "f4", 32, 5e-3), (E4M3, "f4", 128, 2e-2),
    ("i1", "i4", 64, 1e-9)], ids=str)
def test_types(dtype: Any, result: Any, k: int, bound: float, rng: np.random.Generator) -> None:
    """Sums are float32, or int32, and converted to what C is of; steps of 32 to 128 bytes have a swizzle of their own."""
    a, b, out = operands((64, 48, 160), "CFC", dtype, result, rng)
    with gk.emulate(seed=2):
        wgmma_ring((64, 16), k, 3, cluster=1)(a, b, out=out)
    assert error_of(out, a, b) < bound


@pytest.mark.parametrize(("cluster", "bands", "sizes"), [(1, 3, (200, 80, 64)), (2, 2, (320, 48, 128)), (2, 4, (64, 32, 64))])
def test_blocks_take_tile_after_tile(cluster: int, bands: int, sizes: tuple, few_multiprocessors: None,
                                     rng: np.random.Generator) -> None:
    """The ring goes on from one tile to the next; blocks of a cluster share B's tiles, of which the last may have no rows."""
    a, b, out = operands(sizes, "CFC", "f2", "f4", rng)
    for seed in (1, 2):
        out[...] = np.nan
        with gk.emulate(seed=seed):
            wgmma_ring((64, 16), 32, 2, cluster, bands)(a, b, out=out)
        assert error_of(out, a, b) < 1e-5


def test_drawn(few_multiprocessors: None) -> None:
    """Sizes, tiles, stages, clusters and orders."""
    rng = np.random.default_rng(5)
    for _ in range(6):
        cluster, k = int(rng.integers(1, 3)), int(rng.choice([16, 32, 64, 128]))
        block = int(rng.choice([64, 128])), int(rng.choice([16, 32, 64]))
        sizes = tuple(8 * int(x) for x in rng.integers(1, 25, 3))
        orders = "".join(rng.choice(["C", "F"], 3))
        case = block, k, int(rng.integers(2, 5)), cluster, 2 * int(rng.integers(1, 3))
        a, b, out = operands(sizes, orders, "f2", "f4", rng)                                  # type: ignore[arg-type]
        with gk.emulate(seed=int(rng.integers(1000))):
            wgmma_ring(*case)(a, b, out=out)
        assert error_of(out, a, b) < 1e-5, (case, sizes, orders)


# -- on a GPU -------------------------------------------------------------------------------------------------------------

def on_gpu(schedule: Any, arrays: list[np.ndarray]) -> np.ndarray:
    import cupy

    there = [cupy.asarray(np.ascontiguousarray(x if x.flags.c_contiguous else x.T)) for x in arrays]
    there = [x if y.flags.c_contiguous else x.T for x, y in zip(there, arrays)]
    schedule(there[0], there[1], out=there[2])
    return np.asarray(there[2].get())


@pytest.mark.gpu
@pytest.mark.sample(8)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("orders", ["CFC", "CCC", "FFC", "FCF"])
@pytest.mark.parametrize("sizes", [(2048, 1024, 512), (1000, 2056, 264), (8, 16, 8), (4096, 4096, 64)], ids=str)
def test_on_the_gpu(cluster: int, orders: str, sizes: tuple, rng: np.random.Generator) -> None:
    for result in ("f4", "f2"):
        arrays = operands(sizes, orders, "f2", result, rng)
        found = on_gpu(wgmma_ring(cluster=cluster), arrays)
        assert error_of(found, *arrays[:2]) < (1e-4 if result == "f4" else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "i1"])
def test_other_types_on_the_gpu(dtype: str, rng: np.random.Generator) -> None:
    arrays = operands((640, 768, 512), "CFC", dtype, "f4" if dtype == "f4" else "i4", rng)
    found = on_gpu(wgmma_ring((128, 128), 128 // np.dtype(dtype).itemsize, 4), arrays)
    assert error_of(found, *arrays[:2]) < (1e-2 if dtype == "f4" else 1e-9)


# -- compiled -------------------------------------------------------------------------------------------------------------

def lines_of_the_ring() -> int:
    text = source_of("gemmkit/specs/products.py")
    body = text[text.index("    m, n = block\n    steps = MatMul", text.index("def wgmma_ring")):]
    return sum(1 for line in body.splitlines() if line.strip())


def test_it_is_short() -> None:
    assert lines_of_the_ring() <= 12


@pytest.mark.compile
@pytest.mark.sample(2)
@pytest.mark.parametrize(("kinds", "cluster"), [((("f2", "row"), ("f2", "col"), ("f4", "row")), 2),
                                                ((("f2", "row"), ("f2", "row"), ("f2", "row")), 1)], ids=["f32", "f16"])
def test_machine_code(kinds: tuple, cluster: int) -> None:
    """A step is four wgmmas and one wait for the step before; a producer's loop asks for the copies."""
    code = wgmma_ring(cluster=cluster).compile(*kinds)
    assert (code.usage.spill_stores, code.usage.spill_loads, code.usage.stack_bytes) == (0, 0, 0)
    assert code.usage.registers <= 224 and not re.search(r"\bcall\b", code.ptx)
    text = disassemble(code.cubin)
    counts = instruction_counts(text)
    assert counts["HGMMA"] == 4 and counts["WARPGROUP"] == 3                                   # arrive, and two waits
    loop = steps_of(text)
    assert loop.count("HGMMA") == 4 and loop.count("WARPGROUP") == 2 and len(loop) < 90
    assert "UTMALDG" in main_loop(text) or counts["UTMALDG"] >= 2


def steps_of(text: str) -> list[str]:
    """The opcodes from the wait for a stage to the last branch of the loop that multiplies."""
    code = [found[1].split(".")[0] for line in text.splitlines()
            if (found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w[\w.]*)(.*?);", line))]
    first = code.index("HGMMA")
    start = max(n for n in range(first) if code[n] == "SYNCS")
    return code[start:code.index("BRA", max(n for n, name in enumerate(code) if name == "HGMMA")) + 1]


def test_explained() -> None:
    said = wgmma_ring().explain(("f2", "row"), ("f2", "row"), ("f4", "row"))
    assert ".split(64).stages(4), awaited and released by mbarriers" in said
    assert "[64,256].fp16.GL to fp16.SH, [(64,(64,4)):(64,(1,4096))], Swizzle((3, 56)), 4 stages, by cp.async.bulk.tensor" in said
    assert "4 x wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in said


# -- refused --------------------------------------------------------------------------------------------------------------

INIT, STORE = Init.tile(64, 64).to(Warpgroup).done, Move.tile(64, 64).to(Warpgroup).done
THREADS = Move.tile(1, 8).to(Thread).done


def begun(block: Any = None, stages: int = 2, memory: str = WR) -> Any:
    first = MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(128, 64).to(Block) if block is None else block
    return first.accumulate_in(memory, INIT, STORE).split(64).stages(stages)


def moved(steps: Any) -> Any:
    return steps.move(A, SH, Move.done).prefetch.move(B, SH, Move.done).prefetch


def ended(steps: Any) -> Any:
    return steps.tile(64, 64).to(Warpgroup).done


PLAIN = MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(128, 64).to(Block)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: ended(begun().move(A, SH, Move.done).prefetch), "the moves of A and B to SH follow"),
    (lambda: ended(begun().move(A, SH, THREADS).prefetch.move(B, SH, Move.done).prefetch), "TMA brings a tile in swizzled lines"),
    (lambda: ended(moved(begun(PLAIN.cluster(2)))), r"\.cluster\(2\): blocks that follow each other need tiles of neighbouring rows"),
    (lambda: ended(moved(begun(PLAIN.layout(Bands(3)).cluster(2)))), "Bands of a multiple of 2 rows"),
    (lambda: ended(moved(begun(stages=32))), "bytes of shared memory are needed"),
    (lambda: ended(moved(PLAIN.split(64).stages(2))), r"\.stages is of the \.split behind"),
    (lambda: moved(begun()).tile(32, 64).to(Warpgroup).done, "Init allocates 64 x 64 elements a Warpgroup, and the product has 2048"),
    (lambda: moved(begun()).tile(64, 32).to(Warp).done, "32 threads execute it, not 128"),
    (lambda: PLAIN.cluster(2).tile(1, 1).to(Thread).accumulate_in(RF, Init.done, Move.done).done, r"\.cluster is of a kernel whose"),
])
def test_schedules_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        make().explain(("f2", "row"), ("f2", "col"), ("f4", "row"))


@pytest.mark.parametrize(("make", "words"), [
    (lambda: begun(stages=1), r"\.stages\(1\): give a number of stages, 2 to 32"),
    (lambda: PLAIN.cluster(3), r"\.cluster\(3\): give 1 or 2"),
    (lambda: PLAIN.layout(Bands(0)), "bands are of 1 row"),
])
def test_steps_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        make()


@pytest.mark.parametrize(("kinds", "words"), [
    (("i1", "row", "row"), '"MN"; int8 is read K-major only'),
    (("f8", "row", "col"), "None|float64|wgmma"),
])
def test_types_that_wgmma_does_not_take(kinds: tuple, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        wgmma_ring((128, 64), 32, 2, 1).explain((kinds[0], kinds[1]), (kinds[0], kinds[2]), ("f4", "row"))


def test_a_gpu_without_wgmma(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    other = dataclasses.replace(run.device.H100, name="A100", arch=(8, 0))
    monkeypatch.setattr(run.device, "target", lambda ordinal=None: other)
    with gk.emulate(), pytest.raises(ScheduleError, match="TMA and wgmma are Hopper's, and A100 has not got them"):
        wgmma_ring()(*operands((64, 64, 64), "CFC", "f2", "f4", rng))


def test_arrays_that_tma_does_not_read(rng: np.random.Generator) -> None:
    a, b, out = operands((64, 64, 67), "CFC", "f2", "f4", rng)
    with gk.emulate(), pytest.raises(ValueError, match="a: TMA brings the tiles .* its stride along axis 0 is 134 bytes"):
        wgmma_ring((64, 64), 64, 2, 1)(a, b, out=out)
    assert np.isnan(out).all()
    assert ColMajor != RowMajor
