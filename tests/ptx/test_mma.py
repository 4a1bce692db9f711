"""Tensor-core atoms: mma.sync, ldmatrix, stmatrix and wmma, in the emulator against NumPy, in PTX, and against the hardware."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import AlignmentError, UninitialisedRead
from gemmkit.lang.registers import each, generate
from gemmkit.operators import MMAOp
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.mma import ROWS_8X8, fragment_coordinate, ldmatrix, rounded_to_tf32, stmatrix
from gemmkit.ptx.special import barrier, lane_index
from gemmkit.ptx.wmma import LOAD, MMA, SPECS, STORE
from tests.support.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, on_device, same_bits

# ==========================================================================================================================
# Tensor-core atoms: mma.sync, ldmatrix and wmma, in the emulator against NumPy, in PTX, and against the hardware.
#
# Two kinds of data. Small integers: every product and every sum is exact in every type here, so all must agree to the
# bit whatever the order of summation; this is what tells a wrong fragment map. Normal numbers: the products of 16-bit
# floats are exact in float32, but tensor cores add the 16 products and C in an order of their own, align the terms to the
# largest one and cut the rest off below 24 bits or so. Each term then loses less than one unit in the last place of the
# largest partial sum: 17 terms stay within ``17 * 2**-23`` of the sum of magnitudes. A float16 accumulator is rounded to
# 11 bits besides: once at the end, and once more on the way where the hardware takes K in two halves. Of 8-bit floats hardware
# may keep 13 bits of a sum (Ada, and Hopper's wgmma), so they have the bound of those. float64 is added as everywhere else.

F16, F32, F64, BF16 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), np.dtype(ml_dtypes.bfloat16)
S8, U8, S32 = np.dtype("i1"), np.dtype("u1"), np.dtype("i4")
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
INSTRUCTIONS = {
    MMAOp(): "m16n8k16.row.col.f32.f16.f16.f32",
    MMAOp(K=8): "m16n8k8.row.col.f32.f16.f16.f32",
    MMAOp(K=8, accumulator=F16): "m16n8k8.row.col.f16.f16.f16.f16",
    MMAOp(M=8, K=16, dtype="i1"): "m8n8k16.row.col.s32.s8.s8.s32",
    MMAOp(M=8, K=16, dtype="u1", b_dtype="i1"): "m8n8k16.row.col.s32.u8.s8.s32",
    MMAOp(dtype=BF16): "m16n8k16.row.col.f32.bf16.bf16.f32",
    MMAOp(accumulator=F16): "m16n8k16.row.col.f16.f16.f16.f16",
    MMAOp(dtype=F32): "m16n8k8.row.col.f32.tf32.tf32.f32",
    MMAOp(K=4, dtype=F32): "m16n8k4.row.col.f32.tf32.tf32.f32",
    MMAOp(dtype="i1"): "m16n8k32.row.col.s32.s8.s8.s32",
    MMAOp(dtype="u1"): "m16n8k32.row.col.s32.u8.u8.s32",
    MMAOp(dtype="i1", b_dtype="u1"): "m16n8k32.row.col.s32.s8.u8.s32",
    MMAOp(dtype="u1", b_dtype="i1"): "m16n8k32.row.col.s32.u8.s8.s32",
    MMAOp(dtype=E4M3): "m16n8k32.row.col.f32.e4m3.e4m3.f32",
    MMAOp(dtype=E5M2): "m16n8k32.row.col.f32.e5m2.e5m2.f32",
    MMAOp(dtype=E4M3, b_dtype=E5M2): "m16n8k32.row.col.f32.e4m3.e5m2.f32",
    MMAOp(M=8, K=4, dtype=F64): "m8n8k4.row.col.f64.f64.f64.f64",
    MMAOp(K=4, dtype=F64): "m16n8k4.row.col.f64.f64.f64.f64",
    MMAOp(dtype=F64): "m16n8k8.row.col.f64.f64.f64.f64",
    MMAOp(K=16, dtype=F64): "m16n8k16.row.col.f64.f64.f64.f64",
}
OPERATORS = [dataclasses.replace(operator, N=n) for operator in INSTRUCTIONS for n in (8, 16)]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=repr)
DATA = ["integers", "normal"]


def matrices(rng: np.random.Generator, data: str, shape: tuple[int, int, int], a_dtype: Any, accumulator: Any,
             b_dtype: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and C of an M x N x K product; of integers "normal" is their whole range."""
    m, n, k = shape

    def draw(dtype: np.dtype, *extents: int) -> np.ndarray:
        if data == "integers":
            return rng.integers(0 if dtype.kind == "u" else -4, 5, extents).astype(dtype)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return rng.integers(limits.min, limits.max, extents, dtype, endpoint=True)
        return rng.standard_normal(extents).astype(dtype)

    return draw(np.dtype(a_dtype), m, k), draw(np.dtype(a_dtype if b_dtype is None else b_dtype), k, n), draw(np.dtype(accumulator), m, n)


