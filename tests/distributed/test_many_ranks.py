"""Products of three, four and eight ranks, over gloo and in the emulator: against the single product, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.distributed import many_scenarios
from tests.support import ranks

ENDED = "check_a_rank_that_is_killed"                # which ends the last rank
COUNTS = 3, pytest.param(2, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough), pytest.param(8, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def said(request: Any, tmp_path_factory: Any) -> Any:
    known: dict[int, dict[str, list[str]]] = {}

    def of(count: int) -> dict[str, list[str]]:
        if count not in known:
            folder: Path = tmp_path_factory.mktemp(f"ranks{count}")
            known[count] = ranks.run_chosen(request, many_scenarios, folder, count=count)
        return known[count]

    return of


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ranks.scenarios(many_scenarios))
def test_many_ranks(said: Any, name: str, count: int) -> None:
    ranks.assert_right(said(count)[name], ended=count - 1 if name == ENDED else None)
