"""Masks of attention: which keys a query sees (`gemmkit.attention`), and the contract of your own.

A mask is a component. `visible` says whether one query sees one key. If a query's keys are one interval, `first_key` and
`end_key` give its bounds; the kernel asks them once a row instead of once an element. `keys` gives the range of keys that
some neighbouring queries see: the kernel neither loads nor multiplies the others. `free` gives the part of it that each of
these queries sees: the kernel tests nothing there. A mask with `visible` alone is right, and visits and tests all keys.

>>> from gemmkit.lang.components import dataclass
>>> import numpy as np, gemmkit as gk
>>> @dataclass(frozen=True)
... class EverySecond(gk.masks.Mask):
...     def visible(self, m, n):
...         return (m + n) % 2 == 0
>>> q = k = v = np.eye(3, 64, dtype=np.float16)[None, None]
>>> with gk.emulate():
...     gk.attention(q, k, v, mask=EverySecond(), scale=0.0)[0, 0, :, :3].tolist()
[[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array, Component, ComponentError, Scalar
from gemmkit.epilogues import fast
from gemmkit.lang.checks import function_given, required, truth
from gemmkit.lang.deferred import by_old_name
from gemmkit.lang.host import Numeric

__all__ = [
    "ALiBi", "Causal", "Documents", "Everything", "Intersection", "Mask", "Padding", "PlainScores", "Score", "ScoreBias",
    "ScoreFunction", "SoftCap", "Window", "check_ranges",
]


def __getattr__(name: str) -> Any:
    return by_old_name(__name__, name)


LOWER_RIGHT, UPPER_LEFT = "lower right", "upper left"


@dataclass(frozen=True)
class Mask(Component):
    """Base class of masks. Queries m and keys n are counted from 0; the methods are device code.

    With ``aligned = "lower right"`` the last query has the last key's number: 2 queries of 5 keys have the numbers 3 and 4.
    With fewer keys than queries the first numbers are negative.

    ``free_from_first`` says that the free keys begin where the visited ones do: less code.
    """

    device_methods = ("visible", "first_key", "end_key", "keys", "free")
    aligned = UPPER_LEFT
    free_from_first = False

    def visible(self, m: int, n: int) -> bool:
        """Whether query m sees key n, of those from `first_key` to `end_key`: ``visible(m, n)``, ``(m, n, head)`` or
        ``(m, n, head, batch)``."""
        return True

    def first_key(self, m: int) -> int:
        """The first key that query m sees; it may take the head and the batch as well."""
        return 0

    def end_key(self, m: int) -> int:
        """One more than the last key that query m sees. It may take the head and the batch as well, and exceed the number of
        keys."""
        return 2**31 - 1

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        """The range of keys, its end exclusive, that queries ``begin`` to ``end`` (exclusive) may see, of ``keys``. It may
        take the head and the batch as well. The kernel does not visit keys outside; the range may exceed the keys."""
        return 0, keys

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        """The same of keys that each of these queries sees."""
        return 0, 0

    def __and__(self, other: Any) -> Mask:
        """What both let through."""
        return Intersection(self, other)

    # -- what kernels ask -------------------------------------------------------------------------------------------------

    @cached_property
    def is_everything(self) -> bool:
        """Whether all keys are visible."""
        return False

    @cached_property
    def has_visible(self) -> bool:
        return type(self).visible is not Mask.visible

    @cached_property
    def has_first(self) -> bool:
        return type(self).first_key is not Mask.first_key

    @cached_property
    def has_end(self) -> bool:
        return type(self).end_key is not Mask.end_key

    @cached_property
    def has_free(self) -> bool:
        return type(self).free is not Mask.free

    @cached_property
    def is_lower_right(self) -> bool:
        return self.aligned == LOWER_RIGHT

    @cached_property
    def arities(self) -> tuple[int, ...]:
        """How many arguments `visible`, `keys`, `free`, `first_key` and `end_key` take; raises TypeError for other numbers
        than the kernel has, and for a mask that hides nothing."""
        if not (self.is_everything or self.has_visible or self.has_first or self.has_end):
            raise TypeError(f"{type(self).__qualname__} hides nothing: visible(self, m, n), or first_key(self, m) and "
                            "end_key(self, m), are needed; masks.Everything() hides nothing on purpose")
        return tuple(_arity(self, name, least) for name, least in
                     (("visible", 2), ("keys", 3), ("free", 3), ("first_key", 1), ("end_key", 1)))

    def shows(self, m: int, n: int, head: int, batch: int, shift: int) -> bool:
        """`visible`, with the arguments that it takes; ``shift`` is how many more keys than queries there are."""
        m = m + shift if self.is_lower_right else m
        if self.arities[0] == 2:
            return truth(self, "visible", self.visible(m, n))
        if self.arities[0] == 3:
            return truth(self, "visible", self.visible(m, n, head))                            # type: ignore[call-arg]
        return truth(self, "visible", self.visible(m, n, head, batch))                         # type: ignore[call-arg]

    def first_shown(self, m: int, head: int, batch: int, shift: int) -> int:
        """`first_key`, with the arguments that it takes."""
        m = m + shift if self.is_lower_right else m
        if self.arities[3] == 1:
            return self.first_key(m)
        if self.arities[3] == 2:
            return self.first_key(m, head)                                                     # type: ignore[call-arg]
        return self.first_key(m, head, batch)                                                  # type: ignore[call-arg]

    def end_shown(self, m: int, head: int, batch: int, shift: int) -> int:
        """`end_key`, with the arguments that it takes."""
        m = m + shift if self.is_lower_right else m
        if self.arities[4] == 1:
            return self.end_key(m)
        if self.arities[4] == 2:
            return self.end_key(m, head)                                                       # type: ignore[call-arg]
        return self.end_key(m, head, batch)                                                    # type: ignore[call-arg]

    def sees(self, m: int, n: int, head: int = 0, batch: int = 0, shift: int = 0) -> bool:
        """Whether query m sees key n by all of this, on the host.

        >>> [Causal().sees(1, n) for n in range(3)]
        [True, True, False]
        """
        within = self.first_shown(m, head, batch, shift) <= n < self.end_shown(m, head, batch, shift)
        return bool(within and self.shows(m, n, head, batch, shift))

    def visited(self, begin: int, end: int, keys: int, head: int, batch: int, shift: int) -> tuple[int, int]:
        """`keys`, with the arguments that it takes."""
        begin, end = (begin + shift, end + shift) if self.is_lower_right else (begin, end)
        if self.arities[1] == 3:
            return self.keys(begin, end, keys)
        if self.arities[1] == 4:
            return self.keys(begin, end, keys, head)                                           # type: ignore[call-arg]
        return self.keys(begin, end, keys, head, batch)                                        # type: ignore[call-arg]

    def untested(self, begin: int, end: int, keys: int, head: int, batch: int, shift: int) -> tuple[int, int]:
        """`free`, with the arguments that it takes."""
        begin, end = (begin + shift, end + shift) if self.is_lower_right else (begin, end)
        if self.arities[2] == 3:
            return self.free(begin, end, keys)
        if self.arities[2] == 4:
            return self.free(begin, end, keys, head)                                           # type: ignore[call-arg]
        return self.free(begin, end, keys, head, batch)                                        # type: ignore[call-arg]

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        """Raise ValueError where the mask's arrays do not fit so many queries, keys, heads and batch."""


