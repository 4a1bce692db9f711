"""`blas.gemmEx` and `blas.gemm` of stacks, against NumPy in float64: shapes, strides, kinds of numbers, kernels, one launch, and
what is refused before anything is written. Values are small whole numbers, so results are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.blas import gemm, gemmEx
from gemmkit.epilogues import LinearCombination, ReLU
from gemmkit.layouts import ColMajor, Interleaved, RowMajor
from gemmkit.layouts.matrices import transposed
from gemmkit.operators import COMPLEX, QUATERNION, Algebra, FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.plans.problem import seen_stack
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support import sm80 as multistage
from tests.support import sm90 as hopper
from tests.support.machines import is_poison, on_machines, poison, whole

F16, F32, F64, C64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), np.dtype("c8")


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    real = whole(rng, shape, dtype)
    return np.asarray(real + 1j * whole(rng, shape, F32), dtype) if dtype.kind == "c" else real


def op(x: np.ndarray, trans: str) -> np.ndarray:
    x = x.astype(np.result_type(x.dtype, F64))
    return x if trans == "N" else x.swapaxes(-1, -2) if trans == "T" else x.swapaxes(-1, -2).conj()


def stored(rng: np.random.Generator, shape: tuple[int, ...], trans: str, dtype: Any) -> np.ndarray:
    """An array whose op is of this shape."""
    return numbers(rng, shape if trans == "N" else (*shape[:-2], *shape[:-3:-1]), dtype)


def complex_of(x: np.ndarray) -> np.ndarray:
    return np.asarray(x[..., 0] + 1j * x[..., 1])


# -- shapes, types, strides -------------------------------------------------------------------------------------------

@pytest.mark.sample(36)
@on_machines
@pytest.mark.parametrize("trans", [a + b for a in "NTC" for b in "NTC"])
@pytest.mark.parametrize("dtype", [F16, F32, C64, "i4"], ids=str)
def test_every_pair_of_trans_characters(machine: Any, trans: str, dtype: Any, rng: np.random.Generator) -> None:
    """The last two dimensions turn, and those of the stack stay."""
    a, b = stored(rng, (2, 1, 5, 7), trans[0], dtype), stored(rng, (1, 7, 4), trans[1], dtype)
    c = numbers(rng, (2, 1, 5, 4), dtype)
    out = machine.array(c)
    with machine.session():
        assert gemmEx(*trans, 2, machine.array(a), machine.array(b), -1, out) is out  # type: ignore[call-arg]
        made = gemm(trans[0], trans[1].replace("C", "H"), machine.array(a), machine.array(b), alpha=3)
    product = op(a, trans[0]) @ op(b, trans[1])
    assert np.array_equal(machine.numpy(out), 2 * product - c)
    assert made.dtype == np.dtype(dtype) and np.array_equal(machine.numpy(made), 3 * product)


SHAPES = [((3, 5, 6), (3, 6, 7)), ((2, 3, 17, 13), (2, 3, 13, 19)), ((2, 1, 5, 6), (1, 3, 6, 7)), ((5, 6), (3, 6, 7)),
          ((2, 3, 5, 6), (6, 7)), ((1, 5, 6), (1, 6, 7)), ((0, 5, 6), (0, 6, 7)), ((0, 5, 6), (1, 6, 7)), ((3, 0, 6), (3, 6, 7)),
          ((3, 5, 6), (3, 6, 0)), ((3, 5, 0), (3, 0, 7)), ((2, 1, 1), (2, 1, 1)), ((5, 33, 1), (5, 1, 65)),
          ((2, 1, 2, 5, 4), (3, 1, 4, 9)), ((7, 31, 37), (7, 37, 29))]


@pytest.mark.sample(30)
@pytest.mark.parametrize("shape_a, shape_b", SHAPES, ids=str)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_shapes(machine: Any, shape_a: tuple, shape_b: tuple, dtype: Any, rng: np.random.Generator) -> None:
    """Broadcast, empty, of one element and odd ones. beta = 0 does not read C, which is then full of NaN."""
    operator: Any = MMAOp() if dtype == F16 else FPUOp(16, 16)
    conf = gk.get_config(operator=operator, global_a_layout=RowMajor(dtype), block_shape=Tile(M=16, N=16, K=16), kernel="singlestage")
    a, b = whole(rng, shape_a, dtype), whole(rng, shape_b, dtype)
    product = op(a, "N") @ op(b, "N")
    c, fresh = machine.array(whole(rng, product.shape, F32)), machine.array(poison(product.shape, F32))
    before = machine.numpy(c).copy()
    with machine.session():
        gemmEx("N", "N", -2, machine.array(a), machine.array(b), 3, c, conf=conf)
        gemmEx("N", "N", 0.5, machine.array(a), machine.array(b), 0, fresh, conf=conf)
    assert np.array_equal(machine.numpy(c), 3 * before - 2 * product), (shape_a, shape_b)
    assert np.array_equal(machine.numpy(fresh), product / 2), (shape_a, shape_b)


VIEWS: dict[str, Any] = {
    "the stack reversed": lambda x: x[::-1], "every other product": lambda x: x[:, ::2], "the stack turned": lambda x: x.swapaxes(0, 1),
    "columns": lambda x: x.swapaxes(-1, -2), "rows apart": lambda x: x[..., 1::3, :], "rows reversed": lambda x: x[..., ::-1, :],
    "columns apart": lambda x: x[..., 1::2], "products innermost": lambda x: x.transpose(2, 3, 0, 1)[3:5, 7:], "all of them": lambda x: x[::-1, ::2, ::-1, ::-2],
}


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("how", VIEWS)
def test_views(machine: Any, how: str, rng: np.random.Generator) -> None:
    """As A, as B and as C, of which all that lies between stays as it is."""
    memory = whole(rng, (2, 3, 12, 10), F32)
    view = VIEWS[how]
    shape = view(memory).shape
    (of_a, of_b), K = (machine.array(memory), machine.array(memory)), 5
    M, N = shape[-2:]
    left, right = whole(rng, (*shape[:-2], M, K), F32), whole(rng, (*shape[:-2], K, N), F32)
    with machine.session():
        gemmEx("T", "N", 1, view(of_a), machine.array(left), 0, first := machine.array(poison((*shape[:-2], N, K), F32)))
        gemmEx("N", "T", 1, machine.array(right), view(of_b), 0, second := machine.array(poison((*shape[:-2], K, M), F32)))
        on = machine.array(memory)
        gemmEx("N", "N", 2, machine.array(left), machine.array(right), -1, view(on))
    assert np.array_equal(machine.numpy(first), op(view(memory), "T") @ left)
    assert np.array_equal(machine.numpy(second), op(right, "N") @ op(view(memory), "T"))
    view(memory)[...] = 2 * op(left, "N") @ right - view(memory)
    assert np.array_equal(machine.numpy(on), memory)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("first, other", [("rows", "turned"), ("turned", "spread"), ("spread", "rows")])
def test_the_same_arrays_in_another_order(machine: Any, first: str, other: str, rng: np.random.Generator) -> None:
    """C's strides decide how its stack is walked: a plan for others is not taken. Another alpha compiles nothing."""
    conf = gk.get_config(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32), block_shape=Tile(M=16, N=16, K=16), kernel="singlestage")
    a, b = whole(rng, (2, 2, 5, 6), F32), whole(rng, (2, 2, 6, 7), F32)
    product = op(a, "N") @ op(b, "N")
    of_a, of_b = machine.array(a), machine.array(b)
    orders = {"rows": whole(rng, (2, 2, 5, 7), F32), "turned": whole(rng, (2, 2, 5, 7), F32).swapaxes(0, 1),
              "spread": whole(rng, (2, 4, 5, 7), F32)[:, ::2]}
    for c in (orders[first], orders[other]):
        out = machine.array(np.zeros_like(c)) if c.flags.c_contiguous else machine.array(c.base)
        out = out if c.flags.c_contiguous else out.swapaxes(0, 1) if c.base.shape[1] == 2 else out[:, ::2]
        before = machine.numpy(out).copy()
        with machine.session():
            gemmEx("N", "N", 2, of_a, of_b, 0.5, out, conf=conf)
            with machine.compiles_nothing():
                gemmEx("N", "N", -1, of_a, of_b, 2, out, conf=conf)
        assert np.array_equal(machine.numpy(out), -product + 2 * (2 * product + before / 2))


