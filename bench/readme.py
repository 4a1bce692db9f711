"""The figures of docs/measured.md, from `bench/results` alone: `python -m bench.readme`.

    python -m bench.readme                            the tables
    python -m bench.readme --into docs/measured.md    write them into the text, between its two marks
    python -m bench.readme --rows --into docs/measured_rows.md    every case, a table a line

Each line is one group of rows: their geometric mean, the worst, how many are below 1, and the file. Every row of every
result file belongs to exactly one line, so no group can be left out (`tests/bench/test_report.py`). If a case was
measured against several peers, only its fastest peer counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import marks, report, verdicts

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- measured: python -m bench.readme --into docs/measured.md -->", "<!-- end of what was measured -->"

Row = Mapping[str, Any]


#: What tells a case from another; its rows are of several peers. (Other convolutions have the same M, N and K.)
CASE = "work", "dtype", "m", "n", "k", "layout", "config", "mapping", "images", "extent", "stride"


@dataclass(frozen=True)
class Line:
    """A line of the table: its words, the file and group of its rows, and which of the group's they are.

    ``of`` is asked of a row's work, dtype and peer.
    """

    what: str
    file: str
    group: str
    of: Callable[[Row], bool] = lambda row: True

    def rows(self, results: Path) -> list[Row]:
        """All rows of the line, a row for each peer of a case."""
        rows = report.read(results / f"{self.file}.json")["rows"]
        return [row for row in rows if row.get("group") == self.group and self.of(row)]

    def cases(self, results: Path) -> list[Row]:
        """Of each case the row against its fastest peer.

        Raises:
            ValueError: the line has no rows.
        """
        found: dict[Any, Row] = {}
        for row in self.rows(results):
            case = tuple(row.get(key) for key in CASE)
            if case not in found or row["ratio"] < found[case]["ratio"]:
                found[case] = row
        if not found:
            raise ValueError(f"{self.file}.json has no rows of {self.what!r}")
        return list(found.values())

    def ratios(self, results: Path) -> list[float]:
        return [row["ratio"] for row in self.cases(results)]


def is_own(row: Row) -> bool:
    """Whether the peer is gemmkit."""
    return str(row["peer"]).startswith(("gemmkit", "by hand"))


def of_library(row: Row) -> bool:
    return not is_own(row)


def is_work(*begins: str, peer: str | tuple[str, ...] = "") -> Callable[[Row], bool]:
    """Rows whose work, and whose peer, begin like one of these."""
    return lambda row: row["work"].startswith(begins) and row["peer"].startswith(peer)


def is_dtype(*dtypes: str) -> Callable[[Row], bool]:
    return lambda row: row["dtype"] in dtypes


MULTISTAGE = "GEMM, multistage"

#: Against other libraries. README's picture has them all.
LIBRARIES = (
    Line("f16, bf16 squares, 2048 to 16384", "hopper_square", "square"),
    Line("f16, not square, K of 64 to 16384", "hopper", "ragged"),
    Line("f16, rows that begin at any address", "hopper", "edges"),
    Line("tf32, 4096 and 8192", "hopper", "types", is_dtype("tf32")),
    Line("int8, 4096 and 8192, against `_int_mm`", "hopper", "types", is_dtype("i8")),
    Line("fp8, 4096 and 8192, against `_scaled_mm`", "hopper", "types", is_dtype("e4m3", "e4m3 fast")),
    Line("fp8 with scales of rows, against `_scaled_mm`", "scaled", "scaled", is_work("fast", "exact")),
    Line("fp8 with scales of 128 and of 128 x 128, against `_scaled_mm`", "scaled", "scaled", is_work("blocks")),
    Line("float32 (no tf32), 512 to 8192", "multistage", "float32"),
    Line("float64, 512 to 8192", "multistage", "float64"),
    Line("products by int8 (`precision=\"ozaki\"`), float32, float64 and complex numbers, 1024 to 16384", "ozaki", "ozaki"),
    Line("complex64, 1024 to 4096", "multistage", "complex", is_dtype("f32")),
    Line("complex128, 1024 to 4096", "multistage", "complex", is_dtype("f64")),
    Line("f16, 1 to 32 rows, as weights lie", "decode", "skinny"),
    Line("f16, 40 to 256 rows or columns, as weights lie", "decode", "some"),
    Line("f16, 1 to 32 rows, plain, beside the next line", "decode", "decode", is_work("matmul")),
    Line("f16, 1 to 32 rows, with an epilogue", "decode", "decode", lambda row: row["work"] != "matmul"),
    Line("f16, few tiles and a long K", "multistage", "long", is_dtype("f16")),
    Line("f32, few tiles and a long K", "multistage", "long", is_dtype("f32")),
    Line("stacks of f16 and f32, against `torch.bmm`", "multistage", "stacks"),
    Line("32 products of random sizes, against a loop of cuBLAS", "multistage", "grouped"),
    Line("experts, bf16, against `torch._grouped_mm`", "multistage", "experts"),
    Line("blocks that are empty, against the whole matrix", "multistage", "sparse"),
    *(Line(f"{name}: random sizes, orders and stacks", "random", "random", is_dtype(*kinds)) for name, kinds in (
        ("f16 and bf16", ("f16", "bf16")), ("f32", ("f32",)), ("f64", ("f64",)), ("tf32", ("tf32",)), ("int8", ("i8",)),
        ("fp8 with float32 sums", ("e4m3",)))),
    Line("weights of 4 bits, 1 to 16 rows, against float16 weights", "quantised", "quantised", lambda row: row["m"] <= 16),
    Line("weights of 4 bits, 32 to 256 rows, against float16 weights", "quantised", "quantised", lambda row: row["m"] > 16),
    Line("convolutions, against cuDNN", "conv", "conv", is_work("forward")),
    Line("convolutions with a bias, a residual and ReLU, against cuDNN and PyTorch", "conv", "conv", is_work("fused")),
    Line("gradients of convolutions, against cuDNN", "conv", "conv", is_work("input", "weight")),
    Line("f16 4096, bias, ReLU, C, GELU, residual, against cuBLASLt", "hopper_fused", "fused", of_library),
    Line("relu(A+1) @ (B+1) + bias + relu(C)", "hopper", "table2"),
    Line("f16 into f32, D = A B + C, 128 to 16384 (Fig. 8)", "mixed", "mixed"),
    Line("the same by the WMMA operator, which `matmul` does not choose on Hopper", "mixed", "wmma"),
    Line("f16 into f32 with C: the paper's fusions (Table 2)", "mixed", "mixed_fusion"),
    Line("f16 into f32 with C: diagonal x dense", "mixed", "mixed_diagonal"),
    Line("f16 into f32 with C: complex and dual numbers, 128 to 8192, against real products", "mixed", "mixed_algebras"),
    Line("f16 into f32: the paper's contraction (Table 3), against a transposition and cuBLASLt", "mixed",
         "mixed_contraction"),
    Line("products, gated pairs and sums of rows, against Triton, QuACK and PyTorch", "rivals", "rivals",
         is_work("square", "glu", "row sums")),
    Line("attention, against FlashAttention-4, Triton, cuDNN and FlashAttention-2", "rivals", "rivals",
         is_work("plain", "causal")),
    Line("programs of figures 13 and 14 (Cypress), against cuBLAS, cuDNN and Triton", "cypress", "cypress",
         is_work("", peer=("cuBLAS", "cuDNN", "Triton"))),
    Line("layer norm and an LSTM cell, against PyTorch eager, scripted and compiled, and QuACK", "rivals", "rivals",
         is_work("layernorm", "lstm")),
    Line("the paper's fusions (Table 2)", "experiments", "fusion"),
    Line("diagonal x dense, against the whole matrix", "experiments", "diagonal"),
    Line("triangular x dense, against the whole matrix", "experiments", "triangular"),
    Line("X X^T in both halves, 4096 to 16384, against the whole product", "symmetric", "symmetric"),
    Line("complex and dual numbers of f16, against real products", "experiments", "algebras"),
    Line("complex64, 4096 (the paper's)", "experiments", "complex64"),
    Line("the paper's contraction (Table 3)", "experiments", "contraction"),
    Line("TCCG's contractions, f16, against `torch.einsum`", "experiments", "tccg", is_dtype("f16")),
    Line("TCCG's contractions, f32, against `torch.einsum`", "experiments", "tccg", is_dtype("f32")),
    Line("attention, 384 to 16384 keys, against cuDNN", "attention", "attention"),
    Line("attention, 512 to 2048 keys, against cuDNN", "attention", "attention_short"),
    Line("attention of packed sequences, against PyTorch's varlen_attn", "sequences", "packed"),
    Line("attention with scores and masks, against FlexAttention", "attention_rules", "attention_rules"),
    Line("gradients of attention, against cuDNN", "attention_backward", "by PyTorch", is_work("", peer="cuDNN")),
    Line("gradients of attention, against FlashAttention 2", "attention_backward", "by PyTorch",
         is_work("", peer="FlashAttention 2")),
    Line("gradients of attention, against FlashAttention 4", "attention_backward", "by PyTorch",
         is_work("", peer="FlashAttention 4")),
    Line("the same in any order, against cuDNN", "attention_backward", "by PyTorch, in any order",
         is_work("", peer="cuDNN")),
    Line("the same in any order, against FlashAttention 2", "attention_backward", "by PyTorch, in any order",
         is_work("", peer="FlashAttention 2")),
    Line("the same in any order, against FlashAttention 4", "attention_backward", "by PyTorch, in any order",
         is_work("", peer="FlashAttention 4")),
    Line("gradients of attention with ALiBi, soft caps, windows, shared heads, against FlexAttention", "attention_backward",
         "by FlexAttention"),
    Line("the same in any order, against FlexAttention", "attention_backward", "by FlexAttention, in any order"),
    Line("recurrences, against torch.compile", "recurrences", "by torch.compile"),
    Line("recurrences, against a Triton kernel", "recurrences", "by Triton"),
    Line("softmax and norms, against PyTorch and torch.compile", "rows", "rows"),
    Line("`mlp`, width 128, against cuBLASLt", "mlp", "mlp"),
    Line("products with norms, gates, LSTM cells", "composed", "composed", of_library),
    Line("program: attention, against cuDNN", "derived", "derived", is_work("attention", "causal", peer="cuDNN")),
    Line("program: MLP, against cuBLASLt", "derived", "derived", is_work("MLP", peer="cuBLASLt")),
    Line("program: LSTM cell, against cuBLAS and PyTorch", "derived", "derived", is_work("LSTM", peer="cuBLAS")),
    Line("program: products, dual, with row sums", "derived", "derived",
         lambda row: row["work"].startswith(("GEMM", "dual")) and row["work"] != MULTISTAGE and of_library(row)),
    Line("program: product by the multistage kernel", "derived", "derived", is_work(MULTISTAGE, peer="cuBLAS")),
    Line("program: a product in clusters", "programs", "programs"),
    Line("program: kernels that no library has", "novel", "novel"),
    Line("program: attention of few queries, against PyTorch", "shares", "shares", is_work("", peer="PyTorch")),
    Line("schedules: first decompositions, f32", "specs", "decompositions"),
    Line("schedules: Fireiron's listings", "specs", "listings", of_library),
    Line("schedules: tiles in shared memory, f16 to f32", "specs", "staged"),
    Line("schedules and `matmul`, small f16 to f32", "specs", "small"),
    Line("specs: an MLP, LSTM cells, layer norms and attention, against PyTorch and cuDNN", "specs", "fused_specs"),
    Line("training in torch.compile, against `nn.Linear`", "training", "training"),
    Line("the loss of a head of 128,256 words, against `torch.compile`", "training", "head"),
    Line("decoder layers by the backend of torch.compile, against Inductor", "compiled", "layer"),
    Line("MLPs by the backend of torch.compile, against Inductor", "compiled", "mlp"),
    Line("models after `accelerate`, in graphs or compiled, against PyTorch's best", "models", "models",
         lambda row: not row["work"].endswith(", eager")),
    Line("models after `accelerate`, eager", "models", "models", lambda row: row["work"].endswith(", eager")),
    Line("five networks of transformers, against PyTorch's best in graphs", "networks", "networks",
         lambda row: "," not in row["work"]),
    Line("five networks by the backend of torch.compile, against Inductor", "networks", "networks",
         lambda row: row["work"].endswith(", backend")),
    Line("five networks with attention alone, against PyTorch without fused attention", "networks", "networks",
         lambda row: row["work"].endswith(", attention alone")),
    Line("five networks after `accelerate`, eager", "networks", "networks", lambda row: row["work"].endswith(", eager")),
    Line("programs: functions of rows in float64, transposed and by an index, against `torch.compile`", "row_programs",
         "row_forms"),
    Line("host time of a call, against the library's", "host", "host", is_work("plan (", "matmul (", "matmul, in turn")),
    Line("host time of functions and layers, against PyTorch", "host", "host",
         is_work("attention", "softmax", "rmsnorm", "bias", "einsum", "torch.")),
    Line("host time of a program's call, against PyTorch's attention", "host", "host",
         lambda row: row["work"] in ("program", "program, another number")),
    Line("host time of a program's first call of each length, against PyTorch's attention", "host", "host",
         is_work("program, a new length")),
    Line("all-gather and product, two GPUs", "distributed", "all-gather", lambda row: row["peer"] != "alone"),
    Line("product and reduce-scatter, two GPUs", "distributed", "reduce-scatter", lambda row: row["peer"] != "alone"),
    Line("mixtures of experts, two GPUs, against PyTorch's all-to-all and products", "distributed", "experts",
         lambda row: row["peer"] != "alone"),
)  # fmt: skip

#: Against gemmkit's own kernels, or against what the card can do.
OWN = (
    Line("epilogues of a product, against the plain product", "hopper_fused", "fused", is_own),
    Line("transforms of an operand, against the plain product", "hopper", "transforms"),
    Line("a Toeplitz matrix never stored, against the plain product", "hopper", "toeplitz"),
    Line("reductions and gates, against the plain product", "composed", "composed", is_own),
    Line("programs, against the kernels by hand", "derived", "derived",
         lambda row: is_own(row) and row["work"] != MULTISTAGE),
    Line("programs by the multistage kernel, against the kernel by hand", "derived", "derived",
         lambda row: is_own(row) and row["work"] == MULTISTAGE),
    Line("programs: two products in one kernel, against one of them alone", "cypress", "cypress",
         is_work("dual", peer="program")),
    Line("programs: a product with sums of rows, against the product alone", "cypress", "cypress",
         is_work("GEMM and", peer="program")),
    Line("programs: attention, against FlashAttention 2's order", "cypress", "cypress",
         is_work("attention", peer="program")),
    Line("programs: functions of rows, against the kernels by hand", "row_programs", "row_programs"),
    Line("programs: a loop split over blocks, against one block", "shares", "shares", is_work("", peer="splits=1")),
    Line("programs: half of all keys by `stop=`, against all keys", "shares", "lengths"),
    Line("attention: a cache in pages, against contiguous keys", "sequences", "pages"),
    Line("schedules: listings, against the template of the same tiles", "specs", "listings", is_own),
    Line("min-plus f32, against the card's limit", "multistage", "minplus"),
    Line("f16 by mma.sync, against the card's limit", "multistage", "forced"),
    Line("the chosen mapping, against the best of a sweep", "choice", "choice"),
    Line("a call that looks at users' code, against one that does not", "host", "host",
         is_work("plan, users", "matmul, a conf")),
    Line("a second process's first call, against the first's", "first_calls", "host", is_work("first call")),
    Line("all-gather and product, against the product alone", "distributed", "all-gather", is_work("", peer="alone")),
    Line("product and reduce-scatter, against the product alone", "distributed", "reduce-scatter",
         is_work("", peer="alone")),
    Line("mixtures of experts on two GPUs, against a rank's share alone", "distributed", "experts",
         is_work("", peer="alone")),
    Line("min-plus on two GPUs, against half of it on one", "distributed", "min-plus"),
    Line("shares of K as a stream, three ways, against cuBLAS", "stream_k", "streamk"),
    Line("mappings of the multistage kernel, all of a sweep, against cuBLAS", "multistage_sweep", "sweep"),
    Line("the ladder of example kernels, against cuBLAS", "levels", "levels"),
)  # fmt: skip
LINES = (*LIBRARIES, *OWN)


def table(lines: Sequence[Line], title: str, results: Path) -> list[str]:
    """A table of lines."""
    found = [f"| {title} | geometric mean | worst | below 1 | cases | file |", "|" + "---|" * 6]
    for line in lines:
        ratios = line.ratios(results)
        mean, below = verdicts.geometric_mean(ratios), sum(ratio < 1 for ratio in ratios)
        found.append(f"| {line.what} | {mean:.2f} | {min(ratios):.2f} | {below} | {len(ratios)} | `{line.file}` |")
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


def first_calls(results: Path = RESULTS) -> list[str]:
    """Seconds of a process's first call, by work: with an empty cache, and with the kernels on disk."""
    rows = next(line for line in OWN if "second process" in line.what).rows(results)
    found = ["| first call of a process, seconds | empty cache | kernels on disk |", "|---|---|---|"]
    for row in rows:
        seconds = f"{row['peer_us'] * 1e-6:.1f} | {row['ours_us'] * 1e-6:.2f}"
        found.append(f"| {row['work'].removeprefix('first call, ')} | {seconds} |")
    return found


