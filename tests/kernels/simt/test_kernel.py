"""The single-stage kernel: any legal mapping gives NumPy's result, and faults put into it are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.kernels import simt as template
from gemmkit.kernels.collectives import operand
from gemmkit.kernels.collectives.scheduler import Columns, Grouped
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.operators import FPUOp, MMAOp, WMMAOp
from gemmkit.tiling import Tile
from tests.support.machines import MACHINES, poison, reference, whole
from tests.support.patches import Seeded

# ==========================================================================================================================
# What decides the result and what only the speed: any legal mapping, drawn at random, gives NumPy's result.

OPERATORS = [MMAOp(), MMAOp(accumulator="f2"), WMMAOp(), WMMAOp(8, 32), WMMAOp(32, 8),
             WMMAOp(dtype="i1", accumulator="i4"), WMMAOp(8, 8, 4, "f8", "f8"), WMMAOp(K=8, dtype="f4"),
             *(FPUOp(m * mb, n * nb, k, mb, nb, dtype=dtype, accumulator=accumulator)
               for m, n, k, mb, nb, dtype, accumulator in ((2, 1, 1, 4, 8, "f4", "f4"), (1, 2, 2, 8, 4, "f4", "f8"),
                                                           (4, 4, 1, 4, 8, "i2", "i4"), (8, 1, 1, 2, 16, "f2", "f4")))]
KINDS = st.sampled_from([RowMajor, ColMajor])


def divisor(draw: Any, number: int, most: int = 64) -> int:
    return draw(st.sampled_from([d for d in range(1, min(number, most) + 1) if number % d == 0]))


def moves(draw: Any, name: str, tile: Tile) -> dict[str, Tile]:
    """The tiles of a warp and of a thread: any that divide the block's."""
    thread = [divisor(draw, extent, 8) for extent in tile.extents]
    if draw(st.booleans()):                                        # a line, moved at once, rather than a patch
        thread[draw(st.integers(0, 1))] = 1
    warp = [t * divisor(draw, extent // t) for t, extent in zip(thread, tile.extents)]
    return {f"mem_{name}_{what}": Tile(**dict(zip(tile.names, extents)))
            for what, extents in (("warp", warp), ("thread", thread))}


@st.composite
def configurations(draw: Any, paddings: Any) -> gk.Config:
    """``paddings`` draws a shared layout's padding from its dtype."""
    operator = draw(st.sampled_from(OPERATORS))
    m, n, k = operator.shape
    rows, columns = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]))
    warp = Tile(M=m * draw(st.integers(1, 2)), N=n * draw(st.integers(1, 2)), K=k * draw(st.integers(1, 2)))
    block = Tile(M=warp.size.M * rows, N=warp.size.N * columns, K=warp.size.K * draw(st.integers(1, 2)))
    dtypes = dict(a=operator.fragment_a.dtype, b=operator.fragment_b.dtype, c=operator.accumulator, d=operator.accumulator)
    fields: dict[str, Any] = {f"global_{name}_layout": draw(KINDS)(dtype) for name, dtype in dtypes.items()}
    for name, dtype in dtypes.items():
        fields[f"shared_{name}_layout"] = Padded(draw(KINDS)(dtype), draw(paddings(dtype)))
    for name, tile in (("a", block.MK), ("b", block.KN), ("cd", block.MN)):
        fields |= moves(draw, name, tile)
    return gk.get_config(operator=operator, block_shape=block, compute_warp=warp, warps_per_block=rows * columns,
                         order=draw(st.sampled_from([Columns(), Grouped(1), Grouped(3)])), **fields)


def check(machine: Any, conf: gk.Config, data: Any) -> None:
    """A product of random sizes, up to a little more than one block, with and without C."""
    size = conf.block_shape.size
    M, N, K = (data.draw(st.integers(1, most + 3), label=name) for name, most in
               (("M", size.M), ("N", size.N), ("K", size.K)))
    rng = np.random.default_rng(M * 10000 + N * 100 + K)

    def array(shape: tuple[int, int], layout: Any) -> np.ndarray:
        return np.asarray(whole(rng, shape, layout.dtype), order="CF"[layout.axis == 0])

    a, b, c = array((M, K), conf.global_a_layout), array((K, N), conf.global_b_layout), array((M, N), conf.global_c_layout)
    for given_c in (c, None):
        out = machine.array(poison((M, N), conf.global_d_layout.dtype, "CF"[conf.global_d_layout.axis == 0]))
        without = gk.layouts.Zero(conf.operator.accumulator)
        with machine.session():
            gk.matmul(machine.array(a), machine.array(b), None if given_c is None else machine.array(c), conf, out=out,
                      **({} if given_c is not None else dict(global_c_layout=without)))
        assert np.array_equal(machine.numpy(out), reference(a, b, given_c))


