"""Warpgroups with roles: the registers that their threads have, and the turns that consumers take at the tensor cores."""

from __future__ import annotations

from functools import cached_property

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.warpgroup import give_registers, named_arrive, named_barrier, take_registers


@dataclass(frozen=True)
class Warpgroups(Component):
    """``producers`` warpgroups, and ``consumers`` behind them. After setmaxnreg a producer's thread has ``few`` registers
    and a consumer's ``many``; with 0 both have what they have from the launch.

    >>> Warpgroups(1, 2, 24, 240).warp_registers
    (24, 24, 24, 24, 240, 240, 240, 240, 240, 240, 240, 240)
    """

    producers: int
    consumers: int
    few: int = 0
    many: int = 0

    @cached_property
    def threads(self) -> int:
        return 128 * (self.producers + self.consumers)

    @cached_property
    def warp_registers(self) -> tuple[int, ...] | None:
        """What a thread of each warp has in the end."""
        return (self.few,) * (4 * self.producers) + (self.many,) * (4 * self.consumers) if self.few else None

    # -- in device code -----------------------------------------------------------------------------------------------

    def give_registers(self) -> None:
        """Called by producers."""
        if self.few > 0:
            give_registers(self.few)

    def take_registers(self) -> None:
        """Called by consumers."""
        if self.many > 0:
            take_registers(self.many)


@dataclass(frozen=True)
class Turns(Component):
    """``consumers`` start their products one after the other: a named barrier for each, from ``barrier`` on, says that its
    turn has come. Where turns are not ``taken`` nothing is waited for."""

    consumers: int = 1
    barrier: int = 0
    taken: bool = False

    def give_first(self, group: int) -> None:
        """The first turn is consumer 0's: the last one gives it."""
        if group == self.consumers - 1:
            self.give(0)

    def wait(self, group: int) -> None:
        if self.taken:
            named_barrier(self.barrier + group, 256)

    def give(self, group: int) -> None:
        if self.taken:
            named_arrive(self.barrier + group, 256)
