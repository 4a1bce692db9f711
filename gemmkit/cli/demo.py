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

EXAMPLES = ("digits", "shortest_paths")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo", help="the examples, on real data",
        description="Classify handwritten digits and find shortest paths in social networks. On a GPU if there is one, else "
        "in the emulator, with fewer digits. The exit status is 1 if an answer is not as good as it must be.")
    parser.add_argument("--emulate", action="store_true", help="use the emulator, GPU or not")
    return parser


def run(options: argparse.Namespace) -> int:
    out, reason = console(), no_gpu()
    if options.emulate:
        out.print("[bold]Emulating:[/bold] the kernels run thread by thread in Python, with every memory access checked.")
    elif reason is not None:
        out.print(f"[bold]No GPU[/bold] ({reason}). The kernels run in the emulator: thread by thread in Python, with every "
                  "memory access checked. Under a minute in all, as a rule.")
    failed = []
    for name in EXAMPLES:
        out.print()
        started = time.perf_counter()
        if not _example(name).main(emulate=True if options.emulate else None):
            failed.append(name)
        out.print(f"  {time.perf_counter() - started:.1f} s")
    out.print()
    out.print(f"[red]Not as it must be: {', '.join(failed)}[/red]" if failed else "[green]Both are as they must be.[/green]")
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
        importlib.import_module({"digits": "sklearn.datasets", "shortest_paths": "networkx"}[name])
    except ModuleNotFoundError as error:
        raise RuntimeError(f"the example {name} needs {error.name}; install gemmkit[test], which has it") from error
    return module
