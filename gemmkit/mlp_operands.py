"""x, the weights, the biases and the result of an MLP as matrices of layers that chain; what does not fit is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.config import ConfigError
from gemmkit.launch import Cache
from gemmkit.problem import check_places
from gemmkit.runtime.array_info import byte_range
from gemmkit.runtime.arrays import ArrayInfo, describe, overlaps_itself, shares_memory
from gemmkit.runtime.recognition import KEYS, key_of

DTYPES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIDEST = 256
CHUNK = 8                              # elements that a thread copies at a time, at most
LIMIT = 2**30                          # rows of x: coordinates are 32 bits wide


@dataclass(frozen=True, eq=False)
class Stack:
    """The weights of each layer as (K, N), and its biases as (1, N), or none: checked against each other. ``kind`` is the
    same for stacks of the same description; ``ranges`` are each array's first byte, the one behind its last, its name."""

    weights: tuple[ArrayInfo, ...]
    biases: tuple[ArrayInfo, ...]
    kind: int
    ranges: tuple[tuple[int, int, str, ArrayInfo], ...]


class Layers(NamedTuple):
    """x, and the layers."""

    x: ArrayInfo
    stack: Stack

    @property
    def weights(self) -> tuple[ArrayInfo, ...]:
        return self.stack.weights

    @property
    def biases(self) -> tuple[ArrayInfo, ...]:
        return self.stack.biases

    @property
    def inputs(self) -> int:
        """Columns of x."""
        return self.x.shape[-1]

    @property
    def columns(self) -> int:
        return self.weights[-1].shape[1]

    @property
    def depth(self) -> int:
        return len(self.weights)


def layers_of(x: Any, weights: Any, biases: Any) -> Layers:
    """The arrays of a call, checked against each other.

    Raises:
        TypeError: what is no array; dtypes other than float16 and bfloat16, or different ones; arrays on the host outside of
            the emulator.
        ValueError: shapes that do not chain, as many biases as there are not layers, a tensor that requires a gradient.
        ConfigError: a layer wider than 256.
    """
    given = describe(x, "x")
    if given.dtype not in DTYPES:
        raise TypeError(f"x is of {given.dtype}; float16 or bfloat16 is needed")
    if not given.shape:
        raise ValueError("x has no axis; (..., K) is needed")
    width, rows = given.shape[-1], math.prod(given.shape[:-1])
    if not 1 <= width <= WIDEST:
        raise _too_wide("x", given.shape, width)
    if rows >= LIMIT:
        raise ValueError(f"x has {rows} rows; less than 2**30 are needed")
    stack = stack_of(weights, biases)
    first = stack.weights[0]
    check_places({"x": given, "weights[0]": first})
    if first.dtype != given.dtype:
        raise TypeError(f"weights[0] is of {first.dtype} and x of {given.dtype}; x and all weights need one dtype")
    if first.shape[0] != width:
        raise _unchained("weights[0]", first, "x", width)
    return Layers(given, stack)


# -- the layers of a call, which mostly are those of the call before ------------------------------------------------------

_stacks = Cache()
_kinds: dict[tuple, int] = {}


def stack_of(weights: Any, biases: Any) -> Stack:
    """The layers, described and checked where they are not those of an earlier call."""
    key = _key(weights, "weights"), None if biases is None else _key(biases, "biases")
    found: Stack | None = _stacks.get(key)
    return found or _stacks.keep(key, _stack(weights, biases))


def _key(arrays: Any, name: str) -> tuple:
    """What tells arrays of other addresses or descriptions."""
    if isinstance(arrays, (list, tuple)):
        return tuple([KEYS.get(type(one), key_of)(one, f"{name}[{n}]") for n, one in enumerate(arrays)])
    return KEYS.get(type(arrays), key_of)(arrays, name)


def _stack(weights: Any, biases: Any) -> Stack:
    of_weights = _several(weights, "weights", 3)
    of_biases = [] if biases is None else _several(biases, "biases", 2)
    if not of_weights:
        raise ValueError("weights is empty; one layer at least is needed")
    if biases is not None and len(of_biases) != len(of_weights):
        raise ValueError(f"biases are of {len(of_biases)} layers and weights of {len(of_weights)}; one for each layer is "
                         "needed, or biases=None")
    check_places({**dict(of_weights), **dict(of_biases)})
    _check_dtypes(of_weights, of_biases)
    _check_shapes(of_weights, of_biases)
    named = [*of_weights, *of_biases]
    rows = tuple(info._replace(shape=(1, *info.shape), strides=(0, *info.strides)) for _, info in of_biases)
    kind = tuple((*info[1:6], info.pointer % 16) for _, info in named)
    return Stack(tuple(info for _, info in of_weights), rows, _kinds.setdefault((len(of_weights), kind), len(_kinds)),
                 tuple((*byte_range(info), name, info) for name, info in named))


def _several(arrays: Any, name: str, ndim: int) -> list[tuple[str, ArrayInfo]]:
    """The arrays of a list, or those that are stacked in one, with the names that messages call them."""
    if isinstance(arrays, (list, tuple)):
        return [(f"{name}[{n}]", describe(one, f"{name}[{n}]")) for n, one in enumerate(arrays)]
    info = describe(arrays, name)
    if len(info.shape) != ndim:
        axes = "(layers, K, N)" if ndim == 3 else "(layers, N)"
        raise ValueError(f"{name} has shape {info.shape}; one array of {axes} is needed, or a list with an array for each "
                         "layer")
    step = info.strides[0] * info.dtype.itemsize
    return [(f"{name}[{n}]", info._replace(pointer=info.pointer + n * step, shape=info.shape[1:], strides=info.strides[1:]))
            for n in range(info.shape[0])]


