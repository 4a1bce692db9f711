"""The machine code of derived chained kernels, without a GPU: nothing spills, no register of A is written while a product reads
it, and a round has as few instructions as that of the kernel that is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.masks import Causal
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import H100
from tests.support import chains
from tests.support import programs as listing
from tests.support.sass import instructions, loops, written_in_flight

pytestmark = [pytest.mark.compile, pytest.mark.sample(15)]
F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
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
CASES: dict[str, tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any], Any]] = {
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


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    program, arrays, mapping, components, most = CASES[name]
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


@pytest.mark.thorough
@pytest.mark.parametrize("splits, d, components", [(4, 128, SCALED), (16, 128, dict(SCALED, visible=chains.between)), (16, 256, SCALED)])
def test_shares_have_the_rounds_of_whole_tiles(splits: int, d: int, components: dict[str, Any]) -> None:
    """And in the kernel that merges them nothing spills, of up to 16 rows that are added up."""
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


@pytest.mark.parametrize("d, sums", [(128, 64), (256, 128)])
def test_lazy_rounds_leave_multiplications_out(d: int, sums: int) -> None:
    """The branch is one for the warp, by a vote, and jumps over all that rescales."""
    (plan,) = recorded(lambda: listing.attention(*heads(d), mapping=gk.Mapping(lazy=True), **SCALED), H100, zeros=False)
    least = min(rounds_of(plan), key=len)
    (vote,) = (n for n, line in enumerate(least) if line.startswith("VOTE.ANY"))
    jump = next(n for n, line in enumerate(least) if n > vote and "BRA" in line)
    multiplied = [(n, line.split()[1]) for n, line in enumerate(least) if line.startswith("FMUL")]
    scaled = [register for n, register in multiplied if n > jump]
    assert len(scaled) >= sums and not {register for n, register in multiplied if n < jump}.intersection(scaled)


def test_clusters_spill_at_the_ends_of_tiles_alone() -> None:
    """Of tiles that go there and back under a mask a register has no room: it is stored and loaded once a tile."""
    (plan,) = recorded(lambda: listing.attention(*heads(128), mapping=gk.Mapping(cluster={"m": 2}), visible=chains.causal, **SCALED),
                       H100, zeros=False)
    assert plan.launchable.entry().meta["usage"]["spill_stores"] <= 8
    assert not [line for line in min(rounds_of(plan), key=len) if line.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("d, mapping", [(128, {}), (128, dict(turns=True)), (64, dict(warpgroups=3)), (256, {})], ids=str)
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
