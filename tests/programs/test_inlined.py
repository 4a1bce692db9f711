"""Programs that call programs, with mappings of their own, and programs of several variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from tests.programs.test_derived import Drawn, check, drawn, empty  # noqa: F401 - a fixture
from tests.support import programs as listing


@gk.program
def add_product(acc: Any, a: Any, b: Any, m: Any, n: Any) -> None:
    for k in gp.sequential(a.columns):
        acc += a[m, k] @ b[k, n]


@gk.program
def add_product_of_columns(acc: Any, a: Any, b: Any, m: Any, n: Any) -> Any:
    for k in gp.sequential(a.rows):
        acc += a[k, m].T @ b[k, n]
    return 2.0 * acc


@gk.program
def two_products(a: Any, b: Any, c: Any, e: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        add_product(acc, a, b, m, n, mapping=gk.Mapping({"k": 128}, stages=2))
        twice = add_product_of_columns(acc, c, e, m, n, mapping=gk.Mapping({"k": 64}, stages=3))
        d[m, n] = twice



@gk.program
def whole(a: Any, b: Any, bias: Any, scale: Any, d: Any) -> None:
    listing.biased(a, b, bias, scale, d, alpha=0.5, mapping=gk.Mapping({"n": 64}, warpgroups=1))


@gk.program
def product(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc


@product.variant
def product_by_rows(a: Any, b: Any, d: Any) -> None:
    for m in gp.parallel(a.rows):
        acc = gp.zeros(m, b.columns)
        for k in gp.sequential(b.rows):
            acc += a[m, k] @ b[k]
        d[m] = acc


@gk.program
def doubled(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        finished(acc, a, b, d, m, n)


@gk.program
def finished(acc: Any, a: Any, b: Any, d: Any, m: Any, n: Any) -> None:
    add_product(acc, a, b, m, n)
    d[m, n] = 2.0 * acc


@finished.variant
def finished_by_halves(acc: Any, a: Any, b: Any, d: Any, m: Any, n: Any) -> None:
    other = gp.zeros(m, n)
    for k in gp.sequential(a.columns):
        acc += a[m, k] @ b[k, n]
        other += a[m, k] @ b[k, n]
    d[m, n] = acc + other


def arrays(drawn: Drawn) -> list[np.ndarray]:          # noqa: F811
    return [drawn(70, 72), drawn(72, 80), empty(70, 80)]


def test_rounds_have_mappings_of_their_own(drawn: Drawn) -> None:  # noqa: F811
    given = [drawn(72, 200), drawn(200, 80), drawn(136, 72), drawn(136, 80), empty(72, 80)]
    check(two_products, *given)
    plan = two_products.plan(*given)
    assert plan.mapping.blocks == {"m": 128, "n": 64, "k": 128, "k_2": 64}
    assert plan.mapping.stages == {"a": 2, "c": 3} and plan.text.count(" = Pipeline(") == 2
    said = two_products.plan(*given, mapping=gk.Mapping({"k_2": 128}, stages=2)).mapping
    assert said.blocks["k"] == 128 == said.blocks["k_2"] and said.stages == 2
    check(two_products, *given, mapping=gk.Mapping({"k": 64}, kernel="multistage"))


def test_a_called_program_may_be_all_of_it(drawn: Drawn) -> None:  # noqa: F811
    given = [drawn(67, 72), drawn(72, 80), drawn(80), drawn(67, dtype=np.float32), empty(67, 80)]
    check(whole, *given)
    assert whole.plan(*given).mapping.warpgroups == 1 and whole.plan(*given).mapping.blocks["n"] == 64
    mapping = whole.plan(*given, mapping=gk.Mapping({"n": 128})).mapping
    assert mapping.warpgroups == 1 and mapping.blocks["n"] == 128


def test_a_mapping_selects_a_variant(drawn: Drawn) -> None:  # noqa: F811
    given = arrays(drawn)
    for variant in ("product", "product_by_rows"):
        check(product, *given, mapping=gk.Mapping(variants={"product": variant}))
    by_rows = product.plan(*given, mapping=gk.Mapping(variants={"product": "product_by_rows"}))
    assert by_rows.text == product_by_rows.plan(*given).text.replace("product_by_rows:", "product:")
    assert by_rows.mapping.variants == {"product": "product_by_rows"}
    check(product_by_rows, *given)


def test_a_mapping_selects_a_variant_of_what_is_called(drawn: Drawn) -> None:  # noqa: F811
    given = arrays(drawn)
    chosen = gk.Mapping(variants={"finished": "finished_by_halves"})
    check(doubled, *given)
    check(doubled, *given, mapping=chosen)
    assert "other" in doubled.plan(*given, mapping=chosen).text and "other" not in doubled.plan(*given).text


@gk.program
def recursive(a: Any, b: Any, d: Any) -> None:
    recursive(a, b, d)


@gk.program
def rebinding(acc: Any, d: Any) -> None:
    d = acc                                            # noqa: F841


@gk.program
def calls_rebinding(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        add_product(acc, a, b, m, n)
        rebinding(acc, d)


def in_a_tile(mapping: gk.Mapping, **more: Any) -> Callable[..., None]:
    def calls(a: Any, b: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, b.columns):
            acc = gp.zeros(m, n)
            add_product(acc, a, b, m, n, mapping=mapping, **more)
            d[m, n] = acc

    return calls


@pytest.mark.parametrize("function, mapping, error, words", [
    (recursive.function, None, ValueError, "recursive calls itself"),
    (calls_rebinding.function, None, ValueError, "only rebinds the name and stores nothing"),
    (in_a_tile(gk.Mapping(warpgroups=1)), None, gk.ConfigError, "blocks and stages of its own loops are what it can say"),
    (in_a_tile(gk.Mapping({"n": 64})), None, gk.ConfigError, "its loops go along k, not along n"),
    (in_a_tile(gk.Mapping(), stream=1), None, TypeError, "leave stream out"),
    (in_a_tile(gk.Mapping({"k": 65})), None, gk.ConfigError, "64, 128, 192 or 256 is needed"),
    (doubled.function, gk.Mapping(variants={"finished": "fast"}), gk.ConfigError, "finished has the variants finished, finished_by"),
    (doubled.function, gk.Mapping(variants={"finishing": "fast"}), gk.ConfigError, "the programs are add_product, doubled, finished")],
    ids=range(8))
def test_mistakes(drawn: Drawn, function: Any, mapping: Any, error: Any, words: str) -> None:  # noqa: F811
    with pytest.raises(error, match=words):
        gk.program(function).plan(*arrays(drawn), mapping=mapping)


def test_variants_take_the_same_arguments() -> None:
    def other(a: Any, b: Any) -> None:
        """Takes one array less."""

    def finished_by_halves(acc: Any, a: Any, b: Any, d: Any, m: Any, n: Any) -> None:
        """A name that is taken."""

    with pytest.raises(TypeError, match=r"other\(a, b\) is no variant of product\(a, b, d\)"):
        product.variant(other)
    with pytest.raises(TypeError, match="has a variant 'finished_by_halves' already"):
        finished.variant(finished_by_halves)
    with pytest.raises(gk.ConfigError, match="a dict is needed"):
        gk.Mapping(variants="product_by_rows")       # type: ignore[arg-type]
