"""A transformer that reads handwritten digits row by row: `python -m examples.transformer`.

An image of 8 x 8 pixels is a sequence of 8 tokens, its rows. Two layers of attention and gated linear units turn them into
sums from which the digit is read. All images lie one behind the other in the same arrays, and `lengths` keeps their
sequences apart, as in batches of texts of any lengths. A layer is six kernels, of which none copies or casts anything:

| step | by |
|---|---|
| h = rmsnorm(x) | `gk.rmsnorm` |
| q, k, v = h Wqkv | one product; the three are views of its result |
| a = softmax(q kᵀ) v, of each image and head | `gk.attention(..., layout="bnhd", lengths=...)` |
| x = x + a Wo | a product, with the residual in its epilogue |
| g = silu(h W) * (h V), of h = rmsnorm(x) | `gk.rmsnorm`, `gk.glu` |
| x = x + g Wdown | as Wo |

No gradients are needed for weights that classify digits: those that mix tokens are random rotations, and each layer's Wdown
is fitted by ridge regression, to bring every token nearer to a code word of its image's digit. That is done by NumPy, on the
training images; the images held out are classified by gemmkit, and by NumPy in float64 with the same weights, as a check.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import gemmkit as gk
from gemmkit import epilogues

from . import digits, machine

TOKENS, HEADS, HEAD_DIM, HIDDEN, LAYERS = 8, 2, 32, 160, 2
WIDTH = HEADS * HEAD_DIM
CODE = 4.0                             # length of a code word: what a fitted layer brings tokens to
RIDGE = 1.0
SHARPNESS, MIXED = 0.3, 2.0            # of queries and keys: a token sees all others; how much of them it takes
SEED = 7

WANTED_ACCURACY = 0.95                # 0.965 on all held-out digits
WANTED_ERROR = 1e-2                    # of the last sums, relative to their largest, with weights and results in float16
EMULATED_TEST = 4                      # 32 tokens: each kernel takes a second and more


@dataclass(frozen=True)
class Layer:
    """Weights in float16: (64, 192), (64, 64), twice (64, 160), (160, 64)."""

    qkv: np.ndarray
    out: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True)
class Network:
    """``embedding`` takes a token's 64 features to the width; ``codes`` are the words of the ten digits."""

    embedding: np.ndarray
    layers: tuple[Layer, ...]
    codes: np.ndarray


def tokens(images: np.ndarray) -> np.ndarray:
    """Rows of pixels as tokens: (images x 8, 64), each row's pixels at the place of its number, zeros elsewhere."""
    features = np.zeros((len(images), TOKENS, TOKENS, 8), np.float16)
    features[:, np.arange(TOKENS), np.arange(TOKENS)] = images.reshape(-1, TOKENS, 8)
    return features.reshape(-1, 8 * TOKENS)


# -- by NumPy ----------------------------------------------------------------------------------------------------------

def normalised(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))


def mixed(x: np.ndarray, layer: Layer) -> np.ndarray:
    """x and what attention adds."""
    heads = (normalised(x) @ layer.qkv).reshape(-1, TOKENS, 3, HEADS, HEAD_DIM)
    q, k, v = (heads[:, :, n].swapaxes(1, 2) for n in range(3))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found = weights / weights.sum(-1, keepdims=True) @ v
    return np.asarray(x + found.swapaxes(1, 2).reshape(-1, WIDTH) @ layer.out)


def gated(x: np.ndarray, layer: Layer) -> np.ndarray:
    gate = normalised(x) @ layer.gate
    return np.asarray(gate / (1 + np.exp(-gate)) * (normalised(x) @ layer.up))


def reference(network: Network, features: np.ndarray) -> np.ndarray:
    """The last sums in float64, (images, 10)."""
    x = features.astype(np.float64) @ network.embedding.astype(np.float64)
    for layer in network.layers:
        exact = Layer(*(getattr(layer, name).astype(np.float64) for name in Layer.__dataclass_fields__))
        x = mixed(x, exact)
        x = x + gated(x, exact) @ exact.down
    return read(network, x)


def read(network: Network, x: np.ndarray) -> np.ndarray:
    """How much of each code word an image's tokens have on average."""
    return np.asarray(x.astype(np.float64).reshape(-1, TOKENS, WIDTH).mean(1) @ network.codes.T)


