"""Programs whose rounds compute: drawn ones in the emulator, what a mapping changes in their texts, what is refused, and why."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.runtime.device import H100, assumed
from tests.support import chains, large_scores
from tests.support import programs as listing
from tests.support.checks import named_functions_run
from tests.verifier import unwatched

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
ONE, TWO = (dataclasses.replace(H100, sm_count=count) for count in (1, 2))     # blocks go on from tile to tile
SMALL = gk.Mapping({"n": 64}, warpgroups=1)
MOST_FUNCTIONS = 30_000                # that deriving may run: some 20 ms (`python -m bench.calls` measures it)


def heads(count: int, rows: int, places: int, d: int = 64, dtype: Any = F16) -> list[np.ndarray]:
    rng = np.random.default_rng(rows + places)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((count, rows, d), (count, places, d), (count, places, d)))
    return [q, k, v, np.full((count, rows, d), np.nan, dtype)]


def check(program: gp.Program, arrays: list[np.ndarray], mapping: gk.Mapping, seed: int | None = None, **components: Any) -> Any:
    """Every result is the reference's, to what rounding P to 16 bits and the result to its dtype costs; NaN where it is."""
    plan = program.plan(*arrays, mapping=mapping, **components)
    wanted = program.reference(*arrays, **components)
    given = program.bound(tuple(arrays), components)
    with gk.emulate(seed):
        plan.run(given)
    results = [given[name] for name in given if name in plan.results]
    chains.check_close(results, wanted, lambda got: 2e-2 if got.dtype == BF16 else 3e-3)
    return plan


@pytest.mark.sample(48)
@pytest.mark.parametrize("seed", range(240))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = chains.drawn_case(seed)
    with assumed(TWO if seed % 2 else ONE):
        check(program, arrays, mapping, seed, **more)


@pytest.mark.kin(1)
def test_three_warpgroups_in_turns() -> None:
    check(listing.attention, heads(1, 200, 70), gk.Mapping({"n": 48}, warpgroups=3, turns=True), 3, scale=0.125, visible=chains.causal)


@pytest.mark.kin(1)
def test_other_dtypes_views_and_no_tiles() -> None:
    check(listing.attention, heads(1, 70, 33, dtype=BF16), SMALL, scale=0.125)
    q, k, v, _ = heads(1, 70, 33)
    whole = np.full((1, 70, 67), np.nan, F16)
    check(listing.attention, [q, k, v, whole[:, :, 1:65]], SMALL, scale=0.125)       # rows that TMA does not carry
    assert np.isnan(whole[:, :, 0]).all() and np.isnan(whole[:, :, 65:]).all()
    wide = np.full((1, 70, 2, 64), np.nan, F16)
    check(listing.attention, [q, k, v, wide[:, :, 1]], SMALL, scale=0.125)
    assert np.isnan(wide[:, :, 0]).all()
    check(listing.attention, heads(1, 0, 33), SMALL, scale=0.125)


def test_rows_that_see_nothing() -> None:
    """A row whose window lies beyond the last place is 0 / 0 in the program, and so in the kernel."""
    check(listing.attention, heads(1, 150, 20), SMALL, scale=0.125, visible=chains.window)


@gk.program
def sums_and_maxima(a: Any, b: Any, c: Any, d: Any, best: Any, total: Any) -> None:
    for m in gp.parallel(a.rows):
        out, sums, top = gp.zeros(m, c.columns), gp.zeros(m), gp.full(m, -math.inf)
        for n in gp.sequential(b.rows):
            p = gp.tanh(a[m] @ b[n].T) - 2.0
            out += p.astype(c.dtype) @ c[n]
            sums += p.sum(axis=1)
            top[:] = gp.maximum(top, p.max(axis=1))
        d[m] = out
        best[m] = top
        total[m] = sums


@pytest.mark.parametrize("mapping", [SMALL, gk.Mapping({"n": 32}, warpgroups=1, kernel="multistage")], ids=lambda mapping: mapping.kernel or "tma")
def test_a_sum_and_a_maximum_of_one_value(mapping: gk.Mapping) -> None:
    """Beyond the last place the sum wants 0 and the maximum -inf of the same value: deriving took one for the other without end."""
    rng = np.random.default_rng(1)
    arrays = [*(chains.half(rng, *shape) for shape in ((33, 64), (40, 64), (40, 64))), chains.empty(33, 64, dtype=F32),
              chains.empty(33, dtype=F32), chains.empty(33, dtype=F32)]
    check(sums_and_maxima, arrays, mapping)


