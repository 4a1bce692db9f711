"""Which operands the copy engine (TMA) moves in the warp-specialised kernel, and the tensor maps that tell it how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gemmkit.components import Frozen
from gemmkit.config import Config
from gemmkit.kernels.pipeline import PipelineSpec
from gemmkit.kernels.spec import Spec
from gemmkit.lang.kinds import Kind, kind
from gemmkit.layouts import Plain, Planar, Tensor
from gemmkit.ptx.copy_async import SIZES
from gemmkit.ptx.tma import TensorMapSpec, TensorMapType
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.tensor_maps import BYTES, Encoder, why_not

NO_MAP = bytes(BYTES)
CHUNK = 16                             # bytes that the engine moves together
SECTOR, LINE = 32, 128                 # bytes that memory moves together, and that a warp's access asks for together
APART = 2, 4, 8, 16, 32
WORD = 4                               # bytes that a thread stores at least
TURNED = 64                            # registers of a tile that a producer's thread may hold while it is turned


@dataclass(frozen=True)
class Map:
    """The tensor map of an operand: ``which`` is its place among a, b, c and out, ``ordinal`` that among the kernel's maps;
    ``axis`` is the one along which its elements are contiguous."""

    which: int
    ordinal: int
    info: ArrayInfo
    axis: int
    spec: TensorMapSpec

    @property
    def frozen(self) -> Frozen:
        """The kernel's argument; its bytes are put in at each launch."""
        text = f"TensorMap({self.ordinal})"
        made = kind(text, lambda: Kind(text, lambda: TensorMapType(self.ordinal)))
        return Frozen(made, text, [("tensor_map", NO_MAP)], [])

    @property
    def encoder(self) -> Encoder:
        """From an address to the map's bytes."""
        return Encoder.of(self.spec, self.info, self.axis)


