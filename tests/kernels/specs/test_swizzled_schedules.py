"""Schedules with swizzled tiles, prefetches and sums that go straight to global memory: right, without races, and no two accesses
of a warp in one bank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.shapes import Shape, Swizzle
from gemmkit.specs.moves import CopyLine
from gemmkit.specs.schedule import FR, RF, SH, SRC, XOR, ColMajor, Move, RowMajor, ScheduleError, Thread, Warp
from gemmkit.specs.tensors import THREAD, T
from tests.support.banks import conflicts, recorded
from tests.support.schedules import maxwell, operands, tensor_cores

pytestmark = pytest.mark.sample(4)

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

@pytest.mark.kin(5)
@pytest.mark.parametrize(("a", "b"), [(xor, xor), (xor, pad), (pad, xor)], ids=["both", "a", "b"])
@pytest.mark.parametrize("k", [32, 64])
def test_rows_of_ldmatrix_meet_in_no_bank(a: Any, b: Any, k: int) -> None:
    """Lines of 64 and of 128 bytes: two and one in what the banks serve at a time."""
    seen = product(tensor_cores(a, b, block=(64, 64, k), warp=(32, 32)), operands(64, 64, 2 * k, np.float16, "CFC"), seed=1)
    assert seen.loads and conflicts(seen.loads) == 0
    assert conflicts(seen.stores) == 0 or (pad in (a, b) and k == 32)        # lines of 80 bytes: the pad's stores meet


def test_without_a_swizzle_they_meet() -> None:
    """What is counted is there: one operand as it comes."""
    seen = product(tensor_cores(lambda step: step, xor, **SMALL), operands(64, 64, 32, np.float16, "CFC"))
    assert conflicts(seen.loads) > 0


@pytest.mark.parametrize("storage", [(RowMajor, RowMajor), (ColMajor, ColMajor), (ColMajor, RowMajor)])
def test_tiles_that_are_transposed(storage: tuple) -> None:
    """ldmatrix.trans, where the instruction wants the other order. Threads then store element by element."""
    how = tensor_cores(*(lambda step, order=order: step.storage(order).swizzle(XOR) for order in storage), **SMALL)
    seen = product(how, operands(64, 64, 64, np.float16, "CFC"), seed=2)
    assert conflicts(seen.loads) == 0


@pytest.mark.kin(5)
@pytest.mark.parametrize("order", ["CFC", "CFF"])
@pytest.mark.parametrize("how", [xor, pad], ids=["mma.sync", "wmma"])
@pytest.mark.parametrize("sums", [np.float32, np.float16])
def test_sums_straight_to_global_memory(how: Any, order: str, sums: Any) -> None:
    a, b, out = operands(128, 64, 64, np.float16, order)
    product(tensor_cores(how, how, **SMALL), (a, b, out.astype(sums, order="K")), atol=1e-4 if sums == np.float32 else 0.06)


def test_bfloat16() -> None:
    import ml_dtypes

    a, b, out = operands(64, 64, 64, np.float32, "CFC")
    product(tensor_cores(xor, xor, **SMALL), (a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16, order="K"), out), atol=1e-3)


@pytest.mark.kin(5)
def test_sums_by_shared_memory() -> None:
    """Pairs of mma.sync's, and a second fragment's memory."""
    product(tensor_cores(xor, xor, end=BY_SHARED, **SMALL), operands(64, 128, 64, np.float16, "CFC"), seed=3)


@pytest.mark.kin(5)
@pytest.mark.parametrize("sizes", [(60, 56, 40), (33, 64, 32), (2, 3, 8)])
def test_fragments_over_the_edge(sizes: tuple) -> None:
    """mma.sync's pairs know where they are; wmma stores whole tiles."""
    given = operands(*sizes, np.float16, "CFC")
    product(tensor_cores(xor, xor, **SMALL), given, seed=4)
    product(tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.swizzle(XOR).prefetch, **SMALL), given, seed=5)
    with pytest.raises(ScheduleError, match="(?s)(wmma stores whole ones; store to SH first|aligned to [48] bytes, not 16).*schedules.py"):
        product(tensor_cores(pad, pad, **SMALL), given)


def test_matrices_that_wmma_cannot_store_to() -> None:
    """Rows of 4-byte elements, of which the second begins at no multiple of 16 bytes."""
    a, b, _ = operands(64, 64, 32, np.float16, "CFC")
    out = np.zeros((64, 65), np.float32)[:, :64]
    with gk.emulate(), pytest.raises(ScheduleError, match="global memory is aligned to 4 bytes, not 16"):
        tensor_cores(pad, pad, **SMALL)(a, b, out=out)
    product(tensor_cores(xor, xor, **SMALL), (a, b, out))


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

