"""Rounds that store the rows of their blocks: products of a block with itself, computed right operands, states, and shares."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from examples.recurrences import (
    delta_states,
    delta_updates,
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
    state_space,
    until,
)
from gemmkit import programs as gp
from gemmkit.emulator.errors import EmulatorError
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import A100, H100, assumed
from tests.support.machines import on_machines, poison
from tests.support.sass import instructions

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def steps(q: Any, k: Any, v: Any, g: Any, beta: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence in float64, step by step: results, and the last states. ``g``: of each row, or of each key."""
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    state, out = np.zeros((len(q), k.shape[2], v.shape[2])), np.empty(v.shape)
    for t in range(q.shape[1]):
        state = state * np.exp(g[:, t].reshape(len(q), -1, 1))
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, None].astype(np.float64) * (new - np.einsum("hd,hdw->hw", k[:, t], state))
        state = state + k[:, t, :, None] * new[:, None]
        out[:, t] = np.einsum("hd,hdw->hw", q[:, t], state)
    return out, state


def drawn(rng: np.random.Generator, heads: int, rows: int, key: int, width: int, dtype: Any = F16, decay: float = 0.1) -> list[Any]:
    q, k, v = ((rng.standard_normal((heads, rows, columns)) / key ** 0.25).astype(dtype) for columns in (key, key, width))
    return [q, k, v, -np.abs(rng.standard_normal((heads, rows))).astype(F32) * np.float32(decay)]


def close(found: np.ndarray, wanted: np.ndarray, dtype: Any) -> None:
    assert np.isfinite(found.astype(float)).all()
    assert np.abs(found.astype(float) - wanted).max() <= (1.2e-2 if dtype == BF16 else 1.5e-3) * np.abs(wanted).max()


PARTS = gk.Mapping({"n": 32})
#: Heads, rows, key width, width, dtype, the largest decays, the mapping.
CASES: dict[str, tuple[int, int, int, int, Any, float, gk.Mapping]] = {
    "one block": (1, 64, 64, 32, F16, 0.1, PARTS), "one row": (1, 1, 64, 8, F16, 0.1, PARTS),
    "odd rows": (2, 131, 64, 40, F16, 0.1, PARTS), "bfloat16": (1, 100, 64, 64, BF16, 0.1, gk.Mapping({"n": 64})),
    "wide keys": (1, 70, 128, 32, F16, 0.1, gk.Mapping(stages=1)), "long decays": (1, 130, 64, 32, F16, 60.0, PARTS),
    "two warpgroups": (1, 200, 128, 32, F16, 0.1, gk.Mapping({"n": 32}, warpgroups=2)),
    "two shares": (1, 250, 64, 40, F16, 0.1, gk.Mapping({"n": 32}, splits=2)),
    "shares of no rows": (1, 130, 64, 32, F16, 0.1, gk.Mapping({"n": 32}, splits=5)),
    "shares of two warpgroups": (2, 300, 128, 32, BF16, 0.1, gk.Mapping({"n": 32}, warpgroups=2, splits=3)),
}


@on_machines
@pytest.mark.parametrize("name", CASES)
def test_linear_attention(machine: Any, name: str, rng: np.random.Generator) -> None:
    heads, rows, key, width, dtype, decay, mapping = CASES[name]
    given = drawn(rng, heads, rows, key, width, dtype, decay)
    with machine.session():
        out = machine.array(np.full((heads, rows, width), np.nan, dtype))
        linear_attention(*(machine.array(x) for x in given), out, mapping=mapping)
        found = machine.numpy(out)
    close(found, steps(*given)[0], dtype)


def gates(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, least: float = -np.inf) -> np.ndarray:
    """Logarithms of decays as GLA has them: logsigmoid(x) / 16; or of [``least``, 0]."""
    drawn = -np.logaddexp(0.0, -rng.standard_normal(shape)) / 16 if least == -np.inf else rng.uniform(least, 0.0, shape)
    return drawn.astype(dtype)


