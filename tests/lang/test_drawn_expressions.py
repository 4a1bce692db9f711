"""Drawn expressions of scalars: the device's types are the emulator's, and so are the values.

``GEMMKIT_DRAWN_EXPRESSIONS=5000`` draws as many (200 by default), from ``GEMMKIT_DRAWN_SEED``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import CoordinateError
from gemmkit.emulator.functions import Coordinate, kind_of
from gemmkit.emulator.user_code import arguments
from gemmkit.lang import number_rules as rules
from gemmkit.lang.number_rules import FLOAT64, INT32, Weak
from gemmkit.lang.registers import each
from gemmkit.lang.scalars import type_of_kind
from gemmkit.ptx.special import block_x, thread_index
from tests.ptx_machine.launch import run_ptx
from tests.support import harness
from tests.support.harness import Out, Runtime, on_device
from tests.support.lang.drawn_expressions import OPERANDS, Expression, drawn, function, of_one, of_two
from tests.support.lang.error_bounds import NoBound, bounded
from tests.support.lang.on_host import on_host
from tests.support.lang.typing import result

COUNT = int(os.environ.get("GEMMKIT_DRAWN_EXPRESSIONS", "100"))
SEED = int(os.environ.get("GEMMKIT_DRAWN_SEED", "20261122"))
BATCH = 25                                                    # of one function: Numba makes tuples of 30 at most
TYPES = tuple(type_of_kind(kind) for kind in OPERANDS.values())
FAULTS = (CoordinateError, ArithmeticError, ValueError)       # no number: x // 0 of coordinates, int(NaN), 2 ** -1, ...
INTEGERS = [name for name, kind in OPERANDS.items() if kind == rules.BOOL or rules.is_integer(kind)]


def dtype_of(kind: Any) -> np.dtype:
    """How a number of a kind is stored."""
    return kind if isinstance(kind, np.dtype) else FLOAT64 if kind is Weak.FLOAT else INT32


DTYPES = [dtype_of(kind) for kind in OPERANDS.values()]


def batches(expressions: list[Expression]) -> list[list[Expression]]:
    return [expressions[n:n + BATCH] for n in range(0, len(expressions), BATCH)]


def emulated(texts: list[str]) -> Callable[..., tuple]:
    """The function as the emulator runs it."""
    (f,) = arguments([function(texts)])
    return f                                                  # type: ignore[no-any-return]


def value(rng: np.random.Generator, kind: Any) -> Any:
    """A number of any size, an extreme one, or a small one."""
    if kind == rules.BOOL:
        return np.bool_(rng.integers(2))
    if kind is Weak.COORDINATE:
        return int(rng.integers(-100, 100))
    if kind is Weak.FLOAT:
        return float(rng.standard_normal())
    how = rng.random()
    if not rules.is_integer(kind):
        special = (0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 2.5, -7.0)
        return kind.type(rng.standard_normal() * 4 if how < 0.7 else special[rng.integers(len(special))])
    limits = np.iinfo(kind)
    if how < 0.4:
        return rng.integers(limits.min, limits.max, dtype=kind, endpoint=True)
    if how < 0.6:
        return kind.type((limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max)[rng.integers(6)])
    return kind.type(rng.integers(0 if kind.kind == "u" else -10, 11))


def values(rng: np.random.Generator) -> list:
    return [value(rng, kind) for kind in OPERANDS.values()]


# -- types ------------------------------------------------------------------------------------------------------------

def emulators_kind(expression: Expression, rng: np.random.Generator) -> Any:
    """The kind of the emulator's result, of operands for which there is one; None if there are none such."""
    f = emulated([expression.text])
    for _ in range(20):
        given = [max(abs(v), 1) % 5 + 1 if isinstance(v, int) else type(v)(rng.integers(1, 4)) for v in values(rng)]
        try:
            return kind_of(f(*given)[0])
        except FAULTS:
            continue
    return None


