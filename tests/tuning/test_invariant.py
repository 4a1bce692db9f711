"""One order of sums for all numbers of rows (`gemmkit.tuning.choose`): which ones are chosen, and bits of rows in batches of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.errors import ConfigError
from gemmkit.plans.ahead import recorded
from gemmkit.plans.problem import Call
from gemmkit.runtime.device import A100, H100
from gemmkit.tuner.subjects import TunedProduct
from gemmkit.tuning.choose import SumOrder
from gemmkit.tuning.problems import Choice
from tests.support.machines import BF16, on_machines

ROWS = 1, 2, 8, 16, 31, 64, 100, 128, 500, 1024, 4096
F16, F32, F64 = map(np.dtype, ("float16", "float32", "float64"))
TYPES = [(F16, {}), (BF16, {}), (F32, {}), (F64, {}), (F32, {"precision": "tf32"})]
NAMES = "f16", "bf16", "f32", "f64", "tf32"
INVARIANT = {"mapping": "batch_invariant"}
SIZES = [(1024, 1024, "nt"), (1024, 1024, "nn"), (500, 333, "nn"), (96, 4096, "nt")]           # N, K, order of B


def operand(N: int, K: int, order: str, dtype: np.dtype) -> np.ndarray:
    return np.empty((K, N), dtype, order="F" if order[1] == "t" else "C")


def resolved(M: int, N: int, K: int, order: str, dtype: np.dtype, device: Any = H100, **keywords: Any) -> Call:
    a, b = np.empty((M, K), dtype), operand(N, K, order, dtype)
    made = recorded(lambda: gk.matmul(a, b, **INVARIANT, **keywords), device, zeros=False)[0]
    call: Call = made.problem
    return call


def arithmetic(call: Call) -> SumOrder:
    return SumOrder.of(Choice(call.config, "", call.swap_ab))


@pytest.mark.parametrize(("dtype", "keywords"), TYPES, ids=NAMES)
@pytest.mark.parametrize("device", [H100, A100], ids=["H100", "A100"])
def test_one_arithmetic_for_all_rows(dtype: np.dtype, keywords: dict[str, Any], device: Any) -> None:
    """One kernel and instruction for all M, and no share of K; few rows and many may take other tiles."""
    for N, K, order in (*SIZES, (14336, 4096, "nt")):
        calls = [resolved(M, N, K, order, dtype, device, **keywords) for M in ROWS]
        assert all(call.config.splits == 1 for call in calls)
        assert len({arithmetic(call) for call in calls}) == 1
        assert len({call.config.block_shape for call in calls}) > 1 or K < 1024 or N < 1024


def test_few_rows_are_exchanged() -> None:
    """Hopper's kernel takes the tiles of few rows, as without the keyword, but with all of K."""
    call = resolved(1, 4096, 4096, "nt", F16)
    assert call.swap_ab and call.config.block_shape.size.N == 16 and not resolved(300, 4096, 4096, "nt", F16).swap_ab
    usual = recorded(lambda: gk.matmul(np.empty((1, 4096), F16), operand(4096, 4096, "nt", F16)), H100, zeros=False)[0].problem
    assert usual.config.splits > 1
    said = repr(gk.explain(np.empty((1, 4096), F16), operand(4096, 4096, "nt", F16), **INVARIANT))
    assert "all of K in one share" in said and "64x16x128" in said


def given(machine: Any, rng: np.random.Generator, M: int, N: int, K: int, order: str, dtype: np.dtype) -> tuple[Any, Any]:
    a = rng.standard_normal((M, K)).astype(dtype)
    b = np.asarray(rng.standard_normal((K, N)).astype(dtype), order="F" if order[1] == "t" else "C")
    return machine.array(a), machine.array(b)


def bits(machine: Any, x: Any) -> np.ndarray:
    found = np.ascontiguousarray(machine.numpy(x))
    return found.view(f"u{found.dtype.itemsize}")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dtype", "keywords"), TYPES, ids=NAMES)
