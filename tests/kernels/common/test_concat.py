"""Matrices joined along M, N or K as A, B or both, in every kernel: against NumPy in float64, into poisoned outputs.

Values are small whole numbers, so results are right or wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, transforms
from gemmkit.operators import MAX_PLUS
from tests.support.joined import FAMILIES, JOINS, dtype_of, joined_product, parts
from tests.support.machines import on_machines, whole


@pytest.mark.sample(32)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("join", JOINS)
def test_joined_along_every_axis(machine: Any, family: str, join: str) -> None:
    got, expected = joined_product(machine, family, join)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", [("C", "F"), ("F", "C"), ("F", "F")])
@pytest.mark.parametrize(("shift", "gap"), [(0, 0), (1, 0), (8, 8), (0, 3)], ids=str)
def test_orders_misaligned_bases_and_lines(machine: Any, family: str, order: tuple[str, str], shift: int, gap: int) -> None:
    got, expected = joined_product(machine, family, "K", order, shift, gap)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("join", ["K in three", "M and N"])
def test_a_transpose_joins_the_transposes(machine: Any, family: str, join: str) -> None:
    got, expected = joined_product(machine, family, join, transposed=True)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(3)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_with_transforms_and_an_epilogue(machine: Any, family: str) -> None:
    """Coordinates are those in the joined matrix."""
    signs = transforms.Elementwise(lambda x, i, k: x if k < 20 else -x)
    bias = whole(np.random.default_rng(0), (29,), "f4")
    with machine.session():
        there = machine.array(bias)
    got, _ = joined_product(machine, family, "K", transform_global_to_shared_a=signs,
                     epilogue=epilogues.Bias(there) | epilogues.ReLU())
    rng, dtype = np.random.default_rng(len("K")), dtype_of(family)
    x, h = parts(rng, (37,) * 2, (20, 13), dtype)
    w, u = parts(rng, (20, 13), (29,) * 2, dtype)
    expected = np.maximum(x.astype("f8") @ w.astype("f8") - h.astype("f8") @ u.astype("f8") + bias, 0)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(3)
@pytest.mark.sample(10)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
@pytest.mark.parametrize("shape", [(1, 1, (1, 1)), (33, 17, (16, 32)), (7, 65, (31, 2, 5)), (3, 4, (0, 0)), (0, 5, (2, 3))], ids=str)
def test_the_kernel_that_a_call_chooses(machine: Any, dtype: str, shape: tuple[int, int, tuple[int, ...]]) -> None:
    rng, (M, N, widths) = np.random.default_rng(2), shape
    x, w = ([whole(rng, (M, k), dtype) for k in widths], [whole(rng, (k, N), dtype) for k in widths])
    with machine.session():
        got = gk.matmul(gk.Concat(*map(machine.array, x), axis=1), gk.Concat(*map(machine.array, w), axis=0))
    expected = sum(a.astype("c16" if dtype == "c8" else "f8") @ b.astype("c16" if dtype == "c8" else "f8") for a, b in zip(x, w))
    np.testing.assert_array_equal(machine.numpy(got), expected)


@on_machines
def test_parts_of_different_orders(machine: Any) -> None:
    """Where no one layout reads all parts, each is read by its own."""
    rng = np.random.default_rng(3)
    x, h, w = whole(rng, (21, 20), "f4"), np.asfortranarray(whole(rng, (21, 13), "f4")), whole(rng, (33, 9), "f4")
    with machine.session():
        got = gk.matmul(gk.Concat(machine.array(x), machine.array(h), machine.array(x), axis=1), machine.array(np.concatenate([w, w[:20]])))
    np.testing.assert_array_equal(machine.numpy(got), np.concatenate([x, h, x], 1).astype("f8") @ np.concatenate([w, w[:20]]).astype("f8"))


@pytest.mark.kin(3)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_stacks(machine: Any, dtype: str) -> None:
    rng = np.random.default_rng(4)
    x, h, z = (whole(rng, (2, 3, 7, k), dtype) for k in (5, 4, 2))
    w = whole(rng, (3, 11, 9), dtype)
    with machine.session():
        got = gk.matmul(gk.Concat(*map(machine.array, (x, h, z)), axis=-1), machine.array(w))
        one = gk.matmul(gk.Concat(*(machine.array(part[0, 0]) for part in (x, h, z)), axis=1), machine.array(w))
    both = np.concatenate([x, h, z], -1).astype("f8")
    np.testing.assert_array_equal(machine.numpy(got), both @ w.astype("f8"))
    np.testing.assert_array_equal(machine.numpy(one), both[0, 0] @ w.astype("f8"))


@on_machines
def test_gemm_ex(machine: Any) -> None:
    rng = np.random.default_rng(5)
    x, h, w, u, c = (whole(rng, shape, "f4") for shape in ((5, 20), (4, 20), (12, 5), (12, 4), (20, 12)))
    with machine.session():
        there = machine.array(c)
        gk.blas.gemmEx("T", "T", 2.0, gk.Concat(machine.array(x), machine.array(h), axis=0),
                       gk.Concat(machine.array(w), machine.array(u), axis=1), 3.0, there)
    np.testing.assert_array_equal(machine.numpy(there), 2 * (x.T @ w.T + h.T @ u.T) + 3 * c)


@on_machines
def test_a_plan_takes_other_parts(machine: Any) -> None:
    rng = np.random.default_rng(6)
    shapes = (7, 5), (7, 4), (5, 9), (4, 9)
    with machine.session():
        x, h, w, u = (machine.array(whole(rng, shape, "f4")) for shape in shapes)
        run = gk.plan(gk.Concat(x, h, axis=1), gk.Concat(w, u, axis=0))
        others = [whole(rng, shape, "f4") for shape in shapes]
        x, h, w, u = map(machine.array, others)
        with machine.compiles_nothing():
            got = run(gk.Concat(x, h, axis=1), gk.Concat(w, u, axis=0))
            again = gk.matmul(gk.Concat(x, h, axis=1), gk.Concat(w, u, axis=0))
        with pytest.raises(ValueError, match="a differs from the plan's"):
            run(gk.Concat(x, h[:, :3], axis=1), gk.Concat(w, u, axis=0))
        with pytest.raises(ValueError, match="b is one array, and the plan was made with one of several"):
            run(gk.Concat(x, h, axis=1), w)
        room = machine.array(np.zeros((11, 9), "f4"))
        with pytest.raises(ValueError, match=r"a part of a Concat or Braid \(b\) overlaps out"):
            run(gk.Concat(x, h, axis=1), gk.Concat(w, room[5:9], axis=0), out=room[:7])
    expected = others[0] @ others[2] + others[1] @ others[3]
    np.testing.assert_array_equal(machine.numpy(got), expected)
    np.testing.assert_array_equal(machine.numpy(again), expected)


@on_machines
def test_other_numbers_on_the_ordinary_units(machine: Any) -> None:
    """An identity other than 0 stands beyond K's end, and never between parts."""
    rng = np.random.default_rng(7)
    x, h, w = whole(rng, (9, 5), "f4"), whole(rng, (9, 8), "f4"), whole(rng, (13, 11), "f4")
    with machine.session():
        got = gk.matmul(gk.Concat(machine.array(x), machine.array(h), axis=1), machine.array(w),
                        operator=MAX_PLUS)
    both = np.concatenate([x, h], 1)
    np.testing.assert_array_equal(machine.numpy(got), (both[:, :, None] + w[None]).max(1))
