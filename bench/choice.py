"""What `gemmkit.matmul` chooses by itself, against the mappings that it could have chosen: `python -m bench.choice`.

    python -m bench.choice --out FILE                  100 random products, 14 candidates each: some ten minutes on 16 cores
    python -m bench.choice --count 20 --candidates 40  fewer products, more of a sweep
    python -m bench.choice --prepare only              compile the kernels (no GPU needed), measure nothing

Products are drawn evenly on a logarithmic scale from 16 to 16384, of f16, f32 and f64 in all orders; a third each are
multiples of 64, of 8, and any. (bf16 takes the mappings and the machine code of f16.) Candidates are those of
`gemmkit.tune`, of all kernel families, in its order. Each is checked against float64 and timed in turns with the
default; the fastest three are timed again, since the first of many is the luckiest, too. A row's ``ratio`` is the
best candidate's time by the default's: 1 where the default is the best, less where it is not. ``tried`` has all of
them. What cannot be timed is said, and is no row.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gemmkit
from bench import hopper, report, verdicts
from bench.experiments.random_shapes import drawn_size
from bench.experiments.types import ORDERS, Product
from bench.harness import Call, input_sets, interleave, summarise
from bench.prepare import HostArrays, recorded
from gemmkit.lang.errors import ConfigError
from gemmkit.plans.ahead import KernelToCompile, compiled
from gemmkit.plans.compiled import Compiled
from gemmkit.plans.problem import resolve
from gemmkit.runtime.arrays import describe, describe_all
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate, candidates

SEED, COUNT, CANDIDATES = 29, 100, 14
LEAST, LARGEST = 16, 16384
KINDS = {"f16": 5, "f32": 3, "f64": 2}  # how often of ten
MOST = {"f16": 3e11, "f32": 3e10, "f64": 3e10}  # multiply-adds, so that a launch takes milliseconds at most
MOST_BYTES = 2**30  # of an input set
SETS = 8  # of inputs at most, so that large products do not find theirs in the L2
GRAPH_US = 400.0  # that a timed graph takes, about
PAIRS, FINALISTS, FINAL_PAIRS = 5, 3, 15


def drawn(count: int = COUNT, seed: int = SEED) -> Iterator[Product]:
    """``count`` products, the same for a seed."""
    draw = random.Random(seed)
    made = 0
    while made < count:
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        m, n, k = (drawn_size(draw, LEAST, LARGEST) for _ in range(3))
        order = draw.choice(ORDERS)
        one = Product("choice", f"{made + 1:03}", kind, m, n, k, order=order)
        if m * n * k <= MOST[kind] and one.input_bytes + 8 * m * n <= MOST_BYTES:
            made += 1
            yield one


@dataclass(frozen=True)
class Way:
    """A mapping of a product: ``candidate`` is None for the default."""

    candidate: Candidate | None
    config: Any
    launchable: Any

    @property
    def name(self) -> str:
        return "default" if self.candidate is None else self.candidate.name


def ways(product: Product, most: int) -> list[Way]:
    """The default, and ``most`` candidates that are legal and not the default again."""
    host = HostArrays()
    x = product.operands(host, 0)
    with store.unread():
        default = recorded(lambda: gemmkit.matmul(x.a, x.b, out=x.out))[0]
    found = [Way(None, default.problem.config, default.launchable)]
    call = default.problem
    seen = set() if call.swap_ab else {(call.config.mapping, call.config.operator)}
    with gemmkit.emulate(mapping="device"):
        infos = describe_all(x.a, x.b, None, x.out)
        out = describe(x.out, "out")
        a, b = (
            (call.config.global_b_layout, call.config.global_a_layout)
            if call.swap_ab
            else (call.config.global_a_layout, call.config.global_b_layout)
        )
        for candidate in candidates(a, b, None, (product.m, product.n, product.k), call.device, 1, (infos[0], infos[1])):
            if len(found) > most:
                break
            try:
                tried = resolve(*infos, None, {}, candidate)
            except (ConfigError, ValueError, TypeError):
                continue  # it is none for this product
            key = tried.config.mapping, tried.config.operator
            if key in seen:
                continue
            seen.add(key)
            found.append(Way(candidate, tried.config, Compiled(tried, tried.seen_out(out)).launchable))
    return found


def prepared(listed: list[list[Way]], jobs: int | None, until: float) -> set[tuple]:
    """Compile what they need, the defaults first, until a moment; the kernels that there are."""
    kernels: dict[tuple, KernelToCompile] = {}
    for rank in range(max(map(len, listed))):
        for of in listed:
            for way in of[rank : rank + 1]:
                kernels.setdefault(way.launchable.code_key, KernelToCompile(way.launchable))
    start, there = time.monotonic(), set()
    for made in compiled(list(kernels.values()), jobs):
        if made.error is None:
            there.add(made.kernel.launchable.code_key)
        else:
            print(f"CANNOT: {made.error}"[:200], flush=True)
        if time.monotonic() > until:
            break
    print(f"{len(there)} of {len(kernels)} kernels in {time.monotonic() - start:.0f} s", flush=True)
    return there


class Timed:
    """One product's input sets on a device, and what calls take on them."""

    def __init__(self, lib: Any, product: Product):
        self.lib, self.product = lib, product
        count = min(SETS, input_sets(product.input_bytes, lib.l2_bytes()))
        self.sets = [product.operands(lib, i) for i in range(count)]

    def calls(self, way: Way) -> list[Call]:
        """A call for each input set."""
        x = self.sets[0]
        plan = (
            gemmkit.plan(x.a, x.b, out=x.out)
            if way.candidate is None
            else gemmkit.plan(x.a, x.b, out=x.out, conf=way.config)
        )
        return [partial(plan, x.a, x.b, out=x.out) for x in self.sets]

    def checked(self, calls: Sequence[Call]) -> None:
        """Raises ValueError where a result is wrong."""
        for x in self.sets:
            self.lib.poison(x.out)
        for call in calls:
            call()
        self.lib.synchronise()
        error = self.product.error(self.lib, self.sets[-1])
        if not error <= self.product.tolerance:
            raise ValueError(f"wrong: its error is {error:.2e}")

    def graph(self, calls: Sequence[Call], microseconds: float) -> tuple[Call, int]:
        """The calls in turns in a graph of about so many microseconds."""
        count = max(1, min(64, math.ceil(GRAPH_US / max(1.0, microseconds))))
        return self.lib.capture([calls[i % len(calls)] for i in range(count)]), count

    def roughly(self, calls: Sequence[Call]) -> float:
        graph = self.lib.capture([calls[i % len(calls)] for i in range(4)])
        return float(self.lib.elapsed_us(graph)) / 4


