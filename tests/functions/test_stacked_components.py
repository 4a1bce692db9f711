"""Components in stacks of products: which product an element is of, arrays with a matrix for each, structure that skips work;
and that all of it is one launch, whose code has no more in it than it must."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import Tile, layouts
from gemmkit.epilogues import Bias, Elementwise, Epilogue, ReLU, Residual, Scale, Store
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.plans.adapters import component_for_products
from gemmkit.runtime.device import H100
from gemmkit.transforms import Map as Transformed
from gemmkit.tuning.model import fastest
from gemmkit.tuning.sm90 import MAPPINGS
from tests.support.machines import on_machines, poison, whole
from tests.support.sm90 import mapping

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
SIMT = dict(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32), block_shape=Tile(M=16, N=16, K=8))


def configuration(kernel: str, **fields: Any) -> gk.Config:
    """A small mapping of either kernel; D is float32."""
    if kernel == "sm90":
        return mapping("one", b=ColMajor, **fields)
    return gk.get_config(**{**SIMT, "operator": MMAOp(), "global_a_layout": RowMajor(F16), "global_b_layout": ColMajor(F16),
                            "block_shape": Tile(M=32, N=32, K=32), **fields})


def operands(machine: Any, rng: np.random.Generator, stack: tuple[int, ...] = (2, 3)) -> tuple[Any, Any, np.ndarray]:
    """A, B (in columns) and their products."""
    a, b = whole(rng, (*stack, 40, 72), F16), whole(rng, (*stack, 28, 72), F16)
    return machine.array(a), machine.array(b).swapaxes(-1, -2), a.astype(F64) @ b.swapaxes(-1, -2).astype(F64)


def run(machine: Any, a: Any, b: Any, conf: Any, shape: tuple[int, ...], c: Any = None, **fields: Any) -> np.ndarray:
    out = machine.array(poison(shape, F32))
    with machine.session():
        gk.matmul(a, b, c, conf, out=out, **fields)
    return np.asarray(machine.numpy(out))


ROWS, COLUMNS = np.arange(40)[:, None], np.arange(28)
NUMBER = np.arange(6).reshape(2, 3, 1, 1)


# -- which product an element is of -----------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(6)
@pytest.mark.parametrize("where", ["c and d", "a", "b"])
@pytest.mark.parametrize("kernel", ["sm90", "simt"])
@on_machines
def test_functions_of_the_product(machine: Any, rng: np.random.Generator, kernel: str, where: str) -> None:
    """Of A, B, C and D, by themselves and composed: the number counts products in C order."""
    a, b, expected = operands(machine, rng)
    c = whole(rng, (3, 40, 28), F32)
    fields: dict[str, Any] = {"global_c_layout": RowMajor(F32), "transform_shared_to_regs_c": Transformed(lambda x, i, j, n: x * n),
                              "epilogue": Elementwise(lambda x, m, n, batch: x + batch * m - n) | ReLU()}
    if where == "c and d":
        d = run(machine, a, b, configuration(kernel, **fields), expected.shape, machine.array(c))
        assert np.array_equal(d, np.maximum(expected + c * NUMBER + NUMBER * ROWS - COLUMNS, 0))
        return
    twice = Transformed(lambda x: x + x) | Transformed(lambda x, i, j, batch: x + batch)
    d = run(machine, a, b, configuration(kernel, **{f"transform_global_to_shared_{where}": twice}), expected.shape)
    of_a, of_b = (machine.numpy(x).astype(F64) for x in (a, b))
    assert np.array_equal(d, (2 * of_a + NUMBER) @ of_b if where == "a" else of_a @ (2 * of_b + NUMBER))


@pytest.mark.kin(5)
@on_machines
def test_without_a_stack_the_number_is_zero(machine: Any, rng: np.random.Generator) -> None:
    a, b, expected = operands(machine, rng, ())
    for kernel in ("simt", "sm90"):
        conf = configuration(kernel, epilogue=Elementwise(lambda x, m, n, batch: x + batch + m),
                             transform_global_to_shared_a=Transformed(lambda x, i, j, batch: x * (batch + 1)))
        assert np.array_equal(run(machine, a, b, conf, expected.shape), expected + ROWS)


@dataclass(frozen=True)
class PerHead(Epilogue):
    """A user's epilogue with a number and a vector for each product."""

    slopes: gk.Array

    def __call__(self, x: Any, m: int, n: int, batch: int) -> Any:
        return x + self.slopes[batch, n]


