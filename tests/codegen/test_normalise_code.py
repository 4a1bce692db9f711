"""Normalised rows of D as compiled: values of the PTX of both passes, registers, spills, and that wgmmas stay asynchronous."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import Default, LayerNorm, RMSNorm, Softmax
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble, instruction_counts
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.codegen.test_reductions_code import groups, machine_code
from tests.kernels.common.test_normalise import EPS, KINDS, QUARTER, ending, expected, operands, same
from tests.ptx_machine.launch import Ptx
from tests.support.joined import F16, F32, config, dtype_of
from tests.support.machines import poison


@pytest.mark.kin(2)
@pytest.mark.compile
@pytest.mark.sample(24)
@pytest.mark.parametrize("family", ["singlestage", "multistage"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "N"), [(RowMajor(F32), 21), (RowMajor(F32), 72), (RowMajor(F16), 72), (ColMajor(F32), 45)], ids=str)
def test_what_was_compiled_computes(family: str, kind: str, d: Any, N: int) -> None:
    """The PTX of both kernels, all threads in step, against NumPy in float64."""
    a, b, product = operands((35, N, 9), dtype_of(family))
    gain, bias = np.random.default_rng(3).standard_normal((2, N)).astype("f4")
    out = poison(product.shape, d.dtype, "F" if d.axis == 0 else "C")
    with Ptx().session():
        gk.matmul(a, b, out=out, conf=config(family, d=d), epilogue=QUARTER | ending(kind, gain, bias))
    same(out, expected(kind, product, gain, bias), 4e-3 if d.dtype == F16 else 3e-6)


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_hoppers_kernel_spills_nothing_and_waits_as_the_plain_product(kind: str, size: int) -> None:
    gain = np.empty(size, np.float16)
    norms = {"softmax": Softmax(), "rms": RMSNorm(gain, EPS), "layer": LayerNorm(gain, gain, EPS)}
    _, plain, _ = machine_code(size)
    usage, counts, behind = machine_code(size, epilogue=norms[kind])
    assert usage["spill_stores"] == 0 and len(behind) == 1 and behind[0].launchable.entry().meta["usage"]["spill_stores"] == 0
    assert groups(counts) == groups(plain)
    assert sum(n for name, n in counts.items() if "HGMMA" in name) == sum(n for name, n in plain.items() if "HGMMA" in name)


@pytest.mark.kin(2)
@pytest.mark.compile
@pytest.mark.sample(12)
@pytest.mark.parametrize(("N", "tile", "schedule", "blocks"), [(1024, (128, 256), "cooperative", 4), (2048, (128, 256), "cooperative", 8),
                                                               (512, (64, 256), "pingpong", 2), (512, (128, 128), "pingpong", 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_exchanges_states_of_its_rows(kind: str, N: int, tile: tuple[int, int], schedule: str, blocks: int) -> None:
    """Nothing spills, nothing waits for the memory of the whole GPU but where the cluster meets, there is no second pass, and the
    multiplication waits as that of the plain product of the same mapping."""
    gain = np.empty(N, np.float16)
    epilogues = {"softmax": Softmax(), "rms": RMSNorm(gain, EPS), "layer": LayerNorm(gain, gain, EPS)}
    counts = {}
    for epilogue in (Default(), epilogues[kind]):
        conf = gk.get_config(operator=WGMMAOp(tile[1]), block_shape=Tile(M=tile[0], N=tile[1], K=64), warps_per_block=8, schedule=schedule,
                             cluster=Tile(M=1, N=blocks), global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16),
                             global_d_layout=RowMajor(F16), epilogue=epilogue, gemm_shape=dict(M=8192, N=N, K=4096))
        a, b, d = (np.empty(shape, F16) for shape in ((8192, 4096), (4096, N), (8192, N)))
        (found,) = recorded(lambda conf=conf, a=a, b=b, d=d: gk.matmul(a, b, out=d, conf=conf), H100, zeros=False)  # type: ignore[misc]
        entry = found.launchable.entry()
        assert entry.meta["usage"]["spill_stores"] == 0
        counts[type(epilogue)] = instruction_counts(disassemble(entry.cubin), full=True)
    plain, normed = counts[Default], counts[type(epilogues[kind])]

    def count(of: dict[str, int], word: str) -> int:
        return sum(n for name, n in of.items() if word in name)

    assert groups(normed) == groups(plain) and count(normed, "HGMMA") == count(plain, "HGMMA")
    assert count(normed, "MEMBAR.ALL.GPU") == count(plain, "MEMBAR.ALL.GPU")
    assert count(normed, "STAS") >= 2 > count(plain, "STAS")
