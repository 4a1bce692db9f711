"""Graphene's fused kernels as specs (`examples.fused_specs`): emulated on small problems, compiled at the paper's sizes, on a
GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from examples import fused_specs
from gemmkit import specs
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.compile import disassemble, instruction_counts, to_ptx
from gemmkit.runtime.device import H100
from gemmkit.specs import NoAtom, T, instruction
from gemmkit.specs.tensors import WARPGROUP
from tests.ptx_machine.launch import run_ptx
from tests.specs.test_atoms import on_gpu as as_they_lie
from tests.support.harness import aligned

F16 = np.float16


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return aligned((scale * rng.standard_normal(shape)).astype(F16))


def emulated(kernel: Any, *arrays: np.ndarray) -> np.ndarray:
    arrays[-1][...] = np.nan
    with gk.emulate(seed=4):
        kernel(*arrays)
    return arrays[-1].astype(float)


def on_gpu(kernel: Any, *arrays: np.ndarray) -> np.ndarray:
    arrays[-1][...] = np.nan
    as_they_lie(kernel, *arrays)
    return arrays[-1].astype(float)


def interpreted(kernel: Any, *arrays: np.ndarray) -> np.ndarray:
    """What it is compiled to, in the interpreter of PTX."""
    arrays[-1][...] = np.nan
    infos = [describe(x, "x") for x in arrays]
    sizes = {of.name: size for form, x in zip(kernel.forms, arrays) for of, size in zip(form.names, x.shape) if of is not None}
    made = kernel._kernel(sizes)
    launchable = made.launchable((False,) * len(infos), infos, H100)
    ptx = to_ptx(made.function, tuple(x.type for x in launchable.arguments), made.threads, H100)
    run_ptx(ptx, made.threads, made.blocks, launchable.values, arrays, made.shared_bytes)
    return arrays[-1].astype(float)


GPU = pytest.param(on_gpu, marks=pytest.mark.gpu)
RUNS = pytest.mark.parametrize("run", [emulated, GPU], ids=["emulator", "gpu"])
#: The interpreter has no wgmma.
RUNS_AND_PTX = pytest.mark.parametrize("run", [emulated, pytest.param(interpreted, marks=pytest.mark.compile), GPU], ids=["emulator", "ptx", "gpu"])


@RUNS
@pytest.mark.parametrize(("layers", "rows"), [(2, 40), (3, 130)])
def test_mlp(run: Any, layers: int, rows: int, rng: np.random.Generator) -> None:
    """Rows in any number; the last block's are predicated."""
    x, weights, biases = normal(rng, rows, 128), normal(rng, 128 * layers, 128, scale=0.125), normal(rng, layers, 128)
    found = run(fused_specs.mlp(layers), x, weights, biases, np.zeros_like(x))
    np.testing.assert_allclose(found, fused_specs.mlp_reference(x, weights, biases), rtol=2e-3, atol=1e-2)


@RUNS
@pytest.mark.parametrize(("case", "sizes"), [((64, 32, 2, "col", 2), (100, 72, 200)), ((128, 64, 3, "row", 2), (200, 136, 71)),
                                             ((64, 64, 4, "row", 3), (1, 7, 1))], ids=str)
def test_product(run: Any, case: tuple, sizes: tuple, rng: np.random.Generator) -> None:
    """Views of lines of a multiple of 16 bytes, some of them at 16 bytes and no more."""
    (m, n, k), order = sizes, case[3]
    a, b = normal(rng, m, k + -k % 8 + 8)[:, 8:k + 8], normal(rng, *((n, k + 8 + -k % 8) if order == "col" else (k, n + 8 + -n % 8)))
    b = b[:, 8:k + 8].T if order == "col" else b[:, :n]
    found = run(fused_specs.product(*case), a, b, np.zeros((m, n), np.float32))
    np.testing.assert_allclose(found, a.astype(float) @ b.astype(float), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["row", "col"])
def test_product_of_every_phase(order: str, rng: np.random.Generator) -> None:
    """Each block goes often round the ring, and its last tiles reach over both edges."""
    a, b = normal(rng, 2000, 2072, scale=0.1), normal(rng, 2072, 3000, scale=0.1)
    b = np.asfortranarray(b) if order == "col" else b
    found = on_gpu(fused_specs.product(order=order), a, b, np.zeros((2000, 3000), np.float32))
    np.testing.assert_allclose(found, a.astype(np.float32) @ b.astype(np.float32), atol=1e-3)


@RUNS
@pytest.mark.parametrize(("case", "sizes"), [((64, 64, 2, "row", 2), (100, 72, 136, 64)), ((128, 64, 3, "col", 2), (130, 136, 72, 208)),
                                             ((64, 64, 4, "row", 1), (1, 8, 8, 200))], ids=str)
def test_lstm(run: Any, case: tuple, sizes: tuple, rng: np.random.Generator) -> None:
    """K of both products differ, and are no multiples of a step."""
    m, n, k, j = sizes
    a, b, x, y, bias = normal(rng, m, k), normal(rng, k, n), normal(rng, m, j), normal(rng, j, n), normal(rng, 1, n)
    if case[3] == "col":
        b, y = (aligned(np.ascontiguousarray(w.T)).T for w in (b, y))
    found = run(fused_specs.lstm(*case), a, b, x, y, bias, aligned(np.zeros((m, n), F16)))
    np.testing.assert_allclose(found, fused_specs.lstm_reference(a, b, x, y, bias), rtol=2e-3, atol=1e-2)


