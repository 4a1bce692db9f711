"""What launches of a product with reductions are given, without a GPU: its kernel, and the one behind it that completes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.stand_ins import STREAM, gpu, library
from gemmkit.epilogues import ColumnReduce, ReLU, RowReduce
from gemmkit.epilogues.observers import RowSum
from gemmkit.runtime import launch as launchable
from gemmkit.runtime import launch as workspace
from gemmkit.runtime.device import parameter_struct

PLACE = 0x7000_0000


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, int, list[Any]]]]:
    """The kernel, the stream and the numbers of each."""
    found: list[tuple[Any, int, list[Any]]] = []

    def bind(made: Any) -> Any:
        packing, _ = parameter_struct(made.formats)

        def launch(stream: int, values: Any) -> None:
            packing.pack(*values)
            found.append((made.kernel.__name__, stream, list(values)))

        def prepare(values: Any, slots: Any, expand: Any) -> Any:
            def prepared(stream: int, given: tuple) -> None:
                put = list(values)
                for slot, value in zip(slots, expand(given)):
                    put[slot] = value
                launch(stream, put)

            return prepared

        return SimpleNamespace(launch=launch, prepare=prepare)

    monkeypatch.setattr(launchable.Launchable, "bind", bind)
    monkeypatch.setattr(workspace, "addresses", lambda device, stream, spaces: tuple(PLACE + 2**20 * n for n in range(len(spaces))))
    yield found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [48, 256])
def test_two_launches_a_call(launches: list[Any], size: int, count: int) -> None:
    """The product's and what completes it, both with the call's arrays and the same workspaces; other arrays of the same
    kind take their places."""
    with gpu(), library("cupy") as array:
        a, b, out = array(size, 64), array(64, size), array(size, size)
        for _ in range(2):
            sums = [array(size, dtype=np.float32) for _ in range(count)]
            epilogue: Any = ReLU() | RowReduce(sums[0], "max")
            if count == 2:
                epilogue = epilogue | ColumnReduce(sums[1], "sumsq")
            run = gk.plan(a, b, out=out, epilogue=epilogue)
            for call in (partial(gk.matmul, epilogue=epilogue), run):
                launches.clear()
                call(a, b, out=out)
                (_, stream, product), (second, behind, completing) = launches
                assert (second, stream, behind) == ("complete_reductions", STREAM, STREAM)
                for n in range(count):
                    assert sums[n].data.ptr in completing
                    assert PLACE + 2**20 * n in product and PLACE + 2**20 * n in completing


def test_observers_are_completed(launches: list[Any]) -> None:
    with gpu(), library("cupy") as array:
        a, b = array(256, 256), array(256, 256)
        for _ in range(2):
            sums = array(256, dtype=np.float32)
            launches.clear()
            gk.matmul(a, b, observe_a=RowSum(sums))
            (_, _, product), (second, _, completing) = launches
            assert second == "complete_reductions" and sums.data.ptr in completing and PLACE in product and PLACE in completing
