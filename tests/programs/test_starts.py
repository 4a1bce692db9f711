"""Rounds that begin at a row of the tile's own, ``gp.sequential(k.rows, start=starts[b], stop=lengths[b])``, and whole numbers that
bound them, made of others: in the emulator, as kernels read them, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import masks
from gemmkit import programs as gp
from gemmkit.emulator.errors import EmulatorError
from gemmkit.programs import calls
from gemmkit.runtime.device import A100, H100, assumed
from tests.programs.test_called import half
from tests.programs.test_language import check_refused
from tests.programs.test_packed import MAPPINGS, MULTISTAGE, check
from tests.ptx_machine.launch import Ptx
from tests.support import chains
from tests.support.chains import check_close
from tests.support.chains import empty as poisoned
from tests.support.machines import on_machines
from tests.support.programs import online

F16, F32 = np.float16, np.float32
SPLIT = gk.Mapping({"n": 32}, splits=3)
ONE = dataclasses.replace(H100, sm_count=1)            # a block goes on from tile to tile


@gk.program
def attention(q: Any, k: Any, v: Any, bias: Any, starts: Any, lengths: Any, o: Any, scale: float, seen: Any = None) -> None:
    """With a bias of each key, by its place in the array."""
    for b, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, start=starts[b], stop=None if lengths is None else lengths[b]):
            s = scale * (q[b, m] @ k[b, n].T) + bias[n] + gp.call(lambda m, n: 0.01 * (m - n), m, n)
            s = s if seen is None else gp.where(seen, s, -math.inf)
            online(s, v[b, n], v.dtype, best, total, out)
        o[b, m] = out * gp.where(best == -math.inf, 0.0, 1.0 / total)


def operands(rng: np.random.Generator, starts: Any, lengths: Any, rows: int = 20, keys: int = 100) -> list[Any]:
    """What lies in front of a start is NaN, in keys and in values; behind a length keys are."""
    q, k, v = (half(rng, len(starts), extent, 64) for extent in (rows, keys, keys))
    for b, start in enumerate(starts):
        k[b, :max(start, 0)] = v[b, :max(start, 0)] = np.nan
        if lengths is not None:
            k[b, max(lengths[b], 0):] = np.nan
    counted = None if lengths is None else np.array(lengths, np.int32)
    return [q, k, v, half(rng, keys), np.array(starts, np.int64), counted, poisoned(len(starts), rows, 64)]


#: Within a block and at its edge; in front of the axis and beyond it; at, in front of and behind the length.
BOUNDS = {"starts": ([37, -5, 100, 96], None), "both": ([37, 64, 0, 98], [98, 64, -3, 999]), "none": ([70, 5], [69, 5])}
OURS = {**{name: MAPPINGS[name] for name in ("", "two", "multistage", "plain", "apart", "ascending", "lazy")}, "splits": SPLIT,
        "cluster": gk.Mapping({"n": 32}, cluster={"m": 2}), "shares": gk.Mapping({"n": 32}, kernel="multistage", splits=2)}


@pytest.mark.kin(1)
@pytest.mark.sample(15)
@pytest.mark.parametrize("seen", [None, masks.Causal(), masks.Window(20, 10), chains.window], ids=["all", "causal", "window", "free"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("mapping", OURS)
def test_rounds_begin_at_a_start(mapping: str, bounds: str, seen: Any, rng: np.random.Generator) -> None:
    with assumed(ONE):
        check(attention, *operands(rng, *BOUNDS[bounds]), 0.125, seen, mapping=OURS[mapping])


@pytest.mark.kin(1)
@on_machines
def test_starts_on_machines(machine: Any, rng: np.random.Generator) -> None:
    """From the machine's memory; a second call with others plans nothing."""
    given = operands(rng, [21, 0, 64, 90], [77, 70, 64, 80], 9, 80) if machine.emulated else operands(rng, [130, 0, 64, 300], [290, 70, 64, 400], 70, 300)
    on = [machine.array(x) for x in given]
    for move in (0, 7):
        on[4][...] += move
        given[4] += move
        with machine.session():
            attention(*on, 0.125, masks.Causal())
        check_close([machine.numpy(on[-1])], attention.reference(*given, 0.125, masks.Causal()), lambda got: 4e-3)


