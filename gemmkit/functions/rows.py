"""Functions of each row of a matrix, in one launch: softmax, layer norm, RMS norm, and your own (`gemmkit.functions.rows`).

The row is read once where its threads can hold it (up to 32,768 elements of 16 bits, 16,384 of float32), and else once for
each fold, from the L2 cache where it fits there.

>>> import numpy as np, gemmkit
>>> with gemmkit.emulate():
...     gemmkit.softmax(np.array([[0.0, 0.0, 0.0, 0.0]], np.float32)).tolist()
[[0.25, 0.25, 0.25, 0.25]]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, cast

import ml_dtypes
import numpy as np

from gemmkit import components
from gemmkit.components import Array, Component, Scalar, arrays_of, check_held, freeze
from gemmkit.emulator import current_mode
from gemmkit.kernels.collectives.lanes import power
from gemmkit.kernels.rows import (
    Row,
    RowsSpec,
    along,
    fold,
    largest,
    mapped,
    moments,
    put,
    put_one,
    put_scaled,
    rows,
    smallest,
    total,
)
from gemmkit.lang.aggregates import convert
from gemmkit.lang.checks import FLOAT32_MAX, dtype_given, finite_number
from gemmkit.lang.deferred import by_old_name
from gemmkit.lang.functions import Frozen, freeze_array, freeze_scalar
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.plans.launch import Current, KnownCall, KnownCalls, Launch, Put, Start, launch_of
from gemmkit.plans.problem import check_out, check_places
from gemmkit.ptx.arithmetic import difference
from gemmkit.runtime.array_info import are_the_same
from gemmkit.runtime.arrays import ArrayInfo, as_stream_handle, describe, empty_like, shares_memory, strided
from gemmkit.runtime.device import launch_stream, target
from gemmkit.runtime.launch import Launchable
from gemmkit.tuning.problems import RESIDENT, WORDS, RowsProblem, choose

__all__ = [
    "QuantisedRows", "Row", "RowFunction", "along", "fold", "largest", "layernorm", "log_softmax", "mapped", "moments",
    "put", "put_one", "put_scaled", "rmsnorm", "rowwise", "smallest", "softmax", "to_float8", "total",
]


def __getattr__(name: str) -> Any:
    return by_old_name(__name__, name)


# --------------------------------------------------------------------------------------------------
# Functions of rows: those that come with gemmkit, and the contract of your own (`gemmkit.functions.rows.rowwise`).
#
# A function of rows is a component with one method of device code, ``__call__(row)``. It folds the row as often as it
# wants and stores its result once (`gemmkit.kernels.rows`):
#
# >>> from gemmkit.lang.components import dataclass
# >>> import math
# >>> import numpy as np
# >>> import gemmkit as gk
# >>> from gemmkit.functions.rows import RowFunction, put, rowwise, total
# >>> @dataclass(frozen=True)
# ... class UnitLength(RowFunction):
# ...     def __call__(self, row):
# ...         length = math.sqrt(total(row, lambda x, n: x * x))
# ...         put(row, lambda x, n: x / length)
# >>> with gk.emulate():
# ...     rowwise(np.array([[3.0, 4.0], [5.0, 12.0]], np.float32), UnitLength()).round(3).tolist()
# [[0.6000000238418579, 0.800000011920929], [0.38499999046325684, 0.9229999780654907]]

@dataclass(frozen=True)
class RowFunction(Component):
    """A function of each row of a matrix: ``__call__(row)`` is device code and returns nothing.

    ``outputs`` names arrays among its fields that it stores into (`gemmkit.functions.rows.put_one`); ``along_columns``
    those that have an element for each column, which `check` looks at.
    """

    without_value = ("__call__",)
    outputs: ClassVar[tuple[str, ...]] = ()
    along_columns: ClassVar[tuple[str, ...]] = ()

    def __call__(self, row: Row) -> None:
        raise NotImplementedError(f"{type(self).__qualname__} has no __call__(row)")

    def check(self, rows: int, columns: int) -> None:
        """Raise ValueError where its arrays do not fit a matrix of ``rows`` x ``columns``, TypeError for numbers of several
        parts among those along columns."""
        for name in (name for name in self.along_columns if getattr(self, name) is not None):
            info = describe(getattr(self, name), name)
            if info.shape != (columns,):
                raise ValueError(f"{name} has shape {info.shape}; rows of {columns} elements need {(columns,)}")
            if len(part_dtypes(info.dtype)) > 1:
                raise TypeError(f"{name} has dtype {info.dtype}; it must be real, because rows are")
        for name in self.outputs:
            shape = describe(getattr(self, name), name).shape
            if shape[:1] != (rows,):
                raise ValueError(f"{name} has shape {shape}; {rows} rows need {(rows,)}")


@dataclass(frozen=True)
class SoftmaxRows(RowFunction):
    """exp(scale (x - largest)) over its sum: no exponential is larger than 1. A row of -inf alone is NaN, as in NumPy.

    A result of 16 bits takes the special function unit's exponential, which `math.exp` calls amid some ten instructions."""

    scale: Scalar = np.float32(1)

    def __call__(self, row: Row) -> None:
        spec, scale = row.spec, self.scale
        top = largest(row, lambda x, n: scale * x)
        raised = mapped(row, lambda x, n: power(spec, difference(convert(spec.dtype, scale * x), top)))
        share = 1 / total(raised, lambda x, n: x)
        put(raised, lambda x, n: x * share)


