"""A recording of a launch: complete, in an order in which the launch may run, and nothing of it where none is asked for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.emulator import machine
from gemmkit.emulator.launch import Event, recorded
from gemmkit.emulator.machine import chosen
from gemmkit.layouts import Padded, RowMajor
from gemmkit.operators import MMAOp, WGMMAOp
from gemmkit.runtime.device import H100, assumed
from gemmkit.tiling import Tile
from gemmkit.tools.figures import Lane
from tests.support.banks import conflicts
from tests.support.sm90 import mapping

AT_BARRIERS = "tma", "arrive", "waited"


def _events(conf: Any, M: int, N: int, K: int) -> list[Event]:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, extents).astype(np.float16) for extents in ((M, K), (K, N)))
    with gk.emulate(), assumed(dataclasses.replace(H100, sm_count=1)), recorded() as seen:
        d = gk.matmul(a, b, None, conf)
    assert np.array_equal(d, a.astype(np.float32) @ b.astype(np.float32)) and not seen.is_cut
    (events,) = seen.launches
    return events


def test_hopper_stages_are_filled_read_and_released() -> None:
    conf = mapping("one", WGMMAOp(32))
    events, spec = _events(conf, 64, 64, 64 * 3), conf.spec()
    pipeline = spec.pipeline
    full = [pipeline.offset + 8 * n for n in range(pipeline.stages)]
    empty = [at + 8 * pipeline.stages for at in full]
    k_tiles = 2 * 3                                                       # of two tiles of D, by one block
    tma = [event for event in events if event.kind == "tma"]
    assert sum(event.size for event in tma) == k_tiles * spec.tma_bytes
    assert {event.place[1] for event in tma} <= set(full)
    for stage in range(min(k_tiles, pipeline.stages)):
        rounds = len(range(stage, k_tiles, pipeline.stages))
        for phase in range(rounds):
            at = [n for n, e in enumerate(events) if e.kind in AT_BARRIERS and e.place == (0, full[stage]) and e.phase == phase]
            kinds = [events[n].kind for n in at]
            filled = max(n for n in at if events[n].kind in ("tma", "arrive"))
            read = min(n for n in at if events[n].kind == "waited")
            free = min(n for n, e in enumerate(events) if e.kind == "arrive" and e.place == (0, empty[stage]) and e.phase == phase)
            assert filled < read < free and kinds.count("waited") == 128
    operations = Counter(event.place for event in events if event.kind == "instruction" and event.thread == 128)
    assert operations["m64n32k16.f32.f16.f16"] == k_tiles * 64 // 16
    assert sum(event.kind == "operand" for event in events) == 2 * k_tiles * 64 // 16       # A and B of each


def test_multistage_copies_land_before_they_are_read() -> None:
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor("float16"), block_shape=Tile(M=32, N=32, K=32),
                         warps_per_block=4, kernel="multistage", stages=3)
    events = _events(conf, 32, 32, 32 * 4)
    copied = Counter((e.thread, e.place, e.size) for e in events if e.kind == "copy")
    assert copied == Counter((e.thread, e.place, e.size) for e in events if e.kind == "landed")
    assert sum(e.size for e in events if e.kind == "copy") == 2 * (32 * 32 * 4) * 2
    first = {kind: min(n for n, e in enumerate(events) if e.kind == kind) for kind in ("copy", "landed", "read", "instruction")}
    assert first["copy"] < first["landed"] < first["read"]
    met, left = (Counter(e.place for e in events if e.kind == kind) for kind in ("met", "left"))
    assert met == left and set(met.values()) == {128}
    assert sum(e.size for e in events if e.kind == "store" and e.memory == "out") == 32 * 32 * 4
    assert all("fetch" in e.way for e in events if e.kind == "read" and e.site is not None and "load_matrices" == e.site[0].co_name)


def _matrix_conflicts(shared: Any) -> int:
    """Of the ldmatrix that fetch A, a warp's n-th access all lanes' n-th at one place of the kernel."""
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor("float16"), block_shape=Tile(M=64, N=32, K=64),
                         warps_per_block=4, kernel="multistage", stages=2, shared_a_layout=shared)
    spec, groups, counts = conf.spec(), {}, Counter()                     # type: ignore[var-annotated]
    for event in _events(conf, 64, 32, 128):
        if event.kind == "read" and "fetch" in event.way and event.place % spec.stage_bytes < spec.a.nbytes:      # type: ignore[attr-defined]
            key = event.thread // 32, event.site
            counts[key, event.thread] += 1
            groups.setdefault((key, counts[key, event.thread]), []).append(Lane(event.thread % 32, event.place, event.size))
    assert groups
    return conflicts(groups)


def test_recorded_addresses_show_conflicts_of_banks() -> None:
    assert _matrix_conflicts(Padded(RowMajor("float16"), 8)) == 0
    assert _matrix_conflicts(RowMajor("float16")) > 0


def test_nothing_is_recorded_outside() -> None:
    kinds = []

    def kernel() -> None:
        kinds.append(type(machine.current()))

    machine.launch(kernel, (), grid=(1, 1, 1), block=(32, 1, 1), shared_memory=0)
    with recorded() as seen:
        machine.launch(kernel, (), grid=(1, 1, 1), block=(32, 1, 1), shared_memory=0)
    assert chosen.get() is None
    machine.launch(kernel, (), grid=(1, 1, 1), block=(32, 1, 1), shared_memory=0)
    assert kinds[0] is kinds[-1] is machine.Thread and kinds[32] is not machine.Thread and issubclass(kinds[32], machine.Thread)
    assert len(seen.launches) == 1