#: Heads, rows, key width, width, dtype, dtype of decays, the least one, the mapping.
GATED: dict[str, tuple[int, int, int, int, Any, Any, float, gk.Mapping]] = {
    "one row": (8, 1, 64, 8, F16, F32, -np.inf, PARTS), "one half": (1, 32, 64, 32, F16, F16, -np.inf, PARTS),
    "odd rows": (2, 131, 64, 40, F16, F32, -np.inf, PARTS), "bfloat16": (1, 100, 64, 64, BF16, BF16, -np.inf, gk.Mapping({"n": 64})),
    "wide keys": (1, 150, 128, 24, F16, F16, -np.inf, PARTS), "fast decays": (1, 200, 64, 32, F16, F32, -1.0, PARTS),
    "faster decays": (1, 200, 64, 32, BF16, F32, -7.0, PARTS), "no decays": (1, 70, 64, 32, F16, F32, 0.0, PARTS),
}


@on_machines
@pytest.mark.parametrize("name", GATED)
def test_gated_linear_attention(machine: Any, name: str, rng: np.random.Generator) -> None:
    """Operands are views of longer rows, and results of misaligned ones."""
    heads, rows, key, width, dtype, kind, least, mapping = GATED[name]
    q, k, v, _ = drawn(rng, heads, rows, key, width, dtype)
    both, g = np.concatenate((q, k), 2), gates(rng, (heads, rows, key), kind, least)
    with machine.session():
        out, held = machine.array(np.full((heads, rows, width + 1), np.nan, dtype)), machine.array(both)
        gated_linear_attention(held[:, :, :key], held[:, :, key:], machine.array(v), machine.array(g), out[:, :, 1:], mapping=mapping)
        found = machine.numpy(out)
    assert np.isnan(found[:, :, 0].astype(float)).all()
    close(found[:, :, 1:], steps(q, k, v, g)[0], dtype)


@on_machines
def test_decays_beyond_the_range(machine: Any, rng: np.random.Generator) -> None:
    """A half block that decays by more than float16 holds makes NaN or infinities, and no number that is wrong."""
    q, k, v, _ = drawn(rng, 1, 64, 64, 32)
    given = (q, k, v, np.full(k.shape, -2.0, F16))
    with machine.session():
        out = machine.array(np.zeros(v.shape, F16))
        gated_linear_attention(*map(machine.array, given), out, mapping=PARTS)
        found = machine.numpy(out).astype(float)
    wanted, is_there = steps(*given)[0], np.isfinite(found)
    assert not is_there.all()
    close(found[is_there], wanted[is_there], F16)


def in_parts(parts: int, after: bool) -> gk.Program:
    @gk.program
    def program(q: Any, k: Any, v: Any, g: Any, c: Any, y: Any) -> None:
        """Sums along rows, with those of whole blocks less those until a row; and parts of a product of a block."""
        for h in gp.parallel(q.count):
            for t in gp.sequential(q.rows):
                rest = g[h, t].sum(axis=0) - gp.cumsum(g[h, t])
                c[h, t] = gp.cumsum(g[h, t], parts=parts, after=after) + 100.0 * rest
                y[h, t] = gp.block_diagonal(q[h, t] @ k[h, t].T, parts=parts).astype(v.dtype) @ v[h, t]

    return program


@on_machines
@pytest.mark.parametrize(("parts", "after", "warpgroups"), [(1, True, 1), (2, False, 1), (4, False, 1), (4, True, 1), (1, False, 2),
                                                            (2, True, 2), (4, False, 2)])
