"""One small kernel, three ways: in the emulator, as PTX for an H100 (no GPU needed), and on the GPU.

    def double(out, a):
        i = thread_index()
        out[i] = a[i] * 2

    (result,) = emulated(double, Out((32,), "f4"), a)          # NumPy arrays come back for every `Out`
    ptx = compiled(double, Out((32,), "f4"), a)
    (result,) = on_device(double, Out((32,), "f4"), a)

Arguments: NumPy arrays are read-only operands; `Out` is an output that must be written before it is read; NumPy
scalars and `Runtime(number)` are run-time scalars (the latter weak); components stay components; anything else is a
compile-time value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gemmkit.components import freeze
from gemmkit.emulator import machine
from gemmkit.emulator.memory import Memory
from gemmkit.emulator.user_code import arguments as twins
from gemmkit.lang.functions import Frozen, freeze_array, freeze_scalar
from gemmkit.lang.host import View
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import ENTRY, to_ptx
from gemmkit.runtime.device import H100, current

ADDRESS = 256  # bytes at which every array starts, as a GPU's allocator gives them


@dataclass(frozen=True)
class Out:
    """An output array that the kernel fills; ``order`` is NumPy's."""

    shape: tuple[int, ...]
    dtype: Any
    order: str = "C"

    def empty(self) -> np.ndarray:
        return aligned(np.zeros(self.shape, self.dtype, order=self.order))  # type: ignore[call-overload]


@dataclass(frozen=True)
class Runtime:
    """A Python number as a run-time argument: an int is an index, a float a weak float64."""

    value: int | float


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy of a C- or F-contiguous array at an address that is a multiple of `ADDRESS`."""
    raw = np.empty(array.nbytes + ADDRESS, np.uint8)
    start = -raw.ctypes.data % ADDRESS
    order = "C" if array.flags.c_contiguous else "F"
    assert array.flags[f"{order}_CONTIGUOUS"], "the harness takes contiguous arrays"
    out = raw[start:start + array.nbytes].view(array.dtype).reshape(array.shape, order=order)  # type: ignore[call-overload]
    out[...] = array
    return out


def _unit(array: np.ndarray) -> int | None:
    return next((axis for axis in reversed(range(array.ndim)) if array.strides[axis] == array.itemsize), None)


def _frozen(argument: Any) -> Frozen:
    """An argument as the compiled kernel takes it; arrays by their type (an address comes later)."""
    if isinstance(argument, Out):
        argument = argument.empty()
    if isinstance(argument, np.ndarray):
        return freeze_array(describe(aligned(argument)))
    if isinstance(argument, Runtime):
        return freeze_scalar(argument.value)
    frozen = freeze(argument)
    if isinstance(argument, int):                                       # its type says all, but it is passed as well
        frozen.leaves.append(("bool" if isinstance(argument, bool) else "i32", int(argument)))
    elif isinstance(argument, np.dtype):
        frozen.leaves.append(("u64", 0))                                # Numba passes a pointer that nobody reads
    return frozen


def compiled(kernel: Callable[..., None], *arguments: Any, threads: int = 32) -> str:
    """The kernel's PTX for an H100."""
    return to_ptx(kernel, tuple(_frozen(a).type for a in arguments), threads, H100)


def emulated(kernel: Callable[..., None], *arguments: Any, threads: int = 32, shared: int = 0,
             blocks: int = 1) -> list[np.ndarray]:
    """Run the kernel in the emulator; the output arrays."""
    given, outputs = [], []
    for n, argument in enumerate(arguments):
        if isinstance(argument, Out):
            array = argument.empty()
            memory = Memory.for_array(array, f"argument {n}", written=False)
            outputs.append(array)
        elif isinstance(argument, np.ndarray):
            array = aligned(argument)
            memory = Memory.for_array(array, f"argument {n}", readonly=True)
        else:
            given.append(argument.value if isinstance(argument, Runtime) else argument)
            continue
        ty = freeze_array(describe(array)).type
        given.append(View(array, memory, ty.unit, ty.alignment))
    machine.launch(kernel, twins(given), grid=(blocks, 1, 1), block=(threads, 1, 1), shared_memory=shared)
    return outputs


