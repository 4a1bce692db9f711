"""Arrays of any library: described, recognised, allocated, and viewed in other shapes.

`empty_like` makes any array like any other; a plan makes the same array at every call, so that all
but the allocation itself is settled beforehand.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from gemmkit.runtime import device
from gemmkit.runtime.array_info import (
    ArrayInfo,
    Extents,
    alignment,
    as_strided,
    byte_range,
    check_aligned,
    flipped,
    overlaps,
    overlaps_itself,
    part_bytes,
    shares_memory,
    unit_axis,
    whole,
)
from gemmkit.runtime.device import as_stream_handle, current_stream

__all__ = [
    "ArrayInfo", "RequiresGradient", "alignment", "as_stream_handle", "byte_range", "check_aligned",
    "current_stream", "describe", "describe_all", "dtype_from_torch", "dtype_to_torch", "empty_like", "flipped",
    "is_array", "offers", "on_host", "overlaps", "overlaps_itself", "part_bytes", "producer_stream",
    "shares_memory", "unit_axis", "whole",
]


# --------------------------------------------------------------------------------------------------
# The protocols by which objects of any library offer an array: whether one is there, and ``__cuda_array_interface__``.

def offers(x: Any, attribute: str) -> bool:
    """Whether an object has an attribute of an array protocol; one that raises is there."""
    try:
        getattr(x, attribute)
    except AttributeError:
        return False
    except Exception:
        return True
    return True


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library (and not a NumPy scalar)."""
    if isinstance(value, (np.generic, int, float, complex, str, bytes, type(None), np.dtype, type)):
        return False
    return (isinstance(value, (np.ndarray, ArrayInfo)) or type(value) in _READERS
            or offers(value, "__cuda_array_interface__") or offers(value, "__dlpack__"))


def interface_of(x: Any, name: str) -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------------------
# Arrays of any library as pointer, shape, strides and dtype; their streams; new arrays of the caller's own kind.
#
# No array library is imported here: an array's library has been imported by whoever made the array, so it is found in
# ``sys.modules`` by the array's type, once for each type. CuPy arrays, PyTorch tensors and Numba device arrays are read
# through their own attributes, which is several times faster than the interfaces they share; everything else through
# ``__cuda_array_interface__``, else DLPack. Nothing is copied, cast or synchronised.
#
# NumPy arrays, tensors on the CPU and DLPack objects in host memory are described with device -1: whether host memory
# will do is the caller's decision.

_ACCEPTED = (
    "a CuPy array, a PyTorch tensor, a Numba device array, a NumPy array, or an object with "
    "__cuda_array_interface__ or __dlpack__"
)
_HOST = -1


class RequiresGradient(ValueError):
    """A tensor requires a gradient, and autograd is recording."""


