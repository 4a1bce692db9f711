"""wgmma: values in the emulator and on hardware, PTX, SASS, descriptors, and what the emulator finds in kernels that use it
wrongly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gemmkit.emulator.errors import ProtocolError, ProxyError, RaceError
from gemmkit.lang.aggregates import fill
from gemmkit.lang.registers import each, generate
from gemmkit.ptx.memory import load_global, shared, store_shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.wgmma import (
    WgmmaSpec,
    advance,
    decode,
    fence_async,
    halves,
    matrix_descriptor,
    settle,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from gemmkit.runtime.compile import assemble, disassemble
from tests.support.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, lines_with, on_device
from tests.support.wgmma_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    KINDS,
    S8,
    S32,
    STEPS,
    U8,
    WIDTHS,
    Elements,
    Product,
    assert_product,
    copy_in,
    draw,
    kind_name,
    product_kernel,
    put,
    take,
    word_of_a,
    words,
)

# ==========================================================================================================================
# wgmma multiplies: in the emulator against NumPy, and on hardware.
#
# Two kinds of data, as in `test_mma`. Small integers are exact in every type here, so that all must agree to the bit; this is
# what tells a wrong descriptor, swizzle or fragment map. Normal numbers: products are exact in float32, and the tensor cores
# add them in an order of their own, and cut terms off: below 24 bits or so, below 14 with 8-bit floats.

DATA = ["integers", "normal"]


def multiplied(run: Any, spec: WgmmaSpec, width: int, data: str, accumulate: int, rng: np.random.Generator) -> None:
    """Run `product_kernel` one way or another and compare: D = A B (+ C), or D = -A B (+ C)."""
    k = STEPS * spec.K
    a, b = draw(rng, data, (64, k), spec.a), draw(rng, data, (spec.N, k), spec.b)
    c = draw(rng, data, (64, spec.N), spec.accumulator)
    case = Product(spec, width)
    (d,) = run(product_kernel, Out(c.shape, c.dtype), words(a, spec.a_major), words(b, spec.b_major), c,
               Runtime(accumulate), case, threads=128, shared=case.shared)
    assert_product(d, -a if spec.negates else a, b, c if accumulate else np.zeros_like(c), data)


every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)
MAJORS = [("K", "MN"), ("MN", "K"), ("MN", "MN")]
SIXTEEN_BITS = pytest.mark.parametrize("kind", [k for k in KINDS if k[0].itemsize == 2], ids=kind_name)


@pytest.mark.sample(9)
@every_kind
@pytest.mark.parametrize("width", WIDTHS)
def test_multiplies(kind: tuple, width: int, rng: np.random.Generator) -> None:
    for data in DATA:
        multiplied(emulated, WgmmaSpec(24, *kind), width, data, data == "integers", rng)


@pytest.mark.sample(7)
@SIXTEEN_BITS
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("majors", MAJORS, ids="-".join)
def test_multiplies_mn_major(kind: tuple, width: int, majors: tuple[str, str], rng: np.random.Generator) -> None:
    multiplied(emulated, WgmmaSpec(72, *kind, *majors), width, "integers", 0, rng)


@pytest.mark.sample(2)
@pytest.mark.parametrize("columns", [8, 16, 40, 128, 200, 256])
def test_multiplies_wide(columns: int, rng: np.random.Generator) -> None:
    multiplied(emulated, WgmmaSpec(columns, F16, F16, F32, "K", "MN"), 128, "integers", 1, rng)


@pytest.mark.sample(2)
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
    """A's fragment as elements, once and settled, and float16 accumulators as words."""
    copy_in(case.b, b, 0, case)
    fence_async()
    barrier()
    descriptor = matrix_descriptor(shared(case.word, 0), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    sums = fill(case.start_dtype, case.start_count, 0)
    fragment = generate(case.elements, take, a, case.map_a)
    if case.is_settled:
        fragment = settle(fragment)
    wgmma_fence()
    sums = case.instruction(sums, generate(case.elements, take, a, case.map_a), descriptor, 1)
    sums = case.instruction(sums, fragment, descriptor, 1)
    wgmma_commit()
    (sums,) = wgmma_wait(0, (sums,))
    each(put, halves(sums) if case.is_packed else sums, d, case.map_c)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS[:4], ids=kind_name)
