"""`gemmkit.attention` against NumPy in float64: head sizes, dtypes, masks, shared heads, strides, packed sequences; listed and
drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions import attention
from gemmkit.kernels.masks import ALiBi, Causal, Documents, SoftCap, Window
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100, assumed
from tests.support.attention import close, draw, reference, small
from tests.support.machines import BF16, on_machines, poison

# ==========================================================================================================================
# `gemmkit.attention` against NumPy in float64: head sizes, dtypes, masks, shared heads, strides, odd lengths, packed sequences.

F16 = np.dtype("f2")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls on a machine; in the emulator with few keys a block and few blocks."""
    @contextlib.contextmanager
    def made(machine: Any) -> Any:
        with small(monkeypatch) if machine.emulated else contextlib.nullcontext(), machine.session():
            yield

    return made


@pytest.fixture
def sessions(session: Any) -> Any:
    """A machine's kernels of attention one after the other: in the emulator Hopper's, and that of mma.sync."""
    @contextlib.contextmanager
    def by_warps(machine: Any) -> Any:
        with session(machine), assumed(dataclasses.replace(H100, arch=(8, 0), sm_count=2, name="another GPU")):
            yield

    return lambda machine: (session, by_warps) if machine.emulated else (session,)


MASKS: dict[str, Any] = {
    "none": lambda queries, keys: (None, None),
    "causal": lambda queries, keys: (Causal(), lambda m, n, h, b: n <= m + keys - queries),
    "upper left": lambda queries, keys: (Causal("upper left"), lambda m, n, h, b: n <= m),
    "window": lambda queries, keys: (Window(37, 5), lambda m, n, h, b: (m + keys - queries - 37 <= n) & (n <= m + keys - queries + 5)),
    "window, causal": lambda queries, keys: (Window(40, 9) & Causal(), lambda m, n, h, b: (m + keys - queries - 40 <= n) & (n <= m + keys - queries)),
}

@pytest.mark.kin(5)
@pytest.mark.sample(50)
@on_machines
@pytest.mark.parametrize("sizes", [(1, 1), (5, 3), (67, 130), (197, 61), (150, 150)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim,dtype", [(64, F16), (128, BF16)], ids=str)
def test_masks(machine: Any, session: Any, head_dim: int, dtype: Any, mask: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    """Odd lengths, more queries than keys (rows that see nothing) and fewer; the result into poisoned memory, and the logarithms."""
    queries, keys = sizes
    rule, visible = MASKS[mask](queries, keys)
    q, k, v = draw(rng, (1, 2, queries, head_dim), dtype), *(draw(rng, (1, 1, keys, head_dim), dtype) for _ in range(2))
    out = machine.array(poison(q.shape, dtype))
    with session(machine):
        found, lse = gk.attention(*map(machine.array, (q, k, v)), mask=rule, out=out, return_lse=True)
    assert found is out
    close(machine.numpy(out), reference(q, k, v, visible=visible), machine.numpy(lse))


@pytest.mark.sample(16)
@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 160, 192, 256])
def test_head_sizes(machine: Any, head_dim: int, dtype: Any, rng: np.random.Generator) -> None:
    """The mappings as they are shipped."""
    queries, keys = (65, 97) if machine.emulated else (777, 1013)
    q, k, v = draw(rng, (1, 1, queries, head_dim), dtype), *(draw(rng, (1, 1, keys, head_dim), dtype) for _ in range(2))
    with machine.session():
        found = gk.attention(*map(machine.array, (q, k, v)))
    close(machine.numpy(found), reference(q, k, v))


@pytest.mark.sample(16)
@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
def test_shared_heads(machine: Any, session: Any, heads: tuple[int, int], rng: np.random.Generator) -> None:
    """Heads of k and v divide q's; a batch of 1, and axes of stride 0, are for all."""
    q, k, v = draw(rng, (2, heads[0], 33, 64), F16), draw(rng, (2, heads[1], 37, 64), F16), draw(rng, (1, heads[1], 37, 64), F16)
    with session(machine):
        found = gk.attention(*map(machine.array, (q, k, v)))
        held = machine.array(k[:, :1])
        if machine.emulated and heads[1] == 1:
            held = np.broadcast_to(held, (2, heads[0], 37, 64))
            broadcast = gk.attention(machine.array(q), held, machine.array(v))
            close(machine.numpy(broadcast), reference(q, k[:, :1], v))
    close(machine.numpy(found), reference(q, k, v))


@pytest.mark.sample(16)
@pytest.mark.kin(5)
@on_machines
def test_layouts_and_strides(machine: Any, session: Any, rng: np.random.Generator) -> None:
    """(batch, rows, heads, head size); slices of one projection; every other row; a result of any strides."""
    qkv = draw(rng, (2, 45, 3, 2, 64), F16)
    held = machine.array(qkv)
    q, k, v = (qkv[:, :, n] for n in range(3))
    expected = reference(*(x.swapaxes(1, 2) for x in (q, k, v)))
    with session(machine):
        found = machine.numpy(gk.attention(held[:, :, 0], held[:, :, 1], held[:, :, 2], layout="bnhd"))
        close(found.swapaxes(1, 2), expected)
        out = machine.array(poison((2, 45, 2, 67), F16))
        gk.attention(held[:, :, 0], held[:, :, 1], held[:, :, 2], layout="bnhd", out=out[..., 1:65])    # which TMA cannot store
        stored = machine.numpy(out)
        assert np.array_equal(stored[..., 1:65], found) and np.isnan(stored[..., :1]).all() and np.isnan(stored[..., 65:]).all()
        x = machine.array(draw(rng, (1, 1, 90, 64), F16))
        every = machine.numpy(gk.attention(x[:, :, ::2], x[:, :, 1::2], x[:, :, :45]))
    whole = machine.numpy(x)
    close(every, reference(whole[:, :, ::2], whole[:, :, 1::2], whole[:, :, :45]))


@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5])
def test_scales(machine: Any, session: Any, scale: float, rng: np.random.Generator) -> None:
    """Of a scale that is not positive the largest score is not that of the largest product."""
    q, k, v = (draw(rng, (1, 1, 40, 64), F16) for _ in range(3))
    with session(machine):
        found, lse = gk.attention(*map(machine.array, (q, k, v)), scale=scale, return_lse=True)
    close(machine.numpy(found), reference(q, k, v, scale), machine.numpy(lse), slack=1e-4)


