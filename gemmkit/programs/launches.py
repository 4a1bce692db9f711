"""How the kernels of a plan are launched: one after the other in one stream, with a call's addresses among their values.

The addresses of a call are those of the arrays that the caller gives (`ProgramPlan.given`), and behind them where the memory
begins in which one kernel leaves its cells for the next (`gemmkit.programs.spare`). All of a plan's arrays of that memory
follow from this one address, so that a call looks up as many addresses as it has arrays.

Launches are described here alone: a plan's run binds them, and the tuner makes of them what its process launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gemmkit.programs.spare import BEGIN, spare_bytes
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.tensor_maps import Encoder

if TYPE_CHECKING:
    from gemmkit.programs.plan import ProgramPlan

__all__ = ["KernelLaunch", "Launches", "Put", "launches_of"]


class Put(NamedTuple):
    """What stands at a ``slot`` of a kernel's values: a call's address number ``which``, ``offset`` bytes further on; or the
    tensor map that an ``encoder`` makes of it."""

    slot: int
    which: int
    offset: int
    encoder: Encoder | None


class KernelLaunch(NamedTuple):
    kernel: Launchable
    puts: tuple[Put, ...]

    def bound(self, launch: Any) -> Callable[[int, tuple[int, ...]], None]:
        """``f(stream, addresses)``, of the kernel as it is loaded."""
        puts = self.puts

        def expand(addresses: tuple[int, ...]) -> list[Any]:
            at = [addresses[which] + offset for _, which, offset, _ in puts]
            return [address if put.encoder is None else put.encoder(address) for put, address in zip(puts, at)]

        values = list(self.kernel.values)
        for put in puts:
            if put.encoder is not None:
                values[put.slot] = bytes(128)
        prepared: Callable[[int, tuple[int, ...]], None] = launch.prepare(values, [put.slot for put in puts], expand)
        return prepared


class Launches(NamedTuple):
    """``spare``: bytes of the memory between kernels, 0 without any."""

    spare: int
    kernels: tuple[KernelLaunch, ...]


def launches_of(plans: tuple[ProgramPlan, ...]) -> Launches:
    """Of kernels in the order in which they run."""
    own = [plan.infos[name] for plan in plans for name in plan.spare]
    which = {name: n for n, name in enumerate(plans[0].given)}
    return Launches(spare_bytes(own), tuple(_of_kernel(plan, which) for plan in plans))


def _of_kernel(plan: ProgramPlan, which: Mapping[str, int]) -> KernelLaunch:
    kernel, puts = plan.launchable, []
    for n, name in enumerate(plan.names, 1):
        slot = kernel.slot(n)
        if slot is not None:
            encoder = plan.maps[name].encoder if name in plan.maps else None
            offset = 0 if name in which else plan.infos[name].pointer - BEGIN
            puts.append(Put(slot, which.get(name, len(which)), offset, encoder))
    return KernelLaunch(kernel, tuple(puts))
