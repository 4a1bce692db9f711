"""Clusters that share the K of their tiles by a workspace: any number of shares, beside multicast; sums meet in order.

Values are small whole numbers where a result is compared bit for bit; the order of sums is tested with numbers that round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.kernels.collectives.scheduler import dealt
from gemmkit.kernels.sm90 import exchange
from gemmkit.kernels.sm90.exchange import ClusterExchange, SharedK, WorkspaceExchange
from gemmkit.layouts import ColMajor, Interleaved, RowMajor, Triangular
from gemmkit.operators import COMPLEX, WGMMAOp
from gemmkit.operators.algebra import Algebra
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100, attributes
from gemmkit.tiling import Tile
from tests.support.machines import BF16, MACHINES, on_machines, whole
from tests.support.shared_k import check_counters, check_every_slot, check_stack
from tests.support.sm90 import F16, F32, mapping, product

EMULATOR = MACHINES["emulator"]
F64 = np.dtype("f8")
CLUSTERS = {"1x1": Tile(M=1, N=1), "2x1": Tile(M=2, N=1), "1x2": Tile(M=1, N=2), "2x2": Tile(M=2, N=2)}


def mapped(cluster: str, splits: int, operator: Any = None, *, schedule: str = "", **fields: Any) -> gk.Config:
    """Tiles of 64 rows and k-tiles of 16, in clusters."""
    name = schedule or ("one" if cluster == "1x1" else "one-2x1")        # panels of which two blocks have some each
    return mapping(name, operator, splits=splits, **{**dict(cluster=CLUSTERS[cluster], depth=16, stages=2), **fields})


# -- results ----------------------------------------------------------------------------------------------------------

SHARES = [("1x1", 3), ("1x1", 5), ("1x1", 7), ("1x1", 12), ("1x1", 17), ("2x1", 2), ("2x1", 3), ("2x1", 8), ("1x2", 2), ("1x2", 4),
          ("1x2", 9), ("2x2", 2), ("2x2", 3), ("2x2", 4)]
SHAPES = [(64, 32, 260), (70, 30, 147), (60, 37, 72), (1, 8, 72), (33, 16, 16), (64, 32, 0)]


@pytest.mark.kin(5)
@pytest.mark.sample(84)
@on_machines
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cluster, splits", SHARES)
def test_any_number_of_shares(machine: Any, cluster: str, splits: int, shape: tuple, rng: np.random.Generator) -> None:
    """Shares of k-tiles that do not divide, more shares than k-tiles, and blocks of a cluster that are out of range."""
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    assert np.array_equal(product(machine, mapped(cluster, splits), a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("cluster, splits, shape", [("1x1", 3, (130, 50, 60)), ("2x1", 3, (200, 30, 60)), ("1x2", 2, (140, 30, 60)),
                                                    ("2x2", 2, (130, 37, 60))])
def test_several_tiles_and_consumers(machine: Any, cluster: str, splits: int, shape: tuple, rng: np.random.Generator) -> None:
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    schedule = "two" if cluster == "1x1" else "two-2x1"
    conf = mapped(cluster, splits, schedule=schedule)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", [BF16, F32, np.dtype("i1")], ids=str)
@pytest.mark.parametrize("cluster, splits", [("1x1", 3), ("2x1", 4), ("2x2", 2)])
def test_types(machine: Any, dtype: np.dtype, cluster: str, splits: int, rng: np.random.Generator) -> None:
    a, b = whole(rng, (60, 176), dtype), whole(rng, (176, 32), dtype)
    along = RowMajor if dtype == BF16 else ColMajor
    conf = mapped(cluster, splits, WGMMAOp(32, dtype), b=along, depth=32)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("d, columns", [(RowMajor(F16), 64), (RowMajor(F16), 61), (ColMajor(F16), 64), (RowMajor(F32), 61)], ids=str)
@pytest.mark.parametrize("cluster, splits", [("1x1", 6), ("2x1", 2)])
def test_ways_of_d(machine: Any, cluster: str, splits: int, d: Any, columns: int, rng: np.random.Generator) -> None:
    """By TMA, as vectors, from the registers."""
    a, b = whole(rng, (72, 90), F16), whole(rng, (90, columns), F16)
    conf = mapped(cluster, splits, WGMMAOp(64), d=d)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("columns", [40, 37])
@pytest.mark.parametrize("cluster, splits", [("1x1", 5), ("2x2", 3)])
def test_every_slot_stays_open(machine: Any, cluster: str, splits: int, columns: int, rng: np.random.Generator) -> None:
    """C, a bias and transforms count once, with global coordinates."""
    check_every_slot(machine, partial(mapped, cluster, splits), (60, columns, 90), rng)


@on_machines
def test_a_part_of_k(machine: Any, rng: np.random.Generator) -> None:
    """Of a triangular matrix the k-tiles that are not nothing are dealt out."""
    a, b = whole(rng, (96, 96), F16), whole(rng, (96, 32), F16)
    conf = mapped("1x1", 3, global_a_layout=Triangular(RowMajor(F16)))
    assert np.array_equal(product(machine, conf, a, b), np.tril(a.astype(F64)) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("cluster, splits", [("1x1", 3), ("2x1", 2), ("2x2", 2)])
def test_stacks(machine: Any, cluster: str, splits: int, rng: np.random.Generator) -> None:
    check_stack(machine, mapped(cluster, splits), 2, rng)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("cluster, splits", [("1x1", 11), ("2x1", 4)])
def test_the_same_bits_in_every_run(machine: Any, cluster: str, splits: int, rng: np.random.Generator) -> None:
    """Whatever order blocks come in (in the emulator, shuffled): that of the sums is the order of the shares."""
    a, b = rng.standard_normal((60, 260)).astype(F16), rng.standard_normal((260, 32)).astype(F16)
    conf = mapped(cluster, splits)
    found = [product(machine, conf, a, b, seed=seed) for seed in range(2 if machine.emulated else 50)]
    assert len({d.tobytes() for d in found}) == 1
    ends = [dealt(17, splits, rank)[0] * 16 for rank in range(splits)] + [260]
    parts = [a[:, i:j].astype(F64) @ b[i:j].astype(F64) for i, j in pairwise(ends)]
    assert np.allclose(found[0], sum(parts), rtol=1e-3, atol=1e-3)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("cluster, splits", [("1x1", 7), ("2x1", 3)])
def test_counters_are_ready_for_the_next_launch(machine: Any, cluster: str, splits: int, rng: np.random.Generator) -> None:
    """One plan, launched again; and another of other sizes in between, which finds the same workspace."""
    check_counters(machine, mapped(cluster, splits), [(64, 32, 120), (70, 30, 60)], rng)


# -- which way, and what is refused -----------------------------------------------------------------------------------

def planned(conf: gk.Config, m: int = 64, n: int = 32, k: int = 96) -> Any:
    with gk.emulate():
        return gk.plan(np.zeros((m, k), F16), np.zeros((k, n), F16), None, conf)


@pytest.mark.parametrize("cluster, splits, by_workspace", [("1x1", 2, False), ("1x1", 4, False), ("1x1", 3, True), ("2x1", 2, True),
                                                           ("2x2", 4, True), ("2x2", 1, False)])
def test_which_way(cluster: str, splits: int, by_workspace: bool) -> None:
    conf = mapped(cluster, splits)
    compiled = planned(conf)._compiled
    kind = WorkspaceExchange if by_workspace else ClusterExchange if splits > 1 else None
    assert kind is None or type(compiled.spec.exchange) is kind
    assert compiled.launchable.waits == by_workspace and compiled.launchable.dependent != by_workspace
    assert conf.peers == conf.cluster.count * (1 if by_workspace else splits)
    assert compiled.blocks == splits * conf.cluster.count


@pytest.mark.parametrize("splits, N, line, slices", [(2, 128, 64, 2), (15, 128, 16, 8), (32, 128, 8, 16), (7, 128, 16, 4), (6, 96, 16, 6),
                                                     (12, 192, 16, 12), (9, 24, 8, 3), (9, 32, 32, 1), (40, 256, 64, 4)])
def test_slices_have_whole_panels(splits: int, N: int, line: int, slices: int) -> None:
    assert SharedK(splits, CLUSTERS["2x2"]).slices(N, line) == slices


def test_blocks_that_cannot_all_be_there() -> None:
    """The whole device waits for blocks that find no place: refused, with what would do."""
    run = planned(mapped("2x2", 30))
    assert run._compiled.blocks == 120
    with pytest.raises(gk.ConfigError, match=r"splits=31: 31 clusters of 2x2 blocks .* holds 30 at once; take splits=30 or"):
        planned(mapped("2x2", 31))
    with pytest.raises(gk.ConfigError, match=r"splits=3: 99 clusters of 2x1 .*holds 66 at once; take splits=2 or"):
        planned(mapped("2x1", 3), m=64 * 66)
    with pytest.raises(gk.ConfigError, match=r"splits=3: 300 clusters of 1x1 .*take splits=1, or larger"):
        planned(mapped("1x1", 3), m=6400)


@pytest.mark.parametrize("fields, said", [
    (dict(schedule="pingpong"), "ping-pong"), (dict(operator=WGMMAOp(32, accumulator=F16)), "not exchanged")])
def test_rules(fields: dict, said: str) -> None:
    with pytest.raises(gk.ConfigError, match=said):
        mapped("1x1", 3, **fields)


def test_numbers_of_several_parts_do_not_share_k() -> None:
    number = COMPLEX.number_dtype("f2")
    with pytest.raises(gk.ConfigError, match="several parts are not exchanged"):
        gk.get_config(operator=Algebra(WGMMAOp(32), COMPLEX), global_a_layout=Interleaved(number), splits=3,
                      global_d_layout=Interleaved(number))


def test_attributes() -> None:
    """A launch whose blocks wait is cooperative, and starts behind the one before."""
    assert [x.id for x in attributes((4, 1, 1), False, True)] == [4, 2]


# -- seeded faults: the emulator finds what orders the sums -----------------------------------------------------------

def run_small(splits: int = 3, cluster: str = "1x1") -> None:
    rng = np.random.default_rng(3)
    a, b = whole(rng, (64, 96), F16), whole(rng, (96, 32), F16)
    assert np.array_equal(product(EMULATOR, mapped(cluster, splits), a, b, seed=1), a.astype(F64) @ b.astype(F64))


def unordered(order: str) -> Callable[..., int]:
    real = exchange.atomic_add
    return lambda view, at, number, how: real(view, at, number, "relaxed" if how == order else how)


@pytest.mark.parametrize("cluster, splits", [("1x1", 3), ("2x1", 2)])
def test_arrivals_that_release_nothing(cluster: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_small(splits, cluster)
    monkeypatch.setattr(exchange, "atomic_add", unordered("release"))
    with pytest.raises(errors.RaceError, match="sums"):
        run_small(splits, cluster)


def test_a_wait_that_acquires_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchange.await_counter
    monkeypatch.setattr(exchange, "await_counter", lambda view, at, n, how: real(view, at, n, "relaxed"))
    with pytest.raises(errors.RaceError, match="sums"):
        run_small()


def test_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "await_counter", lambda view, at, n, how: None)
    with pytest.raises((errors.RaceError, errors.UninitialisedRead), match="sums"):
        run_small()


def test_a_block_that_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchange.await_counter
    monkeypatch.setattr(exchange, "await_counter", lambda view, at, n, how: real(view, at, n + 3, how))
    with pytest.raises(errors.DeadlockError, match="counter that is 3 to become 6"):
        run_small()


@pytest.mark.parametrize("which", [0, 1])
def test_every_barrier_matters(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a consumer, in front of the addition and behind the wait."""
    from gemmkit.emulator import machine

    real, arrivals = exchange.named_barrier, {}

    def barrier(number: int, threads: int) -> None:
        thread = machine.current()
        arrivals[thread] = arrivals.get(thread, -1) + 1
        if arrivals[thread] != which:
            real(number, threads)

    monkeypatch.setattr(exchange, "named_barrier", barrier)
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        run_small()


