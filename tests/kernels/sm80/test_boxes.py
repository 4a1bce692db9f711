"""Operands that are contiguous along different indices of K, multiplied in boxes: values and machine code."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions import einsum
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.sm80 import kernel as mainloop
from gemmkit.kernels.sm80.routes import CpAsyncBoxes, CpAsyncSeparable
from gemmkit.layouts import Boxed, ColMajor, Matricised, Padded, RowMajor
from gemmkit.operators import COMPLEX, BoxMMAOp, MMAOp
from gemmkit.plans.ahead import CompiledKernel, compile_config, recorded
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import A100, H100, T4, assumed
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning import sm80
from gemmkit.tuning.sm80 import BOXES
from tests.kernels.sm80.test_code import count
from tests.ptx_machine.compare import PTX
from tests.support.banks import conflicts, within
from tests.support.banks import recorded as recorded_of_boxes_code
from tests.support.boxes import F16, F32, as_matrices, expected, mapping, operands, product, views
from tests.support.machines import BF16, MACHINES, on_machines, poison, whole

# ==========================================================================================================================
# Operands that are contiguous along different indices of K: both copied as they lie, and multiplied in boxes. Values are small
# whole numbers, so that every result is exactly right or wrong; D is poisoned before.


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One mapping, of 32 x 32, for products of any size."""
    small = replace(sm80.BOXES[-1], block=(32, 32, 64), warp=(16, 16))
    for name, value in {"SHORTEST": 1, "NARROWEST": 1, "BOXES": (small,)}.items():
        monkeypatch.setattr(sm80, name, value)
    einsum._plans.clear()
    yield
    einsum._plans.clear()


# -- by a mapping of small tiles ------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [8, 16])
@pytest.mark.parametrize("combed", "ab")
@pytest.mark.parametrize("sizes", [(37, 21, 2, 24), (16, 8, 1, 8), (5, 1, 3, 16)], ids=str)
def test_products(machine: Any, sizes: tuple[int, int, int, int], combed: str, n: int, dtype: Any, rng: np.random.Generator) -> None:
    """Several tiles and rounds, none whole; one whole; and one with fewer rows and columns than an operation."""
    x, y = operands(rng, *sizes, dtype)
    assert np.array_equal(product(machine, x, y, BoxMMAOp(N=n, combed=combed, dtype=dtype)), expected(x, y))


@pytest.mark.compile
@pytest.mark.thorough
@pytest.mark.parametrize(("combed", "dtype"), [("b", F16), ("a", BF16)], ids=str)
def test_products_as_compiled(combed: str, dtype: Any, rng: np.random.Generator) -> None:
    """By the PTX of the kernel."""
    x, y = operands(rng, 19, 11, 1, 16, dtype)
    assert np.array_equal(product(PTX, x, y, BoxMMAOp(combed=combed, dtype=dtype), warps=(1, 1), stages=2), expected(x, y))


@pytest.mark.kin(1)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("combed", "ab")
@pytest.mark.parametrize("fields", [dict(stages=2), dict(stages=5), dict(k=128), dict(k=192, stages=2, warps=(1, 1)), dict(warps=(2, 2)), dict(splits=3),
                                    dict(splits=StreamK(blocks=3)), dict(d=ColMajor(F32)), dict(d=RowMajor(F16))], ids=str)
def test_mappings(machine: Any, fields: dict[str, Any], combed: str, rng: np.random.Generator) -> None:
    """Rings of any length, k-tiles of several boxes that K ends within, blocks that share K."""
    x, y = operands(rng, 37, 21, 3, 24, F16)
    assert np.array_equal(product(machine, x, y, BoxMMAOp(N=16, combed=combed), **fields), expected(x, y))


