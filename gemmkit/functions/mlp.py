"""Multi-layer perceptrons: a program, whose activations stay in registers from layer to layer.

>>> import numpy as np, gemmkit as gk
>>> x, w = np.eye(2, 16, dtype=np.float16), np.full((2, 16, 16), 0.5, np.float16)
>>> with gk.emulate():
...     gk.mlp(x, w)[:, 0].tolist()
[4.0, 4.0]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit import components
from gemmkit import programs as gp
from gemmkit.components import Component, arrays_of, check_held
from gemmkit.emulator import current_mode
from gemmkit.epilogues.activations import relu
from gemmkit.functions.attention import launch
from gemmkit.functions.rows import matrix
from gemmkit.lang.checks import function_given
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Numeric
from gemmkit.plans.launch import Cache, cache
from gemmkit.plans.problem import check_places
from gemmkit.programs.decorated import program
from gemmkit.programs.mapping import KERNELS, MULTISTAGE
from gemmkit.programs.plan import ProgramPlan
from gemmkit.programs.values import Parameter
from gemmkit.runtime.array_info import byte_range
from gemmkit.runtime.arrays import (
    KEYS,
    ArrayInfo,
    as_stream_handle,
    describe,
    empty_like,
    key_of,
    overlaps_itself,
    shares_memory,
)
from gemmkit.runtime.device import launch_stream, target

# --------------------------------------------------------------------------------------------------
# x, the weights, the biases and the result of an MLP as matrices of layers that chain; what does not fit is refused.

DTYPES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIDEST = 256
F32 = np.dtype(np.float32)
LIMIT = 2**30                          # rows of x: coordinates are 32 bits wide


@dataclass(frozen=True, eq=False)
class LayerStack:
    """The weights of each layer as (K, N), and its biases, or none: checked against each other. ``kind`` is the
    same for stacks of the same description; ``ranges`` are each array's first byte, the one behind its last, its name."""

    weights: tuple[ArrayInfo, ...]
    biases: tuple[ArrayInfo, ...]
    kind: int
    ranges: tuple[tuple[int, int, str, ArrayInfo], ...] = ()

    def part(self, first: int, end: int) -> LayerStack:
        """Some of the layers."""
        return layer_stack(self.weights[first:end], self.biases[first:end])


class Layers(NamedTuple):
    """x, and the layers."""

    x: ArrayInfo
    stack: LayerStack

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
        raise TypeError(f"x has dtype {given.dtype}; float16 or bfloat16 is needed")
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
        raise TypeError(f"weights[0] has dtype {first.dtype} and x has {given.dtype}; x and all weights must have one dtype")
    if first.shape[0] != width:
        raise _unchained("weights[0]", first, "x", width)
    return Layers(given, stack)


# -- the layers of a call, which mostly are those of the call before ------------------------------------------------------

_stacks = Cache()
_kinds: dict[tuple[Any, ...], int] = {}


def stack_of(weights: Any, biases: Any) -> LayerStack:
    """The layers, described and checked where they are not those of an earlier call."""
    key = _key(weights, "weights"), None if biases is None else _key(biases, "biases")
    found: LayerStack | None = _stacks.get(key)
    return found or _stacks.keep(key, _stack(weights, biases))


def _key(arrays: Any, name: str) -> tuple[Any, ...]:
    """What tells arrays of other addresses or descriptions."""
    if isinstance(arrays, (list, tuple)):
        return tuple([KEYS.get(type(one), key_of)(one, f"{name}[{n}]") for n, one in enumerate(arrays)])
    return KEYS.get(type(arrays), key_of)(arrays, name)


def _stack(weights: Any, biases: Any) -> LayerStack:
    of_weights = _several(weights, "weights", 3)
    of_biases = [] if biases is None else _several(biases, "biases", 2)
    if not of_weights:
        raise ValueError("weights is empty; at least one layer is needed")
    if biases is not None and len(of_biases) != len(of_weights):
        raise ValueError(f"biases has {len(of_biases)} arrays and weights has {len(of_weights)}; give one for each layer, "
                         "or biases=None")
    check_places({**dict(of_weights), **dict(of_biases)})
    _check_dtypes(of_weights, of_biases)
    _check_shapes(of_weights, of_biases)
    ranges = tuple((*byte_range(info), name, info) for name, info in [*of_weights, *of_biases])
    return layer_stack([info for _, info in of_weights], [info for _, info in of_biases], ranges)


