"""The folder of compiled kernels: only the cache's own files are touched, only this user's are believed, one process builds."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemmkit.runtime import cache
from gemmkit.runtime import cache as cache_folder
from gemmkit.runtime.cache import CubinCache
from tests.support.patches import Seeded, Set

KEY = "kernel singlestage, sm_90a"
NAME = hashlib.sha256(KEY.encode()).hexdigest() + ".kernel"
CUBIN = bytes(range(256)) * 40
DIGEST = "0123456789abcdef" * 4
OTHERS = ["linux.kernel", "x.tmp", "x.kernel.1.tmp", "notes.txt", ".kernel", DIGEST, DIGEST[1:] + ".kernel",
          DIGEST.upper() + ".kernel", DIGEST + ".kernel.old", "x" + DIGEST + ".kernel", "x.gemmkit-tmp", DIGEST + ".lock"]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GEMMKIT_CACHE", "GEMMKIT_CACHE_DIR", "GEMMKIT_CACHE_MAX_MB"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def one_warning() -> Iterator[None]:
    """Exactly one warning in the whole test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "GEMMKIT_CACHE_DIR" in str(caught[0].message)


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def build() -> tuple[bytes, dict[str, Any]]:
    return CUBIN, {"registers": 168}


def never() -> Any:
    raise AssertionError("built, though it was kept")


def works_in_memory(folder: Path | None) -> None:
    """Two kernels and one of them again: built once each, and whatever the folder is like nothing is raised."""
    made = CubinCache(folder)
    for key in (KEY, "another"):
        assert made.get_or_build(key, build)[::2] == (CUBIN, False)
    assert made.get_or_build(KEY, never).cubin == CUBIN
    made.info()
    made.clear()


def another_user(monkeypatch: pytest.MonkeyPatch, root: int = -1) -> None:
    """From here on this process is a user whom no file belongs to."""
    monkeypatch.setattr(cache_folder, "_user", lambda: os.getuid() + 1)
    monkeypatch.setattr(cache_folder, "_ROOT", root)


# -- whose files ------------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("no_warning")
def test_no_file_of_anything_else_is_deleted(folder: Path, environment: Set) -> None:
    """By eviction, by the sweep of what a dead process left, by `clear`: whatever its suffix and age."""
    environment(GEMMKIT_CACHE_MAX_MB="0.001")
    for name in OTHERS:
        (folder / name).write_bytes(b"somebody's")
        os.utime(folder / name, (0, 0))
    (folder / (DIGEST + ".kernel")).mkdir()                           # named as an entry, and no file
    made = CubinCache(folder)
    for key in ("one", "two"):
        made.get_or_build(key, build)
    assert made.info().entries == 1                                   # evicted
    made.clear()
    assert made.info().entries == 0
    assert sorted(p.name for p in folder.iterdir()) == sorted([*OTHERS, DIGEST + ".kernel"])
    assert all((folder / name).read_bytes() == b"somebody's" for name in OTHERS)


@pytest.mark.usefixtures("no_warning")
def test_what_a_dead_process_left_is_swept(folder: Path) -> None:
    names = [f"{DIGEST}.{kind}" for kind in ("x1_aab2c.gemmkit-tmp", "y1_aab2c.gemmkit-tmp", "gemmkit-lock")]
    for name in names:
        (folder / name).write_bytes(b"half an entry")
    for name in (names[0], names[2]):
        os.utime(folder / name, (time.time() - 7200,) * 2)
    CubinCache(folder).get_or_build(KEY, build)
    assert sorted(p.name for p in folder.iterdir()) == sorted([names[1], NAME])


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
@pytest.mark.usefixtures("no_warning")
def test_an_entry_that_others_may_write_is_built_anew(folder: Path, mode: int) -> None:
    CubinCache(folder).get_or_build(KEY, lambda: (b"planted", {}))
    (folder / NAME).chmod(mode)
    assert CubinCache(folder).get_or_build(KEY, build)[::2] == (CUBIN, False)
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600
    assert CubinCache(folder).get_or_build(KEY, never).from_disk


