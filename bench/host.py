"""What a call costs on the host: `python -m bench.host`.

Rows (one problem, small enough that the device always keeps up):

    plan          run(a, b, out=d) of a planned product; the peer is the library's product with out=. `driver_us` is what
                  the driver's function alone takes for the same launch, called through ctypes: nothing can take less
    matmul        gemmkit.matmul(a, b), everything looked up; the peer is the library's product that allocates
    matmul, in turn
                  products of 8 shapes, one after the other: more than are recognised by the arrays of the last calls alone
    attention, softmax, rmsnorm, bias and relu, einsum
                  calls of PyTorch tensors that come again, outputs allocated; the peer is PyTorch's own function (of a
                  product with a bias and ReLU: ``relu(addmm(...))``, two calls)
    torch.matmul, torch.Linear
                  `gemmkit.torch`'s operator and layer (a bias and GELU), without a gradient and with one that is recorded;
                  the peer is PyTorch's product or layers
    program, another number, a new length
                  a call of a program with 4 tensors (attention) that comes again, that has another scale each time, and
                  the first of each of 200 lengths, whose kernel is there (`derivations`: how often passes ran); the peer
                  is the fastest of PyTorch's backends of attention
    first call    a second process's first product, with the kernels that the first compiled on disk; the peer
                  is that first process; in first_calls.json. `compiles` and `peer_compiles` count the kernels
                  that each compiled; the time is that of the first product alone, with the libraries imported, the
                  device's context made, and all packages in bytecode.
    plan, users' code; matmul, a conf with users' code
                  the same with an epilogue of the user's, a helper and a constant, which every call looks at again;
                  the peer is the same plan when it does not (`added_us` is the difference)

Host times are medians of batches between synchronisations. A batch is shorter than the driver's launch queue
(about a thousand launches), so that no launch ever waits for room in it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import backends, report
from bench.first_call import WORKS
from bench.harness import Call, Row, WrongResult

SIZE = 64  # M = N = K
DTYPE = "f16"
TOLERANCE = 1e-3
BATCH = 500  # launches between two synchronisations: under the launch queue's length


def host_us(call: Call, synchronise: Call, calls: int = 2000, batch: int = BATCH, repeats: int = 5) -> float:
    """Median host time of `call` in microseconds, over `repeats` loops of `calls` calls.

    Raises:
        ValueError: `batch` does not divide `calls`.
    """
    if batch <= 0 or calls <= 0 or calls % batch:
        raise ValueError(f"calls, batch: {batch} must divide {calls}")
    for _ in range(batch):
        call()
    times = []
    for _ in range(repeats * (calls // batch)):
        synchronise()
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        times.append((time.perf_counter_ns() - start) * 1e-3 / batch)
    synchronise()
    return statistics.median(times)


def row(work: str, ours_us: float, peer: str, peer_us: float, error: float, **further: Any) -> Row:
    """A row of the result file, for a result that was checked.

    Raises:
        WrongResult: the error is too large, or NaN.
    """
    if not error <= TOLERANCE:
        raise WrongResult(f"{work}: relative error {error:.3g}, more than {TOLERANCE:.3g}")
    shape = {"dtype": DTYPE, "m": SIZE, "n": SIZE, "k": SIZE, "layout": "nn"}
    times = {"ours_us": ours_us, "peer": peer, "peer_us": peer_us, "ratio": peer_us / ours_us}
    return {"work": work, **shape, **times, "error": error, "graph": False, "group": "host", **further}


Wanted = Callable[[str], bool]  # of a work


def calls(backend: backends.Backend, wanted: Wanted) -> list[Row]:
    """The rows of cached calls with the arrays of one library."""
    import gemmkit

    if not any(map(wanted, ("plan", "matmul", "matmul, in turn"))):
        return []

    a, b = (backend.normal(SIZE, SIZE, DTYPE, seed) for seed in (0, 1))
    d, e = (backend.empty(SIZE, SIZE, DTYPE) for _ in range(2))
    reference = backend.reference(a, b)
    run = gemmkit.plan(a, b, None, None)

    backend.poison(d)
    run(a, b, out=d)
    planned = backend.relative_error(d, reference)
    derived = backend.relative_error(gemmkit.matmul(a, b), reference)

    many = [(backend.normal(SIZE + 8 * n, SIZE, DTYPE, n), b) for n in range(TURNS)]
    ours_in_turn, peers_in_turn = itertools.cycle(many), itertools.cycle(many)
    pairs: list[tuple[str, Callable[[], object], Callable[[], object], float]] = [
        ("plan", lambda: run(a, b, out=d), lambda: backend.matmul(a, b, e), planned),
        ("matmul", lambda: gemmkit.matmul(a, b), lambda: a @ b, derived),
        ("matmul, in turn", lambda: gemmkit.matmul(*next(ours_in_turn)),
         lambda: operator.matmul(*next(peers_in_turn)), derived),
    ]
    rows = []
    for work, ours, peer, error in pairs:
        if not wanted(work):
            continue
        ours_us, peer_us = host_us(ours, backend.synchronise), host_us(peer, backend.synchronise)
        further = {"driver_us": host_us(driver_alone(run), backend.synchronise)} if work == "plan" else {}
        rows.append(row(f"{work} ({backend.name})", ours_us, backend.peer_name(), peer_us, error, **further))
    return rows


def driver_alone(run: Any) -> Callable[[], object]:
    """The last launch of a plan, once more: the driver's function and nothing around it."""
    bound = run._compiled.launchable.bind()
    _, at_config, pointers, *_ = bound.frames[-1]
    function = ctypes.c_void_p(bound.function)
    return lambda: bound.entry(at_config, function, pointers, None)