def engines(conf: Config, a: ArrayInfo, b: ArrayInfo, out: ArrayInfo, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """Whether the engine moves A, B and D: plain matrices. One that is transformed it brings as it is, to be changed in
    place, if it moves the other operand as well. And whether it can bring A and B as numbers of several parts, to be taken
    apart in place (`gemmkit.kernels.landing`); whether threads can have A and B copied (`gemmkit.kernels.gather`); and how
    many neighbours of D they can store together."""
    if not conf.is_pipeline:
        return False, False, False
    M, N, K = sizes
    loads = _loads(conf, "a", a), _loads(conf, "b", b)
    if not all(loads):
        loads = loads[0] and _keeps(conf, "a"), loads[1] and _keeps(conf, "b")
    stores = _stores(conf, out)
    return (*loads, stores, _lands(conf, "a", a), _lands(conf, "b", b),
            not loads[0] and _gathers(conf, "a", a, (M, K)), not loads[1] and _gathers(conf, "b", b, (K, N)),
            0 if stores else _run(conf, out, (M, N)), *_panel(conf, out))


def _loads(conf: Config, name: str, info: ArrayInfo) -> bool:
    """Numbers of several parts must be planes already: the engine takes nothing apart."""
    layout, shared = getattr(conf, f"global_{name}_layout"), getattr(conf, f"shared_{name}_layout")
    if hasattr(shared, "plane"):
        unchanged = conf.transforms_of(name)[0].is_identity and layout.dtype == shared.dtype
        return bool(type(layout) is Planar and unchanged and why_not(info, shared.axis + 1) is None)
    thread = getattr(conf, f"mem_{name}_thread")
    by_words = thread.extents[shared.axis] == thread.count and thread.count * shared.itemsize % 4 == 0
    stored = layout.stored
    return bool(stored is not None and stored.dtype == shared.dtype and why_not(info, stored.axis) is None
                and (_keeps(conf, name) or by_words) and (stored.axis == shared.axis or _turns(conf, name)))


def _keeps(conf: Config, name: str) -> bool:
    """Whether nothing changes an operand on its way."""
    layout, shared = getattr(conf, f"global_{name}_layout"), getattr(conf, f"shared_{name}_layout")
    untouched = conf.transforms_of(name)[0].is_identity
    return bool(untouched and layout.vector_axis == shared.axis and layout.stored in (layout, None))


def _turns(conf: Config, name: str) -> bool:
    """Whether a tile can be turned where it lies: its lines divide, and the registers of the producer hold it."""
    if not getattr(conf, f"global_{name}_layout").is_plain:
        return False
    block = conf.block_shape.size
    shared, thread, warp = (getattr(conf, field) for field in (f"shared_{name}_layout", f"mem_{name}_thread",
                                                              f"mem_{name}_warp"))
    across, threads = block.M if name == "a" else block.N, 32 * conf.producer_warps
    line, held = shared.width // shared.itemsize, across * block.K * shared.itemsize // (4 * threads)
    tile = conf.block_shape.MK if name == "a" else conf.block_shape.KN
    whole = tile.count % (warp.count * conf.producer_warps) == 0 and warp.count % (32 * thread.count) == 0
    return whole and across % line == 0 and held <= TURNED and conf.cluster.count == 1


def _lands(conf: Config, name: str, info: ArrayInfo) -> bool:
    layout, shared = getattr(conf, f"global_{name}_layout"), getattr(conf, f"shared_{name}_layout")
    return bool(hasattr(shared, "plane") and layout.is_plain and layout.axis == shared.axis
                and why_not(info, shared.axis) is None)


def _gathers(conf: Config, name: str, info: ArrayInfo, extents: tuple[int, int]) -> bool:
    """Whether every thread's tile is a line of neighbours in memory, there and in range as a whole, that a copy takes."""
    layout, shared, thread, warp = (getattr(conf, field) for field in (
        f"global_{name}_layout", f"shared_{name}_layout", f"mem_{name}_thread", f"mem_{name}_warp"))
    if hasattr(shared, "plane") or not layout.is_separable or layout.dtype != shared.dtype or not _keeps(conf, name):
        return False
    nbytes = thread.count * shared.itemsize
    tile, axis = conf.block_shape.MK if name == "a" else conf.block_shape.KN, shared.axis
    is_line = (thread.extents[axis] == thread.count and nbytes in SIZES and layout.neighbours % thread.count == 0
               and unit_axis(info) == _unit(layout, info) and alignment(info) % nbytes == 0)
    shared_by_all = tile.count % (warp.count * conf.producer_warps) == 0 and warp.count % (32 * thread.count) == 0
    return bool(is_line and extents[axis] % thread.count == 0 and shared_by_all and conf.cluster.count == 1)


def _unit(layout: Any, info: ArrayInfo) -> int | None:
    """The dimension of the array along which a layout's lines lie: if it does not say, the contiguous one."""
    unit: int | None = getattr(layout, "unit", layout.axis if isinstance(layout, Plain) else unit_axis(info))
    return unit


def _stores(conf: Config, info: ArrayInfo) -> bool:
    """The engine clips what is out of range, so values there are computed as well; an epilogue that writes has none. It
    clips rows at multiples of 16 bytes alone: beyond a row that ends elsewhere it would write."""
    layout = conf.global_d_layout
    return (isinstance(layout, Plain) and layout.axis == conf.shared_d_layout.axis == 1
            and type(layout).store is Plain.store and not conf.epilogue.stores_itself and not conf.epilogue.writes
            and why_not(info, 1) is None and info.shape[1] * info.dtype.itemsize % CHUNK == 0)


def _run(conf: Config, info: ArrayInfo, extents: tuple[int, int]) -> int:
    """How many neighbours of D, all in range or none, a thread stores together; 0 where that is nothing to speak of, or the
    epilogue stores D."""
    layout, shared = conf.global_d_layout, conf.shared_d_layout
    if (not layout.is_separable or layout.vector_axis != shared.vector_axis or conf.epilogue.stores_itself
            or conf.epilogue.writes or unit_axis(info) != _unit(layout, info)):
        return 0
    panel = 64 if shared.axis == 0 else shared.line
    line = math.gcd(layout.run, panel, extents[shared.axis]) // layout.comb
    nbytes = math.gcd(CHUNK, line * shared.itemsize, alignment(info))
    return layout.comb * nbytes // shared.itemsize if nbytes >= WORD and nbytes >= shared.itemsize else 0


def _panel(conf: Config, info: ArrayInfo) -> tuple[int, bool]:
    """How threads should store a panel of a tensor: how far apart its rows are that lie next to each other in memory, and
    whether they are nearer to each other than a row's own pieces."""
    layout = conf.global_d_layout
    if not isinstance(layout, Tensor) or layout.vector_axis != 1:
        return 1, False
    size, depth, rows = info.dtype.itemsize, layout.rows.depth, layout.rows.extents()
    is_cut = depth > 1 and rows[0] in APART and 0 < info.strides[1] < info.strides[0]
    is_piece = layout.columns.depth > 1 and layout.columns.extents()[0] * size < SECTOR
    return rows[0] if is_cut else 1, bool(is_piece and 0 < info.strides[0] * size <= LINE)


def maps(spec: Spec, a: ArrayInfo, b: ArrayInfo, out: ArrayInfo) -> tuple[Map | None, ...]:
    """The maps of A, B and D, None for those that the engine does not move; none for another kernel."""
    if not isinstance(spec, PipelineSpec):
        return ()
    made: list[Map | None] = []
    for which, info, uses, shared, box in (
            (0, a, spec.a_engine or spec.a.in_panels, spec.a.brought, (spec.a_copy.line, spec.a_copy.lines)),
            (1, b, spec.b_engine or spec.b.in_panels, spec.b.brought, (spec.b_copy.line, spec.b_copy.lines)),
            (3, out, spec.d_engine, spec.d.shared, (spec.d_columns, 64))):
        layout: Any = shared
        planes = len(info.shape) - 2                                  # a box is of one plane
        lands = spec.is_landing and which < 3 and not uses
        if lands:
            extents = (spec.block.MK, spec.block.KN)[which].extents
            box = extents[layout.axis], extents[1 - layout.axis]
        made.append(Map(which, sum(m is not None for m in made), info, layout.axis + planes,
                        TensorMapSpec(info.dtype, box + (1,) * planes, 0 if lands else layout.width))
                    if uses or lands else None)
    return tuple(made)


__all__ = ["Map", "engines", "maps"]
