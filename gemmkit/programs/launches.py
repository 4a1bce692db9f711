"""How the kernels of a plan are launched: one after the other in one stream, with what a call brings among their values.

A call brings the addresses of the arrays that the caller gives (`ProgramPlan.given`), where the memory begins in which one
kernel leaves its cells for the next (`gemmkit.programs.spare`; 0 without any), and its numbers. All of a plan's arrays of
that memory follow from this one address, so that a call looks up as many addresses as it has arrays.

Launches are described here: a plan's run binds them, and the tuner makes of them what its process launches.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.launch import Launch, Put
from gemmkit.programs.spare import BEGIN, spare_bytes
from gemmkit.runtime.arrays import is_array

if TYPE_CHECKING:
    from gemmkit.programs.plan import ProgramPlan

LARGEST = float(np.finfo(np.float32).max)
FLOATS = float, np.floating                    # arguments that a program's kernel has as run-time numbers


class Given(NamedTuple):
    """A call's arguments that are no arrays: numbers, which a launch brings, and components, which a text is made of. A text
    also depends on which numbers are positive."""

    numbers: dict[str, float]
    components: dict[str, Any]

    def again(self, arguments: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of another call with this one's text. Raises ValueError and TypeError where it needs another one."""
        for name, x in self.components.items():
            other = arguments.get(name, x)
            if other is not x and not (isinstance(x, CONSTANTS) and isinstance(other, CONSTANTS) and other == x):
                raise ValueError(f"{name} is {other!r}, and the plan was made for {x!r}, which is in its text; make "
                                 "another plan")
        numbers = {name: number_of(name, arguments.get(name, x)) for name, x in self.numbers.items()}
        for name, x in self.numbers.items():
            if x > 0 and not numbers[name] > 0:
                raise ValueError(f"{name} is {numbers[name]}, and the plan was made for a positive number ({x}), which its "
                                 "text depends on; make another plan")
        return numbers


CONSTANTS = bool, int, str, *FLOATS, np.integer, np.bool_


def given_by(arguments: Mapping[str, Any]) -> Given:
    """Raises ValueError for a number that is no float32."""
    others = {name: x for name, x in arguments.items() if not is_array(x)}
    numbers = {name: number_of(name, x) for name, x in others.items() if isinstance(x, FLOATS)}
    return Given(numbers, {name: x for name, x in others.items() if name not in numbers})


def number_of(name: str, x: Any) -> float:
    """Raises TypeError for what is no number, ValueError for one that is finite and no float32 is."""
    if not isinstance(x, (int, np.integer, *FLOATS)) or isinstance(x, bool):
        raise TypeError(f"{name}={x!r}: a number is needed")
    number = float(x)
    if LARGEST < abs(number) < float("inf"):
        raise ValueError(f"{name}={x!r}: numbers of a kernel are float32, up to {LARGEST:.3g}")
    return number


def bits_of(x: float) -> int:
    """Of float32. Launches compare what they bring with what the last one brought: NaN and -0.0 are told apart as bits."""
    bits: int = struct.unpack("I", struct.pack("f", x))[0]
    return bits


def _of_bits(bits: int) -> float:
    number: float = struct.unpack("f", struct.pack("I", bits))[0]
    return number


class Launches(NamedTuple):
    """``spare``: bytes of the memory between kernels, 0 without any."""

    spare: int
    kernels: tuple[Launch, ...]


def launches_of(plans: tuple[ProgramPlan, ...]) -> Launches:
    """Of kernels in the order in which they run."""
    own = [plan.infos[name] for plan in plans for name in plan.spare]
    which = {name: n for n, name in enumerate(plans[0].given)}
    numbers = {name: n for n, name in enumerate(plans[0].call.numbers, len(which) + 1)}
    return Launches(spare_bytes(own), tuple(_of_kernel(plan, which, numbers) for plan in plans))


def _of_kernel(plan: ProgramPlan, which: Mapping[str, int], numbers: Mapping[str, int]) -> Launch:
    """``which``, ``numbers``: where a call brings arrays and numbers."""
    kernel, sizes = plan.launchable, [field.name for field in fields(plan.sizes)]
    puts = [Put(sizes.index(name), numbers[name], 0, _of_bits) for name in plan.printed.scalars]
    for n, (name, tensor_map) in enumerate(plan.taken, 1):
        slot = kernel.slot(n)
        if slot is not None:
            encoder = None if tensor_map is None else tensor_map.encoder
            offset = 0 if name in which else plan.infos[name].pointer - BEGIN
            puts.append(Put(slot, which.get(name, len(which)), offset, encoder))
    return Launch(kernel, puts)