@gk.program
def paged(q: Any, k: Any, v: Any, table: Any, starts: Any, lengths: Any, o: Any, scale: float, seen: Any = None) -> None:
    keys = gp.paged(k, table)
    for b, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(keys[b], start=starts[b], stop=None if lengths is None else lengths[b]):
            s = scale * (q[b, m] @ k[n.page, n].T) + gp.call(lambda n: 0.01 * n, n)
            s = s if seen is None else gp.where(seen, s, -math.inf)
            online(s, v[n.page, n], v.dtype, best, total, out)
        o[b, m] = out * gp.where(best == -math.inf, 0.0, 1.0 / total)


@pytest.mark.kin(1)
@pytest.mark.sample(15)
@pytest.mark.parametrize("seen", [None, masks.Causal(), chains.window], ids=["all", "causal", "free"])
@pytest.mark.parametrize("lengths", [None, [91, 33, 40]], ids=["all", "lengths"])
@pytest.mark.parametrize("rows", [8, 32, 64])
@pytest.mark.parametrize("mapping", ["", "multistage", "plain", "apart", "ascending", "splits"])
def test_starts_in_pages(mapping: str, rows: int, lengths: Any, seen: Any, rng: np.random.Generator) -> None:
    """Within a page; pages in front of it, and behind a length, are not looked up."""
    each, starts = -(-100 // rows), [41, 33, 5]
    q, k, v = half(rng, 3, 9, 64), half(rng, 3 * each, rows, 64), half(rng, 3 * each, rows, 64)
    table = rng.permutation(3 * each).reshape(3, each).astype(np.int64)
    given = q, k, v, table, np.array(starts), None if lengths is None else np.array(lengths), poisoned(3, 9, 64), 0.125, seen
    wanted = paged.reference(*given)
    for b, start in enumerate(starts):
        k[table[b, start // rows], :start % rows] = np.nan
        table[b, :start // rows] = -5
        if lengths is not None:
            table[b, -(-lengths[b] // rows):] = -5
    with assumed(ONE), gk.emulate():
        paged(*given, mapping=OURS[mapping] if mapping else gk.Mapping({"n": 32}))
    check_close([given[6]], wanted, lambda got: 4e-3)


@gk.program
def pieces(q: Any, k: Any, offsets: Any, starts: Any, o: Any, scale: float, seen: Any) -> None:
    """Places count from where a piece begins."""
    rows = gp.packed(q.rows, offsets)
    for i, m in gp.parallel(rows.count, rows.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, k.columns)
        for n in gp.sequential(rows[i], start=starts[i] - 3):
            s = gp.where(seen, scale * (q[m] @ k[n].T) - 0.01 * gp.place(n), -math.inf)
            online(s, k[n], k.dtype, best, total, out)
        o[m] = out * gp.where(best == -math.inf, 0.0, 1.0 / total)


@pytest.mark.kin(1)
@pytest.mark.sample(5)
@pytest.mark.parametrize("seen", [masks.Causal(), masks.Window(20, 30)], ids=["causal", "window"])
@pytest.mark.parametrize("mapping", ["", "multistage", "apart", "ascending"])
def test_starts_within_pieces(mapping: str, seen: Any, rng: np.random.Generator) -> None:
    q, k = half(rng, 120, 64), half(rng, 120, 64)
    with assumed(ONE):
        check(pieces, q, k, np.array([0, 70, 70, 75, 120], np.int32), np.array([23, 9, 900, 1], np.int32), poisoned(120, 64), 0.125, seen,
              mapping=OURS[mapping])


# -- whole numbers --------------------------------------------------------------------------------------------------------------

@gk.program
def windows(q: Any, k: Any, v: Any, lengths: Any, most: Any, o: Any, scale: float, width: int) -> None:
    """The last ``width`` keys of each, in front of what a table of other whole numbers says; a stack's number is one."""
    for b, h, m in gp.parallel(*q.counts, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, start=gp.maximum(lengths[b] - width, 2 * gp.place(h // 2)),
                               stop=gp.minimum(lengths[b] + gp.place(b), most[b, h])):
            online(scale * (q[b, h, m] @ k[h // 2, n].T), v[h // 2, n], v.dtype, best, total, out)
        o[b, h, m] = out / total


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [None, MULTISTAGE, SPLIT], ids=["", "multistage", "splits"])
def test_expressions(mapping: Any, rng: np.random.Generator) -> None:
    q, k, v = half(rng, 3, 4, 5, 64), half(rng, 2, 90, 64), half(rng, 2, 90, 64)
    lengths, most = np.array([80, 20, 90], np.int64), rng.integers(30, 90, (3, 4)).astype(np.int32)
    plan = check(windows, q, k, v, lengths, most, poisoned(3, 4, 5, 64), 0.125, 50, mapping=mapping)
    assert "max((int(lengths[b]) - 50), (2 * convert(I64, udiv(h, 2))))" in plan.text


@gk.program
def extremes(q: Any, k: Any, starts: Any, lengths: Any, o: Any) -> None:
    for b, m in gp.parallel(q.count, q.rows):
        total, out = gp.zeros(m), gp.zeros(m, k.columns)
        for n in gp.sequential(k.rows, start=3 * starts[b] - 2, stop=lengths[b] + 5):
            p = gp.exp(0.1 * (q[b, m] @ k[b, n].T))
            total += p.sum(axis=1)
            out += p.astype(k.dtype) @ k[b, n]
        o[b, m] = out / total


@pytest.mark.kin(1)
def test_what_is_made_of_int32_does_not_wrap(rng: np.random.Generator) -> None:
    """In machine code: the least and the largest number are in front of the axis and behind it."""
    q, k, o = half(rng, 2, 4, 32), half(rng, 2, 40, 32), poisoned(2, 4, 32)
    given = q, k, np.array([-2**31, 7], np.int32), np.array([2**31 - 1, 30], np.int32), o
    with assumed(A100), Ptx().session():
        extremes.plan(*given, mapping=MULTISTAGE).run(extremes.bound(given, {}))
    check_close([o], extremes.reference(*given), lambda got: 4e-3)


@gk.program
def constant(a: Any, b: Any, c: Any, d: Any, first: int, last: int) -> None:
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(b.rows, start=first, stop=last):
            out += gp.tanh(a[m] @ b[n].T).astype(a.dtype) @ c[n]
        d[m] = out


@pytest.mark.kin(1)
def test_numbers_of_the_host(rng: np.random.Generator) -> None:
    for first, last in ((10, 70), (np.int64(0), 90), (64, 64), (-3, 5)):
        check(constant, half(rng, 9, 64), half(rng, 80, 64), half(rng, 80, 64), poisoned(9, 64), first, last)


@gk.program
def of_operands(a: Any, b: Any, starts: Any, d: Any) -> None:
    """A product that sums over the rounds' places, of operands as they are."""
    for h, m in gp.parallel(a.count, a.columns):
        out = gp.zeros(m, b.columns)
        for n in gp.sequential(b.rows, start=starts[h]):
            out += a[h, n, m].T @ b[h, n]
        d[h, m] = out


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [None, MULTISTAGE], ids=["", "multistage"])
def test_operands_as_they_are(mapping: Any, rng: np.random.Generator) -> None:
    """Where rounds end with the axis there are zeros; and in front of a start there is nothing."""
    a, b, starts = half(rng, 3, 104, 72), half(rng, 3, 104, 64), np.array([17, 104, 0], np.int32)
    for h, start in enumerate(starts):
        a[h, :start] = b[h, :start] = np.nan
    check(of_operands, a, b, starts, poisoned(3, 72, 64), mapping=mapping)


@gk.program
def of_rows(a: Any, b: Any, starts: Any, lengths: Any, d: Any, s: Any) -> None:
    """Threads read the left operand, whose columns begin anywhere; and its sums."""
    for h, m in gp.parallel(a.count, a.rows):
        out, total = gp.zeros(m, b.columns), gp.zeros(m)
        for n in gp.sequential(b.rows, start=starts[h], stop=lengths[h]):
            out += a[h, m, n].astype(b.dtype) @ b[h, n]
            total += a[h, m, n].sum(axis=1)
        d[h, m] = out
        s[h, m] = total


@gk.program
def of_rows_as_they_are(a: Any, b: Any, lengths: Any, d: Any) -> None:
    for h, m in gp.parallel(a.count, a.rows):
        out = gp.zeros(m, b.columns)
        for n in gp.sequential(b.rows, stop=lengths[h]):
            out += a[h, m, n] @ b[h, n]
        d[h, m] = out


@pytest.mark.kin(1)
@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("bounds", [([17, 104, 0, -5], [90, 60, 104, 1]), ([8, 64, 63, 1], [64, 999, 65, 96])], ids=str)
@pytest.mark.parametrize("mapping", [None, MULTISTAGE, gk.Mapping({"n": 64}), gk.Mapping(splits=2)], ids=repr)
def test_bounds_of_columns(mapping: Any, bounds: Any, dtype: Any, rng: np.random.Generator) -> None:
    """Of a left operand what lies outside of the bounds may be anything; of float32 it is rounded."""
    starts, lengths = (np.array(x, np.int32) for x in bounds)
    a, b = half(rng, 4, 72, 105)[:, :, 1:].astype(dtype), half(rng, 4, 104, 64)
    for h in range(4):
        b[h, :max(0, starts[h])] = np.nan
        a[h, :, :max(0, starts[h])] = a[h, :, max(0, lengths[h]):] = np.nan
    check(of_rows, a, b, starts, lengths, poisoned(4, 72, 64), np.full((4, 72), np.nan, F32), mapping=mapping)
    if dtype == F16:
        a[:, :, :104] = np.nan_to_num(a)
        check(of_rows_as_they_are, a, np.nan_to_num(b), lengths, poisoned(4, 72, 64), mapping=mapping)


@gk.program
def rounded(a: Any, b: Any, d: Any, top: Any) -> None:
    """A left operand in float32, and rows of a block as it is, without bounds."""
    for m in gp.parallel(a.rows):
        out, best = gp.zeros(m, b.columns), gp.full(m, -math.inf)
        for n in gp.sequential(b.rows):
            out += a[m, n].astype(b.dtype) @ b[n]
            best[:] = gp.maximum(best, a[m, n].max(axis=1))
        d[m] = out
        top[m] = best


@on_machines
@pytest.mark.parametrize("mapping", [None, MULTISTAGE], ids=repr)
def test_blocks_that_threads_read(machine: Any, mapping: Any, rng: np.random.Generator) -> None:
    given = [half(rng, 70, 99).astype(F32) - 3, half(rng, 99, 64), poisoned(70, 64), np.full(70, np.nan, F32)]
    exact, on = rounded.reference(*given), [machine.array(x) for x in given]
    with machine.session():
        rounded(*on, mapping=mapping)
    for got, wanted in zip(on[2:], exact, strict=True):
        np.testing.assert_allclose(machine.numpy(got).astype(float), wanted, atol=0.06, rtol=2e-3)


@gk.program
def in_order(a: Any, b: Any, c: Any, starts: Any, d: Any, best: Any) -> None:
    """Rounds of which none may be left out, or change places; a cell that a round without places makes NaN."""
    for h, m in gp.parallel(a.count, a.rows):
        out, top = gp.zeros(m, c.columns), gp.full(m, -math.inf)
        for n in gp.sequential(b.rows, start=starts[h]):
            s = a[h, m] @ b[h, n].T
            new = gp.maximum(top, s.max(axis=1))
            out[:] = gp.minimum(out * gp.exp(top - new) + gp.exp(s - new).astype(a.dtype) @ c[h, n], 2.0)
            top[:] = new
        d[h, m] = out
        best[h, m] = top


@pytest.mark.kin(1)
@pytest.mark.parametrize("mapping", [gk.Mapping({"n": 32}), gk.Mapping({"n": 32}, kernel="multistage")], ids=["", "multistage"])
def test_blocks_begin_at_the_start(mapping: Any, rng: np.random.Generator) -> None:
    """What is bounded in every round shows where its blocks lie; without rounds cells keep what they begin with."""
    a, b, c = half(rng, 3, 9, 64) / F16(8), half(rng, 3, 100, 64), np.abs(half(rng, 3, 100, 64)) / F16(8)
    given = a, b, c, np.array([5, 100, 47]), poisoned(3, 9, 64, dtype=F32), poisoned(3, 9, dtype=F32)
    wanted = in_order.reference(*given, block=32)
    with gk.emulate():
        in_order(*given, mapping=mapping)
    check_close(list(given[4:]), wanted, lambda got: 4e-3)
    np.testing.assert_array_equal(given[4][1], 0.0)
    np.testing.assert_array_equal(given[5][1], -np.inf)


# -- texts ----------------------------------------------------------------------------------------------------------------------

FAULTS = [("max(int(starts[b]), 0)", new, at) for new in ("0", "int(starts[b])") for at in ("def produce", "def consume")]


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("old, new, at", [
    *FAULTS, ("int(starts[b])", "int(starts[0])", ""),
    ("n_end = max(n_length, n_start + 1)", "n_end = max(n_length, 1)", ""), ("n_start + ", "0 + ", ""), ("n_length - n - column", "sizes.n - n - column", "")])
def test_a_fault_is_found(old: str, new: str, at: str, rng: np.random.Generator) -> None:
    """Of the lines that starts add to a text: each changed, the emulator raises, or a result is wrong."""
    given = *operands(rng, [37, -5, 97, 110], [98, 70, 60, 999]), 0.125
    mapping = gk.Mapping({"n": 32}, warpgroups=1)
    with assumed(ONE):
        text = attention.plan(*given, mapping=mapping).text
        begin = text.index(at)
        end = text.index("def consume") if at == "def produce" else len(text)
        assert old in text[begin:end]
        edited = text[:begin] + text[begin:end].replace(old, new) + text[end:]
        plan = attention.plan(*given, mapping=mapping, text=edited)
    wanted = attention.reference(*given)
    try:
        with gk.emulate(1):
            plan.run(attention.bound(given, {}))
    except EmulatorError:
        return
    assert not np.allclose(given[6], wanted, atol=6e-3, equal_nan=True)


def test_other_starts_derive_nothing(rng: np.random.Generator, replaced: Any) -> None:
    seen: list[Any] = []
    planned = calls.planned
    replaced(calls, "planned", lambda *given: seen.append(given) or planned(*given))
    for device in (H100, A100):
        with assumed(device):
            texts = {attention.plan(*operands(rng, [start, 3], [90, 80]), 0.125).text for start in (0, 5, 70)}
        assert len(texts) == len(seen) == 1
        seen.clear()


# -- what is refused --------------------------------------------------------------------------------------------------------------

LOOP = """def f(q, k, v, starts, wrong, o, alpha=1.0):
    for b, m in gp.parallel(q.count, q.rows):
        out = gp.{}
        for n in gp.sequential({}):{}
            out += (q[b, m] @ k[b, n].T).astype(v.dtype) @ v[b, n]
        o[b, m] = out
"""


@pytest.mark.parametrize("loop,words", [
    ("k.rows, start=starts", r"sequential\(start=starts\): starts has shape \(2,\), and a tile has one length; .*start=lengths\[h\]"),
    ("k.rows, start=wrong[b]", r"sequential\(start=\.\.\.\): wrong\[b\] has dtype float32: lengths must be int32 or int64"),
    ("k.rows, start=q[b, m]", r"sequential\(start=q\[b, m\]\) has the dimensions \(m, all of axis 2 of q"),
    ("k.rows, start=gp.place(m)", r"has the dimensions \(m\): all rows of a tile share its rounds"),
    ("k.rows, start=starts[b] / 2", r"div is not whole; .*, maximum and minimum make others of them"),
    ("k.rows, stop=starts[b] * 0.5", r"0.5 is not whole"),
    ("k.rows, start=alpha", r"alpha is not whole"),
    ("k.rows, start=1.5", r"sequential\(start=1.5\): a whole number of elements of arrays"),
    ("k.rows, start='3'", r"sequential\(start='3'\): a whole number"),
    ("k.rows, start=b", r"sequential\(start=b\): a whole number"),
    ("k.rows, start=True", "True is neither a value of a program nor a condition"),
    ("k.rows, start=starts[b] < 3", "a condition is not a number"),
    ("k.count, start=starts[b]", r"sequential\(start=\.\.\.\): the loop is over .*, one by one; only loops over rows and columns take start="),
])
def test_what_is_no_start(loop: str, words: str) -> None:
    given = *(np.zeros((2, 64, 64), F16) for _ in range(3)), np.zeros(2, np.int32), np.zeros(2, F32), np.zeros((2, 64, 64), F16)
    check_refused(LOOP.format("zeros(m, v.columns)", loop, "  #"), words, lambda program: program.reference(*given))


@pytest.mark.parametrize("text,words", [
    (LOOP.format("copy(q[b, m])", "k.rows, start=starts[b]", "  #").replace("out += (q[b, m] @ k[b, n].T).astype(v.dtype) @ v[b, n]",
     "out[:] = ((out @ k[b, n].T).astype(q.dtype) @ v[b, n]).astype(q.dtype)"), "out begins as a block of q, but rounds have a length"),
    ("""def f(q, k, v, starts, wrong, o):
    for b, m, j in gp.parallel(q.count, q.rows, v.columns):
        out = gp.zeros(m, j)
        for n in gp.sequential(k.rows, start=starts[b]):  #
            out += q[b, m, n] @ v[b, n, j]
        o[b, m, j] = out
""", r"has a length \(start=, stop=\); a kernel takes lengths in tiles of whole rows"),
    (LOOP.format("zeros(m, v.columns)", "k.rows, start=starts[b], stop=starts[b]", "").replace("(q[b, m] @ k[b, n].T).astype(v.dtype)", "q[b, n, m].T").replace(
        "q.rows", "q.columns").replace("v[b, n]\n", "v[b, n]  #\n"), "a product sums over n, and takes q transposed"),
    (LOOP.format("zeros(m, v.columns)", "k.rows, start=starts[b]", "").replace("starts, wrong", "n_start, wrong").replace("starts[b]", "n_start[b]"),
     "n_start: the derived kernel uses this name"),
])
def test_starts_without_a_kernel(text: str, words: str) -> None:
    given = *(np.zeros((2, 64, 64), F16) for _ in range(3)), np.zeros(2, np.int32), np.zeros(2, F32), np.zeros((2, 64, 64), F16)
    if "n_start" in text:
        check_refused_name(text, words, given)
        return
    check_refused(text, words, lambda program: program.plan(*given))


def check_refused_name(text: str, words: str, given: tuple[Any, ...]) -> None:
    from tests.programs.test_language import written

    with pytest.raises(ValueError, match=words):
        written(text)[0].plan(*given)