def _arity(mask: Mask, name: str, least: int) -> int:
    count = required(getattr(type(mask), name))
    found = count - 1 if isinstance(count, int) else count
    if found not in (least, least + 1, least + 2):
        wanted = {1: "m", 2: "m, n", 3: "begin, end, keys"}[least]
        said = f"takes {found} arguments" if isinstance(found, int) else found
        raise TypeError(f"{type(mask).__qualname__}.{name} {said}; {name}(self, {wanted}), optionally followed by head, or "
                        "by head and batch, is needed")
    return found


def check_ranges(mask: Mask, queries: int, keys: int, heads: int, batch: int, block_m: int) -> None:
    """Raise ComponentError if a mask's `keys` leave out a key that a query sees, or if its `free` keys contain one that a
    query does not see. An emulated launch checks users' masks so, for every query and key."""
    shift = keys - queries
    for i, h in product(range(batch if max(mask.arities) > 3 else 1), range(heads)):
        for begin in range(0, queries, block_m):
            end = min(begin + block_m, queries)
            visited, free = (tuple(map(int, of(begin, end, keys, h, i, shift))) for of in (mask.visited, mask.untested))
            for m, n in product(range(begin, end), range(keys)):
                sees = mask.sees(m, n, h, i, shift)
                if sees and not visited[0] <= n < visited[1]:
                    raise ComponentError(f"{type(mask).__qualname__}.keys of queries {begin} to {end} gives {visited}, and "
                                         f"query {m} sees key {n} (head {h}, batch {i}); all visible keys must be in it")
                if not sees and free[0] <= n < free[1]:
                    raise ComponentError(f"{type(mask).__qualname__}.free of queries {begin} to {end} gives {free}, and "
                                         f"query {m} does not see key {n} (head {h}, batch {i}); only visible keys may be "
                                         "in it")


