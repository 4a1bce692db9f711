"""Cubins kept in memory and on disk, found by the text of their key.

One entry is one file, ``<sha256 of the key>.kernel``: a line of JSON (the whole key, the caller's meta, the
cubin's length, and the sha256 of meta and cubin), then the cubin. It is written to a temporary file and
renamed, so that a reader in any process sees a whole entry or none; whatever does not check out is built
anew. Nothing is ever unpickled. Of processes that want one kernel at the same time one builds it, and the
others wait for its entry.

Which files are the cache's own, and whose are believed: :mod:`gemmkit.runtime.cache_folder`. Where nothing can
be kept on disk, kernels are kept in memory, and a warning says so once.

A wheel brings entries of much used kernels in `SHIPPED`, a folder of the package (`tools.cubins` makes it). Their keys name
no compiler and no version of Python, for they are compiled already; a source file that differs makes them useless.

Environment: ``GEMMKIT_CACHE_DIR`` (the folder), ``GEMMKIT_CACHE=0`` (nothing on disk),
``GEMMKIT_CACHE_MAX_MB`` (the entries used longest ago go when the folder outgrows it; 512).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gemmkit.runtime.cache_folder import Folder

SHIPPED = Path(__file__).resolve().parents[1] / "cubins"

_FORMAT = 1
_MEGABYTE = 2**20


class Entry(NamedTuple):
    """A cubin, what the caller noted beside it, and whether this call read it from disk."""

    cubin: bytes
    meta: dict[str, Any]
    from_disk: bool


class CacheInfo(NamedTuple):
    """The folder (None when nothing is kept on disk), the entries in it and their size together."""

    folder: Path | None
    entries: int
    bytes: int


@dataclass
class CacheStats:
    """What the calls of ``get_or_build`` came to. A ``damaged`` entry is also counted under ``builds``."""

    builds: int = 0
    disk_hits: int = 0
    memory_hits: int = 0
    damaged: int = 0


class _Flight:
    """One build under way; the threads that ask for the same key meanwhile wait for ``done``."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.done = threading.Event()
        self.entry: Entry | None = None
        self.error: Exception | None = None


