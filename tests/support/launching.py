"""Kernels with tensor maps and clusters, three ways, as `tests.support.harness` does for plain ones.

`Tensor(array, spec)` is an operand that the kernel gets as a tensor map alone; with an `Out` in it, its array comes back
(poisoned where nothing was stored) like those of other outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gemmkit.emulator import machine
from gemmkit.emulator.copies import EmulatedTensorMap
from gemmkit.emulator.memory import Memory
from gemmkit.emulator.user_code import arguments as twins
from gemmkit.lang.functions import Frozen, freeze_array
from gemmkit.lang.host import View
from gemmkit.ptx.tma import TensorMapType
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import ENTRY, assemble, to_ptx
from gemmkit.runtime.device import H100, current
from gemmkit.runtime.tensor_maps import Encoder, TensorMapSpec
from tests.support.harness import Out, Runtime, _frozen, aligned

POISON = 0xFF


@dataclass(frozen=True)
class Tensor:
    """An operand as TMA sees it; ``axis`` is the contiguous one."""

    array: Any
    spec: TensorMapSpec
    axis: int = -1


def _host(argument: Any) -> np.ndarray | None:
    """An array argument in the host's memory, outputs poisoned."""
    if isinstance(argument, Tensor):
        argument = argument.array
    if isinstance(argument, Out):
        out = argument.empty()
        out.view(np.uint8)[...] = POISON
        return out
    return aligned(argument) if isinstance(argument, np.ndarray) else None


def _is_output(argument: Any) -> bool:
    return isinstance(argument.array if isinstance(argument, Tensor) else argument, Out)


def _types(arguments: tuple) -> tuple:
    ordinals = iter(range(len(arguments)))
    return tuple(TensorMapType(next(ordinals)) if isinstance(a, Tensor) else _frozen(a).type for a in arguments)


def compiled(kernel: Callable[..., None], *arguments: Any, threads: int = 128) -> str:
    """The kernel's PTX for an H100."""
    return to_ptx(kernel, _types(arguments), threads, H100)


def emulated(kernel: Callable[..., None], *arguments: Any, threads: int = 128, shared: int = 0, blocks: int = 1,
             cluster: int = 1, seed: int | None = None, dependent: bool = False) -> list[np.ndarray]:
    """Run the kernel in the emulator; the output arrays."""
    given, outputs = [], []
    for n, argument in enumerate(arguments):
        array = _host(argument)
        if array is None:
            given.append(argument.value if isinstance(argument, Runtime) else argument)
            continue
        if _is_output(argument):
            memory = Memory.for_array(array, f"argument {n}", written=False)
            outputs.append(array)
        else:
            memory = Memory.for_array(array, f"argument {n}", readonly=True)
        ty = freeze_array(describe(array)).type
        view = View(array, memory, ty.unit, ty.alignment)
        given.append(EmulatedTensorMap.of(view, argument.spec, argument.axis % array.ndim) if isinstance(argument, Tensor) else view)
    machine.launch(kernel, twins(given), grid=(blocks, 1, 1), block=(threads, 1, 1), shared_memory=shared, cluster=(cluster, 1, 1),
                   schedule_seed=seed, dependent=dependent)
    return outputs


@cache
def _loaded(kernel: Callable[..., None], types: tuple, threads: int) -> Any:
    from gemmkit.runtime.launch import load

    device = current()
    return load(assemble(to_ptx(kernel, types, threads, device), device.arch_name).cubin, ENTRY)


def on_device(kernel: Callable[..., None], *arguments: Any, threads: int = 128, shared: int = 0, blocks: int = 1,
              cluster: int = 1, dependent: bool = False) -> list[np.ndarray]:
    """Run the kernel on the current GPU; the output arrays, as NumPy's."""
    import cupy

    leaves: list[tuple[str, Any]] = []
    outputs, keep = [], []
    for argument in arguments:
        host = _host(argument)
        if host is None:
            leaves += _frozen(argument).leaves
            continue
        there = cupy.asarray(host.reshape(-1).view(np.uint8))  # CuPy has no bfloat16: bytes
        keep.append(there)
        if _is_output(argument):
            outputs.append((there, host))
        if isinstance(argument, Tensor):
            encoder = Encoder.of(argument.spec, describe(host), argument.axis % host.ndim)
            leaves.append(("tensor_map", encoder(there.data.ptr)))
        else:
            frozen: Frozen = freeze_array(describe(host))
            leaves += [("u64", there.data.ptr), *frozen.leaves[1:]]
    bound = _loaded(kernel, _types(arguments), threads).bind(
        (blocks, 1, 1), (threads, 1, 1), shared, [code for code, _ in leaves],
        cluster=(cluster, 1, 1) if cluster > 1 else None, dependent=dependent)
    bound.launch(cupy.cuda.get_current_stream().ptr, [value for _, value in leaves])
    return [cupy.asnumpy(there).view(host.dtype).reshape(host.shape) for there, host in outputs]
