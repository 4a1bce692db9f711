"""`bench.experiments` without a GPU: its rows, each of them in small in the emulator, what it compiles and writes."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import gemmkit
from bench import asked, cases, hopper, paper_tables, plot, prepare, report, verdicts
from bench.cases import Case
from bench.experiments import (
    algebras,
    attention,
    contractions,
    groups,
    limit,
    minplus,
    mixed,
    random_shapes,
    rows,
    specs,
    stacks,
    tensor_limit,
    versus,
)
from bench.experiments import run as experiments
from bench.experiments.experiment import Experiment
from bench.fusions import WORKS
from bench.harness import WrongResult
from bench.supervise import Patience
from gemmkit.emulator import ExecutionTarget
from gemmkit.operators import MAX_PLUS, MIN_PLUS
from gemmkit.plans.compiled import Compiled
from gemmkit.plans.plan import Plan
from gemmkit.runtime import compile as compiling
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts
from gemmkit.runtime.device import H100
from tests.bench.test_hopper import hopper_row
from tests.bench.test_prepare import OnDevice
from tests.support.harness import Out, emulated
from tests.support.hosts import Host
from tests.support.patches import Seeded


class Emulated(Host):
    """Products are computed in the emulator, once for each output; the clock counts gemmkit's launches."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.spoil = 0.0

    @contextmanager
    def launches(self) -> Iterator[None]:
        product, others = Plan._emulate, ExecutionTarget.run

        def launch(compute: Any, out: Any) -> Any:
            self.now += 1.0
            where = out.ctypes.data
            if where not in self.known:
                compute()
                self.known[where] = out, out + np.asarray(self.spoil, out.dtype)
            out[...] = self.known[where][1]
            return out

        def plan(made: Any, a: Any, b: Any, c: Any, out: Any) -> Any:
            return launch(lambda: product(made, a, b, c, out), out)

        def kernel(mode: Any, made: Any, arrays: Any) -> None:
            if isinstance(made, Compiled):                         # within `product`
                others(mode, made, arrays)
            else:
                launch(lambda: others(mode, made, arrays), (made.filled(arrays) or [arrays[-1].value])[0])    # a spec writes its last

        with mock.patch.object(Plan, "_emulate", plan), mock.patch.object(ExecutionTarget, "run", kernel), gemmkit.emulate():
            yield


def measured(case: Any, host: Emulated | None = None) -> dict[str, Any]:
    host = host or Emulated()
    chosen = prepare.products(case) if isinstance(case, Experiment) else None
    with host.launches(), mock.patch.object(prepare, "products", lambda _: chosen):
        row = experiments.Bench(host, 2, 1.0, host.plan).measure(case)
    report.validate(report.document("experiments", [row], "no device"))
    return row


def tiny(case: Any, m: int = 24, n: int = 16, k: int = 32) -> Any:
    fewer = {"count": min(3, case.count)} if isinstance(case, (stacks.Stack, random_shapes.Drawn)) else {}
    return dataclasses.replace(case, m=m, n=n, k=k, **fewer)


def small(case: Experiment) -> Experiment:
    if isinstance(case, versus.Versus):
        of = small(case.of)
        return dataclasses.replace(case, of=of, m=of.m, n=of.n, k=of.k)
    if isinstance(case, contractions.Contraction):
        extents = {label: (4, 2, 3)[i % 3] for i, (label, _) in enumerate(case.sizes)}
        return contractions.Contraction.of(case.group, case.work, extents, case.kind)
    if case.group == "fused_specs":                           # the widths that these kernels have
        n, k = {"layernorm": (256, 1), "plain": (64, 64)}.get(case.work, (128, 128))
        heads = {"batch": 1, "heads": 1} if isinstance(case, attention.Attention) else {}
        return dataclasses.replace(case, m=64 if heads else 24, n=n, k=k, **heads)
    if isinstance(case, attention.Attention):
        return dataclasses.replace(case, batch=1, heads=2, m=2 * 16, n=16, k=32)
    if isinstance(case, specs.Scheduled):                    # what the schedules' tiles divide
        m, k = {"listings": (128, 64 if case.kind == "f16" else 8), "staged": (128, 128), "decompositions": (32, 16),
                "small": (16, 64)}[case.group]
        return tiny(case, m, m, k)
    if isinstance(case, groups.Sparse):
        case = dataclasses.replace(case, block=(64, 64))       # the smallest tiles of tensor cores divide these
    return tiny(case, 32, 32, 32) if case.work == "diagonal" else tiny(case)


