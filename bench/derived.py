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

All are CUDA graphs, timed in turns in one run (`bench.turns`). Results are compared with float64 on the GPU before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

import gemmkit as gk
from bench.experiments.forced import Forced
from bench.experiments.programs import gemm
from bench.turns import Calls, command, error_of, rows, times
from gemmkit import programs as gp
from gemmkit.epilogues import observers
from gemmkit.epilogues.activations import relu
from gemmkit.kernels.masks import Causal, SoftCap

CAP, TOLERANCE = 30.0, 1e-2


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
def batched(a: Any, b: Any, d: Any) -> None:
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ b[h, k, n]
        d[h, m, n] = acc


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


Made = tuple[Calls, dict[str, Any], Any]


@dataclass(frozen=True)
class Case:
    """``shape``: heads, rows and head size of attention; rows, layers and width of an MLP; M, N, K of ``count`` products. In
    a ``figure`` (`bench.cypress`) the program is beside Triton's kernel and other programs, not what is written by hand."""

    work: str
    shape: tuple[int, int, int]
    figure: bool = False
    count: int = 1

    def __str__(self) -> str:
        return f"{self.work} {' x '.join(map(str, self.shape))}"

    def made(self, mapping: gk.Mapping | None) -> Made:
        """Calls by name, the program's first; where each leaves its result, if it does not return it; what all must be, of a
        stack the last."""
        if self.work == "MLP":
            return self.of_mlp(mapping)
        if self.work == "LSTM cell":
            return self.of_lstm(mapping)
        if self.work == MULTISTAGE:
            mapping = mapping or gk.Mapping(kernel="multistage")
        return self.of_products(mapping) if self.work in PRODUCTS else self.of_attention(mapping)

    def of_triton(self, *arrays: Any) -> Calls:
        """The Triton kernel of a figure that writes the last array; of stacks, or without Triton, none."""
        if not self.figure or self.count > 1:
            return {}
        try:
            from bench import triton_kernels as kernels
        except ImportError:
            return {}
        a, b, *more = arrays
        calls = {"GEMM": lambda: kernels.product(a, b, more[-1]), "dual GEMM": lambda: kernels.gated(a, b, *more),
                 "GEMM and sums of rows": lambda: kernels.with_sums(a, b, more[-1], more[0]),
                 "attention": lambda: kernels.attention(a, b, more[0], more[-1], False)}
        return {"Triton": calls[self.work]()}

    def of_attention(self, mapping: gk.Mapping | None) -> Made:
        heads, rows, d = self.shape
        q, k, v = (drawn(heads, rows, d) for _ in range(3))
        o, hand, third = (empty(heads, rows, d) for _ in range(3))
        in_groups = [x.unflatten(0, (-1, 16)) for x in (q, k, v, hand, third)]
        given: dict[str, Any] = dict(q=q, k=k, v=v, o=o, scale=d ** -0.5)
        rules: dict[str, Any] = {}
        if self.work == "causal":
            given["visible"], rules["mask"] = causal, Causal()
        if self.work == "soft cap":
            given["score"], rules["score"] = soft_cap, SoftCap(CAP)
        plan = attention.plan(**given, mapping=mapping)

        def library() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(*in_groups[:3], is_causal=self.work == "causal")

        calls: Calls = {"ours": lambda: plan.run(given)}
        if self.figure:
            again = {**given, "o": hand}
            other = attention.plan(**again, mapping=gk.Mapping(ahead=False, warpgroups=3))
            calls["program, FlashAttention 2"] = lambda: other.run(again)
        else:
            calls["by hand"] = lambda: gk.attention(*in_groups[:3], out=in_groups[3], **rules)
        if self.work != "soft cap":
            calls["cuDNN"] = library
        calls |= self.of_triton(*in_groups[:3], in_groups[4])
        return calls, {"ours": o, "program, FlashAttention 2": hand, "by hand": hand, "Triton": third}, self.exact(
            q[-1], k[-1], v[-1])

    def exact(self, q: Any, k: Any, v: Any) -> Any:
        """Of the last head."""
        s = q.double() @ k.double().T * q.shape[-1] ** -0.5
        if self.work == "soft cap":
            s = CAP * (s / CAP).tanh()
        if self.work == "causal":
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
        return s.softmax(-1) @ v.double()

    def of_mlp(self, mapping: gk.Mapping | None) -> Made:
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
                "cuBLASLt": library}, {"ours": y, "by hand": hand}, exact

    def of_lstm(self, mapping: gk.Mapping | None) -> Made:
        m, n, k = self.shape
        x, w, h, u = (drawn(rows, columns, scale=k ** -0.25) for rows, columns in ((m, k), (k, n), (m, n), (n, n)))
        bias, y, hand = drawn(n), empty(m, n), empty(m, n)
        given = dict(x=x, w=w, h=h, u=u, bias=bias, y=y)
        plan, inputs, weights = lstm.plan(**given, mapping=mapping), torch.cat([x, h], 1), torch.cat([w, u])
        exact = (x.double() @ w.double() + h.double() @ u.double() + bias.double()).relu()
        calls: Calls = {
            "ours": lambda: plan.run(given), "by hand": lambda: gk.functions.lstm_cell(x, h, None, w, u, bias, out=hand),
            "cuBLAS and PyTorch": lambda: torch.addmm(bias, inputs, weights).relu_()}
        return calls, {"ours": y, "by hand": hand}, exact

    def of_products(self, mapping: gk.Mapping | None) -> Made:
        m, n, k = self.shape
        stack = (self.count,) if self.count > 1 else ()
        a, b, c = (drawn(*stack, *extents, scale=k ** -0.25) for extents in ((m, k), (k, n), (k, n)))
        d, hand, other, third = (empty(*stack, m, n) for _ in range(4))
        sums, found = (torch.empty(m, device="cuda") for _ in range(2))
        left, right = (a[-1], b[-1]) if stack else (a, b)
        exact = left.double() @ right.double()
        inputs: tuple[Any, ...] = a, b
        beside, held = "cuBLAS", {"ours": d, "by hand": hand, "cuBLAS": other, "Triton": third}
        program, given = batched if stack else gemm, dict(a=a, b=b, d=d)
        conf = Forced("forced", "", "f16", m, n, k).configuration if self.work == MULTISTAGE else None
        by_hand: Callable[[], Any] = partial(gk.matmul, a, b, None, conf, out=hand)
        library: Callable[[], Any] = partial(torch.matmul, a, b, out=other)
        if self.work == "dual GEMM":
            wide = torch.cat([b, c], 1)
            exact = silu(exact) * (a.double() @ c.double())
            inputs, beside, program, given = (a, b, c), "cuBLAS and PyTorch", dual, dict(a=a, b=b, c=c, d=d)
            by_hand, library = partial(gk.glu, a, b, c, out=hand), lambda: silu((p := a @ wide)[:, :n]) * p[:, n:]
        elif self.work == "GEMM and sums of rows":
            inputs, beside, program = (a, b, found), "cuBLAS and PyTorch", product_and_sums
            given["y"] = sums
            by_hand = partial(gk.matmul, a, b, out=hand, observe_a=observers.OperandRowSum(found))
            library, held[beside] = lambda: (torch.matmul(a, b, out=other), a.sum(1, dtype=torch.float32)), other
        plan = program.plan(**given, mapping=mapping)
        calls: Calls = {"ours": lambda: plan.run(given)}
        if not self.figure:
            calls["by hand"] = by_hand
        elif beside != "cuBLAS":
            alone = gemm.plan(a, b, hand)
            calls[ALONE] = lambda: alone.run(dict(a=a, b=b, d=hand))
        return calls | {beside: library} | self.of_triton(*inputs, third), held, exact

    def rows(self, mapping: gk.Mapping | None = None) -> list[dict[str, Any]]:
        """Of results: one for each thing that the program is beside. Raises `bench.harness.WrongResult`."""
        calls, held, exact = self.made(mapping)
        errors = {}
        for name, call in list(calls.items()):
            for out in held.values():
                out.fill_(torch.nan)
            try:
                made = call()
            except Exception as error:
                if name != "Triton":
                    raise
                print(f"{self}: {name} cannot run: {type(error).__name__} {str(error)[:200]}", flush=True)
                del calls[name]
                continue
            if name != ALONE:
                result: Any = held.get(name, made)
                while result.dim() > exact.dim():
                    result = result[-1]
                errors[name] = error_of(f"{self}, {name}", result, exact, TOLERANCE)
        m, n, k = self.shape
        heads, pairs = (m, 2) if self.work == "attention" else (1, 2 if self.work == "dual GEMM" else 1)
        sizes = (heads * n, n, k) if self.figure and heads > 1 else (self.count * m, n, k)
        flops = 2 * pairs * sizes[0] * n * k if self.figure else 0
        return rows("cypress" if self.figure else "derived", self.work, sizes, times(calls), errors["ours"], flops=flops)


