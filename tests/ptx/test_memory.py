"""Loads, stores, packed words and counters in global memory: right in the emulator, one instruction each in PTX, the same on
the GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.collectives.operand import clipped, stored_by_neighbours
from gemmkit.lang.registers import interleave, split
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, FPUOp, MMAOp, dual
from gemmkit.ptx.barriers import ORDERS, atomic_add, await_counter, set_counter
from gemmkit.ptx.memory import (
    first_elements,
    interleave_words,
    load_global,
    load_shared,
    load_words,
    load_words_within,
    pack_words,
    shared,
    store_global,
    store_shared,
    store_words,
    unpack_words,
)
from gemmkit.ptx.special import barrier, block_x, rolled, thread_index
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100, assumed
from gemmkit.tuning import choose
from tests.ptx_machine.launch import Ptx
from tests.support.harness import Out, Runtime, compiled, emulated, leaves_nothing, lines_with, on_device, same_bits
from tests.support.lang.typing import INDEX, result
from tests.support.machines import poison

# ==========================================================================================================================
# Loads and stores of 1 to 16 bytes: right in the emulator, one instruction each in PTX, the same on the GPU.

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


# ==========================================================================================================================
# `load_words_within`: what is beyond an array's end is zero, is not read, and takes no branch; products that load so, as PTX.

F16, F32 = np.dtype("f2"), np.dtype("f4")
DTYPES_WITHIN = [np.dtype(x) for x in ("i1", "f2", "f4", "f8")]


@dataclass(frozen=True)
class Line(gk.Component):
    dtype: Any
    count: int
    length: int                        # of a row


def lines(out: Any, a: Any, case: Any) -> None:
    """Thread t loads from element t * count + 1 of the second row on, which ends in the middle of them."""
    at = thread_index() * case.count + 1
    words = load_words_within(a, 1, (1, at), (0, 0), case.count, case.length - at)
    store_global(out, 0, (thread_index() * case.count,), (0,), unpack_words(case.dtype, words))


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
@pytest.mark.parametrize("short", range(4))
@pytest.mark.parametrize("nbytes", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES_WITHIN, ids=str)
def test_what_is_beyond_the_end_is_zero(dtype: np.dtype, nbytes: int, short: int, run: Any, rng: np.random.Generator) -> None:
    count = nbytes // dtype.itemsize
    length = 20 * count + 2 * short + 1
    a = rng.integers(1, 100, (2, length)).astype(dtype)
    (out,) = run(lines, Out((32 * count,), dtype), a, Line(dtype, count, length))
    expected = np.zeros(32 * count, dtype)
    expected[:length - 1] = a[1, 1:]
    assert same_bits(out, expected)


def test_there_is_no_branch() -> None:
    ptx = compiled(lines, Out((256,), F16), np.ones((2, 201), F16), Line(F16, 8, 201))
    assert leaves_nothing(ptx) and not lines_with(ptx, "bra") and len(lines_with(ptx, "ld.global")) == 5


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(32)
@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("kernel", ["singlestage", "multistage"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("sizes", [(33, 39, 21), (5, 35, 70)], ids=str)
def test_products_as_ptx(sizes: tuple[int, int, int], dtype: np.dtype, kernel: str, orders: str, rng: np.random.Generator) -> None:
    """All edges at once, by threads that load their operands; NaN around them in memory."""
    M, N, K = sizes
    layouts = [(RowMajor, ColMajor)["nt".index(order)](dtype) for order in orders]

    def matrix(rows: int, columns: int, order: str) -> np.ndarray:
        lines, length = (rows, columns) if order == "n" else (columns, rows)
        memory = poison((lines + 2, length), dtype)
        memory[1:-1] = rng.standard_normal((lines, length)).astype(dtype)
        return memory[1:-1] if order == "n" else memory[1:-1].T

    operator: Any = MMAOp(dtype="float16") if dtype == F16 else FPUOp(M=16, N=16, MB=4, NB=8)
    conf = gk.get_config(gemm_shape=gk.Tile(M=M, N=N, K=K), operator=operator, kernel=kernel, global_a_layout=layouts[0],
                         global_b_layout=layouts[1], global_d_layout=RowMajor(dtype))
    a, b, out = matrix(M, K, orders[0]), matrix(K, N, orders[1]), poison((M, N), dtype)
    with Ptx().session():
        plan = gk.plan(a, b, out=out, conf=conf)
        plan(a, b, out=out)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(out - expected) <= (2e-3 if dtype == F16 else 1e-5) * np.abs(expected).max())


def test_operands_that_are_clipped() -> None:
    """Of rows that begin anywhere; aligned ones are loaded 16 bytes at a time, and a semiring's edge is no zero."""
    conf = gk.get_config(gemm_shape=gk.Tile(M=64, N=64, K=64), operator=MMAOp(dtype="float16"), kernel="singlestage",
                         global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16))
    operand = conf.spec().a

    assert clipped(operand, describe(np.empty((64, 65), F16), "a"), 0).clipped
    assert not clipped(operand, describe(np.empty((64, 64), F16), "a"), 0).clipped
    assert not clipped(operand, describe(np.empty((64, 65), F16), "a"), np.inf).clipped
    assert not clipped(operand, None, 0).clipped