@dataclass(frozen=True)
class LogSoftmax(RowFunction):
    """The logarithm of `SoftmaxRows`, which does not underflow."""

    scale: Scalar = np.float32(1)

    def __call__(self, row: Row) -> None:
        spec, scale = row.spec, self.scale
        top = largest(row, lambda x, n: scale * x)
        low = math.log(total(row, lambda x, n: power(spec, difference(convert(spec.dtype, scale * x), top))))
        put(row, lambda x, n: difference(convert(spec.dtype, scale * x), top) - low)


def centred(row: Row, eps: Any) -> tuple[Any, ...]:
    """A row's mean, and one over its standard deviation (of the row, not of what it is a sample of)."""
    mean, variance = moments(row)
    return mean, 1 / math.sqrt(variance + eps)


@dataclass(frozen=True)
class LayerNormRows(RowFunction):
    """gamma (x - mean) / sqrt(variance + eps) + beta, with an element of gamma and beta for each column, or without them."""

    eps: Scalar
    gamma: Array = cast(Array, None)
    beta: Array = cast(Array, None)

    array_ndims = MappingProxyType({"gamma": 1, "beta": 1})
    along_columns: ClassVar[tuple[str, ...]] = ("gamma", "beta")

    @property
    def is_scaled(self) -> bool:
        return self.gamma is not None

    def __call__(self, row: Row) -> None:
        mean, variance = moments(row)
        scale = 1 / math.sqrt(variance + self.eps)
        if not self.is_scaled:
            put(row, lambda x, n: (x - mean) * scale)
        else:
            put(row, lambda x, n, gamma, beta: (x - mean) * scale * gamma + beta, (self.gamma, self.beta))


@dataclass(frozen=True)
class RMSNormRows(RowFunction):
    """gamma x / sqrt(mean of squares + eps), with an element of gamma for each column, or without it."""

    eps: Scalar
    gamma: Array = cast(Array, None)

    array_ndims = MappingProxyType({"gamma": 1})
    along_columns: ClassVar[tuple[str, ...]] = ("gamma",)

    @property
    def is_scaled(self) -> bool:
        return self.gamma is not None

    def __call__(self, row: Row) -> None:
        scale = 1 / math.sqrt(total(row, lambda x, n: x * x) / row.columns + self.eps)
        if not self.is_scaled:
            put(row, lambda x, n: x * scale)
        else:
            put(row, lambda x, n, gamma: x * scale * gamma, (self.gamma,))


