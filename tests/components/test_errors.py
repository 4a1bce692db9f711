"""Errors in components name the user's file and line; state that can change in place is refused."""

from __future__ import annotations

import enum
import functools
import math
import operator
import os
import random
import sys
import time
import types
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from datetime import datetime
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import Scalar, epilogues, layouts, operators, transforms
from gemmkit.components import freeze
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.components.test_components import compact, kernel_of, transforming
from tests.stale.kernel import ptx_of
from tests.support.harness import Out
from tests.support.harness import compiled as compiled_of_component_faults

# ==========================================================================================================================
# What Numba cannot compile in a user's function is reported with the user's file and line, whoever in Numba says so.


def helper(x: Any) -> Any:
    return x @ x                          # HELPER


def compiled(function: Callable[..., Any]) -> ahead.CompiledKernel:
    conf = gk.get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"), device=H100,
                         block_shape=gk.Tile(M=32, N=32, K=32), compute_warp=gk.Tile(M=16, N=16, K=16),
                         transform_regs_to_shared_d=transforms.Map(function))
    return ahead.compile_config(conf, device=H100)


@pytest.mark.compile
@pytest.mark.kin(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("function", "name", "marker", "reason"), [
    (lambda x: x.clipped(0, 1), "<lambda>", "ATTRIBUTE", "Unknown attribute 'clipped' of type float32"),  # ATTRIBUTE
    (lambda x: helper(x), "helper", "HELPER", "matmul(float32, float32)"),
    (lambda x: np.linalg.norm(x), "<lambda>", "NORM", "NumPy's function norm has no device code"),  # NORM
    (lambda x: not_there(x), "<lambda>", "NAME", "name 'not_there' is not defined"),  # type: ignore[name-defined]  # noqa: F821  # NAME
], ids=["attribute", "helper", "library", "name"])
def test_the_users_line_comes_first(function: Any, name: str, marker: str, reason: str) -> None:
    with pytest.raises(gk.ComponentError) as caught:
        compiled(function)
    first, place, source, *_, why = str(caught.value).splitlines()
    assert first == f"{name} cannot be compiled as device code"
    assert place.startswith(f'  File "{__file__}", line ') and source.endswith(f"# {marker}") and reason in why


@pytest.mark.compile
@pytest.mark.kin(1)
def test_the_same_function_repaired() -> None:
    assert compiled(lambda x: math.exp(x) + 1).usage.stack_bytes == 0


# ==========================================================================================================================
# Mistakes in components: each is told with the line of the user, and what would do.

F4 = np.dtype("f4")


HERE = Path(__file__)


