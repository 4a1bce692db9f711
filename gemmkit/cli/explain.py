"""``python -m gemmkit explain``: how a product would be computed, why, and what that compiles to."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.cli.console import bytes_text, console, grid, no_gpu, pairs
from gemmkit.config import Config
from gemmkit.inspection import CompiledKernel, compiled_kernel
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.lang.given import check_dtype
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp, Operator, WMMAOp
from gemmkit.report.choice import choice_of, microseconds_text
from gemmkit.report.page import page
from gemmkit.report.subject import Subject, of_call
from gemmkit.runtime.assemble import AssemblerError
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.tiling import Tile
from gemmkit.tuning.choose import get_config
from gemmkit.tuning.operators import accumulator_for, operator_for, result_dtype

SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
SHOWN = 16                             # opcodes


def add_parser(commands: Any) -> argparse.ArgumentParser:
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


def run(options: argparse.Namespace) -> int:
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
    out.print(pairs("Compiled kernel", compiled(kernel)))
    if options.ptx is not None:
        options.ptx.write_text(kernel.ptx, encoding="utf-8")
    if options.sass is not None:
        options.sass.write_text(kernel.sass, encoding="utf-8")
    return 0


# -- the request ------------------------------------------------------------------------------------------------------

def subject(options: argparse.Namespace, device: DeviceInfo) -> Subject:
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
        return MMAOp(dtype=a, accumulator=given) if options.operator == "mma" else WMMAOp(dtype=a, accumulator=accumulator)
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

def mapping(found: Subject, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
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


def compiled(kernel: CompiledKernel) -> Iterator[tuple[str, object]]:
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
    yield "by opcode", ", ".join(f"{count} {opcode}" for opcode, count in counts.most_common(SHOWN))
