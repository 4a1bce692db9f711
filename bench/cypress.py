"""Figures 13 and 14 of paper 001 (Cypress), as programs: `python -m bench.cypress [GEMM ...]`.

| figure | program | beside |
|---|---|---|
| 13a | GEMM | cuBLAS, Triton |
| 13b | batched GEMM: four products in one launch | cuBLAS |
| 13c | dual GEMM | cuBLAS twice and PyTorch's SiLU and product, Triton; and the GEMM of the same size |
| 13d | GEMM and the sums of A's rows | cuBLAS and PyTorch's sum, Triton; and the GEMM of the same size |
| 14 | attention by FlashAttention 3's order, and by FlashAttention 2's (``ahead=False``, three warpgroups) | cuDNN, Triton |

All are float16 and CUDA graphs, timed in turns in one run (`bench.turns`); Triton's are `bench.triton_kernels`. Every
result is compared with float64, some rows of large ones, before anything is timed. The paper's sizes are not in its text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

import gemmkit as gk
from bench import report
from bench.derived import TOLERANCE, Calls, attention, drawn, dual, empty, product_and_sums
from bench.experiments.programs import gemm
from bench.turns import times
from gemmkit import programs as gp

SIZES = 4096, 6144, 8192
BATCHED = 1024, 2048, 4096
BATCH, TOKENS, HEADS, HEAD = 4, 16384, 16, 128         # of attention: tokens of all sequences together
LENGTHS = 512, 1024, 2048, 4096, 8192, 16384
SAMPLE = 64                            # rows that are compared
WORKS = "GEMM", "batched GEMM", "dual GEMM", "GEMM and sums of rows", "attention"
ORDERS = {"program, FlashAttention 3": {}, "program, FlashAttention 2": dict(ahead=False, warpgroups=3)}


@gk.program
def batched(a: Any, b: Any, d: Any) -> None:
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ b[h, k, n]
        d[h, m, n] = acc


def of_triton(work: str, *arrays: Any) -> Calls:
    """The Triton kernel that computes a work into the last of the arrays; of stacks, or without Triton, none."""
    try:
        from bench import triton_kernels as kernels
    except ImportError:
        return {}
    if work == "batched GEMM":
        return {}
    a, b, *more = arrays
    calls = {"GEMM": lambda: kernels.product(a, b, more[-1]), "dual GEMM": lambda: kernels.gated(a, b, more[0], more[-1]),
             "GEMM and sums of rows": lambda: kernels.with_sums(a, b, more[-1], more[1]),
             "attention": lambda: kernels.attention(a, b, more[0], more[-1], False)}
    return {"Triton": calls[work]()}


def of_products(work: str, size: int) -> tuple[Calls, dict[str, Any], Callable[[Any], Any]]:
    """Calls by name; where each leaves its result, if it is not the value of the call; what some rows of it must be."""
    stack = (BATCH,) if work == "batched GEMM" else ()
    a, b, c = (drawn(*stack, size, size, scale=size ** -0.25) for _ in range(3))
    d, other, third = (empty(*stack, size, size) for _ in range(3))
    sums, y = (torch.empty(size, device="cuda") for _ in range(2))
    left, right = (a[-1], b[-1]) if stack else (a, b)

    def rows(at: Any) -> Any:
        exact = left[at].double() @ right.double()
        return silu(exact) * (a[at].double() @ c.double()) if work == "dual GEMM" else exact

    peers = of_triton(work, a, b, c, y, third)
    held = {"program": d, "cuBLAS": other, **dict.fromkeys(peers, third)}
    if work == "GEMM":
        plan, given = gemm.plan(a, b, d), dict(a=a, b=b, d=d)
        library = {"cuBLAS": lambda: torch.matmul(a, b, out=other)}
    elif work == "batched GEMM":
        plan, given = batched.plan(a, b, d), dict(a=a, b=b, d=d)
        library = {"cuBLAS": lambda: torch.bmm(a, b, out=other)}
    elif work == "dual GEMM":
        wide = torch.cat([b, c], 1)
        plan, given = dual.plan(a, b, c, d), dict(a=a, b=b, c=c, d=d)
        library = {"cuBLAS and PyTorch": lambda: silu((p := a @ wide)[:, :size]) * p[:, size:]}
    else:
        plan, given = product_and_sums.plan(a, b, d, sums), dict(a=a, b=b, d=d, y=sums)
        library = {"cuBLAS and PyTorch": lambda: (torch.matmul(a, b, out=other), a.sum(1, dtype=torch.float32))}
        held["cuBLAS and PyTorch"] = other
    calls: Calls = {"program": lambda: plan.run(given), **library, **peers}
    if work in ("dual GEMM", "GEMM and sums of rows"):
        alone, product = empty(size, size), dict(a=a, b=b)
        single = gemm.plan(a, b, alone)
        calls["program, GEMM alone"] = lambda: single.run({**product, "d": alone})
    return calls, held, rows


def of_attention(length: int) -> tuple[Calls, dict[str, Any], Callable[[Any], Any]]:
    q, k, v = (drawn(TOKENS // length * HEADS, length, HEAD) for _ in range(3))
    o, third = empty(*q.shape), empty(*q.shape)
    calls: Calls = {}
    held: dict[str, Any] = {}
    for name, order in ORDERS.items():
        if name == "program, FlashAttention 2":
            out = empty(*q.shape)
        else:
            out = o
        given = dict(q=q, k=k, v=v, o=out, scale=HEAD ** -0.5)
        plan = attention.plan(**given, mapping=gk.Mapping(**order))         # type: ignore[arg-type]
        calls[name] = lambda plan=plan, given=given: plan.run(given)        # type: ignore[misc]
        held[name] = out

    def library() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*(x.view(-1, HEADS, length, HEAD) for x in (q, k, v)))

    def rows(at: Any) -> Any:
        s = q[-1][at].double() @ k[-1].double().T * HEAD ** -0.5
        return s.softmax(-1) @ v[-1].double()

    peers = of_triton("attention", *(x.view(-1, HEADS, length, HEAD) for x in (q, k, v, third)))
    calls |= {"cuDNN": library, **peers}
    return calls, {**held, **dict.fromkeys(peers, third)}, rows


def check(name: str, found: Any, wanted: Any, at: Any) -> float:
    """The error, of the largest element. Raises ValueError for a wrong result."""
    while found.dim() > 2:
        found = found[-1]
    error = float((found[at].double() - wanted).abs().max() / wanted.abs().max())
    if not error <= TOLERANCE:
        raise ValueError(f"{name}: {error} of the largest element")
    return error


def measured(work: str, size: int) -> list[dict[str, Any]]:
    """Rows of results: the first call beside each other one. Raises ValueError for a wrong result."""
    calls, held, rows = of_attention(size) if work == "attention" else of_products(work, size)
    at = torch.randint(size, (SAMPLE,), device="cuda")
    wanted, errors = rows(at), dict[str, float]()
    for name, call in list(calls.items()):
        for out in held.values():
            out.fill_(torch.nan)
        try:
            made = call()
        except Exception as error:
            if name != "Triton":
                raise
            print(f"{work} {size}: {name} cannot run: {type(error).__name__} {str(error)[:200]}", flush=True)
            del calls[name]
            continue
        if name != "program, GEMM alone":
            errors[name] = check(f"{work} {size}, {name}", held.get(name, made), wanted, at)
    taken = times(calls)
    ours, m = next(iter(taken)), BATCH * size if work == "batched GEMM" else size
    if work == "attention":
        m, flops = TOKENS // size * HEADS * size, 4 * TOKENS * HEADS * size * HEAD
        n, k = size, HEAD
    else:
        n = k = size
        flops = 2 * m * n * k * (2 if work == "dual GEMM" else 1)
    print(f"{work} {size}:", {name: round(time, 1) for name, time in taken.items()},
          f"{flops / taken[ours] / 1e6:.0f} TFLOP/s", flush=True)
    return [dict(group="cypress", work=work, dtype="float16", m=m, n=n, k=k, layout="nn", ours_us=round(taken[ours], 2),
                 peer=name, peer_us=round(time, 2), ratio=round(time / taken[ours], 4), error=errors[ours],
                 tflops=round(flops / taken[ours] / 1e6, 1), graph=True)
            for name, time in taken.items() if name != ours]


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.cypress", description=__doc__.splitlines()[0])
    made.add_argument("works", nargs="*", metavar="work", help=f"of {', '.join(WORKS)}; all if none is named")
    made.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    options = made.parse_args(arguments)
    other = next((work for work in options.works if work not in WORKS), None)
    if other is not None:
        made.error(f"{other!r} is none of {', '.join(WORKS)}")
    rows: list[dict[str, Any]] = []
    for work in options.works or WORKS:
        for size in {"attention": LENGTHS, "batched GEMM": BATCHED}.get(work, SIZES):
            rows += measured(work, size)
            report.write(report.document("cypress", rows, torch.cuda.get_device_name()),
                         report.results_path("cypress", options.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