@gk.program
def squared(a: Any, b: Any, c: Any, d: Any) -> None:
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(b.rows):
            size = abs(a[m] @ b[n].T)
            out += (size * size).astype(c.dtype) @ c[n]
        d[m] = out


def test_a_value_that_meets_itself() -> None:
    """Its registers are counted once, where rounds are not ahead and too long for all of their sums at once."""
    rng = np.random.default_rng(1)
    arrays = [*(chains.half(rng, *shape) for shape in ((33, 64), (140, 64), (140, 128))), chains.empty(33, 128, dtype=F32)]
    check(squared, arrays, gk.Mapping({"m": 64, "n": 192}, warpgroups=1, ahead=False))


@gk.program
def capped(a: Any, b: Any, c: Any, d: Any) -> None:
    """What is rescaled, added to and bounded in a round: the product is another register than the cell."""
    for m in gp.parallel(a.rows):
        out, top = gp.zeros(m, c.columns), gp.full(m, -math.inf)
        for n in gp.sequential(b.rows):
            s = a[m] @ b[n].T
            new = gp.maximum(top, s.max(axis=1))
            out[:] = gp.minimum(out * gp.exp(top - new) + gp.exp(s - new).astype(a.dtype) @ c[n], 2.0)
            top[:] = new
        d[m] = out


@gk.program
def by_columns(a: Any, b: Any, d: Any) -> None:
    for m in gp.parallel(a.columns):
        out = gp.zeros(m, b.columns)
        for n in gp.sequential(b.rows):
            out += a[n, m].T @ b[n]
        d[m] = out


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [gk.Mapping({"n": 32}), gk.Mapping({"n": 32}, across=False), gk.Mapping({"n": 32}, kernel="multistage")],
                         ids=["", "apart", "multistage"])
def test_rounds_that_bound_a_product_or_take_a_transpose(mapping: gk.Mapping) -> None:
    """The first one's texts used a product's register before it was there, and of the second none was made."""
    rng = np.random.default_rng(1)
    a, b, c, d = chains.half(rng, 9, 64, scale=0.1), chains.half(rng, 100, 64), chains.half(rng, 100, 64), chains.empty(9, 64, dtype=F32)
    wanted = capped.reference(a, b, c, d, block=32)
    with gk.emulate():
        capped(a, b, c, d, mapping=mapping)
    chains.check_close([d], wanted, lambda got: 4e-3)
    check(by_columns, [chains.half(rng, 104, 72), chains.half(rng, 104, 64), chains.empty(72, 64)], dataclasses.replace(mapping, across=None))


@pytest.mark.parametrize("d, width", [(0, 64), (64, 0)])
def test_operands_without_columns_have_no_kernel(d: int, width: int) -> None:
    """Device code of the second did not compile; the reference has both."""
    q, k, v, o = (np.ones((1, rows, columns), F16) for rows, columns in ((5, d), (9, d), (9, width), (5, width)))
    with pytest.raises(ValueError, match=r"has shape \(1, ., 0\): an operand of a product without columns"):
        listing.attention.plan(q, k, v, o, 0.1)
    assert listing.attention.reference(q, k, v, o, 0.1).shape == o.shape


# -- what a mapping says ------------------------------------------------------------------------------------------------------

def text(mapping: gk.Mapping, **components: Any) -> str:
    return str(listing.attention.plan(*heads(1, 70, 90), 0.125, mapping=mapping, **components).text)


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [gk.Mapping({"n": 64}, anchored=True), gk.Mapping({"n": 32}, warpgroups=1, anchored=True),
                                     gk.Mapping({"n": 64}, anchored=True, turns=True, lazy=True, splits=2)], ids=str)
