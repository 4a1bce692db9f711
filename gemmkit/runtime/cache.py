"""Cubins kept in memory and on disk, found by the text of their key.

One entry is one file, ``<sha256 of the key>.kernel``: a line of JSON (the whole key, the caller's meta, the
cubin's length, and the sha256 of meta and cubin), then the cubin. It is written to a temporary file and
renamed, so that a reader in any process sees a whole entry or none; whatever does not check out is built
anew. Nothing is ever unpickled. Of processes that want one kernel at the same time one builds it, and the
others wait for its entry.

Which files are the cache's own, and whose are believed: :mod:`gemmkit.runtime.cache`. Where nothing can
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
import re
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# --------------------------------------------------------------------------------------------------
# The folder of compiled kernels: which of its files are the cache's own, and which of those may be believed.
#
# A cubin is code that will run with the rights of this process, so a file is read only when it can have been written by
# this user or by root alone: a regular file (never a link, FIFO or folder), owned by one of the two, that neither its
# group nor others may write to. The same is asked of the folder, for whoever may write to a folder may replace its files:
#
# =====================================================  =========================================================== the
# folder                                             what is done =====================================================
# =========================================================== this user's, and group and others may not write        read
# and written; so it is made where there is none root's, and group and others may not write             read: an
# administrator's kernels, for every user writable to more, with the sticky bit (as ``/tmp``)    read and written; other
# users' files are left alone, unread writable to more otherwise, or another user's          neither read nor written, and
# the cache says so once =====================================================
# ===========================================================
#
# The cache's own files are named by a kernel's digest (64 hexadecimal digits): ``<digest>.kernel`` is an entry,
# ``<digest>.<random>.gemmkit-tmp`` one that is being written, ``<digest>.gemmkit-lock`` says that a process compiles it.
# No other file is ever opened or deleted, nor is another user's. Windows knows no such owners and modes: there the rights
# of the folder have to do.

if sys.platform != "win32":
    import fcntl

_ENTRY = ".kernel"
_TEMPORARY = ".gemmkit-tmp"
_LOCK = ".gemmkit-lock"
_OWN = re.compile(rf"[0-9a-f]{{64}}({_ENTRY}|\.[a-z0-9_]+{_TEMPORARY}|{_LOCK})", re.ASCII)
_LARGEST = 2**30  # bytes of an entry: a kernel's has less than a thousandth of that
_ABANDONED_S = 3600.0  # a temporary or lock file this old was left by a process that died
_PATIENCE_S = 120.0  # to wait for another process's compilation, before this one compiles too
_ROOT = 0  # who may do anything here as it is
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_REFUSALS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class Distrusted(OSError):
    """A folder or file that others may have written, or something else in an entry's place."""


def _user() -> int | None:
    return os.geteuid() if hasattr(os, "geteuid") else None


def _is_own(status: os.stat_result) -> bool:
    """Whether it is a regular file of this user, which may be replaced and deleted."""
    return stat.S_ISREG(status.st_mode) and _user() in (None, status.st_uid)


def _is_trusted(status: os.stat_result) -> bool:
    """Whether nobody but this user or root can have written it."""
    user = _user()
    return user is None or (status.st_uid in (_ROOT, user) and not status.st_mode & _WRITABLE)


