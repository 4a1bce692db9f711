"""Derived kernels on a GPU: drawn programs, mappings and sizes against their references; arrays of other kinds and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.programs import calls
from gemmkit.runtime import cache
from tests.programs import test_extremes as folds
from tests.programs import test_inlined as inlined
from tests.programs import test_roles as roles
from tests.programs import test_types as types
from tests.support import chains, large_scores, row_programs
from tests.support import programs as listing
from tests.support.machines import MACHINES
from tests.support.patches import Set

pytestmark = pytest.mark.gpu


def there(x: np.ndarray) -> Any:
    """The array on the GPU, with its strides: a view of one whose rows TMA takes."""
    import cupy

    whole = x if x.base is None else x.base
    return cupy.asarray(whole)[tuple(slice(extent) for extent in x.shape)] if whole.ndim == x.ndim else cupy.asarray(x)


def with_8_bits(x: np.ndarray) -> Any:
    """The same of floats of 8 bits, which PyTorch has."""
    if x.dtype not in (types.E4M3, types.E5M2):
        return there(x)
    import torch

    whole = x if x.base is None else x.base
    made = torch.from_numpy(whole.view(np.uint8)).cuda().view(getattr(torch, x.dtype.name))
    return made[tuple(slice(extent) for extent in x.shape)]


def checked(case: tuple[gk.Program, list[np.ndarray], gk.Mapping, dict[str, Any]],
            is_refusal: Callable[[str, str], bool] = lambda name, error: False, most: Callable[[Any], float] | None = None) -> Any:
    """A drawn program's plan, run on the GPU and compared with the reference, to ``most(result)``; None where it is refused,
    which ``is_refusal(program's name, message)`` must then say."""
    program, arrays, mapping, more = case
    given = program.bound(tuple(there(x) for x in arrays), more)
    try:
        plan = program.plan(*given.values(), mapping=mapping)
    except gk.ConfigError as error:
        assert is_refusal(program.function.__name__, str(error)), error
        return None
    wanted = program.reference(*arrays, **more)
    plan.run(given)
    results = [given[name].get() for name in given if name in plan.results]
    usual = 2e-2 if more.get("score") else 3e-3        # tanh of 20 is to 2^-11 of it, and weights are its exponentials
    chains.check_close(results, wanted, most or (lambda got: usual))
    chains.check_infinite(results, wanted)
    return plan


def has_no_room(name: str, error: str) -> bool:
    return "bytes of shared memory" in error


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(60))
def test_drawn(seed: int) -> None:
    checked(listing.drawn_case(seed), has_no_room, lambda got: 2e-3 if got.dtype == np.float16 else 1e-4)


@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(240))
def test_drawn_chains(seed: int) -> None:
    checked(chains.drawn_case(seed))


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(360))
def test_drawn_large_scores(seed: int) -> None:
    program, arrays, mapping, components, close = large_scores.drawn(seed)
    given = program.bound(tuple(there(x) for x in arrays), components)
    program.plan(*given.values(), mapping=mapping).run(given)
    assert close(given["o"].get())


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_lengths(seed: int) -> None:
    """Rounds that end at each one's own length, with windows; K has NaN behind it, and results begin with NaN."""
    checked(chains.drawn_lengths(seed), most=lambda got: 3e-3)


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(0, 120, 2))
def test_drawn_shares(seed: int) -> None:
    """Rounds that are split over blocks, and merged by a second kernel."""
    for case in map(chains.drawn_shares, (seed, seed + 1)):
        checked(case, lambda name, error: "splits=" in error and name in chains.NO_SHARES)


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_lazy(seed: int) -> None:
    """Scores that grow along the keys, fall, or do neither."""
    reasons = {**chains.NO_SHARES, **chains.NOT_LAZY}
    checked(chains.drawn_lazy(seed), lambda name, error: name in chains.NO_SHARES or reasons[name] in error)


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_clusters(seed: int) -> None:
    """Tiles of whole rows whose blocks share operands by multicast."""
    checked(chains.drawn_clusters(seed), lambda name, error: name in chains.NO_SHARES or "bring a part each" in error)


