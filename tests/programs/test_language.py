"""The language of programs: what compares, what is refused, and with which words; each error names the program's line."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.programs.lengths import Axes
from gemmkit.programs.values import Axis
from gemmkit.runtime.device import H100, assumed
from tests.ptx_machine.launch import Ptx

SQUARE, VECTOR = np.zeros((64, 64), np.float16), np.zeros(64, np.float32)
SEGMENTS = np.arange(64)               # an array that a program names and does not take


def written(text: str) -> tuple[gp.Program, str]:
    """A program from its text, and the name of the file that errors give."""
    file = f"<program {hash(text)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    held: dict[str, Any] = dict(gp=gp, gk=gk, np=np, math=math, segments=SEGMENTS)
    exec(compile(text, file, "exec"), held)
    return gk.program(held["f"]), file


def check_refused(text: str, words: str, call: Callable[[gp.Program], Any]) -> None:
    """``text`` is refused at its line that ends in a comment, if there is one, with these words."""
    program, file = written(text)
    lines = text.splitlines()
    with pytest.raises((ValueError, TypeError, AttributeError), match=words) as error:
        call(program)
    assert hasattr(error.value, "line")
    at = next((n for n, line in enumerate(lines, 1) if line.endswith("#")), None)
    assert at is None or f"at {file}:{at}\n" in str(error.value), error.value


END = """def f(a, b, d, y, flag, labels, alpha=1.0):
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        {}  #
        d[m, n] = acc
"""
ENDS = [
    # what depends on a value before there is one
    ("x = -acc if acc > 0 else acc", "control flow"), ("x = acc in (0.0, 1.0)", "control flow"), ("x = acc and acc", "control flow"),
    ("x = -acc if flag[m] == 1.0 else acc", r"control flow.*where\(condition"), ("x = not acc", "control flow"),
    ("x = 0 < acc < 1", "control flow"), ("x = max(acc, 0.0)", "control flow"), ("assert acc != acc", "control flow"),
    ("x = m == n", r"gp.place\(m\)"), ("x = m <= n", r"gp.place\(m\)"), ("x = a.rows == b.rows", r"a.shape\[0\]"),
    # conditions and numbers
    ("x = acc * (acc > 0)", r"where\(condition, 1.0, 0.0\)"), ("x = gp.where(acc, acc, 0)", "x != 0.0"), ("x = ~acc", "x != 0.0"),
    ("d[m, n] = acc != acc", r"where\(condition, 1.0, 0.0\)"), ("x = acc & 3", "is not a condition"), ("x = 3 & acc", "& with what"),
    ("x = (acc > 0).sum(axis=1)", "a condition is not a number"), ("x = (acc > 0) == (acc > 1)", "a condition is not a number"),
    ("x = gp.where(True, acc, 0)", "a condition compares values"), ("x = acc == 0.1", "not a float32"), ("x = acc != 2**24 + 1", "not a float32"),
    # NumPy, math, Python
    ("x = np.exp(acc)", r"write gp.exp\(x\)"), ("x = np.maximum(acc, 0)", r"write gp.maximum\(x, y\)"), ("x = np.sum(acc)", "x.sum"),
    ("x = np.where(acc > 0, acc, 0)", "write gp.where"), ("x = np.arctan(acc)", "functions of values are exp"),
    ("x = np.cbrt(acc)", "functions of values are exp"), ("x = np.asarray(acc)", "no number before"), ("x = math.erf(acc)", "no number before"),
    ("x = float(acc)", "functions are exp"), ("x = int(acc)", "functions are exp"), ("x = round(acc)", "functions are exp"),
    ("x = acc ** 'a'", "is not a value"), ("x = acc ** (acc > 0)", "a condition is not a number"), ("x = (acc > 0) ** 2", "a condition is not a number"),
    ("x = acc // 2", "have no //"), ("x = 7 % acc", "have no %"), ("x = divmod(acc, 2)", "have no divmod"), ("x = acc ^ 1", r"have no \^"),
    ("x = len(acc)", "no elements to go through"), ("x = list(acc)", "no elements"), ("x = sum(acc)", "no elements"),
    ("x = acc[0]", "cannot be indexed"), ("x = acc.shape", "a value of a program has no shape"), ("x = [v for v in a]", "cannot be indexed|no elements"),
    ("x = acc.sum()", "axis"), ("x = acc.astype('float61')", "a dtype is needed"), ("x = acc.astype(complex)", "real numbers"),
    ("x = gp.exp(acc, acc)", "positional argument"), ("x = undefined", "NameError: name 'undefined'"),
    ("x = gp.softmax(acc)", "no word 'softmax': the words are block_diagonal, call, copy"), ("x = gp.erfc(acc)", "no word 'erfc'"),
    # arrays
    ("x = range(a.rows)", "loops are for m, n in gp.parallel"), ("x = acc * a.columns", r"a.shape\[1\]"), ("x = a.columns / 2", "shape"),
    ("x = a.columns in (1, 2)", "shape"), ("x = [v for v in a.rows]", "gp.sequential"), ("x = segments[m]", "is an argument of it"),
    ("x = gp.where(lambda i, j: segments[i] <= segments[j], acc, 0.0)", "is an argument"), ("x = acc + segments", "pass the array as an argument"),
    ("x = segments * acc", "pass the array as an argument"), ("x = acc @ segments", "pass the array as an argument"), ("x = acc + 'a'", "'a' is not a value"),
    ("x = acc + None", "None is not a value"), ("x = acc + True", "True is neither a value"), ("x = labels[0]", "index 0 is 0"),
    ("x = flag * acc", "at most two dimensions"), ("x = a * 2", "without indices"), ("alpha[m] = acc", "store results in array arguments"),
    # stores
    ("y = acc", r"y = \.\.\. only rebinds the name.*write y\[m, n\]"),
    ("d[m, m] = acc", "is used twice"),
    ("with gp.once(n): y[m] = flag[m] + y[m]", "y is both read and stored.*acc \\+ c\\[m\\]"),
    ("acc[m, n] = 1.0", "assigned as a whole"),
    ("y[n] = flag[m]", "each element must get one value"), ("with gp.once(m): y[m] = flag[m]", "only the first block along"),
    ("x = gp.full(m, n, acc)", r"copy\(x\)"), ("x = gp.zeros(m, m)", "must be blocks of two loops"), ("x = gp.full()", "one or two blocks")]


@pytest.mark.parametrize("end, words", ENDS, ids=[end for end, _ in ENDS])
def test_a_mistake_at_a_tiles_end(end: str, words: str) -> None:
    check_refused(END.format(end), words, lambda f: f.plan(SQUARE, SQUARE, SQUARE.copy(), VECTOR.copy(), VECTOR, VECTOR))


ROUNDS = """def f(a, b, d):
    for m, n in gp.parallel(a.rows, b.columns):
        {}
        for k in gp.sequential(a.columns):
            {}
        d[m, n] = acc
