"""Classes of components: what is refused when one is defined or made, and what is said to do instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.epilogues.base import CrossLaneEpilogue, Default, ElementEpilogue, StoreEpilogue
from gemmkit.kernels.collectives.scheduler import Order
from gemmkit.layouts.base import AnyLayout


@dataclass(frozen=True)
class Base(transforms.Transform):
    by: float = 1.0

    def __call__(self, x: Any) -> Any:
        return x * self.by


class Undecorated(Base):
    factor: float = 2.0


class OwnInit(transforms.Transform):
    def __init__(self, by: float):
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x * self.by


@pytest.mark.parametrize("make", [lambda: Undecorated(), lambda: OwnInit(2.0)], ids=["a subclass", "an __init__"])
def test_a_class_whose_instances_look_alike_is_refused_when_one_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"(Undecorated|OwnInit): a component is a frozen dataclass; write @dataclass"):
        make()


def class_with(base: type, *names: str) -> Any:
    """A user's component that defines methods of these names."""
    methods: dict[str, Any] = {name: lambda self, *arguments: arguments[0] for name in names}
    return dataclasses.dataclass(frozen=True)(type("Users", (base,), methods))


MISSPELT = [(transforms.Transform, "__cal__", "__call__"), (layouts.Layout, "elment", "element"),
            (layouts.GlobalLayout, "k_rnge", "k_range"), (layouts.SharedLayout, "positon", "position"),
            (epilogues.Epilogue, "finsh", "finish"), (operators.FPUOp, "mutliply", "multiply"), (Order, "blokc", "block")]


@pytest.mark.parametrize("base, name, meant", MISSPELT, ids=[name for _, name, _ in MISSPELT])
def test_misspelt_methods_are_refused_with_the_nearest_name(base: type, name: str, meant: str) -> None:
    made = class_with(base, name)
    with pytest.raises(TypeError, match=rf"Users.{name}: .*did you mean {meant}\?"):
        made(np.float32) if issubclass(base, AnyLayout) else made()


def test_a_misspelt_method_beside_a_right_one() -> None:
    with pytest.raises(TypeError, match=r"Users.store_elment: .*did you mean store_element\?"):
        class_with(layouts.Layout, "element", "store_elment")("float32")


@pytest.mark.parametrize("base", [transforms.Transform, layouts.Layout, epilogues.Epilogue])
def test_a_component_that_defines_nothing_is_refused(base: type) -> None:
    with pytest.raises(TypeError, match="Users defines none of the methods of"):
        class_with(base, "something")(*(("float32",) if base is layouts.Layout else ()))


def test_load_without_element_is_refused() -> None:
    with pytest.raises(TypeError, match="Users has load and not element"):
        class_with(layouts.Layout, "load")("float32")


@pytest.mark.parametrize("base, names", [
    (layouts.RowMajor, ()), (layouts.Layout, ("element", "elements")), (epilogues.Epilogue, ("tile",)),
    (epilogues.Bias, ("describe",)), (operators.FPUOp, ("combine",)),
])
def test_what_is_right_is_not_refused(base: type, names: tuple[str, ...]) -> None:
    arguments: dict[type, tuple] = {layouts.RowMajor: ("float32",), layouts.Layout: ("float32",), epilogues.Bias: (np.ones(3),)}
    class_with(base, *names)(*arguments.get(base, ()))


def test_components_may_be_abstract_and_have_defaults_that_are_made() -> None:
    import abc

    @dataclass(frozen=True)
    class Abstract(transforms.Transform, abc.ABC):
        steps: tuple = field(default_factory=lambda: (1, 2))

        @abc.abstractmethod
        def by(self) -> float: ...

        def __call__(self, x: Any) -> Any:
            return x * self.by()

    @dataclass(frozen=True)
    class Concrete(Abstract):
        def by(self) -> float:
            return 2.0

    with pytest.raises(TypeError, match="abstract"):
        Abstract()                                                            # type: ignore[abstract]
    assert Concrete()(2.0) == 4.0


# -- roles ------------------------------------------------------------------------------------------------------------------

ROW = layouts.RowMajor("float32")
ROLES: dict[str, tuple[Any, set[type]]] = {
    "plain": (ROW, {layouts.GlobalLayout, layouts.SharedLayout, layouts.ResultLayout}),
    "swizzled": (layouts.Swizzled(ROW), {layouts.SharedLayout}), "padded": (layouts.Padded(ROW, 4), {layouts.SharedLayout}),
    "diagonal": (layouts.Diagonal("float32"), {layouts.GlobalLayout}),
    "tensor": (layouts.Tensor("float32", (2,), (3,)), {layouts.GlobalLayout, layouts.ResultLayout}),
}


@pytest.mark.parametrize("name", ROLES)
def test_a_layout_has_the_roles_that_it_serves_in_and_is_a_layout_by_any(name: str) -> None:
    layout, roles = ROLES[name]
    assert {role for role in (layouts.GlobalLayout, layouts.SharedLayout, layouts.ResultLayout) if isinstance(layout, role)} == roles
    assert isinstance(layout, layouts.Layout) and not isinstance(layout, class_with(layouts.Layout, "element"))


@dataclass(frozen=True)
class Reversed(layouts.GlobalLayout):
    """Rows from the last to the first."""

    array_ndim = 2

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[shape.M - 1 - i, j]


@dataclass(frozen=True)
class StoredAlone(Reversed):
    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        data[shape.M - 1 - i, j] = value


@dataclass(frozen=True)
class Stored(StoredAlone, layouts.ResultLayout):
    """In the role that a result needs."""


def test_layouts_of_one_role_and_of_two(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((5, 7)).astype(np.float32), rng.standard_normal((7, 4)).astype(np.float32)
    with gk.emulate():
        read = gk.matmul(a, b, global_a_layout=Reversed("float32"), gemm_shape={"M": 5, "N": 4, "K": 7})
        out = np.full((5, 4), np.nan, np.float32)
        gk.matmul(a, b, out=out, global_d_layout=Stored("float32"))
        with pytest.raises(gk.ConfigError, match="it has neither store_element nor store"):
            gk.matmul(a, b, out=out, global_d_layout=Reversed("float32"))
        with pytest.raises(gk.ConfigError, match=r"name layouts\.ResultLayout among the bases"):
            gk.matmul(a, b, out=out, global_d_layout=StoredAlone("float32"))
        with pytest.raises(gk.ConfigError, match="global_a_layout=Swizzled.*a Layout is needed"):
            gk.matmul(a, b, global_a_layout=layouts.Swizzled(ROW))
    wanted = (a.astype("f8") @ b)[::-1]
    assert np.allclose(read, wanted, atol=1e-5) and np.allclose(out, wanted, atol=1e-5)


def test_an_epilogue_answers_in_three_roles() -> None:
    roles = ElementEpilogue, CrossLaneEpilogue, StoreEpilogue
    plain: Any = Default()
    assert all(isinstance(plain, role) for role in roles) and plain.is_default and plain.passes_on
    own = class_with(epilogues.Epilogue, "__call__")()
    assert not (own.is_default or own.passes_on or own.stores_itself or own.finishes_blocks)
    assert class_with(epilogues.Epilogue, "tile")().stores_itself and class_with(epilogues.Epilogue, "store")().stores_blocks
