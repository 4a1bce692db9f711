"""`gemmkit.tune` of contractions and groups: what is tried is what these calls launch, and what is kept is what they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import operators
from gemmkit.functions import einsum
from gemmkit.functions.grouped import GroupPlan, Tables, resolved
from gemmkit.lang.memory import PLACES
from gemmkit.plans.plan import Plan
from gemmkit.runtime.arrays import describe_all
from gemmkit.tuner.measure import group_job_of, group_memory_of
from gemmkit.tuner.subjects import subject_of
from gemmkit.tuner.tuner import tune
from gemmkit.tuning.candidates import Candidate
from tests.support.on_device import OnDevice
from tests.unit.tuner.test_search import Measured, folder, measured

__all__ = ["folder", "measured"]

F16 = np.float16
SPEC = "ikjl,mlk->imj"
SIZES = (96, 80, 64), (33, 17, 40), (0, 8, 8), (128, 200, 32)


def tensors() -> tuple[OnDevice, OnDevice, OnDevice]:
    i, j, k, m, l_ = 6, 16, 12, 40, 8
    return OnDevice(np.zeros((i, k, j, l_), F16)), OnDevice(np.zeros((m, l_, k), F16)), OnDevice(np.zeros((i, m, j), F16))


def group(sizes: Any = SIZES) -> tuple[list[OnDevice], list[OnDevice], list[OnDevice]]:
    return tuple([OnDevice(np.zeros(shape(*of), F16)) for of in sizes]                          # type: ignore[return-value]
                 for shape in (lambda m, n, k: (m, k), lambda m, n, k: (k, n), lambda m, n, k: (m, n)))


def planned(a: Any, b: Any, out: Any) -> gk.Config:
    """What `einsum` plans."""
    x, y, d, keywords = einsum.as_product(SPEC, a, b, out=out)
    return Plan(x, y, None, d, None, keywords).config


def test_the_fastest_of_a_contraction_is_taken_next_time(folder: Path, measured: Any) -> None:
    process: Measured = measured(lambda number: 50.0 if number == 3 else 80.0 + number)
    a, b, out = tensors()
    einsum._plans["another"] = None                                                        # type: ignore[assignment]
    found = tune(gk.einsum, SPEC, a, b, out=out)
    assert found.best.ratio == pytest.approx(2.0) and found.kept and process.is_closed
    assert str(found).startswith(f"einsum({SPEC!r}): ") and not einsum._plans
    assert planned(a, b, out).mapping == found.config.mapping != found.default.config.mapping    # type: ignore[union-attr]
    assert planned(*tensors()).mapping == found.config.mapping                                   # other arrays of the kind


def test_conflicting_contractions_are_tried_in_boxes(folder: Path, measured: Any) -> None:
    """Of operands that are contiguous along different indices of K; the entry says which is the combed one."""
    measured(lambda number: 50.0 if number == 2 else 90.0)
    a, b, out = (OnDevice(np.zeros(shape, F16)) for shape in ((192, 240, 160), (192, 160, 240), (192, 192)))
    found = tune(gk.einsum, "iqp,jpq->ij", a, b, out=out)
    boxed = [row for row in found.rows if row.candidate is not None and row.candidate.boxed == "b"]
    assert len(boxed) > 3 and all(isinstance(row.config.operator, operators.BoxMMAOp) for row in boxed if row.config)
    assert any(row.name.endswith("boxes of b") for row in boxed) and found.kept
    (file,) = (folder / "tuned").glob("*.json")
    (entry,) = json.loads(file.read_text())["entries"].values()
    assert entry["mapping"].get("boxed") == (found.best.candidate and found.best.candidate.boxed)
    x, y, d, keywords = einsum.as_product("iqp,jpq->ij", a, b, out=out)
    assert Plan(x, y, None, d, None, keywords).config.mapping == found.config.mapping


def test_an_einsum_of_matrices_is_a_product(folder: Path, measured: Any) -> None:
    """What is found for it is found for `matmul`."""
    measured(lambda number: 50.0)
    a, b, out = (OnDevice(np.zeros(shape, F16)) for shape in ((256, 128), (128, 64), (256, 64)))
    found = tune(gk.einsum, "ij,jk->ik", a, b, out=out)
    assert found.best is not found.default and Plan(a, b, None, out, None, {}).config.mapping == found.config.mapping


def test_the_fastest_of_a_group_is_taken_next_time(folder: Path, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process: Measured = measured(lambda number: 50.0 if number == 3 else 80.0 + number)
    real = process.result
    monkeypatch.setattr(process, "result", lambda number, seconds: real(number, seconds))
    a, b, out = group()
    found = tune(gk.grouped, a, b, out=out)
    assert found.best.ratio == pytest.approx(2.0) and found.kept and str(found).startswith("a group of 4 products up to 128 x 200 x 32")
    tried = [row for row in found.rows if row.candidate is not None and row.ratio is not None]
    assert len(tried) >= 4 and all(row.config.splits == 1 and row.config.kernel != "warp_specialised" for row in tried)      # type: ignore[union-attr]
    taken = GroupPlan(*group()[:2], None, group()[2], None, {}).config
    assert taken.mapping == found.config.mapping != found.default.config.mapping                 # type: ignore[union-attr]
    other = GroupPlan(*group(SIZES[:2])[:2], None, group(SIZES[:2])[2], None, {}).config
    assert other.mapping == found.default.config.mapping                                         # type: ignore[union-attr]
    (file,) = (folder / "tuned").glob("*.json")
    assert len(json.loads(file.read_text())["entries"]) == 1


def test_a_tuned_group_that_no_kernel_takes(folder: Path, measured: Any) -> None:
    """An entry of another kernel is told of, and the default taken."""
    measured(lambda number: 50.0)
    a, b, out = group()
    found = tune(gk.grouped, a, b, out=out)
    (file,) = (folder / "tuned").glob("*.json")
    held = json.loads(file.read_text())
    (entry,) = held["entries"].values()
    entry["mapping"]["block"] = [64, 63, 64]
    file.write_text(json.dumps(held))
    with pytest.warns(RuntimeWarning, match="cannot be used, the default is taken instead"):
        taken = GroupPlan(a, b, None, out, None, {}).config
    assert taken.mapping == found.default.config.mapping                                         # type: ignore[union-attr]


def test_a_job_of_a_group_is_its_launch(folder: Path) -> None:
    """The tables with the addresses put in are those of the plan."""
    a, b, out = group()
    plan = GroupPlan(a, b, out, out, None, {})
    made = plan._compiled
    memory = group_memory_of(made)
    job = group_job_of(made, memory, b"cubin")
    assert (job.blocks, job.threads, job.values) == (made.blocks, made.config.threads, tuple(made.launchable.values))
    assert sorted(slot for table in job.tables for slot in table.slots) == sorted(space.slot for space in made.spaces)
    packed, (starts, _) = made.tables.packed(Tables.places(plan.infos)), made.tables.starts
    for role, table in zip(starts, job.tables, strict=True):
        content = bytearray(table.content)
        for offset, pointer in table.addresses:
            at = memory.buffers[pointer.buffer].start + pointer.offset
            assert content[offset:offset + 8] == at.to_bytes(8, "little") and offset % (8 * PLACES) == 0
        assert content == packed[starts[role]:starts[role] + len(content)].tobytes()
        assert len(table.addresses) == (3 * 4 + 1 if role == "places" else 0)                     # b of the empty one has elements
    written = [buffer for buffer in memory.buffers if buffer.is_written and buffer.nbytes]
    assert len(written) == 3 and all(buffer.is_read for buffer in written)                        # c is out


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((sum, 1, 2), TypeError, r"tune\('sum', ...\): matmul, einsum and grouped"),
    ((gk.einsum, "ij,jk,kl->il", *[np.zeros((4, 4), F16)] * 3), ValueError, "of 3 operands is several products"),
    ((gk.einsum, 3, np.zeros((4, 4), F16)), TypeError, "spec=3"),
    ((gk.grouped, [], []), ValueError, "a_list is empty"),
], ids=["another function", "three operands", "no spec", "an empty group"])
def test_bad_calls(folder: Path, arguments: tuple, error: type, message: str) -> None:
    given = [OnDevice(x) if isinstance(x, np.ndarray) else x for x in arguments]
    with pytest.raises(error, match=message):
        tune(*given)


def test_a_group_has_no_conf(folder: Path) -> None:
    a, b, out = group()
    with pytest.raises(TypeError, match="conf= is a mapping already"):
        tune(gk.grouped, a, b, out=out, conf=gk.get_config(operator=operators.MMAOp(), global_a_layout=gk.layouts.RowMajor(F16)))


def test_nothing_to_compute(folder: Path, measured: Any) -> None:
    measured(lambda number: 50.0)
    a, b, out = group(SIZES[2:3])
    with pytest.raises(ValueError, match="there is nothing to compute"):
        tune(gk.grouped, a, b, out=out)


def test_matmul_by_name(folder: Path) -> None:
    """``tune(matmul, a, b)`` is ``tune(a, b)``."""
    a, b = (OnDevice(np.zeros((64, 64), F16)) for _ in "ab")
    out = OnDevice(np.zeros((64, 64), F16))
    assert subject_of((gk.matmul, a, b), dict(out=out)).key() == subject_of((a, b), dict(out=out)).key()


def test_a_group_with_a_precision_takes_a_candidate() -> None:
    """Candidates of a group for which ``precision=`` is given were refused with a TypeError."""
    a = np.ones((64, 64), np.float32)
    tried = Candidate("multistage", (64, 64, 32), (32, 32), stages=3)
    with gk.emulate():
        infos = [describe_all(a, a, None, None)] * 2
        taken, usual = (resolved(infos, None, {"precision": "tf32"}, one)[0].config for one in (tried, None))
    assert taken.block_shape.extents == (64, 64, 32) and taken.stages == 3
    assert taken.operator == usual.operator == operators.MMAOp(dtype="float32")
