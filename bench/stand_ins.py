"""Stand-ins for a GPU, so that gemmkit's own part of a call runs on any machine: a driver whose launches do nothing, and
arrays that look like CuPy's and PyTorch's to gemmkit.

They cost little themselves, but nothing that the libraries do: what is measured with them is gemmkit's Python alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, repeat
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from gemmkit.runtime import arrays, device, launch, tensor_maps
from gemmkit.runtime import launch as launchable
from gemmkit.runtime.arrays import KEYS

STREAM = 77  # what both libraries say is their current stream
_PAGE = 1 << 20  # bytes between two arrays


class Kernel(launch.LoadedKernel):
    """A kernel of which the driver is asked nothing."""

    def __init__(self) -> None:
        properties = SimpleNamespace(shared_size_bytes=0, max_threads_per_block=1024, num_regs=64)
        super().__init__(SimpleNamespace(attributes={0: properties}), "stand_in")

    def _check_parameters(self, parameters: Any) -> None:
        """Whatever parameters it is bound with are its own."""

    def _function(self) -> int:
        return 1

    def _raise_dynamic_limit(self, ordinal: int, size: int) -> None:
        """Any size will do."""


def nothing_launched() -> Any:
    """A C function that takes a launch's four arguments, does nothing and answers 0: whether two threads are one, asked of
    what are no threads."""
    entry = ctypes.CDLL(None).pthread_equal
    entry.restype = ctypes.c_int
    return entry


@contextmanager
def gpu(entry: Callable[..., int] | None = None) -> Iterator[None]:
    """Within it there is one device, an H100. ``entry`` stands for cuLaunchKernelEx."""
    from cuda.bindings import driver

    entry = nothing_launched() if entry is None else entry
    streams: dict[str, Any] = {
        "cuStreamIsCapturing": lambda handle: (0, 0), "cuStreamGetDevice": lambda handle: (0, 0),
        "cuStreamGetId": lambda handle: (0, handle)}  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(driver, create=True, **streams))
        for owner, fields in (
            (device, {"_absence": lambda: None, "count": lambda: 1, "current_ordinal": lambda: 0,
                      "ensure_context": lambda ordinal=None: 0, "_describe": lambda ordinal: device.H100}),
            (launch, {"_entry": lambda: entry}),
            (launchable, {"_loaded": lambda cubin: Kernel()}),
            (launchable.Launchable, {"entry": lambda self: SimpleNamespace(cubin=b"")}),
            (tensor_maps.Encoder, {"_encode": _encoded}),
        ):  # fmt: skip
            stack.enter_context(mock.patch.multiple(owner, **fields))
        yield


def _encoded(encoder: Any, address: int) -> bytes:
    """A tensor map for an address, made by no driver."""
    encoder._known[address] = made = address.to_bytes(8, "little") * 16
    return made


# -- arrays of libraries that need not be there ---------------------------------------------------------------------------

_pages = count(1 << 28)
_SAME = 1 << 47  # where a library's allocator puts every new array, since the one before has gone


class CupyArray:
    """What gemmkit reads of a ``cupy.ndarray``."""

    __slots__ = ("__weakref__", "data", "dtype", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float32, pointer: int = _SAME,
                 strides: tuple[int, ...] | None = None):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.strides = _c_strides(shape, self.dtype.itemsize) if strides is None else strides
        self.data = SimpleNamespace(ptr=pointer, device_id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self.shape, "strides": self.strides, "typestr": self.dtype.str,
                "data": (self.data.ptr, False)}


class TorchTensor:
    """What gemmkit reads of a ``torch.Tensor``. But for `data_ptr` its methods are C functions, as PyTorch's are."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, pointer: int = _SAME, device: Any = ("cuda", 0),
                 strides: tuple[int, ...] | None = None):
        self.shape, self.dtype, self.device, self.layout = shape, dtype, device, "strided"
        self.is_cuda, self.requires_grad = True, False
        self.stride = repeat(_c_strides(shape, 1) if strides is None else strides).__next__
        self.pointer = pointer
        self.get_device = repeat(device[1]).__next__
        self.is_conj = self.is_neg = repeat(False).__next__
        self.__cuda_array_interface__: dict[str, Any] = {}  # it is there, and not read

    def data_ptr(self) -> int:
        return self.pointer

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> TorchTensor:
        return TorchTensor(tuple(shape), self.dtype, self.data_ptr(), self.device, tuple(strides))


def _c_strides(shape: tuple[int, ...], step: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def cupy_module() -> ModuleType:
    """As much of CuPy as a call touches."""
    stream = SimpleNamespace(ptr=STREAM)
    made: Any = ModuleType("cupy")
    made.ndarray = CupyArray
    made.empty = lambda shape, dtype: CupyArray(shape, dtype)
    made.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=lambda x, shape, strides: CupyArray(
        tuple(shape), x.dtype, x.data.ptr, tuple(strides))))
    made.cuda = SimpleNamespace(get_current_stream=lambda ordinal: stream, device=SimpleNamespace(get_device_id=lambda: 0))
    return made


def torch_module() -> ModuleType:
    """As much of PyTorch as a call touches; its dtypes are their names."""
    made: Any = ModuleType("torch")
    made.Tensor, made.strided = TorchTensor, "strided"
    made.is_grad_enabled = repeat(True).__next__
    made.device = lambda kind, ordinal: (kind, ordinal)
    made.empty = lambda shape, dtype, device: TorchTensor(shape, dtype, device=device)
    made._C = SimpleNamespace(_cuda_getCurrentRawStream={0: STREAM}.__getitem__)
    for name in ("float16", "float32"):
        setattr(made, name, _torch_dtype(name))
    return made


def _torch_dtype(name: str) -> str:
    return sys.intern(f"torch.{name}")  # one object, as PyTorch's are


LIBRARIES: dict[str, tuple[Callable[[], ModuleType], Callable[..., Any]]] = {
    "cupy": (cupy_module, lambda *shape, dtype="float16": CupyArray(shape, dtype, next(_pages) * _PAGE)),
    "torch": (torch_module, lambda *shape, dtype="float16": TorchTensor(shape, _torch_dtype(dtype), next(_pages) * _PAGE)),
}


@contextmanager
def _installed(name: str, module: ModuleType) -> Iterator[None]:
    """(`mock.patch.dict` of all modules would drop those of gemmkit that are loaded within, and load them again.)"""
    there = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if there is None:
            del sys.modules[name]
        else:
            sys.modules[name] = there


@contextmanager
def library(name: str) -> Iterator[Callable[..., Any]]:
    """Within it the library is there, and what this gives makes an array of a shape."""
    module, make = LIBRARIES[name]
    asked = arrays._from_torch, arrays._to_torch, arrays._any_library
    with ExitStack() as stack:
        stack.enter_context(_installed(name, module()))
        for known in (arrays._READERS, KEYS):
            stack.enter_context(mock.patch.dict(known, clear=True))
        for remembered in asked:
            remembered.cache_clear()
        try:
            yield make
        finally:
            for remembered in asked:
                remembered.cache_clear()
