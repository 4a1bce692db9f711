"""From a kernel function and argument types to PTX, by Numba; from there to a cubin, kept on disk.

A kernel's key is the text of all that went into it (its own fingerprint, its arguments' fingerprints), gemmkit's source,
the compilers' versions and the architecture. What is found under the key is loaded without compiling anything.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.installed import require, toolkit
from gemmkit.runtime.assemble import assemble, candidates
from gemmkit.runtime.cache import Entry, default_cache, shipped
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.nvvm import to_asm

PLACEHOLDER = "GEMMKIT_TENSOR_MAP_"                          # gemmkit.ptx.tma writes it where a map's address is wanted
ENTRY = "gemmkit_kernel"


@dataclass
class CompileStats:
    """How many kernels Numba compiled in this process (tests assert that a new value compiles nothing)."""

    compiled: int = 0


stats = CompileStats()
_lock = threading.Lock()


def to_ptx(kernel: Any, types: tuple, threads: int, device: DeviceInfo, blocks_per_sm: int = 1) -> str:
    """The PTX of ``kernel`` specialised for Numba argument types; the entry is called ``gemmkit_kernel``.

    Raises NotInstalledError where the compiler is not installed.
    """
    require()
    _nvvm()                                                    # where it is not found: one answer, before Numba's
    from numba.cuda.compiler import kernel_fixup
    from numba.cuda.core.compiler_lock import global_compiler_lock
    from numba.cuda.cudadrv import nvvm

    from gemmkit.lang.compiling import compile_function
    from gemmkit.lang.functions import device as device_function
    from gemmkit.lang.garbage import without_collections
    from gemmkit.lang.target import set_target_arch

    suffix = ("a",) if device.arch_name.endswith("a") else ()
    cc = (*device.arch, *suffix)
    with global_compiler_lock, without_collections():
        set_target_arch(cc)
        result = compile_function(device_function(kernel).weakened, types, inline=False)
        library = result.library
        function = library.get_function(result.fndesc.llvm_func_name)
        library._entry_name = result.fndesc.llvm_func_name
        kernel_fixup(function, False)
        nvvm.set_launch_bounds(function, (threads, blocks_per_sm))
        ptx = to_asm(library, cc)
    with _lock:
        stats.compiled += 1
    return _named(ptx)


_MAP_PARAMETER = re.compile(r"\.param \.align 8 \.b8 (\w+_param_\d+)\[128\]")


def _named(ptx: str) -> str:
    """The PTX with our name for the entry, and the names of its tensor maps where the code asks for their addresses."""
    found = re.search(r"\.visible \.entry (\w+)\(", ptx)
    if found is None:
        raise RuntimeError("Numba's PTX has no entry point")
    maps = _MAP_PARAMETER.findall(ptx, found.end(), ptx.index("{", found.end()))

    def parameter(wanted: re.Match[str]) -> str:
        if int(wanted[1]) >= len(maps):
            raise RuntimeError(f"the kernel uses its tensor map {wanted[1]} and has {len(maps)} as parameters")
        return maps[int(wanted[1])]

    ptx = re.sub(PLACEHOLDER + r"(\d+)", parameter, ptx)
    ptx = _MAP_PARAMETER.sub(r".param .align 64 .b8 \1[128]", ptx)      # TMA takes no less
    return ptx.replace(found.group(1), ENTRY)


@functools.lru_cache(maxsize=1)
def versions() -> str:
    """The versions of everything that turns Python into machine code; NotInstalledError without them."""
    require()
    from importlib.metadata import version

    loaded = [f"{module.__name__}={module.__version__}" for module in (np, ml_dtypes)]       # (metadata takes 5 ms each)
    later = [f"{name}={version(name)}" for name in ("numba-cuda", "llvmlite")]
    return ",".join([f"Python={sys.version_info[0]}.{sys.version_info[1]}", *later, *loaded,
                     f"NVVM={bytes_digest(_nvvm())}", *(f"ptxas={bytes_digest(t)}" for t in candidates()[:1])])


def _nvvm() -> str:
    """The file of the NVVM that Numba compiles with. Numba asks cuda.pathfinder first, and so can be spared: a process whose
    kernels lie on disk never loads it. Raises NotInstalledError where none is to be found."""
    from cuda import pathfinder

    with toolkit():
        try:
            return str(pathfinder.load_nvidia_dynamic_lib("nvvm").abs_path)
        except pathfinder.DynamicLibNotFoundError:             # Numba looks beside nvrtc, too
            from numba.cuda.cudadrv.libs import get_cudalib

            return str(get_cudalib("nvvm"))


_WHOLE, _PIECE, _PIECES = 2**22, 2**16, 32


def bytes_digest(file: str) -> str:
    """A digest of what a compiler's file holds: a toolkit that is updated in place keeps its path.

    Of a file of over 4 MiB it is made of its size and 32 pieces of 64 KiB, spread over it: two releases differ in all of
    them, and reading all of ptxas and NVVM (100 MB) would cost every process 0.2 s.
    """
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            state = hashlib.sha256(str(size).encode())
            for n in range(_PIECES if size > _WHOLE else 1):
                stream.seek(n * (size - _PIECE) // (_PIECES - 1) if size > _WHOLE else 0)
                state.update(stream.read(_PIECE if size > _WHOLE else -1))
    except OSError:                                            # a name that only the system's loader can resolve
        return file
    return state.hexdigest()[:24]


class CodeChanged(Exception):
    """A function was replaced, or a name bound anew, between the reading of the code and the end of its compilation."""


def key_of(kernel: Any, arguments: Sequence[Any], threads: int, device: DeviceInfo, blocks_per_sm: int = 1) -> str:
    """What a kernel's machine code depends on, but for the versions of what compiles it."""
    from gemmkit.lang.fingerprint import function_text
    from gemmkit.lang.package_state import package_digest

    return "\n".join((function_text(kernel), *(a.fingerprint for a in arguments), *(str(a.kind) for a in arguments),
                      package_digest(), device.arch_name, f"threads={threads},{blocks_per_sm}"))


def cubin_of(kernel: Any, arguments: Sequence[Any], threads: int, device: DeviceInfo, blocks_per_sm: int = 1) -> Entry:
    """The assembled kernel for frozen ``arguments``: from memory, from what came with gemmkit, from disk, or compiled now.
    ``meta["usage"]`` holds its registers and spills.

    Raises CodeChanged when the code that was compiled is not the code that the arguments were frozen with: nothing is kept
    then, and they are to be frozen anew.
    """
    from gemmkit.lang.fingerprint import forget_readings
    from gemmkit.lang.package_state import packages_stand

    if not packages_stand():
        forget_readings()
        raise CodeChanged("a function of gemmkit was replaced")
    guards = [g for a in arguments for g in a.guards]
    key = key_of(kernel, arguments, threads, device, blocks_per_sm)
    came = shipped(key)
    if came is not None:
        return came

    def build() -> tuple[bytes, dict[str, Any]]:
        ptx = to_ptx(kernel, tuple(a.type for a in arguments), threads, device, blocks_per_sm)
        if not (all(each.stand() for each in guards) and packages_stand()):
            raise CodeChanged("code changed while it was compiled")
        assembled = assemble(ptx, device.arch_name)
        return assembled.cubin, {"usage": asdict(assembled.usage), "assembler": assembled.assembler}

    return default_cache().get_or_build(f"{key}\n{versions()}", build)
