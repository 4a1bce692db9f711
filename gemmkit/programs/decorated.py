"""``@gk.program``: a function of arrays and components, and its two readings: numbers by NumPy, a kernel by its plan."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as Names
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.lang.errors import ConfigError
from gemmkit.plans.launch import KnownCalls, cache
from gemmkit.programs.called import NUMBER, TEST, WHOLE, given_for, of_elements
from gemmkit.programs.lengths import PackedRows, PagedRows, RowsOfPiece, packed_rows, paged_rows, piece_of
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.trace import FUNCTIONS, TF32, Along, Interpreter, Loop, accesses_of, called, entered, stores_of, trace
from gemmkit.programs.values import (
    Axis,
    Cell,
    Index,
    Parameter,
    Place,
    ProgramAxis,
    Term,
    current,
    is_entered,
    is_of_rounds,
    refused,
    shown,
    term,
)
from gemmkit.ptx.mma import rounded_to_tf32
from gemmkit.runtime.arrays import describe, is_array, on_host

if TYPE_CHECKING:
    from gemmkit.programs.plan import ProgramPlan
    from gemmkit.tuner.subjects import TunedProgram


# --------------------------------------------------------------------------------------------------
# A program on NumPy, in float64: blocks are slices, and dimensions have names, so that a row's value meets its row.

BLOCK = 37                             # an odd length shows that a result does not depend on it


class Dimensioned:
    """Numbers with dimensions. ``whole``: "place" of places and what is made of them, "count" of elements of arrays of whole
    numbers, which functions get as whole numbers; "constant" of one that may meet places."""

    def __init__(self, dims: tuple, array: Any, whole: str = ""):
        self.dims, self.array, self.whole = dims, np.asarray(array), whole

    @property
    def is_whole(self) -> bool:
        return self.whole in ("place", "count")

    def over(self, dims: tuple) -> np.ndarray:
        """The numbers with an axis for each of ``dims``, of length 1 where they have it not."""
        order = [self.dims.index(d) for d in dims if d in self.dims]
        return self.array.transpose(order)[tuple(slice(None) if d in self.dims else None for d in dims)]


class Reference(Interpreter):
    """``block``: how long blocks are."""

    kind = Dimensioned

    def __init__(self, block: int = BLOCK):
        super().__init__()
        self.block = block
        self.only: Index | None = None

    def constant(self, x: Any) -> Dimensioned:
        return Dimensioned((), np.float64(x), "constant" if float(x).is_integer() else "")

    def number(self, value: Dimensioned) -> float | None:
        return None                                    # the trace has looked at constants

    def use(self, index: Index, parameter: Parameter, axis: int, key: tuple) -> None:
        """The trace has looked at it."""

    def is_condition(self, value: Dimensioned) -> bool:
        return value.array.dtype == np.bool_

    def renamed(self, value: Dimensioned, dims: tuple) -> Dimensioned:
        return Dimensioned(dims, value.array, value.whole)

    def compute(self, op: str, args: tuple, dims: tuple, data: Any = None) -> Dimensioned:
        if op == "dot":
            return Dimensioned(dims, args[0].array @ args[1].array)
        if op == "transpose":
            return Dimensioned(dims, args[0].array.T)
        if op == "rowmax":
            return Dimensioned(dims, np.max(args[0].array, axis=1, initial=-np.inf))
        if op == "total":
            return Dimensioned(dims, np.sum(args[0].array))
        if op == "cumsum":
            return Dimensioned(dims, self.sums_along(args[0].array, *data))
        if op == "diagonal":
            x, part = args[0].array, np.arange(len(args[0].array)) // -(-self.block // data)
            return Dimensioned(dims, np.where(part[:, None] == part, x, 0.0))
        if op == "inverse":
            return Dimensioned(dims, np.linalg.inv(np.tril(args[0].array, -1) + np.eye(len(args[0].array))))
        if op == "rowsum":
            return Dimensioned(dims, np.sum(args[0].array, axis=1))
        if op == "cast" and data == TF32:
            return Dimensioned(dims, rounded_to_tf32(args[0].array).astype(np.float64))
        if op == "cast":
            return Dimensioned(dims, args[0].array.astype(data).astype(np.float64))
        if op in (NUMBER, TEST):
            given = [(x.over(dims), (x.is_whole or (data.takes_place(n) and x.whole == "constant")) and not data.is_real(n))
                     for n, x in enumerate(args)]
            return Dimensioned(dims, of_elements(data.host, op == TEST, given))
        with np.errstate(all="ignore"):
            return Dimensioned(dims, FUNCTIONS[op](*(x.over(dims) for x in args)), _stays_whole(op, args))

    def sums_along(self, x: np.ndarray, parts: int, after: bool) -> np.ndarray:
        size = -(-self.block // parts)                 # the last block may have fewer rows
        pieces = [x[n:n + size] for n in range(0, len(x), size)]
        sums = [np.cumsum(y, axis=0) for y in pieces]
        return np.concatenate([y[-1:] - y for y in sums] if after else sums) if sums else x

    def filled(self, dims: tuple, value: float) -> Dimensioned:
        return Dimensioned(dims, np.full([_length(d) for d in dims], value))

    def fitted(self, value: Dimensioned, dims: tuple) -> Dimensioned:
        return Dimensioned(dims, np.broadcast_to(value.over(dims), [_length(d) for d in dims]))

    def extent(self, dim: Any) -> Dimensioned:
        is_block, whole = isinstance(dim, Index), dim.size if isinstance(dim, Axis) else dim.extent.length
        return Dimensioned((), dim.limit if is_block and dim.limit is not None else whole, "place")

    def load(self, parameter: Parameter, key: tuple, dims: tuple) -> Dimensioned:
        whole = "count" if np.dtype(parameter.dtype).kind in "iu" else ""
        rows: Any = next((x.base for x in key if isinstance(x, Index) and x.is_page), None)
        at = _slices(key)
        if rows is not None:
            places, of_page = np.arange(rows.start, rows.stop), rows.extent.of_page
            page = np.asarray(rows.extent.table.data[rows.line.start, places // of_page])
            at = tuple(page if x.base is rows else places % of_page if x is rows else x.start for x in key)
        at, there = _those_there(key, at)
        found = np.array(parameter.data[at], np.float64)
        found = found[..., :dims[-1].size] if dims and isinstance(dims[-1], Axis) else found               # of a slice
        return Dimensioned(dims, np.where(there[:, None], found, 0.0) if there.size else found, whole)

    def store(self, parameter: Parameter, key: tuple, dims: tuple, value: Dimensioned) -> None:
        if self.only is None or self.only.start == 0:
            at, there = _those_there(key, _slices(key))
            stored = value.over(dims)
            if there.size:
                at = tuple(x[there] if isinstance(x, np.ndarray) else x for x in at)
                stored = np.broadcast_to(stored, (len(there), *stored.shape[1:]))[there]
            parameter.data[at] = stored

    def coordinate(self, dim: Any) -> Dimensioned:
        if isinstance(dim, Index) and dim.stack:
            return Dimensioned((), dim.start, "place")
        return Dimensioned((dim,), np.arange(dim.size) if isinstance(dim, Axis) else np.arange(dim.start, dim.stop), "place")

    def loop(self, extents: tuple[ProgramAxis, ...], kind: str, start: Any = None, stop: Any = None,
             rows: RowsOfPiece | None = None) -> Iterator[Any]:
        begin, end = (None if x is None else int(self.lift(x).array) for x in (start, stop))
        if kind == "parallel":
            for blocks in self._tiles(extents, ()):
                self.stacks = tuple(x for x in blocks if x.stack)
                yield blocks if len(blocks) > 1 else blocks[0]
        elif rows is not None and rows.axis.offsets is not None:
            yield from self._blocks(extents[0], piece=rows.which, begin=begin or 0)
        else:
            end = extents[0].length if end is None else min(end, extents[0].length)
            for index in self._blocks(extents[0], end, begin=begin or 0):
                index.line = None if rows is None else rows.which
                yield index

    def _tiles(self, extents: tuple[ProgramAxis, ...], before: tuple[Index, ...]) -> Iterator[tuple[Index, ...]]:
        """With the first indices, which say which piece rows are of."""
        if not extents:
            yield before
            return
        for index in self._blocks(extents[0], None, piece_of(extents[0], before)):
            yield from self._tiles(extents[1:], (*before, index))

    def _blocks(self, extent: ProgramAxis, end: int | None = None, piece: Index | None = None,
                begin: int = 0) -> list[Index]:
        """Of rounds from ``begin`` up to ``end``; None: of tiles, or of a piece. Blocks do not lie across pages."""
        step, origin, limit = 1 if extent.stack else self.block, 0, end
        if piece is not None:
            assert extent.offsets is not None
            first, last = (min(max(int(x), 0), extent.length) for x in extent.offsets.data[piece.start:piece.start + 2])
            origin, limit = first, max(last - first, 0)
        stop = extent.length if limit is None else limit
        begin = max(begin, 0)
        first = begin if extent.table is None else begin - begin % math.gcd(step, extent.of_page)
        return [Index(extent, "", max(start, begin), min(start + step, stop), limit=limit, piece=piece, origin=origin)
                for start in range(first, stop, step) if begin < stop]


def _stays_whole(op: str, args: tuple) -> str:
    """Places stay places, as kernels compute them."""
    kinds = {x.whole for x in args}
    return "place" if op in WHOLE and "place" in kinds and kinds <= {"place", "constant"} else ""


def _length(dim: Any) -> int:
    return dim.size if isinstance(dim, Axis) else dim.stop - dim.start


def _slices(key: tuple) -> tuple:
    return tuple(index.start if index.stack else slice(index.origin + index.start, index.origin + index.stop)
                 for index in key)


def _those_there(key: tuple, at: tuple) -> tuple[tuple, np.ndarray]:
    """Of a key whose rows are looked up: numbers of rows that are there, and which of those that are named these are. Else
    what is given, and nothing."""
    looked = next((n for n, x in enumerate(key) if isinstance(x, Index) and x.lookup is not None), None)
    if looked is None:
        return at, np.empty(0, bool)
    index = key[looked]
    named = np.asarray(index.lookup.data[_slices((index.base,))])
    there = (named >= 0) & (named < index.extent.length)
    return (*at[:looked], np.where(there, named, 0), *at[looked + 1:]), there


# --------------------------------------------------------------------------------------------------
# A decorated function.

#: Arguments of a program's calls.
OWN = "mapping", "stream", "text", "block", "mappings", "effort", "budget", "keep", "jobs", "progress"


@functools.cache
def _calls() -> Any:
    """`gemmkit.programs.calls`, which stands above programs. (A statement that imports takes 0.3 us in each call.)"""
    return importlib.import_module("gemmkit.programs.calls")


def _check_mapping(mapping: Any) -> None:
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(f"mapping={mapping!r}: a gemmkit.Mapping is needed, such as Mapping({{'m': 128}}), or None")


known_calls = cache()


class Program:
    """A decorated function. Its arguments are arrays, floating-point numbers, and functions that it calls, such as a gate or
    a score. The arrays that it stores into are its results; the caller passes them."""

    def __init__(self, function: Callable[..., None]):
        self.function = function
        self.signature = inspect.signature(function)
        self.names = list(self.signature.parameters)
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        self._is_plain = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}
        self.calls = KnownCalls(known_calls)                     # with all programs' in one cache
        self.variants: dict[str, Program] = {}
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<program {self.function.__name__}{self.signature}>"

    def bound(self, arrays: tuple, components: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises TypeError for those that the function does not take, or misses."""
        if not components and len(arrays) == len(self.names) and self._is_plain:
            return dict(zip(self.names, arrays))
        try:
            given = self.signature.bind(*arrays, **components)
        except TypeError as error:
            raise TypeError(f"{self.function.__name__}: {error}") from None
        given.apply_defaults()
        return dict(given.arguments)

    def variant(self, function: Callable[..., None]) -> Program:
        """Decorate another way to compute the same, which ``Mapping(variants={program: variant})`` selects by the names of
        both functions. The variant is a program itself, with a reference.

        Raises TypeError for another list of arguments, or a name that is taken.

        >>> import gemmkit as gk
        >>> from gemmkit import programs as gp
        >>> @gk.program
        ... def sums(x, y):
        ...     for m in gp.parallel(x.rows):
        ...         y[m] = x[m].sum(axis=1)
        >>> @sums.variant
        ... def sums_of_halves(x, y):
        ...     for m in gp.parallel(x.rows):
        ...         y[m] = 2.0 * (0.5 * x[m]).sum(axis=1)
        >>> gk.Mapping(variants={"sums": "sums_of_halves"})
        Mapping(variants={'sums': 'sums_of_halves'})
        """
        made = program(function)
        if made.names != self.names:
            raise TypeError(f"{function.__name__}({', '.join(made.names)}) is no variant of {self.function.__name__}"
                            f"({', '.join(self.names)}): both must take the same arguments")
        if function.__name__ in (self.function.__name__, *self.variants):
            raise TypeError(f"{self.function.__name__} has a variant {function.__name__!r} already; give it another name")
        self.variants[function.__name__] = made
        return made

    def chosen(self, variants: Names[str, str]) -> Callable[..., None]:
        """The function that a mapping's ``variants`` select. Raises ConfigError for one that is not there."""
        name = variants.get(self.function.__name__, self.function.__name__)
        if name == self.function.__name__:
            return self.function
        if name not in self.variants:
            own = self.function.__name__
            raise ConfigError(f"Mapping(variants={{{own!r}: {name!r}}}): {own} has the variants "
                              f"{', '.join([own, *self.variants])}")
        return self.variants[name].function

    def _inlined(self, arrays: tuple, components: dict[str, Any], mapping: Mapping | None, stream: Any) -> Any:
        """What the function returns, called as a part of the program that calls it. Raises TypeError, with the line, for a
        stream."""
        _check_mapping(mapping)
        if stream is not None:
            raise refused(TypeError, f"{self.function.__name__}(stream=...): a program that another one calls is a part of "
                                     "its kernel; leave stream out")
        arguments = self.bound(arrays, components)
        with current().inlining(self, mapping) as function:
            _refuse_rebound(function, arguments)
            return function(**arguments)

    def traced(self, arguments: dict[str, Any], variants: Names[str, str] = MappingProxyType({})) -> Loop:
        """The program on symbols, for arrays of these shapes. Raises ValueError and TypeError with the user's line,
        ConfigError for ``variants`` that there are not."""
        infos = {name: describe(x, name) for name, x in arguments.items() if is_array(x)}
        parameters = {name: Parameter(name, tuple(info.shape), info.dtype) for name, info in infos.items()}
        loop = trace(self, {**given_for(arguments), **parameters}, variants)
        known = {self.function.__name__, *(call.name for call in loop.inlined)}
        other = next((name for name in variants if name not in known), None)
        if other is not None:
            raise ConfigError(f"Mapping(variants={{{other!r}: {variants[other]!r}}}): the programs are "
                              f"{', '.join(sorted(known))}")
        return loop

    def reference(self, *arrays: Any, block: int = BLOCK, **components: Any) -> Any:
        """Compute the results in float64, with NumPy, in blocks of ``block``. Returns one array, or a tuple in the order of
        the arguments. Of the arrays that the program stores into it reads only the shapes, unless the program reads them,
        and writes nothing to them. Elements that the program does not store are NaN, or what they are if it reads them.

        Raises ValueError and TypeError with the line of the program that breaks a rule, TypeError for an array of a GPU.
        """
        arguments = self.bound(arrays, components)
        for name, x in arguments.items():
            if is_array(x) and describe(x, name).device >= 0:
                raise TypeError(f"{name} is an array of a GPU, and a reference computes with NumPy; copy it to the host")
        loop = self.traced(arguments)
        results = {store.parameter.name for store in stores_of(loop)}
        held = {name: np.array(on_host(x), np.float64) if name in loop.updated else
                np.full(np.shape(x), np.nan) if name in results else on_host(x)
                for name, x in arguments.items() if is_array(x)}
        parameters = {name: Parameter(name, x.shape, x.dtype, x) for name, x in held.items()}
        with entered(Reference(block)) as reference:
            numbers = {name: Term(reference.constant(x)) for name, x in arguments.items()
                       if isinstance(x, (float, np.floating))}
            called(self.function, {**given_for(arguments), **parameters, **numbers}, arguments)
        found = tuple(held[name] for name in arguments if name in results)
        return found if len(found) > 1 else found[0]

    def plan(self, *arrays: Any, mapping: Mapping | None = None, text: str | None = None, **components: Any) -> ProgramPlan:
        """Derive the kernel for arrays of these kinds. ``text``: a kernel's source that runs in its place. Without a mapping
        it takes the one that `tune` has stored, or the default.

        Raises ConfigError for a mapping that cannot be, ValueError and TypeError for a program that has no kernel yet.
        """
        _check_mapping(mapping)
        return _calls().ProgramProblem(self, self.bound(arrays, components), text).plan(mapping)

    def tune(self, *arrays: Any, mappings: Iterable[Mapping] | None = None, effort: str = "quick",
             budget: float | None = None, keep: bool = True, jobs: int | None = None, progress: bool | None = None,
             **components: Any) -> TunedProgram:
        """Try mappings on arrays of a GPU, and keep the fastest for calls and plans without a mapping to take from now on.

        What is tried, checked, timed and kept is `gemmkit.tune`'s, whose arguments ``effort``, ``budget`` (in seconds),
        ``keep``, ``jobs`` and ``progress`` are. Results are not written.

        Args:
            arrays, components: as in a call.
            mappings: what is tried; None: those that differ from the default in one thing, then in two, then in three.

        Returns a `gemmkit.tuner.TunedProgram`: printed it is a table, its ``mapping`` the fastest mapping.

        Raises TypeError for arrays of the host and within ``with gemmkit.emulate():``, ValueError for another effort or
        budget, RuntimeError where the default does not run, and what `plan` raises. Example, on a GPU::

            found = gemm.tune(a, b, d, budget=60)
            print(found)                                       # a table
            gemm(a, b, d)                                      # by the fastest
            gemm(a, b, d, mapping=found.mapping)               # the same, said
        """
        tune = importlib.import_module("gemmkit.tuner").tune           # which is made of programs, and stands above them
        found = tune(self, *arrays, mappings=mappings, effort=effort, budget=budget, keep=keep, jobs=jobs, progress=progress,
                     **components)
        return cast("TunedProgram", found)

    def __call__(self, *arrays: Any, mapping: Mapping | None = None, stream: Any = None, **components: Any) -> Any:
        """Run the derived kernel on arrays of a GPU, or on NumPy's within ``with gemmkit.emulate():``. A call that is like
        an earlier one finds its plan, and one with other sizes its derivation (`gemmkit.programs.calls`).

        In another program it is a part of that program's kernel: it takes indices, cells and values as well, and returns
        what the function returns. ``mapping``: its own, for what the caller's leaves open (`Mapping.within`)."""
        if is_entered():
            return self._inlined(arrays, components, mapping, stream)
        if mapping is not None:
            _check_mapping(mapping)
        return _calls().run(self, arrays, components, mapping, stream)


