"""Launches: a kernel with its arguments, bound once, and what a call puts among them.

A family of kernels describes a call's kernel and what stands where (`Launch`); `launch_of` finds one that is known, or
binds it. What a call *brings* is a tuple: the result's address first, then addresses of other arrays, then numbers and
addresses that components hold. The addresses of the stream's own memory come behind them: of its workspaces, and of its copy
of a table of the host's.

    launch = launch_of(key, lambda current: Launch(kernel, [Put(slot, 0), Put(other, 1, encoder=tensor_map)]), "softmax")
    launch.start(stream, (out.pointer, x.pointer))

A `KnownCall` is found by what is quickly seen of its arguments: one look-up and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import uncached
from gemmkit.runtime import launch
from gemmkit.runtime.arrays import KEYS, ArrayInfo, allocator, as_stream_handle, current_stream, key_of, producer_stream
from gemmkit.runtime.compile import CodeChanged
from gemmkit.runtime.launch import Launchable, Space
from gemmkit.runtime.streams import check_stream, stream_finder
from gemmkit.runtime.tensor_maps import Encoder

_TRIES = 3                             # compilations that a change of code may interrupt

Start = Callable[[int, tuple[Any, ...]], None]             # on a stream's handle, with what a call brings
Current = Callable[[Any], Any]                             # a component by the code that is there now


class Cache(dict[Any, Any]):
    """A dictionary of at most ``limit`` entries: beyond them it starts anew."""

    def __init__(self, limit: int = 4096):
        super().__init__()
        self.limit = limit

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= self.limit:
            self.clear()
        self[key] = value
        return value


_caches: list[Cache] = []


def cache(limit: int = 4096) -> Cache:
    """A module's cache of what rests on gemmkit's choices, which `forget` empties."""
    _caches.append(Cache(limit))
    return _caches[-1]


def forget() -> None:
    """Choose, plan and bind everything anew: mappings have been tuned."""
    for one in _caches:
        one.clear()


class Put(NamedTuple):
    """What stands at a ``slot`` of a kernel's values: what a call brings at place ``which``, ``offset`` bytes further on; or
    what an ``encoder`` makes of that, a tensor map or a number."""

    slot: int
    which: int
    offset: int = 0
    encoder: Callable[[Any], Any] | None = None


@dataclass(frozen=True, eq=False)
class LaunchTable:
    """Bytes that a kernel reads in the stream's memory. It stands for them: equal tables are one object."""

    data: np.ndarray


@dataclass(eq=False)
class Launch:
    """A kernel, and where its values come from: what a call brings, and else what it was made with.

    ``spaces`` are workspaces: the stream's own memory, whose addresses stand behind what a call brings. The launches
    ``behind`` it follow in the same stream, with the same call's.
    """

    kernel: Launchable
    puts: Sequence[Put]
    table: LaunchTable | None = None         # of all its calls
    spaces: Sequence[Space] = ()
    behind: Sequence[Launch] = ()
    start: Start = field(init=False, repr=False)

    def bind(self) -> Launch:
        """Compile and load the kernel, and those behind it. Raises what `Launchable.bind` raises."""
        puts, values = tuple(self.puts), list(self.kernel.values)
        for put in puts:
            if isinstance(put.encoder, Encoder):
                values[put.slot] = bytes(128)

        def expand(brought: tuple[Any, ...]) -> list[Any]:
            at = [brought[which] + offset if offset else brought[which] for _, which, offset, _ in puts]
            return [value if put.encoder is None else put.encoder(value) for put, value in zip(puts, at)]

        self.start = self.kernel.bind().prepare(values, [put.slot for put in puts], expand)
        if self.behind:
            self.start = _in_order([self.start, *(one.bind().start for one in self.behind)])
        if self.spaces:
            self.start = _in_workspaces(self.start, self.kernel.ordinal, self.spaces)
        if self.table is not None:
            self.start = _with_table(self.start, self.kernel.ordinal, self.table)
        return self

    def run(self, stream: int, brought: tuple[Any, ...], table: LaunchTable) -> None:
        """Launch it with a table of this call alone."""
        _with_table(self.start, self.kernel.ordinal, table)(stream, brought)

    def forget_code(self) -> None:
        """Keep no function of a component alive: what was compiled is not looked at again."""
        for one in (self, *self.behind):
            one.kernel.forget_code()


