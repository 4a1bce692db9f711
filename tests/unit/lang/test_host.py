"""The emulator's side of the device dialect: registers, and accesses of several elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from gemmkit.lang.host import SharedPointer, View
from gemmkit.lang.registers import Fragment, registers


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
