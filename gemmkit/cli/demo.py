"""``python -m gemmkit demo``: the examples on real data, each checked against another library's answer."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import gemmkit
from gemmkit.cli.console import console, no_gpu

#: Of each example: what it takes its data from. The quickest comes first, so that there is soon something to read.
NEEDS: dict[str, str | None] = {
    "hydrogen_chain": None,                     # computed
    "digits": "sklearn.datasets",
    "shortest_paths": "networkx",
    "sensitivities": "sklearn.datasets",
    "attention": "sklearn.datasets",
    "transformer": "sklearn.datasets",
}
EXAMPLES = tuple(NEEDS)
GET_DATA = "pip install 'gemmkit[demo]'"


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
    names, lacking = options.examples or EXAMPLES, {}
    if not options.examples:                    # what is named is run, or refused
        lacking = {name: package for name in names if (package := _lacks(name)) is not None}
    failed = []
    for name in [name for name in names if name not in lacking]:
        out.print()
        started = time.perf_counter()
        if not _example(name).main(emulate=True if options.emulate else None):
            failed.append(name)
        out.print(f"  {time.perf_counter() - started:.1f} s")
    out.print()
    if lacking:
        out.print(f"Left out: {', '.join(f'{name} ({package} is not installed)' for name, package in lacking.items())}. "
                  f"{GET_DATA} has their data.", markup=False)
    out.print(f"[red]Not as it must be: {', '.join(failed)}[/red]" if failed else "[green]All are as they must be.[/green]")
    return 1 if failed else 0


def _lacks(name: str) -> str | None:
    """The package that an example takes its data from, where that is not installed."""
    package = (NEEDS[name] or "").partition(".")[0]
    return package if package and importlib.util.find_spec(package) is None else None


def _example(name: str) -> Any:
    """A module of `examples`: of the source tree that the package lies in, else as it is installed: `gemmkit_examples`."""
    root = Path(gemmkit.__file__).resolve().parent.parent
    package = "gemmkit_examples"
    if (root / "examples" / "machine.py").is_file() and (root / "pyproject.toml").is_file():
        package = "examples"
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    elif importlib.util.find_spec(package) is None:
        raise RuntimeError("the examples are neither beside the package, as in gemmkit's source tree, nor installed with "
                           "it, as gemmkit's wheel does it")
    module = importlib.import_module(f"{package}.{name}")
    lacking = _lacks(name)
    if lacking is not None:
        raise RuntimeError(f"the example {name} takes its data from {lacking}, which is not installed: {GET_DATA}")
    return module
