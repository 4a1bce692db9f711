"""Arrays of any library as pointer, shape, strides and dtype; their streams; new arrays of the caller's own
kind.

No array library is imported here: an array's library has been imported by whoever made the array, so it is
found in ``sys.modules`` by the array's type, once for each type. CuPy arrays, PyTorch tensors and Numba
device arrays are read through their own attributes, which is several times faster than the interfaces they
share; everything else through ``__cuda_array_interface__``, else DLPack. Nothing is copied, cast or
synchronised.

NumPy arrays (and DLPack objects in host memory) are described with device -1: whether host memory will do is
the caller's decision.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gemmkit.runtime import device
from gemmkit.runtime.streams import as_stream_handle, current_stream

__all__ = [
    "ArrayInfo",
    "alignment",
    "as_stream_handle",
    "byte_range",
    "check_aligned",
    "current_stream",
    "describe",
    "empty_like",
    "matcher",
    "offers",
    "overlaps",
    "overlaps_itself",
    "part_bytes",
    "shares_memory",
    "unit_axis",
]

_Extents = tuple[int, ...]
_ACCEPTED = (
    "a CuPy array, a PyTorch CUDA tensor, a Numba device array, a NumPy array, or an object with "
    "__cuda_array_interface__ or __dlpack__"
)
_MAX_ALIGNMENT = 16  # bytes of the widest load or store
_HOST = -1


class ArrayInfo(NamedTuple):
    """An array as a kernel sees it.

    ``strides`` are in elements and always given; ``device`` is the device's ordinal, -1 for host memory;
    ``library`` is "cupy", "torch", "numba", "numpy", "cai" or "dlpack"; ``stream`` is the handle that the
    array's own ``__cuda_array_interface__`` asks to be ordered after, if it does.
    """

    pointer: int
    shape: _Extents
    strides: _Extents
    dtype: np.dtype[Any]
    device: int
    readonly: bool
    library: str
    stream: int | None = None


def describe(x: Any, name: str = "a") -> ArrayInfo:
    """Pointer, shape, strides, dtype and device of ``x``; ``name`` is the argument that messages speak of.

    Raises TypeError when ``x`` is no array that is known here, and ValueError when it is one that a kernel
    cannot read as it stands (strides that are no whole elements, a mask, a lazily conjugated or sparse
    tensor, ...); each says what would do.

    >>> describe(np.zeros((3, 4), np.float32).T)[1:]
    ((4, 3), (1, 4), dtype('float32'), -1, False, 'numpy', None)
    """
    read = _READERS.get(type(x))
    if read is None:
        read = _find_reader(x, name)
    return read(x, name)


_Reader = Callable[[Any, str], ArrayInfo]
_READERS: dict[type, _Reader] = {}


def _find_reader(x: Any, name: str) -> _Reader:
    """The reader for the type of ``x``; remembered when the type alone decides it."""
    for module, attribute, reader in (
        ("cupy", "ndarray", _read_cupy),
        ("torch", "Tensor", _read_torch),
        ("numba.cuda.cudadrv.devicearray", "DeviceNDArrayBase", _read_numba),
        ("numpy.ma", "MaskedArray", _read_masked),
        ("numpy", "ndarray", _read_numpy),
    ):
        kind = getattr(sys.modules.get(module), attribute, None)
        if kind is not None and isinstance(x, kind):
            _READERS[type(x)] = reader
            return reader
    if not isinstance(x, type):
        if offers(x, "__cuda_array_interface__"):
            return _read_interface
        if offers(x, "__dlpack__") and offers(x, "__dlpack_device__"):
            return _read_dlpack
    raise TypeError(f"{name} must be {_ACCEPTED}; got {getattr(type(x), '__module__', '')}.{type(x).__qualname__}")


# -- one reader a library ------------------------------------------------------------------------------------


def _read_cupy(x: Any, name: str) -> ArrayInfo:
    dtype, data = x.dtype, x.data
    strides = _elements(x.strides, dtype.itemsize) or _refuse_strides(name, x.strides, dtype)
    return ArrayInfo(data.ptr, x.shape, strides, dtype, data.device_id, False, "cupy")


def _read_torch(x: Any, name: str) -> ArrayInfo:
    torch = sys.modules["torch"]
    if not x.is_cuda:
        raise ValueError(f"{name} is a tensor on {x.device}; move it to the GPU with .cuda()")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} is a tensor of layout {x.layout}; make it dense with .to_dense()")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, which gemmkit does not record; pass {name}.detach(), "
            "or call under torch.no_grad()"
        )
    if x.is_conj() or x.is_neg():
        lazily, resolve = ("conjugated", "resolve_conj") if x.is_conj() else ("negated", "resolve_neg")
        raise ValueError(
            f"{name} is a lazily {lazily} view, its memory holds other values; pass {name}.{resolve}()"
        )
    dtype = _from_torch().get(x.dtype)
    if dtype is None:
        raise ValueError(
            f"{name} has dtype {x.dtype}, which NumPy and ml_dtypes do not know; convert it with .to()"
        )
    return ArrayInfo(x.data_ptr(), tuple(x.shape), x.stride(), dtype, x.get_device(), False, "torch")


def _read_numba(x: Any, name: str) -> ArrayInfo:
    dtype, pointer = x.dtype, x.device_ctypes_pointer.value or 0
    strides = _elements(x.strides, dtype.itemsize) or _refuse_strides(name, x.strides, dtype)
    stream = x.stream
    return ArrayInfo(
        pointer, x.shape, strides, dtype, _device_of(pointer), False, "numba", int(stream) if stream else None
    )


def _read_numpy(x: Any, name: str) -> ArrayInfo:
    dtype = _native(x.dtype, name)
    strides = _elements(x.strides, dtype.itemsize) or _refuse_strides(name, x.strides, dtype)
    return ArrayInfo(x.ctypes.data, x.shape, strides, dtype, _HOST, not x.flags.writeable, "numpy")


def _read_masked(x: Any, name: str) -> ArrayInfo:
    raise ValueError(f"{name} is a masked array; fill the masked elements and pass the plain array, {name}.filled(...)")


def offers(x: Any, attribute: str) -> bool:
    """Whether an object has an attribute of an array protocol; one that raises is there."""
    try:
        getattr(x, attribute)
    except AttributeError:
        return False
    except Exception:
        return True
    return True


def _interface(x: Any, name: str) -> dict[str, Any]:
    """The entries of ``__cuda_array_interface__``, each of its type. Raises ValueError for an entry that is not."""
    where = f"{name}.__cuda_array_interface__"
    try:
        entries = x.__cuda_array_interface__
    except Exception as error:
        raise ValueError(f"{where} cannot be read: it raised {type(error).__name__}: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{where} is of type {type(entries).__name__}; a dictionary is needed")
    missing = [entry for entry in ("shape", "typestr", "data", "version") if entry not in entries]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for entry, (fits, wanted) in _ENTRIES.items():
        if not fits(entries.get(entry)):
            raise ValueError(f"{where} has {entry}={entries.get(entry)!r}; {wanted} is needed")
    strides = entries.get("strides")
    if strides is not None and len(strides) != len(entries["shape"]):
        raise ValueError(f"{where} has shape={entries['shape']!r} and strides={strides!r}; they must be of one length")
    return entries


def _is_whole(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and abs(int(x)) < 2**64


def _are_whole(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(map(_is_whole, x))


def _is_typestr(x: Any) -> bool:
    try:
        return isinstance(x, str) and np.dtype(x) is not None
    except Exception:  # NumPy raises what it likes
        return False


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "version": (_is_whole, "a whole number"),
    "shape": (lambda x: _are_whole(x) and all(extent >= 0 for extent in x), "a tuple of extents, 0 or more,"),
    "strides": (lambda x: x is None or _are_whole(x), "None or a tuple of numbers of bytes"),
    "typestr": (_is_typestr, "a NumPy typestr such as '<f4'"),
    "data": (
        lambda x: isinstance(x, (tuple, list)) and len(x) == 2 and (x[0] is None or _is_whole(x[0])),
        "a tuple of the address and whether it is read-only",
    ),
    "stream": (
        lambda x: x is None or (_is_whole(x) and x >= 0),
        "None or a stream's handle",
    ),
}


def _read_interface(x: Any, name: str) -> ArrayInfo:
    interface = _interface(x, name)
    version = interface["version"]
    if version < 2:
        raise ValueError(
            f"{name} has version {version} of __cuda_array_interface__; 2 and later are understood"
        )
    if interface.get("mask") is not None:
        raise ValueError(f"{name} is a masked array; fill the masked elements and pass the plain array")
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V":  # how bfloat16 and fp8 look in a typestr; the array's own dtype may say which
        own = getattr(x, "dtype", None)
        if not isinstance(own, np.dtype) or own.itemsize != dtype.itemsize:
            raise ValueError(
                f"{name} has typestr {interface['typestr']!r}, which names no number type; "
                "pass an array whose .dtype does, e.g. ml_dtypes.bfloat16"
            )
        dtype = own
    dtype = _native(dtype, name)
    shape, strides = tuple(map(int, interface["shape"])), interface.get("strides")
    if strides is None:
        strides = _contiguous(shape)
    else:
        strides = _elements(tuple(map(int, strides)), dtype.itemsize) or _refuse_strides(name, strides, dtype)
    pointer, readonly = interface["data"]
    pointer = int(pointer or 0)
    stream = interface.get("stream")
    return ArrayInfo(pointer, shape, strides, dtype, _device_of(pointer), bool(readonly), "cai", stream)


def _read_dlpack(x: Any, name: str) -> ArrayInfo:
    from cuda.core.utils import StridedMemoryView

    try:
        view = StridedMemoryView.from_dlpack(x, stream_ptr=-1)  # -1: no stream is made to wait
    except Exception as error:  # whatever the object's own methods raise
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"{name} cannot be read through DLPack ({reason}); pass {_ACCEPTED}") from error
    shape = tuple(view.shape)
    strides = _contiguous(shape) if view.strides is None else tuple(view.strides)
    ordinal = view.device_id if view.is_device_accessible else _HOST
    return ArrayInfo(view.ptr, shape, strides, np.dtype(view.dtype), ordinal, view.readonly, "dlpack")


@functools.lru_cache(maxsize=4096)
def _elements(strides: _Extents, itemsize: int) -> _Extents | None:
    """Strides in bytes as strides in elements; None when they are no whole elements. Falsy for a scalar."""
    if itemsize == 0 or any(stride % itemsize for stride in strides):
        return None
    return tuple(int(stride) // itemsize for stride in strides)


def _refuse_strides(name: str, strides: Sequence[int], dtype: np.dtype[Any]) -> _Extents:
    if not strides:
        return ()
    raise ValueError(
        f"{name} has strides {tuple(strides)} bytes, which are no multiples of its itemsize {dtype.itemsize} "
        f"({dtype}); pass a copy, e.g. {name}.copy()"
    )


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: _Extents) -> _Extents:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _native(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    if not dtype.isnative:
        raise ValueError(f"{name} has dtype {dtype.str}, of foreign byte order; convert it with .astype")
    return dtype


def _device_of(pointer: int) -> int:
    """Ordinal of the device that holds ``pointer``; the current one for an empty array, 0 without a GPU."""
    if device.count() < 2:  # asking the driver costs more than the rest of `describe`
        return 0
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, ordinal = driver.cuPointerGetAttribute(attribute, pointer)
    return int(ordinal) if int(status) == 0 else device.current_ordinal()


# -- telling at once whether an array is like another --------------------------------------------------------


def matcher(x: Any, name: str = "a") -> Callable[[Any], int | None]:
    """A function that returns the pointer of any array which ``describe`` would describe as it does ``x``,
    pointer and stream apart; and None for every other object. It costs about half of ``describe``.

    Raises what ``describe(x, name)`` raises.

    >>> pointer_of = matcher(np.zeros((2, 3)))
    >>> pointer_of(np.ones((2, 3))) is None, pointer_of(np.ones((3, 2))) is None
    (False, True)
    """
    info, kind = describe(x, name), type(x)
    wanted = info[1:7]
    if info.library == "cupy":
        shape, strides, dtype, ordinal = x.shape, x.strides, info.dtype, info.device

        def cupy_pointer(y: Any) -> int | None:
            if type(y) is kind and y.shape == shape and y.strides == strides and y.dtype == dtype:
                data = y.data
                if data.device_id == ordinal:
                    return int(data.ptr)
            return None

        return cupy_pointer
    if info.library == "torch":
        size, stride, torch_dtype, ordinal = x.shape, x.stride(), x.dtype, info.device
        grad_enabled, may_be_conjugated = sys.modules["torch"].is_grad_enabled, info.dtype.kind == "c"

        def torch_pointer(y: Any) -> int | None:
            if (
                type(y) is kind
                and y.dtype is torch_dtype
                and y.shape == size
                and y.get_device() == ordinal
                and not (y.requires_grad and grad_enabled())
                and not y.is_neg()
                and not (may_be_conjugated and y.is_conj())
            ):
                try:
                    return int(y.data_ptr()) if y.stride() == stride else None
                except RuntimeError:  # a sparse tensor: it has neither strides nor one pointer
                    return None
            return None

        return torch_pointer

    def pointer(y: Any) -> int | None:
        if type(y) is not kind:
            return None
        other = describe(y, name)
        return other.pointer if other[1:7] == wanted else None

    return pointer


# -- new arrays ----------------------------------------------------------------------------------------------


def empty_like(like: Any, shape: Sequence[int], dtype: Any) -> Any:
    """A new, uninitialised, C-contiguous array of the library and on the device of ``like``, an array or
    ArrayInfo.

    CuPy, PyTorch, Numba and NumPy arrays give their own kind; for any other array it is a CuPy array if CuPy
    can be imported, else a PyTorch tensor, else a Numba device array. Raises TypeError when PyTorch has no
    such ``dtype``.

    >>> empty_like(np.zeros(3), (2, 2), np.float16).dtype
    dtype('float16')
    """
    info = like if isinstance(like, ArrayInfo) else describe(like, "like")
    shape, dtype = tuple(shape), np.dtype(dtype)
    if info.device == _HOST:
        return np.empty(shape, dtype)
    library = info.library if info.library in ("cupy", "torch", "numba") else _any_library()
    if library == "torch":
        import torch

        torch_dtype = _to_torch().get(dtype)
        if torch_dtype is None:
            raise TypeError(
                f"PyTorch has no dtype {dtype} for the result; "
                "choose another, or pass an out= of another library"
            )
        return torch.empty(shape, dtype=torch_dtype, device=torch.device("cuda", info.device))
    if library == "cupy":
        import cupy

        if cupy.cuda.device.get_device_id() == info.device:
            return cupy.empty(shape, dtype)
        with cupy.cuda.Device(info.device):
            return cupy.empty(shape, dtype)
    from numba import cuda

    if device.current_ordinal() == info.device:
        return cuda.device_array(shape, dtype)
    with cuda.gpus[info.device]:
        return cuda.device_array(shape, dtype)


@functools.lru_cache(maxsize=1)
def _any_library() -> str:
    for library in ("cupy", "torch"):
        try:
            __import__(library)
        except ImportError:
            continue
        return library
    return "numba"


@functools.lru_cache(maxsize=1)
def _from_torch() -> dict[Any, np.dtype[Any]]:
    """PyTorch's dtypes as NumPy's, with ml_dtypes' for the small floats."""
    import ml_dtypes

    torch = sys.modules["torch"]
    pairs = {
        name: np.dtype(name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    }
    pairs |= {
        name: np.dtype(name) for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")
    }
    for name in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ):
        pairs[name] = np.dtype(getattr(ml_dtypes, name))
    return {getattr(torch, name): dtype for name, dtype in pairs.items() if hasattr(torch, name)}


