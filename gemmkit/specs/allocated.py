"""What the walk over a schedule allocates: operands on the way down, shared memory in use, and where an operand goes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from gemmkit.ptx import wmma
from gemmkit.runtime.device import H100
from gemmkit.shapes import local
from gemmkit.specs import shares, steps
from gemmkit.specs.forms import FR, SH, WMMA, Form, Role
from gemmkit.specs.placed import layout_of, swizzle_of
from gemmkit.specs.steps import HOME, LEVELS


class Operand(NamedTuple):
    """An operand on the way down: its form, and the order in which its matrix lies."""

    form: Form
    order: str | None

    def seen_as(self, form: Form) -> Operand:
        return Operand(form, self.order)


@dataclass
class State:
    """What the walk collects."""

    input: np.dtype
    accumulator: np.dtype
    threads: int | None = None
    tile: tuple[int, int] | None = None                       # of a block
    cursor: int = 0
    shared_bytes: int = 0
    depth: int | None = None                                  # of the steps whose number is known at run time
    in_shared: list[str] = field(default_factory=list)        # what touches shared memory: for messages
    is_ahead: bool = False                                    # within a move that is a step ahead
    is_through: bool = False                                  # within one by registers: a thread's part of tiles in turn
    fragments: str = WMMA                                     # whose the fragments are: mma.sync's where a tile is swizzled

    def allocate(self, step: steps.Step, nbytes: int) -> int:
        at, self.cursor = self.cursor, self.cursor + -(-nbytes // 128) * 128
        self.use(step, self.cursor)
        return at

    def use(self, step: steps.Step, nbytes: int) -> None:
        self.shared_bytes = max(self.shared_bytes, nbytes)
        if nbytes > H100.shared_memory_per_block:
            raise step.refuse(f"{nbytes} bytes of shared memory are needed, and a block has {H100.shared_memory_per_block}; "
                              "take smaller tiles")


class Place(NamedTuple):
    """Where an operand goes: as all see it, what one worker allocates of it, and from which byte of shared memory on."""

    operand: Operand
    allocated: Form
    offset: int
    said: str


def place_of(step: Any, operand: Operand, decomposition: tuple, level: str, state: State, other: Operand) -> Place:
    """Where ``operand`` goes by a step of ``level``. Raises ScheduleError where that level cannot see the memory."""
    form, memory = operand.form, step.memory
    if LEVELS.index(HOME[memory]) < LEVELS.index(level):
        raise step.refuse(f"{memory} is a {HOME[memory]}'s, and this is a step of each {level}; move before .to({level})")
    if memory == SH:
        order = step.order or operand.order or other.order or steps.ROW_MAJOR
        layout = layout_of(step, form.extents, order)
        swizzle = swizzle_of(step, layout, form.dtype)
        made = Form((local(*form.extents),), SH, form.dtype, layout, swizzle=swizzle)
        said = f"{made.element}.SH, {layout}{f', {swizzle}' if swizzle.terms else ''}"
        return Place(Operand(made, order), made, state.allocate(step, made.bytes), said)
    home = HOME[memory]
    extents = form.extents if level == home else shares.owned(step, decomposition, form.extents, level, home)
    role = role_of(step, operand, extents, state) if memory == FR else None
    seen = shares.form_in_registers(form, memory, role)
    allocated = seen.replaced(levels=(local(*extents),))
    return Place(Operand(seen, operand.order if memory == FR else None), allocated, 0, f"{allocated} of each {home}")


def role_of(step: Any, operand: Operand, extents: tuple, state: State) -> Role:
    name = "c" if isinstance(step, steps.Accumulate) else "ab"[step.operand]
    role = Role(name, operand.order, state.input, state.accumulator, state.fragments)
    key = (16, 16, 16), state.input, state.accumulator
    if key not in wmma.SPECS:
        raise step.refuse(f"no wmma instruction multiplies {state.input} and adds up {state.accumulator}; they take float16 "
                          "(sums of float32 or float16) and bfloat16 (float32)")
    if extents[0] % 16 or extents[1] % 16:
        raise step.refuse(f"{extents[0]} x {extents[1]} elements a warp are no whole fragments of 16 x 16")
    return replace(role, order=None) if name == "c" else role