# -- numbers of several parts, structure ------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "CT", "TC"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_parts_along_a_last_axis(machine: Any, dtype: Any, trans: str, rng: np.random.Generator) -> None:
    """Of float32 and float16, each operand's stack in an order of its own."""
    a, b = (machine.array(whole(rng, (*shape, 2), dtype)) for shape in ((3, 2, 5, 6), (3, 6, 4)))
    a = a.swapaxes(0, 1)
    c = machine.array(whole(rng, (5, 2, 3, 4, 2), dtype)).swapaxes(0, 2)[::-1].swapaxes(0, 1)               # (2, 3, 5, 4, 2)
    before = complex_of(machine.numpy(c).copy())
    with machine.session():
        gemmEx(*trans, 1j, *(x if t == "N" else x.swapaxes(-2, -3) for x, t in zip((a, b), trans)), 2 - 1j, c,  # type: ignore[call-arg]
               operator=COMPLEX)
    full = [complex_of(machine.numpy(x).astype(F64)) for x in (a, b)]
    full = [x.conj() if t == "C" else x for x, t in zip(full, trans)]
    assert np.array_equal(complex_of(machine.numpy(c)), 1j * (full[0] @ full[1]) + (2 - 1j) * before)


@pytest.mark.kin(5)
@on_machines
def test_quaternions_and_complex_arrays(machine: Any, rng: np.random.Generator) -> None:
    """Numbers of more parts, with C unread; and complex arrays with their operator named, whose last axis is none of parts."""
    a, b = whole(rng, (2, 5, 6, 4), F32), whole(rng, (2, 6, 3, 4), F32)
    c = machine.array(poison((2, 5, 3, 4), F32))
    x, y = numbers(rng, (2, 5, 6), C64), numbers(rng, (6, 3), C64)
    z = machine.array(numbers(rng, (2, 5, 3), C64))
    before = machine.numpy(z).copy()
    with machine.session():
        gemmEx("N", "N", 2.0, machine.array(a), machine.array(b), 0.0, c, operator=QUATERNION)
        gemmEx("N", "N", 1j, machine.array(x), machine.array(y), 2.0, z, operator=COMPLEX)
    table = np.asarray(QUATERNION.table)
    assert np.array_equal(machine.numpy(c), 2 * np.einsum("bmki,bknj,ijp->bmnp", a, b, table))
    assert np.array_equal(machine.numpy(z), 1j * (x @ y) + 2 * before)


