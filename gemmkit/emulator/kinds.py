"""Which classes a launch's threads, barriers and units are of: the machine's own, or those of a recording."""
from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple


class Kinds(NamedTuple):
    """What a launch makes: its `Thread`s, `Mbarrier`s, `TensorCores` and `Stores`, or subclasses of these."""

    thread: Any
    mbarrier: Any
    tensor_cores: Any
    stores: Any


#: Asked once a launch, so that a launch which nothing records runs the machine's own methods and no test besides.
chosen: ContextVar[Callable[[], Kinds] | None] = ContextVar("gemmkit_recording", default=None)
