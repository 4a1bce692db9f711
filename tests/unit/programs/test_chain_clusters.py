"""Tiles of whole rows in clusters, whose blocks share what has none of a tile's rows by multicast."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.runtime.device import H100, assumed
from tests.support import chains
from tests.support import programs as listing
from tests.support.chains import check

FEW = dataclasses.replace(H100, sm_count=4)            # clusters go on from tile to tile


@pytest.mark.sample(24)
@pytest.mark.parametrize("seed", range(120))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = chains.drawn_clusters(seed)
    why = chains.NO_SHARES.get(program.function.__name__, "") if mapping.splits else ""
    with assumed(FEW):
        try:
            plan = check(program, arrays, mapping, seed, **more)
        except gk.ConfigError as error:
            assert (why and why in str(error)) or "blocks bring a part each" in str(error), str(error)
            return
        assert program.plan(*arrays, mapping=plan.mapping, **more).text == plan.text
    assert plan.cluster.m == mapping.cluster["m"] and plan.blocks % plan.cluster.size == 0


@pytest.mark.sample(14)
@pytest.mark.parametrize("visible", [chains.causal, chains.window, chains.between], ids=["causal", "window", "between"])
@pytest.mark.parametrize("rows", [1, 64, 65, 128, 129, 200, 256, 257])
@pytest.mark.parametrize("cluster", [2, 4])
def test_tiles_beyond_the_end_take_part(rows: int, cluster: int, visible: Any) -> None:
    """And those whose neighbours see more places than they do."""
    rng = np.random.default_rng(rows)
    q, k, v = (chains.half(rng, 1, extent, 64) for extent in (rows, 170, 170))
    with assumed(FEW):
        check(listing.attention, [q, k, v, chains.empty(1, rows, 64)],
              gk.Mapping({"n": 32}, warpgroups=1, cluster={"m": cluster}), rows, scale=0.125, visible=visible)


def test_what_is_shared() -> None:
    heads = [np.zeros((1, 512, 128), np.float16) for _ in range(4)]
    plan = listing.attention.plan(*heads, 1.0, mapping=gk.Mapping({"n": 128}, cluster={"m": 2}))
    lines = plan.text.splitlines()
    shared = {line.split("_tile")[0] for line in lines if "peers='column'" in line}
    assert shared == {"k", "v"} and "ring_q = Pipeline(stages=2, offset=" in plan.text
    assert not [line for line in lines if line.startswith("ring_q") and "CLUSTER" in line]
    assert sum("readers=CLUSTER" in line for line in lines) == 2
    assert sum(".load_part(map_" in line for line in lines) == sum(".load_part(map_k" in line or ".load_part(map_v" in line for line in lines)
    assert not [line for line in lines if "k_tile.load(" in line or "v_tile.load(" in line]


def test_refused() -> None:
    heads = [np.zeros((1, 512, 64), np.float16) for _ in range(4)]
    with pytest.raises(gk.ConfigError, match=r"cluster=\{'n': 2\}\): blocks with neighbouring tiles share operands, and tiles of "
                                             "whole rows are neighbours along m"):
        listing.attention.plan(*heads, 1.0, mapping=gk.Mapping(cluster={"n": 2}))
    with pytest.raises(gk.ConfigError, match=r"4 blocks bring a part each of k's blocks of 48 x 64: columns of 256 or lines of 32"):
        listing.attention.plan(*heads, 1.0, mapping=gk.Mapping({"n": 48}, cluster={"m": 4}))
