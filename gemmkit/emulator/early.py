"""Launches that start before the kernel in front of them has ended (programmatic dependent launch)."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from gemmkit.emulator.errors import ProtocolError
from gemmkit.emulator.shadow import Pages
from gemmkit.lang.sites import here

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread


class NotYet(dict):
    """Stands for the history of global memory (`shadow`) until its thread has waited: every access looks there first."""

    def __init__(self, thread: Thread, pages: Pages) -> None:
        super().__init__()
        self._thread, self.pages = thread, pages

    def get(self, *ignored: Any) -> NoReturn:
        raise ProtocolError("global memory is accessed while the kernel before may still run; call grid_wait first",
                            site=here(), thread=self._thread.id)


def wait(thread: Thread) -> None:
    """The kernels before have ended (``griddepcontrol.wait``)."""
    if isinstance(thread.pages, NotYet):
        thread.pages = thread.pages.pages
