"""Rounds that rescale lazily, that end at a tile's own length, or that begin at a window's edge."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.emulator.errors import EmulatorError
from gemmkit.runtime.device import H100, assumed
from tests.support import chains
from tests.support import programs as listing
from tests.support.chains import check

# ==========================================================================================================================
# Rounds that end at a tile's own length, windows that are free at both ends, and both: drawn ones in the emulator, their texts,
# and what is refused.

F16 = np.float16
F32 = np.float32
ONE, TWO = (dataclasses.replace(H100, sm_count=count) for count in (1, 2))     # blocks go on from tile to tile
SMALL = gk.Mapping({"n": 64}, warpgroups=1)


def operands(lengths: Any, rows: int = 100, places: int = 150, dtype: Any = np.int32) -> list[np.ndarray]:
    rng, lengths = np.random.default_rng(rows + places), np.array(lengths, dtype)
    q, k, v = (chains.half(rng, len(lengths), extent, 64) for extent in (rows, places, places))
    k, v = chains.padded(k, lengths, np.nan), chains.padded(v, lengths, 6e4)
    return [q, k, v, lengths, chains.empty(*q.shape), chains.empty(*q.shape[:2], dtype=F32)]


@pytest.mark.kin(1)
@pytest.mark.sample(30)
@pytest.mark.parametrize("seed", range(150))
def test_drawn(seed: int) -> None:
    program, arrays, mapping, more = chains.drawn_lengths(seed)
    with assumed(TWO if seed % 2 else ONE):
        check(program, arrays, mapping, seed, **more)


@pytest.mark.kin(1)
@pytest.mark.sample(6, at=4)
@pytest.mark.parametrize("mapping", [SMALL, dataclasses.replace(SMALL, descending=False), dataclasses.replace(SMALL, ahead=False),
                                     gk.Mapping({"n": 32}, warpgroups=2)], ids=repr)
@pytest.mark.parametrize("visible", [chains.between, chains.stretched, chains.window], ids=lambda x: x.__name__)
def test_windows_with_two_free_ends(visible: Any, mapping: gk.Mapping) -> None:
    """Rows whose window begins behind the last place see nothing: 0 / 0."""
    with assumed(ONE):
        q, k, v, lengths, o, lse = operands([150, 30], 100, 200)
        check(chains.bounded, [q, k, v, lengths, o, lse], mapping, scale=0.125, visible=visible)
        k, v = (np.random.default_rng(1).standard_normal(k.shape).astype(F16) for _ in range(2))
        plan = check(listing.attention, [q, k, v, o], mapping, scale=0.125, visible=visible)
    assert all(f"def {name}(m, sizes)" in plan.text for name in ("first_seen", "end_seen", "free_from", "free_to"))


@pytest.mark.kin(1)
def test_lengths_of_other_stacks_and_of_none() -> None:
    """All are 0, one of a stack of one, an element of a table by a matrix of it."""
    check(chains.bounded, operands([0, 0], 40), SMALL, scale=0.125)
    check(chains.bounded_weights, operands([0, -1], 40), gk.Mapping({"n": 32}, warpgroups=1, ahead=False), scale=0.125)
    check(chains.bounded, operands([150], 70, dtype=np.int64), SMALL, scale=0.125)
    q, k, v, lengths, o, lse = operands([70, 20], 40, 90)
    check(chains.bounded, [q, k, v, np.repeat(lengths, 3)[::3], o, lse], SMALL, scale=0.125)         # a view with a stride


@gk.program
def summed_below(x: Any, y: Any, lengths: Any, d: Any) -> None:
    for h, m in gp.parallel(x.count, x.rows):
        sums = gp.zeros(m, y.columns)
        for n in gp.sequential(y.rows, stop=lengths[h] - 128):
            sums += x[h, m, n] @ y[h, n]
        d[h, m] = sums


@gk.program
def summed_to_a_place(x: Any, y: Any, lengths: Any, d: Any) -> None:
    for h, m in gp.parallel(x.count, x.rows):
        sums = gp.zeros(m, y.columns)
        for n in gp.sequential(y.rows, start=lengths[h] * -2, stop=gp.place(h) * 1500000000 + 7):
            sums += x[h, m, n] @ y[h, n]
        d[h, m] = sums


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [SMALL, gk.Mapping(kernel="multistage")], ids=["", "multistage"])
@pytest.mark.parametrize("lengths", [np.array([-2**31, 2**31 - 1, 133, -5], np.int32), np.array([-2**32 + 190, 2**33, 133, -2**62])],
                         ids=["int32", "int64"])
def test_lengths_that_32_bits_do_not_hold(lengths: Any, mapping: gk.Mapping, rng: np.random.Generator) -> None:
    """Nor what is made of them: they are computed in 64 bits, and clamped to the axis before they are anything else."""
    x, y = (rng.standard_normal((4, 64, 64)).astype(F16) for _ in range(2))
    check(summed_below, [x, y, lengths, np.empty((4, 64, 64), F16)], mapping)
    check(summed_to_a_place, [x, y, lengths, np.empty((4, 64, 64), F16)], mapping)


@gk.program
def quotients_and_sums(q: Any, k: Any, v: Any, lengths: Any, o: Any, sums: Any) -> None:
    """A sum that begins anew without rounds, is divided by, and is a result as well."""
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):
            s = 0.125 * (q[h, m] @ k[h, n].T)
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top), gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total
        sums[h, m] = total


@pytest.mark.sample(3)
@pytest.mark.parametrize("mapping", [SMALL, gk.Mapping({"n": 32}, warpgroups=1, ahead=False), gk.Mapping({"n": 32}, kernel="multistage")],
                         ids=["", "plain", "multistage"])
def test_what_is_stored_has_a_line_of_its_own(mapping: gk.Mapping) -> None:
    """What one other value alone is made of was written there, and stored by a name that nothing had."""
    with assumed(ONE):
        check(quotients_and_sums, operands([70, 0], 40), mapping)


@gk.program
def shifted(a: Any, b: Any, bias: Any, c: Any, d: Any, alpha: float, kind: int) -> None:
    """Exponents within another operation, of scores that a value of each row is added to or subtracted from."""
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(c.rows):
            s = a[m] @ b[n].T
            if kind == 0:
                minus = -bias[m]
                shift = s / alpha + -minus
            elif kind == 1:
                shift = bias[m] - s / alpha
            elif kind == 2:
                shift = gp.minimum(s / alpha + gp.place(m), 2.0)
            elif kind == 3:
                shift = s / alpha - gp.place(m)
            else:                                      # a test lets it through: both have one name
                shift = gp.minimum(gp.where(lambda i, j: i <= j, s / alpha + gp.maximum(bias[m], 0.5), 0.0), 1.0)
            out += gp.exp(shift if kind == 4 else gp.where(gp.place(n) >= bias[m], gp.maximum(shift, -3.0), -1.0)).astype(c.dtype) @ c[n]
        d[m] = out


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("dtype", [np.float16, np.int32], ids=["f16", "int32"])
@pytest.mark.parametrize("mapping", [SMALL, gk.Mapping({"n": 32}, kernel="multistage")], ids=["", "multistage"])
def test_what_exponents_are_shifted_by_has_a_line(mapping: gk.Mapping, dtype: Any, kind: int) -> None:
    """Signs that cancel leave an element of an array, or a place, which are written where they are used: no line made the name
    that was subtracted. Where an exponent has a name, its own line was left out with those of its operands."""
    rng = np.random.default_rng(kind)
    a, b, c = (chains.half(rng, rows, 16) for rows in (70, 50, 50))
    bias = (1.5 * rng.standard_normal(70)).astype(dtype)
    check(shifted, [a, b, bias, c, chains.empty(70, 16)], mapping, alpha=8.0, kind=kind)


# -- texts ------------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
def test_blocks_behind_a_length_are_not_loaded() -> None:
    """The rounds of tiles of 64 rows on blocks of 64 places, counted by the producer's loads of K in the emulator."""
    loads: list[int] = []
    arrays = operands([70, 0, 400, 64, 1], 60)
    with assumed(ONE):
        plan = chains.bounded.plan(*arrays, 0.125, mapping=SMALL)
    counted = plan.text.replace("ring_k.expect(at_k, 8192)", "ring_k.expect(at_k, 8192)\n    COUNT")
    indented = re.sub(r"^( *)(ring_k\.expect\(at_k, 8192\))\n    COUNT", r"\1\2\n\1counted(n)", counted, flags=re.M)
    with assumed(ONE):
        edited = chains.bounded.plan(*arrays, 0.125, mapping=SMALL, text=indented)
    edited.module.counted = lambda n: loads.append(int(n))
    given = chains.bounded.bound((*arrays, 0.125), {})
    with gk.emulate():
        edited.run(given)
    assert loads == [64, 0, 0, 128, 64, 0, 0, 0]


