"""Faults put into the template kernel itself are found, and reported with the kernel's line, threads and address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.kernels import simt as template
from gemmkit.kernels.collectives import operand
from gemmkit.layouts import RowMajor

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
def test_every_barrier_matters(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "barrier", drop(which))
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)) as caught:
        run()
    fault = caught.value
    assert fault.kernel_line is not None and "gemmkit/" in str(fault.kernel_line.file).replace("\\", "/")
    assert fault.thread is not None and fault.address is not None
    if isinstance(fault, errors.RaceError):
        assert len({str(access.thread) for access in fault.accesses}) == 2


def test_a_missing_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand, "inside", lambda tile, rows, columns: True)
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
    assert "test_faults.py" in str(caught.value)
