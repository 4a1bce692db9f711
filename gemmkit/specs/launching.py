"""Kernels of tensors and specs on arrays: emulated, launched on a GPU, or compiled without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import freeze
from gemmkit.emulator import machine
from gemmkit.emulator.mode import current_mode
from gemmkit.lang import dialect
from gemmkit.lang.freezing import freeze_array
from gemmkit.lang.host import View
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.arrays import describe, on_host
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import as_stream_handle, current_stream

__all__ = ["Array", "Code", "Kernel"]


class Array(NamedTuple):
    """An array argument: what it is called, whether the kernel only reads it, or fills it before it reads it."""

    value: Any
    name: str
    is_readonly: bool = False
    is_filled: bool = False


class Code(NamedTuple):
    """A compiled kernel; ``usage`` has registers, spills and stack."""

    ptx: str
    cubin: bytes
    usage: Any


class Ahead(NamedTuple):
    """A call whose kernel is compiled ahead, and not launched."""

    launchable: Launchable


@dataclass(frozen=True)
class Kernel:
    """``function(component, *arrays)`` on blocks of ``threads`` threads, compiled so that at least ``blocks_per_sm`` fit on
    a multiprocessor by their registers."""

    function: Any
    component: Any
    threads: int
    blocks: int
    shared_bytes: int
    blocks_per_sm: int = 1

    def run(self, arrays: Sequence[Array], stream: Any = None) -> None:
        """Emulate NumPy arrays, which needs ``with gemmkit.emulate():``; launch for arrays of one GPU.

        Raises TypeError for NumPy arrays elsewhere, ValueError for arrays in different places.
        """
        infos = [describe(array.value, array.name) for array in arrays]
        places = {info.device for info in infos}
        if len(places) != 1:
            raise ValueError(f"{', '.join(array.name for array in arrays)} are in different places; put them on one GPU")
        if infos[0].device < 0:
            mode = current_mode()
            if mode is None:
                raise TypeError(f"{arrays[0].name} is a host array; emulate its kernel: with gemmkit.emulate(): ...")
            mode.run_specs(self, arrays, infos)
        else:
            self._launch(arrays, infos, stream)

    def emulate(self, arrays: Sequence[Array], infos: Sequence[ArrayInfo], seed: int | None) -> None:
        """Run it on NumPy arrays, every access checked. Raises the emulator's errors."""
        dialect.check(self.component)                         # what the compiler would refuse is refused here
        seen = [on_host(array.value) for array in arrays]
        views = [View(x, machine.Memory.for_array(x, array.name, readonly=array.is_readonly, written=not array.is_filled),
                      unit_axis(info), alignment(info)) for x, array, info in zip(seen, arrays, infos)]
        with np.errstate(all="ignore"):
            machine.launch(self.function, (self.component, *views), grid=(self.blocks, 1, 1), block=(self.threads, 1, 1),
                           shared_memory=self.shared_bytes, schedule_seed=seed)

    def launchable(self, readonly: Sequence[bool], infos: Sequence[ArrayInfo], target: Any, ordinal: int = 0) -> Launchable:
        """The kernel with its arguments, to be compiled and launched."""
        frozen = [freeze_array(info, readonly=only) for info, only in zip(infos, readonly)]
        return Launchable(self.function, [freeze(self.component), *frozen], self.threads, self.blocks, target, ordinal,
                          self.shared_bytes, blocks_per_sm=self.blocks_per_sm)

    def ahead(self, arrays: Sequence[Array], infos: Sequence[ArrayInfo]) -> Ahead:
        """What `gemmkit.ahead` compiles for a call on host arrays."""
        return Ahead(self.launchable([array.is_readonly for array in arrays], infos, device.target()))

    def compile(self, readonly: Sequence[bool], infos: Sequence[ArrayInfo]) -> Code:
        """PTX and machine code for an H100, without a GPU."""
        from gemmkit.runtime.assemble import assemble
        from gemmkit.runtime.compile import to_ptx

        made = self.launchable(readonly, infos, device.H100)
        ptx = to_ptx(self.function, tuple(x.type for x in made.arguments), self.threads, device.H100,
                     self.blocks_per_sm)
        assembled = assemble(ptx, device.H100.arch_name)
        return Code(ptx, assembled.cubin, assembled.usage)

    def _launch(self, arrays: Sequence[Array], infos: Sequence[ArrayInfo], stream: Any) -> None:
        ordinal = infos[0].device
        readonly = tuple(array.is_readonly for array in arrays)
        key = self, ordinal, readonly, tuple((info.shape, info.strides, info.dtype, alignment(info)) for info in infos)
        bound = _bound.get(key)
        if bound is None:
            with device.made_current(ordinal):
                made = self.launchable(readonly, infos, device.current(), ordinal)
            bound = _bound[key] = _Bound(made.bind(), list(made.values), [made.slot(n + 1) for n in range(len(arrays))])
        values = list(bound.values)
        for slot, info in zip(bound.slots, infos):
            if slot is not None:
                values[slot] = info.pointer
        where = current_stream(infos[0].library, ordinal, infos[0].stream) if stream is None else as_stream_handle(stream)
        bound.launch.launch(where, values)


class _Bound(NamedTuple):
    launch: Any
    values: list
    slots: list


_bound: dict[tuple, _Bound] = {}


def example(shape: Sequence[int], dtype: Any, order: str = "row") -> ArrayInfo:
    """A matrix that is not there: what a kernel is compiled for without arrays."""
    rows, columns = shape
    strides = (columns, 1) if order == "row" else (1, rows)
    return ArrayInfo(2**20, (rows, columns), strides, np.dtype(dtype), 0, False, "cupy")
