"""`bench.models` without a GPU: rows of what was timed, and a model whose losses differ is none."""

from __future__ import annotations

from typing import Any

import pytest

import gemmkit as gk

torch: Any = pytest.importorskip("torch")

from argparse import Namespace  # noqa: E402

from bench import models, paper_tables, report  # noqa: E402

OPTIONS = Namespace(tiny=True, device="cpu", compile=False, backend="aot_eager", steps=1, turns=1)


def test_rows_of_all_ways() -> None:
    """In graphs the fastest of both sides; compiled and eager ones beside their own."""
    us = {"torch": 40.0, "ours": 50.0, "torch compiled": 30.0, "ours compiled": 20.0, "torch graph": 16.0, "ours graph": 10.0,
          "torch compiled graph": 12.0, "ours compiled graph": 11.0}
    rows = models.rows_of("decode 1", us, 0.01, 1, 4096, "bfloat16")
    assert [(row["work"], row["graph"], row["peer"], row["ours"], row["ratio"]) for row in rows] == [
        ("decode 1", True, "PyTorch compiled graph", "ours graph", 1.2),
        ("decode 1, compiled", False, "PyTorch compiled", "ours compiled", 1.5), ("decode 1, eager", False, "PyTorch", "ours", 0.8)]
    assert all(row["us"] == us for row in rows)
    assert [row["work"] for row in models.rows_of("x", {"torch": 1.0, "ours": 1.0}, 0.0, 1, 1, "float32")] == ["x, eager"]


def test_a_perceptron(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = dict(models.works(OPTIONS))["perceptron 16"]
    with gk.emulate():
        (row,) = compute()
        assert row["work"] == "perceptron 16, eager" and row["error"] < 0.01 and row["losses"].keys() == {"torch", "ours"}
        right = models.accelerated

        def wrong(model: Any) -> Any:
            torch.nn.init.normal_(model[4].weight)
            return right(model)

        monkeypatch.setattr(models, "accelerated", wrong)
        with pytest.raises(ValueError, match="perceptron 16: losses differ by"):
            compute()


@pytest.mark.thorough
def test_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    with gk.emulate():
        (row,) = models.network_rows("DistilBERT", OPTIONS)
        assert row["work"] == "DistilBERT 2 x 9, eager" and row["error"] < 0.005 and row["group"] == "networks"
        assert row["us"].keys() == {"unfused", "torch", "attention", "ours"}
        monkeypatch.setattr(models, "accelerated", lambda model: model.transformer.layer[0].ffn.lin2.weight.mul_(1.2))
        with pytest.raises(ValueError, match="hidden states of ours are off by"):
            models.network_rows("DistilBERT", OPTIONS)


def test_rows_of_a_network() -> None:
    us = {"unfused graph": 40.0, "torch graph": 20.0, "torch compiled graph": 10.0, "attention graph": 25.0, "ours graph": 9.0,
          "backend graph": 8.0, "torch": 60.0, "ours": 90.0}
    rows = models.compared("BERT 2 x 9", us, 0.0, 18, 64, "float16", models.WAYS, network="BERT")
    assert [(row["work"][10:], row["ratio"], row["graph"]) for row in rows] == [
        ("", 1.25, True), (", attention alone", 1.6, True), (", backend", 1.25, True),
        (", eager", 0.6667, False)]
    table = list(paper_tables.networks({**report.document("networks", rows, "a device")}))
    assert "| BERT | float16 | 40 | 25 | 10 | 9 | 8 | **1.60** | **5.00** | **1.25** |" in table
    assert table[-1].endswith("here it gains 1.60 to 1.60.")


def test_a_layer_that_was_left_is_no_row(in_the_emulator: None) -> None:
    with pytest.raises(RuntimeError, match="accelerate left 1 layers"):
        models.accelerated(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double()))
