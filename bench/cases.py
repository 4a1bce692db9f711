"""The rows of `bench.hopper`: what is measured, against what, and what is asked of it.

A `Case` is one row. `make` lists those of some groups; `operands` and `plan_arguments` turn a case into arrays and into a
call of `gemmkit.plan`. Nothing here needs a GPU: `bench.prepare` compiles the same calls ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

import gemmkit
from bench import mappings
from bench.fusions import WORKS, Operands
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.plans.problem import layout_of
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import target
from gemmkit.tuning.model import CostedTile, fastest
from gemmkit.tuning.sm90 import ACROSS, MAPPINGS, PROMOTED, TRANSPOSED

DTYPES = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64), "i8": np.dtype(np.int8), "i32": np.dtype(np.int32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Types of a product: of A and B, of D, and how it is accumulated.

    `operator` has the arguments of WGMMAOp; None leaves the choice to gemmkit. `mapping` is given where gemmkit's own
    choice does not know of the kind. `tolerance` is the largest relative error of a right result.
    """

    dtype: str
    out: str
    tolerance: float
    operator: dict[str, Any] | None = None
    mapping: str | None = None

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def mappings(self, layout: str) -> tuple[CostedTile, ...]:
        """Those that gemmkit chooses from once the operator's N is given: for a bench asks for the best N as well."""
        if (self.operator or {}).get("promote"):
            return PROMOTED
        if self.itemsize == 4 and layout in ("nn", "tt"):
            return ACROSS
        return MAPPINGS if self.itemsize == 2 or layout == "nt" else TRANSPOSED


KINDS = {
    "f16": Kind("f16", "f16", 1e-3),
    "bf16": Kind("bf16", "bf16", 8e-3),
    # 10 bits of mantissa; what is cut off is not rounded, so the error does not average out.
    "tf32": Kind("f32", "f32", 2e-3, dict(dtype=np.float32)),
    "i8": Kind("i8", "i32", 0.0, dict(dtype=np.int8)),
    # The tensor cores keep 14 bits of a sum of 8-bit floats, unless it is promoted to float32 now and then.
    "e4m3 fast": Kind("e4m3", "bf16", 5e-2, dict(dtype=ml_dtypes.float8_e4m3fn)),
    "e4m3": Kind(
        "e4m3", "bf16", 8e-3, dict(dtype=ml_dtypes.float8_e4m3fn, promote=128)
    ),
}


@dataclass(frozen=True)
class Case:
    """One row. `bar` and `aim` are of the ratio.

    `peer` is "cuBLAS" with what cuBLASLt fuses, "kernels" (cuBLAS's plain product, the rest by element-wise kernels), or
    "plain" (our own plain product).
    """

    group: str
    work: str
    kind: str
    m: int
    n: int
    k: int
    layout: str = "nn"
    peer: str = "cuBLAS"
    mapping: str | None = None
    bar: float | None = field(default=None, compare=False)
    aim: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        against = "" if self.peer == "cuBLAS" else f" against {self.peer}"
        config = f" {self.mapping}" if self.mapping else ""
        return f"{self.group}: {self.work} {self.kind} {self.m}x{self.n}x{self.k} {self.layout}{config}{against}"


# -- the groups -------------------------------------------------------------------------------------------------------

SIZES = {"square": (2048, 4096, 8192, 16384), "types": (4096, 8192), "fused": (4096,), "transforms": (4096,),
         "table2": (4096,), "toeplitz": (4096,), "diagonal": (4096,), "triangular": (8192,), "fusion": (4096,),
         "symmetric": (4096, 8192, 16384),
         "mappings": (4096,)}  # fmt: skip
QUICK_SIZES = {"square": (2048, 4096), "types": (4096,)}
LAYOUTS = ("nn", "nt", "tn", "tt")
RAGGED = (
    (8192, 1024, 4096),
    (1000, 3000, 2000),
    (4095, 4095, 4095),
    (4096, 4096, 64),
    (512, 512, 16384),
)
#: Rows that begin at any address, and odd widths: what TMA cannot bring.
EDGES = (
    (14, 1447, 55, "tt"), (384, 34, 17, "nt"), (64, 51, 289, "tn"), (448, 448, 4534, "nn"), (4299, 64, 3328, "tn"),
    (2964, 64, 3167, "nt"), (1001, 1001, 1001, "nn"), (1001, 1001, 1001, "nt"), (648, 5649, 11, "nn"), (1824, 4353, 1, "nt"),
    (270, 8, 3584, "tt"), (1155, 3807, 64, "nt"), (1496, 6513, 96, "tt"), (192, 218, 29, "nt"), (8, 64, 181, "nt"),
    (480, 1344, 356, "nt"), (3, 64, 524, "tt"), (2047, 2047, 2047, "nn"), (500, 500, 500, "nn"), (333, 777, 1555, "nn"),
    (5000, 5000, 129, "nn"), (4097, 4097, 4097, "nn"), (31, 275, 640, "tn"),
    # The head of a model of 50257 words (GPT-2's), and its gradients.
    (8192, 50257, 768, "nt"), (8192, 768, 50257, "nn"), (50257, 768, 8192, "tn"),
)  # fmt: skip
Sizes = Sequence[int]


