"""Conflicts of banks, counted from a recorded launch: none with the padding or swizzle of the layout, some without."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.emulator.recording import recorded
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.operators import MMAOp, WGMMAOp
from gemmkit.runtime.device import H100, assumed
from gemmkit.tiling import Tile
from gemmkit.tools.figures import Row, count
from tests.support.sm90 import mapping


def _counted(**shared: Any) -> tuple[Any, list[Row]]:
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor("float16"), block_shape=Tile(M=64, N=64, K=64),
                         warps_per_block=4, kernel="multistage", stages=2, **shared)
    a = np.zeros((64, 128), np.float16)
    with gk.emulate(), assumed(dataclasses.replace(H100, sm_count=1)), recorded() as seen:
        gk.matmul(a, a.T.copy(), None, conf)
    return conf.spec(), count(seen.launches[0], conf.spec())


def test_a_padded_layout_has_none() -> None:
    layout = Padded(RowMajor("float16"), 8)
    _, rows = _counted(shared_a_layout=layout, shared_b_layout=layout)
    assert [(row.operand, row.kind) for row in rows] == [("A", "copy"), ("A", "read"), ("B", "copy"), ("B", "read")]
    assert all(row.extra == 0 for row in rows) and all(row.without > 0 for row in rows if row.kind == "read")
    assert [row.accesses for row in rows if row.kind == "copy"] == [2 * 64 * 64 * 2 // (32 * 16)] * 2


def test_a_plain_layout_has_the_conflicts_of_the_others_without() -> None:
    _, rows = _counted(shared_a_layout=RowMajor("float16"), shared_b_layout=RowMajor("float16"))
    _, padded = _counted(shared_a_layout=Padded(RowMajor("float16"), 8), shared_b_layout=Padded(RowMajor("float16"), 8))
    assert [row.extra for row in rows] == [row.without for row in rows] == [row.without for row in padded]


def test_core_matrices_of_a_swizzle_have_none() -> None:
    """A and B K-major, and B along N: 128 bytes of each line."""
    for b in (ColMajor, RowMajor):
        conf = mapping("one", WGMMAOp(64), b=b)
        x = np.zeros((64, 64), np.float16)
        with gk.emulate(), assumed(dataclasses.replace(H100, sm_count=1)), recorded() as seen:
            gk.matmul(x, np.zeros((64, 64), np.float16, order="CF"[b is ColMajor]), None, conf)       # type: ignore[call-overload]
        rows = count(seen.launches[0], conf.spec())
        assert [(row.operand, row.kind, row.accesses, row.extra) for row in rows] == [("A", "wgmma", 64, 0), ("B", "wgmma", 64, 0)]
        assert all(row.without == 64 * 7 for row in rows)