def test_elements_in_registers(kind: tuple, rng: np.random.Generator) -> None:
    spec = WgmmaSpec(16, *kind, a_registers=True)
    a, b = draw(rng, "integers", (64, spec.K), kind[0]), draw(rng, "integers", (16, STEPS * spec.K), kind[1])
    case = Elements(spec, 64)
    arguments = Out((64, 16), kind[2]), a, words(b, "K"), case
    (d,) = emulated(element_kernel, *arguments, threads=128, shared=case.b.nbytes)
    assert_product(d, np.hstack([a, a]), np.hstack([b[:, :spec.K]] * 2), np.zeros_like(d), "integers")
    assert leaves_nothing(compiled(element_kernel, *arguments, threads=128))


# -- hardware ------------------------------------------------------------------------------------------------------------------

FLOATS = pytest.mark.parametrize("kind", [k for k in KINDS if k[2] != S32], ids=kind_name)


@pytest.mark.sample(2)
@FLOATS
@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_subtracts(kind: tuple, run: Any, rng: np.random.Generator) -> None:
    for accumulate in (0, 1):
        multiplied(run, WgmmaSpec(24, *kind, negates=True), 128, "integers", accumulate, rng)
    multiplied(run, WgmmaSpec(24, *kind, a_registers=True, negates=True), 64, "normal", 1, rng)


@pytest.mark.gpu
@pytest.mark.sample(4)
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


# ==========================================================================================================================
# wgmma as device code: PTX, SASS, descriptors, and the specs and fragment maps they come from.

# -- device code -----------------------------------------------------------------------------------------------------------

def texts() -> list[tuple[WgmmaSpec, str]]:
    """Specs, and the instruction with all that comes after B's descriptor and the predicate."""
    return [
        (WgmmaSpec(256, F16, F16, F32), "m64n256k16.f32.f16.f16 , 1, 1, 0, 0"),
        (WgmmaSpec(128, F16, F16, F16, "MN", "K"), "m64n128k16.f16.f16.f16 , 1, 1, 1, 0"),
        (WgmmaSpec(64, BF16, BF16, F32, "K", "MN"), "m64n64k16.f32.bf16.bf16 , 1, 1, 0, 1"),
        (WgmmaSpec(64, BF16, BF16, F32, "K", "MN", True), "m64n64k16.f32.bf16.bf16 , 1, 1, 1"),
        (WgmmaSpec(128, F16, F16, F32, "MN", "K", negates=True), "m64n128k16.f32.f16.f16 , -1, 1, 1, 0"),
        (WgmmaSpec(96, F32, F32, F32), "m64n96k8.f32.tf32.tf32 , 1, 1"),
        (WgmmaSpec(96, F32, F32, F32, negates=True), "m64n96k8.f32.tf32.tf32 , -1, 1"),
        (WgmmaSpec(8, E4M3, E5M2, F32), "m64n8k32.f32.e4m3.e5m2 , 1, 1"),
        (WgmmaSpec(8, E5M2, E5M2, F16, a_registers=True), "m64n8k32.f16.e5m2.e5m2 , 1, 1"),
        (WgmmaSpec(24, S8, U8, S32), "m64n24k32.s32.s8.u8 "),
    ]


@pytest.mark.sample(10)
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
    each(put, halves(sums) if case.is_packed else sums, d, case.map_c)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
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
    out[0] = np.uint64(descriptor)
    out[1] = np.uint64(advance(descriptor, 4096))
    out[2] = np.uint64(advance(descriptor, position * 32))


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
    ((64, S8, S8, S32, "K", "K", False, True), "negates is True; products of int8 are added only"),
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


# ==========================================================================================================================
# What the emulator finds in kernels that use wgmma wrongly.


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
        (sums,) = wgmma_wait(0, (sums,))
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


# -- registers --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Registers(Product):
    fence: str = "every group"                 # before which wgmmas there is a fence, and whether behind A's registers
    pending: int = 0                           # how many groups may be pending when a round ends
    last: int = 0                              # and when the sums are stored
    resets: bool = False                       # whether the sums are changed after every wait
    waited: bool = True                        # whether what the last wait returns is taken

    @property
    def map_dtype(self) -> np.dtype:
        return self.spec.accumulator


