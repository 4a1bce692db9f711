"""Operands of several arrays that do not fit: what is said, and that nothing has been written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, transforms
from gemmkit.epilogues import Bias, Elementwise, Epilogue, Fold, ReLU, Residual, activations
from gemmkit.operators import FPUOp
from tests.support.joined import config
from tests.support.machines import is_poison, poison

X, H, W, U = (np.ones(shape, np.float32) for shape in ((7, 5), (7, 4), (5, 9), (4, 9)))
V = np.ones((5, 9), np.float32)
ROOM = np.zeros((16, 16), np.float32)


class OfItsOwn(Epilogue):
    def tile(self, spec: Any, d: Any, tile: Any, values: Any, shape: Any) -> None: ...


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with gk.emulate():
        yield


CONCATS: dict[str, tuple[Any, type[Exception], str]] = {
    "one array": (lambda: gk.Concat(X, axis=1), ValueError, r"Concat\(\) got 1 arrays; two or more are needed"),
    "no array": (lambda: gk.Concat(X, [[1.0]], axis=1), TypeError, "part 1 of Concat must be a CuPy array"),
    "a structured one": (lambda: gk.Concat(X, gk.Diagonal(X[0]), axis=1), TypeError, "part 1 of Concat is a Diagonal; an array is needed"),
    "a vector": (lambda: gk.Concat(X, X[0], axis=1), ValueError, "part 1 of Concat has 1 dimensions; a matrix of 2 is needed"),
    "dtypes": (lambda: gk.Concat(X, H.astype("f2"), axis=1), ValueError, "part 1 of Concat has dtype float16 and part 0 float32; convert one"),
    "rows": (lambda: gk.Concat(X, H[:3], axis=1), ValueError, r"part 1 of Concat has shape \(3, 4\) and part 0 \(7, 5\); both need as many rows"),
    "columns": (lambda: gk.Concat(X, X, H, axis=0), ValueError, r"part 2 of Concat has shape \(7, 4\) .* both need as many columns"),
    "axis 2": (lambda: gk.Concat(X, H, axis=2), ValueError, "axis=2 of Concat: its parts have 2 dimensions; axis=-2 joins rows, axis=-1 columns"),
    "axis of a stack": (lambda: gk.Concat(ROOM.reshape(4, 8, 8), ROOM.reshape(4, 8, 8), axis=0), ValueError,
                        "axis=0 of Concat would join stacks of matrices; axis=-2 joins rows"),
    "axis K": (lambda: gk.Concat(X, H, axis="K"), TypeError, "axis='K' of Concat: a whole number is needed"),
    "axis True": (lambda: gk.Concat(X, H, axis=True), ValueError, "axis=True of Concat"),
    "stacks": (lambda: gk.Concat(X, X[None], axis=-1), ValueError, "the dimensions before the last two must be the same"),
    "one braided": (lambda: gk.Braid(W), ValueError, r"Braid\(\) got 1 arrays; two or more"),
    "five braided": (lambda: gk.Braid(W, W, W, W, W), ValueError, r"Braid\(\) got 5 arrays; 4 are the most"),
    "shapes": (lambda: gk.Braid(W, V[:, :8]), ValueError, r"part 1 of Braid has shape \(5, 8\) and part 0 \(5, 9\)"),
    "its transpose": (lambda: gk.Braid(W, V).T, TypeError, "a Braid has no transpose, .* braid the parts' transposes"),
    "a function of one": (lambda: Fold(lambda x: x), TypeError, r"Fold\(f=.*takes 1 arguments; a function of the parts, f\(gate, up\)"),
    "what follows": (lambda: Fold(lambda x, y: x) | 3, TypeError, r"Fold\(then=3\): an Epilogue is needed"),
    "what follows stores": (lambda: Fold(lambda x, y: x) | OfItsOwn(), TypeError, "cannot follow a Fold; override finish instead"),
    "what stands before": (lambda: ReLU() | Fold(lambda x, y: x), TypeError, "takes the parts of a braid, so that nothing can stand before"),
    "a layout's part": (lambda: layouts.Joined(3, layouts.RowMajor("f4"), X, 0, 1), TypeError, r"Joined\(first=3\): a Layout is needed"),
    "a layout's dtypes": (lambda: layouts.Joined(layouts.RowMajor("f2"), layouts.RowMajor("f4"), X, 0, 1), ValueError, "first has dtype float16"),
    "a layout's axis": (lambda: layouts.Joined(layouts.RowMajor("f4"), layouts.RowMajor("f4"), X, 2, 1), ValueError, r"Joined\(axis=2\)"),
    "a braid of nothing": (lambda: layouts.Braided(3, 1, 2), TypeError, r"Braided\(layout=3\): a Layout is needed"),
    "a layout of five": (lambda: layouts.Braided(layouts.RowMajor("f4"), 1, 5), ValueError, r"Braided\(parts=5\): 2 to 4 are needed"),
    "an activation": (lambda: gk.glu(X, W, V, lambda x, y: x), TypeError, r"glu\(activation=.*takes 2 arguments; f\(x\)"),
}


@pytest.mark.parametrize("name", CONCATS)
def test_what_cannot_be_made(name: str) -> None:
    make, kind, said = CONCATS[name]
    with pytest.raises(kind, match=said):
        make()


def two(gate: float, up: float) -> float:
    return gate + up


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "K": (lambda out: gk.matmul(gk.Concat(X, H, axis=1), W, out=out), ValueError, "that is K=5 rows, and a says K=9"),
    "a layout beside": (lambda out: gk.matmul(gk.Concat(X, H, axis=1), gk.Concat(W, U, axis=0), out=out,
                                              global_a_layout=layouts.RowMajor("f4")), TypeError, "global_a_layout is given beside a, a Concat"),
    "no fold": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out), gk.ConfigError, r"B is a braid of 2 matrices.*give epilogues.Fold\(f\)"),
    "another epilogue": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out, epilogue=ReLU()), gk.ConfigError, "B is a braid of 2 matrices"),
    "no braid": (lambda out: gk.matmul(X, W, out=out, epilogue=Fold(two)), gk.ConfigError, "it folds the products of a braid; give gemmkit.Braid"),
    "a braid as a": (lambda out: gk.matmul(gk.Braid(X, X), W, out=out, epilogue=Fold(two)), TypeError, "a is a Braid, .* it can be b alone"),
    "too few parts": (lambda out: gk.matmul(X, gk.Braid(W, V, W), out=out, epilogue=Fold(two)), gk.ConfigError,
                      "its function takes 2 arguments, and B is a braid of 3 matrices; a function of 3 values is needed"),
    "too many parts": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out, epilogue=Fold(lambda i, f, g: i)), gk.ConfigError,
                       "its function takes 3 arguments, and B is a braid of 2 matrices"),
    "with c": (lambda out: gk.matmul(X, gk.Braid(W, V), ROOM[:7, :9], out=out, epilogue=Fold(two)), gk.ConfigError,
               r"c is given beside a Braid.*Fold\(f\) \| Residual\(c\)"),
    "a transform of D": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out, epilogue=Fold(two),
                                               transform_shared_to_global_d=transforms.Elementwise(activations.relu)), gk.ConfigError,
                         "transform_shared_to_global_d=.*make it part of the fold's function"),
    "out's columns": (lambda out: gk.matmul(X, gk.Braid(W[:, :8], V[:, :8]), out=out, epilogue=Fold(two)), ValueError,
                      r"out has shape \(7, 9\); \(7, 8\) is needed"),
    "a residual's shape": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out, epilogue=Fold(two) | Residual(ROOM[:7, :8])), ValueError,
                           r"array of Residual has shape \(7, 8\); the result is 7 x 9"),
    "a bias' length": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out, epilogue=Fold(two) | Bias(ROOM[0])), ValueError, "9"),
    "a layout of its own": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out, epilogue=Fold(two), global_d_layout=layouts.Planar("c8")),
                            TypeError, "of a folded product: RowMajor or ColMajor is needed"),
    "a block of 16 columns": (lambda out: gk.matmul(X, gk.Braid(W, V, W, V), out=out, conf=gk.get_config(
        operator=FPUOp(16, 16), global_a_layout=layouts.RowMajor("f4"), block_shape=gk.Tile(M=16, N=16, K=8)),
        epilogue=Fold(lambda i, f, g, o: i)), gk.ConfigError, "block_shape=.*N must be a multiple of 32, 8 columns of each"),
    "what f returns": (lambda out: gk.matmul(X, gk.Braid(W, V), out=out, epilogue=Fold(lambda gate, up: None)), gk.ComponentError, "returned None"),
    "gemmEx": (lambda out: gk.blas.gemmEx("N", "N", 1.0, X, gk.Braid(W, V), 0.0, out), TypeError, "b is a Braid, whose products only a Fold"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused_write_nothing(name: str) -> None:
    call, kind, said = CALLS[name]
    out = poison((7, 9), "f4")
    with pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("operand", ["a", "b", "braid"])
def test_out_may_overlap_no_part(at: int, operand: str) -> None:
    """Neither the first, which is the operand's own array, nor those that its layout holds."""
    room = poison((20, 20), "f4")
    of_a, of_b = [X, H, X], [np.ones((14, 9), "f4")[:5], U, V]
    if operand == "a":
        of_a[at] = room[3:10, 2:2 + of_a[at].shape[1]]
    else:
        of_b[at] = room[3:3 + (5 if operand == "braid" else of_b[at].shape[0]), 2:11]
    out = room[:7, :9]
    with pytest.raises(ValueError, match=f"{'b' if operand == 'braid' else operand}.* overlap|overlaps {'b' if operand != 'a' else 'a'}"):
        if operand == "braid":
            of_b = [V if part.shape != (5, 9) else part for part in of_b]
            gk.matmul(X, gk.Braid(*of_b), out=out, epilogue=Fold(lambda i, f, g: i + f + g))
        else:
            gk.matmul(gk.Concat(*of_a, axis=1), gk.Concat(*of_b, axis=0), out=out)
    assert is_poison(room)


