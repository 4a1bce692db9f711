"""The CPU machine that runs kernels without a GPU and checks what hardware does not.

    machine     threads, blocks, `launch`
    scheduler   which thread runs next, deadlock
    agent       checked memory accesses
    memory      arrays and shared memory as addressable bytes
    async_unit  TMA as agents beside the threads; copies: what they move; mbarriers: where they end
    clusters    the barrier of a cluster, the registers of a block
    shadow      history of accesses, in which races are found
    clocks      what is ordered before what
    lang.sites  kernel lines
    errors      the faults
    recording   what a launch did, event by event, where it is asked for; kinds: by which classes
"""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

if TYPE_CHECKING:
    from gemmkit.emulator import agents as agents
    from gemmkit.emulator import barriers as barriers
    from gemmkit.emulator import copies as copies
    from gemmkit.emulator import tensor_cores as tensor_cores
else:
    __getattr__, __dir__ = public_names(globals())             # instructions ask for modules when they are emulated
