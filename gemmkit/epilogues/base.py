"""Epilogues: how a block's tile of D goes from shared to global memory. `Epilogue` has three roles: `ElementEpilogue`,
`CrossLaneEpilogue` and `StoreEpilogue`.

``__call__(self, x, m, n)`` is enough for anything element-wise: it gets a value of D and its **global** row and column.
With ``__call__(self, x, m, n, batch)`` it is told which product of a stack the value is of, counted in C order; without a
stack that is 0. Arrays that have a matrix or a vector for each product are named in ``array_ndims``.
An epilogue that needs whole tiles overrides ``tile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

from gemmkit.components import Component, with_fields
from gemmkit.kernels.collectives.lanes import Lanes, Team, store_together
from gemmkit.kernels.collectives.operand import column_of, delivered, finished, inside, row_of, transform_within
from gemmkit.kernels.collectives.scheduler import TileCoord
from gemmkit.lang.checks import number, numbers, required
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, SharedPointer, View
from gemmkit.lang.references import is_gemmkit
from gemmkit.lang.registers import apply, each
from gemmkit.ptx.special import lane_index
from gemmkit.tiling import Tile, parallelise, translate

if TYPE_CHECKING:
    from gemmkit.kernels.spec import Spec
    from gemmkit.layouts.base import ResultLayout

ELEMENT = Tile(M=1, N=1)
E = TypeVar("E")


class Alongside(NamedTuple):
    """An array of D's form that a stage of an epilogue reads element by element, at the places that it is asked for:
    ``path`` are the fields to the stage, which reads its ``field`` by its ``layout``; ``where`` finds it in device code, and
    ``steps`` are those of a stack (`gemmkit.kernels.collectives.scheduler`), None where all products share a matrix."""

    path: tuple[str, ...]
    field: str
    array: Any
    layout: Any
    where: StageLocation
    steps: Any = None


@dataclass(frozen=True)
class StageLocation(Component):
    """Where in an epilogue a stage is: it itself."""

    def reads(self, epilogue: Epilogue) -> bool:
        return epilogue.reads_alongside()


@dataclass(frozen=True)
class InFirst(StageLocation):
    """In the first of two."""

    inner: StageLocation

    def reads(self, epilogue: Any) -> bool:
        return self.inner.reads(epilogue.first)


@dataclass(frozen=True)
class InSecond(StageLocation):
    """In the second of two."""

    inner: StageLocation

    def reads(self, epilogue: Any) -> bool:
        return self.inner.reads(epilogue.second)


@dataclass(frozen=True)
class ElementEpilogue(Component):
    """What an epilogue makes of an element of D, and what it reads and writes beside it."""

    is_contract = True

    outputs: ClassVar[tuple[str, ...]] = ()                # fields that are arrays which it writes, beside D
    #: Fields that are arrays, of which each product of a stack may have its own, and how many dimensions that has.
    array_ndims: ClassVar[Mapping[str, int]] = MappingProxyType({})
    #: The field, if there is one, that is an array of D's shape, of which `finish` reads no element but a tile's own, by the
    #: layout in the field ``layout``: a kernel may have fetched them, and puts a layout there that knows where they are.
    beside: ClassVar[str | None] = None
    #: What methods may ask for beside the arguments that they have here.
    may_take: ClassVar[Mapping[str, str]] = MappingProxyType({"__call__": "batch"})

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return x

    def in_product(self, x: Numeric, m: int, n: int, batch: int) -> Any:
        """The epilogue of an element, for one that asks for the number of the product."""
        return self(x, m, n, batch)                                            # type: ignore[call-arg]

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        """The finished values of a thread's tile that lies wholly in range, first dimension fastest."""
        return apply(finish_element, values, self, tile)

    def reads_alongside(self) -> bool:
        """Whether this launch reads the array ``beside``, the same for all elements."""
        return True

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def with_batch(self) -> bool:
        """Whether ``__call__`` wants the number of the product, too: ``__call__(self, x, m, n, batch)``."""
        return required(type(self).__call__) == 5

    @property
    def passes_on(self) -> bool:
        """Whether it finishes nothing: values of D stay what they are."""
        return type(self).__call__ is ElementEpilogue.__call__ and type(self).finish is ElementEpilogue.finish

    @property
    def is_elementwise(self) -> bool:
        """Whether ``__call__`` is all that it does: it makes a number of a number and its place, and nothing else."""
        cls: Any = type(self)
        is_whole = self.writes or self.finishes_blocks or self.stores_itself               # type: ignore[attr-defined]
        return not is_whole and (cls.__call__ is not ElementEpilogue.__call__ or cls.finish is ElementEpilogue.finish)

    @property
    def is_default(self) -> bool:
        """Whether D is what the product gives."""
        return False

    @property
    def reads_tiles(self) -> bool:
        """Whether it reads as many elements as D has: that takes a time which only large tiles hide."""
        return False

    @property
    def writes(self) -> bool:
        """Whether it writes anything beside D: then it must not be asked for an element that is out of range."""
        return bool(self.outputs)

    @property
    def result_dtype(self) -> Any:
        """D's dtype where no out is given; None: what the product gives."""
        return None

    def array_dimensions(self) -> Mapping[str, int]:
        """`array_ndims` of this epilogue: overridden where they depend on its fields."""
        return self.array_ndims

    def alongside(self) -> tuple[Alongside, ...]:
        """What it and the epilogues in it read ``beside`` D. (A subclass reads in its own way, and says so itself.)"""
        field = vars(type(self)).get("beside")
        return () if field is None else (Alongside((), field, getattr(self, field), vars(self)["layout"], StageLocation()),)


