"""The table of measured mappings that ships: what takes an entry, what does not, and that each entry is legal."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from bench import winners as made
from gemmkit.runtime.device import A100, H100, DeviceInfo, assumed
from gemmkit.tuning import candidates
from gemmkit.tuning.candidates import Candidate, Winner

DTYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
ONE = Winner("float16 nn 128 128 d", (512, 512, 512), Candidate("singlestage", (64, 64, 64), (32, 32)), 0.8)


def operands(dtype: Any, orders: str, sizes: tuple[int, int, int]) -> tuple[Any, Any]:
    M, N, K = sizes
    a, b = (np.empty(shape if order == "n" else shape[::-1], dtype) for shape, order in zip(((M, K), (K, N)), orders))
    return a if orders[0] == "n" else a.T, b if orders[1] == "n" else b.T


def config_of(a: Any, b: Any, device: DeviceInfo = H100, **keywords: Any) -> Any:
    """What is chosen now: `gemmkit.matmul` keeps the plan of a call before."""
    with assumed(device), gk.emulate(mapping="device"):
        return gk.plan(a, b, **keywords).config


@pytest.mark.parametrize("one", candidates.table(), ids=lambda one: f"{one.kind} {one.sizes}")
def test_each_entry_is_what_its_product_takes_and_the_model_does_not(one: Winner) -> None:
    dtype, orders, *_ = one.kind.split()
    a, b = operands(DTYPES[dtype], orders, one.sizes)
    config = config_of(a, b)
    assert (config.kernel, config.block_shape.extents) == (one.candidate.kernel, one.candidate.block)
    with candidates.without():
        assert config_of(a, b).mapping != config.mapping
    assert one.ratio <= made.WORTH
    near = tuple(size + 64 if size >= 512 else size for size in one.sizes)               # and so do its neighbours
    assert candidates.nearest([one], one.kind, near) is one
    assert config_of(*operands(DTYPES[dtype], orders, near)).kernel                      # of another class, perhaps: legal


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "of_class", lambda file, kind: (ONE,))


def test_a_product_takes_the_nearest_entry_of_its_class(only: None) -> None:
    for sizes in ((512, 512, 512), (576, 448, 512)):
        assert config_of(*operands(np.float16, "nn", sizes)).kernel == "singlestage"
    assert config_of(*operands(ml_dtypes.bfloat16, "nn", (512, 512, 512))).kernel == "singlestage"
    for orders, sizes in (("nn", (640, 512, 512)), ("nt", (512, 512, 512)), ("nn", (512, 504, 512)), ("nn", (512, 512, 511))):
        assert config_of(*operands(np.float16, orders, sizes)).kernel != "singlestage", (orders, sizes)


def test_what_is_said_stands_above_the_table(only: None) -> None:
    a, b = operands(np.float16, "nn", (512, 512, 512))
    wide, odd = np.empty((512, 512), np.float32), np.empty((512, 520), np.float16)[:, :512]
    for keywords in (dict(out=wide), dict(out=odd), dict(c=np.empty((512, 512), np.float16)), dict(epilogue=gk.epilogues.ReLU()),
                     dict(operator=gk.operators.WGMMAOp(128))):
        assert config_of(a, b, **keywords).kernel != "singlestage", keywords
    assert config_of(np.empty((3, 512, 512), np.float16), b).kernel != "singlestage"
    few = dataclasses.replace(H100, sm_count=114)
    assert config_of(a, b, few).kernel != "singlestage" and config_of(a, b, A100).kernel == "multistage"


def test_the_nearest_is_taken() -> None:
    other = dataclasses.replace(ONE, sizes=(600, 512, 512))
    assert candidates.nearest([ONE, other], ONE.kind, (570, 512, 512)) is other
    assert candidates.nearest([ONE, other], ONE.kind, (530, 512, 512)) is ONE
    assert candidates.nearest([ONE, other], "float16 nt 128 128 d", (530, 512, 512)) is None


def test_the_table_is_made_of_results() -> None:
    fast = dict(name="", mapping=Candidate("singlestage", (64, 64, 64), (32, 32), blocks_per_sm=2).plain(), ratio=0.7)
    row = dict(dtype="f16", m=512, n=512, k=512, layout="nn", tried=[fast, dict(fast, ratio=0.99), dict(name="", error="wrong")])
    found, = made.entries([row, dict(row, tried=[dict(fast, ratio=0.95)]), dict(row, tried=[])])
    assert (found.kind, found.sizes, found.ratio) == (ONE.kind, (512, 512, 512), 0.7)
    assert made.apart([dataclasses.replace(found, sizes=(560, 512, 512), ratio=0.9), found]) == [found]


def test_what_the_model_chooses_is_no_entry() -> None:
    a, b = operands(np.float16, "nn", (512, 512, 512))
    with candidates.without():
        config = config_of(a, b)
    block, cluster = config.block_shape.extents, config.cluster.extents
    chosen = Candidate("warp_specialised", block, schedule=config.schedule, warps=config.warps_per_block, cluster=cluster,
                       producer_warps=config.producer_warps, group=getattr(config.order, "group", 0), splits=config.splits)
    row = dict(dtype="f16", m=512, n=512, k=512, layout="nn", tried=[dict(name="", mapping=chosen.plain(), ratio=0.8)])
    assert list(made.entries([row])) == []


def test_what_lost_nearby_is_no_entry() -> None:
    """A mapping that gained at one size, and lost at another that it would stand for."""
    fast = dict(name="", mapping=ONE.candidate.plain(), ratio=0.7)
    near = dict(dtype="f16", m=560, n=512, k=512, layout="nn", tried=[dict(fast, ratio=1.1)])
    one, = made.entries([dict(near, m=512, tried=[fast])])
    assert not made.holds(one, [near])
    assert made.holds(one, [dict(near, tried=[dict(fast, ratio=1.01)]), dict(near, m=700), dict(near, layout="nt")])
