"""Products that are computed as D^T = B^T A^T: because B is the operand that something is done to, or because D has few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.emulator import errors
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.sm90.mainloop import MnMajorTf32, RegisterMainloop
from gemmkit.operators import WGMMAOp
from gemmkit.plans.ahead import recorded
from gemmkit.ptx.mma import rounded_to_tf32, truncated_to_tf32
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning import choose, sm90, tables
from tests.support.banks import conflicts
from tests.support.banks import recorded as accesses
from tests.support.machines import BF16, on_machines, poison
from tests.support.patches import Seeded

# ==========================================================================================================================
# Products that Hopper's kernel computes as D^T = B^T A^T because B is the operand that something is done to: float32 as tf32 by
# rows, and transforms of B. Nothing of that is seen by the caller.

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
ORDERS = ["nn", "nt", "tn", "tt"]
TF32 = WGMMAOp(32, dtype=F32)


def stored(x: np.ndarray, order: str) -> np.ndarray:
    """A view of ``x`` with lines of a multiple of 16 bytes, by rows ("n") or by columns ("t")."""
    line, (rows, columns) = 16 // x.dtype.itemsize, x.shape
    across = order == "t"
    wide = np.zeros((-(-rows // line) * line if across else rows, columns if across else -(-columns // line) * line), x.dtype,
                    order="F" if across else "C")
    wide[:rows, :columns] = x
    return wide


def few(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    return rng.integers(-2, 3, shape).astype(dtype)


def multiplied(machine: Any, a: np.ndarray, b: np.ndarray, order: str, out: np.ndarray | None = None,
               **keywords: Any) -> tuple[np.ndarray, Any]:
    """D, poisoned before, and the plan."""
    M, N = len(a), b.shape[1]
    given = [machine.array(stored(x, o))[:x.shape[0], :x.shape[1]] for x, o in zip((a, b), order)]
    d = machine.array(poison((M, N), a.dtype) if out is None else out)
    with machine.session():
        made = gk.plan(*given, out=d, **keywords)
        made(*given, out=d)
    return machine.numpy(d), made


def is_swapped(made: Any) -> bool:
    swapped = made._compiled.problem.swap_ab
    assert not swapped or isinstance(made._compiled.spec.mainloop, RegisterMainloop)
    return bool(swapped)


# -- float32, as tf32 -------------------------------------------------------------------------------------------------------

SIZES = [(70, 72, 40), (3, 64, 33), (65, 67, 31), (130, 36, 72)]


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tf32(machine: Any, size: tuple[int, int, int], order: str, rng: np.random.Generator) -> None:
    """By rows it is swapped; A by columns comes through registers as it is; of both B is transposed."""
    M, N, K = size
    a, b = few(rng, (M, K), F32), few(rng, (K, N), F32)
    d, made = multiplied(machine, a, b, order, operator=TF32)
    assert np.array_equal(d, a @ b)
    assert is_swapped(made) == (order == "nn")
    assert isinstance(getattr(made._compiled.spec.mainloop, "source", None), MnMajorTf32) == (order != "nt")


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("order", ["nn", "tt"])
def test_what_comes_through_registers_is_rounded(machine: Any, order: str, rng: np.random.Generator) -> None:
    """The other operand is cut off by the tensor cores."""
    a, b = (rng.standard_normal(shape).astype(F32) for shape in ((68, 40), (40, 36)))
    d, _ = multiplied(machine, a, b, order, operator=TF32)
    a_seen, b_seen = (truncated_to_tf32, rounded_to_tf32) if order == "nn" else (rounded_to_tf32, truncated_to_tf32)
    assert np.allclose(d, a_seen(a).astype(F64) @ b_seen(b), rtol=0, atol=2e-5)


@pytest.mark.kin(5)
@on_machines
def test_what_is_no_number_stays_none(machine: Any) -> None:
    """A NaN with all bits of the mantissa set, whose rounding would carry into the sign; infinities, and what rounds to one."""
    a, b = np.ones((68, 40), F32), np.ones((40, 36), F32)
    b[3, 5] = np.uint32(0x7FFFFFFF).view(F32)
    b[7, 8], b[9, 11], b[39, 35] = np.inf, -np.inf, np.finfo(F32).max
    d, made = multiplied(machine, a, b, "nn", operator=TF32)
    assert is_swapped(made) and np.isnan(d[:, 5]).all()
    assert (d[:, 8] == np.inf).all() and (d[:, 11] == -np.inf).all() and (d[:, 35] == np.inf).all()
    assert (np.delete(d, (5, 8, 11, 35), axis=1) == 40).all()


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("order", ["nn", "tn"])
def test_tf32_with_a_transform_and_an_epilogue(machine: Any, order: str, rng: np.random.Generator) -> None:
    """The transform sees coordinates of B, the epilogue those of D; nothing is made of what lies beyond K."""
    M, N, K = 70, 41, 37
    a, b = few(rng, (M, K), F32), few(rng, (K, N), F32)
    bias = rng.integers(-3, 4, N).astype(F32)
    k, n, m = np.arange(K)[:, None], np.arange(N), np.arange(M)[:, None]
    d, made = multiplied(machine, a, b, order, operator=TF32,
                         transform_global_to_shared_b=Map(lambda x, k, n: 2 * x + k % 3 - n % 5 + 1),
                         epilogue=Bias(machine.array(bias)) | epilogues.Elementwise(lambda x, m, n: x + 2 * m - n))
    assert np.array_equal(d, a @ (2 * b + k % 3 - n % 5 + 1) + bias + 2 * m - n)
    assert is_swapped(made) == (order == "nn")


@pytest.mark.kin(5)
@on_machines
@pytest.mark.usefixtures("always_wide")
def test_functions_of_large_results_get_wide_coordinates(machine: Any, rng: np.random.Generator) -> None:
    """Of 2^31 elements; here every size counts as such. A place that is computed does not fit 32 bits."""

    M, N, K = 70, 41, 37
    a, b = few(rng, (M, K), F32), few(rng, (K, N), F32)
    k, m = np.arange(K)[:, None], np.arange(M)[:, None]
    d, made = multiplied(machine, a, b, "nn", operator=TF32,
                         transform_global_to_shared_b=Map(lambda x, k, n: x + (k * 3_000_000_000 + n) // 3_000_000_000),
                         epilogue=ReLU() | epilogues.Elementwise(lambda x, m, n: x + (m * 3_000_000_000 + n) // 3_000_000_000))
    assert np.array_equal(d, (a @ (b + k)).clip(0) + m) and is_swapped(made)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows, depth", [(64, 32), (128, 32), (256, 32), (128, 64), (64, 16), (64, 8)], ids=str)
def test_fragments_meet_in_no_bank(rows: int, depth: int, rng: np.random.Generator) -> None:
    """All 32 words that a warp loads of A at a time lie in 32 banks."""
    a, b = few(rng, (rows, depth), F32), few(rng, (depth, 32), F32)
    conf = gk.get_config(operator=TF32, block_shape=Tile(M=rows, N=32, K=depth), warps_per_block=4, schedule="cooperative",
                         global_a_layout=gk.layouts.ColMajor(F32), global_b_layout=gk.layouts.ColMajor(F32),
                         global_d_layout=gk.layouts.ColMajor(F32), stages=2)
    with gk.emulate(), accesses() as seen:
        d = gk.matmul(np.asfortranarray(a), np.asfortranarray(b), conf=conf)
    assert np.array_equal(d, a @ b)
    assert seen.loads and conflicts(seen.loads) == 0
    assert seen.stores and conflicts(seen.stores) == 0             # D by columns


# -- transforms of B --------------------------------------------------------------------------------------------------------

TRANSFORMS: dict[str, Any] = {
    "plus one": lambda c, r: (lambda x: x + 1, lambda b, k, n: b + 1),
    "relu": lambda c, r: (lambda x: max(x, 0), lambda b, k, n: b.clip(0)),
    "coordinates": lambda c, r: (lambda x, k, n: x + k % 3 - n % 2, lambda b, k, n: b + k % 3 - n % 2),
    "captured": lambda c, r: (lambda x, k, n: x * c[n] + r[k], lambda b, k, n: b * c + r[:, None]),
}


@pytest.mark.kin(5)
@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("order, dtype", [*((order, F16) for order in ORDERS), ("nn", BF16)], ids=str)
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_of_b(machine: Any, kind: str, order: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    M, N, K = 75, 41, 67
    a, b = few(rng, (M, K), dtype), few(rng, (K, N), dtype)
    c, r = rng.integers(1, 4, N).astype(F32), rng.integers(-2, 3, K).astype(F32)
    function, _ = TRANSFORMS[kind](machine.array(c), machine.array(r))
    _, expected = TRANSFORMS[kind](c, r)
    d, made = multiplied(machine, a, b, order, transform_global_to_shared_b=Map(function))
    want = a.astype(F64) @ expected(b.astype(F64), np.arange(K)[:, None], np.arange(N))
    assert is_swapped(made) and np.array_equal(d.astype(F64), want.astype(dtype).astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("order", ["C", "F"])
def test_both_transforms_and_an_epilogue(machine: Any, order: str, rng: np.random.Generator) -> None:
    """Of B on its way to shared memory and behind it; D by rows and by columns, in lines of its own length."""
    M, N, K = 72, 48, 40
    a, b = few(rng, (M, K), F16), few(rng, (K, N), F16)
    rows = rng.integers(-3, 4, M).astype(F32)
    d, made = multiplied(machine, a, b, "nn", poison((M, N), F16, order), epilogue=Bias(machine.array(rows), along="M") | ReLU(),
                         transform_global_to_shared_b=Map(lambda x: x + 1),
                         transform_shared_to_regs_b=Map(lambda x, k, n: x - n % 2))
    want = (a.astype(F64) @ (b.astype(F64) + 1 - np.arange(N) % 2) + rows[:, None]).clip(0)
    assert is_swapped(made) and np.array_equal(d.astype(F64), want.astype(F16).astype(F64))


@pytest.mark.kin(5)
def test_other_arrays_of_a_transform() -> None:
    """A captured array is a value of the launch, found by the caller's field; messages name that field, too."""
    a, b, rng = np.ones((72, 64), F16), np.ones((64, 48), F16), np.random.default_rng(0)
    results = []
    with gk.emulate():
        for factor in (np.full(48, 2, F32), rng.integers(1, 5, 48).astype(F32)):
            d = gk.matmul(a, b, transform_global_to_shared_b=by_columns(factor))
            results.append(np.array_equal(d.astype(F64), np.broadcast_to(64.0 * factor, (72, 48))))
        made = gk.plan(a, b, transform_global_to_shared_b=by_columns(np.ones(48, F32)))
        out = np.zeros((72, 48), F16)
        with pytest.raises(ValueError, match="factor, captured by"):
            gk.matmul(a, b, out=out, transform_global_to_shared_b=by_columns(out.view(F32)[0]))
    assert results == [True, True] and is_swapped(made)
    held = made.ranges["transform_global_to_shared_b"]
    assert held.stop > held.start and made.ranges["transform_global_to_shared_a"].stop == made.ranges[
        "transform_global_to_shared_a"].start
    assert [field for field, _ in made._held] == ["transform_global_to_shared_b"]
    made.forget_arrays({"transform_global_to_shared_b"})


