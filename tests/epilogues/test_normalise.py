"""Softmax and norms of D's rows: values in every kernel, in one tile and in two passes, machine code, launches, and what is
refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from bench.stand_ins import STREAM, CupyArray, gpu, library
from gemmkit import epilogues
from gemmkit.epilogues import Default, Fold, LayerNorm, Residual, RMSNorm, RowReduce, Scale, Softmax
from gemmkit.functions.grouped import grouped
from gemmkit.layouts import ColMajor, Layout, RowMajor
from gemmkit.operators import MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.epilogues.test_reductions import (
    PLACE,
    groups,
    launches,  # noqa: F401
    machine_code,
)
from tests.ptx_machine.launch import Ptx
from tests.support import sm90
from tests.support.joined import F16, F32, FAMILIES, FOLDS, config, dtype_of, folded, orders
from tests.support.machines import is_poison, on_machines, poison, whole

# ==========================================================================================================================
# Softmax and norms of D's rows behind a product: in every kernel, in one tile and in two passes, against NumPy in float64, into
# poisoned outputs.

BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = "softmax", "rms", "layer"
EPS = 1e-3
UNITS = {np.dtype("f2"): (2.0**-10, 2.0**-23), BF16: (2.0**-7, 1e-30), F32: (2e-6, 1e-6), np.dtype("f8"): (1e-12, 1e-12)}


def expected(kind: str, x: np.ndarray, gain: Any = 1.0, bias: Any = 0.0) -> np.ndarray:
    with np.errstate(all="ignore"):
        if kind == "softmax":
            raised = np.exp(x - x.max(-1, initial=-np.inf, keepdims=True))
            return raised / raised.sum(-1, keepdims=True)
        if kind == "rms":
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gain
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS) * gain + bias


def ending(kind: str, gain: Any = None, bias: Any = None) -> Any:
    return Softmax() if kind == "softmax" else RMSNorm(gain, EPS) if kind == "rms" else LayerNorm(gain, bias, EPS)


def same(found: np.ndarray, wanted: np.ndarray, near: float = 0.0) -> None:
    """Two units in the last place of D's dtype; ``near``: of what cancels, an absolute error beside."""
    relative, absolute = UNITS[found.dtype]
    np.testing.assert_allclose(found.astype("f8"), wanted, rtol=relative, atol=absolute + near)


def operands(shape: tuple[int, int, int], dtype: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    M, N, K = shape
    a, b = whole(rng, (M, K), dtype, 2), whole(rng, (K, N), dtype, 2)
    return a, b, a.astype("f8") @ b.astype("f8") / 4


QUARTER = epilogues.Scale(0.25)        # so that exponentials of sums of products do not all vanish


def normalised(machine: Any, kind: str, a: np.ndarray, b: np.ndarray, conf: Any, gain: Any = None, bias: Any = None,
               before: Any = QUARTER) -> np.ndarray:
    shape, d = (a.shape[0], b.shape[1]), conf.global_d_layout
    with machine.session():
        out = machine.array(poison(shape, d.dtype, "F" if d.vector_axis == 0 else "C"))
        put = [None if x is None else machine.array(x) for x in (gain, bias)]
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=conf, epilogue=before | ending(kind, *put))
        return np.asarray(machine.numpy(out))


@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(37, 29, 33), (64, 32, 64), (5, 1, 3), (1, 67, 8), (3, 9, 0), (35, 97, 16)], ids=str)
def test_rows(machine: Any, family: str, kind: str, shape: tuple[int, int, int]) -> None:
    """Of up to 32 columns a tile has whole rows."""
    a, b, product = operands(shape, dtype_of(family))
    rng = np.random.default_rng(1)
    gain, bias = rng.standard_normal((2, shape[1])).astype("f4")
    same(normalised(machine, kind, a, b, config(family), gain, bias if kind == "layer" else None),
         expected(kind, product, gain, bias), 3e-6)


