"""Kernels of tensors and specs on arrays: emulated, launched on a GPU, or compiled without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import freeze
from gemmkit.emulator.mode import current_mode
from gemmkit.lang.freezing import freeze_array
from gemmkit.launch import Launch, Put, launch_of
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import as_stream_handle, current_stream


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
            mode.run(Emulated(self, infos, tuple(array.is_readonly for array in arrays)), arrays)
        else:
            self._launch(arrays, infos, stream)

    def launchable(self, readonly: Sequence[bool], infos: Sequence[ArrayInfo], target: Any, ordinal: int = 0) -> Launchable:
        """The kernel with its arguments, to be compiled and launched."""
        frozen = [freeze_array(info, readonly=only) for info, only in zip(infos, readonly)]
        return Launchable(self.function, [freeze(self.component), *frozen], self.threads, self.blocks, target, ordinal,
                          self.shared_bytes, blocks_per_sm=self.blocks_per_sm)

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

        def made(_current: Any) -> Launch:
            with device.made_current(ordinal):
                kernel = self.launchable(readonly, infos, device.current(), ordinal)
            slots = enumerate(kernel.slot(n + 1) for n in range(len(arrays)))
            return Launch(kernel, [Put(slot, n) for n, slot in slots if slot is not None])

        key = self, ordinal, readonly, tuple((info.shape, info.strides, info.dtype, alignment(info)) for info in infos)
        where = current_stream(infos[0].library, ordinal, infos[0].stream) if stream is None else as_stream_handle(stream)
        launch_of(key, made, self.function.__qualname__).start(where, tuple(info.pointer for info in infos))


class Emulated(NamedTuple):
    """A call on NumPy arrays (`gemmkit.emulator.mode`)."""

    kernel: Kernel
    infos: Sequence[ArrayInfo]
    readonly: tuple[bool, ...]

    @property
    def spec(self) -> Any:
        return self.kernel.component

    @property
    def launchable(self) -> Launchable:
        return self.kernel.launchable(self.readonly, self.infos, device.target())

    def filled(self, arrays: Sequence[Array]) -> list[Any]:
        return [array.value for array in arrays if array.is_filled]

    def emulated(self, arrays: Sequence[Array], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        views = [arena.view(x.value, x.name, unit_axis(info), alignment(info), readonly=x.is_readonly,
                            written=not x.is_filled) for x, info in zip(arrays, self.infos)]
        yield self.launchable, (self.spec, *views)


def example(shape: Sequence[int], dtype: Any, order: str = "row") -> ArrayInfo:
    """A matrix that is not there: what a kernel is compiled for without arrays."""
    rows, columns = shape
    strides = (columns, 1) if order == "row" else (1, rows)
    return ArrayInfo(2**20, (rows, columns), strides, np.dtype(dtype), 0, False, "cupy")