def square(sizes: Sizes) -> Iterator[Case]:
    for n in sizes:
        for kind in ("f16", "bf16"):
            for layout in LAYOUTS:
                yield Case("square", "matmul", kind, n, n, n, layout, bar=0.96, aim=1.00)


def ragged() -> Iterator[Case]:
    for m, n, k in RAGGED:
        yield Case("ragged", "matmul", "f16", m, n, k, bar=0.90, aim=1.0)


def edges() -> Iterator[Case]:
    for m, n, k, layout in EDGES:
        yield Case("edges", "matmul", "f16", m, n, k, layout)


TYPES = (
    *(("tf32", layout) for layout in ("nt", "nn", "tt", "tn")),
    *((kind, "nt") for kind in ("i8", "e4m3 fast", "e4m3")),
)


def types(sizes: Sizes) -> Iterator[Case]:
    """8-bit operands as cuBLAS takes them: B by columns."""
    for n in sizes:
        for kind, layout in TYPES:
            asked = not kind.startswith("e4m3") or n == 8192
            bar, aim = (0.97, 1.05) if asked else (None, None)
            yield Case("types", "matmul", kind, n, n, n, layout, bar=bar, aim=aim)


# How much longer than the plain product it may take, and how much is aimed at.
EXTRA = {"bias": 0.02, "bias relu": 0.02, "c": 0.06, "gelu residual": 0.06}
EXTRA_AIM = 0.01


def fused(sizes: Sizes) -> Iterator[Case]:
    for n in sizes:
        yield Case("fused", "matmul", "f16", n, n, n)
        for work, extra in EXTRA.items():
            yield Case(
                "fused", work, "f16", n, n, n, peer="plain", bar=1 / (1 + extra), aim=1 / (1 + EXTRA_AIM)
            )
            yield Case("fused", work, "f16", n, n, n)


def transformed(sizes: Sizes) -> Iterator[Case]:
    for n in sizes:
        for work, bar, aim in (("relu a", None, None), ("add b", 0.87, 0.95)):
            yield Case("transforms", work, "f16", n, n, n, peer="plain", bar=bar, aim=aim)


def table2(sizes: Sizes) -> Iterator[Case]:
    for n in sizes:
        yield Case("table2", "table2", "f16", n, n, n, bar=1.25, aim=1.5)


def toeplitz(sizes: Sizes) -> Iterator[Case]:
    for n in sizes:
        yield Case("toeplitz", "toeplitz", "f16", n, n, n, peer="plain", bar=0.7, aim=0.95)


def diagonal(sizes: Sizes) -> Iterator[Case]:
    """The paper's Table 1, on either side."""
    for n in sizes:
        for work in ("diagonal", "dense diagonal"):
            yield Case("diagonal", work, "f16", n, n, n, bar=5.0, aim=8.0)


def triangular(sizes: Sizes) -> Iterator[Case]:
    for n in sizes:
        for work in ("lower", "upper"):
            yield Case("triangular", work, "f16", n, n, n, bar=1.6, aim=1.9)


def symmetric(sizes: Sizes) -> Iterator[Case]:
    """X X^T in both halves, against the whole product."""
    for n in sizes:
        for kind in ("f16", "bf16"):
            yield Case("symmetric", "gram", kind, n, n, n, "nt", bar=1.7, aim=2.0)


# The rows of the paper's Table 2, and what is asked of the first and the last.
TABLE_2: dict[str, tuple[float | None, float | None]] = {
    "matmul": (0.98, 1.05), "relu": (None, None), "bias": (None, None), "bias relu": (None, None),
    "bias relu c": (None, None), "table2": (1.4, 1.55),
}  # fmt: skip


def fusion(sizes: Sizes) -> Iterator[Case]:
    for n in sizes:
        for work, (bar, aim) in TABLE_2.items():
            peer = "cuBLAS" if work == "matmul" else "kernels"
            yield Case("fusion", work, "f16", n, n, n, peer=peer, bar=bar, aim=aim)


DECODED = ((4096, 4096), (14336, 4096), (4096, 14336))  # columns, and K


def decode() -> Iterator[Case]:
    """A few rows with an epilogue; B as weights lie, row by row of its transpose."""
    for n, k in DECODED:
        for m in (1, 8, 32):
            yield Case("decode", "matmul", "f16", m, n, k, "nt")
            for work in ("bias relu", "gelu residual"):
                yield Case("decode", work, "f16", m, n, k, "nt", peer="kernels", bar=1.0, aim=1.3)


