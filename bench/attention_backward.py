"""The gradients of attention, beside PyTorch's: `python -m bench.attention_backward`.

| works | beside |
|---|---|
| plain, causal | cuDNN's backward pass, through ``scaled_dot_product_attention``; FlashAttention 2's, through the same; |
| | FlashAttention 4's, where the package flash-attn-4 is installed |
| alibi, soft cap, window, grouped | FlexAttention's, by ``torch.compile`` (`bench.torch_attention`) |

Each peer is beside both forms of gemmkit's: the default, whose gradients are the same bits every time, and
``deterministic=False`` ("in any order"), which is what these peers do. All are ``torch.autograd.grad`` of q, k and v of a
call that is kept, timed in turns by events in one run: of these sizes the device takes longer than the host. Gradients are
compared with the peer's before; a causal row counts half of the products. With ``--device cpu`` small cases run in the
emulator, beside PyTorch's own mathematics: the times are no measurement.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

import gemmkit as gk
import gemmkit.torch
from bench.experiments.attention import CAP, WINDOW, Attention
from bench.torch_attention import by_flex
from bench.turns import command, error_of, times_of_events
from bench.turns import rows as rows_of

PRODUCTS = 5                           # of a backward pass: S, dP, dQ, dK, dV
TOLERANCE = 8e-3                       # of two float16 gradients, of the largest element
BY_PYTORCH, BY_FLEX = ("plain", "causal"), ("alibi", "soft cap", "window")
CALLS, TURNS, BEFORE = 5, 9, 2
ANY_ORDER = "in any order"


class BackwardCase(NamedTuple):
    work: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    head_dim: int

    @property
    def name(self) -> str:
        shared = f" ({self.kv_heads} of k)" if self.kv_heads != self.heads else ""
        return f"{self.work}: {self.batch} x {self.heads} heads{shared}, {self.rows} rows"

    @property
    def experiment(self) -> Attention:
        """The case as `bench.torch_attention` takes it. FlexAttention takes shared heads by the same function."""
        made = Attention("backward", "shared heads" if self.work == "grouped" else self.work, "f16",
                         self.batch * self.heads * self.rows, self.rows, self.head_dim, batch=self.batch, heads=self.heads)
        assert self.work != "grouped" or made.kv_heads == self.kv_heads
        return made


CASES = (*(BackwardCase(work, 4, 16, 16, 4096, head_dim) for head_dim in (128, 64) for work in BY_PYTORCH),
         BackwardCase("causal", 2, 16, 16, 16384, 128), BackwardCase("causal", 16, 16, 16, 1024, 128),
         *(BackwardCase(work, 4, 16, 16, 4096, head_dim) for head_dim in (128, 64) for work in BY_FLEX),
         BackwardCase("grouped", 4, 32, 4, 4096, 128))
SMALL = tuple(BackwardCase(work, 1, 8 if work == "grouped" else 2, 1 if work == "grouped" else 2, 12, 16)
              for work in ("causal", *BY_FLEX, "grouped"))


# -- calls ------------------------------------------------------------------------------------------------------------

def ours(case: BackwardCase, q: Any, k: Any, v: Any, deterministic: bool = True) -> Any:
    """The result, which autograd has recorded."""
    masks, slopes = gk.masks, torch.from_numpy(case.experiment.slopes).to(q.device)
    rules: dict[str, dict[str, Any]] = {
        "causal": {"mask": masks.Causal()}, "alibi": {"score": masks.ALiBi(slopes)},
        "soft cap": {"score": masks.SoftCap(CAP)}, "window": {"mask": masks.Window(WINDOW)}}
    return gk.torch.attention(q, k, v, deterministic=deterministic, **rules.get(case.work, {}))


def by_backend(backend: str, case: BackwardCase, q: Any, k: Any, v: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.work == "causal")


def by_flash_attention_4(case: BackwardCase, q: Any, k: Any, v: Any) -> Any:
    """Of views: its heads stand behind rows."""
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.work == "causal")
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


def by_flex_attention(case: BackwardCase, q: Any, k: Any, v: Any) -> Any:
    return by_flex(case.experiment, recorded=True)(q, k, v)


def by_formula(case: BackwardCase, q: Any, k: Any, v: Any) -> Any:
    """In float32, without anything of FlexAttention's."""
    s = q.float() @ k.float().repeat_interleave(case.heads // case.kv_heads, 1).mT * case.head_dim**-0.5
    m, n = torch.arange(case.rows, device=q.device)[:, None], torch.arange(case.rows, device=q.device)
    if case.work == "alibi":
        s = s - torch.from_numpy(case.experiment.slopes).to(q.device)[:, None, None] * (m - n)
    if case.work == "soft cap":
        s = CAP * torch.tanh(s / CAP)
    hidden = {"causal": n > m, "window": (n > m) | (n < m - WINDOW)}.get(case.work)
    s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
    return (s.softmax(-1) @ v.float().repeat_interleave(case.heads // case.kv_heads, 1)).half()


Forward = Callable[[BackwardCase, Any, Any, Any], Any]


def peers(case: BackwardCase, device: str) -> dict[str, Forward]:
    if device == "cpu":
        return {"formula": by_formula}
    if case.work in BY_PYTORCH:
        found: dict[str, Forward] = {"cuDNN": partial(by_backend, "CUDNN_ATTENTION"),
                                     "FlashAttention 2": partial(by_backend, "FLASH_ATTENTION")}
        with suppress(ImportError):
            importlib.import_module("flash_attn.cute")
            found["FlashAttention 4"] = by_flash_attention_4
        return found
    return {"FlexAttention": by_flex_attention}


# -- rows -------------------------------------------------------------------------------------------------------------

def rows(case: BackwardCase, device: str, calls: int = CALLS, turns: int = TURNS) -> list[dict[str, Any]]:
    """Two rows for each peer, of both forms. Raises `bench.harness.WrongResult` where gradients differ."""
    shapes = [(case.batch, heads, case.rows, case.head_dim)
              for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    torch.manual_seed(0)
    *leaves, grad = (torch.randn(shape, device=device, dtype=torch.float16) for shape in shapes)
    q, k, v = (x.requires_grad_() for x in leaves)
    timed: dict[str, Callable[[], Any]] = {}
    given: dict[str, Forward] = {"ours": ours, ANY_ORDER: partial(ours, deterministic=False), **peers(case, device)}
    for name, forward in given.items():
        result = forward(case, q, k, v)
        timed[name] = partial(torch.autograd.grad, result, (q, k, v), grad, retain_graph=True)
    found = {name: call() for name, call in timed.items()}
    times = times_of_events(timed, device, calls, turns, BEFORE)
    products = PRODUCTS * (0.5 if case.work == "causal" else 1)
    flops = 2 * case.batch * case.heads * case.rows**2 * case.head_dim * products
    group = "by PyTorch" if case.work in BY_PYTORCH else "by FlexAttention"
    made: list[dict[str, Any]] = []
    for name, more in (("ours", ""), (ANY_ORDER, f", {ANY_ORDER}")):
        errors = {peer: max(error_of(f"{case.name}{more}, gradients beside {peer}'s", x, y, TOLERANCE)
                            for x, y in zip(found[name], found[peer])) for peer in list(timed)[2:]}
        taken = {name: times[name], **{peer: times[peer] for peer in errors}}
        made += rows_of(f"{group}{more}", case.name, (case.batch * case.heads * case.rows, case.rows, case.head_dim), taken,
                        errors, flops=flops, graph=False)
    return made


def measured(options: Any) -> Iterator[dict[str, Any]]:
    for case in SMALL if options.device == "cpu" else CASES:
        if case.work in (options.only or case.work).split(","):
            yield from rows(case, options.device, *((1, 1) if options.device == "cpu" else ()))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("attention_backward", __doc__, measured, arguments, on_cpu=True, add=lambda parser: parser.add_argument(
        "--only", default="", help="works, with commas: plain,causal"))


if __name__ == "__main__":
    raise SystemExit(main())
