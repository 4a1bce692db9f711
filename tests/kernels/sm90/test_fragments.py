"""A that is transformed on its way into registers (`gemmkit.kernels.sm90.mainloop`): exact products, at edges, in any order of the
threads; and faults put into it are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.collectives import pipeline
from gemmkit.kernels.sm90 import mainloop
from gemmkit.kernels.sm90.family import Sm90Spec
from gemmkit.kernels.sm90.mainloop import RegisterMainloop, Transformed
from gemmkit.kernels.sm90.rewrite import Rewrite
from gemmkit.kernels.sm90.tma import Tma
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, RowMajor, Triangular
from gemmkit.operators import WGMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from tests.kernels.sm90.test_algebras_from_registers import by_one_thread, by_registers, nothing
from tests.kernels.sm90.test_rewrite import spec_of
from tests.support.machines import BF16, E4M3, E5M2, MACHINES, on_machines, poison
from tests.support.sm90 import F16, F32, mapping, ordered, product

EMULATOR = MACHINES["emulator"]
KINDS = {"R": RowMajor, "C": ColMajor}


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks: each has several tiles, one after the other."""
    monkeypatch.setattr(Sm90Spec, "blocks", lambda spec, M, N, sm_count: 2 * spec.cluster.size)


def plus_one(x: Any) -> Any:
    return max(x + 1, 0)


def by_place(x: Any, i: int, j: int) -> Any:
    return x + i % 3 - j % 2


