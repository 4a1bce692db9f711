"""The measurements of the warp-specialised kernel on an H100: `python -m bench.hopper`.

    python -m bench.hopper                                   all published groups
    python -m bench.hopper --groups square,types --quick     some, in a few seconds
    python -m bench.hopper --groups mappings --sizes 8192 --kinds f16 --match '128x256c-2x1'     tuning
    python -m bench.hopper --prepare only                    compile all kernels (no GPU needed), measure nothing
    python -m bench.hopper --list                            the rows, and what is asked of them

Groups (`bench.cases` lists their rows, `bench.verdicts` prints what came of them):

    square     f16, bf16; N = 2048 to 16384; all transposes        toeplitz  a user's element() layout against our
    ragged     non-square sizes and odd ones                                 own plain product
    types      tf32, int8, fp8 (fast and promoted accumulation)    mappings  tiles x clusters x orders, for tuning
    fused      bias, ReLU, C, GELU, residual: against our own                (not among the published ones)
               plain product, and against PyTorch                  table2    the paper's Table 2, last row
    transforms relu(A + 1) B and A (B + 1) against our own plain product

1. Kernels are compiled in parallel processes, so that the disk cache has their cubins (`bench.prepare`).
2. A worker process times the rows one after the other (`bench.supervise`); a row that fails, hangs or faults is reported
   and the next one is measured, in a new worker if need be.
3. The result file is written after every row, the table last. The exit status is 1 if a row is missing; a missed bar is
   the table's to tell.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import cases, mappings, prepare, report, verdicts
from bench.cases import DTYPES, KINDS, Case
from bench.fusions import WORKS, Operands
from bench.gemm import names
from bench.harness import Call, Row, Work, WrongResult, compare, input_sets
from bench.supervise import Outcome, Patience, outcomes
from gemmkit.tuner.tuner import Progress

SAMPLED_ROWS = 64  # of the result, compared with float64
MOST_BYTES = 2**34  # of the results of all input sets
SEEDS = {name: n for n, name in enumerate(("a", "b", "out", "peer_out", "c", "bias", "residual", "diagonals", "diagonal"))}


def gemmkit_plan(*arguments: Any, **keywords: Any) -> Any:
    import gemmkit

    return gemmkit.plan(*arguments, **keywords)


@dataclass
class Bench:
    """What measures rows: a library's arrays and peers, and how long. ``plan`` takes what `gemmkit.plan` takes."""

    backend: Any  # a `bench.peers.TorchPeers`
    pairs: int = 10
    target_us: float = 4000.0
    plan: Callable[..., Any] = gemmkit_plan
    arrays: dict[tuple, Any] = field(default_factory=dict)  # shared by the rows of a size
    last: tuple = ()

    def matrix(self, i: int, name: str, rows: int, columns: int, dtype: str) -> Any:
        """The operand ``name`` of input set ``i``; a bias is the same in all sets."""
        key = (0 if name == "bias" else i, name, rows, columns, dtype)
        if key not in self.arrays:
            seed = len(SEEDS) * key[0] + SEEDS[name]
            is_output = name in ("out", "peer_out")
            make = self.backend
            self.arrays[key] = (
                make.empty(rows, columns, dtype) if is_output else make.normal(rows, columns, dtype, seed)
            )
        return self.arrays[key]

    def operands(self, case: Case) -> list[Operands]:
        """The input sets of a case."""
        kind, work, backend = KINDS[case.kind], WORKS[case.work], self.backend
        now = (case.m, case.n, case.k, case.kind)
        if now != self.last:
            self.arrays.clear()
            self.last = now
        results = 2 * case.m * case.n * DTYPES[kind.out].itemsize
        count = input_sets(work.elements(case.m, case.n, case.k) * kind.itemsize, backend.l2_bytes())
        count = max(2, min(count, MOST_BYTES // results))
        sets = [cases.operands(case, functools.partial(self.matrix, i)) for i in range(count)]
        for x in sets:
            work.materialise(x, backend)
        return sets

    def measure(self, case: Case) -> Row:
        """One row.

        Raises:
            WrongResult: ours or the peer's result is wrong.
        """
        backend, kind, work = self.backend, KINDS[case.kind], WORKS[case.work]
        sets = self.operands(case)
        arguments = [cases.plan_arguments(case, x) for x in sets]
        # One plan takes the arrays of every set, unless a component has an array of its own in each.
        shared = "residual" not in work.takes
        plans = [self.plan(*given, **keywords) for given, keywords in (arguments[:1] if shared else arguments)]

        def ours(i: int) -> Callable[[], Any]:
            run, ((a, b, c, _), _), x = plans[0 if shared else i], arguments[i], sets[i]
            return lambda: run(a, b, c, out=x.out)

        if case.peer == "plain":
            twin = prepare.plain_twin(case)
            given, keywords = cases.plan_arguments(twin, sets[0])
            plain = self.plan(*given, **{**keywords, "out": sets[0].peer_out})
            peer = [functools.partial(plain, x.a, x.b, out=x.peer_out) for x in sets]
            title, peers_work = "gemmkit, the plain product", WORKS["matmul"]
        else:
            peer = [backend.peer(case, x) for x in sets]
            title, peers_work = backend.peer_title(case), work

        rows = backend.sample(case.m, min(SAMPLED_ROWS, case.m), 0)

        @functools.cache
        def reference(of: Any, i: int) -> Any:
            return of.reference(sets[i], backend.wide, rows)

        def error(i: int) -> float:
            return float(backend.relative_error(sets[i].out[rows], reference(work, i)))

        def poison() -> None:
            for x in sets:
                backend.poison(x.out)

        return self.row(
            case,
            [ours(i) for i in range(len(sets))],
            peer,
            title,
            poison=poison,
            error=error,
            tolerance=kind.tolerance * (2 if work.takes else 1),  # what is added is rounded too
            peer_error=lambda: float(backend.relative_error(sets[0].peer_out[rows], reference(peers_work, 0))),
            peer_tolerance=max(8 * kind.tolerance, 1e-6),
            chosen=getattr(plans[0], "config", None),
        )

    def row(
        self,
        case: Any,
        ours: Sequence[Call],
        peer: Sequence[Call],
        title: str,
        *,
        poison: Call,
        error: Callable[[int], float],
        tolerance: float,
        peer_error: Callable[[], float],
        peer_tolerance: float,
        chosen: Any = None,
        products: int = 1,
    ) -> Row:
        """A case's row, from a call for each input set; ``chosen`` is the configuration of ours.

        Raises:
            WrongResult: ours or the peer's result is wrong.
        """
        row = compare(
            Work(case.work, case.kind, case.m, case.n, case.k, case.layout, products),
            ours,
            peer,
            peer_name=title,
            clock=self.backend,
            poison=poison,
            error=error,
            tolerance=tolerance,
            pairs=self.pairs,
            target_us=self.target_us,
            further={
                "group": case.group,
                "case": str(case),
                "config": case.mapping or "default",
                "bar": case.bar,
                "aim": case.aim,
            },
        )
        found = peer_error()
        if not found <= peer_tolerance:
            raise WrongResult(f"{case}: the peer's relative error is {found:.3g}: {title}")
        return {**row, "peer_error": found, "mapping": chosen and mappings.describe(chosen)}

    def is_lost(self) -> bool:
        try:
            self.backend.synchronise()
        except Exception:
            return True
        return False


def peers() -> Any:
    """PyTorch's arrays and products, for a worker."""
    from bench.peers import TorchPeers

    made = TorchPeers()
    gc.collect()
    gc.freeze()  # PyTorch may collect garbage before every capture: not what the imports left
    return made


def on_torch(pairs: int, target_us: float) -> Bench:
    """What a worker makes."""
    return Bench(peers(), pairs, target_us)


def machine() -> str:
    """The device's name, asked of the driver without making a context."""
    from gemmkit.runtime.device import target

    return target().name


def record(
    found: Sequence[Outcome], header: dict[str, Any], path: Any
) -> dict[str, Any]:
    """Write the rows that there are, and why others are not; returns the file's content."""
    rows = [outcome.row for outcome in found if outcome.row is not None]
    failed = {str(outcome.case): outcome.message for outcome in found if outcome.row is None}
    content = {**header, "rows": rows, "summary": verdicts.summary(rows), "failed": failed}
    report.write(content, path)
    return content


def run(
    wanted: Sequence[Any],
    start: Callable[[], Any],
    path: Any,
    patience: Patience,
    method: str = "spawn",
    name: str = "hopper",
) -> tuple[dict[str, Any], list[Outcome]]:
    """Measure the cases, with a line each and, on a terminal, a bar of progress. The file of the bench ``name`` is written
    after each."""
    header = report.document(name, [], machine())
    found: list[Outcome] = []
    content = record(found, header, path)
    begun = time.monotonic()
    with Progress() as progress:
        progress.begin(name, len(wanted))
        for outcome in outcomes(start, wanted, patience, method=method):
            found.append(outcome)
            content = record(found, header, path)
            row = outcome.row
            said = f"FAILED: {outcome.message}" if row is None else f"{row['ratio']:.3f} ({row['ours_us']:.1f} us)"
            print(f"{time.monotonic() - begun:6.1f} s  {outcome.case}: {said}", flush=True)
            progress.advance()
    return content, found


def whole_numbers(text: str) -> list[int]:
    """Parse "2048,4096"."""
    found = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in found):
        raise argparse.ArgumentTypeError(f"positive numbers, separated by commas, are needed, got {text!r}")
    return [int(part) for part in found]


def mapping_name(text: str) -> str:
    try:
        mappings.parse(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return text


def mapping_names(text: str) -> list[str]:
    """Parse "128x256c-2x1-g8,128x192p-1x1-h"."""
    return [mapping_name(name) for name in text.split(",")]


def expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {problem}") from problem
    return text


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.hopper", description="The Hopper kernel against cuBLAS.")
    made.add_argument("--groups", type=names(cases.GROUPS), default=list(cases.PUBLISHED), help=", ".join(cases.GROUPS))
    made.add_argument("--sizes", type=whole_numbers, help="N of the square products (default: each group's own)")
    made.add_argument("--kinds", type=names(tuple(KINDS)), default=["f16"], help="types of the group mappings")
    made.add_argument("--mappings", type=mapping_names, default=list(mappings.DEFAULT), help="see bench/mappings.py")
    made.add_argument("--config", type=mapping_name, help="a mapping for the rows that have none of their own")
    add_options(made)
    return made


def add_options(made: argparse.ArgumentParser) -> None:
    """How rows are measured, whatever they are: what `execute` takes."""
    made.add_argument("--match", type=expression, default="", help="only rows whose text has this regular expression")
    made.add_argument("--quick", action="store_true", help="fewer sizes, 4 pairs, shorter graphs")
    made.add_argument("--pairs", type=int, help="timed pairs a row (default 10)")
    made.add_argument("--target-us", type=float, help="length of one timed graph (default 4000)")
    made.add_argument("--prepare", choices=("first", "only", "no"), default="first", help="compile ahead in parallel")
    made.add_argument("--jobs", type=int, help="processes that compile (default: cores - 2)")
    made.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no row is waited for")
    made.add_argument("--row-limit", type=float, default=Patience.row, help="seconds that a row may take")
    made.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    made.add_argument("--list", action="store_true", help="list the rows and stop")


def execute(name: str, wanted: Sequence[Any], options: argparse.Namespace, start: Callable[[int, float], Any]) -> int:
    """List, prepare or measure the rows as the options say; the exit status. ``start`` makes a worker."""
    if options.list or not wanted:
        for case in wanted:
            print(case, "" if case.bar is None else f"(at least {case.bar:.3f}, aim {case.aim:.3f})")
        print(f"{len(wanted)} rows")
        return 0 if wanted else 1
    if options.prepare != "no":
        unprepared = [made for made in prepare.prepare(wanted, options.jobs) if made.error]
        if options.prepare == "only":
            return 1 if unprepared else 0
    pairs = options.pairs or (4 if options.quick else 10)
    target_us = options.target_us or (1000.0 if options.quick else 4000.0)
    path = report.results_path(name, options.out)
    patience = Patience(row=options.row_limit, whole=options.limit)
    content, found = run(wanted, functools.partial(start, pairs, target_us), path, patience, name=name)
    print(f"\n{path}\n{verdicts.table(content)}")
    return 1 if any(outcome.row is None for outcome in found) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    wanted = cases.make(
        options.groups,
        sizes=options.sizes,
        kinds=options.kinds,
        names=options.mappings,
        match=options.match,
        quick=options.quick,
        config=options.config,
    )
    return execute("hopper", wanted, options, on_torch)


if __name__ == "__main__":
    sys.exit(main())
