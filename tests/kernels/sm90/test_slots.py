"""What users put into the warp-specialised kernel: layouts, transforms, C, epilogues, conditions.

Values are small whole numbers, so that every result is exactly right or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.transforms import Map
from tests.kernels.test_slots import Banded, Clamp, plain
from tests.support.drawn_functions import placed
from tests.support.machines import BF16, E4M3, MACHINES, on_machines, poison, reference, whole
from tests.support.sm90 import F16, F32, mapping, product
from tests.support.user_layouts import Hankel, Packed, Toeplitz

M, N, K = 71, 37, 45                                      # one tile and a part of one along M and N
EVEN = 72, 40, 48                                         # sizes for TMA


def operands(rng: np.random.Generator, size: tuple[int, int, int] = (M, N, K), dtype: Any = F16) -> tuple:
    m, n, k = size
    return whole(rng, (m, k), dtype), whole(rng, (k, n), dtype), whole(rng, (m, n), F32)


def small(schedule: str = "one", **fields: Any) -> gk.Config:
    return mapping(schedule, depth=32, **fields)


# -- layouts of the user's --------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("schedule", ["one", "pingpong"])
def test_a_layout_of_a(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    m, n, k = EVEN if machine.emulated else (1000, 520, 304)
    t, b = whole(rng, (m + k - 1,), F16), whole(rng, (k, n), F16)
    d = product(machine, small(schedule, a=Toeplitz), t, b, rows=m, gemm_shape=dict(M=m, N=n, K=k))
    i, j = np.indices((m, k))
    assert np.array_equal(d, reference(t[i - j + k - 1], b))


@on_machines
@pytest.mark.parametrize("schedule", ["one-1x2"])
def test_a_layout_of_b(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    m, n, k = EVEN if machine.emulated else (1000, 520, 304)
    a, t = whole(rng, (m, k), F16), whole(rng, (k + n - 1,), F16)
    d = product(machine, small(schedule, b=Hankel), a, t, columns=n, gemm_shape=dict(M=m, N=n, K=k))
    i, j = np.indices((k, n))
    assert np.array_equal(d, reference(a, t[i + j]))


@pytest.mark.kin(5)
@on_machines
def test_layouts_of_both_with_odd_sizes(machine: Any, rng: np.random.Generator) -> None:
    t, s = whole(rng, (M + K - 1,), F16), whole(rng, (K + N - 1,), F16)
    d = product(machine, small(a=Toeplitz, b=Hankel), t, s, rows=M, columns=N, gemm_shape=dict(M=M, N=N, K=K))
    (i, j), (x, y) = np.indices((M, K)), np.indices((K, N))
    assert np.array_equal(d, reference(t[i - j + K - 1], s[x + y]))


@on_machines
def test_layouts_of_c_and_d(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng)
    out = machine.array(poison((M * N + 2,), F16))
    conf = small(d=Packed(F16), global_c_layout=Packed(F32))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), machine.array(c.reshape(-1)), conf, out=out[1:-1])
    d = machine.numpy(out)
    assert np.array_equal(d[1:-1].reshape(M, N), reference(a, b, c).astype(F16)) and np.isnan(d[[0, -1]]).all()


@on_machines
def test_memory_between_two_transforms_rounds(machine: Any, rng: np.random.Generator) -> None:
    """What lies in shared memory has its dtype, whoever changes it next: thirds of small numbers are not exact in float16."""
    a, b = rng.integers(1, 9, (72, 64)).astype(F16), rng.integers(-2, 3, (64, 32)).astype(F16)
    conf = mapping("two", transform_global_to_shared_a=Map(lambda x: np.float32(x) / 3),
                   transform_shared_to_regs_a=Map(lambda x: np.float32(x) * 3 - 3))
    thirds = (a.astype(F32) / 3).astype(F16)
    changed = (thirds.astype(F32) * 3 - 3).astype(F16)
    assert not np.array_equal(changed, a - 3)
    error = np.abs(product(machine, conf, a, b) - changed.astype(np.float64) @ b.astype(np.float64))
    assert error.max() < 1e-4


# -- transforms -------------------------------------------------------------------------------------------------------


def by_numpy(f: Any, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return np.asarray(f(x) if f is plain else f(x, *np.indices(x.shape)))


POINTS = {"global_to_shared_a": "a", "global_to_shared_b": "b", "global_to_shared_c": "c", "shared_to_regs_a": "a",
          "shared_to_regs_b": "b", "shared_to_regs_c": "c", "regs_to_shared_d": "d", "shared_to_global_d": "d"}


@pytest.mark.kin(5)
@pytest.mark.sample(11)
@on_machines
@pytest.mark.parametrize("point", POINTS)
def test_a_transform_at_each_point(machine: Any, point: str, rng: np.random.Generator) -> None:
    check_transform(machine, point, placed, rng)


@pytest.mark.sample(5)
@pytest.mark.parametrize("point", POINTS)
def test_a_transform_of_the_value_alone(point: str, rng: np.random.Generator) -> None:
    check_transform(MACHINES["emulator"], point, plain, rng)


def check_transform(machine: Any, point: str, f: Any, rng: np.random.Generator) -> None:
    """On sizes that TMA takes, and for A and B on such as it does not."""
    conf = small(global_c_layout=RowMajor(F32), **{f"transform_{point}": Map(f)})
    which = POINTS[point]
    for size in ([EVEN, (M, N, K)] if f is placed and which in "ab" else [EVEN]):
        a, b, c = operands(rng, size)
        changed = {n: by_numpy(f, x) if n == which else x for n, x in (("a", a), ("b", b), ("c", c))}
        expected = reference(changed["a"], changed["b"], changed["c"])
        d = product(machine, conf, a, b, c)
        assert np.array_equal(d, by_numpy(f, expected) if which == "d" else expected), size


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("schedule", ["pingpong", "one-2x1"])
def test_all_transforms_together(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    functions = {point: placed if n % 2 else plain for n, point in enumerate(POINTS)}
    conf = small(schedule, global_c_layout=RowMajor(F32), **{f"transform_{p}": Map(f) for p, f in functions.items()})
    a, b, c = operands(rng, EVEN if machine.emulated else (520, 272, 208))

    def through(x: np.ndarray, *points: str) -> np.ndarray:
        for point in points:
            x = by_numpy(functions[point], x)
        return x

    expected = reference(through(a, "global_to_shared_a", "shared_to_regs_a"),
                         through(b, "global_to_shared_b", "shared_to_regs_b"),
                         through(c, "global_to_shared_c", "shared_to_regs_c"))
    assert np.array_equal(product(machine, conf, a, b, c), through(expected, "regs_to_shared_d", "shared_to_global_d"))


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("name", ["i1 to f2", "f4 to bf16", "f2 to e4m3", "f2 to i1"])
def test_transforms_from_other_types(machine: Any, name: str, rng: np.random.Generator) -> None:
    """What lies in memory is not what is multiplied: a transform says that this is meant."""
    stored, operator = {"i1 to f2": ("i1", WGMMAOp(32)), "f4 to bf16": (F32, WGMMAOp(32, BF16)),
                        "f2 to e4m3": (F16, WGMMAOp(32, E4M3)), "f2 to i1": (F16, WGMMAOp(32, "i1"))}[name]
    conf = small(operator=operator, transform_global_to_shared_a=Map(lambda x: x - 1),
                 global_a_layout=RowMajor(stored), global_b_layout=ColMajor(operator.dtype))
    a, b = whole(rng, EVEN[::2], stored), whole(rng, EVEN[:0:-1], operator.dtype)
    assert np.array_equal(product(machine, conf, a, b), reference(a.astype(F32) - 1, b.astype(F32)))


@pytest.mark.kin(5)
@on_machines
def test_captured_arrays_are_read_within_their_bounds(machine: Any, rng: np.random.Generator) -> None:
    """Arrays of an operand's size, looked up by coordinates, and a scalar: at the edges, too."""
    a, b, c = operands(rng)
    ta, tb, tc, td = whole(rng, (M, K), F16), whole(rng, (K, N), F16), whole(rng, (M, N), F32), whole(rng, (N,), F32)
    a_, b_, c_, d_, by = *(machine.array(x) for x in (ta, tb, tc, td)), np.float32(3)
    conf = small(global_c_layout=RowMajor(F32),
                 transform_global_to_shared_a=Map(lambda x, i, j: x + a_[i, j]),
                 transform_global_to_shared_b=Map(lambda x, i, j: x - b_[i, j]),
                 transform_global_to_shared_c=Map(lambda x, i, j: x * c_[i, j]),
                 transform_shared_to_global_d=Map(lambda x, i, j: x + by * d_[j]))
    assert np.array_equal(product(machine, conf, a, b, c), reference(a + ta, b - tb, c * tc) + 3 * td)


