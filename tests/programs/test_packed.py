"""Rows that are packed, ``gp.packed(q.rows, offsets)``, and rows in pages, ``gp.paged(k, table)``: kernels read where they are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import masks
from gemmkit import programs as gp
from gemmkit.lang.errors import ConfigError
from gemmkit.programs import calls
from gemmkit.runtime.device import A100, H100, assumed
from tests.programs.test_called import half
from tests.programs.test_language import check_refused
from tests.support.chains import check_close, computed
from tests.support.chains import empty as poisoned
from tests.support.machines import on_machines
from tests.support.programs import online

F16, F32 = np.float16, np.float32
MULTISTAGE = gk.Mapping(kernel="multistage")


@gk.program
def attention(q: Any, k: Any, v: Any, bias: Any, q_offsets: Any, k_offsets: Any, o: Any, lse: Any, scale: float, group: int,
              seen: Any = None) -> None:
    """With a bias of each key, and one of each query behind the rounds; of grouped heads."""
    queries, keys = gp.packed(q.rows, q_offsets), gp.packed(k.rows, k_offsets)
    for i, h, m in gp.parallel(queries.count, q.count, queries.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(keys[i]):
            s = scale * (q[h, m] @ k[h // group, n].T) + bias[h, n] + gp.call(lambda m, n: 0.01 * (m - n), m, n)
            s = s if seen is None else gp.where(seen, s, -math.inf)
            online(s, v[h // group, n], v.dtype, best, total, out)
        o[h, m] = out * gp.where(best == -math.inf, 0.0, 1.0 / total) + 0.1 * gp.place(i) + 0.01 * gp.place(m)
        lse[h, m] = gp.finite(best) + gp.log(total)


def check(program: gp.Program, *arrays: Any, mapping: gk.Mapping | None = None, **more: Any) -> Any:
    plan, results, wanted = computed(program, arrays, mapping, **more)
    check_close(results, wanted, lambda got: 4e-3)
    return plan


#: Offsets of queries and of keys: pieces of no rows, of one, of several tiles; no keys; rows of no piece in front and behind.
OFFSETS = {
    "usual": ([0, 20, 20, 21, 170, 175], [0, 70, 71, 71, 200, 200]),
    "gaps": ([3, 20, 90, 150], [10, 10, 40, 150]),
    "one": ([0, 140], [0, 200]),
    "none": ([0], [0]),
    "empty": ([0, 0, 0], [0, 5, 200]),
}
MAPPINGS = {"": None, "two": gk.Mapping({"n": 32}, warpgroups=2), "three": gk.Mapping({"n": 64}, warpgroups=3), "multistage": MULTISTAGE,
            "plain": gk.Mapping({"n": 32}, ahead=False, warpgroups=2), "apart": gk.Mapping({"n": 32}, across=False),
            "ascending": gk.Mapping({"n": 32}, descending=False), "lazy": gk.Mapping({"n": 32}, lazy=True)}


@pytest.mark.kin(1)
@pytest.mark.sample(20)
@pytest.mark.parametrize("seen", [None, masks.Causal(), masks.Window(20, 10)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_pieces(mapping: str, offsets: str, seen: Any, rng: np.random.Generator) -> None:
    """Each is what it is alone, in whatever order; rows of no piece are left as they are."""
    of_q, of_k = (np.array(x, kind) for x, kind in zip(OFFSETS[offsets], (np.int32, np.int64)))
    q, k, v, bias = half(rng, 2, 180, 64), half(rng, 1, 200, 64), half(rng, 1, 200, 48), half(rng, 2, 200)
    with assumed(dataclasses.replace(H100, sm_count=3)):
        plan = check(attention, q, k, v, bias, of_q, of_k, poisoned(2, 180, 48), poisoned(2, 180, dtype=F32), 0.125, 2, seen,
                     mapping=MAPPINGS[mapping])
    assert plan.is_empty == (offsets == "none")


@pytest.mark.kin(1)
@on_machines
def test_offsets_that_are_none(machine: Any, rng: np.random.Generator) -> None:
    """No row beyond the array is read or written, wherever offsets point; keys that end before they begin are none."""
    q, kv = (machine.array(half(rng, 1, rows, 64)) for rows in (100, 90))
    of_q, of_k = (machine.array(np.array(x, np.int32)) for x in ([-70, 40, 40, 900], [0, 50, 20, 4000]))
    whole, lse, bias = (machine.array(x) for x in (poisoned(1, 164, 64), poisoned(1, 100, dtype=F32), np.zeros((1, 90), F16)))
    with machine.session():
        attention(q, kv, kv, bias, of_q, of_k, whole[:, :100], lse, 0.125, 1)
    found = machine.numpy(whole)
    assert np.isnan(found[:, 100:]).all() and not np.isnan(found[:, :40]).any()


@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("seen", [None, masks.Causal(), masks.Window(300, 10)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_drawn_pieces_on_a_gpu(mapping: str, seen: Any, rng: np.random.Generator) -> None:
    """Many, of drawn lengths, against the same in the memory of the host."""
    import cupy

    if MAPPINGS[mapping] is not None and MAPPINGS[mapping].kernel == "" and cupy.cuda.Device().compute_capability != "90":
        pytest.skip("a mapping of Hopper's kernel")
    for _ in range(3):
        count = int(rng.integers(1, 60))
        of_q, of_k = (np.cumsum([0, *rng.choice([0, 1, 7, 63, 64, 65, 127, 129, 192, 500], count)]) for _ in range(2))
        heads, group, rows, keys = 4, int(rng.choice([1, 2, 4])), max(1, of_q[-1]), max(1, of_k[-1])
        q, k, v = half(rng, heads, rows, 64), half(rng, heads // group, keys, 64), half(rng, heads // group, keys, 64)
        bias, o, lse = half(rng, heads, keys), poisoned(heads, rows, 64), poisoned(heads, rows, dtype=F32)
        kinds = np.int32 if rng.integers(2) else np.int64
        given = [cupy.asarray(x) for x in (q, k, v, bias, of_q.astype(kinds), of_k.astype(kinds), o, lse)]
        attention(*given, 0.125, group, seen, mapping=MAPPINGS[mapping])
        wanted = attention.reference(q, k, v, bias, of_q, of_k, o, lse, 0.125, group, seen)
        check_close([x.get() for x in given[-2:]], wanted, lambda got: 4e-3)


@gk.program
def keys_alone(q: Any, k: Any, offsets: Any, o: Any, scale: float) -> None:
    """Queries of a batch, whose keys are packed; two of the batch share a piece."""
    keys = gp.packed(k.rows, offsets)
    for b, h, m in gp.parallel(*q.counts, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, k.columns)
        for n in gp.sequential(keys[b // 2]):
            online(scale * (q[b, h, m] @ k[h, n].T), k[h, n], k.dtype, best, total, out)
        o[b, h, m] = out / total


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize("mapping", [None, gk.Mapping({"n": 32}, splits=3), MULTISTAGE], ids=["", "splits", "multistage"])
def test_keys_of_a_batch(mapping: Any, rng: np.random.Generator) -> None:
    q, k = half(rng, 6, 2, 5, 64), half(rng, 2, 200, 64)
    check(keys_alone, q, k, np.array([0, 130, 131, 190], np.int32), poisoned(6, 2, 5, 64), 0.125, mapping=mapping)


@gk.program
def groups(x: Any, w: Any, y: Any, z: Any, offsets: Any, d: Any) -> None:
    """Of each piece two products with its own matrices: one loop along the hidden size."""
    rows = gp.packed(x.rows, offsets)
    for e, m in gp.parallel(rows.count, rows.rows):
        out = gp.zeros(m, z.columns)
        for f in gp.sequential(w.rows):
            s = x[m] @ w[e, f].T
            out += gp.maximum(s * y[e, f], 0.0).astype(x.dtype) @ z[e, f]
        d[m] = out


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize("mapping", [None, MULTISTAGE], ids=["", "multistage"])
def test_experts(mapping: Any, rng: np.random.Generator) -> None:
    x, w, y, z = half(rng, 150, 64), half(rng, 4, 96, 64), half(rng, 4, 96), half(rng, 4, 96, 32)
    check(groups, x, w, y, z, np.array([0, 20, 20, 140, 150], np.int64), poisoned(150, 32), mapping=mapping)


# -- pages ----------------------------------------------------------------------------------------------------------------------

@gk.program
def paged(q: Any, k: Any, v: Any, bias: Any, table: Any, lengths: Any, o: Any, scale: float, group: int, seen: Any = None) -> None:
    """Two of the batch have one line of the table; a bias of each key, by its place."""
    keys = gp.paged(k, table)
    for b, h, m in gp.parallel(*q.counts, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(keys[b // 2], stop=None if lengths is None else lengths[b]):
            s = scale * (q[b, h, m] @ k[n.page, h // group, n].T) + bias[h, n]
            s = s if seen is None else gp.where(seen, s, -math.inf)
            online(s, v[n.page, h // group, n], v.dtype, best, total, out)
        o[b, h, m] = out * gp.where(best == -math.inf, 0.0, 1.0 / total)


PAGED = {**{name: MAPPINGS[name] for name in ("", "two", "multistage", "plain", "apart", "ascending")},
         "splits": gk.Mapping({"n": 32}, splits=2)}


@pytest.mark.kin(1)
@pytest.mark.sample(9)
@pytest.mark.parametrize("seen", [None, masks.Causal()], ids=["all", "causal"])
@pytest.mark.parametrize("rows", [8, 32, 128])
@pytest.mark.parametrize("mapping", PAGED)
def test_rows_in_pages(mapping: str, rows: int, seen: Any, rng: np.random.Generator) -> None:
    """Smaller than a block, of its length, and longer; pages behind a length are not looked up."""
    each = -(-100 // rows)
    q, k, v, bias = half(rng, 4, 2, 5, 64), half(rng, 2 * each, 1, rows, 64), half(rng, 2 * each, 1, rows, 48), half(rng, 2, each * rows)
    table, lengths = rng.permutation(2 * each).reshape(2, each).astype(np.int64), np.array([100, 33, 0, 1], np.int32)
    given = q, k, v, bias, table, lengths, poisoned(4, 2, 5, 48), 0.125, 2, seen
    wanted = paged.reference(*given)
    table[1, 1:] = -5
    with gk.emulate():
        paged(*given, mapping=PAGED[mapping])
    check_close([given[6]], wanted, lambda got: 4e-3)


@pytest.mark.kin(1)
def test_all_pages_of_a_view(rng: np.random.Generator) -> None:
    """Without lengths; (pages, rows, heads, columns), of every other page."""
    cache = half(rng, 12, 16, 2, 128)[::2]
    k, v = (cache[..., cut].swapaxes(1, 2) for cut in (slice(0, 64), slice(64, 128)))
    q, table = half(rng, 4, 2, 3, 64), np.array([[5, 0, 3], [1, 1, 2]], np.int32)
    for mapping in (None, MULTISTAGE):
        check(paged, q, k, v, half(rng, 2, 48), table, None, poisoned(4, 2, 3, 64), 0.125, 1, mapping=mapping)


@pytest.mark.parametrize("mapping", [gk.Mapping({"n": 32}), MULTISTAGE], ids=["by TMA", "multistage"])
def test_pages_that_are_not_there(mapping: gk.Mapping, rng: np.random.Generator) -> None:
    """No kernel reads beside the pages: rows of one that a table names and that is not there are zeros."""
    pages, q, bias = half(rng, 5, 1, 16, 64), half(rng, 4, 2, 5, 64), half(rng, 2, 48)
    pages[4] = 0
    found = []
    for absent in (4, -1, 6, 2**32, -2**32):
        table, out = np.array([[0, absent, 1], [absent, 2, 3]]), poisoned(4, 2, 5, 64)
        with gk.emulate():
            paged(q, pages, pages, bias, table, np.full(4, 40), out, 0.125, 2, None, mapping=mapping)
        found.append(out)
    assert np.isfinite(found[0]).all() and all(np.array_equal(x, found[0]) for x in found)


PAGES = """    rows = gp.paged(o, lengths)
    for b, m in gp.parallel(lengths.count, q.rows):
        for n in gp.sequential(rows[b]):
            x = {}  #