def is_left_out(case: Any) -> bool:
    """Schedules of which another size is there, and whose peer is no library."""
    return case.versus == "the template" or case.m > 1024 or (case.group == "small" and case.k > 64)


def first_of_each() -> list[Experiment]:
    found = [case for make in experiments.FURTHER.values() for case in make()
             if case.group not in ("tccg", "grouped", "experts") and not (isinstance(case, specs.Scheduled) and is_left_out(case))]
    return [*found, next(case for case in contractions.tccg() if case.work == "abcijk-ijmb-mkac" and case.kind == "f32")]


# -- rows -------------------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_issue() -> None:
    rows = experiments.make(experiments.DEFAULT)
    by_group = {group: [case for case in rows if case.group == group] for group in experiments.GROUPS}
    asked = {group: {(case.bar, case.aim) for case in found} for group, found in by_group.items()}
    assert asked["diagonal"] == {(5.0, 8.0)} and {case.n for case in by_group["diagonal"]} == {4096}
    assert asked["triangular"] == {(1.6, 1.9)} and {case.n for case in by_group["triangular"]} == {8192}
    fusion = [(case.work, case.bar, case.aim) for case in by_group["fusion"]]
    assert len(fusion) == 6 and fusion[0] == ("matmul", 0.98, 1.05) and fusion[-1] == ("table2", 1.4, 1.55)
    assert asked["algebras"] == {(0.7, 0.95)} and [case.products for case in by_group["algebras"]] == [4, 3]
    assert asked["complex64"] == {(0.7, 1.0)} and asked["minplus"] == {(0.6, 0.9)}
    assert {case.n for group in ("algebras", "complex64", "minplus") for case in by_group[group]} == {4096}
    assert {(case.m, case.n, case.k) for case in by_group["contraction"]} == {(64 * 32, 2048, 2048)}
    assert verdicts.MEANS["contraction"] == verdicts.MEANS["tccg"] == (1.1, 1.5)
    assert len(by_group["tccg"]) == 2 * 48 and not by_group["square"]
    assert len(set(map(str, rows))) == len(rows)
    assert set(experiments.GROUPS) < set(verdicts.GROUPS)
    assert all(WORKS[case.work] for case in rows if isinstance(case, Case))


def test_rows_are_chosen_by_group_and_expression() -> None:
    assert {case.group for case in experiments.make(["square"])} == {"square"}
    assert [str(case) for case in experiments.make(experiments.GROUPS, "^algebras: dual|^contraction.* f32")] == [
        "algebras: dual f16 4096x4096x4096", "contraction: abc-bda-dc f32 2048x2048x2048"]  # fmt: skip


def test_tensors_have_the_benchmarks_sizes() -> None:
    for case in contractions.tccg():
        assert isinstance(case, contractions.Contraction)
        largest = max(int(np.prod(case.shape(term))) for term in case.terms)
        assert 100 << 20 <= 4 * largest < 300 << 20, f"{case}: {largest}"
        assert all(case.shape(term)[-1] % 24 == 0 and all(n % 4 == 0 for n in case.shape(term)) for term in case.terms)
        d, a, b = (int(np.prod(case.shape(term))) for term in case.terms)
        assert (case.m * case.n, case.m * case.k, case.k * case.n) == (d, a, b)


