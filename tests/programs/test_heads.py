"""Chains whose heads and widths are no multiples of a swizzled line: blocks end within a panel, and results within a store."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import A100, H100, assumed
from tests.support import chains
from tests.support import programs as listing
from tests.support.machines import MACHINES, on_machines
from tests.support.sass import instructions, loops, written_in_flight

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
HEADS = 3, 8, 16, 20, 24, 32, 40, 48, 72, 50, 80, 96, 100, 104, 112, 136, 160, 176, 192, 224, 248, 256
WIDE = 256, 264, 320, 376, 448, 512
KERNELS = "warp_specialised", "multistage"


def beside(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The same array in rows that are longer: its neighbours are NaN, where TMA takes 16 bytes that are no row's own."""
    whole = np.full((*x.shape[:-1], x.shape[-1] + -x.shape[-1] % 8 + int(rng.choice([0, 8, 24, 64]))), np.nan, x.dtype)
    whole[..., :x.shape[-1]] = x
    return whole[..., :x.shape[-1]]


def whole_of(x: np.ndarray) -> np.ndarray:
    """What an array lies in: longer rows, or itself."""
    return x.base if isinstance(x.base, np.ndarray) and x.base.shape[:-1] == x.shape[:-1] else x


def untouched(x: np.ndarray) -> bool:
    """Whether nothing was written behind a view's rows."""
    return bool(np.isnan(whole_of(x)[..., x.shape[-1]:].astype(F32)).all())


def first(x: np.ndarray) -> np.ndarray:
    """Of a stack, beside what it lies beside."""
    return np.array(whole_of(x)[0])[..., :x.shape[-1]]


def drawn(seed: int, kernel: str, large: bool = False, heads: tuple[int, ...] = HEADS) -> tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]:
    """A program of two products in a chain, its operands beside others, and a mapping."""
    rng = np.random.default_rng(seed)

    def pick(*given: Any) -> Any:
        return given[rng.integers(len(given))]

    def given(*shape: int, scale: float = 1.0) -> np.ndarray:
        return beside((rng.standard_normal(shape) * scale).astype(dtype), rng)

    dtype = pick(F16, F16, BF16)
    d = int(pick(*heads))
    width = int(pick(d, d, *heads))
    count, most = int(rng.integers(1, 4)), 1500 if large else 200
    rows, places = int(pick(1, 64, 128, *rng.integers(1, most, 4))), int(pick(1, 16, *rng.integers(1, most, 4)))
    q, k, v = given(count, rows, d), given(count, places, d, scale=d ** -0.5), given(count, places, width)
    out = pick(dtype, dtype, F32)
    o = beside(chains.empty(count, rows, width, dtype=out), rng)
    splits = pick(1, 1, 1, 2, 3)
    more = dict(splits=splits, warpgroups=pick(0, 1, 2), stages=pick(0, 0, 2), descending=pick(None, False))
    if kernel == KERNELS[0]:
        more.update(ahead=pick(None, None, False), turns=pick(None, None, False), cluster=pick({}, {}, {}, {"m": 2}))
    mapping = gk.Mapping({"n": int(pick(16, 32, 48))} if rng.random() < 0.7 else {}, kernel=kernel, **more)
    name = pick("attention", "bounded", "gated_chain", "normalised")
    if name == "attention":
        return listing.attention, [q, k, v, o], mapping, dict(scale=0.5, visible=pick(None, chains.causal, chains.window))
    if name == "bounded":
        lengths = np.array([pick(0, 1, places, places + 9, *rng.integers(0, places + 1, 3)) for _ in range(count)], np.int32)
        return chains.bounded, [q, chains.padded(k, lengths, np.nan), chains.padded(v, lengths, 6e4), lengths, o,
                                chains.empty(count, rows, dtype=F32)], mapping, dict(scale=0.5, visible=pick(None, chains.causal))
    if name == "normalised":
        return chains.normalised, list(map(first, (q, k, v, o))), dataclasses.replace(mapping, splits=1, ahead=None), {}
    return chains.gated_chain, [*map(first, (q, k)), chains.half(rng, rows).astype(dtype), *map(first, (v, o))], mapping, {}


