"""Sums as A of the next product: which operators' fragment maps go together, and what is said of those that do not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import ConfigError
from gemmkit.kernels.collectives.operand import FragmentReuse
from gemmkit.operators import COMPLEX, FPUOp, MMAOp, Operator, WGMMAOp, WMMAOp
from gemmkit.programs.collectives import HandedProduct, StagedTile
from gemmkit.programs.launches import module_of
from gemmkit.programs.multistage import CopiedTile, HandedMmaProduct
from gemmkit.ptx.mma import FragmentMap, MmaSpec, places
from gemmkit.ptx.wgmma import WgmmaSpec
from tests.support.machines import BF16, E4M3, is_poison, poison
from tests.support.patches import Seeded

F16, F32, F64, S8 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int8)


def handed(c: FragmentMap, a: FragmentMap, columns: int) -> np.ndarray:
    """What the next product takes for A: a matrix of numbers, held by ``c``, taken as fragments of ``a``."""
    matrix = np.arange(c.rows * columns).reshape(c.rows, columns)
    blocks = [c.scatter(matrix[:, n:n + c.columns]) for n in range(0, columns, c.columns)]
    joined = [sum(lane, ()) for lane in zip(*blocks)]
    fragments = [[lane[n * a.values:(n + 1) * a.values] for lane in joined] for n in range(columns // a.columns)]
    return np.concatenate([a.gather(fragment) for fragment in fragments], axis=1)


def is_right(given: FragmentReuse) -> bool:
    c, a = given.product.map_c, given.following.map_a
    assert c is not None and a is not None
    return np.array_equal(handed(c, a, given.columns), np.arange(c.rows * given.columns).reshape(c.rows, -1))


# -- what the kernels hand over -------------------------------------------------------------------------------------------

def handed_products(dtype: np.dtype, keys: int) -> list[Any]:
    """Of weights of so many keys and values of 64 columns, as programs have them."""
    memory = dict(lines=keys, columns=64, offset=0, stage_bytes=2 * 64 * keys)
    return [HandedProduct(StagedTile(dtype.name, **memory)), HandedMmaProduct(CopiedTile(dtype.name, **memory, threads=128))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("keys", [16, 48, 80, 128])
def test_weights(keys: int, dtype: np.dtype) -> None:
    for made in handed_products(dtype, keys):
        assert is_right(made.reuse)
        assert (made.reuse.values, made.reuse.k, made.reuse.fragments) == (8, 16, keys // 16)
        assert made.reuse.following.dtype == dtype


# -- which operators go together ------------------------------------------------------------------------------------------

WARPS = [MMAOp(), MMAOp(N=16), MMAOp(K=8), MMAOp(dtype=BF16), MMAOp(accumulator=F16), MMAOp(dtype=F32), MMAOp(dtype=F32, K=4),
         MMAOp(dtype=S8), MMAOp(dtype=E4M3), MMAOp(dtype=F64), MMAOp(dtype=F64, K=16)]
WARPGROUPS = [WGMMAOp(16), WGMMAOp(64, BF16), WGMMAOp(64, accumulator=F16), WGMMAOp(32, F32), WGMMAOp(32, E4M3), WGMMAOp(32, S8)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("operators", [WARPS, WARPGROUPS], ids=["mma.sync", "wgmma"])
def test_a_hand_over_is_refused_where_another_product_would_be_computed(operators: list[Operator]) -> None:
    """Of all pairs, by what the maps make of a matrix."""
    taken = []
    for first, second in product(operators, operators):
        c, a, columns = first.map_c, second.map_a, 64
        assert c is not None and a is not None
        if first.N > columns:                                                                   # type: ignore[attr-defined]
            continue
        right = np.array_equal(handed(c, a, columns), np.arange(c.rows * columns).reshape(c.rows, -1))
        try:
            FragmentReuse(first, second, columns)
        except ConfigError as refused:
            assert not right and repr(first) in str(refused) and repr(second) in str(refused)
        else:
            assert right
            taken.append((first, second))
    assert {second.fragment_a.dtype.itemsize for _, second in taken} == {2}
    assert len(taken) == len(operators) * sum(second.fragment_a.dtype.itemsize == 2 for second in operators)


def test_instructions_of_eight_columns_are_halves_of_a_fragment() -> None:
    found = FragmentReuse(MMAOp(), MMAOp(), columns=48)
    assert (found.fragments, found.values, found.k) == (3, 8, 16) and is_right(found)
    found = FragmentReuse(MMAOp(), MMAOp(K=8), columns=48)
    assert (found.fragments, found.values, found.k) == (6, 4, 8) and is_right(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [16, 80, 96, 256])
def test_a_warpgroups_sums(n: int) -> None:
    found = FragmentReuse(WGMMAOp(n), WGMMAOp(8), columns=n)
    assert (found.fragments, found.values, found.k) == (n // 16, 8, 16) and is_right(found)


# -- seeded faults --------------------------------------------------------------------------------------------------------

#: Where the values of a warp's lanes begin, and of a warpgroup's threads.
LANES, THREADS = places((4, (0, 2)), (8, (1, 0))), places((4, (0, 2)), (8, (1, 0)), (4, (16, 0)))


@dataclass(frozen=True)
class ByRows(MMAOp):
    """A lane's accumulators in one row: four neighbours of eight columns' two halves."""

    @cached_property
    def map_c(self) -> FragmentMap:
        return FragmentMap(16, 8, places((2, (0, 4)), (16, (1, 0))), places((4, (0, 1))))


@dataclass(frozen=True)
class Exchanged(MMAOp):
    """Its second and third accumulators are exchanged."""

    @cached_property
    def map_c(self) -> FragmentMap:
        return FragmentMap(16, 8, LANES, places((2, (8, 0)), (2, (0, 1))))


@dataclass(frozen=True)
class OtherLanes(MMAOp):
    """The right registers for lane 0, and other rows for the lanes behind it."""

    @cached_property
    def map_c(self) -> FragmentMap:
        return FragmentMap(16, 8, places((8, (1, 0)), (4, (0, 2))), places((2, (0, 1)), (2, (8, 0))))


@dataclass(frozen=True)
class LaterBlocks(WGMMAOp):
    """Its second and third octets of columns are exchanged."""

    @cached_property
    def map_c(self) -> FragmentMap:
        return FragmentMap(64, 32, THREADS, places((2, (0, 1)), (2, (8, 0)), (2, (0, 16)), (2, (0, 8))))

    def merge(self, x: Any, y: Any) -> Any:                # a subclass has to have a method of the contract
        return x + y


@pytest.mark.sample(1)
@pytest.mark.parametrize("first,second,said", [
    (ByRows(), MMAOp(), "as A of MMAOp(): lane 0 has element (0, 2) of the sums in register 1 (its lower half) "
                        "of A's fragment 0, where element (8, 0) is wanted"),
    (Exchanged(), MMAOp(), "as A of MMAOp(): lane 0 has element (8, 0) of the sums in register 0 (its upper "
                           "half) of A's fragment 0, where element (0, 1) is wanted"),
    (OtherLanes(), MMAOp(), "lane 1 has element (1, 0) of the sums in register 0 (its lower half) of A's fragment 0, where element "
                            "(0, 2) is wanted"),
    (LaterBlocks(32), WGMMAOp(8), "lane 0 has element (0, 16) of the sums in register 2 (its lower half) of A's fragment 0, where "
                                  "element (0, 8) is wanted"),
    (MMAOp(dtype=F32), MMAOp(dtype=F32), "the sums of MMAOp(dtype='float32') as A of MMAOp(dtype='float32'): lane 0 has element "
                                         "(0, 1) of the sums in register 1 of A's fragment 0, where element (8, 0) is wanted"),
    (WGMMAOp(64, F32), WGMMAOp(64, F32), "lane 0 has element (0, 1) of the sums in register 1 of A's fragment 0, where element "
                                         "(8, 0) is wanted"),
    (MMAOp(), MMAOp(dtype=E4M3), "lane 0 has element (8, 0) of the sums in register 0 (its byte 2) of A's fragment 0, where element "
                                 "(0, 2) is wanted"),
    (WGMMAOp(64), MMAOp(), "128 threads hold 64 rows of sums, and 32 threads hold 16 rows of A"),
    (FPUOp(M=16, N=16), MMAOp(), "element (1, 0)"),
    (WMMAOp(), MMAOp(), "WMMAOp does not say (map_c is None)"),
    (MMAOp(), WMMAOp(), "WMMAOp does not say (map_a is None)"),
    (MMAOp(), COMPLEX.with_base(MMAOp()), "has 2 parts; numbers of one are needed"),
], ids=lambda value: value.__class__.__name__ if isinstance(value, Operator) else "")
def test_what_is_said(first: Operator, second: Operator, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        FragmentReuse(first, second, columns=64)
    assert said in str(refused.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("first,second,columns,said", [
    (WGMMAOp(24), WGMMAOp(64), 24, "columns=24: a multiple of 16 is needed, which a fragment of A has"),
    (WGMMAOp(64), WGMMAOp(64), 96, "columns=96: a multiple of 64 is needed, which an instruction's sums has"),
    (MMAOp(), MMAOp(), 0, "columns=0: a multiple of 8 is needed"),
])
def test_columns(first: Operator, second: Operator, columns: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        FragmentReuse(first, second, columns)
    assert said in str(refused.value)


# -- the kernels' specs ask it --------------------------------------------------------------------------------------------

def seed_maps(monkeypatch: pytest.MonkeyPatch, machine: str, operand: str) -> None:
    """Another map of sums, or of A: rows 8 apart in front of neighbours."""
    def sums(spec: Any) -> FragmentMap:
        threads = THREADS if machine == "wgmma" else LANES
        return FragmentMap(spec.M, spec.N, threads, places((2, (8, 0)), (2, (0, 1)), (spec.N // 8, (0, 8))))

    def fragment(spec: Any) -> FragmentMap:
        threads = THREADS if machine == "wgmma" else LANES
        return FragmentMap(spec.M, 16, threads, places((2, (0, 1)), (2, (0, 8)), (2, (8, 0))))

    which = WgmmaSpec if machine == "wgmma" else MmaSpec
    if operand == "c" and machine == "mma":
        monkeypatch.setattr(MMAOp, "map_c", property(sums))
    else:
        monkeypatch.setattr(which, "c" if operand == "c" else {"wgmma": "a_map", "mma": "a"}[machine],
                            property(sums if operand == "c" else fragment))


@pytest.mark.sample(1)
@pytest.mark.parametrize("operand", ["c", "a"])
@pytest.mark.parametrize("machine", ["wgmma", "mma"])
def test_a_spec_of_operators_that_do_not_go_together_is_not_made(machine: str, operand: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    seed_maps(monkeypatch, machine, operand)
    which = 0 if machine == "wgmma" else 1
    for dtype in (F16, BF16):
        with pytest.raises(ConfigError, match=r"as A of .*: lane 0 has element .* is wanted") as refused:
            handed_products(dtype, 64)[which]
        assert ("WGMMAOp" if which == 0 else "MMAOp(N=16") in str(refused.value)


def test_a_call_says_it_before_anything_is_compiled_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_maps(monkeypatch, "wgmma", "c")
    module_of.cache_clear()                                                   # of texts whose products have asked
    rng = np.random.default_rng(0)
    x, w, y = rng.standard_normal((8, 64)).astype(F16), np.zeros((2, 64, 64), F16), poison((8, 64), F16)
    with gk.emulate(), pytest.raises(ConfigError, match="lane 0 has element"):
        gk.mlp(x, w, out=y)
    assert is_poison(y)


def test_equal_maps_are_compared_once(seeded: Seeded) -> None:
    handed_products(F16, 128)

    def asked(*_: Any) -> int:
        raise AssertionError("a map was read again")

    seeded(FragmentMap, "row", asked)
    assert len(handed_products(F16, 128)) == 2
