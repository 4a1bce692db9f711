"""A sample of every kind of kernel, small and odd, for compute-sanitizer: `make sanitize` on a machine with a GPU.

    compute-sanitizer --tool memcheck  python -m bench.sanitized
    compute-sanitizer --tool racecheck python -m bench.sanitized

Prints each product's error against float64 and exits with 1 if one is wrong; the sanitizer reports what it finds itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import gemmkit as gk
from bench.experiments.programs import gemm
from examples.programs import decayed_attention, gated_chain
from gemmkit import epilogues, operators, transforms

SIZES = ((1, 1, 1), (33, 65, 17), (128, 128, 64))
CASES: dict[str, tuple[str, Any, float]] = {
    "mma f16": ("f2", operators.MMAOp(), 1e-3),
    "wmma f16": ("f2", operators.WMMAOp(), 1e-3),
    "fpu f32": ("f4", None, 1e-5),
    "mma f64": ("f8", None, 1e-13),
    "mma tf32": ("f4", operators.MMAOp(dtype="f4"), 1e-3),
    "fpu f64": ("f8", operators.FPUOp(16, 16, dtype="f8"), 1e-13),
    "fpu int32": ("i4", None, 0.0),
    "fpu complex64": ("c8", None, 1e-5),
}
# Contractions (copied by cp.async, subtiles of D, combs of D and along K; a K that blocks share), column-major.
TENSORS: dict[str, tuple[str, str, dict[str, int]]] = {
    "panels": ("f2", "ijmb,mkac->abcijk", dict(i=8, j=3, m=24, b=4, k=4, a=24, c=5)),
    "comb of D": ("f2", "bka,kj->abj", dict(a=24, b=24, k=40, j=20)),
    "comb along K": ("f2", "kil,lkj->ij", dict(i=40, j=36, k=24, l=24)),
    "shared K": ("f2", "ikl,ljk->ij", dict(i=72, j=72, k=64, l=96)),
    "shared K f32": ("f4", "ikl,ljk->ij", dict(i=72, j=72, k=64, l=96)),
}


def contraction_error(rng: np.random.Generator, dtype: str, spec: str, sizes: dict[str, int]) -> float:
    """The error of an einsum against float64."""
    import cupy

    left, right = (_random(rng, tuple(sizes[x] for x in term), dtype) for term in spec.split("->")[0].split(","))
    out = cupy.empty(tuple(sizes[x] for x in spec.split("->")[1]), "f4", order="F")
    gk.einsum(spec, cupy.asarray(left, order="F"), cupy.asarray(right, order="F"), out=out)
    reference = np.einsum(spec, left.astype("f8"), right.astype("f8"))
    return float(np.linalg.norm(out.get() - reference) / np.linalg.norm(reference))


def attention_error(rng: np.random.Generator, head_dim: int, queries: int, keys: int) -> float:
    """The error of causal attention against float64."""
    import cupy

    q, k, v = (_random(rng, (1, 2, rows, head_dim), "f2") for rows in (queries, keys, keys))
    out = gk.attention(*map(cupy.asarray, (q, k, v)), mask=gk.masks.Causal())
    s = q.astype("f8") @ k.astype("f8").swapaxes(2, 3) / head_dim**0.5
    s = np.where(np.arange(keys) <= np.arange(queries)[:, None] + keys - queries, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    reference = p / p.sum(-1, keepdims=True) @ v.astype("f8")
    return float(np.linalg.norm(out.get() - reference) / np.linalg.norm(reference))


def mlp_error(rng: np.random.Generator, width: int, rows: int, layers: int) -> float:
    """The error of an MLP against float64."""
    import cupy

    h = rng.standard_normal((rows, width)).astype("f2")
    weights = (rng.standard_normal((layers, width, width)) / np.sqrt(width)).astype("f2")
    biases = rng.standard_normal((layers, width)).astype("f4")
    out = gk.mlp(*map(cupy.asarray, (h, weights, biases)), last=gk.epilogues.activations.relu).get()
    reference = h.astype("f8")
    for w, b in zip(weights.astype("f8"), biases):
        reference = np.maximum(reference @ w + b, 0)
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


def programs(rng: np.random.Generator) -> Iterator[tuple[str, gk.Program, list[np.ndarray], gk.Mapping]]:
    """Derived kernels, a name and arrays for each, of which the last is the result: tiles, whole rows, in clusters and in
    shares, by both kernels."""
    product = [_random(rng, shape, "f2") for shape in ((300, 136), (136, 264), (300, 264))]
    q, k, v, o = (_random(rng, (2, 200, 64), "f2") for _ in range(4))
    heads = [q, k, v, np.array([0.02, 0.5], "f4"), o]
    a, b, c, d = (_random(rng, (rows, 64), "f2") for rows in (150, 1100, 1100, 150))
    chain = [a, b / 5, rng.random(150, np.float32), c, d]
    for kernel in ("warp_specialised", "multistage"):
        yield "program", gemm, product, gk.Mapping(kernel=kernel)
        yield "chain", decayed_attention, heads, gk.Mapping(kernel=kernel)
        yield "chain", gated_chain, chain, gk.Mapping(kernel=kernel, splits=1)
        yield "shares", gated_chain, chain, gk.Mapping(kernel=kernel, splits=4)
    yield "clusters", gemm, product, gk.Mapping({"n": 128}, cluster={"m": 2, "n": 2})
    yield "clusters", gated_chain, chain, gk.Mapping(cluster={"m": 2})


def program_error(program: gk.Program, arrays: list[np.ndarray], mapping: gk.Mapping) -> float:
    """The error of a program's result against its reference in float64, of its largest element."""
    import cupy

    numbers = {"scale": 0.125} if program is decayed_attention else {}
    exact = program.reference(*arrays, **numbers)
    given = [cupy.asarray(x) for x in arrays]
    given[-1][...] = cupy.nan
    program(*given, mapping=mapping, **numbers)
    return float(np.abs(given[-1].get() - exact).max() / np.abs(exact).max())


