"""How a network's answers move with its images, by dual numbers: `python -m examples.sensitivities`.

A dual number is a value and p tangents: its derivatives in p directions. Sums and products of dual numbers follow
the rules of differentiation, so a program that runs on them returns its derivatives beside its result, exact to
rounding and in one pass (forward mode). `network` below is such a program: written once, it takes NumPy's arrays
and `gemmkit.functions.Dual` alike. A product of dual matrices is one kernel of 1 + 2p real products for each pair of
elements.

The network is a layer of random features with a tanh, and a linear layer solved by least squares on scikit-learn's
bundled digits. The directions are what a hand does to a digit: shift it to the right, shift it down, turn it, scale
it. An image of 8 x 8 pixels moves by its gradient along the flow of each, so that a tangent says how much the ten
scores change for a pixel of shift, a radian, or a factor of e.

The derivatives are compared with central differences of the same network in float64, and with PyTorch's forward
mode where PyTorch is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmkit as gk

from . import digits, machine

DISTORTIONS = {
    "shifted right": ("pixel", 1.0),
    "shifted down": ("pixel", 1.0),
    "turned": ("degree", math.pi / 180),
    "scaled": ("percent", 0.01),
}

HIDDEN = 256
FEATURE_SCALE, RIDGE = 0.3, 1e-2
STEP = 1e-5  # of central differences in float64: their error is about 1e-10

WANTED_ACCURACY = 0.95  # of the network with HIDDEN features
WANTED_ERROR = 1e-5  # of f32 products of 64 and 256 terms, relative to the largest derivatives

EMULATED_IMAGES, EMULATED_HIDDEN = 32, 32  # one tile of the emulated kernel


@dataclass(frozen=True)
class Network:
    """tanh(x w + b) v: of (n, 64) images (n, 10) scores, the largest of which names the digit."""

    w: np.ndarray
    b: np.ndarray
    v: np.ndarray

    def __call__(self, x: Any, product: Callable[[Any, Any], Any] = np.matmul) -> Any:
        """The scores; of dual images, with their derivatives."""
        return product(np.tanh(product(x, self.w) + self.b), self.v)


def trained(x: np.ndarray, labels: np.ndarray, hidden: int) -> Network:
    """A network with random features and the least-squares solution for its last layer, by NumPy in float64."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, hidden)) * FEATURE_SCALE
    b = rng.uniform(-1, 1, hidden)
    features = np.tanh(x @ w + b)
    v = np.linalg.solve(features.T @ features + RIDGE * np.eye(hidden), features.T @ np.eye(10)[labels])
    return Network(w, b, v)


def directions(x: np.ndarray) -> np.ndarray:
    """The (n, 64, 4) derivatives of (n, 64) images by `DISTORTIONS`: -(gradient of the image) · (flow of the pixels)."""
    images = x.reshape(-1, 8, 8)
    down, right = np.gradient(np.pad(images, ((0, 0), (1, 1), (1, 1))), axis=(1, 2))
    down, right = down[:, 1:-1, 1:-1], right[:, 1:-1, 1:-1]
    row, column = np.indices((8, 8)) - 3.5
    moved = (-right, -down, row * right - column * down, -row * down - column * right)
    return np.stack([m.reshape(len(x), 64) for m in moved], axis=-1)


def product(x: gk.functions.Dual, weights: np.ndarray, where: machine.Machine) -> gk.functions.Dual:
    """A dual matrix by a real one, in gemmkit, in float32."""
    constant = gk.functions.Dual.constant(weights.astype(np.float32), x.count)
    made = gk.functions.Dual(where.to_device(x.parts)) @ gk.functions.Dual(where.to_device(constant.parts))
    return gk.functions.Dual(where.to_host(made.parts))


