"""Result files: their schema, tables and pictures; the pages that show their figures."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench import all as every
from bench import gemm, host, picture, plot, readme, report, specs_page, verdicts
from bench.experiments import specs
from bench.harness import WrongResult
from bench.marks import put
from tests.support import markdown
from tests.support.patches import Seeded, Set

# ==========================================================================================================================
# The result file: its schema, where it goes, the table and the picture that are made from it alone.

ROW: dict[str, Any] = {
    "work": "matmul", "dtype": "f16", "m": 1024, "n": 1024, "k": 1024, "layout": "nn",
    "ours_us": 10.0, "peer": "cuBLAS", "peer_us": 9.0, "ratio": 0.9, "error": 3e-4,
    "spread": 0.01, "tflops": 214.7, "graph": True,
}  # fmt: skip


def sample() -> dict[str, Any]:
    rows = [
        {
            **ROW,
            "dtype": dtype,
            "m": n,
            "n": n,
            "k": n,
            "ours_us": n**3 * 1e-8,
            "peer_us": n**3 * ratio * 1e-8,
            "ratio": ratio,
        }
        for dtype, ratio in (("f16", 0.9), ("f32", 1.05))
        for n in (1024, 2048, 4096)
    ]
    return report.document("sample", [*rows, {**ROW, "n": 512}], "a device")


def test_a_document_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "sample.json"
    content = sample()
    report.write(content, path)
    assert report.read(path) == content
    assert [each.name for each in path.parent.iterdir()] == ["sample.json"]
    assert list(content)[:6] == ["bench", "date", "commit", "device", "driver", "versions"]
    assert content["versions"]["numpy"] and content["versions"]["python"]


@pytest.mark.parametrize("key", [*report.DOCUMENT])
def test_a_missing_key_of_the_file_is_named(key: str) -> None:
    content = sample()
    del content[key]
    with pytest.raises(ValueError, match=f"the key '{key}' is missing"):
        report.validate(content)


@pytest.mark.parametrize("key", [*report.ROW])
def test_a_missing_key_of_a_row_is_named(key: str) -> None:
    content = sample()
    del content["rows"][1][key]
    with pytest.raises(ValueError, match=f"row 1: the key '{key}' is missing"):
        report.validate(content)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("m", 1.5, "wrong type"),
        ("m", True, "wrong type"),
        ("m", -1, "negative"),
        ("layout", "xx", "one of nn, nt, tn, tt"),
        ("ratio", float("nan"), "finite"),
        ("ours_us", 0.0, "positive"),
        ("error", -1e-3, "negative"),
        ("error", float("inf"), "finite"),
        ("peer", None, "wrong type"),
    ],
)
def test_a_bad_value_is_refused_and_nothing_is_written(
    key: str, value: object, complaint: str, tmp_path: Path
) -> None:
    content = copy.deepcopy(sample())
    content["rows"][0][key] = value
    with pytest.raises(ValueError, match=complaint):
        report.write(content, tmp_path / "sample.json")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_date_is_refused() -> None:
    with pytest.raises(ValueError, match="ISO 8601"):
        report.validate({**sample(), "date": "yesterday"})


def test_where_results_go(tmp_path: Path, environment: Set) -> None:
    environment(OUT=None)
    assert report.results_path("gemm") == Path(report.__file__).parent / "results" / "gemm.json"
    environment(OUT=tmp_path)
    assert report.results_path("gemm") == tmp_path / "gemm.json"
    assert report.results_path("gemm", tmp_path / "other") == tmp_path / "other" / "gemm.json"
    assert report.results_path("gemm", tmp_path / "mine.json") == tmp_path / "mine.json"


def test_the_table_has_a_line_a_row_and_aligned_columns() -> None:
    content = sample()
    title, header, *lines = report.table(content).splitlines()
    assert "a device" in title and len(lines) == len(content["rows"])
    end = header.index("ratio") + len("ratio")
    assert [line[end - 5 : end] for line in lines] == [f"{row['ratio']:.3f}" for row in content["rows"]]
    assert all(line.endswith("cuBLAS") for line in lines)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_from_the_file_alone(
    suffix: str, magic: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, picture = tmp_path / "sample.json", tmp_path / f"picture{suffix}"
    source.write_text(json.dumps(sample()))
    assert plot.main([str(source), str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(magic)


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        plot.draw(report.document("empty", [], "a device"), tmp_path / "picture.png")


def test_sizes_and_names_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gemm.sizes("1024,8x16x32") == [(1024, 1024, 1024), (8, 16, 32)]
    for bad in (["--sizes", "12x3"], ["--sizes", "0"], ["--layouts", "nx"], ["--dtypes", "f12"]):
        with pytest.raises(SystemExit) as stop:
            gemm.main(bad)
        assert stop.value.code == 2
        assert bad[0] in capsys.readouterr().err


def test_host_times_are_medians_of_batches(replaced: Seeded) -> None:
    now, made = [0], [0]

    def call() -> None:
        made[0] += 1
        now[0] += (
            5_000 if made[0] % 1000 else 10_000_000
        )  # nanoseconds; one call in a thousand is interrupted

    replaced(host.time, "perf_counter_ns", lambda: now[0])
    synchronised: list[int] = []
    assert host.host_us(call, lambda: synchronised.append(made[0]), calls=2000, batch=100, repeats=1) == 5.0
    assert synchronised == list(range(100, 2101, 100))
    with pytest.raises(ValueError, match="300 must divide 2000"):
        host.host_us(call, lambda: None, batch=300)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_host_row_of_a_wrong_result_is_an_error(error: float) -> None:
    with pytest.raises(WrongResult, match="plan"):
        host.row("plan", 5.0, "cuBLAS", 6.0, error)


# ==========================================================================================================================
# The figures of docs/measured.md and README's picture are those of the result files, and every bench is measured by one command.

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_figures_of_the_results() -> None:
    """`python -m bench.readme --into docs/measured.md` was run after the last measurement."""
    text = (ROOT / "docs" / "measured.md").read_text()
    assert put(text, readme.text(), readme.BEGIN, readme.END) == text
    every = (ROOT / "docs" / "measured_rows.md").read_text()
    assert put(every, readme.rows_text(), readme.ROWS_BEGIN, readme.END) == every


def test_the_picture_is_that_of_the_results() -> None:
    """`python -m bench.picture docs/measured.svg` was."""
    assert (ROOT / "docs" / "measured.svg").read_text() == picture.drawn()


def test_every_row_belongs_to_one_line() -> None:
    """No result is left out of the page, and none counts twice: a group that loses cannot be dropped in silence."""
    rows = {(path.stem, n): 0 for path in readme.RESULTS.glob("*.json") for n in range(len(report.read(path)["rows"]))}
    for file in {line.file for line in readme.LINES}:
        content = report.read(readme.RESULTS / f"{file}.json")["rows"]
        for line in (line for line in readme.LINES if line.file == file):
            for n, row in enumerate(content):
                rows[file, n] += row.get("group") == line.group and line.of(row)
    wrong = {f"{file}: row {n}": count for (file, n), count in rows.items() if count != 1}
    assert rows and not wrong


def test_every_file_names_its_commit_and_its_card() -> None:
    for path in readme.RESULTS.glob("*.json"):
        content = report.read(path)
        assert content["commit"] and "dirty" not in content["commit"] and "NVIDIA" in content["device"], path.name
        assert content["rows"] and not content.get("failed"), f"{path.name} lacks {content.get('failed')}"


def test_a_case_counts_with_its_fastest_peer(tmp_path: Path) -> None:
    """Two peers of one case are one case, and the line has the lesser ratio."""
    line = readme.Line("", "rows", "rows")
    rows = [{"work": "softmax", "dtype": "f16", "m": 4, "n": n, "k": 1, "layout": "nn", "ours_us": 1.0, "peer": peer,
             "peer_us": ratio, "ratio": ratio, "error": 0.0, "graph": True, "group": "rows"}
            for n, peer, ratio in ((8, "PyTorch", 3.0), (8, "torch.compile", 0.5), (9, "PyTorch", 2.0))]
    report.write(report.document("rows", rows, "a GPU"), tmp_path / "rows.json")
    assert line.ratios(tmp_path) == [0.5, 2.0]


def test_the_picture_has_every_line_and_shows_losses(tmp_path: Path) -> None:
    text = picture.drawn()
    means = [verdicts.geometric_mean(line.ratios(readme.RESULTS)) for line in readme.LIBRARIES]
    assert text.count("<rect") - 1 == len(readme.LIBRARIES)
    assert text.count(f'fill="{picture.LOSS}"') == sum(mean < 1 for mean in means) > 0


def test_the_table_follows_the_rows(tmp_path: Path) -> None:
    for line in readme.LINES:
        path = tmp_path / f"{line.file}.json"
        if not path.exists():
            report.write(report.read(readme.RESULTS / path.name), path)
    before = readme.table(readme.LIBRARIES, "", tmp_path)
    content = report.read(tmp_path / "random.json")
    content["rows"][0]["ratio"] = 1e-3
    report.write(content, tmp_path / "random.json")
    changed = [line for line, old in zip(readme.table(readme.LIBRARIES, "", tmp_path), before, strict=True) if line != old]
    assert len(changed) == 1 and "| 0.00 |" in changed[0]
    report.write({**content, "rows": []}, tmp_path / "random.json")
    with pytest.raises(ValueError, match="random.json has no rows of 'f16 and bf16: random sizes, orders and stacks'"):
        readme.table(readme.LIBRARIES, "", tmp_path)


def test_a_text_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        readme.main(["--into", str(tmp_path / "text.md")])
    assert (tmp_path / "text.md").read_text() == "no marks"


def test_every_group_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """All groups but "mappings", which is for tuning."""
    measured = [group for groups in every.FILES.values() for group in groups]
    assert len(measured) == len(set(measured))
    assert set(verdicts.GROUPS) - set(measured) == {"mappings"}
    assert every.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert f"[1 of {len(every.NAMES)}] hopper_square" in said and "] host" in said and "700 rows" in said
    by_hand = {"distributed", "multistage_sweep", "levels", "first_calls",      # two GPUs; a sweep; examples.levels; bench.host;
               "networks"}                                                      # bench.models
    assert {line.file for line in readme.LINES} - by_hand == set(every.NAMES)


def test_bad_calls(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["nothing"], "'nothing' is none of hopper_square"), (["--out", "x.json"], "a folder is needed")):
        with pytest.raises(SystemExit) as stop:
            every.main(arguments)
        assert stop.value.code == 2 and words in capsys.readouterr().err


# ==========================================================================================================================
# docs/design/specs.md's tables of what was measured, from the result file alone.

PAGE = markdown.ROOT / "docs" / "design" / "specs.md"


def row(group: str, work: str, m: int, k: int, ratio: float, peer: str = "cuBLAS", config: str = "schedule") -> dict[str, Any]:
    return {"work": work, "dtype": "f16", "m": m, "n": m, "k": k, "layout": "nt", "ours_us": 10.0, "peer": peer, "peer_us": 10 * ratio,
            "ratio": ratio, "error": 0.0, "graph": True, "group": group, "config": config, "tflops": 5.0}


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    between = text[text.index(specs_page.BEGIN) + len(specs_page.BEGIN):text.index(specs_page.END)]
    assert between.strip() == specs_page.text().strip()


def test_tables(tmp_path: Path) -> None:
    rows = [row("listings", "x", 1024, 1024, 1.25, "gemmkit's template, same tiles"), row("listings", "x", 1024, 1024, 0.5),
            row("decompositions", "y", 1024, 1024, 0.25), row("small", "small", 16, 64, 2.5), row("small", "small", 16, 128, 0.9, config="gemmkit.matmul"),
            row("small", "small", 32, 64, 1.0)]
    report.write(report.document("specs", rows, "a GPU"), tmp_path / "specs.json")
    text = specs_page.text(tmp_path / "specs.json")
    assert "| x | 1024 | 10.0 us | 5.0 | 1.25 | 0.50 |" in text and "| y | 1024 | 10.0 us | 5.0 |  | 0.25 |" in text
    assert "| 16 | 2.50* | 0.90 |" in text and "| 32 | 1.00* |  |" in text
    assert "Geometric mean 1.31 of 3 products, the worst 0.90, 1 below 1. The fastest was a schedule in 2, `gemmkit.matmul` in 1." in text
    assert "Twice as fast as cuBLAS: 16 x 16 x 64." in text and specs_page.text(tmp_path / "none.json").startswith("Not measured yet")


def test_a_candidates_tiles_divide() -> None:
    """Each small product has one schedule at least; none knows edges."""
    assert len(specs.CANDIDATES) == 9 and all(specs.candidates(case.m, case.n, case.k) for case in specs.small())
    assert len(list(specs.small())) == 42 and set(specs.candidates(16, 16, 64)) == {"schedule 16x16x64, warp 16x16"}
