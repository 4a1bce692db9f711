"""`use`: CuPy's functions with gemmkit behind them, and what became of each call."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gemmkit.cupy import choice
from gemmkit.lang.errors import ConfigError

# Where CuPy keeps each function: its own code calls some of them by these names, too.
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "matmul": (("cupy", "matmul"), ("cupy.linalg._product", "matmul")),
    "dot": (("cupy", "dot"), ("cupy.linalg._product", "dot")),
    "tensordot": (("cupy", "tensordot"), ("cupy.linalg._product", "tensordot")),
    "einsum": (("cupy", "einsum"), ("cupy.linalg._einsum", "einsum")),
    "gemm": (("cupy.cublas", "gemm"),),
}
# Multiply-adds: a product of 64 x 64 x 64. Of fewer the launch is most of the time, CuPy's as gemmkit's; but CuPy's kernels
# are there, and gemmkit's are compiled for seconds, one for each dtype, order and alignment.
LEAST = 2**18
METHODS = {"__matmul__": "matmul", "dot": "dot"}          # of cupy.ndarray, whose base class in Cython has CuPy's

_lock = threading.Lock()
_active: list[Using] = []
_restore: list[Callable[[], None]] = []
_local = threading.local()


class Using:
    """What became of the calls since `use`; a context manager, at whose end CuPy's functions are its own again.

    ``calls`` counts those that gemmkit computed, by function; ``left`` those that CuPy did, by function and reason.
    ``least`` is how many multiply-adds a product that gemmkit computes has at least.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.calls: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()

    def stop(self) -> None:
        """Leave CuPy its functions again, unless another `use` still holds. To stop twice does nothing."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    while _restore:
                        _restore.pop()()

    def __enter__(self) -> Using:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def __repr__(self) -> str:
        left = ", ".join(f"{name}: {reason} ({count})" for (name, reason), count in self.left.most_common())
        return f"<gemmkit computed {sum(self.calls.values())} calls, CuPy {sum(self.left.values())}{left and ': ' + left}>"


def use(*, least: int = LEAST) -> Using:
    """Have gemmkit compute CuPy's products, in all threads of this process, where it can; CuPy computes the others.

    ``cupy.matmul``, ``cupy.dot``, ``cupy.einsum``, ``cupy.tensordot``, ``cupy.cublas.gemm``, and the operator ``@`` and the
    method ``dot`` of `cupy.ndarray`. Results have CuPy's shape, dtype and order in memory; sums are added up in another
    order. Kernels are compiled at the first call of their kind, and kept on disk.

        using = gemmkit.cupy.use()               # from here on, until using.stop()
        with gemmkit.cupy.use() as using:        # or within
            a @ b

    Args:
        least: how many multiply-adds (M N K, times the products of a stack) a product has at least; CuPy computes those of
            fewer, for which no kernel is to be compiled. 0 leaves none of them to CuPy.

    Returns:
        a `Using`, that counts calls. Calls of `use` nest: each has its own counts, the last one's ``least`` holds, and
        CuPy's functions are restored when the last one ends.

    Raises:
        ImportError: without CuPy.
        TypeError, ValueError: a ``least`` that is no number of multiply-adds.
    """
    if isinstance(least, bool) or not isinstance(least, int):
        raise TypeError(f"least={least!r}: a number of multiply-adds is needed, an int")
    if least < 0:
        raise ValueError(f"least={least}: a number of multiply-adds is needed, 0 or more")
    cupy = import_module("cupy")
    made = Using(least)
    with _lock:
        if not _active:
            _install(cupy)
        _active.append(made)
    return made


def _install(cupy: Any) -> None:
    originals = {}
    for name, places in PLACES.items():
        for module, attribute in places:
            try:
                owner = import_module(module)
            except ImportError:                            # cupy.cublas, where there is no cuBLAS: it cannot be called
                continue
            original = getattr(owner, attribute)
            if name not in originals:
                originals[name] = original, _behind(cupy, name, original)
            if original is originals[name][0]:
                setattr(owner, attribute, originals[name][1])
                _restore.append(functools.partial(setattr, owner, attribute, original))
    for attribute, name in METHODS.items():
        original = getattr(cupy.ndarray, attribute)
        had = attribute in vars(cupy.ndarray)
        setattr(cupy.ndarray, attribute, _method(cupy, name, original))
        _restore.append(functools.partial(setattr, cupy.ndarray, attribute, original) if had
                        else functools.partial(delattr, cupy.ndarray, attribute))


def _behind(cupy: Any, name: str, original: Any) -> Any:
    """CuPy's function with gemmkit's before it."""
    chosen = getattr(choice, name)

    def function(*arguments: Any, **keywords: Any) -> Any:
        taken, out = _taken(cupy, name, chosen, arguments, keywords)
        if taken:
            return out
        if name != "dot":
            return original(*arguments, **keywords)
        _local.is_left = True                              # cupy.dot calls the method, which is not asked again
        try:
            return original(*arguments, **keywords)
        finally:
            _local.is_left = False

    functools.update_wrapper(function, original, assigned=("__name__", "__doc__"), updated=())
    return function


def _method(cupy: Any, name: str, original: Any) -> Any:
    chosen = getattr(choice, name)

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not getattr(_local, "is_left", False):
            taken, out = _taken(cupy, name, chosen, (self, *arguments), keywords)
            if taken:
                return out
        return original(self, *arguments, **keywords)

    functools.update_wrapper(method, original, assigned=("__name__", "__doc__"), updated=())
    return method


def _taken(cupy: Any, name: str, chosen: Callable[..., Any], arguments: tuple, keywords: dict[str, Any]) -> tuple[bool, Any]:
    """Whether gemmkit computed a call, and its result. What it refuses it refuses before anything is launched."""
    device = cupy.cuda.runtime.getDevice()

    def is_array(x: Any) -> bool:
        return type(x) is cupy.ndarray and x.device.id == device

    try:
        product = chosen(is_array, *arguments, **keywords)
        least = next((using.least for using in reversed(_active)), 0)      # (none: another thread has just ended the last)
        if product.work < least:
            raise choice.NotTaken(f"a product of fewer than {least} multiply-adds")
        out = product(cupy.empty)
    except (choice.NotTaken, ConfigError, TypeError, ValueError) as refused:
        reason = str(refused) if isinstance(refused, choice.NotTaken) else f"{type(refused).__name__}: {refused}"
        with _lock:
            for using in _active:
                using.left[name, reason] += 1
        return False, None
    with _lock:
        for using in _active:
            using.calls[name] += 1
    return True, out
