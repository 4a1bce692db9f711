"""The machine code of derived kernels without wgmma, without a GPU: nothing spills, a round has the tensor cores' instructions and
the loads that its products need, and no two lanes meet in a bank of shared memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.plans.ahead import recorded
from gemmkit.programs import multistage
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import assumed
from tests.support import banks, chains
from tests.support import programs as listing
from tests.support.sass import instructions, loops
from tests.unit.programs.test_multistage import A100, RTX

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16


def half(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.zeros(shape, dtype)


def heads(d: int, rows: int = 1024, dtype: Any = F16) -> list[np.ndarray]:
    return [half(8, rows, d, dtype=dtype) for _ in range(4)]


def mn() -> np.ndarray:
    return half(256, 512)


TWO: dict[str, Any] = dict(blocks={"n": 128}, warpgroups=2)
# (program, its arrays, mapping, components), then of each loop: HMMA, LDSM, LDGSTS, and the most instructions.
CASES: dict[str, tuple[tuple[Any, list[Any], dict[str, Any], dict[str, Any]], list[tuple[int, int, int, int]]]] = {
    "gemm": ((listing.gemm, [mn(), half(512, 512), mn()], TWO, {}), [(32, 18, 4, 160)]),
    "gemm of bfloat16": ((listing.gemm, [half(256, 512, dtype=BF16), half(512, 512, dtype=BF16), half(256, 512, dtype=BF16)], TWO, {}),
                         [(32, 18, 4, 160)]),
    "gemm by three": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"n": 128}, warpgroups=3), {}), [(32, 18, 4, 190)]),
    "gemm of 64 along k": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"n": 128, "k": 64}, warpgroups=2, stages=2), {}), [(64, 36, 8, 260)]),
    "gemm of 256 columns": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"n": 256}, warpgroups=2), {}), [(64, 34, 6, 250)]),
    "gemm of twice the rows": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"m": 128, "n": 128}, warpgroups=1), {}),
                               [(64, 20, 8, 260)]),
    "gemm of twice the rows by two": ((listing.gemm, [mn(), half(512, 512), mn()], dict(blocks={"m": 256, "n": 128, "k": 64}, stages=2), {}),
                                      [(128, 40, 12, 440)]),
    "dual of twice the rows": ((listing.dual, [mn(), half(512, 512), half(512, 512), mn()], dict(blocks={"m": 128, "n": 64}, warpgroups=1),
                                dict(gate=listing.silu_times)), [(64, 24, 8, 260)]),
    "transposed": ((listing.transposed, [half(512, 256), half(512, 512), mn()], TWO, {}), [(32, 18, 4, 160)]),
    "dual": ((listing.dual, [mn(), half(512, 512), half(512, 512), mn()], dict(blocks={"n": 64}, warpgroups=2), dict(gate=listing.silu_times)), [(32, 20, 4, 180)]),
    "biased": ((listing.biased, [mn(), half(512, 512), half(512), half(256, dtype=F32), mn()], TWO, dict(alpha=0.5)), [(32, 18, 4, 160)]),
    "lstm": ((listing.lstm, [mn(), half(512, 512), half(256, 128), half(128, 512), half(512), mn()], TWO, {}), 2 * [(32, 18, 4, 160)]),
    "sums of rows": ((listing.product_and_sums, [mn(), half(512, 512), mn(), half(256, dtype=F32)], TWO, {}), [(32, 20, 4, 190)]),
    "zero points": ((listing.zero_points, [mn(), half(512, 512), half(256, dtype=F32), half(512, dtype=F32), half(512, dtype=F32), mn()],
                     TWO, {}), [(32, 22, 4, 300)]),
    "residual": ((listing.residual, [mn(), half(512, 512), mn(), half(256, 512), half(256, 512)], TWO, {}), [(32, 18, 4, 160)]),
    "float32 out": ((listing.gemm, [mn(), half(512, 512), half(256, 512, dtype=F32)], TWO, {}), [(32, 18, 4, 160)]),
    "gemm by default": ((listing.gemm, [half(4096, 4096) for _ in range(3)], {}, {}), [(64, 20, 8, 260)]),
    "dual by default": ((listing.dual, [half(4096, 4096) for _ in range(4)], {}, dict(gate=listing.silu_times)), [(64, 24, 8, 260)]),
    "attention of 64": ((listing.attention, heads(64), {}, dict(scale=0.125)), [(64, 36, 8, 490), (64, 36, 8, 450)]),
    "attention of 128": ((listing.attention, heads(128), {}, dict(scale=0.125)), [(128, 72, 16, 670), (128, 72, 16, 630)]),
    "attention of bfloat16": ((listing.attention, heads(128, dtype=BF16), {}, dict(scale=0.125)), [(128, 72, 16, 670), (128, 72, 16, 630)]),
    "attention of 256": ((listing.attention, heads(256), dict(blocks={"n": 32}), dict(scale=0.125)), [(128, 80, 16, 690), (128, 80, 16, 660)]),
    "causal": ((listing.attention, heads(128), {}, dict(scale=0.125, visible=chains.causal)), [(128, 72, 16, 730), (128, 72, 16, 630)]),
    "causal by two": ((listing.attention, heads(128), dict(warpgroups=2, splits=1), dict(scale=0.125, visible=chains.causal)),
                      [(128, 72, 8, 710), (128, 72, 8, 600)]),
    "chain": ((chains.gated_chain, [half(8192, 128), half(1024, 128), half(8192), half(1024, 128), half(8192, 128)], {}, {}),
              [(128, 72, 16, 470)]),
    "softmax behind a product": ((chains.softmax_gemm, [half(1024, 512), half(512, 128), half(1024, 128), half(1024, dtype=F32)], {}, {}),
                                 [(64, 36, 12, 270)]),
    "mlp": ((listing.mlp, [half(1024, 128), half(4, 128, 128), half(4, 128), half(1024, 128)], {}, {}), [(128, 64, 16, 520)]),
}


@pytest.mark.compile
@pytest.mark.sample(12)
@pytest.mark.parametrize("device", [A100, RTX], ids=lambda device: device.arch_name)
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str, device: Any) -> None:
    (program, arrays, mapping, components), wanted = CASES[name]
    made = recorded(lambda: program(*arrays, mapping=gk.Mapping(**mapping), **components), device, zeros=False)
    plan = made[0]
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    assert plan.launchable.shared_bytes <= device.shared_memory_per_block
    sass = disassemble(entry.cubin)
    lines = instructions(sass)
    assert not any(line.startswith(("LDL", "STL", "HGMMA", "UTMA")) for line in lines)
    rounds = loops(sass, "HMMA", ordinary=True)
    assert len(rounds) == len(wanted)
    counts = sorted(((*(count[what] for what in ("HMMA", "LDSM", "LDGSTS", "BAR")), len(one))
                     for one in rounds for count in [Counter(line.split()[0].split(".")[0] for line in one)]), reverse=True)
    for (products, loads, copies, barriers, length), (*exact, most) in zip(counts, wanted, strict=True):
        assert [products, copies, barriers] == [exact[0], exact[2], 1] and length <= most
        assert loads <= exact[1]                       # two products that take the same A may load it once


@pytest.mark.parametrize("name", ["gemm", "transposed", "dual", "causal", "mlp"])
@pytest.mark.parametrize("width", [32, 64])
def test_loads_and_copies_meet_in_no_bank(name: str, width: int) -> None:
    """Of lines of 64 bytes, and of 128."""
    (program, _, _, components), _ = CASES[name]
    small = {"gemm": [half(64, 128), half(128, 64), half(64, 64)], "transposed": [half(128, 64), half(64, 128), half(64, 64)],
             "dual": [half(64, 128), half(128, 64), half(128, 64), half(64, 64)], "causal": [half(1, 64, width) for _ in range(4)],
             "mlp": [half(64, width), half(2, width, width), half(2, width), half(64, width)]}[name]
    blocks = {} if name == "mlp" else {"n": 64} if name == "causal" else {"k": width}
    plan = program.plan(*small, mapping=gk.Mapping(blocks, warpgroups=1, stages=2, kernel="multistage"), **components)
    with banks.within(multistage.Copied, "matrices", "copy_vector") as inside, gk.emulate(), banks.recorded(inside) as seen:
        plan.run(program.bound(tuple(small), components))
    assert seen.loads and banks.conflicts(seen.loads) == 0
    assert seen.stores and banks.conflicts(seen.stores) == 0


@pytest.mark.compile
def test_sizes_compile_nothing_anew() -> None:
    def plan(m: int, n: int, k: int, alpha: float) -> Any:
        with assumed(A100):
            return listing.biased.plan(half(m, k), half(k, n), half(n), half(m), half(m, n), alpha=alpha, mapping=gk.Mapping({"n": 64}))

    one, other = plan(256, 512, 512, 0.5), plan(128, 1024, 64, 2.0)
    assert one.text == other.text and one.launchable.kernel is other.launchable.kernel
    assert [x.fingerprint for x in one.arguments] == [x.fingerprint for x in other.arguments]
