"""`bench.row_programs` without a GPU: programs and gemmkit's own functions are both right, and a wrong one is no row."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest

from bench import row_programs
from bench.experiments.rows import WORKS
from bench.harness import WrongResult, compare
from tests.conformance.test_experiments import Emulated
from tests.support.patches import Seeded


@pytest.fixture(autouse=True)
def short_graphs(replaced: Seeded) -> None:
    """A launch takes a microsecond of the host's clock: a timed graph of as many as on a GPU would have thousands."""
    replaced(row_programs, "compare", partial(compare, target_us=20.0))


@pytest.mark.parametrize("kind", ["f16", "f64"])
@pytest.mark.parametrize("work", (*WORKS, *row_programs.FORMS))
def test_a_row(work: str, kind: str) -> None:
    host = Emulated()
    with host.launches():
        row = row_programs.measured(host, work, kind, 24, 16, pairs=2)
    assert row["work"] == work and row["ratio"] > 0 and row["error"] < (2e-3 if kind == "f16" else 1e-14)
    assert row["group"] == ("row_programs" if work in WORKS and kind == "f16" else "row_forms")


def test_a_wrong_program_is_no_row() -> None:
    host = Emulated()
    with host.launches(), mock.patch.object(row_programs, "rmsnorm", lambda x, gamma, y, eps: row_programs.softmax(x, y)), \
            pytest.raises(WrongResult):
        row_programs.measured(host, "rmsnorm", "f16", 24, 16, pairs=2)


def test_unknown_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        row_programs.main(["attention"])
    assert "'attention' is none of layernorm, rmsnorm, softmax, transposed, named" in capsys.readouterr().err
