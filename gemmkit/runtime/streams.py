"""The stream a library uses now, and a stream of any library as the driver's raw handle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD


def current_stream(library: str, device: int, producer: int | None = None) -> int:
    """The raw handle of the stream that ``library`` uses now on ``device``; ``producer`` is
    ``ArrayInfo.stream``.

    A library without a current stream (Numba, and whatever came by an interface) gives ``producer``, else the
    default stream: the per-thread one if Numba is set so, or the legacy one (0), which is ordered with all
    blocking streams.
    """
    find = stream_finder(library, device)
    if find is not None:
        return find()
    if producer is not None:
        return producer
    if library == "numba":
        from numba import config

        return _PER_THREAD_STREAM if config.CUDA_PER_THREAD_DEFAULT_STREAM else 0
    return 0


def launch_stream(info: Any, stream: int | None) -> int:
    """The raw handle of the stream that a call with an array like ``info`` is launched on: a given one, which is checked, or
    the one that the array's library uses now."""
    if stream is None:
        return current_stream(info.library, info.device, info.stream)
    check_stream(stream, info.device)
    return stream


def stream_finder(library: str, device: int) -> Callable[[], int] | None:
    """A function that gives the raw handle of the stream that ``library`` uses at that time, faster than `current_stream`;
    None for a library without a current stream."""
    if library == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:  # what PyTorch's own compiler calls; a third of the time
            return partial(raw, device)
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        get_current_stream = sys.modules["cupy"].cuda.get_current_stream
        return lambda: get_current_stream(device).ptr
    return None


def as_stream_handle(stream: Any, name: str = "stream") -> int:
    """The raw handle of a stream: an int, anything with ``__cuda_stream__``, or a CuPy, PyTorch or Numba
    stream.

    Raises TypeError, naming the argument, for anything else, and ValueError for a negative int.

    >>> as_stream_handle(0)
    0
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise ValueError(f"{name} must be a stream's handle, 0 or more; got {stream}")
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    for attribute in ("ptr", "cuda_stream"):  # CuPy, PyTorch
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    module = getattr(type(stream), "__module__", "")          # classes may have none
    if module.startswith("numba.cuda"):
        return int(stream)
    raise TypeError(
        f"{name} must be a CUDA stream: an int handle, a CuPy, PyTorch, Numba or cuda.core stream, or an "
        f"object with __cuda_stream__; got {module}.{type(stream).__qualname__}"
    )


def is_capturing(handle: int) -> bool:
    """Whether a stream is being captured into a CUDA graph. Questions for its id or its device would end the capture (seen
    on driver 580); this one does not."""
    from cuda.bindings import driver

    status, capturing = driver.cuStreamIsCapturing(handle)
    return int(status) == 0 and int(capturing) != 0


def check_stream(handle: int, ordinal: int) -> None:
    """Raise ValueError when a stream is another device's than the arrays'. Where there is one device nobody asks."""
    from gemmkit.runtime import device

    if handle in (0, 1, 2) or device.count() < 2:
        return
    from cuda.bindings import driver

    if not hasattr(driver, "cuStreamGetDevice") or is_capturing(handle):
        return
    try:
        status, found = driver.cuStreamGetDevice(handle)
    except RuntimeError:                  # a driver of before 12.8 cannot say
        return
    if int(status) == 0 and int(found) != ordinal:
        raise ValueError(f"stream is of device {int(found)} and the arrays are on device {ordinal}")
