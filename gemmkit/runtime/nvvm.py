"""From LLVM's code, as Numba makes it, to PTX, by NVVM.

Numba has a way of its own (``library.get_asm_strs``). It loads NVRTC, a library of 100 MB, to ask it which architectures
there are; it hands over a function as often as others call it; and it reads the library of mathematical functions for
kernels that call none of them. The code that comes out is the same. What NVVM does not take goes Numba's way as well, which
finds another architecture, or says what is wrong.
"""

from __future__ import annotations

import re
from typing import Any

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