"""


@pytest.mark.parametrize("body,words", [
    ("    rows = gp.paged(q, offsets)  #\n", r"paged\(.*an array argument is needed whose first axis are pages"),
    ("    rows = gp.paged(o, 3)  #\n", r"paged\(\.\.\., 3\): an array argument of whole numbers"),
    ("    rows = gp.paged(o, offsets)  #\n", r"offsets has shape \(3,\) and dtype int64; two dimensions"),
    ("""    for b, m in gp.parallel(o.count, q.rows):
        for n in gp.sequential(o.rows):
            x = n.page  #
""", r"n.page: n is a block of .*, which is in no pages"),
    (PAGES.format("o[n.page]"), r"o\[n.page\]: n.page is the page of rows n, which are not read; write o\[n.page, ..., n\]"),
    (PAGES.format("gp.place(n.page)"), r"place\(n.page\): a page is where rows are read, and no number"),
    (PAGES.format("gp.call(lambda x: x, n.page)"), r"call\(..., n.page\): a page is where rows are read"),
    (PAGES.format("o[n.page // 2, n]"), r"n.page // 2: n.page is a page; only an index along a stack, such as h // 4"),
    (PAGES.format("o[n.page, n // 4]"), r"n // 4: n is a block; only an index along a stack, such as h // 4"),
    (PAGES.format("turned[b, n.page, n]"), r"turned\[b, n.page, n\]: pages are an array's first axis, .* write turned\[n.page, ..., n\]"),
    (PAGES.format("o[n.page, n, m]").replace("q.rows", "o.columns"), r"o\[n.page, n, m\]: pages are an array's first axis, and their rows are read with all columns"),
    (PAGES.format("o[n]"), r"o\[n\]: n is a block of rows of o in pages by lengths, used here for axis 0 of o"),
    ("""    rows = gp.paged(o, lengths)
    for b, m in gp.parallel(o.count, o.rows):
        for n in gp.sequential(rows[m]):  #
            pass
