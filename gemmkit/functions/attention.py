"""Attention in one launch: softmax(score(scale Q K^T)) V, with your own masks and scores.

>>> import numpy as np, gemmkit as gk
>>> q = k = v = np.eye(2, 64, dtype=np.float16)[None, None]
>>> with gk.emulate():
...     gk.attention(q, k, v, mask=gk.masks.Causal(), scale=0.0)[0, 0, :, :2].tolist()
[[1.0, 0.0], [0.5, 0.5]]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit import components
from gemmkit import programs as gp
from gemmkit.components import arrays_of, check_held, freeze
from gemmkit.emulator.mode import current_mode, takes_small_mappings
from gemmkit.kernels.attention.kernel import L2, Head, schedule
from gemmkit.kernels.attention.kernel import attention as attention_kernel
from gemmkit.kernels.attention.mma_kernel import BLOCK_N, MmaAttentionSpec, attention_by_warps
from gemmkit.kernels.attention.spec import HEADS, AttentionMapping, AttentionSpec, HeadSpec, few_keys, mappings
from gemmkit.kernels.attention.spec import why_not as why_not_mapped
from gemmkit.kernels.collectives.softmax import LOG2E, AttentionDirectStore, AttentionSizes
from gemmkit.kernels.masks import Causal, Everything, Mask, PlainScores, Score, ScoreFunction, check_ranges
from gemmkit.kernels.sm90.family import TensorMapSlot
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.functions import Frozen, freeze_array
from gemmkit.lang.references import is_gemmkit
from gemmkit.plans.compiled import Nothing
from gemmkit.plans.launch import Current, KnownCall, Launch, LaunchTable, Put, Start, cache, launch_of
from gemmkit.plans.problem import FLOAT32_MAX, check_places, finite_number
from gemmkit.programs.calls import plan_of_call
from gemmkit.programs.decorated import program
from gemmkit.programs.launches import bits_of, of_bits
from gemmkit.programs.values import Parameter
from gemmkit.runtime import launch as workspace
from gemmkit.runtime.arrays import (
    KEYS,
    ArrayInfo,
    as_stream_handle,
    describe,
    empty_like,
    key_if_given,
    key_of,
    overlaps_itself,
    shares_memory,
    strided,
)
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.streams import launch_stream
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tuning.problems import Choice, MappingProblem, choose

# --------------------------------------------------------------------------------------------------
# Q, K, V and the result of attention as (batch, heads, rows, head size), whatever their layout; what does not fit is
# refused.

LAYOUTS = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3)}
DTYPES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIDEST = 256                           # of heads
FEW = 64                               # queries whose heads are rows of one tile
LIMIT = 2**30                          # rows: coordinates are 32 bits wide, and masks add to them


class Sequences(NamedTuple):
    """Where packed sequences begin among the rows of Q, and of K and V; at last where all end."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


class AttentionOperands(NamedTuple):
    """The arrays as (batch, heads, rows, head size); of K and V an axis of stride 0 has one element."""

    q: ArrayInfo
    k: ArrayInfo
    v: ArrayInfo

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]


def as_heads(info: ArrayInfo, name: str, layout: str, packed: bool) -> ArrayInfo:
    """The array's axes in the order (batch, heads, rows, head size); packed ones have a batch of 1.

    >>> from gemmkit.runtime.arrays import describe
    >>> as_heads(describe(np.zeros((2, 5, 3, 64), np.float16)), "q", "bnhd", False).shape
    (2, 3, 5, 64)
    """
    wanted = layout[1:] if packed else layout
    if len(info.shape) != len(wanted):
        axes = ", ".join(AXES[c] for c in wanted)
        raise ValueError(f"{name} has shape {info.shape}; {len(wanted)} axes are needed, {axes} (layout={layout!r}"
                         f"{', with lengths' if packed else ''})")
    shape, strides = ((1, *info.shape), (0, *info.strides)) if packed else (info.shape, info.strides)
    order = LAYOUTS[layout]
    return info._replace(shape=tuple(shape[axis] for axis in order), strides=tuple(strides[axis] for axis in order))


AXES = {"b": "batch", "h": "heads", "n": "rows", "d": "head size"}