def layer_stack(weights: Sequence[ArrayInfo], biases: Sequence[ArrayInfo], ranges: Any = ()) -> LayerStack:
    kind = len(weights), tuple((*info[1:6], info.pointer % 16) for info in [*weights, *biases])
    return LayerStack(tuple(weights), tuple(biases), _kinds.setdefault(kind, len(_kinds)), ranges)


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


def _check_dtypes(weights: list[Any], biases: list[Any]) -> None:
    (_, first), *_ = weights
    for name, info in weights:
        if info.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {info.dtype}; float16 or bfloat16 is needed")
        if info.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {info.dtype} and weights[0] has {first.dtype}; x and all weights must have "
                            "one dtype")
    for name, info in biases:
        if info.dtype not in (first.dtype, np.dtype(np.float32)):
            raise TypeError(f"{name} has dtype {info.dtype}; x's dtype, {first.dtype}, or float32 is needed")
        if info.dtype != biases[0][1].dtype:
            raise TypeError(f"{name} has dtype {info.dtype} and biases[0] has {biases[0][1].dtype}; all biases must have "
                            "one dtype")


def _check_shapes(weights: list[Any], biases: list[Any]) -> None:
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
    return ValueError(f"{name} has shape {info.shape}; {what} has {width} columns, so it needs as many rows (for a "
                      "torch.nn.Linear pass weight.T)")


def _too_wide(name: str, shape: tuple[int, ...], width: int) -> Exception:
    if not width:
        return ValueError(f"{name} has shape {shape}; a layer needs at least one column")
    return ConfigError(f"{name} has shape {shape}: {width} columns; mlp keeps up to {WIDEST} activations in registers. "
                       "Compute wider layers one by one: gemmkit.matmul(x, w, epilogue=epilogues.Bias(b) | "
                       "epilogues.ReLU())")


def check_out(out: ArrayInfo, shape: tuple[int, ...], layers: Layers) -> None:
    """Raise where ``out`` does not fit the result of this shape."""
    if out.dtype != layers.x.dtype:
        raise TypeError(f"out has dtype {out.dtype}; the result has x's dtype, {layers.x.dtype}")
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

def order_of(layers: Layers) -> bool:
    """Whether weights are contiguous along K; raises ValueError where they are not all alike."""
    for axis in (1, 0):
        if all(info.strides[axis] == 1 or info.shape[axis] == 1 for info in layers.weights):
            return axis == 0
    strides = {info.strides: n for n, info in reversed(list(enumerate(layers.weights)))}
    said = ", ".join(f"weights[{n}] has strides {found}" for found, n in sorted(strides.items(), key=lambda x: x[1]))
    raise ValueError(f"{said} (in elements): all weights need a stride of 1 along N, or all along K; pass contiguous copies")


def check_loadable(operands: dict[str, ArrayInfo]) -> None:
    """Raise ValueError for a matrix whose lines no kernel can copy: elements apart, or one by one."""
    for name, info in operands.items():
        if info.strides[1] != 1 and info.shape[1] > 1:
            raise ValueError(f"{name} has strides {info.strides} (in elements); contiguous lines are needed: pass a "
                             "contiguous copy")
        if KERNELS[MULTISTAGE].why_not(info) is not None:
            raise ValueError(f"{name} has shape {info.shape}, strides {info.strides} (in elements) and begins at a multiple "
                             f"of {math.gcd(info.pointer, 16)} bytes: lines of an even number of elements, at addresses "
                             "that are multiples of 4 bytes, are needed; pad it with zeros")


# --------------------------------------------------------------------------------------------------
# An MLP is a program: its kernels are derived (`gemmkit.programs`).

LEAST = (8, 0)
MOST = 24                              # layers of a launch: its text has all of them
RELU = "relu"


@dataclass(frozen=True)
class Activation(Component):
    """A plain function of one number; arrays and NumPy scalars that it captured are arguments of the kernel."""

    f: Any

    def __post_init__(self) -> None:
        given = function_given(self.f, "mlp", "activation", (1,), "f(x), a function of one number,")
        object.__setattr__(self, "f", given)

    def __call__(self, x: Numeric) -> Any:
        return self.f(x)


Rule = Activation | str | None         # "relu", or nothing


