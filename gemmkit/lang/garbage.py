"""A first call without walks of the garbage collector: Numba's modules, and what a compilation makes, are alive or are many.

Loading Numba sets off two hundred collections, a fifth of the time that it takes; a compilation sets off as many.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Load or compile with no garbage collection in between; the caller holds a lock that keeps a second one out."""
    if not gc.isenabled():
        yield
        return
    before = gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        _set_aside(gc.get_count()[0] - before)
        gc.enable()


_LEAST = 1_000_000                     # objects, some 90 MB: a kernel leaves up to 300,000 dead ones; a walk takes 0.5 s
_made = 0                              # since the last walk
_alive = 0                             # after it


def _set_aside(made: int) -> None:
    """Put what was made among the old objects. The collector would walk through all of it as soon as it may (0.13 s of a
    first call's 2.0, and seconds in a process that has millions of objects); so it does once as much was made as is alive.
    That much may then lie dead, and a kernel's share of the walks is the same in a large process as in a small one."""
    global _made, _alive
    _made += max(0, made)
    if _made >= max(_LEAST, _alive):
        gc.collect()
        _made, _alive = 0, len(gc.get_objects())
    elif gc.get_freeze_count() == 0:                          # somebody else's frozen objects stay frozen
        gc.freeze()
        gc.unfreeze()