@pytest.mark.usefixtures("one_warning")
def test_an_entry_of_another_user_is_neither_read_nor_touched(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                              environment: Set) -> None:
    CubinCache(folder).get_or_build(KEY, lambda: (b"planted", {}))
    planted = (folder / NAME).read_bytes()
    folder.chmod(0o1777)
    another_user(monkeypatch)
    works_in_memory(folder)
    environment(GEMMKIT_CACHE_MAX_MB="0.001")
    assert (folder / NAME).read_bytes() == planted


@pytest.mark.usefixtures("no_warning")
def test_a_folder_for_all_with_the_sticky_bit_is_used(folder: Path) -> None:
    folder.chmod(0o1777)
    CubinCache(folder).get_or_build(KEY, build)
    assert CubinCache(folder).get_or_build(KEY, never).from_disk


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.usefixtures("one_warning")
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CubinCache(folder).get_or_build(KEY, lambda: (b"planted", {}))
    folder.chmod(mode)
    works_in_memory(folder)


@pytest.mark.usefixtures("one_warning")
def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CubinCache(folder).get_or_build(KEY, lambda: (b"planted", {}))
    before = (folder / NAME).read_bytes()
    another_user(monkeypatch)
    works_in_memory(folder)
    assert [p.name for p in folder.iterdir()] == [NAME] and (folder / NAME).read_bytes() == before


@pytest.mark.usefixtures("no_warning")
def test_a_folder_that_root_keeps_for_all_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CubinCache(folder).get_or_build(KEY, build)
    folder.chmod(0o755)
    another_user(monkeypatch, root=os.getuid())
    assert CubinCache(folder).get_or_build(KEY, never).from_disk


# -- something else in the way ----------------------------------------------------------------------------------------