# -- one row ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(171)
@pytest.mark.parametrize("case", first_of_each(), ids=str)
def test_every_experiment_is_computed_right(case: Experiment) -> None:
    row, of = measured(small(case)), getattr(case, "of", case)
    assert row["ratio"] == pytest.approx(1.25 * (case.products if case.group == "algebras" else 1))
    assert row["error"] < max(2e-3, case.tolerance) and row["peer_error"] < max(1e-3, case.tolerance / 4)
    assert row["mapping"] or case.mapping or case.group in ("rows", "mlp", "programs") or isinstance(
        of, (attention.Attention, rows.RowWise, specs.Scheduled))
    assert (row["group"], row["bar"], row["aim"]) == (case.group, case.bar, case.aim)
    assert row["peer"].startswith({"minplus": "this card's limit", "forced": "this card's rate"}.get(case.group, "NumPy"))


TEMPLATES = [case for case in specs.listings() if case.versus == "the template" and case.m == 1024]


@pytest.mark.thorough
@pytest.mark.parametrize("case", TEMPLATES, ids=str)
def test_listings_against_the_template(case: Any) -> None:
    """Both are gemmkit's."""
    row = measured(small(case))
    assert row["ratio"] == pytest.approx(1.0) and row["peer"] == "gemmkit's template, same tiles" and row["config"] == "schedule"


@pytest.mark.parametrize("case", TEMPLATES, ids=str)
def test_the_templates_kernel_is_a_peers(case: Any) -> None:
    """It is compiled ahead, and has the listing's tile and threads."""
    (template,) = case.templates()
    (ours,) = prepare.products(case)
    conf = template.problem.config
    assert conf.kernel == "singlestage" and conf.threads == ours.launchable.threads == 256
    assert (conf.block_shape.M, conf.block_shape.N) == (gemmkit.Tile(M=128), gemmkit.Tile(N=128)) and case.peers_kernel


@pytest.mark.sample(3)
@pytest.mark.parametrize("work", ["relu", "bias relu c", "diagonal", "dense diagonal", "lower", "upper"])
def test_the_papers_works_are_computed_right(work: str) -> None:
    case = Case("fusion", work, "f16", 32, 32, 32, bar=0.7, aim=0.9)
    row = measured(case)
    assert row["work"] == work and row["error"] < 2e-3 and row["peer_error"] < 1e-3


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", {type(case): case for case in first_of_each() if type(case).__module__ != specs.__name__}.values(),
                         ids=lambda case: type(case).__name__)
def test_an_experiment_of_each_class(case: Experiment) -> None:
    """In a sample, too: each class has its own arrays, calls and errors. (Specs, which take a minute, are emulated elsewhere.)"""
    row = measured(small(case))
    assert row["error"] < max(2e-3, case.tolerance) and row["peer_error"] < max(1e-3, case.tolerance / 4)


@pytest.mark.sample(171)
@pytest.mark.parametrize("case", first_of_each(), ids=str)
def test_a_wrong_result_is_no_row(case: Experiment) -> None:
    host = Emulated()
    host.spoil = 1.0
    with pytest.raises(WrongResult, match="before the timing"):
        measured(small(case), host)


@pytest.mark.sample(171)
@pytest.mark.parametrize("case", first_of_each(), ids=str)
def test_a_wrong_peer_is_no_row(case: Experiment) -> None:
    host = Emulated()
    host.wrong_peer = True
    if isinstance(case, mixed.MixedContraction):       # NumPy's einsum, of both, is wrong
        with pytest.raises(WrongResult, match="relative error 1 before"):
            measured(small(case), host)
        return
    if isinstance(case, contractions.Contraction):  # its reference is the peer's einsum in float64
        plain = Host()
        with mock.patch.object(case.__class__, "error_of", lambda self, lib, x, out: float(plain.relative_error(
                out, plain.einsum(self.spec, *map(plain.wide, (x.a, x.b)))))), pytest.raises(WrongResult, match="peer's"):
            measured(small(case), host)
        return
    with pytest.raises(WrongResult, match="the peer's relative error"):
        measured(small(case), host)


def test_every_input_set_has_numbers_of_its_own() -> None:
    host = Emulated()
    for case in first_of_each():
        one, two = (small(case).operands(host, i) for i in range(2))
        for name in {"a", "b", "x", "gamma"} & set(vars(one)):
            assert not np.array_equal(getattr(one, name), getattr(two, name))
        assert not np.shares_memory(one.out, two.out)


