"""The verifier finds what is wrong with a plan, and what is wrong with a pass (tests/verifier, tests/mutation/passes.py)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.programs import plan as plans
from tests.mutation import derived
from tests.support import chains
from tests.support import programs as listing
from tests.verifier import Unsound, facts, verify

PARTS = 8
#: What a text's functions of elements compute is the emulator's to say.
OF_ELEMENTS = ("return s if column_at(i) < room else -math.inf", "return s if front <= column_at(i) and column_at(i) < room else -math.inf")


@pytest.mark.sample(10)
@pytest.mark.parametrize("name, part", [(name, part) for name in derived.TEXTS for part in range(PARTS)])
def test_faults_in_texts_are_found_without_the_emulator(name: str, part: int) -> None:
    """All that the emulator finds, but for what elements are made of."""
    for fault in list(derived.faults(derived.planned(name).text))[part::PARTS]:
        if fault.harmless(name) is None and fault.said not in OF_ELEMENTS:
            with pytest.raises((Unsound, ZeroDivisionError, KeyError)):
                verify(derived.planned(name, fault.text))


@pytest.mark.parametrize("name", derived.TEXTS)
def test_texts_without_a_fault_are_sound(name: str) -> None:
    verify(derived.planned(name))


@pytest.mark.parametrize("name, old, new, said", [
    ("GEMM", "offset=8192, stage_bytes=16384", "offset=4096, stage_bytes=16384", "overlap"),
    ("GEMM", "o_offset=49152", "o_offset=48128", "overlap"),
    ("GEMM", "o_offset=49152", "o_offset=49160", "no multiple of 1024"),
    ("GEMM", "SHARED_BYTES = 57392", "SHARED_BYTES = 57384", "lies from"),
    ("GEMM", "b_tile = StagedTile('float16', lines=64, columns=64", "b_tile = StagedTile('float16', lines=128, columns=64", "overlap"),
    ("GEMM", "def kernel(sizes, map_a, map_b, d)", "def kernel(sizes, map_b, map_a, d)", "the kernel takes"),
    ("GEMM", "a_tile.load(map_a, (k, m)", "a_tile.load(map_b, (k, m)", "loaded by maps"),
    ("GEMM", "a_tile.load(map_a, (k, m)", "a_tile.load(map_a, (m, k)", "takes"),
    ("GEMM", "empty_arrivals=1", "empty_arrivals=2", "waits for 2 readers"),
    ("GEMM", "ring.expect(slot, 16384)", "ring.expect(slot, 16368)", "expects 16368 bytes"),
    ("GEMM", "        acc = a_by_b.begin(0.0)\n", "", "acc is used before it is defined"),
    ("columns", "apply(element_of_d, acc, of_a, of_b", "apply(element_of_d, acc, of_b, of_a", "is given of_b"),
    ("columns", "        left = rows_of_a.whole(left)\n", "", "have not met"),
    ("MLP", "ring_x.release(at_x.stage)", "ring_w.release(at_x.stage)", "released"),
])
def test_what_is_said(name: str, old: str, new: str, said: str) -> None:
    text = derived.planned(name).text
    assert old in text
    with pytest.raises(Unsound, match=said):
        verify(derived.planned(name, text.replace(old, new, 1)))


@pytest.mark.parametrize("name", ["attention", "attention in turns", "attention of 192", "MLP"])
@pytest.mark.parametrize("how", ["dropped", "twice", "swapped"])
def test_events_out_of_order_are_found(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event of a schedule in turn: left out, made twice, or in the place of the next one; but for events that do not depend on
    each other."""
    made: Any = derived.planned(name).resizing
    made = made.made
    sound, missed = plans.ordered_chain(made.chain, made.places, made.choice), list[str]()
    for part in ("before", "round", "after", "join"):
        for n, event in enumerate(getattr(sound, part)):
            order, events = copy.copy(sound), list(getattr(sound, part))
            events[n:n + 1] = [] if how == "dropped" else [event, event] if how == "twice" else []
            if how == "swapped":
                events.insert(n + 1, event)
            setattr(order, part, events)
            monkeypatch.setattr(plans, "ordered_chain", lambda *_, order=order: order)
            try:
                facts.check_order(derived.planned(name))
            except Unsound:
                continue
            missed.append(f"{part} {n} {type(event).__name__} before {[type(x).__name__ for x in getattr(sound, part)[n + 1:n + 2]]}")
    apart = {"Full", "Compute", "Turn", "Pass", "ChainRelease", "ChainStart", "ChainWait"} if how == "swapped" else {"Full"} if how == "twice" else set()
    assert all(x.split()[2] in apart for x in missed), missed


def test_arrays_of_the_streams_memory_that_overlap_are_found() -> None:
    program, arrays, mapping, more = chains.drawn_shares(0)
    plan = program.plan(*arrays, mapping=mapping, **more)
    assert plan.merge is not None
    verify(plan)
    name = plan.spare[1]
    moved = plan.infos[name]._replace(pointer=plan.infos[plan.spare[0]].pointer + 16)
    with pytest.raises(Unsound, match="overlap"):
        facts.check_spare(replace(plan, infos={**plan.infos, name: moved}))


# -- packed rows ----------------------------------------------------------------------------------------------------------


@gk.program
def of_one_array(x: Any, offsets: Any, o: Any) -> None:
    """Rows and rounds along the same pieces."""
    pieces = gp.packed(x.rows, offsets)
    for i, m in gp.parallel(pieces.count, pieces.rows):
        out = gp.zeros(m, x.columns)
        for n in gp.sequential(pieces[i]):
            out += (x[m] @ x[n].T).astype(x.dtype) @ x[n]
        o[m] = out


@gk.program
def of_some_keys(x: Any, offsets: Any, k: Any, lengths: Any, o: Any) -> None:
    """Packed rows, whose rounds go along the first keys of each piece's own."""
    pieces = gp.packed(x.rows, offsets)
    for i, m in gp.parallel(pieces.count, pieces.rows):
        out = gp.zeros(m, x.columns)
        for n in gp.sequential(k.rows, stop=lengths[i]):
            out += (x[m] @ k[i, n].T).astype(x.dtype) @ k[i, n]
        o[m] = out


@pytest.mark.parametrize("kernel", ["", "multistage"])
def test_pieces_of_rows_alone_and_of_both_are_sound(kernel: str) -> None:
    x, k, offsets, lengths = np.zeros((100, 64), np.float16), np.zeros((3, 90, 64), np.float16), np.array([0, 10, 20, 100]), np.array([9, 0, 90])
    for program, given in ((of_one_array, (x, offsets, x.copy())), (of_some_keys, (x, offsets, k, lengths, x.copy()))):
        plan = program.plan(*given, mapping=gk.Mapping({"n": 32}, warpgroups=1, kernel=kernel))
        verify(plan)
        text = plan.text.replace("m_origin + m", "m", 1)
        assert text != plan.text
        with pytest.raises(Unsound):
            verify(program.plan(*given, mapping=plan.mapping, text=text))


def test_a_plan_without_rows_that_is_split_is_sound() -> None:
    q, k = np.zeros((1, 0, 64), np.float16), np.zeros((1, 200, 64), np.float16)
    verify(listing.attention.plan(q, k, k, q.copy(), 0.125, mapping=gk.Mapping({"n": 64}, splits=3)))