@pytest.mark.parametrize("rows", [1, 1000, 4096])
@pytest.mark.parametrize("cluster", [2, 4])
def test_clusters_of_long_chains(rows: int, cluster: int, rng: np.random.Generator) -> None:
    """Many tiles a block, of a mask that makes tiles differ, with blocks of which some have no rows."""
    x = [chains.half(rng, 24, extent, 128) for extent in (rows, 4096, 4096)]
    o = chains.empty(24, rows, 128)
    given = listing.attention.bound(tuple(there(y) for y in (*x, o)), dict(scale=0.1, visible=chains.causal))
    results = []
    for size in (1, cluster):
        listing.attention.plan(*given.values(), mapping=gk.Mapping({"n": 128}, cluster={"m": size})).run(given)
        results.append(given["o"].get())
    assert np.array_equal(*results)


@pytest.mark.sample(20)
@pytest.mark.parametrize("draw", [listing.drawn_case, chains.drawn_case, chains.drawn_lengths, chains.drawn_shares],
                         ids=["tiles", "chains", "lengths", "shares"])
@pytest.mark.parametrize("seed", range(60))
def test_drawn_multistage(draw: Any, seed: int) -> None:
    """By cp.async and mma.sync, whatever the GPU has: the same programs, mappings and sizes."""
    program, arrays, mapping, more = draw(seed)
    mapping = listing.multistage(mapping)
    is_doubled = draw is listing.drawn_case and seed % 2 == 1 and program is not listing.product_and_sums
    if is_doubled:
        mapping = listing.doubled(mapping)

    def is_refusal(name: str, error: str) -> bool:
        too_wide = bool(mapping.blocks) and "registers of a thread" in error          # blocks that are Hopper's
        too_high = is_doubled and "where rounds add up rows or columns" in error
        return has_no_room(name, error) or too_wide or too_high or ("splits=" in error and name in chains.NO_SHARES)

    plan = checked((program, arrays, mapping, more), is_refusal)
    assert plan is None or plan.is_multistage


@pytest.mark.sample(4)
@pytest.mark.parametrize("mapping", [gk.Mapping(), gk.Mapping({"k": 64}, stages=2), gk.Mapping({"n": 256}), gk.Mapping(warpgroups=3),
                                     gk.Mapping({"m": 256, "n": 64})], ids=str)
