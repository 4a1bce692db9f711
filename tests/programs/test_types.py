"""Operands of other types than 16-bit floats: float32 as tf32, 8-bit floats and integers, in tiles of rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import A100, H100, assumed
from tests.programs.test_derived import empty
from tests.support.sass import instructions

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
I8, U8, I32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
TYPES = [F32, E4M3, E5M2, I8, U8]
MULTISTAGE = "multistage"
Operand = Callable[..., Any]


def as_it_is(x: Any) -> Any:
    return x


def as_tf32(x: Any) -> Any:
    return x.astype("tf32")


def read(dtype: np.dtype) -> Operand:
    return as_tf32 if dtype == F32 else as_it_is


@gk.program
def rows_by_rows(a: Any, b: Any, d: Any, of: Any) -> None:
    """Both operands along K, as wgmma reads all types."""
    for m, n in gp.parallel(a.rows, b.rows):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += of(a[m, k]) @ of(b[n, k]).T
        d[m, n] = acc


@gk.program
def across(a: Any, b: Any, c: Any, d: Any, of: Any, alpha: float) -> None:
    """Both operands across K; sums begin with C."""
    for m, n in gp.parallel(a.columns, b.columns):
        acc = gp.copy(c[m, n])
        for k in gp.sequential(a.rows):
            acc += of(a[k, m]).T @ of(b[k, n])
        d[m, n] = alpha * acc


@gk.program
def with_sums(a: Any, b: Any, scale: Any, d: Any, y: Any, z: Any, of: Any) -> None:
    for h, m, n in gp.parallel(a.count, a.rows, b.rows):
        acc, left, right = gp.zeros(m, n), gp.zeros(m), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += of(a[h, m, k]) @ of(b[n, k]).T
            left += a[h, m, k].sum(axis=1)
            right += b[n, k].sum(axis=1)
        d[h, m, n] = acc * scale[n] + left
        with gp.once(n):
            y[h, m] = left
        with gp.once(m):
            z[h, n] = right



def drawn(rng: np.random.Generator, dtype: np.dtype, *shape: int, of: int = 16) -> np.ndarray:
    """Numbers, as a view of an array whose rows are multiples of ``of`` bytes."""
    wide = (*shape[:-1], -(-shape[-1] * dtype.itemsize // of) * of // dtype.itemsize)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        made = rng.integers(info.min + (dtype.kind == "i"), info.max + 1, wide).astype(dtype)
    else:
        made = rng.standard_normal(wide).astype(dtype)
    return made[..., :shape[-1]]


#: Of the sum of a product's terms without their signs, what is lost: tensor cores cut operands in float32 to 10 bits of
#: mantissa, and keep 14 bits of sums of 8-bit floats.
LOST = {F32: 2.0 ** -9, E4M3: 2.0 ** -12, E5M2: 2.0 ** -12, I8: 2.0 ** -23, U8: 2.0 ** -23}
EPS = {F16: 2.0 ** -11, BF16: 2.0 ** -8, F32: 2.0 ** -22, I32: 0.0}


def each(results: Any) -> tuple[np.ndarray, ...]:
    return results if isinstance(results, tuple) else (results,)


def close(got: np.ndarray, exact: np.ndarray, size: np.ndarray, lost: float) -> None:
    """``size``: the sum of terms without their signs, of which so much may be lost."""
    error = np.abs(got.astype(float) - exact)
    assert (error <= lost * size + 4 * EPS[got.dtype] * size.max(initial=1e-3)).all(), error.max()


def checked(program: gp.Program, lost: float, *arrays: np.ndarray, mapping: gk.Mapping | None = None, **more: Any) -> Any:
    wanted = each(program.reference(*arrays, **more))
    sizes = each(program.reference(*(np.abs(x) if isinstance(x, np.ndarray) else x for x in arrays), **more))
    plan = program.plan(*arrays, mapping=mapping, **more)
    given = program.bound(arrays, more)
    with gk.emulate():
        plan.run(given)
    for name, exact, size in zip(plan.printed.outs, wanted, sizes, strict=True):
        close(given[name], exact, size, lost)
    return plan


def drawn_case(seed: int) -> tuple[gp.Program, list[np.ndarray], gk.Mapping, dict[str, Any], float]:
    """A program with operands, NaN where results belong, a mapping, and what may be lost."""
    rng = np.random.default_rng((seed, 48))
    dtype = TYPES[seed % len(TYPES)]
    m, n, k = (int(x) for x in rng.integers(1, 400, 3))
    kind = rng.integers(3)
    of = {"of": read(dtype)}
    mapping = gk.Mapping({"n": int(rng.choice([64, 128])), "k": int(rng.choice([64, 128]))}, stages=2,
                         warpgroups=int(rng.integers(1, 3)), kernel=str(rng.choice(["", MULTISTAGE])))
    if kind == 0:
        arrays = [drawn(rng, dtype, m, k), drawn(rng, dtype, n, k), empty(m, n, dtype=F32)]
        return rows_by_rows, arrays, mapping, of, LOST[dtype]
    if kind == 1:
        arrays = [drawn(rng, dtype, k, m), drawn(rng, dtype, k, n), drawn(rng, F16, m, n), empty(m, n, dtype=F32)]
        return across, arrays, gk.Mapping(mapping.blocks, stages=2, kernel=MULTISTAGE), {**of, "alpha": 0.5}, LOST[dtype]
    arrays = [drawn(rng, dtype, 2, m, k), drawn(rng, dtype, n, k), drawn(rng, F32, n), empty(2, m, n, dtype=F32),
              empty(2, m, dtype=F32), empty(2, n, dtype=F32)]
    return with_sums, arrays, gk.Mapping({"n": 64}, kernel=mapping.kernel), of, LOST[dtype]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kernel", ["", MULTISTAGE])
@pytest.mark.parametrize("m, n, k", [(70, 136, 200), (1, 3, 5), (130, 67, 1)])
def test_rows_by_rows(rng: np.random.Generator, dtype: np.dtype, kernel: str, m: int, n: int, k: int) -> None:
    a, b = drawn(rng, dtype, m, k), drawn(rng, dtype, n, k)
    plan = checked(rows_by_rows, LOST[dtype], a, b, empty(m, n, dtype=F32), mapping=gk.Mapping(kernel=kernel), of=read(dtype))
    assert plan.is_multistage == bool(kernel)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_across(rng: np.random.Generator, dtype: np.dtype) -> None:
    """wgmma does not read these, so that threads copy them."""
    a, b = drawn(rng, dtype, 100, 72), drawn(rng, dtype, 100, 80)
    c = drawn(rng, F16, 72, 80)
    plan = checked(across, LOST[dtype], a, b, c, empty(72, 80, dtype=F32), of=read(dtype), alpha=0.5)
    assert plan.is_multistage
    with pytest.raises(ValueError, match="wgmma reads .* along K alone"):
        across.plan(a, b, c, empty(72, 80), of=read(dtype), alpha=0.5, mapping=gk.Mapping(kernel="warp_specialised"))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kernel", ["", MULTISTAGE])
def test_sums_of_rows_and_lines(rng: np.random.Generator, dtype: np.dtype, kernel: str) -> None:
    a, b, scale = drawn(rng, dtype, 2, 70, 96), drawn(rng, dtype, 72, 96), drawn(rng, F32, 72)
    checked(with_sums, LOST[dtype], a, b, scale, empty(2, 70, 72, dtype=F32), empty(2, 70, dtype=F32), empty(2, 72, dtype=F32),
            mapping=gk.Mapping({"n": 64}, kernel=kernel), of=read(dtype))


@pytest.mark.parametrize("dtype", [I8, U8], ids=str)
@pytest.mark.parametrize("kernel", ["", MULTISTAGE])
def test_integers_are_exact(rng: np.random.Generator, dtype: np.dtype, kernel: str) -> None:
    a, b = np.full((66, 160), np.iinfo(dtype).max, dtype), drawn(rng, dtype, 70, 160)
    d = np.full((66, 70), -7, np.int32)
    with gk.emulate():
        rows_by_rows(a, b, d, of=as_it_is, mapping=gk.Mapping(kernel=kernel))
    assert np.array_equal(d, a.astype(np.int64) @ b.T.astype(np.int64))


@pytest.mark.parametrize("one, other", [(E4M3, E5M2), (I8, U8)], ids=str)
@pytest.mark.parametrize("kernel", ["", MULTISTAGE])
def test_types_of_8_bits_meet(rng: np.random.Generator, one: np.dtype, other: np.dtype, kernel: str) -> None:
    checked(rows_by_rows, LOST[one], drawn(rng, one, 65, 64), drawn(rng, other, 72, 64), empty(65, 72, dtype=F32),
            mapping=gk.Mapping(kernel=kernel), of=as_it_is)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mapping", [gk.Mapping({"n": 128, "k": 128}, stages=2), gk.Mapping({"n": 64, "k": 64}, warpgroups=1),
                                     gk.Mapping({"n": 64}, stages=3, cluster={"m": 2}),
                                     gk.Mapping({"n": 64}, stages=2, cluster={"m": 2, "n": 2})])
def test_mappings(rng: np.random.Generator, dtype: np.dtype, mapping: gk.Mapping) -> None:
    checked(rows_by_rows, LOST[dtype], drawn(rng, dtype, 300, 272), drawn(rng, dtype, 200, 272), empty(300, 200, dtype=F32),
            mapping=mapping, of=read(dtype))


def test_misaligned_rows(rng: np.random.Generator) -> None:
    """Rows of 4 bytes' multiples are copied by threads, and those of others are refused."""
    a, b = drawn(rng, I8, 65, 92, of=4), drawn(rng, I8, 30, 92, of=4)
    assert checked(rows_by_rows, 0.0, a, b, empty(65, 30, dtype=F32), of=as_it_is).is_multistage
    with pytest.raises(ValueError, match="a is an operand of a product"):
        rows_by_rows.plan(drawn(rng, I8, 65, 91, of=1), b[:, :91], empty(65, 30), of=as_it_is)


