"""`gemmkit.runtime.launch`: which streams share memory, and how often the driver is asked."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings import driver

from gemmkit.runtime import launch
from gemmkit.runtime.launch import Space, addresses

SPACES = [Space(0, "sums", 1 << 17), Space(1, "counts", 64)]


class Streams:
    """Stands for what the driver says of streams: 5 and 6 are, 7 is captured."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def capturing(self, handle: int) -> tuple[int, int]:
        self.asked.append(handle)
        return 0, int(handle == 7)

    def identity(self, handle: int) -> tuple[int, int]:
        self.asked.append(handle)
        return 0, 100 + handle


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    places = iter(range(1 << 20, 1 << 30, 1 << 20))

    def allocated(size: int, data: Any) -> int:
        return next(places)

    monkeypatch.setattr(launch, "_kept", {})
    monkeypatch.setattr(launch, "_allocated", allocated)
    monkeypatch.setattr(launch.device, "count", lambda: 1)
    monkeypatch.setattr(driver, "cuStreamIsCapturing", made.capturing)
    monkeypatch.setattr(driver, "cuStreamGetId", made.identity, raising=False)
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda handle: (0, 1, 12, 0, 0, 0))
    return made


def test_each_stream_and_each_capture_has_its_own(streams: Streams) -> None:
    found = [tuple(addresses(0, stream, SPACES)) for stream in (0, 5, 6, 7)]
    assert len({address for of_stream in found for address in of_stream}) == 8
    assert [tuple(addresses(0, stream, SPACES)) for stream in (0, 5, 6, 7)] == found


def test_of_the_default_stream_nobody_asks(streams: Streams) -> None:
    """No capture can begin on it, and its handle is always its own."""
    for _ in range(2):
        addresses(0, 0, SPACES)
    assert streams.asked == []
    addresses(0, 5, SPACES)
    assert streams.asked == [5, 5]


def test_a_kernel_without_workspaces_asks_nothing(streams: Streams) -> None:
    assert addresses(0, 5, []) == [] and streams.asked == []
