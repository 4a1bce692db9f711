"""Attention of few queries over long keys, beside PyTorch's fastest backend: `python -m bench.few_queries`.

Arrays are taken in turn from as many sets as are more than the L2 holds. All are CUDA graphs, timed in turns in one run
(`bench.turns`); results are compared with float64 before anything is timed. A row is printed for each case, with how much
of keys and values was read a second.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import gemmkit as gk
from bench.turns import error_of, times

D, TOLERANCE = 128, 2e-3
OUT_OF_L2 = 150_000_000                # bytes of all sets together
MOST_BYTES = 6_000_000_000             # of keys and values
#: By name: what PyTorch can take, and whether heads that share keys have to be written out for it.
BACKENDS = {"flash": (SDPBackend.FLASH_ATTENTION, False), "cuDNN": (SDPBackend.CUDNN_ATTENTION, False),
            "efficient": (SDPBackend.EFFICIENT_ATTENTION, True)}


class FewQueries(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int

    @property
    def nbytes(self) -> int:
        """Of keys and values, in float16."""
        return self.batch * self.kv_heads * self.keys * D * 4


def cases() -> Iterator[FewQueries]:
    yield from (FewQueries(1, heads, heads, 1, keys) for keys in (65536, 131072) for heads in (1, 2))
    for keys, (heads, kv), batch, queries in itertools.product((1024, 4096, 16384, 65536), ((32, 8), (32, 32), (64, 8)),
                                                               (1, 8, 32), (1, 4, 16)):
        case = FewQueries(batch, heads, kv, queries, keys)
        if case.nbytes <= MOST_BYTES and (queries != 4 or (keys, heads) == (4096, 32)):
            yield case


def row(case: FewQueries) -> float:
    """Print it, and return the time of PyTorch's fastest backend over ours. Raises `bench.harness.WrongResult`."""
    batch, heads, kv, queries, keys = case
    q_shape, k_shape = (batch, heads, queries, D), (batch, kv, keys, D)
    sets = [[torch.randn(*shape, device="cuda", dtype=torch.float16) for shape in (q_shape, k_shape, k_shape, q_shape)]
            for _ in range(max(1, min(24, OUT_OF_L2 // case.nbytes + 1)))]

    def over(call: Callable[..., Any]) -> Callable[[], Any]:
        turn = itertools.cycle(sets)
        return lambda: call(*next(turn))

    def by(backend: SDPBackend, is_written_out: bool) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any, _: Any) -> Any:
            if is_written_out and kv != heads:
                k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, enable_gqa=kv != heads and not is_written_out)

        return call

    calls = {"ours": over(lambda q, k, v, out: gk.attention(q, k, v, out=out))}
    for name, given in BACKENDS.items():
        try:
            by(*given)(*sets[0])
        except RuntimeError:                           # which a backend has for what it does not take
            continue
        calls[name] = over(by(*given))
    q, k, v, out = sets[0]
    gk.attention(q, k, v, out=out)
    last = [x[-1].double().repeat_interleave(heads // kv, 0) for x in (k, v)]
    exact = torch.softmax(q[-1].double() @ last[0].mT / math.sqrt(D), -1) @ last[1]
    error_of(case, out[-1], exact, TOLERANCE)
    taken = times(calls)
    best = min((name for name in taken if name != "ours"), key=taken.__getitem__)
    ratio = taken[best] / taken["ours"]
    print(f"{batch:3} x {heads:2} heads ({kv:2} of k), {queries:2} over {keys:6}: {taken['ours']:7.1f} us, "
          f"{case.nbytes / taken['ours'] / 1e6:5.2f} TB/s, {ratio:5.3f} of {best}", flush=True)
    return ratio


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m bench.few_queries", description=__doc__.splitlines()[0]).parse_args(arguments)
    print(torch.cuda.get_device_name())
    ratios = [row(case) for case in cases()]
    print(f"{len(ratios)} cases: geometric mean {statistics.geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
