"""Fused epilogues and transforms: each of the library's, and chains of them, on odd sizes, with poisoned outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, transforms
from gemmkit.epilogues import (
    GELU,
    Bias,
    Binary,
    CausalMask,
    Clamp,
    Elementwise,
    LinearCombination,
    ReLU,
    Residual,
    Scale,
    SiLU,
    Store,
    Tanh,
    Where,
    activations,
)
from gemmkit.operators import FPUOp, MMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison, random, reference

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
M, N, K = 21, 35, 13
OPERATORS = {"mma": MMAOp(), "fpu": FPUOp(M=16, N=16)}


def product(machine: Any, a: np.ndarray, b: np.ndarray, operator: Any, order: str = "C", **fields: Any) -> np.ndarray:
    tile = Tile(M=16, N=16, K=max(8, operator.shape[2]))
    layout = (layouts.RowMajor if order == "C" else layouts.ColMajor)(F32)
    conf = gk.get_config(operator=operator, block_shape=tile, compute_warp=tile, warps_per_block=1,
                         global_a_layout=layouts.RowMajor(operator.fragment_a.dtype), global_d_layout=layout, **fields)
    out = machine.array(poison((a.shape[0], b.shape[1]), F32, order))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), conf=conf, out=out)
    return np.asarray(machine.numpy(out))


def operands(rng: np.random.Generator, operator: Any) -> tuple[np.ndarray, np.ndarray]:
    dtype = operator.fragment_a.dtype
    return random(rng, (M, K), dtype), random(rng, (K, N), dtype)


erf = np.vectorize(math.erf)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ROWS, COLUMNS = np.indices((M, N))

# name: (the epilogue of an array of the machine's, what it is in NumPy)
PLAIN: dict[str, Any] = {
    "relu": (ReLU(), lambda x: np.maximum(x, 0)),
    "gelu": (GELU(), gelu),
    "gelu tanh": (GELU("tanh"), gelu_tanh),
    "silu": (SiLU(), lambda x: x / (1 + np.exp(-x))),
    "tanh": (Tanh(), np.tanh),
    "clamp": (Clamp(-0.5, 1.5), lambda x: np.clip(x, -0.5, 1.5)),
    "f(x)": (Elementwise(lambda x: x * x + 1), lambda x: x * x + 1),
    "f(x, m, n)": (Elementwise(lambda x, m, n: x + m - 2 * n), lambda x: x + ROWS - 2 * COLUMNS),
    "where": (Where(lambda m, n: (m + n) % 3 != 0, -1.0), lambda x: np.where((ROWS + COLUMNS) % 3 != 0, x, -1)),
    "causal": (CausalMask(0.0), lambda x: np.where(COLUMNS <= ROWS, x, 0)),
    "causal offset": (CausalMask(0.0, 5), lambda x: np.where(COLUMNS <= ROWS + 5, x, 0)),
    "number": (Scale(0.25), lambda x: 0.25 * x),
    "NumPy's number": (Scale(np.float32(0.25)), lambda x: 0.25 * x),
}


@pytest.mark.sample(7)
@on_machines
def test_gelu_of_16_bits(machine: Any) -> None:
    """Of every 61st float16, it is right to half a unit of the last place; infinities and NaN are as in GELU's limits."""
    bits = np.arange(0, 65536, 61, dtype=np.uint16)[:1072].view(np.float16)
    x = np.where(np.isfinite(bits), bits, np.float16(1)).reshape(16, 67)
    x[0, :3] = np.inf, -65504, np.nan
    with machine.session():
        d = gk.matmul(machine.array(np.eye(16, dtype=np.float16)), machine.array(np.nan_to_num(x, posinf=65504.0)),
                      epilogue=epilogues.Elementwise(activations.gelu_of_16_bits))
    exact = gelu(np.nan_to_num(x.astype(F64), posinf=65504.0))
    unit = np.spacing(np.minimum(abs(exact), 60000).astype(np.float16)).astype(F64)
    assert (abs(machine.numpy(d) - exact) <= 0.52 * unit).all()
    with np.errstate(all="ignore"):
        ends = [float(activations.gelu_of_16_bits(np.float32(v))) for v in (np.inf, -np.inf, np.nan)]
    assert ends[0] == np.inf and np.float16(ends[1]) == 0 and ends[2] != ends[2]


