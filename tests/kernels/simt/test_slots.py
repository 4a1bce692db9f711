"""What users put into a kernel's slots: transforms, conditions, epilogues, layouts, algebras, orders; on odd sizes.

Values are small whole numbers, so that every result is exactly right or wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, Order
from gemmkit.kernels.spec import Condition
from gemmkit.operators import FPUOp, MMAOp, WMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from tests.support.machines import on_machines, poison, reference, whole
from tests.support.user_layouts import Packed, Toeplitz

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
M, N, K = 21, 19, 13

OPERATORS = {"mma": MMAOp(), "fpu": FPUOp(M=16, N=16), "wmma": WMMAOp()}


def mapping(operator: Any, k: int | None = None, **fields: Any) -> dict[str, Any]:
    """One warp with the smallest block."""
    k = k or max(8, operator.shape[2])
    tile = Tile(M=16, N=16, K=k)
    return {**dict(operator=operator, block_shape=tile, compute_warp=tile, warps_per_block=1,
                   global_a_layout=layouts.RowMajor(operator.fragment_a.dtype)), **fields}


def operands(rng: np.random.Generator, operator: Any, m: int = M, n: int = N, k: int = K) -> tuple:
    dtype = operator.fragment_a.dtype
    return whole(rng, (m, k), dtype), whole(rng, (k, n), dtype), whole(rng, (m, n), F32)


def product(machine: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, *, rows: int | None = None,
            columns: int | None = None, **fields: Any) -> np.ndarray:
    """D, poisoned before; the keywords are a configuration's fields."""
    if c is not None:
        fields["global_c_layout"] = layouts.RowMajor(c.dtype)
    shape = rows or a.shape[0], columns or b.shape[1]
    conf = gk.get_config(**fields)
    out = machine.array(poison(shape, conf.global_d_layout.dtype))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None if c is None else machine.array(c), conf, out=out)
    return machine.numpy(out)


# -- transforms -------------------------------------------------------------------------------------------------------

def plain(x):
    return 2 * x + 1                                   # f(0) is not 0: the rim must not show


def placed(x, i, j):
    return x + i - 2 * j                               # of the whole operand's rows and columns


def by_numpy(f: Any, x: np.ndarray) -> np.ndarray:
    x = x.astype(F64)
    return f(x) if f is plain else f(x, *np.indices(x.shape))


POINTS = {"transform_global_to_shared_a": "a", "transform_global_to_shared_b": "b", "transform_global_to_shared_c": "c",
          "transform_shared_to_regs_a": "a", "transform_shared_to_regs_b": "b", "transform_shared_to_regs_c": "c",
          "transform_regs_to_shared_d": "d", "transform_shared_to_global_d": "d"}


