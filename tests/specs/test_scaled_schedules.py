"""What Fireiron's paper has besides its Listing 3: Listing 2, C with alpha and beta, quad-pairs, the share of data movement."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.specs import products
from gemmkit.specs.products import maxwell_optimized, multiply_adds, simple_wmma, tensor_cores, wgmma_ring
from gemmkit.specs.schedule import (
    GL,
    QP,
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
    QuadPair,
    ScheduleError,
    Thread,
    Warp,
)
from tests.support.code_lines import source_of
from tests.support.harness import aligned


def matrix(rng: np.random.Generator, shape: tuple[int, int], dtype: Any, order: str) -> np.ndarray:
    return aligned(np.asarray(rng.standard_normal(shape).astype(dtype), order=order))         # type: ignore[call-overload]


def poisoned(shape: tuple[int, int], dtype: Any, order: str) -> np.ndarray:
    return aligned(np.asarray(np.full(shape, np.nan, dtype), order=order))                    # type: ignore[call-overload]


def emulated(schedule: Any, a: Any, b: Any, out: Any, **how: Any) -> np.ndarray:
    with gk.emulate(seed=2):
        assert schedule(a, b, out=out, **how) is out
    return np.asarray(out)


def on_gpu(schedule: Any, a: Any, b: Any, out: Any, **how: Any) -> np.ndarray:
    import cupy

    def there(x: Any) -> Any:
        return cupy.asarray(np.ascontiguousarray(x)) if x.flags.c_contiguous else cupy.asarray(np.ascontiguousarray(x.T)).T

    of_out = there(out)
    given = {name: (of_out if x is out else there(x)) if isinstance(x, np.ndarray) else x for name, x in how.items()}
    schedule(there(a), there(b), out=of_out, **given)
    return np.asarray(of_out.get())


RUNS = pytest.mark.parametrize("run", [emulated, pytest.param(on_gpu, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])

# ==========================================================================================================================
# Listing 2: wmma.load from global memory.


@RUNS
@pytest.mark.parametrize("orders", ["CFC", "CCC", "FFF", "FCC"])
def test_listing_2(run: Any, orders: str, rng: np.random.Generator) -> None:
    a, b = matrix(rng, (64, 48), "f2", orders[0]), matrix(rng, (48, 128), "f2", orders[1])
    found = run(simple_wmma, a, b, poisoned((64, 128), "f4", orders[2]))
    np.testing.assert_allclose(found, a.astype(float) @ b.astype(float), atol=5e-5)


@pytest.mark.compile
def test_listing_2_compiled() -> None:
    code = simple_wmma.compile(("f2", "row"), ("f2", "col"), ("f4", "row"))
    assert code.usage.spill_stores == code.usage.stack_bytes == 0
    assert re.search(r"wmma\.load\.a\.sync\.aligned\.row\.m16n16k16\.global", code.ptx) and "shared" not in code.ptx
    assert "HMMA" in instruction_counts(disassemble(code.cubin))


@pytest.mark.parametrize(("sizes", "words"), [((64, 40), "tiles reach over the matrix's edge, and wmma loads whole ones"),
                                              ((64, 68), "global memory is aligned to 8 bytes, not 16")])
def test_listing_2_knows_no_edges(sizes: tuple, words: str) -> None:
    with gk.emulate(), pytest.raises(ScheduleError, match=words):
        simple_wmma(np.zeros(sizes, "f2"), np.zeros((sizes[1], 64), "f2"))


# ==========================================================================================================================
# D = alpha A B + beta C.

MAXWELL = multiply_adds()
SCHEDULES = {
    "scalar": (products.scalar, "f4", "f4", (40, 33, 9)), "shared": (products.shared_tile, "f4", "f4", (40, 33, 16)),
    "registers": (products.registers, "f4", "f4", (64, 32, 8)), "wmma": (tensor_cores((32, 32), 32, (16, 16)), "f2", "f4", (40, 32, 32)),
    "ring": (wgmma_ring((64, 64), 64, 2, 1), "f2", "f4", (72, 64, 64)), "ring to f16": (wgmma_ring((64, 64), 64, 2, 2), "f2", "f2", (200, 72, 64)),
}


@RUNS
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("alpha", "beta", "order"), [(1, 1, "C"), (-0.5, 2.5, "F"), (2, 0, "C"), (0, 1, "C")])
def test_c(run: Any, name: str, alpha: float, beta: float, order: str, rng: np.random.Generator) -> None:
    """C in its own order; with a beta of 0 it is not read."""
    schedule, dtype, result, (m, n, k) = SCHEDULES[name]
    a, b, c = matrix(rng, (m, k), dtype, "C"), matrix(rng, (k, n), dtype, "F"), matrix(rng, (m, n), "f4", order)
    wanted = alpha * (a.astype(float) @ b.astype(float)) + beta * c
    if beta == 0:
        c[...] = np.nan
    found = run(schedule, a, b, poisoned((m, n), result, "C"), c=c, alpha=alpha, beta=beta)
    np.testing.assert_allclose(found.astype(float), wanted, atol=2e-4 if result == "f4" else 0.05)


@RUNS
def test_c_in_place(run: Any, rng: np.random.Generator) -> None:
    a, b, c = matrix(rng, (40, 16), "f4", "C"), matrix(rng, (16, 33), "f4", "C"), matrix(rng, (40, 33), "f4", "C")
    wanted = 2 * (a.astype(float) @ b) - 3 * c.astype(float)
    np.testing.assert_allclose(run(products.shared_tile, a, b, c, c=c, alpha=2, beta=-3), wanted, atol=1e-4)


def test_integers(rng: np.random.Generator) -> None:
    a, b = (aligned(np.asarray(rng.integers(-100, 100, (64, 64)).astype("i1"), order=order)) for order in "CF")   # type: ignore[call-overload]
    c, out = aligned(rng.integers(-1000, 1000, (64, 64)).astype("i4")), aligned(np.full((64, 64), 113, "i4"))
    found = emulated(wgmma_ring((64, 64), 64, 2, 1), a, b, out, c=c, alpha=3, beta=-2)
    np.testing.assert_array_equal(found, 3 * (a.astype(int) @ b.astype(int)) - 2 * c)


@pytest.mark.compile
@pytest.mark.sample(2)
def test_scaled_code() -> None:
    """Alpha and beta are arguments: another value compiles nothing; C is read 16 bytes at a time, as it is stored."""
    a, b = np.zeros((128, 8), "f4", order="F"), np.zeros((8, 128), "f4", order="F")
    c, out = np.zeros((128, 128), "f4", order="F"), np.zeros((128, 128), "f4", order="F")
    a, b, c, out = map(aligned, (a, b, c, out))
    (one,), (other,) = (recorded(lambda alpha=alpha: MAXWELL(a, b, out=out, c=c, alpha=alpha, beta=3)) for alpha in (2, 4))
    entry = one.launchable.entry()
    assert other.launchable.entry().cubin == entry.cubin and one.launchable.values != other.launchable.values
    assert entry.meta["usage"]["spill_stores"] == entry.meta["usage"]["stack_bytes"] == 0
    counts = instruction_counts(disassemble(entry.cubin), full=True)
    assert sum(n for name, n in counts.items() if name.startswith("STG.E.128")) == 16
    assert sum(n for name, n in counts.items() if name.startswith("LDG.E.128")) == 17         # one of them is of A
    ring = recorded(lambda: wgmma_ring()(aligned(np.zeros((128, 64), "f2")), aligned(np.zeros((64, 256), "f2")), c=aligned(
        np.zeros((128, 256), "f4")), beta=0.5))
    usage = ring[0].launchable.entry().meta["usage"]
    assert usage["spill_stores"] == 0 and usage["registers"] <= 224


@pytest.mark.parametrize(("how", "error", "words"), [
    (dict(c=np.zeros((4, 4), "f4")), ValueError, r"c is of shape \(4, 4\); the product is 16 x 16"),
    (dict(c=np.zeros((16, 16), "i4")), TypeError, "c has dtype int32 and out has float32"),
    (dict(alpha="2"), TypeError, "alpha is '2'; give a number"),
    (dict(c=np.zeros((16, 16), "f4"), beta=None), TypeError, "beta is None"),
    (dict(alpha=True), TypeError, "alpha is True"),
])
def test_what_is_refused(how: dict, error: type, words: str) -> None:
    a = np.ones((16, 16), "f4")
    with gk.emulate(), pytest.raises(error, match=words):
        products.scalar(a, a.copy(), **how)


def test_c_that_overlaps() -> None:
    whole, a = np.zeros((17, 16), "f4"), np.ones((16, 16), "f4")
    with gk.emulate(), pytest.raises(ValueError, match="out overlaps c; give the same array, or memory of its own"):
        products.scalar(a, a.copy(), out=whole[:16], c=whole[1:])


@pytest.mark.parametrize("schedule", [maxwell_optimized, simple_wmma], ids=["micro-kernel", "wmma"])
def test_stores_that_do_not_scale(schedule: Any) -> None:
    dtype = "f4" if schedule is maxwell_optimized else "f2"
    a, b = (np.zeros((128, 128), dtype, order="F") for _ in "ab")
    with gk.emulate(), pytest.raises(ScheduleError, match="alpha, beta and c need a Move|wmma stores sums as they are"):
        schedule(a, b, out=np.zeros((128, 128), "f4", order="F"), alpha=2)


# ==========================================================================================================================
# Quad-pairs (section 4.2, Fig. 8): mma.m8n8k4, whose fragments are strided or not.


def by_quad_pairs(tile: tuple) -> Any:
    def shared_out(of: Any) -> Any:
        return of.tile(16, 16).to(Warp).tile(*tile).to(QuadPair).layout(ColMajor).done

    return (MatMul(M, N, K)(GL, GL, GL)(Kernel)
        .tile(32, 32).to(Block)
        .accumulate_in(QP, shared_out(Init), shared_out(Move))
        .split(16).sync
        .move(A, SH, Move.tile(1, 4).to(Thread).done).pad(4).no_sync
        .move(B, SH, Move.tile(4, 1).to(Thread).layout(ColMajor).done).pad(4)
        .tile(16, 16).to(Warp)
        .tile(*tile).to(QuadPair).layout(ColMajor)
        .split(4).unroll
        .move(A, QP, Move.done)
        .move(B, QP, Move.done)
        .done)


TILES = [(8, 8), ((4, 8), (2, 4)), ((2, 4), 8)]


@RUNS
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("sizes", [(32, 32, 32), (40, 33, 20)], ids=str)
def test_quad_pairs(run: Any, tile: tuple, sizes: tuple, rng: np.random.Generator) -> None:
    m, n, k = sizes
    a, b = matrix(rng, (m, k), "f2", "C"), matrix(rng, (k, n), "f2", "F")
    found = run(by_quad_pairs(tile), a, b, poisoned((m, n), "f4", "C"))
    np.testing.assert_allclose(found, a.astype(float) @ b.astype(float), atol=5e-5)


@pytest.mark.compile
def test_quad_pairs_compiled() -> None:
    code = by_quad_pairs((8, 8)).compile(("f2", "row"), ("f2", "col"), ("f4", "row"))
    assert code.usage.spill_stores == code.usage.stack_bytes == 0
    assert code.ptx.count("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32") == 4


@pytest.mark.parametrize(("types", "words"), [
    ((("f4", "row"), ("f4", "row"), ("f4", "row")), "mma.m8n8k4 multiplies float16 and adds up float32, not float32"),
    ((("f2", "row"), ("f2", "col"), ("f2", "row")), "mma.m8n8k4 multiplies float16 and adds up float32, not float16 and float16"),
])
def test_quad_pairs_of_other_types(types: tuple, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        by_quad_pairs((8, 8)).explain(*types)


def test_quad_pairs_of_other_tiles() -> None:
    with pytest.raises(ScheduleError, match="are not whole fragments of 8 x 8|tiles for"):
        by_quad_pairs((4, 16)).explain(("f2", "row"), ("f2", "col"), ("f4", "row"))


# ==========================================================================================================================
# Hypothesis A (Table 2): the lines of a schedule that are about data movement: 81.8 % and 76.9 % in the paper. These are
# `.move` and `.accumulate_in` with the Moves in them, and barriers and padding behind them.


def movement(name: str) -> tuple[int, int]:
    """(lines about data movement, all lines) of a listing in gemmkit/specs/products.py."""
    text = source_of("gemmkit/specs/products.py")
    tree = ast.parse(text)
    node = next(x for x in tree.body if isinstance(x, ast.Assign) and getattr(x.targets[0], "id", "") == name)
    code = {n for n in range(node.lineno, node.end_lineno + 1)                               # type: ignore[operator]
            if not text.splitlines()[n - 1].strip().startswith("#")}
    found: set[int] = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("move", "accumulate_in"):
            begin = call.func.end_lineno
            first = call.args[1].lineno if call.func.attr == "accumulate_in" else None
            skipped = range(first, call.args[2].lineno) if first is not None else range(0)   # the Init is no movement
            found |= {n for n in range(begin, call.end_lineno + 1) if n not in skipped} | {begin}   # type: ignore[operator]
        if isinstance(call, ast.Attribute) and call.attr in ("sync", "no_sync"):
            found.add(call.end_lineno)                                                       # type: ignore[arg-type]
    return len(found & code), len(code)


def test_most_lines_move_data() -> None:
    assert movement("cuda_wmma_sample") == (19, 26)
    moving, lines = movement("maxwell_optimized")
    micro = 43 - lines                                        # the micro-kernel of the epilogue and its swizzle move data
    assert 0.7 < (moving + micro) / 43 < 0.9
