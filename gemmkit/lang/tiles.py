"""Tiles in device code: operations that leave nothing behind."""

from __future__ import annotations

import math
import operator
from typing import Any

from gemmkit.lang.numba_hooks import (
    AttributeTemplate,
    TypingError,
    cgutils,
    ir,
    lowering_registry,
    operation,
    signature,
    types,
    typing_registry,
)
from gemmkit.lang.scalars import IndexType, index
from gemmkit.lang.tile_rules import (
    check_distances,
    check_linearisation,
    dimensions_of,
    division,
    named_dimensions,
)
from gemmkit.lang.tile_types import CoordType, SizeType, TilesType, TileType

i32 = ir.IntType(32)


def proxy(context: Any, builder: Any, ty: types.Type, value: Any = None) -> Any:
    return cgutils.create_struct_proxy(ty)(context, builder, value=value)


# -- attributes -------------------------------------------------------------------------------------------------------

_POSITIONS = ("base", "offset", "index")


@typing_registry.register_attr
class _TileAttributes(AttributeTemplate):
    key = TileType

    def generic_resolve(self, ty: TileType, attr: str) -> Any:
        if attr in _POSITIONS:
            return CoordType(ty.names)
        if attr == "size":
            return SizeType(ty.names, ty.extents)
        if attr == "count":
            from gemmkit.lang.values import static_type

            return static_type(math.prod(ty.extents))
        if attr.startswith("__"):
            return None
        try:
            return _projected(ty, dimensions_of(attr, ty.names))
        except KeyError as error:
            raise TypingError(error.args[0]) from None


def _projected(ty: TileType, dims: list[int]) -> TileType:
    return TileType(tuple(ty.names[d] for d in dims), tuple(ty.extents[d] for d in dims))


@lowering_registry.lower_getattr_generic(TileType)
def _tile_getattr(context: Any, builder: Any, ty: TileType, value: Any, attr: str) -> Any:
    tile = proxy(context, builder, ty, value)
    if attr == "size":
        return context.get_dummy_value()
    if attr == "count":
        return i32(math.prod(ty.extents))
    if attr in _POSITIONS:
        coord = proxy(context, builder, CoordType(ty.names))
        for n in range(len(ty.names)):
            b, o = getattr(tile, f"b{n}"), getattr(tile, f"o{n}")
            setattr(coord, f"d{n}", b if attr == "base" else o if attr == "offset"
                    else builder.add(b, o, flags=("nsw",)))
        return coord._getvalue()
    return _project(context, builder, ty, value, dimensions_of(attr, ty.names))


def _project(context: Any, builder: Any, ty: TileType, value: Any, dims: list[int]) -> Any:
    tile, out = proxy(context, builder, ty, value), proxy(context, builder, _projected(ty, dims))
    for n, d in enumerate(dims):
        setattr(out, f"b{n}", getattr(tile, f"b{d}"))
        setattr(out, f"o{n}", getattr(tile, f"o{d}"))
    return out._getvalue()


def type_project(context: Any, tile: Any, *names: Any) -> Any:
    if not isinstance(tile, TileType) or not all(isinstance(n, types.StringLiteral) for n in names):
        return None
    try:
        dims = named_dimensions(tile, tuple(n.literal_value for n in names))
    except ValueError as error:
        raise TypingError(str(error)) from None
    return (signature(_projected(tile, dims), tile, *names),
            lambda c, b, s, v: _project(c, b, tile, v[0], dims))


@typing_registry.register_attr
class _CoordAttributes(AttributeTemplate):
    key = CoordType

    def generic_resolve(self, ty: CoordType, attr: str) -> Any:
        return index if attr in ty.names else None


@lowering_registry.lower_getattr_generic(CoordType)
def _coord_getattr(context: Any, builder: Any, ty: CoordType, value: Any, attr: str) -> Any:
    return builder.extract_value(value, ty.names.index(attr))


