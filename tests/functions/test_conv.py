"""Convolutions and their gradients against loops over taps in float64; values are small whole numbers, so that results are
exact and right or wrong."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import Bias, Elementwise, ReLU
from gemmkit.functions.conv import Convolution, parameters
from gemmkit.layouts import ColMajor, RowMajor, Sliding
from gemmkit.operators import WGMMAOp
from gemmkit.plans import ahead
from gemmkit.plans.plan import Plan
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.machines import BF16, on_machines, poison, turned, whole

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
LAYOUTS = {1: ("NWC", "NCW"), 2: ("NHWC", "NCHW"), 3: ("NDHWC", "NCDHW")}


# -- the reference ----------------------------------------------------------------------------------------------------

def windows(x: np.ndarray, tap: tuple[int, ...], how: Convolution, positions: tuple[int, ...]) -> np.ndarray:
    """What each position sees at a tap, of a padded array (N, ..., C): a view."""
    return x[(slice(None), *(slice(t * dilation, t * dilation + (count - 1) * stride + 1, stride) for t, dilation, stride, count
                             in zip(tap, how.dilation, how.stride, positions)))]


def padded(x: np.ndarray, how: Convolution) -> np.ndarray:
    return np.pad(x.astype(F64), ((0, 0), *how.padding, (0, 0)))


def grouped(x: np.ndarray, g: int, groups: int, axis: int = -1) -> np.ndarray:
    return np.split(x, groups, axis)[g]


def forward(x: np.ndarray, w: np.ndarray, how: Convolution) -> np.ndarray:
    """(N, ..., C) and (K, ..., C / groups), in float64."""
    taps, padded_x = w.shape[1:-1], padded(x, how)
    positions = how.positions(x.shape[1:-1], taps)
    out = np.zeros((x.shape[0], *positions, w.shape[0]))
    for g, tap in itertools.product(range(how.groups), np.ndindex(*taps)):
        grouped(out, g, how.groups)[...] += (windows(grouped(padded_x, g, how.groups), tap, how, positions)
                                             @ grouped(w, g, how.groups, 0)[(slice(None), *tap)].astype(F64).T)
    return out


def of_input(shape: tuple[int, ...], w: np.ndarray, gradient: np.ndarray, how: Convolution) -> np.ndarray:
    out = padded(np.zeros(shape), how)
    for g, tap in itertools.product(range(how.groups), np.ndindex(*w.shape[1:-1])):
        windows(grouped(out, g, how.groups), tap, how, gradient.shape[1:-1])[...] += (
            grouped(gradient, g, how.groups).astype(F64) @ grouped(w, g, how.groups, 0)[(slice(None), *tap)].astype(F64))
    return out[(slice(None), *(slice(before, before + extent) for (before, _), extent in zip(how.padding, shape[1:-1])))]


def of_weights(x: np.ndarray, shape: tuple[int, ...], gradient: np.ndarray, how: Convolution) -> np.ndarray:
    out, padded_x = np.zeros(shape), padded(x, how)
    for g, tap in itertools.product(range(how.groups), np.ndindex(*shape[1:-1])):
        seen = windows(grouped(padded_x, g, how.groups), tap, how, gradient.shape[1:-1])
        grouped(out, g, how.groups, 0)[(slice(None), *tap)] = np.tensordot(
            grouped(gradient, g, how.groups).astype(F64), seen, (range(x.ndim - 1),) * 2)
    return out


# -- calls ------------------------------------------------------------------------------------------------------------

def ordered(x: np.ndarray, how: Convolution) -> np.ndarray:
    """An array (N, ..., C) in the call's order of dimensions, as it lies."""
    return x if how.is_last else np.moveaxis(x, -1, 1)


