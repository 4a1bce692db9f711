"""The command line: ``python -m gemmkit info | demo | explain | compile | tune | cache``.

    info      versions, the GPU and its limits, compilers, cache, and which kernels and operators are usable
    demo      the examples, on real data
    explain   how a product would be computed, why, and what that compiles to
    compile   kernels for the cache, ahead of the first call
    tune      the fastest mapping of a product, found by trying
    cache     the compiled kernels on disk
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import platform
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gemmkit
from gemmkit import operators
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.config import Config
from gemmkit.kernels.spec import FAMILIES
from gemmkit.lang.checks import check_dtype
from gemmkit.lang.deferred import NotInstalledError
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp, Operator, WMMAOp
from gemmkit.plans.ahead import CompiledKernel, KernelToCompile, Made, compiled, compiled_kernel, recorded
from gemmkit.runtime.cache import default_cache
from gemmkit.runtime.compile import AssemblerError, candidates, release
from gemmkit.runtime.device import GPUS, DeviceInfo, absence, gpu, target
from gemmkit.tiling import Tile
from gemmkit.tools.explain import page
from gemmkit.tools.timeline import ExplainedKernel, choice_of, microseconds_text, of_call
from gemmkit.tuner.tuner import Progress
from gemmkit.tuning.choose import get_config
from gemmkit.tuning.operators import accumulator_for, operator_for, result_dtype

__all__ = [
    "main",
]


# --------------------------------------------------------------------------------------------------
# Where the commands print: tables that are as wide as the terminal, or wide enough where there is none.

_WIDTH = 118                           # columns of a file or a pipe


def console() -> Console:
    """A console on the present standard output."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def pairs(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(str(value)))
    return table


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table with a header."""
    table = Table(title=title, title_justify="left", min_width=60)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row))
    return table


def no_gpu() -> str | None:
    """In a few words why there is no GPU; None when there is one."""
    reason = absence()
    if reason is None or "DynamicLibNotFound" not in reason:
        return reason
    return "no NVIDIA driver is installed"


def bytes_text(count: int) -> str:
    """A number of bytes for people.

    >>> bytes_text(0), bytes_text(232448), bytes_text(50 * 2**20)
    ('0 bytes', '227 KiB', '50 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


# --------------------------------------------------------------------------------------------------
# ``python -m gemmkit cache``: the compiled kernels on disk.

def add_cache(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache", help="the compiled kernels on disk", description="Show or clear the compiled kernels on disk. "
        "GEMMKIT_CACHE_DIR sets the folder, GEMMKIT_CACHE=0 keeps nothing, GEMMKIT_CACHE_MAX_MB bounds the size.")
    parser.add_argument("action", choices=("info", "clear"), nargs="?", default="info", help="default: info")
    return parser


def run_cache(options: argparse.Namespace) -> int:
    cache, out = default_cache(), console()
    before = cache.info()
    if before.folder is None:
        out.print("Nothing is kept on disk (GEMMKIT_CACHE=0, or no home folder).")
        return 0
    size = f"{before.entries} kernels, {bytes_text(before.bytes)}"
    if options.action == "clear":
        cache.clear()
        left = cache.info().entries
        out.print(f"{before.folder}: removed {size}" + (f"; {left} could not be removed" if left else ""), soft_wrap=True)
        return 1 if left else 0
    out.print(f"{before.folder}: {size}", soft_wrap=True)
    return 0


# --------------------------------------------------------------------------------------------------
# ``python -m gemmkit demo``: the examples on real data, each checked against another library's answer.

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


def add_demo(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo", help="the examples, on real data",
        description="Classify handwritten digits, find shortest paths in social networks, differentiate a network, attend "
        "to what came before, read by a transformer, and compute a molecule's energy. On a GPU if there is one, else in the "
        "emulator, with less of each. The exit status is 1 if an answer is not as good as it must be.")
    parser.add_argument("examples", nargs="*", metavar="example", help=f"of {', '.join(EXAMPLES)} (default: all)")
    parser.add_argument("--emulate", action="store_true", help="use the emulator, GPU or not")
    return parser


def run_demo(options: argparse.Namespace) -> int:
    unknown = [name for name in options.examples if name not in EXAMPLES]
    if unknown:
        raise ValueError(f"example {unknown[0]!r} is none of {', '.join(EXAMPLES)}")
    out, reason = console(), no_gpu()
    if options.emulate:
        out.print("[bold]Emulating:[/bold] the kernels run thread by thread in Python, with every memory access checked.")
    elif reason is not None:
        out.print(f"[bold]No GPU[/bold] ({reason}). The kernels run in the emulator: thread by thread in Python, with every "
                  "memory access checked. About a minute in all, as a rule.")
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


# --------------------------------------------------------------------------------------------------
# ``python -m gemmkit explain``: how a product would be computed, why, and what that compiles to.

SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
SHOWN_OPCODES = 16                             # opcodes


def add_explain(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="how a product would be computed, why, and what that compiles to",
        description="Show the configuration that gemmkit.matmul takes for D = A @ B and why, how many blocks of it fit on a "
        "multiprocessor, and the compiled kernel's registers, spills, stack and instructions. Needs no GPU: without one the "
        "kernel is compiled for an H100.")
    parser.add_argument("--m", type=int, default=4096, help="rows of A (default: 4096)")
    parser.add_argument("--n", type=int, default=4096, help="columns of B (default: 4096)")
    parser.add_argument("--k", type=int, default=4096, help="columns of A (default: 4096)")
    parser.add_argument("--batch", type=int, default=1, metavar="COUNT", help="products of a stack (default: 1)")
    parser.add_argument("--a-dtype", default="float16", metavar="DTYPE",
                        help="float16 (f16), bfloat16 (bf16), float32 (f32), float64 (f64), int8, ... (default: float16)")
    parser.add_argument("--b-dtype", metavar="DTYPE", help="default: A's")
    parser.add_argument("--d-dtype", metavar="DTYPE", help="default: the result type of the operands")
    parser.add_argument("--accumulator", metavar="DTYPE", help="what sums are taken in (default: float32 or wider)")
    parser.add_argument("--layout", choices=("nn", "nt", "tn", "tt"), default="nn",
                        help="A and B: n is stored by rows, t by columns (default: nn)")
    parser.add_argument("--operator", choices=("mma", "wmma", "fpu"), help="default: by the dtypes")
    parser.add_argument("--block", metavar="MxNxK", help="the block's tile (default: chosen by the sizes)")
    parser.add_argument("--warp", metavar="MxNxK", help="a warp's tile")
    parser.add_argument("--blocks-per-sm", type=int, metavar="COUNT", help="bounds the registers")
    parser.add_argument("--config", action="store_true", help="print the configuration as code, too")
    parser.add_argument("--ptx", type=Path, metavar="FILE", help="write the PTX there")
    parser.add_argument("--html", type=Path, metavar="FILE",
                        help="write a page there: the mapping, conflicts of banks, the compiled kernel; no toolkit needed")
    parser.add_argument("--sass", type=Path, metavar="FILE", help="write the machine code there")
    return parser


def run_explain(options: argparse.Namespace) -> int:
    if options.html is not None and not options.html.parent.is_dir():
        raise ValueError(f"--html {options.html}: there is no folder {options.html.parent}")
    out, device = console(), target()
    found = subject(options, device)
    conf = found.conf
    if no_gpu() is not None:
        out.print(f"No GPU: compiled for {device.name}.")
    out.print(pairs(f"D ({options.m} x {options.n}) = A ({options.m} x {options.k}) @ B ({options.k} x {options.n})",
                    mapping(found, options)))
    if options.config:
        out.print(repr(conf), markup=False)
    if options.html is not None:
        options.html.write_text(page(found), encoding="utf-8")
        out.print(f"written: {options.html}")
        return 0
    kernel = compiled_kernel(found.compiled, device)
    out.print(grid("Blocks on a multiprocessor", ("limit", "a block takes", "blocks"), fit(kernel)))
    out.print(pairs("Compiled kernel", compiled_figures(kernel)))
    if options.ptx is not None:
        options.ptx.write_text(kernel.ptx, encoding="utf-8")
    if options.sass is not None:
        options.sass.write_text(kernel.sass, encoding="utf-8")
    return 0


# -- the request ------------------------------------------------------------------------------------------------------

def subject(options: argparse.Namespace, device: DeviceInfo) -> ExplainedKernel:
    """The product asked for, as `gemmkit.matmul` would compute it; raises ValueError or TypeError for a request that it
    cannot meet. Options that say how it is computed make a configuration (``conf=``); without any the plan chooses."""
    for name in ("m", "n", "k", "batch"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: a size of 1 or more is needed")
    a = dtype("--a-dtype", options.a_dtype)
    b = dtype("--b-dtype", options.b_dtype) if options.b_dtype else a
    d = dtype("--d-dtype", options.d_dtype) if options.d_dtype else None
    for kind, name in ((a, "a"), (b, "b")):
        check_dtype(kind, name)
    stack = () if options.batch == 1 else (options.batch,)
    x = _of_order((*stack, options.m, options.k), a, options.layout[0])
    y = _of_order((*stack, options.k, options.n), b, options.layout[1])
    out = None if d is None else np.empty((*stack, options.m, options.n), d)
    return of_call(x, y, None, configuration(options, a, b, d, device), out, device=device)


def configuration(options: argparse.Namespace, a: np.dtype, b: np.dtype, d: np.dtype | None,
                  device: DeviceInfo) -> Config | None:
    """What get_config makes of the options that say how a product is computed; None where there are none."""
    given = "operator", "accumulator", "block", "warp", "blocks_per_sm"
    if all(getattr(options, name) is None for name in given):
        return None
    operator = choose_operator(options, a, b, (options.m, options.n, options.k), device)
    fields: dict[str, Any] = {}
    for name, field in (("block", "block_shape"), ("warp", "compute_warp")):
        if getattr(options, name):
            fields[field] = tile(f"--{name}", getattr(options, name))
    if options.blocks_per_sm is not None:
        fields["blocks_per_sm"] = options.blocks_per_sm
    order_a, order_b = ({"n": RowMajor, "t": ColMajor}[letter] for letter in options.layout)
    shape = dict(M=options.m, N=options.n, K=options.k, batch=options.batch)
    return get_config(operator=operator, global_a_layout=order_a(a), global_b_layout=order_b(b),
                      global_d_layout=RowMajor(result_dtype(a, b, None, operator) if d is None else d),
                      gemm_shape=shape, device=device, **fields)


def _of_order(shape: tuple[int, ...], kind: np.dtype, order: str) -> np.ndarray:
    """An array that nothing is written to, each matrix of which lies by rows ("n") or columns ("t")."""
    if order == "n":
        return np.empty(shape, kind)
    return np.empty((*shape[:-2], shape[-1], shape[-2]), kind).swapaxes(-1, -2)


def choose_operator(options: argparse.Namespace, a: np.dtype, b: np.dtype, sizes: tuple[int, int, int],
                    device: DeviceInfo) -> Operator:
    given = dtype("--accumulator", options.accumulator) if options.accumulator else None
    accumulator = accumulator_for(a, b) if given is None else given
    if options.operator is None and not options.accumulator:
        return operator_for(a, b, sizes, device, options.batch)
    if options.operator in ("mma", "wmma"):
        if a != b:
            raise ValueError(f"--operator {options.operator}: A is {a} and B is {b}; it multiplies operands of one type")
        shapes = {"float32": (16, 16, 8), "float64": (8, 8, 4)}
        return (MMAOp(dtype=a, accumulator=given) if options.operator == "mma" else
                WMMAOp(*shapes.get(a.name, (16, 16, 16)), a, accumulator))
    default = operator_for(a, b, sizes, device, options.batch)
    if options.operator is None and isinstance(default, MMAOp):
        return dataclasses.replace(default, accumulator=accumulator)
    shape = {name: getattr(default, name) for name in ("M", "N", "MB", "NB")} if isinstance(default, FPUOp) else {}
    return FPUOp(**shape, dtype=a, b_dtype=b, accumulator=accumulator)


def dtype(option: str, text: str) -> np.dtype:
    """The dtype that an option names; raises ValueError."""
    name = SHORT.get(text, text)
    try:
        return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)
    except TypeError:
        raise ValueError(f"{option} {text}: no dtype of this name; for example {', '.join(SHORT.values())}, int8") from None


def tile(option: str, text: str) -> Tile:
    """``128x256x64`` as a Tile; raises ValueError."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise ValueError(f"{option} {text}: MxNxK is needed, for example 128x128x64")
    return Tile(**dict(zip("MNK", map(int, found.groups()))))


# -- the answer -------------------------------------------------------------------------------------------------------

def mapping(found: ExplainedKernel, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    conf, spec = found.conf, found.conf.spec()
    M, N, _ = found.sizes
    rows, columns = spec.scheduler.tiles(M, N)
    choice = choice_of(found.compiled)
    yield "chosen because", f"{choice.reason} ({choice.owner})"
    if choice.microseconds is not None:
        yield "modelled time", microseconds_text(choice.microseconds)
    if options.batch > 1:
        yield "products", f"{options.batch} in one launch, {options.batch * rows * columns} tiles"
    yield "operator", repr(conf.operator)
    yield "kernel", conf.kernel
    yield "global A, B -> D", f"{conf.global_a_layout!r}, {conf.global_b_layout!r} -> {conf.global_d_layout!r}"
    yield "shared A, B, D", f"{conf.shared_a_layout!r}, {conf.shared_b_layout!r}, {conf.shared_d_layout!r}"
    steps = -(-options.k // spec.block.size.K)
    yield "block", f"{extents(conf.block_shape)}: {rows} x {columns} blocks, {steps} k-tiles"
    if isinstance(conf.splits, StreamK):
        yield "shared K", f"{conf.splits!r}: k-tiles dealt evenly to blocks that stay"
    elif conf.splits > 1:
        in_cluster = conf.family.in_cluster(conf.splits, conf.cluster) > 1
        which = "blocks of a cluster" if in_cluster else "blocks, by way of a workspace,"
        yield "shared K", f"{conf.splits} {which} for each, {-(-steps // conf.splits)} steps or fewer a block"
    yield "warp", f"{extents(conf.compute_warp)}: {spec.fragments_m} x {spec.fragments_n} fragments of " \
                  f"{'x'.join(map(str, conf.operator.shape))}, {spec.steps_k} deep"
    for name, text in (("a", "loads of A"), ("b", "loads of B"), ("cd", "stores of D")):
        yield text, (f"a thread {extents(getattr(conf, f'mem_{name}_thread'))}, "
                     f"a warp {extents(getattr(conf, f'mem_{name}_warp'))}")
    yield "threads", f"{conf.threads} ({conf.threads // 32} warps)"
    yield "shared memory", f"{bytes_text(spec.shared_bytes)} a block"
    yield "order", repr(conf.order)


def extents(shape: Tile) -> str:
    return "x".join(map(str, shape.extents)) + f" ({', '.join(shape.names)})"


def fit(kernel: CompiledKernel) -> Iterator[tuple[object, ...]]:
    conf, found = kernel.config, kernel.occupancy
    yield "registers", f"{kernel.usage.registers} x {conf.threads} threads", found.by_registers
    yield "threads", conf.threads, found.by_threads
    yield "shared memory", bytes_text(conf.spec().shared_bytes), found.by_shared_memory
    yield "hardware", "", found.by_hardware
    yield "all together", "", found.blocks


def compiled_figures(kernel: CompiledKernel) -> Iterator[tuple[str, object]]:
    usage = kernel.usage
    yield "for", kernel.device.arch_name
    yield "registers a thread", usage.registers
    yield "spills a thread", f"{usage.spill_stores} bytes stored, {usage.spill_loads} loaded"
    yield "stack a thread", f"{usage.stack_bytes} bytes"
    yield "assembler", re.sub(r" \(.*/.*\)$", "", kernel.assembled.assembler)
    for warning in kernel.assembled.warnings:
        yield "warning", warning
    try:
        counts = kernel.instructions
    except AssemblerError as error:
        yield "instructions", str(error)
        return
    yield "instructions", sum(counts.values())
    yield "by opcode", ", ".join(f"{count} {opcode}" for opcode, count in counts.most_common(SHOWN_OPCODES))


# --------------------------------------------------------------------------------------------------
# ``python -m gemmkit compile``: kernels for the cache, ahead of the first call and on any machine.

LAYOUTS = ("nn", "nt", "tn", "tt")


def add_compile(commands: Any) -> argparse.ArgumentParser:
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


def run_compile(options: argparse.Namespace) -> int:
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


def _with_progress(kernels: list[KernelToCompile], jobs: int | None, out: Any) -> list[Made]:
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


def wanted(called: list[tuple[str, Callable[[], object]]], devices: list[DeviceInfo],
           is_program: bool) -> Iterator[KernelToCompile]:
    """The kernels of products on devices, each once. A program gets zeros for results."""
    for device in devices:
        kernels: dict[tuple[Any, ...], tuple[Any, list[str]]] = {}
        for name, call in called:
            for found in recorded(call, device, zeros=is_program):
                launchable = found.launchable
                _, products = kernels.setdefault(launchable.code_key, (launchable, []))
                if name not in products:
                    products.append(name)
        yield from (KernelToCompile(launchable, tuple(products)) for launchable, products in kernels.values())


def _row(made: Made) -> tuple[object, ...]:
    target, products = made.kernel.launchable.target, made.kernel.products
    named = f"{products[0]} and {len(products) - 1} more" if len(products) > 1 else products[0]
    if made.usage is None:
        return target.arch_name, named, "", "", "failed"
    spills = made.usage["spill_stores"] + made.usage["spill_loads"]
    return (target.arch_name, named, made.usage["registers"], f"{spills} bytes",
            "was there" if made.was_there else f"{made.seconds:.1f} s")


# --------------------------------------------------------------------------------------------------
# ``python -m gemmkit info``: what there is to compute with.

OPERATORS = {
    "FPUOp": (operators.FPUOp(), "any real dtypes, and semirings; ordinary units"),
    "MMAOp": (operators.MMAOp(), "float16, bfloat16, float32 as tf32, int8; tensor cores by mma.sync"),
    "MMAOp (K=8)": (operators.MMAOp(K=8), "float16; tensor cores by mma.sync (m16n8k8: from 7.5 on)"),
    "MMAOp (float8)": (operators.MMAOp(dtype=ml_dtypes.float8_e4m3fn), "8-bit floats; tensor cores by mma.sync"),
    "MMAOp (float64)": (operators.MMAOp(dtype="float64"), "float64; tensor cores (m8n8k4: from 8.0 on)"),
    "WMMAOp": (operators.WMMAOp(), "float16; tensor cores by wmma"),
    "WMMAOp (bfloat16)": (operators.WMMAOp(dtype=ml_dtypes.bfloat16), "bfloat16; tensor cores by wmma"),
}


def add_info(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "info", help="versions, the GPU and its limits, compilers, cache, usable kernels and operators",
        description="Show versions, the GPU and its limits, the compilers, the cache of compiled kernels, and which kernels "
        "and operators are usable.")
    return parser


def run_info(options: argparse.Namespace) -> int:
    out, device = console(), target()
    out.print(pairs("Versions", _versions()))
    out.print(pairs("Device", _device(device)))
    out.print(pairs("Tools", (*_tools(), ("cache", _cache()))))
    usable = [("kernel", name, _usable(family.minimum_arch, device), (family.kernel.__doc__ or "").split(";")[0])
              for name, family in FAMILIES.items()]
    usable += [("operator", name, _usable(operator.minimum_arch, device), text)
               for name, (operator, text) in OPERATORS.items()]
    out.print(grid(f"Usable on {device.name} (compute capability {device.arch[0]}.{device.arch[1]})",
                   ("", "name", "usable", "what"), usable))
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "gemmkit", gemmkit.__version__
    for name in ("numba-cuda", "cuda-core", "numpy"):
        yield name, _version(name)
    yield "Python", platform.python_version()
    for name in ("cupy", "torch"):
        found = _installed(name)
        if found:
            yield name, found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _installed(prefix: str) -> str | None:
    """The version of a package that comes under several names (cupy-cuda13x); None when there is none."""
    for name in (prefix, f"{prefix}-cuda13x", f"{prefix}-cuda12x"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _device(device: DeviceInfo) -> Iterator[tuple[str, str]]:
    reason = no_gpu()
    if reason is None:
        yield "GPU", device.name
        yield "driver speaks", f"CUDA {_driver()}"
    else:
        yield "GPU", f"no GPU ({reason}): products can be emulated, and kernels are compiled for the target below"
        yield "target", device.name
    yield "compiled for", device.arch_name
    yield "multiprocessors", str(device.sm_count)
    yield "shared memory", (f"{bytes_text(device.shared_memory_per_block)} a block, "
                            f"{bytes_text(device.shared_memory_per_sm)} a multiprocessor")
    yield "threads", f"{device.max_threads_per_block} a block, {device.max_threads_per_sm} a multiprocessor"
    yield "registers", f"{device.registers_per_sm} a multiprocessor"
    yield "L2 cache", bytes_text(device.l2_bytes)


def _driver() -> str:
    from cuda.bindings import driver

    status, number = driver.cuDriverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}" if int(status) == 0 else f"unknown ({status.name})"


def _tools() -> Iterator[tuple[str, str]]:
    for tool, without in (("ptxas", "none: the driver assembles" if no_gpu() is None else "none: nothing can be assembled"),
                          ("nvdisasm", "none: explain cannot count instructions")):
        try:
            found = candidates(tool)
        except AssemblerError as error:                                # the variable names no program
            yield tool, str(error)
            continue
        yield tool, f"{os.path.basename(found[0])} {release(found[0])}" if found else without


def _cache() -> str:
    info = default_cache().info()
    if info.folder is None:
        return "nothing is kept on disk (GEMMKIT_CACHE=0, or no home folder)"
    return f"{info.folder}: {info.entries} kernels, {bytes_text(info.bytes)}"


def _usable(least: tuple[int, int], device: DeviceInfo) -> str:
    if device.arch >= least:
        return "yes"
    return f"no: needs compute capability {least[0]}.{least[1]}"


# --------------------------------------------------------------------------------------------------
# ``python -m gemmkit tune``: the fastest mapping of a plain product, found by trying.

SHOWN_ROWS = 12                             # rows; all with --all


def add_tune(commands: Any) -> argparse.ArgumentParser:
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


def run_tune(options: argparse.Namespace) -> int:
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
        from gemmkit.tuner.tuner import sweep

        sweep(found, options.sweep, flops=2.0 * options.m * options.n * options.k * (options.batch or 1))
        out.print(f"drawn: {options.sweep}", markup=False)
    return 0


def show(found: Any, out: Any, everything: bool) -> None:
    """A `gemmkit.tuner.Tuned` as a table, and its configuration as code."""
    timed = [row for row in found.rows if row.ratio is not None]
    rest = [row for row in found.rows if row.ratio is None]
    shown = timed if everything else timed[:SHOWN_ROWS]
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


COMMANDS = {"info": (add_info, run_info), "demo": (add_demo, run_demo), "explain": (add_explain, run_explain),
            "compile": (add_compile, run_compile), "tune": (add_tune, run_tune), "cache": (add_cache, run_cache)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, or 1 for a check that failed, or 2 for a request that cannot be met."""
    parser = argparse.ArgumentParser(prog="python -m gemmkit", description="Composable matrix products (GEMM) in Python.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add, run in COMMANDS.values():
        add(commands).set_defaults(run=run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError, RuntimeError, NotInstalledError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