@program
def perceptron(out: Parameter, x: Parameter, activation: Rule, last: Rule, depth: int, k_major: bool,
               **layers: Parameter) -> None:
    """``layers``: the weights of each layer, w0, w1, ..., and its biases, b0, b1, ..., if there are any."""
    for m in gp.parallel(x.rows):
        h = x[m]
        for n in range(depth):
            w = layers[f"w{n}"]
            h = h @ (w.T if k_major else w)
            h = h + layers[f"b{n}"] if f"b{n}" in layers else h
            h = applied(activation, h).astype(x.dtype) if n < depth - 1 else applied(last, h)
        out[m] = h


def applied(rule: Any, h: Any) -> Any:
    return h if rule is None else gp.maximum(h, 0.0) if rule == RELU else gp.call(rule, h)


class MlpCall(NamedTuple):
    """A checked call: x and out are matrices."""

    layers: Layers
    out: ArrayInfo
    activation: Rule
    last: Rule

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `perceptron`, with descriptions in place of arrays. Raises ValueError for what no kernel can load."""
        layers, k_major = self.layers, order_of(self.layers)
        weights = [transposed(info) if k_major else info for info in layers.weights]
        check_loadable({"x": layers.x, **{f"weights[{n}]": info for n, info in enumerate(weights)}})
        return dict(out=self.out, x=layers.x, activation=self.activation, last=self.last, depth=layers.depth,
                    k_major=k_major, **{f"w{n}": info for n, info in enumerate(weights)},
                    **{f"b{n}": info for n, info in enumerate(layers.biases)})

    def parts(self, between: list[ArrayInfo]) -> Iterator[MlpCall]:
        """The call as launches of at most `MOST` layers, with the activations ``between`` them in memory."""
        stack, given = self.layers.stack, [self.layers.x, *between, self.out]
        for n, first in enumerate(range(0, self.layers.depth, MOST)):
            is_end = first + MOST >= self.layers.depth
            part = stack if not between else stack.part(first, first + MOST)
            yield MlpCall(Layers(given[n], part), given[n + 1], self.activation, self.last if is_end else self.activation)


def transposed(info: ArrayInfo) -> ArrayInfo:
    return info._replace(shape=info.shape[::-1], strides=info.strides[::-1])


def run_mlp(call: MlpCall, arrays: dict[str, Any], stream: int | None) -> None:
    """Compute a call that has a result, on a stream; None: the library's current one."""
    layers = call.layers
    device = target(layers.x.device)
    if device.arch < LEAST:
        raise ConfigError(f"mlp needs compute capability 8.0 or above, but {device.name} has "
                          f"{device.arch[0]}.{device.arch[1]}; on this GPU call gemmkit.matmul layer by layer")
    rows, ends = layers.x.shape[0], range(MOST, layers.depth, MOST)
    held = [empty_like(arrays["x"], (rows, layers.weights[n].shape[0]), layers.x.dtype) for n in ends]
    ways = [arrays["x"], *held, arrays["out"]]
    for n, part in enumerate(call.parts([describe(x, "activations") for x in held])):
        if current_mode() is not None:
            named = {f"{name[0]}{k}": x for name in ("weights", "biases") if arrays[name] is not None
                     for k, x in enumerate(list(arrays[name])[n * MOST:(n + 1) * MOST])}
            launch(perceptron, part.arguments, {"x": ways[n], "out": ways[n + 1], **named}, part.layers.x, stream)
        elif not _again(part, stream):
            _first(part, stream)


_plans = cache()                       # by kinds of arrays, and code of activations


def _like(call: MlpCall) -> Any:
    rules = [x for x in (call.activation, call.last) if isinstance(x, Activation)]
    x, out = ((*info[1:6], info.pointer % 16) for info in (call.layers.x, call.out))
    return call.layers.stack.kind, x, out, call.activation == RELU, call.last == RELU, components.given_by(*rules).key


def _again(call: MlpCall, stream: int | None) -> bool:
    """Launch a call like an earlier one."""
    plan: ProgramPlan | None = _plans.get(_like(call))
    if plan is None:
        return False
    layers = call.layers
    at = {"out": call.out, "x": layers.x, **{f"w{n}": x for n, x in enumerate(layers.weights)},
          **{f"b{n}": x for n, x in enumerate(layers.biases)}}
    brought = plan.called_with({"activation": call.activation, "last": call.last}).brought if plan.callees.all else ()
    plan.start(launch_stream(layers.x, stream), (*[at[name].pointer for name in plan.given], 0, *brought))
    return True


