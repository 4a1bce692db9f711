"""``python -m gemmkit tune``: the fastest mapping of a plain product, found by trying."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

import gemmkit
from gemmkit.cli.console import console, grid
from gemmkit.cli.explain import dtype
from gemmkit.runtime.device import absence

SHOWN = 12                             # rows; all with --all


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune", help="the fastest mapping of a product, found by trying",
        description="Compile mappings of D = A @ B side by side, check and time each beside the default, and keep the "
        "fastest for gemmkit.matmul. Needs a GPU, and CuPy or PyTorch.")
    for name, text in (("m", "rows of A"), ("n", "columns of B"), ("k", "columns of A")):
        parser.add_argument(f"--{name}", type=int, default=4096, help=f"{text} (default: 4096)")
    parser.add_argument("--batch", type=int, metavar="COUNT", help="products of a stack")
    parser.add_argument("--a-dtype", default="float16", metavar="DTYPE", help="float16 (f16), bfloat16 (bf16), float32, ...")
    parser.add_argument("--layout", choices=("nn", "nt", "tn", "tt"), default="nn",
                        help="A and B: n is stored by rows, t by columns (default: nn)")
    parser.add_argument("--effort", choices=("quick", "full"), default="quick", help="how many mappings (default: quick)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="in place of the effort's")
    parser.add_argument("--jobs", type=int, metavar="COUNT", help="mappings compiled at a time (default: one a processor)")
    parser.add_argument("--no-keep", action="store_true", help="do not keep the result for gemmkit.matmul")
    parser.add_argument("--all", action="store_true", help="show all rows, and not the fastest and what failed alone")
    parser.add_argument("--sweep", type=Path, metavar="FILE", help="draw the best time of each tile size there (matplotlib)")
    return parser


def run(options: argparse.Namespace) -> int:
    out = console()
    for name in ("m", "n", "k", "batch", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: 1 or more is needed")
    if options.sweep is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--sweep draws with matplotlib, which is not installed")
    of = dtype("--a-dtype", options.a_dtype)
    if absence() is not None:
        raise RuntimeError(f"mappings are timed on a GPU, and there is none here ({absence()})")
    a, b = operands(options, of)
    found = gemmkit.tune(a, b, effort=options.effort, budget=options.budget, keep=not options.no_keep, jobs=options.jobs)
    show(found, out, options.all)
    if options.sweep is not None:
        from gemmkit.tuner.plot import sweep

        sweep(found, options.sweep, flops=2.0 * options.m * options.n * options.k * (options.batch or 1))
        out.print(f"drawn: {options.sweep}", markup=False)
    return 0


def show(found: Any, out: Any, everything: bool) -> None:
    """A `gemmkit.Tuned` as a table, and its configuration as code."""
    timed = [row for row in found.rows if row.ratio is not None]
    rest = [row for row in found.rows if row.ratio is None]
    shown = timed if everything else timed[:SHOWN]
    columns = "mapping", "us", "times as fast as the default"
    cells = ((f"{'* ' * (row is found.best)}{row.name}", f"{row.microseconds:.1f}", f"{row.ratio:.3f}") for row in shown)
    out.print(grid(found.what, columns, cells))
    if len(timed) > len(shown):
        out.print(f"and {len(timed) - len(shown)} slower ones (--all)")
    for row in rest if everything else [row for row in rest if not str(row.error).startswith("not legal")]:
        out.print(f"{row.name}: {row.error}", markup=False)
    for note in found.notes:
        out.print(note, markup=False)
    out.print(repr(found.config), markup=False)
    out.print("gemmkit.matmul takes it from now on" if found.kept and found.best is not found.default else
              "gemmkit.matmul takes its default, which nothing tried is faster than" if found.kept else "nothing was kept")


def operands(options: argparse.Namespace, of: np.dtype) -> tuple[Any, Any]:
    """Random operands of the library that is there."""
    sizes = {"a": (options.m, options.k), "b": (options.k, options.n)}
    stack = () if options.batch is None else (options.batch,)
    random = np.random.default_rng(0)

    def host(name: str, letter: str) -> np.ndarray:
        rows, columns = sizes[name] if letter == "n" else sizes[name][::-1]
        shape = (*stack, rows, columns)
        if of.kind in "iu":
            return random.integers(-4 if of.kind == "i" else 0, 5, shape).astype(of)
        return random.standard_normal(shape, np.float32).astype(of)

    def turned(x: Any, letter: str) -> Any:
        return x if letter == "n" else x.swapaxes(-1, -2)

    made = _library(of)
    a, b = (turned(made(host(name, letter)), letter) for name, letter in zip("ab", options.layout))
    return a, b


def _library(of: np.dtype) -> Any:
    """What puts a NumPy array on the GPU. CuPy has no bfloat16."""
    if of.name != "bfloat16" and importlib.util.find_spec("cupy") is not None:
        import cupy

        return cupy.asarray
    if importlib.util.find_spec("torch") is None:
        makers = "PyTorch" if of.name == "bfloat16" else "CuPy or PyTorch"
        raise RuntimeError(f"operands of {of} are made by {makers}, which is not installed")
    import torch

    def made(x: np.ndarray) -> Any:
        if of.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(x).cuda()

    return made
