"""What a Python function or constant *is*, as text: equal text means equal device code.

Used for two things: two lambdas written at one place are one compile-time value, and the on-disk cache of compiled
kernels is keyed by everything that went into a kernel.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.records import record_text
from gemmkit.lang.references import attributes, globals_of, names_of

_busy = threading.local()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=1)
def package_digest() -> str:
    """A digest of gemmkit's own source: a new version of any file invalidates every compiled kernel."""
    root = Path(__file__).resolve().parent.parent
    state = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        state.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def code_text(code: CodeType) -> str:
    """A code object without its place in a file."""
    constants = [code_text(c) if isinstance(c, CodeType) else value_text(c) for c in code.co_consts]
    return repr((code.co_name, code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars,
                 code.co_argcount))


def function_text(function: Any, runtime: Collection[str] = ()) -> str:
    """A function with all that it refers to: its code, defaults, captured variables, and the globals it names.

    Of the names in ``runtime`` the values do not matter: they become arguments (:mod:`gemmkit.lang.closures`).
    """
    function = function.function if isinstance(function, DeviceFunction) else function
    stack = getattr(_busy, "stack", None)
    if stack is None:
        stack = _busy.stack = []
    if function in stack:
        return f"recursive:{function.__qualname__}"
    stack.append(function)
    try:
        parts = [code_text(function.__code__), value_text(function.__defaults__), value_text(function.__kwdefaults__)]
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        parts += [n if n in runtime else value_text(cell.cell_contents) for n, cell in cells]
        scope, names = function.__globals__, names_of(function.__code__)
        parts += [n if n in runtime else f"{n}={_looked_up(scope[n], names)}"
                  for n in sorted(globals_of(function.__code__)) if n in scope]
        return digest("\n".join(parts))
    finally:
        stack.pop()


def _looked_up(value: Any, names: Collection[str]) -> str:
    """`value_text` of what a function's code names; a user's module or class, with the attributes that it may read."""
    if not isinstance(value, (ModuleType, type)) or value in _busy.stack:
        return value_text(value)
    _busy.stack.append(value)
    try:
        return value_text(value) + "".join(f";{name}={_looked_up(x, names)}" for _, name, x in attributes(value, names))
    finally:
        _busy.stack.pop()


def value_text(value: Any) -> str:
    """Text that tells one compile-time value from another."""
    own = getattr(value, "__fingerprint__", None)
    if own is not None and not isinstance(value, type):
        return own()
    if isinstance(value, (FunctionType, DeviceFunction)):
        return "function:" + function_text(value)
    if isinstance(getattr(value, "__wrapped__", None), FunctionType):                # as lru_cache makes of a function
        return "wrapped:" + function_text(value.__wrapped__)
    if isinstance(value, ModuleType):
        return "module:" + value.__name__
    if isinstance(value, (type, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(value_text(v) for v in value) + ")"
    if isinstance(value, (set, frozenset)):               # in an order of its own in every process
        return "{" + ",".join(sorted(map(value_text, value))) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{value_text(k)}:{value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, np.dtype):
        return f"dtype:{value.name if value.names is None else record_text(value)}"
    if isinstance(value, np.ndarray):                     # its repr leaves elements out
        return f"array:{value.dtype.name}{value.shape}:{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, (bool, int, float, str, complex, bytes, type(None), np.generic)):
        return f"{type(value).__name__}:{value!r}"
    return f"{type(value).__module__}.{type(value).__qualname__}:{value!r}"
