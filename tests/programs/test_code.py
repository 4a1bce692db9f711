"""Derived kernels as compiled, without a GPU: nothing spills, a round's products are one group, and the PTX of those without
wgmma computes what the reference does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions.grouped import by_groups, of_token_groups
from gemmkit.kernels.collectives.split_k import LAST_PARTS, PARTS
from gemmkit.kernels.masks import Causal
from gemmkit.plans.ahead import recorded
from gemmkit.programs import multistage
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100, assumed
from tests.programs import test_roles as roles
from tests.programs.test_multistage import A100, RTX, aligned, drawn
from tests.programs.test_multistage import empty as empty_by_ptx
from tests.programs.test_multistage import heads as heads_by_ptx
from tests.programs.test_row_programs import close
from tests.ptx_machine.launch import Ptx
from tests.support import banks, chains
from tests.support import programs as listing
from tests.support import row_programs as listing_of_rows
from tests.support.row_programs import BF16 as BF16_ROWS
from tests.support.row_programs import F16 as F16_ROWS
from tests.support.row_programs import F32 as F32_ROWS
from tests.support.sass import instructions, loops, written_in_flight

# ==========================================================================================================================
# The machine code of derived kernels, without a GPU: nothing spills, a round's products are one group, the rounds are short.

F16 = np.float16
F32 = np.float32
BF16 = ml_dtypes.bfloat16
TILE = gk.Mapping({"m": 128, "n": 256, "k": 64}, stages=3)


def half(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.zeros(shape, dtype)


# (program, its arrays, mapping, components, groups, products, most instructions of a round, whether TMA stores)
CASES: dict[str, tuple[Any, list[Any], gk.Mapping, dict[str, Any], int, int, int, bool]] = {
    "gemm": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], TILE, {}, 2, 8, 56, True),
    "gemm of bfloat16": (listing.gemm, [half(256, 512, dtype=BF16), half(512, 512, dtype=BF16), half(256, 512, dtype=BF16)],
                         TILE, {}, 2, 8, 56, True),
    "gemm by three": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], gk.Mapping(warpgroups=3), {}, 2, 8, 56,
                      True),
    "transposed": (listing.transposed, [half(512, 256), half(512, 512), half(256, 512)], TILE, {}, 2, 8, 56, True),
    "dual": (listing.dual, [half(256, 512), half(512, 512), half(512, 512), half(256, 512)], gk.Mapping(stages=3),
             dict(gate=listing.silu_times), 2, 16, 72, True),
    "biased": (listing.biased, [half(256, 512), half(512, 512), half(512), half(256, dtype=F32), half(256, 512)],
               gk.Mapping({"n": 128}), dict(alpha=0.5), 2, 8, 56, True),
    "lstm": (listing.lstm, [half(256, 512), half(512, 512), half(256, 128), half(128, 512), half(512), half(256, 512)],
             gk.Mapping({"n": 128}), {}, 4, 16, 56, True),
    "sums of rows": (listing.product_and_sums, [half(256, 512), half(512, 512), half(256, 512), half(256, dtype=F32)], TILE, {}, 2,
                     8, 124, True),
    "clusters along m": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], replace(TILE, cluster={"m": 2}), {}, 2, 8,
                         60, True),
    "clusters along n": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], replace(TILE, cluster={"n": 2}), {}, 2, 8,
                         60, True),
    "clusters of 2 x 2": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512)], replace(TILE, cluster={"m": 2, "n": 2}), {},
                          2, 8, 72, True),
    "dual in clusters": (listing.dual, [half(256, 512), half(512, 512), half(512, 512), half(256, 512)],
                         gk.Mapping(stages=3, cluster={"m": 2}), dict(gate=listing.silu_times), 2, 16, 76, True),
    "sums of rows in clusters": (listing.product_and_sums, [half(256, 512), half(512, 512), half(256, 512), half(256, dtype=F32)],
                                 replace(TILE, cluster={"m": 2}), {}, 2, 8, 128, True),
    "sums of columns": (listing.product_and_columns, [half(256, 512), half(512, 512), half(256, 512), half(512, dtype=F32)], TILE,
                        {}, 2, 8, 204, True),
    "sums of columns by three": (listing.product_and_columns, [half(256, 512), half(512, 512), half(256, 512),
                                                               half(512, dtype=F32)], gk.Mapping(warpgroups=3), {}, 2, 8, 132, True),
    "sums of columns in clusters": (listing.product_and_columns, [half(256, 512), half(512, 512), half(256, 512),
                                                                  half(512, dtype=F32)], replace(TILE, cluster={"m": 2}), {}, 2, 8,
                                    206, True),
    "zero points": (listing.zero_points, [half(256, 512), half(512, 512), half(256, dtype=F32), half(512, dtype=F32),
                                          half(512, dtype=F32), half(256, 512)], TILE, {}, 2, 8, 288, True),
    "zero points of bfloat16": (listing.zero_points, [half(256, 512, dtype=BF16), half(512, 512, dtype=BF16), half(256, dtype=F32),
                                                      half(512, dtype=F32), half(512, dtype=F32), half(256, 512, dtype=BF16)],
                                TILE, {}, 2, 8, 342, True),
    "zero points of weights": (listing.zero_points_of_weights, [half(2, 256, 512), half(2, 512, 512), half(2, 256, dtype=F32),
                                                                half(2, 256, 512), half(2, 512, dtype=F32)], TILE,
                               dict(of_all=0.5), 2, 8, 200, True),
    "float32 out": (listing.gemm, [half(256, 512), half(512, 512), half(256, 512, dtype=F32)], TILE, {}, 2, 8, 64, False),
}


@pytest.mark.compile
@pytest.mark.sample(9)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.kin(4)
def test_machine_code(name: str) -> None:
    program, arrays, mapping, components, groups, products, most, by_tma = CASES[name]
    (plan,) = recorded(lambda: program(*arrays, mapping=mapping, **components), H100, zeros=False)
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert plan.launchable.shared_bytes <= H100.shared_memory_per_block
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not any(line.startswith(("LDL", "STL")) for line in lines)
    multiplied = [line for line in lines if line.startswith("HGMMA")]
    assert len(multiplied) == products and sum("gsb0" in line for line in multiplied) == groups
    assert any(line.startswith("UTMASTG") for line in lines) == by_tma
    rounds = loops(sass)
    assert len(rounds) == groups // 2 and all(len(one) <= most for one in rounds)
    assert all(sum("gsb0" in line and line.startswith("HGMMA") for line in one) == 1 for one in rounds)


#: (program, its arrays, mapping, components, products, most instructions of a round, copies of a thread)
GROUPS: dict[str, tuple[Any, list[Any], gk.Mapping, dict[str, Any], int, int, int]] = {
    "rows": (by_groups, [half(256, 512), half(256, 512), half(3, 512, 512), half(4, dtype=np.int32)], TILE, dict(turned=False), 8, 56, 0),
    "named rows": (by_groups, [half(256, 512), half(90, 512), half(3, 512, 512), half(4, dtype=np.int32)], TILE,
                   dict(turned=False, token=half(256, dtype=np.int32)), 8, 64, 8),
    "products of named rows": (of_token_groups, [half(3, 512, 512), half(3, 512, 512), half(90, 512), half(256, 512), half(256, 512),
                                                 half(256, dtype=np.int64), half(4, dtype=np.int32)], gk.Mapping({"n": 128}), {}, 16, 230, 8),
}


@pytest.mark.compile
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.kin(4)
def test_machine_code_of_groups(name: str) -> None:
    """A block goes on from tile to tile around the rounds. A thread of the producer copies 16 bytes at a time, without a register."""
    program, arrays, mapping, components, products, most, copies = GROUPS[name]
    (plan,) = recorded(lambda: program(*arrays, mapping=mapping, **components), H100, zeros=False)
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert sum(line.startswith("HGMMA") for line in lines) == products and min(map(len, loops(sass))) <= most
    copied = [line for line in lines if "LDGSTS" in line and not line.startswith("ARRIVES")]
    assert len(copied) == copies and all(".128" in line for line in copied)
    assert any(line.startswith("UTMASTG") for line in lines)


@pytest.mark.compile
@pytest.mark.sample(9)
def test_sizes_compile_nothing_anew() -> None:
    """Extents and scalars are arguments."""
    def plan(m: int, n: int, k: int, alpha: float) -> Any:
        return listing.biased.plan(half(m, k), half(k, n), half(n), half(m), half(m, n), alpha=alpha,
                                   mapping=gk.Mapping({"n": 64}))

    one, other = plan(256, 512, 512, 0.5), plan(128, 1024, 64, 2.0)
    assert one.text == other.text and one.launchable.kernel is other.launchable.kernel
    assert [x.fingerprint for x in one.arguments] == [x.fingerprint for x in other.arguments]
    assert one.launchable.values != other.launchable.values


# ==========================================================================================================================
# The machine code of derived chained kernels, without a GPU: nothing spills, no register of A is written while a product reads
# it, and a round has as few instructions as that of the kernel that is written by hand.

MORE = 1.04                            # instructions of a round, of those by hand (heads of 192: 453, by hand 438)


def zeros(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.zeros(shape, dtype)


def heads(d: int, dtype: Any = F16) -> list[np.ndarray]:
    return [zeros(2, 512, d, dtype=dtype) for _ in range(4)]


def hand(d: int, **keywords: Any) -> Callable[[], Any]:
    x = [zeros(1, 2, 512, d) for _ in range(3)]
    return lambda: recorded(lambda: gk.attention(*x, **keywords), H100)[0]


def bounded(d: int, dtype: Any = np.int32) -> list[np.ndarray]:
    """With a length for each of the stack, and logarithms."""
    q, k, v, o = heads(d)
    return [q, k, v, zeros(2, dtype=dtype), o, zeros(2, 512, dtype=F32)]


def square(*more: np.ndarray) -> list[np.ndarray]:
    return [*(zeros(512, 128) for _ in range(4)), *more]


THREE = gk.Mapping(warpgroups=3)
LAYERS = [zeros(512, 128), zeros(4, 128, 128), zeros(4, 128), zeros(512, 128)]
SCALED: dict[str, Any] = dict(scale=0.1)
# (program, its arrays, mapping, components, most instructions of a round or the hand-written kernel)
CASES_CHAINS: dict[str, tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any], Any]] = {
    "attention 128": (listing.attention, heads(128), gk.Mapping(), SCALED, hand(128)),
    "attention 128, bfloat16": (listing.attention, heads(128, BF16), gk.Mapping(), SCALED, hand(128)),
    "attention 128, causal": (listing.attention, heads(128), gk.Mapping(), dict(SCALED, visible=chains.causal),
                              hand(128, mask=Causal())),
    "attention 128, turns": (listing.attention, heads(128), gk.Mapping(turns=True), SCALED, hand(128)),
    "attention 128, ascending": (listing.attention, heads(128), gk.Mapping(descending=False), SCALED, hand(128)),
    "attention 128, not ahead": (listing.attention, heads(128), gk.Mapping(ahead=False), SCALED, 475),
    "attention 128, soft cap": (listing.attention, heads(128), gk.Mapping(), dict(SCALED, score=chains.soft_cap), 590),
    "attention 128, lazy": (listing.attention, heads(128), gk.Mapping(lazy=True), SCALED, 480),
    "attention 192, lazy": (listing.attention, heads(192), gk.Mapping(), SCALED, 475),
    "attention 256, lazy": (listing.attention, heads(256), gk.Mapping(lazy=True), SCALED, 510),
    "attention 128, lazy, lengths": (chains.bounded, bounded(128), gk.Mapping(lazy=True), SCALED, 480),
    "attention 128, clusters": (listing.attention, heads(128), gk.Mapping(cluster={"m": 2}), SCALED, 490),
    "attention 128, clusters, causal": (listing.attention, heads(128), gk.Mapping(cluster={"m": 2}, longest_first=False),
                                        dict(SCALED, visible=chains.causal), 510),
    "MLP, clusters": (listing.mlp, LAYERS, gk.Mapping(cluster={"m": 2}), {}, 235),
    "attention 64": (listing.attention, heads(64), THREE, SCALED, hand(64)),
    "attention 192": (listing.attention, heads(192), gk.Mapping({"n": 96}, lazy=False), SCALED, hand(192)),
    "attention 256": (listing.attention, heads(256), gk.Mapping(lazy=False), SCALED, 495),
    "attention 128, window": (listing.attention, heads(128), gk.Mapping(), dict(SCALED, visible=chains.between), hand(128)),
    "attention 128, lengths": (chains.bounded, bounded(128), gk.Mapping(), SCALED, hand(128)),
    "attention 64, lengths": (chains.bounded, bounded(64), THREE, SCALED, hand(64)),
    "attention 256, lengths": (chains.bounded, bounded(256), gk.Mapping(), SCALED, 495),
    "attention 128, lengths and window": (chains.bounded, bounded(128), gk.Mapping(), dict(SCALED, visible=chains.between), hand(128)),
    "attention 128, lengths in int64, not ahead": (chains.bounded, bounded(128, np.int64), gk.Mapping(ahead=False), SCALED, 475),
    "weights, lengths": (chains.bounded_weights, bounded(128), gk.Mapping(), SCALED, hand(128)),
    "decayed": (chains.decayed, [*(zeros(2, 512, 128) for _ in range(3)), zeros(2, dtype=F32), zeros(512, 512), zeros(2, 512, 128),
                                 zeros(2, 512, dtype=F32)], gk.Mapping(), SCALED, 820),
    "gated chain": (chains.gated_chain, [zeros(512, 128), zeros(512, 128), zeros(512), *square()[:2]], gk.Mapping(), {}, 260),
    "GLU chain": (chains.glu_chain, square(zeros(512, 128)), gk.Mapping(), {}, 475),
    "normalised": (chains.normalised, square(), gk.Mapping(), {}, 560),
    "softmax of a product": (chains.softmax_gemm, [zeros(512, 512), zeros(512, 128), zeros(512, 128), zeros(512, dtype=F32)],
                             gk.Mapping(), {}, 75),
    "MLP": (listing.mlp, LAYERS, gk.Mapping(), {}, 215), "MLP, turns": (listing.mlp, LAYERS, gk.Mapping(turns=True), {}, 215),
    "MLP by three": (listing.mlp, LAYERS, THREE, {}, 215),
}


def rounds_of(launch: Any) -> list[list[str]]:
    """What an ordinary round executes: no warp of it has scores so large that it subtracts first."""
    return loops(disassemble(launch.launchable.entry().cubin), ordinary=True)


@pytest.mark.compile
@pytest.mark.sample(15)
@pytest.mark.parametrize("name", CASES_CHAINS)
@pytest.mark.kin(4)
def test_machine_code_of_chains(name: str) -> None:
    program, arrays, mapping, components, most = CASES_CHAINS[name]
    (plan,) = recorded(lambda: program(*arrays, mapping=mapping, **components), H100, zeros=False)
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    sass = disassemble(entry.cubin)
    assert not [line for line in instructions(sass) if line.startswith(("LDL", "STL", "CALL"))]
    rounds = loops(sass)
    assert rounds and not [line for one in rounds for line in written_in_flight(one)]
    least = min(map(len, loops(sass, ordinary=True)))
    assert least <= (most if isinstance(most, int) else MORE * min(map(len, rounds_of(most()))))


@pytest.mark.compile
@pytest.mark.sample(15)
@pytest.mark.thorough
@pytest.mark.parametrize("splits, d, components", [(4, 128, SCALED), (132, 128, dict(SCALED, visible=chains.between)), (16, 256, SCALED)])
def test_shares_have_the_rounds_of_whole_tiles(splits: int, d: int, components: dict[str, Any]) -> None:
    """And in the kernel that merges them nothing spills. Its loops load all parts of a round, two values and a piece of a row each,
    before they compute with the first."""
    arrays = heads(d)
    plans = [recorded(lambda mapping=gk.Mapping(splits=n, across=False): listing.attention(
        *arrays, mapping=mapping, **components), H100, zeros=False) for n in (1, splits)]
    (whole,), (shares, merge) = plans
    for plan in (shares, merge):
        usage = plan.launchable.entry().meta["usage"]
        assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    found, wanted = (min(map(len, rounds_of(plan))) for plan in (shares, whole))
    assert found <= MORE * wanted
    assert not [line for one in loops(disassemble(shares.launchable.entry().cubin)) for line in written_in_flight(one)]
    merging = loops(disassemble(merge.launchable.entry().cubin), "LDG")
    ahead = [[line.startswith("LDG") for line in one[:next(n for n, line in enumerate(one) if line.startswith("MUFU"))]] for one in merging]
    assert [sum(one) for one in ahead] == [3 * PARTS, 3 * LAST_PARTS] and len(merging[0]) <= 40 * PARTS


@pytest.mark.compile
@pytest.mark.sample(15)
@pytest.mark.parametrize("d, sums", [(128, 64), (256, 128)])
@pytest.mark.kin(4)
def test_lazy_rounds_leave_multiplications_out(d: int, sums: int) -> None:
    """The branch is one for the warp, by a vote, and jumps over all that rescales."""
    (plan,) = recorded(lambda: listing.attention(*heads(d), mapping=gk.Mapping(lazy=True), **SCALED), H100, zeros=False)
    least = min(rounds_of(plan), key=len)
    (vote,) = (n for n, line in enumerate(least) if line.startswith("VOTE.ANY"))
    jump = next(n for n, line in enumerate(least) if n > vote and "BRA" in line)
    multiplied = [(n, line.split()[1]) for n, line in enumerate(least) if line.startswith("FMUL")]
    scaled = [register for n, register in multiplied if n > jump]
    assert len(scaled) >= sums and not {register for n, register in multiplied if n < jump}.intersection(scaled)


@pytest.mark.compile
@pytest.mark.sample(15)
@pytest.mark.kin(4)
def test_clusters_spill_at_the_ends_of_tiles_alone() -> None:
    """Of tiles that go there and back under a mask a register has no room: it is stored and loaded once a tile."""
    (plan,) = recorded(lambda: listing.attention(*heads(128), mapping=gk.Mapping(cluster={"m": 2}), visible=chains.causal, **SCALED),
                       H100, zeros=False)
    assert plan.launchable.entry().meta["usage"]["spill_stores"] <= 8
    assert not [line for line in min(rounds_of(plan), key=len) if line.startswith(("LDL", "STL"))]


@pytest.mark.compile
@pytest.mark.sample(15)
@pytest.mark.parametrize("d, mapping", [(128, {}), (128, dict(turns=True)), (64, dict(warpgroups=3)), (256, {})], ids=str)
@pytest.mark.kin(4)
def test_anchors_keep_exponentials_before_the_wait(d: int, mapping: dict[str, Any]) -> None:
    """Without one the assembler moves the wait for the second product before them; with it all are before."""
    found = []
    for anchored in (False, True):
        (plan,) = recorded(lambda anchored=anchored: listing.attention(*heads(d), mapping=gk.Mapping(anchored=anchored, **mapping),
                                                                       **SCALED), H100, zeros=False)
        lines = min(rounds_of(plan), key=len)
        wait = max(n for n, line in enumerate(lines) if "DEPBAR" in line)
        found.append((len(lines), [n < wait for n, line in enumerate(lines) if line.startswith("MUFU.EX2")]))
    (short, without), (long, behind) = found
    assert all(behind) and not all(without) and long <= short + 6


# ==========================================================================================================================
# The machine code of derived kernels without wgmma, without a GPU: nothing spills, a round has the tensor cores' instructions and
# the loads that its products need, and no two lanes meet in a bank of shared memory.


def heads_multistage(d: int, rows: int = 1024, dtype: Any = F16) -> list[np.ndarray]:
    return [half(8, rows, d, dtype=dtype) for _ in range(4)]


def mn() -> np.ndarray:
    return half(256, 512)


TWO: dict[str, Any] = dict(blocks={"n": 128}, warpgroups=2)
# (program, its arrays, mapping, components), then of each loop: HMMA, LDSM, LDGSTS, and the most instructions.
CASES_MULTISTAGE: dict[str, tuple[tuple[Any, list[Any], dict[str, Any], dict[str, Any]], list[tuple[int, int, int, int]]]] = {
    "gemm": ((listing.gemm, [mn(), half(512, 512), mn()], TWO, {}), [(32, 18, 4, 160)]),
    "gemm of bfloat16": ((listing.gemm, [half(256, 512, dtype=BF16), half(512, 512, dtype=BF16), half(256, 512, dtype=BF16)], TWO, {}),
                         [(32, 18, 4, 160)]),
    "gemm by three": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"n": 128}, warpgroups=3), {}), [(32, 18, 4, 190)]),
    "gemm of 64 along k": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"n": 128, "k": 64}, warpgroups=2, stages=2), {}), [(64, 36, 8, 260)]),
    "gemm of 256 columns": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"n": 256}, warpgroups=2), {}), [(64, 34, 6, 250)]),
    "gemm of twice the rows": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"m": 128, "n": 128}, warpgroups=1), {}),
                               [(64, 20, 8, 260)]),
    "gemm of twice the rows by two": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"m": 256, "n": 128, "k": 64}, stages=2), {}),
                                      [(128, 40, 12, 440)]),
    "dual of twice the rows": ((listing.dual, [mn(), half(512, 512), half(512, 512), mn()], dict(blocks={"m": 128, "n": 64}, warpgroups=1),
                                dict(gate=listing.silu_times)), [(64, 24, 8, 260)]),
    "transposed": ((listing.transposed, [half(512, 256), half(512, 512), mn()], TWO, {}), [(32, 18, 4, 160)]),
    "dual": ((listing.dual, [mn(), half(512, 512), half(512, 512), mn()], dict(blocks={"n": 64}, warpgroups=2), dict(gate=listing.silu_times)), [(32, 20, 4, 180)]),
    "biased": ((listing.biased, [mn(), half(512, 512), half(512), half(256, dtype=F32), mn()], TWO, dict(alpha=0.5)), [(32, 18, 4, 160)]),
    "lstm": ((listing.lstm, [mn(), half(512, 512), half(256, 128), half(128, 512), half(512), mn()], TWO, {}), 2 * [(32, 18, 4, 160)]),
    "sums of rows": ((listing.product_and_sums, [mn(), half(512, 512), mn(), half(256, dtype=F32)], TWO, {}), [(32, 20, 4, 190)]),
    "zero points": ((listing.zero_points, [mn(), half(512, 512), half(256, dtype=F32), half(512, dtype=F32), half(512, dtype=F32), mn()],
                     TWO, {}), [(32, 22, 4, 300)]),
    "residual": ((listing.residual, [mn(), half(512, 512), mn(), half(256, 512), half(256, 512)], TWO, {}), [(32, 18, 4, 160)]),
    "float32 out": ((listing.gemm, [mn(), half(512, 512), half(256, 512, dtype=F32)], TWO, {}), [(32, 18, 4, 160)]),
    "gemm by default": ((listing.gemm, [half(4096, 4096) for _ in range(3)], {}, {}), [(64, 20, 8, 260)]),
    "dual by default": ((listing.dual, [half(4096, 4096) for _ in range(4)], {}, dict(gate=listing.silu_times)), [(64, 24, 8, 260)]),
    "attention of 64": ((listing.attention, heads_multistage(64), {}, dict(scale=0.125)), [(64, 36, 8, 490), (64, 36, 8, 450)]),
    "attention of 128": ((listing.attention, heads_multistage(128), {}, dict(scale=0.125)), [(128, 72, 16, 670), (128, 72, 16, 630)]),
    "attention of bfloat16": ((listing.attention, heads_multistage(128, dtype=BF16), {}, dict(scale=0.125)), [(128, 72, 16, 670), (128, 72, 16, 630)]),
    "attention of 256": ((listing.attention, heads_multistage(256), dict(blocks={"n": 32}), dict(scale=0.125)), [(128, 80, 16, 690), (128, 80, 16, 660)]),
    "causal": ((listing.attention, heads_multistage(128), {}, dict(scale=0.125, visible=chains.causal)), [(128, 72, 16, 730), (128, 72, 16, 630)]),
    "causal by two": ((listing.attention, heads_multistage(128), dict(warpgroups=2, splits=1), dict(scale=0.125, visible=chains.causal)),
                      [(128, 72, 8, 710), (128, 72, 8, 600)]),
    "chain": ((chains.gated_chain, [half(8192, 128), half(1024, 128), half(8192), half(1024, 128), half(8192, 128)], {}, {}),
              [(128, 72, 16, 470)]),
    "softmax behind a product": ((chains.softmax_gemm, [half(1024, 512), half(512, 128), half(1024, 128), half(1024, dtype=F32)], {}, {}),
                                 [(64, 36, 12, 270)]),
    "mlp": ((listing.mlp, [half(1024, 128), half(4, 128, 128), half(4, 128), half(1024, 128)], {}, {}), [(128, 64, 16, 520)]),
}


@pytest.mark.compile
@pytest.mark.sample(12)
@pytest.mark.parametrize("device", [A100, RTX], ids=lambda device: device.arch_name)
@pytest.mark.parametrize("name", CASES_MULTISTAGE)
@pytest.mark.kin(4)
def test_machine_code_without_wgmma(name: str, device: Any) -> None:
    (program, arrays, mapping, components), wanted = CASES_MULTISTAGE[name]
    made = recorded(lambda: program(*arrays, mapping=gk.Mapping(**mapping), **components), device, zeros=False)
    plan = made[0]
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert plan.launchable.shared_bytes <= device.shared_memory_per_block
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not any(line.startswith(("LDL", "STL", "HGMMA", "UTMA")) for line in lines)
    rounds = loops(sass, "HMMA", ordinary=True)
    assert len(rounds) == len(wanted)
    counts = sorted(((*(count[what] for what in ("HMMA", "LDSM", "LDGSTS", "BAR")), len(one))
                     for one in rounds for count in [Counter(line.split()[0].split(".")[0] for line in one)]), reverse=True)
    for (products, loads, copies, barriers, length), (*exact, most) in zip(counts, wanted, strict=True):
        assert [products, copies, barriers] == [exact[0], exact[2], 1] and length <= most
        assert loads <= exact[1]                       # two products that take the same A may load it once


@pytest.mark.kin(4)
@pytest.mark.parametrize("name", ["gemm", "transposed", "dual", "causal", "mlp"])
@pytest.mark.parametrize("width", [32, 64])
def test_loads_and_copies_meet_in_no_bank(name: str, width: int) -> None:
    """Of lines of 64 bytes, and of 128."""
    (program, _, _, components), _ = CASES_MULTISTAGE[name]
    small = {"gemm": [half(64, 128), half(128, 64), half(64, 64)], "transposed": [half(128, 64), half(64, 128), half(64, 64)],
             "dual": [half(64, 128), half(128, 64), half(128, 64), half(64, 64)], "causal": [half(1, 64, width) for _ in range(4)],
             "mlp": [half(64, width), half(2, width, width), half(2, width), half(64, width)]}[name]
    blocks = {} if name == "mlp" else {"n": 64} if name == "causal" else {"k": width}
    plan = program.plan(*small, mapping=gk.Mapping(blocks, warpgroups=1, stages=2, kernel="multistage"), **components)
    with banks.within(multistage.CopiedTile, "matrices", "copy_vector") as inside, gk.emulate(), banks.recorded(inside) as seen:
        plan.run(program.bound(tuple(small), components))
    assert seen.loads and banks.conflicts(seen.loads) == 0
    assert seen.stores and banks.conflicts(seen.stores) == 0


@pytest.mark.compile
def test_sizes_compile_nothing_anew_without_wgmma() -> None:
    def plan(m: int, n: int, k: int, alpha: float) -> Any:
        with assumed(A100):
            return listing.biased.plan(half(m, k), half(k, n), half(n), half(m), half(m, n), alpha=alpha, mapping=gk.Mapping({"n": 64}))

    one, other = plan(256, 512, 512, 0.5), plan(128, 1024, 64, 2.0)
    assert one.text == other.text and one.launchable.kernel is other.launchable.kernel
    assert [x.fingerprint for x in one.arguments] == [x.fingerprint for x in other.arguments]


# ==========================================================================================================================
# Derived functions of rows as compiled: the PTX computes what the reference does, nothing spills, a row is read once.


def computed(program: Any, *arrays: np.ndarray, ulps: float = 40.0, **more: Any) -> None:
    """The kernel's PTX, all threads in step, against NumPy in float64."""
    arguments = program.bound(arrays, more)
    plan = program.plan(*arrays, **more)
    with Ptx().session():
        plan.run(arguments)
    wanted = program.reference(*arrays, **more)
    results = [array for name, array in arguments.items() if name in plan.printed.outs]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        close(got, exact, ulps)


