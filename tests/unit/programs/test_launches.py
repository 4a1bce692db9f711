"""What a plan's launch puts into its kernels' values, without a GPU: addresses of the caller's arrays, and of those of shares,
which follow from one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.plans.launch import Cache
from gemmkit.programs import plan as module
from gemmkit.programs.launches import BEGIN, bits_of
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.tensor_maps import Encoder
from tests.support import programs as listing
from tests.support.launches import preparing
from tests.support.on_device import OnDevice

AT = 5 * 2**30
F32 = np.float32


class Bound:
    """Stands for a kernel that is loaded: it keeps what it is launched with."""

    def __init__(self, kernel: Launchable, log: list[Any]):
        self.kernel = kernel
        self.prepare = preparing(lambda *launched: log.append((self, *launched)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    log: list[Any] = []
    monkeypatch.setattr("gemmkit.plans.launch._launches", Cache())
    monkeypatch.setattr("gemmkit.runtime.device.available", lambda: False)
    monkeypatch.setattr(Launchable, "bind", lambda self: Bound(self, log))
    monkeypatch.setattr(Encoder, "__call__", lambda self, address: address.to_bytes(128, "little"))
    monkeypatch.setattr(module, "stream_memory", lambda ordinal, stream, nbytes: log.append(nbytes) or AT)
    yield log


def arrays(*extents: int) -> tuple[OnDevice, ...]:
    return tuple(OnDevice(np.zeros((8, extent, 128), np.float16)) for extent in extents)


def test_addresses_of_shares_follow_from_one(launched: list[Any]) -> None:
    given = listing.attention.bound((*arrays(16, 32768, 32768, 16), 0.09), {})
    plan = listing.attention.plan(*given.values())
    plan.run(given, stream=7)
    nbytes, first, second = launched
    assert plan.mapping.splits == 16 and nbytes == 4 * 16 * 8 * 16 * (128 + 2)
    pointers = tuple(describe(given[name], name).pointer for name in "qkvo")
    for (bound, stream, addresses, values), kernel in zip((first, second), plan.kernels, strict=True):
        assert bound.kernel is kernel.launchable and stream == 7 and addresses == (*pointers, AT, bits_of(0.09))
        expected = list(kernel.launchable.values)
        for n, (name, tensor_map) in enumerate(kernel.taken, 1):
            at = pointers["qkvo".index(name)] if name in "qkvo" else AT + kernel.infos[name].pointer - BEGIN
            slot = kernel.launchable.slot(n)
            assert slot is not None
            expected[slot] = at.to_bytes(128, "little") if tensor_map is not None else at
        assert values == expected
    assert len(plan.launches.kernels[1].puts) == 3 * 16 + 1
    assert F32(0.09) in first[3] and F32(0.09) not in second[3]                     # a number of the rounds alone


def test_another_plan_of_a_kind_loads_nothing(launched: list[Any]) -> None:
    """Its own scalars and arrays are launched."""
    held, given = [], arrays(100, 300, 300, 100)
    for scale in (0.25, 0.5):
        listing.attention(*given, scale, stream=0, mapping=gk.Mapping({"n": 64}, splits=1))
        (launch,) = launched
        held.append(launch)
        launched.clear()
    (one, _, _, values), (other, _, _, changed) = held
    assert one is other and held[0][2] == (*(describe(x, "x").pointer for x in given), 0, bits_of(0.25))
    assert [(x, y) for x, y in zip(values, changed, strict=True) if x != y] == [(0.25, 0.5)]


def test_arrays_of_another_kind_and_of_nothing(launched: list[Any]) -> None:
    given = listing.attention.bound((*arrays(16, 4096, 4096, 16), 0.09), {})
    plan = listing.attention.plan(*given.values())
    with pytest.raises(ValueError, match="k is another kind of array"):
        plan.run({**given, "k": arrays(4095)[0]})
    nothing = listing.attention.bound((*arrays(0, 4096, 4096, 0), 0.09), {})
    listing.attention.plan(*nothing.values()).run(nothing)
    assert launched == []


def test_numbers_are_a_launchs_own(launched: list[Any]) -> None:
    """As bits, so that -0.0 and NaN are told from what was brought before; and one that is left out is the plan's."""
    arguments = given(np.zeros(70, F32))
    plan = listing.biased.plan(*arguments.values())
    for alpha in (0.5, 2.0, -1.0, 0.0, -0.0, np.float64(3.0), 4):
        plan.run({**arguments, "alpha": alpha})
    plan.run({name: x for name, x in arguments.items() if name != "alpha"})
    (slot,) = (n for n, x in enumerate(plan.launchable.values) if isinstance(x, float))
    brought = [values[slot] for _, _, _, values in launched]
    assert brought == [0.5, 2.0, -1.0, 0.0, 0.0, 3.0, 4.0, -0.25]
    assert [math.copysign(1.0, x) for x in brought[3:5]] == [1.0, -1.0]


def given(bias: Any) -> dict[str, Any]:
    held = [OnDevice(x) for x in (np.zeros((70, 72), np.float16), np.zeros((72, 80), np.float16), np.zeros(80, F32), bias)]
    return listing.biased.bound((*held, OnDevice(np.zeros((70, 80), np.float16))), dict(alpha=-0.25))
