"""Stream-K: k-tiles dealt evenly to blocks that stay. Sums are right, the same in every run, and met in order.

Values are small whole numbers where a result is compared bit for bit, so that every order of sums gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.collectives import scheduler, split_k
from gemmkit.kernels.collectives.scheduler import Cluster, Columns, OneTilePerBlock
from gemmkit.kernels.collectives.split_k import HandedOver, Streamed, StreamK, division
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, RowMajor, Triangular
from gemmkit.operators import MIN_PLUS, FPUOp, MMAOp
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from gemmkit.tuning import sm80
from gemmkit.tuning.model import Asked
from tests.support.machines import on_machines, poison, whole
from tests.support.sm80 import KINDS, expected, mapping, operands

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
ORDERS = {"n": RowMajor, "t": ColMajor}


def mapped(blocks: int | None, waves: int = 2, operator: Any = None, **fields: Any) -> Any:
    operator = operator or MMAOp()
    dtype = operator.fragment_a.dtype
    given = dict(operator=operator, global_a_layout=RowMajor(dtype), kernel="multistage", splits=StreamK(blocks, waves),
                 global_d_layout=RowMajor(operator.fragment_c.dtype), block_shape=Tile(M=16, N=16, K=32), stages=2)
    return gk.get_config(**{**given, **fields})


def product(machine: Any, conf: Any, a: np.ndarray, b: np.ndarray, c: Any = None, seed: int | None = None,
            **fields: Any) -> np.ndarray:
    out = machine.array(poison((*a.shape[:-1], b.shape[-1]), conf.global_d_layout.dtype))
    with gk.emulate(seed) if machine.emulated else machine.session():
        gk.matmul(machine.array(a), machine.array(b), None if c is None else machine.array(c), conf, out=out, **fields)
    return np.asarray(machine.numpy(out))


# -- who has which k-tiles --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("tiles, steps", [(1, 1), (1, 9), (3, 5), (4, 4), (9, 3), (23, 2), (8, 1)])
def test_every_k_tile_is_once_and_who_waits_comes_behind(blocks: int, waves: int, tiles: int, steps: int,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Each k-tile is one block's; a block hands over first of all; who finishes a tile finds the others' sums by number."""
    launched, first = division(tiles, steps, blocks, waves)
    at = {}
    monkeypatch.setattr(scheduler, "block_x", lambda: at["block"])
    reduction = HandedOver(1, np.zeros(1, F32), np.zeros(1, "u4"))
    cluster = Cluster(2, 2) if tiles % 2 else Cluster()                      # of which any block has the cluster's parts
    whole = OneTilePerBlock(Columns(), Tile(M=16, N=16, K=32), cluster)
    one = Streamed.of(whole, reduction, tiles, steps, first, launched)
    found, shares = [], []
    for block in range(launched):
        at["block"], begin, parts = block * cluster.size + block % cluster.size, None, []
        begin = one.begin()
        while begin < one.end(None):
            part = replace(one, at=begin)
            parts.append((part.first(), part.rank(), part.length()))
            begin = one.following(begin, one.step())
        assert all(rank == 0 for _, rank, _ in parts[1:])
        found += [(tile, rank + k) for tile, rank, count in parts for k in range(count)]
        shares.append(sum(count for tile, _, count in parts if tile < first))
    assert sorted(found) == [(tile, k) for tile in range(tiles) for k in range(steps)]
    assert max(shares) - min(shares) <= 1 and (first == 0 or waves == 1 or tiles < launched or min(shares) >= steps)


def test_the_division() -> None:
    assert division(0, 8, 132) == (0, 0) and division(132, 8, 132) == (132, 0)
    assert division(136, 8, 132) == (132, 136) and division(136, 8, 132, waves=1) == (132, 4)
    assert division(300, 8, 132) == (132, 168)                               # 36 more than a wave, and a wave with them
    assert division(2, 8, 132, least=4) == (4, 2) and division(2, 8, 132) == (16, 2)


# -- results ----------------------------------------------------------------------------------------------------------

