"""Elements of D packed of two neighbours: in every kernel, against NumPy, into poisoned outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.epilogues import Bias, Fold, Pack, RowReduce, Scale
from gemmkit.functions.grouped import grouped
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from tests.kernels.common.test_pairs import operands
from tests.support import sm90
from tests.support.joined import F16, FAMILIES, config, dtype_of
from tests.support.machines import is_poison, on_machines, poison, whole


def int4(x: Any) -> Any:
    return np.int32(round(min(max(x, -8), 7))) & 15


def two(x: Any, y: Any) -> Any:
    return np.uint8(int4(x) | int4(y) << 4)


def four_bytes(x: Any, y: Any, m: Any, n: Any) -> Any:
    return np.int32(x + m) * 1000 + np.int32(y + n)


def packed(x: np.ndarray) -> np.ndarray:
    small = np.clip(x, -8, 7).astype("i4") & 15
    return np.asarray(small[..., ::2] | small[..., 1::2] << 4)


@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [RowMajor, ColMajor], ids=["row", "column"])
@pytest.mark.parametrize("shape", [(37, 30, 33), (64, 32, 64), (5, 2, 3), (1, 66, 8), (3, 10, 0), (9, 40, 16), (0, 4, 2), (4, 0, 2)], ids=str)
def test_bytes(machine: Any, family: str, d: Any, shape: tuple[int, int, int]) -> None:
    a, b, product = operands(shape, dtype_of(family))
    bias = whole(np.random.default_rng(1), (shape[1],), "f4")
    with machine.session():
        out = machine.array(poison((shape[0], shape[1] // 2), "u1", "F" if d is ColMajor else "C"))
        epilogue = Bias(machine.array(bias)) | Pack(two)
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family, d=d("uint8"), epilogue=epilogue))
    np.testing.assert_array_equal(machine.numpy(out), packed(product + bias))


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift", [0, 3])
def test_views_words_and_reductions(machine: Any, family: str, shift: int) -> None:
    """D in a wider array; a function of coordinates; a reduction of the product's columns in front."""
    a, b, product = operands((19, 44, 24), dtype_of(family))
    with machine.session():
        sums, wide = machine.array(poison((19,), "f4")), machine.array(poison((19, 31), "i4"))
        epilogue = Scale(2.0) | RowReduce(sums, "sum") | Pack(four_bytes)
        gk.matmul(machine.array(a), machine.array(b), out=wide[:, shift:22 + shift],
                  conf=config(family, d=RowMajor("int32"), epilogue=epilogue))
    found, (m, j) = machine.numpy(wide), np.indices((19, 22))
    np.testing.assert_array_equal(found[:, shift:22 + shift], (2 * product[:, ::2] + m) * 1000 + 2 * product[:, 1::2] + 2 * j)
    np.testing.assert_array_equal(machine.numpy(sums), 2 * product.sum(1))
    assert is_poison(found[:, :shift].copy()) and is_poison(found[:, 22 + shift:].copy())


@pytest.mark.kin(3)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_stacks(machine: Any, family: str) -> None:
    rng, dtype = np.random.default_rng(5), dtype_of(family)
    a, b = whole(rng, (3, 37, 24), dtype), whole(rng, (24, 22), dtype)
    with machine.session():
        out = machine.array(poison((3, 37, 11), "u1"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family, d=RowMajor("uint8"), epilogue=Pack(two)))
    np.testing.assert_array_equal(machine.numpy(out), packed(a.astype("f8") @ b.astype("f8")))


@pytest.mark.kin(3)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize(("schedule", "fields"), [("pingpong", {}), ("one", dict(splits=2)), ("one", dict(splits=3)), ("two-2x1", {})], ids=str)
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str, fields: dict[str, Any]) -> None:
    a, b, product = operands((70, 70, 130), F16)
    with machine.session():
        out = machine.array(poison((70, 35), "u1"))
        conf = sm90.mapping(schedule, WGMMAOp(64), d=RowMajor("uint8"), epilogue=Pack(two), **fields)
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=conf)
    np.testing.assert_array_equal(machine.numpy(out), packed(product))


@on_machines
def test_without_an_out(machine: Any) -> None:
    a, b, product = operands((24, 48, 32), F16)
    with machine.session():
        there = machine.array(a), machine.array(b)
        run = gk.plan(*there, epilogue=Pack(four_bytes, "int32"))
        found = machine.numpy(run(*there))
        small = machine.numpy(gk.matmul(*there, epilogue=Pack(two)))
    m, j = np.indices((24, 24))
    np.testing.assert_array_equal(found, (product[:, ::2] + m) * 1000 + product[:, 1::2] + 2 * j)
    assert found.dtype == np.int32 and small.dtype == np.uint8
    np.testing.assert_array_equal(small, packed(product))


A, B = np.ones((4, 3), "f4"), np.ones((3, 6), "f4")
CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "as wide as the product": (lambda out: gk.matmul(A, B, out=poison((4, 6), "u1"), epilogue=Pack(two)), ValueError,
                               "out has shape|that is N=12 columns|N="),
    "an odd row": (lambda out: gk.matmul(A, B[:, :5], epilogue=Pack(two)), ValueError, "Pack needs an even number of columns; the result is 4 x 5"),
    "something behind it": (lambda out: Pack(two) | Scale(2.0), TypeError, "packs the values of D, so that nothing can follow it"),
    "a function of one": (lambda out: Pack(lambda x: x), TypeError, r"f\(x, y\) or f\(x, y, m, n\), a function of two neighbours"),
    "no dtype": (lambda out: Pack(two, "int4"), TypeError, r"Pack\(dtype='int4'\): dtype int4 has no device type"),
    "what does not fit": (lambda out: gk.matmul(A, B, out=out, epilogue=Pack(lambda x, y: x + y)), gk.ConfigError, "out .* holds uint8 and would get float32"),
    "two for one": (lambda out: gk.matmul(A, B, out=out, epilogue=Pack(lambda x, y: (x, y))), TypeError, "has 2 parts, and 1 are needed"),
    "a fold": (lambda out: gk.matmul(A, gk.Braid(B, B), epilogue=Fold(lambda x, y: x + y) | Pack(two)), gk.ConfigError,
               "those of a fold are packed by the fold's function"),
    "in a group": (lambda out: grouped([A], [B], epilogue=Pack(two)), gk.ConfigError, "groups are of plain matrices"),
    "a configuration's, with another epilogue": (
        lambda out: gk.matmul(A, B, out=out, epilogue=epilogues.ReLU(), conf=config("multistage on the ordinary units", d=RowMajor("uint8"),
                                                                                    epilogue=Pack(two))),
        gk.ConfigError, "it is what epilogues.Pack stores into"),
}


@pytest.mark.kin(3)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, kind, said = CALLS[name]
    out = poison((4, 3), "u1")
    with gk.emulate(), pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)
