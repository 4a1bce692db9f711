"""A program with arrays and a mapping: all passes, and the launch of the kernel that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import freeze
from gemmkit.emulator import machine
from gemmkit.emulator.mode import current_mode
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.sm90.maps import Map
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.freezing import Frozen, freeze_array
from gemmkit.lang.host import View
from gemmkit.programs.algebra import simplified
from gemmkit.programs.allocate import allocated, out_bytes, said
from gemmkit.programs.chains.chain import is_chained
from gemmkit.programs.chains.plan import derived
from gemmkit.programs.chains.text import names_of_ranges
from gemmkit.programs.collectives import LINE, TmaOut
from gemmkit.programs.expressions import function_of
from gemmkit.programs.lines import refused
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.modules import NEEDED, ROWS_NEEDED, module_of
from gemmkit.programs.order import ordered
from gemmkit.programs.places import Places, places_of
from gemmkit.programs.rows.elements import PART
from gemmkit.programs.rows.form import has_rows_alone, row_program_of
from gemmkit.programs.rows.plan import derived as derived_rows
from gemmkit.programs.rows.text import OWN_NAMES as NAMES_OF_ROWS
from gemmkit.programs.text import OWN_NAMES, OWN_STARTS, Out, OutKind, Printed, text_of
from gemmkit.programs.trace import Loop, Store
from gemmkit.programs.values import Index
from gemmkit.ptx.tma import emulated_map
from gemmkit.row_plans import RESIDENT
from gemmkit.runtime.array_info import ArrayInfo, alignment, shares_memory, unit_axis
from gemmkit.runtime.arrays import describe, is_array
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import launch_stream
from gemmkit.runtime.tensor_maps import Encoder, why_not

__all__ = ["ProgramPlan", "planned"]

HOPPER, WARPGROUPS, ALONE = (9, 0), 2, Cluster()
STORED = np.dtype(np.float16), np.dtype("float32")


@dataclass(frozen=True)
class ProgramPlan:
    """The kernel of a program for arrays of some kinds. ``text`` is what runs: with ``plan(..., text=edited)`` another.
    ``mapping`` has all that was left open said: it derives the same text."""

    name: str
    mapping: Mapping
    printed: Printed
    text: str
    infos: dict[str, ArrayInfo]
    extents: dict[str, int]
    numbers: dict[str, float]
    device: DeviceInfo

    def run(self, arguments: dict[str, Any], stream: int | None = None) -> None:
        """Launch it on a GPU's arrays, by name; emulate it on NumPy's within ``with gemmkit.emulate():``.

        Raises ValueError for arrays of another kind than those that the plan was made for, and TypeError for NumPy's
        elsewhere.
        """
        found = {name: describe(arguments[name], name) for name in self.infos}
        other = next((name for name, info in found.items() if _kind(info) != _kind(self.infos[name])), None)
        if other is not None:
            raise ValueError(f"{other} is another kind of array ({_kind(found[other])}) than the plan was made for "
                             f"({_kind(self.infos[other])}): shape, strides, dtype, device and alignment are a plan's")
        infos = list(found.values())
        if 0 in (self.extents[name] for name in self.printed.tile):
            return                                     # no tiles
        if infos[0].library == "numpy":
            mode = current_mode()
            if mode is None:
                raise TypeError(f"{next(iter(self.infos))} is a host array (NumPy); emulate its kernel: "
                                "with gemmkit.emulate(): ...")
            mode.run_specs(self, [_Given(arguments[name], name, name in self.printed.outs) for name in self.infos], infos)
            return
        bound, values = self.bound, list(self.bound.values)
        for slot, name, encoder in bound.slots:
            pointer = found[name].pointer
            values[slot] = pointer if encoder is None else encoder(pointer)
        bound.launch.launch(launch_stream(infos[0], stream), values)

    # -- arguments ----------------------------------------------------------------------------------------------------

    @cached_property
    def module(self) -> Any:
        return module_of(self.name, self.text, ROWS_NEEDED if self.is_of_rows else NEEDED)

    @cached_property
    def sizes(self) -> Any:
        return self.module.Sizes(**{name: self.extents[name] for name in self.printed.sizes},
                                 **{name: np.float32(self.numbers[name]) for name in self.printed.scalars})

    @cached_property
    def maps(self) -> dict[str, Map]:
        """Tensor maps, in the kernel's order: of the operands, and of results that leave by TMA."""
        module = self.module
        made: dict[str, Map] = {}
        for name in self.printed.maps:
            tile = next(value for key, value in vars(module).items() if key == f"{name}_tile")
            made[name] = Map(0, len(made), self.infos[name], tile.map_spec.rank - 1, tile.map_spec)
        for name in () if self.is_of_rows else self.printed.outs:
            out = getattr(module, f"out_{name}")
            if isinstance(out, TmaOut):
                made[name] = Map(0, len(made), self.infos[name], out.map_spec.rank - 1, out.map_spec)
        return made

    @property
    def names(self) -> list[str]:
        """The arrays in the order of the kernel's arguments, behind the sizes."""
        return [*self.printed.maps, *self.printed.outs, *self.printed.arrays]

    @cached_property
    def arguments(self) -> list[Frozen]:
        held = [self.maps[name].frozen if name in self.maps else
                freeze_array(self.infos[name], readonly=name not in self.printed.outs) for name in self.names]
        return [freeze(self.sizes), *held]

    @cached_property
    def blocks(self) -> int:
        """Thread blocks: a tile each, as many as run at once; they go on to further tiles. A cluster's go together. Of rows
        all that there are."""
        tiles = int(self.module.tiles(self.sizes))
        return tiles if self.is_of_rows else min(tiles, self.cluster.at_once(self.device.sm_count)) * self.cluster.size

    @property
    def is_of_rows(self) -> bool:
        """Whether it has no products, and teams of threads that take rows."""
        return not self.printed.maps

    @property
    def cluster(self) -> Cluster:
        """Of blocks that share operands."""
        found: Cluster = getattr(self.module, "cluster", ALONE)
        return found

    @cached_property
    def launchable(self) -> Launchable:
        module, ordinal = self.module, next(iter(self.infos.values())).device
        threads = module.ROWS.team.block if self.is_of_rows else module.WARPGROUPS.threads
        return Launchable(module.kernel, self.arguments, threads, self.blocks, self.device, ordinal, module.SHARED_BYTES,
                          cluster=self.cluster.size, blocks_per_sm=max(1, RESIDENT // threads) if self.is_of_rows else 1)

    @cached_property
    def bound(self) -> _Bound:
        made, slots = self.launchable, []
        key = self.name, self.text, self.blocks, *(_kind(info) for info in self.infos.values())
        launch = _launches.get(key)
        if launch is None:
            if len(_launches) >= _KEPT:
                _launches.clear()
            launch = _launches[key] = made.bind()
        for n, name in enumerate(self.names):
            slot = made.slot(n + 1)
            if slot is not None:
                slots.append((slot, name, self.maps[name].encoder if name in self.maps else None))
        return _Bound(launch, tuple(made.values), tuple(slots))

    # -- without a GPU ------------------------------------------------------------------------------------------------

    def ahead(self, arrays: Any, infos: Any) -> ProgramPlan:
        """What `gemmkit.ahead` compiles."""
        return self

    def emulate(self, arrays: Any, infos: Any, seed: int | None) -> None:
        """Run it on NumPy arrays, every access checked. Raises the emulator's errors."""
        views = {}
        for given in arrays:
            info = self.infos[given.name]
            how = dict(written=False) if given.is_filled else dict(readonly=True)
            memory = machine.Memory.for_array(given.value, given.name, **how)
            views[given.name] = View(given.value, memory, unit_axis(info), alignment(info))
        values = [emulated_map(views[name], self.maps[name].spec, self.maps[name].axis) if name in self.maps else views[name]
                  for name in self.names]
        launch = self.launchable
        with np.errstate(all="ignore"):
            machine.launch(launch.kernel, (self.sizes, *values), grid=(launch.blocks, 1, 1), block=(launch.threads, 1, 1),
                           cluster=(launch.cluster, 1, 1), shared_memory=launch.shared_bytes,
                           max_shared_memory=self.device.shared_memory_per_block, schedule_seed=seed,
                           registers=None if self.is_of_rows else self.module.WARPGROUPS.warp_registers)


def _kind(info: ArrayInfo) -> tuple:
    """What a plan depends on of an array."""
    return info.shape, info.strides, info.dtype, info.device, info.pointer % 16


_KEPT = 1024                           # loaded kernels; beyond it the memory starts anew
_launches: dict[tuple, Any] = {}


class _Given(NamedTuple):
    value: Any
    name: str
    is_filled: bool


class _Bound(NamedTuple):
    """``slots``: where an array's address stands, or the map that an encoder makes of it."""

    launch: Any
    values: tuple
    slots: tuple[tuple[int, str, Encoder | None], ...]


def planned(program: Any, arguments: dict[str, Any], mapping: Mapping, text: str | None) -> ProgramPlan:
    """All passes. Raises ValueError, TypeError and ConfigError before anything is compiled."""
    loop, name = program.traced(arguments), program.function.__name__
    infos = {key: describe(x, key) for key, x in arguments.items() if is_array(x)}
    device = _device(infos)
    if has_rows_alone(loop):
        return _of_rows(name, loop, infos, arguments, mapping, text, device)
    if device.arch != HOPPER:
        raise ConfigError(f"programs with products have kernels for GPUs of compute capability 9.0, and {device.name} has "
                          f"{device.arch[0]}.{device.arch[1]}")
    if is_chained(loop):
        return _chained(name, loop, infos, arguments, mapping, text, device)
    mapping = replace(mapping, warpgroups=mapping.warpgroups or WARPGROUPS)
    places = places_of(loop)
    _check_names(infos, places, arguments)
    _check_arrays(infos, places)
    stores, outs = places.stores, []
    roots = simplified([store.value for store in stores])
    stale = {carried.init for rounds in loop.body if hasattr(rounds, "carried") for carried in rounds.carried}
    for store, root in zip(stores, roots):
        is_rows = store.only is not None
        made = function_of(f"element_of_{store.parameter.name}", root, places.indices[:1] if is_rows else places.indices,
                           places.rows if is_rows else places.cells, places.stack)
        if stale & set(made.uses):
            raise refused(ValueError, "sums are read here, and a later loop adds to them: store them when all is "
                                      "added", store.line)
        info = infos[store.parameter.name]
        plain = root.op == "after"
        for array in made.arrays:
            _check_read(array, infos[array], store.line)
        kind = "RowsOut" if is_rows else "TmaOut" if _leaves_by_tma(info) else "DirectOut"
        outs.append(Out(store, info.dtype, kind, not is_rows and _in_pairs(info), None if plain else made, made.sums[0]))
    nbytes = {out.name: out_bytes(places, mapping, out.dtype) for out in outs if out.kind == "TmaOut"}
    memory = allocated(places, mapping, nbytes, device.shared_memory_per_block)
    shown = ", ".join(f"{key} {size}" for key, size in memory.blocks.items())
    together = "" if memory.cluster.is_single else f"; clusters of {memory.cluster.m} x {memory.cluster.n}"
    title = f"{name}: blocks of {shown}; {mapping.warpgroups} warpgroups; {memory.rings[0].stages} stages{together}."
    printed = text_of(title, places, [ordered(rounds) for rounds in places.loops], memory, outs, mapping.warpgroups)
    indices = *_tile_indices(places), *(rounds.index for rounds in places.loops)
    extents = {index.name: index.extent.size for index in indices}
    numbers = {key: float(x) for key, x in arguments.items() if isinstance(x, (float, np.floating))}
    if text is not None:
        module_of(name, text)                          # raises for what is no kernel's text
    return ProgramPlan(name, said(memory, mapping), printed, printed.text if text is None else text, infos, extents, numbers,
                       device)


def _chained(name: str, loop: Loop, infos: dict[str, ArrayInfo], arguments: dict[str, Any], mapping: Mapping,
             text: str | None, device: DeviceInfo) -> ProgramPlan:
    """Of a program whose tiles are whole rows (`gemmkit.programs.chains`)."""
    numbers = {key: float(x) for key, x in arguments.items() if isinstance(x, (float, np.floating))}

    def leaves(store: Store) -> OutKind:
        info, is_rows = infos[store.parameter.name], len(store.parameter.shape) == len(loop.indices)
        columns = 1 if is_rows else info.shape[-1]
        by_tma = not is_rows and columns % LINE == 0 and _leaves_by_tma(info)
        kind = "RowsOut" if is_rows else "TmaOut" if by_tma else "DirectOut"
        return OutKind(kind, info.dtype, not is_rows and _in_pairs(info), columns)

    made = derived(name, loop, mapping, numbers, leaves, list(infos), device.shared_memory_per_block)
    chain, printed = made.chain, made.text
    indices = *chain.indices, chain.index
    _check_own_names([*infos, *numbers, *(c.inside.name for c in chain.carried), *(index.name for index in indices)],
                     [index.name for index in indices])
    clash = next((key for key in (*infos, *numbers) if key in names_of_ranges(chain)), None)
    if clash is not None:
        raise _taken(clash)
    operands = {block.parameter.name: chain.line for ring in made.places.rings for block in ring.blocks}
    _check_launch(infos, operands, chain.indices, [chain.index], {chain.index.name: chain.line}, chain.stores)
    for array, x in made.read.items():
        _check_read(array, infos[array], x.line)
    if text is not None:
        module_of(name, text)
    extents = {**{index.name: index.extent.size for index in indices}, "section": made.section(device.sm_count)}
    return ProgramPlan(name, made.choice.said(mapping), printed, printed.text if text is None else text, infos, extents,
                       numbers, device)


def _of_rows(name: str, loop: Loop, infos: dict[str, ArrayInfo], arguments: dict[str, Any], mapping: Mapping,
             text: str | None, device: DeviceInfo) -> ProgramPlan:
    """Of a program without products (`gemmkit.programs.rows`)."""
    numbers = {key: float(x) for key, x in arguments.items() if isinstance(x, (float, np.floating))}
    program = row_program_of(loop)
    for key in (*infos, *numbers, *(index.name for index in program.indices)):
        if key in NAMES_OF_ROWS or key.startswith(PART):
            raise _taken(key)
    _check_launch(infos, {}, program.indices, [], {}, program.stores)
    printed = derived_rows(name, program, mapping, infos, list(numbers))
    if text is not None:
        module_of(name, text, ROWS_NEEDED)
    extents = {**{index.name: index.extent.size for index in program.indices}, "columns": program.columns}
    return ProgramPlan(name, mapping, printed, printed.text if text is None else text, infos, extents, numbers, device)


def _device(infos: dict[str, ArrayInfo]) -> DeviceInfo:
    places = {info.device for info in infos.values()}
    if len(places) != 1:
        raise ValueError(f"{', '.join(infos)} are in different places; put them on one GPU")
    return target(places.pop())


def _tile_indices(places: Places) -> tuple[Index, ...]:
    """Rows, columns, and the stack if there is one."""
    return places.indices if places.stack is None else (*places.indices, places.stack)


def _check_names(infos: dict[str, ArrayInfo], places: Places, arguments: dict[str, Any]) -> None:
    """Raises ValueError for names that the text has for its own."""
    numbers = [key for key, x in arguments.items() if isinstance(x, (float, np.floating))]
    indices = [index.name for index in (*_tile_indices(places), *(rounds.index for rounds in places.loops))]
    _check_own_names([*infos, *numbers, *places.starts, *places.row_starts, *indices], indices)


def _check_own_names(names: list[str], indices: list[str]) -> None:
    for name in names:
        is_made = name.startswith(OWN_STARTS) or name.endswith("_tile") or "_by_" in name
        if name in OWN_NAMES or is_made or (name == "i" and name not in indices):
            raise _taken(name)


def _taken(name: str) -> ValueError:
    return ValueError(f"{name}: the derived text has this name for its own; call the array, cell or index otherwise")


def _check_arrays(infos: dict[str, ArrayInfo], places: Places) -> None:
    operands = {tile.parameter.name: rounds.line for rounds in places.loops for tile in rounds.tiles}
    _check_launch(infos, operands, _tile_indices(places), [rounds.index for rounds in places.loops],
                  {rounds.index.name: rounds.line for rounds in places.loops}, places.stores)


def _check_launch(infos: dict[str, ArrayInfo], operands: dict[str, str], tile: tuple[Index, ...], rounds: list[Index],
                  lines: dict[str, str], stores: list[Store]) -> None:
    """Raises ValueError where TMA cannot bring an operand, a sum goes over nothing, or results share memory."""
    for index in rounds:
        if index.extent.size == 0:
            raise refused(ValueError, f"{index} goes along {index.extent}: a kernel's sums go over one element or more",
                          lines[index.name])
    if 0 not in (index.extent.size for index in tile):
        for name, line in operands.items():
            reason = why_not(infos[name], len(infos[name].shape) - 1)
            if reason is not None:
                raise refused(ValueError, f"{name} is an operand of a product, and TMA cannot bring it: {reason}", line)
    results = [store.parameter.name for store in stores]
    twice = next((name for name in results if results.count(name) > 1), None)
    if twice is not None:
        raise refused(ValueError, f"{twice} is stored twice; one store for each result is needed", stores[-1].line)
    for store in stores:
        info = infos[store.parameter.name]
        if info.readonly:
            raise ValueError(f"{store.parameter.name} is a result, and read-only")
        if info.dtype.name not in ("float16", "bfloat16", "float32"):
            raise TypeError(f"{store.parameter.name} is of {info.dtype}; results of float16, bfloat16 and "
                            "float32 are stored")
    for (one, x), (other, y) in combinations(infos.items(), 2):
        if (one in results or other in results) and shares_memory(x, y):
            raise ValueError(f"{one} and {other} share memory, and a result is among them; a result needs memory of its own")


def _check_read(name: str, info: ArrayInfo, line: str) -> None:
    """Raises TypeError for elements that no float32 can meet."""
    if info.dtype.kind == "c" or info.dtype.names is not None:
        raise refused(TypeError, f"{name} is of {info.dtype}; arrays of real numbers are read where a tile is stored", line)


def _leaves_by_tma(info: ArrayInfo) -> bool:
    """TMA clips rows at multiples of 16 bytes alone."""
    return info.dtype.itemsize == 2 and info.shape[-1] * 2 % 16 == 0 and why_not(info, len(info.shape) - 1) is None


def _in_pairs(info: ArrayInfo) -> bool:
    """Whether two neighbours of a row are stored at once."""
    size = 2 * info.dtype.itemsize
    return (info.shape[-1] % 2 == 0 and info.strides[-1] == 1 and all(stride % 2 == 0 for stride in info.strides[:-1])
            and info.pointer % size == 0 and unit_axis(info) == len(info.shape) - 1)
