"""Accumulators hold what the result is asked to hold, by out, C, ``dtype=`` or an epilogue: drawn products against exact
integers, and float64 for floats. A product is right, or refused for a reason that is the caller's.

The seeds are those of the parameters: ``-k 17`` is the case of seed 17.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import GPUS
from gemmkit.tuning.operators import AccumulatorRule
from tests.support.machines import BF16, E4M3, on_machines

INTEGERS = tuple(np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"))
FLOATS = (*(np.dtype(name) for name in ("f2", "f4", "f8")), BF16)
APIS = "matmul", "plan", "gemmEx", "grouped", "einsum", "stack", "C", "ReLU", "RowReduce", "C and dtype"


def limits(dtype: np.dtype) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def drawn_matrix(rng: random.Random, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Extreme numbers among others; of floats, powers of 2 whose products may overflow float32."""
    if dtype in FLOATS:
        top = {"float16": 15, "bfloat16": 100, "float32": 100, "float64": 300}[dtype.name]
        reach = rng.choice((3, top))
        made = [float(rng.choice((1, -1, 0, 1.5))) * 2.0 ** rng.randint(-3, reach) for _ in range(shape[0] * shape[1])]
        return np.array(made).reshape(shape).astype(dtype)
    least, most = limits(dtype)
    made = [rng.choice((least, most, most, 0, 1, rng.randint(least, most))) for _ in range(shape[0] * shape[1])]
    return np.array(made, object).reshape(shape).astype(dtype)


def joined(*dtypes: np.dtype) -> np.dtype | None:
    try:
        return np.result_type(*dtypes)
    except TypeError:
        return None