def default_folder() -> Path:
    """``$GEMMKIT_CACHE_DIR``, else ``gemmkit`` in the user's cache folder of this platform.

    Raises RuntimeError when that is to be in the user's home folder, and the user has none.
    """
    chosen = os.environ.get("GEMMKIT_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        home = str(Path.home() / "Library" / "Caches")
    else:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gemmkit"


class CubinCache:
    """Cubins by key. Threads that ask for one key at the same time build it once; processes never see half an
    entry.

    ``folder`` defaults to ``default_folder()``. Where nothing can be kept there, that is warned of once, and the
    cache then works in memory. Raises ValueError when ``GEMMKIT_CACHE_MAX_MB`` is no number above 0.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     entry = CubinCache(folder).get_or_build("key", lambda: (b"cubin", {"registers": 24}))
    ...     again = CubinCache(folder).get_or_build("key", lambda: (b"never built", {}))
    >>> entry.from_disk, again.from_disk, again.cubin, again.meta
    (False, True, b'cubin', {'registers': 24})
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._homeless: str | None = None  # why there is no folder, though one is wanted
        self._disk: Folder | None = None
        limit = _limit_bytes()
        if os.environ.get("GEMMKIT_CACHE", "").strip().lower() not in ("0", "off", "no", "false"):
            try:
                self._disk = Folder(Path(folder) if folder is not None else default_folder(), limit)
            except RuntimeError as error:  # pathlib's, without HOME for a user that the system does not know
                self._homeless = str(error)
        self._entries: dict[str, Entry] = {}
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.Lock()
        self._warned = False
        self.stats = CacheStats()

    @property
    def folder(self) -> Path | None:
        """Where entries are kept, or None when nothing is kept on disk."""
        return self._disk.path if self._disk else None

    def get_or_build(self, key: str, build: Callable[[], tuple[bytes, dict[str, Any]]]) -> Entry:
        """The entry of ``key``: from memory, from disk, or from ``build()``, which returns (cubin, meta).

        ``meta`` must be JSON (tuples come back as lists). An exception of ``build`` reaches every thread that
        waits for the key, and the next call tries again. Raises TypeError when ``build`` returns anything but
        bytes and a JSON dictionary, and RuntimeError when ``build`` asks for its own key.
        """
        digest = hashlib.sha256(key.encode()).hexdigest()
        while True:
            with self._lock:
                entry = self._entries.get(digest)
                if entry is not None:
                    self.stats.memory_hits += 1
                    return entry
                flight = self._flights.get(digest)
                mine = flight is None
                if flight is None:
                    flight = self._flights[digest] = _Flight()
            if mine:
                return self._fly(flight, key, digest, build)
            if flight.owner == threading.get_ident():
                raise RuntimeError(f"the build of a cubin asked for its own key, {key[:80]!r}")
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
            if flight.entry is not None:
                with self._lock:
                    self.stats.memory_hits += 1
                return flight.entry
            # The builder was interrupted (KeyboardInterrupt): that is its own affair, so try again here.

    def _fly(self, flight: _Flight, key: str, digest: str,
             build: Callable[[], tuple[bytes, dict[str, Any]]]) -> Entry:
        try:
            flight.entry = self._read(key, digest)
            if flight.entry is None:
                with self._disk.lock(digest) if self._disk else contextlib.nullcontext():
                    flight.entry = self._read(key, digest, again=True) or self._build(key, digest, build)
            return flight.entry
        except Exception as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[digest]
                if flight.entry is not None:
                    self._entries[digest] = flight.entry._replace(from_disk=False)
            flight.done.set()

    def _build(self, key: str, digest: str, build: Callable[[], tuple[bytes, dict[str, Any]]]) -> Entry:
        with self._lock:
            self.stats.builds += 1
        cubin, meta = build()
        if not isinstance(cubin, bytes) or not isinstance(meta, dict):
            raise TypeError(
                f"build must return (bytes, dict), got ({type(cubin).__name__}, {type(meta).__name__}) "
                f"for {key[:80]!r}"
            )
        try:
            meta = json.loads(json.dumps(meta))  # what a later process will read, also for this one
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"meta must hold JSON values only, got keys {list(meta)}: {error}") from None
        self._write(key, digest, cubin, meta)
        return Entry(cubin, meta, False)

    # -- the folder ------------------------------------------------------------------------------------------

    def _read(self, key: str, digest: str, again: bool = False) -> Entry | None:
        """The entry on disk; ``again``: it was looked for a moment ago, so what is damaged has been counted."""
        content = self._disk.read(digest) if self._disk else None
        if content is None:
            return None
        try:
            entry = _parse(content, key)
        except RecursionError as error:
            entry = None
            self._warn(f"{digest}.kernel is not an entry that gemmkit wrote: {error}")
        with self._lock:
            if entry is not None:
                self.stats.disk_hits += 1
            elif not again:
                self.stats.damaged += 1
        return entry

    def _write(self, key: str, digest: str, cubin: bytes, meta: dict[str, Any]) -> None:
        if self._disk is None:
            if self._homeless is not None:
                self._warn(self._homeless)
            return
        try:
            self._disk.write(digest, _content(key, cubin, meta))
        except OSError as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            where = f"in {self.folder} " if self.folder else ""
            warnings.warn(
                f"gemmkit cannot keep compiled kernels {where}({reason}), so each process compiles them again; set "
                "GEMMKIT_CACHE_DIR to a folder of your own, or GEMMKIT_CACHE=0",
                RuntimeWarning,
                stacklevel=2,
            )

    def info(self) -> CacheInfo:
        """The folder, and the number and size of this user's entries in it now."""
        entries = self._disk.entries() if self._disk else []
        return CacheInfo(self.folder, len(entries), sum(status.st_size for _, status in entries))

    def clear(self) -> None:
        """Forget every entry, in memory and (this user's) on disk. Kernels that are already loaded stay loaded."""
        with self._lock:
            self._entries.clear()
        if self._disk:
            self._disk.clear()


@functools.lru_cache(maxsize=1)
def default_cache() -> CubinCache:
    """The cache of this process; the environment is read when it is first asked for."""
    return CubinCache()


def _limit_bytes() -> int:
    text = os.environ.get("GEMMKIT_CACHE_MAX_MB", "512")
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = 0.0
    if not 0 < megabytes < float("inf"):
        raise ValueError(f"GEMMKIT_CACHE_MAX_MB={text!r} must be a number of megabytes above 0, e.g. 512")
    return int(megabytes * _MEGABYTE)


@functools.lru_cache(maxsize=256)
def shipped(key: str) -> Entry | None:
    """The entry of a kernel that came with gemmkit; None for another kernel. (The folder is trusted as gemmkit's sources
    are.)"""
    try:
        content = (SHIPPED / f"{hashlib.sha256(key.encode()).hexdigest()}.kernel").read_bytes()
    except OSError:
        return None
    return _parse(content, key)


def ship(key: str, entry: Entry, folder: Path = SHIPPED) -> None:
    """Write an entry for `shipped`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = _content(key, entry.cubin, entry.meta)
    (folder / f"{hashlib.sha256(key.encode()).hexdigest()}.kernel").write_bytes(content)


def _content(key: str, cubin: bytes, meta: dict[str, Any]) -> bytes:
    """A file's content."""
    head = {"format": _FORMAT, "key": key, "bytes": len(cubin), "sha256": _digest(cubin, meta), "meta": meta}
    return json.dumps(head).encode() + b"\n" + cubin


def _digest(cubin: bytes, meta: Any) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode() + b"\n" + cubin).hexdigest()


def _parse(content: bytes, key: str) -> Entry | None:
    """The entry in a file's content, or None when it is not a whole, undamaged entry of ``key``.

    Raises RecursionError for JSON nested deeper than Python reads: no entry that was written here is.
    """
    line, _, cubin = content.partition(b"\n")
    try:
        head = json.loads(line)
    except ValueError:
        return None
    whole = (
        isinstance(head, dict)
        and head.get("format") == _FORMAT
        and head.get("key") == key
        and head.get("bytes") == len(cubin)
        and isinstance(head.get("meta"), dict)
        and head.get("sha256") == _digest(cubin, head["meta"])
    )
    return Entry(cubin, head["meta"], True) if whole else None
