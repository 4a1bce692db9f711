"""The result file: its schema, where it goes, the table and the picture that are made from it alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench import gemm, host, plot, report
from bench.harness import WrongResult

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


def test_where_results_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert report.results_path("gemm") == Path(report.__file__).parent / "results" / "gemm.json"
    monkeypatch.setenv("OUT", str(tmp_path))
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


def test_host_times_are_medians_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [0], [0]

    def call() -> None:
        made[0] += 1
        now[0] += (
            5_000 if made[0] % 1000 else 10_000_000
        )  # nanoseconds; one call in a thousand is interrupted

    monkeypatch.setattr(host.time, "perf_counter_ns", lambda: now[0])
    synchronised: list[int] = []
    assert host.host_us(call, lambda: synchronised.append(made[0]), calls=2000, batch=100, repeats=1) == 5.0
    assert synchronised == list(range(100, 2101, 100))
    with pytest.raises(ValueError, match="300 must divide 2000"):
        host.host_us(call, lambda: None, batch=300)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_host_row_of_a_wrong_result_is_an_error(error: float) -> None:
    with pytest.raises(WrongResult, match="plan"):
        host.row("plan", 5.0, "cuBLAS", 6.0, error)
