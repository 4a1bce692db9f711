"""Plans of programs: which calls find an earlier one, what is derived again, and what a launch puts into its kernels' values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.plans.launch import forget
from gemmkit.programs import calls, launches
from gemmkit.programs.launches import BEGIN
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100, assumed
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.tensor_maps import Encoder
from tests.support import chains
from tests.support import programs as listing
from tests.support.checks import named_functions_run
from tests.support.launches import preparing
from tests.support.on_device import OnDevice
from tests.support.patches import Seeded, Set

# ==========================================================================================================================
# Plans of calls are kept: what finds an earlier one, and what is derived anew.

F16 = np.float16
BF16 = ml_dtypes.bfloat16
SLOPE = 2.0


@pytest.fixture
def device() -> Iterator[None]:
    """Host arrays are planned for a GPU that need not be here, and not run."""
    calls.plans.clear()
    with assumed(H100):
        yield


def heads(rows: int = 70, keys: int = 90, dtype: Any = F16) -> list[np.ndarray]:
    return [np.zeros((2, extent, 64), dtype) for extent in (rows, keys, keys, rows)]


def planned(*arrays: Any, mapping: gk.Mapping | None = None, program: gk.Program = listing.attention, **more: Any) -> Any:
    return calls.plan_of_call(program, program.bound(arrays, {"scale": 0.125, **more} if program is listing.attention else more),
                                   mapping)


def helped(s: Any) -> Any:
    return SLOPE * s


def sloped(s: Any) -> Any:
    return helped(s)


@pytest.mark.usefixtures("device")
def test_a_call_like_an_earlier_one_finds_its_plan() -> None:
    first = planned(*heads(), visible=chains.causal, mapping=gk.Mapping({"n": 64}))
    assert planned(*heads(), visible=chains.causal, mapping=gk.Mapping({"n": 64})) is first
    assert named_functions_run(lambda: planned(*heads(), visible=chains.causal, mapping=gk.Mapping({"n": 64}))) <= 60  # deriving: 14,000


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("change", ["rows", "keys", "dtype", "strides", "alignment", "scale", "mapping", "function", "no function", "device"])
def test_what_a_plan_depends_on_is_another_plan(change: str) -> None:
    arrays, more, mapping = heads(), dict(scale=0.125, visible=chains.causal), gk.Mapping({"n": 64})
    first = planned(*arrays, mapping=mapping, **more)
    if change in ("rows", "keys"):
        arrays = heads(**{change: 91})
    elif change == "dtype":
        arrays = heads(dtype=BF16)
    elif change == "strides":
        arrays[1] = np.zeros((2, 90, 128), F16)[:, :, :64]
    elif change == "alignment":
        arrays[3] = np.zeros(2 * 70 * 64 + 1, F16)[1:].reshape(2, 70, 64)
    elif change == "scale":
        more["scale"] = -0.25                          # which maxima of scores depend on
    elif change == "mapping":
        mapping = gk.Mapping({"n": 32})
    elif change == "function":
        more["visible"] = chains.window
    elif change == "no function":
        del more["visible"]
    other = dataclasses.replace(H100, sm_count=7) if change == "device" else H100
    with assumed(other):
        second = planned(*arrays, mapping=mapping, **more)
        assert second is not first and planned(*arrays, mapping=mapping, **more) is second
    assert second.call.numbers["scale"] == more["scale"] and second.device == other


@gk.program
def scaled_rows(x: Any, y: Any, factor: float, power: int = 1) -> None:
    for m in gp.parallel(x.rows):
        y[m] = factor * power * x[m]


@gk.program
def weighted(q: Any, k: Any, v: Any, o: Any, scale: float, factor: float) -> None:
    """A number of the rounds, and one behind them."""
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            out += (q[m] @ k[n].T / scale).astype(v.dtype) @ v[n]
        o[m] = factor * out


def halves(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(F16)


CALLS = {"rows": (scaled_rows, lambda: [halves(5, 24), np.full((5, 24), np.nan, np.float32)], dict(factor=0.5), dict(factor=3)),
         "tiles": (listing.biased, lambda: [halves(20, 24), halves(24, 16), halves(16), halves(20), np.full((20, 16), np.nan, F16)],
                   dict(alpha=-1.0), dict(alpha=np.float32(2.5))),
         "chains": (weighted, lambda: [halves(20, 64), halves(40, 64), halves(40, 64), np.full((20, 64), np.nan, F16)],
                    dict(scale=64.0, factor=-1.0), dict(scale=32.0, factor=2.0))}


@pytest.mark.kin(1)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name, mapping", [("rows", {}), ("tiles", {}), ("tiles", dict(kernel="multistage")), ("chains", {}),
                                           ("chains", dict(splits=2, blocks={"n": 16})), ("chains", dict(kernel="multistage"))], ids=str)
def test_a_plan_computes_with_a_call_s_numbers(name: str, mapping: dict[str, Any]) -> None:
    program, made, first, then = CALLS[name]
    arrays = made()
    plan = program.plan(*arrays, mapping=gk.Mapping(**mapping), **first)
    for more in (then, first):
        wanted = program.reference(*arrays, **more)
        with gk.emulate():
            plan.run({**program.bound(tuple(arrays), {}), **more} if name == "tiles" else dict(program.bound(tuple(arrays), more)))
        chains.check_close([arrays[-1]], wanted, lambda got: 2e-3)


@pytest.mark.usefixtures("device")
def test_a_plan_refuses_another_text_s_call() -> None:
    """What is in its text, and what its text depends on."""
    arrays = [halves(5, 24), np.zeros((5, 24), np.float32)]
    plan, given = scaled_rows.plan(*arrays, 0.5), scaled_rows.bound((*arrays, 0.5), {})
    with pytest.raises(ValueError, match=r"power is 2, but the plan was made for 1, which is part of its text"):
        plan.run({**given, "power": 2})
    with pytest.raises(ValueError, match=r"factor is 0.0, but the plan was made for a positive number \(0.5\)"):
        plan.run({**given, "factor": 0.0})
    with pytest.raises(TypeError, match="factor=None: a number is needed"):
        plan.run({**given, "factor": None})
    with pytest.raises(ValueError, match="factor=1e[+]39: numbers of a kernel are float32, up to 3.4e[+]38"):
        plan.run({**given, "factor": 1e39})
    with pytest.raises(ValueError, match="factor=-1e[+]39"):
        scaled_rows.plan(*arrays, -1e39)
    heads_of = heads()
    causal = listing.attention.plan(*heads_of, 0.125, visible=chains.causal)
    with pytest.raises(ValueError, match="visible is .*window.*, but the plan was made for.*causal"):
        causal.run(listing.attention.bound((*heads_of, 0.125), dict(visible=chains.window)))


@pytest.mark.usefixtures("device")
def test_a_call_with_another_number_derives_nothing() -> None:
    first = planned(*heads(), visible=chains.causal)
    assert planned(*heads(), visible=chains.causal, scale=0.25) is first and planned(*heads(), visible=chains.causal, scale=0.0) is not first


@pytest.mark.kin(1)
@pytest.mark.usefixtures("device")
def test_code_that_changes_is_derived_anew(rebound: Set) -> None:
    """A constant and a helper that a score names, and what it captured."""
    texts = [planned(*heads(), score=sloped).text]
    rebound(SLOPE=3.0)
    texts.append(planned(*heads(), score=sloped).text)
    rebound(helped=lambda s: gp.tanh(s))
    texts.append(planned(*heads(), score=sloped).text)
    assert len(set(texts)) == 3
    cap = 5.0

    def capped(s: Any) -> Any:
        return cap * gp.tanh(s / cap)

    found = planned(*heads(), score=capped)
    assert planned(*heads(), score=capped) is found
    cap = 7.0
    assert planned(*heads(), score=capped).text not in (*texts, found.text)


@pytest.mark.usefixtures("device")
def test_a_program_s_own_code_is_looked_at(rebound: Set) -> None:
    @gk.program
    def scaled(a: Any, b: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, b.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ b[k, n]
            d[m, n] = SLOPE * acc

    arrays = [np.zeros((64, 64), F16) for _ in range(3)]
    first = planned(*arrays, program=scaled)
    assert planned(*arrays, program=scaled) is first
    rebound(SLOPE=3.0)
    assert planned(*arrays, program=scaled).text != first.text


@pytest.mark.usefixtures("device")
def test_what_can_change_in_place_is_not_kept() -> None:
    slopes = [2.0]

    def by_list(s: Any) -> Any:
        return slopes[0] * s

    class Called:
        slope = 2.0

        def __call__(self, s: Any) -> Any:
            return self.slope * s

    called = Called()
    texts = [planned(*heads(), score=score).text for score in (by_list, called)]
    slopes[0] = called.slope = 3.0
    assert all(planned(*heads(), score=score).text != text for score, text in zip((by_list, called), texts))
    assert not calls.plans


@pytest.mark.usefixtures("device")
def test_tuned_mappings_and_many_calls_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(*heads())
    forget()
    assert planned(*heads()) is not first
    monkeypatch.setattr(calls.plans, "limit", 3)
    for rows in range(1, 9):
        planned(*heads(rows))
        assert len(calls.plans) <= 3


@pytest.mark.usefixtures("device")
def test_the_emulator_derives_anew() -> None:
    arrays = [np.ones((64, 64), F16) for _ in range(3)]
    with gk.emulate():
        listing.gemm(*arrays)
    assert not calls.plans and np.all(arrays[2] == 64)
    for stream in (None, 77):
        with pytest.raises(TypeError, match="emulate its kernel"):
            listing.gemm(*arrays, stream=stream)


@pytest.mark.usefixtures("device")
def test_arrays_that_share_memory_are_refused_by_a_plan_too() -> None:
    """Where arrays lie is no part of a kind. (A plan that was there was not asked about it.)"""
    whole = np.ones((3, 64, 64), F16)
    a, b, d = whole
    plan = listing.gemm.plan(a, b, d)
    with pytest.raises(TypeError, match="emulate its kernel"):
        listing.gemm(a, b, d)
    assert len(calls.plans) == 1
    with gk.emulate():
        plan.run(dict(a=a, b=a, d=d))                  # operands may be one array
    assert np.all(d == 64)
    for given in (dict(a=a, b=b, d=b), dict(a=d, b=b, d=d), dict(a=a, b=b, d=whole.reshape(-1)[4096 + 64:][:4096].reshape(64, 64))):
        with pytest.raises(ValueError, match="share memory, and one of them is a result"):
            listing.gemm(*given.values())
        with gk.emulate(), pytest.raises(ValueError, match="share memory, and one of them is a result"):
            plan.run(given)
    assert len(calls.plans) == 1
    two = np.ones((64, 128), F16)
    left, right = listing.gemm.plan(a, two[:, :64], two[:, 64:]), dict(a=a, b=two[:, :64], d=two[:, 64:])      # side by side
    with gk.emulate():
        left.run(right)


# ==========================================================================================================================
# What a plan's launch puts into its kernels' values, without a GPU: addresses of the caller's arrays, and of those of shares,
# which follow from one.

AT = 5 * 2**30
F32 = np.float32


class Bound:
    """Stands for a kernel that is loaded: it keeps what it is launched with."""

    def __init__(self, kernel: Launchable, log: list[Any]):
        self.kernel = kernel
        self.prepare = preparing(lambda *launched: log.append((self, *launched)))


@pytest.fixture
def launched(own_launches: None, replaced: Seeded, gpus: Set) -> Iterator[list[Any]]:
    log: list[Any] = []
    gpus(available=False)
    replaced(Launchable, "bind", lambda self: Bound(self, log))
    replaced(Encoder, "__call__", lambda self, address: address.to_bytes(128, "little"))
    replaced(launches, "stream_memory", lambda ordinal, stream, nbytes, role: log.append(nbytes) or AT)
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
        assert bound.kernel is kernel.launchable and stream == 7 and addresses == (*pointers, AT, 0.09)
        expected = list(kernel.launchable.values)
        for n, (name, tensor_map) in enumerate(kernel.taken, 1):
            at = pointers["qkvo".index(name)] if name in "qkvo" else AT + kernel.infos[name].pointer - BEGIN
            slot = kernel.launchable.slot(n)
            assert slot is not None
            expected[slot] = at.to_bytes(128, "little") if tensor_map is not None else at
        assert [np.float32(x) if isinstance(x, float) else x for x in values] == expected
    assert len(plan.launches.kernels[1].puts) == 3 + 1
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
    assert one is other and held[0][2] == (*(describe(x, "x").pointer for x in given), 0, 0.25)
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
