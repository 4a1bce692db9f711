"""The PTX of derived kernels without wgmma, run without a GPU (`tests.ptx_machine`): it computes what the references do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.runtime.device import assumed
from tests.ptx_machine.launch import Ptx
from tests.support import chains
from tests.support import programs as listing
from tests.unit.programs import test_roles as roles
from tests.unit.programs.test_multistage import A100, RTX, aligned, drawn, empty, heads

F32 = np.float32
pytestmark = pytest.mark.compile


def computed(program: Any, arrays: list[np.ndarray], mapping: gk.Mapping, device: Any = A100, **more: Any) -> None:
    arguments = program.bound(tuple(arrays), more)
    with assumed(device):
        plan = program.plan(*arrays, mapping=listing.multistage(mapping), **more)
        with Ptx().session():
            plan.run(arguments)
    results = [arguments[name] for name in arguments if name in plan.results]
    wanted = program.reference(*arrays, **more)
    chains.check_close(results, wanted, lambda got: 2e-2 if more.get("score") else 3e-3)
    chains.check_infinite(results, wanted)


SMALL, DOUBLED = gk.Mapping({"n": 64}, warpgroups=1), gk.Mapping({"m": 128, "n": 64}, warpgroups=1, stages=3)
# Program, arrays, mapping, what it is given besides.
CASES: dict[str, tuple[Any, Any, gk.Mapping, dict[str, Any]]] = {
    "gemm": (listing.gemm, lambda: [drawn(70, 136), drawn(136, 72), empty(70, 72)], SMALL, {}),
    "gemm of twice the rows": (listing.gemm, lambda: [drawn(150, 136), drawn(136, 72), empty(150, 72)], DOUBLED, {}),
    "clipped": (listing.gemm, lambda: [aligned(70, 71, 8), aligned(71, 67, 8), empty(70, 67)], SMALL, {}),
    "8 bytes": (listing.gemm, lambda: [aligned(70, 72, 4), aligned(72, 68, 4), empty(70, 68)], SMALL, {}),
    "4 bytes, clipped": (listing.gemm, lambda: [aligned(70, 71, 2), aligned(71, 67, 2), empty(70, 67)], DOUBLED, {}),
    "transposed": (listing.transposed, lambda: [drawn(72, 72), drawn(67, 72), empty(72, 67)], SMALL, {}),
    "dual of twice the rows": (listing.dual, lambda: [drawn(100, 72), drawn(72, 72, scale=0.1), drawn(72, 72, scale=0.1), empty(100, 72)],
                               DOUBLED, dict(gate=listing.silu_times)),
    "two loops": (listing.lstm, lambda: [drawn(70, 72), drawn(72, 72, scale=0.1), drawn(70, 40), drawn(40, 72, scale=0.1), drawn(72),
                                         empty(70, 72)], SMALL, {}),
    "stack": (listing.batched, lambda: [drawn(2, 70, 72), drawn(72, 72), drawn(2), drawn(2, 72), empty(2, 70, 72), empty(2, 70, dtype=F32)],
              SMALL, {}),
    "residual": (listing.residual, lambda: [drawn(70, 72), drawn(72, 72), drawn(70, 72), empty(70, 72), empty(70, 72, dtype=F32)], SMALL, {}),
    "both operands, and added": (roles.polynomial, roles.TILES["polynomial"][1], SMALL, {}),
    "self attention": (roles.self_attention, roles.CHAINS["attention"][1], gk.Mapping({"n": 32}), dict(scale=0.2)),
    "attention": (listing.attention, lambda: heads(2, 70, 90), gk.Mapping(stages=2), dict(scale=0.125)),
    "causal by two": (listing.attention, lambda: heads(1, 140, 90), gk.Mapping({"n": 48}, warpgroups=2), dict(scale=0.125, visible=chains.causal)),
    "heads of 96": (listing.attention, lambda: heads(1, 33, 70, 96), gk.Mapping(), dict(scale=0.125, visible=chains.window)),
    "chain": (chains.gated_chain, lambda: [drawn(70, 64), drawn(90, 64, scale=0.1), drawn(70), drawn(90, 64), empty(70, 64)], gk.Mapping(), {}),
    "mlp": (listing.mlp, lambda: [drawn(70, 64), drawn(3, 64, 64, scale=0.125), drawn(3, 64), empty(70, 64)], gk.Mapping(), {}),
    "softmax behind a product": (chains.softmax_gemm, lambda: [drawn(70, 72), drawn(72, 64, scale=0.3), empty(70, 64), empty(70, dtype=F32)],
                                 gk.Mapping({"k": 32}), {}),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("device", [A100, RTX], ids=lambda device: device.arch_name)
@pytest.mark.parametrize("name", CASES)
def test_what_was_compiled_computes(name: str, device: Any) -> None:
    program, made, mapping, more = CASES[name]
    computed(program, made(), mapping, device, **more)


@pytest.mark.sample(40)
@pytest.mark.parametrize("draw", [listing.drawn_case, chains.drawn_case, chains.drawn_lengths], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("seed", range(40))
def test_drawn(draw: Any, seed: int) -> None:
    program, arrays, mapping, more = draw(seed)
    try:
        computed(program, arrays, mapping, **more)
    except gk.ConfigError as error:
        assert "bytes of shared memory" in str(error)