def test_a_length_is_read_once_a_tile_and_tested_in_its_last_block() -> None:
    plan = chains.bounded.plan(*operands([70, 20]), 0.125, mapping=SMALL)
    text = plan.text
    assert "n_length = min(max(int(lengths[h]), 0), sizes.n)" in text and "n_length = uniform(min(max(int(lengths[h]), 0), sizes.n))" in text
    inner = text[text.index("        while n >= 0:\n", text.index("def consume")):]
    assert "n_length" not in inner[:inner.index("ring_q.release")]
    assert plan.printed.arrays == ("lengths",)
    masked = chains.bounded.plan(*operands([70, 20]), 0.125, visible=chains.between, mapping=SMALL).text
    assert all(f"def {name}(m, n_length, sizes)" in masked for name in ("first_seen", "end_seen", "free_from", "free_to"))


def test_cells_begin_anew_where_a_round_without_places_changes_them() -> None:
    """Attention's are as they were; exp(-inf - -inf) is NaN."""
    same = chains.bounded.plan(*operands([70, 20]), 0.125, mapping=SMALL).text
    changed = chains.bounded_weights.plan(*operands([70, 20]), 0.125, mapping=SMALL).text
    assert "n_length < 1" not in same and "before_n_length" not in same
    assert "return 0.0 if (n_length < 1) else out" in changed and "before_n_length" in changed


