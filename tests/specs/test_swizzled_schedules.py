"""Schedules with swizzled tiles, prefetches and direct stores, and drawn ones: emulated, compiled, and run by the interpreter
of PTX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import disassemble, instruction_counts, to_ptx
from gemmkit.runtime.device import H100
from gemmkit.shapes import Shape, Swizzle
from gemmkit.specs.lower import BlockKernel as Launch
from gemmkit.specs.lower import KnownMatrix
from gemmkit.specs.moves import CopyLine
from gemmkit.specs.nodes import scheduled
from gemmkit.specs.run import READ_ONLY, kernel_of, matrix_of, prepared
from gemmkit.specs.schedule import FR, RF, SH, SRC, XOR, ColMajor, Move, RowMajor, ScheduleError, Thread, Warp
from gemmkit.specs.tensors import THREAD, T
from tests.ptx_machine.launch import run_ptx
from tests.specs.test_listings import main_loop
from tests.support.banks import conflicts, recorded
from tests.support.drawn_schedules import PARTS, Drawn, part_of_many, schedules
from tests.support.patches import Seeded
from tests.support.schedules import maxwell, operands, tensor_cores

# ==========================================================================================================================
# Schedules with swizzled tiles, prefetches and sums that go straight to global memory: right, without races, and no two accesses
# of a warp in one bank.

SMALL = dict(block=(64, 64, 32), warp=(32, 32))
BY_SHARED = (Move.move(SRC, SH, Move.tile(32, 32).to(Warp).tile(16, 16).unroll.done)
             .tile(16, 64).to(Warp).tile(2, 64).unroll.tile(1, 4).to(Thread).done)


def xor(step: Any) -> Any:
    return step.swizzle(XOR)


def pad(step: Any) -> Any:
    return step.pad(8)


def product(schedule: Any, given: tuple, seed: int | None = None, atol: float = 1e-4) -> Any:
    """Run it, and compare; the accesses to shared memory."""
    a, b, out = given
    out[...] = np.nan
    with gk.emulate(seed=seed), recorded() as seen:
        schedule(a, b, out=out)
    np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=atol)
    return seen


# -- fragments ----------------------------------------------------------------------------------------------------------

@pytest.mark.sample(4)
@pytest.mark.kin(5)
@pytest.mark.parametrize(("a", "b"), [(xor, xor), (xor, pad), (pad, xor)], ids=["both", "a", "b"])
@pytest.mark.parametrize("k", [32, 64])
def test_rows_of_ldmatrix_meet_in_no_bank(a: Any, b: Any, k: int) -> None:
    """Lines of 64 and of 128 bytes: two and one in what the banks serve at a time."""
    seen = product(tensor_cores(a, b, block=(64, 64, k), warp=(32, 32)), operands(64, 64, 2 * k, np.float16, "CFC"), seed=1)
    assert seen.loads and conflicts(seen.loads) == 0
    assert conflicts(seen.stores) == 0 or (pad in (a, b) and k == 32)        # lines of 80 bytes: the pad's stores meet


@pytest.mark.sample(4)
def test_without_a_swizzle_they_meet() -> None:
    """What is counted is there: one operand as it comes."""
    seen = product(tensor_cores(lambda step: step, xor, **SMALL), operands(64, 64, 32, np.float16, "CFC"))
    assert conflicts(seen.loads) > 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("storage", [(RowMajor, RowMajor), (ColMajor, ColMajor), (ColMajor, RowMajor)])
def test_tiles_that_are_transposed(storage: tuple) -> None:
    """ldmatrix.trans, where the instruction wants the other order. Threads then store element by element."""
    how = tensor_cores(*(lambda step, order=order: step.storage(order).swizzle(XOR) for order in storage), **SMALL)
    seen = product(how, operands(64, 64, 64, np.float16, "CFC"), seed=2)
    assert conflicts(seen.loads) == 0


@pytest.mark.sample(4)
@pytest.mark.kin(5)
@pytest.mark.parametrize("order", ["CFC", "CFF"])
@pytest.mark.parametrize("how", [xor, pad], ids=["mma.sync", "wmma"])
@pytest.mark.parametrize("sums", [np.float32, np.float16])
def test_sums_straight_to_global_memory(how: Any, order: str, sums: Any) -> None:
    a, b, out = operands(128, 64, 64, np.float16, order)
    product(tensor_cores(how, how, **SMALL), (a, b, out.astype(sums, order="K")), atol=1e-4 if sums == np.float32 else 0.06)


@pytest.mark.sample(4)
def test_bfloat16() -> None:
    import ml_dtypes

    a, b, out = operands(64, 64, 64, np.float32, "CFC")
    product(tensor_cores(xor, xor, **SMALL), (a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16, order="K"), out), atol=1e-3)


@pytest.mark.sample(4)
@pytest.mark.kin(5)
def test_sums_by_shared_memory() -> None:
    """Pairs of mma.sync's, and a second fragment's memory."""
    product(tensor_cores(xor, xor, end=BY_SHARED, **SMALL), operands(64, 128, 64, np.float16, "CFC"), seed=3)


@pytest.mark.sample(4)
@pytest.mark.kin(5)
@pytest.mark.parametrize("sizes", [(60, 56, 40), (33, 64, 32), (2, 3, 8)])
def test_fragments_over_the_edge(sizes: tuple) -> None:
    """mma.sync's pairs know where they are; wmma stores whole tiles."""
    given = operands(*sizes, np.float16, "CFC")
    product(tensor_cores(xor, xor, **SMALL), given, seed=4)
    product(tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.swizzle(XOR).prefetch, **SMALL), given, seed=5)
    with pytest.raises(ScheduleError, match="(?s)(wmma stores whole ones; store to SH first|aligned to [48] bytes, not 16).*schedules.py"):
        product(tensor_cores(pad, pad, **SMALL), given)


