"""Derived kernels in the emulator, against the same functions on NumPy; what cannot be derived is refused with its line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.runtime import device
from tests.support import programs as listing

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
EPS = {F16: 2.0 ** -11, BF16: 2.0 ** -8, F32: 2.0 ** -20}
Drawn = Callable[..., np.ndarray]


@pytest.fixture
def drawn() -> Drawn:
    rng = np.random.default_rng(3)
    return lambda *shape, dtype=F16, scale=1.0: (rng.standard_normal(shape) * scale).astype(dtype)


def empty(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def stored(program: gp.Program, arrays: tuple, components: dict[str, Any]) -> tuple[str, ...]:
    return program.plan(*arrays, **components).printed.outs


def check(program: gp.Program, *arrays: np.ndarray, mapping: gk.Mapping | None = None, seed: int | None = None,
          **components: Any) -> None:
    """Every result is the reference's to the rounding of its dtype, relative to its largest element."""
    wanted = program.reference(*arrays, **components)
    with gk.emulate(seed):
        program(*arrays, mapping=mapping, **components)
    results = [array for name, array in program.bound(arrays, components).items() if name in stored(program, arrays, components)]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        error = np.abs(got.astype(float) - exact).max(initial=0.0)
        assert error <= 4 * EPS[got.dtype] * max(np.abs(exact).max(initial=0.0), 1e-3)


SIZES = [(1, 8, 8), (1, 1, 8), (0, 8, 8), (8, 0, 8), (131, 136, 168), (64, 67, 64), (130, 300, 72)]


@pytest.mark.sample(7)
@pytest.mark.parametrize("m, n, k", SIZES)
def test_gemm_at_odd_sizes(drawn: Drawn, m: int, n: int, k: int) -> None:
    b = drawn(k, n + -n % 8)[:, :n]                    # a view: TMA's rows are multiples of 16 bytes
    check(listing.gemm, drawn(m, k), b, empty(m, n))


MAPPINGS = [gk.Mapping(), gk.Mapping({"n": 64}, warpgroups=1, stages=2), gk.Mapping({"n": 192, "k": 128}, stages=2),
            gk.Mapping({"k": 64}, warpgroups=3, stages=3), gk.Mapping({"n": 128, "k": 192}, warpgroups=2),
            gk.Mapping({"n": 64}, shared_bytes=70_000)]


@pytest.mark.kin(1)
@pytest.mark.sample(12)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("seed", [None, 5])
def test_a_mapping_changes_no_result(drawn: Drawn, mapping: gk.Mapping, seed: int | None) -> None:
    check(listing.gemm, drawn(135, 328), drawn(328, 136), empty(135, 136, dtype=F32), mapping=mapping, seed=seed)


@pytest.mark.parametrize("dtype, out", [(BF16, BF16), (BF16, F32), (F16, BF16)])
@pytest.mark.sample(3)
def test_dtypes(drawn: Drawn, dtype: Any, out: Any) -> None:
    check(listing.gemm, drawn(70, 72, dtype=dtype), drawn(72, 80, dtype=dtype), empty(70, 80, dtype=out))


@pytest.mark.kin(1)
def test_transposed_operands(drawn: Drawn) -> None:
    check(listing.transposed, drawn(168, 136), drawn(77, 168), empty(136, 77))


@pytest.mark.kin(1)
def test_dual(drawn: Drawn) -> None:
    a, b, c = drawn(100, 136), drawn(136, 72, scale=0.1), drawn(136, 72, scale=0.1)
    check(listing.dual, a, b, c, empty(100, 72), gate=listing.silu_times)
    check(listing.dual, a, b, c, empty(100, 72), gate=lambda x, y: gp.where(x < y, gp.sqrt(x * x), 2.0 / (3.0 + y * y)))


