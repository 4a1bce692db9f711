"""Thread tensors: blocks and threads as shapes over their numbers, tiled and reshaped like data (Graphene, section 4).

>>> groups = WARP.tile(8).reshape(2, 2)                   # Fig. 5: four groups of eight threads, two by two
>>> print(groups)
[2,2].[8].thread
>>> print(WARP.tile(shape((4, 2), (1, 16))))              # Fig. 6: quad-pairs
[4].[8].thread

``groups.indices()`` is where a thread's group is among the groups, ``groups.local()`` its number in the group, and
``groups.size`` how many threads execute a spec together.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gemmkit.lang.statics import Static
from gemmkit.ptx.special import block_x, thread_index
from gemmkit.shapes import Shape, shape


class Threads(Static):
    """Threads of a block: ``levels`` of shapes, the outermost first; the innermost are those that act together."""

    device_methods: ClassVar[tuple[str, ...]] = ("indices", "local")
    kind = "thread"

    def __init__(self, levels: tuple[Shape, ...]):
        self.levels = levels

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Threads) and self.levels == other.levels

    def __hash__(self) -> int:
        return hash((self.kind, self.levels))

    def __repr__(self) -> str:
        return ".".join(map(repr, self.levels)) + "." + self.kind

    def __str__(self) -> str:
        return ".".join(f"[{','.join(map(str, level.extents))}]" for level in self.levels) + "." + self.kind

    @property
    def outer(self) -> Shape:
        return self.levels[0]

    @property
    def inner(self) -> Shape:
        return self.levels[-1]

    @property
    def size(self) -> int:
        """How many act together."""
        return self.inner.size

    def tile(self, *tilers: Any) -> Threads:
        """Groups of the outermost level (`gemmkit.shapes.Shape.tile`). Raises ShapeError."""
        outer, inner = self.outer.tile(*tilers)
        return type(self)((outer, inner, *self.levels[1:]))

    def reshape(self, *extents: int) -> Threads:
        """The outermost level in other dimensions, the last fastest. Raises ShapeError."""
        return type(self)((self.outer.reshape(*extents), *self.levels[1:]))

    def scalar(self) -> Threads:
        """One of them: ``[].thread``, which executes a spec by itself."""
        return type(self)((Shape.of_modes(()),))

    def indices(self) -> tuple:
        """This thread's coordinates in the outermost level (device code)."""
        return self.outer.places(thread_index())

    def local(self) -> int:
        """This thread's number in its innermost group (device code)."""
        return self.inner.places(thread_index())[0]


class Blocks(Threads):
    """Blocks of a grid, as `Threads` are of a block."""

    kind = "block"

    def indices(self) -> tuple:
        """This block's coordinates in the outermost level (device code)."""
        return self.outer.places(block_x())

    def local(self) -> int:
        """This block's number in its innermost group (device code)."""
        return self.inner.places(block_x())[0]


def threads(*dims: int) -> Threads:
    """A block's threads in dimensions, the last fastest: ``threads(16, 16)``."""
    return Threads((Shape(dims),))


def blocks(*dims: int) -> Blocks:
    """A grid's blocks in dimensions, the last fastest."""
    return Blocks((Shape(dims),))


THREAD = Threads((Shape.of_modes(()),))
WARP = Threads((shape(32),))
