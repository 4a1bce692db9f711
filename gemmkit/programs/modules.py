"""Text becomes a module: its kernel, its sizes and its tiles are what they are called in it."""

from __future__ import annotations

import functools
import hashlib
import linecache
import sys
from types import ModuleType

NEEDED = "kernel", "Sizes", "WARPGROUPS", "SHARED_BYTES", "tiles"
ROWS_NEEDED = "kernel", "Sizes", "ROWS", "SHARED_BYTES", "tiles"         # of a function of rows


@functools.lru_cache(maxsize=256)
def module_of(name: str, text: str, needed: tuple[str, ...] = NEEDED) -> ModuleType:
    """The module of a text, whose lines errors and debuggers find. Raises ValueError for a text that is no kernel's."""
    key = f"gemmkit_program_{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    file = f"<{key}>"
    try:
        code = compile(text, file, "exec")
    except SyntaxError as error:
        raise ValueError(f"text: line {error.lineno} is no Python: {error.msg}") from error
    module = ModuleType(key)
    module.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[key] = module                          # dataclasses look their module up
    exec(code, vars(module))
    missing = next((name for name in needed if not hasattr(module, name)), None)
    if missing is not None:
        raise ValueError(f"text: it has no {missing}; a derived kernel's text has {', '.join(needed)}")
    return module
