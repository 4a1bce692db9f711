"""Multi-layer perceptrons in one launch: activations stay in registers from layer to layer.

>>> import numpy as np, gemmkit as gk
>>> x, w = np.eye(2, 16, dtype=np.float16), np.full((2, 16, 16), 0.5, np.float16)
>>> with gk.emulate():
...     gk.mlp(x, w)[:, 0].tolist()
[4.0, 4.0]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit import components
from gemmkit.components import arrays_of, check_held, freeze
from gemmkit.emulator.mode import current_mode
from gemmkit.epilogues.activations import relu
from gemmkit.functions.rows import matrix
from gemmkit.kernels.mlp.kernel import mlp as mlp_kernel
from gemmkit.kernels.mlp.mma_kernel import ROWS, MmaMlpSpec, mlp_by_warps
from gemmkit.kernels.mlp.spec import (
    F32,
    Activation,
    MlpDirectStore,
    MlpMapping,
    MlpSizes,
    MlpSpec,
    MlpStore,
    MlpTmaStore,
    NoActivation,
    Relu,
    blocks_of,
    mappings,
    spec_of,
)
from gemmkit.kernels.sm90.family import TensorMapSlot
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.functions import Frozen, freeze_array
from gemmkit.lang.memory import EXTENTS, PLACES, PLACES_DTYPE, SIZES_DTYPE
from gemmkit.plans.compiled import Nothing
from gemmkit.plans.launch import Cache, Current, Launch, LaunchTable, Put, cache, launch_of
from gemmkit.plans.problem import check_places
from gemmkit.ptx.tma import WORDS, MapTable
from gemmkit.runtime import launch as workspace
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
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.streams import launch_stream
from gemmkit.runtime.tensor_maps import Encoder, why_not
from gemmkit.tuning.problems import Choice, MappingProblem, choose

# --------------------------------------------------------------------------------------------------
# x, the weights, the biases and the result of an MLP as matrices of layers that chain; what does not fit is refused.

DTYPES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIDEST = 256
CHUNK = 8                              # elements that a thread copies at a time, at most
LIMIT = 2**30                          # rows of x: coordinates are 32 bits wide


@dataclass(frozen=True, eq=False)
class LayerStack:
    """The weights of each layer as (K, N), and its biases as (1, N), or none: checked against each other. ``kind`` is the
    same for stacks of the same description; ``ranges`` are each array's first byte, the one behind its last, its name."""

    weights: tuple[ArrayInfo, ...]
    biases: tuple[ArrayInfo, ...]
    kind: int
    ranges: tuple[tuple[int, int, str, ArrayInfo], ...]


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
    named = [*of_weights, *of_biases]
    rows = tuple(info._replace(shape=(1, *info.shape), strides=(0, *info.strides)) for _, info in of_biases)
    kind = tuple((*info[1:6], info.pointer % 16) for _, info in named)
    return LayerStack(tuple(info for _, info in of_weights), rows, _kinds.setdefault((len(of_weights), kind), len(_kinds)),
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


# --------------------------------------------------------------------------------------------------
# Launches of an MLP: a mapping for its widths, tables of its layers in device memory, kernels kept by kind.

HOPPER, LEAST = (9, 0), (8, 0)


class MlpCall(NamedTuple):
    """A checked call: x and out are matrices."""

    layers: Layers
    out: ArrayInfo
    activation: Any
    last: Any


def run_mlp(call: MlpCall, arrays: dict[str, Any], stream: int | None) -> None:
    """Compute a call that has a result, on a stream; None: the library's current one."""
    mode = current_mode()
    if mode is not None:
        mode.run(MlpLaunch(call), arrays)
        return
    _launch(launch_stream(call.layers.x, stream), call)


class MlpLaunch:
    """A kernel for arrays of one kind, its tables, and its arguments."""

    def __init__(self, call: MlpCall):
        layers, device = call.layers, target(call.layers.x.device)
        if device.arch < LEAST:
            raise ConfigError(f"mlp needs compute capability 8.0 or above, but {device.name} has "
                              f"{device.arch[0]}.{device.arch[1]}; on this GPU call gemmkit.matmul layer by layer")
        self.call, self.layers = call, layers
        self.spec: Any = choose(MlpProblem(call), device).spec
        self.by_tma = isinstance(self.spec, MlpSpec)
        rows = layers.x.shape[0]
        self.blocks = blocks_of(self.spec, rows, device.sm_count) if self.by_tma else -(-rows // ROWS)
        self.sizes = MlpSizes(rows, layers.columns, layers.depth)
        self.launchable = Launchable(mlp_kernel if self.by_tma else mlp_by_warps, self.arguments, self.spec.threads,
                                     self.blocks,
                                     device, layers.x.device, self.spec.shared_bytes,
                                     cluster=self.spec.cluster.size if self.by_tma else 1, dependent=self.by_tma,
                                     registers=self.spec.warpgroups.warp_registers)

    # -- arguments ------------------------------------------------------------------------------------------------------

    @property
    def arguments(self) -> list[Frozen]:
        """The spec, the sizes, both tables; then out and the maps of x and out, or out, x, and weights and biases of a
        layer."""
        shapes, call = _table("sizes", self.shapes), self.call
        head = [freeze(self.spec), freeze(self.sizes)]
        if not self.by_tma:
            bias = freeze_array(self.layers.biases[0], 1, self.bias_alignment, readonly=True) if self.layers.biases else None
            return [*head, _table("places", self.places), shapes, freeze_array(call.out),
                    freeze_array(self.layers.x, 1, 2 * self.spec.run, readonly=True),
                    freeze_array(self.layers.weights[0], 0 if self.spec.k_major else 1, 2 * self.spec.run, readonly=True),
                    bias or freeze(Nothing())]
        out = freeze(Nothing()) if self.spec.store.uses_tma else freeze_array(call.out)
        maps = [made.frozen for made in self.maps]
        if len(maps) == 1:
            maps.append(freeze(Nothing()))
        return [*head, _table("places", np.empty((len(self.table), WORDS), PLACES_DTYPE)), shapes, out, *maps]

    @property
    def bias_alignment(self) -> int:
        return int(self.layers.biases[0].dtype.itemsize)

    @cached_property
    def maps(self) -> list[TensorMapSlot]:
        """Those that are parameters: of x, and of out."""
        made = [TensorMapSlot(0, 0, self.layers.x, 1, self.spec.x.map_spec(ROWS, 2))]
        if self.spec.store.uses_tma:
            made.append(TensorMapSlot(1, 1, self.call.out, 1, self.spec.out.map_spec(ROWS, 2)))
        return made

    @cached_property
    def table(self) -> list[TensorMapSlot]:
        """Those in the table: of the weights of all layers, and of their biases."""
        axis, spec = 0 if self.spec.k_major else 1, self.spec
        made = [TensorMapSlot(0, 0, info, axis, spec.weights_of(n, self.layers.depth).map_spec(spec.cluster.size))
                for n, info in enumerate(self.layers.weights)]
        return made + [TensorMapSlot(0, 0, info, 1, spec.bias_map) for info in self.layers.biases]

    @cached_property
    def shapes(self) -> np.ndarray:
        """Extents of weights and biases (`gemmkit.lang.memory`)."""
        table = np.zeros((self.layers.depth, EXTENTS + 4), SIZES_DTYPE)
        for row, info in zip(table, self.layers.weights):
            row[EXTENTS:] = *info.shape, 1, info.shape[1]
        return table

    @cached_property
    def places(self) -> np.ndarray:
        """Addresses and strides of weights and biases."""
        table = np.zeros((self.layers.depth, 2 * PLACES), PLACES_DTYPE)
        for n, info in enumerate(self.layers.weights):
            table[n, :PLACES] = info.pointer, *info.strides
        for n, info in enumerate(self.layers.biases):
            table[n, PLACES:] = info.pointer, *info.strides
        return table

    # -- without a GPU (`gemmkit.emulator.mode`) -----------------------------------------------------------------------

    def filled(self, arrays: dict[str, Any]) -> list[Any]:
        return [arrays["out"]]

    def emulated(self, arrays: dict[str, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        """Of x, weights, biases or None, and out. (Weights and biases are lists, or arrays of one dimension more.)"""
        layers, axis = self.layers, 0 if self.spec.k_major else 1
        given = {name: [] if arrays[name] is None else list(arrays[name]) for name in ("weights", "biases")}

        def several(name: str, infos: tuple[ArrayInfo, ...], unit: int) -> list[Any]:
            return [arena.view_of(info, array, f"{name}[{n}]", unit, readonly=True)
                    for n, (array, info) in enumerate(zip(given[name], infos))]

        out = arena.view_of(self.call.out, arrays["out"], "out", written=False)      # first: it says what has been written
        x = arena.view_of(layers.x, arrays["x"], "x", 1, readonly=True)
        weights, biases = several("weights", layers.weights, axis), several("biases", layers.biases, 1)
        shapes = arena.view(self.shapes, "shapes", 1, 4, readonly=True)
        spec = arena.component(self.spec)
        if self.by_tma:
            table = MapTable([arena.map(one, view) for one, view in zip(self.table, weights + biases)])
            maps = [arena.map(one, view) for one, view in zip(self.maps, (x, out))]
            direct = None if self.spec.store.uses_tma else out
            yield self.launchable, (spec, self.sizes, table, shapes, direct, *maps, *[None] * (2 - len(maps)))
            return
        members = [arena.members(views, given[name][0], align) if views else None for name, views, align in (
            ("weights", weights, 2 * self.spec.run), ("biases", biases, int(self.spec.bias_dtype.itemsize)))]
        places = arena.view(self.places, "places", 1, 8, readonly=True)
        yield self.launchable, (spec, self.sizes, places, shapes, out, x, *members)

    def written(self) -> bytes:
        """What the tables hold on a device: the maps, or the places, and behind them the shapes."""
        if not self.by_tma:
            return self.places.tobytes() + self.shapes.tobytes()
        return b"".join(_encoded(one) for one in self.table) + self.shapes.tobytes()

    @property
    def shapes_offset(self) -> int:
        """Where the shapes begin among these bytes."""
        return len(self.table) * WORDS * PLACES_DTYPE.itemsize if self.by_tma else self.places.nbytes


class MlpProblem(MappingProblem):
    """Mappings are Hopper's, or of other GPUs, and of what TMA cannot load, how many elements are copied at a time."""

    def __init__(self, call: MlpCall):
        self.call = call

    def candidates(self, device: DeviceInfo) -> Iterator[Any]:
        layers = self.call.layers
        if device.arch == HOPPER and _why_no_tma(layers, order_of(layers)) is None:
            yield from mappings(self._fields(), self._store(True), layers.x.shape[0], layers.depth,
                                device.shared_memory_per_block)
        else:
            yield copied_at_once(layers, order_of(layers))

    def specialise(self, mapping: MlpMapping | int, device: DeviceInfo) -> Choice:
        layers, fields = self.call.layers, self._fields()
        if isinstance(mapping, int):
            return Choice(MmaMlpSpec(**fields, store=self._store(False), run=mapping))
        return Choice(spec_of(mapping, fields, self._store(True), layers.x.shape[0], layers.depth))

    def _fields(self) -> dict[str, Any]:
        """Those of `LayersSpec`."""
        call, layers = self.call, self.call.layers
        widths = [info.shape[1] for info in layers.weights[:-1]]
        hidden = padded(max(widths, default=0))
        has_padding = not call.activation.is_relu and any(width != hidden for width in widths)
        return dict(activation=call.activation, last=call.last, dtype=layers.x.dtype,
                    bias_dtype=layers.biases[0].dtype if layers.biases else F32, has_bias=bool(layers.biases),
                    k_major=order_of(layers), k=padded(layers.inputs), hidden=hidden, n=padded(layers.columns),
                    single=layers.depth == 1, has_padding=has_padding)

    def _store(self, by_tma: bool) -> MlpStore:
        out = self.call.out
        if by_tma and out.shape[1] * out.dtype.itemsize % 16 == 0 and why_not(out, 1) is None:
            return MlpTmaStore()
        return MlpDirectStore(out.shape[1] % 2 == 0)


def _encoded(one: TensorMapSlot) -> bytes:
    encoder: Encoder = one.encoder
    return encoder(one.info.pointer)


def _table(role: str, data: np.ndarray) -> Frozen:
    info = ArrayInfo(workspace.PLACES[role], data.shape, (data.shape[1], 1), data.dtype, -1, True, "workspace")
    return freeze_array(info, 1, int(data.dtype.itemsize), readonly=True)


def _why_no_tma(layers: Layers, k_major: bool) -> str | None:
    """Why TMA cannot load an operand; None where it can load all."""
    weights, biases = ((info, 0 if k_major else 1) for info in layers.weights), ((info, 1) for info in layers.biases)
    operands = ((layers.x, 1), *weights, *biases)
    return next((reason for reason in (why_not(info, axis) for info, axis in operands) if reason is not None), None)


# -- on a GPU -------------------------------------------------------------------------------------------------------------

ARRAYS = "out", "x", "w", "b"          # what a call brings, in this order; then the activations' own values

_tables = cache()                      # of layers at given addresses


def _launch(stream: int, call: MlpCall) -> None:
    layers = call.layers
    held = components.given_by(call.activation, call.last)
    pointers = (call.out.pointer, layers.x.pointer, layers.weights[0].pointer,
                layers.biases[0].pointer if layers.biases else 0)

    def made(current: Current) -> Launch:
        launch = MlpLaunch(call._replace(activation=current(call.activation), last=current(call.last)))
        kernel = launch.launchable
        slots = [kernel.slot(n) for n in range(len(kernel.arguments))]
        assert slots[1] is not None and slots[2] is not None and slots[3] is not None
        names = ["out"] if launch.by_tma else ["out", "x", "w", "b"]
        puts = [Put(slot, ARRAYS.index(name)) for slot, name in zip(slots[4:], names) if slot is not None]
        if launch.by_tma:
            puts += [Put(slot, ARRAYS.index(name), encoder=one.encoder)
                     for slot, name, one in zip(slots[5:], ("x", "out"), launch.maps) if slot is not None]
        puts += [Put(slot, n, encoder=components.number) for n, slot in enumerate(held.slots, len(ARRAYS))]
        behind = len(ARRAYS) + len(held.slots)
        return Launch(kernel, [*puts, Put(slots[2], behind), Put(slots[3], behind, launch.shapes_offset)])

    x, out = ((*info[1:6], info.pointer % 16) for info in (layers.x, call.out))
    key = mlp_kernel, layers.stack.kind, x, out, held.key
    launch_of(key, made, "the activation").run(stream, (*pointers, *held.brought), _table_of(key, call))


def _table_of(key: Any, call: MlpCall) -> LaunchTable:
    """What stands in device memory of layers at given addresses."""
    found: LaunchTable | None = _tables.get((key, call.layers.stack))
    return found or _tables.keep((key, call.layers.stack), LaunchTable(np.frombuffer(MlpLaunch(call).written(), np.uint8)))


IDENTITY, RELU = NoActivation(), Relu()


def mlp(x: Any, weights: Any, biases: Any = None, activation: Any = relu, *, last: Any = None, out: Any = None,
        stream: Any = None) -> Any:
    """last(...activation(activation(x W1 + b1) W2 + b2)... WL + bL): a multi-layer perceptron in one launch. Forward only.

    Accumulators are float32, and the kernel adds biases in float32. Between layers it rounds activations to x's dtype, as
    separate products round what they store; activations never leave the registers.

    Args:
        x: (..., K), float16 or bfloat16; leading axes must be one (strides that collapse).
        weights: a list of (K, N) arrays of x's dtype, or one stacked (layers, K, N) array: any number of layers, of any
            widths up to 256 that chain. All are contiguous along N, or all along K (``[layer.weight.T for layer in ...]``
            of torch.nn.Linear). The widest hidden layer decides what the others cost.
        biases: a list of (N,) arrays, or one stacked (layers, N) array, of x's dtype or float32; None for no biases.
        activation: a function of one number (device code), of all layers but the last;
        `gemmkit.epilogues.activations.relu` where
            none is given.
        last: the activation of the last layer; None leaves its values as they are, as a torch.nn.Sequential does that ends
            in a Linear. ``last=activation`` applies the activation after every layer.
        out: an array (..., N) of x's dtype to write; None makes one.
        stream: the stream to launch on; None for the library's current one.

    Returns: ``out``, or a new array like x.

    On Hopper TMA loads x, weights and biases: addresses and strides are multiples of 16 bytes. Other arrays, and other GPUs
    from compute capability 8.0 on, take a kernel on mma.sync, which requires even strides and numbers of columns, and
    addresses that are multiples of 4 bytes.

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
    rule = RELU if activation is relu else Activation(activation)
    end = IDENTITY if last is None else Activation(last)
    handle = None if stream is None else as_stream_handle(stream)
    layers = layers_of(x, weights, biases)
    shape = (*layers.x.shape[:-1], layers.columns)
    result = empty_like(x, shape, layers.x.dtype) if out is None else out
    given = describe(result, "out")
    held = [(name, one) for name, part in (("activation", rule), ("last", end)) for one in arrays_of(part)]
    check_places({"x": layers.x, "out": given, **{one.name: one.info for _, one in held}})
    check_out(given, shape, layers)
    check_held(held, {"out": given})
    if math.prod(shape):
        call = MlpCall(layers._replace(x=matrix(layers.x, "x")), matrix(given, "out"), rule, end)
        run_mlp(call, {"x": x, "weights": weights, "biases": biases, "out": result}, handle)
    return result
