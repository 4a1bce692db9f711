"""`pack_words`, `unpack_words`, `interleave_words` and `rolled`: the same in the emulator and on the GPU, and what they leave in PTX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.registers import interleave, split
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, dual
from gemmkit.ptx.memory import (
    first_elements,
    interleave_words,
    load_global,
    load_words,
    pack_words,
    store_global,
    unpack_words,
)
from gemmkit.ptx.special import rolled, thread_index
from tests.support.harness import Out, Runtime, compiled, emulated, leaves_nothing, lines_with, on_device, same_bits
from tests.support.lang.typing import INDEX, result

DTYPES = [np.dtype(x) for x in ("i1", "u1", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "i2", "f2", ml_dtypes.bfloat16, "i4",
                                "f4", "i8", "f8")]
CASES = [(dtype, nbytes // dtype.itemsize) for dtype in DTYPES for nbytes in (4, 8, 16) if nbytes >= dtype.itemsize]
every_case = pytest.mark.parametrize("dtype, count", CASES, ids=[f"{d}x{n}" for d, n in CASES])


@dataclass(frozen=True)
class Words(gk.Component):
    dtype: Any
    count: int


def numbers(rng: np.random.Generator, dtype: np.dtype, count: int) -> np.ndarray:
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
    a, out, case = numbers(rng, dtype, 32 * count), Out((32 * count,), dtype), Words(dtype, count)
    assert same_bits(emulated(kernel, out, a, case)[0], a)
    ptx = compiled(kernel, out, a, case)
    assert leaves_nothing(ptx) and len(lines_with(ptx, "ld.global")) == len(lines_with(ptx, "st.global")) == 1


@pytest.mark.gpu
@pytest.mark.sample(10)
@every_case
def test_words_keep_every_bit_on_the_gpu(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, out, case = numbers(rng, dtype, 32 * count), Out((32 * count,), dtype), Words(dtype, count)
    for kernel in (loaded_as_words, there_and_back):
        assert same_bits(on_device(kernel, out, a, case)[0], a)


RECORDS = [(COMPLEX.number_dtype("f2"), 4), (dual(2).number_dtype("f2"), 4), (QUATERNION.number_dtype("f2"), 2),
           (DUAL.number_dtype("i1"), 8), (dual(2).number_dtype("f4"), 1), (COMPLEX.number_dtype(ml_dtypes.bfloat16), 1)]


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
@pytest.mark.parametrize("dtype, count", RECORDS, ids=[f"{len(d.names)}x{d[0]}x{n}" for d, n in RECORDS])
@pytest.mark.parametrize("kernel", [loaded_as_words, there_and_back])
def test_words_keep_numbers(kernel: Any, dtype: np.dtype, count: int, run: Any, rng: np.random.Generator) -> None:
    """Numbers of several parts, which may be wider or narrower than a word."""
    parts = numbers(rng, dtype[0], 32 * count * len(dtype.names or ()))
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
    a = numbers(rng, dtype, 32 * count)
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
    a = numbers(rng, case.dtype, 32 * case.count)
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


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize <= 4], ids=str)
@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_words_begin_anywhere(dtype: np.dtype, run: Any, rng: np.random.Generator) -> None:
    count = 16 // dtype.itemsize
    a = numbers(rng, dtype, 32 * (count + 1)).reshape(32, count + 1)
    (out,) = run(load_rows, Out((32, count), dtype), a, Words(dtype, count))
    assert same_bits(out, np.ascontiguousarray(a[:, 1:]))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize <= 2], ids=str)
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