def _refuse_rebound(function: Any, arguments: dict[str, Any]) -> None:
    """Raises ValueError where a program that another one calls binds the name of an array anew: that stores nothing."""
    code = function.__code__
    for _, line, name, is_bound in accesses_of(code):
        if is_bound and isinstance(arguments.get(name), Parameter):
            raise refused(ValueError, f"{name} is an array argument: {name} = ... only rebinds the name and stores nothing; "
                                      f"write {name}[m, n] = ...", f"{code.co_filename}:{line}")


def program(function: Callable[..., None]) -> Program:
    """Derive a kernel from a function that is written in the words of `gemmkit.programs`.

    Args:
        function: a function of arrays and numbers. Its first loop is `parallel`; a result is an argument that the function
            stores into. Nothing is compiled until the program is called.

    Returns:
        A `Program`: ``f(*arrays, mapping=None, stream=None)`` launches one kernel, which stores into its arguments;
        ``f.plan(*arrays)`` resolves a call once, and ``f.reference(*arrays)`` computes with NumPy in float64.

    Raises:
        TypeError: no function is given, or one of its arguments has a name that calls of a program use themselves.
        Calls raise errors with the line of the program that cannot be derived.

    >>> import numpy as np, gemmkit as gk
    >>> from gemmkit import programs as gp
    >>> @gk.program
    ... def row_sums(x, d):
    ...     for m in gp.parallel(x.rows):
    ...         d[m] = x[m].sum(axis=1)
    >>> row_sums.reference(np.ones((2, 3), np.float32), np.empty(2, np.float32)).tolist()
    [3.0, 3.0]
    """
    if not inspect.isfunction(function):
        raise TypeError(f"gk.program({function!r}): a function is needed")
    taken = next((name for name in inspect.signature(function).parameters if name in OWN), None)
    if taken is not None:
        raise TypeError(f"{function.__name__}({taken}): the call has an argument of this name ({', '.join(OWN)}); call the "
                        "program's own otherwise")
    return Program(function)


