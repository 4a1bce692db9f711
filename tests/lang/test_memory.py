"""Views of global arrays and pointers into shared memory; and the emulator's side of registers and of accesses of several
elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors, machine
from gemmkit.emulator.errors import EmulatorError
from gemmkit.lang.functions import freeze_array
from gemmkit.lang.host import SharedPointer, View
from gemmkit.lang.memory import ViewType
from gemmkit.lang.registers import Fragment, registers
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import thread_index
from gemmkit.runtime.arrays import describe
from tests.support.harness import Out, Runtime, compiled, emulated, leaves_nothing, on_device
from tests.support.lang.typing import BF16

# ==========================================================================================================================
# Views of global arrays and pointers into shared memory, in the emulator and compiled.


@dataclass(frozen=True)
class Kind(gk.Component):
    dtype: Any = np.dtype("f4")


def sample() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


# -- views ---------------------------------------------------------------------------------------------------------------

def indexing(out: Any, a: Any, cube: Any) -> None:
    out[0] = a[2, 1]
    out[1] = a[thread_index() + 1, 3]
    at = (1, 2)
    out[2] = a[at]
    out[3] = a.shape[0] * 100 + a.shape[1]
    out[4] = cube[1, 2, 3]
    out[5] = cube.shape[2]
    out[6] = out[4] + 1


INDEXED = [9, 7, 6, 304, 23, 4, 24]


def cube() -> np.ndarray:
    return np.arange(24, dtype=np.int16).reshape(2, 3, 4)


@pytest.mark.parametrize("order", "CF")
def test_views_index_like_arrays(order: str) -> None:
    a = np.asarray(sample(), order=order)                                              # type: ignore[call-overload]
    (out,) = emulated(indexing, Out((7,), np.float32), a, cube(), threads=1)
    assert list(out) == INDEXED
    assert leaves_nothing(compiled(indexing, Out((7,), np.float32), a, cube()))


@pytest.mark.gpu
@pytest.mark.parametrize("order", "CF")
def test_views_index_like_arrays_on_the_gpu(order: str) -> None:
    a = np.asarray(sample(), order=order)                                              # type: ignore[call-overload]
    (out,) = on_device(indexing, Out((7,), np.float32), a, cube(), threads=1)
    assert list(out) == INDEXED


def reading(out: Any, a: Any, i: int, j: int) -> None:
    out[0] = a[i, j]


def writing(out: Any, a: Any, i: int, j: int) -> None:
    out[j] = a[0, 0]


@pytest.mark.parametrize("i, j", [(-1, 0), (3, 0), (0, 4), (0, -1), (2, 100)])
def test_views_do_not_wrap_around(i: int, j: int) -> None:
    """A column beyond the row is an error, though in memory the next row lies there."""
    with pytest.raises(EmulatorError, match="argument 1"):
        emulated(reading, Out((1,), np.float32), sample(), i, j, threads=1)


@pytest.mark.parametrize("j", [-1, 4])
def test_stores_out_of_range_are_caught(j: int) -> None:
    with pytest.raises(EmulatorError, match="argument 0"):
        emulated(writing, Out((4,), np.float32), sample(), 0, j, threads=1)


def with_one_index(out: Any, a: Any) -> None:
    out[0] = a[1]


def with_three_indices(out: Any, a: Any) -> None:
    out[0] = a[1, 1, 1]


@pytest.mark.parametrize("kernel", [with_one_index, with_three_indices])
def test_views_take_as_many_indices_as_dimensions(kernel: Any) -> None:
    with pytest.raises(IndexError, match="has 2 dimensions and was indexed with"):
        emulated(kernel, Out((1,), np.float32), sample(), threads=1)
    with pytest.raises(Exception, match="getitem"):
        compiled(kernel, Out((1,), np.float32), sample())


def to_input(out: Any, a: Any) -> None:
    a[0, 0] = 1.0
    out[0] = 1.0


def test_operands_are_read_only() -> None:
    with pytest.raises(EmulatorError, match="argument 1"):
        emulated(to_input, Out((1,), np.float32), sample(), threads=1)


def test_values_are_converted_when_stored() -> None:
    def kernel(out: Any, x: Any) -> None:
        out[0] = x
        out[1] = 2049
        out[2] = thread_index() + 0.5

    (out,) = emulated(kernel, Out((3,), np.float16), Runtime(0.1), threads=1)
    assert list(out) == [np.float16(0.1), np.float16(2048), np.float16(0.5)]
    assert leaves_nothing(compiled(kernel, Out((3,), np.float16), Runtime(0.1)))
    assert leaves_nothing(compiled(kernel, Out((3,), BF16), Runtime(0.1)))


@pytest.mark.parametrize("array, unit, align", [
    (np.zeros((8, 8), "f4"), 1, 16), (np.zeros((8, 8), "f4", order="F"), 0, 16), (np.zeros((8, 6), "f4"), 1, 8),
    (np.zeros((8, 5), "f4"), 1, 4), (np.zeros((8, 5), "f2"), 1, 2), (np.zeros(9, "f4"), 0, 16),
    (np.zeros((8, 8), "f4")[:, ::2], None, 8), (np.zeros((2, 3, 4), "f2"), 2, 8),
])
def test_a_views_type_is_its_class(array: np.ndarray, unit: int | None, align: int) -> None:
    """Element type, contiguous axis and alignment class; not the size. (The address is taken to be aligned.)"""
    ty = freeze_array(describe(array)._replace(pointer=0)).type
    assert isinstance(ty, ViewType) and (ty.unit, ty.alignment) == (unit, align)
    twice = np.concatenate([array, array], axis=0)
    if twice.strides == array.strides:
        assert freeze_array(describe(twice)._replace(pointer=0)).type == ty


# -- shared memory ---------------------------------------------------------------------------------------------------------

def through_shared(out: Any, kind: Any) -> None:
    pointer = shared(kind.dtype, 16)
    for i in range(4):
        pointer[i] = i * 1.5
    out[0] = pointer[3]
    out[1] = pointer[1 + thread_index()]


def test_shared_pointers_index() -> None:
    for dtype in (np.dtype("f4"), np.dtype("f2"), BF16):
        (out,) = emulated(through_shared, Out((2,), np.float32), Kind(dtype), threads=1, shared=32)
        assert list(out) == [4.5, 1.5]
        assert leaves_nothing(compiled(through_shared, Out((2,), np.float32), Kind(dtype)))


@pytest.mark.gpu
def test_shared_pointers_index_on_the_gpu() -> None:
    for dtype in (np.dtype("f4"), np.dtype("f2"), BF16):
        (out,) = on_device(through_shared, Out((2,), np.float32), Kind(dtype), threads=1, shared=32)
        assert list(out) == [4.5, 1.5]


def beyond_shared(out: Any, kind: Any, i: int) -> None:
    shared(kind.dtype, 16)[i] = 1.0
    out[0] = 1.0


@pytest.mark.parametrize("i", [4, -5, 1000])
def test_shared_memory_has_bounds(i: int) -> None:
    with pytest.raises(EmulatorError, match="shared memory"):
        emulated(beyond_shared, Out((1,), np.float32), Kind(), i, threads=1, shared=32)


def not_yet_written(out: Any, kind: Any) -> None:
    out[0] = shared(kind.dtype, 0)[2]


def test_shared_memory_starts_unwritten() -> None:
    with pytest.raises(EmulatorError, match="shared memory"):
        emulated(not_yet_written, Out((1,), np.float32), Kind(), threads=1, shared=32)


def misaligned(out: Any, kind: Any) -> None:
    shared(kind.dtype, 2)[0] = 1.0
    out[0] = 1.0


def test_shared_elements_are_aligned() -> None:
    with pytest.raises(EmulatorError, match="past a multiple of 4"):
        emulated(misaligned, Out((1,), np.float32), Kind(), threads=1, shared=32)


# ==========================================================================================================================
# The emulator's side of the device dialect: registers, and accesses of several elements.


def in_a_thread(function: Any, shared_memory: int = 0) -> list[Any]:
    """What ``function`` returns in the one thread of a kernel."""
    out: list[Any] = []

    def kernel() -> None:
        out.append(function())

    machine.launch(kernel, (), grid=(1, 1, 1), block=(1, 1, 1), shared_memory=shared_memory)
    return out


def test_registers_know_their_shape_and_what_was_set() -> None:
    held = registers(Fragment(np.dtype("f4"), 1), 2, 3)
    held[1, 2] = (np.float32(1),)
    held[1, 2] = (np.float32(2),)
    assert held[1, 2] == (2,)
    with pytest.raises(UnboundLocalError, match=r"registers of shape \(2, 3\): \(0, 0\) was read before anything set it"):
        _ = held[0, 0]
    for key in ((2, 0), (0, -1), 1):
        with pytest.raises(IndexError, match="registers of shape"):
            held[key] = ()
        with pytest.raises(IndexError, match="registers of shape"):
            _ = held[key]


def test_registers_take_their_fragments_alone() -> None:
    """Compiled code has room for so many elements, and would make numbers of words."""
    held = registers(Fragment(np.dtype("f4"), 2), 3)
    held[0] = (np.float32(1), 0)
    with pytest.raises(TypeError, match=r"a fragment has 2 elements, not 1"):
        held[1] = (np.float32(1),)
    with pytest.raises(TypeError, match=r"a fragment has elements of float32, not of uint32"):
        held[1] = (np.uint32(1), np.uint32(2))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("unit", "alignment", "width"), [(1, 16, 4), (1, 8, 2), (1, 4, 1), (None, 4, 1)])
def test_an_access_is_as_wide_as_the_class_allows(unit: int | None, alignment: int, width: int) -> None:
    array = np.arange(32, dtype=np.float32).reshape(4, 8)
    view = View(array, machine.Memory.for_array(array, "x"), unit, alignment)
    sizes: list[int] = []

    def read() -> tuple:
        thread = machine.current()
        real = type(thread).read

        class Recording(type(thread)):                                 # type: ignore[misc]
            __slots__ = ()

            def read(self, memory: Any, address: int, nbytes: int, alignment: int | None = None) -> Any:
                sizes.append(nbytes)
                return real(self, memory, address, nbytes, alignment)

        thread.__class__ = Recording
        return view.load(1, (2, 4), 4)

    (values,) = in_a_thread(read)
    assert values == (20, 21, 22, 23) and sizes == [4 * width] * (4 // width)


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", [(0, 6), (3, 6), (4, 0), (0, -1)])
def test_an_access_that_leaves_its_row_is_found(first: tuple[int, int]) -> None:
    """Also where the next row, or the same array, lies at the address."""
    array = np.zeros((4, 8), np.float32)
    view = View(array, machine.Memory.for_array(array, "x"), 1, 16)
    with pytest.raises(errors.BoundsError, match=r"index \(.*\) of 'x', which has shape \(4, 8\)"):
        in_a_thread(lambda: view.load(1, first, 4))
    with pytest.raises(errors.BoundsError, match=r"index \(.*\) of 'x', which has shape \(4, 8\)"):
        in_a_thread(lambda: view.store(1, first, (np.float32(0),) * 4))


def test_what_is_stored_is_converted() -> None:
    def through_shared() -> tuple:
        pointer = SharedPointer(np.dtype("f2"), 0)
        pointer.store(0, (np.float32(0.1), 2, np.float64(1e9), np.float16(3)))
        return pointer.load(0, 4)

    (values,) = in_a_thread(through_shared, shared_memory=8)
    assert values == (np.float16(0.1), 2, np.inf, 3) and {type(v) for v in values} == {np.float16}