def describe(x: Any, name: str = "a") -> ArrayInfo:
    """Pointer, shape, strides, dtype and device of ``x``; ``name`` is the argument that messages speak of.

    Raises TypeError when ``x`` is no array that is known here, and ValueError when it is one that a kernel
    cannot read as it stands (strides that are no whole elements, a mask, a lazily conjugated or sparse
    tensor, ...); each says what would do.

    >>> describe(np.zeros((3, 4), np.float32).T)[1:]
    ((4, 3), (1, 4), dtype('float32'), -1, False, 'numpy', None, ())
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
        ("gemmkit.runtime.array_info", "ArrayInfo", lambda info, _: info),       # a component of a kept plan has no array
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
    if not x.is_cuda and str(x.device) != "cpu":
        raise ValueError(f"{name} is a tensor on {x.device}; move it to the GPU with .cuda()")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} is a tensor of layout {x.layout}; make it dense with .to_dense()")
    if x.requires_grad and torch.is_grad_enabled():
        raise RequiresGradient(
            f"{name} requires a gradient, which is not recorded here; pass {name}.detach(), call under "
            "torch.no_grad(), or call what records it in gemmkit.torch: the function of this name, or an operator (op)"
        )
    if x.is_conj() or x.is_neg():
        lazily, resolve = ("conjugated", "resolve_conj") if x.is_conj() else ("negated", "resolve_neg")
        raise ValueError(
            f"{name} is a lazily {lazily} view, so its memory holds other values; pass {name}.{resolve}()"
        )
    dtype = _from_torch().get(x.dtype)
    if dtype is None:
        raise ValueError(
            f"{name} has dtype {x.dtype}, which NumPy and ml_dtypes do not have; convert it with .to()"
        )
    try:
        pointer = x.data_ptr()
    except RuntimeError as error:  # of torch.func.vmap, or of torch.compile
        raise ValueError(
            f"{name} is a {type(x).__name__} without memory; use gemmkit.torch.matmul, or make an operator with "
            "gemmkit.torch.op"
        ) from error
    return ArrayInfo(pointer, tuple(x.shape), x.stride(), dtype, x.get_device(), False, "torch")


def _read_numba(x: Any, name: str) -> ArrayInfo:
    dtype, pointer = x.dtype, x.device_ctypes_pointer.value or 0
    strides = _elements(x.strides, dtype.itemsize) or _refuse_strides(name, x.strides, dtype)
    stream = producer_stream(x, "numba")
    return ArrayInfo(pointer, x.shape, strides, dtype, _device_of(pointer), False, "numba", stream)


def _read_numpy(x: Any, name: str) -> ArrayInfo:
    dtype = _native(x.dtype, name)
    strides = _elements(x.strides, dtype.itemsize) or _refuse_strides(name, x.strides, dtype)
    return ArrayInfo(x.ctypes.data, x.shape, strides, dtype, _HOST, not x.flags.writeable, "numpy")


def _read_masked(x: Any, name: str) -> ArrayInfo:
    raise ValueError(f"{name} is a masked array; fill the masked elements and pass the plain array, {name}.filled(...)")


def _read_interface(x: Any, name: str) -> ArrayInfo:
    interface = interface_of(x, name)
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


def producer_stream(x: Any, library: str) -> int | None:
    """``ArrayInfo.stream`` of an array of ``library``, without the rest: for one that has just been recognised."""
    if library == "numba":
        return int(x.stream) if x.stream else None
    return x.__cuda_array_interface__.get("stream") if library == "cai" else None


@functools.lru_cache(maxsize=4096)
def _elements(strides: Extents, itemsize: int) -> Extents | None:
    """Strides in bytes as strides in elements; None when they are no whole elements. Falsy for a scalar."""
    if itemsize == 0 or any(stride % itemsize for stride in strides):
        return None
    return tuple(int(stride) // itemsize for stride in strides)


def _refuse_strides(name: str, strides: Sequence[int], dtype: np.dtype[Any]) -> Extents:
    if not strides:
        return ()
    raise ValueError(
        f"{name} has strides {tuple(strides)} bytes, which are not multiples of its itemsize {dtype.itemsize} ({dtype}); "
        f"pass a copy, e.g. {name}.copy()"
    )


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: Extents) -> Extents:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _native(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    if not dtype.isnative:
        raise ValueError(f"{name} has dtype {dtype.str}, in another byte order; convert it with .astype")
    return dtype


def _device_of(pointer: int) -> int:
    """Ordinal of the device that holds ``pointer``; the current one for an empty array, 0 without a GPU."""
    if device.count() < 2:  # asking the driver costs more than the rest of `describe`
        return 0
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, ordinal = driver.cuPointerGetAttribute(attribute, pointer)
    return int(ordinal) if int(status) == 0 else device.current_ordinal()


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """NumPy's view of an array in host memory, of the same bytes: also of a tensor whose dtype ``Tensor.numpy``
    does not know (bfloat16, fp8)."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return np.asarray(x)
    dtype, x = _from_torch()[x.dtype], x.detach()
    if dtype.isbuiltin == 1:                   # (the kind of ml_dtypes' is V of most, f of float8_e5m2)
        return np.asarray(x.numpy())
    return np.asarray(x.view(torch.int16 if dtype.itemsize == 2 else torch.int8).numpy().view(dtype))


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
    info = describe(like, "like")
    shape, dtype = tuple(shape), np.dtype(dtype)
    if info.device == _HOST and info.library != "torch":
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
        place = torch.device("cpu") if info.device == _HOST else torch.device("cuda", info.device)
        return torch.empty(shape, dtype=torch_dtype, device=place)
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