@typing_registry.register_attr
class _SizeAttributes(AttributeTemplate):
    key = SizeType

    def generic_resolve(self, ty: SizeType, attr: str) -> Any:
        from gemmkit.lang.values import static_type

        return static_type(ty.extents[ty.names.index(attr)]) if attr in ty.names else None


@lowering_registry.lower_getattr_generic(SizeType)
def _size_getattr(context: Any, builder: Any, ty: SizeType, value: Any, attr: str) -> Any:
    return i32(ty.extents[ty.names.index(attr)])


@operation(operator.getitem)
def _position_getitem(context: Any, *args: Any) -> Any:
    if len(args) != 2 or not isinstance(args[0], (CoordType, SizeType)) or not isinstance(args[1], types.IntegerLiteral):
        return None
    ty, n, count = args[0], int(args[1].literal_value), len(args[0].names)
    if not -count <= n < count:
        raise TypingError(f"position {n} of the {count} dimensions {', '.join(ty.names)}")
    n %= count
    if isinstance(ty, CoordType):
        return signature(index, *args), lambda c, b, s, v: b.extract_value(v[0], n)
    from gemmkit.lang.values import static_type

    return signature(static_type(ty.extents[n]), *args), lambda c, b, s, v: i32(ty.extents[n])


# -- parallelise ------------------------------------------------------------------------------------------------------

def _literal_int(ty: Any) -> int | None:
    return int(ty.literal_value) if isinstance(ty, types.IntegerLiteral) else None


def _tiles_type(tile: Any, tiling: Any, count: Any, order: Any) -> TilesType | None:
    if not (isinstance(tile, TileType) and isinstance(tiling, TileType)):
        return None
    n = _literal_int(count)
    if n is None:
        raise TypingError("parallelise: count must be a compile-time number in device code")
    try:
        return TilesType(tile, division(tile, tiling, n, _order(order)), _order(order))
    except ValueError as error:
        raise TypingError(str(error)) from None


def _order(ty: Any) -> str:
    """The order that an optional argument names: a compile-time string."""
    if ty is None:
        return "column"
    if not isinstance(ty, types.StringLiteral):
        raise TypingError(f'order must be the constant "column" or "row" in device code, not a {ty}')
    return ty.literal_value


def type_parallelise(context: Any, tile: Any, tiling: Any, worker: Any, count: Any, *order: Any) -> Any:
    ty = _tiles_type(tile, tiling, count, order[0] if order else None)
    if ty is None:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        out = proxy(c, b, ty)
        out.tile, out.worker = v[0], c.cast(b, v[2], worker, index)
        return out._getvalue()

    return signature(ty, tile, tiling, worker, count, *order), codegen


def type_subdivide(context: Any, tile: Any, tiling: Any, worker: Any, count: Any, *order: Any) -> Any:
    ty = _tiles_type(tile, tiling, count, order[0] if order else None)
    if ty is None:
        return None
    return (signature(ty.sub, tile, tiling, worker, count, *order),
            lambda c, b, s, v: _sub_tile(c, b, ty, v[0], c.cast(b, v[2], worker, index), i32(0)))


def _sub_tile(context: Any, builder: Any, ty: TilesType, parent_value: Any, worker: Any, step: Any) -> Any:
    """Sub-tile ``step`` of a worker: base from the worker, offset from the step (see Division.split)."""
    division = ty.division
    parent, out = proxy(context, builder, ty.tile, parent_value), proxy(context, builder, ty.sub)
    ahead = builder.mul(step, i32(division.count))
    in_base, in_offset = (worker, ahead) if division.split else (builder.add(worker, ahead), None)
    base_digits = _digits(builder, in_base, division, division.count if division.split else division.total)
    offset_digits = {} if in_offset is None else _digits(builder, in_offset, division, division.total)
    for axis, size in enumerate(division.tiling):
        for part, digits in (("b", base_digits), ("o", offset_digits)):
            at = getattr(parent, f"{part}{axis}")
            if axis in digits:
                at = builder.add(at, builder.mul(digits[axis], i32(size), flags=("nsw",)), flags=("nsw",))
            setattr(out, f"{part}{axis}", at)
    return out._getvalue()


