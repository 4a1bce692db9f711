"""Products of 8-bit floats with scales, beside ``torch._scaled_mm``: `python -m bench.scaled`.

| work | scales | beside |
|---|---|---|
| fast, exact | of rows and columns | ``torch._scaled_mm``, with and without ``use_fast_accum`` |
| blocks | of 128 along K of A, of 128 x 128 of B | the same with these scales where cuBLASLt has them; else exact, of rows |

Operands are standard normal, quantised with the scales of their work. All are timed in turns by events in one run, and
compared with a product in float32 before. With ``--device cpu`` small cases run in the emulator, beside that product: the
times are no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import gemmkit as gk
import gemmkit.torch
from bench.harness import WrongResult
from bench.turns import command, rows, times_of_events
from gemmkit.functions.rows import to_float8

TOLERANCE = 1e-2                       # of the largest element
CALLS, TURNS, BEFORE = 5, 9, 3
SIZES = ((4096, 7168, 16384), (8192, 8192, 8192), (4096, 4096, 4096), (4096, 4096, 7168), (128, 7168, 2048),
         (64, 7168, 2048))
SMALL = ((20, 136, 144),)
WORKS = "fast", "exact", "blocks"


class ScaledCase(NamedTuple):
    work: str
    m: int
    n: int
    k: int

    def operands(self, device: str) -> tuple[Any, ...]:
        """a, b and their scales; b by columns."""
        torch.manual_seed(0)
        a, b = (torch.randn(rows, self.k, device=device) for rows in (self.m, self.n))
        if self.work != "blocks":
            (a, of_a), (b, of_b) = (to_float8(x, block=None) for x in (a, b))
            return a, b.t(), of_a, of_b.t().contiguous()
        a, of_a = to_float8(a)
        rows, columns = -(-self.n // 128), -(-self.k // 128)
        padded = torch.zeros(128 * rows, 128 * columns, device=device)
        padded[:self.n, :self.k] = b
        of_b = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
        b = (b / wide(of_b, b, 128)).to(torch.float8_e4m3fn)
        return a, b.t(), of_a.t().contiguous().t(), of_b.t()


def wide(scale: Any, x: Any, rows: int) -> Any:
    """Scales of blocks, for each element of x; others as they are."""
    if 1 in scale.shape and scale.shape[0] in (1, x.shape[0]) and scale.shape[1] in (1, x.shape[1]):
        return scale
    return scale.repeat_interleave(rows, 0)[:x.shape[0]].repeat_interleave(128, 1)[:, :x.shape[1]]


def in_float32(a: Any, b: Any, of_a: Any, of_b: Any) -> Any:
    return (a.float() * wide(of_a, a, 1)) @ (b.t().float() * wide(of_b.t(), b.t(), 128)).t()


def calls(case: ScaledCase, device: str, given: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """What is timed, by its name: ours first, then the peer."""
    fast = case.work == "fast"
    ours = {"ours": lambda: gk.torch.scaled_mm(*given, use_fast_accum=fast)}
    if device == "cpu":
        return {**ours, "float32": lambda: in_float32(*given)}

    def peer(*operands: Any) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(*operands, out_dtype=torch.bfloat16, use_fast_accum=fast)

    try:
        peer(*given)()
    except (RuntimeError, NotImplementedError, ValueError):           # this cuBLASLt has no such scales
        rows = ScaledCase("exact", *case[1:]).operands(device)
        return {**ours, "torch._scaled_mm of rows": peer(*rows)}
    return {**ours, "torch._scaled_mm": peer(*given)}


def row(case: ScaledCase, device: str, count: int = CALLS, turns: int = TURNS) -> dict[str, Any]:
    """Raises `bench.harness.WrongResult` where the product is another than that in float32. Of 14 bits of sums ("fast") the
    peer's error says how far apart they may be."""
    given = case.operands(device)
    timed = calls(case, device, given)
    wanted = in_float32(*given)
    error, of_peer = (float((x().float() - wanted).abs().max() / wanted.abs().max()) for x in timed.values())
    limit = max(TOLERANCE, 1.5 * of_peer) if case.work == "fast" else TOLERANCE
    if not error <= limit:
        raise WrongResult(f"{case}: differs from the product in float32 by {error:.4f} of the largest element, the peer by "
                          f"{of_peer:.4f}")
    del wanted
    taken = times_of_events(timed, device, count, turns, BEFORE if device == "cuda" else 1)
    (made,) = rows("scaled", case.work, case[1:], taken, error, flops=2 * case.m * case.n * case.k, dtype="float8_e4m3fn",
                   layout="nt", graph=False, peer_error=of_peer)
    return made


def measured(options: Any) -> Iterator[dict[str, Any]]:
    trial = (1, 1) if options.device == "cpu" else ()
    for size in SMALL if trial else SIZES:
        yield from (row(ScaledCase(work, *size), options.device, *trial) for work in WORKS)


def main(arguments: Sequence[str] | None = None) -> int:
    return command("scaled", __doc__, measured, arguments, on_cpu=True)


if __name__ == "__main__":
    raise SystemExit(main())
