"""The Numba types of tiles: their sizes are compile-time."""

from __future__ import annotations

import math
from typing import Any

from gemmkit.lang.numba_hooks import ir, lowering_registry, models, register_model, typeof_impl, types
from gemmkit.lang.scalars import index
from gemmkit.lang.static_branches import Of, Unknown

__all__ = ["CoordType", "SizeType", "TileType", "TilesType", "register_tile"]


class CoordType(types.Type):
    """Named coordinates; ``sizes`` when they are compile-time numbers (a tile's size)."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self.coordinate_types = [index] * len(names)
        super().__init__(f"Coord({','.join(names)})")


class SizeType(types.Type):
    """A tile's extents: compile-time numbers."""

    def __init__(self, names: tuple[str, ...], extents: tuple[int, ...]):
        self.names, self.extents = names, extents
        super().__init__("Size(" + ",".join(f"{n}={s}" for n, s in zip(names, extents)) + ")")

    def known_attribute(self, name: str) -> int:
        """What is known before types are inferred (:mod:`gemmkit.lang.static_branches`)."""
        if name not in self.names:
            raise Unknown
        return self.extents[self.names.index(name)]

    def known_item(self, n: Any) -> int:
        return self.extents[n]


class TileType(types.Type):
    def __init__(self, names: tuple[str, ...], extents: tuple[int, ...]):
        self.names, self.extents = names, extents
        super().__init__("Tile(" + ",".join(f"{n}={s}" for n, s in zip(names, extents)) + ")")

    def known_attribute(self, name: str) -> Any:
        """What is known before types are inferred (:mod:`gemmkit.lang.static_branches`)."""
        if name == "size":
            return Of(SizeType(self.names, self.extents))
        if name == "count":
            return math.prod(self.extents)
        raise Unknown


class TilesType(types.Type):
    """The sub-tiles of one worker."""

    def __init__(self, tile: TileType, division: Any, order: str):
        self.tile, self.division = tile, division
        self.sub = TileType(tile.names, division.tiling)
        super().__init__(f"Tiles({tile}/{self.sub}/{division.count}/{order})")


@register_model(CoordType)
class _CoordModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: CoordType):
        super().__init__(dmm, fe_type, [(f"d{n}", index) for n in range(len(fe_type.names))])


@register_model(TileType)
class _TileModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: TileType):
        dims = range(len(fe_type.names))
        super().__init__(dmm, fe_type, [(f"b{n}", index) for n in dims] + [(f"o{n}", index) for n in dims])


@register_model(TilesType)
class _TilesModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: TilesType):
        super().__init__(dmm, fe_type, [("tile", fe_type.tile), ("worker", index)])


register_model(SizeType)(models.OpaqueModel)


def register_tile(tile_class: type) -> None:
    """Called by :mod:`gemmkit.tiling` once its class exists."""
    @typeof_impl.register(tile_class)
    def _typeof(value: Any, c: Any) -> Any:
        return value.__device_type__()


@lowering_registry.lower_constant(TileType)
def _tile_constant(context: Any, builder: Any, ty: TileType, value: Any) -> Any:
    return ir.Constant(context.get_value_type(ty), [0] * (2 * len(ty.names)))