@pytest.mark.kin(1)
@pytest.mark.parametrize("old, new, at", [
    ("n_length = min(max(int(lengths[h]), 0), sizes.n)", "n_length = sizes.n", "def produce"),
    ("n_length = uniform(min(max(int(lengths[h]), 0), sizes.n))", "n_length = sizes.n", "def consume"),
    ("min(max(int(lengths[h]), 0), sizes.n)", "int(lengths[h])", ""),
    ("min(max(int(lengths[h]), 0), sizes.n)", "min(max(int(lengths[0]), 0), sizes.n)", ""),
    ("n_end = max(n_length, 1)", "n_end = n_length", "def consume"),           # the producer's is harmless: a block of zeros
    ("n_length - n - column", "sizes.n - n - column", ""), ("n_length - n - column", "n_length - n - column + 1", "")])
def test_a_fault_is_found(old: str, new: str, at: str) -> None:
    """Of the lines that lengths add to a text: each changed, the emulator raises, or a result is wrong."""
    arrays = operands([70, 0, 400, 20], 60)
    with assumed(ONE):
        text = chains.bounded.plan(*arrays, 0.125, mapping=SMALL).text
        begin = text.index(at)
        end = text.index("def consume") if at == "def produce" else len(text)
        assert old in text[begin:end]
        edited = text[:begin] + text[begin:end].replace(old, new) + text[end:]
        plan = chains.bounded.plan(*arrays, 0.125, mapping=SMALL, text=edited)
    exact = chains.bounded.reference(*arrays, 0.125)
    try:
        with gk.emulate(1):
            plan.run(chains.bounded.bound((*arrays, 0.125), {}))
    except EmulatorError:
        return
    assert not all(np.allclose(got, wanted, atol=6e-3, equal_nan=True) for got, wanted in zip(arrays[4:], exact, strict=True))


# -- refused ----------------------------------------------------------------------------------------------------------------

def halves(lengths: Any) -> list[Any]:
    return [*(np.zeros((2, 64, 64), F16) for _ in range(3)), lengths, np.zeros((2, 64, 64), F16)]


def program_with(stop: Any, extent: Any = lambda k: k.rows) -> Any:
    def told(q: Any, k: Any, v: Any, lengths: Any, o: Any) -> None:
        for h, m in gp.parallel(q.count, q.rows):
            out = gp.zeros(m, v.columns)
            for n in gp.sequential(extent(k), stop=stop(lengths, h, m)):       # here
                out += (q[h, m] @ k[h, n].T).astype(v.dtype) @ v[h, n]
            o[h, m] = out
    return told


