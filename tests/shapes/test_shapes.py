"""Shapes against brute force, on the host and compiled: the algebra agrees with an enumeration of the elements."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import gemmkit as gk
from gemmkit import specs
from gemmkit.ptx.special import thread_index
from gemmkit.shapes import ALL, Shape, ShapeError, Step, local, shape
from tests.support.harness import Out, compiled, emulated

# ==========================================================================================================================
# Shapes against brute force: what the algebra says of dims and strides is what enumerating the elements says.

extents = st.integers(1, 4)
strides = st.sampled_from([0, 1, 2, 5, 8, 16, 37])


@st.composite
def dimensions(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dims = draw(st.lists(extents, min_size=1, max_size=3))
    return tuple(dims), tuple(draw(strides) for _ in dims)


@st.composite
def shapes(draw: Any, most: int = 3) -> Shape:
    parts = draw(st.lists(dimensions(), min_size=1, max_size=most))
    return Shape(tuple(d for d, _ in parts), tuple(s for _, s in parts))


tilers = st.sampled_from([ALL, 1, 2, 3, 4, shape(2, 2), shape(2, 4), shape((2, 2), (1, 4)), shape((2, 3), (2, 8)), shape((2, 2), (4, 1))])


def index_by_digits(dims: Any, steps: Any, i: int) -> int:
    """Offset of one dimension's coordinate, by the definition: a hierarchical one counts with its first part fastest."""
    if not isinstance(dims, tuple):
        return i * steps
    total = 0
    for d, s in zip(dims, steps):
        size = math.prod(flat(d))
        total, i = total + index_by_digits(d, s, i % size), i // size
    return total


def flat(dims: Any) -> list[int]:
    return [x for d in dims for x in flat(d)] if isinstance(dims, tuple) else [dims]


def tile_of(tiler: Any, extent: int) -> list[int]:
    """The coordinates in the first tile, in order."""
    if tiler is ALL:
        return list(range(extent))
    return (tiler if isinstance(tiler, Shape) else shape(tiler)).offsets()


# -- the paper's figures ----------------------------------------------------------------------------------------------

def test_layouts_of_figure_3() -> None:
    assert Shape((4, 8), (1, 4))(2, 3) == 14                                       # a: column-major
    assert Shape((4, 8)) == Shape((4, 8), (8, 1)) and Shape((4, 8))(2, 3) == 19    # b: row-major
    assert Shape((4, (2, 4)), (2, (1, 8))).offsets()[:8] == [0, 1, 8, 9, 16, 17, 24, 25]
    assert Shape(((2, 2), (2, 4)), ((1, 8), (2, 16)))(3, 5) == 1 + 8 + 2 + 32
    assert Shape((4, 8), (9, 1))(1, 0) == 9                                        # padded


def test_tiles_of_figure_4() -> None:
    of = Shape((4, 8), (1, 4))
    assert of.tile(2, 4) == (Shape((2, 2), (2, 16)), Shape((2, 4), (1, 4)))
    assert of.tile(shape(2, 2), 4) == (Shape((2, 2), (1, 16)), Shape((2, 4), (2, 4)))
    assert of.tile(shape(2, 2), shape((2, 2), (1, 4))) == (Shape((2, 2), (1, 8)), Shape((2, (2, 2)), (2, (4, 16))))


def test_threads_of_figures_5_and_6() -> None:
    groups, lanes = shape(32).tile(8)
    assert groups.reshape(2, 2) == Shape((2, 2), (16, 8)) and lanes == shape(8)
    pairs, pair = shape(32).tile(shape((4, 2), (1, 16)))
    assert pairs == shape(4, 4) and pair.offsets() == [0, 1, 2, 3, 16, 17, 18, 19]


# -- notation ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text", ["[(16,16):(16,1)]", "[(4,(2,4)):(2,(1,8))]", "[2:1]", "[((2,2),(2,4)):((1,8),(2,16))]"])
def test_notation(text: str) -> None:
    assert repr(Shape.parse(text)) == text


@given(shapes())
def test_notation_says_all(of: Shape) -> None:
    assert Shape.parse(repr(of)) == of


@pytest.mark.parametrize("text", ["(16,16)", "[16,", "[a:b]", "[1:2:3]", "[]", ""])
def test_no_notation(text: str) -> None:
    with pytest.raises(ShapeError, match="is not a shape"):
        Shape.parse(text)


def test_strides_left_out_are_row_major() -> None:
    assert Shape.parse("[16,(2,4)]") == Shape((16, (2, 4)), (8, (1, 2)))


# -- drawn ------------------------------------------------------------------------------------------------------------

