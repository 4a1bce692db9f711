from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path

import pytest

from gemmkit.runtime import cache as module
from gemmkit.runtime.cache import CubinCache, default_cache, default_folder

KEY = "kernel singlestage, sm_90a"
CUBIN = bytes(range(256)) * 40
META = {"registers": 168, "name": "gemm", "tiles": [128, 128, 32]}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("GEMMKIT_CACHE", "GEMMKIT_CACHE_DIR", "GEMMKIT_CACHE_MAX_MB"):
        monkeypatch.delenv(name, raising=False)


def build():
    return CUBIN, META


def never():
    raise AssertionError("built, though it was kept")


def only_file(folder) -> Path:
    (file,) = Path(folder).iterdir()
    return file


def test_built_once_then_from_memory_then_from_disk(tmp_path):
    first = CubinCache(tmp_path)
    assert first.get_or_build(KEY, build) == (CUBIN, META, False)
    assert first.get_or_build(KEY, never) == (CUBIN, META, False)
    second = CubinCache(tmp_path)
    assert second.get_or_build(KEY, never) == (CUBIN, META, True)
    assert second.get_or_build(KEY, never) == (CUBIN, META, False)  # from memory: nothing was read
    assert vars(first.stats) == {"builds": 1, "disk_hits": 0, "memory_hits": 1, "damaged": 0}
    assert vars(second.stats) == {"builds": 0, "disk_hits": 1, "memory_hits": 1, "damaged": 0}


def test_keys_do_not_mix(tmp_path):
    cache = CubinCache(tmp_path)
    cache.get_or_build("one", lambda: (b"1", {}))
    assert cache.get_or_build("two", lambda: (b"2", {})).cubin == b"2"
    assert CubinCache(tmp_path).get_or_build("one", never).cubin == b"1"


def test_one_file_an_entry_named_by_the_key_and_no_pickle(tmp_path):
    CubinCache(tmp_path).get_or_build(KEY, build)
    file = only_file(tmp_path)
    assert file.stem == hashlib.sha256(KEY.encode()).hexdigest()
    head, _, cubin = file.read_bytes().partition(b"\n")
    assert cubin == CUBIN
    assert json.loads(head)["key"] == KEY
    assert json.loads(head)["meta"] == META


def test_meta_is_the_same_in_the_process_that_built_and_in_a_later_one(tmp_path):
    here = CubinCache(tmp_path).get_or_build(KEY, lambda: (CUBIN, {"block": (128, 1)}))
    later = CubinCache(tmp_path).get_or_build(KEY, never)
    assert here.meta == later.meta == {"block": [128, 1]}


def damage_nothing_left(content):
    return b""


def damage_truncated_head(content):
    return content[:20]


def damage_truncated_cubin(content):
    return content[:-1]


def damage_longer(content):
    return content + b"\0"


def damage_flipped_bit_in_cubin(content):
    return content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]


def damage_other_meta(content):
    return content.replace(b'"registers": 168', b'"registers": 169', 1)


def damage_other_key(content):
    return content.replace(b"sm_90a", b"sm_80a", 1)


def damage_other_format(content):
    return content.replace(b'"format": 1', b'"format": 9', 1)


def damage_not_json(content):
    return b"\xff\xfe" + content


def damage_json_of_another_shape(content):
    return b"[1, 2]\n" + content


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_anew_and_overwritten(tmp_path, damage):
    CubinCache(tmp_path).get_or_build(KEY, build)
    file = only_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = CubinCache(tmp_path)
        assert cache.get_or_build(KEY, build) == (CUBIN, META, False)
    assert (cache.stats.damaged, cache.stats.builds, cache.stats.disk_hits) == (1, 1, 0)
    assert file.read_bytes() == whole
    assert CubinCache(tmp_path).get_or_build(KEY, never).from_disk


def test_threads_that_ask_for_one_key_build_once(tmp_path):
    cache, builds, entries = CubinCache(tmp_path), [], []
    start = threading.Barrier(12)

    def slow():
        builds.append(1)
        time.sleep(0.2)
        return CUBIN, META

    def ask():
        start.wait()
        entries.append(cache.get_or_build(KEY, slow))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert entries == [(CUBIN, META, False)] * 12
    assert (cache.stats.builds, cache.stats.memory_hits) == (1, 11)