def test_anchors_change_nothing_but_the_order(mapping: gk.Mapping) -> None:
    arrays = heads(1, 130, 200)
    plan = chains.check(listing.attention, arrays, mapping, 1, scale=0.125, visible=chains.causal)
    assert "anchor(ring_q.empty(), total[0] + total[1])" in plan.text or "anchor(ring_q.empty(), row_sum[0] + row_sum[1])" in plan.text
    with pytest.raises(gk.ConfigError, match=r"anchored=True\): no values of rows are computed while a product runs"):
        chains.gated_chain.plan(arrays[0][0], arrays[1][0], np.zeros(130, F32), arrays[2][0], arrays[3][0], mapping=gk.Mapping(anchored=True))
    with pytest.raises(gk.ConfigError, match=r"anchored=True\): no values of rows are computed while a product runs"):
        listing.attention.plan(*arrays, 0.125, mapping=gk.Mapping(ahead=False, anchored=True))


@pytest.mark.kin(1)
def test_a_mapping_is_in_the_text() -> None:
    given = text(gk.Mapping({"m": 64, "n": 32}, warpgroups=1, stages={"q": 2, "k": 3, "v": 4}, places={"p": "registers"}))
    assert "k_tile = StagedTile('float16', lines=32," in given and "WARPGROUPS = Warpgroups(1, 1," in given
    assert [f"ring_{name} = Pipeline(stages={n}," in given for name, n in (("q", 2), ("k", 3), ("v", 4))] == [True] * 3
    ahead, plain = text(SMALL), text(dataclasses.replace(SMALL, ahead=False))
    assert "wgmma_wait(1, (s, out))" in ahead and "wgmma_wait(1" not in plain
    assert "before_h" in ahead and "before_h" not in text(dataclasses.replace(SMALL, across=False))
    assert "n -= 64" in ahead and "n += 64" in text(dataclasses.replace(SMALL, descending=False))
    two = gk.Mapping({"n": 64}, warpgroups=2)
    assert "turns.wait(group)" not in text(two) and "turns.wait(group)" in text(dataclasses.replace(two, turns=True))
    assert "turns.wait(group)" in text(two, score=chains.soft_cap)                 # much to compute
    assert "turns.wait(group)" not in text(dataclasses.replace(two, turns=False), score=chains.soft_cap)
    assert "Warpgroups(1, 2," in listing.attention.plan(*heads(1, 384, 90), 0.125).text
    with assumed(dataclasses.replace(H100, sm_count=1)):                           # two waves of 192 rows, three of 128
        assert "Warpgroups(1, 3," in listing.attention.plan(*heads(1, 384, 90), 0.125).text
    assert "Warpgroups(1, 2," in listing.attention.plan(*heads(1, 200, 90, 128), 0.125).text
    assert "Warpgroups(1, 1," in text(gk.Mapping({"m": 64}))
    bound = listing.attention.plan(*heads(1, 70, 90), 0.125, mapping=gk.Mapping(shared_bytes=100_000))
    assert bound.module.SHARED_BYTES <= 100_000


def test_a_number_of_stages_is_of_the_rings_that_rounds_go_around() -> None:
    given = text(gk.Mapping({"n": 64}, warpgroups=1, stages=3))
    assert "ring_k = Pipeline(stages=3," in given and "ring_q = Pipeline(stages=2," in given


def test_blocks_that_a_mask_hides_are_not_visited() -> None:
    """Where a program ignores what is hidden; and blocks in which all is seen are not tested."""
    causal, window, odd = (text(SMALL, visible=mask) for mask in (chains.causal, chains.window, chains.odd))
    assert "def end_seen(" in causal and "def free_to(" in causal and "def first_seen(" not in causal
    assert "def end_seen(" in window and "def first_seen(" in window and "def free_from(" in window
    assert "seen(" not in odd and "def free_to(" not in odd

    def counted(q: Any, k: Any, v: Any, o: Any) -> None:
        for m in gp.parallel(q.rows):
            out, rounds = gp.zeros(m, v.columns), gp.zeros(m)
            for n in gp.sequential(k.rows):
                s = gp.where(chains.causal, q[m] @ k[n].T, -1.0)
                out += s.astype(v.dtype) @ v[n]
                rounds += gp.exp(s).sum(axis=1)
            o[m] = out * rounds

    half = [np.zeros(shape, F16) for shape in ((70, 64), (90, 64), (90, 64), (70, 64))]
    given = gk.program(counted).plan(*half, mapping=SMALL).text
    assert "seen(" not in given and "def free_to(" in given