def test_a_transform_of_the_other_operand(rng: np.random.Generator) -> None:
    """Its positions in shared memory are K's own, so that a function of it may see its coordinates."""
    x, y = operands(rng, 21, 9, 1, 16, F16)
    change = Map(lambda v, i, k: v * (k % 3 - 1) + i % 2)
    k = np.arange(128)
    changed = x.transpose(0, 2, 1).astype("f8") * (k.reshape(16, 8).T % 3 - 1) + np.arange(21)[:, None, None] % 2
    found = product(MACHINES["emulator"], x, y, BoxMMAOp(N=8), transform_global_to_shared_a=change)
    assert np.array_equal(found, np.einsum("mpq,npq->mn", changed, y.astype("f8")))


# -- by `einsum` ----------------------------------------------------------------------------------------------------------

SPECS = ("iqp,jpq->ij", "iqp,jpq->ji", "irqsp,jprq->isj", "iqp,srtpq->istr", "riqp,rjpq->rij", "qip,jspq->isj")


@pytest.mark.kin(1)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_contractions(machine: Any, small: None, spec: str, dtype: Any, rng: np.random.Generator) -> None:
    """Of stacks, several indices of each kind, any order of the result."""
    extents = dict(p=16, q=24, i=7, j=5, r=3, s=11, t=2)
    terms, result = spec.split("->")
    a, b = (whole(rng, tuple(extents[x] for x in term), dtype, 1) for term in terms.split(","))
    wanted = np.asarray(np.einsum(spec, a.astype("f8"), b.astype("f8")))
    out = machine.array(poison(wanted.shape, dtype))
    with machine.session():
        gk.einsum(spec, machine.array(a), machine.array(b), out=out)
    assert np.array_equal(machine.numpy(out).astype("f8"), wanted.astype(dtype).astype("f8"))


def chosen(spec: str, a: Any, b: Any, device: Any = None) -> Any:
    """What a contraction is computed by."""
    with assumed(device) if device else MACHINES["gpu"].session():
        (found,) = recorded(lambda: gk.einsum(spec, a, b), zeros=False)
    return found


def test_what_is_chosen() -> None:
    """Boxes where unit-stride indices of K conflict, on GPUs that have cp.async, and where pieces of 16 bytes are aligned."""
    a, b = np.empty((80, 40, 32), F16), np.empty((96, 32, 40), F16)
    found = chosen("iqp,jpq->ij", a, b)
    assert found.problem.config.operator == BoxMMAOp(N=16) and isinstance(found.spec.b.route, CpAsyncBoxes)
    assert type(found.spec.a.route) is CpAsyncSeparable and found.spec.a.route.width == found.spec.b.route.width == 8
    assert isinstance(chosen("iqp,jpq->ij", a, b, A100).problem.config.operator, BoxMMAOp)
    assert chosen("iqp,jpq->ij", a, np.empty((400, 32, 40), F16)).problem.config.operator == BoxMMAOp(N=16, combed="a")     # B leads
    assert chosen("riqp,jpq->rij", np.empty((3, 80, 40, 32), F16), b).problem.products == 1
    none = [
        chosen("iqp,jqp->ij", a, np.empty((96, 40, 32), F16)),                              # no conflict
        chosen("iqp,jpq->ij", a, b, T4),
        chosen("iqp,jpq->ij", np.empty((80, 100, 12), F16), np.empty((96, 12, 100), F16)),  # four neighbours
        chosen("iqp,jpq->ij", a, np.empty(96 * 32 * 40 + 1, F16)[1:].reshape(96, 32, 40)),  # off by two bytes
        chosen("iqp,jpq->ij", a, np.empty((96, 32, 41), F16)[..., :40]),                    # lines at any two bytes
        chosen("iqp,jpq->ij", a.astype(F32), b.astype(F32)),
        chosen("iqp,jpq->ij", a[:63], b), chosen("iqp,jpq->ij", a[:, :24].copy(), b[..., :24].copy()),   # few rows, a short K
    ]
    assert not any(isinstance(one.problem.config.operator, BoxMMAOp) for one in none)