def test_parts_on_different_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    names = gk.Concat.__init__.__globals__
    real = names["describe"]
    monkeypatch.setitem(names, "describe", lambda x, name="array": real(x, name)._replace(device=1 if x is H else 0))
    with pytest.raises(ValueError, match="part 1 of Concat has its memory on device 1 and part 0 on device 0; all parts must be"):
        gk.Concat(X, H, axis=1)


def test_a_fold_reads_as_it_is_written() -> None:
    chain = Fold(two) | ReLU() | Elementwise(activations.relu)
    assert repr(chain).startswith("Fold(<function two") and repr(chain).endswith(f"| ReLU() | Elementwise({activations.relu!r})")
    assert [type(part).__name__ for part in gk.epilogues.parts(chain)] == ["Fold", "ReLU", "Elementwise"]


def test_what_is_not_chosen_for_a_braid_is_said() -> None:
    """A configuration for plain operands takes a braid: what it says of D is made to fit."""
    conf = config("multistage")
    out = gk.matmul(X.astype("f2"), gk.Braid(W.astype("f2"), V.astype("f2")), conf=conf, epilogue=Fold(two))
    np.testing.assert_array_equal(out, np.full((7, 9), 10, "f4"))
    assert isinstance(conf.global_d_layout, layouts.RowMajor)