@pytest.mark.kin(5)
@pytest.mark.sample(32)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [ColMajor(F32), RowMajor(F16), ColMajor(F16), RowMajor(BF16)], ids=str)
@pytest.mark.parametrize("N", [24, 73])
def test_orders_and_types_of_results(machine: Any, family: str, d: Any, N: int) -> None:
    """What is rounded twice is within two units in the last place of D's dtype."""
    a, b, product = operands((35, N, 24), dtype_of(family))
    for kind in KINDS[:2]:
        same(normalised(machine, kind, a, b, config(family, d=d)), expected(kind, product))
    unit = UNITS[d.dtype][0]                                   # of a layer norm what is near 0 cancels
    same(normalised(machine, "layer", a, b, config(family, d=d)), expected("layer", product), 4 * unit)


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("of_a", "CF")
@pytest.mark.parametrize("of_b", "CF")
def test_transposes(machine: Any, family: str, of_a: str, of_b: str) -> None:
    a, b, product = operands((37, 40, 24), dtype_of(family))
    conf = config(family, orders(of_a), orders(of_b))
    same(normalised(machine, "softmax", np.asarray(a, order=of_a), np.asarray(b, order=of_b), conf), expected("softmax", product))  # type: ignore[call-overload]


@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("N", [24, 40, 41])
@pytest.mark.parametrize("shift", [0, 3])
def test_views_of_results(machine: Any, family: str, N: int, shift: int) -> None:
    """D in a wider array, at any address: what lies beside it stays as it was."""
    a, b, product = operands((19, N, 24), dtype_of(family))
    with machine.session():
        wide = machine.array(poison((19, N + 9), "f2"))
        gk.matmul(machine.array(a), machine.array(b), out=wide[:, shift:N + shift], epilogue=QUARTER | Softmax(),
                  conf=config(family, d=RowMajor(F16)))
    found = machine.numpy(wide)
    same(found[:, shift:N + shift], expected("softmax", product))
    assert is_poison(found[:, :shift].copy()) and is_poison(found[:, N + shift:].copy())


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("N", [21, 61])
def test_chains(machine: Any, family: str, N: int) -> None:
    """Behind other epilogues, reductions and outputs among them."""
    a, b, product = operands((35, N, 24), dtype_of(family))
    bias = whole(np.random.default_rng(1), (N,), "f4")
    with machine.session():
        low, kept = machine.array(poison((35,), "f4")), machine.array(poison((35, N), "f4"))
        out = machine.array(poison((35, N), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family),
                  epilogue=QUARTER | epilogues.Bias(machine.array(bias)) | epilogues.Store(kept)
                  | epilogues.CausalMask(offset=2) | epilogues.RowReduce(low, "logsumexp") | Softmax())
    values = product + bias
    masked = np.where(np.tri(35, N, 2) > 0, values, -np.inf)
    np.testing.assert_array_equal(machine.numpy(kept), values)
    np.testing.assert_allclose(machine.numpy(low), np.logaddexp.reduce(masked, 1), rtol=1e-6, atol=1e-6)
    same(machine.numpy(out), expected("softmax", masked))


@pytest.mark.kin(5)
@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [21, 70])
def test_not_a_number_and_infinities(machine: Any, family: str, kind: str, N: int) -> None:
    """NumPy's answers. Of a softmax tiles of -inf alone, beside others, are 0."""
    a, b, product = operands((35, N, 24), dtype_of(family), seed=4)

    def put(x: Any, m: Any, n: Any) -> Any:
        if m == 7 and n == 5:
            return math.nan
        return math.inf if m == 11 and n == 3 else x

    def masked(x: Any, m: Any, n: Any) -> Any:
        return -math.inf if m == 2 or n == 17 or (m == 3 and n < 40 and n != 7) else x

    before = QUARTER | epilogues.Elementwise(put)
    product[7, 5], product[11, 3] = np.nan, np.inf
    if kind == "softmax":
        before = before | epilogues.Elementwise(masked)
        product = np.array([[masked(x, m, n) for n, x in enumerate(row)] for m, row in enumerate(product)])
    same(normalised(machine, kind, a, b, config(family), before=before), expected(kind, product), 3e-6)


