"""Contractions whose tensors disagree about which index is the fastest: right, by both kernels; and moved in vectors by both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.experiments.contractions import Contraction, tccg
from bench.prepare import HostArrays, products, recorded
from gemmkit.emulator import current_mode
from gemmkit.epilogues import Scale
from gemmkit.functions import einsum
from gemmkit.kernels.spec import FAMILIES
from gemmkit.layouts import Matricised, Plain, RowMajor
from gemmkit.layouts.tensor import FEW
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.plans.adapters import TensorCopy
from gemmkit.plans.launch import bound, forget
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts, to_ptx
from gemmkit.runtime.device import H100, launch_stream
from gemmkit.transforms import Map
from tests.support.compiling import MachineCode
from tests.support.machines import BF16, on_machines, poison, turned, whole

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")

# Of each kind of dimension two indices, of which two tensors disagree: the arrays are in C order, so the last one is fastest.
SPECS = {"M": "kji,kl->lij", "N": "ki,klm->iml", "K": "ikm,lmk->il"}
SIZES = {                                               # D is the comb; of A and B the one that is not 4 times as large
    ("M", "D is smaller"): (dict(i=16, j=24, k=9, l=10), "d"),
    ("M", "D is larger"): (dict(i=24, j=16, k=4, l=18), "d"),
    ("N", "D is smaller"): (dict(i=10, l=24, m=16, k=9), "d"),
    ("N", "D is larger"): (dict(i=18, l=16, m=24, k=4), "d"),
    ("K", "A leads"): (dict(i=18, l=10, k=24, m=16), "b"),
    ("K", "B leads"): (dict(i=2, l=18, k=16, m=24), "a"),
}
UNEVEN = {                                              # shorter vectors, one that is none, and tiles that are not whole
    ("M", "D is as large"): (dict(i=12, j=10, k=9, l=10), "d"),
    ("N", "D is larger"): (dict(i=18, l=12, m=14, k=4), "d"),
    ("K", "A leads"): (dict(i=18, l=10, k=12, m=26), "b"),
    ("K", "no vectors"): (dict(i=5, l=6, k=7, m=9), ""),
}
KERNELS_OF = {"f16 on Hopper": (F16, WGMMAOp(32)), "f16": (F16, MMAOp()), "f32": (F32, FPUOp(16, 16)), "f64": (F64, FPUOp(16, 16, dtype=F64))}


def moved(conf: gk.Config, name: str) -> int:
    """Bytes of the neighbours in memory that a thread moves at once; 0: it moves elements."""
    layout: Any = getattr(conf, f"global_{name}_layout")
    thread = getattr(conf, f"mem_{'cd' if name in 'cd' else name}_thread")
    if layout.vector_axis is None or thread.extents[layout.vector_axis] != thread.count or thread.count % layout.comb:
        return 0
    count = thread.count // layout.comb
    return 0 if isinstance(layout, Matricised) and layout.vector % count else int(count * layout.dtype.itemsize)


def combs(conf: gk.Config) -> str:
    """Which of A, B and D are combs."""
    return "".join(name for name in "abd" if getattr(conf, f"global_{name}_layout").comb > 1)


def contraction(spec: str, sizes: dict[str, int], dtype: Any, rng: np.random.Generator) -> tuple[list[np.ndarray], tuple[int, ...]]:
    left, result = spec.split("->")
    arrays = [whole(rng, tuple(sizes[x] for x in term), dtype) for term in left.split(",")]
    return arrays, tuple(sizes[x] for x in result)


def check(machine: Any, spec: str, sizes: dict[str, int], dtype: Any, rng: np.random.Generator, wanted: str,
          **fields: Any) -> None:
    """einsum against NumPy, and that ``wanted`` operands are combs."""
    arrays, shape = contraction(spec, sizes, dtype, rng)
    (made,) = recorded(lambda: gk.einsum(spec, *arrays, out=np.empty(shape, dtype), **fields))
    assert combs(made.problem.config) == wanted
    out = machine.array(poison(shape, dtype))
    with machine.session():
        gk.einsum(spec, *(machine.array(x) for x in arrays), out=out, **fields)
    assert np.array_equal(machine.numpy(out), np.einsum(spec, *(x.astype(F64) for x in arrays)))


# -- right ------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(4)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("kernel", KERNELS_OF)
@pytest.mark.parametrize("kind, who", SIZES)
def test_multiples_of_vectors(machine: Any, kind: str, who: str, kernel: str, rng: np.random.Generator) -> None:
    (dtype, operator), (sizes, comb) = KERNELS_OF[kernel], SIZES[kind, who]
    check(machine, SPECS[kind], sizes, dtype, rng, comb, operator=operator)


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("kernel", ["f16 on Hopper", "f32"])
@pytest.mark.parametrize("kind, who", UNEVEN)
def test_other_extents(machine: Any, kind: str, who: str, kernel: str, rng: np.random.Generator) -> None:
    (dtype, operator), (sizes, comb) = KERNELS_OF[kernel], UNEVEN[kind, who]
    check(machine, SPECS[kind], sizes, dtype, rng, comb, operator=operator)


@pytest.mark.thorough
@on_machines
def test_all_kinds_at_once(machine: Any, rng: np.random.Generator) -> None:
    """A and D at odds along M, the rest in more dimensions, and several stages of Hopper's ring."""
    check(machine, "klcba,nlkm->mncab", dict(a=8, b=8, c=2, k=8, l=10, m=16, n=20), F16, rng, "d", operator=WGMMAOp(32))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("result", ["int32 out", "int8 out", "no out"])
