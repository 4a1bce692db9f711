"""What was asked of rows, and whether they reached it: `python -m bench.verdicts hopper.json`.

Prints the table of a result file of `bench.hopper` or `bench.experiments` (``--markdown``: as docs/hopper.md has it), from
the file alone. Rows carry their ``bar`` (at least) and ``aim`` of the ratio; some groups' geometric mean has one too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report

GROUPS = {
    "square": "Square products, f16 and bf16, all transposes",
    "ragged": "Non-square and ragged, f16",
    "edges": "Rows that begin at any address, f16",
    "types": "Other types",
    "fused": "Fusions, f16 (the plain product over the fused one, and against PyTorch)",
    "transforms": "A transform of one operand, against the plain product",
    "table2": "relu(A+1) @ (B+1) + bias + relu(C), ReLU on D",
    "toeplitz": "A Toeplitz matrix that is never materialised, against the plain product",
    "diagonal": "Diagonal x dense, against cuBLAS on the materialised matrix (Table 1)",
    "triangular": "Triangular x dense, against cuBLAS on the matrix with its zeros",
    "symmetric": "X X^T in both halves, against cuBLAS's whole product",
    "fusion": "Fusion, against cuBLAS and element-wise kernels (Table 2)",
    "algebras": "Complex and dual numbers of f16, against as many real products (Fig. 9)",
    "complex64": "complex64, no tf32",
    "minplus": "min-plus, against the card's limit for adds and minima",
    "rivals": "Works of the papers against Triton, PyTorch eager, scripted and compiled, and attentions",
    "mixed": "float16 A and B, float32 C and D: D = A B + C, all transposes (Fig. 8)",
    "wmma": "The same by the WMMA operator (Fig. 8)",
    "mixed_diagonal": "The same of a diagonal A, against cuBLASLt on the materialised matrix (Table 1)",
    "mixed_fusion": "The same with what Table 2 adds, against kernels and against what cuBLASLt fuses (Table 2)",
    "mixed_algebras": "The same of complex and dual numbers, against as many real products of planes (Fig. 9)",
    "mixed_contraction": "D_abc = A_bda B_dc from float16 into float32, against a transposition and a product (Table 3)",
    "contraction": "D_abc = A_bda B_dc at the paper's sizes (Table 3)",
    "tccg": "The 48 contractions of the TCCG benchmark",
    "stacks": "Stacks of small products against torch.bmm",
    "grouped": "Products of random sizes in one launch, against a loop of cuBLAS",
    "experts": "Tokens sorted by expert, each expert's rows times its weights, bf16",
    "sparse": "A matrix of empty blocks, f16, against cuBLAS on the whole matrix",
    "float32": "float32 without tf32, all transposes",
    "float64": "float64, all transposes",
    "ozaki": "products by int8 products: float32, float64 (with 14 moduli and with 15), complex64 and complex128",
    "complex": "complex64 and complex128, without tf32",
    "long": "Few tiles, long K",
    "skinny": "1 to 32 rows, f16",
    "some": "40 to 256 rows or columns, f16",
    "decode": "1 to 32 rows with an epilogue, f16",
    "random": "Random sizes, orders and types",
    "streamk": "Stream-K beside the default mapping",
    "forced": "float16 by mma.sync, of the card's rate on registers",
    "rows": "Layer norm, RMS norm and softmax of rows, against PyTorch",
    "composed": "Products with reductions, norms of rows, gated units, LSTM cells, f16",
    "attention": "Attention, against cuDNN through PyTorch",
    "attention_short": "Attention of short sequences, against cuDNN through PyTorch",
    "attention_rules": "Attention with masks, scores and shared heads, against FlexAttention (torch.compile)",
    "mlp": "MLPs of width 128 in one launch, against a call of cuBLASLt a layer",
    "programs": "A GEMM as a program, by blocks alone and in clusters, against cuBLAS",
    "decompositions": "Schedules 1 to 3 of docs/specs.md, float32, against cuBLAS",
    "listings": "Fireiron's listings, against the template of the same tiles and against cuBLAS",
    "staged": "One schedule of tensor cores, tiles in shared memory plain, padded, swizzled, a step ahead; TMA and wgmma",
    "fused_specs": "Fused kernels as specs",
    "small": "Small matrices, float16 to float32: the fastest of schedules and matmul, against cuBLAS",
    "mappings": "Mappings (tuning)",
}
# What is asked of a group's geometric mean: at least, aim.
MEANS = {
    "square": (1.02, 1.08), "contraction": (1.1, 1.5), "tccg": (1.1, 1.5), "float32": (0.98, 1.05), "float64": (0.98, 1.02),
    "complex": (0.9, 1.0), "long": (0.95, 1.2), "skinny": (1.0, 1.15), "some": (0.95, 1.1), "rows": (1.0, 1.2),
    "attention": (1.08, 1.2), "attention_short": (0.95, 1.1), "attention_rules": (1.2, 1.6),
    "small": (1.1, 1.3), "mixed": (1.0, 1.05),
}  # fmt: skip
HEADER = ["work", "dtype", "size", "layout", "config", "ours us", "peer us", "ratio", "spread", "bar", "aim", "verdict"]
HEADER += ["peer"]
TEXT = {0, 1, 2, 3, 4, 11, 12}  # columns that are text


def verdict(ratio: float, bar: float | None, aim: float | None) -> str:
    """ "aim", "bar" or "missed"; nothing where nothing was asked.

    >>> verdict(0.99, 0.96, 1.0), verdict(0.9, 0.96, 1.0), verdict(0.9, None, None)
    ('bar', 'missed', '')
    """
    if bar is None:
        return ""
    return "aim" if aim is not None and ratio >= aim else "bar" if ratio >= bar else "missed"


def geometric_mean(ratios: Sequence[float]) -> float:
    """
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each group: how many rows, their geometric mean, the worst of those something is asked of, how many missed."""
    found: dict[str, Any] = {}
    for group in GROUPS:
        mine = [row for row in rows if row.get("group") == group]
        if not mine:
            continue
        asked = [row for row in mine if row.get("bar") is not None]
        verdicts = [verdict(row["ratio"], row["bar"], row.get("aim")) for row in asked]
        found[group] = {
            "rows": len(mine),
            "geometric_mean": geometric_mean([row["ratio"] for row in mine]),
            "worst": min((row["ratio"] for row in asked), default=None),
            "asked": len(asked),
            "missed": verdicts.count("missed"),
        }
        if group in MEANS:
            mean, (bar, aim) = found[group]["geometric_mean"], MEANS[group]
            found[group].update(mean_bar=bar, mean_aim=aim, mean_verdict=verdict(mean, bar, aim))
            dtypes = dict.fromkeys(row["dtype"] for row in mine)
            found[group]["means"] = {
                dtype: geometric_mean([row["ratio"] for row in mine if row["dtype"] == dtype]) for dtype in dtypes
            }
    return found


def sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The summary in words, a line a group."""
    lines = []
    for group, found in summary(rows).items():
        line = f"{group}: {found['rows']} rows"
        if group in MEANS:
            line += f", geometric mean {found['geometric_mean']:.3f} (bar {found['mean_bar']}, aim {found['mean_aim']}: "
            line += f"{found['mean_verdict']}; {', '.join(f'{t} {mean:.3f}' for t, mean in found['means'].items())})"
        if found["asked"]:
            line += f", worst {found['worst']:.3f}, {found['missed']} of {found['asked']} missed their bar"
        lines.append(line)
    return lines