@pytest.mark.kin(5)
@on_machines
def test_dual_arrays(machine: Any, rng: np.random.Generator) -> None:
    """The product rule for each product of a stack; a real operand is a constant."""
    a, b, c = (whole(rng, (*shape, 3), F32) for shape in ((3, 5, 6), (4, 6), (3, 5, 4)))
    real = whole(rng, (3, 6, 4), F32)
    with machine.session():
        x, y, z = (gk.functions.Dual(machine.array(part)) for part in (a, b, c))
        assert gemmEx("N", "T", 2.0, x, y, -1.0, z) is z
        w = gemm("N", "N", x, machine.array(real), gk.functions.Dual(machine.array(poison(c.shape, F32))))
    right = b.swapaxes(0, 1)
    assert np.array_equal(machine.numpy(z.value), 2 * a[..., 0] @ right[..., 0] - c[..., 0])
    for p in (1, 2):
        derivative = a[..., p] @ right[..., 0] + a[..., 0] @ right[..., p]
        assert np.array_equal(machine.numpy(z.parts)[..., p], 2 * derivative - c[..., p])
        assert np.array_equal(machine.numpy(w.parts)[..., p], a[..., p] @ real)


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("kind", ["triangular", "symmetric", "generated", "diagonal"])
def test_matrices_with_structure(machine: Any, kind: str, rng: np.random.Generator) -> None:
    """A stack of triangles or of symmetric matrices, and one generated or diagonal matrix for all products."""
    x, b = whole(rng, (3, 17, 17), F32), whole(rng, (3, 17, 9), F32)
    lower, i = np.tril(x).astype(F64), np.arange(17)
    given = machine.array(x)
    generated = gk.layouts.GeneratedMatrix(lambda i, j, s: s * (i - j), (17, 17), F32, 2.0)
    with machine.session():
        matrix, trans, full = {
            "triangular": lambda: (gk.layouts.TriangularMatrix(given), "T", lower.swapaxes(1, 2)),
            "symmetric": lambda: (gk.layouts.SymmetricMatrix(given), "N", lower + np.tril(x, -1).swapaxes(1, 2)),
            "generated": lambda: (generated, "T", 2.0 * (i - i[:, None])),
            "diagonal": lambda: (gk.layouts.DiagonalMatrix(given[0, 0].copy()), "C", np.diag(x[0, 0]))}[kind]()
    c = machine.array(poison((3, 17, 9), F32))
    d = machine.array(ones := np.ones((3, 9, 17), F32))
    with machine.session():
        gemmEx(trans, "N", 1, matrix, machine.array(b), 0, c)
        gemmEx("T", trans, 2, machine.array(b), matrix, 3, d)
        made = gemm(trans, "N", matrix, machine.array(b))
    assert np.array_equal(machine.numpy(c), full @ b) and np.array_equal(machine.numpy(made), full @ b)
    assert np.array_equal(machine.numpy(d), 2 * b.swapaxes(1, 2) @ full + 3 * ones)


