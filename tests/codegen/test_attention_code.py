"""The machine code of attention, without a GPU: nothing spills, a group of products signals once, and no register of P is written
while a product reads it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.ahead import recorded
from gemmkit.masks import Causal, Documents, Window
from gemmkit.runtime.assemble import disassemble
from gemmkit.runtime.device import H100
from gemmkit.scores import ALiBi, SoftCap
from tests.support.machines import BF16

F16 = np.dtype(np.float16)
pytestmark = [pytest.mark.compile, pytest.mark.sample(30)]


def launch(head_dim: int, dtype: Any = F16, packed: bool = False, **keywords: Any) -> Any:
    x = [np.zeros((1, 256, head_dim) if packed else (1, 1, 256, head_dim), dtype) for _ in range(3)]
    if packed:
        keywords["lengths"] = [0, 100, 256], [0, 100, 256]
    return recorded(lambda: gk.attention(*x, **keywords), H100)[0]


HALF = np.float32(0.5)
CASES: dict[str, Callable[[], Any]] = {
    **{f"{d}{' causal' if mask else ''} {dtype}": lambda d=d, mask=mask, dtype=dtype: launch(d, dtype, mask=mask)
       for d in (32, 64, 96, 128, 192, 256) for mask in (None, Causal()) for dtype in (F16, BF16)},
    **{f"{d} logarithms, window": lambda d=d: launch(d, mask=Window(100), return_lse=True) for d in (64, 128, 256)},
    **{f"{d} documents, causal": lambda d=d: launch(d, mask=Documents.of([0, 100, 256]) & Causal()) for d in (64, 128)},
    **{f"{d} function": lambda d=d: launch(d, score=lambda s, m, n: s - HALF * abs(m - n)) for d in (64, 128)},
    **{f"{d} alibi, causal": lambda d=d: launch(d, score=ALiBi(np.zeros(1, np.float32)), mask=Causal()) for d in (64, 128)},
    **{f"{d} soft cap": lambda d=d: launch(d, score=SoftCap(30.0)) for d in (64, 128, 256)},
    **{f"{d} packed": lambda d=d: launch(d, packed=True, mask=Causal()) for d in (64, 128, 256)},
}


def loops(sass: str) -> list[list[str]]:
    """The innermost loops with products."""
    places: dict[str, int] = {}
    lines: list[str] = []
    found: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(lines)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", line):
            lines.append(code[1])
            back = re.match(r"BRA `\((\.L_x_\d+)\)", code[1])
            if back and back[1] in places and any(x.startswith("HGMMA") for x in lines[places[back[1]]:]):
                found.append((places[back[1]], len(lines)))
    return [lines[a:b] for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]


def written_in_flight(loop: list[str]) -> list[str]:
    """Instructions that write a register of A while a product that reads it is on its way, in a round or the next one."""
    bad, pending = [], [set[int]()]
    for line in 2 * loop:
        if waits := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line):
            pending = pending[len(pending) - 1 - int(waits[1]):] if int(waits[1]) < len(pending) - 1 else pending
        elif line.startswith("HGMMA"):
            if reads := re.match(r"HGMMA\S* R\d+, -?R(\d+), gdesc", line):
                pending[-1] |= set(range(int(reads[1]), int(reads[1]) + 4))
            if "gsb0" in line:
                pending.append(set())
        elif writes := re.match(r"(?!ST|RED|BAR|SYNCS)\S+ R(\d+)[.,]", line):
            wide = 4 if re.match(r"\S*(\.128|M88\.4)", line) else 2 if re.match(r"\S*(\.64|\.WIDE)", line) else 1
            if any(set(range(int(writes[1]), int(writes[1]) + wide)) & each for each in pending):
                bad.append(line)
    return bad


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    made = CASES[name]()
    entry, spec = made.launchable.entry(), made.spec
    usage = entry.meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
    sass = disassemble(entry.cubin)
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", sass)
    assert not [line for line in lines if line.startswith(("LDL", "STL", "CALL"))]
    # One group for S and one for O of each round: three kinds of rounds at most, a tile's first, and one of each alone.
    rounds = 1 + 2 * (spec.tests_above + spec.mask.has_free + spec.tests_below + 1) + 1
    products = [line for line in lines if line.startswith("HGMMA")]
    assert sum("gsb0" in line for line in products) == rounds
    both = (rounds - 2) // 2 + 1
    assert len(products) == both * (spec.qk_steps + spec.pv_steps)
    found = loops(sass)
    assert found and not any(written_in_flight(loop) for loop in found)
    weights = spec.values_s * both                                      # exponentials, and no library's in their place
    assert sum(line.startswith("MUFU.EX2") for line in lines) >= weights
    assert any(line.startswith("UTMASTG") for line in lines) == spec.store.uses_tma


@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (10, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_machine_code_by_warps(head_dim: int, arch: tuple[int, int]) -> None:
    """On GPUs without wgmma: nothing spills, shared memory is there, and every product is a tensor core's."""
    device = dataclasses.replace(H100, arch=arch, name="another GPU")
    x = [np.zeros((1, 1, 256, head_dim), F16) for _ in range(3)]
    made = recorded(lambda: gk.attention(*x, mask=Causal()), device)[0]
    entry, spec = made.launchable.entry(), made.spec
    assert entry.meta["usage"]["spill_stores"] == entry.meta["usage"]["stack_bytes"] == 0 and spec.shared_bytes <= 99 << 10
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;\n]*;)", disassemble(entry.cubin))
    blocks = 3                                                          # the first of a tile, tested ones, free ones
    assert sum(line.startswith("HMMA") for line in lines) == blocks * 2 * (head_dim // 16) * (spec.block_n // 16) * 2
    assert not any(line.startswith(("LDL", "STL")) for line in lines)   # (a division of whole numbers is a CALL on some)


def test_another_scale_window_or_array_compiles_nothing() -> None:
    from gemmkit.ahead import kernel_of

    kinds = {kernel_of(launch(64, mask=Window(left), score=SoftCap(cap), scale=scale).launchable)
             for left, cap, scale in ((10, 5.0, 1.0), (200, 50.0, 0.1))}
    assert len(kinds) == 1
