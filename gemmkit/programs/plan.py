"""The kernel that a program's passes have made for arrays of some kinds, and its launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import freeze
from gemmkit.emulator.mode import current_mode
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.sm90.maps import Map
from gemmkit.lang.freezing import Frozen, freeze_array
from gemmkit.launch import Launch, Start, launch_of
from gemmkit.programs.collectives import TmaOut
from gemmkit.programs.launches import Given, Launches, bits_of, launches_of
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.modules import NEEDED, ROWS_NEEDED, module_of
from gemmkit.programs.printed import Printed
from gemmkit.programs.spare import host_arrays, stream_memory
from gemmkit.row_plans import RESIDENT
from gemmkit.runtime.array_info import ArrayInfo, alignment, byte_range, shares_memory, unit_axis
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import launch_stream

ALONE = Cluster()


@dataclass(frozen=True)
class ProgramPlan:
    """The kernel of a program for arrays of some kinds. ``text`` is what runs: with ``plan(..., text=edited)`` another.
    ``mapping`` has all that was left open said: it derives the same text.

    ``call``: what it was made for beside arrays. Numbers are a launch's own; all else is in the text.

    Where blocks share a tile's rounds, ``merge`` is the kernel behind it, and both have ``spare`` arrays, in memory of the
    stream's (`gemmkit.programs.chains.shares`)."""

    name: str
    mapping: Mapping
    printed: Printed
    text: str
    infos: dict[str, ArrayInfo]
    extents: dict[str, int]
    call: Given
    device: DeviceInfo
    spare: tuple[str, ...] = ()
    merge: ProgramPlan | None = None

    def run(self, arguments: dict[str, Any], stream: int | None = None) -> None:
        """Launch it on a GPU's arrays, by name; emulate it on those in host memory within
        ``with gemmkit.emulate():``. Numbers are those of ``arguments``; one that is left out is what the plan was made with.

        Raises ValueError for arrays of another kind than those that the plan was made for, for another component, for a
        number that is not positive where it was, and for a result that shares memory with another array; TypeError for
        NumPy's arrays elsewhere.
        """
        numbers = self.call.again(arguments)
        found = [describe(arguments[name], name) for name in self.given]
        for name, info, kind in zip(self.given, found, self._kinds):
            if _kind(info) != kind:
                raise ValueError(f"{name} is another kind of array ({_kind(info)}) than the plan was made for ({kind}): "
                                 "shape, strides, dtype, device and alignment are a plan's")
        for name, place in self._stored:
            if found[place].readonly:
                raise ValueError(f"{name} is a result, and read-only; give a writable array")
        for one, other in self._apart:
            if _meet(found[one], found[other], *self._ranges[one], *self._ranges[other]):
                raise shared(self._names[one], self._names[other])
        first = found[0]
        if 0 in (self.extents[name] for name in self.printed.tile):
            return                                     # no tiles
        if first.device < 0:
            mode = current_mode()
            if mode is None:
                raise TypeError(f"{next(iter(self.infos))} is a host array; emulate its kernel: "
                                "with gemmkit.emulate(): ...")
            held = {**arguments, **host_arrays({name: plan.infos[name] for plan in self.kernels for name in plan.spare})}
            for plan in self.kernels:
                plan = replace(plan, call=self.call._replace(numbers=numbers))
                mode.run(plan, [_Given(held[name], name, name in plan.printed.outs) for name in plan.infos])
            return
        handle, spare = launch_stream(first, stream), self.launches.spare
        begin = stream_memory(first.device, handle, spare) if spare else 0
        values = *(info.pointer for info in found), begin, *map(bits_of, numbers.values())
        for launch in self._bound:
            launch(handle, values)

    @property
    def results(self) -> tuple[str, ...]:
        """The arrays that the program stores into."""
        return self.kernels[-1].printed.outs

    @cached_property
    def _stored(self) -> list[tuple[str, int]]:
        """The results, and their places among the arrays that a call gives."""
        stored = {name for plan in self.kernels for name in plan.printed.outs}
        return [(name, place) for place, name in enumerate(self.given) if name in stored]

    @property
    def kernels(self) -> tuple[ProgramPlan, ...]:
        """In the order in which they run."""
        return (self,) if self.merge is None else (self, self.merge)

    # -- arguments ----------------------------------------------------------------------------------------------------

    @cached_property
    def module(self) -> Any:
        return module_of(self.name, self.text, ROWS_NEEDED if self.is_of_rows else NEEDED)

    @property
    def spec(self) -> Any:
        """The component that its kernel takes."""
        return self.sizes

    @cached_property
    def sizes(self) -> Any:
        return self.module.Sizes(**{name: self.extents[name] for name in self.printed.sizes},
                                 **{name: np.float32(self.call.numbers[name]) for name in self.printed.scalars})

    @cached_property
    def taken(self) -> list[Taken]:
        """What the kernel takes behind the sizes: an array is taken once for each staged block of it, as a tensor map, and
        once more where threads read or write it."""
        module, printed, made = self.module, self.printed, list[Taken]()

        def take(array: str, of: Any) -> None:
            spec = of.map_spec
            number = sum(one.map is not None for one in made)
            made.append(Taken(array, Map(0, number, self.infos[array], spec.rank - 1, spec)))

        for block, array in printed.maps:
            take(array, getattr(module, f"{block}_tile"))
        made += [Taken(array, None) for array in printed.operands]
        for array in printed.outs:
            out = None if self.is_of_rows else getattr(module, f"out_{array}")
            take(array, out) if isinstance(out, TmaOut) else made.append(Taken(array, None))
        return [*made, *(Taken(array, None) for array in printed.arrays)]

    @cached_property
    def arguments(self) -> list[Frozen]:
        held = [freeze_array(self.infos[array], readonly=array not in self.printed.outs) if tensor_map is None else
                tensor_map.frozen for array, tensor_map in self.taken]
        return [freeze(self.sizes), *held]

    @cached_property
    def blocks(self) -> int:
        """Thread blocks: a tile each, as many as run at once; they go on to further tiles. A cluster's go together. Of rows,
        and of multistage kernels, all that there are."""
        tiles = int(self.module.tiles(self.sizes))
        if self.is_of_rows or self.is_multistage:
            return tiles
        return min(tiles, self.cluster.at_once(self.device.sm_count)) * self.cluster.size

    @property
    def is_of_rows(self) -> bool:
        """Whether it has no products, and teams of threads that take rows."""
        return not self.printed.maps and not self.printed.operands

    @property
    def is_multistage(self) -> bool:
        """Whether its threads copy their operands, in blocks that have a tile each."""
        return bool(self.printed.operands)

    @property
    def cluster(self) -> Cluster:
        """Of blocks that share operands."""
        found: Cluster = getattr(self.module, "cluster", ALONE)
        return found

    @cached_property
    def launchable(self) -> Launchable:
        module, ordinal = self.module, max(info.device for info in self.infos.values())
        threads = module.ROWS.team.block if self.is_of_rows else module.WARPGROUPS.threads
        resident = RESIDENT // 2 if self.spare else RESIDENT       # what merges 16 shares has some 60 values of a row
        per_sm = max(1, resident // threads) if self.is_of_rows else int(getattr(module, "RESIDENT", 1))
        return Launchable(module.kernel, self.arguments, threads, self.blocks, self.device, ordinal, module.SHARED_BYTES,
                          cluster=self.cluster.size, blocks_per_sm=per_sm, dependent=hasattr(module, "grid_wait"),
                          registers=None if self.is_of_rows else module.WARPGROUPS.warp_registers)

    @cached_property
    def given(self) -> dict[str, ArrayInfo]:
        """The arrays of a call: all but those of the stream's memory."""
        return {name: info for name, info in self.infos.items() if name not in self.spare}

    @cached_property
    def launches(self) -> Launches:
        """Of all kernels, for `run` and for the tuner."""
        return launches_of(self.kernels)

    @cached_property
    def _kinds(self) -> list[tuple]:
        return [_kind(info) for info in self.given.values()]

    @cached_property
    def _names(self) -> list[str]:
        return list(self.given)

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """Of each array the bytes from its pointer to its first one, and behind its last: they follow from its kind."""
        ranges = [(info.pointer, *byte_range(info)) for info in self.given.values()]
        return [(low - at, high - at) for at, low, high in ranges]

    @cached_property
    def _apart(self) -> list[tuple[int, int]]:
        """The pairs of arrays with a result among them, which must not share memory."""
        return [(n, m) for m, other in enumerate(self._names) for n, one in enumerate(self._names[:m])
                if one in self.results or other in self.results]

    @cached_property
    def _bound(self) -> list[Start]:
        return [plan._loaded(launch).start for plan, launch in zip(self.kernels, self.launches.kernels)]

    def _loaded(self, launch: Launch) -> Launch:
        """The kernel on the device: a program that is called derives a plan anew, and loads nothing twice."""
        key = (self.name, self.text, self.blocks, *(_kind(info) for info in self.infos.values()),
               *(put[:3] for put in launch.puts))
        return launch_of(key, lambda _: launch, self.name)

    # -- without a GPU ------------------------------------------------------------------------------------------------

    def filled(self, arrays: Sequence[_Given]) -> list[Any]:
        """Of the arrays of its kernel, those that the kernel fills."""
        return [array.value for array in arrays if array.is_filled]

    def emulated(self, arrays: Sequence[_Given], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = {}
        for given in arrays:
            info = self.infos[given.name]
            how = dict(written=False) if given.is_filled else dict(readonly=True)
            views[given.name] = arena.view(given.value, given.name, unit_axis(info), alignment(info), **how)
        yield self.launchable, (self.sizes, *(views[name] if one is None else arena.map(one, views[name])
                                              for name, one in self.taken))


def shared(one: str, other: str) -> ValueError:
    return ValueError(f"{one} and {other} share memory, and a result is among them; a result needs memory of its own")


def _meet(one: ArrayInfo, other: ArrayInfo, low: int, high: int, other_low: int, other_high: int) -> bool:
    """Whether arrays share memory: their ranges of bytes are compared first, since ranges that are apart take no more."""
    ahead, behind = one.pointer + low < other.pointer + other_high, other.pointer + other_low < one.pointer + high
    return ahead and behind and shares_memory(one, other)


def _kind(info: ArrayInfo) -> tuple:
    """What a plan depends on of an array."""
    return info.shape, info.strides, info.dtype, info.device, info.pointer % 16


class Taken(NamedTuple):
    """An argument of a kernel: an array, or a tensor map of it."""

    array: str
    map: Map | None


class _Given(NamedTuple):
    value: Any
    name: str
    is_filled: bool
