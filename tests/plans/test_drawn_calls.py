"""Pairs of calls that are drawn: the second reaches the driver as it does without the first, however known that is."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.known_calls import WORLDS, OnDevice, changed, drawn, planned

COUNT = 1200                           # pairs of each library; `make test` draws a part of them


def draws(request: pytest.FixtureRequest) -> range:
    return range(COUNT // 8 if request.config.getoption("--sample") else COUNT)


@pytest.mark.parametrize("library", WORLDS)
def test_a_second_call_is_what_it_is_alone(library: str, request: pytest.FixtureRequest) -> None:
    if library == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    with WORLDS[library]() as world:
        seen = compared(world, [f"{library} {seed}" for seed in draws(request)])
    assert seen["result"] > 30 and seen["ValueError"] > 10, seen


@pytest.mark.gpu
def test_a_second_call_computes_what_it_does_alone(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("torch")
    assert compared(OnDevice(), [f"gpu {seed}" for seed in draws(request)[::6]])["result"] > 5


def compared(world: Any, seeds: Iterable[str]) -> Counter[str]:
    """How many second calls ended how. Each is compared with what it is without the first."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        of = random.Random(seed)
        first = drawn(of)
        how, second = changed(first, of, world.is_torch)
        world.forget()
        plan = planned(first, world.made)
        found = [world.outcome(first, plan) for _ in range(3)]
        assert found[0] == found[1] == found[2], (seed, first)
        assert found[0][0][0] == "result" and found[0][1], (seed, first, found[0][0])
        after, again, back = (world.outcome(one, plan) for one in (second, second, first))
        world.forget()
        alone = world.outcome(second, planned(first, world.made))
        assert after == again == alone, (seed, how, first, second, after[0], again[0], alone[0])
        assert back == found[0], (seed, how, first, second, back[0], found[0][0])
        seen[after[0][0]] += 1
    return seen