@pytest.mark.kin(5)
@pytest.mark.sample(36)
@on_machines
@pytest.mark.parametrize(("schedule", "fields"), [("pingpong", {}), ("one", dict(splits=2)), ("one", dict(splits=3)), ("one-1x2", {}),
                                                  ("two-2x1", {}), ("three", {})], ids=["pingpong", "cluster's K", "workspace's K", "1x2", "2x1", "three"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [48, 150])
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str, fields: dict[str, Any], kind: str, N: int) -> None:
    a, b, product = operands((70, N, 130), F16)
    same(normalised(machine, kind, a, b, sm90.mapping(schedule, WGMMAOp(64), **fields)), expected(kind, product), 3e-6)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize(("family", "splits"), [("multistage", 3), ("singlestage", 2), ("multistage", gk.kernels.StreamK(3))], ids=str)
def test_blocks_that_share_k(machine: Any, family: str, splits: Any) -> None:
    a, b, product = operands((35, 35, 48), dtype_of(family))
    same(normalised(machine, "softmax", a, b, config(family, splits=splits)), expected("softmax", product))


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("N", [8, 37])
def test_of_folded_products(machine: Any, family: str, N: int) -> None:
    rng, dtype = np.random.default_rng(5), dtype_of(family)
    x, w = whole(rng, (37, 24), dtype, 1), [whole(rng, (24, N), dtype, 1) for _ in range(2)]
    values = folded(2, [x.astype("f8") @ one.astype("f8") for one in w])
    for kind in KINDS:
        with machine.session():
            out = machine.array(poison((37, N), "f4"))
            gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(*map(machine.array, w)), out=out, conf=config(family),
                      epilogue=epilogues.Fold(FOLDS[2]) | epilogues.Scale(0.125) | ending(kind))
        same(machine.numpy(out), expected(kind, values / 8), 3e-6)


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("N", [21, 45])
def test_stacks(machine: Any, family: str, N: int) -> None:
    """Rows of each product, with a gain of its own."""
    rng, dtype = np.random.default_rng(6), dtype_of(family)
    a, b = whole(rng, (2, 1, 37, 24), dtype, 2), whole(rng, (3, 24, N), dtype, 2)
    product, gain = a.astype("f8") @ b.astype("f8") / 4, rng.standard_normal((3, N)).astype("f4")
    with machine.session():
        out = machine.array(poison((2, 3, 37, N), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family), epilogue=QUARTER | RMSNorm(machine.array(gain), EPS))
    same(machine.numpy(out), expected("rms", product, gain[:, None, :]), 3e-6)


@on_machines
def test_nothing(machine: Any) -> None:
    for shape in ((0, 5, 3), (5, 0, 3), (0, 0, 0)):
        a, b, _ = operands(shape, F16)
        assert normalised(machine, "softmax", a, b, config("warp_specialised")).shape == shape[:2]