""", r"paged\(\.\.\.\)\[m\]: which line of the table"),
])
def test_pages_that_are_refused(body: str, words: str) -> None:
    given = np.zeros((30, 64), F16), np.zeros((40, 64), F16), np.array([0, 10, 30]), np.array([0, 30]), np.zeros(3, F32), np.zeros(
        (2, 4), np.int64), np.zeros((5, 16, 64), F16), np.zeros((2, 5, 16, 8), F16)
    check_refused(HEAD.replace("):", ", turned):") + body, words, lambda program: program.reference(*given))


def test_pages_without_a_kernel(rng: np.random.Generator) -> None:
    q, k, table = half(rng, 2, 5, 64), half(rng, 6, 12, 64), np.zeros((2, 3), np.int32)
    text = """def f(q, k, table, o):
    rows = gp.paged(k, table)
    for b, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, k.columns)
        for n in gp.sequential(rows[b]):
            out += (q[b, m] @ k[n.page, n].T{}).astype(q.dtype) @ k[n.page, n]
        o[b, m] = out
"""
    check_refused(text.format(""), "pages of 12 rows; a kernel takes multiples of 8", lambda f: f.plan(q, k, table, poisoned(2, 5, 64)))
    with pytest.raises(ConfigError, match="lie in pages, which blocks do not share"):
        paged.plan(half(rng, 4, 2, 5, 64), half(rng, 6, 1, 16, 64), half(rng, 6, 1, 16, 64), half(rng, 2, 48), table, None,
                   poisoned(4, 2, 5, 64), 0.1, 2, mapping=gk.Mapping(cluster={"m": 2}))


# -- derivations ----------------------------------------------------------------------------------------------------------------

def test_another_number_of_pieces_derives_nothing(rng: np.random.Generator, replaced: Any) -> None:
    """Neither do other lengths, as far as the mean ones choose the same mapping."""
    seen: list[Any] = []
    planned = calls.planned

    def counted(*given: Any) -> Any:
        seen.append(given)
        return planned(*given)

    replaced(calls, "planned", counted)
    for device in (H100, A100):
        with assumed(device):
            texts = set()
            for pieces in (3, 4, 7, 3):
                q, k, bias = half(rng, 2, 100 * pieces, 64), half(rng, 1, 96 * pieces, 64), half(rng, 2, 96 * pieces)
                given = q, k, k, bias, np.arange(pieces + 1) * 100, np.arange(pieces + 1) * 96, poisoned(*q.shape), poisoned(*q.shape[:2], dtype=F32)
                plan = attention.plan(*given, 0.125, 2)
                texts.add(plan.text)
                assert plan.extents["i"] == pieces
            assert len(texts) == 1
        assert len(seen) == 1
        seen.clear()


# -- what is refused --------------------------------------------------------------------------------------------------------------

HEAD = "def f(q, k, offsets, short, wrong, lengths, o):\n"


def refused(body: str, words: str) -> None:
    given = (np.zeros((30, 64), F16), np.zeros((40, 64), F16), np.array([0, 10, 30]), np.array([0, 30]), np.zeros(3, F32), np.array([9, 9]),
             np.zeros((30, 64), F16))
    check_refused(HEAD + body, words, lambda program: program.reference(*given))


LOOP = """    rows, keys = gp.packed(q.rows, offsets), gp.packed(k.rows, offsets)
    for i, m in gp.parallel(rows.count, rows.rows):
        out = gp.zeros(m, k.columns)
        for n in gp.sequential({}):{}
            out += (q[m] @ k[n].T) @ k[n]
        o[m] = out