def operands_of(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, layout: str, packed: bool) -> AttentionOperands:
    """Q, K and V, checked against each other.

    Raises:
        TypeError: dtypes other than float16 and bfloat16, or different ones; arrays on the host outside of the emulator.
        ConfigError: a head size that no mapping exists for.
        ValueError: shapes that do not go together; strides that TMA cannot follow.
    """
    infos = {"q": q, "k": k, "v": v}
    check_places(infos)                                                                        # type: ignore[arg-type]
    for name, info in infos.items():
        if info.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {info.dtype}; float16 or bfloat16 is needed")
        if info.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {info.dtype} and q has {q.dtype}; q, k and v must have one dtype")
    found = {name: as_heads(info, name, layout, packed) for name, info in infos.items()}
    q, k, v = found.values()
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"v has {v.shape[2]} rows and k has {k.shape[2]}; both must be equal")
    for name, info in found.items():
        if info.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head size {info.shape[3]} and q has {q.shape[3]}; both must be equal")
        if info.shape[2] >= LIMIT:
            raise ValueError(f"{name} has {info.shape[2]} rows; less than 2**30 are needed")
        if info.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"{name} has a batch of {info.shape[0]} and q of {q.shape[0]}; it must be q's, or 1")
        if q.shape[1] and (info.shape[1] == 0 or q.shape[1] % info.shape[1]):
            raise ValueError(f"{name} has {info.shape[1]} heads and q has {q.shape[1]}; the number must divide q's")
    if _is_derived(q, packed):
        if q.shape[3] % 8 or not 0 < q.shape[3] <= WIDEST:
            raise ConfigError(f"q has head size {q.shape[3]}; a multiple of 8 up to {WIDEST} is needed; pad q, k and v with "
                              "zeros to one, and give scale")
    elif q.shape[3] not in HEADS:
        sizes = ", ".join(map(str, HEADS))
        raise ConfigError(f"q has head size {q.shape[3]}; there are kernels for {sizes}; pad q, k and v with zeros to one "
                          "of these, and give scale")
    return AttentionOperands(q, *(_shared(found[name]) for name in "kv"))


def check_loadable(operands: AttentionOperands) -> None:
    """Raise ValueError for arrays that TMA cannot load."""
    for name, info in zip("qkv", operands):
        reason = why_not(info, 3)
        if reason is not None:
            raise ValueError(f"{name} cannot be loaded by TMA, as (batch, heads, rows, head size): {reason}; pass a "
                             "contiguous copy")


def _shared(info: ArrayInfo) -> ArrayInfo:
    """One element along axes of stride 0, which is what broadcasting leaves: all heads read it."""
    shape = tuple(1 if axis < 2 and info.strides[axis] == 0 else extent for axis, extent in enumerate(info.shape))
    return info._replace(shape=shape)


def check_out(out: ArrayInfo, operands: AttentionOperands, given: ArrayInfo) -> None:
    """Raise where ``out`` (``given`` as the caller passed it) does not fit the result."""
    if given.dtype != operands.q.dtype:
        raise TypeError(f"out has dtype {given.dtype}; the result has q's dtype, {operands.q.dtype}")
    if out.shape != operands.q.shape:
        raise ValueError(f"out has shape {given.shape}; q's shape is needed")
    if out.readonly:
        raise ValueError("out is read-only; give a writable array, or leave it out")
    if overlaps_itself(out):
        raise ValueError(f"out has strides {given.strides}: several of its elements share memory")
    for name, info in zip("qkv", operands):
        if shares_memory(out, info):
            raise ValueError(f"out overlaps {name} in memory; blocks read {name} while others write out")


def sequences_of(lengths: Any, queries: int, keys: int) -> Sequences:
    """``lengths`` checked: offsets on the host, of as many sequences of queries as of keys."""
    if not isinstance(lengths, (tuple, list)) or len(lengths) != 2:
        raise TypeError(f"lengths={lengths!r}: a pair of offsets, of queries and of keys, is needed")
    made = []
    for name, offsets, rows in (("q_offsets", lengths[0], queries), ("k_offsets", lengths[1], keys)):
        if not isinstance(offsets, (list, tuple, np.ndarray)):
            raise TypeError(f"lengths: {name} is a {type(offsets).__name__}; a list or NumPy array is needed: the host "
                            "assigns tiles, and gemmkit copies nothing from the device")
        numbers = np.asarray(offsets)
        if numbers.ndim != 1 or numbers.size < 1 or numbers.dtype.kind not in "iu":
            raise TypeError(f"lengths: {name} is an array of {numbers.dtype} and shape {numbers.shape}; whole numbers in "
                            "one dimension are needed, one more than sequences")
        found = tuple(int(n) for n in numbers)
        if found[0] != 0 or found[-1] != rows or any(a > b for a, b in pairwise(found)):
            raise ValueError(f"lengths: {name} goes from {found[0]} to {found[-1]}; offsets that begin with 0, never fall "
                             f"and end with the {rows} rows are needed")
        made.append(found)
    if len(made[0]) != len(made[1]):
        raise ValueError(f"lengths: q_offsets has {len(made[0]) - 1} sequences and k_offsets has {len(made[1]) - 1}; both "
                         "must be equal")
    return Sequences(*made)


