"""An array as a kernel sees it, by `ArrayInfo`, and what follows for its memory: alignment, extent, overlap."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gemmkit.shapes import merged

Extents = tuple[int, ...]
_MAX_ALIGNMENT = 16  # bytes of the widest load or store


class ArrayInfo(NamedTuple):
    """An array as a kernel sees it.

    ``strides`` are in elements and always given; ``device`` is the device's ordinal, -1 for host memory;
    ``library`` is "cupy", "torch", "numba", "numpy", "cai" or "dlpack"; ``stream`` is the handle that the
    array's own ``__cuda_array_interface__`` asks to be ordered after, if it does.

    Of a stack, what is described is the first matrix; ``steps`` lead to the others: (extent, stride) of each dimension
    of the stack, the slowest first.
    """

    pointer: int
    shape: Extents
    strides: Extents
    dtype: np.dtype[Any]
    device: int
    readonly: bool
    library: str
    stream: int | None = None
    steps: tuple[tuple[int, int], ...] = ()


_Info = TypeVar("_Info", ArrayInfo, None, "ArrayInfo | None")


def flipped(info: _Info) -> _Info:
    """The transpose of a matrix (None of None)."""
    return info if info is None else info._replace(shape=info.shape[::-1], strides=info.strides[::-1])


def whole(info: ArrayInfo) -> ArrayInfo:
    """The stack of which a matrix is described, its dimensions before the matrix's, without those along which nothing moves.

    >>> first = ArrayInfo(0, (8, 6), (6, 1), np.dtype("f4"), 0, False, "cai", steps=((5, 48), (7, 0)))
    >>> whole(first)[1:3]
    ((5, 8, 6), (48, 6, 1))
    """
    if not info.steps:
        return info
    moving = [(extent, stride) for extent, stride in info.steps if stride != 0]
    return info._replace(shape=(*(extent for extent, _ in moving), *info.shape),
                         strides=(*(stride for _, stride in moving), *info.strides), steps=())


def steps_of(shape: tuple[int, ...], strides: tuple[int, ...], stack: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(extent, stride) of an operand along a stack's dimensions, the slowest first. Those that lie in each other's stride
    are one; along those that the operand lacks, or where it has one matrix, the stride is 0.

    >>> steps_of((2, 3), (36, 12), (2, 3)), steps_of((3,), (12,), (2, 3)), steps_of((), (), (2, 3))
    (((6, 12),), ((2, 0), (3, 12)), ())
    """
    missing = len(stack) - len(shape)
    own = [0] * missing + [0 if extent == 1 else stride for extent, stride in zip(shape, strides)]
    steps = merged(reversed([*zip(stack, own)]))
    return tuple(reversed(steps)) if any(stride for _, stride in steps) or 0 in stack else ()


def are_the_same(x: ArrayInfo, y: ArrayInfo) -> bool:
    """Whether two arrays are the same matrices in the same order, however the dimensions of their stacks are counted. The
    stride of an extent of 1 does not matter: libraries give it any value.

    >>> x = ArrayInfo(0, (2, 3, 8, 6), (144, 48, 6, 1), np.dtype("f4"), 0, False, "cai")
    >>> y = x._replace(shape=(6, 8, 6), strides=(48, 6, 1))
    >>> are_the_same(x, y), are_the_same(x, y._replace(shape=(3, 8, 6)))
    (True, False)
    >>> column = x._replace(shape=(8, 1), strides=(1, 9))
    >>> are_the_same(column, column._replace(strides=(1, 1)))
    True
    """
    if x[:4] == y[:4]:
        return True
    return (x.pointer == y.pointer and x.dtype == y.dtype and x.shape[-2:] == y.shape[-2:]
            and _strides_of_the_matrix(x) == _strides_of_the_matrix(y) and _of_the_stack(x) == _of_the_stack(y))


def _strides_of_the_matrix(info: ArrayInfo) -> list[int]:
    return [stride for extent, stride in zip(info.shape[-2:], info.strides[-2:]) if extent != 1]


