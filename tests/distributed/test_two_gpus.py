"""Two ranks on two GPUs of one host: the symmetric way against the plain one, in 1,000 calls, and PyTorch's groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from tests.distributed import gpu_scenarios  # noqa: E402
from tests.support import ranks  # noqa: E402

GPUS = int(os.environ.get(ranks.ALL_GPUS, "0")) or (torch.cuda.device_count() if torch.cuda.is_available() else 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="two GPUs of one host are needed")]


@pytest.fixture(scope="module")
def said(request: Any, tmp_path_factory: Any) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.run_chosen(request, gpu_scenarios, folder, timeout=260.0, backend="nccl", apart=True)


@pytest.mark.parametrize("name", ranks.scenarios(gpu_scenarios))
def test_two_gpus(said: dict[str, list[str]], name: str) -> None:
    ranks.assert_right(said[name], ended=1 if name == gpu_scenarios.ENDED else None)
