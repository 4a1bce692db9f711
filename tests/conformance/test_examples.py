"""The examples: a few digits, a small graph and a small molecule in the emulator, everything on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import gemmkit as gk
from examples import (
    attention,
    digits,
    experts,
    hydrogen_chain,
    hydrogen_integrals,
    machine,
    newton_schulz,
    programs,
    sensitivities,
    shortest_paths,
    transformer,
)
from tests.support.checks import assert_close
from tests.support.patches import Seeded

EMULATOR = machine.Machine("numpy")


@pytest.mark.kin(5)
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


@pytest.mark.thorough
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


@pytest.mark.kin(5)
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


def test_distances_that_never_settle_are_an_error(seeded: Seeded) -> None:
    seeded(shortest_paths, "square", lambda distances, where: distances - 1)
    with pytest.raises(RuntimeError, match="the products are wrong"):
        shortest_paths.all_pairs(shortest_paths.load("florentine-families"), EMULATOR)


def test_unknown_graphs_and_too_many_digits_are_refused() -> None:
    with pytest.raises(ValueError, match="name: got 'roads', must be one of les-miserables"):
        shortest_paths.load("roads")
    with pytest.raises(ValueError, match="got 5000 digits to take"):
        digits.load(5000)


def test_paths_are_along_edges_and_as_long_as_they_must_be() -> None:
    """By NumPy's argmin in place of `select`; a wrong predecessor is noticed."""
    network = shortest_paths.load("florentine-families")
    distances = shortest_paths.reference_distances(network)
    edges = network.lengths + np.where(np.eye(len(network.nodes)), np.inf, 0)
    via = distances[:, :, None] + edges[None]
    before = np.where(np.isinf(via.min(axis=1)), -1, via.argmin(axis=1))
    assert shortest_paths.are_paths(network, before, distances)
    assert shortest_paths.path(before, 3, 3) == [3]
    i, j = (int(n) for n in np.argwhere(distances == distances.max())[0])
    before[i, j] = i                                   # no edge joins the two that are farthest apart
    assert not shortest_paths.are_paths(network, before, distances)


@pytest.mark.kin(5)
def test_predecessors_are_those_of_shortest_paths() -> None:
    """With a node that nothing leads to."""
    lengths = shortest_paths.load("southern-women").lengths.copy()
    lengths[3, :] = lengths[:, 3] = np.inf
    lengths[3, 3] = 0
    network = shortest_paths.Network("cut", [str(n) for n in range(len(lengths))], 0, lengths, 1)
    distances = shortest_paths.reference_distances(network)
    before = shortest_paths.predecessors(network, distances, EMULATOR)
    assert shortest_paths.are_paths(network, before, distances)
    assert shortest_paths.path(before, 3, 5) == [] and (before[3] == -1).all() and (before[:, 3] == -1).all()


# -- derivatives by dual numbers ---------------------------------------------------------------------------------------

def check_sensitivities(where: machine.Machine, images: int, hidden: int) -> None:
    """Dual products agree with central differences of the same network."""
    data = digits.load(300, images)
    network = sensitivities.trained(data.train_x.astype(np.float64), data.train_labels, hidden)
    x = data.test_x.astype(np.float64)
    tangents = sensitivities.directions(x)
    scores = sensitivities.dual_scores(network, x, tangents, where)
    assert scores.shape == (images, 10) and scores.count == 4
    assert_close(scores.value, network(x), 1e-5)
    found = sensitivities.relative_error(scores.tangents, sensitivities.differences(network, x, tangents))
    assert found <= sensitivities.WANTED_ERROR


@pytest.mark.thorough
def test_sensitivities_are_derivatives() -> None:
    check_sensitivities(EMULATOR, 11, 7)


def test_a_digit_moves_as_its_tangents_say() -> None:
    """A smooth blob, moved a little in each way: the tangents are the image's change, up to the grid's coarseness."""
    row, column = np.indices((8, 8)) - 3.5

    def blob(right: float = 0, down: float = 0, turn: float = 0, scale: float = 1) -> np.ndarray:
        r, c = row - down, column - right
        r, c = np.cos(turn) * r - np.sin(turn) * c, np.sin(turn) * r + np.cos(turn) * c
        return np.exp(-((r / scale - 0.5) ** 2 / 3.6) - (c / scale + 0.9) ** 2 / 2.2)

    tangents = sensitivities.directions(blob().reshape(1, 64))[0]
    step = 1e-4
    for n, moved in enumerate((blob(right=step), blob(down=step), blob(turn=step), blob(scale=1 + step))):
        change = ((moved - blob()) / step).ravel()
        assert np.corrcoef(change, tangents[:, n])[0, 1] > 0.96
        assert 0.7 < np.linalg.norm(tangents[:, n]) / np.linalg.norm(change) < 1.1