@on_machines
@pytest.mark.parametrize("name", PLAIN)
def test_without_operands(machine: Any, name: str, rng: np.random.Generator) -> None:
    epilogue, by_numpy = PLAIN[name]
    for operator in OPERATORS.values():
        a, b = operands(rng, operator)
        assert_close(product(machine, a, b, operator, epilogue=epilogue), by_numpy(reference(a, b)), 1e-6)


@pytest.mark.kin(4)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_with_operands(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Vectors and matrices of other dtypes than the sums', row- and column-major, into row- and column-major D."""
    operator = OPERATORS["mma"]
    a, b = operands(rng, operator)
    x = reference(a, b)
    row, column = random(rng, (N,), dtype), random(rng, (M,), dtype)
    for order in "CF":
        added = random(rng, (M, N), dtype, order)
        for epilogue, expected in (
                (Scale(machine.array(row)), x * row), (Scale(machine.array(column), along="M"), x * column[:, None].astype(F64)),
                (Bias(machine.array(row)), x + row), (Bias(machine.array(column), along="M"), x + column[:, None].astype(F64)),
                (Residual(machine.array(added)), x + added)):
            assert_close(product(machine, a, b, operator, order, epilogue=epilogue), expected, 1e-6)


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("order", ["C", "F"])
def test_store_keeps_the_value_before_the_activation(machine: Any, order: str, rng: np.random.Generator) -> None:
    for operator in OPERATORS.values():
        a, b = operands(rng, operator)
        before, after = (machine.array(poison((M, N), dtype, order)) for dtype in (F16, F32))
        bias = random(rng, (N,), F32)
        d = product(machine, a, b, operator, epilogue=Bias(machine.array(bias)) | Store(before) | GELU() | Store(after) | Clamp(0.0, 1.0))
        x = reference(a, b) + bias
        assert_close(machine.numpy(before), x, 1e-3)
        assert_close(machine.numpy(after), gelu(x), 1e-6)
        assert_close(d, np.clip(gelu(x), 0, 1), 1e-6)


@on_machines
def test_a_long_chain(machine: Any, rng: np.random.Generator) -> None:
    """scale, bias, residual, activation, row scale, gates, mask: as a sum of parts grouped in two ways."""
    a, b = operands(rng, OPERATORS["mma"])
    bias, rows, residual, gate = random(rng, (N,), F32), random(rng, (M,), F16), random(rng, (M, N), F16), random(rng, (N, M), F32).T
    x = 0.5 * reference(a, b) + bias + residual
    x = x / (1 + np.exp(-x)) * rows[:, None].astype(F64) * (1 + gate) + residual * ROWS - COLUMNS
    parts = [Scale(0.5), Bias(machine.array(bias)), Residual(machine.array(residual)), SiLU(), Scale(machine.array(rows), along="M"),
             Binary(machine.array(gate), f=lambda x, y: x * (1 + y)),
             Binary(machine.array(residual), f=lambda x, y, m, n: x + np.float32(y) * m - n), CausalMask(-1.0)]
    expected = np.where(COLUMNS <= ROWS, x, -1)
    left = parts[0] | parts[1] | parts[2] | parts[3] | parts[4] | parts[5] | parts[6] | parts[7]
    right = (parts[0] | parts[1]) | (parts[2] | (parts[3] | (parts[4] | (parts[5] | (parts[6] | parts[7])))))
    assert list(epilogues.parts(left)) == list(epilogues.parts(right)) == parts
    for epilogue in (left, right):
        assert_close(product(machine, a, b, OPERATORS["mma"], epilogue=epilogue), expected, 1e-6)


@on_machines
def test_runtime_values_compile_nothing(machine: Any, rng: np.random.Generator) -> None:
    a, b = (machine.array(x) for x in operands(rng, OPERATORS["mma"]))

    def call(scale: float, low: float) -> None:
        residual = random(rng, (M, N), F32)
        with machine.session():
            d = gk.matmul(a, b, epilogue=Scale(scale) | Residual(machine.array(residual)) | Clamp(low, 1.0), global_d_layout=layouts.RowMajor(F32))
        expected = np.clip(scale * reference(machine.numpy(a), machine.numpy(b)) + residual, low, 1)
        assert_close(machine.numpy(d), expected, 1e-6)

    call(2.0, -1.0)
    with machine.compiles_nothing():
        call(-0.5, 0.25)


@on_machines
def test_linear_combination_composes(machine: Any, rng: np.random.Generator) -> None:
    a, b = operands(rng, OPERATORS["fpu"])
    c = random(rng, (M, N), F32)
    epilogue = LinearCombination(2.0, -0.5, machine.array(c), layouts.RowMajor(F32)) | ReLU()
    assert_close(product(machine, a, b, OPERATORS["fpu"], epilogue=epilogue), np.maximum(2 * reference(a, b) - 0.5 * c, 0), 1e-6)


@on_machines
def test_a_residual_in_place(machine: Any, rng: np.random.Generator) -> None:
    a, b = operands(rng, OPERATORS["fpu"])
    c = random(rng, (M, N), F32)
    out = machine.array(c)
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), out=out, epilogue=Residual(out))
    assert_close(machine.numpy(out), reference(a, b) + c, 1e-6)


