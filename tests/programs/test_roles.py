"""One array in several roles: two blocks of it are operands, or threads read it beside the blocks that a kernel stages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.runtime.device import H100, assumed
from tests.support import chains
from tests.support import programs as listing

F16, F32 = np.float16, np.float32


@gk.program
def gram(a: Any, d: Any, y: Any) -> None:
    """Products of rows, on top of the array itself, and the sums of its rows."""
    for m, n in gp.parallel(a.rows, a.rows):
        acc, sums = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ a[n, k].T
            sums += a[m, k].sum(axis=1)
        d[m, n] = acc
        with gp.once(n):
            y[m] = sums


@gk.program
def square(a: Any, d: Any) -> None:
    """A A + A."""
    for m, n in gp.parallel(a.rows, a.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ a[k, n]
        d[m, n] = acc + a[m, n]


@gk.program
def polynomial(a: Any, b: Any, d: Any) -> None:
    """A B + B A + B, in two loops: each array is both operands."""
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        for j in gp.sequential(b.columns):
            acc += b[m, j] @ a[j, n]
        d[m, n] = acc + b[m, n]


@gk.program
def self_attention(x: Any, y: Any, scale: float) -> None:
    """Queries, keys and values are one array, which is added to the result."""
    for h, m in gp.parallel(x.count, x.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, x.columns)
        for n in gp.sequential(x.rows):
            s = scale * (x[h, m] @ x[h, n].T)
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top), gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(x.dtype) @ x[h, n]
            best[:] = top
        y[h, m] = out / total + x[h, m]


@gk.program
def feed_forward(x: Any, w: Any, v: Any, y: Any) -> None:
    """Two layers around which the input is added."""
    for m in gp.parallel(x.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(w.rows):
            out += gp.maximum(x[m] @ w[n].T, 0.0).astype(x.dtype) @ v[n]
        y[m] = out + x[m]


@gk.program
def layers(x: Any, w: Any, y: Any) -> None:
    """An MLP whose input is added at its end: what its first round takes from shared memory."""
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for layer in gp.sequential(w.count):
            h[:] = gp.maximum(h @ w[layer], 0.0).astype(x.dtype)
        y[m] = h + x[m]


def drawn(*shape: int, scale: float = 0.3, seed: int = 3) -> np.ndarray:
    """Of rows that begin at multiples of 16 bytes."""
    x = np.random.default_rng(seed).standard_normal((*shape[:-1], shape[-1] + -shape[-1] % 8)) * scale
    return x.astype(F16)[..., :shape[-1]]


def empty(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def either(kernel: str, mapping: gk.Mapping) -> gk.Mapping:
    return listing.multistage(mapping) if kernel == "multistage" else mapping


KERNELS = pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
TILES = {"gram": (gram, lambda: [drawn(70, 72), empty(70, 70), empty(70, dtype=F32)]),
         "square": (square, lambda: [drawn(70, 70), empty(70, 70, dtype=F32)]),
         "polynomial": (polynomial, lambda: [drawn(40, 40), drawn(40, 40, seed=4), empty(40, 40)])}


@KERNELS
@pytest.mark.sample(24)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("columns", [64, 128, 192, 256])
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_tiles(kernel: str, name: str, columns: int, depth: int, warpgroups: int) -> None:
    program, made = TILES[name]
    most = 256 if kernel == "warp_specialised" else 128
    mapping = either(kernel, gk.Mapping({"n": min(columns, most), "k": depth}, warpgroups=warpgroups, stages=2 if depth == 64 else 0))
    try:
        chains.check(program, made(), mapping, columns)
    except gk.ConfigError as error:
        assert "bytes of shared memory" in str(error) and columns == 256


@pytest.mark.kin(1)
@pytest.mark.sample(5)
@pytest.mark.parametrize("cluster", [{"m": 2}, {"n": 2}, {"m": 2, "n": 2}], ids=str)
@pytest.mark.parametrize("name", TILES)
def test_tiles_of_clusters(cluster: dict[str, int], name: str) -> None:
    program, made = TILES[name]
    chains.check(program, made(), gk.Mapping({"n": 128}, warpgroups=1, cluster=cluster), 1)


CHAINS: dict[str, Any] = {"attention": (self_attention, lambda: [drawn(1, 70, 64), empty(1, 70, 64)], dict(scale=0.2)),
                          "feed forward": (feed_forward, lambda: [drawn(70, 64), drawn(80, 64), drawn(80, 64), empty(70, 64)], {}),
                          "layers": (layers, lambda: [drawn(70, 64), drawn(2, 64, 64), empty(70, 64, dtype=F32)], {})}


@KERNELS
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("length", [16, 64, 80, 128, 144, 192, 256])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_chains(kernel: str, name: str, length: int, warpgroups: int) -> None:
    program, made, more = CHAINS[name]
    blocks = {} if name == "layers" else {"n": length}
    try:
        chains.check(program, made(), either(kernel, gk.Mapping(blocks, warpgroups=warpgroups)), length, **more)
    except gk.ConfigError as error:
        assert "registers of a thread" in str(error) or "shared memory" in str(error)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("more", [dict(splits=2), dict(cluster={"m": 2}), dict(lazy=True, stages=3), dict(turns=True, descending=False)], ids=str)
def test_chains_of_other_mappings(more: dict[str, Any]) -> None:
    arrays = [drawn(1, 150, 64), empty(1, 150, 64)]
    chains.check(self_attention, arrays, gk.Mapping({"n": 48}, warpgroups=2, **more), 1, scale=0.2)


def test_a_block_has_a_map_of_its_own() -> None:
    """Of blocks of different lengths TMA brings boxes of different lengths."""
    with assumed(H100):
        plan = gram.plan(np.zeros((4096, 4096), F16), np.zeros((4096, 4096), F16), np.zeros(4096, F32))
        boxes = {taken.map.spec.box for taken in plan.taken if taken.map is not None and taken.array == "a"}
        assert boxes == {(64, plan.mapping.blocks["m"]), (64, plan.mapping.blocks["n"])} and len(boxes) == 2
        assert "def kernel(sizes, map_a, map_a_2, d, y):" in plan.text


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*TILES, *CHAINS])
def test_compiles_for_hopper(name: str) -> None:
    """Maps and arrays are arguments of their own."""
    program, made, more = CHAINS[name] if name in CHAINS else (*TILES[name], {})
    with assumed(H100):
        assert program.plan(*made(), **more).launchable.entry().cubin


@gk.program
def weights(a: Any, b: Any, largest: Any, y: Any) -> None:
    """A result that threads store, in front of one that leaves by TMA."""
    for m in gp.parallel(a.rows):
        acc = gp.zeros(m, b.columns)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k]
        top = acc.max(axis=1)
        largest[m] = top
        y[m] = gp.exp(acc - top)


@pytest.mark.kin(1)
@pytest.mark.compile
def test_maps_are_counted_among_maps() -> None:
    """The kernel's parameters that are tensor maps have a numbering of their own, whatever lies between them."""
    with assumed(H100):
        plan = weights.plan(np.zeros((128, 192), F16), np.zeros((192, 64), F16), np.zeros((128, 2), F32)[:, 0],
                            np.zeros((128, 64), F16))
        maps = [taken.map for taken in plan.taken if taken.map is not None]
        assert [taken.map is None for taken in plan.taken] == [False, False, True, False]
        assert [one.ordinal for one in maps] == [0, 1, 2] and plan.launchable.entry().cubin
