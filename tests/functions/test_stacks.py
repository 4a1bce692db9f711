"""Stacks of matrices in one launch, in both kernels, against NumPy: shapes, strides, mappings, algebras, bad input. Values are
small whole numbers, so results are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.collectives.scheduler import StackSteps
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import COMPLEX, MIN_PLUS, OR_AND, FPUOp, MMAOp, WGMMAOp
from gemmkit.plans.problem import first_matrix
from gemmkit.runtime.array_info import alignment, steps_of
from gemmkit.runtime.array_info import whole as whole_of
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from tests.support.machines import on_machines, poison, whole
from tests.support.sm90 import SCHEDULES, mapping

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
DEPTH = 64


def product64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a.astype(F64) @ b.astype(F64))


def multiplied(machine: Any, a: Any, b: Any, shape: tuple[int, ...], dtype: Any, conf: Any = None, seed: int | None = None,
               c: Any = None, **fields: Any) -> np.ndarray:
    """The stack of products of arrays that are the machine's, poisoned before."""
    out = machine.array(poison(shape, dtype))
    with gk.emulate(seed) if machine.emulated else machine.session():
        assert gk.matmul(a, b, c, conf, out=out, **fields) is out
    return np.asarray(machine.numpy(out))


# -- on the host ------------------------------------------------------------------------------------------------------

def test_steps_merge_what_lies_in_each_others_stride() -> None:
    assert steps_of((4, 3, 2), (36, 12, 6), (4, 3, 2)) == ((24, 6),)
    assert steps_of((4, 1, 2), (36, 5, 6), (4, 3, 2)) == ((4, 36), (3, 0), (2, 6))
    assert steps_of((1, 1), (5, 5), (4, 3)) == steps_of((), (), (4, 3)) == ()
    assert steps_of((2, 3), (-12, -36), (2, 3)) == ((2, -12), (3, -36))
    assert steps_of((1, 3), (7, 12), (1, 3)) == ((3, 12),)


