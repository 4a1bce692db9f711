"""The harness on a clock of our own making, and its workers: what answers, fails, faults, hangs and dies."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import harness, report, supervise
from bench.harness import Call, Row, Work, WrongResult
from bench.supervise import Outcome, Patience, outcomes
from tests.support.patches import Seeded

# ==========================================================================================================================
# The harness on a clock of our own making: what it times, what it checks, and what it refuses.

WORK = Work("matmul", "f16", 64, 32, 16, "nt")


class Machine:
    """A device whose time passes only in kernels; each is slower than the last, as on a card that warms."""

    def __init__(self, warming: float = 0.0) -> None:
        self.now = 0.0
        self.warming = warming
        self.launched: list[str] = []
        self.captures: list[int] = []
        self.timed: list[str] = []

    def kernel(self, name: str, us: float, effect: Call = lambda: None) -> Call:
        def launch() -> None:
            self.now += us * (1.0 + self.warming * len(self.launched))
            self.launched.append(name)
            effect()

        return launch

    def capture(self, calls: Sequence[Call]) -> Call:
        recorded = list(calls)
        self.captures.append(len(recorded))
        return lambda: [call() for call in recorded]

    def elapsed_us(self, call: Call) -> float:
        start, first = self.now, len(self.launched)
        call()
        self.timed.append(self.launched[first][0])
        return self.now - start

    def synchronise(self) -> None:
        pass


def run(
    machine: Machine,
    ours_us: float = 10.0,
    peer_us: float = 8.0,
    sets: int = 3,
    errors: Callable[[int], float] = lambda i: 1e-4,
    ours: Sequence[Call] | None = None,
    **options: object,
) -> Row:
    return harness.compare(
        WORK,
        ours or [machine.kernel(f"ours{i}", ours_us) for i in range(sets)],
        [machine.kernel(f"peer{i}", peer_us) for i in range(sets)],
        peer_name="peer",
        clock=machine,
        poison=lambda: None,
        error=errors,
        tolerance=1e-3,
        **options,  # type: ignore[arg-type]
    )


def test_a_row_has_times_of_one_launch_and_fits_the_schema() -> None:
    row = run(Machine(), further={"config": "default"})
    assert row["ours_us"] == pytest.approx(10.0)
    assert row["peer_us"] == pytest.approx(8.0)
    assert row["ratio"] == pytest.approx(0.8)
    assert row["tflops"] == pytest.approx(2 * 64 * 32 * 16 / 10.0 * 1e-6)
    assert row["config"] == "default"
    report.validate(report.document("test", [row], "no device"))


def test_warming_cancels_in_the_ratio() -> None:
    """The card slows down by far more than the difference between the two during the run."""
    machine = Machine(warming=1e-3)
    row = run(machine, ours_us=10.0, peer_us=10.0, target_us=100.0)
    assert machine.warming * len(machine.launched) > 0.3
    assert row["ratio"] == pytest.approx(1.0, abs=0.02)


def test_who_goes_first_alternates() -> None:
    machine = Machine()
    run(machine, pairs=4)
    last = machine.timed[-8:]
    assert last == ["o", "p", "p", "o", "o", "p", "p", "o"]


def test_inputs_rotate_in_whole_rounds() -> None:
    machine = Machine()
    run(machine, sets=3, target_us=200.0)
    assert all(size % 3 == 0 for size in machine.captures)
    assert max(machine.captures) == 27  # 200 us at the faster one's 8 us: 25 launches, in whole rounds of 3
    assert machine.launched[-3:] == ["ours0", "ours1", "ours2"] or machine.launched[-3:] == [
        "peer0",
        "peer1",
        "peer2",
    ]


def test_without_a_graph_nothing_is_captured() -> None:
    machine = Machine()
    row = run(machine, graph=False)
    assert machine.captures == [] and row["graph"] is False
    assert row["ratio"] == pytest.approx(0.8)


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("error", [0.1, math.nan])
def test_a_wrong_first_or_last_set_is_an_error(bad: int, error: float) -> None:
    with pytest.raises(WrongResult, match=r"matmul f16 64x32x16 nt.* before the timing"):
        run(Machine(), errors=lambda i: error if i == bad else 0.0)


def test_outputs_that_the_timed_graph_never_wrote_are_an_error() -> None:
    """The kernel writes only outside the timed graph: the poison put there before is still there."""
    machine, written = Machine(), [False]
    allowed = itertools.count()

    def write() -> None:
        written[0] = next(allowed) < 2  # the first call and the first round

    with pytest.raises(WrongResult, match="after the timing"):
        harness.compare(
            WORK, [machine.kernel("ours", 10.0, write)], [machine.kernel("peer", 8.0)],
            peer_name="peer", clock=machine, poison=lambda: written.__setitem__(0, False),
            error=lambda i: 0.0 if written[0] else math.nan, tolerance=1e-3,
        )  # fmt: skip


def test_the_larger_error_is_reported() -> None:
    assert run(Machine(), errors=lambda i: (i + 1) * 1e-5)["error"] == pytest.approx(3e-5)


def test_bad_arguments() -> None:
    machine = Machine()
    with pytest.raises(ValueError, match="one call for each input set, got 1 and 3"):
        run(machine, ours=[machine.kernel("ours", 1.0)])
    with pytest.raises(ValueError, match="pairs: got 1"):
        run(machine, pairs=1)
    with pytest.raises(ValueError, match=r"\['ratio'\]"):
        run(machine, further={"ratio": 2.0})
    assert machine.launched == []


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    summary = harness.summarise([(10.0, 5.0), (20.0, 22.0), (40.0, 48.0)])
    assert summary.ratio == pytest.approx(1.1)
    assert (summary.ours_us, summary.peer_us) == (20.0, 22.0)


def test_the_spread_is_the_interquartile_range() -> None:
    summary = harness.summarise([(1.0, r) for r in (1.0, 2.0, 3.0, 4.0, 5.0)])
    assert summary.spread == pytest.approx(2.0)


@pytest.mark.parametrize("pair", [(0.0, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, -1.0)])
def test_impossible_times_are_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        harness.summarise([(1.0, 1.0), pair])


@given(st.integers(1, 2**36), st.integers(0, 2**28))
def test_input_sets_exceed_twice_the_cache_by_less_than_one_set(size: int, l2: int) -> None:
    sets = harness.input_sets(size, l2)
    assert sets >= 2 and sets * size > 2 * l2
    assert sets == 2 or (sets - 1) * size <= 2 * l2


@given(st.integers(1, 10_000), st.floats(0.5, 1e6), st.floats(1.0, 1e5))
def test_launches_are_whole_rounds_near_the_target(sets: int, us: float, target: float) -> None:
    count = harness.launches(sets, us, target)
    assert count % sets == 0 and count >= sets
    assert count == sets or count <= harness.MAX_LAUNCHES
    assert count * us >= target or count + sets > harness.MAX_LAUNCHES


# ==========================================================================================================================
# Workers that answer, fail, fault, hang and die.


class Clumsy:
    """Measures "row"; does what the other cases say."""

    def __init__(self) -> None:
        self.lost = False

    def measure(self, case: str) -> dict[str, Any]:
        if case == "hang":
            time.sleep(3600)
        if case == "die":
            os._exit(3)
        if case == "fault":
            self.lost = True
        if case in ("fault", "fail"):
            raise RuntimeError(f"cannot {case}")
        return {"process": os.getpid()}

    def is_lost(self) -> bool:
        return self.lost


def run_supervised(*cases: str, patience: Patience = Patience(20, 1.0), **options: Any) -> list[Outcome]:
    found = list(outcomes(Clumsy, cases, patience, method="fork", **options))
    assert [outcome.case for outcome in found] == list(cases)
    return found


def processes(found: list[Outcome]) -> list[int]:
    return [outcome.row["process"] for outcome in found if outcome.row is not None]


def test_all_rows_come_from_one_worker() -> None:
    assert len(set(processes(run_supervised("row", "row", "row")))) == 1


def test_a_failure_costs_its_row_only() -> None:
    found = run_supervised("row", "fail", "row")
    assert len(set(processes(found))) == 1 and len(processes(found)) == 2
    assert found[1].row is None and found[1].message.startswith("RuntimeError: cannot fail (test_harness.py:")


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("fault", "cannot fault"), ("die", "died with exit status 3"), ("hang", "no answer in 1 s")],
)
def test_a_lost_worker_is_replaced(trouble: str, message: str) -> None:
    found = run_supervised("row", trouble, "row", "row")
    first, *others = processes(found)
    assert len(others) == 2 and len(set(others)) == 1 and first not in others
    assert found[1].row is None and message in found[1].message


def test_a_worker_that_faults_on_the_last_row_is_not_replaced() -> None:
    assert len(processes(run_supervised("row", "fault"))) == 1


def test_after_too_many_losses_the_rest_is_given_up() -> None:
    found = run_supervised("die", "die", "row", restarts=1)
    assert [outcome.row for outcome in found] == [None, None, None]
    assert found[2].message == "not measured: too many workers were lost"


def test_the_whole_has_a_limit(replaced: Seeded) -> None:
    now = iter([0.0, 0.0, 3599.8, 3601.0])                 # as it begins, and before each row
    replaced(supervise, "time", SimpleNamespace(monotonic=now.__next__))
    found = run_supervised("row", "hang", "row", patience=Patience(3600, 3600, whole=3600))
    assert found[0].row is not None and "no answer" in found[1].message
    assert found[2].message == "not measured: out of time"