@dataclass(frozen=True)
class CrossLaneEpilogue(Component):
    """What an epilogue makes of values that several threads hold of D."""

    is_contract = True

    #: Why nothing can follow one that `is_last`.
    ends: ClassVar[str] = "finishes whole rows, so that nothing can follow it"
    #: Words of a row's state that blocks of a cluster exchange, where it finishes whole rows (`Normalise`).
    row_words: ClassVar[int] = 0

    def finish_block(self, values: Elements, group: Lanes, at: Any) -> Elements:
        """The finished values that a thread holds of what ``group`` (`gemmkit.kernels.collectives.lanes`) holds together, at
        ``at``, some of them out of range: for one that `finishes_blocks`. All threads of the group come here."""
        return group.finish(self, values, at)  # type: ignore[arg-type]

    def complete(self, team: Team, shape: StackShape) -> None:
        """Behind the product, in a kernel of its own: what is left to do of reductions."""

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def reduces(self) -> bool:
        """Whether it combines values of several threads (`gemmkit.epilogues.reductions`)."""
        return False

    @property
    def finishes_blocks(self) -> bool:
        """Whether it sees more than an element, by `finish_block`."""
        return self.reduces

    @property
    def neighbours(self) -> int:
        """How many neighbours in a row a thread must hold."""
        return 1

    @property
    def is_last(self) -> bool:
        """Whether nothing can follow it: it finishes whole rows (`gemmkit.epilogues.norms`), or packs values."""
        return False


