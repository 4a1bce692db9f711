"""Launches: a kernel with its arguments, bound once, and what a call puts among them.

A family of kernels describes a call's kernel and what stands where (`Launch`); `launch_of` finds one that is known, or
binds it. What a call *brings* is a tuple: addresses of arrays first, then numbers and addresses that components hold. Where
the kernel reads a table of the host's, the address of its copy in the stream's memory comes last.

    launch = launch_of(key, lambda current: Launch(kernel, [Put(slot, 0), Put(other, 1, encoder=tensor_map)]), "softmax")
    launch.run(stream, (x.pointer, out.pointer))

`Calls` remembers calls of one function by what is quickly seen of their arguments: one look-up and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import anew
from gemmkit.runtime import workspace
from gemmkit.runtime.allocation import Allocate, allocator
from gemmkit.runtime.arrays import ArrayInfo, as_stream_handle, current_stream, producer_stream
from gemmkit.runtime.compile import CodeChanged
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import check_stream, stream_finder
from gemmkit.runtime.tensor_maps import Encoder

__all__ = ["Call", "Calls", "Launch", "Put", "Table", "forget_launches", "launch_of"]

_LIMIT = 1024                          # launches, and calls of a function, that are kept; beyond it the memory starts anew
_TRIES = 3                             # compilations that a change of code may interrupt


class Put(NamedTuple):
    """What stands at a ``slot`` of a kernel's values: what a call brings at place ``which``, ``offset`` bytes further on; or
    what an ``encoder`` makes of that, a tensor map or a number."""

    slot: int
    which: int
    offset: int = 0
    encoder: Callable[[Any], Any] | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Bytes that a kernel reads in the stream's memory. It stands for them: equal tables are one object."""

    data: np.ndarray


@dataclass(eq=False)
class Launch:
    """A kernel, and where its values come from: what a call brings, and else what it was made with."""

    kernel: Launchable
    puts: Sequence[Put]
    table: Table | None = None         # of all its calls
    start: Callable[[int, tuple[Any, ...]], None] = field(init=False, repr=False)

    def bind(self) -> Launch:
        """Compile and load the kernel. Raises what `Launchable.bind` raises."""
        puts, values = tuple(self.puts), list(self.kernel.values)
        for put in puts:
            if isinstance(put.encoder, Encoder):
                values[put.slot] = bytes(128)

        def expand(brought: tuple[Any, ...]) -> list[Any]:
            at = [brought[which] + offset if offset else brought[which] for _, which, offset, _ in puts]
            return [value if put.encoder is None else put.encoder(value) for put, value in zip(puts, at)]

        self.start = self.kernel.bind().prepare(values, [put.slot for put in puts], expand)
        return self

    def run(self, stream: int, brought: tuple[Any, ...], table: Table | None = None) -> None:
        """Launch it on a stream's handle; the address of its table, or the call's, comes behind what a call brings."""
        table = table or self.table
        if table is None:
            self.start(stream, brought)
            return
        with workspace.tables:
            self.start(stream, (*brought, workspace.table(self.kernel.ordinal, stream, table, table.data)))


_launches: dict[Any, Launch] = {}      # by the family and what decides which kernel a call has
_calls: list[dict[Any, Call]] = []


def launch_of(key: Any, make: Callable[[Callable[[Any], Any]], Launch], what: str) -> Launch:
    """The launch that is known by ``key``, or the one that ``make`` describes, bound. ``make(current)`` is asked again when
    code has changed while it was compiled, and then takes components by ``current(component)``. ``what`` has that code."""
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= _LIMIT:
            _launches.clear()
        found = _launches[key] = _bound(make, what)
    return found


def _bound(make: Callable[[Callable[[Any], Any]], Launch], what: str) -> Launch:
    current: Callable[[Any], Any] = _as_it_is
    for _ in range(_TRIES):
        made = make(current)
        try:
            made.bind()
        except CodeChanged:
            current = anew
            continue
        made.kernel.forget_code()
        return made
    raise RuntimeError(f"code of {what} changed {_TRIES} times while it was compiled")


def _as_it_is(component: Any) -> Any:
    return component


def forget_launches() -> None:
    """Bind every kernel anew: gemmkit's own choices have changed."""
    _launches.clear()
    for calls in _calls:
        calls.clear()


# -- calls that come again ------------------------------------------------------------------------------------------------

class Call(NamedTuple):
    """What is known of calls that are alike: how they are launched, how a result is made, and what calls with a given result
    brought that was found to share no memory that it must not."""

    start: Callable[[int, tuple[Any, ...]], None]
    allocate: Allocate
    library: str
    device: int
    find_stream: Callable[[], int] | None
    fit: set[tuple[Any, ...]]

    @classmethod
    def of(cls, launch: Launch, like: ArrayInfo) -> Call:
        """Of a launch whose result is like an array, on the stream of whose library it is launched."""
        start = launch.start if launch.table is None else launch.run
        return cls(start, allocator(like, like.shape, like.dtype), like.library, like.device,
                   stream_finder(like.library, like.device), set())

    def again(self, x: Any, brought: tuple[Any, ...], place: int, out: Any, stream: Any) -> Any:
        """The result of a call that is like this one, where it is known to be right: a new one, whose address is put at
        ``place`` of what the call brings, or ``out``, if that was given before. Else None."""
        find = self.find_stream
        handle = find() if stream is None and find is not None else self._stream(x, stream)
        if out is None:
            out, at = self.allocate()
            brought = (*brought[:place], at, *brought[place + 1:])
        elif brought not in self.fit:
            return None
        self.start(handle, brought)
        return out

    def _stream(self, x: Any, given: Any) -> int:
        if given is None:
            return current_stream(self.library, self.device, producer_stream(x, self.library))
        handle = as_stream_handle(given)
        check_stream(handle, self.device)
        return handle

    def allow(self, brought: tuple[Any, ...]) -> None:
        """What a call brings has been checked."""
        if len(self.fit) >= _LIMIT:
            self.fit.clear()
        self.fit.add(brought)


class Calls(dict[Any, Call]):
    """The calls of one function that are known, by what is quickly seen of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        _calls.append(self)

    def keep(self, key: Any, call: Call) -> Call:
        if len(self) >= _LIMIT:
            self.clear()
        self[key] = call
        return call