@dataclass(frozen=True)
class Softplus(epilogues.Epilogue):
    sharpness: gk.Scalar

    def __call__(self, x, m, n):
        return math.log1p(math.exp(self.sharpness * x)) / self.sharpness


@on_machines
def test_a_users_epilogue_composes(machine: Any, rng: np.random.Generator) -> None:
    a, b = operands(rng, OPERATORS["fpu"])
    epilogue = Elementwise(lambda x: x / 2) | Softplus(np.float32(1.5)) | ReLU()
    expected = np.log1p(np.exp(1.5 * reference(a, b) / 2)) / 1.5
    assert_close(product(machine, a, b, OPERATORS["fpu"], epilogue=epilogue), expected, 1e-6)


# -- transforms -------------------------------------------------------------------------------------------------------

def plus_one(x):
    return x + 1


def placed(x, i, j):
    return x * (i + 1) - j


POINTS = {"transform_global_to_shared_a": "a", "transform_shared_to_regs_a": "a", "transform_regs_to_shared_d": "d", "transform_shared_to_global_d": "d"}


@pytest.mark.kin(4)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("point", POINTS)
def test_transforms_compose(machine: Any, point: str, rng: np.random.Generator) -> None:
    """With and without coordinates, in both orders."""
    operator = OPERATORS["fpu"]
    a, b = operands(rng, operator)
    for functions in ((plus_one, placed), (placed, plus_one, plus_one), (plus_one, plus_one)):
        transform: Any = transforms.Identity()
        for f in functions:
            transform = transform | transforms.Map(f)

        def through(x: np.ndarray) -> np.ndarray:
            for f in functions:
                x = f(x) if f is plus_one else f(x, *np.indices(x.shape))
            return x

        expected = reference(through(a.astype(F64)), b) if POINTS[point] == "a" else through(reference(a, b))
        assert_close(product(machine, a, b, operator, **{point: transform}), expected, 1e-6)


@on_machines
def test_an_element_wise_epilogue_as_a_transform(machine: Any, rng: np.random.Generator) -> None:
    """They are functions of x, i, j; and activations are plain functions."""
    operator = OPERATORS["fpu"]
    a, b = operands(rng, operator)
    scale = random(rng, (K,), F32)
    transform = transforms.Map(Scale(machine.array(scale)) | GELU()) | transforms.Map(activations.tanh)
    expected = reference(np.tanh(gelu(a.astype(F64) * scale)), b)
    assert_close(product(machine, a, b, operator, transform_global_to_shared_a=transform), expected, 1e-6)


def test_composition_of_identities_is_one() -> None:
    both = transforms.Identity() | transforms.Identity()
    assert both.is_identity and not both.with_coordinates
    assert not (both | transforms.Map(plus_one)).is_identity
    assert (both | transforms.Map(placed)).with_coordinates


# -- activations over their whole range -------------------------------------------------------------------------------

EXTREMES = np.array([-np.inf, -1e30, -1000, -100, -20, -1, -1e-30, 0, 1e-30, 1, 20, 100, 1000, 1e30, np.inf, np.nan], F32)


@on_machines
@pytest.mark.parametrize("name", ["relu", "silu", "tanh", "sigmoid"])
def test_activations_do_not_overflow(machine: Any, name: str) -> None:
    """Of every extreme (as the only term of a sum); NaN stays NaN."""
    f = getattr(activations, name)
    a, b = EXTREMES[:, None], np.ones((1, 4), F32)
    d = product(machine, a, b, OPERATORS["fpu"], epilogue=Elementwise(f))
    x = EXTREMES.astype(F64)
    with np.errstate(all="ignore"):
        e = np.exp(-np.abs(x))
        sigmoid = np.where(x < 0, e, 1) / (1 + e)
        expected = {"relu": np.maximum(x, 0), "silu": x * sigmoid, "tanh": np.tanh(x), "sigmoid": sigmoid}[name]
    assert np.allclose(d, np.broadcast_to(expected[:, None], d.shape), rtol=1e-6, atol=1e-35, equal_nan=True)