# --------------------------------------------------------------------------------------------------
# The words that programs are written in.
#
# | word | what |
# |---|---|
# | ``for m, n in parallel(a.rows, b.columns)`` | tiles, in no order: each is one thread block's |
# | ``for k in sequential(a.columns)`` | rounds, one after the other |
# | ``for n in sequential(k.rows, start=starts[h], stop=lengths[h])`` | the same, between bounds of the tile's own |
# | ``x = paged(k, table)``, ``n in sequential(x[b])``, ``k[n.page, h, n]`` | rows in pages, as of a cache |
# | ``x = packed(q.rows, offsets)``, ``parallel(x.count, x.rows)``, ``sequential(x[i])`` | rows of pieces, as of sequences |
# | ``zeros(m, n)``, ``full(m, value)``, ``copy(x)`` | cells, whose values rounds carry |
# | ``x @ y``, ``.T`` | of matrices |
# | ``x.max(axis=1)``, ``min``, ``sum``, ``mean`` | of a matrix's rows; with ``axis=0`` of its columns |
# | ``exp``, ``log``, ``tanh``, ``erf``, ``sqrt``, ``rsqrt``, ``finite``, ``maximum``, ``minimum``, ``where`` | by element |
# | ``call(f, x)`` | any function of numbers, element by element |
# | ``x == y``, ``!=``, ``<``, ``<=``, ``c & d``, ``c | d``, ``~c`` | conditions, for ``where`` |
# | ``place(m)`` | where the elements of a block are |
# | ``with once(n)`` | what is stored by the first block along ``n`` alone |

