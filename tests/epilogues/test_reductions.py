"""Reductions of D's rows and columns: values in every kernel, launches, machine code, and what is refused before anything is
written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.stand_ins import STREAM, gpu, library
from gemmkit import epilogues
from gemmkit.epilogues import ColumnReduce, Combine, Elementwise, Fold, ReLU, RowReduce, Scale
from gemmkit.epilogues.observers import OperandRowSum
from gemmkit.functions.grouped import grouped
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime import launch as launchable
from gemmkit.runtime import launch as workspace
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100, parameter_struct
from tests.ptx_machine.launch import Ptx
from tests.support import sm90
from tests.support.joined import F16, F32, FAMILIES, FOLDS, config, dtype_of, folded
from tests.support.machines import is_poison, on_machines, poison, whole
from tests.support.patches import Seeded

# ==========================================================================================================================
# Reductions of D's rows and columns: in every kernel, against NumPy in float64, into poisoned outputs.
#
# Values are small whole numbers, so that sums, extremes and places are right or wrong; logarithms are within their rounding.

KINDS: dict[str, Any] = {"rows": RowReduce, "columns": ColumnReduce}
OPS = ("sum", "sumsq", "max", "min", "argmax", "logsumexp")


def log_sum(x: np.ndarray, axis: int) -> np.ndarray:
    top = x.max(axis, initial=-np.inf, keepdims=True)
    with np.errstate(all="ignore"):
        return np.squeeze(top, axis) + np.log(np.exp(x - np.where(np.isinf(top), 0, top)).sum(axis))


def expected(op: str, x: np.ndarray, axis: int) -> np.ndarray:
    found: dict[str, Any] = {"sum": x.sum, "sumsq": (x * x).sum, "argmax": x.argmax, "max": lambda n: x.max(n, initial=-np.inf),
                             "min": lambda n: x.min(n, initial=np.inf), "logsumexp": lambda n: log_sum(x, n)}
    return np.asarray(found[op](axis))


def same(found: np.ndarray, wanted: np.ndarray, op: str) -> None:
    if op == "logsumexp":
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, wanted)


def reduced(machine: Any, kind: str, op: Any, a: np.ndarray, b: np.ndarray, *, conf: Any = None, out_dtype: Any = None,
            before: Any = None, after: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """D and the reduction, both poisoned before."""
    shape = (a.shape[0], b.shape[1])
    dtype = out_dtype or ("i4" if op == "argmax" else "f4")
    with machine.session():
        kept = machine.array(poison((shape[0 if kind == "rows" else 1],), dtype))
        out = machine.array(poison(shape, conf.global_d_layout.dtype if conf else "f4",
                                   "F" if conf and conf.global_d_layout.vector_axis == 0 else "C"))
        chain = KINDS[kind](kept, op)
        chain = chain if before is None else before | chain
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=conf, epilogue=chain if after is None else chain | after)
        return machine.numpy(out), machine.numpy(kept)


def operands(shape: tuple[int, int, int], dtype: Any, seed: int = 0, most: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    M, N, K = shape
    a, b = whole(rng, (M, K), dtype, most), whole(rng, (K, N), dtype, most)
    return a, b, a.astype("f8") @ b.astype("f8")


@pytest.mark.sample(120)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(37, 29, 33), (64, 32, 64), (5, 1, 3), (1, 67, 8), (3, 9, 0)], ids=str)
def test_reductions(machine: Any, family: str, kind: str, op: str, shape: tuple[int, int, int]) -> None:
    a, b, product = operands(shape, dtype_of(family))
    d, found = reduced(machine, kind, op, a, b, conf=config(family))
    np.testing.assert_array_equal(d, product)
    same(found, expected(op, product, 1 if kind == "rows" else 0), op)


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(5, 0, 3), (0, 5, 3), (0, 0, 0)], ids=str)
def test_nothing_to_reduce(machine: Any, family: str, shape: tuple[int, int, int]) -> None:
    a, b, product = operands(shape, dtype_of(family))
    for op in ("sum", "max", "logsumexp"):
        for kind in KINDS:
            _, found = reduced(machine, kind, op, a, b, conf=config(family))
            np.testing.assert_array_equal(found, np.full(found.shape, 0.0 if op == "sum" else -np.inf))


@pytest.mark.kin(5)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [ColMajor(F32), RowMajor(F16), ColMajor(F16)], ids=str)
@pytest.mark.parametrize("N", [40, 41])
def test_orders_and_types_of_results(machine: Any, family: str, d: Any, N: int) -> None:
    """Hopper's kernel stores them by TMA, in lines, or from the registers."""
    a, b, product = operands((35, N, 24), dtype_of(family))
    for kind, op in (("rows", "sumsq"), ("columns", "argmax")):
        got, found = reduced(machine, kind, op, a, b, conf=config(family, d=d))
        np.testing.assert_array_equal(got, product.astype(d.dtype))
        same(found, expected(op, product, 1 if kind == "rows" else 0), op)