def empty(*shape: int, dtype: Any = F16_ROWS) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


@pytest.mark.compile
@pytest.mark.sample(15)
@pytest.mark.parametrize("shape", [(5, 1), (3, 31), (6, 96), (1, 1100), (2, 4608)], ids=str)
@pytest.mark.parametrize("dtype", [F16_ROWS, BF16_ROWS, F32_ROWS], ids=str)
@pytest.mark.kin(4)
def test_what_was_compiled_computes(dtype: Any, shape: tuple[int, int], rng: np.random.Generator) -> None:
    m, n = shape

    def drawn(*shape: int) -> np.ndarray:
        return (2 * rng.standard_normal(shape) + 0.5).astype(dtype)

    computed(listing_of_rows.softmax, drawn(m, n), empty(m, n, dtype=dtype), scale=0.5)
    computed(listing_of_rows.layernorm, drawn(m, n), drawn(n), drawn(n), empty(m, n, dtype=F32_ROWS), eps=0.1)
    computed(listing_of_rows.added_rmsnorm, drawn(m, n), drawn(m, n), drawn(n), empty(m, n, dtype=F32_ROWS), empty(m, n), empty(m), eps=0.1)
    computed(listing_of_rows.stacked, drawn(2, m, n), drawn(2, n), drawn(2), drawn(2, m), empty(2, m, n), empty(2, m))
    if n < 100:
        computed(listing_of_rows.causal_softmax, drawn(n, n), empty(n, n), empty(n, dtype=F32_ROWS))
        computed(listing_of_rows.quantised, drawn(m, n), empty(m, n), empty(m))
        computed(listing_of_rows.corners, drawn(m, n), drawn(n), empty(m, n, dtype=F32_ROWS), empty(m, n, dtype=F32_ROWS), empty(m), alpha=0.5)


