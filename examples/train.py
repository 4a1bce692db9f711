"""A language model of letters that trains by PyTorch and by gemmkit, side by side: `python -m examples.train`.

The text is what scikit-learn says of its data sets. Two models begin with the same weights and see the same batches; the
second one is given to `gk.torch.accelerate`, and its attention is `gk.torch.scaled_dot_product_attention`. Losses are shown
beside each other, and must agree at every step. `--out` keeps the weights, which `python -m examples.serve` reads, and a
picture of the losses. In the emulator a few steps of a tiny model are computed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import gemmkit as gk
import gemmkit.torch

from . import machine

SEED = 11
WANTED = 0.03                          # by how much of itself a loss may differ from PyTorch's


class Sizes(NamedTuple):
    width: int = 512
    heads: int = 8
    layers: int = 6
    length: int = 256
    batch: int = 32
    steps: int = 300


TINY = Sizes(32, 2, 1, 16, 2, 3)


def text() -> str:
    """What scikit-learn says of its data sets, some 30,000 letters."""
    from sklearn import datasets

    names = "breast_cancer", "diabetes", "digits", "iris", "wine"
    return "".join(getattr(datasets, f"load_{name}")().DESCR for name in names)


class MLP(nn.Module):
    """A SwiGLU, of the names that transformers has."""

    def __init__(self, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads, self.attend = sizes.heads, F.scaled_dot_product_attention
        self.before, self.between = (nn.RMSNorm(sizes.width, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out, self.mlp = nn.Linear(sizes.width, sizes.width, bias=False), MLP(sizes.width)

    def forward(self, x: torch.Tensor, attend: Any = None) -> Any:
        """x: (batch, letters, width). ``attend``: the attention, None for the layer's own."""
        b, n, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        a = self.attend(q, k, v, is_causal=True) if attend is None else attend(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, width))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self, letters: int, sizes: Sizes):
        super().__init__()
        self.words, self.places = nn.Embedding(letters, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width, eps=1e-6), nn.Linear(sizes.width, letters, bias=False)

    def forward(self, ids: torch.Tensor, attend: Any = None, at: Any = 0) -> Any:
        """ids: (batch, letters), of which the first is at the place ``at``. ``attend(q, k, v, layer)``: the attention."""
        x = self.words(ids) + self.places(at + torch.arange(ids.shape[1], device=ids.device))
        for n, layer in enumerate(self.layers):
            x = layer(x, None if attend is None else partial(attend, layer=n))
        return self.head(self.norm(x))


def accelerated(model: Model) -> Model:
    """The model, by gemmkit."""
    print(gk.torch.accelerate(model))
    for layer in model.layers:
        layer.attend = gk.torch.scaled_dot_product_attention
    return model


def batches(ids: torch.Tensor, sizes: Sizes, device: str) -> Iterator[tuple[Any, Any]]:
    drawn = torch.Generator().manual_seed(SEED)
    for _ in range(sizes.steps):
        begins = torch.randint(0, len(ids) - sizes.length - 1, (sizes.batch,), generator=drawn)
        rows = torch.stack([ids[begin:begin + sizes.length + 1] for begin in begins.tolist()]).to(device)
        yield rows[:, :-1], rows[:, 1:]


def trained(models: dict[str, Model], ids: torch.Tensor, sizes: Sizes,
            device: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Losses by step, and tokens a second, of each model."""
    optimisers = {name: torch.optim.AdamW(model.parameters(), lr=3e-4) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    spent = dict.fromkeys(models, 0.0)
    for step, (x, wanted) in enumerate(batches(ids, sizes, device), 1):
        for name, model in models.items():
            begun = time.perf_counter()
            loss = F.cross_entropy(model(x).float().flatten(0, 1), wanted.flatten())
            loss.backward()
            optimisers[name].step()
            optimisers[name].zero_grad(set_to_none=True)
            losses[name].append(float(loss.detach()))              # which waits for the GPU
            spent[name] += (time.perf_counter() - begun) * (step > sizes.steps // 3)     # when all is compiled
        bar = "#" * (30 * step // sizes.steps)
        ours, theirs = losses["gemmkit"][-1], losses["PyTorch"][-1]
        print(f"\r  {bar:30} {step} of {sizes.steps}: loss {ours:.4f}, PyTorch's {theirs:.4f}", end="", flush=True)
    print()
    count = (sizes.steps - sizes.steps // 3) * sizes.batch * sizes.length
    return losses, {name: count / taken for name, taken in spent.items()}


def pictured(losses: dict[str, list[float]], path: Path) -> None:
    """The losses, as a picture."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 3.5))
    drawing = axes.add_subplot(xlabel="step", ylabel="loss")
    for name, values in losses.items():
        drawing.plot(values, label=name, linewidth=1)
    drawing.legend()
    axes.savefig(path, bbox_inches="tight")


def main(emulate: bool | None = None, steps: int | None = None, out: str | None = None) -> bool:
    """Train, print what came out, and return whether the losses agree."""
    where = machine.find(emulate)
    sizes = TINY if where.emulated else Sizes()
    sizes = sizes._replace(steps=steps or sizes.steps)
    device, said = "cpu" if where.emulated else "cuda", text()
    letters = sorted(set(said))
    ids = torch.tensor([letters.index(letter) for letter in said])
    print(f"A model of {len(letters)} letters, {sizes.layers} layers of {sizes.width}, {where}")
    torch.manual_seed(SEED)
    first = Model(len(letters), sizes).to(device, torch.bfloat16)
    second = Model(len(letters), sizes).to(device, torch.bfloat16)
    second.load_state_dict(first.state_dict())
    with where.session():
        models = {"PyTorch": first, "gemmkit": accelerated(second)}
        losses, speed = trained(models, ids, sizes, device)
    off = max(abs(x - y) / y for x, y in zip(losses["gemmkit"], losses["PyTorch"]))
    print(f"  losses differ by {off:.4f} of themselves at most (wanted: at most {WANTED})")
    print("  tokens a second: " + ", ".join(f"{name} {value:,.0f}" for name, value in speed.items()))
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"state": second.state_dict(), "letters": letters, "sizes": tuple(sizes)}, folder / "model.pt")
        pictured(losses, folder / "losses.png")
        print(f"  {folder / 'model.pt'}, {folder / 'losses.png'}")
    learned = sizes.steps < 50 or losses["gemmkit"][-1] < 0.7 * losses["gemmkit"][0]
    return off <= WANTED and learned


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.train", description="Train a language model of letters.")
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--steps", type=int, help="how many (default: 300; 3 in the emulator)")
    parser.add_argument("--out", help="a folder for the weights and the picture of the losses")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.steps, options.out) else 1


if __name__ == "__main__":
    raise SystemExit(command())