def softmax_error(rng: np.random.Generator, rows: int, columns: int) -> float:
    import cupy

    x = 3 * _random(rng, (rows, columns), "f2")
    p = np.exp(x.astype("f8") - x.max(axis=1, keepdims=True))
    return float(np.abs(gk.softmax(cupy.asarray(x)).get() - p / p.sum(axis=1, keepdims=True)).max())


def main() -> int:
    """Run the sample on CuPy arrays; 1 when a result is wrong."""
    import cupy

    rng, wrong = np.random.default_rng(0), 0
    for name, (dtype, spec, sizes) in TENSORS.items():
        off = contraction_error(rng, dtype, spec, sizes)
        wrong += not off <= 1e-5
        print(f"{name:14} {spec} {off:.1e}", flush=True)
    for head_dim, queries, keys in ((64, 197, 300), (128, 131, 131), (256, 65, 177)):
        off = attention_error(rng, head_dim, queries, keys)
        wrong += not off <= 1e-3
        print(f"{'attention':14} {head_dim} {queries}x{keys} {off:.1e}", flush=True)
    for width, rows, layers in ((128, 300, 3), (256, 131, 5), (80, 65, 2)):
        off = mlp_error(rng, width, rows, layers)
        wrong += not off <= 2e-3
        print(f"{'mlp':14} {layers} layers {rows}x{width} {off:.1e}", flush=True)
    for name, program, arrays, mapping in programs(rng):
        off = program_error(program, arrays, mapping)
        wrong += not off <= 3e-3
        print(f"{name:14} {program.function.__name__} {mapping!r} {off:.1e}", flush=True)
    for rows, columns in ((3, 1), (37, 1000), (5, 8200)):
        off = softmax_error(rng, rows, columns)
        wrong += not off <= 1e-3
        print(f"{'softmax':14} {rows}x{columns} {off:.1e}", flush=True)
    for name, (dtype, operator, tolerance) in CASES.items():
        for trans in ("NN", "TT"):
            for m, n, k in SIZES:
                a, b = (_random(rng, s if t == "N" else s[::-1], dtype) for s, t in zip(((m, k), (k, n)), trans))
                c = _random(rng, (m, n), dtype)
                left, right, out = cupy.asarray(a), cupy.asarray(b), cupy.asarray(c)
                gk.blas.gemmEx(trans[0], trans[1], 2.0 if dtype != "i4" else 2, left, right, 1, out, operator=operator)
                wide = np.result_type(np.float64, dtype)
                lhs, rhs = (x.astype(wide) if t == "N" else x.astype(wide).T for x, t in zip((a, b), trans))
                reference = 2 * lhs @ rhs + c.astype(wide)
                error = np.linalg.norm(out.get() - reference) / np.linalg.norm(reference)
                wrong += not error <= tolerance
                print(f"{name:14} {trans} {m}x{n}x{k} {error:.1e}", flush=True)
    a, b, bias = (cupy.asarray(_random(rng, s, "f4")) for s in ((37, 29), (29, 41), (41,)))
    d = gk.matmul(a, b, epilogue=epilogues.Bias(bias), transform_shared_to_regs_a=transforms.Map(lambda x: x + 1))
    reference = (a.get().astype("f8") + 1) @ b.get().astype("f8") + bias.get()
    error = np.linalg.norm(d.get() - reference) / np.linalg.norm(reference)
    print(f"bias, transform {error:.1e}")
    return int(wrong > 0 or not error <= 1e-5)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "i4":
        return rng.integers(-9, 9, shape).astype(dtype)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype == "c8" else values).astype(dtype)


if __name__ == "__main__":
    sys.exit(main())
