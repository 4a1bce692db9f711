"""What launches of attention and of an MLP are given, without a GPU: numbers and addresses in their places, tables and kernels
kept."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.stand_ins import STREAM, CupyArray, gpu, library
from gemmkit.functions import mlp
from gemmkit.lang.errors import ConfigError
from gemmkit.runtime import launch as workspace
from gemmkit.runtime.device import H100, assumed
from tests.programs.test_called import of_tiles
from tests.support.launches import TABLE, forget_all, told
from tests.support.patches import Seeded

# ==========================================================================================================================
# What a launch of attention is given, without a GPU: lengths of the host in the stream's memory.


def test_lengths_of_the_host_are_copied_in_the_order_of_the_stream(replaced: Seeded) -> None:
    """Once where they are what they were; arrays of the GPU are taken as they are."""
    copied: list[tuple[Any, np.ndarray]] = []

    def table(ordinal: int, stream: int, key: Any, data: np.ndarray) -> int:
        assert (ordinal, stream) == (0, STREAM) and key == data.tobytes()
        copied.append((key, data))
        return TABLE

    replaced(workspace, "table", table)
    with gpu(), library("cupy") as array:
        q, k, v = array(300, 4, 64), array(90, 2, 64), array(90, 2, 64)
        for offsets in ([0, 90, 300], np.array([0, 90, 300])):
            gk.attention(q, k, v, layout="bnhd", lengths=(offsets, [0, 10, 90]))
        gk.attention(array(2, 4, 8, 64), *(array(2, 4, 70, 64) for _ in "kv"), key_lengths=(70, 3))
        assert len(copied) == 3 and np.array_equal(copied[0][1].view(np.int32), [0, 90, 300, 0, 0, 10, 90, 0])
        assert copied[0][0] == copied[1][0] and copied[2][1].view(np.int32)[:2].tolist() == [70, 3]
        for _ in range(2):
            gk.attention(q, k, v, layout="bnhd", lengths=(array(3, dtype=np.int32), array(3, dtype=np.int64)))
        assert len(copied) == 3


# ==========================================================================================================================
# What arrays have that components hold: a launch brings their addresses, and is another one where their strides are others.

def of_components() -> dict[str, tuple[int, Callable[..., object]]]:
    """By what is held: vectors or matrices, and a call with one, of operands that are there."""
    from gemmkit import epilogues as ep
    from gemmkit import masks

    def multiplied(held: Callable[[Any], Any]) -> Callable[..., object]:
        return lambda c, a, b, d, *_: gk.matmul(a, b, out=d, epilogue=held(c))

    return {
        "bias": (1, multiplied(ep.Bias)), "residual": (2, multiplied(ep.Residual)), "stored": (2, multiplied(ep.Store)),
        "a function": (2, multiplied(lambda c: ep.Elementwise(lambda x, m, n: x + c[m, n]))),
        "rmsnorm": (1, lambda c, a, b, d, *_: gk.rmsnorm(a, c, out=d)),
        "layernorm": (1, lambda c, a, b, d, *_: gk.layernorm(a, c, c, out=d)),
        "score": (2, lambda c, a, b, d, q, k, v, o: gk.attention(q, k, v, out=o, score=lambda s, m, n: s + c[m, n])),
        "slopes": (1, lambda c, a, b, d, q, k, v, o: gk.attention(q, k, v, out=o, score=masks.ALiBi(c))),
        "program": (2, lambda c, a, b, d, *_: of_tiles(a, b, d, ep.Residual(c))),
    }


@pytest.mark.parametrize("name", of_components())
def test_another_stride_of_what_is_held_is_another_launch(name: str) -> None:
    """Of arrays that differ in nothing that code is compiled for."""
    rank, call = of_components()[name]
    with library("cupy") as make, told() as seen:
        given = [*(make(64, 64) for _ in range(3)), *(make(1, 64, 64, 64) for _ in range(4))]
        held = [CupyArray((64,) * rank, np.float16, make(64 * 64 * 24).data.ptr, strides=(128 * by, 2) if rank == 2 else (2 * by,))
                for by in (8, 16, 24)]
        alone = []
        for c in held:
            forget_all(), call(c, *given)
            alone.append(seen[-1])
        forget_all()
        for n in itertools.chain(*itertools.permutations(range(3))):
            call(held[n], *given)
            assert seen[-1] == alone[n]
    assert len({one.values for one in alone}) == 3 and len({one.code for one in alone}) == 1


def test_a_plan_takes_components_with_arrays_of_its_strides_alone(rng: np.random.Generator) -> None:
    a, b, d = (rng.standard_normal((64, 64)).astype(F16) for _ in range(3))
    wide = rng.standard_normal((64, 128)).astype(F16)
    plan = of_tiles.plan(a, b, d, gk.epilogues.Residual(wide[:, :64].copy()))
    with gk.emulate():
        plan.run(dict(a=a, b=b, d=d, f=gk.epilogues.Residual(wide[:, 64:].copy())))
        assert np.allclose(d, a.astype(float) @ b + wide[:, 64:], atol=0.1)
        with pytest.raises(ValueError, match="shapes or strides of its arrays, are others; make another plan"):
            plan.run(dict(a=a, b=b, d=d, f=gk.epilogues.Residual(wide[:, 64:])))


# ==========================================================================================================================
# What a launch of an MLP is given, without a GPU: addresses in their places, tables and kernels kept; what is refused.

F16 = np.dtype("f2")


@contextmanager
def alike(calls: list[Callable[[], Any]]) -> Iterator[list[Any]]:
    """Launches of each call alone, then of all in every order of two; those of one call are the same."""
    with told() as seen:
        alone = []
        for call in calls:
            forget_all(), seen.clear(), call()
            alone.append(list(seen))
        forget_all()
        for n in itertools.chain(*itertools.permutations(range(len(calls)), 2)):
            seen.clear(), calls[n]()
            assert seen == alone[n]
        yield alone


def test_addresses_stand_in_their_places() -> None:
    """Of a call whose kernel is there the same as of one that is the first."""
    with library("cupy") as array:
        def call(rows: int) -> Callable[[], Any]:
            x, weights, biases = array(rows, 64), [array(64, 64) for _ in range(3)], [array(64) for _ in range(3)]
            out = array(rows, 64)
            return lambda: gk.mlp(x, weights, biases, out=out)

        with alike([call(300), call(300), call(500)]) as alone:
            assert [len(found) for found in alone] == [1, 1, 1]
            assert len({found[0].code for found in alone}) == 1 and len({found[0].values for found in alone}) == 3


def test_kernels_are_told_apart_of_an_mlp() -> None:
    with library("cupy") as array:
        x, weights, narrow = array(300, 64), [array(64, 64) for _ in range(3)], array(64, 10)
        outs = array(300, 64), array(300, 10)
        given = ((weights, {}), (weights[:2], {}), (weights, {"last": gk.epilogues.activations.relu}), (weights[:1], {}),
                 ([*weights[:2], narrow], {}))

        def call(held: Any, functions: dict[str, Any]) -> Callable[[], Any]:
            return lambda: gk.mlp(x, held, out=outs[held[-1] is narrow], **functions)

        with alike([call(*one) for one in given]) as alone:
            assert len({found[0].code for found in alone}) == 5


def test_numbers_that_a_function_captured_compile_nothing() -> None:
    with library("cupy") as array:
        x, weights, out = array(300, 64), [array(64, 64) for _ in range(3)], array(300, 64)

        def call(slope: Any) -> Callable[[], Any]:
            def leaky(v: Any) -> Any:
                return v if v > 0 else slope * v

            return lambda: gk.mlp(x, weights, activation=leaky, out=out)

        with alike([call(np.float32(0.1)), call(np.float32(0.2))]) as alone:
            assert len({found[0].code for found in alone}) == 1 and len({found[0].values for found in alone}) == 2


def test_many_layers_are_several_launches(replaced: Seeded) -> None:
    """Which all have one kernel if they are alike; the activations between them lie in memory."""
    with library("cupy") as array, told() as seen:
        replaced(mlp, "empty_like", lambda x, shape, dtype: array(*shape))
        x, weights = array(300, 64), [array(64, 64) for _ in range(2 * mlp.MOST + 1)]
        gk.mlp(x, weights, last=gk.epilogues.activations.relu)
        assert len(seen) == 3 and seen[0].code == seen[1].code != seen[2].code


# -- what is refused ------------------------------------------------------------------------------------------------------

def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, F16)


EYE = [half(32, 32), half(32, 32)]
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "shapes that do not chain": (lambda: gk.mlp(half(4, 32), [half(32, 48), half(32, 16)]), ValueError,
                                 r"weights\[1\] has shape \(32, 16\); weights\[0\] has 48 columns"),
    "x": (lambda: gk.mlp(half(4, 16), EYE), ValueError, r"weights\[0\] has shape \(32, 32\); x has 16 columns"),
    "too wide": (lambda: gk.mlp(half(4, 32), [half(32, 272)]), ConfigError, r"weights\[0\].*272 columns.*gemmkit.matmul"),
    "x too wide": (lambda: gk.mlp(half(4, 784), [half(784, 32)]), ConfigError, r"x has shape \(4, 784\)"),
    "no columns": (lambda: gk.mlp(half(4, 32), [half(32, 0)]), ValueError, "a layer needs at least one column"),
    "no layer": (lambda: gk.mlp(half(4, 32), []), ValueError, "weights is empty"),
    "one matrix": (lambda: gk.mlp(half(4, 32), half(32, 32)), ValueError, r"weights has shape \(32, 32\).*\(layers, K, N\)"),
    "a vector": (lambda: gk.mlp(half(4, 32), [half(32)]), ValueError, r"weights\[0\] has shape \(32,\); \(K, N\)"),
    "dtypes": (lambda: gk.mlp(half(4, 32), [half(32, 32), np.zeros((32, 32), np.float32)]), TypeError, r"weights\[1\] has dtype float32"),
    "x of float32": (lambda: gk.mlp(np.zeros((4, 32), np.float32), EYE), TypeError, "x has dtype float32; float16 or bfloat16"),
    "too few biases": (lambda: gk.mlp(half(4, 32), EYE, [half(32)]), ValueError, "biases has 1 arrays and weights has 2"),
    "a bias's length": (lambda: gk.mlp(half(4, 32), EYE, [half(32), half(16)]), ValueError, r"biases\[1\] has shape \(16,\)"),
    "biases' dtype": (lambda: gk.mlp(half(4, 32), EYE, np.zeros((2, 32), np.float64)), TypeError, r"biases\[0\] has dtype float64"),
    "biases of two dtypes": (lambda: gk.mlp(half(4, 32), EYE, [half(32), np.zeros(32, np.float32)]), TypeError, "one dtype"),
    "biases of one axis": (lambda: gk.mlp(half(4, 32), EYE, half(32)), ValueError, r"biases has shape \(32,\)"),
    "no array": (lambda: gk.mlp(half(4, 32), [half(32, 32), 3]), TypeError, r"weights\[1\] must be"),
    "two orders": (lambda: gk.mlp(half(4, 32), [half(32, 32), half(32, 32).T]), ValueError,
                   r"weights\[0\] has strides \(32, 1\), weights\[1\] has strides \(1, 32\)"),
    "every other column": (lambda: gk.mlp(half(4, 64)[:, ::2], EYE), ValueError, r"x has strides \(64, 2\)"),
    "an odd number of columns": (lambda: gk.mlp(half(4, 32), [half(32, 7)]), ValueError, r"weights\[0\].*even number of elements"),
    "rows that do not collapse": (lambda: gk.mlp(half(4, 6, 32)[:, :3], EYE), ValueError, "rows do not lie at one distance"),
    "no function": (lambda: gk.mlp(half(4, 32), EYE, activation="relu"), TypeError, "activation='relu'"),
    "two arguments": (lambda: gk.mlp(half(4, 32), EYE, last=lambda x, y: x), TypeError, "takes 2 arguments"),
    "out's shape": (lambda: gk.mlp(half(4, 32), EYE, out=half(4, 16)), ValueError, r"out has shape \(4, 16\); \(4, 32\) is needed"),
    "out's dtype": (lambda: gk.mlp(half(4, 32), EYE, out=np.zeros((4, 32), np.float32)), TypeError, "out has dtype float32"),
    "out is x": (lambda: (lambda x: gk.mlp(x, EYE, out=x))(half(4, 32)), ValueError, "out overlaps x in memory"),
    "out is a weight": (lambda: gk.mlp(half(32, 32), EYE, out=EYE[1]), ValueError, r"out overlaps weights\[1\] in memory"),
    "out is stacked on itself": (lambda: gk.mlp(half(4, 32), EYE, out=np.lib.stride_tricks.as_strided(half(32), (4, 32), (0, 2))),
                                 ValueError, "several of its elements share memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, words = REFUSED[name]
    with gk.emulate(), pytest.raises(error, match=words):
        call()


def test_host_arrays_and_old_gpus_are_refused() -> None:
    with pytest.raises(TypeError, match="x is a host array"):
        gk.mlp(half(4, 32), EYE)
    with gk.emulate(), assumed(dataclasses.replace(H100, arch=(7, 5), name="another GPU")), \
            pytest.raises(ConfigError, match=r"mlp needs compute capability 8.0 or above, but another GPU has 7.5"):
        gk.mlp(half(4, 32), EYE)


def test_a_tensor_that_requires_a_gradient_is_refused_by_name() -> None:
    """Also where the same tensor was taken before it did."""
    with library("torch") as tensor, told() as seen:
        x, weights, biases = tensor(300, 64), [tensor(64, 64) for _ in range(3)], [tensor(64) for _ in range(3)]
        gk.mlp(x, weights, biases)
        for held, name in ((x, "x"), (weights[1], r"weights\[1\]"), (biases[2], r"biases\[2\]")):
            held.requires_grad = True
            with pytest.raises(ValueError, match=f"{name} requires a gradient"):
                gk.mlp(x, weights, biases)
            held.requires_grad = False
        assert len(seen) == 1


def test_a_code_error_names_the_function() -> None:
    def words(x: Any) -> Any:
        return "no number"

    def nothing(x: Any) -> Any:
        if x > 1:
            return x

    for f, said in ((words, "words returned str 'no number'"), (nothing, "nothing returned")):
        with gk.emulate(), pytest.raises(gk.ComponentError, match=said):
            gk.mlp(half(4, 32), EYE, activation=f)