def _check_dtypes(weights: list, biases: list) -> None:
    (_, first), *_ = weights
    for name, info in weights:
        if info.dtype not in DTYPES:
            raise TypeError(f"{name} is of {info.dtype}; float16 or bfloat16 is needed")
        if info.dtype != first.dtype:
            raise TypeError(f"{name} is of {info.dtype} and weights[0] of {first.dtype}; x and all weights need one dtype")
    for name, info in biases:
        if info.dtype not in (first.dtype, np.dtype(np.float32)):
            raise TypeError(f"{name} is of {info.dtype}; x's dtype, {first.dtype}, or float32 is needed")
        if info.dtype != biases[0][1].dtype:
            raise TypeError(f"{name} is of {info.dtype} and biases[0] of {biases[0][1].dtype}; all biases need one dtype")


def _check_shapes(weights: list, biases: list) -> None:
    width, what = None, ""
    for n, (name, info) in enumerate(weights):
        if len(info.shape) != 2:
            raise ValueError(f"{name} has shape {info.shape}; (K, N) is needed")
        if width is not None and info.shape[0] != width:
            raise _unchained(name, info, what, width)
        width, what = info.shape[1], name
        if not 1 <= width <= WIDEST:
            raise _too_wide(name, info.shape, width)
        if biases and biases[n][1].shape != (width,):
            raise ValueError(f"{biases[n][0]} has shape {biases[n][1].shape}; {name} has {width} columns, and ({width},) is "
                             "needed")


def _unchained(name: str, info: ArrayInfo, what: str, width: int) -> ValueError:
    return ValueError(f"{name} has shape {info.shape}; {what} has {width} columns, and as many rows are needed (of a "
                      "torch.nn.Linear it is weight.T)")


def _too_wide(name: str, shape: tuple[int, ...], width: int) -> Exception:
    if not width:
        return ValueError(f"{name} has shape {shape}; a layer has one column at least")
    return ConfigError(f"{name} has shape {shape}: {width} columns; activations of up to {WIDEST} stay in registers. Wider "
                       "layers are computed one by one: gemmkit.matmul(x, w, epilogue=epilogues.Bias(b) | epilogues.ReLU())")


def check_out(out: ArrayInfo, shape: tuple[int, ...], layers: Layers) -> None:
    """Raise where ``out`` does not fit the result of this shape."""
    if out.dtype != layers.x.dtype:
        raise TypeError(f"out is of {out.dtype}; the result is of x's dtype, {layers.x.dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; {shape} is needed")
    if out.readonly:
        raise ValueError("out is read-only; give a writable array, or leave it out")
    if overlaps_itself(out):
        raise ValueError(f"out has strides {out.strides}: several of its elements share memory")
    begin, end = byte_range(out)
    near = [(name, info) for first, last, name, info in layers.stack.ranges if first < end and begin < last]
    for name, info in (("x", layers.x), *near):
        if shares_memory(out, info):
            raise ValueError(f"out overlaps {name} in memory; blocks read {name} while others write out")


# -- how they lie ---------------------------------------------------------------------------------------------------------

def padded(width: int) -> int:
    """A width as kernels compute it.

    >>> padded(10), padded(64), padded(0)
    (32, 64, 0)
    """
    return -(-width // 32) * 32


def order_of(layers: Layers) -> bool:
    """Whether weights are contiguous along K; raises ValueError where they are not all alike."""
    for axis in (1, 0):
        if all(info.strides[axis] == 1 or info.shape[axis] == 1 for info in layers.weights):
            return axis == 0
    strides = {info.strides: n for n, info in reversed(list(enumerate(layers.weights)))}
    said = ", ".join(f"weights[{n}] has strides {found}" for found, n in sorted(strides.items(), key=lambda x: x[1]))
    raise ValueError(f"{said} (in elements): all weights need a stride of 1 along N, or all along K; pass contiguous copies")


def copied_at_once(layers: Layers, k_major: bool) -> int:
    """How many elements of x, and of every layer's weights, can be copied together: 2, 4 or 8.

    Raises ValueError for what cannot be copied but one by one.
    """
    least = CHUNK
    for name, info, axis in (("x", layers.x, 1), *((f"weights[{n}]", info, 0 if k_major else 1)
                                                   for n, info in enumerate(layers.weights))):
        size = int(info.dtype.itemsize)
        if info.strides[axis] != 1 and info.shape[axis] != 1:
            raise ValueError(f"{name} has strides {info.strides} (in elements); a stride of 1 along axis {axis} is needed: "
                             "pass a contiguous copy")
        step = info.strides[1 - axis] if info.shape[1 - axis] > 1 else 0
        run = math.gcd(CHUNK, info.shape[axis], step, info.pointer // size)
        if run < 2:
            raise ValueError(f"{name} has shape {info.shape}, strides {info.strides} (in elements) and begins at a multiple "
                             f"of {math.gcd(info.pointer, 16)} bytes: lines of an even number of elements, at addresses "
                             "that are multiples of 4 bytes, are needed; pad it with zeros")
        least = min(least, run)
    return least