def line_of(marker: str) -> int:
    """The number of the line in this file that ends with the comment ``# marker``."""
    (number,) = (n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {marker}"))
    return number


def no_such_method(x: Any) -> Any:
    return x.clipped(0, 1)  # DEEP


@dataclass(frozen=True)
class WrongAttribute(transforms.Transform):
    def __call__(self, x):
        return x + self.no_such_field  # FIELD


@dataclass(frozen=True)
class WrongCall(transforms.Transform):
    def __call__(self, x):
        y = x * 2
        return math.exp(y, 3)  # CALL


@dataclass(frozen=True)
class WrongHelper(transforms.Transform):
    def __call__(self, x):
        return 1 + no_such_method(x)


@dataclass(frozen=True)
class WrongArguments(transforms.Transform):
    def __call__(self, x):
        return two_numbers(x)  # ARGUMENTS


@dataclass(frozen=True)
class WrongMethod(transforms.Transform):
    def __call__(self, x):
        return self.other(x)

    def other(self, x):
        return x + "one"  # METHOD


@dataclass(frozen=True)
class Recursive(transforms.Transform):
    def __call__(self, x):
        return factorial(x)


def two_numbers(x: Any, y: Any) -> Any:
    return x + y


def factorial(n: Any) -> Any:
    return 1 if n <= 1 else n * factorial(n - 1)  # RECURSION


WRONG: dict[str, tuple[Any, str, str, str]] = {
    "an unknown field": (WrongAttribute(), "WrongAttribute.__call__", "FIELD", "no_such_field"),
    "a call with too many arguments": (WrongCall(), "WrongCall.__call__", "CALL", "exp"),
    "a helper's mistake": (WrongHelper(), "no_such_method", "DEEP", "clipped"),
    "a call with too few arguments": (WrongArguments(), "WrongArguments.__call__", "ARGUMENTS", "'y'"),
    "a method's mistake": (WrongMethod(), "WrongMethod.other", "METHOD", "one"),
    "recursion": (Recursive(), "factorial", "RECURSION", "calls itself"),
    "a lambda's mistake": (transforms.Map(lambda x: x.clipped(2)), "<lambda>", "LAMBDA", "clipped"),  # LAMBDA
}


@pytest.mark.parametrize("transform, name, marker, reason", WRONG.values(), ids=WRONG.keys())
def test_mistakes_are_told_with_the_users_line(transform: Any, name: str, marker: str, reason: str) -> None:
    with pytest.raises(gk.ComponentError) as caught:
        compiled_of_component_faults(transforming, Out((32,), F4), np.ones(32, F4), transform)
    message = str(caught.value)
    assert f"{name} cannot be compiled as device code" in message
    assert f'File "{HERE}", line {line_of(marker)}' in message
    assert reason in message


def test_a_mistake_comes_out_of_a_configuration_too() -> None:
    """Through the whole template kernel, the user's line is still what is said first."""
    conf = compact(transform_regs_to_shared_d=WrongHelper())
    with pytest.raises(gk.ComponentError, match="^no_such_method cannot be compiled") as caught:
        kernel_of(conf)
    assert f'File "{HERE}", line {line_of("DEEP")}' in str(caught.value)


# ==========================================================================================================================
# What no key of a kernel could tell apart is refused where it is used: state that can change in place.


class Settings:
    """An object with state, which its text does not show."""

    def __init__(self, scale: float):
        self.scale = scale

    def __repr__(self) -> str:
        return "<settings>"


def program(body: str, **names: Any) -> Any:
    space = {"np": np, **names}
    exec(f"def function(x):\n    return {body}", space)
    return transforms.Map(space["function"])


HELPERS = types.ModuleType("users_helpers")
HELPERS.TABLE = [1.0, 2.0]                                                    # type: ignore[attr-defined]


MUTABLE = {
    "list": (program("x * TABLE[0]", TABLE=[1.0, 2.0]), "TABLE is a list"),
    "dict": (program("x * TABLE[0]", TABLE={0: 1.0}), "TABLE is a dict"),
    "set": (program("x if 1 in TABLE else 0", TABLE={1}), "TABLE is a set"),
    "object": (program("x * settings.scale", settings=Settings(2.0)), "settings is a Settings"),
    "tuple of lists": (program("x * TABLE[0][0]", TABLE=([1.0],)), "TABLE is a list"),
    "array of a helper": (program("helper(x)", helper=program("x + TABLE[0]", TABLE=np.ones(3)).f), "TABLE is a ndarray"),
    "array in a tuple": (program("x + TABLES[0][0]", TABLES=(np.ones(3),)), "TABLES is a ndarray"),
    "module's list": (program("x * helpers.TABLE[0]", helpers=HELPERS), "TABLE"),
}


@pytest.mark.compile
@pytest.mark.parametrize("transform, reason", MUTABLE.values(), ids=MUTABLE.keys())
def test_what_can_change_in_place_is_refused_where_it_is_used(transform: Any, reason: str) -> None:
    with pytest.raises(gk.ComponentError) as caught:
        ptx_of(transform)
    assert reason in str(caught.value) and "line 2" in str(caught.value)
    assert "tuple or an Enum" in str(caught.value) and "gk.Array" in str(caught.value)


@pytest.mark.parametrize("kind", ["list", "dict", "set"])
def test_the_same_in_the_emulator(kind: str) -> None:
    a = np.eye(4, dtype=np.float32)
    with gk.emulate(), pytest.raises(gk.ComponentError, match=MUTABLE[kind][1]):
        gk.matmul(a, a, transform_regs_to_shared_d=MUTABLE[kind][0])


class Mode(enum.Enum):
    HALF = 0.5
    SEVENFOLD = 7.0


@dataclass(frozen=True)
class ByProperty(transforms.Transform):
    held: Any

    @property
    def scale(self) -> float:
        held = self.held
        return float(held.scale if isinstance(held, Settings) else held.value if isinstance(held, Mode) else held[0])

    def __call__(self, x: Any) -> Any:
        return x * self.scale


@pytest.mark.compile
@pytest.mark.parametrize("held", [[2.0], Settings(2.0), {0: 2.0}], ids=["list", "object", "dict"])
def test_a_property_cannot_hide_what_can_change(held: Any) -> None:
    with pytest.raises(gk.ComponentError, match=r"ByProperty.scale: the property reads ByProperty.held, a \w+, which can change"):
        ptx_of(ByProperty(held))


def of_process() -> float:
    return float(len(os.environ))


@dataclass(frozen=True)
class Inner(transforms.Transform):
    @property
    def deep(self) -> float:
        return float(len(sys.argv))

    def __call__(self, x: Any) -> Any:
        return x


# What a property reads, and what the message names.
OF_THE_PROCESS = {
    "os.environ": ("os.environ", lambda self: float(os.environ.get("SCALE", "2"))),
    "environ": ("environ", lambda self: float(environ.get("SCALE", "2"))),
    "os.getenv": ("os.getenv", lambda self: float(os.getenv("SCALE", "2"))),
    "time.time": ("time.time", lambda self: time.time()),
    "random.random": ("random.random", lambda self: random.random()),
    "np.random": ("np.random", lambda self: float(np.random.rand())),
    "datetime": ("datetime", lambda self: float(datetime.now().year)),
    "sys.argv": ("sys.argv", lambda self: float(len(sys.argv))),
    "open": ("open", lambda self: float(open("scale").read())),
    "a helper": ("os.environ", lambda self: of_process()),
    "a property of a field": ("sys.argv", lambda self: self.inner.deep),
    "a method of an object": ("METHOD", lambda self: METHOD("SCALE", 2.0)),
}
METHOD = {"SCALE": 3.0}.get


@pytest.mark.compile
@pytest.mark.parametrize("what", OF_THE_PROCESS)
def test_a_property_cannot_hide_what_is_not_of_the_program(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scale").write_text("2")
    named, getter = OF_THE_PROCESS[what]

    @dataclass(frozen=True)
    class Scaled(transforms.Transform):
        inner: Any = Inner()

        def __call__(self, x: Any) -> Any:
            return x * self.scale                                             # type: ignore[attr-defined]

    Scaled.scale = property(getter)                                           # type: ignore[attr-defined]
    with pytest.raises(gk.ComponentError, match=rf"Scaled.scale: the property reads {named}[^,]*, ") as caught:
        ptx_of(Scaled())
    assert f'File "{__file__}", line' in str(caught.value)


@pytest.mark.compile
def test_a_property_may_compute() -> None:
    """With functions whose results their arguments decide."""
    @dataclass(frozen=True)
    class Scaled(transforms.Transform):
        by: float = 2.5

        @property
        def scale(self) -> float:
            return float(np.sqrt(np.float64(math.ceil(self.by)))) + functools.reduce(operator.add, (1, 2)) + max(1, len("ab"))

        def __call__(self, x: Any) -> Any:
            return x * self.scale

    assert ptx_of(Scaled())


@pytest.mark.compile
def test_tuples_and_enumerations_are_constants() -> None:
    assert "0f40E00000" in ptx_of(ByProperty((7.0,))) and "0f40E00000" in ptx_of(ByProperty(Mode.SEVENFOLD))
    assert "0f3F000000" in ptx_of(ByProperty(Mode.HALF))


@dataclass(frozen=True)
class WorkedOut(transforms.Transform):
    """State beside the fields, from a field that is not kept."""

    start: InitVar[int]

    def __post_init__(self, start: int) -> None:
        object.__setattr__(self, "steps", (start, start * 2.0))

    def __call__(self, x: Any) -> Any:
        return x * self.steps[1]                                              # type: ignore[attr-defined]


@dataclass(frozen=True)
class OfKind(transforms.Transform):
    kind: type

    def __call__(self, x: Any) -> Any:
        return x + self.weight

    @property
    def weight(self) -> float:
        return float(self.kind.WEIGHT)                                        # type: ignore[attr-defined]


def test_state_beside_fields_is_in_the_key() -> None:
    assert freeze(WorkedOut(1)).fingerprint != freeze(WorkedOut(2)).fingerprint == freeze(WorkedOut(2)).fingerprint
    kinds = [type("Kind", (), {"WEIGHT": weight}) for weight in (1.0, 2.0)]
    one, other = (freeze(OfKind(kind)).fingerprint for kind in kinds)
    assert one != other
    kinds[0].WEIGHT = 2.0                                                     # type: ignore[attr-defined]
    assert freeze(OfKind(kinds[0])).fingerprint == other


def test_an_array_beside_fields_is_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Hidden(transforms.Transform):
        def __post_init__(self) -> None:
            object.__setattr__(self, "table", np.ones(3))

        def __call__(self, x: Any) -> Any:
            return x

    with pytest.raises(TypeError, match=r"Hidden.table: .*gk.Array"):
        freeze(Hidden())


def test_an_annotation_that_changes_is_seen() -> None:
    """Which fields are run-time values, and what a field has to be."""
    @dataclass(frozen=True)
    class Factor(epilogues.Epilogue):
        k: int = 2

        def __call__(self, x: Any, m: Any, n: Any) -> Any:
            return x * self.k

    assert not freeze(Factor(3)).leaves
    Factor("three")                                                        # type: ignore[arg-type]
    Factor.__annotations__ = {"k": Scalar}
    assert len(freeze(Factor(3)).leaves) == 1
    with pytest.raises(TypeError, match="a number that a kernel can take"):
        Factor("three")                                                    # type: ignore[arg-type]


def test_named_tuples_are_told_apart_by_their_fields() -> None:
    from typing import NamedTuple

    def of(fields: list[tuple[str, Any]]) -> Any:
        made = NamedTuple("Point", fields)                                    # type: ignore[misc]
        return program("Point(x, x * 2).low", Point=made)

    one, other = of([("low", Any), ("high", Any)]), of([("high", Any), ("low", Any)])
    assert freeze(one).fingerprint != freeze(other).fingerprint


@pytest.mark.parametrize("field", ["bias", "other"])
def test_an_array_that_cannot_be_read_is_named_by_its_field(field: str) -> None:
    """Also by the call that reads a component's fields quickly."""
    good, bad = np.zeros((1, 5, 5), np.float32), np.zeros((1, 5, 5), ">f4")
    score = gk.masks.ScoreBias(bad) if field == "bias" else gk.masks.ScoreFunction(lambda s, m, n: s + bad[0, m, n])
    q = np.zeros((1, 1, 5, 16), np.float16)
    with gk.emulate():
        gk.attention(q, q, q, score=gk.masks.ScoreBias(good))
        with pytest.raises(ValueError, match=r"\w+\.?.* has dtype >f4, in another byte order") as told:
            gk.attention(q, q, q, score=score)
    assert not str(told.value).startswith(" ")


@pytest.mark.parametrize("dtype", [np.float32(2), np.zeros(3), np.int8(1)], ids=["float", "array", "int"])
def test_a_number_is_no_dtype(dtype: Any) -> None:
    """NumPy takes the dtype of any number for it."""
    with pytest.raises(TypeError, match="the dtype of a number is needed"):
        layouts.ColMajor(dtype)
