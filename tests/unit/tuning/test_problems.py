"""`choose`: what is given, then what is tuned, then the first candidate that can be taken."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from gemmkit.lang.errors import ConfigError
from gemmkit.runtime.device import H100
from gemmkit.tuning import store
from gemmkit.tuning.problems import Choice, MappingProblem, choose


class Held:
    """What a spec is made for."""


class Halving(MappingProblem):
    """Mappings are numbers, of which those above a limit do not fit."""

    def __init__(self, limit: int, tuned: bool = False):
        self.limit, self.asked, self.held = limit, list[int](), Held()
        if tuned:
            self.key = lambda: "halving"

    read = staticmethod(int)

    def candidates(self, device: Any) -> Iterator[int]:
        for n in (64, 32, 16, 8):
            self.asked.append(n)
            yield n

    def specialise(self, mapping: int, device: Any) -> Choice:
        held = self.held                               # (a frame of the error's)
        if mapping > self.limit:
            raise ConfigError(f"{mapping} of {type(held).__name__} do not fit {device.name}")
        return Choice(("spec", mapping))


def test_the_first_candidate_that_fits_is_taken_and_no_further_one_is_asked_for() -> None:
    problem = Halving(20)
    assert choose(problem, H100) == (("spec", 16), "model", False)
    assert problem.asked == [64, 32, 16]


def test_a_mapping_that_is_given_is_taken_or_refused() -> None:
    problem = Halving(20, tuned=True)
    assert choose(problem, H100, 5).spec == ("spec", 5)
    with pytest.raises(ConfigError, match="64 of Held do not fit"):
        choose(problem, H100, 64)
    assert not problem.asked


def test_where_nothing_fits_the_last_reason_is_said() -> None:
    with pytest.raises(ConfigError, match="^8 of Held do not fit"):
        choose(Halving(7), H100)


def test_a_tuned_mapping_stands_before_candidates_and_one_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"halving": "12"}
    monkeypatch.setattr(store, "find", lambda device, key, read: read(kept[key()]))
    problem = Halving(20, tuned=True)
    assert choose(problem, H100) == (("spec", 12), "tuned", False) and not problem.asked
    told: list[Any] = []
    monkeypatch.setattr(store, "refused", lambda device, mapping, error: told.append((mapping, str(error))))
    kept["halving"] = "50"
    assert choose(problem, H100).spec == ("spec", 16)
    assert told == [(50, f"50 of Held do not fit {H100.name}")]


def test_what_was_refused_keeps_nothing_alive() -> None:
    problem = Halving(20)
    seen = weakref.ref(problem.held)
    gc.disable()
    try:
        choose(problem, H100)
        del problem
        assert seen() is None
    finally:
        gc.enable()