# -- the card's limits -------------------------------------------------------------------------------------------------


def test_the_limit_issues_as_many_pairs_as_the_product() -> None:
    made = limit.Limit(MIN_PLUS, 4096**3, H100)
    assert 0 <= made.pairs / 4096**3 - 1 < 1e-3
    assert made.expected(0) == made.rounds * limit.STEPS < limit.BOUND  # exact, and never cut off


def test_the_limit_of_tensor_cores_issues_as_many_products_as_needed() -> None:
    made = tensor_limit.TensorLimit(8192**3, H100)
    each = 16 * 8 * 16 * made.chains * made.threads // 32
    assert 0 <= made.rounds * each / 8192**3 - 1 < 1e-3
    assert made.expected(15) < 2**24                                       # exact in float32


def test_the_kernel_of_tensor_cores_computes_what_is_expected_of_it() -> None:
    made = tensor_limit.TensorLimit(1, H100)
    (out,) = emulated(tensor_limit.products, Out((made.chains, 32), "f4"), np.ones(32, "f4"), tensor_limit.OPERATOR, made.rounds,
                      threads=32)  # fmt: skip
    assert np.array_equal(out, [[made.expected(n)] * 32 for n in range(made.chains)])


def test_the_limits_kernel_computes_what_is_expected_of_it() -> None:
    made = limit.Limit(MIN_PLUS, 1, H100)
    (out,) = emulated(limit.chains, Out((limit.CHAINS, 32), "f4"), np.zeros(32, "f4"), made.operator, limit.STEP,
                      limit.BOUND, made.rounds, threads=32)  # fmt: skip
    assert np.array_equal(out, [[made.expected(n)] * 32 for n in range(limit.CHAINS)])
    other = limit.Limit(MAX_PLUS, 1, H100)
    (out,) = emulated(limit.chains, Out((limit.CHAINS, 32), "f4"), np.zeros(32, "f4"), other.operator, limit.STEP,
                      limit.BOUND, 2, threads=32)  # fmt: skip
    assert (out == limit.BOUND).all()  # the greater of the two, and too large to add 1 to


@pytest.mark.usefixtures("quick_collections")
def test_a_call_of_the_limits_kernel_keeps_its_arrays(monkeypatch: pytest.MonkeyPatch, replaced: Seeded) -> None:
    """Memory that was given back is another array's by the time of the launch: the chains would begin at whatever it has."""
    loaded = mock.Mock()
    replaced(limit, "load", lambda cubin, entry: loaded)
    replaced(limit, "current_stream", lambda library, device, producer: 0)
    case = minplus.MinPlus("minplus", "min-plus", "f32", 64, 64, 64)
    arrays: list[weakref.ref] = []

    class Lib(prepare.HostArrays):
        def limit(self, limit: Any, out: np.ndarray, first: np.ndarray) -> Any:
            given = OnDevice(out), OnDevice(first)
            arrays.extend(map(weakref.ref, given))
            assert not first.any()
            return limit.bind(*given)

    monkeypatch.setattr(minplus, "target", lambda: H100)
    x = SimpleNamespace()
    call = case.peers(Lib(), x)
    gc.collect()
    call()
    alive = [array() for array in arrays]
    assert len(alive) == 2 and None not in alive
    addresses = {array.array.ctypes.data for array in alive}
    stream, values = loaded.bind.return_value.launch.call_args.args
    assert stream == 0 and addresses <= set(values)
    (grid, block, *_), _ = loaded.bind.call_args
    assert grid[0] * block[0] == case.limit.threads and case.limit.rounds in values
    del call, alive
    gc.collect()
    assert all(array() is None for array in arrays)


def test_chains_that_begin_elsewhere_are_found() -> None:
    """A result of the limit's kernel that began at anything but zero is no row."""
    made = limit.Limit(MIN_PLUS, 1, H100)
    given_back = (np.random.default_rng(0).random(16) - 7).view("f4")  # float64 numbers as they lie in memory
    (out,) = emulated(limit.chains, Out((limit.CHAINS, 32), "f4"), given_back, made.operator, limit.STEP, limit.BOUND,
                      made.rounds, threads=32)  # fmt: skip
    wanted = np.array([[made.expected(n)] * 32 for n in range(limit.CHAINS)])
    assert not Host().relative_error(out, wanted) < 1.0