def test_what_is_given_stays(rng: np.random.Generator) -> None:
    """An operator of the caller's is taken."""
    a, b = np.empty((40, 24, 16), F16), np.empty((48, 16, 24), F16)
    (found,) = recorded(lambda: gk.einsum("iqp,jpq->ij", a, b, operator=MMAOp()), zeros=False)
    assert found.problem.config.operator == MMAOp()


# -- what is refused ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("fields", "message"), [
    (dict(K=8), "float16 or bfloat16 and K=16"), (dict(dtype="i1"), "float16 or bfloat16 and K=16"), (dict(combed="c"), "'a' or 'b'"),
], ids=str)
def test_operators_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoxMMAOp(**fields)


@pytest.mark.parametrize(("fields", "message"), [
    (dict(k=32), "block_shape=.*: K must be a multiple of 64"),
    (dict(shared_b_layout=Padded(ColMajor(F16), 8)), "shared_b_layout=.*reads boxes of 'b' alone"),
    (dict(shared_a_layout=Boxed(RowMajor(F16), 8)), "shared_a_layout=.*reads boxes of 'b' alone"),
    (dict(shared_a_layout=Padded(ColMajor(F16), 8)), r"shared_a_layout=.*loads lines along K; use Padded\(RowMajor"),
    (dict(transform_shared_to_regs_a=Map(lambda v: v + v)), "transform_shared_to_regs_a=.*several places of K"),
    (dict(transform_global_to_shared_b=Map(lambda v: v + v)), "shared_b_layout=.*cannot fill it: its elements are transformed"),
    (dict(global_b_layout=ColMajor(F16)), "shared_b_layout=.*cannot fill it: .*is not a Tensor whose neighbours in memory are 8 apart"),
    (dict(mem_b_thread=Tile(K=64, N=1), mem_b_warp=Tile(K=64, N=8)), "cannot fill it: k-tiles of multiples of 64, moved 8 elements a thread"),
    (dict(kernel="singlestage", stages=1), "operator=.*its boxes of K are filled by cp.async; use kernel='multistage'"),
    (dict(operator=MMAOp(N=16, K=16), shared_b_layout=Boxed(ColMajor(F16), 8)), "shared_b_layout=.*operators.BoxMMAOp alone reads boxes"),
], ids=lambda given: " ".join(given) if isinstance(given, dict) else "")
def test_configurations_that_are_none(fields: dict[str, Any], message: str, rng: np.random.Generator) -> None:
    a, b = as_matrices(*operands(rng, 32, 32, 1, 8, F16))
    with pytest.raises(gk.ConfigError, match=message):
        mapping(a, b, BoxMMAOp(N=16), **fields)


def test_an_algebra_of_it_is_none() -> None:
    with pytest.raises(gk.ConfigError):
        gk.get_config(operator=COMPLEX.with_base(BoxMMAOp()), kernel="multistage", global_a_layout=gk.layouts.Interleaved("c8"),
                      global_b_layout=gk.layouts.Interleaved("c8"))


def test_an_array_that_is_not_aligned(rng: np.random.Generator) -> None:
    """A mapping that is asked for is refused before anything is written."""
    x, y = operands(rng, 16, 16, 1, 8, F16)
    flat = np.zeros(y.size + 1, F16)[1:].reshape(y.shape)
    a, b = views(x, flat, "b")
    out = poison((16, 16), F32)
    with gk.emulate(), pytest.raises(gk.ConfigError, match="cannot fill it: its elements of 2 bytes are not aligned"):
        gk.matmul(a, b, out=out, conf=mapping(a, b, BoxMMAOp(N=16)), gemm_shape=dict(M=16, N=16, K=64))
    assert np.isnan(out).all()


# ==========================================================================================================================
# The code of products in boxes of K, without a GPU: no two accesses of a warp meet in a bank, and the shipped mappings spill nothing.

DEVICES = {"sm_90a": H100, "sm_80": A100}
TILES = {"x".join(map(str, one.block)): one for one in BOXES}