@dataclass(frozen=True)
class Everything(Mask):
    """Every query sees every key."""

    free_from_first = True

    is_everything = True

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, keys


def _check_aligned(mask: Any) -> None:
    if not isinstance(mask.aligned, str) or mask.aligned not in (LOWER_RIGHT, UPPER_LEFT):
        raise ValueError(f'{type(mask).__qualname__}(aligned={mask.aligned!r}): "{LOWER_RIGHT}" or "{UPPER_LEFT}" is needed')


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys up to its own place.

    ``aligned="lower right"``: the last query sees all keys, as with a cache of keys (and as PyTorch's ``is_causal`` if there
    are as many queries as keys). ``"upper left"``: the first query sees the first key alone.
    """

    aligned: str = LOWER_RIGHT
    free_from_first = True

    def __post_init__(self) -> None:
        _check_aligned(self)

    def end_key(self, m: int) -> int:
        return m + 1

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, end

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, begin + 1


@dataclass(frozen=True)
class Window(Mask):
    """A query sees ``left`` keys before its own place, that one, and ``right`` keys after it: run-time numbers.

    >>> [Window(2).sees(5, n) for n in range(7)]
    [False, False, False, True, True, True, False]
    """

    left: Scalar
    right: Scalar = 0
    aligned: str = LOWER_RIGHT

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_aligned(self)
        for name in ("left", "right"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 2**30:
                raise ValueError(f"Window({name}={value!r}): a whole number from 0 to 2**30 is needed")
            object.__setattr__(self, name, int(value))

    def first_key(self, m: int) -> int:
        return m - self.left  # type: ignore[no-any-return]

    def end_key(self, m: int) -> int:
        return m + self.right + 1  # type: ignore[no-any-return]

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return begin - self.left, end + self.right

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return end - 1 - self.left, begin + self.right + 1


@dataclass(frozen=True)
class Documents(Mask):
    """A query sees the keys of its own document: from ``starts[m]`` to ``ends[m]`` (exclusive). Both rise with m.

    Queries and keys are the same tokens. Together with `Causal`: ``Documents.of(...) & Causal()``.
    """

    starts: Array
    ends: Array

    array_ndims = MappingProxyType({"starts": 1, "ends": 1})

    @classmethod
    def of(cls, offsets: Sequence[int], asarray: Callable[[np.ndarray], Any] = np.asarray) -> Documents:
        """Make the mask of packed documents. ``offsets`` says where each begins, and at last where all end. ``asarray`` puts
        an array on the queries' device (``cupy.asarray``, ``lambda x: torch.from_numpy(x).cuda()``).

        >>> Documents.of([0, 2, 5]).starts.tolist()
        [0, 0, 2, 2, 2]
        """
        bounds = np.asarray(offsets)
        is_whole = bounds.ndim == 1 and bounds.size > 0 and bounds.dtype.kind in "iu"
        if not is_whole or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(f"Documents.of(offsets={offsets!r}): whole numbers that begin with 0 and never fall are needed")
        lengths = np.diff(bounds)
        starts, ends = (np.repeat(of, lengths).astype(np.int32) for of in (bounds[:-1], bounds[1:]))
        return cls(asarray(starts), asarray(ends))

    def first_key(self, m: int) -> int:
        return self.starts[m]  # type: ignore[no-any-return]

    def end_key(self, m: int) -> int:
        return self.ends[m]  # type: ignore[no-any-return]

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return self.starts[begin], self.ends[end - 1]

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return self.starts[end - 1], self.ends[begin]

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        from gemmkit.runtime.arrays import describe

        for name in ("starts", "ends"):
            info = describe(getattr(self, name), name)
            if info.shape != (queries,) or info.dtype.kind not in "iu":
                raise ValueError(f"{name} of Documents has shape {info.shape} and dtype {info.dtype}; {queries} queries "
                                 f"need whole numbers of shape {(queries,)}")


@dataclass(frozen=True)
class Padding(Mask):
    """A query sees the keys n of its sequence where ``seen[batch, n]`` is not 0. Of each sequence, ``first`` and ``end`` say
    between which keys these are, and ``until`` up to which key none needs a test. `of` finds them.

    >>> [Padding.of(np.array([[1, 1, 0]])).sees(0, n) for n in range(3)]
    [True, True, False]
    """

    seen: Array
    first: Array
    end: Array
    until: Array

    array_ndims = MappingProxyType({"seen": 2, "first": 1, "end": 1, "until": 1})

    @classmethod
    def of(cls, seen: Any) -> Padding:
        """Make the mask of an array of NumPy's, or a tensor, (batch, keys). Nothing is read by the host."""
        seen = seen != 0
        count, width = seen.sum(1), seen.shape[1]
        marked = seen * 1
        first, last = marked.argmax(1), marked.flip(1).argmax(1) if hasattr(marked, "flip") else marked[:, ::-1].argmax(1)
        end = (width - last) * (count > 0)
        until = first + (end - first) * (end - first == count)         # of keys with gaps every one is tested
        as_whole = (lambda x: x.int()) if hasattr(seen, "int") else (lambda x: x.astype(np.int32))
        return cls(*map(as_whole, (seen, first, end, until)))

    def visible(self, m: int, n: int, head: int, batch: int) -> bool:                          # type: ignore[override]
        return self.seen[batch, n] != 0  # type: ignore[no-any-return]

    def keys(self, begin: int, end: int, keys: int, head: int, batch: int) -> tuple[int, int]:  # type: ignore[override]
        return self.first[batch], self.end[batch]

    def free(self, begin: int, end: int, keys: int, head: int, batch: int) -> tuple[int, int]:  # type: ignore[override]
        return self.first[batch], self.until[batch]

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        for name, shape in (("seen", (batch, keys)), ("first", (batch,)), ("end", (batch,)), ("until", (batch,))):
            _check_shape(getattr(self, name), f"{name} of Padding", shape, f"{batch} sequences of {keys} keys")


