"""What gemmkit's own Python costs in a call that is known, on any machine: `python -m bench.calls`.

The driver and the arrays are stand-ins (`bench.stand_ins`): a launch does nothing, and an array's attributes cost little. So
these are not the times of calls, which `bench.host` measures on a GPU, but what of them is gemmkit's to save. Rows, for each
array library, in microseconds, the least of several loops:

    plan                     run(a, b, out=d), and of that: the arrays recognised, the stream, the launch; the rest is checks
    matmul                   gemmkit.matmul(a, b), and of that: the arrays' keys, the new array (without the stand-in's own
                             part), the stream, the launch; the rest is the look-up and checks
    ..., arrays in turns     the same with other addresses in each call, which have to be checked and packed
    ..., users' code         the same with an epilogue of the user's, whose code each call looks at (the guards)

and for programs, whatever the library: what deriving a plan takes, in milliseconds of the processor, and what finding one
that is kept takes, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from bench import stand_ins
from bench.experiments.programs import gemm
from bench.row_programs import layernorm
from examples.programs import decayed_attention
from gemmkit.runtime import device
from gemmkit.runtime.arrays import describe

SIZE = 64
TURNS = 8
CALLS, REPEATS = 250, 200  # loops short enough to fall between other work of a shared machine


def microseconds(call: Callable[[], object]) -> float:
    """Least time of a call, without that of a loop around it."""

    def least(call: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            times.append(time.perf_counter_ns() - start)
        return min(times) * 1e-3 / CALLS

    return least(call) - least(lambda: None)


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Least processor time of a call that takes long."""

    def once() -> float:
        start = time.process_time()
        call()
        return (time.process_time() - start) * 1e3

    return min(once() for _ in range(repeats))


def helper(x: Any) -> Any:
    return x * 2.0


def plan_rows(make: Callable[..., Any]) -> Iterator[tuple[str, float]]:
    import gemmkit

    a, b, d = (make(SIZE, SIZE) for _ in range(3))
    run = gemmkit.plan(a, b)
    match_a, match_b, _, match_out = run._match
    start, find_stream = run.start(), run._find_stream
    assert find_stream is not None
    addresses = tuple(describe(x).pointer if x is not None else 0 for x in (d, a, b, None))
    total = microseconds(lambda: run(a, b, out=d))
    parts = {
        "three arrays recognised": microseconds(lambda: (match_a(a), match_b(b), match_out(d))),
        "the stream": microseconds(lambda: find_stream()),
        "the launch": microseconds(lambda: start(stand_ins.STREAM, addresses)),
    }
    yield "plan", total
    yield from parts.items()
    yield "the rest", total - sum(parts.values())
    given = cycle([tuple(make(SIZE, SIZE) for _ in range(3)) for _ in range(TURNS)])

    def in_turns() -> None:
        a, b, d = next(given)
        run(a, b, out=d)

    yield "plan, arrays in turns", microseconds(in_turns)
    own = gemmkit.plan(a, b, epilogue=gemmkit.epilogues.Elementwise(lambda x: helper(x) * 0.5))
    yield "plan, users' code", microseconds(lambda: own(a, b, out=d))


def matmul_rows(make: Callable[..., Any]) -> Iterator[tuple[str, float]]:
    import gemmkit
    from gemmkit.plans.plan import _plans
    from gemmkit.runtime.arrays import KEYS

    a, b = (make(SIZE, SIZE) for _ in range(2))
    for _ in range(2):
        gemmkit.matmul(a, b)
    ((made, *_),) = _plans.values()
    keyed, (allocate, address_of), start, find_stream = KEYS[type(a)], made._allocate, made.start(), made._find_stream
    assert find_stream is not None
    d = allocate()
    addresses = address_of(d), keyed(a, "a")[0], keyed(b, "b")[0], 0
    dtype = d.dtype
    library = microseconds(lambda: type(d)((SIZE, SIZE), dtype))
    total = microseconds(lambda: gemmkit.matmul(a, b)) - library
    parts = {
        "keys of two arrays": microseconds(lambda: (keyed(a, "a"), keyed(b, "b"))),
        "the new array": microseconds(lambda: address_of(allocate())) - library,
        "the stream": microseconds(lambda: find_stream()),
        "the launch": microseconds(lambda: start(stand_ins.STREAM, addresses)),
    }
    yield "matmul", total
    yield from parts.items()
    yield "the rest", total - sum(parts.values())
    given = cycle([tuple(make(SIZE, SIZE) for _ in range(2)) for _ in range(TURNS)])
    yield "matmul, arrays in turns", microseconds(lambda: gemmkit.matmul(*next(given))) - library
    yield "matmul with out", microseconds(lambda: gemmkit.matmul(a, b, out=d))
    conf = gemmkit.plan(a, b, epilogue=gemmkit.epilogues.Elementwise(lambda x: helper(x) * 0.5)).config
    yield "matmul, users' code", microseconds(lambda: gemmkit.matmul(a, b, conf=conf)) - library


def program_rows() -> Iterator[str]:
    """Deriving, in milliseconds; then the look-up of a plan that is kept."""
    from gemmkit.programs.calls import plan_of_call

    half = np.float16
    x, vector = np.zeros((512, 1024), half), np.zeros(1024, half)
    q, k, v, o = (np.zeros((8, 512, 64), half) for _ in range(4))
    a, b, d = (np.zeros((512, 512), half) for _ in range(3))
    for name, program, arguments in (
        ("GEMM", gemm, (a, b, d)),
        ("layer norm", layernorm, (x, vector, vector, np.zeros_like(x), 1e-5)),
        ("attention with a decay", decayed_attention, (q, k, v, np.zeros(8, np.float32), o, 0.125)),
    ):
        yield f"{name + ', derived':44} {milliseconds(partial(program.plan, *arguments)):6.2f} ms"
        found = partial(plan_of_call, program, program.bound(arguments, {}), None)
        found()
        yield f"{name + ', kept':44} {microseconds(found):6.2f} us"


def main() -> int:
    from gemmkit.plans.launch import forget

    for name in stand_ins.LIBRARIES:
        with stand_ins.gpu(), stand_ins.library(name) as make:
            forget()
            print(f"arrays like those of {name}; host time of gemmkit's own part, in microseconds")
            for row, us in (*plan_rows(make), *matmul_rows(make)):
                is_whole = row.startswith(("plan", "matmul"))
                print(f"{'' if is_whole else '    of that, '}{row:{44 if is_whole else 32}} {us:6.2f}")
            forget()
            print()
    with device.assumed(device.H100):
        print("programs, of an H100", *program_rows(), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
