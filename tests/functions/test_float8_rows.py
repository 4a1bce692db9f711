"""Rows quantised to 8-bit floats with scales, alone and behind a norm, against NumPy; the kernel as compiled."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import ComponentError
from gemmkit.functions.rows import (
    Array,
    QuantisedRows,
    Row,
    RowFunction,
    RowsLaunch,
    along,
    mapped,
    put_scaled,
    rowwise,
    to_float8,
    total,
)
from gemmkit.lang.components import dataclass
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import disassemble, instruction_counts
from tests.support.machines import BF16, E4M3, E5M2, on_machines, poison

F16, F32 = np.dtype("f2"), np.dtype("f4")
LEAST = np.float32(2.0**-126)


@dataclass(frozen=True)
class QuantisedRMSNorm(RowFunction):
    """gamma x / sqrt(mean of squares + eps), over a scale of each 128 elements."""

    gamma: Array
    scales: Array

    outputs = ("scales",)
    along_columns = ("gamma",)

    def __call__(self, row: Row) -> None:
        scale = 1 / math.sqrt(total(row, lambda x, n: x * x) / row.columns + 1e-6)
        normed = mapped(row, lambda x, n, gamma: x * scale * gamma, (along(row, self.gamma),))
        put_scaled(normed, self.scales, 448.0, 128)


def expected(x: np.ndarray, block: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Elements of ``dtype``, and their scales."""
    wide = x.astype(F32)
    padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // block) * block), F32)
    padded[..., :x.shape[-1]] = wide
    top = np.abs(padded.reshape(*x.shape[:-1], -1, block)).max(-1)
    scales = np.maximum(top / F32.type(float(ml_dtypes.finfo(dtype).max)), LEAST)
    with np.errstate(invalid="ignore"):
        return (wide * np.repeat(1 / scales, block, -1)[..., :x.shape[-1]]).astype(dtype), scales


def given(machine: Any, x: np.ndarray) -> Any:
    """Of PyTorch on a GPU: CuPy has no 8-bit floats."""
    if machine.emulated:
        return x
    import torch

    found = machine.array(x)
    return found if isinstance(found, torch.Tensor) else torch.as_tensor(found, device="cuda")


def agree(found: np.ndarray, wanted: np.ndarray) -> None:
    """Up to the last bit of few elements: on a GPU a quotient may end otherwise."""
    bits, others = found.view(np.int8).astype(int), wanted.view(np.int8).astype(int)
    apart = np.abs(bits - others)
    assert apart.max(initial=0) <= 1 and np.count_nonzero(apart) <= 1 + apart.size // 500


SHAPES = [(5, 256), (3, 300), (2, 2, 132), (1, 4), (9, 1024), (2, 7168), (2, 40000)]


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("dtype, kind", [(F16, E4M3), (BF16, E5M2), (F32, E4M3)], ids=str)
def test_blocks(machine: Any, dtype: np.dtype, kind: np.dtype, rng: np.random.Generator) -> None:
    """Blocks of very different sizes, among them one of zeros; the last of a row may be a part of one."""
    for shape in SHAPES if not machine.emulated or dtype == F16 else SHAPES[:4]:
        x = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape[-1] // 4).repeat(4))).astype(dtype)
        x[0, ..., :128] = 0
        with machine.session():
            q, scales = (machine.numpy(y) for y in to_float8(given(machine, x), dtype=kind))
        wanted, of_wanted = expected(x, 128, kind)
        assert q.dtype == kind and scales.shape == of_wanted.shape and scales.dtype == F32
        np.testing.assert_allclose(scales, of_wanted, rtol=2e-7)
        agree(q, wanted)


@on_machines
def test_rows(machine: Any, rng: np.random.Generator) -> None:
    for shape in ((4, 77), (3, 8), (2, 5, 33), (1, 20000)):
        x = rng.standard_normal(shape).astype(F32)
        with machine.session():
            q, scales = (machine.numpy(y) for y in to_float8(given(machine, x), block=None))
        wanted, of_wanted = expected(x, shape[-1], E4M3)
        np.testing.assert_allclose(scales, of_wanted, rtol=2e-7)
        agree(q, wanted)


@on_machines
def test_numbers_that_are_none_stay_in_their_blocks(machine: Any) -> None:
    x = np.ones((2, 512), F32)
    x[0, 5], x[0, 130], x[1, :128], x[1, 300] = np.nan, np.inf, 1e-41, -3e38
    with machine.session():
        q, scales = (machine.numpy(y) for y in to_float8(given(machine, x)))
    values = q.astype(F32) * np.repeat(scales, 128, 1)
    assert np.isnan(values[0, 128 + 2]) and np.isnan(values[0, :128]).all() and (np.abs(values[0, 256:] - 1) < 0.1).all()
    assert scales[0, 1] == np.inf and scales[1, 0] == LEAST and (np.abs(values[1, :128]) <= 1e-38).all()
    assert abs(values[1, 300] / 3e38 + 1) < 0.1 and values[1, 301] == 0