def apply64(function: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    """A transform of every element, in float64, one by one."""
    x64, out = x.astype(np.float64), np.empty(x.shape)
    for i, j in np.ndindex(x.shape):
        out[i, j] = function(x64[i, j], i, j) if function is by_place else function(x64[i, j])
    return out


def few(rng: np.random.Generator, shape: tuple[int, int], dtype: Any, low: int = -2) -> np.ndarray:
    return rng.integers(low, 3, shape).astype(dtype)


def check(machine: Any, conf: gk.Config, size: tuple[int, int, int], rng: np.random.Generator, function: Any = plus_one,
          seed: int | None = None) -> None:
    """D exactly; A and B have rows (columns) that are longer than what is multiplied, so that they may end anywhere."""
    M, N, K = size
    a_type, b_type = conf.global_a_layout.dtype, conf.global_b_layout.dtype
    line = 16 // a_type.itemsize
    a = few(rng, (-(-M // line) * line, -(-K // line) * line), a_type, 0 if a_type.kind == "u" else -2)
    b = few(rng, (-(-K // line) * line, -(-N // line) * line), b_type)
    assert by_registers(spec_of(conf, a, b))
    a, b = ordered(a, conf.global_a_layout), ordered(b, conf.global_b_layout)
    out = machine.array(poison((M, N), conf.global_d_layout.dtype))
    with gk.emulate(seed) if machine.emulated else machine.session():
        gk.matmul(machine.array(a)[:M, :K], machine.array(b)[:K, :N], None, conf, out=out)
    b64 = b[:K, :N].astype(np.float64)
    changed = conf.transform_global_to_shared_b
    want = apply64(function, a[:M, :K]) @ (b64 if changed.is_identity else apply64(changed.f, b64))
    assert np.array_equal(machine.numpy(out), want.astype(conf.global_d_layout.dtype))


# -- products ---------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(3)
@pytest.mark.sample(48)
@on_machines
@pytest.mark.parametrize("function", [plus_one, by_place], ids=["in pairs", "by place"])
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong"])
@pytest.mark.parametrize("orders", ["RR", "RC", "CR", "CC"])
def test_orders(machine: Any, orders: str, schedule: str, function: Any, rng: np.random.Generator) -> None:
    conf = mapping(schedule, a=KINDS[orders[0]], b=KINDS[orders[1]], transform_global_to_shared_a=Elementwise(function))
    check(machine, conf, (139, 37, 149), rng, function)


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("dtype", [BF16, F32, E4M3, E5M2, np.dtype("i1"), np.dtype("u1")], ids=lambda d: d.name)
def test_dtypes(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """tf32, 8-bit floats and integers, which tensor cores take along K alone: a register holds one element, or four."""
    for function in (plus_one, by_place):
        conf = mapping("two", WGMMAOp(32, dtype), b=ColMajor, stages=3,
                       transform_global_to_shared_a=Elementwise((lambda x: x + 1) if dtype.kind == "u" else function))
        check(machine, conf, (139, 37, 149), rng, (lambda x: x + 1) if dtype.kind == "u" else function)


def reciprocals(machine: Any, K: int, kind: Any, rng: np.random.Generator) -> bool:
    """Whether D of 2 / A is right, where rows of A go on beyond K; the zeros there have no reciprocal."""
    conf = mapping("one", a=kind, transform_global_to_shared_a=Elementwise(lambda x: 2 / x))
    M, N = 67, 24
    a = ordered(rng.choice([-2.0, -1.0, 1.0, 2.0], (72, -(-K // 8) * 8)).astype(F16), kind(F16))
    b = few(rng, (K, N), F16)
    out = machine.array(poison((M, N), F32))
    with machine.session():
        gk.matmul(machine.array(a)[:M, :K], machine.array(b), None, conf, out=out)
    return np.array_equal(machine.numpy(out), 2 / a[:M, :K].astype(np.float64) @ b.astype(np.float64))


@pytest.mark.kin(3)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("K", [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130])
def test_ends_along_k(machine: Any, K: int, rng: np.random.Generator) -> None:
    """Nothing is made of the zeros beyond K: infinity times B's zero is no number."""
    assert all(reciprocals(machine, K, kind, rng) for kind in (RowMajor, ColMajor))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("rows, warps, depth, stages, schedule", [
    (64, 4, 16, 2, "cooperative"), (64, 4, 16, 5, "cooperative"), (64, 4, 32, 3, "cooperative"), (64, 4, 48, 3, "cooperative"),
    (128, 4, 64, 2, "cooperative"), (256, 8, 64, 3, "cooperative"), (128, 8, 128, 2, "cooperative"), (64, 8, 16, 4, "pingpong"),
    (128, 8, 48, 3, "pingpong")], ids=str)
def test_mappings(machine: Any, rows: int, warps: int, depth: int, stages: int, schedule: str,
                  rng: np.random.Generator) -> None:
    """One step in a stage, two, three, four and eight; one fragment of 64 rows and two; alone, and B is changed in place."""
    size = (rows + 37, 37, 139) if machine.emulated else (1021, 165, 331)
    for fields in ({}, {"transform_global_to_shared_b": Elementwise(lambda x: x - 1)}):
        conf = gk.get_config(operator=WGMMAOp(32), block_shape=Tile(M=rows, N=32, K=depth), warps_per_block=warps,
                             schedule=schedule, stages=stages, global_a_layout=RowMajor(F16), global_b_layout=ColMajor(F16),
                             global_d_layout=RowMajor(F32), transform_global_to_shared_a=Elementwise(plus_one), **fields)
        check(machine, conf, size, rng)


@pytest.mark.kin(3)
@on_machines
def test_captured_arrays_are_read_in_range(machine: Any, rng: np.random.Generator) -> None:
    """Factors of rows and of columns of A: out of range there are none, and none are asked for."""
    M, N, K = 75, 24, 104
    a, b = few(rng, (M, K), F16), few(rng, (K, N), F16)
    rows, columns = rng.integers(1, 4, M).astype("f4"), rng.integers(1, 4, K).astype("f4")
    r, c = machine.array(rows), machine.array(columns)
    conf = mapping("two", transform_global_to_shared_a=Elementwise(lambda x, i, j: x * r[i] * c[j]))
    assert by_registers(spec_of(conf, a, b))
    want = (a.astype(np.float64) * rows[:, None] * columns) @ b.astype(np.float64)
    assert np.array_equal(product(machine, conf, a, b), want)


@pytest.mark.thorough
@on_machines
def test_all_slots_at_once(machine: Any, rng: np.random.Generator) -> None:
    """The last row of the paper's Table 2."""
    M, N, K = 200, 72, 136
    a, b, c = few(rng, (M, K), F16), few(rng, (K, N), F16), few(rng, (M, N), F16)
    bias = few(rng, (1, N), F16)[0]
    conf = mapping("two", d=RowMajor(F16), global_c_layout=RowMajor(F16), epilogue=Bias(machine.array(bias)) | ReLU(),
                   transform_global_to_shared_a=Elementwise(plus_one), transform_global_to_shared_b=Elementwise(lambda x: x + 1),
                   transform_global_to_shared_c=Elementwise(lambda x: max(x, 0)))
    spec = spec_of(conf, a, b)
    assert spec.mainloop == RegisterMainloop(Transformed(2), spec.mainloop.steps)
    assert (type(spec.a.route), type(spec.b.route), spec.pipeline.has_raw) == (Tma, Rewrite, True)
    want = apply64(plus_one, a) @ (b.astype(np.float64) + 1) + bias.astype(np.float64) + np.maximum(c, 0).astype(np.float64)
    assert np.array_equal(product(machine, conf, a, b, c), np.maximum(want, 0).astype(F16))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_threads_is_right(seed: int, rng: np.random.Generator) -> None:
    conf = mapping("two", stages=3, depth=32, transform_global_to_shared_a=Elementwise(plus_one),
                   transform_global_to_shared_b=Elementwise(lambda x: x - 1))
    check(EMULATOR, conf, (264, 40, 104), rng, seed=seed)


# -- where it is not done ---------------------------------------------------------------------------------------------------

class Halves(Condition):
    def __call__(self, m: int, n: int, k: int) -> bool:
        return k < 64


def test_who_goes_by_registers() -> None:
    change = dict(transform_global_to_shared_a=Elementwise(plus_one))
    array, bytes_ = np.zeros((128, 128), F16), np.zeros((128, 128), "i1")
    assert by_registers(spec_of(mapping("two", **change), array, array))
    others = {
        "nothing to do": (mapping("two"), array), "a cluster": (mapping("one-1x2", **change), array),
        "three consumers": (mapping("three", **change), array), "a condition": (mapping("two", condition=Halves(), **change), array),
        "A is turned": (mapping("two", WGMMAOp(64, np.dtype("i1")), a=ColMajor, b=ColMajor, **change), bytes_),
        "a half of A": (mapping("two", global_a_layout=Triangular(RowMajor(F16), "lower"), **change), array),
        "promoted sums": (mapping("two", WGMMAOp(32, E4M3, promote=128), b=ColMajor, **change), np.zeros((128, 128), E4M3)),
        "more sums than registers": (mapping("two", WGMMAOp(192), block_shape=Tile(M=256, N=192, K=16), stages=2, **change), array),
    }
    found = {name: by_registers(spec_of(conf, x, x)) for name, (conf, x) in others.items()}
    assert found == dict.fromkeys(others, False)


# -- faults -------------------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Any, str, Any, type[BaseException]]] = {
    "nobody waits for A": (mainloop, "wait_for_a", nothing, errors.EmulatorError),
    "the lanes of a warp do not meet": (pipeline, "warp_barrier", nothing, errors.RaceError),
    "one thread speaks for all": (pipeline.Pipeline, "release", by_one_thread, errors.RaceError),
    "stages are given back while they are read": (mainloop, "wgmma_wait", lambda pending, sums: sums, errors.ProtocolError),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    module, function, instead, error = FAULTS[name]
    conf = mapping("two", stages=3, transform_global_to_shared_a=Elementwise(plus_one),
                   transform_global_to_shared_b=Elementwise(lambda x: x - 1))
    check(EMULATOR, conf, (136, 16, 205), rng)
    monkeypatch.setattr(module, function, instead)
    with pytest.raises(error):
        check(EMULATOR, conf, (136, 16, 205), rng)


def test_what_is_made_of_zeros_would_be_seen(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(mainloop, "first_elements", lambda dtype, word, count: word)
    with np.errstate(all="ignore"):
        assert not reciprocals(EMULATOR, 33, RowMajor, rng)