@pytest.mark.sample(4)
def test_matrices_that_wmma_cannot_store_to() -> None:
    """Rows of 4-byte elements, of which the second begins at no multiple of 16 bytes."""
    a, b, _ = operands(64, 64, 32, np.float16, "CFC")
    out = np.zeros((64, 65), np.float32)[:, :64]
    with gk.emulate(), pytest.raises(ScheduleError, match="global memory is aligned to 4 bytes, not 16"):
        tensor_cores(pad, pad, **SMALL)(a, b, out=out)
    product(tensor_cores(xor, xor, **SMALL), (a, b, out))


@pytest.mark.sample(4)
def test_wmma_has_no_swizzle_of_its_own() -> None:
    """Why tiles of wmma's are padded: of no two lines 16 bytes times an odd number apart, as the banks want them, do the 32 bytes that
    a fragment has of each leave whole lines of others between them."""
    for apart in range(2, 64):
        starts = [16 * apart * line % 128 // 16 for line in range(8)]
        if len(set(starts)) == 8:                             # free of conflicts: an odd multiple of 16 bytes
            assert (apart - 2) % 2 == 1                       # so 16 bytes are left, and no line of 32 fits there
    form = T[16, 16].fp16.SH.replaced(swizzle=Swizzle((3, 8)))
    from gemmkit.specs.moves import leading

    assert leading(form) is None and leading(T[16, 16].fp16.SH) == ("row", 16)


# -- threads ------------------------------------------------------------------------------------------------------------

@pytest.mark.sample(4)
@pytest.mark.kin(5)
@pytest.mark.parametrize("swizzle", [XOR, lambda i: i ^ (i >> 4 & 28), Swizzle((4, 28)), Swizzle((5, 28), (6, 12))], ids=["xor", "function", "terms", "two terms"])
def test_b_is_turned_without_a_pad(swizzle: Any) -> None:
    """The listing's B comes by columns and is read by rows: 8 lanes store to one column of shared memory."""
    seen = product(maxwell(pad=0, b_swizzle=swizzle), operands(64, 64, 16), seed=6)
    if swizzle == XOR:
        assert conflicts(seen.stores) == 0


@pytest.mark.sample(4)
@pytest.mark.kin(5)
def test_banks_as_the_pad_has_them() -> None:
    """The swizzle leaves no more conflicts than the paper's four elements, and takes no memory for it."""
    given = operands(64, 64, 16)
    bare, padded, swizzled = (product(maxwell(pad=pad, b_swizzle=how), given) for pad, how in ((0, None), (4, None), (0, XOR)))
    assert conflicts(swizzled.stores) == conflicts(padded.stores) == 0 < conflicts(bare.stores)
    assert conflicts(swizzled.loads) <= conflicts(padded.loads)


@pytest.mark.sample(4)
@pytest.mark.kin(5)
@pytest.mark.parametrize("layout", ["[(8,64):(68,1)]", "[(8,(4,16)):(4,(1,32))]", "[((2,4),64):((256,64),1)]"])
def test_layouts_by_shape(layout: str) -> None:
    """Padded, in panels of four columns, rows in another order: any dims:strides."""
    product(maxwell(b_layout=layout), operands(64, 64, 16), seed=8)
    product(maxwell(b_layout=Shape.parse(layout)), operands(64, 64, 16))


# -- prefetches -----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.parametrize("how", [lambda s: s.prefetch, lambda s: s.prefetch.through(RF)], ids=["cp.async", "registers"])
@pytest.mark.parametrize("sizes", [(64, 64, 96), (60, 56, 40), (128, 64, 32)])
def test_prefetched_fragments(how: Any, sizes: tuple) -> None:
    seen = product(tensor_cores(lambda s: how(xor(s)), lambda s: how(xor(s)), **SMALL), operands(*sizes, np.float16, "CFC"), seed=7)
    assert conflicts(seen.loads) == 0


@pytest.mark.sample(4)
def test_one_by_copies_and_one_by_registers() -> None:
    how = tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.pad(8).prefetch.through(RF), **SMALL)
    product(how, operands(64, 64, 96, np.float16, "CFC"), seed=9)