def doors(backend: backends.Backend, wanted: Wanted) -> list[Row]:
    """The rows of functions and layers, of PyTorch's tensors."""
    import torch
    from torch.nn import functional

    import gemmkit
    import gemmkit.torch
    from gemmkit.epilogues import Bias, ReLU

    a, b = (backend.normal(SIZE, SIZE, DTYPE, seed) for seed in (0, 1))
    q, k, v = (backend.normal(2 * SIZE, SIZE, DTYPE, seed).reshape(1, 2, SIZE, SIZE) for seed in (2, 3, 4))
    gamma, bias = (backend.normal(1, SIZE, DTYPE, seed)[0] for seed in (5, 6))
    w = b.clone().requires_grad_()
    ours = gemmkit.torch.Linear(SIZE, SIZE, activation="gelu", device=a.device, dtype=a.dtype)
    theirs = torch.nn.Linear(SIZE, SIZE, device=a.device, dtype=a.dtype)
    theirs.load_state_dict(ours.state_dict())
    works: list[tuple[str, Callable[[], Any], Callable[[], Any], bool]] = [
        ("attention", lambda: gemmkit.attention(q, k, v), lambda: functional.scaled_dot_product_attention(q, k, v), False),
        ("softmax", lambda: gemmkit.softmax(a), lambda: torch.softmax(a, -1), False),
        ("rmsnorm", lambda: gemmkit.rmsnorm(a, gamma, eps=1e-6),
         lambda: functional.rms_norm(a, (SIZE,), gamma, 1e-6), False),
        ("bias and relu", lambda: gemmkit.matmul(a, b, epilogue=Bias(bias) | ReLU()),
         lambda: torch.relu(torch.addmm(bias, a, b)), False),
        ("einsum", lambda: gemmkit.einsum("km,nk->mn", a, b), lambda: torch.einsum("km,nk->mn", a, b), False),
        ("torch.matmul", lambda: gemmkit.torch.matmul(a, b), lambda: torch.matmul(a, b), False),
        ("torch.matmul, recorded", lambda: gemmkit.torch.matmul(a, w), lambda: torch.matmul(a, w), True),
        ("torch.Linear, gelu", lambda: ours(a), lambda: functional.gelu(theirs(a)), False),
        ("torch.Linear, gelu, recorded", lambda: ours(a), lambda: functional.gelu(theirs(a)), True),
    ]
    rows = []
    for work, own, peer, records in works:
        if not wanted(work):
            continue
        with torch.set_grad_enabled(records):
            error = backend.relative_error(own().detach().reshape(-1, SIZE), peer().detach().double().reshape(-1, SIZE))
            ours_us, peer_us = host_us(own, backend.synchronise), host_us(peer, backend.synchronise)
        rows.append(row(work, ours_us, f"torch {torch.__version__}", peer_us, error))
    return rows


