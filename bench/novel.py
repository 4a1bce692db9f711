"""Kernels that no library has (`examples.programs`) beside what torch.compile makes of the same: `python -m bench.novel`.

| work | ours | beside |
|---|---|---|
| decayed attention | `examples.programs.decayed_attention` | torch.compile of products, mask and softmax; FlexAttention |
| gated chain | `examples.programs.gated_chain` | torch.compile of both products and what is between |

All are CUDA graphs, timed in turns in one run (`bench.turns`), after their results are compared. The compiled functions
store the product between; FlexAttention stores none, and does not normalise in each round, which leads to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import silu

from bench.derived import drawn, empty
from bench.turns import Calls, command, error_of, times
from bench.turns import rows as rows_of
from examples.programs import decayed_attention, gated_chain

HEADS, ROWS, D = 16, 4096, 128
CHAIN = 16384, 8192                    # rows of A; of B and C
TOLERANCE = 1e-2


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made


def attention() -> tuple[Calls, Any]:
    q, k, v = (drawn(HEADS, ROWS, D) for _ in range(3))
    decay, o, scale = torch.linspace(0.01, 0.5, HEADS, device="cuda"), empty(HEADS, ROWS, D), D ** -0.5
    given = dict(q=q, k=k, v=v, decay=decay, o=o, scale=scale)
    plan = decayed_attention.plan(**given)
    places = torch.arange(ROWS, device="cuda")
    distance = places[:, None] - places

    def written(q: Any, k: Any, v: Any) -> Any:
        s = (scale * (q @ k.transpose(1, 2))).float() - decay[:, None, None] * distance
        return s.masked_fill(distance < 0, -math.inf).softmax(-1).half() @ v

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s - decay[h] * (m - n)

    def causal(b: Any, h: Any, m: Any, n: Any) -> Any:
        return n <= m

    blocks = create_block_mask(causal, None, None, ROWS, ROWS, device="cuda")
    one, flex = compiled(written), compiled(flex_attention)
    return {"ours": lambda: plan.run(given), "torch.compile": lambda: one(q, k, v),
            "FlexAttention": lambda: flex(q[None], k[None], v[None], score_mod=score, block_mask=blocks, scale=scale)[0]}, o


def chain() -> tuple[Calls, Any]:
    (m, n), d = CHAIN, empty(CHAIN[0], D)
    a, b, c, gate = drawn(m, D), drawn(n, D, scale=0.1), drawn(n, D, scale=0.1), torch.rand(m, device="cuda")
    given = dict(a=a, b=b, gate=gate, c=c, d=d)
    plan = gated_chain.plan(**given)

    def written(a: Any, b: Any, gate: Any, c: Any) -> Any:
        return (silu((a @ b.T).float()) * gate[:, None]).half() @ c

    one = compiled(written)
    return {"ours": lambda: plan.run(given), "torch.compile": lambda: one(a, b, gate, c)}, d


def rows(work: str, made: tuple[Calls, Any], sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Of results. Raises `bench.harness.WrongResult` where a peer has another result."""
    calls, found = made
    calls["ours"]()
    with torch.no_grad():
        errors = {name: error_of(f"{work}, {name}", call(), found, TOLERANCE) for name, call in list(calls.items())[1:]}
        return rows_of("novel", work, sizes, times(calls), errors)


def measured(options: object) -> Iterator[dict[str, Any]]:
    yield from rows("decayed attention", attention(), (HEADS * ROWS, ROWS, D))
    yield from rows("gated chain", chain(), (*CHAIN, D))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("novel", __doc__, measured, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
