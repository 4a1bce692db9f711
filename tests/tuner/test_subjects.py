"""`tune` of contractions, groups and programs: what is tried is what these calls launch, and what is kept is what they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import operators
from gemmkit.functions import einsum
from gemmkit.functions.grouped import GroupPlan, GroupTables, resolved
from gemmkit.lang.memory import PLACES
from gemmkit.plans.ahead import Made, recorded
from gemmkit.plans.plan import Plan
from gemmkit.programs.launches import BEGIN
from gemmkit.programs.mapping import KERNELS
from gemmkit.runtime.arrays import describe, describe_all
from gemmkit.tuner import TunedProgram
from gemmkit.tuner import tuner as module
from gemmkit.tuner.measure import Failed, group_job_of, memory_of
from gemmkit.tuner.subjects import Programmed, listed
from gemmkit.tuner.tuner import Effort, subject_of, tune
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate
from tests.support import chains, row_programs
from tests.support import programs as listing
from tests.support.on_device import OnDevice
from tests.support.patches import Seeded
from tests.tuner.test_search import Measured, folder, measured

# ==========================================================================================================================
# `gemmkit.tune` of contractions and groups: what is tried is what these calls launch, and what is kept is what they take.

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


def test_a_tuned_contraction_is_not_reordered(folder: Path, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is the product that gathers its operands."""
    measured(lambda number: 50.0 if number == 3 else 80.0 + number)
    monkeypatch.setattr(einsum, "RATES", {"float16": (1e9, 1e-9, 1e-9)})
    einsum._reordering.cache_clear()
    host = [np.zeros(x.shape, F16) for x in tensors()]
    assert len(recorded(lambda: gk.einsum(SPEC, *host[:2], out=host[2]))) > 1
    a, b, out = tensors()
    found = tune(gk.einsum, SPEC, a, b, out=out)
    (made,) = recorded(lambda: gk.einsum(SPEC, *host[:2], out=host[2]))
    assert made.problem.config.mapping == found.config.mapping                              # type: ignore[union-attr]
    einsum._reordering.cache_clear()


def test_an_einsum_of_matrices_is_a_product(folder: Path, measured: Any) -> None:
    """What is found for it is found for `matmul`."""
    measured(lambda number: 50.0)
    a, b, out = (OnDevice(np.zeros(shape, F16)) for shape in ((256, 128), (128, 64), (256, 64)))
    found = tune(gk.einsum, "ij,jk->ik", a, b, out=out)
    assert found.best is not found.default and Plan(a, b, None, out, None, {}).config.mapping == found.config.mapping


def test_the_fastest_of_a_group_is_taken_next_time(folder: Path, measured: Any) -> None:
    measured(lambda number: 50.0 if number == 3 else 80.0 + number)
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
    memory = memory_of(made)
    job = group_job_of(made, memory, b"cubin")
    assert (job.blocks, job.threads, job.values) == (made.blocks, made.config.threads, tuple(made.launchable.values))
    assert sorted(slot for table in job.tables for slot in table.slots) == sorted(space.slot for space in made.spaces)
    packed, (starts, _) = made.tables.packed(GroupTables.places(plan.infos)), made.tables.starts
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


# ==========================================================================================================================
# `tune` of programs: which mappings are tried, what is kept, and that calls without a mapping take it.

F32 = np.float32


def half(*shape: int, dtype: Any = F16) -> OnDevice:
    return OnDevice(np.zeros(shape, dtype))


def product(m: int = 512, n: int = 512, k: int = 256) -> tuple[OnDevice, ...]:
    return half(m, k), half(k, n), half(m, n)


def heads() -> tuple[OnDevice, ...]:
    return tuple(half(2, 512, 64) for _ in range(4))


def test_the_fastest_is_kept_and_taken_next_time(folder: Path, measured: Any) -> None:
    process: Measured = measured(lambda number: 50.0 if number == 4 else 80.0 + number)
    arrays = product()
    default = listing.gemm.plan(*arrays)
    found = listing.gemm.tune(*arrays)
    assert isinstance(found, TunedProgram) and found.best.ratio == pytest.approx(2.0) and found.kept and process.is_closed
    assert str(found).startswith("gemm: a 512x256 float16, b 256x512 float16, d 512x512 float16, on ")
    taken = listing.gemm.plan(*arrays)
    assert taken.mapping == found.mapping != default.mapping and taken.text != default.text
    assert listing.gemm.plan(*product()).text == taken.text                # other arrays of the kind
    assert listing.gemm.plan(*arrays, mapping=eval(repr(found.mapping), {"Mapping": gk.Mapping})).text == taken.text
    assert listing.gemm.plan(*arrays, mapping=gk.Mapping()).text == default.text
    with store.unread():
        assert listing.gemm.plan(*arrays).text == default.text
    assert listing.gemm.plan(*product(m=520)).mapping == default.mapping    # other sizes are another entry
    (entry,) = json.loads(next((folder / "tuned").glob("*.json")).read_text())["entries"].values()
    assert entry["name"] == found.best.name and entry["ratio"] == pytest.approx(2.0)