@pytest.mark.timeout(30)
@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "dangling link"])
def test_something_else_by_an_entrys_name_stays_and_the_kernel_is_kept_in_memory(folder: Path, tmp_path: Path, kind: str) -> None:
    at, target = folder / NAME, tmp_path / "elsewhere"
    if kind == "fifo":
        os.mkfifo(at)
    elif kind == "folder":
        at.mkdir()
    else:
        if kind == "link":
            CubinCache(tmp_path / "other").get_or_build(KEY, lambda: (b"planted", {}))
            target = tmp_path / "other" / NAME
        at.symlink_to(target)
    before = os.lstat(at).st_mode, os.lstat(at).st_ino
    works_in_memory(folder)
    assert (os.lstat(at).st_mode, os.lstat(at).st_ino) == before
    assert target.exists() == (kind == "link")


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("kind", ["fifo", "file", "below a file", "dangling link"])
def test_something_else_by_the_folders_name(tmp_path: Path, kind: str) -> None:
    at = tmp_path / "cache"
    if kind == "fifo":
        os.mkfifo(at)
    elif kind == "dangling link":
        at.symlink_to(tmp_path / "nowhere")
    else:
        at.write_text("in the way")
    works_in_memory(at / "below" if kind == "below a file" else at)


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_something_else_by_a_locks_name_is_no_lock(folder: Path, tmp_path: Path, kind: str) -> None:
    at = folder / NAME.replace(".kernel", ".gemmkit-lock")
    {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda at: at.symlink_to(tmp_path / "made")}[kind](at)
    assert CubinCache(folder).get_or_build(KEY, build)[::2] == (CUBIN, False)
    assert CubinCache(folder).get_or_build(KEY, never).from_disk
    assert os.path.lexists(at) and not (tmp_path / "made").exists()


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"format": 1, "meta": ' + b'{"a":' * 200_000])
def test_json_too_deep_to_read(folder: Path, text: bytes) -> None:
    (folder / NAME).write_bytes(text + b"\n" + CUBIN)
    (folder / NAME).chmod(0o600)
    works_in_memory(folder)


def test_a_meta_too_deep_to_write_is_an_error(folder: Path) -> None:
    deep: Any = 0
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(TypeError, match="JSON values only"):
        CubinCache(folder).get_or_build(KEY, lambda: (CUBIN, {"deep": deep}))
    while deep:                                                       # taken apart by hand: its destructor recurses
        (deep,) = deep


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("failing", ["mkstemp", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_disk_that_takes_nothing(folder: Path, replaced: Seeded, failing: str, error: OSError) -> None:
    def fail(*_: Any) -> Any:
        raise error

    replaced(cache_folder.tempfile if failing == "mkstemp" else cache_folder.os, failing, fail)
    works_in_memory(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("settings", [{}, {"GEMMKIT_CACHE_DIR": "~/kernels"}])
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, replaced: Seeded, settings: dict[str, str]) -> None:
    """HOME is unset, and the system knows no such user: a container's."""
    def unknown(*_: Any) -> Any:
        raise KeyError("getpwuid(): uid not found")

    import pwd

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    replaced(pwd, "getpwuid", unknown)
    works_in_memory(None)


# -- processes that want one kernel -------------------------------------------------------------------------------------

def ask(folder: str, log: str, start: Any, fails: bool) -> None:
    """One process of many that want a kernel now; each build is noted."""
    def slow() -> tuple[bytes, dict[str, Any]]:
        with open(log, "a") as stream:
            stream.write("built\n")
        time.sleep(0.3)
        if fails and len(Path(log).read_text().split()) == 1:
            raise ValueError("the first of them fails")
        return CUBIN, {}

    start.wait(60)
    made = CubinCache(folder)
    try:
        assert made.get_or_build(KEY, slow).cubin == CUBIN
    except ValueError:
        assert fails
    with open(log + ".done", "a") as stream:
        stream.write("done\n")


@pytest.mark.parametrize(("fails", "builds"), [(False, 1), (True, 2)])
def test_sixteen_processes_that_want_one_kernel_build_it_once(folder: Path, tmp_path: Path, fails: bool, builds: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([cache.__name__, __name__])
    start, log = context.Barrier(16), tmp_path / "log"
    processes = [context.Process(target=ask, args=(str(folder), str(log), start, fails)) for _ in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 16
    assert len(Path(f"{log}.done").read_text().split()) == 16
    assert len(log.read_text().split()) == builds
    assert [p.name for p in folder.iterdir()] == [NAME]                # no lock is left


def test_the_lock_of_a_process_that_died_holds_up_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "_PATIENCE_S", 3600.0)             # who waited would not come to an end
    lock = folder / NAME.replace(".kernel", ".gemmkit-lock")
    holder = subprocess.Popen([sys.executable, "-c", "import fcntl, sys, time; f = open(sys.argv[1], 'w'); "
                               "fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(3600)", str(lock)],
                              stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    holder.kill()
    holder.communicate()
    CubinCache(folder).get_or_build(KEY, build)
    assert [p.name for p in folder.iterdir()] == [NAME]


@pytest.mark.usefixtures("no_warning")
def test_a_lock_that_is_never_let_go_is_waited_for_so_long_and_no_longer(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                                         replaced: Seeded) -> None:
    tries: list[int] = []
    digest = NAME.removesuffix(".kernel")
    with cache_folder.Folder(folder, 2**20).lock(digest):
        monkeypatch.setattr(cache_folder, "_PATIENCE_S", 0.2)
        replaced(cache_folder, "_try_lock", tries.append)
        CubinCache(folder).get_or_build(KEY, build)
        assert len(tries) > 1
    assert CubinCache(folder).get_or_build(KEY, never).from_disk


@pytest.mark.usefixtures("no_warning")
def test_a_file_system_without_locks(folder: Path, replaced: Seeded) -> None:
    def unsupported(*_: Any) -> Any:
        raise OSError(38, "Function not implemented")

    replaced(cache_folder.fcntl, "flock", unsupported)
    CubinCache(folder).get_or_build(KEY, build)
    assert CubinCache(folder).get_or_build(KEY, never).from_disk