@pytest.mark.kin(1)
def test_two_loops_go_around_one_ring(drawn: Drawn) -> None:
    """So that each has all of the stages; of other blocks, and of stages that are said apart, there are two rings."""
    arrays = [drawn(50, 136), drawn(136, 72, scale=0.1), drawn(50, 200), drawn(200, 72, scale=0.1), drawn(72), empty(50, 72)]
    mapping = gk.Mapping({"n": 64, "k": 64, "j": 128}, stages=3)
    check(listing.lstm, *arrays, mapping=mapping)
    one = listing.lstm.plan(*arrays, mapping=mapping)
    assert one.text.count(" = Pipeline(") == 1 and one.text.count("stage_bytes=49152") == 4         # the larger one's, of 128
    assert "ring.expect(slot, 24576)" in one.text and "ring.expect(slot, 49152)" in one.text
    mapping = gk.Mapping({"n": 64}, stages={"x": 2, "h": 3})
    check(listing.lstm, *arrays, mapping=mapping)
    two = listing.lstm.plan(*arrays, mapping=mapping)
    assert two.text.count(" = Pipeline(") == 2 and two.mapping.stages == {"x": 2, "h": 3}
    large = listing.lstm.plan(*(np.zeros((4096, 4096), np.float16) for _ in range(4)), np.zeros(4096, np.float32),
                              np.zeros((4096, 4096), np.float16))
    assert large.mapping.blocks["n"] == 256 and large.mapping.stages == 3


@pytest.mark.kin(1)
def test_two_loops_add_to_one_cell(drawn: Drawn) -> None:
    check(listing.lstm, drawn(100, 136), drawn(136, 72, scale=0.1), drawn(100, 40), drawn(40, 72, scale=0.1),
          drawn(72, dtype=F32), empty(100, 72))


def test_tiles_are_as_wide_as_they_fit() -> None:
    """Two results of 128 x 256 and two stages need 224 KB; a width that is said is kept, with fewer rows, or refused."""
    a = [np.zeros((4096, 4096), np.float16) for _ in range(5)]
    assert listing.residual.plan(*a).mapping.blocks["n"] == 256
    assert listing.residual.plan(*a, mapping=gk.Mapping(shared_bytes=200_000)).mapping.blocks["n"] == 192
    lower = listing.residual.plan(*a, mapping=gk.Mapping({"n": 256}, shared_bytes=200_000)).mapping
    assert lower.blocks["n"] == 256 and lower.blocks["m"] == 64
    said = gk.Mapping({"m": 128, "n": 256}, shared_bytes=200_000)
    assert listing.residual.plan(*a, mapping=said).mapping.places == {"d": "registers", "e": "registers"}
    with pytest.raises(gk.ConfigError, match="bytes of shared memory"):
        listing.residual.plan(*a, mapping=dataclasses.replace(said, places={"d": "shared"}))


@pytest.mark.kin(1)
@pytest.mark.parametrize("bound, warpgroups", [(40_000, 1), (60_000, 2)])
def test_results_leave_from_registers_if_shared_memory_has_no_room(drawn: Drawn, bound: int, warpgroups: int) -> None:
    arrays, mapping = [drawn(135, 200), drawn(200, 136), empty(135, 136)], gk.Mapping(shared_bytes=bound, warpgroups=warpgroups)
    plan = listing.gemm.plan(*arrays, mapping=mapping)
    assert plan.module.SHARED_BYTES <= bound and plan.mapping.warpgroups == warpgroups
    assert plan.mapping.places == {"d": "registers"} and "out_d = OctetOut" in plan.text
    assert plan.text == listing.gemm.plan(*arrays, mapping=plan.mapping).text
    check(listing.gemm, *arrays, mapping=mapping)


@pytest.mark.parametrize("places, words", [
    ({"a": "registers"}, "instructions read in shared memory"), ({"acc": "shared"}, "add to it in registers"),
    ({"c": "shared"}, "threads read it in global memory"), ({"e": "shared"}, "it leaves from registers: TMA"),
    ({"q": "shared"}, "the cells of the program are acc, and its arguments a, b, c, d, e")])
def test_places_that_cannot_be(drawn: Drawn, places: dict[str, str], words: str) -> None:
    arrays = [drawn(64, 64), drawn(64, 64), drawn(64, 64), empty(64, 64), empty(64, 64, dtype=F32)]
    with pytest.raises(gk.ConfigError, match=words):
        listing.residual.plan(*arrays, mapping=gk.Mapping(places=places))
    kept = listing.residual.plan(*arrays, mapping=gk.Mapping(places={"a": "shared", "acc": "registers", "d": "shared"}))
    assert "out_d = TmaOut" in kept.text