def parallel(*extents: ProgramAxis) -> Along:
    """Blocks of one or several axes, which do not know of each other."""
    if not extents:
        raise refused(TypeError, "parallel() needs at least one axis")
    return Along(current().loop(current().extents(extents), "parallel"))


def sequential(extent: ProgramAxis | RowsOfPiece, stop: Any = None, start: Any = None) -> Along:
    """Blocks of an axis, or of a piece of one, one after the other: cells keep what a round has put there.

    ``stop``: a whole number, such as an element ``lengths[h]`` of an array, from which on nothing is there; ``start``: the
    same of the first place that is there (`lengths`).
    """
    if isinstance(extent, RowsOfPiece):
        if stop is not None and extent.axis.offsets is not None:
            raise refused(ValueError, f"sequential(..., stop=...): {extent.axis!r} has a length of its own; leave stop out")
        return Along(current().loop(current().extents((extent.axis,), extent.which), "sequential", start, stop, extent))
    return Along(current().loop(current().extents((extent,)), "sequential", start, stop))


def packed(axis: ProgramAxis, offsets: Parameter) -> PackedRows:
    """Rows that are cut into pieces, as sequences of different lengths are that are packed one behind the other.

    Args:
        axis: the rows of an array, such as ``q.rows``, which is then one of all pieces.
        offsets: an array of int32 or int64, one element more than there are pieces: piece i has rows ``offsets[i]`` to
            ``offsets[i + 1]``. A kernel reads them on the GPU; rows of no piece are left as they are.

    Returns an object of which ``count`` goes along the pieces, one by one, and ``rows`` along the rows of one, for
    `parallel`; ``packed(...)[i]`` are the rows of the i-th, for `sequential`. Places of an index, and what a mask and a
    score are told, count from where the piece begins, and a mask's lengths are the piece's.

    Raises TypeError and ValueError, with the program's line, for what is no axis of rows, and for other arrays.

    >>> import numpy as np, gemmkit as gk
    >>> from gemmkit import programs as gp
    >>> @gk.program
    ... def sums_of_pieces(x, y, offsets, d):
    ...     rows, others = gp.packed(x.rows, offsets), gp.packed(y.rows, offsets)
    ...     for i, m in gp.parallel(rows.count, rows.rows):
    ...         sums = gp.zeros(m, y.columns)
    ...         for n in gp.sequential(others[i]):
    ...             sums += (x[m] @ y[n].T) @ y[n]
    ...         d[m] = sums
    >>> x = np.ones((3, 1))
    >>> sums_of_pieces.reference(x, x, np.array([0, 1, 3]), x).ravel()
    array([1., 2., 2.])
    """
    return packed_rows(axis, offsets)


