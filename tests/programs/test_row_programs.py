"""Programs of rows in the emulator, against the same functions on NumPy in float64; what is refused names the line."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.kernels.rows import RegisterRow, StreamedRow
from gemmkit.plans.launch import forget
from gemmkit.runtime import device
from gemmkit.tuning import problems
from tests.support import row_programs as listing
from tests.support.checks import named_functions_run
from tests.support.machines import on_machines
from tests.support.row_programs import BF16, F16, F32

EPS = {F16: 2.0 ** -11, BF16: 2.0 ** -8, F32: 2.0 ** -23, np.dtype(np.float64): 2.0 ** -52}


def empty(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def close(got: np.ndarray, exact: np.ndarray, ulps: float = 40.0) -> None:
    """Within the rounding of the result, and of some operations in float32 (in float64 of such a result)."""
    assert np.array_equal(np.isnan(got), np.isnan(exact))
    shown = np.isfinite(exact)
    largest = max(1.0, np.abs(exact[shown]).max(initial=0.0))
    error = np.abs(got.astype(float) - exact)[shown]
    assert np.all(error <= 2 * EPS[got.dtype] * np.abs(exact[shown]) + ulps * min(EPS[F32], EPS[got.dtype]) * largest + (2 ** -24 if got.dtype == F16 else 0))


def check(program: gp.Program, *arrays: np.ndarray, seed: int | None = None, ulps: float = 40.0, **components: Any) -> None:
    wanted = program.reference(*arrays, **components)
    plan = program.plan(*arrays, **components)
    arguments = program.bound(arrays, components)
    with gk.emulate(seed):
        plan.run(arguments)
    results = [array for name, array in arguments.items() if name in plan.results]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        close(got, exact, ulps)


@pytest.fixture
def drawn(rng: np.random.Generator) -> Any:
    return lambda *shape, dtype=F16: (2 * rng.standard_normal(shape) + 0.5).astype(dtype)


SHAPES = [(0, 8), (1, 1), (5, 7), (3, 31), (2, 127), (6, 64), (2, 768), (3, 1000), (2, 1031), (1, 4104)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_layernorm_and_softmax(drawn: Any, dtype: Any, shape: tuple[int, int]) -> None:
    x, gamma, beta = drawn(*shape, dtype=dtype), drawn(shape[1], dtype=dtype), drawn(shape[1], dtype=F32)
    check(listing.layernorm, x, gamma, beta, empty(*shape, dtype=dtype), eps=1e-3)
    check(listing.softmax, x, empty(*shape, dtype=F32), scale=0.5, seed=3)


@pytest.mark.sample(6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_arrays_of_rows_and_several_results(drawn: Any, shape: tuple[int, int]) -> None:
    m, n = shape
    check(listing.added_rmsnorm, drawn(m, n), drawn(m, n, dtype=BF16), drawn(n), empty(m, n), empty(m, n, dtype=BF16),
          empty(m, dtype=F32), eps=1e-5)
    check(listing.layernorm_gradient, drawn(m, n, dtype=F32), drawn(m, n, dtype=F32), drawn(n, dtype=F32), drawn(m), drawn(m),
          empty(m, n, dtype=F32), ulps=400)


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [1, 40, 97])
def test_places_conditions_and_conversions(drawn: Any, n: int) -> None:
    check(listing.causal_softmax, drawn(n, n), empty(n, n, dtype=F32), empty(n, dtype=F32))
    check(listing.quantised, drawn(5, n, dtype=F32), empty(5, n), empty(5))
    check(listing.corners, drawn(5, n), drawn(n), empty(5, n, dtype=F32), empty(5, n, dtype=F32), empty(5), alpha=0.5)


@pytest.mark.parametrize("shape", [(3, 5, 24), (0, 5, 24), (3, 0, 24), (2, 7, 33)], ids=str)
def test_stacks(drawn: Any, shape: tuple[int, int, int]) -> None:
    h, m, n = shape
    check(listing.stacked, drawn(h, m, n), drawn(h, n), drawn(h), drawn(h, m), empty(h, m, n), empty(h, m, dtype=F32))


def test_rows_without_elements() -> None:
    """A sum of nothing is 0, a mean NaN, the largest -inf."""
    def ends(x: Any, a: Any, b: Any, c: Any) -> None:
        for m in gp.parallel(x.rows):
            a[m] = x[m].sum(axis=1)
            b[m] = x[m].mean(axis=1)
            c[m] = x[m].max(axis=1)

    results = [empty(3, dtype=F32) for _ in range(3)]
    with gk.emulate():
        gk.program(ends)(empty(3, 0), *results)
    assert (results[0] == 0).all() and np.isnan(results[1]).all() and (results[2] == -np.inf).all()
    for got, exact in zip(results, gk.program(ends).reference(empty(3, 0), *results)):
        np.testing.assert_array_equal(got, exact)


def test_what_is_not_finite() -> None:
    x = np.array([[1, np.nan, 2, 3], [-np.inf, 0, 0, -np.inf], [-np.inf] * 4], F32)
    check(listing.softmax, x, empty(3, 4, dtype=F32))


@pytest.mark.parametrize("source", [RegisterRow, StreamedRow])
@pytest.mark.parametrize("columns", [300, 301])
def test_rows_that_no_block_can_hold_are_loaded_anew(drawn: Any, source: Any, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()                                           # what was chosen within other limits
    monkeypatch.setattr(problems, "MOST_WARPS", 4 if source is RegisterRow else 2)
    monkeypatch.setattr(problems, "MOST_PIECES", 4 if source is RegisterRow else 1)
    arrays = [drawn(2, columns), drawn(2, columns), drawn(columns), empty(2, columns), empty(2, columns), empty(2)]
    plan = listing.added_rmsnorm.plan(*arrays, eps=0.1)
    assert isinstance(plan.module.ROWS.source, source) or columns == 301
    check(listing.added_rmsnorm, *arrays, eps=0.1)
    check(listing.layernorm_gradient, *(drawn(2, columns) for _ in range(2)), drawn(columns), drawn(2), drawn(2),
          empty(2, columns, dtype=F32), ulps=400)
    check(listing.softmax, drawn(2, columns), empty(2, columns))
    check(listing.layernorm, drawn(2, columns), drawn(columns), drawn(columns), empty(2, columns), eps=0.1)


def test_rows_of_clusters(drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no cluster holds; what a row has one of is stored, too."""
    monkeypatch.setattr(problems, "MOST_PIECES", 1)
    columns = 33_000
    arrays = [drawn(1, columns), drawn(1, columns), drawn(columns), empty(1, columns), empty(1, columns), empty(1)]
    plan = listing.added_rmsnorm.plan(*arrays, eps=0.1)
    assert plan.cluster.size == plan.module.ROWS.team.blocks > 1
    check(listing.added_rmsnorm, *arrays, eps=0.1)
    check(listing.softmax, drawn(2, columns), empty(2, columns))