@pytest.mark.parametrize("sizes", [(4096, 1032, 520), (1, 8, 72), (333, 5001, 4096), (2000, 137, 65)], ids=str)
def test_multistage_products(mapping: gk.Mapping, sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    """Many tiles and long rounds, rows that end within a copy, and rows that begin at 4 bytes alone."""
    import cupy

    m, n, k = sizes
    mapping = listing.multistage(mapping)
    for of in (8, 2):
        a, b, c = (cupy.asarray(rng.standard_normal((rows, columns + -columns % of)) / 8).astype("f2")[:, :columns]
                   for rows, columns in ((m, k), (k, n), (k, n)))
        d, e, y = cupy.full((m, n), cupy.nan, "f2"), cupy.full((m, n), cupy.nan, "f4"), cupy.full(m, cupy.nan, "f4")
        has_two, has_sums = mapping.blocks.get("n") != 256, "m" not in mapping.blocks
        for _ in range(3):
            if has_two:
                listing.dual(a, b, c, d, gate=listing.silu_times, mapping=mapping)
            if has_sums:
                listing.product_and_sums(a, b, e, y, mapping=mapping)
        one, other = (np.asarray((a.astype("f8") @ x.astype("f8")).get()) for x in (b, c))
        if has_two:
            close(d.get(), one / (1 + np.exp(-one)) * other)
        if has_sums:
            close(e.get(), one)
            assert np.allclose(y.get(), a.astype("f8").sum(axis=1).get(), atol=1e-3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("visible", [None, chains.causal, chains.window], ids=["all", "causal", "window"])
def test_multistage_heads(width: int, visible: Any, rng: np.random.Generator) -> None:
    """Many tiles, of long rounds."""
    import cupy

    q, k, v = (cupy.asarray(rng.standard_normal((8, 1500, width))).astype("f2") for _ in range(3))
    o = cupy.full(q.shape, cupy.nan, "f2")
    for _ in range(3):
        listing.attention(q, k, v, o, width ** -0.5, visible=visible, mapping=gk.Mapping(kernel="multistage"))
    close(o.get(), listing.attention.reference(q.get(), k.get(), v.get(), np.empty(q.shape), width ** -0.5, visible=visible))


@pytest.mark.parametrize("splits", [2, 7, 16, 17, 33, 132, 1024])
def test_any_number_of_shares(splits: int, rng: np.random.Generator) -> None:
    """More than there are blocks of rounds, too; a second call has the same bits."""
    q, k, v = (there(chains.half(rng, 2, extent, 128)) for extent in (5, 20000, 20000))
    given = listing.attention.bound((q, k, v, there(chains.empty(2, 5, 128)), 0.09), {})
    plan = listing.attention.plan(*given.values(), mapping=gk.Mapping({"n": 64}, splits=splits))
    results = []
    for _ in range(2):
        given["o"][...] = np.nan
        plan.run(given)
        results.append(given["o"].get())
    assert np.array_equal(*results)
    close(results[0], listing.attention.reference(q.get(), k.get(), v.get(), np.empty(q.shape), 0.09))


def test_shares_on_streams_and_in_a_graph(rng: np.random.Generator) -> None:
    """What shares leave is in memory of the stream's: two streams at once, and a graph that runs beside its stream."""
    import cupy

    q, k, v = (cupy.asarray(rng.standard_normal((8, extent, 128))).astype("f2") for extent in (16, 20000, 20000))
    results = [cupy.full(q.shape, cupy.nan, "f2") for _ in range(4)]
    plan = listing.attention.plan(q, k, v, results[0], 0.09)
    assert plan.mapping.splits == 16
    listing.attention(q, k, v, results[0], 0.09)
    others = [q * factor for factor in (0.5, 1.5)]
    wanted = [listing.attention.reference(x.get(), k.get(), v.get(), np.empty(q.shape), 0.09) for x in (q, *others)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for stream, x, o in zip(streams, others, results[1:], strict=False):
            with stream:
                listing.attention(x, k, v, o, 0.09)
    with streams[0]:
        streams[0].begin_capture()
        listing.attention(q, k, v, results[3], 0.09)
        graph = streams[0].end_capture()
    for _ in range(5):
        graph.launch(streams[1])
        with streams[0]:
            listing.attention(others[0], k, v, results[1], 0.09)
    cupy.cuda.Device().synchronize()
    for got, exact in zip((results[0], results[1], results[2], results[3]), (*wanted, wanted[0]), strict=True):
        close(got.get(), exact)


SLOPE = 2.0


def sloped(s: Any) -> Any:
    return SLOPE * s


def test_calls_find_their_plans(rng: np.random.Generator, rebound: Set) -> None:
    """Other arrays of the same kinds, on other streams, by one plan; another by a constant that has changed."""
    import cupy

    calls.plans.clear()
    exact = listing.attention.reference
    for slope in (2.0, 0.5):
        rebound(SLOPE=slope)
        for stream in (None, cupy.cuda.Stream(non_blocking=True)):
            q, k, v = (cupy.asarray(rng.standard_normal((3, extent, 64))).astype("f2") for extent in (100, 150, 150))
            o = cupy.full(q.shape, cupy.nan, "f2")
            cupy.cuda.Device().synchronize()
            listing.attention(q, k, v, o, 0.125, score=sloped, stream=None if stream is None else stream.ptr)
            cupy.cuda.Device().synchronize()
            close(o.get(), exact(q.get(), k.get(), v.get(), np.empty(q.shape), 0.125, score=sloped))
    assert len(calls.plans) == 1


@pytest.mark.parametrize("captured", [False, True], ids=["launches", "graph"])
def test_launches_that_begin_early_wait_for_what_they_read(captured: bool, rng: np.random.Generator) -> None:
    """Kernels in one stream, each of what the one before has stored, behind a kernel of CuPy's that fills their operand anew:
    tiles, whole rows, shares and their merging, functions of rows; and the first overwrites what the last has read."""
    import cupy

    heads, rows, d = 4, 64, 128
    k, v = (cupy.asarray(rng.standard_normal((heads, 4096, d))).astype("f2") for _ in range(2))
    w, first = (cupy.asarray(rng.standard_normal(shape) / 8).astype("f2") for shape in ((d, d), (heads * rows, d)))
    x, h, o, y = (cupy.full((heads * rows, d), cupy.nan, "f2") for _ in range(4))
    of_heads = [z.reshape(heads, rows, d) for z in (h, o)]
    assert listing.attention.plan(of_heads[0], k, v, of_heads[1], 0.09).mapping.splits > 1

    def calls() -> None:
        for _ in range(8):
            listing.gemm(x, w, h)
            listing.attention(of_heads[0], k, v, of_heads[1], 0.09)
            row_programs.softmax(o, y, scale=20.0)
            listing.gemm(y, w, x)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        calls()                                        # compiled, and the stream's memory is there
        if captured:
            stream.begin_capture()
            calls()
            graph = stream.end_capture()
        for factor in (1.0, 2.0, 0.5):
            x[:] = factor * first
            graph.launch(stream) if captured else calls()
            got = x.copy()
            x[:] = factor * first
            for _ in range(8):
                for call in (lambda: listing.gemm(x, w, h), lambda: listing.attention(of_heads[0], k, v, of_heads[1], 0.09),
                             lambda: row_programs.softmax(o, y, scale=20.0), lambda: listing.gemm(y, w, x)):
                    call()
                    stream.synchronize()
            assert cupy.isfinite(got).all() and cupy.array_equal(got, x)


def test_lengths_change_between_launches(rng: np.random.Generator) -> None:
    """One plan, many tiles: lengths are read in every launch."""
    import cupy

    q, k, v = (cupy.asarray(rng.standard_normal((16, 2000, 128))).astype("f2") for _ in range(3))
    o, lse, lengths = cupy.full(q.shape, cupy.nan, "f2"), cupy.full(q.shape[:2], cupy.nan, "f4"), cupy.zeros(16, "i4")
    plan = chains.bounded.plan(q, k, v, lengths, o, lse, 0.09, visible=chains.between)
    for _ in range(3):
        lengths[:] = cupy.asarray(rng.integers(0, 2100, 16).astype("i4"))
        plan.run(dict(q=q, k=k, v=v, lengths=lengths, o=o, lse=lse))
        for h in range(16):
            i, j = np.arange(2000)[:, None], np.arange(min(2000, int(lengths[h])))
            shown = chains.between(i, j)
            s = np.where(shown, 0.09 * (q[h].get().astype("f8") @ k[h, :len(j)].get().astype("f8").T), -np.inf)
            top = s.max(1, keepdims=True, initial=-np.inf)
            p = np.exp(s - np.where(np.isinf(top), 0.0, top))
            with np.errstate(all="ignore"):
                close(o[h].get(), p @ v[h, :len(j)].get().astype("f8") / p.sum(1, keepdims=True))


@pytest.mark.sample(4)
@pytest.mark.parametrize("cluster", [{"m": 2}, {"n": 2}, {"m": 2, "n": 2}, {"m": 4}, {"n": 4}], ids=str)
@pytest.mark.parametrize("sizes", [(4096, 1032, 520), (1, 8, 72), (333, 5000, 4096), (2000, 136, 64)], ids=str)
def test_clusters(cluster: dict[str, int], sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    """Some tiles of a cluster are past the edge, and clusters go on from tile to tile; launches come one after the other."""
    import cupy

    m, n, k = sizes
    a, b, c = (cupy.asarray(rng.standard_normal(shape) / 8).astype("f2") for shape in ((m, k), (k, n), (k, n)))
    d, e, y = cupy.full((m, n), cupy.nan, "f2"), cupy.full((m, n), cupy.nan, "f4"), cupy.full(m, cupy.nan, "f4")
    for _ in range(3):
        listing.dual(a, b, c, d, gate=listing.silu_times, mapping=gk.Mapping(cluster=cluster))
        listing.product_and_sums(a, b, e, y, mapping=gk.Mapping(cluster=cluster))
    one, other = (np.asarray((a.astype("f8") @ x.astype("f8")).get()) for x in (b, c))
    exact = one / (1 + np.exp(-one)) * other
    assert np.abs(d.get() - exact).max() <= 2e-3 * np.abs(exact).max()
    assert np.abs(e.get() - one).max() <= 1e-4 * np.abs(one).max()
    assert np.allclose(y.get(), a.astype("f8").sum(axis=1).get(), atol=1e-3)


@pytest.mark.sample(4)
@pytest.mark.parametrize("cluster", [{}, {"m": 2}, {"n": 2}, {"m": 2, "n": 2}], ids=str)
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(4096, 1037, 520), (1, 8, 72), (333, 5003, 4099)], ids=str)
def test_sums_of_rows_and_columns(cluster: dict[str, int], warpgroups: int, sizes: tuple[int, int, int],
                                  rng: np.random.Generator) -> None:
    """Many tiles a block, whose columns' values are in one place of shared memory after the other; launches in a row."""
    m, n, k = sizes
    mapping = gk.Mapping({"n": 128}, warpgroups=warpgroups, stages=3, cluster=cluster)
    a, b = (listing.view(rng.standard_normal(shape) / 8) for shape in ((m, k), (k, n)))
    row, column, scale = (rng.standard_normal(extent).astype("f4") for extent in (m, n, n))
    given = [there(x) for x in (a, b, row, column, scale)]
    d, e, y = (there(np.full(shape, np.nan, dtype)) for shape, dtype in (((m, n), "f4"), ((m, n), "f2"), (n, "f4")))
    for _ in range(3):
        listing.zero_points(*given, d, mapping=mapping)
        listing.product_and_columns(*given[:2], e, y, mapping=mapping)
    close(d.get(), listing.zero_points.reference(a, b, row, column, scale, np.empty((m, n)), block=4096))
    for got, exact in zip((e, y), listing.product_and_columns.reference(a, b, np.empty((m, n)), np.empty(n), block=4096), strict=True):
        close(got.get(), exact)
    weights = there(listing.view(np.stack([b.T, -b.T])))
    both, of_row = there(listing.view(np.stack([a, a]))), there(np.stack([row, 2 * row]))
    f, z = (there(np.full(shape, np.nan, "f4")) for shape in ((2, m, n), (2, n)))
    listing.zero_points_of_weights(both, weights, of_row, f, z, of_all=0.25, mapping=mapping)
    exact = listing.zero_points_of_weights.reference(both.get(), weights.get(), of_row.get(), np.empty((2, m, n)), np.empty((2, n)),
                                                     of_all=0.25, block=4096)
    for got, wanted in zip((f, z), exact, strict=True):
        close(got.get(), wanted)


@pytest.mark.usefixtures("own_cache")
def test_what_is_tuned_is_taken_and_right(rng: np.random.Generator) -> None:
    import cupy

    try:
        a, b = (cupy.asarray(rng.standard_normal(shape) / 8).astype("f2") for shape in ((512, 264), (264, 520)))
        d = cupy.full((512, 520), cupy.nan, "f2")
        found = listing.gemm.tune(a, b, d, budget=90)
        assert len([row for row in found.rows if row.ratio is not None]) > 4 and found.kept, str(found)
        assert not [row for row in found.rows if row.error and not row.error.startswith("not ")], str(found)
        assert cupy.isnan(d).all() and listing.gemm.plan(a, b, d).mapping == found.mapping
        listing.gemm(a, b, d)
        exact = (a.astype("f8") @ b.astype("f8")).get()
        assert np.abs(d.get() - exact).max() <= 2e-3 * np.abs(exact).max()
        q, k, v, o = (cupy.asarray(rng.standard_normal((4, 500, 64))).astype("f2") for _ in range(4))
        heads = listing.attention.tune(q, k, v, o, 0.125, budget=90, keep=False)
        assert not [row for row in heads.rows if str(row.error).startswith(("wrong", "failed"))], str(heads)
    finally:
        cache.default_cache.cache_clear()


@pytest.mark.usefixtures("own_cache")
def test_shares_are_tuned(rng: np.random.Generator) -> None:
    """The default is of two kernels: other numbers of shares, and one kernel for all rounds, are right and slower or faster;
    what is kept is taken, and is right."""
    import cupy

    try:
        q, k, v = (cupy.asarray(rng.standard_normal((8, extent, 128))).astype("f2") for extent in (16, 8192, 8192))
        o = cupy.full(q.shape, cupy.nan, "f2")
        default = listing.attention.plan(q, k, v, o, 0.09)
        assert default.mapping.splits > 1
        found = listing.attention.tune(q, k, v, o, 0.09, budget=90)
        assert not [row for row in found.rows if row.error and not row.error.startswith("not ")], str(found)
        timed = {row.name: row for row in found.rows if row.ratio is not None}
        assert {"Mapping(splits=8)", "Mapping(splits=1)"} <= set(timed) and found.kept, str(found)
        assert timed["Mapping(splits=1)"].ratio < 0.6, str(found)              # type: ignore[operator]
        assert cupy.isnan(o).all() and listing.attention.plan(q, k, v, o, 0.09).mapping == found.mapping
        listing.attention(q, k, v, o, 0.09)
        close(o.get(), listing.attention.reference(q.get(), k.get(), v.get(), np.empty(q.shape), 0.09))
        mine = listing.attention.tune(q, k, v, o, 0.09, mappings=[gk.Mapping({"n": 64}, splits=3), gk.Mapping(splits=16)], keep=False)
        assert not [row for row in mine.rows if row.error is not None], str(mine)
    finally:
        cache.default_cache.cache_clear()


def close(got: np.ndarray, exact: np.ndarray) -> None:
    """To the rounding of the result, and of a row's sums in float32, of its largest element."""
    largest, rounding = max(1.0, np.abs(exact).max(initial=0.0)), {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-4}
    assert np.array_equal(np.isnan(got), np.isnan(exact))
    assert np.nanmax(np.abs(got.astype(float) - exact), initial=0.0) <= rounding[got.dtype.name] * largest


@pytest.mark.sample(5)
@pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
@pytest.mark.parametrize("name", [*roles.TILES, *roles.CHAINS])
def test_one_array_in_several_roles(name: str, kernel: str) -> None:
    program, made, more = roles.CHAINS[name] if name in roles.CHAINS else (*roles.TILES[name], {})
    checked((program, made(), roles.either(kernel, gk.Mapping()), more))


@pytest.mark.parametrize("splits", [1, 2])
def test_a_plan_computes_with_a_call_s_numbers(splits: int) -> None:
    """A number's bits are what a launch brings, and what a kernel without a new one still has."""
    q, k, v = (chains.half(np.random.default_rng(n), 2, 100, 64) for n in range(3))
    arrays = [q, k, v, chains.empty(2, 100, 64)]
    given = listing.attention.bound((*map(there, arrays), 0.125), {})
    plan = listing.attention.plan(*given.values(), mapping=gk.Mapping({"n": 32}, splits=splits))
    for scale in (0.5, 0.125, 0.5, 1.0):
        plan.run({**given, "scale": scale})
        chains.check_close([given["o"].get()], listing.attention.reference(*arrays, scale), lambda got: 3e-3)


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_rows(seed: int) -> None:
    program, arrays, more = row_programs.drawn_rows(seed)
    gpu = MACHINES["gpu"]
    given = program.bound(tuple(gpu.array(x) for x in arrays), more)
    plan = program.plan(*given.values())
    plan.run(given)
    for name, exact in zip(plan.printed.outs, program.reference(*arrays, **more), strict=True):
        close(gpu.numpy(given[name]), exact)


@pytest.mark.sample(4)
@pytest.mark.parametrize("columns", [1, 31, 768, 1000, 4097, 16384, 32768, 33000, 140000])
@pytest.mark.parametrize("dtype", [row_programs.F16, row_programs.BF16, row_programs.F32], ids=str)
def test_rows(dtype: Any, columns: int, rng: np.random.Generator) -> None:
    """Held by a warp, by blocks and by clusters, and loaded anew; beside gemmkit's own functions."""
    gpu = MACHINES["gpu"]
    x, residual = ((2 * rng.standard_normal((300, columns)) + 0.5).astype(dtype) for _ in range(2))
    gamma, beta = rng.standard_normal((2, columns)).astype(dtype)
    held = {name: gpu.array(value) for name, value in dict(x=x, residual=residual, gamma=gamma, beta=beta).items()}
    y, h, r = (gpu.array(np.full(shape, np.nan, kind)) for shape, kind in ((x.shape, dtype), (x.shape, dtype), ((300,), np.float32)))
    row_programs.softmax(held["x"], y, scale=0.5)
    close(gpu.numpy(y), row_programs.softmax.reference(x, np.empty(x.shape), scale=0.5))
    close(gpu.numpy(gk.softmax(held["x"], scale=0.5)), gpu.numpy(y).astype(float))
    row_programs.layernorm(held["x"], held["gamma"], held["beta"], y, eps=1e-3)
    close(gpu.numpy(y), row_programs.layernorm.reference(x, gamma, beta, np.empty(x.shape), eps=1e-3))
    close(gpu.numpy(gk.layernorm(held["x"], held["gamma"], held["beta"], eps=1e-3)), gpu.numpy(y).astype(float))
    row_programs.added_rmsnorm(held["x"], held["residual"], held["gamma"], h, y, r, eps=1e-3)
    exact = row_programs.added_rmsnorm.reference(x, residual, gamma, *(np.empty(shape) for shape in (x.shape, x.shape, 300)), eps=1e-3)
    for got, wanted in zip((h, y, r), exact, strict=True):
        close(gpu.numpy(got), wanted)


@pytest.mark.parametrize("sizes", [(4096, 1032, 520), (1, 8, 4096)], ids=str)
def test_many_tiles(sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    import cupy

    m, n, k = sizes
    a, b, c = (cupy.asarray(rng.standard_normal(shape) / 8).astype("f2") for shape in ((m, k), (k, n), (k, n)))
    d = cupy.full((m, n), cupy.nan, "f2")
    for _ in range(3):                                 # what is loaded is launched again
        listing.dual(a, b, c, d, gate=listing.silu_times)
    x, y = (np.asarray((a.astype("f8") @ other.astype("f8")).get()) for other in (b, c))
    exact = x / (1 + np.exp(-x)) * y
    assert np.abs(d.get() - exact).max() <= 2e-3 * np.abs(exact).max()


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(60))
def test_operands_of_other_types(seed: int) -> None:
    """float32 as tf32, and 8 bits, by both kernels; sums keep 14 bits of 8-bit floats."""
    program, arrays, mapping, more, lost = types.drawn_case(seed)
    given = program.bound(tuple(with_8_bits(x) for x in arrays), more)
    plan = program.plan(**given, mapping=mapping)
    plan.run(given)
    sizes = program.reference(*map(np.abs, arrays), **more)
    for got, wanted, size in zip((given[name].get() for name in plan.results), types.each(program.reference(*arrays, **more)),
                                 types.each(sizes), strict=True):
        types.close(got, wanted, size, lost)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8], ids=["int8", "uint8"])
