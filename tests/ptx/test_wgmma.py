"""wgmma: in the emulator against NumPy, in PTX and SASS, and against the hardware.

The kernel copies both operands into shared memory by an arithmetic of its own, as chunks of 16 bytes, and multiplies two
instructions' worth of K. Operands travel as 32-bit words, so that every type goes the same way.

Two kinds of data, as in `test_mma`. Small integers are exact in every type here, so that all must agree to the bit; this is
what tells a wrong descriptor, swizzle or fragment map. Normal numbers: products are exact in float32, and the tensor cores
add them in an order of their own, and cut terms off: below 24 bits or so, below 14 with 8-bit floats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import ProtocolError, ProxyError, RaceError
from gemmkit.lang.control import choose, each
from gemmkit.lang.registers import generate
from gemmkit.lang.values import fill
from gemmkit.ptx.descriptors import advance, decode, matrix_descriptor
from gemmkit.ptx.fragments import fragment_coordinate
from gemmkit.ptx.memory import load_global, shared, store_shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.warpgroup import fence_async
from gemmkit.ptx.wgmma import WgmmaSpec, halves, instruction, wgmma_commit, wgmma_fence, wgmma_wait
from gemmkit.runtime.assemble import assemble, disassemble
from tests.ptx.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, lines_with, on_device

F16, F32, BF16 = np.dtype("f2"), np.dtype("f4"), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
S8, U8, S32 = np.dtype("i1"), np.dtype("u1"), np.dtype("i4")
STEPS = 2

KINDS = [(F16, F16, F32), (F16, F16, F16), (BF16, BF16, F32), (F32, F32, F32), (E4M3, E4M3, F32), (E5M2, E4M3, F32),
         (E4M3, E5M2, F16), (E5M2, E5M2, F32), (S8, S8, S32), (U8, U8, S32), (S8, U8, S32), (U8, S8, S32)]
WIDTHS = [0, 32, 64, 128]
DATA = ["integers", "normal"]


# -- an operand in shared memory -----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Placed(gk.Component):
    """How an operand of ``lines`` (rows of A, columns of B) lies in shared memory: in panels as wide as the swizzle.

    Its source is a matrix with rows of ``per_row`` chunks: (lines, K) when it is K-major, (K, lines) when it is MN-major.
    """

    lines: int
    itemsize: int
    width: int
    major: str

    @property
    def is_k_major(self) -> bool:
        return self.major == "K"

    @property
    def rows(self) -> int:
        return self.lines if self.major == "K" else STEPS * 32 // self.itemsize

    @property
    def per_row(self) -> int:
        return STEPS * 2 if self.major == "K" else self.lines * self.itemsize // 16

    @property
    def across(self) -> int:
        """Chunks of a panel's row."""
        return max(self.width // 16, 1)

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.across * 16

    @property
    def nbytes(self) -> int:
        panels = -(-self.per_row // self.across)
        return -(-panels * self.panel_bytes // 1024) * 1024

    @property
    def leading_bytes(self) -> int:
        if self.major == "MN" and not self.width:
            return 128
        return self.panel_bytes

    @property
    def stride_bytes(self) -> int:
        if self.major == "MN" and not self.width:
            return self.panel_bytes
        return 128 * self.across

    def place(self, chunk: int) -> int:
        """Where a chunk of the source goes, in chunks."""
        row, column = chunk // self.per_row, chunk % self.per_row
        swizzled = (column % self.across) ^ (row // (8 // self.across) % self.across)
        return column // self.across * (self.rows * self.across) + row * self.across + swizzled

    def ahead(self, step: int) -> int:
        """How many bytes into the operand an instruction begins."""
        return choose(self.is_k_major, ahead_in_row, ahead_in_column, self, step)


def ahead_in_row(placed: Any, step: int) -> int:
    return 2 * step // placed.across * placed.panel_bytes + 2 * step % placed.across * 16


def ahead_in_column(placed: Any, step: int) -> int:
    return step * 16 * placed.across * 16


def copy_in(placed: Any, source: Any, start: int, case: Any) -> None:
    """The block's threads copy an operand's words to byte ``start`` of shared memory."""
    pointer = shared(case.word, start)
    for first in range(0, placed.rows * placed.per_row, 128):
        chunk = first + thread_index()
        if chunk < placed.rows * placed.per_row:
            store_shared(pointer, placed.place(chunk) * 4, 0, load_global(source, 0, (4 * chunk,), (0,), 4))


# -- products ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Product(gk.Component):
    """A product of 64 x (2 instructions' K) by (2 instructions' K) x N."""

    spec: Any
    width: int = 128
    word = np.dtype("u4")

    @property
    def instruction(self) -> Any:
        return instruction(self.spec)

    @property
    def map_c(self) -> Any:
        return self.spec.c

    @property
    def map_a(self) -> Any:
        return self.spec.a_map

    @property
    def count(self) -> int:
        return self.spec.fragment_c.count

    @property
    def a_registers(self) -> bool:
        return self.spec.a_registers

    @property
    def a(self) -> Placed:
        return Placed(64, self.spec.a.itemsize, self.width, self.spec.a_major)

    @property
    def b(self) -> Placed:
        return Placed(self.spec.N, self.spec.b.itemsize, self.width, self.spec.b_major)

    @property
    def b_start(self) -> int:
        return self.a.nbytes

    @property
    def shared(self) -> int:
        return self.a.nbytes + self.b.nbytes


def product_kernel(d: Any, a: Any, b: Any, c: Any, accumulate: int, case: Any) -> None:
    copy_in(case.a, a, 0, case)
    copy_in(case.b, b, case.b_start, case)
    fence_async()
    barrier()
    descriptor = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    sums = generate(case.count, take, c, case.map_c)
    wgmma_fence()
    for step in range(STEPS):
        left = choose(case.a_registers, fragment_of_a, descriptor_of_a, case, a, step)
        sums = case.instruction(sums, left, advance(descriptor, case.b.ahead(step)), max(accumulate, min(step, 1)))
    wgmma_commit()
    (sums,) = wgmma_wait(0, (sums,))
    each(put, sums, d, case.map_c)


def descriptor_of_a(case: Any, a: Any, step: int) -> int:
    start = matrix_descriptor(shared(case.word, 0), 0, case.a.leading_bytes, case.a.stride_bytes, case.width)
    return advance(start, case.a.ahead(step))


def fragment_of_a(case: Any, a: Any, step: int) -> tuple:
    return generate(4, word_of_a, a, step)


def word_of_a(n: int, a: Any, step: int) -> Any:
    """The four words of a fragment: rows 8 apart, then the other half of the 32 bytes along K."""
    lane, warp = thread_index() % 32, thread_index() // 32
    row, column = 16 * warp + lane // 4 + 8 * (n % 2), lane % 4 + 4 * (n // 2)
    return a[row * (8 * STEPS) + 8 * step + column]


def take(n: int, view: Any, fragment_map: Any) -> Any:
    t = thread_index()
    return view[fragment_coordinate(fragment_map, t, n, 0), fragment_coordinate(fragment_map, t, n, 1)]


def put(value: Any, n: int, view: Any, fragment_map: Any) -> None:
    t = thread_index()
    view[fragment_coordinate(fragment_map, t, n, 0), fragment_coordinate(fragment_map, t, n, 1)] = value


def draw(rng: np.random.Generator, data: str, shape: tuple[int, int], kind: np.dtype) -> np.ndarray:
    if kind == U8:
        return rng.integers(0, 9 if data == "integers" else 256, shape).astype(kind)
    if kind == S8 and data == "normal":
        return rng.integers(-128, 128, shape).astype(kind)
    return (rng.integers(-4, 5, shape) if data == "integers" else rng.standard_normal(shape)).astype(kind)


def words(matrix: np.ndarray, major: str) -> np.ndarray:
    """A (lines, K) matrix in memory, line by line or, MN-major, k by k."""
    return np.ascontiguousarray(matrix if major == "K" else matrix.T).view(np.uint8).reshape(-1).view(np.uint32)


def multiplied(run: Any, spec: WgmmaSpec, width: int, data: str, accumulate: int, rng: np.random.Generator) -> None:
    """Run `product_kernel` one way or another and compare: D = A B (+ C)."""
    k = STEPS * spec.K
    a, b = draw(rng, data, (64, k), spec.a), draw(rng, data, (spec.N, k), spec.b)
    c = draw(rng, data, (64, spec.N), spec.accumulator)
    case = Product(spec, width)
    (d,) = run(product_kernel, Out(c.shape, c.dtype), words(a, spec.a_major), words(b, spec.b_major), c,
               Runtime(accumulate), case, threads=128, shared=case.shared)
    assert_product(d, a, b, c if accumulate else np.zeros_like(c), data)


def assert_product(d: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, data: str) -> None:
    if a.dtype == F32:                                       # tf32: the last 13 bits of an operand do not count
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32) for x in (a, b))
    a64, b64, c64 = (x.astype(np.float64) for x in (a, b, c))
    reference = a64 @ b64.T + c64
    if data == "integers" or d.dtype == S32:
        assert np.array_equal(d.astype(np.float64), reference)
        return
    magnitude = abs(a64) @ abs(b64).T + abs(c64)
    tolerance = (a.shape[1] + 1) * 2.0**(-23 if a.itemsize > 1 else -13) * magnitude
    if d.dtype == F16:
        tolerance += 2 * STEPS * 2.0**-11 * magnitude
    assert (abs(d.astype(np.float64) - reference) <= tolerance).all()


def name(dtype: np.dtype) -> str:
    return {F16: "f16", BF16: "bf16", F32: "tf32", E4M3: "e4m3", E5M2: "e5m2", S8: "s8", U8: "u8"}[dtype]


def kind_name(kind: tuple[np.dtype, np.dtype, np.dtype]) -> str:
    return f"{name(kind[0])}-{name(kind[1])}-{kind[2]}"


every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)
MAJORS = [("K", "MN"), ("MN", "K"), ("MN", "MN")]
SIXTEEN_BITS = pytest.mark.parametrize("kind", [k for k in KINDS if k[0].itemsize == 2], ids=kind_name)


@every_kind
@pytest.mark.parametrize("width", WIDTHS)
def test_multiplies(kind: tuple, width: int, rng: np.random.Generator) -> None:
    for data in DATA:
        multiplied(emulated, WgmmaSpec(24, *kind), width, data, data == "integers", rng)


@SIXTEEN_BITS
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("majors", MAJORS, ids="-".join)
def test_multiplies_mn_major(kind: tuple, width: int, majors: tuple[str, str], rng: np.random.Generator) -> None:
    multiplied(emulated, WgmmaSpec(72, *kind, *majors), width, "integers", 0, rng)


@pytest.mark.parametrize("columns", [8, 16, 40, 128, 200, 256])
def test_multiplies_wide(columns: int, rng: np.random.Generator) -> None:
    multiplied(emulated, WgmmaSpec(columns, F16, F16, F32, "K", "MN"), 128, "integers", 1, rng)


@every_kind
def test_multiplies_registers(kind: tuple, rng: np.random.Generator) -> None:
    for data in DATA:
        multiplied(emulated, WgmmaSpec(16, *kind, a_registers=True), 64, data, data == "normal", rng)


def test_integers_wrap() -> None:
    spec = WgmmaSpec(8, U8, U8, S32)
    old = np.full((64, 8), 2**31 - 1, S32)
    new = spec.compute(np.full((64, 32), 255, U8), np.full((8, 32), 255, U8), old)
    assert (new == 2**31 - 1 + 32 * 255**2 - 2**32).all()


def element_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """A's fragment as elements, and float16 accumulators as words."""
    copy_in(case.b, b, 0, case)
    fence_async()
    barrier()
    descriptor = matrix_descriptor(shared(case.word, 0), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    sums = fill(case.start_dtype, case.start_count, 0)
    wgmma_fence()
    for _ in range(2):
        sums = case.instruction(sums, generate(case.elements, take, a, case.map_a), descriptor, 1)
    wgmma_commit()
    (sums,) = wgmma_wait(0, (sums,))
    each(put, choose(case.is_packed, halves, unchanged, sums), d, case.map_c)


def unchanged(sums: tuple) -> tuple:
    return sums


@dataclass(frozen=True)
class Elements(Product):
    @property
    def is_packed(self) -> bool:
        """Whether the accumulators travel as words."""
        return self.spec.accumulator == F16

    @property
    def start_dtype(self) -> np.dtype:
        return self.word if self.is_packed else self.spec.accumulator

    @property
    def start_count(self) -> int:
        return self.spec.registers

    @property
    def elements(self) -> int:
        return self.spec.a_map.values


@pytest.mark.parametrize("kind", KINDS[:4], ids=kind_name)
def test_elements_in_registers(kind: tuple, rng: np.random.Generator) -> None:
    spec = WgmmaSpec(16, *kind, a_registers=True)
    a, b = draw(rng, "integers", (64, spec.K), kind[0]), draw(rng, "integers", (16, STEPS * spec.K), kind[1])
    case = Elements(spec, 64)
    arguments = Out((64, 16), kind[2]), a, words(b, "K"), case
    (d,) = emulated(element_kernel, *arguments, threads=128, shared=case.b.nbytes)
    assert_product(d, np.hstack([a, a]), np.hstack([b[:, :spec.K]] * 2), np.zeros_like(d), "integers")
    assert leaves_nothing(compiled(element_kernel, *arguments, threads=128))


# -- device code -----------------------------------------------------------------------------------------------------------

def texts() -> list[tuple[WgmmaSpec, str]]:
    """Specs, and the instruction with all that comes after B's descriptor and the predicate."""
    return [
        (WgmmaSpec(256, F16, F16, F32), "m64n256k16.f32.f16.f16 , 1, 1, 0, 0"),
        (WgmmaSpec(128, F16, F16, F16, "MN", "K"), "m64n128k16.f16.f16.f16 , 1, 1, 1, 0"),
        (WgmmaSpec(64, BF16, BF16, F32, "K", "MN"), "m64n64k16.f32.bf16.bf16 , 1, 1, 0, 1"),
        (WgmmaSpec(64, BF16, BF16, F32, "K", "MN", True), "m64n64k16.f32.bf16.bf16 , 1, 1, 1"),
        (WgmmaSpec(96, F32, F32, F32), "m64n96k8.f32.tf32.tf32 , 1, 1"),
        (WgmmaSpec(8, E4M3, E5M2, F32), "m64n8k32.f32.e4m3.e5m2 , 1, 1"),
        (WgmmaSpec(8, E5M2, E5M2, F16, a_registers=True), "m64n8k32.f16.e5m2.e5m2 , 1, 1"),
        (WgmmaSpec(24, S8, U8, S32), "m64n24k32.s32.s8.u8 "),
    ]


@pytest.mark.parametrize("spec, text", texts(), ids=[s.name for s, _ in texts()])
def test_one_instruction(spec: WgmmaSpec, text: str, rng: np.random.Generator) -> None:
    a = np.zeros(64 * 8 * STEPS, np.uint32)
    b = np.zeros(spec.N * 8 * STEPS, np.uint32)
    c = np.zeros((64, spec.N), spec.accumulator)
    ptx = compiled(product_kernel, Out(c.shape, c.dtype), a, b, c, Runtime(1), Product(spec), threads=128)
    issued = lines_with(ptx, "wgmma.mma_async")
    assert len(issued) == STEPS == len(re.findall(r"wgmma\.mma_async", ptx))
    found = re.search(r"wgmma\.mma_async\.sync\.aligned\.(\S+) .*, accumulate(.*); }", issued[0])
    assert found is not None and f"{found[1]} {found[2]}" == text
    groups = {k: n for k, n in instructions(ptx).items() if k.startswith("wgmma") and "mma_async" not in k}
    assert groups == {"wgmma.fence.sync.aligned": 1, "wgmma.commit_group.sync.aligned": 1,
                      "wgmma.wait_group.sync.aligned": 1}
    assert leaves_nothing(ptx)
    assembled = assemble(ptx)
    usage = assembled.usage
    assert usage.spill_stores == usage.spill_loads == usage.stack_bytes == 0
    assert not any("wgmma" in warning for warning in assembled.warnings), assembled.warnings


def loop_kernel(d: Any, a: Any, b: Any, stages: int, case: Any) -> None:
    """A main loop: four instructions a stage, and the stage before is waited for while they run."""
    left = matrix_descriptor(shared(case.word, 0), 0, 16, 1024, 128)
    right = matrix_descriptor(shared(case.word, 8192), 0, 16, 1024, 128)
    sums = fill(case.start_dtype, case.start_count, 0)
    for stage in range(stages):
        wgmma_fence()
        for step in range(4):
            sums = case.instruction(sums, advance(left, 16384 * stage + 32 * step),
                                    advance(right, 16384 * stage + 32 * step), 1)
        wgmma_commit()
        (sums,) = wgmma_wait(1, (sums,))
    (sums,) = wgmma_wait(0, (sums,))
    each(put, choose(case.is_packed, halves, unchanged, sums), d, case.map_c)


@pytest.mark.parametrize("spec, opcode", [
    (WgmmaSpec(128, F16, F16, F32), "HGMMA.64x128x16.F32 "),
    (WgmmaSpec(128, BF16, BF16, F32, "MN", "MN"), "HGMMA.64x128x16.F32.BF16 "),
    (WgmmaSpec(64, F16, F16, F16), "HGMMA.64x64x16.F16 "),
    (WgmmaSpec(64, F32, F32, F32), "HGMMA.64x64x8.F32.TF32 "),
    (WgmmaSpec(64, E4M3, E4M3, F32), "QGMMA.64x64x32.F32.E4M3.E4M3 "),
    (WgmmaSpec(64, S8, S8, S32), "IGMMA.64x64x32.S8.S8 "),
], ids=lambda x: x.name if isinstance(x, WgmmaSpec) else x.split(".")[0])
def test_main_loop_is_asynchronous(spec: WgmmaSpec, opcode: str) -> None:
    """Only the last of a group signals (gsb0): where each does, the assembler has made them wait for each other."""
    nothing = np.zeros(16, np.uint32)
    ptx = compiled(loop_kernel, Out((64, spec.N), spec.accumulator), nothing, nothing, Runtime(5), Elements(spec),
                   threads=128)
    issued = [line for line in disassemble(assemble(ptx).cubin).splitlines() if "GMMA" in line]
    assert issued and len(issued) % 4 == 0
    assert all(opcode in line.replace(".tnspA", "").replace(".tnspB", "") for line in issued), issued[0]
    assert ["gsb0" in line for line in issued] == [False, False, False, True] * (len(issued) // 4)


def descriptor_kernel(out: Any, position: int, case: Any) -> None:
    descriptor = matrix_descriptor(shared(case.word, 2048), position, 4096, 1024, case.width)
    out[0] = descriptor
    out[1] = advance(descriptor, 4096)
    out[2] = advance(descriptor, position * 32)


@pytest.mark.parametrize("width", WIDTHS)
def test_descriptors(width: int) -> None:
    (bits,) = emulated(descriptor_kernel, Out((3,), "u8"), Runtime(64), Product(WgmmaSpec(8, F16, F16, F32), width),
                       threads=1, shared=4096)
    given = [decode(int(x)) for x in bits]
    assert given == [(at, 4096, 1024, width) for at in (2048 + 256, 2048 + 256 + 4096, 2048 + 256 + 2048)]
    code = {0: 0, 128: 1, 64: 2, 32: 3}[width]
    assert int(bits[0]) == code << 62 | (1024 >> 4) << 32 | (4096 >> 4) << 16 | (2048 + 256) >> 4


def test_descriptors_advance_by_constants() -> None:
    ptx = compiled(descriptor_kernel, Out((3,), "u8"), Runtime(64), Product(WgmmaSpec(8, F16, F16, F32)), threads=1)
    assert any(line.endswith(", 256;") for line in lines_with(ptx, "add.s64"))


@pytest.mark.parametrize("arguments, word", [
    ((8, 1024, 128), "leading_bytes is 8"), ((16, 2**18, 128), "stride_bytes is 262144"), ((16, 1024, 16), "swizzle is 16")])
def test_descriptor_refuses(arguments: tuple[int, int, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        matrix_descriptor(shared(F16, 0), 0, *arguments)


def test_descriptor_refuses_odd_starts() -> None:
    with pytest.raises(ValueError, match="starts at byte 8"):
        matrix_descriptor(shared(F16, 0), 4, 16, 1024, 128)


@pytest.mark.parametrize("arguments, word", [
    ((12, F16, F16, F32), "N is 12"), ((264, F16, F16, F32), "N is 264"), ((40, S8, S8, S32), "N is 40"),
    ((64, np.float64, np.float64, np.float64), "a is float64"), ((64, F16, BF16, F32), "b is bfloat16"),
    ((64, BF16, BF16, F16), "accumulator is float16"), ((64, S8, U8, F32), "accumulator is float32"),
    ((64, F32, F32, F32, "MN", "K"), 'a_major is "MN"'), ((64, E4M3, E4M3, F32, "K", "MN"), 'b_major is "MN"'),
    ((64, F16, F16, F32, "M"), "a_major is 'M'"), ((64, F16, F16, F32, "MN", "K", True), "fragment in registers"),
], ids=str)
def test_spec_refuses(arguments: tuple, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        WgmmaSpec(*arguments)


def test_integer_sizes() -> None:
    """All of the PTX ISA's list, and none beside it."""
    def can_be_had(n: int) -> bool:
        try:
            return bool(WgmmaSpec(n, S8, S8, S32))
        except ValueError:
            return False

    assert [n for n in range(300) if can_be_had(n)] == [8, 16, 24, *range(32, 257, 16)]


# -- fragment maps -----------------------------------------------------------------------------------------------------------

def test_map_of_accumulators() -> None:
    spec = WgmmaSpec(16, F16, F16, F32)
    assert spec.c.table(rows=2).splitlines() == [
        "         0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15",
        "   0  T0.0 T0.1 T1.0 T1.1 T2.0 T2.1 T3.0 T3.1 T0.4 T0.5 T1.4 T1.5 T2.4 T2.5 T3.4 T3.5",
        "   1  T4.0 T4.1 T5.0 T5.1 T6.0 T6.1 T7.0 T7.1 T4.4 T4.5 T5.4 T5.5 T6.4 T6.5 T7.4 T7.5",
    ]
    for t, v in np.ndindex(128, spec.fragment_c.count):
        warp, lane, k, i, j = t // 32, t % 32, v % 2, v // 2 % 2, v // 4
        assert (spec.c.row(t, v), spec.c.column(t, v)) == (16 * warp + lane // 4 + 8 * i, 8 * j + 2 * (lane % 4) + k)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[4], KINDS[8]], ids=kind_name)
def test_map_of_a_in_registers(kind: tuple) -> None:
    """Every element once, and a register's elements side by side."""
    spec = WgmmaSpec(8, *kind, a_registers=True)
    matrix = np.arange(64 * spec.K).reshape(64, spec.K)
    fragments = np.array(spec.a_map.scatter(matrix))
    assert sorted(fragments.reshape(-1)) == list(range(64 * spec.K))
    per_register = fragments.reshape(128, 4, 4 // spec.a.itemsize)
    assert (np.diff(per_register, axis=2) == 1).all()
    assert np.array_equal(spec.a_map.gather(list(fragments)), matrix)


# -- what the emulator finds ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Faulty(Product):
    fence: str = "writers"                     # who calls fence_async, and when
    pending: int = 0
    shift: int = 0                             # what thread 77 adds to its descriptor

    @property
    def map_dtype(self) -> np.dtype:
        return self.spec.accumulator


def faulty_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """Warpgroup 1 fills the operands, 0 multiplies and gives them back, 1 fills them again."""
    t = thread_index()
    if case.fence == "early":
        fence_async()
    if t >= 128:
        fill_operands(a, b, case)
    if case.fence == "writers":
        fence_async()
    barrier()
    if case.fence == "reader":
        if t == 0:
            fence_async()
    if t < 128:
        left = matrix_descriptor(shared(case.word, 0), 0, case.a.leading_bytes, case.a.stride_bytes, case.width)
        right = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
        if t == 77:
            left += case.shift
        sums = fill(case.map_dtype, case.count, 0)
        wgmma_fence()
        sums = case.instruction(sums, left, right, 0)
        wgmma_commit()
        (sums,) = wgmma_wait(case.pending, (sums,))
    barrier()
    if t >= 128:
        fill_operands(a, b, case)
    if t < 128:
        each(put, sums, d, case.map_c)


def fill_operands(a: Any, b: Any, case: Any) -> None:
    for chunk in range(thread_index() - 128, case.a.nbytes // 16, 128):
        store_shared(shared(case.word, 0), 4 * chunk, 0, load_global(a, 0, (0,), (0,), 4))
    for chunk in range(thread_index() - 128, case.b.nbytes // 16, 128):
        store_shared(shared(case.word, case.b_start), 4 * chunk, 0, load_global(b, 0, (0,), (0,), 4))


def run_faulty(**changes: Any) -> np.ndarray:
    case = Faulty(WgmmaSpec(8, F16, F16, F32), 32, **changes)
    ones = np.ones(8, F16).view(np.uint32)
    (d,) = emulated(faulty_kernel, Out((64, 8), F32), ones, ones, case, threads=256, shared=case.shared)
    return d


def test_stages_that_are_waited_for_may_be_filled_again() -> None:
    assert (run_faulty() == 16).all()


def test_stages_given_back_too_early_are_races() -> None:
    with pytest.raises(RaceError, match="first a read by the tensor cores of threads 0-127") as caught:
        run_faulty(pending=1)
    assert "case.instruction(" in caught.value.accesses[0].kernel_line.text
    assert "store_shared(" in caught.value.accesses[1].kernel_line.text


@pytest.mark.parametrize("fence", ["nobody", "early", "reader"])
def test_writes_that_are_not_fenced_are_not_seen(fence: str) -> None:
    with pytest.raises(ProxyError, match=r"call fence_async\(\) after it") as caught:
        run_faulty(fence=fence)
    assert "store_shared(" in caught.value.write.kernel_line.text
    assert caught.value.write.thread.tid >= 128


def test_descriptors_that_differ_are_refused() -> None:
    with pytest.raises(ProtocolError, match="the descriptor a differs between the threads of a warpgroup"):
        run_faulty(shift=2)


# -- hardware ------------------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@every_kind
def test_on_the_gpu(kind: tuple, rng: np.random.Generator) -> None:
    for spec, width in [(WgmmaSpec(24, *kind), 128), (WgmmaSpec(64, *kind), 0),
                        (WgmmaSpec(16, *kind, a_registers=True), 64)]:
        for data in DATA:
            for accumulate in (0, 1):
                multiplied(on_device, spec, width, data, accumulate, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_mn_major_on_the_gpu(width: int, rng: np.random.Generator) -> None:
    for majors in MAJORS:
        multiplied(on_device, WgmmaSpec(72, F16, F16, F32, *majors), width, "integers", 0, rng)
    multiplied(on_device, WgmmaSpec(256, S8, U8, S32), width, "normal", 1, rng)