@pytest.mark.compile
@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.kin(4)
def test_drawn(seed: int) -> None:
    program, arrays, more = listing_of_rows.drawn_rows(seed)
    computed(program, *arrays, ulps=2000, **more)


CASES_ROWS: dict[str, Any] = {
    "layernorm": (listing_of_rows.layernorm, lambda n: [empty(8, n), empty(n), empty(n), empty(8, n)], dict(eps=0.1), 1),
    "layernorm, f32": (listing_of_rows.layernorm, lambda n: [empty(8, n, dtype=F32_ROWS), empty(n, dtype=F32_ROWS), empty(n, dtype=F32_ROWS),
                                                     empty(8, n, dtype=F32_ROWS)], dict(eps=0.1), 1),
    "layernorm, wide": (listing_of_rows.layernorm, lambda n: [empty(8, n), empty(n, dtype=F32_ROWS), empty(n, dtype=F32_ROWS), empty(8, n)],
                        dict(eps=0.1), 1),
    "softmax": (listing_of_rows.softmax, lambda n: [empty(8, n), empty(8, n)], dict(scale=0.5), 1),
    "softmax, bf16": (listing_of_rows.softmax, lambda n: [empty(8, n, dtype=BF16_ROWS), empty(8, n, dtype=BF16_ROWS)], dict(scale=0.5), 1),
    "added": (listing_of_rows.added_rmsnorm, lambda n: [empty(8, n), empty(8, n), empty(n), empty(8, n), empty(8, n), empty(8, dtype=F32_ROWS)],
              dict(eps=0.1), 2),
    "gradient": (listing_of_rows.layernorm_gradient, lambda n: [empty(8, n), empty(8, n), empty(n), empty(8, dtype=F32_ROWS), empty(8, dtype=F32_ROWS),
                                                        empty(8, n)], {}, 2),
}


