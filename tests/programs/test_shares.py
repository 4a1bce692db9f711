"""Rounds that are split over blocks, whose cells a second kernel merges: drawn ones in the emulator, the rule by which cells
are merged, the number of shares where none is said, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.emulator import current_mode
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.collectives.split_k import LAST_PARTS, in_turn
from gemmkit.programs import calls
from gemmkit.programs.plan import _Given
from gemmkit.runtime.device import H100, assumed
from tests.support import chains
from tests.support import programs as listing
from tests.support.chains import check
from tests.verifier import unwatched

F16, F32 = np.float16, np.float32
ONE, TWO = (dataclasses.replace(H100, sm_count=count) for count in (1, 2))     # blocks go on from tile to tile
SPLIT = gk.Mapping({"n": 32}, warpgroups=1, splits=3)


@pytest.mark.kin(1)
@pytest.mark.sample(20, at=0)
@pytest.mark.parametrize("seed", range(120))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = chains.drawn_shares(seed)
    why = chains.NO_SHARES.get(program.function.__name__)
    with assumed(TWO if seed % 4 < 2 else ONE):
        try:
            plan = check(program, arrays, mapping, seed, **more)
        except gk.ConfigError as error:
            assert why is not None and why in str(error), str(error)
            return
        said = program.plan(*arrays, mapping=plan.mapping, **more)
    assert plan.merge is not None and (said.text, said.merge.text) == (plan.text, plan.merge.text)
    assert "rounds in shares" in plan.text


@gk.program
def ranges_of_rows(a: Any, b: Any, low: Any, high: Any, sums: Any) -> None:
    """A cell that keeps the least, one the largest, and a product that is added up; no stack."""
    for m in gp.parallel(a.rows):
        least, most, out = gp.full(m, math.inf), gp.full(m, -math.inf), gp.zeros(m, b.columns)
        for n in gp.sequential(b.rows):
            s = a[m] @ b[n].T
            least[:] = gp.minimum(least, s.min(axis=1))
            most[:] = gp.maximum(most, s.max(axis=1))
            out += s.astype(a.dtype) @ b[n]
        low[m] = least
        high[m] = most
        sums[m] = out


@pytest.mark.kin(1)
@pytest.mark.parametrize("rows, places, splits", [(1, 150, 2), (70, 129, 5), (40, 31, 16), (3, 300, 34)])
def test_cells_of_several_kinds(rows: int, places: int, splits: int) -> None:
    rng = np.random.default_rng(rows)
    a, b = chains.half(rng, rows, 64) / F16(8), chains.half(rng, places, 64)
    arrays = [a, b, chains.empty(rows, dtype=F32), chains.empty(rows, dtype=F32), chains.empty(rows, 64)]
    with assumed(TWO):
        check(ranges_of_rows, arrays, dataclasses.replace(SPLIT, splits=splits))
        assert check(ranges_of_rows, arrays, dataclasses.replace(SPLIT, splits=1)).merge is None


@gk.program
def in_a_list(a: Any, b: Any, most: Any, sums: Any) -> None:
    """Cells that no variable has for its own."""
    for m in gp.parallel(a.rows):
        cells = [gp.full(m, -math.inf), gp.zeros(m, b.columns)]
        for n in gp.sequential(b.rows):
            s = a[m] @ b[n].T
            cells[0][:] = gp.maximum(cells[0], s.max(axis=1))
            cells[1][:] = cells[1] + s.astype(a.dtype) @ b[n]
        most[m] = cells[0]
        sums[m] = cells[1]


@pytest.mark.kin(1)
def test_cells_without_a_name() -> None:
    rng = np.random.default_rng(5)
    a, b = chains.half(rng, 70, 64) / F16(8), chains.half(rng, 130, 64)
    with assumed(ONE):
        plan = check(in_a_list, [a, b, chains.empty(70, dtype=F32), chains.empty(70, 64)], SPLIT)
    assert plan.spare == ("cell_shares", "cell_2_shares") and plan.merge.spare == ("cell_parts", "cell_2_parts")


@gk.program
def called_as_the_text(q: Any, k: Any, v: Any, share: Any, o: Any) -> None:
    for outer, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            out += gp.tanh(q[outer, m] @ k[outer, n].T).astype(v.dtype) @ v[outer, n]
        o[outer, m] = out * share[outer, m]


@gk.program
def called_as_ranges(q: Any, k: Any, v: Any, n_share: Any, o: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            out += gp.tanh(q[h, m] @ k[h, n].T).astype(v.dtype) @ v[h, n]
        o[h, m] = out * n_share[h, m]


@pytest.mark.kin(1)
def test_names() -> None:
    """Indices called ``share`` and ``outer`` were taken for the text's own, and results were wrong. Of a name that the text
    needs for shares they are refused where they are asked for, and else there are none."""
    rng = np.random.default_rng(6)
    q, k, v = (chains.half(rng, 2, extent, 32, scale=0.3) for extent in (20, 150, 150))
    arrays = [q, k, v, rng.random((2, 20)).astype(F32), chains.empty(2, 20, 32)]
    open_ = gk.Mapping({"n": 16}, warpgroups=1)
    for mapping in (SPLIT, open_):
        assert check(called_as_the_text, arrays, mapping).merge is not None
    assert check(called_as_ranges, arrays, open_).merge is None
    with pytest.raises(ValueError, match="n_share: the derived kernel uses this name"):
        called_as_ranges.plan(*arrays, mapping=SPLIT)


@pytest.mark.kin(1)
def test_a_cell_that_is_normalised_in_every_round() -> None:
    """What a share has is its own sums' quotient: its factor is made of two other cells, merged and its own."""
    rng = np.random.default_rng(1)
    q, k, v = (chains.half(rng, extent, 64) for extent in (70, 130, 130))
    with assumed(ONE):
        plan = check(chains.normalised, [q, k, v, chains.empty(70, 64)], SPLIT)
    assert plan.merge.printed.outs == ("o",) and {"total_parts", "out_parts"} <= set(plan.merge.spare)