def test_the_network_of_the_sensitivities_knows_digits() -> None:
    """By NumPy alone: what `main` demands on a GPU."""
    data = digits.load()
    network = sensitivities.trained(data.train_x.astype(np.float64), data.train_labels, sensitivities.HIDDEN)
    found = np.argmax(network(data.test_x.astype(np.float64)), axis=1)
    assert np.mean(found == data.test_labels) >= sensitivities.WANTED_ACCURACY


def test_wrong_derivatives_are_noticed(seeded: Seeded, capsys: pytest.CaptureFixture[str]) -> None:
    def without_rule(x: gk.functions.Dual, weights: np.ndarray, where: machine.Machine) -> gk.functions.Dual:
        return gk.functions.Dual.of(x.value @ weights, np.einsum("mkp,kn->mnp", x.tangents, np.abs(weights)))

    seeded(sensitivities, "product", without_rule)
    assert not sensitivities.main(emulate=True, images=5, hidden=6)
    assert "5 of 599 held-out digits, 6 features" in capsys.readouterr().out


# -- causal attention --------------------------------------------------------------------------------------------------

def check_attention(where: machine.Machine, count: int) -> None:
    """Masked scores, and values attended to by a lower triangle whose other half is NaN."""
    stream = attention.load(count)
    scores = attention.masked_scores(stream.queries, stream.keys, where)
    wanted, values = attention.reference(stream)
    past = np.tril_indices(count - 1)
    assert scores.dtype == np.float32 and np.isneginf(scores[np.triu_indices(count - 1, 1)]).all()
    assert_close(scores[past], wanted[past], attention.WANTED_SCORE_ERROR)
    probabilities = attention.softmax(scores).astype(np.float16)
    assert np.all(probabilities[np.triu_indices(count - 1, 1)] == 0)
    probabilities[np.triu_indices(count - 1, 1)] = np.nan
    out, block = attention.attended(probabilities, stream.values, where)
    assert_close(out, values, attention.WANTED_ERROR)
    taken, dense = attention.steps_taken(count - 1, block)
    assert dense / 2 < taken < dense


@pytest.mark.kin(5)
def test_attention_is_causal() -> None:
    check_attention(EMULATOR, 140)          # rows of two tiles: the first one needs two k-tiles of three


@pytest.mark.kin(5)
def test_attention_recognises_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(emulate=True)
    assert "193 of 1797 digits" in capsys.readouterr().out


def test_an_attention_to_the_future_is_noticed(seeded: Seeded, capsys: pytest.CaptureFixture[str]) -> None:
    def unmasked(queries: np.ndarray, keys: np.ndarray, where: machine.Machine) -> np.ndarray:
        return attention.SHARPNESS * (queries.astype(np.float32) @ keys.astype(np.float32).T)

    seeded(attention, "masked_scores", unmasked)
    assert not attention.main(emulate=True, count=20)
    assert "the mask IS WRONG" in capsys.readouterr().out


# -- tensor contractions -----------------------------------------------------------------------------------------------

def check_hydrogen(where: machine.Machine, atoms: int) -> None:
    """Every contraction against `numpy.einsum`."""
    orbitals = hydrogen_integrals.hartree_fock(hydrogen_chain.chain(atoms))
    found = hydrogen_chain.correlation(orbitals, where)
    errors = hydrogen_chain.errors(found, hydrogen_chain.correlation(orbitals, None))
    assert max(errors.values()) <= hydrogen_chain.WANTED_ERROR, errors
    occupied, empty = orbitals.occupied, atoms - orbitals.occupied
    assert found.ladder.shape == (occupied, empty, occupied, empty) and found.energy < 0


@pytest.mark.thorough
def test_the_energy_of_a_small_molecule() -> None:
    check_hydrogen(EMULATOR, 2)


def test_integrals_are_those_of_the_book() -> None:
    """H2 at 1.4 bohr in STO-3G: A. Szabo and N. Ostlund, Modern Quantum Chemistry, 3.5.2."""
    atoms = hydrogen_chain.chain(2, 1.4)
    overlap, core = hydrogen_integrals.one_electron(atoms)
    assert_close(overlap, np.array([[1, 0.6593], [0.6593, 1]]), 1e-4)
    assert_close(core, np.array([[-1.1204, -0.9584], [-0.9584, -1.1204]]), 1e-4)
    electrons = hydrogen_integrals.repulsion(atoms)
    found = [electrons[index] for index in ((0, 0, 0, 0), (0, 0, 1, 1), (1, 0, 0, 0), (1, 0, 1, 0))]
    assert_close(np.array(found), np.array([0.7746, 0.5697, 0.4441, 0.2970]), 1e-4)
    orbitals = hydrogen_integrals.hartree_fock(atoms)
    assert_close(orbitals.levels, np.array([-0.5782, 0.6703]), 1e-4)
    assert abs(orbitals.energy - hydrogen_chain.BOOK_ENERGY) < 5e-5
    assert abs(hydrogen_chain.correlation(orbitals, None).energy - hydrogen_chain.BOOK_CORRELATION) < 5e-5