def _first(call: MlpCall, stream: int | None) -> None:
    plan = launch(perceptron, call.arguments, {}, call.layers.x, stream)
    if plan is not None:
        _plans.keep(_like(call), plan.without_arrays())


def mlp(x: Any, weights: Any, biases: Any = None, activation: Any = relu, *, last: Any = None, out: Any = None,
        stream: Any = None) -> Any:
    """last(...activation(activation(x W1 + b1) W2 + b2)... WL + bL): a multi-layer perceptron. Forward only.

    Accumulators are float32, and the kernel adds biases in float32. Between layers it rounds activations to x's dtype, as
    separate products round what they store; activations never leave the registers.

    Args:
        x: (..., K), float16 or bfloat16; leading axes must be one (strides that collapse).
        weights: a list of (K, N) arrays of x's dtype, or one stacked (layers, K, N) array: any number of layers, of any
            widths up to 256 that chain. All are contiguous along N, or all along K (``[layer.weight.T for layer in ...]``
            of torch.nn.Linear).
        biases: a list of (N,) arrays, or one stacked (layers, N) array, of x's dtype or float32; None for no biases.
        activation: a function of one number (device code), of all layers but the last;
        `gemmkit.epilogues.activations.relu` where
            none is given.
        last: the activation of the last layer; None leaves its values as they are, as a torch.nn.Sequential does that ends
            in a Linear. ``last=activation`` applies the activation after every layer.
        out: an array (..., N) of x's dtype to write; None makes one.
        stream: the stream to launch on; None for the library's current one.

    Returns: ``out``, or a new array like x.

    A launch computes up to 24 layers; deeper MLPs are several, with activations in memory between them. Each list of widths
    is a kernel of its own, which is compiled once. On Hopper TMA loads x and weights, if their addresses and strides are
    multiples of 16 bytes. Other arrays, and other GPUs from compute capability 8.0 on, take the multistage kernel, which
    requires lines that begin at multiples of 4 bytes.

    Raises:
        TypeError: an argument is no array, of another dtype, or on the host outside of `gemmkit.emulate`; activation or last
            is no function of one number.
        ValueError: shapes do not chain, strides cannot be loaded, out overlaps what is read, a tensor requires a gradient.
        ConfigError: a layer wider than 256; a GPU of a compute capability below 8.0.
        ComponentError: code of activation or last cannot be compiled.

    Fused as in Müller et al., *Real-time neural radiance caching for path tracing* (2021), without shared memory in between.

    >>> import numpy as np, gemmkit as gk
    >>> x = np.float16([[1, 2] + 14 * [0]])
    >>> weights = [np.eye(16, 32, dtype=np.float16), np.eye(32, 16, dtype=np.float16)]
    >>> biases = [np.zeros(32, np.float32), np.full(16, -1.5, np.float32)]
    >>> with gk.emulate():
    ...     gk.mlp(x, weights, biases)[0, :3].tolist()
    ...     gk.mlp(x, weights, biases, lambda v: 2 * v, last=abs)[0, :3].tolist()
    [-0.5, 0.5, -1.5]
    [0.5, 2.5, 1.5]
    """
    rule, end = (f if f is None else RELU if f is relu else Activation(f) for f in (activation, last))
    if rule is None:
        raise TypeError("activation=None: a function of one number is needed, such as "
                        "gemmkit.epilogues.activations.relu")
    handle = None if stream is None else as_stream_handle(stream)
    layers = layers_of(x, weights, biases)
    shape = (*layers.x.shape[:-1], layers.columns)
    result = empty_like(x, shape, layers.x.dtype) if out is None else out
    given = describe(result, "out")
    held = [(name, one) for name, part in (("activation", rule), ("last", end))
            if isinstance(part, Activation) for one in arrays_of(part)]
    check_places({"x": layers.x, "out": given, **{one.name: one.info for _, one in held}})
    check_out(given, shape, layers)
    check_held(held, {"out": given})
    if math.prod(shape):
        call = MlpCall(layers._replace(x=matrix(layers.x, "x")), matrix(given, "out"), rule, end)
        run_mlp(call, {"x": x, "weights": weights, "biases": biases, "out": result}, handle)
    return result
