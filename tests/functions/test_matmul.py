"""`matmul` against NumPy: every operator, transpose, edge, view and slot; vectors and booleans by NumPy's rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.epilogues import Elementwise as Elementwise_of_vectors
from gemmkit.layouts.quantised import dequantise, quantise
from gemmkit.operators import COMPLEX, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.plans.ahead import recorded
from gemmkit.plans.problem import layout_of
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.support.checks import assert_close
from tests.support.machines import BF16, on_machines, poison, random, reference, tolerance, whole

# ==========================================================================================================================
# `matmul` against NumPy: every operator, transpose, edge, view and slot, in the emulator and on a GPU.

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
ORDERS = {"N": "C", "T": "F"}


def fpu(dtype: Any, accumulator: Any = None, **more: Any) -> FPUOp:
    return FPUOp(M=16, N=16, dtype=dtype, accumulator=accumulator, **more)


OPERATORS = {
    "mma-f16-f32": MMAOp(),
    "mma-f16-f16": MMAOp(accumulator=F16),
    "mma-bf16-f32": MMAOp(dtype=BF16),
    "wmma-16x16-f16-f32": WMMAOp(),
    "wmma-8x32-f16-f32": WMMAOp(M=8, N=32),
    "wmma-32x8-f16-f32": WMMAOp(M=32, N=8),
    "wmma-16x16-f16-f16": WMMAOp(accumulator=F16),
    "wmma-8x32-f16-f16": WMMAOp(M=8, N=32, accumulator=F16),
    "wmma-32x8-f16-f16": WMMAOp(M=32, N=8, accumulator=F16),
    "wmma-16x16-bf16-f32": WMMAOp(dtype=BF16),
    "wmma-8x32-bf16-f32": WMMAOp(M=8, N=32, dtype=BF16),
    "wmma-32x8-bf16-f32": WMMAOp(M=32, N=8, dtype=BF16),
    "fpu-f16-f32": fpu(F16, F32),
    "fpu-bf16-f32": fpu(BF16, F32),
    "fpu-f32": fpu(F32),
    "fpu-f32-f64": fpu(F32, F64),
    "fpu-f64": fpu(F64),
    "fpu-f16,f32-f32": fpu(F16, F32, b_dtype=F32),
    "fpu-i8": fpu("i1"),
    "fpu-i8-i32": fpu("i1", "i4"),
    "fpu-i16": fpu("i2"),
    "fpu-i32": fpu("i4"),
    "fpu-i64": fpu("i8"),
    "fpu-u8": fpu("u1"),
    "fpu-u8-i32": fpu("u1", "i4"),
    "fpu-i8,u8-i32": fpu("i1", "i4", b_dtype="u1"),
}


def small(operator: Any, **fields: Any) -> dict[str, Any]:
    """A mapping with little to emulate: one warp, and blocks that a matrix of 40 has several of."""
    m, n, k = operator.shape
    M, N, K = max(16, m), max(16, n), max(8, k)
    return dict(operator=operator, block_shape=Tile(M=M, N=N, K=K), warps_per_block=1,
                compute_warp=Tile(M=M, N=N, K=K), **fields)


def config(operator: Any, a: Any, b: Any, c: Any = None, d: Any = None, **fields: Any) -> gk.Config:
    """The small mapping, for plain arrays in the order they have."""
    plain = {f"global_{name}_layout": layout_of(describe(x, name), name)
             for name, x in (("a", a), ("b", b), ("c", c), ("d", d)) if x is not None}
    return gk.get_config(**{**small(operator), **plain, **fields})


def check(machine: Any, operator: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None,
          d: np.ndarray | None = None, **fields: Any) -> None:
    """One product into a poisoned D (C order, the accumulator's dtype, if none is given), against NumPy."""
    K = a.shape[1]
    out = poison((a.shape[0], b.shape[1]), operator.accumulator) if d is None else d
    a_, b_, c_, out_ = (None if x is None else machine.array(x) for x in (a, b, c, out))
    conf = config(operator, a_, b_, c_, out_, **fields)
    with machine.session():
        result = gk.matmul(a_, b_, c_, conf, out=out_)
    assert result is out_
    assert_close(machine.numpy(result), reference(a, b, c, out.dtype),
                 tolerance(a.dtype, operator.accumulator, out.dtype, K))


# -- operators, transposes, sizes -------------------------------------------------------------------------------------

@pytest.mark.sample(30)
@on_machines
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_every_operator_and_transpose(machine: Any, name: str, trans: str, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    a = random(rng, (17, 13), operator.fragment_a.dtype, ORDERS[trans[0]])
    b = random(rng, (13, 11), operator.fragment_b.dtype, ORDERS[trans[1]])
    check(machine, operator, a, b)


@pytest.mark.sample(11)
@on_machines
@pytest.mark.parametrize("name", ["mma-f16-f32", "wmma-8x32-f16-f32", "fpu-f32", "fpu-i16"])
@pytest.mark.parametrize("M,N,K", [(1, 1, 1), (7, 1, 17), (1, 7, 100), (17, 17, 7), (32, 48, 16), (40, 16, 31),
                                   (31, 24, 8), (100, 7, 1)])
def test_sizes(machine: Any, name: str, M: int, N: int, K: int, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    dtype = operator.fragment_a.dtype
    check(machine, operator, random(rng, (M, K), dtype), random(rng, (K, N), dtype, "F"),
          random(rng, (M, N), operator.accumulator), poison((M, N), operator.accumulator, "F"))


@on_machines
@pytest.mark.parametrize("name", ["mma-f16-f32", "wmma-16x16-f16-f16", "fpu-f32", "fpu-i32"])
@pytest.mark.parametrize("M,N,K", [(0, 7, 5), (7, 0, 5), (7, 5, 0), (0, 0, 5), (0, 7, 0), (0, 0, 0)])
def test_a_size_of_zero(machine: Any, name: str, M: int, N: int, K: int, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    a, b = np.ones((M, K), operator.dtype), np.ones((K, N), operator.dtype)
    check(machine, operator, a, b)
    check(machine, operator, a, b, random(rng, (M, N), operator.accumulator))


@on_machines
@pytest.mark.parametrize("name", ["mma-f16-f32", "fpu-f32", "fpu-i32"])
def test_without_k_the_result_is_the_transformed_c(machine: Any, name: str, rng: np.random.Generator) -> None:
    dtype = OPERATORS[name].dtype
    a, b, c = (machine.array(x) for x in (np.ones((7, 0), dtype), np.ones((0, 5), dtype), whole(rng, (7, 5), "f4")))
    with machine.session():
        d = gk.matmul(a, b, c, operator=fpu(dtype, F32) if dtype != F16 else MMAOp(),
                      transform_regs_to_shared_d=Map(lambda x, i, j: 3 * x + 10 * i + j))
    i, j = np.indices((7, 5))
    assert np.array_equal(machine.numpy(d), 3 * machine.numpy(c) + 10 * i + j)


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("a_dtype,b_dtype,result", [
    (F16, F16, F16), (F32, F32, F32), (F64, F64, F64), (F16, F32, F32), (F32, F64, F64), ("i4", "i4", "i4"),
    ("i1", "i1", "i1"), ("i1", "i4", "i4"), ("u1", "i1", "i2"), ("i4", F32, F64), (BF16, BF16, BF16)])
def test_everything_derived_from_the_arguments(machine: Any, a_dtype: Any, b_dtype: Any, result: Any,
                                               rng: np.random.Generator) -> None:
    a, b = whole(rng, (21, 13), a_dtype), whole(rng, (13, 18), b_dtype)
    a_, b_ = machine.array(a), machine.array(b)
    with machine.session():
        d = gk.matmul(a_, b_)
    assert type(d) is type(a_) and describe(d).dtype == np.dtype(result)
    assert np.array_equal(machine.numpy(d).astype(F64), reference(a, b).astype(F64))


# -- operands ---------------------------------------------------------------------------------------------------------

@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32, "i8"])
@pytest.mark.parametrize("c_order", ["C", "F", None])
@pytest.mark.parametrize("d_order", ["C", "F"])
def test_orders_of_c_and_d(machine: Any, dtype: Any, c_order: str | None, d_order: str,
                           rng: np.random.Generator) -> None:
    operator = MMAOp() if dtype == F16 else fpu(dtype)
    accumulator = operator.accumulator
    c = None if c_order is None else random(rng, (21, 19), accumulator, c_order)
    check(machine, operator, random(rng, (21, 9), dtype), random(rng, (9, 19), dtype), c,
          poison((21, 19), accumulator, d_order))


VIEWS = {
    "rows": lambda x: x[3:20],
    "columns": lambda x: x[:, 5:22],
    "every second row": lambda x: x[1:34:2],
    "every third column": lambda x: x[:, 1:51:3],
    "steps both ways": lambda x: x[::2, ::3][:17, :17],
    "transposed columns": lambda x: x[:, 5:22].T,
    "backwards": lambda x: x[20:3:-1, 22:5:-1],
    "backwards transposed": lambda x: x[20:3:-1].T,
    "one column as rows": lambda x: x[:, 7:8].T[:, :17],
}


@pytest.mark.sample(10)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_in_place(machine: Any, dtype: Any, view: str, rng: np.random.Generator) -> None:
    """Views as A, B and C; what they are views of has other numbers around them."""
    of = VIEWS[view]
    hosts = [whole(rng, (60, 60), kind) for kind in (dtype, dtype, F32)]
    a, b, c = (of(machine.array(x)) for x in hosts)
    a_ref, b_ref, c_ref = (of(x) for x in hosts)
    rows = min(a_ref.shape)                            # the views' first rows x rows are the operands
    a, b, c, a_ref, b_ref, c_ref = (x[:rows, :17] for x in (a, b, c, a_ref, b_ref, c_ref))
    b, b_ref, c, c_ref = b.T, b_ref.T, c[:, :rows], c_ref[:, :rows]
    with machine.session():
        d = gk.matmul(a, b, c)
    assert np.array_equal(machine.numpy(d), reference(a_ref, b_ref, c_ref))


@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("view", [name for name in VIEWS if name != "one column as rows"])
def test_views_are_written_in_place(machine: Any, view: str, rng: np.random.Generator) -> None:
    """D may be a view: its elements and no other are written."""
    of = VIEWS[view]
    memory = machine.array(poison((60, 60), F32))
    out, expected = of(memory), poison((60, 60), F32)
    a, b = whole(rng, (out.shape[0], 9), F16), whole(rng, (9, out.shape[1]), F16)
    with machine.session():
        result = gk.matmul(machine.array(a), machine.array(b), out=out)
    assert result is out
    of(expected)[:] = reference(a, b)
    assert np.array_equal(machine.numpy(memory), expected, equal_nan=True)


@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32, "i1"])
@pytest.mark.parametrize("skip", [1, 2, 4])
def test_bases_that_are_not_aligned(machine: Any, dtype: Any, skip: int, rng: np.random.Generator) -> None:
    """A, B and D start some elements into their memory, whose size is otherwise a multiple of every access's."""
    def shifted(x: np.ndarray) -> Any:
        flat = machine.array(np.concatenate([x.reshape(-1)[:skip], x.reshape(-1)]))
        return flat[skip:].reshape(x.shape)

    a, b = whole(rng, (16, 32), dtype), whole(rng, (32, 16), dtype)
    operator = MMAOp() if dtype == F16 else fpu(dtype)
    out = shifted(poison((16, 16), operator.accumulator))
    with machine.session():
        gk.matmul(shifted(a), shifted(b), operator=operator, out=out)
    assert np.array_equal(machine.numpy(out), reference(a, b, dtype=operator.accumulator if dtype == "i1" else None))