def tuned(sizes: Sizes, kinds: Sequence[str], names: Sequence[str]) -> Iterator[Case]:
    for n in sizes:
        for kind in kinds:
            for layout in ("nt", "nn") if KINDS[kind].itemsize == 2 else ("nt",):
                for name in names:
                    yield Case("mappings", "matmul", kind, n, n, n, layout, mapping=name)


# Measured by bench.hopper; the rest is for tuning.
PUBLISHED = ("square", "ragged", "edges", "types", "fused", "transforms", "table2", "toeplitz")
PAPER = ("diagonal", "triangular", "symmetric", "fusion")  # and beyond it, by bench.experiments
GROUPS = (*PUBLISHED, *PAPER, "decode", "mappings")


def make(
    groups: Sequence[str],
    *,
    sizes: Sizes | None = None,
    kinds: Sequence[str] = ("f16",),
    names: Sequence[str] = mappings.DEFAULT,
    match: str = "",
    quick: bool = False,
    config: str | None = None,
) -> list[Case]:
    """The cases of some groups, in the order of GROUPS.

    Args:
        groups: of GROUPS.
        sizes: N of the square products, in place of each group's own.
        kinds, names: types and mappings of the group "mappings".
        match: a regular expression; only cases whose text has it are taken.
        quick: fewer sizes.
        config: the mapping of the rows that have none of their own, in place of gemmkit's choice.
    """

    def of(group: str) -> Sizes:
        return sizes or (quick and QUICK_SIZES.get(group)) or SIZES[group]

    made = {
        "square": lambda: square(of("square")),
        "ragged": ragged,
        "edges": edges,
        "types": lambda: types(of("types")),
        "fused": lambda: fused(of("fused")),
        "decode": decode,
        "transforms": lambda: transformed(of("transforms")),
        "table2": lambda: table2(of("table2")),
        "toeplitz": lambda: toeplitz(of("toeplitz")),
        "diagonal": lambda: diagonal(of("diagonal")),
        "triangular": lambda: triangular(of("triangular")),
        "fusion": lambda: fusion(of("fusion")),
        "symmetric": lambda: symmetric(of("symmetric")),
        "mappings": lambda: tuned(of("mappings"), kinds, names),
    }
    found = [case for group in GROUPS if group in groups for case in made[group]()]
    found = [replace(case, mapping=case.mapping or config) for case in found]
    return [case for case in found if re.search(match, str(case))]


# -- from a case to a call --------------------------------------------------------------------------------------------

Matrix = Callable[[str, int, int, str], Any]


def operands(case: Case, matrix: Matrix) -> Operands:
    """The arrays of a case. ``matrix(name, rows, columns, dtype)`` makes a C-ordered array for the operand ``name``."""
    kind, (m, n, k) = KINDS[case.kind], (case.m, case.n, case.k)

    def stored(name: str, rows: int, columns: int, letter: str) -> Any:
        if letter == "n":
            return matrix(name, rows, columns, kind.dtype)
        return matrix(name, columns, rows, kind.dtype).T

    shapes = {"c": (m, n), "bias": (1, n), "residual": (m, n), "diagonals": (1, m + k - 1), "diagonal": (1, k)}
    more = {name: matrix(name, *shapes[name], kind.dtype) for name in WORKS[case.work].takes}
    return Operands(
        stored("a", m, k, case.layout[0]),
        stored("b", k, n, case.layout[1]),
        matrix("out", m, n, kind.out),
        matrix("peer_out", m, n, kind.out),
        **{name: array if name in ("c", "residual") else array[0] for name, array in more.items()},
    )


def plan_arguments(case: Case, x: Operands) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keywords of `gemmkit.plan`.

    Raises:
        gemmkit.ConfigError: the mapping is none that the kernel has.
    """
    kind, work, sizes = KINDS[case.kind], WORKS[case.work], (case.m, case.n, case.k)
    a, b = work.left(x), work.right(x)
    keywords = {"out": x.out, **work.keywords(x, DTYPES[kind.dtype])}
    name = case.mapping or kind.mapping
    if name is None:
        if kind.operator is not None:
            n = fastest(sizes, target(), itemsize=kind.itemsize, mappings=kind.mappings(case.layout)).N
            keywords["operator"] = WGMMAOp(n, **kind.operator)
        return (a, b, work.added(x), None), keywords
    mapping = mappings.parse(name)
    conf = gemmkit.get_config(
        operator=WGMMAOp(mapping.N, **(kind.operator or dict(dtype=DTYPES[kind.dtype]))),
        global_a_layout=keywords.get("global_a_layout") or layout_of(describe(a, "a"), "a"),
        global_b_layout=keywords.get("global_b_layout") or layout_of(describe(b, "b"), "b"),
        global_d_layout=layout_of(describe(x.out, "out"), "out"),
        gemm_shape=dict(zip("MNK", sizes, strict=True)),
        **mapping.fields(kind.itemsize),
    )
    return (a, b, work.added(x), conf), keywords