@pytest.mark.kin(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_devices_types_are_the_emulators() -> None:
    rng = np.random.default_rng(SEED)
    wrong, without = [], 0
    for batch in batches([drawn(rng, 3) for _ in range(COUNT)]):
        there = result(function([e.text for e in batch]), *TYPES)
        for expression, ty in zip(batch, there, strict=True):
            here = emulators_kind(expression, rng)
            without += here is None
            if expression.computes_with_pythons_booleans:
                here = None
            if ty != type_of_kind(expression.kind) or here not in (expression.kind, None):
                wrong.append(f"{expression.text}: {ty} on the device, {here} in the emulator, {expression.kind} by the rules")
    assert not wrong, "\n".join(wrong)
    assert without <= COUNT // 20, f"{without} of {COUNT} expressions have no value for any operands"


# -- values -----------------------------------------------------------------------------------------------------------

def is_whole(e: Expression) -> bool:
    """Of integers and booleans all the way. (A uint64 and an int64 are float64s together; comparisons and ``int`` lead there.)"""
    signed = {"flag", "i8", "i16", "i32", "i64"} & e.names or {"int", *rules.COMPARISONS} & {*e.operations}
    return not ({"/", "float", "round"} & {*e.operations} or "math" in e.text or "." in e.text or "1e" in e.text
                or ("u64" in e.names and signed))


def differing(batch: list[Expression], there: Callable[..., list], rng: np.random.Generator, times: int, close: Any) -> list[str]:
    """Where the device's values, by ``there``, are not the emulator's."""
    wrong: dict[str, str] = {}
    compared = 0
    here = [emulated([e.text]) for e in batch]
    for _ in range(times):
        given = values(rng)
        for expression, f, got in zip(batch, here, there(*given), strict=True):
            try:
                expected = f(*given)[0]
            except FAULTS:
                continue
            compared += 1
            if not close(expression, got, dtype_of(expression.kind).type(expected)):
                operands = {k: v for k, v in zip(OPERANDS, given) if k in expression.names}
                wrong[expression.text] = f"{expression.text} of {operands}: {got!r} on the device, {expected!r} in the emulator"
    assert compared > times * len(batch) // 2
    return list(wrong.values())


def equal(_expression: Expression, x: Any, y: Any) -> bool:
    return bool(x == y)


def compiled(batch: list[Expression]) -> Callable[..., list]:
    return on_host(function([e.text for e in batch]), TYPES, DTYPES, [dtype_of(e.kind) for e in batch])


@pytest.mark.kin(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_integers_are_equal() -> None:
    """The device's code, run on this machine's processor: to the bit, at any size."""
    rng = np.random.default_rng(SEED + 1)
    expressions: list[Expression] = []
    while len(expressions) < COUNT // 2:
        e = drawn(rng, 3, INTEGERS)
        if is_whole(e):
            expressions.append(e)
    wrong = [text for batch in batches(expressions) for text in differing(batch, compiled(batch), rng, 40, equal)]
    assert not wrong, "\n".join(wrong)


# -- single operations -------------------------------------------------------------------------------------------------

def single_operations() -> list[Expression]:
    """Every operator and function of every kind of operands, once; literals on either side."""
    leaves = [Expression(name, kind, frozenset({name})) for name, kind in OPERANDS.items()]
    literals = [Expression(repr(v), v, frozenset()) for v in (3, 2.5)]
    out = []
    for a in leaves:
        for op in (*rules.ARITHMETIC, *rules.BITWISE, "<", "==", *rules.EXTREMA):
            for b in (*leaves, *literals):
                for x, y in ((a, b), (b, a)) if b.is_literal else ((a, b),):
                    try:
                        out.append(of_two(op, x, y))
                    except TypeError:
                        continue
        for op in (*rules.UNARY, *rules.CONVERSIONS):
            try:
                out.append(of_one(op, a))
            except TypeError:
                continue
        for name in (*rules.MATH_OF_ONE, *rules.MATH_TO_WHOLE, *rules.MATH_TESTS):
            out.append(Expression(f"math.{name}({a.text})", rules.of_math(name, a.kind), a.names, (name,), 1))
        for name in rules.MATH_OF_TWO:
            for b in leaves:
                kind = rules.of_math(name, a.kind, b.kind)
                out.append(Expression(f"math.{name}({a.text}, {b.text})", kind, a.names | b.names, (name,), 1))
    return [e for e in out if e is not None]


#: What jumps: the value beside a jump may come out on its other side.
JUMPS = ("//", "%", "floor", "ceil", "trunc", "round", "int")


def ulps(x: Any, y: Any) -> float:
    """How far apart two floats of one type are, in units of the last place of the larger."""
    if x == y or (x != x and y != y):
        return 0.0
    if not (np.isfinite(x) and np.isfinite(y)):
        return np.inf
    return float(abs(np.float64(x) - np.float64(y)) / np.float64(np.spacing(max(abs(x), abs(y)))))


def within(expression: Expression, x: Any, y: Any) -> bool:
    """One operation, within the table's bound."""
    if rules.is_integer(dtype_of(expression.kind)) or dtype_of(expression.kind) == rules.BOOL:
        return bool(x == y)
    (op,) = expression.operations
    bound = rules.ULPS.get(op, (0, 0))[dtype_of(expression.kind) == FLOAT64]
    if op == "lgamma" and np.isfinite(x) and abs(float(y)) < 8:           # between its poles and near its zeros: absolute
        return abs(float(x) - float(y)) <= bound * 8 * np.finfo(dtype_of(expression.kind)).eps
    return ulps(x, y) <= bound


@pytest.mark.kin(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_single_operations_have_the_emulators_values() -> None:
    """A sample: the device's code on this machine's processor, whose mathematical functions are not the GPU's but as good."""
    rng = np.random.default_rng(SEED + 2)
    every = single_operations()
    chosen = [every[n] for n in rng.permutation(len(every))[:COUNT // 2]]
    wrong = [text for batch in batches(chosen) for text in differing(batch, compiled(batch), rng, 20, within)]
    assert not wrong, "\n".join(wrong)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Batch(gk.Component):
    """The expressions of a function, as a kernel evaluates them."""

    f: Any


def kernel_of(count: int) -> Callable[..., None]:
    """A kernel of the operands' arrays, in their order, that writes ``count`` results for every element."""
    names = [name for name in OPERANDS if name not in ("m", "n", "alpha")]
    reads = ", ".join(f"{name}[i]" for name in names)
    source = (f"def kernel(out, batch, alpha, {', '.join(names)}):\n"
              "    i = block_x() * 32 + thread_index()\n"
              f"    each(keep, batch.f({reads}, i % 191 - 95, i // 7 % 13 - 6, alpha), out, i * {count})\n")
    scope: dict[str, Any] = {"block_x": block_x, "thread_index": thread_index, "each": each, "keep": keep, "__name__": __name__}
    exec(compile(source, f"<a kernel of {count} results>", "exec"), scope)
    return scope["kernel"]                                     # type: ignore[no-any-return]


def keep(value: Any, n: int, out: Any, first: int) -> None:
    out[first + n] = value


def on_gpu(batch: list[Expression], dtype: np.dtype, arrays: dict[str, np.ndarray], alpha: float) -> np.ndarray:
    """The results of expressions of one dtype, a row for every element of the arrays."""
    size = len(next(iter(arrays.values())))
    f = function([e.text for e in batch])
    (out,) = on_device(kernel_of(len(batch)), Out((size * len(batch),), dtype), Batch(f), Runtime(alpha),
                       *[arrays[name] for name in arrays], blocks=size // 32)
    return out.reshape(size, len(batch))


def compare_on_gpu(expressions: list[Expression], close: Any, rng: np.random.Generator, size: int = 64) -> list[str]:
    wrong: dict[str, str] = {}
    alpha = 0.7321
    by_dtype: dict[np.dtype, list[Expression]] = {}
    for e in expressions:
        by_dtype.setdefault(dtype_of(e.kind), []).append(e)
    for dtype, same in by_dtype.items():
        for batch in batches(same):
            arrays = {name: np.array([value(rng, kind) for _ in range(size)], kind)
                      for name, kind in OPERANDS.items() if isinstance(kind, np.dtype)}
            out = on_gpu(batch, dtype, arrays, alpha)
            here = [emulated([e.text]) for e in batch]
            for i in range(size):
                given = [*(arrays[name][i] for name in arrays), i % 191 - 95, i // 7 % 13 - 6, alpha]
                for n, (expression, f) in enumerate(zip(batch, here)):
                    try:
                        there = f(*given)[0]
                    except FAULTS:
                        continue
                    if isinstance(there, complex):             # Python's own root of a negative plain float; NaN on the GPU
                        continue
                    expected = dtype.type(there)
                    if not close(expression, out[i, n], expected):
                        operands = {k: v for k, v in zip(OPERANDS, given) if k in expression.names}
                        wrong[expression.text] = f"{expression.text} of {operands}: {out[i, n]!r} on the GPU, {expected!r} here"
    return list(wrong.values())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernels_of_the_gpu_run_in_the_emulator() -> None:
    rng = np.random.default_rng(SEED + 5)
    batch = [e for e in (drawn(rng, 2, INTEGERS) for _ in range(400)) if is_whole(e) and e.kind == rules.INT64][:5]
    batch = [e for e in batch if not {"//", "%", "**", "<<", ">>"} & {*e.operations}]
    arrays = {name: np.array([value(rng, kind) for _ in range(32)], kind)
              for name, kind in OPERANDS.items() if isinstance(kind, np.dtype)}
    arguments_of_kernel = Out((32 * len(batch),), np.int64), Batch(function([e.text for e in batch])), Runtime(0.5), *arrays.values()
    (out,) = harness.emulated(kernel_of(len(batch)), *arguments_of_kernel)
    f = emulated([e.text for e in batch])
    for i in range(32):
        assert out[i * len(batch):][:len(batch)].tolist() == [*f(*(x[i] for x in arrays.values()), i - 95, i // 7 - 6, 0.5)]
    assert harness.leaves_nothing(harness.compiled(kernel_of(len(batch)), *arguments_of_kernel))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_integers_are_equal_on_the_gpu() -> None:
    rng = np.random.default_rng(SEED + 3)
    expressions = [e for e in (drawn(rng, 3, INTEGERS) for _ in range(4 * COUNT)) if is_whole(e)]
    wrong = compare_on_gpu(expressions, equal, rng)
    assert not wrong, "\n".join(wrong)


# -- compositions ------------------------------------------------------------------------------------------------------

#: What libdevice has as functions of their own in PTX, which the interpreter does not run; these are compared on a GPU.
CALLED = {"**", "acos", "acosh", "asin", "asinh", "atanh", "cos", "cosh", "erf", "erfc", "gamma", "lgamma", "log10", "log1p", "sin",
          "sinh", "tan"}


def compositions(rng: np.random.Generator, count: int, without: set[str]) -> list[Expression]:
    """Expressions of several operations that give a float."""
    out: list[Expression] = []
    while len(out) < count:
        e = drawn(rng, 3)
        if len(e.operations) > 1 and rules.is_float(e.kind) and not e.computes_with_pythons_booleans and not without & {*e.operations}:
            out.append(e)
    return out


def outside(expressions: list[Expression], run: Callable[..., np.ndarray], rng: np.random.Generator, size: int = 64) -> list[str]:
    """Where the device's values, by ``run``, are further from the emulator's than `bounded` says."""
    wrong: dict[str, str] = {}
    alpha, compared = 0.7321, 0
    for batch in batches(expressions):
        arrays = {name: np.array([value(rng, kind) for _ in range(size)], kind)
                  for name, kind in OPERANDS.items() if isinstance(kind, np.dtype)}
        out = run(batch, FLOAT64, arrays, alpha)
        for i in range(size):
            given = dict(zip(OPERANDS, [*(arrays[name][i] for name in arrays), *map(Coordinate, (i % 191 - 95, i // 7 % 13 - 6)), alpha]))
            for n, e in enumerate(batch):
                try:
                    wanted, error = bounded(e.text, given)
                except (*FAULTS, NoBound):
                    continue
                compared += 1
                wanted = float(wanted)
                if not (out[i, n] == wanted or (np.isnan(out[i, n]) and np.isnan(wanted)) or abs(out[i, n] - wanted) <= error):
                    operands = {k: v for k, v in given.items() if k in e.names}
                    wrong[e.text] = f"{e.text} of {operands}: {out[i, n]!r} on the device, {wanted!r} within {error:.3g} here"
    assert compared > len(expressions) * size // 3, f"{compared} values of {len(expressions) * size} have a bound"
    return list(wrong.values())


def as_ptx(batch: list[Expression], dtype: np.dtype, arrays: dict[str, np.ndarray], alpha: float) -> np.ndarray:
    """`on_gpu`, by the interpreter of PTX."""
    size = len(next(iter(arrays.values())))
    out, kernel = np.full(size * len(batch), -77, dtype), kernel_of(len(batch))
    ptx = harness.compiled(kernel, Out(out.shape, dtype), Batch(function([e.text for e in batch])), Runtime(alpha), *arrays.values())
    parameters = [out, out.size, np.float64(alpha), *(x for array in arrays.values() for x in (array, array.size))]
    run_ptx(ptx, 32, size // 32, parameters, [out, *arrays.values()])
    return out.reshape(size, len(batch))


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_compositions_are_within_their_bounds() -> None:
    rng = np.random.default_rng(SEED + 6)
    wrong = outside(compositions(rng, 40, CALLED), as_ptx, rng, 32)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("text", "given", "off", "is_within"), [
    ("f32 * f32 - f32", 1.1, 2.0**-24, True), ("f32 * f32 - f32", 1.1, 2.0**-20, False),      # fused, and too far
    ("math.exp(f32)", 1.0, 2.0**-21, True), ("math.exp(f32)", 1.0, 2.0**-19, False),
    ("math.exp(math.exp(f32))", 2.0, 2.0**-9, True), ("math.exp(math.exp(f32))", 2.0, 1.0, False),
    ("(f32 - 1) / 2", 3.0, 0.0, True), ("(f32 - 1) / 2", 3.0, 2.0**-23, False),                 # nothing that rounds
])
def test_a_bound(text: str, given: float, off: float, is_within: bool) -> None:
    assert (bounded(text, {"f32": np.float32(given)}).error >= off) == is_within


@pytest.mark.parametrize("text", ["math.floor(math.exp(f32) * 0)", "math.exp(f32) < math.exp(f32)", "math.sqrt(math.sin(f32) * 0)",
                                  "math.log(f32) % math.log(f32)", "round(math.exp(f32) * 0 + 0.5)"])
def test_beside_a_jump_there_is_no_bound(text: str) -> None:
    with pytest.raises(NoBound):
        bounded(text, {"f32": np.float32(1.5)})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_compositions_are_within_their_bounds_on_the_gpu() -> None:
    rng = np.random.default_rng(SEED + 7)
    wrong = outside(compositions(rng, COUNT, set()), on_gpu, rng)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_single_operations_are_within_the_tables_bounds_on_the_gpu() -> None:
    rng = np.random.default_rng(SEED + 4)
    every = single_operations()
    wrong = compare_on_gpu([every[n] for n in rng.permutation(len(every))[:4 * COUNT]], within, rng)
    assert not wrong, "\n".join(wrong)
