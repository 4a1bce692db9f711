"""What is said by shapes and swizzles is what each place said before in words of its own: for all cases that there are."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmkit import shapes
from gemmkit.emulator.copies import _places
from gemmkit.functions.einsum import _joined
from gemmkit.layouts import ColMajor, RowMajor, Swizzled, tensor
from gemmkit.operators import FPUOp, WGMMAOp
from gemmkit.ptx.mma import C_8X8, LANES, PAIRS, SPECS, FragmentMap, by_columns, by_rows, map_a, map_b, map_c
from gemmkit.ptx.wgmma import Descriptor
from gemmkit.runtime.array_info import steps_of
from gemmkit.shapes import Shape, ShapeError, Step, Swizzle, lines, of_function
from gemmkit.tiling import Division

pytestmark = pytest.mark.sample(24)

# -- fragments: the texts that there were -----------------------------------------------------------------------------

def table(shape: tuple, steps: tuple) -> list[tuple[int, int]]:
    """A number's digits in the mixed radix ``shape``, times strides of rows and columns."""
    out = [(0, 0)]
    for extent, (down, along) in zip(shape, steps):
        out = [(i + n * down, j + n * along) for n in range(extent) for i, j in out]
    return out


def is_map(found: FragmentMap, threads: tuple, values: tuple) -> None:
    of_threads, of_values = table(*threads), table(*values)
    assert (found.threads, found.values) == (len(of_threads), len(of_values))
    for axis in (0, 1):
        assert np.array_equal(found.indices[axis], np.add.outer([at[axis] for at in of_threads], [at[axis] for at in of_values]))
    last = found.threads - 1, found.values - 1
    assert (found.row(*last), found.column(*last)) == (found.indices[0][last], found.indices[1][last])


