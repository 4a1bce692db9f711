"""gemmkit's own components are the dataclasses that Python's decorator makes: they are told apart, kept in sets and changed alike."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import Component
from gemmkit.lang import components

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
