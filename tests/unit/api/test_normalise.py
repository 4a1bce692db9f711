"""Epilogues that normalise rows and do not fit: what is said, and that nothing has been written; and what is launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.stand_ins import STREAM, CupyArray, gpu, library
from gemmkit.epilogues import Fold, LayerNorm, Residual, RMSNorm, RowReduce, Scale, Softmax
from gemmkit.functions.grouped import grouped
from gemmkit.layouts import Layout, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.machines import is_poison, poison
from tests.unit.api.test_reductions_launch import PLACE, launches  # noqa: F401

A, B = np.ones((7, 5), np.float32), np.ones((5, 9), np.float32)
WIDE = np.ones((5, 900), np.float32)


@dataclass(frozen=True)
class Reversed(Layout):
    """Not plain: the second pass cannot read it."""

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        data[shape.M - 1 - i, j] = value


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "of columns": (lambda out: Softmax("columns"), ValueError, r"Softmax\(axis='columns'\): rows alone; of columns compute the transpose"),
    "something behind it": (lambda out: Softmax() | Scale(2.0), TypeError, "finishes whole rows, so that nothing can follow it"),
    "something behind a chain": (lambda out: Scale(2.0) | Softmax() | Residual(out), TypeError, "nothing can follow it"),
    "a reduction behind it": (lambda out: RMSNorm() | RowReduce(out[:, 0], "sum"), TypeError, "nothing can follow it"),
    "twice": (lambda out: Softmax() | Softmax(), TypeError, "nothing can follow it"),
    "in front of a fold": (lambda out: Softmax() | Fold(lambda x, y: x + y), TypeError, "nothing can stand before it"),
    "behind a fold's norm": (lambda out: Fold(lambda x, y: x + y) | Softmax() | Scale(2.0), TypeError, "nothing can follow it"),
    "a gain of rows": (lambda out: gk.matmul(A, B, out=out, epilogue=RMSNorm(np.ones(7, "f4"))), ValueError,
                       r"gain of RMSNorm has shape \(7,\); a 7 x 9 result needs \(9,\)"),
    "a bias of rows": (lambda out: gk.matmul(A, B, out=out, epilogue=LayerNorm(np.ones(9, "f4"), np.ones(7, "f4"))), ValueError,
                       r"bias of LayerNorm has shape \(7,\); a 7 x 9 result needs \(9,\)"),
    "a number for a gain": (lambda out: RMSNorm(2.0), TypeError, r"RMSNorm\(gain=2.0\): a vector with an element for each column"),
    "a matrix of gains": (lambda out: LayerNorm(np.ones((3, 9))), ValueError, r"gain of LayerNorm has shape \(3, 9\)"),
    "a negative eps": (lambda out: RMSNorm(eps=-1.0), ValueError, r"RMSNorm\(eps=-1.0\): a number from 0 on"),
    "an eps of NaN": (lambda out: LayerNorm(eps=float("nan")), ValueError, r"LayerNorm\(eps=nan\): a number from 0 on"),
    "the result for a gain": (lambda out: gk.matmul(A, B, out=out, epilogue=RMSNorm(out[0])), ValueError, "gain of RMSNorm overlaps out"),
    "as a transform": (lambda out: gk.transforms.Elementwise(Scale(2.0) | Softmax()), TypeError, "it is no function of an element"),
    "a reduction as a transform": (lambda out: gk.transforms.Elementwise(RowReduce(row(), "sum")), TypeError, "it is no function of an element"),
    "as a function of an element": (lambda out: gk.epilogues.Elementwise(RMSNorm()), TypeError, "it is no function of an element"),
    "integers": (lambda out: gk.matmul(A, B, out=poison((7, 9), "i4"), epilogue=Softmax()), gk.ConfigError,
                 "its results are no numbers of int32; give an out of float16, bfloat16, float32 or float64"),
    "in a group": (lambda out: grouped([A], [B], epilogue=Softmax()), gk.ConfigError, "the products of a group have rows of their own each"),
    "a gain of several parts": (lambda out: gk.matmul(A, B, epilogue=RMSNorm(np.ones(9, "c8"))), TypeError,
                                "gain of RMSNorm is of complex64; D's rows are real"),
    "an eps that float32 does not hold": (lambda out: gk.matmul(A, B, epilogue=LayerNorm(eps=1e39)), ValueError, "eps=1e"),
    "two passes over what is not plain": (
        lambda out: gk.matmul(A, WIDE, out=poison((7, 900), "f4"), global_d_layout=Reversed("float32"),
                              gemm_shape=dict(M=7, N=900, K=5), epilogue=Softmax()), gk.ConfigError,
        "a row of D has 900 columns and a tile .* is not plain; take RowMajor or ColMajor, or a tile of 900 columns"),
    "five of them": (lambda out: gk.matmul(A, WIDE, epilogue=RowReduce(row(), "sum") | RowReduce(row(), "sum") | RowReduce(row(), "sum")
                                           | RowReduce(row(), "sum") | Softmax()), gk.ConfigError,
                     "a launch may have 4 reductions; this is one more"),
}


def row() -> np.ndarray:
    return poison((7,), "f4")


@pytest.fixture
def emulated() -> Iterator[None]:
    with gk.emulate():
        yield


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name: str) -> None:
    call, kind, said = CALLS[name]
    out = poison((7, 9), "f4")
    with pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


@pytest.mark.usefixtures("emulated")
def test_of_a_layout_that_is_not_plain_one_tile_will_do() -> None:
    out = poison((7, 9), "f4")
    gk.matmul(A, B, out=out, global_d_layout=Reversed("float32"), gemm_shape=dict(M=7, N=9, K=5), epilogue=Softmax())
    np.testing.assert_allclose(out, 1 / 9, rtol=1e-6)


@pytest.mark.parametrize("reduces", [False, True])
def test_launches(launches: list[Any], reduces: bool) -> None:  # noqa: F811
    """The product's, what completes its reductions, and the second pass with the call's D and the same workspaces; other arrays
    of the same kind take their places."""
    with gpu(), library("cupy") as array:
        a, b = array(512, 64), array(64, 4096)
        for _ in range(2):
            gain, sums, out = array(4096, dtype=np.float32), array(512, dtype=np.float32), array(512, 4096)
            epilogue: Any = RowReduce(sums, "sum") | RMSNorm(gain) if reduces else RMSNorm(gain)
            run = gk.plan(a, b, out=out, epilogue=epilogue)
            assert run.row_passes == "two passes"
            for call in (lambda: gk.matmul(a, b, out=out, epilogue=epilogue), lambda: run(a, b, out=out)):
                launches.clear()
                call()
                (_, stream, product), *between, (name, behind, rescaling) = launches
                assert (name, stream, behind) == ("rescale_rows", STREAM, STREAM)
                assert [one[0] for one in between] == ["complete_reductions"] * reduces
                assert out.data.ptr in rescaling and gain.data.ptr in rescaling and gain.data.ptr in product
                place = PLACE + 2**20 * reduces
                assert place in product and place in rescaling


ENDINGS = {"softmax": lambda gain: Softmax(), "rms": RMSNorm, "layer": lambda gain: LayerNorm(gain, gain)}


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize(("M", "N", "blocks"), [
    (8192, 512, None), (4096, 128, None), (8192, 1024, None), (8192, 256, 2), (8192, 512, 2), (8192, 384, 2), (8192, 1024, 4), (8192, 1000, 4),
    (8192, 2048, 8)])
def test_launches_of_a_cluster(launches: list[Any], kind: str, M: int, N: int, blocks: int | None) -> None:  # noqa: F811
    """A call with another epilogue of the planned kind brings the values that the kernel of the first one takes, and its vectors,
    also where stages leave just the room for the states of rows; with C, into a part of an array, and on another stream."""
    width = 0 if blocks is None else -(-N // blocks // 8) * 8
    make, places = ENDINGS[kind], itertools.count(1)

    def array(*shape: int) -> Any:
        return CupyArray(shape, np.float16, next(places) << 30)

    with gpu(), library("cupy"):
        a, b, part = array(M, 64), array(64, N), array(M, N + 64)
        part.shape = M, N
        conf = None if blocks is None else gk.get_config(
            operator=WGMMAOp(width), block_shape=Tile(M=128, N=width, K=64), warps_per_block=8, schedule="cooperative",
            cluster=Tile(M=1, N=blocks), global_a_layout=RowMajor(np.float16), global_b_layout=RowMajor(np.float16),
            global_d_layout=RowMajor(np.float16), epilogue=make(array(N)), gemm_shape=dict(M=M, N=N, K=64))
        for c in (None, array(M, N)):
            for out in (array(M, N), part):
                passes = gk.plan(a, b, c, conf, out=out, epilogue=make(array(N))).row_passes
                assert blocks is None or passes == "one cluster"
                for stream in (STREAM, 5):
                    gain = array(N)
                    launches.clear()
                    gk.matmul(a, b, c, conf, out=out, epilogue=make(gain), stream=stream)
                    assert len(launches) == (2 if passes == "two passes" else 1)
                    assert kind == "softmax" or gain.data.ptr in launches[0][2]
                    assert all(one[1] == stream for one in launches)


@pytest.mark.parametrize(("shape", "columns"), [((16384, 256, 1024), 256), ((4096, 64, 4096), 64), ((8192, 1024, 4096), None)])
def test_tiles_that_hold_rows_are_worth_a_second_pass(shape: tuple[int, int, int], columns: int | None) -> None:
    """Where the plain product would take narrower tiles that are hardly quicker."""
    M, N, K = shape
    a, b, out = (np.empty(of, np.float16) for of in ((M, K), (K, N), (M, N)))
    plain, = ahead.recorded(lambda: gk.matmul(a, b, out=out), H100, zeros=False)
    first, *behind = ahead.recorded(lambda: gk.matmul(a, b, out=out, epilogue=Softmax()), H100, zeros=False)
    taken = first.problem.config.block_shape.size.N
    if columns is None:
        assert len(behind) == 1 and taken == plain.problem.config.block_shape.size.N
    else:
        assert not behind and taken == columns > plain.problem.config.block_shape.size.N