@pytest.mark.kin(1)
@pytest.mark.parametrize("visible, leaves_out", [(chains.causal, True), (lambda m, n: n <= 2 * m + 3, True), (lambda m, n: n < 40, True),
                                                 (lambda m, n: n < m, False)],
                         ids=["causal", "twice the row", "the first 40", "none of row 0"])
@pytest.mark.sample(3)
@pytest.mark.parametrize("across", [False, True])
def test_what_no_guard_protects_leaves_blocks_out_behind_the_first(visible: Any, leaves_out: bool, across: bool) -> None:
    """A round that shows a row nothing makes NaN of cells that have seen nothing, exp(-inf + inf). Where every row sees the first
    place, and rounds go up, none has. (In descending order the same rounds would come first: it is refused.)"""

    @gk.program
    def unguarded(q: Any, k: Any, v: Any, o: Any) -> None:
        for h, m in gp.parallel(q.count, q.rows):
            best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
            for n in gp.sequential(k.rows):
                s = gp.where(visible, 0.125 * (q[h, m] @ k[h, n].T), -math.inf)
                top = gp.maximum(best, s.max(axis=1))
                p, before = gp.exp(s - top), total * gp.exp(best - top)
                now = before + p.sum(axis=1)
                out[:] = out * (before / now) + (p / now).astype(v.dtype) @ v[h, n]
                total[:] = now
                best[:] = top
            o[h, m] = out

    arrays = heads(1, 150, 140)
    mapping = gk.Mapping({"n": 32}, warpgroups=1, across=across)
    with assumed(ONE):
        plan = check(unguarded, arrays, mapping, 3)
        assert ("def end_seen(" in plan.text) == leaves_out and not plan.mapping.descending
        with pytest.raises(gk.ConfigError, match="the rounds of n do not commute"):
            unguarded.plan(*arrays, mapping=dataclasses.replace(mapping, descending=True))


@pytest.mark.kin(1)
def test_few_rows_are_one_warpgroup_s() -> None:
    """A second one would have none: 64 rows are one's."""
    for rows, count in ((1, 1), (64, 1), (65, 2)):
        plan = chains.check(listing.attention, heads(1, rows, 90), gk.Mapping(splits=1), 2, scale=0.125)
        assert plan.mapping.warpgroups == count and plan.mapping.blocks["m"] == 64 * count
    few = heads(1, 64, 90)
    assert listing.attention.plan(*few, 0.125, mapping=gk.Mapping(warpgroups=2, splits=1)).mapping.warpgroups == 2
    assert listing.attention.plan(*few, 0.125, mapping=gk.Mapping(turns=True, splits=1)).mapping.warpgroups == 2


@pytest.mark.kin(1)
def test_places_are_float32_where_they_are_exact() -> None:
    """A tile's first place is converted once, and places are added to it in float32, up to 2^24; beyond it each is converted."""

    @gk.program
    def sloped(q: Any, k: Any, v: Any, o: Any, slope: float) -> None:
        for m in gp.parallel(q.rows):
            out = gp.zeros(m, v.columns)
            for n in gp.sequential(k.rows):
                s = (q[m] @ k[n].T) * gp.exp(slope * (2 * gp.place(m) - gp.place(n) - 5)) + slope * -gp.place(n)
                out += s.astype(v.dtype) @ v[n]
            o[m] = out

    def arrays(rows: int, places: int) -> list[np.ndarray]:
        return [np.zeros(shape, F16) for shape in ((rows, 64), (places, 64), (places, 64), (rows, 64))]

    short, long = (sloped.plan(*arrays(rows, places), 1e-3, mapping=SMALL).text for rows, places in ((64, 200), (64, 2**24 - 100)))
    assert "row_float + convert(F32, row_of(i))" in short and "place_float + convert(F32, column_at(i))" in short
    assert "place_float" not in long and "convert(F32, (place + column_at(i)))" in long
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((extent, 64)).astype(F16) for extent in (70, 100, 100))
    check(sloped, [q, k, v, np.full((70, 64), np.nan, F16)], SMALL, 1, slope=1e-3)


def test_signs_of_numbers_are_a_plan_s() -> None:
    """The largest of scaled scores is the scaled largest score where the scale is positive alone."""
    positive, negative = (listing.attention.plan(*heads(1, 70, 90), scale, mapping=SMALL).text for scale in (0.125, -0.125))
    assert positive != negative
    assert positive == listing.attention.plan(*heads(1, 70, 90), 7.0, mapping=SMALL).text


