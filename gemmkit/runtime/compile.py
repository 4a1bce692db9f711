"""PTX to cubin, and cubin back to text.

Who assembles matters. nvJitLink (the road of ``cuda.core.Program``) serialises the wgmmas of the very PTX
that ``ptxas`` and the driver leave asynchronous, without a warning; so the order here is ptxas, wherever it
comes from, then the driver, and nvJitLink never. An ``assemble`` that had to use the driver hands the PTX
itself on as the image: the driver assembles it when it is loaded, and keeps the result in a cache of its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.deferred import require, toolkit, without_collections
from gemmkit.runtime import device
from gemmkit.runtime.cache import Entry, default_cache, shipped
from gemmkit.runtime.device import DeviceInfo


class AssemblerError(RuntimeError):
    """PTX that no assembler took, or an assembler or disassembler that is missing."""


@dataclass(frozen=True)
class ResourceUsage:
    """What a kernel takes: registers a thread; spills and stack in bytes a thread; the others in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    static_shared_memory: int
    constant_memory: int


@dataclass(frozen=True)
class Assembled:
    """The outcome of ``assemble``.

    ``cubin`` is what ``launch.load`` takes; it is PTX text when the driver is to assemble it, see
    ``is_cubin``. ``assembler`` says who did it, ``log`` is all that it said.
    """

    cubin: bytes
    usage: ResourceUsage
    assembler: str
    log: str = ""

    @property
    def is_cubin(self) -> bool:
        return self.cubin.startswith(b"\x7fELF")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log that report lost speed or doubt, e.g. that wgmmas were serialised."""
        return tuple(
            line for line in self.log.splitlines() if re.search(r"(?i)warning|performance loss", line)
        )


# -- finding the tools ---------------------------------------------------------------------------------------


def candidates(tool: str = "ptxas") -> tuple[str, ...]:
    """Every ``tool`` ("ptxas" or "nvdisasm") to be tried, in order, as paths.

    The environment variable ``GEMMKIT_PTXAS`` (``GEMMKIT_NVDISASM``), the pip wheels, CUDA_HOME and
    CUDA_PATH, PATH, then the usual place of a system's toolkit. Raises AssemblerError when the variable names
    no executable file.
    """
    variables = (f"GEMMKIT_{tool.upper()}", "CUDA_HOME", "CUDA_PATH", "PATH")
    return _candidates(tool, tuple(os.environ.get(variable, "") for variable in variables))


@functools.lru_cache(maxsize=16)
def _candidates(tool: str, settings: tuple[str, str, str, str]) -> tuple[str, ...]:
    chosen, *homes, path = settings
    if chosen and not _executable(chosen):
        raise AssemblerError(
            f"GEMMKIT_{tool.upper()}={chosen!r} is not an executable file; "
            f"set it to the full path of {tool}, or unset it to have one found"
        )
    program = f"{tool}.exe" if sys.platform == "win32" else tool
    found = [chosen] if chosen else []
    found += [str(folder / "bin" / program) for folder in _wheel_folders()]
    found += [os.path.join(home, "bin", program) for home in homes if home]
    found += [shutil.which(program, path=path) or "", os.path.join("/usr/local/cuda", "bin", program)]
    unique = dict.fromkeys(os.path.realpath(file) for file in found if file)
    return tuple(file for file in unique if _executable(file))


def _executable(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.X_OK)


def _wheel_folders() -> list[Path]:
    """NVIDIA's wheels that may hold ``bin/``: ``nvidia/cu13``, ``nvidia/cuda_nvcc``; newest toolkit first."""
    try:
        import nvidia  # type: ignore[import-untyped]  # a namespace package: each wheel adds a folder to it
    except ImportError:
        return []
    folders: list[Path] = []
    for root in map(Path, nvidia.__path__):
        folders += sorted(
            root.glob("cu[0-9]*"), key=lambda f: int("0" + re.sub(r"\D", "", f.name)), reverse=True
        )
        folders += sorted(root.glob("cuda_nv*"))
    return folders


@functools.lru_cache(maxsize=16)
def release(tool: str) -> str:
    """The release that the program at the path ``tool`` states, e.g. "13.0.88"; empty when it states none."""
    said = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"V(\d+(?:\.\d+)+)", said)
    return match.group(1) if match else ""


# -- assembling ----------------------------------------------------------------------------------------------

