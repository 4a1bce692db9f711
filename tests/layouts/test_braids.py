"""Products by braids, folded: in every kernel, against NumPy in float64, into poisoned outputs.

Values are small whole numbers and folds exact in float32, so results are right or wrong.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.epilogues import Fold, activations
from gemmkit.layouts import ColMajor, RowMajor, Swizzled
from gemmkit.operators import MIN_PLUS, WGMMAOp
from tests.ptx_machine.compare import PTX
from tests.support import sm90
from tests.support.joined import F16, F32, FAMILIES, FOLDS, config, dtype_of, folded, folded_product
from tests.support.machines import MACHINES, on_machines, poison, whole


@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("shape", [(37, 29, 33), (64, 16, 64), (5, 1, 1), (3, 9, 0)], ids=str)
def test_folds_of_every_number_of_parts(machine: Any, family: str, count: int, shape: tuple[int, int, int]) -> None:
    got, expected = folded_product(machine, family, count, shape)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(20)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("count", "order", "shift", "gap"), [(2, "F", 0, 0), (2, "C", 1, 0), (4, "C", 8, 8), (4, "F", 3, 5), (3, "F", 0, 8)],
                         ids=str)
def test_orders_misaligned_bases_and_lines(machine: Any, family: str, count: int, order: str, shift: int, gap: int) -> None:
    got, expected = folded_product(machine, family, count, (33, 24, 40), order, shift, gap)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(18)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("d", [RowMajor(F32), ColMajor(F32), RowMajor(F16)], ids=str)
def test_results_of_both_orders_with_coordinates(machine: Any, family: str, count: int, d: Any) -> None:
    """Of whole vectors, which Hopper's kernel stores by TMA or in lines."""
    got, expected = folded_product(machine, family, count, (20, 32, 16), d=d, coordinates=True)
    np.testing.assert_array_equal(got, expected.astype(d.dtype))


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_acts_on_folded_values(machine: Any, family: str) -> None:
    rng, dtype = np.random.default_rng(1), dtype_of(family)
    x, w, v, r = (whole(rng, shape, kind) for shape, kind in (((19, 24), dtype), ((24, 21), dtype), ((24, 21), dtype), ((19, 21), "f4")))
    bias, kept = whole(rng, (21,), "f4"), poison((19, 21), "f4")
    with machine.session():
        there = machine.array(kept)
        chain = (Fold(lambda gate, up: gate - up) | epilogues.Bias(machine.array(bias)) | epilogues.Store(there)
                 | epilogues.Residual(machine.array(r)) | epilogues.Elementwise(lambda y, m, n: y if m >= n else -y))
        out = machine.array(poison((19, 21), "f4"))
        gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(machine.array(w), machine.array(v)), out=out, conf=config(family), epilogue=chain)
    before = x.astype("f8") @ w.astype("f8") - x.astype("f8") @ v.astype("f8") + bias
    m, n = np.indices(before.shape)
    np.testing.assert_array_equal(machine.numpy(there), before)
    np.testing.assert_array_equal(machine.numpy(out), np.where(m >= n, before + r, -(before + r)))


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_arrays_that_the_function_captured(machine: Any, family: str) -> None:
    """They are indexed at coordinates of D alone: those of the braided matrix would be out of bounds."""
    rng, dtype = np.random.default_rng(2), dtype_of(family)
    x, w = whole(rng, (19, 8), dtype), [whole(rng, (8, 13), dtype) for _ in range(4)]
    states = whole(rng, (19, 13), "f4")
    with machine.session():
        c = machine.array(states)
        got = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(*map(machine.array, w)), conf=config(family),
                        epilogue=Fold(lambda i, f, g, o, m, n: i + f * c[m, n] - g + o))
    i, f, g, o = (x.astype("f8") @ one.astype("f8") for one in w)
    np.testing.assert_array_equal(machine.numpy(got), i + f * states - g + o)


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize(("schedule", "fields"), [("pingpong", {}), ("one", dict(splits=2)), ("one", dict(splits=3)), ("one-1x2", {}),
                                                  ("two-2x1", {})], ids=["pingpong", "cluster's K", "workspace's K", "1x2", "2x1"])
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str, fields: dict[str, Any]) -> None:
    """Two parts of 64 columns leave 32, which blocks that share K can divide."""
    rng = np.random.default_rng(3)
    x, w, v = (whole(rng, shape, "f2") for shape in ((70, 200), (200, 70), (200, 70)))
    conf = sm90.mapping(schedule, WGMMAOp(64), **fields)
    with machine.session():
        out = machine.array(poison((70, 70), "f4"))
        gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(machine.array(w), machine.array(v)), out=out, conf=conf, epilogue=Fold(FOLDS[2]))
    np.testing.assert_array_equal(machine.numpy(out), folded(2, [x.astype("f8") @ w.astype("f8"), x.astype("f8") @ v.astype("f8")]))


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize(("d", "N", "store"), [(RowMajor(F32), 40, "FoldingTmaStore"), (RowMajor(F16), 40, "FoldingTmaStore"),
                                               (RowMajor(F16), 42, "FoldingVectorStore"), (ColMajor(F32), 40, "FoldingTmaStore"),
                                               (RowMajor(F32), 41, "FoldingVectorStore"), (RowMajor(F16), 41, "FoldingVectorStore")], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_stores_of_the_warp_specialised_kernel(machine: Any, d: Any, N: int, store: str, count: int) -> None:
    rng = np.random.default_rng(10)
    x, w = whole(rng, (72, 40), "f2", 1), [whole(rng, (40, N), "f2", 1) for _ in range(count)]
    width = dict(shared_d_layout=Swizzled(type(d)(d.dtype), 32))
    with machine.session():
        out = machine.array(poison((72, N), d.dtype, "F" if d.axis == 0 else "C"))
        b = gk.layouts.InterleavedColumns(*map(machine.array, w))
        conf = sm90.mapping("one", WGMMAOp(64), d=d, **width)
        run = gk.plan(machine.array(x), b, conf=conf, out=out, epilogue=Fold(FOLDS[count]) | epilogues.Scale(2.0))
        run(machine.array(x), b, out=out)
    assert type(run._compiled.spec.store).__name__ == store                      # type: ignore[attr-defined]
    expected = 2 * folded(count, [x.astype("f8") @ one.astype("f8") for one in w])
    np.testing.assert_array_equal(machine.numpy(out), expected.astype(d.dtype))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("splits", [2, gk.kernels.StreamK(5)], ids=str)
def test_shares_of_k_of_the_multistage_kernel(machine: Any, splits: Any) -> None:
    got, expected = folded_product(machine, "multistage on the ordinary units", 2, (40, 20, 100), splits=splits)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 20, 17), (0, 3, 4), (3, 0, 4)], ids=str)