@pytest.mark.sample(4)
@pytest.mark.kin(5)
def test_lines_that_only_registers_bring() -> None:
    """Rows of 65 elements: aligned to 2 bytes."""
    a, b, out = operands(64, 64, 65, np.float16, "CFC")
    with gk.emulate(), pytest.raises(ScheduleError, match=r"(?s)aligned to 2 bytes, not 16.*\.prefetch\.through\(RF\)"):
        tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.swizzle(XOR).prefetch, **SMALL)(a, b, out=out)
    both = [lambda s: s.swizzle(XOR).prefetch.through(RF)] * 2
    product(tensor_cores(*both, **SMALL), (a, b, out), seed=10)


@pytest.mark.sample(4)
def test_copies_at_the_edge_have_their_own_instruction() -> None:
    from gemmkit.specs import instruction

    source = T[4].fp32.GL.replaced(unit=0)
    assert isinstance(instruction("CopyAsync", THREAD, source, T[4].fp32.SH), CopyLine)
    found = instruction("CopyAsync", THREAD, source.replaced(is_partial=True), T[4].fp32.SH)
    assert type(found).__name__ == "CopyLineOrZeros" and "cp.async" in found.becomes


@pytest.mark.sample(4)
def test_what_is_explained() -> None:
    text = tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.pad(8).prefetch.through(RF)).explain(("f2", "row"), ("f2", "col"), ("f4", "row"))
    for words in ("fp16.SH, [(128,64):(64,1)], Swizzle((3, 56)), two stages", "behind the step to fp16.SH, [(64,128):(1,72)], two stages",
                  "[8,4].fp16.RF of each Thread, a step ahead", "ldmatrix.sync.aligned.m8n8.x4", "2 x mma.sync.aligned.m16n8k16",
                  "st of two neighbours a lane"):
        assert words in text, words