class Case:
    """A convolution of drawn arrays (N, ..., C), and what it is called with."""

    def __init__(self, rng: np.random.Generator, x: tuple[int, ...], w: tuple[int, ...], dtype: Any = F16, word: str = "NHWC",
                 **given: Any):
        self.given = dict(given, layout=word)
        self.how = parameters("conv", *((shape if word.endswith("C") else (shape[0], shape[-1], *shape[1:-1]))
                                        for shape in (x, w)),
                              given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1),
                              given.get("groups", 1), word)
        self.x, self.w = whole(rng, x, dtype), whole(rng, w, dtype)
        positions = self.how.positions(x[1:-1], w[1:-1])
        self.gradient = whole(rng, (x[0], *positions, w[0]), dtype)

    def place(self, machine: Any, x: np.ndarray, lies: str = "as ordered") -> Any:
        """The array where the machine computes, in memory in the order of its dimensions, or with the channels last."""
        if self.how.is_last or lies == "last":
            made = machine.array(np.ascontiguousarray(x))
            return made if self.how.is_last else turned(made, 0, x.ndim - 1, *range(1, x.ndim - 1))
        return machine.array(np.ascontiguousarray(ordered(x, self.how)))

    def poisoned(self, machine: Any, shape: tuple[int, ...], dtype: Any, lies: str = "as ordered") -> Any:
        return self.place(machine, poison(shape, dtype), lies)

    def last(self, machine: Any, x: Any) -> np.ndarray:
        found = machine.numpy(x)
        return found if self.how.is_last else np.moveaxis(found, 1, -1)


def check(machine: Any, case: Case, lies: str = "as ordered", kinds: str = "fiw", dtype: Any = None) -> None:
    """All three convolutions into poisoned arrays."""
    held = case.x.dtype if dtype is None else np.dtype(dtype)
    x, w, g = (case.place(machine, value, lies) for value in (case.x, case.w, case.gradient))
    calls = {"f": lambda out: gk.conv(x, w, out=out, **case.given),
             "i": lambda out: gk.functions.conv_input_gradient(tuple(x.shape), w, g, out=out, **case.given),
             "w": lambda out: gk.functions.conv_weight_gradient(x, tuple(w.shape), g, out=out, **case.given)}
    wanted = {"f": (case.gradient.shape, lambda: forward(case.x, case.w, case.how)),
              "i": (case.x.shape, lambda: of_input(case.x.shape, case.w, case.gradient, case.how)),
              "w": (case.w.shape, lambda: of_weights(case.x, case.w.shape, case.gradient, case.how))}
    for kind in kinds:
        shape, reference = wanted[kind]
        out = case.poisoned(machine, shape, held, lies)
        with machine.session():
            assert calls[kind](out) is out
        assert np.array_equal(case.last(machine, out), reference().astype(held)), (kind, case.given)


# -- against the reference --------------------------------------------------------------------------------------------

