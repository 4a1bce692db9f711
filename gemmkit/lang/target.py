"""The device that is compiled for: of the thread that compiles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from gemmkit.lang.later import at_load

_target = threading.local()


def target_arch() -> tuple[int, int, str] | tuple[int, int]:
    """The compute capability that is compiled for, as Numba writes it: ``(9, 0, "a")``."""
    return getattr(_target, "cc", (9, 0, "a"))


def set_target_arch(cc: tuple) -> None:
    _target.cc = cc


@contextmanager
def compiling() -> Iterator[None]:
    """While Numba compiles, the device that it asks for is the one that is compiled for."""
    _target.compiling = getattr(_target, "compiling", 0) + 1
    try:
        yield
    finally:
        _target.compiling -= 1


def _answer_for_the_device() -> None:
    """Numba's own library functions ask which device is current while they compile; without one, ours is the answer."""
    from numba.cuda import dispatcher

    asked = dispatcher.get_current_device

    def get_current_device() -> Any:
        if getattr(_target, "compiling", 0):
            return SimpleNamespace(compute_capability=target_arch())
        return asked()

    dispatcher.get_current_device = get_current_device


at_load(_answer_for_the_device)