def test_views(drawn: Any) -> None:
    """Rows at any distance, elements at any, misaligned ones; nothing beside a result is written."""
    x, out = drawn(6, 90, dtype=F32), empty(6, 41)
    for cut in (np.s_[:, 3:40], np.s_[::2, :32], np.s_[:, ::3], np.s_[::-1, ::-1]):
        check(listing.softmax, x[cut], empty(*x[cut].shape, dtype=F32))
    check(listing.softmax, x[:, 1:38], out[:, 2:39])
    assert np.isnan(out[:, :2]).all() and np.isnan(out[:, 39:]).all()
    columns = empty(37, 6, dtype=F32)
    check(listing.layernorm, x[:, :37], drawn(74)[::2], drawn(38)[1:], columns.T, eps=0.1)


@pytest.mark.kin(1)
@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(120))
def test_drawn(seed: int) -> None:
    program, arrays, more = listing.drawn_rows(seed)
    check(program, *arrays, ulps=2000, **more)


# -- the text ---------------------------------------------------------------------------------------------------------------

X, Y = np.zeros((40, 64), F16), np.zeros((40, 64), F16)
V = np.zeros(64, F32)


def test_the_text_is_that_of_the_function_written_by_hand() -> None:
    text = listing.layernorm.plan(X, V, V, Y, eps=0.1).text
    assert "mean, variance = moments(x_row)" in text                   # one trip of a row's warps for both
    text = listing.softmax.plan(X, Y).text
    assert text.count("exp2(") == 1 and "p_row = mapped(" in text      # each exponential once
    text = listing.added_rmsnorm.plan(X, X.copy(), V, Y, Y.copy(), np.zeros(40, F32), eps=0.1).text
    assert "t_row = mapped(x_row, lambda x, column, residual: x + residual, (residual_row,))" in text


def test_sizes_and_numbers_compile_nothing_anew() -> None:
    one, other = (listing.layernorm.plan(np.zeros((m, n), F16), np.zeros(n, F16), np.zeros(n, F16), np.zeros((m, n), F16), eps=eps)
                  for m, n, eps in ((40, 520, 0.1), (7, 528, 0.2)))
    assert one.text == other.text and one.launchable.kernel is other.launchable.kernel
    assert [x.fingerprint for x in one.arguments] == [x.fingerprint for x in other.arguments]