def test_steps_count_in_c_order() -> None:
    """Coordinates of all products of random stacks are NumPy's, however dimensions merge."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        stack = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
        own = tuple(int(n) if rng.integers(3) else 1 for n in stack)[rng.integers(0, len(stack)):]
        order = rng.permutation(len(own))                                  # in which they lie in memory
        x = np.zeros((*(own[n] for n in order), 2, 3), F32)
        x = x.transpose(*np.argsort(order), len(own), len(own) + 1)
        first = first_matrix(describe(x), x.ndim - 2, stack)
        matrices, steps = whole_of(first), StackSteps.of(first.steps)
        expected = np.broadcast_to(x, (*stack, 2, 3))
        for n, at in enumerate(np.ndindex(*stack)):
            coordinates = steps.coordinates(n)[::-1]
            place = sum(i * stride for i, stride in zip(coordinates, matrices.strides)) * 4
            assert len(coordinates) == len(matrices.shape) - 2
            assert place == expected[at].__array_interface__["data"][0] - x.__array_interface__["data"][0]


def test_what_a_stack_says_of_its_memory() -> None:
    x = np.zeros(4096, F16)[:16 * 3 * 20].reshape(3, 16, 20)[:, :, :16]
    first = first_matrix(describe(x), 1, (3,))
    assert alignment(first) == 8 and why_not(first, 1) is not None                          # rows of 40 bytes
    x = np.zeros(4096, F16)[:3 * 264].reshape(3, 264)[:, :256].reshape(3, 16, 16)
    first = first_matrix(describe(x), 1, (3,))
    assert first.steps == ((3, 264),) and whole_of(first).shape == (3, 16, 16)
    odd = np.zeros(4096, F16)[:3 * 260].reshape(3, 260)[:, :256].reshape(3, 16, 16)
    first = first_matrix(describe(odd), 1, (3,))
    assert "stride along axis 0" in str(why_not(first, 1))                                  # matrices 520 bytes apart
    wide = np.zeros((2, 2, 2, 2, 16, 16), F16).transpose(3, 2, 1, 0, 4, 5)
    assert "dimensions" in str(why_not(first_matrix(describe(wide), 4, wide.shape[:4]), 1))


# -- the ordinary kernel ----------------------------------------------------------------------------------------------

SHAPES = [((3, 5, 6), (3, 6, 7)), ((2, 3, 17, 13), (2, 3, 13, 19)), ((2, 1, 5, 6), (1, 3, 6, 7)), ((1, 5, 6), (1, 6, 7)),
          ((0, 5, 6), (0, 6, 7)), ((3, 0, 6), (3, 6, 7)), ((3, 5, 0), (3, 0, 7)), ((2, 1, 1), (2, 1, 1)),
          ((2, 1, 2, 5, 4), (3, 2, 4, 9)), ((5, 33, 1), (5, 1, 65))]


@pytest.mark.sample(14)
@pytest.mark.parametrize("shape_a, shape_b", SHAPES, ids=str)
@pytest.mark.parametrize("operator", [FPUOp(16, 16), FPUOp(16, 16, dtype=F64), MMAOp()], ids=["f32", "f64", "mma"])
@on_machines
def test_shapes_in_the_single_stage_kernel(machine: Any, shape_a: tuple, shape_b: tuple, rng: np.random.Generator, operator: Any) -> None:
    dtype = operator.fragment_a.dtype
    conf = gk.get_config(operator=operator, global_a_layout=RowMajor(dtype), block_shape=Tile(M=16, N=16, K=16), kernel="singlestage")
    a, b = whole(rng, shape_a, dtype), whole(rng, shape_b, dtype)
    expected = product64(a, b)
    d = multiplied(machine, machine.array(a), machine.array(b), expected.shape, operator.accumulator, conf)
    assert np.array_equal(d, expected)


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("kind", ["transposed stack", "apart", "reversed", "transposed matrices"])
def test_strides_of_all_kinds(machine: Any, kind: str, rng: np.random.Generator) -> None:
    """Transposed matrices, transposed stacks, every other matrix, rows apart, reversed and misaligned ones; out, too."""
    a, b = machine.array(whole(rng, (4, 3, 12, 20), F32)), machine.array(whole(rng, (3, 4, 20, 10), F32))
    of_a = {"transposed stack": a, "apart": a[:, :, 1:10, 2:], "reversed": a[::-1, :, ::-1]}
    if kind in of_a:
        x = of_a[kind]
        y = b.swapaxes(0, 1)[:, :, :x.shape[-1], :]
        out = machine.array(poison((3, 4, x.shape[-2], 2 * 10), F32)).swapaxes(0, 1)[..., ::2]
        with machine.session():
            gk.matmul(x, y, out=out)
        assert np.array_equal(machine.numpy(out), product64(machine.numpy(x), machine.numpy(y)))
        return
    x = a[::2].swapaxes(-1, -2)
    y = b.swapaxes(0, 1)[::2, :, :12]
    with machine.session():
        d = gk.matmul(x, y)
    assert np.array_equal(machine.numpy(d), product64(machine.numpy(x), machine.numpy(y)))


@pytest.mark.kin(5)
@on_machines
def test_integers_semirings_and_complex_numbers(machine: Any, rng: np.random.Generator) -> None:
    a, b = rng.integers(-9, 9, (3, 7, 5)).astype("i4"), rng.integers(-9, 9, (3, 5, 6)).astype("i4")
    assert np.array_equal(multiplied(machine, machine.array(a), machine.array(b), (3, 7, 6), "i4"), a @ b)
    p, q = whole(rng, (3, 7, 5), F32), whole(rng, (3, 5, 6), F32)
    shortest = (p[:, :, :, None] + q[:, None]).min(2)
    assert np.array_equal(multiplied(machine, machine.array(p), machine.array(q), (3, 7, 6), F32, operator=MIN_PLUS), shortest)
    u, v = p + 1j * p[::-1], q - 2j * q[::-1]
    u, v = u.astype("c8"), v.astype("c8")
    assert np.array_equal(multiplied(machine, machine.array(u), machine.array(v), (3, 7, 6), "c8"), u @ v)


SELECTING = {"min-plus": (MIN_PLUS, np.add, np.minimum), "or-and": (OR_AND, np.bitwise_and, np.bitwise_or)}


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("stacks", [((3, 1), (2,)), ((3, 2), (3, 2)), ((), (3,)), ((2,), (3, 1)), ((1, 1), (2, 3))], ids=repr)
def test_semirings_of_stacks_of_any_rank_without_out(machine: Any, rng: np.random.Generator, stacks: Any, name: str) -> None:
    """(Where one operand alone has a dimension the result is made before shape and dtypes of the operator are chosen.)"""
    operator, multiply, add = SELECTING[name]
    a, b = (rng.integers(0, 9, (*stack, *own)).astype("i4") for stack, own in zip(stacks, ((7, 5), (5, 6))))
    with machine.session():
        made = gk.matmul(machine.array(a), machine.array(b), operator=operator)
    wanted = add.reduce(multiply(a[..., :, :, None], b[..., None, :, :]), axis=-2)
    assert made.shape == wanted.shape and made.dtype == wanted.dtype
    np.testing.assert_array_equal(machine.numpy(made), wanted)


@pytest.mark.kin(5)
@on_machines
def test_numbers_by_their_parts(machine: Any, rng: np.random.Generator) -> None:
    """Stacks of arrays with the parts along a last axis, and of planes."""
    a, b = whole(rng, (3, 7, 8, 2), F32), whole(rng, (3, 8, 6, 2), F32)
    expected = (a[..., 0] + 1j * a[..., 1]) @ (b[..., 0] + 1j * b[..., 1])
    d = multiplied(machine, machine.array(a), machine.array(b), (3, 7, 6, 2), F32, operator=COMPLEX)
    assert np.array_equal(d[..., 0] + 1j * d[..., 1], expected)
    with machine.session():
        made = machine.numpy(gk.matmul(machine.array(a), machine.array(b), operator=COMPLEX))
    assert np.array_equal(made, d)
    planes = {f"global_{name}_layout": gk.layouts.Planar("complex64") for name in "abd"}
    a, b = (np.ascontiguousarray(np.moveaxis(x, -1, 1)) for x in (a, b))
    d = multiplied(machine, machine.array(a), machine.array(b), (3, 2, 7, 6), F32, operator=COMPLEX, **planes)
    assert np.array_equal(d[:, 0] + 1j * d[:, 1], expected)


@pytest.mark.kin(5)
@on_machines
def test_splits_in_the_single_stage_kernel(machine: Any, rng: np.random.Generator) -> None:
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), block_shape=Tile(M=32, N=32, K=16), splits=4)
    a, b = whole(rng, (2, 17, 90), F16), whole(rng, (2, 90, 35), F16)
    assert np.array_equal(multiplied(machine, machine.array(a), machine.array(b), (2, 17, 35), F32, conf), product64(a, b))


# -- the warp-specialised kernel --------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(12)
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_machines
def test_schedules_and_clusters(machine: Any, rng: np.random.Generator, schedule: str) -> None:
    """More tiles than blocks stay on their multiprocessors, so that one block computes tiles of several products."""
    conf = mapping(schedule, b=ColMajor)
    a, b = whole(rng, (3, 136, 72), F16), whole(rng, (3, 40, 72), F16)
    d = multiplied(machine, machine.array(a), machine.array(b).swapaxes(1, 2), (3, 136, 40), F32, conf, seed=7)
    assert np.array_equal(d, product64(a, b.swapaxes(1, 2)))


ROUTES: dict[str, dict[str, Any]] = {
    "tma": {},
    "A in registers": {"transform_global_to_shared_a": gk.transforms.Map(lambda x: x + 1)},
    "B in place": {"transform_global_to_shared_b": gk.transforms.Map(lambda x: x + 1)},
    "ReLU": {"epilogue": gk.epilogues.ReLU()},
    "staged": {"transform_global_to_shared_a": gk.transforms.Map(lambda x, i, j: x + i - j)},
}


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@pytest.mark.parametrize("how", ROUTES)
@on_machines
def test_routes(machine: Any, rng: np.random.Generator, how: str) -> None:
    conf = mapping("two", b=ColMajor, d=RowMajor(F16), **ROUTES[how])
    a, b = whole(rng, (3, 72, 72), F16), whole(rng, (3, 40, 72), F16)
    i, j = np.arange(72)[:, None], np.arange(72)
    of_a = {"A in registers": a + 1, "staged": a + i - j}.get(how, a)
    of_b = b + 1 if how == "B in place" else b
    expected = product64(of_a, of_b.swapaxes(1, 2))
    d = multiplied(machine, machine.array(a), machine.array(b).swapaxes(1, 2), (3, 72, 40), F16, conf)
    assert np.array_equal(d, np.maximum(expected, 0) if how == "ReLU" else expected)


@pytest.mark.kin(5)
@on_machines
def test_stacks_that_tma_does_not_take(machine: Any, rng: np.random.Generator) -> None:
    """Matrices an odd distance apart, rows of odd length, and stacks of too many dimensions: threads move them."""
    conf = mapping("one", d=RowMajor(F16))
    flat = machine.array(whole(rng, (3, 72 * 72 + 3), F16))
    a = flat[:, :72 * 72].reshape(3, 72, 72) if not machine.emulated else np.lib.stride_tricks.as_strided(
        flat, (3, 72, 72), (2 * (72 * 72 + 3), 144, 2))
    b = machine.array(whole(rng, (3, 72, 40), F16))
    d = multiplied(machine, a, b, (3, 72, 40), F16, conf)
    assert np.array_equal(d, product64(machine.numpy(a), machine.numpy(b)))
    a, b = machine.array(whole(rng, (2, 33, 41), F16)), machine.array(whole(rng, (2, 41, 35), F16))
    d = multiplied(machine, a, b, (2, 33, 35), F16, conf)
    assert np.array_equal(d, product64(machine.numpy(a), machine.numpy(b)))
    a = machine.array(whole(rng, (2, 1, 2, 2, 8, 16), F16)).swapaxes(0, 3).swapaxes(1, 2)
    b = machine.array(whole(rng, (2, 2, 1, 2, 16, 16), F16)).swapaxes(0, 3)
    expected = product64(machine.numpy(a), machine.numpy(b))
    assert np.array_equal(multiplied(machine, a, b, expected.shape, F16, conf), expected)


@pytest.mark.kin(5)
@on_machines
def test_shared_matrices_and_stacks_of_two_dimensions(machine: Any, rng: np.random.Generator) -> None:
    """TMA has a dimension for each of a stack's that an operand moves along, and none for the others."""
    conf = mapping("pingpong", d=RowMajor(F16))
    a, b = whole(rng, (2, 1, 40, 64), F16), whole(rng, (3, 64, 48), F16)
    d = multiplied(machine, machine.array(a), machine.array(b), (2, 3, 40, 48), F16, conf)
    assert np.array_equal(d, product64(a, b))
    a, b = machine.array(whole(rng, (3, 2, 40, 64), F16)).swapaxes(0, 1), machine.array(whole(rng, (2, 3, 64, 48), F16))
    d = multiplied(machine, a, b, (2, 3, 40, 48), F16, conf)
    assert np.array_equal(d, product64(machine.numpy(a), machine.numpy(b)))


