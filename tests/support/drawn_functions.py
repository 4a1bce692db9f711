"""Functions that drawn cases put into transforms and epilogues, each as device code and in NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.transforms import Map, Transform
from tests.support.drawn_reference import Bounded, rounded, through
from tests.support.machines import epsilon

_erf = np.vectorize(math.erf, otypes=[float])


# -- as device code -------------------------------------------------------------------------------------------------------

def affine(x):
    return 2 * x + 1


def placed(x, i, j):
    return x + i % 4 - 2 * (j % 4)


def relu(x):
    return max(x, 0)


def captured(table):
    def f(x, i, j):
        return x * table[j]

    return f


@dataclass(frozen=True)
class Leaky(epilogues.Epilogue):
    """A user's epilogue with a run-time number."""

    slope: gk.Scalar

    def __call__(self, x, m, n):
        return max(x, 0) + min(x, 0) * self.slope


# -- in NumPy -------------------------------------------------------------------------------------------------------------

def _plus(x: np.ndarray, real: Any, numbers: bool) -> np.ndarray:
    """A real number counts as the first part alone."""
    if not numbers:
        return np.asarray(x + real)
    out = x.copy()
    out[..., 0] += real
    return out


@dataclass(frozen=True)
class Function:
    """``numpy(x, absolute)``: the function of an array, or a bound on what its terms amount to when x is absolute."""

    name: str
    numbers: bool = False               # of an algebra: a last axis of parts
    table: Any = None
    operations: float = 3
    exact: bool = True

    @property
    def slope(self) -> Any:
        if self.name == "captured":
            return np.abs(self._row(self.table).astype(float))
        return {"affine": 2.0, "gelu": 1.2, "gelu_tanh": 1.2, "silu": 1.2}.get(self.name, 1.0)

    def _row(self, table: np.ndarray) -> np.ndarray:
        return table[None, :, None] if self.numbers else table[None, :]

    def numpy(self, x: np.ndarray, absolute: bool = False) -> np.ndarray:
        i, j = np.indices(x.shape[:2])
        if self.name == "affine":
            return _plus(2 * x, 1, self.numbers)
        if self.name == "placed":
            return _plus(x, i % 4 + 2 * (j % 4) if absolute else i % 4 - 2 * (j % 4), self.numbers)
        if self.name == "captured":
            return np.asarray(x * self._row(np.abs(self.table) if absolute else self.table))
        if self.name == "relu":
            return np.maximum(x, 0)
        if absolute:
            return x                                        # of activations: no larger than their argument
        if self.name == "tanh":
            return np.tanh(x)
        if self.name == "silu":
            e = np.exp(-np.abs(x))
            return np.asarray(x * np.where(x < 0, e, 1) / (1 + e))
        if self.name == "gelu":
            return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))
        assert self.name == "gelu_tanh", self.name
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


ACTIVATIONS = {"gelu": epilogues.GELU(), "gelu_tanh": epilogues.GELU("tanh"), "silu": epilogues.SiLU(), "tanh": epilogues.Tanh()}


class Tables:
    """Small whole numbers for the vectors that a case needs, here and on its machine."""

    def __init__(self, machine: Any, rng: np.random.Generator):
        self.machine, self.rng = machine, rng

    def vector(self, length: int, dtype: Any, low: int = -3) -> tuple[np.ndarray, Any]:
        host = self.rng.integers(low, 4, length).astype(dtype)
        return host, self.machine.array(host)


def transform(names: tuple[str, ...], columns: int, tables: Tables, dtype: np.dtype, numbers: bool, low: int) -> tuple[Transform, list[Function]]:
    """Functions one after the other, as a transform and as NumPy has them."""
    made: Any = None
    functions = []
    for name in names:
        table = None
        f: Any = globals()[name]
        if name == "captured":
            table, held = tables.vector(columns, dtype, low)
            f = captured(held)
        functions.append(Function(name, numbers, table))
        made = Map(f) if made is None else made | Map(f)
    return made, functions


# -- epilogues ------------------------------------------------------------------------------------------------------------

@dataclass
class Context:
    """What an epilogue's parts are made for: a D of M x N, sums of ``dtype``, and arrays by ``array(dtype)``."""

    M: int
    N: int
    dtype: np.dtype
    numbers: bool
    tables: Tables
    array: Any                          # dtype, poisoned -> (host values, the machine's array, how to read all of it back)
    alpha: Any
    beta: Any
    is_python: bool = False             # in the emulator `math` and literals give Python's numbers, which are weak


