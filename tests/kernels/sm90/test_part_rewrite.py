"""Operands that a cluster's blocks share and rewrite, each a part for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.sm90 import rewrite
from gemmkit.kernels.sm90.mainloop import RegisterMainloop
from gemmkit.kernels.sm90.rewrite import PartRewrite, RewriteProducer
from gemmkit.layouts import ColMajor, RowMajor, Triangular
from gemmkit.operators import WGMMAOp
from gemmkit.transforms import Elementwise
from tests.kernels.sm90.test_rewrite import ACROSS, spec_of, whole
from tests.support.machines import on_machines
from tests.support.sm90 import F16, F32, mapping, product

MORE = {
    "one-2x1": "b", "pingpong-2x1": "b", "one-1x2": "a", "pingpong-1x2": "a", "two-2x2": "ab", "pingpong-2x2": "ab",
}


def routes(spec: Any) -> str:
    return "".join(name for name, x in (("a", spec.a), ("b", spec.b)) if type(x.route) is PartRewrite)


@pytest.mark.kin(4)
@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("orders", ACROSS)
@pytest.mark.parametrize("schedule", MORE)
def test_each_block_rewrites_a_part(machine: Any, schedule: str, orders: str, rng: np.random.Generator) -> None:
    """With edges along M, N and K, and coordinates, which tell a part's place."""
    a_kind, b_kind = ACROSS[orders]
    at = Elementwise(lambda x, i, j: x + (i + 2 * j) % 3)
    fields = {f"transform_global_to_shared_{which}": at for which in MORE[schedule]}
    conf = mapping(schedule, WGMMAOp(32), a=a_kind, b=b_kind, **fields)
    m, n, k = 144, 40, 200
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    spec = spec_of(conf, a, b)
    assert routes(spec) == MORE[schedule] and spec.producer.sent_bytes > 0

    def changed(which: str, x: np.ndarray) -> np.ndarray:
        i, j = np.indices(x.shape)
        return x.astype(F32) + ((i + 2 * j) % 3 if which in MORE[schedule] else 0)

    assert np.array_equal(product(machine, conf, a, b), changed("a", a) @ changed("b", b))


@pytest.mark.kin(4)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("b_kind", [RowMajor, ColMajor])
def test_a_by_registers_beside_it(machine: Any, stages: int, b_kind: Any, rng: np.random.Generator) -> None:
    """Table 2's last row: A is transformed by the consumers, B a half by each block; pairs at once, and an epilogue."""
    both = {f"transform_global_to_shared_{x}": Elementwise(lambda x: x + 1) for x in "ab"}
    conf = mapping("two-2x1", a=RowMajor, b=b_kind, stages=stages, **both)
    a, b = whole(rng, (256, 264), F16), whole(rng, (264, 40), F16)
    spec = spec_of(conf, a, b)
    assert isinstance(spec.mainloop, RegisterMainloop) and routes(spec) == "b"
    assert isinstance(spec.producer, RewriteProducer) and spec.producer.teams == (2 if stages == 6 else 1)
    assert np.array_equal(product(machine, conf, a, b), (a + F32.type(1)) @ (b + F32.type(1)))


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("k", [0, 8, 64, 72])
def test_few_stages(machine: Any, k: int, rng: np.random.Generator) -> None:
    conf = mapping("two-2x1", transform_global_to_shared_b=Elementwise(lambda x: x + 1))
    a, b = whole(rng, (264, k), F16), whole(rng, (k, 40), F16)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ (b.astype(F32) + 1))


@pytest.mark.kin(4)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("transform", [None, lambda x: x + x])
def test_a_mask_that_leaves_parts_as_they_are(machine: Any, transform: Any, rng: np.random.Generator) -> None:
    """They are sent, too."""
    fields = {} if transform is None else {"transform_global_to_shared_b": Elementwise(transform)}
    conf = mapping("one-2x1", b=lambda dtype: Triangular(ColMajor(dtype), "lower"), **fields)
    a, b = whole(rng, (150, 136), F16), whole(rng, (136, 136), F16)
    assert routes(spec_of(conf, a, b)) == "b"
    factor = 1 if transform is None else 2
    assert np.array_equal(product(machine, conf, a, np.where(np.tri(136, dtype=bool), b, np.nan).astype(F16)),
                          factor * a.astype(F32) @ np.tril(b.astype(F32)))


def test_words_that_are_not_sent_are_missed(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator says at which barrier the block waits for ever."""
    monkeypatch.setattr(rewrite, "send", lambda *given: None)
    conf = mapping("one-2x1", transform_global_to_shared_b=Elementwise(lambda x: x + 1))
    a, b = whole(rng, (128, 64), F16), whole(rng, (64, 32), F16)
    out = np.full((128, 32), np.nan, F32)
    with gk.emulate(), pytest.raises(EmulatorError, match="lacks 0 of 65 arrivals and 2048 bytes"):
        gk.matmul(a, b, None, conf, out=out)


def test_what_a_part_refuses(rng: np.random.Generator) -> None:
    """Without a cluster, or along the other axis, a block rewrites its whole tile."""
    at = Elementwise(lambda x: x + 1)
    a, b = whole(rng, (128, 64), F16), whole(rng, (64, 32), F16)
    for schedule, which in (("one", "b"), ("one-2x1", "a"), ("one-1x2", "b")):
        spec = spec_of(mapping(schedule, **{f"transform_global_to_shared_{which}": at}), a, b)
        assert routes(spec) == ""
