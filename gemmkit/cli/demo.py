"""``python -m gemmkit demo``: the examples on real data, each checked against another library's answer."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import gemmkit
from gemmkit.cli.console import console, no_gpu

NEEDS = {                                       # of each example: what it takes its data from
    "digits": "sklearn.datasets",
    "shortest_paths": "networkx",
    "sensitivities": "sklearn.datasets",
    "attention": "sklearn.datasets",
    "transformer": "sklearn.datasets",
    "hydrogen_chain": "scipy.special",
}
EXAMPLES = tuple(NEEDS)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo", help="the examples, on real data",
        description="Classify handwritten digits, find shortest paths in social networks, differentiate a network, attend "
        "to what came before, read by a transformer, and compute a molecule's energy. On a GPU if there is one, else in the "
        "emulator, with less of each. The exit status is 1 if an answer is not as good as it must be.")
    parser.add_argument("examples", nargs="*", metavar="example", help=f"of {', '.join(EXAMPLES)} (default: all)")
    parser.add_argument("--emulate", action="store_true", help="use the emulator, GPU or not")
    return parser


def run(options: argparse.Namespace) -> int:
    unknown = [name for name in options.examples if name not in EXAMPLES]
    if unknown:
        raise ValueError(f"example {unknown[0]!r} is none of {', '.join(EXAMPLES)}")
    out, reason = console(), no_gpu()
    if options.emulate:
        out.print("[bold]Emulating:[/bold] the kernels run thread by thread in Python, with every memory access checked.")
    elif reason is not None:
        out.print(f"[bold]No GPU[/bold] ({reason}). The kernels run in the emulator: thread by thread in Python, with every "
                  "memory access checked. One to two minutes in all, as a rule.")
    failed = []
    for name in options.examples or EXAMPLES:
        out.print()
        started = time.perf_counter()
        if not _example(name).main(emulate=True if options.emulate else None):
            failed.append(name)
        out.print(f"  {time.perf_counter() - started:.1f} s")
    out.print()
    out.print(f"[red]Not as it must be: {', '.join(failed)}[/red]" if failed else "[green]All are as they must be.[/green]")
    return 1 if failed else 0


def _example(name: str) -> Any:
    """A module of `examples`, which lies beside the package in the source tree and is not installed with it."""
    root = Path(gemmkit.__file__).resolve().parent.parent
    if not (root / "examples" / f"{name}.py").is_file():
        raise RuntimeError("the examples are not installed with the package; run this command in gemmkit's source tree")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        module = importlib.import_module(f"examples.{name}")
        importlib.import_module(NEEDS[name])
    except ModuleNotFoundError as error:
        raise RuntimeError(f"the example {name} needs {error.name}; install gemmkit[test], which has it") from error
    return module
