"""Epilogues of neighbours in a row, and elements packed of two neighbours: values in every kernel, and machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.epilogues import Bias, Fold, Pack, Pairs, Rotary, RowReduce, Scale, Softmax
from gemmkit.functions.grouped import grouped
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.epilogues.test_reductions import groups, machine_code
from tests.ptx_machine.launch import Ptx
from tests.support import sm90
from tests.support.joined import F16, F32, FAMILIES, FOLDS, config, dtype_of, folded
from tests.support.machines import is_poison, on_machines, poison, whole

# ==========================================================================================================================
# Epilogues of neighbours in a row: in every kernel, against NumPy, into poisoned outputs.


def operands(shape: tuple[int, int, int], dtype: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    M, N, K = shape
    a, b = whole(rng, (M, K), dtype, 2), whole(rng, (K, N), dtype, 2)
    return a, b, a.astype("f8") @ b.astype("f8")


def turned(x: Any, y: Any, m: Any, n: Any) -> Any:
    return y + 2 * m, x - n


def expected(x: np.ndarray) -> np.ndarray:
    m, n = np.indices(x[:, ::2].shape)
    out = np.empty_like(x)
    out[:, ::2], out[:, 1::2] = x[:, 1::2] + 2 * m, x[:, ::2] - 2 * n
    return out


@pytest.mark.kin(4)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [RowMajor(F32), ColMajor(F32), RowMajor(F16), ColMajor(F16)], ids=str)
@pytest.mark.parametrize("shape", [(37, 30, 33), (64, 32, 64), (5, 2, 3), (1, 66, 8), (3, 10, 0), (9, 40, 16)], ids=str)
def test_pairs(machine: Any, family: str, d: Any, shape: tuple[int, int, int]) -> None:
    """All N are even, and not all multiples of what a thread stores."""
    a, b, product = operands(shape, dtype_of(family))
    with machine.session():
        out = machine.array(poison(product.shape, d.dtype, "F" if d.axis == 0 else "C"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family, d=d), epilogue=Pairs(turned))
    np.testing.assert_array_equal(machine.numpy(out), expected(product))


@pytest.mark.kin(4)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("N", [32, 46])
def test_chains(machine: Any, family: str, N: int) -> None:
    """At any place, beside epilogues of elements, outputs, reductions, and in front of a softmax; twice."""
    a, b, product = operands((35, N, 24), dtype_of(family))
    bias = whole(np.random.default_rng(1), (N,), "f4")
    with machine.session():
        kept, sums, out = (machine.array(poison(shape, "f4")) for shape in ((35, N), (35,), (35, N)))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family),
                  epilogue=epilogues.Bias(machine.array(bias)) | Pairs(turned) | epilogues.ReLU() | epilogues.Store(kept)
                  | RowReduce(sums, "sum") | Pairs(lambda x, y: (x - y, y)) | epilogues.Scale(1 / 64) | Softmax())
    values = np.maximum(expected(product + bias), 0)
    np.testing.assert_array_equal(machine.numpy(kept), values)
    np.testing.assert_array_equal(machine.numpy(sums), values.sum(1))
    values[:, ::2] -= values[:, 1::2]
    raised = np.exp(values / 64 - (values / 64).max(1, keepdims=True))
    np.testing.assert_allclose(machine.numpy(out), raised / raised.sum(1, keepdims=True), rtol=3e-6, atol=1e-7)


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("of", ["stack", "fold"])
def test_stacks_and_folds(machine: Any, family: str, of: str) -> None:
    rng, dtype = np.random.default_rng(5), dtype_of(family)
    with machine.session():
        if of == "stack":
            a, b = whole(rng, (3, 37, 24), dtype), whole(rng, (24, 22), dtype)
            out, values = machine.array(poison((3, 37, 22), "f4")), a.astype("f8") @ b.astype("f8")
            gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family), epilogue=Pairs(turned))
            np.testing.assert_array_equal(machine.numpy(out), np.stack([expected(x) for x in values]))
        else:
            x, w = whole(rng, (37, 24), dtype, 1), [whole(rng, (24, 22), dtype, 1) for _ in range(2)]
            out = machine.array(poison((37, 22), "f4"))
            gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(*map(machine.array, w)), out=out, conf=config(family),
                      epilogue=Fold(FOLDS[2]) | Pairs(turned))
            np.testing.assert_array_equal(machine.numpy(out), expected(folded(2, [x.astype("f8") @ one.astype("f8") for one in w])))


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", [2, 6, 16])
def test_rotary(machine: Any, family: str, head: int) -> None:
    a, b, product = operands((37, 48, 24), dtype_of(family))
    angles = np.arange(37)[:, None] * 100.0 ** (-np.arange(head // 2) / head)
    cos, sin = np.cos(angles).astype("f4"), np.sin(angles).astype("f4")
    with machine.session():
        out = machine.array(poison((37, 48), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family), epilogue=Rotary(machine.array(cos), machine.array(sin)))
    numbers = (product.reshape(37, 48 // head, head // 2, 2) @ [1, 1j]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(machine.numpy(out), np.stack([numbers.real, numbers.imag], -1).reshape(37, 48), rtol=1e-5, atol=1e-4)


@pytest.mark.kin(4)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("schedule", ["pingpong", "one-1x2", "two-2x1", "three"])
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str) -> None:
    a, b, product = operands((70, 70, 64), F16)
    with machine.session():
        out = machine.array(poison((70, 70), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=sm90.mapping(schedule, WGMMAOp(64)), epilogue=Pairs(turned))
    np.testing.assert_array_equal(machine.numpy(out), expected(product))


@pytest.mark.kin(4)
@on_machines
def test_groups_and_other_types(machine: Any) -> None:
    """Products of a group; float64, of which a thread stores two; and a plan without a configuration."""
    with machine.session():
        a, b = [machine.array(np.eye(n, 8, dtype="f2")) for n in (5, 9)], [machine.array(np.ones((8, n), "f2")) for n in (6, 12)]
        for found, n in zip(gk.grouped(a, b, epilogue=Pairs(lambda x, y: (x, x + y))), (5, 9)):
            found = machine.numpy(found)
            np.testing.assert_array_equal(found, (np.arange(n) < 8)[:, None] * np.resize([1, 2], found.shape[1])[None])
        x = machine.array(np.arange(12.0).reshape(2, 6))
        found = machine.numpy(gk.matmul(machine.array(np.eye(2)), x, epilogue=Pairs(lambda x, y: (y, x))))
        np.testing.assert_array_equal(found, [[1, 0, 3, 2, 5, 4], [7, 6, 9, 8, 11, 10]])


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "an odd row": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 5), "f4"), out=out[:, :5], epilogue=Pairs(lambda x, y: (x, y))),
                   ValueError, "Pairs needs an even number of columns; the result is 4 x 5"),
    "a function of one": (lambda out: Pairs(lambda x: x), TypeError, r"f\(x, y\) or f\(x, y, m, n\), a function of two neighbours"),
    "one for two": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 6), "f4"), out=out, epilogue=Pairs(lambda x, y: x)),
                    gk.ComponentError, "a tuple of 2, one for each value, is needed"),
    "angles of other rows": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 6), "f4"), out=out, epilogue=Rotary(*np.ones((2, 5, 3), "f4"))),
                             ValueError, r"angles of 5 rows and heads of 6 columns; the result is 4 x 6"),
    "half a head": (lambda out: gk.matmul(np.ones((4, 3), "f4"), np.ones((3, 6), "f4"), out=out, epilogue=Rotary(*np.ones((2, 4, 2), "f4"))),
                    ValueError, "heads of 4 columns; the result is 4 x 6"),
    "cos and sin apart": (lambda out: Rotary(np.ones((4, 2)), np.ones((4, 3))), ValueError, r"cos has shape \(4, 2\) and sin \(4, 3\)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, kind, said = CALLS[name]
    out = poison((4, 6), "f4")
    with gk.emulate(), pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


# ==========================================================================================================================
# Elements of D packed of two neighbours: in every kernel, against NumPy, into poisoned outputs.


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


@pytest.mark.kin(4)
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


@pytest.mark.kin(4)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize(("schedule", "fields"), [("pingpong", {}), ("one", dict(splits=2)), ("one", dict(splits=3)), ("two-2x1", {})], ids=str)
def test_schedules_of_the_warp_specialised_kernel_of_packed_elements(machine: Any, schedule: str, fields: dict[str, Any]) -> None:
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
CALLS_PACKED: dict[str, tuple[Any, type[Exception], str]] = {
    "as wide as the product": (lambda out: gk.matmul(A, B, out=poison((4, 6), "u1"), epilogue=Pack(two)), ValueError,
                               "out has shape|that is N=12 columns|N="),
    "an odd row": (lambda out: gk.matmul(A, B[:, :5], epilogue=Pack(two)), ValueError, "Pack needs an even number of columns; the result is 4 x 5"),
    "something behind it": (lambda out: Pack(two) | Scale(2.0), TypeError, "packs the values of D, so that nothing can follow it"),
    "a function of one": (lambda out: Pack(lambda x: x), TypeError, r"f\(x, y\) or f\(x, y, m, n\), a function of two neighbours"),
    "no dtype": (lambda out: Pack(two, "int4"), TypeError, r"Pack\(dtype='int4'\): dtype int4 has no device type"),
    "what does not fit": (lambda out: gk.matmul(A, B, out=out, epilogue=Pack(lambda x, y: x + y)), gk.ConfigError, "out .* holds uint8 and would get float32"),
    "two for one": (lambda out: gk.matmul(A, B, out=out, epilogue=Pack(lambda x, y: (x, y))), TypeError, "has 2 parts, and 1 are needed"),
    "a fold": (lambda out: gk.matmul(A, gk.layouts.InterleavedColumns(B, B), epilogue=Fold(lambda x, y: x + y) | Pack(two)), gk.ConfigError,
               "those of a fold are packed by the fold's function"),
    "in a group": (lambda out: grouped([A], [B], epilogue=Pack(two)), gk.ConfigError, "groups are of plain matrices"),
    "a configuration's, with another epilogue": (
        lambda out: gk.matmul(A, B, out=out, epilogue=epilogues.ReLU(), conf=config("multistage on the ordinary units", d=RowMajor("uint8"),
                                                                                    epilogue=Pack(two))),
        gk.ConfigError, "only epilogues.Pack stores into"),
}


@pytest.mark.kin(4)
@pytest.mark.parametrize("name", CALLS_PACKED)
def test_what_is_refused_of_packed_elements(name: str) -> None:
    call, kind, said = CALLS_PACKED[name]
    out = poison((4, 3), "u1")
    with gk.emulate(), pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


# ==========================================================================================================================
# Epilogues of neighbours as compiled: values of the PTX, and that Hopper's kernel spills nothing.


@pytest.mark.kin(4)
@pytest.mark.compile
@pytest.mark.sample(6)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("d", [RowMajor(F32), RowMajor(F16), ColMajor(F32)], ids=str)
def test_what_was_compiled_computes(family: str, d: Any) -> None:
    a, b, product = operands((35, 46, 9), dtype_of(family))
    bias, out = np.arange(46, dtype="f4"), poison(product.shape, d.dtype, "F" if d.axis == 0 else "C")
    with Ptx().session():
        gk.matmul(a, b, out=out, conf=config(family, d=d), epilogue=Bias(bias) | Pairs(turned))
    np.testing.assert_array_equal(out, expected(product + bias))


@pytest.mark.thorough
@pytest.mark.compile
def test_hoppers_kernel_spills_nothing_and_waits_as_the_plain_product() -> None:
    angles = np.empty((4096, 64), np.float32)
    _, plain, _ = machine_code(4096)
    usage, counts, behind = machine_code(4096, epilogue=Rotary(angles, angles))
    assert usage["spill_stores"] == 0 and not behind
    assert groups(counts) == groups(plain)


@pytest.mark.kin(4)
@pytest.mark.compile
@pytest.mark.sample(4)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("d", [RowMajor, ColMajor], ids=["row", "column"])
def test_what_was_packed(family: str, d: Any) -> None:
    a, b, product = operands((35, 46, 9), dtype_of(family))
    out = poison((35, 23), "u1", "F" if d is ColMajor else "C")
    with Ptx().session():
        gk.matmul(a, b, out=out, conf=config(family, d=d("uint8"), epilogue=Pack(two)))
    np.testing.assert_array_equal(out, packed(product))


@pytest.mark.kin(4)
@pytest.mark.compile
def test_hoppers_kernel_packs_without_spills() -> None:
    a, b, out = np.empty((4096, 4096), np.float16), np.empty((4096, 4096), np.float16), np.empty((4096, 2048), np.uint8)
    first, = ahead.recorded(lambda: gk.matmul(a, b, out=out, epilogue=Pack(two)), H100, zeros=False)
    assert first.problem.config.kernel == "warp_specialised" and first.launchable.entry().meta["usage"]["spill_stores"] == 0