def rounded_as_tf32(x: np.ndarray) -> np.ndarray:
    """To 11 bits, to nearest, ties away from zero, by arithmetic of its own."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.copysign(np.floor(abs(mantissa) * 2**11 + 0.5), mantissa), exponent - 11)


def assert_product(d: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, data: str) -> None:
    """D = A B + C, exactly or within the tolerance that the module's text derives."""
    if d.dtype.kind == "i":
        wide = a.astype(np.int64) @ b.astype(np.int64) + c
        assert np.array_equal(d, wide.astype(d.dtype))
        return
    a64, b64, c64 = (rounded_as_tf32(x) if x is not c and a.dtype == F32 else x.astype(np.float64) for x in (a, b, c))
    reference = a64 @ b64 + c64
    if data == "integers":
        assert np.array_equal(d.astype(np.float64), reference)
        return
    bits = 52 if d.dtype == F64 else 13 if a.dtype.itemsize == 1 else 23
    tolerance = (a.shape[1] + 1) * 2.0**-bits * (abs(a64) @ abs(b64) + abs(c64))
    if d.dtype == F16:
        tolerance = tolerance + 2 * 2.0**-11 * (abs(a64) @ abs(b64) + abs(c64))
    assert (abs(d.astype(np.float64) - reference) <= tolerance).all()


# -- mma.sync ----------------------------------------------------------------------------------------------------------

def mma_kernel(d: Any, a: Any, b: Any, c: Any, operator: Any) -> None:
    """One operation, its fragments gathered from global memory by the maps."""
    lane = lane_index()
    fragment = operator.instruction(generate(operator.fragment_a.count, take, a, operator.map_a, lane),
                                    generate(operator.fragment_b.count, take, b, operator.map_b, lane),
                                    generate(operator.fragment_c.count, take, c, operator.map_c, lane))
    each(put, fragment, d, operator.map_c, lane)


def take(n: int, view: Any, fragment_map: Any, lane: int) -> Any:
    return view[fragment_coordinate(fragment_map, lane, n, 0), fragment_coordinate(fragment_map, lane, n, 1)]


def put(value: Any, n: int, view: Any, fragment_map: Any, lane: int) -> None:
    view[fragment_coordinate(fragment_map, lane, n, 0), fragment_coordinate(fragment_map, lane, n, 1)] = value


def mma_arguments(operator: MMAOp, data: str, rng: np.random.Generator) -> tuple:
    a, b, c = matrices(rng, data, operator.shape, operator.dtype, operator.accumulator, operator.b_dtype)
    return Out(c.shape, c.dtype), a, b, c, operator


@pytest.mark.parametrize("data", DATA)
@every_operator
def test_mma_multiplies(operator: MMAOp, data: str, rng: np.random.Generator) -> None:
    out, a, b, c, _ = mma_arguments(operator, data, rng)
    (d,) = emulated(mma_kernel, out, a, b, c, operator)
    assert_product(d, a, b, c, data)


@every_operator
def test_every_element_is_in_one_place(operator: MMAOp) -> None:
    for fragment_map, shape in ((operator.map_a, (operator.M, operator.K)), (operator.map_b, (operator.K, operator.N)),
                                (operator.map_c, (operator.M, operator.N))):
        rows, columns = fragment_map.indices
        assert sorted(zip(rows.flat, columns.flat)) == [(i, j) for i in range(shape[0]) for j in range(shape[1])]


