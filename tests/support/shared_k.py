"""What holds however blocks or clusters of Hopper's kernel share K: by shares that meet in a workspace, or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.epilogues import Bias, ReLU
from gemmkit.layouts import RowMajor
from gemmkit.transforms import Map
from tests.support.machines import whole
from tests.support.sm90 import F16, F32, product

F64 = np.dtype("f8")


def check_every_slot(machine: Any, configured: Callable[..., gk.Config], sizes: tuple[int, int, int],
                     rng: np.random.Generator) -> None:
    """C, a bias and transforms count once, with global coordinates. ``configured`` makes a Config of further fields."""
    m, n, k = sizes
    a, b, c = whole(rng, (m, k), F16), whole(rng, (k, n), F16), whole(rng, (m, n), F32)
    bias = whole(rng, (n,), F32)
    conf = configured(global_c_layout=RowMajor(F32), epilogue=Bias(machine.array(bias)) | ReLU(),
                      transform_global_to_shared_a=Map(lambda x: x + 1),
                      transform_regs_to_shared_d=Map(lambda x, i, j: x + i % 3 - j % 5))
    i, j = np.indices((m, n))
    expected = (a.astype(F32) + 1) @ b.astype(F32) + c + i % 3 - j % 5 + bias
    assert np.array_equal(product(machine, conf, a, b, c), expected.clip(0))


def check_stack(machine: Any, conf: gk.Config, count: int, rng: np.random.Generator) -> None:
    """``count`` products in one launch, into poisoned matrices."""
    a, b = whole(rng, (count, 70, 60), F16), whole(rng, (count, 60, 30), F16)
    out = machine.array(np.full((count, 70, 30), np.nan, F32))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
    assert np.array_equal(machine.numpy(out), a.astype(F64) @ b.astype(F64))


def check_counters(machine: Any, conf: gk.Config, sizes: Sequence[tuple[int, int, int]], rng: np.random.Generator) -> None:
    """Plans of several sizes, which find the same workspace, launched in turns: each finds counters at 0."""
    with machine.session():
        runs = []
        for m, n, k in sizes:
            a, b = machine.array(whole(rng, (m, k), F16)), machine.array(whole(rng, (k, n), F16))
            runs.append((gk.plan(a, b, None, conf), a, b))
        for _ in range(2 if machine.emulated else 20):
            for run, a, b in runs:
                expected = machine.numpy(a).astype(F64) @ machine.numpy(b).astype(F64)
                assert np.array_equal(machine.numpy(run(a, b)), expected)
        if machine.emulated:
            for run, _, _ in runs:
                assert not run._compiled.spec_on_host.exchange.counts.any()
