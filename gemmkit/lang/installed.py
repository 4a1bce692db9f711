"""Whether the packages that compile and launch kernels are installed, and which of gemmkit's extras has them.

They are gemmkit's extras, not its dependencies: the emulator needs none of them, and there are none for macOS. What needs
them asks `require` first, so that a machine without them gets one answer wherever it asks.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

#: By the module that each one gives, the distribution. (``numba.cuda`` is no sign of numba-cuda: Numba has one of its own.)
_OF_CUDA = {"llvmlite": "llvmlite", "numba": "numba", "numba_cuda": "numba-cuda", "cuda.bindings": "cuda-bindings",
            "cuda.core": "cuda-core"}
_not_found: list[str] = []             # libraries of CUDA's toolkit that were looked for in this process


class NotInstalledError(ImportError):
    """What is asked for needs packages that are not installed; the message names them, and the extra that has them."""


@cache
def missing() -> tuple[str, ...]:
    """The distributions that compile and launch kernels and are not installed. Looked up once a process.

    >>> set(missing()) <= {"llvmlite", "numba", "numba-cuda", "cuda-bindings", "cuda-core"}
    True
    """
    return tuple(name for module, name in _OF_CUDA.items() if not _is_there(module))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):                 # its parent is not there, or None stands in its place
        return False


def require(what: str = "Kernels are compiled") -> None:
    """Raise NotInstalledError, which says what to install, unless the packages of CUDA are there, and all libraries of its
    toolkit that were looked for."""
    if missing():
        raise NotInstalledError(f"{what} by packages that are not installed here ({', '.join(missing())}). {advice()}")
    if _not_found:
        raise NotInstalledError(
            f"Kernels are compiled by CUDA's toolkit, which is not found here ({_not_found[0]}). {advice()}")


@contextmanager
def toolkit() -> Iterator[None]:
    """Within it libraries of CUDA's toolkit are loaded. For one that is not found NotInstalledError is raised, and from then
    on by `require`: looking takes as long each time."""
    try:
        yield
    except RuntimeError as error:
        from cuda import pathfinder

        if not isinstance(error, pathfinder.DynamicLibNotFoundError):
            raise
        _not_found.append(str(error).partition("\n")[0])
        require()


def advice() -> str:
    """How to get the packages of CUDA, and what can be done without them.

    >>> "with gemmkit.emulate()" in advice()
    True
    """
    if sys.platform == "darwin":
        get = "There is no CUDA for macOS."
    else:
        get = ("Get it with pip install 'gemmkit[cu13]' (a driver for CUDA 13, or none) or 'gemmkit[cu12]' (a driver for "
               "CUDA 12).")
    return f"{get} The emulator computes without it: with gemmkit.emulate(): ..."