@on_machines
def test_c_itself_can_be_the_result(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = whole(rng, (17, 9), F32), whole(rng, (9, 18), F32), whole(rng, (17, 18), F32)
    c_ = machine.array(c)
    with machine.session():
        assert gk.matmul(machine.array(a), machine.array(b), c_, out=c_) is c_
    assert np.array_equal(machine.numpy(c_), reference(a, b, c))


@on_machines
def test_broadcast_operands_are_read_in_place(machine: Any, rng: np.random.Generator) -> None:
    """Strides of 0: one row as every row of A, one column as every column of C."""
    row, b, column = whole(rng, (1, 9), F32), whole(rng, (9, 18), F32), whole(rng, (17, 1), F32)
    library = np if isinstance(machine.array(row), np.ndarray) else __import__("cupy")
    a = library.broadcast_to(machine.array(row), (17, 9))
    c = library.broadcast_to(machine.array(column), (17, 18))
    with machine.session():
        d = gk.matmul(a, machine.array(b), c)
    assert np.array_equal(machine.numpy(d), np.repeat(row @ b, 17, 0) + column)


@on_machines
def test_nan_and_infinity_go_where_they_belong(machine: Any, rng: np.random.Generator) -> None:
    """The masked rim contributes nothing, even beside infinities."""
    a, b = whole(rng, (18, 11), F16), whole(rng, (11, 19), F16)
    a[2, 3], a[17, 10], b[10, 18], b[5, 4] = np.nan, np.inf, -np.inf, np.nan
    with machine.session():
        d = gk.matmul(machine.array(a), machine.array(b), global_d_layout=layouts.RowMajor(F32))
    with np.errstate(invalid="ignore"):
        assert np.array_equal(machine.numpy(d), a.astype(F32) @ b.astype(F32), equal_nan=True)


# ==========================================================================================================================
# Operands of one dimension and of booleans, by NumPy's rules; values are small whole numbers, so results are exact.

SHAPES = [((5,), (5,)), ((5,), (5, 3)), ((3, 5), (5,)), ((2, 3, 5), (5,)), ((5,), (2, 5, 3)), ((0,), (0,)), ((1,), (1,)),
          ((7,), (7, 1)), ((0,), (0, 3)), ((3, 0), (0,)), ((5,), (5, 0))]


def drawn(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "c8", "i4", "?"])
@pytest.mark.parametrize("a,b", SHAPES)
def test_vectors_by_numpys_rules(machine: Any, a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    x, y = drawn(a, dtype), drawn(b, dtype)
    wanted = np.matmul(x, y)
    with machine.session():
        given = machine.array(x), machine.array(y)
        made = gk.matmul(*given)
        assert made.shape == wanted.shape and made.dtype == wanted.dtype
        np.testing.assert_array_equal(machine.numpy(made), wanted)


@pytest.mark.sample(4)
@on_machines
def test_views_out_c_and_plans(machine: Any) -> None:
    wide, matrix, c = drawn((10,), F32), drawn((5, 3), F32), drawn((3,), F32)
    with machine.session():
        x, m, given = machine.array(wide), machine.array(matrix), machine.array(c)
        out = machine.array(poison((6,), F32))
        run = gk.plan(x[::2], m, given, out=out[::2], epilogue=Elementwise_of_vectors(lambda x, i, j: 2 * x + j))
        assert run(x[::2], m, given, out=out[::2]).shape == (3,)
        np.testing.assert_array_equal(machine.numpy(out)[::2], 2 * (wide[::2] @ matrix + c) + np.arange(3))
        assert np.isnan(machine.numpy(out)[1::2]).all()
        number = gk.plan(x, x)(x, x)
        assert number.shape == () and float(number) == wide @ wide
        np.testing.assert_array_equal(machine.numpy(gk.matmul(m.T, x[1:6], given)), matrix.T @ wide[1:6] + c)


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "c8"])
def test_booleans_beside_numbers(machine: Any, dtype: str) -> None:
    a, b = drawn((3, 5), "?"), drawn((5, 4), dtype)
    with machine.session():
        made = gk.matmul(machine.array(a), machine.array(b))
        assert made.dtype == np.matmul(a, b).dtype
        np.testing.assert_array_equal(machine.numpy(made), np.matmul(a, b))


