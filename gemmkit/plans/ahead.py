"""Kernels compiled ahead of their first call, for GPUs that need not be here, or for programs without Python.

`recorded` runs a function in which products of NumPy arrays are resolved for a device and not computed. `compiled` makes
their kernels, in as many processes as there are processors, and keeps them in the cache's folder. A machine with such a
GPU finds them there: their keys hold no address and no device's number (`gemmkit.runtime.compile.cubin_of`).
"""

from __future__ import annotations

import keyword
import math
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import arrays_of, field_values, freeze
from gemmkit.emulator import ExecutionTarget, computed_by
from gemmkit.kernels.config import Config, device_given, products_given, sizes_given
from gemmkit.lang import deferred
from gemmkit.lang.fingerprint import look_again
from gemmkit.lang.functions import ViewKind
from gemmkit.layouts import ArrayLayout, Plain, Zero
from gemmkit.layouts.base import leading
from gemmkit.plans.compiled import OPERANDS, Compiled
from gemmkit.plans.launch import Launch, Put
from gemmkit.plans.problem import HOST, Call, first_matrix
from gemmkit.runtime.arrays import ArrayInfo, alignment, describe
from gemmkit.runtime.cache import Entry
from gemmkit.runtime.compile import ENTRY, Assembled, ResourceUsage, assemble, disassemble, instruction_counts, to_ptx
from gemmkit.runtime.device import PARAMETER_FORMATS, DeviceInfo, Failure, assumed, forked, parameter_struct
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.tensor_maps import Encoder, driver_names, steps_of

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


# --------------------------------------------------------------------------------------------------
# A product's kernels for C and C++: cubins, a header that launches them through CUDA's driver API, and an example.
#
# All that a launch needs stands in its `Launch`: a kernel's numbers, and where what a call brings goes among them. The
# header has the numbers as they are, and takes what a call brings: addresses of arrays and of the workspace.

_C_TYPES = {"B": "uint8_t", "b": "int8_t", "h": "int16_t", "H": "uint16_t", "i": "int32_t", "I": "uint32_t", "q": "int64_t",
            "Q": "uint64_t", "f": "float", "d": "double", "128s": "gemmkit_tensor_map"}
_APART = 256                           # bytes: workspaces of one launch begin at multiples of it
_TAKEN = frozenset({"main", "int", "char", "short", "long", "float", "double", "void", "auto", "static", "struct", "union",
                    "enum", "const", "switch", "case", "default", "do", "goto", "signed", "unsigned", "sizeof", "typedef",
                    "volatile", "register", "extern", "inline", "restrict", "new", "delete", "this", "template", "operator"})


class _Taken(NamedTuple):
    """What a launch in C takes: an array's address, of so many bytes from there on, at a multiple of ``alignment``."""

    name: str
    text: str
    nbytes: int
    alignment: int


