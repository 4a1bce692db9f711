"""A template kernel in the emulator: arrays become checked views, components stay the Python objects that they are."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np

from gemmkit.components import Component, field_values, with_fields
from gemmkit.emulator import machine
from gemmkit.emulator.captures import Captures
from gemmkit.emulator.copies import EmulatedTensorMap
from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.fault_page import Launched
from gemmkit.emulator.user_code import arguments, kernel_code
from gemmkit.lang import dialect
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.host import View
from gemmkit.lang.members import Members
from gemmkit.runtime.arrays import ArrayInfo, alignment, describe, is_array, on_host, unit_axis


class Arena:
    """The arrays of one launch: the same memory under the same checks, however often it is passed."""

    def __init__(self) -> None:
        self._memories: dict[tuple, Any] = {}
        self._captures = Captures(self._captured)
        self.launched: Launched | None = None
        self.originals: dict[int, Any] = {}                    # of what was made anew, by the id of what stands for it

    def memory(self, array: np.ndarray, name: str, readonly: bool = False, written: bool = True) -> Any:
        """An array's memory. Of one array there may be two, of which one can be written and the other cannot: they share
        their bytes, and what is known of them."""
        kind = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
        found = self._memories.get((kind, readonly))
        if found is None:
            other = self._memories.get((kind, not readonly))
            if other is None:
                found = machine.Memory.for_array(array, name, readonly=readonly, written=written)
            else:
                found = machine.Memory(name, other.base, other.data, readonly=readonly, valid=other.valid,
                                       written=other.written)
            self._memories[kind, readonly] = found
        return found

    def view(self, array: Any, name: str, unit: int | None, align: int, **how: Any) -> View:
        array = on_host(array)
        return View(array, self.memory(array, name, **how), unit, align)

    def view_of(self, info: ArrayInfo, array: Any, name: str, unit: int | bool | None = True, align: int | None = None,
                **how: Any) -> View:
        """An array as ``info`` describes it: its shape and strides there may be others. ``unit``: True for its own."""
        array = on_host(array)
        seen = np.lib.stride_tricks.as_strided(array, info.shape, [stride * array.dtype.itemsize for stride in info.strides],
                                               writeable=array.flags.writeable)
        unit = unit_axis(info) if unit is True else unit
        return self.view(seen, name, unit, alignment(info, unit) if align is None else align, **how)

    def members(self, views: list[View], array: Any, align: int) -> Members | None:
        """Views of one type, which promises ``align``, as one argument; ``array`` is the first one's. None without any."""
        return Members(on_host(array), views[0].memory, views[0].unit, align, views) if views else None

    def map(self, made: Any, view: View) -> Any:
        """A tensor map (`gemmkit.kernels.sm90.maps.Map`) of a view."""
        return EmulatedTensorMap.of(view, made.spec, made.axis)

    def tell(self, spec: Any, arrays: dict[str, Any]) -> None:
        """What a fault knows of the launch."""
        self.launched = Launched(spec, arrays)

    def component(self, component: Component) -> Component:
        """The component with its runtime arrays as views: those in fields, in nested components, and those that its
        functions captured."""
        changed: dict[str, Any] = {}
        for field, value in field_values(component).items():
            if is_array(value):
                is_output = field in getattr(component, "outputs", ())
                changed[field] = self._array(value, f"{type(component).__qualname__}.{field}", readonly=not is_output,
                                             written=not is_output)
            elif isinstance(value, Component):
                inner = self.component(value)
                if inner is not value:
                    changed[field] = inner
            elif isinstance(value, (FunctionType, DeviceFunction)):
                function = self._captures.function(value)
                if function is not value:
                    changed[field] = function
                    self.originals[id(function)] = value
        made = self._captures.methods(with_fields(component, changed))
        if made is not component:
            self.originals[id(made)] = component
        return made

    def _captured(self, array: Any, name: str) -> View:
        return self._array(array, name, readonly=True)

    def _array(self, array: Any, name: str, **how: Any) -> View:
        info = describe(array, name)
        return self.view(array, name, unit_axis(info), alignment(info), **how)


def run(made: Any, arrays: Any, seed: int | None = None) -> None:
    """Run what a family of kernels describes on NumPy arrays; faults raise the exceptions of `gemmkit.emulator.errors`. A
    ``seed`` shuffles the order of threads and blocks.

    ``made`` has a ``spec``, and ``emulated(arrays, arena)``: the kernels (`gemmkit.runtime.launchable.Launchable`) in their
    order, each with its arguments as the emulator takes them.
    """
    arena = Arena()
    dialect.check(made.spec)
    try:
        for kernel, given in made.emulated(arrays, arena):
            with np.errstate(all="ignore"):                   # integers wrap and floats overflow, as on the device
                machine.launch(kernel_code(kernel.kernel), arguments(given, arena.originals), grid=(kernel.blocks, 1, 1),
                               block=(kernel.threads, 1, 1), cluster=(kernel.cluster, 1, 1),
                               shared_memory=kernel.shared_bytes, max_shared_memory=kernel.target.shared_memory_per_block,
                               schedule_seed=seed, dependent=kernel.dependent, registers=kernel.registers)
    except EmulatorError as error:
        error.launched = arena.launched
        raise