A8, B8, D = np.zeros((64, 64), np.int8), np.zeros((64, 64), np.int8), np.zeros((64, 64), np.float16)


@gk.program
def mixed(a: Any, b: Any, x: Any, d: Any, start: float) -> None:
    for m, n in gp.parallel(a.rows, b.rows):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[n, k].T
            acc += x[m, k] @ x[n, k].T
        d[m, n] = acc


@gk.program
def begun(a: Any, b: Any, d: Any, start: Any) -> None:
    for m, n in gp.parallel(a.rows, b.rows):
        acc = gp.full(m, n, start())
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[n, k].T
        d[m, n] = acc


def half() -> float:
    return 0.5


def four() -> float:
    return 4.0


@pytest.mark.parametrize("arrays, of, words", [
    ((A8.astype(F32), A8.astype(F32), D), as_it_is, 'multiply float32 as tf32.*astype\\("tf32"\\)'),
    ((A8, B8, D), as_tf32, "only float32 is rounded"),
    ((A8.astype(np.float64), A8.astype(np.float64), D), as_it_is, "float64; products in programs need float16, bfloat16, float32"),
    ((A8, A8.astype(F16), D), as_it_is, "both must have one dtype"), ((A8, A8.astype(E4M3), D), as_it_is, "both must have one"),
    ((A8.astype(F16), A8.astype(F16), D.astype(I32)), as_it_is, "a cell of products of integers as it is")],
    ids=range(6))
