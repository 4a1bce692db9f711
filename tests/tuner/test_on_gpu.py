"""`gemmkit.tune` on a GPU: what it measures is right, what it keeps is what `matmul` takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.plans.launch import forget
from gemmkit.runtime import cache
from gemmkit.tuner import subjects
from gemmkit.tuner.measure import Job
from tests.support.machines import Gpu
from tests.support.patches import Seeded

pytestmark = pytest.mark.gpu


@pytest.fixture
def folder(own_cache: Path, tmp_path: Path) -> Iterator[Path]:
    forget()
    yield tmp_path
    cache.default_cache.cache_clear()
    forget()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("dtype", "sizes"), [("f2", (512, 384, 256)), ("f4", (257, 130, 515)), ("f8", (256, 256, 256)),
                                              ("f2", (64, 64, 16384))], ids=str)
def test_what_it_finds_is_right_and_taken(folder: Path, dtype: str, sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    machine, (m, n, k) = Gpu(), sizes
    a, b = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((m, k), (k, n)))
    of_a, of_b = machine.array(a), machine.array(b)
    found = gk.tune(of_a, of_b, budget=90, jobs=os.cpu_count())
    timed = [row for row in found.rows if row.ratio is not None]
    assert len(timed) > 4 and not [row for row in found.rows if row.error and not row.error.startswith("not ")], str(found)
    assert all(0.01 < row.ratio < 100 and row.microseconds > 0.5 for row in timed) and found.kept          # type: ignore[operator]
    assert gk.plan(of_a, of_b).config.mapping == found.config.mapping
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(machine.numpy(gk.matmul(of_a, of_b)), expected.astype(dtype))
    assert np.array_equal(machine.numpy(gk.matmul(of_a, of_b, conf=found.config)), expected.astype(dtype))


@pytest.mark.thorough
def test_epilogues_with_arrays(folder: Path, rng: np.random.Generator) -> None:
    machine = Gpu()
    a, b, bias = (rng.integers(-3, 4, shape).astype("f4") for shape in ((128, 64), (64, 96), (96,)))
    epilogue = gk.epilogues.Bias(machine.array(bias))
    found = gk.tune(machine.array(a), machine.array(b), epilogue=epilogue, budget=60)
    assert [row for row in found.rows if row.ratio is not None] and not [r for r in found.rows if str(r.error).startswith("wrong")]
    d = gk.matmul(machine.array(a), machine.array(b), epilogue=epilogue)
    assert np.array_equal(machine.numpy(d), a @ b + bias)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["ijk,kjl->il", "iqp,jpq->ij"])
def test_contractions(folder: Path, spec: str, rng: np.random.Generator) -> None:
    """Of the second A and B are contiguous along different indices of K."""
    machine, extents = Gpu(), dict(i=40, j=48, k=32, l=24, p=16, q=24)
    terms, result = spec.split("->")
    a, b = (rng.integers(-2, 3, [extents[x] for x in term]).astype("f2") for term in terms.split(","))
    out = machine.array(np.zeros([extents[x] for x in result], "f2"))
    of_a, of_b = machine.array(a), machine.array(b)
    found = gk.tune(gk.einsum, spec, of_a, of_b, out=out, budget=60, jobs=os.cpu_count())
    assert len([row for row in found.rows if row.ratio is not None]) > 4 and found.kept, str(found)
    assert not [row for row in found.rows if row.error and not row.error.startswith("not ")], str(found)
    gk.einsum(spec, of_a, of_b, out=out)
    assert np.array_equal(machine.numpy(out), np.einsum(spec, a.astype("f8"), b.astype("f8")).astype("f2"))


@pytest.mark.thorough
def test_groups(folder: Path, rng: np.random.Generator) -> None:
    """One empty product, and one of odd sizes."""
    machine, sizes = Gpu(), ((96, 80, 64), (33, 17, 40), (0, 8, 8), (128, 200, 32))
    a, b = ([rng.integers(-2, 3, shape(m, n, k)).astype("f2") for m, n, k in sizes]
            for shape in (lambda m, n, k: (m, k), lambda m, n, k: (k, n)))
    of_a, of_b = ([machine.array(x) for x in xs] for xs in (a, b))
    found = gk.tune(gk.grouped, of_a, of_b, budget=60, jobs=os.cpu_count())
    assert len([row for row in found.rows if row.ratio is not None]) > 4 and found.kept, str(found)
    assert not [row for row in found.rows if row.error and not row.error.startswith("not ")], str(found)
    for d, x, y in zip(gk.grouped(of_a, of_b), a, b):
        assert np.array_equal(machine.numpy(d), (x.astype("f8") @ y.astype("f8")).astype("f2"))


def test_a_candidate_that_faults_or_is_wrong_harms_nothing(folder: Path, replaced: Seeded, rng: np.random.Generator) -> None:
    """One candidate writes beside its result, one to address 0: both are told, the rest is timed, and this process's context
    is as it was."""
    machine, real, count = Gpu(), subjects.job_of, iter(range(1000))

    def job_of(compiled: Any, memory: Any, cubin: bytes) -> Job:
        import dataclasses

        job, number = real(compiled, memory, cubin), next(count)
        if number == 1:
            return dataclasses.replace(job, pointers=(), maps=())
        return job

    replaced(subjects, "job_of", job_of)
    a, b = (rng.integers(-3, 4, shape).astype("f4") for shape in ((128, 64), (64, 96)))
    of_a, of_b = machine.array(a), machine.array(b)
    found = gk.tune(of_a, of_b, budget=90)
    errors = [row.error for row in found.rows if row.error and row.error.startswith(("failed", "wrong"))]
    assert len(errors) == 1 and "ILLEGAL_ADDRESS" in str(errors[0]) and len([r for r in found.rows if r.ratio]) > 3
    assert np.array_equal(machine.numpy(gk.matmul(of_a, of_b)), a @ b)
