"""Kernels compiled ahead of their first call, for GPUs that need not be here.

`recorded` runs a function in which products of NumPy arrays are resolved for a device and not computed. `compiled` makes
their kernels, in as many processes as there are processors, and keeps them in the cache's folder. A machine with such a
GPU finds them there: their keys hold no address and no device's number (`gemmkit.runtime.compile.cubin_of`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemmkit.emulator.mode import Mode, computed_by
from gemmkit.lang import later
from gemmkit.lang.fingerprint import look_again
from gemmkit.runtime.cache import Entry
from gemmkit.runtime.device import DeviceInfo, assumed
from gemmkit.runtime.forked import Failure, forked
from gemmkit.runtime.launchable import Launchable

__all__ = ["Kernel", "Made", "Recording", "compiled", "kernel_of", "recorded"]


@dataclass(frozen=True)
class Recording(Mode):
    """Products of host arrays are resolved, and kept in ``found``; their results are zeros, or, without ``zeros``, memory
    that nothing is written to."""

    zeros: bool = True
    found: list[Any] = field(default_factory=list, compare=False)

    def run(self, made: Any, arrays: Any) -> None:
        self.found.extend((made, *getattr(made, "behind", ())))    # kernels of their own
        for out in made.filled(arrays) if self.zeros else ():
            out[...] = 0


def recorded(call: Callable[[], object], device: DeviceInfo | None = None, zeros: bool = True) -> list[Any]:
    """The products that a call would compute on host arrays (`gemmkit.compiled.Compiled`, or a group's), in order.

    ``device`` is what they are resolved for; None: the GPU that is here, or an H100. Results are zeros, or without ``zeros``
    memory that is not touched.

    >>> import numpy as np, gemmkit
    >>> a = np.ones((64, 64), np.float16)
    >>> [found.problem.config.kernel for found in recorded(lambda: gemmkit.matmul(a, a))]
    ['warp_specialised']
    """
    look_again()
    mode = Recording(zeros=zeros)
    with computed_by(mode):
        if device is None:
            call()
        else:
            with assumed(device):
                call()
    return mode.found


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile, and the products that need it."""

    launchable: Launchable
    products: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """What became of a kernel: its registers and spills (``usage``), whether it was in the cache; or why there is none."""

    kernel: Kernel
    usage: dict[str, Any] | None = None
    was_there: bool = False
    error: str | None = None
    seconds: float = 0.0


def kernel_of(launchable: Launchable) -> tuple:
    """What tells a kernel from others."""
    arguments = tuple((str(argument.kind), argument.fingerprint) for argument in launchable.arguments)
    return launchable.kernel, launchable.threads, launchable.blocks_per_sm, launchable.target.arch_name, arguments


def compiled(kernels: Sequence[Kernel], jobs: int | None = None) -> Iterator[Made]:
    """Compile kernels, or find them in the cache, ``jobs`` at a time (None: one a processor); as they come."""
    later.load()                                              # once, and not in every process

    def task(kernel: Kernel) -> Callable[[], tuple[Entry, float]]:
        def make() -> tuple[Entry, float]:
            start = time.perf_counter()
            return kernel.launchable.entry(), time.perf_counter() - start

        return make

    for index, found in forked([task(kernel) for kernel in kernels], jobs):
        if isinstance(found, Failure):
            yield Made(kernels[index], error=str(found))
        else:
            entry, seconds = found
            yield Made(kernels[index], entry.meta["usage"], entry.from_disk, seconds=seconds)
