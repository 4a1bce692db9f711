"""Masks and scores of the user's: by what they take, with arrays, with keys that are not visited; and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import ComponentError
from gemmkit.emulator.errors import EmulatorError
from gemmkit.kernels.masks import ALiBi, Causal, Documents, Mask, Score, ScoreBias, ScoreFunction, SoftCap, Window
from gemmkit.lang.errors import ConfigError
from tests.support.attention import close, draw, reference, small
from tests.support.machines import on_machines

F16 = np.dtype(np.float16)
pytestmark = pytest.mark.sample(5)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    @contextlib.contextmanager
    def made(machine: Any) -> Any:
        with small(monkeypatch) if machine.emulated else contextlib.nullcontext(), machine.session():
            yield

    return made


@pytest.fixture
def qkv(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return draw(rng, (1, 2, 43, 64), F16), draw(rng, (1, 1, 50, 64), F16), draw(rng, (1, 1, 50, 64), F16)


HALF = np.float32(0.5)
SCORES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "of places": (lambda s, m, n: s - HALF * abs(m - n), lambda s, m, n, h, b: s - 0.5 * abs(m - n)),
    "of heads": (lambda s, m, n, head: s * (head + 1) if n % 3 else s, lambda s, m, n, h, b: np.where(n % 3 != 0, s * (h + 1), s)),
    "of batches": (lambda s, m, n, head, batch: s + batch * 2 - head if n > m else -s,
                   lambda s, m, n, h, b: np.where(n > m, s + b * 2 - h, -s)),
    "constant": (lambda s, m, n: 1, lambda s, m, n, h, b: np.ones_like(s)),
}


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("name", SCORES)
def test_scores_by_what_they_take(machine: Any, session: Any, name: str, qkv: tuple[np.ndarray, ...]) -> None:
    ours, numpy = SCORES[name]
    qkv = tuple(np.repeat(x, 2 if "batch" in name else 1, 0) for x in qkv)
    with session(machine):
        found, lse = gk.attention(*map(machine.array, qkv), score=ours, return_lse=True)
    close(machine.numpy(found), reference(*qkv, score=numpy), machine.numpy(lse), slack=2e-6)


@dataclass(frozen=True)
class Decay(Score):
    """Places as float32, and a run-time number."""

    by: gk.Scalar
    real_places = True

    def __call__(self, s: Any, m: Any, n: Any) -> Any:
        return s - self.by * (m - n) * (m - n)


SLOPES = np.array([0.5, 0.125], np.float32)
SHIPPED: dict[str, tuple[Callable[..., Any], Callable[..., Any], float]] = {
    "alibi": (lambda held: ALiBi(held(SLOPES)), lambda s, m, n, h, b: s - SLOPES[h] * (m - n), 0.0),
    "soft cap": (lambda held: SoftCap(2.0), lambda s, m, n, h, b: 2 * np.tanh(s / 2), 2e-3),
    "decay": (lambda held: Decay(np.float32(0.01)), lambda s, m, n, h, b: s - 0.01 * (m - n) ** 2, 1e-5),
    "real places": (lambda held: ScoreFunction(lambda s, m, n: s - HALF * (m - n), real_places=True), lambda s, m, n, h, b: s - 0.5 * (m - n), 0.0),
}


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("name", SHIPPED)
def test_scores_that_are_components(machine: Any, session: Any, name: str, qkv: tuple[np.ndarray, ...]) -> None:
    make, numpy, slack = SHIPPED[name]
    with session(machine):
        found = gk.attention(*map(machine.array, qkv), score=make(machine.array), mask=Causal())
    close(machine.numpy(found), reference(*qkv, score=numpy, visible=lambda m, n, h, b: n <= m + 7), slack=slack)


@pytest.mark.kin(1)
@on_machines
def test_a_bias_is_a_captured_array(machine: Any, session: Any, qkv: tuple[np.ndarray, ...], rng: np.random.Generator) -> None:
    bias = rng.standard_normal((2, 43, 50)).astype(F16)
    held = machine.array(bias)
    with session(machine):
        given = [machine.array(x) for x in qkv]
        found = gk.attention(*given, score=ScoreBias(held))
        captured = gk.attention(*given, score=lambda s, m, n, head: s + held[head, m, n])
    close(machine.numpy(found), reference(*qkv, score=lambda s, m, n, h, b: s + bias[h].astype(float)))
    assert np.array_equal(machine.numpy(found), machine.numpy(captured))


@dataclass(frozen=True)
class Blocked(Mask):
    """Of each head other blocks of keys, from an array; visits and tests everything."""

    shown: gk.Array
    array_ndims = MappingProxyType({"shown": 3})

    def visible(self, m: int, n: int, head: int, batch: int) -> bool:
        return self.shown[head, m // 16, n // 16] + batch > 0


@dataclass(frozen=True)
class Prefix(Mask):
    """All of a prefix, and what is causal: keys that need no test, and keys that are not visited."""

    length: gk.Scalar
    aligned = "lower right"

    def visible(self, m: int, n: int) -> bool:
        return n <= max(m, self.length - 1)

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, max(end, self.length)

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, max(begin + 1, self.length)


@pytest.mark.kin(1)
@on_machines
def test_masks_of_the_users(machine: Any, session: Any, qkv: tuple[np.ndarray, ...], rng: np.random.Generator) -> None:
    shown = rng.integers(0, 2, (2, 3, 4)).astype(np.int32)
    with session(machine):
        given = [machine.array(x) for x in qkv]
        blocked, lse = gk.attention(*given, mask=Blocked(machine.array(shown)), return_lse=True)
        prefix = gk.attention(*given, mask=Prefix(20))
        with machine.compiles_nothing():
            longer = gk.attention(*given, mask=Prefix(33))
    close(machine.numpy(blocked), reference(*qkv, visible=lambda m, n, h, b: shown[h][m // 16, n // 16] + b > 0), machine.numpy(lse))
    for found, length in ((prefix, 20), (longer, 33)):
        close(machine.numpy(found), reference(*qkv, visible=lambda m, n, h, b, length=length: n <= np.maximum(m + 7, length - 1)))


def test_what_is_not_visited_is_not_loaded(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Keys outside of `keys` may hold anything."""
    q, k, v = (draw(rng, (1, 1, 200, 64), F16) for _ in range(3))
    k[:, :, 128:], v[:, :, 128:] = np.nan, np.nan
    with small(monkeypatch), gk.emulate():
        found = gk.attention(q[:, :, :40], k, v, mask=Causal("upper left"))
    close(found, reference(q[:, :, :40], k[:, :, :128], v[:, :, :128], visible=lambda m, n, h, b: n <= m))