def test_int8(machine: Any, result: str, rng: np.random.Generator) -> None:
    """Eight teeth, no more. An int32 result is exact; without ``out``, as into an int8 one, sums of bytes are bytes."""
    arrays, shape = contraction(SPECS["K"], dict(i=18, l=10, k=16, m=24), np.int8, rng)
    dtype = np.int32 if result == "int32 out" else np.int8
    out = None if result == "no out" else machine.array(poison(shape, dtype))
    with machine.session():
        found = machine.numpy(gk.einsum(SPECS["K"], *map(machine.array, arrays), out=out))
    exact = np.einsum(SPECS["K"], *(x.astype(np.int64) for x in arrays))
    assert found.dtype == dtype and abs(exact).max() > 127 and np.array_equal(found, exact.astype(dtype))


@pytest.mark.kin(4)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("kernel", ["f16 on Hopper", "f16", "f32"])
def test_a_comb_transformed(machine: Any, kernel: str, rng: np.random.Generator) -> None:
    """A function of an element, its row and its column: each is where the product has it."""
    dtype, operator = KERNELS_OF[kernel]
    teeth = 16 // dtype.itemsize
    x, b = whole(rng, (40, 3, teeth, 16), dtype), whole(rng, (40, 24), dtype)
    held = machine.array(x)
    view = held.transpose(2, 3, 1, 0)
    layout = Matricised.of(describe(view), 3)
    out = machine.array(poison((3 * 16 * teeth, 24), dtype))
    with machine.session():
        gk.matmul(view, machine.array(b), out=out, operator=operator, global_a_layout=layout,
                  transform_global_to_shared_a=Map(lambda x, i, k: x + i % 5 - k % 3))
    assert layout.comb == teeth
    rows = x.transpose(1, 3, 2, 0).reshape(-1, 40).astype(F64)             # the teeth are fastest
    i, k = np.indices(rows.shape)
    assert np.array_equal(machine.numpy(out), (rows + i % 5 - k % 3) @ b.astype(F64))


def test_combs_are_found() -> None:
    x = np.zeros((6, 16, 32), F16)
    view = x.reshape(6, 2, 8, 32).transpose(2, 3, 1, 0)            # 8 teeth of 32 neighbours
    layout = Matricised.of(describe(view), 3)
    assert (layout.axis, layout.comb, layout.vector, layout.run, layout.vector_axis) == (0, 8, 16, 64, 0)
    assert Matricised.of(describe(view), 1) == Matricised(F16, (8,), (32, 2, 6), 1, 16, near=True)        # its first column dimension
    assert Matricised.of(describe(np.zeros((5, 4, 3), F16).transpose(0, 2, 1)), 2).comb == 1         # 5 teeth are none
    columns = Matricised.of(describe(view.transpose(3, 0, 1, 2)), 1)
    assert (columns.axis, columns.comb, columns.run) == (1, 8, 64)
    assert RowMajor(F32).run == 4 and RowMajor(F64).run == 2 and RowMajor(F64).comb == 1


