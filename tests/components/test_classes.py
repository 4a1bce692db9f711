"""Classes of components: what is refused when one is defined or made, and what Python's dataclass decorator makes of gemmkit's
own."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.components import Component
from gemmkit.epilogues.base import CrossLaneEpilogue, Default, ElementEpilogue, StoreEpilogue
from gemmkit.kernels.collectives.scheduler import Order
from gemmkit.lang import components
from gemmkit.layouts.base import AnyLayout

# ==========================================================================================================================
# Classes of components: what is refused when one is defined or made, and what is said to do instead.


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
    "tensor": (layouts.Matricised("float32", (2,), (3,)), {layouts.GlobalLayout, layouts.ResultLayout}),
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
        with pytest.raises(gk.ConfigError, match=r"make layouts.ResultLayout a base"):
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


# ==========================================================================================================================
# gemmkit's own components are the dataclasses that Python's decorator makes: they are told apart, kept in sets and changed alike.

DECORATORS = pytest.mark.parametrize("dataclass", [dataclasses.dataclass, components.dataclass], ids=["Python's", "gemmkit's"])


@DECORATORS
def test_components_are_told_apart_by_their_fields(dataclass: Any) -> None:
    @dataclass(frozen=True)
    class None_(Component):
        pass

    @dataclass(frozen=True)
    class One(Component):
        x: Any

    @dataclass(frozen=True, kw_only=True)
    class Three(One):
        y: int = 2
        note: str = dataclasses.field(default="", compare=False)

    @dataclass(frozen=True)
    class Other(One):
        pass

    assert None_() == None_() and hash(None_()) == hash(None_()) and None_() != One(1)
    assert One(1) == One(1.0) and hash(One(1)) == hash(One(1.0)) and One(1) != One(2) and One(1) != Other(1) and One(1) != 1
    assert Three(x=1) == Three(x=1, y=2, note="a") and Three(x=1) != Three(x=1, y=3) and Three(x=1) != One(1)
    assert len({Three(x=1), Three(x=1, note="a"), Three(x=2), One(1), Other(1)}) == 4
    nan = float("nan")
    assert One(nan) == One(nan) and One(nan) != One(float("nan"))                    # an object is equal to itself
    x = np.ones(3)
    assert One(x) == One(x)
    with pytest.raises(ValueError, match="ambiguous"):
        One(x) == One(np.ones(3))                                                      # noqa: B015
    with pytest.raises(TypeError, match="unhashable"):
        hash(One([]))
    assert One(1).__eq__(Other(1)) is NotImplemented
    assert dataclasses.replace(Three(x=1), y=5) == Three(x=1, y=5) == copy.deepcopy(Three(x=1, y=5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        One(1).x = 2
    assert repr(Three(x=1, y=3)).endswith("Three(1, y=3)") and One.__match_args__ == ("x",)


@DECORATORS
def test_what_a_class_says_itself_stays(dataclass: Any) -> None:
    @dataclass(frozen=True)
    class Own(Component):
        x: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.x % 2 == other.x % 2

    @dataclass(frozen=True)
    class Hashed(Component):
        x: int

        def __hash__(self) -> int:
            return 7

    @dataclass(frozen=True)
    class Inherited(Own):
        pass

    @dataclass(frozen=True, eq=False)
    class Single(Component):
        x: int

    assert Own(1) == Own(3) and hash(Own(1)) == hash(Own(1)) != hash(Own(3)) and hash(Hashed(1)) == 7
    assert Inherited(1) != Inherited(3)                                                # its fields, as of any dataclass
    assert Single(1) != Single(1)


def test_users_subclasses_of_components_of_gemmkit() -> None:
    """They are made by Python's decorator, on a base that is not."""
    @dataclasses.dataclass(frozen=True)
    class Mine(gk.layouts.RowMajor):
        by: int = 1

    assert Mine("float16", by=2) == Mine("float16", by=2) != Mine("float16") and hash(Mine("float16")) == hash(Mine("float16"))
    assert Mine("float16") != gk.layouts.RowMajor("float16") == pickle.loads(pickle.dumps(gk.layouts.RowMajor("float16")))


