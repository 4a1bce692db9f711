"""Whether products are computed in the emulator: chosen by ``with gemmkit.emulate():``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """``seed`` shuffles the order in which threads and blocks run (None: in order)."""

    seed: int | None = None


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
    token = _mode.set(Mode(seed))
    try:
        yield
    finally:
        _mode.reset(token)


def current_mode() -> Mode | None:
    return _mode.get()


def is_emulating() -> bool:
    return _mode.get() is not None