@pytest.mark.kin(5)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at", range(4))
def test_chains(machine: Any, family: str, at: int) -> None:
    """At any place of a chain, beside other reductions and outputs, of values as they are there."""
    a, b, product = operands((35, 21, 24), dtype_of(family))
    bias = whole(np.random.default_rng(1), (21,), "f4")
    with machine.session():
        rows, columns, places = (machine.array(poison(shape, dtype)) for shape, dtype in (((35,), "f4"), ((21,), "f4"), ((35,), "i8")))
        kept, out = machine.array(poison((35, 21), "f4")), machine.array(poison((35, 21), "f4"))
        reductions = [RowReduce(rows, "sum"), ColumnReduce(columns, "max"), RowReduce(places, "argmax"), epilogues.Store(kept)]
        chain = epilogues.Default()
        steps = [epilogues.Bias(machine.array(bias)), epilogues.ReLU(), epilogues.Scale(-2.0), epilogues.Elementwise(lambda x, m, n: x + m)]
        for n, step in enumerate(steps):
            chain = chain | step
            if n == at:
                for reduction in reductions:
                    chain = chain | reduction
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family), epilogue=chain)
    values = [product + bias]
    values += [np.maximum(values[0], 0)]
    values += [values[1] * -2]
    values += [values[2] + np.arange(35)[:, None]]
    np.testing.assert_array_equal(machine.numpy(out), values[3])
    np.testing.assert_array_equal(machine.numpy(kept), values[at])
    np.testing.assert_array_equal(machine.numpy(rows), values[at].sum(1))
    np.testing.assert_array_equal(machine.numpy(columns), values[at].max(0))
    np.testing.assert_array_equal(machine.numpy(places), values[at].argmax(1))


PAIR = np.dtype([("least", "f4"), ("most", "f4")])


def span(a: Any, b: Any) -> Any:
    return min(a.least, b.least), max(a.most, b.most)


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_combine_of_ones_own(machine: Any, family: str, kind: str) -> None:
    """A range of states of two parts, and a weighted sum whose weights are captured and by coordinates."""
    a, b, product = operands((35, 21, 24), dtype_of(family))
    axis = 1 if kind == "rows" else 0
    op = Combine(span, (math.inf, -math.inf), of=lambda x: (x, x), result=lambda s: s.most - s.least, dtype=PAIR)
    _, found = reduced(machine, kind, op, a, b, conf=config(family))
    np.testing.assert_array_equal(found, product.max(axis) - product.min(axis))
    weights = whole(np.random.default_rng(2), (35, 21), "f4")
    with machine.session():
        w = machine.array(weights)
    _, found = reduced(machine, kind, Combine(lambda x, y: x + y, 0, of=lambda x, m, n: x * w[m, n]), a, b, conf=config(family))
    np.testing.assert_array_equal(found, (product * weights).sum(axis))


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_and_infinities(machine: Any, family: str, kind: str) -> None:
    a, b, product = operands((35, 21, 24), dtype_of(family), seed=4)

    def put(x: Any, m: Any, n: Any) -> Any:
        if (m == 7 and n == 5) or (m == 7 and n == 9) or (m == 20 and n == 5):
            return math.nan
        if m == 11 and n == 3:
            return math.inf
        return -math.inf if m == 2 or n == 17 else x

    product[2, :] = product[:, 17] = -np.inf
    product[7, 5] = product[7, 9] = product[20, 5] = np.nan
    product[11, 3] = np.inf
    for op in OPS:
        d, found = reduced(machine, kind, op, a, b, conf=config(family), before=epilogues.Elementwise(put))
        np.testing.assert_array_equal(d, product)
        axis = 1 if kind == "rows" else 0
        if op == "sumsq":
            wanted = (product * product).sum(axis)
        elif op == "logsumexp":
            with np.errstate(all="ignore"):
                wanted = np.logaddexp.reduce(product, axis)
        else:
            with np.errstate(all="ignore"):
                wanted = expected(op, product, axis)
        same(found, wanted, op)


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize(("schedule", "fields"), [("pingpong", {}), ("one", dict(splits=2)), ("one", dict(splits=3)), ("one-1x2", {}),
                                                  ("two-2x1", {}), ("three", {})], ids=["pingpong", "cluster's K", "workspace's K", "1x2", "2x1", "three"])