def describe_all(a: Any, b: Any, c: Any, out: Any) -> tuple[ArrayInfo, ArrayInfo, ArrayInfo | None, ArrayInfo | None]:
    """A product's arrays, each aligned to its elements."""
    infos = (describe(a, "a"), describe(b, "b"), None if c is None else describe(c, "c"),
             None if out is None else describe(out, "out"))
    for info, name in zip(infos, ("a", "b", "c", "out")):
        if info is not None:
            check_aligned(info, name)
    return infos


def dtype_from_torch(dtype: Any) -> np.dtype[Any] | None:
    """A dtype of PyTorch's as NumPy's; None where there is none."""
    return _from_torch().get(dtype)


def dtype_to_torch(dtype: np.dtype[Any]) -> Any:
    """A dtype of NumPy's as PyTorch's; raises TypeError where there is none."""
    found = _to_torch().get(dtype)
    if found is None:
        raise TypeError(f"PyTorch has no dtype {dtype} for the result; choose another")
    return found


@functools.lru_cache(maxsize=1)
def _to_torch() -> dict[np.dtype[Any], Any]:
    return {dtype: torch_dtype for torch_dtype, dtype in _from_torch().items()}


def allocator(like: ArrayInfo, shape: tuple[int, ...], dtype: Any) -> tuple[Callable[[], Any], Callable[[Any], int]]:
    """What makes an array as ``empty_like(like, shape, dtype)`` does, and what gives its pointer: functions in C where there
    are some.

    Raises nothing; what cannot be made is said when it is asked for.
    """
    shape, dtype, is_alone = tuple(map(int, shape)), np.dtype(dtype), device.count() < 2
    if like.library == "cupy" and is_alone:  # else its current device may be another
        return partial(sys.modules["cupy"].ndarray, shape, dtype), attrgetter("data.ptr")  # what cupy.empty calls
    torch_dtype = _to_torch().get(dtype) if like.library == "torch" else None
    if torch_dtype is None:
        return lambda: empty_like(like, shape, dtype), lambda made: describe(made).pointer
    torch = sys.modules["torch"]
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    short = getattr(guards, "_empty_strided_cuda", None) if is_alone else None
    address_of = torch.Tensor.data_ptr
    if short is not None:  # PyTorch's own compiler calls it: less than half the time, and the current device
        return partial(short, shape, _contiguous(shape), torch_dtype), address_of
    place = torch.device("cuda", 0 if is_alone else like.device)
    return partial(torch.empty, shape, dtype=torch_dtype, device=place), address_of


# --------------------------------------------------------------------------------------------------
# Recognising arrays: whether one is like another, or like any that was seen before, without describing it.
#
# A call that is known asks this of each of its arrays. The attributes that `describe` makes a description of are compared
# as the library gives them: a tuple of them is made and compared faster than an `ArrayInfo` is made. What is asked of
# CuPy and of PyTorch is what their readers in `gemmkit.runtime.arrays` ask; arrays of all else are described.

Key = tuple[Any, ...]


# -- among all that were seen --------------------------------------------------------------------------------

def key_of(x: Any, name: str = "a") -> tuple[int, Key]:
    """The pointer of an array, and a key: arrays with one key have one description, pointer and stream apart.

    A function that does the same for arrays of this type, faster, may then be found in `KEYS`. Raises what ``describe(x,
    name)`` raises.
    """
    kind = type(x)
    info = describe(x, name)
    make = None if kind is ArrayInfo else _MAKERS.get(info.library)
    if make is None:
        return info.pointer, (kind, *info[1:7])
    keyed = KEYS[kind] = make()
    return keyed(x, name)


def _cupy_keys() -> Callable[[Any, str], tuple[int, Key]]:
    def keyed(x: Any, name: str = "") -> tuple[int, Key]:
        data = x.data
        return data.ptr, (type(x), x.shape, x.strides, x.dtype, data.device_id)

    return keyed


