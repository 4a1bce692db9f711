"""Figures 13 and 14 of paper 001 (Cypress), as programs: `python -m bench.cypress [GEMM ...]`.

| figure | program | beside |
|---|---|---|
| 13a | GEMM | cuBLAS, Triton |
| 13b | batched GEMM: four products in one launch | cuBLAS |
| 13c | dual GEMM | cuBLAS twice and PyTorch's SiLU and product, Triton; and the GEMM of the same size |
| 13d | GEMM and the sums of A's rows | cuBLAS and PyTorch's sum, Triton; and the GEMM of the same size |
| 14 | attention by FlashAttention 3's order, and by FlashAttention 2's (``ahead=False``, three warpgroups) | cuDNN, Triton |

The programs are those of `bench.derived`, Triton's kernels `bench.triton_kernels`. The paper's sizes are not in its text.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.derived import Case
from bench.turns import command

TOKENS, HEADS, HEAD = 16384, 16, 128                   # of attention: tokens of all sequences together
CASES = (*(Case("GEMM", (n, n, n), True) for n in (4096, 6144, 8192)),
         *(Case("batched GEMM", (n, n, n), True, 4) for n in (1024, 2048, 4096)),
         *(Case(work, (n, n, n), True) for work in ("dual GEMM", "GEMM and sums of rows") for n in (4096, 6144, 8192)),
         *(Case("attention", (TOKENS // length * HEADS, length, HEAD), True)
           for length in (512, 1024, 2048, 4096, 8192, 16384)))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("cypress", __doc__, lambda options: (
        row for case in CASES if case.work in (options.works or (case.work,)) for row in case.rows()),
        arguments, tuple(dict.fromkeys(case.work for case in CASES)))


if __name__ == "__main__":
    raise SystemExit(main())