def _of_the_stack(info: ArrayInfo) -> tuple[tuple[int, int], ...]:
    stack = info.shape[:-2]
    return steps_of(stack, info.strides[:-2], stack)


def _axes(info: ArrayInfo) -> list[tuple[int, int]]:
    """(extent, stride) of all dimensions, those of a stack first."""
    return [*info.steps, *zip(info.shape, info.strides, strict=True)]


def unit_axis(info: ArrayInfo) -> int | None:
    """The last axis of stride 1 (an axis of extent 1 has any stride), or None."""
    axes = [axis for axis, stride in enumerate(info.strides) if stride == 1]
    if not axes:
        axes = [axis for axis, extent in enumerate(info.shape) if extent <= 1]
    return axes[-1] if axes else None


def alignment(info: ArrayInfo, unit: int | bool | None = True) -> int:
    """The largest power of two, at most 16 bytes, at which every vector along the axis ``unit`` starts (True:
    along `unit_axis`): it divides the pointer and the strides of all other axes. Strides along extents of at most 1
    are never walked and do not count.

    >>> alignment(ArrayInfo(0x1000, (8, 6), (12, 1), np.dtype("f4"), 0, False, "cai"))
    16
    >>> alignment(ArrayInfo(0x1000, (8, 6), (1, 1), np.dtype("f4"), 0, False, "cai"))       # a sliding window
    4
    """
    if unit is True:
        unit = unit_axis(info)
    itemsize, bits = info.dtype.itemsize, info.pointer | _MAX_ALIGNMENT
    for axis, (extent, stride) in enumerate(zip(info.shape, info.strides, strict=True)):
        if extent > 1 and axis != unit:
            bits |= stride * itemsize
    for extent, stride in info.steps:
        if extent > 1:
            bits |= stride * itemsize
    return bits & -bits


def check_aligned(info: ArrayInfo, name: str) -> None:
    """Raise ValueError for an array whose address is no multiple of its elements' (of their parts', for numbers of
    several): a GPU cannot read these.

    >>> check_aligned(ArrayInfo(0x1002, (8,), (1,), np.dtype("f4"), 0, False, "cai"), "bias")
    Traceback (most recent call last):
    ...
    ValueError: bias is at address 0x1002, which is not a multiple of 4 bytes, the size of a float32; pass a copy
    """
    size = part_bytes(info.dtype)
    if info.pointer % size and 0 not in info.shape:
        what = f"a {info.dtype}" if size == info.dtype.itemsize else f"a part of a {info.dtype}"
        raise ValueError(
            f"{name} is at address {info.pointer:#x}, which is not a multiple of {size} bytes, the size of {what}; pass a "
            "copy"
        )


@functools.lru_cache(maxsize=256)
def part_bytes(dtype: np.dtype[Any]) -> int:
    """The bytes of one real number of an element: of a complex number or a record they are several."""
    if dtype.names:
        return min(part_bytes(dtype[name]) for name in dtype.names)
    return dtype.itemsize // 2 if dtype.kind == "c" else max(1, dtype.itemsize)


def byte_range(info: ArrayInfo) -> tuple[int, int]:
    """First address of the array's elements and the one after the last; equal for an empty array."""
    low, high = _reach(info.shape, info.strides, info.steps, info.dtype.itemsize)
    return info.pointer + low, info.pointer + high


@functools.lru_cache(maxsize=4096)
def _reach(shape: Extents, strides: Extents, steps: tuple[tuple[int, int], ...], itemsize: int) -> tuple[int, int]:
    """`byte_range` from the pointer on."""
    low = high = 0
    for extent, stride in (*steps, *zip(shape, strides, strict=True)):
        if extent == 0:
            return 0, 0
        reach = (extent - 1) * stride * itemsize
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high + itemsize