def test_schedules_of_the_warp_specialised_kernel(machine: Any, schedule: str, fields: dict[str, Any]) -> None:
    a, b, product = operands((70, 70, 130), F16)
    conf = sm90.mapping(schedule, WGMMAOp(64), **fields)
    for kind, op in (("rows", "max"), ("columns", "sum")):
        d, found = reduced(machine, kind, op, a, b, conf=conf)
        np.testing.assert_array_equal(d, product)
        same(found, expected(op, product, 1 if kind == "rows" else 0), op)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize(("family", "splits"), [("multistage", 3), ("singlestage", 2), ("multistage", gk.kernels.StreamK(3))], ids=str)
def test_blocks_that_share_k(machine: Any, family: str, splits: Any) -> None:
    """Finished values are reduced: once a tile, by the block that has all sums."""
    a, b, product = operands((35, 35, 48), dtype_of(family))
    for kind in KINDS:
        _, found = reduced(machine, kind, "sumsq", a, b, conf=config(family, splits=splits))
        same(found, expected("sumsq", product, 1 if kind == "rows" else 0), "sumsq")


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_of_folded_products(machine: Any, family: str, count: int) -> None:
    rng, dtype = np.random.default_rng(5), dtype_of(family)
    x, w = whole(rng, (37, 24), dtype, 1), [whole(rng, (24, 21), dtype, 1) for _ in range(count)]
    wanted = folded(count, [x.astype("f8") @ one.astype("f8") for one in w])
    with machine.session():
        rows, columns = machine.array(poison((37,), "f4")), machine.array(poison((21,), "i4"))
        out = machine.array(poison((37, 21), "f4"))
        gk.matmul(machine.array(x), gk.layouts.InterleavedColumns(*map(machine.array, w)), out=out, conf=config(family),
                  epilogue=epilogues.Fold(FOLDS[count]) | RowReduce(rows, "sum") | ColumnReduce(columns, "argmax"))
    np.testing.assert_array_equal(machine.numpy(out), wanted)
    np.testing.assert_array_equal(machine.numpy(rows), wanted.sum(1))
    np.testing.assert_array_equal(machine.numpy(columns), wanted.argmax(0))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_stacks(machine: Any, family: str) -> None:
    """Of a stack each product has its own rows."""
    rng, dtype = np.random.default_rng(6), dtype_of(family)
    a, b = whole(rng, (2, 1, 37, 24), dtype), whole(rng, (2, 24, 21), dtype)
    product = a.astype("f8") @ b.astype("f8")
    with machine.session():
        rows, columns = machine.array(poison((2, 2, 37), "f4")), machine.array(poison((2, 2, 21), "f4"))
        out = machine.array(poison((2, 2, 37, 21), "f4"))
        gk.matmul(machine.array(a), machine.array(b), out=out, conf=config(family),
                  epilogue=RowReduce(rows, "sum") | ColumnReduce(columns, "max"))
    np.testing.assert_array_equal(machine.numpy(out), product)
    np.testing.assert_array_equal(machine.numpy(rows), product.sum(-1))
    np.testing.assert_array_equal(machine.numpy(columns), product.max(-2))


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("shape", [(13, 17, 5), (1, 1300, 16), (16, 2048, 2048)], ids=str)
def test_without_a_configuration(machine: Any, shape: tuple[int, int, int]) -> None:
    """A plan takes other outputs; products of few rows, whose transpose would be computed, are not turned."""
    if shape[2] > 1000 and machine.emulated:
        shape = (shape[0], 256, 16)
    a, b, product = operands(shape, F16)
    with machine.session():
        outs = [machine.array(poison((shape[0],), "f4")) for _ in range(2)]
        there = machine.array(a), machine.array(b)
        for out in outs:
            gk.matmul(*there, epilogue=epilogues.Scale(2.0) | RowReduce(out, "sum"))
        run = gk.plan(*there, epilogue=RowReduce(outs[0], "sumsq"))
        run(*there)
    np.testing.assert_array_equal(machine.numpy(outs[1]), 2 * product.sum(1))
    np.testing.assert_allclose(machine.numpy(outs[0]), (product * product).sum(1), rtol=1e-6)  # float32: beyond 2**24


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["max", "min", "argmax"])
def test_extremes_of_integers(machine: Any, op: str, kind: str) -> None:
    """Of whole numbers the identity is the type's own; all are below 0 (or above), where a 0 would be seen."""
    rng = np.random.default_rng(11)
    a, b = whole(rng, (19, 24), "i4", 9) - 10, whole(rng, (24, 23), "i4", 9) + (10 if op != "min" else -10)
    product, axis = a.astype("i8") @ b.astype("i8"), 1 if kind == "rows" else 0
    with machine.session():
        out = machine.array(poison((product.shape[1 - axis],), "i4"))
        gk.matmul(machine.array(a), machine.array(b), epilogue=KINDS[kind](out, op))
    np.testing.assert_array_equal(machine.numpy(out), getattr(product, op)(axis))


