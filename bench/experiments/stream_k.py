"""Stream-K against the default mapping, each against cuBLAS in the same run: rows of `bench.experiments` (group "streamk").

Sizes are those whose last wave of tiles is nearly empty on 132 multiprocessors, by the model. Each has a row as
`gemmkit.matmul` chooses, and one for each number of waves streamed, on the tile that the model takes for a stream. Of
float16 all rows are of the multistage kernel but the first, which is wgmma's. Nothing here has been measured yet: what wins
goes to `gemmkit.tuning.model.STREAMING`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gemmkit
from bench.experiments.algebras import ComplexProduct
from bench.experiments.experiment import Experiment, Lib
from bench.experiments.types import Product
from bench.harness import Call
from gemmkit.layouts import Interleaved, RowMajor
from gemmkit.operators import Algebra
from gemmkit.runtime.device import target
from gemmkit.tuning import sm80

DTYPES = {"f16": "f2", "f32": "f4", "f64": "f8", "complex128": "c16"}
SIZES = {
    "f64": (1152, 1536, 1664, 2176, 3072), "complex128": (896, 1152, 1536, 1664), "f32": (1152, 1536, 2176, 3072),
    "f16": (1536, 2176, 3072),
}  # fmt: skip


@functools.cache
def configuration(kind: str, m: int, n: int, k: int, waves: int) -> gemmkit.Config:
    """The tile with the least modelled time of those that leave registers for merging, streamed."""
    dtype, device = np.dtype(DTYPES[kind]), target()
    tiles = [one.on(device) for one in sm80.TABLES[dtype] if one.merges]
    best = min(tiles, key=lambda one: one.streamed((m, n, k), 1, 1, device.sm_count))
    units: Any = sm80.operator(dtype, best, device)
    layout: Any = Interleaved(dtype) if isinstance(units, Algebra) else RowMajor(dtype)
    return gemmkit.get_config(operator=units, global_a_layout=layout, global_b_layout=layout, global_d_layout=layout,
                              splits=gemmkit.kernels.StreamK(waves=waves), gemm_shape=dict(M=m, N=n, K=k), device=device,
                              **best.fields)


@dataclass(frozen=True)
class StreamedProduct(Product):
    """Two matrices, row by row; 0 waves are the default mapping."""

    waves: int = 0

    def ours(self, lib: Lib, x: Any) -> Call:
        if not self.waves:
            return super().ours(lib, x)
        conf = configuration(self.kind, self.m, self.n, self.k, self.waves)
        return lambda: gemmkit.matmul(x.a, x.b, None, conf, out=x.out)


@dataclass(frozen=True)
class StreamedComplex(ComplexProduct):
    """The same of complex128."""

    waves: int = 0

    def ours(self, lib: Lib, x: Any) -> Call:
        if not self.waves:
            return super().ours(lib, x)
        conf = configuration("complex128", self.m, self.n, self.k, self.waves)
        a, b, out = map(lib.complex_view, (x.a, x.b, x.out))
        return lambda: gemmkit.matmul(a, b, None, conf, out=out)


def stream_k() -> Iterator[Experiment]:
    """All rows of the group."""
    for kind, sizes in SIZES.items():
        for size in sizes:
            for waves, work in enumerate(("default", "stream-K, one wave", "stream-K, two waves")):
                if kind == "complex128":
                    yield StreamedComplex("streamk", f"complex128 {work}", "f64", size, size, size, waves=waves)
                else:
                    one = StreamedProduct("streamk", work, kind, size, size, size)
                    yield replace(one, waves=waves)