@pytest.mark.kin(5)
@on_machines
def test_plans_say_how(machine: Any) -> None:
    """And take other arrays, of the epilogue too."""
    a, b, product = operands((16, 200, 32), F16)
    with machine.session():
        there = machine.array(a), machine.array(b)
        gains = [machine.array(np.full(200, n, "f4")) for n in (1, 3)]
        run = gk.plan(*there, epilogue=QUARTER | RMSNorm(gains[0], EPS))
        assert run.row_passes in ("one tile", "one cluster", "two passes")
        same(machine.numpy(run(*there)), expected("rms", product), 0.0)
        found = [machine.numpy(gk.matmul(*there, epilogue=QUARTER | RMSNorm(gain, EPS))) for gain in gains]
        assert gk.plan(*there).row_passes is None
        assert gk.plan(*there, conf=config("warp_specialised"), epilogue=Softmax()).row_passes == "two passes"
        assert gk.plan(there[0], there[1][:, :32], conf=config("warp_specialised"), epilogue=Softmax()).row_passes == "one tile"
    same(found[1], expected("rms", product, 3.0))


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("N", [6, 32])
def test_softmax_of_rows_of_large_numbers(machine: Any, dtype: np.dtype, N: int) -> None:
    """One number all along a row: each element is one of N, also where e^-x is infinite in lanes without elements, and where the product
    with a scale is rounded."""
    x = np.array([-720, -1e4, -1e9, -1e10, -1e30, -3e38, 1e4, 1e10, 3e38])[:, None].astype(dtype)
    out = machine.array(poison((len(x), N), F32))
    with machine.session():
        gk.matmul(machine.array(x), machine.array(np.ones((1, N), dtype)), out=out, epilogue=epilogues.Scale(0.3) | Softmax())
    same(machine.numpy(out), np.full((len(x), N), 1 / N))


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("kind", KINDS)
def test_large_values_do_not_overflow(machine: Any, kind: str) -> None:
    """Sums that float16 does not hold: only standard values are stored."""
    rng = np.random.default_rng(2)
    a, b = (64 * whole(rng, shape, "f2", 8) for shape in ((19, 64), (64, 90)))
    product = a.astype("f8") @ b.astype("f8")
    assert abs(product).max() > 65504
    found = normalised(machine, kind, a, b, config("warp_specialised", d=RowMajor(F16)), before=epilogues.Default())
    same(found, expected(kind, product), 4e-3 if kind == "layer" else 0.0)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("kind", KINDS)
def test_float64(machine: Any, kind: str) -> None:
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((19, 24)), rng.standard_normal((24, 70))
    with machine.session():
        found = machine.numpy(gk.matmul(machine.array(a), machine.array(b), epilogue=ending(kind)))
    same(found, expected(kind, a @ b))


@pytest.mark.kin(5)
@on_machines
def test_the_same_bits_every_time(machine: Any) -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal(shape).astype("f2") for shape in ((20, 32), (32, 70)))
    made = [normalised(machine, "layer", a, b, config("warp_specialised")) for _ in range(2)]
    assert np.array_equal(made[0], made[1])


@on_machines
def test_half_sums(machine: Any) -> None:
    """Of sums in float16 rows are normalised in float32."""
    a, b, product = operands((19, 40, 16), F16)
    conf = config("multistage", operator=MMAOp(accumulator="float16"), d=RowMajor(F16))
    same(normalised(machine, "softmax", a, b, conf), expected("softmax", product))


# ==========================================================================================================================
# Normalised rows of D as compiled: values of the PTX of both passes, registers, spills, and that wgmmas stay asynchronous.


@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.sample(24)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "N"), [(RowMajor(F32), 21), (RowMajor(F32), 72), (RowMajor(F16), 72), (ColMajor(F32), 45)], ids=str)
def test_what_was_compiled_computes(family: str, kind: str, d: Any, N: int) -> None:
    """The PTX of both kernels, all threads in step, against NumPy in float64."""
    a, b, product = operands((35, N, 9), dtype_of(family))
    gain, bias = np.random.default_rng(3).standard_normal((2, N)).astype("f4")
    out = poison(product.shape, d.dtype, "F" if d.axis == 0 else "C")
    with Ptx().session():
        gk.matmul(a, b, out=out, conf=config(family, d=d), epilogue=QUARTER | ending(kind, gain, bias))
    same(out, expected(kind, product, gain, bias), 4e-3 if d.dtype == F16 else 3e-6)


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_hoppers_kernel_spills_nothing_and_waits_as_the_plain_product(kind: str, size: int) -> None:
    gain = np.empty(size, np.float16)
    norms = {"softmax": Softmax(), "rms": RMSNorm(gain, EPS), "layer": LayerNorm(gain, gain, EPS)}
    _, plain, _ = machine_code(size)
    usage, counts, behind = machine_code(size, epilogue=norms[kind])
    assert usage["spill_stores"] == 0 and len(behind) == 1 and behind[0].launchable.entry().meta["usage"]["spill_stores"] == 0
    assert groups(counts) == groups(plain)
    assert sum(n for name, n in counts.items() if "HGMMA" in name) == sum(n for name, n in plain.items() if "HGMMA" in name)