#: What ptxas says when it is too old for the PTX or the GPU; anything else is an error in the PTX.
_TOO_OLD = re.compile(
    r"(?i)unsupported \.version|is not defined for option 'gpu-name'|unsupported gpu architecture"
)
_working: dict[tuple[str, str], str] = {}  # (PTX version, arch) -> the ptxas that took it last


def assemble(ptx: str, arch: str = "sm_90a", options: Sequence[str] = ()) -> Assembled:
    """Assemble ``ptx`` for the GPU ``arch``; ``options`` are further arguments of ptxas (e.g.
    ``"-lineinfo"``).

    The first ptxas of ``candidates()`` that knows the PTX's version and ``arch`` does it; if there is none
    and a GPU is here, the driver does (then ``arch`` is that GPU's, ``options`` have no effect and ``cubin``
    holds the PTX).

    Raises AssemblerError with the assembler's own message when the PTX is wrong, and with the list of what
    was tried when nothing can assemble it.

    >>> lines = ".version 8.0", ".target sm_90a", ".address_size 64", ".visible .entry nothing() { ret; }"
    >>> usage = assemble(chr(10).join(lines)).usage
    >>> usage.spill_stores, usage.stack_bytes
    (0, 0)
    """
    match = re.search(r"^\s*\.version\s+([\d.]+)", ptx, re.MULTILINE)
    if match is None:
        raise AssemblerError(f"ptx has no .version line, so it is not PTX; it begins {ptx[:40]!r}")
    wanted = (match.group(1), arch)
    found = candidates("ptxas")
    remembered = _working.get(wanted, "")
    refusals: list[str] = []
    for tool in sorted(found, key=lambda file: file != remembered):  # stable: the one that worked goes first
        try:
            assembled = _ptxas(tool, ptx, arch, options)
        except _Refused as refusal:
            refusals.append(f"{tool}: {refusal}")
            continue
        _working[wanted] = tool
        return assembled
    tried = "".join(f"\n  {line}" for line in refusals) or "\n  no ptxas was found"
    if device.available():
        return _driver_jit(ptx, tried)
    raise AssemblerError(
        f"nothing here assembles PTX {wanted[0]} for {arch}. Install a ptxas at least as new as the compiler "
        f"(the wheel nvidia-cuda-nvcc, which gemmkit's extras cu12 and cu13 have) or set GEMMKIT_PTXAS. "
        f"Tried:{tried}\n  no driver: no GPU is here"
    )


class _Refused(Exception):
    """This ptxas cannot take this PTX, another may."""


