"""Tiles that read what they store, ``d[m, n] = acc + beta * d[m, n]``: in the emulator, which finds reads and writes that nothing
orders, on a GPU, as PTX, and as compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100, assumed
from tests.programs.test_multistage import A100
from tests.programs.test_row_programs import close
from tests.ptx_machine.launch import Ptx
from tests.support.machines import BF16, on_machines
from tests.verifier import Unsound, verify

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@gk.program
def gemm(a: Any, b: Any, d: Any, alpha: float, beta: float) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = alpha * acc + beta * d[m, n]


@gk.program
def added(a: Any, b: Any, d: Any, e: Any) -> None:
    """The sums begin with what is there; another result, written later, reads that too."""
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc = gp.copy(0.5 * d[h, m, n])
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ b[h, k, n]
        before = d[h, m, n]
        d[h, m, n] += acc
        e[h, m, n] = gp.maximum(acc, 0.0) - before * gp.place(n)


@gk.program
def pieces(a: Any, b: Any, d: Any, offsets: Any) -> None:
    rows = gp.packed(a.rows, offsets)
    for g, m, n in gp.parallel(rows.count, rows.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[g, k, n]
        d[m, n] += acc


@gk.program
def attention(q: Any, k: Any, v: Any, o: Any, scale: float) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        top, total, acc = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[h, m] @ k[h, n].T)
            new = gp.maximum(top, s.max(axis=1))
            p, c = gp.exp(s - new), gp.exp(top - new)
            total[:] = total * c + p.sum(axis=1)
            acc[:] = acc * c + p.astype(v.dtype) @ v[h, n]
            top[:] = new
        o[h, m] = 0.5 * o[h, m] + acc / total


@gk.program
def sequences(q: Any, k: Any, v: Any, offsets: Any, o: Any) -> None:
    of_q, of_k = gp.packed(q.rows, offsets), gp.packed(k.rows, offsets)
    for b, h, m in gp.parallel(of_q.count, q.count, of_q.rows):
        total, acc = gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(of_k[b]):
            p = gp.exp(gp.minimum(q[h, m] @ k[h, n].T, 2.0))
            total += p.sum(axis=1)
            acc += p.astype(v.dtype) @ v[h, n]
        o[h, m] += acc / gp.maximum(total, 1.0)


@gk.program
def own(q: Any, k: Any, v: Any) -> None:
    """The queries, which are operands as well."""
    for h, m in gp.parallel(q.count, q.rows):
        acc = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            acc += gp.minimum(q[h, m] @ k[h, n].T, 2.0).astype(v.dtype) @ v[h, n]
        q[h, m] += acc


@gk.program
def residual(x: Any, w: Any, v: Any) -> None:
    """A layer's rows, which are its left operand too."""
    for m in gp.parallel(x.rows):
        h = gp.maximum(x[m] @ w, 0.0)
        x[m] += h.astype(x.dtype) @ v


@gk.program
def layers(x: Any, w: Any) -> None:
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for n in gp.sequential(w.count):
            h[:] = gp.maximum(h.astype(x.dtype) @ w[n], 0.0)
        x[m] = x[m] - h


