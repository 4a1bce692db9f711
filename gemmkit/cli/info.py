"""``python -m gemmkit info``: what there is to compute with."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ml_dtypes

import gemmkit
from gemmkit import operators
from gemmkit.cli.console import bytes_text, console, grid, no_gpu, pairs
from gemmkit.kernels.select import FAMILIES
from gemmkit.runtime.assemble import AssemblerError, candidates, release
from gemmkit.runtime.cache import default_cache
from gemmkit.runtime.device import DeviceInfo, target

OPERATORS = {
    "FPUOp": (operators.FPUOp(), "any real dtypes, and semirings; ordinary units"),
    "MMAOp": (operators.MMAOp(), "float16, bfloat16, float32 as tf32, int8; tensor cores by mma.sync"),
    "MMAOp (K=8)": (operators.MMAOp(K=8), "float16; tensor cores by mma.sync (m16n8k8: from 7.5 on)"),
    "MMAOp (float8)": (operators.MMAOp(dtype=ml_dtypes.float8_e4m3fn), "8-bit floats; tensor cores by mma.sync"),
    "MMAOp (float64)": (operators.MMAOp(dtype="float64"), "float64; tensor cores (m8n8k4: from 8.0 on)"),
    "WMMAOp": (operators.WMMAOp(), "float16; tensor cores by wmma"),
    "WMMAOp (bfloat16)": (operators.WMMAOp(dtype=ml_dtypes.bfloat16), "bfloat16; tensor cores by wmma"),
}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "info", help="versions, the GPU and its limits, compilers, cache, usable kernels and operators",
        description="Show versions, the GPU and its limits, the compilers, the cache of compiled kernels, and which kernels "
        "and operators are usable.")
    return parser


def run(options: argparse.Namespace) -> int:
    out, device = console(), target()
    out.print(pairs("Versions", _versions()))
    out.print(pairs("Device", _device(device)))
    out.print(pairs("Tools", (*_tools(), ("cache", _cache()))))
    usable = [("kernel", name, _usable(family.minimum_arch, device), (family.kernel.__doc__ or "").split(";")[0])
              for name, family in FAMILIES.items()]
    usable += [("operator", name, _usable(operator.minimum_arch, device), text)
               for name, (operator, text) in OPERATORS.items()]
    out.print(grid(f"Usable on {device.name} (compute capability {device.arch[0]}.{device.arch[1]})",
                   ("", "name", "usable", "what"), usable))
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "gemmkit", gemmkit.__version__
    for name in ("numba-cuda", "cuda-core", "numpy"):
        yield name, _version(name)
    yield "Python", platform.python_version()
    for name in ("cupy", "torch"):
        found = _installed(name)
        if found:
            yield name, found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _installed(prefix: str) -> str | None:
    """The version of a package that comes under several names (cupy-cuda13x); None when there is none."""
    for name in (prefix, f"{prefix}-cuda13x", f"{prefix}-cuda12x"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _device(device: DeviceInfo) -> Iterator[tuple[str, str]]:
    reason = no_gpu()
    if reason is None:
        yield "GPU", device.name
        yield "driver speaks", f"CUDA {_driver()}"
    else:
        yield "GPU", f"no GPU ({reason}): products can be emulated, and kernels are compiled for the target below"
        yield "target", device.name
    yield "compiled for", device.arch_name
    yield "multiprocessors", str(device.sm_count)
    yield "shared memory", (f"{bytes_text(device.shared_memory_per_block)} a block, "
                            f"{bytes_text(device.shared_memory_per_sm)} a multiprocessor")
    yield "threads", f"{device.max_threads_per_block} a block, {device.max_threads_per_sm} a multiprocessor"
    yield "registers", f"{device.registers_per_sm} a multiprocessor"
    yield "L2 cache", bytes_text(device.l2_bytes)


def _driver() -> str:
    from cuda.bindings import driver

    status, number = driver.cuDriverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}" if int(status) == 0 else f"unknown ({status.name})"


def _tools() -> Iterator[tuple[str, str]]:
    for tool, without in (("ptxas", "none: the driver assembles" if no_gpu() is None else "none: nothing can be assembled"),
                          ("nvdisasm", "none: explain cannot count instructions")):
        try:
            found = candidates(tool)
        except AssemblerError as error:                                # the variable names no program
            yield tool, str(error)
            continue
        yield tool, f"{os.path.basename(found[0])} {release(found[0])}" if found else without


def _cache() -> str:
    info = default_cache().info()
    if info.folder is None:
        return "nothing is kept on disk (GEMMKIT_CACHE=0, or no home folder)"
    return f"{info.folder}: {info.entries} kernels, {bytes_text(info.bytes)}"


def _usable(least: tuple[int, int], device: DeviceInfo) -> str:
    if device.arch >= least:
        return "yes"
    return f"no: needs compute capability {least[0]}.{least[1]}"