@dataclass(frozen=True)
class Hankel(layouts.Layout):
    """Of a vector that has each skew diagonal's element once: it cannot tell its rows and columns."""

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[i + j]


X = drawn((9, 16), F32)
MASK = np.array([[True, False], [False, True]])
SQUARE = drawn((16, 16), F32)
HANKEL = drawn((24,), F32)


# Of each kind: the matrix as an object, made of arrays of the machine's, and as an array.
STRUCTURED: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "own layout": (lambda at: gk.layouts.Matrix(at(HANKEL), Hankel(F32), (9, 16)), np.lib.stride_tricks.sliding_window_view(HANKEL, 16)),
    "generated": (lambda at: gk.layouts.GeneratedMatrix(lambda i, j, s: s * (i - j), (9, 16), F32, 2.0),
                  2 * np.subtract.outer(np.arange(9.0), np.arange(16.0))),
    "columns joined": (lambda at: gk.layouts.Concat(at(X[:, :5]), at(X[:, 5:]), axis=1), X),
    "rows joined": (lambda at: gk.layouts.Concat(at(X[:2]), at(X[2:4]), at(X[4:]), axis=0), X),
    "gathered": (lambda at: gk.layouts.Gather(at(X), at(np.int32([8, 0, 0, 3]))), X[[8, 0, 0, 3]]),
    "diagonal": (lambda at: gk.layouts.DiagonalMatrix(at(X[0])), np.diag(X[0])),
    "diagonals": (lambda at: gk.layouts.DiagonalMatrix(at(X[:2])), np.stack([np.diag(x) for x in X[:2]])),
    "triangular": (lambda at: gk.layouts.TriangularMatrix(at(SQUARE), "upper"), np.triu(SQUARE)),
    "symmetric": (lambda at: gk.layouts.SymmetricMatrix(at(SQUARE)), np.tril(SQUARE) + np.tril(SQUARE, -1).T),
    "sparse": (lambda at: gk.functions.BlockSparse(at(np.tile(SQUARE, (8, 8))), at(MASK), (64, 64)), np.tile(SQUARE, (8, 8))
               * np.kron(MASK, np.ones((64, 64)))),
    "plain": (lambda at: gk.layouts.Matrix(at(X), layouts.RowMajor(F32)), X),
}


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("is_row", [False, True])
@pytest.mark.parametrize("kind", STRUCTURED)
def test_a_vector_beside_a_matrix_with_structure(machine: Any, kind: str, is_row: bool, with_out: bool) -> None:
    make, matrix = STRUCTURED[kind]
    vector = drawn((matrix.shape[-2 if is_row else -1],), F32)
    operands = (vector, matrix) if is_row else (matrix, vector)
    wanted = np.matmul(*operands)
    c = drawn(wanted.shape, F32)
    with machine.session():
        made, v, given = make(machine.array), machine.array(vector), machine.array(c)
        ordered = (v, made) if is_row else (made, v)
        if not with_out:
            result = gk.matmul(*ordered)
            assert result.shape == wanted.shape
            np.testing.assert_array_equal(machine.numpy(result), wanted)
            return
        out = machine.array(poison(wanted.shape, F32))
        assert gk.plan(*ordered, given, out=out)(*ordered, given, out=out) is out
        np.testing.assert_array_equal(machine.numpy(out), wanted + c)