def paged(array: Parameter, table: Parameter) -> PagedRows:
    """Rows that lie in pages, as a cache of keys has them: row n of sequence b is row ``n % of_page`` of page ``table[b,
    n // of_page]``.

    Args:
        array: (pages, rows of a page, columns), or with other stacks between pages and rows. A page has a multiple
            of 8 rows.
        table: (sequences, pages of each), int32 or int64. A kernel reads it on the GPU; pages behind a length, ``stop=``,
            are not looked up.

    Returns an object of which ``paged(...)[b]`` are the rows of the b-th sequence, for `sequential`. An index n along them
    stands for rows of any array that has the same pages: ``k[n.page, h, n]``, and for places from 0 elsewhere.

    Raises TypeError and ValueError, with the program's line, for other arrays.

    >>> import numpy as np, gemmkit as gk
    >>> from gemmkit import programs as gp
    >>> @gk.program
    ... def sums(x, k, table, lengths, d):
    ...     rows = gp.paged(k, table)
    ...     for b, m in gp.parallel(x.count, x.rows):
    ...         found = gp.zeros(m, k.columns)
    ...         for n in gp.sequential(rows[b], stop=lengths[b]):
    ...             found += (x[b, m] @ k[n.page, n].T) @ k[n.page, n]
    ...         d[b, m] = found
    >>> x, k = np.ones((2, 1, 1)), np.arange(6.0).reshape(3, 2, 1)
    >>> table = np.array([[2, 0], [1, 1]])
    >>> sums.reference(x, k, table, np.array([3, 1]), x).ravel()     # 16 + 25 + 0, 4
    array([41.,  4.])
    """
    return paged_rows(array, table)