# -- bad input ----------------------------------------------------------------------------------------------------------

X = np.zeros((1, 2, 8, 64), F16)


@dataclass(frozen=True)
class Wrong(Mask):
    def visible(self, m: int) -> bool:                                 # type: ignore[override]
        return True


@dataclass(frozen=True)
class Number(Mask):
    def visible(self, m: int, n: int) -> bool:
        return 0.5                                                     # type: ignore[return-value]


def call(**changed: Any) -> Callable[[], Any]:
    given = {"q": X, "k": X, "v": X, **changed}
    return lambda: gk.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("bad,error,words", [
    (call(q=[[1.0]]), TypeError, "q must be"),
    (call(q=X.astype(np.float32)), TypeError, "q has dtype float32; float16 or bfloat16 is needed"),
    (call(k=X.view(np.uint16)), TypeError, "k has dtype uint16"),
    (call(q=X[0]), ValueError, r"q has shape \(2, 8, 64\); 4 axes are needed, batch, heads, rows, head size"),
    (call(layout="bhdn"), ValueError, 'layout=\'bhdn\': "bhnd" or "bnhd"'),
    (call(k=np.zeros((1, 3, 8, 64), F16), v=np.zeros((1, 3, 8, 64), F16)), ValueError, "k has 3 heads and q has 2; the number must divide"),
    (call(k=np.zeros((3, 2, 8, 64), F16)), ValueError, "k has a batch of 3 and q of 1"),
    (call(v=X[:, :, :4]), ValueError, "v has 4 rows and k has 8"),
    (call(k=X[..., :32]), ValueError, "k has head size 32 and q has 64"),
    (call(v=X[..., :36]), ConfigError, "v has head size 36; a multiple of 8 up to 256 is needed"),
    (call(v=X[..., :32], out=np.zeros(X.shape, F16)), ValueError, r"out has shape \(1, 2, 8, 64\); q's shape with v's head size, 32"),
    (call(**dict.fromkeys("qkv", np.zeros((1, 1, 4, 84), F16))), ConfigError, "q has head size 84; a multiple of 8 up to 256 is needed"),
    (call(k=np.zeros((1, 2, 8, 128), F16)[..., ::2]), ValueError, "k cannot be loaded.*not contiguous along axis 3.*contiguous copy"),
    (call(k=np.zeros((1, 2, 8, 65), F16)[..., :64]), ValueError, "k cannot be loaded.*rows begin at odd elements"),
    (call(key_lengths=[1, 2]), ValueError, "key_lengths has 2 elements and q has a batch of 1"),
    (call(key_lengths=[0.5]), TypeError, "key_lengths is an array of float64"),
    (call(key_starts=[1, 2]), ValueError, "key_starts has 2 elements and q has a batch of 1"),
    (call(**dict.fromkeys("qkv", X[0]), lengths=([0, 8], [0, 8]), key_starts=[3]), ValueError, "leave key_starts out"),
    (call(key_lengths=7), TypeError, "key_lengths is a int; a list or an array of whole numbers"),
    (call(**dict.fromkeys("qkv", X[0]), lengths=([0, 8], [0, 8]), key_lengths=[3]), ValueError, "leave key_lengths out"),
    (call(mask=np.ones((8, 8), bool)), TypeError, "mask is a ndarray; a gemmkit.masks.Mask is needed"),
    (call(mask=lambda m, n: n <= m), TypeError, r"mask is a function; .*a class of one with visible\(self, m, n\)"),
    (call(mask=Documents), TypeError, "mask is the class Documents"),
    (call(mask=Wrong()), TypeError, r"Wrong.visible takes 1 arguments; visible\(self, m, n\)"),
    (call(mask=Number()), ComponentError, "True or False is needed"),
    (call(mask=Documents.of([0, 5])), ValueError, r"starts of Documents has shape \(5,\).*8 queries"),
    (call(score=lambda s: s), TypeError, "score.*takes 1 arguments"),
    (call(score=3), TypeError, "score"),
    (call(score=lambda s, m, n: None), ComponentError, "None"),
    (call(score=ScoreBias(np.zeros((2, 8, 7), F16))), ValueError, r"bias of Bias has shape \(2, 8, 7\); 2 heads, 8 queries and 8 keys need"),
    (call(score=ALiBi(np.zeros(3, np.float32))), ValueError, r"slopes of ALiBi has shape \(3,\)"),
    (call(scale="1"), TypeError, "scale='1': a real number"),
    (call(scale=np.inf), ValueError, "scale=inf: a finite number"),
    (call(scale=1e39), ValueError, r"scale=1e\+39: scores are computed in float32"),
    (call(scale=-3e38), ValueError, "at most 2.36e"),
    (call(out=X), ValueError, "out overlaps q in memory"),
    (call(out=np.zeros((1, 2, 7, 64), F16)), ValueError, r"out has shape \(1, 2, 7, 64\); q's shape"),
    (call(out=np.zeros(X.shape, np.float32)), TypeError, "out has dtype float32"),
    (call(out=np.broadcast_to(np.zeros(64, F16), X.shape)), ValueError, "out is read-only"),
    (call(**dict.fromkeys("qkv", X[0]), lengths=3), TypeError, "lengths=3: a pair of offsets"),
    (call(lengths=([0, 8], [0, 8])), ValueError, r"q has shape \(1, 2, 8, 64\); 3 axes are needed"),
    (call(**dict.fromkeys("qkv", X[0]), lengths=([0, 7], [0, 8])), ValueError, "q_offsets goes from 0 to 7"),
    (call(**dict.fromkeys("qkv", X[0]), lengths=([0, 5, 3, 8], [0, 1, 2, 8])), ValueError, "never fall"),
    (call(**dict.fromkeys("qkv", X[0]), lengths=([0, 8], [0, 1, 8])), ValueError, "1 sequences and k_offsets has 2"),
    (call(**dict.fromkeys("qkv", X[0]), lengths=([0.0, 8.0], [0, 8])), TypeError, "q_offsets is an array of float64"),
    (call(stream="first"), TypeError, "stream"),
])
def test_bad_input(bad: Callable[[], Any], error: type[Exception], words: str) -> None:
    with gk.emulate(), pytest.raises(error, match=words):
        bad()
    assert not X.any()


