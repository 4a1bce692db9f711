"""Tuned mappings on disk, by GPU: what `gemmkit.tune` found is what `matmul` takes next time.

One file of JSON for each kind of GPU, ``tuned/<name>-<architecture>.json`` in the cache's folder. It holds numbers and
words alone, and what it says passes the checks of every configuration: no file can make a result wrong, or run code. A
product finds its mapping by a digest of all that a mapping's speed depends on: sizes, layouts, strides, alignments, and
the code of its components.

What cannot be used is told by a warning, once a process, and left as it is: a damaged file, one of another GPU, an entry
that no kernel takes any more. ``GEMMKIT_TUNED=0`` leaves the whole store unread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gemmkit.components import freeze
from gemmkit.lang.errors import ConfigError
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.cache import default_cache
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.operators import AccumulatorRule, operator_for, result_dtype, sized

if sys.platform != "win32":
    import fcntl

_FORMAT = 1
_LARGEST = 2**26                       # bytes of a file that is read
_PATIENCE_S = 30.0                     # to wait for another process that writes
_READ_ONLY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

_is_unread: ContextVar[bool] = ContextVar("gemmkit_store_unread", default=False)
_warned: set[str] = set()
_lock = threading.Lock()


def digest_of(infos: Mapping[str, ArrayInfo | None], layouts: Mapping[str, Any], sizes: tuple[int, int, int],
              keywords: Mapping[str, Any], device: DeviceInfo, products: int) -> str:
    """What a product's mapping is kept under. An ``out`` like the one that a call would make is told as such."""
    a, b = layouts["a"].dtype, layouts["b"].dtype
    sums = AccumulatorRule.of(dict(layouts), dict(keywords), sizes[2])
    operator = keywords.get("operator") or operator_for(a, b, sizes, device, products, sums)
    asked = None if infos.get("out") is not None or layouts["d"] is None else layouts["d"].dtype
    result = result_dtype(a, b, layouts["c"], sized(operator, a, b, sizes, device, products, sums), asked)
    parts = [f"{sizes}x{products}"]
    for name in ("a", "b", "c", "out"):
        info, layout = infos.get(name), layouts.get("d" if name == "out" else name)
        if info is None or (name == "out" and is_as_new(info, result, sizes, products)):
            parts.append(f"{name}: new {result}" if name == "out" else f"{name}: none")
            continue
        order = layout and freeze(layout).fingerprint
        parts.append(f"{name}: {order} {info.shape} {info.strides} {info.steps} {info.dtype} {alignment(info)}")
    return hashlib.sha256("\n".join([*parts, *_of_components(keywords)]).encode()).hexdigest()


def digest_of_group(infos: Sequence[Sequence[ArrayInfo | None]], keywords: Mapping[str, Any]) -> str:
    """The same of a group, by the arrays (a, b, c, out) of its products. New results are of one kind: they do not count."""
    parts = [f"group of {len(infos)}"]
    for of in infos:
        parts.append(" ".join("none" if info is None else f"{info.shape} {info.strides} {info.dtype} {alignment(info)}"
                              for info in of[:3]))
        out = of[3]
        if out is not None and (out.strides != (out.shape[1], 1) or out.pointer % 16):
            parts.append(f"out: {out.strides} {alignment(out)}")
        parts.append(f"{'new' if out is None else out.dtype}")
    return hashlib.sha256("\n".join([*parts, *_of_components(keywords)]).encode()).hexdigest()


def digest_of_program(text: str, infos: Mapping[str, ArrayInfo]) -> str:
    """The same of a program: ``text`` is its default kernel's, which has all of its mathematics."""
    parts = [f"{name}: {info.shape} {info.strides} {info.dtype} {alignment(info)}" for name, info in infos.items()]
    return hashlib.sha256("\n".join(["program", *parts, text]).encode()).hexdigest()


