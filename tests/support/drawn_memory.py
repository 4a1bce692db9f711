"""Operands of drawn cases in memory: views of larger pieces, aligned or not, with nothing written around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.machines import poison


@dataclass(frozen=True)
class Place:
    """How an operand lies in memory.

    ``axis`` is the contiguous one, or has ``step`` elements from one to the next; lines are an odd multiple of ``unit`` bytes
    apart and begin ``skip`` units in; ``back``: the last line comes first.
    """

    dtype: str
    kind: str = "plain"
    axis: int = 1
    unit: int = 16
    skip: int = 0
    step: int = 1
    back: bool = False


@dataclass
class Held:
    """An array of the machine's in a larger piece of memory."""

    machine: Any
    memory: Any                         # flat
    before: np.ndarray                  # what it was
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]            # in elements

    def on_host(self, flat: np.ndarray) -> np.ndarray:
        strides = [s * flat.itemsize for s in self.strides]
        return np.ndarray(self.shape, flat.dtype, flat.view(np.uint8), self.offset * flat.itemsize, strides)

    @property
    def array(self) -> Any:
        if hasattr(self.memory, "as_strided"):
            return self.memory.as_strided(self.shape, self.strides, self.offset)
        if isinstance(self.memory, np.ndarray):
            return self.on_host(self.memory)
        import cupy

        return cupy.lib.stride_tricks.as_strided(self.memory[self.offset:], self.shape, [s * self.memory.itemsize for s in self.strides])

    def read(self, what: str) -> np.ndarray:
        """The array's elements; asserts that nothing around them has changed."""
        after = np.array(self.machine.numpy(self.memory))
        out = self.on_host(after).copy()
        self.on_host(after)[...] = self.on_host(self.before)
        changed = np.flatnonzero(after.view(np.uint8) != self.before.view(np.uint8))
        assert not changed.size, f"{what}: bytes beside it were written, the first {int(changed[0])} bytes from its memory's beginning"
        return out


def hold(machine: Any, place: Place, values: np.ndarray) -> Held:
    """``values`` (with a last axis of parts, if they are numbers) where ``place`` says."""
    dtype = values.dtype
    parts = values.shape[2] if values.ndim == 3 else 1
    lines: tuple[int, ...] = values.shape
    if place.kind in ("toeplitz", "hankel", "packed", "diagonal", "generated"):
        extent, count, stride = values.size, 1, (place.step,)
    else:
        if parts > 1 and place.kind != "planar":                      # one number is one element
            number = dtype.itemsize * parts
        else:
            number = dtype.itemsize
        along, across = values.shape[place.axis], values.shape[1 - place.axis]
        unit = max(1, place.unit // number)
        lead = max(1, -(-along * place.step // unit))
        lead = (lead + (lead % 2 == 0)) * unit
        stride = (place.step, lead) if place.axis == 0 else (lead, place.step)
        extent, count = lead, across
    scale = parts if parts > 1 and place.kind != "planar" else 1
    skip = place.skip * max(1, place.unit // (dtype.itemsize * scale)) * scale
    if parts > 1 and place.kind == "planar":
        lines, stride = (parts, *values.shape[:2]), (extent * max(1, count), *stride)
        count, values = count * parts, np.moveaxis(values, 2, 0)
    elif parts > 1:
        stride = (*(s * scale for s in stride), 1)
    offset = skip
    if place.back and count > 1 and len(stride) == 2:
        line = 1 - place.axis
        offset, stride = skip + (count - 1) * extent, tuple(-s if n == line else s for n, s in enumerate(stride))
    if len(stride) == 1:
        lines = (values.size,)
        values = values.reshape(-1)
    total = skip + (extent * max(1, count) * (place.step if len(stride) == 1 else 1)) * scale + 16
    memory = poison((total,), dtype)
    held = Held(machine, None, memory, offset, lines, stride)
    held.on_host(memory)[...] = values
    held.before = memory.copy()
    held.memory = machine.array(memory)
    return held


__all__ = ["Held", "Place", "hold"]