def test_a_call_takes_what_is_kept(folder: Path, measured: Any, replaced: Seeded) -> None:
    measured(lambda number: 50.0 if number == 2 else 90.0)
    arrays = product()
    found = gk.tune(listing.gemm, *arrays)
    ran: list[Any] = []
    replaced("gemmkit.programs.calls.KnownProgram.keep", lambda self, program, seen: None)
    replaced("gemmkit.programs.plan.ProgramPlan.run", lambda self, *given: ran.append(self.mapping))
    listing.gemm(*arrays)
    assert ran == [found.mapping]                                           # type: ignore[attr-defined]


@pytest.mark.kin(1)
def test_each_kernel_is_tried_once_and_what_cannot_be_is_told(folder: Path, measured: Any) -> None:
    process: Measured = measured(lambda number: 90.0)
    found = listing.gemm.tune(*product(), effort="full")
    timed = [row for row in found.rows if row.ratio is not None]
    texts = [listing.gemm.plan(*product(), mapping=row.config).text for row in timed]
    assert len(set(texts)) == len(timed) == len(process.order) > 30
    refused = {row.name: row.error for row in found.rows if row.ratio is None}
    assert {"Mapping(cluster={'m': 2})", "Mapping({'n': 128}, cluster={'m': 2})"} <= {row.name for row in timed}
    assert "128 columns fit in registers" in str(refused["Mapping({'n': 256}, warpgroups=3)"])
    assert "bytes of shared memory" in str(refused["Mapping({'n': 192}, warpgroups=2, stages=6)"])
    assert all(str(error).startswith("not legal: ") for error in refused.values())
    assert all(error in str(found) for error in map(str, refused.values()))


@pytest.mark.kin(1)
def test_a_chain_has_orders_to_try(folder: Path, measured: Any) -> None:
    measured(lambda number: 90.0)
    found = listing.attention.tune(*heads(), 0.125)
    names = [row.name for row in found.rows]
    assert {"Mapping({'n': 96})", "Mapping(warpgroups=1)", "Mapping(ahead=False)", "Mapping(descending=False)"} <= set(names)
    assert "Mapping(descending=True)" not in names                          # the default again
    (longest,) = (row for row in found.rows if row.name == "Mapping(longest_first=True)")
    assert "the length of a tile does not grow" in str(longest.error)
    assert found.mapping.stages != 0 and found.mapping.ahead is not None     # all is said


def test_a_list_of_ones_own(folder: Path, measured: Any) -> None:
    measured(lambda number: 70.0)
    mine = [gk.Mapping(stages=2), gk.Mapping({"n": 72}), gk.Mapping({"n": 128})]
    found = listing.gemm.tune(*product(), mappings=mine)
    assert sorted(row.name for row in found.rows) == sorted([*map(repr, mine), "default"])
    assert "64, 128, 192 or 256 is needed" in str(found) and found.mapping in (row.config for row in found.rows[:2])
    assert found.rows[2] is found.default and found.default.ratio == 1.0     # which is no finalist
    for wrong in (gk.Mapping(), [3]):
        with pytest.raises(TypeError, match="a list of instances of gemmkit.Mapping is needed"):
            listing.gemm.tune(*product(), mappings=wrong)                   # type: ignore[arg-type]


def test_candidates_that_fail_are_told_and_nothing_is_lost(folder: Path, measured: Any) -> None:
    outcomes: dict[int, Any] = {1: Failed("CUDA_ERROR_ILLEGAL_ADDRESS"), 2: "wrong"}
    measured(lambda number: outcomes.get(number, 90.0))
    found = listing.gemm.tune(*product())
    errors = " ".join(str(row.error) for row in found.rows)
    assert "failed: CUDA_ERROR_ILLEGAL_ADDRESS" in errors and "wrong: d: elements differ by up to 1, the largest is 2" in errors
    assert found.best.ratio == pytest.approx(100 / 90) and found.kept