def test_parts_of_blocks(machine: Any, parts: int, after: bool, warpgroups: int, rng: np.random.Generator) -> None:
    rows, block, program = 150, 64 * warpgroups, in_parts(parts, after)
    q, k, v, _ = drawn(rng, 2, rows, 64, 32)
    g = rng.standard_normal((2, rows, 40)).astype(F32)
    with machine.session():
        c, y = machine.array(np.full(g.shape, np.nan, F32)), machine.array(np.full(v.shape, np.nan, F16))
        program(*map(machine.array, (q, k, v, g)), c, y, mapping=gk.Mapping(warpgroups=warpgroups))
        found = machine.numpy(c), machine.numpy(y)
    sums, wanted, place = np.empty(g.shape), np.empty(v.shape), np.arange(rows)
    for first in range(0, rows, block):
        here = slice(first, min(first + block, rows))
        x, own = g[:, here].astype(float), (place[here] - first) // (block // parts)
        later, is_own = place[here, None] < place[here], own[:, None] == own
        sums[:, here] = ((later if after else ~later) & is_own) @ x + 100.0 * (later @ x)
        wanted[:, here] = ((q[:, here].astype(float) @ k[:, here].astype(float).swapaxes(1, 2)) * is_own) @ v[:, here]
    np.testing.assert_allclose(found[0], sums, atol=2e-6 * np.abs(sums).max())
    close(found[1], wanted, F16)
    reference = program.reference(q, k, v, g, np.empty(g.shape), np.empty(v.shape), block=block)
    np.testing.assert_allclose(reference[0], sums, atol=1e-9)


@gk.program
def with_state(q: Any, k: Any, v: Any, o: Any, last: Any) -> None:
    """All columns at once, without decays; the state is stored, in float32."""
    for b, h in gp.parallel(*q.counts):
        state = gp.zeros(k.columns, v.columns)
        for t in gp.sequential(q.rows):
            scores = gp.where(until, q[b, h, t] @ k[b, h, t].T, 0.0)
            o[b, h, t] = scores.astype(v.dtype) @ v[b, h, t] + q[b, h, t] @ state.astype(v.dtype)
            state += k[b, h, t].T @ v[b, h, t]
        last[b, h] = state


