"""Bounds, alignment, unwritten and read-only memory: what one access can do wrong."""

from __future__ import annotations

import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from gemmkit.emulator.memory import Memory, for_array
from tests.support.emulated import as_bytes, line_of, run


def address(array: np.ndarray, *index: int) -> int:
    """Absolute address of an element, or of where it would be."""
    return array.ctypes.data + sum(i * stride for i, stride in zip(index, array.strides, strict=True))


def aligned(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Zeros whose first element lies at a multiple of 256 bytes, as device memory does."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start:start + size].view(dtype).reshape(shape)


def test_global_and_shared_memory_hold_what_is_written() -> None:
    source, target = aligned((64,)), aligned((64,))
    source[:] = np.arange(64)
    read, written = for_array(source, "source", readonly=True), for_array(target, "target", written=False)

    def kernel() -> None:
        thread = machine.current()
        thread.shared_write(4 * thread.index, thread.read(read, address(source, thread.index), 4))
        thread.barrier()
        mirrored = thread.shared_read(4 * (63 - thread.index), 4)
        thread.write(written, address(target, thread.index), mirrored)

    run(kernel, threads=64)
    np.testing.assert_array_equal(target, source[::-1])


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])
def test_a_read_is_a_copy_of_its_own(nbytes: int) -> None:
    array = aligned((16,), np.uint8)
    array[:] = np.arange(16)
    memory = for_array(array, "array")

    def kernel() -> None:
        data = machine.current().read(memory, address(array, 0), nbytes)
        assert data.dtype == np.uint8
        assert data.tolist() == list(range(nbytes))
        data[:] = 99

    run(kernel, threads=1)
    assert array.tolist() == list(range(16))


def test_off_by_one_store() -> None:
    array = aligned((32,))
    memory = for_array(array, "d")

    def kernel() -> None:
        thread = machine.current()
        thread.write(memory, address(array, thread.index + 1), as_bytes(1.0))  # the store

    with pytest.raises(errors.BoundsError) as caught:
        run(kernel)
    error = caught.value
    assert error.kernel_line == (__file__, line_of(kernel, "the store"), error.kernel_line.text)
    assert error.kernel_line.text.startswith("thread.write(memory, address(array, thread.index + 1)")
    assert error.thread == ((0, 0, 0), 31)
    assert (error.address, error.size, error.memory) == (address(array, 32), 4, "d")
    assert "ends 4 bytes past it" in str(error) and f"{__file__}:{error.kernel_line.number}" in str(error)
    np.testing.assert_array_equal(array, [0, *[1] * 31])


def test_below_the_array() -> None:
    array = aligned((4,))
    memory = for_array(array, "d")
    with pytest.raises(errors.BoundsError, match="starts 4 bytes before it"):
        run(lambda: discard(machine.current().read(memory, address(array, -1), 4)))


def discard(_: object) -> None:
    """Lets a lambda be a kernel, which returns nothing."""


@pytest.mark.parametrize("nbytes", [1, 16])
def test_shared_memory_ends(nbytes: int) -> None:
    def kernel() -> None:
        machine.current().shared_write(64, bytes(nbytes))

    with pytest.raises(errors.BoundsError) as caught:
        run(kernel, shared=64)
    assert (caught.value.address, caught.value.memory) == (64, "shared memory of block (0, 0, 0)")


def test_padding_between_rows_is_out_of_bounds() -> None:
    whole = aligned((4, 8))
    view = whole[:, :6]
    memory = for_array(view, "view")

    def kernel(column: int, nbytes: int) -> None:
        discard(machine.current().read(memory, address(whole, 1, column), nbytes))

    run(kernel, 5, 4)
    run(kernel, 4, 8)
    for column, nbytes in [(6, 4), (7, 4), (4, 16), (6, 8)]:
        with pytest.raises(errors.BoundsError, match="padding"):
            run(kernel, column, nbytes)