@cache
def _loaded(kernel: Callable[..., None], types: tuple, threads: int) -> Any:
    from gemmkit.runtime.compile import assemble
    from gemmkit.runtime.launch import load

    device = current()
    return load(assemble(to_ptx(kernel, types, threads, device), device.arch_name).cubin, ENTRY)


def on_device(kernel: Callable[..., None], *arguments: Any, threads: int = 32, shared: int = 0,
              blocks: int = 1) -> list[np.ndarray]:
    """Run the kernel on the current GPU; the output arrays, as NumPy's."""
    import cupy

    frozen = [_frozen(a) for a in arguments]
    loaded = _loaded(kernel, tuple(f.type for f in frozen), threads)
    leaves, outputs, keep = [], [], []
    for argument, part in zip(arguments, frozen, strict=True):
        here = list(part.leaves)
        if isinstance(argument, (Out, np.ndarray)):
            host = argument.empty() if isinstance(argument, Out) else aligned(argument)
            order = "C" if host.flags.c_contiguous else "F"
            there = cupy.asarray(host.reshape(-1, order=order).view(np.uint8))  # CuPy has no bfloat16: bytes
            if isinstance(argument, Out):
                there[...] = 0xFF
                outputs.append((there, host, order))
            keep.append(there)
            here[0] = ("u64", there.data.ptr)
        leaves += here
    bound = loaded.bind((blocks, 1, 1), (threads, 1, 1), shared, [code for code, _ in leaves])
    bound.launch(cupy.cuda.get_current_stream().ptr, [value for _, value in leaves])
    return [cupy.asnumpy(there).view(host.dtype).reshape(host.shape, order=order) for there, host, order in outputs]


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays are equal bit for bit, all NaNs of a floating-point type counting as one."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.dtype.kind in "biu":
        return bool(np.array_equal(x, y))
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    nan = np.isnan(wide_x)
    if not np.array_equal(nan, np.isnan(wide_y)):
        return False
    bits = np.dtype(f"u{x.dtype.itemsize}")
    return bool(np.array_equal(x.view(bits)[~nan], y.view(bits)[~nan]))


# -- reading PTX ------------------------------------------------------------------------------------------------------

def instructions(ptx: str) -> Counter[str]:
    """How many of each instruction, all modifiers included."""
    from gemmkit.runtime.compile import instruction_counts

    return instruction_counts(ptx, full=True)


def lines_with(ptx: str, text: str) -> list[str]:
    """The instructions of the PTX that contain ``text``, without leading blanks."""
    body = re.sub(r"//[^\n]*", "", ptx)
    return [line.strip() for line in body.splitlines() if text in line]


def leaves_nothing(ptx: str) -> bool:
    """No call, no function beside the kernel, no local memory."""
    return not re.search(r"\bcall\b|\.func\b|\.local\b|__local_depot", ptx)


def constants_stored(ptx: str) -> dict[int, int]:
    """What a kernel stores when all of it folded: byte offset into its only array -> 32-bit constant.

    Raises AssertionError when a value or an address is computed at run time.
    """
    constants = {name: int(value, 0) for name, value in re.findall(r"mov\.[usb]32\s+(%r\d+), (-?\d+);", ptx)}
    stored: dict[int, int] = {}
    for line in lines_with(ptx, "st.global"):
        match = re.fullmatch(r"st\.global(?:\.v\d)?\.[usb]32\s+\[(%rd\d+)(?:\+(\d+))?\], \{?([^}]*)\}?;", line)
        assert match, f"not a store of constants: {line}"
        for n, name in enumerate(match[3].split(", ")):
            assert name in constants, f"{name} is computed at run time: {line}"
            stored[int(match[2] or 0) + 4 * n] = constants[name]
    assert len(lines_with(ptx, "ld.param.u64")) == 1, "addresses are computed at run time"
    return stored