def test_hopper_loads_edges_as_what_is_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both operands' registers at once where these are few; what is wholly in range is not asked about."""
    monkeypatch.setattr(choose, "WORTH_COPYING", 0.0)      # the products as they are
    with gk.emulate(mapping="device"), assumed(H100):
        for M, N, K in ((1001, 1001, 1001), (333, 777, 455), (4097, 4097, 4097)):
            plan = gk.plan(np.empty((M, K), F16), np.empty((K, N), F16))
            producer: Any = plan._compiled.spec.producer
            assert producer.holds and producer.holds_clipped and producer.together and not producer.holds_whole
        whole: Any = gk.plan(np.empty((1024, 1024), F16), np.empty((1024, 1024), F16))._compiled.spec.producer
        assert not hasattr(whole, "holds_clipped")         # TMA brings both


def test_stores_by_neighbours() -> None:
    """As many elements a thread as one access takes."""
    conf = gk.get_config(gemm_shape=gk.Tile(M=64, N=64, K=64), operator=MMAOp(dtype="float16"), kernel="singlestage",
                         global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16), global_d_layout=RowMajor(F16))
    operand = conf.spec().d
    for columns, length in ((64, 8), (68, 4), (66, 2), (65, 1)):
        array = describe(np.empty((64, columns), F16)[:, :64], "out")
        found = stored_by_neighbours(operand, array, (64, 64), conf.epilogue)
        assert found.thread == gk.Tile(M=1, N=length) and found.warp.size.N == 32 == operand.tile.extents[1], columns


# ==========================================================================================================================
# `pack_words`, `unpack_words`, `interleave_words` and `rolled`: the same in the emulator and on the GPU, and what they leave in PTX.

DTYPES_WORDS = [np.dtype(x) for x in ("i1", "u1", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "i2", "f2", ml_dtypes.bfloat16, "i4",
                                "f4", "i8", "f8")]
