"""`Fold`: one value of D from those of several products, computed together by a braided B (`gemmkit.Braid`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from gemmkit.component_products import with_number
from gemmkit.components import with_fields
from gemmkit.epilogues.base import Composed, Default, Epilogue, answered_by, finish_edge_element
from gemmkit.kernels.common.elements import delivered, finished
from gemmkit.kernels.common.lanes import store_together
from gemmkit.kernels.common.tile_copy import inside
from gemmkit.kernels.common.work import Place
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each
from gemmkit.lang.given import function_given, required
from gemmkit.lang.registers import generate
from gemmkit.lang.returned import number
from gemmkit.layouts.braided import MOST, OCTET
from gemmkit.ptx.special import thread_index, udiv
from gemmkit.tiling import Tile, translate

LINE = Tile(M=1, N=OCTET)              # of each part, and of D


@dataclass(frozen=True)
@answered_by("then", "finishes_blocks", "is_last", "neighbours", "of_result", "reads_tiles", "reduces", "writes")
class Fold(Epilogue):
    """D's element (m, n) is ``f`` of the parts' at (m, n): ``f(gate, up)``, or with the coordinates ``f(gate, up, m, n)``.

    B is a `gemmkit.Braid` of as many parts as ``f`` takes: D = f(A W, A V, ...), of the parts' shape. ``f`` gets the sums
    in the accumulator's type; arrays and NumPy scalars that it captured are kernel arguments. What follows,
    ``Fold(f) | Residual(x)``, acts on the folded values at coordinates of D; nothing can stand before it.

    Raises TypeError for an ``f`` that is no function of 2 to 6 arguments, ConfigError where B is no braid of as many parts.

    >>> import numpy as np, gemmkit as gk
    >>> x, w, v = np.float32([[1, 2]]), np.float32([[1], [1]]), np.float32([[5], [0]])
    >>> with gk.emulate():
    ...     gk.matmul(x, gk.Braid(w, v), epilogue=Fold(lambda gate, up: max(gate, 0) * up)).tolist()
    [[15.0]]
    """

    alone = "takes the parts of a braid, so that nothing can stand before it; make what should part of its function"

    f: Any
    then: Epilogue = Default()

    def __post_init__(self) -> None:
        wanted = "a function of the parts, f(gate, up), or of the parts and the coordinates, f(gate, up, m, n),"
        object.__setattr__(self, "f", function_given(self.f, "Fold", "f", range(2, MOST + 3), wanted))
        if not isinstance(self.then, Epilogue):
            raise TypeError(f"Fold(then={self.then!r}): an Epilogue is needed; wrap a function in epilogues.Elementwise")
        if self.then.stores_itself:
            raise TypeError(f"then={self.then!r} stores D in its own way (it overrides tile or store) and cannot follow a "
                            "Fold; override finish instead")

    # -- device methods ---------------------------------------------------------------------------------------------

    def fold(self, values: tuple, m: int, n: int) -> Any:
        """One value of D from the parts' values at its place."""
        if len(values) == self.arguments:
            return number(self, "f", self.f(*values), values[0])
        return number(self, "f", self.f(*values, m, n), values[0])

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        return self.then.finish(values, tile, shape)

    def store(self, spec: Any, d: Any, pointer: Any, block_m: int, block_n: int, warp: int, shape: Any) -> None:
        """Step 6 of the kernels with D's tile in shared memory. The thread that stores eight columns of D loads those eight
        of all parts: lanes lie along rows of D, or down its columns where these are contiguous."""
        own = with_number(shape, "N", spec.d.layout.columns)
        if self.finishes_blocks:
            block = Place(block_m, udiv(block_n, spec.b.layout.slots), own.M, own.N)
            store_together(self, spec, d, pointer, block, warp, own)
        else:
            self.store_lines(spec, d, pointer, block_m, block_n, own)

    def store_lines(self, spec: Any, d: Any, pointer: Any, block_m: int, block_n: int, own: Any) -> None:
        slots, leading = spec.b.layout.slots, spec.d.shared.leading(spec.block.size)
        rows, lines = spec.block.size.M, spec.block.size.N // (OCTET * spec.b.layout.slots)
        for n in range(thread_index(), rows * lines, spec.threads):
            row, line = (n % rows, udiv(n, rows)) if spec.d.layout.vector_axis == 0 else (udiv(n, lines), n % lines)
            first = translate(LINE, row, line * OCTET * slots)
            parts = generate(spec.b.layout.parts, load_line, spec, pointer, first, leading)
            place = translate(LINE, block_m + row, udiv(block_n, slots) + line * OCTET)
            self.tile(spec, d, place, generate(OCTET, fold_line, self, parts, place, own), own)

    def finish_block(self, values: tuple, group: Any, at: Any) -> tuple:
        return self.then.finish_block(values, group, at)

    def values_at(self, spec: Any, pointer: Any, tile: Any, place: Any, shape: Any) -> tuple:
        """Folded values; ``tile`` counts folded columns."""
        first = translate(LINE, tile.index[0], tile.index[1] * spec.b.layout.slots)
        parts = generate(spec.b.layout.parts, load_line, spec, pointer, first, spec.d.shared.leading(spec.block.size))
        return generate(OCTET, fold_line, self, parts, place, shape)

    def complete(self, team: Any, shape: Any) -> None:
        self.then.complete(team, shape)

    def ending(self) -> Any:
        return self.then.ending()

    def tile(self, spec: Any, d: Any, tile: Any, values: tuple, shape: Any) -> None:
        """Store folded values; ``shape`` has D's extents."""
        if inside(tile, shape.M, shape.N):
            spec.d.layout.store(d, tile, delivered(spec, finished(self, values, spec.d.layout, tile, shape)), shape)
        else:
            each(finish_edge_element, values, self, spec, d, tile, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def arguments(self) -> int:
        """How many arguments f takes."""
        return int(required(self.f))

    stores_itself = True
    stores_blocks = False
    passes_on = False

    def stages(self) -> tuple[Epilogue, ...]:
        return (self, *self.then.stages())

    def mapped(self, change: Callable[[Epilogue], Epilogue]) -> Epilogue:
        then = self.then.mapped(change)
        return change(self if then is self.then else cast(Fold, with_fields(self, {"then": then})))

    def check(self, M: int, N: int) -> None:
        check = getattr(self.then, "check", None)
        if check is not None:
            check(M, N)

    def __or__(self, other: Any) -> Epilogue:
        return Fold(self.f, other if type(self.then) is Default else Composed(self.then, other))

    def __repr__(self) -> str:
        return f"Fold({self.f!r})" + ("" if type(self.then) is Default else f" | {self.then!r}")


def load_line(part: int, spec: Any, pointer: Any, first: Any, leading: Any) -> tuple:
    """A part's eight columns."""
    return spec.d.shared.load_shared(pointer, translate(first, 0, part * OCTET), leading)


def fold_line(n: int, fold: Any, parts: tuple, place: Any, shape: Any) -> Any:
    """The ``n``-th of eight values of D. Beyond D's edge f gets the coordinates of the nearest element in range."""
    values = generate(len(parts), lambda part: parts[part][n])
    return fold.fold(values, min(place.index[0], shape.M - 1), min(place.index[1] + n, shape.N - 1))