"""
FORGOTTEN = ROUNDS.replace("d[m, n] = acc", "d = acc  #")
CELL = "acc = gp.zeros(m, n)"
OF_ROUNDS = [
    (CELL, "acc = acc + a[m, k] @ b[k, n]  #", r"write acc = gp.zeros\(m, n\) before the loop, and acc \+= "),
    ("acc = 0", "acc += a[m, k] @ b[k, n]  #", r"acc is not a cell.*write acc = gp.zeros\(m, n\)"),
    ("acc = 0.0", "acc = acc + a[m, k] @ b[k, n]  #", "acc is not a cell"), ("pass", "acc += a[m, k] @ b[k, n]  #", "acc = gp.zeros"),
    ("pass", "acc = a[m, k] @ b[k, n]", "acc is of one round of k, which is over"),
    (CELL + "; i = 1", "acc += i * (a[m, k] @ b[k, n]); i += 1  #", "i is not a cell"),
    (CELL, "acc += a[m, k] @ b[n, k]  #", "the left operand has k and the right operand has n to sum over"),
    (CELL, "acc += (acc < 1.0)  #", "a condition is not a number"), (CELL, "a = a[m, k]; acc += a @ b[k, n]  #", "a is an array argument"),
    (CELL, "acc += a[m, k] @ b[k, n]\n        acc += a[m, k] @ b[k, n]  #", "the loop of k is over")]


@pytest.mark.parametrize("begin, body, words", OF_ROUNDS, ids=[f"{begin}; {body}" for begin, body, _ in OF_ROUNDS])
def test_a_mistake_in_rounds(begin: str, body: str, words: str) -> None:
    check_refused(ROUNDS.format(begin, body), words, lambda f: f.plan(SQUARE, SQUARE, SQUARE.copy()))


def test_a_store_into_a_name() -> None:
    check_refused(FORGOTTEN.format(CELL, "acc += a[m, k] @ b[k, n]"), r"d is an array argument: .*write d\[m, n\] = ",
                  lambda f: f.reference(SQUARE, SQUARE, SQUARE.copy()))


WHOLE = """def f(x, w, y):
    for m in gp.parallel(x.rows):
        {}