@pytest.mark.kin(5)
@on_machines
def test_dtypes(machine: Any) -> None:
    """Sums of integers are integers; of float64 products states are float64; halves are combined in float32."""
    rng = np.random.default_rng(7)
    a, b = whole(rng, (19, 40), "i4", 100), whole(rng, (40, 23), "i4", 100)
    product = a.astype("i8") @ b.astype("i8")
    with machine.session():
        out = machine.array(poison((19,), "i4"))
        gk.matmul(machine.array(a), machine.array(b), epilogue=RowReduce(out, "max"))
        np.testing.assert_array_equal(machine.numpy(out), product.max(1))
        x, y = rng.standard_normal((19, 40)), rng.standard_normal((40, 23))
        wide = machine.array(poison((23,), "f8"))
        gk.matmul(machine.array(x), machine.array(y), epilogue=ColumnReduce(wide, "logsumexp"))
        np.testing.assert_allclose(machine.numpy(wide), np.logaddexp.reduce(x @ y, 0), rtol=1e-12)
        first = machine.array(poison((19,), "i4"))
        gk.matmul(machine.array(x), machine.array(y), epilogue=RowReduce(first, "argmax"))     # states have places of 64 bits
        np.testing.assert_array_equal(machine.numpy(first), (x @ y).argmax(1))
        half, small = machine.array(poison((19,), "f2")), (np.full((19, 40), 0.25, "f2"), np.full((40, 64), 0.5, "f2"))
        gk.matmul(machine.array(small[0]), machine.array(small[1]), epilogue=RowReduce(half, "sum"))
        np.testing.assert_array_equal(machine.numpy(half), np.full(19, 320, "f2"))


@pytest.mark.kin(5)
@on_machines
def test_the_same_bits_every_time(machine: Any) -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal(shape).astype("f2") for shape in ((40, 64), (64, 70)))
    made = [reduced(machine, "rows", "logsumexp", a, b, conf=sm90.mapping("one", WGMMAOp(32)))[1] for _ in range(2)]
    assert all(np.array_equal(x, made[0]) for x in made)


# ==========================================================================================================================
# Reductions and observers as compiled: values of the PTX, registers, spills, and that wgmmas stay asynchronous.