def programs(backend: backends.Backend) -> list[Row]:
    """The rows of a program's calls: attention of 4 tensors and a scale, out given. The peer is PyTorch's attention."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import gemmkit
    from gemmkit import programs as gp
    from gemmkit.programs.calls import derivations

    @gemmkit.program
    def attention(q: Any, k: Any, v: Any, o: Any, scale: float) -> None:
        for h, m in gp.parallel(q.count, q.rows):
            best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
            for n in gp.sequential(k.rows):
                s = gp.where(lambda row, key: key <= row, scale * (q[h, m] @ k[h, n].T), -math.inf)
                top = gp.maximum(best, s.max(axis=1))
                p, shrink = gp.exp(s - top), gp.exp(best - top)
                total[:] = total * shrink + p.sum(axis=1)
                out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
                best[:] = top
            o[h, m] = out / total

    def heads(length: int) -> tuple[Any, ...]:
        q, k, v = (backend.normal(2 * length, SIZE, DTYPE, seed).reshape(2, length, SIZE) for seed in (2, 3, 4))
        return q, k, v, torch.empty_like(q)

    scale, lengths = SIZE**-0.5, range(256, 256 + LENGTHS)
    of_length = {length: heads(length) for length in lengths}
    given = of_length[lengths[0]]
    attention(*given, scale)
    q, k, v, _ = given
    exact = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale, is_causal=True)
    error = backend.relative_error(given[3].reshape(-1, SIZE), exact.reshape(-1, SIZE))
    floats = itertools.cycle([scale + 1e-6 * n for n in range(2000)])

    def kernels() -> int:
        """How often the passes have made one."""
        return sum(len(of.kernels) for of in derivations.values() if of.program is attention)

    def peer(x: tuple[Any, ...]) -> Any:
        q, k, v = (each.unsqueeze(0) for each in x[:3])                     # its kernels take four dimensions
        return functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)

    def each(call: Callable[[Any], object]) -> float:
        """The median of the first call of each length."""
        times = []
        for length in lengths[1:]:
            backend.synchronise()
            start = time.perf_counter_ns()
            call(of_length[length])
            times.append((time.perf_counter_ns() - start) * 1e-3)
        return statistics.median(times)

    before = kernels()
    ours = host_us(lambda: attention(*given, scale), backend.synchronise)
    other = host_us(lambda: attention(*given, next(floats)), backend.synchronise)
    new = each(lambda x: attention(*x, scale))
    derived = kernels() - before
    known, first = {}, {}
    for which in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(which):                               # cuDNN makes a plan for each length: 64 ms
            name = f"torch {torch.__version__} {which.name.partition('_')[0].lower()}"
            known[name], first[name] = host_us(lambda: peer(given), backend.synchronise), each(peer)
    fastest, of_first = min(known, key=known.__getitem__), min(first, key=first.__getitem__)
    return [row("program", ours, fastest, known[fastest], error),
            row("program, another number", other, fastest, known[fastest], error),
            row("program, a new length", new, of_first, first[of_first], error, derivations=derived)]


SCALE = 2.0
LENGTHS = 200
TURNS = 8  # shapes of matmul, in turn


def helper(x: Any) -> Any:
    return x * SCALE


def looking_again(backend: backends.Backend) -> list[Row]:
    """What it costs that a plan, and `matmul` with a conf, look whether the components' code is what it was."""
    import gemmkit
    from gemmkit.plans.plan import _plans

    a, b = (backend.normal(SIZE, SIZE, DTYPE, seed) for seed in (0, 1))
    d = backend.empty(SIZE, SIZE, DTYPE)
    reference = backend.reference(a, b)
    run = gemmkit.plan(a, b, epilogue=gemmkit.epilogues.Elementwise(lambda x: helper(x) * 0.5))
    conf, before = run.config, set(_plans)
    gemmkit.matmul(a, b, conf=conf)
    (remembered,) = [_plans[key][0] for key in _plans if key not in before]
    rows = []
    works: list[tuple[str, Any, Callable[[], object]]] = [
        ("plan, users' code", run, lambda: run(a, b, out=d)),
        ("matmul, a conf with users' code", remembered, lambda: gemmkit.matmul(a, b, conf=conf)),
    ]
    for work, plan, call in works:
        backend.poison(d)
        run(a, b, out=d)
        error = backend.relative_error(d, reference)
        looks, times = plan.stands, []
        for stands in (looks, None) * 3:                                  # in turns: the host's clock wanders
            plan.stands = stands
            times.append(host_us(call, backend.synchronise))
        plan.stands = looks
        ours, peer = min(times[::2]), min(times[1::2])
        peer_name = "the same, its code not looked at"
        rows.append(row(f"{work} ({backend.name})", ours, peer_name, peer, error, added_us=ours - peer))
    return rows


