"""``python -m gemmkit compile``: kernels for the cache, ahead of the first call and on any machine."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gemmkit
from gemmkit.ahead import Kernel, Made, compiled, kernel_of, recorded
from gemmkit.cli.console import console, grid
from gemmkit.cli.explain import SHORT, dtype
from gemmkit.runtime.cache import default_cache
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.gpus import GPUS, gpu
from gemmkit.tuner.progress import Progress

LAYOUTS = ("nn", "nt", "tn", "tt")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile", help="kernels for the cache, ahead of the first call",
        description="Compile the kernels of products and keep them in the cache's folder, for GPUs that need not be here. A "
        "machine that has such a GPU, the same folder (GEMMKIT_CACHE_DIR), gemmkit, Python, NumPy and compilers of the same "
        "versions finds them there and compiles nothing.")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE",
                        help="a Python program that calls gemmkit on NumPy arrays: its products are compiled and not "
                        "computed, their results are zeros")
    parser.add_argument("--shapes", nargs="+", default=[], metavar="MxNxK",
                        help="sizes of plain products; BATCHxMxNxK for stacks")
    parser.add_argument("--dtypes", nargs="+", default=["f16"], metavar="DTYPE",
                        help=f"{', '.join(SHORT)}, int8, complex64, ... (default: f16)")
    parser.add_argument("--layouts", nargs="+", default=["nn"], choices=LAYOUTS,
                        help="A and B: n is stored by rows, t by columns (default: nn)")
    parser.add_argument("--arch", nargs="+", default=[], metavar="ARCH",
                        help=f"what to compile for, of {', '.join(GPUS)}; with :COUNT for a GPU with so many "
                        "multiprocessors, for the mapping depends on it (default: the GPU that is here, else sm_90a)")
    parser.add_argument("--jobs", type=int, metavar="COUNT", help="kernels at a time (default: one a processor)")
    return parser


def run(options: argparse.Namespace) -> int:
    out = console()
    devices = [gpu(text) for text in ",".join(options.arch).split(",") if text] or [target()]
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: 1 or more is needed")
    if default_cache().folder is None:
        raise ValueError("nothing is kept on disk (GEMMKIT_CACHE=0, or no home folder): there is nowhere to compile to")
    kernels = list(wanted(calls(options), devices, options.file is not None))
    if not kernels:
        raise ValueError(f"{options.file} calls no product")
    found = _with_progress(kernels, options.jobs, out)
    columns = "for", "products", "registers", "spills", "made in"
    out.print(grid("Kernels", columns, map(_row, found)))
    failed = [made for made in found if made.error is not None]
    for made in failed:
        out.print(f"{', '.join(made.kernel.products)} for {made.kernel.launchable.target.name}: {made.error}", markup=False)
    there = sum(made.was_there for made in found)
    out.print(f"{len(found) - there - len(failed)} compiled, {there} were there, {len(failed)} failed, in "
              f"{default_cache().folder}", soft_wrap=True, markup=False)
    return 1 if failed else 0


def _with_progress(kernels: list[Kernel], jobs: int | None, out: Any) -> list[Made]:
    found: dict[int, Made] = {}
    order = {id(kernel): n for n, kernel in enumerate(kernels)}
    with Progress(out.is_terminal, out) as progress:
        progress.begin("compiling", len(kernels))
        for made in compiled(kernels, jobs):
            found[order[id(made.kernel)]] = made
            progress.advance()
    return [found[n] for n in sorted(found)]


# -- what is asked for ------------------------------------------------------------------------------------------------

def calls(options: argparse.Namespace) -> list[tuple[str, Callable[[], object]]]:
    """Names of products, and functions that call them on NumPy arrays. Raises ValueError for a request that is none."""
    if (options.file is None) == (not options.shapes):
        raise ValueError("a FILE or --shapes is needed, and not both")
    if options.file is not None:
        if not options.file.is_file():
            raise ValueError(f"{options.file}: there is no such file")
        return [(options.file.name, program(options.file))]
    return [(f"{name} {layout} {'x'.join(map(str, sizes))}", product(sizes, dtype("--dtypes", name), layout))
            for sizes in map(shape, options.shapes) for name in options.dtypes for layout in options.layouts]


def shape(text: str) -> tuple[int, ...]:
    """``512x512x64`` as numbers; raises ValueError."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", text):
        raise ValueError(f"--shapes {text}: MxNxK is needed, for example 4096x4096x4096, or BATCHxMxNxK")
    return tuple(map(int, text.split("x")))


def product(sizes: tuple[int, ...], of: np.dtype, layout: str) -> Callable[[], object]:
    """A product of arrays that are never written to, so that they take no memory."""
    *batch, M, N, K = sizes

    def operand(rows: int, columns: int, letter: str) -> np.ndarray:
        if letter == "n":
            return np.empty((*batch, rows, columns), of)
        return np.empty((*batch, columns, rows), of).swapaxes(-1, -2)

    return lambda: gemmkit.matmul(operand(M, K, layout[0]), operand(K, N, layout[1]))


def program(file: Path) -> Callable[[], object]:
    """A run of a Python program; what it prints is not shown."""
    def run_it() -> None:
        before = sys.argv[:], sys.path[:]
        sys.argv[:], sys.path[:0] = [str(file)], [str(file.resolve().parent)]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(file), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ValueError(f"{file} ended with status {end.code}") from None
        finally:
            sys.argv[:], sys.path[:] = before

    return run_it


def wanted(called: list[tuple[str, Callable[[], object]]], devices: list[DeviceInfo], is_program: bool) -> Iterator[Kernel]:
    """The kernels of products on devices, each once. A program gets zeros for results."""
    for device in devices:
        kernels: dict[tuple, tuple[Any, list[str]]] = {}
        for name, call in called:
            for found in recorded(call, device, zeros=is_program):
                launchable = found.launchable
                _, products = kernels.setdefault(kernel_of(launchable), (launchable, []))
                if name not in products:
                    products.append(name)
        yield from (Kernel(launchable, tuple(products)) for launchable, products in kernels.values())


def _row(made: Made) -> tuple[object, ...]:
    target, products = made.kernel.launchable.target, made.kernel.products
    named = f"{products[0]} and {len(products) - 1} more" if len(products) > 1 else products[0]
    if made.usage is None:
        return target.arch_name, named, "", "", "failed"
    spills = made.usage["spill_stores"] + made.usage["spill_loads"]
    return (target.arch_name, named, made.usage["registers"], f"{spills} bytes",
            "was there" if made.was_there else f"{made.seconds:.1f} s")
