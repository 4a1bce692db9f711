"""The paper's experiments: `python -m bench.experiments`.

    python -m bench.experiments                             all default groups (bench/experiments/__init__.py lists them)
    python -m bench.experiments diagonal                    one experiment alone; several: diagonal triangular
    python -m bench.experiments --quick --limit 150         4 pairs a row, shorter graphs; what is late is reported so
    python -m bench.experiments --prepare only              compile all kernels (no GPU needed), measure nothing
    python -m bench.experiments --list                      the rows, and what is asked of them
    python -m bench.plot bench/results/experiments.json     draw it

It runs as `bench.hopper` does: kernels are compiled ahead in parallel processes, a worker process measures the rows, the
result file is written after every row, and the table comes last. The exit status is 1 if a row is missing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench import cases, hopper, prepare
from bench.experiments import (
    algebras,
    attention,
    composed,
    contractions,
    forced,
    groups,
    minplus,
    mixed,
    mlp,
    programs,
    random_shapes,
    rows,
    specs,
    stacks,
    stream_k,
    types,
    versus,
)
from bench.experiments.experiment import Experiment
from bench.gemm import names
from bench.harness import Row, input_sets

FURTHER: dict[str, Callable[[], Iterator[Experiment]]] = {
    "algebras": algebras.algebras,
    "complex64": algebras.complex64,
    "minplus": minplus.minplus,
    "rivals": versus.versus,
    "mixed": mixed.mixed,
    "wmma": mixed.wmma,
    "mixed_diagonal": mixed.diagonal,
    "mixed_fusion": mixed.fusion,
    "mixed_algebras": mixed.algebras,
    "mixed_contraction": mixed.contraction,
    "contraction": contractions.contraction,
    "tccg": contractions.tccg,
    "stacks": stacks.stacks,
    "grouped": groups.groups,
    "experts": groups.experts,
    "sparse": groups.sparse,
    "float32": lambda: (case for case in types.types() if case.group == "float32"),
    "float64": lambda: (case for case in types.types() if case.group == "float64"),
    "ozaki": types.ozaki,
    "complex": types.complex_squares,
    "long": types.long_k,
    "skinny": types.skinny,
    "some": types.some,
    "random": random_shapes.random_shapes,
    "streamk": stream_k.stream_k,
    "forced": forced.forced,
    "rows": rows.rows,
    "composed": composed.composed,
    "attention": attention.attention,
    "attention_short": attention.attention_short,
    "attention_rules": attention.attention_rules,
    "mlp": mlp.mlp,
    "programs": programs.of_programs,
    "decompositions": specs.named,
    "listings": specs.listings,
    "staged": specs.staged,
    "fused_specs": specs.fused,
    "small": specs.small,
}
MOST_SETS = 2048  # of inputs: a hundred thousand of 8 x 8 x 8 would take minutes to make, and smaller ones stay in the L2
# Measured when asked for:
ASKED = (
    "rivals",
    "mixed", "wmma", "mixed_diagonal", "mixed_fusion", "mixed_algebras", "mixed_contraction",
    "square", "decode", "stacks", "grouped", "experts", "sparse", "float32", "float64", "ozaki", "complex", "long", "skinny",
    "some", "random", "streamk", "forced", "rows", "composed", "attention", "attention_short", "attention_rules", "mlp",
    "programs", "decompositions", "listings", "staged", "fused_specs", "small",
)  # fmt: skip
DEFAULT = (*cases.PAPER, *(group for group in FURTHER if group not in ASKED))
GROUPS = ("square", *cases.PAPER, "decode", *FURTHER)
TOGETHER = {"specs": ("decompositions", "listings", "staged", "fused_specs", "small"),
            "paper": ("mixed", "mixed_diagonal", "mixed_fusion", "mixed_algebras", "mixed_contraction",
                      "wmma")}  # names of several groups


class Bench(hopper.Bench):
    """Measures experiments too."""

    def measure(self, case: Any) -> Row:
        if not isinstance(case, Experiment):
            return super().measure(case)
        self.arrays.clear()  # of the cases before
        self.last = ()
        lib = self.backend
        count = min(MOST_SETS, input_sets(case.input_bytes, lib.l2_bytes()))
        sets = [case.operands(lib, i) for i in range(count)]

        def poison() -> None:
            for x in sets:
                lib.poison(x.out)

        return self.row(
            case,
            [case.ours(lib, x) for x in sets],
            [case.peers(lib, x) for x in sets],
            case.title(lib),
            poison=poison,
            error=lambda i: case.error(lib, sets[i]),
            tolerance=case.tolerance,
            peer_error=lambda: case.peer_error(lib, sets[0]),
            peer_tolerance=8 * case.tolerance,
            chosen=None if case.mapping else self.chosen(case),
            products=case.products,
        )

    @staticmethod
    def chosen(case: Experiment) -> Any:
        """The configuration of what gemmkit launches, where it has one."""
        return next((made.problem.config for made in prepare.products(case) if hasattr(made, "problem")), None)


def on_torch(pairs: int, target_us: float) -> Bench:
    """What a worker makes."""
    return Bench(hopper.peers(), pairs, target_us)


def make(groups: Sequence[str], match: str = "", quick: bool = False) -> list[Any]:
    """The rows of some groups, in the order of GROUPS; ``match`` is a regular expression of their texts."""
    found: list[Any] = []
    for group in GROUPS:
        if group in groups:
            found += FURTHER[group]() if group in FURTHER else cases.make([group], quick=quick)
    return [case for case in found if re.search(match, str(case))]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.experiments", description="The paper's experiments.")
    one = names(GROUPS)
    made.add_argument("experiments", nargs="*", metavar="experiment", help=f"of {', '.join((*GROUPS, *TOGETHER))}")
    made.add_argument("--groups", type=one, default=[], help="the same, separated by commas")
    hopper.add_options(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    named = [group for name in options.experiments for group in TOGETHER.get(name, (name,))]
    for name in named:
        if name not in GROUPS:
            made.error(f"{name!r} is none of {', '.join((*GROUPS, *TOGETHER))}")
    groups = [*named, *options.groups] or list(DEFAULT)
    wanted = make(groups, options.match, options.quick)
    return hopper.execute("experiments", wanted, options, on_torch)
