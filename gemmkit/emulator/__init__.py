"""The CPU machine that runs kernels without a GPU and checks what hardware does not.

    machine       threads, blocks, `launch`; which thread runs next, deadlock
    memory        arrays and shared memory as addressable bytes; the history of accesses, in which races are found; clocks:
                  what is ordered before what
    agents        checked memory accesses; TMA as agents beside the threads; streams, early starts
    copies        what TMA and the copies of threads move
    barriers      mbarriers, barriers of a cluster, counters; wgmma, and what is in flight
    errors        the faults, and the page that draws one
    functions     device functions in Python; user_code: a user's functions, checked
    recording     what a launch did, event by event, where it is asked for
"""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

if TYPE_CHECKING:
    from gemmkit.emulator import agents as agents
    from gemmkit.emulator import barriers as barriers
    from gemmkit.emulator import copies as copies
else:
    __getattr__, __dir__ = public_names(globals())             # instructions ask for modules when they are emulated