@pytest.mark.kin(5)
@on_machines
def test_splits_in_the_warp_specialised_kernel(machine: Any, rng: np.random.Generator) -> None:
    conf = gk.get_config(operator=WGMMAOp(64), global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16),
                         global_d_layout=RowMajor(F32), block_shape=Tile(M=64, N=64, K=32), warps_per_block=4, splits=2)
    a, b = whole(rng, (3, 72, 160), F16), whole(rng, (3, 160, 72), F16)
    assert np.array_equal(multiplied(machine, machine.array(a), machine.array(b), (3, 72, 72), F32, conf), product64(a, b))


@pytest.mark.kin(5)
@on_machines
def test_complex_halves(machine: Any, rng: np.random.Generator) -> None:
    """Numbers that producer warps, or the consumers, tell apart, and planes that TMA brings."""
    a, b = whole(rng, (2, 70, 48, 2), F16), whole(rng, (2, 48, 40, 2), F16)
    expected = (a[..., 0] + 1j * a[..., 1]).astype("c16") @ (b[..., 0] + 1j * b[..., 1])
    for x, y in ((a, b), (np.ascontiguousarray(a.swapaxes(1, 2)), b)):
        of_a = machine.array(x) if x is a else machine.array(x).swapaxes(1, 2)
        d = multiplied(machine, of_a, machine.array(y), (2, 70, 40, 2), F16, operator=COMPLEX)
        assert np.array_equal(d[..., 0] + 1j * d[..., 1], expected)
    number = COMPLEX.number_dtype(F16)
    planes = {f"global_{name}_layout": gk.layouts.Planar(number) for name in "ab"}
    x, y = (np.ascontiguousarray(np.moveaxis(z, -1, 1)) for z in (a, b))
    d = multiplied(machine, machine.array(x), machine.array(y), (2, 70, 40, 2), F16, operator=COMPLEX, **planes,
                   global_d_layout=gk.layouts.Interleaved(number))
    assert np.array_equal(d[..., 0] + 1j * d[..., 1], expected)


