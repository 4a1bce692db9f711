"""Rounds that add to rows of an array, ``x[m] += ...``: the place "shared", products of all warpgroups' rows, and turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.emulator.errors import EmulatorError
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import A100, H100, assumed
from tests.support.machines import on_machines
from tests.support.sass import instructions, loops
from tests.verifier import Unsound, verify

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
ROUNDS = gk.Mapping({"m": 64}, warpgroups=1)


@gk.program
def both(q: Any, k: Any, v: Any, sums: Any, dk: Any, scale: float, visible: Any = None) -> None:
    """Of weights exp(scale q k^T) the sums over keys, and over queries: a linear attention and its transpose."""
    for h, n in gp.parallel(k.count, k.rows):
        acc = gp.zeros(n, q.columns)
        for m in gp.sequential(q.rows):
            w = gp.exp(scale * (k[h, n] @ q[h, m].T))
            w = w if visible is None else gp.where(lambda n, m: visible(m, n), w, 0.0)
            w = w.astype(k.dtype)
            sums[h, m] += w.T @ v[h, n]
            acc += w @ q[h, m]
        dk[h, n] = acc


@gk.program
def of_pieces(q: Any, k: Any, offsets: Any, sums: Any, dk: Any) -> None:
    pieces = gp.packed(k.rows, offsets)
    for b, h, n in gp.parallel(pieces.count, k.count, pieces.rows):
        acc = gp.zeros(n, q.columns)
        for m in gp.sequential(gp.packed(q.rows, offsets)[b]):
            w = (k[h, n] @ q[h, m].T).astype(k.dtype)
            sums[h, m] += w.T @ k[h, n]
            acc += w @ q[h, m]
        dk[h, n] = acc


@gk.program
def attention_gradients(q: Any, k: Any, v: Any, do: Any, lse: Any, delta: Any, sums_q: Any, dk: Any, dv: Any, scale: float, visible: Any = None) -> None:
    """Five products: dq, but for its scale, is added to sums_q."""
    for h, n in gp.parallel(k.count, k.rows):
        sums_k, sums_v = gp.zeros(n, q.columns), gp.zeros(n, do.columns)
        for m in gp.sequential(q.rows):
            s = scale * (k[h, n] @ q[h, m].T)
            s = s if visible is None else gp.where(lambda n, m: visible(m, n), s, -np.inf)
            p = gp.exp(s - lse[h, m])
            sums_v += p.astype(v.dtype) @ do[h, m]
            ds = (p * (v[h, n] @ do[h, m].T - delta[h, m])).astype(k.dtype)
            sums_q[h, m] += ds.T @ k[h, n]
            sums_k += ds @ q[h, m]
        dk[h, n] = scale * sums_k
        dv[h, n] = sums_v


def causal(m: Any, n: Any) -> Any:
    return n <= m


def near(m: Any, n: Any) -> Any:
    return (n <= m) & (m - n < 70)


def drawn(rng: np.random.Generator, queries: int, keys: int, columns: int, width: int, dtype: Any = F16, stacks: int = 2) -> list[np.ndarray]:
    return [(rng.standard_normal(shape) / 2).astype(dtype)
            for shape in ((stacks, queries, columns), (stacks, keys, columns), (stacks, keys, width))]


def close(found: np.ndarray, wanted: np.ndarray, dtype: Any) -> None:
    size = np.abs(wanted).max()
    assert np.isfinite(found.astype(float)).all()
    assert np.abs(found.astype(float) - wanted).max() <= (6e-3 if dtype == BF16 else 1.5e-3) * size


CASES: dict[str, tuple[int, int, int, int, Any, Any, gk.Mapping]] = {
    "two tiles": (100, 90, 32, 24, F16, None, ROUNDS), "bfloat16": (130, 70, 16, 64, BF16, None, ROUNDS),
    "causal": (150, 150, 16, 16, F16, causal, ROUNDS), "window": (200, 200, 16, 16, F16, near, ROUNDS),
    "parts of columns": (70, 140, 64, 128, F16, causal, gk.Mapping({"m": 64}, warpgroups=2)),
    "parts of rows": (140, 140, 32, 40, F16, near, gk.Mapping({"m": 128}, warpgroups=2)),
    "one row": (1, 1, 16, 16, F16, None, ROUNDS), "left open": (100, 300, 64, 64, F16, causal, gk.Mapping()),
}


@on_machines
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_sums(machine: Any, name: str, ordered: bool, rng: np.random.Generator) -> None:
    """They are added to what is there; on a GPU, with turns, the same bits twice."""
    queries, keys, columns, width, dtype, visible, mapping = CASES[name]
    q, k, v = drawn(rng, queries, keys, columns, width, dtype)
    sums = rng.standard_normal((2, queries, width)).astype(F32)
    wanted = both.reference(q, k, v, sums, np.empty(k.shape, dtype), 0.25, visible=visible)
    mapping = gk.Mapping(**{**{name: getattr(mapping, name) for name in ("blocks", "warpgroups")}, "ordered": ordered})
    with machine.session():
        given = [machine.array(x) for x in (q, k, v)]
        found = [(machine.array(sums), machine.array(np.full(k.shape, np.nan, dtype))) for _ in range(1 if machine.emulated else 2)]
        for pair in found:
            both(*given, *pair, 0.25, visible=visible, mapping=mapping)
        results = [[machine.numpy(x) for x in pair] for pair in found]
    for one, wants in zip(results[0], wanted):
        close(one, wants, dtype)
    assert not ordered or all(np.array_equal(one, other) for one, other in zip(results[0], results[-1]))


@on_machines
@pytest.mark.parametrize("offsets", [[0, 70, 70, 71, 200], [3, 3, 90, 150, 190]])
def test_pieces(machine: Any, offsets: list[int], rng: np.random.Generator) -> None:
    """Rows of no piece stay as they are."""
    q, k, _ = drawn(rng, 200, 200, 32, 32)
    sums, begins = rng.standard_normal(q.shape).astype(F32), np.array(offsets, np.int32)
    wanted = of_pieces.reference(q, k, begins, sums, np.empty(k.shape, F16))
    with machine.session():
        found = [machine.array(sums), machine.array(np.zeros(k.shape, F16))]
        of_pieces(machine.array(q), machine.array(k), machine.array(begins), *found, mapping=ROUNDS)
        results = [machine.numpy(x) for x in found]
    for one, wants in zip(results, wanted):
        close(one, np.nan_to_num(wants), F16)


@on_machines
@pytest.mark.parametrize(("columns", "visible"), [(64, causal), (128, None), (128, near)])
def test_attention_gradients(machine: Any, columns: int, visible: Any, rng: np.random.Generator) -> None:
    """All three from one kernel, against the formulas in float64."""
    q, k, v, do = (rng.standard_normal((1, rows, columns)).astype(F16) for rows in (140, 150, 150, 140))
    scale, (m, n) = columns ** -0.5, np.ogrid[:140, :150]
    exact = [x.astype(np.float64) for x in (q, k, v, do)]
    s = np.where(True if visible is None else visible(m, n), scale * exact[0] @ exact[1].swapaxes(1, 2), -np.inf)
    lse = np.log(np.exp(s).sum(2))
    p = np.exp(s - lse[..., None])
    dp = exact[3] @ exact[2].swapaxes(1, 2)
    delta = (p * dp).sum(2)
    ds = p * (dp - delta[..., None])
    wanted = ds @ exact[1], scale * ds.swapaxes(1, 2) @ exact[0], p.swapaxes(1, 2) @ exact[3]
    with machine.session():
        outs = [machine.array(x) for x in (np.zeros(q.shape, F32), np.full(k.shape, np.nan, F16), np.full(v.shape, np.nan, F16))]
        given = [machine.array(x) for x in (q, k, v, do, lse.astype(F32), delta.astype(F32))]
        attention_gradients(*given, *outs, scale, visible=visible, mapping=gk.Mapping({"m": 64 if columns == 128 else 128}, warpgroups=2))
        results = [machine.numpy(x) for x in outs]
    for one, wants in zip(results, wanted):
        close(one, wants, F16)


@pytest.mark.parametrize("seed", range(3))
def test_order(seed: int, rng: np.random.Generator) -> None:
    """Whichever thread the emulator lets run next: one order, and counters that are 0 again, with as many blocks as a stack has
    tiles, which begin apart, or more, and with fewer."""
    q, k, v = drawn(rng, 70, 200, 16, 16)
    found = []
    for blocks in (2, 3, 4, 5):
        sums = np.zeros((2, 70, 16), F32)
        with gk.emulate(seed=seed), assumed(dataclasses.replace(H100, sm_count=blocks)):
            both(q, k, v, sums, np.empty(k.shape, F16), 0.25, mapping=ROUNDS)
        found.append(sums)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[2], found[3])


#: A line of the text, what stands in its place, and what finds the fault beside the verifier: whether the emulator does, too.
FAULTS: dict[str, tuple[str, str, bool]] = {
    "no meeting": ("                value_place.meet()\n", "", True),
    "one place": ("                at_value_place = value_place.other(at_value_place)\n", "", False),
    "no empty stage": ("                ring_added.wait(at_added)\n", "", True),
    "not handed on": ("                ring_added.release(at_added.stage)\n", "", True),
    "added too early": ("                    ring_added.acquire(at_added)\n", "", True),
    "given too early": ("                    ring_added.acquire(at_added)\n", "                    ring_added.acquire(at_added)\n"
                        "                    ring_added.expect(at_added, 0)\n", True),
    "results in its place": ("        out_sums.leave(ring_added, at_added)\n", "", True),
    "in the place of results": ("                out_sums.clear()\n", "", False),
    "counted too early": ("                    out_sums.finish()\n", "", False),
    "no turn": ('                    await_counter(turn_counts, first_turn + udiv(m, 64), turn, "acquire")\n', "", False),
    "another order": ('turn, "acquire")\n                    ring_added', '0, "acquire")\n                    ring_added', False),
    "not counted": ('                    atomic_add(turn_counts, first_turn + udiv(m, 64), passed, "release")\n', "", True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, rng: np.random.Generator) -> None:
    old, new, is_emulated = FAULTS[name]
    q, k, v = drawn(rng, 200, 200, 16, 16, stacks=1)
    sums, dk = np.zeros((1, 200, 16), F32), np.empty(k.shape, F16)
    mapping = gk.Mapping({"m": 64}, warpgroups=2 if name in ("no meeting", "one place") else 1, ordered=True)
    with assumed(H100):
        plan = both.plan(q, k, v, sums, dk, 0.25, mapping=mapping if mapping.warpgroups == 1 else gk.Mapping({"m": 128}, warpgroups=2))
        text = plan.text.replace(old, new)
        assert text != plan.text
        edited = both.plan(q, k, v, sums, dk, 0.25, mapping=plan.mapping, text=text)
        object.__setattr__(edited, "resizing", plan.resizing)
    with pytest.raises((Unsound, KeyError, ValueError)):
        verify(edited)
    if is_emulated:
        with pytest.raises(EmulatorError), gk.emulate():
            edited.run(dict(q=q, k=k, v=v, sums=sums, dk=dk, scale=0.25))


# -- refusals -----------------------------------------------------------------------------------------------------------------

def half(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.zeros(shape, dtype)


GIVEN = dict(q=half(2, 100, 16), k=half(2, 100, 16), v=half(2, 100, 16), sums=half(2, 100, 16, dtype=F32), dk=half(2, 100, 16), scale=0.5)

REFUSED: dict[str, tuple[dict[str, Any], gk.Mapping, type, str]] = {
    "dtype": (dict(sums=half(2, 100, 16)), ROUNDS, TypeError, "sums has dtype float16; tiles add up float32"),
    "splits": ({}, gk.Mapping(splits=2), gk.ConfigError, r"splits=2\): rounds add to sums, and are not split"),
    "turns": ({}, gk.Mapping({"m": 64}, turns=True, warpgroups=2), gk.ConfigError, "warpgroups meet where rounds add to an array"),
    "clusters": ({}, gk.Mapping({"m": 64}, cluster={"n": 2}), gk.ConfigError, "tiles add in the order of their numbers"),
    "ahead": ({}, gk.Mapping({"m": 64}, ahead=True), gk.ConfigError, "goes through shared memory in its own round"),
    "lengths": ({}, gk.Mapping({"m": 48}), gk.ConfigError, "blocks of 48 along m, whose 16 columns are added to an array"),
    "parts": ({}, gk.Mapping({"m": 64}, warpgroups=2), gk.ConfigError, "2 warpgroups have no part of 64 rows each, or of a multiple of 64"),
    "multistage": ({}, gk.Mapping(kernel="multistage"), gk.ConfigError, "kernels of TMA and wgmma have a place for it"),
    "rows": (dict(sums=half(2, 100, 17, dtype=F32)[..., :16]), ROUNDS, ValueError, "rows of whole 16 bytes to an array, and its stride along axis"),
    "shared memory": (dict(dk=GIVEN["sums"].view(F16)[:, :, :16]), ROUNDS, ValueError, "share memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    more, mapping, kind, said = REFUSED[name]
    with assumed(H100), pytest.raises(kind, match=said):
        both.plan(*{**GIVEN, **more}.values(), mapping=mapping)


def test_refused_programs() -> None:
    """What rounds add must be their own rows, and a product of a computed value's transpose; else it is refused with its line."""
    @gk.program
    def scaled(q: Any, k: Any, sums: Any) -> None:
        for n in gp.parallel(k.rows):
            for m in gp.sequential(q.rows):
                sums[m] += 2.0 * ((k[n] @ q[m].T).astype(k.dtype).T @ k[n])

    @gk.program
    def of_rows(q: Any, k: Any, sums: Any) -> None:
        for n in gp.parallel(k.rows):
            for m in gp.sequential(q.rows):
                sums[n] += (k[n] @ q[m].T).astype(k.dtype) @ q[m]

    @gk.program
    def stored(q: Any, k: Any, sums: Any) -> None:
        for n in gp.parallel(k.rows):
            for m in gp.sequential(q.rows):
                sums[m] = (k[n] @ q[m].T).astype(k.dtype).T @ k[n]

    @gk.program
    def twice(q: Any, k: Any, sums: Any, others: Any, d: Any) -> None:
        for n in gp.parallel(k.rows):
            acc = gp.zeros(n, q.columns)
            for m in gp.sequential(q.rows):
                w = (k[n] @ q[m].T).astype(k.dtype)
                sums[m] += w.T @ k[n]
                others[m] += w.T @ k[n]
                acc += w @ q[m]
            d[n] = acc

    given = half(100, 16), half(100, 16), half(100, 16, dtype=F32)
    with assumed(H100), pytest.raises(ValueError, match=r"others\[...\] \+= ...: rounds add to sums already"):
        twice.plan(*given, half(100, 16, dtype=F32), half(100, 16))
    for program, said in ((scaled, "is no product|reduces n, but a tile has only a part"), (of_rows, r"rounds add to their own rows, \[m\]"),
                          (stored, "add it to an array: x\\[m\\] \\+=")):
        with assumed(H100), pytest.raises(ValueError, match=said) as error:
            program.plan(*given)
        assert "test_added.py" in str(error.value)
    with assumed(H100), pytest.raises(gk.ConfigError, match=r"ordered=True\): the rounds add to no array"):
        @gk.program
        def plain(q: Any, k: Any, d: Any) -> None:
            for n in gp.parallel(k.rows):
                acc = gp.zeros(n, q.columns)
                for m in gp.sequential(q.rows):
                    acc += (k[n] @ q[m].T).astype(k.dtype) @ q[m]
                d[n] = acc

        plain.plan(*given, mapping=gk.Mapping(ordered=True))
    with assumed(A100), pytest.raises(gk.ConfigError, match="this one has not"):
        both.plan(*GIVEN.values())


