"""wgmma multiplies: in the emulator against NumPy, and on hardware.

Two kinds of data, as in `test_mma`. Small integers are exact in every type here, so that all must agree to the bit; this is
what tells a wrong descriptor, swizzle or fragment map. Normal numbers: products are exact in float32, and the tensor cores
add them in an order of their own, and cut terms off: below 24 bits or so, below 14 with 8-bit floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.lang.aggregates import fill
from gemmkit.lang.registers import each, generate
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier
from gemmkit.ptx.wgmma import (
    WgmmaSpec,
    fence_async,
    halves,
    matrix_descriptor,
    settle,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from tests.support.harness import Out, Runtime, compiled, emulated, leaves_nothing, on_device
from tests.support.wgmma_cases import (
    F16,
    F32,
    KINDS,
    S8,
    S32,
    STEPS,
    U8,
    WIDTHS,
    Elements,
    Product,
    assert_product,
    copy_in,
    draw,
    kind_name,
    product_kernel,
    put,
    take,
    words,
)

DATA = ["integers", "normal"]


def multiplied(run: Any, spec: WgmmaSpec, width: int, data: str, accumulate: int, rng: np.random.Generator) -> None:
    """Run `product_kernel` one way or another and compare: D = A B (+ C), or D = -A B (+ C)."""
    k = STEPS * spec.K
    a, b = draw(rng, data, (64, k), spec.a), draw(rng, data, (spec.N, k), spec.b)
    c = draw(rng, data, (64, spec.N), spec.accumulator)
    case = Product(spec, width)
    (d,) = run(product_kernel, Out(c.shape, c.dtype), words(a, spec.a_major), words(b, spec.b_major), c,
               Runtime(accumulate), case, threads=128, shared=case.shared)
    assert_product(d, -a if spec.negates else a, b, c if accumulate else np.zeros_like(c), data)


every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)
MAJORS = [("K", "MN"), ("MN", "K"), ("MN", "MN")]
SIXTEEN_BITS = pytest.mark.parametrize("kind", [k for k in KINDS if k[0].itemsize == 2], ids=kind_name)


@pytest.mark.sample(9)
@every_kind
@pytest.mark.parametrize("width", WIDTHS)
def test_multiplies(kind: tuple, width: int, rng: np.random.Generator) -> None:
    for data in DATA:
        multiplied(emulated, WgmmaSpec(24, *kind), width, data, data == "integers", rng)


@pytest.mark.sample(7)
@SIXTEEN_BITS
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("majors", MAJORS, ids="-".join)
def test_multiplies_mn_major(kind: tuple, width: int, majors: tuple[str, str], rng: np.random.Generator) -> None:
    multiplied(emulated, WgmmaSpec(72, *kind, *majors), width, "integers", 0, rng)


@pytest.mark.sample(2)
@pytest.mark.parametrize("columns", [8, 16, 40, 128, 200, 256])
def test_multiplies_wide(columns: int, rng: np.random.Generator) -> None:
    multiplied(emulated, WgmmaSpec(columns, F16, F16, F32, "K", "MN"), 128, "integers", 1, rng)


@pytest.mark.sample(2)
@every_kind
def test_multiplies_registers(kind: tuple, rng: np.random.Generator) -> None:
    for data in DATA:
        multiplied(emulated, WgmmaSpec(16, *kind, a_registers=True), 64, data, data == "normal", rng)


def test_integers_wrap() -> None:
    spec = WgmmaSpec(8, U8, U8, S32)
    old = np.full((64, 8), 2**31 - 1, S32)
    new = spec.compute(np.full((64, 32), 255, U8), np.full((8, 32), 255, U8), old)
    assert (new == 2**31 - 1 + 32 * 255**2 - 2**32).all()


def element_kernel(d: Any, a: Any, b: Any, case: Any) -> None:
    """A's fragment as elements, once and settled, and float16 accumulators as words."""
    copy_in(case.b, b, 0, case)
    fence_async()
    barrier()
    descriptor = matrix_descriptor(shared(case.word, 0), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    sums = fill(case.start_dtype, case.start_count, 0)
    fragment = generate(case.elements, take, a, case.map_a)
    if case.is_settled:
        fragment = settle(fragment)
    wgmma_fence()
    sums = case.instruction(sums, generate(case.elements, take, a, case.map_a), descriptor, 1)
    sums = case.instruction(sums, fragment, descriptor, 1)
    wgmma_commit()
    (sums,) = wgmma_wait(0, (sums,))
    each(put, halves(sums) if case.is_packed else sums, d, case.map_c)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS[:4], ids=kind_name)
def test_elements_in_registers(kind: tuple, rng: np.random.Generator) -> None:
    spec = WgmmaSpec(16, *kind, a_registers=True)
    a, b = draw(rng, "integers", (64, spec.K), kind[0]), draw(rng, "integers", (16, STEPS * spec.K), kind[1])
    case = Elements(spec, 64)
    arguments = Out((64, 16), kind[2]), a, words(b, "K"), case
    (d,) = emulated(element_kernel, *arguments, threads=128, shared=case.b.nbytes)
    assert_product(d, np.hstack([a, a]), np.hstack([b[:, :spec.K]] * 2), np.zeros_like(d), "integers")
    assert leaves_nothing(compiled(element_kernel, *arguments, threads=128))


# -- hardware ------------------------------------------------------------------------------------------------------------------

FLOATS = pytest.mark.parametrize("kind", [k for k in KINDS if k[2] != S32], ids=kind_name)


@pytest.mark.sample(2)
@FLOATS
@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
def test_subtracts(kind: tuple, run: Any, rng: np.random.Generator) -> None:
    for accumulate in (0, 1):
        multiplied(run, WgmmaSpec(24, *kind, negates=True), 128, "integers", accumulate, rng)
    multiplied(run, WgmmaSpec(24, *kind, a_registers=True, negates=True), 64, "normal", 1, rng)


@pytest.mark.gpu
@pytest.mark.sample(4)
@every_kind
def test_on_the_gpu(kind: tuple, rng: np.random.Generator) -> None:
    for spec, width in [(WgmmaSpec(24, *kind), 128), (WgmmaSpec(64, *kind), 0),
                        (WgmmaSpec(16, *kind, a_registers=True), 64)]:
        for data in DATA:
            for accumulate in (0, 1):
                multiplied(on_device, spec, width, data, accumulate, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_mn_major_on_the_gpu(width: int, rng: np.random.Generator) -> None:
    for majors in MAJORS:
        multiplied(on_device, WgmmaSpec(72, F16, F16, F32, *majors), width, "integers", 0, rng)
    multiplied(on_device, WgmmaSpec(256, S8, U8, S32), width, "normal", 1, rng)
