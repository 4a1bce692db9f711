"""Tensor maps on the host: what TMA can take, what is asked of the driver, and what is remembered."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from gemmkit.runtime import tensor_maps
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.tensor_maps import BYTES, Encoder, TensorMapSpec, dimensions, encode, why_not

F16 = np.dtype("f2")


def info(shape: tuple, strides: tuple, pointer: int = 4096, dtype: Any = F16) -> ArrayInfo:
    return ArrayInfo(pointer, shape, strides, np.dtype(dtype), 0, False, "cupy")


@pytest.mark.parametrize(("array", "axis"), [
    (info((8, 16), (16, 1)), 1), (info((16, 8), (1, 16)), 0), (info((8, 16), (24, 1)), 1), (info((5,), (1,)), 0),
    (info((1, 9), (9, 1)), 1),                       # nobody steps along an axis of one element
    (info((8, 1), (8, 77)), 1), (info((3, 8, 16), (128, 16, 1)), 2), (info((8, 4), (4, 1), dtype="f4"), 1),
    (info((8, 16), (16, 1), dtype="i1"), 1), (info((2, 2), (2, 1), dtype="f8"), 1),
])
def test_what_tma_takes(array: ArrayInfo, axis: int) -> None:
    assert why_not(array, axis) is None


@pytest.mark.parametrize(("array", "axis", "why"), [
    (info((8, 16), (16, 1), pointer=4104), 1, "begins at an address that is not a multiple of 16"),
    (info((8, 9), (9, 1)), 1, "stride along axis 0 is 18 bytes, not a multiple of 16"),
    (info((8, 16), (16, 1)), 0, r"not contiguous along axis 0 \(stride 16\)"),
    (info((8, 16), (32, 2)), 1, r"not contiguous along axis 1 \(stride 2\)"),
    (info((8, 16), (0, 1)), 1, "stride along axis 0 is 0, not positive"),
    (info((8, 16), (-16, 1)), 1, "stride along axis 0 is -16, not positive"),
    (info((8, 16), (8, 1)), 1, "overlaps itself: its stride along axis 0 is 16 bytes, below the 32"),
    (info((8, 2**32 + 1), (2**33, 1)), 1, "4294967297 elements along axis 1"),
    (info((8, 16), (2**39, 1)), 1, "not below 1099511627776"),
    (info((0, 16), (16, 1)), 1, "empty"),
    (info((1,) * 6, (1,) * 6), 0, "6 dimensions"),
    (info((8, 16), (16, 1), dtype="c16"), 1, "16 bytes, not 1, 2, 4 or 8"),
])
def test_what_it_does_not_take_and_why(array: ArrayInfo, axis: int, why: str) -> None:
    import re

    reason = why_not(array, axis)
    assert reason is not None and re.search(why, reason)
    with pytest.raises(ValueError, match=why):
        Encoder.of(TensorMapSpec(array.dtype if array.dtype.itemsize < 16 else F16, (16,) * min(5, len(array.shape))), array,
                   axis)


def test_the_fastest_dimension_comes_first() -> None:
    assert dimensions((8, 16), (32, 2), 1) == ((16, 8), (32,))
    assert dimensions((16, 8), (2, 32), 0) == ((16, 8), (32,))
    assert dimensions((3, 8, 16), (256, 32, 2), 2) == ((16, 8, 3), (32, 256))


class Driver:
    """Stands for cuda.bindings.driver: a map is the address and what was asked for."""

    def __init__(self, monkeypatch: Any) -> None:
        from cuda.bindings import driver

        self.made: list[tuple] = []
        self.replaced: list[int] = []
        monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", self.encode)
        monkeypatch.setattr(driver, "cuTensorMapReplaceAddress", self.replace)

    def encode(self, kind: Any, rank: int, address: int, *lists: Any) -> tuple:
        numbers = tuple(tuple(map(int, values)) for values in lists[:4])
        self.made.append((kind.name, rank, address, *numbers, *(choice.name for choice in lists[4:])))
        return 0, Made(address)

    def replace(self, made: Made, address: int) -> tuple:
        self.replaced.append(address)
        made.buffer[0] = address
        return (0,)


class Made:
    def __init__(self, address: int) -> None:
        self.buffer = (ctypes.c_uint64 * (BYTES // 8))(address)

    def getPtr(self) -> int:
        return ctypes.addressof(self.buffer)


@pytest.fixture
def driver(monkeypatch: Any) -> Driver:
    return Driver(monkeypatch)


@pytest.mark.parametrize(("dtype", "kind"), [
    ("f2", "FLOAT16"), ("bfloat16", "BFLOAT16"), ("f4", "FLOAT32"), ("f8", "FLOAT64"), ("i1", "UINT8"), ("u1", "UINT8"),
    ("float8_e4m3fn", "UINT8"), ("i4", "UINT32"), ("u2", "UINT16"), ("i8", "UINT64"), ("?", "UINT8")])
def test_what_the_driver_is_asked(driver: Driver, dtype: str, kind: str) -> None:
    import ml_dtypes

    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    line = 128 // element.itemsize
    out = encode(4096, element, (1000, 70), (1024 * element.itemsize,), (line, 64), 128)
    assert len(out) == BYTES and int.from_bytes(out[:8], "little") == 4096
    assert driver.made == [(
        f"CU_TENSOR_MAP_DATA_TYPE_{kind}", 2, 4096, (1000, 70), (1024 * element.itemsize,), (line, 64), (1, 1),
        "CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE")]


@pytest.mark.parametrize(("swizzle", "name"), [(0, "NONE"), (32, "32B"), (64, "64B"), (128, "128B")])
def test_swizzles(driver: Driver, swizzle: int, name: str) -> None:
    encode(0, F16, (64, 64), (128,), ((swizzle or 64) // 2, 8), swizzle)
    assert driver.made[0][-3] == f"CU_TENSOR_MAP_SWIZZLE_{name}"


def test_the_stride_of_one_element_does_not_matter(driver: Driver) -> None:
    encode(0, F16, (9, 1), (18,), (16, 8))
    assert driver.made[0][4] == (16,)


@pytest.mark.parametrize(("arguments", "message"), [
    ((8, F16, (64, 64), (128,), (64, 8)), "address=0x8: TMA takes multiples of 16"),
    ((0, F16, (64, 64), (120,), (64, 8)), "strides_bytes=.120,.: positive multiples of 16"),
    ((0, F16, (64, 64), (-128,), (64, 8)), "strides_bytes=.-128,.: positive"),
    ((0, F16, (64, 0), (128,), (64, 8)), "dims=.64, 0.: extents from 1"),
    ((0, F16, (64, 2**32 + 1), (128,), (64, 8)), "extents from 1 to 2"),
    ((0, F16, (64, 64, 2), (128,), (64, 8)), "dims=.64, 64, 2. and strides_bytes=.128,. do not go with box=.64, 8."),
    ((0, F16, (64, 64), (128,), (64, 8), 64), "rows of 64 bytes are needed"),
])
def test_maps_that_cannot_be(driver: Driver, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(*arguments)
    assert driver.made == []


def test_an_address_that_is_known_costs_no_call(driver: Driver) -> None:
    encoder = Encoder(F16, (64, 64), (128,), (64, 8), 128)
    first, second = encoder(4096), encoder(8192)
    assert encoder(4096) is first and encoder(8192) is second
    assert [made[2] for made in driver.made] == [4096] and driver.replaced == [8192]
    assert [int.from_bytes(x[:8], "little") for x in (first, second)] == [4096, 8192]
    with pytest.raises(ValueError, match="address=0x2008"):
        encoder(8200)


def test_only_so_many_addresses_are_remembered(driver: Driver) -> None:
    encoder = Encoder(F16, (64, 64), (128,), (64, 8))
    for _ in range(2):
        for n in range(tensor_maps._REMEMBERED + 1):
            assert int.from_bytes(encoder(4096 * n)[:8], "little") == 4096 * n
    assert len(encoder._known) <= tensor_maps._REMEMBERED


def test_the_encoder_of_an_array(driver: Driver) -> None:
    Encoder.of(TensorMapSpec(F16, (64, 8), 128), info((100, 200), (1, 104)), 0)(1 << 20)
    assert driver.made[0][2:6] == (1 << 20, (100, 200), (208,), (64, 8))
    with pytest.raises(ValueError, match="float32 does not go with"):
        Encoder.of(TensorMapSpec(F16, (64, 8), 128), info((8, 64), (64, 1), dtype="f4"), 1)


@pytest.mark.gpu
def test_the_drivers_own_maps() -> None:
    import cupy

    array = cupy.zeros((70, 1024), cupy.float16)
    encoder = Encoder(F16, (1000, 70), (2048,), (64, 64), 128)
    addresses = [array.data.ptr, array.data.ptr + 4096, array.data.ptr]
    for address in addresses:
        assert encoder(address) == encode(address, F16, (1000, 70), (2048,), (64, 64), 128)
    assert encoder(addresses[0]) != encoder(addresses[1])
