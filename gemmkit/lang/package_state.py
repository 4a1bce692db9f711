"""Whether gemmkit's own code, on disk and in the process, is what a kernel's key says that it is."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from gemmkit.lang import guards
from gemmkit.lang.guards import Fact

_ROOT = Path(__file__).resolve().parent.parent


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:                       # a third of the time of Path.rglob
        for entry in entries:
            if entry.is_dir():
                yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, (stat := entry.stat()).st_mtime_ns, stat.st_size


def _source_state() -> tuple:
    """Name, time and size of every file of gemmkit's source."""
    return tuple(sorted(_files(str(_ROOT))))


_imported = _source_state()               # when gemmkit was imported: its modules are loaded from then on, as they are used
_PROCESS = os.urandom(16)


@lru_cache(maxsize=1)
def _state_with(modules: int) -> tuple:
    """`_source_state` when so many of gemmkit's modules were loaded: more may come from other files."""
    return _source_state()


@lru_cache(maxsize=2)
def _digest(state: tuple) -> str:
    """A digest of all files' text. ``state`` tells one text from another."""
    found = hashlib.sha256()
    for path, *_ in state:
        found.update(os.path.relpath(path, _ROOT).encode() + b"\0" + Path(path).read_bytes())
    return found.hexdigest()


def package_digest(of_process: bool = True) -> str:
    """A digest of gemmkit's own source: a new version of any file invalidates every compiled kernel.

    A process whose modules are loaded while files change has old code and new, and would store what it compiles under the
    newer files' key: its digest is of this process alone, or, unless ``of_process``, of the files' times, too.
    """
    state = _state_with(sum(name.startswith("gemmkit.") for name in list(sys.modules)))
    if state == _imported:
        return _digest(state)
    return hashlib.sha256(repr((_digest(state), _imported, _PROCESS if of_process else None)).encode()).hexdigest()


#: What gemmkit's own functions and classes, and the built-ins, were when they were read. Nobody edits them, but whoever does
#: (a test, a patch at run time) must not store what comes of it under the unpatched code's key.
of_packages: list[Fact] = []


def packages_stand() -> bool:
    """Whether gemmkit's own code is what it was when it was read. Looked at once a kernel: half a millisecond."""
    unique = {fact.key: fact for fact in of_packages}
    of_packages[:] = unique.values()
    return all(map(guards.holds, unique.values()))


__all__ = ["of_packages", "package_digest", "packages_stand"]