def by_columns(factor: np.ndarray) -> Map:
    return Map(lambda x, k, n: x * factor[n])


# -- which products ---------------------------------------------------------------------------------------------------------

PLUS = Map(lambda x: x + 1)


def chosen(order: str, dtype: Any, size: tuple[int, int, int], **keywords: Any) -> Any:
    """What is resolved on an H100."""
    M, N, K = size
    a, b = (np.empty(shape, dtype, order="F" if o == "t" else "C") for shape, o in zip(((M, K), (K, N)), order))
    return recorded(lambda: gk.matmul(a, b, **keywords), H100, zeros=False)[0].problem


@pytest.mark.parametrize("order", ORDERS)
def test_the_measured_mappings(order: str) -> None:
    tf32 = chosen(order, F32, (4096, 4096, 4096), operator=WGMMAOp(256, dtype=F32))
    assert tf32.swap_ab == (order == "nn")
    assert tf32.config.block_shape.size[:2] == (128, 256) or order == "tn"
    narrow = chosen(order, F32, (4096, 4096, 4096), operator=WGMMAOp(128, dtype=F32))
    assert narrow.swap_ab == (order == "nn")
    changed = chosen(order, F16, (4096, 4096, 4096), transform_global_to_shared_b=PLUS)
    assert changed.swap_ab and changed.config.block_shape.size[:2] == (128, 256)
    assert changed.computed.M == 4096 and changed.config.transform_global_to_shared_a == PLUS
    assert changed.config.transform_global_to_shared_b.is_identity