@dataclass(frozen=True)
class Intersection(Mask):
    """What two masks let through: ``first & second``.

    >>> (Causal() & Window(1)).first
    Causal()
    """

    first: Mask
    second: Mask

    def __post_init__(self) -> None:
        for mask in (self.first, self.second):
            if not isinstance(mask, Mask):
                raise TypeError(f"{mask!r} ({type(mask).__name__}) is not a Mask; a gemmkit.masks.Mask is needed")

    @cached_property
    def arities(self) -> tuple[int, ...]:
        return max(self.first.arities, self.second.arities)            # each is asked by its own

    @cached_property
    def has_visible(self) -> bool:
        return self.first.has_visible or self.second.has_visible

    @cached_property
    def has_first(self) -> bool:
        return self.first.has_first or self.second.has_first

    @cached_property
    def has_end(self) -> bool:
        return self.first.has_end or self.second.has_end

    @cached_property
    def has_free(self) -> bool:
        return self.first.has_free and self.second.has_free

    @cached_property
    def free_from_first(self) -> bool:                                 # type: ignore[override]
        return self.first.free_from_first and self.second.free_from_first

    def shows(self, m: int, n: int, head: int, batch: int, shift: int) -> bool:
        if self.first.has_visible and self.second.has_visible:
            return self.first.shows(m, n, head, batch, shift) and self.second.shows(m, n, head, batch, shift)
        return (self.first if self.first.has_visible else self.second).shows(m, n, head, batch, shift)

    def first_shown(self, m: int, head: int, batch: int, shift: int) -> int:
        if self.first.has_first and self.second.has_first:
            return max(self.first.first_shown(m, head, batch, shift), self.second.first_shown(m, head, batch, shift))
        return (self.first if self.first.has_first else self.second).first_shown(m, head, batch, shift)

    def end_shown(self, m: int, head: int, batch: int, shift: int) -> int:
        if self.first.has_end and self.second.has_end:
            return min(self.first.end_shown(m, head, batch, shift), self.second.end_shown(m, head, batch, shift))
        return (self.first if self.first.has_end else self.second).end_shown(m, head, batch, shift)

    def visited(self, begin: int, end: int, keys: int, head: int, batch: int, shift: int) -> tuple[int, int]:
        one = self.first.visited(begin, end, keys, head, batch, shift)
        other = self.second.visited(begin, end, keys, head, batch, shift)
        return max(one[0], other[0]), min(one[1], other[1])

    def untested(self, begin: int, end: int, keys: int, head: int, batch: int, shift: int) -> tuple[int, int]:
        one = self.first.untested(begin, end, keys, head, batch, shift)
        other = self.second.untested(begin, end, keys, head, batch, shift)
        return max(one[0], other[0]), min(one[1], other[1])

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        self.first.check(queries, keys, heads, batch)
        self.second.check(queries, keys, heads, batch)


