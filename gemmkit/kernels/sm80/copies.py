"""What a GPU has for copies to the stages of `multistage`: which routes, and how threads wait for what they have started.

GPUs before sm_80 have no cp.async: `StagedCopies` leaves the route through registers alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gemmkit.components import Component
from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.rules import rule
from gemmkit.kernels.sm80.boxes import CpAsyncBoxes
from gemmkit.kernels.sm80.joined import CpAsyncJoined
from gemmkit.kernels.sm80.routes import CpAsync, Staged, StageRoute
from gemmkit.kernels.sm80.separable import CpAsyncSeparable
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts import Boxed
from gemmkit.ptx.copy_async import commit_copies, wait_copies
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo


@dataclass(frozen=True)
class Copies(Component):
    """What a GPU has for copies to the stages: the routes, and how a thread waits for copies that it has started.

    More than ``useful_stages`` stages hide nothing more. Base class: threads wait for nothing.
    """

    minimum_arch: ClassVar[tuple[int, int]]
    routes: ClassVar[tuple[type[StageRoute], ...]]             # in the order in which they are preferred
    useful_stages: ClassVar[int]

    def route(self, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> StageRoute:
        """The first route that does not refuse an operand. Boxes have one that fills them: ConfigError if it refuses."""
        if isinstance(operand.shared, Boxed):
            why = CpAsyncBoxes.refuses(operand, info, extents)
            rule(why is None, f"shared_{'ba'[operand.k_axis]}_layout", operand.shared, f"cp.async cannot fill it: {why}")
            return CpAsyncBoxes.of(operand, info, extents)
        return next(route.of(operand, info, extents) for route in self.routes
                    if route.refuses(operand, info, extents) is None)

    def blocks(self, wanted: int, fit: int) -> int:
        """For how many blocks a multiprocessor is to have registers, if its shared memory has room for ``fit``."""
        return wanted

    # -- in device code -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The copies that this thread has started for a stage are complete in number."""

    def wait(self, spec: Any) -> None:
        """Wait for this thread's copies to the next stage that is read."""


@dataclass(frozen=True)
class AsyncCopies(Copies):
    """cp.async, and what it cannot copy through registers. Every stage is another k-tile on its way."""

    minimum_arch = 8, 0
    routes = CpAsync, CpAsyncSeparable, CpAsyncJoined, Staged
    useful_stages = 8

    def commit(self) -> None:
        commit_copies()

    def wait(self, spec: Any) -> None:
        wait_copies(spec.stages - 2)


@dataclass(frozen=True)
class StagedCopies(Copies):
    """Registers alone. They hold one k-tile on its way, which is stored at the end of the round that loads it: a third stage
    would only be full earlier."""

    minimum_arch = 7, 5
    routes = (Staged,)
    useful_stages = 2

    def blocks(self, wanted: int, fit: int) -> int:
        """No more than find room: what is on its way takes registers, and there would be none to spare for it."""
        return max(1, min(wanted, fit))


#: In the order in which they are preferred.
COPIES = AsyncCopies(), StagedCopies()


def copies_of(device: DeviceInfo | None) -> Copies:
    """The copies of a device. One that is not known has all; one that is too old for the kernel, which `Config.check_device`
    refuses, the last."""
    return next((copies for copies in COPIES if device is None or device.arch >= copies.minimum_arch), COPIES[-1])
