"""Products of different sizes in one launch, against NumPy: sizes, orders, strides, components, plans, bad input. Values are small
whole numbers, so results are exact."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.functions.grouped import CompiledGroup, typical
from gemmkit.kernels.collectives.batched import Member
from gemmkit.lang import memory
from gemmkit.layouts import RowMajor
from gemmkit.operators import COMPLEX, MIN_PLUS, FPUOp, MMAOp, WGMMAOp
from gemmkit.runtime.arrays import alignment, describe
from gemmkit.runtime.compile import assemble, to_ptx
from gemmkit.tiling import Tile
from tests.ptx_machine.launch import Ptx
from tests.support.machines import is_poison, on_machines, poison, whole

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
SHAPES = [(5, 7, 6), (17, 19, 70), (0, 4, 3), (1, 1, 1), (16, 16, 0), (4, 0, 9), (5, 33, 31)]


def lists(rng: np.random.Generator, shapes: Any, dtype: Any, order: str = "CC") -> tuple[list, list]:
    """Matrices of A and of B."""
    a = [np.array(whole(rng, (m, k), dtype), order=order[0]) for m, _, k in shapes]            # type: ignore[call-overload]
    return a, [np.array(whole(rng, (k, n), dtype), order=order[1]) for _, n, k in shapes]      # type: ignore[call-overload]


def mapped(operator: Any, kernel: str = "multistage", **fields: Any) -> Any:
    dtype = operator.fragment_a.dtype
    stages = {"stages": 2} if kernel == "multistage" else {}
    return gk.get_config(**{**dict(operator=operator, global_a_layout=RowMajor(dtype), kernel=kernel,
                                   block_shape=Tile(M=16, N=16, K=32), global_d_layout=RowMajor(operator.fragment_c.dtype)),
                            **stages, **fields})


def computed(machine: Any, a: list, b: list, c: list | None = None, dtype: Any = F32, conf: Any = None, seed: int | None = None,
             **fields: Any) -> list[np.ndarray]:
    """The results, in arrays that were poisoned before."""
    out = [machine.array(poison((x.shape[0], y.shape[1]), dtype)) for x, y in zip(a, b)]
    with gk.emulate(seed) if machine.emulated else machine.session():
        given = [None if xs is None else [machine.array(x) for x in xs] for xs in (a, b, c)]
        found = gk.grouped(*given, out=out, conf=conf, **fields)
    assert all(d is o for d, o in zip(found, out))
    return [machine.numpy(d) for d in found]


def agree(found: list, a: list, b: list, c: list | None = None) -> bool:
    expected = [x.astype(F64) @ y.astype(F64) for x, y in zip(a, b)]
    if c is not None:
        expected = [x + y for x, y in zip(expected, c)]
    return len(found) == len(a) and all(np.array_equal(d, e) for d, e in zip(found, expected))


# -- results ----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("kernel", ["multistage", "singlestage"])
@pytest.mark.parametrize("operator", [FPUOp(16, 16), MMAOp()], ids=["f32", "f16"])
def test_sizes(machine: Any, kernel: str, operator: Any, rng: np.random.Generator) -> None:
    """Of 0, of 1, of primes; blocks in any order."""
    a, b = lists(rng, SHAPES, operator.fragment_a.dtype)
    assert agree(computed(machine, a, b, conf=mapped(operator, kernel), seed=5), a, b)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_what_is_chosen(machine: Any, dtype: Any, rng: np.random.Generator) -> None:
    a, b = lists(rng, [(40, 24, 56), (8, 16, 24), (0, 8, 8)], dtype)
    with machine.session():
        found = gk.grouped([machine.array(x) for x in a], [machine.array(x) for x in b])
    assert agree([machine.numpy(d) for d in found], a, b) and all(machine.numpy(d).dtype == dtype for d in found)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("order", ["CC", "CF", "FC", "FF"])
def test_orders(machine: Any, order: str, rng: np.random.Generator) -> None:
    a, b = lists(rng, [(16, 24, 32), (8, 40, 16), (24, 8, 48)], F16, order)
    kinds = {"C": RowMajor, "F": gk.layouts.ColMajor}
    conf = mapped(MMAOp(), global_a_layout=kinds[order[0]](F16), global_b_layout=kinds[order[1]](F16))
    assert agree(computed(machine, a, b, conf=conf), a, b)


@pytest.mark.kin(5)
@on_machines
def test_views_of_one_array(machine: Any, rng: np.random.Generator) -> None:
    """Rows between offsets, as tokens of experts are; results side by side in one array, by rows and by columns."""
    offsets = [0, 5, 5, 22, 39]
    tokens, weights = whole(rng, (39, 40), F16), whole(rng, (4, 40, 24), F16)
    with machine.session():
        x, w, d = machine.array(tokens), machine.array(weights), machine.array(poison((39, 24), F32))
        pieces = [x[i:j] for i, j in pairwise(offsets)]
        gk.grouped(pieces, list(w), out=[d[i:j] for i, j in pairwise(offsets)], conf=mapped(MMAOp()))
        expected = np.concatenate([tokens[i:j].astype(F64) @ weights[n] for n, (i, j) in enumerate(pairwise(offsets))])
        assert np.array_equal(machine.numpy(d), expected)
        e = machine.array(poison((39, 96), F32))
        gk.grouped([x] * 4, list(w), out=[e[:, 24 * n:24 * n + 24] for n in range(4)], conf=mapped(MMAOp()))
        assert np.array_equal(machine.numpy(e), np.concatenate([tokens.astype(F64) @ y for y in weights], axis=1))


@pytest.mark.kin(5)
@on_machines
def test_strides_and_places_that_are_not_aligned(machine: Any, rng: np.random.Generator) -> None:
    """Every other column, and views from odd elements on: accesses are as narrow as the worst of them needs."""
    big = whole(rng, (40, 81), F16)
    with machine.session():
        x = machine.array(big)
        a = [x[:20, 1:34], x[3:17, 2:42:2], x[:, ::3]]
        b = [x[:33, 40:57], x[5:25, 7:20], x[:27, 3:]]
        found = gk.grouped(a, b, conf=mapped(MMAOp()))
        assert agree([machine.numpy(d) for d in found], [machine.numpy(y) for y in a], [machine.numpy(y) for y in b])


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@pytest.mark.compile
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
def test_what_was_compiled_for_strides_that_differ_computes(family: str, rng: np.random.Generator) -> None:
    """Extents have 1 in common, which makes no axis contiguous: code of lines was asked for views without any."""
    x = whole(rng, (40, 81), F16)
    a, b = [x[:20, 1:34], x[3:17, 2:42:2], x[:, ::3]], [x[:33, 40:57], x[5:25, 7:20], x[:27, 3:]]
    with Ptx().session():
        found = gk.grouped(a, b, conf=mapped(MMAOp(), kernel=family))
    assert agree(found, a, b)


@pytest.mark.kin(5)
@on_machines
def test_c_and_components(machine: Any, rng: np.random.Generator) -> None:
    a, b = lists(rng, SHAPES[:4], F16)
    c = [whole(rng, (m, n), F32) for m, n, _ in SHAPES[:4]]
    conf = mapped(MMAOp(), global_c_layout=RowMajor(F32))
    assert agree(computed(machine, a, b, c, conf=conf), a, b, c)
    found = computed(machine, a, b, conf=mapped(MMAOp()), epilogue=gk.epilogues.Elementwise(lambda x, m, n, batch: x + 10 * batch + m))
    for n, (d, x, y) in enumerate(zip(found, a, b)):
        assert np.array_equal(d, x.astype(F64) @ y + 10 * n + np.arange(len(x))[:, None])


@on_machines
def test_in_place(machine: Any, rng: np.random.Generator) -> None:
    a, b = lists(rng, [(5, 7, 6), (18, 9, 40)], F16)
    c = [whole(rng, (5, 7), F32), whole(rng, (18, 9), F32)]
    with machine.session():
        d = [machine.array(x) for x in c]
        gk.grouped([machine.array(x) for x in a], [machine.array(x) for x in b], d, d,
                   conf=mapped(MMAOp(), global_c_layout=RowMajor(F32)))
        assert agree([machine.numpy(x) for x in d], a, b, c)


@pytest.mark.kin(5)
@pytest.mark.sample(2)
@on_machines
def test_semirings_and_complex_numbers(machine: Any, rng: np.random.Generator) -> None:
    a, b = lists(rng, [(5, 7, 6), (9, 3, 20)], F32)
    found = computed(machine, a, b, operator=MIN_PLUS)
    assert all(np.array_equal(d, (x[:, :, None] + y[None]).min(1)) for d, x, y in zip(found, a, b))
    u, v = [(x + 2j * x[::-1]).astype("c8") for x in a], [(y - 1j * y).astype("c8") for y in b]
    found = computed(machine, u, v, dtype="c8", operator=COMPLEX)
    assert all(np.array_equal(d, x @ y) for d, x, y in zip(found, u, v))


@pytest.mark.kin(5)
@on_machines
def test_plans(machine: Any, rng: np.random.Generator) -> None:
    """A plan takes other arrays of its kinds; with those it has seen, only the launch is left."""
    with machine.session():
        sets = []
        for _ in range(2):
            a, b = lists(rng, SHAPES, F16)
            sets.append((a, b, [machine.array(x) for x in a], [machine.array(x) for x in b]))
        run = gk.functions.plan_grouped(sets[0][2], sets[0][3], conf=mapped(MMAOp()))
        assert "7 products" in repr(run)
        for _ in range(2):
            for a, b, x, y in sets:
                assert agree([machine.numpy(d) for d in run(x, y)], a, b)
        assert gk.grouped([], []) == []
        with pytest.raises(ValueError, match=r"a_list\[1\] differs from the plan's"):
            run([sets[0][2][0]] * 7, sets[0][3])
        with pytest.raises(ValueError, match="a_list has 6 arrays and the plan 7"):
            run(sets[0][2][:6], sets[0][3][:6])
        with pytest.raises(ValueError, match="c_list is given"):
            run(*sets[0][2:], [machine.array(np.zeros((m, n), F32)) for m, n, _ in SHAPES])


# -- what is decided on the host --------------------------------------------------------------------------------------

def test_one_array_that_stands_for_all() -> None:
    x = np.zeros((64, 64), F16)
    kinds = [describe(x[:32, :48]), describe(x[:16, 8:40])]
    found = typical(kinds)
    assert found.shape == (16, 16) and alignment(found) == 16 and found.strides[1] == 1
    assert alignment(typical([*kinds, describe(x[1:5, 2:10])])) == 4
    assert typical([*kinds, describe(x[:, ::2])]).strides[1] != 1
    assert typical([None, None]) is None


def test_tables() -> None:
    rng = np.random.default_rng(0)
    a, b = lists(rng, [(40, 20, 10), (16, 16, 90), (0, 5, 5)], F16)
    with gk.emulate():
        run = gk.functions.plan_grouped(a, b, conf=mapped(MMAOp()))
    compiled = run._compiled
    assert isinstance(compiled, CompiledGroup) and compiled.blocks == 7
    assert compiled.tables.products.tolist() == [1, 0, 0, 0, 0, 0, 0]                     # the longest K first
    assert compiled.tables.sizes[:, :4].tolist() == [[1, 40, 20, 10], [0, 16, 16, 90], [7, 0, 5, 5]]


@pytest.mark.thorough
@pytest.mark.sample(2)
@pytest.mark.compile
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_code(dtype: Any) -> None:
    """Copies of 16 bytes, no spill; of sizes or numbers of products the kernel does not depend."""
    kernels = []
    for shapes in ([(128, 256, 512), (1024, 512, 256)], [(64, 64, 64)] * 5):
        with gk.emulate():
            run = gk.functions.plan_grouped([np.zeros((m, k), dtype) for m, _, k in shapes], [np.zeros((k, n), dtype) for _, n, k in shapes],
                                  conf=mapped(MMAOp(), block_shape=Tile(M=64, N=64, K=32)) if dtype == F16 else
                                  mapped(FPUOp(64, 32), block_shape=Tile(M=64, N=64, K=8)))      # short, to compile quickly
        kernels.append(run._compiled.launchable)
    fingerprints = [[argument.fingerprint for argument in kernel.arguments] for kernel in kernels]
    assert fingerprints[0] == fingerprints[1]
    kernel = kernels[0]
    ptx = to_ptx(kernel.kernel, tuple(x.type for x in kernel.arguments), kernel.threads, kernel.target, kernel.blocks_per_sm)
    assert "cp.async.cg.shared.global" in ptx
    usage = assemble(ptx, kernel.target.arch_name).usage
    assert usage.spill_stores == usage.spill_loads == usage.stack_bytes == 0


# -- bad input --------------------------------------------------------------------------------------------------------

def pair(dtype: Any = F32) -> tuple[list, list]:
    return [np.ones((4, 3), dtype), np.ones((2, 5), dtype)], [np.ones((3, 6), dtype), np.ones((5, 7), dtype)]


BAD: dict[str, tuple[Any, type, str]] = {
    "lengths": (lambda a, b: gk.grouped(a, b[:1]), ValueError, "b_list has 1 arrays and a_list has 2"),
    "c lengths": (lambda a, b: gk.grouped(a, b, [np.ones((4, 6), F32)]), ValueError, "c_list has 1 arrays"),
    "no list": (lambda a, b: gk.grouped(a[0], b), TypeError, "a_list is a ndarray; a list of matrices is needed"),
    "a hole": (lambda a, b: gk.grouped([a[0], None], b), TypeError, r"a_list\[1\] is None"),
    "dtypes": (lambda a, b: gk.grouped([a[0], a[1].astype(F64)], b), ValueError, r"a_list\[1\] has dtype float64 and a_list\[0\]"),
    "dimensions": (lambda a, b: gk.grouped([a[0], a[1][0]], b), ValueError, r"a_list\[1\] has 1 dimensions"),
    "sizes": (lambda a, b: gk.grouped(a, b[::-1]), ValueError, "product 0: b has shape .* K=5"),
    "orders": (lambda a, b: gk.grouped([a[0], np.asfortranarray(a[1])], b), gk.ConfigError, r"a_list\[1\] is column-major and a_list\[0\] is row-major"),
    "out": (lambda a, b: gk.grouped(a, b, out=[np.ones((4, 6), F32), np.ones((2, 6), F32)]), ValueError, "product 1: out has shape"),
    "unknown": (lambda a, b: gk.grouped(a, b, colour=1), TypeError, "colour"),
    "stream": (lambda a, b: gk.grouped(a, b, stream="x"), TypeError, "stream must be a CUDA stream"),
    "gemm_shape": (lambda a, b: gk.grouped(a, b, gemm_shape=dict(M=1, N=1, K=1)), TypeError, "gemm_shape"),
    "kernel": (lambda a, b: gk.grouped([x.astype(F16) for x in a], [x.astype(F16) for x in b], conf=gk.get_config(
        operator=WGMMAOp(64), global_a_layout=RowMajor(F16))), gk.ConfigError, "kernel='warp_specialised'"),
    "splits": (lambda a, b: gk.grouped([x.astype(F16) for x in a], [x.astype(F16) for x in b], conf=mapped(MMAOp(), splits=3)),
               gk.ConfigError, "splits=3: the tiles of a group"),
    "empty plan": (lambda a, b: gk.functions.plan_grouped([], []), ValueError, "a_list is empty"),
}


@pytest.mark.parametrize("name", "abcd")
@pytest.mark.parametrize("given", [gk.epilogues.Epilogue(), FPUOp, MMAOp()], ids=["epilogue", "class", "operator"])
def test_what_is_no_layout_is_refused_by_its_name(name: str, given: Any) -> None:
    """Before an accumulator is chosen by the layouts' dtypes."""
    with gk.emulate(), pytest.raises(gk.ConfigError, match=f"global_{name}_layout=.* a Layout is needed"):
        gk.functions.plan_grouped(*pair(), **{f"global_{name}_layout": given})


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    call, error, said = BAD[what]
    with gk.emulate(), pytest.raises(error, match=said):
        call(*pair())