# --------------------------------------------------------------------------------------------------
# Masks with the roles swapped: which queries see a key. Tiles of keys whose rounds go over queries ask so: those of the
# gradients of k and v.
#
# Of gemmkit's own masks these are masks with bounds, so that queries that see none of a tile's keys are not visited. A class
# of the user's may have changed any of the methods, so that of its masks every query is visited and tested.

def seen_from_keys(mask: Mask) -> Mask:
    """The mask whose rows are ``mask``'s keys, and whose columns are its queries.

    >>> of_keys = seen_from_keys(Window(2, 1))
    >>> all(of_keys.sees(n, m, shift=-3) == Window(2, 1).sees(m, n, shift=3) for m in range(5) for n in range(8))
    True
    """
    if type(mask) is Causal:
        return _FromOwn(mask.aligned)
    if type(mask) is Window:
        return Window(mask.right, mask.left, mask.aligned)
    if type(mask) is Documents:
        return _TokensOfDocuments(mask.starts, mask.ends)
    if type(mask) is Intersection:
        return seen_from_keys(mask.first) & seen_from_keys(mask.second)
    return mask if type(mask) is Everything else _Swapped(mask)


@dataclass(frozen=True)
class _FromOwn(Mask):
    """A key is seen by the queries from its own place on: `Causal`."""

    aligned: str = LOWER_RIGHT

    def first_key(self, m: int) -> int:
        return m

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return begin, keys

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return end - 1, keys


@dataclass(frozen=True)
class _TokensOfDocuments(Mask):
    """Which queries see a key of `Documents`. Their bounds rise with the query: the first that goes beyond a key is found by
    halves."""

    starts: Array
    ends: Array

    array_ndims = Documents.array_ndims
    array_names = MappingProxyType({"starts": "starts of Documents", "ends": "ends of Documents"})

    def first_key(self, m: int) -> int:
        return _first_above(self.ends, m)

    def end_key(self, m: int) -> int:
        return _first_above(self.starts, m)

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return _first_above(self.ends, begin), _first_above(self.starts, end - 1)

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return _first_above(self.ends, end - 1), _first_above(self.starts, begin)

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        Documents(self.starts, self.ends).check(keys, queries, heads, batch)


