"""`choose`: what is given, what is tuned, and the first candidate that can be taken; small, gathered and empty products; the
table that ships."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from bench import winners as made
from gemmkit import operators
from gemmkit.lang.errors import ConfigError
from gemmkit.operators import MIN_PLUS, MMAOp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import A100, H100, T4, DeviceInfo, assumed
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning import candidates, store
from gemmkit.tuning import choose as choosing
from gemmkit.tuning.candidates import Candidate, Winner
from gemmkit.tuning.problems import Choice, MappingProblem, choose
from tests.support.machines import BF16
from tests.support.patches import Seeded

# ==========================================================================================================================
# `choose`: what is given, then what is tuned, then the first candidate that can be taken.


class Held:
    """What a spec is made for."""


class Halving(MappingProblem):
    """Mappings are numbers, of which those above a limit do not fit."""

    def __init__(self, limit: int, tuned: bool = False):
        self.limit, self.asked, self.held = limit, list[int](), Held()
        if tuned:
            self.key = lambda: "halving"

    read = staticmethod(int)

    def candidates(self, device: Any) -> Iterator[int]:
        for n in (64, 32, 16, 8):
            self.asked.append(n)
            yield n

    def specialise(self, mapping: int, device: Any) -> Choice:
        held = self.held                               # (a frame of the error's)
        if mapping > self.limit:
            raise ConfigError(f"{mapping} of {type(held).__name__} do not fit {device.name}")
        return Choice(("spec", mapping))


def test_the_first_candidate_that_fits_is_taken_and_no_further_one_is_asked_for() -> None:
    problem = Halving(20)
    assert choose(problem, H100) == (("spec", 16), "model", False)
    assert problem.asked == [64, 32, 16]


def test_a_mapping_that_is_given_is_taken_or_refused() -> None:
    problem = Halving(20, tuned=True)
    assert choose(problem, H100, 5).spec == ("spec", 5)
    with pytest.raises(ConfigError, match="64 of Held do not fit"):
        choose(problem, H100, 64)
    assert not problem.asked


def test_where_nothing_fits_the_last_reason_is_said() -> None:
    with pytest.raises(ConfigError, match="^8 of Held do not fit"):
        choose(Halving(7), H100)


def test_a_tuned_mapping_stands_before_candidates_and_one_that_does_not_fit_is_told(replaced: Seeded) -> None:
    kept = {"halving": "12"}
    replaced(store, "find", lambda device, key, read: read(kept[key()]))
    problem = Halving(20, tuned=True)
    assert choose(problem, H100) == (("spec", 12), "tuned", False) and not problem.asked
    told: list[Any] = []
    replaced(store, "refused", lambda device, mapping, error: told.append((mapping, str(error))))
    kept["halving"] = "50"
    assert choose(problem, H100).spec == ("spec", 16)
    assert told == [(50, f"50 of Held do not fit {H100.name}")]


def test_what_was_refused_keeps_nothing_alive() -> None:
    problem = Halving(20)
    seen = weakref.ref(problem.held)
    gc.disable()
    try:
        choose(problem, H100)
        del problem
        assert seen() is None
    finally:
        gc.enable()


# ==========================================================================================================================
# The table of measured mappings that ships: what takes an entry, what does not, and that each entry is legal.

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
def only(replaced: Seeded) -> None:
    replaced(candidates, "of_class", lambda file, kind: (ONE,))


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


# ==========================================================================================================================
# What the emulator takes where nobody names a mapping: the GPU's kernel and arithmetic, in a tile that fits the problem.

DTYPES_SMALL = ["f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16", "i1", "i4"]


def planned(a: Any, b: Any, mapping: str, **fields: Any) -> Any:
    with gk.emulate(mapping=mapping):
        return gk.plan(a, b, **fields)


@pytest.mark.parametrize("device", [H100, A100, T4], ids=["H100", "A100", "T4"])
@pytest.mark.parametrize("dtype", DTYPES_SMALL, ids=lambda dtype: np.dtype(dtype).name)
def test_the_kernel_and_its_arithmetic_are_the_devices(dtype: Any, device: Any) -> None:
    """Threads are fewer, and two warps at least: one alone would hide what goes wrong between them."""
    for M, N, K in ((3, 5, 4), (64, 64, 64), (17, 200, 90), (1, 1, 1), (300, 20, 7)):
        a, b = np.zeros((M, K), dtype), np.zeros((K, N), dtype)
        with assumed(device):
            small, large = (planned(a, b, mapping) for mapping in ("small", "device"))
        assert small.config.kernel == large.config.kernel and type(small.config.operator) is type(large.config.operator)
        for name in ("fragment_a", "fragment_b", "fragment_c"):
            assert getattr(small.config.operator, name).dtype == getattr(large.config.operator, name).dtype
        assert small.config.global_d_layout == large.config.global_d_layout and small.config.splits == 1
        assert small.config.warps_per_block >= 2
        threads = [plan._compiled.launchable.blocks * plan._compiled.launchable.threads for plan in (small, large)]
        assert threads[0] <= threads[1] or small.config == large.config, (M, N, K)


def test_the_mappings_of_two_modes_are_two_plans(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((20, 9)).astype("f4"), rng.standard_normal((9, 7)).astype("f4")
    for mapping in ("small", "device", "small"):
        with gk.emulate(mapping=mapping):
            np.testing.assert_allclose(gk.matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)
    assert planned(a, b, "small").config.block_shape.count < planned(a, b, "device").config.block_shape.count


@pytest.mark.parametrize("fields", [
    dict(operator=operators.FPUOp(M=16, N=32)), dict(operator=operators.MMAOp(dtype="float32"))], ids=["FPUOp", "MMAOp"])
def test_an_operator_with_a_shape_is_a_part_of_a_mapping(fields: dict[str, Any]) -> None:
    a = np.zeros((8, 8), "f4")
    small, device = (planned(a, a, mapping, **fields).config for mapping in ("small", "device"))
    assert small.operator == device.operator
    if not isinstance(small.operator, operators.FPUOp):                       # its tiles may be smaller all the same
        assert small == device


def test_a_configuration_is_taken_as_it_is() -> None:
    a = np.zeros((8, 8), "f4")
    conf = gk.get_config(operator=operators.FPUOp(), global_a_layout=gk.layouts.RowMajor("f4"), block_shape=Tile(M=64, N=64, K=16))
    assert planned(a, a, "small", conf=conf).config == conf


def test_semirings_have_the_lanes_of_small_tiles() -> None:
    a = np.zeros((9, 12), "f4")
    small, large = (planned(a, a.T, mapping, operator=operators.MIN_PLUS) for mapping in ("small", "device"))
    assert small.config.operator.M < large.config.operator.M and type(small.config.operator) is type(large.config.operator)


@pytest.mark.parametrize("mapping", ["gpu", None, 3])
def test_another_mapping_is_refused(mapping: Any) -> None:
    with pytest.raises(ValueError, match=r"mapping=.*: 'small' \(a tile that fits the problem\) or 'device'"), gk.emulate(mapping=mapping):
        pass


# ==========================================================================================================================
# Which products whose rows TMA cannot take go to which kernel, where they are computed as they are; the others stay where
# they are.


def kernel_of(sizes: tuple[int, int, int], orders: str = "nn", dtype: str = "f2", **keywords: object) -> str:
    M, N, K = sizes
    a, b = (np.empty(shape if order == "n" else shape[::-1], dtype) for shape, order in zip(((M, K), (K, N)), orders))
    with gk.emulate(mapping="device"):
        plan = gk.plan(a if orders[0] == "n" else a.T, b if orders[1] == "n" else b.T, **keywords)
    return str(plan.config.kernel)


@pytest.mark.parametrize(("sizes", "orders", "kernel"), [
    ((14, 1447, 55), "tt", "singlestage"), ((648, 5649, 11), "nn", "singlestage"), ((1, 1, 3), "nn", "singlestage"),
    ((500, 500, 500), "nn", "multistage"), ((480, 1344, 356), "nt", "multistage"),
    ((501, 501, 501), "nn", "warp_specialised"), ((64, 51, 289), "tn", "warp_specialised"),       # at 2 bytes
    ((40, 1000, 333), "nn", "warp_specialised"), ((3001, 201, 6001), "nt", "multistage"), ((201, 3001, 6001), "nn", "multistage"),
    ((36, 256, 389), "nn", "multistage"), ((3, 64, 524), "tt", "multistage"), ((1695, 3023, 376), "tn", "warp_specialised"),
    ((8192, 8192, 2050), "nt", "warp_specialised"), ((4098, 4098, 4098), "nt", "multistage"),         # rows at 4 bytes, large
    ((8192, 8192, 33), "nn", "warp_specialised"), ((4101, 4101, 4101), "nn", "warp_specialised"),     # large
    ((4299, 64, 3328), "tn", "multistage"), ((2964, 64, 3167), "nt", "multistage"), ((64, 2964, 3167), "nt", "multistage"),
    ((192, 18, 256), "nn", "multistage"), ((160, 384, 1542), "nt", "multistage"), ((218, 1088, 64), "tt", "multistage"),
    ((11898, 683, 514), "tt", "multistage"), ((36, 5952, 2304), "tn", "multistage"),                  # at 4 and 8
    ((3840, 6088, 78), "nt", "warp_specialised"), ((384, 6496, 742), "nn", "warp_specialised"),       # D by TMA
    ((320, 11264, 1258), "nt", "multistage"), ((8192, 8190, 766), "nt", "multistage"),                # but K is long, or not
    ((270, 8, 3584), "tt", "multistage"), ((2964, 65, 3167), "nt", "warp_specialised"),         # few tiles, and wide
    ((64, 64, 64), "nn", "warp_specialised"), ((512, 512, 512), "nn", "warp_specialised"),            # TMA takes them
    ((0, 5, 3), "nn", "warp_specialised"),
])
def test_on_hopper(sizes: tuple[int, int, int], orders: str, kernel: str, replaced: Seeded) -> None:
    replaced(choosing, "WORTH_COPYING", 0.0)
    with assumed(H100), candidates.without():
        assert kernel_of(sizes, orders) == kernel


def test_what_the_caller_says_stands() -> None:
    with assumed(H100):
        assert kernel_of((14, 1447, 55), operator=gk.operators.WGMMAOp(64)) == "warp_specialised"
        assert kernel_of((14, 1447, 55), transform_global_to_shared_a=Map(abs)) == "warp_specialised"
        assert kernel_of((500, 500, 500), operator=MMAOp()) == "singlestage"
        assert kernel_of((14, 1447, 55), dtype="f4") == "multistage"
        assert kernel_of((14, 1447, 55), epilogue=gk.epilogues.ReLU()) == "singlestage"
    with assumed(A100):
        assert kernel_of((14, 1447, 55)) == "multistage"


# ==========================================================================================================================
# A product over no k has a mapping: its tiles hold the identity, which the epilogue and C still meet.

DTYPES_WITHOUT_K = ["f2", BF16, "f4", "f8", "c8", "c16", "i1"]


@pytest.mark.parametrize("device", [H100, A100], ids=["H100", "A100"])
@pytest.mark.parametrize("dtype", DTYPES_WITHOUT_K, ids=lambda dtype: np.dtype(dtype).name)
def test_every_size_has_a_mapping(dtype: Any, device: Any) -> None:
    """(Streams of K divided by their shares, of which there are none: 4096 x 8192 of float32 raised ZeroDivisionError.)"""
    for M, N in ((1, 1), (17, 4000), (300, 300), (1536, 1536), (4096, 8192)):
        a, b = np.empty((M, 0), dtype), np.empty((0, N), dtype)
        for given in ({}, {"operator": MIN_PLUS} if np.dtype(dtype) == np.float32 else {}):
            (found,) = recorded(lambda: gk.matmul(a, b, **given), device, zeros=False)
            assert found.problem.K == 0


@pytest.mark.parametrize("device", [H100, A100, T4], ids=["H100", "A100", "T4"])
@pytest.mark.parametrize("dtype", [*DTYPES_WITHOUT_K, "i4"], ids=lambda dtype: np.dtype(dtype).name)
def test_a_stack_of_no_products(dtype: Any, device: Any) -> None:
    """What shares K asks how many tiles there are."""
    for M, N, K in ((513, 65, 17), (17, 33, 4096), (0, 65, 17), (513, 0, 17), (513, 65, 0), (0, 0, 0)):
        a, b = np.empty((0, M, K), dtype), np.empty((0, K, N), dtype)
        assert recorded(lambda: gk.matmul(a, b), device) == []
        with gk.emulate():
            assert gk.matmul(a, b).shape == (0, M, N)