def test_host_arrays_need_the_emulator() -> None:
    with pytest.raises(TypeError, match="host array"):
        gk.grouped(*pair())


def test_overlapping_results() -> None:
    """Results that share memory with each other, or with an operand of another product; nothing is written."""
    a, b = [np.ones((4, 3), F32)] * 2, [np.ones((3, 6), F32)] * 2
    d = poison((7, 6), F32)
    with gk.emulate():
        with pytest.raises(ValueError, match=r"out\[\d\] shares memory with out\[\d\]"):
            gk.grouped(a, b, out=[d[:4], d[3:]])
        with pytest.raises(ValueError, match=r"out\[1\] shares memory with a\[0\]"):
            x = poison((4, 9), F32)
            gk.grouped([x[:, :3], a[1]], b, out=[d[:4], x[:, 2:8]])
        with pytest.raises(ValueError, match="product 0: out overlaps b"):
            y = poison((4, 6), F32)
            gk.grouped(a, [y[:3], b[1]], out=[y, d[:4]])
        with pytest.raises(ValueError, match=r"out\[\d\] shares memory with c\[\d\]"):
            z = [poison((4, 6), F32) for _ in range(2)]
            gk.grouped(a, b, z, z[::-1])
        wide = poison((4, 12), F32)
        gk.grouped(a, b, out=[wide[:, ::2], wide[:, 1::2]])
        assert np.array_equal(wide, np.full((4, 12), 3))
    assert is_poison(d)


# -- seeded faults ----------------------------------------------------------------------------------------------------

def test_tables_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = lists(np.random.default_rng(0), [(16, 16, 32), (16, 16, 32)], F16)
    with gk.emulate(), monkeypatch.context() as patched:
        patched.setattr(Member, "matrix", lambda self, data, batch: memory.member_of(data, self.sizes, self.places, 0, self.operand))
        with pytest.raises(errors.RaceError, match="out"):
            gk.grouped(a, b, conf=mapped(MMAOp()))
    with gk.emulate():
        run = gk.functions.plan_grouped(a, b, conf=mapped(MMAOp()))
        run._compiled.tables.sizes[1, memory.EXTENTS] = 15
        with pytest.raises(ValueError, match="the tables say that operand 0 of product 1"):
            run(a, b)