def _first_above(rising: Any, value: int) -> int:
    """The first place of a rising array whose element is above ``value``; its length if there is none."""
    begin, end = 0, rising.shape[0]
    while begin < end:
        middle = (begin + end) // 2
        if rising[middle] > value:
            end = middle
        else:
            begin = middle + 1
    return begin


@dataclass(frozen=True)
class _Swapped(Mask):
    """Any mask, asked with its arguments swapped: every query is visited and tested."""

    of: Mask

    has_visible = True

    def shows(self, m: int, n: int, head: int, batch: int, shift: int) -> bool:
        return self.of.sees(n, m, head, batch, -shift)

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        self.of.check(keys, queries, heads, batch)


@dataclass(frozen=True)
class OfLengths(Mask):
    """A mask `seen_from_keys` where each of the batch has so many of the ``rows`` keys: a query sees none of the others, and
    the last one that is there is the last one for ``of``, too."""

    of: Mask
    lengths: Array
    rows: Scalar

    array_ndims = MappingProxyType({"lengths": 1})
    array_names = MappingProxyType({"lengths": "key_lengths"})
    has_end = True

    @cached_property
    def has_visible(self) -> bool:
        return self.of.has_visible

    @cached_property
    def has_first(self) -> bool:
        return self.of.has_first

    @cached_property
    def has_free(self) -> bool:
        return self.of.has_free

    def length(self, batch: int) -> int:
        return int(min(max(self.lengths[batch], 0), self.rows))

    def shows(self, m: int, n: int, head: int, batch: int, shift: int) -> bool:
        return self.of.shows(m, n, head, batch, shift + self.rows - self.length(batch))

    def first_shown(self, m: int, head: int, batch: int, shift: int) -> int:
        return self.of.first_shown(m, head, batch, shift + self.rows - self.length(batch))

    def end_shown(self, m: int, head: int, batch: int, shift: int) -> int:
        length = self.length(batch)
        end = self.of.end_shown(m, head, batch, shift + self.rows - length) if self.of.has_end else 2**31 - 1
        return end if m < length else 0

    def visited(self, begin: int, end: int, keys: int, head: int, batch: int, shift: int) -> tuple[int, int]:
        length = self.length(batch)
        first, last = self.of.visited(begin, end, keys, head, batch, shift + self.rows - length)
        return first, last if begin < length else 0

    def untested(self, begin: int, end: int, keys: int, head: int, batch: int, shift: int) -> tuple[int, int]:
        length = self.length(batch)
        first, last = self.of.untested(begin, end, keys, head, batch, shift + self.rows - length)
        return first, last if end <= length else 0

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        self.of.check(queries, keys, heads, batch)


# --------------------------------------------------------------------------------------------------
# Scores of attention: what becomes of ``scale q k`` before the softmax (`gemmkit.attention`), and the contract of your
# own.
#
# A plain function ``f(s, m, n)``, ``f(s, m, n, head)`` or ``f(s, m, n, head, batch)`` of a scaled score, its query and
# its key will do. Arrays and NumPy scalars that it captured are arguments of the kernel. A `Score` is the same as a
# component.
#
# >>> from gemmkit.lang.components import dataclass
# >>> import gemmkit as gk
# >>> @dataclass(frozen=True)
# ... class Distance(gk.masks.Score):
# ...     by: gk.Scalar
# ...     def __call__(self, s, m, n):
# ...         return s - self.by * abs(m - n)
# >>> Distance(0.5)(1.0, 2, 4)
# 0.0