def _torch_keys() -> Callable[[Any, str], tuple[int, Key]]:
    """A tensor that `describe` refuses has a key too, which is no other's."""
    recording = sys.modules["torch"].is_grad_enabled

    def keyed(x: Any, name: str = "") -> tuple[int, Key]:
        try:
            return x.data_ptr(), (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.is_conj(),
                                  x.requires_grad and recording())
        except RuntimeError:  # a sparse tensor: it has neither strides nor one pointer
            return 0, (type(x), x.layout)

    return keyed


#: Type of an array -> what `key_of` is for arrays of that type.
KEYS: dict[type, Callable[[Any, str], tuple[int, Key]]] = {}
_MAKERS = {"cupy": _cupy_keys, "torch": _torch_keys}


# -- several at a time, among all that were seen -------------------------------------------------------------
#
# The arrays of a call are recognised together. Of tensors PyTorch's compiler asks in the same way whether the inputs of a
# graph are like those that it was made for: one C function compares all that `_torch_keys` reads, in the time that one or
# two attributes take (0.26 us for four tensors, where their keys take 2.6 and looking them up 0.5). Of CuPy's arrays all
# that `_cupy_keys` reads is compared at once. The function that does it is compiled for their number: a loop takes twice as
# long.

Addresses = Callable[[tuple[Any, ...]], "tuple[int, ...] | None"]


class ArrayKinds:
    """What arrays of one library that come together are known by: one object for all that have the same keys.
    ``addresses(others)`` are those of others that have them, None for all else."""

    __slots__ = ("addresses", "at")

    def __init__(self, addresses: Addresses):
        self.addresses = addresses
        self.at: dict[tuple[int, ...], Any] = {}           # what they are known by at these addresses


_KINDS, _ALIKE, _PLACES = 4096, 4, 256
_kinds: dict[Any, ArrayKinds] = {}


class Recogniser:
    """The arrays of one function's calls. ``recogniser(arrays)`` is what they are known by, and their addresses: what says
    how each is described (stream apart), the remainder of its address by 16, and which have one address. ``last`` are those
    of the last call, which are asked first.

    Raises what `describe` raises, without an argument's name.
    """

    __slots__ = ("_by_shapes", "last")

    def __init__(self) -> None:
        self.last = ArrayKinds(_no_addresses)
        self._by_shapes: dict[Any, tuple[ArrayKinds, ...]] = {}          # of the first and the last, the newest in front

    def __call__(self, arrays: tuple[Any, ...]) -> tuple[Any, tuple[int, ...]]:
        last = self.last
        at = last.addresses(arrays)
        return self.other(arrays) if at is None else (last.at.get(at) or placed(last, at), at)

    def other(self, arrays: tuple[Any, ...]) -> tuple[Any, tuple[int, ...]]:
        """Arrays that are not like those of the last call."""
        try:
            shapes = arrays[0].shape, arrays[-1].shape
            likely = self._by_shapes.get(shapes, ())
        except (AttributeError, TypeError):                # another library's arrays, without a shape, or one that is a list
            shapes, likely = None, ()
        for one in likely:                                 # calls that come in turn
            at = one.addresses(arrays)
            if at is not None:
                self.last = one
                return one.at.get(at) or placed(one, at), at
        return self._among_all(arrays, shapes)

    def _among_all(self, arrays: tuple[Any, ...], shapes: Any) -> tuple[Any, tuple[int, ...]]:
        """By their keys, which stand for arrays of several libraries, or of another."""
        both = [KEYS.get(type(x), key_of)(x, "") for x in arrays]
        at, keys = tuple([pointer for pointer, _ in both]), tuple([key for _, key in both])
        addresses = _addresses(arrays, keys)
        if addresses is None:
            return keys if _are_apart(at) else _told_apart(keys, at), at
        known = keys, _asked(arrays)
        found = _kinds.get(known)
        if found is None:
            if len(_kinds) >= _KINDS:
                _kinds.clear()
            found = _kinds[known] = ArrayKinds(addresses)
        else:
            found.addresses = addresses                    # it was made in another mode of PyTorch's, such as for inference
        if len(self._by_shapes) >= _KINDS:
            self._by_shapes.clear()
        others = [one for one in self._by_shapes.get(shapes, ()) if one is not found]
        self._by_shapes[shapes] = found, *others[:_ALIKE - 1]
        self.last = found
        return found.at.get(at) or placed(found, at), at