def is_refusal(error: str) -> bool:
    """Blocks that were asked for have no room; a cluster's share of a block is no whole lines."""
    return any(words in error for words in ("bytes of shared memory", "registers of a thread", "needed; use other blocks along",
                                            "two warpgroups share the columns"))


def near(got: np.ndarray) -> float:
    return 2e-2 if got.dtype == BF16 else 4e-3


@pytest.mark.kin(1)
@pytest.mark.sample(40)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(160))
def test_drawn(seed: int, kernel: str) -> None:
    program, arrays, mapping, more = drawn(seed, kernel)
    try:
        _, results, wanted = chains.computed(program, arrays, mapping, **more)
    except gk.ConfigError as error:
        assert is_refusal(str(error)), error
        return
    of_operands = near(arrays[0])
    chains.check_close(results, wanted, lambda got: max(near(got), of_operands))
    assert all(map(untouched, arrays))


@pytest.mark.kin(1)
@pytest.mark.sample(30)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_wide(seed: int, kernel: str) -> None:
    """Two warpgroups share the columns of what is wider than 256."""
    program, arrays, mapping, more = drawn(seed, kernel, heads=WIDE)
    try:
        _, results, wanted = chains.computed(program, arrays, dataclasses.replace(mapping, blocks={"n": 16}), **more)
    except gk.ConfigError as error:
        assert is_refusal(str(error)), error
        return
    of_operands = near(arrays[0])
    chains.check_close(results, wanted, lambda got: max(near(got), of_operands))
    assert all(map(untouched, arrays))


@gk.program
def begun_by_columns(q: Any, k: Any, gamma: Any, x: Any, o: Any, y: Any, z: Any) -> None:
    """What the columns of a wide result meet, and results that are not wide."""
    for m in gp.parallel(q.rows):
        out, part, total = gp.zeros(m, gamma.columns), gp.zeros(m, y.columns), gp.zeros(m)
        for n in gp.sequential(k.rows):
            p = gp.tanh(q[m] @ k[n].T)
            total += p.sum(axis=1)
            out += p.astype(k.dtype) @ k[n, :gamma.columns]
            part += p.astype(k.dtype) @ k[n, :y.columns]
        o[m] = out * gamma + x[m]
        y[m], z[m] = part, total


def sliced(text: str) -> Any:
    """A program whose round takes its right operand so."""
    def program(q: Any, k: Any, v: Any, o: Any) -> None:
        for m in gp.parallel(q.rows):
            out = gp.zeros(m, o.columns)
            for n in gp.sequential(k.rows):
                p = (q[m] @ k[n].T).astype(k.dtype)
                out += eval(text, {"gp": gp}, dict(p=p, q=q, k=k, v=v, o=o, m=m, n=n))
            o[m] = out

    return gk.program(program)


SLICES = [
    ("p @ k[n, 8:]", TypeError, "a slice is of the first columns, as many as an axis has"), ("p @ k[n, :32]", TypeError, "a slice is of the first columns"),
    ("p @ k[n, :v.columns:2]", TypeError, "a slice is of the first columns"), ("p @ k[:v.columns]", TypeError, "a slice is of the first columns"),
    ("p @ v[n, :k.columns]", ValueError, "v has shape .* and fewer columns"), ("p @ k[n, :q.rows]", ValueError, "each element must get one value|combined|dimensions"),
    ("q[m, :v.columns] @ v[n].T @ v[n]", ValueError, "the first columns of q; a kernel takes them as the right operand"),
    ("(q[m] @ k[n].T).astype(k.dtype) @ k[n, :v.columns] * 1.0 + (q[m, :v.columns] * 0.0)", ValueError, "the first columns of q"),
    ("(q[m, :v.columns] @ k[n, :v.columns].T).astype(k.dtype) @ v[n]", ValueError, "the first columns of")]


