"""Whether gemmkit's own code, on disk and in the process, is what a kernel's key says that it is."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from gemmkit.lang import guards
from gemmkit.lang.guards import Fact

_ROOT = Path(__file__).resolve().parent.parent


def _source_state() -> tuple:
    """Name, time and size of every file of gemmkit's source."""
    files = sorted(_ROOT.rglob("*.py"))
    return tuple((str(file), (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)


_imported = _source_state()               # when gemmkit was imported, or at most a second later


@lru_cache(maxsize=1)
def package_digest() -> str:
    """A digest of gemmkit's own source: a new version of any file invalidates every compiled kernel.

    A process that imported older files than lie there now would store what it compiles under the newer files' key: its
    digest is made of the files' times, too, and so is of this process alone.
    """
    state = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        state.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    if _source_state() != _imported:
        state.update(repr(_imported).encode())
    return state.hexdigest()


#: What gemmkit's own functions and classes, and the built-ins, were when they were read. Nobody edits them, but whoever does
#: (a test, a patch at run time) must not store what comes of it under the unpatched code's key.
of_packages: list[Fact] = []


def packages_stand() -> bool:
    """Whether gemmkit's own code is what it was when it was read. Looked at once a kernel: half a millisecond."""
    unique = {fact.key: fact for fact in of_packages}
    of_packages[:] = unique.values()
    return all(map(guards.holds, unique.values()))


__all__ = ["of_packages", "package_digest", "packages_stand"]
