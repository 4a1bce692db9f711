"""Tensor-core atoms: mma.sync, ldmatrix and wmma, in the emulator against NumPy, in PTX, and against the hardware.

Two kinds of data. Small integers: every product and every sum is exact in every type here, so all must agree to the
bit whatever the order of summation; this is what tells a wrong fragment map. Normal numbers: the products of 16-bit
floats are exact in float32, but tensor cores add the 16 products and C in an order of their own, align the terms to the
largest one and cut the rest off below 24 bits or so. Each term then loses less than one unit in the last place of the
largest partial sum: 17 terms stay within ``17 * 2**-23`` of the sum of magnitudes. A float16 accumulator is rounded to
11 bits besides: once at the end, and once more on the way where the hardware takes K in two halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.control import each
from gemmkit.lang.registers import generate
from gemmkit.operators import MMAOp
from gemmkit.ptx.fragments import fragment_coordinate
from gemmkit.ptx.ldmatrix import ROWS_8X8, ldmatrix
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, lane_index
from gemmkit.ptx.wmma import LOAD, MMA, SHAPES, SPECS, STORE
from tests.ptx.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, on_device, same_bits

F16, F32, BF16 = np.dtype("f2"), np.dtype("f4"), np.dtype(ml_dtypes.bfloat16)
TYPES = [(F16, F32), (BF16, F32), (F16, F16)]
DATA = ["integers", "normal"]


def matrices(rng: np.random.Generator, data: str, shape: tuple[int, int, int], kind: np.dtype,
             accumulator: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and C of an M x N x K product."""
    m, n, k = shape
    draw = (lambda *s: rng.integers(-4, 5, s)) if data == "integers" else (lambda *s: rng.standard_normal(s))
    return draw(m, k).astype(kind), draw(k, n).astype(kind), draw(m, n).astype(accumulator)


def assert_product(d: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, data: str) -> None:
    """D = A B + C, exactly or within the tolerance that the module's text derives."""
    a64, b64, c64 = (x.astype(np.float64) for x in (a, b, c))
    reference = a64 @ b64 + c64
    if data == "integers":
        assert np.array_equal(d.astype(np.float64), reference)
        return
    tolerance = (a.shape[1] + 1) * 2.0**-23 * (abs(a64) @ abs(b64) + abs(c64))
    if d.dtype == F16:
        tolerance = tolerance + 2 * 2.0**-11 * (abs(a64) @ abs(b64) + abs(c64))
    assert (abs(d.astype(np.float64) - reference) <= tolerance).all()


# -- mma.sync ----------------------------------------------------------------------------------------------------------

def mma_kernel(d: Any, a: Any, b: Any, c: Any, operator: Any) -> None:
    """One instruction, its fragments gathered from global memory by the maps."""
    lane = lane_index()
    fragment = operator.instruction(generate(8, take, a, operator.map_a, lane), generate(4, take, b, operator.map_b, lane),
                                    generate(4, take, c, operator.map_c, lane))
    each(put, fragment, d, operator.map_c, lane)


def take(n: int, view: Any, fragment_map: Any, lane: int) -> Any:
    return view[fragment_coordinate(fragment_map, lane, n, 0), fragment_coordinate(fragment_map, lane, n, 1)]


def put(value: Any, n: int, view: Any, fragment_map: Any, lane: int) -> None:
    view[fragment_coordinate(fragment_map, lane, n, 0), fragment_coordinate(fragment_map, lane, n, 1)] = value


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kind, accumulator", TYPES)
def test_mma_multiplies(kind: np.dtype, accumulator: np.dtype, data: str, rng: np.random.Generator) -> None:
    a, b, c = matrices(rng, data, (16, 8, 16), kind, accumulator)
    (d,) = emulated(mma_kernel, Out((16, 8), accumulator), a, b, c, MMAOp(dtype=kind, accumulator=accumulator))
    assert_product(d, a, b, c, data)


