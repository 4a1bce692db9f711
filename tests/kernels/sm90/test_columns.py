"""A D by columns, which TMA stores as it does one by rows: in one panel a subtile, or in several where elements are wide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import Bias
from gemmkit.kernels.sm90.store import Store, TmaStore, VectorStore
from gemmkit.layouts import ColMajor
from gemmkit.operators import WGMMAOp
from tests.support.machines import BF16, on_machines, poison
from tests.support.sm90 import F16, F32, mapping

F64 = np.dtype("f8")


def stored(machine: Any, conf: gk.Config, size: tuple[int, int, int], above: int, below: int, rng: np.random.Generator,
           rows: np.ndarray | None = None) -> Store:
    """How D leaves, after it has been computed exactly into some rows of a larger array, around which nothing is written.
    ``rows`` are added to its rows."""
    M, N, K = size
    a, b = (rng.integers(-2, 3, shape).astype(F16) for shape in ((M, K), (K, N)))
    dtype = conf.global_d_layout.dtype
    larger = machine.array(poison((above + M + below, N), dtype, "F"))
    out, given = larger[above:above + M], (machine.array(a), machine.array(b))
    fields = {} if rows is None else dict(epilogue=Bias(machine.array(rows), along="M"))
    with machine.session():
        made = gk.plan(*given, None, conf, out=out, **fields)
        made(*given, out=out)
    after, want = machine.numpy(larger).astype(F64), a.astype(F64) @ b.astype(F64)
    want = want if rows is None else want + rows[:, None]
    assert np.array_equal(after[above:above + M], want.astype(dtype).astype(F64))
    assert np.isnan(after[:above]).all() and np.isnan(after[above + M:]).all()
    store = made._compiled.spec.store
    assert isinstance(store, Store)
    return store


@pytest.mark.kin(2)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong", "two-2x1"])
def test_types_and_schedules(machine: Any, schedule: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    conf = mapping(schedule, WGMMAOp(64), d=ColMajor(dtype))
    assert isinstance(stored(machine, conf, (136, 67, 40), 8, 16, rng), TmaStore)


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("M, above, below, kind", [
    (72, 8, 8, TmaStore), (72, 8, 3, VectorStore), (72, 9, 7, VectorStore), (73, 8, 7, VectorStore), (8, 0, 0, TmaStore)])
def test_what_tma_takes(machine: Any, M: int, above: int, below: int, kind: Any, rng: np.random.Generator) -> None:
    """Columns of a multiple of 16 bytes, which begin and lie apart by such; of all others each would write beyond its end."""
    conf = mapping("one", d=ColMajor(F16))
    assert type(stored(machine, conf, (M, 43, 40), above, below, rng)) is kind


@pytest.mark.kin(2)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_with_an_epilogue_and_shares_of_k(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """Where blocks share K each stores a slice of the columns."""
    conf = mapping("one", WGMMAOp(64), d=ColMajor(F32), splits=splits)
    assert isinstance(stored(machine, conf, (80, 70, 200), 4, 4, rng, np.arange(80, dtype=F32)), TmaStore)
