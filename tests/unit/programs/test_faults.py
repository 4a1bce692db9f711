"""Drawn programs, mappings and sizes in the emulator; and what it finds when a line of synchronisation is not there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import UninitialisedRead
from gemmkit.runtime.device import H100, assumed
from tests.support import program_faults
from tests.support import programs as listing

F16, F32 = np.float16, np.float32
COUNTS = {"dual": 20, "clusters": 28, "columns": 28, "loops": 37, "attention": 76, "attention in turns": 51, "MLP": 31,    # one-line faults in each text
          "multistage GEMM": 13, "multistage loops": 26, "multistage attention": 25, "multistage MLP": 22}
ONE, TWO = (dataclasses.replace(H100, sm_count=count) for count in (1, 2))     # blocks go on from tile to tile


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
    text = program_faults.planned("multistage GEMM").text
    begins = next(line for line in text.splitlines() if line.strip().startswith("acc = "))
    edited = text.replace(begins, begins.replace("acc =", "other ="), 1)
    program, arrays, _, _ = program_faults.TEXTS["multistage GEMM"]
    with pytest.raises(UninitialisedRead, match="read before anything has set it: .*'acc'") as caught, gk.emulate():
        program_faults.planned("multistage GEMM", edited).run(program.bound(tuple(arrays), {}))
    line = caught.value.kernel_line
    assert line is not None and "acc" in edited.splitlines()[line.number - 1] and caught.value.thread is not None


# -- faults ---------------------------------------------------------------------------------------------------------------

FAULTS = [(name, n) for name in program_faults.TEXTS for n in range(COUNTS[name])]


def faults_of(name: str) -> list[program_faults.Fault]:
    return list(program_faults.faults(program_faults.planned(name).text))


def test_texts_have_all_kinds_of_faults() -> None:
    """And what is said to be harmless is in them."""
    known = {name: faults_of(name) for name in program_faults.TEXTS}
    assert {name: len(found) for name, found in known.items()} == COUNTS
    assert {fault.kind for found in known.values() for fault in found} == {
        "dropped", "not added", "one group less", "not advanced", "too early", "one arrival less", "one arrival more", "reaches no peer",
        "for itself", "one copy less", "no barrier", "the barrier alone", "the stage that is read"}
    for name, kind, said, nth in program_faults.HARMLESS:
        assert any((fault.kind, fault.said, fault.nth) == (kind, said, nth) for fault in known[name])


@pytest.mark.sample(30)
@pytest.mark.parametrize("name, n", FAULTS)
def test_a_fault_is_found(name: str, n: int) -> None:
    """All of those that would do harm (`python -m tests.support.program_faults` reports them)."""
    fault = faults_of(name)[n]
    assert program_faults.is_found(name, fault) == (fault.harmless(name) is None)