def test_types_that_have_no_kernel(arrays: tuple, of: Operand, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        rows_by_rows.plan(*arrays, of=of)


def test_other_mistakes() -> None:
    with pytest.raises(TypeError, match="products of integers and of others are added to acc"):
        mixed.plan(A8, B8, D, D.copy(), 1.0)
    with pytest.raises(ValueError, match="begins with 0.5; begin with 0"):
        begun.plan(A8, B8, D, half)
    checked(begun, 0.0, A8 + np.int8(1), B8 + np.int8(2), D.astype(F32), four)
    with pytest.raises(ValueError, match="a kernel rounds operands of products"):
        gk.program(rounded_end).plan(D, D.copy(), D.copy())
    with assumed(A100), pytest.raises(TypeError, match="need compute capability 8.9 or above, but .* has 8.0"):
        rows_by_rows.plan(A8.astype(E4M3), B8.astype(E4M3), D, as_it_is)


def rounded_end(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.rows):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[n, k].T
        d[m, n] = acc.astype("tf32")


@pytest.mark.compile
@pytest.mark.sample(3)
@pytest.mark.kin(4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kernel", ["", MULTISTAGE])
def test_machine_code(dtype: np.dtype, kernel: str) -> None:
    """Nothing spills; a stage has 128 bytes of each row of an operand, which four wgmma take. Two sets of sums of 8-bit floats
    leave room for 128 columns."""
    size = 512 if kernel else 4096
    a, b, d = np.zeros((size, size), dtype), np.zeros((size, size), dtype), np.zeros((size, size), F16)
    (plan,) = recorded(lambda: rows_by_rows(a, b, d, of=read(dtype), mapping=gk.Mapping(kernel=kernel)), H100, zeros=False)
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    lines = instructions(disassemble(entry.cubin))
    wgmma = [line for line in lines if line.startswith(("HGMMA", "QGMMA", "IGMMA"))]
    assert len(wgmma) == (0 if kernel else 8) and not any(line.startswith(("LDL", "STL")) for line in lines)
    promotes = dtype in (E4M3, E5M2) and not kernel
    assert ("acc = added(acc, part_acc)" in plan.text) == promotes
    assert kernel or plan.mapping.blocks == {"m": 128, "n": 128 if promotes else 256, "k": 128 // dtype.itemsize}
