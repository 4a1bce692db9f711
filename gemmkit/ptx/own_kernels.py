"""Kernels that a user writes with ``numba.cuda.jit`` on the instructions of `gemmkit.ptx` and the tiles of `gemmkit.tiling`.

Instructions take a `view` of an array, so that they know its element type, its contiguous axis and its alignment:

    @cuda.jit
    def double(out, a):
        x, y = view(a), view(out)
        i = block_x() * 32 + thread_index()
        y[i] = x[i] + x[i]

    double[2, 32](out, a)                        # as any kernel of Numba
    launch(double, out, a, grid=2, block=32)     # the same; gemmkit.emulate() emulates it

`device` makes a helper function: its constants take the type of the other operand, and it runs in the emulator, too. A
thread's numbers are a tuple, and these functions go over it: `each`, `apply`, `generate`, `fill`, `split`, `join`, `deal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemmkit.emulator import current_mode
from gemmkit.lang.aggregates import fill
from gemmkit.lang.functions import device
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType, proxy
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, TypingError, Values, atom, ir, signature, types
from gemmkit.lang.registers import apply, deal, each, generate, join, split
from gemmkit.ptx.tma import WORDS, WORDS_DTYPE, MapTable
from gemmkit.runtime.arrays import ArrayInfo, alignment, describe, unit_axis
from gemmkit.runtime.tensor_maps import Encoder, TensorMapSpec

__all__ = ["apply", "deal", "device", "each", "fill", "generate", "join", "launch", "split", "tensor_maps", "view"]

i32, i64 = ir.IntType(32), ir.IntType(64)
_WITHOUT_ASKING = 48 * 1024            # bytes of dynamic shared memory that every kernel may have


def _type_view(context: TypingContext, array: types.Type, *aligned: types.Type) -> Any:
    if len(aligned) > 1 or not all(isinstance(ty, types.IntegerLiteral) for ty in aligned):
        return None
    nbytes = int(aligned[0].literal_value) if aligned else 1
    if nbytes not in (1, 2, 4, 8, 16):
        raise TypingError(f"view: alignment is {nbytes}; 1, 2, 4, 8 or 16 bytes are needed")
    if isinstance(array, ViewType):
        alignment = max(nbytes, array.alignment)
        found = ViewType(array.dtype, array.ndim, array.unit, alignment, array.wide, array.readonly, array.near)
        return signature(found, array, *aligned), lambda c, b, s, v: v[0]
    if not isinstance(array, types.Array):
        return None
    from numba.cuda.np.numpy_support import as_dtype

    dtype = as_dtype(array.dtype)
    unit = {"C": array.ndim - 1, "F": 0}.get(array.layout)
    to = ViewType(dtype, array.ndim, unit, max(nbytes, dtype.itemsize), readonly=not array.mutable)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given, out = c.make_array(array)(c, b, v[0]), proxy(c, b, to, None)
        out.address = b.ptrtoint(given.data, i64)
        for axis in range(to.ndim):
            setattr(out, f"extent{axis}", b.trunc(b.extract_value(given.shape, axis), i32))
        for axis in to.strided_axes:
            setattr(out, f"stride{axis}", b.sdiv(b.extract_value(given.strides, axis), i64(dtype.itemsize)))
        return out._getvalue()

    return signature(to, array, *aligned), codegen


@atom(_type_view)
def view(array: Any, alignment: int = 1) -> Any:
    """An array argument of a kernel as instructions take it: ``v[i, j]``, ``v.shape``, `load_global`, `copy_async`.

    Args:
        array: an argument of the kernel, C- or F-contiguous or with any strides; below 2^31 elements along each axis.
        alignment: bytes (1 to 16, a constant) of which every row's start is a multiple. An access of several elements is one
            instruction where this allows it.

    Raises ValueError in the emulator if the array is not so aligned.
    """
    if not isinstance(array, MapTable) and alignment > array.alignment:
        raise ValueError(f"view: alignment is {alignment}, and {array.memory.name} begins at {array.address:#x} with "
                         f"strides of {array.steps} bytes")
    return array


def tensor_maps(*maps: tuple[Any, Sequence[int], int]) -> Any:
    """A table of tensor maps for TMA, as an argument of a kernel: `acquire_map` and `map_at` take a `view` of it.

    Args:
        maps: tuples ``(array, box, swizzle)``. The array's last axis is contiguous; its other strides and its address are
            multiples of 16 bytes. ``box`` counts elements, the last axis's first, 1 to 256 of each; ``swizzle`` is 0, 32, 64
            or 128: the bytes of a row of the box.

    Returns an array on the GPU, which must live as long as kernels use it; in the emulator, the emulator's table.

    Raises ValueError, with the reason, for an array or a box that TMA does not take.
    """
    made: list[Any] = []
    for n, (array, box, swizzle) in enumerate(maps):
        info = describe(array, f"array {n}")
        spec, axis = TensorMapSpec(info.dtype, tuple(box), swizzle), len(info.shape) - 1
        encoder = Encoder.of(spec, info, axis)
        made.append(_emulated_map(array, info, n, spec, axis) if current_mode() else encoder(info.pointer))
    if current_mode():
        return MapTable(made)
    from numba import cuda

    return cuda.to_device(np.frombuffer(b"".join(made), WORDS_DTYPE).reshape(-1, WORDS).copy())


def _emulated_map(array: np.ndarray, info: ArrayInfo, n: int, spec: TensorMapSpec, axis: int) -> Any:
    from gemmkit.emulator.copies import EmulatedTensorMap

    return EmulatedTensorMap.of(_emulated_view(array, info, f"array {n} of the tensor maps"), spec, axis)


def _emulated_view(array: np.ndarray, info: ArrayInfo, name: str) -> View:
    from gemmkit.emulator.memory import Memory

    unit = unit_axis(info)
    return View(array, Memory.for_array(array, name, readonly=not array.flags.writeable), unit, alignment(info, unit))


def launch(kernel: Any, *arguments: Any, grid: int | tuple[int, ...], block: int, shared_memory: int = 0,
           stream: Any = 0) -> None:
    """Run a kernel of ``numba.cuda.jit`` on the GPU, or within ``with gemmkit.emulate():`` in the emulator.

    Args:
        kernel: what ``cuda.jit`` returned.
        arguments: arrays of CuPy, PyTorch or Numba (NumPy's in the emulator), numbers, and `tensor_maps`.
        grid: blocks, up to three dimensions; block: threads of a block.
        shared_memory: bytes of dynamic shared memory a block. Above 48 KiB, which ``kernel[grid, block, stream, nbytes]``
            cannot have, the kernel is allowed them first.
        stream: Numba's; 0 is the default stream. The emulator ignores it.

    Raises TypeError if ``kernel`` is no kernel of Numba's, or takes another number of arguments; in the emulator, a fault of
    the kernel with its line.
    """
    if not hasattr(kernel, "py_func"):
        raise TypeError(f"launch: kernel is {kernel!r}; a function that numba.cuda.jit returned is needed")
    code = kernel.py_func.__code__
    if len(arguments) != code.co_argcount:
        names = ", ".join(code.co_varnames[:code.co_argcount])
        raise TypeError(f"launch: {len(arguments)} arguments; {code.co_name}({names}) takes {code.co_argcount}")
    x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    blocks = (x, y, z)
    mode = current_mode()
    if mode is not None:
        _emulate(kernel.py_func, arguments, blocks, block, shared_memory, mode.seed)
        return
    if shared_memory > _WITHOUT_ASKING:
        kernel = kernel if kernel.specialized else kernel.specialize(*arguments)          # the one that is launched
        _allow_shared_memory(next(iter(kernel.overloads.values())), shared_memory)
    kernel[blocks, block, stream, shared_memory](*arguments)


def _emulate(function: Any, arguments: tuple, grid: tuple[int, int, int], block: int,
             shared_memory: int, seed: int | None) -> None:
    from gemmkit.emulator import machine
    from gemmkit.emulator.user_code import arguments as twins
    from gemmkit.emulator.user_code import kernel_code

    names = function.__code__.co_varnames
    given = [_emulated_view(x, describe(x, name), name) if isinstance(x, np.ndarray) else x
             for x, name in zip(arguments, names)]
    machine.launch(kernel_code(function), twins(given), grid=grid, block=(block, 1, 1), shared_memory=shared_memory,
                   schedule_seed=seed)


def _allow_shared_memory(compiled: Any, nbytes: int) -> None:
    from numba.cuda.cudadrv.driver import binding, driver

    function = compiled._codelibrary.get_cufunc()
    attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuKernelSetAttribute(attribute, nbytes, function.handle, function.device.id)
