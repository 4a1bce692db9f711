"""Causal attention over a stream of handwritten digits, its mask fused: `python -m examples.attention`.

The digits of scikit-learn's bundled data come one after the other, and each is recognised from those before it: it
is the query, the earlier images are the keys, their labels the values, and what attention returns is how likely
each of the ten labels is. Nothing is trained; the context is all there is.

    S = mask(sharpness · Q Kᵀ)      one product with the epilogue Scale | Causal: -inf where a key is in the future
    P = softmax(S), row by row      by NumPy on the host
    O = P V                         one product of gk.layouts.TriangularMatrix(P), which skips the k-tiles that are zero

What that saves: S is written once. To scale and to mask in passes of their own would read and write all of it twice
more. The second product multiplies about half of its blocks, and the upper half of P is never read: the example
fills it with NaN, which is not seen again.

Images are vectors of 64 pixels in f16, scaled to length 1, so that Q Kᵀ holds cosines. Products are of f16 with f32
sums, on tensor cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.kernels.spec import ProblemShape

from . import machine

SHARPNESS = 60.0  # softmax(60 cos): a key at 10 degrees weighs 2.4 times one at 14
WANTED_ACCURACY = 0.97  # of the second half of the stream, which has some context
WANTED_SCORE_ERROR = 2e-6  # f32 sums of exact products of f16
WANTED_ERROR = 1e-3  # P is rounded to f16

EMULATED_DIGITS = 193  # 3 x 3 blocks of scores


@dataclass(frozen=True)
class Stream:
    """Images of length 1 in the order in which they come, (n, 64) in f16, and their labels."""

    images: np.ndarray
    labels: np.ndarray

    @property
    def queries(self) -> np.ndarray:
        """All digits but the first, which has nothing before it."""
        return self.images[1:]

    @property
    def keys(self) -> np.ndarray:
        """All digits but the last: query m is digit m + 1, and may see the keys 0 to m."""
        return self.images[:-1]

    @property
    def values(self) -> np.ndarray:
        """The keys' labels, one-hot."""
        return np.eye(10, dtype=np.float16)[self.labels[:-1]]


def load(count: int | None = None) -> Stream:
    """The first `count` digits; all 1797 for None.

    Raises:
        ValueError: fewer than 2 are asked for, or more than there are.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    count = len(bunch.data) if count is None else count
    if not 2 <= count <= len(bunch.data):
        raise ValueError(f"got {count} digits to take, must be 2 to {len(bunch.data)}")
    images = bunch.data[:count] / np.linalg.norm(bunch.data[:count], axis=1, keepdims=True)
    return Stream(images.astype(np.float16), bunch.target[:count])


def masked_scores(queries: np.ndarray, keys: np.ndarray, where: machine.Machine) -> np.ndarray:
    """sharpness · Q Kᵀ, and -inf where the key is in the future: one fused gemmkit product, in f32."""
    epilogue = epilogues.Scale(SHARPNESS) | epilogues.CausalMask()
    with where.session():
        return where.to_host(
            gk.matmul(where.to_device(queries), where.to_device(keys).T, epilogue=epilogue, dtype=np.float32)
        )


def softmax(scores: np.ndarray) -> np.ndarray:
    """Of every row; what is -inf becomes 0."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    total: np.ndarray = weights.sum(axis=1, keepdims=True)
    return weights / total


def attended(probabilities: np.ndarray, values: np.ndarray, where: machine.Machine) -> tuple[np.ndarray, Any]:
    """P V, and the extents of the kernel's block. P's upper half is not read, and blocks inside it are skipped."""
    with where.session():
        out = where.to_device(np.full((len(probabilities), values.shape[1]), np.nan, np.float32))
        p, v = gk.layouts.TriangularMatrix(where.to_device(probabilities)), where.to_device(values)
        run = gk.plan(p, v, out=out)
        return where.to_host(run(p, v, out=out)), run.config.block_shape.size


def steps_taken(rows: int, block: Any) -> tuple[int, int]:
    """How many k-tiles the triangular product takes, by its layout's `k_range`; and how many a dense one."""
    layout = layouts.Triangular(layouts.RowMajor(np.float16))
    taken = 0
    for begin in range(0, rows, block.M):
        first, last = layout.k_range(begin, min(begin + block.M, rows), ProblemShape(rows, 10, rows))
        taken += -(-last // block.K) - first // block.K
    return taken, -(-rows // block.M) * -(-rows // block.K)


def reference(stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """The masked scores and the attended values by NumPy in float64."""
    scores = SHARPNESS * (stream.queries.astype(np.float64) @ stream.keys.astype(np.float64).T)
    scores[np.triu_indices(len(scores), 1)] = -np.inf
    return scores, softmax(scores) @ stream.values.astype(np.float64)


def main(emulate: bool | None = None, count: int | None = None) -> bool:
    """Attend, print what came out, and return whether it is as good as it must be.

    Without `count`, all 1797 digits on a GPU, and the first 193 in the emulator.
    """
    where = machine.find(emulate)
    stream = load(count or (EMULATED_DIGITS if where.emulated else None))
    n = len(stream.queries)
    print(f"Causal attention over handwritten digits, {where}")
    print(f"  {n + 1} of 1797 digits: {n} queries, {n} keys of 64 pixels, sharpness {SHARPNESS:g}")

    scores = masked_scores(stream.queries, stream.keys, where)
    probabilities = softmax(scores).astype(np.float16)
    future = np.triu_indices(n, 1)
    probabilities[future] = np.nan  # to show that it is not read
    out, block = attended(probabilities, stream.values, where)

    right = np.argmax(out, axis=1) == stream.labels[1:]
    accuracy = float(np.mean(right[n // 2 :]))
    wanted_scores, wanted_out = reference(stream)
    is_masked = bool(np.array_equal(np.isneginf(scores), np.isneginf(wanted_scores)))
    past = np.tril_indices(n)
    score_error = float(np.max(np.abs(scores[past] - wanted_scores[past])) / SHARPNESS)
    error = float(np.max(np.abs(out - wanted_out)))

    megabytes = scores.nbytes / 1e6
    taken, dense = steps_taken(n, block)
    print(
        f"  the mask {'hides the future and nothing else' if is_masked else 'IS WRONG'}: {len(future[0])} of {n * n}"
    )
    print(
        f"  scores written once, {megabytes:.1f} MB; two passes of their own would move {4 * megabytes:.1f} MB more"
    )
    print(f"  of P V the triangle needs {taken} of {dense} steps along K, in blocks of {block.M} x {block.K}")
    print(f"  of the second half {accuracy:.4f} are recognised (wanted: at least {WANTED_ACCURACY})")
    print(
        f"  error of the scores {score_error:.1e}, against NumPy in float64 (wanted: at most {WANTED_SCORE_ERROR})"
    )
    print(f"  error of the probabilities of labels {error:.1e} (wanted: at most {WANTED_ERROR})")
    # A comparison with NaN is false: one that got through the mask is found here.
    return (
        is_masked
        and accuracy >= WANTED_ACCURACY
        and score_error <= WANTED_SCORE_ERROR
        and error <= WANTED_ERROR
    )


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.attention", description="Causal attention over handwritten digits."
    )
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--count", type=int, help="how many digits (default: 1797; 193 in the emulator)")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.count) else 1


if __name__ == "__main__":
    raise SystemExit(command())
