"""Calls that come again: what they are known by, and when they are asked for anew."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from bench import stand_ins  # noqa: E402
from gemmkit import epilogues, layouts, operators, transforms  # noqa: E402
from gemmkit.distributed import ranks as calls  # noqa: E402
from gemmkit.distributed.ranks import Repeated, key_of_call, known_call, remember  # noqa: E402
from gemmkit.distributed.transport import joins, parts_of  # noqa: E402
from gemmkit.plans.launch import Cache  # noqa: E402
from gemmkit.runtime import arrays as recognition  # noqa: E402
from gemmkit.runtime.device import H100  # noqa: E402
from gemmkit.tiling import Tile  # noqa: E402
from tests.support.patches import Seeded  # noqa: E402

DEVICE = SimpleNamespace(index=0)


class Call(Repeated):
    def __call__(self, *arrays: Any) -> Any:
        return arrays


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, replaced: Seeded) -> Any:
    """Of a process with a GPU, whose tensors are on the CPU, and have been multiplied before."""
    monkeypatch.setitem(recognition.KEYS, torch.Tensor, recognition._torch_keys())
    replaced(torch.cuda, "is_current_stream_capturing", lambda: False)
    replaced(torch.cuda, "current_device", lambda: 0)
    return SimpleNamespace(repeated=Cache(64), why_plain="of another call")


def keyed(*arrays: Any, conf: Any = None, **components: Any) -> Any:
    return key_of_call(arrays, conf, components, "call", None)


def remembered(ranks: Any, *arrays: Any, **components: Any) -> Any:
    call = Call(DEVICE, None, components)
    assert remember(ranks, keyed(*arrays, **components), call) is call
    return call


def test_a_known_call(ranks: Any) -> None:
    a, b = torch.zeros(4, 6), torch.zeros(6, 2)
    call = remembered(ranks, a, b, None)
    assert known_call(ranks, keyed(torch.ones(4, 6), b, None)) is call and ranks.why_plain is None


@pytest.mark.parametrize("other", [
    lambda a, b: keyed(a[:3], b, None), lambda a, b: keyed(a, b.T.contiguous().T, None), lambda a, b: keyed(a.half(), b, None),
    lambda a, b: keyed(a, b, torch.zeros(4, 2)), lambda a, b: keyed(a, b, None, conf=object()),
    lambda a, b: keyed(torch.zeros(25)[1:].view(4, 6), b, None), lambda a, b: keyed(a, b, None, epilogue=epilogues.ReLU()),
    lambda a, b: keyed(a.requires_grad_(), b, None),
    lambda a, b: key_of_call((a, b, None), None, {}, "another call", None)])
def test_another_call(ranks: Any, other: Any) -> None:
    """Another shape, order, dtype, configuration, component, name; a C; an address of another alignment; a gradient."""
    a, b = torch.zeros(4, 6), torch.zeros(6, 2)
    remembered(ranks, a, b, None)
    assert known_call(ranks, other(a, b)) is None and ranks.why_plain == "of another call"


def test_what_cannot_be_looked_up(ranks: Any) -> None:
    a = torch.zeros(4, 6)
    assert keyed(a, np.zeros((6, 2))) is None and key_of_call((a,), None, {}, [2, 2]) is None
    call = Call(DEVICE, None, {})
    assert remember(ranks, None, call) is call and not ranks.repeated
    assert known_call(ranks, None) is None


@pytest.mark.parametrize("where", ["captured", "device", "debug", "emulated"])
def test_what_asks_anew(ranks: Any, where: str, replaced: Seeded) -> None:
    a = torch.zeros(4, 6)
    call = remembered(ranks, a)
    assert known_call(ranks, keyed(a)) is call
    if where == "captured":
        replaced(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif where == "device":
        replaced(torch.cuda, "current_device", lambda: 1)
    elif where == "debug":
        replaced(calls.dist, "get_debug_level", lambda: calls.dist.DebugLevel.INFO)
    else:
        replaced(calls, "current_mode", lambda: object())
    assert known_call(ranks, keyed(a)) is None


def test_a_component_whose_code_changes(ranks: Any, replaced: Seeded) -> None:
    """The ranks compare it anew."""
    @dataclass(frozen=True)
    class Doubled(epilogues.Epilogue):
        def __call__(self, x: Any, m: int, n: int) -> Any:
            return x + x

    a, doubled = torch.zeros(4, 6), Doubled()
    call = remembered(ranks, a, epilogue=doubled)
    assert known_call(ranks, keyed(a, epilogue=doubled)) is call
    replaced(Doubled, "__call__", lambda self, x, m, n: 3 * x)
    assert known_call(ranks, keyed(a, epilogue=doubled)) is None and not ranks.repeated


def test_a_component_whose_memory_is_another(ranks: Any) -> None:
    a, bias = torch.zeros(4, 6), torch.ones(6)
    added = epilogues.Bias(bias.numpy())
    remembered(ranks, a, epilogue=added)
    assert known_call(ranks, keyed(a, epilogue=added)) is not None
    assert known_call(ranks, keyed(a, epilogue=epilogues.Bias(bias.numpy()))) is None


def test_a_bounded_memory(ranks: Any) -> None:
    for n in range(ranks.repeated.limit + 1):
        remembered(ranks, torch.zeros(n + 1, 2))
    assert len(ranks.repeated) == 1


# -- products ---------------------------------------------------------------------------------------------------------

class Launched:
    """A plan that writes its calls down."""

    stands = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, a: Any, b: Any, c: Any, out: Any) -> Any:
        self.calls.append((out.data_ptr(), a.data_ptr(), b.data_ptr(), 0))
        return out

    def launch(self, stream: int, at: Any) -> None:
        self.calls.append(at)


def test_rows_by_address(replaced: Seeded) -> None:
    """The first time they are multiplied, the second time planned, and launched from then on: of the same addresses."""
    made, first = Launched(), []
    replaced(calls, "multiply", lambda a, b, c, out, conf, components: first.append(
        (out.data_ptr(), a.data_ptr(), b.data_ptr(), 0)))
    replaced(calls, "plan", lambda *arrays, **keywords: made)
    for a in (torch.zeros(10, 6), torch.zeros(6, 10).T, torch.zeros(10, 16)[:, :6]):
        b, out = torch.zeros(6, 4, dtype=torch.float16), torch.zeros(8, 4, dtype=torch.float16)
        made.calls.clear(), first.clear()
        product = calls.PlannedProduct(None, {})
        for _ in range(4):
            product.into(7, a, b, out, 3, 7, 2)
        assert first * 3 == made.calls and len(first) == 1


def test_rows_in_several_arrays(replaced: Seeded) -> None:
    """Wherever the parts lie they are launched by the plan of the first. What is written may lie where parts have been, and
    not where they are."""
    launched: list[Any] = []
    with stand_ins.gpu(), stand_ins.library("cupy") as make:
        replaced(stand_ins.CupyArray, "data_ptr", lambda array: array.data.ptr, raising=False)
        replaced(calls, "multiply", lambda a, b, c, out, conf, components: gk.matmul(a, b, c, conf, out=out))
        slot, b, d = make(256, 64), make(64, 128), make(512, 128)
        conf = gk.plan(make(512, 64), b).config
        product = calls.JoinedProduct(conf, {})
        for own in (make(256, 64), make(256, 64), make(256, 64)):
            for _ in range(3):
                assert product.of_parts((own, slot), b, None, d) is d
            launched.append(own)
        assert len(product._at) == 3
        there = stand_ins.CupyArray((512, 128), "float16", launched[0].data.ptr)
        assert product.of_parts((launched[2], slot), b, None, there) is there
        with pytest.raises(ValueError, match="overlaps"):
            product.of_parts((launched[0], slot), b, None, there)


@pytest.mark.parametrize("lengths, what, expected", [
    ((128, 128), {}, True), ((256, 384, 128), {}, True), ((128, 120), {}, True), ((120, 128), {}, False), ((128, 0), {}, False),
    ((256,), {}, False), ((128, 128), dict(transform_global_to_shared_a=transforms.Map(lambda x: x + x)), False),
    ((128, 128), dict(kernel="singlestage"), False)])
def test_where_rows_are_joined(lengths: Any, what: Any, expected: bool) -> None:
    """Tiles of 128 rows are of one shard each; a shard at an odd address, or of strided rows, is copied."""
    operator = operators.MMAOp() if what.get("kernel") else operators.WGMMAOp(128)
    conf = gk.get_config(operator=operator, global_a_layout=layouts.RowMajor("f2"), device=H100, gemm_shape=dict(M=256, N=256, K=64),
                         block_shape=Tile(M=128, N=128, K=64), **what)
    shard = torch.zeros(128, 64, dtype=torch.float16)
    assert joins(conf, shard, lengths) is expected
    assert not joins(conf, torch.zeros(128 * 64 + 1, dtype=torch.float16)[1:].view(128, 64), lengths)
    assert not joins(conf, torch.zeros(128, 128, dtype=torch.float16)[:, :64], lengths)


def test_parts() -> None:
    whole = torch.arange(6.0).view(6, 1)
    found = [[None if part is None else part.view(-1).tolist() for part in parts_of(whole, (2, 1, 3), rank)] for rank in range(3)]
    assert found == [[None, [2, 3, 4, 5]], [[0, 1], None, [3, 4, 5]], [[0, 1, 2], None]]