# -- einsum, plans ----------------------------------------------------------------------------------------------------

@pytest.mark.sample(8)
@pytest.mark.parametrize("spec", ["bij,bjk->bik", "bij,bkj->kbi", "abij,bjk->aibk", "ibj,kjb->bki", "bi,bi->b", "bij,b->bji",
                                  "abcd,bdef->bafce", "cbij,cbjk->bcik"])
@on_machines
def test_einsum_with_a_batch(machine: Any, rng: np.random.Generator, spec: str) -> None:
    sizes = dict(zip("abcdefijk", (2, 3, 4, 5, 2, 3, 5, 6, 7)))
    terms = spec.split("->")[0].split(",")
    a, b = (whole(rng, tuple(sizes[x] for x in term), F32) for term in terms)
    expected = np.einsum(spec, a.astype(F64), b.astype(F64))
    out = machine.array(poison(expected.shape, F32))
    with machine.session():
        gk.einsum(spec, machine.array(a), machine.array(b), out=out)
    assert np.array_equal(machine.numpy(out), expected)


@on_machines
def test_plans_of_stacks(machine: Any, rng: np.random.Generator) -> None:
    a, b = (machine.array(whole(rng, shape, F32)) for shape in ((3, 5, 6), (3, 6, 7)))
    with machine.session():
        run = gk.plan(a, b)
        assert "(3,) products of 5 x 7 x 6" in repr(run)
        for _ in range(2):
            assert np.array_equal(machine.numpy(run(a, b)), product64(machine.numpy(a), machine.numpy(b)))
        with pytest.raises(ValueError, match="a differs from the plan's"):
            run(a[:2], b[:2])