@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.sample(24)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_what_was_compiled_computes(family: str, kind: str, op: str) -> None:
    """The kernels' PTX, all threads in step, against NumPy in float64. (Tensor maps are no numbers: not Hopper's kernel.)"""
    a, b, product = operands((35, 21, 9), dtype_of(family))
    axis = 1 if kind == "rows" else 0
    out, d = poison((product.shape[1 - axis],), "i4" if op == "argmax" else "f4"), poison(product.shape, "f4")
    with Ptx().session():
        gk.matmul(a, b, out=d, conf=config(family), epilogue=Scale(2.0) | KINDS[kind](out, op))
    np.testing.assert_array_equal(d, 2 * product)
    same(out, expected(op, 2 * product, axis), op)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("op", ["max", "min", "argmax"])
def test_extremes_of_integers_as_compiled(op: str) -> None:
    rng = np.random.default_rng(11)
    a, b = rng.integers(-9, 0, (35, 21)).astype("i4"), rng.integers(1, 9, (21, 9)).astype("i4")
    b = -b if op == "min" else b
    out = poison((35,), "i4")
    with Ptx().session():
        gk.matmul(a, b, epilogue=RowReduce(out, op))
    np.testing.assert_array_equal(out, getattr(a @ b, op)(1))


@pytest.mark.kin(5)
@pytest.mark.compile
def test_an_observer_and_states_of_ones_own_compute() -> None:
    a, b, product = operands((35, 40, 37), dtype_of("singlestage"))
    sums, ranges, d = poison((35,), "f4"), poison((40,), "f4"), poison(product.shape, "f4")
    op = Combine(span, (np.inf, -np.inf), of=lambda x: (x, x), result=lambda s: s.most - s.least, dtype=PAIR)
    with Ptx().session():
        gk.matmul(a, b, out=d, conf=config("singlestage"), observe_a=OperandRowSum(sums), epilogue=ColumnReduce(ranges, op))
    np.testing.assert_array_equal(d, product)
    np.testing.assert_array_equal(sums, a.astype("f8").sum(1))
    np.testing.assert_array_equal(ranges, product.max(0) - product.min(0))


def machine_code(size: int, **keywords: Any) -> tuple[Any, Counter[str], list[Any]]:
    """The resources and opcodes of a product's kernel, and the kernels behind it."""
    a, b, out = (np.empty((size, size), np.float16) for _ in range(3))
    first, *behind = ahead.recorded(lambda: gk.matmul(a, b, **{"out": out, **keywords}), H100, zeros=False)
    entry = first.launchable.entry()
    counts = Counter({name: number for name, number in instruction_counts(disassemble(entry.cubin), full=True).items()})
    return entry.meta["usage"], counts, behind


def groups(counts: Counter[str]) -> int:
    """Where a group of wgmmas is waited for, or begins."""
    return sum(number for name, number in counts.items() if name.startswith(("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR")))


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("what", ["max", "sumsq", "argmax", "columns", "observed"])
def test_hoppers_kernel_spills_nothing_and_waits_as_the_plain_product(what: str, size: int) -> None:
    """But for argmax on tiles of 192 columns: two states of a value and a place, beside 192 sums, take 14 registers too many."""
    out = np.empty(size, np.int32 if what == "argmax" else np.float32)
    keywords: dict[str, Any] = (dict(observe_a=OperandRowSum(out)) if what == "observed" else
                                dict(epilogue=ColumnReduce(out, "sum") if what == "columns" else RowReduce(out, what)))
    _, plain, nothing = machine_code(size)
    usage, counts, behind = machine_code(size, **keywords)
    assert not nothing and len(behind) == 1
    assert usage["stack_bytes"] <= (64 if what == "argmax" and size == 8192 else 0)
    assert usage["spill_stores"] == 0 or usage["stack_bytes"] > 0
    assert behind[0].launchable.entry().meta["usage"]["spill_stores"] == 0
    assert groups(counts) == groups(plain)
    assert sum(n for name, n in counts.items() if "HGMMA" in name) == sum(n for name, n in plain.items() if "HGMMA" in name)


# ==========================================================================================================================
# Reductions that do not fit: what is said, and that nothing has been written.

A, B = np.ones((7, 5), np.float32), np.ones((5, 9), np.float32)


