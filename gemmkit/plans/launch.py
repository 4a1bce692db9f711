"""Launches: a kernel with its arguments, bound once, and what a call puts among them.

A family of kernels describes a call's kernel and what stands where (`Launch`); `launch_of` finds one that is known, or
binds it. What a call *brings* is a tuple: the result's address first, then addresses of other arrays, then numbers and
addresses that components hold. The addresses of the stream's own memory come behind them: of its workspaces, and of its copy
of a table of the host's.

    launch = launch_of(key, lambda current: Launch(kernel, [Put(slot, 0), Put(other, 1, encoder=tensor_map)]), "softmax")
    launch.start(stream, (out.pointer, x.pointer))

`KnownCalls` of a function find a call that comes again by what is quickly seen of its arguments: one look-up and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import uncached
from gemmkit.emulator import current_mode
from gemmkit.runtime import launch
from gemmkit.runtime.arrays import (
    ArrayInfo,
    Recogniser,
    allocator,
    as_stream_handle,
    current_stream,
    placed,
    producer_stream,
)
from gemmkit.runtime.compile import CodeChanged
from gemmkit.runtime.device import check_stream, stream_finder
from gemmkit.runtime.launch import Launchable, Space
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
    ``before`` and ``behind`` it are in the same stream, with the same call's.
    """

    kernel: Launchable
    puts: Sequence[Put]
    table: LaunchTable | None = None         # of all its calls
    spaces: Sequence[Space] = ()
    behind: Sequence[Launch] = ()
    before: Sequence[Launch] = ()
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
        if self.before or self.behind:
            starts = [[one.bind().start for one in several] for several in (self.before, self.behind)]
            self.start = _in_order([*starts[0], self.start, *starts[1]])
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
        for one in (self, *self.before, *self.behind):
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
    """Calls that are alike: a launch by ``start``, of arrays on ``like``'s device and of its library. Results are new arrays
    like ``like``. ``stands`` says whether code is what it was. ``pick`` makes what the launch brings of what calls bring
    (None: the same). ``keeps`` has what ids in its key are of. The ``first`` array's own stream is the call's, in libraries
    without a current one.

    ``how`` is what a call takes of it. ``fit`` has the addresses (of all arrays, and what may be more) of calls that gave
    their results and have been checked.
    """

    __slots__ = ("fit", "how", "keeps", "stands")

    def __init__(self, start: Start, like: ArrayInfo, stands: Callable[[], bool] | None = None, keeps: Any = None,
                 pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None, first: int = 0):
        self.keeps, self.stands, self.fit = keeps, stands, Cache()
        find_stream = stream_finder(like.library, like.device)
        making = allocator(like, like.shape, like.dtype)
        self.how: tuple[Any, ...] = start, stands, find_stream, *making, pick, self.fit, like, first

    def picking(self, pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> KnownCall:
        """The same launch of calls that bring something else."""
        made = object.__new__(KnownCall)
        made.keeps, made.stands, made.fit = self.keeps, self.stands, Cache()
        made.how = *self.how[:5], pick, made.fit, *self.how[7:]
        return made


class KnownCalls:
    """The calls of one function that come again.

    ``again(rest, arrays, behind, held, out, stream)`` is the result of one that is known by ``rest`` and by its arrays: one
    look-up and one launch. It is None for a call that has to be looked at: a first one, one whose code is not what it was,
    and one at other addresses that gives its result. A launch is brought the result's address, those of arrays and what is
    ``behind`` them, of which ``held`` may be addresses, too.
    """

    __slots__ = ("_known", "again", "recogniser")

    def __init__(self, known_calls: Cache | None = None) -> None:
        """A closure: its variables cost less than attributes."""
        known_calls, recogniser = cache() if known_calls is None else known_calls, Recogniser()
        self._known, self.recogniser = known_calls, recogniser

        def again(rest: Any, arrays: tuple[Any, ...], behind: tuple[Any, ...] = (), held: tuple[Any, ...] = (),
                  out: Any = None, stream: Any = None) -> Any:
            if current_mode() is not None:
                return None
            given = arrays if out is None else (*arrays, out)
            last = recogniser.last
            at: Any = last.addresses(given)
            if at is not None:
                kinds = last.at.get(at) or placed(last, at)
            else:
                try:
                    kinds, at = recogniser.other(given)
                except (TypeError, ValueError):            # who looks at the call says why
                    return None
            known = known_calls.get((rest, kinds, out is None))
            if known is None:
                return None
            start, stands, find_stream, allocate, address_of, pick, fit, like, first = known.how
            if stands is not None and not stands():
                return None
            if out is None:
                handle = find_stream() if stream is None and find_stream is not None else _handle(given[first], like, stream)
                made = allocate()
                brought = (address_of(made), *at, *behind)
            elif ((at, held) if held else at) in fit:
                handle = find_stream() if stream is None and find_stream is not None else _handle(given[first], like, stream)
                made = out
                brought = (at[-1], *at[:-1], *behind)
            else:
                return None
            start(handle, brought if pick is None else pick(brought))
            return made

        self.again = again

    def find(self, rest: Any, arrays: tuple[Any, ...], behind: tuple[Any, ...],
             out: Any) -> tuple[KnownCall | None, tuple[Any, ...]]:
        """What is known of such a call, and what it launches with behind the result's address."""
        kinds, at = self.recogniser(arrays if out is None else (*arrays, out))
        known: KnownCall | None = self._known.get((rest, kinds, out is None))
        if known is None:
            return None, ()
        pick, brought = known.how[5], (0, *at[:len(arrays)], *behind)
        return known, (brought if pick is None else pick(brought))[1:]

    def keep(self, rest: Any, arrays: tuple[Any, ...], held: tuple[Any, ...], out: Any, make: Callable[[], KnownCall | None],
             stands: Any = None) -> None:
        """Know such a call from now on, and that it has been checked at these addresses. ``stands`` is that of a plan."""
        try:
            kinds, at = self.recogniser(arrays if out is None else (*arrays, out))
        except (TypeError, ValueError):
            return
        key = rest, kinds, out is None
        known: KnownCall | None = self._known.get(key)
        if known is None or known.stands is not stands:
            known = make()
            if known is None:
                return
            self._known.keep(key, known)
        if out is not None:
            known.fit.keep((at, held) if held else at, True)


def _handle(x: Any, like: ArrayInfo, stream: Any) -> int:
    """The stream of a call, where the library has no current one, or it is given."""
    if stream is None:
        return current_stream(like.library, like.device, producer_stream(x, like.library))
    handle = as_stream_handle(stream)
    check_stream(handle, like.device)
    return handle