class Drawn:
    def __init__(self, rng: np.random.Generator, rows: int, columns: int, depth: int, dtype: Any):
        self.rng, self.rows, self.columns, self.depth, self.dtype = rng, rows, columns, depth, dtype

    def half(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) * 0.3).astype(F16)

    def held(self, *shape: int) -> np.ndarray:
        """What a result has before: a part of an array."""
        wide = np.full((*shape[:-1], shape[-1] + 8), np.nan, self.dtype)
        wide[..., :shape[-1]] = self.rng.standard_normal(shape)
        return wide[..., :shape[-1]]

    def offsets(self) -> np.ndarray:
        return np.array([0, self.rows // 3, self.rows // 3, self.rows], np.int32)


Form = tuple[gp.Program, Callable[[Drawn], list[np.ndarray]], dict[str, float]]
FORMS: dict[str, Form] = {
    "gemm": (gemm, lambda d: [d.half(d.rows, d.depth), d.half(d.depth, d.columns), d.held(d.rows, d.columns)], dict(alpha=0.5, beta=-2.0)),
    "added": (added, lambda d: [d.half(2, d.rows, d.depth), d.half(2, d.depth, d.columns), d.held(2, d.rows, d.columns),
                                np.full((2, d.rows, d.columns), np.nan, F32)], {}),
    "pieces": (pieces, lambda d: [d.half(d.rows, d.depth), d.half(3, d.depth, d.columns), d.held(d.rows, d.columns), d.offsets()], {}),
    "attention": (attention, lambda d: [d.half(2, d.rows, d.depth), d.half(2, 75, d.depth), d.half(2, 75, d.columns),
                                        d.held(2, d.rows, d.columns)], dict(scale=0.3)),
    "sequences": (sequences, lambda d: [d.half(2, d.rows, d.depth), d.half(2, d.rows, d.depth), d.half(2, d.rows, d.columns), d.offsets(),
                                        d.held(2, d.rows, d.columns)], {}),
    "own": (own, lambda d: [d.half(2, d.rows, d.depth), d.half(2, 75, d.depth), d.half(2, 75, d.depth)], {}),
    "residual": (residual, lambda d: [d.half(d.rows, d.depth), d.half(d.depth, d.columns), d.half(d.columns, d.depth)], {}),
    "layers": (layers, lambda d: [d.half(d.rows, d.depth), d.half(3, d.depth, d.depth)], {}),
}
SHAPES = [(70, 72, 64), (1, 8, 32), (200, 136, 96), (64, 64, 128)]


def compare(machine: Any, program: gp.Program, arrays: list[np.ndarray], mapping: gk.Mapping | None, **more: Any) -> None:
    wanted, plan = program.reference(*arrays, **more), program.plan(*arrays, mapping=mapping, **more)
    held = [machine.array(x) for x in arrays]
    with machine.session():
        program(*held, mapping=mapping, **more)
    results = [machine.numpy(x) for name, x in zip(program.names, held) if name in plan.results]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        close(got, exact, 4000)
        assert got.base is None or not machine.emulated or np.isnan(got.base[..., got.shape[-1]:]).all()


@pytest.mark.kin(4)
@pytest.mark.sample(9)
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_tiles_read_what_they_store(machine: Any, form: str, shape: tuple[int, int, int], dtype: Any, rng: np.random.Generator) -> None:
    program, arrays, more = FORMS[form]
    compare(machine, program, arrays(Drawn(rng, *shape, dtype)), None, **more)


@pytest.mark.kin(4)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("mapping", [gk.Mapping(kernel="multistage"), gk.Mapping(warpgroups=1), gk.Mapping(cluster={"m": 2})], ids=repr)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "pieces"])
def test_in_place_by_other_mappings(machine: Any, form: str, mapping: gk.Mapping, rng: np.random.Generator) -> None:
    if form == "sequences" and mapping.cluster:                        # packed rows have no clusters
        return
    program, arrays, more = FORMS[form]
    compare(machine, program, arrays(Drawn(rng, 136, 72, 64, F16)), mapping, **more)


@on_machines
@pytest.mark.parametrize("kernel", ["", "multistage"])
def test_shares_are_merged_into_what_is_there(machine: Any, kernel: str, rng: np.random.Generator) -> None:
    program, arrays, more = FORMS["attention"]
    compare(machine, program, arrays(Drawn(rng, 70, 72, 64, F16)), gk.Mapping(kernel=kernel, splits=2), **more)


@pytest.mark.compile
@pytest.mark.sample(4)
@pytest.mark.parametrize("form", ["gemm", "attention", "residual", "layers"])
def test_in_place_as_ptx(form: str, rng: np.random.Generator) -> None:
    """Of the multistage kernel, all threads in step."""
    program, make, more = FORMS[form]
    with assumed(A100):
        arrays = make(Drawn(rng, 70, 40, 32, F16))
        wanted, plan = program.reference(*arrays, **more), program.plan(*arrays, mapping=gk.Mapping(kernel="multistage"), **more)
        with Ptx().session():
            plan.run(program.bound(tuple(arrays), more))
    close(next(x for name, x in zip(program.names, arrays) if name in plan.results), wanted, 4000)