@pytest.mark.kin(1)
def test_shares_end_where_blocks_do() -> None:
    """Of 9 blocks of 32 in 4 shares: 3, 3, 3 and none, which has a round that shows nothing."""
    loads: list[int] = []
    q, k, v = (np.zeros((1, extent, 64), F16) for extent in (60, 280, 280))
    arrays = [q, k, v, np.zeros((1, 60, 64), F16)]
    mapping = dataclasses.replace(SPLIT, splits=4, ahead=False)
    with assumed(ONE):
        text = listing.attention.plan(*arrays, 0.125, mapping=mapping).text
        old = "k_tile.load(map_k, (0, n, h)"
        assert text.count(old) == 1
        plan = listing.attention.plan(*arrays, 0.125, mapping=mapping, text=text.replace(old, "k_tile.load(map_k, (0, counted(n), h)"))
    plan.module.counted = lambda n: loads.append(int(n)) or n
    with gk.emulate():
        plan.run(listing.attention.bound((*arrays, 0.125), {}))
    assert loads == [64, 32, 0, 160, 128, 96, 256, 224, 192, 288]


@pytest.mark.kin(1)
@pytest.mark.parametrize("old, new", [
    ("n_first = n_share * n_each", "n_first = 0 * n_share"), ("n_share * n_each", "n_share * n_each + 32"),
    ("n_end = max(min(n_end, n_first + n_each), n_first + 1)", "n_end = n_end"),
    ("n_length = n_length if n_first < n_length else 0", "n_length = n_length"),        # harmless: see the test
    ("return outer, ", "return outer + 1 - 1 * 2, "), ("udiv(n_outer, sizes.n_share) * sizes.n_share", "udiv(n_outer, sizes.n_share) * (sizes.n_share - 1)"),
    ("0, sizes.m, 64, n_outer)", "0, sizes.m, 64, h)")])
def test_a_fault_is_found(old: str, new: str) -> None:
    """Of the lines that shares add to a text: each changed everywhere, the emulator raises, or a result is wrong."""
    rng = np.random.default_rng(3)
    q, k, v = (chains.half(rng, 2, extent, 64) for extent in (60, 150, 150))
    arrays = [q, k, v, chains.empty(2, 60, 64)]
    mapping = dataclasses.replace(SPLIT, ahead=False)
    with assumed(ONE):
        text = listing.attention.plan(*arrays, 0.125, mapping=mapping).text
        text = text.replace("uniform(n_share * n_each)", "n_share * n_each").replace(
            "uniform(max(min(n_end, n_first + n_each), n_first + 1))", "max(min(n_end, n_first + n_each), n_first + 1)").replace(
            "uniform(n_length if n_first < n_length else 0)", "n_length if n_first < n_length else 0")
        assert old in text
        plan = listing.attention.plan(*arrays, 0.125, mapping=mapping, text=text.replace(old, new))
    exact = listing.attention.reference(*arrays, 0.125)
    try:
        with gk.emulate(1):
            plan.run(listing.attention.bound((*arrays, 0.125), {}))
    except EmulatorError:
        return
    is_right = np.allclose(arrays[3], exact, atol=6e-3)
    assert is_right == ("else 0" in old)               # a block behind the array is all zeros' place: n_length - n is below 0


# -- any number of them -------------------------------------------------------------------------------------------------------

