"""How partial sums reach a peer: by size, and by what the product's components see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from gemmkit.distributed.partial_sums import Reduction  # noqa: E402
from gemmkit.distributed.rank_order import Rule, plus  # noqa: E402
from gemmkit.distributed.sending import Sending, sending_of  # noqa: E402
from gemmkit.transforms import Elementwise  # noqa: E402

F32, F16, MAPPING = np.dtype("f4"), np.dtype("f2"), object()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def sent(lengths: tuple[int, ...], columns: int, travels: np.dtype = F16, **components: Any) -> Sending:
    b = SimpleNamespace(shape=(64, columns), device="cuda")
    return sending_of(lengths, b, Reduction(travels, F32, Rule(plus), F16, MAPPING), None, components)


def test_small_sums_are_stored() -> None:
    assert sent((2048, 2048), 4096) == Sending(True, 1) == sent((1, 0), 1) == sent((256,) * 8, 4096)
    assert sent((2048, 2048), 8192, F16) == Sending(False, 2, MAPPING)              # 32 MiB for a peer
    assert sent((2048, 2048), 8191, F16).stores and not sent((2048, 2048), 4096, F32).stores


def test_large_ones_are_copied_by_the_mapping_of_all_rows() -> None:
    assert sent((4096, 4096), 8192) == Sending(False, 2, MAPPING)
    assert sent((4096,) * 4, 8192) == Sending(False, 1, MAPPING)
    assert sent((70, 8192), 8192).chunks == 2                                       # what the largest takes


def test_rows_that_are_seen_are_at_home_first() -> None:
    """One product of all rows, whose parts are copied."""
    doubled = Elementwise(lambda x: x + x)
    assert sent((8, 8), 16, transform_global_to_shared_a=doubled) == Sending(False, 1)
    assert sent((8, 8), 16, epilogue=doubled) == Sending(True, 1)