class Folder:
    """Files of bytes by digest. ``limit`` bounds their bytes together: those used longest ago go first."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self._limit = path, limit

    def _file(self, digest: str) -> Path:
        return self.path / (digest + _ENTRY)

    def _check(self) -> None:
        """Raise Distrusted when others may replace what is in the folder, FileNotFoundError when there is none."""
        status = os.stat(self.path)
        if _is_trusted(status) or (status.st_mode & _WRITABLE and status.st_mode & stat.S_ISVTX):
            return
        if status.st_mode & _WRITABLE:
            raise Distrusted(f"others may write to it, mode {stat.S_IMODE(status.st_mode):04o}; `chmod go-w` makes it yours "
                             "alone")
        raise Distrusted(f"it belongs to user {status.st_uid}, and this process is user {_user()}'s")

    def read(self, digest: str) -> bytes | None:
        """The bytes of an entry, which is now the one used last; None when there is none that may be believed."""
        try:
            self._check()
            file = self._file(digest)
            handle = os.open(file, os.O_RDONLY | _REFUSALS | getattr(os, "O_BINARY", 0))
        except OSError:  # not there, not to be read, or no regular file
            return None
        try:
            status = os.fstat(handle)  # of what was opened: the name may mean another file by now
            if not stat.S_ISREG(status.st_mode) or not _is_trusted(status) or status.st_size > _LARGEST:
                return None
            with contextlib.suppress(OSError):  # an administrator's entries keep their times
                os.utime(handle if os.utime in os.supports_fd else file)
            with os.fdopen(handle, "rb", closefd=False) as stream:
                return stream.read()
        except OSError:
            return None
        finally:
            os.close(handle)

    def write(self, digest: str, content: bytes) -> None:
        """Put a whole entry in place, then evict. Raises OSError, and leaves what others put in its place."""
        file = self._file(digest)
        self._make()
        with contextlib.suppress(FileNotFoundError):
            if not _is_own(os.lstat(file)):
                raise Distrusted(f"{file.name} there is not a regular file of this user")
        handle, temporary = tempfile.mkstemp(_TEMPORARY, digest + ".", self.path)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._evict(keep=file)

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check()

    # -- one process builds, the others wait -----------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self, digest: str) -> Iterator[None]:
        """Wait until no other process holds the entry's lock, and hold it; after two minutes go on without.

        Where nothing can be locked (no such folder, a file system without locks) there is nothing to wait for.
        """
        file = self.path / (digest + _LOCK)
        handle = self._locked(file)
        try:
            yield
        finally:
            if sys.platform != "win32" and handle is not None:
                # Deleted before it is let go: whoever waits for this file finds that it is gone, and looks again.
                with contextlib.suppress(OSError):
                    file.unlink()
                # Said, not left to `close`: a child forked meanwhile has the same open file.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _locked(self, file: Path) -> int | None:
        if sys.platform == "win32":  # processes do not wait for each other there
            return None
        deadline, pause = time.monotonic() + _PATIENCE_S, 0.001
        try:
            self._make()
            while True:
                handle = os.open(file, os.O_RDWR | os.O_CREAT | _REFUSALS, 0o600)
                kept = False
                try:
                    if not _is_own(os.fstat(handle)):
                        return None
                    while not _try_lock(handle):
                        if time.monotonic() > deadline:
                            return None
                        time.sleep(pause)
                        pause = min(2 * pause, 0.05)
                    kept = _is_same(handle, file)
                    if kept:
                        return handle
                finally:
                    if not kept:
                        os.close(handle)
        except OSError:
            return None

    # -- what is in it ---------------------------------------------------------------------------------------

    def _own(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """This user's files of a kind."""
        try:
            listing = [Path(entry.path) for entry in os.scandir(self.path)
                       if entry.name.endswith(suffix) and _OWN.fullmatch(entry.name)]
        except OSError:
            return
        for file in listing:
            with contextlib.suppress(OSError):  # another process may delete it meanwhile
                status = os.lstat(file)
                if _is_own(status):
                    yield file, status

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """This user's entries."""
        return list(self._own(_ENTRY))

    def clear(self) -> None:
        for file, _ in self.entries():
            with contextlib.suppress(OSError):
                file.unlink()
        self._sweep()

    def _sweep(self) -> None:
        """Delete temporary and lock files that nobody uses any more."""
        for suffix in (_TEMPORARY, _LOCK):
            for file, status in self._own(suffix):
                if time.time() - status.st_mtime > _ABANDONED_S:
                    with contextlib.suppress(OSError):
                        file.unlink()

    def _evict(self, keep: Path) -> None:
        """Delete the entries used longest ago until they fit; the one just written always stays."""
        self._sweep()
        total = 0
        for file, status in sorted(self.entries(), key=lambda item: item[1].st_mtime, reverse=True):
            total += status.st_size
            if total > self._limit and file != keep:
                with contextlib.suppress(OSError):
                    file.unlink()


def _try_lock(handle: int) -> bool:
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_same(handle: int, file: Path) -> bool:
    """Whether the open file is still the one of that name."""
    opened: Any = os.fstat(handle)
    try:
        named = os.lstat(file)
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


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