def devices(results: Path = RESULTS) -> list[str]:
    """Of each file: the card, the day, the commit that ran, and whether both sides ran from CUDA graphs."""
    found = ["| file | card | date | commit | launched from |", "|---|---|---|---|---|"]
    for file in sorted({line.file for line in LINES}):
        content = report.read(results / f"{file}.json")
        graphs = {row["graph"] for row in content["rows"]}
        launched = " and ".join(name for name, has in (("CUDA graphs", True), ("the host", False)) if has in graphs)
        found.append(f"| `{file}` | {content['device']} | {content['date'][:10]} | {content['commit']} | {launched} |")
    return found


def text(results: Path = RESULTS) -> str:
    """All that stands between the page's marks."""
    parts = [squares(results), table(LIBRARIES, "the fastest peer's time over gemmkit's", results),
             table(OWN, "gemmkit against itself, or against the card", results), first_calls(results), devices(results)]
    return "\n".join(["", *(line for part in parts for line in (*part, ""))])


def rows_text(results: Path = RESULTS) -> str:
    """Every case of every line, with its fastest peer: what docs/measured_rows.md has between its marks."""
    found = [""]
    for line in LINES:
        content = report.read(results / f"{line.file}.json")
        found += [f"### {line.what}", "", f"{content['device']}, {content['date'][:10]}, commit {content['commit']}, "
                  f"`bench/results/{line.file}.json`.", "",
                  "| work | dtype | M x N x K | order | us | peer | its us | ratio |", "|" + "---|" * 8]
        for row in line.cases(results):
            size = f"{row['m']} x {row['n']} x {row['k']}"
            cells = row["work"], row["dtype"], size, row["layout"], f"{row['ours_us']:.1f}", row["peer"]
            found.append(f"| {' | '.join(cells)} | {row['peer_us']:.1f} | {row['ratio']:.2f} |")
        found.append("")
    return "\n".join(found)


ROWS_BEGIN = "<!-- measured: python -m bench.readme --rows --into docs/measured_rows.md -->"


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "--rows" in given:
        given.remove("--rows")
        return marks.command("bench.readme --rows", rows_text, ROWS_BEGIN, END, given)
    return marks.command("bench.readme", text, BEGIN, END, given)


if __name__ == "__main__":
    raise SystemExit(main())