# -- kernels, launches ------------------------------------------------------------------------------------------------

CONFIGURATIONS: dict[str, Any] = {
    "singlestage": lambda: gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), block_shape=Tile(M=16, N=16, K=16)),
    "shared K": lambda: gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), block_shape=Tile(M=32, N=32, K=16), splits=4),
    "multistage": lambda: multistage.mapping(MMAOp()),
    "two": lambda: hopper.mapping("two"),
    "pingpong": lambda: hopper.mapping("pingpong", b=ColMajor, epilogue=ReLU()),
}


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_of_the_callers(machine: Any, name: str, rng: np.random.Generator) -> None:
    """Every kernel; the epilogue of a configuration gives way to alpha and beta."""
    conf = CONFIGURATIONS[name]()
    is_turned = isinstance(conf.global_b_layout, ColMajor)
    # Beyond the last row this kernel reads C's last row, and drops it: where C is D the emulator says that nothing orders the two.
    rows = 128 if machine.emulated and conf.kernel == "warp_specialised" else 37
    for M, N, K in ((rows, 29, 33),) if machine.emulated else ((rows, 29, 33), (128, 192, 64)):
        a, b, c = whole(rng, (2, 2, M, K), F16), whole(rng, (2, N, K) if is_turned else (2, K, N), F16), whole(rng, (2, 2, M, N), F32)
        out = machine.array(c).swapaxes(0, 1)
        with machine.session():
            gemmEx("N", "NT"[is_turned], -2, machine.array(a), machine.array(b), 3, out, conf=conf)
        assert np.array_equal(machine.numpy(out), 3 * c.swapaxes(0, 1) - 2 * op(a, "N") @ op(b, "NT"[is_turned]))


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 1, 5, 7), (5, 7)], ids=str)
def test_the_epilogue_in_a_composition(machine: Any, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Its C is broadcast, or the result itself, and what comes after sees what it made."""
    a, b, c = whole(rng, (2, 3, 5, 6), F32), whole(rng, (2, 3, 6, 7), F32), whole(rng, shape, F32)
    product = op(a, "N") @ op(b, "N")
    held = machine.array(c)
    out = held if c.shape == product.shape else machine.array(poison(product.shape, F32))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), out=out, epilogue=LinearCombination(2.0, -1.0, held, RowMajor(F32)) | ReLU())
    assert np.array_equal(machine.numpy(out), np.maximum(2 * product - c, 0))


def test_an_epilogues_c_that_does_not_fit() -> None:
    a, b = np.ones((2, 3, 5, 6), F32), np.ones((2, 3, 6, 7), F32)
    with gk.emulate(), pytest.raises(ValueError, match=r"c of LinearCombination has shape \(2, 5, 7\)"):
        gk.matmul(a, b, epilogue=LinearCombination(2.0, -1.0, np.zeros((2, 5, 7), F32), RowMajor(F32)))
    with gk.emulate(), pytest.raises(ValueError, match="overlaps out"):
        out = np.zeros((2, 3, 5, 7), F32)
        gk.matmul(a, b, out=out, epilogue=LinearCombination(2.0, -1.0, out[::-1], RowMajor(F32)))


@pytest.mark.kin(5)
@pytest.mark.sample(7)
@pytest.mark.parametrize("call", ["plain", "turned", "broadcast", "one B", "new", "structured", "parts"])
def test_a_stack_is_one_launch(call: str, grids: list[Any], rng: np.random.Generator) -> None:
    a, b, c = (whole(rng, shape, F16) for shape in ((2, 3, 8, 16), (2, 3, 16, 8), (2, 3, 8, 8)))
    z = whole(rng, (2, 3, 8, 8, 2), F32)
    calls = {"plain": lambda: gemmEx("N", "N", 2, a, b, 1, c.copy()), "turned": lambda: gemmEx("T", "T", 2, b, a, 1, c.copy()),
             "broadcast": lambda: gemmEx("N", "N", 2, a[:, :1], b[0], 1, c.copy()), "one B": lambda: gemmEx("N", "N", 2, a, b[0, 0], 1, c.copy()),
             "new": lambda: gemm("N", "N", a, b), "structured": lambda: gemmEx("N", "N", 1, gk.layouts.TriangularMatrix(c), b[..., :8, :], 0, c.copy()),
             "parts": lambda: gemmEx("C", "N", 1, z, z, 1, z.copy(), operator=COMPLEX)}
    with gk.emulate():
        calls[call]()
    assert len(grids) == 1


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("operator", [MMAOp(), WGMMAOp(128), COMPLEX.with_base(FPUOp(8, 16))], ids=["mma", "wgmma", "parts"])
def test_the_code_of_a_stack(operator: Any) -> None:
    """C moves from product to product, along a stack of two dimensions that do not merge: nothing spills."""
    layout: Any = Interleaved(C64) if isinstance(operator, Algebra) else RowMajor(F16)
    array = np.zeros((8, 4, 128, 128, 2), F32) if isinstance(operator, Algebra) else np.zeros((8, 4, 128, 128), F16)
    held = seen_stack(describe(array.swapaxes(0, 1)), layout)
    assert held.shape == (4, 8, 128, 128)
    factor = np.complex64(2) if isinstance(operator, Algebra) else 2.0
    conf = gk.get_config(operator=operator, global_a_layout=layout, global_b_layout=layout, device=H100, gemm_shape=dict(M=128, N=128, K=128),
                         global_d_layout=layout, epilogue=LinearCombination(factor, factor, held, layout))
    stack = array.reshape(32, *array.shape[2:])
    kernel = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=128, N=128, K=128, batch=32), operands=dict(a=stack, b=stack, out=stack))
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0


@pytest.mark.gpu
def test_libraries_without_transposes(rng: np.random.Generator) -> None:
    """An array known by ``__cuda_array_interface__`` alone, and PyTorch's."""
    import cupy
    import torch

    a, b, c = whole(rng, (3, 6, 5), F32), whole(rng, (3, 7, 6), F32), whole(rng, (3, 5, 7), F32)
    expected = op(a, "T") @ op(b, "T") + c
    arrays = [cupy.asarray(x) for x in (a, b, c)]
    gemmEx("T", "T", 1, *map(OnlyInterface, arrays[:2]), 1, OnlyInterface(arrays[2]))
    tensors = [torch.from_numpy(x).cuda() for x in (a, b, c)]
    gemmEx("T", "T", 1, *tensors[:2], 1, tensors[2])
    assert np.array_equal(arrays[2].get(), expected) and np.array_equal(tensors[2].cpu().numpy(), expected)


class OnlyInterface:
    """Memory that no library looks into, behind an interface for arrays of a GPU."""

    def __init__(self, x: Any):
        self.owner = x
        self.__cuda_array_interface__ = getattr(x, "__cuda_array_interface__", None) or {**x.__array_interface__, "version": 3,
                                                                                         "strides": x.strides}


def test_transposes_of_arrays_that_make_none() -> None:
    x = np.zeros((2, 3, 4, 5), F32)
    for wrapped, parts, wanted in ((OnlyInterface(x), 0, x.swapaxes(2, 3)), (OnlyInterface(x), 1, x.swapaxes(1, 2)),
                                   (OnlyInterface(x[0, 0]), 0, x[0, 0].T)):
        assert describe(transposed(wrapped, parts))[:4] == describe(wanted)[:4]


# -- bad input: nothing is written to c -------------------------------------------------------------------------------

A, B, WHERE = np.ones((2, 3, 4, 5), F32), np.ones((3, 5, 6), F32), np.lib.stride_tricks.as_strided
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "stacks": (dict(a=A[:, :2]), ("a has shape (2, 2, 4, 5)", "b has shape (3, 5, 6)", "the stacks (2, 2) and (3,)", "or one of them 1")),
    "K": (dict(b=B[:, 1:]), ("a has shape (2, 3, 4, 5)", "op(a) has 5 columns and op(b) 4 rows")),
    "K turned": (dict(transb="T"), ("transb='T'", "op(a) has 5 columns and op(b) 6 rows")),
    "a vector": (dict(a=A[0, 0, 0]), ("a has 1 dimensions", "a matrix of 2 is needed, or a stack of them")),
    "a vector as b": (dict(b=B[0, 0]), ("b has 1 dimensions",)),
    "one c for all": (dict(c=(4, 6)), ("c has shape (4, 6); op(a) op(b) is (2, 3, 4, 6)", "a matrix for each product")),
    "a c to be broadcast": (dict(c=(2, 1, 4, 6)), ("c has shape (2, 1, 4, 6)", "(2, 3, 4, 6)")),
    "a c of fewer dimensions": (dict(c=(6, 4, 6)), ("c has shape (6, 4, 6)", "(2, 3, 4, 6)")),
    "a c of more": (dict(c=(1, 2, 3, 4, 6)), ("c has shape (1, 2, 3, 4, 6)",)),
    "a c of products that nobody asked for": (dict(a=A[0, 0], b=B[0], c=(2, 4, 6)), ("c has shape (2, 4, 6); op(a) op(b) is (4, 6)",)),
    "a c transposed": (dict(c=(2, 3, 6, 4)), ("c has shape (2, 3, 6, 4)",)),
    "alpha of each": (dict(alpha=np.ones(3)), ("alpha is", "a real number is needed")),
}