@pytest.mark.sample(4)
@on_machines
def test_a_vector_beside_layouts_given_by_keyword(machine: Any) -> None:
    """A layout of the caller's that cannot tell its extents, and 4-bit weights, of which the array has other rows."""
    wanted, v = STRUCTURED["own layout"][1], drawn((16,), F32)
    weights = quantise(np.tile(SQUARE, (2, 1)), group=8)
    x = drawn((32,), "f2")
    with machine.session():
        for sizes in (dict(M=9, N=1, K=16), (9, 1, 16)):
            made = gk.matmul(machine.array(HANKEL), machine.array(v), global_a_layout=Hankel(F32), gemm_shape=sizes)
            assert made.shape == (9,)
            np.testing.assert_array_equal(machine.numpy(made), wanted @ v)
        words = gk.layouts.Matrix(machine.array(weights.array), layouts.GroupQuantised(
            "float16", machine.array(weights.layout.scales), group=8))                         # type: ignore[attr-defined]
        made = gk.matmul(machine.array(x), words)
        assert made.shape == (16,)
        np.testing.assert_allclose(machine.numpy(made), x.astype("f8") @ dequantise(weights), rtol=2e-3, atol=0.05)


@pytest.mark.sample(4)
@on_machines
def test_a_row_beside_a_braid(machine: Any) -> None:
    x, w = drawn((16,), F32), drawn((16, 5), F32)
    with machine.session():
        out = machine.array(poison((5,), F32))
        made = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(machine.array(w), machine.array(w[::-1].copy())), out=out,
                         epilogue=gk.epilogues.Fold(lambda one, other: one - 2 * other))
        assert made is out
        np.testing.assert_array_equal(machine.numpy(made), x @ w - 2 * (x @ w[::-1]))