def _no_addresses(arrays: tuple[Any, ...]) -> None:
    """Of a function that has not been called."""


def _asked(arrays: tuple[Any, ...]) -> Any:
    """What PyTorch's check asks beside keys: whether a tensor requires a gradient, recording or not."""
    return tuple([getattr(x, "requires_grad", None) for x in arrays])


def alike(arrays: tuple[Any, ...]) -> Addresses:
    """`ArrayKinds.addresses` for arrays like these. Raises what `describe` raises."""
    return _addresses(arrays, tuple([KEYS.get(type(x), key_of)(x, "")[1] for x in arrays])) or _no_addresses


def _addresses(arrays: tuple[Any, ...], keys: tuple[Key, ...]) -> Addresses | None:
    """None for arrays of several libraries, or of one whose arrays are described, and for tensors without memory."""
    libraries = {_LIBRARY_OF.get(len(key)) for key in keys}
    library = libraries.pop() if len(libraries) == 1 else None
    if library is None:
        return None
    kinds, compared = tuple(map(type, arrays)), tuple([part for key in keys for part in key[1:]])
    if library == "cupy":
        return _comparing(library, len(arrays))(kinds, compared, None, None)
    torch = sys.modules["torch"]
    make = _guards(torch)
    if make is None or not {*kinds} <= {torch.Tensor, torch.nn.Parameter}:
        return _comparing(library, len(arrays))(kinds, compared, torch.is_grad_enabled, None)
    records = torch.is_grad_enabled() if any(x.requires_grad for x in arrays) else None
    return _comparing("checked", len(arrays))(make(arrays), records, torch.is_grad_enabled, torch.Tensor.data_ptr)


#: The library of an array by the length of its key (type, ...).
_LIBRARY_OF = {5: "cupy", 8: "torch"}
_OF_ONE = {                            # whether one has the key, of which the first is known, and where it is
    "cupy": ("{x}.shape, {x}.strides, {x}.dtype, (of_{x} := {x}.data).device_id,", "of_{x}.ptr"),
    "torch": ("{x}.shape, {x}.stride(), {x}.dtype, {x}.device, {x}.is_neg(), {x}.is_conj(), "
              "{x}.requires_grad and recording(),", "{x}.data_ptr()"),
    "checked": ("", "address_of({x})"),
}


@functools.lru_cache(maxsize=256)
def _comparing(library: str, count: int) -> Callable[..., Addresses]:
    """What makes `ArrayKinds.addresses` of so many arrays."""
    names = [f"x{n}" for n in range(count)]
    all_of = ", ".join(names) + ","
    compared, address = _OF_ONE[library]
    if library == "checked":
        begin = "def made(check, records, recording, address_of):"
        same = f"check({all_of}) and (records is None or records == recording())"
    else:
        begin = f"def made(kinds, keys, recording, _):\n    {''.join(f'kind{n}, ' for n in range(count))} = kinds"
        same = (" and ".join(f"type({x}) is kind{n}" for n, x in enumerate(names))
                + f" and ({' '.join(compared.format(x=x) for x in names)}) == keys")
    text = f"""{begin}
    def addresses(arrays):
        if len(arrays) != {count}:
            return None
        {all_of} = arrays
        try:
            if {same}:
                return {''.join(address.format(x=x) + ', ' for x in names)}
        except RuntimeError:                               # of a sparse tensor: it has neither strides nor one pointer
            return None
    return addresses
"""
    space: dict[str, Any] = {}
    exec(text, space)
    made: Callable[..., Addresses] = space["made"]
    return made


def _are_apart(at: tuple[int, ...]) -> bool:
    """Whether all are multiples of 16, and no two are one."""
    return len({*at}) == len(at) and not any([pointer & 15 for pointer in at])


def _told_apart(kinds: Any, at: tuple[int, ...]) -> Any:
    return kinds, tuple([pointer & 15 for pointer in at]), tuple(map(at.index, at))


def placed(kinds: ArrayKinds, at: tuple[int, ...]) -> Any:
    """What arrays at these addresses are known by, kept for the next that are there."""
    if len(kinds.at) >= _PLACES:
        kinds.at.clear()
    found = kinds.at[at] = kinds if _are_apart(at) else _told_apart(kinds, at)
    return found


