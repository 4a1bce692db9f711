"""Tensor maps: 128 bytes that tell TMA where a tensor lies and what part of it a copy moves.

    encoder = Encoder(np.float16, dims=(k, m), strides_bytes=(2 * k,), box=(64, 128), swizzle=128)
    bound.launch(stream, (encoder(a.data.ptr), ...))        # the parameter's code is "tensor_map"

Dimensions count elements and go from the fastest, which is contiguous, to the slowest; strides are those of all but the
fastest. A call with an address that is known costs a look-up.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.components import Component
from gemmkit.lang.components import dataclass
from gemmkit.runtime.arrays import ArrayInfo, whole
from gemmkit.shapes import Shape, Swizzle, lines

BYTES = 128
SWIZZLES = (0, 32, 64, 128)
_ALIGNMENT = 16                       # bytes, of addresses and strides
_MAX_EXTENT, _MAX_STRIDE = 2**32, 2**40
_REMEMBERED = 64                      # addresses an encoder keeps

_NAMES = {np.dtype(np.float16): "FLOAT16", np.dtype(ml_dtypes.bfloat16): "BFLOAT16", np.dtype(np.float32): "FLOAT32",
          np.dtype(np.float64): "FLOAT64"}
_NAMES_BY_SIZE = {1: "UINT8", 2: "UINT16", 4: "UINT32", 8: "UINT64"}


@dataclass(frozen=True)
class Im2colWindow(Component):
    """Which positions of a tensor (N, ..., C) a box in im2col mode walks, along each spatial dimension, the fastest first:
    from ``lower`` (of the first element) to ``upper`` (of the last one) by ``steps`` (CUDA driver API,
    ``cuTensorMapEncodeIm2col``). A box has ``box[1]`` positions, which go on in the next line, plane and image."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class TensorMapSpec(Component):
    """What does not change with the tensor: its elements, the box that a copy moves, and how shared memory is swizzled.

    ``box`` counts elements, the fastest dimension first. A box lies in shared memory with its fastest dimension fastest and
    no gaps; with a swizzle of 32, 64 or 128 bytes, which is then the length of its rows, the 16-byte chunks of a row change
    places: the byte at address a moves to a XOR ((a >> 3) & (swizzle - 16)). It begins at a multiple of 128 bytes. With a
    ``window`` it has channels and positions of a convolution's windows.

    >>> TensorMapSpec(np.float16, (64, 128), 128).box_bytes
    16384

    Raises ValueError for a box that TMA cannot move, TypeError for elements that it does not know.
    """

    dtype: np.dtype
    box: tuple[int, ...]
    swizzle: int = 0
    window: Im2colWindow | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "box", tuple(map(int, self.box)))
        size, rows = self.dtype.itemsize, self.box
        if size not in (1, 2, 4, 8):
            raise TypeError(f"TensorMapSpec(dtype={self.dtype}): TMA moves elements of 1, 2, 4 or 8 bytes")
        most = 256, (256 if self.window is None else 1024), 256, 256, 256
        if not 1 <= len(rows) <= 5 or not all(1 <= extent <= limit for extent, limit in zip(rows, most)):
            raise ValueError(f"TensorMapSpec(box={rows}): 1 to 5 extents from 1 to 256 are needed, or 1024 of a window's "
                             "positions")
        if rows[0] * size % 16:
            raise ValueError(f"TensorMapSpec(box={rows}): its rows have {rows[0] * size} bytes; a multiple of 16 is needed")
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"TensorMapSpec(swizzle={self.swizzle!r}): 0 (none), 32, 64 or 128 is needed")
        if self.swizzle and rows[0] * size != self.swizzle:
            raise ValueError(f"TensorMapSpec(box={rows}, swizzle={self.swizzle}): rows of {self.swizzle} bytes are needed; "
                             f"these have {rows[0] * size}")

    @property
    def rank(self) -> int:
        return len(self.box)

    @property
    def box_bytes(self) -> int:
        """Bytes of a box: what a load gives its barrier."""
        return math.prod(self.box) * int(self.dtype.itemsize)


