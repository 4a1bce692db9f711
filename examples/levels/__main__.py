"""Multiply with each level, check it against NumPy in float64, and time it beside cuBLAS: ``python -m examples.levels``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from examples import machine
from examples.levels import level_1, level_2, level_3, level_4, level_5, level_6

LEVELS: tuple[ModuleType, ...] = (level_1, level_2, level_3, level_4, level_5, level_6)
SIZE = 4096                            # M, N and K of what is timed
CHECKED = 512                          # rows of D that NumPy computes as well: all columns, spread over D
LAUNCHES, ROUNDS = 20, 5               # launches between two events; rounds of ours and cuBLAS's in turn
ERRORS = {"float32": 1e-5, "float16": 2e-3}                       # of the largest element of D: D's own rounding, and sums'


def title(level: ModuleType) -> str:
    """``Level 1: a thread computes an element of D``: what a level's text begins with."""
    return (level.__doc__ or "").splitlines()[0].rstrip(".")


def operands(shape: tuple[int, int, int], dtype: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A and B of random numbers."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(size, np.float32).astype(dtype) for size in ((m, k), (k, n)))
    return a, b


def error(d: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest error of some rows of D, by the largest element of A B in float64."""
    rows = np.unique(np.linspace(0, len(d) - 1, min(len(d), CHECKED)).astype(int))
    exact = a[rows].astype(np.float64) @ b.astype(np.float64)
    found = np.abs(d[rows].astype(np.float64) - exact).max() / np.abs(exact).max()
    return float(found) if np.isfinite(found) else float("inf")


def emulated(level: ModuleType, shape: tuple[int, int, int] | None = None, seed: int = 0) -> float:
    """The error of a product in the emulator: by default of one block's tile and two of its steps."""
    a, b = operands(shape or (*level.MULTIPLES[:2], 2 * level.MULTIPLES[2]), level.DTYPE, seed)
    d = np.full((len(a), b.shape[1]), np.nan, level.DTYPE)
    with machine.Machine("numpy").session():
        level.bind(d, a, b)()
    return error(d, a, b)


def measured(level: ModuleType, size: int = SIZE) -> dict[str, Any]:
    """A level's time on the GPU beside cuBLAS's, as a row of a result file; the error of its product."""
    import cupy
    from numba import cuda

    a, b = operands((size, size, size), level.DTYPE)
    on_device = [cupy.asarray(x) for x in (a, b)]
    d, of_library = (cupy.full((size, size), np.nan, level.DTYPE) for _ in range(2))
    ours = level.bind(*(cuda.as_cuda_array(x) for x in (d, *on_device)))
    ours()
    found = error(cupy.asnumpy(d), a, b)
    library = partial(cupy.matmul, *on_device, out=of_library)
    library()
    times = [[_microseconds(run, cupy) for run in (ours, library)] for _ in range(ROUNDS)]
    mine, peers = map(min, zip(*times))
    return {"group": "levels", "work": title(level), "dtype": np.dtype(level.DTYPE).name, "m": size, "n": size, "k": size,
            "layout": "nn", "ours_us": mine, "peer": "cuBLAS", "peer_us": peers, "ratio": peers / mine, "error": found,
            "graph": False, "tflops": 2 * size**3 / mine * 1e-6}


def _microseconds(run: Callable[[], Any], cupy: Any) -> float:
    """Of one launch, between two events on the default stream."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(LAUNCHES):
        run()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) * 1000 / LAUNCHES


def main(emulate: bool | None = None, size: int = SIZE, json: Path | None = None) -> bool:
    """Run all levels and print a line for each. Returns whether every product is right."""
    where = machine.find(emulate)
    print(f"Six levels of a matrix product, {where}")
    rows = []
    right = True
    for level in LEVELS:
        name = np.dtype(level.DTYPE).name
        row = {"error": emulated(level)} if where.emulated else measured(level, size)
        rows.append(row)
        right = right and row["error"] <= ERRORS[name]
        speed = "" if where.emulated else (f"  {row['ours_us']:9.1f} us  {row['tflops']:6.1f} TFLOP/s  "
                                           f"{100 * row['ratio']:4.0f} % of cuBLAS")
        print(f"  {title(level):<100} {name}  error {row['error']:.1e}{speed}")
    if json is not None and not where.emulated:
        _write(rows, json)
    return right


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    import cupy

    from bench import report

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    report.write(report.document("levels", rows, device), path)


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.levels", description="Six levels of a matrix product.")
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--size", type=int, default=SIZE, help=f"M, N and K on a GPU, a multiple of 256 (default: {SIZE})")
    parser.add_argument("--json", type=Path, help="write what was measured on a GPU into this file")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.size, options.json) else 1


if __name__ == "__main__":
    raise SystemExit(command())