# -- compiled ---------------------------------------------------------------------------------------------------------

def large(cluster: str, splits: int, N: int = 128) -> gk.Config:
    return gk.get_config(operator=WGMMAOp(N), kernel="warp_specialised", block_shape=Tile(M=128, N=N, K=64), warps_per_block=8,
                         schedule="cooperative", cluster=CLUSTERS[cluster], splits=splits, device=H100,
                         **{f"global_{name}_layout": RowMajor(F16) for name in "abd"})


@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.sample(2)
@pytest.mark.parametrize("cluster, splits, N", [("2x2", 7, 128), ("2x1", 15, 256), ("1x1", 33, 128)])
def test_code(cluster: str, splits: int, N: int) -> None:
    """No spill; 16 bytes at a time to the workspace and back; one arrival, and one addition by who has waited."""
    conf = large(cluster, splits, N)
    found = compile_config(conf, device=H100, gemm_shape=dict(M=256, N=256, K=16384))
    usage, slices = found.usage, SharedK(splits, conf.cluster).slices(N, 16)
    assert (usage.registers, usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (168, 0, 0, 0)
    assert {name: found.instructions[name] for name in ("REDG", "ATOMG")} == {"REDG": 1, "ATOMG": 1}
    stores, loads = (sum(line.count(name) for line in found.sass.splitlines()) for name in ("STG.E.128", "LDG.E.128"))
    each = (splits - 1) % 8 + 1 + 8 * min(1, (splits - 1) // 8)            # of a loop of eight shares, where there are more
    assert stores == N // 8 and loads in (N // 8 // slices * each, N // 8 // slices * splits)
    signals = [line for line in found.sass.splitlines() if "HGMMA" in line]
    assert sum("gsb0" in line for line in signals) == len(signals) // 4    # a stage's last alone


# -- on a GPU ---------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("cluster, splits, shape", [("2x2", 7, (512, 512, 16384)), ("2x1", 7, (512, 512, 4096)), ("1x2", 15, (256, 512, 8200)),
                                                    ("1x1", 33, (256, 256, 32768))])
