"""The comparison that other tests rest on: what must not pass does not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.checks import assert_close, relative_error


def test_the_error_is_that_of_norms(rng: np.random.Generator) -> None:
    ref = rng.standard_normal((5, 7))
    assert relative_error(ref, ref) == 0.0
    assert relative_error(1.01 * ref, ref) == pytest.approx(0.01)
    assert relative_error(1j * ref, ref) == pytest.approx(np.sqrt(2))
    assert relative_error(np.zeros((2, 0)), np.zeros((2, 0))) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_that_is_not_finite_passes(bad: float) -> None:
    ref = np.ones(4)
    out = ref.copy()
    out[2] = bad
    with pytest.raises(AssertionError, match="inf"):
        assert_close(out, ref, 1e300)


def test_infinities_of_the_reference_must_be_there() -> None:
    ref = np.array([1.0, np.inf, -np.inf])
    assert relative_error(ref, ref) == 0.0
    for out in ([1.0, np.inf, np.inf], [1.0, 5.0, -np.inf], [1.0, np.nan, -np.inf]):
        assert relative_error(np.array(out), ref) == np.inf


def test_a_zero_reference_needs_zeros() -> None:
    assert relative_error(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_error(np.full(3, 0.1), np.zeros(3)) > 0.1


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        relative_error(np.zeros((2, 1)), np.zeros((1, 2)))
    with pytest.raises(ValueError, match="NaN"):
        relative_error(np.zeros(2), np.array([0.0, np.nan]))


def test_random_numbers_depend_on_the_name_alone(
    rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    import zlib

    again = np.random.default_rng(zlib.crc32(request.node.name.encode()))
    assert np.array_equal(rng.random(4), again.random(4))