@pytest.mark.sample(6)
@pytest.mark.kin(1)
@pytest.mark.parametrize("splits", range(1, 41))
def test_any_number_of_shares(splits: int) -> None:
    """Of few blocks of 16, so that some shares have none; rounds that end at lengths of 0, in a share, or behind the last."""
    rng = np.random.default_rng(splits)
    count, rows, places = (int(rng.integers(1, most)) for most in (3, 20, 24 * splits + 40))
    lengths = rng.choice([0, places // 2, places + 5], count).astype(np.int32)
    q, k, v = (chains.half(rng, count, extent, 64) for extent in (rows, places, places))
    arrays = [q, k, v, lengths, chains.empty(count, rows, 64), chains.empty(count, rows, dtype=F32)]
    with assumed(TWO):
        plan = check(chains.bounded, arrays, gk.Mapping({"n": 16}, warpgroups=1, splits=splits), splits, scale=0.125)
    assert plan.mapping.splits == splits and (plan.merge is None) == (splits == 1)


def test_parts_are_merged_in_their_order() -> None:
    """Each once, the first to the last, whatever was loaded at a time; and nothing behind the last is loaded."""
    for count in range(1, 80):
        loaded: list[int] = []
        merged = in_turn(count, lambda n: loaded.append(n) or (n,), lambda one, other: (*one, *other))
        assert merged == tuple(range(count)) and set(loaded) == set(range(count)) and len(loaded) < count + LAST_PARTS


def unrolled(parts: dict[str, np.ndarray]) -> np.ndarray:
    """What shares of an attention become, in float32 and their order, each of them by a line of its own."""
    best, total, out = (parts[name][:, 0] for name in ("best_parts", "total_parts", "out_parts"))
    by = np.float32(math.log2(math.e))
    for n in range(1, parts["best_parts"].shape[1]):
        top = np.maximum(best, parts["best_parts"][:, n])
        one, other = (np.exp2((x - np.where(np.isinf(top), F32(0), top)) * by) for x in (best, parts["best_parts"][:, n]))
        total = total * one + parts["total_parts"][:, n] * other
        out = out * one[..., None] + parts["out_parts"][:, n] * other[..., None]
        best = top
    return (out * (F32(1) / total)[..., None]).astype(F16)


@pytest.mark.kin(1)
@pytest.mark.parametrize("splits", [2, 9, 17, 33, 132])
def test_the_merging_kernel_alone(splits: int) -> None:
    """Of drawn cells, some shares of which have seen nothing: bit by bit what a line for each share computes."""
    rng = np.random.default_rng(splits)
    with assumed(H100):
        merge = listing.attention.plan(*heads(2, 5, 128), 0.125, mapping=gk.Mapping(splits=splits)).merge
    parts = {name: rng.standard_normal(merge.infos[name].shape).astype(F32) * F32(4) for name in merge.spare}
    parts["total_parts"] = np.abs(parts["total_parts"]) + F32(1)
    nothing = rng.random(parts["best_parts"].shape) < 0.3
    nothing[:, 0] = False
    for name, value in (("best_parts", -np.inf), ("total_parts", 0), ("out_parts", 0)):
        parts[name][nothing] = value
    arguments = dict(parts, o=chains.empty(2, 5, 128))
    with gk.emulate():
        current_mode().run(merge, [_Given(arguments[name], name, name in merge.printed.outs) for name in merge.infos])
    assert np.array_equal(arguments["o"], unrolled(parts))


def test_one_text_for_every_number_of_shares() -> None:
    """Both kernels', of a mapping that says how many and of sizes that decide it: they are compiled once. (The verifier walks every
    share of those of other tests.)"""
    with assumed(H100), unwatched():
        said = [listing.attention.plan(*heads(2, 5, 9000), 0.1, mapping=gk.Mapping(splits=n)) for n in (2, 7, 33, 1024)]
        chosen = [calls.derive(listing.attention, listing.attention.bound((*heads(2, 5, places), 0.1), {}), gk.Mapping())[0]
                  for places in (9000, 16384, 65536, 131072)]
    assert [plan.mapping.splits for plan in chosen] == [17, 32, 66, 66]
    for plans in (said, chosen):
        for kernels in zip(*(plan.kernels for plan in plans), strict=True):
            assert len({kernel.text for kernel in kernels}) == 1 and len({kernel.launchable.code_key for kernel in kernels}) == 1
    assert [plan.merge.extents["n_share"] for plan in chosen] == [plan.extents["n_share"] for plan in chosen] == [17, 32, 66, 66]


# -- where nothing is said ----------------------------------------------------------------------------------------------------

def heads(count: int, rows: int, places: int) -> list[np.ndarray]:
    return [np.zeros((count, extent, 128), F16) for extent in (rows, places, places, rows)]


@pytest.mark.parametrize("count, rows, places, splits", [
    (8, 16, 32768, 16), (8, 16, 4096, 16), (1, 1, 8192, 16), (32, 100, 16384, 4), (64, 256, 4096, 1), (66, 1, 9000, 2),
    (2, 100, 700, 1), (4, 0, 8192, 1), (1, 1, 65536, 128), (1, 1, 131072, 132), (2, 1, 65536, 66), (2, 200, 131072, 33),
    (8, 1, 2049, 9), (8, 1, 1025, 9), (8, 1, 4097, 11), (8, 1, 8193, 16), (16, 1, 2049, 6), (32, 1, 2049, 4), (64, 1, 2049, 2)])
def test_idle_multiprocessors_take_shares(count: int, rows: int, places: int, splits: int) -> None:
    """Of 132: the most that run at once, of 4 blocks of 128 at least, or of fewer up to 16."""
    with assumed(H100):
        plan = listing.attention.plan(*heads(count, rows, places), 0.1)
    assert plan.mapping.splits == splits and (plan.merge is None) == (splits == 1)
    assert plan.blocks >= min(132, count * splits) or not rows


@pytest.mark.parametrize("rows, places, length, warpgroups", [(150, 40, 48, 1), (256, 40, 48, 2), (60, 4000, 128, 1), (60, 1, 32, 1)])
def test_the_emulator_takes_blocks_that_fit(rows: int, places: int, length: int, warpgroups: int) -> None:
    arrays = heads(1, rows, places)
    with assumed(H100), gk.emulate():
        small = listing.attention.plan(*arrays, 0.1).mapping
        named = listing.attention.plan(*arrays, 0.1, mapping=gk.Mapping({"m": 128, "n": 64})).mapping
    assert (small.blocks["n"], small.warpgroups) == (length, warpgroups)
    assert named.blocks == {"m": 128, "n": 64}
    with assumed(H100), gk.emulate(mapping="device"):
        assert listing.attention.plan(*arrays, 0.1).mapping.blocks["n"] == 128


def test_a_program_without_a_rule_is_not_split() -> None:
    arrays = heads(2, 64, 8192)
    with assumed(H100):
        plan = chains.bounded_weights.plan(*arrays[:3], np.zeros(2, np.int32), arrays[3], np.zeros((2, 64), F32), 0.125)
    assert plan.merge is None and plan.mapping.splits == 1


# -- refused ------------------------------------------------------------------------------------------------------------------

@gk.program
def squared(q: Any, k: Any, v: Any, o: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            out[:] = out * out + (q[h, m] @ k[h, n].T).astype(v.dtype) @ v[h, n]       # here
        o[h, m] = out


@gk.program
def scaled_by_a_block(q: Any, k: Any, v: Any, o: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[h, m] @ k[h, n].T
            out[:] = out * s.max(axis=1) + s.astype(v.dtype) @ v[h, n]
        o[h, m] = out


@pytest.mark.parametrize("program, arrays, mapping, words", [
    (squared, heads(2, 64, 256), SPLIT, "out becomes neither the largest"),
    (scaled_by_a_block, heads(2, 64, 256), SPLIT, "depends on a round's own block"),
    (listing.mlp, [np.zeros(s, F16) for s in ((64, 64), (4, 64, 64), (4, 64), (64, 64))], gk.Mapping(splits=2), "goes along a stack"),
    (listing.gemm, [np.zeros((64, 64), F16)] * 2 + [np.zeros((64, 64), F16)], gk.Mapping(splits=2), "tiles of whole rows"),
])
def test_what_cannot_be_split(program: gp.Program, arrays: list[np.ndarray], mapping: gk.Mapping, words: str) -> None:
    with pytest.raises(gk.ConfigError, match=words):
        program.plan(*arrays, mapping=mapping)


def test_other_words_that_do_not_go_with_shares() -> None:
    arrays = heads(2, 256, 256)
    with pytest.raises(gk.ConfigError, match=r"longest_first=True, splits=3\): shares of a tile are of one length"):
        listing.attention.plan(*arrays, 0.1, visible=chains.causal, mapping=dataclasses.replace(SPLIT, longest_first=True))
    for wrong in (-1, 1025, 2.0, True, "2"):
        with pytest.raises(gk.ConfigError, match="splits=.*a whole number from 0 to 1024"):
            gk.Mapping(splits=wrong)                   # type: ignore[arg-type]
    with pytest.raises(ValueError, match="share memory"):
        listing.attention.plan(*arrays[:3], arrays[0], 0.1, mapping=SPLIT)
