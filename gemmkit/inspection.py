"""What a configuration compiles to: PTX, machine code, registers, spills. No arrays are needed, and no GPU.

>>> from gemmkit import get_config, layouts, operators
>>> conf = get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"))
>>> kernel = compile_config(conf)                       # for the GPU that is here, or for an H100 where there is none
>>> kernel.usage.spill_stores, kernel.instructions["BAR"] > 0
(0, True)

What is compiled is what `gemmkit.matmul` would run for operands of the sizes given; nothing is cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.compiled import Compiled
from gemmkit.components import freeze
from gemmkit.config import Config, device_given, products_given, sizes_given
from gemmkit.layouts import ArrayLayout, Plain, Zero
from gemmkit.problem import HOST, Call
from gemmkit.runtime.arrays import ArrayInfo, describe
from gemmkit.runtime.assemble import Assembled, ResourceUsage, assemble, disassemble, instruction_counts
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import DeviceInfo
from gemmkit.stacks import first_matrix, leading

__all__ = ["CompiledKernel", "Occupancy", "compile_config", "compiled_kernel", "imagined", "occupancy"]

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