def rows(dtype: Any = "f4", count: int = 7) -> np.ndarray:
    return poison((count,), dtype)


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "no reduction of the name": (lambda out: RowReduce(out, "mean"), TypeError, r"RowReduce\(op='mean'\): one of 'sum', .* or an epilogues.Combine"),
    "a function alone": (lambda out: RowReduce(out, max), TypeError, r"an epilogues.Combine\(combine, identity\), is needed"),
    "no array": (lambda out: gk.matmul(A, B, epilogue=RowReduce([0.0], "sum")), TypeError, "RowReduce.out: got list; an array"),
    "as many as columns": (lambda out: gk.matmul(A, B, epilogue=RowReduce(rows(count=9), "sum")), ValueError,
                           r"out of RowReduce has shape \(9,\); the rows of a 7 x 9 result need \(7,\)"),
    "as many as rows": (lambda out: gk.matmul(A, B, epilogue=ColumnReduce(out, "sum")), ValueError,
                        r"out of ColumnReduce has shape \(7,\); the columns of a 7 x 9 result need \(9,\)"),
    "integers for floats": (lambda out: gk.matmul(A, B, epilogue=RowReduce(rows("i4"), "sum")), gk.ConfigError,
                            "out of RowReduce holds int32 and would get float32 values"),
    "short places": (lambda out: gk.matmul(A, B, epilogue=RowReduce(rows("i2"), "argmax")), gk.ConfigError,
                     "out of RowReduce holds int16 and would get int32 values"),
    "no largest of nothing": (lambda out: gk.matmul(A, B[:, :0], epilogue=RowReduce(rows("i4"), "argmax")), ValueError,
                              r"RowReduce\(op='argmax'\) with the rows of a 7 x 0 result: a row of no elements has no largest one"),
    "an operand": (lambda out: gk.matmul(A, B, epilogue=RowReduce(A[:, 0], "sum")), ValueError, "out of RowReduce overlaps a in memory"),
    "the result": (lambda out: gk.matmul(A, B, out=(d := poison((7, 9), "f4")), epilogue=RowReduce(d[:, 0], "sum")), ValueError,
                   "out of RowReduce overlaps out in memory"),
    "twice the same": (lambda out: gk.matmul(A, B, epilogue=RowReduce(out, "sum") | RowReduce(out, "max")), ValueError,
                       "out of RowReduce overlaps out of RowReduce in memory"),
    "in front of a fold": (lambda out: RowReduce(out, "sum") | Fold(lambda x, y: x + y), TypeError, "no epilogue can precede it"),
    "five of them": (lambda out: gk.matmul(A, B, epilogue=RowReduce(out, "sum") | RowReduce(rows(), "sum") | RowReduce(rows(), "sum")
                                           | RowReduce(rows(), "sum") | RowReduce(rows(), "sum")), gk.ConfigError,
                     "a launch may have 4 reductions; this is one more"),
    "in a group": (lambda out: grouped([A], [B], epilogue=RowReduce(out, "sum")), gk.ConfigError,
                   "a group cannot reduce"),
    "combine of one": (lambda out: Combine(lambda a: a, 0), TypeError, r"it takes 1 arguments; f\(a, b\), a function of two states"),
    "of of two": (lambda out: Combine(lambda a, b: a, 0, of=lambda x, m: x), TypeError, r"f\(x\) or f\(x, m, n\)"),
    "parts of an identity": (lambda out: Combine(lambda a, b: a, (0, 0)), ValueError, r"identity=\(0, 0\)\): it has 2 parts, and a state of dtype=None has 1"),
    "parts of two sizes": (lambda out: Combine(lambda a, b: a, (0, 0), dtype=[("x", "f4"), ("y", "i8")]), TypeError, "packed numbers of one size"),
    "narrow states": (lambda out: Combine(lambda a, b: a, 0, dtype="i1"), ValueError, "1 to 4 numbers of 2, 4 or 8 bytes"),
}


@pytest.mark.usefixtures("in_the_emulator")
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, kind, said = CALLS[name]
    out = rows()
    with pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


