"""Components of stacks: those that ask which product they are called for, and epilogues with an array for each product.

`for_products` puts an adapter around each, before a kernel is specialised. An adapter has a device method
``of_product(batch)``, which kernels call at the beginning of a tile (`gemmkit.lang.products.of_product`); what it returns is
the component as it is for two matrices.
"""

from __future__ import annotations

from typing import Any, cast

from gemmkit.components import Component, Scalar, field_values, with_fields
from gemmkit.config import TRANSFORMS, Config
from gemmkit.epilogues import Composed as ComposedEpilogue
from gemmkit.epilogues import Epilogue, Fold
from gemmkit.epilogues.base import Alongside
from gemmkit.kernels.common.stack import Steps
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.products import with_matrix, with_number
from gemmkit.lang.returned import number
from gemmkit.layouts import Layout
from gemmkit.layouts.joined import Part
from gemmkit.problem import described
from gemmkit.runtime.arrays import ArrayInfo, whole
from gemmkit.runtime.views import strided
from gemmkit.stacks import first_matrix
from gemmkit.transforms import Transform
from gemmkit.transforms.base import Composed as ComposedTransform

__all__ = ["Adapted", "EpilogueOfProduct", "EpilogueOfStack", "PartOfStack", "TransformOfProduct",
           "component_for_products", "for_products"]


@dataclass(frozen=True)
class TransformOfProduct(Transform):
    """A transform ``f(x, i, j, batch)`` with its product's number."""

    transform: Transform
    batch: Scalar = 0

    def __call__(self, x: Any, i: int, j: int) -> Any:
        return self.at(x, i, j)

    def at(self, x: Any, i: int, j: int) -> Any:
        return number(self.transform, "__call__", self.transform.in_product(x, i, j, self.batch), x)

    def of_product(self, batch: int) -> Any:
        return with_number(self, "batch", batch)


@dataclass(frozen=True)
class PartOfStack(Part):
    """A layout's array that has a matrix for each product."""

    steps: Steps

    def of_product(self, batch: int) -> Any:
        return with_matrix(self, "array", self.steps.coordinates(batch))


@dataclass(frozen=True)
class Adapted(Epilogue):
    """An epilogue that stands for another, which is asked what it does."""

    epilogue: Epilogue

    def ending(self) -> Any:
        return self.epilogue.ending()

    def stages(self) -> tuple[Epilogue, ...]:
        return self.epilogue.stages()

    @property
    def reduces(self) -> bool:
        return self.epilogue.reduces

    def of_result(self, layout: Any) -> Any:
        return self.epilogue.of_result(layout)

    @property
    def finishes_blocks(self) -> bool:
        return self.epilogue.finishes_blocks

    @property
    def neighbours(self) -> int:
        return self.epilogue.neighbours

    @property
    def is_last(self) -> bool:
        return self.epilogue.is_last

    @property
    def stores_itself(self) -> bool:
        return self.epilogue.stores_itself

    @property
    def stores_blocks(self) -> bool:
        return self.epilogue.stores_blocks

    @property
    def reads_tiles(self) -> bool:
        return self.epilogue.reads_tiles

    def reads_alongside(self) -> bool:
        return self.epilogue.reads_alongside()

    @property
    def passes_on(self) -> bool:
        return self.epilogue.passes_on

    @property
    def writes(self) -> bool:
        return self.epilogue.writes


@dataclass(frozen=True)
class EpilogueOfProduct(Adapted):
    """An epilogue ``f(x, m, n, batch)`` with its product's number."""

    batch: Scalar = 0

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return self.epilogue.in_product(x, m, n, self.batch)

    def of_product(self, batch: int) -> Any:
        return with_number(self, "batch", batch)


@dataclass(frozen=True)
class EpilogueOfStack(Adapted):
    """An epilogue whose array ``field`` has a vector or a matrix for each product."""

    field: str
    steps: Steps

    def alongside(self) -> tuple[Alongside, ...]:
        return tuple(one._replace(path=("epilogue",), steps=self.steps) for one in self.epilogue.alongside()
                     if one.field == self.field)

    def of_product(self, batch: int) -> Any:
        return with_matrix(self.epilogue, self.field, self.steps.coordinates(batch))


# -- which are needed -------------------------------------------------------------------------------------------------

def for_products(conf: Config, stack: tuple[int, ...] | None) -> Config:
    """The configuration with adapters where components ask for the product, or have arrays of stacks; else itself."""
    changed = {name: new for name in (*TRANSFORMS, "epilogue", "global_a_layout", "global_b_layout")
               if (new := component_for_products(value := getattr(conf, name), stack)) is not value}
    return cast(Config, with_fields(conf, changed))


def component_for_products(component: Component, stack: tuple[int, ...] | None) -> Component:
    """A transform, an epilogue or a layout as kernels of a stack take it; any other component as it is."""
    if isinstance(component, Layout):
        return component if stack is None else _layout_for_products(component, stack)
    if isinstance(component, Fold):
        then = component_for_products(component.then, stack)
        return component if then is component.then else cast(Component, with_fields(component, {"then": then}))
    if isinstance(component, (ComposedEpilogue, ComposedTransform)):
        parts = {name: component_for_products(getattr(component, name), stack) for name in ("first", "second")}
        return cast(Component, with_fields(component, {name: new for name, new in parts.items()
                                                       if new is not getattr(component, name)}))
    if isinstance(component, Transform) and not component.is_identity and component.with_batch:
        return TransformOfProduct(component)
    if isinstance(component, Epilogue):
        return _epilogue_for_products(component, stack)
    return component


def _layout_for_products(component: Component, stack: tuple[int, ...]) -> Component:
    """A layout, or a component of it, whose arrays are stacks."""
    if isinstance(component, Part):
        first, array = _first(component.array, 2, stack)
        changed = cast(Part, with_fields(component, {"array": array}))
        return PartOfStack(array, Steps.of(first.steps)) if first.steps else changed
    fields = {name: new for name, value in field_values(component).items() if isinstance(value, Component)
              if (new := _layout_for_products(value, stack)) is not value}
    return cast(Component, with_fields(component, fields))


def _first(array: Any, own: int, stack: tuple[int, ...] | None) -> tuple[ArrayInfo, Any]:
    """The first matrix (or vector) of an array of stacks, and the array with the dimensions that `Steps` count."""
    info = described(array)
    assert info is not None
    first = first_matrix(info, len(info.shape) - own, stack)
    matrices = whole(first)
    return first, matrices if isinstance(array, ArrayInfo) else strided(array, info, matrices.shape, matrices.strides)


def _epilogue_for_products(epilogue: Epilogue, stack: tuple[int, ...] | None) -> Epilogue:
    adapted = EpilogueOfProduct(epilogue) if epilogue.with_batch else epilogue
    if stack is None:
        return adapted
    for field, own in epilogue.array_dimensions().items():
        array = getattr(epilogue, field)
        info = described(array)
        if info is None or len(info.shape) == own:
            continue
        if adapted is not epilogue:
            raise TypeError(f"{type(epilogue).__qualname__} asks for the number of the product and declares {field} as an "
                            "array of stacks (array_ndims); one or the other")
        first, view = _first(array, own, stack)
        changed = with_fields(epilogue, {field: view})
        adapted = EpilogueOfStack(changed, field, Steps.of(first.steps)) if first.steps else cast(Epilogue, changed)
        return adapted                                         # gemmkit's own have one array
    return adapted
