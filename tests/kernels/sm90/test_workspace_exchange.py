"""Clusters that share the K of their tiles by a workspace, in equal shares or in shares of k-tiles that end anywhere: sums
meet in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.epilogues import RowReduce
from gemmkit.kernels import StreamK
from gemmkit.kernels.collectives.scheduler import dealt
from gemmkit.kernels.sm90 import exchange
from gemmkit.kernels.sm90.exchange import ClusterExchange, SharedK, StreamExchange, WorkspaceExchange
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Interleaved, RowMajor, Triangular
from gemmkit.operators import COMPLEX, WGMMAOp
from gemmkit.operators.algebra import Algebra
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100, attributes
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.support.machines import BF16, MACHINES, on_machines, whole
from tests.support.patches import Seeded
from tests.support.shared_k import check_counters, check_every_slot, check_stack
from tests.support.sm90 import F16, F32, mapping, product

# ==========================================================================================================================
# Clusters that share the K of their tiles by a workspace: any number of shares, beside multicast; sums meet in order.
#
# Values are small whole numbers where a result is compared bit for bit; the order of sums is tested with numbers that round.

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


@pytest.mark.kin(5)
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
    with pytest.raises(gk.ConfigError, match=r"splits=31: 31 clusters of 2x2 blocks .* holds 30 at once; use splits=30 or"):
        planned(mapped("2x2", 31))
    with pytest.raises(gk.ConfigError, match=r"splits=3: 99 clusters of 2x1 .*holds 66 at once; use splits=2 or"):
        planned(mapped("2x1", 3), m=64 * 66)
    with pytest.raises(gk.ConfigError, match=r"splits=3: 300 clusters of 1x1 .*use splits=1, or larger"):
        planned(mapped("1x1", 3), m=6400)


@pytest.mark.parametrize("fields, said", [
    (dict(schedule="pingpong"), "ping-pong"), (dict(operator=WGMMAOp(32, accumulator=F16)), "cannot exchange")])
def test_rules(fields: dict, said: str) -> None:
    with pytest.raises(gk.ConfigError, match=said):
        mapped("1x1", 3, **fields)


def test_numbers_of_several_parts_do_not_share_k() -> None:
    number = COMPLEX.number_dtype("f2")
    with pytest.raises(gk.ConfigError, match="cannot exchange accumulators of numbers with several parts"):
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


@pytest.mark.kin(5)
@pytest.mark.parametrize("cluster, splits", [("1x1", 3), ("2x1", 2)])
def test_arrivals_that_release_nothing(cluster: str, splits: int, seeded: Seeded) -> None:
    run_small(splits, cluster)
    seeded(exchange, "atomic_add", unordered("release"))
    with pytest.raises(errors.RaceError, match="sums"):
        run_small(splits, cluster)


def test_a_wait_that_acquires_nothing(seeded: Seeded) -> None:
    real = exchange.await_counter
    seeded(exchange, "await_counter", lambda view, at, n, how: real(view, at, n, "relaxed"))
    with pytest.raises(errors.RaceError, match="sums"):
        run_small()


def test_nobody_waits(seeded: Seeded) -> None:
    seeded(exchange, "await_counter", lambda view, at, n, how: None)
    with pytest.raises((errors.RaceError, errors.UninitialisedRead), match="sums"):
        run_small()


def test_a_block_that_is_not_counted(seeded: Seeded) -> None:
    real = exchange.await_counter
    seeded(exchange, "await_counter", lambda view, at, n, how: real(view, at, n + 3, how))
    with pytest.raises(errors.DeadlockError, match="counter that is 3 to become 6"):
        run_small()


@pytest.mark.parametrize("which", [0, 1])
def test_every_barrier_matters(which: int, seeded: Seeded) -> None:
    """Of a consumer, in front of the addition and behind the wait."""
    from gemmkit.emulator import machine

    real, arrivals = exchange.named_barrier, {}

    def barrier(number: int, threads: int) -> None:
        thread = machine.current()
        arrivals[thread] = arrivals.get(thread, -1) + 1
        if arrivals[thread] != which:
            real(number, threads)

    seeded(exchange, "named_barrier", barrier)
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


# ==========================================================================================================================
# Clusters that stream K (`splits=StreamK()` on Hopper's kernel): shares of k-tiles that end anywhere, sums handed over.
#
# Values are small whole numbers where a result is compared bit for bit; the order of sums is tested with numbers that round.


def mapped_by_stream_k(cluster: str, shares: int | None, operator: Any = None, *, waves: int = 2, schedule: str = "",
           **fields: Any) -> gk.Config:
    """Tiles of 64 rows and k-tiles of 16, by ``shares`` clusters."""
    name, extents = schedule or ("one" if cluster == "1x1" else "one-2x1"), CLUSTERS[cluster]
    how = StreamK(None if shares is None else shares * extents.count, waves)
    return mapping(name, operator, splits=how, **{**dict(cluster=extents, depth=16, stages=2), **fields})


# -- results ----------------------------------------------------------------------------------------------------------

#: One tile by several clusters, tiles that end within shares, shares within tiles, more clusters than k-tiles, none.
SHAPES_STREAM_K = [(64, 32, 260), (200, 70, 147), (60, 37, 72), (1, 8, 72), (300, 16, 33), (64, 32, 16), (33, 16, 0), (0, 8, 32)]


@pytest.mark.sample(192)
@on_machines
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("shares", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES_STREAM_K, ids=str)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_any_number_of_clusters(machine: Any, cluster: str, shape: tuple, shares: int, waves: int,
                                rng: np.random.Generator) -> None:
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    conf = mapped_by_stream_k(cluster, shares, waves=waves)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("schedule, cluster, shares", [("two", "1x1", 2), ("two", "1x1", 5), ("three", "1x1", 3),
                                                       ("two-2x1", "2x1", 3), ("two-2x1", "1x2", 4), ("two-2x2", "2x2", 3)])
def test_consumers_hand_over_one_by_one(machine: Any, schedule: str, cluster: str, shares: int,
                                        rng: np.random.Generator) -> None:
    a, b = whole(rng, (300, 70), F16), whole(rng, (70, 40), F16)
    conf = mapped_by_stream_k(cluster, shares, schedule=schedule)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(13)
@on_machines
@pytest.mark.parametrize("shape", [(64, 32, 260), (130, 40, 100), (1, 8, 72), (270, 16, 33), (33, 16, 0)], ids=str)
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("cluster, shares", [("1x1", 2), ("1x1", 3), ("2x1", 3), ("1x2", 2)])
def test_ping_pong(machine: Any, cluster: str, shares: int, with_c: bool, shape: tuple, rng: np.random.Generator) -> None:
    """A consumer has all rows of a part: it may finish what the other of the next cluster began. C comes for what is finished."""
    m, n, k = shape
    a, b, c = whole(rng, (m, k), F16), whole(rng, (k, n), F16), whole(rng, (m, n), F32)
    conf = mapped_by_stream_k(cluster, shares, schedule="pingpong" if cluster == "1x1" else "pingpong-2x1",
                  **dict(global_c_layout=RowMajor(F32)) if with_c else {})
    found = product(machine, conf, a, b, c if with_c else None)
    assert np.array_equal(found, a.astype(F64) @ b.astype(F64) + (c if with_c else 0))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", [BF16, F32, np.dtype("i1")], ids=str)
@pytest.mark.parametrize("cluster, shares", [("1x1", 3), ("2x1", 2), ("2x2", 3)])
def test_types_by_stream_k(machine: Any, dtype: np.dtype, cluster: str, shares: int, rng: np.random.Generator) -> None:
    a, b = whole(rng, (130, 176), dtype), whole(rng, (176, 32), dtype)
    along = RowMajor if dtype == BF16 else ColMajor
    conf = mapped_by_stream_k(cluster, shares, WGMMAOp(32, dtype), b=along, depth=32)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("promote", [16, 32])
def test_sums_in_portions(machine: Any, promote: int, rng: np.random.Generator) -> None:
    a, b = whole(rng, (100, 176), F16), whole(rng, (176, 32), F16)
    conf = mapped_by_stream_k("1x1", 3, WGMMAOp(32, promote=promote))
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("d, columns", [(RowMajor(F16), 64), (RowMajor(F16), 61), (ColMajor(F16), 64), (RowMajor(F32), 61)], ids=str)
@pytest.mark.parametrize("cluster, shares", [("1x1", 3), ("2x1", 2)])
def test_ways_of_d_by_stream_k(machine: Any, cluster: str, shares: int, d: Any, columns: int, rng: np.random.Generator) -> None:
    """By TMA, as vectors, from the registers."""
    a, b = whole(rng, (130, 90), F16), whole(rng, (90, columns), F16)
    conf = mapped_by_stream_k(cluster, shares, WGMMAOp(64), d=d)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F64) @ b.astype(F64))


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("columns", [40, 37])
@pytest.mark.parametrize("cluster, shares", [("1x1", 5), ("2x2", 3), ("1x2", 2)])
def test_every_slot_stays_open_by_stream_k(machine: Any, cluster: str, shares: int, columns: int, rng: np.random.Generator) -> None:
    """C, a bias and transforms count once, with global coordinates, whichever cluster finishes a tile."""
    check_every_slot(machine, partial(mapped_by_stream_k, cluster, shares), (140, columns, 60), rng)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("cluster, shares", [("1x1", 2), ("2x1", 3)])
def test_c_by_tma_ahead_of_time(machine: Any, cluster: str, shares: int, rng: np.random.Generator) -> None:
    """It comes for the tiles that a block finishes alone: a part that it hands over flips no phase."""
    a, b, c = whole(rng, (330, 90), F16), whole(rng, (90, 64), F16), whole(rng, (330, 64), F32)
    conf = mapped_by_stream_k(cluster, shares, global_c_layout=RowMajor(F32))
    with gk.emulate():
        assert gk.plan(a, b, c, conf)._compiled.spec.store.reads_ahead
    assert np.array_equal(product(machine, conf, a, b, c), a.astype(F64) @ b.astype(F64) + c)


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("route", ["staged", "in place", "columns of B", "condition", "triangle"])
def test_routes_and_structure(machine: Any, route: str, rng: np.random.Generator) -> None:
    """Operands by the producer's warps; k-tiles that are left out make shares uneven, and sums are right."""
    a, b = whole(rng, (130, 99), F16), whole(rng, (99, 32), F16)
    left, fields = a, dict[str, Any]()
    if route == "staged":                              # rows of 99 elements: no TMA
        fields = dict(transform_global_to_shared_a=Map(lambda x, i, k: x + i % 2))
        left = a + np.arange(130)[:, None] % 2
    elif route == "in place":
        left, fields = a * 2, dict(transform_global_to_shared_b=Map(lambda x: x * 2))
    elif route == "columns of B":
        fields = dict(b=ColMajor)
    elif route == "condition":
        fields = dict(condition=Nearby())
        left = a * np.array([[abs(m // 64 * 64 - k // 16 * 16) < 48 for k in range(99)] for m in range(130)])
    else:
        a, b = whole(rng, (130, 130), F16), whole(rng, (130, 32), F16)
        left, fields = np.tril(a), dict(global_a_layout=Triangular(RowMajor(F16)))
    found = product(machine, mapped_by_stream_k("1x1", 3, **fields), a, b)
    assert np.array_equal(found, left.astype(F64) @ b.astype(F64))


@dataclass(frozen=True)
class Nearby(Condition):
    """Leaves out k-tiles that lie far from the diagonal."""

    def __call__(self, m: Any, n: Any, k: Any) -> Any:
        return abs(m - k) < 48


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("cluster, shares", [("1x1", 3), ("2x1", 2), ("2x2", 2)])
def test_stacks_by_stream_k(machine: Any, cluster: str, shares: int, rng: np.random.Generator) -> None:
    """Tiles of several products are one stream."""
    check_stack(machine, mapped_by_stream_k(cluster, shares), 3, rng)


@on_machines
def test_reductions(machine: Any, rng: np.random.Generator) -> None:
    """The cluster that finishes a tile has all of K, and reduces."""
    a, b = whole(rng, (130, 90), F16), whole(rng, (90, 32), F16)
    sums = machine.array(np.full(130, np.nan, F32))
    found = product(machine, mapped_by_stream_k("1x1", 3, epilogue=RowReduce(sums, "sum")), a, b)
    assert np.array_equal(found, a.astype(F64) @ b.astype(F64))
    assert np.array_equal(machine.numpy(sums), found.sum(1))


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("cluster, shares", [("1x1", 5), ("2x1", 3)])
def test_the_same_bits_in_every_run_by_stream_k(machine: Any, cluster: str, shares: int, rng: np.random.Generator) -> None:
    """Whatever order blocks come in (in the emulator, shuffled): that of the sums is the order of the clusters."""
    a, b = rng.standard_normal((100, 130)).astype(F16), rng.standard_normal((130, 32)).astype(F16)
    conf = mapped_by_stream_k(cluster, shares)
    found = [product(machine, conf, a, b, seed=seed) for seed in range(2 if machine.emulated else 50)]
    assert len({d.tobytes() for d in found}) == 1
    assert np.allclose(found[0], a.astype(F64) @ b.astype(F64), rtol=1e-3, atol=1e-3)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("cluster, shares", [("1x1", 4), ("2x1", 3)])
def test_counters_are_ready_for_the_next_launch_by_stream_k(machine: Any, cluster: str, shares: int, rng: np.random.Generator) -> None:
    """One plan, launched again; and another of other sizes in between, which finds the same workspace."""
    check_counters(machine, mapped_by_stream_k(cluster, shares), [(64, 32, 120), (200, 30, 60)], rng)


# -- what is launched, and what is refused ----------------------------------------------------------------------------

def planned_by_stream_k(conf: gk.Config, m: int = 64, n: int = 32, k: int = 96) -> Any:
    with gk.emulate():
        return gk.plan(np.zeros((m, k), F16), np.zeros((k, n), F16), None, conf)._compiled


@pytest.mark.parametrize("cluster, most", [("1x1", 132), ("2x1", 132), ("1x2", 132), ("2x2", 120)])
def test_clusters_wait_and_are_as_many_as_are_resident(cluster: str, most: int) -> None:
    found = planned_by_stream_k(mapped_by_stream_k(cluster, None), 64 * 40, 32 * 40)
    assert found.launchable.waits and not found.launchable.dependent and found.blocks == most
    assert type(found.spec.exchange) is StreamExchange and found.spec.exchange.slices == 1
    peers = CLUSTERS[cluster].count
    assert planned_by_stream_k(mapped_by_stream_k(cluster, None), k=16 * 40).blocks == 10 * peers                # shares of four k-tiles
    assert planned_by_stream_k(mapped_by_stream_k(cluster, 3), k=16 * 40).blocks == 3 * peers
    kinds = [planned_by_stream_k(mapped_by_stream_k(cluster, n), k=k).arguments[0].fingerprint for n, k in ((2, 64), (5, 640))]
    assert kinds[0] == kinds[1]                                                          # another number compiles nothing
    places, consumers = found.blocks, found.spec.consumers
    assert found.spec.exchange.counts.shape == (places * consumers,)
    assert found.spec.exchange.sums.shape == (places * 64 * 32,)


def test_rules_by_stream_k() -> None:
    with pytest.raises(gk.ConfigError, match=r"splits=StreamK\(blocks=3.*a cluster has 2 blocks; use a multiple"):
        mapping("one-2x1", splits=StreamK(3), depth=16)
    with pytest.raises(gk.ConfigError, match="splits=StreamK.*cannot exchange accumulators in float16"):
        mapped_by_stream_k("1x1", 3, WGMMAOp(32, accumulator=F16))
    with pytest.raises(gk.ConfigError, match=r"splits=StreamK\(blocks=124.*holds 30 clusters of 2x2 at once; use 120 blocks"):
        planned_by_stream_k(mapped_by_stream_k("2x2", 31))
    with pytest.raises(gk.ConfigError, match="splits=.*cannot exchange accumulators of numbers with several parts"):
        gk.get_config(operator=Algebra(WGMMAOp(32), COMPLEX), kernel="warp_specialised", splits=StreamK(),
                      global_a_layout=gk.layouts.Interleaved(COMPLEX.number_dtype("f2")),
                      global_d_layout=gk.layouts.Interleaved(COMPLEX.number_dtype("f2")))


def test_the_tile_is_one_of_whole_tiles() -> None:
    """Where no mapping is given: none of those whose blocks share K."""
    for n in (64, 128, 256):
        conf = gk.get_config(operator=WGMMAOp(n), global_a_layout=RowMajor(F16), splits=StreamK(), device=H100,
                             gemm_shape=dict(M=1536, N=1536, K=1536))
        assert conf.kernel == "warp_specialised" and conf.splits == StreamK() and conf.block_shape.size.N == n


# -- seeded faults: the emulator finds what orders the sums -------------------------------------------------------------

def run_small_by_stream_k(cluster: str = "1x1", schedule: str = "") -> None:
    rng = np.random.default_rng(3)
    a, b = whole(rng, (64, 96), F16), whole(rng, (96, 32), F16)
    conf = mapped_by_stream_k(cluster, 3, schedule=schedule)
    assert np.array_equal(product(EMULATOR, conf, a, b, seed=1), a.astype(F64) @ b.astype(F64))


FAULTS: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "a signal dropped": ("atomic_add", lambda real: lambda *given: 0, errors.DeadlockError),
    "a signal that releases nothing": ("atomic_add", lambda real: lambda view, at, n, how: real(view, at, n, "relaxed"), errors.RaceError),
    "a wait dropped": ("await_counter", lambda real: lambda *given: None, (errors.RaceError, errors.UninitialisedRead)),
    "a wait that acquires nothing": ("await_counter", lambda real: lambda view, at, n, how: real(view, at, n, "relaxed"),
                                     errors.RaceError),
    "a meeting left out": ("named_barrier", lambda real: lambda *given: None, (errors.RaceError, errors.UninitialisedRead)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("cluster, schedule", [("1x1", ""), ("1x1", "pingpong"), ("2x1", "")])
@pytest.mark.parametrize("what", FAULTS)
def test_faults(what: str, cluster: str, schedule: str, seeded: Seeded) -> None:
    run_small_by_stream_k(cluster, schedule)
    name, wrong, error = FAULTS[what]
    seeded(exchange, name, wrong(getattr(exchange, name)))
    with pytest.raises(error):
        run_small_by_stream_k(cluster, schedule)


@pytest.mark.parametrize("which", [0, 1])
def test_every_barrier_matters_by_stream_k(which: int, seeded: Seeded) -> None:
    """Of a consumer that hands over, in front of the addition; and of one that takes over, behind the wait."""
    real, place = exchange.named_barrier, ("store_partials", "take_over")[which]

    def barrier(number: int, threads: int) -> None:
        import sys

        if sys._getframe(1).f_code.co_name != place:
            real(number, threads)

    seeded(exchange, "named_barrier", barrier)
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        run_small_by_stream_k()


def test_counters_that_are_not_set_back(seeded: Seeded) -> None:
    """The next launch would not wait."""
    seeded(exchange, "set_counter", lambda *given: None)
    a, b = np.ones((64, 96), F16), np.ones((96, 32), F16)
    with gk.emulate():
        run = gk.plan(a, b, None, mapped_by_stream_k("1x1", 3))
        run(a, b)
        assert run._compiled.spec_on_host.exchange.counts.any()


# -- compiled ---------------------------------------------------------------------------------------------------------

def large_by_stream_k(cluster: str, M: int, N: int, splits: Any = None, schedule: str = "cooperative") -> gk.Config:
    return gk.get_config(operator=WGMMAOp(N), kernel="warp_specialised", block_shape=Tile(M=M, N=N, K=64), cluster=CLUSTERS[cluster],
                         warps_per_block=12 if M == 192 else 8, schedule=schedule, splits=splits or StreamK(), device=H100,
                         **{f"global_{name}_layout": RowMajor(F16) for name in "abd"})


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.sample(7)
@pytest.mark.parametrize("cluster, M, N, schedule", [
    ("2x1", 128, 256, "cooperative"), ("1x1", 256, 128, "cooperative"), ("2x2", 128, 128, "cooperative"),
    ("1x2", 128, 192, "cooperative"), ("1x1", 192, 128, "cooperative"), ("1x1", 128, 128, "pingpong"), ("1x2", 128, 192, "pingpong")])
def test_code_by_stream_k(cluster: str, M: int, N: int, schedule: str) -> None:
    """No spill; 16 bytes at a time to the workspace and back; one addition to a counter; the main loop is that without."""
    sizes = dict(M=5000, N=5000, K=5000)
    found = compile_config(large_by_stream_k(cluster, M, N, schedule=schedule), device=H100, gemm_shape=sizes)
    alone = compile_config(large_by_stream_k(cluster, M, N, 1, schedule), device=H100, gemm_shape=sizes)
    usage, threads = found.usage, 512 if M == 192 else 384
    assert (usage.registers, usage.spill_stores, usage.spill_loads, usage.stack_bytes) == (65536 // threads // 8 * 8, 0, 0, 0)
    assert {name: found.instructions[name] for name in ("REDG", "ATOMG")} == {"REDG": 1, "ATOMG": 0}
    stores, loads = (sum(line.count(name) for line in found.sass.splitlines()) for name in ("STG.E.128", "LDG.E.128"))
    assert stores == loads == M * N // (128 if schedule == "pingpong" else threads - 128) // 4
    signals, as_before = ([line for line in code.sass.splitlines() if "HGMMA" in line] for code in (found, alone))
    assert len(signals) == len(as_before)
    assert sum("gsb0" in line for line in signals) == sum("gsb0" in line for line in as_before) == 1


# -- on a GPU ---------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("cluster, M, N, shape, schedule", [
    ("2x1", 128, 256, (2600, 2600, 1000), "cooperative"), ("2x2", 128, 256, (5000, 5000, 512), "cooperative"),
    ("1x1", 256, 128, (1536, 1536, 1536), "cooperative"), ("1x2", 128, 192, (700, 1000, 4104), "pingpong"),
    ("1x1", 128, 128, (1536, 1536, 1536), "pingpong")])
def test_large_by_stream_k(cluster: str, M: int, N: int, shape: tuple, schedule: str, waves: int) -> None:
    """Tiles as they are used, in streams and captured; graphs run beside the stream that they were captured from."""
    import cupy

    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = whole(rng, (m, k), F16, 1), whole(rng, (k, n), F16, 1)
    expected = (a.astype(F32) @ b.astype(F32)).astype(F16)
    x, y = cupy.asarray(a), cupy.asarray(b)
    run = gk.plan(x, y, None, large_by_stream_k(cluster, M, N, StreamK(waves=waves), schedule))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    outs = [cupy.full((m, n), np.nan, F16) for _ in range(6)]
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
    for i in range(6):
        graph.launch(streams[1])
        run(x, y, out=outs[i], stream=streams[0])
    cupy.cuda.Device().synchronize()
    assert np.array_equal(captured.get(), expected) and all(np.array_equal(out.get(), expected) for out in outs)
