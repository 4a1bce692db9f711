"""What all tests share: GPU tests only where there is a GPU, and random numbers from a test's name.

Compare results with `from tests.checks import assert_close, relative_error`.
"""

from __future__ import annotations

import zlib

import hypothesis
import numpy as np
import pytest

# Examples are the same in every run, so that a red run can be looked into; no deadline: kernels compile in
# seconds.
hypothesis.settings.register_profile("gemmkit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gemmkit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `gpu` where there is no GPU (a skip would look like a fault)."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    from gemmkit.runtime import device

    if not device.available():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers by the test's name and parameters: the same in every run."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
