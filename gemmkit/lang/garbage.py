"""A first call without walks of the garbage collector: Numba's modules, and what a compilation makes, are alive or are many.

Loading Numba sets off two hundred collections, a fifth of the time that it takes; a compilation sets off as many.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from itertools import count

__all__ = ["without_collections"]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Load or compile with no garbage collection in between; the caller holds a lock that keeps a second one out."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _set_aside()
        gc.enable()


_times = count(1)
_WALK_EVERY = 4                        # kernels, which leave some 100,000 dead objects each


def _set_aside() -> None:
    """Put what was made among the old objects. The collector would walk through all of it as soon as it may (0.13 s of a
    first call's 2.0); so it does for several kernels at once."""
    if next(_times) % _WALK_EVERY == 0:
        gc.collect()
    elif gc.get_freeze_count() == 0:                          # somebody else's frozen objects stay frozen
        gc.freeze()
        gc.unfreeze()
