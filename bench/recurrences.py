"""Recurrences in blocks of rows, beside torch.compile and Triton: `python -m bench.recurrences`.

| works | programs (`examples.recurrences`) |
|---|---|
| linear attention | `linear_attention`: retention, and scalar decays of each row |
| gated linear attention | `gated_linear_attention`: GLA, whose keys decay each by itself |
| state space | `state_space`: Mamba-2's, with groups of heads that share b and c |
| delta rule | `gated_delta_rule`: two kernels |

``torch.compile`` has the mathematics of the papers in batched products, whose scan over blocks is a product with decays
(Dao and Gu's ``segsum``). The delta rule has no such scan, and goes through the blocks in a loop whose body is compiled.
Triton's kernels (`bench.triton_recurrences`) go through all blocks of a head in order, with lengths that Triton's autotuner
chooses. Ours do the same with ``Mapping(splits=1)``, "in one piece"; by default blocks share a head's rows. All are captured
in CUDA graphs and timed in turns. Results are compared with the recurrence, step by step in float64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import gemmkit as gk
from bench.harness import WrongResult
from bench.turns import command, elapsed
from examples import recurrences

Call = Callable[[], Any]
HEADS, ROWS, WIDTH, BLOCK, GROUP = 16, 8192, 128, 64, 4
WORKS = "linear attention", "gated linear attention", "state space", "delta rule"
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
CALLS, TURNS = 10, 9


def drawn(work: str, dtype: Any, heads: int, rows: int, width: int) -> dict[str, Any]:
    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    torch.manual_seed(0)
    g = -torch.rand(heads, rows, device="cuda") * 0.1
    if work == "state space":
        return dict(x=normal(heads, rows, width), dt=torch.rand(heads, rows, device="cuda"),
                    a=-torch.rand(heads, device="cuda"), b=normal(heads // GROUP, rows, width, scale=width**-0.5),
                    c=normal(heads // GROUP, rows, width), d=torch.rand(heads, device="cuda"))
    q, k, v = normal(heads, rows, width), normal(heads, rows, width, scale=width**-0.5), normal(heads, rows, width)
    if work == "gated linear attention":
        g = (torch.nn.functional.logsigmoid(torch.randn(heads, rows, width, device="cuda")) / 16).to(dtype)
    if work != "delta rule":
        return dict(q=q, k=k, v=v, g=g)
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
    return dict(q=q, k=k, v=v, beta=torch.rand(heads, rows, device="cuda"), g=g)


def exact(work: str, x: dict[str, Any]) -> Any:
    """The recurrence, step by step in float64, of all heads at once."""
    x = {name: value.double() for name, value in x.items()}
    if work == "state space":
        b, c = (x[name].repeat_interleave(GROUP, 0) for name in "bc")
        q, k, v, g = c, b * x["dt"][..., None], x["x"], x["dt"] * x["a"][:, None]
    else:
        q, k, v, g = (x[name] for name in "qkvg")
    state, out = q.new_zeros(q.shape[0], k.shape[2], v.shape[2]), torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t].reshape(len(g), -1, 1).exp()
        new = v[:, t]
        if work == "delta rule":
            new = x["beta"][:, t, None] * (new - (k[:, t, None] @ state)[:, 0])
        state = state + k[:, t, :, None] * new[:, None]
        out[:, t] = (q[:, t, None] @ state)[:, 0]
    return out + x["d"][:, None, None] * x["x"] if work == "state space" else out


# -- ours, and PyTorch's ----------------------------------------------------------------------------------------------

def ours(work: str, x: dict[str, Any], out: Any, mapping: Any = None) -> Call:
    if work == "linear attention":
        return lambda: recurrences.linear_attention(*x.values(), out, mapping=mapping)
    if work == "gated linear attention":
        return lambda: recurrences.gated_linear_attention(*x.values(), out, mapping=mapping)
    if work == "state space":
        return lambda: recurrences.state_space(*x.values(), out, GROUP, mapping=mapping)
    q, k, v, beta, g = x.values()
    w, u = torch.empty_like(k), torch.empty_like(v)          # whose rounds have no shares
    return lambda: recurrences.gated_delta_rule(q, k, v, beta, g, w, u, out)


def blocks(x: Any) -> Any:
    return x.unflatten(1, (-1, BLOCK))


def decays(g: Any) -> Any:
    """(of each row of a block, between its rows): logarithms."""
    c = blocks(g).cumsum(-1)
    return c, (c[..., :, None] - c[..., None, :]).masked_fill(~torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=g.device)
                                                              .tril(), -torch.inf)


def in_blocks(q: Any, k: Any, v: Any, g: Any) -> Any:
    """The same as batched products: scores, states of blocks, their scan, and results."""
    shape, (q, k, v), (c, between) = v.shape, map(blocks, (q, k, v)), decays(g)
    total = c[..., -1]
    scores = ((q @ k.mT) * between.exp()).to(v.dtype)
    added = k.mT @ (v * (total[..., None] - c).exp()[..., None]).to(v.dtype)
    ends = total.cumsum(-1)
    kept = ((ends - total)[:, :, None] - ends[:, None]).masked_fill(
        ~torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=g.device).tril(-1), -torch.inf).exp()
    states = (kept.to(v.dtype) @ added.flatten(2)).view_as(added)
    return (scores @ v + (q @ states) * c.exp()[..., None]).to(v.dtype).reshape(shape)


def gated_in_blocks(q: Any, k: Any, v: Any, g: Any) -> Any:
    """The same of decays of each key, whose differences within a block are taken from its middle."""
    shape, (q, k, v) = v.shape, map(blocks, (q, k, v))
    c = blocks(g).float().cumsum(-2)
    total = c[..., -1:, :]
    middle = c - 0.5 * total
    scores = ((q * middle.exp()).to(q.dtype) @ (k * (-middle).exp()).to(q.dtype).mT).tril().to(v.dtype)
    added = (k * (total - c).exp()).to(v.dtype).mT @ v
    state, states = torch.zeros_like(added[:, 0], dtype=torch.float32), []
    for i in range(added.shape[1]):
        states.append(state.to(v.dtype))
        state = state * total[:, i].mT.exp() + added[:, i]
    return ((scores @ v) + (q * c.exp()).to(q.dtype) @ torch.stack(states, 1)).to(v.dtype).reshape(shape)


def state_space_in_blocks(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    b, c = (y.repeat_interleave(GROUP, 0) for y in (b, c))
    return (in_blocks(c, b, (x * dt[..., None]).to(x.dtype), dt * a[:, None]) + d[:, None, None] * x).to(x.dtype)


def delta_updates(k: Any, v: Any, beta: Any, g: Any) -> Any:
    (k, v, beta), (c, between) = map(blocks, (k, v, beta)), decays(g)
    lower = (beta[..., None] * (k @ k.mT) * between.exp()).tril(-1)
    both = torch.cat([k * (beta * c.exp())[..., None], v * beta[..., None]], -1)
    w, u = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True).to(v.dtype).split(k.shape[-1], -1)
    return c, between.exp(), w.contiguous(), u.contiguous()


def delta_step(q: Any, k: Any, w: Any, u: Any, c: Any, between: Any, state: Any) -> Any:
    past, total = state.to(q.dtype), c[:, -1:]
    new = u - w @ past
    scores = ((q @ k.mT) * between).to(q.dtype)
    out = (q @ past) * c.exp()[..., None] + scores @ new
    late = (new * (total - c).exp()[..., None]).to(q.dtype)
    return out.to(q.dtype), state * total.exp()[..., None] + (k.mT @ late).float()


def compiled(work: str, x: dict[str, Any], out: Any) -> Call:
    if work != "delta rule":
        form = dict(zip(WORKS, (in_blocks, gated_in_blocks, state_space_in_blocks)))[work]
        made = torch.compile(form, dynamic=False)
        return lambda: out.copy_(made(*x.values()))
    updates, step = torch.compile(delta_updates, dynamic=False), torch.compile(delta_step, dynamic=False)

    def call() -> None:
        made = c, between, w, u = updates(x["k"], x["v"], x["beta"], x["g"])
        del made
        state = torch.zeros(w.shape[0], w.shape[-1], u.shape[-1], device=w.device)
        q, k, results = blocks(x["q"]), blocks(x["k"]), blocks(out)
        for i in range(q.shape[1]):
            results[:, i], state = step(q[:, i], k[:, i], w[:, i], u[:, i], c[:, i], between[:, i], state)

    return call


def by_triton(work: str, x: dict[str, Any], out: Any) -> Call:
    from bench import triton_recurrences as own

    return own.call(work, x, out, GROUP)


PEERS: dict[str, Callable[..., Call]] = {"torch.compile": compiled, "Triton": by_triton}


# -- rows -------------------------------------------------------------------------------------------------------------

def captured(call: Call, count: int) -> Call:
    """So many calls as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph.replay