@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.sample(12)
@pytest.mark.parametrize(("N", "tile", "schedule", "blocks"), [(1024, (128, 256), "cooperative", 4), (2048, (128, 256), "cooperative", 8),
                                                               (512, (64, 256), "pingpong", 2), (512, (128, 128), "pingpong", 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.kin(5)
def test_a_cluster_exchanges_states_of_its_rows(kind: str, N: int, tile: tuple[int, int], schedule: str, blocks: int) -> None:
    """Nothing spills, nothing waits for the memory of the whole GPU but where the cluster meets, there is no second pass, and the
    multiplication waits as that of the plain product of the same mapping."""
    gain = np.empty(N, np.float16)
    epilogues = {"softmax": Softmax(), "rms": RMSNorm(gain, EPS), "layer": LayerNorm(gain, gain, EPS)}
    counts = {}
    for epilogue in (Default(), epilogues[kind]):
        conf = gk.get_config(operator=WGMMAOp(tile[1]), block_shape=Tile(M=tile[0], N=tile[1], K=64), warps_per_block=8, schedule=schedule,
                             cluster=Tile(M=1, N=blocks), global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16),
                             global_d_layout=RowMajor(F16), epilogue=epilogue, gemm_shape=dict(M=8192, N=N, K=4096))
        a, b, d = (np.empty(shape, F16) for shape in ((8192, 4096), (4096, N), (8192, N)))
        (found,) = recorded(lambda conf=conf, a=a, b=b, d=d: gk.matmul(a, b, out=d, conf=conf), H100, zeros=False)  # type: ignore[misc]
        entry = found.launchable.entry()
        assert entry.meta["usage"]["spill_stores"] == 0
        counts[type(epilogue)] = instruction_counts(disassemble(entry.cubin), full=True)
    plain, normed = counts[Default], counts[type(epilogues[kind])]

    def count(of: dict[str, int], word: str) -> int:
        return sum(n for name, n in of.items() if word in name)

    assert groups(normed) == groups(plain) and count(normed, "HGMMA") == count(plain, "HGMMA")
    assert count(normed, "MEMBAR.ALL.GPU") == count(plain, "MEMBAR.ALL.GPU")
    assert count(normed, "STAS") >= 2 > count(plain, "STAS")


# ==========================================================================================================================
# Epilogues that normalise rows and do not fit: what is said, and that nothing has been written; and what is launched.

A, B = np.ones((7, 5), np.float32), np.ones((5, 9), np.float32)
WIDE = np.ones((5, 900), np.float32)


@dataclass(frozen=True)
class Reversed(Layout):
    """Not plain: the second pass cannot read it."""

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        data[shape.M - 1 - i, j] = value


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "of columns": (lambda out: Softmax("columns"), ValueError, r"Softmax\(axis='columns'\): only rows are supported; for columns compute the transpose"),
    "something behind it": (lambda out: Softmax() | Scale(2.0), TypeError, "finishes whole rows, so that nothing can follow it"),
    "something behind a chain": (lambda out: Scale(2.0) | Softmax() | Residual(out), TypeError, "nothing can follow it"),
    "a reduction behind it": (lambda out: RMSNorm() | RowReduce(out[:, 0], "sum"), TypeError, "nothing can follow it"),
    "twice": (lambda out: Softmax() | Softmax(), TypeError, "nothing can follow it"),
    "in front of a fold": (lambda out: Softmax() | Fold(lambda x, y: x + y), TypeError, "no epilogue can precede it"),
    "behind a fold's norm": (lambda out: Fold(lambda x, y: x + y) | Softmax() | Scale(2.0), TypeError, "nothing can follow it"),
    "a gain of rows": (lambda out: gk.matmul(A, B, out=out, epilogue=RMSNorm(np.ones(7, "f4"))), ValueError,
                       r"gain of RMSNorm has shape \(7,\); a 7 x 9 result needs \(9,\)"),
    "a bias of rows": (lambda out: gk.matmul(A, B, out=out, epilogue=LayerNorm(np.ones(9, "f4"), np.ones(7, "f4"))), ValueError,
                       r"bias of LayerNorm has shape \(7,\); a 7 x 9 result needs \(9,\)"),
    "a number for a gain": (lambda out: RMSNorm(2.0), TypeError, r"RMSNorm\(gain=2.0\): a vector with an element for each column"),
    "a matrix of gains": (lambda out: LayerNorm(np.ones((3, 9))), ValueError, r"gain of LayerNorm has shape \(3, 9\)"),
    "a negative eps": (lambda out: RMSNorm(eps=-1.0), ValueError, r"RMSNorm\(eps=-1.0\): a number from 0 on"),
    "an eps of NaN": (lambda out: LayerNorm(eps=float("nan")), ValueError, r"LayerNorm\(eps=nan\): a number from 0 on"),
    "the result for a gain": (lambda out: gk.matmul(A, B, out=out, epilogue=RMSNorm(out[0])), ValueError, "gain of RMSNorm overlaps out"),
    "as a transform": (lambda out: gk.transforms.Map(Scale(2.0) | Softmax()), TypeError, "it is not a function of one element"),
    "a reduction as a transform": (lambda out: gk.transforms.Map(RowReduce(row(), "sum")), TypeError, "it is not a function of one element"),
    "as a function of an element": (lambda out: gk.epilogues.Elementwise(RMSNorm()), TypeError, "it is not a function of one element"),
    "integers": (lambda out: gk.matmul(A, B, out=poison((7, 9), "i4"), epilogue=Softmax()), gk.ConfigError,
                 "its results are not numbers of int32; give an out of float16, bfloat16, float32 or float64"),
    "in a group": (lambda out: grouped([A], [B], epilogue=Softmax()), gk.ConfigError, "a group cannot reduce"),
    "a gain of several parts": (lambda out: gk.matmul(A, B, epilogue=RMSNorm(np.ones(9, "c8"))), TypeError,
                                "gain of RMSNorm has dtype complex64; it must be real"),
    "an eps that float32 does not hold": (lambda out: gk.matmul(A, B, epilogue=LayerNorm(eps=1e39)), ValueError, "eps=1e"),
    "two passes over what is not plain": (
        lambda out: gk.matmul(A, WIDE, out=poison((7, 900), "f4"), global_d_layout=Reversed("float32"),
                              gemm_shape=dict(M=7, N=900, K=5), epilogue=Softmax()), gk.ConfigError,
        "a row of D has 900 columns and a tile .* is not plain; use RowMajor or ColMajor, or a tile of 900 columns"),
    "five of them": (lambda out: gk.matmul(A, WIDE, epilogue=RowReduce(row(), "sum") | RowReduce(row(), "sum") | RowReduce(row(), "sum")
                                           | RowReduce(row(), "sum") | Softmax()), gk.ConfigError,
                     "a launch may have 4 reductions; this is one more"),
}


def row() -> np.ndarray:
    return poison((7,), "f4")


@pytest.mark.sample(1)
@pytest.mark.usefixtures("in_the_emulator")
@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, kind, said = CALLS[name]
    out = poison((7, 9), "f4")
    with pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


@pytest.mark.usefixtures("in_the_emulator")
def test_of_a_layout_that_is_not_plain_one_tile_will_do() -> None:
    out = poison((7, 9), "f4")
    gk.matmul(A, B, out=out, global_d_layout=Reversed("float32"), gemm_shape=dict(M=7, N=9, K=5), epilogue=Softmax())
    np.testing.assert_allclose(out, 1 / 9, rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reduces", [False, True])
def test_launches(launches: list[Any], reduces: bool) -> None:  # noqa: F811
    """The product's, what completes its reductions, and the second pass with the call's D and the same workspaces; other arrays
    of the same kind take their places."""
    with gpu(), library("cupy") as array:
        a, b = array(512, 64), array(64, 4096)
        for _ in range(2):
            gain, sums, out = array(4096, dtype=np.float32), array(512, dtype=np.float32), array(512, 4096)
            epilogue: Any = RowReduce(sums, "sum") | RMSNorm(gain) if reduces else RMSNorm(gain)
            run = gk.plan(a, b, out=out, epilogue=epilogue)
            assert run.row_passes == "two passes"
            for call in (lambda: gk.matmul(a, b, out=out, epilogue=epilogue), lambda: run(a, b, out=out)):
                launches.clear()
                call()
                (_, stream, product), *between, (name, behind, rescaling) = launches
                assert (name, stream, behind) == ("rescale_rows", STREAM, STREAM)
                assert [one[0] for one in between] == ["complete_reductions"] * reduces
                assert out.data.ptr in rescaling and gain.data.ptr in rescaling and gain.data.ptr in product
                place = PLACE + 2**20 * reduces
                assert place in product and place in rescaling


ENDINGS = {"softmax": lambda gain: Softmax(), "rms": RMSNorm, "layer": lambda gain: LayerNorm(gain, gain)}


@pytest.mark.kin(5)
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize(("M", "N", "blocks"), [
    (8192, 512, None), (4096, 128, None), (8192, 1024, None), (8192, 256, 2), (8192, 512, 2), (8192, 384, 2), (8192, 1024, 4), (8192, 1000, 4),
    (8192, 2048, 8)])
def test_launches_of_a_cluster(launches: list[Any], kind: str, M: int, N: int, blocks: int | None) -> None:  # noqa: F811
    """A call with another epilogue of the planned kind brings the values that the kernel of the first one takes, and its vectors,
    also where stages leave just the room for the states of rows; with C, into a part of an array, and on another stream."""
    width = 0 if blocks is None else -(-N // blocks // 8) * 8
    make, places = ENDINGS[kind], itertools.count(1)

    def array(*shape: int) -> Any:
        return CupyArray(shape, np.float16, next(places) << 30)

    with gpu(), library("cupy"):
        a, b, part = array(M, 64), array(64, N), array(M, N + 64)
        part.shape = M, N
        conf = None if blocks is None else gk.get_config(
            operator=WGMMAOp(width), block_shape=Tile(M=128, N=width, K=64), warps_per_block=8, schedule="cooperative",
            cluster=Tile(M=1, N=blocks), global_a_layout=RowMajor(np.float16), global_b_layout=RowMajor(np.float16),
            global_d_layout=RowMajor(np.float16), epilogue=make(array(N)), gemm_shape=dict(M=M, N=N, K=64))
        for c in (None, array(M, N)):
            for out in (array(M, N), part):
                passes = gk.plan(a, b, c, conf, out=out, epilogue=make(array(N))).row_passes
                assert blocks is None or passes == "one cluster"
                for stream in (STREAM, 5):
                    gain = array(N)
                    launches.clear()
                    gk.matmul(a, b, c, conf, out=out, epilogue=make(gain), stream=stream)
                    assert len(launches) == (2 if passes == "two passes" else 1)
                    assert kind == "softmax" or gain.data.ptr in launches[0][2]
                    assert all(one[1] == stream for one in launches)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "columns"), [((16384, 256, 1024), 256), ((4000, 64, 1024), 64), ((8192, 1024, 4096), None)])
def test_tiles_that_hold_rows_are_worth_a_second_pass(shape: tuple[int, int, int], columns: int | None) -> None:
    """Where the plain product would take narrower tiles that are hardly quicker."""
    M, N, K = shape
    a, b, out = (np.empty(of, np.float16) for of in ((M, K), (K, N), (M, N)))
    plain, = ahead.recorded(lambda: gk.matmul(a, b, out=out), H100, zeros=False)
    first, *behind = ahead.recorded(lambda: gk.matmul(a, b, out=out, epilogue=Softmax()), H100, zeros=False)
    taken = first.problem.config.block_shape.size.N
    if columns is None:
        assert len(behind) == 1 and taken == plain.problem.config.block_shape.size.N
    else:
        assert not behind and taken == columns > plain.problem.config.block_shape.size.N