@pytest.mark.parametrize("kernel", ["", "multistage"])
@pytest.mark.parametrize("m, n, k", [(4096, 4096, 4096), (300, 1000, 16384), (65, 72, 80)])
def test_products_of_integers_are_exact(dtype: Any, kernel: str, m: int, n: int, k: int, rng: np.random.Generator) -> None:
    import cupy

    a, b = (rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype) for shape in ((m, k), (n, k)))
    d = cupy.full((m, n), -7, np.int32)
    types.rows_by_rows(cupy.asarray(a), cupy.asarray(b), d, of=types.as_it_is, mapping=gk.Mapping(kernel=kernel))
    rows = rng.integers(0, m, 20)
    assert np.array_equal(d[rows].get(), (a[rows].astype(np.float64) @ b.T.astype(np.float64)).astype(np.int64))


@pytest.mark.parametrize("bound", [0, 40_000, 60_000, 100_000, 200_000])
def test_bounds_of_shared_memory(bound: int, rng: np.random.Generator) -> None:
    arrays = [chains.half(rng, 1000, 520), chains.half(rng, 520, 1032), chains.empty(1000, 1032)]
    plan = checked((listing.gemm, arrays, gk.Mapping(shared_bytes=bound), {}))
    assert not bound or plan.module.SHARED_BYTES <= bound
    checked((listing.gemm, arrays, gk.Mapping(places={"d": "registers"}), {}))