@pytest.mark.parametrize("what", BAD)
def test_refusals(what: str) -> None:
    changes, words = BAD[what]
    c = poison(changes.get("c", (2, 3, 4, 6)), F32)
    args = {**dict(transa="N", transb="N", alpha=1.0, a=A, b=B, beta=1.0), **changes, "c": c}
    with gk.emulate(), pytest.raises((TypeError, ValueError)) as caught:
        gemmEx(**args)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert is_poison(c)


@pytest.mark.parametrize(("make", "words"), [
    (lambda memory: WHERE(memory, (2, 3, 4, 6), (0, 96, 24, 4)), ("c has strides (0, 24, 6, 1)", "share memory", "the kernel writes each")),
    (lambda memory: WHERE(memory, (2, 3, 4, 6), (288, 92, 24, 4)), ("c has strides (72, 23, 6, 1)", "share memory")),
    (lambda memory: WHERE(memory, (2, 3, 4, 6), (288, 96, 24, 4), writeable=False), ("c is read-only", "give a writable array")),
])
def test_a_c_that_cannot_be_written(make: Any, words: tuple[str, ...]) -> None:
    memory = poison((200,), F32)
    with gk.emulate(), pytest.raises(ValueError) as caught:
        gemmEx("N", "N", 1.0, A, B, 0.0, make(memory))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert is_poison(memory)