@pytest.mark.kin(1)
def test_arrays_and_scalars_at_the_end_of_a_tile(drawn: Drawn) -> None:
    a, b = drawn(67, 72), drawn(72, 80)
    check(listing.biased, a, b, drawn(80), drawn(67, dtype=F32), empty(67, 80, dtype=F32), alpha=0.5)
    check(listing.residual, a, b, drawn(67, 80), empty(67, 80), empty(67, 80, dtype=F32))


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("k", [168, 8])
@pytest.mark.parametrize("warpgroups", [1, 3])
def test_rows_are_added_up_where_they_are_staged(drawn: Drawn, k: int, warpgroups: int) -> None:
    check(listing.product_and_sums, drawn(131, k), drawn(k, 72), empty(131, 72), empty(131, dtype=F32), seed=warpgroups,
          mapping=gk.Mapping({"n": 64}, warpgroups=warpgroups))


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize("out, n", [(F16, 72), (F32, 67)])
def test_stacks(drawn: Drawn, out: Any, n: int) -> None:
    b = drawn(72, n + -n % 8)[:, :n]
    check(listing.batched, drawn(2, 70, 72), b, drawn(2), drawn(2, n), empty(2, 70, n, dtype=out), empty(2, 70, dtype=F32),
          mapping=gk.Mapping({"n": 64}))
    check(listing.batched, drawn(0, 8, 72), b, drawn(0), drawn(0, n), empty(0, 8, n, dtype=out), empty(0, 8, dtype=F32))


def scaled_sums(a: Any, b: Any, d: Any, e: Any, scale: Any, bias: Any, factor: float) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, half = gp.full(m, n, 2.0), gp.full(m, 0.5)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            half += a[m, k].sum(axis=1)
        d[m, n] = gp.tanh(factor * acc + bias[n])
        with gp.once(n):
            e[m] = factor * half + scale[m]


def test_cells_that_begin_with_numbers(drawn: Drawn) -> None:
    check(gk.program(scaled_sums), drawn(70, 72), drawn(72, 72), empty(70, 72), empty(70), drawn(70), drawn(72), factor=0.125)


def begun(a: Any, b: Any, c: Any, bias: Any, x: Any, y: Any, d: Any, e: Any, alpha: float) -> None:
    """A cell begins with a matrix and goes on in a second loop, others with rows and with another cell's sums."""
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums, ends = gp.copy(alpha * c[m, n] + bias[n]), gp.copy(bias[n] - 2.0), gp.copy(gp.exp(c[m, n]))
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            ends += a[m, k] @ b[k, n]
            sums += b[k, n].sum(axis=0)
        other = gp.copy(acc * 0.5)
        for j in gp.sequential(x.columns):
            other += x[m, j] @ y[j, n]
            ends += x[m, j] @ y[j, n]
        d[m, n] = acc - other * ends
        with gp.once(m):
            e[n] = sums


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("gpu", [device.H100, device.A100], ids=["H100", "A100"])
@pytest.mark.parametrize("shape", [(70, 72, 72, 40), (131, 136, 40, 8), (8, 67, 8, 136)])
def test_cells_that_begin_with_arrays(drawn: Drawn, shape: tuple[int, ...], gpu: device.DeviceInfo) -> None:
    """The end of a tile adds what a cell begins with. What is not a number stays so."""
    m, n, k, j = shape
    c, d = drawn(m, n), empty(m, n, dtype=F32)
    b, y = (drawn(rows, n + -n % 8, scale=0.1)[:, :n] for rows in (k, j))
    arrays = drawn(m, k), b, c, drawn(n), drawn(m, j), y, d, empty(n, dtype=F32)
    with device.assumed(gpu):
        check(gk.program(begun), *arrays, alpha=-0.75)
        c[3, 5], c[0, 0] = np.nan, np.inf
        with gk.emulate():
            gk.program(begun)(*arrays, alpha=-0.75)
    assert np.isnan(d[3, 5]) and np.isnan(d[0, 0]) and np.isnan(d).sum() == 2