AS_THEY_ARE: dict[str, Any] = {
    "nothing is transformed": lambda: {},
    "A too": lambda: dict(transform_global_to_shared_b=PLUS, transform_global_to_shared_a=PLUS),
    "A alone": lambda: dict(transform_global_to_shared_a=PLUS),
    "of D": lambda: dict(transform_global_to_shared_b=PLUS, transform_regs_to_shared_d=PLUS),
    "by batch": lambda: dict(transform_global_to_shared_b=Map(lambda x, k, n, batch: x + batch)),
    "a residual": lambda: dict(transform_global_to_shared_b=PLUS, epilogue=epilogues.Residual(np.zeros((256, 256), F16))),
    "an output": lambda: dict(transform_global_to_shared_b=PLUS, epilogue=epilogues.Store(np.zeros((256, 256), F16))),
    "sums of rows": lambda: dict(transform_global_to_shared_b=PLUS,
                                 epilogue=epilogues.RowReduce(np.zeros(256, F32), "sum")),
    "an observer": lambda: dict(observe_a=gk.observers.OperandRowSum(np.zeros(256, F32))),
    "an operator": lambda: dict(transform_global_to_shared_b=PLUS, operator=WGMMAOp(128)),
    "a layout": lambda: dict(transform_global_to_shared_b=PLUS, global_a_layout=gk.layouts.Triangular(
        gk.layouts.RowMajor(F16), "lower")),
}


@pytest.mark.parametrize("why", AS_THEY_ARE)
def test_what_is_computed_as_it_is(why: str) -> None:
    assert not chosen("nn", F16, (256, 256, 256), **AS_THEY_ARE[why]()).swap_ab


def test_arrays_that_are_computed_as_they_are() -> None:
    a, b, c = (np.zeros((256, 256), F16) for _ in "abc")

    def swapped(*operands: Any, **keywords: Any) -> bool:
        return bool(recorded(lambda: gk.matmul(*operands, **keywords), H100)[0].problem.swap_ab)

    changed = dict(transform_global_to_shared_b=PLUS)
    assert swapped(a, b, **changed)
    assert not swapped(a, b, c, **changed)                             # C
    assert not swapped(a[:64], b, **changed)                           # rows of one tile
    assert not swapped(a[:, 1:], b[1:], **changed)                     # TMA does not take A
    assert not swapped(np.stack([a, a]), b, **changed)                 # a stack
    with pytest.raises(ValueError, match="b has shape"):
        swapped(a, b[:100], **changed)
    conf = gk.get_config(operator=WGMMAOp(128, dtype=F32), global_a_layout=gk.layouts.RowMajor(F32))
    x = np.zeros((256, 256), F32)
    assert not swapped(x, x, conf=conf)                                # a configuration is taken as it is given


