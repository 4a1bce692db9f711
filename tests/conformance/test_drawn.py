"""Drawn cases: layouts x transforms x operators x epilogues x shapes x legal mappings, against NumPy in float64.

The seed is GEMMKIT_SEED; without it, one that is the same in every run of a sample (`make test`), and a new one in every run
of all tests. It is printed with the number of cases at the end of a run, and a failure prints the case as code to paste. With
GEMMKIT_SHRINK=1 hypothesis looks for a smaller case (on a GPU each trial compiles).
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import gemmkit as gk
from gemmkit.kernels.spec import FAMILIES as KERNELS
from gemmkit.runtime.compile import assemble, to_ptx
from gemmkit.runtime.device import H100
from tests.support.drawn import Case, Family, Place, Problem, config_of, run
from tests.support.drawn_reference import Bounded, assert_within
from tests.support.drawn_strategies import Reach, families, problems, refused
from tests.support.machines import MACHINES, on_machines
from tests.support.patches import Seeded

SEED = int(os.environ.get("GEMMKIT_SEED", "0"))                        # conftest.py has set it
GPU_SHARDS, GPU_FAMILIES, GPU_PROBLEMS = 60, 4, 10                     # 2,400 cases
SHARDS, FAMILIES, PROBLEMS = 12, 3, 2                                   # in the emulator
PHASES = [Phase.generate, *([Phase.shrink] if os.environ.get("GEMMKIT_SHRINK") else [])]


def drawn(reach: Reach, count: int, key: str, kernel: str, act: Any) -> None:
    """``act(family, problems)`` for a family with so many problems. Hypothesis varies what it has drawn: every family is a search
    of its own, so that none is like another."""
    @seeded(zlib.crc32(f"{SEED} {key}".encode()))
    @settings(max_examples=1, database=None, derandomize=False, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def search(data: Any) -> None:
        family = data.draw(families(reach, kernel))
        act(family, [data.draw(problems(family, reach, n, n == count - 1)) for n in range(count)])

    search()


def check(machine: Any, reach: Reach, key: str, count: tuple[int, int], kernel: str, record: Any) -> None:
    """Families with problems, as many as ``count`` says: all of them, or it fails."""
    before, done = refused.total(), set()

    def act(family: Family, given: list[Problem]) -> None:
        conf = None if family.call == "dispatch" else config_of(family)
        for problem in given:
            try:
                run(machine, family, problem, conf)
            except AssertionError as error:
                raise AssertionError(f"{error}\n(drawn with GEMMKIT_SEED={SEED})") from error
            done.add((family, problem))

    try:
        with threadpool_limits(1):                                     # NumPy's references: a worker has one core
            for n in range(count[0]):
                drawn(reach, count[1], f"{machine} {key} {n}", kernel, act)
    finally:
        record("drawn", f"{machine}:{len({family for family, _ in done})}:{len(done)}:{refused.total() - before}")
    assert len(done) == count[0] * count[1], f"{len(done)} different cases were computed, not {count[0]} x {count[1]}"


@pytest.mark.sample(10)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_drawn_cases(shard: int, record_property: Any) -> None:
    kernel = ("singlestage", "multistage", "warp_specialised")[shard % 3]
    check(MACHINES["emulator"], Reach(True), str(shard), (FAMILIES, PROBLEMS), kernel, record_property)


@pytest.mark.gpu
@pytest.mark.sample(30)
@pytest.mark.parametrize("shard", range(GPU_SHARDS))
def test_drawn_cases_on_the_gpu(shard: int, record_property: Any) -> None:
    check(MACHINES["gpu"], Reach(False), str(shard), (GPU_FAMILIES, GPU_PROBLEMS), "", record_property)


@pytest.mark.thorough
@pytest.mark.sample(6)
@pytest.mark.compile
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", range(2))
def test_a_drawn_family_compiles(kernel: str, number: int) -> None:
    """Of large tiles, as on a GPU; the arrays are small."""
    def act(family: Family, given: list[Problem]) -> None:
        case = Case(MACHINES["emulator"], family, given[0])
        case.prepare()
        with gk.emulate():
            a, b, c = (case.given[name].array if name in case.given else None for name in "abc")
            compiled = gk.plan(a, b, c, case.config(), out=case.out.array, **case.fields)._compiled
        conf = compiled.problem.config
        ptx = to_ptx(KERNELS[conf.kernel].kernel, tuple(x.type for x in compiled.arguments), conf.threads, H100, conf.blocks_per_sm)
        assert assemble(ptx).usage.registers > 0, family

    drawn(Reach(False), 1, f"compiled {kernel} {number}", kernel, act)


@pytest.mark.kin(3)
def test_most_drawn_mappings_are_legal() -> None:
    """Strategies draw what gemmkit takes: what it refuses is rare."""
    before, found = refused.total(), []
    for n in range(60):
        drawn(Reach(False), 1, f"legal {n}", "", lambda family, given: found.append(family))
    assert len(set(found)) == 60 and refused.total() - before < 30, refused


# -- the checks themselves ------------------------------------------------------------------------------------------------

PLAIN = Family(("fpu", "float32", "float32", "float32", 16, 16, 1, 4, 8), Place("float32"), Place("float32"), None, Place("float32", unit=4))
SMALL = Problem(17, 9, 5)


def test_a_wrong_product_is_noticed() -> None:
    """One element off by one, and one wrong in its last places; and the message can be pasted."""
    case = Case(MACHINES["emulator"], PLAIN, Problem(17, 9, 5, "normal"))
    expected, _ = case.prepare()
    for at, change in (((16, 8), 1.0), ((0, 3), 3e-5)):
        out = expected.value.astype("f4")
        assert_within(out, expected, "D")
        out[at] += change * max(1.0, abs(out[at]))
        with pytest.raises(AssertionError, match=rf"D: 1 of 153 elements are wrong; the first, \({at[0]}, {at[1]}\)"):
            assert_within(out, expected, "D")


@pytest.mark.kin(3)
@on_machines
def test_a_factor_is_as_weak_as_a_literal(machine: Any) -> None:
    """alpha x is float16 where x is, though float32 is added to it: found by seed 20261122, when the reference knew no better
    than to take it for float32."""
    family = Family(("wgmma", 32, "float8_e4m3fn", "float8_e4m3fn", "float16", 0), Place("float8_e4m3fn", unit=16), Place(
        "float8_e4m3fn", axis=0, unit=16), None, Place("float16", unit=8), epilogue=("combine:float32",), call="conf", mapping=(
        ("block_shape", (64, 32, 32)), ("compute_warp", (64, 32, 32)), ("warps_per_block", 4), ("schedule", "cooperative"),
        ("stages", 2)))
    run(machine, family, Problem(48, 240, 48, "whole", alpha=0.3, beta=1.0))


@on_machines
def test_a_narrow_integer_beside_a_captured_one_is_as_wide(machine: Any) -> None:
    """uint8 times int32 is int32, and negative: found by seed 94422050, when the reference had its relu see 253 for -3."""
    family = Family(("fpu", "uint8", "uint8", "int32", 8, 8, 1, 4, 8), Place("uint8", unit=16), Place("uint8", axis=0, unit=2), None,
                    Place("int32", unit=16), (("global_to_shared_a", ("captured", "relu")),), mapping=(
        ("kernel", "multistage"), ("block_shape", (16, 16, 8)), ("compute_warp", (8, 16, 8)), ("warps_per_block", 2), ("stages", 2)))
    run(machine, family, Problem(12, 11, 11, "whole", trans="TN"))


@pytest.mark.kin(3)
@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", ["beside", "element"])
def test_faults_of_a_kernel_are_noticed(fault: str, seeded: Seeded) -> None:
    original = gk.matmul

    def matmul(*args: Any, out: Any, **fields: Any) -> None:
        original(*args, out=out, **fields)
        if fault == "element":
            out[3, 4] += 1
        else:
            out.base[...] = 0                                          # all memory around it

    seeded(gk, "matmul", matmul)
    words = {"beside": "bytes beside it were written", "element": "1 of 153 elements are wrong"}[fault]
    with pytest.raises(AssertionError, match=words) as caught:
        run(MACHINES["emulator"], PLAIN, SMALL)
    text = str(caught.value).split("To repeat it:")[1]
    with pytest.raises(AssertionError, match=words):
        exec(text)


def test_what_is_not_finite_is_compared() -> None:
    import numpy as np

    expected = Bounded(np.array([[np.inf, 1.0]]), np.array([[0.0, 0.5]]))
    assert_within(np.float32([[np.inf, 1.25]]), expected, "D")
    for wrong in ([[-np.inf, 1.0]], [[np.inf, np.nan]], [[1e30, 1.0]], [[np.inf, 1.75]]):
        with pytest.raises(AssertionError, match="1 of 2 elements"):
            assert_within(np.float32(wrong), expected, "D")
