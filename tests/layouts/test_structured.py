"""Diagonal, triangular, symmetric and generated operands: as A, as B, as both, transposed; and what is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, transforms
from gemmkit.operators import FPUOp, MMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.machines import on_machines, poison, reference, whole

# ==========================================================================================================================
# Diagonal, triangular, symmetric and generated operands: as A, as B, as both, transposed, through every face.
#
# What an array holds outside of what is stored is NaN. Values are small whole numbers, so results are right or wrong.

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
OPERATORS = {"mma": MMAOp(), "fpu": FPUOp(M=16, N=16)}
SQUARE, OTHER = 35, 18


def mapping(operator: Any, **fields: Any) -> dict[str, Any]:
    """One warp with the smallest block: several blocks along K, so that some are skipped."""
    tile = Tile(M=16, N=16, K=max(8, operator.shape[2]))
    return {**dict(operator=operator, block_shape=tile, compute_warp=tile, warps_per_block=1), **fields}


def config(operator: Any, a: Any = None, b: Any = None, **fields: Any) -> gk.Config:
    dtype = operator.fragment_a.dtype
    return gk.get_config(**mapping(operator, global_a_layout=a or layouts.RowMajor(dtype), global_b_layout=b or layouts.RowMajor(dtype),
                                   global_d_layout=layouts.RowMajor(F32), **fields))


def stored(x: np.ndarray, half: str, unit: bool, order: Any = "C") -> np.ndarray:
    """What is kept of a triangular or symmetric matrix; the rest, a unit diagonal too, is NaN."""
    keep = (np.tril if half == "lower" else np.triu)(np.ones(x.shape, bool))
    if unit:
        keep &= ~np.eye(*x.shape, dtype=bool)
    return np.asarray(np.where(keep, x, np.nan).astype(x.dtype), order=order)


def triangle(x: np.ndarray, half: str, unit: bool) -> np.ndarray:
    out = (np.tril if half == "lower" else np.triu)(x)
    if unit:
        np.fill_diagonal(out, 1)
    return out


def mirrored(x: np.ndarray, half: str) -> np.ndarray:
    one = (np.tril if half == "lower" else np.triu)(x)
    return one + one.T - np.diag(np.diag(x))


def multiply(machine: Any, a: Any, b: Any, shape: tuple[int, int], conf: gk.Config | None = None, **fields: Any) -> np.ndarray:
    out = machine.array(poison(shape, F32))
    with machine.session():
        gk.matmul(a, b, conf=conf, out=out, **fields)
    return np.asarray(machine.numpy(out))


# -- as A, as B, as both; each transposed -------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("name", OPERATORS)
def test_diagonal(machine: Any, name: str, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    dtype = operator.fragment_a.dtype
    kind = layouts.Diagonal(dtype)
    as_a, as_b, both = config(operator, kind), config(operator, None, kind), config(operator, kind, kind)
    for n, other in ((SQUARE, OTHER), (16, 40), (1, 3), (33, 33)):
        d, e = whole(rng, (n,), dtype), whole(rng, (n,), dtype)
        b, a = whole(rng, (n, other), dtype), whole(rng, (other, n), dtype)
        x, y = machine.array(d), machine.array(e)
        assert np.array_equal(multiply(machine, x, machine.array(b), b.shape, as_a), reference(np.diag(d), b))
        assert np.array_equal(multiply(machine, machine.array(a), x, a.shape, as_b), reference(a, np.diag(d)))
        assert np.array_equal(multiply(machine, x, y, (n, n), both), reference(np.diag(d), np.diag(e)))


@pytest.mark.kin(5)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("unit", [False, True], ids=["own diagonal", "unit"])
@pytest.mark.parametrize("half", ["lower", "upper"])
@pytest.mark.parametrize("name", OPERATORS)
def test_triangular(machine: Any, name: str, half: str, unit: bool, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    dtype = operator.fragment_a.dtype
    row = layouts.Triangular(layouts.RowMajor(dtype), half, unit)
    column = layouts.Triangular(layouts.ColMajor(dtype), "upper" if half == "lower" else "lower", unit)   # its transpose
    n = SQUARE if name == "mma" else 27                              # blocks of the other are half as deep
    x = whole(rng, (n, n), dtype)
    b, a = whole(rng, (n, OTHER), dtype), whole(rng, (OTHER, n), dtype)
    full, kept = triangle(x, half, unit), machine.array(stored(x, half, unit))
    for layout, matrix, array in ((row, full, kept), (column, full.T, kept.T)):
        out = multiply(machine, array, machine.array(b), b.shape, config(operator, layout))
        assert np.array_equal(out, reference(matrix, b))
        out = multiply(machine, machine.array(a), array, a.shape, config(operator, None, layout))
        assert np.array_equal(out, reference(a, matrix))
    assert np.array_equal(multiply(machine, kept, kept.T, (n, n), config(operator, row, column)), reference(full, full.T))
    assert np.array_equal(multiply(machine, kept.T, kept, (n, n), config(operator, column, row)), reference(full.T, full))


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("half", ["lower", "upper"])
def test_trapezoids(machine: Any, half: str, rng: np.random.Generator) -> None:
    """Rectangular ones, wide and tall, as A and as B."""
    layout = layouts.Triangular(layouts.RowMajor(F32), half)
    as_a, as_b = config(OPERATORS["fpu"], layout), config(OPERATORS["fpu"], None, layout)
    for shape in ((SQUARE, 18), (18, SQUARE)):
        x = whole(rng, shape, F32)
        kept, full = machine.array(stored(x, half, False)), triangle(x, half, False)
        b, a = whole(rng, (shape[1], OTHER), F32), whole(rng, (OTHER, shape[0]), F32)
        assert np.array_equal(multiply(machine, kept, machine.array(b), (shape[0], OTHER), as_a), reference(full, b))
        assert np.array_equal(multiply(machine, machine.array(a), kept, (OTHER, shape[1]), as_b), reference(a, full))


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("half", ["lower", "upper"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", OPERATORS)
def test_symmetric(machine: Any, name: str, half: str, order: str, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    dtype = operator.fragment_a.dtype
    layout = layouts.Symmetric((layouts.RowMajor if order == "C" else layouts.ColMajor)(dtype), half)
    x = whole(rng, (SQUARE, SQUARE), dtype)
    kept, full = machine.array(stored(x, half, False, order)), mirrored(x, half)
    b, a = whole(rng, (SQUARE, OTHER), dtype), whole(rng, (OTHER, SQUARE), dtype)
    assert np.array_equal(multiply(machine, kept, machine.array(b), b.shape, config(operator, layout)), reference(full, b))
    assert np.array_equal(multiply(machine, machine.array(a), kept, a.shape, config(operator, None, layout)), reference(a, full))
    assert np.array_equal(multiply(machine, kept, kept, full.shape, config(operator, layout, layout)), reference(full, full))


def one(i, j):
    return i - 2 * j + 1


def two(i, j, table, step):
    return table[i] + step * j


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("name", OPERATORS)
def test_generated(machine: Any, name: str, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    dtype = operator.fragment_a.dtype
    table = whole(rng, (SQUARE,), dtype)
    b = whole(rng, (OTHER, 19), dtype)
    i, j = np.indices((SQUARE, OTHER))
    given = machine.array(b)
    step = dtype.type(-1)
    for f, arguments, matrix in ((one, (), one(i, j)), (two, (machine.array(table), step), table.astype(F64)[:, None] - j)):
        a = gk.layouts.GeneratedMatrix(f, (SQUARE, OTHER), dtype, *arguments)
        assert np.array_equal(multiply(machine, a, given, (SQUARE, 19), operator=operator), reference(matrix, b))
        assert np.array_equal(multiply(machine, given.T, a.T, (19, SQUARE), operator=operator), reference(b.T, matrix.T))


@on_machines
def test_generated_arguments_compile_nothing(machine: Any, rng: np.random.Generator) -> None:
    b = machine.array(np.eye(9, 16, dtype=F32))
    i, j = np.indices((5, 9))
    expected = np.zeros((5, 16))

    def product(table: np.ndarray, step: float) -> None:
        expected[:, :9] = table[:, None] + step * j
        a = gk.layouts.GeneratedMatrix(two, (5, 9), F32, machine.array(table), step)
        assert np.array_equal(multiply(machine, a, b, (5, 16)), expected)

    product(whole(rng, (5,), F32), 2.0)
    with machine.compiles_nothing():
        product(whole(rng, (5,), F32), -3.0)


@on_machines
def test_generated_on_both_sides(machine: Any) -> None:
    a, b = gk.layouts.GeneratedMatrix(one, (5, 7), F32), gk.layouts.GeneratedMatrix(lambda i, j: i + j, (7, 3), F32)
    i, j = np.indices((5, 7))
    k, n = np.indices((7, 3))
    assert np.array_equal(multiply(machine, a, b, (5, 3)), reference(one(i, j), k + n))
    with machine.session(), pytest.raises(TypeError, match="where to compute; give out"):
        gk.matmul(a, b)


@on_machines
def test_sizes_of_generated_operands_are_no_part_of_the_kernel(machine: Any) -> None:
    """Another size of A beside the same B is another problem."""
    b = machine.array(np.eye(8, dtype=F32))
    for rows in (3, 5, 4):
        a = gk.layouts.GeneratedMatrix(lambda i, j: i + j, (rows, 8), F32)
        with machine.session():
            out = machine.numpy(gk.matmul(a, b))
        assert np.array_equal(out, np.add(*np.indices((rows, 8))))


# -- skipped work -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Told(layouts.RowMajor):
    """B that tells which rows of it are read."""

    def load(self, data: Any, tile: Any, shape: Any) -> tuple:
        self.note(tile.index[0])
        return layouts.RowMajor.load(self, data, tile, shape)

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        self.note(i)
        return data[i, j]

    def note(self, k: int) -> None:
        print("block", k // 8)


@pytest.mark.kin(5)
@pytest.mark.parametrize(("layout", "array", "blocks"), [
    (layouts.Diagonal(F32), np.ones(64, F32), {2, 3}),
    (layouts.Triangular(layouts.RowMajor(F32)), np.ones((64, 64), F32), {0, 1, 2, 3}),
    (layouts.Triangular(layouts.RowMajor(F32), "upper"), np.ones((64, 64), F32), {2, 3, 4, 5, 6, 7}),
    (layouts.Symmetric(layouts.RowMajor(F32)), np.ones((64, 64), F32), set(range(8))),
], ids=["diagonal", "lower", "upper", "symmetric"])
def test_blocks_outside_of_the_structure_are_not_read(layout: Any, array: np.ndarray, blocks: set[int],
                                                      capsys: pytest.CaptureFixture) -> None:
    """Rows 16 to 32 of D need these blocks of 8 rows of B (the condition drops the other rows of D)."""
    from gemmkit.kernels.spec import Condition

    @dataclass(frozen=True)
    class Rows(Condition):
        def __call__(self, m: int, n: int, k: int) -> bool:
            return m == 16

    conf = config(OPERATORS["fpu"], layout, Told(F32), condition=Rows())
    with gk.emulate():
        gk.matmul(array, np.ones((64, 16), F32), conf=conf, out=np.empty((64, 16), F32))
    assert {int(line.split()[1]) for line in capsys.readouterr().out.splitlines()} == blocks


@pytest.mark.thorough
def test_a_transform_that_makes_something_of_nothing() -> None:
    """Then nothing is skipped: the result does not depend on the tiles."""
    x, b = np.arange(1, 41, dtype=F32), np.eye(40, dtype=F32)
    shifted = transforms.Map(lambda v: v + 1)
    with gk.emulate():
        for operator in OPERATORS.values():
            if operator.fragment_a.dtype == F32:
                conf = config(operator, layouts.Diagonal(F32), transform_global_to_shared_a=shifted)
                assert not conf.global_a_layout.skips
                out = gk.matmul(x, b, conf=conf)
                assert np.array_equal(out, np.diag(x) + 1)
                out = gk.matmul(b, x, conf=config(operator, None, layouts.Diagonal(F32), transform_shared_to_regs_b=shifted))
                assert np.array_equal(out, np.diag(x) + 1)


def test_min_plus() -> None:
    """``nothing`` is the operator's identity: no path but the stored ones."""
    @dataclass(frozen=True)
    class MinPlus(FPUOp):
        identity = start = math.inf

        def multiply(self, a: Any, b: Any) -> Any:
            return a + b

        def combine(self, c: Any, product: Any) -> Any:
            return min(c, product)

    x = np.random.default_rng(0).random((24, 24), F32)
    layout = layouts.Triangular(layouts.RowMajor(F32), nothing=math.inf)
    low = np.where(np.tril(np.ones((24, 24), bool)), x, np.inf).astype(F32)
    with gk.emulate():
        out = gk.matmul(x, x, conf=config(MinPlus(M=16, N=16), layout))
    assert np.array_equal(out, (low[:, :, None] + x[None]).min(axis=1))