@functools.lru_cache(maxsize=1)
def _to_torch() -> dict[np.dtype[Any], Any]:
    return {dtype: torch_dtype for torch_dtype, dtype in _from_torch().items()}


# -- memory --------------------------------------------------------------------------------------------------


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
    return bits & -bits


def check_aligned(info: ArrayInfo, name: str) -> None:
    """Raise ValueError for an array whose address is no multiple of its elements' (of their parts', for numbers of
    several): a GPU cannot read these.

    >>> check_aligned(ArrayInfo(0x1002, (8,), (1,), np.dtype("f4"), 0, False, "cai"), "bias")
    Traceback (most recent call last):
    ...
    ValueError: bias is at address 0x1002, which is no multiple of 4 bytes, the size of a float32; pass a copy
    """
    size = part_bytes(info.dtype)
    if info.pointer % size and 0 not in info.shape:
        what = f"a {info.dtype}" if size == info.dtype.itemsize else f"a part of a {info.dtype}"
        raise ValueError(
            f"{name} is at address {info.pointer:#x}, which is no multiple of {size} bytes, the size of {what}; "
            "pass a copy"
        )


@functools.lru_cache(maxsize=256)
def part_bytes(dtype: np.dtype[Any]) -> int:
    """The bytes of one real number of an element: of a complex number or a record they are several."""
    if dtype.names:
        return min(part_bytes(dtype[name]) for name in dtype.names)
    return dtype.itemsize // 2 if dtype.kind == "c" else max(1, dtype.itemsize)


