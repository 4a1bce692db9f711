"""Where vectors begin: arrays with two unit strides, and addresses that are no multiple of an element."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.plans import ahead
from gemmkit.runtime.arrays import ArrayInfo, alignment, check_aligned, unit_axis
from tests.support.checks import assert_close


def windows(x: Any, rows: int, columns: int) -> Any:
    """Element (i, j) is x[i + j], of NumPy's arrays and CuPy's."""
    if isinstance(x, np.ndarray):
        return np.lib.stride_tricks.as_strided(x, (rows, columns), (x.itemsize, x.itemsize))
    import cupy

    return cupy.lib.stride_tricks.as_strided(x, (rows, columns), (x.itemsize, x.itemsize))


def info(strides: tuple[int, ...], shape: tuple[int, ...] = (8, 8), dtype: str = "f2") -> ArrayInfo:
    return ArrayInfo(0x1000, shape, strides, np.dtype(dtype), 0, False, "cai")


@pytest.mark.parametrize(("strides", "unit", "expected"), [
    ((1, 1), 0, 2), ((1, 1), 1, 2), ((1, 1), True, 2), ((8, 1), 1, 16), ((8, 1), None, 2), ((1, 8), True, 16),
    ((1, 8), 1, 2), ((1, 1, 8), True, 2), ((8, 1, 1), True, 2)])
def test_only_the_axis_that_vectors_lie_along_is_left_out(strides: tuple[int, ...], unit: Any, expected: int) -> None:
    assert alignment(info(strides, (8,) * len(strides)), unit) == expected


def test_a_row_that_is_never_left_takes_no_alignment_away() -> None:
    assert alignment(info((1, 1), (1, 8))) == 16 and unit_axis(info((1, 1), (1, 8))) == 1


# -- sliding windows --------------------------------------------------------------------------------------------------

MMA = {"operator": operators.MMAOp(dtype="float16"), "block_shape": gk.Tile(M=32, N=32, K=32),
       "compute_warp": gk.Tile(M=32, N=32, K=16)}


def run_windows(place: Any, to_host: Any, slot: str, orders: str) -> None:
    """A product with a sliding window in one slot, whose layout may say that its rows or its columns are vectors."""
    rng, (M, N, K) = np.random.default_rng(3), (37, 40, 64)
    x, kinds = rng.standard_normal(120).astype(np.float16), {"row": layouts.RowMajor, "col": layouts.ColMajor}
    a, b, r = (rng.standard_normal(shape).astype(np.float16) for shape in ((M, K), (K, N), (M, N)))
    arrays, host = {"a": place(a), "b": place(b), "r": place(r)}, {"a": a, "b": b, "r": r}
    rows, columns = {"a": (M, K), "b": (K, N), "r": (M, N)}[slot]
    arrays[slot], host[slot] = windows(place(x), rows, columns), windows(x, rows, columns)
    kind = kinds[orders]
    conf = gk.get_config(**MMA, global_a_layout=(kind if slot == "a" else layouts.RowMajor)("float16"),
                         global_b_layout=(kind if slot == "b" else layouts.RowMajor)("float16"),
                         global_d_layout=layouts.RowMajor("float32"))
    d = gk.matmul(arrays["a"], arrays["b"], conf=conf, epilogue=epilogues.Residual(arrays["r"], kind("float16")))
    assert_close(to_host(d), host["a"].astype("f8") @ host["b"].astype("f8") + host["r"], 1e-3)


@pytest.mark.sample(4)
@pytest.mark.parametrize("orders", ["row", "col"])
@pytest.mark.parametrize("slot", ["a", "b", "r"])
def test_sliding_windows(slot: str, orders: str) -> None:
    with gk.emulate():
        run_windows(lambda x: x, np.asarray, slot, orders)


@pytest.mark.gpu
@pytest.mark.parametrize("orders", ["row", "col"])
@pytest.mark.parametrize("slot", ["a", "b", "r"])
def test_sliding_windows_on_the_gpu(slot: str, orders: str) -> None:
    import cupy

    run_windows(cupy.asarray, cupy.asnumpy, slot, orders)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sliding_windows_by_default_on_the_gpu(dtype: str) -> None:
    """Whatever kernel `matmul` takes."""
    import cupy

    x = cupy.random.standard_normal(700).astype(dtype)
    a, b = windows(x, 256, 320), cupy.random.standard_normal((320, 256)).astype(dtype)
    wanted = cupy.asnumpy(a).astype("f8") @ cupy.asnumpy(b).astype("f8")
    assert_close(cupy.asnumpy(gk.matmul(a, b)).astype("f8"), wanted, 2e-3)
    assert_close(cupy.asnumpy(gk.matmul(b.T, a.T)).astype("f8"), wanted.T, 2e-3)


@pytest.mark.kin(1)
def test_einsum_of_a_view_with_two_unit_strides() -> None:
    """A convolution: windows of windows."""
    x, w = np.arange(60, dtype=np.float32), np.arange(24, dtype=np.float32).reshape(6, 4)
    view = np.lib.stride_tricks.as_strided(x, (5, 4, 6), (24, 4, 4))
    with gk.emulate():
        d = gk.einsum("nij,jo->nio", view, w)
        e = gk.einsum("nij,nk->ijk", view, np.ones((5, 3), np.float32))
    assert_close(d, np.einsum("nij,jo->nio", view, w), 1e-6)
    assert_close(e, np.einsum("nij,nk->ijk", view, np.ones((5, 3))), 1e-6)


# -- addresses --------------------------------------------------------------------------------------------------------

def shifted(shape: tuple[int, ...], dtype: Any, by: int) -> np.ndarray:
    """Ones that begin ``by`` bytes behind a multiple of 16."""
    count, size = int(np.prod(shape)), np.dtype(dtype).itemsize
    memory = np.zeros(count * size + 48, np.uint8)
    start = -memory.ctypes.data % 16 + by
    out = memory[start:start + count * size].view(dtype).reshape(shape)
    out[...] = 1
    return out


@pytest.mark.parametrize("which", ["a", "b", "c", "out", "field", "captured"])
def test_an_address_that_is_no_multiple_of_an_element_is_refused(which: str) -> None:
    def array(name: str, *shape: int) -> np.ndarray:
        return shifted(shape, "f4", 2 if name == which else 0)

    a, b, c, out, field, captured = (array("a", 4, 6), array("b", 6, 5), array("c", 4, 5), array("out", 4, 5),
                                     array("field", 5), array("captured", 5))
    name = {"field": "Bias.bias", "captured": "Map.f's captured captured"}.get(which, which)
    with gk.emulate(), pytest.raises(ValueError, match=re.escape(f"{name} is at address 0x") + ".* not a multiple of 4 bytes"):
        gk.matmul(a, b, c, out=out, epilogue=epilogues.Bias(field),
                  transform_regs_to_shared_d=transforms.Map(lambda x, m, n: x + captured[n]))
    assert (out == 1).all()


def test_an_empty_array_may_be_anywhere() -> None:
    check_aligned(ArrayInfo(0x1001, (0, 3), (3, 1), np.dtype("f4"), 0, False, "cai"), "a")


def test_a_plan_refuses_it_too() -> None:
    a, b = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
    with gk.emulate():
        run = gk.plan(a, b)
        with pytest.raises(ValueError, match="a is at address"):
            run(shifted((4, 6), "f4", 2), b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_begin_where_one_of_their_parts_may(dtype: str) -> None:
    by = np.dtype(dtype).itemsize // 2
    a, b, out = (shifted(shape, dtype, by) for shape in ((5, 6), (6, 8), (5, 8)))
    a *= 1 + 2j
    b *= np.arange(8) - 1j
    with gk.emulate():
        gk.matmul(a, b, out=out, epilogue=epilogues.Bias(shifted((8,), dtype, by)))
        with pytest.raises(ValueError, match="the size of a part of a complex"):
            gk.matmul(shifted((5, 6), dtype, 1), b)
    assert_close(out, a @ b + 1, 1e-6)


@pytest.mark.kin(1)
@pytest.mark.usefixtures("ptx_alone")
def test_the_kernel_of_such_complex_numbers_moves_them_part_by_part() -> None:
    conf = gk.get_config(operator=operators.FPUOp(M=16, N=16, dtype="complex64", accumulator="complex64"),
                         block_shape=gk.Tile(M=16, N=16, K=8), global_a_layout=layouts.RowMajor("complex64"),
                         global_d_layout=layouts.RowMajor("complex64"))
    arrays = {name: shifted((16, 16), "complex64", 4) for name in ("a", "b", "out")}
    ptx = ahead.compile_config(conf, operands=arrays, gemm_shape={"M": 16, "N": 16, "K": 16}).ptx
    moves = set(re.findall(r"(?:ld|st)\.global[.\w]*", ptx))
    assert moves and not any(re.search(r"\.v[24]\.|[bfu]64|s64", move) for move in moves), moves


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_such_complex_numbers_on_the_gpu(dtype: str) -> None:
    import cupy

    size = np.dtype(dtype).itemsize
    def place(x: np.ndarray) -> Any:
        memory = cupy.zeros(x.nbytes + size, cupy.uint8)
        view = cupy.ndarray(x.shape, x.dtype, memory.data + size // 2)
        view[...] = cupy.asarray(x)
        return view

    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(s) + 1j * rng.standard_normal(s) for s in ((33, 20), (20, 41)))
    a, b = a.astype(dtype), b.astype(dtype)
    out = place(np.full((33, 41), np.nan, dtype))
    gk.matmul(place(a), place(b), out=out, epilogue=epilogues.Bias(place(b[0])))
    assert_close(cupy.asnumpy(out), a @ b + b[0], 1e-5)


@pytest.mark.gpu
def test_a_misaligned_address_is_refused_on_the_gpu() -> None:
    import cupy

    memory = cupy.zeros(400, cupy.uint8)
    b = cupy.ones((6, 5), cupy.float32)
    with pytest.raises(ValueError, match="a is at address"):
        gk.matmul(cupy.ndarray((4, 6), cupy.float32, memory.data + 2), b)