@pytest.mark.sample(12)
@every_operator
def test_mma_is_one_instruction(operator: MMAOp, rng: np.random.Generator) -> None:
    """For 8 columns; two for 16. Inputs of tf32 are rounded, and nothing else is in between."""
    ptx = compiled(mma_kernel, *mma_arguments(operator, "normal", rng))
    text = "mma.sync.aligned." + INSTRUCTIONS[dataclasses.replace(operator, N=8)]
    assert [(k, n) for k, n in instructions(ptx).items() if k.startswith("mma")] == [(text, operator.N // 8)]
    inputs = operator.fragment_a.count + operator.fragment_b.count
    assert instructions(ptx)["cvt.rna.tf32.f32"] == (inputs if operator.dtype == F32 else 0)
    assert leaves_nothing(ptx)


def test_tf32_is_rounded_as_the_instruction_rounds() -> None:
    """Ties away from zero, carries into the exponent, and what is not finite as it is."""
    one = np.float32(1)
    given = np.array([1 + 2**-11, -(1 + 2**-11), 1 + 2**-12, np.nextafter(np.float32(2), one), np.inf, -np.inf, np.nan, 2.0**-149, 0.0, -0.0], F32)
    wanted = np.array([1 + 2**-10, -(1 + 2**-10), 1, 2, np.inf, -np.inf, np.nan, 0, 0.0, -0.0], F32)
    assert np.array_equal(rounded_to_tf32(given), wanted, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.sample(8)
@every_operator
def test_mma_on_the_gpu(operator: MMAOp, rng: np.random.Generator) -> None:
    for data in DATA:
        out, a, b, c, _ = mma_arguments(operator, data, rng)
        (d,) = on_device(mma_kernel, out, a, b, c, operator)
        assert_product(d, a, b, c, data)


# -- ldmatrix ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Load(gk.Component):
    dtype: Any
    matrices: int
    trans: bool

    @property
    def line(self) -> int:
        return 16 // self.dtype.itemsize

    @property
    def count(self) -> int:
        return self.matrices * 4 // self.dtype.itemsize


def ldmatrix_kernel(out: Any, a: Any, row_stride: int, case: Any) -> None:
    """Rows of 16 bytes, ``row_stride`` apart in shared memory, by ldmatrix; every lane stores its fragment."""
    lane = lane_index()
    pointer = shared(case.dtype, 0)
    store_shared(pointer, lane * row_stride, 0, load_global(a, 0, (case.line * lane,), (0,), case.line))
    barrier()
    each(keep_value, ldmatrix(pointer, lane * row_stride, 0, case.matrices, case.trans), out, lane, case)


def keep_value(value: Any, n: int, out: Any, lane: int, case: Any) -> None:
    out[lane * case.count + n] = value


LOADS = [(m, t) for m in (1, 2, 4) for t in (False, True)]


def expected_fragments(a: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """What the 32 lanes hold, from the PTX ISA: of matrix m, 32 bits of row t // 4, the (t % 4)-th."""
    w, line = 4 // a.dtype.itemsize, 16 // a.dtype.itemsize
    out = np.zeros((32, w * count), a.dtype)
    for lane in range(32):
        for m in range(count):
            matrix = a.reshape(-1, line)[8 * m:8 * m + 8]
            matrix = matrix.T if trans else matrix
            out[lane, w * m:w * m + w] = matrix[lane // 4, w * (lane % 4):w * (lane % 4) + w]
    return out.reshape(-1)


@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i2")], ids=str)
@pytest.mark.parametrize("count, trans", LOADS)
def test_ldmatrix_deals_rows(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    a = rng.integers(-1000, 1000, 256).astype(dtype)
    case, out = Load(dtype, count, trans), Out((64 * count,), dtype)
    (result,) = emulated(ldmatrix_kernel, out, a, Runtime(16), case, shared=32 * 16 * 2)
    assert same_bits(result, expected_fragments(a, count, trans))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [F32, np.dtype("i4"), np.dtype("u1"), np.dtype("i1"), E4M3], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_deals_words(count: int, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Of other elements than 16-bit ones; and in PTX it is one instruction."""
    case = Load(dtype, count, False)
    a, out = rng.integers(0, 100, 32 * case.line).astype(dtype), Out((32 * case.count,), dtype)
    (result,) = emulated(ldmatrix_kernel, out, a, Runtime(2 * case.line), case, shared=32 * 32)
    assert same_bits(result, expected_fragments(a, count, False))
    ptx = compiled(ldmatrix_kernel, out, a, Runtime(2 * case.line), case)
    assert instructions(ptx)[f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16"] == 1 and leaves_nothing(ptx)


def test_only_16_bit_elements_are_transposed() -> None:
    with pytest.raises(TypeError, match="trans is for elements of 16 bits"):
        emulated(ldmatrix_kernel, Out((128,), F32), np.zeros(128, F32), Runtime(4), Load(F32, 4, True), shared=1024)


@pytest.mark.sample(2)
@pytest.mark.parametrize("count, trans", LOADS)
def test_ldmatrix_is_one_instruction(count: int, trans: bool) -> None:
    a, case = np.zeros(256, F16), Load(F16, count, trans)
    ptx = compiled(ldmatrix_kernel, Out((64 * count,), F16), a, Runtime(16), case)
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    assert [(k, n) for k, n in instructions(ptx).items() if k.startswith("ldmatrix")] == [(text, 1)]
    assert leaves_nothing(ptx)


def test_ldmatrix_rows_are_the_mma_fragments() -> None:
    """Four matrices in the order of mma's A: left upper, left lower, right upper, right lower."""
    from gemmkit.ptx.mma import A_16X16

    matrix = np.arange(256).reshape(16, 16)
    quarters = [matrix[i:i + 8, j:j + 8] for j in (0, 8) for i in (0, 8)]
    fragments = [ROWS_8X8.scatter(q) for q in quarters]
    assert [sum((f[lane] for f in fragments), ()) for lane in range(32)] == A_16X16.scatter(matrix)


@pytest.mark.gpu
def test_ldmatrix_on_the_gpu(rng: np.random.Generator) -> None:
    for count, trans in LOADS:
        a = rng.integers(-1000, 1000, 256).astype(F16)
        (result,) = on_device(ldmatrix_kernel, Out((64 * count,), F16), a, Runtime(16), Load(F16, count, trans),
                              shared=32 * 16 * 2)
        assert same_bits(result, expected_fragments(a, count, trans))


# ==========================================================================================================================
# wmma in the emulator against NumPy, in PTX, and against the hardware.


@dataclass(frozen=True)
class Wmma(gk.Component):
    """One product with its operands in these layouts ("row" or "col")."""

    key: Any
    a: str = "row"
    b: str = "row"
    c: str = "row"

    @property
    def spec(self) -> Any:
        return SPECS[self.key]

    @property
    def kind(self) -> np.dtype:
        return self.spec.input

    @property
    def accumulator(self) -> np.dtype:
        return self.spec.accumulator

    @property
    def load_a(self) -> Any:
        return LOAD[self.key, "a", self.a]

    @property
    def load_b(self) -> Any:
        return LOAD[self.key, "b", self.b]

    @property
    def load_c(self) -> Any:
        return LOAD[self.key, "c", self.c]

    @property
    def multiply(self) -> Any:
        return MMA[self.key, self.a, self.b]

    @property
    def store(self) -> Any:
        return STORE[self.key, self.c]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of A, B and C."""
        m, n, k = self.key[0]
        return m * k, k * n, m * n

    @property
    def leading(self) -> tuple[int, int, int]:
        m, n, k = self.key[0]
        return k if self.a == "row" else m, n if self.b == "row" else k, n if self.c == "row" else m


def wmma_kernel(d: Any, a: Any, b: Any, c: Any, how: Any) -> None:
    a_shared, b_shared, c_shared = shared(how.kind, 0), shared(how.kind, 1024), shared(how.accumulator, 2048)
    copy_in(a_shared, a, how.sizes[0])
    copy_in(b_shared, b, how.sizes[1])
    copy_in(c_shared, c, how.sizes[2])
    barrier()
    fragment = how.multiply(how.load_a(a_shared, 0, 0, how.leading[0]), how.load_b(b_shared, 0, 0, how.leading[1]),
                            how.load_c(c_shared, 0, 0, how.leading[2]))
    barrier()
    how.store(c_shared, 0, 0, how.leading[2], fragment)
    barrier()
    for step in range(how.sizes[2] // 64):
        at = 64 * step + 2 * lane_index()
        store_global(d, 0, (at,), (0,), load_shared(c_shared, at, 0, 2))


def copy_in(pointer: Any, source: Any, count: int) -> None:
    for step in range(count // 32):
        at = 32 * step + lane_index()
        store_shared(pointer, at, 0, load_global(source, 0, (at,), (0,), 1))


def flat(matrix: np.ndarray, layout: str) -> np.ndarray:
    return np.ascontiguousarray(matrix if layout == "row" else matrix.T).reshape(-1)


def wmma_arguments(how: Wmma, data: str, rng: np.random.Generator) -> tuple[tuple, tuple]:
    """(what the kernel takes, the matrices)."""
    a, b, c = matrices(rng, data, how.key[0], how.kind, how.accumulator)
    return (Out((c.size,), how.accumulator), flat(a, how.a), flat(b, how.b), flat(c, how.c), how), (a, b, c)


def wmma_result(d: np.ndarray, how: Wmma) -> np.ndarray:
    m, n, _ = how.key[0]
    return d.reshape(m, n) if how.c == "row" else d.reshape(n, m).T


WMMAS = [Wmma(key, *layouts) for key in SPECS
         for layouts in (("row", "row", "row"), ("col", "row", "row"), ("row", "col", "col"), ("col", "col", "col"))]


every_wmma = pytest.mark.parametrize(
    "how", WMMAS, ids=[f"{h.spec.name}-{h.a}-{h.b}-{h.c}" for h in WMMAS])


@pytest.mark.sample(3)
@every_wmma
def test_wmma_multiplies(how: Wmma, rng: np.random.Generator) -> None:
    for data in DATA:
        arguments, (a, b, c) = wmma_arguments(how, data, rng)
        (d,) = emulated(wmma_kernel, *arguments, shared=4096)
        assert_product(wmma_result(d, how), a, b, c, data)


@pytest.mark.sample(36)
@every_wmma
def test_wmma_is_load_multiply_store(how: Wmma, rng: np.random.Generator) -> None:
    ptx = compiled(wmma_kernel, *wmma_arguments(how, "normal", rng)[0])
    shape = "m{}n{}k{}".format(*how.key[0])
    names = {F16: "f16", F32: "f32", BF16: "bf16", S8: "s8", U8: "u8", S32: "s32", F64: "f64"}
    kind, acc = "tf32" if how.kind == F32 else names[how.kind], names[how.accumulator]
    types = f"{acc}.{acc}" if how.kind == F16 else f"{acc}.{kind}.{kind}.{acc}"
    assert {k: n for k, n in instructions(ptx).items() if k.startswith("wmma")} == {
        f"wmma.load.a.sync.aligned.{how.a}.{shape}.shared.{kind}": 1,
        f"wmma.load.b.sync.aligned.{how.b}.{shape}.shared.{kind}": 1,
        f"wmma.load.c.sync.aligned.{how.c}.{shape}.shared.{acc}": 1,
        f"wmma.mma.sync.aligned.{how.a}.{how.b}.{shape}.{types}": 1,
        f"wmma.store.d.sync.aligned.{how.c}.{shape}.shared.{acc}": 1,
    }
    assert leaves_nothing(ptx)


@pytest.mark.sample(11)
@every_wmma
def test_wmma_is_assembled(how: Wmma, rng: np.random.Generator) -> None:
    from gemmkit.runtime.compile import assemble

    usage = assemble(compiled(wmma_kernel, *wmma_arguments(how, "normal", rng)[0])).usage
    assert usage.spill_stores == usage.spill_loads == usage.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", sorted({key[0] for key in SPECS}), ids=str)
def test_wmma_on_the_gpu(shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    for how in WMMAS:
        if how.key[0] != shape:
            continue
        for data in DATA:
            arguments, (a, b, c) = wmma_arguments(how, data, rng)
            (d,) = on_device(wmma_kernel, *arguments, shared=4096)
            assert_product(wmma_result(d, how), a, b, c, data)


# ==========================================================================================================================
# stmatrix in the emulator, in PTX, and against the hardware; and that it undoes ldmatrix.

CASES = [(m, t) for m in (1, 2, 4) for t in (False, True)]
every_case = pytest.mark.parametrize("count, trans", CASES)


@dataclass(frozen=True)
class Store(gk.Component):
    dtype: Any
    matrices: int
    trans: bool
    meets: bool = True

    @property
    def values(self) -> int:
        return 2 * self.matrices

    @property
    def rows(self) -> int:
        return 8 * self.matrices


def stmatrix_kernel(out: Any, a: Any, stride: int, case: Any) -> None:
    """Every lane's fragment, from global memory, to rows ``stride`` elements apart in shared memory, and out row by row."""
    lane = lane_index()
    pointer = shared(case.dtype, 16)
    stmatrix(pointer, lane * stride, 8, generate(case.values, take_matrices, a, lane, case), case.trans)
    if case.meets:
        barrier()
    row = (lane + 1) % case.rows                                     # one that another lane has stored
    if lane < case.rows:
        store_global(out, 0, (8 * row,), (0,), load_shared(pointer, row * stride, 8, 8))


def take_matrices(n: int, a: Any, lane: int, case: Any) -> Any:
    return a[lane * case.values + n]


def expected_rows(a: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """From the PTX ISA: lane t's n-th pair is elements (t // 4, 2 (t % 4)) and the next of matrix n, or of its transpose."""
    out = np.zeros((count, 8, 8), a.dtype)
    for lane, fragment in enumerate(a.reshape(32, count, 2)):
        for m in range(count):
            matrix = out[m].T if trans else out[m]
            matrix[lane // 4, 2 * (lane % 4):2 * (lane % 4) + 2] = fragment[m]
    return out.reshape(-1)


def arguments(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator, stride: int = 24, **more: Any) -> tuple:
    a = rng.integers(-1000, 1000, 64 * count).astype(dtype)
    return Out((64 * count,), dtype), a, Runtime(stride), Store(dtype, count, trans, **more)


SHARED = 32 * 24 * 2 + 32


@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i2")], ids=str)
@every_case
def test_collects_rows(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    given = arguments(count, trans, dtype, rng)
    (result,) = emulated(stmatrix_kernel, *given, shared=SHARED)
    assert same_bits(result, expected_rows(given[1], count, trans))


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i2")], ids=str)
@every_case
def test_is_one_instruction(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    ptx = compiled(stmatrix_kernel, *arguments(count, trans, dtype, rng))
    text = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    assert [(k, n) for k, n in instructions(ptx).items() if k.startswith("stmatrix")] == [(text, 1)]
    assert leaves_nothing(ptx)


def test_is_assembled(rng: np.random.Generator) -> None:
    from gemmkit.runtime.compile import assemble, disassemble

    assembled = assemble(compiled(stmatrix_kernel, *arguments(4, True, F16, rng)))
    assert assembled.usage.stack_bytes == 0
    assert "STSM.16.MT88.4" in disassemble(assembled.cubin)


def test_lanes_do_not_meet(rng: np.random.Generator) -> None:
    """It orders nothing: other lanes' rows are there after a barrier only."""
    with pytest.raises(UninitialisedRead, match="read of 16 bytes"):
        emulated(stmatrix_kernel, *arguments(4, False, F16, rng, meets=False), shared=SHARED)


def test_rows_are_aligned(rng: np.random.Generator) -> None:
    with pytest.raises(AlignmentError, match="multiple of 16"):
        emulated(stmatrix_kernel, *arguments(4, False, F16, rng, stride=12), shared=SHARED)


def back_kernel(out: Any, a: Any, case: Any) -> None:
    """Fragments to shared memory and back."""
    lane = lane_index()
    pointer = shared(case.dtype, 0)
    stmatrix(pointer, lane * 8, 0, generate(case.values, take_matrices, a, lane, case), case.trans)
    barrier()
    each(put_matrices, ldmatrix(pointer, lane * 8, 0, case.matrices, case.trans), out, lane, case)


def put_matrices(value: Any, n: int, out: Any, lane: int, case: Any) -> None:
    out[lane * case.values + n] = value


@every_case
def test_undoes_ldmatrix(count: int, trans: bool, rng: np.random.Generator) -> None:
    out, a, _, case = arguments(count, trans, F16, rng)
    (result,) = emulated(back_kernel, out, a, case, shared=512)
    assert same_bits(result, a)


@pytest.mark.gpu
def test_on_the_gpu(rng: np.random.Generator) -> None:
    for count, trans in CASES:
        given = arguments(count, trans, F16, rng)
        (result,) = on_device(stmatrix_kernel, *given, shared=SHARED)
        assert same_bits(result, expected_rows(given[1], count, trans))
