"""wgmma as device code: PTX, SASS, descriptors, and the specs and fragment maps they come from."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gemmkit.lang.aggregates import fill
from gemmkit.lang.registers import each
from gemmkit.ptx.memory import shared
from gemmkit.ptx.wgmma import WgmmaSpec, advance, decode, halves, matrix_descriptor, wgmma_commit, wgmma_fence, wgmma_wait
from gemmkit.runtime.compile import assemble, disassemble
from tests.support.harness import Out, Runtime, compiled, emulated, instructions, leaves_nothing, lines_with
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
    kind_name,
    product_kernel,
    put,
)

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
