"""Products of plain matrices against cuBLAS: `python -m bench.gemm`.

    python -m bench.gemm --dtypes f16,f32 --sizes 1024,2048,4096x4096x512 --layouts nn,nt,tn,tt
    python -m bench.gemm --self-test        the peer against itself: what this machine's noise makes of a
    ratio of 1

D = A @ B with the result in the operands' type, random normal data, TF32 off. The layout has a letter for A
and one for B: "n" stored in C order as it is multiplied, "t" the transposed view of a C-ordered array. The
exit status is 1 if a result was wrong; such a row is not written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import backends, report
from bench.harness import Call, Row, Work, WrongResult, compare, input_sets

# The largest relative error of a right result: the rounding of D, and for f32 and f64, whose sums are rounded
# as finely as D is, of the sum too.
TOLERANCES = {"f16": 1e-3, "bf16": 8e-3, "f32": 1e-5, "f64": 1e-13}

# Above this many multiply-adds the float64 reference is computed for a sample of the rows.
WHOLE_REFERENCE = 2**38
SAMPLED_ROWS = 512


@dataclass(frozen=True)
class Problem:
    """One product: what a named configuration may look at."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str


# Configurations by name: from the problem to the `conf` argument of `gemmkit.plan` (None: derived from the
# arguments).
CONFIGS: dict[str, Callable[[Problem], Any]] = {
    "default": lambda problem: None,
}


def ours(a: Any, b: Any, d: Any, configuration: Any) -> Call:
    """A call of gemmkit's planned product."""
    import gemmkit

    run = gemmkit.plan(a, b, None, configuration)
    return lambda: run(a, b, out=d)


def operand(backend: backends.Backend, rows: int, columns: int, letter: str, dtype: str, seed: int) -> Any:
    """A rows x columns operand, stored as it is ("n") or as its transpose ("t")."""
    if letter == "n":
        return backend.normal(rows, columns, dtype, seed)
    return backend.normal(columns, rows, dtype, seed).T


def measure(
    backend: backends.Backend, problem: Problem, config: str, pairs: int, itself: bool = False
) -> Row:
    """One row: `problem` with the configuration named `config`, or the peer against itself."""
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    sets = input_sets((m * k + k * n) * backend.itemsize(dtype), backend.l2_bytes())
    a = [operand(backend, m, k, problem.layout[0], dtype, 2 * i) for i in range(sets)]
    b = [operand(backend, k, n, problem.layout[1], dtype, 2 * i + 1) for i in range(sets)]
    d = [backend.empty(m, n, dtype) for _ in range(sets)]
    e = [backend.empty(m, n, dtype) for _ in range(sets)]

    def peer(i: int, out: Any) -> Call:
        return lambda: backend.matmul(a[i], b[i], out)

    def error(i: int, outputs: Sequence[Any] = d) -> float:
        sampled = m * n * k > WHOLE_REFERENCE and m > SAMPLED_ROWS
        rows = backend.sample(m, SAMPLED_ROWS, i) if sampled else None
        out = outputs[i] if rows is None else outputs[i][rows]
        return backend.relative_error(out, backend.reference(a[i], b[i], rows))

    def poison() -> None:
        for out in d:
            backend.poison(out)

    configuration = CONFIGS[config](problem)
    row = compare(
        Work("peer against itself" if itself else "matmul", dtype, m, n, k, problem.layout),
        [peer(i, d[i]) if itself else ours(a[i], b[i], d[i], configuration) for i in range(sets)],
        [peer(i, e[i]) for i in range(sets)],
        peer_name=backend.peer_name(),
        clock=backend,
        poison=poison,
        error=error,
        tolerance=TOLERANCES[dtype],
        pairs=pairs,
        further={"config": config},
    )
    return {**row, "peer_error": error(0, e)}


def sizes(text: str) -> list[tuple[int, int, int]]:
    """Parse "1024,512x256x64" into (M, N, K) triples."""
    triples = []
    for part in text.split(","):
        numbers = part.split("x")
        if len(numbers) not in (1, 3) or not all(
            number.isdecimal() and int(number) > 0 for number in numbers
        ):
            raise argparse.ArgumentTypeError(f"a size is N or MxNxK with positive numbers, got {part!r}")
        m, n, k = (int(number) for number in (numbers * 3 if len(numbers) == 1 else numbers))
        triples.append((m, n, k))
    return triples


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of `allowed`."""

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return text.split(",")

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gemm", description="Plain products against cuBLAS."
    )
    parser.add_argument("--dtypes", type=names(tuple(TOLERANCES)), default=["f16", "f32"])
    parser.add_argument(
        "--sizes", type=sizes, default=sizes("1024,2048,4096"), help="N or MxNxK, separated by commas"
    )
    parser.add_argument("--layouts", type=names(report.LAYOUTS), default=["nn"])
    parser.add_argument("--configs", type=names(tuple(CONFIGS)), default=["default"])
    parser.add_argument("--pairs", type=int, default=20, help="timed pairs a row (default 20)")
    parser.add_argument(
        "--backend", choices=tuple(backends.BACKENDS), help="default: PyTorch if there, else CuPy"
    )
    parser.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    parser.add_argument("--self-test", action="store_true", help="time the peer against itself")
    options = parser.parse_args(arguments)

    backend = backends.choose(options.backend)
    bench = "gemm_self_test" if options.self_test else "gemm"
    rows, wrong = [], []
    for dtype in options.dtypes:
        for m, n, k in options.sizes:
            for layout in options.layouts:
                for config in options.configs:
                    try:
                        problem = Problem(m, n, k, dtype, layout)
                        rows.append(measure(backend, problem, config, options.pairs, options.self_test))
                    except WrongResult as problem_found:
                        wrong.append(str(problem_found))
                        print(f"WRONG: {problem_found}", file=sys.stderr, flush=True)
    path = report.results_path(bench, options.out)
    content = report.document(bench, rows, backend.device(), tf32=False)
    report.write(content, path)
    print(f"\n{path}\n{report.table(content)}")
    for line in wrong:
        print(f"WRONG, not in the table: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