@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (1, 1, 0, 4), (1, 2, 5, 0)], ids=str)
def test_nothing(machine: Any, session: Any, shape: tuple[int, ...]) -> None:
    """No queries: an empty result. No keys: rows that see nothing, whatever the mask and the score index."""
    batch, heads, queries, keys = shape
    q, k = np.full((batch, heads, queries, 64), np.nan, F16), np.zeros((batch, max(heads, 1), keys, 64), F16)
    if heads == 0:
        q = np.zeros((batch, 0, queries, 64), F16)
    bias = np.zeros((heads, queries, keys), np.float32)
    with session(machine):
        found, lse = gk.attention(*map(machine.array, (q, k, k)), mask=Causal(), score=gk.masks.ScoreBias(machine.array(bias)),
                                  return_lse=True)
    assert machine.numpy(found).shape == q.shape and (machine.numpy(found) == 0).all()
    assert machine.numpy(lse).shape == q.shape[:3] and np.isneginf(machine.numpy(lse)).all()


@pytest.mark.parametrize("columns", [16, 128])
@on_machines
def test_nothing_for_values_of_another_head_size(machine: Any, session: Any, columns: int) -> None:
    q, k, v = np.full((2, 3, 5, 64), np.nan, F16), np.zeros((2, 3, 0, 64), F16), np.zeros((2, 3, 0, columns), F16)
    with session(machine):
        found, lse = gk.attention(*map(machine.array, (q, k, v)), return_lse=True)
    assert machine.numpy(found).shape == (2, 3, 5, columns) and (machine.numpy(found) == 0).all()
    assert np.isneginf(machine.numpy(lse)).all()


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_lengths_that_int32_cannot_hold(rng: np.random.Generator, dtype: Any) -> None:
    """More keys than there are mean all of them; offsets that end behind the rows are refused; neither wraps."""
    q, k, v = (draw(rng, (2, 1, 24, 64), F16) for _ in range(3))
    with gk.emulate():
        found = gk.attention(q, k, v, key_lengths=np.array([2**31 + 8, 2**32 - 1], dtype))
        assert np.array_equal(found, gk.attention(q, k, v, key_lengths=[24, 24]))
    wrapped = np.array([0, 2**32 - 1 if dtype == np.uint32 else 2**32 + 24], dtype)
    packed = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="lengths: q_offsets goes from 0 to"), gk.emulate():
        gk.attention(*packed, lengths=(wrapped, wrapped))


@pytest.mark.sample(16)
@pytest.mark.kin(5)
@on_machines
def test_what_is_not_finite(machine: Any, session: Any, rng: np.random.Generator) -> None:
    """A NaN in a query makes its row NaN and no other; one in a key all that see it; a score of -inf hides."""
    q, k, v = (draw(rng, (1, 1, 80, 64), F16) for _ in range(3))
    q[0, 0, 3, 5], k[0, 0, 70, 0] = np.nan, np.nan
    with session(machine):
        found, lse = gk.attention(*map(machine.array, (q, k, v)), mask=Causal(), return_lse=True)
        hidden = gk.attention(*map(machine.array, (q[:, :, 10:20], k, v)), score=lambda s, m, n: s if n < 7 else -np.inf)
    close(machine.numpy(found), reference(q, k, v, visible=lambda m, n, h, b: n <= m), machine.numpy(lse))
    assert np.isnan(machine.numpy(found)[0, 0, 70:]).all() and not np.isnan(machine.numpy(found)[0, 0, 4:70]).any()
    close(machine.numpy(hidden), reference(q[:, :, 10:20], k[:, :, :7], v[:, :, :7]))


