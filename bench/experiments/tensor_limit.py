"""The card's own rate of mma.sync: a kernel that issues products of float16 fragments on registers alone.

Every warp has four fragments of A, four of B and their sixteen sums of float32, which is as a product's warp has them, and
adds each product of two fragments to its sum again and again. The sums do not depend on each other. `TensorLimit` issues as
many products as an M x N x K product needs, rounded up to a round of all warps, so that its time over the product's is the
share of the card's rate that the product reaches.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from bench.experiments.limit import bound_call
from gemmkit.components import freeze
from gemmkit.lang.aggregates import fill
from gemmkit.lang.functions import Frozen, freeze_array, freeze_scalar
from gemmkit.lang.registers import registers
from gemmkit.operators import MMAOp
from gemmkit.ptx.special import block_x, thread_index
from gemmkit.runtime.arrays import ArrayInfo, describe
from gemmkit.runtime.compile import cubin_of
from gemmkit.runtime.device import DeviceInfo

SIDE = 4  # fragments of A, and of B
THREADS = 256  # of a block: eight warps, two for each tensor core
OPERATOR = MMAOp()
F4 = np.dtype(np.float32)


def products(out: Any, first: Any, operator: Any, rounds: int) -> None:
    """out[n, t] = n, and K for each product; ``first`` is one, of which the compiler knows nothing."""
    thread = block_x() * THREADS + thread_index()
    one = first[thread]
    a, b = registers(operator.fragment_a, SIDE), registers(operator.fragment_b, SIDE)
    sums = registers(operator.fragment_c, SIDE, SIDE)
    for i in range(SIDE):
        a[i] = fill(operator.fragment_a.dtype, operator.fragment_a.count, one)
        b[i] = fill(operator.fragment_b.dtype, operator.fragment_b.count, one)
        for j in range(SIDE):
            sums[i, j] = fill(operator.fragment_c.dtype, operator.fragment_c.count, i * SIDE + j)
    for _ in range(rounds):
        for i in range(SIDE):
            for j in range(SIDE):
                sums[i, j] = operator.mma(a[i], b[j], sums[i, j])
    for i in range(SIDE):
        for j in range(SIDE):
            out[i * SIDE + j, thread] = sums[i, j][0]


class TensorLimit:
    """The kernel for as many products of fragments as ``terms`` multiply-adds take, on all of a device."""

    chains = SIDE * SIDE

    def __init__(self, terms: int, device: DeviceInfo):
        self.device, self.blocks = device, device.sm_count
        self.threads = self.blocks * THREADS
        each = math.prod(OPERATOR.shape)
        self.rounds = math.ceil(terms / (self.threads // 32 * self.chains * each))

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {THREADS} threads, {self.chains} sums each, {self.rounds} products a sum"

    def expected(self, n: int) -> float:
        """What is in row ``n`` of ``out``."""
        return n + float(OPERATOR.K) * self.rounds

    def made_of(self, first: Any, n: int) -> Any:
        """What the kernel puts into row ``n`` of ``out``, for any ``first``: for hosts without it."""
        return n + first * first * (self.expected(n) - n)

    def arguments(self, out: ArrayInfo, first: ArrayInfo) -> list[Frozen]:
        """Of the kernel; ``out`` is float32 of (chains, threads) and ``first`` of (threads,)."""
        return [freeze_array(out), freeze_array(first), freeze(OPERATOR), freeze_scalar(self.rounds)]

    @cached_property
    def example(self) -> tuple[ArrayInfo, ArrayInfo]:
        """Arrays to compile for, at an address that is as aligned as an allocation's."""
        some = describe(np.empty(1, F4))._replace(pointer=2**20)
        out = some._replace(shape=(self.chains, self.threads), strides=(self.threads, 1))
        return out, some._replace(shape=(self.threads,), strides=(1,))

    def build(self) -> Any:
        """The kernel's entry in the cache."""
        return cubin_of(products, self.arguments(*self.example), THREADS, self.device, 1)

    def bind(self, out: Any, first: Any) -> Any:
        """A call that runs it on arrays of a library, on its current stream."""
        return bound_call(self, out, first, self.blocks, THREADS)


__all__ = ["TensorLimit"]