@pytest.mark.parametrize("kind, accumulator, text", [
    (F16, F32, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    (BF16, F32, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    (F16, F16, "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"),
])
def test_mma_is_one_instruction(kind: np.dtype, accumulator: np.dtype, text: str, rng: np.random.Generator) -> None:
    a, b, c = matrices(rng, "normal", (16, 8, 16), kind, accumulator)
    ptx = compiled(mma_kernel, Out((16, 8), accumulator), a, b, c, MMAOp(dtype=kind, accumulator=accumulator))
    assert [(k, n) for k, n in instructions(ptx).items() if k.startswith("mma")] == [(text, 1)]
    assert leaves_nothing(ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, accumulator", TYPES)
def test_mma_on_the_gpu(kind: np.dtype, accumulator: np.dtype, rng: np.random.Generator) -> None:
    for data in DATA:
        a, b, c = matrices(rng, data, (16, 8, 16), kind, accumulator)
        (d,) = on_device(mma_kernel, Out((16, 8), accumulator), a, b, c, MMAOp(dtype=kind, accumulator=accumulator))
        assert_product(d, a, b, c, data)


# -- ldmatrix ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Load(gk.Component):
    dtype: Any
    matrices: int
    trans: bool


def ldmatrix_kernel(out: Any, a: Any, row_stride: int, case: Any) -> None:
    """Rows of 8 elements, ``row_stride`` apart in shared memory, by ldmatrix; every lane stores its fragment."""
    lane = lane_index()
    pointer = shared(case.dtype, 0)
    store_shared(pointer, lane * row_stride, 0, load_global(a, 0, (8 * lane,), (0,), 8))
    barrier()
    each(keep_value, ldmatrix(pointer, lane * row_stride, 0, case.matrices, case.trans), out, lane, case)


def keep_value(value: Any, n: int, out: Any, lane: int, case: Any) -> None:
    out[lane * 2 * case.matrices + n] = value


LOADS = [(m, t) for m in (1, 2, 4) for t in (False, True)]


def expected_fragments(a: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """What the 32 lanes hold, from the PTX ISA: of matrix m, elements (t // 4, 2 (t % 4)) and the next in the row."""
    out = np.zeros((32, 2 * count), a.dtype)
    for lane in range(32):
        for m in range(count):
            matrix = a.reshape(-1, 8)[8 * m:8 * m + 8]
            matrix = matrix.T if trans else matrix
            out[lane, 2 * m:2 * m + 2] = matrix[lane // 4, 2 * (lane % 4):2 * (lane % 4) + 2]
    return out.reshape(-1)


@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i2")], ids=str)
@pytest.mark.parametrize("count, trans", LOADS)
def test_ldmatrix_deals_rows(count: int, trans: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    a = rng.integers(-1000, 1000, 256).astype(dtype)
    case, out = Load(dtype, count, trans), Out((64 * count,), dtype)
    (result,) = emulated(ldmatrix_kernel, out, a, Runtime(16), case, shared=32 * 16 * 2)
    assert same_bits(result, expected_fragments(a, count, trans))


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


# -- wmma --------------------------------------------------------------------------------------------------------------

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
    for step in range(count // 64):
        at = 64 * step + 2 * lane_index()
        store_shared(pointer, at, 0, load_global(source, 0, (at,), (0,), 2))


def flat(matrix: np.ndarray, layout: str) -> np.ndarray:
    return np.ascontiguousarray(matrix if layout == "row" else matrix.T).reshape(-1)


def wmma_arguments(how: Wmma, data: str, rng: np.random.Generator) -> tuple[tuple, tuple]:
    """(what the kernel takes, the matrices)."""
    a, b, c = matrices(rng, data, how.key[0], how.kind, how.accumulator)
    return (Out((c.size,), how.accumulator), flat(a, how.a), flat(b, how.b), flat(c, how.c), how), (a, b, c)


def wmma_result(d: np.ndarray, how: Wmma) -> np.ndarray:
    m, n, _ = how.key[0]
    return d.reshape(m, n) if how.c == "row" else d.reshape(n, m).T


WMMAS = [Wmma((shape, *types), *layouts) for shape in SHAPES for types in ((F16, F32), (F16, F16), (BF16, F32))
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


@pytest.mark.sample(5)
@every_wmma
def test_wmma_is_load_multiply_store(how: Wmma, rng: np.random.Generator) -> None:
    ptx = compiled(wmma_kernel, *wmma_arguments(how, "normal", rng)[0])
    shape = "m{}n{}k{}".format(*how.key[0])
    names = {F16: "f16", F32: "f32", BF16: "bf16"}
    kind, acc = names[how.kind], names[how.accumulator]
    types = f"{acc}.{acc}" if how.kind == F16 else f"{acc}.{kind}.{kind}.{acc}"
    assert {k: n for k, n in instructions(ptx).items() if k.startswith("wmma")} == {
        f"wmma.load.a.sync.aligned.{how.a}.{shape}.shared.{kind}": 1,
        f"wmma.load.b.sync.aligned.{how.b}.{shape}.shared.{kind}": 1,
        f"wmma.load.c.sync.aligned.{how.c}.{shape}.shared.{acc}": 1,
        f"wmma.mma.sync.aligned.{how.a}.{how.b}.{shape}.{types}": 1,
        f"wmma.store.d.sync.aligned.{how.c}.{shape}.shared.{acc}": 1,
    }
    assert leaves_nothing(ptx)


@pytest.mark.sample(5)
@every_wmma
def test_wmma_is_assembled(how: Wmma, rng: np.random.Generator) -> None:
    from gemmkit.runtime.assemble import assemble

    usage = assemble(compiled(wmma_kernel, *wmma_arguments(how, "normal", rng)[0])).usage
    assert usage.spill_stores == usage.spill_loads == usage.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wmma_on_the_gpu(shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    for how in WMMAS:
        if how.key[0] != shape:
            continue
        for data in DATA:
            arguments, (a, b, c) = wmma_arguments(how, data, rng)
            (d,) = on_device(wmma_kernel, *arguments, shared=4096)
            assert_product(wmma_result(d, how), a, b, c, data)
