"""The card's own limit for the instructions of a semiring's product: a kernel that issues them on registers alone.

Every thread keeps ``CHAINS`` numbers and replaces each, again and again, by ``add(bound, mul(number, step))``: of min-plus
an addition and a minimum, the two instructions (FADD and FMNMX) that `operators.Semiring` issues for every term of a
product. All operands are in registers of the thread's own, as the product's are. The chains of a thread do not depend on
each other and every multiprocessor has 32 warps, so that neither latency nor memory is waited for: what remains is how fast
the card issues them.

A **pair** is one addition and one minimum; a product of M x N x K has M N K of them. `Limit` issues as many, rounded up to
a round of all threads (`STEPS` pairs a chain), so that its time over the product's is what the product reaches of the limit.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import freeze
from gemmkit.lang.functions import Frozen, freeze_array, freeze_scalar
from gemmkit.lang.registers import apply, each, fold, generate
from gemmkit.operators import Semiring
from gemmkit.ptx.special import block_x, thread_index
from gemmkit.runtime.arrays import ArrayInfo, current_stream, describe
from gemmkit.runtime.compile import ENTRY, cubin_of
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.launch import load

CHAINS = 8  # numbers of a thread: with 16 or more ptxas reuses no operand, and a pair takes three cycles instead of two
STEPS = 16  # pairs of a chain in one round of the loop: what the loop itself costs is 1 in 100
THREADS = 256  # of a block
BLOCKS = 4  # on a multiprocessor
STEP, BOUND = np.float32(1), np.float32(2**24)  # whole numbers, so that the result is known and exact
F4 = np.dtype(np.float32)


def chains(out: Any, first: Any, operator: Any, step: Any, bound: Any, rounds: int) -> None:
    """out[n, t] = n, and STEPS * rounds times step more; ``first`` is zero, of which the compiler knows nothing."""
    thread = block_x() * THREADS + thread_index()
    zero = first[thread]
    numbers = generate(CHAINS, start, operator, zero)
    own_step, own_bound = step + zero, bound + zero
    for _ in range(rounds):
        numbers = fold(STEPS, advance, numbers, operator, own_step, own_bound)
    each(store, numbers, out, thread)


def start(n: int, operator: Any, value: Any) -> Any:
    return operator.accumulator.type(value + n)


def advance(numbers: tuple, n: int, operator: Any, step: Any, bound: Any) -> tuple:
    return apply(one_pair, numbers, operator, step, bound)


def one_pair(number: Any, n: int, operator: Any, step: Any, bound: Any) -> Any:
    return operator.combine(bound, operator.multiply(number, step))


def store(value: Any, n: int, out: Any, thread: int) -> None:
    out[n, thread] = value


class Limit:
    """The kernel for as many pairs as a product of ``pairs`` terms has, on all of a device."""

    def __init__(self, semiring: Semiring, pairs: int, device: DeviceInfo):
        self.operator = semiring.sized(dict(M=32, N=32), F4, F4, F4)
        self.device = device
        self.blocks = device.sm_count * BLOCKS
        self.threads = self.blocks * THREADS
        self.rounds = math.ceil(pairs / (self.threads * CHAINS * STEPS))

    @property
    def pairs(self) -> int:
        """How many it issues."""
        return self.threads * CHAINS * STEPS * self.rounds

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {THREADS} threads, {CHAINS} chains each, {self.rounds * STEPS} pairs a chain"

    def expected(self, n: int) -> float:
        """What is in row ``n`` of ``out``."""
        return n + float(STEP) * STEPS * self.rounds

    def made_of(self, first: Any, n: int) -> Any:
        """What the kernel puts into row ``n`` of ``out``, for any ``first``: for hosts without it."""
        return first + self.expected(n)

    def arguments(self, out: ArrayInfo, first: ArrayInfo) -> list[Frozen]:
        """Of the kernel; ``out`` is float32 of (CHAINS, threads) and ``first`` of (threads,)."""
        scalars = map(freeze_scalar, (STEP, BOUND, self.rounds))
        return [freeze_array(out), freeze_array(first), freeze(self.operator), *scalars]

    @cached_property
    def example(self) -> tuple[ArrayInfo, ArrayInfo]:
        """Arrays to compile for, at an address that is as aligned as an allocation's."""
        some = describe(np.empty(1, F4))._replace(pointer=2**20)
        out = some._replace(shape=(CHAINS, self.threads), strides=(self.threads, 1))
        return out, some._replace(shape=(self.threads,), strides=(1,))

    def build(self) -> Any:
        """The kernel's entry in the cache."""
        return cubin_of(chains, self.arguments(*self.example), THREADS, self.device, BLOCKS)

    def bind(self, out: Any, first: Any) -> Any:
        """A call that runs it on arrays of a library, on its current stream."""
        return bound_call(self, out, first, self.blocks, THREADS)


def bound_call(limit: Any, out: Any, first: Any, blocks: int, threads: int) -> Any:
    """A call of a limit's kernel; the arrays live as long as the call."""
    infos = describe(out, "out"), describe(first, "first")
    leaves = [leaf for argument in limit.arguments(*infos) for leaf in argument.leaves]
    formats, values = [code for code, _ in leaves], [value for _, value in leaves]
    bound = load(limit.build().cubin, ENTRY).bind((blocks, 1, 1), (threads, 1, 1), 0, formats)
    library, device, producer = infos[0].library, infos[0].device, infos[0].stream

    def call(keep: Any = (out, first)) -> None:  # the kernel has their addresses: no other array may be given the memory
        bound.launch(current_stream(library, device, producer), values)

    return call
