"""What a launch of attention is given, without a GPU: numbers in their places, tables and kernels kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.stand_ins import STREAM, gpu, library
from gemmkit.functions import attention
from gemmkit.functions.attention import AttentionLaunch
from gemmkit.kernels.masks import Causal, Window
from tests.support import launches
from tests.support.launches import TABLE


class Seen(launches.Seen):
    def kept(self, key: Any, data: np.ndarray) -> None:
        assert data.dtype == np.int32
        self.tables.append(key)
        assert all(key == other or key is not other for other in self.tables)

    def expected(self) -> list[Any]:
        """What a launch for the last call alone is given."""
        made = AttentionLaunch(self.calls[-1])
        values = list(made.launchable.values)
        values[made.launchable.slot(2)] = TABLE
        for n, one in enumerate(made.tensor_maps):
            values[made.launchable.slot(5 + n)] = one.encoder(one.info.pointer)
        return values


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    found.watch(monkeypatch, attention)
    return found


def test_numbers_stand_in_their_places(seen: Seen) -> None:
    """Of a call whose kernel is there the same as of one that is the first."""
    with gpu(), library("cupy") as array:
        for mask, scale in ((Window(3), 0.25), (Window(3), 0.5), (Window(900, 2), 0.5)):
            q, k, v = array(2, 4, 300, 64), array(2, 2, 500, 64), array(1, 2, 500, 64)
            out, lse = gk.attention(q, k, v, mask=mask, scale=scale, return_lse=True)
            assert seen.launches[-1] == (STREAM, seen.expected())
            assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 300), np.float32)
            for x in (q, k, v, out):
                assert x.data.ptr.to_bytes(8, "little") * 16 in seen.launches[-1][1]
    assert seen.bound == 2                                             # another window, another table; another scale, none


def test_kernels_are_told_apart(seen: Seen) -> None:
    with gpu(), library("cupy") as array:
        q, k, out = array(1, 2, 300, 64), array(1, 2, 0, 64), array(1, 2, 300, 64)
        packed = array(300, 2, 64), array(40, 1, 64), array(40, 1, 64)
        for again in range(2):
            gk.attention(q, k, k, mask=Causal(), out=out)              # no keys: K and V are Q
            assert seen.launches[-1] == (STREAM, seen.expected())
            gk.attention(q, q, q, scale=-1.0, out=out)
            assert seen.launches[-1] == (STREAM, seen.expected() if not again else seen.launches[1][1])
            gk.attention(q, q, q, mask=Causal("upper left"), score=lambda s, m, n: s)
            gk.attention(*packed, layout="bnhd", lengths=([0, 90, 300], [0, 10, 40]))
            assert seen.launches[-1] == (STREAM, seen.expected())
        assert len(seen.launches) == 8 and len(seen.calls) == 7        # one was known by what is quickly seen
    assert seen.bound == 4 and len(set(seen.tables)) == 4


def test_tables_of_tiles() -> None:
    """Each tile of each head once; what is behind a block's last one is no tile."""
    from gemmkit.kernels.attention.kernel import Head, schedule

    for count, rows, blocks in ((1, 1, 1), (5, 7, 4), (16, 3, 132), (3, 40, 11)):
        order = schedule([Head([float(row + 1) for row in range(rows)], (head, 0)) for head in range(count)], 128, 2, blocks)
        table = order.reshape(-1, blocks, 3)
        assert (table[-1] == -1).all()
        found = [tuple(tile) for tile in order if tile[0] >= 0]
        assert sorted(found) == sorted((128 * row, head, 0) for head in range(count) for row in range(rows))
        for block in range(blocks):
            is_tile = table[:, block, 0] >= 0
            assert not is_tile[is_tile.argmin():].any()
        work = [sum(m // 128 + 1.5 for m in table[:, block, 0] if m >= 0) for block in range(blocks)]
        assert max(work) - min(work) <= rows + 0.5