def test_threads_build_different_keys_at_the_same_time(tmp_path):
    cache, both = CubinCache(tmp_path), threading.Barrier(2, timeout=30)

    def meet():
        both.wait()  # passes only while the other build is under way too
        return CUBIN, {}

    threads = [threading.Thread(target=cache.get_or_build, args=(key, meet)) for key in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.stats.builds == 2
    assert cache.info().entries == 2


class Watched(threading.Event):
    """What the threads that want the one build under way wait for, and how many do."""

    def __init__(self, cache):
        super().__init__()
        self.waiting = threading.Semaphore(0)
        (flight,) = cache._flights.values()
        flight.done = self

    def wait(self, timeout=None):
        self.waiting.release()
        return super().wait(timeout)

    def has(self, count):
        for _ in range(count):
            self.waiting.acquire()


def test_a_failed_build_reaches_every_waiter_and_is_tried_again(tmp_path):
    cache, errors, building = CubinCache(tmp_path), [], threading.Event()

    def fail():
        watched = Watched(cache)
        building.set()
        watched.has(4)
        raise ValueError("no such instruction")

    def ask():
        try:
            cache.get_or_build(KEY, fail)
        except ValueError as error:
            errors.append(str(error))

    first = threading.Thread(target=ask)
    first.start()
    building.wait()
    waiters = [threading.Thread(target=ask) for _ in range(4)]
    for thread in waiters:
        thread.start()
    for thread in (first, *waiters):
        thread.join()
    assert errors == ["no such instruction"] * 5
    assert cache.stats.builds == 1
    assert cache.info().entries == 0
    assert cache.get_or_build(KEY, build).cubin == CUBIN


def test_an_interrupted_build_is_taken_over_by_a_waiter(tmp_path):
    cache, building, outcome = CubinCache(tmp_path), threading.Event(), []

    def interrupted():
        watched = Watched(cache)
        building.set()
        watched.has(1)
        raise KeyboardInterrupt

    def first():
        with pytest.raises(KeyboardInterrupt):
            cache.get_or_build(KEY, interrupted)

    threads = [
        threading.Thread(target=first),
        threading.Thread(target=lambda: outcome.append(cache.get_or_build(KEY, build).cubin)),
    ]
    threads[0].start()
    building.wait()
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert outcome == [CUBIN]


def test_a_build_that_asks_for_its_own_key_is_an_error_not_a_deadlock(tmp_path):
    cache = CubinCache(tmp_path)
    with pytest.raises(RuntimeError, match="asked for its own key"):
        cache.get_or_build(KEY, lambda: cache.get_or_build(KEY, build)[:2])


def hammer(folder: str, deletes: bool, start, results) -> None:
    """One process of the race: every entry it gets must be whole, whoever writes it."""
    start.wait()
    bad = damaged = 0
    for _ in range(30):
        cache = CubinCache(folder)
        for i in range(4):
            content = bytes([i]) * 100_000
            entry = cache.get_or_build(f"key {i}", lambda content=content: (content, {"i": content[0]}))
            bad += entry.cubin != content or entry.meta != {"i": i}
        damaged += cache.stats.damaged
        if deletes:
            cache.clear()
    results.put((bad, damaged))


def test_processes_that_write_and_delete_at_once_never_read_a_torn_entry(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module.__name__, __name__])
    start, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=hammer, args=(str(tmp_path), i % 2 == 0, start, results)) for i in range(4)
    ]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert outcomes == [(0, 0)] * 4
    assert [file.suffix for file in tmp_path.iterdir() if file.suffix != ".kernel"] == []


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = CubinCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="GEMMKIT_CACHE_DIR") as caught:
        assert cache.get_or_build(KEY, build).cubin == CUBIN
        assert cache.get_or_build("other", build).cubin == CUBIN
        assert cache.get_or_build(KEY, never).cubin == CUBIN
    assert len(caught) == 1
    assert cache.info()[1:] == (0, 0)
    cache.clear()


