"""Two ranks that share one GPU: the symmetric way, over memory that CUDA IPC maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.distributed import shared_gpu_scenarios
from tests.support import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.thorough]      # two processes, which compile for themselves


@pytest.fixture(scope="module")
def said(request: Any, tmp_path_factory: Any) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.run_chosen(request, shared_gpu_scenarios, folder, timeout=240.0, backend="shared", apart=True)


@pytest.mark.parametrize("name", ranks.scenarios(shared_gpu_scenarios))
def test_one_gpu(said: dict[str, list[str]], name: str) -> None:
    ranks.assert_right(said[name])
