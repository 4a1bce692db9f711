"""The kernel of rows as compiled: registers, spills, 16-byte accesses, how often a row is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions.rows import LayerNormRows, LogSoftmax, RMSNormRows, RowsLaunch, SoftmaxRows, matrix
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import disassemble, instruction_counts
from tests.functions.test_rows import FUNCTIONS, ArgMax, close
from tests.ptx_machine.launch import Ptx
from tests.support.machines import BF16, poison
from tests.support.sass import instructions

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")


def function(name: str, columns: int) -> Any:
    vector = np.ones(columns, F16)
    return {"softmax": SoftmaxRows(), "log softmax": LogSoftmax(), "layernorm": LayerNormRows(1e-5, vector, vector),
            "rmsnorm": RMSNormRows(1e-6, vector)}[name]


def launch(name: str, dtype: np.dtype, columns: int) -> RowsLaunch:
    info = matrix(describe(np.lib.stride_tricks.as_strided(np.zeros(8, dtype), (8, columns), (0, dtype.itemsize)), "x"), "x")
    info = info._replace(pointer=256, strides=(columns, 1))
    return RowsLaunch(info, info._replace(pointer=2**30), function(name, columns))


@pytest.mark.compile
@pytest.mark.sample(80)
@pytest.mark.parametrize("shape", [(5, 1), (3, 31), (6, 96), (1, 1100), (2, 4608)])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_was_compiled_computes(name: str, dtype: np.dtype, shape: tuple[int, int], rng: np.random.Generator) -> None:
    """The kernel's PTX, all threads in step, against NumPy in float64."""
    ours, numpy = FUNCTIONS[name]
    x, out = rng.standard_normal(shape).astype(dtype), poison(shape, dtype)
    with Ptx().session():
        ours(x, out=out)
    expected = numpy(x.astype(np.float64))
    close(out, expected, dtype, max(F32, dtype, key=lambda d: d.itemsize))


@pytest.mark.kin(1)
@pytest.mark.compile
def test_arrays_of_functions_are_arguments(rng: np.random.Generator) -> None:
    x, where = rng.permutation(3 * 77).reshape(3, 77).astype(F32), poison((3,), np.int32)
    with Ptx().session():
        gk.rowwise(x, ArgMax(where), out=x)                            # in place
    assert (x == 0).sum() >= 3 and np.array_equal(np.take_along_axis(x, where[:, None].astype(int), 1), np.zeros((3, 1)))


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_what_lies_beside_a_piece_is_loaded_ahead(dtype: np.dtype) -> None:
    """A layer norm's gamma and beta of a piece in front of the store of the piece before; and warps meet twice, at the places of
    what they exchange and with all that is there."""
    made = launch("layernorm", dtype, 16384)
    found = [line.split()[0] for line in instructions(disassemble(made.launchable.entry().cubin))
             if line.startswith(("LDG", "STG", "BAR"))]
    assert [x[:3] for x in found].count("BAR") == 2
    pieces, behind = made.spec.source.pieces, [x[:3] for x in found]
    stores = [n for n, x in enumerate(behind) if x == "STG"]
    assert len(stores) == pieces == 4
    for piece, at in enumerate(stores):
        assert behind[:at].count("LDG") >= pieces + 2 * min(piece + 2, pieces)


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(72)
@pytest.mark.parametrize("columns", [768, 1024, 4096, 16384, 32768, 65536])
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log softmax", "layernorm", "rmsnorm"])
def test_rows_compile(name: str, dtype: np.dtype, columns: int) -> None:
    made = launch(name, dtype, columns)
    entry = made.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert usage["registers"] * made.spec.team.block <= 65536
    counts = instruction_counts(disassemble(entry.cubin), full=True)
    wide = {kind: sum(n for op, n in counts.items() if op.startswith(kind) and "128" in op) for kind in ("LDG", "STG")}
    narrow = [op for op in counts if op.startswith(("LDG", "STG")) and "128" not in op]
    pieces = getattr(made.spec.source, "pieces", 1)
    beside = {"layernorm": 2, "rmsnorm": 1}.get(name, 0) * pieces
    reads = {"softmax": 3, "log softmax": 3, "layernorm": 3, "rmsnorm": 2}[name] if not hasattr(made.spec.source, "pieces") else 1
    if dtype == F16 and hasattr(made.spec.source, "pieces"):
        assert wide == {"LDG": pieces * reads + beside, "STG": pieces} and not narrow
    else:                                              # gamma and beta of 16 bits come in shorter accesses beside wider elements
        assert wide["STG"] >= pieces and wide["LDG"] >= pieces * reads