def of_another_stack(q: Any, k: Any, v: Any, lengths: Any, o: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):                       # here
            out += (q[h, m] @ k[h, n].T).astype(v.dtype) @ v[h, n]
        o[h, m] = out


def sums_of_operands(q: Any, k: Any, v: Any, lengths: Any, o: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        out = gp.zeros(m, k.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):
            out += q[h, m, n] @ k[h, n]
        o[h, m] = out


def sums_of_transposes(q: Any, k: Any, v: Any, lengths: Any, o: Any) -> None:
    for h, m in gp.parallel(q.count, q.columns):
        out = gp.zeros(m, k.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):
            out += q[h, n, m].T @ k[h, n]              # here
        o[h, m] = out


def begins_as_a_block(q: Any, k: Any, v: Any, lengths: Any, o: Any) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        out = gp.copy(q[h, m])
        for n in gp.sequential(k.rows, stop=lengths[h]):                       # here
            out[:] = ((out @ k[h, n].T).astype(q.dtype) @ v[h, n]).astype(q.dtype)
        o[h, m] = out


def tiles_of_both(q: Any, k: Any, v: Any, lengths: Any, o: Any) -> None:
    for h, m, j in gp.parallel(q.count, q.rows, k.columns):
        out = gp.zeros(m, j)
        for n in gp.sequential(k.rows, stop=lengths[h]):                       # here
            out += q[h, m, n] @ k[h, n, j]
        o[h, m, j] = out


COUNTS = np.zeros(2, np.int32)


@pytest.mark.parametrize("function, lengths, kind, words", [
    (program_with(lambda x, h, m: x[h]), COUNTS.astype(F32), TypeError, "has dtype float32: lengths must be int32 or int64"),
    (program_with(lambda x, h, m: x[h]), COUNTS.astype(np.uint8), TypeError, "has dtype uint8"),
    (of_another_stack, np.zeros(3, np.int32), ValueError, r"axis 0 of lengths \(3 elements\)"),
    (program_with(lambda x, h, m: x[h]), np.zeros((2, 3), np.int32), ValueError, r"has the dimensions \(all of axis 1 of lengths \(3\)\)"),
    (program_with(lambda x, h, m: x[h, m]), np.zeros((2, 64), np.int32), ValueError, r"dimensions \(m\): all rows of a tile share its rounds"),
    (program_with(lambda x, h, m: x), COUNTS, TypeError, r"lengths has shape \(2,\), and a tile has one length"),
    (program_with(lambda x, h, m: 32.5), COUNTS, TypeError, "stop=32.5.*a whole number of elements of arrays of int32 or int64 is needed"),
    (program_with(lambda x, h, m: x[h] * 1.5), COUNTS, TypeError, "1.5 is not whole"),
    (program_with(lambda x, h, m: x[h], lambda k: k.count), COUNTS, ValueError, "one by one; only loops over rows and columns take stop="),
    (sums_of_transposes, COUNTS, ValueError, "a product sums over n, and takes q transposed"),
    (begins_as_a_block, COUNTS, ValueError, "out begins as a block of q, but rounds have a length"),
    (tiles_of_both, COUNTS, ValueError, "lengths in tiles of whole rows"),
    ], ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_no_length_names_the_line(function: Any, lengths: Any, kind: type[Exception], words: str) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(n for n, x in enumerate(source) if "# here" in x)
    with pytest.raises(kind, match=words) as error:
        gk.program(function).plan(*halves(lengths), mapping=SMALL)
    assert f"{__file__}:{line}" in str(error.value)


def test_sums_of_operands_have_a_reference() -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((2, 64, 64)) for n in range(3))
    got = gk.program(sums_of_operands).reference(q, k, v, np.array([10, 80]), np.empty((2, 64, 64)))
    np.testing.assert_allclose(got, np.stack([q[0, :, :10] @ k[0, :10], q[1] @ k[1]]))


def test_names_of_ranges_are_taken() -> None:
    def taken(q: Any, k: Any, v: Any, n_length: Any, o: Any) -> None:
        for h, m in gp.parallel(q.count, q.rows):
            out = gp.zeros(m, v.columns)
            for n in gp.sequential(k.rows, stop=n_length[h]):
                out += (q[h, m] @ k[h, n].T).astype(v.dtype) @ v[h, n]
            o[h, m] = out

    with pytest.raises(ValueError, match="n_length: the derived kernel uses this name"):
        gk.program(taken).plan(*halves(COUNTS), mapping=SMALL)


def test_what_is_out_of_range_is_tested_in_its_own_round() -> None:
    """A third product of a round: beyond the end it is 0, and not -inf, so that it cannot be tested a round later."""
    @gk.program
    def largest(q: Any, k: Any, v: Any, o: Any) -> None:
        for m in gp.parallel(q.rows):
            best = gp.full(m, -10.0)
            for n in gp.sequential(k.rows):
                t = ((q[m] @ k[n].T).astype(v.dtype) @ v[n]).astype(v.dtype) @ k[n].T
                best[:] = gp.maximum(best, t.max(axis=1))
            o[m] = best

    q, k, v = (np.abs(chains.half(np.random.default_rng(0), extent, 64, scale=0.1)) for extent in (70, 90, 90))
    with pytest.raises(gk.ConfigError, match="out of range in its own round"):
        largest.plan(-q, k, v, chains.empty(70, dtype=F32), mapping=gk.Mapping(ahead=True))
    o = chains.empty(70, dtype=F32)
    with gk.emulate():
        largest(-q, k, v, o, mapping=SMALL)
    np.testing.assert_allclose(o, largest.reference(-q, k, v, o, block=64), rtol=2e-3)


# ==========================================================================================================================
# Rounds that rescale lazily (``Mapping(lazy=True)``): drawn ones in the emulator, what they leave out, and what is refused.

LAZY = gk.Mapping({"n": 32}, warpgroups=1, lazy=True)
UPWARDS = gk.Mapping({"n": 32}, warpgroups=1, lazy=True, descending=False)


@pytest.mark.sample(16)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_lazily(seed: int) -> None:
    program, arrays, mapping, more = chains.drawn_lazy(seed)
    why = [held.get(program.function.__name__) for held in (chains.NOT_LAZY, chains.NO_SHARES if mapping.splits else {})]
    try:
        plan = check(program, arrays, mapping, seed, **more)
    except gk.ConfigError as error:
        assert any(reason is not None and reason in str(error) for reason in why), str(error)
        return
    assert "lazy" in plan.text.splitlines()[0] and "rare = changes(" in plan.text
    assert program.plan(*arrays, mapping=plan.mapping, **more).text == plan.text


def heads(growth: float, dtype: Any = np.float16) -> list[np.ndarray]:
    """Three blocks of 32 keys; scores of a block are larger by ``growth`` than those of the one before, in powers of 2."""
    q, k, v = (np.random.default_rng(n).standard_normal((1, rows, 64)).astype(dtype) for n, rows in ((0, 70), (1, 96), (2, 96)))
    q[..., 0], k[..., 0] = 1, np.arange(96) // 32 * growth * math.log(2)
    return [q, k, v, np.full(q.shape, np.nan, dtype)]


@pytest.mark.kin(1)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("growth", [0.0, 1.0, 6.0, 7.9, 8.1, 20.0, -20.0])
def test_growth(growth: float, dtype: Any) -> None:
    q, *others = heads(growth, dtype)
    q[..., 1:] /= 4
    o, exact = others[-1], listing.attention.reference(q, *others, 1.0)
    with gk.emulate():
        listing.attention(q, *others, 1.0, mapping=UPWARDS)
    assert np.abs(o.astype(float) - exact).max() <= (2e-2 if dtype is ml_dtypes.bfloat16 else 3e-3) * np.abs(exact).max()


@pytest.mark.kin(1)
def test_rows_are_left_as_they_are() -> None:
    """Of maxima that grow by a factor of 2 a round sums are never scaled, of 2^20 in every round."""
    def times(growth: float, mapping: gk.Mapping) -> int:
        q, k, v, o = heads(growth)
        q, o = q[:, :64], o[:, :64]                    # warps without rows have nothing to scale
        q[..., 1:] = 0
        plan = listing.attention.plan(q, k, v, o, 1.0, mapping=mapping)
        text = plan.text.replace("def make_out(", "CALLS = []\n\n\ndef make_out(").replace(
            "    return out * row_value(shrink, i)", "    CALLS.append(i)\n    return out * row_value(shrink, i)")
        assert text.count("CALLS") == 2
        again = listing.attention.plan(q, k, v, o, 1.0, mapping=mapping, text=text)
        with gk.emulate():
            again.run(dict(q=q, k=k, v=v, o=o, scale=1.0))
        return len(again.module.CALLS)

    every = times(1.0, gk.Mapping({"n": 32}, warpgroups=1, descending=False, lazy=False))
    assert times(1.0, UPWARDS) == 0 and times(20.0, UPWARDS) == every > 0


def test_the_text_has_a_branch() -> None:
    plan = listing.attention.plan(*heads(1.0), 1.0, mapping=LAZY)
    assert re.search(r"rare = changes\(drop, least\)(?s:.*?)if rare:\n +out = apply\(make_out, out, shrink\)", plan.text)
    assert "rare" not in listing.attention.plan(*heads(1.0), 1.0, mapping=gk.Mapping({"n": 32}, lazy=False)).text


@gk.program
def with_largest(q: Any, k: Any, v: Any, o: Any, largest: Any) -> None:
    """Attention that stores the largest score of a row as well."""
    for m in gp.parallel(q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[m] @ k[n].T
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top), gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[n]
            best[:] = top
        o[m] = out / total
        largest[m] = best


@gk.program
def weighted(q: Any, k: Any, v: Any, gate: Any, o: Any) -> None:
    """Weights that are multiplied before they are handed over: of float16 nothing says that there is room."""
    for m in gp.parallel(q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[m] @ k[n].T
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top) * gate[m], gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[n]
            best[:] = top
        o[m] = out / total


def test_refused() -> None:
    q, k, v, o = (x[0] for x in heads(1.0))
    row = np.full(70, np.nan, np.float32)
    with pytest.raises(gk.ConfigError, match=r"(?s)lazy=True\): results depend on the maximum that best keeps.*test_rounds.py"):
        with_largest.plan(q, k, v, o, row, mapping=LAZY)
    with pytest.raises(gk.ConfigError, match=r"p is handed over to a product in float16, and may be 2\^8 times as large"):
        weighted.plan(q, k, v, row, o, mapping=LAZY)
    with pytest.raises(gk.ConfigError, match=r"lazy=True\): no cell of rows keeps a maximum"):
        chains.gated_chain.plan(q, k, row, v, o, mapping=LAZY)
    with pytest.raises(gk.ConfigError, match="lazy=True.*these rounds only add to cells"):
        a = np.zeros((64, 64), np.float16)
        listing.gemm.plan(a, a, a.copy(), mapping=gk.Mapping(lazy=True))


def test_bfloat16_has_room() -> None:
    q, k, v, o = (x[0] for x in heads(3.0, ml_dtypes.bfloat16))
    q[:, 1:] /= 4
    gate = np.random.default_rng(3).random(70).astype(np.float32) + np.float32(0.5)
    exact = weighted.reference(q, k, v, gate, o)
    with gk.emulate():
        weighted(q, k, v, gate, o, mapping=LAZY)
    assert np.abs(o.astype(float) - exact).max() <= 2e-2 * np.abs(exact).max()


@pytest.mark.parametrize("old, new", [("if (least <= drop) else lane_value", "if (least - 32.0 <= drop) else lane_value"),
                                      ("return 1.0 if (least <= drop)", "return 1.0 if (least - 4.0 <= drop)"),
                                      ("    return out * row_value(shrink, i)", "    return out")])
def test_faults_are_found(old: str, new: str) -> None:
    """Of scores that grow by 2^10 or 2^20 a round."""
    for growth in (10.0, 20.0):
        q, k, v, o = heads(growth)
        q[..., 1:] /= 4
        plan = listing.attention.plan(q, k, v, o, 1.0, mapping=UPWARDS)
        assert plan.text.count(old) == 1
        edited = listing.attention.plan(q, k, v, o, 1.0, mapping=UPWARDS, text=plan.text.replace(old, new))
        with gk.emulate():
            edited.run(dict(q=q, k=k, v=v, o=o, scale=1.0))
        exact = listing.attention.reference(q, k, v, o, 1.0)
        if not np.abs(o.astype(float) - exact).max() <= 3e-3 * np.abs(exact).max():
            return
    pytest.fail("not found")
