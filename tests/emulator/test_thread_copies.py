"""Copies that threads start: what an access before the wait, a forgotten group, a missing barrier or a stage still read comes to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors
from gemmkit.lang.aggregates import convert
from gemmkit.ptx.copy_async import commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.memory import load_shared, shared, store_shared
from gemmkit.ptx.registers import pinned, shared_place
from gemmkit.ptx.special import barrier, thread_index
from tests.support.harness import Out
from tests.support.launching import emulated

F32 = np.dtype("f4")
LANES, STAGES, TILES = 32, 3, 7
SOURCE = np.arange(TILES * LANES, dtype=F32).reshape(TILES, LANES)
SEEDS = [None, 0, 1, 2]
every_seed = pytest.mark.parametrize("seed", SEEDS)


def ring(source: Any, out: Any, pending: int, commits: bool, waits: bool, meets: bool, ahead: int) -> None:
    """Tile after tile goes through a ring of three stages: a thread copies an element and reads its neighbour's.

    Right with ``pending`` = 1 and ``ahead`` = 2; ``ahead`` = 3 writes the stage that is being read.
    """
    data, thread = shared(F32, 0), thread_index()
    for tile in range(ahead):
        copy_async(data, tile % STAGES * LANES + thread, 0, source, offset_of(source, (tile, thread)), 1, True)
        if commits:
            commit_copies()
    for tile in range(TILES):
        if waits:
            wait_copies(pending)
        if meets:
            barrier()
        if tile + ahead < TILES:
            copy_async(data, (tile + ahead) % STAGES * LANES + thread, 0, source, offset_of(source, (tile + ahead, thread)), 1, True)
        if commits or tile == 0:
            commit_copies()
        out[tile, thread] = load_shared(data, tile % STAGES * LANES + (thread + 1) % LANES, 0, 1)[0]


SOUND: dict[str, Any] = dict(pending=1, commits=True, waits=True, meets=True, ahead=2)


def go(seed: int | None = None, threads: int = LANES, **changes: Any) -> np.ndarray:
    (out,) = emulated(ring, SOURCE, Out((TILES, LANES), F32), *{**SOUND, **changes}.values(), threads=threads, shared=STAGES * LANES * 4, seed=seed)
    return out


@every_seed
def test_a_sound_ring(seed: int | None) -> None:
    assert np.array_equal(go(seed), np.roll(SOURCE, -1, 1))
    assert np.array_equal(go(seed, pending=0), np.roll(SOURCE, -1, 1))                      # waits for more than it has to


FAULTS = {
    "no wait": dict(waits=False), "a group too few": dict(pending=2), "no commit": dict(commits=False), "no barrier": dict(meets=False),
    "a stage still read": dict(ahead=3, pending=2),
}


@every_seed
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, seed: int | None) -> None:
    """In any order of threads: a read of what is on its way or not even started, or a race."""
    kinds = errors.ProtocolError, errors.RaceError, errors.UninitialisedRead
    with pytest.raises(kinds, match="its group must be awaited first|race in 4 bytes|of which nothing has written"):
        go(seed, **FAULTS[fault])


# -- what a copy is between its start and its wait --------------------------------------------------------------------------

def touched(source: Any, out: Any, how: int) -> None:
    """A thread touches where its own copy goes: 0 after the wait, 1 reads before it, 2 writes, 3 starts another copy to it."""
    data, thread = shared(F32, 0), thread_index()
    store_shared(data, thread, 0, (convert(F32, -1),))
    copy_async(data, thread, 0, source, offset_of(source, (0, thread)), 1, True)
    commit_copies()
    if how == 1:
        out[thread, 0] = load_shared(data, thread, 0, 1)[0]
    if how == 2:
        store_shared(data, thread, 0, (convert(F32, 5),))
    if how == 3:
        copy_async(data, thread, 0, source, offset_of(source, (1, thread)), 1, True)
        commit_copies()
    wait_copies(0)
    out[thread, 0] = load_shared(data, thread, 0, 1)[0]


def test_before_its_wait_a_copy_may_or_may_not_have_written() -> None:
    (out,) = emulated(touched, SOURCE, Out((LANES, 1), F32), 0, threads=LANES, shared=128)
    assert np.array_equal(out[:, 0], SOURCE[0])
    with pytest.raises(errors.ProtocolError, match="awaited first"):
        emulated(touched, SOURCE, Out((LANES, 1), F32), 1, threads=LANES, shared=128)


@pytest.mark.parametrize("how", [2, 3], ids=["stored", "copied again"])
def test_what_is_written_to_meanwhile(how: int) -> None:
    with pytest.raises(errors.EmulatorError):
        emulated(touched, SOURCE, Out((LANES, 1), F32), how, threads=LANES, shared=128)


def test_empty_groups_count() -> None:
    """The ring commits in every round, with or without copies, so that a wait means the same in each: sound to the last tile."""
    assert np.array_equal(go()[-1], np.roll(SOURCE[-1], -1))


# -- pinned pointers --------------------------------------------------------------------------------------------------------

def from_places(out: Any, pinned_at: int, base: int) -> None:
    data, thread = shared(F32, 0), thread_index()
    store_shared(data, thread, 0, (convert(F32, thread),))
    barrier()
    pointer = pinned(data, shared_place(F32, (thread + pinned_at) % LANES))
    out[thread, 0] = load_shared(pointer, (thread + base) % LANES, 0, 1)[0]


def test_a_pinned_pointer_has_one_base() -> None:
    """Compiled code does not look at the base of a load by it: one that differs is an error here, and would be silent there."""
    (out,) = emulated(from_places, Out((LANES, 1), F32), 3, 3, threads=LANES, shared=256)
    assert np.array_equal(out[:, 0], (np.arange(LANES) + 3) % LANES)
    with pytest.raises(ValueError, match="pinned to byte .* place_a or place_b is not where its load_a or load_b begins"):
        emulated(from_places, Out((LANES, 1), F32), 3, 4, threads=LANES, shared=256)