"""
WHOLES = [
    ("y = x[m]  #", r"y is an array argument.*write y\[m\] = "), ("h = x[m]", "nothing is stored"),
    ("y[m] = x[m]; h = y[m]  #", "y is both read and stored"), ("y = y[m] * x[m]  #", "y is an array argument"),
    ("y[m] = x[m]; w = x[m]  #", "w = ... only rebinds the name"),
    ("h = gp.zeros(m, w.columns)\n        for n in list(gp.sequential(w.rows)):  #\n            h += (x[m] @ w[n].T) @ w[n]", "enumerate"),
    ("h = gp.zeros(m, w.columns)\n        for i, n in enumerate(gp.sequential(w.rows)):  #\n            h += x[m]", "write loops as for"),
    ("y[m] = x[m]\n    for m in gp.parallel(x.rows):\n        y[m] = x[m]", "2 parallel loops")]


@pytest.mark.parametrize("body, words", WHOLES, ids=[body for body, _ in WHOLES])
def test_a_mistake_in_tiles_of_whole_rows(body: str, words: str) -> None:
    for call in (lambda f: f.plan(SQUARE, SQUARE, SQUARE.copy()), lambda f: f.reference(SQUARE, SQUARE, SQUARE.copy())):
        check_refused(WHOLE.format(body), words, call)


def test_a_cell_from_outside_of_the_tiles() -> None:
    text = """def f(x, w, y):
    total = gp.zeros(x.columns)
    for m in gp.parallel(x.rows):
        total += 1.0
        y[m] = x[m]
"""
    check_refused(text, "is made outside of the tiles", lambda f: f.plan(SQUARE, SQUARE, SQUARE.copy()))


def test_a_result_of_a_stack_has_a_place_for_each() -> None:
    text = """def f(x, w, y):
    for h, m in gp.parallel(x.count, x.rows):
        y[m] = x[h, m]  #
"""
    stack = np.zeros((3, 64, 64), np.float16)
    check_refused(text, r"stored for each h .*and each overwrites the one before.*y\[h, m\]", lambda f: f.reference(stack, SQUARE, SQUARE.copy()))


@pytest.mark.parametrize("given, words", [
    ((SQUARE.tolist(), SQUARE, SQUARE), "AttributeError: 'list'.*a is of type list, and a program's arrays are needed"),
    ((None, SQUARE, SQUARE), "a is None"), ((SQUARE, SQUARE, None), "d is None"), ((SQUARE, SQUARE, 3), "d is of type int"),
    ((SQUARE, SQUARE, 3.0), "store results in array arguments"), ((SQUARE, SQUARE, SQUARE.tolist()), "d is of type list"),
    ((SQUARE, SQUARE, {}), "nothing is stored"), ((SQUARE, "b", SQUARE), "b is of type str"), ((1.0, SQUARE, SQUARE), "a value of a program has no rows")])
def test_arguments_of_another_kind(given: tuple, words: str) -> None:
    text = ROUNDS.format(CELL, "acc += a[m, k] @ b[k, n]")
    for call in (lambda f: f.plan(*given), lambda f: f.reference(*given)):
        check_refused(text, words, call)


@pytest.mark.parametrize("a, d, words", [
    (np.zeros((64, 70), np.float16)[:, :64], SQUARE.copy(), r"a is an operand .*TMA cannot load it.*kernel='multistage'\) takes it"),
    (np.zeros((64, 65), np.float16)[:, :64], SQUARE.copy(), "a is an operand .*TMA cannot load it.*[^t]\n"),
    (SQUARE.T, SQUARE.copy(), r"a is an operand .*TMA cannot load it.*; pass its transpose"),
    (SQUARE, SQUARE.astype(np.int8), "d has dtype int8"), (SQUARE, np.broadcast_to(SQUARE[:1], SQUARE.shape), "read-only"),
    (SQUARE, as_strided(SQUARE.copy(), SQUARE.shape, (2, 2)), "several of its elements share memory"),
    (SQUARE.astype(np.float32), SQUARE.copy(), "a has dtype float32")])
def test_arrays_that_have_no_kernel(a: Any, d: Any, words: str) -> None:
    check_refused(ROUNDS.format(CELL, "acc += a[m, k] @ b[k, n]"), words, lambda f: f.plan(a, SQUARE, d))


def test_an_error_of_the_programs_own_stays_as_it_is() -> None:
    class Own(Exception):
        pass

    def component(x: Any) -> Any:
        raise Own("mine")

    program, _ = written("def f(x, y, g):\n    for m in gp.parallel(x.rows):\n        y[m] = g(x[m])\n")
    with pytest.raises(Own, match="^mine$"):
        program.plan(SQUARE, SQUARE.copy(), component)


def test_values_are_shown_with_their_dimensions(capsys: pytest.CaptureFixture) -> None:
    text = """def f(x, w, y):
    for m in gp.parallel(x.rows):
        h = gp.zeros(m, w.columns)
        print(repr(h), x[m].sum(axis=1), repr(gp.exp(1.0)), sep="; ")
        y[m] = h