def row(lib: Any, product: Product, listed: Sequence[Way]) -> dict[str, Any]:
    """The row of a product, from the ways whose kernels are there."""
    on = Timed(lib, product)
    calls = on.calls(listed[0])
    on.checked(calls)
    default, count = on.graph(calls, on.roughly(calls))
    tried: dict[int, dict[str, Any]] = {}
    graphs: dict[int, tuple[Call, int]] = {}

    def against(n: int, pairs: int) -> None:
        graph, launches = graphs[n]
        times = [(theirs / count, mine / launches) for mine, theirs in interleave(graph, default, pairs, lib)]
        found = summarise(times)
        tried[n].update(us=round(found.peer_us, 2), ratio=round(found.ratio, 4), default_us=round(found.ours_us, 2))

    for n, way in enumerate(listed[1:], 1):
        assert way.candidate is not None
        tried[n] = dict(name=way.name, mapping=way.candidate.plain())
        try:
            mine = on.calls(way)
            on.checked(mine)
            graphs[n] = on.graph(mine, on.roughly(mine))
            against(n, PAIRS)
        except (ConfigError, ValueError, TypeError) as error:
            tried[n]["error"] = f"{type(error).__name__}: {error}"[:200]
    fastest = sorted((n for n in tried if "ratio" in tried[n]), key=lambda n: tried[n]["ratio"])[:FINALISTS]
    for n in fastest:
        against(n, FINAL_PAIRS)
    best = min((tried[n] for n in fastest), key=lambda of: of["ratio"], default=None)
    peers_calls = [product.peers(lib, x) for x in on.sets]
    peer, launches = on.graph(peers_calls, on.roughly(peers_calls))
    found = summarise([(mine / count, theirs / launches) for mine, theirs in interleave(default, peer, PAIRS, lib)])
    ratio = 1.0 if best is None else min(1.0, best["ratio"])
    return dict(
        work=product.work,
        group=product.group,
        dtype=product.kind,
        m=product.m,
        n=product.n,
        k=product.k,
        layout=product.layout,
        ours_us=round(found.ours_us, 2),
        peer="the best mapping tried",
        peer_us=round(found.ours_us * ratio, 2),
        ratio=round(ratio, 4),
        error=product.error(lib, on.sets[-1]),
        graph=True,
        best="default" if best is None or best["ratio"] >= 1 else best["name"],
        cublas_us=round(found.peer_us, 2),
        tried=list(tried.values()),
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each dtype and one for all."""
    lines = []
    for kind in (*KINDS, None):
        found = [row["ratio"] for row in rows if kind in (None, row["dtype"])]
        if found:
            lines.append(
                f"{kind or 'all':4} {len(found):4} products: the default reaches {verdicts.geometric_mean(found):.3f} "
                f"of the best (geometric mean), {min(found):.3f} at worst"
            )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.choice", description="The default choice against a sweep.")
    made.add_argument("--count", type=int, default=COUNT, help=f"products (default: {COUNT})")
    made.add_argument("--seed", type=int, default=SEED)
    made.add_argument("--candidates", type=int, default=CANDIDATES, help=f"of each product (default: {CANDIDATES})")
    made.add_argument("--jobs", type=int, help="kernels that are compiled at a time (default: one a processor)")
    made.add_argument("--limit", type=float, default=3600.0, help="seconds in all; half of them may go to compiling")
    made.add_argument("--prepare", choices=("also", "only"), default="also")
    made.add_argument("--out", type=Path, default=Path("bench/results/choice.json"))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    start = time.monotonic()
    products = list(drawn(options.count, options.seed))
    listed = [ways(product, options.candidates) for product in products]
    print(
        f"{len(products)} products, {sum(map(len, listed))} mappings, found in {time.monotonic() - start:.0f} s", flush=True
    )
    there = prepared(listed, options.jobs, start + options.limit / 2)
    if options.prepare == "only":
        return 0
    lib = hopper.peers()
    rows: list[dict[str, Any]] = []
    missing = 0
    for product, found in zip(products, listed, strict=True):
        ready = [way for way in found if way.launchable.code_key in there]
        if time.monotonic() - start > options.limit or not ready or ready[0].candidate is not None:
            missing += 1
            continue
        try:
            rows.append(row(lib, product, ready))
        except Exception as error:
            missing += 1
            print(f"{product}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        last = rows[-1]
        print(
            f"{product}: {last['ours_us']:9.1f} us, {last['ratio']:.3f} of the best ({last['best']}), "
            f"{last['cublas_us'] / last['ours_us']:.2f} of cuBLAS",
            flush=True,
        )
        report.write(report.document("choice", rows, lib.device()), options.out)
    print(summary(rows))
    print(f"{missing} not measured" if missing else "all measured")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
