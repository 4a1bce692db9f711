"""Convolutions and their gradients against loops over taps in float64; values are small whole numbers, so that results are
exact and right or wrong."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions.conv import Convolution, parameters
from tests.support.machines import MACHINES, on_machines, poison, turned, whole

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
        last = turned_last = machine.array(np.ascontiguousarray(x if self.how.is_last or lies == "last" else ordered(x, self.how)))
        if not self.how.is_last and lies == "last":
            turned_last = turned(last, 0, x.ndim - 1, *range(1, x.ndim - 1))
        return turned_last

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
    check(machine, Case(rng, (2, 9, 7, 16), (24, 3, 3, 16), dtype, word, padding=1), lies)


@on_machines
@pytest.mark.parametrize("stride, padding, dilation, taps", [
    (2, 1, 1, 3), (2, 0, 1, 1), (1, 0, 1, 1), (3, 2, 1, 2), (2, 3, 2, 3), (4, 1, 2, 3), ((1, 2), ((2, 0), (1, 1)), (2, 1), 3),
    (2, 0, 3, 4), (5, 0, 1, 2)])
def test_steps(machine: Any, stride: Any, padding: Any, dilation: Any, taps: int, rng: np.random.Generator) -> None:
    check(machine, Case(rng, (2, 13, 14, 8), (16, taps, taps, 8), F16, stride=stride, padding=padding, dilation=dilation))


@on_machines
@pytest.mark.parametrize("count, word", [(n, word) for n, words in LAYOUTS.items() for word in words])
def test_dimensions(machine: Any, count: int, word: str, rng: np.random.Generator) -> None:
    extents = (6, 5, 7)[:count]
    check(machine, Case(rng, (2, *extents, 8), (8, *(3, 2, 3)[:count], 8), F16, word, padding=1, stride=(1, 2, 1)[:count]))


@on_machines
@pytest.mark.parametrize("channels, filters", [(3, 5), (1, 1), (20, 36), (32, 8), (64, 64), (96, 40), (100, 4)])
def test_channels(machine: Any, channels: int, filters: int, rng: np.random.Generator) -> None:
    check(machine, Case(rng, (1, 6, 5, channels), (filters, 3, 3, channels), F16, padding=1))


@on_machines
@pytest.mark.parametrize("groups, channels, filters", [(2, 16, 8), (3, 24, 24), (8, 8, 8), (4, 4, 8)])
@pytest.mark.parametrize("word", ["NHWC", "NCHW"])
def test_groups(machine: Any, groups: int, channels: int, filters: int, word: str, rng: np.random.Generator) -> None:
    check(machine, Case(rng, (2, 5, 6, channels), (filters, 3, 3, channels // groups), F16, word, padding=1, groups=groups,
                        stride=2))
