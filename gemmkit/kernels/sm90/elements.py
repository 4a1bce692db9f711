"""Functions of elements in step 3 of `warp_specialised`: C, transforms of C and D, and the epilogue, on pairs of sums."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.elements import finished as finished_tile
from gemmkit.kernels.common.elements import transform_tile, transform_within
from gemmkit.kernels.common.tile_copy import read_inside, read_tile
from gemmkit.kernels.common.work import Outputs, Place
from gemmkit.lang.control import join, split
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import convertible
from gemmkit.lang.values import convert_all
from gemmkit.tiling import translate


def finish_pair(pair: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> tuple:
    """Pairs out of range are computed as if they were the nearest in range: the result is not stored, and a function
    that indexes an array stays within it. The nearest is of the same fragment, which has not been stored yet."""
    row, column = row + n % 2 * 8, column + n // 2 * 8
    if spec.d.whole:
        row, column = min(row, outputs.shape.M - 1), min(column, outputs.shape.N - 2)
        return finished(pair, spec, outputs, translate(spec.store.pair, row, column))
    # N is odd, and a pair may straddle its end.
    return join(apply(finish_single, split(pair, 1), spec, outputs, row, column))


def finish_single(one: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> tuple:
    row, column = min(row, outputs.shape.M - 1), min(column + n, outputs.shape.N - 1)
    return finished(one, spec, outputs, translate(spec.store.single, row, column))


def finished(values: tuple, spec: Any, outputs: Outputs, place: Any) -> tuple:
    """Some sums as values of D; ``place`` is where they lie globally, in range."""
    if spec.has_c:
        values = add_c(values, spec, outputs, place)
    values = changed_sums(spec.d.to_registers, values, spec, place)
    values = changed_sums(spec.d.to_shared, values, spec, place)
    return finished_tile(spec.epilogue, values, spec.d.layout, place, outputs.shape)


def changed_sums(transform: Any, values: tuple, spec: Any, place: Any) -> tuple:
    """A transform of D: its values stay numbers of as many parts as the sums have, or fewer."""
    if transform.is_identity:
        return values
    return convertible(transform, "__call__", transform_tile(transform, values, place), spec.operator.fragment_c.dtype)


def add_c(values: tuple, spec: Any, outputs: Outputs, place: Any) -> tuple:
    added = transform_tile(spec.c.to_registers, read_inside(spec.c, outputs.c, place, outputs.shape), place)
    return apply(add_value, values, convert_all(spec.operator.fragment_c.dtype, added))


def add_value(x: Any, n: int, others: tuple) -> Any:
    return x + others[n]


def add_c_masked(values: tuple, spec: Any, outputs: Outputs, place: Any) -> tuple:
    shape = outputs.shape
    added = read_tile(spec.c, outputs.c, place, Place(place.index[0], place.index[1], shape.M, shape.N), 0, shape)
    added = transform_within(spec.c.to_registers, added, place, shape.M, shape.N)
    return apply(add_value, values, convert_all(spec.operator.fragment_c.dtype, added))