@pytest.mark.sample(4)
@pytest.mark.parametrize("columns", [(3,), (2, 16, 3)])
def test_a_matrix_says_its_shape(columns: tuple[int, ...]) -> None:
    """(Of `gk.layouts.Matrix(array, layout, shape)`, whose layout cannot.)"""
    b = drawn((16, *columns) if len(columns) == 1 else columns, F32)
    with gk.emulate():
        np.testing.assert_array_equal(gk.matmul(gk.layouts.Matrix(HANKEL, Hankel(F32), (9, 16)), b), STRUCTURED["own layout"][1] @ b)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("call", "says"), [
    (lambda m, v: gk.matmul(m, v[1:]), ("a has shape (9, 16) and b has shape (15,)",)),
    (lambda m, v: gk.matmul(m, v, gemm_shape=dict(M=9, N=1, K=15)), ("a is a matrix of K=16", "gemm_shape says K=15")),
    (lambda m, v: gk.matmul(m, v, v), ("c has shape (16,), that is M=16 rows, and a says M=9",)),
    (lambda m, v: gk.matmul(m, v, out=np.zeros((9, 1), F32)), ("out has shape (9, 1)", "one dimension")),
    (lambda m, v: gk.layouts.Matrix(X, layouts.RowMajor(F32), (9, 15)), ("shape=(9, 15)", "9 x 16")),
    (lambda m, v: gk.matmul(np.ones((3, 4, 2), F32), v[:4], operator=COMPLEX), ("b has one dimension", "b[:, None]")),
])
def test_a_matrix_and_a_vector_that_do_not_fit(call: Any, says: tuple[str, ...]) -> None:
    with gk.emulate(), pytest.raises(ValueError) as error:
        call(gk.layouts.Matrix(HANKEL, Hankel(F32), (9, 16)), drawn((16,), F32))
    assert all(text in str(error.value) for text in says), error.value


