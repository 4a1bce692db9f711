"""`bench.conv` without a GPU: small cases in the emulator are rows, and a wrong convolution is none."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from bench import conv  # noqa: E402
from bench.harness import WrongResult  # noqa: E402


@pytest.mark.sample(2)
@pytest.mark.parametrize("work", conv.WORKS)
@pytest.mark.parametrize("size", conv.SMALL[:2])
def test_a_row(size: tuple[int, ...], work: str) -> None:
    case = conv.ConvCase(work, *size)
    with gk.emulate():
        row = conv.row(case, "cpu", 2)
    assert row["ratio"] > 0 and row["error"] < conv.TOLERANCE and (row["m"], row["n"], row["k"]) == case.product


def test_a_wrong_convolution_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    of = conv.peer
    monkeypatch.setattr(conv, "peer", lambda case, given: lambda: 1.1 * of(case, given)())
    with gk.emulate(), pytest.raises(WrongResult, match="relative error"):
        conv.row(conv.ConvCase("forward", *conv.SMALL[1]), "cpu", 2)
