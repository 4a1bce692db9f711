"""Drawn programs, mappings and sizes in the emulator; and what it finds when a line of synchronisation is not there."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.runtime.device import H100, assumed
from tests.support import programs as listing

F16, F32 = np.float16, np.float32
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


# -- faults ---------------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
A, B, C = (RNG.standard_normal(shape).astype(F16) / 4 for shape in ((100, 264), (264, 72), (264, 72)))
MAPPING = gk.Mapping({"n": 64}, stages=2)
SYNCHRONISES = re.compile(r"\.(?:acquire|wait|release|expect|initialise)\(|wgmma_wait\(|wgmma_commit\(")


def dual_text() -> str:
    return listing.dual.plan(A, B, C, np.empty((100, 72), F16), gate=listing.silu_times, mapping=MAPPING).text


LINES = [n for n, line in enumerate(dual_text().splitlines()) if SYNCHRONISES.search(line)]




def test_a_text_has_all_kinds_of_synchronisation() -> None:
    text = dual_text().splitlines()
    kinds = [found[0] for n in LINES if (found := SYNCHRONISES.search(text[n]))]
    assert sorted(set(kinds)) == [".acquire(", ".expect(", ".initialise(", ".release(", ".wait(", "wgmma_commit(",
                                   "wgmma_wait("]
    assert len(LINES) == 11


@pytest.mark.sample(5)
@pytest.mark.parametrize("line", LINES)
def test_a_text_without_a_line_is_found_out(line: int) -> None:
    text = dual_text().splitlines()
    indent = re.match(r" *", text[line])
    assert indent is not None
    text[line] = indent[0] + "pass"
    out = np.full((100, 72), np.nan, F16)
    with assumed(ONE):
        plan = listing.dual.plan(A, B, C, out, gate=listing.silu_times, mapping=MAPPING, text="\n".join(text) + "\n")
    exact = listing.dual.reference(A, B, C, out, gate=listing.silu_times)
    try:
        with gk.emulate(seed=1):
            plan.run(dict(a=A, b=B, c=C, d=out))
    except EmulatorError:
        return
    assert not np.abs(out - exact).max() <= 2e-3 * np.abs(exact).max()