def _digits(builder: Any, value: Any, division: Any, bound: int) -> dict[int, Any]:
    """The grid coordinates of sub-tile ``value``, by axis. It is below ``bound``: what follows from that is not computed."""
    digits = {}
    for axis in division.axes:
        extent = division.grid[axis]
        if bound <= extent:
            digits[axis] = value
            break
        if extent > 1:
            digits[axis] = builder.urem(value, i32(extent))
            value, bound = builder.udiv(value, i32(extent)), -(-bound // extent)
    return digits


@operation(len)
def _len(context: Any, *args: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], (CoordType, SizeType)):
        from gemmkit.lang.values import static_type

        count = len(args[0].names)
        return signature(static_type(count), args[0]), lambda c, b, s, v: i32(count)
    if len(args) != 1 or not isinstance(args[0], TilesType):
        return None
    ty, division = args[0], args[0].division
    if division.even:
        from gemmkit.lang.values import static_type

        steps = division.total // division.count
        return signature(static_type(steps), ty), lambda c, b, s, v: i32(steps)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        tiles = proxy(c, b, ty, v[0])
        left = b.sub(i32(division.total + division.count - 1), tiles.worker)
        none = b.icmp_signed("<", left, i32(division.count))
        return b.select(none, i32(0), b.udiv(left, i32(division.count)))

    return signature(index, ty), codegen


@operation(operator.getitem)
def _tiles_getitem(context: Any, *args: Any) -> Any:
    if len(args) != 2 or not isinstance(args[0], TilesType) or not isinstance(args[1], types.Integer):
        return None
    ty = args[0]

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        tiles = proxy(c, b, ty, v[0])
        return _sub_tile(c, b, ty, tiles.tile, tiles.worker, c.cast(b, v[1], args[1], index))

    return signature(ty.sub, *args), codegen


# -- translate, linearise ---------------------------------------------------------------------------------------------

def type_translate(part: str) -> Any:
    def typer(context: Any, tile: Any, *distances: Any, **by: Any) -> Any:
        if not isinstance(tile, TileType):
            return None
        try:
            check_distances(tile, distances, by)
        except ValueError as error:
            raise TypingError(str(error)) from None
        by = dict(zip(tile.names, distances)) if distances else by
        if not all(isinstance(t, types.Integer) for t in by.values()):
            return None

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            out = proxy(c, b, tile, v[0])
            # the names come with the signature: Numba finds this code by the argument types alone
            names = tile.names if s.pysig is None else tuple(s.pysig.parameters)[1:]
            for name, ty, distance in zip(names, s.args[1:], v[1:]):
                field = f"{part[0]}{tile.names.index(name)}"
                moved = b.add(getattr(out, field), c.cast(b, distance, ty, index), flags=("nsw",))
                setattr(out, field, moved)
            return out._getvalue()

        return signature(tile, tile, *by.values()), codegen

    return typer


def type_linearise(context: Any, coord: Any, shape: Any, *order: Any) -> Any:
    from gemmkit.lang.memory import coordinate_count, coordinates_of
    dims = coordinate_count(coord)
    extents = len(shape.extents) if isinstance(shape, SizeType) else coordinate_count(shape)
    if dims == 0 or extents == 0:
        return None
    how = _order(*order) if order else "column"
    try:
        check_linearisation(dims, extents, how)
    except ValueError as error:
        raise TypingError(str(error)) from None
    row = how == "row"

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        values = coordinates_of(c, b, coord, v[0])
        sizes = [i32(e) for e in shape.extents] if isinstance(shape, SizeType) else coordinates_of(c, b, shape, v[1])
        if row:
            values, sizes = values[::-1], sizes[::-1]
        linear = values[-1]
        for value, extent in zip(reversed(values[:-1]), reversed(sizes[:-1])):
            linear = b.add(b.mul(linear, extent, flags=("nsw",)), value, flags=("nsw",))
        return linear

    return signature(index, coord, shape, *order), codegen


__all__ = ["CoordType", "IndexType", "SizeType", "TileType", "TilesType"]
