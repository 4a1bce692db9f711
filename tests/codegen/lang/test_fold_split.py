"""`fold`, `split`, `deal` and `interleave`: the same in Python and in device code, and nothing left of them in PTX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.registers import deal, fold, generate, interleave, join, split
from gemmkit.ptx.special import thread_index
from tests.support.harness import Out, compiled, constants_stored, emulated, leaves_nothing
from tests.support.lang.typing import result


@dataclass(frozen=True)
class Static(gk.Component):
    """Compile-time values for the kernels below."""

    none: int = 0
    five: int = 5
    two: int = 2
    four: int = 4


def check(kernel: Callable[..., None], expected: list[int]) -> None:
    """Run in the emulator, and fold in device code, to the same numbers."""
    out = Out((len(expected),), np.int32)
    assert list(emulated(kernel, out, Static(), threads=1)[0]) == expected
    assert constants_stored(compiled(kernel, out, Static())) == {4 * n: x for n, x in enumerate(expected)}


def digit(value: int, n: int, base: int) -> int:
    return value * base + n


def folding(out: Any, static: Any) -> None:
    out[0] = fold(static.five, digit, 7, 10)
    out[1] = fold(static.none, digit, 7, 10)
    out[2] = fold(3, digit, 1, static.four)


def test_fold_repeats_with_the_turns_number() -> None:
    check(folding, [701234, 7, ((1 * 4 + 0) * 4 + 1) * 4 + 2])


def turned(pair: tuple, n: int, step: int) -> tuple:
    return pair[1] + step * n, pair[0]


def folding_a_tuple(out: Any, static: Any) -> None:
    pair = fold(static.four, turned, (1, 2), 10)
    out[0] = pair[0]
    out[1] = pair[1]


def test_fold_takes_a_tuple_along() -> None:
    pair = (1, 2)
    for n in range(4):
        pair = pair[1] + 10 * n, pair[0]
    check(folding_a_tuple, list(pair))


def folding_floats(out: Any, static: Any) -> None:
    out[0] = np.int32(fold(2, halved, 7.0) * 4)
    out[1] = fold(2, doubled, 1, static.none)


def doubled(x: Any, n: int, more: int) -> Any:
    return 2 * x + more


def test_a_constant_may_be_where_fold_begins() -> None:
    """Its type is its value: kept, nothing would ever change."""
    check(folding_floats, [7, 4])


def halved(x: Any, n: int) -> Any:
    return x / 2


def test_the_value_of_fold_keeps_its_type() -> None:
    """What a function makes of it is converted back: else the type would depend on the number of turns."""
    assert result(lambda x: fold(3, halved, x), np.float32) == result(lambda x: x, np.float32)
    assert result(lambda x: fold(3, halved, x), np.int32) == result(lambda x: x, np.int32)


def folding_at_run_time(out: Any, static: Any) -> None:
    out[0] = fold(thread_index(), digit, 7, 10)


def test_fold_wants_a_compile_time_count() -> None:
    with pytest.raises(Exception, match="fold"):
        compiled(folding_at_run_time, Out((1,), np.int32), Static())


def folding_run_time_values(out: Any, a: Any, static: Any) -> None:
    out[thread_index()] = fold(static.five, digit, a[thread_index()], 3)


def test_fold_leaves_no_loop() -> None:
    a = np.arange(32, dtype=np.int32)
    (there,) = emulated(folding_run_time_values, Out((32,), np.int32), a, Static())
    expected = a.copy()
    for n in range(5):
        expected = expected * 3 + n
    assert np.array_equal(there, expected)
    ptx = compiled(folding_run_time_values, Out((32,), np.int32), a, Static())
    assert leaves_nothing(ptx) and "bra" not in ptx


# -- split --------------------------------------------------------------------------------------------------------------

def following(n: int, start: int) -> int:
    return n + start


def splitting(out: Any, static: Any) -> None:
    values = generate(4, following, 5)
    parts = split(values, static.two)
    out[0] = len(parts)
    out[1] = parts[0][0] * 10 + parts[0][1]
    out[2] = parts[1][0] * 10 + parts[1][1]
    out[3] = len(split(values, 1)) * 10 + len(split(values, 4))
    whole = join(parts)
    out[4] = len(whole) * 1000 + whole[0] * 100 + whole[3]


def test_split_is_what_join_puts_together() -> None:
    check(splitting, [2, 56, 78, 41, 4508])


def test_types_of_split() -> None:
    of_two = result(lambda a, b, c, d: split((a, b, c, d), 2), *[np.float32] * 4)
    assert len(of_two) == 2 and [len(part) for part in of_two] == [2, 2]
    assert of_two[0][0] == result(lambda x: x, np.float32)


@pytest.mark.parametrize("size", [3, 0, 8], ids=str)
def test_split_wants_a_divisor(size: int) -> None:
    @dataclass(frozen=True)
    class Sized(Static):
        size: int = 0

    with pytest.raises(Exception, match="split"):
        compiled(splitting_by_size, Out((1,), np.int32), Sized(size=size))


def splitting_by_size(out: Any, static: Any) -> None:
    out[0] = split(generate(4, following, 5), static.size)[0][0]


def splitting_at_run_time(out: Any, static: Any) -> None:
    out[0] = split(generate(4, following, 5), thread_index())[0][0]


def test_split_wants_a_compile_time_size() -> None:
    with pytest.raises(Exception, match="split"):
        compiled(splitting_at_run_time, Out((1,), np.int32), Static())


# -- deal ---------------------------------------------------------------------------------------------------------------

def dealing(out: Any, static: Any) -> None:
    hands = deal(generate(4, following, 5), static.two)
    out[0] = len(hands)
    out[1] = hands[0][0] * 10 + hands[0][1]
    out[2] = hands[1][0] * 10 + hands[1][1]
    whole = interleave(hands)
    out[3] = len(whole) * 10000 + whole[0] * 1000 + whole[1] * 100 + whole[2] * 10 + whole[3]
    out[4] = interleave(split(generate(4, following, 5), 2))[1]
    out[5] = len(deal(whole, 1)) * 10 + len(deal(whole, 4))


def test_deal_is_what_interleave_puts_together() -> None:
    check(dealing, [2, 57, 68, 45678, 7, 14])


def dealing_by_size(out: Any, static: Any) -> None:
    out[0] = deal(generate(4, following, 5), static.five)[0][0]


def dealing_at_run_time(out: Any, static: Any) -> None:
    out[0] = deal(generate(4, following, 5), thread_index())[0][0]


@pytest.mark.parametrize("kernel", [dealing_by_size, dealing_at_run_time])
def test_deal_wants_a_compile_time_divisor(kernel: Any) -> None:
    with pytest.raises(Exception, match="deal"):
        compiled(kernel, Out((1,), np.int32), Static())


def interleaving_what_differs(out: Any, static: Any) -> None:
    out[0] = interleave((generate(4, following, 5), generate(2, following, 5)))[0]


def test_interleave_wants_tuples_of_one_length() -> None:
    with pytest.raises(Exception, match="interleave"):
        compiled(interleaving_what_differs, Out((1,), np.int32), Static())
