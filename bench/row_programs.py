"""Functions of rows as programs, beside those that are written by hand: `python -m bench.row_programs [layernorm ...]`.

Rows of group "row_programs" compare two kernels of gemmkit's, on the same teams of threads: the ratio is the time of
`gemmkit.layernorm`, `rmsnorm` or `softmax` over that of the derived kernel. Rows of group "row_forms" compare programs that
no function of gemmkit's computes with what `torch.compile` makes: float64, a result that is a transpose (``transposed``),
and rows that an array names (``named``). All are timed in turns in one run (`bench.harness`).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench import hopper
from bench.experiments.experiment import SAMPLED_ROWS
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


@gemmkit.program
def transposed(x: Any, gamma: Any, y: Any) -> None:
    for m, n in gp.parallel(x.rows, x.columns):
        y[n, m] = x[m, n] / (1.0 + gp.exp(-x[m, n])) * gamma[n]


@gemmkit.program
def named(names: Any, x: Any, gamma: Any, y: Any, eps: float) -> None:
    for m in gp.parallel(y.rows):
        t = x[names[m]]
        y[m] = t * gp.rsqrt((t * t).mean(axis=1) + eps) * gamma


FORMS = ("transposed", "named")


@dataclass(frozen=True)
class Form(RowWise):
    """A form that gemmkit has no function of, against the kernel that PyTorch compiles."""

    is_compiled: bool = True

    def operands(self, lib: Any, i: int) -> SimpleNamespace:
        x = super().operands(lib, i)
        x.index = lib.sample(self.m, self.m, i)
        if self.work == "transposed":
            x.out = lib.empty(self.n, self.m, self.kind)
        return x

    @property
    def tolerance(self) -> float:
        return 1e-14 if self.kind == "f64" else super().tolerance

    def error_of(self, lib: Any, x: Any, out: Any) -> float:
        """The relative error of some rows, which are columns of a transpose."""
        some = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        of_table = x.index[some] if self.work == "named" else some
        exact = lib.row_wise(self.work if self.work != "named" else "rmsnorm", False)(
            lib.wide(x.x, of_table), lib.wide(x.gamma), lib.wide(x.beta))
        found = lib.wide(out[:, some] if self.work == "transposed" else out[some])
        return float(lib.relative_error(found, exact))


def derived(work: str, x: Any) -> Call:
    """A call of the program on an input set, into ``x.out``."""
    return {"layernorm": lambda: layernorm(x.x, x.gamma, x.beta, x.out, eps=1e-5),
            "rmsnorm": lambda: rmsnorm(x.x, x.gamma, x.out, eps=1e-6), "softmax": lambda: softmax(x.x, x.out),
            "transposed": lambda: transposed(x.x, x.gamma, x.out),
            "named": lambda: named(x.index, x.x, x.gamma, x.out, eps=1e-6)}[work]


def by_hand(work: str, x: Any) -> Call:
    """The same by gemmkit's own function, into ``x.peer_out``."""
    return {"layernorm": lambda: gemmkit.layernorm(x.x, x.gamma, x.beta, out=x.peer_out),
            "rmsnorm": lambda: gemmkit.rmsnorm(x.x, x.gamma, out=x.peer_out),
            "softmax": lambda: gemmkit.softmax(x.x, out=x.peer_out)}[work]


def compiled(lib: Any, work: str, x: Any, call: Any) -> Call:
    """The same by a function of PyTorch's, into ``x.peer_out``."""
    def run() -> None:
        x.peer_out = call(x.x, x.gamma, x.beta, *([x.index] if work == "named" else []))

    return run


def measured(lib: Any, work: str, kind: str, rows: int, columns: int, pairs: int = 20) -> Row:
    """A row of results. Raises `bench.harness.WrongResult` where the derived kernel computes something else."""
    is_form = work in FORMS or kind == "f64"
    case = (Form if is_form else RowWise)("rows", work, kind, rows, columns, 1)
    sets = [case.operands(lib, i) for i in range(input_sets(case.input_bytes, lib.l2_bytes()))]
    if is_form:
        call = lib.row_wise(work, True)
        peers, name = [compiled(lib, work, x, call) for x in sets], case.title(lib)
    else:
        peers, name = [by_hand(work, x) for x in sets], f"gemmkit.{work}"

    def poison() -> None:
        for x in sets:
            lib.poison(x.out)

    return compare(Work(work, kind, rows, columns, 1), [derived(work, x) for x in sets], peers, peer_name=name, clock=lib,
                   poison=poison, error=lambda i: case.error(lib, sets[i]), tolerance=case.tolerance, pairs=pairs,
                   further={"group": "row_forms" if is_form else "row_programs"})


def cases(options: Any) -> Iterator[tuple[str, str, int]]:
    """Works, kinds and columns: the forms first, each of which PyTorch compiles for seconds."""
    works = options.works or (*FORMS, *WORKS)
    yield from itertools.product([work for work in works if work in FORMS], ("f16", "f32", "f64"), FORM_COLUMNS)
    yield from itertools.product([work for work in works if work in WORKS], ("f64",), FORM_COLUMNS)
    yield from itertools.product([work for work in works if work in WORKS], ("f16", "bf16", "f32"), options.columns)


FORM_COLUMNS = (1024, 4096)


def every(options: Any) -> Iterator[Row]:
    lib = hopper.peers()
    for work, kind, columns in cases(options):
        row = measured(lib, work, kind, options.rows, columns)
        print(f"{work:>10} {kind:>4} {options.rows} x {columns}: {row['ours_us']:8.1f} us, {row['peer']} "
              f"{row['peer_us']:8.1f} us, ratio {row['ratio']:.3f}", flush=True)
        yield row


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--columns", type=int, nargs="*", default=list(COLUMNS))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("row_programs", __doc__, every, arguments, (*WORKS, *FORMS), add=add)


if __name__ == "__main__":
    raise SystemExit(main())
