"""What the emulator reports: a class for each kind of fault, with kernel line, threads and address."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gemmkit.lang.sites import Line, Site, kernel_line, template_line


class ThreadId(NamedTuple):
    """A thread of a launch: its block's index (x, y, z) and its linear index in the block."""

    block: tuple[int, int, int]
    tid: int

    def __str__(self) -> str:
        return f"thread {self.tid} of block {self.block}"


class Access(NamedTuple):
    """One side of a race: ``kind`` is "read" or "write"."""

    kind: str
    thread: ThreadId
    kernel_line: Line
    template_line: Line | None


class Waiter(NamedTuple):
    """Where a thread stands that cannot go on."""

    thread: ThreadId
    what: str
    kernel_line: Line


class EmulatorError(RuntimeError):
    """A fault in an emulated kernel.

    Attributes:
        kernel_line: the innermost line of the kernel or of a component (`Line`: file, number, text).
        template_line: the line of the template kernel that called it, when that is another one.
        thread: the thread at fault, (block, tid).
        address: absolute byte address for an array, byte offset for shared memory.
        size: bytes of the access.
        memory: name of the array, or of the block's shared memory.
        index, extents: of an access by index that lies outside its array, which has no address; else None.

    In a notebook `html` is shown: the access in its tile, in the banks of shared memory, or in its array.
    """

    index: tuple[int, ...] | None = None
    extents: tuple[int, ...] | None = None
    launched: Any = None
    """What the launch worked on (`gemmkit.emulator.fault_page.Launched`); None outside of gemmkit's products."""

    def __init__(self, message: str, *, site: Site | None = None, thread: ThreadId | None = None,
                 address: int | None = None, size: int | None = None, memory: str | None = None) -> None:
        self.kernel_line = None if site is None else kernel_line(site)
        self.template_line = None if site is None else template_line(site)
        self.thread, self.address, self.size, self.memory = thread, address, size, memory
        lines = [message]
        if thread is not None:
            lines.append(f"by {thread}")
        if self.kernel_line is not None:
            lines.append(f"at {self.kernel_line}")
        if self.template_line is not None:
            lines.append(f"called from {self.template_line}")
        super().__init__("\n  ".join(lines))

    def html(self) -> str:
        """A page that fetches nothing: what the message says, and the access drawn where it lies."""
        from gemmkit.emulator.fault_page import fault_page

        return fault_page(self, self.launched)

    def _repr_html_(self) -> str:
        """What a notebook shows of a fault that a cell returns."""
        from gemmkit.drawing import framed

        return framed(self.html(), 560)


class BoundsError(EmulatorError):
    """An access to bytes that belong to no element of the array, or lie outside shared memory."""


class AlignmentError(EmulatorError):
    """An access whose address is no multiple of its alignment."""


class UninitialisedRead(EmulatorError):
    """A read of bytes that nothing has written, or of a register: a variable, or an element of `registers`."""


class CoordinateError(EmulatorError):
    """Arithmetic of whole numbers that the device has no result for: a coordinate that leaves its 32 bits, a division by
    zero, a negative exponent, an integer made of NaN or of a float that its type does not hold."""


class ReadOnlyError(EmulatorError):
    """A write to an array that the kernel may only read."""


class DivergenceError(EmulatorError):
    """Threads that must execute one instruction together meet at different ones.

    ``lines``: the two kernel lines, the one that was there first leading.
    """

    def __init__(self, message: str, first: Site, second: Site, first_thread: ThreadId,
                 thread: ThreadId) -> None:
        self.lines = (kernel_line(first), kernel_line(second))
        super().__init__(f"{message}\n  {first_thread} waits at {self.lines[0]}", site=second, thread=thread)


class RaceError(EmulatorError):
    """Two accesses to one byte, at least one of them a write, with nothing that orders them.

    ``accesses``: the earlier and the later one in this run (another run may see them the other way round).
    """

    def __init__(self, message: str, earlier: Access, later: Access, *, site: Site, address: int, size: int,
                 memory: str) -> None:
        self.accesses = (earlier, later)
        called = f"\n  called from {earlier.template_line}" if earlier.template_line else ""
        first = f"first a {earlier.kind} by {earlier.thread}\n  at {earlier.kernel_line}{called}"
        super().__init__(f"{message}\n  {first}\n  then a {later.kind}", site=site, thread=later.thread,
                         address=address, size=size, memory=memory)


class ProtocolError(EmulatorError):
    """An instruction used against its rules: at an mbarrier that does not exist, with registers that no warp has, ..."""


class ProxyError(EmulatorError):
    """TMA or a tensor core reads what a thread wrote, with no ``fence_async`` of that thread in between.

    ``write``: the thread's access.
    """

    def __init__(self, message: str, write: Access, *, site: Site, thread: ThreadId, address: int, size: int,
                 memory: str) -> None:
        self.write = write
        super().__init__(f"{message}\n  written by {write.thread}\n  at {write.kernel_line}", site=site,
                         thread=thread, address=address, size=size, memory=memory)


class DeadlockError(EmulatorError):
    """No thread can go on. ``waiting``: every thread that waits, for what and where."""

    def __init__(self, message: str, waiting: Sequence[Waiter], site: Site) -> None:
        self.waiting = tuple(waiting)
        super().__init__(message, site=site, thread=waiting[0].thread)
