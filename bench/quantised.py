"""Products with weights of 4 bits, beside PyTorch's product of float16 weights: `python -m bench.quantised`.

Weights are random words with a float16 scale for each ``group`` input rows (and zero points, with ``zeros``). The peer
multiplies the same weights, dequantised before: for float8 (e4m3, D in bfloat16) as float16. Both are captured in CUDA
graphs and timed in turns, over as many sets of weights as exceed twice the L2, and compared with float64 (`bench.harness`).
With ``--device cpu`` a small case runs in the emulator, beside PyTorch on the CPU: the times are no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import gemmkit as gk
from bench.harness import Processor, Row, Work, compare, input_sets
from bench.turns import command
from gemmkit.layouts import GroupQuantised
from gemmkit.layouts.matrices import Matrix
from gemmkit.runtime.arrays import dtype_from_torch

TOLERANCE = 2e-3                       # of the norm: elements of D are float16 or bfloat16
ROWS = 1, 8, 16, 32, 64, 128, 256
LAYERS = (4096, 4096), (14336, 4096), (4096, 14336)            # columns of D, and K
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
OF_PEER = {"e4m3": torch.float16}      # of others their own
PEER_SETS = 2                          # of dense weights at least: they take four times as much memory


class QuantisedCase(NamedTuple):
    m: int
    n: int
    k: int
    dtype: str = "f16"
    group: int = 128
    zeros: bool = False

    @property
    def nbytes(self) -> int:
        """Of the weights' words."""
        return self.n * self.k // 2

    def words(self, device: str) -> tuple[Any, ...]:
        """The words, scales and zero points (None: 8) of a set of weights."""
        words = torch.randint(-2**31, 2**31 - 1, (self.k // 8, self.n), dtype=torch.int32, device=device)
        scales = (torch.rand(self.k // self.group, self.n, device=device) + 0.5).half() / 64
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device) if self.zeros else None
        return words, scales, zeros

    def matrix(self, words: Any, scales: Any, zeros: Any) -> Matrix:
        layout = GroupQuantised(dtype_from_torch(DTYPES[self.dtype]), scales, 4, self.group, zeros)
        return Matrix(words.view(torch.uint32), layout)

    def dense(self, words: Any, scales: Any, zeros: Any) -> Any:
        """The weights as PyTorch's linear layers have them: (n, k)."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)[:, None]
        integers = (words[:, None] >> shifts & 15).view(self.k // self.group, self.group, self.n).float()
        middle = 8 if zeros is None else zeros[:, None].float()
        values = (integers - middle) * scales[:, None].float()
        return values.view(self.k, self.n).half().to(OF_PEER.get(self.dtype, DTYPES[self.dtype])).t().contiguous()


def cases() -> Iterator[QuantisedCase]:
    yield from (QuantisedCase(m, n, k) for n, k in LAYERS for m in ROWS)
    yield from (QuantisedCase(m, n, k, "e4m3") for n, k in LAYERS for m in ROWS)
    for m in (64, 256):
        yield from (QuantisedCase(m, *LAYERS[0], *kind) for kind in (("f16", 64, True), ("f16", 4096), ("bf16", 128, True)))


def row(case: QuantisedCase, device: str, pairs: int = 20) -> Row:
    """Raises `bench.harness.WrongResult` where a product is another than that in float64."""
    torch.manual_seed(0)
    if device == "cuda":
        from bench.backends import Torch

        lib = Torch()
        clock, sets = lib, input_sets(case.nbytes, lib.l2_bytes())
        dense_sets = max(PEER_SETS, input_sets(4 * case.nbytes, lib.l2_bytes()))
        peer_name = lib.peer_name()
    else:
        clock, sets, dense_sets, peer_name = Processor(), 1, 1, "torch on a CPU"     # type: ignore[assignment]
    given = [case.words(device) for _ in range(sets)]
    dense = [case.dense(*of) for of in given[:dense_sets]]
    x = torch.randn(case.m, case.k, device=device).to(DTYPES[case.dtype])
    narrow = case.dtype == "e4m3"
    outs = [torch.empty(case.m, case.n, device=device, dtype=torch.bfloat16 if narrow else x.dtype) for _ in given]
    of_peer = torch.empty_like(outs[0], dtype=dense[0].dtype)
    y = x.to(dense[0].dtype)

    def error(i: int) -> float:
        wanted = x.double() @ case.dense(*given[i]).double().t()
        return float(torch.linalg.vector_norm(outs[i].double() - wanted) / torch.linalg.vector_norm(wanted))

    def poison() -> None:
        for out in outs:
            out.fill_(float("nan"))

    ours = [lambda b=b, out=out: gk.matmul(x, b, out=out) for b, out in zip([case.matrix(*of) for of in given], outs)]
    peer = [lambda w=w: torch.mm(y, w.t(), out=of_peer) for w in dense]
    kind = f"4 bits, groups of {case.group}" + (", zero points" if case.zeros else "")
    return compare(Work(kind, case.dtype, case.m, case.n, case.k, "nn"), ours, [peer[i % len(peer)] for i in range(sets)],
                   peer_name=peer_name, clock=clock, poison=poison, error=error,
                   tolerance=TOLERANCE if case.dtype == "f16" else 8 * TOLERANCE, pairs=pairs,
                   target_us=2000.0 if device == "cuda" else 1.0, graph=device == "cuda", further=dict(group="quantised"))


def measured(options: Any) -> Iterator[Row]:
    if options.device == "cpu":
        for dtype in ("f16", "e4m3"):
            yield row(QuantisedCase(64, 64, 128, dtype), "cpu", 2)
        return
    for case in cases():
        made = row(case, "cuda")
        print(f"{made['work']:>34} {case.dtype:>4} {case.m:>3} x {case.n} x {case.k}: {made['ours_us']:.1f} us, "
              f"{made['ratio']:.2f} of {made['peer']}", flush=True)
        yield made


def main(arguments: Sequence[str] | None = None) -> int:
    return command("quantised", __doc__, measured, arguments, on_cpu=True)


if __name__ == "__main__":
    raise SystemExit(main())