def _of_components(keywords: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(keywords.items()):
        if value is None:                                      # as if it were not there
            continue
        if name in ("dtype", "precision"):
            yield f"{name}: {value}"
            continue
        frozen = freeze(value)
        yield f"{name}: {frozen.kind} {frozen.fingerprint} {[info.shape for info in frozen.arrays]}"


def is_as_new(info: ArrayInfo, dtype: Any, sizes: tuple[int, int, int], products: int) -> bool:
    """Whether D is like the one that a call makes."""
    M, N, _ = sizes
    return (info.dtype == dtype and info.shape == (M, N) and info.strides == (N, 1) and info.pointer % 16 == 0
            and info.steps in ((), ((products, M * N),)))


def find(device: DeviceInfo, key: Any, read: Callable[[Any], Any]) -> Any:
    """The tuned mapping of a product, or None; ``key()`` is its digest, asked for where there is a store alone. ``read``
    makes a mapping of an entry's plain data, or raises ValueError."""
    if _is_unread.get() or os.environ.get("GEMMKIT_TUNED", "").strip().lower() in ("0", "off", "no", "false"):
        return None
    store = store_of(device)
    entries = store.entries() if store is not None else {}
    found = entries.get(key()) if entries else None
    if found is None or found.get("mapping") is None:
        return None
    try:
        return read(found["mapping"])
    except ValueError as error:
        _warn(f"a tuned mapping in {store and store.file} cannot be used: {error}")
        return None


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Within it every product takes the tables' mapping."""
    token = _is_unread.set(True)
    try:
        yield
    finally:
        _is_unread.reset(token)


def refused(device: DeviceInfo, candidate: Any, error: ConfigError) -> None:
    """Say that no kernel takes a tuned mapping any more (a `Candidate`, or whatever `find` has read)."""
    _warn(f"a tuned mapping for {device.name} cannot be used, the default is taken instead ({candidate.name}: {error}); "
          "tune again")


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"gemmkit: {text}", RuntimeWarning, stacklevel=2)


def store_of(device: DeviceInfo) -> TuningStore | None:
    """The store of a GPU; None where nothing is kept on disk."""
    folder = default_cache().folder
    if folder is None:
        return None
    with _lock:
        found = _stores.get((folder, device))
        if found is None:
            name = re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-").lower()
            found = _stores[folder, device] = TuningStore(folder / "tuned" / f"{name}-{device.arch_name}.json", device)
        return found


class TuningStore:
    """The file of one kind of GPU."""

    def __init__(self, file: Path, device: DeviceInfo):
        self.file, self._path, self._device = file, str(file), device        # a Path is made one in each call
        self._seen: Any = None                         # of the file, when it was read
        self._entries: dict[str, dict[str, Any]] = {}

    def entries(self) -> dict[str, dict[str, Any]]:
        """What is kept, by digests. Read again when the file is another."""
        try:
            status = os.stat(self._path)
        except OSError:
            self._seen, self._entries = None, {}
            return self._entries
        seen = status.st_mtime_ns, status.st_size, status.st_ino
        if seen != self._seen:
            self._seen, self._entries = seen, self._read()
        return self._entries

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            handle = os.open(self.file, _READ_ONLY)
            with os.fdopen(handle, "rb") as stream:
                content = stream.read(_LARGEST + 1)
            if len(content) > _LARGEST:
                raise ValueError(f"it is larger than {_LARGEST} bytes")
            held = json.loads(content)
            if not isinstance(held, dict) or held.get("format") != _FORMAT or not isinstance(held.get("entries"), dict):
                raise ValueError("it is not a store of this version")
        except (OSError, ValueError, RecursionError) as error:
            _warn(f"tuned mappings in {self.file} cannot be read, defaults are taken instead: {error}")
            return {}
        if held.get("device") != self._about():
            _warn(f"tuned mappings in {self.file} are of another GPU ({held.get('device')}), and are not used")
            return {}
        return {key: entry for key, entry in held["entries"].items() if isinstance(entry, dict)}

    def _about(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self._device)))     # tuples as lists, as they come back

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Keep an entry beside those that are there. Processes that tune at once lose nothing of each other's.

        Raises OSError where the folder cannot be written to.
        """
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self._seen = None
            held = {"format": _FORMAT, "device": self._about(), "entries": {**self.entries(), key: entry}}
            handle, temporary = tempfile.mkstemp(".gemmkit-tmp", self.file.stem + ".", self.file.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    json.dump(held, stream, indent=1)
                os.replace(temporary, self.file)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """No other process writes meanwhile; where that takes half a minute, it is not waited for any longer."""
        if sys.platform == "win32":
            yield
            return
        handle = os.open(self.file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)


_stores: dict[tuple[Path, DeviceInfo], TuningStore] = {}
