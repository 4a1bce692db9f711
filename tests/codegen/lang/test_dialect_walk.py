"""What the dialect looks at: every component, and every function once; and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.kernels.spec import Condition
from gemmkit.lang import source
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.codegen.lang.test_dialect import TINY, doubled, emulated, kernel
from tests.support.checks import named_functions_run

SQUARE = np.ones((16, 16), np.float32)


@dataclass(frozen=True)
class Failing(layouts.Layout):
    def element(self, data, i, j, shape):
        return self.at(data, i, j)

    def at(self, data, i, j):
        return [data[i, j]][0]            # IN A METHOD

    @property
    def vector_axis(self) -> int | None:
        return [None][0]                  # Python's

    def extents(self, array):
        if len(array.shape) != 2:
            raise ValueError("a matrix is needed")
        return tuple(list(array.shape))


@dataclass(frozen=True)
class Storing(layouts.RowMajor):
    def store_element(self, data, i, j, value, shape):
        data[i, j] = value if value > 0 else np.exp(value)     # IN STORE


@dataclass(frozen=True)
class Silent(epilogues.Epilogue):
    def __call__(self, x, m, n):
        x + 1                             # NO VALUE


@dataclass(frozen=True)
class Finishing(epilogues.Epilogue):
    def finish(self, values, tile, shape):
        return tuple([x for x in values])  # IN FINISH


@dataclass(frozen=True)
class Multiplying(operators.FPUOp):
    def combine(self, c, product):
        if product > 0:                   # IN COMBINE
            return c + product


@dataclass(frozen=True)
class Sometimes(Condition):
    def __call__(self, m, n, k):
        return k in {0, 16}               # IN CONDITION


@dataclass(frozen=True)
class Inner(gk.Component):
    def of(self, x):
        try:
            return x
        finally:
            x = 0                         # IN A FIELD


@dataclass(frozen=True)
class Outer(transforms.Transform):
    inner: Inner = Inner()

    def __call__(self, x):
        return self.inner.of(x)


COMPONENTS = {
    "IN A METHOD": dict(global_a_layout=Failing("float32")),
    "IN STORE": dict(global_d_layout=Storing("float32")),
    "NO VALUE": dict(epilogue=epilogues.ReLU() | Silent()),
    "IN FINISH": dict(epilogue=Finishing()),
    "IN CONDITION": dict(condition=Sometimes()),
    "IN A FIELD": dict(transform_global_to_shared_a=Outer()),
    "MASK": dict(epilogue=epilogues.Where(lambda m, n: any((m, n)), 0.0)),  # MASK
}


@pytest.mark.parametrize("marker", COMPONENTS)
def test_every_component_is_looked_at(marker: str) -> None:
    components: dict[str, Any] = COMPONENTS[marker]
    for world in (emulated, kernel):
        with pytest.raises(gk.ComponentError) as caught:
            world(None, **components)
        lines = str(caught.value).splitlines()
        assert f'File "{__file__}"' in lines[1] and lines[2].endswith(f"# {marker}"), str(caught.value)


def test_an_operator_is_looked_at() -> None:
    conf = gk.get_config(operator=Multiplying(M=16, N=16), global_a_layout=layouts.RowMajor("float32"), device=H100)
    with pytest.raises(gk.ComponentError, match="if product > 0:"):
        ahead.compile_config(conf, device=H100)
    with pytest.raises(gk.ComponentError, match="if product > 0:"), gk.emulate():
        gk.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), conf=conf)


@dataclass(frozen=True)
class Reading(epilogues.Epilogue):
    """Its `__call__` is never called: that of a component that works on tiles may say so."""

    def __call__(self, x, m, n):
        raise TypeError("Reading works on tiles")

    def finish(self, values, tile, shape):
        return values

    @cached_property
    def names(self) -> list[str]:
        return [f"{x}" for x in "ab"]

    def check(self, M, N):
        try:
            assert self.names
        except AssertionError:
            raise ValueError("no names") from None


def test_host_methods_are_python() -> None:
    assert (emulated(None, epilogue=Reading()) == 2).all()      # type: ignore[arg-type]


def later(x: Any) -> Any:
    return x


def test_a_name_bound_anew_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def calling(x: Any) -> Any:
        return later(x)

    assert (emulated(calling) == 2).all()
    monkeypatch.setitem(globals(), "later", np.exp)
    for world in (emulated, kernel):
        with pytest.raises(gk.ComponentError, match="write math.exp"):
            world(calling)


def test_what_it_costs() -> None:
    """A second look at a spec reads no code: so many functions are a tenth of a millisecond."""
    conf = gk.get_config(global_a_layout=layouts.RowMajor("float32"),
                         epilogue=epilogues.Elementwise(lambda x: doubled(x)), **TINY)
    spec = conf.spec()
    source.check(spec)
    assert named_functions_run(lambda: source.check(spec)) <= 400