@functools.lru_cache(maxsize=1)
def _guards(torch: Any) -> Callable[[tuple[Any, ...]], Callable[..., bool]] | None:
    """What makes a function that tells whether tensors are like these. Its name is not public, so that it is asked about
    each difference that a key tells; None where it does not tell one."""
    guards: Any = getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "guards", None)

    def check_of(tensors: tuple[Any, ...]) -> Callable[..., bool]:
        check: Callable[..., bool] = guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check

    try:
        x = torch.empty(2, 3, dtype=torch.complex64, device="cpu")
        real = x.real
        for like, others in (
            (x, [x.conj(), x.to(torch.complex128), real]),
            (real, [real.contiguous(), real[:1], real.t(), real.half(), real.detach().requires_grad_(), real.to("meta"),
                    torch._neg_view(real), torch.nn.Parameter(real), real.to_sparse(), real.flatten()]),
        ):
            check = check_of((like,))
            if check(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)) is not True:
                return None
            if any(check(other) is not False for other in others):
                return None
    except Exception:                                      # whatever another version's does
        return None
    return check_of


# -- like one array ------------------------------------------------------------------------------------------

def matcher(x: Any, name: str = "a") -> Callable[[Any], int | None]:
    """A function that returns the pointer of any array which ``describe`` would describe as it does ``x``,
    pointer and stream apart; and None for every other object. It costs less than half of ``describe``.

    Raises what ``describe(x, name)`` raises.

    >>> import numpy as np
    >>> pointer_of = matcher(np.zeros((2, 3)))
    >>> pointer_of(np.ones((2, 3))) is None, pointer_of(np.ones((3, 2))) is None
    (False, True)
    """
    info, kind = describe(x, name), type(x)
    key = KEYS.get(kind, key_of)(x, name)[1]
    if library := _LIBRARY_OF.get(len(key)):
        recording = sys.modules["torch"].is_grad_enabled if library == "torch" else None
        addresses = _comparing(library, 1)((kind,), key[1:], recording, None)
        return lambda y: (addresses((y,)) or (None,))[0]
    wanted = info[1:7]

    def pointer(y: Any) -> int | None:
        if type(y) is not kind:
            return None
        other = describe(y, name)
        return other.pointer if other[1:7] == wanted else None

    return pointer


# --------------------------------------------------------------------------------------------------
# Views of an array with other shapes and strides, in the array's own library. Nothing is copied.

def strided(x: Any, info: ArrayInfo, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """The elements of ``x``, described by ``info``, from its first one on, with another shape and other strides (in
    elements). They must stay within the array.

    >>> from gemmkit.runtime.arrays import describe
    >>> x = np.arange(6)
    >>> strided(x, describe(x), (2, 2), (3, 1)).tolist()
    [[0, 1], [3, 4]]
    """
    if (shape, strides) == (info.shape, info.strides):
        return x
    size = info.dtype.itemsize
    if info.library == "numpy":
        return as_strided(x, shape, [s * size for s in strides], writeable=not info.readonly)
    if info.library == "cupy":
        return sys.modules["cupy"].lib.stride_tricks.as_strided(x, shape, [s * size for s in strides])
    if info.library == "torch":
        return x.as_strided(shape, strides)
    return _View(x, info, shape, strides, info.pointer)


class _View:
    """A view behind ``__cuda_array_interface__``, of an array whose library makes none."""

    def __init__(self, owner: Any, info: ArrayInfo, shape: tuple[int, ...], strides: tuple[int, ...], pointer: int):
        self.owner, self.info, self.shape, self.strides, self.dtype = owner, info, shape, strides, info.dtype
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": info.dtype.str, "data": (pointer, info.readonly),
            "strides": tuple(stride * info.dtype.itemsize for stride in strides), "stream": info.stream}

    def __getitem__(self, at: tuple[int, ...]) -> _View:
        pointer = self.pointer + self.dtype.itemsize * sum(i * stride for i, stride in zip(at, self.strides))
        return _View(self.owner, self.info, self.shape[len(at):], self.strides[len(at):], pointer)