@dataclass(frozen=True)
class Shifted(Epilogue):
    """Another, which is given its product's vector."""

    vector: gk.Array
    array_ndims = MappingProxyType({"vector": 1})

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x - self.vector[n]


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", ["sm90", "simt"])
@on_machines
def test_epilogues_of_the_users(machine: Any, rng: np.random.Generator, kernel: str) -> None:
    a, b, expected = operands(machine, rng)
    slopes, vector = whole(rng, (6, 28), F32), whole(rng, (2, 1, 28), F32)
    conf = configuration(kernel, epilogue=PerHead(machine.array(slopes)) | Shifted(machine.array(vector)))
    d = run(machine, a, b, conf, expected.shape)
    assert np.array_equal(d, expected + slopes.reshape(2, 3, 1, 28) - vector[:, :, None])


@dataclass(frozen=True)
class Toeplitz(layouts.Layout):
    """a[m, k] of a vector for each product, which it picks itself."""

    def element(self, data: Any, m: int, k: int, shape: Any) -> Any:
        return data[shape.batch, m - k + shape.K - 1]


@dataclass(frozen=True)
class OwnToeplitz(layouts.Layout):
    """The same, given the product's vector."""

    array_ndim = 1

    def element(self, data: Any, m: int, k: int, shape: Any) -> Any:
        return data[m - k + shape.K - 1]


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel", ["simt", "sm90"])
@pytest.mark.parametrize("layout", [Toeplitz, OwnToeplitz])
@on_machines
def test_layouts_of_the_users(machine: Any, rng: np.random.Generator, kernel: str, layout: Any) -> None:
    a, b = whole(rng, (3, 40 + 71), F16), whole(rng, (3, 28, 72), F16)
    full = np.stack([[[row[m - k + 71] for k in range(72)] for m in range(40)] for row in a]).astype(F64)
    conf = configuration(kernel, global_a_layout=layout(F16))
    d = run(machine, machine.array(a), machine.array(b).swapaxes(1, 2), conf, (3, 40, 28), gemm_shape=dict(M=40, N=28, K=72))
    assert np.array_equal(d, full @ b.swapaxes(1, 2).astype(F64))


@pytest.mark.kin(5)
@on_machines
def test_generated_matrices_of_each_product(machine: Any, rng: np.random.Generator) -> None:
    b = whole(rng, (3, 20, 9), F32)
    a = gk.layouts.GeneratedMatrix(lambda i, j, factor, batch: np.float32(factor * (i - j) + batch), (12, 20), F32, 2)
    with machine.session():
        d = machine.numpy(gk.matmul(a, machine.array(b)))
        across = machine.numpy(gk.matmul(machine.array(b).swapaxes(1, 2), a.T))
    full = 2 * (np.arange(12)[:, None] - np.arange(20)) + np.arange(3)[:, None, None]
    assert np.array_equal(d, full @ b.astype(F64)) and np.array_equal(across, b.swapaxes(1, 2).astype(F64) @ full.swapaxes(1, 2))


# -- structure --------------------------------------------------------------------------------------------------------

@pytest.mark.thorough
@on_machines
def test_structured_stacks(machine: Any, rng: np.random.Generator) -> None:
    """Triangular and symmetric matrices as objects, diagonals beside another stack."""
    x, b = whole(rng, (3, 40, 40), F32), whole(rng, (3, 40, 24), F32)
    with machine.session():
        upper = machine.numpy(gk.matmul(gk.layouts.TriangularMatrix(machine.array(x), "lower").T, machine.array(b)))
        symmetric = machine.numpy(gk.matmul(gk.layouts.SymmetricMatrix(machine.array(x)), machine.array(b)))
        diagonal = machine.numpy(gk.matmul(machine.array(np.ascontiguousarray(x[:, 0])), machine.array(b),
                                           global_a_layout=layouts.Diagonal(F32)))
    lower = np.tril(x).astype(F64)
    assert np.array_equal(upper, lower.swapaxes(1, 2) @ b)
    assert np.array_equal(symmetric, (lower + np.tril(x, -1).swapaxes(1, 2)) @ b)
    assert np.array_equal(diagonal, x[:, 0, :, None].astype(F64) * b)