# -- C ----------------------------------------------------------------------------------------------------------------

@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("layout, size", [(RowMajor(F32), EVEN), (RowMajor(F32), (M, N, K)), (ColMajor(F16), EVEN)], ids=repr)
def test_c(machine: Any, layout: Any, size: tuple[int, int, int], rng: np.random.Generator) -> None:
    a, b, c = operands(rng, size)
    c = c.astype(layout.dtype)
    conf = small("pingpong", global_c_layout=layout)
    assert np.array_equal(product(machine, conf, a, b, c), reference(a, b, c))


@on_machines
def test_c_may_be_d(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, EVEN)
    held = machine.array(c)
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), held, small(global_c_layout=RowMajor(F32)), out=held)
    assert np.array_equal(machine.numpy(held), reference(a, b, c))


# -- epilogues --------------------------------------------------------------------------------------------------------

@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("along, size", [("M", (M, N, K)), ("N", EVEN)])
def test_bias(machine: Any, along: str, size: tuple[int, int, int], rng: np.random.Generator) -> None:
    a, b, _ = operands(rng, size)
    bias = whole(rng, (size[0] if along == "M" else size[1],), F16)
    conf = small(epilogue=epilogues.Bias(machine.array(bias), along))
    assert np.array_equal(product(machine, conf, a, b), reference(a, b) + (bias[:, None] if along == "M" else bias))


