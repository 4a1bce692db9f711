"""Whether products are computed in the emulator: chosen by ``with gemmkit.emulate():``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from gemmkit.runtime.device import assumed_device


@dataclass(frozen=True)
class Mode:
    """How products of host arrays are computed: in the emulator.

    ``seed`` shuffles the order in which threads and blocks run (None: in order).
    """

    seed: int | None = None

    def run(self, made: Any, arrays: Any) -> None:
        """Compute on host arrays what a family of kernels describes by an object. The object has a ``launchable``,
        ``emulated(arrays, arena)`` (`gemmkit.emulator.kernels.run`) and ``filled(arrays)``, the arrays that it fills;
        kernels of their own come ``behind``."""
        from gemmkit.emulator.kernels import run

        run(made, arrays, self.seed)


_mode: ContextVar[Mode | None] = ContextVar("gemmkit_emulation", default=None)


@contextmanager
def emulate(seed: int | None = None) -> Iterator[None]:
    """Compute gemmkit's products on NumPy arrays by emulating the kernels, thread by thread, with every access checked.

    >>> import numpy as np, gemmkit
    >>> a = np.eye(4, dtype=np.float32)
    >>> with gemmkit.emulate():
    ...     float(gemmkit.matmul(a, a).sum())
    4.0

    ``seed`` runs threads and blocks in a random order, which finds faults that depend on it. Slow: thousands of
    multiplications a millisecond, not billions.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed={seed!r}: a whole number, or None for the order of threads, is needed")
    with computed_by(Mode(seed)):
        yield


@contextmanager
def computed_by(mode: Mode) -> Iterator[None]:
    """Within it products of host arrays are computed by a mode."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


#: The mode of this thread or task; None outside. Every call asks, so it is the variable's own method.
current_mode: Callable[[], Mode | None] = _mode.get


def is_emulating() -> bool:
    return _mode.get() is not None


def world() -> Any:
    """What plans of equal calls differ in: where they compute, and for which device host arrays are planned."""
    return is_emulating(), assumed_device()
