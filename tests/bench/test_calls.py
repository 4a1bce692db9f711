"""`bench.calls`: each part of a known call is timed, with the stand-ins of each library."""

from __future__ import annotations

from typing import Any

import pytest

from bench import calls, host, stand_ins
from gemmkit.plans.launch import forget


@pytest.mark.parametrize("library", stand_ins.LIBRARIES)
def test_rows(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "REPEATS", 2)
    with stand_ins.gpu(), stand_ins.library(library) as make:
        forget()
        rows = dict((*calls.plan_rows(make), *calls.matmul_rows(make)))
        forget()
    assert {"plan", "the launch", "the new array", "matmul", "matmul with out", "matmul, users' code"} <= rows.keys()
    assert 0 < rows["plan"] < 1000 and 0 < rows["matmul"] < 1000


def test_the_driver_alone_gets_the_launch_of_the_plan() -> None:
    import gemmkit

    launched: list[Any] = []
    with stand_ins.gpu(lambda *given: launched.append(given) or 0), stand_ins.library("cupy") as make:
        forget()
        run = gemmkit.plan(make(64, 64), make(64, 64))
        run(make(64, 64), make(64, 64), out=make(64, 64))
        host.driver_alone(run)()
        forget()
    (config, function, pointers, _), again = launched
    assert (config, pointers) == (again[0], again[2]) and function.value == again[1].value and again[3] is None
