"""Drawn programs, mappings and sizes in the emulator; and what it finds when a line of synchronisation is not there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import ProtocolError, RaceError, UninitialisedRead
from gemmkit.runtime.device import H100, assumed
from tests.mutation import derived
from tests.programs.test_pieces import products
from tests.support import programs as listing

F16, F32 = np.float16, np.float32
ONE, TWO = (dataclasses.replace(H100, sm_count=count) for count in (1, 2))     # blocks go on from tile to tile


@pytest.mark.kin(1)
@pytest.mark.sample(30)
@pytest.mark.parametrize("seed", range(60))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = listing.drawn_case(seed)
    try:
        with assumed(TWO if seed % 2 else ONE):
            plan = program.plan(*arrays, mapping=mapping, **more)
    except gk.ConfigError as error:                    # stages of two loops, or of wide blocks, may be too much
        assert "bytes of shared memory" in str(error)
        return
    wanted = program.reference(*arrays, **more)
    arguments = program.bound(tuple(arrays), more)
    with gk.emulate(seed=seed):
        plan.run(arguments)
    results = [arguments[name] for name in arguments if name in plan.printed.outs]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert np.abs(got - exact).max() <= (2e-3 if got.dtype == F16 else 1e-4) * max(1.0, np.abs(exact).max())


def test_a_value_that_is_not_there() -> None:
    """A cell that does not begin: the line of the text that reads it, and who does."""
    text = derived.planned("multistage GEMM").text
    begins = next(line for line in text.splitlines() if line.strip().startswith("acc = "))
    edited = text.replace(begins, begins.replace("acc =", "other ="), 1)
    program, (arrays, *_), *_ = derived.TEXTS["multistage GEMM"]
    with pytest.raises(UninitialisedRead, match="read before anything has set it: .*'acc'") as caught, gk.emulate():
        derived.planned("multistage GEMM", edited).run(program.bound(tuple(arrays), {}))
    line = caught.value.kernel_line
    assert line is not None and "acc" in edited.splitlines()[line.number - 1] and caught.value.thread is not None


# -- faults ---------------------------------------------------------------------------------------------------------------

KINDS = {"dropped", "not added", "one group less", "not advanced", "too early", "one arrival less", "one arrival more", "reaches no peer",
         "for itself", "one copy less", "no barrier", "the barrier alone", "the stage that is read", "another phase", "another stage",
         "<= in place of <", "< in place of <=", "> in place of >=", ">= in place of >", "a block more", "no origin", "another piece", "all rows",
         "the tile before", "too few tiles", "no start", "in front of the axis", "across pages", "one more in front"}
PARTS = 24                             # of a text's faults


@pytest.mark.kin(1)
def test_texts_have_all_kinds_of_faults() -> None:
    """And what is said to be harmless is in them; every run of a text is one of that text."""
    known = {name: list(derived.faults(derived.planned(name).text)) for name in derived.TEXTS}
    assert {fault.kind for found in known.values() for fault in found} == KINDS
    assert sum(map(len, known.values())) > 700
    for name, kind, said, nth in derived.HARMLESS:
        assert any((fault.kind, fault.said, fault.nth) == (kind, said, nth) for fault in known[name])
    for name, text in derived.TEXTS.items():
        assert len({derived.planned(name, run=run).text for run in range(len(text.runs))}) == 1


@pytest.mark.kin(1)
@pytest.mark.sample(45)
@pytest.mark.parametrize("name, part", [(name, part) for name in derived.TEXTS for part in range(PARTS)])
def test_faults_are_found(name: str, part: int) -> None:
    """All of those that would do harm (`python -m tests.mutation --derived` reports them)."""
    for fault in list(derived.faults(derived.planned(name).text))[part::PARTS]:
        assert derived.is_found(name, fault) == (fault.harmless(name) is None), fault[:4]


def test_the_next_tile_is_fetched_when_the_one_before_has_been_read() -> None:
    """With one round a tile no other ring holds the producer back: it would write over rows that a product reads."""
    text = derived.planned("attention").text
    (fault,) = (x for x in derived.faults(text) if (x.kind, x.said, x.nth) == ("dropped", "ring_q.acquire(at_q)", 1))
    program, runs, *_ = derived.TEXTS["attention"]
    with pytest.raises(RaceError, match="a write by TMA"), gk.emulate():
        derived.planned("attention", fault.text, run=2).run(program.bound(tuple(runs[2]), derived.SCALE))


def test_a_warpgroup_without_rows_keeps_step_with_its_warps() -> None:
    """It issues no wgmma that would hold its warps together. Without its barrier one may be a ring behind: an H200 hung."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(F16) for shape in ((40, 128), (2, 128, 64)))
    arrays = x, w, np.array([0, 20, 40], np.int32), np.full((40, 64), np.nan, F16)
    with assumed(ONE):
        text = products.plan(*arrays, mapping=gk.Mapping({"n": 64}, warpgroups=2, stages=2)).text
        (line,) = (line for line in text.splitlines() if line.strip() == "named_barrier(group + 1, 128)")
        plan = products.plan(*arrays, mapping=gk.Mapping({"n": 64}, warpgroups=2, stages=2), text=text.replace(line + "\n", ""))
    for seed in (None, 0, 1):
        with pytest.raises(ProtocolError, match=r"warp (8|9|10|11) may miss phase 0 of the mbarrier"), gk.emulate(seed=seed):
            plan.run(products.bound(arrays, {}))