# -- bad input --------------------------------------------------------------------------------------------------------

A, B = np.ones((3, 4, 5), F32), np.ones((3, 5, 6), F32)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda: gk.matmul(A[:2], B), ValueError, ("a has shape (2, 4, 5)", "(2,) and (3,) cannot be broadcast")),
    (lambda: gk.plan(A, B[:, :4]), ValueError, ("a have 5 columns", "b 4 rows")),
    (lambda: gk.matmul(A, B, np.ones((2, 4, 6), F32)), ValueError, ("c has shape (2, 4, 6)", "(3, 4, 6)")),
    (lambda: gk.matmul(A, B, np.ones((1, 3, 4, 6), F32)), ValueError, ("c has shape (1, 3, 4, 6)",)),
    (lambda: gk.matmul(A, B, out=np.ones((4, 6), F32)), ValueError, ("out has shape (4, 6)", "(3, 4, 6)")),
    (lambda: gk.matmul(A, B, out=np.ones((1, 3, 4, 6), F32)), ValueError, ("out has shape (1, 3, 4, 6)",)),
    (lambda: gk.matmul(A, B, out=np.lib.stride_tricks.as_strided(np.ones((4, 6), F32), (3, 4, 6), (0, 24, 4))), ValueError,
     ("out has strides (0, 6, 1)", "share memory")),
    (lambda: gk.matmul(A, B, out=np.lib.stride_tricks.as_strided(np.ones(99, F32), (3, 4, 6), (92, 24, 4))), ValueError,
     ("out has strides (23, 6, 1)", "share memory")),
    (lambda: gk.matmul(A, B, conf=gk.get_config(operator=FPUOp(16, 16), global_a_layout=RowMajor(F32)), out=A.reshape(3, 5, 4)[:, :4]),
     ValueError, ("out has shape",)),
    (lambda: gk.matmul(SQUARE, SQUARE, out=SQUARE), ValueError, ("out overlaps a",)),
    (lambda: gk.matmul(SQUARE + 1, SQUARE + 1, c=SQUARE[0], out=SQUARE), ValueError, ("out overlaps c",)),
    (lambda: gk.matmul(A, B, epilogue=gk.epilogues.Bias(np.ones((2, 6), F32))), ValueError, ("bias of Bias has shape (2, 6)", "(3,)")),
    (lambda: gk.matmul(A, B, epilogue=gk.epilogues.Bias(np.ones((3, 5), F32))), ValueError, ("bias has shape (3, 5)", "(6,)")),
    (lambda: gk.matmul(A[0], B[0], epilogue=gk.epilogues.Bias(np.ones((3, 6), F32))), ValueError, ("(3, 6)", "without a stack")),
    (lambda: gk.matmul(A, B, epilogue=gk.epilogues.Store(np.ones((4, 6), F32))), ValueError, ("array of Store", "every product", "(3, 4, 6)")),
    (lambda: gk.matmul(A, B, epilogue=gk.epilogues.Residual(np.ones((2, 3, 4, 6), F32))), ValueError, ("array of Residual", "(2, 3)")),
    (lambda: gk.blas.gemmEx("N", "N", 1, gk.layouts.SymmetricMatrix(SQUARE), SQUARE[0], 0, SQUARE[1]), ValueError, ("c has shape (4, 4)", "(3, 4, 4)")),
])
def test_refusals(call: Any, kind: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught, gk.emulate():
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


SQUARE = np.zeros((3, 4, 4), F32)
