"""Products of two ranks, over gloo and in the emulator: against the single product, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.distributed import scenarios
from tests.support import ranks

ENDED = "check_a_rank_that_is_killed"                # which ends rank 1


@pytest.fixture(scope="module")
def said(request: Any, tmp_path_factory: Any) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.run_chosen(request, scenarios, folder)


@pytest.mark.parametrize("name", ranks.scenarios(scenarios))
def test_two_ranks(said: dict[str, list[str]], name: str) -> None:
    ranks.assert_right(said[name], ended=1 if name == ENDED else None)
