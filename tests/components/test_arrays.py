"""Arrays in components: captured by functions, or kept from call to call."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import components, epilogues, layouts, operators, transforms
from gemmkit import components as kept
from gemmkit.components import freeze
from gemmkit.emulator import errors
from gemmkit.epilogues import Elementwise, Fold, Residual, Scale
from gemmkit.kernels.spec import Condition
from gemmkit.plans import ahead as inspection
from tests.support.patches import Seeded, Set

# ==========================================================================================================================
# Arrays that functions capture: checked in the emulator as fields are, refused by the compiler where they are written.

M, N, K = 5, 7, 6
TABLE = np.arange(8, dtype=np.float32)


def product(**keywords: Any) -> Any:
    a, b = np.ones((M, K), np.float32), np.ones((K, N), np.float32)
    with gk.emulate():
        return gk.matmul(a, b, **keywords)


def in_slot(slot: str, table: Any, ahead: int = 0) -> dict[str, Any]:
    """Keywords with a function in a slot that reads ``table[column + ahead]``, captured by the function itself."""
    if slot == "transform of A":
        return {"transform_global_to_shared_a": transforms.Map(lambda x, i, j: x + table[j + ahead])}
    if slot == "epilogue":
        return {"epilogue": epilogues.Elementwise(lambda x, i, j: x + table[j + ahead])}
    if slot == "where":
        return {"epilogue": epilogues.Where(lambda i, j: table[j + ahead] >= 0, 0.0)}
    return {"global_a_layout": layouts.Generated("float32", lambda i, j: table[j + ahead]),
            "gemm_shape": {"M": M, "N": N, "K": K}}


SLOTS = ["transform of A", "epilogue", "where", "generated"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("slot", SLOTS)
def test_what_is_in_range_is_read(slot: str) -> None:
    table = TABLE[1:].copy()
    d, ones = product(**in_slot(slot, table)), np.ones((M, K), np.float32)
    a = {"transform of A": ones + table[:K], "generated": np.broadcast_to(table[:K], (M, K))}.get(slot, ones)
    assert np.array_equal(d, a @ np.ones((K, N), np.float32) + (table[:N] if slot == "epilogue" else 0))


@pytest.mark.sample(2)
@pytest.mark.parametrize("ahead", [-1, 8])
@pytest.mark.parametrize("slot", SLOTS)
def test_what_is_out_of_range_is_a_fault(slot: str, ahead: int) -> None:
    """NumPy would take element -1 for the last."""
    with pytest.raises(errors.BoundsError, match=r"of 'table, captured by <lambda>', which has shape \(8,\)") as caught:
        product(**in_slot(slot, TABLE.copy(), ahead))
    assert "test_arrays.py" in str(caught.value)


def test_a_global_array_is_captured() -> None:
    with pytest.raises(errors.BoundsError, match="'TABLE, captured by <lambda>'"):
        product(epilogue=epilogues.Elementwise(lambda x, m, n: x + TABLE[n - 1]))


def test_padding_between_rows_is_no_part_of_a_captured_array() -> None:
    table = np.zeros((4, 8), np.float32)[:, :5]
    with pytest.raises(errors.BoundsError):
        product(epilogue=epilogues.Elementwise(lambda x, m, n: x + table[0, n]))


def stores(kept: Any) -> Any:
    def store(x: Any, m: int, n: int) -> Any:
        kept[n] = x
        return x

    return store


def test_a_captured_array_cannot_be_written() -> None:
    table = TABLE.copy()
    with pytest.raises(errors.ReadOnlyError, match="'kept, captured by store', which is read-only"):
        product(epilogue=epilogues.Elementwise(stores(table)))
    assert np.array_equal(table, TABLE)


@dataclass(frozen=True)
class Keeps(epilogues.Epilogue):
    kept: gk.Array

    def __call__(self, x: Any, m: int, n: int) -> Any:
        self.kept[n] = x
        return x


@dataclass(frozen=True)
class Overwrites(layouts.Layout):
    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        data[i, j] = 0
        return data[i, j]


WRITERS = {
    "captured": ({"transform_regs_to_shared_d": transforms.Map(stores(TABLE))}, "kept[n] = x"),
    "field": ({"epilogue": Keeps(TABLE)}, "self.kept[n] = x"),
    "operand": ({"global_a_layout": Overwrites("float32")}, "data[i, j] = 0"),
}


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("what", WRITERS)
def test_compiling_a_write_to_what_is_no_output_names_the_line(what: str) -> None:
    keywords, line = WRITERS[what]
    row = layouts.RowMajor("float32")
    conf = gk.get_config(operator=operators.FPUOp(M=16, N=16), block_shape=gk.Tile(M=16, N=16, K=8), **{"global_a_layout": row, "global_b_layout": row, "global_d_layout": row,
                                                     **keywords})
    with pytest.raises(gk.ComponentError, match="only read here") as caught:
        inspection.compile_config(conf, operands={"a": np.zeros((64, 64), np.float32)}, gemm_shape={"M": 64, "N": 64, "K": 64})
    assert line in str(caught.value) and "test_arrays.py" in str(caught.value)


@pytest.mark.parametrize("what", ["field", "operand"])
def test_the_emulator_refuses_the_same_writes(what: str) -> None:
    with pytest.raises(errors.ReadOnlyError):
        product(**WRITERS[what][0], **({"gemm_shape": {"M": M, "N": N, "K": K}} if what == "operand" else {}))


def helper(n: int) -> Any:
    return TABLE[n]


@dataclass(frozen=True)
class ByMethod(epilogues.Epilogue):
    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x + TABLE[n]


@pytest.mark.parametrize("epilogue", [epilogues.Elementwise(lambda x, m, n: x + helper(n)), ByMethod()],
                         ids=["helper", "method"])
def test_an_array_of_a_helper_or_a_method_is_refused(epilogue: Any) -> None:
    with pytest.raises(gk.ComponentError, match="TABLE is an array, and .* hand it over as an argument"):
        product(epilogue=epilogue)


@dataclass(frozen=True)
class Every(Condition):
    table: gk.Array

    def __call__(self, m: int, n: int, k: int) -> bool:
        return self.table[k - 1] >= 0


def test_a_condition_is_checked_too() -> None:
    with pytest.raises(errors.BoundsError, match=r"'Every.table'"):
        product(condition=Every(TABLE))


# ==========================================================================================================================
# Components that are kept: one that comes again is found by what it is now, not by what it was.

FACTOR = np.float32(2)


def doubled(x: Any) -> Any:
    return x * 2


def tripled(x: Any) -> Any:
    return x * 3


def scaled(x: Any) -> Any:
    return x * FACTOR


def seen(component: Any) -> tuple[Any, ...]:
    """What a kernel gets of a component, which must be what freezing it anew says."""
    found, anew = kept.frozen(component), freeze(component)
    assert found.fingerprint == anew.fingerprint and found.leaves == anew.leaves and found.kind is anew.kind
    return found.fingerprint, *found.leaves


def test_a_component_that_comes_again_is_not_frozen_again() -> None:
    epilogue = Elementwise(doubled)
    assert kept.frozen(epilogue) is kept.frozen(epilogue)
    assert kept.frozen(Elementwise(doubled)) is not kept.frozen(epilogue)


def test_replaced_code_is_read_anew(replaced: Seeded) -> None:
    epilogue = Elementwise(doubled)
    before = [seen(epilogue) for _ in range(3)]
    replaced(doubled, "__code__", tripled.__code__)
    after = [seen(epilogue) for _ in range(3)]
    assert len({*before}) == len({*after}) == 1 and before[0] != after[0]


def test_a_captured_number_bound_anew_is_the_new_one(rebound: Set) -> None:
    epilogue = Elementwise(scaled)
    before = [seen(epilogue) for _ in range(3)]
    rebound(FACTOR=np.float32(5))
    after = [seen(epilogue) for _ in range(3)]
    assert before[2] != after[2] and after[0] == after[2]


def test_a_class_constant_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Shifted(gk.epilogues.Epilogue):
        BY = 1

        def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
            return values

    epilogue = Shifted()
    before = [seen(epilogue) for _ in range(3)]
    monkeypatch.setattr(Shifted, "BY", 2)
    assert seen(epilogue) != before[0] and seen(epilogue) == seen(epilogue)


def test_an_array_that_lies_elsewhere_by_now() -> None:
    """`numpy.ndarray.resize` moves an array in place, as `tensor.data = ...` does."""
    array = np.zeros((4, 4), "f4")
    epilogue = Residual(array)
    before = [seen(epilogue) for _ in range(3)]
    array.resize((512, 4), refcheck=False)
    after = [seen(epilogue) for _ in range(3)]
    assert before[0] == before[2] and after[0] == after[2] and before[2] != after[0]


def test_copies_and_replacements_are_components_of_their_own() -> None:
    from dataclasses import replace

    scale = Scale(2.0)
    kept.frozen(scale), kept.frozen(scale)
    assert seen(replace(scale, by=3.0)) != seen(scale)


@pytest.mark.usefixtures("quick_collections")
def test_what_dies_is_forgotten_with_its_arrays() -> None:
    array = np.zeros((4, 4), "f4")
    held, epilogue = weakref.ref(array), Residual(array)
    kept.frozen(epilogue), kept.frozen(epilogue)
    count = len(kept._kept)
    del array, epilogue
    gc.collect()
    assert held() is None and len(kept._kept) < count


def test_a_gated_unit_keeps_the_fold_of_a_plain_function_alone() -> None:
    """One with a closure is made anew in every call, and would fill the memory."""
    from gemmkit.functions.glu import gating

    x, w = np.ones((2, 3), "f4"), np.ones((3, 2), "f4")
    gating.cache_clear()
    gain = 2.0
    with gk.emulate():
        for activation in (gk.epilogues.activations.silu, lambda z: z * gain):
            for _ in range(2):
                gk.glu(x, w, w, activation)
    assert gating.cache_info().currsize == 1 and gating.cache_info().hits == 1
    assert isinstance(gating(gk.epilogues.activations.silu), Fold)


def test_components_of_constants_alone_are_frozen_once() -> None:
    """Not what holds an array or a number, or code of the user's; and nothing is known of one that has gone."""
    layout = gk.layouts.RowMajor("float16")
    assert freeze(layout) is freeze(layout) and freeze(layout) is not freeze(gk.layouts.RowMajor("float16"))
    for other in (gk.epilogues.Scale(2.0), gk.epilogues.Bias(np.ones(4, np.float32)),
                  gk.epilogues.Elementwise(lambda x: x * 2)):
        assert freeze(other) is not freeze(other)
    at = id(layout)
    del layout
    assert at not in components._parts
