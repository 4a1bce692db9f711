"""`bench.choice` without a GPU: what is drawn, which mappings are tried, and what a row says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import gemmkit
from bench import choice
from bench.experiments.types import Product
from bench.harness import Call
from gemmkit.runtime.device import H100, assumed
from tests.support.hosts import Host
from tests.support.patches import Seeded


class Card(Host):
    """Its graphs launch nothing: each call in one takes 1 us."""

    def capture(self, calls: Sequence[Call]) -> Call:
        def replay() -> None:
            self.now += len(calls)

        return replay


def test_products_are_the_same_for_a_seed() -> None:
    products = list(choice.drawn(40))
    assert products == list(choice.drawn(60))[:40] != list(choice.drawn(40, seed=1))
    assert {p.kind for p in products} == set(choice.KINDS)
    assert all(choice.LEAST <= size <= choice.LARGEST for p in products for size in (p.m, p.n, p.k))
    assert all(p.m * p.n * p.k <= choice.MOST[p.kind] and p.input_bytes <= choice.MOST_BYTES for p in products)


@pytest.mark.parametrize("product", [Product("choice", "1", "f16", 384, 320, 944, order="nt"),
                                     Product("choice", "2", "f16", 40, 1184, 1408, order="tn"),       # by its transpose
                                     Product("choice", "3", "f32", 296, 512, 466)], ids=str)
def test_the_default_is_first_and_each_mapping_once(product: Product) -> None:
    with assumed(H100):
        found = choice.ways(product, 9)
    assert found[0].candidate is None and len(found) == 10 and all(way.candidate for way in found[1:])
    mappings = [(way.config.mapping, way.config.operator) for way in found]
    turned = (product.m, product.n) == (40, 1184)
    assert len(set(mappings[turned:])) == len(mappings[turned:])
    assert len({way.candidate.block[:2] for way in found if way.candidate}) > 3          # tiles first, and not one's variants


def test_a_row_has_the_best_mapping_and_what_was_tried() -> None:
    product = Product("choice", "1", "f32", 8, 16, 24)
    host = Card()
    with gemmkit.emulate(), assumed(H100):
        listed = choice.ways(product, 2)
        found = choice.row(host, product, listed)
    assert found["peer"] == "the best mapping tried" and 0 < found["ratio"] <= 1 and found["error"] <= product.tolerance
    assert [one["name"] for one in found["tried"]] == [way.name for way in listed[1:]]
    assert all("error" not in one and one["us"] > 0 for one in found["tried"])
    assert found["best"] in {"default", *(one["name"] for one in found["tried"])}
    assert "1 products" in choice.summary([found])


def test_a_wrong_candidate_is_said_and_has_no_time(replaced: Seeded) -> None:
    product = Product("choice", "1", "f32", 8, 16, 24)
    host = Card()
    with gemmkit.emulate(), assumed(H100):
        listed = choice.ways(product, 2)
        calls = choice.Timed.calls

        def wrong(self: choice.Timed, way: choice.Way) -> Any:
            made = calls(self, way)
            return made if way is not listed[1] else [lambda: None] * len(made)

        replaced(choice.Timed, "calls", wrong)
        found = choice.row(host, product, listed)
    assert found["tried"][0]["error"].startswith("ValueError: wrong") and "us" not in found["tried"][0]
    assert found["tried"][1]["us"] > 0