@RUNS_AND_PTX
@pytest.mark.parametrize(("rows", "columns"), [(5, 256), (4, 512), (1, 1024)])
def test_layernorm(run: Any, rows: int, columns: int, rng: np.random.Generator) -> None:
    x, gamma, beta = normal(rng, rows, columns), normal(rng, columns), normal(rng, columns)
    found = run(fused_specs.layernorm(columns), x, gamma, beta, np.zeros_like(x))
    np.testing.assert_allclose(found, fused_specs.layernorm_reference(x, gamma, beta), rtol=2e-3, atol=4e-3)


@RUNS_AND_PTX
@pytest.mark.parametrize(("heads", "keys"), [(2, 64), (1, 128)])
def test_attention(run: Any, heads: int, keys: int, rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, heads, keys, 64) for _ in range(3))
    found = run(fused_specs.attention(keys), q, k, v, np.zeros_like(q))
    np.testing.assert_allclose(found, fused_specs.attention_reference(q, k, v), atol=4e-3)


@pytest.mark.gpu
def test_at_the_papers_sizes(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, 512, 384, 64) for _ in range(3))
    found = on_gpu(fused_specs.attention(384), q, k, v, np.zeros_like(q))
    np.testing.assert_allclose(found[::100], fused_specs.attention_reference(q[::100], k[::100], v[::100]), atol=4e-3)
    x, weights, biases = normal(rng, 16384, 128), normal(rng, 2560, 128, scale=0.125), normal(rng, 20, 128)
    some = slice(0, 16384, 321)
    found = on_gpu(fused_specs.mlp(20), x, weights, biases, np.zeros_like(x))
    wanted = fused_specs.mlp_reference(x[some], weights, biases)
    assert np.linalg.norm(found[some] - wanted) < 4e-3 * np.linalg.norm(wanted)


# -- compiled at the paper's sizes -----------------------------------------------------------------------------------------

@pytest.mark.compile
@pytest.mark.sample(3)
@pytest.mark.parametrize(("kernel", "most", "needed"), [
    (fused_specs.mlp(20), 168, {"HGMMA": 8, "LDGSTS": 16}), (fused_specs.lstm(), 168, {"HGMMA": 4, "UTMALDG": 10}),
    (fused_specs.product(), 168, {"HGMMA": 4, "UTMALDG": 2}), (fused_specs.product(order="row"), 168, {"HGMMA": 4, "UTMALDG": 5}),
    (fused_specs.layernorm(1024), 80, {"SHFL": 10}), (fused_specs.attention(384), 200, {"HMMA": 64, "LDSM": 36}),
], ids=["mlp", "lstm", "product", "product, B by rows", "layernorm", "attention"])
def test_compiled(kernel: Any, most: int, needed: dict) -> None:
    code = kernel.compile()
    assert code.usage.spill_stores == code.usage.spill_loads == code.usage.stack_bytes == 0 and code.usage.registers <= most
    counts = instruction_counts(disassemble(code.cubin))
    assert all(counts[name] >= count for name, count in needed.items()), {name: counts[name] for name in needed}


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    fused_specs.main()
    said = capsys.readouterr().out
    assert all(f"{name}: largest difference" in said for name in ("mlp", "layernorm", "product", "attention"))


# -- refused ---------------------------------------------------------------------------------------------------------------

SUMS = T[64, 32].fp32.WR


@pytest.mark.parametrize(("given", "words"), [
    (("UnaryPointwise", fused_specs.relu, specs.WARP, SUMS, SUMS), "32 threads execute it, not 128"),
    (("UnaryPointwise", fused_specs.relu, WARPGROUP, SUMS, T[64, 64].fp32.WR), r"\[64,32\].fp32.WR goes to \[64,64\].fp32.WR"),
    (("UnaryPointwise", 3, WARPGROUP, SUMS, SUMS), "3 is no function of one number"),
    (("Move", WARPGROUP, T[1, 64].fp16.GL, SUMS), r"the source is \[1,64\].fp16.GL, not \[1,32\]"),
    (("Move", WARPGROUP, SUMS, T[64, 64].fp16.SH), r"the destination is \[64,64\].fp16.SH, not \[64,32\]"),
])
def test_no_instruction(given: tuple, words: str) -> None:
    with pytest.raises(NoAtom, match=words):
        instruction(*given)


def test_rows_that_do_not_fit() -> None:
    with gk.emulate(), pytest.raises(ValueError, match=r"Y has shape \(41, 128\), and M is 40 in X"):
        fused_specs.mlp(1)(np.zeros((40, 128), F16), np.zeros((128, 128), F16), np.zeros((1, 128), F16), np.zeros((41, 128), F16))


FACTOR = np.float32(0.5)


def halved(x: Any) -> Any:
    return x * FACTOR


@specs.kernel(grid=(1,), block=(32,))
def scaled(blocks: Any, threads: Any, X: T[32].fp32.GL) -> None:  # type: ignore[name-defined]
    part = X.tile(1)[threads.indices()[0]]
    specs.UnaryPointwise(halved, threads.scalar(), part, part)


@pytest.mark.parametrize("where", ["emulated", "compiled"])
def test_functions_that_refer_to_numpys_numbers(where: str) -> None:
    """They were 0 in compiled kernels."""
    with gk.emulate(), pytest.raises((NoAtom, gk.ComponentError), match="refers to NumPy's numbers or to arrays; write Python's numbers"):
        scaled(np.ones(32, np.float32)) if where == "emulated" else scaled.compile()
