"""The step of the Muon optimiser that makes a gradient orthogonal: `python -m examples.newton_schulz`.

Newton and Schulz's iteration moves all singular values of X towards 1 (Jordan et al., "Muon", 2024). A step is

    A = X X^T,    B = b A + c A A,    X = a X + B X

A and B are symmetric, so two of the three products compute one half of their tiles and store it twice:

| product | by |
|---|---|
| A | `gk.matmul(x, x.T, out=SymmetricMatrix(a, "both"))` |
| B | `gk.matmul(a, a, out=SymmetricMatrix(b, "both"), epilogue=LinearCombination(c, b, a, ...))` |
| X | `gk.matmul(b, x, out=y, epilogue=LinearCombination(1, a, x, ...))` |

Where X is square that leaves 2 of 3 multiplications. The result is compared with the same steps in float64.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import gemmkit as gk
from examples import machine
from gemmkit.epilogues import LinearCombination
from gemmkit.layouts import RowMajor, SymmetricMatrix

COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS = 5
WANTED_ERROR = 2e-2                    # of the largest element, after five steps whose results are rounded to float16


def orthogonalised(xp: Any, x: Any, steps: int = STEPS) -> Any:
    """X of (rows, columns), rows <= columns, float16, after some steps: its singular values are about 1."""
    plain, (by_x, by_a, by_aa) = RowMajor(x.dtype), COEFFICIENTS
    rows = x.shape[0]
    x, y = (x / xp.linalg.norm(x.astype(np.float32))).astype(x.dtype), xp.empty_like(x)
    a, b = xp.empty((rows, rows), x.dtype), xp.empty((rows, rows), x.dtype)
    for _ in range(steps):
        gk.matmul(x, x.T, out=SymmetricMatrix(a, "both"))
        gk.matmul(a, a, out=SymmetricMatrix(b, "both"), epilogue=LinearCombination(by_aa, by_a, a, plain))
        gk.matmul(b, x, out=y, epilogue=LinearCombination(1.0, by_x, x, plain))
        x, y = y, x
    return x


def reference(x: np.ndarray, steps: int = STEPS) -> np.ndarray:
    """The same in float64."""
    by_x, by_a, by_aa = COEFFICIENTS
    x = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64))
    for _ in range(steps):
        a = x @ x.T
        x = by_x * x + (by_a * a + by_aa * a @ a) @ x
    return x


def main(emulate: bool | None = None, rows: int | None = None) -> bool:
    where = machine.find(emulate)
    if where.library not in ("cupy", "numpy"):
        print("Newton and Schulz's iteration wants CuPy on a GPU; python -m examples.newton_schulz --emulate needs none")
        return True
    rows = rows or (64 if where.emulated else 2048)
    columns = rows * 3 // 2
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float16)
    with where.session():
        found = where.to_host(orthogonalised(importlib.import_module(where.library), where.to_device(x))).astype(np.float64)
    wanted = reference(x)
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    values = np.linalg.svd(found, compute_uv=False)
    print(f"{STEPS} steps of {rows} x {columns}, {where}")
    print(f"  error {error:.1e}, against NumPy in float64 (wanted: at most {WANTED_ERROR})")
    print(f"  singular values from {values.min():.2f} to {values.max():.2f}")
    return error <= WANTED_ERROR


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.newton_schulz", description="Muon's orthogonal gradients.")
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--rows", type=int, help="rows of the gradient (default: 2048; 64 in the emulator)")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.rows) else 1


if __name__ == "__main__":
    raise SystemExit(command())
