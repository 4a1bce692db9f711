"""Text of a trained model, letter by letter, by PyTorch and by gemmkit: `python -m examples.serve --model folder/model.pt`.

`python -m examples.train --out folder` makes the model. A `gk.torch.KVCache` holds keys and values, and on a GPU gemmkit
computes a letter in one CUDA graph. The likeliest letter is taken each time, so that both print the same text, until
roundings decide between two letters that are as likely.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

import gemmkit as gk
import gemmkit.torch

from . import machine
from .train import Model, Sizes, accelerated

PROMPT = "The data set contains "


def generated(model: Model, sizes: Sizes, prompt: list[int], count: int, device: str,
              name: str) -> tuple[list[int], Any, float]:
    """The letters behind a prompt, the logits of the first one, and letters a second."""
    cache = gk.torch.KVCache(layers=sizes.layers, batch=1, heads=sizes.heads, head_size=sizes.width // sizes.heads,
                             capacity=sizes.length, dtype=model.head.weight.dtype, device=device)

    def by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> Any:
        return F.scaled_dot_product_attention(q, *cache.update(k, v, layer), is_causal=q.shape[2] > 1)

    def step(ids: torch.Tensor) -> Any:
        return model(ids, cache.attend if name == "gemmkit" else by_pytorch, cache.lengths)[:, -1]

    again, begun, warm = cache.captured(step) if name == "gemmkit" else step, 0.0, min(4, count // 2)
    with torch.inference_mode():
        first = step(torch.tensor([prompt], device=device))
        found = [first.argmax(-1, keepdim=True)]
        for n in range(1, count):
            found.append(again(found[-1]).argmax(-1, keepdim=True))
            if n == warm:                              # when all is compiled
                _ = found[-1].item()
                begun = time.perf_counter()
        letters = torch.cat(found, 1)[0].tolist()      # which waits for the GPU
    return letters, first, (count - warm - 1) / max(1e-9, time.perf_counter() - begun)


def main(path: str, emulate: bool | None = None, count: int = 200, prompt: str = PROMPT) -> bool:
    """Print both texts and their speed, and return whether the first letter's logits agree."""
    where = machine.find(emulate)
    device = "cpu" if where.emulated else "cuda"
    held = torch.load(path, map_location=device, weights_only=True)
    letters, sizes = held["letters"], Sizes(*held["sizes"])
    given = [letters.index(x) for x in prompt if x in letters][-sizes.length // 2:]
    count = min(count, sizes.length - len(given))
    print(f"{count} letters behind {prompt!r}, {where}")
    logits = []
    with where.session():
        for name in ("PyTorch", "gemmkit"):
            model = Model(len(letters), sizes).to(device, torch.bfloat16)
            model.load_state_dict(held["state"])
            if name == "gemmkit":
                accelerated(model)
            found, first, speed = generated(model.eval(), sizes, given, count, device, name)
            logits.append(first.float())
            print(f"  {name}, {speed:,.0f} letters a second: {''.join(letters[n] for n in found)!r}")
    off = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    print(f"  the first letter's logits differ by {off:.4f} of the largest (wanted: at most 0.05)")
    return off <= 0.05


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description="Generate text by a trained model.")
    parser.add_argument("--model", required=True, help="what `python -m examples.train --out folder` wrote: folder/model.pt")
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--count", type=int, default=200, help="how many letters")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args(arguments)
    return 0 if main(options.model, options.emulate, options.count, options.prompt) else 1


if __name__ == "__main__":
    raise SystemExit(command())
