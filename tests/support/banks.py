"""How the accesses of warps fall on the banks of shared memory, seen by the emulator.

    with recorded() as seen:
        gk.matmul(a, b, None, conf)                     # under gk.emulate()
    conflicts(seen.loads)                               # more than one access a bank: how many times over

Shared memory has 32 banks of 4 bytes, and serves 128 bytes of a warp at a time: accesses of 4 bytes all lanes together, of 8 bytes
half a warp, of 16 bytes eight lanes. Lanes that read the same word share it. The n-th access of a lane is taken to be the n-th
of its warp, so code must not diverge inside of one.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmkit.emulator.machine import Thread, current
from gemmkit.tools.figures import Lane, extra_passes
from tests.support.replaced import forget_replaced


@dataclass
class Seen:
    """The accesses of warps, in order: each a list of what its lanes address."""

    loads: dict[Any, list[Lane]] = field(default_factory=lambda: defaultdict(list))
    stores: dict[Any, list[Lane]] = field(default_factory=lambda: defaultdict(list))


@contextlib.contextmanager
def recorded(only: Callable[[Any], bool] = lambda thread: True) -> Iterator[Seen]:
    """Records the accesses to shared memory that threads of the emulator (those of which ``only`` is true) make meanwhile."""
    seen = Seen()
    counts: dict[Any, int] = defaultdict(int)

    def note(thread: Any, memory: Any, accesses: dict[Any, list[Lane]], at: int, size: int) -> None:
        if memory is thread.block.shared and only(thread):
            counts[id(accesses), id(thread)] += 1
            warp = id(thread.block), thread.index // 32, counts[id(accesses), id(thread)]
            accesses[warp].append(Lane(thread.index % 32, int(at), int(size)))

    def read(thread: Any, memory: Any, at: int, size: int, *more: Any) -> Any:
        note(thread, memory, seen.loads, at, size)
        return super(Thread, thread).read(memory, at, size, *more)

    def write(thread: Any, memory: Any, at: int, data: Any, *more: Any) -> Any:
        note(thread, memory, seen.stores, at, np.asarray(data).nbytes)
        return super(Thread, thread).write(memory, at, data, *more)

    with unittest.mock.patch.multiple(Thread, create=True, read=read, write=write):
        yield seen


def conflicts(accesses: dict[Any, list[Lane]]) -> int:
    """How many passes more than needed the accesses take, all together."""
    return sum(extra_passes(lanes) for lanes in accesses.values())


@contextlib.contextmanager
def within(owner: Any, *names: str) -> Iterator[Callable[[Any], bool]]:
    """Which threads are in these functions of a module, or methods of a class, meanwhile."""
    inside: set[Any] = set()

    def entering(function: Any) -> Any:
        def entered(*given: Any) -> Any:
            inside.add(current())
            try:
                return function(*given)
            finally:
                inside.discard(current())
        return entered

    try:
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(unittest.mock.patch.object(owner, name, entering(getattr(owner, name))))
            yield lambda thread: thread in inside
    finally:
        forget_replaced()