@pytest.mark.compile
@pytest.mark.sample(27)
@pytest.mark.parametrize("columns", [768, 1024, 4096, 16384, 32768, 65536])
@pytest.mark.parametrize("name", CASES_ROWS)
@pytest.mark.kin(4)
def test_machine_code_of_rows(name: str, columns: int) -> None:
    program, arrays, more, read = CASES_ROWS[name]
    plan = program.plan(*arrays(columns), **more)
    entry = plan.launchable.entry()
    usage, source = entry.meta["usage"], plan.module.ROWS.source
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert usage["registers"] * plan.launchable.threads <= 65536
    counts = instruction_counts(disassemble(entry.cubin), full=True)
    assert not any(op.startswith(("LDL", "STL")) for op in counts)
    stores = sum(n for op, n in counts.items() if op.startswith("STG") and "128" in op)
    loads = sum(n for op, n in counts.items() if op.startswith("LDG") and "128" in op)
    pieces, results = getattr(source, "pieces", 1), sum(info.shape == (8, columns) for key, info in plan.infos.items()
                                                        if key in plan.printed.outs)
    assert stores >= pieces * results
    if hasattr(source, "pieces"):                      # a row is read once; beside it come arrays by columns
        assert stores == pieces * results
        along = {"softmax": 0, "softmax, bf16": 0, "added": 1, "gradient": 1}.get(name, 2)
        most = pieces * (read + along * (2 if name in ("layernorm, wide", "gradient") else 1))
        assert pieces * read <= loads <= most