@given(dimensions(), dimensions())
def test_index_function(rows: Any, columns: Any) -> None:
    of = Shape((rows[0], columns[0]), (rows[1], columns[1]))
    for i, j in itertools.product(*map(range, of.extents)):
        assert of(i, j) == index_by_digits(*rows, i) + index_by_digits(*columns, j)


@given(shapes(), st.lists(tilers, min_size=3, max_size=3))
def test_tiles(of: Shape, sizes: list) -> None:
    sizes = sizes[:of.rank]
    try:
        outer, inner = of.tile(*sizes)
    except ShapeError:
        assume(False)
    first = [tile_of(size, extent) for size, extent in zip(sizes, of.extents)]
    for at in itertools.product(*map(range, inner.extents)):                       # the first tile is what the tiler says
        assert inner(*at) == of(*(line[i] for line, i in zip(first, at)))
    # The same tiling of the coordinates themselves: each element is in one tile, and lies where the shapes say.
    tiles, elements = local(*of.extents).tile(*sizes)
    assert tiles.extents == outer.extents and elements.extents == inner.extents
    seen = set()
    for o in itertools.product(*map(range, outer.extents)):
        for i in itertools.product(*map(range, inner.extents)):
            place = Step((0,) * of.rank) + tiles(*o) + elements(*i)
            assert of(*place) == outer(*o) + inner(*i)
            seen.add(tuple(place))
    assert seen == set(itertools.product(*map(range, of.extents)))


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 6))
def test_what_divides_is_tiled_and_nothing_else(extent: int, count: int, apart: int) -> None:
    """Tiles of ``count`` elements ``apart``: they cover a plain dimension if a tile with its gaps divides it."""
    span = count * apart if count > 1 else 1
    if extent % span == 0:
        outer, inner = shape(extent).tile(shape(count, apart))
        assert sorted(o + i for o in outer.offsets() for i in inner.offsets()) == list(range(extent))
    else:
        with pytest.raises(ShapeError, match=r"tile size .* of dimension 0 of .*do not divide"):
            shape(extent).tile(shape(count, apart))