def test_the_limits_kernel_is_adds_and_minima_on_registers() -> None:
    made = limit.Limit(MIN_PLUS, 4096**3, H100)
    arguments = made.arguments(*made.example)
    ptx = compiling.to_ptx(limit.chains, tuple(a.type for a in arguments), limit.THREADS, H100, limit.BLOCKS)
    assembled = assemble(ptx, "sm_90a")
    counts = instruction_counts(disassemble(assembled.cubin))
    pairs = limit.CHAINS * limit.STEPS
    assert counts["FMNMX"] == pairs and pairs <= counts["FADD"] <= pairs + limit.CHAINS + 2
    assert assembled.usage.stack_bytes == assembled.usage.spill_stores == 0
    assert assembled.usage.registers * limit.THREADS * limit.BLOCKS <= 65536


# -- the run ----------------------------------------------------------------------------------------------------------


class Stub:
    def measure(self, case: Any) -> dict[str, Any]:
        if "dual" in str(case):
            raise gemmkit.ConfigError("no such thing")
        return hopper_row(case, 1.2)

    def is_lost(self) -> bool:
        return False


@pytest.fixture
def stubbed(replaced: Seeded) -> None:
    replaced(experiments, "on_torch", lambda pairs, target_us: Stub())
    run = hopper.run
    replaced(hopper, "run", lambda *a, **k: run(*a, **k, method="fork"))


@pytest.mark.usefixtures("stubbed")
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prepare", "no", "--out", str(tmp_path)]
    assert experiments.main(["diagonal", *arguments]) == 0
    content = report.read(tmp_path / "experiments.json")
    assert content["bench"] == "experiments" and len(content["rows"]) == 2
    assert experiments.main(["diagonal", "--groups", "algebras,tccg", *arguments]) == 1
    content = report.read(tmp_path / "experiments.json")
    assert len(content["rows"]) == 2 + 1 + 96 and next(iter(content["failed"].values())).startswith("ConfigError")
    assert content["summary"]["tccg"]["mean_verdict"] == "bar"
    said = capsys.readouterr().out
    assert "FAILED: algebras: dual f16" in said and "geometric mean 1.200 (bar 1.1, aim 1.5: bar; f16 1.200, f32 1.200)" in said
    assert plot.main([str(tmp_path / "experiments.json"), str(tmp_path / "experiments.svg")]) == 0 and (tmp_path / "experiments-tccg.svg").exists()
    assert experiments.main(["--list"]) == 0 and "118 rows" in capsys.readouterr().out
    for bad in (["round"], ["--groups", "round"]):
        with pytest.raises(SystemExit) as stop:
            experiments.main(bad)
        assert stop.value.code == 2 and "'round' is none of square, diagonal" in capsys.readouterr().err