@dataclass(frozen=True)
class StoreEpilogue(Component):
    """How an epilogue brings D from shared to global memory."""

    is_contract = True

    #: Why one that stores D itself stands for itself.
    alone: ClassVar[str] = ("stores D in its own way (it overrides tile or store) and cannot be composed; override finish "
                            "instead")

    def store(self, spec: Any, d: Any, pointer: Any, block_m: int, block_n: int, warp: int, shape: Any) -> None:
        """Step 6 of the kernel: every thread takes its tiles of D from shared memory and hands them to `tile`."""
        if self.finishes_blocks:                                               # type: ignore[attr-defined]
            store_together(self, spec, d, pointer, TileCoord(block_m, block_n, shape.M, shape.N), warp, shape)
        else:
            self.store_tiles(spec, d, pointer, block_m, block_n, warp, shape)

    def store_tiles(self, spec: Spec, d: View, pointer: SharedPointer, block_m: int, block_n: int, warp: int,
                    shape: StackShape) -> None:
        block = spec.block.MN
        warp_tiles = parallelise(block, spec.d.warp, warp, spec.warps)
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], spec.d.thread, lane_index(), 32, spec.d.order)
            for j in range(len(thread_tiles)):
                tile = thread_tiles[j]
                values = spec.d.shared.load_shared(pointer, tile, spec.d.shared.leading(block.size))
                place = translate(tile, block_m, block_n)
                self.tile(spec, d, place, transform_within(spec.d.to_shared, values, place, shape.M, shape.N), shape)

    def values_at(self, spec: Spec, pointer: SharedPointer, tile: Tile, place: Tile, shape: StackShape) -> Elements:
        """The values that it finishes of a tile of D, which lies at ``tile`` in shared memory and at ``place`` in D."""
        values = spec.d.shared.load_shared(pointer, tile, spec.d.shared.leading(spec.block.size))
        return transform_within(spec.d.to_shared, values, place, shape.M, shape.N)

    def tile(self, spec: Any, d: Any, tile: Any, values: Elements, shape: Any) -> None:
        """Finish and store a thread's tile of D. ``tile`` is where it lies globally; parts of it may be out of range."""
        if inside(tile, shape.M, shape.N):
            spec.d.layout.store(d, tile, delivered(spec, finished(self, values, spec.d.layout, tile, shape)), shape)
        elif not spec.d.whole:                             # it straddles an edge: element by element, those in range
            each(finish_edge_element, values, self, spec, d, tile, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def stores_itself(self) -> bool:
        """Whether it has its own way of storing tiles: then the kernel may not store D for it."""
        return type(self).tile is not StoreEpilogue.tile or self.stores_blocks

    @property
    def stores_blocks(self) -> bool:
        """Whether it takes whole blocks from shared memory."""
        return type(self).store is not StoreEpilogue.store

    def of_result(self, layout: ResultLayout) -> Any:
        """How D is stored behind this epilogue where D's array has ``layout``."""
        return layout


@dataclass(frozen=True)
class Epilogue(ElementEpilogue, CrossLaneEpilogue, StoreEpilogue):
    """Base class of epilogues. A kernel uses each in three roles: to finish an element, to combine values of several
    threads, and to store D. By default an epilogue passes elements on, and kernels store tiles in their usual way.

    >>> from gemmkit import Scalar
    >>> @dataclass(frozen=True)
    ... class Clamp(Epilogue):
    ...     low: Scalar
    ...     high: Scalar
    ...     def __call__(self, x, m, n):
    ...         return min(max(x, self.low), self.high)
    >>> Clamp(0.0, 1.0)(3.5, 0, 0)
    1.0
    """

    is_contract = True
    device_methods = ("__call__", "finish", "tile", "store")
    without_value = ("tile", "store")

    def __or__(self, other: Any) -> Epilogue:
        """``self | other``: this epilogue, then the other."""
        return ComposedEpilogue(self, other)

    def ending(self) -> Any:
        """The last epilogue of a chain."""
        return self

    def stages(self) -> tuple[Epilogue, ...]:
        """The epilogues that it is composed of, in their order."""
        return (self,)

    def mapped(self, change: Callable[[Epilogue], Epilogue]) -> Epilogue:
        """The epilogue with ``change(stage)`` for each that it is composed of; itself where all stay as they are."""
        return change(self)


def answered_by(field: str, *names: str) -> Callable[[type[E]], type[E]]:
    """A class's properties ``names`` (and host methods) are those of the epilogue in its ``field``."""
    def answering(cls: type[E]) -> type[E]:
        for name in names:
            setattr(cls, name, property(lambda self, name=name: getattr(getattr(self, field), name)))      # type: ignore[misc]
        return cls

    return answering


def finish_element(x: Numeric, n: int, epilogue: Epilogue, tile: Tile) -> Any:
    """The epilogue of a tile's n-th element."""
    return number(epilogue, "__call__", epilogue(x, row_of(tile, n), column_of(tile, n)), x)


def finish_edge_element(x: Numeric, n: int, epilogue: Epilogue, spec: Spec, data: View, tile: Tile,
                        shape: StackShape) -> None:
    i, j = row_of(tile, n), column_of(tile, n)
    if i < shape.M and j < shape.N:
        place = translate(ELEMENT, i, j)
        spec.d.layout.store(data, place, delivered(spec, finished(epilogue, (x,), spec.d.layout, place, shape)), shape)


@dataclass(frozen=True)
class Default(Epilogue):
    """Stores D."""

    @property
    def is_default(self) -> bool:
        return type(self) is Default


# -- one after the other ------------------------------------------------------------------------------------------------

_composable: set[tuple[Any, Any]] = set()                # classes of the end of a first and of a second that say so alone


@dataclass(frozen=True)
class ComposedEpilogue(Epilogue):
    """``first``, then ``second``: what ``first | second`` makes. Either may be composed itself.

    Values stay in registers between the two, in the type that ``first`` returns. Raises TypeError for an epilogue that
    stores D itself, because it cannot be composed.

    >>> from gemmkit.epilogues import Clamp, Scale
    >>> (Scale(2.0) | Clamp(0.0, 5.0))(4.0, 0, 0)
    5.0
    """

    first: Epilogue
    second: Epilogue

    def __post_init__(self) -> None:
        first: Any = self.first
        second: Any = self.second
        end = first
        while type(end) is ComposedEpilogue:
            end = end.second
        kinds = type(end), type(second)
        if kinds in _composable:
            return
        if not isinstance(first, Epilogue) or not isinstance(second, Epilogue):
            name, part = ("second", second) if isinstance(first, Epilogue) else ("first", first)
            raise TypeError(f"{name}={part!r} in a composition of epilogues: an Epilogue is needed; " + (
                f"make an instance of the class: {part.__name__}(...)" if isinstance(part, type) else
                "wrap a function in epilogues.Elementwise"))
        if first.stores_itself or second.stores_itself:
            name, part = ("first", first) if first.stores_itself else ("second", second)
            raise TypeError(f"{name}={part!r} {part.alone}")
        if first.is_last:
            raise TypeError(f"first={first!r} {first.ending().ends}; put {second!r} in front of it, or into a call of its "
                            "own")
        if all(is_gemmkit(kind) and kind.stores_itself is StoreEpilogue.stores_itself
               and kind.stores_blocks is StoreEpilogue.stores_blocks for kind in kinds) and (
                kinds[0].is_last is CrossLaneEpilogue.is_last):
            _composable.add(kinds)

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return self.second(number(self.first, "__call__", self.first(x, m, n), x), m, n)

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        return self.second.finish(numbers(self.first, "finish", self.first.finish(values, tile, shape), values), tile, shape)

    def finish_block(self, values: Elements, group: Lanes, at: Any) -> Elements:
        if self.finishes_blocks:
            return self.second.finish_block(self.first.finish_block(values, group, at), group, at)
        return group.finish(self, values, at)

    def complete(self, team: Team, shape: StackShape) -> None:
        self.first.complete(team, shape)
        self.second.complete(team, shape)

    def alongside(self) -> tuple[Alongside, ...]:
        first = (one._replace(path=("first", *one.path), where=InFirst(one.where)) for one in self.first.alongside())
        second = (one._replace(path=("second", *one.path), where=InSecond(one.where)) for one in self.second.alongside())
        return (*first, *second)

    def ending(self) -> Any:
        return self.second.ending()

    def stages(self) -> tuple[Epilogue, ...]:
        return (*self.first.stages(), *self.second.stages())

    def mapped(self, change: Callable[[Epilogue], Epilogue]) -> Epilogue:
        first, second = self.first.mapped(change), self.second.mapped(change)
        same = first is self.first and second is self.second
        return self if same else cast(Epilogue, with_fields(self, {"first": first, "second": second}))

    @property
    def is_elementwise(self) -> bool:
        return self.first.is_elementwise and self.second.is_elementwise

    @property
    def reduces(self) -> bool:
        return self.first.reduces or self.second.reduces

    @property
    def finishes_blocks(self) -> bool:
        return self.first.finishes_blocks or self.second.finishes_blocks

    @property
    def neighbours(self) -> int:
        return max(self.first.neighbours, self.second.neighbours)

    @property
    def is_last(self) -> bool:
        return self.second.is_last

    def of_result(self, layout: ResultLayout) -> Any:
        return self.second.of_result(layout)

    @property
    def result_dtype(self) -> Any:
        return self.second.result_dtype

    @property
    def reads_tiles(self) -> bool:
        return self.first.reads_tiles or self.second.reads_tiles

    @property
    def writes(self) -> bool:
        return self.first.writes or self.second.writes

    def check(self, M: int, N: int) -> None:
        """What the parts check."""
        for part in (self.first, self.second):
            check = getattr(part, "check", None)
            if check is not None:
                check(M, N)

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


def result_layout(b: Any, epilogue: Any, d: Any) -> Any:
    """How D is stored, whose array has the layout ``d``: behind a B of layout ``b`` and an epilogue (or None)."""
    stored = b.of_result(d)
    return epilogue.of_result(stored) if isinstance(epilogue, Epilogue) else stored


def parts(epilogue: Epilogue) -> Iterator[Any]:
    """The epilogues that one is composed of, in their order."""
    yield from epilogue.stages() if isinstance(epilogue, Epilogue) else (epilogue,)