"""
    program, _ = written(text)
    program.reference(SQUARE[:2], SQUARE, SQUARE[:2].copy())
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["<cell of (m, all of axis 1 of w (64))>; <value of (m)>; <value>",
                     "<cell of (m, all of axis 1 of w (64))>; <value of (m)>[0. 0.]; <value>"]


ROUNDED = """def f(a, b, c, d):
    for m in gp.parallel(a.rows):
        out, h = gp.zeros(m, c.columns), gp.copy(a[m])
        for n in gp.sequential(b.rows):
            {}
        d[m] = out
"""


@pytest.mark.parametrize("round, words", [
    ("p = a[m] @ b[n].T; out += p @ c[n]  #", r"p, is float32, but c is float16.*p.astype\(c.dtype\)"),
    ("out += gp.exp(a[m] @ b[n].T) @ c[n]  #", "is float32, but c is float16"),
    ("p = (a[m] @ b[n].T).astype('bfloat16'); out += p @ c[n]  #", "p, is bfloat16, but c is float16"),
    ("p = (a[m] @ b[n].T).astype(c.dtype); out += p @ c[n]", "")])
def test_a_computed_operand_is_rounded_by_the_program(round: str, words: str) -> None:
    """The kernel rounds it anyway, and a reference that does not would be another result."""
    text = ROUNDED.format(round)
    if words:
        check_refused(text, words, lambda f: f.plan(SQUARE, SQUARE, SQUARE, SQUARE.copy()))
    else:
        written(text)[0].plan(SQUARE, SQUARE, SQUARE, SQUARE.copy())


LAYERS = """def f(x, w, y):
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for layer in gp.sequential(w.count):
            h[:] = {}
        y[m] = h
"""


def test_a_cell_of_layers_is_rounded_by_the_program() -> None:
    stack = np.zeros((3, 64, 64), np.float16)
    written(LAYERS.format("gp.maximum(h @ w[layer], 0.0).astype(w.dtype)"))[0].plan(SQUARE, stack, SQUARE.copy())
    check_refused(LAYERS.format("gp.maximum(h @ w[layer], 0.0)  #"), r"h, is float32, but w is float16.*h.astype\(w.dtype\)",
                  lambda f: f.plan(SQUARE, stack, SQUARE.copy()))


# -- axes are symbols -------------------------------------------------------------------------------------------------------

#: Programs of square arrays: what they go along, what they add up, and what is said of a slip.
SQUARES = [
    ("a.rows, a.columns", "a.columns", "a[m, k] @ a[k, n]", ""), ("a.rows, a.columns", "a.rows", "a[m, k] @ a[k, n]", ""),
    ("d.rows, d.columns", "a.columns", "a[m, k] @ a[k, n]", ""), ("a.rows, a.rows", "a.columns", "a[m, k] @ a[n, k].T", ""),
    ("a.rows, b.columns", "b.rows", "a[m, k] @ b[k, n]", ""), ("a.rows, b.rows", "a.columns", "a[m, k] @ b[n, k].T", ""),
    ("a.rows, b.columns", "a.rows", "a[m, k] @ b[k, n]", "k is a block of axis 0 of a .*axis 1 of a, which is another axis"),
    ("a.rows, b.columns", "a.columns", "a[k, m].T @ b[k, n]", "k is a block of axis 1 of a .*axis 0 of a, which is another axis"),
    ("a.rows, b.columns", "a.columns", "a[m, k] @ b[n, k].T", "n is a block of axis 1 of b .*axis 0 of b, which is another axis"),
    ("a.rows, a.rows", "a.columns", "a[m, k] @ a[k, n]", "n is a block of axis 0 of a"),
    ("a.rows, a.rows", "a.rows", "a[m, k] @ a[n, k].T", "k is a block of axis 0 of a"),
    ("a.rows, a.columns", "b.rows", "a[m, k] @ a[k, n]", "k is used for two axes of a.*loop over a.rows or a.columns")]


@pytest.mark.parametrize("tile, rounds, product, words", SQUARES, ids=[" ".join(case[:3]) for case in SQUARES])
def test_an_index_goes_along_the_axis_that_it_is_made_of(tile: str, rounds: str, product: str, words: str) -> None:
    """Square arrays are taken where the program says that they are square, and a slip is refused as for other lengths."""
    text = f"""def f(a, b, d):
    for m, n in gp.parallel({tile}):
        acc = gp.zeros(m, n)
        for k in gp.sequential({rounds}):
            acc += {product}{"  #" if words else ""}
        d[m, n] = acc
