"""The timeline of an emulated run: what waits for what, and how long by the lengths that are assumed."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import RowMajor
from gemmkit.operators import MMAOp, WGMMAOp
from gemmkit.runtime.device import H100
from gemmkit.tools.figures import warp_tiles
from gemmkit.tools.subject import Run, small_run, small_sizes
from gemmkit.tools.timeline import FINISH, ISSUE, LATENCY, TILE, Timeline, _lanes, drawn
from tests.support.sm90 import mapping


@pytest.fixture(scope="module")
def hopper() -> Run:
    return small_run(mapping("one", WGMMAOp(64)), H100)


def test_a_consumer_waits_for_the_first_copy_and_multiplies_each_k_tile(hopper: Run) -> None:
    found = Timeline(hopper)
    mine = [bar for bar in found.bars if bar.role == "consumer 0"]
    assert mine[0].kind == "wait" and mine[0].what == "waits for full[0], phase 0"
    assert mine[0].end == pytest.approx(ISSUE + LATENCY)
    k_tiles = hopper.sizes[2] // hopper.spec.block.size.K * (hopper.sizes[1] // hopper.spec.block.size.N)
    multiplied = [bar for bar in mine if bar.kind == "multiply"]
    assert [bar.stage for bar in multiplied] == [n % hopper.spec.stages for n in range(k_tiles)]
    assert all(bar.end - bar.start == pytest.approx(TILE) for bar in multiplied)
    assert sum(bar.end - bar.start for bar in mine if bar.kind == "finish") == pytest.approx(FINISH * 2)
    copies = [bar for bar in found.bars if bar.role == "TMA copies"]
    assert len(copies) == k_tiles
    for copy, use in zip(copies, multiplied):
        assert copy.end <= use.start + 1e-9 and copy.stage == use.stage


def test_a_stage_is_filled_again_after_it_was_read(hopper: Run) -> None:
    found, stages = Timeline(hopper), hopper.spec.stages
    used = [bar for bar in found.bars if bar.role == "consumer 0" and bar.kind == "multiply"]
    copies = [bar for bar in found.bars if bar.role == "TMA copies"]
    assert all(copies[n + stages].start >= used[n].end - 1e-9 for n in range(len(copies) - stages))
    assert found.roles == ["producer", "TMA copies", "consumer 0"]
    assert any(bar.what.startswith("waits for empty[") for bar in found.bars if bar.role == "producer")


@pytest.mark.parametrize("sizes, products, wanted", [
    ((40, 72, 200), 1, (40, 72, 200)),                             # less than a tile, and less than once round the ring
    ((4096, 4096, 4096), 1, (64, 256, 384)),                       # a block has several tiles, and K goes round
    ((4096, 128, 128), 1, (64, 128, 128)),                         # one tile a block
    ((4096, 128, 128), 9, (128, 128, 128))])
def test_the_run_is_the_products_own(sizes: tuple[int, int, int], products: int, wanted: tuple[int, int, int]) -> None:
    conf = mapping("one", WGMMAOp(128), block_shape=gk.Tile(M=64, N=128, K=64), stages=4)
    assert small_sizes(conf, H100, sizes, products) == wanted
    if products == 1 and sizes[0] < 64:
        run = small_run(conf, H100, sizes)
        found = Timeline(run)
        assert sum(bar.kind == "multiply" for bar in found.bars if bar.role == "consumer 0") == -(-sizes[2] // 64)
        assert f"all of its {-(-sizes[2] // 64)} k-tiles" in drawn(run)


def test_a_part_of_a_product_is_said_to_be_one(hopper: Run) -> None:
    steps = hopper.sizes[2] // hopper.spec.block.size.K
    part = dataclasses.replace(hopper, asked=(hopper.sizes[0], hopper.sizes[1], 9 * hopper.sizes[2]))
    assert f"the first {steps} of its {9 * steps} k-tiles, which the others repeat" in drawn(part)


def test_bars_of_one_role_do_not_overlap(hopper: Run) -> None:
    found = Timeline(hopper)
    for role in ("producer", "consumer 0"):
        bars = [bar for bar in found.bars if bar.role == role]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(bars))
    lanes = _lanes([bar for bar in found.bars if bar.role == "TMA copies"])
    assert max(lanes.values()) < hopper.spec.stages


def test_warps_that_copy_for_themselves() -> None:
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor("float16"), block_shape=gk.Tile(M=32, N=32, K=32),
                         warps_per_block=2, kernel="multistage", stages=3)
    run = small_run(conf, H100)
    found = Timeline(run)
    k_tiles = run.sizes[2] // 32
    for warp in range(2):
        mine = [bar for bar in found.bars if bar.role == f"warp {warp}"]
        assert [bar.stage for bar in mine if bar.kind == "multiply"] == [n % 3 for n in range(k_tiles)]
        assert any(bar.kind == "wait" and bar.what.startswith("waits for its copies") for bar in mine)
    assert len([bar for bar in found.bars if bar.role == "cp.async copies"]) == k_tiles
    covered = np.zeros((32, 32), int)
    for _, m, n, rows, columns in warp_tiles(run.spec):
        covered[m:m + rows, n:n + columns] += 1
    assert (covered == 1).all()