MULTISTAGE, ALONE = "GEMM, multistage", "program, GEMM alone"
PRODUCTS = "batched GEMM", "GEMM", "dual GEMM", "GEMM and sums of rows", MULTISTAGE
SIZES = (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (512, 8192, 4096)
CASES = (*(Case(work, (64, 4096, 128)) for work in ("attention", "causal")),
         *(Case(work, (16, 4096, 128)) for work in ("attention", "causal", "soft cap")),
         *(Case(work, (heads, 4096, d)) for heads, d in ((64, 64), (32, 192), (16, 256))
           for work in ("attention", "causal")),
         *(Case("MLP", (rows, layers, 128)) for rows, layers in ((16384, 4), (16384, 8), (16384, 20), (65536, 8))),
         *(Case("LSTM cell", (size, size, size)) for size in (2048, 4096)),
         *(Case(work, size) for work in PRODUCTS[1:] for size in (SIZES if work != MULTISTAGE else SIZES[:3])),
         Case("dual GEMM", (8192, 14336, 4096)), Case("GEMM and sums of rows", (6144, 6144, 6144)))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("derived", __doc__, lambda options: (
        row for case in CASES if case.work in (options.works or (case.work,)) for row in case.rows()),
        arguments, sorted({case.work for case in CASES}))


if __name__ == "__main__":
    raise SystemExit(main())
