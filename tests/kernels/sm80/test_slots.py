"""What fills the slots of the multistage kernel: C, epilogues, transforms, layouts, conditions, semirings, stacks, splits, orders.

Values are small whole numbers, so that every result is exactly right or wrong; D is poisoned before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.emulator import machine as emulated
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, Hilbert
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import MAX_PLUS, MIN_PLUS, FPUOp, MMAOp, WMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from tests.kernels.simt.test_slots import POINTS, Banded, Clamp, by_numpy, placed, plain
from tests.support.machines import on_machines, poison, reference, whole
from tests.support.sm80 import F16, F32, F64, KINDS, expected, mapping, operands, product, routes
from tests.support.user_layouts import Packed, Toeplitz

M, N, K = 21, 19, 53
TWO = {"mma": MMAOp(), "fpu": FPUOp(16, 16)}
DEPTH = {"mma": 32, "fpu": 16}


def small(name: str, **fields: Any) -> gk.Config:
    """One warp; K = 53 goes around the ring of either."""
    return mapping(TWO[name], steps=DEPTH[name] // TWO[name].K, **{**dict(warps=(1, 1)), **fields})


def three(rng: np.random.Generator, name: str, m: int = M, n: int = N, k: int = K) -> tuple:
    return (*operands(rng, TWO[name], m, n, k), whole(rng, (m, n), F32))


# -- C, transforms, epilogues ---------------------------------------------------------------------------------------------

@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("name", TWO)
def test_c(machine: Any, name: str, dtype: str, rng: np.random.Generator) -> None:
    """C of D's type or another; the ring takes its place. Without K it is all there is."""
    for k in (K, 0):
        a, b, c = three(rng, name, k=k)
        c = c.astype(dtype)
        conf = small(name, global_c_layout=RowMajor(dtype), global_d_layout=RowMajor(F64))
        assert np.array_equal(product(machine, conf, a, b, c), reference(a, b, c))


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("f", [plain, placed], ids=["f(x)", "f(x,i,j)"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", TWO)
def test_a_transform_at_each_point(machine: Any, name: str, point: str, f: Any, rng: np.random.Generator) -> None:
    which = POINTS[point]
    a, b, c = three(rng, name)
    d = product(machine, small(name, global_c_layout=RowMajor(F32), **{point: Elementwise(f)}), a, b, c)
    changed = {n: by_numpy(f, x) if n == which else x for n, x in (("a", a), ("b", b), ("c", c))}
    expected = reference(changed["a"], changed["b"], changed["c"])
    assert np.array_equal(d, by_numpy(f, expected) if which == "d" else expected)


@on_machines
def test_all_transforms_together(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = (x.astype(F64) for x in three(rng, "fpu", k=11))
    functions = {point: Elementwise(placed if n % 2 else plain) for n, point in enumerate(POINTS)}
    conf = mapping(FPUOp(16, 16, dtype=F64), steps=4, warps=(1, 1), global_c_layout=RowMajor(F64), **functions)

    def through(x: np.ndarray, *names: str) -> np.ndarray:
        for name in names:
            x = by_numpy(functions[f"transform_{name}"].f, x)
        return x

    total = reference(*(through(x, f"global_to_shared_{n}", f"shared_to_regs_{n}") for n, x in (("a", a), ("b", b), ("c", c))))
    assert np.array_equal(product(machine, conf, a, b, c), through(total, "regs_to_shared_d", "shared_to_global_d"))


def chained(machine: Any, bias: np.ndarray, residual: np.ndarray, kept: Any) -> epilogues.Epilogue:
    """Every epilogue that has an array or a number, one after the other."""
    return (epilogues.Bias(machine.array(bias)) | epilogues.Scale(2.0) | epilogues.Residual(machine.array(residual))
            | epilogues.Store(kept) | Clamp(-30, 25) | epilogues.ReLU() | epilogues.Elementwise(placed))


@on_machines
def test_a_chain_of_epilogues(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = three(rng, "mma")
    bias, kept = whole(rng, (N,), F32), machine.array(poison((M, N), F32))
    d = product(machine, small("mma", epilogue=chained(machine, bias, c, kept)), a, b)
    i, j = np.indices((M, N))
    before = 2 * (reference(a, b) + bias) + c
    assert np.array_equal(machine.numpy(kept), before)
    assert np.array_equal(d, placed(np.minimum(np.maximum(before + i, -30), 25 + j).clip(0), i, j))


EPILOGUES: dict[str, tuple[Any, Any]] = {
    "scaled and added": (lambda c: epilogues.LinearCombination(2.0, -1.0, c, RowMajor(F32)), lambda x, c: 2 * x - c),
    "chosen": (lambda c: epilogues.Where(lambda m, n: c[m, n] != 0, 0.0), lambda x, c: np.where(c != 0, x, 0)),
    "causal": (lambda c: epilogues.Causal(0.0), lambda x, c: np.tril(x)),
    "clamped": (lambda c: epilogues.Clamp(-5.0, 7.0), lambda x, c: np.clip(x, -5, 7)),
    "GELU": (lambda c: epilogues.GELU(), None), "SiLU": (lambda c: epilogues.SiLU(), None), "tanh": (lambda c: epilogues.Tanh(), None),
}
ACTIVATIONS = {"GELU": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2, "SiLU": lambda x: x / (1 + np.exp(-x)),
               "tanh": np.tanh}


@pytest.mark.sample(14)
@on_machines
@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("name", TWO)
def test_other_epilogues(machine: Any, name: str, kind: str, rng: np.random.Generator) -> None:
    a, b, c = three(rng, name)
    make, f = EPILOGUES[kind]
    d = product(machine, small(name, epilogue=make(machine.array(c))), a, b)
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
    t, b, c = whole(rng, (M + K - 1,), dtype), whole(rng, (K, n), dtype), whole(rng, (M, n), F32)
    conf = small(name, a=Toeplitz(dtype), b=RowMajor(dtype), d=Packed(F32), global_c_layout=Packed(F32))
    out = machine.array(poison((M * n,), F32))
    sizes = dict(M=M, N=n, K=K)
    by = [machine.array(x) for x in (t, b, c.reshape(-1))]
    with machine.session():
        spec = gk.plan(*by, conf, out=out, gemm_shape=sizes)._compiled.spec
        gk.matmul(*by, conf, out=out, gemm_shape=sizes)
    assert [type(x.route).__name__ for x in (spec.a, spec.b)] == ["Staged", "CpAsync"]
    m, k = np.indices((M, K))
    assert np.array_equal(machine.numpy(out).reshape(M, n), reference(t[m - k + K - 1], b, c))


HALVES = {"lower": np.tril, "upper": np.triu}


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", TWO)
def test_triangles_skip_work(machine: Any, name: str, half: str, rng: np.random.Generator) -> None:
    """As A and as B; what is not stored is NaN, and tiles beside the triangle are not even asked for."""
    dtype, n = TWO[name].fragment_a.dtype, 50
    x, b, a = whole(rng, (n, n), dtype), whole(rng, (n, N), dtype), whole(rng, (N, n), dtype)
    full = HALVES[half](x)
    stored = np.where(HALVES[half](np.ones_like(x)) != 0, x, np.nan).astype(dtype)
    layout = layouts.Triangular(RowMajor(dtype), half)
    assert np.array_equal(product(machine, small(name, a=layout), stored, b), reference(full, b))
    assert np.array_equal(product(machine, small(name, b=layout), a, stored), reference(a, full))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("name", TWO)
def test_diagonals_and_symmetric_matrices(machine: Any, name: str, rng: np.random.Generator) -> None:
    dtype, n = TWO[name].fragment_a.dtype, 50
    d, b = whole(rng, (n,), dtype), whole(rng, (n, N), dtype)
    diagonal = product(machine, small(name, a=layouts.Diagonal(dtype)), d, b)
    assert np.array_equal(diagonal, reference(np.diag(d), b))
    x = whole(rng, (n, n), dtype)
    stored = np.where(np.tril(np.ones_like(x)) != 0, x, np.nan).astype(dtype)
    full = np.tril(x) + np.tril(x, -1).T
    assert np.array_equal(product(machine, small(name, a=layouts.Symmetric(RowMajor(dtype), "lower")), stored, b), reference(full, b))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", TWO)
def test_a_condition_skips_k_tiles(machine: Any, name: str, steps: int, rng: np.random.Generator) -> None:
    """Copies ahead leave out what the rounds leave out; right of a column nothing is multiplied."""
    depth = DEPTH[name] * steps
    a, b, c = three(rng, name, k=7 * depth - 3)
    conf = mapping(TWO[name], steps=depth // TWO[name].K, warps=(1, 1), global_c_layout=RowMajor(F32), condition=Banded(depth, 16))
    kept = np.arange(7 * depth - 3) // depth % 2 == 0
    total = reference(a[:, kept], b[kept], c)
    total[:, 16:] = c[:, 16:]
    assert np.array_equal(product(machine, conf, a, b, c), total)


# -- semirings ------------------------------------------------------------------------------------------------------------

def sized(semiring: Any, dtype: Any = F32) -> Any:
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
    a, b, c = (sign * (20 + whole(rng, shape, F32, 5)) for shape in ((M, k), (k, N), (M, N)))
    orders = [ColMajor if t == "T" else RowMajor for t in trans]
    paths = (a[:, :, None] + b[None])
    total = paths.min(1, initial=np.inf) if sign > 0 else paths.max(1, initial=-np.inf)
    conf = mapping(sized(semiring), *orders, steps=16)
    assert np.array_equal(product(machine, conf, a, b), total)
    with_c = mapping(sized(semiring), *orders, steps=16, global_c_layout=RowMajor(F32))
    assert np.array_equal(product(machine, with_c, a, b, c), np.minimum(total, c) if sign > 0 else np.maximum(total, c))


@pytest.mark.kin(5)
@on_machines
def test_the_identity_by_wide_copies(machine: Any, rng: np.random.Generator) -> None:
    """Four elements a copy, wholly in range or out; of integers, too."""
    for dtype in (F32, np.dtype("i4")):
        operator = sized(MIN_PLUS, dtype)
        a, b = 20 + whole(rng, (20, 53), dtype, 5), 20 + whole(rng, (53, 20), dtype, 5)
        conf = mapping(operator, ColMajor, RowMajor, steps=16)
        assert routes(machine, conf, machine.array(np.asfortranarray(a)), machine.array(b)) == ("CpAsync 4", "CpAsync 4")
        assert np.array_equal(product(machine, conf, a, b), (a[:, :, None] + b[None]).min(1))


# -- stacks, splits, orders, streams ----------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("kind", ["f16", "f32", "c64", "f64 by dmma"])
def test_stacks(machine: Any, kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch: broadcast, spread, transposed; matrices an odd distance apart are copied as far as they allow it."""
    operator = KINDS[kind]
    conf = mapping(operator)
    a, b = operands(rng, operator, 3 * 19, 21, 37)
    a, b = a.reshape(3, 19, 37), np.stack([b, 2 * b]).reshape(2, 1, 37, 21)
    wide = a.astype("c16" if a.dtype.kind == "c" else "f8") @ b
    out = machine.array(poison(wide.shape, conf.global_d_layout.dtype))
    launches: list[Any] = []
    if machine.emulated:
        launch = emulated.launch
        monkeypatch.setattr(emulated, "launch", lambda *given, **how: (launches.append(how["grid"]), launch(*given, **how)))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
    assert np.array_equal(machine.numpy(out), wide)
    assert len(launches) == (1 if machine.emulated else 0)


@pytest.mark.kin(5)
@on_machines
def test_a_stack_with_a_function_of_the_products_number(machine: Any, rng: np.random.Generator) -> None:
    a, b, bias = whole(rng, (3, 20, 40), F16), whole(rng, (3, 40, 24), F16), whole(rng, (3, 24), F32)
    conf = small("mma", transform_global_to_shared_a=Elementwise(lambda x, i, j, batch: x + batch), epilogue=epilogues.Bias(machine.array(bias)))
    out = machine.array(poison((3, 20, 24), F32))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
    assert np.array_equal(machine.numpy(out), (a.astype(F64) + np.arange(3)[:, None, None]) @ b + bias[:, None])


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("kind", ["f16", "f32", "f64 by dmma", "c64"])
def test_splits(machine: Any, kind: str, splits: int, rng: np.random.Generator) -> None:
    """Some blocks have nothing of K; one alone takes C."""
    operator = KINDS[kind]
    for k in (1, 9 * operator.K + 1):
        a, b = operands(rng, operator, 19, 21, k)
        c = whole(rng, (19, 21), "f4").astype(operator.fragment_c.dtype)
        conf = mapping(operator, splits=splits, global_c_layout=RowMajor(c.dtype))
        assert np.array_equal(product(machine, conf, a, b, c), expected(operator, a, b) + c)


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("order", [Columns(), Grouped(1), Grouped(3), Hilbert()], ids=repr)
def test_orders_decide_nothing(machine: Any, order: Any, rng: np.random.Generator) -> None:
    a, b, _ = three(rng, "mma", m=76, n=37, k=40)
    assert np.array_equal(product(machine, small("mma", order=order), a, b), reference(a, b))


@pytest.mark.gpu
def test_streams_side_by_side(rng: np.random.Generator) -> None:
    """Products in several streams, started in turn and the other way round; each has results of its own."""
    import cupy

    conf = mapping(FPUOp(32, 32), steps=16, warps=(2, 2))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    given = [[cupy.array(whole(rng, shape, F32)) for shape in ((300 + 7 * n, 200), (200, 150))] for n in range(4)]
    cupy.cuda.Device().synchronize()
    for turn in (range(4), range(3, -1, -1)):
        out = [cupy.full((300 + 7 * n, 150), np.nan, F32) for n in range(4)]
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
    a, b = whole(rng, (M, 64), F32), whole(rng, (64, N), F32)
    d = product(machine, mapping(SquaredDistance(16, 16), steps=8), a, b)
    assert np.array_equal(d, ((a[:, :, None].astype(F64) - b[None]) ** 2).sum(1))


@pytest.mark.kin(5)
@on_machines
def test_an_operator_without_places(machine: Any, rng: np.random.Generator) -> None:
    """WMMAOp loads from where it likes, in the order that shared tiles have: the defaults tell it."""
    operator = WMMAOp()
    assert not operator.has_places
    a, b = whole(rng, (35, 70), F16), whole(rng, (70, 37), F16)
    conf = mapping(operator, block_shape=Tile(M=32, N=16, K=32), compute_warp=Tile(M=16, N=16, K=32))
    assert conf.operator.a_order == "row"
    assert np.array_equal(product(machine, conf, a, b), reference(a, b))