def aligned(dtype: np.dtype) -> Any:
    return st.integers(0, 3).map(lambda n: n * 16 // dtype.itemsize)


@pytest.mark.thorough
def test_any_legal_mapping_gives_the_same_result() -> None:
    @settings(max_examples=25)
    @given(configurations(aligned), st.data())
    def run(conf: gk.Config, data: Any) -> None:
        check(MACHINES["emulator"], conf, data)

    run()


@pytest.mark.kin(1)
def test_a_mapping_is_refused_or_right() -> None:
    """Paddings that suit the lines or do not: what is not refused must not fault."""
    refused, right = [], []

    @settings(max_examples=80)
    @given(st.data())
    def run(data: Any) -> None:
        try:
            conf = data.draw(configurations(lambda dtype: st.integers(0, 9)))
        except gk.ConfigError as error:
            assert "bytes long" in str(error)
            refused.append(error)
            return
        check(MACHINES["emulator"], conf, data)
        right.append(conf)

    run()
    assert refused and right


@pytest.mark.gpu
@pytest.mark.thorough
def test_any_legal_mapping_gives_the_same_result_on_the_gpu() -> None:
    # Every example compiles two kernels, so a failure is not shrunk: the emulator's test does that.
    @settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(configurations(aligned), st.data())
    def run(conf: gk.Config, data: Any) -> None:
        check(MACHINES["gpu"], conf, data)

    run()


# ==========================================================================================================================
# Faults put into the template kernel itself are found, and reported with the kernel's line, threads and address.

SMALL = dict(block_shape=gk.Tile(M=32, N=32, K=16), compute_warp=gk.Tile(M=16, N=16, K=16))


def run(m: int = 32, n: int = 32, k: int = 48, **changes: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype("f2"), rng.standard_normal((k, n)).astype("f2")
    conf = gk.get_config(**{**dict(operator=gk.operators.MMAOp(), global_a_layout=RowMajor("f2"),
                                   global_d_layout=RowMajor("f4")), **SMALL, **changes})
    out = np.full((m, n), np.nan, "f4")
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    return np.asarray(out - a.astype("f8") @ b.astype("f8"))


def drop(which: int) -> Any:
    """A barrier that is not there the ``which``-th time a thread comes to one."""
    from gemmkit.emulator import machine

    arrivals: dict[Any, int] = {}
    real = template.barrier

    def barrier() -> None:
        thread = machine.current()
        arrivals[thread] = arrivals.get(thread, -1) + 1
        if arrivals[thread] != which:
            real()

    return barrier


def test_the_kernel_is_sound() -> None:
    assert np.abs(run()).max() < 1e-3


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_every_barrier_matters(which: int, seeded: Seeded) -> None:
    seeded(template, "barrier", drop(which))
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)) as caught:
        run()
    fault = caught.value
    assert fault.kernel_line is not None and "gemmkit/" in str(fault.kernel_line.file).replace("\\", "/")
    assert fault.thread is not None and fault.address is not None
    if isinstance(fault, errors.RaceError):
        assert len({str(access.thread) for access in fault.accesses}) == 2


def test_a_missing_mask(seeded: Seeded) -> None:
    seeded(operand, "inside", lambda tile, rows, columns: True)
    with pytest.raises(errors.BoundsError, match="a|b"):
        run(m=30, n=27, k=21)


@dataclass(frozen=True)
class OffByOne(RowMajor):
    def store(self, data, tile, values, shape):
        for n in range(tile.size[1]):
            data[tile.index[0], tile.index[1] + n + 1] = values[n]


def test_an_off_by_one_store() -> None:
    with pytest.raises((errors.BoundsError, errors.RaceError)) as caught:
        run(global_d_layout=OffByOne("f4"))
    assert "test_kernel.py" in str(caught.value)