def size(row: Mapping[str, Any]) -> str:
    """One number for a cube."""
    m, n, k = row["m"], row["n"], row["k"]
    return str(m) if m == n == k else f"{m}x{n}x{k}"


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row's cells, under HEADER."""

    def number(key: str) -> str:
        return f"{row[key]:.3f}" if row.get(key) is not None else ""

    return [
        row["work"], row["dtype"], size(row), row["layout"], row.get("config", ""), f"{row['ours_us']:.1f}",
        f"{row['peer_us']:.1f}", f"{row['ratio']:.3f}", number("spread"), number("bar"), number("aim"),
        verdict(row["ratio"], row.get("bar"), row.get("aim")), row["peer"],
    ]  # fmt: skip


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The rows by group; mappings with the best first."""
    found = []
    for group in GROUPS:
        mine = [row for row in rows if row.get("group") == group]
        if group == "mappings":
            mine.sort(key=lambda row: (row["dtype"], row["m"], row["layout"], -row["ratio"]))
        if mine:
            found.append((group, mine))
    return found


def table(content: Mapping[str, Any]) -> str:
    """The rows as text, a block a group, and the summary."""
    lines = [f"{content['bench']}: {content['device']}, driver {content['driver']}, {content['date']}; ratio = peer / ours"]
    blocks = [(group, [cells(row) for row in rows]) for group, rows in grouped(content["rows"])]
    every = [HEADER, *(line for _, block in blocks for line in block)]
    widths = [max(len(line[i]) for line in every) for i in range(len(HEADER))]

    def text(line: Sequence[str]) -> str:
        return "  ".join(
            c.ljust(w) if i in TEXT else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()

    for group, block in blocks:
        lines += ["", GROUPS[group], text(HEADER), *map(text, block)]
    lines += ["", *sentences(content["rows"])]
    return "\n".join(lines + [f"FAILED: {case}: {message}" for case, message in content.get("failed", {}).items()])


def markdown(content: Mapping[str, Any]) -> str:
    """The rows as docs/hopper.md has them: a table a group, and the summary."""
    lines = [
        f"Measured on {content['device']}, driver {content['driver']}, {content['date'][:10]}, "
        + ", ".join(f"{name} {content['versions'][name]}" for name in ("torch", "nvidia-cublas", "numba-cuda")
                    if name in content["versions"])
        + ". The ratio is the peer's time over ours.",
        "",
    ]  # fmt: skip
    lines += [f"- {line}" for line in sentences(content["rows"])]
    for group, rows in grouped(content["rows"]):
        lines += ["", f"### {GROUPS[group]}", "", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    failed = content.get("failed", {})
    if failed:
        lines += ["", "Not measured:", "", *(f"- {case}: {message}" for case, message in failed.items())]
    return "\n".join(lines)


def merge(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result file of several runs: of each case the row of the last file that has one.

    A ratio is of one run, so rows of several runs may stand side by side; each keeps the ``date`` of its own.

    Raises:
        ValueError: files of several devices.
    """
    devices = {content["device"] for content in contents}
    if len(devices) != 1:
        raise ValueError(f"files of several devices cannot be merged: {', '.join(sorted(devices))}")
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for content in contents:
        failed.update(content.get("failed", {}))
        found.update((row["case"], {"date": content["date"], **row}) for row in content["rows"])
    rows = sorted(found.values(), key=lambda row: list(GROUPS).index(row["group"]))
    failed = {case: message for case, message in failed.items() if case not in found}
    return {**contents[-1], "rows": rows, "summary": summary(rows), "failed": failed}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.verdicts", description="Print a result file with groups.")
    parser.add_argument("results", type=Path, nargs="+", help="result files; of each case the last one's row counts")
    parser.add_argument("--markdown", action="store_true", help="as docs/hopper.md has it")
    parser.add_argument("--out", type=Path, help="write the merged file here")
    options = parser.parse_args(arguments)
    content = merge([report.read(path) for path in options.results])
    if options.out is not None:
        report.write(content, options.out)
    print(markdown(content) if options.markdown else table(content))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