def fitted(images: np.ndarray, labels: np.ndarray) -> Network:
    """Random rotations, and of each layer the ridge regression of what tokens lack to their digit's code word."""
    rng = np.random.default_rng(SEED)

    def rotation(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        most = max(rows, columns)
        return (scale * np.linalg.qr(rng.standard_normal((most, most)))[0][:rows, :columns]).astype(np.float16)

    codes = CODE * np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0][:10]
    wanted = np.repeat(codes[labels], TOKENS, axis=0)
    embedding = rotation(8 * TOKENS, WIDTH)
    x: np.ndarray = tokens(images).astype(np.float32) @ embedding.astype(np.float32)
    layers = []
    for _ in range(LAYERS):
        qkv = np.hstack([rotation(WIDTH, WIDTH, SHARPNESS), rotation(WIDTH, WIDTH, SHARPNESS), rotation(WIDTH, WIDTH)])
        layer = Layer(qkv, rotation(WIDTH, WIDTH, MIXED), rotation(WIDTH, HIDDEN), rotation(WIDTH, HIDDEN),
                      np.zeros((HIDDEN, WIDTH), np.float16))
        single = Layer(*(getattr(layer, name).astype(np.float32) for name in Layer.__dataclass_fields__))
        x = mixed(x, single)
        g = gated(x, single).astype(np.float64)
        down = np.linalg.solve(g.T @ g + RIDGE * np.eye(HIDDEN), g.T @ (wanted - x)).astype(np.float16)
        x = x + g @ down.astype(np.float64)
        layers.append(Layer(layer.qkv, layer.out, layer.gate, layer.up, down))
    return Network(embedding, tuple(layers), codes)


# -- by gemmkit --------------------------------------------------------------------------------------------------------

def forward(network: Network, features: np.ndarray, where: machine.Machine) -> np.ndarray:
    """The last sums, (images, 10)."""
    rows = len(features)
    offsets = np.arange(0, rows + 1, TOKENS)
    x = gk.matmul(where.to_device(features), where.to_device(network.embedding))
    for layer in network.layers:
        qkv, out, gate, up, down = (where.to_device(getattr(layer, name)) for name in Layer.__dataclass_fields__)
        heads = gk.matmul(gk.rmsnorm(x), qkv).reshape(rows, 3, HEADS, HEAD_DIM)
        a = gk.attention(heads[:, 0], heads[:, 1], heads[:, 2], layout="bnhd", lengths=(offsets, offsets))
        x = gk.matmul(a.reshape(rows, WIDTH), out, epilogue=epilogues.Residual(x))
        x = gk.matmul(gk.glu(gk.rmsnorm(x), gate, up), down, epilogue=epilogues.Residual(x))
    return read(network, where.to_host(x))


@contextlib.contextmanager
def session(where: machine.Machine) -> Iterator[None]:
    """What the products must run inside. The emulator takes one thread after the other, and the kernels for GPUs before
    Hopper have fewer of them."""
    from gemmkit.runtime.device import A100, assumed

    with where.session(), assumed(A100) if where.emulated else contextlib.nullcontext():
        yield


def main(emulate: bool | None = None, train: int | None = None, test: int | None = None) -> bool:
    """Classify, print what came out, and return whether it is as good as it must be."""
    where = machine.find(emulate)
    if where.emulated:
        test = test or EMULATED_TEST
    data = digits.load(train, test)
    print(f"A transformer of {LAYERS} layers that reads digits row by row, {where}")
    print(f"  fitted to {len(data.train_x)} images, {len(data.test_x)} of 599 held out are read")
    network = fitted(data.train_x, data.train_labels)
    features = tokens(data.test_x)
    with session(where):
        found = forward(network, features, where)
    wanted = reference(network, features)
    accuracy = float(np.mean(found.argmax(1) == data.test_labels))
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    print(f"  accuracy on held-out digits {accuracy:.4f} (wanted: at least {WANTED_ACCURACY})")
    print(f"  error of the last sums {error:.1e}, against NumPy in float64 (wanted: at most {WANTED_ERROR})")
    return accuracy >= WANTED_ACCURACY and error <= WANTED_ERROR


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.transformer", description="Read digits by a transformer.")
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--train", type=int, help="how many training digits (default: all)")
    parser.add_argument("--test", type=int, help="how many held-out digits (default: all; 4 in the emulator)")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.train, options.test) else 1


if __name__ == "__main__":
    raise SystemExit(command())