@pytest.mark.parametrize("mapping, words", [
    (gk.Mapping({"k": 64}), "indices are m, n"), (gk.Mapping({"m": 64}, warpgroups=2), "128 are needed"), (gk.Mapping({"m": 72}), "64, 128 or 192 are needed"), (gk.Mapping({"n": 72}), "multiple of 16"),
    (gk.Mapping(stages={"w": 2}), "the arrays in stages are q, k, v"), (gk.Mapping({"n": 128}, stages=16), "bytes of shared memory"),
    (gk.Mapping({"n": 256}), "registers of a thread"), (gk.Mapping(shared_bytes=10_000), "only 10000 are available"),
    (gk.Mapping(warpgroups=1, turns=True), "2 or 3 warpgroups"), (gk.Mapping(ahead=False, across=True), "ahead is False"),
    (gk.Mapping(stages={"q": 1}, across=True), "q has 1 stage, and 2 are needed"),
    (gk.Mapping(places={"k": "registers"}), "an operand, which TMA brings"), (gk.Mapping(places={"z": "registers"}), "values are"),
    (gk.Mapping(places={"p": "shared"}), "values of whole rows are in registers")])
def test_mappings_that_cannot_be(mapping: gk.Mapping, words: str) -> None:
    with pytest.raises(gk.ConfigError, match=words):
        listing.attention.plan(*heads(1, 70, 90), 0.125, mapping=mapping)


def test_orders_that_a_program_does_not_have() -> None:
    layers = [np.zeros(shape, F16) for shape in ((70, 64), (3, 64, 64), (3, 64), (70, 64))]
    with pytest.raises(gk.ConfigError, match="descending=True.*do not commute"):
        listing.mlp.plan(*layers, mapping=gk.Mapping(descending=True))
    with pytest.raises(gk.ConfigError, match="begins as a block"):
        listing.mlp.plan(*layers, mapping=gk.Mapping(ahead=True))
    with pytest.raises(gk.ConfigError, match="goes along a stack, one by one"):
        listing.mlp.plan(*layers, mapping=gk.Mapping({"layer": 2}))
    q, k, v, o = (x[0] for x in heads(1, 70, 90))
    with pytest.raises(gk.ConfigError, match="of its own round"):
        chains.normalised.plan(q, k, v, o, mapping=gk.Mapping(ahead=True))
    a, b = np.zeros((70, 72), F16), np.zeros((72, 64), F16)
    with pytest.raises(gk.ConfigError, match="only add"):
        chains.softmax_gemm.plan(a, b, o, np.zeros(70, F32), mapping=gk.Mapping(turns=True))


@pytest.mark.parametrize("given, words", [
    (dict(ahead=1), "True, False or None"), (dict(turns=1), "True, False or None is needed$"), (dict(stages={"k": 0}), "1 to 16"),
    (dict(places={"p": "global"}), "'registers'")])
def test_fields_out_of_range(given: dict[str, Any], words: str) -> None:
    with pytest.raises(gk.ConfigError, match=words):
        gk.Mapping(**given)
    assert hash(gk.Mapping(stages={"k": 2}, places={"p": "registers"})) == hash(gk.Mapping(stages={"k": 2}, places={"p": "registers"}))
    mapping = gk.Mapping({"m": 64}, stages={"k": 2}, cluster={"m": 2}, places={"p": "registers"}, ahead=False)
    assert pickle.loads(pickle.dumps(mapping)) == copy.deepcopy(mapping) == mapping


# -- refused ----------------------------------------------------------------------------------------------------------------

