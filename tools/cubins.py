"""The kernels that a wheel brings, so that their first call compiles nothing.

    python -m tools.cubins                                 list the calls, and how many kernels they need
    python -m tools.cubins --into gemmkit/cubins           compile them (an hour on 2 cores; minutes on 16)
    python -m tools.cubins --into FOLDER --arch sm_90a --only float16

A kernel serves all sizes of its class: alignment, and the tiles that are chosen for the sizes. So the calls are those that
people make most, at the sizes of models and at round ones. A call with code of the user's own is compiled as before.

The kernels' keys name gemmkit's sources and no compiler (`gemmkit.runtime.cache.ship`): compile them from the sources that
are shipped. `tools.wheel --cubins` does both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit.epilogues import GELU, Bias, ReLU, SiLU
from gemmkit.operators import MAX_PLUS, MIN_PLUS
from gemmkit.plans.ahead import KernelToCompile, compiled
from gemmkit.runtime.cache import ship
from gemmkit.runtime.compile import key_of
from gemmkit.runtime.device import gpu
from gemmkit.tools.cli import product, wanted

ARCHITECTURES = "sm_80", "sm_89", "sm_90a", "sm_120"
F16, BF16, F32, F64 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
SQUARES = 64, 256, 512, 1024, 2048, 4096, 8192
ROWS = 1, 16, 128, 512, 2048, 8192                         # tokens of a batch
LAYERS = (768, 3072), (3072, 768), (4096, 4096), (4096, 14336), (14336, 4096)     # a layer's inputs and outputs
WIDTHS = 768, 1024, 2048, 4096, 8192
Calls = Iterator[tuple[str, Callable[[], object]]]


def array(*shape: int, dtype: Any) -> np.ndarray:
    """An array that nothing is written to, so that it takes no memory."""
    return np.empty(shape, dtype)


def products() -> Calls:
    """Square products of all dtypes and orders, and the layers of models."""
    for dtype in (F16, BF16, F32, F64, np.dtype(np.complex64)):
        for size in SQUARES:
            for order in ("nn", "nt", "tn"):
                yield f"{dtype} {order} {size}", product((size, size, size), dtype, order)
    for dtype in (F16, BF16):
        for rows in ROWS:
            for inputs, outputs in LAYERS:
                name, bias = f"{dtype} layer {rows}x{inputs}x{outputs}", Bias(np.empty(outputs, dtype))
                layer = partial(gk.matmul, array(rows, inputs, dtype=dtype), array(outputs, inputs, dtype=dtype).T)
                yield name, layer
                for epilogue in (bias, bias | ReLU(), bias | GELU(), SiLU()):
                    yield f"{name} {epilogue}", partial(layer, epilogue=epilogue)


def semirings() -> Calls:
    for size in SQUARES[1:]:
        a, b = array(size, size, dtype=F32), array(size, size, dtype=F32)
        for operator in (MIN_PLUS, MAX_PLUS):
            yield f"float32 {operator} {size}", partial(gk.matmul, a, b, operator=operator)


def contractions() -> Calls:
    for dtype in (F16, F32):
        for batch, size in ((8, 64), (16, 512)):
            a, b = array(batch, size, size, dtype=dtype), array(batch, size, size, dtype=dtype)
            for text in ("bij,bjk->bik", "bik,bjk->bij", "bij,bjk->ik"):
                yield f"{dtype} einsum {text} {size}", partial(gk.einsum, text, a, b)


def heads() -> Calls:
    """Attention, as models call it: with as many heads of K and V as of Q, or fewer."""
    for dtype in (F16, BF16):
        for head in (64, 128):
            for length in (256, 1024, 4096):
                q = array(1, 16, length, head, dtype=dtype)
                for count in (16, 4):
                    k = array(1, count, length, head, dtype=dtype)
                    for mask in (None, gk.masks.Causal()):
                        yield f"{dtype} attention {head} {count} {mask} {length}", partial(gk.attention, q, k, k, mask=mask)


def rows() -> Calls:
    """Functions of rows, at the widths of models."""
    for dtype in (F16, BF16, F32):
        for width in (*WIDTHS, 32000):
            x, w = array(64, width, dtype=dtype), np.empty(width, dtype)
            yield f"{dtype} softmax {width}", partial(gk.softmax, x)
            yield f"{dtype} log_softmax {width}", partial(gk.log_softmax, x)
            if width in WIDTHS:
                yield f"{dtype} rmsnorm {width}", partial(gk.rmsnorm, x, w)
                yield f"{dtype} layernorm {width}", partial(gk.layernorm, x, w, w)


def calls(only: str = "") -> list[tuple[str, Callable[[], object]]]:
    """All calls whose names have a text in them."""
    groups = (products, semirings, contractions, heads, rows)
    return [(name, call) for group in groups for name, call in group() if only in name]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.cubins", description="Compiles the kernels that a wheel brings.")
    parser.add_argument("--into", type=Path, help="the folder; without it the kernels are counted")
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), help=f"default: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose names have it")
    parser.add_argument("--jobs", type=int, help="kernels at a time (default: one a processor)")
    options = parser.parse_args(arguments)
    kernels = list(wanted(calls(options.only), [gpu(text) for text in options.arch], False))
    print(f"{len(kernels)} kernels", flush=True)
    if options.into is None:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GEMMKIT_CACHE_DIR"] = folder
        return 1 if sum(not done for done in shipping(kernels, options.into, options.jobs)) else 0


def shipping(kernels: Sequence[KernelToCompile], folder: Path, jobs: int | None) -> Iterator[bool]:
    """Compile kernels and write them into a folder; whether each could be, as they come."""
    for made in compiled(kernels, jobs):
        kernel = made.kernel.launchable
        if made.error is not None:
            print(f"{made.kernel.products[0]} for {kernel.target.name}: {made.error}", file=sys.stderr, flush=True)
        else:
            key = key_of(kernel.kernel, kernel.arguments, kernel.threads, kernel.target, kernel.blocks_per_sm)
            ship(key, kernel.entry(), folder)
        yield made.error is None


if __name__ == "__main__":
    raise SystemExit(main())
