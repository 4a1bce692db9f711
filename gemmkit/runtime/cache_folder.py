"""The folder of compiled kernels: which of its files are the cache's own, and which of those may be believed.

A cubin is code that will run with the rights of this process, so a file is read only when it can have been written by
this user or by root alone: a regular file (never a link, FIFO or folder), owned by one of the two, that neither its group
nor others may write to. The same is asked of the folder, for whoever may write to a folder may replace its files:

=====================================================  ===========================================================
the folder                                             what is done
=====================================================  ===========================================================
this user's, and group and others may not write        read and written; so it is made where there is none
root's, and group and others may not write             read: an administrator's kernels, for every user
writable to more, with the sticky bit (as ``/tmp``)    read and written; other users' files are left alone, unread
writable to more otherwise, or another user's          neither read nor written, and the cache says so once
=====================================================  ===========================================================

The cache's own files are named by a kernel's digest (64 hexadecimal digits): ``<digest>.kernel`` is an entry,
``<digest>.<random>.gemmkit-tmp`` one that is being written, ``<digest>.gemmkit-lock`` says that a process compiles it. No
other file is ever opened or deleted, nor is another user's. Windows knows no such owners and modes: there the rights of
the folder have to do.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
