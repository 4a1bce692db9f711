"""Kernels compiled ahead of their first call, for GPUs that need not be here.

`recorded` runs a function in which products of NumPy arrays are resolved for a device and not computed. `compiled` makes
their kernels, in as many processes as there are processors, and keeps them in the cache's folder. A machine with such a
GPU finds them there: their keys hold no address and no device's number (`gemmkit.runtime.compile.cubin_of`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import freeze
from gemmkit.emulator.mode import ExecutionTarget, computed_by
from gemmkit.kernels.config import Config, device_given, products_given, sizes_given
from gemmkit.lang import deferred
from gemmkit.lang.fingerprint import look_again
from gemmkit.layouts import ArrayLayout, Plain, Zero
from gemmkit.layouts.base import leading
from gemmkit.plans.compiled import Compiled
from gemmkit.plans.problem import HOST, Call, first_matrix
from gemmkit.runtime.arrays import ArrayInfo, describe
from gemmkit.runtime.cache import Entry
from gemmkit.runtime.compile import Assembled, ResourceUsage, assemble, disassemble, instruction_counts, to_ptx
from gemmkit.runtime.device import DeviceInfo, Failure, assumed, forked
from gemmkit.runtime.launch import Launchable

__all__ = [
    "CompiledKernel", "KernelToCompile", "Made", "Occupancy", "Recording", "compile_config", "compiled", "compiled_kernel",
    "imagined", "occupancy", "recorded",
]


@dataclass(frozen=True)
class Recording(ExecutionTarget):
    """Products of host arrays are resolved, and kept in ``found``; their results are zeros, or, without ``zeros``, memory
    that nothing is written to."""

    zeros: bool = True
    found: list[Any] = field(default_factory=list, compare=False)

    def run(self, made: Any, arrays: Any) -> None:
        self.found.extend((made, *getattr(made, "behind", ())))    # kernels of their own
        for out in made.filled(arrays) if self.zeros else ():
            out[...] = 0


def recorded(call: Callable[[], object], device: DeviceInfo | None = None, zeros: bool = True) -> list[Any]:
    """The products that a call would compute on host arrays (`gemmkit.plans.compiled.Compiled`, or a group's), in order.

    ``device`` is what they are resolved for; None: the GPU that is here, or an H100. Results are zeros, or without ``zeros``
    memory that is not touched.

    >>> import numpy as np, gemmkit
    >>> a = np.ones((64, 64), np.float16)
    >>> [found.problem.config.kernel for found in recorded(lambda: gemmkit.matmul(a, a))]
    ['warp_specialised']
    """
    look_again()
    mode = Recording(zeros=zeros)
    with computed_by(mode):
        if device is None:
            call()
        else:
            with assumed(device):
                call()
    return mode.found


@dataclass(frozen=True)
class KernelToCompile:
    """A kernel to compile, and the products that need it."""

    launchable: Launchable
    products: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """What became of a kernel: its registers and spills (``usage``), whether it was in the cache; or why there is none."""

    kernel: KernelToCompile
    usage: dict[str, Any] | None = None
    was_there: bool = False
    error: str | None = None
    seconds: float = 0.0


def compiled(kernels: Sequence[KernelToCompile], jobs: int | None = None) -> Iterator[Made]:
    """Compile kernels, or find them in the cache, ``jobs`` at a time (None: one a processor); as they come."""
    deferred.load()                                              # once, and not in every process

    def task(kernel: KernelToCompile) -> Callable[[], tuple[Entry, float]]:
        def make() -> tuple[Entry, float]:
            start = time.perf_counter()
            return kernel.launchable.entry(), time.perf_counter() - start

        return make

    for index, found in forked([task(kernel) for kernel in kernels], jobs):
        if isinstance(found, Failure):
            yield Made(kernels[index], error=str(found))
        else:
            entry, seconds = found
            yield Made(kernels[index], entry.meta["usage"], entry.from_disk, seconds=seconds)


# --------------------------------------------------------------------------------------------------
# What a configuration compiles to: PTX, machine code, registers, spills. No arrays are needed, and no GPU.
#
# >>> from gemmkit import get_config, layouts, operators
# >>> conf = get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"))
# >>> kernel = compile_config(conf)                       # for the GPU that is here, or for an H100 where there is none
# >>> kernel.usage.spill_stores, kernel.instructions["BAR"] > 0
# (0, True)
#
# What is compiled is what `gemmkit.matmul` would run for operands of the sizes given; nothing is cached.

_ADDRESS = 2**20                       # of the operands that are not there: as aligned as an allocation


@dataclass(frozen=True)
class CompiledKernel:
    """A configuration's kernel for one device: ``ptx``, and what the assembler made of it."""

    config: Config
    device: DeviceInfo
    ptx: str
    assembled: Assembled

    @property
    def usage(self) -> ResourceUsage:
        """Registers a thread, spills and stack."""
        return self.assembled.usage

    @cached_property
    def sass(self) -> str:
        """The machine code as text; raises AssemblerError where there is no nvdisasm or the driver assembled."""
        return disassemble(self.assembled.cubin)

    @cached_property
    def instructions(self) -> Counter[str]:
        """How many instructions of each opcode the machine code has; raises as `sass` does."""
        return instruction_counts(self.sass)

    @cached_property
    def occupancy(self) -> Occupancy:
        """How many blocks fit on a multiprocessor."""
        return occupancy(self.usage.registers, self.config.threads, self.config.spec().shared_bytes, self.device)


def compile_config(conf: Config, *, device: DeviceInfo | None = None, gemm_shape: Mapping[str, int] | None = None,
                   operands: Mapping[str, Any] | None = None) -> CompiledKernel:
    """The kernel of a configuration.

    Args:
        device: what to compile for; None is the current GPU, or an H100 where there is none.
        gemm_shape: M, N and K of the problem. They decide only which class of alignment and divisibility the kernel is
            of; None is the class of large powers of two. With ``batch`` the kernel is one for stacks of so many products.
        operands: arrays to take the place of ``a``, ``b``, ``c`` and ``out``. An operand in a plain layout (RowMajor,
            ColMajor) needs none.

    Raises:
        ValueError: an operand whose layout is not plain and that was not given, or an unknown name.
        ConfigError: the kernel does not fit the device.
        AssemblerError, ComponentError: what compiling raises.
    """
    if not isinstance(conf, Config):
        raise TypeError(f"conf={conf!r}: a configuration of gemmkit.get_config is needed")
    device = device_given(device)
    return compiled_kernel(imagined(conf, device, gemm_shape, operands), device)


def imagined(conf: Config, device: DeviceInfo, gemm_shape: Mapping[str, int] | None,
             operands: Mapping[str, Any] | None) -> Compiled:
    """The class of problems that `compile_config` compiles for; arguments and errors are its own."""
    conf.check_device(device)
    if operands is not None and not isinstance(operands, Mapping):
        raise TypeError(f"operands={operands!r}: a dictionary of arrays, by the names a, b, c and out, is needed")
    given = dict(operands or {})
    unknown = set(given) - {"a", "b", "c", "out"}
    if unknown:
        raise ValueError(f"operands: got {', '.join(sorted(map(str, unknown)))}; the operands are a, b, c and out")
    M, N, K = sizes_given(dict(gemm_shape) if isinstance(gemm_shape, Mapping) else gemm_shape) or (4096,) * 3
    stack = (products_given(gemm_shape),) if isinstance(gemm_shape, Mapping) and "batch" in gemm_shape else None
    place = next((info.device for info in freeze(conf.spec()).arrays), HOST)
    infos: dict[str, ArrayInfo | None] = {}
    for name, rows, columns in (("a", M, K), ("b", K, N), ("c", M, N), ("out", M, N)):
        layout = getattr(conf, f"global_{'d' if name == 'out' else name}_layout")
        if name in given:
            info = describe(given[name], name)
            infos[name] = layout.seen(first_matrix(info, leading(info, layout) if stack else 0, stack))
        else:
            dense = _imagined(name, layout, rows, columns, place)
            steps = ((*stack, rows * columns),) if stack else ()
            infos[name] = dense and dense._replace(steps=steps)
    a, b, out = infos["a"], infos["b"], infos["out"]
    assert a is not None and b is not None and out is not None
    return Compiled(Call(M, N, K, conf, a, b, infos["c"], out, device, stack), out)


def compiled_kernel(compiled: Compiled, device: DeviceInfo) -> CompiledKernel:
    """Compile the kernel for a class of problems; nothing is cached. Raises AssemblerError, ComponentError."""
    conf = compiled.problem.config
    ptx = to_ptx(conf.family.kernel, tuple(argument.type for argument in compiled.arguments), conf.threads, device,
                 conf.blocks_per_sm)
    return CompiledKernel(conf, device, ptx, assemble(ptx, device.arch_name))


def _imagined(name: str, layout: ArrayLayout, rows: int, columns: int, place: int) -> ArrayInfo | None:
    """A dense array in a plain layout, as the compiler sees one."""
    if isinstance(layout, Zero):
        return None if name == "c" else ArrayInfo(_ADDRESS, (rows, columns), (columns, 1), np.dtype(layout.dtype), place,
                                                  False, "numpy")
    if not isinstance(layout, Plain):
        raise ValueError(f"{name}: {layout!r} does not say what its array looks like; give operands={{{name!r}: array}}")
    strides = (1, rows) if layout.axis == 0 else (columns, 1)
    return ArrayInfo(_ADDRESS, (rows, columns), strides, np.dtype(layout.dtype), place, False, "numpy")


# -- occupancy --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel fit on a multiprocessor, by each resource; ``blocks`` is the least of them."""

    by_registers: int
    by_threads: int
    by_shared_memory: int
    by_hardware: int

    @property
    def blocks(self) -> int:
        return min(self.by_registers, self.by_threads, self.by_shared_memory, self.by_hardware)


def occupancy(registers: int, threads: int, shared_bytes: int, device: DeviceInfo) -> Occupancy:
    """The occupancy of a kernel of ``registers`` a thread.

    Registers are allotted to warps 256 at a time, shared memory to blocks 128 bytes at a time, with what the driver
    reserves on top.

    >>> from gemmkit.runtime.device import H100
    >>> occupancy(128, 256, 100_000, H100)
    Occupancy(by_registers=2, by_threads=8, by_shared_memory=2, by_hardware=32)
    """
    for name, value, least in (("registers", registers, 1), ("threads", threads, 1), ("shared_bytes", shared_bytes, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: a whole number, {least} or more, is needed")
    device = device_given(device)
    warps = -(-threads // 32)
    warp_registers = -(-registers * 32 // 256) * 256
    block_bytes = -(-(shared_bytes + device.reserved_shared_memory) // 128) * 128
    return Occupancy(device.registers_per_sm // warp_registers // warps, device.max_threads_per_sm // threads,
                     device.shared_memory_per_sm // block_bytes, device.max_blocks_per_sm)
