"""Derived kernels beside those that are written by hand and beside cuBLAS or cuDNN: `python -m bench.derived [causal ...]`.

| work | program | by hand | library |
|---|---|---|---|
| attention, causal, soft cap | `attention` | `gemmkit.attention` | cuDNN, by PyTorch's ``scaled_dot_product_attention`` |
| MLP | `mlp` | `gemmkit.mlp` | a launch of cuBLASLt for each layer |
| GEMM | `gemm` | `gemmkit.matmul` | cuBLAS |
| dual GEMM | `dual` | `gemmkit.glu` | cuBLAS twice, and PyTorch's SiLU and product |
| GEMM and sums of rows | `product_and_sums` | `gemmkit.matmul` with `observers.OperandRowSum` | cuBLAS, and PyTorch's sum |
| LSTM cell | `lstm`, with a ReLU | `gemmkit.functions.lstm_cell` | cuBLAS of joined operands with bias, and PyTorch's ReLU |
| GEMM, multistage | `gemm`, as GPUs without wgmma have it | `gemmkit.matmul` by its multistage kernel | cuBLAS |

All are CUDA graphs, timed in turns in one run (`bench.turns`). Results are compared with float64 on the GPU, or with the
library's where that is too much, before anything is timed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

import gemmkit as gk
from bench import report
from bench.experiments.forced import Forced
from bench.experiments.programs import gemm
from bench.turns import times
from gemmkit import programs as gp
from gemmkit.epilogues import observers
from gemmkit.epilogues.activations import relu
from gemmkit.kernels.masks import Causal, SoftCap

CAP, TOLERANCE = 30.0, 1e-2
Calls = dict[str, Callable[[], Any]]


@gk.program
def attention(q: Any, k: Any, v: Any, o: Any, scale: float, score: Any = None, visible: Any = None,
              lengths: Any = None) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=None if lengths is None else lengths[h]):
            s = scale * (q[h, m] @ k[h, n].T)
            s = s if score is None else score(s)
            s = s if visible is None else gp.where(visible, s, -math.inf)
            top = gp.maximum(best, s.max(axis=1))
            zero = gp.finite(top)
            p, shrink = gp.exp(s - zero), gp.exp(best - zero)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total


@gk.program
def mlp(x: Any, w: Any, bias: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for layer in gp.sequential(w.count):
            h[:] = gp.maximum(h @ w[layer] + bias[layer], 0.0).astype(x.dtype)
        y[m] = h


@gk.program
def dual(a: Any, b: Any, c: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        x, y = gp.zeros(m, n), gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            x += a[m, k] @ b[k, n]
            y += a[m, k] @ c[k, n]
        d[m, n] = x / (1.0 + gp.exp(-x)) * y


@gk.program
def product_and_sums(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += a[m, k].sum(axis=1)
        d[m, n] = acc
        with gp.once(n):
            y[m] = sums


@gk.program
def lstm(x: Any, w: Any, h: Any, u: Any, bias: Any, y: Any) -> None:
    for m, n in gp.parallel(x.rows, w.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[k, n]
        for j in gp.sequential(h.columns):
            acc += h[m, j] @ u[j, n]
        y[m, n] = gp.maximum(acc + bias[n], 0.0)


def causal(m: Any, n: Any) -> Any:
    return n <= m


def soft_cap(s: Any) -> Any:
    return CAP * gp.tanh(s / CAP)


def drawn(*shape: int, scale: float = 1.0) -> Any:
    return (torch.randn(*shape, device="cuda") * scale).half()


def empty(*shape: int) -> Any:
    return torch.full(shape, torch.nan, device="cuda", dtype=torch.float16)


@dataclass(frozen=True)
class Case:
    """``shape``: heads, rows and head size of attention; rows, layers and width of an MLP; M, N, K of a product."""

    work: str
    shape: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.work} {' x '.join(map(str, self.shape))}"

    def made(self, mapping: gk.Mapping | None) -> tuple[Calls, Any, Any, Any]:
        """Calls by name, of which the first is the program; its result and that by hand; what both must be."""
        if self.work == "MLP":
            return self.of_mlp(mapping)
        if self.work == "LSTM cell":
            return self.of_lstm(mapping)
        if self.work == MULTISTAGE:
            mapping = mapping or gk.Mapping(kernel="multistage")
        return self.of_products(mapping) if self.work in PRODUCTS else self.of_attention(mapping)

    def of_attention(self, mapping: gk.Mapping | None) -> tuple[Calls, Any, Any, Any]:
        heads, rows, d = self.shape
        q, k, v = (drawn(heads, rows, d) for _ in range(3))
        o, hand, whole = empty(heads, rows, d), empty(1, heads, rows, d), self.work == "causal"
        given: dict[str, Any] = dict(q=q, k=k, v=v, o=o, scale=d ** -0.5)
        rules: dict[str, Any] = {}
        if self.work == "causal":
            given["visible"], rules["mask"] = causal, Causal()
        if self.work == "soft cap":
            given["score"], rules["score"] = soft_cap, SoftCap(CAP)
        plan = attention.plan(**given, mapping=mapping)

        def library() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=whole)

        calls: Calls = {"ours": lambda: plan.run(given),
                        "by hand": lambda: gk.attention(q[None], k[None], v[None], out=hand, **rules)}
        if self.work != "soft cap":
            calls["cuDNN"] = library
        return calls, o, hand[0], self.exact(q[-1], k[-1], v[-1])

    def exact(self, q: Any, k: Any, v: Any) -> Any:
        """Of the last head."""
        s = q.double() @ k.double().T * q.shape[-1] ** -0.5
        if self.work == "soft cap":
            s = CAP * (s / CAP).tanh()
        if self.work == "causal":
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
        return s.softmax(-1) @ v.double()

    def of_mlp(self, mapping: gk.Mapping | None) -> tuple[Calls, Any, Any, Any]:
        rows, layers, width = self.shape
        x, w = drawn(rows, width), drawn(layers, width, width, scale=1.4 * width ** -0.5)
        bias, y, hand = drawn(layers, width, scale=0.1), empty(rows, width), empty(rows, width)
        given = dict(x=x, w=w, bias=bias, y=y)
        plan = mlp.plan(**given, mapping=mapping)

        def library() -> Any:
            h = x
            for weights, b in zip(w, bias):
                h = torch._addmm_activation(b, h, weights)
            return h

        exact = x.double()
        for weights, b in zip(w, bias):
            exact = (exact @ weights.double() + b.double()).relu()
        return {"ours": lambda: plan.run(given), "by hand": lambda: gk.mlp(x, w, bias, relu, last=relu, out=hand),
                "cuBLASLt": library}, y, hand, exact

    def of_lstm(self, mapping: gk.Mapping | None) -> tuple[Calls, Any, Any, Any]:
        m, n, k = self.shape
        x, w, h, u = (drawn(rows, columns, scale=k ** -0.25) for rows, columns in ((m, k), (k, n), (m, n), (n, n)))
        bias, y, hand = drawn(n), empty(m, n), empty(m, n)
        given = dict(x=x, w=w, h=h, u=u, bias=bias, y=y)
        plan, inputs, weights = lstm.plan(**given, mapping=mapping), torch.cat([x, h], 1), torch.cat([w, u])
        exact = (x.double() @ w.double() + h.double() @ u.double() + bias.double()).relu()
        return {"ours": lambda: plan.run(given), "by hand": lambda: gk.functions.lstm_cell(x, h, None, w, u, bias, out=hand),
                "cuBLAS and PyTorch": lambda: torch.addmm(bias, inputs, weights).relu_()}, y, hand, exact

    def of_products(self, mapping: gk.Mapping | None) -> tuple[Calls, Any, Any, Any]:
        m, n, k = self.shape
        a, b, c = drawn(m, k, scale=k ** -0.25), drawn(k, n, scale=k ** -0.25), drawn(k, n, scale=k ** -0.25)
        d, hand, other, sums = (*(empty(m, n) for _ in range(3)), torch.empty(m, device="cuda"))
        exact = a.double() @ b.double()
        if self.work == "dual GEMM":
            given: dict[str, Any] = dict(a=a, b=b, c=c, d=d)
            plan = dual.plan(**given, mapping=mapping)
            wide = torch.cat([b, c], 1)
            calls: Calls = {"ours": lambda: plan.run(given), "by hand": lambda: gk.glu(a, b, c, out=hand),
                            "cuBLAS and PyTorch": lambda: silu((p := a @ wide)[:, :n]) * p[:, n:]}
            return calls, d, hand, silu(exact) * (a.double() @ c.double())
        if self.work in ("GEMM", MULTISTAGE):
            given = dict(a=a, b=b, d=d)
            conf = Forced("forced", "", "f16", m, n, k).configuration if self.work == MULTISTAGE else None
            plan = gemm.plan(**given, mapping=mapping)
            return {"ours": lambda: plan.run(given), "by hand": lambda: gk.matmul(a, b, None, conf, out=hand),
                    "cuBLAS": lambda: torch.matmul(a, b, out=other)}, d, hand, exact
        given = dict(a=a, b=b, d=d, y=sums)
        plan, found = product_and_sums.plan(**given, mapping=mapping), torch.empty_like(sums)
        return {"ours": lambda: plan.run(given),
                "by hand": lambda: gk.matmul(a, b, out=hand, observe_a=observers.OperandRowSum(found)),
                "cuBLAS and PyTorch": lambda: (torch.matmul(a, b, out=other), a.sum(1, dtype=torch.float32))}, d, hand, exact

    def rows(self, mapping: gk.Mapping | None = None) -> list[dict[str, Any]]:
        """Of results: one for each thing that the program is beside. Raises ValueError for a result that is wrong."""
        calls, found, hand, exact = self.made(mapping)
        for call in calls.values():
            call()
        one, other = (x[-1] if x.dim() == 3 else x for x in (found, hand))
        errors = [float((x.double() - exact).abs().max() / exact.abs().max()) for x in (one, other)]
        if not max(errors) <= TOLERANCE:
            raise ValueError(f"{self}: the results differ by {errors} of the largest element")
        taken = times(calls)
        m, n, k = self.shape
        print(f"{self!s:42}", {name: round(time, 1) for name, time in taken.items()}, "of by hand",
              round(taken["by hand"] / taken["ours"], 3), flush=True)
        return [dict(group="derived", work=self.work, dtype="float16", m=m, n=n, k=k, layout="nn",
                     ours_us=round(taken["ours"], 2), peer=name, peer_us=round(time, 2),
                     ratio=round(time / taken["ours"], 4), error=errors[0], graph=True)
                for name, time in taken.items() if name != "ours"]


MULTISTAGE = "GEMM, multistage"
PRODUCTS = "GEMM", "dual GEMM", "GEMM and sums of rows", MULTISTAGE
SIZES = (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (512, 8192, 4096)
CASES = (*(Case(work, (64, 4096, 128)) for work in ("attention", "causal")),
         *(Case(work, (16, 4096, 128)) for work in ("attention", "causal", "soft cap")),
         *(Case(work, (heads, 4096, d)) for heads, d in ((64, 64), (32, 192), (16, 256))
           for work in ("attention", "causal")),
         *(Case("MLP", (rows, layers, 128)) for rows, layers in ((16384, 4), (16384, 8), (16384, 20), (65536, 8))),
         *(Case("LSTM cell", (size, size, size)) for size in (2048, 4096)),
         *(Case(work, size) for work in PRODUCTS for size in (SIZES if work != MULTISTAGE else SIZES[:3])),
         Case("dual GEMM", (8192, 14336, 4096)), Case("GEMM and sums of rows", (6144, 6144, 6144)))


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.derived", description=__doc__.splitlines()[0])
    works = sorted({case.work for case in CASES})
    made.add_argument("works", nargs="*", metavar="work", help=f"of {', '.join(works)}; all if none is named")
    made.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    options = made.parse_args(arguments)
    for work in options.works:
        if work not in works:
            made.error(f"{work!r} is none of {', '.join(works)}")
    rows = [row for case in CASES if not options.works or case.work in options.works for row in case.rows()]
    report.write(report.document("derived", rows, torch.cuda.get_device_name()), report.results_path("derived", options.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