def error(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def rows(work: str, dtype: Any, sizes: tuple[int, int, int] = (HEADS, ROWS, WIDTH),
         peers: Mapping[str, Callable[..., Call]] = PEERS) -> list[dict[str, Any]]:
    """A row for each peer. Raises `bench.harness.WrongResult` for a result that differs from the recurrence."""
    x = drawn(work, dtype, *sizes)
    wanted, made, kind = exact(work, x), list[dict[str, Any]](), str(dtype).removeprefix("torch.")
    out = torch.empty(sizes, device="cuda", dtype=dtype)
    whole = [] if work in ("delta rule", "gated linear attention") else [("Triton", ", in one piece", gk.Mapping(splits=1))]
    for peer, more, mapping in (*((peer, "", None) for peer in peers), *(x for x in whole if x[0] in peers)):
        other, count = torch.empty_like(out), CALLS
        its_count = 1 if peer == "torch.compile" else CALLS
        replay, its = captured(ours(work, x, out, mapping), CALLS), captured(peers[peer](work, x, other), its_count)
        for poisoned, call in ((out, replay), (other, its)):
            poisoned.fill_(torch.nan)
            call()
        size, its_error = error(out, wanted), error(other, wanted)
        if not max(size, its_error) <= TOLERANCE[dtype]:
            raise WrongResult(f"{work} {kind}: errors of {size}, and of {peer} {its_error}")
        times = [(elapsed(replay, "cuda", 1) / count, elapsed(its, "cuda", 1) / its_count) for _ in range(TURNS)]
        own, theirs = (statistics.median(x) for x in zip(*times))
        made.append(dict(work=work + more, dtype=kind, m=sizes[0] * sizes[1], n=sizes[2], k=sizes[2], layout="nn",
                         ours_us=round(own, 2), peer=peer, peer_us=round(theirs, 2), ratio=round(theirs / own, 4),
                         error=size, graph=True, group=f"by {peer}"))
        print(f"{work}{more} {kind}: {own:.1f} us, {peer} {theirs:.1f} us, {theirs / own:.2f}; errors {size:.1e}, "
              f"{its_error:.1e}", flush=True)
    return made


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float16, torch.bfloat16):
        for work in options.works or WORKS:
            yield from rows(work, dtype, (HEADS, options.rows, WIDTH))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("recurrences", __doc__, measured, arguments, WORKS, add=lambda parser: parser.add_argument(
        "--rows", type=int, default=ROWS, help="of each head (fewer compile first)"))


if __name__ == "__main__":
    raise SystemExit(main())