VIEWS = {
    "whole": lambda a: a,
    "transposed": lambda a: a.T,
    "reversed": lambda a: a[::-1, ::-1],
    "steps": lambda a: a[1::2, ::3],
    "negative steps": lambda a: a[::-2, 5:1:-1],
    "column": lambda a: a[:, 2],
    "one element": lambda a: a[2:3, 3:4],
    "no dimension": lambda a: a[1, 1, ...],
    "broadcast": lambda a: np.broadcast_to(a[1], (3, 8)),
    "sliding windows": lambda a: np.lib.stride_tricks.sliding_window_view(a[0], 3),
    "gaps and overlaps": lambda a: np.lib.stride_tricks.as_strided(a, (3, 3), (4, 4)),
    "cut transposed": lambda a: a[:, 1:7].T[1:],
    "empty": lambda a: a[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_exactly_the_bytes_of_the_elements_are_valid(name: str) -> None:
    whole = aligned((6, 8), np.int16)
    whole[...] = np.arange(48).reshape(6, 8)
    view = VIEWS[name](whole)
    memory = for_array(view, "view", readonly=True)
    expected = set()
    for index in np.ndindex(view.shape):
        expected.update(range(address(view, *index), address(view, *index) + 2))
    around = range(whole.ctypes.data - 8, whole.ctypes.data + whole.nbytes + 8)
    content = dict(zip(around[8:-8], whole.reshape(-1).view(np.uint8), strict=True))

    def kernel() -> None:
        for at in around:
            try:
                data = machine.current().read(memory, at, 1)
            except errors.BoundsError:
                assert at not in expected
            else:
                assert at in expected
                assert data[0] == content[at]

    run(kernel, threads=1)


def test_negative_strides_are_written_through() -> None:
    array = aligned((8,), np.int32)
    view = array[::-2]
    memory = for_array(view, "view", written=False)

    def kernel() -> None:
        thread = machine.current()
        thread.write(memory, address(view, thread.index), as_bytes(thread.index + 1, dtype=np.int32))

    run(kernel, threads=4)
    assert array.tolist() == [0, 4, 0, 3, 0, 2, 0, 1]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("write", [True, False])
def test_misaligned_vector(shared: bool, write: bool) -> None:
    array = aligned((16,))
    memory = for_array(array, "a")
    base = 0 if shared else address(array, 0)

    def kernel() -> None:
        thread = machine.current()
        place = thread.block.shared if shared else memory
        if write:
            thread.write(place, base + 8, bytes(16))  # write
        else:
            thread.read(place, base + 8, 16)  # read

    with pytest.raises(errors.AlignmentError, match="8 past a multiple of 16") as caught:
        run(kernel, threads=1)
    assert caught.value.kernel_line.number == line_of(kernel, "write" if write else "read")
    assert (caught.value.address, caught.value.size) == (base + 8, 16)


def test_alignment_can_be_given_for_other_sizes() -> None:
    def kernel() -> None:
        thread = machine.current()
        thread.shared_write(16, np.arange(96, dtype=np.uint8), alignment=16)
        assert thread.shared_read(28, 12, alignment=4).tolist() == list(range(12, 24))
        with pytest.raises(errors.AlignmentError):
            thread.shared_read(8, 48, alignment=16)
        with pytest.raises(ValueError, match="nbytes is 12"):
            thread.shared_read(0, 12)
        with pytest.raises(ValueError, match="alignment 0"):
            thread.shared_read(0, 12, alignment=0)
        with pytest.raises(ValueError, match="nbytes is 0"):
            thread.shared_write(0, b"", alignment=4)

    run(kernel, threads=1)


def test_unwritten_shared_memory() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.index != 7:
            thread.shared_write(4 * thread.index, as_bytes(1.0))
        thread.barrier()
        thread.shared_read(16 * (thread.index // 4), 16)  # the read

    with pytest.raises(errors.UninitialisedRead, match="byte 12") as caught:
        run(kernel)
    error = caught.value
    assert error.kernel_line.number == line_of(kernel, "the read")
    assert error.thread.tid in range(4, 8)
    assert (error.address, error.size, error.memory) == (16, 16, "shared memory of block (0, 0, 0)")


def test_each_block_starts_with_unwritten_shared_memory() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.block.index == (0, 0, 0):
            thread.shared_write(0, as_bytes(1.0))
        thread.shared_read(0, 4)

    with pytest.raises(errors.UninitialisedRead) as caught:
        run(kernel, threads=1, blocks=2)
    assert caught.value.thread == ((1, 0, 0), 0)


def test_shared_memory_is_filled_with_nan() -> None:
    def kernel() -> None:
        for dtype in (np.float16, np.float32, np.float64):
            assert np.isnan(machine.current().block.shared.data.view(dtype)).all()

    run(kernel, threads=1)


def test_poisoned_output_is_read_before_it_is_written() -> None:
    array = aligned((8,))
    memory = for_array(array, "out", written=False)

    def write() -> None:
        thread = machine.current()
        thread.write(memory, address(array, thread.index), as_bytes(2.0))

    def read() -> None:
        thread = machine.current()
        thread.read(memory, address(array, thread.index), 4)  # read

    run(write, threads=4)
    run(read, threads=4)  # what an earlier launch wrote stays written
    with pytest.raises(errors.UninitialisedRead) as caught:
        run(read, threads=5)
    assert caught.value.kernel_line.number == line_of(read, "read")
    error = caught.value
    assert (error.thread.tid, error.memory, error.address) == (4, "out", address(array, 4))


def test_read_only_array() -> None:
    array = aligned((8,))
    memory = for_array(array, "a", readonly=True)

    def kernel() -> None:
        machine.current().write(memory, address(array, 0), as_bytes(1.0))  # write

    with pytest.raises(errors.ReadOnlyError) as caught:
        run(kernel)
    assert caught.value.kernel_line.number == line_of(kernel, "write")
    assert array[0] == 0


def test_an_index_out_of_its_extent() -> None:
    memory = for_array(aligned((4, 8)), "a")

    def kernel() -> None:
        machine.current().out_of_bounds(memory, (1, np.int64(8)), (4, 8))  # index

    with pytest.raises(errors.BoundsError, match=r"index \(1, 8\) of 'a'.* shape \(4, 8\)") as caught:
        run(kernel)
    assert caught.value.kernel_line.number == line_of(kernel, "index")


@pytest.mark.parametrize("data", [np.ones(4, np.float32), np.ones(16, np.int8), np.ones((4, 4), np.uint8)])
def test_data_must_be_bytes(data: np.ndarray) -> None:
    with pytest.raises(TypeError, match=f"data is {data.dtype}"):
        run(lambda: machine.current().shared_write(0, data), threads=1)


def test_strided_data_and_bytes_can_be_written() -> None:
    def kernel() -> None:
        thread = machine.current()
        thread.shared_write(0, np.arange(8, dtype=np.uint8)[::2])
        thread.shared_write(4, b"abcd")
        assert thread.shared_read(0, 8).tobytes() == b"\0\2\4\6abcd"

    run(kernel, threads=1)


def test_numpy_integers_are_addresses_and_floats_are_not() -> None:
    def kernel() -> None:
        thread = machine.current()
        thread.shared_write(np.int32(8), bytes(8))
        thread.shared_read(np.int64(8), 8)
        with pytest.raises(TypeError):
            thread.shared_read(8.0, 8)

    run(kernel, threads=1)


def test_bad_arrays() -> None:
    with pytest.raises(TypeError, match=r"array \(a\) is list"):
        Memory.for_array([1.0], "a")
    with pytest.raises(TypeError, match="dtype object"):
        Memory.for_array(np.array([None]), "a")
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable; pass readonly=True"):
        Memory.for_array(frozen, "a")
    assert Memory.for_array(frozen, "a", readonly=True).size == 32
