"""Launches of functions of rows: arguments checked, threads dealt to rows, kernels kept by kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from gemmkit import kept
from gemmkit.component_arrays import arrays_of, check_held
from gemmkit.components import freeze
from gemmkit.emulator.mode import current_mode
from gemmkit.kernels.rows.kernel import rows
from gemmkit.kernels.rows.row import Held, RowsSpec, Source, Streamed
from gemmkit.kernels.rows.team import BlockTeam, Team, WarpTeam
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.freezing import Frozen, freeze_array, freeze_scalar
from gemmkit.launch import Current, KnownCall, Launch, Put, Start, cache, launch_of
from gemmkit.problem import check_out, check_places
from gemmkit.row_functions import RowFunction
from gemmkit.runtime.array_info import are_the_same
from gemmkit.runtime.arrays import (
    ArrayInfo,
    as_stream_handle,
    describe,
    empty_like,
    shares_memory,
)
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.recognition import KEYS, key_if_given, key_of
from gemmkit.runtime.streams import launch_stream
from gemmkit.tuning.problems import Choice, MappingProblem, choose

FLOATS = "float16", "bfloat16", "float32", "float64"
WORDS = 16                             # bytes that a thread loads at a time
WARP, MOST_WARPS = 32, 32
MOST_AT_ONCE = 48                      # of all rows: elements, and two values of each row (16 x 4 spilled 124 bytes)
MOST_PIECES = 4                        # of these that a thread holds: with more, blocks of 1,024 threads spill
ROWS_PER_BLOCK = 4                     # where a warp has a row
RESIDENT = 1024                        # threads of a multiprocessor: while some fold their rows, others wait for theirs


def run_rows(x: Any, function: RowFunction, out: Any, stream: Any) -> Any:
    """`gemmkit.rows.rowwise`."""
    key, at_out, brought = _quickly(x, function, out)
    known: KnownCall | None = _calls.get(key)
    if known is not None:
        result = known.again(x, at_out, brought, out, stream)
        if result is not None:
            return result
    info = describe(x, "x")
    _check_dtype(info, "x")
    if not info.shape:
        raise ValueError("x has no axis; it needs one at least, along which its rows lie")
    check_places({"x": info})
    if out is None:
        out = empty_like(x, info.shape, info.dtype)
    given = describe(out, "out")
    held = [("function", one) for one in arrays_of(function)]
    check_places({"x": info, "out": given, **{one.name: one.info for _, one in held}})
    _check_out(info, given)
    of_x, of_out = matrix(info, "x"), matrix(given, "out")
    check_held(held, {"x": info, "out": given})
    function.check(*of_x.shape)
    handle = None if stream is None else as_stream_handle(stream)
    count, columns = of_x.shape
    if count == 0 or (columns == 0 and not function.outputs):
        return out
    mode = current_mode()
    if mode is not None:
        mode.run(RowsLaunch(of_x, of_out, function), (x, out))
        return out
    start = _launch(launch_stream(info, handle), of_x, of_out, function)
    if key is not None:
        known = _calls.get(key) or _calls.keep(key, KnownCall(start, info))
        known.allow(at_out, *brought)
    return out


# -- what is given --------------------------------------------------------------------------------------------------------

def _check_dtype(info: ArrayInfo, name: str) -> None:
    if info.dtype.name not in FLOATS:
        raise TypeError(f"{name} is of {info.dtype.name}; {', '.join(FLOATS[:-1])} or {FLOATS[-1]} is needed")


def _check_out(x: ArrayInfo, out: ArrayInfo) -> None:
    _check_dtype(out, "out")
    if out.shape != x.shape:
        raise ValueError(f"out has shape {out.shape}; x has {x.shape}, and the result has one element for each of its")
    check_out(out, {})
    if shares_memory(x, out) and not are_the_same(x, out):
        raise ValueError("out overlaps x in memory; it may be x itself (the same address, shape, strides and dtype), but no "
                         "other part of it")


def matrix(info: ArrayInfo, name: str) -> ArrayInfo:
    """An array (..., N) as a matrix of rows, which lie at one distance from each other.

    Raises ValueError where they do not.

    >>> x = np.zeros((4, 3, 8), np.float32)
    >>> matrix(describe(x[:, :, :6]), "x").shape, matrix(describe(x[0, 0]), "x").shape
    ((12, 6), (1, 8))
    """
    *leading, columns = info.shape
    extents = [(n, stride) for n, stride in zip(leading, info.strides) if n != 1]
    count = math.prod(leading)
    if count and any(outer != n * inner for (_, outer), (n, inner) in pairwise(extents)):
        raise ValueError(f"{name} has shape {info.shape} and strides {info.strides} (in elements): its rows do not lie at "
                         "one distance from each other; pass a contiguous copy, or one slice at a time")
    if count >= 2**31 or columns >= 2**31:
        raise ValueError(f"{name} has {count} rows of {columns} elements; less than 2**31 of each is needed")
    step = extents[-1][1] if extents else columns * info.strides[-1]
    return info._replace(shape=(count, columns), strides=(step, info.strides[-1]))


# -- which threads --------------------------------------------------------------------------------------------------------

class RowsProblem(MappingProblem):
    """Rows of so many ``columns`` of ``itemsize`` bytes, computed in ``dtype``: the threads of a row, how they get at it,
    and how many elements they load at a time. Mappings are how many warps have a row, and whether they hold it: as few
    warps as can, else rows are streamed. Of rows ``held_at_once``, a thread has fewer pieces of each.

    >>> from gemmkit.runtime.device import H100
    >>> team, source, vector = choose(RowsProblem(768, 2, np.dtype(np.float32)), H100).spec
    >>> team.warps, source.pieces, source.whole, vector
    (1, 3, 3, 8)
    """

    def __init__(self, columns: int, itemsize: int, dtype: np.dtype, held_at_once: int = 1):
        self.dtype, self.vector = dtype, math.gcd(columns, WORDS // itemsize) or 1
        while self.vector > 1 and (self.vector + 2) * held_at_once > MOST_AT_ONCE:
            self.vector //= 2
        self.pieces = -(-columns // self.vector)
        self.most = min(MOST_PIECES, MOST_PIECES * WORDS // 2 // (self.vector * held_at_once))      # of a thread

    def candidates(self, device: DeviceInfo) -> Iterator[tuple[int, bool]]:
        for is_held in (True, False):
            for warps in (1, 2, 4, 8, 16, 32)[:MOST_WARPS.bit_length()]:
                yield warps, is_held

    def specialise(self, mapping: tuple[int, bool], device: DeviceInfo) -> Choice:
        warps, is_held = mapping
        threads = warps * WARP
        held = -(-self.pieces // threads)
        if is_held and not 0 < held <= self.most:
            raise ConfigError(f"{warps} warps hold {self.most * threads} pieces of a row, and not {self.pieces}")
        if held > max(1, self.most) and warps < MOST_WARPS:
            raise ConfigError(f"{self.pieces} pieces of a row are streamed by more than {warps} warps")
        team: Team = WarpTeam(1, self.dtype, ROWS_PER_BLOCK) if warps == 1 else BlockTeam(warps, self.dtype)
        source: Source = Held(held, self.pieces // threads) if is_held else Streamed()
        return Choice((team, source, self.vector))


class RowsLaunch:
    """A kernel for matrices of one kind, and its arguments."""

    def __init__(self, x: ArrayInfo, out: ArrayInfo, function: RowFunction):
        working = x.dtype if x.dtype.itemsize >= 4 else np.dtype(np.float32)
        count, columns = x.shape
        device = target(x.device)
        wider = max(x.dtype.itemsize, out.dtype.itemsize)
        team, source, vector = choose(RowsProblem(columns, wider, working), device).spec
        self.spec = RowsSpec(team, source, vector, working, function, out.dtype, device.starts_early)
        self.shape = count, columns
        self.in_place = are_the_same(x, out)           # what is written cannot be read as what never changes
        self.x, self.out = _frozen(x, readonly=not self.in_place), _frozen(out, readonly=False)
        self.arguments = [freeze(self.spec), self.x, self.out, freeze_scalar(count), freeze_scalar(columns)]
        self.launchable = Launchable(rows, self.arguments, team.block, -(-count // team.rows), device, x.device,
                                     team.shared_bytes, blocks_per_sm=max(1, RESIDENT // team.block),
                                     dependent=self.spec.starts_early)

    # -- without a GPU (`gemmkit.emulator.mode`) -----------------------------------------------------------------------

    def filled(self, arrays: tuple[Any, Any]) -> list[Any]:
        return [arrays[1]]

    def emulated(self, arrays: tuple[Any, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = {}
        for name, array, frozen in (("out", arrays[1], self.out), ("x", arrays[0], self.x)):
            how = dict(readonly=True) if name == "x" and not self.in_place else dict(written=self.in_place)
            kind = frozen.kind
            views[name] = arena.view_of(frozen.arrays[0], array, name, kind.unit, kind.alignment, **how)
        yield self.launchable, (arena.component(self.spec), views["x"], views["out"], *self.shape)


def _frozen(info: ArrayInfo, readonly: bool) -> Frozen:
    return freeze_array(info, 1 if info.strides[1] == 1 or info.shape[1] == 1 else None, readonly=readonly)


# -- on a GPU -------------------------------------------------------------------------------------------------------------

_calls = cache()


def _launch(stream: int, x: ArrayInfo, out: ArrayInfo, function: RowFunction) -> Start:
    held = kept.given_by(function)

    def made(current: Current) -> Launch:
        kernel = RowsLaunch(x, out, current(function)).launchable
        at_x, at_out = kernel.slot(1), kernel.slot(2)
        assert at_x is not None and at_out is not None
        puts = [Put(at_out, 0), Put(at_x, 1), *(Put(slot, n, encoder=kept.number) for n, slot in enumerate(held.slots, 2))]
        return Launch(kernel, puts)

    key = rows, x[1:6], out[1:6], x.pointer % WORDS, out.pointer % WORDS, are_the_same(x, out), held.key
    start = launch_of(key, made, type(function).__qualname__).start
    start(stream, (out.pointer, x.pointer, *held.brought))
    return start


def _quickly(x: Any, function: RowFunction, out: Any) -> tuple[Any, int, tuple[Any, ...]]:
    """What a call is known by, the address of out (0: a new one), and what else the call brings: x's, and what the function
    holds. None for a call whose arguments have to be described."""
    if function.outputs or current_mode() is not None:
        return None, 0, ()
    at, of_x = KEYS.get(type(x), key_of)(x, "x")
    at_out, of_out = key_if_given(out, "out")
    key: list[Any] = []
    held: list[Any] = []
    kept.seen(function, key, held)
    return (of_x, at & 15, of_out, at_out & 15, at == at_out, *key), at_out, (at, *held)