@pytest.mark.parametrize("make,words", [
    (lambda: Causal("left"), "aligned='left'"), (lambda: Causal(np.zeros(3)), "aligned=array"), (lambda: Window(-1), "left=-1"), (lambda: Window(1, 0.5), "right=0.5"),
    (lambda: SoftCap(0.0), "cap=0.0"), (lambda: SoftCap(1e39), "cap=1e"), (lambda: Documents.of([1, 2]), "begin with 0"), (lambda: Documents.of([0, 2, 1]), "never fall"),
])
def test_bad_components(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@dataclass(frozen=True)
class Leaves(Mask):
    """Its keys leave out what it shows, or its free ones have what it hides."""

    few: bool

    def visible(self, m: int, n: int) -> bool:
        return n <= m + 1

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, end if self.few else end + 1

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, begin + 1 if self.few else begin + 3


@pytest.mark.parametrize("few,words", [(True, r"keys of queries 0 to 9 gives \(0, 9\), and query 8 sees key 9"),
                                       (False, r"free of queries 0 to 9 gives \(0, 3\), and query 0 does not see key 2")])
def test_a_mask_that_contradicts_itself_is_found(few: bool, words: str) -> None:
    x = np.zeros((1, 1, 12, 64), F16)
    with gk.emulate(), pytest.raises(ComponentError, match=words):
        gk.attention(x[:, :, :9], x, x, mask=Leaves(few))


def test_a_host_array_needs_the_emulator() -> None:
    with pytest.raises(TypeError, match="q is a host array"):
        gk.attention(X, X, X)


def test_another_gpu_is_refused() -> None:
    import dataclasses

    from gemmkit.runtime.device import H100, assumed

    with gk.emulate(), assumed(dataclasses.replace(H100, arch=(7, 5), name="T4")), pytest.raises(ConfigError, match="T4 has 7.5"):
        gk.attention(X, X, X)


def test_a_score_beyond_its_array_is_found() -> None:
    short = np.zeros(7, np.float32)
    with gk.emulate(), pytest.raises(EmulatorError, match="short"):
        gk.attention(X, X, X, score=lambda s, m, n: s + short[n])




@pytest.mark.parametrize("returned", [(1, 2, 3), 2j], ids=["tuple", "complex"])
def test_a_score_of_several_parts_is_named(returned: Any) -> None:
    q = np.zeros((1, 1, 5, 16), np.float16)
    with gk.emulate(), pytest.raises(gk.ComponentError, match=r"returned (a tuple of 3|Complex).*\n[^$]*a real number is needed"):
        gk.attention(q, q, q, score=ScoreFunction(lambda s, m, n: returned))