@given(shapes(most=2), st.data())
def test_reshape(of: Shape, data: Any) -> None:
    rows = data.draw(st.sampled_from([d for d in range(1, of.size + 1) if of.size % d == 0]))
    order = data.draw(st.sampled_from(["row", "column"]))
    try:
        made = of.reshape(rows, of.size // rows, order=order)
    except ShapeError:
        assume(False)

    def numbered(x: Shape) -> list[int]:
        places = itertools.product(*map(range, reversed(x.extents))) if order == "column" else itertools.product(*map(range, x.extents))
        return [x(*(reversed(at) if order == "column" else at)) for at in places]

    assert made.extents == (rows, of.size // rows)
    assert numbered(made) == numbered(of)


@given(dimensions(), st.sampled_from([shape(2), shape(2, 2), shape(4), shape((2, 2), (1, 4)), shape((2, 2), (2, 1))]))
def test_compose(dim: Any, inner: Shape) -> None:
    of = Shape((dim[0],), (dim[1],))
    try:
        made = of.compose(inner)
    except ShapeError:
        assume(False)
    assert [made(i) for i in range(inner.size)] == [of(inner(i)) for i in range(inner.size)]


@given(tilers, st.integers(1, 8))
def test_complement(tiler: Any, times: int) -> None:
    assume(tiler is not ALL)
    tile = tiler if isinstance(tiler, Shape) else shape(tiler)
    extent = (max(tile.offsets()) + 1) * times
    try:
        starts = tile.complement(extent)
    except ShapeError:
        assume(False)
    assert sorted(o + i for o in starts.offsets() for i in tile.offsets()) == list(range(extent))


@given(shapes())
def test_coalesce(of: Shape) -> None:
    made = of.coalesce()
    assert made.extents == of.extents and made.offsets() == of.offsets()
    assert all(a[1] * a[0] != b[1] for dim in made.modes for a, b in itertools.pairwise(dim))


@given(st.permutations([2, 4, 1, 2, 2]), st.integers(1, 4))
def test_places_of_threads(dims: list[int], split: int) -> None:
    strides, at = [], 1
    for d in dims:
        strides.append(at)
        at *= d
    of = Shape((tuple(dims[:split]), tuple(dims[split:])), (tuple(strides[:split]), tuple(strides[split:])))
    for number in range(32):
        assert of(*of.places(number)) == number


# -- run-time extents, steps ------------------------------------------------------------------------------------------

def test_extents_known_at_run_time() -> None:
    matrix = local(None, None)
    outer, inner = matrix.tile(128, shape((4, 2), (1, 16)))
    assert inner.extents == (128, 8) and outer.extents == (None, None)
    assert tuple(outer(2, 5) + inner(3, 6)) == (2 * 128 + 3, 32 + 4 + 16 + 2)       # tile 5: behind all of 32 columns, then 4 on
    with pytest.raises(ShapeError, match="run time"):
        _ = matrix.size


def test_steps() -> None:
    of = Shape((4, 8), (Step((0, 2)), Step((1, 0))))                                # as instructions' fragments lie
    assert of(3, 5) == (5, 6) and of.tile(2, 2)[0](1, 3) == (6, 4)
    assert Step((1, 2)) + 0 == 0 + Step((1, 2)) == (1, 2)


# -- refused ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("make", "words"), [
    (lambda: Shape((4, 8), (1,)), r"2 dimensions and strides=\(1,\) are 1"),
    (lambda: Shape(((2, 2), 8), (1, 4)), r"dimension \(2, 2\) has the strides 1; give one for each of its 2 parts"),
    (lambda: Shape((4, 8), ((1, 2), 4)), r"dimension 4 has the strides \(1, 2\); give one number"),
    (lambda: Shape((0, 8)), "extent is 0; give a whole number of at least 1"),
    (lambda: Shape((True, 8)), "extent is True"),
    (lambda: Shape((None, 8)), "needs strides"),
    (lambda: Shape((4, 8))(1), "2 dimensions and was given 1 coordinates"),
    (lambda: Shape((4, 8)).tile(2), "2 dimensions and was given 1 tile sizes"),
    (lambda: Shape((4, 8)).tile(3, 8), r"tile size 3 of dimension 0 of \[\(4,8\):\(8,1\)\]: 3 elements .* do not divide 4"),
    (lambda: Shape((4, 8)).tile(Shape((2, 2)), 8), "of shapes of one dimension"),
    (lambda: shape(8).tile(shape((2, 2), (1, 1))), "overlap"),
    (lambda: Shape((4, 8)).reshape(3, 8), "has 32 elements, and 3 x 8 are 24"),
    (lambda: Shape((4, 8)).reshape(4, 8, order="rows"), "order='rows'; give 'row' or 'column'"),
    (lambda: Shape((4, 6), (1, 100)).reshape(3, 8), "none of its own strides"),
    (lambda: shape(4).compose(shape(8)), "8 elements 1 apart are more than there are"),
])
def test_refused(make: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        make()


# ==========================================================================================================================
# Static objects in device code: the algebra runs while the kernel is compiled, and emits what run-time numbers need.


@dataclass(frozen=True)
class Map(gk.Component):
    """What a kernel is given: shapes are compile-time values."""

    warp: Any = shape(32)
    layout: Any = Shape((4, (2, 4)), (2, (1, 8)))
    wide: Any = specs.T[2, 2].fp32.RF


def places(spec: Any, out: Any) -> None:
    groups, lanes = spec.warp.tile(8)
    i, j = groups.reshape(2, 2).places(thread_index())
    out[thread_index(), 0] = i * 10 + j
    out[thread_index(), 1] = spec.layout(thread_index() // 8, thread_index() % 8) + groups.size * 0
    out[thread_index(), 2] = lanes.extents[0]


@pytest.mark.compile
def test_algebra_in_device_code() -> None:
    (out,) = emulated(places, Map(), Out((32, 3), "i4"))
    threads = np.arange(32)
    np.testing.assert_array_equal(out[:, 0], threads // 16 * 10 + threads // 8 % 2)
    np.testing.assert_array_equal(out[:, 1], [Map().layout(t // 8, t % 8) for t in threads])
    assert set(out[:, 2]) == {8}
    ptx = compiled(places, Map(), Out((32, 3), "i4"))
    assert not re.search(r"\b(div|rem)\.|call", ptx)              # shifts and masks; the tiling itself has gone


def not_there(spec: Any, out: Any) -> None:
    out[0, 0] = spec.layout.tile(3, 8)[0].size


def by_name(spec: Any, out: Any) -> None:
    out[0, 0] = spec.layout.reshape(4, 8, order="row").size


@pytest.mark.compile
@pytest.mark.parametrize(("kernel", "words"), [(not_there, "3 elements .* do not divide 4"), (by_name, "gives order by position")])
def test_refused_while_compiling(kernel: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        compiled(kernel, Map(), Out((32, 3), "i4"))


def no_instruction(spec: Any, out: Any) -> None:
    wide = specs.Allocate(spec.wide)
    specs.Move(specs.THREAD, wide, wide.tile(1, 2)[0, 0])


@pytest.mark.compile
def test_a_spec_that_is_no_instruction_says_so_when_compiled() -> None:
    with pytest.raises(Exception, match=r"(?s)Move <<<\[\].thread>>> .* is no instruction.*nearest instructions are.*but the source .* has two dimensions"):
        compiled(no_instruction, Map(), Out((32, 3), "i4"))