# -- as objects, through every face -----------------------------------------------------------------------------------

def objects(machine: Any, x: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Matrices with structure made of ``x``, and what they are."""
    yield gk.layouts.DiagonalMatrix(machine.array(x[0].copy())), np.diag(x[0])
    yield gk.layouts.TriangularMatrix(machine.array(stored(x, "lower", False))), triangle(x, "lower", False)
    yield gk.layouts.TriangularMatrix(machine.array(stored(x, "upper", True, "F")), "upper", unit=True), triangle(x, "upper", True)
    yield gk.layouts.SymmetricMatrix(machine.array(stored(x, "upper", False)), "upper"), mirrored(x, "upper")
    yield gk.layouts.GeneratedMatrix(two, x.shape, x.dtype, machine.array(x[0].copy()), x.dtype.type(2)), x[0].astype(F64)[:, None] + 2 * np.indices(x.shape)[1]


@pytest.mark.thorough
@on_machines
def test_gemmex_dispatches_on_what_its_arguments_are(machine: Any, rng: np.random.Generator) -> None:
    """The paper's Listing 11: library code that knows nothing of structure, all transposes, on either side."""
    n, other = 17, 9
    x = whole(rng, (n, n), F32)
    b, c = whole(rng, (n, other), F32), whole(rng, (n, other), F32)
    for matrix, full in objects(machine, x):
        for transa, transb in ("NT", "CN"):
            got = machine.array(c)
            given = machine.array(b if transb == "N" else np.ascontiguousarray(b.T))
            with machine.session():
                assert gk.blas.gemmEx(transa, transb, 2.0, matrix, given, -1.0, got) is got
            assert np.array_equal(machine.numpy(got), 2 * reference(full if transa == "N" else full.T, b) - c)
        got = machine.array(np.ascontiguousarray(c.T))
        with machine.session():
            gk.blas.gemmEx("T", "T", 1.0, machine.array(b), matrix, 0.0, got)
        assert np.array_equal(machine.numpy(got), reference(b.T, full.T))


@pytest.mark.thorough
@on_machines
def test_matmul_plan_and_gemm_of_objects(machine: Any, rng: np.random.Generator) -> None:
    x = whole(rng, (20, 20), F32)
    b = machine.array(whole(rng, (20, 12), F32))
    for matrix, full in objects(machine, x):
        expected = reference(full, machine.numpy(b))
        with machine.session():
            assert np.array_equal(machine.numpy(gk.matmul(matrix, b)), expected)
            assert np.array_equal(machine.numpy(gk.blas.gemm("N", "N", matrix, b)), expected)
            run = gk.plan(matrix, b)
            assert np.array_equal(machine.numpy(run(matrix, b)), expected)
            assert np.array_equal(machine.numpy(gk.matmul(b.T, matrix.T)), expected.T)


@pytest.mark.thorough
@on_machines
def test_two_structures(machine: Any, rng: np.random.Generator) -> None:
    x, y = whole(rng, (18, 18), F32), whole(rng, (18, 18), F32)
    operator = OPERATORS["fpu"]
    left, right = list(objects(machine, x)), list(objects(machine, y))
    for n, (a, full_a) in enumerate(left):
        for b, full_b in (right[n], right[(n + 2) % len(right)]):
            assert np.array_equal(multiply(machine, a, b, (18, 18), operator=operator), reference(full_a, full_b))


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.parametrize("layout", [layouts.Diagonal(F16), layouts.Triangular(layouts.RowMajor(F16)),
                                    layouts.Triangular(layouts.ColMajor(F16), "upper", unit=True),
                                    layouts.Symmetric(layouts.RowMajor(F16)), layouts.Generated(F16, one)], ids=lambda layout: repr(layout).split(" at 0x")[0])
def test_structure_compiles_to_registers(layout: Any) -> None:
    """No spill, no stack, on tensor cores; as A and as B."""
    array = np.zeros((256,) if isinstance(layout, layouts.Diagonal) else (256, 256), F16)
    for name, other in (("a", "b"), ("b", "a")):
        fields: dict[str, Any] = {f"global_{name}_layout": layout, f"global_{other}_layout": layouts.RowMajor(F16)}
        conf = gk.get_config(operator=MMAOp(), block_shape=Tile(M=64, N=64, K=32), global_d_layout=layouts.RowMajor(F32), device=H100,
                             **fields)
        kernel = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=256, N=256, K=256), operands={name: array})
        assert kernel.usage.spill_stores == 0 and kernel.usage.stack_bytes == 0 and kernel.instructions["HMMA"] > 0