@pytest.mark.parametrize("text, kind, words", SLICES, ids=[text for text, *_ in SLICES])
def test_slices_that_are_refused(text: str, kind: Any, words: str) -> None:
    q, k, v, o = (np.zeros((40, columns), F16) for columns in (64, 64, 32, 32))
    with pytest.raises(kind, match=words):
        sliced(text).plan(q, k, v, o)


def test_slices() -> None:
    """All columns, with a slice or without; the reference takes what kernels do not."""
    rng = np.random.default_rng(3)
    q, k, v = chains.half(rng, 20, 64), chains.half(rng, 40, 64), chains.half(rng, 40, 32)
    wanted = (q.astype(float) @ k.astype(float).T).astype(F16) @ k.astype(float)
    for text, columns in (("p @ k[n, :v.columns]", 32), ("p @ k[n, :]", 64), ("p @ k[n, :k.columns]", 64)):
        o = chains.empty(20, columns)
        chains.check(sliced(text), [q, k, v, o], None)
        assert np.allclose(o, wanted[:, :columns], atol=0.05, rtol=0.01)
    exact = sliced("q[m, :v.columns] @ v[n].T @ v[n]").reference(q, k, v, chains.empty(20, 32))
    assert np.allclose(exact, q[:, :32].astype(float) @ v.astype(float).T @ v.astype(float))


@gk.program
def stored_in_part(x: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m, :x.columns] = x[m]


def test_slices_are_not_stored() -> None:
    with pytest.raises(TypeError, match="results are stored without slices"):
        stored_in_part.plan(np.zeros((4, 8), F16), np.zeros((4, 16), F16))


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("columns, width, narrow", [(384, 320, 40), (512, 512, 64), (272, 264, 8), (448, 400, 48)])
def test_what_columns_meet(columns: int, width: int, narrow: int, kernel: str) -> None:
    rng = np.random.default_rng(columns)
    q, k = chains.half(rng, 70, columns), beside(chains.half(rng, 50, columns, scale=columns ** -0.5), rng)
    o, y, z = beside(chains.empty(70, width), rng), beside(chains.empty(70, narrow, dtype=F32), rng), chains.empty(70, dtype=F32)
    gamma, x = rng.standard_normal(width).astype(F32), beside(chains.half(rng, 70, width), rng)
    chains.check(begun_by_columns, [q, k, gamma, x, o, y, z], gk.Mapping({"n": 16}, kernel=kernel))
    assert untouched(o) and untouched(y)


@pytest.mark.kin(1)
@pytest.mark.sample(6)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d, width", [*((d, d) for d in HEADS), (192, 128), (128, 192), (72, 8), (8, 256)])
def test_every_head_by_default(d: int, width: int, kernel: str) -> None:
    rng = np.random.default_rng(d)
    q, k, v = (beside(chains.half(rng, 2, rows, columns), rng) for rows, columns in ((70, d), (150, d), (150, width)))
    o = beside(chains.empty(2, 70, width), rng)
    chains.check(listing.attention, [q, k, v, o], gk.Mapping(kernel=kernel), scale=d ** -0.5)
    assert untouched(o)


def test_sums_of_half_a_matrix_are_reduced() -> None:
    """A thread's sums of 72 columns are no multiple of 8, by which maxima and sums of rows go."""
    rng = np.random.default_rng(1)
    for kernel in KERNELS:
        d, largest = chains.empty(20, 72), chains.empty(20, dtype=F32)
        chains.check(chains.softmax_gemm, [chains.half(rng, 20, 64), chains.half(rng, 64, 72), d, largest], gk.Mapping(kernel=kernel))