def test_an_interruption_keeps_what_was_measured(folder: Path, measured: Any) -> None:
    measured(lambda number: KeyboardInterrupt() if number == 4 else 70.0)
    found = listing.gemm.tune(*product())
    assert found.kept and found.best.ratio == pytest.approx(100 / 70) and "interrupted" in str(found)
    assert listing.gemm.plan(*product()).mapping == found.mapping


def test_an_interruption_while_mappings_are_derived(folder: Path, measured: Any, replaced: Seeded) -> None:
    measured(lambda number: 70.0)
    real, count = Programmed.tried, [0]

    def tried(self: Programmed, candidate: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return real(self, candidate)

    replaced(Programmed, "tried", tried)
    found = listing.gemm.tune(*product())
    assert found.best is found.default and not found.kept and "interrupted" in str(found)


def test_a_budget_of_nothing(folder: Path, measured: Any) -> None:
    measured(lambda number: 1.0)
    found = listing.gemm.tune(*product(), budget=0)
    assert found.best is found.default and not found.kept and len(found.rows) == 1
    assert found.notes == ("a budget of 0 seconds: nothing was tried",) and not (folder / "tuned").exists()
    assert found.mapping == listing.gemm.plan(*product()).mapping


def test_an_entry_that_no_kernel_takes(folder: Path, measured: Any) -> None:
    measured(lambda number: 50.0)
    default = listing.gemm.plan(*product())
    listing.gemm.tune(*product())
    (file,) = (folder / "tuned").glob("*.json")
    held = json.loads(file.read_text())
    (entry,) = held["entries"].values()
    for mapping, words in (({"blocks": {"n": 72}}, "the default is taken instead"), ({"evil": 1}, "is not a mapping of a program"),
                           ([1], "is not a mapping of a program")):
        entry["mapping"] = mapping
        file.write_text(json.dumps(held))
        with pytest.warns(RuntimeWarning, match=words):
            assert listing.gemm.plan(*product()).text == default.text


@pytest.mark.kin(1)
def test_components_and_the_signs_of_numbers_are_part_of_it(folder: Path, measured: Any) -> None:
    measured(lambda number: 50.0 if number == 1 else 90.0)
    a, b, d = product()
    found = listing.dual.tune(a, b, half(256, 512), d, gate=listing.silu_times)
    assert found.kept
    other = listing.dual.plan(a, b, half(256, 512), d, gate=lambda x, y: x * y)
    assert other.mapping == found.default.config != found.mapping


def test_a_job_is_the_plans_launch(folder: Path) -> None:
    """Addresses, maps and all other values; results are written, and what is only read is not."""
    arrays = (*product()[:2], half(512), half(512, dtype=F32), half(512, 512, dtype=F32))
    subject = Programmed(listing.biased, *arrays, alpha=0.5)
    memory, plan = subject.memory(), subject.default
    job = subject.job(plan, memory, (b"cubin",))
    kernel = plan.launchable
    assert (job.blocks, job.threads, job.shared_bytes) == (kernel.blocks, kernel.threads, kernel.shared_bytes)
    slots = {slot: memory.buffers[at.buffer].start + at.offset for slot, at in job.pointers}
    taken = [argument.array for argument in plan.taken]
    assert slots == {kernel.slot(taken.index(name) + 1): describe(array, name).pointer
                     for name, array in zip(("bias", "scale", "d"), arrays[2:])}
    assert [slot for slot, _, _ in job.maps] == [kernel.slot(1), kernel.slot(2)]
    others = [n for n in range(len(job.values)) if n not in slots and n not in dict((slot, 0) for slot, _, _ in job.maps)]
    assert all(job.values[n] == kernel.values[n] for n in others) and len(job.varied) == 5
    assert [buffer.is_written for buffer in memory.buffers].count(True) == 1


def decoding(rows: int = 16, keys: int = 32768) -> tuple[OnDevice, ...]:
    return tuple(half(8, extent, 128) for extent in (rows, keys, keys, rows))


@pytest.mark.kin(1)
def test_numbers_of_shares_are_tried(folder: Path, measured: Any) -> None:
    """Where rounds are split by default, the nearest numbers come before all else; the fastest is taken next time."""
    process: Measured = measured(lambda number: 50.0 if number == 2 else 90.0)
    arrays = decoding()
    default = listing.attention.plan(*arrays, 0.09)
    found = listing.attention.tune(*arrays, 0.09)
    assert default.mapping.splits == 16 and process.is_closed
    assert found.best.name == "Mapping(splits=32)" and found.mapping.splits == 32 and found.best.ratio == pytest.approx(2.0)
    taken = listing.attention.plan(*arrays, 0.09)
    assert taken.merge is not None and taken.mapping.splits == 32
    assert {f"Mapping(splits={count})" for count in (8, 32, 4, 64, 2, 128, 1)} <= {row.name for row in found.rows}
    (nothing,) = (row for row in found.rows if row.name == "Mapping(splits=1)")
    assert nothing.config.splits == 1 and listing.attention.plan(*arrays, 0.09, mapping=nothing.config).merge is None
    assert str(found).startswith("attention: q 8x16x128 float16, k 8x32768x128 float16, v 8x32768x128 float16, o ")


@pytest.mark.kin(1)
def test_where_shares_come_in_the_list(folder: Path) -> None:
    """First where the default has them; last where tiles are enough; not at all where no rule merges their cells."""
    def first(program: gk.programs.Program, *arrays: Any, **more: Any) -> list[str]:
        subject = Programmed(program, *arrays, **more)
        laid = [one.name for one in subject.candidates()]
        assert len(set(laid)) == len(laid)
        return [name for name in laid if ", " not in name]

    assert first(listing.attention, *decoding(), 0.09)[:7] == [f"Mapping(splits={count})" for count in (8, 32, 4, 64, 2, 128, 1)]
    middle = first(listing.attention, *decoding(keys=4096), 0.09)              # 8
    assert middle[0] in ("Mapping(splits=4)", "Mapping(splits=16)") and middle[7] == "Mapping({'n': 128})"
    assert first(listing.attention, *heads(), 0.09)[-7:] == [f"Mapping(splits={count})" for count in (2, 4, 8, 16, 32, 64, 128)]
    layers = half(100, 64), half(4, 64, 64), half(4, 64), half(100, 64)
    assert not [name for name in first(listing.mlp, *layers) if "splits" in name]
    assert not [name for name in first(listing.gemm, *product()) if "splits" in name]
    bounded = *decoding(64, 8192)[:3], half(8, dtype=np.int32), half(8, 64, 128), half(8, 64, dtype=F32)
    assert not [name for name in first(chains.bounded_weights, *bounded, 0.1) if "splits" in name]


def test_a_job_of_two_kernels(folder: Path) -> None:
    """They run in the plan's order, on the caller's arrays, with what one leaves for the other in memory of the job's own."""
    subject = Programmed(listing.attention, *decoding(), 0.09)
    memory, plan = subject.memory(), subject.default
    assert plan.merge is not None and len(memory.buffers) == 4 and [x.is_written for x in memory.buffers].count(True) == 1
    job = subject.job(plan, memory, (b"rounds", b"merging"))
    (merging,) = job.then
    assert (job.cubin, merging.cubin) == (b"rounds", b"merging") and len(job.varied) == 4
    assert job.spare_bytes == 4 * 8 * 16 * 16 * (128 + 2) and merging.spare_bytes == 0 and merging.then == ()
    for one, kernel in ((job, plan), (merging, plan.merge)):
        taken = [argument.array for argument in kernel.taken]
        offsets = {kernel.launchable.slot(taken.index(name) + 1): kernel.infos[name].pointer - BEGIN for name in kernel.spare}
        assert dict(one.spares) == offsets and max(offsets.values()) < job.spare_bytes
        assert (one.blocks, one.threads) == (kernel.launchable.blocks, kernel.launchable.threads)
    assert len(merging.spares) == 3 and [name for name, *_ in subject.outputs()] == ["o"]
    (written,) = (n for n, buffer in enumerate(memory.buffers) if buffer.is_written)
    assert [at.buffer for _, at in merging.pointers] == [written] and written not in {at.buffer for _, at, _ in job.maps}


def test_of_two_kernels_one_is_not_compiled(folder: Path, measured: Any, replaced: Seeded) -> None:
    """The candidate is listed with the reason. Other numbers of shares have the default's two kernels, and other rounds its second."""
    measured(lambda number: 90.0)
    mappings = [gk.Mapping({"n": 64}, splits=8), gk.Mapping(splits=4), gk.Mapping(splits=1)]

    def outcomes(bad: int, count: int) -> dict[str, str]:
        def compiled(kernels: Any, jobs: Any) -> Any:
            for n, kernel in enumerate(kernels[:count]):
                yield Made(kernel, error="ptxas said no") if n == bad else Made(kernel, {})
            if count < len(kernels):
                raise KeyboardInterrupt

        replaced(module, "compiled", compiled)
        found = listing.attention.tune(*decoding(), 0.09, mappings=mappings, keep=False)
        return {row.name: row.error or "" for row in found.rows}

    for bad, one in ((2, mappings[0]), (3, mappings[2])):                      # behind the default's two
        errors = outcomes(bad, 4)
        assert [name for name, error in errors.items() if error == "not compiled: ptxas said no"] == [repr(one)], errors
    assert outcomes(9, 4) == dict.fromkeys(["default", *map(repr, mappings)], "")
    assert set(outcomes(9, 2)) == {"default"}                                  # interrupted


def test_mappings_begin_with_those_that_differ_in_one_thing(folder: Path) -> None:
    loop = listing.attention.traced(listing.attention.bound(heads(), dict(scale=0.125)))
    mappings = list(listed(loop, KERNELS["warp_specialised"]))
    assert len(set(mappings)) == len(mappings) and mappings[0] == gk.Mapping({"n": 128})
    said = [len(repr(mapping).split(", ")) for mapping in mappings]
    assert said == sorted(said) and said[-1] == 3
    others = list(listed(loop, KERNELS["multistage"]))                      # which has no orders of products
    assert others[0] == gk.Mapping({"n": 64}) and not any(x.ahead is not None or x.turns is not None for x in others)
    product_of = listing.gemm.traced(listing.gemm.bound(product(), {}))
    assert any(x.cluster for x in listed(product_of, KERNELS["warp_specialised"]))
    depths = {x.blocks.get("k") for x in listed(product_of, KERNELS["multistage"])}
    assert depths == {None, 32, 64, 128} and not any(x.cluster for x in listed(product_of, KERNELS["multistage"]))


def test_bad_calls_of_programs(folder: Path) -> None:
    arrays = tuple(np.zeros((64, 64), F16) for _ in range(3))
    with pytest.raises(TypeError, match="a is a host array"):
        listing.gemm.tune(*arrays)
    with gk.emulate(), pytest.raises(TypeError, match="this is the emulator"):
        listing.gemm.tune(*arrays)
    with pytest.raises(ValueError, match="nothing to compute"):
        listing.gemm.tune(*product(m=0))
    with pytest.raises(ValueError, match="budget=-1"):
        listing.gemm.tune(*product(), budget=-1)
    with pytest.raises(TypeError, match="mapping= is the result of tuning"):
        gk.tune(listing.gemm, *product(), mapping=gk.Mapping())
    with pytest.raises(TypeError, match="the call has an argument of this name"):
        gk.program(lambda a, budget: None)                                  # type: ignore[misc]


@pytest.mark.compile
@pytest.mark.thorough
def test_a_candidate_of_two_kernels_is_compiled(folder: Path, replaced: Seeded) -> None:
    """For real, beside one of a single kernel (those of products: test_search.py)."""
    process = Measured(lambda number: 90.0)
    replaced(module, "contents_of", lambda memory, ordinal: [b"" for _ in memory.buffers])
    arrays = tuple(half(1, extent, 64) for extent in (16, 4096, 4096, 16))
    subject = Programmed(listing.attention, *arrays, 0.1, mappings=[gk.Mapping(splits=1)])
    found = module._Search(subject, Effort(1, 120.0, 3, 100.0), module.time.monotonic(), process).run(False, 2, module.Progress(False))
    assert [row.error for row in found.rows] == [None] * 2 and len(list(folder.glob("*.kernel"))) == 3
    jobs = sorted((len(job.then), [one.cubin[:4] for one in (job, *job.then)]) for job in process.kept.values())
    assert jobs == [(n, [b"\x7fELF"] * (n + 1)) for n in (0, 1)]


def test_tune_is_the_programs_own(folder: Path, measured: Any) -> None:
    measured(lambda number: 90.0)
    one, other = listing.gemm.tune(*product(), keep=False), tune(listing.gemm, *product(), keep=False)
    assert [row.name for row in one.rows] == [row.name for row in other.rows] and not one.kept


def test_functions_of_rows_have_one_mapping() -> None:
    with pytest.raises(gk.ConfigError, match="a function of rows has one mapping"):
        row_programs.softmax.tune(half(8, 64), half(8, 64))
