"""Launches of an MLP: a mapping for its widths, tables of its layers in device memory, kernels kept by kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit import kept
from gemmkit.compiled import Nothing
from gemmkit.components import freeze
from gemmkit.config import ConfigError
from gemmkit.emulator.mode import current_mode
from gemmkit.kernels.mlp.kernel import mlp
from gemmkit.kernels.mlp.mapping import Mapping, blocks_of, mappings, spec_of
from gemmkit.kernels.mlp.mma_kernel import mlp_by_warps
from gemmkit.kernels.mlp.mma_spec import ROWS, MmaMlpSpec
from gemmkit.kernels.mlp.spec import MlpSpec
from gemmkit.kernels.mlp.store import DirectOut, OutStore, TmaOut
from gemmkit.kernels.mlp.work import F32, Sizes
from gemmkit.kernels.sm90.maps import Map
from gemmkit.lang.freezing import Frozen, freeze_array
from gemmkit.lang.members import EXTENTS, PLACES, PLACES_DTYPE, SIZES_DTYPE
from gemmkit.launch import Current, Launch, Put, Table, cache, launch_of
from gemmkit.mlp_operands import Layers, copied_at_once, order_of, padded
from gemmkit.ptx.map_table import WORDS, MapTable
from gemmkit.runtime import workspace
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import launch_stream
from gemmkit.runtime.tensor_maps import Encoder, why_not
from gemmkit.tuning.problems import Choice, MappingProblem, choose

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
            raise ConfigError(f"mlp runs on GPUs of compute capability 8.0 and later, and {device.name} has "
                              f"{device.arch[0]}.{device.arch[1]}; there gemmkit.matmul computes it layer by layer")
        self.call, self.layers = call, layers
        self.spec: Any = choose(MlpProblem(call), device).spec
        self.by_tma = isinstance(self.spec, MlpSpec)
        rows = layers.x.shape[0]
        self.blocks = blocks_of(self.spec, rows, device.sm_count) if self.by_tma else -(-rows // ROWS)
        self.sizes = Sizes(rows, layers.columns, layers.depth)
        self.launchable = Launchable(mlp if self.by_tma else mlp_by_warps, self.arguments, self.spec.threads, self.blocks,
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
    def maps(self) -> list[Map]:
        """Those that are parameters: of x, and of out."""
        made = [Map(0, 0, self.layers.x, 1, self.spec.x.map_spec(ROWS, 2))]
        if self.spec.store.uses_tma:
            made.append(Map(1, 1, self.call.out, 1, self.spec.out.map_spec(ROWS, 2)))
        return made

    @cached_property
    def table(self) -> list[Map]:
        """Those in the table: of the weights of all layers, and of their biases."""
        axis, spec = 0 if self.spec.k_major else 1, self.spec
        made = [Map(0, 0, info, axis, spec.weights_of(n, self.layers.depth).map_spec(spec.cluster.size))
                for n, info in enumerate(self.layers.weights)]
        return made + [Map(0, 0, info, 1, spec.bias_map) for info in self.layers.biases]

    @cached_property
    def shapes(self) -> np.ndarray:
        """Extents of weights and biases (`gemmkit.lang.members`)."""
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

    def specialise(self, mapping: Mapping | int, device: DeviceInfo) -> Choice:
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

    def _store(self, by_tma: bool) -> OutStore:
        out = self.call.out
        if by_tma and out.shape[1] * out.dtype.itemsize % 16 == 0 and why_not(out, 1) is None:
            return TmaOut()
        return DirectOut(out.shape[1] % 2 == 0)


def _encoded(one: Map) -> bytes:
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
    held = kept.given_by(call.activation, call.last)
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
        puts += [Put(slot, n, encoder=kept.number) for n, slot in enumerate(held.slots, len(ARRAYS))]
        behind = len(ARRAYS) + len(held.slots)
        return Launch(kernel, [*puts, Put(slots[2], behind), Put(slots[3], behind, launch.shapes_offset)])

    x, out = ((*info[1:6], info.pointer % 16) for info in (layers.x, call.out))
    key = mlp, layers.stack.kind, x, out, held.key
    launch_of(key, made, "the activation").run(stream, (*pointers, *held.brought), _table_of(key, call))


def _table_of(key: Any, call: MlpCall) -> Table:
    """What stands in device memory of layers at given addresses."""
    found: Table | None = _tables.get((key, call.layers.stack))
    return found or _tables.keep((key, call.layers.stack), Table(np.frombuffer(MlpLaunch(call).written(), np.uint8)))