@pytest.mark.compile
@pytest.mark.sample(3)
@pytest.mark.kin(4)
@pytest.mark.parametrize("device", [H100, A100], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "pieces"])
def test_in_place_as_compiled(form: str, device: Any, rng: np.random.Generator) -> None:
    """Nothing spills, and no load takes what is stored for what never changes."""
    program, make, more = FORMS[form]
    with assumed(device):
        plan = program.plan(*make(Drawn(rng, 256, 64, 64, F16)), **more)
        for kernel in plan.kernels:
            entry = kernel.launchable.entry()
            usage, counts = entry.meta["usage"], instruction_counts(disassemble(entry.cubin), full=True)
            assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
            assert not any(op.startswith("LDG") and "CONSTANT" in op for op in counts)


@pytest.mark.parametrize("form, mapping, old, new, said", [
    ("gemm", None, "element_before(before_d, (row + row_of(i), column + column_at(i)), row + row_of(i) <= last_m and column + column_at(i) <= last_n)",
     "before_d[min(row + row_of(i), last_m), min(column + column_at(i), last_n)]", "another thread may have stored"),
    ("gemm", gk.Mapping(places={"d": "registers"}), "        warp_barrier()\n", "", "have not met"),
    ("attention", gk.Mapping(kernel="multistage"), "    warp_barrier()\n", "", "have not met"),
])
def test_seeded_faults_are_found(form: str, mapping: gk.Mapping | None, old: str, new: str, said: str, rng: np.random.Generator) -> None:
    program, make, more = FORMS[form]
    arrays = make(Drawn(rng, 70, 72, 64, F16))
    text = program.plan(*arrays, mapping=mapping, **more).text
    assert old in text
    with pytest.raises(Unsound, match=said):
        verify(program.plan(*arrays, mapping=mapping, text=text.replace(old, new, 1), **more))


# -- what is refused ------------------------------------------------------------------------------------------------------------

@gk.program
def each_of_the_other(a: Any, b: Any, d: Any, e: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        one, other = d[m, n], e[m, n]
        d[m, n] = acc + other
        e[m, n] = acc + one


@gk.program
def values_of_rows(a: Any, b: Any, d: Any, s: Any) -> None:
    """A value of each row, which all tiles along n read and the first one stores."""
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += a[m, k].sum(axis=1)
        d[m, n] = acc * s[m]
        with gp.once(n):
            s[m] = sums + s[m]


@gk.program
def totals(q: Any, k: Any, d: Any, s: Any) -> None:
    for m in gp.parallel(q.rows):
        total, acc = gp.zeros(m), gp.zeros(m, k.columns)
        for n in gp.sequential(k.rows):
            p = q[m] @ k[n].T
            total += p.sum(axis=1)
            acc += p.astype(k.dtype) @ k[n]
        d[m] = acc
        s[m] = s[m] + total


@gk.program
def named(a: Any, b: Any, d: Any, to: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[to[m], n] = acc + d[to[m], n]


@gk.program
def of_another_tile(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += d[m, k] @ b[k, n]
        d[m, n] = acc


@gk.program
def all_rows(q: Any, k: Any) -> None:
    """Rounds read what other tiles store."""
    for m in gp.parallel(q.rows):
        acc = gp.zeros(m, k.columns)
        for n in gp.sequential(q.rows):
            acc += (q[m] @ q[n].T).astype(k.dtype) @ k[n]
        q[m] = acc


@gk.program
def packed_queries(q: Any, k: Any, offsets: Any) -> None:
    """A piece's last block has rows of the next one."""
    rows = gp.packed(q.rows, offsets)
    for _b, m in gp.parallel(rows.count, rows.rows):
        acc = gp.zeros(m, k.columns)
        for n in gp.sequential(k.rows):
            acc += (q[m] @ k[n].T).astype(k.dtype) @ k[n]
        q[m] += acc


@pytest.mark.parametrize("program, count", [(packed_queries, 2), (each_of_the_other, 4), (values_of_rows, 3), (totals, 3), (named, 3), (of_another_tile, 3), (all_rows, 2)],
                         ids=lambda x: x.function.__name__ if isinstance(x, gp.Program) else "")
def test_what_may_be_stored_already_is_refused(program: gp.Program, count: int) -> None:
    vector = {"packed_queries": np.array([0, 64], np.int32), "values_of_rows": np.zeros(64, F32), "totals": np.zeros(64, F32), "named": np.arange(64, dtype=np.int32)}
    arrays = [np.zeros((64, 64), F16) for _ in range(count)] + [x for name, x in vector.items() if name == program.function.__name__]
    with pytest.raises(ValueError, match="is both read and stored"):
        program.plan(*arrays)