def test_the_kernel_that_a_call_chooses(machine: Any, dtype: str, shape: tuple[int, int, int]) -> None:
    (M, N, K), rng = shape, np.random.default_rng(4)
    x, w = whole(rng, (M, K), dtype), [whole(rng, (K, N), dtype) for _ in range(3)]
    with machine.session():
        got = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(*map(machine.array, w)), epilogue=Fold(FOLDS[3]))
    assert machine.numpy(got).shape == (M, N)
    expected = folded(3, [x.astype("f8") @ one.astype("f8") for one in w])
    assert machine.numpy(got).dtype == ("i4" if dtype == "i1" else dtype)      # an epilogue has sums of int32, and D has them
    np.testing.assert_array_equal(machine.numpy(got), expected)


@pytest.mark.kin(5)
@on_machines
def test_stacks_of_either_side(machine: Any) -> None:
    rng = np.random.default_rng(5)
    x, w, v = whole(rng, (3, 7, 12), "f2"), whole(rng, (12, 10), "f2"), whole(rng, (12, 10), "f2")
    many = whole(rng, (2, 3, 12, 10), "f2")
    with machine.session():
        one = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(machine.array(w), machine.array(v)), epilogue=Fold(FOLDS[2]))
        both = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(machine.array(many[0]), machine.array(many[1])), epilogue=Fold(FOLDS[2]))
    np.testing.assert_array_equal(machine.numpy(one), folded(2, [x.astype("f8") @ w, x.astype("f8") @ v]))
    np.testing.assert_array_equal(machine.numpy(both), folded(2, [x.astype("f8") @ many[0], x.astype("f8") @ many[1]]))


