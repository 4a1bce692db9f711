"""Cubins kept in memory and on disk, found by the text of their key.

One entry is one file, ``<sha256 of the key>.kernel``: a line of JSON (the whole key, the caller's meta, the
cubin's length, and the sha256 of meta and cubin), then the cubin. It is written to a temporary file and
renamed, so that a reader in any process sees a whole entry or none; whatever does not check out is built
anew. Nothing is ever unpickled.

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
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CacheInfo", "CacheStats", "CubinCache", "Entry", "default_cache", "default_folder"]

_SUFFIX = ".kernel"
_TEMPORARY = ".tmp"
_FORMAT = 1
_MEGABYTE = 2**20
_ABANDONED_S = 3600.0  # a temporary file this old was left by a process that died


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
    """``$GEMMKIT_CACHE_DIR``, else ``gemmkit`` in the user's cache folder of this platform."""
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

    ``folder`` defaults to ``default_folder()``. A folder that cannot be written is warned of once, and the
    cache then works in memory. Raises ValueError when ``GEMMKIT_CACHE_MAX_MB`` is no number above 0.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     entry = CubinCache(folder).get_or_build("key", lambda: (b"cubin", {"registers": 24}))
    ...     again = CubinCache(folder).get_or_build("key", lambda: (b"never built", {}))
    >>> entry.from_disk, again.from_disk, again.cubin, again.meta
    (False, True, b'cubin', {'registers': 24})
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        disabled = os.environ.get("GEMMKIT_CACHE", "").strip().lower() in ("0", "off", "no", "false")
        self._folder = None if disabled else Path(folder) if folder is not None else default_folder()
        self._limit_bytes = _limit_bytes()
        self._entries: dict[str, Entry] = {}
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.Lock()
        self._warned = False
        self.stats = CacheStats()

    @property
    def folder(self) -> Path | None:
        """Where entries are kept, or None when nothing is kept on disk."""
        return self._folder

    def get_or_build(self, key: str, build: Callable[[], tuple[bytes, dict[str, Any]]]) -> Entry:
        """The entry of ``key``: from memory, from disk, or from ``build()``, which returns (cubin, meta).

        ``meta`` must be JSON (tuples come back as lists). An exception of ``build`` reaches every thread that
        waits for the key, and the next call tries again. Raises TypeError when ``build`` returns anything but
        bytes and a JSON dictionary, and RuntimeError when ``build`` asks for its own key.
        """
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    self.stats.memory_hits += 1
                    return entry
                flight = self._flights.get(key)
                mine = flight is None
                if flight is None:
                    flight = self._flights[key] = _Flight()
            if mine:
                return self._fly(flight, key, build)
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

    def _fly(self, flight: _Flight, key: str, build: Callable[[], tuple[bytes, dict[str, Any]]]) -> Entry:
        try:
            flight.entry = self._read(key) or self._build(key, build)
            return flight.entry
        except Exception as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[key]
                if flight.entry is not None:
                    self._entries[key] = flight.entry._replace(from_disk=False)
            flight.done.set()

    def _build(self, key: str, build: Callable[[], tuple[bytes, dict[str, Any]]]) -> Entry:
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
        except (TypeError, ValueError) as error:
            raise TypeError(f"meta must hold JSON values only, got {meta!r}: {error}") from None
        self._write(key, cubin, meta)
        return Entry(cubin, meta, False)

    # -- the folder ------------------------------------------------------------------------------------------

    def _file(self, key: str) -> Path | None:
        return self._folder and self._folder / (hashlib.sha256(key.encode()).hexdigest() + _SUFFIX)

    def _read(self, key: str) -> Entry | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            content = file.read_bytes()
        except OSError:  # not there, or not ours to read
            return None
        entry = _parse(content, key)
        with self._lock:
            if entry is None:
                self.stats.damaged += 1
            else:
                self.stats.disk_hits += 1
        if entry is not None:
            with contextlib.suppress(OSError):
                os.utime(file)  # the time of last use, which decides who is evicted
        return entry

    def _write(self, key: str, cubin: bytes, meta: dict[str, Any]) -> None:
        file = self._file(key)
        if file is None:
            return
        head = {
            "format": _FORMAT,
            "key": key,
            "bytes": len(cubin),
            "sha256": _digest(cubin, meta),
            "meta": meta,
        }
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(_TEMPORARY, file.name + ".", file.parent)
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(json.dumps(head).encode() + b"\n" + cubin)
                os.replace(temporary, file)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            with self._lock:
                first, self._warned = not self._warned, True
            if first:
                warnings.warn(
                    f"gemmkit cannot keep compiled kernels in {file.parent} ({error}), so each process "
                    "compiles them again; set GEMMKIT_CACHE_DIR to a writable folder, or GEMMKIT_CACHE=0",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        self._evict(keep=file)

    def _evict(self, keep: Path) -> None:
        """Delete the entries used longest ago until the folder fits; the one just written always stays."""
        files = sorted(self._scan(), key=lambda item: item[1].st_mtime, reverse=True)
        total = 0
        for file, stat in files:
            total += stat.st_size
            if total > self._limit_bytes and file != keep:
                with contextlib.suppress(OSError):
                    file.unlink()

    def _scan(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The entries in the folder; temporary files that nobody writes any more are deleted in passing."""
        if self._folder is None:
            return
        try:
            listing = list(self._folder.iterdir())
        except OSError:
            return
        for file in listing:
            if file.suffix not in (_SUFFIX, _TEMPORARY):
                continue
            with contextlib.suppress(OSError):  # another process may delete it meanwhile
                stat = file.stat()
                if file.suffix == _SUFFIX:
                    yield file, stat
                elif time.time() - stat.st_mtime > _ABANDONED_S:
                    file.unlink()

    def info(self) -> CacheInfo:
        """The folder, and the number and size of the entries in it now."""
        sizes = [stat.st_size for _, stat in self._scan()]
        return CacheInfo(self._folder, len(sizes), sum(sizes))

    def clear(self) -> None:
        """Forget every entry, in memory and on disk. Kernels that are already loaded stay loaded."""
        with self._lock:
            self._entries.clear()
        for file, _ in self._scan():
            with contextlib.suppress(OSError):
                file.unlink()


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


def _digest(cubin: bytes, meta: Any) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode() + b"\n" + cubin).hexdigest()


def _parse(content: bytes, key: str) -> Entry | None:
    """The entry in a file's content, or None when it is not a whole, undamaged entry of ``key``."""
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