def exported(compiled: Compiled, operands: Mapping[str, ArrayInfo | None], folder: Path, name: str) -> list[Path]:
    """`gemmkit.plans.Plan.export` of a product and its ``operands`` a, b, c and out."""
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name) or name in _TAKEN or keyword.iskeyword(name):
        raise ValueError(f"export: name={name!r}; a word of C is needed: letters, digits and _, with a letter first")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export: folder={str(folder)!r} is a file; a folder is needed")
    arrays = {name: operands[name] for name in OPERANDS}
    slots = list[int]()
    for part, span in compiled.ranges.items():                # addresses of arrays that components hold
        at, leaves = 0, compiled.parts[part].leaves
        for held in arrays_of(getattr(compiled.config, part)):
            if held.info.library == "workspace":
                continue
            at = next(n for n in range(at, len(leaves)) if leaves[n] == ("u64", held.info.pointer)) + 1
            slots.append(span.start + at - 1)
            word = re.sub(r"\W+", "_", held.name.split(",")[0].split(" of ")[0])
            arrays[_unused(f"{compiled.problem.given_as(part)}_{word}", arrays)] = held.info
    first = compiled.launch(tuple(slots))
    launches = [*first.before, first, *first.behind]
    taken = _taken(arrays, launches)
    starts, nbytes = list[int](), 0
    for space in first.spaces:
        starts.append(nbytes)
        nbytes += -(-space.nbytes // _APART) * _APART
    names = [*arrays, *(f"workspace + {start}" if start else "workspace" for start in starts)]
    if nbytes:
        taken.append(_Taken("workspace", "memory of the kernels' own, zeroed before the first launch; launches that may "
                            "run at the same time need one each", nbytes, _APART))
    given = [one.name for one in taken]
    kernels = [_kernel_of(f"{name}_{n}", one, names, given, compiled if one is first else None)
               for n, one in enumerate(launches)]
    cubins = {folder / f"{name}_{n}.cubin": one.kernel.entry().cubin for n, one in enumerate(launches)}
    for path, cubin in cubins.items():
        if not cubin.startswith(b"\x7fELF"):
            raise ValueError(f"export: {path.name} is PTX that the driver would assemble; install NVIDIA's assembler "
                             "(nvidia-cuda-nvcc)")
    header, example = folder / f"{name}.h", folder / f"{name}_example.cpp"
    texts = {header: _header(name, compiled, kernels, taken), example: _example(name, taken)}
    folder.mkdir(parents=True, exist_ok=True)
    for path, cubin in cubins.items():
        path.write_bytes(cubin)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return [header, *cubins, example]


def _unused(name: str, names: Collection[str]) -> str:
    """The name, or the first of name_2, name_3, ... that is not among ``names``."""
    number, found = 1, name
    while found in names:
        number += 1
        found = f"{name}_{number}"
    return found


def _taken(arrays: Mapping[str, ArrayInfo | None], launches: Sequence[Launch]) -> list[_Taken]:
    """The arrays that launches read and write; a result that is discarded, and a C that is not there, are not."""
    found = []
    for which, (name, info) in enumerate(arrays.items()):
        own = [(one.kernel, put) for one in launches for put in one.puts if put.which == which]
        if info is None or not own:
            continue
        if min(info.strides, default=0) < 0:
            raise ValueError(f"export: {name} has the strides {info.strides}; strides of 0 or more are needed")
        last = sum((extent - 1) * stride for extent, stride in zip(info.shape, info.strides)) if 0 not in info.shape else -1
        least = max([alignment(info), *(16 for _, put in own if isinstance(put.encoder, Encoder))])
        text = f"{info.dtype}, shape {info.shape}, strides {info.strides} elements" + ", is written" * (which == 0)
        found.append(_Taken(name, text, (last + 1) * info.dtype.itemsize, least))
    return found


def _kernel_of(name: str, launch: Launch, names: Sequence[str], given: Sequence[str], first: Compiled | None) -> str:
    """The C text of one kernel: its constants, its parameters, and functions that fill and launch them."""
    kernel = launch.kernel
    if launch.table is not None:
        raise ValueError(f"export: {_title(kernel)} reads a table that gemmkit copies to the GPU at a launch")
    labels = _labels(launch, names, first)
    _, offsets = parameter_struct(tuple(kernel.formats))
    letters = [PARAMETER_FORMATS[code][0] for code in kernel.formats]
    puts = {put.slot: put for put in launch.puts}
    members, fills, checks = [], [], []
    for slot, (label, letter, offset) in enumerate(zip(labels, letters, offsets)):
        members.append(f"    {_C_TYPES[letter]} {label};")
        checks.append(f"GEMMKIT_ASSERT(offsetof({name}_parameters, {label}) == {offset}, \"parameters\");")
        put = puts.get(slot)
        if put is None:
            if letter == "128s":
                raise ValueError(f"export: {_title(kernel)} takes a tensor map of an array that no call brings")
            fills.append(f"    p->{label} = {_literal(letter, kernel.values[slot])};")
        elif isinstance(put.encoder, Encoder):
            fills.append(_encoding(label, put.encoder, _address(names, put)))
        elif put.encoder is None or letter == "Q":
            fills.append(f"    p->{label} = (uint64_t)({_address(names, put)});")
        else:
            raise ValueError(f"export: {_title(kernel)} takes a number that {put.encoder!r} makes at a launch")
    used = {names[put.which].split(" ")[0] for put in launch.puts}
    upper, usage = name.upper(), kernel.entry().meta["usage"]
    flags = [("CLUSTER_DIMENSION", "clusterDim.x", kernel.cluster if kernel.cluster > 1 else 0),
             ("PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed", int(kernel.dependent)),
             ("COOPERATIVE", "cooperative", int(kernel.waits))]
    attributes = []
    for n, (id, member, value) in enumerate(one for one in flags if one[2]):
        attributes += [f"    attributes[{n}].id = CU_LAUNCH_ATTRIBUTE_{id};",
                       f"    attributes[{n}].value.{member} = {value};"]
        if member.startswith("cluster"):
            attributes += [f"    attributes[{n}].value.clusterDim.{axis} = 1;" for axis in "yz"]
    pointers = ", ".join(f"(void *)&p->{label}" for label in labels)
    return "\n".join([
        f"/* {_title(kernel)}: {usage['registers']} registers a thread. */",
        f"#define {upper}_GRID {kernel.blocks}u          /* blocks along x; 1 along y and z */",
        f"#define {upper}_BLOCK {kernel.threads}u        /* threads along x */",
        f"#define {upper}_CLUSTER {kernel.cluster}u      /* blocks of a cluster */",
        f"#define {upper}_SHARED_BYTES {kernel.shared_bytes}u  /* dynamic shared memory of a block */", "",
        f"typedef struct {name}_parameters {{", *members, f"}} {name}_parameters;", *checks, "",
        f"static inline CUresult {name}_fill({name}_parameters *p{_declared(given)})", "{",
        *(f"    (void){one};" for one in given if one not in used), *fills, "    return CUDA_SUCCESS;", "}", "",
        f"static inline CUresult {name}_launch(CUfunction function, const {name}_parameters *p, CUstream stream)", "{",
        "    CUlaunchAttribute attributes[3];", "    CUlaunchConfig config;",
        f"    void *pointers[] = {{{pointers}}};", "    memset(attributes, 0, sizeof attributes);",
        "    memset(&config, 0, sizeof config);", *attributes,
        f"    config.gridDimX = {upper}_GRID, config.gridDimY = 1, config.gridDimZ = 1;",
        f"    config.blockDimX = {upper}_BLOCK, config.blockDimY = 1, config.blockDimZ = 1;",
        f"    config.sharedMemBytes = {upper}_SHARED_BYTES, config.hStream = stream;",
        f"    config.attrs = attributes, config.numAttrs = {sum(1 for one in flags if one[2])};",
        "    return cuLaunchKernelEx(&config, function, pointers, NULL);", "}", ""])


def _address(names: Sequence[str], put: Put) -> str:
    return f"{names[put.which]} + {put.offset}" if put.offset else names[put.which]


def _title(kernel: Launchable) -> str:
    return f"kernel {getattr(kernel.kernel, '__name__', 'of gemmkit')}"


def _labels(launch: Launch, names: Sequence[str], first: Compiled | None) -> list[str]:
    """A name for each parameter: of what is put there, of an array's extents and strides, else of its argument."""
    kernel, at = launch.kernel, 0
    labels, known = [""] * len(kernel.values), dict[int, str]()
    if first is not None and type(first) is Compiled:
        for part, span in first.ranges.items():
            word = first.problem.given_as(part)
            known.update((span.start + n, f"{word}_{n}") for n in range(span.stop - span.start))
        start = kernel.slot(5)
        if start is not None:
            known.update(enumerate(field_values(first.shape), start))
    for put in launch.puts:
        known[put.slot] = names[put.which].split(" ")[0] + ("_map" if isinstance(put.encoder, Encoder) else "")
    for n, argument in enumerate(kernel.arguments):
        view = argument.kind if isinstance(argument.kind, ViewKind) else None
        for k in range(len(argument.leaves)):
            base = known.get(at + k, f"argument{n}_{k}")
            if view is not None and k:
                rank = len(argument.leaves) - 1 - len(view.strided_axes)
                base = known.get(at, f"argument{n}") + (f"_extent{k - 1}" if k <= rank else
                                                        f"_stride{view.strided_axes[k - 1 - rank]}")
            labels[at + k] = _unused(base, labels)
        at += len(argument.leaves)
    return labels


def _literal(letter: str, value: float) -> str:
    """A number in C; a float has the bits that a launch passes.

    >>> _literal("f", 0.1), _literal("q", -5), _literal("d", float("inf"))
    ('0.10000000149011612f', 'INT64_C(-5)', 'INFINITY')
    """
    if letter in "fd":
        (value,) = struct.unpack(letter, struct.pack(letter, value))
        special = {math.inf: "INFINITY", -math.inf: "-INFINITY"}.get(value, "NAN" if value != value else None)
        return special or repr(value) + ("f" if letter == "f" else "")
    if letter == "q" and value == -2**63:
        return "INT64_MIN"
    return {"q": "INT64_C({})", "Q": "UINT64_C({})", "I": "{}u"}.get(letter, "{}").format(int(value))


def _encoding(label: str, encoder: Encoder, address: str) -> str:
    """C that encodes a tensor map for an address."""
    dtype, dims, strides, box, swizzle, window = encoder.arguments
    kind, swizzled = driver_names(dtype, swizzle)

    def numbers(type_: str, name: str, values: Sequence[int]) -> str:
        return f"        const {type_} {name}[] = {{{', '.join(map(str, values)) or 0}}};"

    ends = (f"CU_TENSOR_MAP_INTERLEAVE_NONE, {swizzled}, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, "
            "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE")
    tensor = f"&map, {kind}, {len(dims)}, (void *)(uintptr_t)({address}), dims, strides"
    lines = [numbers("cuuint64_t", "dims", dims), numbers("cuuint64_t", "strides", steps_of(dims, strides))]
    if window is None:
        lines += [numbers("cuuint32_t", "box", box), numbers("cuuint32_t", "steps", [1] * len(box))]
        call = f"cuTensorMapEncodeTiled({tensor}, box, steps,"
    else:
        lines += [numbers("int", "lower", window.lower), numbers("int", "upper", window.upper),
                  numbers("cuuint32_t", "steps", (1, *window.steps, 1))]
        call = f"cuTensorMapEncodeIm2col({tensor}, lower, upper, {box[0]}, {box[1]}, steps,"
    return "\n".join(["    {", "        CUtensorMap map;", *lines, f"        const CUresult status = {call}",
                      f"            {ends});", "        if (status != CUDA_SUCCESS) return status;",
                      f"        memcpy(&p->{label}, &map, sizeof p->{label});", "    }"])


def _declared(names: Sequence[str]) -> str:
    return "".join(f", CUdeviceptr {name}" for name in names)


_HEADER = """\
/* {product}, exported by gemmkit for {arch}. CUDA's driver API, 12.0 or later.

   {name}_load      loads the kernels of a folder into the current context
   {name}_fill      makes the parameters for arrays at these addresses; on the host, once as long as addresses stay
   {name}_launch    launches on a stream; parameters may be used again as soon as it returns
   {name}_run       both

   All return CUDA_SUCCESS or what the driver answered; CUDA_ERROR_INVALID_VALUE for an address that is not aligned.
   What is written must not overlap what is read.

{arrays}
*/
#ifndef GEMMKIT_{upper}_H
#define GEMMKIT_{upper}_H

#include <cuda.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifndef GEMMKIT_ASSERT
#ifdef __cplusplus
#define GEMMKIT_ASSERT static_assert
#define GEMMKIT_ALIGNED alignas(64)
#else
#define GEMMKIT_ASSERT _Static_assert
#define GEMMKIT_ALIGNED _Alignas(64)
#endif
/* A CUtensorMap as kernels take it: their parameters have it at multiples of 64 bytes, whatever cuda.h says. */
typedef struct gemmkit_tensor_map {{
    GEMMKIT_ALIGNED uint64_t words[16];
}} gemmkit_tensor_map;
#endif

{macros}

{kernels}
typedef struct {name}_kernels {{
    CUmodule modules[{count}];
    CUfunction functions[{count}];
}} {name}_kernels;

typedef struct {name}_parameters {{
{members}
}} {name}_parameters;

static inline void {name}_unload({name}_kernels *k)
{{
    for (int n = 0; n < {count}; n++)
        if (k->modules[n] != NULL) cuModuleUnload(k->modules[n]);
    memset(k, 0, sizeof *k);
}}

static inline CUresult {name}_load({name}_kernels *k, const char *folder)
{{
    const unsigned shared[] = {{{shared}}};
    char path[4096];
    memset(k, 0, sizeof *k);
    for (int n = 0; n < {count}; n++) {{
        const int length = snprintf(path, sizeof path, "%s/{name}_%d.cubin", folder, n);
        CUresult status = length < (int)sizeof path ? cuModuleLoad(&k->modules[n], path) : CUDA_ERROR_INVALID_VALUE;
        if (status == CUDA_SUCCESS) status = cuModuleGetFunction(&k->functions[n], k->modules[n], "{entry}");
        if (status == CUDA_SUCCESS)
            status = cuFuncSetAttribute(k->functions[n], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared[n]);
        if (status != CUDA_SUCCESS) {{
            {name}_unload(k);
            return status;
        }}
    }}
    return CUDA_SUCCESS;
}}

static inline CUresult {name}_fill({name}_parameters *p{declared})
{{
    CUresult status = CUDA_SUCCESS;
    if ({misaligned}) return CUDA_ERROR_INVALID_VALUE;
{fills}
    return status;
}}

static inline CUresult {name}_launch(const {name}_kernels *k, const {name}_parameters *p, CUstream stream)
{{
    CUresult status = CUDA_SUCCESS;
{starts}
    return status;
}}

static inline CUresult {name}_run(const {name}_kernels *k, CUstream stream{declared})
{{
    {name}_parameters p;
    const CUresult status = {name}_fill(&p{passed});
    return status == CUDA_SUCCESS ? {name}_launch(k, &p, stream) : status;
}}

#endif
"""


def _header(name: str, compiled: Compiled, kernels: Sequence[str], taken: Sequence[_Taken]) -> str:
    def each(text: str, before: str = "    if (status == CUDA_SUCCESS) status = ") -> str:
        return "\n".join(before + text.format(name=name, n=n, passed=passed) for n in range(len(kernels)))

    call, upper, target = compiled.problem, name.upper(), compiled.launchable.target
    passed = "".join(f", {one.name}" for one in taken)
    stack = f", {call.products} products" if call.products != 1 else ""
    return _HEADER.format(
        name=name, upper=upper, product=f"A product of {call.M} x {call.N} x {call.K} (M, N, K){stack}",
        arch=target.arch_name, entry=ENTRY, kernels="\n".join(kernels), count=len(kernels), passed=passed,
        declared=_declared([one.name for one in taken]),
        arrays="\n".join(f"   {one.name}: {one.text}; at a multiple of {one.alignment} bytes" for one in taken),
        macros="\n".join(f"#define {upper}_{one.name.upper()}_BYTES {one.nbytes}" for one in taken),
        members=each("{name}_{n}_parameters kernel{n};", "    "),
        shared=", ".join(f"{upper}_{n}_SHARED_BYTES" for n in range(len(kernels))),
        misaligned=" || ".join(f"{one.name} % {one.alignment}" for one in taken),
        fills=each("{name}_{n}_fill(&p->kernel{n}{passed});"),
        starts=each("{name}_{n}_launch(k->functions[{n}], &p->kernel{n}, stream);"))


_EXAMPLE = """\
// Reads arrays from files, launches {name} once, and writes the result:
//     g++ {name}_example.cpp -o {name}_example -lcuda && ./{name}_example . {files}
// The first argument is the folder of the cubins.
#include "{name}.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(CUresult status, const char *what)
{{
    if (status == CUDA_SUCCESS) return;
    const char *name = nullptr;
    cuGetErrorName(status, &name);
    std::fprintf(stderr, "%s: %s\\n", what, name ? name : "unknown error");
    std::exit(1);
}}

static CUdeviceptr array(size_t bytes, const char *path)
{{
    CUdeviceptr at = 0;
    std::vector<char> data(bytes ? bytes : 1);
    if (path) {{
        std::FILE *file = std::fopen(path, "rb");
        if (!file || std::fread(data.data(), 1, bytes, file) != bytes) {{
            std::fprintf(stderr, "%s: %zu bytes are needed\\n", path, bytes);
            std::exit(1);
        }}
        std::fclose(file);
    }}
    check(cuMemAlloc(&at, data.size()), "cuMemAlloc");
    check(cuMemcpyHtoD(at, data.data(), data.size()), "cuMemcpyHtoD");
    return at;
}}

int main(int count, char **arguments)
{{
    if (count != {count}) {{
        std::fprintf(stderr, "usage: %s folder {files}\\n", arguments[0]);
        return 2;
    }}
    CUdevice device;
    CUcontext context;
    CUstream stream;
    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    {name}_kernels kernels;
    check({name}_load(&kernels, arguments[1]), "{name}_load");
{arrays}
    check({name}_run(&kernels, stream{passed}), "{name}_run");
    check(cuStreamSynchronize(stream), "{name}");
    std::vector<char> result({upper}_OUT_BYTES);
    check(cuMemcpyDtoH(result.data(), out, result.size()), "cuMemcpyDtoH");
    std::FILE *file = std::fopen(arguments[{last}], "wb");
    if (!file || std::fwrite(result.data(), 1, result.size(), file) != result.size() || std::fclose(file)) return 1;
    {name}_unload(&kernels);
    return 0;
}}
"""


def _example(name: str, taken: Sequence[_Taken]) -> str:
    upper = name.upper()
    read = [one.name for one in taken if one.name not in ("out", "workspace")]
    lines = [f"    const CUdeviceptr {one.name} = array({upper}_{one.name.upper()}_BYTES, "
             + (f"arguments[{2 + read.index(one.name)}]);" if one.name in read else "nullptr);") for one in taken]
    return _EXAMPLE.format(name=name, upper=upper, files=" ".join([*(f"{one}.bin" for one in read), "out.bin"]),
                           count=len(read) + 3, last=len(read) + 2, arrays="\n".join(lines),
                           passed="".join(f", {one.name}" for one in taken))
