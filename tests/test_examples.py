"""The examples: a few digits and a small graph in the emulator, everything on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from examples import digits, machine, shortest_paths

EMULATOR = machine.Machine("numpy")


def test_a_gram_matrix_is_exact_to_the_last_places() -> None:
    few = digits.load(24, 10)
    with EMULATOR.session():
        gram = digits.gram_matrix(few.test_x, few.train_x, digits.GAMMA, EMULATOR)
    assert gram.shape == (10, 24) and gram.dtype == np.float32
    error = digits.reference_error(gram, few.test_x, few.train_x, digits.GAMMA)
    assert error <= digits.WANTED_ERROR


def test_held_out_digits_are_not_trained_with() -> None:
    everything = digits.load()
    assert (len(everything.train_x), len(everything.test_x)) == (1198, 599)
    few = digits.load(30, 20)
    assert len(few.train_x) == 30 and len(few.test_x) == 20
    assert set(map(bytes, few.train_x)) <= set(map(bytes, everything.train_x))
    assert set(map(bytes, few.test_x)) <= set(map(bytes, everything.test_x))


def test_the_classifier_learns_from_its_gram_matrix() -> None:
    """By NumPy alone: what `main` demands holds for the digits that it takes in the emulator."""
    taken = digits.load(digits.EMULATED_TRAIN, digits.EMULATED_TEST)
    train = digits.reference_gram(taken.train_x, taken.train_x, digits.GAMMA)
    test = digits.reference_gram(taken.test_x, taken.train_x, digits.GAMMA)
    found = digits.classify(test, digits.fit(train, taken.train_labels, digits.LAMBDA))
    assert np.mean(found == taken.test_labels) >= digits.WANTED_ACCURACY


def test_digits_says_when_the_answer_is_not_good(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty digits do not teach ten classes: `main` reports that, and says so."""
    assert not digits.main(emulate=True, train=20, test=16)
    said = capsys.readouterr().out
    assert "20 of 1198 for training, 16 of 599 held out" in said and "a subset" in said
    assert "wanted: at least 0.97" in said


def test_shortest_paths_of_a_small_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert shortest_paths.main(emulate=True, graphs=["florentine-families"])
    said = capsys.readouterr().out
    assert "15 nodes, 20 edges" in said and "equal to networkx's answer" in said


def test_a_square_is_numpys() -> None:
    """At a size that no tile divides, with nodes that nothing leads to."""
    lengths = shortest_paths.load("southern-women").lengths[:21, :21].copy()
    lengths[3, :] = lengths[:, 3] = np.inf
    with EMULATOR.session():
        square = shortest_paths.square(lengths, EMULATOR)
    assert np.array_equal(square, shortest_paths.reference_square(lengths)) and np.isinf(square[3]).all()


def test_distances_that_never_settle_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortest_paths, "square", lambda distances, where: distances - 1)
    with pytest.raises(RuntimeError, match="the products are wrong"):
        shortest_paths.all_pairs(shortest_paths.load("florentine-families"), EMULATOR)


def test_unknown_graphs_and_too_many_digits_are_refused() -> None:
    with pytest.raises(ValueError, match="name: got 'roads', must be one of les-miserables"):
        shortest_paths.load("roads")
    with pytest.raises(ValueError, match="got 5000 digits to take"):
        digits.load(5000)


@pytest.mark.gpu
def test_all_digits_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.main(emulate=False), capsys.readouterr().out


@pytest.mark.gpu
def test_all_graphs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert shortest_paths.main(emulate=False), capsys.readouterr().out