def test_a_wrong_contraction_is_noticed(seeded: Seeded, capsys: pytest.CaptureFixture[str]) -> None:
    def slightly_off(spec: str, operands: list[np.ndarray], where: machine.Machine) -> np.ndarray:
        return hydrogen_chain.numpy_einsum(spec, operands) * (1 + 1e-6)

    seeded(hydrogen_chain, "einsum", slightly_off)
    assert not hydrogen_chain.main(emulate=True, atoms=4)
    assert "as in the book" in capsys.readouterr().out


def test_what_examples_refuse() -> None:
    with pytest.raises(ValueError, match="got 1 digits to take, must be 2 to 1797"):
        attention.load(1)
    with pytest.raises(ValueError, match="got 3 atoms, must be an even number"):
        hydrogen_integrals.hartree_fock(hydrogen_chain.chain(3))


# -- on a GPU ----------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.sample(3)
@pytest.mark.parametrize("check", [lambda where: check_sensitivities(where, 130, 97), lambda where: check_attention(where, 700),
                                   lambda where: check_hydrogen(where, 10)], ids=["sensitivities", "attention", "hydrogen"])
def test_odd_sizes_on_a_gpu(check: Callable[[machine.Machine], None]) -> None:
    check(machine.find(emulate=False))


@pytest.mark.gpu
def test_all_digits_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.main(emulate=False), capsys.readouterr().out


@pytest.mark.gpu
def test_all_graphs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert shortest_paths.main(emulate=False), capsys.readouterr().out


@pytest.mark.gpu
def test_all_sensitivities_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert sensitivities.main(emulate=False), capsys.readouterr().out


@pytest.mark.gpu
def test_all_of_the_stream_is_attended_to_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(emulate=False), capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.thorough
def test_the_long_chain_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert hydrogen_chain.main(emulate=False), capsys.readouterr().out


@pytest.mark.gpu
def test_sensitivities_are_those_of_pytorch() -> None:
    """Its forward mode, of all directions: the comparison that `main` makes where PyTorch is installed."""
    data = digits.load(300, 40)
    network = sensitivities.trained(data.train_x.astype(np.float64), data.train_labels, 48)
    x = data.test_x.astype(np.float64)
    tangents = sensitivities.directions(x)
    expected = sensitivities.torch_forward_mode(network, x, tangents)
    found = sensitivities.dual_scores(network, x, tangents, machine.find(emulate=False))
    assert sensitivities.relative_error(found.tangents, expected) <= sensitivities.WANTED_ERROR
    assert sensitivities.relative_error(sensitivities.differences(network, x, tangents), expected) < 1e-8


# -- a transformer -----------------------------------------------------------------------------------------------------

@pytest.mark.thorough
def test_a_transformer_is_fitted() -> None:
    """By NumPy alone: what `main` demands holds on all digits that are held out."""
    data = digits.load()
    network = transformer.fitted(data.train_x, data.train_labels)
    found = transformer.reference(network, transformer.tokens(data.test_x))
    assert np.mean(found.argmax(1) == data.test_labels) >= transformer.WANTED_ACCURACY


@pytest.mark.thorough
def test_a_transformer_reads_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert transformer.main(emulate=True, test=5)
    assert "5 of 599 held out are read" in capsys.readouterr().out


@pytest.mark.kin(5)
def test_programs_that_no_library_has(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs.main(emulate=True, rows=70)
    assert "in the emulator (no GPU is used): 70 rows" in capsys.readouterr().out
    monkeypatch.setattr(programs, "WANTED_ERROR", 0.0)
    assert programs.command(["--emulate", "--rows", "8"]) == 1


@pytest.mark.kin(5)
def test_a_layer_of_experts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert experts.main(emulate=True, tokens=40)
    assert "40 tokens, each to 2 of 5 experts, in the emulator" in capsys.readouterr().out
    monkeypatch.setattr(experts, "WANTED_ERROR", 0.0)
    assert experts.command(["--emulate", "--tokens", "3"]) == 1


@pytest.mark.gpu
def test_a_layer_of_experts_on_a_gpu() -> None:
    assert experts.main(emulate=False, tokens=1000)


@pytest.mark.kin(3)
def test_an_orthogonal_gradient(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert newton_schulz.main(emulate=True, rows=40)
    assert "5 steps of 40 x 60, in the emulator" in capsys.readouterr().out
    monkeypatch.setattr(newton_schulz, "WANTED_ERROR", 0.0)
    assert newton_schulz.command(["--emulate", "--rows", "8"]) == 1


@pytest.mark.gpu
def test_an_orthogonal_gradient_on_a_gpu() -> None:
    assert newton_schulz.main(emulate=False, rows=1000)