def test_operands_in_the_memory_of_c() -> None:
    """A matrix of another product is in the way, too; products between those of c are not."""
    c = poison((3, 4, 4), F32)
    other = np.ones((3, 4, 4), F32)
    with gk.emulate():
        for name, a, b in (("a", c, other), ("a", c[2], other), ("b", other, c[::-1]), ("b", other, c[1])):
            with pytest.raises(ValueError, match=f"c overlaps {name} in memory"):
                gemmEx("N", "N", 1.0, a, b, 0.0, c)
        with pytest.raises(ValueError, match="c overlaps a in memory"):
            gemmEx("N", "N", 1.0, gk.layouts.TriangularMatrix(c), other, 0.0, c)
    assert is_poison(c)


def test_parts_that_do_not_fit() -> None:
    """An axis of parts of another length, and the arrays of an algebra that hold them apart: each names its argument."""
    z, c = np.ones((3, 4, 4, 2), F32), poison((3, 4, 4, 2), F32)
    with gk.emulate():
        for args, words in (((z[..., :1], z, c), "a: .*a last axis of 2"), ((z, np.ones((3, 4, 4, 3), F32), c), "b: .*a last axis of 2"),
                            ((z, z, poison((3, 4, 4, 3), F32)), "c: .*a last axis of 2"),
                            ((z, np.ones((3, 4, 2, 4), F32).swapaxes(2, 3), c), "b: .*must be neighbours"),
                            ((z, z, c[:2]), r"c has shape \(2, 4, 4\)")):
            with pytest.raises(ValueError, match=words):
                gemmEx("N", "N", 1.0, args[0], args[1], 0.0, args[2], operator=COMPLEX)
        pair = gk.functions.Dual(np.ones((3, 4, 4, 2), F32))
        for args in ((pair, z[..., 0], c[..., 0]), (z[..., 0], pair, c[..., 0])):
            with pytest.raises(TypeError, match="is a dual array, and the array of the result is none; give a Dual"):
                gemmEx("N", "N", 1.0, args[0], args[1], 0.0, args[2])
        with pytest.raises(TypeError, match="a is a dual array"):
            gemm("N", "N", pair, pair)
    assert is_poison(c)