@pytest.mark.sample(20)
@on_machines
@pytest.mark.parametrize("f", [plain, placed], ids=["f(x)", "f(x,i,j)"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", ["mma", "fpu"])
def test_a_transform_at_each_point(machine: Any, name: str, point: str, f: Any, rng: np.random.Generator) -> None:
    operator, which = OPERATORS[name], POINTS[point]
    a, b, c = operands(rng, operator)
    d = product(machine, a, b, c, **mapping(operator, **{point: Elementwise(f)}))
    changed = {n: by_numpy(f, x) if n == which else x for n, x in (("a", a), ("b", b), ("c", c))}
    expected = reference(changed["a"], changed["b"], changed["c"])
    assert np.array_equal(d, by_numpy(f, expected) if which == "d" else expected)


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("point", POINTS)
def test_a_transform_at_each_point_of_opaque_fragments(machine: Any, point: str, rng: np.random.Generator) -> None:
    """WMMAOp: registers are transformed without coordinates, and A's and B's only where K fills its blocks."""
    operator, which = OPERATORS["wmma"], POINTS[point]
    k = 32 if point in ("transform_shared_to_regs_a", "transform_shared_to_regs_b") else K
    f = plain if "regs" in point else placed
    a, b, c = operands(rng, operator, k=k)
    d = product(machine, a, b, c, **mapping(operator, **{point: Elementwise(f)}))
    changed = {n: by_numpy(f, x) if n == which else x for n, x in (("a", a), ("b", b), ("c", c))}
    expected = reference(changed["a"], changed["b"], changed["c"])
    assert np.array_equal(d, by_numpy(f, expected) if which == "d" else expected)


@pytest.mark.kin(3)
@on_machines
def test_all_transforms_together(machine: Any, rng: np.random.Generator) -> None:
    operator = FPUOp(M=16, N=16, dtype=F64)
    a, b, c = operands(rng, operator)
    functions = {point: Elementwise(placed if n % 2 else plain) for n, point in enumerate(POINTS)}
    d = product(machine, a, b, c, **mapping(operator, **functions))

    def through(x: np.ndarray, *names: str) -> np.ndarray:
        for name in names:
            x = by_numpy(functions[f"transform_{name}"].f, x)
        return x

    expected = reference(*(through(x, f"global_to_shared_{n}", f"shared_to_regs_{n}")
                           for n, x in (("a", a), ("b", b), ("c", c))))
    assert np.array_equal(d, through(expected, "regs_to_shared_d", "shared_to_global_d"))


@on_machines
def test_a_transform_without_c_makes_one(machine: Any, rng: np.random.Generator) -> None:
    """C is zero and a transform of it is not."""
    a, b, _ = operands(rng, MMAOp())
    d = product(machine, a, b, **mapping(MMAOp(), transform_global_to_shared_c=Elementwise(placed)))
    assert np.array_equal(d, reference(a, b) + by_numpy(placed, np.zeros((M, N))))


@on_machines
def test_transforms_from_other_types(machine: Any, rng: np.random.Generator) -> None:
    """int8 and int32 in memory, float16 for the tensor cores: a transform says that this is meant."""
    a, b = whole(rng, (M, K), "i1"), whole(rng, (K, N), "i4")
    d = product(machine, a, b, **mapping(
        MMAOp(), global_a_layout=layouts.RowMajor("i1"), global_b_layout=layouts.RowMajor("i4"),
        transform_global_to_shared_a=Elementwise(lambda x: x / 2),
        transform_global_to_shared_b=Elementwise(lambda x: x - 1), global_d_layout=layouts.RowMajor(F64)))
    assert np.array_equal(d, reference(a / 2, b - 1.0))


@pytest.mark.kin(3)
@on_machines
@pytest.mark.parametrize("name", ["mma", "fpu"])
def test_captured_arrays_are_read_within_their_bounds(machine: Any, name: str, rng: np.random.Generator) -> None:
    """Arrays of an operand's size or its number of rows, looked up by coordinates at every point, and a scalar."""
    operator = OPERATORS[name]
    a, b, c = operands(rng, operator)
    tables = {"a": whole(rng, (M, K), F16), "b": whole(rng, (K, N), F16), "c": whole(rng, (M, N), F32),
              "d": whole(rng, (M, N), F32), "rows": whole(rng, (M,), F32)}
    on = {n: machine.array(x) for n, x in tables.items()}
    a_, b_, c_, d_, rows_, by = *(on[n] for n in "abcd"), on["rows"], np.float32(3)
    d = product(machine, a, b, c, **mapping(
        operator,
        transform_global_to_shared_a=Elementwise(lambda x, i, j: x + a_[i, j]),
        transform_shared_to_regs_a=Elementwise(lambda x, i, j: x - 2 * a_[i, j]),
        transform_global_to_shared_b=Elementwise(lambda x, i, j: x + b_[i, j]),
        transform_shared_to_regs_b=Elementwise(lambda x, i, j: x + b_[i, j]),
        transform_global_to_shared_c=Elementwise(lambda x, i, j: x + c_[i, j]),
        transform_shared_to_regs_c=Elementwise(lambda x, i, j: x - rows_[i]),
        transform_regs_to_shared_d=Elementwise(lambda x, i, j: x * d_[i, j]),
        transform_shared_to_global_d=Elementwise(lambda x, i, j: x + by * rows_[i])))
    rows = tables["rows"][:, None]
    expected = reference(a - tables["a"], b + 2 * tables["b"], c + tables["c"] - rows) * tables["d"] + 3 * rows
    assert np.array_equal(d, expected)


# -- condition and epilogues ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Banded(Condition):
    """Every second block along K, and nothing at all for the tiles right of a column."""

    block_k: int
    columns: gk.Scalar

    def __call__(self, m: int, n: int, k: int) -> bool:
        return k % (2 * self.block_k) == 0 and n < self.columns


@on_machines
@pytest.mark.parametrize("name", OPERATORS)
def test_a_condition_skips_blocks_along_k(machine: Any, name: str, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    fields = mapping(operator)
    k = fields["block_shape"].size.K
    a, b, c = operands(rng, operator, k=3 * k - 3)
    d = product(machine, a, b, c, condition=Banded(k, 16), **fields)
    kept = np.arange(3 * k - 3) // k % 2 == 0
    expected = reference(a[:, kept], b[kept], c)
    expected[:, 16:] = c[:, 16:]
    assert np.array_equal(d, expected)


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("along", ["M", "N"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1"])
def test_bias(machine: Any, along: str, dtype: str, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, MMAOp())
    bias = np.abs(whole(rng, (M if along == "M" else N,), dtype))
    d = product(machine, a, b, c, **mapping(MMAOp(), epilogue=epilogues.Bias(machine.array(bias), along)))
    assert np.array_equal(d, reference(a, b, c) + (bias[:, None] if along == "M" else bias))


@dataclass(frozen=True)
class Clamp(epilogues.Epilogue):
    low: gk.Scalar
    high: gk.Scalar

    def __call__(self, x, m, n):
        return min(max(x + m, self.low), self.high + n)


@on_machines
def test_an_epilogue_of_the_users(machine: Any, rng: np.random.Generator) -> None:
    a, b, _ = operands(rng, MMAOp())
    d = product(machine, a, b, **mapping(MMAOp(), epilogue=Clamp(-3, 5)))
    i, j = np.indices((M, N))
    assert np.array_equal(d, np.minimum(np.maximum(reference(a, b) + i, -3), 5 + j))


# -- layouts ----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(3)
@on_machines
@pytest.mark.parametrize("name", OPERATORS)
def test_a_layout_of_three_lines(machine: Any, name: str, rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    dtype = operator.fragment_a.dtype
    t, b = whole(rng, (M + K - 1,), dtype), whole(rng, (K, N), dtype)
    with machine.session():
        d = gk.matmul(machine.array(t), machine.array(b), operator=operator, global_a_layout=Toeplitz(dtype),
                      gemm_shape=dict(M=M, N=N, K=K))
    m, k = np.indices((M, K))
    assert np.array_equal(machine.numpy(d), reference(t[m - k + K - 1], b))


@on_machines
def test_layouts_of_c_and_d(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, MMAOp())
    out = machine.array(poison((M * N + 2,), F16))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), machine.array(c.reshape(-1)), out=out[1:-1],
                  global_c_layout=Packed(F32), global_d_layout=Packed(F16))
    d = machine.numpy(out)
    assert np.array_equal(d[1:-1].reshape(M, N), reference(a, b, c).astype(F16)) and np.isnan(d[[0, -1]]).all()


@on_machines
def test_an_operand_of_zeros_is_never_read(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, MMAOp())
    nothing = machine.array(np.full((1, 1), np.nan, F16))
    with machine.session():
        d = gk.matmul(nothing, machine.array(b), machine.array(c), global_a_layout=layouts.Zero(F16),
                      global_d_layout=layouts.RowMajor(F32))
    assert np.array_equal(machine.numpy(d), c)


@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("padding", [0, 8, 24])
@pytest.mark.parametrize("kind", [layouts.RowMajor, layouts.ColMajor])
@pytest.mark.parametrize("name", OPERATORS)
def test_shared_layouts_decide_nothing(machine: Any, name: str, kind: Any, padding: int,
                                       rng: np.random.Generator) -> None:
    operator = OPERATORS[name]
    a, b, c = operands(rng, operator)
    inputs, outputs = (layouts.Padded(kind(dtype), padding) for dtype in (operator.fragment_a.dtype, F32))
    d = product(machine, a, b, c, **mapping(operator, shared_a_layout=inputs, shared_b_layout=inputs,
                                            shared_c_layout=outputs, shared_d_layout=outputs))
    assert np.array_equal(d, reference(a, b, c))


# -- algebras and orders ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class MinPlus(FPUOp):
    identity = start = math.inf

    def multiply(self, a, b):
        return a + b

    def combine(self, c, product):
        return min(c, product)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("with_c", [False, True], ids=["without C", "with C"])
@pytest.mark.parametrize("k", [0, 1, 13])
def test_min_plus_with_infinities(machine: Any, k: int, with_c: bool, rng: np.random.Generator) -> None:
    a, b, c = (np.where(rng.random(s) < 0.4, np.inf, whole(rng, s, F32, 50)).astype(F32)
               for s in ((M, k), (k, N), (M, N)))
    d = product(machine, a, b, c if with_c else None, **mapping(MinPlus(M=16, N=16)))
    expected = (a[:, :, None] + b[None]).min(1, initial=np.inf)
    assert np.array_equal(d, np.minimum(expected, c) if with_c else expected)


@dataclass(frozen=True)
class Xor(FPUOp):
    """The field of two elements, 8 products at a time."""

    def multiply(self, a, b):
        return a & b

    def combine(self, c, product):
        return c ^ product


@on_machines
def test_another_algebra_on_integers(machine: Any, rng: np.random.Generator) -> None:
    a, b = rng.integers(0, 256, (M, K), "u1"), rng.integers(0, 256, (K, N), "u1")
    d = product(machine, a, b, **mapping(Xor(M=16, N=16, dtype="u1")))
    assert np.array_equal(d, np.bitwise_xor.reduce(a[:, :, None] & b[None], 1))


COLUMNS = Columns()


@dataclass(frozen=True)
class Backwards(Order):
    def block(self, linear, rows, columns):
        row, column = COLUMNS.block(linear, rows, columns)
        return rows - 1 - row, columns - 1 - column


@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("order", [Columns(), Grouped(1), Grouped(2), Grouped(3), Grouped(8), Backwards()], ids=repr)
def test_orders_decide_nothing(machine: Any, order: Order, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, MMAOp(), m=76, n=37, k=5)             # 5 x 3 tiles
    d = product(machine, a, b, c, **mapping(MMAOp(), order=order))
    assert np.array_equal(d, reference(a, b, c))