def overlaps(x: ArrayInfo, y: ArrayInfo) -> bool:
    """Whether the byte ranges of two arrays meet. An array overlaps itself; interleaved views of one array,
    such as its even and its odd columns, count as overlapping too; an empty array overlaps nothing.

    >>> from gemmkit.runtime.arrays import describe
    >>> whole = describe(np.zeros((4, 4)))
    >>> overlaps(whole, whole)
    True
    """
    (x_low, x_high), (y_low, y_high) = byte_range(x), byte_range(y)
    return max(x_low, y_low) < min(x_high, y_high)


class _Elsewhere:
    """An array by its description alone, for NumPy's arithmetic of addresses: its memory is not looked at."""

    def __init__(self, info: ArrayInfo) -> None:
        size = info.dtype.itemsize
        axes = _axes(info)
        self.__array_interface__ = {
            "data": (info.pointer, True), "shape": tuple(extent for extent, _ in axes), "typestr": f"|V{size}",
            "version": 3, "strides": tuple(stride * size for _, stride in axes)}


def shares_memory(x: ArrayInfo, y: ArrayInfo) -> bool:
    """Whether two arrays have a byte in common: unlike `overlaps` exact, unless that is hard to tell, when it is
    True.

    >>> from gemmkit.runtime.arrays import describe
    >>> columns = np.zeros((4, 4))
    >>> even, odd = describe(columns[:, ::2]), describe(columns[:, 1::2])
    >>> overlaps(even, odd), shares_memory(even, odd)
    (True, False)
    """
    if not overlaps(x, y):
        return False
    try:
        return bool(np.shares_memory(np.asarray(_Elsewhere(x)), np.asarray(_Elsewhere(y)), max_work=_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


_WORK = 10_000  # candidates that are looked at before an overlap is taken for granted


def overlaps_itself(info: ArrayInfo) -> bool:
    """Whether several elements of an array share memory, by its strides: exact, unless that is hard to tell, when
    it is True.

    >>> from gemmkit.runtime.arrays import describe
    >>> windows = np.lib.stride_tricks.sliding_window_view(np.zeros(9), 4)
    >>> overlaps_itself(describe(windows)), overlaps_itself(describe(windows[::4]))
    (True, False)
    """
    return _meet(tuple(_axes(info)))


@functools.lru_cache(maxsize=4096)
def _meet(steps: tuple[tuple[int, int], ...]) -> bool:
    if any(n == 0 for n, _ in steps):
        return False
    axes = sorted(((abs(s), n) for n, s in steps if n > 1), reverse=True)
    reach = 0
    for stride, extent in reversed(axes):
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False  # every step goes beyond all that the shorter ones reach
    return _cancel(axes, 0, False, [_WORK])


def _cancel(axes: list[tuple[int, int]], distance: int, moved: bool, left: list[int]) -> bool:
    """Whether steps along ``axes``, the longest first, can lead back over ``distance``: two elements are then one."""
    if not axes:
        return moved and distance == 0
    (stride, extent), rest = axes[0], axes[1:]
    reach = sum(other * (n - 1) for other, n in rest)
    if stride == 0:
        return True
    low, high = -((distance + reach) // stride), (reach - distance) // stride
    for steps in range(max(low, 1 - extent if moved else 0), min(high, extent - 1) + 1):
        left[0] -= 1
        if left[0] < 0 or _cancel(rest, distance + steps * stride, moved or steps != 0, left):
            return True
    return False


def as_strided(x: np.ndarray[Any, Any], shape: Extents, steps: Any, writeable: bool = True) -> np.ndarray[Any, Any]:
    """NumPy's function of this name, also of float8_e5m2, whose typestr NumPy does not read back. ``steps`` are in bytes."""
    bits = x.view(f"u{x.itemsize}") if x.dtype.kind == "f" and x.dtype.isbuiltin == 2 else x
    found = np.lib.stride_tricks.as_strided(bits, shape, steps, writeable=writeable)
    return found if bits is x else found.view(x.dtype)