def passes(where: str, combed: str, rng: np.random.Generator, k: int, **fields: Any) -> int:
    """Passes too many of the accesses to shared memory of a function of the main loop."""
    units = BoxMMAOp(N=16, combed=combed)
    a, b = views(*operands(rng, 32, 32, 2, 8, F16), combed)
    conf = mapping(a, b, units, k, stages=2, **fields)
    with within(mainloop, where) as inside, gk.emulate(), recorded_of_boxes_code(inside) as seen:
        gk.matmul(a, b, None, conf, gemm_shape=dict(M=32, N=32, K=128))
    accesses = seen.loads if where == "fetch" else seen.stores
    assert accesses
    return conflicts(accesses)


@pytest.mark.sample(2)
@pytest.mark.parametrize("k", [64, 128])
@pytest.mark.parametrize("combed", "ab")
@pytest.mark.parametrize("where", ["fetch", "copy_all"])
def test_accesses_meet_in_no_bank(where: str, combed: str, k: int, rng: np.random.Generator) -> None:
    assert passes(where, combed, rng, k) == 0


def test_the_count_of_banks_counts(rng: np.random.Generator) -> None:
    """Without padding lines begin in one bank."""
    assert passes("fetch", "b", rng, 64, shared_a_layout=Padded(RowMajor(F16), 0)) > 0


@functools.cache
def compiled(name: str, combed: str, arch: str) -> CompiledKernel:
    """Of a contraction with two indices in M, in N and in K."""
    one, device = TILES[name], DEVICES[arch]
    x, y = np.zeros((64, 24, 64), F16), np.zeros((48, 64, 24), F16)
    a, b = as_matrices(x, y)
    a = a.reshape(8, 8, *a.shape[1:]).swapaxes(0, 1)
    b = b.reshape(*b.shape[:-1], 6, 8).swapaxes(-1, -2)
    if combed == "a":
        a, b = b.transpose(3, 4, 0, 1, 2), a.transpose(2, 3, 4, 0, 1)
    M, N, K = np.prod(a.shape[:2]), np.prod(b.shape[3:]), 24 * 64
    out = np.zeros((M, N), F16)
    conf = gk.get_config(operator=BoxMMAOp(N=16, combed=combed), global_a_layout=Matricised.of(describe(a), 2),
                         global_b_layout=Matricised.of(describe(b), 3), global_d_layout=RowMajor(F16), device=device, **one.fields)
    return compile_config(conf, device=device, operands=dict(a=a, b=b, out=out), gemm_shape=dict(M=int(M), N=int(N), K=K))


@pytest.mark.compile
@pytest.mark.sample(12)
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("combed", "ab")
@pytest.mark.parametrize("name", TILES)
@pytest.mark.kin(1)
def test_the_shipped_mappings(name: str, combed: str, arch: str) -> None:
    """No spill; both operands by cp.async of 16 bytes, fragments by words and two permutations a pair, nothing by ldmatrix."""
    if TILES[name].nbytes > DEVICES[arch].shared_memory_per_block:
        return
    kernel, one = compiled(name, combed, arch), TILES[name]
    assert (kernel.usage.spill_stores, kernel.usage.spill_loads, kernel.usage.stack_bytes) == (0, 0, 0)
    found = kernel.instructions
    assert found["LDL"] == found["STL"] == found["LDSM"] == found["LDG"] == 0
    assert found["SHFL"] <= 1                                     # a warp's number
    assert count(kernel, "LDGSTS") == count(kernel, "LDGSTS", "128") > 0
    rounds = 2                                                    # loops: rounds inside, and at edges
    m, n = one.warp[0] // 16, one.warp[1] // 8
    assert found["HMMA"] == rounds * 4 * m * n
    pairs = 2 * m if combed == "b" else n                         # of words, of the operand that is not combed
    assert rounds * 4 * 2 * pairs <= found["PRMT"] <= (rounds * 4 + 1) * 2 * pairs + 16