@gk.program
def layers(x: Any, w: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for layer in gp.sequential(w.count):
            h[:] = gp.maximum(h @ w[layer], 0.1).astype(x.dtype)
        y[m] = h


@gk.program
def summed_transposed(x: Any, w: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        out = gp.zeros(m, w.rows)
        for layer in gp.sequential(w.count):
            out += x[m] @ w[layer].T
        y[m] = out


@pytest.mark.kin(1)
@pytest.mark.parametrize("kernel", KERNELS)
def test_layers(kernel: str) -> None:
    """K of 72 is five steps of 16, the last of them half zeros; of 24 lines of a transposed operand 32 are brought."""
    rng, mapping = np.random.default_rng(2), gk.Mapping(kernel=kernel)
    for width in (16, 48, 80, 112):
        x, w, y = chains.half(rng, 70, width), chains.half(rng, 3, width, width, scale=width ** -0.5), chains.empty(70, width)
        chains.check(layers, [beside(x, rng), beside(w, rng), y], mapping)
    for k, n in ((64, 64), (72, 40), (8, 72), (40, 24), (80, 80), (104, 136)):
        x, w, y = chains.half(rng, 70, k), chains.half(rng, 3, k, n, scale=k ** -0.5), chains.empty(70, n)
        chains.check(chains.summed, [beside(x, rng), beside(w, rng), y], mapping)
        chains.check(summed_transposed, [beside(x, rng), beside(np.ascontiguousarray(w.transpose(0, 2, 1)), rng), y], mapping)


@gk.program
def biased_layers(x: Any, w: Any, b: Any, y: Any, z: Any) -> None:
    """What zeros fill up is no zero behind a layer, and is in no sum."""
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for layer in gp.sequential(w.count):
            h[:] = gp.tanh(h @ w[layer].T + b[layer]).astype(x.dtype)
        y[m] = h
        z[m] = (h * h + 1.0).sum(axis=1)


@gk.program
def exponentials(x: Any, w: Any, y: Any, z: Any) -> None:
    for m in gp.parallel(x.rows):
        out, total = gp.zeros(m, w.columns), gp.zeros(m)
        for layer in gp.sequential(w.count):
            p = gp.exp(0.25 * (x[m] @ w[layer]))
            total += p.sum(axis=1)
            out += p.astype(x.dtype) @ w[layer]
        y[m], z[m] = out, total


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [8, 24, 40, 72, 104, 120])
def test_layers_that_end_within_a_step(width: int, kernel: str) -> None:
    """A product sums over whole steps of 16 columns, of which zeros are the last ones."""
    rng, mapping = np.random.default_rng(width), gk.Mapping(kernel=kernel)
    x, w, b = beside(chains.half(rng, 70, width), rng), beside(chains.half(rng, 3, width, width, scale=width ** -0.5), rng), chains.half(rng, 3, width)
    for program, given in ((layers, (x, w)), (biased_layers, (x, w, b)), (exponentials, (x, w))):
        y, z = beside(chains.empty(70, width), rng), chains.empty(70, dtype=F32)
        chains.check(program, [*given, y, *((z,) if program is not layers else ())], mapping)
        assert untouched(y)


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(4)
@pytest.mark.parametrize("device", [H100, A100], ids=["wgmma", "mma"])
@pytest.mark.parametrize("width", [72, 120])
def test_layers_that_end_within_a_step_do_not_spill(width: int, device: Any) -> None:
    def half(*shape: int) -> np.ndarray:
        return np.zeros(shape, F16)

    x, w, y, z = half(4096, width), half(3, width, width), half(4096, width), np.zeros(4096, F32)
    for call in (lambda: layers(x, w, y), lambda: biased_layers(x, w, half(3, width), y, z), lambda: exponentials(x, w, y, z)):
        (plan,) = recorded(call, device, zeros=False)
        usage = plan.launchable.entry().meta["usage"]
        assert usage["spill_stores"] + usage["spill_loads"] + usage["stack_bytes"] == 0


@pytest.mark.kin(1)
def test_defaults_of_heads() -> None:
    """Of 32 and 64: three warpgroups in turns, of 80 with fewer keys; of 96: two, and three stages."""
    found = {}
    with assumed(H100):
        for d in (32, 40, 64, 80, 96, 128):
            q, k, v, o = (np.zeros((16, 4096, d), F16) for _ in range(4))
            mapping = listing.attention.plan(q, k, v, o, 0.1).mapping
            stages: Any = mapping.stages
            found[d] = mapping.warpgroups, mapping.blocks["n"], stages["q"], stages["k"], mapping.turns
    three, two = (3, 128, 2, 4, True), (2, 128, 2, 3, False)
    assert found == {32: three, 40: three, 64: three, 80: (3, 96, 2, 3, True), 96: two, 128: (2, 128, 2, 2, False)}


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("d, width", [(32, 32), (40, 40), (72, 72), (80, 80), (96, 96), (136, 136), (160, 160), (224, 224), (192, 128), (8, 8)])
def test_nothing_spills(d: int, width: int, dtype: Any) -> None:
    q, k, v, o = (np.zeros((2, 4096, columns), dtype) for columns in (d, d, width, width))
    (plan,) = recorded(lambda: listing.attention(q, k, v, o, mapping=gk.Mapping(splits=1), scale=0.1, visible=chains.causal), H100, zeros=False)
    entry = plan.launchable.entry()
    assert not entry.meta["usage"]["spill_stores"] + entry.meta["usage"]["spill_loads"] + entry.meta["usage"]["stack_bytes"]
    sass = disassemble(entry.cubin)
    assert not [line for line in instructions(sass) if line.startswith(("LDL", "STL", "CALL"))]
    assert not [line for one in loops(sass) for line in written_in_flight(one)]
    multiplied = [line for line in instructions(sass) if line.startswith("HGMMA")]
    assert any(f"64x{width}x16" in line for line in multiplied)


@gk.program
def latent(q: Any, k: Any, v: Any, lengths: Any, o: Any, scale: float) -> None:
    """Decoding with latent attention, whose values are k's first 512 columns of 576: a tile has half of them."""
    for b, half, m in gp.parallel(q.count, v.counts[1], q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[b]):
            listing.online(scale * (q[b, m] @ k[b, n].T), v[b, half, n], v.dtype, best, total, out)
        o[b, half, m] = out / total


def latents(rng: np.random.Generator, batch: int, rows: int, keys: int) -> tuple[Any, ...]:
    return chains.half(rng, batch, rows, 576), chains.half(rng, batch, keys, 576), chains.empty(batch, rows, 512)


def in_halves(x: Any) -> Any:
    return x[..., :512].reshape(*x.shape[:2], 2, 256).transpose(0, 2, 1, 3)


@on_machines
def test_keys_that_are_wider_than_values_of_512(machine: Any, rng: np.random.Generator) -> None:
    batch, rows, keys = (1, 5, 40) if machine.emulated else (8, 128, 5000)
    q, k, o = map(machine.array, latents(rng, batch, rows, keys))
    lengths = machine.array(rng.integers(keys // 2, keys, batch))
    with machine.session():
        latent(q, k, in_halves(k), lengths, in_halves(o), 0.04)
    given = machine.numpy(k)
    wanted = latent.reference(machine.numpy(q), given, in_halves(given), machine.numpy(lengths), in_halves(machine.numpy(o)), 0.04)
    chains.check_close([in_halves(machine.numpy(o))], wanted, near)


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(2)
@pytest.mark.parametrize("device", [H100, A100], ids=["wgmma", "mma"])
def test_halves_of_512_columns_do_not_spill(device: Any, rng: np.random.Generator) -> None:
    """And neither do all of them in one tile. More are refused with what to write."""
    q, k, o = latents(rng, 2, 64, 300)
    with assumed(device):
        for values, results in ((in_halves(k), in_halves(o)), (k[:, None, :, :512], o[:, None])):
            usage = latent.plan(q, k, values, np.array([300, 20]), results, 0.04).launchable.entry().meta["usage"]
            assert usage["spill_stores"] + usage["spill_loads"] + usage["stack_bytes"] == 0
        with pytest.raises(gk.ConfigError, match="a product has 576 columns; .* make parts of them a stack"):
            latent.plan(q, k, k[:, None], np.array([300, 20]), np.zeros((2, 1, 64, 576), F16), 0.04)


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(2)
@pytest.mark.parametrize("device", [H100, A100], ids=["wgmma", "mma"])
@pytest.mark.parametrize("queries, mask", [(1, None), (600, gk.masks.Causal())], ids=["decode", "prefill"])
def test_latent_attention_does_not_spill(queries: int, mask: Any, device: Any) -> None:
    """One block has all columns, and keys from memory once: 36 steps of scores and 4 of values of 256 columns a warpgroup."""
    q, k = np.zeros((4, 16, queries, 576), F16), np.zeros((4, 1, 4096, 576), F16)
    first, *merging = recorded(lambda: gk.attention(q, k, k[..., :512], mask=mask), device, zeros=False)
    assert bool(merging) == (queries == 1)
    for launch in (first, *merging):
        entry = launch.launchable.entry()
        usage = entry.meta["usage"]
        assert usage["spill_stores"] + usage["spill_loads"] + usage["stack_bytes"] == 0
    assert first.mapping.blocks == {"m": 64, "n": 64 if device is H100 else 32} and first.mapping.warpgroups == 2
    if device is H100:
        counts = [[sum(f"HGMMA.64x{n}x16" in line for line in one) for n in (64, 256)] for one in loops(disassemble(
            first.launchable.entry().cubin))]
        assert counts[-1] == [36, 4]


@pytest.mark.gpu
@pytest.mark.sample(40)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(240))
def test_drawn_on_a_gpu(seed: int, kernel: str) -> None:
    gpu = MACHINES["gpu"]
    program, arrays, mapping, more = drawn(seed, kernel, large=bool(seed % 2))
    wholes = [gpu.array(whole_of(x)) for x in arrays]
    given = program.bound(tuple(whole[tuple(map(slice, x.shape))] for whole, x in zip(wholes, arrays, strict=True)), more)
    try:
        plan = program.plan(*given.values(), mapping=mapping)
    except gk.ConfigError as error:
        assert is_refusal(str(error)), error
        return
    plan.run(given)
    wanted, of_operands = program.reference(*arrays, **more), near(arrays[0])
    chains.check_close([gpu.numpy(given[name]) for name in given if name in plan.results], wanted, lambda got: max(near(got), of_operands))
    for whole, x in zip(wholes, arrays, strict=True):
        assert np.isnan(gpu.numpy(whole)[..., x.shape[-1]:].astype(F32)).all()


@pytest.mark.gpu
@pytest.mark.sample(6)
@pytest.mark.parametrize("d, width", [*((d, d) for d in HEADS), (192, 128), (128, 192), (72, 8), (8, 256)])
def test_many_tiles_on_a_gpu(d: int, width: int) -> None:
    """By default, and as many tiles and rounds as go around all stages. Rows of an odd number of columns have one beside them:
    no kernel copies rows that begin at multiples of 2 bytes alone."""
    gpu, rng = MACHINES["gpu"], np.random.default_rng(d)
    wholes = [chains.half(rng, 24, rows, columns + columns % 2) for rows, columns in ((1500, d), (2100, d), (2100, width))]
    q, k, v = (whole[..., :columns] for whole, columns in zip(wholes, (d, d, width)))
    for visible in (None, chains.causal):
        o = gpu.array(chains.empty(24, 1500, width))
        given = [gpu.array(whole)[..., :x.shape[-1]] for whole, x in zip(wholes, (q, k, v))]
        listing.attention(*given, o, d ** -0.5, visible=visible)
        chains.check_close([gpu.numpy(o)], listing.attention.reference(q, k, v, np.empty(o.shape), d ** -0.5, visible=visible), near)