# ==========================================================================================================================
# The PTX of derived kernels without wgmma, run without a GPU (`tests.ptx_machine`): it computes what the references do.


def computed_by_ptx(program: Any, arrays: list[np.ndarray], mapping: gk.Mapping, device: Any = A100, **more: Any) -> None:
    arguments = program.bound(tuple(arrays), more)
    with assumed(device):
        plan = program.plan(*arrays, mapping=listing.multistage(mapping), **more)
        with Ptx().session():
            plan.run(arguments)
    results = [arguments[name] for name in arguments if name in plan.results]
    wanted = program.reference(*arrays, **more)
    chains.check_close(results, wanted, lambda got: 2e-2 if more.get("score") else 3e-3)
    chains.check_infinite(results, wanted)


SMALL, DOUBLED = gk.Mapping({"n": 64}, warpgroups=1), gk.Mapping({"m": 128, "n": 64}, warpgroups=1, stages=3)
# Program, arrays, mapping, what it is given besides.
CASES_BY_PTX: dict[str, tuple[Any, Any, gk.Mapping, dict[str, Any]]] = {
    "gemm": (listing.gemm, lambda: [drawn(70, 136), drawn(136, 72), empty_by_ptx(70, 72)], SMALL, {}),
    "gemm of twice the rows": (listing.gemm, lambda: [drawn(150, 136), drawn(136, 72), empty_by_ptx(150, 72)], DOUBLED, {}),
    "clipped": (listing.gemm, lambda: [aligned(70, 71, 8), aligned(71, 67, 8), empty_by_ptx(70, 67)], SMALL, {}),
    "8 bytes": (listing.gemm, lambda: [aligned(70, 72, 4), aligned(72, 68, 4), empty_by_ptx(70, 68)], SMALL, {}),
    "4 bytes, clipped": (listing.gemm, lambda: [aligned(70, 71, 2), aligned(71, 67, 2), empty_by_ptx(70, 67)], DOUBLED, {}),
    "transposed": (listing.transposed, lambda: [drawn(72, 72), drawn(67, 72), empty_by_ptx(72, 67)], SMALL, {}),
    "dual of twice the rows": (listing.dual, lambda: [drawn(100, 72), drawn(72, 72, scale=0.1), drawn(72, 72, scale=0.1), empty_by_ptx(100, 72)],
                               DOUBLED, dict(gate=listing.silu_times)),
    "two loops": (listing.lstm, lambda: [drawn(70, 72), drawn(72, 72, scale=0.1), drawn(70, 40), drawn(40, 72, scale=0.1), drawn(72),
                                         empty_by_ptx(70, 72)], SMALL, {}),
    "stack": (listing.batched, lambda: [drawn(2, 70, 72), drawn(72, 72), drawn(2), drawn(2, 72), empty_by_ptx(2, 70, 72), empty_by_ptx(2, 70, dtype=F32)],
              SMALL, {}),
    "residual": (listing.residual, lambda: [drawn(70, 72), drawn(72, 72), drawn(70, 72), empty_by_ptx(70, 72), empty_by_ptx(70, 72, dtype=F32)], SMALL, {}),
    "both operands, and added": (roles.polynomial, roles.TILES["polynomial"][1], SMALL, {}),
    "self attention": (roles.self_attention, roles.CHAINS["attention"][1], gk.Mapping({"n": 32}), dict(scale=0.2)),
    "attention": (listing.attention, lambda: heads_by_ptx(2, 70, 90), gk.Mapping(stages=2), dict(scale=0.125)),
    "causal by two": (listing.attention, lambda: heads_by_ptx(1, 140, 90), gk.Mapping({"n": 48}, warpgroups=2), dict(scale=0.125, visible=chains.causal)),
    "heads of 96": (listing.attention, lambda: heads_by_ptx(1, 33, 70, 96), gk.Mapping(), dict(scale=0.125, visible=chains.window)),
    "chain": (chains.gated_chain, lambda: [drawn(70, 64), drawn(90, 64, scale=0.1), drawn(70), drawn(90, 64), empty_by_ptx(70, 64)], gk.Mapping(), {}),
    "mlp": (listing.mlp, lambda: [drawn(70, 64), drawn(3, 64, 64, scale=0.125), drawn(3, 64), empty_by_ptx(70, 64)], gk.Mapping(), {}),
    "softmax behind a product": (chains.softmax_gemm, lambda: [drawn(70, 72), drawn(72, 64, scale=0.3), empty_by_ptx(70, 64), empty_by_ptx(70, dtype=F32)],
                                 gk.Mapping({"k": 32}), {}),
}


@pytest.mark.compile
@pytest.mark.sample(9)
@pytest.mark.parametrize("device", [A100, RTX], ids=lambda device: device.arch_name)
@pytest.mark.parametrize("name", CASES_BY_PTX)
@pytest.mark.kin(4)
def test_what_was_compiled_computes_by_ptx(name: str, device: Any) -> None:
    program, made, mapping, more = CASES_BY_PTX[name]
    computed_by_ptx(program, made(), mapping, device, **more)


@pytest.mark.compile
@pytest.mark.sample(40)
@pytest.mark.parametrize("draw", [listing.drawn_case, chains.drawn_case, chains.drawn_lengths], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.kin(4)
def test_drawn_by_ptx(draw: Any, seed: int) -> None:
    program, arrays, mapping, more = draw(seed)
    try:
        computed_by_ptx(program, arrays, mapping, **more)
    except gk.ConfigError as error:
        assert "bytes of shared memory" in str(error)
