"""How partial sums reach a peer: by size, and by what the product's components see."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from gemmkit.distributed.ranks import ReductionRule, Rule, plus  # noqa: E402
from gemmkit.distributed.transport import Gates, Sending, beside, by_shards, sending_of  # noqa: E402  # noqa: E402
from gemmkit.plans.problem import resolve  # noqa: E402
from gemmkit.runtime.arrays import describe  # noqa: E402
from gemmkit.tiling import Tile  # noqa: E402
from gemmkit.transforms import Map  # noqa: E402
from tests.support.patches import Seeded  # noqa: E402

F32, F16 = np.dtype("f4"), np.dtype("f2")


@pytest.fixture(autouse=True)
def gpu(replaced: Seeded) -> None:
    replaced(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def sent(lengths: tuple[int, ...], columns: int, travels: np.dtype = F16, k: int = 64, turned: bool = False,
         **components: Any) -> Sending:
    a, b = torch.zeros(sum(lengths), k, dtype=torch.float16), torch.zeros(k, columns, dtype=torch.float16)
    if turned:
        a, b = a.T.contiguous().T, b.T.contiguous().T
    with gk.emulate():
        return sending_of(lengths, a, b, ReductionRule(travels, F32, Rule(plus), F16), None, components)


def test_small_sums_are_stored() -> None:
    assert sent((2048, 2048), 4096) == Sending(True, 1) == sent((1, 0), 1) == sent((256,) * 8, 4096)
    assert sent((2048, 2048), 8191).stores and not sent((2048, 2048), 8192).stores          # below 32 MiB for a peer
    assert not sent((2048, 2048), 4096, F32).stores


@pytest.mark.parametrize("turned", [False, True])
def test_large_ones_are_copied_by_one_ranks_mapping(turned: bool) -> None:
    found = sent((4096, 4096), 8192, k=4096, turned=turned)
    assert (found.stores, found.chunks) == (False, 2) and found.own is found.conf is not None
    a, b, d = np.zeros((4096, 8192), F16), np.zeros((8192, 8192), F16), np.zeros((4096, 8192), F16)
    if turned:
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    with gk.emulate(mapping="device"):
        whole = resolve(describe(a, "a"), describe(b, "b"), None, describe(d, "out"), None, {})
    assert repr(found.conf) == repr(whole.config)
    assert found.conf.block_shape == Tile(M=128, N=256, K=64) and found.conf.schedule == "cooperative"


def test_sums_that_are_rounded_behind_the_merge() -> None:
    """The own rows are stored in another dtype than the others': the mapping is the model's."""
    found = sent((4096, 4096), 4096, F32)
    assert found.conf is not None and found.conf.global_d_layout.dtype == F32 and found.own is None


def test_more_ranks_and_the_largest() -> None:
    assert sent((4096,) * 4, 8192).chunks == 1 and sent((70, 8192), 8192).chunks == 2


def test_rows_that_are_seen_are_at_home_first() -> None:
    """One product of all rows, whose parts are copied."""
    doubled = Map(lambda x: x + x)
    assert sent((8, 8), 16, transform_global_to_shared_a=doubled) == Sending(False, 1)
    assert sent((8, 8), 16, epilogue=doubled) == Sending(True, 1)


class Taken(np.ndarray):
    """What a gate asks of a GPU's tensor, which is taken as it is."""

    is_cuda = True

    def data_ptr(self) -> int:
        return self.ctypes.data


def test_a_configuration_and_an_operator_are_refused() -> None:
    """The gate drops no operator that a caller gives beside a configuration; only the call's own mapping has it already."""
    gates = Gates(SimpleNamespace(rank=0, timeout=timedelta(seconds=9)), by_shards((64, 64), 0))          # type: ignore[arg-type]
    a, b = np.zeros((128, 64), F16).view(Taken), np.zeros((64, 64), F16).view(Taken)
    with gk.emulate():
        conf = gk.plan(np.asarray(a), np.asarray(b)).config
        given = dict(operator=conf.operator)
        with pytest.raises(gk.ConfigError, match="operator: it is given with conf"):
            gates.of(a, b, None, None, conf, given)
        assert beside(conf, given) == {} and beside(None, given) is given
