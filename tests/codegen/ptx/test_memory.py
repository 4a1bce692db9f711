"""Loads and stores of 1 to 16 bytes: right in the emulator, one instruction each in PTX, the same on the GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.ptx.memory import (
    load_global,
    load_shared,
    load_words,
    pack_words,
    shared,
    store_global,
    store_shared,
    store_words,
)
from gemmkit.ptx.special import barrier, thread_index
from tests.support.harness import Out, compiled, emulated, leaves_nothing, lines_with, on_device, same_bits

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(d) for d in ("i1", "u1", "i2", "f2", BF16, "i4", "u4", "f4", "i8", "f8")]
#: Every width of access for every type: (dtype, elements).
WIDTHS = [(d, n) for d in DTYPES for n in (1, 2, 4, 8, 16) if d.itemsize * n <= 16]
every_width = pytest.mark.parametrize("dtype, count", WIDTHS, ids=[f"{d}x{n}" for d, n in WIDTHS])


@dataclass(frozen=True)
class Access(gk.Component):
    dtype: Any
    count: int
    axis: int = 0
    stride: int = 0


def numbers(rng: np.random.Generator, dtype: np.dtype, *shape: int) -> np.ndarray:
    """Random bit patterns, without NaNs."""
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)
    with np.errstate(invalid="ignore"):
        return np.where(bits == bits, bits, np.ones((), dtype))


def bytes_of(line: str) -> int:
    """How many bytes a load or store moves."""
    match = re.match(r"(?:ld|st)\.\w+(?:\.nc)?(?:\.v(\d))?\.[a-z]+(\d+)", line)
    assert match, line
    return int(match[1] or 1) * int(match[2]) // 8


def copy_global(out: Any, a: Any, access: Any) -> None:
    at = thread_index() * access.count
    store_global(out, 0, (at,), (0,), load_global(a, 0, (at,), (0,), access.count))


@pytest.mark.sample(9)
@every_width
def test_global_memory_in_one_access(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, out, access = numbers(rng, dtype, 32 * count), Out((32 * count,), dtype), Access(dtype, count)
    (result,) = emulated(copy_global, out, a, access)
    assert same_bits(result, a)
    ptx = compiled(copy_global, out, a, access)
    assert [bytes_of(line) for line in lines_with(ptx, "ld.global")] == [dtype.itemsize * count]
    assert [bytes_of(line) for line in lines_with(ptx, "st.global")] == [dtype.itemsize * count]
    assert leaves_nothing(ptx)


def through_shared(out: Any, a: Any, access: Any) -> None:
    """Write in order, read in reverse order."""
    n, at = access.count, thread_index() * access.count
    pointer = shared(access.dtype, 256)
    store_shared(pointer, at, 0, load_global(a, 0, (at,), (0,), n))
    barrier()
    store_global(out, 0, (at,), (0,), load_shared(pointer, 31 * n, 0 - at, n))


@pytest.mark.sample(13)
@every_width
def test_shared_memory_in_one_access(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, out, access = numbers(rng, dtype, 32 * count), Out((32 * count,), dtype), Access(dtype, count)
    (result,) = emulated(through_shared, out, a, access, shared=256 + a.nbytes)
    assert same_bits(result, a.reshape(32, count)[::-1].reshape(-1))
    ptx = compiled(through_shared, out, a, access)
    for instruction in ("ld.shared", "st.shared"):
        assert [bytes_of(line) for line in lines_with(ptx, instruction)] == [dtype.itemsize * count]
    assert leaves_nothing(ptx)


def as_words(out: Any, a: Any, access: Any) -> None:
    """Words from memory, and words packed from elements, both through shared memory."""
    n, at = access.count, thread_index() * access.count
    pointer = shared(access.dtype, 0)
    store_words(pointer, at, 0, load_words(a, 0, (at,), (0,), n))
    store_words(pointer, at, 32 * n, pack_words(load_global(a, 0, (at,), (0,), n)))
    store_global(out, 0, (at,), (0,), load_shared(pointer, at, 0, n))
    store_global(out, 0, (at,), (32 * n,), load_shared(pointer, at, 32 * n, n))


WORDS = [(d, n) for d, n in WIDTHS if d.itemsize * n % 4 == 0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype, count", WORDS, ids=[f"{d}x{n}" for d, n in WORDS])
def test_elements_as_words(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, out, access = numbers(rng, dtype, 32 * count), Out((64 * count,), dtype), Access(dtype, count)
    (result,) = emulated(as_words, out, a, access, shared=2 * a.nbytes)
    assert same_bits(result, np.concatenate([a, a]))
    ptx = compiled(as_words, out, a, access)
    assert {bytes_of(line) for line in lines_with(ptx, "st.shared")} == {dtype.itemsize * count}
    assert leaves_nothing(ptx)


# -- what the alignment class of a view allows -------------------------------------------------------------------------

def copy_rows(out: Any, a: Any, access: Any) -> None:
    store_global(out, 1, (thread_index(), 0), (0, 0), load_global(a, 1, (thread_index(), 0), (0, 0), access.count))


def copy_columns(out: Any, a: Any, access: Any) -> None:
    store_global(out, 0, (0, thread_index()), (0, 0), load_global(a, 0, (0, thread_index()), (0, 0), access.count))


@pytest.mark.sample(8)
@pytest.mark.parametrize("columns, count, accesses", [
    (8, 8, [16, 16]), (8, 4, [16]), (6, 4, [8, 8]), (6, 2, [8]), (5, 4, [4, 4, 4, 4]), (12, 12, [16, 16, 16]),
    (4, 3, [4, 4, 4]), (6, 6, [8, 8, 8]),
])
def test_accesses_are_as_wide_as_the_rows_are_aligned(columns: int, count: int, accesses: list[int],
                                                     rng: np.random.Generator) -> None:
    """float32 rows of ``columns`` elements: one row's start says how every row is aligned."""
    dtype = np.dtype("f4")
    for kernel, order in ((copy_rows, "C"), (copy_columns, "F")):
        shape = (32, columns) if order == "C" else (columns, 32)
        a = np.asarray(numbers(rng, dtype, *shape), order=order)                     # type: ignore[call-overload]
        out, access = Out(shape, dtype, order), Access(dtype, count)
        ptx = compiled(kernel, out, a, access)
        assert [bytes_of(line) for line in lines_with(ptx, "ld.global")] == accesses
        assert [bytes_of(line) for line in lines_with(ptx, "st.global")] == accesses
        (result,) = emulated(kernel, out, a, access)
        part = (slice(None), slice(count)) if order == "C" else (slice(count), slice(None))
        assert same_bits(np.ascontiguousarray(result[part]), np.ascontiguousarray(a[part]))