SHAPES = [(48, 48, 160), (17, 19, 331), (16, 16, 512), (1, 1, 97), (80, 16, 96), (33, 16, 32), (33, 16, 1), (33, 16, 0), (0, 7, 64)]


@pytest.mark.kin(5)
@pytest.mark.sample(72)
@on_machines
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_blocks(machine: Any, blocks: int, waves: int, shape: tuple, rng: np.random.Generator) -> None:
    """Blocks that divide nothing, one tile, fewer tiles than blocks, more blocks than k-tiles."""
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    assert np.array_equal(product(machine, mapped(blocks, waves), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("operator", [FPUOp(16, 16), FPUOp(16, 16, dtype=F64), MMAOp(dtype=F64), MMAOp(accumulator=F16), MMAOp(dtype="i1")],
                         ids=["f32", "f64", "dmma", "f16", "s8"])
def test_operators(machine: Any, operator: Any, orders: str, rng: np.random.Generator) -> None:
    dtype = operator.fragment_a.dtype
    a, b = whole(rng, (33, 140), dtype, 1), whole(rng, (140, 16), dtype, 1)
    conf = mapped(4, operator=operator, global_a_layout=ORDERS[orders[0]](dtype), global_b_layout=ORDERS[orders[1]](dtype))
    a, b = (x if order == "n" else np.asfortranarray(x) for x, order in zip((a, b), orders))
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("kind", ["min-plus", "c64", "c128"])
def test_semirings_and_complex_numbers(machine: Any, kind: str, rng: np.random.Generator) -> None:
    a, b = whole(rng, (17, 70), F32), whole(rng, (70, 16), F32)
    if kind == "min-plus":
        conf = mapped(3, operator=replace(MIN_PLUS, M=16, N=16, MB=8, NB=4))
        assert np.array_equal(product(machine, conf, a, b), (a[:, :, None] + b[None]).min(1))
        return
    operator = KINDS[kind]
    u, v = operands(rng, operator, 17, 16, 70)
    assert np.array_equal(product(machine, mapping(operator, splits=StreamK(3)), u, v), expected(operator, u, v))


@pytest.mark.kin(5)
@on_machines
def test_c_and_the_epilogue_count_once(machine: Any, rng: np.random.Generator) -> None:
    """And transforms see the coordinates that they would; operands are views."""
    a, b, c = whole(rng, (20, 200), F16), whole(rng, (200, 34), F16), whole(rng, (20, 34), F32)
    bias = whole(rng, (34,), F32)
    result = np.maximum((a * np.arange(20)[:, None]).astype(F64) @ b.astype(F64) + c + bias, 0)
    conf = mapped(3, global_c_layout=RowMajor(F32), epilogue=Bias(machine.array(bias)) | ReLU(),
                  transform_shared_to_regs_a=Elementwise(lambda x, i, k: x * i))
    assert np.array_equal(product(machine, conf, a, b, c), result)
    wide = machine.array(np.repeat(b, 2, axis=1))
    out = machine.array(poison((40, 34), F32))
    with machine.session():
        gk.matmul(machine.array(a), wide[:, ::2], None, mapped(3), out=out[::2])
    assert np.array_equal(machine.numpy(out)[::2], a.astype(F64) @ b.astype(F64)) and np.isnan(machine.numpy(out)[1::2]).all()


@dataclass(frozen=True)
class Nearby(Condition):
    """Leaves out k-tiles that lie far from the diagonal."""

    def __call__(self, m: Any, n: Any, k: Any) -> Any:
        return abs(m - k) < 64


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("blocks", [2, 5])
def test_stacks(machine: Any, blocks: int, rng: np.random.Generator) -> None:
    """Tiles of several products share one stream."""
    a, b = whole(rng, (3, 17, 70), F16), whole(rng, (3, 70, 18), F16)
    assert np.array_equal(product(machine, mapped(blocks), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@on_machines
def test_structure(machine: Any, rng: np.random.Generator) -> None:
    """Where k-tiles are left out shares are not equal, and sums are right."""
    a, b = whole(rng, (100, 100), F16), whole(rng, (100, 16), F16)
    conf = mapped(5, global_a_layout=Triangular(RowMajor(F16)), global_b_layout=RowMajor(F16))
    assert np.array_equal(product(machine, conf, a, b), np.tril(a).astype(F64) @ b.astype(F64))
    kept = np.array([[abs(m // 16 * 16 - k // 32 * 32) < 64 for k in range(100)] for m in range(100)])
    assert np.array_equal(product(machine, mapped(5, condition=Nearby()), a, b), (a * kept).astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@on_machines
def test_the_same_bits_in_every_run(machine: Any, rng: np.random.Generator) -> None:
    """Whatever order blocks come in (in the emulator, shuffled)."""
    a, b = rng.standard_normal((48, 400)).astype(F16), rng.standard_normal((400, 16)).astype(F16)
    found = {product(machine, mapped(7), a, b, seed=seed).tobytes() for seed in range(3 if machine.emulated else 50)}
    assert len(found) == 1


@pytest.mark.kin(5)
@on_machines
def test_counters_are_ready_for_the_next_launch(machine: Any, rng: np.random.Generator) -> None:
    with machine.session():
        runs = []
        for m, n, k in [(16, 16, 300), (24, 20, 100)]:
            a, b = machine.array(whole(rng, (m, k), F16)), machine.array(whole(rng, (k, n), F16))
            runs.append((gk.plan(a, b, None, mapped(4)), a, b))
        for _ in range(2):
            for run, a, b in runs:
                assert np.array_equal(machine.numpy(run(a, b)), machine.numpy(a).astype(F64) @ machine.numpy(b).astype(F64))
        if machine.emulated:
            for run, _, _ in runs:
                assert not run._compiled.spec_on_host.reduction.counts.any()


# -- what is launched, and what is refused ------------------------------------------------------------------------------

def planned(conf: Any, m: int = 16, n: int = 16, k: int = 96) -> Any:
    a, b = np.zeros((m, k), conf.global_a_layout.dtype), np.zeros((k, n), conf.global_b_layout.dtype)
    with gk.emulate():
        return gk.plan(a, b, None, conf)._compiled


def test_blocks_wait_and_are_as_many_as_are_resident() -> None:
    found = planned(mapped(None, blocks_per_sm=2), 1024, 1024)
    assert found.launchable.waits and not found.launchable.dependent and found.blocks == 2 * H100.sm_count
    assert planned(mapped(None), 16, 16, 32 * 40).blocks == 10                       # shares of four k-tiles
    assert planned(mapped(3), 16, 16, 32 * 40).blocks == 3
    kinds = [planned(mapped(n), k=k).arguments[0].fingerprint for n, k in ((2, 64), (5, 640))]
    assert kinds[0] == kinds[1]                                                      # another number compiles nothing


def test_rules() -> None:
    for bad in (0, -1, 1.5, True, "4"):
        with pytest.raises(ValueError, match=r"StreamK\(blocks="):
            StreamK(bad)                                                             # type: ignore[arg-type]
    for bad in (0, 3, None):
        with pytest.raises(ValueError, match=r"StreamK\(.*waves="):
            StreamK(2, bad)                                                          # type: ignore[arg-type]
    with pytest.raises(gk.ConfigError, match=r"splits=StreamK\(.*multistage"):
        gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), kernel="singlestage", splits=StreamK())
    with pytest.raises(gk.ConfigError, match=r"splits=StreamK\(blocks=100000.*take fewer blocks"):
        planned(mapped(100_000))
    with pytest.raises(gk.ConfigError, match="splits=.*the tiles of a group"), gk.emulate():
        gk.grouped([np.ones((4, 4), F16)], [np.ones((4, 4), F16)], conf=mapped(3))

    @dataclass(frozen=True)
    class Last(FPUOp):
        """Its sum is its last term."""

        def combine(self, x: Any, y: Any) -> Any:
            return y

    with pytest.raises(gk.ConfigError, match="splits=StreamK"):
        mapped(3, operator=Last(16, 16))


def chosen(dtype: Any, sizes: tuple[int, int, int], **fields: Any) -> Any:
    layout = fields.pop("layout", RowMajor(dtype))
    found = sm80.propose(Asked({}, dict(a=layout, b=RowMajor(dtype), c=None, d=None), sizes, fields), H100)
    assert found is not None
    return found[1]["splits"]


def test_where_it_is_chosen() -> None:
    """Where the last wave is nearly empty: 1536^3 measured 1.17 of cuBLAS streamed and 0.95 without (f32), 1.02 and 0.90 (f64)."""
    for dtype in (F32, F64):
        assert isinstance(chosen(dtype, (1536, 1536, 1536)), StreamK)
        assert chosen(dtype, (4096, 4096, 4096)) == chosen(dtype, (2048, 2048, 2048)) == 1       # whole waves
        assert not isinstance(chosen(dtype, (64, 64, 65536)), StreamK)                           # one tile: shares
    assert chosen(np.dtype(np.complex128), (1536, 1536, 1536)) == 1                              # no faster: not in the list


def test_operands_that_leave_k_tiles_out_are_not_streamed() -> None:
    """Shares are dealt as if all k-tiles took as long."""
    sizes = (1536, 1536, 1536)
    assert chosen(F32, sizes, layout=Triangular(RowMajor(F32), "lower")) == 1
    assert chosen(F32, sizes, transform_global_to_shared_a=Elementwise(lambda x: x + 1)) == 1


# -- seeded faults ------------------------------------------------------------------------------------------------------

def run_small() -> np.ndarray:
    rng = np.random.default_rng(3)
    a, b = whole(rng, (32, 200), F16), whole(rng, (200, 16), F16)
    with gk.emulate():
        d = gk.matmul(a, b, None, mapped(5, warps_per_block=1))
    return np.asarray(d - a.astype(F64) @ b.astype(F64))


FAULTS: dict[str, tuple[str, Any, Any]] = {
    "a signal dropped": ("atomic_add", lambda real: lambda *given: 0, errors.DeadlockError),
    "a signal that releases nothing": ("atomic_add", lambda real: lambda view, at, n, how: real(view, at, n, "relaxed"), errors.RaceError),
    "a wait dropped": ("await_counter", lambda real: lambda *given: None, (errors.RaceError, errors.UninitialisedRead)),
    "a wait that acquires nothing": ("await_counter", lambda real: lambda view, at, n, how: real(view, at, n, "relaxed"),
                                     errors.RaceError),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_small().any()
    name, wrong, error = FAULTS[what]
    monkeypatch.setattr(split_k, name, wrong(getattr(split_k, name)))
    with pytest.raises(error):
        run_small()


def test_counters_that_are_not_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch would not wait."""
    monkeypatch.setattr(split_k, "set_counter", lambda *given: None)
    a, b = np.ones((32, 200), F16), np.ones((200, 16), F16)
    with gk.emulate(), pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        run = gk.plan(a, b, None, mapped(5, warps_per_block=1))
        run(a, b)
        assert run._compiled.spec_on_host.reduction.counts.any()
        run(a, b)


# -- compiled -----------------------------------------------------------------------------------------------------------

@pytest.mark.thorough
@pytest.mark.compile
def test_code() -> None:
    """No spill, vectors of 16 bytes to the workspace and back, one addition to a counter, one main loop."""
    conf = mapped(None, block_shape=Tile(M=64, N=64, K=32), stages=3)
    found = compile_config(conf, gemm_shape=dict(M=1024, N=1024, K=1024))
    alone = compile_config(replace(conf, splits=1), gemm_shape=dict(M=1024, N=1024, K=1024))
    assert found.usage.spill_stores == found.usage.spill_loads == found.usage.stack_bytes == 0
    assert found.instructions["REDG"] == 1 and found.instructions["ATOMG"] == 0
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass
    assert found.instructions["HMMA"] == alone.instructions["HMMA"]