@on_machines
@pytest.mark.parametrize("lies", ["as ordered", "last"])
@pytest.mark.parametrize("word", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_three_by_three(machine: Any, word: str, lies: str, dtype: Any, rng: np.random.Generator) -> None:
    shape = (2, 9, 7, 16) if dtype == F16 else (1, 4, 5, 8)
    check(machine, Case(rng, shape, (24, 3, 3, shape[-1]), dtype, word, padding=1), lies)


@on_machines
@pytest.mark.parametrize("stride, padding, dilation, taps", [
    (2, 1, 1, 3), (2, 0, 1, 1), (1, 0, 1, 1), (3, 2, 1, 2), (2, 3, 2, 3), (4, 1, 2, 3), ((1, 2), ((2, 0), (1, 1)), (2, 1), 3),
    (2, 0, 3, 4), (5, 0, 1, 2)])
def test_steps(machine: Any, stride: Any, padding: Any, dilation: Any, taps: int, rng: np.random.Generator) -> None:
    check(machine, Case(rng, (1, 11, 13, 8), (16, taps, taps, 8), F16, stride=stride, padding=padding, dilation=dilation))


@on_machines
@pytest.mark.parametrize("count, word", [(n, word) for n, words in LAYOUTS.items() for word in words])
def test_dimensions(machine: Any, count: int, word: str, rng: np.random.Generator) -> None:
    extents = (4, 5, 3)[:count]
    check(machine, Case(rng, (2, *extents, 8), (8, *(3, 2, 3)[:count], 8), F16, word, padding=1, stride=(1, 2, 1)[:count]))


@on_machines
@pytest.mark.parametrize("channels, filters", [(3, 5), (1, 1), (20, 36), (32, 8), (64, 64), (96, 40), (100, 4)])
def test_channels(machine: Any, channels: int, filters: int, rng: np.random.Generator) -> None:
    check(machine, Case(rng, (1, 6, 5, channels), (filters, 3, 3, channels), F16, padding=1))


@on_machines
@pytest.mark.parametrize("groups, channels, filters", [(2, 16, 8), (3, 24, 24), (8, 8, 8), (4, 4, 8)])
@pytest.mark.parametrize("word", ["NHWC", "NCHW"])
def test_groups(machine: Any, groups: int, channels: int, filters: int, word: str, rng: np.random.Generator) -> None:
    check(machine, Case(rng, (1, 4, 5, channels), (filters, 3, 3, channels // groups), F16, word, padding=1, groups=groups,
                        stride=2))


@on_machines
@pytest.mark.parametrize("seed", range(6))
def test_drawn(machine: Any, seed: int) -> None:
    """Strides, paddings, dilations, extents and layouts at random."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 3))
    taps, stride, dilation = (tuple(map(int, rng.integers(1, 4, count))) for _ in range(3))
    padding = tuple((int(a), int(b)) for a, b in rng.integers(0, 3, (count, 2)))
    extents = tuple(max(1, (t - 1) * d + 1 - sum(p)) + int(rng.integers(0, 4)) for t, d, p in zip(taps, dilation, padding))
    channels, filters = (int(rng.choice([1, 2, 5, 8, 16, 24])) for _ in range(2))
    case = Case(rng, (int(rng.integers(1, 3)), *extents, channels), (filters, *taps, channels), rng.choice([F16, F32]),
                str(rng.choice(LAYOUTS[count])), stride=stride, padding=padding, dilation=dilation)
    check(machine, case, str(rng.choice(["as ordered", "last"])))


@on_machines
@pytest.mark.parametrize("dtype, held", [(np.dtype("i1"), np.dtype("i4")), (BF16, BF16), (F16, F32), (F32, F64)], ids=str)
def test_dtypes(machine: Any, dtype: Any, held: Any, rng: np.random.Generator) -> None:
    check(machine, Case(rng, (1, 4, 3, 16), (8, 3, 3, 16), dtype, padding=1), dtype=held)


@on_machines
def test_views(machine: Any, rng: np.random.Generator) -> None:
    """Slices of larger arrays, of images that begin at no multiple of 16 bytes, with results in slices, too."""
    how = parameters("conv", (2, 6, 7, 8), (16, 3, 3, 8), 1, 1, 1, 1, "NHWC")
    x, w = whole(rng, (4, 8, 9, 11), F16), whole(rng, (16, 3, 5, 9), F16)
    out = machine.array(poison((3, 6, 8, 20), F16))
    seen = out[1:, :, 1:, 3:19]
    with machine.session():
        gk.conv(machine.array(x)[1:3, 2:, 1:8, 3:], machine.array(w)[:, :, 1:4, 1:], padding=1, out=seen)
    found = machine.numpy(out)
    assert np.array_equal(found[1:, :, 1:, 3:19], forward(x[1:3, 2:, 1:8, 3:], w[:, :, 1:4, 1:], how))
    found = found.copy()
    found[1:, :, 1:, 3:19] = np.nan
    assert np.isnan(found).all()


@on_machines
@pytest.mark.parametrize("stride", [1, 2])
def test_epilogues(machine: Any, stride: int, rng: np.random.Generator) -> None:
    """A bias, a residual and an activation, in one kernel; the transposed convolution, too."""
    case = Case(rng, (2, 7, 6, 16), (24, 3, 3, 16), padding=1, stride=stride)
    c, bias, of_input_bias = (whole(rng, shape, F16) for shape in (case.gradient.shape, (24,), (16,)))
    x, w, g, residual, b, of_b = map(machine.array, (case.x, case.w, case.gradient, c, bias, of_input_bias))
    with machine.session():
        d = gk.conv(x, w, residual, epilogue=Bias(b) | ReLU(), **case.given)
        e = gk.functions.conv_input_gradient(case.x.shape, w, g, x, epilogue=Bias(of_b) | Elementwise(lambda y: 2 * y),
                                             **case.given)
    assert np.array_equal(machine.numpy(d), np.maximum(forward(case.x, case.w, case.how) + c + bias.astype(F64), 0).astype(F16))
    wanted = 2 * (of_input(case.x.shape, case.w, case.gradient, case.how) + case.x + of_input_bias.astype(F64))
    assert np.array_equal(machine.numpy(e), wanted.astype(F16))


@on_machines
def test_groups_have_epilogues_of_their_own(machine: Any, rng: np.random.Generator) -> None:
    case = Case(rng, (2, 5, 6, 16), (8, 3, 3, 8), padding=1, groups=2)
    c, bias = whole(rng, case.gradient.shape, F16), whole(rng, (8,), F16)
    with machine.session():
        d = gk.conv(machine.array(case.x), machine.array(case.w), machine.array(c),
                    epilogue=Bias(machine.array(bias.reshape(2, 4))), **case.given)
    assert np.array_equal(machine.numpy(d), forward(case.x, case.w, case.how) + c + bias.astype(F64))


@on_machines
def test_infinities_stay_where_they_are(machine: Any, rng: np.random.Generator) -> None:
    """No tap too many sees an element: 0 times infinity is no zero."""
    case = Case(rng, (1, 6, 5, 16), (8, 3, 3, 16), padding=1)
    case.x[0, 2, 2, 3] = np.inf
    case.w[:] = np.abs(case.w) + 1
    with machine.session():
        d = gk.conv(machine.array(case.x), machine.array(case.w), **case.given)
    found = machine.numpy(d)
    assert [*map(tuple, np.argwhere(np.isinf(found[0, :, :, 0])))] == [*itertools.product((1, 2, 3), repeat=2)]
    assert not np.isnan(found).any()


@on_machines
def test_arrays_of_equal_shapes(machine: Any, rng: np.random.Generator) -> None:
    """Two convolutions whose arrays and products have equal shapes differ in what they see: plans and tensor maps are each
    one's own."""
    x, w = whole(rng, (2, 8, 8, 16), F16), whole(rng, (8, 3, 3, 16), F16)
    of_x, of_w = machine.array(x), machine.array(w)
    for n in (1, 2, 1, 3, 2):
        out = machine.array(poison((2, 8, 8, 8), F16))
        with machine.session():
            gk.conv(of_x, of_w, padding=n, dilation=n, out=out)
        assert np.array_equal(machine.numpy(out), forward(x, w, parameters("conv", x.shape, w.shape, 1, n, n, 1, "NHWC")))


def test_no_images(rng: np.random.Generator) -> None:
    x, w = np.zeros((0, 5, 5, 8), F16), whole(rng, (4, 3, 3, 8), F16)
    with gk.emulate():
        assert gk.conv(x, w).shape == (0, 3, 3, 4)
        gradient = gk.functions.conv_weight_gradient(x, w.shape, np.zeros((0, 3, 3, 4), F16))
    assert not gradient.any()


# -- which kernel -----------------------------------------------------------------------------------------------------

def planned(call: Any, monkeypatch: Any) -> list[Any]:
    """The plans of a call's products, on an H100; nothing is computed."""
    plans = []

    def plan(a: Any, b: Any, c: Any = None, *, out: Any, stream: Any = None, **keywords: Any) -> Any:
        plans.append(Plan(a, b, c, out, None, keywords))

    monkeypatch.setattr(importlib.import_module("gemmkit.functions.conv"), "matmul", plan)
    with gk.emulate(mapping="device"):
        call()
    return plans


def routes(plan: Any) -> tuple[str, str]:
    spec = plan._compiled.spec
    return type(spec.a.route).__name__, type(spec.b.route).__name__


@pytest.mark.parametrize("channels", [16, 32, 64, 96, 512])
def test_tma_walks_windows(channels: int, monkeypatch: Any) -> None:
    x, w = np.zeros((1024, 14, 14, channels), F16), np.zeros((32, 3, 3, channels), F16)
    g = np.zeros((1024, 14, 14, 32), F16)
    forward, = planned(lambda: gk.conv(x, w, padding=1), monkeypatch)
    back, = planned(lambda: gk.functions.conv_input_gradient(x.shape, w, g, padding=1), monkeypatch)
    weights, = planned(lambda: gk.functions.conv_weight_gradient(x, w.shape, g, padding=1), monkeypatch)
    of_gradient = "PlacedTma" if channels <= 64 else "Tma"
    assert [*map(routes, (forward, back, weights))] == [("PlacedTma", "Tma"), ("PlacedTma",) * 2, (of_gradient, "PlacedTma")]
    assert isinstance(forward._compiled.spec.a.shared, Sliding) == (channels <= 64)


# -- taps that share lines --------------------------------------------------------------------------------------------

def in_tiles_of_taps(monkeypatch: Any) -> list[Any]:
    """Products compute in tiles as deep as all taps along the fastest dimension, or as wide; the windows' shared layouts."""
    found = []

    def multiply(a: Any, b: Any, c: Any = None, *, out: Any, stream: Any = None, **fields: Any) -> Any:
        for name, x in (("a", a), ("b", b), ("d", out)):
            fields.setdefault(f"global_{name}_layout", (ColMajor, RowMajor)[describe(x).strides[-1] == 1](F16))
        columns = fields["global_b_layout"].extents(describe(b))[1] or describe(b).shape[1]
        name = "a" if getattr(fields["global_a_layout"], "slide", None) else "b"
        windows = fields[f"global_{name}_layout"]
        together = windows.slide[0] * windows.longest_line
        tile = Tile(M=64, N=columns, K=together) if name == "a" else Tile(M=64, N=together, K=64)
        conf = gk.get_config(operator=WGMMAOp(tile.size.N, dtype=F16), block_shape=tile, warps_per_block=4,
                             schedule="cooperative", **fields)
        found.append(getattr(conf, f"shared_{name}_layout"))
        return gk.matmul(a, b, c, conf, out=out, stream=stream)

    monkeypatch.setattr(importlib.import_module("gemmkit.functions.conv"), "matmul", multiply)
    return found


@on_machines
@pytest.mark.parametrize("x, w, given", [
    ((2, 5, 9, 32), (32, 3, 3, 32), dict(padding=1)), ((1, 6, 30, 64), (32, 2, 3, 64), dict(kinds="fw")),
    ((1, 3, 5, 9, 32), (32, 3, 3, 3, 32), dict(padding=1, word="NDHWC")), ((3, 21, 16), (32, 5, 16), dict(word="NWC")),
    ((1, 7, 11, 16), (32, 3, 3, 16), dict(padding=((2, 0), (1, 3)), dilation=2)),
    ((1, 9, 7, 16), (16, 3, 2, 16), dict(padding=1, stride=(2, 1), kinds="fw"))], ids=str)
def test_taps_share_lines(machine: Any, x: Any, w: Any, given: dict[str, Any], monkeypatch: Any,
                          rng: np.random.Generator) -> None:
    found, given = in_tiles_of_taps(monkeypatch), dict(given)
    kinds = given.pop("kinds", "fiw")
    check(machine, Case(rng, x, w, **given), kinds=kinds)
    assert found and all(isinstance(layout, Sliding) for layout in found)


@on_machines
def test_positions_that_are_spare_are_not_stored(machine: Any, monkeypatch: Any, rng: np.random.Generator) -> None:
    """With C and an epilogue; D is a part of a larger array, of which nothing else is written."""
    found, case = in_tiles_of_taps(monkeypatch), Case(rng, (2, 5, 9, 32), (32, 3, 3, 32), padding=1)
    c, bias, around = whole(rng, case.gradient.shape, F16), whole(rng, (32,), F16), np.full((2, 5, 12, 32), 77, F16)
    out = machine.array(around)
    with machine.session():
        gk.conv(machine.array(case.x), machine.array(case.w), machine.array(c), padding=1, out=out[:, :, 1:10],
                epilogue=Bias(machine.array(bias)) | ReLU())
    around[:, :, 1:10] = np.maximum(forward(case.x, case.w, case.how) + c + bias, 0)
    assert np.array_equal(machine.numpy(out), around) and isinstance(found[0], Sliding)


def test_what_sees_rows_has_no_spare_positions(monkeypatch: Any) -> None:
    x, w = np.zeros((2, 14, 14, 32), F16), np.zeros((32, 3, 3, 32), F16)
    epilogue = Elementwise(lambda x, m, n: x + m)
    for given in (dict(epilogue=epilogue), dict(stride=2), dict(groups=2)):
        plan, = planned(lambda: gk.conv(x, w[..., :32 // given.get("groups", 1)], padding=1, **given), monkeypatch)
        assert not isinstance(plan._compiled.spec.a.shared, Sliding)


def test_pointwise_convolutions_are_plain_products(monkeypatch: Any) -> None:
    x, w, g = np.zeros((8, 14, 14, 64), F16), np.zeros((32, 1, 1, 64), F16), np.zeros((8, 14, 14, 32), F16)
    plans = [*planned(lambda: gk.conv(x, w), monkeypatch),
             *planned(lambda: gk.functions.conv_input_gradient(x.shape, w, g), monkeypatch),
             *planned(lambda: gk.functions.conv_weight_gradient(x, w.shape, g), monkeypatch)]
    assert [routes(plan) for plan in plans] == [("Tma", "Tma")] * 3
    assert [plan.shape for plan in plans] == [(1568, 32, 64), (1568, 64, 32), (32, 64, 1568)]


@pytest.mark.parametrize("channels, padding, stride", [(24, 1, 1), (64, 200, 1), (64, 1, 9), (3, 1, 1)])
def test_threads_copy_what_tma_does_not(channels: int, padding: int, stride: int, monkeypatch: Any) -> None:
    x, w = np.zeros((2, 20, 20, channels), F16), np.zeros((32, 3, 3, channels), F16)
    plan, = planned(lambda: gk.conv(x, w, padding=padding, stride=stride), monkeypatch)
    assert routes(plan)[0] in ("CpAsyncLines", "StagedRoute")


@pytest.mark.parametrize("call", ["forward", "input", "weight", "threads", "registers"])
def test_code(call: str, monkeypatch: Any) -> None:
    """The kernels of all three, one whose threads copy, and one whose threads load words, have no spills."""
    x, w, g = np.zeros((8, 14, 14, 64), F16), np.zeros((64, 3, 3, 64), F16), np.zeros((8, 14, 14, 64), F16)
    narrow, of_narrow = np.zeros((8, 14, 14, 24), F16), np.zeros((64, 3, 3, 24), F16)
    plan, = planned({"forward": lambda: gk.conv(x, w, padding=1),
                     "input": lambda: gk.functions.conv_input_gradient(x.shape, w, g, padding=1),
                     "weight": lambda: gk.functions.conv_weight_gradient(x, w.shape, g, padding=1),
                     "threads": lambda: gk.conv(narrow, of_narrow, padding=1),
                     "registers": lambda: gk.conv(narrow[..., :20], of_narrow[..., :20], padding=1)}[call], monkeypatch)
    made = ahead.compiled_kernel(plan._compiled, H100)
    assert made.assembled.usage.spill_stores == made.assembled.usage.spill_loads == 0
    walks = made.ptx.count("cp.async.bulk.tensor.4d.shared::cluster.global.im2col")
    assert (walks == 0) == (call in ("threads", "registers")) and ("cp.async.cg" in made.ptx) == (call == "threads")


# -- bad input --------------------------------------------------------------------------------------------------------

X, W = np.zeros((2, 6, 6, 8), F16), np.zeros((4, 3, 3, 8), F16)


@pytest.mark.parametrize("given, error, message", [
    (dict(layout="HWC"), ValueError, "layout='HWC'; one of 'NWC', 'NHWC'"),
    (dict(layout=["NHWC"]), ValueError, r"layout=\['NHWC'\]; one of 'NWC', 'NHWC'"),
    (dict(layout="NDHWC"), ValueError, "layout='NDHWC' has 5 dimensions; layout='NHWC' has as many"),
    (dict(stride=0), ValueError, "stride=0; a whole number of at least 1 is needed, or 2 of them"),
    (dict(padding=-1), ValueError, "padding=-1"), (dict(padding="full"), ValueError, "padding='full'"),
    (dict(padding="same", stride=2), ValueError, "padding='same' needs stride=1"),
    (dict(padding=((1, 1),)), ValueError, "2 pairs"), (dict(dilation=(1, 2, 3)), ValueError, "dilation"),
    (dict(dilation=3), ValueError, "along spatial dimension 0 a window of 7 elements does not fit into 6"),
    (dict(groups=2), ValueError, "x has 8 channels and w takes 8 in each of groups=2; x needs 16, or w 4"),
    (dict(w=W.astype(F32)), TypeError, "w has dtype float32 and x float16"),
    (dict(x=X.astype("c8"), w=W.astype("c8")), TypeError, "real numbers are needed"),
    (dict(c=np.zeros((2, 4, 4, 3), F16)), ValueError, "c has shape .2, 4, 4, 3.; .2, 4, 4, 4. is needed"),
    (dict(out=np.zeros((2, 4, 4, 5), F16)), ValueError, "out has shape .2, 4, 4, 5.; the result has .2, 4, 4, 4."),
    (dict(out=X[:, :4, :4, :4]), ValueError, "out overlaps"), (dict(x="x"), TypeError, "x"),
])
def test_bad_calls(given: dict[str, Any], error: type[Exception], message: str) -> None:
    before = X.copy()
    given = dict({"x": X, "w": W, "c": None}, **given)
    with gk.emulate(), pytest.raises(error, match=message):
        gk.conv(given.pop("x"), given.pop("w"), given.pop("c"), **given)
    assert np.array_equal(X, before)


def test_bad_gradients() -> None:
    g = np.zeros((2, 2, 2, 4), F16)
    with gk.emulate():
        with pytest.raises(ValueError, match="gradient has shape .2, 2, 2, 4.; .2, 4, 4, 4. is needed"):
            gk.functions.conv_input_gradient(X.shape, W, g)
        with pytest.raises(ValueError, match="may see rows, and with stride=.2, 2."):
            gk.functions.conv_input_gradient(X.shape, W, g, stride=2, epilogue=Elementwise(lambda x, m, n: x + m))
        with pytest.raises(TypeError, match="shape='x'"):
            gk.functions.conv_weight_gradient(X, "x", g)


def test_a_word_of_padding_is_numbers() -> None:
    assert parameters("conv", (1, 9, 9, 8), (4, 3, 4, 8), 1, "same", (2, 1), 1, "NHWC").padding == ((2, 2), (1, 2))
    assert parameters("conv", (1, 9, 9, 8), (4, 3, 4, 8), 2, "valid", 1, 1, "NHWC").padding == ((0, 0), (0, 0))
