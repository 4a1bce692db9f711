"""What launching a kernel costs on the host: `python -m bench.launch`.

A kernel that does nothing is launched with 4, 8, 16 and 32 parameters by each route: `direct` is what gemmkit
uses (`gemmkit.runtime.launch`, ctypes), `cuda.core` is `cuda.core.launch` with stream, config and typed
arguments made before. Beside them: packing alone (`pack`), and reading an array (`describe`) or
recognising it (`matcher`) for each array library that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from bench.host import host_us
from gemmkit.runtime import arrays, device
from gemmkit.runtime.arrays import matcher
from gemmkit.runtime.compile import assemble
from gemmkit.runtime.launch import LoadedKernel, launch_arguments, load, parameter_struct

COUNTS = (4, 8, 16, 32)


def empty_kernel(count: int) -> LoadedKernel:
    """A kernel of `count` 64-bit parameters that does nothing, for the current device."""
    from numba import cuda, types

    def empty(values):  # type: ignore[no-untyped-def]  # Numba types it
        return

    limits = device.current()
    major, minor = limits.arch
    signature = types.void(types.UniTuple(types.int64, count))
    cc = (major, minor, "a") if major >= 9 else (major, minor)
    ptx, _ = cuda.compile(empty, signature, cc=cc, device=False, abi="numba", output="ptx")
    text = ptx if isinstance(ptx, str) else ptx.decode()
    found = re.search(r"\.visible \.entry (\w+)\(", text)
    if found is None:
        raise RuntimeError("the compiled PTX has no kernel")
    return load(assemble(text, limits.arch_name).cubin, found.group(1))


def synchronise() -> None:
    from cuda.core import Device

    Device().sync()


def launches(count: int) -> Iterator[tuple[str, float]]:
    """Route and host time in microseconds, for a kernel of `count` parameters."""
    from cuda.core import Device, launch

    kernel = empty_kernel(count)
    codes = ["i64"] * count
    bound = kernel.bind((1,), (32,), 0, codes)
    stream = Device().create_stream()
    handle, values = int(stream.handle), tuple(range(count))
    direct = bound.launch
    config, typed = launch_arguments(bound, values)

    pack = parameter_struct(tuple(codes))[0].pack_into
    buffer = bytearray(8 * count)

    yield "pack", host_us(lambda: pack(buffer, 0, *values), synchronise)
    yield "direct", host_us(lambda: direct(handle, values), synchronise)
    yield "cuda.core", host_us(lambda: launch(stream, config, kernel.kernel, *typed), synchronise)


def array_makers() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and an array of 64 x 64, of each library that is installed."""
    import importlib.util

    if importlib.util.find_spec("cupy"):
        import cupy

        yield "cupy", lambda: cupy.zeros((64, 64), "float32")
    if importlib.util.find_spec("torch"):
        import torch

        yield "torch", lambda: torch.zeros((64, 64), device="cuda")
    from numba import cuda

    yield "numba", lambda: cuda.device_array((64, 64), "float32")


def main() -> int:
    print(f"{device.current().name}; host time in microseconds\n")
    print(f"{'parameters':>10} {'pack':>8} {'direct':>8} {'cuda.core':>10} {'ratio':>6}")
    for count in COUNTS:
        times = dict(launches(count))
        ratio = times["cuda.core"] / times["direct"]
        print(
            f"{count:>10} {times['pack']:>8.2f} {times['direct']:>8.2f} {times['cuda.core']:>10.2f}"
            f" {ratio:>6.2f}"
        )
    print(f"\n{'array':>10} {'describe':>8} {'matcher':>8} {'current stream':>15}")
    for library, make in array_makers():
        array = make()
        pointer_of = matcher(array)
        times = {
            "describe": host_us(lambda array=array: arrays.describe(array), synchronise),  # type: ignore[misc]
            "matcher": host_us(lambda array=array, f=pointer_of: f(array), synchronise),  # type: ignore[misc]
            "stream": host_us(lambda library=library: arrays.current_stream(library, 0), synchronise),  # type: ignore[misc]
        }
        print(f"{library:>10} {times['describe']:>8.2f} {times['matcher']:>8.2f} {times['stream']:>15.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