@pytest.mark.gpu
@pytest.mark.sample(24)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [(1024, 768, 1000), (333, 1100, 515), (65, 4096, 2048), (4096, 4096, 512)], ids=str)
def test_on_a_gpu(kind: str, size: tuple[int, int, int], order: str) -> None:
    torch = pytest.importorskip("torch")
    M, N, K = size
    dtype = getattr(torch, "float32" if kind == "tf32" else kind)

    def matrix(rows: int, columns: int, o: str) -> Any:
        wide = torch.randint(-2, 3, (columns, -(-rows // 8) * 8) if o == "t" else (rows, -(-columns // 8) * 8), device="cuda")
        return (wide.T if o == "t" else wide).to(dtype)[:rows, :columns]

    a, b = matrix(M, K, order[0]), matrix(K, N, order[1])
    bias, out = torch.randint(-9, 10, (N,), device="cuda").to(dtype), torch.full((M, N), float("nan"), dtype=dtype, device="cuda")
    fields: dict[str, Any] = dict(operator=WGMMAOp(256, dtype=F32)) if kind == "tf32" else {}
    k, n = torch.arange(K, device="cuda")[:, None], torch.arange(N, device="cuda")
    for function, wide in ((lambda x: x + 1, b.double() + 1), (lambda x, k, n: x - k % 2 + n % 3, b.double() - k % 2 + n % 3)):
        out.fill_(float("nan"))
        gk.matmul(a, b, out=out, transform_global_to_shared_b=Map(function), epilogue=Bias(bias) | ReLU(), **fields)
        assert torch.equal(out.double(), (a.double() @ wide + bias.double()).clip(0).to(dtype).double())


# ==========================================================================================================================
# Products of a few rows on Hopper: the kernel computes the transpose, and nothing of that is seen by the caller.


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the emulator computes in a second."""
    monkeypatch.setattr(choose, "LEAST", 128)


def operands(M: int, N: int, K: int, order: str, dtype: Any = F16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(M * N + K)
    a, b = (rng.integers(-2, 3, shape).astype(dtype) for shape in ((M, K), (K, N)))
    return tuple(np.asfortranarray(x) if o == "t" else x for x, o in zip((a, b), order))           # type: ignore[return-value]


def made_for(sizes: tuple[int, int, int], order: str) -> Any:
    """What is compiled on an H100 for a product of float16 of these sizes."""
    M, N, K = sizes
    a, b = (np.empty(shape[::-1], F16).T if o == "t" else np.empty(shape, F16) for shape, o in zip(((M, K), (K, N)), order))
    [made] = recorded(lambda: gk.matmul(a, b), H100)
    return made.problem


def nans(M: int, N: int, dtype: Any = F16, order: str = "C") -> np.ndarray:
    return np.full((M, N), np.nan, dtype, order)                                                    # type: ignore[call-overload]


def on_a_gpu(M: int, N: int, K: int, order: str, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """PyTorch, its dtype, and operands as `operands` has them."""
    torch = pytest.importorskip("torch")
    kind = torch.float16 if dtype == F16 else torch.bfloat16
    a, b = (torch.randint(-2, 3, shape[::-1] if o == "t" else shape, device="cuda").to(kind)
            for shape, o in zip(((M, K), (K, N)), order))
    return torch, kind, *(x.T if o == "t" else x for x, o in zip((a, b), order))           # type: ignore[return-value]


CASES = [(1, 128, 128, "nt"), (3, 128, 200, "nn"), (8, 136, 192, "tt"), (17, 140, 136, "nt"), (32, 128, 136, "tn"),
         (33, 129, 128, "nt"), (64, 128, 144, "nn"), (2, 131, 257, "nn"), (36, 2180, 136, "nt"), (44, 4288, 128, "nn")]


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("M, N, K, order", CASES)
def test_against_numpy(M: int, N: int, K: int, order: str) -> None:
    a, b = operands(M, N, K, order)
    expected, out = a.astype(F64) @ b.astype(F64), nans(M, N)
    with gk.emulate():
        assert gk.matmul(a, b, out=out) is out
    assert np.array_equal(out.astype(F64), expected)


def test_which_problem_is_computed() -> None:
    a, b = operands(5, 1024, 1024, "nt")
    with gk.emulate():
        made = gk.plan(a, b)
    assert made.shape == (5, 1024, 1024) and "5 x 1024 x 1024" in repr(made)
    computed = made._compiled.computed
    assert (computed.M, computed.N, computed.K) == (1024, 5, 1024)
    assert computed.a.strides == (1024, 1) and computed.out is None and made._compiled.order[:2] == (1, 0)
    assert made.config.kernel == "warp_specialised" and made.config.block_shape.size.M == choose.ROWS


@pytest.mark.parametrize("M, N, K, why", [
    (257, 4096, 4096, "rows"), (33, 8192, 4096, "A across K"), (49, 8192, 4096, "no padding"), (8, 1016, 4096, "few columns"), (8, 4096, 1016, "a short K"),
    (0, 4096, 4096, "nothing")])
def test_sizes_that_are_computed_as_they_are(M: int, N: int, K: int, why: str) -> None:
    a, b = np.empty((M, K), F16, order="F" if "across" in why else "C"), np.empty((K, N), F16)
    with gk.emulate():
        assert not gk.plan(a, b)._compiled.problem.swap_ab, why


@pytest.mark.parametrize("sizes, order, width, splits", [
    ((20, 4096, 4096), "nt", 32, 2), ((36, 4096, 4096), "nt", 48, 2), ((40, 4096, 4096), "tt", 64, 2), ((33, 1024, 4096), "nn", 64, 8),
    ((36, 28672, 4096), "nt", 48, 1), ((48, 11168, 2368), "nn", 48, 1), ((32, 8192, 1024), "nt", 32, 2)])
def test_few_rows_have_tiles_of_their_width(sizes: tuple[int, int, int], order: str, width: int, splits: int) -> None:
    conf = made_for(sizes, order).config
    assert (conf.block_shape.size.M, conf.block_shape.size.N, conf.splits) == (choose.ROWS, width, splits)


# Products of a few columns and many rows.

@pytest.mark.parametrize("sizes, order, width, splits", [((9059, 64, 3824), "nt", 160, 2), ((4608, 64, 11200), "tt", 160, 4),
                                                         ((8000, 32, 6048), "tn", None, 1), ((9059, 65, 3824), "nt", None, 1),
                                                         ((4000, 64, 3824), "nt", None, 1), ((9059, 64, 2000), "nt", None, 1)])
def test_a_few_columns_fill_the_multiprocessors(sizes: tuple[int, int, int], order: str, width: int | None, splits: int) -> None:
    problem = made_for(sizes, order)
    assert problem.swap_ab == (width is not None)
    assert width is None or (problem.config.block_shape.size.N, problem.config.splits) == (width, splits)


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@pytest.mark.parametrize("M, N, K, order", [(200, 64, 136, "nt"), (333, 24, 264, "tt"), (140, 7, 128, "tn"), (130, 33, 200, "nn")])
def test_a_few_columns_against_numpy(M: int, N: int, K: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "WIDE", 128)
    monkeypatch.setattr(choose, "LONG_K", 128)
    (a, b), bias = operands(M, N, K, order), np.arange(N) % 5 - 2.0
    if N % 8 and order[1] == "n":                              # rows that TMA takes begin at multiples of 16 bytes
        b = np.pad(b, ((0, 0), (0, 8 - N % 8)))[:, :N]
    if M % 8 and order[0] == "t":
        a = np.asfortranarray(np.pad(a, ((0, 8 - M % 8), (0, 0))))[:M]
    expected, out = np.maximum(a.astype(F64) @ b.astype(F64) + bias, 0), nans(M, N + 5)[:, 2:-3]
    with gk.emulate():
        assert gk.plan(a, b, out=out, epilogue=epilogues.Bias(bias) | ReLU())._compiled.problem.swap_ab
        gk.matmul(a, b, out=out, epilogue=epilogues.Bias(bias) | ReLU())
    assert np.array_equal(out.astype(F64), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("M, N, K, order", [(9059, 64, 3824, "nt"), (4608, 64, 2208, "tt"), (4608, 8, 2208, "tn"), (9000, 40, 2056, "nn")])
def test_a_few_columns_on_a_gpu(M: int, N: int, K: int, order: str) -> None:
    torch, _, a, b = on_a_gpu(M, N, K, order, F16)
    bias, out = torch.randint(-9, 10, (N,), device="cuda").half(), torch.full((M, N), float("nan"), device="cuda").half()
    gk.matmul(a, b, out=out, epilogue=Bias(bias) | ReLU())
    assert torch.equal(out.double(), (a.double() @ b.double() + bias.double()).clip(0).half().double())


# Products of some rows, or of some columns: tiles are as wide as these, or as half of them.

@pytest.mark.parametrize("sizes, order, is_swapped, tile, cluster, splits", [
    ((144, 4096, 4096), "nt", True, (64, 80), (1, 2), 1), ((144, 14336, 4096), "nn", True, (128, 144), (1, 1), 1),
    ((176, 4096, 14336), "nt", True, (64, 176), (1, 1), 2), ((4096, 144, 4096), "nt", False, (64, 80), (1, 2), 1),
    ((144, 4096, 4096), "tn", False, None, None, None), ((4096, 144, 4096), "nn", False, None, None, None),
    ((128, 28672, 4096), "nt", False, (128, 224), (1, 1), 1), ((144, 4096, 4100), "nt", False, None, None, None)])
def test_some_rows_or_columns_have_tiles_of_their_width(sizes: tuple[int, int, int], order: str, is_swapped: bool, tile: Any,
                                                        cluster: Any, splits: int | None) -> None:
    problem = made_for(sizes, order)
    conf = problem.config
    assert problem.swap_ab == is_swapped
    block, blocks = conf.block_shape.size, conf.cluster.size
    assert tile is None or ((block.M, block.N), (blocks.M, blocks.N), conf.splits) == (tile, cluster, splits)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("M, N, K, order", [(72, 200, 136, "nt"), (99, 256, 264, "nn"), (150, 130, 128, "nt"), (200, 72, 136, "nt"),
                                            (256, 150, 200, "nt")])
def test_some_rows_or_columns_against_numpy(M: int, N: int, K: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As computed on a device, also where the tables' tiles would be the faster."""
    monkeypatch.setattr(tables, "LEAST_ROWS", 128)
    monkeypatch.setattr(tables, "LEAST_K", 128)
    monkeypatch.setattr(choose, "SWAP_WORTH", 9 if M < N else 0)
    monkeypatch.setattr(sm90, "is_unaligned", lambda info: False)
    (a, b), bias = operands(M, N, K, order), np.arange(N) % 5 - 2.0
    if N % 8 and order[1] == "n":
        b = np.pad(b, ((0, 0), (0, 8 - N % 8)))[:, :N]
    expected, out = np.maximum(a.astype(F64) @ b.astype(F64) + bias, 0), nans(M, N + 5)[:, 2:-3]
    with gk.emulate(mapping="device"):
        made = gk.plan(a, b, out=out, epilogue=epilogues.Bias(bias) | ReLU())
        made(a, b, out=out)
    assert made._compiled.problem.swap_ab == (M < N) and np.array_equal(out.astype(F64), expected)


@pytest.mark.gpu
@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("M, N, K, order", [
    (65, 4096, 1024, "nt"), (72, 2048, 2048, "nn"), (100, 4104, 1088, "nt"), (144, 14336, 1024, "nn"), (177, 4096, 14336, "nt"),
    (255, 2056, 1024, "nt"), (4096, 144, 1024, "nt"), (2050, 72, 2048, "nt"), (5000, 200, 1088, "nt"), (2048, 255, 8192, "nt")])
def test_some_rows_or_columns_on_a_gpu(M: int, N: int, K: int, order: str, dtype: Any) -> None:
    torch, kind, a, b = on_a_gpu(M, N, K, order, dtype)
    c, bias = torch.randint(-9, 10, (M, N), device="cuda").to(kind), torch.randint(-9, 10, (N,), device="cuda").to(kind)
    exact, out = a.double() @ b.double(), torch.full((M, N), float("nan"), dtype=kind, device="cuda")
    for got, expected in ((gk.matmul(a, b, out=out), exact), (gk.matmul(a, b, c), exact + c.double()),
                          (gk.matmul(a, b, epilogue=Bias(bias) | ReLU()), (exact + bias.double()).clip(0))):
        assert torch.equal(got.double(), expected.to(kind).double())


class Tiles(epilogues.Epilogue):
    """Stores tiles in its own way."""

    def tile(self, spec: Any, d: Any, tile: Any, values: tuple, shape: Any) -> None:
        spec.d.layout.store(d, tile, values, shape)


def test_what_is_computed_as_it_is_of_few_rows() -> None:
    """With components other than an epilogue of elements; of other dtypes, or where TMA cannot reach, or stacks."""
    a, b = operands(4, 1024, 1024, "nt")
    odd = np.empty((4, 1025), F16)[:, 1:]
    double = gk.transforms.Map(lambda x: x * 2)
    with gk.emulate():
        for made in (gk.plan(a, b, epilogue=Tiles()), gk.plan(a, b, transform_global_to_shared_b=double), gk.plan(odd, b),
                     gk.plan(a, b, epilogue=ReLU(), transform_regs_to_shared_d=double),
                     gk.plan(a.astype("f4"), b.astype("f4")), gk.plan(np.stack([a, a]), b)):
            assert not made._compiled.problem.swap_ab


EPILOGUES: dict[str, Any] = {
    "relu": lambda r, n, m: (ReLU(), lambda d: np.maximum(d, 0)),
    "bias": lambda r, n, m: (epilogues.Bias(n), lambda d: d + n),
    "bias of rows": lambda r, n, m: (epilogues.Bias(m, along="M"), lambda d: d + m[:, None]),
    "scaled rows": lambda r, n, m: (epilogues.Scale(m, along="M"), lambda d: d * m[:, None]),
    "residual": lambda r, n, m: (epilogues.Residual(r), lambda d: d + r),
    "residual by columns": lambda r, n, m: (epilogues.Residual(np.asfortranarray(r)), lambda d: d + r),
    "coordinates": lambda r, n, m: (epilogues.Elementwise(lambda x, i, j: x + 10 * i + j % 8),
                                    lambda d: d + 10 * np.arange(len(m))[:, None] + np.arange(len(n)) % 8),
    "batch": lambda r, n, m: (epilogues.Elementwise(lambda x, i, j, batch: x + i + batch),
                              lambda d: d + np.arange(len(m))[:, None]),
    "mask": lambda r, n, m: (epilogues.CausalMask(0.0, offset=100),
                             lambda d: np.where(np.arange(len(n)) <= np.arange(len(m))[:, None] + 100, d, 0)),
    "captured": lambda r, n, m: (epilogues.Elementwise(lambda x, i, j: x * n[j]), lambda d: d * n),
}


@pytest.mark.kin(5)
@pytest.mark.sample(10)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", EPILOGUES)
def test_epilogues_see_coordinates_of_the_product(kind: str) -> None:
    a, b = operands(5, 136, 192, "nt")
    rng = np.random.default_rng(3)
    r, n, m = (rng.integers(-3, 4, shape).astype("f4") for shape in ((5, 136), 136, 5))
    epilogue, expected = EPILOGUES[kind](r, n, m)
    out = nans(5, 136)
    with gk.emulate():
        made = gk.plan(a, b, out=out, epilogue=epilogue)
        gk.matmul(a, b, out=out, epilogue=epilogue)
    assert made._compiled.problem.swap_ab and made.config.epilogue is epilogue
    assert np.array_equal(out.astype(F64), expected(a.astype(F64) @ b.astype(F64)).astype(F16).astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_chain_that_keeps_what_it_computes(order: str) -> None:
    """A second output, a bias and a residual that is the result itself."""
    a, b = operands(6, 136, 192, "nn")
    rng = np.random.default_rng(4)
    kept, out, bias = np.full((6, 136), np.nan, "f4", order), rng.integers(-3, 4, (6, 136)).astype(F16), np.arange(136.0)
    before = out.astype(F64)
    chain = epilogues.Bias(bias) | epilogues.Store(kept) | ReLU() | epilogues.Residual(out)
    with gk.emulate():
        gk.matmul(a, b, out=out, epilogue=chain)
    plain = a.astype(F64) @ b.astype(F64) + bias
    assert np.array_equal(kept.astype(F64), plain)
    assert np.array_equal(out.astype(F64), (np.maximum(plain, 0) + before).astype(F16).astype(F64))


@pytest.mark.kin(5)
@pytest.mark.usefixtures("small")
def test_blas_in_place() -> None:
    a, b = operands(5, 136, 192, "nt")
    c = np.random.default_rng(5).integers(-3, 4, (5, 136)).astype(F16)
    expected = 2 * (a.astype(F64) @ b.astype(F64)) + 0.5 * c
    with gk.emulate():
        gk.blas.gemmEx("N", "N", 2.0, a, b, 0.5, c)
        assert np.array_equal(c.astype(F64), expected.astype(F16).astype(F64))
        gk.blas.gemmEx("N", "N", 1.0, a, b, 0.0, c)
    assert np.array_equal(c.astype(F64), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.usefixtures("small")
def test_another_array_of_an_epilogue_compiles_nothing() -> None:
    """Its runtime values are those of the epilogue that the caller gives."""
    a, b = operands(5, 136, 192, "nt")
    product = a.astype(F64) @ b.astype(F64)
    with gk.emulate():
        made = gk.plan(a, b, epilogue=epilogues.Bias(np.ones(136, "f4")))
    other = epilogues.Bias(np.arange(136, dtype="f4"))
    from gemmkit.components import freeze

    slots, leaves = made.with_components({"epilogue": freeze(other)}, {"epilogue": other}, a, b, None, None)
    assert leaves[0] == other.bias.__array_interface__["data"][0]
    assert slots == tuple(range(made.ranges["epilogue"].start, made.ranges["epilogue"].stop))
    with gk.emulate():
        d = gk.matmul(a, b, epilogue=other)
    assert np.array_equal(d.astype(F64), product + np.arange(136))
    with gk.emulate(), pytest.raises(ValueError, match=r"bias has shape \(5,\); along='N' of a 5 x 136"):
        gk.matmul(a, b, epilogue=epilogues.Bias(np.ones(5, "f4")))


@pytest.mark.kin(5)
@pytest.mark.compile
def test_the_code_with_an_epilogue() -> None:
    """Nothing spills, and B still comes by TMA."""
    from gemmkit.plans.ahead import recorded
    from gemmkit.runtime.compile import to_ptx

    a, b, bias = np.empty((8, 4096), F16), np.empty((4096, 4096), F16).T, np.ones(4096, "f4")
    (compiled,) = recorded(lambda: gk.matmul(a, b, epilogue=epilogues.Bias(bias) | epilogues.GELU("tanh")), zeros=False)
    kernel = compiled.launchable
    usage = kernel.entry().meta["usage"]
    assert compiled.problem.swap_ab and usage["spill_stores"] == usage["stack_bytes"] == 0
    ptx = to_ptx(kernel.kernel, tuple(x.type for x in kernel.arguments), kernel.threads, kernel.target, kernel.blocks_per_sm)
    assert "cp.async.bulk.tensor" in ptx and "wgmma" in ptx


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("order", ["C", "F"])
def test_c_and_the_order_of_the_result(order: str) -> None:
    a, b = operands(6, 128, 136, "nt", BF16)
    rng = np.random.default_rng(1)
    c = rng.integers(-9, 10, (6, 128)).astype(BF16)
    expected, out = a.astype(F64) @ b.astype(F64), nans(6, 128, BF16, order)
    with gk.emulate():
        gk.matmul(a, b, c, out=out)
        assert np.array_equal(out.astype(F64), (expected + c.astype(F64)).astype(BF16).astype(F64))
        gk.matmul(a, b, c, out=c)                          # in place
    assert np.array_equal(out, c)


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("M, order", [(1, "nt"), (1, "tn"), (3, "nt"), (9, "nn")])
@pytest.mark.parametrize("step", [0, 1, 8])
def test_a_result_by_columns(M: int, order: str, step: int) -> None:
    """The strides of one row say nothing of its order: (1, 1) is that of both, and (1, 9) a row of elements 9 apart."""
    a, b = operands(M, 136, 136, order)
    c = np.asfortranarray(np.arange(M * 136).reshape(M, 136) % 7 - 3).astype(F16)
    wide = np.full((136, M + step), np.nan, F16)
    out, expected = wide.T[:M], a.astype(F64) @ b.astype(F64)
    with gk.emulate():
        for addend in (None, c):
            gk.matmul(a, b, addend, out=out)
            assert np.array_equal(out.astype(F64), expected if addend is None else expected + c)
    assert np.isnan(wide[:, M:]).all()


@pytest.mark.kin(5)
@pytest.mark.parametrize("N, K", [(3648, 2592), (4096, 4096), (1024, 8192), (2048, 2048)])
@pytest.mark.parametrize("M", [1, 2, 7])
def test_every_order_has_a_default(M: int, N: int, K: int) -> None:
    """Whatever the strides of A, B, C and the result."""
    from itertools import product

    from gemmkit.plans.ahead import recorded
    from gemmkit.runtime.device import H100

    def matrix(rows: int, columns: int, order: str) -> np.ndarray:
        return np.empty((rows, columns + 8), F16)[:, :columns] if order == "n" else matrix(columns, rows, "n").T

    for orders in product("nt", repeat=4):
        a, b, c, out = (matrix(*shape, order) for shape, order in zip(((M, K), (K, N), (M, N), (M, N)), orders))
        assert recorded(lambda: gk.matmul(a, b, out=out), H100, zeros=False)
        assert recorded(lambda: gk.matmul(a, b, c, out=np.empty((N, M), F16).T), H100, zeros=False)


@pytest.mark.kin(5)
@pytest.mark.usefixtures("small")
def test_a_view_of_a_larger_array() -> None:
    a, b = operands(6, 128, 136, "nt")
    wide = nans(6, 256)
    with gk.emulate():
        gk.matmul(a, b, out=wide[:, 64:192])
    assert np.array_equal(wide[:, 64:192].astype(F64), a.astype(F64) @ b.astype(F64))
    assert np.isnan(wide[:, :64]).all() and np.isnan(wide[:, 192:]).all()


@pytest.mark.kin(5)
@pytest.mark.usefixtures("small")
def test_other_arrays_of_the_kind_and_bad_ones() -> None:
    a, b = operands(6, 128, 136, "nt")
    with gk.emulate():
        made = gk.plan(a, b)
        other = np.ascontiguousarray(a[::-1])
        assert np.array_equal(made(other, b).astype(F64), other.astype(F64) @ b.astype(F64))
        with pytest.raises(ValueError, match="a differs from the plan's"):
            made(a[:5], b)
        with pytest.raises(ValueError, match="out overlaps a in memory"):
            gk.matmul(a, b, out=np.lib.stride_tricks.as_strided(a, (6, 128), (272, 2)))
        with pytest.raises(ValueError, match="b has shape"):
            gk.matmul(a, b[:100])


@pytest.mark.usefixtures("small")
def test_a_fault_names_the_callers_array(seeded: Seeded) -> None:
    a, b = operands(6, 128, 136, "nt")
    c = np.ones((6, 128), F16)
    seeded("gemmkit.layouts.plain.Plain.element", lambda self, data, i, j, shape: data[i + 10**6, j])
    with gk.emulate(), pytest.raises(errors.BoundsError, match="of 'c'"):
        gk.matmul(a, b, c)


@pytest.mark.sample(3)
@pytest.mark.parametrize("N, splits", [(8, 1), (16, 2), (24, 1)])
def test_slices_of_eight_columns(N: int, splits: int) -> None:
    """Two matrices of 8 x 8 a warp: half of what stmatrix stores at a time."""
    rng = np.random.default_rng(N)
    a, b = rng.integers(-2, 3, (100, 200)).astype(F16), rng.integers(-2, 3, (200, N)).astype(F16)
    out = nans(100, N, F16, "F")
    layout = gk.layouts.ColMajor(F16)
    conf = gk.get_config(operator=WGMMAOp(N=N), global_a_layout=gk.layouts.RowMajor(F16), global_d_layout=layout,
                         kernel="warp_specialised", block_shape=Tile(M=64, N=N, K=64), schedule="cooperative",
                         warps_per_block=4, splits=splits)
    with gk.emulate():
        gk.matmul(a, b, conf=conf, out=out)
    assert np.array_equal(out.astype(F64), a.astype(F64) @ b.astype(F64))


@pytest.mark.gpu
@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("M, N, K, order", [
    (1, 1024, 1024, "nt"), (3, 1024, 1024, "nn"), (8, 1032, 1088, "tt"), (17, 1100, 1032, "nt"), (32, 1024, 1040, "tn"),
    (33, 1025, 1024, "nt"), (64, 1024, 1040, "nn"), (8, 4096, 4096, "nt"), (5, 14336, 1024, "nn"), (64, 4096, 2048, "tt"),
    (36, 4096, 1032, "nt"), (45, 14336, 1024, "nn"), (64, 8200, 2048, "nt")])
def test_on_a_gpu_of_few_rows(M: int, N: int, K: int, order: str, dtype: Any) -> None:
    torch, kind, a, b = on_a_gpu(M, N, K, order, dtype)
    c = torch.randint(-9, 10, (M, N), device="cuda").to(kind)
    expected = a.double() @ b.double()
    out = torch.full((M, N), float("nan"), dtype=kind, device="cuda")
    gk.matmul(a, b, out=out)
    assert torch.equal(out.double(), expected.to(kind).double())
    gk.matmul(a, b, c, out=out)
    assert torch.equal(out.double(), (expected + c.double()).to(kind).double())