@on_machines
def test_a_joined_a_by_a_braid(machine: Any) -> None:
    """An LSTM cell: four gates of x W + h U, each of two arrays joined along K, and the old state."""
    rng = np.random.default_rng(6)
    x, h, c = (rng.standard_normal(shape).astype("f4") for shape in ((5, 12), (5, 7), (5, 7)))
    weights = [rng.standard_normal((19, 7)).astype("f4") for _ in range(4)]
    with machine.session():
        old = machine.array(c)
        got = gk.matmul(gk.layouts.Concat(machine.array(x), machine.array(h), axis=1), gk.layouts.InterleavedColumns(*map(machine.array, weights)),
                        epilogue=Fold(lambda i, f, g, o, m, n: activations.sigmoid(f) * old[m, n] + activations.sigmoid(i) * math.tanh(g)))
    i, f, g, _ = (np.concatenate([x, h], 1).astype("f8") @ one for one in weights)
    np.testing.assert_allclose(machine.numpy(got), c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i)), rtol=1e-5, atol=1e-5)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_gated_linear_units(machine: Any, dtype: str) -> None:
    rng = np.random.default_rng(7)
    x, w, v = (rng.standard_normal(shape).astype(dtype) for shape in ((9, 20), (20, 13), (20, 13)))
    with machine.session():
        swish = gk.glu(machine.array(x), machine.array(w), machine.array(v))
        tanh = gk.glu(machine.array(x), machine.array(w), machine.array(v), math.tanh, epilogue=epilogues.Scale(2.0))
    gate, up = x.astype("f8") @ w.astype("f8"), x.astype("f8") @ v.astype("f8")
    near = dict(rtol=1e-5, atol=1e-5) if dtype == "f4" else dict(rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(machine.numpy(swish).astype("f8"), gate / (1 + np.exp(-gate)) * up, **near)
    np.testing.assert_allclose(machine.numpy(tanh).astype("f8"), 2 * np.tanh(gate) * up, **near)


@on_machines
def test_a_semiring(machine: Any) -> None:
    rng = np.random.default_rng(8)
    x, w, v = (whole(rng, shape, "f4") for shape in ((9, 5), (5, 11), (5, 11)))
    with machine.session():
        got = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(machine.array(w), machine.array(v)), operator=MIN_PLUS, epilogue=Fold(lambda a, b: a - b))
    np.testing.assert_array_equal(machine.numpy(got), (x[:, :, None] + w).min(1) - (x[:, :, None] + v).min(1))


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_numbers(machine: Any, dtype: str) -> None:
    rng = np.random.default_rng(9)
    x, w, v = ((whole(rng, shape, "f4") + 1j * whole(rng, shape, "f4")).astype(dtype) for shape in ((9, 5), (5, 11), (5, 11)))
    with machine.session():
        got = gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(machine.array(w), machine.array(v)), epilogue=Fold(lambda a, b: a - b))
    np.testing.assert_array_equal(machine.numpy(got), x.astype("c16") @ w - x.astype("c16") @ v)


@pytest.mark.sample(2)
@pytest.mark.compile
@pytest.mark.parametrize("machine", [MACHINES["emulator"], PTX], ids=str)
@pytest.mark.usefixtures("always_wide")
def test_functions_of_large_results_get_wide_coordinates(machine: Any) -> None:
    """Of 2^31 elements; here every size counts as such. A place that is computed does not fit 32 bits."""
    from gemmkit.plans import adapters

    rng = np.random.default_rng(11)
    x, w, v = (whole(rng, shape, "f4") for shape in ((9, 8), (8, 13), (8, 13)))
    with machine.session():
        run = gk.plan(x, gk.layouts.InterleavedColumns(w, v), epilogue=Fold(lambda gate, up, m, n: gate - up + ((m + 1) * 4_000_000_000 + n) // 4_000_000_000)
                      | epilogues.Elementwise(lambda y, m, n: y + (m * 3_000_000_000) // 3_000_000_000))
        got = run(x, gk.layouts.InterleavedColumns(w, v))
    assert isinstance(run._compiled.config.epilogue, adapters.WideFold)
    m, _ = np.indices((9, 13))
    np.testing.assert_array_equal(got, x @ w - x @ v + 2 * m + 1)


@pytest.mark.kin(5)
def test_a_gated_unit_is_its_fold_bit_for_bit(rng: np.random.Generator) -> None:
    """In the emulator too the shipped unit's arithmetic is the device's: it was Python's, in float64, where a fold by hand had
    float32."""
    x, w, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 20), (20, 17), (20, 17)))
    with gk.emulate():
        unit = gk.glu(x, w, v)
        by_hand = gk.matmul(x, gk.layouts.InterleavedColumns(w, v), epilogue=epilogues.Fold(lambda gate, up: activations.silu(gate) * up))
    assert np.array_equal(unit, by_hand)
