"""Functions of rows as programs beside those that are written by hand: `python -m bench.row_programs [layernorm ...]`.

Both are gemmkit's, on the same teams of threads, timed in turns in one run (`bench.harness`): the ratio is the time of
`gemmkit.layernorm`, `rmsnorm` or `softmax` over that of the derived kernel. Sizes and operands are those of
`bench.experiments rows`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import gemmkit
from bench import hopper
from bench.experiments.rows import COLUMNS, ROWS, WORKS, RowWise
from bench.harness import Call, Row, Work, compare, input_sets
from bench.turns import command
from gemmkit import programs as gp


@gemmkit.program
def layernorm(x: Any, gamma: Any, beta: Any, y: Any, eps: float) -> None:
    for m in gp.parallel(x.rows):
        c = x[m] - x[m].mean(axis=1)
        y[m] = c * gp.rsqrt((c * c).mean(axis=1) + eps) * gamma + beta


@gemmkit.program
def rmsnorm(x: Any, gamma: Any, y: Any, eps: float) -> None:
    for m in gp.parallel(x.rows):
        t = x[m]
        y[m] = t * gp.rsqrt((t * t).mean(axis=1) + eps) * gamma


@gemmkit.program
def softmax(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        p = gp.exp(x[m] - x[m].max(axis=1))
        y[m] = p / p.sum(axis=1)


def derived(work: str, x: Any) -> Call:
    """A call of the program on an input set, into ``x.out``."""
    return {"layernorm": lambda: layernorm(x.x, x.gamma, x.beta, x.out, eps=1e-5),
            "rmsnorm": lambda: rmsnorm(x.x, x.gamma, x.out, eps=1e-6), "softmax": lambda: softmax(x.x, x.out)}[work]


def by_hand(work: str, x: Any) -> Call:
    """The same by gemmkit's own function, into ``x.peer_out``."""
    return {"layernorm": lambda: gemmkit.layernorm(x.x, x.gamma, x.beta, out=x.peer_out),
            "rmsnorm": lambda: gemmkit.rmsnorm(x.x, x.gamma, out=x.peer_out),
            "softmax": lambda: gemmkit.softmax(x.x, out=x.peer_out)}[work]


def measured(lib: Any, work: str, kind: str, rows: int, columns: int, pairs: int = 20) -> Row:
    """A row of results. Raises `bench.harness.WrongResult` where the derived kernel computes something else."""
    case = RowWise("rows", work, kind, rows, columns, 1)
    sets = [case.operands(lib, i) for i in range(input_sets(case.input_bytes, lib.l2_bytes()))]

    def poison() -> None:
        for x in sets:
            lib.poison(x.out)

    return compare(Work(work, kind, rows, columns, 1), [derived(work, x) for x in sets], [by_hand(work, x) for x in sets],
                   peer_name=f"gemmkit.{work}", clock=lib, poison=poison, error=lambda i: case.error(lib, sets[i]),
                   tolerance=case.tolerance, pairs=pairs,
                   further={"group": "row_programs"})


def every(options: Any) -> Iterator[Row]:
    lib = hopper.peers()
    for work, kind, columns in itertools.product(options.works or WORKS, ("f16", "bf16"), options.columns):
        row = measured(lib, work, kind, options.rows, columns)
        print(f"{work:>9} {kind:>4} {options.rows} x {columns}: {row['ours_us']:8.1f} us, by hand "
              f"{row['peer_us']:8.1f} us, ratio {row['ratio']:.3f}", flush=True)
        yield row


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--columns", type=int, nargs="*", default=list(COLUMNS))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("row_programs", __doc__, every, arguments, WORKS, add=add)


if __name__ == "__main__":
    raise SystemExit(main())
