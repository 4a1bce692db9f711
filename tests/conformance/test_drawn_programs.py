"""Programs drawn from a grammar: right, or refused with the line; and the judge of them notices what is neither.

``python -m tests.drawn_programs --count 1000 --seed 1`` draws more; GEMMKIT_DRAWN_PROGRAMS sets how many here.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from tests.drawn_programs.features import features
from tests.drawn_programs.grammar import Case, drawn
from tests.drawn_programs.judge import Outcome, arrays_of, judged, script
from tests.drawn_programs.numbers import Bounded, Numbers, computed
from tests.drawn_programs.pieces import cut_points
from tests.drawn_programs.shrink import shrunk
from tests.drawn_programs.syntax import (
    Add,
    Array,
    Cell,
    Expr,
    Let,
    Loop,
    Over,
    Source,
    Store,
    expressions,
    number,
    statements,
)
from tests.support.machines import MACHINES
from tests.support.patches import Seeded

COUNT, PART = int(os.environ.get("GEMMKIT_DRAWN_PROGRAMS", 48)), 8


def reduced(case: Case) -> Case:
    """With one block or two, so that many are emulated in little time."""
    sizes = {name: min(size, 70) if name not in "DC" else size for name, size in case.sizes.items()}
    if "R" in sizes:                                   # of whole pages
        sizes["T"] = max(1, min(sizes["T"], 70 // sizes["R"]))
        sizes["N"] = sizes["T"] * sizes["R"]
    return replace(case, sizes=sizes)


def faults(first: int, machine: Any = None) -> list[str]:
    seed = int(os.environ["GEMMKIT_SEED"]) % 10**6
    found = []
    for n in range(first, min(first + PART, COUNT)):
        case = drawn(seed, n, large=machine is not None)
        case = case if machine is not None else reduced(case)
        outcome = judged(case, machine)
        if outcome.is_fault:
            found.append(f"program {n} of seed {seed}: {outcome.text}\n{script(case)}")
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_a_program_is_right_or_refused(first: int) -> None:
    assert not (found := faults(first)), "\n\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_a_program_is_right_or_refused_on_a_gpu(first: int) -> None:
    assert not (found := faults(first, MACHINES["gpu"])), "\n\n".join(found)


# -- the judge --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tile() -> Case:
    """A product and a bias, of one tile."""
    a, b, bias, d = (Array("a", ("M", "K"), "float16", role="operand"), Array("b", ("K", "N"), "float16", role="operand"),
                     Array("bias", ("N",), "float32"), Array("d", ("M", "N"), "float32", role="result"))
    dims = ("m", "n")
    product = Expr("dot", (Expr("load", (), ("a", ("m", "k")), ("m", "k")), Expr("load", (), ("b", ("k", "n")), ("k", "n"))), None, dims)
    loop = Loop("sequential", (Over("k", "K", "a.columns"),), (Add("acc", product),))
    value = Expr("add", (Expr("name", (), "acc", dims), Expr("load", (), ("bias", ("n",)), ("n",))), None, dims)
    value = Expr("max", (value, number(-10.0)), None, dims)
    body = Cell("acc", dims, dims, 0.0), loop, Let("t", value), Store("d", dims, Expr("name", (), "t", dims))
    source = Source((a, b, bias, d), Loop("parallel", (Over("m", "M", "a.rows"), Over("n", "N", "b.columns")), body))
    mapping = gk.Mapping({"n": 64}, warpgroups=1, kernel="warp_specialised")
    return Case(source, dict(M=9, N=8, K=20, H=1), mapping, 4, tags=frozenset({"tile"}))


def test_what_is_right_is_right(tile: Case) -> None:
    assert judged(tile).kind == "right"


def test_results_that_are_a_little_off_are_noticed(tile: Case) -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        (x,) = results.values()
        x[-1, -1] += max(0.02 * np.abs(x.astype(float)).max(), 1e-3)

    assert judged(tile, tamper=change).cause == "wrong numbers (emulator)"


def test_results_that_nobody_wrote_are_noticed(tile: Case) -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        (x,) = results.values()
        x[0, 0] = np.nan

    assert judged(tile, tamper=change).is_fault


def test_rows_of_no_piece_are_looked_at() -> None:
    """A kernel that stores into one of them is noticed, NaN too."""
    found = 0
    for n in range(200):
        case = drawn(1, n)
        if "packed rows" not in case.tags or case.slip or case.machine == "ptx":
            continue
        offsets, rows = arrays_of(case)["offsets_m"], case.sizes[case.source.loop.over[-1].of]
        none = [row for row in range(rows) if not offsets[0] <= row < offsets[-1]]
        if not none or judged(case).kind != "right":
            continue
        for value in (0.0, np.nan):
            def change(results: dict[str, np.ndarray], value: float = value) -> None:
                store = next(x for x in statements(case.source.loop) if isinstance(x, Store))
                results[store.array][(*(0 for _ in store.indices[:-1]), none[-1])] = value

            assert judged(case, tamper=change).cause == "wrong numbers (emulator)"
        found += 1
        if found == 2:
            break
    assert found == 2


def test_pieces_are_valid_whatever_is_left_of_them() -> None:
    """Sizes that are made smaller have offsets of their own: within the rows, in order, and one more than there are pieces."""
    for n in range(300):
        rng = np.random.default_rng(n)
        pieces, rows = int(rng.integers(0, 9)), int(rng.integers(0, 200))
        for style in ("rows", "keys", "far"):
            found = cut_points(np.random.default_rng(n), pieces, rows, style)
            assert found.shape == (pieces + 1,)
            if style != "far":
                assert 0 <= found.min(initial=0) and found.max(initial=0) <= rows
            if style != "keys":
                assert (np.diff(found) >= 0).all()


def test_another_meaning_is_noticed(tile: Case) -> None:
    """The interpretation with one product left out, and with one operand's columns turned round."""
    dot = next(x for x in statements(tile.source.loop) if isinstance(x, Add) and x.value.op == "dot")

    def without(loop: Loop) -> Loop:
        return replace(loop, body=tuple(without(x) if isinstance(x, Loop) else x for x in loop.body if x is not dot))

    def left_out(source: Any, *given: Any) -> dict[str, Bounded]:
        return computed(replace(source, loop=without(source.loop)), *given)

    assert judged(tile, interpreted=left_out).is_fault

    class Turned(Numbers):
        def dot(self, x: Bounded, y: Bounded) -> Bounded:
            return super().dot(x, replace(y, value=y.value[:, ::-1]))

    assert judged(tile, interpreted=lambda *given: Turned(*given).run()).is_fault