@pytest.mark.sample(4)
def test_no_template_has_them() -> None:
    with pytest.raises(gk.ConfigError, match="the template's shared tiles are padded"):
        tensor_cores(xor, xor, end=BY_SHARED, **SMALL).config(("f2", "row"), ("f2", "col"), ("f4", "row"))
    assert FR == "FR"


@pytest.mark.sample(4)
@pytest.mark.gpu
@pytest.mark.parametrize("how", [pad, xor, lambda s: xor(s).prefetch, lambda s: xor(s).prefetch.through(RF)], ids=["wmma", "mma", "copies", "registers"])
@pytest.mark.parametrize("sizes", [(1024, 1024, 1024), (1000, 1016, 1032)])
def test_on_the_gpu(how: Any, sizes: tuple) -> None:
    import cupy

    a, b, out = map(cupy.asarray, operands(*sizes, np.float16, "CFC"))
    b = cupy.asfortranarray(b)
    if how is pad and sizes[0] % 128:
        with pytest.raises(ScheduleError):
            tensor_cores(how, how)(a, b, out=out)
        return
    tensor_cores(how, how)(a, b, out=out)
    cupy.testing.assert_allclose(out, a.astype("f8") @ b.astype("f8"), atol=2e-3)


@pytest.mark.sample(4)
@pytest.mark.gpu
@pytest.mark.parametrize("how", [dict(pad=0, b_swizzle=XOR), dict(prefetch=True), dict(prefetch=True, through="ab")], ids=["xor", "copies", "registers"])
@pytest.mark.parametrize("sizes", [(512, 512, 512), (500, 300, 204)])
def test_threads_on_the_gpu(how: dict, sizes: tuple) -> None:
    import cupy

    a, b, out = (cupy.asfortranarray(cupy.asarray(x)) for x in operands(*sizes))
    maxwell(**how)(a, b, out=out)
    cupy.testing.assert_allclose(out, a.astype("f8") @ b.astype("f8"), atol=1e-3)


# ==========================================================================================================================
# Drawn schedules (`tests.support.drawn_schedules`), compiled and run by the interpreter of PTX, which has no races and no Python.
# (Emulated, and on a GPU: tests/specs/test_on_gpu.py.)


def check(out: Any, a: Any, b: Any) -> None:
    np.testing.assert_allclose(out.astype(float), a.astype(float) @ b.astype(float), atol=1e-4 if out.dtype == np.float32 else 0.06)


#: Of three neighbours that odd pads leave in an aligned 16 bytes NVVM loads all four, and the interpreter says that the fourth was
#: never written.
PTX_PADS = (0, 4)


def as_ptx(drawn: Drawn) -> None:
    a, b, out = drawn.matrices()
    by_ptx(drawn.schedule, a, b, out)
    drawn.check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
@hypothesis.settings(max_examples=5, phases=[hypothesis.Phase.generate])      # each is compiled: no hunt for a smaller one
@hypothesis.given(schedules(pads=PTX_PADS))
def test_as_ptx(drawn: Drawn) -> None:
    as_ptx(drawn)


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
def test_many_as_ptx(part: int) -> None:
    part_of_many(part, as_ptx, pads=PTX_PADS)


def by_ptx(schedule: Any, a: Any, b: Any, out: Any) -> None:
    """The product by the schedule's PTX."""
    infos = tuple(describe(x) for x in (a, b, out))
    kernel, _ = prepared(schedule, infos)
    made = kernel.launchable(READ_ONLY, infos, H100)
    ptx = to_ptx(scheduled, tuple(argument.type for argument in made.arguments), kernel.threads, H100)
    values = list(made.values)
    for n, array in enumerate((a, b, out)):
        values[made.slot(n + 1)] = array  # type: ignore[index]
    run_ptx(ptx, kernel.threads, kernel.blocks, values, [a, b, out], kernel.shared_bytes)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_maxwell_as_ptx() -> None:
    """Warps, a swizzle, strided tiles, shared memory."""
    from tests.support.schedules import maxwell

    a, b, out = operands(64, 64, 16)
    by_ptx(maxwell(), a, b, out)
    check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_tiles_over_the_edge_as_ptx() -> None:
    from tests.support.schedules import maxwell

    a, b, out = operands(70, 35, 13)
    by_ptx(maxwell(), a, b, out)
    check(out, a, b)
    code = maxwell().compile(*[KnownMatrix(np.dtype("f4"), "col", 16, is_partial=True)] * 3)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0


