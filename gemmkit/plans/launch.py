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
from gemmkit.runtime.arrays import ArrayInfo, Recogniser, allocator, as_stream_handle, current_stream, producer_stream
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
    """Calls that are alike: a launch by ``start``, of arrays on ``like``'s device and of its library.

    ``launch(x, given, values, stream)`` launches one more, which brings ``values``, if its addresses ``given`` have been
    allowed. It returns False where the call has to be looked at: for other addresses, and where ``stands`` says that code is
    not what it was. ``again(x, at_out, brought, out, stream)`` is the result of one more call that brings ``brought``
    behind the result's address: ``out``, or for None a new array like ``like``; None where the call has to be looked at.
    ``keeps`` has what ids in its key are of.
    """

    __slots__ = ("again", "allow", "keeps", "launch", "stands")

    def __init__(self, start: Start, like: ArrayInfo, stands: Callable[[], bool] | None = None, keeps: Any = None,
                 results: bool = True):
        """Closures: their variables cost less than attributes."""
        self.keeps, self.stands = keeps, stands
        fit, find_stream = Cache(), stream_finder(like.library, like.device)
        allocate, address_of = allocator(like, like.shape, like.dtype) if results else (None, None)

        def handle_of(x: Any, stream: Any) -> int:
            if stream is None:
                return current_stream(like.library, like.device, producer_stream(x, like.library))
            handle = as_stream_handle(stream)
            check_stream(handle, like.device)
            return handle

        def launch(x: Any, given: Any, values: tuple[Any, ...], stream: Any) -> bool:
            if given not in fit or (stands is not None and not stands()):
                return False
            start(find_stream() if stream is None and find_stream is not None else handle_of(x, stream), values)
            return True

        def again(x: Any, at_out: int, brought: tuple[Any, ...], out: Any, stream: Any) -> Any:
            if out is not None:
                given = at_out, *brought
                return out if launch(x, given, given, stream) else None
            if stands is not None and not stands():
                return None
            handle = find_stream() if stream is None and find_stream is not None else handle_of(x, stream)
            out = allocate()                                   # type: ignore[misc]
            start(handle, (address_of(out), *brought))         # type: ignore[misc]
            return out

        def allow(*given: Any) -> None:
            """Such a call at these addresses has been checked."""
            fit.keep(given, True)

        self.launch, self.again, self.allow = launch, again, allow


#: What is quickly seen of a call: what it is known by, out's address (0: None is given), and what else it brings.
Quick = tuple[Any, int, tuple[Any, ...]]


def quickly(recogniser: Recogniser, rest: Any, arrays: tuple[Any, ...], out: Any) -> Quick | None:
    """Of a call that is known by ``rest`` and its arrays, and brings their addresses. None for what is no array."""
    try:
        if out is None:
            kinds, at = recogniser(arrays)
            return (rest, kinds), 0, at
        kinds, at = recogniser((*arrays, out))
    except (TypeError, ValueError):                    # who looks at the call says why
        return None
    return (rest, kinds, True), at[-1], at[:-1]
