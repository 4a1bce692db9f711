"""Ours against a peer, timed in one run.

Why ratios, and why in one run: a data-centre GPU is limited by power, so the same kernel is 10 % faster on a
cool card than on a warm one. An absolute time says little; two kernels timed in turns, within milliseconds of
each other, see the same card. A comparison therefore goes like this:

1. Every call is made once: it compiles, loads and allocates whatever it needs.
2. Our outputs are poisoned with NaN, our captured calls run, and the outputs are compared with a float64
   reference. A wrong result is an error (`WrongResult`), never a row.
3. Launches are captured in a CUDA graph, so that short kernels do not measure the host. Each launch takes the
   next set of inputs; the sets together exceed twice the L2 (`input_sets`), so that no launch finds its
   inputs there.
4. Pairs are timed, ours and the peer's in turns, and which goes first alternates. The row has the medians of
   the times, and the median of the pairs' ratios with its spread.
5. The outputs are checked again: what was timed is what was checked.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Call = Callable[[], object]
Row = dict[str, Any]

# The keys of a row that `compare` fills in.
RESERVED = frozenset({
    "work", "dtype", "m", "n", "k", "layout", "ours_us", "peer", "peer_us", "ratio", "error",
    "spread", "tflops", "pairs", "launches", "input_sets", "graph",
})  # fmt: skip
MAX_LAUNCHES = 4096  # in one captured graph: more cost seconds of capturing and add nothing


class WrongResult(AssertionError):
    """A measured kernel computed something else than the reference."""


class Clock(Protocol):
    """How work of one library is captured and timed (`bench.backends` has those of PyTorch and CuPy)."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """Record `calls` in a graph; the result launches it on the current stream."""

    def elapsed_us(self, call: Call) -> float:
        """Time between device events around `call`, in microseconds, with the device busy before it."""

    def synchronise(self) -> None:
        """Wait for all work of the device."""


class Processor:
    """The emulator's clock: calls one by one, whose times are no measurement."""

    def capture(self, calls: Sequence[Call]) -> Call:
        return lambda: [call() for call in calls]

    def elapsed_us(self, call: Call) -> float:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e6

    def synchronise(self) -> None:
        pass


@dataclass(frozen=True)
class Work:
    """What is computed: one line of a result table.

    `layout` has a letter for A and one for B: "n" if it is stored row by row as it is multiplied (C order),
    "t" if it is the transposed view of such an array. `flops` counts floating-point operations a call (a
    multiply-add is two); numbers of several parts take `products` real multiply-adds each.
    """

    work: str
    dtype: str
    m: int
    n: int
    k: int
    layout: str = "nn"
    products: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.products * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.work} {self.dtype} {self.m}x{self.n}x{self.k} {self.layout}"


@dataclass(frozen=True)
class Summary:
    """Medians of timed pairs. `ratio` is peer / ours; `spread` is the interquartile range of the ratios."""

    ours_us: float
    peer_us: float
    ratio: float
    spread: float


def summarise(pairs: Sequence[tuple[float, float]]) -> Summary:
    """The medians of (ours, peer) times in microseconds.

    The ratio is the median of the pairs' ratios, not the ratio of the medians: the two times of a pair saw
    the same clock frequency, and that is what cancels.

    >>> summarise([(10.0, 9.0), (20.0, 18.0), (10.0, 30.0)]).ratio
    0.9
    """
    if len(pairs) < 2:
        raise ValueError(f"pairs: got {len(pairs)}, at least 2 are needed for a median with a spread")
    for ours, peer in pairs:
        if not (0.0 < ours < math.inf and 0.0 < peer < math.inf):
            raise ValueError(f"pairs: times must be positive and finite, got ({ours}, {peer})")
    ratios = [peer / ours for ours, peer in pairs]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Summary(
        ours_us=statistics.median(ours for ours, _ in pairs),
        peer_us=statistics.median(peer for _, peer in pairs),
        ratio=statistics.median(ratios),
        spread=upper - lower,
    )