@pytest.mark.kin(5)
@pytest.mark.compile
def test_prefetch_as_ptx() -> None:
    from tests.support.schedules import maxwell

    a, b, out = operands(64, 64, 24)
    by_ptx(maxwell(prefetch=True), a, b, out)
    check(out, a, b)
    code = maxwell(prefetch=True).compile(*[("f4", "col")] * 3)
    assert code.usage.spill_stores == code.usage.stack_bytes == 0 and "cp.async" in code.ptx


@pytest.mark.compile
def test_a_users_micro_kernel_as_ptx() -> None:
    from tests.specs.test_schedules import with_micro_kernel

    a, b, out = operands(16, 16, 8, orders="CCC")
    by_ptx(with_micro_kernel(), a, b, out)
    check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_wmma_as_ptx() -> None:
    """Fragments, by a smaller sample."""
    from gemmkit.specs.products import cuda_wmma_sample

    a, b, out = operands(128, 128, 128, "f2", "CFC")
    by_ptx(cuda_wmma_sample, a, b, out)
    check(out, a, b)


@pytest.mark.kin(5)
@pytest.mark.compile
def test_the_cache_knows_a_schedule(tmp_path: Any, own_cache: Path, replaced: Seeded) -> None:
    """What a launch compiles is kept by a text of all that is in it: another swizzle is another kernel, the same one is found."""
    from gemmkit.runtime import compile as compiling
    from tests.support.schedules import maxwell

    built: list[str] = []
    real = compiling.assemble

    def counted(ptx: str, arch: str) -> Any:
        built.append(ptx)
        return real(ptx, arch)

    def entry(schedule: Any) -> Any:
        infos = tuple(describe(x) for x in operands(64, 64, 16))
        lowered = kernel_of(schedule, *[matrix_of("a", ("f4", "col"))] * 3)
        kernel = Launch(scheduled, lowered.root, lowered.threads, 1, lowered.shared_bytes)
        return kernel.launchable((True, True, False), infos, H100).entry()

    replaced(compiling, "assemble", counted)
    first = entry(maxwell(swizzle=lambda i: i ^ 3))
    assert entry(maxwell(swizzle=lambda i: i ^ 3)).cubin == first.cubin and len(built) == 1
    entry(maxwell(swizzle=lambda i: i ^ 5))
    assert len(built) == 2


# ==========================================================================================================================
# Swizzled tiles, prefetches and direct stores, compiled: the expected instructions, no spill, stack or call; and run as PTX.

HALVES = (("f2", "row"), ("f2", "col"), ("f4", "row"))
FLOATS = (("f4", "col"),) * 3
EDGES = tuple(KnownMatrix(np.dtype(dtype), order, 16, is_partial=True) for dtype, order in HALVES)


def both(how: Any, **more: Any) -> Any:
    return tensor_cores(how, how, **more)


def copies(step: Any) -> Any:
    return step.swizzle(XOR).prefetch


def registers(step: Any) -> Any:
    return step.swizzle(XOR).prefetch.through(RF)