@pytest.mark.sample(16)
@on_machines
def test_large_scores_do_not_overflow(machine: Any, session: Any, rng: np.random.Generator) -> None:
    q, k, v = (draw(rng, (1, 1, 40, 64), F16) for _ in range(3))
    with session(machine):
        found = gk.attention(*map(machine.array, (100 * q, 100 * k, v)))
    close(machine.numpy(found), reference(100 * q, 100 * k, v), slack=0.02)


LARGE = [*(sign * w for w in (1e3, 1e4, 1e6, 1e8, 1e9, 1e10, 1e12, 1e30, 2.3e38) for sign in (-1, 1)), -3e8, -3e9, -2.4e38,
         float(ml_dtypes.finfo(BF16).min), float(np.finfo(np.float32).min)]


def large_biases(keys: int) -> np.ndarray:
    """What is added to scores, a row of queries each: one large number for all keys; an ordinary score among such; none but those
    among the last keys, or the first, which are softened first; sizes that grow from key to key; keys that -inf hides."""
    w, n = np.array(LARGE, np.float32)[:, None], np.arange(keys)
    rows = [w + 0 * n, np.where(n == 5, 0, w), np.where(n >= keys // 2, w, 0), np.where(n < keys // 2, w, 0), np.where(n % 3 == 0, -np.inf, w),
            np.where(n >= keys // 2, -np.inf, w), np.sign(w) * np.minimum(np.abs(w), 1e36) * (1 + n // 4 * np.float32(2**-20))]
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_of_large_scores(machine: Any, sessions: Any, dtype: Any, rng: np.random.Generator) -> None:
    """Masks of -1e9 and of the least number that there is, added to all scores of a row: the mean of v, as of any equal scores; the
    logarithm of the sum to float32's spacing. Scores are exact before it."""
    bias = large_biases(50)
    q, k = (rng.integers(-2, 3, (1, 1, rows, 64)).astype(dtype) for rows in bias.shape)
    v, held = draw(rng, (1, 1, 50, 64), dtype), machine.array(bias)
    expected = reference(q, k, v, score=lambda s, m, n, h, b: (s.astype(np.float32) + bias).astype(np.float64))
    spacing = np.spacing(np.clip(np.abs(expected[1]), 1, 3e38).astype(np.float32))
    for made in sessions(machine):
        with made(machine):
            found, lse = gk.attention(*map(machine.array, (q, k, v)), score=lambda s, m, n: s + held[m, n], return_lse=True)
        close(machine.numpy(found), expected, slack=1e-5)
        assert (np.abs(machine.numpy(lse) - expected[1]) <= spacing).all()


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype,size", [(F16, 2.0**15), (BF16, 2.0**40), (BF16, 2.0**63)], ids=str)
def test_large_products(machine: Any, sessions: Any, dtype: Any, size: float, rng: np.random.Generator) -> None:
    """No mask and no score, but queries and keys whose products are large, equal or not."""
    q, k, v = np.zeros((1, 1, 40, 64), dtype), np.zeros((1, 1, 70, 64), dtype), draw(rng, (1, 1, 70, 64), dtype)
    q[..., 0] = np.array([size, -size, size / 2**20, 1.0] * 10)
    k[..., 0] = size * (1 + np.arange(70) // 8 % 5 / 128)
    expected = reference(q, k, v, 0.25, visible=lambda m, n, h, b: n <= m + 30)
    for made in sessions(machine):
        with made(machine):
            found, lse = gk.attention(*map(machine.array, (q, k, v)), mask=Causal(), scale=0.25, return_lse=True)
        close(machine.numpy(found), expected, machine.numpy(lse), slack=1e-5)


@pytest.mark.sample(16)
@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_packed_sequences(machine: Any, session: Any, mask: Any, layout: str, rng: np.random.Generator) -> None:
    """Sequences of 0, 1 and more rows, of other lengths of keys, each on its own; what lies between is not looked at."""
    starts, ends = np.array([0, 70, 70, 71, 100, 110]), np.array([0, 33, 40, 75, 75, 90])
    q, k, v = draw(rng, (110, 2, 64), F16), draw(rng, (90, 1, 64), F16), draw(rng, (90, 1, 64), F16)
    given = [machine.array(np.ascontiguousarray(x.swapaxes(0, 1) if layout == "bhnd" else x)) for x in (q, k, v)]
    out = machine.array(poison((2, 110, 64) if layout == "bhnd" else q.shape, F16))
    with session(machine):
        found, lse = gk.attention(*given, lengths=(starts, ends), mask=mask, out=out, layout=layout, return_lse=True)
        read = [gk.attention(*given, lengths=tuple(machine.array(x.astype(kind)) for x in (starts, ends)), mask=mask, layout=layout)
                for kind in (np.int32, np.int64)]
    assert all(np.array_equal(machine.numpy(x), machine.numpy(found)) for x in read)
    with session(machine):
        scored = gk.attention(*given, lengths=(starts.tolist(), ends.tolist()), layout=layout,
                              score=lambda s, m, n, head, batch: s + 0.125 * batch * (n < 3) - 0.25 * head * (m > 2) * (n > 4))
    found, scored = (machine.numpy(x) if layout == "bnhd" else machine.numpy(x).swapaxes(0, 1) for x in (found, scored))
    for batch, (a, b, c, d) in enumerate(zip(starts, starts[1:], ends, ends[1:])):
        one = [x.swapaxes(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        visible = None if mask is None else lambda m, n, h, i, shift=(d - c) - (b - a): n <= m + shift
        close(found[a:b].swapaxes(0, 1)[None], reference(*one, visible=visible), machine.numpy(lse)[None, :, a:b])
        close(scored[a:b].swapaxes(0, 1)[None], reference(*one, score=lambda s, m, n, head, i, batch=batch: (
            s + 0.125 * batch * (n < 3) - 0.25 * head * (m > 2) * (n > 4))))


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("where", ["list", "int32", "int64"])
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
@pytest.mark.parametrize("queries", [1, 9])
def test_lengths_of_keys(machine: Any, session: Any, queries: int, mask: Any, where: str, rng: np.random.Generator) -> None:
    """None, one, some and more than there are, by heads that are rows of one tile, and others; keys behind them may hold anything."""
    lengths, keys = ([0, 1, 40, 99], 50) if machine.emulated else ([0, 1, 3001, 9000], 5000)
    q, k, v = draw(rng, (4, 4, queries, 64), F16), draw(rng, (4, 2, keys, 64), F16), draw(rng, (1, 2, keys, 64), F16)
    for batch, length in enumerate(lengths):
        k[batch, :, length:] = np.nan
    given = lengths if where == "list" else machine.array(np.array(lengths, where))
    with session(machine):
        for _ in range(2):                             # the second is known where lengths are on the GPU
            out = gk.attention(*map(machine.array, (q, k, v)), mask=mask, key_lengths=given)
        _, lse = gk.attention(*map(machine.array, (q, k, v)), mask=mask, key_lengths=given, return_lse=True)
    found, lse = machine.numpy(out), machine.numpy(lse)
    for batch, length in enumerate(min(n, keys) for n in lengths):
        one = q[batch:batch + 1], k[batch:batch + 1, :, :length], v[:, :, :length]
        visible = None if mask is None else lambda m, n, h, b, shift=length - queries: n <= m + shift
        close(found[batch:batch + 1], reference(*one, visible=visible), lse[batch:batch + 1])


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("where", ["list", "int32"])
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("rows", [0, 16])
def test_starts_of_keys(machine: Any, session: Any, rows: int, queries: int, mask: Any, where: str, rng: np.random.Generator) -> None:
    """In front of all keys, within them, at the length and behind all; keys in front hold anything, in pages or not."""
    keys, many = (64, 1) if machine.emulated else (4096, 60)
    starts, lengths = [-4, 21 * many, 40 * many, 90 * many, 5], [keys, 47 * many, 40 * many, 2 * keys, 60]
    q, k, v = draw(rng, (5, 2, queries, 64), F16), draw(rng, (5, 1, keys, 64), F16), draw(rng, (5, 1, keys, 64), F16)
    for batch, start in enumerate(starts):
        k[batch, :, :max(start, 0)] = np.nan
    given, more = (q, k, v), dict[str, Any]()
    if rows:                                           # each of the batch has pages of its own, backwards
        given = q, *(np.ascontiguousarray(x[:, :, ::-1].reshape(5, 1, -1, rows, 64).swapaxes(1, 2)).reshape(-1, 1, rows, 64)[:, :, ::-1] for x in (k, v))
        more = {"pages": machine.array(np.arange(len(given[1]), dtype=np.int32).reshape(5, -1)[:, ::-1])}
    counted = [x if where == "list" else machine.array(np.array(x, where)) for x in (starts, lengths)]
    arrays = [machine.array(x) for x in given]
    with session(machine):
        for _ in range(1 if machine.emulated else 2):  # the second is known where they are on the GPU
            out = gk.attention(*arrays, mask=mask, key_starts=counted[0], key_lengths=counted[1], **more)
        _, lse = gk.attention(*arrays, mask=mask, key_starts=counted[0], key_lengths=counted[1], return_lse=True, **more)
        alone = gk.attention(*arrays, mask=mask, key_starts=counted[0], **more)
    for found, seen in ((out, lengths), (alone, [keys] * 5)):
        for batch, (start, length) in enumerate((max(start, 0), min(length, keys)) for start, length in zip(starts, seen)):
            one = q[batch:batch + 1], k[batch:batch + 1, :, start:length], v[batch:batch + 1, :, start:length]
            visible = None if mask is None else lambda m, n, h, b, shift=length - start - queries: n <= m + shift
            close(machine.numpy(found)[batch:batch + 1], reference(*one, visible=visible), machine.numpy(lse)[batch:batch + 1] if found is out else None)


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("queries,mask", [(1, Causal()), (9, None), (9, Causal())], ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("rows", [8, 16, 64, 128])
def test_pages(machine: Any, session: Any, rows: int, layout: str, queries: int, mask: Any, rng: np.random.Generator) -> None:
    """Pages in any order, shared by sequences; those behind a length have NaN, and the table nonsense."""
    each = -(-(100 if machine.emulated else 3000) // rows)
    lengths = np.array([rows * each - 3, 0, 37], np.int32)
    q = draw(rng, (3, 2, queries, 64), F16)
    k, v = draw(rng, (2 * each + 2, 1, rows, 64), F16), draw(rng, (2 * each + 2, 2, rows, 32), F16)
    table = rng.permutation(len(k))[:2 * each][np.r_[0:2 * each, 0:each]].reshape(3, each).astype(np.int32)
    used = {page for line, length in zip(table, lengths) for page in line[:-(-length // rows)]}
    for page in set(range(len(k))) - used:
        k[page], v[page] = np.nan, np.nan
    for line, length in zip(table, lengths):
        line[-(-length // rows):] = rng.integers(-9, 10**6, each - -(-length // rows))
    given = [machine.array(x if layout == "bhnd" else np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)]
    with session(machine):
        out, lse = gk.attention(*given, mask=mask, layout=layout, key_lengths=lengths, pages=table, return_lse=True)
        read = [] if machine.emulated else [gk.attention(*given, mask=mask, layout=layout, key_lengths=machine.array(lengths),
                                                         pages=machine.array(table)) for _ in range(2)]
    assert all(np.array_equal(machine.numpy(x), machine.numpy(out)) for x in read)
    found = machine.numpy(out) if layout == "bhnd" else machine.numpy(out).swapaxes(1, 2)
    for b, length in enumerate(lengths):
        one = [np.concatenate([x[page] for page in table[b, :-(-length // rows)]] or [x[0, :, :0]], 1)[None, :, :length] for x in (k, v)]
        visible = None if mask is None else lambda m, n, h, i, shift=length - queries: n <= m + shift
        close(found[b:b + 1], reference(q[b:b + 1], *one, visible=visible), machine.numpy(lse)[b:b + 1])


def test_pages_that_are_refused() -> None:
    q, k, table = np.zeros((2, 2, 3, 64), F16), np.zeros((5, 2, 16, 64), F16), np.zeros((2, 2), np.int32)
    with gk.emulate():
        for more, error, words in (
                (dict(pages=table[:1]), ValueError, "pages has 1 elements and q has a batch of 2"),
                (dict(pages=table[0]), TypeError, r"pages is an array of int32 and shape \(2,\); whole numbers in two dimensions"),
                (dict(pages=table.astype(float)), TypeError, "pages is an array of float64"),
                (dict(pages=table, v=k[:4]), ValueError, "v has 4 pages and k has 5"),
                (dict(pages=table, v=k[:, :, :8]), ValueError, "v has 8 rows and k has 16"),
                (dict(pages=table, k=k[:, :, :12], v=k[:, :, :12]), gk.ConfigError, "k has pages of 12 rows; a multiple of 8"),
                (dict(pages=table, key_lengths=[3]), ValueError, "key_lengths has 1 elements and q has a batch of 2"),
                (dict(pages=[[0, 1], [2, 5]]), ValueError, r"pages\[1, 1\] is 5, and k has 5 pages"),
                (dict(pages=[[0, -1], [2, -1]], key_lengths=[16, 17]), ValueError, r"pages\[1, 1\] is -1, and k has 5 pages")):
            given = {"k": k, "v": k, **more}
            with pytest.raises(error, match=words):
                gk.attention(q, given.pop("k"), given.pop("v"), **given)


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("head_dim,width", [(64, 128), (192, 128), (40, 8), (256, 64)])
def test_a_head_size_of_its_own_for_v(machine: Any, session: Any, head_dim: int, width: int, rng: np.random.Generator) -> None:
    q, k, v = draw(rng, (2, 2, 50, head_dim), F16), draw(rng, (2, 1, 70, head_dim), F16), draw(rng, (1, 2, 70, width), F16)
    with session(machine):
        found, lse = gk.attention(*map(machine.array, (q, k, v)), mask=Causal(), return_lse=True)
        out = machine.array(poison((2, 50, 2, width), F16))
        gk.attention(*(machine.array(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)), mask=Causal(), layout="bnhd", out=out)
    close(machine.numpy(found), reference(q, k, v, visible=lambda m, n, h, b: n <= m + 20), machine.numpy(lse))
    assert np.array_equal(machine.numpy(out).swapaxes(1, 2), machine.numpy(found))


def beside_nan(x: np.ndarray, columns: int) -> np.ndarray:
    """The same array in longer rows, whose other columns are NaN."""
    whole = np.full((*x.shape[:-1], x.shape[-1] + columns), np.nan, x.dtype)
    whole[..., :x.shape[-1]] = x
    return whole


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("rows", [0, 16])
@pytest.mark.parametrize("queries,mask", [(1, None), (1, Causal()), (70, Causal())], ids=str)
@pytest.mark.parametrize("head_dim,width,of_k", [(576, 512, True), (576, 512, False), (264, 264, True), (320, 400, False), (576, 64, True)])
def test_latent_heads(machine: Any, sessions: Any, head_dim: int, width: int, of_k: bool, queries: int, mask: Any, rows: int,
                      rng: np.random.Generator) -> None:
    """Wide heads, as of MLA: values are the first columns of keys, or an array of their own; with lengths, or in pages. A known call
    finds values elsewhere."""
    keys, heads, batch = 3200, 6, 3
    if machine.emulated:
        keys, heads, batch = 48, *((6, 2) if queries == 1 else (1, 1))
    lengths = np.array([keys - 3, keys // 2, 0][:batch], np.int32)
    q, k, v = (draw(rng, (batch, *shape), F16) for shape in ((heads, queries, head_dim), (1, keys, head_dim), (1, keys, width)))
    v = np.ascontiguousarray(k[..., :width]) if of_k else v
    given, more = (q, k, v), dict[str, Any]()
    if rows:
        order = rng.permutation(batch * keys // rows)
        given = q, *(np.ascontiguousarray(x.reshape(-1, 1, rows, x.shape[-1])[order]) for x in (k, v))
        more = {"pages": machine.array(np.argsort(order).astype(np.int32).reshape(batch, -1))}
    on_q, on_k, on_v = (machine.array(beside_nan(x, 8))[..., :x.shape[-1]] for x in given)
    wanted = [reference(q[b:b + 1], k[b:b + 1, :, :n], v[b:b + 1, :, :n], visible=None if mask is None else
                        lambda m, n, h, b, shift=n - queries: n <= m + shift) for b, n in enumerate(lengths)]
    for session in sessions(machine):
        with session(machine):
            for values in ([on_k[..., :width], on_v] if of_k and not machine.emulated else [on_k[..., :width] if of_k else on_v]):
                out = machine.array(poison((batch, heads, queries, width), F16))
                for _ in range(1 if machine.emulated else 2):              # the second is known
                    found, lse = gk.attention(on_q, on_k, values, mask=mask, key_lengths=machine.array(lengths), out=out, return_lse=True, **more)
                for b, expected in enumerate(wanted):
                    close(machine.numpy(found)[b:b + 1], expected, machine.numpy(lse)[b:b + 1])


def test_latents_are_loaded_once() -> None:
    """Values within keys are not an operand of their own, if they are keys' first columns, of keys that are wide."""
    q, k = np.zeros((2, 16, 1, 576), F16), np.zeros((2, 1, 100, 584), F16)[..., :576]

    def arrays(k: np.ndarray, v: np.ndarray) -> list[str]:
        operands = attention.operands_of(*(describe(x, "x") for x in (q[..., :k.shape[-1]], k, v)), "bhnd", False)
        call = attention.AttentionCall(operands, operands.q, None, attention.EVERYTHING, attention.PLAIN, 1.0, {}, operands.keys)
        return [name for name, x in attention.program_arguments(call).items() if name in "kv" and x is not None]

    with gk.emulate():
        assert arrays(k, k[..., :512]) == arrays(k, k[..., :8]) == ["k"]
        assert arrays(k, k[..., 8:512]) == arrays(k, np.copy(k[..., :512])) == arrays(k[:1], k[1:, ..., :512]) == ["k", "v"]
        assert arrays(k[..., :256], k[..., :64]) == arrays(k, k[..., :512].view(BF16).view(F16)[:, :, ::-1]) == ["k", "v"]
        for wrong in (dict(q=np.zeros((2, 16, 1, 584), F16), k=k.base), dict(v=k[..., :520])):
            with pytest.raises(gk.ConfigError, match="a multiple of 8 up to (576|512) is needed"):
                gk.attention(**{"q": q, "k": k, "v": k[..., :512], **wrong})


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("kind", ["rows of 66", "backwards", "odd base"])
def test_strides_that_tma_cannot_take(machine: Any, session: Any, kind: str, rng: np.random.Generator) -> None:
    """Threads copy such rows, and the result is the same."""
    q, k, v = (draw(rng, (1, 2, rows, 66 if kind == "rows of 66" else 72), F16) for rows in (50, 90, 90))
    cut = {"rows of 66": lambda x: x[..., :64], "backwards": lambda x: x[:, :, ::-1, :64], "odd base": lambda x: x[..., 2:66]}[kind]
    with session(machine):
        found = gk.attention(*(cut(machine.array(x)) for x in (q, k, v)), mask=Causal())
    close(machine.numpy(found), reference(cut(q), cut(k), cut(v), visible=lambda m, n, h, b: n <= m + 40))


@pytest.mark.sample(16)
@pytest.mark.kin(5)
@on_machines
def test_documents(machine: Any, session: Any, rng: np.random.Generator) -> None:
    q, k, v = (draw(rng, (1, 1, 110, 64), F16) for _ in range(3))
    offsets = [0, 20, 20, 21, 90, 110]
    of = np.repeat(np.arange(5), np.diff(offsets))
    mask = Documents.of(offsets, machine.array)
    with session(machine):
        found = gk.attention(*map(machine.array, (q, k, v)), mask=mask)
        causal = gk.attention(*map(machine.array, (q, k, v)), mask=mask & Causal())
    close(machine.numpy(found), reference(q, k, v, visible=lambda m, n, h, b: of[m] == of[n]))
    close(machine.numpy(causal), reference(q, k, v, visible=lambda m, n, h, b: (of[m] == of[n]) & (n <= m)))


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("mask", [None, Causal(), Causal("upper left"), Window(40)], ids=["all", "causal", "upper left", "window"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries(machine: Any, sessions: Any, queries: int, layout: str, mask: Any, rng: np.random.Generator) -> None:
    """Heads that share keys are rows of one tile where no row depends on its place, and blocks share long keys."""
    keys = 300 if machine.emulated else 9000
    q, k, v = draw(rng, (2, 6, queries, 64), F16), draw(rng, (2, 2, keys, 64), F16), draw(rng, (2, 2, keys, 64), F16)
    shift, left = keys - queries, 40
    visible = {None: None, Causal(): lambda m, n, h, b: n <= m + shift, Causal("upper left"): lambda m, n, h, b: n <= m,
               Window(40): lambda m, n, h, b: (m + shift - left <= n) & (n <= m + shift)}[mask]
    given = [machine.array(x if layout == "bhnd" else np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)]
    for session in sessions(machine):
        with session(machine):
            out, lse = gk.attention(*given, mask=mask, layout=layout, return_lse=True)
        found = machine.numpy(out)
        close(found if layout == "bhnd" else found.swapaxes(1, 2), reference(q, k, v, visible=visible), machine.numpy(lse))


def test_rows_of_one_tile() -> None:
    """Of one query all heads that share keys, in either layout; of more, where they lie one behind the other; not where rows
    depend on their place."""
    def rows(shape: tuple[int, ...], layout: str = "bhnd", mask: Any = None) -> int:
        q, k = np.zeros(shape, F16), np.zeros((1, 2, 900, 64) if layout == "bhnd" else (1, 900, 2, 64), F16)
        operands = attention.operands_of(*(describe(x, "x") for x in (q, k, k)), layout, False)
        call = attention.AttentionCall(operands, operands.q, None, mask or attention.EVERYTHING, attention.PLAIN, 1.0, {}, operands.keys)
        return attention.folded(call).operands.queries

    with assumed(H100), gk.emulate():
        assert rows((1, 8, 1, 64)) == 4 and rows((1, 1, 8, 64), "bnhd") == 4
        assert rows((1, 8, 16, 64)) == 64 and rows((1, 16, 8, 64), "bnhd") == 16 and rows((1, 8, 65, 64)) == 65
        assert rows((1, 8, 1, 64), mask=Causal()) == 4
        assert rows((1, 8, 1, 64), mask=Causal("upper left")) == 1 and rows((1, 8, 2, 64), mask=Causal()) == 2


@pytest.mark.sample(16)
@pytest.mark.kin(5)
@on_machines
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_every_time(machine: Any, session: Any, head_dim: int, rng: np.random.Generator) -> None:
    """In any order of threads and blocks, and with a second call that compiles nothing."""
    q, k, v = (machine.array(draw(rng, (1, 2 if machine.emulated else 5, 70 if machine.emulated else 1900, head_dim), F16)) for _ in range(3))
    with session(machine):
        first = machine.numpy(gk.attention(q, k, v, mask=Causal()))
        with machine.compiles_nothing():
            second = machine.numpy(gk.attention(q, k, v, mask=Causal(), scale=head_dim**-0.5))
        assert np.array_equal(first, second)
        if machine.emulated:
            with gk.emulate(seed=5):
                assert np.array_equal(gk.attention(q, k, v, mask=Causal()), first)


@pytest.mark.sample(16)
@pytest.mark.gpu
def test_captured_in_a_graph(rng: np.random.Generator) -> None:
    """Nothing is synchronised; a graph replays with the table of tiles that was there."""
    import torch

    q, k, v = (torch.from_numpy(draw(rng, (2, 4, 500, 64), F16)).cuda() for _ in range(3))
    expected, out = gk.attention(q, k, v, mask=Causal()), torch.empty_like(q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gk.attention(q, k, v, mask=Causal(), out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gk.attention(q, k, v, mask=Causal(), out=out)
        gk.attention(q[:, :, :100], k, v)                               # another table on the same stream
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.sample(16)
@pytest.mark.gpu
def test_a_tensor_that_requires_a_gradient_is_recorded() -> None:
    import torch

    x = torch.zeros(1, 1, 8, 64, device="cuda", dtype=torch.float16)
    assert gk.attention(x, x.clone().requires_grad_(), x).requires_grad
    with pytest.raises(ValueError, match="out= is given, and a tensor that requires a gradient is among q, k and v"):
        gk.attention(x, x.clone().requires_grad_(), x, out=torch.empty_like(x))


# ==========================================================================================================================
# Drawn calls of attention against NumPy in float64: 25 kernels with 20 calls each on a GPU, some in the emulator.
#
# What makes a kernel (head size, dtype, mask, score, what is returned, packed or not) is drawn once for a test; shapes, strides, scales
# and run-time numbers for each of its calls. GEMMKIT_SEED is what all follows from.

HALF = np.float32(0.5)


def offsets_of(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return np.array([0, *sorted(rng.integers(0, rows + 1, count - 1)), rows])


def mask_of(kind: str, rng: np.random.Generator, machine: Any, queries: int, keys: int) -> tuple[Any, Any]:
    """A mask, and which keys it shows."""
    shift, left, right = keys - queries, int(rng.integers(0, 300)), int(rng.integers(0, 20))
    of = np.searchsorted(offsets := offsets_of(rng, queries, 4), np.arange(max(queries, keys)), "right")
    found = {
        "none": lambda: (None, None),
        "causal": lambda: (Causal(), lambda m, n, h, b: n <= m + shift),
        "upper left": lambda: (Causal("upper left"), lambda m, n, h, b: n <= m),
        "window": lambda: (Window(left, right), lambda m, n, h, b: (m + shift - left <= n) & (n <= m + shift + right)),
        "documents": lambda: (Documents.of(offsets, machine.array) & Causal("upper left"), lambda m, n, h, b: (of[m] == of[n]) & (n <= m)),
    }
    return found[kind]()


def score_of(kind: str, rng: np.random.Generator, machine: Any, heads: int) -> tuple[Any, Any, float]:
    """A score, what it computes, and what it may be wrong by."""
    slopes, cap = rng.random(heads).astype(np.float32), float(rng.uniform(1, 30))
    held = machine.array(slopes)
    found = {
        "none": lambda: (None, None, 0.0),
        "alibi": lambda: (ALiBi(held), lambda s, m, n, h, b: s - slopes[h] * (m - n), 1e-4),
        "soft cap": lambda: (SoftCap(cap), lambda s, m, n, h, b: cap * np.tanh(s / cap), 3e-3),
        "function": lambda: (lambda s, m, n, head, batch: s * held[head] - HALF * ((m + n + batch) % 5),
                             lambda s, m, n, h, b: s * slopes[h] - 0.5 * ((m + n + b) % 5), 1e-4),
    }
    return found[kind]()


def strided(rng: np.random.Generator, x: np.ndarray, layout: str) -> np.ndarray:
    """(batch, heads, rows, head size) in memory as a layout has it, and perhaps as a part of something larger."""
    x = x if layout == "bhnd" else x.swapaxes(1, 2)
    if rng.integers(2):
        room = np.full((*x.shape[:3], x.shape[3] + 8), np.nan, x.dtype)
        room[..., :x.shape[3]] = x
        return room
    return np.ascontiguousarray(x)


@pytest.mark.kin(5)
@pytest.mark.sample(25)
@on_machines
@pytest.mark.parametrize("number", range(25))
def test_drawn(machine: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([int(os.environ.get("GEMMKIT_SEED", "1")), number])
    head_dim, dtype = [32, 64, 96, 128, 192, 256, 320][number % 7], (F16, BF16)[int(rng.integers(2))]
    mask, score = (str(rng.choice(kinds)) for kinds in (["none", "causal", "upper left", "window", "documents"],
                                                        ["none", "none", "alibi", "soft cap", "function"]))
    layout, returns = str(rng.choice(["bhnd", "bnhd"])), bool(rng.integers(2))
    context = small(monkeypatch) if machine.emulated else contextlib.nullcontext()
    with context, machine.session():
        for _ in range(1 if machine.emulated else 20):
            most = 70 if machine.emulated else 600
            batch, share, kv_heads, queries = (int(rng.integers(1, n)) for n in (3, 3, 3, most))
            keys = queries if mask == "documents" else int(rng.integers(1, most))
            q = draw(rng, (batch, share * kv_heads, queries, head_dim), dtype)
            k, v = (draw(rng, (batch if rng.integers(2) else 1, kv_heads, keys, head_dim), dtype) for _ in range(2))
            rule, visible = mask_of(mask, rng, machine, queries, keys)
            change, computed, slack = score_of(score, rng, machine, q.shape[1])
            scale = None if rng.integers(2) else float(rng.uniform(0.01, 0.2))
            given = [machine.array(strided(rng, x, layout))[..., :head_dim] for x in (q, k, v)]
            out = machine.array(poison(given[0].shape, dtype))
            found = gk.attention(*given, mask=rule, score=change, scale=scale, layout=layout, out=out, return_lse=returns)
            lse = machine.numpy(found[1]) if returns else None
            result = machine.numpy(out) if layout == "bhnd" else machine.numpy(out).swapaxes(1, 2)
            close(result, reference(q, k, v, scale, visible, computed), lse, slack)


@pytest.mark.parametrize("given", [np.zeros(3), 1, None], ids=["array", "int", "None"])
def test_return_lse_is_true_or_false(given: Any) -> None:
    q = np.zeros((1, 1, 5, 16), np.float16)
    with gk.emulate(), pytest.raises(TypeError, match=r"return_lse=.*: True or False is needed"):
        gk.attention(q, q, q, return_lse=given)