def epilogue_part(part: str, x: Bounded, at: Context) -> tuple[Any, Bounded, Any]:
    """One part as "name" or "name:dtype": the epilogue, what it makes of ``x``, and an output to check or None."""
    name, _, of = part.partition(":")
    integer, before = x.is_integer, at.dtype
    # NumPy's common type, of what is not as weak as a literal (in the emulator each branch of a function has its own type)
    if not integer and name != "store" and (of or (name == "leaky" and not at.tables.machine.emulated)):
        other = np.dtype(of or np.float32)
        is_narrower = at.is_python and epsilon(other) > epsilon(at.dtype)
        at.dtype = other if is_narrower else np.result_type(at.dtype, other)
        at.is_python = False
    dtype = at.dtype
    at.is_python |= name in ("tanh", "relu", "clamp", "where", "causal") and at.tables.machine.emulated
    if name in ("affine", "placed", "relu", *ACTIVATIONS):
        function = Function(name, at.numbers, operations=16 if name in ACTIVATIONS else 3, exact=name not in ACTIVATIONS)
        made: Any = ACTIVATIONS.get(name) or (epilogues.ReLU() if name == "relu" else epilogues.Elementwise(globals()[name]))
        return made, through(x, function, dtype), None
    if name == "scale":
        by = 3 if integer else 0.5
        return epilogues.Scale(by), _linear(x, by, 0, dtype, exact=integer), None
    if name in ("scale_m", "scale_n", "bias_m", "bias_n"):
        along = name[-1].upper()
        host, held = at.tables.vector(at.M if along == "M" else at.N, of)
        row = host.astype(np.int64 if integer else np.float64)
        row = row[:, None] if along == "M" else row[None, :]
        if name.startswith("scale"):
            return epilogues.Scale(held, along=along), _linear(x, row[..., None] if at.numbers else row, 0, dtype), None
        bias = row
        if at.numbers:
            bias = np.zeros((*np.broadcast_shapes(row.shape, (at.M, at.N)), x.value.shape[2]))
            bias[..., 0] = row
        return epilogues.Bias(held, along=along), _linear(x, 1, bias, dtype), None
    if name == "residual":
        host, held, _ = at.array(np.dtype(of), False)
        return epilogues.Residual(held), _linear(x, 1, Bounded.of(host).value, dtype), None
    if name == "store":
        _, held, read = at.array(np.dtype(of), True)
        return epilogues.Store(held), x, (read, rounded(x, of))
    if name == "combine":
        host, held, _ = at.array(np.dtype(of), False)
        at.dtype = np.dtype(of)                                        # it converts to the array's
        return (epilogues.LinearCombination(at.alpha, at.beta, held, _layout(held, of)),
                rounded(combined(x, at, Bounded.of(host), dtype, of, before), of), None)
    if name == "clamp":
        out = replace(x, value=np.clip(x.value, -2, 50))
        return epilogues.Clamp(-2 if integer else -2.0, 50 if integer else 50.0), out, None
    if name == "leaky":
        value = np.where(x.value > 0, x.value, x.value * 0.25)
        return Leaky(np.float32(0.25)), rounded(Bounded(value, x.error), dtype, times=2), None
    rows, columns = np.indices(x.value.shape[:2])
    kept = {"where": (rows + columns) % 3 != 0, "causal": columns <= rows + 5}[name]
    fill = -1 if integer else -1.0
    made = epilogues.Where(_two_of_three, fill) if name == "where" else epilogues.CausalMask(fill, 5)
    return made, Bounded(np.where(kept, x.value, np.asarray(fill, x.value.dtype)), np.where(kept, x.error, 0.0)), None


def _two_of_three(m, n):
    return (m + n) % 3 != 0


def _layout(held: Any, dtype: Any) -> Any:
    from gemmkit.plans.problem import layout_of
    from gemmkit.runtime.arrays import describe

    return layout_of(describe(held), "c")


def _linear(x: Bounded, by: Any, plus: Any, dtype: Any, exact: bool = True) -> Bounded:
    """x * by + plus."""
    with np.errstate(all="ignore"):
        value, size = x.value * by + plus, np.abs(x.value * by) + np.abs(plus)
        error = np.where(x.error == 0, 0.0, np.abs(by) * x.error) + np.zeros(value.shape)
    return rounded(Bounded(value, error), dtype, None if x.is_integer else size, 2, exact)


def combined(x: Bounded, at: Any, c: Bounded, dtype: Any, of: Any, own: Any) -> Bounded:
    """alpha x + beta C in ``dtype``; C (of dtype ``of``) is not read where beta is 0, beta C is of its type, and alpha x of x's
    ``own``: alpha is as weak as a literal."""
    exact = all(float(2 * number).is_integer() for number in (at.alpha, at.beta))
    scaled = _linear(c, at.beta, 0, of, exact) if at.beta != 0 else Bounded(np.zeros_like(x.value), np.zeros(x.value.shape))
    out = _linear(_linear(x, at.alpha, 0, own, exact), 1, scaled.value, dtype, exact)
    return Bounded(out.value, out.error + scaled.error)


__all__ = ["ACTIVATIONS", "Context", "Function", "Tables", "combined", "epilogue_part", "transform"]
