"""Products of a few rows on Hopper: the kernel computes the transpose, and nothing of that is seen by the caller."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.emulator import errors
from gemmkit.epilogues import ReLU
from gemmkit.operators import WGMMAOp
from gemmkit.tiling import Tile
from gemmkit.tuning import choose

F16, BF16, F64 = np.dtype("f2"), np.dtype(ml_dtypes.bfloat16), np.dtype("f8")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the emulator computes in a second."""
    monkeypatch.setattr(choose, "LEAST", 128)


def operands(M: int, N: int, K: int, order: str, dtype: Any = F16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(M * N + K)
    a, b = (rng.integers(-2, 3, shape).astype(dtype) for shape in ((M, K), (K, N)))
    return tuple(np.asfortranarray(x) if o == "t" else x for x, o in zip((a, b), order))           # type: ignore[return-value]


def nans(M: int, N: int, dtype: Any = F16, order: str = "C") -> np.ndarray:
    return np.full((M, N), np.nan, dtype, order)                                                    # type: ignore[call-overload]


CASES = [(1, 128, 128, "nt"), (3, 128, 200, "nn"), (8, 136, 192, "tt"), (17, 140, 136, "nt"), (32, 128, 136, "tn"),
         (33, 129, 128, "nt"), (64, 128, 144, "nn"), (2, 131, 257, "nn")]


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
    (65, 4096, 4096, "rows"), (33, 8192, 4096, "tiles enough"), (8, 1016, 4096, "few columns"), (8, 4096, 1016, "a short K"),
    (0, 4096, 4096, "nothing")])
def test_sizes_that_are_computed_as_they_are(M: int, N: int, K: int, why: str) -> None:
    a, b = np.empty((M, K), F16), np.empty((K, N), F16)
    with gk.emulate():
        assert not gk.plan(a, b)._compiled.problem.swap_ab, why


class Tiles(epilogues.Epilogue):
    """Stores tiles in its own way."""

    def tile(self, spec: Any, d: Any, tile: Any, values: tuple, shape: Any) -> None:
        spec.d.layout.store(d, tile, values, shape)


def test_what_is_computed_as_it_is() -> None:
    """With components other than an epilogue of elements; of other dtypes, or where TMA cannot reach, or stacks."""
    a, b = operands(4, 1024, 1024, "nt")
    odd = np.empty((4, 1025), F16)[:, 1:]
    double = gk.transforms.Elementwise(lambda x: x * 2)
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
    "mask": lambda r, n, m: (epilogues.Causal(0.0, offset=100),
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
def test_a_fault_names_the_callers_array(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(6, 128, 136, "nt")
    c = np.ones((6, 128), F16)
    monkeypatch.setattr("gemmkit.layouts.plain.Plain.element", lambda self, data, i, j, shape: data[i + 10**6, j])
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
    (33, 1025, 1024, "nt"), (64, 1024, 1040, "nn"), (8, 4096, 4096, "nt"), (5, 14336, 1024, "nn"), (64, 4096, 2048, "tt")])
def test_on_a_gpu(M: int, N: int, K: int, order: str, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    kind = torch.float16 if dtype == F16 else torch.bfloat16
    a, b = (torch.randint(-2, 3, shape[::-1] if o == "t" else shape, device="cuda").to(kind)
            for shape, o in zip(((M, K), (K, N)), order))
    a, b = (x.T if o == "t" else x for x, o in zip((a, b), order))
    c = torch.randint(-9, 10, (M, N), device="cuda").to(kind)
    expected = a.double() @ b.double()
    out = torch.full((M, N), float("nan"), dtype=kind, device="cuda")
    gk.matmul(a, b, out=out)
    assert torch.equal(out.double(), expected.to(kind).double())
    gk.matmul(a, b, c, out=out)
    assert torch.equal(out.double(), (expected + c.double()).to(kind).double())