def input_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """How many input sets of `bytes_per_set` exceed twice an L2 of `l2_bytes`; at least 2.

    >>> input_sets(4 * 2**20, 50 * 2**20)
    26
    """
    if bytes_per_set <= 0:
        raise ValueError(f"bytes_per_set: got {bytes_per_set}, must be positive")
    return max(2, 2 * l2_bytes // bytes_per_set + 1)


def launches(sets: int, one_launch_us: float, target_us: float) -> int:
    """How many launches a graph takes: whole rounds over the sets, about `target_us` in all, at least one."""
    rounds = math.ceil(target_us / (one_launch_us * sets))
    return sets * max(1, min(rounds, MAX_LAUNCHES // sets))


def interleave(ours: Call, peer: Call, pairs: int, clock: Clock) -> list[tuple[float, float]]:
    """Time `ours` and `peer` in turns; which goes first alternates. Microseconds for the whole of each call."""
    times = []
    for i in range(pairs):
        if i % 2 == 0:
            first = clock.elapsed_us(ours)
            times.append((first, clock.elapsed_us(peer)))
        else:
            first = clock.elapsed_us(peer)
            times.append((clock.elapsed_us(ours), first))
    return times


def compare(
    work: Work,
    ours: Sequence[Call],
    peer: Sequence[Call],
    *,
    peer_name: str,
    clock: Clock,
    poison: Call,
    error: Callable[[int], float],
    tolerance: float,
    pairs: int = 20,
    target_us: float = 2000.0,
    graph: bool = True,
    further: Row | None = None,
) -> Row:
    """Time `ours` against `peer` and return a row of a result file.

    Args:
        work: what is computed.
        ours, peer: one call for each input set, the same sets for both. `input_sets` says how many sets there
            must be.
        peer_name: how tables call the peer, such as "cuBLAS (torch 2.11)".
        clock: captures and times the calls.
        poison: fills all our outputs with NaN (with the largest value, where the type has no NaN).
        error: the relative error norm(out - ref64) / norm(ref64) of our output of input set i.
        tolerance: the largest error of a right result.
        pairs: how many pairs are timed.
        target_us: how long one timed graph should last, in microseconds.
        graph: capture the launches in a CUDA graph. False launches them one by one, which measures the host
            as well as soon as a launch takes longer than the kernel.
        further: more keys for the row.

    Raises:
        WrongResult: an output differs from the reference by more than `tolerance`, before or after the
            timing.
        ValueError: the two have different numbers of calls, or none, or `pairs` is below 2.
    """
    if not ours or len(ours) != len(peer):
        raise ValueError(f"ours, peer: need one call for each input set, got {len(ours)} and {len(peer)}")
    if pairs < 2:
        raise ValueError(f"pairs: got {pairs}, at least 2 are needed")
    if further and (taken := further.keys() & RESERVED):
        raise ValueError(f"further: the keys {sorted(taken)} are the harness's own")

    for call in (*ours, *peer):
        call()
    clock.synchronise()

    def prepare(calls: Sequence[Call], count: int) -> Call:
        rotated = [calls[i % len(calls)] for i in range(count)]
        return clock.capture(rotated) if graph else lambda: [call() for call in rotated]

    def checked(when: str) -> float:
        clock.synchronise()
        # The first and the last set: a kernel that is right on its first inputs only is caught, and a float64
        # product for each of hundreds of small sets would take longer than the measurement.
        worst = max((error(i) for i in {0, len(ours) - 1}), key=lambda e: math.inf if math.isnan(e) else e)
        if not worst <= tolerance:  # this way round, so that NaN is wrong
            raise WrongResult(
                f"{work}: relative error {worst:.3g} {when} the timing, more than {tolerance:.3g}"
            )
        return worst

    # One round each first: it shows how long a launch takes, and its outputs are checked before anything is
    # timed.
    one_round = prepare(ours, len(ours)), prepare(peer, len(peer))
    poison()
    one_round[0]()
    before = checked("before")
    fastest = min(clock.elapsed_us(run) for run in one_round) / len(ours)

    count = launches(len(ours), fastest, target_us)
    timed = one_round if count == len(ours) else (prepare(ours, count), prepare(peer, count))
    poison()
    interleave(*timed, 2, clock)  # warm-up: clocks settle
    summary = summarise([(x / count, y / count) for x, y in interleave(*timed, pairs, clock)])
    after = checked("after")

    return {
        "work": work.work,
        "dtype": work.dtype,
        "m": work.m,
        "n": work.n,
        "k": work.k,
        "layout": work.layout,
        "ours_us": summary.ours_us,
        "peer": peer_name,
        "peer_us": summary.peer_us,
        "ratio": summary.ratio,
        "error": max(before, after),
        "spread": summary.spread,
        "tflops": work.flops / summary.ours_us * 1e-6,
        "pairs": pairs,
        "launches": count,
        "input_sets": len(ours),
        "graph": graph,
        **(further or {}),
    }