"""


@pytest.mark.parametrize("body,words", [
    ("    rows = gp.packed(q, offsets)  #\n", r"packed\(<.*>, \.\.\.\): the rows of an array|packed\(.*the rows of an array are needed"),
    ("    rows = gp.packed(q.rows, 3)  #\n", r"packed\(\.\.\., 3\): an array argument of whole numbers"),
    ("    rows = gp.packed(q.rows, wrong)  #\n", r"wrong has shape \(3,\) and dtype float32; one dimension of int32 or int64"),
    ("    rows = gp.packed(q.rows, q)  #\n", r"q has shape \(30, 64\) and dtype float16"),
    (LOOP.format("keys.rows", "  #"), "of which one is not said: of x = packed"),
    (LOOP.replace("gp.sequential({})", "{}").format("keys[i]", "  #"), "'RowsOfPiece' object is not iterable"),
    (LOOP.replace("gp.zeros(m, k.columns)", "gp.zeros(m, keys.rows)  #").format("keys[i]", ""), "has a length that the host does not know"),
    (LOOP.format("keys[m]", "  #"), r"packed\(\.\.\.\)\[m\]: which piece it is must be a variable"),
    (LOOP.format("gp.packed(k.rows, short)[i]", "  #"), "short has the offsets of 1 pieces, and i goes along 2"),
    (LOOP.format("keys[i], stop=lengths[i]", "  #"), "has a length of its own; leave stop out"),
    ("    for m in gp.parallel(gp.packed(q.rows, offsets).rows):  #\n        pass\n", "of which one is not said"),
    ("    for i, m in gp.parallel(q.rows, gp.packed(q.rows, offsets).rows):  #\n        pass\n", "of which one is not said"),
])
def test_what_is_refused(body: str, words: str) -> None:
    refused(body, words)


def test_mappings_that_are_refused(rng: np.random.Generator) -> None:
    q, k = half(rng, 2, 100, 64), half(rng, 1, 90, 64)
    given = q, k, k, half(rng, 2, 90), np.array([0, 100]), np.array([0, 90]), poisoned(2, 100, 64), poisoned(2, 100, dtype=F32)
    for mapping, words in ((gk.Mapping(splits=2), "rows of m are packed, and their rounds are not split"),
                           (gk.Mapping(cluster={"m": 2}), "may be of two pieces; leave cluster out")):
        with pytest.raises(ConfigError, match=words):
            attention.plan(*given, 0.125, 2, mapping=mapping)


def test_results_and_other_forms(rng: np.random.Generator) -> None:
    """Programs without products have no pieces (tiles of rows and columns: `tests.programs.test_pieces`)."""
    check_refused("""def f(q, k, offsets, o):
    rows = gp.packed(q.rows, offsets)
    for i, m in gp.parallel(rows.count, rows.rows):
        o[m] = q[m]
""", "packed.*pieces of rows where it multiplies", lambda program: program.plan(half(rng, 30, 64), half(rng, 30, 64), np.array([0, 30]), poisoned(30, 64)))
