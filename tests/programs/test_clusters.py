"""Clusters of derived kernels: neighbouring tiles share operands by multicast, and tiles of whole rows what has none of their
rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.programs.collectives import COLUMN, ROW, StagedTile
from gemmkit.runtime.device import H100, assumed
from tests.programs.test_derived import A, B, D, Drawn, check, drawn, empty
from tests.support import chains
from tests.support import programs as listing
from tests.support.chains import check as check_of_chain_clusters

# ==========================================================================================================================
# Clusters of derived kernels: neighbouring tiles share operands by multicast; in the emulator, against the references.

__all__ = ["drawn"]

F32 = np.dtype("f4")
FEW = dataclasses.replace(H100, sm_count=4)            # clusters go on from tile to tile
SHAPES: list[dict[str, int]] = [{"m": 2}, {"n": 2}, {"m": 2, "n": 2}, {"m": 4}, {"n": 4}]


def laid(cluster: dict[str, int], **more: Any) -> gk.Mapping:
    return gk.Mapping({"n": 64}, warpgroups=1, stages=2, cluster=cluster, **more)


@pytest.mark.sample(10)
@pytest.mark.parametrize("cluster", SHAPES, ids=str)
@pytest.mark.parametrize("m, n, k", [(200, 136, 168), (1, 1, 8), (67, 300, 72), (129, 64, 264)])
def test_gemm_at_odd_sizes(drawn: Drawn, cluster: dict[str, int], m: int, n: int, k: int) -> None:
    """Of some tiles nothing is in the matrices: their blocks take part in all that the cluster does."""
    b = drawn(k, n + -n % 8)[:, :n]
    with assumed(FEW):
        check(listing.gemm, drawn(m, k), b, empty(m, n), mapping=laid(cluster), seed=m)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("cluster", SHAPES[:3], ids=str)
def test_other_programs(drawn: Drawn, cluster: dict[str, int]) -> None:
    with assumed(FEW):
        a, b, c = drawn(150, 136), drawn(136, 200, scale=0.1), drawn(136, 200, scale=0.1)
        check(listing.dual, a, b, c, empty(150, 200), mapping=laid(cluster), seed=1, gate=listing.silu_times)
        check(listing.product_and_sums, a, b, empty(150, 200, dtype=F32), empty(150, dtype=F32), mapping=laid(cluster), seed=2)
        check(listing.transposed, drawn(168, 136), drawn(77, 168), empty(136, 77), mapping=laid(cluster), seed=3)
        check(listing.residual, a, b, drawn(150, 200), empty(150, 200), empty(150, 200), mapping=laid(cluster), seed=4)
        check(listing.lstm, drawn(100, 136), drawn(136, 72, scale=0.1), drawn(100, 40), drawn(40, 72, scale=0.1),
              drawn(72, dtype=F32), empty(100, 72), mapping=laid(cluster), seed=5)
        check(listing.batched, drawn(2, 130, 72), drawn(72, 136), drawn(2), drawn(2, 136), empty(2, 130, 136),
              empty(2, 130, dtype=F32), mapping=laid(cluster), seed=6)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("mapping", [
    gk.Mapping({"n": 256, "k": 64}, stages=2, cluster={"m": 2}), gk.Mapping({"n": 192, "k": 128}, warpgroups=2, cluster={"n": 2}),
    gk.Mapping({"n": 128}, warpgroups=3, cluster={"m": 2, "n": 2}), gk.Mapping(cluster={"m": 4})], ids=str)
def test_wide_blocks(drawn: Drawn, mapping: gk.Mapping) -> None:
    with assumed(FEW):
        check(listing.gemm, drawn(150, 200), drawn(200, 264), empty(150, 264), mapping=mapping, seed=1)


def test_parts_are_whole_panels_or_lines_of_each() -> None:
    wide, narrow, alone = (StagedTile("float16", 64, columns, 0, 0, False, Cluster(2, 2), peers) for columns, peers in (
        (256, COLUMN), (64, ROW), (256, "")))
    assert wide.part == (2, 64) and narrow.part == (1, 32) and alone.part == (4, 64)
    assert [one.map_spec.box for one in (wide, narrow)] == [(64, 64), (64, 32)]


def test_blocks_of_a_launch_are_whole_clusters() -> None:
    big = np.zeros((1000, 1000), np.float16)
    for cluster, size, most in (({}, 1, 132), ({"m": 2}, 2, 132), ({"m": 2, "n": 2}, 4, 120)):
        plan = listing.gemm.plan(big, big, np.zeros_like(big), mapping=laid(cluster))
        assert plan.launchable.cluster == size and plan.blocks == most and plan.cluster.size == size
    few = listing.gemm.plan(A, B, D, mapping=laid({"n": 4}))
    assert few.blocks == 4 and "clusters of 1 x 4" in few.text
    assert listing.gemm.plan(A, B, D, mapping=few.mapping).text == few.text
    assert eval(repr(few.mapping), {"Mapping": gk.Mapping}) == few.mapping
    assert hash(gk.Mapping(cluster={"m": 2})) != hash(gk.Mapping(cluster={"n": 2}))


def test_a_cluster_of_one_is_none() -> None:
    one, none = (listing.gemm.plan(A, B, D, mapping=gk.Mapping(cluster=cluster)) for cluster in ({"m": 1, "n": 1}, {}))
    assert one.text == none.text and "cluster" not in one.text


@pytest.mark.parametrize("cluster", [{"m": 3}, {"m": 8}, {"m": 4, "n": 2}, {"m": 0}, {"m": "2"}, {2: 2}, {"n": True}], ids=str)
def test_clusters_that_are_none(cluster: Any) -> None:
    with pytest.raises(gk.ConfigError, match=r"Mapping\(cluster=.*1, 2 or 4 by the names of a tile's indices"):
        gk.Mapping(cluster=cluster)


def test_what_has_no_clusters() -> None:
    with pytest.raises(gk.ConfigError, match="along a tile's rows and columns, m and n"):
        listing.gemm.plan(A, B, D, mapping=gk.Mapping(cluster={"k": 2}))


@pytest.mark.parametrize("cluster", [{"m": 2}, {"n": 2}, {"m": 2, "n": 2}, {"m": 4}], ids=str)
def test_what_a_plan_says_derives_its_text(cluster: dict[str, int]) -> None:
    """Of many tiles, whose bands have several rows of clusters."""
    x = [np.zeros((4096, 4096), np.float16) for _ in range(3)]
    plan = listing.gemm.plan(*x, mapping=gk.Mapping(cluster=cluster))
    assert plan.mapping.band > 4 and listing.gemm.plan(*x, mapping=plan.mapping).text == plan.text


# ==========================================================================================================================
# Tiles of whole rows in clusters, whose blocks share what has none of a tile's rows by multicast.


@pytest.mark.kin(1)
@pytest.mark.sample(24, at=4)
@pytest.mark.parametrize("seed", range(120))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = chains.drawn_clusters(seed)
    why = chains.NO_SHARES.get(program.function.__name__, "") if mapping.splits else ""
    with assumed(FEW):
        try:
            plan = check_of_chain_clusters(program, arrays, mapping, seed, **more)
        except gk.ConfigError as error:
            assert (why and why in str(error)) or "blocks bring a part each" in str(error), str(error)
            return
        assert program.plan(*arrays, mapping=plan.mapping, **more).text == plan.text
    assert plan.cluster.m == mapping.cluster["m"] and plan.blocks % plan.cluster.size == 0


@pytest.mark.kin(1)
@pytest.mark.sample(14)
@pytest.mark.parametrize("visible", [chains.causal, chains.window, chains.between], ids=["causal", "window", "between"])
@pytest.mark.parametrize("rows", [1, 64, 65, 128, 129, 200, 256, 257])
@pytest.mark.parametrize("cluster", [2, 4])
def test_tiles_beyond_the_end_take_part(rows: int, cluster: int, visible: Any) -> None:
    """And those whose neighbours see more places than they do."""
    rng = np.random.default_rng(rows)
    q, k, v = (chains.half(rng, 1, extent, 64) for extent in (rows, 170, 170))
    with assumed(FEW):
        check_of_chain_clusters(listing.attention, [q, k, v, chains.empty(1, rows, 64)],
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