@on_machines
def test_bits_of_small_batches(machine: Any, rng: np.random.Generator, dtype: np.dtype, keywords: dict[str, Any]) -> None:
    """Of some rows of a batch, of single rows as vectors, of a stack, and of rows among others."""
    a, b = given(machine, rng, 9, 24, 40, "nn", dtype)
    keywords = {**INVARIANT, **keywords}
    with machine.session():
        whole = bits(machine, gk.matmul(a, b, **keywords))
        for rows in (slice(0, 1), slice(3, 5), slice(2, 9)):
            assert np.array_equal(bits(machine, gk.matmul(a[rows], b, **keywords)), whole[rows])
        assert np.array_equal(bits(machine, gk.matmul(a[4], b, **keywords)), whole[4])
        assert np.array_equal(bits(machine, gk.matmul(a.reshape(3, 3, 40), b, **keywords)).reshape(9, 24), whole)
        after = gk.matmul(a[:2], b, **keywords, epilogue=gk.epilogues.ReLU())
        assert np.array_equal(bits(machine, after), bits(machine, gk.matmul(a, b, **keywords, epilogue=gk.epilogues.ReLU()))[:2])


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K", "order"), SIZES)
@pytest.mark.parametrize(("dtype", "keywords"), TYPES, ids=NAMES)
def test_bits_of_all_batches(rng: np.random.Generator, dtype: np.dtype, keywords: dict[str, Any], N: int, K: int,
                             order: str) -> None:
    """Rows of a batch of 4096, and the same rows in smaller batches, first and elsewhere: whichever tile they are in. Rows of
    zeros with signs among them, whose sums are zeros."""
    from tests.support.machines import Gpu

    machine = Gpu()
    a, b = given(machine, rng, ROWS[-1], N, K, order, dtype)
    a[7] = 0
    a[7] *= -1
    with machine.session():
        whole = bits(machine, gk.matmul(a, b, **INVARIANT, **keywords))
        wrong = []
        for M in ROWS:
            for first in {0, 7, min(3001, ROWS[-1] - M)}:
                if first + M <= ROWS[-1]:
                    rows = slice(first, first + M)
                    found = bits(machine, gk.matmul(a[rows], b, **INVARIANT, **keywords))
                    if not np.array_equal(found, whole[rows]):
                        wrong.append((M, first, int((found != whole[rows]).sum())))
    assert not wrong


@pytest.mark.parametrize(("error", "said", "keywords"), [
    (ValueError, "'batch_invariant' is needed; a mapping of your own is a conf", dict(mapping="rows")),
    (ConfigError, "given with operator", dict(operator=gk.operators.FPUOp(16, 16))),
    (ConfigError, "sums are exact", dict(precision="ozaki")),
    (ConfigError, "sees more than an element", dict(epilogue=gk.epilogues.Softmax())),
    (ConfigError, "plain matrices of one dtype", dict(a=np.ones((4, 4), np.complex64), b=np.ones((4, 4), np.complex64))),
    (ConfigError, "plain matrices of one dtype", dict(a=np.ones((4, 4), np.float64))),
    (ConfigError, "rows whose elements are neighbours", dict(a=np.ones((4, 4), np.float32, order="F"))),
    (ConfigError, "holds more than products of float32", dict(dtype=np.float64)),
    (ConfigError, "transform_global_to_shared_a=.* beside it", dict(transform_global_to_shared_a=gk.transforms.Map(lambda x: -x))),
])
def test_what_is_refused(error: type[Exception], said: str, keywords: dict[str, Any]) -> None:
    keywords = {**INVARIANT, **keywords}
    a, b = keywords.pop("a", np.ones((4, 4), np.float32)), keywords.pop("b", np.ones((4, 4), np.float32))
    with gk.emulate(), pytest.raises(error, match=said):
        gk.matmul(a, b, **keywords)


def test_groups_and_tuning_refuse() -> None:
    a = np.ones((4, 4), np.float32)
    with gk.emulate(), pytest.raises(ValueError, match="tiles of a group are those of its largest product"):
        gk.grouped([a], [a], **INVARIANT)
    with gk.emulate(), pytest.raises(ValueError, match="it says which mapping is taken"):
        TunedProduct(a, a, **INVARIANT)


@on_machines
def test_functions_of_rows(machine: Any, rng: np.random.Generator) -> None:
    """Without the keyword: threads and order of a row follow from its columns alone."""
    x, gain = rng.standard_normal((9, 96)).astype(np.float32), rng.standard_normal(96).astype(np.float32)
    with machine.session():
        gain = machine.array(gain)
        for f in (gk.softmax, gk.log_softmax, lambda x: gk.layernorm(x, gain, gain), lambda x: gk.rmsnorm(x, gain)):
            whole = bits(machine, f(machine.array(x)))
            assert all(np.array_equal(bits(machine, f(machine.array(x[rows]))), whole[rows])
                       for rows in (slice(0, 1), slice(4, 6)))