@pytest.mark.usefixtures("in_the_emulator")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", [RowReduce, ColumnReduce])
def test_complex_numbers(kind: Any, op: str) -> None:
    """They have no order, and none of their sums has a kernel; a complex array takes what comes of real ones."""
    real = SimpleNamespace(a=np.arange(6.0).reshape(2, 3), b=np.arange(6.0).reshape(3, 2) - 2)
    out = poison(2, "c16")
    with pytest.raises(gk.ConfigError, match="D's values are complex128, and real numbers are reduced"):
        gk.matmul(real.a * 1j, real.b, epilogue=kind(out, op))
    assert is_poison(out)
    found = gk.matmul(real.a, real.b, epilogue=kind(out, op))
    axis = 1 if kind is RowReduce else 0
    assert np.allclose(out, expected(op, found, axis))
    squares = Combine(lambda x, y: x + y, 0, of=lambda x: x.real * x.real + x.imag * x.imag, dtype="f8")
    found = gk.matmul(real.a * 1j, real.b, epilogue=kind(out, squares))
    assert np.allclose(out, expected("sumsq", abs(found), axis))


@pytest.mark.usefixtures("in_the_emulator")
def test_how_they_print() -> None:
    out = np.zeros(7, np.float32)
    for op in OPS:
        assert repr(RowReduce(out, op)) == f"RowReduce({out!r}, {op!r})"
    assert (Scale(2.0) | RowReduce(out, "max")).reduces and not (Scale(2.0) | Elementwise(lambda x: x)).reduces


# ==========================================================================================================================
# What launches of a product with reductions are given, without a GPU: its kernel, and the one behind it that completes.

PLACE = 0x7000_0000


@pytest.fixture
def launches(seeded: Seeded) -> Iterator[list[tuple[Any, int, list[Any]]]]:
    """The kernel, the stream and the numbers of each."""
    found: list[tuple[Any, int, list[Any]]] = []

    def bind(made: Any) -> Any:
        packing, _ = parameter_struct(tuple(made.formats))

        def launch(stream: int, values: Any) -> None:
            packing.pack(*values)
            found.append((made.kernel.__name__, stream, list(values)))

        def prepare(values: Any, slots: Any, expand: Any) -> Any:
            def prepared(stream: int, given: tuple) -> None:
                put = list(values)
                for slot, value in zip(slots, expand(given)):
                    put[slot] = value
                launch(stream, put)

            return prepared

        return SimpleNamespace(launch=launch, prepare=prepare)

    seeded(launchable.Launchable, "bind", bind)
    seeded(workspace, "addresses", lambda device, stream, spaces: tuple(PLACE + 2**20 * n for n in range(len(spaces))))
    yield found


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [48, 256])
def test_two_launches_a_call(launches: list[Any], size: int, count: int) -> None:
    """The product's and what completes it, both with the call's arrays and the same workspaces; other arrays of the same
    kind take their places."""
    with gpu(), library("cupy") as array:
        a, b, out = array(size, 64), array(64, size), array(size, size)
        for _ in range(2):
            sums = [array(size, dtype=np.float32) for _ in range(count)]
            epilogue: Any = ReLU() | RowReduce(sums[0], "max")
            if count == 2:
                epilogue = epilogue | ColumnReduce(sums[1], "sumsq")
            run = gk.plan(a, b, out=out, epilogue=epilogue)
            for call in (partial(gk.matmul, epilogue=epilogue), run):
                launches.clear()
                call(a, b, out=out)
                (_, stream, product), (second, behind, completing) = launches
                assert (second, stream, behind) == ("complete_reductions", STREAM, STREAM)
                for n in range(count):
                    assert sums[n].data.ptr in completing
                    assert PLACE + 2**20 * n in product and PLACE + 2**20 * n in completing


def test_observers_are_completed(launches: list[Any]) -> None:
    with gpu(), library("cupy") as array:
        a, b = array(256, 256), array(256, 256)
        for _ in range(2):
            sums = array(256, dtype=np.float32)
            launches.clear()
            gk.matmul(a, b, observe_a=OperandRowSum(sums))
            (_, _, product), (second, _, completing) = launches
            assert second == "complete_reductions" and sums.data.ptr in completing and PLACE in product and PLACE in completing