def clipped(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = gp.minimum(acc, 0.5) * gp.rsqrt(acc * acc + 1.0)


def normed_chain(a: Any, b: Any, c: Any, gamma: Any, d: Any) -> None:
    """A layer norm behind a chain of products, and a vector without indices."""
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(b.rows):
            h = gp.minimum(a[m] @ b[n].T, 0.25)
            out += h.astype(a.dtype) @ c[n]
        centred = out - out.mean(axis=1)
        d[m] = centred * gp.rsqrt((centred * centred).mean(axis=1) + 0.1) * gamma - out.min(axis=1)


@pytest.mark.kin(1)
def test_words_of_rows_beside_products(drawn: Drawn) -> None:
    check(gk.program(clipped), drawn(70, 72), drawn(72, 80), empty(70, 80))
    check(gk.program(normed_chain), drawn(70, 64), drawn(90, 64, scale=0.2), drawn(90, 64, scale=0.2), drawn(64),
          empty(70, 64, dtype=F32))


def test_views_and_misaligned_results(drawn: Drawn) -> None:
    out = empty(67, 83)
    check(listing.gemm, drawn(67, 72), drawn(72, 80), out[:, 1:81])
    assert np.isnan(out[:, 0]).all() and np.isnan(out[:, 81:]).all()
    strided = empty(80, 67)
    check(listing.gemm, drawn(67, 72), drawn(72, 80), strided.T)


def test_a_text_is_saved_edited_and_run_in_its_place(drawn: Drawn, tmp_path: Any) -> None:
    a, b, c, d = drawn(70, 72), drawn(72, 80, scale=0.1), drawn(72, 80, scale=0.1), empty(70, 80, dtype=F32)
    plan = listing.dual.plan(a, b, c, d, gate=lambda x, y: x + y)
    (tmp_path / "dual.py").write_text(plan.text)
    edited = (tmp_path / "dual.py").read_text().replace("return x + y", "return x - y")
    assert edited != plan.text
    with gk.emulate():
        listing.dual.plan(a, b, c, d, gate=lambda x, y: x + y, text=edited).run(dict(a=a, b=b, c=c, d=d))
    np.testing.assert_allclose(d, a.astype(float) @ (b.astype(float) - c.astype(float)), atol=1e-4)
    with pytest.raises(ValueError, match="line 1 is not valid Python"):
        listing.dual.plan(a, b, c, d, gate=lambda x, y: x + y, text="kernel =")
    with pytest.raises(ValueError, match="it has no kernel"):
        listing.dual.plan(a, b, c, d, gate=lambda x, y: x + y, text="x = 1")


# -- refused ----------------------------------------------------------------------------------------------------------------

A, B, D = np.zeros((40, 48), F16), np.zeros((48, 56), F16), np.zeros((40, 56), F16)


def scaled_rounds(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc[:] = 0.5 * acc + a[m, k] @ b[k, n]     # here
        d[m, n] = acc


def computed_operand(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += gp.exp(a[m, k]) @ b[k, n]           # here
        d[m, n] = acc


def stale(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc                                  # here
        for j in gp.sequential(a.columns):
            acc += a[m, j] @ b[j, n]


def without_its_stack(a: Any, b: Any, d: Any) -> None:
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ b[k, n]
        d[m, n] = acc                                  # here


def twice(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc
        d[m, n] = acc + 1.0                            # here


def out_of_order(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[n, m] = acc.T                                # here


def rows_alone(a: Any, b: Any, d: Any) -> None:
    for m in gp.parallel(a.rows):                      # here
        d[m] = 0.0


def no_product(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(d.rows, d.columns):        # here
        d[m, n] = gp.exp(1.0)


def sum_of_another(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, other = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            other += gp.exp(a[m, k]).sum(axis=1)       # here
        d[m, n] = acc


def reduced_at_the_end(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc - acc.max(axis=1)                # here


REFUSED = [
    (scaled_rounds, "cell other than by adding products and sums of rows or columns"), (computed_operand, "operand of a product is exp"),
    (stale, "a later loop adds"), (sum_of_another, "a sum of rows in rounds"), (twice, "stored twice"),
    (out_of_order, r"axis 0 of d \(40 elements\)"), (rows_alone, "no sequential loop"), (no_product, "no sequential loop"),
    (reduced_at_the_end, r"max\(axis=1\) reduces .*but a tile has only a part")]


@pytest.mark.parametrize("function, words", REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_has_no_kernel_names_the_line(function: Any, words: str) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(n for n, text in enumerate(source) if "# here" in text)
    with pytest.raises(ValueError, match=words) as error:
        gk.program(function).plan(A, B, D)
    assert f"{__file__}:{line}" in str(error.value)


@pytest.mark.parametrize("mapping, words", [
    (gk.Mapping({"q": 64}), "indices are m, n, k"), (gk.Mapping({"m": 64}), "128 are needed"),
    (gk.Mapping({"n": 72}), "64, 128, 192 or 256"), (gk.Mapping({"n": 256}, warpgroups=3), "128 columns fit"),
    (gk.Mapping(stages=1), "2 are needed"), (gk.Mapping(stages=16), "bytes of shared memory"),
    (gk.Mapping(shared_bytes=10_000), "only 10000 are available"),
    (gk.Mapping(stages={"a": 2, "b": 3}), "a and b share stages"), (gk.Mapping(stages={"d": 2}), "the arrays in stages are a, b"),
    (gk.Mapping(ahead=True), "these rounds only add"), (gk.Mapping(across=True), "these rounds only add"),
    (gk.Mapping(turns=True), "these rounds only add"), (gk.Mapping(descending=True), "tiles of whole rows"),
    (gk.Mapping(places={"p": "registers"}), "the cells of the program are acc")])
def test_mappings_that_cannot_be(mapping: gk.Mapping, words: str) -> None:
    with pytest.raises(gk.ConfigError, match=words):
        listing.gemm.plan(A, B, D, mapping=mapping)


def test_stages_by_the_names_of_arrays() -> None:
    text = listing.gemm.plan(A, B, D, mapping=gk.Mapping(stages={"b": 3}, places={"acc": "registers"})).text
    assert "ring = Pipeline(stages=3," in text


def test_a_stack_is_stored_as_a_stack() -> None:
    source, first = inspect.getsourcelines(without_its_stack)
    with pytest.raises(ValueError, match="and each overwrites the one before") as error:
        gk.program(without_its_stack).plan(np.zeros((2, 40, 48), F16), B, D)
    assert f"{__file__}:{first + len(source) - 1}" in str(error.value)


def test_names_that_the_text_has_for_its_own() -> None:
    def tile(a: Any, tile: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, tile.columns):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ tile[k, n]
            d[m, n] = acc

    with pytest.raises(ValueError, match="tile: the derived kernel uses this name"):
        gk.program(tile).plan(A, B, D)


def test_arrays_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="a is an operand.*TMA cannot load it"):
        listing.gemm.plan(np.zeros((40, 47), F16), np.zeros((47, 56), F16), D)
    with pytest.raises(TypeError, match="a has dtype float32"):
        listing.gemm.plan(A.astype(F32), B, D)
    with pytest.raises(TypeError, match="both must have one dtype"):
        listing.gemm.plan(A.astype(BF16), B, D)
    with pytest.raises(TypeError, match="d has dtype float64"):
        listing.gemm.plan(A, B, D.astype(float))
    with pytest.raises(ValueError, match="a and d share memory"):
        listing.gemm.plan(A, np.zeros((48, 48), F16), A)
    with pytest.raises(ValueError, match="sums over at least one element"):
        listing.gemm.plan(np.zeros((40, 0), F16), np.zeros((0, 56), F16), D)
    with pytest.raises(TypeError, match="with gemmkit.emulate"):
        listing.gemm(A, B, D)
    with pytest.raises(TypeError, match="bias has dtype complex64; an array that is read where a tile is stored must be real"):
        listing.biased.plan(A, B, np.zeros(56, np.complex64), np.zeros(40, F32), D)
    plan = listing.gemm.plan(A, B, D)
    with pytest.raises(ValueError, match="b is another kind of array"):
        plan.run(dict(a=A, b=B[:, ::-1], d=D))
    turing = dataclasses.replace(device.H100, arch=(7, 5))
    with device.assumed(turing), pytest.raises(gk.ConfigError, match="compute capability 8.0 or above"):
        listing.gemm.plan(A, B, D)


@gk.program
def three_products(a: Any, b: Any, c: Any, e: Any, f: Any, g: Any, d: Any, y: Any, sums: bool) -> None:
    """Three products of six operands, in two loops; ``sums``: and of the first one's rows."""
    for m, n in gp.parallel(a.rows, b.columns):
        one, two, three, total = gp.zeros(m, n), gp.zeros(m, n), gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            one += a[m, k] @ b[k, n]
            two += c[m, k] @ e[k, n]
            three += f[m, k] @ g[k, n]
            if sums:
                total += a[m, k].sum(axis=1)
        for j in gp.sequential(a.columns):
            one += c[m, j] @ b[j, n]
            two += f[m, j] @ e[j, n]
            three += a[m, j] @ g[j, n]
        d[m, n] = one + two * three
        if sums:
            with gp.once(n):
                y[m] = total


@pytest.mark.sample(2)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
def test_the_default_fits_where_a_mapping_does(drawn: Drawn, sums: bool, kernel: str) -> None:
    """With one warpgroup, or 64 rows of it, if there is no room for more."""
    operands = [drawn(24, 40, scale=0.2) if n % 2 == 0 else drawn(40, 24, scale=0.2) for n in range(6)]
    check(three_products, *operands, empty(24, 24, dtype=F32), empty(24, dtype=F32), mapping=gk.Mapping(kernel=kernel), sums=sums)