"""
    if words:
        check_refused(text, words, lambda f: f.plan(SQUARE, SQUARE, SQUARE.copy()))
        check_refused(text, words, lambda f: f.reference(SQUARE, SQUARE, SQUARE.copy()))
        return
    program, _ = written(text)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((50, 50)), rng.standard_normal((50, 50))
    wanted = {"a[m, k] @ a[k, n]": a @ a, "a[m, k] @ a[n, k].T": a @ a.T, "a[m, k] @ b[k, n]": a @ b, "a[m, k] @ b[n, k].T": a @ b.T}
    np.testing.assert_allclose(program.reference(a, b, np.empty((50, 50))), wanted[product])


@pytest.mark.parametrize("seed", range(8))
def test_drawn_indices_are_taken_or_refused_whatever_lengths_are(seed: int) -> None:
    """Programs of axes drawn at random, of square arrays and of axes that are as long as the program says and no other: both
    are right, or both are refused."""
    rng, taken = np.random.default_rng(seed), 0
    for _ in range(40):
        extents = [(str(rng.choice(list("abcd"))), int(rng.integers(2))) for _ in range(3)]
        blocks = {"P": (str(rng.choice(list("ab"))), "mk"), "Q": (str(rng.choice(list("ab"))), "kn"), "C": ("c", "mn"), "D": ("d", "mn")}
        turned = {name: bool(rng.integers(2)) for name in blocks}
        keys = {name: of[::-1] if turned[name] else of for name, (_, of) in blocks.items()}
        said = {name: f"{array}[{', '.join(keys[name])}]" + (".T" if turned[name] and name in "PQ" else "")
                for name, (array, _) in blocks.items()}
        x, y, z = (f"{array}.{('rows', 'columns')[axis]}" for array, axis in extents)
        program, _ = written(f"""def f(a, b, c, d):
    for m, n in gp.parallel({x}, {y}):
        acc = gp.zeros(m, n)
        for k in gp.sequential({z}):
            acc += {said["P"]} @ {said["Q"]}
        {said["D"]} = acc + {said["C"]}
""")
        same = {(array, axis): (array, axis) for array in "abcd" for axis in range(2)}         # by where indices stand
        for index, extent in zip("mnk", extents):
            for at in [extent, *((array, keys[name].index(index)) for name, (array, of) in blocks.items() if index in of)]:
                old, new = same[at], same[extent]
                same = {axis: new if found == old else found for axis, found in same.items()}
        lengths = dict(zip(sorted(set(same.values())), (3, 41, 5, 7, 2, 4, 6, 8)))
        outcomes = []
        for size in (lambda axis: 41), (lambda axis: lengths[same[axis]]):
            a, b, c, d = (rng.standard_normal((size((array, 0)), size((array, 1)))) for array in "abcd")
            given = {"a": a, "b": b, "c": c}
            wanted = {name: given[array].T if turned[name] else given[array] for name, (array, _) in blocks.items() if name != "D"}
            try:
                got = program.reference(a, b, c, d)
            except ValueError as error:
                outcomes.append(str(error).split(":")[0])
                continue
            outcomes.append("")
            exact = wanted["P"] @ wanted["Q"] + wanted["C"]
            np.testing.assert_allclose(got, exact.T if turned["D"] else exact, atol=1e-9)
        assert outcomes[0] == outcomes[1], (said, extents, outcomes)
        taken += outcomes[0] == ""
    assert 3 <= taken <= 37


def test_an_index_is_of_another_arrays_axis() -> None:
    """A bias by rows and columns, a transposed result: the program says which axes are the same."""
    @gk.program
    def transposed_square(a: Any, bias: Any, d: Any) -> None:
        for m, n in gp.parallel(a.rows, a.rows):
            acc = gp.zeros(m, n)
            for k in gp.sequential(a.columns):
                acc += a[m, k] @ a[n, k].T
            d[n, m] = acc + bias[m] * bias[n]

    a, bias = np.random.default_rng(1).standard_normal((50, 40)), np.arange(50.0)
    got = transposed_square.reference(a, bias, np.empty((50, 50)))
    np.testing.assert_allclose(got, a @ a.T + bias[:, None] * bias)
    with pytest.raises(ValueError, match=r"bias\[m\]: m is a block of axis 0 of a \(50\), used here for axis 0 of bias \(49 elements\)"):
        transposed_square.reference(a, bias[1:], np.empty((50, 50)))


@pytest.mark.parametrize("begin, round, words", [
    ("gp.zeros(m, w.columns)", "(x[m] @ w[n].T) @ w[n]", ""),
    ("gp.zeros(m, w.rows)", "(x[m] @ w[n].T) @ w[n]", "axis 0 of w .* is combined with all of axis 1 of w .*equal lengths"),
    ("gp.copy(x[m])", "(x[m] @ w[n].T) @ w[n]", ""), ("gp.zeros(m, w.columns)", "x[m] * w[n]", "at most two dimensions"),
    ("gp.zeros(m, w.columns)", "gamma * x[m]", ""), ("gp.zeros(m, w.columns)", "u * x[m]", "at most two dimensions")])
def test_whole_axes_meet_where_the_program_has_them_meet(begin: str, round: str, words: str) -> None:
    text = f"""def f(x, w, gamma, u, y):
    for m in gp.parallel(x.rows):
        h = {begin}
        for n in gp.sequential(w.rows):
            h += {round}{"  #" if words else ""}
        y[m] = h