# -- in vectors -------------------------------------------------------------------------------------------------------

def operands(case: Contraction) -> str:
    """Those that this kernel moves by threads: D of Hopper's leaves as `gemmkit.kernels.sm90.store` has it."""
    return "ab" if case.kind == "f16" else "abd"


def is_across(conf: gk.Config, name: str) -> bool:
    """Whether the ordinary units of the multistage kernel read an operand across its lines."""
    return conf.kernel == "multistage" and getattr(conf, f"global_{name}_layout").contiguous_axis == {"a": 1, "b": 0}.get(name)


def lies_side_by_side(conf: gk.Config, name: str) -> int:
    """Bytes of memory that neighbouring lanes copy together, an element each."""
    layout = getattr(conf, f"global_{name}_layout")
    lanes = getattr(conf, f"mem_{name}_warp").extents[layout.axis]
    return int(layout.dtype.itemsize * min(lanes // layout.comb, layout.vector))


@pytest.mark.kin(4)
@pytest.mark.parametrize("case", list(tccg()), ids=lambda case: f"{case.kind}-{case.work}")
def test_all_of_the_benchmark_move_in_vectors(case: Contraction) -> None:
    """Less than 16 bytes where a tile has too few of them for all threads: `ij-kil-lkj` with its small D, and a short K; and
    where D, the larger, has few teeth. What lies across is copied by single elements, neighbours by neighbouring lanes."""
    (made,) = products(case)
    conf = made.problem.config
    has_few = case.kind == "f16" and conf.global_d_layout.comb == FEW
    least = 8 if case.work == "ij-kil-lkj" or has_few else 4 if case.kind == "f32" and case.k < 32 else 16
    for name in operands(case):
        layout = getattr(conf, f"global_{name}_layout")
        assert isinstance(layout, Plain) or (lies_side_by_side if is_across(conf, name) else moved)(conf, name) >= least, name
    layout = conf.global_d_layout
    assert isinstance(layout, Plain) or (layout.vector_axis is not None and layout.run * layout.dtype.itemsize == 16 * layout.comb)


@pytest.mark.kin(4)
def test_the_benchmark_has_combs() -> None:
    found = {(case.kind, case.work): combs(made.problem.config) for case in tccg() for made in products(case)}
    assert {name for (kind, _), name in found.items()} == {"", "b", "d"}
    assert all(found["f16", work] == found["f32", work] for _, work in found)
    assert sum(bool(name) for name in found.values()) == 2 * 15


def machine_code(made: Any) -> MachineCode:
    conf = made.problem.config
    ptx = to_ptx(FAMILIES[conf.kernel].kernel, tuple(argument.type for argument in made.arguments), conf.threads, H100, conf.blocks_per_sm)
    assembled = assemble(ptx)
    return MachineCode(ptx, assembled.usage, instruction_counts(disassemble(assembled.cubin), full=True))


def check_code(made: Any) -> None:
    """Registers alone, and no access narrower than 16 bytes, but of what the ordinary units read across: copies of an element
    past the registers. On Hopper operands without a comb may be copied past them, too."""
    conf, code = made.problem.config, machine_code(made)
    assert (code.usage.spill_stores, code.usage.spill_loads, code.usage.stack_bytes) == (0, 0, 0)
    assert [code.count(opcode) for opcode in ("LDL", "STL", "CALL")] == [0, 0, 0]
    loads = [name for name in ("LDG", "LDGSTS") if code.count(name)]
    has_few = conf.global_d_layout.comb == FEW and conf.global_d_layout.dtype == F16         # four teeth are 8 bytes
    widths = ("128", "64") if has_few else ("128",)
    if any(is_across(conf, name) for name in "ab"):
        assert loads == ["LDGSTS"] and code.count("LDGSTS") > 0
    else:
        assert loads and all(code.count(name) == sum(code.count(name, width) for width in widths) for name in loads)
    assert code.count("STG") == code.count("STG", "128") and code.count("STG") + code.count("UTMASTG") > 0
    if conf.global_a_layout.dtype == F16 and combs(conf) in "ab":
        assert code.count("PRMT") >= 32                          # the comb is put in order two elements at a time


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.parametrize("work", ["f16-ijkl-minj-nlmk", "f16-abcijk-ijma-mkbc", "f32-ijkl-minj-nlmk", "f32-abj-bka-kj"])
def test_the_machine_code_of_the_benchmark(work: str) -> None:
    (case,) = [case for case in tccg() if f"{case.kind}-{case.work}" == work]
    check_code(*products(case))


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.parametrize("kind, who", SIZES)
def test_the_machine_code_of_each_kind(kind: str, who: str) -> None:
    """On tensor cores, by both kernels; large, so that tiles are."""
    sizes = {x: (128 if kind == "K" and x in "il" else 32) * n for x, n in SIZES[kind, who][0].items()}
    left, result = SPECS[kind].split("->")
    host = HostArrays()
    a, b, d = (host.empty(1, math.prod(sizes[x] for x in term), "f16").reshape([sizes[x] for x in term])
               for term in (*left.split(","), result))
    for operator in (WGMMAOp(256), MMAOp()):
        (made,) = recorded(lambda: gk.einsum(SPECS[kind], a, b, out=d, operator=operator))
        assert combs(made.problem.config) == SIZES[kind, who][1]
        check_code(made)


# -- operands that are copied into another order first ------------------------------------------------------------------

@pytest.fixture()
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Copies cost nothing, and threads gather next to nothing in a microsecond; the list has what is copied."""
    seen: list[list[bool]] = []

    class Seen(einsum.ReorderedProduct):
        def __call__(self, *arrays: Any, **keywords: Any) -> Any:
            seen.append([n in self.copies for n in (0, 1)])
            return super().__call__(*arrays, **keywords)

    monkeypatch.setattr(einsum, "RATES", dict.fromkeys(einsum.RATES, (1e9, 1e-9, 1e-9)))
    monkeypatch.setattr(einsum, "BEGUN", 0.0)
    monkeypatch.setattr(einsum, "ReorderedProduct", Seen)
    einsum._reordering.cache_clear()
    forget()
    yield seen
    einsum._reordering.cache_clear()
    forget()


@on_machines
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "c8"])
@pytest.mark.parametrize(("shape", "order"), [((24, 5, 40), (0, 2, 1)), ((24, 5, 40), (1, 0, 2)), ((33, 17, 3), (2, 1, 0)),
                                              ((16, 8, 2, 8), (3, 0, 2, 1)), ((1, 100, 16), (2, 0, 1))])
def test_a_tensor_is_copied_into_another_order(machine: Any, shape: tuple, order: tuple, dtype: str) -> None:
    """All bits of all elements, from a base that is aligned to an element alone, and backwards."""
    count = math.prod(shape)
    base = (np.arange(count * np.dtype(dtype).itemsize + 8) * 7 % 251).astype(np.uint8)[8:].view(dtype)
    for first in (0, 1):
        x = machine.array(np.concatenate([base[:first], base]))[first:].reshape(shape)
        for given in (x, x[::-1]):
            turned_x = turned(given, *order)
            y = machine.array(np.zeros(tuple(turned_x.shape), dtype))
            copy = TensorCopy(describe(turned_x), describe(y))
            if machine.emulated:
                with machine.session():
                    current_mode().run(copy, (turned_x, y))                                     # type: ignore[union-attr]
            else:
                start = bound(lambda _, of=copy: of.launch(), "a copy").start                   # type: ignore[misc]
                start(launch_stream(describe(y), None), (describe(y).pointer, describe(turned_x).pointer))
            assert machine.numpy(y).tobytes() == np.ascontiguousarray(machine.numpy(turned_x)).tobytes()


REORDERED = {"both": ("kmln,njmi->lkji", dict(k=3, m=4, l=5, n=8, j=3, i=16)),
             "one": ("jkl,lik->ji", dict(j=17, k=9, l=16, i=10)),
             "through tiles": ("kmjn,lnim->lkji", dict(k=3, m=8, l=2, n=8, j=5, i=16)),
             "a stack, of rows that are padded": ("zkmjn,lznim->zlkji", dict(z=2, k=3, m=5, l=2, n=7, j=5, i=6))}


@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("case", REORDERED)
def test_operands_in_another_order(machine: Any, case: str, dtype: Any, rng: np.random.Generator, cheap_copies: Any) -> None:
    """Twice, and of views: the result is the same as if nothing were copied."""
    spec, sizes = REORDERED[case]
    (a, b), shape = contraction(spec, sizes, dtype, rng)
    wanted = np.einsum(spec, a.astype(F64), b.astype(F64))
    x, y, out = machine.array(a), machine.array(b), machine.array(poison(shape, dtype))
    with machine.session():
        for _ in range(2):
            gk.einsum(spec, x, y, out=out)
            assert np.array_equal(machine.numpy(out).astype(F64), wanted)
        assert np.array_equal(machine.numpy(gk.einsum(spec, x, y)).astype(F64), wanted)
        count = len(cheap_copies)
        assert count >= 2 and any(cheap_copies[0])
        assert cheap_copies[0] == [True, True] or case == "one"
        if dtype != BF16:                              # PyTorch has no views that run backwards
            got = machine.numpy(gk.einsum(spec, x[::-1], y[:, ::-1]))
            assert np.array_equal(got, np.einsum(spec, a[::-1].astype(F64), b[:, ::-1].astype(F64)))
            wide = machine.array(np.concatenate([a.ravel()[:1], a.ravel()]))
            moved = wide[1:].reshape(a.shape)          # an element behind an aligned address
            assert np.array_equal(machine.numpy(gk.einsum(spec, moved, y)), wanted)


def test_a_result_in_an_operand_that_is_copied_is_refused(rng: np.random.Generator, cheap_copies: Any) -> None:
    x, y = whole(rng, (8, 8, 8), F16), whole(rng, (8, 8, 8), F16)
    with gk.emulate(), pytest.raises(ValueError, match="out overlaps a in memory"):
        gk.einsum("aib,cbi->ac", x, y, out=x[:, 0, :])


def copied(spec: str, sizes: dict[str, int], dtype: Any = F16, **fields: Any) -> list[str]:
    """What a contraction launches."""
    left, _ = spec.split("->")
    arrays = [np.empty(tuple(sizes[x] for x in term), dtype) for term in left.split(",")]
    made = recorded(lambda: gk.einsum(spec, *arrays, **fields))
    return [type(one).__name__ for one in made]


def test_copies_pay_where_the_product_is_long() -> None:
    """At TCCG's sizes two copies cost a tenth of the product; with a third of the rows and columns they cost more than
    they save, and so do they with an epilogue, whose rows and columns would be others, or of dtypes without rates."""
    large = dict(i=72, j=84, k=84, l=84, m=72, n=72)
    small = dict(large, i=24, j=12, k=12, l=12)
    spec = "kmln,jnim->lkji"
    assert copied(spec, large) == copied(spec, large, F32) == ["TensorCopy", "TensorCopy", "Compiled"]
    assert copied("jkl,lik->ji", dict(j=372, k=360, l=360, i=360)) == ["TensorCopy", "Compiled"]
    for others in ((spec, small), (spec, dict(large, m=0)), (spec, dict(large, i=1, j=1))):
        assert "TensorCopy" not in copied(*others)
    assert "TensorCopy" not in copied(spec, large, F16, epilogue=Scale(2.0)) + copied(spec, large, F64)
    assert "TensorCopy" not in copied("lkmn,jimn->lkji", large)
