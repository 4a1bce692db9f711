"""Components that are kept: one that comes again is found by what it is now, not by what it was."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import components
from gemmkit import components as kept
from gemmkit.components import freeze
from gemmkit.epilogues import Elementwise, Fold, Residual, Scale

FACTOR = np.float32(2)


def doubled(x: Any) -> Any:
    return x * 2


def tripled(x: Any) -> Any:
    return x * 3


def scaled(x: Any) -> Any:
    return x * FACTOR


def seen(component: Any) -> tuple[Any, ...]:
    """What a kernel gets of a component, which must be what freezing it anew says."""
    found, anew = kept.frozen(component), freeze(component)
    assert found.fingerprint == anew.fingerprint and found.leaves == anew.leaves and found.kind is anew.kind
    return found.fingerprint, *found.leaves


def test_a_component_that_comes_again_is_not_frozen_again() -> None:
    epilogue = Elementwise(doubled)
    assert kept.frozen(epilogue) is kept.frozen(epilogue)
    assert kept.frozen(Elementwise(doubled)) is not kept.frozen(epilogue)


def test_replaced_code_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    epilogue = Elementwise(doubled)
    before = [seen(epilogue) for _ in range(3)]
    monkeypatch.setattr(doubled, "__code__", tripled.__code__)
    after = [seen(epilogue) for _ in range(3)]
    assert len({*before}) == len({*after}) == 1 and before[0] != after[0]


def test_a_captured_number_bound_anew_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    epilogue = Elementwise(scaled)
    before = [seen(epilogue) for _ in range(3)]
    monkeypatch.setitem(globals(), "FACTOR", np.float32(5))
    after = [seen(epilogue) for _ in range(3)]
    assert before[2] != after[2] and after[0] == after[2]


def test_a_class_constant_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Shifted(gk.epilogues.Epilogue):
        BY = 1

        def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
            return values

    epilogue = Shifted()
    before = [seen(epilogue) for _ in range(3)]
    monkeypatch.setattr(Shifted, "BY", 2)
    assert seen(epilogue) != before[0] and seen(epilogue) == seen(epilogue)


def test_an_array_that_lies_elsewhere_by_now() -> None:
    """`numpy.ndarray.resize` moves an array in place, as `tensor.data = ...` does."""
    array = np.zeros((4, 4), "f4")
    epilogue = Residual(array)
    before = [seen(epilogue) for _ in range(3)]
    array.resize((512, 4), refcheck=False)
    after = [seen(epilogue) for _ in range(3)]
    assert before[0] == before[2] and after[0] == after[2] and before[2] != after[0]


def test_copies_and_replacements_are_components_of_their_own() -> None:
    from dataclasses import replace

    scale = Scale(2.0)
    kept.frozen(scale), kept.frozen(scale)
    assert seen(replace(scale, by=3.0)) != seen(scale)


def test_what_dies_is_forgotten_with_its_arrays() -> None:
    array = np.zeros((4, 4), "f4")
    held, epilogue = weakref.ref(array), Residual(array)
    kept.frozen(epilogue), kept.frozen(epilogue)
    count = len(kept._kept)
    del array, epilogue
    gc.collect()
    assert held() is None and len(kept._kept) < count


def test_a_gated_unit_keeps_the_fold_of_a_plain_function_alone() -> None:
    """One with a closure is made anew in every call, and would fill the memory."""
    from gemmkit.functions.glu import _known_fold

    x, w = np.ones((2, 3), "f4"), np.ones((3, 2), "f4")
    _known_fold.cache_clear()
    gain = 2.0
    with gk.emulate():
        for activation in (gk.activations.silu, lambda z: z * gain):
            for _ in range(2):
                gk.glu(x, w, w, activation)
    assert _known_fold.cache_info().currsize == 1 and _known_fold.cache_info().hits == 1
    assert isinstance(_known_fold(gk.activations.silu), Fold)


def test_components_of_constants_alone_are_frozen_once() -> None:
    """Not what holds an array or a number, or code of the user's; and nothing is known of one that has gone."""
    layout = gk.layouts.RowMajor("float16")
    assert freeze(layout) is freeze(layout) and freeze(layout) is not freeze(gk.layouts.RowMajor("float16"))
    for other in (gk.epilogues.Scale(2.0), gk.epilogues.Bias(np.ones(4, np.float32)),
                  gk.epilogues.Elementwise(lambda x: x * 2)):
        assert freeze(other) is not freeze(other)
    at = id(layout)
    del layout
    assert at not in components._parts