@pytest.mark.parametrize("key", sorted({(m, k, a.itemsize) for m, k, a, *_ in SPECS}))
def test_maps_of_mma(key: tuple) -> None:
    m, k, size = key
    w = max(1, 4 // size)
    is_map(map_a(m, k, size), ((4, 8), ((0, w), (1, 0))), ((w, m // 8, k // (4 * w)), ((0, 1), (8, 0), (0, 4 * w))))
    is_map(map_b(k, 8, size), ((4, 8), ((w, 0), (0, 1))), ((w, k // (4 * w)), ((1, 0), (4 * w, 0))))
    is_map(map_c(m, 8), ((4, 8), ((0, 2), (1, 0))), ((2, m // 8), ((0, 1), (8, 0))))


@pytest.mark.parametrize("n", [8, 24, 64, 256])
def test_maps_of_wgmma(n: int) -> None:
    threads = (4, 8, 4), ((0, 2), (1, 0), (16, 0))
    is_map(WGMMAOp(n).map_c, threads, ((2, 2, n // 8), ((0, 1), (8, 0), (0, 8))))
    is_map(WGMMAOp(n).map_a, threads, ((2, 2, 2), ((0, 1), (8, 0), (0, 8))))


@pytest.mark.parametrize("op", [FPUOp(), FPUOp(M=64, N=32), FPUOp(M=8, N=16, K=4, MB=8, NB=4), FPUOp(16, 16)],
                         ids=repr)
def test_maps_of_fpu_operators(op: FPUOp) -> None:
    rows, m, n = 2 if op.MB % 2 == 0 else 1, op.vector_m, op.vector_n
    lanes = (rows, op.NB, op.MB // rows)
    is_map(op.map_c, (lanes, ((m, 0), (0, n), (rows * m, 0))),
           ((m, op.M // op.MB // m, n, op.N // op.NB // n), ((1, 0), (op.MB * m, 0), (0, 1), (0, op.NB * n))))
    is_map(op.map_a, (lanes, ((m, 0), (0, 0), (rows * m, 0))), ((m, op.M // op.MB // m, op.K), ((1, 0), (op.MB * m, 0), (0, 1))))
    is_map(op.map_b, (lanes, ((0, 0), (0, n), (0, 0))), ((n, op.N // op.NB // n, op.K), ((0, 1), (0, op.NB * n), (1, 0))))


def test_fragments_side_by_side() -> None:
    """A value's number has that of its instruction in front."""
    one = map_c(16, 8)
    for t, v in itertools.product(range(32), range(16)):
        n, value = divmod(v, one.values)
        assert (one.beside(4).row(t, v), one.beside(4).column(t, v)) == (one.row(t, value), 8 * n + one.column(t, value))


def test_quad_pairs() -> None:
    """PTX ISA, "Matrix fragments for mma.m8n8k4"."""
    for q, pair in enumerate(PAIRS.offsets()):
        assert [pair + lane for lane in LANES.offsets()] == [base + 4 * q + n for base in (0, 16) for n in range(4)]
    for lane, v in itertools.product(range(32), range(8)):
        row = (lane & 1) + (v & 2) + (4 if lane >= 16 else 0)
        assert (C_8X8.row(lane, v), C_8X8.column(lane, v)) == (row, (v & 4) + (lane & 2) + (v & 1))


# -- swizzles ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "complex128"])
def test_swizzled_layouts(width: int, dtype: str) -> None:
    layout = Swizzled(RowMajor(dtype), width)
    line, mask = layout.line, (width - 16) // layout.itemsize
    for i, j in itertools.product(range(32), range(2 * line)):
        linear = i * line + j % line
        assert layout.position((i, j), 32) == j // line * 32 * line + (linear ^ (linear >> 3 & mask))
        assert Swizzled(ColMajor(dtype), width).position((j, i), 32) == layout.position((i, j), 32)


@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_boxes_of_tma(width: int) -> None:
    for phase in range(0, 1024, 128) if width else (0,):
        at = phase + 16 * np.arange(96)
        mask = (width or 16) - 16
        assert np.array_equal(_places(phase, 96, width), ((at ^ ((at >> 3) & mask)) - phase) // 16)


@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("lines_", [8, 24, 64, 72])
def test_canonical_layouts_of_wgmma(width: int, lines_: int) -> None:
    """As the PTX ISA has them, by division and remainder."""
    leading, stride, start = 4096, 1024, 2048
    line, chunk = np.arange(lines_)[:, None], np.arange(2)
    by_k = line // 8 * stride + line % 8 * (width or 16) + chunk * (16 if width else leading)
    chunk, k = np.arange(lines_ // 8)[:, None], np.arange(16)
    if width:
        by_lines = chunk // (width // 16) * leading + chunk % (width // 16) * 16 + k // 8 * stride + k % 8 * width
    else:
        by_lines = chunk * stride + k // 8 * leading + k % 8 * 16
    for major, offsets in (("K", by_k), ("MN", by_lines)):
        logical = start + offsets
        found = Descriptor(start, leading, stride, width).addresses(lines_, major)
        assert found.shape == offsets.shape and np.array_equal(found, logical ^ ((logical >> 3) & max(width - 16, 0)))


@given(st.integers(1, 7), st.integers(0, 4), st.integers(1, 5), st.integers(0, 10))
def test_runs_and_periods(mask: int, base: int, shift: int, at: int) -> None:
    """What stays together does, and what repeats does."""
    swizzle = Swizzle((shift, mask << base))
    run, period = swizzle.run, swizzle.period
    beside, first, begins, within = np.arange(run), np.arange(min(period, 512)), 2 * run * np.arange(period // run)[:, None], np.arange(2 * run)
    assert (swizzle(at * run + beside) == swizzle(at * run) + beside).all()
    assert (swizzle(first + at * period) == swizzle(first) + at * period).all()
    assert (swizzle(begins + within) != swizzle(begins) + within).any()


@pytest.mark.parametrize("terms", [(), ((3, 56),), ((2, 3),), ((-3, 8),), ((1, 4), (3, 2))])
def test_a_function_is_found_out(terms: tuple) -> None:
    assert of_function(Swizzle(*terms), 512) == Swizzle(*sorted(terms))


@pytest.mark.parametrize(("function", "words"), [(lambda i: i & 15, "0 and 16 both go to 0"), (lambda i: i + 1, "31 goes to 32"),
                                                 (lambda i: (i + 1) % 32, "0 goes to 1, its bits one by one to 0")])
def test_functions_that_are_none(function: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        of_function(function, 32)


def test_two_bits_that_change_places() -> None:
    swapped = of_function(lambda i: i & 9 | (i & 2) << 1 | (i & 4) >> 1, 16)
    assert [swapped(i) for i in range(8)] == [0, 1, 4, 5, 2, 3, 6, 7] and swapped.run == 2
    assert lines(0) == shapes.NONE and shapes.NONE(37) == 37 and shapes.NONE.period == 1


# -- modes: the dimensions of contractions and stacks -----------------------------------------------------------------

extents = st.integers(2, 6)


def joined(given_modes: list) -> list:
    """Of one tensor, as contractions had it."""
    out = given_modes[:1]
    for extent, *steps in given_modes[1:]:
        if all(step == of * out[-1][0] for step, of in zip(steps, out[-1][1:])):
            out[-1] = (extent * out[-1][0], *out[-1][1:])
        else:
            out.append((extent, *steps))
    return out


@given(st.lists(st.tuples(extents, st.sampled_from([0, 1, 2, 6, 12, 36, -1, -2])), min_size=1, max_size=5))
def test_modes_of_one_tensor(drawn: list) -> None:
    assert _joined(drawn) == joined(drawn)
    assert shapes.span(drawn) == sum((extent - 1) * abs(stride) for extent, stride in drawn)


@given(st.lists(st.tuples(extents, st.sampled_from([0, 1, 2, 6, 12]), st.sampled_from([0, 1, 3, 4, 6])), max_size=5))
def test_modes_of_two_tensors(drawn: list) -> None:
    assert tensor.merged_modes([tensor.Mode(*mode) for mode in drawn]) == [tensor.Mode(*mode) for mode in joined(drawn)]


@given(st.integers(2, 64), st.integers(-9, 99), st.integers(0, 99), st.data())
def test_modes_are_cut(extent: int, first: int, second: int, data: Any) -> None:
    count = data.draw(st.sampled_from([n for n in range(2, extent + 1) if extent % n == 0]))
    rest = (extent // count, first * count, second * count)
    assert tensor.Mode(extent, first, second).cut(count) == [(count, first, second), *([rest] if rest[0] > 1 else [])]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 4, 12, 48])), max_size=4), st.integers(0, 2))
def test_steps_of_stacks(drawn: list, missing: int) -> None:
    shape = tuple(extent for extent, _ in drawn)
    stack = (*range(2, 2 + missing), *shape)
    own = [0] * missing + [0 if extent == 1 else stride for extent, stride in drawn]
    out: list = []
    for extent, stride in reversed([*zip(stack, own)]):
        if extent == 1:
            continue
        if out and stride == out[-1][0] * out[-1][1]:
            out[-1] = extent * out[-1][0], out[-1][1]
        else:
            out.append((extent, stride))
    expected = tuple(reversed(out)) if any(stride for _, stride in out) or 0 in stack else ()
    assert steps_of(shape, tuple(stride for _, stride in drawn), stack) == expected


def test_steps_lead_in_several_directions() -> None:
    """A shape's strides are numbers, or steps in several coordinates: one algebra for offsets and places."""
    assert Shape.of_modes([[(4, Step((0, 2))), (8, Step((1, 0)))]])(5) == (1, 2)


# -- tiles that are dealt to workers ------------------------------------------------------------------------------------

def carry_free(grid: list, count: int) -> bool:
    left = count
    for extent in grid:
        if left >= extent:
            if left % extent:
                return False
            left //= extent
        else:
            return extent % left == 0
    return True


def position(grid: list, tiling: list, linear: int, bound: int) -> list:
    out = [0] * len(grid)
    for axis, (extent, size) in enumerate(zip(grid, tiling)):
        if bound <= extent:
            out[axis] = linear * size
            break
        if extent > 1:
            out[axis] = linear % extent * size
            linear, bound = linear // extent, -(-bound // extent)
    return out


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 16])), min_size=1, max_size=3),
       st.integers(1, 70), st.sampled_from(["column", "row"]))
def test_tiles_are_dealt(drawn: list, count: int, order: str) -> None:
    """The place of each worker's every sub-tile, and whether what is known when a kernel is compiled comes apart."""
    names, (grid, tiling) = tuple("MNK"[:len(drawn)]), ([g for g, _ in drawn], [t for _, t in drawn])
    made = Division(names, tuple(g * t for g, t in drawn), tuple(tiling), count, order)
    turn = 1 if order == "column" else -1
    assert made.split == carry_free(grid[::turn], count)
    total = made.total
    for linear in range(max(count, total)):
        for bound in {b for b in (count, total) if b > linear}:
            assert list(made.position(linear, bound)) == position(grid[::turn], tiling[::turn], linear, bound)[::turn]


def test_rows_of_ldmatrix_and_stmatrix() -> None:
    """Which row's address a lane gives, as operators and kernels had it: for all lanes and all that is called for."""
    for lane in range(32):
        matrix, line = lane // 8, lane % 8
        for width in (4, 8, 16):
            assert by_rows(16, width)(lane) == (lane % 16, lane // 16 * width) == (matrix % 2 * 8 + line, matrix // 2 * width)
            assert by_columns(2, 8, width)(lane) == (matrix % 2 * 8, matrix // 2 * width + line)
            for halves, further in itertools.product((1, 2), (8, 16)):
                assert by_columns(halves, width, further)(lane) == (matrix % halves * width, line + lane // (8 * halves) * further)
                assert by_rows(8 * halves, further)(lane) == (lane % (8 * halves), lane // (8 * halves) * further)
    assert by_columns(2, 8, 8)(0) == (0, 0)                      # of the first lane, too, a row and a column