def test_large(cluster: str, splits: int, shape: tuple) -> None:
    """Tiles as they are used, in streams and captured; graphs run beside the stream that they were captured from."""
    import cupy

    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = whole(rng, (m, k), F16, 1), whole(rng, (k, n), F16, 1)
    expected = (a.astype(F32) @ b.astype(F32)).astype(F16)
    x, y = cupy.asarray(a), cupy.asarray(b)
    run = gk.plan(x, y, None, large(cluster, splits))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    outs = [cupy.full((m, n), np.nan, F16) for _ in range(12)]
    captured = cupy.full((m, n), np.nan, F16)
    cupy.cuda.Device().synchronize()
    for i, out in enumerate(outs):
        run(x, y, out=out, stream=streams[i % 3])
    cupy.cuda.Device().synchronize()
    assert all(np.array_equal(out.get(), expected) for out in outs)
    with streams[0]:
        streams[0].begin_capture()
        for _ in range(4):
            run(x, y, out=captured, stream=streams[0])
        graph = streams[0].end_capture()
    for i in range(8):
        graph.launch(streams[1])
        run(x, y, out=outs[i], stream=streams[0])
    cupy.cuda.Device().synchronize()
    assert np.array_equal(captured.get(), expected) and all(np.array_equal(out.get(), expected) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", ["1x1", "2x1", "2x2"])
def test_the_driver_is_asked(cluster: str) -> None:
    """What it holds in clusters is no less than `Cluster.at_once` says, and a launch of more is refused."""
    import cupy

    from gemmkit.runtime.launch import LaunchError, check_residency

    x, y = cupy.zeros((128, 4096), F16), cupy.zeros((4096, 128), F16)
    compiled = gk.plan(x, y, None, large(cluster, 3))._compiled
    launchable, sm_count = compiled.launchable, compiled.problem.device.sm_count
    kernel, peers = launchable.bind().kernel, launchable.cluster
    given = launchable.threads, launchable.shared_bytes, peers
    check_residency(kernel, launchable.ordinal, compiled.spec.cluster.at_once(sm_count) * peers, *given)
    with pytest.raises(LaunchError, match="wait for each other"):
        check_residency(kernel, launchable.ordinal, (sm_count // peers + 1) * peers, *given)
