"""`torch.compile(backend="gemmkit")` beside Inductor: `python -m bench.compiled --out bench/results/compiled.json`.

| work | what is timed |
|---|---|
| layer | a decoder layer as Llama's (RMS norms, rotary positions, 32 heads over 8, SiLU), 4096 / 14336 |
| mlp | x + W2 gelu(W1 x + b1) + b2, 4096 / 16384 |
| gather | relu(table[index] W + b), as DLRM has it: rows of 128 of a table of 1000000 |
| after | one product and what follows it: the rows behind the rule that says which products are taken (`RULE`) |

Numbers are bfloat16. "train" is a forward and a backward pass. A row is gemmkit's backend over the faster of Inductor's
modes "default" and "max-autotune-no-cudagraphs" (of "after": over "default"). All run in CUDA graphs and take turns in one
run. Results, and gradients of "train", are first compared with eager PyTorch's in float32.

First calls compile. ``--jobs 12`` has processes compile all works side by side first, into caches on the disk.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import gemmkit.torch
from bench import report
from bench.models import TINY, Call, Sizes, captured, in_turns

TURNS = 5


def rms(x: torch.Tensor, gain: torch.Tensor) -> Any:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Layer(torch.nn.Module):
    """A layer of Llama's."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes, size = sizes, sizes.hidden // sizes.heads
        outputs = dict(q=sizes.hidden, k=size * sizes.kv_heads, v=size * sizes.kv_heads, o=sizes.hidden, gate=sizes.inner,
                       up=sizes.inner, down=sizes.hidden)
        for name, count in outputs.items():
            setattr(self, name, torch.nn.Linear(sizes.inner if name == "down" else sizes.hidden, count, bias=False))
        self.before, self.between = (torch.nn.Parameter(torch.ones(sizes.hidden)) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        batch, rows, hidden = x.shape
        h = rms(x, self.before)
        q, k, v = (f(h).view(batch, rows, -1, hidden // self.sizes.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, rows, hidden))
        h = rms(x, self.between)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class MLP(torch.nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class Work(NamedTuple):
    """What is compiled and called: ``sizes`` are those of its largest product."""

    name: str
    function: Any
    inputs: tuple[torch.Tensor, ...]
    sizes: tuple[int, int, int]
    trains: bool = False

    @property
    def leaves(self) -> list[torch.Tensor]:
        own = list(self.function.parameters()) if isinstance(self.function, torch.nn.Module) else []
        return own + [x for x in self.inputs if x.requires_grad]


#: What follows a product x @ w of "after".
AFTER: dict[str, Callable[..., Any]] = {
    "plain": lambda x, w, v, b, r, s: F.linear(x, w),
    "bias": lambda x, w, v, b, r, s: F.linear(x, w, b),
    "gelu": lambda x, w, v, b, r, s: F.gelu(F.linear(x, w, b)),
    "residual": lambda x, w, v, b, r, s: F.linear(x, w) + r,
    "gate": lambda x, w, v, b, r, s: F.linear(x, w) * torch.sigmoid(r),
    "two": lambda x, w, v, b, r, s: F.linear(x, w) * r + s,
    "glu": lambda x, w, v, b, r, s: F.silu(F.linear(x, w)) * F.linear(x, v),
}
#: Rows, and (K, N), of "after".
RULE = (1, 16, 64, 256, 2048, 8192), ((4096, 4096), (4096, 14336), (14336, 4096))


def drawn(*shape: int, device: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=device) * scale).bfloat16()


def works(device: str, tiny: bool) -> dict[str, Callable[[], Work]]:
    """Each work by its name."""
    sizes = TINY if tiny else Sizes()
    found: dict[str, Callable[[], Work]] = {}

    def layer(name: str, batch: int, rows: int, trains: bool) -> Work:
        module = Layer(sizes).to(device).bfloat16()
        angles = torch.outer(torch.arange(rows), 10000.0 ** -torch.linspace(0, 1, sizes.hidden // sizes.heads // 2))
        cos, sin = (f(angles).repeat(1, 2).to(device).bfloat16() for f in (torch.cos, torch.sin))
        x = drawn(batch, rows, sizes.hidden, device=device).requires_grad_(trains)
        return Work(name, module, (x, cos, sin), (batch * rows, sizes.inner, sizes.hidden), trains)

    def mlp(name: str, rows: int, trains: bool) -> Work:
        width, inner = (64, 128) if tiny else (4096, 16384)
        x = drawn(rows, width, device=device).requires_grad_(trains)
        return Work(name, MLP(width, inner).to(device).bfloat16(), (x,), (rows, inner, width), trains)

    def gather(name: str, rows: int, outputs: int) -> Work:
        table = drawn(100 if tiny else 1_000_000, 128, device=device)
        index = torch.randint(0, len(table), (rows,), device=device)
        w, b = drawn(outputs, 128, device=device, scale=0.1), drawn(outputs, device=device)
        return Work(name, lambda t, i, w, b: F.relu(F.linear(F.embedding(i, t), w, b)), (table, index, w, b),
                    (rows, outputs, 128))

    def after(name: str, what: str, m: int, k: int, n: int) -> Work:
        x, w, v = drawn(m, k, device=device), *(drawn(n, k, device=device, scale=k ** -0.5) for _ in range(2))
        b, r, s = drawn(n, device=device), *(drawn(m, n, device=device) for _ in range(2))
        return Work(name, AFTER[what], (x, w, v, b, r, s), (m, n, k))

    for batch, rows in ((2, 16),) if tiny else ((1, 2048), (4, 512)):
        for trains in (False, True):
            name = f"layer {batch} x {rows}{', train' if trains else ''}"
            found[name] = lambda name=name, args=(batch, rows, trains): layer(name, *args)   # type: ignore[misc]
    for trains in (False, True):
        name = f"mlp{', train' if trains else ''}"
        found[name] = lambda name=name, trains=trains: mlp(name, 32 if tiny else 4096, trains)  # type: ignore[misc]
    for outputs in (64,) if tiny else (256, 1024):
        name = f"gather {outputs}"
        found[name] = lambda name=name, n=outputs: gather(name, 32 if tiny else 65536, n)    # type: ignore[misc]
    rows_of, shapes = ((8,), ((64, 32),)) if tiny else RULE
    for what in AFTER:
        for k, n in shapes:
            for m in rows_of:
                name = f"after {what} {m} x {n} x {k}"
                found[name] = lambda name=name, args=(what, m, k, n): after(name, *args)     # type: ignore[misc]
    return dict(sorted(found.items(), key=lambda item: "train" in item[0]))


def called(function: Any, work: Work) -> Call:
    """A forward pass, or a forward and a backward one, whose results are (result, gradients)."""
    leaves = work.leaves
    ones = None

    def step() -> Any:
        nonlocal ones
        if not work.trains:
            with torch.no_grad():
                return (function(*work.inputs),)
        y = function(*work.inputs)
        ones = torch.linspace(-1, 1, y.shape[-1], device=y.device).to(y.dtype).expand_as(y) if ones is None else ones
        return (y.detach(), *torch.autograd.grad(y, leaves, ones))

    return step


def differences(found: Sequence[Any], wanted: Sequence[Any]) -> list[float]:
    """Of each result, the root of the mean square of what is wrong over that of what is right."""
    return [float((x.float() - y).square().mean().sqrt() / y.square().mean().sqrt()) for x, y in zip(found, wanted)]


def measured(work: Work, options: Any) -> dict[str, Any]:
    """The row of a work; raises ValueError for a wrong result."""
    kinds = {"inductor": dict(backend="inductor"), "gemmkit": dict(backend="gemmkit")}
    if work.name.startswith("after"):
        kinds["gemmkit"]["options"] = {"gemmkit.take": "all"}                  # type: ignore[assignment]
    elif options.autotune:
        kinds["inductor max-autotune"] = dict(backend="inductor", mode="max-autotune-no-cudagraphs")
    wide = work._replace(inputs=tuple(x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x
                                      for x in work.inputs))
    if isinstance(work.function, torch.nn.Module):
        import copy

        wide = wide._replace(function=copy.deepcopy(work.function).float())
    exact = called(wide.function, wide)()
    eager = differences(called(work.function, work)(), exact)
    calls: dict[str, Call] = {}
    worst = 0.0
    for name, how in kinds.items():
        torch._dynamo.reset()
        step = called(torch.compile(work.function, dynamic=False, fullgraph=True, **how), work)
        off = differences(step(), exact)
        if any(not x <= 2 * y + 0.004 for x, y in zip(off, eager)):
            raise ValueError(f"{name} is off by {off}, and eager PyTorch by {eager}")
        worst = max(worst, *off) if name == "gemmkit" else worst
        step()
        calls[name] = step if options.compile or work.inputs[0].device.type == "cpu" else captured(step)
    if options.compile:
        return {}
    us = in_turns(calls, options.turns)
    peer = min((name for name in us if name != "gemmkit"), key=us.__getitem__)
    m, n, k = work.sizes
    row = dict(work=work.name, dtype="bfloat16", m=m, n=n, k=k, layout="nt", ours_us=round(us["gemmkit"], 2), peer=peer,
               peer_us=round(us[peer], 2), ratio=round(us[peer] / us["gemmkit"], 4), error=worst, graph=True,
               group=work.name.split()[0].strip(","), us={name: round(t, 2) for name, t in us.items()})
    print(f"{work.name:36} {us['gemmkit']:10.1f} us, {peer} {us[peer]:10.1f} us, ratio {row['ratio']:.3f}", flush=True)
    return row


def compile_all(names: Sequence[str], arguments: Sequence[str], jobs: int, limit: float) -> None:
    """Have processes compile works, into caches on the disk; those that take longer than ``limit`` are ended."""
    running: list[Any] = []
    begun = time.monotonic()
    for n in range(jobs):
        own = [name for name in names[n::jobs]]
        if own:
            pattern = "|".join(f"^{re.escape(name)}$" for name in own)
            command = sys.executable, "-m", "bench.compiled", *arguments, "--compile", "--only", pattern
            running.append(subprocess.Popen(command))
    for process in running:
        try:
            process.wait(max(0.1, begun + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.compiled", description=__doc__.splitlines()[0])
    made.add_argument("--out", help="result file or folder (default: $OUT, else bench/results)")
    made.add_argument("--only", default="", metavar="REGEX", help="works whose name matches")
    made.add_argument("--no-autotune", dest="autotune", action="store_false", help="without Inductor's max-autotune")
    made.add_argument("--tiny", action="store_true", help="tiny sizes, for a trial")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a trial in the emulator")
    made.add_argument("--turns", type=int, default=TURNS)
    made.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    made.add_argument("--compile", action="store_true", help="compile and compare alone")
    made.add_argument("--limit", type=float, default=3000.0, metavar="SECONDS", help="no work begins later")
    options = made.parse_args(arguments)
    begun, rows, status = time.monotonic(), [], 0
    chosen = {name: make for name, make in works(options.device, options.tiny).items() if re.search(options.only, name)}
    if options.jobs:
        passed = ["--device", options.device, *["--tiny"] * options.tiny, *["--no-autotune"] * (not options.autotune),
                  "--limit", str(options.limit * 0.6)]
        compile_all(list(chosen), passed, options.jobs, options.limit * 0.6)
        print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    with gemmkit.emulate() if options.device == "cpu" else torch.cuda.device(0):
        for name, make in chosen.items():
            if time.monotonic() - begun > options.limit:
                print(f"{name}: not measured, the time is over", flush=True)
                status = 1
                continue
            torch.manual_seed(0)
            try:
                rows.append(measured(make(), options))
            except (ValueError, RuntimeError, TypeError, torch._dynamo.exc.TorchDynamoException) as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
                status = 1
            if not options.compile:
                device = torch.cuda.get_device_name() if options.device == "cuda" else "emulator"
                report.write(report.document("compiled", rows, device), report.results_path("compiled", options.out))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
