"""`bench.hopper` without a GPU: its rows, their components and references, what it writes, what it does with failures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cases, hopper, mappings, plot, prepare, report, verdicts
from bench.cases import KINDS, Case
from bench.fusions import WORKS
from bench.harness import WrongResult
from bench.hopper import Bench
from bench.supervise import Patience
from gemmkit import ConfigError
from tests.support.hosts import Host
from tests.support.patches import Seeded


def small(work: str = "matmul", peer: str = "cuBLAS", layout: str = "nn", **more: Any) -> Case:
    sizes = (32, 32, 32) if "diagonal" in work or work == "gram" else (24, 16, 32)
    return Case("fused", work, "f16", *sizes, layout, peer=peer, **more)


def bench(host: Host | None = None) -> Bench:
    host = host or Host()
    return Bench(host, pairs=2, target_us=1.0, plan=host.plan)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_the_published_rows_are_those_of_the_issue() -> None:
    rows = cases.make(cases.PUBLISHED)
    by_group = {group: [case for case in rows if case.group == group] for group in cases.GROUPS}
    assert len(by_group["square"]) == 2 * 4 * 4 and not by_group["mappings"]
    assert {case.bar for case in by_group["square"]} == {0.96}
    assert [(case.m, case.n, case.k) for case in by_group["ragged"]] == list(cases.RAGGED)
    asked = {(case.kind, case.n) for case in by_group["types"] if case.bar == 0.97}
    assert asked == {(k, n) for k in ("tf32", "i8") for n in (4096, 8192)} | {("e4m3", 8192), ("e4m3 fast", 8192)}
    against_plain = {case.work: case.bar for case in by_group["fused"] if case.peer == "plain"}
    assert against_plain["bias relu"] == pytest.approx(1 / 1.02) and against_plain["c"] == pytest.approx(1 / 1.06)
    assert [(c.bar, c.aim) for g in ("table2", "toeplitz") for c in by_group[g]] == [(1.25, 1.5), (0.7, 0.95)]
    assert len(set(map(str, rows))) == len(rows)


def test_rows_are_chosen_by_group_size_and_expression() -> None:
    rows = cases.make(["square", "mappings"], sizes=[512], match="nt.*(128x256c-2x1|square)|square: .* bf16 .* tt")
    assert {case.group for case in rows} == {"square", "mappings"} and {case.m for case in rows} == {512}
    assert [str(case) for case in rows if case.group == "square"] == ["square: matmul bf16 512x512x512 tt"]
    assert [case.mapping for case in rows if case.group == "mappings"] == [f"128x256c-2x1-{o}" for o in mappings.ORDERS]
    assert len(cases.make(["mappings"])) == 2 * 45
    forced = cases.make(["toeplitz", "mappings"], config="64x32c-1x1-h", names=["128x256c-2x1-g8"])
    assert [case.mapping for case in forced] == ["64x32c-1x1-h", *["128x256c-2x1-g8"] * 2]
    assert prepare.plain_twin(forced[0]).mapping == "64x32c-1x1-h"
    assert mappings.describe(prepare.resolve(forced[0]).problem.config).startswith("64x32c-1x1-h")


@pytest.mark.parametrize("name", ["128x256c-2x1-g8", "128x192p-1x2-h-s3", "64x32c-1x1-g16", "192x128c-1x1-h-s3-w12"])
def test_a_mapping_is_what_its_name_says(name: str) -> None:
    case = Case("mappings", "matmul", "f16", 4096, 4096, 4096, "nt", mapping=name)
    config = prepare.resolve(case).problem.config
    described = mappings.describe(config)
    assert described.startswith(name)
    assert mappings.parse(described) == dataclasses.replace(
        mappings.parse(name), stages=config.stages, warps=config.warps_per_block
    )


@pytest.mark.parametrize("name", ["128x256", "128x256c-2x1", "128x256c-2x1-g8-x3", ""])
def test_other_names_of_mappings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="128x256c-2x1-g8"):
        mappings.parse(name)


# -- one row ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(17)
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("peer", ["cuBLAS", "plain"])
def test_every_work_is_computed_right(work: str, peer: str) -> None:
    """The components in the emulator against the reference, and a row of it that fits the schema."""
    row = bench().measure(small(work, peer, bar=0.7, aim=0.9))
    assert row["work"] == work and 0 < row["error"] < 2e-3 and row["peer_error"] < 1e-3
    assert row["ratio"] == pytest.approx(1.25 if peer == "cuBLAS" else 1.0)
    assert (row["bar"], row["aim"], row["group"]) == (0.7, 0.9, "fused")
    assert row["peer"] == (f"NumPy: {work}" if peer == "cuBLAS" else "gemmkit, the plain product")
    report.validate(report.document("hopper", [row], "no device"))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts_are_views_of_the_arrays_that_a_size_shares(layout: str) -> None:
    host = Host()
    made = bench(host)
    for each in ("nn", layout):
        for x in made.operands(Case("square", "matmul", "f16", 8, 8, 8, each)):
            for letter, array in zip(each, (x.a, x.b), strict=True):
                assert (array.flags.c_contiguous, array.flags.f_contiguous) == (letter == "n", letter == "t")
    assert len(host.made) == 4  # A and B of two sets
    made.operands(Case("square", "matmul", "f16", 16, 8, 8, layout))
    assert len(host.made) == 8 and all(key[2:4] != (8, 8) for key in made.arrays if key[1] == "out")


def test_a_wrong_result_is_no_row() -> None:
    class Wrong(Host):
        def plan(self, *arguments: Any, **keywords: Any) -> Any:
            run = super().plan(*arguments, **keywords)

            def spoiled(a: Any, b: Any, c: Any = None, *, out: Any) -> None:
                run(a, b, c, out=out)
                out[3] += 1

            return spoiled

    wrong = Wrong()
    with pytest.raises(WrongResult, match="before the timing"):
        Bench(wrong, 2, 1.0, wrong.plan).measure(small())


def test_a_wrong_peer_is_no_row() -> None:
    host = Host()
    host.wrong_peer = True
    with pytest.raises(WrongResult, match="the peer's relative error is 0.5"):
        bench(host).measure(small())


def test_integers_are_compared_exactly() -> None:
    host = Host()

    def plan(a: Any, b: Any, c: Any, conf: Any, out: Any, operator: Any) -> Any:
        assert operator.dtype == np.int8 and out.dtype == np.int32

        def run(a: Any, b: Any, c: Any = None, *, out: Any) -> None:
            host.now += 1
            out[:] = a.astype(np.int64) @ b.astype(np.int64) + host.slip

        return run

    host.slip = 0  # type: ignore[attr-defined]
    case = Case("types", "matmul", "i8", 64, 64, 64, "nt")
    assert Bench(host, 2, 1.0, plan).measure(case)["error"] == 0.0
    host.slip = 1  # type: ignore[attr-defined]
    with pytest.raises(WrongResult):
        Bench(host, 2, 1.0, plan).measure(case)


def test_an_operator_is_given_where_gemmkit_would_choose_another() -> None:
    for kind, dtype in (("tf32", "float32"), ("i8", "int8")):
        x = cases.operands(case := Case("types", "matmul", kind, 512, 512, 512, "nt"), prepare.host_array)
        assert cases.plan_arguments(case, x)[1]["operator"].dtype == np.dtype(dtype)
    x = cases.operands(case := small(), prepare.host_array)
    assert cases.plan_arguments(case, x)[1].keys() == {"out"}
    assert KINDS["e4m3"].operator is not None and KINDS["e4m3"].operator["promote"] == 128


# -- the run ----------------------------------------------------------------------------------------------------------


class Stub:
    """A worker that fails where it is told to."""

    def measure(self, case: Case) -> dict[str, Any]:
        if case.layout == "nt":
            raise ConfigError("no such mapping")
        return hopper_row(case)

    def is_lost(self) -> bool:
        return False


def hopper_row(case: Case, ratio: float = 1.1, **more: Any) -> dict[str, Any]:
    return {
        "work": case.work, "dtype": case.kind, "m": case.m, "n": case.n, "k": case.k, "layout": case.layout,
        "ours_us": 10.0, "peer": "cuBLAS", "peer_us": 10 * ratio, "ratio": ratio, "error": 1e-4, "spread": 0.01, "graph": True,
        "tflops": 700.0, "group": case.group, "case": str(case), "config": case.mapping or "default", "bar": case.bar,
        "aim": case.aim, **more,
    }  # fmt: skip


def test_a_failed_row_stops_no_other_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = cases.make(["square"], sizes=[64])
    path = tmp_path / "hopper.json"
    content, found = hopper.run(wanted, Stub, path, Patience(30, 30), method="fork")
    assert len(content["rows"]) == 6 and len(content["failed"]) == 2 and len(found) == 8
    assert report.read(path) == json.loads(json.dumps(content))
    assert content["summary"]["square"]["geometric_mean"] == pytest.approx(1.1)
    said = capsys.readouterr().out
    assert said.count("FAILED: ConfigError: no such mapping") == 2 and said.count("1.100 (10.0 us)") == 6
    assert "FAILED: square: matmul f16 64x64x64 nt: ConfigError: no such mapping" in verdicts.table(content)


def test_the_command_line(tmp_path: Path, replaced: Seeded, capsys: pytest.CaptureFixture[str]) -> None:
    replaced(hopper, "on_torch", lambda pairs, target_us: Stub())
    run = hopper.run
    replaced(hopper, "run", lambda *a, **k: run(*a, **k, method="fork"))
    arguments = ["--groups", "square", "--sizes", "64", "--prepare", "no", "--out", str(tmp_path)]
    assert hopper.main([*arguments, "--match", " nn"]) == 0
    assert hopper.main(arguments) == 1
    assert len(report.read(tmp_path / "hopper.json")["failed"]) == 2
    assert hopper.main(["--list", "--groups", "table2"]) == 0
    assert "(at least 1.250, aim 1.500)" in capsys.readouterr().out
    assert hopper.main(["--match", "nothing is called so"]) == 1
    for bad in (["--groups", "round"], ["--sizes", "x"], ["--mappings", "128"], ["--match", "("], ["--kinds", "f12"]):
        with pytest.raises(SystemExit) as stop:
            hopper.main(bad)
        assert stop.value.code == 2 and bad[0] in capsys.readouterr().err


# -- what is made of the rows -------------------------------------------------------------------------------------------


def document(ratio: float = 0.95) -> dict[str, Any]:
    rows = [hopper_row(case, ratio + 0.01 * n) for n, case in enumerate(cases.make(cases.GROUPS, sizes=[64]))]
    return report.document("hopper", rows, "a device", failed={"square: another": "no answer"})


def test_verdicts() -> None:
    rows = [hopper_row(c, r) for c, r in zip(cases.make(["square"], sizes=[64]), (0.5, 2.0, 0.97, 1.0), strict=False)]
    found = verdicts.summary(rows)["square"]
    assert found["geometric_mean"] == pytest.approx((0.5 * 2.0 * 0.97) ** 0.25)
    assert (found["worst"], found["missed"], found["asked"], found["mean_verdict"]) == (0.5, 1, 4, "missed")
    assert [verdicts.cells(row)[11] for row in rows] == ["missed", "aim", "bar", "aim"]
    assert verdicts.summary([hopper_row(small())])["fused"]["worst"] is None


def test_tables_have_every_row_and_what_failed() -> None:
    content = document()
    for text in (verdicts.table(content), verdicts.markdown(content)):
        assert all(verdicts.GROUPS[group] in text for group in cases.GROUPS)
        assert sum(line.rstrip(" |").endswith("cuBLAS") for line in text.splitlines()) == len(content["rows"])
        assert "geometric mean" in text and "square: another: no answer" in text
    lines = [line for line in verdicts.markdown(content).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_files_are_merged_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = document(), document(1.5)
    first["failed"] = {second["rows"][0]["case"]: "hung", "square: another": "no answer"}
    second["rows"], second["failed"] = second["rows"][:3], {}
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path, content in zip(paths, (first, second), strict=True):
        report.write(content, path)
    out = tmp_path / "hopper.json"
    assert verdicts.main([*map(str, paths), "--out", str(out)]) == 0
    merged = report.read(out)
    assert [row["ratio"] for row in merged["rows"]] == [
        row["ratio"] for row in [*second["rows"], *first["rows"][3:]]
    ]
    assert merged["failed"] == {"square: another": "no answer"}
    assert "0 of 8 missed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="several devices"):
        verdicts.merge([first, {**second, "device": "another"}])


def test_the_picture_is_drawn_by_group(tmp_path: Path) -> None:
    source, picture = tmp_path / "hopper.json", tmp_path / "hopper.svg"
    report.write(document(), source)
    assert plot.main([str(source), str(picture)]) == 0
    groups = [group for group, _ in verdicts.grouped(document()["rows"])]
    assert len(groups) > 1 and sorted(tmp_path.glob("*.svg")) == sorted(tmp_path / f"hopper-{group}.svg" for group in groups)
    for path in tmp_path.glob("*.svg"):
        text = path.read_text()
        assert text.startswith("<?xml")
        found = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text)
        assert found and float(found[2]) < 72 * 12                     # no taller than a screen
    kept = plot.draw_groups.__globals__["drawn"]("mappings", dict(verdicts.grouped(document()["rows"]))["mappings"])
    assert len(kept) == 2 * 6 and kept[0]["ratio"] == max(row["ratio"] for row in kept if row["layout"] == "nn")
