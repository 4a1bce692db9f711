"""The figures of docs/measured.md, from `bench/results` alone: `python -m bench.readme`.

    python -m bench.readme                            the tables
    python -m bench.readme --into docs/measured.md    write them into the text, between its two marks

Each line is one group of rows: their geometric mean, the worst, how many there are, and the file. A loss is a line like any
other. `tests/unit/bench/test_readme.py` compares the page with what is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import marks, report, verdicts

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- measured: python -m bench.readme --into docs/measured.md -->", "<!-- end of what was measured -->"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of the table: what it says, the file of its rows, and which they are."""

    what: str
    file: str
    group: str
    of: Callable[[Row], bool] = lambda row: True

    def rows(self, results: Path) -> list[Row]:
        rows = report.read(results / f"{self.file}.json")["rows"]
        return [row for row in rows if row["group"] == self.group and self.of(row)]


def against_plain(row: Row) -> bool:
    return bool(row["peer"].startswith("gemmkit"))


LINES = (
    Line("f16, bf16 squares, 2048 to 16384, all transposes", "hopper_square", "square"),
    Line("float32 (no tf32), 512 to 8192, all transposes", "multistage", "float32"),
    Line("float64, 512 to 8192, all transposes", "multistage", "float64"),
    Line("complex64, 1024 to 4096", "multistage", "complex", lambda row: row["dtype"] == "f32"),
    Line("complex128, 1024 to 4096", "multistage", "complex", lambda row: row["dtype"] == "f64"),
    Line("f16, 1 to 32 rows, N and K of 4096 and 14336 (nt)", "decode", "skinny"),
    Line("the same with bias and ReLU, or GELU and a residual, against cuBLAS and the kernels that it needs beside",
         "decode", "decode", lambda row: row["bar"] is not None),
    Line("f16, few tiles and a long K", "multistage", "long", lambda row: row["dtype"] == "f16"),
    Line("stacks of f16 and f32 in one launch, against `torch.bmm`", "multistage", "stacks"),
    Line("`grouped`: 32 products of random sizes in one launch, against a loop of cuBLAS", "multistage", "grouped"),
    Line("f16 4096, bias, ReLU, C, GELU, residual, against PyTorch's fused calls", "hopper_fused", "fused",
         lambda row: not against_plain(row) and row["work"] != "matmul"),
    Line("the same, of our own plain product's speed", "hopper_fused", "fused", against_plain),
    Line("attention, f16, heads of 64 and 128, 384 to 16384 keys, causal and not, against cuDNN", "attention", "attention"),
    Line("the same of 512 to 2048 keys, heads of 64, 128 and 256", "attention", "attention_short"),
    Line("the same, 4096 keys, with ALiBi, a soft cap, a window, shared heads, documents, against FlexAttention",
         "attention_rules", "attention_rules"),
    Line("softmax, layer norms and RMS norms of rows, f16 and bf16, against PyTorch's and torch.compile's", "rows", "rows"),
    Line("`mlp`: 4, 8 and 20 layers of width 128 in one launch, f16, against a call of cuBLASLt a layer", "mlp", "mlp"),
    Line("gated units and LSTM cells, f16, against cuBLAS and element-wise kernels", "composed", "composed",
         lambda row: row["work"].startswith(("glu", "lstm")) and not against_plain(row)),
    Line("programs: attention, MLPs, LSTM cells, products, dual and with sums of rows, f16, against our kernels by hand",
         "derived", "derived", lambda row: row["peer"] == "by hand" and row["work"] != "GEMM, multistage"),
    Line("attention as a program, heads of 64 to 256, 4096 keys, causal and not, against cuDNN", "derived", "derived",
         lambda row: row["peer"] == "cuDNN"),
    Line("two kernels that no library has, as programs, against torch.compile", "novel", "novel",
         lambda row: row["peer"] == "torch.compile"),
    Line("TCCG's 48 contractions, f16, against `torch.einsum`", "experiments", "tccg", lambda row: row["dtype"] == "f16"),
    Line("TCCG's 48 contractions, f32, against `torch.einsum`", "experiments", "tccg", lambda row: row["dtype"] == "f32"),
    Line("diagonal x dense, against cuBLAS on the whole matrix", "experiments", "diagonal"),
    Line("triangular x dense, likewise", "experiments", "triangular"),
    Line("random sizes, orders and types", "random", "random"),
    Line("the mapping that is chosen, against the best of a sweep (1 where it is the best), random f16, f32, f64",
         "choice", "choice"),
)  # fmt: skip


def summaries(results: Path = RESULTS) -> list[str]:
    """The table of all lines.

    Raises:
        ValueError: a line has no rows.
    """
    found = ["| ratio to cuBLAS (above 1 gemmkit is faster) | geometric mean | worst | rows | file |", "|" + "---|" * 5]
    for line in LINES:
        ratios = [row["ratio"] for row in line.rows(results)]
        if not ratios:
            raise ValueError(f"{line.file}.json has no rows of {line.what!r}")
        mean = verdicts.geometric_mean(ratios)
        found.append(f"| {line.what} | {mean:.2f} | {min(ratios):.2f} | {len(ratios)} | `{line.file}` |")
    return found


def squares(results: Path = RESULTS) -> list[str]:
    """f16 and bf16 squares, by size: nn, nt, tn, tt."""
    rows = Line("", "hopper_square", "square").rows(results)
    sizes = sorted({row["m"] for row in rows})
    found = [f"| nn, nt, tn, tt | {' | '.join(map(str, sizes))} |", "|" + "---|" * (len(sizes) + 1)]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ratios = {(row["m"], row["layout"]): row["ratio"] for row in rows if row["dtype"] == dtype}
        cells = (", ".join(f"{ratios[size, layout]:.2f}" for layout in report.LAYOUTS) for size in sizes)
        found.append(f"| {dtype} | {' | '.join(cells)} |")
    return found


def devices(results: Path = RESULTS) -> str:
    """On what the files of the table were measured, and when."""
    found: dict[str, list[str]] = {}
    for file in dict.fromkeys(line.file for line in LINES):
        content = report.read(results / f"{file}.json")
        found.setdefault(content["device"], []).append(f"`{file}` ({content['date'][:10]})")
    return "; ".join(f"{device}: {', '.join(files)}" for device, files in found.items()) + "."


def text(results: Path = RESULTS) -> str:
    """All that stands between the page's marks."""
    return "\n".join(["", *squares(results), "", *summaries(results), "", f"Measured on {devices(results)}", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    return marks.command("bench.readme", text, BEGIN, END, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