def child(work: str, cache: str, bytecode: str) -> dict[str, Any]:
    """What `bench.first_call` reports in a process of its own, with its compiled kernels kept in `cache`, and Python's
    bytecode in `bytecode`.

    Raises:
        RuntimeError: the process failed; with what it wrote.
    """
    command = [sys.executable, "-m", "bench.first_call", work]
    environment = {**os.environ, "GEMMKIT_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_calls() -> Iterator[Row]:
    """The rows of first calls. Packages have their bytecode, as pip leaves them: processes that are not timed write it."""
    with tempfile.TemporaryDirectory(prefix="gemmkit-bench-") as bytecode:
        with ThreadPoolExecutor(len(WORKS)) as pool:
            list(pool.map(lambda work: cold_and_warm(work, bytecode), WORKS))
        for work in WORKS:
            yield first_call(work, bytecode)


def cold_and_warm(work: str, bytecode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of two processes with one fresh folder of kernels."""
    with tempfile.TemporaryDirectory(prefix="gemmkit-bench-") as cache:
        return child(work, cache, bytecode), child(work, cache, bytecode)


def first_call(work: str, bytecode: str) -> Row:
    """The row of a second process's first call.

    Raises:
        RuntimeError: the first process compiled nothing (then it measured nothing), or the second one
            compiled.
    """
    cold, warm = cold_and_warm(work, bytecode)
    if cold["compiles"] == 0:
        raise RuntimeError("the first process compiled nothing: its cache folder was not fresh")
    if warm["compiles"] != 0:
        raise RuntimeError(f"the second process compiled {warm['compiles']} kernels that were on disk")
    return row(
        f"first call, {work}",
        warm["first_call_s"] * 1e6,
        "the same with no kernel on disk",
        cold["first_call_s"] * 1e6,
        max(cold["error"], warm["error"]),
        compiles=warm["compiles"],
        peer_compiles=cold["compiles"],
        import_s=warm["import_s"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host", description="What a call costs on the host."
    )
    parser.add_argument(
        "--backends", help="array libraries, separated by commas (default: all that are installed)"
    )
    parser.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    parser.add_argument("works", nargs="*", metavar="work", help="what is measured, by the beginning of its name, such as "
                        "attention or program (default: all); a table is printed, and nothing is written without --out")
    parser.add_argument("--no-first-calls", action="store_true", help="calls that are known alone")
    options = parser.parse_args(arguments)

    found = options.backends.split(",") if options.backends else backends.installed()
    chosen = [backends.choose(name) for name in found] or [backends.choose()]

    def wanted(work: str) -> bool:
        return not options.works or work.startswith(tuple(options.works))

    rows = [each for backend in chosen for each in calls(backend, wanted)]
    rows += [each for backend in chosen if wanted("users' code") for each in looking_again(backend)]
    of_torch = [backend for backend in chosen if backend.name == "torch"]
    rows += [each for backend in of_torch for each in doors(backend, wanted)]
    rows += [each for backend in of_torch if wanted("program") for each in programs(backend)]
    if options.works and not options.out:
        print(report.table(report.document("host", rows, chosen[0].device())))
        return 0
    path = report.results_path("host", options.out)
    of_files = [(path, rows)]
    if "torch" in found and not options.no_first_calls and not options.works:
        of_files.append((path.with_name("first_calls.json"), list(first_calls())))
    for file, each in of_files:
        content = report.document(file.stem, each, chosen[0].device())
        report.write(content, file)
        print(f"\n{file}\n{report.table(content)}")
    for made in (row for _, each in of_files[1:] for row in each):
        warm, cold = made["ours_us"] * 1e-6, made["peer_us"] * 1e-6
        print(f"{made['work']}: {warm:.3f} s and {made['compiles']} kernels compiled")
        print(f"{made['peer']}: {cold:.3f} s and {made['peer_compiles']} kernels compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