# ==========================================================================================================================
# Structured operands: what is refused.

X = np.ones((6, 6), F32)


@contextlib.contextmanager
def refuses(kind: Any, *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught, gk.emulate():
        yield
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda: gk.matmul(np.ones(5, F32), X, global_a_layout=layouts.Diagonal(F32)), ValueError, ("K=6", "K=5")),
    (lambda: gk.matmul(gk.layouts.DiagonalMatrix(np.ones(5, F32)), X), ValueError, ("b has shape (6, 6)", "K=5")),
    (lambda: gk.blas.gemmEx("N", "N", 1, gk.layouts.DiagonalMatrix(np.ones(5, F32)), X, 0, X.copy()), ValueError, ("(5, 5)", "(6, 6)")),
    (lambda: gk.matmul(X[:, :5].copy(), X, global_a_layout=layouts.Diagonal(F32)), ValueError, ("K=6", "K=5")),
    (lambda: gk.matmul(np.ones(6, F64), X, global_a_layout=layouts.Diagonal(F32)), ValueError, ("float64", "Diagonal('float32')")),
    (lambda: gk.layouts.DiagonalMatrix(np.array(1, F32)), ValueError, ("diagonal has shape ()", "vector")),
    (lambda: gk.layouts.TriangularMatrix(X[0]), ValueError, ("array has shape (6,)",)),
    (lambda: gk.layouts.TriangularMatrix(X, np.zeros(3)), ValueError, ("half=array", '"lower" or "upper"')),      # type: ignore[arg-type]
    (lambda: gk.layouts.TriangularMatrix(X, "left"), ValueError, ("half='left'", '"lower" or "upper"')),
    (lambda: layouts.Triangular(F32), TypeError, ("layout=dtype('float32')", "RowMajor")),
    (lambda: layouts.Triangular(layouts.RowMajor(F32), unit=1), TypeError, ("unit=1",)),
    (lambda: gk.layouts.SymmetricMatrix(np.ones((6, 5), F32)), ValueError, ("(6, 5)", "square")),
    (lambda: gk.matmul(np.ones((5, 6), F32), X, global_a_layout=layouts.Symmetric(layouts.RowMajor(F32))), ValueError, ("a is 5 x 6", "square")),
    (lambda: gk.matmul(gk.layouts.SymmetricMatrix(X), X, global_a_layout=layouts.RowMajor(F32)), TypeError, ("global_a_layout", "beside a")),
    (lambda: gk.layouts.GeneratedMatrix(3, (2, 2), F32), TypeError, ("f=3", "function")),
    (lambda: gk.layouts.GeneratedMatrix(one, (2, 2), F32, "x"), TypeError, ("first='x'",)),
    (lambda: gk.layouts.GeneratedMatrix(one, (2, 2), F32, None), TypeError, ("None",)),
    (lambda: gk.layouts.GeneratedMatrix(one, (2, 2), F32, 1, 2, 3, 4, 5), TypeError, ("5 arguments", "4")),
    (lambda: gk.layouts.GeneratedMatrix(one, (2,), F32), ValueError, ("shape=(2,)",)),
    (lambda: layouts.Generated(F32, one, None, 2), TypeError, ("None",)),
    (lambda: gk.matmul(gk.layouts.GeneratedMatrix(one, (2, 5), F32), X), ValueError, ("(2, 5)", "(6, 6)", "K")),
    (lambda: gk.matmul(gk.layouts.GeneratedMatrix(lambda i, j: np.float16(1), (6, 6), F32), X), TypeError, ("<lambda>", "test_structured.py", "float16", "float32")),
    (lambda: gk.layouts.Matrix(X, F32), TypeError, ("layout=",)),
    (lambda: gk.layouts.Matrix(X, layouts.Generated(F32, one)), ValueError, ("shape=None",)),
    (lambda: gk.layouts.Matrix(X, layouts.RowMajor(F32)).T, TypeError, ("transpose",)),
])
def test_refusals(call: Any, kind: Any, words: tuple[str, ...]) -> None:
    with refuses(kind, *words):
        call()


@pytest.mark.kin(5)
@pytest.mark.compile
def test_a_generated_function_of_another_dtype_is_refused_when_compiled() -> None:
    conf = gk.get_config(operator=OPERATORS["fpu"], global_a_layout=layouts.Generated(F32, lambda i, j: np.float16(i)),
                         global_b_layout=layouts.RowMajor(F32), device=H100)
    with pytest.raises(gk.ComponentError, match=r"test_structured.py, line \d+\) returns .*float16, .* declares dtype float32"):
        ahead.compile_config(conf, device=H100, operands=dict(a=X))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.compile
@pytest.mark.parametrize("layout", [layouts.Diagonal(F32), layouts.Triangular(layouts.RowMajor(F32), "upper")], ids=repr)
def test_with_a_transform_nothing_is_skipped_in_compiled_code_either(layout: Any) -> None:
    """What does not matter to a right result may still not compile."""
    conf = gk.get_config(**mapping(OPERATORS["fpu"]), global_a_layout=layout, global_b_layout=layouts.RowMajor(F32), device=H100,
                         transform_global_to_shared_a=transforms.Map(lambda x: x + 1))
    assert ahead.compile_config(conf, device=H100, operands=dict(a=X[0] if layout.vector_axis is None else X)).usage.registers > 0