def test_a_subclass_is_looked_at_after_its_base_has_an_instance() -> None:
    assert Base(3.0)(2.0) == 6.0 and type(Base) is components.CheckedClass is not type(Undecorated)
    with pytest.raises(TypeError, match="Undecorated: a component is a frozen dataclass"):
        Undecorated()
    before = components.class_version[0]
    Base.__call__ = Base.__call__                                        # type: ignore[method-assign]
    assert components.class_version[0] == before + 1


@components.dataclass(frozen=True)
class Chosen(epilogues.Scale):
    """One of gemmkit's own making: a word, and keywords."""

    way: str = "up"
    more: int = field(default=1, kw_only=True)


@pytest.mark.parametrize(("make", "error", "said"), [
    (lambda x: epilogues.Bias(), TypeError, "missing 1 required positional argument: 'bias'"),
    (lambda x: epilogues.Bias(x, "N", 3), TypeError, "takes from 2 to 3 positional arguments"),
    (lambda x: epilogues.Bias(x, axis="N"), TypeError, "unexpected keyword argument 'axis'"),
    (lambda x: epilogues.Bias(x, "K"), ValueError, r"Bias\(along='K'\): \"M\" or \"N\" is needed"),
    (lambda x: epilogues.Bias(x, 3), TypeError, r"Bias.along: 3; \"M\" or \"N\" is needed"),
    (lambda x: epilogues.Scale(x, along=np.zeros(2)), TypeError, "Scale.along"),
    (lambda x: epilogues.GELU("sigmoid"), ValueError, "GELU"),
    (lambda x: epilogues.Bias([1.0]), TypeError, "Bias.bias: got list; an array"),
    (lambda x: epilogues.ReLU(1), TypeError, "ReLU"),
    (lambda x: Chosen(2.0, "N", "up", 3), TypeError, "takes from 2 to 4 positional arguments"),
    (lambda x: layouts.Padded(3, 1), TypeError, "Padded"),
])
def test_what_an_init_of_gemmkits_own_refuses(make: Callable[[Any], Any], error: type[Exception], said: str) -> None:
    x = np.zeros(2)
    for _ in range(2):                                                   # also after an instance that was right
        with pytest.raises(error, match=said):
            make(x)
        assert epilogues.Bias(x).along == "N" and epilogues.GELU(form="tanh").form == "tanh"


def test_an_init_of_gemmkits_own_is_that_of_a_dataclass() -> None:
    made = Chosen(2.0, way="down", more=3)
    assert (made.by.value, made.along, made.way, made.more) == (2.0, "N", "down", 3)
    assert list(vars(made)) == [one.name for one in dataclasses.fields(made)]
    assert list(inspect.signature(Chosen).parameters) == ["by", "along", "way", "more"]
    assert dataclasses.replace(made, more=4).more == 4 and pickle.loads(pickle.dumps(epilogues.GELU("tanh"))).form == "tanh"
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.way = "up"                                                  # type: ignore[misc]


@components.dataclass(frozen=True)
class Named(Component):
    """Fields whose names an ``__init__`` might have for itself."""

    own: int
    type: str
    str: float = 1.0
    space: bool = True


def test_fields_of_gemmkits_own_have_any_names() -> None:
    """(A field ``own`` was overwritten by the dictionary that fields are written into: a kernel waited for no flag.)"""
    made = Named(3, "word", str=2.0)
    assert (made.own, made.type, made.str, made.space) == (3, "word", 2.0, True)


def test_a_composition_of_known_classes_is_still_looked_at() -> None:
    x = np.zeros(2)
    assert repr(epilogues.Bias(x) | epilogues.ReLU()) and repr(epilogues.Bias(x) | epilogues.ReLU())
    for _ in range(2):
        with pytest.raises(TypeError, match="finishes whole rows"):
            epilogues.Bias(x) | epilogues.Softmax() | epilogues.ReLU()
        with pytest.raises(TypeError, match="an Epilogue is needed"):
            epilogues.Bias(x) | 3                                        # type: ignore[operator]