def against_the_grain(out: Any, a: Any, access: Any) -> None:
    """Elements along the axis that is not contiguous."""
    store_global(out, 1, (thread_index(), 0), (0, 0), load_global(a, 1, (thread_index(), 0), (0, 0), access.count))


def test_strided_elements_are_loaded_one_by_one(rng: np.random.Generator) -> None:
    a = np.asfortranarray(numbers(rng, np.dtype("f4"), 32, 8))
    out, access = Out((32, 8), np.float32), Access(np.dtype("f4"), 8)
    ptx = compiled(against_the_grain, out, a, access)
    assert [bytes_of(line) for line in lines_with(ptx, "ld.global")] == [4] * 8
    assert [bytes_of(line) for line in lines_with(ptx, "st.global")] == [16] * 2
    (result,) = emulated(against_the_grain, out, a, access)
    assert np.array_equal(result, a)


def shifted(out: Any, a: Any, access: Any) -> None:
    store_global(out, 0, (4 * thread_index(),), (0,), load_global(a, 0, (4 * thread_index(),), (access.stride,), 4))


def shifted_in_shared(out: Any, a: Any, access: Any) -> None:
    pointer = shared(access.dtype, 0)
    store_shared(pointer, 4 * thread_index(), access.stride, load_global(a, 0, (4 * thread_index(),), (0,), 4))


def test_the_compile_time_offset_is_the_immediate(rng: np.random.Generator) -> None:
    a, access = numbers(rng, np.dtype("f4"), 256), Access(np.dtype("f4"), 4, stride=64)
    loads = lines_with(compiled(shifted, Out((128,), "f4"), a, access), "ld.global")
    assert len(loads) == 1 and re.search(r"\[%rd\d+\+256\]", loads[0])
    stores = lines_with(compiled(shifted_in_shared, Out((128,), "f4"), a, access), "st.shared")
    assert len(stores) == 1 and re.search(r"\[%rd?\d+\+256\]", stores[0])
    (result,) = emulated(shifted, Out((128,), "f4"), a, access)
    assert np.array_equal(result, a[64:192])


# -- faults that hardware would not report, or not so clearly ------------------------------------------------------------

@pytest.mark.parametrize("kernel", [shifted, shifted_in_shared])
def test_the_emulator_refuses_misaligned_accesses(kernel: Any, rng: np.random.Generator) -> None:
    a = numbers(rng, np.dtype("f4"), 256)
    with pytest.raises(EmulatorError, match="8 past a multiple of 16"):
        emulated(kernel, Out((128,), "f4"), a, Access(np.dtype("f4"), 4, stride=2), shared=4096)


@pytest.mark.parametrize("kernel, message", [(shifted, "argument 1"), (shifted_in_shared, "shared memory")])
def test_the_emulator_refuses_accesses_out_of_range(kernel: Any, message: str, rng: np.random.Generator) -> None:
    a = numbers(rng, np.dtype("f4"), 128)
    with pytest.raises(EmulatorError, match=message):
        emulated(kernel, Out((128,), "f4"), a, Access(np.dtype("f4"), 4, stride=4), shared=512)


# -- against the hardware ------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gpu_moves_the_same_bytes(dtype: np.dtype, rng: np.random.Generator) -> None:
    for _, count in (width for width in WIDTHS if width[0] == dtype):
        a, out, access = numbers(rng, dtype, 32 * count), Out((32 * count,), dtype), Access(dtype, count)
        kernels = [(copy_global, out), (through_shared, out)]
        if dtype.itemsize * count % 4 == 0:
            kernels.append((as_words, Out((64 * count,), dtype)))
        for kernel, where in kernels:
            launch = dict(shared=256 + 2 * a.nbytes)
            (there,) = on_device(kernel, where, a, access, **launch)
            (here,) = emulated(kernel, where, a, access, **launch)
            assert same_bits(there, here), (kernel.__name__, count)


@pytest.mark.gpu
def test_the_gpu_moves_rows_of_any_alignment(rng: np.random.Generator) -> None:
    for columns in (8, 6, 5):
        a = numbers(rng, np.dtype("f4"), 32, columns)
        out, access = Out((32, columns), np.float32), Access(np.dtype("f4"), columns)
        (there,) = on_device(copy_rows, out, a, access)
        assert same_bits(there, a)
        (there,) = on_device(against_the_grain, out, np.asfortranarray(a), access)
        assert same_bits(there, a)