def computed_right(q: Any, k: Any, v: Any, o: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            p = (q[m] @ k[n].T).astype(v.dtype)
            out += p @ gp.exp(v[n])                    # here
        o[m] = out


def summed_blocks(q: Any, k: Any, v: Any, o: Any) -> None:
    for m in gp.parallel(q.rows):
        out, top = gp.zeros(m, v.columns), gp.full(m, 0.0)
        for n in gp.sequential(k.rows):
            s = q[m] @ k[n].T
            out += s.astype(v.dtype) @ v[n]
            top[:] = gp.maximum(top, q[m].max(axis=1)) # here
        o[m] = out / top


def two_loops(q: Any, k: Any, v: Any, o: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for j in gp.sequential(q.columns):
            out += q[m, j] @ v[j]
        for i in gp.sequential(q.columns):             # here
            out += q[m, i] @ v[i]
        o[m] = out


def begins_elsewhere(q: Any, k: Any, v: Any, o: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.copy(q[m])
        for n in gp.sequential(k.rows):
            s = out.astype(k.dtype) @ k[n].T
            out += s.astype(v.dtype) @ v[n]            # here
        o[m] = out


def rows_stored_elsewhere(q: Any, k: Any, v: Any, o: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            out += (q[m] @ k[n].T).astype(v.dtype) @ v[n]
            o[m] = out                                 # here


@pytest.mark.parametrize("function, words", [
    (computed_right, "right operand of a product is computed"), (summed_blocks, "rowmax of a block of q"), (two_loops, "2 sequential loops"),
    (rows_stored_elsewhere, "a store or a loop inside a round"), (begins_elsewhere, "left operand of a product")],
    ids=lambda x: getattr(x, "__name__", ""))
def test_what_has_no_kernel_names_the_line(function: Any, words: str) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(n for n, x in enumerate(source) if "# here" in x)
    arrays = [np.zeros((64, 64), F16) for _ in range(4)]
    with pytest.raises(ValueError, match=words) as error:
        gk.program(function).plan(*arrays, mapping=SMALL)
    assert f"{__file__}:{line}" in str(error.value)


def test_arrays_that_cannot_be() -> None:
    q, k, v, o = heads(1, 70, 90)
    with pytest.raises(ValueError, match="q has shape .*: an operand of a product without columns"):
        listing.attention.plan(q[:, :, :0], k[:, :, :0], v, o, 0.125)
    with pytest.raises(TypeError, match="q has dtype float32"):
        listing.attention.plan(q.astype(F32), k, v, o, 0.125)
    with pytest.raises(ValueError, match="q and o share memory"):
        listing.attention.plan(q, k, v, q, 0.125)
    with pytest.raises(ValueError, match="sums over at least one element"):
        listing.attention.plan(q, k[:, :0], v[:, :0], o, 0.125)
    with pytest.raises(ValueError, match="k is an operand of a product, and TMA cannot load it"):
        listing.attention.plan(q, np.zeros((1, 90, 65), F16)[:, :, 1:], v, o, 0.125)


def test_an_edited_text_runs_in_its_place() -> None:
    arrays = heads(1, 70, 90)
    plan = listing.attention.plan(*arrays, 0.125, mapping=SMALL)
    edited = plan.text.replace("return reciprocal(total_whole)", "return 2.0 * reciprocal(total_whole)")
    assert edited != plan.text
    given = listing.attention.bound((*arrays, 0.125), {})
    with gk.emulate():
        listing.attention.plan(*arrays, 0.125, mapping=SMALL, text=edited).run(given)
    np.testing.assert_allclose(arrays[3], 2 * listing.attention.reference(*arrays, 0.125), atol=6e-3)


def test_deriving_is_little_work() -> None:
    arrays, layers = heads(1, 70, 90), [np.zeros(shape, F16) for shape in ((70, 64), (3, 64, 64), (3, 64), (70, 64))]
    derived = [lambda: listing.attention.plan(*arrays, 0.125, score=chains.soft_cap, visible=chains.window),
             lambda: listing.mlp.plan(*layers)]
    with unwatched():
        for call in derived:
            assert named_functions_run(call) <= MOST_FUNCTIONS


@pytest.mark.parametrize("length", [8, 40, 96])
def test_short_rounds_along_columns_have_blocks_of_whole_lines(length: int) -> None:
    """The emulator takes the shortest blocks that hold all places, and was refused blocks of half a line."""
    @gk.program
    def normalised(a: Any, b: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            acc = gp.zeros(m, b.columns)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ b[k]
            d[m] = acc / acc.max(axis=1)

    rng = np.random.default_rng(3)
    arrays = [np.abs(chains.half(rng, 16, length)), np.abs(chains.half(rng, length, 64)), chains.empty(16, 64)]
    with gk.emulate():
        normalised(*arrays)
    assert np.abs(arrays[-1] - normalised.reference(*arrays)).max() <= 2e-3


@pytest.mark.kin(1)
def test_a_block_that_two_products_take_is_not_taken_a_round_later() -> None:
    """The second product would find the next round's block: this gave wrong results, by default."""
    @gk.program
    def scored(a: Any, b: Any, d: Any) -> None:
        for m in gp.parallel(a.rows):
            out = gp.zeros(m, b.columns)
            for n in gp.sequential(b.rows):
                out += gp.tanh(a[m] @ b[n].T).astype(a.dtype) @ b[n]
            d[m] = out

    rng = np.random.default_rng(2)
    arrays = [chains.half(rng, 70, 64, scale=0.3), chains.half(rng, 200, 64, scale=0.3), chains.empty(70, 64)]
    exact = scored.reference(*arrays)
    for mapping in (gk.Mapping(), gk.Mapping({"n": 32}, stages=3)):
        plan = scored.plan(*arrays, mapping=mapping)
        assert plan.mapping.ahead is False
        with gk.emulate():
            plan.run(scored.bound(tuple(arrays), {}))
        assert np.abs(arrays[-1] - exact).max() <= 3e-3 * np.abs(exact).max()
    with pytest.raises(gk.ConfigError, match="a block of b is an operand of two products, of which one would run in the next round"):
        scored.plan(*arrays, mapping=gk.Mapping(ahead=True))


# -- defaults -------------------------------------------------------------------------------------------------------------------

WIDTHS = 64, 192, 320, 512, 768, 1024, 1280, 1536, 2048


def wide(width: int) -> list[np.ndarray]:
    """Of a chain whose left operand has so many columns."""
    return [np.zeros(shape, F16) for shape in ((4096, width), (1000, width), (4096,), (1000, 128), (4096, 128))]


@pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_default_fits_where_a_mapping_does(width: int, kernel: str) -> None:
    """And has the longest blocks that fit; said, it derives the same text."""
    arrays, given = wide(width), [gk.Mapping({"n": n}, warpgroups=groups, stages=stages, kernel=kernel)
                                  for n in (16, 32, 64) for groups in (1, 2) for stages in (1, 2)]

    def fits(mapping: gk.Mapping) -> bool:
        try:
            chains.gated_chain.plan(*arrays, mapping=mapping)
        except gk.ConfigError:
            return False
        return True

    with assumed(H100):
        try:
            plan = chains.gated_chain.plan(*arrays, mapping=gk.Mapping(kernel=kernel))
        except gk.ConfigError as error:
            assert not any(map(fits, given)) and "no lengths of blocks fit, down to blocks of 16 along n, warpgroups=1" in str(error)
            assert "bytes of shared memory" in str(error) and width > 1024
            return
        assert width <= 1280 and chains.gated_chain.plan(*arrays, mapping=plan.mapping).text == plan.text
        stages = {name: n for name, n in plan.mapping.stages.items() if name != "a"}       # type: ignore[union-attr]
        longer = [gk.Mapping({"n": n}, warpgroups=plan.mapping.warpgroups, stages=stages, kernel=kernel)
                  for n in range(plan.mapping.blocks["n"] + 16, 129, 16) if n <= (128 if kernel == "warp_specialised" else 64)]
        assert not any(map(fits, longer[1:]))          # of lengths that defaults have


@pytest.mark.kin(1)
@pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
def test_wide_left_operands_compute(kernel: str) -> None:
    rng = np.random.default_rng(1)
    q, k, gate, v = (rng.standard_normal(shape).astype(F16) / F16(16) for shape in ((5, 1024), (40, 1024), (5,), (40, 64)))
    plan = check(chains.gated_chain, [q, k, gate, v, np.full((5, 64), np.nan, F16)], gk.Mapping(kernel=kernel))
    assert plan.mapping.warpgroups == 1 and plan.mapping.blocks["n"] in (16, 32)


def test_what_all_rounds_take_is_released_behind_the_last_product() -> None:
    """Rounds that only add wait for a product one round later: the next tile's rows came while the last product read this one's."""
    text = chains.summed.plan(np.zeros((70, 64), F16), np.zeros((3, 64, 64), F16), np.zeros((70, 64), F16)).text
    assert text.index("wgmma_wait(0, ") < text.index("ring_x.release(") < text.index("out_y.store(")


def test_a_block_is_no_longer_than_tma_brings() -> None:
    x, w, y = np.zeros((128, 320), F16), np.zeros((3, 320, 64), F16), np.zeros((128, 64), F16)

    @gk.program
    def summed(x: Any, w: Any, y: Any) -> None:
        for m in gp.parallel(x.rows):
            out = gp.zeros(m, w.columns)
            for layer in gp.sequential(w.count):
                out += gp.tanh(x[m] @ w[layer])
            y[m] = out

    with assumed(H100), pytest.raises(gk.ConfigError, match="blocks of w are 320 x 64: TMA brings 256 lines at most"):
        summed.plan(x, w, y)


@gk.program
def chosen_by_row(a: Any, b: Any, bias: Any, c: Any, d: Any) -> None:
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(b.rows):
            s = a[m] @ b[n].T + gp.where(gp.place(m) < 3, bias[n], 0.5)
            out += s.astype(c.dtype) @ c[n]
        d[m] = out


@pytest.mark.parametrize("rows", [40, 150])
def test_a_value_that_meets_columns_before_rows(rows: int) -> None:
    """A thread has as many of them as of any other value of rows and columns."""
    rng = np.random.default_rng(rows)
    a, b, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((rows, 64), (96, 64), (96, 64)))
    bias, d = rng.standard_normal(96).astype(np.float16), np.full((rows, 64), np.nan, np.float32)
    with gk.emulate():
        chosen_by_row(a, b, bias, c, d, mapping=gk.Mapping({"n": 64}))
    s = a.astype(float) @ b.T.astype(float) + np.where(np.arange(rows)[:, None] < 3, bias.astype(float), 0.5)
    assert np.abs(d - s @ c.astype(float)).max() < 4e-3 * np.abs(s).max() * 10


@pytest.mark.kin(1)
@pytest.mark.sample(30)
@pytest.mark.parametrize("seed", range(180))
def test_drawn_large_scores(seed: int) -> None:
    """Rows whose scores are all large: weights are those of scores that are computed as the program is written."""
    program, arrays, mapping, components, close = large_scores.drawn(seed)
    with gk.emulate():
        program(*arrays, mapping=mapping, **components)
    assert close(arrays[-1])


@pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
def test_large_scores_at_the_end_of_a_tile(kernel: str) -> None:
    """Rows become weights where they are stored."""
    sizes = np.array([3.0, -6e4, 6e4, 1e3] * 5)
    a, b = np.zeros((20, 64), F16), np.zeros((64, 64), F16)
    a[:, 0], a[:, 1] = sizes, sizes
    b[:2] = 6e4
    b[0, :5] = 59968
    d, largest = np.full((20, 64), np.nan, F16), np.full(20, np.nan, F32)
    with gk.emulate():
        chains.softmax_gemm(a, b, d, largest, mapping=gk.Mapping(kernel=kernel))
    exact, _ = chains.softmax_gemm.reference(a, b, d, largest)
    assert np.abs(d.astype(float) - exact).max() <= 1e-3


def test_lines_for_large_scores() -> None:
    """A round has one branch; a score that is bounded has none, and a vote of a lazy round serves both."""
    def text(score: Any, **mapping: Any) -> str:
        q, k, v, o = (np.zeros((1, 64, 64), F16) for _ in range(4))
        return listing.attention.plan(q, k, v, o, 0.125, score=score, mapping=gk.Mapping({"n": 64}, **mapping)).text

    loop = text(None, ahead=False)
    loop = loop[loop.index("        while n ", loop.index("def consume")):]
    assert loop.count("if steep(") == loop.count("while n ") and "difference(convert(F32, (s * scale))" in loop
    assert "steep" not in text(chains.soft_cap) and "difference" not in text(chains.soft_cap)
    for kernel in ("warp_specialised", "multistage"):
        lazy = text(None, lazy=True, kernel=kernel)
        assert "changes(drop, least)" in lazy and "    least = convert(F32, math.inf)" in lazy
        behind = re.findall(r"if rare:\n +least = convert\(F32, -8\.0\)\n +if steep\(", lazy)
        assert len(behind) == lazy.count("if steep(") > 0
