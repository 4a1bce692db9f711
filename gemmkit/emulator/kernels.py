"""A template kernel in the emulator: arrays become checked views, components stay the Python objects that they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import Component, field_values, is_array, unit_axis, with_fields
from gemmkit.emulator import machine
from gemmkit.emulator.mode import Mode, current_mode
from gemmkit.kernels.select import KERNELS
from gemmkit.kernels.spec import Shape
from gemmkit.lang import dialect
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType
from gemmkit.ptx.tma import emulated_map
from gemmkit.runtime.arrays import alignment, describe
from gemmkit.runtime.device import H100


class Arena:
    """The arrays of one launch: the same memory under the same checks, however often it is passed."""

    def __init__(self) -> None:
        self._memories: dict[tuple, Any] = {}

    def memory(self, array: np.ndarray, name: str, **how: Any) -> Any:
        key = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)
        if key not in self._memories:
            self._memories[key] = machine.Memory.for_array(array, name, **how)
        return self._memories[key]

    def view(self, array: Any, name: str, unit: int | None, align: int, **how: Any) -> View:
        array = np.asarray(array)
        return View(array, self.memory(array, name, **how), unit, align)

    def component(self, component: Component) -> Component:
        """The component with its runtime arrays as views (nested ones too)."""
        changed: dict[str, Any] = {}
        for field, value in field_values(component).items():
            if is_array(value):
                info = describe(value, field)
                name = f"{type(component).__qualname__}.{field}"
                is_output = field in getattr(component, "outputs", ())
                changed[field] = self.view(value, name, unit_axis(info), alignment(info), readonly=not is_output,
                                           written=not is_output)
            elif isinstance(value, Component):
                inner = self.component(value)
                if inner is not value:
                    changed[field] = inner
        return with_fields(component, changed)


def run(compiled: Any, a: Any, b: Any, c: Any, out: Any, shape: tuple[int, int, int]) -> None:
    """Run a compiled problem's kernel on NumPy arrays; faults raise the exceptions of `gemmkit.emulator.errors`."""
    dialect.check(compiled.spec)
    conf, arena = compiled.problem.config, Arena()
    reads_out = any(is_array(x) and np.shares_memory(np.asarray(x), np.asarray(out)) for x in _arrays(compiled.spec)
                    ) or c is out
    a, b, c, out = (array if array is None else getattr(conf, f"global_{name}_layout").host_view(np.asarray(array))
                    for name, array in zip("abcd", (a, b, c, out)))
    types = [operand.type for operand in compiled.operands]
    views_order = (("out", out, types[3], dict(written=reads_out)), ("a", a, types[0], dict(readonly=True)),
                   ("b", b, types[1], dict(readonly=True)), ("c", c, types[2], dict(readonly=True)))
    made = {name: arena.view(array, name, ty.unit, ty.alignment, **how) if isinstance(ty, ViewType) else None
            for name, array, ty, how in views_order}
    views = [made[name] for name in ("a", "b", "c", "out")]
    maps = [None if m is None else emulated_map(views[m.which], m.spec, m.axis) for m in compiled.maps]
    spec = arena.component(compiled.spec)
    mode = current_mode() or Mode()
    with np.errstate(all="ignore"):                # integers wrap and floats overflow, as on the device
        machine.launch(KERNELS[conf.kernel], (spec, *views, Shape(*shape), *maps), grid=(compiled.blocks, 1, 1),
                       block=(conf.threads, 1, 1), cluster=(conf.peers, 1, 1),
                       shared_memory=compiled.spec.shared_bytes, max_shared_memory=H100.shared_memory_per_block,
                       schedule_seed=mode.seed, dependent=conf.is_pipeline)


def _arrays(component: Component) -> list:
    """All runtime arrays of a component and those nested in it."""
    out = []
    for value in field_values(component).values():
        if isinstance(value, Component):
            out += _arrays(value)
        elif is_array(value):
            out.append(value)
    return out
