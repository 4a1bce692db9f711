"""What is kept of a compiled device function: its signature, and its LLVM IR as text, compressed.

Another kernel may call it, so it is kept; but Numba keeps with it the types of all its variables, its intermediate code
and a tree of Python objects for every LLVM instruction: 6 MB a kernel, which the garbage collector walked through again
and again while the next one was compiled. A caller needs the signature, and NVVM the text.
"""

from __future__ import annotations

import zlib
from typing import Any


class CompactModule:
    """Stands for an llvmlite module whose text is final."""

    functions = ()                                            # those whose linkage a caller's library would still set

    def __init__(self, module: Any):
        for function in module.functions:
            if not function.is_declaration:
                function.linkage = "linkonce_odr"             # as every library that calls it would set it
        self._text = zlib.compress(str(module).encode(), 1)

    def __str__(self) -> str:
        return zlib.decompress(self._text).decode()


def compacted(result: Any) -> Any:
    """Numba's compile result of a device function, without what no caller needs."""
    result.library._module = CompactModule(result.library._module)
    result.fndesc.typemap = result.fndesc.calltypes = None
    return result._replace(type_annotation=None, metadata=None)