@pytest.mark.parametrize("error", [AttributeError("x"), SyntaxError("x"), RuntimeError("x"), ValueError("rounds carry no sums"), KeyError("m")],
                         ids=lambda error: type(error).__name__)
def test_errors_without_a_line_are_noticed(tile: Case, error: Exception, seeded: Seeded) -> None:
    from gemmkit.programs import calls

    def fails(*_: Any) -> None:
        raise error

    seeded(calls, "planned", fails)
    assert judged(tile).is_fault


def test_an_accepted_slip_is_noticed(tile: Case) -> None:
    assert judged(replace(tile, slip="none")).cause == "a slip is accepted: none"


def test_a_failing_program_is_made_smaller(tile: Case) -> None:
    """To the store and what it needs, where every program with a product fails."""
    def change(results: dict[str, np.ndarray]) -> None:
        for x in results.values():
            x.fill(7)

    def fails(case: Case) -> bool:
        try:
            return judged(case, tamper=change).cause == "wrong numbers (emulator)" and any(x.op == "dot" for x in expressions(case.source.loop))
        except Exception:
            return False

    small = shrunk(tile, fails, seconds=10)
    assert len(list(statements(small.source.loop))) <= 5, script(small)
    text = script(small, Outcome("fault", "wrong", "it is 7"))
    assert text.startswith("# it is 7\n") and "drawn.reference" in text
    exec(compile(text, "a script", "exec"), {"__name__": "script"})


def test_bounds_hold_for_float32(tile: Case) -> None:
    """NumPy in float32 is within the bounds, and these are some units of what is computed."""
    rng = np.random.default_rng(0)
    x, y = (Bounded(("m", "n"), rng.standard_normal((50, 40)), np.zeros((50, 40))) for _ in range(2))
    made = Numbers(tile.source, tile.sizes, {}, {})
    single = [z.value.astype(np.float32) for z in (x, y)]
    x, y = (replace(z, value=one.astype(float)) for z, one in zip((x, y), single))
    for op, function in (("add", np.add), ("mul", np.multiply), ("div", np.divide), ("max", np.maximum)):
        found = made.operation(op, [x, y])
        off = np.abs(function(*single).astype(float) - function(*(z.astype(float) for z in single)))
        assert (off <= found.error).all() and (found.error <= 2**-18 * (np.abs(x.value) + np.abs(y.value) + np.abs(found.value))).all()
    assert made.operation("lt", [x, replace(x, error=np.full((50, 40), 0.1))]).error.all()


def test_what_is_drawn_has_every_feature() -> None:
    """Of programs that need not run."""
    seen = set().union(*(features(drawn(1, n)) for n in range(400)))
    for name in ("tile", "chain", "rows", "==", "!=", "<", "<=", ">", ">=", "&", "stop=", "an array in 3 roles", "an array as left and right operand",
                 "an operand that is read again", "2 products", "3 products", "two loops", "a size of 0", "chain: saturating", "chain: online",
                 "Mapping(splits=)", "Mapping(cluster=)", "once", "bfloat16 operand", "float32 result", "float16 result", "a division",
                 "several stacks", "packed rows", "rounds along the pieces of rows", "rounds along pieces, by those of rows",
                 "rounds along pieces, by a stack", "pages", "start=", "start= and stop=", "start= of packed", "start= of paged", "start= an expression",
                 "stop= an expression", "a bias of a piece or a stack", "masked", "int32 offsets", "a condition on numbers of a call", "a condition on arrays", "a condition on places", "a plan's numbers are others"):
        assert name in seen, name