@on_machines
def test_triangles_in_the_warp_specialised_kernel(machine: Any, rng: np.random.Generator) -> None:
    x, b = whole(rng, (2, 72, 72), F16), whole(rng, (2, 28, 72), F16)
    conf = mapping("one", a=lambda dtype: layouts.Triangular(RowMajor(dtype)), b=ColMajor)
    d = run(machine, machine.array(x), machine.array(b).swapaxes(1, 2), conf, (2, 72, 28))
    assert np.array_equal(d, np.tril(x).astype(F64) @ b.swapaxes(1, 2).astype(F64))


# -- arrays with a matrix or a vector for each product ----------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", ["sm90", "simt"])
@on_machines
def test_arrays_of_stacks(machine: Any, rng: np.random.Generator, kernel: str) -> None:
    """Broadcast as NumPy does, in any order of memory; one array is enough for all products, too."""
    a, b, expected = operands(machine, rng)
    bias, rows = whole(rng, (2, 1, 28), F32), whole(rng, (3, 2, 40), F32)
    residual, all_alike = whole(rng, (3, 2, 40, 28), F32), whole(rng, (40, 28), F32)
    kept = machine.array(poison(expected.shape, F32))
    epilogue = (Bias(machine.array(bias)) | Scale(machine.array(rows).swapaxes(0, 1), along="M") | Store(kept)
                | Residual(machine.array(residual).swapaxes(0, 1)) | Residual(machine.array(all_alike)))
    d = run(machine, a, b, configuration(kernel, epilogue=epilogue), expected.shape)
    before = (expected + bias[:, :, None]) * rows.swapaxes(0, 1)[..., None]
    assert np.array_equal(machine.numpy(kept), before)
    assert np.array_equal(d, before + residual.swapaxes(0, 1) + all_alike)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("kernel", ["simt", "sm90"])
def test_a_residual_may_be_the_result(machine: Any, kernel: str, rng: np.random.Generator) -> None:
    a, b, expected = operands(machine, rng, (3,))
    before = whole(rng, expected.shape, F32)
    out = machine.array(before)
    with machine.session():
        gk.matmul(a, b, conf=configuration(kernel), out=out, epilogue=Residual(out))
        assert np.array_equal(machine.numpy(out), expected + before)
        with pytest.raises(ValueError, match="overlaps out"):
            gk.matmul(a, b, conf=configuration(kernel), out=out, epilogue=Residual(out[0]))
    out = machine.array(before)
    with machine.session():
        gk.matmul(a, b, out, configuration(kernel), out=out)
    assert np.array_equal(machine.numpy(out), expected + before)


@pytest.mark.thorough
@on_machines
def test_other_arrays_of_a_known_plan(machine: Any, rng: np.random.Generator) -> None:
    """A call whose components hold other arrays, in another order of memory or with another stack, finds what is its own."""
    a, b, expected = operands(machine, rng)
    for shape in ((2, 3, 28), (2, 1, 28), (3, 28), (28,)):
        bias = whole(rng, shape, F32)
        for array in (machine.array(bias), machine.array(np.ascontiguousarray(bias.T)).T):
            with machine.session():
                d = gk.matmul(a, b, epilogue=Bias(array) | Elementwise(lambda x, m, n, batch: x + batch))
            assert np.array_equal(machine.numpy(d), (expected + bias[..., None, :] + NUMBER).astype(F16))


def test_adapters_only_where_they_are_needed() -> None:
    plain = Bias(np.ones(36, F32)) | ReLU()
    assert component_for_products(plain, (2, 3)) is plain
    function = Transformed(lambda x, i, j: x)
    assert component_for_products(function, (2, 3)) is function
    stacked = component_for_products(Bias(np.ones((3, 36), F32)) | ReLU(), (2, 3))
    assert type(stacked.first).__name__ == "EpilogueOfStack" and stacked.second is not None
    one = component_for_products(Bias(np.ones((1, 36), F32)), (3,))
    assert type(one) is Bias and one.bias.shape == (36,)