@on_machines
@pytest.mark.parametrize("schedule", ["pingpong"])
def test_composed_epilogues(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, EVEN)
    bias, residual = whole(rng, (EVEN[1],), F16), whole(rng, EVEN[:2], F32)
    conf = small(schedule, d=RowMajor(F16), global_c_layout=RowMajor(F32), epilogue=epilogues.Bias(machine.array(bias))
                 | epilogues.ReLU() | epilogues.Residual(machine.array(residual)))
    assert np.array_equal(product(machine, conf, a, b, c), np.maximum(reference(a, b, c) + bias, 0) + residual)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("trans, dtype", [("NN", F32), ("TN", F16), ("NT", F16)], ids=str)
def test_blas(machine: Any, trans: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    """One kernel for all alphas and betas; with beta = 0 C may hold NaN."""
    m, n, k = EVEN
    a, b, c = operands(rng, EVEN)
    kinds = [ColMajor if t == "T" else RowMajor for t in trans]
    conf = small(a=kinds[0], b=kinds[1], d=RowMajor(dtype))
    left, right = (np.ascontiguousarray(x.T) if t == "T" else x for x, t in zip((a, b), trans))
    for alpha, beta in [(1, 0), (2, 1)] if machine.emulated else [(1, 0), (2, 1), (-1, 3), (0, 1)]:
        start = c.astype(dtype) if beta else poison((m, n), dtype)
        out = machine.array(start)
        with machine.session():
            gk.blas.gemmEx(*trans, alpha, machine.array(left), machine.array(right), beta, out, conf=conf)
        expected = alpha * reference(a, b) + (beta * c if beta else 0)
        assert np.array_equal(machine.numpy(out), expected), (alpha, beta)


@pytest.mark.kin(5)
@on_machines
def test_an_epilogue_of_the_users(machine: Any, rng: np.random.Generator) -> None:
    a, b, _ = operands(rng)
    i, j = np.indices((M, N))
    d = product(machine, small(epilogue=Clamp(-3, 5)), a, b)
    assert np.array_equal(d, np.minimum(np.maximum(reference(a, b) + i, -3), 5 + j))


@dataclass(frozen=True)
class Positive(epilogues.Epilogue):
    """Stores tiles itself: those whose first value is positive, and leaves the others alone."""

    def tile(self, spec, d, tile, values, shape):
        if values[0] > 0:
            epilogues.Epilogue.tile(self, spec, d, tile, values, shape)


@on_machines
def test_an_epilogue_that_stores_itself(machine: Any, rng: np.random.Generator) -> None:
    a, b, _ = operands(rng, EVEN)
    d = product(machine, small(epilogue=Positive()), a, b)
    expected = reference(a, b)
    kept = np.repeat(expected[:, ::2] > 0, 2, axis=1)     # a thread holds pairs
    assert kept.any() and not kept.all()
    assert np.array_equal(d[kept], expected[kept]) and np.isnan(d[~kept]).all()


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("size", [EVEN, (70, 40, 24), (M, N, K)], ids=str)
def test_an_epilogue_that_writes_another_array(machine: Any, size: tuple[int, int, int], rng: np.random.Generator) -> None:
    """What lies out of range is nobody's to write, in a tile that straddles the edges, too."""
    a, b, _ = operands(rng, size)
    before = machine.array(poison(size[:2], F32))
    d = product(machine, small(epilogue=epilogues.Store(before) | epilogues.ReLU()), a, b)
    assert np.array_equal(machine.numpy(before), reference(a, b)) and np.array_equal(d, np.maximum(reference(a, b), 0))


# -- conditions -------------------------------------------------------------------------------------------------------


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("schedule, size", [("one", (71, 37, 77)), ("pingpong", (72, 40, 80))])
def test_a_condition_skips_blocks_along_k(machine: Any, schedule: str, size: tuple, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, size)
    conf = mapping(schedule, depth=16, condition=Banded(16, 32), global_c_layout=RowMajor(F32))
    kept = np.arange(size[2]) // 16 % 2 == 0
    expected = reference(a[:, kept], b[kept], c)
    expected[:, 32:] = c[:, 32:]
    assert np.array_equal(product(machine, conf, a, b, c), expected)