@pytest.mark.kin(1)
@on_machines
def test_a_norm_is_quantised_in_its_launch(machine: Any, rng: np.random.Generator) -> None:
    """Of views: rows lie apart, and so do those of the result; what lies between stays as it was."""
    for columns in (520, 4096):
        x, gamma = rng.standard_normal((7, columns)).astype(BF16), rng.uniform(0.5, 2, columns).astype(F32)
        out, scales = poison((7, columns + 16), E4M3), poison((7, -(-columns // 128)), F32)
        with machine.session():
            held, of_scales = given(machine, out), given(machine, scales)
            rowwise(given(machine, x), QuantisedRMSNorm(given(machine, gamma), of_scales), out=held[:, :columns])
        found, of_found = machine.numpy(held), machine.numpy(of_scales)
        wide = x.astype(np.float64)
        wide = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-6) * gamma
        values = found[:, :columns].astype(np.float64) * np.repeat(of_found, 128, 1)[:, :columns]
        assert (np.abs(values - wide) <= 2.0**-4 * np.abs(wide) + 2.0**-9 * np.repeat(of_found, 128, 1)[:, :columns]).all()
        assert np.array_equal(found[:, columns:].view(np.uint8), out[:, columns:].view(np.uint8))


# -- refusals -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("x, how, error, words", [
    (np.ones((2, 126), F32), {}, ValueError, "x has rows of 126 elements; with blocks a multiple of 4 is needed"),
    (np.ones((2, 128)), {}, TypeError, "x has dtype float64; float16, bfloat16 or float32"),
    (np.ones((2, 128), int), {}, TypeError, "x has dtype int64"),
    (np.ones((2, 128), F32), dict(block=64), ValueError, "block=64: 128 is needed, or None for a scale of each row"),
    (np.ones((2, 128), F32), dict(dtype="float16"), TypeError, "dtype=float16: float8_e4m3fn or float8_e5m2 is needed"),
    (np.ones((), F32), {}, ValueError, "x has no axis"), ([1.0], {}, TypeError, "x"),
    (np.ones((4, 4, 128), F32)[:, :3].swapaxes(0, 1), {}, ValueError, "its rows do not lie at one distance"),
])
def test_what_is_refused(x: Any, how: dict[str, Any], error: type[Exception], words: str) -> None:
    with gk.emulate(), pytest.raises(error, match=words):
        to_float8(x, **how)


def test_scales_that_do_not_fit() -> None:
    x, out = np.ones((3, 256), F32), np.zeros((3, 256), E4M3)
    with gk.emulate():
        for shape, columns, words in (((2, 2), 256, r"scales has shape \(2, 2\); a matrix of 3 x 256 needs \(3, 2\)"),
                                      ((3, 3), 256, r"needs \(3, 2\)"), ((3,), 256, r"needs \(3, 2\)")):
            with pytest.raises(ValueError, match=words):
                rowwise(x[:, :columns], QuantisedRows(np.zeros(shape, F32)), out=out[:, :columns])
        with pytest.raises((ComponentError, gk.ConfigError), match="a multiple of 4 elements"):
            rowwise(x[:, :255], QuantisedRMSNorm(np.ones(255, F32), np.zeros((3, 2), F32)), out=out[:, :255])


# -- the kernel as compiled -----------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.parametrize("columns, block", [(128, 128), (7168, 128), (7168, 0)])
def test_a_row_is_read_once(columns: int, block: int) -> None:
    """16 bytes at a time; what is stored of eight elements are 8 bytes. Nothing spills."""
    scales = np.zeros((8, columns // (block or columns)), F32)
    x, out = (describe(np.zeros((8, columns), dtype), name)._replace(pointer=2**30) for dtype, name in ((BF16, "x"), (E4M3, "out")))
    made = RowsLaunch(x, out, QuantisedRows(scales, E4M3, block))
    entry = made.launchable.entry()
    assert entry.meta["usage"]["spill_stores"] == entry.meta["usage"]["stack_bytes"] == 0
    counts, pieces = instruction_counts(disassemble(entry.cubin), full=True), made.spec.source.pieces
    assert sum(n for op, n in counts.items() if op.startswith("LDG")) == pieces
    assert sum(n for op, n in counts.items() if op.startswith("STG") and "64" in op) == pieces
