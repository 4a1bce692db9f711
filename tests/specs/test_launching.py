"""What a launch hands to the driver: addresses in their slots, the stream; one kernel for one kind of arrays. (No GPU.)"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.specs import lower
from gemmkit.specs.lower import ArrayParameter, BlockKernel
from gemmkit.specs.nodes import scheduled
from gemmkit.specs.run import kernel_of, matrix_of
from gemmkit.specs.schedule import GL, RF, A, B, Block, Init, K, M, MatMul, Move, N, Thread
from gemmkit.specs.schedule import Kernel as AtKernel
from tests.support.launches import preparing
from tests.support.patches import Seeded


class Recorder:
    """Stands for a launchable's bound kernel."""

    def __init__(self) -> None:
        self.bound: list[Any] = []
        self.launches: list[tuple] = []
        self.prepare = preparing(lambda stream, brought, put: self.launches.append((stream, put)))

    def bind(self, made: Any) -> Any:
        self.bound.append(made)
        return self



def array(pointer: int, rows: int = 16, columns: int = 16, device: int = 0) -> ArrayInfo:
    return ArrayInfo(pointer, (rows, columns), (columns, 1), np.dtype("f4"), device, False, "cai", 5)


@pytest.fixture
def recorder(own_launches: None, replaced: Seeded) -> Recorder:
    made = Recorder()
    replaced(lower, "describe", lambda value, name: value)
    replaced(lower.Launchable, "bind", lambda launchable: made.bind(launchable))
    replaced(lower.device, "made_current", lambda ordinal: nullcontext())
    replaced(lower.device, "current", lambda: lower.device.H100)
    return made


def kernel() -> BlockKernel:
    schedule = (MatMul(M, N, K)(GL, GL, GL)(AtKernel).tile(16, 16).to(Block).tile(1, 1).to(Thread)
                .accumulate_in(RF, Init.done, Move.done).split(1).move(A, RF, Move.done).move(B, RF, Move.done).done)
    lowered = kernel_of(schedule, *[matrix_of("a", ("f4", "row"))] * 3)
    return BlockKernel(scheduled, lowered.root, lowered.threads, 1, lowered.shared_bytes)


def arguments(*infos: ArrayInfo) -> list[ArrayParameter]:
    return [ArrayParameter(info, name, is_readonly=n < 2) for n, (name, info) in enumerate(zip(("a", "b", "out"), infos))]


def test_addresses_and_streams(recorder: Recorder) -> None:
    kernel().run(arguments(array(0x1000), array(0x2000), array(0x3000)))
    kernel().run(arguments(array(0x4000), array(0x5000), array(0x6000)), stream=9)
    assert [stream for stream, _ in recorder.launches] == [5, 9]
    first, second = (values for _, values in recorder.launches)
    made = recorder.bound[0]
    slots = [made.slot(n) for n in (1, 2, 3)]
    assert [first[n] for n in slots] == [0x1000, 0x2000, 0x3000] and [second[n] for n in slots] == [0x4000, 0x5000, 0x6000]
    assert made.threads == 256 and made.blocks == 1
    assert len(recorder.bound) == 1                           # the same kind of arrays: compiled once


def test_another_size_is_another_launch(recorder: Recorder) -> None:
    kernel().run(arguments(array(0x1000), array(0x2000), array(0x3000)))
    kernel().run(arguments(array(0x1000, 16, 32), array(0x2000, 32, 16), array(0x3000)))
    assert len(recorder.bound) == 2


def test_a_call_is_compiled_ahead() -> None:
    """Host arrays are resolved for a device that is not there; nothing is computed."""
    from gemmkit.plans.ahead import recorded
    from gemmkit.specs.products import scalar

    a, out = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
    (made,) = recorded(lambda: scalar(a, a, out=out))
    assert (made.launchable.threads, made.launchable.blocks) == (256, 1) and not out.any()


def test_blocks_of_a_multiprocessor() -> None:
    from gemmkit.specs.products import multiply_adds
    from gemmkit.specs.run import prepared

    infos = tuple(array(n << 20, 128, 128)._replace(strides=(1, 128)) for n in (1, 2, 3))
    for blocks in (1, 2):
        made, _ = prepared(multiply_adds(occupancy=blocks), infos)
        assert made.launchable((True, True, False), infos, lower.device.H100).blocks_per_sm == blocks


def test_arrays_in_different_places(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="a, b, out are in different places; put them on one GPU"):
        kernel().run(arguments(array(0x1000), array(0x2000, device=1), array(0x3000)))