def test_deriving_is_little_work() -> None:
    """So many functions are 1 ms. (`python -m bench.calls` measures it.)"""
    assert named_functions_run(lambda: listing.layernorm.plan(X, V, V, Y, eps=0.1)) <= 2500


def test_a_text_is_edited_and_run_in_its_place(drawn: Any) -> None:
    x, y = drawn(3, 40), empty(3, 40, dtype=F32)
    plan = listing.softmax.plan(x, y)
    edited = plan.text.replace("p * over", "2.0 * p * over")
    assert edited != plan.text
    with gk.emulate():
        listing.softmax.plan(x, y, text=edited).run(dict(x=x, y=y))
    close(y, 2 * listing.softmax.reference(x, y))
    with pytest.raises(ValueError, match="it has no kernel; a derived kernel's text has kernel, Sizes, ROWS"):
        listing.softmax.plan(x, y, text="x = 1")


def test_names_that_a_text_has_too(drawn: Any) -> None:
    """A program's values may be called as the words of its text are; its arrays may not."""
    def named(x: Any, out: Any) -> None:
        for m in gp.parallel(x.rows):
            total = x[m].sum(axis=1)
            largest = gp.exp(x[m] - x[m].max(axis=1)) * total
            mapped = largest.mean(axis=1)
            out[m] = largest * mapped + gp.tanh(largest)

    check(gk.program(named), drawn(3, 40, dtype=F32), empty(3, 40, dtype=F32), ulps=4000)

    def taken(moments: Any, y: Any) -> None:
        for m in gp.parallel(moments.rows):
            y[m] = moments[m]

    with pytest.raises(ValueError, match="moments: the derived kernel uses this name"):
        gk.program(taken).plan(X, Y)

    def part(part_0: Any, y: Any) -> None:
        for m in gp.parallel(part_0.rows):
            y[m] = part_0[m]

    with pytest.raises(ValueError, match="part_0: the derived kernel uses this name"):
        gk.program(part).plan(X, Y)


def test_other_gpus() -> None:
    """Functions of rows need no tensor cores."""
    with device.assumed(dataclasses.replace(device.H100, arch=(8, 0))):
        assert listing.softmax.plan(X, Y).launchable.threads == 128


# -- refused ----------------------------------------------------------------------------------------------------------------

def over_rows(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m] - x[m].sum(axis=0)                 # here


def over_the_block(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m] * x[m].T.sum(axis=1)               # here


def product(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m] @ gp.zeros(x.columns, y.columns)   # here


@gk.program
def added_norm(h: Any, x: Any, gamma: Any, y: Any, eps: float) -> None:
    """A residual in place, and its norm."""
    for m in gp.parallel(h.rows):
        t = h[m] + x[m]
        h[m] = t
        y[m] = t * gp.rsqrt((t * t).mean(axis=1) + eps) * gamma


@gk.program
def softmax_in_place(x: Any) -> None:
    for m in gp.parallel(x.rows):
        p = gp.exp(x[m] - x[m].max(axis=1))
        x[m] = p / p.sum(axis=1)


@gk.program
def gated(a: Any, b: Any, s: Any, bias: Any, d: Any, y: Any, c: float) -> None:
    """Element by element, without rows."""
    for m, n in gp.parallel(a.rows, a.columns):
        x = a[m, n] * s[m] + bias[n]
        d[m, n] = x / (1.0 + gp.exp(-x)) * b[m, n] * c + gp.where(gp.place(n) > gp.place(m), 1.0, 0.0)
        with gp.once(n):
            y[m] = s[m] * c