def test_a_failed_write_leaves_no_temporary_file(tmp_path, replaced):
    def full(*_):
        raise OSError(28, "No space left on device")

    replaced(module.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        CubinCache(tmp_path).get_or_build(KEY, build)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_the_disk_can_be_switched_off(tmp_path, environment, value):
    environment(GEMMKIT_CACHE=value)
    cache = CubinCache(tmp_path)
    cache.get_or_build(KEY, build)
    assert cache.get_or_build(KEY, never).cubin == CUBIN
    assert cache.folder is None
    assert cache.info() == (None, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_follows_the_environment(tmp_path, replaced, environment):
    environment(XDG_CACHE_HOME=tmp_path / "xdg")
    replaced(module.sys, "platform", "linux")
    assert default_folder() == tmp_path / "xdg" / "gemmkit"
    environment(GEMMKIT_CACHE_DIR=tmp_path / "mine")
    assert default_folder() == tmp_path / "mine"
    assert CubinCache().folder == tmp_path / "mine"
    assert CubinCache(tmp_path).folder == tmp_path


def test_one_default_cache_a_process(tmp_path, environment):
    environment(GEMMKIT_CACHE_DIR=tmp_path)
    default_cache.cache_clear()
    assert default_cache() is default_cache()
    assert default_cache().folder == tmp_path
    default_cache.cache_clear()


def test_info_and_clear(tmp_path):
    cache = CubinCache(tmp_path)
    assert cache.info() == (tmp_path, 0, 0)
    for key in ("one", "two"):
        cache.get_or_build(key, build)
    (tmp_path / "notes.txt").write_text("not ours")
    info = cache.info()
    assert info.entries == 2
    assert info.bytes == sum(file.stat().st_size for file in tmp_path.glob("*.kernel"))
    cache.clear()
    assert cache.info() == (tmp_path, 0, 0)
    assert only_file(tmp_path).name == "notes.txt"
    cache.get_or_build("one", build)
    assert cache.stats.builds == 3


def test_the_entries_used_longest_ago_go_first(tmp_path, environment):
    environment(GEMMKIT_CACHE_MAX_MB="0.033")  # three entries of 10 KiB, not four
    writer = CubinCache(tmp_path)
    for age, key in ((300, "a"), (200, "b"), (100, "c")):
        writer.get_or_build(key, build)
        file = tmp_path / (hashlib.sha256(key.encode()).hexdigest() + ".kernel")
        os.utime(file, (time.time() - age,) * 2)
    CubinCache(tmp_path).get_or_build("a", never)  # used again: now the newest
    CubinCache(tmp_path).get_or_build("d", build)
    reader = CubinCache(tmp_path)
    for key in ("a", "c", "d"):
        assert reader.get_or_build(key, never).from_disk
    assert reader.get_or_build("b", build).from_disk is False


def test_an_entry_larger_than_the_limit_is_kept_alone(tmp_path, environment):
    environment(GEMMKIT_CACHE_MAX_MB="0.001")
    for key in ("one", "two"):
        CubinCache(tmp_path).get_or_build(key, build)
    assert CubinCache(tmp_path).info().entries == 1
    assert CubinCache(tmp_path).get_or_build("two", never).from_disk


@pytest.mark.parametrize("value", ["0", "-1", "many", "nan", "inf"])
def test_a_limit_that_is_no_size_is_an_error(environment, value):
    environment(GEMMKIT_CACHE_MAX_MB=value)
    with pytest.raises(ValueError, match=f"GEMMKIT_CACHE_MAX_MB='{value}'"):
        CubinCache()


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (("text", {}), r"\(bytes, dict\), got \(str, dict\)"),
        ((b"", None), r"\(bytes, dict\), got \(bytes, NoneType\)"),
        ((b"", {"x": object()}), "JSON values only"),
    ],
)
def test_what_build_returns_is_checked(tmp_path, outcome, message):
    cache = CubinCache(tmp_path)
    with pytest.raises(TypeError, match=message):
        cache.get_or_build(KEY, lambda: outcome)
    assert cache.info().entries == 0
