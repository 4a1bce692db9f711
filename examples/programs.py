"""Two kernels that no library has, written as programs (docs/programs.md): `python -m examples.programs`.

`decayed_attention` has a learned decay for each head: scores fall with the distance, and the future is hidden. Its result is
normalised in every round, so that what it has is the answer for the keys so far. `gated_chain` is (gate_m silu(A B^T)_mn)
C, with a gate for each row: the product between the two is never stored.

Each is compared with the same program computed by NumPy in float64. They want a GPU of compute capability 8.0 or above.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import gemmkit as gk
from examples import machine
from gemmkit import programs as gp

WANTED_ERROR = 3e-3                    # of the largest element: what float16 operands and results cost


@gk.program
def decayed_attention(q: Any, k: Any, v: Any, decay: Any, o: Any, scale: float) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[h, m] @ k[h, n].T) - decay[h] * (gp.place(m) - gp.place(n))
            s = gp.where(lambda row, key: key <= row, s, -math.inf)
            top = gp.maximum(best, s.max(axis=1))
            p, before = gp.exp(s - top), total * gp.exp(best - top)
            now = before + p.sum(axis=1)
            out[:] = out * (before / now) + (p / now).astype(v.dtype) @ v[h, n]
            total[:] = now
            best[:] = top
        o[h, m] = out


@gk.program
def gated_chain(a: Any, b: Any, gate: Any, c: Any, d: Any) -> None:
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(b.rows):
            x = a[m] @ b[n].T
            h = x / (1.0 + gp.exp(-x)) * gate[m]
            out += h.astype(a.dtype) @ c[n]
        d[m] = out


def error(program: gp.Program, where: machine.Machine, arrays: list[np.ndarray], **scalars: Any) -> float:
    """Of the last array, which is the result, relative to its largest element."""
    exact = program.reference(*arrays, **scalars)
    given = [where.to_device(x) for x in arrays]
    with where.session():
        program(*given, **scalars)
    return float(np.abs(where.to_host(given[-1]) - exact).max() / np.abs(exact).max())


def main(emulate: bool | None = None, rows: int | None = None) -> bool:
    where = machine.find(emulate)
    rows = rows or (150 if where.emulated else 4096)
    rng = np.random.default_rng(0)

    def half(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float16)

    print(f"Two programs, {where}: {rows} rows")
    heads = [half(2, rows, 64) for _ in range(3)]
    decay = np.array([0.02, 0.5], np.float32)
    attention = error(decayed_attention, where, [*heads, decay, np.full((2, rows, 64), np.nan, np.float16)], scale=0.125)
    chain = error(gated_chain, where, [half(rows, 64), half(rows, 64, scale=0.2), rng.random(rows, np.float32),
                                       half(rows, 64), np.full((rows, 64), np.nan, np.float16)])
    for name, found in (("attention with a decay for each head", attention), ("a chain with a gate for each row", chain)):
        print(f"  {name}: error {found:.1e}, against NumPy in float64 (wanted: at most {WANTED_ERROR})")
    return attention <= WANTED_ERROR and chain <= WANTED_ERROR


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.programs", description="Two kernels, written as programs.")
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--rows", type=int, help="how many rows (default: 4096; 150 in the emulator)")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.rows) else 1


if __name__ == "__main__":
    raise SystemExit(command())
