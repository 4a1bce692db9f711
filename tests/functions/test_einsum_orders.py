"""Contractions whose tensors disagree about which index is the fastest: right, by both kernels; and moved in vectors by both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.experiments.contractions import Contraction, tccg
from bench.prepare import HostArrays, products, recorded
from gemmkit.functions.einsum import FEW
from gemmkit.kernels.spec import FAMILIES
from gemmkit.layouts import Matricised, Plain, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WGMMAOp
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts, to_ptx
from gemmkit.runtime.device import H100
from gemmkit.transforms import Map
from tests.support.compiling import MachineCode
from tests.support.machines import on_machines, poison, whole

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