def zeros(*dims: Any) -> Cell:
    """A cell of zeros; its dimensions are blocks, ``zeros(m, n)``, or whole axes, ``zeros(m, v.columns)``."""
    return Cell(current().full(dims, 0.0))


def full(*dims_and_value: Any) -> Cell:
    """A cell of one value, which stands last: ``full(m, -math.inf)``."""
    return Cell(current().full(dims_and_value[:-1], dims_and_value[-1] if dims_and_value else None))


def copy(x: Any) -> Cell:
    """A cell that begins with a value."""
    return Cell(current().lift(x))


def exp(x: Any) -> Any:
    return term("exp", x)


def log(x: Any) -> Any:
    return term("log", x)


def tanh(x: Any) -> Any:
    return term("tanh", x)


def cumsum(x: Any, parts: int = 1, after: bool = False) -> Any:
    """Sums along the rows of a round's block: for each row, of its value and of those of the rows before it in the block.

    Args:
        x: a value of each row, ``g[h, t]`` of an array (heads, rows), or of each row and column, ``g[h, t]`` of an array
            (heads, rows, keys), with t in ``gp.sequential(...)``.
        parts: sums begin anew in each of so many equal parts of the block: 1, 2 or 4.
        after: sums are of the rows behind a row in its part instead, without its own.

    Raises ValueError for other values, and for other numbers of parts.

    >>> import numpy as np, gemmkit as gk
    >>> from gemmkit import programs as gp
    >>> @gk.program
    ... def sums(g, v, d):
    ...     for h in gp.parallel(v.count):
    ...         for t in gp.sequential(v.rows):
    ...             d[h, t] = gp.cumsum(g[h, t]) * v[h, t]
    >>> g, v = np.array([[1.0, 2.0, 4.0]], np.float32), np.ones((1, 3, 1), np.float32)
    >>> sums.reference(g, v, np.empty_like(v)).ravel().tolist()
    [1.0, 3.0, 7.0]
    """
    value = current().lift(x)
    if not is_of_rounds(value.dims[:1]) or len(value.dims) > 2:
        raise refused(ValueError, f"cumsum of a value of ({shown(value.dims)}); a value of each row of a round's block is "
                                  "needed, such as g[h, t] with t in gp.sequential(...)")
    return Term(current().compute("cumsum", (value,), value.dims, (_parts("cumsum", parts), bool(after))))


