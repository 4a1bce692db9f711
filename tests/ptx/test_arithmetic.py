"""Arithmetic, conversions, halves, shuffles, votes, approximate functions and anchors: emulated against NumPy, and the
instructions that they become."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.emulator.errors import EmulatorError
from gemmkit.epilogues import fast
from gemmkit.kernels.collectives.pipeline import BARRIERS
from gemmkit.lang.aggregates import convert
from gemmkit.lang.numba_hooks import Atom
from gemmkit.lang.registers import reduce, split, together
from gemmkit.ptx.arithmetic import exp2, fma, hadd, hadd2, hfma, hfma2, hmul, hmul2, outer_fma
from gemmkit.ptx.barriers import mbarrier_init
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.mma import pack_fragment, pack_relu
from gemmkit.ptx.special import (
    SHUFFLE,
    any_lane,
    barrier,
    block_x,
    block_y,
    block_z,
    lane_index,
    thread_index,
    udiv,
    uniform,
    warp_barrier,
)
from gemmkit.ptx.wgmma import NEVER, anchor
from gemmkit.runtime.compile import assemble, disassemble
from tests.support.harness import (
    Out,
    Runtime,
    compiled,
    emulated,
    instructions,
    leaves_nothing,
    lines_with,
    on_device,
    same_bits,
)
from tests.support.machines import BF16 as BF16_OF_APPROXIMATE

# ==========================================================================================================================
# Fused multiply-add, conversions to 16 bits, thread numbers and barriers.

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype("f2"), BF16, np.dtype("f4"), np.dtype("f8")]
INTEGERS = [np.dtype(t) for t in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
N = 32


def numbers(rng: np.random.Generator, dtype: np.dtype, count: int) -> np.ndarray:
    if dtype in INTEGERS:
        return rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(count)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-2, 3, count)).astype(dtype)


# -- fma ---------------------------------------------------------------------------------------------------------------

def fma_kernel(out: Any, a: Any, b: Any, c: Any) -> None:
    i = thread_index()
    out[i] = fma(a[i], b[i], c[i])


def assert_fused(result: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, emulated: bool) -> None:
    """``a * b + c`` rounded once, by exact arithmetic. (The emulation rounds a float64 product before the sum.)"""
    for got, x, y, z in zip(result, a, b, c):
        product = Fraction(float(x)) * Fraction(float(y))
        exact = product + Fraction(float(z))
        unit = abs(exact) / 2**BITS[result.dtype] * Fraction(1.01) + Fraction(TINY[result.dtype])
        if emulated and result.dtype == np.float64:
            unit += abs(product) / 2**53
        assert abs(Fraction(float(got)) - exact) <= unit, (x, y, z, got)


#: Half a unit in the last place, relative, and half the smallest number: what one rounding may cost.
BITS = {np.dtype("f2"): 11, BF16: 8, np.dtype("f4"): 24, np.dtype("f8"): 53}
TINY = {np.dtype("f2"): 2.0**-25, BF16: 2.0**-134, np.dtype("f4"): 2.0**-150, np.dtype("f8"): 0.0}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fma_of_floats_rounds_once(dtype: np.dtype, rng: np.random.Generator) -> None:
    for _ in range(4):
        a, b, c = (numbers(rng, dtype, N) for _ in range(3))
        (result,) = emulated(fma_kernel, Out((N,), dtype), a, b, c)
        assert_fused(result, a, b, c, emulated=True)


def test_fma_keeps_the_low_half_of_a_product() -> None:
    """1 + 2**-12 squared, less 1 + 2**-11: zero when the product is rounded to float32 on the way."""
    x = np.float32(1 + 2.0**-12)
    assert fma(x, x, np.float32(-(1 + 2.0**-11))) == np.float32(2.0**-24)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_fma_of_integers_wraps(dtype: np.dtype, rng: np.random.Generator) -> None:
    a, b, c = (numbers(rng, dtype, N) for _ in range(3))
    (result,) = emulated(fma_kernel, Out((N,), dtype), a, b, c)
    modulus = 2 ** (8 * dtype.itemsize)
    expected = [(int(x) * int(y) + int(z)) % modulus for x, y, z in zip(a, b, c)]
    assert [int(x) % modulus for x in result] == expected and result.dtype == dtype


@pytest.mark.parametrize("dtype, text", [("f4", "fma.rn.f32"), ("f8", "fma.rn.f64"), ("i4", "mad.lo.s32")])
def test_fma_is_one_instruction(dtype: str, text: str) -> None:
    a = np.zeros(N, dtype)
    ptx = compiled(fma_kernel, Out((N,), dtype), a, a, a)
    found = instructions(ptx)
    assert found[text] == 1 and leaves_nothing(ptx)
    assert not [k for k in found if k.startswith(("mul.rn", "mul.f", "add.f", "cvt"))]


@pytest.mark.parametrize("dtype", ["f2", BF16], ids=str)
def test_fma_of_16_bits_is_one_of_32(dtype: Any) -> None:
    ptx = compiled(fma_kernel, Out((N,), dtype), *[np.zeros(N, dtype)] * 3)
    assert instructions(ptx)["fma.rn.f32"] == 1 and leaves_nothing(ptx)
    assert len(lines_with(ptx, "cvt.rn.f16.f32" if dtype == "f2" else "cvt.rn.bf16.f32")) == 1


@dataclass(frozen=True)
class Outer(gk.Component):
    rows: int = 4
    columns: int = 3
    depth: int = 2


def outer_kernel(out: Any, a: Any, b: Any, c: Any, how: Any) -> None:
    i = thread_index()
    m, n, k = how.rows, how.columns, how.depth
    values = outer_fma(load_global(c, 0, (i * m * n,), (0,), m * n), load_global(a, 0, (i * m * k,), (0,), m * k),
                       load_global(b, 0, (i * n * k,), (0,), n * k), k)
    store_global(out, 0, (i * m * n,), (0,), values)


def outer_arguments(dtype: np.dtype, rng: np.random.Generator) -> tuple:
    how = Outer()
    sizes = (how.rows * how.depth, how.columns * how.depth, how.rows * how.columns)
    a, b, c = (numbers(rng, dtype, N * size) for size in sizes)
    return Out((N * sizes[2],), dtype), a, b, c, how


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype("i4"), np.dtype("u1")], ids=str)
def test_an_outer_product_is_its_fmas(dtype: np.dtype, rng: np.random.Generator) -> None:
    out, a, b, c, how = outer_arguments(dtype, rng)
    (result,) = emulated(outer_kernel, out, a, b, c, how)
    a, b = a.reshape(N, how.depth, how.rows), b.reshape(N, how.depth, how.columns)
    expected = c.reshape(N, how.columns, how.rows).copy()
    for t, j, i in np.ndindex(expected.shape):
        for k in range(how.depth):
            expected[t, j, i] = fma(a[t, k, i], b[t, k, j], expected[t, j, i])
    assert same_bits(result, expected.reshape(-1))


def test_an_outer_product_is_fmas_alone(rng: np.random.Generator) -> None:
    ptx = compiled(outer_kernel, *outer_arguments(np.dtype("f4"), rng))
    assert instructions(ptx)["fma.rn.f32"] == 4 * 3 * 2 and leaves_nothing(ptx)


@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_fma_on_the_gpu(dtype: np.dtype, rng: np.random.Generator) -> None:
    for _ in range(20):
        a, b, c = (numbers(rng, dtype, N) for _ in range(3))
        (there,), (here,) = (run(fma_kernel, Out((N,), dtype), a, b, c) for run in (on_device, emulated))
        if dtype == np.float64:
            assert_fused(there, a, b, c, emulated=False)
        else:
            assert same_bits(there, here)
    arguments = outer_arguments(dtype, rng)
    (there,), (here,) = (run(outer_kernel, *arguments) for run in (on_device, emulated))
    if dtype == np.float64:
        np.testing.assert_allclose(there, here, rtol=1e-13, atol=1e-11)
    else:
        assert same_bits(there, here)


# -- conversions to 16 bits ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class To(gk.Component):
    dtype: Any


def convert_kernel(out: Any, a: Any, to: Any) -> None:
    i = block_x() * 32 + thread_index()
    out[i] = convert(to.dtype, a[i])


def awkward(dtype: np.dtype) -> np.ndarray:
    """Numbers half way between two of 16 bits, just beside half way, subnormal, huge, infinite and NaN."""
    narrow = np.arange(0, 2**15, 61, dtype=np.uint16)
    values = [np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.99, 65520.0, 1e30, -1e-30, 3.4e38, 1e-45])]
    for kind in (np.dtype("f2"), BF16):
        with np.errstate(invalid="ignore"):
            low, high = (bits.view(kind).astype(np.float64) for bits in (narrow, narrow + np.uint16(1)))
        finite = np.isfinite(low) & np.isfinite(high)
        half = (low[finite] + high[finite]) / 2
        values += [half, np.nextafter(half, np.inf), -np.nextafter(half, -np.inf)]
    flat = np.concatenate(values)
    with np.errstate(over="ignore"):
        flat = flat.astype(dtype)
    return np.resize(flat, -(-len(flat) // N) * N)


@pytest.mark.parametrize("source", ["f4", "f8"])
@pytest.mark.parametrize("kind, instruction", [(np.dtype("f2"), "cvt.rn.f16"), (BF16, "cvt.rn.bf16.f32")], ids=str)
def test_conversions_to_16_bits_are_instructions(kind: np.dtype, instruction: str, source: str) -> None:
    ptx = compiled(convert_kernel, Out((N,), kind), np.zeros(N, source), To(kind))
    assert len(lines_with(ptx, instruction)) == 1 and leaves_nothing(ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["f4", "f8"])
@pytest.mark.parametrize("kind", [np.dtype("f2"), BF16], ids=str)
def test_conversions_to_16_bits_are_numpys_on_the_gpu(kind: np.dtype, source: str) -> None:
    values = awkward(np.dtype(source))
    (there,) = on_device(convert_kernel, Out(values.shape, kind), values, To(kind), blocks=len(values) // N)
    with np.errstate(over="ignore"):
        assert same_bits(there, values.astype(kind))


# -- where a thread is ---------------------------------------------------------------------------------------------------

def numbers_kernel(out: Any, threads: int) -> None:
    i = thread_index()
    at = 8 * (block_x() * threads + i)
    out[at], out[at + 1], out[at + 2] = i, lane_index(), block_x()
    out[at + 3], out[at + 4] = block_y(), block_z()
    out[at + 5], out[at + 6], out[at + 7] = udiv(i, 32), udiv(i + 7, 5), uniform(i * 3 + 1)


def expected_numbers() -> np.ndarray:
    rows = [(i, i % 32, b, 0, 0, i // 32, (i + 7) // 5, i // 32 * 32 * 3 + 1) for b in range(3) for i in range(64)]
    return np.array(rows, np.int32).reshape(-1)


def test_a_thread_knows_its_numbers() -> None:
    (result,) = emulated(numbers_kernel, Out((3 * 64 * 8,), "i4"), 64, threads=64, blocks=3)
    assert np.array_equal(result, expected_numbers())


def test_numbers_are_special_registers() -> None:
    ptx = compiled(numbers_kernel, Out((3 * 64 * 8,), "i4"), 64, threads=64)
    for register in ("%tid.x", "%laneid", "%ctaid.x", "%ctaid.y", "%ctaid.z"):
        assert len(lines_with(ptx, register)) == 1, register
    assert len(lines_with(ptx, "shfl.sync.idx.b32")) == 1
    assert not lines_with(ptx, "div.s") and not lines_with(ptx, "div.u64") and leaves_nothing(ptx)


@pytest.mark.gpu
def test_a_thread_knows_its_numbers_on_the_gpu() -> None:
    (result,) = on_device(numbers_kernel, Out((3 * 64 * 8,), "i4"), 64, threads=64, blocks=3)
    assert np.array_equal(result, expected_numbers())


# -- where threads meet ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Meet(gk.Component):
    threads: int
    together: bool
    dtype: Any = np.dtype("f4")


def reverse(out: Any, a: Any, how: Any) -> None:
    """Across warps: every thread reads what its mirror image wrote."""
    i = thread_index()
    pointer = shared(how.dtype, 0)
    store_shared(pointer, i, 0, load_global(a, 0, (i,), (0,), 1))
    if how.together:
        barrier()
    store_global(out, 0, (i,), (0,), load_shared(pointer, how.threads - 1 - i, 0, 1))


def test_a_barrier_makes_stores_visible(rng: np.random.Generator) -> None:
    a = rng.standard_normal(128).astype("f4")
    (result,) = emulated(reverse, Out((128,), "f4"), a, Meet(128, True), threads=128, shared=512)
    assert np.array_equal(result, a[::-1])
    assert lines_with(compiled(reverse, Out((128,), "f4"), a, Meet(128, True), threads=128), "bar.") == ["bar.sync 0;"]


def test_without_a_barrier_the_emulator_objects(rng: np.random.Generator) -> None:
    with pytest.raises(EmulatorError):
        emulated(reverse, Out((128,), "f4"), np.zeros(128, "f4"), Meet(128, False), threads=128, shared=512)


@pytest.mark.gpu
def test_a_barrier_makes_stores_visible_on_the_gpu(rng: np.random.Generator) -> None:
    a = rng.standard_normal(128).astype("f4")
    (result,) = on_device(reverse, Out((128,), "f4"), a, Meet(128, True), threads=128, shared=512)
    assert np.array_equal(result, a[::-1])


# -- atoms are told apart by their names -----------------------------------------------------------------------------------

@pytest.mark.kin(1)
def test_no_two_atoms_share_a_name() -> None:
    """An atom that a component holds is known by its name: two of one name would be one compile-time value."""
    import gc

    import gemmkit.operators  # noqa: F401

    atoms = [x for x in gc.get_objects() if isinstance(x, Atom) and not x.emulate.__module__.startswith("tests")]
    names = [atom.__name__ for atom in atoms]
    assert len(names) > 80 and len(set(names)) == len(names)


def test_runtime_numbers_reach_the_kernel() -> None:
    """The harness itself: NumPy scalars keep their type, Python numbers are weak."""
    def kernel(out: Any, strong: Any, weak: Any, count: Any) -> None:
        out[thread_index()] = out.shape[0] + strong * weak + count

    (result,) = emulated(kernel, Out((N,), "f8"), np.float32(0.1), Runtime(0.1), Runtime(3))
    assert result[0] == N + np.float32(0.1) * 0.1 + 3 and type(np.float32(0.1) * 0.1) is np.float32
    ptx = compiled(kernel, Out((N,), "f8"), np.float32(0.1), Runtime(0.1), Runtime(3))
    assert instructions(ptx)["ld.param.f64"] == instructions(ptx)["ld.param.f32"] == 1


# -- where the lanes of a warp meet ------------------------------------------------------------------------------------

I4 = np.dtype("i4")


def neighbours_kernel(out: Any, meets: bool) -> None:
    """Every lane writes its number to shared memory, and reads what the next one wrote."""
    i, pointer = thread_index(), shared(I4, 0)
    store_shared(pointer, i, 0, (i,))
    if meets:
        warp_barrier()
    out[i] = load_shared(pointer, i - i % 32 + (i + 1) % 32, 0, 1)[0]


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_a_warp_meets(run: Any) -> None:
    (result,) = run(neighbours_kernel, Out((64,), "i4"), True, threads=64, shared=256)
    i = np.arange(64)
    assert np.array_equal(result, i // 32 * 32 + (i + 1) % 32)


def test_a_warp_that_does_not_meet_races() -> None:
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        emulated(neighbours_kernel, Out((64,), "i4"), False, threads=64, shared=256)


def test_a_warp_meets_in_one_instruction() -> None:
    ptx = compiled(neighbours_kernel, Out((64,), "i4"), True, threads=64)
    assert len(lines_with(ptx, "bar.warp.sync")) == 1 and leaves_nothing(ptx)


# ==========================================================================================================================
# Arithmetic of halves, shuffles: emulated against NumPy, and the instructions that they become.

bfly, idx, up, down = (SHUFFLE[mode] for mode in ("bfly", "idx", "up", "down"))


def arithmetic(out: Any, a: Any, b: Any, c: Any) -> None:
    t = thread_index()
    x, y, z = a[t, 0], b[t, 0], c[t, 0]
    pairs = (x, a[t, 1]), (y, b[t, 1]), (z, c[t, 1])
    out[t, 0], out[t, 1], out[t, 2] = hadd(x, y), hmul(x, y), hfma(x, y, z)
    out[t, 3], out[t, 4] = hadd2(pairs[0], pairs[1])[1], hmul2(pairs[0], pairs[1])[1]
    out[t, 5] = hfma2(pairs[0], pairs[1], pairs[2])[1]


@pytest.mark.compile
def test_halves(rng: np.random.Generator) -> None:
    a, b, c = ((rng.standard_normal((32, 2)) * 100).astype("f2") for _ in range(3))
    (out,) = emulated(arithmetic, Out((32, 6), "f2"), a, b, c)
    x, y, z = (v.astype(float) for v in (a, b, c))
    wanted = [x[:, 0] + y[:, 0], x[:, 0] * y[:, 0], x[:, 0] * y[:, 0] + z[:, 0], x[:, 1] + y[:, 1], x[:, 1] * y[:, 1], x[:, 1] * y[:, 1] + z[:, 1]]
    np.testing.assert_array_equal(out.T, np.array(wanted).astype("f2"))
    ptx = compiled(arithmetic, Out((32, 6), "f2"), a, b, c)
    for operation in ("add", "mul", "fma"):
        assert len(re.findall(rf"{operation}\.rn\.f16 ", ptx)) == len(re.findall(rf"{operation}\.rn\.f16x2", ptx)) == 1
    assemble(ptx)


@pytest.mark.compile
def test_pairs_have_two() -> None:
    with pytest.raises(TypeError, match="hadd2 is of pairs"):
        hadd2((np.float16(1),), (np.float16(1),))


def exchanged(out: Any, a: Any) -> None:
    t = thread_index()
    x = a[t]
    out[t, 0], out[t, 1], out[t, 2], out[t, 3] = bfly(x, 5), idx(x, 7), up(x, 3), down(x, 30)
    out[t, 4] = idx(x, 31 - t)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
def test_shuffles(dtype: str) -> None:
    a = np.arange(100, 132).astype(dtype)
    (out,) = emulated(exchanged, Out((32, 5), dtype), a)
    lanes = np.arange(32)
    wanted = [a[lanes ^ 5], a[[7] * 32], a[np.where(lanes >= 3, lanes - 3, lanes)], a[np.where(lanes < 2, lanes + 30, lanes)], a[31 - lanes]]
    np.testing.assert_array_equal(out.T, wanted)
    ptx = compiled(exchanged, Out((32, 5), dtype), a)
    assert {mode: len(re.findall(rf"shfl\.sync\.{mode}\.b32", ptx)) for mode in SHUFFLE} == {"bfly": 1, "idx": 2, "up": 1, "down": 1}
    assert re.search(r"shfl\.sync\.up\.b32 .*, 0x0, 0xffffffff", ptx)
    assemble(ptx)


def of_a_group(out: Any, a: Any) -> None:
    t = thread_index()
    out[t] = a[t]
    if t // 8 == 1:                    # the other lanes of the warp do not come
        out[t] = bfly(a[t], 3, 8)
        warp_barrier(8)


@pytest.mark.compile
def test_shuffles_of_a_group() -> None:
    a = np.arange(100, 132).astype("f4")
    (out,) = emulated(of_a_group, Out((32,), "f4"), a)
    lanes = np.arange(32)
    np.testing.assert_array_equal(out, a[np.where(lanes // 8 == 1, lanes ^ 3, lanes)])
    ptx = compiled(of_a_group, Out((32,), "f4"), a)
    assert re.search(r"shfl\.sync\.bfly\.b32 .*, 0x1f, %r\d+", ptx) and re.search(r"bar\.warp\.sync %r\d+", ptx)
    assemble(ptx)


# ==========================================================================================================================
# Votes of a warp: emulated against NumPy, and the instruction that they become.


def voted(out: Any, a: Any) -> None:
    t = thread_index()
    out[t, 0], out[t, 1] = 0, 0
    if any_lane(a[t] > 3.0):
        out[t, 0] = 1
    if any_lane((a[t] != a[t]) | (a[t] < 0.0)):
        out[t, 1] = 1


@pytest.mark.compile
@pytest.mark.parametrize("value", [0.0, 3.5, -1.0, np.nan])
@pytest.mark.parametrize("lane", [0, 17, 31])
def test_votes(value: float, lane: int) -> None:
    a = np.zeros(32, "f4")
    a[lane] = value
    (out,) = emulated(voted, Out((32, 2), "i4"), a)
    np.testing.assert_array_equal(out, [[value > 3, value != value or value < 0]] * 32)


@pytest.mark.compile
def test_code() -> None:
    ptx = compiled(voted, Out((32, 2), "i4"), np.zeros(32, "f4"))
    assert len(re.findall(r"vote\.sync\.any\.pred", ptx)) == 2
    assert len(re.findall(r"VOTE\.ANY", disassemble(assemble(ptx).cubin))) == 2


# ==========================================================================================================================
# Functions of one instruction, packed fragments, reductions: emulated against NumPy, what they become, and on a GPU within what PTX says.

F16 = np.dtype("f2")
TEXTS = {"exp2": "ex2.approx.ftz.f32", "log2": "lg2.approx.ftz.f32", "reciprocal": "rcp.approx.ftz.f32", "tanh": "tanh.approx.f32",
         "maximum": "max.f32"}
ERRORS = 2**-22, 2**-21, 2**-22, 2**-10.9, 0.0


def functions(out: Any, a: Any) -> None:
    t = thread_index()
    x = a[t]
    out[t, 0], out[t, 1], out[t, 2], out[t, 3] = fast.exp2(x), fast.log2(abs(x)), fast.reciprocal(x), fast.tanh(x)
    out[t, 4] = fast.maximum(x, a[31 - t])


def expected(a: np.ndarray) -> np.ndarray:
    x = a.astype(np.float64)
    with np.errstate(all="ignore"):
        return np.stack([np.exp2(x), np.log2(abs(x)), 1 / x, np.tanh(x), np.fmax(x, x[::-1])], axis=1)


def given(rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([rng.standard_normal(26) * 5, [0, np.inf, -np.inf, np.nan, 1, -1]]).astype("f4")


def close(found: np.ndarray, a: np.ndarray) -> None:
    wanted = expected(a)
    for n, bound in enumerate(ERRORS):
        same = (found[:, n] == wanted[:, n]) | (np.isnan(found[:, n]) & np.isnan(wanted[:, n]))
        with np.errstate(all="ignore"):
            error = abs(found[:, n] - wanted[:, n]) / np.maximum(abs(wanted[:, n]), 2**-3 if n == 1 else 0)
        assert np.all(same | (error <= bound + 2**-23)), list(TEXTS)[n]


@pytest.mark.compile
def test_functions(rng: np.random.Generator) -> None:
    a = given(rng)
    close(emulated(functions, Out((32, 5), "f4"), a)[0], a)
    ptx = compiled(functions, Out((32, 5), "f4"), a)
    found = instructions(ptx)
    assert {text: found[text] for text in TEXTS.values()} == dict.fromkeys(TEXTS.values(), 1)
    assemble(ptx)


@pytest.mark.compile
@pytest.mark.gpu
def test_functions_on_a_gpu(rng: np.random.Generator) -> None:
    a = given(rng)
    close(on_device(functions, Out((32, 5), "f4"), a)[0], a)


def of_any_number(out: Any, a: Any) -> None:
    t = thread_index()
    out[t, 0], out[t, 1], out[t, 2] = fast.exp2(3), fast.exp2(t), fast.maximum(a[t], 0.5)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["f2", "f8", "i4"])
def test_numbers_are_converted(dtype: str) -> None:
    a = np.arange(-16, 16).astype(dtype)
    (out,) = emulated(of_any_number, Out((32, 3), "f4"), a)
    np.testing.assert_array_equal(out.T, [[8] * 32, 2.0 ** np.arange(32), np.maximum(a, 0.5)])
    assemble(compiled(of_any_number, Out((32, 3), "f4"), a))


def f16_words(out: Any, a: Any) -> None:
    t = thread_index()
    words = pack_fragment(F16, (a[t, 0], a[t, 1], a[t, 2], a[t, 3]))
    out[t, 0], out[t, 1] = words[0], words[1]


def bf16_words(out: Any, a: Any) -> None:
    t = thread_index()
    words = pack_fragment(BF16_OF_APPROXIMATE, (a[t, 0], a[t, 1], a[t, 2], a[t, 3]))
    out[t, 0], out[t, 1] = words[0], words[1]


def relu_words(out: Any, a: Any) -> None:
    t = thread_index()
    words = pack_relu(F16, (a[t, 0], a[t, 1], a[t, 2], a[t, 3]))
    out[t, 0], out[t, 1] = words[0], words[1]


def relu_words_expected(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """With what is no number, and infinities."""
    a = (rng.standard_normal((32, 4)) * 100).astype("f4")
    a[0], a[1, :2] = (np.nan, np.inf, -np.inf, 1e6), (-1e6, 0)
    with np.errstate(all="ignore"):
        return a, np.where(a < 0, 0, a).astype("f2")


@pytest.mark.compile
def test_packed_relu(rng: np.random.Generator) -> None:
    a, wanted = relu_words_expected(rng)
    (out,) = emulated(relu_words, Out((32, 2), "u4"), a, threads=32)
    assert np.array_equal(out.view("f2"), wanted, equal_nan=True)
    ptx = compiled(relu_words, Out((32, 2), "u4"), a)
    assert instructions(ptx)["cvt.rn.relu.f16x2.f32"] == 2
    assemble(ptx)


@pytest.mark.compile
@pytest.mark.gpu
def test_packed_relu_on_a_gpu(rng: np.random.Generator) -> None:
    a, wanted = relu_words_expected(rng)
    assert np.array_equal(on_device(relu_words, Out((32, 2), "u4"), a)[0].view("f2"), wanted, equal_nan=True)


@pytest.mark.compile
@pytest.mark.parametrize("kernel,dtype,text", [(f16_words, F16, "cvt.rn.f16x2.f32"), (bf16_words, BF16_OF_APPROXIMATE, "cvt.rn.bf16x2.f32")])
def test_packed_fragments(kernel: Any, dtype: Any, text: str, rng: np.random.Generator) -> None:
    a = (rng.standard_normal((32, 4)) * 100).astype("f4")
    (out,) = emulated(kernel, Out((32, 2), "u4"), a, threads=32)
    assert same_bits(out, a.astype(dtype).view("u4"))
    ptx = compiled(kernel, Out((32, 2), "u4"), a)
    assert instructions(ptx)[text] == 2
    assemble(ptx)


@pytest.mark.compile
@pytest.mark.gpu
@pytest.mark.parametrize("kernel,dtype", [(f16_words, F16), (bf16_words, BF16_OF_APPROXIMATE)])
def test_packed_fragments_on_a_gpu(kernel: Any, dtype: Any, rng: np.random.Generator) -> None:
    a = (rng.standard_normal((32, 4)) * 100).astype("f4")
    assert same_bits(on_device(kernel, Out((32, 2), "u4"), a)[0], a.astype(dtype).view("u4"))


def scaled_sum(total: Any, x: Any, by: Any) -> Any:
    return total + x * by


def larger(a: tuple, b: tuple) -> tuple:
    return together(fast.maximum, a, b)


def reductions(out: Any, a: Any) -> None:
    t = thread_index()
    values = a[t, 0], a[t, 1], a[t, 2], a[t, 3]
    out[t, 0] = reduce(scaled_sum, values[0], values[1:], a[t, 1])
    groups = split(values, 2)
    out[t, 1], out[t, 2] = reduce(larger, groups[0], groups[1:])


@pytest.mark.compile
def test_reductions(rng: np.random.Generator) -> None:
    a = rng.integers(-9, 9, (32, 4)).astype("f4")
    (out,) = emulated(reductions, Out((32, 3), "f4"), a)
    np.testing.assert_array_equal(out.T, [a[:, 0] + a[:, 1:].sum(1) * a[:, 1], a[:, ::2].max(1), a[:, 1::2].max(1)])
    ptx = compiled(reductions, Out((32, 3), "f4"), a)
    assert instructions(ptx)["max.f32"] == 2
    assemble(ptx)


# ==========================================================================================================================
# Anchors: nothing in the emulator, and two instructions that stay behind what a value is made of.


def anchored(out: Any, a: Any) -> None:
    t = thread_index()
    if t == 0:
        mbarrier_init(shared(BARRIERS, 0), 0, 1)
    barrier()
    x = exp2(a[t])
    anchor(shared(BARRIERS, 0), x)
    out[t] = x


@pytest.mark.compile
def test_nothing_happens() -> None:
    a = np.linspace(-3, 3, 32).astype("f4")
    a[7] = np.nan
    (out,) = emulated(anchored, Out(32, "f4"), a, shared=8)
    np.testing.assert_allclose(out, np.exp2(a), rtol=1e-6)


@pytest.mark.compile
def test_code_of_an_anchor() -> None:
    """The arrival is one of a NaN that arithmetic never gives: of a result that is none there is another pattern."""
    ptx = compiled(anchored, Out(32, "f4"), np.zeros(32, "f4"))
    assert len(re.findall(rf"setp\.eq\.b32 never, bits, {NEVER:#x}", ptx)) == 1
    lines = [line for line in disassemble(assemble(ptx).cubin).splitlines() if re.search(r"MUFU\.EX2|SYNCS\.ARRIVE", line)]
    assert len(lines) == 2 and "MUFU" in lines[0] and "@" in lines[1]
    assert np.isnan(np.uint32(NEVER).view(np.float32))
