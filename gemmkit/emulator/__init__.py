"""The CPU machine that runs kernels without a GPU and checks what hardware does not.

    machine       threads, blocks, `launch`; which thread runs next, deadlock
    memory        arrays and shared memory as addressable bytes; the history of accesses, in which races are found; clocks:
                  what is ordered before what
    agents        checked memory accesses; TMA as agents beside the threads; streams, early starts
    copies        what TMA and the copies of threads move
    barriers      mbarriers, barriers of a cluster, counters; wgmma, and what is in flight
    errors        the faults, and the page that draws one
    functions     device functions in Python; user_code: a user's functions, checked
    recording     what a launch did, event by event, where it is asked for

Products are computed here inside ``with gemmkit.emulate():``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmkit.lang.deferred import public_names
from gemmkit.runtime.device import assumed_device

if TYPE_CHECKING:
    from gemmkit.emulator import agents as agents
    from gemmkit.emulator import barriers as barriers
    from gemmkit.emulator import copies as copies
else:
    __getattr__, __dir__ = public_names(globals())             # instructions ask for modules when they are emulated


@dataclass(frozen=True)
class ExecutionTarget:
    """How products of host arrays are computed: in the emulator.

    ``seed`` shuffles the order in which threads and blocks run (None: in order). ``mapping`` is "device" or "small", as in
    `emulate`.
    """

    seed: int | None = None
    mapping: str = "device"

    def run(self, made: Any, arrays: Any) -> None:
        """Compute on host arrays what a family of kernels describes by an object. The object has a ``launchable``,
        ``emulated(arrays, arena)`` (`gemmkit.emulator.launch.run`) and ``filled(arrays)``, the arrays that it fills;
        kernels of their own come ``behind``."""
        from gemmkit.emulator.launch import run

        run(made, arrays, self.seed)


_mode: ContextVar[ExecutionTarget | None] = ContextVar("gemmkit_emulation", default=None)


@contextmanager
def emulate(seed: int | None = None, *, mapping: str = "small") -> Iterator[None]:
    """Compute gemmkit's products on NumPy arrays by emulating the kernels, thread by thread, with every access checked.

    Args:
        seed: runs threads and blocks in a random order, which finds faults that depend on it. None keeps their order.
        mapping: what a product, attention or a program takes if no mapping is named. "small" keeps the kernel and the
            operator that a GPU would have, in tiles that fit the problem and take few threads. "device" is the mapping that
            the GPU takes.

    Raises:
        TypeError: the seed is no whole number.
        ValueError: another ``mapping``.

    >>> import numpy as np, gemmkit
    >>> a = np.eye(4, dtype=np.float32)
    >>> with gemmkit.emulate():
    ...     float(gemmkit.matmul(a, a).sum())
    4.0

    Slow: thousands of multiplications a millisecond, not billions.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed={seed!r}: a whole number, or None for the order of threads, is needed")
    if mapping not in ("small", "device"):
        raise ValueError(f"mapping={mapping!r}: 'small' (a tile that fits the problem) or 'device' (the GPU's) is needed")
    with computed_by(ExecutionTarget(seed, mapping)):
        yield


@contextmanager
def computed_by(mode: ExecutionTarget) -> Iterator[None]:
    """Within it products of host arrays are computed by a mode."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


#: The mode of this thread or task; None outside. Every call asks, so it is the variable's own method.
current_mode: Callable[[], ExecutionTarget | None] = _mode.get


def takes_small_mappings() -> bool:
    """Whether a product, attention or a program for which nobody names a mapping takes one that is quickly emulated."""
    mode = _mode.get()
    return mode is not None and mode.mapping == "small"


def world() -> Any:
    """What plans of equal calls differ in: where they compute, by which mappings, and for which device host arrays are
    planned."""
    mode = _mode.get()
    return mode and mode.mapping, assumed_device()