def test_the_tables_of_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [hopper_row(case, 0.9 + 0.001 * n) for n, case in enumerate(experiments.make(experiments.DEFAULT))]
    left = next(row for row in rows if row["group"] == "minplus")
    rows.remove(left)
    square = [hopper_row(case, 1.05) for case in cases.make(["square"], sizes=[64])]
    paths = [tmp_path / "hopper.json", tmp_path / "experiments.json"]
    report.write(report.document("hopper", square, "a device"), paths[0])
    report.write(report.document("experiments", rows, "a device", failed={left["case"]: "it hung"}), paths[1])
    into = tmp_path / "text.md"
    into.write_text(f"before\n{asked.BEGIN}\nold\n{asked.END}\nafter\n")
    assert asked.main([*map(str, paths), "--into", str(into)]) == 0 and not capsys.readouterr().out
    assert asked.main([*map(str, paths)]) == 0
    tables = capsys.readouterr().out.strip()
    assert into.read_text() == f"before\n{asked.BEGIN}\n{tables}\n{asked.END}\nafter\n"
    lines = [line for line in tables.splitlines() if line.startswith("|")]
    for row in rows:
        if row["group"] not in verdicts.MEANS:
            shown = [line for line in lines if f"| {row['work']} {row['dtype']} " in line and f"**{row['ratio']:.3f}**" in line]
            assert len(shown) == 1 and shown[0].endswith(f"{verdicts.verdict(row['ratio'], row['bar'], row['aim'])} |")
    (unmeasured,) = (line for line in lines if "it hung" in line)
    assert "not measured" in unmeasured and unmeasured.endswith("missed |")
    assert sum("geometric mean of" in line for line in lines) == 3 and "**1.050** | 1.02 | 1.08 | bar |" in tables
    families = lines[[line.startswith("| TCCG's") for line in lines].index(True) + 2 :]
    assert sum(int(line.split("|")[4]) for line in families) == 48 and not any("not measured" in line for line in families)
    with pytest.raises(ValueError, match="lacks"):
        asked.put("no marks", tables, asked.BEGIN, asked.END)


def test_the_tables_of_the_paper_and_of_rivals() -> None:
    made = experiments.make(experiments.TOGETHER["paper"])
    rows = [hopper_row(case, 0.9 + 0.002 * n) for n, case in enumerate(made)]
    for row, case in zip(rows, made):
        row["peer"] = "cuBLASLt: by kernels of PyTorch" if getattr(case, "way", "") == "kernels" else "cuBLASLt"
    content = report.document("experiments", rows, "a device", failed={"mixed: one": "it hung"})
    counts = {"cublas": {"kernels": 1.0, "loads": 12345.0}, "diagonal": {"kernels": 1.0, "stores": 7.0}}
    lines = list(paper_tables.mixed(content, counts))
    text = "\n".join(lines)
    for row in rows:
        assert f"{row['ratio']:.2f}" in text, row["case"]
    assert "| loads | 12,345 | - | - |" in lines and "| stores | - | - | 7 |" in lines and lines[-1] == "* mixed: one: it hung"
    assert sum(line.startswith("| 16384 |") for line in lines) == 1 and "| 0.84 |" in text
    rows = [hopper_row(case, 1.5) for case in experiments.make(["rivals"])]
    lines = list(paper_tables.rivals(report.document("experiments", rows, "a device")))
    assert sum(line.startswith("| ") for line in lines) == 1 + len(rows)
    assert sum(line.startswith("| square | 4096 x 4096 x 4096 |") for line in lines) == 1


def test_where_the_fastest_indices_of_a_contraction_are() -> None:
    assert asked.directions("ij-kil-lkj") == ("K, K, M", "A and B")
    assert asked.directions("abcijk-eibc-jkea") == ("K, N, N", "B and D")
    assert asked.directions("abrs-qb-aqrs") == ("K, N, N", "")


@pytest.mark.usefixtures("stubbed")
def test_what_is_late_is_reported(tmp_path: Path) -> None:
    assert experiments.main(["minplus", "--prepare", "no", "--limit", "0", "--out", str(tmp_path)]) == 1
    content = json.loads((tmp_path / "experiments.json").read_text())
    assert content["failed"] == {"minplus: min-plus f32 4096x4096x4096": "not measured: out of time"}


def test_the_worker_measures_both_kinds_of_rows() -> None:
    host = Emulated()
    with host.launches():
        bench = experiments.Bench(host, 2, 1.0, host.plan)
        assert bench.measure(Case("fusion", "matmul", "f16", 24, 16, 32))["group"] == "fusion"
        assert bench.arrays and Patience().row > 0
        with mock.patch.object(prepare, "products", lambda case: [mock.Mock(problem=mock.Mock(config=None))]):
            assert bench.measure(tiny(next(algebras.algebras())))["group"] == "algebras"
        assert not bench.arrays


def test_the_groups_of_the_paper_are_known_to_the_hopper_bench() -> None:
    assert set(cases.PAPER) <= set(cases.GROUPS) and not set(cases.PAPER) & set(cases.PUBLISHED)
