"""float16 squares forced into the multistage kernel, against the card's rate of mma.sync on registers (`tensor_limit`): rows
of `bench.experiments`. By itself `matmul` takes wgmma there; where there is none, this kernel is what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import gemmkit
from bench.experiments.experiment import Lib
from bench.experiments.tensor_limit import TensorLimit
from bench.experiments.types import Product
from bench.harness import Call
from gemmkit.layouts import RowMajor
from gemmkit.runtime.device import target
from gemmkit.tuning import sm80

F16 = np.dtype(np.float16)
SIZES = (4096, 8192)


@dataclass(frozen=True)
class Forced(Product):
    peers_kernel = "tensor limit"

    @cached_property
    def limit(self) -> TensorLimit:
        return TensorLimit(self.m * self.n * self.k, target())

    @cached_property
    def configuration(self) -> gemmkit.Config:
        """The largest tile of the kernel's list for float16."""
        one, device, layout = sm80.TABLES[F16][0], target(), RowMajor(F16)
        units: Any = sm80.operator(F16, one, device)
        return gemmkit.get_config(operator=units, global_a_layout=layout,
                                  global_b_layout=layout, global_d_layout=layout, device=device, **one.fields)

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: gemmkit.matmul(x.a, x.b, None, self.configuration, out=x.out)

    def peers(self, lib: Lib, x: Any) -> Call:
        first = lib.empty(1, self.limit.threads, "f32")[0]
        first[...] = 1
        x.chains = lib.empty(self.limit.chains, self.limit.threads, "f32")
        return lib.limit(self.limit, x.chains, first)

    def title(self, lib: Lib) -> str:
        return f"this card's rate of mma.sync on registers: {self.limit}"

    def peer_error(self, lib: Lib, x: Any) -> float:
        expected = lib.empty(self.limit.chains, self.limit.threads, "f32")
        for n in range(self.limit.chains):
            expected[n] = self.limit.expected(n)
        return float(lib.relative_error(x.chains, lib.wide(expected)))

    def build_peer(self) -> None:
        self.limit.build()


def forced() -> Iterator[Forced]:
    """The rows of the group."""
    for size in SIZES:
        yield Forced("forced", "forced", "f16", size, size, size, 0.72, 0.85)