class Box(NamedTuple):
    """What TMA copies of a tensor at a time: ``extents`` elements, which lie in shared memory in panels of lines of
    ``width`` elements along ``axis``, swizzled by ``swizzle`` bytes (0: not). ``number`` is that of its tensor map."""

    extents: tuple
    dtype: np.dtype
    axis: int
    width: int
    swizzle: int
    number: int = 0

    @property
    def map_spec(self) -> TensorMapSpec:
        """A panel. Raises ValueError, TypeError for one that TMA cannot copy."""
        others = (extent for axis, extent in reversed(list(enumerate(self.extents))) if axis != self.axis)
        return TensorMapSpec(self.dtype, (self.width, *others), self.swizzle)

    def __str__(self) -> str:
        swizzle = f"swizzled by {self.swizzle} bytes" if self.swizzle else "not swizzled"
        return f"[{','.join(map(str, self.extents))}] in lines of {self.width} along axis {self.axis}, {swizzle}"


def box_of_layout(extents: tuple, dtype: np.dtype, layout: Shape, swizzle: Swizzle) -> Box | str:
    """How TMA brings a tile of ``extents`` to a place in shared memory with this layout, or why it cannot."""
    modes = layout.modes
    if len(modes) < 2:                                        # the driver refuses a map of one dimension
        return f"has {len(modes)} dimensions, and a tensor map 2 to 5; reshape the array to one row"
    axis = next((axis for axis, dim in enumerate(modes) if dim[0][1] == 1 and dim[0][0] > 1), len(modes) - 1)
    width = apart = modes[axis][0][0]
    for n in reversed(range(len(modes))):
        if n != axis:
            if extents[n] > 1 and (len(modes[n]) > 1 or modes[n][0][1] != apart):
                return f"has gaps between its lines of {width}, or other dimensions come first: {layout}"
            apart *= extents[n]
    nbytes = width * dtype.itemsize
    if len(modes[axis]) > 2 or extents[axis] % width or apart * dtype.itemsize % 128:
        return f"does not consist of lines of {width} in panels of a multiple of 128 bytes: {layout}"
    if swizzle.terms and (swizzle != lines(nbytes, dtype.itemsize) or apart // width % 8):
        return f"has the swizzle {swizzle}; TMA's is that of in_lines, of a multiple of 8 lines"
    found = Box(extents, dtype, axis, width, nbytes if swizzle.terms else 0)
    try:
        found.map_spec                                        # noqa: B018
    except (TypeError, ValueError) as error:
        return str(error)
    return found


def why_not(info: ArrayInfo, axis: int) -> str | None:
    """Why TMA cannot take an array whose elements are contiguous along ``axis``, in words; None if it can.

    >>> from gemmkit.runtime.arrays import ArrayInfo
    >>> odd = ArrayInfo(4096, (8, 9), (9, 1), np.dtype("f2"), 0, False, "cupy")
    >>> why_not(odd, 1)
    'its stride along axis 0 is 18 bytes, not a multiple of 16'

    Of a stack's first matrix (``info.steps``) it is asked for all.
    """
    if info.steps:
        stack = whole(info)
        return why_not(stack, axis + len(stack.shape) - len(info.shape))
    return _why_not(info.shape, info.strides, info.dtype.itemsize, info.pointer % _ALIGNMENT, axis)


@functools.lru_cache(maxsize=4096)
def _why_not(shape: tuple[int, ...], strides: tuple[int, ...], size: int, remainder: int, axis: int) -> str | None:
    if size not in (1, 2, 4, 8):
        return f"its elements have {size} bytes, not 1, 2, 4 or 8"
    if not 1 <= len(shape) <= 5:
        return f"it has {len(shape)} dimensions, not 1 to 5"
    if 0 in shape:
        return "it is empty"
    if remainder:
        return f"it begins at an address that is not a multiple of {_ALIGNMENT} bytes"
    reach = shape[axis] * size
    for other, (extent, stride) in enumerate(zip(shape, strides)):
        if extent > _MAX_EXTENT:
            return f"it has {extent} elements along axis {other}, more than {_MAX_EXTENT}"
        if extent == 1:
            continue                  # its stride is never used
        if other == axis:
            if stride != 1:
                return f"its elements are not contiguous along axis {axis} (stride {stride})"
        elif stride <= 0:
            return f"its stride along axis {other} is {stride}, not positive"
        elif stride * size % _ALIGNMENT:
            return f"its stride along axis {other} is {stride * size} bytes, not a multiple of {_ALIGNMENT}"
        elif stride * size >= _MAX_STRIDE:
            return f"its stride along axis {other} is {stride * size} bytes, not below {_MAX_STRIDE}"
        elif stride * size < reach:
            return f"it overlaps itself: its stride along axis {other} is {stride * size} bytes, below the {reach} of a row"
    return None


@functools.lru_cache(maxsize=4096)
def dimensions(shape: tuple[int, ...], strides: tuple[int, ...], axis: int,
               size: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The extents and byte strides as a tensor map has them, of elements of ``size`` bytes: ``axis`` first, without its
    stride, then the last to the first.

    >>> dimensions((5, 6, 8), (384, 64, 1), 2, 2)
    ((8, 6, 5), (128, 768))
    """
    others = [other for other in reversed(range(len(shape))) if other != axis]
    return (shape[axis], *[shape[other] for other in others]), tuple([strides[other] * size for other in others])


def encode(address: int, dtype: Any, dims: Sequence[int], strides_bytes: Sequence[int], box: Sequence[int],
           swizzle: int = 0) -> bytes:
    """The 128 bytes of a tensor map.

    ``dims``, ``strides_bytes`` (one less) and ``box`` go from the fastest dimension to the slowest; ``swizzle`` is 0, 32, 64
    or 128 bytes. Elements out of the tensor are loaded as zeros. Strides along dimensions of one element are not used.

    Raises ValueError or TypeError for what TMA does not take, RuntimeError when the driver refuses.
    """
    return _bytes_of(_make(address, TensorMapSpec(dtype, tuple(box), swizzle), tuple(dims), tuple(strides_bytes)))


def _make(address: int, spec: TensorMapSpec, dims: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    from cuda.bindings import driver

    if len(dims) != spec.rank or len(strides) != spec.rank - 1:
        raise ValueError(f"dims={dims} and strides_bytes={strides} do not go with box={spec.box}: {spec.rank} and "
                         f"{spec.rank - 1} numbers are needed")
    _check_address(address)
    if min(dims) < 1 or max(dims) > _MAX_EXTENT:
        raise ValueError(f"dims={dims}: extents from 1 to 2**32 are needed")
    steps = steps_of(dims, strides)
    for step in steps:
        if step % _ALIGNMENT or not 0 < step < _MAX_STRIDE:
            raise ValueError(f"strides_bytes={strides}: positive multiples of {_ALIGNMENT} below 2**40 are needed")
    kind, box, further = _of_spec(spec.dtype, spec.box, spec.swizzle)
    wide, narrow, window = driver.cuuint64_t, driver.cuuint32_t, spec.window
    tensor = kind, spec.rank, address, [wide(n) for n in dims], [wide(n) for n in steps]
    if window is None:
        status, made = driver.cuTensorMapEncodeTiled(*tensor, box, *further)
    else:
        walked = [narrow(n) for n in (1, *window.steps, 1)]
        status, made = driver.cuTensorMapEncodeIm2col(*tensor, list(window.lower), list(window.upper), *spec.box[:2], walked,
                                                      *further[1:])
    if int(status) != 0:
        raise RuntimeError(f"{status.name} for a tensor map of dims={dims}, strides_bytes={strides}, {spec!r}")
    return made


def driver_names(dtype: np.dtype, swizzle: int) -> tuple[str, str]:
    """What cuda.h calls the elements' type, and the swizzle.

    >>> driver_names(np.dtype("f2"), 0)
    ('CU_TENSOR_MAP_DATA_TYPE_FLOAT16', 'CU_TENSOR_MAP_SWIZZLE_NONE')
    """
    return ("CU_TENSOR_MAP_DATA_TYPE_" + (_NAMES.get(dtype) or _NAMES_BY_SIZE[dtype.itemsize]),
            "CU_TENSOR_MAP_SWIZZLE_" + (f"{swizzle}B" if swizzle else "NONE"))


def steps_of(dims: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides as the driver takes them: along one element any will do, and it refuses some."""
    return [step if extent > 1 else _ALIGNMENT for step, extent in zip(strides, dims[1:])]


@functools.cache
def _of_spec(dtype: np.dtype, box: tuple[int, ...], swizzle: int) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """What the driver is told of a spec: the kind of its elements, its box, and what comes behind."""
    from cuda.bindings import driver

    kinds, narrow = driver.CUtensorMapDataType, driver.cuuint32_t
    kind, swizzled = driver_names(dtype, swizzle)
    kind, swizzled = getattr(kinds, kind), getattr(driver.CUtensorMapSwizzle, swizzled)
    return kind, [narrow(n) for n in box], (
        [narrow(1)] * len(box), driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzled,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)


def _check_address(address: int) -> None:
    if address % _ALIGNMENT:
        raise ValueError(f"address={address:#x}: TMA takes multiples of {_ALIGNMENT}")


def _bytes_of(made: Any) -> bytes:
    return ctypes.string_at(made.getPtr(), BYTES)


class Encoder:
    """The tensor maps of one operand of a plan: ``encoder(address)`` gives the bytes of the map for that address.

    The arguments are those of `encode`; they are checked at the first call.
    """

    __slots__ = ("_arguments", "_known", "_lock", "_map")

    def __init__(self, dtype: Any, dims: Sequence[int], strides_bytes: Sequence[int], box: Sequence[int], swizzle: int = 0,
                 window: Im2colWindow | None = None):
        self._begin(TensorMapSpec(dtype, tuple(box), swizzle, window), tuple(dims), tuple(strides_bytes))

    def _begin(self, spec: TensorMapSpec, dims: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._arguments = spec, dims, strides
        self._known: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._map: Any = None

    @classmethod
    def of(cls, spec: TensorMapSpec, info: ArrayInfo, axis: int) -> Encoder:
        """The encoder for arrays like ``info``, contiguous along ``axis``; raises ValueError with `why_not`'s reason."""
        reason = why_not(info, axis)
        if reason is not None:
            raise ValueError(f"an array cannot be moved by TMA: {reason}")
        if info.dtype.itemsize != spec.dtype.itemsize:
            raise ValueError(f"an array of {info.dtype} does not go with {spec!r}")
        made = cls.__new__(cls)                        # of a spec that is there
        made._begin(spec, *dimensions(info.shape, info.strides, axis, info.dtype.itemsize))
        return made

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `Encoder` takes to make another: dtype, dims, strides in bytes, box, swizzle and window."""
        spec, dims, strides = self._arguments
        return spec.dtype, dims, strides, spec.box, spec.swizzle, spec.window

    def __call__(self, address: int) -> bytes:
        found = self._known.get(address)
        return self._encode(address) if found is None else found

    def _encode(self, address: int) -> bytes:
        with self._lock:
            if self._map is None:
                self._map = _make(address, *self._arguments)
            else:
                from cuda.bindings import driver

                _check_address(address)
                (status,) = driver.cuTensorMapReplaceAddress(self._map, address)
                if int(status) != 0:
                    raise RuntimeError(f"{status.name} for a tensor map at address {address:#x}")
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[address] = out = _bytes_of(self._map)
        return out