def test_programs_that_call_programs(rng: np.random.Generator) -> None:
    a, b, c, e = (chains.half(rng, *shape) for shape in ((520, 200), (200, 1032), (328, 520), (328, 1032)))
    checked((inlined.two_products, [a, b, c, e, chains.empty(520, 1032)], gk.Mapping(), {}))
    for variant in ("product", "product_by_rows"):
        given = [a[:, :64], b[:64, :64], chains.empty(520, 64)]
        checked((inlined.product, given, gk.Mapping(variants={"product": variant}), {}))


@pytest.mark.parametrize("kernel", ["", "multistage"])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("m, n, k", [(1000, 1032, 520), (300, 67, 65), (1, 8, 1), (4096, 2048, 1000)])
def test_largest_and_smallest_elements(kernel: str, sign: int, m: int, n: int, k: int, rng: np.random.Generator) -> None:
    arrays = folds.of_one_sign(rng, sign, m, n, k)
    mapping = gk.Mapping({"n": 64}, kernel=kernel)
    checked((folds.extremes, arrays, mapping, {}))
    a, b = np.ascontiguousarray(np.pad(arrays[0].T, ((0, 0), (0, -m % 8))))[:, :m], arrays[1]
    checked((folds.turned, [a, b, folds.result(m, n), folds.result(m)], mapping, {}))