@gk.program
def stacked_in_place(x: Any, f: Any) -> None:
    for h, m, n in gp.parallel(x.count, x.rows, x.columns):
        x[h, m, n] = gp.call(lambda x, i, j, k: x * 0.5 + (i + 2 * j) % 7 - k, x[h, m, n], m, n, h) + f[h]


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("shape", [*SHAPES[1:], (1, 70000)], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_in_place_and_element_by_element(machine: Any, dtype: Any, shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Rows in longer rows; what is stored is read before, of rows that registers hold and of longer ones."""
    def drawn(*shape: int, dtype: Any = dtype) -> np.ndarray:
        whole = np.full((*shape[:-1], shape[-1] + 9), np.nan, dtype)
        whole[..., :shape[-1]] = rng.standard_normal(shape)
        return whole

    def run(program: gp.Program, *wholes: np.ndarray, **numbers: float) -> None:
        columns = shape[1]
        cut = lambda x: x[..., :columns] if x.ndim > 1 or len(x) == columns + 9 else x                     # noqa: E731
        wanted = program.reference(*map(cut, wholes), **numbers)
        held = [machine.array(x) for x in wholes]
        given = program.bound(tuple(map(cut, held)), numbers)
        with machine.session():
            program(*map(cut, held), **numbers)
        results = [name for name in given if name in program.plan(*map(cut, wholes), **numbers).results]
        for name, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            whole = machine.numpy(held[list(given).index(name)])
            close(cut(whole), exact)
            assert whole.ndim == 1 or np.isnan(whole[..., columns:].astype(F32)).all()

    rows, columns = shape
    run(added_norm, drawn(*shape), drawn(*shape), drawn(columns, dtype=F32), drawn(*shape) * np.nan, eps=1e-5)
    run(softmax_in_place, drawn(*shape))
    if columns > 2000 and machine.emulated:
        return
    run(gated, drawn(*shape), drawn(*shape), rng.standard_normal(rows).astype(F32), drawn(columns, dtype=F32), drawn(*shape, dtype=F32) * np.nan,
        empty(rows, dtype=F32), c=0.5)
    run(stacked_in_place, drawn(3, *shape), rng.standard_normal(3).astype(F32))


@gk.program
def cross_entropy(x: Any, labels: Any, loss: Any, weight: Any) -> None:
    """A whole number for each row, which is compared with places, and is a number."""
    for m in gp.parallel(x.rows):
        top = x[m].max(axis=1)
        picked = gp.where(lambda i, j: labels[i] == j, x[m], 0.0).sum(axis=1)
        loss[m] = gp.where(labels[m] < 0, 0.0, top + gp.log(gp.exp(x[m] - top).sum(axis=1)) - picked)
        weight[m] = labels[m] * 0.5 + gp.call(lambda label: label % 7, labels[m])


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int16], ids=str)
def test_whole_numbers_of_rows(machine: Any, dtype: Any, rng: np.random.Generator) -> None:
    for rows, columns in ((5, 7), (9, 1000), (1, 1)):
        x, labels = rng.standard_normal((rows, columns)).astype(F16), rng.integers(0, min(columns, 100), rows).astype(dtype)
        labels[0] = labels[0] if dtype == np.uint8 else -1
        wanted = cross_entropy.reference(x, labels, empty(rows), empty(rows))
        results = [machine.array(empty(rows, dtype=F32)) for _ in range(2)]
        with machine.session():
            cross_entropy(machine.array(x), machine.array(labels), *results)
        for got, exact in zip(results, wanted, strict=True):
            close(machine.numpy(got), exact)


def read_and_stored(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m]                                    # here
        y[m].max(axis=1)


def stored_once(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        with gp.once(m):
            y[m] = x[m]                                # here


def stored_twice(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m]
        y[m] = x[m] * 2.0                              # here


def nothing_stored(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):                      # here
        gp.exp(x[m])


def a_mean_of_blocks(x: Any, y: Any) -> None:
    for m, n in gp.parallel(x.rows, x.columns):
        y[m, n] = x[m, n] - x[m, n].mean(axis=1)       # here


def a_matrix_without_indices(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x * 2.0                                 # here


def in_whole(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m].astype("int32")                    # here


REFUSED = [
    (over_rows, r"sum\(axis=0\) reduces .*but a tile has only a part"), (over_the_block, "rows are computed as they lie|reduces"),
    (product, "the right operand of a product is computed"), (read_and_stored, "y is both read and stored"),
    (stored_once, "only the first block along"), (stored_twice, "stored twice"), (nothing_stored, "nothing is stored"),
    (a_mean_of_blocks, "a mean needs the whole row"),
    (a_matrix_without_indices, r"read blocks of others: x\[m\]"), (in_whole, "functions of rows round to float16")]


@pytest.mark.parametrize("function, words", REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_has_no_kernel_names_the_line(function: Any, words: str) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(n for n, text in enumerate(source) if "# here" in text)
    with pytest.raises((ValueError, TypeError), match=words) as error:
        gk.program(function).plan(X, Y)
    assert f"{__file__}:{line}" in str(error.value)


@pytest.mark.parametrize("mapping, words", [
    (gk.Mapping({"m": 64}), r"blocks=\{'m': 64\}\): only products have it"), (gk.Mapping(warpgroups=2), "warpgroups=2"),
    (gk.Mapping(stages=2), "stages=2"), (gk.Mapping(stages={"x": 2}), r"stages=\{'x': 2\}"), (gk.Mapping(shared_bytes=1000), "shared_bytes"),
    (gk.Mapping(cluster={"m": 2}), r"cluster=\{'m': 2\}"), (gk.Mapping(ahead=True), "ahead=True"), (gk.Mapping(descending=True), "descending"),
    (gk.Mapping(places={"q": "registers"}), "the rows that are loaded or mapped are p, x")])
def test_mappings_of_products(mapping: gk.Mapping, words: str) -> None:
    with pytest.raises(gk.ConfigError, match=words):
        listing.softmax.plan(X, Y, mapping=mapping)


def test_places_of_rows() -> None:
    listing.softmax.plan(X, Y, mapping=gk.Mapping(places={"p": "registers"}))
    long = np.zeros((1, 140_000), F16)
    with pytest.raises(gk.ConfigError, match="a row is longer than its threads' registers"):
        listing.softmax.plan(long, long.copy(), mapping=gk.Mapping(places={"p": "registers"}))


def test_arrays_that_cannot_be() -> None:
    with pytest.raises(TypeError, match="x has dtype complex64; a function of rows reads float16, bfloat16"):
        listing.softmax.plan(X.astype(np.complex64), Y)
    with pytest.raises(TypeError, match="y has dtype int32"):
        listing.softmax.plan(X, Y.astype(np.int32))
    with pytest.raises(ValueError, match="x and y share memory"):
        listing.softmax.plan(X, X)
    with pytest.raises(ValueError, match="y is a result, but it is read-only"):
        listing.softmax.plan(X, np.broadcast_to(Y[:1], Y.shape))
    with pytest.raises(ValueError, match="y is a result with strides .0, 1.: several of its elements share memory"):
        listing.softmax.plan(X, np.lib.stride_tricks.as_strided(Y.copy(), Y.shape, (0, Y.itemsize)))
    with pytest.raises(TypeError, match="with gemmkit.emulate"):
        listing.softmax(X, Y)


@gk.program
def nested_choices(x: Any, gamma: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        inner = gp.where(gamma < x[m], 2.0, 3.0)
        y[m] = gp.where(lambda i, j: i != j, gp.where(gamma < x[m], x[m], 0.5), -1.0) + gp.where(x[m] < 0.0, 5.0, inner)


def test_a_choice_within_a_choice() -> None:
    """The inner one's brackets: without them the outer condition chose nothing where the inner one held."""
    x, gamma = np.random.default_rng(1).standard_normal((7, 40)).astype(np.float32), np.full(40, -0.5, np.float16)
    y = np.full((7, 40), np.nan, np.float32)
    with gk.emulate():
        nested_choices(x, gamma, y)
    assert np.abs(y - nested_choices.reference(x, gamma, y)).max() < 1e-6


@gk.program
def scaled_softmax(x: Any, y: Any, z: Any, scale: float) -> None:
    for m in gp.parallel(x.rows):
        top = (scale * x[m]).max(axis=1)
        p = gp.exp(scale * x[m] - top)
        y[m] = p / p.sum(axis=1)
        z[m] = scale * x[m] - top - gp.log(p.sum(axis=1))


def test_large_rows() -> None:
    """A GPU would fuse a product with the subtraction of its largest, which leaves a rounding error of thousands."""
    most = np.finfo(np.float32).max
    rows = [1e9, -1e9, 1e30, -1e30, most, -most, 3.0]
    x = np.array([[size] * 9 for size in rows] + [[1e9, -1e9, 0.0] * 3, [1e9, 1e9 - 64, 1e9 + 64] * 3,
                                                   [-np.inf] * 4 + [-1e9] * 5, [-np.inf] * 8 + [most]], np.float32)
    y, z = np.full_like(x, np.nan), np.full_like(x, np.nan)
    with gk.emulate():
        scaled_softmax(x, y, z, 0.3)
    below = (np.float32(0.3) * x).astype(float)
    below -= below.max(axis=1, keepdims=True)
    total = np.exp(below).sum(axis=1, keepdims=True)
    assert np.allclose(y, np.exp(below) / total, rtol=1e-5, atol=1e-7)
    assert np.allclose(z, below - np.log(total), rtol=1e-6, atol=1e-5)
    assert scaled_softmax.plan(x, y, z, 0.3).text.count("difference(scale * x, top)") == 2