def byte_range(info: ArrayInfo) -> tuple[int, int]:
    """First address of the array's elements and the one after the last; equal for an empty array."""
    low = high = info.pointer
    itemsize = info.dtype.itemsize
    for extent, stride in zip(info.shape, info.strides, strict=True):
        if extent == 0:
            return info.pointer, info.pointer
        reach = (extent - 1) * stride * itemsize
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high + itemsize


def overlaps(x: ArrayInfo, y: ArrayInfo) -> bool:
    """Whether the byte ranges of two arrays meet. An array overlaps itself; interleaved views of one array,
    such as its even and its odd columns, count as overlapping too; an empty array overlaps nothing.

    >>> whole = describe(np.zeros((4, 4)))
    >>> overlaps(whole, whole)
    True
    """
    (x_low, x_high), (y_low, y_high) = byte_range(x), byte_range(y)
    return max(x_low, y_low) < min(x_high, y_high)


class _Elsewhere:
    """An array by its description alone, for NumPy's arithmetic of addresses: nobody looks at its memory."""

    def __init__(self, info: ArrayInfo) -> None:
        size = info.dtype.itemsize
        self.__array_interface__ = {
            "data": (info.pointer, True), "shape": info.shape, "typestr": f"|V{size}", "version": 3,
            "strides": tuple(stride * size for stride in info.strides)}


def shares_memory(x: ArrayInfo, y: ArrayInfo) -> bool:
    """Whether two arrays have a byte in common: unlike `overlaps` exact, unless that is hard to tell, when it is
    True.

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

    >>> windows = np.lib.stride_tricks.sliding_window_view(np.zeros(9), 4)
    >>> overlaps_itself(describe(windows)), overlaps_itself(describe(windows[::4]))
    (True, False)
    """
    if 0 in info.shape:
        return False
    axes = sorted(((abs(s), n) for s, n in zip(info.strides, info.shape, strict=True) if n > 1), reverse=True)
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