def _ptxas(tool: str, ptx: str, arch: str, options: Sequence[str]) -> Assembled:
    with tempfile.TemporaryDirectory(prefix="gemmkit-") as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        command = [tool, f"-arch={arch}", "-O3", "-v", *options, str(source), "-o", str(result)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:  # not for this machine, or gone
            raise _Refused(str(error)) from None
        log = (done.stdout + done.stderr).replace(str(source), "kernel.ptx")
        if done.returncode != 0:
            if _TOO_OLD.search(log):
                raise _Refused(log.strip().splitlines()[0])
            raise AssemblerError(
                f"{tool} -arch={arch} failed (exit status {done.returncode}):\n{log.strip()}"
            )
        cubin = result.read_bytes()
    return Assembled(cubin, parse_usage(log), f"ptxas {release(tool)} ({tool})", log)


def parse_usage(log: str) -> ResourceUsage:
    """Read what ``ptxas -v`` printed: the largest figure of the functions in it, and the sum of their spills.

    Raises AssemblerError when no kernel's registers are in the text.

    >>> parse_usage("ptxas info    : Used 168 registers, used 1 barriers, 48 bytes smem").registers
    168
    """

    def figures(pattern: str) -> list[int]:
        return [int(figure) for figure in re.findall(pattern, log)] or [0]

    registers = re.findall(r"Used (\d+) registers", log)
    if not registers:
        raise AssemblerError(
            f"the assembler did not say how many registers the kernel takes; it said:\n{log.strip()}"
        )
    # One `cmem[bank]` figure a bank on each 'Used' line: their sum is a kernel's constant memory.
    constant = [sum(map(int, re.findall(r"(\d+) bytes cmem\[", line))) for line in log.splitlines()]
    return ResourceUsage(
        registers=max(map(int, registers)),
        spill_stores=sum(figures(r"(\d+) bytes spill stores")),
        spill_loads=sum(figures(r"(\d+) bytes spill loads")),
        stack_bytes=max(figures(r"(\d+) bytes stack frame")),
        static_shared_memory=max(figures(r"(\d+) bytes smem")),
        constant_memory=max(constant, default=0),
    )


# CUjit_option, as cuModuleLoadDataEx takes them.
_INFO_LOG, _INFO_LOG_SIZE, _ERROR_LOG, _ERROR_LOG_SIZE, _LOG_VERBOSE = 3, 4, 5, 6, 12
_LOG_BYTES = 1 << 16


def _driver_jit(ptx: str, tried: str) -> Assembled:
    """Let the driver's own compiler check the PTX and report; the image stays PTX.

    The driver's linker (cuLinkComplete) would give a cubin, but a worse one: it assembles each input as a
    part of something larger, ignores setmaxnreg and allots registers without it. Only loading the PTX
    assembles it whole.
    """
    log = _jit_log(ptx, tried)
    if "Used" not in log:  # found in the driver's own cache, so nothing was assembled; a comment makes it new
        log = _jit_log(f"{ptx}\n// assembled again at {time.time_ns()}, for its log\n", tried)
    image = ptx.encode() + b"\0"
    return Assembled(
        image, parse_usage(log), "the driver, when the kernel is loaded (PTX kept, no cubin)", log
    )


def _jit_log(ptx: str, tried: str) -> str:
    """Load the PTX once; what the driver's compiler said. Raises AssemblerError with it when it failed."""
    device.ensure_context()
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    info, errors = ctypes.create_string_buffer(_LOG_BYTES), ctypes.create_string_buffer(_LOG_BYTES)
    settings: list[tuple[int, int]] = [
        (_INFO_LOG, ctypes.addressof(info)),
        (_INFO_LOG_SIZE, _LOG_BYTES),
        (_ERROR_LOG, ctypes.addressof(errors)),
        (_ERROR_LOG_SIZE, _LOG_BYTES),
        (_LOG_VERBOSE, 1),
    ]
    options = (ctypes.c_int * len(settings))(*(option for option, _ in settings))
    values = (ctypes.c_void_p * len(settings))(*(value for _, value in settings))
    loaded = ctypes.c_void_p()
    status = library.cuModuleLoadDataEx(
        ctypes.byref(loaded), ptx.encode() + b"\0", len(settings), options, values
    )
    if status != 0:
        message = errors.value.decode(errors="replace").strip()
        raise AssemblerError(
            f"the driver's assembler failed (CUDA error {status}):\n{message}\nTried before:{tried}"
        )
    library.cuModuleUnload(loaded)
    return info.value.decode(errors="replace")


# -- reading machine code ------------------------------------------------------------------------------------


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, as ``nvdisasm`` prints it.

    Raises AssemblerError when ``cubin`` is not one, or no nvdisasm is to be found or takes it.
    """
    if not cubin.startswith(b"\x7fELF"):
        raise AssemblerError(f"cubin begins {cubin[:8]!r}, which no cubin does; PTX is text already")
    tried = []
    for tool in candidates("nvdisasm"):
        with tempfile.TemporaryDirectory(prefix="gemmkit-") as folder:
            file = Path(folder, "kernel.cubin")
            file.write_bytes(cubin)
            done = subprocess.run([tool, str(file)], capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            return done.stdout
        tried.append(f"\n  {tool}: {done.stderr.strip()}")
    raise AssemblerError(
        "no nvdisasm disassembled the cubin; install the wheel nvidia-cuda-nvdisasm or set GEMMKIT_NVDISASM. "
        f"Tried:{''.join(tried) or ' nothing was found'}"
    )


_SASS_LINE = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE
)
_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PTX_BARE_DIRECTIVE = re.compile(r"^\s*\.(?:version|target|address_size|file|loc)\b[^\n;]*$", re.MULTILINE)
_PTX_HEADER = re.compile(r"(?:\.(?:visible|weak|extern|common|noreturn)\s+)*\.(?:entry|func)\b[^{;]*")
_PTX_PREFIX = re.compile(r"^(?:\s|[{}]|[\w$%.]+\s*:(?!:)|@!?%?\w+\s)*")
_PTX_OPCODE = re.compile(r"[a-z]\w*(?:(?:\.|::)\w+)*")


def instruction_counts(text: str, full: bool = False) -> Counter[str]:
    """How many instructions of each opcode ``text`` holds: SASS from ``disassemble``, or PTX.

    The key is the opcode's first part (``"HGMMA"``, ``"ld"``), or with ``full`` all of it with its modifiers
    (``"HGMMA.64x256x16.F32"``, ``"ld.global.v4.f32"``). Predicates, labels and directives do not count.

    >>> instruction_counts("  /*0010*/  @!P0 LDG.E.128 R4, [R2.64] ;")
    Counter({'LDG': 1})
    """
    opcodes = _SASS_LINE.findall(text) if re.search(r"/\*[0-9a-f]{4,}\*/", text) else _ptx_opcodes(text)
    return Counter(opcodes if full else (opcode.split(".")[0] for opcode in opcodes))


def _ptx_opcodes(text: str) -> list[str]:
    text = _PTX_HEADER.sub("", _PTX_BARE_DIRECTIVE.sub("", _PTX_COMMENT.sub(" ", text)))
    opcodes = []
    for statement in text.split(";"):
        match = _PTX_OPCODE.match(_PTX_PREFIX.sub("", statement, count=1))
        if match:
            opcodes.append(match.group())
    return opcodes


# --------------------------------------------------------------------------------------------------
# From LLVM's code, as Numba makes it, to PTX, by NVVM.
#
# Numba has a way of its own (``library.get_asm_strs``). It loads NVRTC, a library of 100 MB, to ask it which
# architectures there are; it hands over a function as often as others call it; and it reads the library of mathematical
# functions for kernels that call none of them. The code that comes out is the same. What NVVM does not take goes Numba's
# way as well, which finds another architecture, or says what is wrong.

_OPTIONS = {"opt": 3}


def to_asm(library: Any, cc: tuple) -> str:
    """The PTX of a finished Numba library (``CUDACodeLibrary``) with all that it links, for a compute capability."""
    from cuda.bindings.nvvm import nvvmError
    from numba.cuda.cudadrv import nvvm

    modules = {id(module): module for module in library.modules}
    texts = [_without_variables(str(module)) for module in modules.values()]
    unit = nvvm.CompilationUnit({**_OPTIONS, "arch": f"compute_{''.join(map(str, cc))}"})
    try:
        for text in texts:
            unit.add_module(nvvm.llvm_replace(text).encode())
        unit.verify()
        if any("@__nv_" in text or '@"__nv_' in text for text in texts):
            unit.lazy_add_module(nvvm.LibDevice().get())
        return str(unit.compile().decode().strip("\x00").strip())
    except nvvmError:
        library._llvm_strs = texts
        found = library.get_asm_strs(cc=cc)
    if len(found) != 1:
        raise RuntimeError(f"Numba made {len(found)} PTX files of one kernel: a component calls code that must be linked")
    return str(found[0])


_VARIABLES = re.compile(r"^  call void @\"?llvm\.dbg\.(?:declare|value)\"?\(.*\n", re.MULTILINE)


def _without_variables(text: str) -> str:
    """LLVM IR with line numbers but no variables for a debugger: with those NVVM 13.0 gives up on some kernels ("Symbol
    name with unsupported characters")."""
    return _VARIABLES.sub("", text) if "llvm.dbg." in text else text


# --------------------------------------------------------------------------------------------------
# From a kernel function and argument types to PTX, by Numba; from there to a cubin, kept on disk.
#
# A kernel's key is the text of all that went into it (its own fingerprint, its arguments' fingerprints), gemmkit's
# source, the compilers' versions and the architecture. What is found under the key is loaded without compiling anything.

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

    from gemmkit.lang.compile import compile_function
    from gemmkit.lang.functions import device as device_function
    from gemmkit.lang.numba_hooks import set_target_arch

    suffix = ("a",) if device.arch_name.endswith("a") else ()
    cc = (*device.arch, *suffix)
    with global_compiler_lock, without_collections():
        set_target_arch(cc, getattr(kernel, "inlines_calls", False))
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
    from gemmkit.lang.fingerprint import function_text, package_digest

    return "\n".join((function_text(kernel), *(a.fingerprint for a in arguments), *(str(a.kind) for a in arguments),
                      package_digest(), device.arch_name, f"threads={threads},{blocks_per_sm}"))


def cubin_of(kernel: Any, arguments: Sequence[Any], threads: int, device: DeviceInfo, blocks_per_sm: int = 1) -> Entry:
    """The assembled kernel for frozen ``arguments``: from memory, from what came with gemmkit, from disk, or compiled now.
    ``meta["usage"]`` holds its registers and spills.

    Raises CodeChanged when the code that was compiled is not the code that the arguments were frozen with: nothing is kept
    then, and they are to be frozen anew.
    """
    from gemmkit.lang.fingerprint import forget_readings, packages_stand

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