# -- compiled, and bad input ------------------------------------------------------------------------------------------

@pytest.mark.kin(4)
@pytest.mark.compile
def test_a_chain_leaves_no_trace() -> None:
    """No call, no stack, no spill; and a chain of nothing is the code of the plain product."""
    def kernel(epilogue: Any) -> ahead.CompiledKernel:
        conf = gk.get_config(operator=MMAOp(), block_shape=Tile(M=64, N=64, K=32), global_a_layout=layouts.RowMajor(F16),
                             global_d_layout=layouts.RowMajor(F16), epilogue=epilogue, device=H100)
        return ahead.compile_config(conf, device=H100, gemm_shape=dict(M=256, N=256, K=256))

    array = np.zeros((256, 256), F16)
    chain = kernel(Scale(0.5) | Bias(array[0]) | Store(array) | GELU() | Residual(array) | Binary(array, f=lambda x, y: x * y)
                   | Binary(array, f=lambda x, y, m, n: x + y * (m - n)) | CausalMask(0.0))
    assert chain.usage.stack_bytes == 0 and chain.usage.spill_stores == 0 and chain.instructions["CALL"] == 0
    plain, nothing = kernel(epilogues.Default()), kernel(epilogues.Default() | Elementwise(lambda x: x) | Elementwise(lambda x, m, n: x))
    assert plain.instructions == nothing.instructions


@dataclass(frozen=True)
class OwnWay(epilogues.Epilogue):
    def tile(self, spec, d, tile, values, shape):
        pass


A = np.ones((6, 6), F32)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda: GELU("sigmoid"), ValueError, ("form='sigmoid'", '"erf" or "tanh"')),
    (lambda: Elementwise(3), TypeError, ("f=3",)),
    (lambda: Elementwise(lambda x, y: x), TypeError, ("2 arguments",)),
    (lambda: Where(True, 0.0), TypeError, ("mask=True",)),
    (lambda: Scale("x"), TypeError, ("str",)),
    (lambda: Scale(2.0, along="K"), ValueError, ("along='K'",)),
    (lambda: Binary(A, f=3), TypeError, ("Binary", "f=3")),
    (lambda: Binary(A, f=lambda x: x), TypeError, ("Binary", "1 argument")),
    (lambda: Binary(A[0], f=lambda x, y: x), ValueError, ("Binary", "1 dimensions")),
    (lambda: gk.matmul(A, A, epilogue=Binary(A[:5], f=lambda x, y: x)), ValueError, ("array of Binary", "(5, 6)", "6 x 6")),
    (lambda: Residual(A[0]), ValueError, ("Residual", "1 dimensions")),
    (lambda: Residual(A, layout=F32), TypeError, ("layout=",)),
    (lambda: ReLU() | (lambda x: x), TypeError, ("epilogues.Elementwise",)),
    (lambda: ReLU() | transforms.Identity(), TypeError, ("Identity", "Epilogue")),
    (lambda: ReLU() | OwnWay(), TypeError, ("OwnWay", "finish")),
    (lambda: transforms.Identity() | ReLU(), TypeError, ("ReLU", "Transform")),
    (lambda: gk.matmul(A, A, epilogue=ReLU() | Scale(A[0, :5])), ValueError, ("by of Scale", "(5,)", "(6,)")),
    (lambda: gk.matmul(A, A, epilogue=ReLU() | Residual(A[:5]) | ReLU()), ValueError, ("array of Residual", "(5, 6)", "6 x 6")),
    (lambda: gk.matmul(A, A, epilogue=Store(A) | ReLU()), ValueError, ("array of Store overlaps a",)),
])
def test_refusals(call: Any, kind: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught, gk.emulate():
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_chains_can_be_pasted() -> None:
    assert repr(Scale(0.5) | GELU() | Clamp(0.0, 1.0)) == "Scale(0.5) | GELU() | Clamp(0.0, 1.0)"
    assert repr(transforms.Identity() | transforms.Identity()) == "Identity() | Identity()"