@pytest.mark.kin(5)
@pytest.mark.parametrize("swizzle", [XOR, lambda i: i ^ (i >> 4 & 28), Swizzle((4, 28)), Swizzle((5, 28), (6, 12))], ids=["xor", "function", "terms", "two terms"])
def test_b_is_turned_without_a_pad(swizzle: Any) -> None:
    """The listing's B comes by columns and is read by rows: 8 lanes store to one column of shared memory."""
    seen = product(maxwell(pad=0, b_swizzle=swizzle), operands(64, 64, 16), seed=6)
    if swizzle == XOR:
        assert conflicts(seen.stores) == 0


@pytest.mark.kin(5)
def test_banks_as_the_pad_has_them() -> None:
    """The swizzle leaves no more conflicts than the paper's four elements, and takes no memory for it."""
    given = operands(64, 64, 16)
    bare, padded, swizzled = (product(maxwell(pad=pad, b_swizzle=how), given) for pad, how in ((0, None), (4, None), (0, XOR)))
    assert conflicts(swizzled.stores) == conflicts(padded.stores) == 0 < conflicts(bare.stores)
    assert conflicts(swizzled.loads) <= conflicts(padded.loads)


@pytest.mark.kin(5)
@pytest.mark.parametrize("layout", ["[(8,64):(68,1)]", "[(8,(4,16)):(4,(1,32))]", "[((2,4),64):((256,64),1)]"])
def test_layouts_by_shape(layout: str) -> None:
    """Padded, in panels of four columns, rows in another order: any dims:strides."""
    product(maxwell(b_layout=layout), operands(64, 64, 16), seed=8)
    product(maxwell(b_layout=Shape.parse(layout)), operands(64, 64, 16))


# -- prefetches -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", [lambda s: s.prefetch, lambda s: s.prefetch.through(RF)], ids=["cp.async", "registers"])
@pytest.mark.parametrize("sizes", [(64, 64, 96), (60, 56, 40), (128, 64, 32)])
def test_prefetched_fragments(how: Any, sizes: tuple) -> None:
    seen = product(tensor_cores(lambda s: how(xor(s)), lambda s: how(xor(s)), **SMALL), operands(*sizes, np.float16, "CFC"), seed=7)
    assert conflicts(seen.loads) == 0


def test_one_by_copies_and_one_by_registers() -> None:
    how = tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.pad(8).prefetch.through(RF), **SMALL)
    product(how, operands(64, 64, 96, np.float16, "CFC"), seed=9)


@pytest.mark.kin(5)
def test_lines_that_only_registers_bring() -> None:
    """Rows of 65 elements: aligned to 2 bytes."""
    a, b, out = operands(64, 64, 65, np.float16, "CFC")
    with gk.emulate(), pytest.raises(ScheduleError, match=r"(?s)aligned to 2 bytes, not 16.*\.prefetch\.through\(RF\)"):
        tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.swizzle(XOR).prefetch, **SMALL)(a, b, out=out)
    both = [lambda s: s.swizzle(XOR).prefetch.through(RF)] * 2
    product(tensor_cores(*both, **SMALL), (a, b, out), seed=10)


def test_copies_at_the_edge_have_their_own_instruction() -> None:
    from gemmkit.specs import instruction

    source = T[4].fp32.GL.replaced(unit=0)
    assert isinstance(instruction("CopyAsync", THREAD, source, T[4].fp32.SH), CopyLine)
    found = instruction("CopyAsync", THREAD, source.replaced(is_partial=True), T[4].fp32.SH)
    assert type(found).__name__ == "CopyLineOrZeros" and "cp.async" in found.becomes


def test_what_is_explained() -> None:
    text = tensor_cores(lambda s: s.swizzle(XOR).prefetch, lambda s: s.pad(8).prefetch.through(RF)).explain(("f2", "row"), ("f2", "col"), ("f4", "row"))
    for words in ("fp16.SH, [(128,64):(64,1)], Swizzle((3, 56)), two stages", "behind the step to fp16.SH, [(64,128):(1,72)], two stages",
                  "[8,4].fp16.RF of each Thread, a step ahead", "ldmatrix.sync.aligned.m8n8.x4", "2 x mma.sync.aligned.m16n8k16",
                  "st of two neighbours a lane"):
        assert words in text, words


def test_no_template_has_them() -> None:
    with pytest.raises(gk.ConfigError, match="the template's shared tiles are padded"):
        tensor_cores(xor, xor, end=BY_SHARED, **SMALL).config(("f2", "row"), ("f2", "col"), ("f4", "row"))
    assert FR == "FR"


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


@pytest.mark.gpu
@pytest.mark.parametrize("how", [dict(pad=0, b_swizzle=XOR), dict(prefetch=True), dict(prefetch=True, through="ab")], ids=["xor", "copies", "registers"])
@pytest.mark.parametrize("sizes", [(512, 512, 512), (500, 300, 204)])
def test_threads_on_the_gpu(how: dict, sizes: tuple) -> None:
    import cupy

    a, b, out = (cupy.asfortranarray(cupy.asarray(x)) for x in operands(*sizes))
    maxwell(**how)(a, b, out=out)
    cupy.testing.assert_allclose(out, a.astype("f8") @ b.astype("f8"), atol=1e-3)