@dataclass
class Drawn:
    """A product: how it is called, its operands, and what its result is asked to hold (None: nothing)."""

    api: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    asked: np.dtype | None
    by_dtype: bool

    @classmethod
    def of(cls, seed: int) -> Drawn:
        rng = random.Random(seed)
        kinds = INTEGERS if rng.random() < 0.7 else (*INTEGERS, *FLOATS, *FLOATS)
        a = rng.choice(kinds)
        b = a if rng.random() < 0.5 else rng.choice(kinds)
        asked = rng.choice((*INTEGERS[2:4], *FLOATS, *FLOATS[:3], None, None, rng.choice(INTEGERS)))
        M, N, K = rng.randint(1, 5), rng.randint(1, 5), rng.choice((0, 1, 2, 3, 17, 40))
        c_dtype = asked if asked is not None else joined(a, b) or np.dtype("f4")
        return cls(rng.choice(APIS), drawn_matrix(rng, (M, K), a), drawn_matrix(rng, (K, N), b),
                   drawn_matrix(rng, (M, N), c_dtype), asked, rng.random() < 0.4)

    # -- what is right

    @property
    def has_c(self) -> bool:
        return self.api in ("gemmEx", "C", "C and dtype")

    def exact(self) -> np.ndarray:
        """The result, in Python's integers or in float64."""
        a, b, c = self.a, self.b, self.c if self.has_c else None
        floats = any(x.dtype in FLOATS for x in (a, b, *(() if c is None else (c,))))
        wide: Any = np.float64 if floats else object
        with np.errstate(all="ignore"):
            found = a.astype(wide) @ b.astype(wide) if a.shape[1] else np.zeros((a.shape[0], b.shape[1]), wide)
            found = found if c is None else found + c.astype(wide)
        if self.api != "ReLU":
            return found
        held = joined(a.dtype, b.dtype) if self.asked is None else self.asked
        if not floats and held is not None and held.kind in "iu" and held.itemsize >= 4:
            found = wrapped(found, held).astype(object)
        return np.maximum(found, 0)

    def may_be_refused(self) -> bool:
        """Whether what is asked for is narrower than NumPy's result type, which is the caller's to say by name."""
        common = joined(self.a.dtype, self.b.dtype)
        if common is None or any(x.dtype.kind == "b" and self.has_c for x in (self.c,)):
            return True
        asked = self.c.dtype if self.has_c else self.asked
        small = common.kind in "iu" and common.itemsize < 4
        if asked is None or asked.kind not in "iub":
            return False
        if self.api in ("ReLU", "RowReduce"):             # which see sums of 32 bits at least
            return common.kind == "b" or not np.can_cast(common, asked, "safe") or (small and asked.itemsize < 4)
        return not np.can_cast(common, asked, "safe")

    def check(self, found: np.ndarray) -> None:
        exact = self.exact()
        if found.dtype.kind == "b":
            assert np.array_equal(found, exact != 0)
        elif found.dtype.kind in "iu":                    # equal, or equal as it wraps
            assert np.array_equal(found, wrapped(exact, found.dtype))
        else:
            a, b, c = (np.abs(x.astype(np.float64)) for x in (self.a, self.b, self.c))
            with np.errstate(all="ignore"):
                size = a @ b + (c if self.has_c else 0)
                within = size * self.rounding(found.dtype)
                wanted = exact.astype(np.float64)
                is_finite = (size < float(largest(found.dtype)) / 2) & (size < self.held())
            got = found.astype(np.float64)
            assert np.isfinite(got[is_finite]).all()
            assert (np.abs(got - wanted) <= within)[is_finite].all(), (got, wanted)

    def held(self) -> float:
        """What the accumulators hold: float64 where it is asked for, float32 of the narrower floats."""
        if any(x == np.float64 for x in (self.a.dtype, self.b.dtype, self.asked, self.c.dtype if self.has_c else None)):
            return 1e308
        return 1e38 if any(x.dtype in FLOATS for x in (self.a, self.b)) else 1e308

    def rounding(self, dtype: np.dtype) -> float:
        """Integers into floats are rounded once, or summed in float64; floats as they are summed."""
        own = 2.0 ** -{"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype.name]
        is_wide = self.held() > 1e38 or not any(x.dtype in FLOATS for x in (self.a, self.b))
        return own + 4 * (2.0**-52 if is_wide and not (self.has_c and dtype.itemsize < 8) else 2.0**-22)


@pytest.mark.kin(1)
@pytest.mark.parametrize("b_dtype", ["?", "i1", "i2"])
def test_bools_are_compiled_as_bytes(b_dtype: str) -> None:
    """In a group, whose multistage kernel packs fragments into words."""
    a, b = np.ones((64, 64), "?"), np.ones((64, 64), b_dtype)
    (made,) = recorded(lambda: gk.grouped([a], [b], dtype="i4"), GPUS["sm_90a"], zeros=False)
    assert made.problem.config.kernel == "multistage" and made.launchable.entry().cubin


def wrapped(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Python's integers in a dtype that may not hold them."""
    return (exact % 2 ** (8 * dtype.itemsize)).astype(np.uint64).astype(dtype)


def largest(dtype: np.dtype) -> Any:
    return {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": 1.7e308}[dtype.name]


def computed(machine: Any, drawn: Drawn) -> np.ndarray:
    """The call, with outputs that hold something else before."""
    a, b, c, asked = machine.array(drawn.a), machine.array(drawn.b), machine.array(drawn.c), drawn.asked
    shape = drawn.c.shape

    def poisoned() -> Any:
        return machine.array(np.full(shape, 77).astype(asked))

    if asked is None:
        given: dict[str, Any] = {}
    else:
        given = dict(dtype=asked) if drawn.by_dtype else dict(out=poisoned())
    match drawn.api:
        case "gemmEx":
            gk.blas.gemmEx("N", "N", 1, a, b, 1, c)
            return c
        case "C":
            return gk.matmul(a, b, c)
        case "C and dtype":
            return gk.matmul(a, b, c, **given)
        case "plan":
            out = given.get("out")
            return gk.plan(a, b, **given)(a, b, out=out)
        case "grouped":
            if "out" in given:
                given = dict(out=[given["out"]])
            return gk.grouped([a], [b], **given)[0]
        case "einsum":
            return gk.einsum("ij,jk->ik", a, b, **given)
        case "stack":
            if "out" in given:
                given = dict(out=given["out"][None])
            return gk.matmul(a[None], b[None], **given)[0]
        case "ReLU":
            return gk.matmul(a, b, epilogue=epilogues.ReLU(), **given)
        case "RowReduce":
            common = joined(drawn.a.dtype, drawn.b.dtype)
            is_whole = common is not None and common.kind in "biu" and (asked is None or asked.kind in "biu")
            wide = np.dtype(np.int64 if is_whole and common != np.uint64 else np.float64)
            reduced = machine.array(np.full(shape[0], 77, wide))
            found = gk.matmul(a, b, epilogue=epilogues.RowReduce(reduced, "sum"), **given)
            if wide == np.int64 and machine.numpy(found).dtype == np.int64:
                assert np.array_equal(machine.numpy(reduced), wrapped(drawn.exact().sum(1), wide))
            return found
    return gk.matmul(a, b, **given)


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("seed", range(240))
@pytest.mark.sample(16)
def test_drawn_products_are_right_or_refused(machine: Any, seed: int) -> None:
    drawn = Drawn.of(seed)
    try:
        with machine.session():
            found = machine.numpy(computed(machine, drawn))
    except (TypeError, ValueError) as error:                               # ConfigError is one
        assert drawn.may_be_refused(), f"{drawn} is refused: {error}"
        return
    drawn.check(found)


def test_sums_of_a_long_k_have_room() -> None:
    """128 * 128 * K passes int32 at K = 2**17."""
    int8, int16, float32 = (np.dtype(name) for name in ("i1", "i2", "f4"))
    assert AccumulatorRule(int8, int8, float32, K=2**17 - 1).accumulator == np.int32
    assert AccumulatorRule(int8, int8, float32, K=2**17).accumulator == np.int64
    assert AccumulatorRule(int16, int16, float32, K=2).accumulator == np.int64
    assert AccumulatorRule(int8, int8, is_seen=True).accumulator == np.int32
    assert AccumulatorRule(int8, int8).accumulator == int8 and not AccumulatorRule(int8, int8).widens


def test_a_dtype_beside_another_is_refused() -> None:
    a = np.ones((2, 2), np.int8)
    with gk.emulate():
        with pytest.raises(ValueError, match="dtype=int32 and out has dtype int64"):
            gk.matmul(a, a, out=np.empty((2, 2), np.int64), dtype="int32")
        with pytest.raises(TypeError, match="no dtype of this name"):
            gk.matmul(a, a, dtype="integer")
        conf = gk.plan(a, a).config
        with pytest.raises(gk.ConfigError, match="with conf"):
            gk.matmul(a, a, conf=conf, dtype="int32")


# -- 8-bit operands on tensor cores, and precision= ------------------------------------------------------------------

def resolved(call: Any, arch: str) -> Any:
    """The configuration of a call's product on a GPU of an architecture."""
    (found,) = recorded(call, GPUS[arch], zeros=False)
    return found.problem.config


def matrix(rows: int, columns: int, dtype: Any, order: str) -> np.ndarray:
    return np.zeros((rows, columns), dtype) if order == "n" else np.zeros((columns, rows), dtype).T


@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
def test_bytes_take_tensor_cores_without_an_operator(orders: str) -> None:
    a, b = (matrix(256, 256, np.int8, order) for order in orders)
    c = np.zeros((256, 256), np.int32)
    for call in (lambda: gk.blas.gemmEx("N", "N", 1, a, b, 1, c), lambda: gk.matmul(a, b, dtype="float32"),
                 lambda: gk.matmul(a, b.astype(np.uint8), out=c), lambda: gk.einsum("ij,jk->ik", a, b, dtype="int32")):
        on_hopper = resolved(call, "sm_90a")
        assert isinstance(on_hopper.operator, WGMMAOp) and on_hopper.operator.accumulator == np.int32
        assert isinstance(resolved(call, "sm_80").operator, MMAOp)
    assert resolved(lambda: gk.matmul(a, b), "sm_90a").operator.fragment_c.dtype == np.int8          # as NumPy
    x, y = (matrix(256, 256, E4M3, order) for order in orders)
    on_hopper = resolved(lambda: gk.matmul(x, y), "sm_90a")
    assert isinstance(on_hopper.operator, WGMMAOp) and on_hopper.operator.promote == 128
    assert on_hopper.global_d_layout.dtype == np.float32
    assert resolved(lambda: gk.matmul(x, y, precision="fast"), "sm_90a").operator.promote == 0
    assert isinstance(resolved(lambda: gk.matmul(x, y), "sm_89").operator, MMAOp)
    assert isinstance(resolved(lambda: gk.matmul(x, y), "sm_80").operator, FPUOp)
    f, g = (matrix(256, 256, np.float32, order) for order in orders)
    assert isinstance(resolved(lambda: gk.matmul(f, g, precision="tf32"), "sm_90a").operator, WGMMAOp)
    assert isinstance(resolved(lambda: gk.matmul(f, g, precision="tf32"), "sm_80").operator, MMAOp)
    assert isinstance(resolved(lambda: gk.matmul(f, g), "sm_90a").operator, FPUOp)


def test_what_tensor_cores_do_not_read_falls_to_the_ordinary_units() -> None:
    mask = np.ones((16, 16), bool)
    a = gk.functions.BlockSparse(np.zeros((512, 512), np.int8), mask, (32, 32))
    config = resolved(lambda: gk.matmul(a, np.zeros((512, 16), np.int8), dtype="int32"), "sm_90a")
    assert isinstance(config.operator, FPUOp) and config.operator.accumulator == np.int32


def test_another_precision_is_refused() -> None:
    f, h = np.ones((2, 2), np.float32), np.ones((2, 2), np.float16)
    with gk.emulate():
        for a, given, said in ((h, "tf32", "float32 operands are needed"), (f, "fast", "float8 operands are needed"),
                               (f, "half", "'tf32' .* 'fast' .* 'ozaki'")):
            with pytest.raises(ValueError, match=said):
                gk.matmul(a, a, precision=given)
        with pytest.raises(gk.ConfigError, match="given with operator"):
            gk.matmul(f, f, precision="tf32", operator=FPUOp())
        with pytest.raises(gk.ConfigError, match="the result holds more"):
            gk.matmul(f, f, precision="tf32", dtype="float64")


@on_machines
@pytest.mark.parametrize("orders", ["nt", "nn", "tt"])
def test_bytes_are_exact(machine: Any, orders: str) -> None:
    """Sizes that divide nothing, and views, through gemmEx."""
    rng = np.random.default_rng(5)
    a, b = (np.asarray(rng.integers(-128, 128, shape), np.int8, order="C" if order == "n" else "F")
            for shape, order in zip(((33, 70), (70, 19)), orders))
    c = rng.integers(-1000, 1000, (33, 19)).astype(np.int32)
    exact = 3 * (a.astype(np.int64) @ b) - 2 * c
    with machine.session():
        found = machine.array(c)
        gk.blas.gemmEx("N", "N", 3, machine.array(a), machine.array(b), -2, found)
        halves = machine.array(np.full((33, 19), 77, np.float32))
        gk.blas.gemmEx("N", "N", 0.5, machine.array(a), machine.array(b), 0.0, halves)
    assert np.array_equal(machine.numpy(found), exact)
    assert np.array_equal(machine.numpy(halves), (a.astype(np.float64) @ b / 2).astype(np.float32))


@on_machines
def test_float8_is_promoted(machine: Any) -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((20, 300)).astype(E4M3), rng.standard_normal((24, 300)).astype(E4M3).T
    with machine.session():
        found = machine.numpy(gk.matmul(machine.array(a), machine.array(b)))
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert found.dtype == np.float32
    assert (np.abs(found - a @ b) <= 2.0**-12 * (np.abs(a) @ np.abs(b))).all()


# -- alpha = 0 -----------------------------------------------------------------------------------------------------------

@on_machines
@pytest.mark.parametrize("name", ["f2", "f4", "c8"])
def test_alpha_of_zero_reads_neither_a_nor_b(machine: Any, name: str) -> None:
    a, b = np.full((5, 7), np.nan, name), np.full((7, 3), np.nan, name)
    alphas: list[Any] = [0, 0.0, np.zeros((), "f4" if name == "f2" else name)]           # the last is in memory
    for alpha in alphas:
        for beta, c in ((2.0, np.ones((5, 3), name)), (0.0, np.full((5, 3), np.nan, name))):
            with machine.session():
                found = machine.array(c)
                given = machine.array(alpha) if isinstance(alpha, np.ndarray) else alpha
                gk.blas.gemmEx("N", "N", given, machine.array(a), machine.array(b), beta, found)
            assert np.array_equal(machine.numpy(found), np.full((5, 3), beta, name))
