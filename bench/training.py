"""Models of three layers, compiled by `torch.compile`, against the same of ``torch.nn.Linear``:
`python -m bench.training --out bench/results/training.json`.

| what | is |
|---|---|
| forward | without a gradient |
| step | forward and backward; the gradients are put in place of the last ones |
| step in a graph | the same, `mode="reduce-overhead"` (CUDA graphs) |

Both models have the same parameters and take turns in one run; a time is by events over `CALLS` calls, and of all turns the
median. Losses and gradients are compared before.

Beside these stands the loss of a head of many words (group "head", bfloat16): `gemmkit.torch.linear_cross_entropy` beside
what ``torch.compile`` makes of ``cross_entropy(linear(x, weight), labels)``, with the most memory that a step takes beyond
what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import gemmkit.torch
from bench.turns import command, error_of, rows, times_of_events

ROWS, WIDTH, LAYERS = 8192, 4096, 3
CALLS, TURNS, WARM = 10, 9, 4


def models(width: int, device: str, dtype: Any) -> tuple[Any, Any]:
    """By gemmkit, and by PyTorch: linear, GELU, linear, GELU, linear."""
    torch.manual_seed(0)
    last = LAYERS - 1
    ours = torch.nn.Sequential(*(gemmkit.torch.Linear(width, width, activation="gelu" if n < last else None, device=device,
                                                      dtype=dtype) for n in range(LAYERS)))
    parts: list[Any] = []
    for n, layer in enumerate(ours):
        parts.append(torch.nn.Linear(width, width, device=device, dtype=dtype))
        parts[-1].load_state_dict(layer.state_dict())
        if n < last:
            parts.append(torch.nn.GELU())
    return ours, torch.nn.Sequential(*parts)


def forward(model: Any, x: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return model(x)

    return call


def step(model: Any, x: Any) -> Callable[[], Any]:
    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()       # what a graph returned is not looked at again
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    return call


def of_step(model: Any, x: Any) -> tuple[float, list[Any]]:
    """The loss, and copies of the gradients: the next run of a CUDA graph may write over them."""
    return step(model, x)().item(), [parameter.grad.clone() for parameter in model.parameters()]


def compared(ours: Any, theirs: Any, x: Any) -> float:
    """The largest difference of a gradient, over that gradient's largest element. Raises ValueError above 2 %."""
    (one, mine), (other, their) = (of_step(model, x) for model in (ours, theirs))
    worst = abs(one - other) / abs(other)
    for p, q in zip(mine, their, strict=True):
        worst = max(worst, float((p - q).abs().max() / q.abs().max()))
    if not worst <= 0.02:
        raise ValueError(f"losses {one} and {other}, or gradients, differ by {worst:.3f} of their largest")
    return worst


# -- the loss of a head -----------------------------------------------------------------------------------------------

HEAD, HEAD_CALLS = (8192, 128256, 4096), 3               # rows, words and hidden size


def of_head(loss: Callable[..., Any], x: Any, weight: Any, labels: Any, backward: bool) -> Callable[[], Any]:
    def call() -> Any:
        if not backward:
            with torch.no_grad():
                return loss(x, weight, labels)
        x.grad = weight.grad = None
        found = loss(x, weight, labels)
        found.backward()
        return found

    return call


def plain_head(x: Any, weight: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), labels)


def taken_by(call: Callable[[], Any], *leaves: Any) -> float:
    """MiB, gradients of the leaves among them."""
    call()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def heads(sizes: tuple[int, int, int] = HEAD) -> Iterator[dict[str, Any]]:
    M, V, H = sizes
    torch.manual_seed(0)
    x = torch.randn(M, H, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(V, H, device="cuda", dtype=torch.bfloat16) / H**0.5).requires_grad_()
    labels = torch.randint(0, V, (M,), device="cuda")
    losses = {"ours": gemmkit.torch.linear_cross_entropy, "torch.compile": torch.compile(plain_head, fullgraph=True)}
    for work, backward in (("loss", False), ("loss and gradients", True)):
        calls = {name: of_head(loss, x, weight, labels, backward) for name, loss in losses.items()}
        found = {}
        for name, call in calls.items():
            found[name] = [call().detach(), *((x.grad, weight.grad) if backward else ())]
        error = max(error_of(f"{work} of a head", mine, their, 0.02) for mine, their in zip(*found.values()))
        memory = {name: taken_by(call, x, weight) for name, call in calls.items()}
        taken = times_of_events(calls, "cuda", HEAD_CALLS, TURNS, 1)
        flops = (3 if backward else 1) * 2.0 * M * V * H
        yield from (dict(made, dtype="bfloat16", mebibytes={name: round(of) for name, of in memory.items()})
                    for made in rows("head", work, (M, V, H), taken, error, flops=flops))


def row(work: str, ours: Callable[[], Any], theirs: Callable[[], Any], error: float) -> dict[str, Any]:
    taken = times_of_events({"ours": ours, "torch.nn.Linear": theirs}, "cuda", CALLS, TURNS, WARM)
    (made,) = rows("training", work, (ROWS, WIDTH, WIDTH), taken, error, graph=work.endswith("graph"))
    return made


def measured(options: object) -> Iterator[dict[str, Any]]:
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.float16)
    for work, kind, mode in (("forward", forward, None), ("step", step, None), ("step in a graph", step, "reduce-overhead")):
        pair = models(WIDTH, "cuda", torch.float16)
        compiled = [torch.compile(model, fullgraph=True, mode=mode) for model in pair]
        error = 0.0 if kind is forward else compared(compiled[0], compiled[1], x)
        yield row(work, kind(compiled[0], x), kind(compiled[1], x), error)
        torch._dynamo.reset()
    yield from heads()


def main(arguments: Sequence[str] | None = None) -> int:
    return command("training", __doc__, measured, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