def dual_scores(network: Network, x: np.ndarray, tangents: np.ndarray, where: machine.Machine) -> gk.functions.Dual:
    """The scores of images and their derivatives in every direction, in one pass."""
    images = gk.functions.Dual.of(x.astype(np.float32), tangents.astype(np.float32))
    single = Network(*(part.astype(np.float32) for part in (network.w, network.b, network.v)))
    with where.session():
        scores: gk.functions.Dual = single(images, lambda a, b: product(a, b, where))
    return scores


def differences(network: Network, x: np.ndarray, tangents: np.ndarray) -> np.ndarray:
    """The same derivatives by central differences, in float64 by NumPy: two passes for every direction."""
    steps = STEP * np.moveaxis(tangents, -1, 0)
    return np.stack([(network(x + step) - network(x - step)) / (2 * STEP) for step in steps], axis=-1)


def torch_forward_mode(network: Network, x: np.ndarray, tangents: np.ndarray) -> np.ndarray:
    """The same derivatives by PyTorch's forward mode, in float64 on the CPU: one pass for every direction."""
    import torch
    from torch.autograd import forward_ad

    w, b, v, images, moved = map(torch.from_numpy, (network.w, network.b, network.v, x, tangents))
    found = []
    with forward_ad.dual_level():
        for k in range(tangents.shape[-1]):
            dual = forward_ad.make_dual(images, moved[..., k].contiguous())
            found.append(forward_ad.unpack_dual(torch.tanh(dual @ w + b) @ v).tangent.numpy())
    return np.stack(found, axis=-1)


def relative_error(found: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference, relative to the largest derivative in the same direction."""
    return float(np.max(np.abs(found - reference).max((0, 1)) / np.abs(reference).max((0, 1))))


def main(emulate: bool | None = None, images: int | None = None, hidden: int | None = None) -> bool:
    """Differentiate, print what came out, and return whether it is as good as it must be.

    Without `images` and `hidden`, all 599 held-out digits and 256 features on a GPU; a few of each in the emulator.
    """
    where = machine.find(emulate)
    images = images or (EMULATED_IMAGES if where.emulated else None)
    hidden = hidden or (EMULATED_HIDDEN if where.emulated else HIDDEN)
    data = digits.load(None, images)
    x, labels = data.test_x.astype(np.float64), data.test_labels
    network = trained(data.train_x.astype(np.float64), data.train_labels, hidden)
    tangents = directions(x)
    print(f"Sensitivities of a digit classifier, {where}")
    print(f"  {len(x)} of 599 held-out digits, {hidden} features, {len(DISTORTIONS)} directions in one pass")
    scores = dual_scores(network, x, tangents, where)
    accuracy = float(np.mean(np.argmax(scores.value, axis=1) == labels))
    print(
        f"  accuracy on these digits {accuracy:.3f}"
        + ("" if hidden < HIDDEN else f" (wanted: {WANTED_ACCURACY})")
    )

    of_label = scores.tangents[np.arange(len(x)), labels]
    for k, (name, (unit, size)) in enumerate(DISTORTIONS.items()):
        typical = size * math.sqrt(np.mean(of_label[:, k] ** 2))
        print(f"    {name} by a {unit}: the right digit's score changes by {typical:.2g} (root mean square)")
    errors = {"central differences": relative_error(scores.tangents, differences(network, x, tangents))}
    if importlib.util.find_spec("torch") is not None:
        errors["PyTorch's forward mode"] = relative_error(
            scores.tangents, torch_forward_mode(network, x, tangents)
        )
    for name, error in errors.items():
        print(f"  differs by {error:.1e} from {name} in float64 (wanted: at most {WANTED_ERROR})")
    good = accuracy >= WANTED_ACCURACY or hidden < HIDDEN
    return good and max(errors.values()) <= WANTED_ERROR


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.sensitivities", description="Derivatives of a digit classifier's scores."
    )
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--images", type=int, help="how many digits (default: 599; 32 in the emulator)")
    parser.add_argument("--hidden", type=int, help="how many features (default: 256; 32 in the emulator)")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.images, options.hidden) else 1


if __name__ == "__main__":
    raise SystemExit(command())