#: (schedule, matrices, opcodes of the main loop, opcodes of all with how many).
COMPILED = {
    "swizzled": (both(lambda s: s.swizzle(XOR)), HALVES, {"HMMA": 64, "LDSM": 24, "LDG": 8, "STS": 8}, {"STG.E.64": 32, "LDG.E.128": 8}),
    "wmma to global": (both(lambda s: s.pad(8)), HALVES, {"HMMA": 64, "LDSM": 24}, {"STG.E.64": 32, "STS.128": 8}),
    "copies": (both(copies), HALVES, {"HMMA": 64, "LDSM": 24, "LDGSTS": 8, "STS": 0, "LDG": 0}, {"LDGSTS.E.BYPASS": 16}),
    "registers": (both(registers), HALVES, {"HMMA": 64, "LDSM": 24, "LDG": 8, "STS": 8}, {"LDG.E.128": 16, "STS.128": 16}),
    "copies over the edge": (both(copies), EDGES, {"HMMA": 64, "LDSM": 24}, {}),
    "threads, swizzled": (maxwell(pad=0, b_swizzle=XOR), FLOATS, {"FFMA": 512, "LDS": 32}, {}),
    "threads, registers": (maxwell(prefetch=True, through="ab"), FLOATS, {"FFMA": 512, "LDS": 32}, {}),
}


@pytest.mark.sample(5)
@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.parametrize("name", COMPILED)
def test_machine_code(name: str) -> None:
    schedule, kinds, loop, whole = COMPILED[name]
    code = schedule.compile(*kinds)
    assert (code.usage.spill_stores, code.usage.spill_loads, code.usage.stack_bytes) == (0, 0, 0)
    assert not re.search(r"\bcall\b", code.ptx)
    text = disassemble(code.cubin)
    assert {opcode: main_loop(text).count(opcode) for opcode in loop} == loop
    full = instruction_counts(text, full=True)
    assert {opcode: sum(n for found, n in full.items() if found.startswith(opcode)) for opcode in whole} == whole


@pytest.mark.sample(5)
@pytest.mark.compile
@pytest.mark.kin(5)
def test_rows_at_immediates() -> None:
    """A swizzle costs its XOR once for the tiles of a step that lie whole patterns apart: 4 of A's and 2 of B's in each of 4 steps."""
    schedule, kinds, _, _ = COMPILED["swizzled"]
    text = disassemble(schedule.compile(*kinds).cubin)
    assert len(re.findall(r"LDSM[^\n]*\[R\d+\+UR\d+\+0x|LDSM[^\n]*\[R\d+\+0x", text)) >= 16
    assert main_loop(text).count("LOP3") <= 24                # of each of 24 rows for itself they would be 48


AS_PTX = {
    "swizzled": (both(lambda s: s.swizzle(XOR), **SMALL), (64, 64, 64), "CFC"),
    "columns": (both(lambda s: s.swizzle(XOR), **SMALL), (64, 128, 32), "CFF"),
    "wmma to global": (both(lambda s: s.pad(8), **SMALL), (64, 64, 64), "CFC"),
    "copies": (both(copies, **SMALL), (64, 64, 96), "CFC"),
    "copies over the edge": (both(copies, **SMALL), (60, 56, 40), "CFC"),
    "registers": (both(registers, **SMALL), (64, 64, 96), "CFC"),
    "registers over the edge": (both(registers, **SMALL), (60, 55, 37), "CFC"),
}


@pytest.mark.sample(5)
@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.parametrize("name", AS_PTX)
def test_as_ptx_with_swizzles(name: str) -> None:
    schedule, sizes, order = AS_PTX[name]
    a, b, out = operands(*sizes, np.float16, order)
    by_ptx(schedule, a, b, out)
    check(out, a, b)


@pytest.mark.sample(5)
@pytest.mark.compile
@pytest.mark.kin(5)
@pytest.mark.parametrize("how", [dict(pad=0, b_swizzle=XOR), dict(prefetch=True, through="a"), dict(b_layout="[(8,(4,16)):(4,(1,32))]")],
                         ids=["swizzle", "registers", "layout"])
@pytest.mark.parametrize("sizes", [(64, 64, 24), (60, 34, 12)])
def test_threads_as_ptx(how: dict, sizes: tuple) -> None:
    a, b, out = operands(*sizes)
    by_ptx(maxwell(**how), a, b, out)
    check(out, a, b)
