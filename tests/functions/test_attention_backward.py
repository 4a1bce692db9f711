"""The gradients of attention against float64: layouts, shared heads, masks, scores, lengths, packed sequences; listed and drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions import gradients as room
from gemmkit.functions.gradients import Rules, gradient_of_queries, gradients, gradients_of_keys
from gemmkit.functions.slope import slope_of
from gemmkit.kernels.masks import (
    ALiBi,
    Causal,
    Documents,
    Everything,
    Mask,
    PlainScores,
    Score,
    ScoreBias,
    ScoreFunction,
    SoftCap,
    Window,
    seen_from_keys,
)
from gemmkit.lang.components import dataclass
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.compile import disassemble
from gemmkit.runtime.device import A100, H100, assumed
from tests.ptx_machine.launch import Ptx
from tests.support.attention import close_gradients, draw, reference, reference_gradients, small
from tests.support.machines import BF16, Emulator, on_machines
from tests.support.sass import instructions, loops

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
PLAIN = PlainScores()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated is NaN."""
    def made(like: Any, shape: Any, dtype: Any) -> Any:
        found = allocate(like, shape, dtype)
        found[...] = math.nan
        return found

    allocate = room.empty_like
    monkeypatch.setattr(room, "empty_like", made)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine's calls; in the emulator of few blocks, whose rounds are of few rows, or (``by_warps``) of another GPU's kernel."""
    @contextlib.contextmanager
    def made(machine: Any, by_warps: bool = False) -> Any:
        with contextlib.ExitStack() as stack:
            if machine.emulated:
                stack.enter_context(small(monkeypatch, 16))
            stack.enter_context(machine.session())
            if by_warps and machine.emulated:
                stack.enter_context(assumed(dataclasses.replace(H100, arch=(8, 0), sm_count=2, name="another GPU")))
            yield

    return made


def computed(machine: Any, arrays: list[np.ndarray], grad: np.ndarray, result: tuple[np.ndarray, np.ndarray], of_lse: Any = None, *,
             mask: Any = None, score: Any = None, scale: float | None = None, layout: str = "bhnd", lengths: Any = None,
             offsets: Any = None, needed: tuple[bool, ...] = (True, True, True), cut: Any = None, deterministic: bool = True) -> list[Any]:
    """The gradients of q, k and v, (batch, heads, rows, head size) or, packed, without a batch. In the emulator from a ``result`` and
    its logarithms; on a GPU from those of a call, and twice: the same bits, or the same sums. ``cut(x)``: the part of an array that is meant."""
    def laid(x: np.ndarray) -> Any:
        return machine.array(x if layout == "bhnd" else np.ascontiguousarray(x.swapaxes(-2, -3)))

    q, k, v, do = (laid(x) if cut is None else cut(laid(x)) for x in (*arrays, grad))
    own = None if lengths is None else machine.array(np.array(lengths, np.int32))
    pieces = None if offsets is None else tuple(machine.array(np.array(x, np.int32)) for x in offsets)
    if machine.emulated:
        out, lse = laid(result[0].astype(arrays[0].dtype)), result[1].astype(F32)
    else:
        out, lse = gk.attention(q, k, v, mask=mask, score=score, scale=scale, layout=layout, key_lengths=own, lengths=pieces,
                                return_lse=True)
    change = PLAIN if score is None else score if isinstance(score, Score) else ScoreFunction(score)
    rules = Rules(mask or Everything(), change, slope_of(change), q.shape[-1] ** -0.5 if scale is None else scale, layout, pieces, own,
                  deterministic)
    dlse = None if of_lse is None else machine.array(of_lse)
    found = gradients(rules, do, q, k, v, out, lse, dlse, needed)
    if not machine.emulated:
        for one, other in zip(found, gradients(rules, do, q, k, v, out, lse, dlse, needed)):
            if one is not None:
                one, other = (machine.numpy(x).astype(F32) for x in (one, other))
                assert np.array_equal(one, other) if deterministic else np.abs(one - other).max() <= 2e-3 * np.abs(one).max(initial=1e-6)
    return [None if x is None else machine.numpy(x) if layout == "bhnd" else machine.numpy(x).swapaxes(-2, -3) for x in found]


def check(machine: Any, arrays: list[np.ndarray], grad: np.ndarray, of_lse: Any = None, *, visible: Any = None, formula: Any = None,
          slope: Any = None, slack: float = 0.0, spoilt: Any = None, **call: Any) -> None:
    """A call's gradients are the reference's. ``slack``: of the largest, by which a score may be wrong; ``spoilt(arrays)`` are what
    the call gets."""
    cut = call.get("cut") or (lambda x: x)
    cuts, scale = [cut(x) for x in arrays], call.get("scale")
    result = reference(*cuts, scale, visible, formula)[:2]
    wanted = reference_gradients(*cuts, cut(grad), of_lse, scale, visible, formula, slope)
    found = computed(machine, arrays if spoilt is None else spoilt(arrays), grad, result, of_lse, **call)
    close_gradients(found, [(x, bound + slack * np.abs(x).max(initial=0.0)) for x, bound in wanted])


def operands(rng: np.random.Generator, q: tuple[int, ...], k: tuple[int, ...], width: int | None = None, v_heads: int | None = None,
             dtype: Any = F16) -> tuple[list[np.ndarray], np.ndarray]:
    """q, k and v, and a gradient of the result."""
    v = (*k[:-3], v_heads or k[-3], k[-2], width or k[-1])
    return [draw(rng, shape, dtype) for shape in (q, k, v)], draw(rng, (*q[:-1], v[-1]), dtype)


def sizes(machine: Any, queries: int, keys: int) -> tuple[int, int]:
    """In the emulator as they are; on a GPU several tiles and rounds more."""
    return (queries, keys) if machine.emulated else (7 * queries + 130, 7 * keys + 130)


# -- masks ------------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Striped(Mask):
    """Of the user's: what it shows depends on the head and the batch, and its last key on the query."""

    aligned = "lower right"

    def visible(self, m: int, n: int, head: int, batch: int) -> bool:
        return (m + n + head) % (batch + 2) > 0

    def end_key(self, m: int) -> int:
        return m + 3

    def keys(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, end + 2


@dataclass(frozen=True)
class OddCausal(Causal):
    """A subclass of one of gemmkit's: what is known of that mask is not known of this one."""

    def visible(self, m: int, n: int) -> bool:
        return n % 2 == 1

    def free(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        return 0, 0


MASKS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "causal": (Causal(), lambda m, n, h, b, shift: n <= m + shift),
    "upper left": (Causal("upper left"), lambda m, n, h, b, shift: n <= m),
    "window": (Window(9, 3), lambda m, n, h, b, shift: (m + shift - 9 <= n) & (n <= m + shift + 3)),
    "window, causal": (Window(7, 9) & Causal(), lambda m, n, h, b, shift: (m + shift - 7 <= n) & (n <= m + shift)),
    "striped": (Striped(), lambda m, n, h, b, shift: ((m + shift + n + h) % (b + 2) > 0) & (n < m + shift + 3)),
    "odd": (OddCausal(), lambda m, n, h, b, shift: (n <= m + shift) & (n % 2 == 1)),
    "striped, window": (Striped() & Window(12, 2), lambda m, n, h, b, shift: (
        (m + shift + n + h) % (b + 2) > 0) & (n < m + shift + 3) & (m + shift - 12 <= n) & (n <= m + shift + 2)),
}


@pytest.mark.kin(1)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("rows", [(20, 37), (45, 18), (1, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(machine: Any, session: Any, mask: str, rows: tuple[int, int], rng: np.random.Generator) -> None:
    """Odd lengths, more queries than keys (rows that see nothing, and columns that nobody sees) and fewer."""
    queries, keys = sizes(machine, *rows)
    arrays, grad = operands(rng, (1, 1, queries, 16), (1, 1, keys, 16))
    rule, visible = MASKS[mask]
    with session(machine):
        check(machine, arrays, grad, mask=rule, visible=visible and (lambda m, n, h, b: visible(m, n, h, b, keys - queries)))


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("also", [None, Causal()], ids=["", "causal"])
@pytest.mark.parametrize("offsets", [[0, 11, 11, 12, 40, 43], [0, 43], [0, 0, 43, 43]], ids=str)
def test_documents(machine: Any, session: Any, offsets: list[int], also: Any, rng: np.random.Generator) -> None:
    arrays, grad = operands(rng, (1, 1, 43, 16), (1, 1, 43, 16))
    of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    mask = Documents.of(offsets, machine.array)
    with session(machine):
        check(machine, arrays, grad, mask=mask if also is None else mask & also,
              visible=lambda m, n, h, b: (of[m] == of[n]) & ((n <= m) | (also is None)))


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "none"])
def test_masks_that_are_seen_from_keys(mask: str) -> None:
    """Which queries see a key is what each query says; bounds leave out none that does, and free ones all do."""
    rule = MASKS[mask][0]
    turned = seen_from_keys(rule)
    for queries, keys in ((9, 9), (5, 12), (12, 5)):
        shift = keys - queries
        for b in range(2):
            for begin in range(keys):
                for end in range(begin + 1, min(begin + 5, keys) + 1):
                    visited = turned.visited(begin, end, queries, 0, b, -shift)
                    free = turned.untested(begin, end, queries, 0, b, -shift)
                    for n in range(begin, end):
                        for m in range(queries):
                            sees = rule.sees(m, n, 0, b, shift)
                            assert turned.sees(n, m, 0, b, -shift) == sees
                            assert not sees or visited[0] <= m < visited[1]
                            assert sees or not free[0] <= m < free[1]


# -- shapes -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("heads", [(4, 2, 1), (2, 2, 2), (3, 1, 3), (4, 4, 2)], ids=str)
def test_shared_heads(machine: Any, session: Any, heads: tuple[int, int, int], layout: str, rng: np.random.Generator) -> None:
    """dk and dv are sums over the heads of q that share them, and over the batch where k or v have one for all; with a gradient of lse."""
    queries, keys = sizes(machine, 9, 18)
    arrays, grad = operands(rng, (2, heads[0], queries, 16), (2, heads[1], keys, 16), v_heads=heads[2])
    arrays[1] = arrays[1][:1] if heads[0] == 3 else arrays[1]
    of_lse = draw(rng, (2, heads[0], queries), F32)
    with session(machine):
        check(machine, arrays, grad, of_lse, mask=Causal(), layout=layout, visible=lambda m, n, h, b: n <= m + keys - queries)


@pytest.mark.sample(18)
@on_machines
@pytest.mark.parametrize("by_warps", [False, True], ids=["", "by warps"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("head_dim,width", [(8, 8), (16, 40), (40, 24), (64, 64), (72, 8), (128, 128), (96, 128), (192, 128), (256, 256)])
def test_head_sizes(machine: Any, session: Any, head_dim: int, width: int, dtype: Any, by_warps: bool, rng: np.random.Generator) -> None:
    """In the emulator by both kernels. Beyond 256 columns of both, dk and dv are computed by launches of their own."""
    queries, keys = sizes(machine, 17, 35)
    arrays, grad = operands(rng, (1, 1, queries, head_dim), (1, 1, keys, head_dim), width, dtype=dtype)
    with session(machine, by_warps):
        check(machine, arrays, grad)


@pytest.mark.kin(1)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("kind", ["rows of 66", "backwards", "odd base"])
def test_views(machine: Any, session: Any, kind: str, rng: np.random.Generator) -> None:
    """Strides that TMA cannot take, and a base that lies at no 16 bytes."""
    queries, keys = sizes(machine, 12, 21)
    arrays, grad = operands(rng, (1, 2, queries, 40), (1, 2, keys, 40))
    cut = {"rows of 66": lambda x: x[..., :32], "backwards": lambda x: x[:, :, ::-1, :32], "odd base": lambda x: x[..., 2:34]}[kind]
    with session(machine):
        check(machine, arrays, grad, mask=Causal(), scale=0.3, cut=cut, visible=lambda m, n, h, b: n <= m + keys - queries)


@pytest.mark.kin(1)
@pytest.mark.parametrize("kind", ["heads", "batch", "both"])
def test_axes_of_stride_zero(session: Any, kind: str, rng: np.random.Generator) -> None:
    """There is one gradient for each element, as PyTorch asks for of an expanded tensor."""
    arrays, grad = operands(rng, (2, 2, 12, 16), (2, 2, 21, 16))
    one = arrays[1][:, :1] if kind == "heads" else arrays[1][:1] if kind == "batch" else arrays[1][:1, :1]
    arrays[1] = np.broadcast_to(one, arrays[1].shape)
    out, lse = reference(*arrays)[:2]
    with session(Emulator()):
        found = gradients(Rules(Everything(), PLAIN, None, 0.25), grad, *arrays, out.astype(F16), lse.astype(F32))
    close_gradients(found, reference_gradients(*arrays, grad))


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (1, 1, 0, 4), (1, 2, 5, 0)], ids=str)
def test_nothing(shape: tuple[int, ...]) -> None:
    """Without queries, or without keys, gradients are zeros."""
    batch, heads, queries, keys = shape
    arrays, grad = operands(np.random.default_rng(0), (batch, heads, queries, 16), (batch, max(heads, 1), keys, 16))
    with gk.emulate():
        q, k, v = arrays
        out, lse = np.zeros_like(grad), np.full(grad.shape[:-1], -np.inf, F32)
        found = gradients(Rules(Causal(), PLAIN, None, 1.0), grad, q, k, v, out, lse)
    assert all(x.shape == y.shape and not x.any() for x, y in zip(found, arrays))


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_one_gradient_alone(machine: Any, session: Any, needed: tuple[bool, ...], rng: np.random.Generator) -> None:
    queries, keys = sizes(machine, 12, 21)
    arrays, grad = operands(rng, (1, 2, queries, 16), (1, 1, keys, 16))
    with session(machine):
        found = computed(machine, arrays, grad, reference(*arrays)[:2], needed=needed)
    assert tuple(x is not None for x in found) == needed
    close_gradients(found, reference_gradients(*arrays, grad))


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
def test_scales(machine: Any, session: Any, scale: float, rng: np.random.Generator) -> None:
    arrays, grad = operands(rng, (1, 1, 12, 16), (1, 1, 21, 16))
    with session(machine):
        check(machine, arrays, grad, scale=scale)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("rows", ["every third", "all", "negative"])
def test_large_scores(machine: Any, session: Any, rows: str, rng: np.random.Generator) -> None:
    """Products begin at logarithms of scores that are small, and at 0 where one of the warp's is large: float32 would keep few bits
    behind the point, and a weight that is 1, beside others that are 0, would not be."""
    queries, keys = sizes(machine, 45, 37)
    arrays, grad = operands(rng, (1, 2, queries, 16), (1, 2, keys, 16))
    q, k, _ = arrays
    q[..., 0], large = 0, slice(None, None, 3 if rows == "every third" else 1)
    q[..., large, :] = 0
    q[..., large, 0] = -2000 if rows == "negative" else 2000
    k[..., 0] = 8 * np.arange(1, keys + 1)
    with session(machine):
        check(machine, arrays, grad, mask=Causal(), visible=lambda m, n, h, b: n <= m + keys - queries)


# -- lengths ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("mask", ["none", "causal", "window", "striped", "striped, window"])
def test_lengths_of_keys(machine: Any, session: Any, mask: str, rng: np.random.Generator) -> None:
    """A causal mask's last query sees the last key that is there. What lies behind a length gets zeros, and is NaN but for the
    block that is visited in part."""
    queries, keys = sizes(machine, 18, 40)
    lengths, block = [keys, 0, keys // 3, keys + 9], 16 if machine.emulated else 128
    arrays, grad = operands(rng, (4, 1, queries, 16), (4, 1, keys, 16))
    rule, visible = MASKS[mask]

    def spoilt(given: list[np.ndarray]) -> list[np.ndarray]:
        q, *of_keys = (x.copy() for x in given)
        for x in of_keys:
            x[1, :, block:] = x[2, :, -(-lengths[2] // block) * block:] = np.nan
        return [q, *of_keys]

    with session(machine):
        check(machine, arrays, grad, mask=rule, lengths=lengths, spoilt=spoilt, visible=lambda m, n, h, b: (n < lengths[b]) & (
            visible is None or visible(m, n, h, b, min(lengths[b], keys) - queries)))


OFFSETS = {"usual": ([0, 9, 9, 10, 33, 35], [0, 20, 21, 21, 38, 40]), "one": ([0, 35], [0, 40]), "gaps": ([2, 12, 30], [5, 30, 36])}


@pytest.mark.kin(1)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_packed_sequences(machine: Any, session: Any, offsets: str, mask: str, layout: str, rng: np.random.Generator) -> None:
    """Each sequence is what it is alone; rows of none get zeros."""
    of_q, of_k = OFFSETS[offsets]
    arrays, grad = operands(rng, (2, 35, 16), (1, 40, 16), 24)
    rule, visible = MASKS[mask]
    wanted = [(np.zeros(x.shape), np.full(x.shape, 2.0**-23)) for x in arrays]
    result = np.full(grad.shape, np.nan), np.full(grad.shape[:-1], np.nan)
    for i in range(len(of_q) - 1):
        rows, keys = slice(of_q[i], of_q[i + 1]), slice(of_k[i], of_k[i + 1])
        shift = (keys.stop - keys.start) - (rows.stop - rows.start)
        cut, sees = [x[None, :, at] for x, at in zip((*arrays, grad), (rows, keys, keys, rows))], visible and (
            lambda m, n, h, b, shift=shift: visible(m, n, h, b, shift))
        result[0][:, rows], result[1][:, rows] = (x[0] for x in reference(*cut[:3], visible=sees)[:2])
        for (exact, bound), at, (x, error) in zip(wanted, (rows, keys, keys), reference_gradients(*cut, visible=sees)):
            exact[:, at], bound[:, at] = x[0], error[0]
    for deterministic in (True, False):
        with session(machine):
            found = computed(machine, arrays, grad, result, mask=rule, layout=layout, offsets=(of_q, of_k), deterministic=deterministic)
        close_gradients(found, wanted)


# -- scores -----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Bent(Score):
    """Of the user's, with a number and an array, and another formula at every third key."""

    by: gk.Scalar
    of_heads: gk.Array

    def __call__(self, s: Any, m: int, n: int, head: int) -> Any:
        return s * self.by + self.of_heads[head] * s * s if n % 3 else s * (head + 1)


BIAS, SLOPES, HALF = np.float32(np.random.default_rng(5).standard_normal((2, 14, 21))), np.float32([0.1, 0.3]), np.float32(0.5)
#: (the score of arrays where they are, what it is, its derivative)
SCORES: dict[str, tuple[Any, Any, Any]] = {
    "ALiBi": (lambda asarray: ALiBi(asarray(SLOPES)), lambda s, m, n, h, b: s - SLOPES[h] * (m - n), None),
    "bias": (lambda asarray: ScoreBias(asarray(BIAS)), lambda s, m, n, h, b: s + BIAS[h], None),
    "soft cap": (lambda asarray: SoftCap(2.0), lambda s, m, n, h, b: 2 * np.tanh(s / 2), lambda s, m, n, h, b: 1 - np.tanh(s / 2)**2),
    "function": (lambda asarray: lambda s, m, n: HALF * s * abs(s) + math.exp(-s), lambda s, m, n, h, b: 0.5 * s * abs(s) + np.exp(-s),
                 lambda s, m, n, h, b: abs(s) - np.exp(-s)),
    "as a mask": (lambda asarray: lambda s, m, n: -math.inf if n > m + 9 else s, lambda s, m, n, h, b: np.where(n > m + 9, -np.inf, s),
                  lambda s, m, n, h, b: 1.0 * (n <= m + 9)),
    "component": (lambda asarray: Bent(0.7, asarray(SLOPES)), lambda s, m, n, h, b: np.where(n % 3, s * 0.7 + SLOPES[h] * s * s, s * (h + 1)),
                  lambda s, m, n, h, b: np.where(n % 3, 0.7 + 2 * SLOPES[h] * s, h + 1)),
    "constant": (lambda asarray: lambda s, m, n: 1, lambda s, m, n, h, b: np.ones_like(s), lambda s, m, n, h, b: np.zeros_like(s)),
}


@pytest.mark.kin(1)
@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("score", SCORES)
def test_scores(machine: Any, session: Any, score: str, mask: str, rng: np.random.Generator) -> None:
    arrays, grad = operands(rng, (1, 2, 14, 16), (1, 2, 21, 16))
    make, exact, slope = SCORES[score]
    rule, visible = MASKS[mask]
    with session(machine):
        check(machine, arrays, grad, mask=rule, score=make(machine.array), formula=exact, slope=slope,
              slack=2e-3 if score == "soft cap" else 0.0,                      # a fast tanh
              visible=visible and (lambda m, n, h, b: visible(m, n, h, b, 7)))


# -- drawn ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("number", range(80))
def test_drawn(machine: Any, session: Any, number: int, rng: np.random.Generator) -> None:
    """Sizes, heads, dtypes, layouts, masks, scores and lengths together."""
    def pick(*given: Any) -> Any:
        return given[rng.integers(len(given))]

    queries, keys = sizes(machine, int(rng.integers(1, 40)), int(rng.integers(1, 50)))
    heads, share = int(pick(1, 2, 2, 3)), int(pick(1, 1, 2))
    batch, dtype, head_dim = int(pick(1, 1, 2)), pick(F16, F16, BF16), 8 * int(rng.integers(1, 9))
    arrays, grad = operands(rng, (batch, heads * share, queries, head_dim), (batch, heads, keys, head_dim), 8 * int(rng.integers(1, 9)),
                            int(pick(heads, heads * share)), dtype)
    rule, visible = MASKS[pick(*MASKS)]
    score, formula, slope = pick((None, None, None), (None, None, None), SCORES["soft cap"], SCORES["function"])
    lengths = pick(None, None, [int(rng.integers(0, keys + 5)) for _ in range(batch)])
    of_lse = pick(None, draw(rng, (batch, heads * share, queries), F32))
    scale = float(pick(head_dim ** -0.5, 0.1, -0.2))

    def seen(m: Any, n: Any, h: int, b: int) -> Any:
        length = keys if lengths is None else min(lengths[b], keys)
        return (n < length) & (visible is None or visible(m, n, h, b, length - queries))

    with session(machine, by_warps=machine.emulated and rng.integers(3) == 0):
        check(machine, arrays, grad, of_lse, deterministic=bool(pick(True, False)), mask=rule, score=score and score(machine.array), scale=scale, layout=pick("bhnd", "bnhd"),
              lengths=lengths, visible=seen, formula=formula, slope=slope, slack=3e-3 if score is SCORES["soft cap"][0] else 0.0)


# -- in any order ----------------------------------------------------------------------------------------------------------------

#: (head sizes of k and v, heads of q and k, what else the call says): one kernel takes them.
ANY_ORDER: dict[str, tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "64": ((64, 64), (2, 2), {}), "128": ((128, 128), (2, 2), {}), "64, causal": ((64, 64), (2, 2), dict(mask="causal")),
    "128, causal": ((128, 128), (1, 1), dict(mask="causal")), "window": ((64, 64), (2, 1), dict(mask="window")),
    "grouped": ((128, 128), (4, 2), {}), "one of all": ((64, 64), (3, 1), dict(mask="upper left")), "odd sizes": ((40, 24), (2, 2), {}),
    "narrow values": ((128, 72), (2, 2), {}), "striped": ((64, 64), (2, 2), dict(mask="striped")),
    "soft cap": ((64, 64), (1, 1), dict(score="soft cap")), "ALiBi": ((128, 128), (2, 2), dict(score="ALiBi")),
    "lengths": ((64, 64), (2, 2), dict(lengths=True)), "lengths, causal": ((128, 128), (2, 1), dict(lengths=True, mask="causal")),
    "views": ((64, 64), (2, 2), dict(layout="bnhd")),
    "in order, 64": ((64, 64), (2, 1), dict(deterministic=True)), "in order, 128": ((128, 128), (2, 2), dict(deterministic=True)),
}


@pytest.mark.kin(1)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("name", ANY_ORDER)
def test_any_order(machine: Any, session: Any, name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``deterministic``, or a mask, the gradient of q comes from the tiles of keys, of odd lengths, too."""
    (size, width), (heads, shared), more = ANY_ORDER[name]
    queries, keys = sizes(machine, 45, 37)
    arrays, grad = operands(rng, (2, heads, queries, size), (2, shared, keys, size), width)
    rule, visible = MASKS[more.get("mask", "none")]
    make, formula, slope = SCORES.get(more.get("score", ""), (None, None, None))
    lengths = [keys, keys // 3] if "lengths" in more else None
    monkeypatch.setattr(room, "gradient_of_queries", None)
    monkeypatch.setattr(room, "LEAST_VISITED", 0)
    with session(machine):
        check(machine, arrays, grad, deterministic="deterministic" in more, mask=rule, score=make and make(machine.array), lengths=lengths,
              layout=more.get("layout", "bhnd"), formula=formula, slope=slope, slack=2e-3 if more.get("score") == "soft cap" else 0.0,
              visible=lambda m, n, h, b: (n < (lengths or (keys, keys))[b]) & (
                  visible is None or visible(m, n, h, b, (lengths or (keys, keys))[b] - queries)))


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("kind", ["heads of 72", "unaligned", "another GPU", "one alone", "few rows",
                                  "soft cap of 128"])
def test_what_has_an_order_anyway(machine: Any, session: Any, kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the one kernel does not take has two, whose results are right whatever was allowed."""
    queries, keys = sizes(machine, 12, 21)
    size = {"heads of 72": 72, "soft cap of 128": 128}.get(kind, 40)
    arrays, grad = operands(rng, (1, 2, queries, size), (1, 2, keys, size))
    more: dict[str, Any] = dict(scale=0.3, cut=lambda x: x[..., 2:34]) if kind == "unaligned" else {}
    if kind == "soft cap of 128":
        make, formula, slope = SCORES["soft cap"]
        more = dict(score=make(machine.array), formula=formula, slope=slope, slack=2e-3)
        monkeypatch.setattr(room, "_without_room", set())
    monkeypatch.setattr(room, "scaled_sums", None)
    monkeypatch.setattr(room, "LEAST_VISITED", 0 if kind != "few rows" else 1280)
    with session(machine, by_warps=kind == "another GPU"):
        if kind == "one alone":
            found = computed(machine, arrays, grad, reference(*arrays)[:2], needed=(True, False, True), deterministic=False)
            return close_gradients(found, reference_gradients(*arrays, grad))
        if machine.emulated or kind != "another GPU":
            check(machine, arrays, grad, deterministic=False, **more)
        if kind == "soft cap of 128":                      # another call does not try it
            monkeypatch.setattr(room, "adds_queries", None)
            check(machine, arrays, grad, deterministic=False, **more)


# -- machine code -----------------------------------------------------------------------------------------------------------------

def half(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.zeros(shape, dtype)


#: (head sizes of k and v, mask, which program, results, most instructions of a round): what a round of each has, as compiled.
CASES_CODE: dict[str, tuple[int, int, Any, str, list[int]]] = {
    "dq 64": (64, 64, None, "q", [680, 580]), "dk, dv 64": (64, 64, None, "kv", [830, 565]),
    "dq 128": (128, 128, None, "q", [730, 630]), "dk, dv 128": (128, 128, None, "kv", [670, 480]),
    "dq 128, causal": (128, 128, Causal(), "q", [855, 640]), "dk, dv 128, causal": (128, 128, Causal(), "kv", [730, 485, 720]),
    "dq 192": (192, 128, None, "q", [650, 570]), "dk 192": (192, 128, None, "k", [1280, 845]), "dv 192": (192, 128, None, "v", [510]),
    "all 64": (64, 64, None, "kvq", [1330, 970]), "all 64, causal": (64, 64, Causal(), "kvq", [1490, 995, 1505]),
    "all 64 in order": (64, 64, None, "in order kvq", [1295, 950]), "all 128 in order": (128, 128, None, "in order kvq", [865, 690]),
    "all 128": (128, 128, None, "kvq", [915, 705]), "all 128, causal": (128, 128, Causal(), "kvq", [880, 630, 895]),
}
#: Instructions that store and load registers of consumers, at the ends of tiles and (of what is tested) in each kind of round. The warp
#: that brings columns has 24 registers, and spills in its own time. (dS lies in registers where dK takes it: some rounds spill two or
#: three more than by way of shared memory, causal ones none, and all are faster, as `bench.attention_backward` shows.)
SPILLED = {"all 64 in order": 46, "all 128 in order": 70, "dk, dv 128": 2, "dk, dv 128, causal": 10, "all 64": 16, "all 128": 28}
IN_ROUNDS = {"all 64 in order": [4, 10], "all 128 in order": [15, 13], "all 128": [1, 1]}


def test_turns() -> None:
    """A warpgroup gives its turn before it first waits: the next one's products run under its exponentials."""
    arrays, rows = (half(1, 1, 512, 64) for _ in range(6)), (half(1, 1, 512, dtype=F32) for _ in range(2))
    rest = None, None, None, 0.125, seen_from_keys(Causal()), None, None, "bh", "bh", 1, 1
    (plan,) = recorded(lambda: gradients_of_keys(*arrays, *rows, *rest), H100, zeros=False)
    _, *turns = plan.text.split("turns.wait(group)")
    assert len(turns) == 3 and all("wgmma_commit" in x and "wgmma_wait" not in x for x in (turn.split("turns.give")[0] for turn in turns))


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(9)
@pytest.mark.parametrize("name", CASES_CODE)
def test_machine_code(name: str) -> None:
    """Nothing spills, and rounds are no longer than they were; no accumulator is waited for one by one."""
    head_dim, width, mask, results, most = CASES_CODE[name]
    q, k, v, do = (half(2, 4, 512, size) for size in (head_dim, head_dim, width, width))
    lse, delta, rest = half(2, 4, 512, dtype=F32), half(2, 4, 512, dtype=F32), (None, None, None, 0.125)
    same = None, None, "bh", "bh", 1, 1
    if results == "q":
        (plan,) = recorded(lambda: gradient_of_queries(half(*q.shape), q, k, v, do, lse, delta, *rest, mask, *same), H100, zeros=False)
    else:
        dk, dv = (half(*x.shape) if name in results else None for name, x in (("k", k), ("v", v)))
        seen = None if mask is None else seen_from_keys(mask)
        added = (half(*q.shape, dtype=F32),) if "q" in results else ()
        mapping = gk.Mapping(ordered="order" in results) if added else None
        (plan,) = recorded(lambda: gradients_of_keys(dk, dv, q, k, v, do, lse, delta, *rest, seen, *same, *added, mapping=mapping), H100, zeros=False)
    entry = plan.launchable.entry()
    usage = entry.meta["usage"]
    sass = disassemble(entry.cubin)
    found = [one for one in loops(sass) if not any("UTMASTG" in line for line in one)]
    listing = instructions(sass)
    consumers = listing[:next(n for n, line in enumerate(listing) if line.startswith("USETMAXREG.DEALLOC"))]
    assert usage["registers"] == 168 and (usage["stack_bytes"] == 0 or "bring(" in plan.text) and _spills(consumers) <= SPILLED.get(name, 0)
    assert any("HGMMA" in line for line in consumers) and not any("HGMMA" in line for line in listing[len(consumers):])
    assert all(_spills(one) <= most for one, most in zip(found, IN_ROUNDS.get(name, [0] * len(found)), strict=True))
    rounds = [len(one) for one in found]
    assert len(rounds) == len(most) and all(found <= limit for found, limit in zip(rounds, most)), rounds


def _spills(listing: list[str]) -> int:
    return sum(line.startswith(("LDL", "STL")) for line in listing)


BY_PTX: dict[str, dict[str, Any]] = {
    "documents": dict(mask=Documents.of([0, 11, 12, 43]), visible=lambda m, n, h, b: np.searchsorted([11, 12], m, "right") == np.searchsorted(
        [11, 12], n, "right")),
    "lengths": dict(lengths=[30, 43], mask=Window(9, 3), visible=lambda m, n, h, b: (n < (30, 43)[b]) & (
        m + (30, 43)[b] - 43 - 9 <= n) & (n <= m + (30, 43)[b] - 43 + 3)),
    "striped": dict(mask=Striped(), visible=lambda m, n, h, b: ((m + n + h) % (b + 2) > 0) & (n < m + 3)),
    "score": dict(score=Bent(0.7, SLOPES), formula=SCORES["component"][1], slope=SCORES["component"][2]),
}


@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BY_PTX)
def test_what_was_compiled_computes(name: str, rng: np.random.Generator) -> None:
    """The PTX of other GPUs' kernels, all threads in step: searches, lengths and derivatives as they were compiled."""
    arrays, grad = operands(rng, (2, 2, 43, 16), (2, 1, 43, 16))
    machine = Ptx()
    with machine.session(), assumed(A100):
        check(machine, arrays, grad, **BY_PTX[name])
