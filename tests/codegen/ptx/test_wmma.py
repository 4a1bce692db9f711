"""wmma in the emulator against NumPy, in PTX, and against the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, lane_index
from gemmkit.ptx.wmma import LOAD, MMA, SHAPES, SPECS, STORE
from tests.codegen.ptx.test_mma import assert_product, matrices
from tests.support.harness import Out, compiled, emulated, instructions, leaves_nothing, on_device

F16, F32, F64, BF16 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), np.dtype(ml_dtypes.bfloat16)


DATA = ["integers", "normal"]


@dataclass(frozen=True)
class Wmma(gk.Component):
    """One product with its operands in these layouts ("row" or "col")."""

    key: Any
    a: str = "row"
    b: str = "row"
    c: str = "row"

    @property
    def spec(self) -> Any:
        return SPECS[self.key]

    @property
    def kind(self) -> np.dtype:
        return self.spec.input

    @property
    def accumulator(self) -> np.dtype:
        return self.spec.accumulator

    @property
    def load_a(self) -> Any:
        return LOAD[self.key, "a", self.a]

    @property
    def load_b(self) -> Any:
        return LOAD[self.key, "b", self.b]

    @property
    def load_c(self) -> Any:
        return LOAD[self.key, "c", self.c]

    @property
    def multiply(self) -> Any:
        return MMA[self.key, self.a, self.b]

    @property
    def store(self) -> Any:
        return STORE[self.key, self.c]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of A, B and C."""
        m, n, k = self.key[0]
        return m * k, k * n, m * n

    @property
    def leading(self) -> tuple[int, int, int]:
        m, n, k = self.key[0]
        return k if self.a == "row" else m, n if self.b == "row" else k, n if self.c == "row" else m


def wmma_kernel(d: Any, a: Any, b: Any, c: Any, how: Any) -> None:
    a_shared, b_shared, c_shared = shared(how.kind, 0), shared(how.kind, 1024), shared(how.accumulator, 2048)
    copy_in(a_shared, a, how.sizes[0])
    copy_in(b_shared, b, how.sizes[1])
    copy_in(c_shared, c, how.sizes[2])
    barrier()
    fragment = how.multiply(how.load_a(a_shared, 0, 0, how.leading[0]), how.load_b(b_shared, 0, 0, how.leading[1]),
                            how.load_c(c_shared, 0, 0, how.leading[2]))
    barrier()
    how.store(c_shared, 0, 0, how.leading[2], fragment)
    barrier()
    for step in range(how.sizes[2] // 64):
        at = 64 * step + 2 * lane_index()
        store_global(d, 0, (at,), (0,), load_shared(c_shared, at, 0, 2))


def copy_in(pointer: Any, source: Any, count: int) -> None:
    for step in range(count // 64):
        at = 64 * step + 2 * lane_index()
        store_shared(pointer, at, 0, load_global(source, 0, (at,), (0,), 2))


def flat(matrix: np.ndarray, layout: str) -> np.ndarray:
    return np.ascontiguousarray(matrix if layout == "row" else matrix.T).reshape(-1)


def wmma_arguments(how: Wmma, data: str, rng: np.random.Generator) -> tuple[tuple, tuple]:
    """(what the kernel takes, the matrices)."""
    a, b, c = matrices(rng, data, how.key[0], how.kind, how.accumulator)
    return (Out((c.size,), how.accumulator), flat(a, how.a), flat(b, how.b), flat(c, how.c), how), (a, b, c)


def wmma_result(d: np.ndarray, how: Wmma) -> np.ndarray:
    m, n, _ = how.key[0]
    return d.reshape(m, n) if how.c == "row" else d.reshape(n, m).T


WMMAS = [Wmma((shape, *types), *layouts) for shape in SHAPES for types in ((F16, F32), (F16, F16), (BF16, F32))
         for layouts in (("row", "row", "row"), ("col", "row", "row"), ("row", "col", "col"), ("col", "col", "col"))]


every_wmma = pytest.mark.parametrize(
    "how", WMMAS, ids=[f"{h.spec.name}-{h.a}-{h.b}-{h.c}" for h in WMMAS])


@pytest.mark.sample(3)
@every_wmma
def test_wmma_multiplies(how: Wmma, rng: np.random.Generator) -> None:
    for data in DATA:
        arguments, (a, b, c) = wmma_arguments(how, data, rng)
        (d,) = emulated(wmma_kernel, *arguments, shared=4096)
        assert_product(wmma_result(d, how), a, b, c, data)


@pytest.mark.sample(36)
@every_wmma
def test_wmma_is_load_multiply_store(how: Wmma, rng: np.random.Generator) -> None:
    ptx = compiled(wmma_kernel, *wmma_arguments(how, "normal", rng)[0])
    shape = "m{}n{}k{}".format(*how.key[0])
    names = {F16: "f16", F32: "f32", BF16: "bf16"}
    kind, acc = names[how.kind], names[how.accumulator]
    types = f"{acc}.{acc}" if how.kind == F16 else f"{acc}.{kind}.{kind}.{acc}"
    assert {k: n for k, n in instructions(ptx).items() if k.startswith("wmma")} == {
        f"wmma.load.a.sync.aligned.{how.a}.{shape}.shared.{kind}": 1,
        f"wmma.load.b.sync.aligned.{how.b}.{shape}.shared.{kind}": 1,
        f"wmma.load.c.sync.aligned.{how.c}.{shape}.shared.{acc}": 1,
        f"wmma.mma.sync.aligned.{how.a}.{how.b}.{shape}.{types}": 1,
        f"wmma.store.d.sync.aligned.{how.c}.{shape}.shared.{acc}": 1,
    }
    assert leaves_nothing(ptx)


@pytest.mark.sample(11)
@every_wmma
def test_wmma_is_assembled(how: Wmma, rng: np.random.Generator) -> None:
    from gemmkit.runtime.compile import assemble

    usage = assemble(compiled(wmma_kernel, *wmma_arguments(how, "normal", rng)[0])).usage
    assert usage.spill_stores == usage.spill_loads == usage.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wmma_on_the_gpu(shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    for how in WMMAS:
        if how.key[0] != shape:
            continue
        for data in DATA:
            arguments, (a, b, c) = wmma_arguments(how, data, rng)
            (d,) = on_device(wmma_kernel, *arguments, shared=4096)
            assert_product(wmma_result(d, how), a, b, c, data)