@on_machines
@pytest.mark.parametrize("splits", [1, 2])
def test_views_and_states(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """Two stacks, of which operands and results are views of longer rows."""
    full = (rng.standard_normal((2, 150, 3, 2, 64)) / 3).astype(F16)
    outs = np.full((2, 150, 2, 64), np.nan, F16), np.full((2, 2, 64, 64), np.nan, F32)
    with machine.session():
        held, out, last = machine.array(full), *map(machine.array, outs)
        q, k, v = (held[:, :, n].swapaxes(1, 2) for n in range(3))
        with_state(q, k, v, out.swapaxes(1, 2), last, mapping=gk.Mapping(splits=splits))
        found, state = machine.numpy(out).swapaxes(1, 2), machine.numpy(last)
    for b in range(2):
        wanted = steps(*(full[b, :, n].swapaxes(0, 1) for n in range(3)), np.zeros((2, 150)))
        close(found[b], wanted[0], F16)
        close(state[b], wanted[1], F16)


@gk.program
def resumed(q: Any, k: Any, v: Any, g: Any, begin: Any, o: Any, last: Any) -> None:
    """Tiles have rows of the state's transpose, which begins with an array, and is stored."""
    for h, n in gp.parallel(q.count, v.columns):
        state = gp.copy(begin[h, n])
        for t in gp.sequential(q.rows):
            c, total = gp.cumsum(g[h, t]), g[h, t].sum(axis=0)
            scores = gp.where(until, (q[h, t] @ k[h, t].T) * gp.exp(c - c.T), 0.0)
            o[h, t, n] = (q[h, t] @ state.astype(q.dtype).T) * gp.exp(c) + scores.astype(v.dtype) @ v[h, t, n]
            late = (v[h, t, n] * gp.exp(total - c)).astype(v.dtype)
            state[:] = state * gp.exp(total) + late.T @ k[h, t]
        last[h, n] = state


@on_machines
@pytest.mark.parametrize("splits", [1, 2])
def test_states_are_resumed(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """Two halves of the rows, one after the other, are the whole."""
    q, k, v, g = drawn(rng, 2, 290, 64, 72)
    wanted, state = steps(q, k, v, g)
    with machine.session():
        begin, found = machine.array(np.zeros((2, 72, 64), F32)), []
        for rows in (slice(0, 150), slice(150, 290)):
            given = [machine.array(np.ascontiguousarray(x[:, rows])) for x in (q, k, v, g)]
            out, last = machine.array(np.full(v[:, rows].shape, np.nan, F16)), machine.array(np.full((2, 72, 64), np.nan, F32))
            resumed(*given, begin, out, last, mapping=gk.Mapping({"n": 64}, splits=splits))
            found.append(machine.numpy(out))
            begin = last
        states = machine.numpy(last)
    close(np.concatenate(found, 1), wanted, F16)
    close(states, state.swapaxes(1, 2), F16)


@on_machines
@pytest.mark.parametrize("mapping", [gk.Mapping(), gk.Mapping(splits=2)])
def test_state_space(machine: Any, mapping: gk.Mapping, rng: np.random.Generator) -> None:
    """Four heads share b and c, and bfloat16 results are of misaligned rows: threads store them."""
    x, b, c = ((rng.standard_normal((heads, 140, width)) / 3).astype(BF16) for heads, width in ((4, 24), (2, 64), (2, 64)))
    dt, a, d = (rng.uniform(0.1, 1.0, shape).astype(F32) for shape in ((4, 140), 4, 4))
    wanted, _ = steps(c.repeat(2, 0), b.repeat(2, 0) * dt[..., None], x, -dt * a[:, None])
    with machine.session():
        whole = machine.array(np.full((4, 140, 25), np.nan, BF16))
        given = [machine.array(y) for y in (x, dt, -a, b, c, d)]
        state_space(*given, whole[:, :, 1:], 2, mapping=mapping)
        found = machine.numpy(whole)
    assert np.isnan(found[:, :, 0].astype(float)).all()
    close(found[:, :, 1:], wanted + d[:, None, None] * x.astype(float), BF16)


@on_machines
@pytest.mark.parametrize(("width", "dtype", "alike"), [(40, F16, 0.0), (64, BF16, 0.0), (32, F16, 0.9)])
def test_gated_delta_rule(machine: Any, width: int, dtype: Any, alike: float, rng: np.random.Generator) -> None:
    """``alike``: keys have as much in common; with 1 the powers of a block's triangle would reach 1e17."""
    q, k, v, g = drawn(rng, 1, 128, 64, width, dtype, 0.05)
    k = (1.0 - alike) * k.astype(float) + alike * k[:, :1].astype(float) * (1.0 if alike else 0.0)
    k = (k / np.linalg.norm(k, axis=2, keepdims=True)).astype(dtype)
    beta = rng.uniform(0.2, 1.0, (1, 128)).astype(F32)
    with machine.session():
        w, u, out = (machine.array(np.full(x.shape, np.nan, dtype)) for x in (k, v, v))
        gated_delta_rule(*(machine.array(x) for x in (q, k, v, beta, g)), w, u, out)
        found = machine.numpy(out)
    wanted, _ = steps(q, k, v, g, beta)
    assert np.abs(found.astype(float) - wanted).max() <= (2e-2 if dtype == BF16 else 2.5e-3) * np.abs(wanted).max()


@pytest.mark.parametrize("block", [64, 50, 16])
def test_references(block: int, rng: np.random.Generator) -> None:
    """They do not depend on blocks, but for what is computed of one block."""
    q, k, v, g = (x.astype(np.float64) for x in drawn(rng, 2, 100, 16, 8))
    wanted, _ = steps(q, k, v, g)
    np.testing.assert_allclose(linear_attention.reference(q, k, v, g, np.empty(v.shape), block=block), wanted, atol=2e-2)
    x = rng.standard_normal((64, 64)) / 16

    @gk.program
    def inverse(k: Any, y: Any) -> None:
        for h in gp.parallel(k.count):
            for t in gp.sequential(k.rows):
                y[h, t] = gp.unit_lower_inverse(k[h, t] @ k[h, t].T) @ k[h, t]

    found = inverse.reference(x[None], np.empty((1, 64, 64)), block=block)
    first = x[:block]
    np.testing.assert_allclose((np.tril(first @ first.T, -1) + np.eye(block)) @ found[0, :block], first, atol=1e-6)


# -- sums along rows, values of columns, functions of numbers ---------------------------------------------------------------------

@gk.program
def normalised(q: Any, k: Any, v: Any, b: Any, c: Any, o: Any) -> None:
    """Queries and keys of one size, a factor and a bias of each column, decays by places and by columns."""
    for h, n in gp.parallel(q.count, v.columns):
        state = gp.zeros(k.columns, n)
        for t in gp.sequential(q.rows):
            keys = (k[h, t] * gp.rsqrt((k[h, t] * k[h, t]).sum(axis=1) + 1e-3)).astype(q.dtype)
            queries = (q[h, t] * gp.rsqrt((q[h, t] * q[h, t]).mean(axis=1) + 1e-3)).astype(q.dtype)
            scores = gp.where(lambda i, j: j <= i, queries @ keys.T, 0.0)
            o[h, t, n] = queries @ state.astype(q.dtype) * c[n] + scores.astype(v.dtype) @ v[h, t, n] + b[h, n]
            state[:] = state * gp.exp(-abs(c[n]) - 0.01 * gp.place(n)) + keys.T @ v[h, t, n]


@gk.program
def weighted(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
    """A softmax within blocks; largest elements of two blocks of one array, as values of lanes."""
    for h, n in gp.parallel(q.count, v.columns):
        for t in gp.sequential(q.rows):
            s = q[h, t] @ k[h, t].T
            p = gp.exp(s - s.max(axis=1))
            low = gp.exp(q[h, t]).min(axis=1) + v[h, t].max(axis=1)
            c = gp.cumsum(low * g[h, t])
            kept = gp.where(lambda i, j: j <= i, s * (c - c.T), 0.0) + p / p.sum(axis=1)
            o[h, t, n] = kept.astype(v.dtype) @ v[h, t, n] * low.sum(axis=0)


@gk.program
def states(q: Any, k: Any, gamma: Any, a: Any, o: Any, last: Any) -> None:
    """Rows of results of one size, with a whole vector; sums of a state's rows."""
    for h in gp.parallel(q.count):
        state = gp.zeros(k.columns, q.columns)
        for t in gp.sequential(q.rows):
            y = k[h, t] @ state.astype(q.dtype)
            o[h, t] = y * gp.rsqrt((y * y).mean(axis=1) + 0.1) * gamma + a[h]
            state[:] = state * gp.exp(-0.01 * abs(state).sum(axis=1)) + k[h, t].T @ q[h, t]
        last[h] = state


@gk.program
def called(q: Any, k: Any, v: Any, g: Any, o: Any, f: Any, score: Any) -> None:
    for h, n in gp.parallel(q.count, v.columns):
        state = gp.zeros(k.columns, n)
        for t in gp.sequential(q.rows):
            d = gp.call(score, g[h, t], t, h)
            y = gp.call(f, q[h, t] @ state.astype(q.dtype))
            o[h, t, n] = gp.where(gp.call(lambda x, i, j: x > 0 or i + j * 2 < 100, y, t, n, dtype=bool), y, 0.25) * d
            state += k[h, t].T @ gp.call(lambda x, c: x * (1 + c % 3), v[h, t, n], gp.place(n) + 1).astype(v.dtype)


TWO = gk.Mapping({"n": 32, "t": 128}, warpgroups=2)


def small(rng: np.random.Generator, *shape: int, dtype: Any = F16) -> np.ndarray:
    return (0.3 * rng.standard_normal(shape)).astype(dtype)


def computed(machine: Any, program: gp.Program, arrays: list[np.ndarray], mapping: gk.Mapping, **more: Any) -> None:
    """Results against the reference in blocks of the same length; nothing spills."""
    with assumed(H100):
        wanted, plan = program.reference(*arrays, block=mapping.blocks.get("t", 64), **more), program.plan(*arrays, mapping=mapping, **more)
        usages = [one.launchable.entry().meta["usage"] for one in plan.kernels]
    assert all(usage["spill_stores"] == usage["stack_bytes"] == 0 for usage in usages)
    held = [machine.array(x) for x in arrays]
    given = program.bound(tuple(held), more)
    with machine.session():
        program(*held, mapping=mapping, **more)
    results = [machine.numpy(x) for name, x in given.items() if name in plan.results]
    for found, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        close(found, exact, F16)


@pytest.mark.compile
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("key, mapping", [(64, PARTS), (128, PARTS), (128, TWO)], ids=str)
def test_sums_along_rows_and_values_of_columns(machine: Any, key: int, mapping: gk.Mapping, rng: np.random.Generator) -> None:
    q, k, v = small(rng, 2, 150, key), small(rng, 2, 150, key), small(rng, 2, 150, 40)
    computed(machine, normalised, [q, k, v, small(rng, 2, 40, dtype=F32), small(rng, 40), poison((2, 150, 40), F16)], mapping)
    computed(machine, weighted, [q, k, v, small(rng, 2, 150, dtype=F32), poison((2, 150, 40), F16)], mapping)


@pytest.mark.compile
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("key, width, mapping", [(64, 40, gk.Mapping()), (128, 48, gk.Mapping()), (128, 96, gk.Mapping({"t": 128}, warpgroups=2))],
                         ids=str)
def test_sums_of_a_state(machine: Any, key: int, width: int, mapping: gk.Mapping, rng: np.random.Generator) -> None:
    q, k, gamma, a = small(rng, 1, 150, width), small(rng, 1, 150, key), small(rng, width), small(rng, 1, dtype=F32)
    computed(machine, states, [q, k, gamma, a, poison((1, 150, width), F16), poison((1, key, width), F32)], mapping)


@pytest.mark.compile
@on_machines
def test_functions_of_numbers(machine: Any, rng: np.random.Generator) -> None:
    """A function that reads an array is told places of rows that are there."""
    q, k, v, g = small(rng, 2, 150, 64), small(rng, 2, 150, 64), small(rng, 2, 150, 40), small(rng, 2, 150, dtype=F32)
    table = machine.array(small(rng, 150, dtype=F32))
    on_host = machine.numpy(table)
    score, host = (lambda x, i, z: x * table[i] - z), (lambda x, i, z: x * on_host[i] - z)
    wanted = called.reference(q, k, v, g, poison((2, 150, 40), F16), f=gk.epilogues.activations.gelu, score=host, block=64)
    given = [machine.array(x) for x in (q, k, v, g, poison((2, 150, 40), F16))]
    with machine.session():
        called(*given, f=gk.epilogues.activations.gelu, score=score, mapping=PARTS)
    close(machine.numpy(given[-1]), wanted, F16)


# -- refusals ---------------------------------------------------------------------------------------------------------------

def half(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.zeros(shape, dtype)


GIVEN = dict(q=half(2, 128, 64), k=half(2, 128, 64), v=half(2, 128, 32), g=half(2, 128, dtype=F32), o=half(2, 128, 32))
REFUSED: dict[str, tuple[dict[str, Any], gk.Mapping, type, str]] = {
    "columns of a tile": ({}, gk.Mapping({"n": 16}), gk.ConfigError, "'n': 16.*a multiple of 32 up to 256"),
    "rows of a block": ({}, gk.Mapping({"t": 32}), gk.ConfigError, "a warpgroup has 64 rows of a block"),
    "another index": ({}, gk.Mapping({"m": 64}), gk.ConfigError, "the blocks are those of n and t"),
    "clusters": ({}, gk.Mapping(cluster={"n": 2}), gk.ConfigError, "have blocks, warpgroups and stages"),
    "stages": ({}, gk.Mapping(stages=16), gk.ConfigError, "16 stages of .* bytes.*do not fit"),
    "stages by arrays": ({}, gk.Mapping(stages={"q": 2}), gk.ConfigError, "all blocks of a round share stages"),
    "multistage": ({}, gk.Mapping(kernel="multistage"), gk.ConfigError, "kernels of TMA and wgmma have them"),
    "key width": (dict(q=half(2, 128, 40), k=half(2, 128, 40)), gk.Mapping(), gk.ConfigError, "state has 40 rows, no multiple of 64"),
    "dtype": (dict(q=half(2, 128, 64, dtype=F32)), gk.Mapping(), TypeError, "takes float16 or bfloat16, both operands alike|q has dtype float32"),
    "two dtypes": (dict(v=half(2, 128, 32, dtype=BF16)), gk.Mapping(), TypeError, "both operands alike"),
    "shared memory": (dict(o=GIVEN["v"]), gk.Mapping(), ValueError, "v and o share memory"),
    "a result's dtype": (dict(o=half(2, 128, 32, dtype=np.float64)), gk.Mapping(), TypeError, "a result must be float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    more, mapping, kind, said = REFUSED[name]
    with assumed(H100), pytest.raises(kind, match=said):
        linear_attention.plan(*{**GIVEN, **more}.values(), mapping=mapping)


@pytest.mark.parametrize("parts", [0, 3, True, 2.5])
def test_refused_parts(parts: Any) -> None:
    @gk.program
    def program(q: Any, o: Any) -> None:
        for h in gp.parallel(q.count):
            for t in gp.sequential(q.rows):
                o[h, t] = gp.cumsum(q[h, t], parts=parts)

    with assumed(H100), pytest.raises(ValueError, match="a block has 1, 2 or 4 equal parts"):
        program.plan(half(2, 128, 64), half(2, 128, 64))


def test_refused_elsewhere() -> None:
    q, k, v, g, o = GIVEN.values()
    with assumed(A100), pytest.raises(gk.ConfigError, match="rounds that store rows"):
        linear_attention.plan(q, k, v, g, o)
    with assumed(H100), pytest.raises(gk.ConfigError, match=r"splits=2\): rounds have shares if"):
        delta_states.plan(q, k, k.copy(), v, g, o, mapping=gk.Mapping(splits=2))


def test_refused_programs() -> None:
    """With the user's line."""
    @gk.program
    def unrounded(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
        for h, n in gp.parallel(q.count, v.columns):
            for t in gp.sequential(q.rows):
                o[h, t, n] = (q[h, t] @ k[h, t].T) @ v[h, t, n]

    @gk.program
    def masked(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
        for h, n in gp.parallel(q.count, v.columns):
            for t in gp.sequential(q.rows):
                o[h, t, n] = gp.where(gk.masks.Causal(), q[h, t] @ k[h, t].T, 0.0).astype(v.dtype) @ v[h, t, n]

    @gk.program
    def summed(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
        for h, n in gp.parallel(q.count, v.columns):
            for t in gp.sequential(q.rows):
                o[h, t, n] = (q[h, t] @ k[h, t].T).astype(v.dtype) @ v[h, t, n] * gp.cumsum(g[h, t].sum(axis=0))

    @gk.program
    def square(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
        for h in gp.parallel(q.count):
            state = gp.zeros(k.columns, q.columns)
            for t in gp.sequential(q.rows):
                o[h, t] = q[h, t] @ state.astype(q.dtype)
                state[:] = state * k[h, t].sum(axis=0) + k[h, t].T @ q[h, t]

    @gk.program
    def padded(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
        for h, n in gp.parallel(q.count, v.columns):
            for t in gp.sequential(q.rows):
                o[h, t, n] = ((v[h, t] + 1.0).astype(v.dtype) @ (v[h, t] + 1.0).astype(v.dtype).T).astype(v.dtype) @ v[h, t, n]

    for program, kind, said in ((unrounded, TypeError, "round what is computed"), (masked, ValueError, "a mask; write its condition"),
                                (summed, ValueError, "cumsum of a value of"),
                                (square, ValueError, "as long as it is wide"),
                                (padded, ValueError, "sums over 40 columns, no multiple of 16")):
        with assumed(H100), pytest.raises(kind, match=said) as error:
            program.plan(*{**GIVEN, **({"o": half(2, 128, 64)} if program is square else {}),
                            **({"v": half(2, 128, 40), "o": half(2, 128, 40)} if program is padded else {})}.values())
        assert "test_recurrences.py" in str(error.value)


#: A line of the text, and what stands in its place: faults that the emulator finds.
FAULTS = {"no meeting": ("            named_barrier(4, 256)\n", ""), "early release": ("            ring.wait(at)\n", ""),
          "no wait": ("            product_4, product_3 = wgmma_wait(0, (product_4, product_3))\n", "")}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, rng: np.random.Generator) -> None:
    key, mapping = (128, CASES["two warpgroups"][-1]) if name == "no meeting" else (64, PARTS)
    given = [*drawn(rng, 1, 200, key, 32), half(1, 200, 32)]
    with assumed(H100):
        plan = linear_attention.plan(*given, mapping=mapping)
        text = plan.text.replace(*FAULTS[name])
        assert text != plan.text
        edited = linear_attention.plan(*given, mapping=plan.mapping, text=text)
    with pytest.raises(EmulatorError), gk.emulate():
        edited.run(dict(zip("qkvgo", given)))


def test_meetings_about_sums(rng: np.random.Generator) -> None:
    """Warps meet before they take the sums of others."""
    q, k, v, _ = drawn(rng, 1, 140, 64, 32)
    given = dict(q=q, k=k, v=v, g=gates(rng, (1, 140, 64), F16), o=half(1, 140, 32))
    meeting = "            named_barrier(4, 128)\n"
    with assumed(H100):
        plan = gated_linear_attention.plan(*given.values(), mapping=PARTS)
        before, between, *after = plan.text.split(meeting)
        assert "scan.of_warp" in between and "of_piece" in after[0]
        edited = gated_linear_attention.plan(*given.values(), mapping=plan.mapping, text=before + meeting + between + meeting.join(after))
    with pytest.raises(EmulatorError), gk.emulate():
        edited.run(given)


def test_lengths_are_one_derivation(rng: np.random.Generator) -> None:
    """Other rows derive nothing anew where as many shares are made."""
    with assumed(H100):
        first, second = (linear_attention.plan(*drawn(rng, 16, rows, 64, 64), half(16, rows, 64)) for rows in (4096, 8192))
        assert first.mapping.splits == second.mapping.splits > 1 and first.text == second.text


# -- machine code -------------------------------------------------------------------------------------------------------------

def made(name: str) -> Any:
    q, k, v, w, u, o = (half(16, 8192, 128) for _ in range(6))
    g, beta, b = half(16, 8192, dtype=F32), half(16, 8192, dtype=F32), half(4, 8192, 128)
    a = half(16, dtype=F32)
    if name == "updates":
        return delta_updates(*(x.reshape(16, 128, 64, *x.shape[2:]) for x in (k, v, beta, g, w, u)))
    if name == "gated linear attention":
        narrow = half(16, 8192, 64)
        return gated_linear_attention(narrow, narrow.copy(), v, narrow.copy(), o)
    calls = {"linear attention": (linear_attention, q, k, v, g, o), "state space": (state_space, q, g, a, b, b.copy(), a.copy(), o, 4),
             "states": (delta_states, q, k, w, u, g, o)}
    return calls[name][0](*calls[name][1:])


@pytest.mark.compile
@pytest.mark.parametrize("name", ["linear attention", "gated linear attention", "state space", "updates", "states"])
def test_machine_code(name: str) -> None:
    """Nothing spills, and products stay asynchronous: of each only the last instruction waits."""
    plan, *_ = recorded(lambda: made(name), H100, zeros=False)
    for one in plan.kernels:
        entry = one.launchable.entry()
        usage = entry.meta["usage"]
        assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
        sass = disassemble(entry.cubin)
        assert not any(line.startswith(("LDL", "STL")) for line in instructions(sass))
    assert len(plan.kernels) == (2 if name in ("linear attention", "state space") else 1)