def block_diagonal(x: Any, parts: int) -> Any:
    """The elements of ``x`` whose row and column are in the same one of ``parts`` equal parts of a round's block, 1, 2 or 4;
    0 in place of others. Rows and columns of ``x`` are the same block of a round: ``q[h, t] @ k[h, t].T``.

    Raises ValueError for other values, and for other numbers of parts."""
    value = _of_block_twice("block_diagonal", x)
    return Term(current().compute("diagonal", (value,), value.dims, _parts("block_diagonal", parts)))


def _parts(word: str, parts: Any) -> int:
    if isinstance(parts, bool) or parts not in (1, 2, 4):
        raise refused(ValueError, f"{word}(parts={parts!r}): a block has 1, 2 or 4 equal parts")
    return int(parts)


def _of_block_twice(word: str, x: object) -> Any:
    value = current().lift(x)
    if len(value.dims) != 2 or not is_of_rounds(value.dims[:1]) or getattr(value.dims[1], "twin", None) is not value.dims[0]:
        raise refused(ValueError, f"{word} of a value of ({shown(value.dims)}); rows and columns must be the "
                                  "same block of a round, such as k[h, t] @ k[h, t].T")
    return value


def unit_lower_inverse(x: Any) -> Any:
    """The inverse of I + L, of which L are the elements of ``x`` below the diagonal; others do not count. Rows and columns
    of ``x`` are the same block of a round: ``beta[h, t] * (k[h, t] @ k[h, t].T)``. Kernels compute it in float32 by forward
    substitution. Raises ValueError for other values.

    Source: Joffrain, Low, Quintana-Orti, van de Geijn, Van Zee, "Accumulating Householder transformations, revisited",
    2006 (the UT transform)."""
    value = _of_block_twice("unit_lower_inverse", x)
    return Term(current().compute("inverse", (value,), value.dims))