@dataclass(frozen=True)
class Score(Component):
    """Base class of scores: ``__call__(s, m, n)``, ``(s, m, n, head)`` or ``(s, m, n, head, batch)``, device code.

    With ``real_places = True`` m and n are float32, exact up to 2^24. Converting a whole number would take a slot of the
    unit that computes exponentials, which limits a softmax.
    """

    real_places = False
    is_light = False                   # three warpgroups have the registers for it (heads of 32 and 64)

    def __call__(self, s: Any, m: Any, n: Any) -> Any:
        raise NotImplementedError(f"{type(self).__qualname__} has no __call__(s, m, n)")

    @cached_property
    def arity(self) -> int:
        """How many arguments it takes; raises TypeError for other numbers than the kernel has."""
        count = required(type(self).__call__)
        if count not in (4, 5, 6):
            said = f"takes {count - 1} arguments" if isinstance(count, int) else count
            raise TypeError(f"{type(self).__qualname__}.__call__ {said}; s, m, n, optionally followed by head, or by head "
                            "and batch, is needed")
        return int(count) - 1

    def at(self, s: Any, m: Any, n: Any, head: int, batch: int) -> Any:
        """The score, with the arguments that it takes: what kernels call."""
        if self.arity == 3:
            return self(s, m, n)
        if self.arity == 4:
            return self(s, m, n, head)                                                         # type: ignore[call-arg]
        return self(s, m, n, head, batch)                                                      # type: ignore[call-arg]

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        """Raise ValueError where the score's arrays do not fit so many queries, keys, heads and batch."""


@dataclass(frozen=True)
class PlainScores(Score):
    """Scores as they are."""

    def __call__(self, s: Any, m: Any, n: Any) -> Any:
        return s


@dataclass(frozen=True)
class ScoreFunction(Score):
    """A plain function of a score and its place; with ``real_places`` m and n come as float32.

    >>> ScoreFunction(lambda s, m, n: s - (m - n))(1.0, 5, 3)
    -1.0
    """

    f: Any
    real_places: bool = False

    def __post_init__(self) -> None:
        wanted = "a function of s, m, n, of s, m, n, head, or of s, m, n, head, batch"
        given = function_given(self.f, "score", "f", (3, 4, 5), wanted)
        object.__setattr__(self, "f", given)

    @cached_property
    def arity(self) -> int:
        return int(required(self.f))

    def __call__(self, *x: Numeric) -> Any:
        return self.f(*x)

    def at(self, s: Any, m: Any, n: Any, head: int, batch: int) -> Any:
        if self.arity == 3:
            return self.f(s, m, n)
        if self.arity == 4:
            return self.f(s, m, n, head)
        return self.f(s, m, n, head, batch)


@dataclass(frozen=True)
class ALiBi(Score):
    """s - slopes[head] (m - n): linear biases (Press et al., 2021). ``slopes`` is an array with an element for each head."""

    slopes: Array

    real_places = True
    is_light = True
    array_ndims = MappingProxyType({"slopes": 1})

    def __call__(self, s: Any, m: Any, n: Any, head: int) -> Any:                              # type: ignore[override]
        return s - self.slopes[head] * (m - n)

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        _check_shape(self.slopes, "slopes of ALiBi", (heads,), f"{heads} heads")


@dataclass(frozen=True)
class SoftCap(Score):
    """cap tanh(s / cap), to 2^-11 of it (`gemmkit.epilogues.fast.tanh`; Gemma 2). ``cap`` is a run-time number."""

    cap: Scalar

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.cap < 2.0**126:                # the reciprocal of a larger one is no normal number
            raise ValueError(f"SoftCap(cap={self.cap!r}): a positive number below 2**126 is needed")

    def __call__(self, s: Any, m: Any, n: Any) -> Any:
        return self.cap * fast.tanh(s * fast.reciprocal(self.cap))


@dataclass(frozen=True)
class ScoreBias(Score):
    """s + bias[head, m, n]: an array for each head."""

    bias: Array

    array_ndims = MappingProxyType({"bias": 3})

    def __call__(self, s: Any, m: Any, n: Any, head: int) -> Any:                              # type: ignore[override]
        return s + self.bias[head, m, n]

    def check(self, queries: int, keys: int, heads: int, batch: int) -> None:
        _check_shape(self.bias, "bias of Bias", (heads, queries, keys), f"{heads} heads, {queries} queries and {keys} keys")


def _check_shape(array: Any, name: str, wanted: tuple[int, ...], what: str) -> None:
    from gemmkit.runtime.arrays import describe

    shape = describe(array, name).shape
    if shape != wanted:
        raise ValueError(f"{name} has shape {shape}; {what} need {wanted}")