def _in_order(starts: Sequence[Start]) -> Start:
    def start(stream: int, brought: tuple[Any, ...]) -> None:
        for one in starts:
            one(stream, brought)

    return start


def _in_workspaces(inner: Start, ordinal: int, spaces: Sequence[Space]) -> Start:
    addresses = launch.addresses
    return lambda stream, brought: inner(stream, (*brought, *addresses(ordinal, stream, spaces)))


def _with_table(inner: Start, ordinal: int, table: LaunchTable) -> Start:
    def start(stream: int, brought: tuple[Any, ...]) -> None:
        with launch.tables:
            inner(stream, (*brought, launch.table(ordinal, stream, table, table.data)))

    return start


_launches = cache()                    # by the family and what decides which kernel a call has


def launch_of(key: Any, make: Callable[[Current], Launch], what: str) -> Launch:
    """The launch that is known by ``key``, or the one that ``make`` describes, `bound`."""
    found: Launch | None = _launches.get(key)
    return _launches.keep(key, bound(make, what)) if found is None else found


def bound(make: Callable[[Current], Launch], what: str) -> Launch:
    """The launch that ``make(current)`` describes, compiled and loaded. Where code has changed while it was compiled, it is
    asked again, and takes components by ``current(component)``, which is `uncached` then. ``what`` has that
    code."""
    current: Current = _as_it_is
    for _ in range(_TRIES):
        made = make(current)
        try:
            made.bind()
        except CodeChanged:
            current = uncached
            continue
        made.forget_code()
        return made
    raise RuntimeError(f"code of {what} changed {_TRIES} times while it was compiled")


def _as_it_is(component: Any) -> Any:
    return component


# -- calls that come again ------------------------------------------------------------------------------------------------

class KnownCall:
    """Calls that are alike: the result of ``start`` is ``like`` an array, and made by its library.

    ``again(x, at_out, brought, out, stream)`` is the result of one more call, of arrays of x's library, that brings
    ``brought`` behind the result's address: a new array, or ``out``, if that was ``fit`` with them before. It returns None
    where the call has to be looked at: for other addresses, and where ``stands`` says that code is not what it was.
    ``keeps`` has what ids in its key are of.
    """

    __slots__ = ("again", "fit", "keeps", "stands")

    def __init__(self, start: Start, like: ArrayInfo, stands: Callable[[], bool] | None = None, keeps: Any = None):
        self.fit, self.keeps, self.stands = Cache(), keeps, stands
        self.again = _again(start, like, self.fit, stands)

    def allow(self, *brought: Any) -> None:
        """Such a call into a given result has been checked."""
        self.fit.keep(brought, True)


def quickly(rest: Any, arrays: tuple[Any, ...], out: Any) -> tuple[Any, int, tuple[int, ...]] | None:
    """What a call is known by, and the addresses of out and of the arrays. None for what is no array."""
    key: list[Any] = [rest]
    at: list[int] = []
    try:
        for x in (out, *arrays):
            address, of_x = (0, None) if x is None else KEYS.get(type(x), key_of)(x, "")
            key += of_x, address & 15
            at.append(address)
    except (TypeError, ValueError):
        return None
    at_out, *others = at
    if len({*others}) < len(others):                       # which of them are one array
        key += map(others.index, others)
    return tuple(key), at_out, tuple(others)


def _again(start: Start, like: ArrayInfo, fit: Cache, stands: Callable[[], bool] | None) -> Callable[..., Any]:
    """`KnownCall.again`, as a closure: its variables cost less than attributes."""
    allocate, find_stream = allocator(like, like.shape, like.dtype), stream_finder(like.library, like.device)

    def again(x: Any, at_out: int, brought: tuple[Any, ...], out: Any, stream: Any) -> Any:
        if stands is not None and not stands():
            return None
        if stream is None:
            handle = find_stream() if find_stream is not None else current_stream(
                like.library, like.device, producer_stream(x, like.library))
        else:
            handle = as_stream_handle(stream)
            check_stream(handle, like.device)
        if out is None:
            out, at_out = allocate()
            start(handle, (at_out, *brought))
            return out
        given = at_out, *brought
        if given not in fit:
            return None
        start(handle, given)
        return out

    return again