@dataclass(frozen=True)
class Both(Epilogue):
    vector: gk.Array
    array_ndims = MappingProxyType({"vector": 1})

    def __call__(self, x: Any, m: int, n: int, batch: int) -> Any:
        return x


def test_refusals() -> None:
    a, b = np.ones((3, 4, 5), F32), np.ones((3, 5, 6), F32)
    for epilogue, kind, words in ((Both(np.ones((3, 6), F32)), TypeError, ("Both", "vector")),
                                  (Shifted(np.ones((2, 6), F32)), ValueError, ("vector of Shifted", "(2, 6)", "(3,)"))):
        with pytest.raises(kind) as caught, gk.emulate():
            gk.matmul(a, b, epilogue=epilogue)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    for f in (lambda x, i: x, lambda x, i, j, n, m: x):
        with pytest.raises(TypeError, match="a function of x"):
            Elementwise(f)


# -- one launch -------------------------------------------------------------------------------------------------------

@pytest.mark.sample(10)
@pytest.mark.parametrize("call", ["matmul", "c", "folded", "f32", "plan", "epilogue", "einsum", "chain", "broadcast", "tf32"])
def test_a_stack_is_one_launch(call: str, grids: list[Any], rng: np.random.Generator) -> None:
    a, b = whole(rng, (2, 3, 8, 16), F16), whole(rng, (2, 3, 16, 8), F16)
    bias = whole(rng, (2, 3, 8), F16)
    calls = {"matmul": lambda: gk.matmul(a, b), "c": lambda: gk.matmul(a, b, a[..., :8]), "folded": lambda: gk.matmul(a, b[0, 0]),
             "f32": lambda: gk.matmul(a.astype(F32), b.astype(F32)), "plan": lambda: gk.plan(a, b)(a, b),
             "epilogue": lambda: gk.matmul(a, b, epilogue=Bias(bias)), "einsum": lambda: gk.einsum("abij,abjk->baik", a, b),
             "chain": lambda: gk.einsum("abij,abjk->abik", a, b), "broadcast": lambda: gk.matmul(a[:, :1], b, epilogue=ReLU()),
             "tf32": lambda: gk.matmul(a.astype(F32), b.astype(F32), operator=WGMMAOp(8, dtype="float32"))}
    with gk.emulate():
        calls[call]()
    assert len(grids) == 1


def test_tiles_are_chosen_for_all_products() -> None:
    one, many = (fastest((1024, 1024, 1024), H100, mappings=MAPPINGS, products=n) for n in (1, 16))
    assert many.M * many.N >= one.M * one.N
    small = fastest((128, 128, 128), H100, mappings=MAPPINGS, products=64)
    assert small.M * small.N <= 128 * 128 and small.splits == 1
    conf = gk.get_config(operator=FPUOp(32, 16), global_a_layout=RowMajor(F32), gemm_shape=dict(M=64, N=64, K=2048, batch=512))
    assert conf.splits == 1
    alone = gk.get_config(operator=FPUOp(32, 16), global_a_layout=RowMajor(F32), gemm_shape=dict(M=64, N=64, K=2048))
    assert alone.splits > 1


@pytest.mark.thorough
@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", ["simt", "sm90"])
def test_the_code_of_a_stack(kernel: str) -> None:
    """As many registers as without, within a few; no spill, no 64-bit division, and the same matrix instructions."""
    fields: dict[str, Any] = {"operator": WGMMAOp(128) if kernel == "sm90" else MMAOp(), "global_a_layout": RowMajor(F16),
                              "global_b_layout": ColMajor(F16), "global_d_layout": RowMajor(F16 if kernel == "sm90" else F32)}
    conf = gk.get_config(device=H100, gemm_shape=dict(M=128, N=128, K=128), **fields)
    alone, stack = (ahead.compile_config(conf, device=H100, gemm_shape=dict(M=128, N=128, K=128, **more))
                    for more in ({}, {"batch": 64}))
    assert stack.usage.spill_stores == stack.usage.stack_bytes == 0
    assert stack.usage.registers <= alone.usage.registers + 8
    for opcode in ("HGMMA", "HMMA", "UTMALDG", "UTMASTG", "CALL"):
        assert stack.instructions[opcode] == alone.instructions[opcode]
