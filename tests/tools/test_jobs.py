"""The commands that judge drawn cases, in several processes."""

from __future__ import annotations

import operator
import runpy
import sys
from functools import partial

import pytest

from tests.support.jobs import in_jobs
from tests.support.patches import Seeded

COMMANDS = {"bad_calls": "--count", "drawn_programs": "--count", "ptx_machine": "--cases", "resolved_calls": "--count"}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_processes_run_is_found_by_them(command: str, replaced: Seeded) -> None:
    """`in_jobs` refuses what lies in the command's ``__main__``, however few cases are asked for."""
    replaced(sys, "argv", [command, COMMANDS[command], "0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"tests.{command}", run_name="__main__")
    assert not ended.value.code


def test_results_come_in_their_order_from_each_number_of_jobs() -> None:
    for jobs in 1, 2:
        assert list(in_jobs(partial(operator.mul, 3), range(7), jobs)) == [0, 3, 6, 9, 12, 15, 18]

    def work(x: int) -> int:
        return x

    work.__module__ = "__main__"
    with pytest.raises(TypeError, match="work lies in __main__, where other processes do not find it"):
        list(in_jobs(partial(work), (), 1))