@dataclass(frozen=True)
class QuantisedRows(RowFunction):
    """Rows over a scale of each ``block`` elements, or of the row (``block=0``), which go to ``scales``: (rows, blocks)
    float32. The largest magnitude of a block becomes the largest number of ``dtype``.

    Your own function of rows is quantised in the same launch if it ends with `put_scaled` (docs/how_to/float8.md).
    """

    scales: Array
    dtype: Any = np.dtype(ml_dtypes.float8_e4m3fn)
    block: int = 128

    outputs = ("scales",)

    @property
    def limit(self) -> float:
        return float(ml_dtypes.finfo(self.dtype).max)

    def __call__(self, row: Row) -> None:
        put_scaled(row, self.scales, self.limit, self.block)

    def check(self, rows: int, columns: int) -> None:
        shape, wanted = describe(self.scales, "scales").shape, (rows, -(-columns // self.block) if self.block else 1)
        if shape != wanted:
            raise ValueError(f"scales has shape {shape}; a matrix of {rows} x {columns} needs {wanted}")


# --------------------------------------------------------------------------------------------------
# Launches of functions of rows: arguments checked, threads dealt to rows, kernels kept by kind.

FLOATS = "float16", "bfloat16", "float32", "float64"
EIGHT = tuple(np.dtype(x) for x in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))


_calls = KnownCalls()


def run_rows(x: Any, function: RowFunction, out: Any, stream: Any) -> Any:
    """`gemmkit.functions.rows.rowwise`."""
    if function.outputs or current_mode() is not None:
        return _run(x, function, out, stream)
    key: list[Any] = []
    held: list[Any] = []
    components.seen(function, key, held)
    rest, brought = tuple(key), tuple(held)
    result = _calls.again(rest, (x,), brought, brought, out, stream)
    return _run(x, function, out, stream, rest, (x,), brought) if result is None else result


def _run_own(kind: Callable[..., RowFunction], x: Any, number: float, name: str, arrays: tuple[Any, ...], out: Any,
             stream: Any) -> Any:
    """`run_rows` of a function of gemmkit's own, which has a number of this ``name`` and arrays: known by these alone, it
    is not made."""
    if type(number) is not float or not -FLOAT32_MAX <= number <= FLOAT32_MAX:
        number = _number(number, name, x)
    of_call = x, *arrays
    result = _calls.again(kind, of_call, (number or components.exact(number),), (), out, stream)
    return _run(x, kind(number, *arrays), out, stream, kind, of_call) if result is None else result


def _run(x: Any, function: RowFunction, out: Any, stream: Any, rest: Any = None, arrays: tuple[Any, ...] = (),
         held: tuple[Any, ...] = (), dtype: np.dtype | None = None) -> Any:
    """A call that is not known. If ``rest`` is given it is known by that and by its arrays from then on; it brings the
    addresses of the arrays behind x first. ``dtype`` is that of a new ``out``, None for x's."""
    info = describe(x, "x")
    _check_dtype(info, "x")
    if not info.shape:
        raise ValueError("x has no axis; it needs one at least, along which its rows lie")
    check_places({"x": info})
    is_new = out is None
    if is_new:
        out = empty_like(x, info.shape, dtype or info.dtype)
    given = describe(out, "out")
    captured = [("function", one) for one in arrays_of(function)]
    check_places({"x": info, "out": given, **{one.name: one.info for _, one in captured}})
    _check_out(info, given)
    of_x, of_out = matrix(info, "x"), matrix(given, "out")
    check_held(captured, {"x": info, "out": given})
    function.check(*of_x.shape)
    handle = None if stream is None else as_stream_handle(stream)
    count, columns = of_x.shape
    if count == 0 or (columns == 0 and not function.outputs):
        return out
    mode = current_mode()
    if mode is not None:
        mode.run(RowsLaunch(of_x, of_out, function), (x, out))
        return out
    start = _launch(launch_stream(info, handle), of_x, of_out, function, len(arrays[1:]))
    if rest is not None:
        _calls.keep(rest, arrays, held, None if is_new else out, lambda: KnownCall(start, given))
    return out


# -- what is given --------------------------------------------------------------------------------------------------------

def _check_dtype(info: ArrayInfo, name: str) -> None:
    if info.dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {info.dtype.name}; {', '.join(FLOATS[:-1])} or {FLOATS[-1]} is needed")


def _check_out(x: ArrayInfo, out: ArrayInfo) -> None:
    if out.dtype not in EIGHT:
        _check_dtype(out, "out")
    if out.shape != x.shape:
        raise ValueError(f"out has shape {out.shape}; x has {x.shape}, and the result has one element for each of its")
    check_out(out, {})
    if shares_memory(x, out) and not are_the_same(x, out):
        raise ValueError("out overlaps x in memory; it may be x itself (the same address, shape, strides and dtype), but no "
                         "other part of it")


def matrix(info: ArrayInfo, name: str) -> ArrayInfo:
    """An array (..., N) as a matrix of rows, which lie at one distance from each other.

    Raises ValueError where they do not.

    >>> x = np.zeros((4, 3, 8), np.float32)
    >>> matrix(describe(x[:, :, :6]), "x").shape, matrix(describe(x[0, 0]), "x").shape
    ((12, 6), (1, 8))
    """
    *leading, columns = info.shape
    extents = [(n, stride) for n, stride in zip(leading, info.strides) if n != 1]
    count = math.prod(leading)
    if count and any(outer != n * inner for (_, outer), (n, inner) in pairwise(extents)):
        raise ValueError(f"{name} has shape {info.shape} and strides {info.strides} (in elements): its rows do not lie at "
                         "one distance from each other; pass a contiguous copy, or one slice at a time")
    if count >= 2**31 or columns >= 2**31:
        raise ValueError(f"{name} has {count} rows of {columns} elements; less than 2**31 of each is needed")
    step = extents[-1][1] if extents else columns * info.strides[-1]
    return info._replace(shape=(count, columns), strides=(step, info.strides[-1]))


class RowsLaunch:
    """A kernel for matrices of one kind, and its arguments."""

    def __init__(self, x: ArrayInfo, out: ArrayInfo, function: RowFunction):
        working = x.dtype if x.dtype.itemsize >= 4 else np.dtype(np.float32)
        count, columns = x.shape
        device = target(x.device)
        wider = max(x.dtype.itemsize, out.dtype.itemsize)
        team, source, vector = choose(RowsProblem(columns, wider, working, rows=count), device).spec
        self.spec = RowsSpec(team, source, vector, working, function, out.dtype, device.starts_early)
        self.shape = count, columns
        self.in_place = are_the_same(x, out)           # what is written cannot be read as what never changes
        self.x, self.out = frozen_rows(x, readonly=not self.in_place), frozen_rows(out, readonly=False)
        self.arguments = [freeze(self.spec), self.x, self.out, freeze_scalar(count), freeze_scalar(columns)]
        self.launchable = Launchable(rows, self.arguments, team.block, -(-count // team.rows) * team.blocks, device,
                                     x.device, team.shared_bytes, team.blocks, max(1, RESIDENT // team.block),
                                     self.spec.starts_early)

    # -- without a GPU (`gemmkit.emulator`) ----------------------------------------------------------------------------

    def filled(self, arrays: tuple[Any, Any]) -> list[Any]:
        return [arrays[1]]

    def emulated(self, arrays: tuple[Any, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = {}
        for name, array, frozen in (("out", arrays[1], self.out), ("x", arrays[0], self.x)):
            how = dict(readonly=True) if name == "x" and not self.in_place else dict(written=self.in_place)
            kind = frozen.kind
            views[name] = arena.view_of(frozen.arrays[0], array, name, kind.unit, kind.alignment, **how)
        yield self.launchable, (arena.component(self.spec), views["x"], views["out"], *self.shape)


def frozen_rows(info: ArrayInfo, readonly: bool = True) -> Frozen:
    """A matrix of rows as the kernels take it."""
    return freeze_array(info, 1 if info.strides[1] == 1 or info.shape[1] == 1 else None, readonly=readonly)


# -- on a GPU -------------------------------------------------------------------------------------------------------------

def _launch(stream: int, x: ArrayInfo, out: ArrayInfo, function: RowFunction, last: int) -> Start:
    """Launch it: a call brings the ``last`` of what its function does before the others."""
    held = components.given_by(function)
    first = len(held.slots) - last

    def made(current: Current) -> Launch:
        kernel = RowsLaunch(x, out, current(function)).launchable
        at_x, at_out = kernel.slot(1), kernel.slot(2)
        assert at_x is not None and at_out is not None
        places = [*held.slots[first:], *held.slots[:first]]
        numbers = [Put(slot, n, encoder=components.number) for n, slot in enumerate(places, 2)]
        puts = [Put(at_out, 0), Put(at_x, 1), *numbers]
        return Launch(kernel, puts)

    key = rows, x[1:6], out[1:6], x.pointer % WORDS, out.pointer % WORDS, are_the_same(x, out), held.key, last
    start = launch_of(key, made, type(function).__qualname__).start
    start(stream, (out.pointer, x.pointer, *held.brought[first:], *held.brought[:first]))
    return start


def softmax(x: Any, *, scale: float = 1.0, out: Any = None, stream: Any = None) -> Any:
    """The softmax of ``scale * x`` along the last axis.

    Args:
        x: an array (..., N) of float16, bfloat16, float32 or float64; leading axes must be one (strides that collapse).
        scale: a factor, such as one over the root of the head size; a run-time number.
        out: an array of x's shape to store into, of any of these dtypes; x itself is allowed. None makes one like x.
        stream: the stream to launch on; None for the library's current one.

    Raises:
        TypeError: x or out is no array of these dtypes, or on the host outside of `gemmkit.emulate`.
        ValueError: shapes differ, leading axes do not collapse, out shares memory with x without being x, or scale is no
            finite float32 (float64 if x is float64).

    >>> import numpy as np, gemmkit
    >>> with gemmkit.emulate():
    ...     gemmkit.softmax(np.array([1.0, 1.0], np.float32), scale=2.0).tolist()
    [0.5, 0.5]
    """
    return _run_own(SoftmaxRows, x, scale, "scale", (), out, stream)


def log_softmax(x: Any, *, scale: float = 1.0, out: Any = None, stream: Any = None) -> Any:
    """The logarithm of `softmax`, which does not underflow.

    Args:
        x: (..., N), as `softmax` takes it.
        scale: a factor of x; a run-time number.
        out: an array of x's shape to store into, as `softmax` takes it; None makes one like x.
        stream: the stream to launch on; None for the library's current one.

    Raises:
        ValueError, TypeError: as `softmax`.

    >>> import numpy as np, gemmkit
    >>> with gemmkit.emulate():
    ...     gemmkit.log_softmax(np.array([0.0, 1000.0], np.float32)).tolist()
    [-1000.0, 0.0]
    """
    return _run_own(LogSoftmax, x, scale, "scale", (), out, stream)


def layernorm(x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
    """(x - mean) / sqrt(variance + eps) gamma + beta along the last axis (Ba et al., 2016).

    The kernel adds squares in float32 (in float64 for float64), which overflow if deviations exceed about 1e19. Such a row
    becomes beta, or zeros, as in NumPy's float32. `rmsnorm` does the same.

    Args:
        x: (..., N), as `softmax` takes it.
        gamma: N factors, of any dtype of real numbers; None for none.
        beta: N terms, given if gamma is.
        eps: added to the variance.
        out: an array of x's shape to store into, as `softmax` takes it; None makes one like x.
        stream: the stream to launch on; None for the library's current one.

    Raises:
        ValueError, TypeError: as of `softmax`; gamma or beta does not have N elements, or is given alone.

    >>> import numpy as np, gemmkit
    >>> with gemmkit.emulate():
    ...     gemmkit.layernorm(np.array([1.0, 3.0], np.float32), eps=0.0).tolist()
    [-1.0, 1.0]
    """
    if (gamma is None) is not (beta is None):
        raise ValueError(f"{'beta' if gamma is None else 'gamma'} is given alone; give gamma and beta, or none of them")
    return _run_own(LayerNormRows, x, eps, "eps", () if gamma is None else (gamma, beta), out, stream)


def rmsnorm(x: Any, gamma: Any = None, *, eps: float = 1e-6, out: Any = None, stream: Any = None) -> Any:
    """x / sqrt(mean of squares + eps) gamma along the last axis (Zhang and Sennrich, 2019).

    Args:
        x: (..., N), as `softmax` takes it.
        gamma: N factors, of any dtype of real numbers; None for none.
        eps: added to the mean of squares.
        out: an array of x's shape to store into, as `softmax` takes it; None makes one like x.
        stream: the stream to launch on; None for the library's current one.

    Raises:
        ValueError, TypeError: as `softmax`; gamma does not have N elements.

    >>> import numpy as np, gemmkit
    >>> with gemmkit.emulate():
    ...     gemmkit.rmsnorm(np.array([2.0, -2.0], np.float32), eps=0.0).tolist()
    [1.0, -1.0]
    """
    return _run_own(RMSNormRows, x, eps, "eps", () if gamma is None else (gamma,), out, stream)


def to_float8(x: Any, *, block: int | None = 128, dtype: Any = "float8_e4m3fn", stream: Any = None) -> tuple[Any, Any]:
    """Quantise to 8-bit floats, with a float32 scale for each ``block`` elements along the last axis.

    Args:
        x: (..., N) of float16, bfloat16 or float32; leading axes must be one (strides that collapse).
        block: 128, the blocks of `gemmkit.operators.BlockScaledOp`; N must be a multiple of 4. None: a scale for each row.
        dtype: float8_e4m3fn or float8_e5m2.
        stream: the stream to launch on; None for the library's current one.

    Returns:
        (q, scales): q like x, and scales (..., N / block), rounded up; (..., 1) without blocks. x is about ``q * scales``:
        the largest magnitude of a block becomes the largest of dtype. A scale is the least normal float32 at least.

    Raises:
        TypeError: x is no array of these dtypes, or on the host outside of `gemmkit.emulate`; another dtype.
        ValueError: another block; N is no multiple of 4; leading axes do not collapse.

    >>> import numpy as np, gemmkit as gk
    >>> with gk.emulate():
    ...     q, scales = gk.functions.rows.to_float8(np.float32([[1, 2, -4, 0]]))
    >>> q.astype(np.float32).tolist(), (scales * 448).tolist()
    ([[112.0, 224.0, -448.0, 0.0]], [[4.0]])
    """
    rest = QuantisedRows, block, dtype
    scales = _scales.again(rest, (x,), (), (), None, stream)
    if scales is not None:
        found = _calls.again(rest, (x,), (describe(scales, "scales").pointer,), (), None, stream)
        if found is not None:
            return found, scales
    kind, info = dtype_given(dtype, "to_float8"), describe(x, "x")
    if kind not in EIGHT:
        raise TypeError(f"dtype={kind}: float8_e4m3fn or float8_e5m2 is needed")
    if info.dtype.name not in FLOATS[:-1]:
        raise TypeError(f"x has dtype {info.dtype.name}; float16, bfloat16 or float32 is needed")
    if block not in (128, None):
        raise ValueError(f"block={block!r}: 128 is needed, or None for a scale of each row")
    if not info.shape:
        raise ValueError("x has no axis; it needs one at least, along which its rows lie")
    *leading, columns = info.shape
    if block is not None and columns % 4:
        raise ValueError(f"x has rows of {columns} elements; with blocks a multiple of 4 is needed")
    blocks = 1 if block is None else -(-columns // block)
    scales = empty_like(x, (*leading, blocks), np.float32)
    of_scales = describe(scales, "scales")
    held = strided(scales, of_scales, (math.prod(leading), blocks), (blocks, 1))
    out = _run(x, QuantisedRows(held, kind, block or 0), None, stream, rest, (x,), dtype=kind)
    if current_mode() is None:
        _scales.keep(rest, (x,), (), None, lambda: KnownCall(lambda stream, brought: None, of_scales))
    return out, scales


_scales = KnownCalls()                 # of `to_float8`: a new array for the scales

def rowwise(x: Any, function: RowFunction, *, out: Any = None, stream: Any = None) -> Any:
    """A function of each row of ``x`` (its last axis), in one launch.

    Args:
        x: (..., N), as `softmax` takes it.
        function: a `RowFunction`; arrays that it holds are on x's device.
        out: an array of x's shape to store into, as `softmax` takes it; None makes one like x.
        stream: the stream to launch on; None for the library's current one.

    Returns:
        ``out``, or a new array like x.

    Raises:
        TypeError: function is no RowFunction; else as of `softmax`.
        ValueError: an array of the function's does not fit, or shares memory with out; else as of `softmax`.
        ComponentError: the function's code cannot be compiled.
    """
    if not isinstance(function, RowFunction):
        raise TypeError(f"function={function!r}: a RowFunction is needed, such as gemmkit.functions.rows.SoftmaxRows()")
    return run_rows(x, function, out, stream)


def _number(value: Any, name: str, x: Any) -> float:
    """A scale or an eps, which the kernel has in float64 for an x of float64, and else in float32."""
    number = finite_number(value, name)
    if abs(number) > FLOAT32_MAX and describe(x, "x").dtype != np.float64:
        raise ValueError(f"{name}={value!r}: a finite number of float32 is needed, in which the rows of an x of "
                         f"{describe(x, 'x').dtype} are computed")
    return number
