"""Calls of other sizes, as the driver is told of them: a launch that is copied from a known one, with other integers, is the
launch that all passes make. A driver of `tests.support.launches` writes launches down; nothing runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench import stand_ins
from bench.stand_ins import CupyArray
from gemmkit import epilogues, masks
from gemmkit.programs import calls, plan
from tests.programs.test_called import of_tiles
from tests.support import chains, row_programs
from tests.support import programs as listing
from tests.support.launches import Launched, forget_all, told
from tests.support.machines import MACHINES, on_machines
from tests.support.patches import Seeded

Call = Callable[[], object]
LENGTHS = (1, 7, 8, 40, 64, 65, 100, 128, 200, 256, 333, 1000, 1024, 4096)
_pages = itertools.count(1 << 24)


@pytest.fixture
def seen() -> Iterator[list[Launched]]:
    with stand_ins.library("cupy"), told() as found:
        yield found


@pytest.fixture
def derived(replaced: Seeded) -> list[str]:
    """The names of programs that the passes read, one for each time that they do."""
    names: list[str] = []
    planned = plan.planned

    def counted(program: Any, *given: Any) -> Any:
        names.append(program.function.__name__)
        return planned(program, *given)

    replaced(calls, "planned", counted)
    return names


class Drawn:
    """Arrays of a call: mostly as libraries make them, else with gaps between rows and matrices, at odd addresses, or in
    another's memory."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.last = rng, 0

    def length(self, by: int = 1) -> int:
        return by * -(-int(self.rng.choice(LENGTHS)) // by)

    def array(self, *shape: int, dtype: Any = np.float16, plain: bool = False) -> CupyArray:
        size, rng = np.dtype(dtype).itemsize, self.rng
        strides, step = [], 1
        for axis, extent in reversed(list(enumerate(shape))):
            strides.append(step * size)
            step *= max(1, extent)
            if not plain and axis and rng.random() < 0.15:
                step += int(rng.choice([1, 4, *[8, 24, 64] * 3]))
        at = next(_pages) << 24
        if not plain and rng.random() < 0.1:
            at += size * int(rng.choice([1, 4, 8, 8, 8]))
        if not plain and self.last and rng.random() < 0.02:
            at = self.last + 64                        # of an array that is there
        self.last = at
        return CupyArray(shape, dtype, at, strides=tuple(reversed(strides)))

    def integers(self, *shape: int) -> CupyArray:
        return self.array(*shape, dtype=np.int32, plain=True)


def of_attention(draw: Drawn, how: str) -> Callable[[], Call]:
    """`gk.attention`'s calls of one head size, mask and score, whose lengths, strides and places differ."""
    rng = draw.rng
    width, group = int(rng.choice([64, 128])), int(rng.choice([1, 2, 4]))
    mask = (None, masks.Causal(), masks.Window(100), masks.Causal() & masks.Window(64))[rng.integers(4)]
    has_slopes = rng.integers(3) == 0

    def call() -> Call:
        heads, batch, rows, keys = int(rng.integers(1, 9)), int(rng.integers(1, 4)), draw.length(), draw.length()
        given: dict[str, Any] = dict(mask=mask, scale=float(rng.choice([0.125, 0.25, 1.0])))
        if has_slopes:
            step = int(rng.choice([1, 4, 8]))
            given["score"] = masks.ALiBi(CupyArray((heads * group,), np.float32, next(_pages) << 24, strides=(4 * step,)))
        if how == "packed":
            q, o = (draw.array(heads * group, rows, width) for _ in "qo")
            k, v = (draw.array(heads, keys, width) for _ in "kv")
            count = int(rng.integers(1, 6))
            given["lengths"] = draw.integers(count + 1), draw.integers(count + 1)
        else:
            q, o = (draw.array(batch, heads * group, rows, width) for _ in "qo")
            k, v = (draw.array(batch, heads, keys, width) for _ in "kv")
        if how == "lengths":
            given["key_lengths"] = draw.integers(batch)
        elif how == "pages":
            page = int(rng.choice([16, 64, 256]))
            count = int(rng.integers(1, 40))
            k, v = (draw.array(count, heads, page, width) for _ in "kv")
            given |= dict(key_lengths=draw.integers(batch), pages=draw.integers(batch, int(rng.integers(1, 20))))
        return lambda: gk.attention(q, k, v, out=o, **given)

    return call


def of_programs(draw: Drawn, how: str) -> Callable[[], Call]:
    """Calls of one program, by one mapping."""
    rng = draw.rng
    splits = gk.Mapping(splits=int(rng.integers(1, 4)))
    mapping = (None, gk.Mapping(kernel="multistage"), splits)[rng.integers(3)] if how == "chain" else (
        None, gk.Mapping(kernel="multistage"))[rng.integers(2)]
    visible = (None, chains.causal)[rng.integers(2)]

    def call() -> Call:
        m, n, h = draw.length(), draw.length(8 - 7 * (rng.random() < 0.1)), int(rng.integers(1, 70))
        k = draw.length(8 if how == "tiles" else 1)
        if how == "tiles":
            a, b, d = draw.array(m, k), draw.array(k, n), draw.array(m, n)
            return lambda: listing.gemm(a, b, d, mapping=mapping)
        if how == "epilogue":
            a, b, d, c = draw.array(m, 64), draw.array(64, n), draw.array(m, n), draw.array(m, n)
            return lambda: of_tiles(a, b, d, epilogues.Scale(0.5) | epilogues.Residual(c), mapping=mapping)
        if how == "rows":
            x, y, t = draw.array(m, 96), draw.array(m, 96), draw.array(m, dtype=np.float32)
            return lambda: row_programs.causal_softmax(x, y, t)
        q, o, keys, values = (draw.array(h, extent, 64) for extent in (m, m, k, k))
        scale = float(rng.choice([0.125, 0.5]))
        return lambda: listing.attention(q, keys, values, o, scale, visible=visible, mapping=mapping)

    return call


SERIES: dict[str, Callable[[Drawn], Callable[[], Call]]] = {
    **{how: lambda draw, how=how: of_attention(draw, how) for how in ("attention", "packed", "lengths", "pages")},        # type: ignore[misc]
    **{how: lambda draw, how=how: of_programs(draw, how) for how in ("tiles", "epilogue", "rows", "chain")},              # type: ignore[misc]
}


def outcome(call: Call, seen: list[Launched]) -> Any:
    """What the driver is told, or why a call is refused."""
    seen.clear()
    try:
        call()
    except (ValueError, TypeError) as error:
        assert not seen
        return type(error), str(error)
    return tuple(seen)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("seed", range(12))
def test_a_call_of_another_size_is_launched_as_the_first_of_its_size(name: str, seed: int, seen: list[Launched]) -> None:
    """In a series of calls each is what it is alone: grid, values, tensor maps and attributes, or its refusal."""
    draw = Drawn(np.random.default_rng(seed))
    make = SERIES[name](draw)
    given = [make() for _ in range(7)]
    found = [outcome(call, seen) for call in given]
    for n in draw.rng.permutation(len(given)):         # and again, known
        assert outcome(given[n], seen) == found[n]
    for call, one in zip(given, found):
        forget_all()
        assert outcome(call, seen) == one


@pytest.fixture
def bound(replaced: Seeded) -> list[Any]:
    """The grids that kernels are bound in, which asks the driver about them."""
    grids: list[Any] = []
    bind = stand_ins.Kernel.bind

    def noted(kernel: Any, grid: Any, *given: Any, **more: Any) -> Any:
        grids.append(grid)
        return bind(kernel, grid, *given, **more)

    replaced(stand_ins.Kernel, "bind", noted)
    return grids


@pytest.mark.kin(1)
def test_another_length_copies_a_launch(seen: list[Launched], derived: list[str]) -> None:
    """It derives nothing, and asks the driver nothing about the kernel. What the mapping or the text depends on does: another
    head size, few rows, a mask, a number that is not positive, rows that TMA cannot take."""
    draw = Drawn(np.random.default_rng(0))

    def call(rows: int, keys: int, width: int = 64, pitch: int = 0, **more: Any) -> Launched:
        q, o, k, v = (draw.array(16, 4, extent, width, plain=True) for extent in (rows, rows, keys, keys))
        if pitch:
            v.strides = (*v.strides[:2], 2 * pitch, 2)
        gk.attention(q, k, v, out=o, **{"scale": 0.125, **more})
        return seen[-1]

    first = call(1000, 1000)
    assert derived == ["softmax_attention"]
    for rows, keys in itertools.product((1000, 1010, 1020), (700, 1300)):
        found = call(rows, keys)
        assert found[:5] == first[:5] and found.values != first.values
    assert derived == ["softmax_attention"]
    others = [call(1000, 1000, width=128), call(40, 1000), call(1000, 1000, mask=masks.Causal()),
              call(1000, 1000, scale=-1.0), call(1000, 1000, pitch=66)]
    assert len(derived) == 6 and len({one.code for one in (first, *others)}) == 6


def test_a_copied_launch_is_of_the_kernel_that_is_bound(seen: list[Launched], bound: list[Any]) -> None:
    make = stand_ins.LIBRARIES["cupy"][1]
    for rows in (256, 512, 1024, 256, 8192):
        of_tiles(make(rows, 64), make(64, 64), make(rows, 64), epilogues.ReLU(), mapping=gk.Mapping({"n": 64}))
    assert len(bound) <= 2 and len({one.grid for one in seen}) == 4          # the first plan, and the one that is kept


def test_a_size_that_cannot_be_is_refused_when_others_are_known(seen: list[Launched], derived: list[str]) -> None:
    """Arrays that share memory, with others or within themselves, sums over nothing, lengths that differ, more rows than a grid has."""
    make = stand_ins.LIBRARIES["cupy"][1]

    def product(m: int, n: int, k: int, **given: Any) -> None:
        a, b, d = make(m, k), make(k, n), make(m, n)
        listing.gemm(given.get("a", a), given.get("b", b), given.get("d", d), mapping=gk.Mapping({"n": 64}))

    product(256, 64, 64), product(512, 64, 64)
    whole, launched = make(1024, 64), len(seen)
    for words, sizes, given in (
        ("a and d share memory", (1024, 64, 64), dict(a=whole, d=CupyArray((1024, 64), np.float16, whole.data.ptr + 128000))),
        ("several of its elements share", (1024, 64, 64), dict(d=CupyArray((1024, 64), np.float16, whole.data.ptr, (16, 2)))),
        ("sums over at least one element", (1024, 64, 0), {}),
        ("used here for axis 0 of b", (1024, 64, 64), dict(b=make(72, 64))),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                product(*sizes, **given)
    assert len(seen) == launched and derived[:1] == ["gemm"]
    product(1024, 64, 64)
    assert len(seen) == launched + 1


# -- computed -------------------------------------------------------------------------------------------------------------

def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(heads, queries, head size), in float64; two heads share one of k."""
    k, v = (np.repeat(x.astype(float), 2, axis=0) for x in (k, v))
    s = q.astype(float) @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.asarray(p @ v / p.sum(axis=-1, keepdims=True))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["lengths", "pages", "packed"])
def test_calls_of_attention_that_come_again_compute(how: str, rng: np.random.Generator) -> None:
    """The first, the second and the third call of a size, those of another between them, each with arrays of its own. (In the
    emulator no call is known.)"""
    machine = MACHINES["gpu"]

    def half(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 2).astype(np.float16)

    for keys in (40, 90) * 3:
        arrays, lengths = [half(2, 4, 9, 64), half(2, 2, keys, 64), half(2, 2, keys, 64)], np.array([keys, keys])
        given: dict[str, Any] = {}
        if how != "packed":
            lengths = rng.integers(1, keys, 2)
            given["key_lengths"] = machine.array(lengths.astype(np.int32))
        wanted: Any = [attended(q, k[:, :length], v[:, :length]) for q, k, v, length in zip(*arrays, lengths)]
        if how == "pages":                             # of 16 rows, in any order
            pages = rng.permutation(2 * -(-keys // 16)).reshape(2, -1).astype(np.int32)
            caches = [half(pages.size, 2, 16, 64) for _ in "kv"]
            for (b, n), (cache, x) in itertools.product(np.ndindex(2, keys), zip(caches, arrays[1:])):
                cache[pages[b, n // 16], :, n % 16] = x[b, :, n]
            arrays[1:], given["pages"] = caches, machine.array(pages)
        elif how == "packed":                          # two sequences, one behind the other
            arrays, wanted = [np.concatenate(list(x), axis=1) for x in arrays], np.concatenate(wanted, axis=1)
            given["lengths"] = tuple(machine.array(np.array([0, n, 2 * n], np.int32)) for n in (9, keys))
        out = machine.array(np.full(np.shape(wanted), np.nan, np.float16))
        with machine.session():
            gk.attention(*map(machine.array, arrays), out=out, **given)
        assert np.abs(machine.numpy(out) - wanted).max() < 4e-3


@pytest.mark.kin(1)
@on_machines
def test_strides_of_what_is_held_are_a_calls_own(machine: Any, rng: np.random.Generator) -> None:
    """Of calls one after the other whose arrays differ in their strides, and a program's residual in its size."""
    x, wide = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 64), 64 * 24))
    on_machine, held = machine.array(x), machine.array(wide)
    for by in (8, 16, 8):
        with machine.session():
            found = machine.numpy(gk.rmsnorm(on_machine, held[:64 * by:by], eps=0.0))
        assert np.allclose(found, x / np.sqrt((x.astype(float)**2).mean(1, keepdims=True)) * wide[:64 * by:by], atol=1e-5)
    for columns in (64, 128, 64) if not machine.emulated else (64, 128):
        a, b, c = (rng.standard_normal(shape).astype(np.float16) / 4 for shape in ((64, 64), (64, columns), (64, columns + 64)))
        d, residual = machine.array(np.full((64, columns), np.nan, np.float16)), machine.array(c)[:, 64:]
        with machine.session():
            of_tiles(machine.array(a), machine.array(b), d, epilogues.Residual(residual))
        assert np.abs(machine.numpy(d) - (a.astype(float) @ b + c[:, 64:])).max() < 4e-3