"""
    given = SQUARE, SQUARE, VECTOR, VECTOR[1:], SQUARE.copy()
    if words:
        check_refused(text, words, lambda f: f.reference(*given))
    else:
        written(text)[0].reference(*given)


def test_layers_of_a_stack_say_that_they_are_square() -> None:
    text = """def f(x, w, y):
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for layer in gp.sequential(w.count):
            h[:] = h @ (2.0 * w[layer])
        y[m] = h
"""
    x, w = np.random.default_rng(1).standard_normal((41, 5)), np.random.default_rng(2).standard_normal((3, 5, 5))
    wanted = x @ (2 * w[0]) @ (2 * w[1]) @ (2 * w[2])
    np.testing.assert_allclose(written(text)[0].reference(x, w, np.empty_like(x)), wanted)


def test_two_whole_axes_of_an_array_meet_through_others() -> None:
    axes, w = Axes(), [Axis(5, ("w", axis)) for axis in (1, 2)]
    with pytest.raises(ValueError, match="add: all of axis 1 of w .5. is combined with all of axis 2 of w"):
        axes.meet(lambda: "add", w[0], w[1])
    axes.meet(lambda: "dot", w[0], Axis(5, ("x", 1)), is_contracted=True)
    axes.meet(lambda: "add", Axis(5, ("x", 1)), w[1])
    axes.meet(lambda: "add", w[0], w[1])
    assert axes.are_same(("w", 1), ("w", 2))


# -- conditions -------------------------------------------------------------------------------------------------------------

@gk.program
def of_tiles(a: Any, b: Any, flag: Any, labels: Any, c: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        x = gp.where(flag[m] == 1.0, acc, -abs(acc) ** 3)
        x = gp.where((gp.place(n) == labels[m]) | ~(c[m, n] != c[m, n]), x, 7.0)
        d[m, n] = gp.where((acc != acc) & (flag[m] != 0.0), 0.0, x)


@gk.program
def of_rows(x: Any, flag: Any, seen: Any, y: Any, count: Any) -> None:
    for m in gp.parallel(x.rows):
        t = gp.where((x[m] == 1.0) | (flag[m] != 1.0), x[m] * 2.0, x[m])
        y[m] = gp.where(~(t == t), -1.0, abs(t) ** 2)
        count[m] = gp.where(lambda i, j: (j != i) & ~(seen[i] == j), gp.where(t != 0.0, 1.0, 0.0), 0.0).sum(axis=1)


@gk.program
def of_rounds(a: Any, b: Any, c: Any, left: Any, right: Any, labels: Any, d: Any, e: Any, alpha: float) -> None:
    """A product of what is in the same segment, and the score of a label."""
    for m in gp.parallel(a.rows):
        out, hits = gp.zeros(m, c.columns), gp.zeros(m)
        for n in gp.sequential(b.rows):
            s = a[m] @ b[n].T
            p = gp.where((left[m] == right[n]) | (s != s), s, 0.0)
            hits += gp.where(gp.place(n) == labels[m], s, 0.0).sum(axis=1)
            out += gp.where(alpha == 2.0, p, abs(p)).astype(a.dtype) @ c[n]
        d[m] = gp.where(hits != 0.0, out, -out)
        e[m] = hits


KERNELS = "warp_specialised", "multistage"


@pytest.mark.parametrize("kernel", KERNELS)
def test_conditions_at_a_tiles_end(kernel: str) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((33, 24), (24, 40), (33, 40)))
    flag, labels = rng.integers(0, 3, 33).astype(np.float32), rng.integers(0, 40, 33).astype(np.int32)
    c[::3, ::2], a[5] = np.nan, np.nan
    acc = a.astype(float) @ b.astype(float)
    x = np.where(flag[:, None] == 1.0, acc, -np.abs(acc) ** 3)
    x = np.where((np.arange(40) == labels[:, None]) | ~(c != c), x, 7.0)
    x = np.where((acc != acc) & (flag[:, None] != 0.0), 0.0, x)
    d = np.full((33, 40), 9.0, np.float32)
    np.testing.assert_allclose(of_tiles.reference(a, b, flag, labels, c, d), x)
    with gk.emulate():
        of_tiles(a, b, flag, labels, c, d, mapping=gk.Mapping({"n": 64}, warpgroups=1, kernel=kernel))
    np.testing.assert_allclose(d, x, rtol=1e-3, atol=1e-3)


def test_conditions_in_rows() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-2, 3, (9, 70)).astype(np.float16)
    flag, seen = rng.integers(0, 3, 9).astype(np.float32), rng.integers(0, 70, 9).astype(np.float32)
    x[2:5, ::7] = np.nan
    x[5:7, ::6] = -0.0
    t = np.where((x == 1.0) | (flag[:, None] != 1.0), 2.0 * x, x)
    hides = (np.arange(70) == np.arange(9)[:, None]) | (np.arange(70) == seen[:, None])
    wanted = np.where(t != t, -1.0, t * t), np.where(~hides & (t != 0), 1.0, 0.0).sum(1)
    y, count = np.full((9, 70), 9.0, np.float32), np.full(9, 9.0, np.float32)
    for got, exact in zip(of_rows.reference(x, flag, seen, y, count), wanted):
        np.testing.assert_array_equal(got, exact)
    with gk.emulate():
        of_rows(x, flag, seen, y, count)
    np.testing.assert_array_equal(y, wanted[0])
    np.testing.assert_array_equal(count, wanted[1])


@pytest.mark.kin(1)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("alpha", [2.0, 3.0])
def test_conditions_in_rounds(kernel: str, alpha: float) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((20, 64), (90, 64), (90, 64)))
    left, right = rng.integers(0, 3, 20).astype(np.int32), rng.integers(0, 3, 90).astype(np.int32)
    labels = rng.integers(0, 90, 20).astype(np.int32)
    a[3] = 0.0                                         # its hits are 0
    s = a.astype(float) @ b.astype(float).T
    p, hits = np.where(left[:, None] == right, s, 0.0), s[np.arange(20), labels]
    out = (p if alpha == 2.0 else np.abs(p)) @ c.astype(float)
    out = np.where(hits[:, None] != 0.0, out, -out)
    d, e = np.full((20, 64), np.nan, np.float32), np.full(20, np.nan, np.float32)
    for got, exact in zip(of_rounds.reference(a, b, c, left, right, labels, d, e, alpha), (out, hits)):
        np.testing.assert_allclose(got, exact, rtol=1e-2, atol=0.05)               # p is rounded to float16
    with gk.emulate():
        of_rounds(a, b, c, left, right, labels, d, e, alpha, mapping=gk.Mapping({"n": 64}, warpgroups=1, kernel=kernel))
    np.testing.assert_allclose(d, out, rtol=1e-2, atol=0.05)
    np.testing.assert_allclose(e, hits, rtol=1e-3, atol=1e-3)


@pytest.mark.kin(1)
@pytest.mark.compile
def test_conditions_as_compiled() -> None:
    """The PTX of comparisons and of what joins them, NaN among their numbers."""
    rng = np.random.default_rng(1)
    x = rng.integers(-2, 3, (5, 40)).astype(np.float16)
    x[2:4, ::7] = np.nan
    flag, seen = rng.integers(0, 3, 5).astype(np.float32), rng.integers(0, 40, 5).astype(np.float32)
    y, count = np.full((5, 40), 9.0, np.float32), np.full(5, 9.0, np.float32)
    with Ptx().session():
        of_rows.plan(x, flag, seen, y, count).run(dict(x=x, flag=flag, seen=seen, y=y, count=count))
    for got, exact in zip((y, count), of_rows.reference(x, flag, seen, y, count)):
        np.testing.assert_array_equal(got, exact)
    a, b, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((33, 24), (24, 40), (33, 40)))
    flag, labels = rng.integers(0, 3, 33).astype(np.float32), rng.integers(0, 40, 33).astype(np.int32)
    c[::3, ::2], a[5], d = np.nan, np.nan, np.full((33, 40), 9.0, np.float32)
    plan = of_tiles.plan(a, b, flag, labels, c, d, mapping=gk.Mapping({"n": 64}, warpgroups=1, kernel="multistage"))
    with Ptx().session():
        plan.run(dict(a=a, b=b, flag=flag, labels=labels, c=c, d=d))
    np.testing.assert_allclose(d, of_tiles.reference(a, b, flag, labels, c, d), rtol=1e-3, atol=1e-3)


@gk.program
def extremes_and_sums(a: Any, b: Any, top: Any, least: Any, total: Any) -> None:
    for m in gp.parallel(a.rows):
        acc = gp.zeros(m, b.columns)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k]
        top[m] = acc.max(axis=1)
        least[m] = acc.min(axis=1)
        total[m] = acc.sum(axis=1)


@pytest.mark.compile
@pytest.mark.parametrize("columns", [8, 16, 24])
def test_rows_of_few_columns_as_compiled(columns: int, rng: np.random.Generator) -> None:
    """Each thread may have one part of a row, and nothing to combine it with."""
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((20, 32), (32, columns)))
    results = [np.full(20, np.nan, np.float32) for _ in range(3)]
    plan = extremes_and_sums.plan(a, b, *results, mapping=gk.Mapping(kernel="multistage"))
    with Ptx().session():
        plan.run(dict(zip(extremes_and_sums.names, (a, b, *results))))
    for got, exact in zip(results, extremes_and_sums.reference(a, b, *results)):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


def test_signs_of_zero() -> None:
    """abs(-0.0) is 0.0, so that 1 / abs(x) is inf."""
    @gk.program
    def inverse(x: Any, y: Any) -> None:
        for m in gp.parallel(x.rows):
            y[m] = 1.0 / abs(x[m])

    x, y = np.array([[-0.0, 0.0, -2.0, np.nan]] * 2, np.float32), np.empty((2, 4), np.float32)
    with gk.emulate():
        inverse(x, y)
    np.testing.assert_array_equal(y, [[np.inf, np.inf, 0.5, np.nan]] * 2)
    np.testing.assert_array_equal(inverse.reference(x, y), y)


# -- what has a reference alone ---------------------------------------------------------------------------------------------

@gk.program
def chunks(q: Any, k: Any, v: Any, o: Any, last: Any) -> None:
    """Linear attention in chunks: a causal product within a block, and a state that rounds carry."""
    for h in gp.parallel(q.count):
        state = gp.zeros(k.columns, v.columns)
        for n in gp.sequential(q.rows):
            s = gp.where(lambda i, j: j <= i, q[h, n] @ k[h, n].T, 0.0)
            o[h, n] = s @ v[h, n] + q[h, n] @ state
            state += k[h, n].T @ v[h, n]
        last[h] = state


@pytest.mark.parametrize("block", [37, 100, 8])
def test_rows_and_columns_of_a_product_may_be_one_block_of_a_round(block: int) -> None:
    rng = np.random.default_rng(1)
    (q, k), v = rng.standard_normal((2, 2, 100, 8)), rng.standard_normal((2, 100, 5))
    o, last = chunks.reference(q, k, v, np.empty((2, 100, 5)), np.empty((2, 8, 5)), block=block)
    np.testing.assert_allclose(o, np.tril(q @ k.transpose(0, 2, 1)) @ v, atol=1e-12)
    np.testing.assert_allclose(last, k.transpose(0, 2, 1) @ v, atol=1e-12)


def test_a_block_with_itself_is_of_a_round() -> None:
    """Its product is rounded before it is an operand; tiles' rows have none."""
    x = np.zeros((2, 64, 64), np.float16)
    with assumed(H100), pytest.raises(TypeError, match=r"round what is computed, x.astype\(v.dtype\)\n  at .*test_language.py"):
        chunks.plan(x, x.copy(), x.copy(), x.copy(), x.copy())
    text = """def f(x, y):
    for m in gp.parallel(x.rows):
        y[m] = (x[m] @ x[m].T) @ x[m]  #
"""
    check_refused(text, "the same block of m", lambda f: f.reference(SQUARE, SQUARE.copy()))


def test_once_is_the_first_block() -> None:
    @gk.program
    def first(x: Any, y: Any) -> None:
        for h, m in gp.parallel(x.count, x.rows):
            with gp.once(h):
                y[m] = x[h, m]

    x = np.random.default_rng(1).standard_normal((3, 80, 4))
    np.testing.assert_array_equal(first.reference(x, np.empty((80, 4))), x[0])