# -- machine code -------------------------------------------------------------------------------------------------------------

@pytest.mark.compile
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_machine_code(width: int, ordered: bool) -> None:
    """Nothing spills in a round; TMA adds four boxes; threads store pairs, and a matrix of the place at a time."""
    q, k, v = (half(8, 1024, width) for _ in range(3))
    sums, dk = half(8, 1024, width, dtype=F32), half(8, 1024, width)
    (plan,) = recorded(lambda: both(q, k, v, sums, dk, 0.125, mapping=gk.Mapping({"m": 8192 // width}, warpgroups=2, ordered=ordered)), H100, zeros=False)
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["stack_bytes"] <= 48
    assert plan.launchable.waits == ordered
    sass = disassemble(entry.cubin)
    assert sum(line.startswith("UTMAREDG") for line in instructions(sass)) in (4, 8)
    rounds = [one for one in loops(sass) if any("HGMMA" in line for line in one) and not any("UTMASTG" in line for line in one)]
    assert len(rounds) == 2
    for one in rounds:
        assert not any(line.startswith(("LDL", "STL")) for line in one)
        assert sum("STS.64" in line for line in one) == 16 and sum("STSM" in line for line in one) in (4, 8)
        assert sum("WARPGROUP.ARRIVE" in line for line in one) == 3        # wgmmas of a product go one after the other