def register_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """Four rounds, each a group of one wgmma with the same A (by registers or not) and B."""
    copy_in(case.a, a, 0, case)
    copy_in(case.b, b, case.b_start, case)
    fence_async()
    barrier()
    right = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    sums = fill(case.map_dtype, case.count, 0)
    if case.fence == "once":
        wgmma_fence()
    for step in range(4):
        if case.fence == "too early":
            wgmma_fence()
        left = settled_a(case, a) if case.a_registers else descriptor_of_a(case, a)
        if case.fence == "every group":
            wgmma_fence()
        sums = case.instruction(sums, left, right, min(step, 1))
        wgmma_commit()
        (sums,) = wgmma_wait(case.pending, (sums,))
        if case.resets:
            sums = generate(case.count, same, sums)
    if case.waited:
        (sums,) = wgmma_wait(case.last, (sums,))
    else:
        wgmma_wait(0, (sums,))
    each(put, sums, d, case.map_c)


def settled_a(case: Any, a: Any) -> tuple:
    return settle(generate(4, word_of_a, a, 0))


def descriptor_of_a(case: Any, a: Any) -> int:
    return matrix_descriptor(shared(case.word, 0), 0, case.a.leading_bytes, case.a.stride_bytes, case.width)


def same(n: int, values: tuple) -> Any:
    return values[n]


def run_registers(a_registers: bool, **changes: Any) -> np.ndarray:
    case = Registers(WgmmaSpec(8, F16, F16, F32, a_registers=a_registers), 32, **changes)
    ones = np.ones(64 * 32, F16).view(np.uint32)
    (d,) = emulated(register_kernel, Out((64, 8), F32), ones, ones, case, threads=128, shared=case.shared)
    return d


SOUND = [(False, {}), (False, dict(fence="once", pending=1)), (False, dict(pending=1)), (False, dict(resets=True)), (True, {}),
         (True, dict(resets=True))]
FAULTY = {
    "no fence at all": (False, dict(fence="never"), "accumulators that other instructions may have touched"),
    "no fence, by registers": (True, dict(fence="never"), "accumulators that other instructions"),
    "the sums were touched": (False, dict(fence="once", resets=True), "accumulators that other instructions"),
    "A was written behind the fence": (True, dict(fence="too early"), "registers of A that were written since"),
    "A is written in flight": (True, dict(pending=1), "registers of A are written while a wgmma in flight"),
    "sums before their wait": (False, dict(pending=1, last=1), "accumulators are used while wgmmas in flight"),
    "sums changed before their wait": (False, dict(pending=1, resets=True), "accumulators are used while"),
    "sums that were not handed to the wait": (False, dict(pending=1, waited=False), "accumulators are used while"),
}


@pytest.mark.parametrize(("a_registers", "changes"), SOUND)
def test_registers_in_order(a_registers: bool, changes: dict) -> None:
    assert (run_registers(a_registers, **changes) == 4 * 16).all()


@pytest.mark.parametrize("name", FAULTY)
def test_registers_out_of_order(name: str) -> None:
    a_registers, changes, message = FAULTY[name]
    with pytest.raises(ProtocolError, match=message):
        run_registers(a_registers, **changes)


def fresh_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """Two groups, the second with sums of its own, which instructions behind the first one's fence may have made."""
    copy_in(case.a, a, 0, case)
    copy_in(case.b, b, case.b_start, case)
    fence_async()
    barrier()
    left = descriptor_of_a(case, a)
    right = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    wgmma_fence()
    first = case.instruction(fill(case.map_dtype, case.count, 0), left, right, 0)
    wgmma_commit()
    if case.fence == "every group":
        wgmma_fence()
    second = case.instruction(fill(case.map_dtype, case.count, 0), left, right, 0)
    wgmma_commit()
    first, second = wgmma_wait(0, (first, second))
    each(put, second, d, case.map_c)


def test_sums_of_a_group_of_their_own_need_a_fence() -> None:
    ones = np.ones(64 * 32, F16).view(np.uint32)
    for fence in ("every group", "once"):
        case = Registers(WgmmaSpec(8, F16, F16, F32), 32, fence=fence)
        if fence == "once":
            with pytest.raises(ProtocolError, match="accumulators that other instructions"):
                emulated(fresh_kernel, Out((64, 8), F32), ones, ones, case, threads=128, shared=case.shared)
        else:
            (d,) = emulated(fresh_kernel, Out((64, 8), F32), ones, ones, case, threads=128, shared=case.shared)
            assert (d == 16).all()
