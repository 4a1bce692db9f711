"""What users put into the slots of the single-stage and the multistage kernel: transforms, conditions, epilogues, layouts,
algebras, orders; on odd sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, Hilbert, Order
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import MAX_PLUS, MIN_PLUS, FPUOp, MMAOp, WMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.support.machines import on_machines, poison, reference, whole
from tests.support.sm80 import F16 as F16_MULTISTAGE
from tests.support.sm80 import F32 as F32_MULTISTAGE
from tests.support.sm80 import F64 as F64_MULTISTAGE
from tests.support.sm80 import KINDS, expected, routes
from tests.support.sm80 import mapping as mapping_multistage
from tests.support.sm80 import operands as operands_multistage
from tests.support.sm80 import product as product_multistage
from tests.support.user_layouts import Packed, Toeplitz

# ==========================================================================================================================
# What users put into a kernel's slots: transforms, conditions, epilogues, layouts, algebras, orders; on odd sizes.
#
# Values are small whole numbers, so that every result is exactly right or wrong.

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
    d = product(machine, a, b, c, **mapping(operator, **{point: Map(f)}))
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
    d = product(machine, a, b, c, **mapping(operator, **{point: Map(f)}))
    changed = {n: by_numpy(f, x) if n == which else x for n, x in (("a", a), ("b", b), ("c", c))}
    expected = reference(changed["a"], changed["b"], changed["c"])
    assert np.array_equal(d, by_numpy(f, expected) if which == "d" else expected)


@pytest.mark.kin(5)
@on_machines
def test_all_transforms_together(machine: Any, rng: np.random.Generator) -> None:
    operator = FPUOp(M=16, N=16, dtype=F64)
    a, b, c = operands(rng, operator)
    functions = {point: Map(placed if n % 2 else plain) for n, point in enumerate(POINTS)}
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
    d = product(machine, a, b, **mapping(MMAOp(), transform_global_to_shared_c=Map(placed)))
    assert np.array_equal(d, reference(a, b) + by_numpy(placed, np.zeros((M, N))))


@on_machines
def test_transforms_from_other_types(machine: Any, rng: np.random.Generator) -> None:
    """int8 and int32 in memory, float16 for the tensor cores: a transform says that this is meant."""
    a, b = whole(rng, (M, K), "i1"), whole(rng, (K, N), "i4")
    d = product(machine, a, b, **mapping(
        MMAOp(), global_a_layout=layouts.RowMajor("i1"), global_b_layout=layouts.RowMajor("i4"),
        transform_global_to_shared_a=Map(lambda x: x / 2),
        transform_global_to_shared_b=Map(lambda x: x - 1), global_d_layout=layouts.RowMajor(F64)))
    assert np.array_equal(d, reference(a / 2, b - 1.0))


@pytest.mark.kin(5)
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
        transform_global_to_shared_a=Map(lambda x, i, j: x + a_[i, j]),
        transform_shared_to_regs_a=Map(lambda x, i, j: x - 2 * a_[i, j]),
        transform_global_to_shared_b=Map(lambda x, i, j: x + b_[i, j]),
        transform_shared_to_regs_b=Map(lambda x, i, j: x + b_[i, j]),
        transform_global_to_shared_c=Map(lambda x, i, j: x + c_[i, j]),
        transform_shared_to_regs_c=Map(lambda x, i, j: x - rows_[i]),
        transform_regs_to_shared_d=Map(lambda x, i, j: x * d_[i, j]),
        transform_shared_to_global_d=Map(lambda x, i, j: x + by * rows_[i])))
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

@pytest.mark.kin(5)
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


# ==========================================================================================================================
# What fills the slots of the multistage kernel: C, epilogues, transforms, layouts, conditions, semirings, stacks, splits, orders.
#
# Values are small whole numbers, so that every result is exactly right or wrong; D is poisoned before.

M_MULTISTAGE, N_MULTISTAGE, K_MULTISTAGE = 21, 19, 53
TWO = {"mma": MMAOp(), "fpu": FPUOp(16, 16)}
DEPTH = {"mma": 32, "fpu": 16}


def small(name: str, **fields: Any) -> gk.Config:
    """One warp; K = 53 goes around the ring of either."""
    return mapping_multistage(TWO[name], steps=DEPTH[name] // TWO[name].K, **{**dict(warps=(1, 1)), **fields})


def three(rng: np.random.Generator, name: str, m: int = M_MULTISTAGE, n: int = N_MULTISTAGE, k: int = K_MULTISTAGE) -> tuple:
    return (*operands_multistage(rng, TWO[name], m, n, k), whole(rng, (m, n), F32_MULTISTAGE))


# -- C, transforms, epilogues ---------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("name", TWO)
def test_c(machine: Any, name: str, dtype: str, rng: np.random.Generator) -> None:
    """C of D's type or another; the ring takes its place. Without K it is all there is."""
    for k in (K_MULTISTAGE, 0):
        a, b, c = three(rng, name, k=k)
        c = c.astype(dtype)
        conf = small(name, global_c_layout=RowMajor(dtype), global_d_layout=RowMajor(F64_MULTISTAGE))
        assert np.array_equal(product_multistage(machine, conf, a, b, c), reference(a, b, c))


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("f", [plain, placed], ids=["f(x)", "f(x,i,j)"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", TWO)
def test_a_transform_at_each_point_in_the_multistage_kernel(machine: Any, name: str, point: str, f: Any, rng: np.random.Generator) -> None:
    which = POINTS[point]
    a, b, c = three(rng, name)
    d = product_multistage(machine, small(name, global_c_layout=RowMajor(F32_MULTISTAGE), **{point: Map(f)}), a, b, c)
    changed = {n: by_numpy(f, x) if n == which else x for n, x in (("a", a), ("b", b), ("c", c))}
    expected = reference(changed["a"], changed["b"], changed["c"])
    assert np.array_equal(d, by_numpy(f, expected) if which == "d" else expected)


@on_machines
def test_all_transforms_together_in_the_multistage_kernel(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = (x.astype(F64_MULTISTAGE) for x in three(rng, "fpu", k=11))
    functions = {point: Map(placed if n % 2 else plain) for n, point in enumerate(POINTS)}
    conf = mapping_multistage(FPUOp(16, 16, dtype=F64_MULTISTAGE), steps=4, warps=(1, 1), global_c_layout=RowMajor(F64_MULTISTAGE), **functions)

    def through(x: np.ndarray, *names: str) -> np.ndarray:
        for name in names:
            x = by_numpy(functions[f"transform_{name}"].f, x)
        return x

    total = reference(*(through(x, f"global_to_shared_{n}", f"shared_to_regs_{n}") for n, x in (("a", a), ("b", b), ("c", c))))
    assert np.array_equal(product_multistage(machine, conf, a, b, c), through(total, "regs_to_shared_d", "shared_to_global_d"))


def chained(machine: Any, bias: np.ndarray, residual: np.ndarray, kept: Any) -> epilogues.Epilogue:
    """Every epilogue that has an array or a number, one after the other."""
    return (epilogues.Bias(machine.array(bias)) | epilogues.Scale(2.0) | epilogues.Residual(machine.array(residual))
            | epilogues.Store(kept) | Clamp(-30, 25) | epilogues.ReLU() | epilogues.Elementwise(placed))


@on_machines
def test_a_chain_of_epilogues(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = three(rng, "mma")
    bias, kept = whole(rng, (N_MULTISTAGE,), F32_MULTISTAGE), machine.array(poison((M_MULTISTAGE, N_MULTISTAGE), F32_MULTISTAGE))
    d = product_multistage(machine, small("mma", epilogue=chained(machine, bias, c, kept)), a, b)
    i, j = np.indices((M_MULTISTAGE, N_MULTISTAGE))
    before = 2 * (reference(a, b) + bias) + c
    assert np.array_equal(machine.numpy(kept), before)
    assert np.array_equal(d, placed(np.minimum(np.maximum(before + i, -30), 25 + j).clip(0), i, j))


EPILOGUES: dict[str, tuple[Any, Any]] = {
    "scaled and added": (lambda c: epilogues.LinearCombination(2.0, -1.0, c, RowMajor(F32_MULTISTAGE)), lambda x, c: 2 * x - c),
    "chosen": (lambda c: epilogues.Where(lambda m, n: c[m, n] != 0, 0.0), lambda x, c: np.where(c != 0, x, 0)),
    "causal": (lambda c: epilogues.CausalMask(0.0), lambda x, c: np.tril(x)),
    "clamped": (lambda c: epilogues.Clamp(-5.0, 7.0), lambda x, c: np.clip(x, -5, 7)),
    "GELU": (lambda c: epilogues.GELU(), None), "SiLU": (lambda c: epilogues.SiLU(), None), "tanh": (lambda c: epilogues.Tanh(), None),
}
ACTIVATIONS = {"GELU": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2, "SiLU": lambda x: x / (1 + np.exp(-x)),
               "tanh": np.tanh}


@pytest.mark.kin(5)
@pytest.mark.sample(14)
@on_machines
@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("name", TWO)
def test_other_epilogues(machine: Any, name: str, kind: str, rng: np.random.Generator) -> None:
    a, b, c = three(rng, name)
    make, f = EPILOGUES[kind]
    d = product_multistage(machine, small(name, epilogue=make(machine.array(c))), a, b)
    x = reference(a, b)
    if f is None:
        assert np.allclose(d, ACTIVATIONS[kind](x), rtol=1e-6, atol=1e-6)
    else:
        assert np.array_equal(d, f(x, c))


# -- layouts and conditions -----------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("name", TWO)
def test_layouts_of_the_users(machine: Any, name: str, rng: np.random.Generator) -> None:
    """A by `element`, through registers, beside a B that cp.async brings; C and D packed."""
    dtype = TWO[name].fragment_a.dtype
    n = 24
    t, b, c = whole(rng, (M_MULTISTAGE + K_MULTISTAGE - 1,), dtype), whole(rng, (K_MULTISTAGE, n), dtype), whole(rng, (M_MULTISTAGE, n), F32_MULTISTAGE)
    conf = small(name, a=Toeplitz(dtype), b=RowMajor(dtype), d=Packed(F32_MULTISTAGE), global_c_layout=Packed(F32_MULTISTAGE))
    out = machine.array(poison((M_MULTISTAGE * n,), F32_MULTISTAGE))
    sizes = dict(M=M_MULTISTAGE, N=n, K=K_MULTISTAGE)
    by = [machine.array(x) for x in (t, b, c.reshape(-1))]
    with machine.session():
        spec = gk.plan(*by, conf, out=out, gemm_shape=sizes)._compiled.spec
        gk.matmul(*by, conf, out=out, gemm_shape=sizes)
    assert [type(x.route).__name__ for x in (spec.a, spec.b)] == ["StagedByThreads", "CpAsync"]
    m, k = np.indices((M_MULTISTAGE, K_MULTISTAGE))
    assert np.array_equal(machine.numpy(out).reshape(M_MULTISTAGE, n), reference(t[m - k + K_MULTISTAGE - 1], b, c))


HALVES = {"lower": np.tril, "upper": np.triu}


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", TWO)
def test_triangles_skip_work(machine: Any, name: str, half: str, rng: np.random.Generator) -> None:
    """As A and as B; what is not stored is NaN, and tiles beside the triangle are not even asked for."""
    dtype, n = TWO[name].fragment_a.dtype, 50
    x, b, a = whole(rng, (n, n), dtype), whole(rng, (n, N_MULTISTAGE), dtype), whole(rng, (N_MULTISTAGE, n), dtype)
    full = HALVES[half](x)
    stored = np.where(HALVES[half](np.ones_like(x)) != 0, x, np.nan).astype(dtype)
    layout = layouts.Triangular(RowMajor(dtype), half)
    assert np.array_equal(product_multistage(machine, small(name, a=layout), stored, b), reference(full, b))
    assert np.array_equal(product_multistage(machine, small(name, b=layout), a, stored), reference(a, full))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("name", TWO)
def test_diagonals_and_symmetric_matrices(machine: Any, name: str, rng: np.random.Generator) -> None:
    dtype, n = TWO[name].fragment_a.dtype, 50
    d, b = whole(rng, (n,), dtype), whole(rng, (n, N_MULTISTAGE), dtype)
    diagonal = product_multistage(machine, small(name, a=layouts.Diagonal(dtype)), d, b)
    assert np.array_equal(diagonal, reference(np.diag(d), b))
    x = whole(rng, (n, n), dtype)
    stored = np.where(np.tril(np.ones_like(x)) != 0, x, np.nan).astype(dtype)
    full = np.tril(x) + np.tril(x, -1).T
    assert np.array_equal(product_multistage(machine, small(name, a=layouts.Symmetric(RowMajor(dtype), "lower")), stored, b), reference(full, b))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", TWO)
def test_a_condition_skips_k_tiles(machine: Any, name: str, steps: int, rng: np.random.Generator) -> None:
    """Copies ahead leave out what the rounds leave out; right of a column nothing is multiplied."""
    depth = DEPTH[name] * steps
    a, b, c = three(rng, name, k=7 * depth - 3)
    conf = mapping_multistage(TWO[name], steps=depth // TWO[name].K, warps=(1, 1), global_c_layout=RowMajor(F32_MULTISTAGE), condition=Banded(depth, 16))
    kept = np.arange(7 * depth - 3) // depth % 2 == 0
    total = reference(a[:, kept], b[kept], c)
    total[:, 16:] = c[:, 16:]
    assert np.array_equal(product_multistage(machine, conf, a, b, c), total)


# -- semirings ------------------------------------------------------------------------------------------------------------

def sized(semiring: Any, dtype: Any = F32_MULTISTAGE) -> Any:
    return semiring.sized(dict(M=16, N=16, MB=4, NB=8), dtype, dtype, dtype)


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("k", [0, 1, 16, 53])
@pytest.mark.parametrize("trans", ["NN", "TT"])
@pytest.mark.parametrize("semiring, absent", [(MIN_PLUS, np.inf), (MAX_PLUS, -np.inf)], ids=["min-plus", "max-plus"])
def test_the_identity_stands_beyond_the_edges(machine: Any, semiring: Any, absent: float, trans: str, k: int,
                                              rng: np.random.Generator) -> None:
    """Zeros there would be the shortest paths of all: all values are far from it. Copies that are out of range store it."""
    sign = 1 if absent > 0 else -1
    a, b, c = (sign * (20 + whole(rng, shape, F32_MULTISTAGE, 5)) for shape in ((M_MULTISTAGE, k), (k, N_MULTISTAGE), (M_MULTISTAGE, N_MULTISTAGE)))
    orders = [ColMajor if t == "T" else RowMajor for t in trans]
    paths = (a[:, :, None] + b[None])
    total = paths.min(1, initial=np.inf) if sign > 0 else paths.max(1, initial=-np.inf)
    conf = mapping_multistage(sized(semiring), *orders, steps=16)
    assert np.array_equal(product_multistage(machine, conf, a, b), total)
    with_c = mapping_multistage(sized(semiring), *orders, steps=16, global_c_layout=RowMajor(F32_MULTISTAGE))
    assert np.array_equal(product_multistage(machine, with_c, a, b, c), np.minimum(total, c) if sign > 0 else np.maximum(total, c))


@pytest.mark.kin(5)
@on_machines
def test_the_identity_by_wide_copies(machine: Any, rng: np.random.Generator) -> None:
    """Four elements a copy, wholly in range or out; of integers, too."""
    for dtype in (F32_MULTISTAGE, np.dtype("i4")):
        operator = sized(MIN_PLUS, dtype)
        a, b = 20 + whole(rng, (20, 53), dtype, 5), 20 + whole(rng, (53, 20), dtype, 5)
        conf = mapping_multistage(operator, ColMajor, RowMajor, steps=16)
        assert routes(machine, conf, machine.array(np.asfortranarray(a)), machine.array(b)) == ("CpAsync 4", "CpAsync 4")
        assert np.array_equal(product_multistage(machine, conf, a, b), (a[:, :, None] + b[None]).min(1))


# -- stacks, splits, orders, streams ----------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("kind", ["f16", "f32", "c64", "f64 by dmma"])
def test_stacks(machine: Any, kind: str, rng: np.random.Generator, grids: list[Any]) -> None:
    """In one launch: broadcast, spread, transposed; matrices an odd distance apart are copied as far as they allow it."""
    operator = KINDS[kind]
    conf = mapping_multistage(operator)
    a, b = operands_multistage(rng, operator, 2 * 19, 21, 37)
    a, b = a.reshape(2, 19, 37), np.stack([b, 2 * b]).reshape(2, 1, 37, 21)
    wide = a.astype("c16" if a.dtype.kind == "c" else "f8") @ b
    out = machine.array(poison(wide.shape, conf.global_d_layout.dtype))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
    assert np.array_equal(machine.numpy(out), wide)
    assert len(grids) == (1 if machine.emulated else 0)


@pytest.mark.kin(5)
@on_machines
def test_a_stack_with_a_function_of_the_products_number(machine: Any, rng: np.random.Generator) -> None:
    a, b, bias = whole(rng, (3, 20, 40), F16_MULTISTAGE), whole(rng, (3, 40, 24), F16_MULTISTAGE), whole(rng, (3, 24), F32_MULTISTAGE)
    conf = small("mma", transform_global_to_shared_a=Map(lambda x, i, j, batch: x + batch), epilogue=epilogues.Bias(machine.array(bias)))
    out = machine.array(poison((3, 20, 24), F32_MULTISTAGE))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
    assert np.array_equal(machine.numpy(out), (a.astype(F64_MULTISTAGE) + np.arange(3)[:, None, None]) @ b + bias[:, None])


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("kind", ["f16", "f32", "f64 by dmma", "c64"])
def test_splits(machine: Any, kind: str, splits: int, rng: np.random.Generator) -> None:
    """Some blocks have nothing of K; one alone takes C."""
    operator = KINDS[kind]
    for k in (1, 9 * operator.K + 1):
        a, b = operands_multistage(rng, operator, 19, 21, k)
        c = whole(rng, (19, 21), "f4").astype(operator.fragment_c.dtype)
        conf = mapping_multistage(operator, splits=splits, global_c_layout=RowMajor(c.dtype))
        assert np.array_equal(product_multistage(machine, conf, a, b, c), expected(operator, a, b) + c)


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("order", [Columns(), Grouped(1), Grouped(3), Hilbert()], ids=repr)
def test_orders_decide_nothing_in_the_multistage_kernel(machine: Any, order: Any, rng: np.random.Generator) -> None:
    a, b, _ = three(rng, "mma", m=76, n=37, k=40)
    assert np.array_equal(product_multistage(machine, small("mma", order=order), a, b), reference(a, b))


@pytest.mark.gpu
def test_streams_side_by_side(rng: np.random.Generator) -> None:
    """Products in several streams, started in turn and the other way round; each has results of its own."""
    import cupy

    conf = mapping_multistage(FPUOp(32, 32), steps=16, warps=(2, 2))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    given = [[cupy.array(whole(rng, shape, F32_MULTISTAGE)) for shape in ((300 + 7 * n, 200), (200, 150))] for n in range(4)]
    cupy.cuda.Device().synchronize()
    for turn in (range(4), range(3, -1, -1)):
        out = [cupy.full((300 + 7 * n, 150), np.nan, F32_MULTISTAGE) for n in range(4)]
        cupy.cuda.Device().synchronize()
        for n in turn:
            gk.matmul(*given[n], None, conf, out=out[n], stream=streams[n])
        cupy.cuda.Device().synchronize()
        for n in range(4):
            assert np.array_equal(out[n].get(), reference(*(x.get() for x in given[n])))


# -- what a user's operator says --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class SquaredDistance(FPUOp):
    def multiply(self, a, b):
        return (a - b) * (a - b)


@pytest.mark.kin(5)
@on_machines
def test_an_operator_of_the_users(machine: Any, rng: np.random.Generator) -> None:
    a, b = whole(rng, (M_MULTISTAGE, 64), F32_MULTISTAGE), whole(rng, (64, N_MULTISTAGE), F32_MULTISTAGE)
    d = product_multistage(machine, mapping_multistage(SquaredDistance(16, 16), steps=8), a, b)
    assert np.array_equal(d, ((a[:, :, None].astype(F64_MULTISTAGE) - b[None]) ** 2).sum(1))


@pytest.mark.kin(5)
@on_machines
def test_an_operator_without_places(machine: Any, rng: np.random.Generator) -> None:
    """WMMAOp loads from where it likes, in the order that shared tiles have: the defaults tell it."""
    operator = WMMAOp()
    assert not operator.has_places
    a, b = whole(rng, (35, 70), F16_MULTISTAGE), whole(rng, (70, 37), F16_MULTISTAGE)
    conf = mapping_multistage(operator, block_shape=Tile(M=32, N=16, K=32), compute_warp=Tile(M=16, N=16, K=32))
    assert conf.operator.a_order == "row"
    assert np.array_equal(product_multistage(machine, conf, a, b), reference(a, b))