@pytest.mark.sample(4)
def test_a_vector_whose_product_is_computed_transposed() -> None:
    """(`gemmkit.tuning.choose`: the vector is then the second operand's column.)"""
    a, b = drawn((32,), F32), drawn((32, 64), F32)
    with gk.emulate():
        run = gk.plan(a, b, operator=WGMMAOp(8, dtype=F32), epilogue=Elementwise_of_vectors(lambda x, i, j: x + j))
        made = run(a, b, out=poison((64,), F32))
    assert run._compiled.problem.swap_ab
    np.testing.assert_array_equal(made, a @ b + np.arange(64))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("a", "b"), [((2, 3, 5), (5,)), ((5,), (2, 5, 3))])
def test_a_stack_beside_a_vector_is_one_product(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    found = recorded(lambda: gk.matmul(np.ones(a, F32), np.ones(b, F32)), H100)
    (call,) = (x.problem for x in found)
    assert {call.M, call.N} == {1, 6} and call.K == 5 and call.stack is None


@pytest.mark.sample(4)
@pytest.mark.parametrize("a,b,c,out,says", [
    ((4,), (5, 3), None, None, ("a has shape (4,)", "a has 4 elements and b 5 rows")),
    ((3, 4), (5,), None, None, ("b has shape (5,)", "a has 4 columns and b 5 elements")),
    ((4,), (4, 3), None, (1, 3), ("out has shape (1, 3)", "the result has (3,)")),
    ((4,), (4,), None, (1,), ("out has shape (1,)", "the result has ()")),
    ((3, 4), (4,), (3, 1), None, ("c has shape (3, 1)", "the result has (3,)")),
    ((4,), (), None, None, ("b has shape ()", "a product takes no number as an operand")),
    ((), (4,), None, None, ("a has shape ()", "a product takes no number as an operand")),
])
def test_vectors_that_do_not_fit(a: Any, b: Any, c: Any, out: Any, says: tuple[str, ...]) -> None:
    written = None if out is None else poison(out, F32)
    with gk.emulate(), pytest.raises(ValueError) as error:
        gk.matmul(np.ones(a, F32), np.ones(b, F32), None if c is None else np.ones(c, F32), out=written)
    assert all(text in str(error.value) for text in says), error.value
    assert written is None or np.isnan(written).all()