def sqrt(x: Any) -> Any:
    return term("sqrt", x)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return term("div", 1.0, sqrt(x))


def erf(x: Any) -> Any:
    """The error function."""
    return term("erf", x)


def call(f: Any, *x: Any, dtype: Any = None) -> Any:
    """A function of numbers, applied to each element: device code, which no pass reads.

    Args:
        f: a plain function, such as those of `gemmkit.epilogues.activations` and `math`, or a component that is called with
            numbers: a score of attention, an element-wise epilogue, one of your own. It may use arrays and NumPy scalars
            that it has captured. It is told nothing but ``x``, so that its result must follow from these alone.
        x: values, which it gets in float32; numbers; and indices, which stand for the places of elements, whole numbers from
            0. Elements of arrays of whole numbers, and what is made of places alone, are whole, too.
        dtype: None for a number, float32; ``bool`` for a condition.

    Returns:
        A value whose dimensions are those of all arguments.

    Raises:
        TypeError: with the program's line, for what is no function of as many numbers, for an epilogue that does more than
            make a number of a number, and for another dtype.

    >>> import numpy as np, gemmkit as gk
    >>> from gemmkit import programs as gp
    >>> @gk.program
    ... def gelu_of_product(a, b, d):
    ...     for m, n in gp.parallel(a.rows, b.columns):
    ...         acc = gp.zeros(m, n)
    ...         for k in gp.sequential(a.columns):
    ...             acc += a[m, k] @ b[k, n]
    ...         d[m, n] = gp.call(gk.epilogues.activations.gelu, acc)
    >>> a = np.eye(2, dtype=np.float16)
    >>> gelu_of_product.reference(a, a, a).round(4).tolist()
    [[0.8413, 0.0], [0.0, 0.8413]]
    """
    if dtype is not None and not (isinstance(dtype, (str, type))
                                  and dtype in (bool, np.bool_, float, np.float32, "float32", "bool")):
        raise refused(TypeError, f"call(dtype={dtype!r}): a function makes a number, dtype=None, or a condition, dtype=bool")
    return Term(current().call(f, x, dtype in (bool, np.bool_, "bool")))


def finite(x: Any) -> Any:
    """0 in place of -inf."""
    return term("finite", x)


def maximum(x: Any, y: Any) -> Any:
    return term("max", x, y)


def minimum(x: Any, y: Any) -> Any:
    return term("neg", term("max", term("neg", x), term("neg", y)))


def place(index: Index) -> Any:
    """Where each element of a block is along its axis, from 0: ``place(m) - place(n)`` is the distance from the diagonal.
    Of an index along a stack it is the matrix's number."""
    if isinstance(index, Place):
        return index                                   # a condition's function is given places
    if not isinstance(index, Index):
        raise refused(TypeError, f"place({index!r}): a variable of parallel(...) or sequential(...) is needed")
    if index.is_page:
        raise refused(TypeError, f"place({index!r}): a page is where rows are read, and no number; place({index.base!r}) "
                                 "counts the sequence's rows")
    return current().place(index)


def where(condition: Any, x: Any, other: Any) -> Any:
    """Element by element ``x`` or ``other``; ``condition`` is a value, or a function of an element's places."""
    return Term(current().where(condition, x, other))


class once:
    """What is stored within it is stored by the first block along an index alone: the others have the same."""

    def __init__(self, index: Index):
        if not isinstance(index, Index):
            raise refused(TypeError, f"once({index!r}): a variable of parallel(...) is needed")
        self.index = index

    def __enter__(self) -> None:
        current().only = self.index

    def __exit__(self, *error: object) -> None:
        current().only = None
