"""How the dimensions of contractions are ordered: what is cut, who leads, what is merged again."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmkit.functions.einsum import LARGER, Mode, ordered

ALIKE = (1000, 1000)
FIRST, SECOND = (1000 * LARGER, 1000), (1000, 1000 * LARGER)      # which of the two is much the larger
F16, F32, F64 = (2, 2), (4, 4), (8, 8)


# What two tensors have of each index (extent, strides), itemsizes, numbers of elements; and what comes of it.
ORDERS: dict[str, tuple[list[tuple], tuple, tuple, list[tuple]]] = {
    "one index": ([(48, 1, 100)], F16, ALIKE, [(48, 1, 100)]),
    "one order": ([(48, 100, 1), (16, 4800, 48)], F16, ALIKE, [(768, 100, 1)]),
    "one leads": ([(48, 7, 100), (16, 1, 3)], F16, ALIKE, [(16, 1, 3), (48, 7, 100)]),
    "only the second can": ([(48, 7, 100), (16, 9, 1)], F16, ALIKE, [(16, 9, 1), (48, 7, 100)]),
    "at odds, the first leads, and the other's are whole sectors":
        ([(32, 1, 48), (48, 32, 1)], F16, ALIKE, [(8, 1, 48), (16, 32, 1), (4, 8, 384), (3, 512, 16)]),
    "three vectors, for 24 are no two and some": ([(24, 1, 24), (24, 24, 1)], F16, ALIKE, [(8, 1, 24), (24, 24, 1), (3, 8, 192)]),
    "at odds, the larger leads": ([(32, 1, 48), (48, 32, 1)], F16, SECOND, [(8, 32, 1), (8, 1, 48), (6, 256, 8), (4, 8, 384)]),
    "the first is the larger": ([(32, 1, 48), (48, 32, 1)], F16, FIRST, [(8, 1, 48), (8, 32, 1), (4, 8, 384), (6, 256, 8)]),
    "as many as are 16 bytes": ([(32, 1, 48), (48, 32, 1)], F64, FIRST, [(2, 1, 48), (2, 32, 1), (16, 2, 96), (24, 64, 2)]),
    "of each its own bytes": ([(32, 1, 48), (48, 32, 1)], (2, 4), FIRST, [(8, 1, 48), (4, 32, 1), (4, 8, 384), (12, 128, 4)]),
    "eight bytes at most": ([(32, 1, 48), (48, 32, 1)], (1, 1), FIRST, [(8, 1, 48), (8, 32, 1), (4, 8, 384), (6, 256, 8)]),
    "what divides": ([(12, 1, 10), (10, 12, 1)], F16, FIRST, [(4, 1, 10), (2, 12, 1), (3, 4, 40), (5, 24, 2)]),
    "one of them does not divide": ([(15, 1, 48), (48, 15, 1)], F16, ALIKE, [(8, 15, 1), (15, 1, 48), (6, 120, 8)]),
    "none does: as the lead has it": ([(15, 1, 9), (9, 15, 1)], F16, SECOND, [(9, 15, 1), (15, 1, 9)]),
    "whole lines of the larger": ([(24, 1, 5000), (24, 24, 120000), (8, 576, 5)], F16, SECOND, [(8, 1, 5000), (8, 576, 5), (72, 8, 40000)]),
    "of alike ones, of the lead": ([(24, 1, 5000), (24, 24, 120000), (8, 576, 5)], F16, ALIKE, [(576, 1, 5000), (8, 576, 5)]),
    "no neighbours: whole lines of the larger": ([(8, 3, 50), (6, 50, 3)], F32, SECOND, [(6, 50, 3), (8, 3, 50)]),
    "merged, then cut": ([(4, 1, 24), (6, 4, 96), (24, 24, 1)], F16, FIRST, [(8, 1, 24), (8, 24, 1), (3, 8, 192), (3, 192, 8)]),
    "backwards": ([(8, -1, 16), (16, 8, 1)], F16, ALIKE, [(16, 8, 1), (8, -1, 16)]),
    "one element for all": ([(8, 0, 1), (16, 1, 0)], F32, FIRST, [(4, 1, 0), (4, 0, 1), (4, 4, 0), (2, 0, 4)]),
    "nothing": ([], F32, ALIKE, [(1, 1, 1)]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders(name: str) -> None:
    modes, itemsizes, counts, expected = ORDERS[name]
    for given_in in itertools.permutations(modes):
        assert ordered([Mode(*mode) for mode in given_in], itemsizes, counts) == [Mode(*mode) for mode in expected]


@pytest.mark.parametrize("counts, expected", [
    (ALIKE, [(8, 1, 48), (16, 32, 1), (4, 8, 384), (3, 512, 16)]), (FIRST, [(8, 1, 48), (16, 32, 1), (4, 8, 384), (3, 512, 16)]),
    ((1000, 1200), [(4, 1, 48), (16, 32, 1), (8, 4, 192), (3, 512, 16)]), (SECOND, [(4, 1, 48), (48, 32, 1), (8, 4, 192)])])
def test_what_is_written_does_not_lead(counts: tuple[int, int], expected: list[tuple]) -> None:
    """Its neighbours are whole sectors; if it is the larger, four elements of the other's come before them, else eight."""
    assert ordered([Mode(32, 1, 48), Mode(48, 32, 1)], F16, counts, stores=True) == [Mode(*mode) for mode in expected]


def test_what_is_written_leads_alone() -> None:
    assert ordered([Mode(48, 7, 100), Mode(16, 9, 1)], F16, ALIKE, stores=True) == [Mode(16, 9, 1), Mode(48, 7, 100)]


def elements(modes: Any) -> set[tuple[int, int]]:
    """Where every element lies in the two tensors."""
    steps = [[(i * first, i * second) for i in range(extent)] for extent, first, second in modes]
    return {(sum(x for x, _ in at), sum(y for _, y in at)) for at in itertools.product(*steps)}


@given(st.lists(st.integers(2, 12), min_size=1, max_size=3), st.randoms(use_true_random=False), st.sampled_from([1, 2, 4, 8]),
       st.sampled_from([ALIKE, FIRST, SECOND]))
def test_every_element_stays(extents: list[int], random: Any, itemsize: int, counts: tuple[int, int]) -> None:
    """Of two tensors of these extents, the dimensions of each in an order of its own."""
    strides = []
    for _ in range(2):
        order, step, own = random.sample(range(len(extents)), len(extents)), 1, [0] * len(extents)
        for at in order:
            own[at], step = step, step * extents[at]
        strides.append(own)
    modes = [Mode(*mode) for mode in zip(extents, *strides)]
    made = ordered(modes, (itemsize, itemsize), counts)
    assert math.prod(mode.extent for mode in made) == math.prod(extents)
    assert elements(made) == elements(modes)
