"""Derived functions of rows as compiled: the PTX computes what the reference does, nothing spills, a row is read once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.runtime.compile import disassemble, instruction_counts
from tests.ptx_machine.launch import Ptx
from tests.support import row_programs as listing
from tests.support.row_programs import BF16, F16, F32
from tests.unit.programs.test_row_programs import close

pytestmark = pytest.mark.compile


def computed(program: Any, *arrays: np.ndarray, ulps: float = 40.0, **more: Any) -> None:
    """The kernel's PTX, all threads in step, against NumPy in float64."""
    arguments = program.bound(arrays, more)
    plan = program.plan(*arrays, **more)
    with Ptx().session():
        plan.run(arguments)
    wanted = program.reference(*arrays, **more)
    results = [array for name, array in arguments.items() if name in plan.printed.outs]
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        close(got, exact, ulps)


def empty(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


@pytest.mark.sample(15)
@pytest.mark.parametrize("shape", [(5, 1), (3, 31), (6, 96), (1, 1100), (2, 4608)], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_what_was_compiled_computes(dtype: Any, shape: tuple[int, int], rng: np.random.Generator) -> None:
    m, n = shape

    def drawn(*shape: int) -> np.ndarray:
        return (2 * rng.standard_normal(shape) + 0.5).astype(dtype)

    computed(listing.softmax, drawn(m, n), empty(m, n, dtype=dtype), scale=0.5)
    computed(listing.layernorm, drawn(m, n), drawn(n), drawn(n), empty(m, n, dtype=F32), eps=0.1)
    computed(listing.added_rmsnorm, drawn(m, n), drawn(m, n), drawn(n), empty(m, n, dtype=F32), empty(m, n), empty(m), eps=0.1)
    computed(listing.stacked, drawn(2, m, n), drawn(2, n), drawn(2), drawn(2, m), empty(2, m, n), empty(2, m))
    if n < 100:
        computed(listing.causal_softmax, drawn(n, n), empty(n, n), empty(n, dtype=F32))
        computed(listing.quantised, drawn(m, n), empty(m, n), empty(m))
        computed(listing.corners, drawn(m, n), drawn(n), empty(m, n, dtype=F32), empty(m, n, dtype=F32), empty(m), alpha=0.5)


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(40))
def test_drawn(seed: int) -> None:
    program, arrays, more = listing.drawn_rows(seed)
    computed(program, *arrays, ulps=2000, **more)


CASES: dict[str, Any] = {
    "layernorm": (listing.layernorm, lambda n: [empty(8, n), empty(n), empty(n), empty(8, n)], dict(eps=0.1), 1),
    "layernorm, f32": (listing.layernorm, lambda n: [empty(8, n, dtype=F32), empty(n, dtype=F32), empty(n, dtype=F32),
                                                     empty(8, n, dtype=F32)], dict(eps=0.1), 1),
    "layernorm, wide": (listing.layernorm, lambda n: [empty(8, n), empty(n, dtype=F32), empty(n, dtype=F32), empty(8, n)],
                        dict(eps=0.1), 1),
    "softmax": (listing.softmax, lambda n: [empty(8, n), empty(8, n)], dict(scale=0.5), 1),
    "softmax, bf16": (listing.softmax, lambda n: [empty(8, n, dtype=BF16), empty(8, n, dtype=BF16)], dict(scale=0.5), 1),
    "added": (listing.added_rmsnorm, lambda n: [empty(8, n), empty(8, n), empty(n), empty(8, n), empty(8, n), empty(8, dtype=F32)],
              dict(eps=0.1), 2),
    "gradient": (listing.layernorm_gradient, lambda n: [empty(8, n), empty(8, n), empty(n), empty(8, dtype=F32), empty(8, dtype=F32),
                                                        empty(8, n)], {}, 2),
}


@pytest.mark.sample(27)
@pytest.mark.parametrize("columns", [768, 1024, 4096, 16384, 32768, 65536])
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str, columns: int) -> None:
    program, arrays, more, read = CASES[name]
    plan = program.plan(*arrays(columns), **more)
    entry = plan.launchable.entry()
    usage, source = entry.meta["usage"], plan.module.ROWS.source
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert usage["registers"] * plan.launchable.threads <= 65536
    counts = instruction_counts(disassemble(entry.cubin), full=True)
    assert not any(op.startswith(("LDL", "STL")) for op in counts)
    stores = sum(n for op, n in counts.items() if op.startswith("STG") and "128" in op)
    loads = sum(n for op, n in counts.items() if op.startswith("LDG") and "128" in op)
    pieces, results = getattr(source, "pieces", 1), sum(info.shape == (8, columns) for key, info in plan.infos.items()
                                                        if key in plan.printed.outs)
    assert stores >= pieces * results
    if hasattr(source, "pieces"):                      # a row is read once; beside it come arrays by columns
        assert stores == pieces * results
        along = {"softmax": 0, "softmax, bf16": 0, "added": 1, "gradient": 1}.get(name, 2)
        most = pieces * (read + along * (2 if name in ("layernorm, wide", "gradient") else 1))
        assert pieces * read <= loads <= most