CASES = [(dtype, nbytes // dtype.itemsize) for dtype in DTYPES_WORDS for nbytes in (4, 8, 16) if nbytes >= dtype.itemsize]
every_case = pytest.mark.parametrize("dtype, count", CASES, ids=[f"{d}x{n}" for d, n in CASES])


@dataclass(frozen=True)
class Words(gk.Component):
    dtype: Any
    count: int


def numbers_of_words(rng: np.random.Generator, dtype: np.dtype, count: int) -> np.ndarray:
    """Random bit patterns, without NaNs."""
    bits = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(bits.astype("f8")), np.ones((), dtype), bits) if dtype.kind not in "iu" else bits


def loaded_as_words(out: Any, a: Any, case: Any) -> None:
    """Loaded as words, and looked at as elements."""
    at = thread_index() * case.count
    store_global(out, 0, (at,), (0,), unpack_words(case.dtype, load_words(a, 0, (at,), (0,), case.count)))


def there_and_back(out: Any, a: Any, case: Any) -> None:
    at = thread_index() * case.count
    values = load_global(a, 0, (at,), (0,), case.count)
    store_global(out, 0, (at,), (0,), unpack_words(case.dtype, pack_words(values)))


@pytest.mark.sample(5)
@every_case
@pytest.mark.parametrize("kernel", [loaded_as_words, there_and_back])
def test_words_keep_every_bit(kernel: Any, dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, out, case = numbers_of_words(rng, dtype, 32 * count), Out((32 * count,), dtype), Words(dtype, count)
    assert same_bits(emulated(kernel, out, a, case)[0], a)
    ptx = compiled(kernel, out, a, case)
    assert leaves_nothing(ptx) and len(lines_with(ptx, "ld.global")) == len(lines_with(ptx, "st.global")) == 1


@pytest.mark.gpu
@pytest.mark.sample(10)
@every_case
def test_words_keep_every_bit_on_the_gpu(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, out, case = numbers_of_words(rng, dtype, 32 * count), Out((32 * count,), dtype), Words(dtype, count)
    for kernel in (loaded_as_words, there_and_back):
        assert same_bits(on_device(kernel, out, a, case)[0], a)


RECORDS = [(COMPLEX.number_dtype("f2"), 4), (dual(2).number_dtype("f2"), 4), (QUATERNION.number_dtype("f2"), 2),
           (DUAL.number_dtype("i1"), 8), (dual(2).number_dtype("f4"), 1), (COMPLEX.number_dtype(ml_dtypes.bfloat16), 1)]


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
@pytest.mark.parametrize("dtype, count", RECORDS, ids=[f"{len(d.names)}x{d[0]}x{n}" for d, n in RECORDS])
@pytest.mark.parametrize("kernel", [loaded_as_words, there_and_back])
def test_words_keep_numbers(kernel: Any, dtype: np.dtype, count: int, run: Any, rng: np.random.Generator) -> None:
    """Numbers of several parts, which may be wider or narrower than a word."""
    parts = numbers_of_words(rng, dtype[0], 32 * count * len(dtype.names or ()))
    out = Out((32 * count,), dtype)
    assert run(kernel, out, parts.view(dtype), Words(dtype, count))[0].tobytes() == parts.tobytes()


# -- the first of a word ---------------------------------------------------------------------------------------------------

def first_of_each(out: Any, a: Any, case: Any) -> None:
    """Thread t keeps t % 8 - 2 of its elements: none, some, or more than there are."""
    at = thread_index() * case.count
    word = load_words(a, 0, (at,), (0,), case.count)[0]
    kept = first_elements(case.dtype, word, thread_index() % 8 - 2)
    store_global(out, 0, (at,), (0,), unpack_words(case.dtype, (kept,)))


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
@pytest.mark.parametrize("dtype", ["i1", ml_dtypes.float8_e4m3fn, "f2", ml_dtypes.bfloat16, "f4"], ids=lambda d: np.dtype(d).name)
def test_the_first_of_a_word_are_kept(dtype: Any, run: Any, rng: np.random.Generator) -> None:
    dtype = np.dtype(dtype)
    count = 4 // dtype.itemsize
    a = numbers_of_words(rng, dtype, 32 * count)
    (out,) = run(first_of_each, Out(a.shape, dtype), a, Words(dtype, count))
    kept = np.arange(count) < (np.arange(32) % 8 - 2)[:, None]
    assert same_bits(out, np.where(kept, a.reshape(32, count), np.zeros((), dtype)).reshape(-1))


def test_to_keep_some_of_a_word_takes_no_branch() -> None:
    ptx = compiled(first_of_each, Out((64,), "f2"), np.zeros(64, "f2"), Words(np.dtype("f2"), 2))
    assert leaves_nothing(ptx) and not lines_with(ptx, "bra")


# -- combs -----------------------------------------------------------------------------------------------------------------

def woven(out: Any, a: Any, case: Any) -> None:
    """A thread's elements as ``teeth`` words at first: column by column."""
    at = thread_index() * case.count
    words = load_words(a, 0, (at,), (0,), case.count)
    store_global(out, 0, (at,), (0,), unpack_words(case.dtype, interleave_words(split(words, case.length))))


def interleaved(out: Any, a: Any, case: Any) -> None:
    at = thread_index() * case.count
    teeth = split(load_global(a, 0, (at,), (0,), case.count), 2 * case.length)
    store_global(out, 0, (at,), (0,), interleave(teeth))


@dataclass(frozen=True)
class Teeth(Words):
    """``length`` words each."""

    length: int = 1


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
@pytest.mark.parametrize("kernel", [woven, interleaved])
@pytest.mark.parametrize("teeth, length", [(8, 4), (8, 2), (4, 1), (2, 4)])
def test_words_are_woven(teeth: int, length: int, kernel: Any, run: Any, rng: np.random.Generator) -> None:
    case = Teeth(np.dtype("f2"), 2 * teeth * length, length)
    a = numbers_of_words(rng, case.dtype, 32 * case.count)
    (out,) = run(kernel, Out(a.shape, a.dtype), a, case)
    assert same_bits(out, a.reshape(32, teeth, 2 * length).transpose(0, 2, 1).reshape(-1))


def test_weaving_is_an_instruction_a_word() -> None:
    case = Teeth(np.dtype("f2"), 64, 4)
    ptx = compiled(woven, Out((32 * 64,), "f2"), np.zeros(32 * 64, "f2"), case)
    assert leaves_nothing(ptx) and len(lines_with(ptx, "prmt.b32")) == 32


def of_three_teeth(out: Any, a: Any, case: Any) -> None:
    out[0] = interleave_words(split(load_words(a, 0, (0,), (0,), 6), 1))[0]


def test_odd_teeth_are_not_woven() -> None:
    with pytest.raises(Exception, match="interleave_words"):
        compiled(of_three_teeth, Out((1,), "u4"), np.zeros(64, "f2"), Words(np.dtype("f2"), 6))


# -- at any address ---------------------------------------------------------------------------------------------------

def load_rows(out: Any, a: Any, case: Any) -> None:
    """A row of 16 bytes from the second column on: every thread's at another distance from a multiple of 16."""
    row = thread_index()
    store_global(out, 1, (row, 0), (0, 0), unpack_words(case.dtype, load_words(a, 1, (row, 0), (0, 1), case.count)))


@pytest.mark.parametrize("dtype", [d for d in DTYPES_WORDS if d.itemsize <= 4], ids=str)
@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_words_begin_anywhere(dtype: np.dtype, run: Any, rng: np.random.Generator) -> None:
    count = 16 // dtype.itemsize
    a = numbers_of_words(rng, dtype, 32 * (count + 1)).reshape(32, count + 1)
    (out,) = run(load_rows, Out((32, count), dtype), a, Words(dtype, count))
    assert same_bits(out, np.ascontiguousarray(a[:, 1:]))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [d for d in DTYPES_WORDS if d.itemsize <= 2], ids=str)
def test_words_from_anywhere_are_loaded_as_words(dtype: np.dtype) -> None:
    count = 16 // dtype.itemsize
    ptx = compiled(load_rows, Out((32, count), dtype), np.zeros((32, count + 1), dtype), Words(dtype, count))
    assert [line.split()[0] for line in lines_with(ptx, "ld.global")] == ["ld.global.u32"] * 5
    assert len(lines_with(ptx, "shf.r.wrap")) == 4


def a_second_element(out: Any, a: Any, case: Any) -> None:
    """The order within a word: the first element is in the low bits."""
    at = thread_index() * 4
    values = unpack_words(case.dtype, load_words(a, 0, (at,), (0,), 4))
    out[thread_index()] = values[1] - values[0]


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
@pytest.mark.parametrize("dtype", ["i1", "f2", "f4"])
def test_elements_are_in_order(dtype: str, run: Any) -> None:
    a = (np.arange(128) % 100).astype(dtype)
    a[1::4] += 3
    (out,) = run(a_second_element, Out((32,), dtype), a, Words(np.dtype(dtype), 4))
    assert (out == 4).all()


def test_what_is_no_words_is_refused() -> None:
    def of_floats(out: Any, case: Any) -> None:
        out[0] = unpack_words(case.dtype, (np.float32(1), np.float32(2)))[0]

    with pytest.raises(Exception, match="unpack_words"):
        compiled(of_floats, Out((1,), "f4"), Words(np.dtype("f4"), 1))


# -- rolled -----------------------------------------------------------------------------------------------------------

def counting(out: Any, a: Any, turns: int, is_rolled: bool) -> None:
    total, n = a[thread_index()], turns * 0
    while n < turns:
        total = total * 3 + a[(thread_index() + n) % 32]
        n = rolled(n + 1) if is_rolled else n + 1
    out[thread_index()] = total


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_rolled_changes_nothing(run: Any) -> None:
    a = np.arange(32, dtype=np.int32)
    (there,) = run(counting, Out((32,), np.int32), a, Runtime(7), True)
    (plain,) = run(counting, Out((32,), np.int32), a, Runtime(7), False)
    assert np.array_equal(there, plain)


def test_rolled_is_a_coordinate() -> None:
    assert result(lambda m: rolled(m), INDEX) == INDEX and result(lambda i: rolled(i), np.int32) == INDEX


def test_rolled_keeps_a_loop_one() -> None:
    """Of a known number of turns the compiler makes straight code, whose addresses take registers a producer does not have."""
    def loads(is_rolled: bool) -> int:
        return len(lines_with(compiled(counting, Out((32,), np.int32), np.zeros(32, np.int32), 6, is_rolled), "ld.global"))

    assert loads(True) == 2 < loads(False)


# ==========================================================================================================================
# Counters in global memory: what they count, what they order, and the instruction of each order.

BLOCKS = 4


def pass_on(out: Any, counts: Any, how: Any) -> None:
    """Each block adds to what the block before has written: an order that only the counter makes."""
    if thread_index() == 0:
        if block_x() == 0:
            set_counter(counts, 0, 0)
            set_counter(counts, 1, 7)
        else:
            await_counter(counts, 1, block_x() + 7, "acquire")
    barrier()
    before = 0 if block_x() == 0 else out[(block_x() - 1) * 32 + thread_index()]
    out[block_x() * 32 + thread_index()] = before + 1
    barrier()
    if thread_index() == 0:
        atomic_add(counts, 1, 1, how)


def test_blocks_in_turn() -> None:
    out, counts = emulated(pass_on, Out((32 * BLOCKS,), "i4"), Out((2,), "u4"), "release", blocks=BLOCKS)
    assert out.reshape(BLOCKS, 32).tolist() == [[n + 1] * 32 for n in range(BLOCKS)] and counts.tolist() == [0, 7 + BLOCKS]


@pytest.mark.gpu
def test_blocks_in_turn_on_the_device() -> None:
    def counted(out: Any, counts: Any) -> None:
        out[block_x() * 32 + thread_index()] = atomic_add(counts, 0, 2, "relaxed")

    out, counts = on_device(counted, Out((32 * BLOCKS,), "i4"), Out((1,), "u4"), blocks=BLOCKS)
    assert sorted(out.tolist()) == [2 * n - 1 for n in range(32 * BLOCKS)]                # outputs begin at 0xffffffff
    assert counts.tolist() == [64 * BLOCKS - 1]


@pytest.mark.parametrize("how", ["relaxed", "acquire"])
def test_an_addition_that_releases_nothing(how: str) -> None:
    with pytest.raises(errors.RaceError):
        emulated(pass_on, Out((32 * BLOCKS,), "i4"), Out((2,), "u4"), how, blocks=BLOCKS)


def test_a_number_that_never_comes() -> None:
    def waits(counts: Any) -> None:
        set_counter(counts, 0, 2)
        await_counter(counts, 0, 3, "relaxed")

    with pytest.raises(errors.DeadlockError, match="a counter that is 2 to become 3"):
        emulated(waits, Out((1,), "u4"))


def test_beyond_the_end() -> None:
    def beyond(counts: Any) -> None:
        atomic_add(counts, 1, 1, "relaxed")

    with pytest.raises(errors.BoundsError):
        emulated(beyond, Out((1,), "u4"))


@pytest.mark.compile
@pytest.mark.parametrize("order", ORDERS)
def test_instructions(order: str) -> None:
    ptx = compiled(pass_on, Out((32 * BLOCKS,), "i4"), Out((2,), "u4"), order)
    assert f"atom.{order}.gpu.global.add.u32" in ptx and "ld.acquire.gpu.global.u32" in ptx
    assert "st.relaxed.gpu.global.u32" in ptx
