"""Swizzled shared layouts: a permutation, the hardware's, without bank conflicts; the same in device code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.collectives.scheduler import Columns
from gemmkit.lang.registers import generate
from gemmkit.layouts import ColMajor, Padded, RowMajor, Swizzled
from gemmkit.ptx.memory import pack_words, shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.tiling import Tile, translate
from tests.support.harness import Out, compiled, emulated, leaves_nothing, lines_with, on_device
from tests.support.machines import BF16, E4M3

DTYPES = [np.dtype(x) for x in ("i1", E4M3, "f2", BF16, "f4", "f8")]
every_layout = pytest.mark.parametrize("layout", [Swizzled(kind(dtype), width) for kind in (RowMajor, ColMajor)
                                                  for dtype in DTYPES for width in (32, 64, 128)], ids=repr)


def tile_of(layout: Swizzled, panels: int = 2, lines: int = 16) -> tuple[int, int]:
    """Extents (rows, columns) of a tile of some panels."""
    extents = [lines, lines]
    extents[layout.axis] = panels * layout.line
    return extents[0], extents[1]


def positions(layout: Swizzled, size: tuple[int, int]) -> np.ndarray:
    leading = layout.leading(size)
    return np.array([[layout.position((i, j), leading) for j in range(size[1])] for i in range(size[0])])


@every_layout
def test_every_element_has_a_place_of_its_own(layout: Swizzled) -> None:
    size = tile_of(layout)
    assert sorted(positions(layout, size).reshape(-1)) == list(range(layout.physical_size(*size)))
    assert layout.physical_size(*size) == size[0] * size[1]


@every_layout
def test_bits_of_the_address_are_exchanged_as_the_hardware_does(layout: Swizzled) -> None:
    """PTX ISA: of the byte address bits 4-6 are XORed with bits 7-9 (64-byte swizzle: bits 4-5 with 7-8; 32-byte: 4 with 7)."""
    size = tile_of(layout)
    by_line = positions(layout, size) if layout.axis == 1 else positions(layout, size).T
    lines, along = by_line.shape
    across, at = np.indices((lines, along))
    panel, within = at // layout.line, at % layout.line
    linear = (panel * lines * layout.line + across * layout.line + within) * layout.itemsize
    bits = {128: 0b111, 64: 0b11, 32: 0b1}[layout.width]
    assert np.array_equal(by_line * layout.itemsize, linear ^ ((linear >> 7 & bits) << 4))


@every_layout
def test_chunks_of_16_bytes_stay_together(layout: Swizzled) -> None:
    by_line = positions(layout, tile_of(layout))
    by_line = by_line if layout.axis == 1 else by_line.T
    per = 16 // layout.itemsize
    chunks = by_line.reshape(by_line.shape[0], -1, per)
    assert (chunks[..., 0] % per == 0).all() and (chunks == chunks[..., :1] + np.arange(per)).all()


@pytest.mark.parametrize("width, ways", [(128, 1), (64, 1), (32, 1)])
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_eight_lines_are_in_different_banks(dtype: str, width: int, ways: int) -> None:
    """The same chunk of 8 lines, as ldmatrix, stmatrix and tensor cores take it; and without the swizzle it is not so."""
    def conflicts(position: Any) -> int:
        per = 16 // np.dtype(dtype).itemsize
        banks = [[position((line, chunk * per)) * np.dtype(dtype).itemsize // 16 % 8 for line in range(8)]
                 for chunk in range(width // 16)]
        return max(max(group.count(bank) for bank in group) for group in banks)

    layout = Swizzled(RowMajor(dtype), width)
    assert conflicts(lambda coord: layout.position(coord, 8)) == ways
    assert conflicts(lambda coord: coord[0] * layout.line + coord[1]) == width // 16


def test_properties() -> None:
    rows, columns = Swizzled(RowMajor("f2")), Swizzled(ColMajor("f4"), 32)
    assert (rows.width, rows.axis, rows.vector_axis, rows.line, rows.itemsize, rows.padding) == (128, 1, 1, 64, 2, 0)
    assert (columns.axis, columns.line, columns.dtype) == (0, 8, np.dtype("f4"))
    assert rows.leading((16, 64)) == 16 and columns.leading((8, 24)) == 24
    assert rows.physical_size(16, 65) == 2 * 64 * 16                # a panel that is not full takes its place
    assert repr(rows) == "Swizzled(RowMajor('float16'), 128)" and repr(columns) == "Swizzled(ColMajor('float32'), 32)"
    assert rows == Swizzled(RowMajor("f2"), 128) != Swizzled(RowMajor("f2"), 64)


@pytest.mark.parametrize("width", [0, 16, 96, 256, "128"])
def test_other_widths_are_refused(width: Any) -> None:
    with pytest.raises(ValueError, match=r"width=.*32, 64 or 128 bytes"):
        Swizzled(RowMajor("f2"), width)


@pytest.mark.parametrize("layout", [Padded(RowMajor("f2"), 8), gk.layouts.Zero("f2"), "RowMajor", Columns()], ids=repr)
def test_other_layouts_are_refused(layout: Any) -> None:
    with pytest.raises(TypeError, match=r"Swizzled\(layout=.*RowMajor or ColMajor"):
        Swizzled(layout)


# -- device code ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Copying(gk.Component):
    """Threads have lines of ``along`` elements of a tile, or patches of 2 x 2."""

    layout: Any
    tile: Any
    thread: Any
    words: bool = False

    @property
    def size(self) -> Any:
        return self.tile.size

    @property
    def columns(self) -> int:
        return int(self.tile.extents[1] // self.thread.extents[1])

    @property
    def bytes(self) -> int:
        return int(self.tile.count * self.layout.itemsize)


def copy(out: Any, raw: Any, a: Any, case: Any) -> None:
    """Through the layout and out again in order; ``raw`` is how it lies in shared memory."""
    t = thread_index()
    pointer = shared(case.layout.dtype, 0)
    rows, columns = case.thread.size[0], case.thread.size[1]
    tile = translate(case.thread, t // case.columns * rows, t % case.columns * columns)
    values = generate(case.thread.count, element_of, a, tile)
    if case.words:
        case.layout.store_words(pointer, tile, pack_words(values), case.layout.leading(case.size))
    else:
        case.layout.store_shared(pointer, tile, values, case.layout.leading(case.size))
    barrier()
    back = case.layout.load_shared(pointer, tile, case.layout.leading(case.size))
    for n in range(case.thread.count):
        out[tile.index[0] + n % rows, tile.index[1] + n // rows] = back[n]
        raw[t * case.thread.count + n] = pointer[t * case.thread.count + n]


def element_of(n: int, a: Any, tile: Any) -> Any:
    return a[tile.index[0] + n % tile.size[0], tile.index[1] + n // tile.size[0]]


def copying(dtype: str, kind: Any, width: int, patch: bool, words: bool = False,
            chunks: int = 1) -> tuple[Copying, np.ndarray]:
    layout = Swizzled(kind(dtype), width)
    rows, columns = tile_of(layout, panels=max(1, 16 * chunks // width), lines=8)
    thread = [1, 1]
    thread[layout.axis] = chunks * 16 // layout.itemsize
    if patch:
        thread = [2, 2]
    tile = Tile(M=rows, K=columns)
    rng = np.random.default_rng(0)
    return Copying(layout, tile, Tile(M=thread[0], K=thread[1]), words), rng.integers(0, 100, (rows, columns)).astype(dtype)


COPIES = [("f2", RowMajor, 128, False, False), ("f2", ColMajor, 64, False, True), ("f4", RowMajor, 128, False, True),
          ("f4", ColMajor, 32, False, False), ("i1", RowMajor, 128, False, False), ("f2", RowMajor, 64, True, False),
          ("i4", ColMajor, 128, True, False)]
LONG = [("f2", ColMajor, 128, False, True, 8), ("f2", RowMajor, 128, False, False, 4), ("f2", ColMajor, 32, False, True, 8),
        ("f4", RowMajor, 128, False, False, 8), ("f4", ColMajor, 64, False, True, 4), ("f8", RowMajor, 128, False, False, 2)]
every_copy = pytest.mark.parametrize("how", COPIES + LONG, ids=lambda how: "-".join(
    x.__name__ if isinstance(x, type) else str(x) for x in how))


def check(run: Any, how: tuple) -> None:
    case, a = copying(*how)
    threads = case.tile.count // case.thread.count
    more = {"shared": case.bytes}
    out, raw = run(copy, Out(a.shape, a.dtype), Out((a.size,), a.dtype), a, case, threads=threads, **more)
    assert np.array_equal(out, a)
    expected = np.empty(a.size, a.dtype)
    expected[positions(case.layout, a.shape)] = a
    assert np.array_equal(raw, expected)


@every_copy
def test_stores_and_loads(how: tuple) -> None:
    check(emulated, how)


@pytest.mark.gpu
@pytest.mark.sample(4)
@every_copy
def test_stores_and_loads_on_the_gpu(how: tuple) -> None:
    check(on_device, how)


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", COPIES[:4], ids=str)
def test_a_chunk_is_one_access(how: tuple) -> None:
    case, a = copying(*how)
    ptx = compiled(copy, Out(a.shape, a.dtype), Out((a.size,), a.dtype), a, case, threads=case.tile.count // case.thread.count)
    assert leaves_nothing(ptx)
    stores = lines_with(ptx, "st.shared")
    assert len(stores) == 1 and ".v4" in stores[0]
    assert all(".v4" in line for line in lines_with(ptx, "ld.shared"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", LONG, ids=str)
def test_a_longer_line_is_an_access_for_each_chunk(how: tuple) -> None:
    case, a = copying(*how)
    ptx = compiled(copy, Out(a.shape, a.dtype), Out((a.size,), a.dtype), a, case, threads=case.tile.count // case.thread.count)
    assert leaves_nothing(ptx)
    stores = lines_with(ptx, "st.shared")
    assert len(stores) == how[5] and all(".v4" in line or ".v2.f64" in line for line in stores)