# --------------------------------------------------------------------------------------------------
# Attention of whole arrays on Hopper is a program: its kernels are derived, for all sizes, and rounds of few queries are
# split over blocks (`gemmkit.programs`).

@program
def softmax_attention(out: Parameter, q: Parameter, k: Parameter, v: Parameter, lse: Parameter | None, scale: float,
                      mask: Mask | None, score: Score | None, k_stacks: str, v_stacks: str, k_share: int,
                      v_share: int) -> None:
    """The online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). ``k_stacks``, ``v_stacks``: which of batch and
    heads k and v have; ``k_share``, ``v_share``: by how many heads of q one of theirs is shared."""
    for b, h, m in gp.parallel(*q.counts, q.rows):
        k_of, v_of = ([{"b": b, "h": h // share}[which] for which in stacks]
                      for stacks, share in ((k_stacks, k_share), (v_stacks, v_share)))
        best, total, sums = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[b, h, m] @ k[(*k_of, n)].T)
            s = s if score is None else gp.call(score, s, m, n, h, b)
            s = s if mask is None else gp.where(mask, s, -math.inf)
            top = gp.maximum(best, s.max(axis=1))
            zero = gp.finite(top)
            p, shrink = gp.exp(s - zero), gp.exp(best - zero)
            total[:] = total * shrink + p.sum(axis=1)
            sums[:] = sums * shrink + p.astype(v.dtype) @ v[(*v_of, n)]
            best[:] = top
        if mask is None and score is None:
            out[b, h, m] = sums / total
        else:                                          # a query that sees no key gets zeros
            out[b, h, m] = sums * gp.where(best == -math.inf, 0.0, 1.0 / total)
        if lse is not None:
            lse[b, h, m] = best + gp.log(total)


@program
def without_keys(out: Parameter, q: Parameter, lse: Parameter | None) -> None:
    for b, h, m in gp.parallel(*q.counts, q.rows):
        out[b, h, m] = gp.call(lambda x: 0.0, q[b, h, m])
        if lse is not None:
            lse[b, h, m] = gp.call(lambda x: -math.inf, q[b, h, m].max(axis=1))


def program_arguments(call: AttentionCall) -> dict[str, Any]:
    """Those of `softmax_attention`, or without keys of `without_keys`, with descriptions in place of arrays."""
    operands = call.operands
    if not operands.keys:
        return dict(out=call.out, q=operands.q, lse=call.lse)
    mask = None if call.mask.is_everything else call.mask
    score = None if isinstance(call.score, PlainScores) else call.score
    (k, k_stacks, k_share), (v, v_stacks, v_share) = (_with_own_stacks(info, operands) for info in (operands.k, operands.v))
    return dict(out=call.out, q=operands.q, k=k, v=v, lse=call.lse, scale=float(call.scale), mask=mask, score=score,
                k_stacks=k_stacks, v_stacks=v_stacks, k_share=k_share, v_share=v_share)


def _with_own_stacks(info: ArrayInfo, operands: AttentionOperands) -> tuple[ArrayInfo, str, int]:
    """Keys or values without the axes of which they have one for all, the letters of the others, and how many heads of q
    share one of theirs."""
    kept = [axis for axis, count in enumerate((operands.batch, operands.heads)) if info.shape[axis] > 1 or count == 1]
    axes = (*kept, 2, 3)
    shape, strides = (tuple(numbers[axis] for axis in axes) for numbers in (info.shape, info.strides))
    share = operands.heads // info.shape[1] if 1 in kept else 1
    return info._replace(shape=shape, strides=strides), "".join("bh"[axis] for axis in kept), share


def folded(call: AttentionCall) -> AttentionCall:
    """A call of few queries as one of more, whose rows are those of all heads that share a head of k: a tile then has them
    together, and keys are read once. Where rows depend on their place it stays as it is."""
    q, k, v = call.operands
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    if (group == 1 or queries > FEW or k.shape[1] != v.shape[1] or not isinstance(call.score, PlainScores)
            or not (call.mask.is_everything or (queries == 1 and call.mask == LAST_QUERY))):
        return call

    def joined(info: ArrayInfo) -> ArrayInfo | None:
        """(batch, heads of k, group x queries, ...), where a view can have it."""
        by_head, by_row = info.strides[1:3]
        if queries > 1 and by_head != queries * by_row:
            return None
        rows = by_head if queries == 1 else by_row
        return info._replace(shape=(batch, heads // group, group * queries, *info.shape[3:]),
                             strides=(info.strides[0], group * by_head, rows, *info.strides[3:]))

    views = [None if info is None else joined(info) for info in (q, call.out, call.lse)]
    if views[0] is None or views[1] is None or why_not(views[0], 3) is not None:
        return call
    return call._replace(operands=call.operands._replace(q=views[0]), out=views[1], lse=views[2], mask=EVERYTHING)


# --------------------------------------------------------------------------------------------------
# Launches of packed sequences, and of other GPUs: a mapping for the head size, a table of tiles for the blocks, kernels
# kept by kind.

HOPPER, LEAST = (9, 0), (8, 0)
NOWHERE = 2**30                        # a row beyond all: what TMA brings from there is 0
LARGEST = FLOAT32_MAX / LOG2E          # as a scale


class Quick(NamedTuple):
    """What is quickly seen of a call: what it is known by (None: it has to be described), the address of out (0: a new one),
    what else it brings, and an array like its result."""

    key: Any
    at_out: int
    brought: tuple[Any, ...]
    like: Any = None


UNKNOWN = Quick(None, 0, ())


class AttentionCall(NamedTuple):
    """A checked call."""

    operands: AttentionOperands
    out: ArrayInfo
    lse: ArrayInfo | None
    mask: Mask
    score: Score
    scale: float
    sequences: Sequences | None


def run_attention(call: AttentionCall, arrays: dict[str, Any], stream: int | None, quick: Quick = UNKNOWN) -> None:
    """Compute a call that has a result, on a stream (None: the library's current one), which is known as ``quick`` from then
    on."""
    mode = current_mode()
    if is_derived(call):
        _run_program(folded(call), arrays, stream, quick)
        return
    if not call.operands.keys:                         # nothing to ask about: every row is empty
        call = call._replace(mask=Everything(), score=PlainScores())
    elif call.score.is_plain and call.scale <= 0:      # the largest score is not that of the largest product then
        call = call._replace(score=PlainScores(exact=True))
    if mode is not None:
        mode.run(AttentionLaunch(call), arrays)
        return
    _launch(launch_stream(call.operands.q, stream), call, quick)


def is_derived(call: AttentionCall) -> bool:
    """Whether its kernel is derived, and not the one that is written by hand."""
    return _is_derived(call.operands.q, call.sequences is not None)


def _is_derived(q: ArrayInfo, packed: bool) -> bool:
    return not packed and target(q.device).arch == HOPPER


def _run_program(call: AttentionCall, arrays: dict[str, Any], stream: int | None, quick: Quick) -> None:
    arguments = program_arguments(call)
    plan = plan_of_call(softmax_attention if call.operands.keys else without_keys, arguments, None)
    if current_mode() is not None:                     # of the arrays, as they are described
        arguments.update((name, strided(arrays[name], describe(arrays[name], name), x.shape, x.strides))
                         for name, x in arguments.items() if isinstance(x, ArrayInfo))
        plan.run(arguments)
        return
    plan.run(arguments, stream)
    if quick.key is not None and call.operands.keys:
        _keep(quick, plan.start)


class AttentionLaunch:
    """A kernel for arrays of one kind, its table of tiles, and its arguments."""

    def __init__(self, call: AttentionCall):
        operands, device = call.operands, target(call.operands.q.device)
        if device.arch < LEAST:
            raise ConfigError(f"attention needs compute capability 8.0 or above, but {device.name} has "
                              f"{device.arch[0]}.{device.arch[1]}; on this GPU call gemmkit.matmul and gemmkit.softmax")
        self.call = call
        self.spec: AttentionSpec | MmaAttentionSpec = choose(AttentionProblem(call), device).spec
        heads = tiles_of(call, self.spec)
        tiles = sum(len(head.lengths) for head in heads)
        by_tma = isinstance(self.spec, AttentionSpec)
        self.blocks = min(device.sm_count, tiles) if by_tma else tiles
        self.order = schedule(heads, self.spec.block_m, self._section, self.blocks)
        # Where there are no keys, K and V are read from beyond Q's rows.
        k, v = (operands.k, operands.v) if operands.keys else (operands.q, operands.q)
        self.infos: dict[str, ArrayInfo | None] = {"out": call.out, "lse": call.lse, "q": operands.q, "k": k, "v": v}
        self.maps = [(name, spec) for name, spec in zip(("q", "k", "v", "out"), self.spec.map_specs)
                     if name != "out" or self.spec.store.uses_tma]
        mapped = [name for name, _ in self.maps]
        #: The arrays that the kernel takes as views, in its order; None where it takes none.
        self.views = ["out" if "out" not in mapped else None, "lse" if call.lse is not None else None,
                      *(name for name in "qkv" if name not in mapped)]
        table = ArrayInfo(workspace.PLACES["places"], self.order.shape, (self.order.shape[1], 1), self.order.dtype, -1, True,
                          "workspace")
        views = [freeze(Nothing()) if name is None else _frozen(self.infos[name], name) for name in self.views]
        maps = [made.frozen for made in self.tensor_maps]
        if by_tma and len(maps) < len(self.spec.map_specs):
            maps.append(freeze(Nothing()))
        self.arguments = [freeze(self.spec), freeze(self.sizes), freeze_array(table, 1, 4, readonly=True), *views, *maps]
        self.launchable = Launchable(attention_kernel if by_tma else attention_by_warps, self.arguments, self.spec.threads,
                                     self.blocks, device, operands.q.device, self.spec.shared_bytes, dependent=by_tma,
                                     registers=self.spec.warpgroups.warp_registers)

    # -- without a GPU (`gemmkit.emulator.mode`) -----------------------------------------------------------------------

    def filled(self, arrays: dict[str, Any]) -> list[Any]:
        return [arrays[name] for name in ("out", "lse") if arrays[name] is not None]

    def emulated(self, arrays: dict[str, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        """Of q, k, v, out, and lse or None."""
        self.check_mask()
        views: dict[str, Any] = {}
        for name, info in self.infos.items():              # the results first: they say what has been written
            if info is not None:
                how = dict(written=False) if name in ("out", "lse") else dict(readonly=True)
                views[name] = arena.view_of(info, arrays[name], name, **how)
        order = arena.view(self.order, "order", 1, 4, readonly=True)
        maps: list[Any] = [arena.map(one, views[name]) for (name, _), one in zip(self.maps, self.tensor_maps)]
        maps += [None] * (len(self.spec.map_specs) - len(maps))
        given = [name and views[name] for name in self.views]
        yield self.launchable, (arena.component(self.spec), self.sizes, order, *given, *maps)

    def check_mask(self) -> None:
        """Ask a mask of the user's about every query and key (`gemmkit.masks.check_ranges`)."""
        operands, mask = self.call.operands, self.call.mask
        if self.call.sequences is None and not is_gemmkit(type(mask)):
            check_ranges(mask, operands.queries, operands.keys, operands.heads, operands.batch, self.spec.block_m)

    @property
    def _section(self) -> int:
        """Heads of Q whose K and V fit the L2 together."""
        operands = self.call.operands
        keys = max(1, operands.keys if self.call.sequences is None else max(np.diff(self.call.sequences.keys), default=1))
        return max(1, L2 // (4 * int(keys) * operands.head_dim)) * (operands.heads // operands.k.shape[1])

    @cached_property
    def sizes(self) -> AttentionSizes:
        operands, scale = self.call.operands, self.call.scale
        k_share, v_share = (operands.heads // info.shape[1] for info in (operands.k, operands.v))
        k_batch, v_batch = (int(self.call.sequences is None and info.shape[0] > 1) for info in (operands.k, operands.v))
        return AttentionSizes(operands.queries, operands.keys, np.float32(scale), np.float32(scale * LOG2E), k_share,
                              v_share, k_batch, v_batch, 0 if operands.keys else NOWHERE)

    @cached_property
    def tensor_maps(self) -> list[TensorMapSlot]:
        made = []
        for ordinal, (name, spec) in enumerate(self.maps):
            info = self.infos[name]
            assert info is not None
            made.append(TensorMapSlot(ordinal, ordinal, info, 3, spec))
        return made


class AttentionProblem(MappingProblem):
    """Mappings are Hopper's, or of other GPUs how many keys are taken at a time."""

    def __init__(self, call: AttentionCall):
        self.call = call

    def candidates(self, device: DeviceInfo) -> list[Any]:
        operands, emulated = self.call.operands, None
        if takes_small_mappings():
            of = self.call.sequences or ((0, operands.queries), (0, operands.keys))
            emulated = int(max(np.diff(of[0]))), int(max(np.diff(of[1])))
        if device.arch == HOPPER:
            return mappings(operands.head_dim, self.call.score, emulated)
        block_n = BLOCK_N[operands.head_dim]
        return [block_n if emulated is None else few_keys(block_n, emulated[1])]

    def specialise(self, mapping: AttentionMapping | int, device: DeviceInfo) -> Choice:
        call, is_packed = self.call, self.call.sequences is not None
        asked = call.mask, call.score
        heads = call.operands.q.dtype, call.operands.head_dim
        if isinstance(mapping, int):
            return Choice(MmaAttentionSpec(*asked, AttentionDirectStore(), *heads, mapping, call.lse is not None, is_packed))
        reason = why_not_mapped(mapping, call.score, is_packed)
        if reason is not None:
            raise ConfigError(reason)
        by_tma = not is_packed and why_not(call.out, 3) is None
        store = mapping.store if by_tma or not mapping.store.uses_tma else AttentionDirectStore()
        return Choice(AttentionSpec(*asked, store, *heads, mapping.block_n, call.lse is not None, is_packed,
                                    mapping.consumers, mapping.stages, mapping.q_stages, mapping.turns, mapping.joins_tiles,
                                    mapping.skips))


def _frozen(info: ArrayInfo | None, name: str) -> Frozen:
    assert info is not None
    return freeze_array(info, 3, readonly=True) if name in "qkv" else freeze_array(info)


# -- tiles ----------------------------------------------------------------------------------------------------------------

def tiles_of(call: AttentionCall, spec: HeadSpec) -> list[Head]:
    """The tiles of all heads, with how long they take: in blocks of keys, as far as the mask says so without its arrays."""
    operands = call.operands
    if call.sequences is None:
        lengths = _lengths(call.mask, spec, operands.queries, operands.keys)
        return [Head(lengths, (head, batch)) for batch in range(operands.batch) for head in range(operands.heads)]
    heads = []
    ranges = zip(call.sequences.queries, call.sequences.queries[1:], call.sequences.keys, call.sequences.keys[1:])
    for sequence, (q_begin, q_end, k_begin, k_end) in enumerate(ranges):
        queries, keys = q_end - q_begin, k_end - k_begin
        lengths = _lengths(call.mask, spec, queries, keys)
        heads += [Head(lengths, (head, sequence, queries, keys, q_begin, k_begin if keys else NOWHERE))
                  for head in range(operands.heads)]
    return heads


def _lengths(mask: Mask, spec: HeadSpec, queries: int, keys: int) -> list[float]:
    whole = float(max(1, -(-keys // spec.block_n)))
    starts = range(0, queries, spec.block_m)
    if mask.is_everything or any(True for _ in arrays_of(mask)):
        return [whole] * len(starts)
    try:
        ranges = [mask.visited(m, min(m + spec.block_m, queries), keys, 0, 0, keys - queries) for m in starts]
        return [float(max(1, -(-min(int(last), keys) // spec.block_n) - max(int(first), 0) // spec.block_n))
                for first, last in ranges]
    except Exception:                                  # the user's code, as Python: balance alone rests on it
        return [whole] * len(starts)


# -- on a GPU -------------------------------------------------------------------------------------------------------------

ARRAYS = "out", "q", "k", "v", "lse"   # what a call brings, in this order; then the scale, times 1 and log2(e)


def _launch(stream: int, call: AttentionCall, quick: Quick) -> None:
    held = components.given_by(call.mask, call.score)
    of_mask = held.frozen[0]
    given = call.out, call.operands.q, call.operands.k, call.operands.v, call.lse
    pointers = [0 if info is None else info.pointer for info in given]
    if not call.operands.keys:
        pointers[2:4] = pointers[1], pointers[1]

    def made(current: Current) -> Launch:
        launch = AttentionLaunch(call._replace(mask=current(call.mask), score=current(call.score)))
        slots = [launch.launchable.slot(n) for n in range(len(launch.arguments))]
        assert slots[1] is not None and slots[2] is not None
        views = zip(slots[3:], launch.views)
        maps = zip(slots[3 + len(launch.views):], launch.maps, launch.tensor_maps)
        puts = [Put(slot, ARRAYS.index(name)) for slot, name in views if slot is not None and name is not None]
        puts += [Put(slot, ARRAYS.index(name), encoder=one.encoder) for slot, (name, _), one in maps if slot is not None]
        numbers = slots[1] + 2, slots[1] + 3, *held.slots                 # the scale, and what takes scores to powers of 2
        puts += [Put(slot, n, encoder=components.number) for n, slot in enumerate(numbers, len(ARRAYS))]
        return Launch(launch.launchable, [*puts, Put(slots[2], len(ARRAYS) + len(numbers))], LaunchTable(launch.order))

    key = (attention_kernel, tuple(info and (*info[1:6], info.pointer % 16) for info in given), call.sequences,
           call.scale > 0,
           held.key, None if of_mask.arrays else tuple(value for _, value in of_mask.leaves))  # what the table rests on
    start = launch_of(key, made, f"{type(call.mask).__qualname__} or of the score").start
    start(stream, (*pointers, *scales(call.scale), *held.brought))
    if quick.key is not None and call.operands.keys:
        _keep(quick, lambda handle, values: start(handle, (*values[:5], *scales(of_bits(values[5])), *values[6:])))


def scales(scale: float) -> tuple[float, float]:
    """What takes products to scores, and to exponents of 2."""
    return scale or abs(scale), scale * LOG2E or 0.0


_calls = cache()


def _keep(quick: Quick, start: Start) -> None:
    """A call that has been checked, and all that are like it."""
    known = _calls.get(quick.key) or _calls.keep(quick.key, KnownCall(start, quick.like))
    known.allow(quick.at_out, *quick.brought)


def quickly(q: Any, k: Any, v: Any, out: Any, mask: Any, score: Any, scale: Any, layout: str) -> Quick:
    """Of a call without packed sequences and sums."""
    if current_mode() is not None:
        return UNKNOWN
    at_q, of_q = KEYS.get(type(q), key_of)(q, "q")
    at_k, of_k = KEYS.get(type(k), key_of)(k, "k")
    at_v, of_v = KEYS.get(type(v), key_of)(v, "v")
    at_out, of_out = key_if_given(out, "out")
    key: list[Any] = [layout, of_q, of_k, of_v, of_out, at_q & 15, at_k & 15, at_v & 15, at_out & 15]
    held: list[Any] = []
    for rule in (mask, score):
        rule = ScoreFunction(rule) if type(rule) is FunctionType else rule
        if rule is None:
            key.append(None)
        elif not isinstance(rule, (Mask, Score)):
            return UNKNOWN
        else:
            components.seen(rule, key, held)
            if rule is mask:
                key += held            # numbers of a mask decide which blocks are visited
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1] if q.shape and q.shape[-1] else 1)
    elif type(scale) is not float or not -LARGEST <= scale <= LARGEST:
        return UNKNOWN
    key.append(scale > 0)
    return Quick(tuple(key), at_out, (at_q, at_k, at_v, 0, bits_of(scale), *held))


def again(quick: Quick, q: Any, out: Any, stream: Any) -> Any:
    """The result of a call that is known; None for another one."""
    known: KnownCall | None = _calls.get(quick.key)
    return None if known is None else known.again(q, quick.at_out, quick.brought, out, stream)


EVERYTHING, PLAIN, LAST_QUERY = Everything(), PlainScores(), Causal()         # what their properties cost is paid once


def attention(q: Any, k: Any, v: Any, *, mask: Mask | None = None, score: Any = None, scale: float | None = None,
              layout: str = "bhnd", lengths: Any = None, out: Any = None, return_lse: bool = False,
              stream: Any = None) -> Any:
    """softmax(score(scale q k^T)) v of each head, with float32 sums; the same bits every time. Forward only.

    Args:
        q: (batch, heads, queries, head size), float16 or bfloat16. On Hopper head sizes are multiples of 8 up to 256; of
            packed sequences, and on other GPUs, 32, 64, 96, 128, 192 and 256.
        k: (batch, heads, keys, head size), of q's dtype. Its heads divide q's: head h of q uses head h // (q's heads / k's).
            A batch of 1 serves all. TMA must be able to load the strides: the head size is contiguous, and other strides are
            positive multiples of 16 bytes, or 0 (broadcast) along heads and batch.
        v: (batch, heads, keys, head size), of k's shape and dtype; strides as k's.
        mask: a `gemmkit.masks.Mask`, such as ``Causal()``, ``Window(1024)``, ``Documents(...)`` or your own;
            None hides nothing.
        score: a function ``f(s, m, n)``, ``f(s, m, n, head)`` or ``f(s, m, n, head, batch)`` of a scaled score, its query
            and its key, or a `gemmkit.masks.Score`; None leaves scores as they are.
        scale: the factor of q k^T; None for one over the root of the head size. A run-time number.
        layout: "bhnd", or "bnhd" for (batch, rows, heads, head size), of q, k, v and the result.
        lengths: ``(q_offsets, k_offsets)``, lists or NumPy arrays, for packed sequences: sequence i has rows ``offsets[i]``
            to ``offsets[i + 1]``. The arrays then have no batch axis, places count from each sequence's start, and the batch
            that a score and a mask receive is the sequence.
        out: an array of q's shape and dtype, of any strides, to write; None makes one.
        return_lse: whether to return the logarithms of the sums of exponentials, too: float32, (batch, heads, queries), or
            (heads, queries) with lengths.
        stream: the stream to launch on; None for the library's current one.

    Returns: ``out``, or ``(out, lse)``. A query that sees no key gets zeros, and -inf. A key that is hidden has weight 0,
    so that its v must be finite, as with any softmax that multiplies by 0.

    Raises:
        TypeError: q, k, v or out is no array, of another dtype, or on the host outside of `gemmkit.emulate`; mask or score
            is none.
        ValueError: shapes do not fit each other, heads do not divide, TMA cannot load the strides, out overlaps an operand,
            a tensor requires a gradient, offsets decrease, or scale is not finite or above 2.36e38.
        ConfigError: another head size; a GPU of a compute capability below 8.0.
        ComponentError: code of the mask or the score cannot be compiled.

    >>> import numpy as np, gemmkit as gk
    >>> q = k = v = np.eye(2, 64, dtype=np.float16)[None, None]
    >>> with gk.emulate():
    ...     out, lse = gk.attention(q, k, v, score=lambda s, m, n: 0.0 * s, return_lse=True)
    >>> out[0, 0, :, :2].tolist(), lse.round(4).tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [[[0.6930999755859375, 0.6930999755859375]]])
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f'layout={layout!r}: "bhnd" or "bnhd" is needed')
    quick = UNKNOWN if lengths is not None or return_lse else quickly(q, k, v, out, mask, score, scale, layout)
    known = again(quick, q, out, stream)
    if known is not None:
        return known
    rule, change = _mask(mask), _score(score)
    packed, handle = lengths is not None, None if stream is None else as_stream_handle(stream)
    operands = operands_of(describe(q, "q"), describe(k, "k"), describe(v, "v"), layout, packed)
    sequences = sequences_of(lengths, operands.queries, operands.keys) if packed else None
    factor = 1 / math.sqrt(operands.head_dim) if scale is None else _scale(scale)
    if not sequences:
        for part in (rule, change):
            part.check(operands.queries, operands.keys, operands.heads, operands.batch)
    held = [(name, one) for name, part in (("mask", rule), ("score", change)) for one in arrays_of(part)]
    check_places({"q": operands.q, **{one.name: one.info for _, one in held}})
    if operands.keys and math.prod(operands.q.shape):
        check_loadable(operands)
    result = empty_like(q, describe(q, "q").shape, operands.q.dtype) if out is None else out
    given = describe(result, "out")
    check_places({"q": operands.q, "out": given})
    seen = as_heads(given, "out", layout, packed)
    check_out(seen, operands, given)
    check_held(held, {"q": operands.q, "k": operands.k, "v": operands.v, "out": given})
    lse = None
    if return_lse:
        lse = empty_like(q, operands.q.shape[packed:3], np.dtype(np.float32))
    call = AttentionCall(operands, seen, None if lse is None else _lse(lse, packed), rule, change, factor, sequences)
    if math.prod(operands.q.shape):
        quick = quick._replace(like=describe(q, "q"))
        run_attention(call, {"q": q, "k": k, "v": v, "out": result, "lse": lse}, handle, quick)
    return (result, lse) if return_lse else result


def _mask(mask: Any) -> Mask:
    if mask is None:
        return EVERYTHING
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is a {type(mask).__name__}; a gemmkit.masks.Mask is needed, such as Causal(); for an array "
                        "of truth values write one with visible(m, n)")
    _ = mask.arities                                                    # refuses other numbers of arguments
    return mask


def _score(score: Any) -> Score:
    if score is None:
        return PLAIN
    made = score if isinstance(score, Score) else ScoreFunction(score)
    _ = made.arity
    return made


def _scale(scale: Any) -> float:
    number = finite_number(scale, "scale")
    if abs(number) > LARGEST:
        raise ValueError(f"scale={scale!r}: scores are computed in float32 with scale log2(e), so scale may be at most "
                         f"{LARGEST:.3g}")
    return number


def _lse(lse: Any, packed: bool) -> Any:
    info = describe(lse, "lse")
    return info._replace(shape=(1, *info.shape), strides=(0, *info.strides)) if packed else info
